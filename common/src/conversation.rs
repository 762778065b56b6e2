//! What is known of the HTTP/1 exchanges on one connection: a state machine that counts each request and
//! each final response once.

use crate::{
    address::FourTuple,
    http::{HEAD, is_failure, is_interim, is_success},
    ways::WAYS,
};

/// The latest final response was a failure.
pub const FAILING: u8 = 1;
/// A final response was seen: [`Conversation::response_seq`] means something.
pub const ANSWERED: u8 = 2;
/// Requests of more than one kind failed since this connection is watched.
pub const FAILED_KINDS_DIFFER: u8 = 4;
/// Requests of more than one kind failed in the latest run of failures.
pub const RUN_KINDS_DIFFER: u8 = 8;

/// A segment that begins so little before or at the latest one of its direction is the same one again.
const NEAR: i32 = 1 << 20;
/// A request that begins so much behind the one before may be of another connection on the same ports.
const FAR: i32 = 1 << 24;

/// HTTP/1 on one connection. Times are nanoseconds of the source's clock, 0 for never.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Conversation {
    /// [`FourTuple::hash`] of the connection; 0 for a free place.
    pub hash: u64,
    /// The connection, named by who sends the requests.
    pub tuple: FourTuple,
    /// When its handshake was completed, within 67 ms; 0 if that was not seen.
    pub opened_ns: u64,
    /// First request seen.
    pub first_ns: u64,
    /// Latest request or final response.
    pub last_ns: u64,
    /// First failure of the latest run of failures, which outlives the run.
    pub run_since_ns: u64,
    /// Latest failure.
    pub failed_ns: u64,
    /// First final response after it that is no failure; before any failure the first one at all.
    pub good_since_ns: u64,
    /// Latest success (2xx, 3xx, 101).
    pub success_ns: u64,
    /// Requests.
    pub requests: u32,
    /// Final responses.
    pub responses: u32,
    /// Failures (5xx) among them.
    pub failures: u32,
    /// Failures in a row, of the latest run.
    pub run: u32,
    /// [`crate::http::kind`] of the latest request, 0 if it cannot be told which one is answered next.
    pub kind: u32,
    /// Kind of the first failure of the latest run.
    pub run_kind: u32,
    /// Kind of the latest failure.
    pub failed_kind: u32,
    /// Kind of the latest success.
    pub success_kind: u32,
    /// Sequence number of the latest request.
    pub request_seq: u32,
    /// Sequence number of the latest final response.
    pub response_seq: u32,
    /// The interface that sees it first.
    pub ifindex: u32,
    /// Requests without final response.
    pub waiting: u16,
    /// Status of the latest failure.
    pub status: u16,
    /// A [`crate::address::Role`]: whether this host sends the requests.
    pub role: u8,
    /// [`FAILING`] and its neighbours.
    pub flags: u8,
    /// Always zero.
    pub pad: [u8; 6],
}

/// Conversations of one set of the kernel side's table.
pub type Set = [Conversation; WAYS as usize];

/// The first bytes of the latest failed response of a connection, whose error page the user side
/// recognises.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// [`FourTuple::hash`] of the connection.
    pub hash: u64,
    /// How many bytes there are.
    pub len: u64,
    /// The bytes.
    pub bytes: [u8; HEAD],
}

/// What a request is to a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Follows {
    /// The next one.
    Next,
    /// One that was seen before.
    Again,
    /// It may belong to another connection on the same ports.
    Doubtful,
}

impl Conversation {
    /// How much it matters that it stays where room is needed: a time, later for those that matter more.
    ///
    /// What was said last matters most. A connection that has carried one request only may never carry
    /// another; one whose requests fail is what the table is for.
    #[inline(always)]
    #[must_use]
    pub const fn weight(&self) -> u64 {
        // Without a comparison, which would be a branch in eBPF: 1 from the second request on.
        let several = 1u64.wrapping_sub(self.requests as u64) >> 63;
        let failing = (self.flags & FAILING) as u64;
        self.last_ns + several * 10_000_000_000 + failing * 60_000_000_000
    }

