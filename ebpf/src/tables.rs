//! The kernel's maps as the tables of [`tuplewatch_common::observe`].

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use aya_ebpf::bindings::BPF_NOEXIST;
use tuplewatch_common::{
    address::{FourTuple, PortSpaceKey},
    conversation::{self, Conversation},
    handshake::{Handshake, Pending, STRANGER},
    memory::Set,
    observe::Tables,
    record::{Event, Global, PortSpace, SpaceRef, SpaceSlot},
};

use crate::{
    layout::{HANDSHAKE_SETS, MEMORY_SETS, STRANGERS_MAX, TALK_SETS},
    maps::{
        BITMAPS, CONFIG, CONFIG_BITMAP_FROM, CONFIG_GENERATION, EVENTS, FREE_BITMAPS, FREE_SPACES,
        HANDSHAKE_TAGS, HANDSHAKES, MEMORY, MOVED, MOVED_AT, MOVED_SLOTS, OPENING, OPENING_SLOTS,
        SPACE_CACHE, SPACE_CACHE_LEN, SPACE_INDEX, SPACES, STRANGERS, TALK_TAGS, TALKS, count,
    },
    ways::{self, WAYS},
};

/// The maps.
pub struct Maps;

impl Tables for Maps {
    #[inline(always)]
    fn pending(&mut self, hash: u64) -> Option<&mut Pending> {
        let set = handshake_set(hash);
        let tags = HANDSHAKE_TAGS.get_ptr(set)?;
        // SAFETY: array values are valid as long as the program.
        let way = ways::find(unsafe { &*tags }, ways::tag(hash))?;
        let pending = HANDSHAKES.get_ptr_mut(set * WAYS + way)?;
        // SAFETY: as above; packets of one connection are processed one after the other except in
        // races that can at worst lose one count.
        let pending = unsafe { &mut *pending };
        (pending.handshake.hash == hash).then_some(pending)
    }

    #[inline(always)]
    fn add_pending(&mut self, handshake: &Handshake) -> Option<&mut Pending> {
        let set = handshake_set(handshake.hash);
        if let Some(tags) = HANDSHAKE_TAGS.get_ptr_mut(set) {
            // SAFETY: array values are valid as long as the program.
            let tags = unsafe { &mut *tags };
            let spare = if handshake.flags & STRANGER != 0 {
                KEPT
            } else {
                0
            };
            if let Some(way) = ways::free(tags, spare)
                && let Some(pending) = HANDSHAKES.get_ptr_mut(set * WAYS + way)
            {
                // SAFETY: as above; nobody else takes this place (see `ways::free`).
                let pending = unsafe { &mut *pending };
                pending.handshake.copy_from(handshake);
                ways::set(tags, way, ways::tag(handshake.hash));
                return Some(pending);
            }
        }
        count(Global::HandshakesFull);
        None
    }

    #[inline(always)]
    fn remove_pending(&mut self, hash: u64) -> bool {
        let set = handshake_set(hash);
        let Some(tags) = HANDSHAKE_TAGS.get_ptr_mut(set) else {
            return false;
        };
        // SAFETY: array values are valid as long as the program.
        let tags = unsafe { &mut *tags };
        let Some(way) = ways::find(tags, ways::tag(hash)) else {
            return false;
        };
        if let Some(pending) = HANDSHAKES.get_ptr_mut(set * WAYS + way) {
            // The user side looks for those that are not 0.
            // SAFETY: as above.
            unsafe { (*pending).handshake.hash = 0 };
        }
        ways::set(tags, way, 0);
        true
    }

    #[inline(always)]
    fn space(&mut self, key: &PortSpaceKey, create: bool) -> SpaceRef {
        space(key, create)
    }

    #[inline(always)]
    fn with_space(&mut self, space: SpaceRef, f: impl FnOnce(&mut PortSpace)) -> bool {
        with_space(space, f)
    }

    #[inline(always)]
    fn mark_port(&mut self, space: SpaceRef, port: u16, established: u64) {
        if established < config(CONFIG_BITMAP_FROM) as u64 {
            return;
        }
        let Some(slot) = slot(space) else { return };
        let counters = &mut slot.counters;
        if counters.bitmap == 0 {
            match FREE_BITMAPS.pop() {
                Ok(Some(n)) => counters.bitmap = n,
                _ => {
                    count(Global::BitmapsFull);
                    return;
                }
            }
        }
        let index = counters.bitmap * 2 + (config(CONFIG_GENERATION) & 1);
        let Some(bitmap) = BITMAPS.get_ptr_mut(index) else {
            return;
        };
        // Not atomic: atomic OR needs 5.12. Two CPUs that set two bits of one word at once may lose
        // one; it comes back with the next connection on that port.
        // SAFETY: the index is below 1024; array values are valid as long as the program.
        let word = unsafe { &mut (*bitmap)[(port >> 6) as usize & 1023] };
        *word |= 1 << (port & 63);
    }

