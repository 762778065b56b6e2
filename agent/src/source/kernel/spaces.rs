//! The table of port spaces: which counters have changed, which port spaces are forgotten to make room,
//! and the source ports of completed handshakes.

use std::ptr::addr_of;

use aya::{
    Ebpf,
    maps::{Array, HashMap, MapData, Queue},
};
use tracing::warn;
use tuplewatch_common::{
    address::PortSpaceKey,
    record::{FIRST_PORTS, PortBitmap, PortSpace, SpaceRef, SpaceSlot},
};

use super::{load::map_mut, shared::Shared};

/// Completed handshakes that earn a port space its bitmap.
pub const BITMAP_FROM: u32 = FIRST_PORTS as u32;
/// A port space without any change for so many looks may be forgotten when room is needed.
const QUIET_LOOKS: u32 = 60;
/// Places are given out in order, by CPUs that may overtake each other: after so many that were never
/// taken there is none.
const NEVER_TAKEN: u32 = 1024;

/// What the user side keeps of the table.
pub struct Spaces {
    slots: Shared<SpaceSlot>,
    bitmaps: Shared<PortBitmap>,
    seen: Vec<Seen>,
    generation: u32,
    bitmap_from: u32,
    /// Places to be given back at the next look: nobody may still add to them.
    free_spaces: Vec<u32>,
    /// Bitmaps likewise.
    free_bitmaps: Vec<u32>,
    /// Bitmaps that belong to a port space.
    bitmaps_taken: u32,
}

/// What was seen of a place at the last look.
#[derive(Clone, Copy, Default)]
struct Seen {
    activity: u64,
    /// Looks without any change.
    quiet: u32,
    ports_told: u32,
    bound_opens: u64,
}

/// What has changed since the last look.
#[derive(Default)]
pub struct Changed {
    /// Counters.
    pub spaces: Vec<(PortSpaceKey, PortSpace)>,
    /// Source ports of completed handshakes.
    pub ports: Vec<(PortSpaceKey, Vec<u16>)>,
    /// How many bound sockets were opened since.
    pub bound_opens: Vec<(PortSpaceKey, u64)>,
}

impl Spaces {
    /// Opens the table and fills the queues of free places.
    pub fn open(ebpf: &mut Ebpf) -> anyhow::Result<Self> {
        let slots = Shared::<SpaceSlot>::open(map_mut(ebpf, "SPACES")?)?;
        let bitmaps = Shared::<PortBitmap>::open(map_mut(ebpf, "BITMAPS")?)?;
        let mut free: Queue<_, u32> = map_mut(ebpf, "FREE_SPACES")?.try_into()?;
        for index in 1..slots.len() {
            free.push(index, 0)?;
        }
        let mut free: Queue<_, u32> = map_mut(ebpf, "FREE_BITMAPS")?.try_into()?;
        for n in 1..bitmaps.len() / 2 {
            free.push(n, 0)?;
        }
        let mut config: Array<_, u32> = map_mut(ebpf, "CONFIG")?.try_into()?;
        config.set(1, BITMAP_FROM, 0)?;
        Ok(Self {
            seen: vec![Seen::default(); slots.len() as usize],
            slots,
            bitmaps,
            generation: 0,
            bitmap_from: BITMAP_FROM,
            free_spaces: Vec::new(),
            free_bitmaps: Vec::new(),
            bitmaps_taken: 0,
        })
    }

    /// The key behind a reference, unless it was forgotten.
    pub fn key(&self, space: SpaceRef) -> Option<PortSpaceKey> {
        let index = space.index();
        if !space.is_some() || index >= self.slots.len() {
            return None;
        }
        let slot = self.slots.at(index);
        // SAFETY: a valid place; both are read at once, and a key is not changed while it is live.
        let (generation, key) = unsafe {
            (
                addr_of!((*slot).counters.generation).read_volatile(),
                addr_of!((*slot).key).read_volatile(),
            )
        };
        space.is_of(generation).then_some(key)
    }

