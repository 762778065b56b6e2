//! What is remembered of the connections that used a four-tuple before.
//!
//! 100,000 connections per second for a minute are six million four-tuples, so a connection is kept
//! as one 64-bit word in a set-associative table: 20 bits of fingerprint, 18 bits of the initial
//! sequence number, the state and a coarse time. A word is read and written in one access, so two CPUs
//! never see half of one. With 2¹⁶ sets a fingerprint is taken for another connection's once in 2³⁴
//! look-ups of an occupied set.

/// Words of one set; a set is half a cache line.
pub const WAYS: usize = 4;

/// One set of the table.
pub type Set = [u64; WAYS];

/// Resolution of the stored time: 2²⁶ ns = 67 ms. Ages go round after 78 hours.
pub const TIME_SHIFT: u32 = 26;

/// So many steps a stored time may lie ahead of the time of who reads it: some segments are given the time of the latest
/// tick, which is up to 10 ms behind.
const AHEAD: u64 = 15;

const TIME_BITS: u32 = 22;
const TIME_MASK: u64 = (1 << TIME_BITS) - 1;
const STATE_BITS: u32 = 4;
const ISN_BITS: u32 = 18;
const ISN_MASK: u64 = (1 << ISN_BITS) - 1;
const FINGERPRINT_SHIFT: u32 = TIME_BITS + STATE_BITS + ISN_BITS;

/// A closed connection is of no use after this time: the longest TIME-WAIT that a standard asks for
/// is 2 MSL = 240 s (RFC 9293 section 3.4.2); Linux keeps 60 s.
pub const HOLD_MAX_NS: u64 = 240_000_000_000;

/// What became of the former connection on a four-tuple.
#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Former {
    /// Nothing is known of one.
    None = 0,
    /// A SYN was seen, no answer.
    Opening = 1,
    /// SYN and SYN-ACK were seen, the handshake was not completed.
    HalfOpen = 2,
    /// The handshake was completed and no FIN or RST went by since.
    Open = 3,
    /// The end that sorts lower has sent its FIN.
    FinLower = 4,
    /// The end that sorts higher has sent its FIN.
    FinHigher = 5,
    /// Both ends have sent their FIN.
    Closed = 6,
    /// Ended by RST.
    Reset = 7,
    /// The SYN was answered by RST, or the initiator gave up.
    Refused = 8,
}

impl Former {
    /// Reads a stored state.
    #[inline(always)]
    #[must_use]
    pub const fn from_u8(value: u8) -> Self {
        match value {
            1 => Self::Opening,
            2 => Self::HalfOpen,
            3 => Self::Open,
            4 => Self::FinLower,
            5 => Self::FinHigher,
            6 => Self::Closed,
            7 => Self::Reset,
            8 => Self::Refused,
            _ => Self::None,
        }
    }

    /// A FIN or RST of it went by: its responder may hold a socket in TIME_WAIT or be about to.
    #[inline(always)]
    #[must_use]
    pub const fn is_closed(self) -> bool {
        matches!(
            self,
            Self::FinLower | Self::FinHigher | Self::Closed | Self::Reset
        )
    }

    /// The state after a FIN from the lower or the higher end.
    #[inline(always)]
    #[must_use]
    pub const fn after_fin(self, from_lower: bool) -> Self {
        match (self, from_lower) {
            (Self::Closed | Self::FinHigher, true) | (Self::Closed | Self::FinLower, false) => {
                Self::Closed
            }
            (_, true) => Self::FinLower,
            (_, false) => Self::FinHigher,
        }
    }
}

/// One remembered connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Word(pub u64);

impl Word {
    /// Makes the word of a connection. `hash` is [`crate::address::FourTuple::hash`].
    #[inline(always)]
    #[must_use]
    pub const fn new(hash: u64, isn: u32, state: Former, now_ns: u64) -> Self {
        Self(
            (hash >> FINGERPRINT_SHIFT) << FINGERPRINT_SHIFT
                | (isn as u64 & ISN_MASK) << (TIME_BITS + STATE_BITS)
                | (state as u64) << TIME_BITS
                | (now_ns >> TIME_SHIFT) & TIME_MASK,
        )
    }

