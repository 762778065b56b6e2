//! The kernel's maps as the tables of [`tuplewatch_common::observe`].

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use aya_ebpf::{bindings::BPF_NOEXIST, maps::HashMap};
use tuplewatch_common::{
    address::{FourTuple, PortSpaceKey},
    handshake::Handshake,
    memory::Set,
    observe::Tables,
    record::{Event, Global, PortBitmap, PortSpace},
};

use crate::{
    layout::{MEMORY_SETS, STRANGERS_MAX},
    maps::{
        CONFIG, CONFIG_BITMAP_FROM, CONFIG_GENERATION, EVENTS, HANDSHAKES, MEMORY, MOVED,
        MOVED_SLOTS, OPENING, OPENING_SLOTS, PORT_SPACES, PORTS_EVEN, PORTS_ODD, STRANGERS,
        ZERO_BITMAP, ZERO_SPACE, count,
    },
};

/// The maps.
pub struct Maps;

impl Tables for Maps {
    #[inline(always)]
    fn with_handshake<R>(
        &mut self,
        tuple: &FourTuple,
        f: impl FnOnce(&mut Handshake) -> R,
    ) -> Option<R> {
        let handshake = HANDSHAKES.get_ptr_mut(tuple)?;
        // SAFETY: a map value stays valid while the program runs (RCU); packets of one connection
        // are processed one after the other except in races that can at worst lose one count.
        Some(f(unsafe { &mut *handshake }))
    }

    #[inline(always)]
    fn insert_handshake(&mut self, tuple: &FourTuple, handshake: &Handshake) -> bool {
        let inserted = HANDSHAKES
            .insert(tuple, handshake, BPF_NOEXIST.into())
            .is_ok();
        if !inserted {
            count(Global::HandshakesFull);
        }
        inserted
    }

    #[inline(always)]
    fn remove_handshake(&mut self, tuple: &FourTuple) -> bool {
        HANDSHAKES.remove(tuple).is_ok()
    }

    #[inline(always)]
    fn with_space(
        &mut self,
        key: &PortSpaceKey,
        create: bool,
        f: impl FnOnce(&mut PortSpace),
    ) -> bool {
        with_space(key, create, f)
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
    fn mark_port(&mut self, key: &PortSpaceKey, port: u16, established: u64) {
        if established < config(CONFIG_BITMAP_FROM) as u64 {
            return;
        }
        if config(CONFIG_GENERATION) & 1 == 0 {
            mark(&PORTS_EVEN, key, port);
        } else {
            mark(&PORTS_ODD, key, port);
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

/// Runs `f` on the counters of a port space, made first if `create` and there is room.
#[inline(always)]
pub fn with_space(key: &PortSpaceKey, create: bool, f: impl FnOnce(&mut PortSpace)) -> bool {
    let mut space = PORT_SPACES.get_ptr_mut(key);
    if space.is_none() && create {
        if let Some(zero) = ZERO_SPACE.get_ptr(0) {
            // SAFETY: an array value, never written to.
            if PORT_SPACES.insert(key, unsafe { &*zero }, BPF_NOEXIST.into()) == Err(-E2BIG) {
                count(Global::PortSpacesFull);
            }
        }
        space = PORT_SPACES.get_ptr_mut(key);
    }
    match space {
        Some(space) => {
            // SAFETY: a map value stays valid while the program runs; counters are added atomically.
            f(unsafe { &mut *space });
            true
        }
        None => false,
    }
}

/// Hands an event to the user side, or counts its loss.
#[inline(always)]
pub fn emit(event: &Event) {
    if EVENTS.output::<Event>(event, 0).is_err() {
        count(Global::EventsLost);
    }
}

const E2BIG: i32 = 7;

#[inline(always)]
fn config(index: u32) -> u32 {
    // SAFETY: an array value; the user side replaces it in one aligned access.
    CONFIG.get_ptr(index).map_or(0, |v| unsafe { *v })
}

#[inline(always)]
fn mark(map: &HashMap<PortSpaceKey, PortBitmap>, key: &PortSpaceKey, port: u16) {
    let mut bitmap = map.get_ptr_mut(key);
    if bitmap.is_none() {
        if let Some(zero) = ZERO_BITMAP.get_ptr(0) {
            // SAFETY: an array value, never written to.
            if map.insert(key, unsafe { &*zero }, BPF_NOEXIST.into()) == Err(-E2BIG) {
                count(Global::BitmapsFull);
            }
        }
        bitmap = map.get_ptr_mut(key);
    }
    let Some(bitmap) = bitmap else { return };
    let index = (port >> 6) as usize & 1023;
    // Not atomic: atomic OR needs 5.12. Two CPUs that set two bits of one word at once may lose one;
    // it comes back with the next connection on that port.
    // SAFETY: the index is below 1024 and the value stays valid while the program runs.
    let word = unsafe { &mut (*bitmap)[index] };
    *word |= 1 << (port & 63);
}
