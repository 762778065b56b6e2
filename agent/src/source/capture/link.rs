//! Link types: where the IP packet begins, and what the link layer says of its direction.
//!
//! Numbers and headers as the register of link-layer header types of the tcpdump project has them.

use tuplewatch_common::{
    bytes::{Bytes as _, Captured},
    segment::{
        ETHERTYPE_IPV4, ETHERTYPE_IPV6, Located, NotSegment, locate, locate_ethernet, locate_ip,
    },
};

/// A link type that can be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Link {
    /// `EN10MB`: Ethernet, with or without VLAN tags.
    Ethernet,
    /// `NULL`: BSD loopback, an address family in the byte order of the host that captured.
    Null,
    /// `LOOP`: OpenBSD loopback, the same in network byte order.
    Loop,
    /// `RAW`, `IPV4`, `IPV6`: the IP packet itself.
    Raw,
    /// `LINUX_SLL`: Linux "cooked", version 1 (`tcpdump -i any`).
    Cooked,
    /// `LINUX_SLL2`: version 2.
    Cooked2,
}

/// The way of a packet, as seen by the host that captured it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// It came in.
    In,
    /// It went out.
    Out,
}

/// What the link layer says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Found {
    /// Where the headers are.
    pub located: Located,
    /// Which way the packet went, where the link layer tells.
    pub direction: Option<Direction>,
    /// The interface of the host that captured, where the link layer tells, else 0.
    pub interface: u32,
}

impl Link {
    /// The link type of a number in a file header.
    #[must_use]
    pub const fn of(number: u32) -> Option<Self> {
        // Above are the length of the frame check sequence and bits without a meaning yet.
        Some(match number & 0x03ff_ffff {
            0 => Self::Null,
            1 => Self::Ethernet,
            // 12 and 14 are what some systems write into files for 101.
            12 | 14 | 101 | 228 | 229 => Self::Raw,
            108 => Self::Loop,
            113 => Self::Cooked,
            276 => Self::Cooked2,
            _ => return None,
        })
    }

    /// The link-layer address of who sent the frame, as a number; 0 where there is none.
    #[inline]
    #[must_use]
    pub fn sender(self, frame: &[u8]) -> u64 {
        let at = match self {
            Self::Ethernet | Self::Cooked => 6,
            Self::Cooked2 => 12,
            Self::Null | Self::Loop | Self::Raw => return 0,
        };
        let before = frame.get(at - 2..).and_then(|frame| frame.first_chunk());
        before.map_or(0, |bytes| u64::from_be_bytes(*bytes) << 16 >> 16)
    }

    /// Finds the TCP header of a frame.
    ///
    /// # Errors
    /// [`NotSegment`] says why there is no readable TCP segment.
    #[inline(always)]
    pub fn find(self, bytes: &Captured<'_>) -> Result<Found, NotSegment> {
        let truncated = NotSegment::Truncated;
        let (mut direction, mut interface) = (None, 0);
        let located = match self {
            Self::Ethernet => locate_ethernet(bytes)?,
            Self::Raw => locate_ip(bytes, 0)?,
            Self::Null | Self::Loop => {
                let family = bytes.u32(0).ok_or(truncated)?;
                let family = if family > 0xffff {
                    family.swap_bytes()
                } else {
                    family
                };
                // AF_INET is 2 everywhere; AF_INET6 is 10 on Linux, 24, 28 or 30 on the BSDs.
                let ethertype = match family {
                    2 => ETHERTYPE_IPV4,
                    10 | 24 | 28 | 30 => ETHERTYPE_IPV6,
                    _ => return Err(NotSegment::NotIp),
                };
                locate(bytes, ethertype, 4)?
            }
            Self::Cooked => {
                direction = cooked(bytes.u16(0).ok_or(truncated)?);
                locate(bytes, bytes.u16(14).ok_or(truncated)?, 16)?
            }
            Self::Cooked2 => {
                interface = bytes.u32(4).ok_or(truncated)?;
                direction = cooked(bytes.u8(10).ok_or(truncated)?.into());
                locate(bytes, bytes.u16(0).ok_or(truncated)?, 20)?
            }
        };
        Ok(Found {
            located,
            direction,
            interface,
        })
    }
}

