//! SYNs that come again from another port, because a NAT has given them a new one.

use super::{Seen, Tables, Work, leave};
use crate::memory::Moved;

/// If this SYN was seen from another port and met a bare ACK there, goes on with that record.
#[inline(always)]
pub(super) fn take_moved<T: Tables>(tables: &mut T, work: &mut Work, seen: &Seen) -> bool {
    let Work {
        segment,
        tuple,
        handshake,
        ..
    } = work;
    if tables
        .moved_at()
        .is_none_or(|at| seen.now_ns.saturating_sub(*at) >= MOVED_NS)
    {
        return false;
    }
    tuple.copy_from(&segment.tuple);
    let slot_hash = Moved::hash(tuple, segment.seq);
    let Some(port) = find_moved(tables, slot_hash) else {
        return false;
    };
    tuple.initiator_port = port;
    let before = tuple.hash();
    match tables.pending(before) {
        Some(pending) => handshake.copy_from(&pending.handshake),
        None => return false,
    }
    handshake.isn == segment.seq
        && handshake.ifindex == seen.ifindex
        && leave(tables, before, handshake.flags)
}

/// Slots in a row that a SYN may have in the table of moved SYNs. With one, another SYN that waits for
/// its next retransmission would be pushed out now and then, and counted as two opens.
const MOVED_WAYS: u64 = 4;

/// For so long after the last bare ACK a SYN may come again: after its last repetition, with
/// `tcp_syn_retries` 6, connect() gives up at 127 s. Later no SYN pays for looking.
const MOVED_NS: u64 = 180_000_000_000;

/// The time in a word of [`Moved`].
const MOVED_TIME_MASK: u64 = (1 << 24) - 1;

/// The port from which a SYN was seen before.
#[inline(always)]
pub(super) fn find_moved<T: Tables>(tables: &mut T, slot_hash: u64) -> Option<u16> {
    let mut i = 0;
    while i < MOVED_WAYS {
        let slot = tables.moved(slot_hash.wrapping_add(i));
        let port = slot.and_then(|word| Moved(*word).port_of(slot_hash));
        if port.is_some() {
            return port;
        }
        i += 1;
    }
    None
}

/// Remembers the port from which a SYN was seen, over its former one, else over the oldest.
#[inline(always)]
pub(super) fn note_moved<T: Tables>(tables: &mut T, slot_hash: u64, port: u16, now_ns: u64) {
    let new = Moved::new(slot_hash, port, now_ns);
    let (mut victim, mut victim_score) = (0, 0);
    let mut i = 0;
    while i < MOVED_WAYS {
        if let Some(word) = tables.moved(slot_hash.wrapping_add(i)) {
            let old = Moved(*word);
            let score = if old.port_of(slot_hash).is_some() {
                u64::MAX
            } else if old.0 == 0 {
                u64::MAX - 1
            } else {
                new.0.wrapping_sub(old.0) & MOVED_TIME_MASK
            };
            if score > victim_score {
                (victim, victim_score) = (i, score);
            }
        }
        i += 1;
    }
    if let Some(word) = tables.moved(slot_hash.wrapping_add(victim)) {
        *word = new.0;
    }
    if let Some(at) = tables.moved_at() {
        *at = now_ns;
    }
}
