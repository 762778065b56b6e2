//! Sizes and latencies of the responses on one connection, whatever is said on it: what is sent one way until
//! the other way speaks again.
//!
//! Sequence numbers tell how much is new, so that what is sent again, or seen twice on its way, counts once.

use crate::{
    address::FourTuple,
    segment::{FIN, RST},
    seq::after,
    ways::WAYS,
};

/// FIN or RST went by, after which nothing is counted.
const CLOSED: u8 = 1;
/// [`Exchange::request_end`] means something.
const ASKED: u8 = 2;
/// [`Exchange::response_end`] means something.
const ANSWERED: u8 = 4;

/// The first responses of a connection are the handshake of TLS, and its tickets: not counted.
pub const HANDSHAKE: u32 = 2;

/// Some responses.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Responses {
    /// How many.
    pub count: u32,
    /// The longest time from a request to the begin of its response, in microseconds.
    pub slowest_us: u32,
    /// Sum of these times.
    pub sum_us: u64,
}

impl Responses {
    /// Adds one.
    #[inline(always)]
    pub const fn add(&mut self, waited_us: u32) {
        self.count = self.count.wrapping_add(1);
        if self.slowest_us < waited_us {
            self.slowest_us = waited_us;
        }
        self.sum_us += waited_us as u64;
    }

    /// Their mean time in microseconds.
    #[must_use]
    pub fn mean_us(&self) -> u64 {
        self.sum_us / u64::from(self.count.max(1))
    }
}

/// Requests and responses on one connection. Times are nanoseconds of the source's clock, 0 for never.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exchange {
    /// [`FourTuple::hash`] of the connection; 0 for a free place.
    pub hash: u64,
    /// The connection, named by who opened it.
    pub tuple: FourTuple,
    /// Its SYN; 0 if that was before anybody looked.
    pub opened_ns: u64,
    /// The latest segment that changed anything here.
    pub last_ns: u64,
    /// The request that waits for its response or is being answered, 0 for none.
    asked_ns: u64,
    /// When its response began.
    answered_ns: u64,
    /// When the latest complete response began.
    pub latest_ns: u64,
    /// When the first one of the latest run of equally long ones began.
    pub run_since_ns: u64,
    /// All complete responses but those of the handshake.
    pub all: Responses,
    /// The latest ones that are equally long.
    pub run: Responses,
    /// How many bytes these have.
    pub bytes: u32,
    /// Bytes of the response that goes on.
    going_on: u32,
    /// Complete responses, those of the handshake too.
    seen: u32,
    /// What follows the latest request has this sequence number.
    request_end: u32,
    /// The same of the latest response.
    response_end: u32,
    /// The interface that saw the SYN; 0 until a segment of a connection tells that was there before.
    pub ifindex: u32,
    /// `CLOSED` and its neighbours.
    flags: u8,
    /// 1 if the end that opened it is the lower one ([`FourTuple::initiator_is_lower`]), else 0.
    is_lower: u8,
    /// A [`crate::address::Role`].
    pub role: u8,
    /// Always zero.
    pub pad: [u8; 5],
}

/// Exchanges of one set of the kernel side's table.
pub type Set = [Exchange; WAYS as usize];

/// What of a segment matters here.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// The sender is the lower end ([`FourTuple::initiator_is_lower`]).
    pub from_lower: bool,
    /// Flags of the TCP header.
    pub flags: u8,
    /// Sequence number.
    pub seq: u32,
    /// Bytes of payload.
    pub payload_len: u32,
}

impl Exchange {
    /// Begins anew with the SYN of a connection.
    #[inline(always)]
    pub fn begin(&mut self, hash: u64, syn: &FourTuple, role: u8, ifindex: u32, now_ns: u64) {
        // Field by field: put together elsewhere it would not fit the stack of an eBPF program.
        self.tuple.copy_from(syn);
        self.opened_ns = now_ns;
        self.last_ns = now_ns;
        self.asked_ns = 0;
        self.answered_ns = 0;
        self.latest_ns = 0;
        self.run_since_ns = 0;
        self.all.count = 0;
        self.all.slowest_us = 0;
        self.all.sum_us = 0;
        self.run.count = 0;
        self.run.slowest_us = 0;
        self.run.sum_us = 0;
        self.bytes = 0;
        self.going_on = 0;
        self.seen = 0;
        self.request_end = 0;
        self.response_end = 0;
        self.ifindex = ifindex;
        self.flags = 0;
        self.is_lower = u8::from(syn.initiator_is_lower());
        self.role = role;
        self.hash = hash;
    }

    /// Begins with a connection that was there before: its handshake is over, and what is on its way is not
    /// counted, since nobody has seen what it answers.
    #[inline(always)]
    pub fn begin_older(&mut self, hash: u64, tuple: &FourTuple, role: u8, now_ns: u64) {
        self.begin(hash, tuple, role, 0, now_ns);
        self.opened_ns = 0;
        self.seen = HANDSHAKE;
    }

