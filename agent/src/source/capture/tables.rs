//! The tables of `observe` in memory: they behave as the kernel's maps do, bounded and with every
//! refusal counted, and tell which frame began what.

use std::collections::HashMap;

use foldhash::fast::RandomState;
use tuplewatch_common::{
    address::{FourTuple, PortSpaceKey},
    conversation::Conversation,
    handshake::{Handshake, INITIATOR_IS_LOWER, Pending},
    memory::{self, Former, Moved, Set, WAYS},
    observe::{Tables, Work, is_expired, sweep},
    record::{Event, FIRST_PORTS, Global, PortSpace, SpaceRef},
    segment::{ACK, FIN, RST, SYN, Segment},
};

use super::{
    talks::Talks,
    words::{Words, prefetch},
};
use crate::core::observation::Talk;

#[cfg(test)]
mod tests;

/// How much the tables hold.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections being opened.
    pub handshakes: usize,
    /// How many of them may be of no known port space.
    pub strangers: u64,
    /// Port spaces.
    pub spaces: usize,
    /// Sets of remembered connections, four each: a power of two.
    pub memory_sets: usize,
    /// Slots of SYNs that moved to another port: a power of two.
    pub moved_slots: usize,
    /// Counters of connections being opened: a power of two.
    pub opening_slots: usize,
}

impl Default for Limits {
    /// Two million remembered connections take 16 MiB; more would cost time too, because the kernel clears
    /// what is used of it first. The rest is below 60 MiB when full.
    fn default() -> Self {
        Self {
            handshakes: 1 << 18,
            strangers: 3 << 16,
            spaces: 1 << 14,
            memory_sets: 1 << 19,
            moved_slots: 1 << 14,
            opening_slots: 1 << 16,
        }
    }
}

/// A packet in the capture that it came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Frame {
    /// Which of the files given.
    pub file: u32,
    /// Its number, as Wireshark counts.
    pub number: u64,
    /// Its time in nanoseconds.
    pub time_ns: u64,
}

/// A connection being opened, and the frame of its SYN.
struct Opening {
    pending: Pending,
    syn: Frame,
}

/// A port space and what is new in it since the last look.
#[derive(Default)]
struct Slot {
    key: PortSpaceKey,
    /// How often the place was given to another port space.
    generation: u16,
    space: PortSpace,
    changed: bool,
    /// Ports of [`PortSpace::first_ports`] that were told.
    ports_told: usize,
    ports: Vec<u16>,
    /// The look at which it changed last.
    last_look: u64,
}

/// The tables.
pub struct InMemory {
    limits: Limits,
    /// By [`FourTuple::hash`].
    handshakes: HashMap<u64, Opening, RandomState>,
    spaces: HashMap<PortSpaceKey, SpaceRef, RandomState>,
    /// By the index of a reference; the first is never given out.
    slots: Vec<Slot>,
    free: Vec<u32>,
    changed: Vec<u32>,
    memory: Words,
    moved: Vec<u64>,
    moved_at: u64,
    opening: Words,
    strangers: u64,
    /// HTTP/1 conversations.
    pub talks: Talks,
    events: Vec<Event>,
    globals: [u64; Global::COUNT as usize],
    look: u64,
    /// The packet that is being observed.
    pub current: Frame,
}

/// Above this many ports in a look, what was told twice is taken out: no port space has more.
const PORTS: usize = 1 << 17;
/// A port space without a change for so many looks may be forgotten when room is needed.
const QUIET_LOOKS: u64 = 60;

