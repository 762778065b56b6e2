//! What this host translates connections to and from: a question to conntrack, when a finding needs to know
//! who opens them, or whether it is told at the other point (`nfnetlink_conntrack.h`; CAP_NET_ADMIN).
//!
//! The packets on the wire have the addresses after masquerade or a service's translation, the sockets
//! those before. Where source ports are known the kernel is asked for those connections, one look-up in its hash
//! table each; else for all entries of the service, which takes a pass through the table.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs, io,
    net::IpAddr,
    path::Path,
    time::{Duration, Instant},
};

use rustix::net::{SocketFlags, netlink::NETFILTER};
use tracing::debug;
use tuplewatch_common::address::{Address, Point, v4_mapped};

use crate::{
    core::observation::{LookUp, Space3, Translation, ip, point_name},
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
/// `CTA_FILTER_ORIG_FLAGS`.
const ORIGINAL_FLAGS: u16 = 1;
/// `CTA_FILTER_REPLY_FLAGS`.
const REPLY_FLAGS: u16 = 2;
/// `CTA_FILTER_FLAG(CTA_PROTO_NUM)`.
const BY_PROTOCOL: u32 = 1 << 3;
/// `CTA_FILTER_FLAG(CTA_IP_SRC)` and `CTA_PROTO_SRC_PORT`.
const BY_SOURCE: u32 = 1 | 1 << 4;
/// `CTA_FILTER_FLAG(CTA_IP_DST)` and `CTA_PROTO_DST_PORT`.
const BY_TARGET: u32 = 1 << 1 | 1 << 5;
const TCP: u8 = 6;
/// Different port spaces at the other point that are kept: pods that share an address.
const MOST: usize = 256;
/// Time between the begins of two passes through the table, in times of what the latest took: 1 % of a CPU.
const PACE: u32 = 100;

/// Asks conntrack.
#[derive(Debug, Default)]
pub struct Conntrack {
    /// No pass through the table before this.
    not_before: Option<Instant>,
}

impl Conntrack {
    /// What this host translates these port spaces to or from. Nothing where nothing is translated, or
    /// where conntrack cannot be asked; no answer where it would take a pass through the table and the latest was not
    /// long ago.
    pub fn ask(&mut self, wanted: &[LookUp]) -> Vec<Translation> {
        if wanted.is_empty() {
            return Vec::new();
        }
        let answers = if is_in_use() {
            self.look_up(wanted)
        } else {
            Ok(Answers::new())
        };
        let mut answers = answers.unwrap_or_else(|error| {
            debug!("conntrack does not tell what is translated: {error}");
            Answers::new()
        });
        let answers = wanted.iter().enumerate().filter_map(|(n, asked)| {
            // No answer is one too: it is not to be asked for at every look.
            let mut others = answers.remove(&n).unwrap_or(Some(BTreeSet::new()))?;
            others.remove(&asked.space);
            Some(Translation {
                space: asked.space,
                point: asked.point,
                others,
            })
        });
        answers.collect()
    }

    fn look_up(&mut self, wanted: &[LookUp]) -> io::Result<Answers> {
        let mut socket = Socket::open_for(Some(NETFILTER), SocketFlags::empty())?;
        let mut answers = Answers::new();
        let mut unknown: BTreeMap<_, Vec<(usize, &LookUp)>> = BTreeMap::new();
        for (n, asked) in wanted.iter().enumerate() {
            let mut others = BTreeSet::new();
            let mut is_known = false;
            for port in &asked.ports {
                is_known |= socket.get(GET, &question(asked, Some(*port)), |message| {
                    take(&mut others, message, asked);
                })?;
            }
            if is_known {
                debug!(
                    "{}: {} connections looked up",
                    name(asked),
                    asked.ports.len()
                );
                answers.insert(n, Some(others));
            } else {
                let service = (
                    asked.point,
                    asked.space.responder,
                    asked.space.responder_port,
                );
                unknown.entry(service).or_default().push((n, asked));
            }
        }
        for of_service in unknown.into_values() {
            let mut found = self.pass(&mut socket, &of_service)?.map(Vec::into_iter);
            for (n, _) in of_service {
                answers.insert(n, found.as_mut().and_then(Iterator::next));
            }
        }
        Ok(answers)
    }

    /// Looks through the whole table for the connections of one service; `None` if it is too early for that.
    fn pass(
        &mut self,
        socket: &mut Socket,
        wanted: &[(usize, &LookUp)],
    ) -> io::Result<Option<Vec<BTreeSet<Space3>>>> {
        let Some((_, first)) = wanted.first() else {
            return Ok(None);
        };
        if self.not_before.is_some_and(|at| Instant::now() < at) {
            return Ok(None);
        }
        let mut sets = vec![BTreeSet::new(); wanted.len()];
        let began = cpu_time();
        socket.dump_of(GET, &question(first, None), |message| {
            for (others, (_, asked)) in sets.iter_mut().zip(wanted) {
                take(others, message, asked);
            }
        })?;
        let took = cpu_time().saturating_sub(began);
        self.not_before = Some(Instant::now() + took * PACE);
        debug!(
            "{}: a pass for its service, {took:?} of CPU time",
            name(first)
        );
        Ok(Some(sets))
    }
}

/// By the place of a question among those asked: what was found, or nothing if that was not looked for.
type Answers = HashMap<usize, Option<BTreeSet<Space3>>>;

/// CPU time of this thread, the kernel's work for it included.
fn cpu_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    now.try_into().unwrap_or_default()
}

