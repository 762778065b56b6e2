//! Time as the sources give it.

use std::{cmp::Ordering, fmt, ops::Add, time::Duration};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A moment: nanoseconds of the source's clock (CLOCK_MONOTONIC for the kernel, the Unix epoch for a
/// capture). Only differences mean anything inside the core.
///
/// What began before the clock did (an alert that is older than the boot) has a negative number, kept
/// as two's complement: no clock of a source reaches 2^63 ns, 292 years.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub struct Moment(pub u64);

impl Moment {
    /// Nanoseconds of the source's clock; negative before it began.
    #[must_use]
    pub const fn signed(self) -> i64 {
        self.0.cast_signed()
    }

    /// Time since `earlier`; zero if that lies ahead (a clock that jumped).
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        let ns = self.signed().saturating_sub(earlier.signed());
        Duration::from_nanos(u64::try_from(ns).unwrap_or(0))
    }

    /// The same moment by a clock that shows `ns` more.
    #[must_use]
    pub const fn shifted(self, ns: i64) -> Self {
        Self(self.signed().saturating_add(ns).cast_unsigned())
    }
}

impl Serialize for Moment {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_i64(self.signed())
    }
}

impl<'de> Deserialize<'de> for Moment {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        i64::deserialize(deserializer).map(|ns| Self(ns.cast_unsigned()))
    }
}

impl PartialOrd for Moment {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Moment {
    fn cmp(&self, other: &Self) -> Ordering {
        self.signed().cmp(&other.signed())
    }
}

impl Add<Duration> for Moment {
    type Output = Self;
    fn add(self, rhs: Duration) -> Self {
        self.shifted(i64::try_from(rhs.as_nanos()).unwrap_or(i64::MAX))
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ns, sign) = (self.signed(), if self.signed() < 0 { "-" } else { "" });
        let ns = ns.unsigned_abs();
        write!(
            f,
            "{sign}{}.{:03}",
            ns / 1_000_000_000,
            ns / 1_000_000 % 1000
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_before_the_clock_began_are_earlier() {
        const HOUR: i64 = 3_600_000_000_000;
        let boot = Moment(0);
        let before = boot.shifted(-HOUR);
        assert!(before < boot && boot < Moment(1));
        assert_eq!(
            Moment(1).since(before),
            Duration::from_nanos(HOUR as u64 + 1)
        );
        assert_eq!(before.since(Moment(1)), Duration::ZERO);
        assert_eq!(before + Duration::from_secs(3600), boot);
        assert_eq!(before.to_string(), "-3600.000");
        assert_eq!(before.shifted(2 * HOUR).signed(), HOUR);
    }
}
