//! The flight recorder's ring, as the user side reads it.

use std::{
    ptr::addr_of,
    sync::atomic::{Ordering, fence},
};

use anyhow::Context as _;
use aya::{
    Ebpf,
    maps::{MapData, PerCpuArray},
};
use tuplewatch_common::{
    address::FourTuple,
    recorder::{Recorded, WATCHED, places},
};

use super::{load::map_mut, shared::Shared};

/// Places that each CPU has at least: a handful of handshakes.
const FEWEST: u32 = 64;

/// How the ring is divided.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Size {
    /// Sections, one for each CPU: a power of two.
    pub(super) sections: u32,
    /// Places in each, a power of two; 0 if nothing is recorded.
    pub(super) slots: u32,
}

impl Size {
    /// For a ring of at most so many bytes on this host; `None`: nothing is recorded.
    pub(super) fn of(bytes: Option<u64>) -> Self {
        let Some(bytes) = bytes else {
            return Self {
                sections: 1,
                slots: 0,
            };
        };
        // Those that are possible can be many more. One that comes later shares a section, and two
        // that write at once to a place leave one packet of both, which parses as one or not at all.
        let online = aya::util::online_cpus().unwrap_or_default();
        let highest = online.into_iter().max().unwrap_or(0);
        Self::for_cpus(bytes, highest + 1)
    }

    fn for_cpus(bytes: u64, cpus: u32) -> Self {
        let sections = cpus.next_power_of_two();
        let places = bytes / size_of::<Recorded>() as u64 / u64::from(sections);
        let places = u32::try_from(places).unwrap_or(u32::MAX).max(FEWEST);
        Self {
            sections,
            slots: 1 << places.ilog2(),
        }
    }

    /// Entries of the map: at least the one that a map must have.
    pub(super) const fn entries(self) -> u32 {
        let entries = self.sections * self.slots;
        if entries == 0 { 1 } else { entries }
    }
}

/// What the packet hook keeps of the latest packets that open or end connections.
pub struct Ring {
    places: Shared<Recorded>,
    next: PerCpuArray<MapData, u64>,
    watched: Shared<u64>,
}

/// Connections of which all segments are recorded, at most: as many as nearly always find a place.
const MOST_WATCHED: usize = WATCHED as usize / 4;
/// Segments of them that are recorded between two looks: what comes beyond would push out the rest of the
/// ring.
const SEGMENTS: u64 = 2048;
/// … and not more than this part of the ring.
const PART: u64 = 16;

/// Opens the ring if it `is_on`.
pub(super) fn open(ebpf: &mut Ebpf, is_on: bool) -> anyhow::Result<Option<Ring>> {
    if !is_on {
        return Ok(None);
    }
    let places = Shared::open(map_mut(ebpf, "RECORDER")?)?;
    let next = ebpf
        .take_map("RECORDER_NEXT")
        .context("the eBPF object has no map RECORDER_NEXT")?;
    Ok(Some(Ring {
        places,
        next: next.try_into()?,
        watched: Shared::open(map_mut(ebpf, "RECORDER_WATCHED")?)?,
    }))
}

impl Ring {
    /// How many packets it holds at most.
    #[must_use]
    pub const fn capacity(&self) -> u32 {
        self.places.len()
    }

    /// How many packets were put into it since the start.
    #[must_use]
    pub fn recorded(&self) -> u64 {
        self.next
            .get(&0, 0)
            .map_or(0, |each| each.iter().sum::<u64>())
    }

    /// Records every segment of these connections until the next call, those named first if they are too
    /// many.
    pub fn watch(&self, connections: &[FourTuple]) {
        let mut table = [0; WATCHED as usize + 1];
        for connection in connections.iter().take(MOST_WATCHED) {
            let hash = connection.hash();
            let free = places(hash).into_iter().find(|p| table[*p as usize] == 0);
            if let Some(place) = free {
                table[place as usize] = hash;
            }
        }
        if !connections.is_empty() {
            table[0] = SEGMENTS.min(u64::from(self.capacity()) / PART).max(1);
        }
        for (index, value) in (0..).zip(table) {
            if self.watched.get(index) != value {
                self.watched.set(index, value);
            }
        }
    }

    /// Shows every packet in it, in no order. What is overwritten meanwhile is left out.
    pub fn each(&self, mut see: impl FnMut(&Recorded)) {
        for index in 0..self.places.len() {
            let time = addr_of_time(&self.places, index);
            // SAFETY: a valid place, read in one aligned access.
            let before = unsafe { time.read_volatile() };
            if before == 0 {
                continue;
            }
            fence(Ordering::Acquire);
            let recorded = self.places.get(index);
            fence(Ordering::Acquire);
            // SAFETY: as above.
            if unsafe { time.read_volatile() } == before && recorded.time_ns == before {
                see(&recorded);
            }
        }
    }
}

fn addr_of_time(places: &Shared<Recorded>, index: u32) -> *const u64 {
    let place = places.at(index);
    // SAFETY: a valid place; only the address is taken.
    unsafe { addr_of!((*place).time_ns) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_is_divided_among_the_cpus_and_never_larger_than_asked_for() {
        for (bytes, cpus) in [(8 << 20, 1), (8 << 20, 2), (16 << 20, 96), (3 << 20, 7)] {
            let size = Size::for_cpus(bytes, cpus);
            assert!(size.sections >= cpus && size.sections.is_power_of_two());
            assert!(size.slots.is_power_of_two() && size.slots >= FEWEST);
            let used = u64::from(size.entries()) * size_of::<Recorded>() as u64;
            assert!(used <= bytes && used > bytes / 8, "{used} of {bytes}");
        }
        let many = Size::for_cpus(1 << 20, 1024);
        assert_eq!((many.sections, many.slots), (1024, FEWEST));
    }

    #[test]
    fn what_is_not_recorded_takes_one_place() {
        assert_eq!(Size::of(None).entries(), 1);
        assert_eq!(Size::of(None).slots, 0);
    }
}
