//! Which segments of a capture say that a connection may make no progress: data that was sent before,
//! keep-alive probes, closed windows. All others of its connections are told apart from those that
//! nobody needs.

use std::collections::HashSet;

use foldhash::fast::RandomState;
use tuplewatch_common::segment::{ACK, FIN, RST, SYN, Segment};

use super::words::{Table, Zeroed, prefetch};

/// Directions whose last byte is remembered. Where two share a place the later one has it, and a
/// repetition of the other is missed; it comes again.
const PLACES: usize = 1 << 16;
/// Connections with such a segment; when they are too many, all are forgotten.
const MOST: usize = 4096;
/// The shortest time-out is 200 ms (`TCP_RTO_MIN`); what comes again sooner was lost among others, or was
/// captured twice.
pub const AGAIN_NS: u64 = 150_000_000;

/// What a segment says of its connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Hint {
    /// Nothing, and nothing was said of its connection before.
    #[default]
    None,
    /// Nothing, on a connection of which something was said.
    Watched,
    /// It was sent before: see [`Hint::sent_ns`].
    Again {
        /// How long ago the latest new data was sent, in steps of 34 ms.
        steps: u16,
    },
    /// A probe of a connection on which nothing waits, or of a closed window.
    Probe,
    /// The sender's window is closed.
    Closed,
}

impl Hint {
    /// When the segment seen at this moment was sent first.
    #[must_use]
    pub fn sent_ns(self, now_ns: u64) -> u64 {
        match self {
            Self::Again { steps } => now_ns.saturating_sub(u64::from(steps) << Last::STEP),
            Self::None | Self::Watched | Self::Probe | Self::Closed => now_ns,
        }
    }
}

/// The last byte of one direction of a connection: 20 bits that tell whose it is, 12 of the time, and the
/// sequence number behind it. In one word, so that the table stays in the cache.
#[derive(Clone, Copy)]
struct Last(u64);

// SAFETY: it is 0, which belongs to nobody.
unsafe impl Zeroed for Last {}

impl Last {
    /// Steps of 34 ms, which go round after 137 s.
    const STEP: u32 = 25;
    const STEPS: u64 = (1 << 12) - 1;

    const fn new(tag: u64, now_ns: u64, end: u32) -> Self {
        Self(tag << 44 | (now_ns >> Self::STEP & Self::STEPS) << 32 | end as u64)
    }

    const fn is_of(self, tag: u64) -> bool {
        self.0 >> 44 == tag & 0xf_ffff && self.0 != 0
    }

    #[expect(clippy::cast_possible_truncation, reason = "the lower half")]
    const fn end(self) -> u32 {
        self.0 as u32
    }

    /// How many steps ago it was sent first.
    const fn age(self, now_ns: u64) -> u16 {
        ((now_ns >> Self::STEP).wrapping_sub(self.0 >> 32) & Self::STEPS) as u16
    }
}

/// What was sent.
pub struct Sent {
    places: Table<Last>,
    watched: HashSet<u64, RandomState>,
}

impl Default for Sent {
    fn default() -> Self {
        Self {
            places: Table::new(PLACES),
            watched: HashSet::default(),
        }
    }
}

impl Sent {
    /// Gets ready what the segments of a connection will need when their turn comes.
    #[inline]
    pub(super) fn expect(&self, hash: u64) {
        // Both directions lie side by side.
        prefetch(self.places.get((hash as usize) << 1 & (PLACES - 1)));
    }

    /// Looks at a segment with this hash of its four-tuple and this window field.
    #[inline]
    pub fn look(&mut self, segment: &Segment, hash: u64, window: u16, now_ns: u64) -> Hint {
        if segment.flags & (SYN | RST) != 0 {
            return Hint::None;
        }
        let mut hint = if segment.payload_len > 0 {
            self.data(segment, hash, now_ns)
        } else {
            self.pure(segment, hash)
        };
        if hint == Hint::None && window == 0 && segment.flags & (ACK | FIN) == ACK {
            hint = Hint::Closed;
        }
        if hint != Hint::None {
            self.watch(hash);
        } else if !self.watched.is_empty() && self.watched.contains(&hash) {
            hint = Hint::Watched;
        }
        hint
    }

