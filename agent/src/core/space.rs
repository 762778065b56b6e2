//! Everything known of one port space.

use std::{
    collections::{BTreeSet, VecDeque},
    time::Duration,
};

use tuplewatch_common::{
    histogram::BUCKETS,
    memory::Former,
    record::{CensusRow, PortSpace, TIME_WAIT_AGES},
};

use super::{
    finding::Sample, history::History, observation::Event, ports::Ports, report::Totals,
    time::Moment,
};

/// Samples kept per port space.
const SAMPLES: usize = 256;

/// One port space. Ten thousand of them must fit into a few megabytes: what only a port space in
/// trouble needs is kept in its [`Episode`].
#[derive(Clone, Debug, Default)]
pub struct Space {
    /// Totals since the agent began.
    pub totals: Totals,
    /// The latest counters of the source.
    raw: Box<PortSpace>,
    /// What was counted before the source forgot this port space and began again.
    before_restart: Option<Box<PortSpace>>,
    opens: History,
    /// Source ports.
    pub ports: Option<Ports>,
    /// Refused SYNs, newest last.
    pub samples: VecDeque<Refused>,
    /// Refused ports and reuse intervals of events whose counters have not been read yet.
    waiting: Vec<(u16, Option<u32>)>,
    /// The latest census.
    pub census: Census,
    /// Most sockets in TIME_WAIT at each census of the window.
    time_wait: VecDeque<(Moment, u32)>,
    /// The trouble going on, if any.
    pub episode: Option<Box<Episode>>,
    /// When its counters changed last.
    pub last_change: Moment,
}

/// A stretch of time with symptoms.
#[derive(Clone, Debug)]
pub struct Episode {
    /// The look that found the first symptom.
    pub since: Moment,
    /// Totals then.
    pub baseline: Totals,
    /// Totals at each look since.
    history: VecDeque<(Moment, Totals)>,
    /// The latest symptom.
    pub last_symptom: Moment,
    /// Most sockets in TIME_WAIT at once, from one window before the first symptom on.
    pub time_wait_peak: u32,
    /// Source ports of refused SYNs.
    pub refused_ports: BTreeSet<u16>,
    /// Shortest and longest time from the end of the former connection to a refused SYN, in ms.
    pub reuse_interval_ms: Option<(u32, u32)>,
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
#[derive(Clone, Copy, Debug, Default)]
pub struct Census {
    /// Not closed yet.
    pub in_use: u32,
    /// In TIME_WAIT by age.
    pub time_wait: [u32; TIME_WAIT_AGES],
}

impl Census {
    /// All sockets in TIME_WAIT.
    #[must_use]
    pub fn held(&self) -> u32 {
        self.time_wait.iter().sum()
    }

    /// Adds a row.
    pub fn add(&mut self, row: &CensusRow) {
        self.in_use += row.opening + row.established + row.closing;
        for (sum, n) in self.time_wait.iter_mut().zip(row.time_wait) {
            *sum += n;
        }
    }
}

impl Space {
    /// A port space seen for the first time.
    #[must_use]
    pub fn new(now: Moment) -> Self {
        Self {
            last_change: now,
            opens: History::from_zero(now),
            ..Self::default()
        }
    }

    /// Opens in the last `window`.
    #[must_use]
    pub fn opens(&self, now: Moment, window: Duration) -> u64 {
        self.totals.opens - self.opens.before(now, window).min(self.totals.opens)
    }

    /// What was counted in the last `window`; of a port space without symptoms only the opens are
    /// exact to less than a window.
    #[must_use]
    pub fn window(&self, now: Moment, window: Duration) -> Totals {
        let since = self.episode.as_ref().map_or(self.totals, |episode| {
            let old = episode
                .history
                .iter()
                .rev()
                .find(|(at, _)| now.since(*at) >= window);
            old.map_or(episode.baseline, |(_, totals)| *totals)
        });
        Totals {
            opens: self.opens(now, window),
            ..self.totals.minus(&since)
        }
    }

    /// Totals of the histogram of reuse intervals.
    #[must_use]
    pub fn reuse_interval(&self) -> [u64; BUCKETS] {
        self.histogram(|p| &p.reuse_interval)
    }

    /// Totals of the histogram of handshake durations.
    #[must_use]
    pub fn handshake_duration(&self) -> [u64; BUCKETS] {
        self.histogram(|p| &p.handshake_duration)
    }

