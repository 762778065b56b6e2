//! Connections that make no progress, and what became of new ones to the same place meanwhile.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tuplewatch_common::address::{FourTuple, Point, PortSpaceKey, Role};

use super::{
    idle::Settings,
    path_loss::{PathLoss, Paths},
    report::Totals,
    time::Moment,
};

/// Connections remembered over all port spaces after their stall: some hundred kilobytes.
const OVER: usize = 1024;
/// Of connections that are likelier by chance nothing is known by how many there are.
const UNLIKELY: f64 = 0.01;

/// An established connection that makes no progress, as it stands.
#[derive(Clone, Debug, PartialEq)]
pub struct Stalled {
    /// The connection, named by who opened it.
    pub connection: FourTuple,
    /// Which end this host is.
    pub role: Role,
    /// Where it is seen.
    pub point: Point,
    /// Inode of its network namespace at [`Point::Socket`], else 0.
    pub netns: u32,
    /// When its handshake was completed, if that was seen.
    pub opened: Option<Moment>,
    /// When what is not acknowledged was sent first, or the first probe without an answer: an estimate
    /// from the retransmission timer where the source has not seen it.
    pub since: Moment,
    /// When the peer was heard last, if that is known.
    pub heard: Option<Moment>,
    /// What stands still.
    pub how: How,
    /// Time-outs in a row without an acknowledgement.
    pub rtos: u32,
    /// Probes of keep-alive or of a closed window in a row without an answer.
    pub probes: u32,
    /// Bytes sent and not acknowledged.
    pub unacked: u32,
    /// Bytes that wait behind them.
    pub waiting: u32,
    /// The first segment that is not acknowledged is as large as this path is thought to carry.
    pub is_full_size: bool,
    /// Segments of the peer have come since the first time-out, none of which acknowledges it.
    pub is_answered: bool,
    /// Data has gone through before. Where none has, the peer may not have accepted the connection: it
    /// answers SYNs also when its accept queue is full.
    pub is_used: bool,
    /// How the socket is set.
    pub settings: Settings,
    /// Who opened it, where this host did and the agent has seen it.
    pub process: Option<Process>,
}

/// What stands still on a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum How {
    /// What was sent is not acknowledged.
    Unacked,
    /// Probes get no answer, on an idle connection or while the peer's window is closed.
    Silent,
    /// The peer answers that its window is closed.
    Closed,
}

/// A process that holds a socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its number in the initial pid namespace.
    pub pid: u32,
    /// Its command name, where it is known.
    pub command: Option<String>,
}

impl Stalled {
    /// Its port space.
    #[must_use]
    pub const fn space(&self) -> PortSpaceKey {
        let role = self.role as u8;
        match self.point {
            Point::Socket => PortSpaceKey::socket(&self.connection, role, self.netns),
            Point::Wire => PortSpaceKey::wire(&self.connection, role),
        }
    }

    /// How long nothing was sent or received before what is not acknowledged: nothing that was sent before is
    /// left unacknowledged, and nothing was heard since.
    #[must_use]
    pub fn rest(&self) -> Option<Duration> {
        let is_silent = !self.is_answered && self.how != How::Closed;
        let heard = self.heard.filter(|_| is_silent)?;
        Some(self.since.since(heard))
    }

    /// Transmissions in a row that nobody has acknowledged, but for the first one.
    #[must_use]
    pub const fn attempts(&self) -> u32 {
        self.rtos + self.probes
    }
}

/// A connection that got something through again after time-outs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recovered {
    /// Its port space.
    pub space: PortSpaceKey,
    /// The connection.
    pub connection: FourTuple,
    /// How many time-outs in a row that took.
    pub rtos: u32,
}

impl Recovered {
    /// Of a connection as it was found last, if data waited on it.
    #[must_use]
    pub fn of(stalled: &Stalled) -> Option<Self> {
        (stalled.how == How::Unacked).then(|| Self {
            space: stalled.space(),
            connection: stalled.connection,
            rtos: stalled.rtos,
        })
    }
}

/// What was counted in a port space.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counted {
    /// Since the agent began.
    pub totals: Totals,
    /// Within [`super::path_loss::LATELY`].
    pub lately: Totals,
    /// Since a moment, or a little longer.
    pub since: Totals,
}

/// Port spaces with connections that make no progress.
#[derive(Clone, Debug, Default)]
pub struct Stalls {
    all: BTreeMap<PortSpaceKey, Group>,
    paths: Paths,
}