    /// The connection's state.
    #[inline(always)]
    #[must_use]
    pub const fn state(self) -> Former {
        Former::from_u8((self.0 >> TIME_BITS & 0xf) as u8)
    }

    /// The low 18 bits of the initiator's initial sequence number equal those of `isn`.
    #[inline(always)]
    #[must_use]
    pub const fn has_isn(self, isn: u32) -> bool {
        self.0 >> (TIME_BITS + STATE_BITS) & ISN_MASK == isn as u64 & ISN_MASK
    }

    /// Steps since the stored time, below zero where that is ahead of `now_ns`.
    #[inline(always)]
    const fn steps(self, now_ns: u64) -> i64 {
        let biased = (now_ns >> TIME_SHIFT)
            .wrapping_add(AHEAD)
            .wrapping_sub(self.0)
            & TIME_MASK;
        biased.wrapping_sub(AHEAD).cast_signed()
    }

    /// Nanoseconds since the stored time, within 67 ms; 0 where that is a little ahead of `now_ns`.
    #[inline(always)]
    #[must_use]
    pub const fn age_ns(self, now_ns: u64) -> u64 {
        let steps = self.steps(now_ns);
        ((steps & !(steps >> 63)) << TIME_SHIFT).cast_unsigned()
    }

    /// The stored time itself, in nanoseconds: the same whenever it is asked for.
    #[inline(always)]
    #[must_use]
    pub const fn at_ns(self, now_ns: u64) -> u64 {
        let steps = (now_ns >> TIME_SHIFT).cast_signed() - self.steps(now_ns);
        ((steps & !(steps >> 63)) << TIME_SHIFT).cast_unsigned()
    }

    /// The same connection in another state, as of now.
    #[inline(always)]
    #[must_use]
    pub const fn with(self, state: Former, now_ns: u64) -> Self {
        let keep = !(TIME_MASK | 0xf << TIME_BITS);
        Self(self.0 & keep | (state as u64) << TIME_BITS | (now_ns >> TIME_SHIFT) & TIME_MASK)
    }

    #[inline(always)]
    const fn is_of(self, hash: u64) -> bool {
        self.0 != 0 && (self.0 ^ hash) >> FINGERPRINT_SHIFT == 0
    }
}

/// What storing a word did to the set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stored {
    /// It went to a free or outdated place, or over the older word of the same connection.
    Kept,
    /// It pushed out a connection that was still of use: counted as a loss.
    EvictedLive,
}

/// The remembered connection on a four-tuple, if there is one.
#[inline(always)]
#[must_use]
pub fn find(set: &Set, hash: u64) -> Option<Word> {
    let mut i = 0;
    while i < WAYS {
        let word = Word(set[i]);
        if word.is_of(hash) {
            return Some(word);
        }
        i += 1;
    }
    None
}

/// Stores `word`, replacing the word of the same connection, else the least useful one: free, then
/// outdated, then the longest closed, then the oldest of those still open.
#[inline(always)]
pub fn store(set: &mut Set, hash: u64, word: Word, now_ns: u64) -> Stored {
    let mut victim = 0;
    let mut victim_score = 0;
    let mut i = 0;
    while i < WAYS {
        let old = Word(set[i]);
        if old.is_of(hash) {
            set[i] = word.0;
            return Stored::Kept;
        }
        let score = if old.0 == 0 {
            u64::MAX
        } else {
            let age = old.age_ns(now_ns) >> TIME_SHIFT;
            if matches!(old.state(), Former::Open) {
                age + 1
            } else {
                age + 1 + (1 << TIME_BITS)
            }
        };
        if score > victim_score {
            victim_score = score;
            victim = i;
        }
        i += 1;
    }
    let old = Word(set[victim & (WAYS - 1)]);
    set[victim & (WAYS - 1)] = word.0;
    let outdated = !matches!(old.state(), Former::Open) && old.age_ns(now_ns) >= HOLD_MAX_NS;
    if old.0 == 0 || outdated {
        Stored::Kept
    } else {
        Stored::EvictedLive
    }
}

/// Where a SYN that moves to another port came from: a word of `fingerprint (24) | port (16) |
/// time (24)`, kept for the handshakes that got a bare ACK.
///
/// When the initiator's RST closes the mapping at a NAT, the SYN is sent again from another port of
/// the pool with the same initial sequence number: that is one open, not two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Moved(pub u64);