    /// Looks through the table.
    ///
    /// On the way it makes room when the table is nearly full: the port spaces that matter least are
    /// forgotten, those that were quiet for longest and never in trouble. One that comes back begins
    /// again at zero.
    pub fn look(&mut self, ebpf: &mut Ebpf) -> anyhow::Result<Changed> {
        self.give_back(ebpf)?;
        // From now on the kernel side fills the other generation of the bitmaps.
        let filled = self.generation & 1;
        self.generation = self.generation.wrapping_add(1);
        let mut config: Array<_, u32> = map_mut(ebpf, "CONFIG")?.try_into()?;
        config.set(0, self.generation, 0)?;
        let mut changed = Changed::default();
        let (mut quiet, mut idle_bitmaps, mut known, mut never_taken) =
            (Vec::new(), Vec::new(), 0, 0);
        self.bitmaps_taken = 0;
        for index in 1..self.slots.len() {
            if !self.is_live(index) {
                never_taken += 1;
                if never_taken > NEVER_TAKEN {
                    break;
                }
                continue;
            }
            never_taken = 0;
            known += 1;
            let bitmap = self.bitmap_of(index);
            self.bitmaps_taken += u32::from(bitmap != 0);
            let activity = self.activity(index);
            let seen = &mut self.seen[index as usize];
            // Bits may have been set after the look that saw the last change.
            if bitmap != 0 && seen.quiet < 2 {
                let ports = self.take_ports(bitmap * 2 + filled);
                if !ports.is_empty() {
                    changed.ports.push((self.slots.get(index).key, ports));
                }
            }
            let seen = &mut self.seen[index as usize];
            if seen.activity == activity {
                seen.quiet = seen.quiet.saturating_add(1);
                if seen.quiet > QUIET_LOOKS {
                    quiet.push((seen.quiet, index));
                    if bitmap != 0 {
                        idle_bitmaps.push(index);
                    }
                }
                continue;
            }
            seen.activity = activity;
            seen.quiet = 0;
            let slot = self.slots.get(index);
            let noted = (slot.counters.ports_noted as usize).min(FIRST_PORTS);
            let told = seen.ports_told as usize;
            if noted > told {
                changed
                    .ports
                    .push((slot.key, slot.counters.first_ports[told..noted].to_vec()));
                seen.ports_told = noted as u32;
            }
            let bound_opens = slot.counters.bound_opens;
            if bound_opens > seen.bound_opens {
                let more = bound_opens - seen.bound_opens;
                changed.bound_opens.push((slot.key, more));
                seen.bound_opens = bound_opens;
            }
            changed.spaces.push((slot.key, slot.counters));
        }
        let room = self.slots.len() - 1;
        if known > room * 7 / 8 {
            quiet.sort_unstable_by(|a, b| b.cmp(a));
            let excess = (known - room * 3 / 4) as usize;
            if quiet.is_empty() {
                warn!("{known} of {room} port spaces are in use and none is quiet");
            }
            let mut index: HashMap<_, PortSpaceKey, u32> =
                map_mut(ebpf, "SPACE_INDEX")?.try_into()?;
            for (_, i) in quiet.into_iter().take(excess) {
                self.forget(i, &mut index);
            }
        }
        self.ration(ebpf, &idle_bitmaps)?;
        Ok(changed)
    }

    /// Forgets a port space, unless it was ever in trouble.
    fn forget(&mut self, index: u32, keys: &mut HashMap<&mut MapData, PortSpaceKey, u32>) {
        let slot = self.slots.get(index);
        if slot.counters.bare_acks > 0 || slot.counters.no_local_port > 0 {
            return;
        }
        let _ = keys.remove(&slot.key);
        if slot.counters.bitmap != 0 {
            self.free_bitmaps.push(slot.counters.bitmap);
        }
        self.slots.set(
            index,
            SpaceSlot {
                counters: PortSpace {
                    generation: slot.counters.generation.wrapping_add(1),
                    ..PortSpace::default()
                },
                ..SpaceSlot::default()
            },
        );
        self.seen[index as usize] = Seen::default();
        self.free_spaces.push(index);
    }

