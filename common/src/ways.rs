//! Set-associative tables: which place of a set a tag has.
//!
//! Everything is computed without branches, so that the verifier of eBPF goes on with one unknown
//! number instead of with one path per place.

/// Places per set.
pub const WAYS: u32 = 16;

/// The tags of a set, two in each number: 0 for a free place. One cache line.
pub type Tags = [u64; WAYS as usize / 2];

/// The tag of a hash. Neither it nor the difference of two is 1.
#[inline(always)]
#[must_use]
pub const fn tag(hash: u64) -> u32 {
    (hash >> 32) as u32 | 3
}

/// The places that hold `tag`, one bit each; see [`place`].
///
/// Two tags at a time: after the exclusive or, a half that is 0 gets its highest bit set by
/// `(x - 1) & !x`. The borrow of a lower half that is 0 could do the same only for an upper half that
/// is 1, which two tags never give (see [`tag`]).
#[inline(always)]
const fn holding(tags: &Tags, tag: u32) -> u32 {
    let both = tag as u64 | (tag as u64) << 32;
    let mut found = 0;
    let mut i = 0;
    while i < tags.len() {
        let x = tags[i] ^ both;
        let zero = x.wrapping_sub(0x0000_0001_0000_0001) & !x & 0x8000_0000_8000_0000;
        found |= (zero >> 31) << i;
        i += 1;
    }
    // The lower halves first, then the upper ones.
    ((found | found >> 24) & 0xffff) as u32
}

/// The place of a bit of [`holding`].
#[inline(always)]
const fn place(bit: u32) -> u32 {
    (bit & 7) << 1 | bit >> 3
}

/// A place that holds `tag`, if any.
#[inline(always)]
#[must_use]
pub const fn find(tags: &Tags, tag: u32) -> Option<u32> {
    let found = holding(tags, tag);
    if found == 0 {
        None
    } else {
        Some(place(lowest(found)))
    }
}

/// A free place, if there are more than `spare` of them: those are kept for others.
///
/// The search begins at another place for each `turn`: two CPUs that look at the same moment must not
/// take the same one.
#[inline(always)]
#[must_use]
pub const fn free(tags: &Tags, turn: u32, spare: u32) -> Option<u32> {
    let found = holding(tags, 0);
    if ones(found) <= spare {
        return None;
    }
    let turn = turn.wrapping_mul(5) & (WAYS - 1);
    let turned = (found >> turn | found << (WAYS - turn)) & 0xffff;
    Some(place((lowest(turned) + turn) & (WAYS - 1)))
}

/// Index of the lowest bit of a number below 2^16 that is not 0.
#[inline(always)]
const fn lowest(bits: u32) -> u32 {
    // The bits below it, counted.
    ones((bits & bits.wrapping_neg()).wrapping_sub(1)) & (WAYS - 1)
}

/// How many bits of a number below 2^16 are set; eBPF has no instruction for it.
#[inline(always)]
const fn ones(mut n: u32) -> u32 {
    n -= n >> 1 & 0x5555;
    n = (n & 0x3333) + (n >> 2 & 0x3333);
    n = (n + (n >> 4)) & 0x0f0f;
    (n + (n >> 8)) & 0x1f
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    fn tags(of: &[u32]) -> Tags {
        let mut tags = [0; WAYS as usize / 2];
        for (i, tag) in of.iter().enumerate() {
            tags[i / 2] |= u64::from(*tag) << (32 * (i % 2));
        }
        tags
    }

    #[test]
    fn the_lowest_bit_of_every_number() {
        for bits in 1u32..1 << 16 {
            assert_eq!(lowest(bits), bits.trailing_zeros(), "{bits:#x}");
            assert_eq!(ones(bits), bits.count_ones(), "{bits:#x}");
        }
    }

    proptest! {
        /// As a plain search does, with tags as alike as they can be and some places free.
        #[test]
        fn finds_what_is_there(
            hashes in prop::collection::vec(prop_oneof![
                Just(None), any::<u64>().prop_map(Some), (0u64..8).prop_map(|n| Some(n << 32)),
            ], WAYS as usize),
            wanted in prop_oneof![any::<u64>(), (0u64..8).prop_map(|n| n << 32)],
            turn: u32,
            spare in 0..WAYS,
        ) {
            let plain: Vec<u32> = hashes.iter().map(|h| h.map_or(0, tag)).collect();
            let set = tags(&plain);
            let wanted = tag(wanted);
            match find(&set, wanted) {
                Some(way) => prop_assert_eq!(plain[way as usize], wanted),
                None => prop_assert!(!plain.contains(&wanted)),
            }
            let room = plain.iter().filter(|t| **t == 0).count() > spare as usize;
            match free(&set, turn, spare) {
                Some(way) => prop_assert!(room && plain[way as usize] == 0),
                None => prop_assert!(!room),
            }
        }
    }

    #[test]
    fn neighbours_take_different_places() {
        let empty = tags(&[]);
        let places: Vec<_> = (0..WAYS).map(|cpu| free(&empty, cpu, 0).unwrap()).collect();
        let distinct: std::collections::BTreeSet<_> = places.iter().collect();
        assert_eq!(distinct.len(), WAYS as usize);
    }
}
