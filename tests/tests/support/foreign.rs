//! Somebody else's program at an interface.

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use aya::maps::PerCpuArray;
use aya::programs::tc::{self, NlOptions, TcAttachOptions, TcError, TcHandle};
use aya::programs::{LinkOrder, SchedClassifier, TcAttachType};
use aya::{Ebpf, EbpfLoader};
use rustix::io::Errno;
use tuplewatch_tests::prelude::*;

pub const SIDES: [TcAttachType; 2] = [TcAttachType::Ingress, TcAttachType::Egress];

/// A program of somebody else on both sides of an interface; gone when dropped.
pub struct Foreign {
    ebpf: Ebpf,
}

/// The object of the foreign program: `$TUPLEWATCH_FOREIGN_OBJECT`, else where `cargo xtask build`
/// puts it.
fn object() -> Result<Vec<u8>> {
    let path = std::env::var_os("TUPLEWATCH_FOREIGN_OBJECT").map_or_else(
        || {
            PathBuf::from(concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/../target/bpf/tuplewatch-ebpf-foreign.o"
            ))
        },
        PathBuf::from,
    );
    std::fs::read(&path).with_context(|| {
        format!(
            "{} is missing: `cargo xtask build`, or set TUPLEWATCH_FOREIGN_OBJECT",
            path.display()
        )
    })
}

impl Foreign {
    fn attach(host: &Host, how: impl Fn() -> TcAttachOptions + Sync) -> Result<Self> {
        let object = object()?;
        host.in_ns(|| -> Result<Self> {
            // It needs no type of the kernel, and reading them takes a second in a debug build.
            let mut ebpf = EbpfLoader::new().btf(None).load(&object)?;
            let program: &mut SchedClassifier = ebpf
                .program_mut("foreign_ok")
                .context("foreign_ok")?
                .try_into()?;
            program.load()?;
            for side in SIDES {
                let link = program.attach_with_options("eth0", side, how())?;
                if matches!(how(), TcAttachOptions::Netlink(_)) {
                    // It would be detached by its interface's number, in whatever namespace the
                    // dropping thread is in. It goes with the host.
                    std::mem::forget(program.take_link(link)?);
                }
            }
            Ok(Self { ebpf })
        })?
    }

    /// At this place of the tcx chains.
    pub fn tcx(host: &Host, order: impl Fn() -> LinkOrder + Sync) -> Result<Self> {
        Self::attach(host, || TcAttachOptions::TcxOrder(order()))
    }

    /// As filters of a clsact qdisc, as before Linux 6.6. The qdisc may be there: ours need it too where there is no tcx.
    pub fn clsact(host: &Host) -> Result<Self> {
        let is_there = Errno::EXIST.raw_os_error();
        host.in_ns(|| match tc::qdisc_add_clsact("eth0") {
            Err(TcError::NetlinkError(error)) if error.raw_os_error() == Some(is_there) => Ok(()),
            added => added,
        })??;
        Self::filter(host, 1)
    }

    /// As filters of a clsact qdisc that is there, with a handle that is not taken.
    pub fn filter(host: &Host, handle: u16) -> Result<Self> {
        Self::attach(host, || {
            TcAttachOptions::Netlink(NlOptions {
                priority: 1,
                handle: TcHandle::new(0, handle),
                ..NlOptions::default()
            })
        })
    }

    /// How many packets it has seen.
    pub fn runs(&self) -> Result<u64> {
        let map = PerCpuArray::<_, u64>::try_from(self.ebpf.map("RUNS").context("RUNS")?)?;
        Ok(map.get(&0, 0)?.iter().sum())
    }

    /// So many on each side of eth0 by tcx that it takes no more.
    pub fn fill(host: &Host) -> Result<Vec<Self>> {
        // `BPF_MPROG_MAX`, of which the kernel keeps one to itself.
        const MOST: usize = 63;
        let all: Vec<_> = (0..MOST)
            .map(|_| Self::tcx(host, LinkOrder::last))
            .collect::<Result<_>>()?;
        ensure!(Self::tcx(host, LinkOrder::last).is_err(), "one more fits");
        Ok(all)
    }
}
