//! What becomes of an open.

use super::{Seen, Tables, Work, leave, moved::note_moved, record, remember};
use crate::{
    address::PortSpaceKey,
    handshake::{Handshake, MAYBE_DUPLICATE, Pending, Step, UNCOUNTED, UNHEALED},
    histogram::HANDSHAKE_UNIT_NS,
    memory::{Former, HOLD_MAX_NS, Moved},
    record::{Event, EventKind, FIRST_PORTS, Global, PortSpace, SpaceRef},
};

/// A segment without SYN on a four-tuple that may be being opened.
#[inline(always)]
pub(super) fn on_opening<T: Tables>(tables: &mut T, work: &mut Work, seen: &Seen, hash: u64) {
    let Work {
        segment,
        tuple,
        handshake,
        ..
    } = work;
    let Some(Pending { handshake: h, .. }) = tables.pending(hash) else {
        return;
    };
    if h.ifindex != seen.ifindex {
        return;
    }
    let from_initiator = h.is_from_initiator(segment);
    let step = if from_initiator {
        h.on_initiator(segment)
    } else {
        h.on_responder(segment)
    };
    if matches!(step, Step::None) {
        return;
    }
    handshake.copy_from(h);
    if let Step::BareAck { .. } = step {
        // The copy still says what is to be settled; the record has it behind it.
        h.flags &= !(UNCOUNTED | MAYBE_DUPLICATE);
    }
    *tuple = if from_initiator {
        segment.tuple
    } else {
        segment.tuple.reversed()
    };
    match step {
        Step::Established => on_established(tables, work, seen, hash),
        Step::BareAck { unhealed_now } => on_bare_ack(tables, work, unhealed_now, seen.now_ns),
        Step::ResetAfterBareAck => {
            let space = space_of(tables, work, false);
            tables.with_space(space, |p| T::add(&mut p.rsts_after_bare_ack, 1));
        }
        Step::DuplicateSyn => {
            if leave(tables, hash, handshake.flags) {
                let space = space_of(tables, work, false);
                tables.with_space(space, |p| T::add(&mut p.duplicate_syns, 1));
            }
        }
        Step::Refused | Step::Abandoned => {
            if !leave(tables, hash, handshake.flags) {
                return;
            }
            let refused = matches!(step, Step::Refused);
            let space = space_of(tables, work, false);
            let handshake = &work.handshake;
            tables.with_space(space, |p| {
                settle::<T>(p, handshake);
                T::add(
                    if refused {
                        &mut p.refused
                    } else {
                        &mut p.abandoned
                    },
                    1,
                );
                if refused && handshake.bare_acks > 0 {
                    T::add(&mut p.no_listener, 1);
                }
            });
            if !handshake.is_syn_acked() {
                remember(tables, hash, handshake.isn, Former::Refused, seen.now_ns);
            }
        }
        Step::None | Step::Retransmit | Step::Replaced | Step::SynAck => {}
    }
}

/// The port space of the handshake at hand; it is looked for if it was not known at the SYN.
#[inline(always)]
fn space_of<T: Tables>(tables: &mut T, work: &mut Work, create: bool) -> SpaceRef {
    let Work {
        tuple,
        key,
        handshake,
        ..
    } = work;
    if handshake.space.is_some() {
        return handshake.space;
    }
    *key = PortSpaceKey::wire(tuple, handshake.role);
    tables.space(key, create)
}

/// The handshake is complete.
#[inline(always)]
pub(super) fn on_established<T: Tables>(tables: &mut T, work: &mut Work, seen: &Seen, hash: u64) {
    if !leave(tables, hash, work.handshake.flags) {
        return;
    }
    remember(tables, hash, work.handshake.isn, Former::Open, seen.now_ns);
    let mut established = 0;
    let mut earned = false;
    let space = space_of(tables, work, true);
    let Work {
        tuple, handshake, ..
    } = work;
    tables.with_space(space, |p| {
        settle::<T>(p, handshake);
        T::add(&mut p.established, 1);
        established = p.established;
        let took = seen.now_ns.saturating_sub(handshake.first_ns);
        record::<T>(&mut p.handshake_duration, took, HANDSHAKE_UNIT_NS);
        if handshake.bare_acks > 0 {
            T::add(&mut p.healed, 1);
        }
        if was_closed_within_hold(handshake) {
            T::add(&mut p.reuse_accepted, 1);
        }
        let noted = p.ports_noted as usize;
        if noted < FIRST_PORTS {
            p.first_ports[noted & (FIRST_PORTS - 1)] = tuple.initiator_port;
            p.ports_noted = noted as u16 + 1;
        } else {
            earned = true;
        }
    });
    if earned {
        tables.mark_port(space, tuple.initiator_port, established);
    }
}

