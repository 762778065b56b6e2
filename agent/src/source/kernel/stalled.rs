//! The table of established sockets that make no progress.

use aya::{
    TestRun as _,
    maps::{Array, HashMap, MapData},
    programs::{RawTracePoint, RawTracePointRunOptions},
};
use tuplewatch_common::{
    address::{FourTuple, Point, Role},
    memory::{self, Former, Set},
    record::{Opener, OpenerKey},
    stalled::{StalledKey, StalledRow},
};

use super::{
    batch, clock, idle,
    load::{Kernel, map_mut},
};
use crate::core::{
    stalled::{How, Process, Recovered, Stalled},
    time::Moment,
};

/// Sockets that one run of `stalled_again` takes (`STALLED_BATCH` of the kernel side).
const BATCH: usize = 64;
/// The longest time between two retransmissions (`TCP_RTO_MAX`).
const RTO_MAX_MS: u64 = 120_000;
/// Times of sockets are in ticks: how much two of them may be off.
const TICKS_MS: u64 = 20;

impl Kernel {
    /// All that make no progress now, and those known that got something through. Those that are known are looked at
    /// again; those that do better are taken out of the table. `openers` knows the names of processes.
    pub(super) fn stalled(
        &mut self,
        openers: &[(OpenerKey, Opener)],
    ) -> anyhow::Result<(Vec<Stalled>, Vec<Recovered>)> {
        if !self.has_census {
            return Ok(Default::default());
        }
        let known: Vec<(StalledKey, StalledRow)> = batch::read(self.hash("STALLED")?)?;
        if known.is_empty() {
            return Ok(Default::default());
        }
        let began_ns = clock::monotonic_ns();
        for some in known.chunks(BATCH) {
            self.look_again(some)?;
        }
        let now: Vec<(StalledKey, StalledRow)> = batch::read(self.hash("STALLED")?)?;
        let mut stalled = Vec::with_capacity(now.len());
        let (mut gone, mut recovered) = (Vec::new(), Vec::new());
        for (key, row) in &now {
            if row.seen_ns < began_ns {
                gone.push(*key);
                if row.is_recovered == 1 {
                    recovered.extend(Recovered::of(&read(key, row, None, None)));
                }
                continue;
            }
            let opened_ns = match row.opened_ns {
                0 => self.established_ns(&key.tuple, row.seen_ns)?,
                at => Some(at),
            };
            let command = openers
                .iter()
                .find(|(opener, _)| row.pid != 0 && opener.pid == row.pid)
                .map(|(_, opener)| crate::core::signature::command(&opener.command));
            stalled.push(read(key, row, opened_ns, command));
        }
        let mut map: HashMap<_, StalledKey, StalledRow> =
            map_mut(&mut self.ebpf, "STALLED")?.try_into()?;
        for key in gone {
            let _ = map.remove(&key);
        }
        Ok((stalled, recovered))
    }

    fn look_again(&mut self, some: &[(StalledKey, StalledRow)]) -> anyhow::Result<()> {
        let mut map: Array<_, u64> = map_mut(&mut self.ebpf, "STALLED_AGAIN")?.try_into()?;
        for (i, (_, row)) in (0..).zip(some) {
            map.set(i, row.sk, 0)?;
        }
        let program: &RawTracePoint = self
            .ebpf
            .program("stalled_again")
            .ok_or_else(|| anyhow::anyhow!("there is no program stalled_again"))?
            .try_into()?;
        let mut options = RawTracePointRunOptions::new();
        options.args[0] = some.len() as u64;
        program.test_run(options)?;
        Ok(())
    }

    /// When the handshake of a connection was completed, unless that was before the agent began.
    fn established_ns(&self, tuple: &FourTuple, now_ns: u64) -> anyhow::Result<Option<u64>> {
        let memory: Array<&MapData, Set> = self
            .ebpf
            .map("MEMORY")
            .ok_or_else(|| anyhow::anyhow!("the eBPF object has no map MEMORY"))?
            .try_into()?;
        let hash = tuple.hash();
        let set = memory.get(&(hash as u32 & (memory.len() - 1)), 0)?;
        let word = memory::find(&set, hash).filter(|word| word.state() == Former::Open);
        let at_ns = word.map(|word| word.at_ns(now_ns));
        // Those older than the agent were noted at its start.
        Ok(at_ns.filter(|at| *at > self.started_ns))
    }
}

/// What a row says.
fn read(
    key: &StalledKey,
    row: &StalledRow,
    opened_ns: Option<u64>,
    command: Option<String>,
) -> Stalled {
    // A socket whose local port nobody listens on has opened its connection.
    let role = match Role::from_u8(row.role) {
        Role::Unknown => Role::Initiator,
        known => known,
    };
    let connection = if role == Role::Responder {
        key.tuple.reversed()
    } else {
        key.tuple
    };
    let times = Times::of(row);
    let ago = |ms: u64| Moment(row.seen_ns.saturating_sub(ms * 1_000_000));
    Stalled {
        connection,
        role,
        point: Point::Socket,
        netns: key.netns,
        opened: opened_ns.map(Moment),
        since: ago(times.since_ms),
        heard: Some(ago(row.heard_ms.into())),
        how: times.how,
        rtos: row.retransmits.into(),
        probes: row.probes.into(),
        unacked: row.unacked,
        waiting: row.waiting,
        is_full_size: row.mss > 0 && row.unacked >= row.mss,
        is_answered: times.is_answered,
        is_used: row.is_used == 1,
        settings: idle::settings(row.settings, row.keep_alive_ms, row.user_timeout_ms),
        process: (row.pid != 0).then_some(Process {
            pid: row.pid,
            command,
        }),
    }
}