impl InMemory {
    /// Empty tables.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            handshakes: HashMap::default(),
            spaces: HashMap::default(),
            slots: vec![Slot::default()],
            free: Vec::new(),
            changed: Vec::new(),
            memory: Words::new(limits.memory_sets * WAYS),
            moved: vec![0; limits.moved_slots],
            moved_at: 0,
            opening: Words::new(limits.opening_slots),
            strangers: 0,
            talks: Talks::default(),
            events: Vec::new(),
            globals: [0; Global::COUNT as usize],
            look: 0,
            current: Frame::default(),
        }
    }

    /// Bytes of memory of the tables whose size is fixed.
    #[must_use]
    pub const fn fixed_bytes(limits: &Limits) -> u64 {
        (limits.memory_sets * size_of::<Set>() + (limits.moved_slots + limits.opening_slots) * 8)
            as u64
    }

    /// The frame of the latest SYN of a connection being opened, on its present port.
    #[must_use]
    pub fn syn_frame(&self, tuple: &FourTuple) -> Option<(Frame, Handshake)> {
        let opening = self.handshakes.get(&tuple.hash())?;
        let handshake = opening.pending.handshake;
        let is_lower = handshake.flags & INITIATOR_IS_LOWER != 0;
        (is_lower == tuple.initiator_is_lower()).then_some((opening.syn, handshake))
    }

    /// Whether anything was counted in a port space.
    #[must_use]
    pub fn has_space(&self, key: &PortSpaceKey) -> bool {
        self.spaces.contains_key(key)
    }

    /// When the handshake of a connection was completed, within 67 ms, if that was seen.
    #[must_use]
    pub fn opened_ns(&self, tuple: &FourTuple, now_ns: u64) -> Option<u64> {
        let hash = tuple.hash();
        let sets: &[Set] = self.memory.as_chunks().0;
        let set = sets.get(hash as usize & (sets.len() - 1))?;
        let word = memory::find(set, hash)?;
        (word.state() == Former::Open).then(|| word.at_ns(now_ns))
    }

    /// Events since the last call.
    pub fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Events that were not taken yet.
    #[must_use]
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// What is counted once.
    #[must_use]
    pub const fn globals(&self) -> [u64; Global::COUNT as usize] {
        self.globals
    }

    /// Every port space with its counters, in the order of their keys.
    #[must_use]
    pub fn port_spaces(&self) -> Vec<(PortSpaceKey, PortSpace)> {
        let mut all: Vec<_> = self
            .spaces
            .iter()
            .map(|(key, space)| (*key, self.slots[space.index() as usize].space))
            .collect();
        all.sort_unstable_by_key(|(key, _)| *key);
        all
    }

    /// Adds to what is counted once.
    pub const fn add_global(&mut self, what: Global, n: u64) {
        self.globals[what as usize] += n;
    }

    /// How full the table of handshakes is, from 0 to 1.
    #[must_use]
    pub fn fill(&self) -> f64 {
        self.handshakes.len() as f64 / self.limits.handshakes as f64
    }

    /// Gets ready what a segment will need when its turn comes: the tables are larger than the caches.
    #[inline]
    pub fn expect(&self, segment: &Segment, hash: u64) {
        prefetch(self.opening.get(self.opening_slot(hash)));
        if segment.flags & (SYN | FIN | RST) == 0 {
            return;
        }
        let sets = self.memory.as_chunks::<WAYS>().0;
        let set = sets.get(hash as usize & (sets.len() - 1));
        prefetch(set.map(|set| &set[0]));
        if segment.flags & (SYN | ACK) == SYN {
            let hash = Moved::hash(&segment.tuple, segment.seq);
            prefetch(self.moved.get(hash as usize & (self.moved.len() - 1)));
        }
    }

    /// Where the number of connections being opened is.
    #[inline]
    fn opening_slot(&self, hash: u64) -> usize {
        (hash >> 20) as usize & (self.opening.len() - 1)
    }

    /// Gives up every open that is due.
    pub fn sweep_all(&mut self, work: &mut Work, now_ns: u64, patience_ns: u64) {
        let mut due: Vec<(u64, u64)> = self
            .handshakes
            .values()
            .map(|opening| &opening.pending.handshake)
            .filter(|handshake| is_expired(handshake, now_ns, patience_ns))
            .map(|handshake| (handshake.first_ns, handshake.hash))
            .collect();
        // The order of the table is another one on each run.
        due.sort_unstable();
        for (_, hash) in due {
            sweep(self, work, hash, now_ns, patience_ns);
        }
    }

    /// The port spaces that changed since the last call, in order, and their new ports. On the way
    /// quiet ones are forgotten if the table is nearly full.
    #[expect(clippy::type_complexity, reason = "the two fields of a snapshot")]
    pub fn look(
        &mut self,
    ) -> (
        Vec<(PortSpaceKey, PortSpace)>,
        Vec<(PortSpaceKey, Vec<u16>)>,
    ) {
        self.look += 1;
        let slots = &mut self.slots;
        self.changed
            .sort_unstable_by_key(|index| slots[*index as usize].key);
        let (mut spaces, mut ports) = (Vec::new(), Vec::new());
        for index in self.changed.drain(..) {
            let slot = &mut slots[index as usize];
            let key = slot.key;
            slot.changed = false;
            slot.last_look = self.look;
            spaces.push((key, slot.space));
            let noted = (slot.space.ports_noted as usize).min(FIRST_PORTS);
            let mut new = std::mem::take(&mut slot.ports);
            new.extend(&slot.space.first_ports[slot.ports_told.min(noted)..noted]);
            slot.ports_told = noted;
            if !new.is_empty() {
                new.sort_unstable();
                new.dedup();
                ports.push((key, new));
            }
        }
        if self.spaces.len() > self.limits.spaces * 7 / 8 {
            self.forget_quiet();
        }
        (spaces, ports)
    }

    /// HTTP/1 conversations with news since the last call.
    pub fn look_at_talks(&mut self) -> Vec<Talk> {
        let memory = &self.memory;
        self.talks.look(|hash| {
            let sets: &[Set] = memory.as_chunks().0;
            let set = sets.get(hash as usize & (sets.len() - 1));
            let word = set.and_then(|set| memory::find(set, hash));
            word.is_some_and(|word| word.state().is_closed())
        })
    }

    /// Forgets the port spaces that were quiet for longest and never in trouble.
    fn forget_quiet(&mut self) {
        let look = self.look;
        let mut quiet: Vec<(u64, PortSpaceKey)> = self
            .spaces
            .iter()
            .map(|(key, space)| (key, &self.slots[space.index() as usize]))
            .filter(|(_, slot)| look - slot.last_look > QUIET_LOOKS && slot.space.bare_acks == 0)
            .map(|(key, slot)| (slot.last_look, *key))
            .collect();
        quiet.sort_unstable();
        let excess = self.spaces.len() - self.limits.spaces * 3 / 4;
        for (_, key) in quiet.into_iter().take(excess) {
            if let Some(space) = self.spaces.remove(&key) {
                let slot = &mut self.slots[space.index() as usize];
                *slot = Slot {
                    generation: slot.generation + 1,
                    ..Slot::default()
                };
                self.free.push(space.index());
            }
        }
    }
}

