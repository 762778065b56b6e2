//! A counter over time, coarse: what rates of the last window need.

use std::{collections::VecDeque, time::Duration};

use super::time::Moment;

/// Values at some moments, oldest first; a value holds until the next one.
#[derive(Clone, Debug, Default)]
pub struct History(VecDeque<(Moment, u64)>);

/// Entries per window: the error of a rate is at most one part in so many.
const STEPS: u32 = 24;

impl History {
    /// A counter that was zero until now.
    #[must_use]
    pub fn from_zero(now: Moment) -> Self {
        Self([(now, 0)].into())
    }

    /// Takes the value of now; `keep` is the longest window asked for.
    pub fn note(&mut self, now: Moment, value: u64, keep: Duration) {
        let due = self
            .0
            .back()
            .is_none_or(|(at, last)| *last != value && now.since(*at) >= keep / STEPS);
        if due {
            self.0.push_back((now, value));
            while self.0.len() > 2 && now.since(self.0[1].0) >= keep {
                self.0.pop_front();
            }
        }
    }

    /// The value `window` ago.
    #[must_use]
    pub fn before(&self, now: Moment, window: Duration) -> u64 {
        let old = self.0.iter().rev().find(|(at, _)| now.since(*at) >= window);
        old.or(self.0.front()).map_or(0, |(_, value)| *value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn gives_the_rate_of_the_window() {
        let mut h = History::from_zero(Moment(0));
        for t in 1..=300 {
            h.note(Moment(t * S), t * 10, Duration::from_secs(60));
        }
        let before = h.before(Moment(300 * S), Duration::from_secs(60));
        assert!((2375..=2425).contains(&before), "{before}");
        assert!(h.0.len() < 30, "{}", h.0.len());
        // Nothing happens for long: the value of the last entry holds.
        h.note(Moment(900 * S), 3000, Duration::from_secs(60));
        h.note(Moment(961 * S), 3000, Duration::from_secs(60));
        assert_eq!(h.before(Moment(961 * S), Duration::from_secs(60)), 3000);
    }
}
