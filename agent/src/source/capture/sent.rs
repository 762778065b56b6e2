//! Which segments of a capture say that a connection may make no progress: data that was sent before,
//! keep-alive probes, closed windows. All others of its connections are told apart from those that
//! nobody needs.

use std::collections::HashSet;

use foldhash::fast::RandomState;
use tuplewatch_common::segment::{ACK, FIN, RST, SYN, Segment};

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
    /// It was sent before: the latest new data at this time.
    Again {
        /// Nanoseconds of the capture's clock.
        sent_ns: u64,
    },
    /// A probe of a connection on which nothing waits, or of a closed window.
    Probe,
    /// The sender's window is closed.
    Closed,
}

/// The last byte of one direction of a connection.
#[derive(Clone, Copy, Default)]
struct Last {
    /// Upper half of the connection's hash, and the direction.
    tag: u64,
    /// The sequence number behind it.
    end: u32,
    /// When it was sent first.
    sent_ns: u64,
}

/// What was sent.
#[derive(Default)]
pub struct Sent {
    places: Vec<Last>,
    watched: HashSet<u64, RandomState>,
}

impl Sent {
    /// Looks at a segment with this window field.
    #[inline]
    pub fn look(&mut self, segment: &Segment, window: u16, now_ns: u64) -> Hint {
        if segment.flags & (SYN | RST) != 0 {
            return Hint::None;
        }
        let hash = segment.tuple.hash();
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
        if self.places.is_empty() {
            self.places = vec![Last::default(); PLACES];
        }
        let tag = hash >> 32 << 1 | u64::from(segment.tuple.initiator_is_lower()) | 1 << 63;
        let at = (hash as usize) << 1 | (tag as usize & 1);
        (&mut self.places[at & (PLACES - 1)], tag)
    }

    #[inline]
    fn data(&mut self, segment: &Segment, hash: u64, now_ns: u64) -> Hint {
        let end = segment.seq.wrapping_add(segment.payload_len);
        let (last, tag) = self.place(segment, hash);
        let ahead = end.wrapping_sub(last.end).cast_signed();
        if last.tag == tag && ahead <= 0 {
            let since = now_ns.saturating_sub(last.sent_ns);
            return if since >= AGAIN_NS {
                Hint::Again {
                    sent_ns: last.sent_ns,
                }
            } else {
                Hint::None
            };
        }
        *last = Last {
            tag,
            end,
            sent_ns: now_ns,
        };
        Hint::None
    }

    #[inline]
    fn pure(&mut self, segment: &Segment, hash: u64) -> Hint {
        let (last, tag) = self.place(segment, hash);
        let is_probe = segment.flags & FIN == 0 && segment.seq.wrapping_add(1) == last.end;
        if last.tag == tag && is_probe {
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

    #[test]
    fn what_comes_again_is_told_from_what_is_new() {
        let mut sent = Sent::default();
        assert_eq!(sent.look(&segment(100, 50), 500, S), Hint::None);
        assert_eq!(sent.look(&segment(150, 50), 500, S + 1), Hint::None);
        assert_eq!(
            sent.look(&segment(150, 50), 500, S + 2),
            Hint::None,
            "twice"
        );
        let again = Hint::Again { sent_ns: S + 1 };
        assert_eq!(sent.look(&segment(100, 50), 500, 2 * S), again);
        assert_eq!(sent.look(&segment(200, 50), 500, 2 * S), Hint::Watched);
        // The numbers go round.
        let mut sent = Sent::default();
        assert_eq!(sent.look(&segment(u32::MAX - 9, 10), 500, S), Hint::None);
        assert_eq!(sent.look(&segment(0, 10), 500, S), Hint::None);
    }

    #[test]
    fn probes_and_closed_windows() {
        let mut sent = Sent::default();
        assert_eq!(sent.look(&segment(100, 50), 500, S), Hint::None);
        assert_eq!(sent.look(&segment(150, 0), 500, S), Hint::None);
        assert_eq!(sent.look(&segment(149, 0), 500, S), Hint::Probe);
        let mut other = segment(7, 0);
        other.tuple.responder_port = 81;
        assert_eq!(sent.look(&other, 0, S), Hint::Closed);
        other.flags |= RST;
        assert_eq!(sent.look(&other, 0, S), Hint::None);
    }
}