    /// Begins anew on a connection.
    #[inline(always)]
    pub const fn begin(&mut self, hash: u64, tuple: &FourTuple, opened_ns: u64) {
        // Field by field: put together elsewhere it would not fit the stack of an eBPF program.
        self.hash = hash;
        self.tuple = *tuple;
        self.opened_ns = opened_ns;
        self.first_ns = 0;
        self.last_ns = 0;
        self.run_since_ns = 0;
        self.failed_ns = 0;
        self.good_since_ns = 0;
        self.success_ns = 0;
        self.requests = 0;
        self.responses = 0;
        self.failures = 0;
        self.run = 0;
        self.kind = 0;
        self.run_kind = 0;
        self.failed_kind = 0;
        self.success_kind = 0;
        self.request_seq = 0;
        self.response_seq = 0;
        self.ifindex = 0;
        self.waiting = 0;
        self.status = 0;
        self.role = 0;
        self.flags = 0;
    }

    /// The latest final response was a failure.
    #[inline(always)]
    #[must_use]
    pub const fn is_failing(&self) -> bool {
        self.flags & FAILING != 0
    }

    /// What a request with this sequence number is.
    #[inline(always)]
    #[must_use]
    pub const fn follows(&self, seq: u32) -> Follows {
        let ahead = seq.wrapping_sub(self.request_seq).cast_signed();
        if self.requests == 0 || (ahead > 0 && ahead < FAR) {
            Follows::Next
        } else if ahead <= 0 && ahead > -NEAR {
            Follows::Again
        } else {
            Follows::Doubtful
        }
    }

