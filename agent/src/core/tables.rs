//! What the core remembers: totals, the last window, ports, samples and openers of each port space.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    time::Duration,
};

use tuplewatch_common::{
    address::{Point, PortSpaceKey, Role},
    histogram::BUCKETS,
    memory::Former,
    record::{CensusRow, Opener, OpenerKey, PortSpace, TIME_WAIT_AGES},
};

use super::{
    finding::Sample,
    observation::{Event, EventKind, Snapshot, Space3},
    ports::Ports,
    report::Totals,
    time::Moment,
};

/// Samples kept per port space.
const SAMPLES: usize = 256;
/// Port spaces with a table of ports (256 KiB each); the busiest ones have one.
const PORT_TABLES: usize = 64;

/// Everything known of one port space.
#[derive(Clone, Debug, Default)]
pub struct Space {
    /// Totals since the agent began.
    pub totals: Totals,
    raw: PortSpace,
    /// Totals at the end of each tick in the window, oldest first.
    history: VecDeque<(Moment, Totals)>,
    /// Source ports.
    pub ports: Option<Ports>,
    /// Refused SYNs, newest last.
    pub samples: VecDeque<Refused>,
    /// Refused ports and reuse intervals of events whose counters have not been read yet.
    waiting: Vec<(u16, Option<u32>)>,
    /// The latest census.
    pub census: Census,
    /// Most sockets in TIME_WAIT at each tick of the window.
    time_wait_history: VecDeque<(Moment, u32)>,
    /// Histograms, in all.
    pub histograms: Histograms,
    /// The trouble going on, if any.
    pub episode: Option<Episode>,
    /// When its counters changed last.
    pub last_change: Moment,
}

/// A stretch of time with symptoms.
#[derive(Clone, Debug)]
pub struct Episode {
    /// The last look before the first symptom.
    pub since: Moment,
    /// Totals then.
    pub baseline: Totals,
    /// The latest symptom.
    pub last_symptom: Moment,
    /// Most sockets in TIME_WAIT at once, from one window before the first symptom on.
    pub time_wait_peak: u32,
    /// Source ports of refused SYNs.
    pub refused_ports: BTreeSet<u16>,
    /// Shortest and longest time from the end of the former connection to a refused SYN, in ms.
    pub reuse_interval_ms: Option<(u32, u32)>,
}

/// The three histograms of a port space, totals.
#[derive(Clone, Debug, Default)]
pub struct Histograms {
    /// Reuse intervals.
    pub reuse_interval: [u64; BUCKETS],
    /// Handshake durations.
    pub handshake_duration: [u64; BUCKETS],
    /// Port searches.
    pub port_search: [u64; BUCKETS],
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

    fn add(&mut self, row: &CensusRow) {
        self.in_use += row.opening + row.established + row.closing;
        for (sum, n) in self.time_wait.iter_mut().zip(row.time_wait) {
            *sum += n;
        }
    }
}

impl Space {
    /// Totals as they were `window` ago (zero if the space is younger than that).
    #[must_use]
    pub fn before(&self, now: Moment, window: Duration) -> Totals {
        self.history
            .iter()
            .rev()
            .find(|(at, _)| now.since(*at) >= window)
            .map_or_else(Totals::default, |(_, totals)| *totals)
    }

    /// What was counted in the last `window`.
    #[must_use]
    pub fn window(&self, now: Moment, window: Duration) -> Totals {
        self.totals.minus(&self.before(now, window))
    }
}

/// All port spaces, and who opens connections.
#[derive(Clone, Debug, Default)]
pub struct Tables {
    /// By key.
    pub spaces: BTreeMap<PortSpaceKey, Space>,
    /// Totals of port spaces that were forgotten.
    pub forgotten: Totals,
    openers: HashMap<OpenerKey, OpenerState>,
    /// Wire port spaces joined to socket port spaces by ISN.
    joined: HashMap<Space3, PortSpaceKey>,
    recent_socket: VecDeque<(Moment, u32, PortSpaceKey)>,
    recent_wire: VecDeque<(Moment, u32, Space3)>,
    /// The first snapshot.
    pub first: Option<Moment>,
}

