//! Idle times of the connections of a capture: which of them woke and lived, and which were reset by the
//! first segment after their rest.
//!
//! Every segment comes by here, so a connection has one small place in a table of fixed size. Two connections that
//! share a place push each other out: of those that live only the longest rest matters, and a reset is missed rarely.

use std::{collections::HashMap, time::Duration};

use foldhash::fast::RandomState;
use tuplewatch_common::{
    address::{FourTuple, Point, PortSpaceKey, Role},
    segment::{ACK, FIN, RST, SYN},
};

use super::{
    file::Observed,
    link::Direction,
    vantage::Vantage,
    words::{Table, Zeroed, prefetch},
};
use crate::core::{
    idle::{self, IdleNews, Killed, ResetBy, Settings, Survived},
    time::Moment,
};

/// Connections known at once; a power of two.
const PLACES: usize = 1 << 18;
/// Shorter pauses are none.
const REST_MS: u32 = 1000;
/// Resets kept until the next look.
const NEWS: usize = 4096;

/// The opener is known from its SYN or SYN-ACK.
const OPENED: u8 = 1;
/// The opener is the lower end (see [`FourTuple::initiator_is_lower`]).
const OPENER_IS_LOWER: u8 = 2;
/// It wakes after a rest, or one end was closed after one: what follows says more.
const WAKES: u8 = 4;
/// The lower end broke the silence.
const BY_LOWER: u8 = 8;
/// It sent no data: a keep-alive probe.
const BY_PROBE: u8 = 16;
/// The other end has answered, or had closed first: it is not forgotten.
const LIVES: u8 = 32;
/// The other end (not the one that breaks the silence, or has data still to be answered) closed.
const CLOSED: u8 = 64;
/// Data was sent to the end that closed.
const SENT: u8 = 128;
/// What is known of a connection that does not wake.
const ASLEEP: u8 = OPENED | OPENER_IS_LOWER;

/// A connection. None lies across two cache lines.
#[derive(Clone, Copy, Default)]
#[repr(align(32))]
struct Place {
    /// [`FourTuple::hash`]; 0 for a free place.
    hash: u64,
    /// Its latest segment, in milliseconds of the capture.
    last_ms: u32,
    /// When it was opened, 0 if that was not seen.
    opened_ms: u32,
    /// How long it had rested, if it wakes.
    rest_ms: u32,
    /// TTL of the latest segment of each end, the lower one first; 0 for none.
    ttl: [u8; 2],
    flags: u8,
}

impl Place {
    /// All of these flags are set.
    const fn is(&self, flags: u8) -> bool {
        self.flags & flags == flags
    }

    /// Sets a flag or clears it.
    const fn set(&mut self, flag: u8, is: bool) {
        self.flags = self.flags & !flag | if is { flag } else { 0 };
    }
}

// SAFETY: integers only; all zeros is a free place.
unsafe impl Zeroed for Place {}

/// The tracker.
pub struct Rests {
    places: Table<Place>,
    survived: HashMap<PortSpaceKey, Survived, RandomState>,
    killed: Vec<Killed>,
    begin_ns: Option<u64>,
    /// Where the capture was taken.
    pub vantage: Vantage,
}

impl Default for Rests {
    fn default() -> Self {
        Self {
            places: Table::new(PLACES),
            survived: HashMap::default(),
            killed: Vec::new(),
            begin_ns: None,
            vantage: Vantage::default(),
        }
    }
}

impl Rests {
    /// Gets ready what the segments of a connection will need when their turn comes.
    #[inline]
    pub fn expect(&self, hash: u64) {
        prefetch(self.places.get(hash as usize & (PLACES - 1)));
    }

    /// Takes a segment; the resets that it makes known are in the news, and the latest of them is given.
    #[inline]
    pub fn take(&mut self, observed: &Observed) -> Option<Killed> {
        let segment = &observed.segment;
        let time_ns = observed.frame.time_ns;
        let begin = *self.begin_ns.get_or_insert(time_ns);
        // From 1 on: 0 means that something was not seen.
        let now_ms = u32::try_from(time_ns.saturating_sub(begin) / 1_000_000)
            .unwrap_or(u32::MAX)
            .saturating_add(1);
        let hash = observed.hash;
        let at = hash as usize & (PLACES - 1);
        let place = &mut self.places[at];
        let by_lower = segment.tuple.initiator_is_lower();
        let special = segment.flags & (SYN | FIN | RST) != 0;
        let same = place.hash == hash;
        // Before its first segment nothing is known of it, and least that it rested.
        let rest_ms = if same {
            now_ms.saturating_sub(place.last_ms)
        } else {
            0
        };
        if same && !special && rest_ms < REST_MS && place.flags & WAKES == 0 {
            place.last_ms = place.last_ms.max(now_ms);
            place.ttl[usize::from(!by_lower)] = observed.ttl;
            return None;
        }
        if !same {
            *place = Place {
                hash,
                last_ms: now_ms,
                ..Place::default()
            };
        }
        self.change(observed, at, now_ms, rest_ms)
    }

