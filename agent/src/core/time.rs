//! Time as the sources give it.

use std::{fmt, ops::Add, time::Duration};

/// A moment: nanoseconds of the source's clock (CLOCK_MONOTONIC for the kernel, the Unix epoch for a
/// capture). Only differences mean anything inside the core.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Hash)]
pub struct Moment(pub u64);

impl Moment {
    /// Time since `earlier`; zero if that lies ahead (a clock that jumped).
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Moment {
    type Output = Self;
    fn add(self, rhs: Duration) -> Self {
        Self(
            self.0
                .saturating_add(u64::try_from(rhs.as_nanos()).unwrap_or(u64::MAX)),
        )
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}.{:03}",
            self.0 / 1_000_000_000,
            self.0 / 1_000_000 % 1000
        )
    }
}