    /// Whether segments at this interface count: each is seen at two, if both ends are on this host or it
    /// forwards them.
    #[inline(always)]
    pub const fn is_seen_at(&mut self, ifindex: u32) -> bool {
        if self.ifindex == 0 {
            self.ifindex = ifindex;
        }
        self.ifindex == ifindex
    }

    /// How much it matters that it stays where room is needed: a time, later for those that matter more.
    ///
    /// What was used last matters most; but a connection on which something was counted is one that is kept,
    /// and others come and go with one request each.
    #[inline(always)]
    #[must_use]
    pub const fn weight(&self) -> u64 {
        // Without a comparison, which would be a branch in eBPF: 1 from the first response on that counts.
        let counted = (self.all.count as u64).wrapping_neg() >> 63;
        let open = (self.flags & CLOSED ^ CLOSED) as u64;
        self.last_ns + counted * open * 60_000_000_000
    }

    /// FIN or RST went by.
    #[inline(always)]
    #[must_use]
    pub const fn is_closed(&self) -> bool {
        self.flags & CLOSED != 0
    }

    /// Takes a segment without SYN.
    #[inline(always)]
    pub const fn take(&mut self, piece: &Piece, now_ns: u64) {
        if self.is_closed() {
            return;
        }
        if piece.payload_len > 0 {
            if piece.from_lower == (self.is_lower != 0) {
                self.on_request(piece, now_ns);
            } else {
                self.on_response(piece, now_ns);
            }
        }
        if piece.flags & (FIN | RST) != 0 {
            self.finish();
            self.flags |= CLOSED;
            self.last_ns = now_ns;
        }
    }

    #[inline(always)]
    const fn on_request(&mut self, piece: &Piece, now_ns: u64) {
        let end = piece.seq.wrapping_add(piece.payload_len);
        if self.flags & ASKED != 0 && !after(end, self.request_end) {
            return;
        }
        self.finish();
        self.flags |= ASKED;
        self.request_end = end;
        self.asked_ns = now_ns;
        self.last_ns = now_ns;
    }

    #[inline(always)]
    const fn on_response(&mut self, piece: &Piece, now_ns: u64) {
        let end = piece.seq.wrapping_add(piece.payload_len);
        let new = if self.flags & ANSWERED == 0 {
            piece.payload_len
        } else if after(end, self.response_end) {
            end.wrapping_sub(self.response_end)
        } else {
            return;
        };
        self.flags |= ANSWERED;
        self.response_end = end;
        self.last_ns = now_ns;
        // A server that speaks first answers nothing.
        if self.asked_ns != 0 {
            if self.going_on == 0 {
                self.answered_ns = now_ns;
            }
            self.going_on = self.going_on.wrapping_add(new);
        }
    }