    /// A segment that is more than one of many.
    #[inline(never)]
    fn change(
        &mut self,
        observed: &Observed,
        at: usize,
        now_ms: u32,
        rest_ms: u32,
    ) -> Option<Killed> {
        let segment = &observed.segment;
        let by_lower = segment.tuple.initiator_is_lower();
        let place = &mut self.places[at];
        let flags = segment.flags;
        let ttl_before = place.ttl[usize::from(!by_lower)];
        place.last_ms = place.last_ms.max(now_ms);
        if flags & RST == 0 {
            place.ttl[usize::from(!by_lower)] = observed.ttl;
        }
        if flags & SYN != 0 {
            let is_answer = flags & ACK != 0;
            place.flags = OPENED
                | if by_lower != is_answer {
                    OPENER_IS_LOWER
                } else {
                    0
                };
            place.opened_ms = now_ms;
            return None;
        }
        if flags & RST != 0 {
            let place = std::mem::take(place);
            return self.reset(observed, &place, ttl_before);
        }
        if place.is(WAKES) {
            self.woken(observed, at, by_lower);
        } else if rest_ms >= REST_MS {
            place.rest_ms = rest_ms;
            place.flags = place.flags & ASLEEP | WAKES;
            place.set(BY_LOWER, by_lower);
            place.set(BY_PROBE, segment.payload_len <= 1);
            // The end that closes has broken the silence; what may cross that comes from the other.
            place.set(CLOSED, flags & FIN != 0);
        }
        None
    }

    /// A segment on a connection that wakes or is being closed.
    fn woken(&mut self, observed: &Observed, at: usize, by_lower: bool) {
        let segment = &observed.segment;
        let place = &mut self.places[at];
        let is_answer = by_lower != place.is(BY_LOWER);
        if is_answer && !place.is(LIVES) {
            place.set(LIVES, true);
            let place = *place;
            self.survived(observed, &place);
        }
        let place = &mut self.places[at];
        if is_answer && segment.flags & FIN != 0 && !place.is(CLOSED) {
            // It closes while the other end's data is under way to it, or has just come.
            place.set(CLOSED, true);
            place.set(SENT, !place.is(BY_PROBE));
            place.set(BY_LOWER, by_lower);
        } else if is_answer && place.is(CLOSED) {
            place.set(SENT, place.is(SENT) || segment.payload_len > 0);
        } else if place.is(LIVES) && !place.is(CLOSED) {
            place.flags &= ASLEEP;
        }
    }

    /// A RST on a connection that wakes or is being closed.
    fn reset(&mut self, observed: &Observed, place: &Place, ttl_before: u8) -> Option<Killed> {
        if !place.is(WAKES) {
            return None;
        }
        let segment = &observed.segment;
        let from_lower = segment.tuple.initiator_is_lower();
        let (tuple, role) = self.opened(observed, place);
        // The RST comes from the other end, as far as its addresses tell.
        let sender_is_opener = segment.tuple == tuple;
        let remote = match role {
            Role::Initiator => !sender_is_opener,
            Role::Responder => sender_is_opener,
            Role::Unknown => false,
        };
        // A client that closes before it is answered has given up waiting: no race for an idle connection.
        let by_lower = place.is(BY_LOWER);
        let closed_before =
            place.is(CLOSED | SENT) && from_lower == by_lower && role == Role::Initiator;
        let killed = !place.is(CLOSED) && !place.is(LIVES) && from_lower != by_lower;
        if !remote || !(closed_before || killed) || self.killed.len() >= NEWS {
            return None;
        }
        let begin = self.begin_ns.unwrap_or_default();
        let moment = |ms: u32| Moment(begin + u64::from(ms - 1) * 1_000_000);
        let killed = Killed {
            tuple,
            role,
            point: Point::Wire as u8,
            at: Moment(observed.frame.time_ns),
            idle: Duration::from_millis(place.rest_ms.into()),
            opened: (place.opened_ms != 0).then(|| moment(place.opened_ms)),
            pid: 0,
            command: [0; 16],
            closed_before,
            by_probe: place.is(BY_PROBE),
            reset_by: match ttl_before {
                0 => None,
                ttl if ttl == observed.ttl => Some(ResetBy::Peer),
                _ => Some(ResetBy::Middlebox),
            },
            in_silence: false,
            settings: Settings::default(),
        };
        self.killed.push(killed);
        Some(killed)
    }

