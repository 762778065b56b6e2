//! Who opens connections, and how fast.

use std::{collections::HashMap, time::Duration};

use tuplewatch_common::record::{Opener, OpenerKey};

use super::{history::History, time::Moment};

/// All processes that opened connections lately, by port space.
#[derive(Clone, Debug, Default)]
pub struct Openers(HashMap<OpenerKey, State>);

#[derive(Clone, Debug)]
struct State {
    total: Opener,
    opens: History,
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

/// A process that opened nothing for so long is forgotten.
const IDLE: Duration = Duration::from_secs(900);

impl Openers {
    /// Takes the totals of the source; `keep` is the longest window asked for.
    pub fn take(&mut self, now: Moment, openers: &[(OpenerKey, Opener)], keep: Duration) {
        for (key, total) in openers {
            let state = self.0.entry(*key).or_insert_with(|| State {
                total: *total,
                opens: History::from_zero(now),
            });
            // An entry that the source forgot begins again.
            if total.opens < state.total.opens {
                state.opens = History::from_zero(now);
            }
            state.total = *total;
            state.opens.note(now, total.opens, keep);
        }
        self.0
            .retain(|_, s| now.since(Moment(s.total.last_ns)) < IDLE);
    }

    /// Those that `wanted` picks and that opened something in the window, busiest first.
    pub fn rates(
        &self,
        now: Moment,
        window: Duration,
        wanted: impl Fn(&OpenerKey) -> bool,
    ) -> Vec<OpenerRate> {
        let mut found: Vec<OpenerRate> = self
            .0
            .iter()
            .filter(|(key, _)| wanted(key))
            .map(|(key, state)| OpenerRate {
                key: *key,
                total: state.total,
                opens: state
                    .total
                    .opens
                    .saturating_sub(state.opens.before(now, window)),
            })
            .filter(|rate| rate.opens > 0)
            .collect();
        found.sort_by_key(|r| (std::cmp::Reverse(r.opens), r.key));
        found
    }
}
