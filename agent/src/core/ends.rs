//! The two ends of a connection, as findings name them.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
};

use serde::{Deserialize, Serialize};
use tuplewatch_common::address::{FourTuple, Role};

use super::observation::{address, ip};

/// The two ends of a connection. As text: `192.0.2.1:40000 → 203.0.113.10:80`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ends {
    /// Who opened it.
    #[serde(rename = "client.address")]
    pub client_address: IpAddr,
    /// From which port.
    #[serde(rename = "client.port")]
    pub client_port: u16,
    /// To whom.
    #[serde(rename = "server.address")]
    pub server_address: IpAddr,
    /// On which port.
    #[serde(rename = "server.port")]
    pub server_port: u16,
}

impl Ends {
    /// Of a connection that is named by who opened it.
    #[must_use]
    pub fn of(tuple: &FourTuple) -> Self {
        Self {
            client_address: ip(&tuple.initiator),
            client_port: tuple.initiator_port,
            server_address: ip(&tuple.responder),
            server_port: tuple.responder_port,
        }
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

    /// The command that closes the socket at this host's end, to be run in its network namespace.
    #[must_use]
    pub fn close_command(&self, role: Role) -> String {
        let (mut local, mut peer) = self.sockets();
        if role == Role::Responder {
            std::mem::swap(&mut local, &mut peer);
        }
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

    fn sockets(&self) -> (SocketAddr, SocketAddr) {
        (
            SocketAddr::new(self.client_address, self.client_port),
            SocketAddr::new(self.server_address, self.server_port),
        )
    }
}

impl fmt::Display for Ends {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (client, server) = self.sockets();
        write!(f, "{client} → {server}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_names_one_socket() {
        let mut ends = Ends {
            client_address: "192.0.2.1".parse().unwrap(),
            client_port: 40_000,
            server_address: "203.0.113.10".parse().unwrap(),
            server_port: 80,
        };
        assert_eq!(
            ends.close_command(Role::Initiator),
            "ss -K dst 203.0.113.10 dport = 80 src 192.0.2.1 sport = 40000"
        );
        assert_eq!(
            ends.close_command(Role::Responder),
            "ss -K dst 192.0.2.1 dport = 40000 src 203.0.113.10 sport = 80"
        );
        ends.server_address = "2001:db8::10".parse().unwrap();
        let command = ends.close_command(Role::Initiator);
        assert!(command.starts_with("ss -K dst '[2001:db8::10]' dport = 80"));
        assert_eq!(ends.to_string(), "192.0.2.1:40000 → [2001:db8::10]:80");
        assert_eq!(Ends::of(&ends.tuple()), ends);
    }
}
