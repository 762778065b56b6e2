//! What a process holds in the kernel: eBPF programs, maps and links.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result};
use aya::maps::MapInfo;
use aya::programs::{SchedClassifier, TcAttachType, loaded_links, loaded_programs};
use tuplewatch_tests::prelude::*;

/// The numbers that the kernel gave to the eBPF objects of one process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Held {
    pub programs: BTreeSet<u32>,
    pub maps: BTreeSet<u32>,
    pub links: BTreeSet<u32>,
}

impl Held {
    /// What the process holds open now, as its file descriptors say.
    pub fn by(pid: u32) -> Result<Self> {
        let mut held = Self::default();
        let directory = format!("/proc/{pid}/fdinfo");
        for entry in std::fs::read_dir(&directory).with_context(|| directory.clone())? {
            // A descriptor may be closed meanwhile.
            let Ok(text) = std::fs::read_to_string(entry?.path()) else {
                continue;
            };
            let id = |name: &str| {
                text.lines()
                    .find_map(|line| line.strip_prefix(name)?.trim().parse::<u32>().ok())
            };
            // A link's descriptor also names the program.
            if let Some(id) = id("link_id:") {
                held.links.insert(id);
            } else if let Some(id) = id("prog_id:") {
                held.programs.insert(id);
            } else if let Some(id) = id("map_id:") {
                held.maps.insert(id);
            }
        }
        Ok(held)
    }

    /// What of it the kernel still has.
    pub fn left(&self) -> Result<Self> {
        let programs = loaded_programs()
            .filter_map(|info| info.ok().map(|info| info.id()))
            .collect::<BTreeSet<_>>();
        let links = loaded_links()
            .filter_map(|info| info.ok().map(|info| info.id()))
            .collect::<BTreeSet<_>>();
        Ok(Self {
            programs: &self.programs & &programs,
            maps: self
                .maps
                .iter()
                .copied()
                .filter(|id| MapInfo::from_id(*id).is_ok())
                .collect(),
            links: &self.links & &links,
        })
    }

    /// The kernel frees them some time after the last descriptor is closed.
    pub fn is_gone(&self) -> bool {
        self.left().is_ok_and(|left| left == Self::default())
    }

    /// How many entries a hash map of the process has.
    pub fn entries(&self, map: &str) -> Result<usize> {
        let info = self
            .maps
            .iter()
            .filter_map(|id| MapInfo::from_id(*id).ok())
            .find(|info| info.name_as_str() == Some(map))
            .with_context(|| format!("no map {map}"))?;
        count(&info)
    }
}

/// `BPF_MAP_GET_NEXT_KEY` (include/uapi/linux/bpf.h) and its argument.
const GET_NEXT_KEY: libc::c_long = 4;

#[repr(C)]
struct NextKey {
    map: u32,
    pad: u32,
    key: u64,
    next: u64,
}

/// Walks the keys of a map, whatever they mean.
fn count(info: &MapInfo) -> Result<usize> {
    use std::os::fd::{AsFd as _, AsRawFd as _};
    let map = info.fd().context("opening the map")?;
    let mut key: Option<Vec<u8>> = None;
    let mut entries = 0;
    // Entries that vanish under the walk make it start over.
    while entries <= info.max_entries() as usize {
        let mut next = vec![0u8; info.key_size() as usize];
        let argument = NextKey {
            map: map.as_fd().as_raw_fd().cast_unsigned(),
            pad: 0,
            key: key.as_ref().map_or(0, |key| key.as_ptr().addr() as u64),
            next: next.as_mut_ptr().addr() as u64,
        };
        // SAFETY: both keys have the size that the kernel reads and writes, and live until the call
        // returns; the argument is as the kernel defines it.
        let result = unsafe {
            libc::syscall(
                libc::SYS_bpf,
                GET_NEXT_KEY,
                &raw const argument,
                size_of::<NextKey>(),
            )
        };
        if result != 0 {
            let error = std::io::Error::last_os_error();
            return match error.raw_os_error() {
                Some(libc::ENOENT) => Ok(entries),
                _ => Err(error).context("walking the map"),
            };
        }
        entries += 1;
        key = Some(next);
    }
    Ok(entries)
}

/// Names of the programs on one side of an interface, first to last.
pub fn chain(host: &Host, interface: &str, side: TcAttachType) -> Result<Vec<String>> {
    let (_, programs) = host.in_ns(|| SchedClassifier::query_tcx(interface, side))??;
    Ok(programs
        .iter()
        .map(|program| program.name_as_str().unwrap_or_default().to_owned())
        .collect())
}

/// Whether the agent's programs stand first on both sides of an interface.
pub fn is_hooked(host: &Host, interface: &str) -> bool {
    let sides = [
        (TcAttachType::Ingress, "tuplewatch_in"),
        (TcAttachType::Egress, "tuplewatch_out"),
    ];
    sides.into_iter().all(|(side, name)| {
        chain(host, interface, side)
            .is_ok_and(|programs| programs.first().is_some_and(|first| first == name))
    })
}

/// Resident memory of a process in KiB.
pub fn resident_kib(pid: u32) -> Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    text.lines()
        .find_map(|line| {
            line.strip_prefix("VmRSS:")?
                .trim()
                .strip_suffix(" kB")?
                .parse()
                .ok()
        })
        .context("VmRSS")
}
