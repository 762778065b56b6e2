//! Sizes and latencies of the responses on each connection of a capture, whatever is said on it: what is sent one
//! way until the other way speaks again. Only looked at where a rule asks for it.

use std::collections::{BTreeSet, HashMap};

use foldhash::fast::RandomState;
use tuplewatch_common::{
    address::{FourTuple, Role},
    segment::{ACK, FIN, RST, SYN},
};

use super::{file::Observed, vantage::Vantage};
use crate::core::{
    suspect::{Answers, Responses},
    time::Moment,
};

/// Connections known at once; those opened later are not looked at.
const MOST: usize = 1 << 14;
/// The first responses of a connection are the handshake of TLS, and its tickets.
const HANDSHAKE: u32 = 2;

struct Talk {
    answers: Answers,
    /// Responses so far, the handshake's included.
    seen: u32,
    /// When the latest request was sent; 0 if nothing waits.
    asked_ns: u64,
    /// When its response began.
    answered_ns: u64,
    /// Bytes of it so far.
    bytes: u32,
}

/// The tracker. Only connections whose SYN was seen: else it is not known who asks.
#[derive(Default)]
pub struct Exchanges {
    /// A rule asks for it.
    pub is_on: bool,
    talks: HashMap<u64, Talk, RandomState>,
    changed: BTreeSet<u64>,
    over: Vec<Answers>,
}

impl Exchanges {
    /// Takes a segment.
    pub fn take(&mut self, observed: &Observed, vantage: &Vantage) {
        let segment = &observed.segment;
        let (hash, now_ns) = (observed.hash, observed.frame.time_ns);
        if segment.flags & (SYN | ACK) == SYN {
            if self.talks.len() < MOST {
                let role = vantage.role(segment, observed.direction);
                self.talks
                    .insert(hash, Talk::new(segment.tuple, role, now_ns));
            }
            return;
        }
        if observed.message.is_some() {
            // What can be read is judged by its status lines.
            self.talks.remove(&hash);
            self.changed.remove(&hash);
            return;
        }
        let Some(talk) = self.talks.get_mut(&hash) else {
            return;
        };
        if segment.payload_len > 0 {
            if segment.tuple == talk.answers.tuple {
                talk.finish();
                talk.asked_ns = now_ns;
            } else if talk.asked_ns != 0 {
                if talk.bytes == 0 {
                    talk.answered_ns = now_ns;
                }
                talk.bytes = talk.bytes.saturating_add(segment.payload_len);
            }
            self.changed.insert(hash);
        }
        if segment.flags & (FIN | RST) != 0
            && let Some(mut talk) = self.talks.remove(&hash)
        {
            talk.finish();
            talk.answers.closed = true;
            self.changed.remove(&hash);
            self.over.push(talk.answers);
        }
    }

    /// What is new since the last call, in the order of the connections.
    pub fn news(&mut self) -> Vec<Answers> {
        let mut all = std::mem::take(&mut self.over);
        for hash in std::mem::take(&mut self.changed) {
            all.extend(self.talks.get(&hash).map(|talk| talk.answers));
        }
        all.retain(|answers| answers.role == Role::Initiator && answers.all.count > 0);
        all.sort_unstable_by_key(|answers| answers.tuple);
        all
    }
}

impl Talk {
    fn new(tuple: FourTuple, role: Role, now_ns: u64) -> Self {
        Self {
            answers: Answers {
                tuple,
                role,
                opened: Moment(now_ns),
                latest: Moment(now_ns),
                all: Responses::default(),
                run: Responses::default(),
                run_since: Moment(now_ns),
                bytes: 0,
                closed: false,
            },
            seen: 0,
            asked_ns: 0,
            answered_ns: 0,
            bytes: 0,
        }
    }

    /// The response is complete.
    fn finish(&mut self) {
        if self.asked_ns == 0 || self.bytes == 0 {
            return;
        }
        self.seen += 1;
        let (asked, bytes) = (
            std::mem::take(&mut self.asked_ns),
            std::mem::take(&mut self.bytes),
        );
        if self.seen <= HANDSHAKE {
            return;
        }
        let waited_us = self.answered_ns.saturating_sub(asked) / 1000;
        let waited_us = u32::try_from(waited_us).unwrap_or(u32::MAX);
        let answers = &mut self.answers;
        if answers.run.count == 0 || bytes != answers.bytes {
            answers.run = Responses::default();
            answers.run_since = Moment(self.answered_ns);
            answers.bytes = bytes;
        }
        answers.latest = Moment(self.answered_ns);
        answers.run.add(waited_us);
        answers.all.add(waited_us);
    }
}
