//! What really happened, counted without the agent.
//!
//! Packets are counted by nftables in each end host: before routing on the way in, after routing on
//! the way out, on every interface but loopback, restricted to the service ports. Repeats, distinct
//! ports and the answers to SYNs come from dynamic sets. The kernel's own counters and the sampled
//! TIME_WAIT peak stand beside them.
//!
//! A SYN is "open" at a host from the moment it passes until the SYN-ACK, the bare ACK or the RST
//! for the same four-tuple passes in the other direction; so one SYN can account for one bare ACK. On a slow machine
//! it is sent again before its answer has come: then several are open, and each bare ACK answers one of them. A SYN
//! that comes again after its SYN-ACK is a late duplicate: what answers it acknowledges it. A RST of the one who sent
//! the SYN answers the bare ACK whose number it has, and only the first one does.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::iter::{once, repeat};
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::host::Host;
use crate::procnet::NetCounters;
use crate::sampler::Sampled;

/// Elements a set can hold: more than the largest flood of the tests (100,000 SYNs).
const SET_SIZE: u32 = 130_000;
/// Elements that the sets of four-tuples with several open SYNs can hold.
const SMALL_SET_SIZE: u32 = 4_000;
/// How often the kernel looks for elements whose time is over, which count for nothing until then. By default it walks
/// all places of all these sets once a second, which keeps an emulated machine busy with nothing else.
const GC_INTERVAL: &str = "10m";
/// How many SYNs on one four-tuple can be open at once: there is a set for each, as an element of a set cannot count
/// downwards.
const OPEN: usize = 5;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Packets from and to the service ports of one host, IPv4 and IPv6 together.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            const NAMES: &[&str] = &[$(stringify!($name)),*];

            fn set(&mut self, name: &str, value: u64) {
                match name {
                    $(stringify!($name) => self.$name = value,)*
                    _ => {}
                }
            }

            /// The difference to an earlier reading.
            #[must_use]
            pub fn since(&self, earlier: &Self) -> Self {
                Self { $($name: self.$name - earlier.$name,)* }
            }

            /// The sum with another host's counters.
            #[must_use]
            pub fn plus(&self, other: &Self) -> Self {
                Self { $($name: self.$name + other.$name,)* }
            }
        }
    };
}

impl Counters {
    /// SYNs that came in and were refused by a bare ACK.
    #[must_use]
    pub fn refused_in(&self) -> u64 {
        self.bareack_to_syn_out - self.bareack_to_duplicate_out
    }

    /// SYNs sent that were refused by a bare ACK.
    #[must_use]
    pub fn refused_out(&self) -> u64 {
        self.bareack_to_syn_in - self.bareack_to_duplicate_in
    }
}

counters! {
    /// SYNs (without ACK) that came in.
    syn_in,
    /// SYNs sent.
    syn_out,
    /// SYN-ACKs that came in.
    synack_in,
    /// SYN-ACKs sent.
    synack_out,
    /// ACKs without SYN, FIN, RST and PSH that came in as the answer to a SYN sent.
    bareack_to_syn_in,
    /// The same, sent as the answer to a SYN that came in.
    bareack_to_syn_out,
    /// Those of them that answered a late duplicate.
    bareack_to_duplicate_in,
    /// The same, sent.
    bareack_to_duplicate_out,
    /// RSTs that came in to answer a bare ACK, or a SYN that had no other answer.
    rst_to_syn_in,
    /// The same, sent.
    rst_to_syn_out,
    /// All RSTs that came in.
    rst_in,
    /// All RSTs sent.
    rst_out,
    /// Segments with FIN that came in.
    fin_in,
    /// Segments with FIN sent.
    fin_out,
    /// All TCP packets that came in.
    tcp_in,
    /// All TCP packets sent.
    tcp_out,
    /// SYNs that came in with a sequence number that the same address has already used, on whatever
    /// source port: retransmits, also those that a NAT moved to another port.
    syn_repeat_in,
    /// The same, sent.
    syn_repeat_out,
    /// SYNs that came in with an address, port and sequence number seen before.
    syn_repeat_same_port_in,
    /// The same, sent.
    syn_repeat_same_port_out,
}

/// Remote address and local port of TIME_WAIT sockets: at a server, client address and service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TimeWaitKey {
    /// The other end's address.
    pub remote: IpAddr,
    /// The port on this host.
    pub local_port: u16,
}

