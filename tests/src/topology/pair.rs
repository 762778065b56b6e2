//! Two hosts on one wire.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Deref;

use anyhow::Result;

use super::{Family, SERVICE};
use crate::config::ServeConfig;
use crate::host::Host;
use crate::lab::{Lab, LinkEnd};
use crate::peers::Server;

const CLIENT_V4: Ipv4Addr = Ipv4Addr::new(10, 79, 1, 2);
const SERVER_V4: Ipv4Addr = Ipv4Addr::new(10, 79, 1, 10);
const CLIENT_V6: Ipv6Addr = Ipv6Addr::new(0xfd79, 1, 0, 0, 0, 0, 0, 2);
const SERVER_V6: Ipv6Addr = Ipv6Addr::new(0xfd79, 1, 0, 0, 0, 0, 0, 10);

/// How to build a [`Pair`].
#[derive(Debug, Clone, Copy)]
pub struct PairConfig {
    /// The family of [`Pair::service`]; both families have addresses.
    pub family: Family,
    /// TCP timestamps at both ends.
    pub timestamps: bool,
    /// Leave the offloads on (large skbs), as on real interfaces.
    pub offloads: bool,
}

impl Default for PairConfig {
    fn default() -> Self {
        Self {
            family: Family::V4,
            timestamps: true,
            offloads: true,
        }
    }
}

/// Client 10.79.1.2 / fd79:1::2 and server 10.79.1.10 / fd79:1::a, both with `eth0`.
#[derive(Debug)]
pub struct Pair {
    /// The network; also reached by dereferencing.
    pub lab: Lab,
    /// The client, named `client`.
    pub client: Host,
    /// The server, named `server`.
    pub server: Host,
    config: PairConfig,
}

impl Pair {
    /// Builds the two hosts; TCP port 8080 is counted at both.
    ///
    /// # Errors
    /// If the lab cannot be made.
    pub fn new(config: PairConfig) -> Result<Self> {
        let lab = Lab::new()?;
        let client = lab.host("client")?;
        let server = lab.host("server")?;
        lab.link(
            &LinkEnd::new(&client, "eth0", &["10.79.1.2/24", "fd79:1::2/64"]),
            &LinkEnd::new(&server, "eth0", &["10.79.1.10/24", "fd79:1::a/64"]),
        )?;
        for host in [&client, &server] {
            host.sysctl("net.ipv4.tcp_timestamps", u8::from(config.timestamps))?;
            if !config.offloads {
                host.offloads_off("eth0")?;
            }
            lab.count(host, &[SERVICE])?;
        }
        server.route_via(Some(&Family::V4.nobody_prefix()), CLIENT_V4.into())?;
        server.route_via(Some(&Family::V6.nobody_prefix()), CLIENT_V6.into())?;
        Ok(Self {
            lab,
            client,
            server,
            config,
        })
    }

    /// The client's address.
    #[must_use]
    pub fn client_address(&self) -> IpAddr {
        self.config.family.pick(CLIENT_V4, CLIENT_V6)
    }

    /// The server's address and the counted port.
    #[must_use]
    pub fn service(&self) -> SocketAddr {
        SocketAddr::new(self.config.family.pick(SERVER_V4, SERVER_V6), SERVICE)
    }

    /// Starts a server on [`Pair::service`]: see [`ServeConfig::closing_first`].
    ///
    /// # Errors
    /// If it does not listen.
    pub fn serve(&self) -> Result<Server> {
        self.server
            .serve(&ServeConfig::closing_first(self.service()))
    }
}

impl Deref for Pair {
    type Target = Lab;

    fn deref(&self) -> &Lab {
        &self.lab
    }
}
