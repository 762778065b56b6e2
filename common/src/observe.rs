//! What each segment means for the tables: the one place where packets become counters.
//!
//! The eBPF packet hook calls [`observe`] with BPF maps behind [`Tables`], the capture reader with
//! tables in memory.

use crate::{
    address::{FourTuple, PortSpaceKey, Role},
    handshake::{Handshake, MAYBE_DUPLICATE, STRANGER, SYN_ACKED, Step, UNCOUNTED, UNHEALED},
    histogram::{HANDSHAKE_UNIT_NS, Histogram, REUSE_UNIT_NS, bucket},
    memory::{self, Former, HOLD_MAX_NS, Moved, Set, Stored, Word},
    record::{Event, EventKind, FIRST_PORTS, Global, PortSpace},
    segment::{ACK, FIN, RST, SYN, Segment},
};

/// Where a segment was seen.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// Time in nanoseconds.
    pub now_ns: u64,
    /// The interface.
    pub ifindex: u32,
    /// The role of this host if the segment opens a connection: a SYN that leaves makes it the
    /// initiator.
    pub syn_role: Role,
    /// The packet was forwarded and has been seen on the interface where it came in.
    pub seen_before: bool,
}

/// The tables behind [`observe`].
pub trait Tables {
    /// Runs `f` on the handshake of `tuple`, if there is one.
    fn with_handshake<R>(
        &mut self,
        tuple: &FourTuple,
        f: impl FnOnce(&mut Handshake) -> R,
    ) -> Option<R>;
    /// Adds a handshake; `false` (and a counted loss) when there is no room.
    fn insert_handshake(&mut self, tuple: &FourTuple, handshake: &Handshake) -> bool;
    /// Removes a handshake; `false` if it was gone already.
    fn remove_handshake(&mut self, tuple: &FourTuple) -> bool;
    /// Runs `f` on the counters of a port space, made first if `create` and there is room.
    fn with_space(
        &mut self,
        key: &PortSpaceKey,
        create: bool,
        f: impl FnOnce(&mut PortSpace),
    ) -> bool;
    /// The set of former connections that a hash belongs to.
    fn memory(&mut self, hash: u64) -> Option<&mut Set>;
    /// The slot of a SYN that may move to another port; the numbers after `hash` are other slots.
    fn moved(&mut self, hash: u64) -> Option<&mut u64>;
    /// How many handshakes are [`STRANGER`]s, and how many may be: the rest of the table is kept for
    /// port spaces that are known. `None` where there is no such limit.
    fn strangers(&mut self) -> Option<(&mut u64, u64)> {
        None
    }
    /// The number of connections being opened whose hash shares this slot: zero answers for nearly
    /// every pure ACK that no table needs to be asked.
    fn opening(&mut self, hash: u64) -> Option<&mut u64>;
    /// Sets the bit of a source port in the port space's bitmap, made first if need be.
    fn mark_port(&mut self, key: &PortSpaceKey, port: u16, established: u64);
    /// Hands an event to the user side.
    fn emit(&mut self, event: &Event);
    /// Adds to a counter, atomically where several CPUs share the tables.
    fn add(counter: &mut u64, n: u64);
    /// Counts something that belongs to no port space.
    fn count(&mut self, what: Global);
}

/// Adds to a shared histogram.
#[inline(always)]
pub fn record<T: Tables>(histogram: &mut Histogram, nanoseconds: u64, unit: u64) {
    let i = bucket(nanoseconds, unit);
    if let Some(slot) = histogram.get_mut(i) {
        T::add(slot, 1);
    }
}

/// A segment that cannot concern any table: data without SYN, FIN or RST.
#[inline(always)]
#[must_use]
pub const fn is_plain_data(flags: u8, payload_len: u32) -> bool {
    flags & (SYN | FIN | RST) == 0 && payload_len > 0
}

/// Working storage of [`observe`]: too large for the 512 bytes of stack that an eBPF program has, so
/// the kernel side keeps it in a map.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// The segment, put there by the caller.
    pub segment: Segment,
    /// The four-tuple whose handshake is at hand.
    tuple: FourTuple,
    /// Where a moved SYN was seen before.
    before: FourTuple,
    /// The port space.
    key: PortSpaceKey,
    /// A copy of the handshake at hand.
    handshake: Handshake,
    /// The event to emit.
    event: Event,
}

/// Takes one segment into the tables.
#[inline(always)]
pub fn observe<T: Tables>(tables: &mut T, work: &mut Work, seen: &Seen) {
    let flags = work.segment.flags;
    if is_plain_data(flags, work.segment.payload_len) {
        return;
    }
    let hash = work.segment.tuple.hash();
    if flags & SYN != 0 {
        if flags & (ACK | RST | FIN) == 0 {
            apart(|| on_syn(tables, work, seen, hash));
        } else if flags & (ACK | RST | FIN) == ACK {
            on_syn_ack(tables, work, seen, hash);
        }
        return;
    }
    if tables.opening(hash).is_some_and(|n| *n != 0) {
        apart(|| on_opening(tables, work, seen, hash));
    }
    if flags & (FIN | RST) != 0 {
        on_close(tables, work, seen, hash);
    }
}