/// TIME_WAIT sockets at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TimeWaitSample {
    /// Time since the lab was made, see [`crate::Lab::age`].
    pub at: Duration,
    /// How many per remote address.
    pub by_remote: BTreeMap<IpAddr, usize>,
}

/// What happened at one host.
#[derive(Debug, Clone, Default)]
pub struct HostTruth {
    /// Packets, by nftables.
    pub counters: Counters,
    /// `snmp` and `netstat` of the namespace since it was made, e.g. `TcpExtTCPSynRetrans`.
    pub kernel: NetCounters,
    /// Source ports of the SYNs that came in, by source address.
    pub source_ports_in: BTreeMap<IpAddr, BTreeSet<u16>>,
    /// Source ports of the SYNs sent, by source address.
    pub source_ports_out: BTreeMap<IpAddr, BTreeSet<u16>>,
    /// The most TIME_WAIT sockets seen at once per remote address, sampled five times a second.
    pub time_wait_peak: BTreeMap<IpAddr, usize>,
    /// The same per remote address and local port.
    pub time_wait_peak_by_service: BTreeMap<TimeWaitKey, usize>,
    /// The samples behind the peaks.
    pub time_wait_samples: Vec<TimeWaitSample>,
}

/// What happened in a lab, by host name.
#[derive(Debug, Clone, Default)]
pub struct Truth {
    /// The counted hosts.
    pub hosts: BTreeMap<String, HostTruth>,
}

impl Truth {
    /// The truth of one host.
    ///
    /// # Panics
    /// If the lab counts no host of this name.
    #[must_use]
    #[track_caller]
    pub fn host(&self, name: &str) -> &HostTruth {
        let names = self.hosts.keys();
        self.hosts
            .get(name)
            .unwrap_or_else(|| panic!("no host {name:?} is counted, but {names:?}"))
    }

    /// The counters of several hosts added up, e.g. of all clients.
    ///
    /// # Panics
    /// If the lab does not count one of them.
    #[must_use]
    #[track_caller]
    pub fn sum(&self, names: &[&str]) -> Counters {
        names.iter().fold(Counters::default(), |sum, name| {
            sum.plus(&self.host(name).counters)
        })
    }

    /// A kernel counter added up over several hosts.
    ///
    /// # Panics
    /// If the lab does not count one of them.
    #[must_use]
    #[track_caller]
    pub fn kernel_sum(&self, names: &[&str], counter: &str) -> i64 {
        names
            .iter()
            .map(|name| self.host(name).kernel.get(counter))
            .sum()
    }
}

impl HostTruth {
    pub(crate) fn read(host: &Host, sampled: Sampled) -> Result<Self> {
        let mut kernel = host.snmp()?;
        kernel.merge(host.netstat()?);
        Ok(Self {
            counters: read_counters(host)?,
            kernel,
            source_ports_in: read_ports(host, "in")?,
            source_ports_out: read_ports(host, "out")?,
            time_wait_peak: sampled.peak,
            time_wait_peak_by_service: sampled.peak_by_service,
            time_wait_samples: sampled.samples,
        })
    }

    /// How many different source ports SYNs came in with, from one address.
    #[must_use]
    pub fn distinct_ports_in(&self, from: IpAddr) -> usize {
        self.source_ports_in.get(&from).map_or(0, BTreeSet::len)
    }

    /// How many different source ports SYNs were sent with, from one address.
    #[must_use]
    pub fn distinct_ports_out(&self, from: IpAddr) -> usize {
        self.source_ports_out.get(&from).map_or(0, BTreeSet::len)
    }
}

/// Puts the counting rules into a host.
pub(crate) fn install(host: &Host, services: &[u16]) -> Result<()> {
    host.nft(&rules(services))
        .with_context(|| format!("{}: installing the counters", host.name()))
}

