//! What each segment means for the tables: the one place where packets become counters.
//!
//! The eBPF packet hook calls [`observe`] with BPF maps behind [`Tables`], the capture reader with
//! tables in memory.

mod http;
mod moved;
mod outcome;
mod syn;

use crate::{
    address::{FourTuple, PortSpaceKey, Role},
    conversation::Conversation,
    handshake::{Handshake, Pending, Step},
    histogram::{Histogram, bucket},
    memory::{self, Former, Set, Stored, Word},
    record::{Event, Global, PortSpace, SpaceRef},
    segment::{ACK, FIN, RST, SYN, Segment},
};

pub use http::{Spoken, observe_http};
pub use outcome::{is_expired, sweep};
use {outcome::on_opening, syn::forget_stranger, syn::on_syn};

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
    /// The connection being opened that has this [`FourTuple::hash`].
    fn pending(&mut self, hash: u64) -> Option<&mut Pending>;
    /// Adds a connection being opened, whose [`Pending::tuple`] the caller writes if need be; `None` (and
    /// a counted loss) when there is no room.
    fn add_pending(&mut self, handshake: &Handshake) -> Option<&mut Pending>;
    /// Gives the place back; `false` if it was gone already.
    fn remove_pending(&mut self, hash: u64) -> bool;
    /// Where the counters of a port space are, made first if `create` and there is room; else
    /// [`SpaceRef::NONE`].
    fn space(&mut self, key: &PortSpaceKey, create: bool) -> SpaceRef;
    /// Runs `f` on the counters of a port space, unless there is none or it was forgotten.
    fn with_space(&mut self, space: SpaceRef, f: impl FnOnce(&mut PortSpace)) -> bool;
    /// Sets the bit of a source port in the port space's bitmap, made first if need be.
    fn mark_port(&mut self, space: SpaceRef, port: u16, established: u64);
    /// The set of former connections that a hash belongs to.
    fn memory(&mut self, hash: u64) -> Option<&mut Set>;
    /// The slot of a SYN that may move to another port; the numbers after `hash` are other slots.
    fn moved(&mut self, hash: u64) -> Option<&mut u64>;
    /// When a SYN that may move was noted last.
    fn moved_at(&mut self) -> Option<&mut u64>;
    /// How many pending connections are [`STRANGER`](crate::handshake::STRANGER)s, and how many may be:
    /// the rest of the table is kept for port spaces that are known. `None` where there is no such
    /// limit.
    fn strangers(&mut self) -> Option<(&mut u64, u64)> {
        None
    }
    /// The number of connections being opened whose hash shares this slot: zero answers for nearly
    /// every pure ACK that no table needs to be asked.
    fn opening(&mut self, hash: u64) -> Option<&mut u64>;
    /// The HTTP/1 exchanges on the connection with this [`FourTuple::hash`].
    fn conversation(&mut self, hash: u64) -> Option<&mut Conversation>;
    /// A place for those of another connection, which the caller writes; where there is none, the one that
    /// matters least goes.
    fn add_conversation(&mut self, hash: u64, now_ns: u64) -> Option<&mut Conversation>;
    /// Asks for the memory that an opening or closing segment with this [`FourTuple::hash`] will need, all
    /// at once: one after the other, each would be waited for by itself.
    fn touch(&mut self, _hash: u64) {}
    /// The same for the port space of a SYN.
    fn touch_space(&mut self, _key: &PortSpaceKey) {}
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
    /// The four-tuple whose handshake is at hand, the initiator first.
    tuple: FourTuple,
    /// The port space.
    key: PortSpaceKey,
    /// A copy of the handshake at hand.
    handshake: Handshake,
    /// The event to emit.
    event: Event,
}

impl Work {
    /// The port space of the SYN that [`observe`] has just taken, if it is known.
    #[inline(always)]
    #[must_use]
    pub const fn space_of_syn(&self) -> SpaceRef {
        // A SYN that changes nothing leaves the handshake of an earlier one here.
        if self.handshake.isn == self.segment.seq {
            self.handshake.space
        } else {
            SpaceRef::NONE
        }
    }
}

/// Takes one segment into the tables.
#[inline(always)]
pub fn observe<T: Tables>(tables: &mut T, work: &mut Work, seen: &Seen) {
    let flags = work.segment.flags;
    if is_plain_data(flags, work.segment.payload_len) {
        return;
    }
    let hash = work.segment.tuple.hash();
    tables.touch(hash);
    if flags & SYN != 0 {
        if flags & (ACK | RST | FIN) == 0 {
            work.key = PortSpaceKey::wire(&work.segment.tuple, seen.syn_role as u8);
            tables.touch_space(&work.key);
            apart(
                #[inline(always)]
                || on_syn(tables, work, seen, hash),
            );
        } else if flags & (ACK | RST | FIN) == ACK {
            on_syn_ack(tables, work, seen, hash);
        }
        return;
    }
    if tables.opening(hash).is_some_and(|n| *n != 0) {
        apart(
            #[inline(always)]
            || on_opening(tables, work, seen, hash),
        );
    }
    if flags & (FIN | RST) != 0 {
        on_close(tables, work, seen, hash);
    }
}

/// Runs `f` as a function of its own in eBPF, where all that is inlined into one would need more than
/// the 512 bytes of stack. It gives a number back because the verifier looks at the register of the
/// result even where there is none. What it calls is inlined: each further function costs 32 bytes of the stack up to
/// Linux 6.8, however little it needs.
#[cfg_attr(target_arch = "bpf", inline(never))]
fn apart(f: impl FnOnce()) -> u32 {
    f();
    0
}

/// A SYN-ACK: the responder has accepted.
#[inline(always)]
fn on_syn_ack<T: Tables>(tables: &mut T, work: &mut Work, seen: &Seen, hash: u64) {
    let segment = &work.segment;
    let Some(Pending { handshake: h, .. }) = tables.pending(hash) else {
        return;
    };
    if h.ifindex == seen.ifindex
        && !h.is_from_initiator(segment)
        && matches!(h.on_responder(segment), Step::SynAck)
    {
        let isn = h.isn;
        remember(tables, hash, isn, Former::HalfOpen, seen.now_ns);
    }
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

/// Removes a record with these flags, and says whether this was the caller who removed it.
#[inline(always)]
fn leave<T: Tables>(tables: &mut T, hash: u64, flags: u8) -> bool {
    if !tables.remove_pending(hash) {
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
