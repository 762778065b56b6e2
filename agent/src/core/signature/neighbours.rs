//! What several rules want to know at one look: how an initiator's other destinations fare, and who
//! scans. It is worked out once, and only if a rule asks.

use std::{
    cell::OnceCell,
    collections::{BTreeMap, BTreeSet},
};

use tuplewatch_common::address::{Address, PortSpaceKey, Role};

use super::Context;
use crate::core::{report::Totals, space::Space};

/// One look at all port spaces that are busy or in trouble.
#[derive(Debug, Default)]
pub struct Look {
    neighbours: OnceCell<BTreeMap<Origin, Neighbours>>,
    scans: OnceCell<BTreeMap<Scan, u32>>,
}

/// Where an initiator's connections are seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Origin {
    initiator: Address,
    point: u8,
    netns: u32,
}

impl From<&PortSpaceKey> for Origin {
    fn from(key: &PortSpaceKey) -> Self {
        Self {
            initiator: key.initiator,
            point: key.point,
            netns: key.netns,
        }
    }
}

/// One host that tries the ports of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Scan {
    /// Who tries.
    pub initiator: Address,
    /// Whose ports.
    pub responder: Address,
    /// Where it was seen: a [`tuplewatch_common::address::Point`].
    pub point: u8,
    /// Network namespace of the socket point.
    pub netns: u32,
}

impl From<&PortSpaceKey> for Scan {
    fn from(key: &PortSpaceKey) -> Self {
        Self {
            initiator: key.initiator,
            responder: key.responder,
            point: key.point,
            netns: key.netns,
        }
    }
}

/// Destinations of one initiator in the window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Neighbours {
    /// Those that answer every SYN at once.
    pub answering: u32,
    /// Those with lost or repeated SYNs.
    pub failing: u32,
}

/// How a destination fares.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Quiet,
    Answering,
    Failing,
}

impl State {
    fn of(window: &Totals) -> Self {
        let missing = window.syn_timeouts + window.abandoned + window.syn_retransmits;
        // One lost packet in a hundred opens is the Internet.
        if missing > 1 && missing * 50 >= window.opens {
            Self::Failing
        } else if window.opens > 0 && window.refused < window.opens {
            Self::Answering
        } else {
            Self::Quiet
        }
    }
}

impl Look {
    /// How the other destinations of the same initiator fare.
    #[must_use]
    pub fn neighbours(&self, context: &Context<'_>, key: &PortSpaceKey) -> Neighbours {
        let all = self.neighbours.get_or_init(|| neighbours(context));
        let mut them = all.get(&Origin::from(key)).copied().unwrap_or_default();
        if let Some(space) = context.tables.spaces.get(key) {
            match State::of(&space.window(context.now, context.thresholds.window)) {
                State::Answering => them.answering = them.answering.saturating_sub(1),
                State::Failing => them.failing = them.failing.saturating_sub(1),
                State::Quiet => {}
            }
        }
        them
    }

    /// Who scans whom, and how many ports were tried.
    pub fn scans(&self, context: &Context<'_>) -> &BTreeMap<Scan, u32> {
        self.scans.get_or_init(|| scans(context))
    }
}

fn neighbours(context: &Context<'_>) -> BTreeMap<Origin, Neighbours> {
    let window = context.rules.thresholds.window;
    let mut all: BTreeMap<Origin, Neighbours> = BTreeMap::new();
    for (key, space) in context.tables.active(context.now, window) {
        if key.role != Role::Initiator as u8 {
            continue;
        }
        let of = all.entry(Origin::from(key)).or_default();
        match State::of(&space.window(context.now, window)) {
            State::Answering => of.answering += 1,
            State::Failing => of.failing += 1,
            State::Quiet => {}
        }
    }
    all
}

/// Many ports of one responder, each tried a few times at most and none with success.
fn scans(context: &Context<'_>) -> BTreeMap<Scan, u32> {
    let mut tried: BTreeMap<Scan, BTreeSet<u16>> = BTreeMap::new();
    for (key, space) in context.tables.symptomatic() {
        if key.role == Role::Initiator as u8 && is_tried(context, key, space) {
            let ports = tried.entry(Scan::from(key)).or_default();
            ports.insert(key.responder_port);
        }
    }
    let enough = context.rules.thresholds.strangers.scan_ports as usize;
    tried
        .into_iter()
        .filter(|(_, ports)| ports.len() >= enough)
        .map(|(scan, ports)| (scan, u32::try_from(ports.len()).unwrap_or(u32::MAX)))
        .collect()
}

fn is_tried(context: &Context<'_>, key: &PortSpaceKey, space: &Space) -> bool {
    let totals = space.totals();
    totals.opens > 0
        && totals.established == 0
        && totals.opens <= context.rules.of(key).strangers.scan_opens
}
