//! A SYN: a new open, the same one again, or the same one from another port.

use super::{
    Seen, Tables, Work, leave, moved::take_moved, outcome::count_unanswered, record, remember,
};
use crate::{
    address::{FourTuple, Role},
    handshake::{
        Handshake, INITIATOR_IS_LOWER, MAYBE_DUPLICATE, Pending, STRANGER, SYN_ACKED, Step,
        UNCOUNTED,
    },
    histogram::REUSE_UNIT_NS,
    memory::{self, Former},
    record::Global,
};

/// A SYN: a new open, the same one again, or the same one from another port.
#[inline(always)]
pub(super) fn on_syn<T: Tables>(tables: &mut T, work: &mut Work, seen: &Seen, hash: u64) {
    if seen.seen_before {
        return;
    }
    let Work {
        segment, handshake, ..
    } = work;
    if let Some(Pending {
        handshake: h,
        tuple,
    }) = tables.pending(hash)
    {
        // A SYN that comes the other way (RFC 9293 section 3.5, simultaneous open) changes nothing, nor
        // does one that another interface has seen before: this one only forwards.
        if h.ifindex != seen.ifindex || !h.is_from_initiator(segment) {
            return;
        }
        let step = h.on_syn(segment, seen.now_ns);
        handshake.copy_from(h);
        if handshake.flags & UNCOUNTED != 0 {
            work.tuple = *tuple;
        }
        if !matches!(step, Step::Replaced) {
            if handshake.flags & UNCOUNTED == 0 {
                tables.with_space(handshake.space, |p| T::add(&mut p.syn_retransmits, 1));
            }
            return;
        }
        if leave(tables, hash, handshake.flags) {
            count_unanswered(tables, work);
        }
    }
    let moved = take_moved(tables, work, seen);
    let Work {
        segment,
        tuple,
        key,
        handshake,
        ..
    } = work;
    if moved {
        // A SYN-ACK that came on the former port is void.
        handshake.flags &= !(SYN_ACKED | STRANGER | INITIATOR_IS_LOWER);
    } else {
        *handshake = Handshake {
            first_ns: seen.now_ns,
            isn: segment.seq,
            ifindex: seen.ifindex,
            syn_payload: if segment.payload_len > 0xffff {
                0xffff
            } else {
                segment.payload_len as u16
            },
            role: seen.syn_role as u8,
            ..Handshake::default()
        };
    }
    tuple.copy_from(&segment.tuple);
    handshake.hash = hash;
    if tuple.initiator_is_lower() {
        handshake.flags |= INITIATOR_IS_LOWER;
    }
    handshake.last_ns = seen.now_ns;
    handshake.syns = handshake.syns.saturating_add(1);
    handshake.former = 0;
    handshake.former_age_ms = 0;
    let former = tables.memory(hash).and_then(|set| memory::find(set, hash));
    if let Some(word) = former {
        handshake.former = word.state() as u8;
        handshake.former_age_ms = (word.age_ns(seen.now_ns) / 1_000_000) as u32;
        if word.has_isn(segment.seq)
            && !matches!(word.state(), Former::Opening | Former::Refused)
            && !moved
        {
            handshake.flags |= MAYBE_DUPLICATE | UNCOUNTED;
        }
    }
    // What is known of a real connection is worth more than an attempt.
    if former.is_none_or(|word| matches!(word.state(), Former::Opening)) {
        remember(tables, hash, segment.seq, Former::Opening, seen.now_ns);
    }
    if handshake.flags & UNCOUNTED == 0 {
        let local_open = matches!(seen.syn_role, Role::Initiator);
        // A SYN that has moved stays in its port space.
        if !handshake.space.is_some() {
            handshake.space = tables.space(key, local_open);
        }
        let counted = tables.with_space(handshake.space, |p| {
            T::add(
                if moved {
                    &mut p.syn_retransmits
                } else {
                    &mut p.opens
                },
                1,
            );
            if former.is_some() {
                let age = u64::from(handshake.former_age_ms) * 1_000_000;
                record::<T>(&mut p.reuse_interval, age, REUSE_UNIT_NS);
            }
        });
        if !counted {
            handshake.flags |= UNCOUNTED;
            tables.count(Global::SynsWithoutPortSpace);
        }
    }
    enter(tables, tuple, handshake);
}

/// Adds a record, if there is room for one of its kind.
#[inline(always)]
fn enter<T: Tables>(tables: &mut T, tuple: &FourTuple, handshake: &mut Handshake) {
    // A duplicate of a SYN that was accepted before is no stranger's.
    if handshake.flags & (UNCOUNTED | MAYBE_DUPLICATE) == UNCOUNTED
        && let Some((n, most)) = tables.strangers()
    {
        if *n >= most {
            tables.count(Global::HandshakesFull);
            return;
        }
        T::add(n, 1);
        handshake.flags |= STRANGER;
    }
    if let Some(pending) = tables.add_pending(handshake) {
        if handshake.flags & UNCOUNTED != 0 {
            pending.tuple = *tuple;
        }
        if let Some(slot) = tables.opening(handshake.hash) {
            T::add(slot, 1);
        }
    } else {
        forget_stranger(tables, handshake.flags);
    }
}

#[inline(always)]
pub(super) fn forget_stranger<T: Tables>(tables: &mut T, flags: u8) {
    if flags & STRANGER != 0
        && let Some((n, _)) = tables.strangers()
    {
        T::add(n, u64::MAX);
    }
}
