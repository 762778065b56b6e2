//! Connections that make no progress, and what became of new ones to the same place meanwhile.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tuplewatch_common::address::{FourTuple, Point, PortSpaceKey, Role};

use super::{idle::Settings, report::Totals, time::Moment};

/// Connections remembered over all port spaces after their stall: some hundred kilobytes.
const OVER: usize = 1024;

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

/// Port spaces with connections that make no progress.
#[derive(Clone, Debug, Default)]
pub struct Stalls {
    all: BTreeMap<PortSpaceKey, Group>,
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

    fn take(&mut self, now: Moment, stalled: Stalled, totals: &Totals) {
        let known = self
            .live
            .entry(stalled.connection)
            .or_insert_with(|| Known {
                stalled: stalled.clone(),
                baseline: *totals,
                newer_since: None,
                attempts_by_then: 0,
            });
        let since = known.stalled.since.min(stalled.since);
        known.stalled = Stalled { since, ..stalled };
        if known.newer_since.is_none() && known.since_then(totals).1 > 0 {
            known.newer_since = Some(now);
            known.attempts_by_then = known.stalled.attempts();
        }
        self.over.remove(&known.stalled.connection);
    }
}

impl Stalls {
    /// Takes all that make no progress now; those that are not among them any more are over, and
    /// remembered for `keep`. `totals` gives the counters of a port space.
    pub fn take(
        &mut self,
        now: Moment,
        stalled: &[Stalled],
        keep: Duration,
        totals: impl Fn(&PortSpaceKey) -> Totals,
    ) {
        let mut seen: BTreeSet<(PortSpaceKey, FourTuple)> = BTreeSet::new();
        for stalled in stalled {
            let key = stalled.space();
            seen.insert((key, stalled.connection));
            let group = self.all.entry(key).or_default();
            group.take(now, stalled.clone(), &totals(&key));
        }
        let mut over = 0;
        self.all.retain(|key, group| {
            let gone = group
                .live
                .extract_if(.., |connection, _| !seen.contains(&(*key, *connection)));
            for (connection, known) in gone {
                group.over.insert(connection, Over { known, at: now });
            }
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
mod tests {
    use super::*;

    const KEEP: Duration = Duration::from_secs(60);
    const S: u64 = 1_000_000_000;

    fn stalled(port: u16, rtos: u32) -> Stalled {
        Stalled {
            connection: FourTuple {
                initiator_port: port,
                responder_port: 80,
                ..FourTuple::default()
            },
            role: Role::Initiator,
            point: Point::Wire,
            netns: 0,
            opened: None,
            since: Moment(S),
            heard: None,
            how: How::Unacked,
            rtos,
            probes: 0,
            unacked: 100,
            waiting: 0,
            is_full_size: false,
            is_answered: false,
            is_used: true,
            settings: Settings::default(),
            process: None,
        }
    }

    fn look(stalls: &mut Stalls, second: u64, found: &[Stalled], established: u64) {
        let totals = Totals {
            opens: established,
            established,
            ..Totals::default()
        };
        stalls.take(Moment(second * S), found, KEEP, |_| totals);
    }

    #[test]
    fn an_attempt_counts_after_a_newer_connection_only() {
        let mut stalls = Stalls::default();
        let key = stalled(1, 0).space();
        let known =
            |stalls: &Stalls| -> Known { stalls.get(&key).unwrap().live().next().unwrap().clone() };
        look(&mut stalls, 2, &[stalled(1, 2)], 10);
        look(&mut stalls, 3, &[stalled(1, 3)], 10);
        assert_eq!(known(&stalls).newer_since, None);
        look(&mut stalls, 4, &[stalled(1, 4)], 11);
        assert!(!known(&stalls).tried_since(), "it may have been before");
        look(&mut stalls, 5, &[stalled(1, 4)], 12);
        assert!(!known(&stalls).tried_since());
        look(&mut stalls, 6, &[stalled(1, 5)], 12);
        let known = known(&stalls);
        assert!(known.tried_since());
        assert_eq!(known.newer_since, Some(Moment(4 * S)));
        let totals = Totals {
            opens: 12,
            established: 12,
            ..Totals::default()
        };
        assert_eq!(known.since_then(&totals), (2, 2));
    }

    #[test]
    fn what_is_over_is_remembered_for_a_while_and_not_without_end() {
        let mut stalls = Stalls::default();
        let key = stalled(1, 0).space();
        look(&mut stalls, 2, &[stalled(1, 3), stalled(2, 3)], 0);
        look(&mut stalls, 3, &[stalled(2, 4)], 0);
        let group = stalls.get(&key).unwrap();
        assert_eq!((group.live().count(), group.over().count()), (1, 1));
        // It stalls again.
        look(&mut stalls, 4, &[stalled(1, 1), stalled(2, 4)], 0);
        assert_eq!(stalls.get(&key).unwrap().over().count(), 0);
        look(&mut stalls, 5, &[], 0);
        assert_eq!(stalls.all().count(), 0);
        assert_eq!(stalls.get(&key).unwrap().over().count(), 2);
        look(&mut stalls, 70, &[], 0);
        assert!(stalls.get(&key).is_none());
        for second in 100..120 {
            let many: Vec<Stalled> = (0..200)
                .map(|n| stalled(second as u16 * 200 + n, 3))
                .collect();
            look(&mut stalls, second, &many, 0);
            let over: usize = stalls.all.values().map(|g| g.over.len()).sum();
            assert!(over <= OVER, "{over}");
        }
    }
}