    #[cold]
    fn watch(&mut self, hash: u64) {
        if self.watched.len() >= MOST && !self.watched.contains(&hash) {
            self.watched.clear();
        }
        self.watched.insert(hash);
    }

    #[inline]
    fn place(&mut self, segment: &Segment, hash: u64) -> (&mut Last, u64) {
        let direction = u64::from(segment.tuple.initiator_is_lower());
        let at = (hash as usize) << 1 | direction as usize;
        (&mut self.places[at & (PLACES - 1)], hash >> 44)
    }

    #[inline]
    fn data(&mut self, segment: &Segment, hash: u64, now_ns: u64) -> Hint {
        let end = segment.seq.wrapping_add(segment.payload_len);
        let (last, tag) = self.place(segment, hash);
        let ahead = end.wrapping_sub(last.end()).cast_signed();
        if ahead > 0 || !last.is_of(tag) {
            *last = Last::new(tag, now_ns, end);
            return Hint::None;
        }
        let again = Hint::Again {
            steps: last.age(now_ns),
        };
        if now_ns - again.sent_ns(now_ns) >= AGAIN_NS {
            again
        } else {
            Hint::None
        }
    }

    #[inline]
    fn pure(&mut self, segment: &Segment, hash: u64) -> Hint {
        let (last, tag) = self.place(segment, hash);
        let is_probe = segment.flags & FIN == 0 && segment.seq.wrapping_add(1) == last.end();
        if is_probe && last.is_of(tag) {
            Hint::Probe
        } else {
            Hint::None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    fn segment(seq: u32, payload_len: u32) -> Segment {
        let mut segment = Segment {
            flags: ACK,
            seq,
            payload_len,
            ..Segment::default()
        };
        segment.tuple.initiator_port = 40_000;
        segment.tuple.responder_port = 80;
        segment
    }

    fn look(sent: &mut Sent, segment: &Segment, window: u16, now_ns: u64) -> Hint {
        sent.look(segment, segment.tuple.hash(), window, now_ns)
    }

    #[test]
    fn what_comes_again_is_told_from_what_is_new() {
        let mut sent = Sent::default();
        assert_eq!(look(&mut sent, &segment(100, 50), 500, S), Hint::None);
        assert_eq!(look(&mut sent, &segment(150, 50), 500, S + 1), Hint::None);
        assert_eq!(
            look(&mut sent, &segment(150, 50), 500, S + 2),
            Hint::None,
            "twice"
        );
        let hint = look(&mut sent, &segment(100, 50), 500, 2 * S);
        let Hint::Again { .. } = hint else {
            panic!("it is new");
        };
        let sent_ns = hint.sent_ns(2 * S);
        assert!(sent_ns.abs_diff(S) < 40_000_000, "{sent_ns}");
        assert_eq!(
            look(&mut sent, &segment(200, 50), 500, 2 * S),
            Hint::Watched
        );
        // The numbers go round.
        let mut sent = Sent::default();
        assert_eq!(
            look(&mut sent, &segment(u32::MAX - 9, 10), 500, S),
            Hint::None
        );
        assert_eq!(look(&mut sent, &segment(0, 10), 500, S), Hint::None);
    }

    #[test]
    fn probes_and_closed_windows() {
        let mut sent = Sent::default();
        assert_eq!(look(&mut sent, &segment(100, 50), 500, S), Hint::None);
        assert_eq!(look(&mut sent, &segment(150, 0), 500, S), Hint::None);
        assert_eq!(look(&mut sent, &segment(149, 0), 500, S), Hint::Probe);
        let mut other = segment(7, 0);
        other.tuple.responder_port = 81;
        assert_eq!(look(&mut sent, &other, 0, S), Hint::Closed);
        other.flags |= RST;
        assert_eq!(look(&mut sent, &other, 0, S), Hint::None);
    }
}