/// Runs `f` as a function of its own in eBPF, where all that is inlined into one would need more than
/// the 512 bytes of stack. It gives a number back because the verifier looks at the register of the
/// result even where there is none.
#[cfg_attr(target_arch = "bpf", inline(never))]
fn apart(f: impl FnOnce()) -> u32 {
    f();
    0
}

/// A SYN: a new open, the same one again, or the same one from another port.
#[inline(always)]
fn on_syn<T: Tables>(tables: &mut T, work: &mut Work, seen: &Seen, hash: u64) {
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
fn enter<T: Tables>(tables: &mut T, tuple: &FourTuple, handshake: &mut Handshake, hash: u64) {
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
fn forget_stranger<T: Tables>(tables: &mut T, flags: u8) {
    if flags & STRANGER != 0
        && let Some((n, _)) = tables.strangers()
    {
        T::add(n, u64::MAX);
    }
}

/// If this SYN was seen from another port and met a bare ACK there, goes on with that record.
#[inline(always)]
fn take_moved<T: Tables>(tables: &mut T, work: &mut Work, seen: &Seen) -> bool {
    let Work {
        segment,
        tuple,
        before,
        handshake,
        ..
    } = work;
    let slot_hash = Moved::hash(tuple, segment.seq);
    let Some(port) = find_moved(tables, slot_hash) else {
        return false;
    };
    *before = *tuple;
    before.initiator_port = port;
    if tables.with_handshake(before, |h| *handshake = *h).is_none() {
        return false;
    }
    handshake.isn == segment.seq
        && handshake.ifindex == seen.ifindex
        && leave(tables, before, before.hash(), handshake.flags)
}

/// Slots in a row that a SYN may have in the table of moved SYNs. With one, another SYN that waits for
/// its next retransmission would be pushed out now and then, and counted as two opens.
const MOVED_WAYS: u64 = 4;
/// The time in a word of [`Moved`].
const MOVED_TIME_MASK: u64 = (1 << 24) - 1;

/// The port from which a SYN was seen before.
#[inline(always)]
fn find_moved<T: Tables>(tables: &mut T, slot_hash: u64) -> Option<u16> {
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
fn note_moved<T: Tables>(tables: &mut T, slot_hash: u64, port: u16, now_ns: u64) {
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
}

/// A SYN-ACK: the responder has accepted.
#[inline(always)]
fn on_syn_ack<T: Tables>(tables: &mut T, work: &mut Work, seen: &Seen, hash: u64) {
    let Work { segment, tuple, .. } = work;
    *tuple = segment.tuple.reversed();
    let isn = tables.with_handshake(tuple, |h| {
        let ours = h.ifindex == seen.ifindex;
        (ours && matches!(h.on_responder(segment), Step::SynAck)).then_some(h.isn)
    });
    if let Some(Some(isn)) = isn {
        remember(tables, hash, isn, Former::HalfOpen, seen.now_ns);
    }
}

/// A segment without SYN on a four-tuple that may be being opened.
#[inline(always)]
fn on_opening<T: Tables>(tables: &mut T, work: &mut Work, seen: &Seen, hash: u64) {
    let Work {
        segment,
        tuple,
        key,
        handshake,
        ..
    } = work;
    *tuple = segment.tuple;
    let mut step = tables.with_handshake(tuple, |h| {
        *handshake = *h;
        if h.ifindex == seen.ifindex {
            h.on_initiator(segment)
        } else {
            Step::None
        }
    });
    if step.is_none() {
        *tuple = segment.tuple.reversed();
        step = tables.with_handshake(tuple, |h| {
            *handshake = *h;
            let step = if h.ifindex == seen.ifindex {
                h.on_responder(segment)
            } else {
                Step::None
            };
            if let Step::BareAck { .. } = step {
                // The copy still says what is to be settled; the record has it behind it.
                h.flags &= !(UNCOUNTED | MAYBE_DUPLICATE);
                handshake.bare_acks = h.bare_acks;
                handshake.bare_ack = h.bare_ack;
            }
            step
        });
    }
    let Some(step) = step else { return };
    *key = PortSpaceKey::wire(tuple, handshake.role);
    match step {
        Step::Established => on_established(tables, work, seen, hash),
        Step::BareAck { unhealed_now } => on_bare_ack(tables, work, unhealed_now, seen.now_ns),
        Step::ResetAfterBareAck => {
            tables.with_space(key, false, |p| T::add(&mut p.rsts_after_bare_ack, 1));
        }
        Step::DuplicateSyn => {
            if leave(tables, tuple, hash, handshake.flags) {
                tables.with_space(key, false, |p| T::add(&mut p.duplicate_syns, 1));
            }
        }
        Step::Refused | Step::Abandoned => {
            if !leave(tables, tuple, hash, handshake.flags) {
                return;
            }
            let refused = matches!(step, Step::Refused);
            tables.with_space(key, false, |p| {
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

/// The handshake is complete.
#[inline(always)]
fn on_established<T: Tables>(tables: &mut T, work: &mut Work, seen: &Seen, hash: u64) {
    let Work {
        tuple,
        key,
        handshake,
        ..
    } = work;
    if !leave(tables, tuple, hash, handshake.flags) {
        return;
    }
    remember(tables, hash, handshake.isn, Former::Open, seen.now_ns);
    let mut established = 0;
    let mut earned = false;
    tables.with_space(key, true, |p| {
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
            p.ports_noted = noted as u64 + 1;
        } else {
            earned = true;
        }
    });
    if earned {
        tables.mark_port(key, tuple.initiator_port, established);
    }
}

/// A bare ACK answered the SYN.
#[inline(always)]
fn on_bare_ack<T: Tables>(tables: &mut T, work: &mut Work, unhealed_now: bool, now_ns: u64) {
    let Work {
        tuple,
        key,
        handshake,
        event,
        ..
    } = work;
    let slot_hash = Moved::hash(tuple, handshake.isn);
    note_moved(tables, slot_hash, tuple.initiator_port, now_ns);
    // A former connection that was completed proves that the port space is real.
    let closed = was_closed_within_hold(handshake);
    let known = closed || matches!(handshake.former(), Former::Open);
    let counted = tables.with_space(key, known, |p| {
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
        let before = handshake.flags & !MAYBE_DUPLICATE;
        tables.with_handshake(tuple, |h| h.flags = before);
        tables.count(Global::BareAcksWithoutPortSpace);
        return;
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

/// FIN or RST: the connection on the four-tuple ends.
#[inline(always)]
fn on_close<T: Tables>(tables: &mut T, work: &mut Work, seen: &Seen, hash: u64) {
    let segment = &work.segment;
    let from_lower = segment.tuple.initiator_is_lower();
    let Some(set) = tables.memory(hash) else {
        return;
    };
    let word = memory::find(set, hash);
    let state = word.map_or(Former::None, Word::state);
    if segment.flags & RST != 0 {
        // RST ends what is open; what is closed already keeps the time of its FINs, because the RST
        // may be the answer to a bare ACK, and what is not known stays so.
        if matches!(
            state,
            Former::Open | Former::HalfOpen | Former::FinLower | Former::FinHigher
        ) && let Some(word) = word
        {
            memory::store(
                set,
                hash,
                word.with(Former::Reset, seen.now_ns),
                seen.now_ns,
            );
        }
        return;
    }
    let after = state.after_fin(from_lower);
    match word {
        Some(word) => {
            memory::store(set, hash, word.with(after, seen.now_ns), seen.now_ns);
        }
        // A connection older than the agent.
        None => remember(tables, hash, 0, after, seen.now_ns),
    }
}

/// Gives up an open that stayed without outcome; called for every record now and then.
///
/// `patience_ns` shortens the wait for handshakes that got a SYN-ACK (a flood must not fill the
/// table); it is never shorter for the others, whose next retransmission must still be recognised.
#[inline(always)]
pub fn sweep<T: Tables>(
    tables: &mut T,
    work: &mut Work,
    tuple: &FourTuple,
    now_ns: u64,
    patience_ns: u64,
) {
    let Work { key, handshake, .. } = work;
    let expired = tables.with_handshake(tuple, |h| {
        *handshake = *h;
        is_expired(h, now_ns, patience_ns)
    });
    if expired == Some(true) && leave(tables, tuple, tuple.hash(), handshake.flags) {
        count_unanswered(tables, tuple, key, handshake);
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
fn count_unanswered<T: Tables>(
    tables: &mut T,
    tuple: &FourTuple,
    key: &mut PortSpaceKey,
    h: &Handshake,
) {
    *key = PortSpaceKey::wire(tuple, h.role);
    tables.with_space(key, false, |p| {
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
}

/// Counts an open that was not counted when its SYN was seen.
#[inline(always)]
fn settle<T: Tables>(space: &mut PortSpace, h: &Handshake) {
    if h.flags & UNCOUNTED != 0 {
        T::add(&mut space.opens, 1);
        T::add(
            &mut space.syn_retransmits,
            u64::from(h.syns).saturating_sub(1),
        );
    }
}

#[inline(always)]
fn was_closed_within_hold(h: &Handshake) -> bool {
    h.former().is_closed() && u64::from(h.former_age_ms) <= HOLD_MAX_NS / 1_000_000
}

/// Removes a record with these flags, and says whether this was the caller who removed it.
#[inline(always)]
fn leave<T: Tables>(tables: &mut T, tuple: &FourTuple, hash: u64, flags: u8) -> bool {
    if !tables.remove_handshake(tuple) {
        return false;
    }
    forget_stranger(tables, flags);
    if let Some(slot) = tables.opening(hash) {
        T::add(slot, u64::MAX);
    }
    true
}

/// Writes what is known of the connection on a four-tuple.
#[inline(always)]
pub fn remember<T: Tables>(tables: &mut T, hash: u64, isn: u32, state: Former, now_ns: u64) {
    let Some(set) = tables.memory(hash) else {
        return;
    };
    if memory::store(set, hash, Word::new(hash, isn, state, now_ns), now_ns) == Stored::EvictedLive
    {
        tables.count(Global::MemoryEvicted);
    }
}
