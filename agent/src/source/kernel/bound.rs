//! When the census may not wait: sockets that are bound before connect() may have taken the last ports of
//! their address since the latest pass.
//!
//! A bind() that finds no port leaves no trace that a hook could count without looking at each bind() of the host.
//! But nobody takes a port of that pool unseen: connect() on a bound socket is counted, so what the latest
//! pass found and the opens since are an upper bound of what is taken now.

use std::collections::{BTreeMap, HashMap};

use tuplewatch_common::{
    address::{Address, PortSpaceKey, Role},
    record::CensusRow,
};

use crate::core::surroundings::LocalPorts;

/// A source address of a network namespace.
type Source = (Address, u32);

const fn source(key: &PortSpaceKey) -> Source {
    (key.initiator, key.netns)
}

/// The pools of bound sockets, one for each source address.
#[derive(Default)]
pub struct Pools {
    /// Ports that the latest pass found taken.
    taken: HashMap<Source, u64>,
    /// connect() on bound sockets since then.
    opened: HashMap<Source, u64>,
}

impl Pools {
    /// Takes how many bound sockets were opened since it was told last, by port space.
    pub fn note(&mut self, opens: &[(PortSpaceKey, u64)]) {
        for (key, opens) in opens {
            *self.opened.entry(source(key)).or_default() += opens;
        }
    }

    /// Takes the rows of a pass.
    pub fn counted(&mut self, rows: &[(PortSpaceKey, CensusRow)]) {
        self.opened.clear();
        self.taken.clear();
        let bound = rows
            .iter()
            .filter(|(key, row)| row.bound > 0 && key.role != Role::Responder as u8);
        for (key, row) in bound {
            *self.taken.entry(source(key)).or_default() += u64::from(row.bound);
        }
    }

    /// Of some source address at least this share of the ports may be taken now, and was not at the latest
    /// pass. Always if that pass did not know the namespace.
    pub fn may_be_used_up(&self, ports: &BTreeMap<u32, LocalPorts>, share: f64) -> bool {
        self.opened.iter().any(|(source, opened)| {
            let taken = self.taken.get(source).copied().unwrap_or(0);
            ports.get(&source.1).is_none_or(|local| {
                let near = f64::from(local.budget()) * share;
                (taken as f64) < near && (taken + opened) as f64 >= near
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use tuplewatch_common::address::{Point, v4_mapped};

    use super::*;

    const PORTS: LocalPorts = LocalPorts {
        first: 40_000,
        last: 40_999,
        reserved: 0,
        tw_reuse: 2,
        tw_reuse_delay_ms: 1000,
        timestamps: true,
    };

    fn key(last: u8, port: u16, netns: u32) -> PortSpaceKey {
        PortSpaceKey {
            initiator: v4_mapped([192, 0, 2, last]),
            responder: v4_mapped([203, 0, 113, 10]),
            responder_port: port,
            role: Role::Unknown as u8,
            point: Point::Socket as u8,
            netns,
        }
    }

    const fn row(bound: u32) -> CensusRow {
        CensusRow {
            pass: 1,
            opening: 0,
            established: bound,
            closing: 0,
            time_wait: [0; tuplewatch_common::record::TIME_WAIT_AGES],
            bound,
            waiting: 0,
            unaccepted: 0,
            lively: 0,
            active: 0,
            rested: 0,
            rested_ms: 0,
        }
    }

    fn is_due(pools: &Pools) -> bool {
        pools.may_be_used_up(&BTreeMap::from([(7, PORTS), (8, PORTS)]), 0.9)
    }

    #[test]
    fn what_was_taken_and_what_was_opened_add_up() {
        let mut pools = Pools::default();
        assert!(!is_due(&pools));
        pools.counted(&[(key(1, 80, 7), row(500)), (key(1, 443, 7), row(300))]);
        pools.note(&[(key(1, 80, 7), 60), (key(1, 8080, 7), 39)]);
        assert!(!is_due(&pools), "899 of 1000");
        pools.note(&[(key(1, 80, 7), 1)]);
        assert!(is_due(&pools), "900 of 1000");
        pools.counted(&[(key(1, 80, 7), row(850))]);
        assert!(!is_due(&pools), "the pass has counted");
    }

    #[test]
    fn each_address_has_a_pool_of_its_own() {
        let mut pools = Pools::default();
        pools.counted(&[(key(1, 80, 7), row(500))]);
        pools.note(&[(key(2, 80, 7), 500), (key(1, 80, 8), 500)]);
        assert!(!is_due(&pools));
        pools.note(&[(key(1, 80, 8), 400)]);
        assert!(is_due(&pools));
    }

    #[test]
    fn what_was_used_up_already_needs_no_haste() {
        let mut pools = Pools::default();
        pools.counted(&[(key(1, 80, 7), row(950))]);
        pools.note(&[(key(1, 80, 7), 200)]);
        assert!(!is_due(&pools));
    }

    #[test]
    fn who_accepts_takes_no_ports() {
        let mut pools = Pools::default();
        let accepted = PortSpaceKey {
            role: Role::Responder as u8,
            ..key(1, 80, 7)
        };
        pools.counted(&[(accepted, row(800)), (key(1, 80, 7), row(0))]);
        pools.note(&[(key(1, 80, 7), 200)]);
        assert!(!is_due(&pools));
    }

    #[test]
    fn a_namespace_made_since_is_counted_at_once() {
        let mut pools = Pools::default();
        pools.note(&[(key(1, 80, 9), 1)]);
        assert!(is_due(&pools));
    }
}