    /// Takes a request that [`Follows::Next`].
    #[inline(always)]
    pub const fn on_request(&mut self, kind: u32, seq: u32, now_ns: u64) {
        // Of several that wait it is not known which one the next response answers.
        self.kind = if self.waiting == 0 { kind } else { 0 };
        #[expect(
            clippy::implicit_saturating_add,
            reason = "as the verifier was shown it"
        )]
        if self.waiting < u16::MAX {
            self.waiting += 1;
        }
        self.requests = self.requests.wrapping_add(1);
        self.request_seq = seq;
        self.last_ns = now_ns;
    }

    /// Takes the status line of a response; `true` for one that failed.
    ///
    /// Without a request that waits for it, it is none: bodies may contain such lines too.
    #[inline(always)]
    pub const fn on_response(&mut self, status: u16, seq: u32, now_ns: u64) -> bool {
        if is_interim(status) || self.waiting == 0 {
            return false;
        }
        let ahead = seq.wrapping_sub(self.response_seq).cast_signed();
        if self.flags & ANSWERED != 0 && ahead <= 0 && ahead > -NEAR {
            return false;
        }
        self.waiting -= 1;
        self.responses = self.responses.wrapping_add(1);
        self.response_seq = seq;
        self.last_ns = now_ns;
        let kind = self.kind;
        if is_failure(status) {
            if self.failures > 0 && kind != self.failed_kind {
                self.flags |= FAILED_KINDS_DIFFER;
            }
            if self.is_failing() {
                if kind != self.run_kind {
                    self.flags |= RUN_KINDS_DIFFER;
                }
            } else {
                self.run = 0;
                self.run_since_ns = now_ns;
                self.run_kind = kind;
                self.flags &= !RUN_KINDS_DIFFER;
            }
            self.run = self.run.wrapping_add(1);
            self.failures = self.failures.wrapping_add(1);
            self.failed_ns = now_ns;
            self.status = status;
            self.failed_kind = kind;
            self.flags |= FAILING | ANSWERED;
            return true;
        }
        if self.is_failing() || self.flags & ANSWERED == 0 {
            self.good_since_ns = now_ns;
        }
        if is_success(status) {
            self.success_ns = now_ns;
            self.success_kind = kind;
        }
        self.flags = self.flags & !FAILING | ANSWERED;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::mem::size_of;

    /// The kernel refuses values with undefined bytes; this is the sum of the fields.
    #[test]
    fn no_padding() {
        assert_eq!(size_of::<Conversation>(), 8 + 40 + 7 * 8 + 11 * 4 + 4 + 8);
    }

    /// A conversation in which each request is answered with the next status.
    fn answered(statuses: &[u16]) -> Conversation {
        let mut c = Conversation::default();
        for (n, status) in (1..).zip(statuses) {
            c.on_request(7, n * 100, u64::from(n) * 10);
            c.on_response(*status, n * 300, u64::from(n) * 10 + 1);
        }
        c
    }

    #[test]
    fn a_run_ends_with_a_response_that_is_no_failure_and_is_remembered() {
        let c = answered(&[200, 503, 502, 503]);
        assert!(c.is_failing());
        assert_eq!((c.run, c.run_since_ns, c.failed_ns), (3, 21, 41));
        let c = answered(&[200, 503, 502, 503, 404, 200]);
        assert!(!c.is_failing());
        assert_eq!((c.run, c.failures, c.good_since_ns), (3, 3, 51));
        assert_eq!((c.success_ns, c.requests, c.responses), (61, 6, 6));
        assert_eq!(answered(&[503, 200, 500]).run, 1);
    }

    #[test]
    fn interim_responses_are_not_final() {
        let mut c = Conversation::default();
        c.on_request(7, 1, 1);
        for status in [100, 102, 103] {
            assert!(!c.on_response(status, 5, 2));
        }
        assert_eq!((c.responses, c.waiting), (0, 1));
        assert!(c.on_response(503, 30, 3));
        assert_eq!(c.responses, 1);
    }

    #[test]
    fn a_status_line_that_nothing_waits_for_is_part_of_a_body() {
        let mut c = answered(&[200]);
        assert!(!c.on_response(503, 900, 5));
        assert_eq!((c.responses, c.failures), (1, 0));
    }

    #[test]
    fn what_is_sent_again_counts_once() {
        let mut c = answered(&[503]);
        assert_eq!(c.follows(100), Follows::Again);
        assert_eq!(c.follows(99), Follows::Again);
        c.on_request(7, 200, 30);
        assert!(!c.on_response(503, 300, 31), "that of the request before");
        assert!(c.on_response(503, 600, 32));
        assert_eq!((c.requests, c.responses, c.run), (2, 2, 2));
    }

    #[test]
    fn another_connection_begins_somewhere_else() {
        let c = answered(&[200]);
        assert_eq!(c.follows(100 + 5000), Follows::Next);
        assert_eq!(c.follows(100 + (1 << 25)), Follows::Doubtful);
        assert_eq!(c.follows(100u32.wrapping_sub(1 << 25)), Follows::Doubtful);
        assert_eq!(Conversation::default().follows(5), Follows::Next);
    }

    #[test]
    fn pipelined_requests_have_no_kind() {
        let mut c = Conversation::default();
        c.on_request(7, 100, 1);
        c.on_request(8, 200, 2);
        c.on_response(503, 300, 3);
        assert_eq!((c.failed_kind, c.waiting), (0, 1));
        c.on_response(200, 600, 4);
        c.on_request(8, 300, 5);
        c.on_response(200, 900, 6);
        assert_eq!(c.success_kind, 8);
    }

    #[test]
    fn kinds_that_fail_are_told_apart() {
        let mut c = Conversation::default();
        for (n, kind) in [(1, 7), (2, 7), (3, 9)] {
            c.on_request(kind, n, 1);
            c.on_response(503, n, 1);
            let differ = c.flags & (RUN_KINDS_DIFFER | FAILED_KINDS_DIFFER);
            assert_eq!(differ == RUN_KINDS_DIFFER | FAILED_KINDS_DIFFER, kind == 9);
        }
    }
}
