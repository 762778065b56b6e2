//! A SYN: a new open, the same one again, or the same one from another port.

use super::{
    Seen, Tables, Work, leave, moved::take_moved, outcome::count_unanswered, record, remember,
};
use crate::{
    address::{FourTuple, PortSpaceKey, Role},
    handshake::{Handshake, MAYBE_DUPLICATE, STRANGER, SYN_ACKED, Step, UNCOUNTED},
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
        segment,
        tuple,
        key,
        handshake,
        ..
    } = work;
    *tuple = segment.tuple;
    let known = tables.with_handshake(tuple, |h| {
        // Another interface's record: this one only forwards.
        let step = if h.ifindex == seen.ifindex {
            h.on_syn(segment, seen.now_ns)
        } else {
            Step::None
        };
        *handshake = *h;
        step
    });
    if let Some(step) = known {
        if !matches!(step, Step::Replaced) {
            if matches!(step, Step::Retransmit) && handshake.flags & UNCOUNTED == 0 {
                *key = PortSpaceKey::wire(tuple, handshake.role);
                tables.with_space(key, false, |p| T::add(&mut p.syn_retransmits, 1));
            }
            return;
        }
        if leave(tables, tuple, hash, handshake.flags) {
            count_unanswered(tables, tuple, key, handshake);
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
        handshake.flags &= !(SYN_ACKED | STRANGER);
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
        *key = PortSpaceKey::wire(tuple, handshake.role);
        let local_open = matches!(seen.syn_role, Role::Initiator);
        let counted = tables.with_space(key, local_open, |p| {
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
    enter(tables, tuple, handshake, hash);
}

/// Adds a record, if there is room for one of its kind.
#[inline(always)]
pub(super) fn enter<T: Tables>(
    tables: &mut T,
    tuple: &FourTuple,
    handshake: &mut Handshake,
    hash: u64,
) {
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
    if tables.insert_handshake(tuple, handshake) {
        if let Some(slot) = tables.opening(hash) {
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
