//! Everything known of one port space.

use std::{
    collections::{BTreeSet, VecDeque},
    time::Duration,
};

use tuplewatch_common::{
    memory::Former,
    record::{CensusRow, PortSpace, TIME_WAIT_AGES},
};

use super::{
    episode::{Episode, Symptom},
    finding::{Pool, Sample},
    history::History,
    observation::Event,
    packed::{Counters, Packed},
    pool,
    ports::Ports,
    report::Totals,
    search::Searches,
    threshold::PoolInference,
    time::Moment,
    trend::Trend,
    waits::Waits,
};

/// Samples of one kind kept per port space.
const SAMPLES: usize = 256;
/// A pool of more ports than this is not inferred again at every look.
const LARGE_POOL: u32 = 2000;
/// … but after this long.
const INFER_LARGE: Duration = Duration::from_secs(5);

/// One port space. Ten thousand of them must fit into a few megabytes: what a healthy or quiet port
/// space does not need takes no more than a pointer.
#[derive(Clone, Debug, Default)]
pub struct Space {
    /// The latest counters of the source.
    latest: Packed,
    /// What was counted before the source forgot this port space and began again.
    before_restart: Option<Box<Packed>>,
    opens: History,
    /// Source ports.
    pub ports: Option<Ports>,
    /// The pool inferred from them.
    pool: Option<Pool>,
    pool_at: Moment,
    samples: Option<Box<Samples>>,
    /// The latest census.
    pub census: Census,
    /// What was in use and held lately, where it is more than a handful.
    pub trend: Option<Box<Trend>>,
    /// Connections that wait for an answer, where there are more than a few.
    pub waits: Option<Box<Waits>>,
    /// Slow searches for a source port.
    pub searches: Option<Box<Searches>>,
    /// The trouble going on, if any.
    pub episode: Option<Box<Episode>>,
    /// When it was seen first.
    pub first_seen: Moment,
    /// When its counters or its census changed last.
    pub last_change: Moment,
    /// It is in the list of those that looks go through.
    pub(super) is_active: bool,
    /// Its ports are others than when the pool was inferred.
    has_new_ports: bool,
}

#[derive(Clone, Debug, Default)]
struct Samples {
    /// Refused SYNs, newest last.
    refused: VecDeque<Refused>,
    /// Refused ports and reuse intervals of events whose counters have not been read yet.
    waiting: Vec<(u16, Option<u32>)>,
    /// Live connections reset by a SYN that met them, newest last.
    collisions: VecDeque<Collision>,
}

/// A live connection that a SYN met, and that the RST after the bare ACK then reset.
#[derive(Clone, Copy, Debug)]
pub struct Collision {
    /// When, in nanoseconds of the source's clock.
    pub time_ns: u64,
    /// Source port.
    pub port: u16,
    /// How long the connection had been without traffic, in milliseconds.
    pub idle_ms: u32,
}

/// One refused SYN.
#[derive(Clone, Debug)]
pub struct Refused {
    /// The sample shown to people.
    pub sample: Sample,
    /// The former connection.
    pub former: Former,
}

/// Sockets of a port space at the latest census.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Census {
    /// Being opened.
    pub opening: u32,
    /// In ESTABLISHED.
    pub established: u32,
    /// Being closed, but not in TIME_WAIT yet.
    pub closing: u32,
    /// Those of any state whose port was taken by bind().
    pub bound: u32,
    /// In ESTABLISHED, and something was received lately.
    pub active: u32,
    /// In TIME_WAIT by age.
    pub time_wait: [u32; TIME_WAIT_AGES],
}

impl Census {
    /// Sockets that are not closed yet.
    #[must_use]
    pub const fn in_use(&self) -> u32 {
        self.opening + self.established + self.closing
    }

    /// All sockets in TIME_WAIT.
    #[must_use]
    pub fn held(&self) -> u32 {
        self.time_wait.iter().sum()
    }

    /// Adds a row.
    pub fn add(&mut self, row: &CensusRow) {
        self.opening += row.opening;
        self.established += row.established;
        self.closing += row.closing;
        self.bound += row.bound;
        self.active += row.active;
        for (sum, n) in self.time_wait.iter_mut().zip(row.time_wait) {
            *sum += n;
        }
    }
}

impl Space {
    /// A port space seen for the first time, or again after it was forgotten: `before` is what the
    /// source had counted by then.
    #[must_use]
    pub fn new(now: Moment, before: Packed) -> Self {
        Self {
            first_seen: now,
            last_change: now,
            opens: History::from_value(now, before.opens()),
            latest: before,
            ..Self::default()
        }
    }

