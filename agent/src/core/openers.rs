//! Who opens connections, and how fast.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    time::Duration,
};

use tuplewatch_common::{
    address::{Address, PortSpaceKey},
    record::{Opener, OpenerKey},
};

use super::{history::History, observation::Space3, time::Moment};

/// All processes that opened connections lately, in the order of their port spaces.
#[derive(Clone, Debug, Default)]
pub struct Openers {
    known: BTreeMap<OpenerKey, State>,
    swept: Moment,
}

#[derive(Clone, Debug)]
struct State {
    total: Opener,
    opens: History,
    /// connect() without a port: few ever have any.
    failures: Option<Box<History>>,
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
    /// connect() in the window that found no source port.
    pub no_local_port: u64,
}

/// A process that opened nothing for so long is forgotten.
const IDLE: Duration = Duration::from_secs(900);
/// How often that is looked at.
const SWEEP: Duration = Duration::from_secs(60);

impl Openers {
    /// Takes the totals of the source; `keep` is the longest window asked for.
    pub fn take(&mut self, now: Moment, openers: &[(OpenerKey, Opener)], keep: Duration) {
        for (key, total) in openers {
            match self.known.entry(*key) {
                Entry::Vacant(entry) => {
                    let failed = total.no_local_port > 0;
                    entry.insert(State {
                        total: *total,
                        opens: History::from_zero(now),
                        failures: failed.then(|| Box::new(History::from_zero(now))),
                    });
                }
                Entry::Occupied(mut entry) => entry.get_mut().take(now, total, keep),
            }
        }
        if now.since(self.swept) >= SWEEP {
            self.swept = now;
            self.known.retain(|_, s| {
                s.opens.forget(now, keep, s.total.opens);
                let failed = s.total.no_local_port;
                s.failures = s.failures.take().filter(|h| !h.is_quiet(now, keep, failed));
                now.since(Moment(s.total.last_ns)) < IDLE
            });
        }
    }

    /// Those in a port space (of any role, point and namespace) that `wanted` picks and that opened
    /// something in the window, busiest first.
    pub fn of_space(
        &self,
        space: &Space3,
        now: Moment,
        window: Duration,
        wanted: impl Fn(&OpenerKey) -> bool,
    ) -> Vec<OpenerRate> {
        let key = |role| PortSpaceKey {
            initiator: space.initiator,
            responder: space.responder,
            responder_port: space.responder_port,
            role,
            ..PortSpaceKey::default()
        };
        self.between(key(0), key(u8::MAX), now, window, wanted)
    }

    /// Those whose connections come from `initiator`, as [`Openers::of_space`] has them.
    pub fn of_source(
        &self,
        initiator: Address,
        now: Moment,
        window: Duration,
        wanted: impl Fn(&OpenerKey) -> bool,
    ) -> Vec<OpenerRate> {
        let first = PortSpaceKey {
            initiator,
            ..PortSpaceKey::default()
        };
        let last = PortSpaceKey {
            responder: [u8::MAX; 16],
            responder_port: u16::MAX,
            role: u8::MAX,
            ..first
        };
        self.between(first, last, now, window, wanted)
    }

    fn between(
        &self,
        first: PortSpaceKey,
        last: PortSpaceKey,
        now: Moment,
        window: Duration,
        wanted: impl Fn(&OpenerKey) -> bool,
    ) -> Vec<OpenerRate> {
        let key = |space| OpenerKey {
            space,
            ..OpenerKey::default()
        };
        let mut found: Vec<OpenerRate> = self
            .known
            .range(key(first)..=key(last))
            .filter(|(key, _)| wanted(key))
            .map(|(key, state)| state.rate(key, now, window))
            .filter(|rate| rate.opens + rate.no_local_port > 0)
            .collect();
        found.sort_by_key(|r| (std::cmp::Reverse(r.opens), r.key));
        found
    }

    /// Begins all windows anew.
    pub fn resume(&mut self, now: Moment) {
        for state in self.known.values_mut() {
            state.opens = History::from_value(now, state.total.opens);
            state.failures = None;
        }
    }
}