#[derive(Clone, Debug)]
struct OpenerState {
    total: Opener,
    history: VecDeque<(Moment, u64)>,
}

/// A process that opens connections, over a window.
#[derive(Clone, Debug)]
pub struct OpenerRate {
    /// Whose.
    pub key: OpenerKey,
    /// Totals.
    pub total: Opener,
    /// Opens in the window.
    pub opens: u64,
}

impl Tables {
    /// Takes a snapshot; `keep` is how much history rules look at.
    pub fn snapshot(&mut self, snapshot: &Snapshot, keep: Duration, ageing: Duration) {
        let now = snapshot.now;
        self.first.get_or_insert(now);
        for (key, raw) in &snapshot.spaces {
            let space = self.spaces.entry(*key).or_insert_with(|| Space {
                last_change: now,
                ..Space::default()
            });
            space.take(now, raw);
        }
        if let Some(rows) = &snapshot.census {
            self.census(now, rows);
        }
        self.ports(snapshot, ageing);
        for (key, total) in &snapshot.openers {
            let state = self.openers.entry(*key).or_insert_with(|| OpenerState {
                total: *total,
                history: VecDeque::new(),
            });
            // An entry that was forgotten in the kernel begins again.
            if total.opens < state.total.opens {
                state.history.clear();
            }
            state.total = *total;
            state.history.push_back((now, total.opens));
            while state.history.len() > 2 && now.since(state.history[1].0) >= keep {
                state.history.pop_front();
            }
        }
        self.openers
            .retain(|_, s| now.since(Moment(s.total.last_ns)) < Duration::from_secs(900));
        self.forget(now, keep);
    }

    /// Takes single events.
    pub fn events(&mut self, events: &[Event]) {
        for event in events {
            let now = Moment(event.time_ns);
            if event.kind == EventKind::BareAck as u8 {
                let key = PortSpaceKey::wire(&event.tuple, event.role);
                self.sample(&key, event);
                self.recent_wire
                    .push_back((now, event.isn, Space3::from(&key)));
            } else if event.kind == EventKind::SocketBareAck as u8 {
                let key = PortSpaceKey::socket(&event.tuple, event.role, event.netns);
                self.sample(&key, event);
                self.recent_socket.push_back((now, event.isn, key));
            }
        }
        self.join();
    }

    fn sample(&mut self, key: &PortSpaceKey, event: &Event) {
        let space = self.spaces.entry(*key).or_default();
        let former = Former::from_u8(event.former);
        let known = !matches!(former, Former::None);
        space.waiting.push((
            event.tuple.initiator_port,
            known.then_some(event.former_age_ms),
        ));
        space.samples.push_back(Refused {
            sample: Sample {
                time_ns: event.time_ns,
                port: event.tuple.initiator_port,
                isn: event.isn,
                ack: event.ack,
                reuse_interval_seconds: known.then(|| f64::from(event.former_age_ms) / 1000.0),
            },
            former,
        });
        if space.samples.len() > SAMPLES {
            space.samples.pop_front();
        }
    }

    /// Joins the two observation points: the same SYN has the same ISN before and after a NAT here.
    fn join(&mut self) {
        for (_, isn, wire) in &self.recent_wire {
            if let Some((_, _, socket)) = self.recent_socket.iter().find(|(_, i, _)| i == isn) {
                self.joined.insert(*wire, *socket);
            }
        }
        while self.recent_wire.len() > 1024 {
            self.recent_wire.pop_front();
        }
        while self.recent_socket.len() > 1024 {
            self.recent_socket.pop_front();
        }
    }