    /// The latest counters of the source, when nothing else of it is needed any more.
    #[must_use]
    pub fn forget(&mut self) -> Packed {
        std::mem::take(&mut self.latest)
    }

    /// Totals since the agent began.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.counters().totals
    }

    /// Everything counted since the agent began.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let latest = self.latest.unpack();
        match &self.before_restart {
            Some(before) => latest.plus(&before.unpack()),
            None => latest,
        }
    }

    fn total_opens(&self) -> u64 {
        self.latest.opens() + self.before_restart.as_ref().map_or(0, |p| p.opens())
    }

    /// Opens in the last `window`.
    #[must_use]
    pub fn opens(&self, now: Moment, window: Duration) -> u64 {
        let total = self.total_opens();
        total - self.opens.before(now, window, total)
    }

    /// What was counted in the last `window`; of a port space without symptoms only the opens are
    /// known.
    #[must_use]
    pub fn window(&self, now: Moment, window: Duration) -> Totals {
        let totals = self.totals();
        let since = self
            .episode
            .as_ref()
            .map_or(totals, |episode| episode.before(now, window));
        Totals {
            opens: self.opens(now, window),
            ..totals.minus(&since)
        }
    }

    /// Refused SYNs, newest last.
    pub fn samples(&self) -> impl DoubleEndedIterator<Item = &Refused> + Clone {
        self.samples.iter().flat_map(|s| s.refused.iter())
    }

    /// Live connections reset by a SYN that met them, newest last.
    pub fn collisions(&self) -> impl DoubleEndedIterator<Item = &Collision> + Clone {
        self.samples.iter().flat_map(|s| s.collisions.iter())
    }

    /// The pool that the initiator's address uses, inferred from completed handshakes.
    #[must_use]
    pub const fn pool(&self) -> Option<Pool> {
        self.pool
    }

    /// Takes the counters of the source, and returns what is new. After a `gap` in which nobody
    /// looked, what is new tells nothing of the last seconds.
    pub fn take(&mut self, now: Moment, raw: &PortSpace, gap: bool) -> Totals {
        let raw = Counters::from(raw);
        let mut latest = self.latest.unpack();
        let is_behind = |now: &Totals, then: &Totals| {
            now.opens < then.opens || now.established < then.established
        };
        // The source has forgotten this port space and counts from zero again.
        if is_behind(&raw.totals, &latest.totals) {
            let before = self.before_restart.get_or_insert_default();
            let sum = before.unpack().plus(&latest);
            before.set(&sum);
            latest = Counters::default();
        }
        let difference = raw.totals.minus(&latest.totals);
        if raw != latest {
            self.last_change = now;
        }
        if !gap {
            if Symptom::ALL.iter().any(|s| s.count(&difference) > 0) {
                let before = self.totals_with(&latest);
                let peak = self.time_wait_peak();
                self.episode
                    .get_or_insert_with(|| Box::new(Episode::new(now, before, peak)))
                    .note(now, &difference, &before);
            }
            Searches::take(
                &mut self.searches,
                now,
                &raw.port_search,
                &latest.port_search,
            );
        }
        self.latest.set(&raw);
        difference
    }

    /// Most sockets in TIME_WAIT at once lately, as far as that was kept.
    fn time_wait_peak(&self) -> u32 {
        let kept = self.trend.as_ref().map_or(0, |t| t.most_held());
        kept.max(self.census.held())
    }

    fn totals_with(&self, latest: &Counters) -> Totals {
        match &self.before_restart {
            Some(before) => latest.totals.plus(&before.unpack().totals),
            None => latest.totals,
        }
    }

    /// Takes a refused SYN.
    pub fn sample(&mut self, event: &Event) {
        let former = Former::from_u8(event.former);
        let known = !matches!(former, Former::None);
        let samples = self.samples.get_or_insert_default();
        samples.waiting.push((
            event.tuple.initiator_port,
            known.then_some(event.former_age_ms),
        ));
        samples.refused.push_back(Refused {
            sample: Sample {
                time_ns: event.time_ns,
                port: event.tuple.initiator_port,
                isn: event.isn,
                ack: event.ack,
                reuse_interval_seconds: known.then(|| f64::from(event.former_age_ms) / 1000.0),
            },
            former,
        });
        if samples.refused.len() > SAMPLES {
            samples.refused.pop_front();
        }
    }

    /// Takes a live connection that a SYN has ended.
    pub fn collision(&mut self, event: &Event) {
        let samples = self.samples.get_or_insert_default();
        samples.collisions.push_back(Collision {
            time_ns: event.time_ns,
            port: event.tuple.initiator_port,
            idle_ms: event.former_age_ms,
        });
        if samples.collisions.len() > SAMPLES {
            samples.collisions.pop_front();
        }
    }

    /// Takes the result of a census.
    pub fn counted(&mut self, now: Moment, census: Census, keep: Duration) {
        if census == self.census {
            return;
        }
        let (before, after) = ((&self.census).into(), (&census).into());
        Trend::note(&mut self.trend, now, before, after, keep);
        self.census = census;
        self.last_change = now;
        if let Some(episode) = &mut self.episode {
            episode.time_wait_peak = episode.time_wait_peak.max(census.held());
        }
    }

    /// Takes the source ports of completed handshakes; at most `room` new ones are remembered. Returns
    /// how many were.
    pub fn note_ports(&mut self, now: Moment, ports: &[u16], room: usize) -> usize {
        if self.ports.is_none() && room == 0 {
            return 0;
        }
        let established = self.totals().established;
        self.has_new_ports = true;
        let known = self.ports.get_or_insert_default();
        known.note(now, ports, established, room)
    }

    /// Forgets source ports that were not seen for `window`; returns how many are left.
    pub fn age_ports(&mut self, now: Moment, window: Duration) -> u32 {
        let Some(ports) = &mut self.ports else {
            return 0;
        };
        self.has_new_ports = true;
        ports.age(now, window);
        let left = ports.distinct();
        if left == 0 {
            self.ports = None;
            self.pool = None;
        }
        left
    }

    /// Infers the pool anew if there are ports to do it from, unless it is large and that was done lately.
    pub fn infer_pool(&mut self, now: Moment, rules: &PoolInference) {
        let Some(ports) = self.ports.as_ref().filter(|_| self.has_new_ports) else {
            return;
        };
        if ports.distinct() > LARGE_POOL && now.since(self.pool_at) < INFER_LARGE {
            return;
        }
        self.has_new_ports = false;
        self.pool_at = now;
        self.pool = pool::infer(ports, rules);
    }

    /// Ends a look: takes the events into the episode that the counters have opened by now, and drops
    /// what is older than `keep`. Returns whether anything is left that further looks would change.
    pub fn settle(&mut self, now: Moment, keep: Duration) -> bool {
        let opens = self.total_opens();
        let is_quiet = self.opens.is_quiet(now, keep, opens);
        if is_quiet {
            self.opens = History::default();
        } else {
            self.opens.note(now, opens, keep);
        }
        if self.trend.as_ref().is_some_and(|t| t.is_quiet(now, keep)) {
            self.trend = None;
        }
        Searches::settle(&mut self.searches, now);
        self.settle_episode(now, keep);
        !is_quiet
            || self.episode.is_some()
            || self.samples.is_some()
            || self.trend.is_some()
            || self.waits.is_some()
            || self.searches.is_some()
    }

    fn settle_episode(&mut self, now: Moment, keep: Duration) {
        if self
            .episode
            .as_ref()
            .is_some_and(|e| now.since(e.last_symptom) > keep)
        {
            self.episode = None;
            self.samples = None;
        }
        let totals = self.totals_if_troubled();
        let (Some(episode), Some(totals)) = (&mut self.episode, totals) else {
            // An event without a counter to it: the source lost one of the two.
            if now.since(self.last_change) > keep {
                self.samples = None;
            }
            return;
        };
        episode.settle(now, keep, &totals);
        for (port, interval) in self.samples.iter_mut().flat_map(|s| s.waiting.drain(..)) {
            episode.refused_ports.insert(port);
            if let Some(ms) = interval {
                let (low, high) = episode.reuse_interval_ms.unwrap_or((ms, ms));
                episode.reuse_interval_ms = Some((low.min(ms), high.max(ms)));
            }
        }
    }

    fn totals_if_troubled(&self) -> Option<Totals> {
        self.episode.as_ref().map(|_| self.totals())
    }

    /// Begins the window anew after a `gap` in which nobody looked: rates and trends of that time
    /// mean nothing, and symptoms do not end because they were not looked for.
    pub fn resume(&mut self, now: Moment, gap: Duration) {
        self.opens = History::from_value(now, self.total_opens());
        self.trend = None;
        self.waits = None;
        self.searches = None;
        let totals = self.totals();
        if let Some(episode) = &mut self.episode {
            episode.resume(now, gap, &totals);
        }
    }
}

/// Distinct source ports.
pub type PortSet = BTreeSet<u16>;