impl State {
    fn take(&mut self, now: Moment, total: &Opener, keep: Duration) {
        if *total == self.total {
            // The latest value is noted in its time, also when nothing comes after it.
            if self.opens.lags(total.opens) {
                self.opens.note(now, total.opens, keep);
            }
            if let Some(failures) = &mut self.failures
                && failures.lags(total.no_local_port)
            {
                failures.note(now, total.no_local_port, keep);
            }
            return;
        }
        // An entry that the source forgot begins again.
        let before = if total.opens < self.total.opens {
            self.opens = History::default();
            self.failures = None;
            Opener::default()
        } else {
            self.total
        };
        if self.opens.is_empty() {
            self.opens = History::from_value(now, before.opens);
        }
        self.opens.note(now, total.opens, keep);
        if total.no_local_port > before.no_local_port {
            self.failures
                .get_or_insert_with(|| Box::new(History::from_value(now, before.no_local_port)))
                .note(now, total.no_local_port, keep);
        }
        self.total = *total;
    }

    fn rate(&self, key: &OpenerKey, now: Moment, window: Duration) -> OpenerRate {
        let since = |history: &History, total: u64| {
            total.saturating_sub(history.before(now, window, total))
        };
        let failed = self.failures.as_ref();
        OpenerRate {
            key: *key,
            total: self.total,
            opens: since(&self.opens, self.total.opens),
            no_local_port: failed.map_or(0, |h| since(h, self.total.no_local_port)),
        }
    }
}

#[cfg(test)]
mod tests {
    use tuplewatch_common::address::v4_mapped;

    use super::*;

    const S: u64 = 1_000_000_000;
    const MINUTE: Duration = Duration::from_secs(60);

    fn key(last: u8, port: u16, pid: u32) -> OpenerKey {
        OpenerKey {
            space: PortSpaceKey {
                initiator: v4_mapped([192, 0, 2, last]),
                responder: v4_mapped([203, 0, 113, 10]),
                responder_port: port,
                role: 1,
                point: 1,
                netns: 7,
            },
            pid,
            pad: 0,
        }
    }

    fn opener(opens: u64, no_local_port: u64, last_ns: u64) -> Opener {
        Opener {
            opens,
            no_local_port,
            last_ns,
            ..Opener::default()
        }
    }

    #[test]
    fn openers_are_found_by_port_space_and_by_source() {
        let mut openers = Openers::default();
        let all = [
            (key(1, 80, 10), 5),
            (key(1, 443, 11), 9),
            (key(2, 80, 12), 7),
        ];
        for t in 1..=3 {
            let totals: Vec<_> = all
                .iter()
                .map(|(key, n)| (*key, opener(n * t, u64::from(key.pid == 11) * t, t * S)))
                .collect();
            openers.take(Moment(t * S), &totals, MINUTE);
        }
        let now = Moment(3 * S);
        let space = Space3::from(&key(1, 80, 0).space);
        let found = openers.of_space(&space, now, MINUTE, |_| true);
        let pids: Vec<_> = found.iter().map(|r| (r.key.pid, r.opens)).collect();
        assert_eq!(pids, [(10, 15)]);
        let found = openers.of_source(v4_mapped([192, 0, 2, 1]), now, MINUTE, |_| true);
        let pids: Vec<_> = found
            .iter()
            .map(|r| (r.key.pid, r.opens, r.no_local_port))
            .collect();
        assert_eq!(pids, [(11, 27, 3), (10, 15, 0)]);
        assert!(
            openers
                .of_space(&space, now, MINUTE, |k| k.pid == 1)
                .is_empty()
        );
        // Long after, nobody opens anything; later still they are forgotten.
        let last: Vec<_> = all
            .iter()
            .map(|(key, n)| (*key, opener(n * 3, u64::from(key.pid == 11) * 3, 3 * S)))
            .collect();
        openers.take(Moment(10 * S), &last, MINUTE);
        openers.take(Moment(100 * S), &last, MINUTE);
        assert!(
            openers
                .of_space(&space, Moment(100 * S), MINUTE, |_| true)
                .is_empty()
        );
        openers.take(Moment(1000 * S), &[], MINUTE);
        assert!(openers.known.is_empty());
    }
}
