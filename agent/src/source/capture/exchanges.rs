//! Sizes and latencies of the responses on each connection of a capture, whatever is said on it: see
//! [`tuplewatch_common::exchange`]. Only looked at where a rule asks for it.

use std::collections::{BTreeSet, HashMap};

use foldhash::fast::RandomState;
use tuplewatch_common::{
    address::Role,
    exchange::{Exchange, Piece},
    segment::{ACK, SYN},
};

use super::{file::Observed, vantage::Vantage};
use crate::core::suspect::Answers;

/// Connections known at once; those opened later are not looked at.
const MOST: usize = 1 << 14;

/// The tracker. Only connections whose SYN was seen: else it is not known who asks.
#[derive(Default)]
pub struct Exchanges {
    /// A rule asks for it.
    pub is_on: bool,
    all: HashMap<u64, Exchange, RandomState>,
    changed: BTreeSet<u64>,
    over: Vec<Answers>,
}

impl Exchanges {
    /// Takes a segment.
    pub fn take(&mut self, observed: &Observed, vantage: &Vantage) {
        let segment = &observed.segment;
        let (hash, now_ns) = (observed.hash, observed.frame.time_ns);
        if segment.flags & (SYN | ACK) == SYN {
            let role = vantage.role(segment, observed.direction);
            if self.all.len() < MOST && role == Role::Initiator {
                let begun = self.all.entry(hash).or_default();
                begun.begin(hash, &segment.tuple, role as u8, 0, now_ns);
            }
            return;
        }
        if observed.message.is_some() {
            // What can be read is judged by its status lines.
            self.all.remove(&hash);
            self.changed.remove(&hash);
            return;
        }
        let Some(exchange) = self.all.get_mut(&hash) else {
            return;
        };
        let piece = Piece {
            from_lower: segment.tuple.initiator_is_lower(),
            flags: segment.flags,
            seq: segment.seq,
            payload_len: segment.payload_len,
        };
        exchange.take(&piece, now_ns);
        if exchange.is_closed() {
            let last = self.all.remove(&hash).filter(|e| e.all.count > 0);
            self.over.extend(last.as_ref().map(Answers::from));
            self.changed.remove(&hash);
        } else {
            self.changed.insert(hash);
        }
    }

    /// What is new since the last call, in the order of the connections.
    pub fn news(&mut self) -> Vec<Answers> {
        let mut all = std::mem::take(&mut self.over);
        for hash in std::mem::take(&mut self.changed) {
            let exchange = self
                .all
                .get(&hash)
                .filter(|exchange| exchange.all.count > 0);
            all.extend(exchange.map(Answers::from));
        }
        all.sort_unstable_by_key(|answers| answers.tuple);
        all
    }
}
