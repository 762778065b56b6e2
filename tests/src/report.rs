//! What the peers say they did: one JSON object on the last line of their standard output.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// The first line of a server, printed when it listens.
pub const LISTENING: &str = r#"{"type":"listening"}"#;

/// How a server fared.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ServeReport {
    /// Its process id.
    pub pid: u32,
    /// Connections accepted.
    pub accepted: u64,
    /// Responses sent.
    pub responses: u64,
    /// Connections that ended before a whole request came, or in an error.
    pub broken: u64,
    /// Connections accepted per client address.
    pub clients: BTreeMap<IpAddr, u64>,
}

/// Latencies in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Latency {
    /// Median.
    pub p50_us: u64,
    /// 99th percentile.
    pub p99_us: u64,
    /// Slowest.
    pub max_us: u64,
}

impl Latency {
    /// Of these durations in microseconds.
    #[must_use]
    pub fn of(mut micros: Vec<u64>) -> Self {
        micros.sort_unstable();
        let Some(&max_us) = micros.last() else {
            return Self::default();
        };
        let at = |percent: usize| micros[(micros.len() - 1) * percent / 100];
        Self {
            p50_us: at(50),
            p99_us: at(99),
            max_us,
        }
    }
}

/// How a load of short connections fared.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LoadReport {
    /// Its process id.
    pub pid: u32,
    /// Connections tried.
    pub attempted: u64,
    /// Connections that got their response.
    pub ok: u64,
    /// Connections that did not, by kind: `app_timeout` (abandoned by the application),
    /// `kernel_timeout`, `refused`, `reset`, `no_port`, `addr_in_use`, `response` (connected, but no
    /// response), `other_<errno>`.
    pub failed: BTreeMap<String, u64>,
    /// Connections established, with or without a response.
    pub connected: u64,
    /// Connections whose SYN was sent more than once, by the sockets' own statistics.
    pub with_syn_retransmits: u64,
    /// SYNs sent again, by the sockets' own statistics.
    pub syn_retransmits: u64,
    /// Time to connect, of the connected ones.
    pub connect: Latency,
    /// How long the whole load took.
    pub seconds: f64,
}

impl LoadReport {
    /// All that failed.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.failed.values().sum()
    }
}

/// One connection of a load, printed with `--events`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ConnectionEvent {
    /// Always `connection`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The client's source port, 0 if it never got one.
    pub local_port: u16,
    /// `ok`, or the kind of failure as in [`LoadReport::failed`].
    pub outcome: String,
    /// Microseconds until connected or failed.
    pub connect_us: u64,
    /// SYNs sent again.
    pub syn_retransmits: u32,
}

/// How a pool fared.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PoolReport {
    /// Its process id.
    pub pid: u32,
    /// Requests sent.
    pub requests: u64,
    /// Responses received.
    pub ok: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Connections opened, re-opened ones included.
    pub connections: u64,
    /// Source ports of the connections on which a request failed.
    pub failed_ports: std::collections::BTreeSet<u16>,
}

/// Connections that were kept open.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct IdleReport {
    /// The process id.
    pub pid: u32,
    /// How many.
    pub connections: u64,
}

/// How the connections from one port fared.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FixedReport {
    /// Its process id.
    pub pid: u32,
    /// Connections tried.
    pub attempted: u64,
    /// Connections that got their response.
    pub ok: u64,
    /// Failures by kind, see [`LoadReport::failed`].
    pub failed: BTreeMap<String, u64>,
    /// Connections dropped without FIN or RST.
    pub abandoned: u64,
    /// SYNs sent again, by the sockets' own statistics.
    pub syn_retransmits: u64,
}

/// What was sent by a raw-SYN peer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RawSynReport {
    /// Its process id.
    pub pid: u32,
    /// SYNs handed to the kernel.
    pub sent: u64,
    /// SYNs the kernel refused to send.
    pub failed: u64,
    /// Different source ports used.
    pub source_ports: u64,
    /// How long it took.
    pub seconds: f64,
}

/// How the late duplicates fared.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LateDupReport {
    /// Its process id.
    pub pid: u32,
    /// Connections opened.
    pub connections: u64,
    /// Copies of SYNs sent.
    pub duplicates: u64,
    /// Requests answered after the copy was sent: the connection survived it.
    pub survived: u64,
}

/// How the Fast Open connections fared.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FastOpenReport {
    /// Its process id.
    pub pid: u32,
    /// Connections tried.
    pub attempted: u64,
    /// Connections that got their response.
    pub ok: u64,
    /// Connections whose SYN carried the request and whose SYN-ACK acknowledged it.
    pub data_in_syn: u64,
}
