//! A stretch of time in which a port space has symptoms.

use std::{collections::VecDeque, time::Duration};

use super::{
    history::STEPS,
    packed::{Counters, Packed},
    report::Totals,
    space::PortSet,
    time::Moment,
};

/// A kind of thing that should not happen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Symptom {
    /// A SYN met a connection that was there before.
    BareAck,
    /// An open stayed without answer.
    Unanswered,
    /// A SYN was sent again.
    Retransmit,
    /// An open was refused, or failed with another error.
    Refused,
    /// A handshake was not completed by its initiator.
    HalfOpen,
    /// connect() found no source port.
    NoLocalPort,
}

impl Symptom {
    /// How many there are.
    pub const COUNT: usize = 6;
    /// All of them.
    pub const ALL: [Self; Self::COUNT] = [
        Self::BareAck,
        Self::Unanswered,
        Self::Retransmit,
        Self::Refused,
        Self::HalfOpen,
        Self::NoLocalPort,
    ];

    /// How often it is among `totals`.
    #[must_use]
    pub const fn count(self, totals: &Totals) -> u64 {
        match self {
            Self::BareAck => totals.bare_acks + totals.duplicate_syns + totals.no_listener,
            Self::Unanswered => totals.syn_timeouts + totals.abandoned + totals.unhealed,
            Self::Retransmit => totals.syn_retransmits,
            Self::Refused => totals.refused + totals.failed,
            Self::HalfOpen => totals.half_open,
            Self::NoLocalPort => totals.no_local_port,
        }
    }
}

/// A stretch of time with symptoms.
#[derive(Clone, Debug)]
pub struct Episode {
    /// The look that found the first symptom.
    pub since: Moment,
    /// Totals then.
    pub baseline: Totals,
    /// Totals at moments since, one after the other.
    history: VecDeque<(Moment, Packed)>,
    /// The latest symptom.
    pub last_symptom: Moment,
    /// The latest of each kind, by [`Symptom`].
    pub last: [Option<Moment>; Symptom::COUNT],
    /// The first of each kind, where other symptoms came before it.
    onsets: Vec<(Symptom, Onset)>,
    /// Most sockets in TIME_WAIT at once, from one window before the first symptom on.
    pub time_wait_peak: u32,
    /// Source ports of refused SYNs.
    pub refused_ports: PortSet,
    /// Shortest and longest time from the end of the former connection to a refused SYN, in ms.
    pub reuse_interval_ms: Option<(u32, u32)>,
}

/// Where the symptoms of one kind began.
#[derive(Clone, Copy, Debug)]
pub struct Onset {
    /// The look that found the first one.
    pub since: Moment,
    /// Totals before it.
    pub baseline: Totals,
}

impl Episode {
    /// One that begins now, with the totals before the first symptom.
    #[must_use]
    pub fn new(now: Moment, baseline: Totals, time_wait_peak: u32) -> Self {
        let mut episode = Self {
            since: now,
            baseline,
            history: VecDeque::new(),
            last_symptom: now,
            last: [None; Symptom::COUNT],
            onsets: Vec::new(),
            time_wait_peak,
            refused_ports: PortSet::new(),
            reuse_interval_ms: None,
        };
        episode.push(now, &baseline);
        episode
    }

    /// Takes what is new at this look; `before` are the totals before it.
    pub fn note(&mut self, now: Moment, difference: &Totals, before: &Totals) {
        for symptom in Symptom::ALL {
            if symptom.count(difference) == 0 {
                continue;
            }
            if self.last[symptom as usize].is_none() && now != self.since {
                let onset = Onset {
                    since: now,
                    baseline: *before,
                };
                self.onsets.push((symptom, onset));
            }
            self.last[symptom as usize] = Some(now);
            self.last_symptom = now;
        }
    }

    /// Where the symptoms of a kind began: what came before it belongs to another story.
    #[must_use]
    pub fn onset(&self, symptom: Symptom) -> Onset {
        let later = self.onsets.iter().find(|(s, _)| *s == symptom);
        later.map_or(
            Onset {
                since: self.since,
                baseline: self.baseline,
            },
            |(_, onset)| *onset,
        )
    }

    /// Totals `window` ago, or those before the first symptom if that is later.
    #[must_use]
    pub fn before(&self, now: Moment, window: Duration) -> Totals {
        let old = self
            .history
            .iter()
            .rev()
            .find(|(at, _)| now.since(*at) >= window);
        let old = old.or(self.history.front());
        old.map_or(self.baseline, |(_, totals)| totals.unpack().totals)
    }

    /// Ends a look: notes the totals, and forgets what is older than `keep`.
    pub fn settle(&mut self, now: Moment, keep: Duration, totals: &Totals) {
        let due = self
            .history
            .back()
            .is_none_or(|(at, _)| now.since(*at) >= keep / STEPS);
        if due {
            self.push(now, totals);
        }
        while self.history.len() > 2 && now.since(self.history[1].0) >= keep {
            self.history.pop_front();
        }
        for (last, symptom) in self.last.iter_mut().zip(Symptom::ALL) {
            if last.is_some_and(|at| now.since(at) > keep) {
                *last = None;
                self.onsets.retain(|(s, _)| *s != symptom);
            }
        }
    }

    /// Nobody has looked for `gap`: the window begins anew, and the symptoms go on.
    pub fn resume(&mut self, now: Moment, gap: Duration, totals: &Totals) {
        self.history.clear();
        self.push(now, totals);
        self.last_symptom = self.last_symptom + gap;
        for last in self.last.iter_mut().flatten() {
            *last = *last + gap;
        }
    }

    fn push(&mut self, now: Moment, totals: &Totals) {
        let mut packed = Packed::default();
        packed.set(&Counters {
            totals: *totals,
            ..Counters::default()
        });
        self.history.push_back((now, packed));
    }
}