fn rules(services: &[u16]) -> String {
    let ports = services
        .iter()
        .map(u16::to_string)
        .collect::<Vec<_>>()
        .join(", ");
    let mut text = format!(
        "table inet truth {{\n  set services {{ type inet_service; elements = {{ {ports} }}; }}\n"
    );
    for name in Counters::NAMES {
        let _ = writeln!(text, "  counter {name} {{}}");
    }
    for (ip, family) in [("ip", "4"), ("ip6", "6")] {
        for direction in ["in", "out"] {
            text += &sets(ip, family, direction);
        }
        for direction in ["in", "out"] {
            text += &chains(ip, family, direction);
        }
    }
    // Before everything else on the way in, after everything (source NAT too) on the way out.
    for (name, hook, priority, lo, direction) in [
        ("arriving", "prerouting", -350, "iifname", "in"),
        ("leaving", "postrouting", 350, "oifname", "out"),
    ] {
        let _ = writeln!(
            text,
            "  chain {name} {{ type filter hook {hook} priority {priority};"
        );
        for (protocol, family) in [("ipv4", "4"), ("ipv6", "6")] {
            let this = format!("{lo} != \"lo\" meta nfproto {protocol}");
            let _ = writeln!(
                text,
                "    {this} tcp dport @services jump to_service{family}_{direction};"
            );
            let _ = writeln!(
                text,
                "    {this} tcp sport @services jump from_service{family}_{direction};"
            );
        }
        text += "  }\n";
    }
    text + "}\n"
}

/// Sets for SYNs passing in one direction. `open`: waiting for an answer, `open2` and so on: as many of them; `accepted`:
/// answered by a SYN-ACK; `challenged`: by a bare ACK of this number; `isn`, `syn`: to tell repeats; `ports`: distinct
/// source ports.
fn sets(ip: &str, family: &str, direction: &str) -> String {
    let tuple = format!("{ip} saddr . tcp sport . {ip} daddr . tcp dport");
    let mut text = String::new();
    let open = (1..=OPEN).map(open);
    let sizes = once(SET_SIZE).chain(repeat(SMALL_SET_SIZE));
    let open = open.zip(sizes);
    let open = open.map(|(name, size)| (name, tuple.as_str(), Some("3m"), size));
    let others = [
        ("accepted", tuple.as_str(), Some("5m")),
        (
            "challenged", // Of five parts nft 1.0.6 cannot list it.
            &format!("{ip} saddr . tcp sport . tcp dport . tcp sequence"),
            Some("3m"),
        ),
        ("isn", &format!("{ip} saddr . tcp sequence"), Some("5m")),
        (
            "syn",
            &format!("{ip} saddr . tcp sport . tcp sequence"),
            Some("5m"),
        ),
        ("ports", &format!("{ip} saddr . tcp sport"), None),
    ];
    let others = others.map(|(name, key, expiry)| (name.to_owned(), key, expiry, SET_SIZE));
    for (name, key, expiry, size) in open.chain(others) {
        let flags = expiry.map_or_else(
            || "flags dynamic;".to_owned(),
            |time| format!("flags dynamic,timeout; timeout {time}; gc-interval {GC_INTERVAL};"),
        );
        let _ = writeln!(
            text,
            "  set {name}{family}_{direction} {{ typeof {key}; size {size}; {flags} }}"
        );
    }
    text
}

/// Name of the set of four-tuples with at least `count` open SYNs.
fn open(count: usize) -> String {
    if count == 1 {
        "open".to_owned()
    } else {
        format!("open{count}_")
    }
}

