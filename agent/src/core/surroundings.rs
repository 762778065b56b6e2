//! What a source knows of the host around the port spaces: local port ranges and counters. It
//! corroborates; no verdict rests on it alone.

use std::collections::BTreeMap;

/// What is known at a moment, by network namespace (inode number).
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// The namespace whose interfaces are watched: port spaces of the wire belong to it.
    pub own_netns: u32,
    /// Source ports that sockets of each namespace can take.
    pub local_ports: BTreeMap<u32, LocalPorts>,
    /// Counters of each namespace, as they were read last.
    pub counters: BTreeMap<u32, NetnsCounters>,
    /// Counters of the host.
    pub host: HostCounters,
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

/// Counters of one namespace since it began (`/proc/PID/net/{netstat,snmp,sockstat}`); `None` where
/// the kernel has no such counter. Names as the kernel has them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NetnsCounters {
    /// `TcpExt: ListenOverflows`: the accept queue was full.
    pub listen_overflows: Option<u64>,
    /// `TcpExt: ListenDrops`: SYNs dropped at a listener for any reason.
    pub listen_drops: Option<u64>,
    /// `TcpExt: TCPReqQFullDrop`: SYN queue full, without cookies.
    pub req_q_full_drop: Option<u64>,
    /// `TcpExt: TCPReqQFullDoCookies`: SYN queue full, answered by cookies.
    pub req_q_full_do_cookies: Option<u64>,
    /// `TcpExt: SyncookiesSent`.
    pub syncookies_sent: Option<u64>,
    /// `TcpExt: TCPSYNChallenge`: SYNs into live connections.
    pub syn_challenge: Option<u64>,
    /// `TcpExt: TCPChallengeACK`.
    pub challenge_ack: Option<u64>,
    /// `TcpExt: TCPTimeWaitOverflow`.
    pub time_wait_overflow: Option<u64>,
    /// `TcpExt: TCPSynRetrans`.
    pub syn_retrans: Option<u64>,
    /// `TcpExt: PAWSPassive`: SYNs dropped by timestamps of a host (`tcp_tw_recycle`).
    pub paws_passive: Option<u64>,
    /// `Tcp: RetransSegs`.
    pub retrans_segs: Option<u64>,
    /// `Tcp: OutSegs`.
    pub out_segs: Option<u64>,
    /// `Tcp: AttemptFails`.
    pub attempt_fails: Option<u64>,
    /// `nf_conntrack_count`.
    pub conntrack_count: Option<u64>,
    /// `nf_conntrack_max`.
    pub conntrack_max: Option<u64>,
    /// `insert_failed` of `/proc/net/stat/nf_conntrack`, all CPUs.
    pub conntrack_insert_failed: Option<u64>,
    /// `drop` of the same.
    pub conntrack_drop: Option<u64>,
}

/// Counters of the host's devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HostCounters {
    /// ENA `conntrack_allowance_exceeded`, all devices.
    pub ena_conntrack_allowance: Option<u64>,
    /// ENA `pps_allowance_exceeded`.
    pub ena_pps_allowance: Option<u64>,
    /// ENA `bw_in_allowance_exceeded` and `bw_out_allowance_exceeded`.
    pub ena_bw_allowance: Option<u64>,
}