/// Those of one port space.
#[derive(Clone, Debug, Default)]
pub struct Group {
    live: BTreeMap<FourTuple, Known>,
    /// Those whose stall is over: they got through or were closed.
    over: BTreeMap<FourTuple, Over>,
}

/// A connection that makes no progress.
#[derive(Clone, Debug)]
pub struct Known {
    /// As it stands; [`Stalled::since`] is that of the first look.
    pub stalled: Stalled,
    /// Counters of its port space at the first look.
    baseline: Totals,
    /// The first look at which another connection had been established since.
    pub newer_since: Option<Moment>,
    /// Its attempts by then.
    attempts_by_then: u32,
    /// Repetitions that were in vain for sure.
    pub in_vain: u32,
    /// How many connections would have come so far by chance, with what the path was measured to lose: the
    /// least of all looks, since what is lost later does not explain it.
    chance: f64,
    /// How often such connections would have met in their port space by chance: the same, of all that are
    /// unlikely by themselves at one look.
    pub together: f64,
    /// The same if nobody gets through since it stalls: the opens that are lost then are not lost by chance.
    pub if_down: f64,
    /// What was measured of the path when that was the least.
    pub path: PathLoss,
    /// The latest look.
    seen: Moment,
}

/// A connection whose stall is over.
#[derive(Clone, Debug)]
pub struct Over {
    /// As it stood at the last look at which it made no progress.
    pub known: Known,
    /// The look at which it was found to be over.
    pub at: Moment,
}

impl Known {
    /// It was tried again after another connection had been established, in vain: not only the timer
    /// of this one is behind.
    #[must_use]
    pub const fn tried_since(&self) -> bool {
        self.newer_since.is_some() && self.stalled.attempts() > self.attempts_by_then
    }

    fn new(now: Moment, stalled: Stalled, totals: &Totals) -> Self {
        Self {
            stalled,
            baseline: *totals,
            newer_since: None,
            attempts_by_then: 0,
            in_vain: 0,
            chance: f64::INFINITY,
            together: f64::INFINITY,
            if_down: f64::INFINITY,
            path: PathLoss::default(),
            seen: now,
        }
    }

    /// What stands still now was sent after the look at which something stood still before: that got through.
    fn is_other_than(&self, stalled: &Stalled) -> bool {
        stalled.how != How::Closed && stalled.since > self.seen
    }

    /// Takes how it stands now, on a path that was measured to lose so much.
    fn take(&mut self, now: Moment, stalled: Stalled, counted: &Counted, path: &PathLoss) {
        // The latest attempt may be on its way; those of the look before have waited for a second.
        let attempts = stalled.attempts();
        let waited = if now > self.seen {
            self.stalled.attempts().min(attempts)
        } else {
            0
        };
        self.in_vain = self.in_vain.max(waited).max(attempts.saturating_sub(1));
        let in_vain = self.in_vain;
        let chance = |path: &PathLoss| match stalled.how {
            How::Unacked => path.chance(in_vain),
            How::Silent => path.chance_of_probes(in_vain),
            How::Closed => f64::INFINITY,
        };
        if chance(path) < self.chance {
            (self.chance, self.path) = (chance(path), *path);
        }
        if counted.since.established == 0 {
            let before = path.without(&counted.lately);
            self.if_down = self.if_down.min(chance(&before));
        }
        let since = self.stalled.since.min(stalled.since);
        self.stalled = Stalled { since, ..stalled };
        if self.newer_since.is_none() && self.since_then(&counted.totals).1 > 0 {
            self.newer_since = Some(now);
            self.attempts_by_then = attempts;
        }
        self.seen = now;
    }

    /// Opens and completed handshakes in its port space since the first look at it.
    #[must_use]
    pub const fn since_then(&self, totals: &Totals) -> (u64, u64) {
        (
            totals.opens.saturating_sub(self.baseline.opens),
            totals.established.saturating_sub(self.baseline.established),
        )
    }
}

impl Group {
    /// Those that make no progress now.
    pub fn live(&self) -> impl Iterator<Item = &Known> {
        self.live.values()
    }

    /// Those whose stall is over, as long as they are remembered.
    pub fn over(&self) -> impl Iterator<Item = &Over> {
        self.over.values()
    }

