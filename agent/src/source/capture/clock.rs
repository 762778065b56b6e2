//! The clock of an interface of a pcapng file.

/// From the ticks of an interface to nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Clock {
    pub(super) unit: Unit,
    pub(super) offset_ns: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// A tick is so many nanoseconds.
    Longer(u64),
    /// So many ticks are a nanosecond.
    Shorter(u64),
    /// A tick is this negative power of two of a second.
    Binary(u32),
}

impl Clock {
    /// Microseconds, which an interface without the option has.
    pub(super) const DEFAULT: Self = Self {
        unit: Unit::Longer(1000),
        offset_ns: 0,
    };

    /// Reads the option `if_tsresol`.
    pub(super) fn unit(resolution: u8) -> Unit {
        let exponent = u32::from(resolution & 0x7f);
        if resolution & 0x80 != 0 {
            Unit::Binary(exponent)
        } else if exponent <= 9 {
            Unit::Longer(10u64.pow(9 - exponent))
        } else {
            Unit::Shorter(10u64.checked_pow(exponent - 9).unwrap_or(u64::MAX))
        }
    }

    pub(super) const fn ns(self, ticks: u64) -> u64 {
        let ns = match self.unit {
            Unit::Longer(ns) => ticks.saturating_mul(ns),
            Unit::Shorter(ticks_per_ns) => ticks / ticks_per_ns,
            Unit::Binary(exponent) => {
                let ns = (ticks as u128 * 1_000_000_000) >> exponent;
                if ns > u64::MAX as u128 {
                    u64::MAX
                } else {
                    ns as u64
                }
            }
        };
        ns.saturating_add_signed(self.offset_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_of_every_resolution() {
        let clock = |resolution, offset_ns| Clock {
            unit: Clock::unit(resolution),
            offset_ns,
        };
        assert_eq!(Clock::DEFAULT.unit, Clock::unit(6));
        assert_eq!(clock(0, 0).ns(3), 3_000_000_000);
        assert_eq!(clock(9, 5).ns(3), 8);
        assert_eq!(clock(12, 0).ns(3_999), 3);
        assert_eq!(clock(0x80 | 10, 0).ns(1024 + 512), 1_500_000_000);
        assert_eq!(clock(6, -3_000_000_000).ns(5_000_000), 2_000_000_000);
        assert_eq!(clock(6, i64::MIN).ns(5), 0, "never before the epoch");
        assert_eq!(clock(0, 0).ns(u64::MAX), u64::MAX);
        assert_eq!(clock(0x80, 0).ns(u64::MAX), u64::MAX);
        assert_eq!(clock(127, 0).ns(u64::MAX), 1);
        assert_eq!(clock(255, 0).ns(u64::MAX), 0);
    }
}