/// The packet type of a cooked header (`if_packet.h`): 0 for us, 4 from us; what was for somebody else
/// (3) says nothing of our side.
const fn cooked(kind: u16) -> Option<Direction> {
    match kind {
        0 => Some(Direction::In),
        4 => Some(Direction::Out),
        _ => None,
    }
}

/// Names of link types that people meet and that hold no IP packet we could read.
const OTHERS: [(u32, &str); 16] = [
    (9, "PPP"),
    (50, "PPP_HDLC"),
    (51, "PPP_ETHER"),
    (105, "IEEE802_11"),
    (119, "IEEE802_11_PRISM"),
    (127, "IEEE802_11_RADIOTAP"),
    (147, "USER0"),
    (162, "USER15"),
    (187, "BLUETOOTH_HCI_H4"),
    (192, "PPI"),
    (220, "USB_LINUX_MMAPPED"),
    (239, "NFLOG"),
    (249, "USBPCAP"),
    (252, "WIRESHARK_UPPER_PDU"),
    (253, "NETLINK"),
    (258, "PKTAP"),
];

/// Why a link type is refused, and what to do.
#[must_use]
pub fn refusal(number: u32) -> String {
    let name = OTHERS
        .iter()
        .find(|(n, _)| *n == number)
        .map_or("unknown", |(_, name)| name);
    format!(
        "link type {number} ({name}) cannot be read; those that can are Ethernet (1), Linux cooked (113, 276), raw IP \
         (101, 228, 229) and BSD loopback (0, 108): capture on an interface of one of these"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// IPv4 and TCP headers of a SYN.
    fn ip() -> Vec<u8> {
        let mut ip = vec![0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0];
        ip.extend([10, 0, 0, 1, 10, 0, 0, 2]);
        ip.extend([
            4, 0, 0, 80, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0, 0, 0, 0, 0, 0,
        ]);
        ip
    }

    fn find(number: u32, header: &[u8]) -> Result<Found, NotSegment> {
        let mut bytes = header.to_vec();
        bytes.extend(ip());
        let found = Link::of(number).unwrap().find(&Captured::whole(&bytes))?;
        assert_eq!(found.located.ip_offset, header.len());
        assert_eq!(found.located.flags, 2);
        Ok(found)
    }

    #[test]
    fn every_link_type_leads_to_the_same_packet() {
        let mut ethernet = vec![0; 12];
        ethernet.extend([8, 0]);
        find(1, &ethernet).unwrap();
        // With the length of the frame check sequence in the upper bits.
        find(1 | 0x4400_0000, &ethernet).unwrap();
        let mut qinq = vec![0; 12];
        qinq.extend([0x88, 0xa8, 0, 1, 0x81, 0, 0, 2, 8, 0]);
        find(1, &qinq).unwrap();
        for raw in [12, 14, 101, 228] {
            find(raw, &[]).unwrap();
        }
        find(0, &[2, 0, 0, 0]).unwrap();
        find(0, &[0, 0, 0, 2]).unwrap();
        find(108, &[0, 0, 0, 2]).unwrap();
        assert_eq!(find(0, &[0, 0, 0, 99]), Err(NotSegment::NotIp));
        let mut cooked = [0; 16];
        cooked[14] = 8;
        assert_eq!(find(113, &cooked).unwrap().direction, Some(Direction::In));
        cooked[1] = 4;
        assert_eq!(find(113, &cooked).unwrap().direction, Some(Direction::Out));
        let mut cooked2 = [0; 20];
        (cooked2[0], cooked2[7], cooked2[10]) = (8, 3, 4);
        let found = find(276, &cooked2).unwrap();
        assert_eq!(
            (found.direction, found.interface),
            (Some(Direction::Out), 3)
        );
    }

    #[test]
    fn refused_link_types_are_named() {
        assert_eq!(Link::of(105), None);
        assert!(refusal(105).contains("105 (IEEE802_11)"));
        assert!(refusal(4711).contains("4711 (unknown)"));
    }
}
