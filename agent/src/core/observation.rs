//! What a source tells the core: snapshots of counters, and single events.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use tuplewatch_common::{
    address::{Address, Point, PortSpaceKey, Role},
    conversation::Conversation,
    http::Balancer,
    record::{CensusRow, Global, Opener, OpenerKey, PortSpace},
};

use super::{
    idle::IdleNews,
    stalled::{Recovered, Stalled},
    surroundings::Surroundings,
    suspect::Answers,
    time::Moment,
};

pub use tuplewatch_common::record::{Event, EventKind};

/// Everything a source counts, at one moment. Counters are totals since the source began.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// When.
    pub now: Moment,
    /// How long it took: the counters may be so much older than `now`, since a source can be stopped on its way.
    pub took: Duration,
    /// Counters by port space, role and observation point.
    pub spaces: Vec<(PortSpaceKey, PortSpace)>,
    /// The rows of a census, if one was finished since the last snapshot.
    pub census: Option<Vec<(PortSpaceKey, CensusRow)>>,
    /// Source ports of handshakes completed since the last snapshot, as far as known; a port may be
    /// told again.
    pub ports: Vec<(PortSpaceKey, Vec<u16>)>,
    /// HTTP/1 conversations with news since the last snapshot.
    pub talks: Vec<Talk>,
    /// All connections that make no progress now.
    pub stalled: Vec<Stalled>,
    /// Those of them that got something through since the last snapshot, and those that stood still meanwhile
    /// and do no more.
    pub recovered: Vec<Recovered>,
    /// Connections that woke after an idle time since the last snapshot.
    pub idle: IdleNews,
    /// Responses that cannot be read, of connections with news since the last snapshot.
    pub answers: Vec<Answers>,
    /// Who opens connections.
    pub openers: Vec<(OpenerKey, Opener)>,
    /// What is counted once per host, by [`Global`].
    pub globals: [u64; Global::COUNT as usize],
    /// What [`super::engine::Engine::wanted`] asked for, as far as it could be looked up.
    pub translations: Vec<Translation>,
    /// What is known of the host around them.
    pub surroundings: Surroundings,
}

/// A port space of which the core wants to know what this host translates it to or from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LookUp {
    /// The port space.
    pub space: Space3,
    /// Where it was seen: on the wire it is asked what it was before translation, at the sockets what it
    /// becomes.
    pub point: Point,
    /// Some source ports of its connections, latest first: to look one up costs next to nothing, to look for
    /// all of a port space takes a pass through the host's table.
    pub ports: Vec<u16>,
}

/// The answer to a [`LookUp`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Translation {
    /// The port space asked for.
    pub space: Space3,
    /// Where it was seen.
    pub point: Point,
    /// What it is at the other point; empty where nothing is translated.
    pub others: BTreeSet<Space3>,
}

/// An HTTP/1 conversation as it stands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Talk {
    /// What was counted.
    pub conversation: Conversation,
    /// Whose error page the latest failure was, if it is a known one.
    pub page: Option<&'static Balancer>,
    /// The connection is over.
    pub closed: bool,
}

/// An address as people write it: IPv4 where it is v4-mapped.
#[must_use]
pub fn ip(address: &Address) -> IpAddr {
    Ipv6Addr::from(*address).to_canonical()
}

/// An address as the tables have it.
#[must_use]
pub fn address(ip: IpAddr) -> Address {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// `203.0.113.1 → 203.0.113.10:8080`; `*` stands for an end that the finding is not about.
#[must_use]
pub fn place(key: &PortSpaceKey) -> String {
    const ANY: Address = [0; 16];
    let initiator = match key.initiator {
        ANY => "*".to_owned(),
        initiator => ip(&initiator).to_string(),
    };
    let responder = match (key.responder, key.responder_port) {
        (ANY, 0) => "*".to_owned(),
        (ANY, port) => format!("*:{port}"),
        (responder, port) => SocketAddr::new(ip(&responder), port).to_string(),
    };
    format!("{initiator} → {responder}")
}

/// A port space without role and observation point: what joins the two ends and the two points.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Space3 {
    /// Who sends the SYNs.
    pub initiator: Address,
    /// Who gets them.
    pub responder: Address,
    /// Port of the responder.
    pub responder_port: u16,
}

impl From<&PortSpaceKey> for Space3 {
    fn from(key: &PortSpaceKey) -> Self {
        Self {
            initiator: key.initiator,
            responder: key.responder,
            responder_port: key.responder_port,
        }
    }
}

/// Name of a role in every output.
#[must_use]
pub fn role_name(role: Role) -> &'static str {
    match role {
        Role::Unknown => "unknown",
        Role::Initiator => "initiator",
        Role::Responder => "responder",
    }
}

/// Name of an observation point in every output.
#[must_use]
pub fn point_name(point: Point) -> &'static str {
    match point {
        Point::Socket => "socket",
        Point::Wire => "wire",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places() {
        use tuplewatch_common::address::v4_mapped;
        let key = PortSpaceKey {
            initiator: v4_mapped([192, 0, 2, 1]),
            responder: v4_mapped([203, 0, 113, 10]),
            responder_port: 80,
            ..PortSpaceKey::default()
        };
        assert_eq!(place(&key), "192.0.2.1 → 203.0.113.10:80");
        let source = PortSpaceKey {
            responder: [0; 16],
            responder_port: 0,
            ..key
        };
        assert_eq!(place(&source), "192.0.2.1 → *");
        let flood = PortSpaceKey {
            initiator: [0; 16],
            ..key
        };
        assert_eq!(place(&flood), "* → 203.0.113.10:80");
    }
}
