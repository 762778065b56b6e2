//! What the host around the port spaces is like: port ranges and counters, by network namespace.

use std::time::Instant;

use super::{clock, load::Kernel};
use crate::core::surroundings::Surroundings;

impl Kernel {
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
