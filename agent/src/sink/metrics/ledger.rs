//! Which port spaces are exported, and counters that never go back.
//!
//! The core tells the busiest port spaces by themselves and the sum of all others. A port space that
//! enters or leaves the list takes its totals along, so both that sum and a series of a port space
//! which was forgotten meanwhile would go back. Here each series grows only by what was counted
//! anew since the last overview:
//!
//! - a listed port space grows by its own growth;
//! - one that enters the list grows by what nobody else can account for, at most by its total: a new
//!   port space is complete from its first packet, an old one leaves its past in `other`;
//! - `other` grows by the rest.
//!
//! So the sum over all series is always what the core counted. A port space that leaves the list is
//! exported once more, with what it counted until then, and is then silent. When it returns it goes
//! on where it stood (cumulative), or starts again (delta, where the receiver adds up).

use std::collections::HashMap;

use tuplewatch_common::{address::PortSpaceKey, histogram::BUCKETS};

use super::{
    Which,
    collect::{SpaceView, View},
};
use crate::core::report::{Overview, SpaceReport, Totals};

/// Most port spaces in one export; more stay in `other`.
pub(crate) const MAX_EXPORTED: usize = 256;
/// Port spaces remembered. One that returns after 1024 others were exported starts at 0 again, as
/// after a restart of the agent.
const REMEMBERED: usize = 1024;

/// Number of counters in [`Totals`].
const COUNTERS: usize = Totals::COUNT;

type Counters = [u64; COUNTERS];
type Histograms = [[u64; BUCKETS]; Which::COUNT];

/// The state of the exported series.
#[derive(Debug)]
pub(crate) struct Ledger {
    /// The receiver adds up: a series that pauses starts again.
    delta: bool,
    spaces: HashMap<PortSpaceKey, Entry>,
    other: Counters,
    /// All that the core counted, at the last overview.
    all: Counters,
    /// There was an export after the last overview.
    exported: bool,
    overviews: u64,
}

#[derive(Debug)]
struct Entry {
    /// What the core said last.
    told: Counters,
    told_histograms: Histograms,
    /// What is exported.
    value: Counters,
    histograms: Histograms,
    /// Number of the last overview that listed it.
    listed: u64,
    /// It was listed since the last export.
    fresh: bool,
    report: Option<SpaceReport>,
}

impl Ledger {
    /// For a receiver that adds up (`delta`), or one that does not.
    pub(crate) fn new(delta: bool) -> Self {
        Self {
            delta,
            spaces: HashMap::new(),
            other: [0; COUNTERS],
            all: [0; COUNTERS],
            exported: false,
            overviews: 0,
        }
    }

    /// Takes what the core says.
    pub(crate) fn update(&mut self, overview: &Overview) {
        if std::mem::take(&mut self.exported) {
            self.spaces
                .values_mut()
                .for_each(|entry| entry.fresh = false);
        }
        let before = self.overviews;
        self.overviews += 1;
        let mut all = counters(&overview.other);
        for space in &overview.spaces {
            add(&mut all, &counters(&space.totals));
        }
        let mut grown: Counters = std::array::from_fn(|i| all[i].saturating_sub(self.all[i]));
        self.all = all;
        self.spaces
            .values_mut()
            .for_each(|entry| entry.report = None);

        let mut entering = Vec::new();
        for space in &overview.spaces {
            match self.spaces.get_mut(&space.key) {
                Some(entry) if before > 0 && entry.listed == before => {
                    let growth = growth(&counters(&space.totals), &entry.told);
                    entry.take(space, growth, self.overviews);
                    grown = std::array::from_fn(|i| grown[i].saturating_sub(growth[i]));
                }
                _ => entering.push(space),
            }
        }
        let mut fresh = self.spaces.values().filter(|entry| entry.fresh).count();
        for space in entering {
            let total = counters(&space.totals);
            let entry = self.spaces.get(&space.key);
            if !entry.is_some_and(|entry| entry.fresh) {
                if fresh >= MAX_EXPORTED {
                    continue;
                }
                fresh += 1;
            }
            let entry = self.spaces.entry(space.key);
            let entry = entry.or_insert_with(|| Entry::new(space, &grown));
            let possible = growth(&total, &entry.told);
            let growth = std::array::from_fn(|i| possible[i].min(grown[i]));
            entry.take(space, growth, self.overviews);
            grown = std::array::from_fn(|i| grown[i].saturating_sub(growth[i]));
        }
        add(&mut self.other, &grown);
        self.forget();
    }

