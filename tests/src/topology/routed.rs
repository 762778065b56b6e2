//! Client, router, server: the same packets pass three hosts and nobody changes a port.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Deref;

use anyhow::Result;

use super::{Family, SERVICE, loss_rules};
use crate::config::ServeConfig;
use crate::host::Host;
use crate::lab::{Lab, LinkEnd};
use crate::peers::Server;

const CLIENT_V4: Ipv4Addr = Ipv4Addr::new(10, 79, 1, 2);
const SERVER_V4: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 10);
const CLIENT_V6: Ipv6Addr = Ipv6Addr::new(0xfd79, 1, 0, 0, 0, 0, 0, 2);
const SERVER_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 9, 0, 0, 0, 0, 0x10);

/// How to build a [`Routed`].
#[derive(Debug, Clone, Copy)]
pub struct RoutedConfig {
    /// The family of [`Routed::service`]; both families are routed.
    pub family: Family,
    /// TCP timestamps at both ends.
    pub timestamps: bool,
    /// Per cent of the TCP packets that the router drops, each way.
    pub loss_percent: u32,
}

impl Default for RoutedConfig {
    fn default() -> Self {
        Self {
            family: Family::V4,
            timestamps: true,
            loss_percent: 0,
        }
    }
}

/// Client 10.79.1.2 (`eth0`), router (`n1` to the client, `n0` to the server), server 203.0.113.10
/// (`eth0`); IPv6 fd79:1::2 and 2001:db8:9::10.
#[derive(Debug)]
pub struct Routed {
    /// The network; also reached by dereferencing.
    pub lab: Lab,
    /// The client, named `client`.
    pub client: Host,
    /// The router, named `router`.
    pub router: Host,
    /// The server, named `server`.
    pub server: Host,
    config: RoutedConfig,
}

impl Routed {
    /// Builds the three hosts; TCP port 8080 is counted at each (at the router both when a packet
    /// comes in and when it leaves).
    ///
    /// # Errors
    /// If the lab cannot be made.
    pub fn new(config: RoutedConfig) -> Result<Self> {
        let lab = Lab::new()?;
        let client = lab.host("client")?;
        let router = lab.host("router")?;
        let server = lab.host("server")?;
        lab.link(
            &LinkEnd::new(&client, "eth0", &["10.79.1.2/24", "fd79:1::2/64"]),
            &LinkEnd::new(&router, "n1", &["10.79.1.1/24", "fd79:1::1/64"]),
        )?;
        lab.link(
            &LinkEnd::new(&server, "eth0", &["203.0.113.10/24", "2001:db8:9::10/64"]),
            &LinkEnd::new(&router, "n0", &["203.0.113.1/24", "2001:db8:9::1/64"]),
        )?;
        router.forward()?;
        client.route_via(None, Ipv4Addr::new(10, 79, 1, 1).into())?;
        client.route_via(None, Ipv6Addr::new(0xfd79, 1, 0, 0, 0, 0, 0, 1).into())?;
        server.route_via(None, Ipv4Addr::new(203, 0, 113, 1).into())?;
        server.route_via(None, Ipv6Addr::new(0x2001, 0xdb8, 9, 0, 0, 0, 0, 1).into())?;
        router.route_via(Some(&Family::V4.nobody_prefix()), CLIENT_V4.into())?;
        router.route_via(Some(&Family::V6.nobody_prefix()), CLIENT_V6.into())?;
        if config.loss_percent > 0 {
            router.nft(&loss_rules(config.loss_percent))?;
        }
        for host in [&client, &router, &server] {
            host.sysctl("net.ipv4.tcp_timestamps", u8::from(config.timestamps))?;
            lab.count(host, &[SERVICE])?;
        }
        Ok(Self {
            lab,
            client,
            router,
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

    /// Sends new connections to the virtual service 203.0.113.100:8080 to this port of the server from now on;
    /// those that are open stay where they are.
    ///
    /// # Errors
    /// If nftables refuses the rule.
    pub fn route_virtual_to(&self, port: u16) -> Result<()> {
        self.router.nft(&format!(
            "table ip vip {{
  chain arriving {{ type nat hook prerouting priority dstnat; }}
}}
flush chain ip vip arriving
add rule ip vip arriving ip daddr 203.0.113.100 tcp dport 8080 dnat to 203.0.113.10:{port}
"
        ))
    }

    /// Starts a server on [`Routed::service`]: see [`ServeConfig::closing_first`].
    ///
    /// # Errors
    /// If it does not listen.
    pub fn serve(&self) -> Result<Server> {
        self.server
            .serve(&ServeConfig::closing_first(self.service()))
    }
}

impl Deref for Routed {
    type Target = Lab;

    fn deref(&self) -> &Lab {
        &self.lab
    }
}
