//! What the host around the port spaces is like: port ranges and counters, by network namespace.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use tracing::debug;

use super::{clock, conntrack, load::Kernel};
use crate::core::{observation::Space3, surroundings::Surroundings};

impl Kernel {
    /// What is behind port spaces of the wire that this host translates, one answer for each.
    pub fn behind(&mut self, wanted: &[Space3]) -> Vec<(Space3, BTreeSet<Space3>)> {
        let mut found = conntrack::originals(wanted).unwrap_or_else(|error| {
            debug!("conntrack does not tell who is behind a translation: {error}");
            BTreeMap::new()
        });
        // No answer is one too: it is not to be asked for at every look.
        wanted
            .iter()
            .map(|wire| (*wire, found.remove(wire).unwrap_or_default()))
            .collect()
    }

    /// What is known now. Counters are read every few seconds only.
    pub(super) fn surroundings(&mut self) -> Surroundings {
        self.counters.refresh(Instant::now());
        let own_netns = self.counters.own();
        let mut known = Surroundings {
            own_netns,
            counters: self.counters.netns.clone(),
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
