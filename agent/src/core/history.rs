//! A counter over time, coarse: what rates of the last window need.

use std::time::Duration;

use super::time::Moment;

/// Values of a counter at some moments, oldest first; a value holds until the next one. Empty where
/// nothing was counted lately.
///
/// There is one for each port space: an entry takes eight bytes, with time and value cut to what the
/// difference to now needs.
#[derive(Clone, Debug, Default)]
pub struct History(Vec<Entry>);

#[derive(Clone, Copy, Debug)]
struct Entry {
    at: Tick,
    /// Low half of the value; nothing counts four thousand million in one window.
    value: u32,
}

/// Milliseconds, going round after 49 days: for the age of what is dropped within minutes.
#[derive(Clone, Copy, Debug)]
pub struct Tick(u32);

impl From<Moment> for Tick {
    #[expect(clippy::cast_possible_truncation, reason = "it goes round")]
    fn from(at: Moment) -> Self {
        Self((at.0 / 1_000_000) as u32)
    }
}

impl Tick {
    /// Time from `earlier` until this; zero if that lies ahead.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        let ms = self.0.wrapping_sub(earlier.0);
        let ahead = ms > u32::MAX / 2;
        Duration::from_millis(if ahead { 0 } else { ms.into() })
    }
}

/// Entries per longest window: the error of a rate is at most one part in so many.
pub const STEPS: u32 = 24;

impl History {
    /// A counter that was zero until now.
    #[must_use]
    pub fn from_zero(now: Moment) -> Self {
        Self::from_value(now, 0)
    }

    /// A counter that has stood at `value` until now.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "see `Entry::value`")]
    pub fn from_value(now: Moment, value: u64) -> Self {
        Self(vec![Entry {
            at: now.into(),
            value: value as u32,
        }])
    }

    /// Takes the value of now; `keep` is the longest window asked for.
    #[expect(clippy::cast_possible_truncation, reason = "see `Entry::value`")]
    pub fn note(&mut self, now: Moment, value: u64, keep: Duration) {
        let now = Tick::from(now);
        let value = value as u32;
        let due = self
            .0
            .last()
            .is_none_or(|last| last.value != value && now.since(last.at) >= keep / STEPS);
        if due {
            self.0.push(Entry { at: now, value });
        }
        let old = self.0.iter().rposition(|e| now.since(e.at) >= keep);
        // The latest value older than that still holds at its beginning.
        if let Some(old) = old.filter(|old| *old > 0) {
            self.0.drain(..old);
        }
    }

    /// The value `window` ago of a counter that stands at `value` now.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "see `Entry::value`")]
    pub fn before(&self, now: Moment, window: Duration, value: u64) -> u64 {
        let now = Tick::from(now);
        let old = self.0.iter().rev().find(|e| now.since(e.at) >= window);
        let entry = old.or(self.0.first());
        entry.map_or(value, |e| {
            value.saturating_sub((value as u32).wrapping_sub(e.value).into())
        })
    }

    /// Gives its memory back if nothing was counted in the last `keep`.
    pub fn forget(&mut self, now: Moment, keep: Duration, value: u64) {
        if self.is_quiet(now, keep, value) {
            self.0 = Vec::new();
        }
    }

    /// The latest value noted is not `value`.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "see `Entry::value`")]
    pub fn lags(&self, value: u64) -> bool {
        self.0.last().is_some_and(|last| last.value != value as u32)
    }

    /// It holds nothing: the counter has not moved lately.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Nothing was counted in the last `keep`.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "see `Entry::value`")]
    pub fn is_quiet(&self, now: Moment, keep: Duration, value: u64) -> bool {
        self.0
            .last()
            .is_none_or(|last| last.value == value as u32 && Tick::from(now).since(last.at) >= keep)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;
    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn gives_the_rate_of_the_window() {
        let mut h = History::from_zero(Moment(0));
        for t in 1..=300 {
            h.note(Moment(t * S), t * 10, MINUTE);
        }
        let before = h.before(Moment(300 * S), MINUTE, 3000);
        assert!((2375..=2425).contains(&before), "{before}");
        assert!(h.0.len() < 30, "{}", h.0.len());
        // Nothing happens for long: the value of the last entry holds.
        h.note(Moment(900 * S), 3000, MINUTE);
        h.note(Moment(961 * S), 3000, MINUTE);
        assert_eq!(h.before(Moment(961 * S), MINUTE, 3000), 3000);
        assert!(h.is_quiet(Moment(961 * S), MINUTE, 3000));
        assert!(!h.is_quiet(Moment(961 * S), MINUTE, 3001));
        assert!(h.0.len() <= 2, "{}", h.0.len());
    }

    #[test]
    fn time_and_value_go_round() {
        let start = u64::from(u32::MAX) * 1_000_000 - 5 * S;
        let value = u64::from(u32::MAX) - 40;
        let mut h = History::from_value(Moment(start), value);
        for t in 1..=20 {
            h.note(Moment(start + t * S), value + t * 10, MINUTE);
        }
        let now = Moment(start + 20 * S);
        let before = h.before(now, Duration::from_secs(10), value + 200);
        assert!((70..=100).contains(&(before - value)), "{}", before - value);
        // A clock that jumps back makes nothing old.
        assert_eq!(Tick::from(Moment(S)).since(Tick::from(now)), Duration::ZERO);
    }
}
