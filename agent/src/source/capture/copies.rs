//! Copies: one packet that a capture holds several times, because it passed several places where it was
//! recorded (`-i any` on a router or a node, a bond and its slaves, merged files of both ends).
//!
//! A retransmission is another packet: its sender gives it another IP identification, and waits before
//! it sends it. A copy has the same one, comes soon, and where it was recorded further on it often has
//! lost some TTL or has the link-layer address of another sender.

use std::hash::BuildHasher as _;

use foldhash::fast::FixedState;
use tuplewatch_common::{
    bytes::{Bytes as _, Captured},
    segment::{Located, Segment},
};

use super::{
    link::{Direction, Link},
    words::prefetch,
};

/// What tells one packet of a segment from the next, and one place of it from another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sighting {
    /// The identification in the IPv4 header; 0 with IPv6, and where the sender gives none.
    id: u16,
    /// Fingerprint of the TTL, the link-layer sender and the direction.
    way: u32,
}

impl Sighting {
    /// Reads it from a packet whose TCP header was found.
    #[inline]
    #[must_use]
    pub fn of(
        bytes: &Captured<'_>,
        link: Link,
        at: &Located,
        direction: Option<Direction>,
    ) -> Self {
        let (id, ttl) = if at.is_v6 {
            (0, bytes.u8(at.ip_offset + 7))
        } else {
            let id = bytes.u16(at.ip_offset + 4);
            (id.unwrap_or(0), bytes.u8(at.ip_offset + 8))
        };
        let sender = link.sender(bytes.data);
        let rest = u64::from(ttl.unwrap_or(0)) << 2 | direction.map_or(0, |d| d as u64 + 1);
        let way = (sender ^ rest << 48).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self {
            id,
            way: (way >> 32) as u32,
        }
    }
}

/// A number for a packet whose four-tuple has this hash, never 0: the same for its copies, and another one for what is
/// sent again.
#[inline]
#[must_use]
pub fn fingerprint(segment: &Segment, hash: u64, sighting: Sighting) -> u64 {
    let numbers = u64::from(segment.seq) << 32 | u64::from(segment.ack);
    let rest = u64::from(segment.payload_len) << 32
        | u64::from(segment.flags) << 16
        | u64::from(sighting.id);
    let ports =
        u32::from(segment.tuple.initiator_port) << 16 | u32::from(segment.tuple.responder_port);
    // The hash of a four-tuple is the same for both ways.
    FixedState::default().hash_one((hash, ports, numbers, rest)) | 1
}

/// The latest segments.
pub struct Copies {
    slots: Box<[Slot]>,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    /// Fingerprint of the packet; 0 if there is none.
    packet: u64,
    time_ns: u64,
    interface: u32,
    way: u32,
}

/// Places of the table: what one host sees in a tenth of a second, at most.
const SLOTS: usize = 1 << 14;
/// A copy at the same place (a bridge and its port, say) comes at once. Nothing is sent again so soon:
/// the shortest wait is that of Linux after a bare ACK, two ticks (`TCP_TIMEOUT_MIN`), which may be a
/// millisecond.
const HERE_NS: u64 = 500_000;
/// One from elsewhere has been on the way; a clock may be wrong. Nothing is sent again for want of an
/// answer before 200 ms (Linux `TCP_RTO_MIN`).
const ELSEWHERE_NS: u64 = 150_000_000;
/// … and where packets have an identification that tells, a SYN is not sent again before a second
/// (RFC 6298).
const IDENTIFIED_NS: u64 = 900_000_000;

#[inline]
const fn place(packet: u64) -> usize {
    (packet >> 32) as usize & (SLOTS - 1)
}

impl Default for Copies {
    fn default() -> Self {
        Self {
            slots: vec![Slot::default(); SLOTS].into(),
        }
    }
}

impl Copies {
    /// Gets ready what a packet will need when its turn comes.
    #[inline]
    pub(super) fn expect(&self, packet: u64) {
        prefetch(self.slots.get(place(packet)));
    }

    /// Takes a packet ([`fingerprint`]) that was seen on an interface. If it is a copy of one that was taken, gives
    /// the interface of that.
    #[inline]
    pub fn take(
        &mut self,
        packet: u64,
        sighting: Sighting,
        interface: u32,
        time_ns: u64,
    ) -> Option<u32> {
        let slot = &mut self.slots[place(packet)];
        let is_here = slot.interface == interface && slot.way == sighting.way;
        let window = match (is_here, sighting.id) {
            (true, _) => HERE_NS,
            (false, 0) => ELSEWHERE_NS,
            (false, _) => IDENTIFIED_NS,
        };
        if slot.packet == packet && slot.time_ns.abs_diff(time_ns) <= window {
            return Some(slot.interface);
        }
        *slot = Slot {
            packet,
            time_ns,
            interface,
            way: sighting.way,
        };
        None
    }
}

#[cfg(test)]
mod tests {
    use tuplewatch_common::segment::SYN;

    use super::*;

    const MS: u64 = 1_000_000;

    /// Whether the second of two sightings of a SYN is a copy.
    fn is_copy(first: Sighting, second: Sighting, interfaces: (u32, u32), after_ns: u64) -> bool {
        let syn = Segment {
            seq: 7,
            flags: SYN,
            ..Segment::default()
        };
        let mut copies = Copies::default();
        let mut take = |segment: &Segment, sighting, interface, time_ns| {
            let packet = fingerprint(segment, segment.tuple.hash(), sighting);
            copies.take(packet, sighting, interface, time_ns)
        };
        assert_eq!(take(&syn, first, interfaces.0, 1_000 * MS), None);
        let other = Segment { seq: 8, ..syn };
        assert_eq!(take(&other, first, interfaces.0, 1_000 * MS), None);
        let seen = take(&syn, second, interfaces.1, 1_000 * MS + after_ns);
        assert!(seen.is_none_or(|first| first == interfaces.0));
        seen.is_some()
    }

    #[test]
    fn what_is_sent_again_is_no_copy() {
        let (one, next) = (Sighting { id: 5, way: 1 }, Sighting { id: 6, way: 1 });
        assert!(!is_copy(one, next, (1, 1), 1000));
        // With IPv6 only the time tells.
        let nameless = Sighting { id: 0, way: 1 };
        assert!(!is_copy(nameless, nameless, (1, 1), MS));
        assert!(is_copy(nameless, nameless, (1, 1), MS / 10));
    }

    #[test]
    fn what_comes_from_another_place_may_take_its_time() {
        let (here, there) = (Sighting { id: 5, way: 1 }, Sighting { id: 5, way: 2 });
        assert!(is_copy(here, there, (1, 1), 500 * MS));
        assert!(is_copy(here, here, (1, 2), 500 * MS));
        assert!(!is_copy(here, there, (1, 1), 1_000 * MS));
        let [here, there] = [here, there].map(|s| Sighting { id: 0, ..s });
        assert!(is_copy(here, there, (1, 1), 100 * MS));
        assert!(!is_copy(here, there, (1, 1), 200 * MS));
    }
}