    #[inline(always)]
    fn memory(&mut self, hash: u64) -> Option<&mut Set> {
        let set = MEMORY.get_ptr_mut(hash as u32 & (MEMORY_SETS.load() - 1))?;
        // SAFETY: array values are valid as long as the program; each word is one aligned access.
        Some(unsafe { &mut *set })
    }

    #[inline(always)]
    fn moved(&mut self, hash: u64) -> Option<&mut u64> {
        let slot = MOVED.get_ptr_mut(hash as u32 & (MOVED_SLOTS - 1))?;
        // SAFETY: as above.
        Some(unsafe { &mut *slot })
    }

    #[inline(always)]
    fn moved_at(&mut self) -> Option<&mut u64> {
        let at = MOVED_AT.get_ptr_mut(0)?;
        // SAFETY: as above.
        Some(unsafe { &mut *at })
    }

    #[inline(always)]
    fn strangers(&mut self) -> Option<(&mut u64, u64)> {
        let n = STRANGERS.get_ptr_mut(0)?;
        // SAFETY: as above; it is changed atomically only.
        Some((unsafe { &mut *n }, u64::from(STRANGERS_MAX.load())))
    }

    #[inline(always)]
    fn opening(&mut self, hash: u64) -> Option<&mut u64> {
        let slot = OPENING.get_ptr_mut((hash >> 20) as u32 & (OPENING_SLOTS - 1))?;
        // SAFETY: as above; it is changed atomically only.
        Some(unsafe { &mut *slot })
    }

    #[inline(always)]
    fn conversation(&mut self, hash: u64) -> Option<&mut Conversation> {
        let number = talk_set(hash);
        let tags = TALK_TAGS.get_ptr(number)?;
        // SAFETY: array values are valid as long as the program.
        let way = ways::find(unsafe { &*tags }, ways::tag(hash))?;
        let conversation = talk(number, way)?;
        (conversation.hash == hash).then_some(conversation)
    }

    #[inline(always)]
    fn add_conversation(&mut self, hash: u64, _now_ns: u64) -> Option<&mut Conversation> {
        let number = talk_set(hash);
        let tags = TALK_TAGS.get_ptr_mut(number)?;
        // SAFETY: array values are valid as long as the program.
        let tags = unsafe { &mut *tags };
        let way = match ways::free(tags, 0) {
            Some(way) => way,
            // What a global function gives is any number to the verifier.
            None => ways::barrier(talk_least(number).into()) as u32 & (WAYS - 1),
        };
        ways::set(tags, way, ways::tag(hash));
        talk(number, way)
    }

    #[inline(always)]
    fn touch(&mut self, hash: u64) {
        touch(MEMORY.get_ptr(hash as u32 & (MEMORY_SETS.load() - 1)));
        touch(HANDSHAKE_TAGS.get_ptr(handshake_set(hash)));
    }

    #[inline(always)]
    fn touch_space(&mut self, key: &PortSpaceKey) {
        if let Some(cached) = SPACE_CACHE.get_ptr(key.hash() as u32 & (SPACE_CACHE_LEN - 1)) {
            // SAFETY: array values are valid as long as the program.
            let index = SpaceRef(unsafe { *cached }).index();
            touch(SPACES.get_ptr(index));
        }
    }

    #[inline(always)]
    fn emit(&mut self, event: &Event) {
        emit(event);
    }

    #[inline(always)]
    fn add(counter: &mut u64, n: u64) {
        // The atomic types of `core` have no `fetch_add` on this target, which lacks compare-and-swap
        // before 5.12. With its result unused, this is the instruction that every kernel has.
        // SAFETY: the reference proves that the pointer is valid and aligned.
        unsafe { atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(counter, n) };
    }

    #[inline(always)]
    fn count(&mut self, what: Global) {
        count(what);
    }
}

/// Loads a word of a value, for nothing but to have its cache line on the way.
#[inline(always)]
fn touch<T>(value: Option<*const T>) {
    if let Some(value) = value {
        // SAFETY: array values are valid as long as the program, and all are larger than a word.
        unsafe { value.cast::<u64>().read_volatile() };
    }
}

/// Places of each set that are kept for opens of known port spaces: a flood fills the sets unevenly, and
/// a limit for the whole table would leave none in many of them.
const KEPT: u32 = 4;

#[inline(always)]
fn talk_set(hash: u64) -> u32 {
    hash as u32 & (TALK_SETS.load() - 1)
}