    fn take(&mut self, now: Moment, stalled: Stalled, counted: &Counted, path: &PathLoss) {
        let totals = &counted.totals;
        let connection = stalled.connection;
        let known = self.live.entry(connection).or_insert_with(|| {
            self.over.remove(&connection);
            Known::new(now, stalled.clone(), totals)
        });
        if known.is_other_than(&stalled) {
            *known = Known::new(now, stalled.clone(), totals);
        }
        known.take(now, stalled, counted, path);
    }

    /// Losses are independent of each other, so that the chances of connections that stall at one time multiply.
    fn judge(&mut self) {
        let unlikely = |known: &Known| known.chance < UNLIKELY;
        let all = self.live.values().filter(|known| unlikely(known));
        let product: f64 = all.map(|known| known.chance).product();
        for known in self.live.values_mut() {
            let together = if unlikely(known) {
                product
            } else {
                known.chance
            };
            known.together = known.together.min(together);
        }
    }

    /// Connections that got something through since, and already stand still again.
    fn recovered<'a>(&'a self, stalled: &'a Stalled) -> Option<Recovered> {
        let known = self.live.get(&stalled.connection)?;
        let recovered = known.is_other_than(stalled).then_some(&known.stalled)?;
        Recovered::of(recovered)
    }
}

impl Stalls {
    /// Takes all that make no progress now; those that are not among them any more are over, and
    /// remembered for `keep`. `recovered` are those of them that got through, also those that stood still
    /// between two looks only. `counted` gives the counters of a port space, and what was counted since a moment.
    pub fn take(
        &mut self,
        now: Moment,
        (stalled, recovered): (&[Stalled], &[Recovered]),
        keep: Duration,
        counted: impl Fn(&PortSpaceKey, Moment) -> Counted,
    ) {
        let told: BTreeSet<FourTuple> = recovered.iter().map(|one| one.connection).collect();
        let again = stalled
            .iter()
            .filter(|stalled| !told.contains(&stalled.connection))
            .filter_map(|stalled| self.all.get(&stalled.space())?.recovered(stalled));
        let again: Vec<Recovered> = again.chain(recovered.iter().copied()).collect();
        self.paths.take(now, &again);
        let mut seen: BTreeSet<(PortSpaceKey, FourTuple)> = BTreeSet::new();
        for stalled in stalled {
            let key = stalled.space();
            seen.insert((key, stalled.connection));
            let group = self.all.entry(key).or_default();
            let counted = counted(&key, stalled.since);
            let path = self.paths.loss(&key, &counted.lately);
            group.take(now, stalled.clone(), &counted, &path);
        }
        let mut over = 0;
        self.all.retain(|key, group| {
            let gone = group
                .live
                .extract_if(.., |connection, _| !seen.contains(&(*key, *connection)));
            for (connection, known) in gone {
                group.over.insert(connection, Over { known, at: now });
            }
            group.judge();
            group.over.retain(|_, over| now.since(over.at) < keep);
            over += group.over.len();
            !group.live.is_empty() || !group.over.is_empty()
        });
        if over > OVER {
            self.forget();
        }
    }

    /// Begins anew: nobody has looked for a while.
    pub fn resume(&mut self) {
        self.all.clear();
        self.paths.clear();
    }

    /// Port spaces with connections that make no progress now.
    pub fn all(&self) -> impl Iterator<Item = (&PortSpaceKey, &Group)> {
        self.all.iter().filter(|(_, group)| !group.live.is_empty())
    }

    /// A connection that makes no progress now.
    #[must_use]
    pub fn live(&self, connection: &FourTuple, role: Role) -> Option<&Known> {
        let groups = self.all.iter().filter(|(key, _)| key.role == role as u8);
        let mut found = groups.filter_map(|(_, group)| group.live.get(connection));
        found.next()
    }

    /// One port space, also if all is over there.
    #[must_use]
    pub fn get(&self, key: &PortSpaceKey) -> Option<&Group> {
        self.all.get(key)
    }

    /// Forgets those that are over for longest, but for half of what may be kept.
    fn forget(&mut self) {
        let over = self.all.values().flat_map(|group| group.over.values());
        let mut times: Vec<Moment> = over.map(|over| over.at).collect();
        times.sort_unstable_by(|a, b| b.cmp(a));
        let Some(oldest) = times.get(OVER / 2).copied() else {
            return;
        };
        self.all.retain(|_, group| {
            group.over.retain(|_, over| over.at > oldest);
            !group.live.is_empty() || !group.over.is_empty()
        });
    }
}

#[cfg(test)]
mod tests;
