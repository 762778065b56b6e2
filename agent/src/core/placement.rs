//! Changes of placement that somebody outside of this host tells of: which endpoints serve a service no more.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use tuplewatch_common::address::{Point, PortSpaceKey, Role};

use super::{ends::Ends, observation::address, time::Moment};

/// A change of placement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The service, as clients call it.
    pub service: SocketAddr,
    /// When it was placed anew.
    pub since: Moment,
    /// Endpoints that serve it no more, where clients connect to these. Empty: they connect to the service
    /// itself, and those that did so before are on what served it then.
    pub left: Vec<SocketAddr>,
}

impl Placement {
    /// Where nothing should ride any more.
    pub fn places(&self) -> impl Iterator<Item = SocketAddr> {
        let service = self.left.is_empty().then_some(self.service);
        self.left.iter().copied().chain(service)
    }

    /// The key of findings about one of [`Placement::places`]: as of all clients of this host.
    #[must_use]
    pub fn key(place: SocketAddr) -> PortSpaceKey {
        PortSpaceKey {
            initiator: [0; 16],
            responder: address(place.ip().to_canonical()),
            responder_port: place.port(),
            role: Role::Initiator as u8,
            point: Point::Wire as u8,
            netns: 0,
        }
    }
}

/// What still rides on a place that a service has left.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PlacementEvidence {
    /// The service, as clients call it.
    pub service: String,
    /// Seconds since it was placed anew.
    pub since_seconds: f64,
    /// Its clients connect to the endpoints themselves: all connections to this one are old.
    pub left: bool,
    /// Old connections whose requests were answered well lately, as far as HTTP/1 is looked at.
    pub answered: u32,
    /// Old connections that were used after a pause and lived; only where all are old.
    pub woken: u64,
    /// Sockets that received something lately, by the latest census; only where all are old.
    pub active: u32,
    /// The connections with HTTP/1, the oldest first.
    pub connections: Vec<RidingConnection>,
}

/// A connection to a place that a service has left, with requests on it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RidingConnection {
    /// Its ends.
    #[serde(flatten)]
    pub ends: Ends,
    /// Seconds since it was opened; `null` if it is older than the agent.
    pub age_seconds: Option<f64>,
    /// Requests seen on it.
    pub requests: u32,
    /// Seconds since the latest one that was answered well.
    pub answered_ago_seconds: f64,
    /// The command that closes its socket, to be run in its network namespace.
    pub close: String,
}
