//! Takes events out of the ring buffer.

use std::os::fd::OwnedFd;

use aya::maps::RingBuf;
use tuplewatch_common::record::Event;

use super::load::Kernel;

/// At most so many events at once: what comes faster than this is counted in the maps all the same.
const AT_ONCE: usize = 4096;

impl Kernel {
    /// The events since the last call, oldest first.
    ///
    /// # Errors
    /// If the map cannot be used.
    pub fn events(&mut self) -> anyhow::Result<Vec<Event>> {
        let mut ring = RingBuf::try_from(super::load::map_mut(&mut self.ebpf, "EVENTS")?)?;
        let mut events = Vec::new();
        while events.len() < AT_ONCE {
            let Some(item) = ring.next() else { break };
            if item.len() == size_of::<Event>() {
                // SAFETY: the kernel side wrote one `Event`, plain data of that size; the bytes need
                // not be aligned.
                events.push(unsafe { item.as_ptr().cast::<Event>().read_unaligned() });
            }
        }
        Ok(events)
    }

    /// A descriptor that becomes readable when there are events.
    ///
    /// # Errors
    /// If the map cannot be used.
    pub fn events_fd(&mut self) -> anyhow::Result<OwnedFd> {
        use std::os::fd::AsFd as _;
        let ring = RingBuf::try_from(super::load::map_mut(&mut self.ebpf, "EVENTS")?)?;
        Ok(ring.as_fd().try_clone_to_owned()?)
    }
}