    /// What was taken away at the last look can be given out again.
    fn give_back(&mut self, ebpf: &mut Ebpf) -> anyhow::Result<()> {
        if !self.free_spaces.is_empty() {
            let mut queue: Queue<_, u32> = map_mut(ebpf, "FREE_SPACES")?.try_into()?;
            for index in self.free_spaces.drain(..) {
                queue.push(index, 0)?;
            }
        }
        if !self.free_bitmaps.is_empty() {
            let mut queue: Queue<_, u32> = map_mut(ebpf, "FREE_BITMAPS")?.try_into()?;
            for n in std::mem::take(&mut self.free_bitmaps) {
                self.bitmaps.set(2 * n, [0; 1024]);
                self.bitmaps.set(2 * n + 1, [0; 1024]);
                queue.push(n, 0)?;
            }
        }
        Ok(())
    }

    /// Where bitmaps are scarce, idle port spaces lose theirs and only the busier ones get one.
    fn ration(&mut self, ebpf: &mut Ebpf, idle: &[u32]) -> anyhow::Result<()> {
        let room = self.bitmaps.len() / 2 - 1;
        let from = self.bitmap_from.max(BITMAP_FROM);
        if self.bitmaps_taken > room * 3 / 4 {
            for index in idle {
                let slot = self.slots.at(*index);
                // SAFETY: a valid place; the kernel side sets this field only where it is 0.
                let bitmap = unsafe { addr_of!((*slot).counters.bitmap).read_volatile() };
                // SAFETY: as above.
                unsafe { (&raw mut (*slot).counters.bitmap).write_volatile(0) };
                self.free_bitmaps.push(bitmap);
            }
        }
        let wanted = if self.bitmaps_taken >= room {
            from.saturating_mul(2)
        } else if self.bitmaps_taken < room / 4 {
            (from / 2).max(BITMAP_FROM)
        } else {
            from
        };
        if wanted != self.bitmap_from {
            let mut config: Array<_, u32> = map_mut(ebpf, "CONFIG")?.try_into()?;
            config.set(1, wanted, 0)?;
            self.bitmap_from = wanted;
        }
        Ok(())
    }

    fn is_live(&self, index: u32) -> bool {
        let slot = self.slots.at(index);
        // SAFETY: a valid place.
        unsafe { addr_of!((*slot).live).read_volatile() == 1 }
    }

    fn bitmap_of(&self, index: u32) -> u32 {
        let slot = self.slots.at(index);
        // SAFETY: a valid place.
        let bitmap = unsafe { addr_of!((*slot).counters.bitmap).read_volatile() };
        if bitmap < self.bitmaps.len() / 2 {
            bitmap
        } else {
            0
        }
    }

    /// A number that grows with every change of the counters.
    fn activity(&self, index: u32) -> u64 {
        let counters = self.slots.at(index).cast::<u8>();
        // SAFETY: the counters follow within the same place.
        let counters = unsafe { counters.add(std::mem::offset_of!(SpaceSlot, counters)) };
        let words = counters.cast::<u64>();
        (0..size_of::<PortSpace>() / 8)
            // The counters only count up, so their sum (of the words, which include the ports noted)
            // changes with each of them.
            .fold(0u64, |sum, i| {
                // SAFETY: within the counters, aligned to 8 bytes.
                let word = unsafe { words.add(i).read_volatile() };
                sum.wrapping_add(word)
            })
    }

    /// The ports of a bitmap, which is empty afterwards.
    fn take_ports(&self, index: u32) -> Vec<u16> {
        let bitmap = self.bitmaps.get(index);
        let ports = set_bits(&bitmap);
        if !ports.is_empty() {
            self.bitmaps.set(index, [0; 1024]);
        }
        ports
    }
}

fn set_bits(bitmap: &PortBitmap) -> Vec<u16> {
    let mut ports = Vec::new();
    for (base, mut word) in (0..=u16::MAX).step_by(64).zip(bitmap.iter().copied()) {
        while word != 0 {
            ports.push(base + word.trailing_zeros() as u16);
            word &= word - 1;
        }
    }
    ports
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_become_ports() {
        let mut bitmap = [0; 1024];
        for port in [0u16, 63, 64, 2048, 65535] {
            bitmap[usize::from(port >> 6)] |= 1 << (port & 63);
        }
        assert_eq!(set_bits(&bitmap), [0, 63, 64, 2048, 65535]);
    }
}