impl Tables for InMemory {
    #[inline]
    fn pending(&mut self, hash: u64) -> Option<&mut Pending> {
        self.handshakes
            .get_mut(&hash)
            .map(|opening| &mut opening.pending)
    }

    fn add_pending(&mut self, handshake: &Handshake) -> Option<&mut Pending> {
        let hash = handshake.hash;
        if self.handshakes.len() >= self.limits.handshakes || self.handshakes.contains_key(&hash) {
            self.count(Global::HandshakesFull);
            return None;
        }
        let opening = Opening {
            pending: Pending {
                handshake: *handshake,
                ..Pending::default()
            },
            syn: self.current,
        };
        let opening = self.handshakes.entry(hash).insert_entry(opening);
        Some(&mut opening.into_mut().pending)
    }

    fn remove_pending(&mut self, hash: u64) -> bool {
        self.handshakes.remove(&hash).is_some()
    }

    fn space(&mut self, key: &PortSpaceKey, create: bool) -> SpaceRef {
        if let Some(known) = self.spaces.get(key) {
            return *known;
        }
        if !create {
            return SpaceRef::NONE;
        }
        if self.spaces.len() >= self.limits.spaces {
            self.count(Global::PortSpacesFull);
            return SpaceRef::NONE;
        }
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[index as usize];
        slot.key = *key;
        let space = SpaceRef::new(index, slot.generation);
        self.spaces.insert(*key, space);
        space
    }

    #[inline]
    fn with_space(&mut self, space: SpaceRef, f: impl FnOnce(&mut PortSpace)) -> bool {
        let Some(slot) = slot(&mut self.slots, space) else {
            return false;
        };
        if !slot.changed {
            slot.changed = true;
            self.changed.push(space.index());
        }
        f(&mut slot.space);
        true
    }

    fn mark_port(&mut self, space: SpaceRef, port: u16, _established: u64) {
        let Some(slot) = slot(&mut self.slots, space) else {
            return;
        };
        if slot.ports.len() >= PORTS {
            slot.ports.sort_unstable();
            slot.ports.dedup();
        }
        slot.ports.push(port);
    }

    #[inline]
    fn memory(&mut self, hash: u64) -> Option<&mut Set> {
        let sets = self.memory.as_chunks_mut().0;
        let i = hash as usize & (sets.len() - 1);
        sets.get_mut(i)
    }

    #[inline]
    fn moved(&mut self, hash: u64) -> Option<&mut u64> {
        let i = hash as usize & (self.moved.len() - 1);
        self.moved.get_mut(i)
    }

    fn moved_at(&mut self) -> Option<&mut u64> {
        Some(&mut self.moved_at)
    }

    fn strangers(&mut self) -> Option<(&mut u64, u64)> {
        Some((&mut self.strangers, self.limits.strangers))
    }

    #[inline]
    fn opening(&mut self, hash: u64) -> Option<&mut u64> {
        let i = self.opening_slot(hash);
        self.opening.get_mut(i)
    }

    fn conversation(&mut self, hash: u64) -> Option<&mut Conversation> {
        self.talks.get(hash)
    }

    fn add_conversation(&mut self, hash: u64, _now_ns: u64) -> Option<&mut Conversation> {
        let conversation = self.talks.add(hash);
        if conversation.is_none() {
            self.globals[Global::FailingEvicted as usize] += 1;
        }
        conversation
    }

    fn emit(&mut self, event: &Event) {
        self.events.push(*event);
    }

    #[inline]
    fn add(counter: &mut u64, n: u64) {
        *counter = counter.wrapping_add(n);
    }

    fn count(&mut self, what: Global) {
        self.globals[what as usize] += 1;
    }
}

/// The place that a reference means, unless its port space was forgotten.
#[inline]
fn slot(slots: &mut [Slot], space: SpaceRef) -> Option<&mut Slot> {
    let slot = slots.get_mut(space.index() as usize)?;
    (space.is_some() && space.is_of(slot.generation)).then_some(slot)
}
