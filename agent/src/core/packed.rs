//! Counters without their zeros: of the ninety that a source has for a port space, most never move.

use tuplewatch_common::{
    histogram::{BUCKETS, Histogram},
    record::PortSpace,
};

use super::report::Totals;

/// What is kept of a source's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// The counts.
    pub totals: Totals,
    /// Opens of sockets that were bound before connect().
    pub bound_opens: u64,
    /// Connections that left ESTABLISHED.
    pub closed: u64,
    /// Sum of their lifetimes in milliseconds.
    pub lifetime_ms: u64,
    /// Histogram of reuse intervals.
    pub reuse_interval: Histogram,
    /// Histogram of handshake durations.
    pub handshake_duration: Histogram,
    /// Histogram of port searches.
    pub port_search: Histogram,
}

/// Numbers in [`Counters`].
const WORDS: usize = Totals::COUNT + 3 + 3 * BUCKETS;

impl From<&PortSpace> for Counters {
    fn from(raw: &PortSpace) -> Self {
        Self {
            totals: Totals::from(raw),
            bound_opens: raw.bound_opens,
            closed: raw.closed,
            lifetime_ms: raw.lifetime_ms,
            reuse_interval: raw.reuse_interval,
            handshake_duration: raw.handshake_duration,
            port_search: raw.port_search,
        }
    }
}

impl Counters {
    /// Both together.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        let (mut sum, other) = (self.words(), other.words());
        sum.iter_mut().zip(other).for_each(|(sum, n)| *sum += n);
        Self::from_words(&sum)
    }

    fn words(&self) -> [u64; WORDS] {
        let mut words = [0; WORDS];
        let rest = [self.bound_opens, self.closed, self.lifetime_ms];
        let all = self.totals.words().into_iter().chain(rest);
        let all = all
            .chain(self.reuse_interval)
            .chain(self.handshake_duration)
            .chain(self.port_search);
        words.iter_mut().zip(all).for_each(|(word, n)| *word = n);
        words
    }

    fn from_words(words: &[u64; WORDS]) -> Self {
        let mut rest = words.iter().copied();
        Self {
            totals: Totals::from_words(&take(&mut rest)),
            bound_opens: rest.next().unwrap_or(0),
            closed: rest.next().unwrap_or(0),
            lifetime_ms: rest.next().unwrap_or(0),
            reuse_interval: take(&mut rest),
            handshake_duration: take(&mut rest),
            port_search: take(&mut rest),
        }
    }
}

fn take<const N: usize>(from: &mut impl Iterator<Item = u64>) -> [u64; N] {
    std::array::from_fn(|_| from.next().unwrap_or(0))
}

/// [`Counters`] in little memory: some forty bytes for a healthy port space instead of 688.
#[derive(Clone, Debug, Default)]
pub struct Packed {
    /// One bit for each word that is not zero.
    present: [u64; WORDS.div_ceil(64)],
    /// Those words, in order, as LEB128: seven bits in a byte, the eighth says that more follow.
    bytes: Box<[u8]>,
}

impl Packed {
    /// The counters.
    #[must_use]
    pub fn unpack(&self) -> Counters {
        let mut all = [0; WORDS];
        let mut bytes = &*self.bytes;
        for (group, present) in all.chunks_mut(64).zip(self.present) {
            let mut left = present;
            while left != 0 {
                group[left.trailing_zeros() as usize] = read(&mut bytes);
                left &= left - 1;
            }
        }
        Counters::from_words(&all)
    }

    /// Takes new values.
    pub fn set(&mut self, counters: &Counters) {
        let mut bytes = Vec::with_capacity(64);
        self.present = [0; WORDS.div_ceil(64)];
        for (i, word) in counters.words().into_iter().enumerate() {
            if word != 0 {
                self.present[i / 64] |= 1 << (i % 64);
                write(word, &mut bytes);
            }
        }
        if bytes.len() == self.bytes.len() {
            self.bytes.copy_from_slice(&bytes);
        } else {
            self.bytes = bytes.into_boxed_slice();
        }
    }

    /// The total of opens, without unpacking the rest.
    #[must_use]
    pub fn opens(&self) -> u64 {
        // `opens` is the first word.
        if self.has(0) {
            read(&mut &*self.bytes)
        } else {
            0
        }
    }

    const fn has(&self, i: usize) -> bool {
        self.present[i / 64] >> (i % 64) & 1 == 1
    }
}

fn write(mut word: u64, into: &mut Vec<u8>) {
    while word > 0x7f {
        into.push((word & 0x7f) as u8 | 0x80);
        word >>= 7;
    }
    into.push(word as u8);
}

fn read(bytes: &mut &[u8]) -> u64 {
    let (mut word, mut shift) = (0, 0);
    while let Some((byte, rest)) = bytes.split_first() {
        *bytes = rest;
        word |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            break;
        }
        shift += 7;
    }
    word
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_lost() {
        let mut counters = Counters::default();
        let mut packed = Packed::default();
        assert_eq!(packed.unpack(), counters);
        counters.totals.opens = 7;
        counters.totals.data_retransmits = u64::MAX;
        counters.bound_opens = 1;
        counters.lifetime_ms = 1 << 40;
        counters.reuse_interval[0] = 2;
        counters.port_search[BUCKETS - 1] = 3;
        packed.set(&counters);
        assert_eq!(packed.unpack(), counters);
        assert_eq!(packed.opens(), 7);
        assert_eq!(packed.bytes.len(), 1 + 10 + 1 + 6 + 1 + 1);
        counters.totals.opens = 8;
        packed.set(&counters);
        assert_eq!(packed.unpack(), counters);
        let twice = counters.plus(&Counters {
            closed: 5,
            ..Counters::default()
        });
        assert_eq!((twice.closed, twice.totals.opens), (5, 8));
        packed.set(&Counters::default());
        assert_eq!((packed.bytes.len(), packed.opens()), (0, 0));
        for word in [1, 0x7f, 0x80, 1 << 32, u64::MAX] {
            let mut bytes = Vec::new();
            write(word, &mut bytes);
            assert_eq!(read(&mut &*bytes), word);
        }
    }
}