impl Moved {
    /// Slot hash of a SYN: initiator address, responder and initial sequence number, without the port
    /// that may change.
    #[inline(always)]
    #[must_use]
    pub fn hash(tuple: &crate::address::FourTuple, isn: u32) -> u64 {
        let portless = crate::address::FourTuple {
            initiator_port: 0,
            ..*tuple
        };
        crate::address::mix(portless.hash() ^ u64::from(isn))
    }

    /// Remembers that the SYN was last seen from `port`.
    #[inline(always)]
    #[must_use]
    pub const fn new(hash: u64, port: u16, now_ns: u64) -> Self {
        Self(hash >> 40 << 40 | (port as u64) << 24 | now_ns >> 30 & 0xff_ffff)
    }

    /// The former port, if this word is of the SYN with that hash.
    #[inline(always)]
    #[must_use]
    pub const fn port_of(self, hash: u64) -> Option<u16> {
        if self.0 != 0 && (self.0 ^ hash) >> 40 == 0 {
            Some((self.0 >> 24) as u16)
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn a_word_gives_back_what_it_got() {
        let w = Word::new(0xabcd_ef01_2345_6789, 0x1234_5678, Former::Closed, 500 * S);
        assert_eq!(w.state(), Former::Closed);
        assert!(w.has_isn(0x1234_5678));
        assert!(!w.has_isn(0x1234_5679));
        let age = w.age_ns(560 * S);
        assert!(age.abs_diff(60 * S) < 1 << 27, "{age}");
        let w = w.with(Former::Open, 600 * S);
        assert_eq!(w.state(), Former::Open);
        assert!(w.has_isn(0x1234_5678));
        assert_eq!(find(&[0, w.0, 0, 0], 0xabcd_ef01_2345_6789), Some(w));
        assert_eq!(find(&[0, w.0, 0, 0], 0xabcd_ff01_2345_6789), None);
    }

    #[test]
    fn a_clock_that_is_a_little_behind() {
        // The stored time is just past the border between two steps, that of the reader just before it.
        let (stored, behind) = (101 << TIME_SHIFT, (101 << TIME_SHIFT) - 1);
        let w = Word::new(1 << 44, 0, Former::Open, stored);
        assert_eq!((w.age_ns(behind), w.age_ns(stored)), (0, 0));
        for now in [behind, stored, stored + S, stored + 3600 * S] {
            assert_eq!(w.at_ns(now), stored, "{now}");
        }
        // What has just been written is no place for others.
        let mut set = [w.0, 0, 0, 0];
        for n in 2..5u64 {
            store(&mut set, n << 44, Word::new(n << 44, 0, Former::Open, S), S);
        }
        store(
            &mut set,
            5 << 44,
            Word::new(5 << 44, 0, Former::Open, behind),
            behind,
        );
        assert_eq!(find(&set, 1 << 44), Some(w));
    }

    #[test]
    fn the_open_connection_outlives_the_closed_ones() {
        let mut set = Set::default();
        let put = |set: &mut Set, n: u64, state, t: u64| {
            store(set, n << 44, Word::new(n << 44, 0, state, t), t)
        };
        assert_eq!(put(&mut set, 1, Former::Open, S), Stored::Kept);
        for n in 2..5 {
            assert_eq!(put(&mut set, n, Former::Closed, n * S), Stored::Kept);
        }
        assert_eq!(
            put(&mut set, 5, Former::Closed, 10 * S),
            Stored::EvictedLive
        );
        assert!(find(&set, 1 << 44).is_some());
        assert!(find(&set, 2 << 44).is_none(), "the longest closed one goes");
        assert_eq!(
            put(&mut set, 6, Former::Closed, 300 * S),
            Stored::Kept,
            "3 is outdated"
        );
    }

    #[test]
    fn fins_of_both_sides_close() {
        let s = Former::Open.after_fin(true);
        assert_eq!(s, Former::FinLower);
        assert_eq!(
            s.after_fin(true),
            Former::FinLower,
            "a FIN sent again changes nothing"
        );
        assert_eq!(s.after_fin(false), Former::Closed);
    }
}
