//! The tables of `observe`, in memory.

use std::collections::{BTreeSet, HashMap};

use tuplewatch_common::{
    address::PortSpaceKey,
    conversation::Conversation,
    handshake::{Handshake, Pending, UNCOUNTED},
    memory::Set,
    observe::{Tables, Work, is_expired, sweep},
    record::{Event, Global, PortSpace, SpaceRef},
};

/// How much the tables hold. Small values make the paths run that a full table takes.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub handshakes: usize,
    /// How many of them may be of opens in no known port space.
    pub strangers: u64,
    pub spaces: usize,
    pub bitmaps: usize,
    /// Powers of two.
    pub memory_sets: usize,
    pub moved_slots: usize,
    pub opening_slots: usize,
}

impl Limits {
    /// Nothing gets full.
    pub const ROOMY: Self = Self {
        handshakes: 1 << 20,
        strangers: 1 << 20,
        spaces: 1 << 20,
        bitmaps: 1 << 20,
        memory_sets: 1 << 12,
        // As many as the kernel side has.
        moved_slots: 1 << 12,
        opening_slots: 1 << 12,
    };

    /// Nothing gets full in a short program, and little has to be cleared.
    pub const ROOMY_BUT_SMALL: Self = Self {
        memory_sets: 1 << 6,
        moved_slots: 1 << 6,
        opening_slots: 1 << 4,
        ..Self::ROOMY
    };

    /// Everything gets full, and nearly everything shares a slot.
    pub const TIGHT: Self = Self {
        handshakes: 4,
        strangers: 2,
        spaces: 2,
        bitmaps: 1,
        memory_sets: 1,
        moved_slots: 1,
        opening_slots: 2,
    };
}

/// Tables in memory that behave as the BPF maps do: no order, bounded, every refusal counted.
pub struct InMemory {
    limits: Limits,
    pub handshakes: HashMap<u64, Pending>,
    pub spaces: HashMap<PortSpaceKey, PortSpace>,
    /// The keys of `spaces` by index, from 1 on.
    pub refs: Vec<PortSpaceKey>,
    pub bitmaps: HashMap<PortSpaceKey, BTreeSet<u16>>,
    pub memory: Vec<Set>,
    pub moved: Vec<u64>,
    pub moved_at: u64,
    pub opening: Vec<u64>,
    pub strangers: u64,
    pub conversations: HashMap<u64, Conversation>,
    pub events: Vec<Event>,
    pub globals: [u64; Global::COUNT as usize],
    /// Opens that a port space counted but whose record found no room: they have no outcome.
    pub lost_opens: HashMap<PortSpaceKey, u64>,
}

impl InMemory {
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            handshakes: HashMap::new(),
            spaces: HashMap::new(),
            refs: Vec::new(),
            bitmaps: HashMap::new(),
            memory: vec![Set::default(); limits.memory_sets],
            moved: vec![0; limits.moved_slots],
            moved_at: 0,
            opening: vec![0; limits.opening_slots],
            strangers: 0,
            conversations: HashMap::new(),
            events: Vec::new(),
            globals: [0; Global::COUNT as usize],
            lost_opens: HashMap::new(),
        }
    }

    /// The port space that a reference means.
    pub fn key_of(&self, space: SpaceRef) -> Option<PortSpaceKey> {
        let index = (space.index() as usize).checked_sub(1)?;
        self.refs.get(index).copied()
    }

    /// The slot of `opening` that a hash belongs to.
    pub fn slot(&self, hash: u64) -> usize {
        (hash >> 20) as usize & (self.opening.len() - 1)
    }

    pub fn global(&self, what: Global) -> u64 {
        self.globals[what as usize]
    }

    /// Sweeps every record that is due.
    pub fn sweep_all(&mut self, work: &mut Work, now_ns: u64, patience_ns: u64) {
        let mut due: Vec<u64> = self
            .handshakes
            .iter()
            .filter(|(_, p)| is_expired(&p.handshake, now_ns, patience_ns))
            .map(|(hash, _)| *hash)
            .collect();
        due.sort_unstable();
        for hash in due {
            sweep(self, work, hash, now_ns, patience_ns);
        }
    }

    /// Source ports of completed handshakes, as the user side puts them together.
    pub fn ports(&self, key: &PortSpaceKey) -> BTreeSet<u16> {
        let mut ports = self.bitmaps.get(key).cloned().unwrap_or_default();
        if let Some(space) = self.spaces.get(key) {
            ports.extend(&space.first_ports[..space.ports_noted as usize]);
        }
        ports
    }
}

impl Tables for InMemory {
    fn pending(&mut self, hash: u64) -> Option<&mut Pending> {
        self.handshakes.get_mut(&hash)
    }

    fn add_pending(&mut self, handshake: &Handshake) -> Option<&mut Pending> {
        let hash = handshake.hash;
        let room = self.handshakes.len() < self.limits.handshakes;
        if !room || self.handshakes.contains_key(&hash) {
            self.count(Global::HandshakesFull);
            if handshake.flags & UNCOUNTED == 0 {
                let key = self.key_of(handshake.space).expect("counted where?");
                *self.lost_opens.entry(key).or_default() += 1;
            }
            return None;
        }
        let pending = self.handshakes.entry(hash).or_default();
        pending.handshake = *handshake;
        Some(pending)
    }

    fn remove_pending(&mut self, hash: u64) -> bool {
        self.handshakes.remove(&hash).is_some()
    }

    fn space(&mut self, key: &PortSpaceKey, create: bool) -> SpaceRef {
        if create && !self.spaces.contains_key(key) {
            if self.spaces.len() < self.limits.spaces {
                self.spaces.insert(*key, PortSpace::default());
                self.refs.push(*key);
            } else {
                self.count(Global::PortSpacesFull);
            }
        }
        let index = self.refs.iter().position(|k| k == key);
        index.map_or(SpaceRef::NONE, |i| SpaceRef::new(i as u32 + 1, 0))
    }

    fn with_space(&mut self, space: SpaceRef, f: impl FnOnce(&mut PortSpace)) -> bool {
        let Some(key) = self.key_of(space) else {
            return false;
        };
        self.spaces.get_mut(&key).map(f).is_some()
    }

    fn mark_port(&mut self, space: SpaceRef, port: u16, _established: u64) {
        let Some(key) = self.key_of(space) else {
            return;
        };
        if let Some(bitmap) = self.bitmaps.get_mut(&key) {
            bitmap.insert(port);
        } else if self.bitmaps.len() < self.limits.bitmaps {
            self.bitmaps.insert(key, BTreeSet::from([port]));
        } else {
            self.count(Global::BitmapsFull);
        }
    }

    fn memory(&mut self, hash: u64) -> Option<&mut Set> {
        let i = hash as usize & (self.memory.len() - 1);
        self.memory.get_mut(i)
    }

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

    fn opening(&mut self, hash: u64) -> Option<&mut u64> {
        let i = self.slot(hash);
        self.opening.get_mut(i)
    }

    fn conversation(&mut self, hash: u64) -> Option<&mut Conversation> {
        self.conversations.get_mut(&hash)
    }

    fn add_conversation(&mut self, hash: u64, _now_ns: u64) -> Option<&mut Conversation> {
        Some(self.conversations.entry(hash).or_default())
    }

    fn emit(&mut self, event: &Event) {
        self.events.push(*event);
    }

    fn add(counter: &mut u64, n: u64) {
        *counter = counter.wrapping_add(n);
    }

    fn count(&mut self, what: Global) {
        self.globals[what as usize] += 1;
    }
}
