//! From the core's moments to the time of day.

use std::{
    collections::VecDeque,
    sync::{Arc, PoisonError, RwLock},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rustix::time::ClockId;

use crate::{clocks::clock_ns, core::time::Moment};

/// A difference below this is the jitter of reading two clocks and the slewing of NTP; above, the
/// time of day was set or the host slept.
const STEP_NS: i64 = 100_000_000;

/// Sleeps of the host that are remembered.
const SLEEPS: usize = 64;

/// Turns [`Moment`]s into the time of day. Clones share their state.
#[derive(Clone, Debug)]
pub struct WallClock {
    offsets: Arc<RwLock<Offsets>>,
    live: bool,
}

/// How the source's clock lies to the time of day.
#[derive(Clone, Debug, Default)]
struct Offsets {
    /// What to add to a moment of now to get nanoseconds since the Unix epoch.
    now_ns: i64,
    /// CLOCK_MONOTONIC stands still while the host sleeps. What was before a sleep keeps its time of
    /// day: the moment of each sleep, and how long it was. Latest last.
    sleeps: VecDeque<(Moment, i64)>,
    /// Time slept since the boot.
    slept_ns: i64,
    /// When the clocks were compared last.
    compared: Moment,
}

impl WallClock {
    /// For the live source, whose moments are CLOCK_MONOTONIC.
    #[must_use]
    pub fn live() -> Self {
        Self {
            offsets: Arc::new(RwLock::new(Offsets::read())),
            live: true,
        }
    }

    /// For captures, whose moments count from the Unix epoch.
    #[must_use]
    pub fn capture() -> Self {
        Self {
            offsets: Arc::default(),
            live: false,
        }
    }

    /// Follows the host when its time of day was set or it slept. Called at every look; between two
    /// steps the same moment always gives the same time.
    pub fn follow(&self) {
        if self.live {
            self.compare(&Offsets::read());
        }
    }

    /// Changes only when the time of day was set or the host slept.
    #[must_use]
    pub fn offset_ns(&self) -> i64 {
        let offsets = self.offsets.read().unwrap_or_else(PoisonError::into_inner);
        offsets.now_ns
    }

    fn compare(&self, read: &Offsets) {
        let is_step = |a: i64, b: i64| a.abs_diff(b) > STEP_NS.unsigned_abs();
        let mut offsets = self.offsets.write().unwrap_or_else(PoisonError::into_inner);
        let before = offsets.compared;
        offsets.compared = read.compared;
        if is_step(read.slept_ns, offsets.slept_ns) {
            let slept = read.slept_ns - offsets.slept_ns;
            offsets.sleeps.push_back((before, slept));
            if offsets.sleeps.len() > SLEEPS {
                offsets.sleeps.pop_front();
            }
            offsets.slept_ns = read.slept_ns;
        }
        if is_step(read.now_ns, offsets.now_ns) {
            offsets.now_ns = read.now_ns;
        }
    }

    /// The time of day of a moment; the Unix epoch for what lies before it.
    #[must_use]
    pub fn system_time(&self, moment: Moment) -> SystemTime {
        let ns = u64::try_from(self.epoch_ns(moment)).unwrap_or(0);
        UNIX_EPOCH + Duration::from_nanos(ns)
    }

    /// Nanoseconds of a moment since the Unix epoch; negative before it.
    #[must_use]
    pub fn epoch_ns(&self, moment: Moment) -> i64 {
        let offsets = self.offsets.read().unwrap_or_else(PoisonError::into_inner);
        let later = offsets.sleeps.iter().filter(|(at, _)| moment <= *at);
        let slept: i64 = later.map(|(_, slept)| slept).sum();
        moment
            .signed()
            .saturating_add(offsets.now_ns)
            .saturating_sub(slept)
    }

    /// The moment of a time of day.
    #[must_use]
    pub fn moment(&self, time: SystemTime) -> Moment {
        let ns = match time.duration_since(UNIX_EPOCH) {
            Ok(after) => i64::try_from(after.as_nanos()).unwrap_or(i64::MAX),
            Err(_) => 0,
        };
        self.from_epoch_ns(ns)
    }

    /// The moment of a number of nanoseconds since the Unix epoch.
    #[must_use]
    pub fn from_epoch_ns(&self, ns: i64) -> Moment {
        let offsets = self.offsets.read().unwrap_or_else(PoisonError::into_inner);
        let mut moment = Moment(0).shifted(ns.saturating_sub(offsets.now_ns));
        for (at, slept) in offsets.sleeps.iter().rev() {
            if moment > *at {
                break;
            }
            moment = moment.shifted(*slept).min(*at);
        }
        moment
    }

    /// The same as RFC 3339 in UTC with milliseconds.
    #[must_use]
    pub fn rfc3339(&self, moment: Moment) -> String {
        humantime::format_rfc3339_millis(self.system_time(moment)).to_string()
    }
}

impl Offsets {
    /// What the host's clocks say now.
    fn read() -> Self {
        let monotonic = clock_ns(ClockId::Monotonic);
        Self {
            now_ns: clock_ns(ClockId::Realtime) - monotonic,
            sleeps: VecDeque::new(),
            slept_ns: clock_ns(ClockId::Boottime) - monotonic,
            compared: Moment(0).shifted(monotonic),
        }
    }
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
        let now = Moment(clock_ns(ClockId::Monotonic).cast_unsigned());
        let off = |t: SystemTime| {
            let now = SystemTime::now();
            now.duration_since(t).unwrap_or_else(|e| e.duration())
        };
        assert!(off(clock.system_time(now)) < Duration::from_secs(1));
        let same = clock.rfc3339(now);
        clock.follow();
        assert_eq!(same, clock.rfc3339(now), "no step, no change");
        clock.offsets.write().unwrap().now_ns += 3_600_000_000_000;
        assert!(off(clock.system_time(now)) > Duration::from_secs(3000));
        clock.follow();
        assert!(
            off(clock.system_time(now)) < Duration::from_secs(1),
            "the step is followed"
        );
    }

    #[test]
    fn what_lies_before_the_epoch_is_the_epoch() {
        let clock = WallClock::capture();
        clock.offsets.write().unwrap().now_ns = -5;
        assert_eq!(clock.system_time(Moment(1)), UNIX_EPOCH);
        assert_eq!(clock.epoch_ns(Moment(1)), -4);
    }

    #[test]
    fn what_was_before_a_sleep_keeps_its_time_of_day() {
        const HOUR: i64 = 3_600_000_000_000;
        let clock = WallClock::capture();
        let read = |offset, slept, compared| Offsets {
            now_ns: offset,
            sleeps: VecDeque::new(),
            slept_ns: slept,
            compared: Moment(compared),
        };
        clock.compare(&read(1000 * HOUR, 0, 50));
        let before = clock.epoch_ns(Moment(40));
        // Two hours asleep.
        clock.compare(&read(1002 * HOUR, 2 * HOUR, 60));
        assert_eq!(clock.offset_ns(), 1002 * HOUR);
        assert_eq!(clock.epoch_ns(Moment(40)), before);
        assert_eq!(clock.epoch_ns(Moment(60)), 1002 * HOUR + 60);
        for moment in [Moment(40), Moment(60), Moment(0).shifted(-HOUR)] {
            assert_eq!(clock.from_epoch_ns(clock.epoch_ns(moment)), moment);
        }
        assert_eq!(
            clock.from_epoch_ns(1001 * HOUR),
            Moment(50),
            "asleep then: the moment it fell asleep"
        );
        // NTP sets the clock: what was before was wrong too.
        clock.compare(&read(1012 * HOUR, 2 * HOUR, 70));
        assert_eq!(clock.epoch_ns(Moment(40)), before + 10 * HOUR);
    }
}
