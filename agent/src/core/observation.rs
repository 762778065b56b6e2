//! What a source tells the core: snapshots of counters, and single events.

use std::net::{IpAddr, Ipv6Addr};

use tuplewatch_common::{
    address::{Address, Point, PortSpaceKey, Role},
    record::{CensusRow, Global, Opener, OpenerKey, PortSpace},
};

use super::{surroundings::Surroundings, time::Moment};

pub use tuplewatch_common::record::{Event, EventKind};

/// Everything a source counts, at one moment. Counters are totals since the source began.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// When.
    pub now: Moment,
    /// Counters by port space, role and observation point.
    pub spaces: Vec<(PortSpaceKey, PortSpace)>,
    /// The rows of a census, if one was finished since the last snapshot.
    pub census: Option<Vec<(PortSpaceKey, CensusRow)>>,
    /// Source ports of handshakes completed since the last snapshot, as far as known; a port may be
    /// told again.
    pub ports: Vec<(PortSpaceKey, Vec<u16>)>,
    /// Who opens connections.
    pub openers: Vec<(OpenerKey, Opener)>,
    /// What is counted once per host, by [`Global`].
    pub globals: [u64; Global::COUNT as usize],
    /// What is known of the host around them.
    pub surroundings: Surroundings,
}

/// An address as people write it: IPv4 where it is v4-mapped.
#[must_use]
pub fn ip(address: &Address) -> IpAddr {
    Ipv6Addr::from(*address).to_canonical()
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