/// Chains for packets passing in one direction, to and from the service.
fn chains(ip: &str, family: &str, direction: &str) -> String {
    // An answer passes in the direction opposite to its SYN.
    let asked = if direction == "in" { "out" } else { "in" };
    let forth = format!("{ip} saddr . tcp sport . {ip} daddr . tcp dport");
    let back = format!("{ip} daddr . tcp dport . {ip} saddr . tcp sport");
    let source = format!("{ip} saddr . tcp sport");
    let answer = format!("{source} . tcp dport . tcp sequence");
    let answered = format!("{ip} daddr . tcp dport . tcp sport . tcp ackseq");
    let isn = format!("{ip} saddr . tcp sequence");
    let syn = format!("{source} . tcp sequence");
    let flags = "tcp flags & (fin|syn|rst|ack)";
    let set = |name: &str, direction: &str| format!("@{name}{family}_{direction}");
    let accepted = set("accepted", direction);
    let challenged = set("challenged", direction);
    let asked_accepted = set("accepted", asked);
    let (own_open, asked_open) = (set(&open(1), direction), set(&open(1), asked));
    let more = |direction| (2..=OPEN).rev().map(move |n| set(&open(n), direction));
    // The deepest first: what is looked at has not been changed by this packet yet.
    let mut one_more = String::new();
    let mut one_less = String::new();
    for count in (1..OPEN).rev() {
        let (few, many) = (open(count), open(count + 1));
        let (few, many) = (set(&few, direction), set(&many, direction));
        let _ = writeln!(one_more, "    {forth} {few} add {many} {{ {forth} }}");
    }
    for many in more(asked) {
        let _ = writeln!(
            one_less,
            "    {back} {many} delete {many} {{ {back} }} goto answered{family}_{direction}"
        );
    }
    let delete = |direction, tuple: &str| {
        let sets = more(direction).chain([set(&open(1), direction)]);
        let deleted = sets.map(|set| format!("delete {set} {{ {tuple} }}"));
        deleted.collect::<Vec<_>>().join(" ")
    };
    let new = delete(direction, &forth);
    let done = delete(asked, &back);
    let asked_challenged = set("challenged", asked);
    let isns = set("isn", direction);
    let syns = set("syn", direction);
    let ports = set("ports", direction);
    format!(
        "  chain to_service{family}_{direction} {{
    counter name tcp_{direction}
    tcp flags & fin == fin counter name fin_{direction}
    tcp flags & rst == rst counter name rst_{direction}
    tcp flags & rst == rst {answer} {challenged} counter name rst_to_syn_{direction} delete {challenged} {{ {answer} }}
    {flags} == syn goto syn{family}_{direction}
  }}
  chain syn{family}_{direction} {{
    counter name syn_{direction}
    {isn} {isns} counter name syn_repeat_{direction}
    {syn} {syns} counter name syn_repeat_same_port_{direction}
    {syn} != {syns} delete {accepted} {{ {forth} }} {new}
    add {isns} {{ {isn} }}
    add {syns} {{ {syn} }}
{one_more}    add {own_open} {{ {forth} }}
    add {ports} {{ {source} }}
  }}
  chain from_service{family}_{direction} {{
    counter name tcp_{direction}
    tcp flags & fin == fin counter name fin_{direction}
    tcp flags & rst == rst counter name rst_{direction}
    tcp flags & rst == rst {back} {asked_open} counter name rst_to_syn_{direction} {done}
    {flags} == (syn|ack) counter name synack_{direction} {done} add {asked_accepted} {{ {back} }}
    tcp flags & (fin|syn|rst|psh|ack) == ack {back} {asked_open} goto bareack{family}_{direction}
  }}
  chain bareack{family}_{direction} {{
    counter name bareack_to_syn_{direction}
{one_less}    delete {asked_open} {{ {back} }}
    goto answered{family}_{direction}
  }}
  chain answered{family}_{direction} {{
    {back} {asked_accepted} counter name bareack_to_duplicate_{direction} return
    add {asked_challenged} {{ {answered} }}
  }}
"
    )
}

/// Reads the packet counters of a host.
pub(crate) fn read_counters(host: &Host) -> Result<Counters> {
    let output = host.exec("nft", ["-j", "list", "counters", "table", "inet", "truth"])?;
    let mut counters = Counters::default();
    for item in items(&output.stdout)? {
        let counter = &item["counter"];
        if let (Some(name), Some(packets)) = (counter["name"].as_str(), counter["packets"].as_u64())
        {
            counters.set(name, packets);
        }
    }
    Ok(counters)
}

fn read_ports(host: &Host, direction: &str) -> Result<BTreeMap<IpAddr, BTreeSet<u16>>> {
    let mut ports: BTreeMap<IpAddr, BTreeSet<u16>> = BTreeMap::new();
    for family in ["4", "6"] {
        let name = format!("ports{family}_{direction}");
        // -nn: a port that has a name must not be printed by it.
        let output = host.exec("nft", ["-j", "-nn", "list", "set", "inet", "truth", &name])?;
        for item in items(&output.stdout)? {
            let Some(elements) = item["set"]["elem"].as_array() else {
                continue;
            };
            for element in elements {
                let (Some(address), Some(port)) =
                    (element["concat"][0].as_str(), element["concat"][1].as_u64())
                else {
                    continue;
                };
                let address = address
                    .parse()
                    .with_context(|| format!("address {address:?}"))?;
                ports
                    .entry(address)
                    .or_default()
                    .insert(u16::try_from(port)?);
            }
        }
    }
    Ok(ports)
}

fn items(json: &str) -> Result<Vec<Value>> {
    let value: Value = serde_json::from_str(json).context("reading nft's JSON")?;
    Ok(value["nftables"].as_array().cloned().unwrap_or_default())
}
