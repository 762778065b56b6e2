//! Source ports of every network namespace of the host.

use std::collections::BTreeMap;

use aya::{
    TestRun as _,
    maps::Array,
    programs::{RawTracePoint, RawTracePointRunOptions},
};
use tuplewatch_common::record::{NetnsPorts, PortBitmap};

use super::load::Kernel;
use crate::core::surroundings::LocalPorts;

/// Namespaces looked at; those beyond have no known budget.
const NAMESPACES: usize = 1024;

/// Numbers of namespaces begin here (`PROC_DYNAMIC_FIRST`, the initial ones just below it:
/// `include/linux/proc_ns.h`).
const FIRST: u32 = 0xefff_fff0;

impl Kernel {
    /// The source ports of each namespace, by its number: one short run of a program for each, in the
    /// order of the kernel's list, which goes round.
    pub(super) fn namespaces(&mut self) -> anyhow::Result<BTreeMap<u32, LocalPorts>> {
        let mut found = BTreeMap::new();
        for (netns, local) in self.in_order()? {
            found.extend(local.map(|local| (netns, local)));
        }
        Ok(found)
    }

    /// The host's own namespace, which stands behind the head of the kernel's list (`init_net`); `None`
    /// where there are too many to tell.
    pub(super) fn hosts_own(&self) -> anyhow::Result<Option<u32>> {
        Ok(behind_head(&self.in_order()?))
    }

    /// The kernel's list from the agent's own namespace on: number and source ports, none for what is
    /// no namespace.
    fn in_order(&self) -> anyhow::Result<Vec<(u32, Option<LocalPorts>)>> {
        let mut all = Vec::new();
        let (mut next, mut first) = (0, None);
        for _ in 0..NAMESPACES {
            let (ports, reserved) = self.namespace(next)?;
            if first == Some(ports.net) {
                break;
            }
            first.get_or_insert(ports.net);
            next = ports.next;
            all.push((ports.netns, local_ports(&ports, &reserved)));
        }
        Ok(all)
    }

    fn namespace(&self, net: u64) -> anyhow::Result<(NetnsPorts, PortBitmap)> {
        let missing = |what| anyhow::anyhow!("the eBPF object has no {what}");
        let program: &RawTracePoint = self
            .ebpf
            .program("census_netns")
            .ok_or_else(|| missing("program census_netns"))?
            .try_into()?;
        let mut options = RawTracePointRunOptions::new();
        options.args[0] = net;
        program.test_run(options)?;
        let map = |name| self.ebpf.map(name).ok_or_else(|| missing(name));
        let ports: Array<_, NetnsPorts> = map("NETNS_PORTS")?.try_into()?;
        let reserved: Array<_, PortBitmap> = map("RESERVED_PORTS")?.try_into()?;
        Ok((ports.get(&0, 0)?, reserved.get(&0, 0)?))
    }
}

/// The namespace that follows the one entry which is none, in a list that goes round.
fn behind_head(list: &[(u32, Option<LocalPorts>)]) -> Option<u32> {
    let head = list.iter().position(|(_, ports)| ports.is_none())?;
    let (netns, ports) = list.get(head + 1).or(list.first())?;
    ports.map(|_| *netns)
}

/// `None` for what is no namespace: the head of the list, or one that was freed meanwhile.
fn local_ports(ports: &NetnsPorts, reserved: &PortBitmap) -> Option<LocalPorts> {
    let (first, last) = (ports.range as u16, (ports.range >> 16) as u16);
    if ports.netns < FIRST || first == 0 || last < first {
        return None;
    }
    let is_reserved = |port: u16| reserved[usize::from(port >> 6)] >> (port & 63) & 1 == 1;
    Some(LocalPorts {
        first,
        last,
        reserved: (first..=last).filter(|port| is_reserved(*port)).count() as u32,
        tw_reuse: ports.tw_reuse,
        tw_reuse_delay_ms: ports.tw_reuse_delay_ms,
        timestamps: ports.timestamps != 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_own_namespace_is_behind_the_head() {
        let ports = LocalPorts {
            first: 32_768,
            last: 60_999,
            reserved: 0,
            tw_reuse: 2,
            tw_reuse_delay_ms: 1000,
            timestamps: true,
        };
        let some = |netns| (netns, Some(ports));
        let list = [some(12), some(13), (0, None), some(10), some(11)];
        assert_eq!(behind_head(&list), Some(10));
        // The agent is in it.
        assert_eq!(behind_head(&[some(10), some(11), (0, None)]), Some(10));
        assert_eq!(behind_head(&[some(10), some(11)]), None);
        assert_eq!(behind_head(&[]), None);
    }

    #[test]
    fn what_is_no_namespace_is_refused() {
        let ports = NetnsPorts {
            netns: FIRST + 9,
            range: 60_999 << 16 | 32_768,
            tw_reuse: 2,
            timestamps: 1,
            tw_reuse_delay_ms: 1000,
            ..NetnsPorts::default()
        };
        let mut reserved = [0; 1024];
        for port in [32_767u16, 32_768, 60_999, 61_000] {
            reserved[usize::from(port >> 6)] |= 1 << (port & 63);
        }
        let local = local_ports(&ports, &reserved).unwrap();
        assert_eq!((local.budget(), local.reserved), (28_230, 2));
        assert_eq!(
            local_ports(&NetnsPorts { netns: 7, ..ports }, &reserved),
            None
        );
        assert_eq!(
            local_ports(&NetnsPorts { range: 0, ..ports }, &reserved),
            None
        );
    }
}
