//! Evidence of connections whose requests fail, and of others to the same service that do better.

use serde::{Deserialize, Serialize};
use tuplewatch_common::address::Role;

use super::ends::Ends;

/// Connections to one service whose requests fail, and what goes well beside them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StuckEvidence {
    /// Connections with enough failures in a row.
    pub stuck: u32,
    /// Failures in a row on all of them together.
    pub failures: u64,
    /// Most failures in a row on one of them.
    pub longest: u32,
    /// Status of the latest failure.
    pub status: u16,
    /// Whose error page it is, where it is a known load balancer's own.
    pub page: Option<String>,
    /// Other connections that were answered well while these failed.
    pub better: u32,
    /// … of them those opened later.
    pub better_newer: u32,
    /// Seconds since the first of those opened later was answered well, with none failing after it.
    pub better_for_seconds: Option<f64>,
    /// Other connections that failed in the same time.
    pub worse: u32,
    /// … of them those opened later.
    pub worse_newer: u32,
    /// Requests of the same kind (method and path) were served on other connections.
    pub same_kind_served: bool,
    /// The connections, those with most failures in a row first.
    pub connections: Vec<StuckConnection>,
    /// What could not be looked at.
    pub unseen: String,
}

/// What no finding about status lines can see.
pub const UNSEEN: &str = "TLS, HTTP/2 and gRPC have no status line that could be read: connections that speak \
                          them are not judged";

/// What became of such a connection.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Became {
    /// Its latest request failed too.
    Failing,
    /// Its latest request was answered well.
    Recovered,
    /// It was closed.
    Closed,
}

/// A connection whose requests fail.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StuckConnection {
    /// Its ends.
    #[serde(flatten)]
    pub ends: Ends,
    /// Seconds since it was opened; `null` if it is older than the agent.
    pub age_seconds: Option<f64>,
    /// Requests seen on it.
    pub requests: u32,
    /// Failed ones among them.
    pub failures: u32,
    /// Failures in a row.
    pub in_a_row: u32,
    /// Seconds from the first to the latest of these.
    pub failing_seconds: f64,
    /// Status of the latest.
    pub status: u16,
    /// What became of it.
    pub became: Became,
    /// The command that closes its socket, to be run in its network namespace; `null` once it is closed
    /// or does well again.
    pub close: Option<String>,
}

impl StuckConnection {
    /// The same with the command that closes its socket.
    #[must_use]
    pub fn with_command(mut self) -> Self {
        self.close =
            (self.became == Became::Failing).then(|| self.ends.close_command(Role::Initiator));
        self
    }
}

#[cfg(test)]
mod tests {
    use tuplewatch_common::address::FourTuple;

    use super::*;

    #[test]
    fn only_one_that_fails_is_to_be_closed() {
        let connection = StuckConnection {
            ends: Ends::of(&FourTuple::default()),
            age_seconds: None,
            requests: 5,
            failures: 5,
            in_a_row: 5,
            failing_seconds: 8.0,
            status: 503,
            became: Became::Failing,
            close: None,
        };
        let mut connection = connection.with_command();
        assert!(connection.close.is_some());
        connection.became = Became::Closed;
        assert_eq!(connection.with_command().close, None);
    }
}