    /// The response is complete, if there is one.
    #[inline(always)]
    const fn finish(&mut self) {
        let (asked_ns, bytes) = (self.asked_ns, self.going_on);
        if asked_ns == 0 || bytes == 0 {
            return;
        }
        self.asked_ns = 0;
        self.going_on = 0;
        self.seen = self.seen.wrapping_add(1);
        if self.seen <= HANDSHAKE {
            return;
        }
        let waited_us = self.answered_ns.saturating_sub(asked_ns) / 1000;
        let waited_us = if waited_us > u32::MAX as u64 {
            u32::MAX
        } else {
            waited_us as u32
        };
        if self.run.count == 0 || bytes != self.bytes {
            self.run.count = 0;
            self.run.slowest_us = 0;
            self.run.sum_us = 0;
            self.run_since_ns = self.answered_ns;
            self.bytes = bytes;
        }
        self.latest_ns = self.answered_ns;
        self.run.add(waited_us);
        self.all.add(waited_us);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::mem::size_of;

    const MS: u64 = 1_000_000;

    /// The kernel refuses values with undefined bytes; this is the sum of the fields.
    #[test]
    fn no_padding() {
        assert_eq!(size_of::<Responses>(), 4 + 4 + 8);
        let fields = 8 + size_of::<FourTuple>() + 6 * 8 + 2 * 16 + 6 * 4 + 3 + 5;
        assert_eq!(size_of::<Exchange>(), fields);
    }

    /// A connection and both ends' next sequence numbers.
    struct Talk {
        exchange: Exchange,
        seqs: [u32; 2],
        now_ns: u64,
    }

    impl Talk {
        fn new() -> Self {
            let syn = FourTuple {
                initiator_port: 40_000,
                responder_port: 443,
                ..FourTuple::default()
            };
            let mut exchange = Exchange::default();
            exchange.begin(7, &syn, 1, 2, MS);
            Self {
                exchange,
                seqs: [u32::MAX - 100, u32::MAX - 300],
                now_ns: MS,
            }
        }

        /// The `n` bytes before or behind which the end goes on.
        fn say(&mut self, end: usize, flags: u8, n: u32) -> Piece {
            let piece = Piece {
                from_lower: end == 1,
                flags,
                seq: self.seqs[end],
                payload_len: n,
            };
            self.seqs[end] = self.seqs[end].wrapping_add(n);
            self.exchange.take(&piece, self.now_ns);
            piece
        }

        fn exchange(&mut self, ms: u64, bytes: u32) {
            self.say(0, 0, 100);
            self.now_ns += ms * MS;
            self.say(1, 0, bytes);
            self.now_ns += MS;
        }
    }

    #[test]
    fn a_response_is_complete_with_the_next_request_and_those_of_the_handshake_do_not_count() {
        let mut talk = Talk::new();
        for (ms, bytes) in [(9, 4000), (9, 500), (3, 60), (5, 70), (1, 70)] {
            talk.exchange(ms, bytes);
        }
        let e = talk.exchange;
        assert_eq!((e.all.count, e.all.sum_us, e.bytes), (2, 8000, 70));
        talk.say(0, 0, 100);
        let e = talk.exchange;
        assert_eq!((e.all.count, e.all.sum_us), (3, 9000));
        assert_eq!(
            (e.run.count, e.run.slowest_us, e.run.sum_us),
            (2, 5000, 6000)
        );
        assert_eq!(e.latest_ns, talk.now_ns - MS);
        assert!(e.run_since_ns < e.latest_ns);
    }

    #[test]
    fn a_connection_that_was_there_before_counts_from_its_next_request_on() {
        let mut talk = Talk::new();
        let tuple = talk.exchange.tuple;
        talk.exchange.begin_older(7, &tuple, 1, MS);
        assert!(talk.exchange.is_seen_at(3) && !talk.exchange.is_seen_at(4));
        // The rest of a response to what nobody has seen.
        talk.say(1, 0, 700);
        for (ms, bytes) in [(3, 60), (5, 70)] {
            talk.exchange(ms, bytes);
        }
        talk.say(0, 0, 100);
        let e = talk.exchange;
        assert_eq!((e.opened_ns, e.all.count, e.all.sum_us), (0, 2, 8000));
        assert_eq!((e.run.count, e.bytes), (1, 70));
    }

    #[test]
    fn what_is_sent_again_counts_once() {
        let mut talk = Talk::new();
        talk.exchange(1, 10);
        talk.exchange(1, 10);
        let asked = talk.say(0, 0, 100);
        talk.now_ns += 200 * MS;
        talk.exchange.take(&asked, talk.now_ns);
        talk.now_ns += MS;
        let first = talk.say(1, 0, 1000);
        talk.exchange.take(&first, talk.now_ns);
        talk.say(1, 0, 500);
        talk.exchange.take(&first, talk.now_ns);
        talk.exchange.take(&asked, talk.now_ns);
        talk.say(0, 0, 100);
        let e = talk.exchange;
        assert_eq!((e.all.count, e.bytes), (1, 1500));
        assert_eq!(e.all.slowest_us, 201_000);
    }

    #[test]
    fn a_request_of_several_segments_is_one() {
        let mut talk = Talk::new();
        talk.exchange(1, 10);
        talk.exchange(1, 10);
        talk.say(0, 0, 1400);
        talk.now_ns += 40 * MS;
        talk.exchange(2, 10);
        talk.say(0, FIN, 0);
        let e = talk.exchange;
        assert_eq!((e.all.count, e.all.sum_us), (1, 2000));
        assert!(e.is_closed());
        talk.exchange(1, 10);
        talk.say(0, 0, 100);
        assert_eq!(talk.exchange, e, "nothing counts after the end");
    }

    #[test]
    fn a_server_that_speaks_first_answers_nothing() {
        let mut talk = Talk::new();
        talk.say(1, 0, 80);
        for _ in 0..=HANDSHAKE {
            talk.exchange(1, 10);
        }
        talk.say(1, RST, 0);
        let e = talk.exchange;
        assert_eq!((e.all.count, e.bytes), (1, 10));
    }

    #[test]
    fn a_connection_that_is_kept_stays_where_others_come_and_go() {
        let mut talk = Talk::new();
        let mut other = Talk::new();
        other.now_ns += 50_000 * MS;
        other.exchange(1, 10);
        assert!(talk.exchange.weight() < other.exchange.weight());
        for _ in 0..5 {
            talk.exchange(1, 10);
        }
        assert!(talk.exchange.weight() > other.exchange.weight());
        talk.say(0, FIN, 0);
        assert!(talk.exchange.weight() < other.exchange.weight());
    }
}
