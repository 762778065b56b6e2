//! Classic capture files: microseconds or nanoseconds, either byte order.

use std::io::Read;

use super::{
    fault::{Fault, Reason},
    link::Link,
    reader::{MAX_PACKET, Packet},
    window::Window,
};

/// What the file header says.
pub(super) struct Pcap {
    big_endian: bool,
    /// Nanoseconds in a unit of the fraction of a second.
    unit_ns: u64,
    link: Link,
    /// As the file has it.
    link_number: u32,
}

/// Length of the file header.
const HEADER: usize = 24;
/// Length of a packet's header.
const RECORD: usize = 16;

/// The byte order and unit that the first four bytes tell, if this is a classic capture.
const fn magic(bytes: [u8; 4]) -> Option<(bool, u64)> {
    Some(match u32::from_be_bytes(bytes) {
        0xa1b2_c3d4 => (true, 1000),
        0xa1b2_3c4d => (true, 1),
        0xd4c3_b2a1 => (false, 1000),
        0x4d3c_b2a1 => (false, 1),
        _ => return None,
    })
}

const fn word(bytes: [u8; 4], big_endian: bool) -> u32 {
    if big_endian {
        u32::from_be_bytes(bytes)
    } else {
        u32::from_le_bytes(bytes)
    }
}

impl Pcap {
    /// Whether a file that begins so is one of these.
    pub(super) const fn begins(first: [u8; 4]) -> bool {
        magic(first).is_some()
    }

    /// Reads the file header.
    pub(super) fn open<R: Read>(window: &mut Window<R>) -> Result<Self, Fault> {
        let offset = window.offset();
        let fault = |reason| Fault { offset, reason };
        if !window.has(HEADER).map_err(|e| fault(e.into()))? {
            return Err(fault(Reason::Cut("the file header")));
        }
        let (words, _) = window.peek(HEADER).as_chunks::<4>();
        let (big_endian, unit_ns) =
            magic(words[0]).ok_or_else(|| fault(Reason::NoCapture(words[0])))?;
        let version = word(words[1], big_endian);
        let (major, minor) = if big_endian {
            (version >> 16, version & 0xffff)
        } else {
            (version & 0xffff, version >> 16)
        };
        // Before 2.4 the two lengths of a packet stood in another order; nothing writes that any more.
        if (major, minor) != (2, 4) {
            return Err(fault(Reason::Version(major as u16, minor as u16)));
        }
        let link_number = word(words[5], big_endian);
        let link = Link::of(link_number).ok_or(Fault {
            offset: offset + 20,
            reason: Reason::Link(link_number & 0x03ff_ffff),
        })?;
        window.pass(HEADER);
        Ok(Self {
            big_endian,
            unit_ns,
            link,
            link_number,
        })
    }

    /// Whether the next packet can be had without reading on.
    #[inline]
    pub(super) fn is_at_hand<R: Read>(&self, window: &Window<R>) -> bool {
        let at_hand = window.at_hand();
        at_hand >= RECORD && {
            let (words, _) = window.peek(RECORD).as_chunks::<4>();
            at_hand - RECORD >= word(words[2], self.big_endian) as usize
        }
    }

    /// The next packet, or `None` at the end.
    #[inline]
    pub(super) fn next<'a, R: Read>(
        &self,
        window: &'a mut Window<R>,
    ) -> Result<Option<Packet<'a>>, Fault> {
        let offset = window.offset();
        let fault = |reason| Fault { offset, reason };
        let io = |e: std::io::Error| fault(e.into());
        if !window.has(RECORD).map_err(io)? {
            return if window.is_empty().map_err(io)? {
                Ok(None)
            } else {
                Err(fault(Reason::Cut("a packet's header")))
            };
        }
        let (words, _) = window.peek(RECORD).as_chunks::<4>();
        let field = |i: usize| word(words[i], self.big_endian);
        let (seconds, fraction, kept, wire_len) = (field(0), field(1), field(2), field(3));
        if kept > MAX_PACKET {
            return Err(fault(Reason::Length("the packet", kept)));
        }
        let length = RECORD + kept as usize;
        if !window.has(length).map_err(io)? {
            return Err(fault(Reason::Cut("a packet")));
        }
        let range = window.pass(length);
        Ok(Some(Packet {
            time_ns: u64::from(seconds) * 1_000_000_000 + u64::from(fraction) * self.unit_ns,
            wire_len,
            data: window.passed(range.start + RECORD..range.end),
            link: self.link,
            link_number: self.link_number,
            interface: 0,
            direction: None,
        }))
    }
}