    /// Whether a bare ACK that a socket met was seen on the wire too.
    #[must_use]
    pub fn is_on_wire(&self, socket: &PortSpaceKey) -> bool {
        let wire = PortSpaceKey {
            point: Point::Wire as u8,
            netns: 0,
            ..*socket
        };
        let has_wire = self
            .spaces
            .get(&wire)
            .is_some_and(|s| s.totals.bare_acks > 0);
        has_wire || self.joined.values().any(|s| s == socket)
    }

    /// The processes behind a port space, busiest first: of the same addresses, else joined by ISN.
    #[must_use]
    pub fn openers(&self, key: &PortSpaceKey, now: Moment, window: Duration) -> Vec<OpenerRate> {
        let same = Space3::from(key);
        let joined = self.joined.get(&same).map(Space3::from);
        let mut found: Vec<OpenerRate> = self
            .openers
            .iter()
            .filter(|(k, _)| {
                let of = Space3::from(&k.space);
                (of == same || Some(of) == joined)
                    && (key.point != Point::Socket as u8 || k.space.netns == key.netns)
            })
            .map(|(k, state)| {
                let before = state
                    .history
                    .iter()
                    .rev()
                    .find(|(at, _)| now.since(*at) >= window)
                    .map_or(0, |(_, n)| *n);
                OpenerRate {
                    key: *k,
                    total: state.total,
                    opens: state.total.opens - before,
                }
            })
            .filter(|rate| rate.opens > 0)
            .collect();
        found.sort_by_key(|r| (std::cmp::Reverse(r.opens), r.key));
        found
    }

    fn census(&mut self, now: Moment, rows: &[(PortSpaceKey, CensusRow)]) {
        let mut sums: HashMap<(Space3, u8), Census> = HashMap::new();
        for (key, row) in rows {
            // A row whose local port has no listener belongs to the initiator if an open of that port
            // space was seen; else its role stays unknown, and nobody claims it.
            let role = if key.role == Role::Unknown as u8 {
                Role::Initiator as u8
            } else {
                key.role
            };
            sums.entry((Space3::from(key), role)).or_default().add(row);
        }
        for (key, space) in &mut self.spaces {
            let sum = sums.get(&(Space3::from(key), key.role));
            space.census = sum.copied().unwrap_or_default();
            let held = space.census.held();
            space.time_wait_history.push_back((now, held));
            if let Some(episode) = &mut space.episode {
                episode.time_wait_peak = episode.time_wait_peak.max(held);
            }
        }
    }

    fn ports(&mut self, snapshot: &Snapshot, ageing: Duration) {
        let now = snapshot.now;
        let mut tables = self.spaces.values().filter(|s| s.ports.is_some()).count();
        for (key, ports) in &snapshot.ports {
            let Some(space) = self.spaces.get_mut(key) else {
                continue;
            };
            if space.ports.is_none() {
                // A port space that makes no new connections needs no table.
                if tables >= PORT_TABLES || space.totals.established == 0 {
                    continue;
                }
                tables += 1;
            }
            let established = space.totals.established;
            space
                .ports
                .get_or_insert_default()
                .note(now, ports, established);
        }
        for space in self.spaces.values_mut() {
            let idle = now.since(space.last_change) > ageing;
            if idle {
                space.ports = None;
            } else if now.0 / 1_000_000_000 % 10 == 0
                && let Some(ports) = &mut space.ports
            {
                ports.age(now, ageing);
            }
        }
    }

    /// Drops history outside the window, and port spaces that have been quiet for long.
    fn forget(&mut self, now: Moment, keep: Duration) {
        let idle = keep * 10;
        let forgotten = &mut self.forgotten;
        self.spaces.retain(|_, space| {
            space.note_refused();
            if space
                .episode
                .as_ref()
                .is_some_and(|e| now.since(e.last_symptom) > keep)
            {
                space.episode = None;
            }
            while space.history.len() > 2 && now.since(space.history[1].0) >= keep {
                space.history.pop_front();
            }
            while space
                .time_wait_history
                .front()
                .is_some_and(|(at, _)| now.since(*at) > keep)
            {
                space.time_wait_history.pop_front();
            }
            let stays = now.since(space.last_change) < idle || space.census.in_use > 0;
            if !stays {
                *forgotten = forgotten.plus(&space.totals);
            }
            stays
        });
    }
}

