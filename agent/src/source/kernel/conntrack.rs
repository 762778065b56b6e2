//! What is behind connections that this host translates: one question to conntrack, when a finding needs
//! to know who opens them (`nfnetlink_conntrack.h`; CAP_NET_ADMIN).
//!
//! The packets on the wire have the addresses after masquerade or a service's translation, the sockets
//! those before. The kernel is asked for the entries whose answers come from the responder to the
//! translated address, whatever their ports.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::Path,
};

use rustix::net::{SocketFlags, netlink::NETFILTER};
use tuplewatch_common::address::{Address, v4_mapped};

use crate::{
    core::observation::{Space3, ip},
    kernel_facts::interfaces::netlink::{Attributes, Socket},
};

/// `NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_GET`.
const GET: u16 = 1 << 8 | 1;
/// A mark of attributes that contain others.
const NESTED: u16 = 1 << 15;
/// `CTA_TUPLE_ORIG`: the direction of the first packet.
const ORIGINAL: u16 = 1;
/// `CTA_TUPLE_REPLY`: that of its answers.
const REPLY: u16 = 2;
/// `CTA_FILTER` (5.8).
const FILTER: u16 = 25;
/// `CTA_TUPLE_IP`.
const TUPLE_IP: u16 = 1;
/// `CTA_TUPLE_PROTO`.
const TUPLE_PROTO: u16 = 2;
/// `CTA_PROTO_NUM`.
const NUMBER: u16 = 1;
/// `CTA_PROTO_SRC_PORT`.
const SOURCE_PORT: u16 = 2;
/// `CTA_PROTO_DST_PORT`.
const TARGET_PORT: u16 = 3;
/// `CTA_FILTER_REPLY_FLAGS`.
const REPLY_FLAGS: u16 = 2;
/// `CTA_FILTER_FLAG(CTA_IP_SRC)`, `CTA_IP_DST`, `CTA_PROTO_NUM` and `CTA_PROTO_SRC_PORT`.
const BY_ENDS: u32 = 1 | 1 << 1 | 1 << 3 | 1 << 4;
const TCP: u8 = 6;
/// Different originals of one port space that are kept: pods that share an address.
const MOST: usize = 256;

/// The port spaces before translation, by those on the wire that are asked for. Empty where nothing is
/// translated, or where conntrack cannot be asked.
///
/// # Errors
/// The error of a system call.
pub fn originals(wanted: &[Space3]) -> io::Result<BTreeMap<Space3, BTreeSet<Space3>>> {
    let mut found = BTreeMap::new();
    if wanted.is_empty() || !is_in_use() {
        return Ok(found);
    }
    let mut socket = Socket::open_for(Some(NETFILTER), SocketFlags::empty())?;
    for wire in wanted {
        let originals: &mut BTreeSet<Space3> = found.entry(*wire).or_default();
        socket.dump_of(GET, &question(wire), |message| {
            if let Some(original) = original(message, wire)
                && original != *wire
                && originals.len() < MOST
            {
                originals.insert(original);
            }
        })?;
    }
    Ok(found)
}

/// Connections are tracked here, and asking loads no module: nothing is to be changed on the host.
fn is_in_use() -> bool {
    let count = fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count");
    let tracked = count.is_ok_and(|n| n.trim() != "0");
    let modules = Path::new("/sys/module");
    // A loadable module has a state; what is built in has none.
    let is_loadable = modules.join("nf_conntrack/initstate").exists();
    tracked && (!is_loadable || modules.join("nf_conntrack_netlink").exists())
}

/// The fixed part of a dump request, `struct nfgenmsg`, and the filter. Kernels before 5.8 do not know the
/// filter and tell everything, so each answer is looked at all the same.
fn question(wire: &Space3) -> Vec<u8> {
    let (family, from, to, [source, target]) = match (ip(&wire.responder), ip(&wire.initiator)) {
        (std::net::IpAddr::V4(from), std::net::IpAddr::V4(to)) => (
            libc::AF_INET,
            from.octets().to_vec(),
            to.octets().to_vec(),
            [1, 2],
        ),
        _ => (
            libc::AF_INET6,
            wire.responder.to_vec(),
            wire.initiator.to_vec(),
            [3, 4],
        ),
    };
    let addresses = [attribute(source, &from), attribute(target, &to)].concat();
    let ports = [
        attribute(NUMBER, &[TCP]),
        attribute(SOURCE_PORT, &wire.responder_port.to_be_bytes()),
    ]
    .concat();
    let tuple = [
        attribute(TUPLE_IP | NESTED, &addresses),
        attribute(TUPLE_PROTO | NESTED, &ports),
    ]
    .concat();
    let mut bytes = vec![u8::try_from(family).unwrap_or_default(), 0, 0, 0];
    bytes.extend(attribute(REPLY | NESTED, &tuple));
    let flags = attribute(REPLY_FLAGS, &BY_ENDS.to_ne_bytes());
    bytes.extend(attribute(FILTER | NESTED, &flags));
    bytes
}

