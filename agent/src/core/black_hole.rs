//! Evidence of connections that get nothing through any more, and of new ones that do.

use serde::{Deserialize, Serialize};

use super::{
    ends::Ends,
    stalled::{How, Stalled},
    time::Moment,
};

/// Connections of one port space that get nothing through, and new ones meanwhile.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StallEvidence {
    /// Connections that make no progress now.
    pub stalled: u32,
    /// Those whose stall is over, in the same episode: they got through in the end or were closed.
    pub over: u32,
    /// Bytes sent on those that stall and not acknowledged.
    pub unacked_bytes: u64,
    /// Seconds since the first of them began to stall.
    pub longest_seconds: f64,
    /// Opens since the agent saw that.
    pub newer_opens: u64,
    /// … of them those that were established.
    pub newer: u64,
    /// … of them those that make no progress themselves.
    pub newer_stalled: u32,
    /// Seconds since the first of those established.
    pub newer_for_seconds: Option<f64>,
    /// The connections, those that stall for longest first.
    pub connections: Vec<StallConnection>,
    /// What it rests on.
    pub rests_on: String,
}

/// What no finding about stalled connections needs.
pub const RESTS_ON: &str = "acknowledgements only, which TCP shows whatever it carries: TLS, HTTP/2 and gRPC are \
                            judged like plain text";

/// A connection that gets nothing through.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StallConnection {
    /// Its ends.
    #[serde(flatten)]
    pub ends: Ends,
    /// Seconds since it was opened; `null` if it is older than the agent.
    pub age_seconds: Option<f64>,
    /// Seconds since what is not acknowledged was sent first.
    pub stalled_seconds: f64,
    /// Bytes sent and not acknowledged.
    pub unacked_bytes: u32,
    /// Bytes that wait behind them.
    pub waiting_bytes: u32,
    /// Retransmission time-outs in a row.
    pub rtos: u32,
    /// Probes in a row without an answer.
    pub probes: u32,
    /// The peer answers, but with a closed window.
    pub window_closed: bool,
    /// `TCP_USER_TIMEOUT` of the socket in seconds, 0 if it has none; `null` if that is not known.
    pub user_timeout_seconds: Option<f64>,
    /// The process that opened it, if the agent has seen that.
    pub pid: Option<u32>,
    /// Its command name.
    pub command: Option<String>,
    /// It got through in the end, or was closed.
    pub over: bool,
    /// The command that closes its socket, to be run in its network namespace; `null` once it is over.
    pub close: Option<String>,
}

impl StallConnection {
    /// Of a connection as it stands.
    #[must_use]
    pub fn of(stalled: &Stalled, now: Moment, over: bool) -> Self {
        let ends = Ends::of(&stalled.connection);
        Self {
            ends,
            age_seconds: stalled.opened.map(|at| now.since(at).as_secs_f64()),
            stalled_seconds: now.since(stalled.since).as_secs_f64(),
            unacked_bytes: stalled.unacked,
            waiting_bytes: stalled.waiting,
            rtos: stalled.rtos,
            probes: stalled.probes,
            window_closed: stalled.how == How::Closed,
            user_timeout_seconds: stalled
                .settings
                .user_timeout
                .map(|timeout| timeout.as_secs_f64()),
            pid: stalled.process.as_ref().map(|process| process.pid),
            command: stalled.process.as_ref().and_then(|p| p.command.clone()),
            over,
            close: (!over).then(|| ends.close_command(stalled.role)),
        }
    }

    /// `curl[4711]`, if the process is known.
    #[must_use]
    pub fn holder(&self) -> Option<String> {
        let pid = self.pid?;
        Some(match &self.command {
            Some(command) => format!("{command}[{pid}]"),
            None => format!("process {pid}"),
        })
    }
}
