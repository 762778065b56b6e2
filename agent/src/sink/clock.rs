//! From the core's moments to the time of day.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rustix::time::{ClockId, clock_gettime};

use crate::core::time::Moment;

/// A difference below this is the jitter of reading two clocks and the slewing of NTP; above, the
/// time of day was set or the host slept.
const STEP_NS: i64 = 100_000_000;

/// Turns [`Moment`]s into the time of day. Clones share their state.
#[derive(Clone, Debug)]
pub struct WallClock {
    /// What to add to a moment to get nanoseconds since the Unix epoch.
    offset_ns: Arc<AtomicI64>,
    live: bool,
}

impl WallClock {
    /// For the live source, whose moments are CLOCK_MONOTONIC.
    #[must_use]
    pub fn live() -> Self {
        Self {
            offset_ns: Arc::new(AtomicI64::new(offset())),
            live: true,
        }
    }

    /// For captures, whose moments count from the Unix epoch.
    #[must_use]
    pub fn capture() -> Self {
        Self {
            offset_ns: Arc::default(),
            live: false,
        }
    }

    /// Follows the host when its time of day was set. Called now and then; between two steps the
    /// same moment always gives the same time.
    pub fn follow(&self) {
        if !self.live {
            return;
        }
        let now = offset();
        if now.abs_diff(self.offset_ns.load(Ordering::Relaxed)) > STEP_NS.unsigned_abs() {
            self.offset_ns.store(now, Ordering::Relaxed);
        }
    }

    /// The time of day of a moment; the Unix epoch for what lies before it.
    #[must_use]
    pub fn system_time(&self, moment: Moment) -> SystemTime {
        let ns = i128::from(moment.0) + i128::from(self.offset_ns.load(Ordering::Relaxed));
        UNIX_EPOCH + Duration::from_nanos(u64::try_from(ns.max(0)).unwrap_or(0))
    }

    /// The same as RFC 3339 in UTC with milliseconds.
    #[must_use]
    pub fn rfc3339(&self, moment: Moment) -> String {
        humantime::format_rfc3339_millis(self.system_time(moment)).to_string()
    }
}

/// CLOCK_REALTIME − CLOCK_MONOTONIC in nanoseconds.
fn offset() -> i64 {
    let read = |id| {
        let t = clock_gettime(id);
        t.tv_sec * 1_000_000_000 + t.tv_nsec
    };
    read(ClockId::Realtime) - read(ClockId::Monotonic)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn captures_count_from_the_epoch() {
        let clock = WallClock::capture();
        assert_eq!(
            clock.rfc3339(Moment(1_764_412_205_123_456_789)),
            "2025-11-29T10:30:05.123Z"
        );
        clock.follow();
        assert_eq!(clock.system_time(Moment(0)), UNIX_EPOCH);
    }

    #[test]
    fn live_moments_are_monotonic_and_follow_a_step() {
        let clock = WallClock::live();
        let t = clock_gettime(ClockId::Monotonic);
        let now = Moment((t.tv_sec * 1_000_000_000 + t.tv_nsec) as u64);
        let off = |t: SystemTime| {
            let now = SystemTime::now();
            now.duration_since(t).unwrap_or_else(|e| e.duration())
        };
        assert!(off(clock.system_time(now)) < Duration::from_secs(1));
        let same = clock.rfc3339(now);
        clock.follow();
        assert_eq!(same, clock.rfc3339(now), "no step, no change");
        clock
            .offset_ns
            .fetch_add(3_600_000_000_000, Ordering::Relaxed);
        assert!(off(clock.system_time(now)) > Duration::from_secs(3000));
        clock.follow();
        assert!(
            off(clock.system_time(now)) < Duration::from_secs(1),
            "the step is followed"
        );
    }

    #[test]
    fn what_lies_before_the_epoch_is_the_epoch() {
        let clock = WallClock {
            offset_ns: Arc::new(AtomicI64::new(-5)),
            live: false,
        };
        assert_eq!(clock.system_time(Moment(1)), UNIX_EPOCH);
    }
}