/// An attribute with its padding (`struct nlattr`).
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(value.len() + 4).unwrap_or(u16::MAX);
    let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// A direction of an entry: source, target, their ports; `None` unless it is TCP.
struct Direction {
    source: Address,
    target: Address,
    source_port: u16,
    target_port: u16,
}

impl Direction {
    fn read(value: &[u8]) -> Option<Self> {
        let mut direction = Self {
            source: [0; 16],
            target: [0; 16],
            source_port: 0,
            target_port: 0,
        };
        let mut is_tcp = false;
        for (kind, value) in Attributes::new(value) {
            for (part, bytes) in Attributes::new(value) {
                let port = || bytes.first_chunk().map(|b| u16::from_be_bytes(*b));
                match (kind & !NESTED, part & !NESTED) {
                    (TUPLE_IP, 1) => direction.source = v4_mapped(*bytes.first_chunk()?),
                    (TUPLE_IP, 2) => direction.target = v4_mapped(*bytes.first_chunk()?),
                    (TUPLE_IP, 3) => direction.source = *bytes.first_chunk()?,
                    (TUPLE_IP, 4) => direction.target = *bytes.first_chunk()?,
                    (TUPLE_PROTO, NUMBER) => is_tcp = bytes.first() == Some(&TCP),
                    (TUPLE_PROTO, SOURCE_PORT) => direction.source_port = port()?,
                    (TUPLE_PROTO, TARGET_PORT) => direction.target_port = port()?,
                    _ => {}
                }
            }
        }
        is_tcp.then_some(direction)
    }
}

/// The port space that the initiator of an entry meant, if its answers are those of `wire`.
fn original(message: &[u8], wire: &Space3) -> Option<Space3> {
    let (mut original, mut reply) = (None, None);
    for (kind, value) in Attributes::new(message.get(4..)?) {
        match kind & !NESTED {
            ORIGINAL => original = Direction::read(value),
            REPLY => reply = Direction::read(value),
            _ => {}
        }
    }
    let (original, reply) = (original?, reply?);
    let is_asked_for = reply.source == wire.responder
        && reply.target == wire.initiator
        && reply.source_port == wire.responder_port;
    is_asked_for.then_some(Space3 {
        initiator: original.source,
        responder: original.target,
        responder_port: original.target_port,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn space(initiator: [u8; 4], responder: [u8; 4], responder_port: u16) -> Space3 {
        Space3 {
            initiator: v4_mapped(initiator),
            responder: v4_mapped(responder),
            responder_port,
        }
    }

    fn direction(
        kind: u16,
        source: [u8; 4],
        target: [u8; 4],
        ports: [u16; 2],
        number: u8,
    ) -> Vec<u8> {
        let addresses = [attribute(1, &source), attribute(2, &target)].concat();
        let ports = [
            attribute(NUMBER, &[number]),
            attribute(SOURCE_PORT, &ports[0].to_be_bytes()),
            attribute(TARGET_PORT, &ports[1].to_be_bytes()),
        ]
        .concat();
        let both = [
            attribute(TUPLE_IP | NESTED, &addresses),
            attribute(TUPLE_PROTO | NESTED, &ports),
        ];
        attribute(kind | NESTED, &both.concat())
    }

    /// A pod's connection to a service, translated at both ends.
    fn entry(number: u8) -> Vec<u8> {
        let mut message = vec![2, 0, 0, 0];
        message.extend(direction(
            ORIGINAL,
            [10, 90, 0, 2],
            [10, 96, 0, 10],
            [40_000, 80],
            number,
        ));
        message.extend(direction(
            REPLY,
            [203, 0, 113, 10],
            [10, 79, 1, 2],
            [8080, 33_333],
            number,
        ));
        message
    }

    #[test]
    fn the_original_of_an_entry_is_found_by_its_answers() {
        let wire = space([10, 79, 1, 2], [203, 0, 113, 10], 8080);
        let pod = space([10, 90, 0, 2], [10, 96, 0, 10], 80);
        assert_eq!(original(&entry(TCP), &wire), Some(pod));
        assert_eq!(original(&entry(17), &wire), None);
        let other = Space3 {
            responder_port: 8081,
            ..wire
        };
        assert_eq!(original(&entry(TCP), &other), None);
        for cut in 0..entry(TCP).len() {
            let _ = original(&entry(TCP)[..cut], &wire);
        }
    }

    #[test]
    fn the_question_names_both_ends_and_the_port() {
        let wire = space([10, 79, 1, 2], [203, 0, 113, 10], 8080);
        let bytes = question(&wire);
        let parts: Vec<_> = Attributes::new(&bytes[4..]).collect();
        assert_eq!((bytes[0], parts.len()), (2, 2));
        let reply = Direction::read(parts[0].1).unwrap();
        assert_eq!(
            (reply.source, reply.target),
            (wire.responder, wire.initiator)
        );
        assert_eq!((reply.source_port, reply.target_port), (8080, 0));
    }
}
