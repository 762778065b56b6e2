//! Histogram buckets with bounds that double, cheap enough for the kernel side.

/// Number of buckets of every histogram: 19 with an upper bound and one for the rest.
pub const BUCKETS: usize = 20;

/// Counts of one histogram.
pub type Histogram = [u64; BUCKETS];

/// Smallest bound of the reuse-interval histogram: 1 ms (the largest is 262 s).
pub const REUSE_UNIT_NS: u64 = 1_000_000;
/// Smallest bound of the handshake-duration histogram: 128 µs (the largest is 33.6 s).
pub const HANDSHAKE_UNIT_NS: u64 = 128_000;
/// Smallest bound of the port-search histogram: 1 µs (the largest is 262 ms).
pub const SEARCH_UNIT_NS: u64 = 1_000;

/// The bucket of a duration: bucket `i` holds what is below `unit << i` and not below the bound
/// before it; the last one holds the rest.
#[inline(always)]
#[must_use]
pub const fn bucket(nanoseconds: u64, unit: u64) -> usize {
    let mut left = nanoseconds / unit;
    let mut i = 0;
    while i < BUCKETS - 1 {
        if left == 0 {
            return i;
        }
        left >>= 1;
        i += 1;
    }
    BUCKETS - 1
}

/// Upper bounds of the first 19 buckets, in nanoseconds.
#[must_use]
pub const fn bounds(unit: u64) -> [u64; BUCKETS - 1] {
    let mut bounds = [0; BUCKETS - 1];
    let mut i = 0;
    while i < BUCKETS - 1 {
        bounds[i] = unit << i;
        i += 1;
    }
    bounds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_lies_below_the_bound_of_its_bucket() {
        let b = bounds(REUSE_UNIT_NS);
        for v in [
            0,
            1,
            999_999,
            1_000_000,
            1_999_999,
            2_000_000,
            60_000_000_000,
            u64::MAX,
        ] {
            let i = bucket(v, REUSE_UNIT_NS);
            if i < BUCKETS - 1 {
                assert!(v < b[i], "{v} in {i}");
            }
            if i > 0 {
                assert!(v >= b[i - 1], "{v} in {i}");
            }
        }
    }
}
