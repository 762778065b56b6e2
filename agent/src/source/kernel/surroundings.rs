//! What the host around the port spaces is like: port ranges and counters, by network namespace.

use std::{collections::HashSet, ptr::addr_of};

use tuplewatch_common::address::{FourTuple, Point, PortSpaceKey};

use super::{clock, load::Kernel};
use crate::core::{
    observation::{LookUp, Space3, Translation},
    surroundings::Surroundings,
    time::Moment,
};

/// Opens that wait of which one port space's translation is looked up.
const WAITING: usize = 64;

impl Kernel {
    /// What this host translates these port spaces to or from, as far as it can be looked up now.
    pub fn translations(&mut self, mut wanted: Vec<LookUp>) -> Vec<Translation> {
        for asked in &mut wanted {
            if asked.point == Point::Wire {
                // Those that wait for an answer first: they are what the trouble is about.
                let mut ports = self.waiting_ports(&asked.space);
                ports.append(&mut asked.ports);
                asked.ports = ports;
            }
        }
        self.conntrack.ask(&wanted)
    }

    /// Source ports of opens that wait on the wire. A record of the kernel side has no port but a hash of its
    /// connection, which one of all ports must have.
    fn waiting_ports(&self, space: &Space3) -> Vec<u16> {
        let mut hashes = HashSet::new();
        for index in 0..self.pending.len() {
            let place = self.pending.at(index);
            // SAFETY: a valid place; a place that is free has 0 here.
            if unsafe { addr_of!((*place).handshake.hash).read_volatile() } == 0 {
                continue;
            }
            let handshake = self.pending.get(index).handshake;
            let is_of_it = |key: PortSpaceKey| Space3::from(&key) == *space;
            if self.spaces.key(handshake.space).is_some_and(is_of_it) {
                hashes.insert(handshake.hash);
            }
        }
        if hashes.is_empty() {
            return Vec::new();
        }
        let tuple = |initiator_port| FourTuple {
            initiator: space.initiator,
            responder: space.responder,
            responder_port: space.responder_port,
            initiator_port,
            pad: 0,
        };
        (1..=u16::MAX)
            .filter(|port| hashes.contains(&tuple(*port).hash()))
            .take(WAITING)
            .collect()
    }

    /// What is known now. Counters are read every few seconds only, unless somebody waits for them.
    pub(super) fn surroundings(&mut self, at_once: bool) -> Surroundings {
        self.counters
            .refresh(Moment(clock::monotonic_ns()), at_once);
        let own_netns = self.counters.own();
        let mut known = Surroundings {
            own_netns,
            counters: self.counters.netns.clone(),
            read_at: self.counters.read_at,
            host: self.counters.host,
            local_ports: self.census.local_ports.clone(),
        };
        // Without a census those of this namespace are known all the same.
        if let Some(ports) = clock::local_ports() {
            known.local_ports.insert(own_netns, ports);
        }
        known
    }
}