/// A port space, for the log.
fn name(asked: &LookUp) -> String {
    format!(
        "{} → {}:{} at the {}",
        ip(&asked.space.initiator),
        ip(&asked.space.responder),
        asked.space.responder_port,
        point_name(asked.point)
    )
}

fn take(others: &mut BTreeSet<Space3>, message: &[u8], asked: &LookUp) {
    if let Some(other) = other(message, asked)
        && others.len() < MOST
    {
        others.insert(other);
    }
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

/// The fixed part of a request, `struct nfgenmsg`, and the connection with that source port; without one the
/// filter for a dump of all connections to the service. Kernels before 5.8 do not know filters and tell
/// everything, so each answer is looked at all the same.
///
/// Of what was seen on the wire the answers' direction is known, of sockets that of the first packet.
fn question(asked: &LookUp, port: Option<u16>) -> Vec<u8> {
    let space = &asked.space;
    let initiator = port.map(|port| (&space.initiator, port));
    let responder = Some((&space.responder, space.responder_port));
    let (direction, flags, from, to) = match asked.point {
        Point::Wire => (REPLY, REPLY_FLAGS, responder, initiator),
        Point::Socket => (ORIGINAL, ORIGINAL_FLAGS, initiator, responder),
    };
    let (family, [source, target]) = match ip(&space.responder) {
        IpAddr::V4(_) => (libc::AF_INET, [1, 2]),
        IpAddr::V6(_) => (libc::AF_INET6, [3, 4]),
    };
    let (mut addresses, mut ports) = (Vec::new(), attribute(NUMBER, &[TCP]));
    let mut filter = BY_PROTOCOL;
    for (end, address_kind, port_kind, flag) in [
        (from, source, SOURCE_PORT, BY_SOURCE),
        (to, target, TARGET_PORT, BY_TARGET),
    ] {
        let Some((address, port)) = end else { continue };
        let bytes = match ip(address) {
            IpAddr::V4(v4) => v4.octets().to_vec(),
            IpAddr::V6(v6) => v6.octets().to_vec(),
        };
        addresses.extend(attribute(address_kind, &bytes));
        ports.extend(attribute(port_kind, &port.to_be_bytes()));
        filter |= flag;
    }
    let tuple = [
        attribute(TUPLE_IP | NESTED, &addresses),
        attribute(TUPLE_PROTO | NESTED, &ports),
    ]
    .concat();
    let mut bytes = vec![u8::try_from(family).unwrap_or_default(), 0, 0, 0];
    bytes.extend(attribute(direction | NESTED, &tuple));
    if port.is_none() {
        let flags = attribute(flags, &filter.to_ne_bytes());
        bytes.extend(attribute(FILTER | NESTED, &flags));
    }
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

/// What the port space of a look-up is at the other point by this entry, if it is one of its connections.
fn other(message: &[u8], asked: &LookUp) -> Option<Space3> {
    let (mut original, mut reply) = (None, None);
    for (kind, value) in Attributes::new(message.get(4..)?) {
        match kind & !NESTED {
            ORIGINAL => original = Direction::read(value),
            REPLY => reply = Direction::read(value),
            _ => {}
        }
    }
    let (original, reply) = (original?, reply?);
    let at_socket = Space3 {
        initiator: original.source,
        responder: original.target,
        responder_port: original.target_port,
    };
    let on_wire = Space3 {
        initiator: reply.target,
        responder: reply.source,
        responder_port: reply.source_port,
    };
    let (own, other) = match asked.point {
        Point::Wire => (on_wire, at_socket),
        Point::Socket => (at_socket, on_wire),
    };
    (own == asked.space).then_some(other)
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

    fn look_up(point: Point, space: Space3) -> LookUp {
        LookUp {
            space,
            point,
            ports: Vec::new(),
        }
    }

    #[test]
    fn an_entry_joins_the_two_points() {
        let wire = space([10, 79, 1, 2], [203, 0, 113, 10], 8080);
        let pod = space([10, 90, 0, 2], [10, 96, 0, 10], 80);
        let (on_wire, at_socket) = (look_up(Point::Wire, wire), look_up(Point::Socket, pod));
        assert_eq!(other(&entry(TCP), &on_wire), Some(pod));
        assert_eq!(other(&entry(TCP), &at_socket), Some(wire));
        assert_eq!(other(&entry(17), &on_wire), None);
        let elsewhere = Space3 {
            responder_port: 8081,
            ..wire
        };
        assert_eq!(other(&entry(TCP), &look_up(Point::Wire, elsewhere)), None);
        assert_eq!(other(&entry(TCP), &look_up(Point::Socket, wire)), None);
        for cut in 0..entry(TCP).len() {
            let _ = other(&entry(TCP)[..cut], &on_wire);
        }
    }

    #[test]
    fn a_pass_is_for_a_service() {
        let wire = space([10, 79, 1, 2], [203, 0, 113, 10], 8080);
        for (point, ends, ports) in [
            (Point::Wire, [wire.responder, [0; 16]], [8080, 0]),
            (Point::Socket, [[0; 16], wire.responder], [0, 8080]),
        ] {
            let bytes = question(&look_up(point, wire), None);
            let parts: Vec<_> = Attributes::new(&bytes[4..]).collect();
            assert_eq!((bytes[0], parts.len()), (2, 2), "a tuple and a filter");
            let asked = Direction::read(parts[0].1).unwrap();
            assert_eq!([asked.source, asked.target], ends);
            assert_eq!([asked.source_port, asked.target_port], ports);
        }
    }

    #[test]
    fn one_connection_is_asked_for_by_its_whole_tuple() {
        let wire = space([10, 79, 1, 2], [203, 0, 113, 10], 8080);
        let bytes = question(&look_up(Point::Wire, wire), Some(33_333));
        let parts: Vec<_> = Attributes::new(&bytes[4..]).collect();
        assert_eq!(parts.len(), 1, "no filter");
        let asked = Direction::read(parts[0].1).unwrap();
        assert_eq!((asked.source_port, asked.target_port), (8080, 33_333));
    }
}
