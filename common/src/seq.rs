//! Sequence-number arithmetic modulo 2³² (RFC 9293 section 3.4).

/// `a` lies after `b`.
#[inline(always)]
#[must_use]
pub const fn after(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) > 0
}

/// `x` lies in `first..=last`, going round the end of the number space if need be.
#[inline(always)]
#[must_use]
pub const fn within(x: u32, first: u32, last: u32) -> bool {
    x.wrapping_sub(first) <= last.wrapping_sub(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goes_round() {
        assert!(after(3, u32::MAX - 3));
        assert!(!after(u32::MAX - 3, 3));
        assert!(!after(7, 7));
        assert!(within(2, u32::MAX, 5));
        assert!(!within(6, u32::MAX, 5));
    }
}