    /// How long a connection had rested before its `sender`'s end broke the silence, if nothing has answered
    /// that so far.
    #[must_use]
    pub fn unanswered(&self, sender: &FourTuple) -> Option<Duration> {
        let hash = sender.hash();
        let place = self.places.get(hash as usize & (PLACES - 1))?;
        let is_its = place.hash == hash && place.is(BY_LOWER) == sender.initiator_is_lower();
        (is_its && place.is(WAKES) && !place.is(LIVES) && !place.is(CLOSED))
            .then(|| Duration::from_millis(place.rest_ms.into()))
    }

    fn survived(&mut self, observed: &Observed, place: &Place) {
        let (tuple, role) = self.opened(observed, place);
        let key = idle::service(&tuple, role, Point::Wire as u8);
        let survived = self.survived.entry(key).or_default();
        survived.count = survived.count.saturating_add(1);
        survived.longest = survived
            .longest
            .max(Duration::from_millis(place.rest_ms.into()));
    }

    /// The connection named by who opened it, and what this place is in it. Where the SYN was not seen, the
    /// lower port is taken for that of the service.
    fn opened(&self, observed: &Observed, place: &Place) -> (FourTuple, Role) {
        let sent = observed.segment.tuple;
        let opener_is_lower = place.flags & (OPENED | OPENER_IS_LOWER) == OPENED | OPENER_IS_LOWER;
        let sender_opened = sent.initiator_is_lower() == opener_is_lower;
        let tuple = if sender_opened { sent } else { sent.reversed() };
        let direction = match (observed.direction, sender_opened) {
            (Some(Direction::In), false) => Some(Direction::Out),
            (Some(Direction::Out), false) => Some(Direction::In),
            (direction, _) => direction,
        };
        (tuple, self.vantage.role_in(&tuple, direction))
    }

    /// What is new since the last call.
    pub fn news(&mut self) -> IdleNews {
        let mut survived: Vec<_> = self.survived.drain().collect();
        survived.sort_unstable_by_key(|(key, _)| *key);
        IdleNews {
            killed: std::mem::take(&mut self.killed),
            survived,
        }
    }
}

#[cfg(test)]
mod tests {
    use tuplewatch_common::{address::v4_mapped, segment::Segment};

    use super::*;
    use crate::source::capture::tables::Frame;

    const PSH_ACK: u8 = 0x18;

    /// A connection of 10.0.0.1 as the capture of its host shows it.
    struct Shown {
        rests: Rests,
        tuple: FourTuple,
    }

    impl Shown {
        fn new() -> Self {
            let tuple = FourTuple {
                initiator: v4_mapped([10, 0, 0, 1]),
                responder: v4_mapped([203, 0, 113, 10]),
                responder_port: 80,
                initiator_port: 40_000,
                pad: 0,
            };
            let mut rests = Rests::default();
            rests.vantage.local.insert(tuple.initiator);
            Self { rests, tuple }
        }

        fn send(&mut self, ms: u64, out: bool, flags: u8, payload_len: u32, ttl: u8) {
            let tuple = if out {
                self.tuple
            } else {
                self.tuple.reversed()
            };
            self.rests.take(&Observed {
                frame: Frame {
                    time_ns: ms * 1_000_000,
                    ..Frame::default()
                },
                segment: Segment {
                    tuple,
                    flags,
                    payload_len,
                    ..Segment::default()
                },
                hash: tuple.hash(),
                ttl,
                ..Observed::default()
            });
        }

        fn opened(mut self) -> Self {
            self.send(0, true, SYN, 0, 64);
            self.send(1, false, SYN | ACK, 0, 63);
            self.send(2, true, ACK, 0, 64);
            self
        }
    }

