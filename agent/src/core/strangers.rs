//! SYNs that belong to no port space, and half-open sockets: what floods and scans leave behind. They
//! make no port space, so that they cannot push out those that matter.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tuplewatch_common::{
    address::{Address, Role},
    record::Global,
};

use super::{counters::Readings, observation::Snapshot, time::Moment};

/// What is known of them.
#[derive(Clone, Debug, Default)]
pub struct Strangers {
    syns: Readings<u64>,
    abandoned: Readings<u64>,
    half_open: BTreeMap<(Address, u16), HalfOpen>,
}

/// Half-open sockets of one listener at the latest census.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HalfOpen {
    /// Sockets in SYN_RECV.
    pub sockets: u32,
    /// Addresses they are from.
    pub initiators: u32,
    /// Sockets of the same listener that are established.
    pub established: u32,
}

impl Strangers {
    /// Takes a snapshot. `window` is the longest one asked for; half-open sockets are of interest only
    /// beside so many SYNs in it.
    pub fn take(&mut self, snapshot: &Snapshot, window: Duration, flood_syns: u64) {
        let syns = snapshot.globals[Global::SynsWithoutPortSpace as usize];
        self.syns.take(snapshot.now, syns, window);
        let abandoned = snapshot.globals[Global::StrangersHalfOpen as usize];
        self.abandoned.take(snapshot.now, abandoned, window);
        if self.syns(snapshot.now, window) < flood_syns {
            self.half_open.clear();
            return;
        }
        let Some(rows) = &snapshot.census else {
            return;
        };
        self.half_open.clear();
        let mut initiators: BTreeMap<_, BTreeSet<Address>> = BTreeMap::new();
        for (key, row) in rows {
            if key.role != Role::Responder as u8 {
                continue;
            }
            let listener = (key.responder, key.responder_port);
            if row.opening > 0 {
                initiators
                    .entry(listener)
                    .or_default()
                    .insert(key.initiator);
            }
            let sum = self.half_open.entry(listener).or_default();
            sum.sockets += row.opening;
            sum.established += row.established;
        }
        for (listener, initiators) in &initiators {
            if let Some(sum) = self.half_open.get_mut(listener) {
                sum.initiators = u32::try_from(initiators.len()).unwrap_or(u32::MAX);
            }
        }
        self.half_open.retain(|_, sum| sum.sockets > 0);
    }

    /// SYNs of no known port space in the window.
    #[must_use]
    pub fn syns(&self, now: Moment, window: Duration) -> u64 {
        growth(&self.syns, now, window)
    }

    /// Handshakes of no known port space that were given up in the window: a SYN-ACK went by, and
    /// nobody completed them.
    #[must_use]
    pub fn abandoned(&self, now: Moment, window: Duration) -> u64 {
        growth(&self.abandoned, now, window)
    }

    /// Listeners with half-open sockets: address, port, and how many.
    pub fn half_open(&self) -> impl Iterator<Item = (&Address, u16, &HalfOpen)> {
        self.half_open
            .iter()
            .map(|((address, port), sum)| (address, *port, sum))
    }
}

fn growth(readings: &Readings<u64>, now: Moment, window: Duration) -> u64 {
    readings
        .ends(now, window)
        .map_or(0, |(latest, earlier)| latest.saturating_sub(*earlier))
}
