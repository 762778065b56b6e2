//! The incident: clients behind a NAT that gives a source port out again long before the server has
//! forgotten the connection that used it before.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::{Deref, RangeInclusive};
use std::time::Duration;

use anyhow::{Result, ensure};

use super::{Family, SERVICE, loss_rules};
use crate::config::{LoadConfig, ServeConfig};
use crate::host::Host;
use crate::lab::{Lab, LinkEnd};
use crate::peers::{Load, Server};

const NAT_V4: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);
const NAT_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 9, 0, 0, 0, 0, 1);
const SERVER_V4: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 10);
const SERVER_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 9, 0, 0, 0, 0, 0x10);

/// How the NAT picks the next port of its pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allocation {
    /// One after the other (nft `numgen inc`). A port that is still in use is not skipped: that SYN
    /// is dropped, and its repeat gets the next port.
    RoundRobin,
    /// At random; the kernel looks for a free one (nft `fully-random`).
    Random,
}

/// How to build an [`Incident`].
#[derive(Debug, Clone)]
pub struct IncidentConfig {
    /// IPv4 or IPv6.
    pub family: Family,
    /// Client hosts behind the NAT, 1 to 9.
    pub clients: u8,
    /// The NAT's port pool.
    pub pool: RangeInclusive<u16>,
    /// How it is handed out.
    pub allocation: Allocation,
    /// How long the NAT keeps a port after the connection on it has closed.
    pub hold: Duration,
    /// How long the NAT keeps the mapping of a SYN that got no SYN-ACK. Longer than the time between
    /// two SYN retransmits, or a retransmit moves to another port; short enough that abandoned
    /// attempts do not use the pool up.
    pub syn_hold: Duration,
    /// TCP timestamps at clients and server. Neither cures nor causes the incident.
    pub timestamps: bool,
    /// The NAT drops the clients' RSTs: the server keeps its TIME_WAIT, the attempt never heals.
    pub drop_client_rst: bool,
    /// The NAT drops the server's bare ACKs: the client sees silence.
    pub drop_bare_ack: bool,
    /// Per cent of the TCP packets that the NAT drops, each way.
    pub loss_percent: u32,
    /// SYN retransmits by the schedule of kernels up to 6.4 (1, 3, 7 s …) instead of every second.
    /// Then `syn_hold` must be longer than 8 s for a mapping to survive between two SYNs.
    pub classic_syn_timers: bool,
}

impl Default for IncidentConfig {
    /// Recording 01: IPv4, two clients, ports 2048-2247 in turn, 1 s hold, no timestamps, RSTs pass.
    fn default() -> Self {
        Self {
            family: Family::V4,
            clients: 2,
            pool: 2048..=2247,
            allocation: Allocation::RoundRobin,
            hold: Duration::from_secs(1),
            syn_hold: Duration::from_secs(4),
            timestamps: false,
            drop_client_rst: false,
            drop_bare_ack: false,
            loss_percent: 0,
            classic_syn_timers: false,
        }
    }
}

/// What the NAT dropped on purpose or for want of a port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MiddleboxCounters {
    /// RSTs of clients dropped (`drop_client_rst`).
    pub rst_dropped: u64,
    /// Bare ACKs of the server dropped (`drop_bare_ack`).
    pub bareack_dropped: u64,
    /// Packets dropped by `loss_percent`.
    pub lost: u64,
    /// SYNs dropped because the port in turn was taken (conntrack `insert_failed`).
    pub clash: u64,
}

/// Clients 10.79.N.2 (`eth0`), NAT (`nN` to client N, `n0` to the server, 203.0.113.1), server
/// 203.0.113.10:8080 (`eth0`); IPv6 fd79:N::2, 2001:db8:9::1, 2001:db8:9::10. Offloads are off.
///
/// At 40 connections a second a 200-port pool is used up after 5 s; from then on about half of the
/// SYNs are answered by a bare ACK.
#[derive(Debug)]
pub struct Incident {
    /// The network; also reached by dereferencing.
    pub lab: Lab,
    /// The clients, named `client1`, `client2` …
    pub clients: Vec<Host>,
    /// The NAT, named `nat`; not counted.
    pub nat: Host,
    /// The server, named `server`.
    pub server: Host,
    /// What it was built from.
    pub config: IncidentConfig,
}