    #[test]
    fn a_reset_by_something_in_between() {
        let mut shown = Shown::new().opened();
        shown.send(3000, true, PSH_ACK, 100, 64);
        shown.send(3001, false, PSH_ACK, 500, 63);
        shown.send(3002, true, ACK, 0, 64);
        shown.send(16_002, true, PSH_ACK, 100, 64);
        shown.send(16_003, false, RST, 0, 64);
        shown.send(16_004, false, RST, 0, 64);
        let news = shown.rests.news();
        assert_eq!(news.survived.len(), 1);
        assert_eq!(news.survived[0].1.longest, Duration::from_millis(2998));
        assert_eq!(news.killed.len(), 1, "once");
        let killed = news.killed[0];
        assert_eq!(killed.idle, Duration::from_secs(13));
        assert_eq!(killed.reset_by, Some(ResetBy::Middlebox));
        assert_eq!((killed.tuple, killed.role), (shown.tuple, Role::Initiator));
        assert!(killed.opened.is_some() && !killed.closed_before && !killed.by_probe);
    }

    #[test]
    fn without_its_syn_the_lower_port_is_the_service() {
        let mut shown = Shown::new();
        shown.send(0, false, PSH_ACK, 500, 63);
        shown.send(9000, true, ACK, 0, 64);
        shown.send(9001, false, RST | ACK, 0, 63);
        let killed = shown.rests.news().killed[0];
        assert_eq!((killed.tuple, killed.opened), (shown.tuple, None));
        assert!(killed.by_probe);
        assert_eq!(killed.reset_by, Some(ResetBy::Peer));
    }

    #[test]
    fn what_was_before_the_first_segment_seen_is_no_rest() {
        for first in [(true, PSH_ACK), (false, PSH_ACK)] {
            let mut shown = Shown::new().opened();
            // Another one, of which nothing was seen for nine seconds of the capture.
            shown.tuple.initiator_port += 1;
            shown.send(9000, first.0, first.1, 100, 64);
            shown.send(9001, !first.0, RST, 0, 64);
            let news = shown.rests.news();
            assert_eq!((news.killed, news.survived.len()), (Vec::new(), 0));
        }
    }

    #[test]
    fn nobody_has_answered_since_it_rested() {
        let mut shown = Shown::new().opened();
        let tuple = shown.tuple;
        let rested = |shown: &Shown| shown.rests.unanswered(&tuple);
        assert_eq!(rested(&shown), None);
        for ms in [13_002, 13_202, 13_602, 15_002] {
            shown.send(ms, true, PSH_ACK, 100, 64);
            assert_eq!(rested(&shown), Some(Duration::from_secs(13)));
        }
        assert_eq!(shown.rests.unanswered(&tuple.reversed()), None, "not ours");
        shown.send(15_003, false, ACK, 0, 63);
        assert_eq!(rested(&shown), None);
    }

    #[test]
    fn resets_that_no_rest_explains() {
        // Unasked for; by ourselves; after an answer.
        for segments in [
            &[(false, RST)][..],
            &[(true, RST)],
            &[(true, PSH_ACK), (true, RST)],
            &[(true, PSH_ACK), (false, ACK), (false, RST)],
            &[(false, PSH_ACK), (true, RST)],
        ] {
            let mut shown = Shown::new().opened();
            for (n, (out, flags)) in (20_000..).zip(segments) {
                shown.send(n, *out, *flags, 10, 64);
            }
            assert_eq!(shown.rests.news().killed, [], "{segments:?}");
        }
    }

    #[test]
    fn a_peer_that_closes_first() {
        // Its FIN comes before our request, or crosses it.
        for segments in [
            &[(false, FIN | ACK), (true, PSH_ACK), (false, RST)][..],
            &[
                (false, FIN | ACK),
                (true, ACK),
                (true, PSH_ACK),
                (false, RST),
            ],
            &[(true, PSH_ACK), (false, FIN | ACK), (false, RST)],
        ] {
            let mut shown = Shown::new().opened();
            for (n, (out, flags)) in (5000..).zip(segments) {
                let len = if *flags == PSH_ACK { 100 } else { 0 };
                shown.send(n, *out, *flags, len, 64);
            }
            let killed = shown.rests.news().killed;
            assert_eq!(killed.len(), 1, "{segments:?}");
            assert!(killed[0].closed_before);
            assert_eq!(killed[0].idle, Duration::from_millis(4998));
        }
        // An orderly end.
        let mut shown = Shown::new().opened();
        shown.send(5000, false, FIN | ACK, 0, 64);
        shown.send(5001, true, ACK, 0, 64);
        shown.send(5002, true, FIN | ACK, 0, 64);
        shown.send(5003, false, RST, 0, 64);
        assert_eq!(shown.rests.news().killed, []);
    }
}
