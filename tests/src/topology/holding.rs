//! A device that keeps a port for a while after the connection on it has closed, and drops the SYNs
//! that find none: what hardware and the NAT gateways of clouds do.
//!
//! Linux's own NAT gives the port of a closed connection out again at once (`nf_conntrack` drops its
//! TIME_WAIT for a newer SYN), so the ports are held by a set of nftables here.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::ops::{Deref, RangeInclusive};
use std::time::Duration;

use anyhow::{Context as _, Result};

use super::{Incident, IncidentConfig, SERVICE};
use crate::config::ServeConfig;
use crate::peers::Server;

/// How to build a [`Holding`].
#[derive(Debug, Clone)]
pub struct HoldingConfig {
    /// The device's ports for each destination.
    pub pool: RangeInclusive<u16>,
    /// How long it keeps one after close.
    pub hold: Duration,
}

/// An [`Incident`] whose NAT holds ports after close, for each destination, and drops the SYN whose turn
/// meets a port that is held. The server has a second address, 198.51.100.20, whose ports are its own.
#[derive(Debug)]
pub struct Holding {
    /// The network; also reached by dereferencing.
    pub incident: Incident,
}

impl Holding {
    /// Builds the hosts, with one client.
    ///
    /// # Errors
    /// If the lab cannot be made.
    pub fn new(config: &HoldingConfig) -> Result<Self> {
        let incident = Incident::new(IncidentConfig {
            clients: 1,
            pool: config.pool.clone(),
            ..IncidentConfig::default()
        })?;
        incident
            .server
            .ip_batch("address add 198.51.100.20/24 dev eth0\n")?;
        incident
            .nat
            .ip_batch("address add 198.51.100.1/24 dev n0\n")?;
        // A turn of its own for the second destination.
        let mut map = String::new();
        for (index, port) in config.pool.clone().enumerate() {
            let _ = write!(map, "{index} : {port}, ");
        }
        incident.nat.nft(&format!(
            "insert rule ip nat leaving oifname \"n0\" ip daddr 198.51.100.20 meta l4proto tcp snat to \
             203.0.113.1:numgen inc mod {} map {{ {map} }}\n",
            config.pool.len()
        ))?;
        incident.nat.nft(&rules(config.hold))?;
        Ok(Self { incident })
    }

    /// The second destination, behind the same device.
    #[must_use]
    pub fn other(&self) -> SocketAddr {
        SocketAddr::new([198, 51, 100, 20].into(), SERVICE)
    }

    /// Starts a server for both destinations: see [`ServeConfig::closing_first`].
    ///
    /// # Errors
    /// If it does not listen.
    pub fn serve_both(&self) -> Result<Server> {
        let all = SocketAddr::new([0, 0, 0, 0].into(), SERVICE);
        self.server.serve(&ServeConfig::closing_first(all))
    }

    /// SYNs dropped because their port was held.
    ///
    /// # Errors
    /// If the counter cannot be read.
    pub fn dropped(&self) -> Result<u64> {
        let list = ["-j", "list", "counter", "inet", "hold", "dropped"];
        let output = self.nat.exec("nft", list)?.stdout;
        let rules: serde_json::Value = serde_json::from_str(&output)?;
        let items = rules["nftables"].as_array().into_iter().flatten();
        items
            .filter_map(|item| item["counter"]["packets"].as_u64())
            .next()
            .context("no counter `dropped`")
    }
}

/// A FIN of either end begins the hold; a SYN that leaves on a held port is dropped after translation.
fn rules(hold: Duration) -> String {
    let seconds = hold.as_secs().max(1);
    let forth = "ip daddr . tcp dport . tcp sport";
    let back = "ip saddr . tcp sport . tcp dport";
    format!(
        "table inet hold {{
  counter dropped {{}}
  set held {{ typeof {forth}; size 65536; flags dynamic,timeout; timeout {seconds}s; }}
  chain arriving {{ type filter hook prerouting priority -310;
    iifname \"n0\" tcp flags & fin == fin update @held {{ {back} }}
  }}
  chain leaving {{ type filter hook postrouting priority 340;
    oifname \"n0\" tcp flags & fin == fin update @held {{ {forth} }}
    oifname \"n0\" tcp flags & (fin|syn|rst|ack) == syn {forth} @held counter name dropped drop
  }}
}}
"
    )
}

impl Deref for Holding {
    type Target = Incident;

    fn deref(&self) -> &Incident {
        &self.incident
    }
}