impl Incident {
    /// Builds the hosts; TCP port 8080 is counted at clients and server.
    ///
    /// # Errors
    /// If the lab cannot be made or the configuration makes no sense.
    pub fn new(config: IncidentConfig) -> Result<Self> {
        ensure!(
            (1..=9).contains(&config.clients),
            "1 to 9 clients, not {}",
            config.clients
        );
        ensure!(!config.pool.is_empty(), "the pool is empty");
        let lab = Lab::new()?;
        let nat = lab.host("nat")?;
        let server = lab.host("server")?;
        lab.link(
            &LinkEnd::new(&server, "eth0", &["203.0.113.10/24", "2001:db8:9::10/64"]),
            &LinkEnd::new(&nat, "n0", &["203.0.113.1/24", "2001:db8:9::1/64"]),
        )?;
        let mut clients = Vec::new();
        for n in 1..=config.clients {
            clients.push(add_client(&lab, &nat, n)?);
        }
        nat.forward()?;
        let incident = Self {
            lab,
            clients,
            nat,
            server,
            config,
        };
        incident.set_up_nat()?;
        incident.set_up_ends()?;
        Ok(incident)
    }

    fn set_up_nat(&self) -> Result<()> {
        let config = &self.config;
        let hold = config.hold.as_secs().max(1);
        let closing = hold.max(5);
        let syn_hold = config.syn_hold.as_secs().max(1);
        for (state, seconds) in [
            ("time_wait", hold),
            ("close", hold),
            ("last_ack", hold),
            ("close_wait", closing),
            ("fin_wait", closing),
            ("syn_sent", syn_hold),
        ] {
            let key = format!("net.netfilter.nf_conntrack_tcp_timeout_{state}");
            self.nat.sysctl(&key, seconds)?;
        }
        self.nat.nft(&self.nat_rules())?;
        self.nat.nft(&self.middlebox_rules())?;
        if config.loss_percent > 0 {
            self.nat.nft(&loss_rules(config.loss_percent))?;
        }
        for n in 0..=config.clients {
            self.nat.offloads_off(&format!("n{n}"))?;
        }
        Ok(())
    }

    fn set_up_ends(&self) -> Result<()> {
        for host in self.clients.iter().chain([&self.server]) {
            host.sysctl("net.ipv4.tcp_timestamps", u8::from(self.config.timestamps))?;
            host.offloads_off("eth0")?;
            self.lab.count(host, &[SERVICE])?;
        }
        if self.config.classic_syn_timers {
            for client in &self.clients {
                client.sysctl("net.ipv4.tcp_syn_linear_timeouts", 0)?;
                client.sysctl("net.ipv4.tcp_syn_retries", 3)?;
            }
        }
        Ok(())
    }