/// A bare ACK answered the SYN.
#[inline(always)]
pub(super) fn on_bare_ack<T: Tables>(
    tables: &mut T,
    work: &mut Work,
    unhealed_now: bool,
    now_ns: u64,
) {
    let slot_hash = Moved::hash(&work.tuple, work.handshake.isn);
    note_moved(tables, slot_hash, work.tuple.initiator_port, now_ns);
    // A former connection that was completed proves that the port space is real.
    let closed = was_closed_within_hold(&work.handshake);
    let known = closed || matches!(work.handshake.former(), Former::Open);
    let space = space_of(tables, work, known);
    let Work {
        tuple,
        handshake,
        event,
        ..
    } = work;
    let counted = tables.with_space(space, |p| {
        settle::<T>(p, handshake);
        T::add(&mut p.bare_acks, 1);
        T::add(
            match handshake.former() {
                _ if closed => &mut p.bare_acks_closed,
                Former::Open => &mut p.bare_acks_open,
                Former::HalfOpen | Former::Opening => &mut p.bare_acks_half_open,
                _ => &mut p.bare_acks_unknown,
            },
            1,
        );
        if unhealed_now {
            T::add(&mut p.unhealed, 1);
        }
    });
    if !counted {
        // Nothing was settled, so that is left to the outcome.
        if let Some(pending) = tables.pending(handshake.hash) {
            pending.handshake.flags = handshake.flags & !MAYBE_DUPLICATE;
        }
        tables.count(Global::BareAcksWithoutPortSpace);
        return;
    }
    // From now on the open is counted, so that its port space must be at hand.
    if let Some(pending) = tables.pending(handshake.hash) {
        pending.handshake.space = space;
    }
    *event = Event {
        time_ns: now_ns,
        tuple: *tuple,
        isn: handshake.isn,
        ack: handshake.bare_ack,
        former_age_ms: handshake.former_age_ms,
        syns: handshake.syns,
        bare_acks: handshake.bare_acks,
        kind: EventKind::BareAck as u8,
        role: handshake.role,
        former: handshake.former,
        ..Event::default()
    };
    tables.emit(event);
}

/// Gives up an open that stayed without outcome; called for every record now and then.
///
/// `patience_ns` shortens the wait for handshakes that got a SYN-ACK (a flood must not fill the
/// table); it is never shorter for the others, whose next retransmission must still be recognised.
#[inline(always)]
pub fn sweep<T: Tables>(tables: &mut T, work: &mut Work, hash: u64, now_ns: u64, patience_ns: u64) {
    let Some(pending) = tables.pending(hash) else {
        return;
    };
    if !is_expired(&pending.handshake, now_ns, patience_ns) {
        return;
    }
    work.handshake.copy_from(&pending.handshake);
    work.tuple = pending.tuple;
    if leave(tables, hash, work.handshake.flags) {
        count_unanswered(tables, work);
    }
}

/// Whether [`sweep`] would give this open up.
#[inline(always)]
#[must_use]
pub const fn is_expired(h: &Handshake, now_ns: u64, patience_ns: u64) -> bool {
    let patience = if h.is_syn_acked() {
        patience_ns
    } else {
        h.patience_ns()
    };
    now_ns > h.last_ns && now_ns - h.last_ns > patience
}

/// Counts the outcome of an open that nobody completed.
#[inline(always)]
pub(super) fn count_unanswered<T: Tables>(tables: &mut T, work: &mut Work) {
    let space = space_of(tables, work, false);
    let h = &work.handshake;
    let counted = tables.with_space(space, |p| {
        if h.flags & MAYBE_DUPLICATE != 0 {
            T::add(&mut p.duplicate_syns, 1);
            return;
        }
        settle::<T>(p, h);
        T::add(
            if h.is_syn_acked() {
                &mut p.half_open
            } else if h.syns > 1 {
                &mut p.syn_timeouts
            } else {
                &mut p.abandoned
            },
            1,
        );
        if h.bare_acks > 0 && h.flags & UNHEALED == 0 {
            T::add(&mut p.unhealed, 1);
        }
    });
    if !counted && h.is_syn_acked() {
        tables.count(Global::StrangersHalfOpen);
    }
}

/// Counts an open that was not counted when its SYN was seen.
#[inline(always)]
pub(super) fn settle<T: Tables>(space: &mut PortSpace, h: &Handshake) {
    if h.flags & UNCOUNTED != 0 {
        T::add(&mut space.opens, 1);
        T::add(
            &mut space.syn_retransmits,
            u64::from(h.syns).saturating_sub(1),
        );
    }
}

#[inline(always)]
pub(super) fn was_closed_within_hold(h: &Handshake) -> bool {
    h.former().is_closed() && u64::from(h.former_age_ms) <= HOLD_MAX_NS / 1_000_000
}
