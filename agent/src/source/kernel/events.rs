//! Takes events out of the ring buffer.

use std::os::fd::OwnedFd;

use aya::maps::RingBuf;
use bytes::Buf;
use tuplewatch_common::{address::FourTuple, record::Event};

use super::{idle, load::Kernel};

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
            events.extend(decode(&item));
            self.idle_resets.extend(idle::decode(&item));
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

/// One record of the ring buffer: the fields of [`Event`] in order, as the kernel side has them in memory.
/// `None` for a record of another size.
fn decode(mut record: &[u8]) -> Option<Event> {
    if record.len() != size_of::<Event>() {
        return None;
    }
    let address = |record: &mut &[u8]| {
        let mut address = [0; 16];
        record.copy_to_slice(&mut address);
        address
    };
    let r = &mut record;
    Some(Event {
        time_ns: r.get_u64_ne(),
        tuple: FourTuple {
            initiator: address(r),
            responder: address(r),
            responder_port: r.get_u16_ne(),
            initiator_port: r.get_u16_ne(),
            pad: r.get_u32_ne(),
        },
        isn: r.get_u32_ne(),
        ack: r.get_u32_ne(),
        former_age_ms: r.get_u32_ne(),
        pid: r.get_u32_ne(),
        netns: r.get_u32_ne(),
        syns: r.get_u16_ne(),
        bare_acks: r.get_u16_ne(),
        kind: r.get_u8(),
        role: r.get_u8(),
        former: r.get_u8(),
        pad: [r.get_u8(), r.get_u8(), r.get_u8(), r.get_u8(), r.get_u8()],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_lies_in_memory() {
        let event = Event {
            time_ns: 0x0102_0304_0506_0708,
            tuple: FourTuple {
                initiator: [1; 16],
                responder: [2; 16],
                responder_port: 0x1122,
                initiator_port: 0x3344,
                pad: 0,
            },
            isn: 0x5566_7788,
            ack: 0x99aa_bbcc,
            former_age_ms: 60_000,
            pid: 4711,
            netns: 4_026_531_840,
            syns: 3,
            bare_acks: 2,
            kind: 1,
            role: 2,
            former: 6,
            pad: [0; 5],
        };
        // SAFETY: `Event` is plain data without padding.
        let bytes = unsafe {
            std::slice::from_raw_parts((&raw const event).cast::<u8>(), size_of::<Event>())
        };
        assert_eq!(decode(bytes), Some(event));
        assert_eq!(decode(&bytes[1..]), None);
    }
}