/// A place of a set of conversations.
#[inline(always)]
fn talk<'a>(number: u32, way: u32) -> Option<&'a mut Conversation> {
    let set = TALKS.get_ptr_mut(number)?.cast::<Conversation>();
    // SAFETY: array values are valid as long as the program, and a set has so many places. Packets of one
    // connection are processed one after the other except in races that can at worst lose one count.
    Some(unsafe { &mut *set.add(ways::within(way)) })
}

/// The conversation of a full set that matters least. A global function, which the verifier looks at
/// once and not for each of its callers.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn talk_least(number: u32) -> u32 {
    let Some(set) = TALKS.get_ptr(number) else {
        return 0;
    };
    // SAFETY: array values are valid as long as the program.
    let set: &conversation::Set = unsafe { &*set };
    let way = ways::least(set, Conversation::weight);
    if talk(number, way).is_some_and(|conversation| conversation.is_failing()) {
        count(Global::FailingEvicted);
    }
    way
}

#[inline(always)]
fn handshake_set(hash: u64) -> u32 {
    hash as u32 & (HANDSHAKE_SETS.load() - 1)
}

/// Where the counters of a port space are, made first if `create` and there is room.
#[inline(always)]
pub fn space(key: &PortSpaceKey, create: bool) -> SpaceRef {
    let cached = SPACE_CACHE.get_ptr_mut(key.hash() as u32 & (SPACE_CACHE_LEN - 1));
    if let Some(cached) = cached {
        // SAFETY: array values are valid as long as the program.
        let space = SpaceRef(unsafe { *cached });
        if slot(space).is_some_and(|slot| slot.key.is(key)) {
            return space;
        }
    }
    let space = SpaceRef(look_up(key, create as u32));
    if space.is_some()
        && let Some(cached) = cached
    {
        // SAFETY: as above.
        unsafe { *cached = space.0 };
    }
    space
}

/// Rare, and a function of its own for the sake of the stack.
#[inline(never)]
fn look_up(key: &PortSpaceKey, create: u32) -> u32 {
    // SAFETY: the value is copied at once.
    if let Some(known) = unsafe { SPACE_INDEX.get(key) } {
        return *known;
    }
    if create == 0 { 0 } else { new_space(key) }
}

#[inline(always)]
fn new_space(key: &PortSpaceKey) -> u32 {
    let Ok(Some(index)) = FREE_SPACES.pop() else {
        count(Global::PortSpacesFull);
        return 0;
    };
    let Some(slot) = SPACES.get_ptr_mut(index) else {
        return 0;
    };
    // SAFETY: array values are valid as long as the program; the index was free, so nobody else
    // writes here.
    let slot = unsafe { &mut *slot };
    let space = SpaceRef::new(index, slot.counters.generation);
    slot.key = *key;
    if SPACE_INDEX
        .insert(key, &space.0, BPF_NOEXIST.into())
        .is_err()
    {
        // Another CPU was first (or there is no room, which the number of places prevents).
        let _ = FREE_SPACES.push(&index, 0);
        // SAFETY: the value is copied at once.
        return unsafe { SPACE_INDEX.get(key) }.map_or(0, |known| *known);
    }
    slot.live = 1;
    space.0
}

#[inline(always)]
fn slot<'a>(space: SpaceRef) -> Option<&'a mut SpaceSlot> {
    let slot = SPACES.get_ptr_mut(space.index())?;
    // SAFETY: array values are valid as long as the program; counters are added atomically.
    let slot = unsafe { &mut *slot };
    (space.is_some() && space.is_of(slot.counters.generation)).then_some(slot)
}

/// Runs `f` on the counters of a port space, unless there is none or it was forgotten.
#[inline(always)]
pub fn with_space(space: SpaceRef, f: impl FnOnce(&mut PortSpace)) -> bool {
    slot(space).map(|slot| f(&mut slot.counters)).is_some()
}

/// The namespace and the connection of a port space, without the initiator's port.
#[inline(always)]
pub fn key_of(space: SpaceRef) -> (u32, FourTuple) {
    let key = slot(space).map_or_else(PortSpaceKey::default, |slot| slot.key);
    let tuple = FourTuple {
        initiator: key.initiator,
        responder: key.responder,
        responder_port: key.responder_port,
        ..FourTuple::default()
    };
    (key.netns, tuple)
}

/// Hands an event to the user side, or counts its loss.
#[inline(always)]
pub fn emit(event: &Event) {
    if EVENTS.output::<Event>(event, 0).is_err() {
        count(Global::EventsLost);
    }
}

#[inline(always)]
fn config(index: u32) -> u32 {
    // SAFETY: an array value; the user side replaces it in one aligned access.
    CONFIG.get_ptr(index).map_or(0, |v| unsafe { *v })
}
