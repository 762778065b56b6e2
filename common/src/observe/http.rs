//! A segment that begins an HTTP/1 message: which conversation it belongs to.

use super::{Seen, Tables};
use crate::{
    address::FourTuple,
    conversation::{Conversation, Follows},
    http::Message,
    memory::{self, Former},
};

/// Another interface that forwards the same packets sees nothing new; one that is alone with them for so
/// long takes the connection over, for the first may be gone.
const TAKE_OVER_NS: u64 = 5_000_000_000;

/// A segment that begins an HTTP/1 message.
#[derive(Clone, Copy, Debug)]
pub struct Spoken<'a> {
    /// Addresses and ports, the sender first.
    pub tuple: &'a FourTuple,
    /// [`FourTuple::hash`] of them.
    pub hash: u64,
    /// Sequence number.
    pub seq: u32,
    /// What it begins with.
    pub message: Message,
}

/// Takes it into the conversation of its connection; `true` for a response that failed and counted.
///
/// Requests begin conversations, so that a response whose request was not seen counts nowhere.
/// [`Seen::syn_role`] is the role of this host if the segment is a request.
#[inline(always)]
pub fn observe_http<T: Tables>(tables: &mut T, spoken: &Spoken<'_>, seen: &Seen) -> bool {
    match spoken.message {
        Message::Request { kind } => {
            on_request(tables, spoken, kind, seen);
            false
        }
        Message::Response { status } => {
            let Some(c) = tables.conversation(spoken.hash) else {
                return false;
            };
            is_watched_here(c, seen)
                && is_between(c, spoken.tuple.responder_port, spoken.tuple.initiator_port)
                && c.on_response(status, spoken.seq, seen.now_ns)
        }
    }
}

#[inline(always)]
fn on_request<T: Tables>(tables: &mut T, spoken: &Spoken<'_>, kind: u32, seen: &Seen) {
    let (tuple, seq, now_ns) = (spoken.tuple, spoken.seq, seen.now_ns);
    if let Some(c) = tables.conversation(spoken.hash) {
        if !is_watched_here(c, seen) {
            return;
        }
        let follows = c.follows(seq);
        let known = c.opened_ns;
        if is_between(c, tuple.initiator_port, tuple.responder_port) {
            match follows {
                Follows::Again => return,
                Follows::Next => {
                    c.ifindex = seen.ifindex;
                    c.on_request(kind, seq, now_ns);
                    return;
                }
                Follows::Doubtful => {}
            }
        }
        // A large upload lies between two requests of one connection, or another connection has the
        // same ports now; the end that sends requests may have changed with it.
        let opened_ns = opened_ns(tables, spoken.hash, now_ns);
        let Some(c) = tables.conversation(spoken.hash) else {
            return;
        };
        let same = is_between(c, tuple.initiator_port, tuple.responder_port);
        if !same || (opened_ns != 0 && opened_ns != known) {
            begin(c, spoken, opened_ns, seen);
        }
        c.on_request(kind, seq, now_ns);
        return;
    }
    let opened_ns = opened_ns(tables, spoken.hash, now_ns);
    if let Some(c) = tables.add_conversation(spoken.hash, now_ns) {
        begin(c, spoken, opened_ns, seen);
        c.on_request(kind, seq, now_ns);
    }
}

/// Writes a new conversation over whatever was there.
#[inline(always)]
fn begin(c: &mut Conversation, spoken: &Spoken<'_>, opened_ns: u64, seen: &Seen) {
    c.begin(spoken.hash, spoken.tuple, opened_ns);
    c.first_ns = seen.now_ns;
    c.ifindex = seen.ifindex;
    c.role = seen.syn_role as u8;
}

/// Packets of both ends of a connection on this host, and those that it forwards, pass two interfaces.
#[inline(always)]
const fn is_watched_here(c: &Conversation, seen: &Seen) -> bool {
    c.ifindex == seen.ifindex || seen.now_ns.saturating_sub(c.last_ns) > TAKE_OVER_NS
}

/// The requests of the conversation go from the first port to the second. (Its hash says the rest.)
#[inline(always)]
const fn is_between(c: &Conversation, initiator_port: u16, responder_port: u16) -> bool {
    c.tuple.initiator_port == initiator_port && c.tuple.responder_port == responder_port
}

/// When the handshake of the connection was completed, 0 if that is not known.
#[inline(always)]
fn opened_ns<T: Tables>(tables: &mut T, hash: u64, now_ns: u64) -> u64 {
    match tables.memory(hash).and_then(|set| memory::find(set, hash)) {
        Some(word) if matches!(word.state(), Former::Open) => word.at_ns(now_ns),
        _ => 0,
    }
}
