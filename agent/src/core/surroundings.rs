//! What a source knows of the host around the port spaces: local port ranges and counters. It
//! corroborates; no verdict rests on it alone.

use std::collections::BTreeMap;

use super::{
    counters::{Counters, HostCounters, NetnsCounters},
    egress::Egress,
    observation::Snapshot,
    strangers::Strangers,
    tables::Tables,
    threshold::Thresholds,
    time::Moment,
};

/// What is known at a moment, by network namespace (inode number).
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// The namespace whose interfaces are watched: port spaces of the wire belong to it.
    pub own_netns: u32,
    /// Source ports that sockets of each namespace can take.
    pub local_ports: BTreeMap<u32, LocalPorts>,
    /// Counters of each namespace, as they were read last.
    pub counters: BTreeMap<u32, NetnsCounters>,
    /// When that was; `None` where there are none to read.
    pub read_at: Option<Moment>,
    /// Counters of the host.
    pub host: HostCounters,
}

impl Surroundings {
    /// The counters were read then or later, or there are none to be read.
    #[must_use]
    pub fn is_read_since(&self, moment: Moment) -> bool {
        self.read_at.is_none_or(|read_at| read_at >= moment)
    }
}

/// Source ports of a network namespace (`net.ipv4.*`, `Documentation/networking/ip-sysctl.rst`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LocalPorts {
    /// `ip_local_port_range`, first port.
    pub first: u16,
    /// … last port.
    pub last: u16,
    /// `ip_local_reserved_ports` within the range.
    pub reserved: u32,
    /// `tcp_tw_reuse`: 0 never, 1 everywhere, 2 on loopback only.
    pub tw_reuse: u8,
    /// `tcp_tw_reuse_delay` in milliseconds (1000 where the kernel has none, before 6.14).
    pub tw_reuse_delay_ms: u32,
    /// `tcp_timestamps`: without them no TIME_WAIT is reused.
    pub timestamps: bool,
}

impl LocalPorts {
    /// How many ports there are.
    #[must_use]
    pub fn budget(&self) -> u32 {
        (u32::from(self.last) + 1)
            .saturating_sub(u32::from(self.first))
            .saturating_sub(self.reserved)
    }
}

/// The surroundings as the rules see them: over time, and with the devices in between.
#[derive(Clone, Debug, Default)]
pub struct Around {
    /// What was known last.
    pub latest: Surroundings,
    /// Counters over the window.
    pub counters: Counters,
    /// Devices in between, and what is taken of their ports.
    pub egress: Egress,
    /// SYNs that belong to no port space, and half-open sockets.
    pub strangers: Strangers,
}

impl Around {
    /// Takes a snapshot that `tables` have taken already.
    pub fn take(&mut self, snapshot: &Snapshot, tables: &Tables, thresholds: &Thresholds) {
        let (now, known) = (snapshot.now, &snapshot.surroundings);
        let (window, flood) = (thresholds.window, thresholds.strangers.flood_syns);
        self.latest.clone_from(known);
        self.counters
            .take(now, &known.counters, &known.host, window);
        self.egress.take(now, &snapshot.spaces, tables);
        self.strangers.take(snapshot, window, flood);
    }
}
