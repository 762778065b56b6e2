//! What the host around the port spaces is like: port ranges and counters, by network namespace.

use std::os::unix::fs::MetadataExt as _;

use super::{clock, load::Kernel};
use crate::core::surroundings::Surroundings;

impl Kernel {
    /// What is known now.
    pub(super) fn surroundings(&self) -> Surroundings {
        let own_netns = std::fs::metadata("/proc/thread-self/ns/net")
            .ok()
            .and_then(|m| u32::try_from(m.ino()).ok())
            .unwrap_or(0);
        let mut known = Surroundings {
            own_netns,
            ..Surroundings::default()
        };
        if let Some(ports) = clock::local_ports() {
            known.local_ports.insert(own_netns, ports);
        }
        known
    }
}