    /// Source NAT of everything that leaves towards the server.
    fn nat_rules(&self) -> String {
        let (low, high) = (*self.config.pool.start(), *self.config.pool.end());
        let (table, address) = match self.config.family {
            Family::V4 => ("ip", NAT_V4.to_string()),
            Family::V6 => ("ip6", format!("[{NAT_V6}]")),
        };
        let port = match self.config.allocation {
            Allocation::Random => format!("{low}-{high} fully-random"),
            Allocation::RoundRobin => {
                let mut map = String::new();
                for (index, port) in (low..=high).enumerate() {
                    let _ = write!(map, "{index} : {port}, ");
                }
                format!("numgen inc mod {} map {{ {map} }}", self.config.pool.len())
            }
        };
        format!(
            "table {table} nat {{ chain leaving {{ type nat hook postrouting priority 100;
               oifname \"n0\" meta l4proto tcp snat to {address}:{port};
             }}; }}\n"
        )
    }

    /// What the box drops on purpose. The bare ACK is told from other ACKs by a set of the SYNs that
    /// left towards the server and have no answer yet.
    fn middlebox_rules(&self) -> String {
        let ip = match self.config.family {
            Family::V4 => "ip",
            Family::V6 => "ip6",
        };
        let forth = format!("{ip} saddr . tcp sport . {ip} daddr . tcp dport");
        let back = format!("{ip} daddr . tcp dport . {ip} saddr . tcp sport");
        let flags = "tcp flags & (fin|syn|rst|ack)";
        let drop_rst = if self.config.drop_client_rst {
            "iifname != \"n0\" tcp flags & rst == rst counter name client_rst_dropped drop"
        } else {
            ""
        };
        let drop_ack = if self.config.drop_bare_ack {
            format!(
                "iifname \"n0\" {flags} == ack {back} @opening counter name bareack_dropped drop"
            )
        } else {
            String::new()
        };
        format!(
            "table inet mb {{
  counter client_rst_dropped {{}}
  counter bareack_dropped {{}}
  set opening {{ typeof {forth}; size 65536; flags dynamic,timeout; timeout 3m; gc-interval 10m; }}
  chain raw {{ type filter hook prerouting priority -310;
    {drop_rst}
    {drop_ack}
    iifname \"n0\" {flags} == (syn|ack) delete @opening {{ {back} }}
  }}
  chain left {{ type filter hook postrouting priority 350;
    oifname \"n0\" {flags} == syn add @opening {{ {forth} }}
  }}
}}
"
        )
    }

    /// The service as the clients address it.
    #[must_use]
    pub fn service(&self) -> SocketAddr {
        SocketAddr::new(self.config.family.pick(SERVER_V4, SERVER_V6), SERVICE)
    }

    /// The address that the server sees all clients come from.
    #[must_use]
    pub fn nat_address(&self) -> IpAddr {
        self.config.family.pick(NAT_V4, NAT_V6)
    }

    /// The own address of a client, counted from 0.
    #[must_use]
    pub fn client_address(&self, index: u8) -> IpAddr {
        self.config.family.pick(
            Ipv4Addr::new(10, 79, index + 1, 2),
            Ipv6Addr::new(0xfd79, u16::from(index) + 1, 0, 0, 0, 0, 0, 2),
        )
    }

    /// The names of the client hosts, for [`crate::truth::Truth::sum`].
    #[must_use]
    pub fn client_names(&self) -> Vec<&str> {
        self.clients.iter().map(Host::name).collect()
    }

    /// Starts a server on [`Incident::service`]: see [`ServeConfig::closing_first`].
    ///
    /// # Errors
    /// If it does not listen.
    pub fn serve(&self) -> Result<Server> {
        self.server
            .serve(&ServeConfig::closing_first(self.service()))
    }

    /// Starts the same load of short connections on every client: `rate` connections per second *per
    /// client* for `time`, with a connect time limit of 5 s.
    ///
    /// # Errors
    /// If one cannot be started.
    pub fn load(&self, rate: f64, time: Duration) -> Result<Vec<Load>> {
        let config = LoadConfig {
            rate,
            seconds: time.as_secs_f64(),
            ..LoadConfig::new(self.service())
        };
        self.clients
            .iter()
            .map(|client| client.load(&config))
            .collect()
    }

    /// What the NAT dropped.
    ///
    /// # Errors
    /// If the counters cannot be read.
    pub fn middlebox(&self) -> Result<MiddleboxCounters> {
        let rules = self.nat.exec("nft", ["-j", "list", "counters"])?.stdout;
        let rules: serde_json::Value = serde_json::from_str(&rules)?;
        let count = |name: &str| {
            rules["nftables"]
                .as_array()
                .into_iter()
                .flatten()
                .find_map(|item| {
                    let counter = &item["counter"];
                    (counter["name"] == name).then(|| counter["packets"].as_u64())?
                })
        };
        let stat = format!("/proc/{}/net/stat/nf_conntrack", self.nat.holder_pid());
        Ok(MiddleboxCounters {
            rst_dropped: count("client_rst_dropped").unwrap_or(0),
            bareack_dropped: count("bareack_dropped").unwrap_or(0),
            lost: count("lost").unwrap_or(0),
            clash: conntrack_stat(&std::fs::read_to_string(stat)?, "insert_failed"),
        })
    }
}

impl Deref for Incident {
    type Target = Lab;

    fn deref(&self) -> &Lab {
        &self.lab
    }
}

fn add_client(lab: &Lab, nat: &Host, n: u8) -> Result<Host> {
    let client = lab.host(&format!("client{n}"))?;
    let own = [format!("10.79.{n}.2/24"), format!("fd79:{n}::2/64")];
    let gateway = [format!("10.79.{n}.1/24"), format!("fd79:{n}::1/64")];
    lab.link(
        &LinkEnd::new(&client, "eth0", &own.each_ref().map(String::as_str)),
        &LinkEnd::new(
            nat,
            &format!("n{n}"),
            &gateway.each_ref().map(String::as_str),
        ),
    )?;
    client.route_via(None, Ipv4Addr::new(10, 79, n, 1).into())?;
    client.route_via(
        None,
        Ipv6Addr::new(0xfd79, u16::from(n), 0, 0, 0, 0, 0, 1).into(),
    )?;
    Ok(client)
}

/// A column of /proc/net/stat/nf_conntrack (hexadecimal, one line per CPU) added up.
fn conntrack_stat(text: &str, name: &str) -> u64 {
    let mut lines = text.lines();
    let Some(column) = lines
        .next()
        .and_then(|names| names.split_whitespace().position(|column| column == name))
    else {
        return 0;
    };
    lines
        .filter_map(|line| line.split_whitespace().nth(column))
        .filter_map(|value| u64::from_str_radix(value, 16).ok())
        .sum()
}

#[cfg(test)]
mod tests {
    use super::conntrack_stat;

    #[test]
    fn the_columns_of_all_cpus_are_added() {
        let text = "entries  insert_failed drop\n00000001  0000000a 00000000\n00000001  00000001 00000000\n";
        assert_eq!(conntrack_stat(text, "insert_failed"), 11);
        assert_eq!(conntrack_stat(text, "missing"), 0);
    }
}