impl Space {
    fn take(&mut self, now: Moment, raw: &PortSpace) {
        // A port space that was forgotten in the kernel and came back counts from zero again.
        let restarted = raw.opens < self.raw.opens || raw.established < self.raw.established;
        let before = if restarted {
            PortSpace::default()
        } else {
            self.raw
        };
        let difference = Totals::from(raw).minus(&Totals::from(&before));
        if difference != Totals::default() {
            self.last_change = now;
        }
        self.begin_episode(now, &difference);
        self.totals = self.totals.plus(&difference);
        let add = |sum: &mut [u64; BUCKETS], new: &[u64; BUCKETS], old: &[u64; BUCKETS]| {
            for i in 0..BUCKETS {
                sum[i] += new[i].saturating_sub(old[i]);
            }
        };
        let h = &mut self.histograms;
        add(
            &mut h.reuse_interval,
            &raw.reuse_interval,
            &before.reuse_interval,
        );
        add(
            &mut h.handshake_duration,
            &raw.handshake_duration,
            &before.handshake_duration,
        );
        add(&mut h.port_search, &raw.port_search, &before.port_search);
        self.raw = *raw;
        self.history.push_back((now, self.totals));
    }
}

impl Space {
    fn begin_episode(&mut self, now: Moment, difference: &Totals) {
        if difference.bare_acks + difference.duplicate_syns + difference.no_listener == 0 {
            return;
        }
        let since = self.history.back().map_or(now, |(at, _)| *at);
        let (baseline, time_wait) = (self.totals, &self.time_wait_history);
        let episode = self.episode.get_or_insert_with(|| Episode {
            since,
            baseline,
            last_symptom: now,
            time_wait_peak: time_wait.iter().map(|(_, n)| *n).max().unwrap_or(0),
            refused_ports: BTreeSet::new(),
            reuse_interval_ms: None,
        });
        episode.last_symptom = now;
    }

    /// Takes what the events told into the episode that the counters have opened by now.
    fn note_refused(&mut self) {
        let Some(episode) = &mut self.episode else {
            return;
        };
        for (port, interval) in self.waiting.drain(..) {
            episode.refused_ports.insert(port);
            if let Some(ms) = interval {
                let (low, high) = episode.reuse_interval_ms.unwrap_or((ms, ms));
                episode.reuse_interval_ms = Some((low.min(ms), high.max(ms)));
            }
        }
    }
}

macro_rules! totals {
    ($($field:ident),* $(,)?) => {
        impl From<&PortSpace> for Totals {
            fn from(raw: &PortSpace) -> Self {
                Self { $($field: raw.$field),* }
            }
        }

        impl Totals {
            /// What was counted since `earlier`.
            #[must_use]
            pub fn minus(&self, earlier: &Self) -> Self {
                Self { $($field: self.$field.saturating_sub(earlier.$field)),* }
            }

            /// Both together.
            #[must_use]
            pub fn plus(&self, other: &Self) -> Self {
                Self { $($field: self.$field + other.$field),* }
            }
        }
    };
}

totals!(
    opens,
    established,
    refused,
    syn_timeouts,
    abandoned,
    half_open,
    no_local_port,
    failed,
    syn_retransmits,
    bare_acks,
    bare_acks_closed,
    bare_acks_open,
    bare_acks_half_open,
    bare_acks_unknown,
    duplicate_syns,
    no_listener,
    rsts_after_bare_ack,
    healed,
    unhealed,
    reuse_accepted,
    resets_received,
    resets_sent,
    data_retransmits,
);