    fn forget(&mut self) {
        while self.spaces.len() > REMEMBERED {
            let idle = self.spaces.iter().filter(|(_, entry)| !entry.fresh);
            let Some(key) = idle
                .min_by_key(|(_, entry)| entry.listed)
                .map(|(key, _)| *key)
            else {
                return;
            };
            self.spaces.remove(&key);
        }
    }

    /// Begins an export: fills in the port spaces and the rest.
    pub(crate) fn export(&mut self, view: &mut View) {
        self.exported = true;
        let exported = |entry: &Entry| entry.fresh || entry.report.is_some();
        if self.delta {
            // The SDK too forgets a series that is not observed in an export.
            self.spaces.retain(|_, entry| exported(entry));
        }
        let entries = self.spaces.iter().filter(|(_, entry)| exported(entry));
        view.spaces = entries
            .map(|(key, entry)| SpaceView {
                key: *key,
                totals: totals(&entry.value),
                histograms: entry.histograms,
                report: entry.report.clone(),
            })
            .collect();
        view.spaces.sort_by_key(|space| space.key);
        view.other = totals(&self.other);
    }
}

impl Entry {
    fn new(space: &SpaceReport, grown: &Counters) -> Self {
        let total = counters(&space.totals);
        // A part of its past is in `other` already: its histograms begin now, too.
        let known_before = total.iter().zip(grown).any(|(total, grown)| total > grown);
        let histograms = histograms(space);
        Self {
            told: [0; COUNTERS],
            told_histograms: if known_before {
                histograms
            } else {
                [[0; BUCKETS]; Which::COUNT]
            },
            value: [0; COUNTERS],
            histograms: [[0; BUCKETS]; Which::COUNT],
            listed: 0,
            fresh: true,
            report: None,
        }
    }

    fn take(&mut self, space: &SpaceReport, growth: Counters, overview: u64) {
        add(&mut self.value, &growth);
        self.told = counters(&space.totals);
        let histograms = histograms(space);
        for (i, now) in histograms.iter().enumerate() {
            let more = self::growth(now, &self.told_histograms[i]);
            add(&mut self.histograms[i], &more);
        }
        self.told_histograms = histograms;
        self.listed = overview;
        self.fresh = true;
        self.report = Some(space.clone());
    }
}

/// How much counters grew; one that went back was forgotten by the core and counts anew.
fn growth<const N: usize>(now: &[u64; N], before: &[u64; N]) -> [u64; N] {
    let forgotten = now.iter().zip(before).any(|(now, before)| now < before);
    std::array::from_fn(|i| {
        if forgotten {
            now[i]
        } else {
            now[i] - before[i]
        }
    })
}

fn add<const N: usize>(to: &mut [u64; N], more: &[u64; N]) {
    for (to, more) in to.iter_mut().zip(more) {
        *to = to.saturating_add(*more);
    }
}

fn histograms(space: &SpaceReport) -> Histograms {
    let mut all = [[0; BUCKETS]; Which::COUNT];
    all[Which::ReuseInterval as usize] = space.reuse_interval;
    all[Which::HandshakeDuration as usize] = space.handshake_duration;
    all[Which::PortSearch as usize] = space.port_search;
    all
}

macro_rules! as_array {
    ($($field:ident)*) => {
        fn counters(totals: &Totals) -> Counters {
            let Totals { $($field),* } = *totals;
            [$($field),*]
        }

        fn totals(counters: &Counters) -> Totals {
            let [$($field),*] = *counters;
            Totals { $($field),* }
        }
    };
}

as_array! {
    opens established refused syn_timeouts abandoned half_open no_local_port failed syn_retransmits
    bare_acks bare_acks_closed bare_acks_open bare_acks_half_open bare_acks_unknown duplicate_syns
    no_listener rsts_after_bare_ack healed unhealed reuse_accepted resets_received resets_sent
    data_retransmits late
}

#[cfg(test)]
mod tests;
