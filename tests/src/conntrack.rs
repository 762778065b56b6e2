//! Fills a host's table of tracked connections (`nfnetlink_conntrack.h`).
//!
//! Its limit belongs to the whole machine and is not changed; but the kernel holds each namespace's own count
//! against it, so that one host of the lab can use its share up and no other one notices.

use std::io;
use std::net::Ipv4Addr;

use anyhow::{Context as _, Result, ensure};
use rustix::net::netlink::{NETFILTER, SocketAddrNetlink};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};

use crate::host::Host;

/// `NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_NEW`.
const NEW: u16 = 1 << 8;
/// `NLM_F_REQUEST | NLM_F_EXCL | NLM_F_CREATE`.
const CREATE: u16 = 1 | 0x200 | 0x400;
const NESTED: u16 = 1 << 15;
/// `CTA_TUPLE_ORIG`, `CTA_TUPLE_REPLY`, `CTA_STATUS`, `CTA_PROTOINFO`, `CTA_TIMEOUT`.
const ORIGINAL: u16 = 1;
const REPLY: u16 = 2;
const STATUS: u16 = 3;
const PROTOINFO: u16 = 4;
const TIMEOUT: u16 = 7;
/// `IPS_SEEN_REPLY | IPS_ASSURED | IPS_CONFIRMED`: the kernel gives up none of these to make room.
const ASSURED: u32 = 1 << 1 | 1 << 2 | 1 << 3;
/// `TCP_CONNTRACK_ESTABLISHED`.
const ESTABLISHED: u8 = 3;
/// Messages sent at once.
const BATCH: u32 = 200;
/// A limit above this would take more memory than a test may: some 320 bytes each.
const MOST: u32 = 1_000_000;

impl Host {
    /// Tracks connections in this host.
    ///
    /// # Errors
    /// If nftables refuses the rule.
    pub fn track_connections(&self) -> Result<()> {
        self.nft(
            "table inet tracked { chain arriving { type filter hook input priority 0; \
             ct state invalid counter; }; }",
        )
    }

    /// How many connections this host tracks, and how many it may.
    ///
    /// # Errors
    /// If the files cannot be read.
    pub fn tracked(&self) -> Result<(u32, u32)> {
        let number = |name: &str| -> Result<u32> {
            let text = self.read_sysctl(&format!("net.netfilter.nf_conntrack_{name}"))?;
            Ok(text.parse()?)
        };
        Ok((number("count")?, number("max")?))
    }

    /// Adds established connections between hosts that do not exist until this many are tracked.
    ///
    /// # Errors
    /// If the kernel refuses, or if there is no room for as many.
    pub fn track(&self, wanted: u32) -> Result<()> {
        let (count, most) = self.tracked()?;
        ensure!(
            most <= MOST,
            "nf_conntrack_max is {most} here: this test would take too much memory"
        );
        let missing = wanted.saturating_sub(count);
        self.in_ns(|| add(missing))?
            .with_context(|| format!("{}: tracking {missing} connections", self.name()))?;
        let (count, _) = self.tracked()?;
        ensure!(
            count >= wanted,
            "{}: {count} of {wanted} connections are tracked",
            self.name()
        );
        Ok(())
    }
}

fn add(connections: u32) -> io::Result<()> {
    let socket = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        Some(NETFILTER),
    )?;
    rustix::net::bind(&socket, &SocketAddrNetlink::new(0, 0))?;
    let mut messages = Vec::new();
    for n in 1..=connections {
        messages.extend(connection(n));
        if n % BATCH == 0 || n == connections {
            rustix::net::send(&socket, &messages, SendFlags::empty())?;
            messages.clear();
        }
    }
    Ok(())
}

/// A request for the connection with that number.
fn connection(number: u32) -> Vec<u8> {
    let client = Ipv4Addr::from(u32::from(Ipv4Addr::new(198, 18, 0, 0)) + (number >> 15));
    let server = Ipv4Addr::new(198, 19, 255, 254);
    let port = 1024 + (number & 0x7fff) as u16;
    let state = attribute(1 | NESTED, &attribute(1, &[ESTABLISHED]));
    let body = [
        vec![2, 0, 0, 0],
        direction(ORIGINAL, client, server, [port, 80]),
        direction(REPLY, server, client, [80, port]),
        attribute(STATUS, &ASSURED.to_be_bytes()),
        attribute(TIMEOUT, &600_u32.to_be_bytes()),
        attribute(PROTOINFO | NESTED, &state),
    ]
    .concat();
    // `struct nlmsghdr`: length, type, flags, sequence number, port.
    let length = u32::try_from(16 + body.len()).unwrap_or_default();
    let mut message = length.to_ne_bytes().to_vec();
    message.extend([NEW, CREATE].into_iter().flat_map(u16::to_ne_bytes));
    message.extend([0; 8]);
    message.extend(body);
    message
}

fn direction(kind: u16, from: Ipv4Addr, to: Ipv4Addr, ports: [u16; 2]) -> Vec<u8> {
    let addresses = [attribute(1, &from.octets()), attribute(2, &to.octets())].concat();
    let protocol = [
        attribute(1, &[6]),
        attribute(2, &ports[0].to_be_bytes()),
        attribute(3, &ports[1].to_be_bytes()),
    ]
    .concat();
    let both = [
        attribute(1 | NESTED, &addresses),
        attribute(2 | NESTED, &protocol),
    ];
    attribute(kind | NESTED, &both.concat())
}

/// An attribute with its padding (`struct nlattr`).
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(value.len() + 4).unwrap_or_default();
    let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}