    /// Totals of the histogram of port searches.
    #[must_use]
    pub fn port_search(&self) -> [u64; BUCKETS] {
        self.histogram(|p| &p.port_search)
    }

    fn histogram(&self, of: fn(&PortSpace) -> &[u64; BUCKETS]) -> [u64; BUCKETS] {
        let mut sum = *of(&self.raw);
        for (sum, n) in sum
            .iter_mut()
            .zip(self.before_restart.iter().flat_map(|p| of(p)))
        {
            *sum += n;
        }
        sum
    }

    /// Takes the counters of the source.
    pub fn take(&mut self, now: Moment, raw: &PortSpace) {
        if raw.opens < self.raw.opens || raw.established < self.raw.established {
            self.restart();
        }
        let difference = Totals::from(raw).minus(&Totals::from(&*self.raw));
        if difference != Totals::default() {
            self.last_change = now;
        }
        self.begin_episode(now, &difference);
        self.totals = self.totals.plus(&difference);
        *self.raw = *raw;
    }

    /// The source has forgotten this port space and counts from zero again.
    fn restart(&mut self) {
        let sum = self.before_restart.get_or_insert_default();
        let add = |sum: &mut [u64; BUCKETS], n: &[u64; BUCKETS]| {
            sum.iter_mut().zip(n).for_each(|(sum, n)| *sum += n);
        };
        add(&mut sum.reuse_interval, &self.raw.reuse_interval);
        add(&mut sum.handshake_duration, &self.raw.handshake_duration);
        add(&mut sum.port_search, &self.raw.port_search);
        *self.raw = PortSpace::default();
    }

    fn begin_episode(&mut self, now: Moment, difference: &Totals) {
        if difference.bare_acks + difference.duplicate_syns + difference.no_listener == 0 {
            return;
        }
        let (baseline, time_wait) = (self.totals, &self.time_wait);
        let episode = self.episode.get_or_insert_with(|| {
            Box::new(Episode {
                since: now,
                baseline,
                history: VecDeque::new(),
                last_symptom: now,
                time_wait_peak: time_wait.iter().map(|(_, n)| *n).max().unwrap_or(0),
                refused_ports: BTreeSet::new(),
                reuse_interval_ms: None,
            })
        });
        episode.last_symptom = now;
    }

    /// Takes a refused SYN.
    pub fn sample(&mut self, event: &Event) {
        let former = Former::from_u8(event.former);
        let known = !matches!(former, Former::None);
        self.waiting.push((
            event.tuple.initiator_port,
            known.then_some(event.former_age_ms),
        ));
        self.samples.push_back(Refused {
            sample: Sample {
                time_ns: event.time_ns,
                port: event.tuple.initiator_port,
                isn: event.isn,
                ack: event.ack,
                reuse_interval_seconds: known.then(|| f64::from(event.former_age_ms) / 1000.0),
            },
            former,
        });
        if self.samples.len() > SAMPLES {
            self.samples.pop_front();
        }
    }

    /// Takes the result of a census.
    pub fn counted(&mut self, now: Moment, census: Census) {
        self.census = census;
        let held = census.held();
        if held > 0 {
            self.time_wait.push_back((now, held));
        }
        if let Some(episode) = &mut self.episode {
            episode.time_wait_peak = episode.time_wait_peak.max(held);
        }
    }

    /// Ends a look: takes the events into the episode that the counters have opened by now, and drops
    /// what is older than `keep`.
    pub fn settle(&mut self, now: Moment, keep: Duration) {
        self.opens.note(now, self.totals.opens, keep);
        while self
            .time_wait
            .front()
            .is_some_and(|(at, _)| now.since(*at) > keep)
        {
            self.time_wait.pop_front();
        }
        if self
            .episode
            .as_ref()
            .is_some_and(|e| now.since(e.last_symptom) > keep)
        {
            self.episode = None;
            self.samples = VecDeque::new();
        }
        let Some(episode) = &mut self.episode else {
            return;
        };
        episode.history.push_back((now, self.totals));
        while episode.history.len() > 2 && now.since(episode.history[1].0) >= keep {
            episode.history.pop_front();
        }
        for (port, interval) in self.waiting.drain(..) {
            episode.refused_ports.insert(port);
            if let Some(ms) = interval {
                let (low, high) = episode.reuse_interval_ms.unwrap_or((ms, ms));
                episode.reuse_interval_ms = Some((low.min(ms), high.max(ms)));
            }
        }
    }
}
