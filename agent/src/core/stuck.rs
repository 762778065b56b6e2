//! Evidence of connections whose requests fail, and of others to the same service that do better.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use tuplewatch_common::address::FourTuple;

use super::observation::address;

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

/// The command that closes the socket with these ends, to be run in its network namespace.
#[must_use]
pub fn close_command(local: SocketAddr, peer: SocketAddr) -> String {
    let host = |address: IpAddr| match address {
        IpAddr::V4(v4) => v4.to_string(),
        IpAddr::V6(v6) => format!("'[{v6}]'"),
    };
    format!(
        "ss -K dst {} dport = {} src {} sport = {}",
        host(peer.ip()),
        peer.port(),
        host(local.ip()),
        local.port()
    )
}

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

/// `192.0.2.1:40000 → 203.0.113.10:80`.
#[must_use]
pub fn ends(client: SocketAddr, server: SocketAddr) -> String {
    format!("{client} → {server}")
}

/// A connection whose requests fail.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StuckConnection {
    /// Who sends the requests.
    #[serde(rename = "client.address")]
    pub client_address: IpAddr,
    /// From which port.
    #[serde(rename = "client.port")]
    pub client_port: u16,
    /// Who answers them.
    #[serde(rename = "server.address")]
    pub server_address: IpAddr,
    /// On which port.
    #[serde(rename = "server.port")]
    pub server_port: u16,
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
        self.close = (self.became == Became::Failing).then(|| {
            close_command(
                SocketAddr::new(self.client_address, self.client_port),
                SocketAddr::new(self.server_address, self.server_port),
            )
        });
        self
    }

    /// The connection as the tables have it.
    #[must_use]
    pub fn tuple(&self) -> FourTuple {
        FourTuple {
            initiator: address(self.client_address),
            responder: address(self.server_address),
            initiator_port: self.client_port,
            responder_port: self.server_port,
            pad: 0,
        }
    }

    /// `192.0.2.1:40000 → 203.0.113.10:80`.
    #[must_use]
    pub fn ends(&self) -> String {
        ends(
            SocketAddr::new(self.client_address, self.client_port),
            SocketAddr::new(self.server_address, self.server_port),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_names_one_socket() {
        let connection = StuckConnection {
            client_address: "192.0.2.1".parse().unwrap(),
            client_port: 40_000,
            server_address: "203.0.113.10".parse().unwrap(),
            server_port: 80,
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
        assert_eq!(
            connection.close.as_deref(),
            Some("ss -K dst 203.0.113.10 dport = 80 src 192.0.2.1 sport = 40000")
        );
        connection.server_address = "2001:db8::10".parse().unwrap();
        let mut connection = connection.with_command();
        let command = connection.close.clone().unwrap();
        assert!(command.starts_with("ss -K dst '[2001:db8::10]' dport = 80"));
        connection.became = Became::Closed;
        let connection = connection.with_command();
        assert_eq!(connection.close, None);
        assert_eq!(
            connection.ends(),
            "192.0.2.1:40000 → [2001:db8::10]:80".to_owned()
        );
    }
}