/// What the counters of a socket say of the past.
struct Times {
    how: How,
    since_ms: u64,
    is_answered: bool,
}

impl Times {
    fn of(row: &StalledRow) -> Self {
        // The time-out as it was at first, which each of those that ran out has doubled.
        let first_ms = u64::from(row.rto_ms) >> row.backoff.min(32);
        let waited = |timeouts: u8| -> u64 {
            let each = |n: u8| (first_ms << n.min(32)).min(RTO_MAX_MS);
            (0..timeouts).map(each).sum()
        };
        if row.probes > 0 {
            // The latest probe has only just gone out; on a closed window they are doubled too.
            let before = row.probes - 1;
            let since_ms = if row.is_closed == 1 {
                waited(before)
            } else {
                u64::from(before) * u64::from(row.probe_ms)
            };
            return Self {
                how: How::Silent,
                since_ms,
                is_answered: false,
            };
        }
        if row.is_closed == 1 && row.retransmits == 0 {
            return Self {
                how: How::Closed,
                since_ms: 0,
                is_answered: true,
            };
        }
        // Data was sent last at the latest time-out, and first so many of them before.
        let since_ms = u64::from(row.sent_ms) + waited(row.retransmits);
        let since_first_timeout_ms = since_ms.saturating_sub(first_ms);
        Self {
            how: How::Unacked,
            since_ms,
            is_answered: u64::from(row.heard_ms) + TICKS_MS < since_first_timeout_ms,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Three time-outs of a socket whose first one is 200 ms, the latest half a second ago.
    fn row() -> StalledRow {
        StalledRow {
            seen_ns: 10_000_000_000,
            rto_ms: 1600,
            backoff: 3,
            retransmits: 3,
            sent_ms: 500,
            heard_ms: 60_000,
            unacked: 112,
            mss: 1448,
            role: Role::Unknown as u8,
            ..StalledRow::default()
        }
    }

    #[test]
    fn the_timer_tells_since_when() {
        let stalled = read(&StalledKey::default(), &row(), None, None);
        assert_eq!(stalled.since, Moment(10_000_000_000 - 1_900_000_000));
        assert_eq!((stalled.how, stalled.is_answered), (How::Unacked, false));
        assert_eq!(stalled.role, Role::Initiator);
        assert!(!stalled.is_full_size && stalled.process.is_none());
        // At the time-out itself the kernel has not doubled it yet.
        let at_once = StalledRow {
            rto_ms: 800,
            backoff: 2,
            sent_ms: 0,
            ..row()
        };
        assert_eq!(Times::of(&at_once).since_ms, 1400);
        // At the limit each is as long as the one before.
        let long = StalledRow {
            rto_ms: 120_000,
            backoff: 12,
            retransmits: 12,
            ..row()
        };
        let first = 120_000 >> 12;
        let doubled: u64 = (0..12).map(|n| (first << n).min(120_000)).sum();
        assert_eq!(Times::of(&long).since_ms, 500 + doubled);
    }

    #[test]
    fn the_rest_before_is_told_and_how_the_socket_is_set() {
        let row = StalledRow {
            seen_ns: 100_000_000_000,
            keep_alive_ms: 45_000,
            settings: tuplewatch_common::idle::KEEP_ALIVE_KNOWN,
            user_timeout_ms: u32::MAX,
            ..row()
        };
        let stalled = read(&StalledKey::default(), &row, None, None);
        // Nothing was heard for a minute, and what stalls was sent 1.9 s ago.
        assert_eq!(stalled.rest(), Some(Duration::from_millis(58_100)));
        assert_eq!(stalled.settings.keep_alive, Some(false));
        assert_eq!(
            stalled.settings.keep_alive_time,
            Some(Duration::from_secs(45))
        );
        assert_eq!(stalled.settings.user_timeout, None);
        let answered = StalledRow {
            heard_ms: 900,
            ..row
        };
        let stalled = read(&StalledKey::default(), &answered, None, None);
        assert_eq!(stalled.rest(), None);
    }

    #[test]
    fn a_peer_is_heard_after_the_first_time_out_or_not() {
        // The first time-out was 1.7 s ago.
        let heard = |heard_ms| Times::of(&StalledRow { heard_ms, ..row() }).is_answered;
        assert!(heard(1600));
        assert!(!heard(1690) && !heard(1900) && !heard(5000));
    }

    #[test]
    fn probes_and_closed_windows() {
        let probes = StalledRow {
            retransmits: 0,
            probes: 3,
            probe_ms: 15_000,
            ..row()
        };
        let times = Times::of(&probes);
        assert_eq!((times.how, times.since_ms), (How::Silent, 30_000));
        let closed = StalledRow {
            retransmits: 0,
            is_closed: 1,
            ..row()
        };
        assert_eq!(Times::of(&closed).how, How::Closed);
        let silent = StalledRow {
            probes: 2,
            ..closed
        };
        let times = Times::of(&silent);
        assert_eq!((times.how, times.since_ms), (How::Silent, 200));
    }
}
