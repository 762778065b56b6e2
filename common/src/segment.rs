//! Reads the headers of a packet down to TCP.

use crate::{
    address::{FourTuple, v4_mapped},
    bytes::Bytes,
};

/// FIN flag of the TCP header (RFC 9293 section 3.1).
pub const FIN: u8 = 0x01;
/// SYN flag.
pub const SYN: u8 = 0x02;
/// RST flag.
pub const RST: u8 = 0x04;
/// ACK flag.
pub const ACK: u8 = 0x10;

/// EtherType of IPv4.
pub const ETHERTYPE_IPV4: u16 = 0x0800;
/// EtherType of IPv6.
pub const ETHERTYPE_IPV6: u16 = 0x86dd;
/// EtherType of an 802.1Q tag.
pub const ETHERTYPE_VLAN: u16 = 0x8100;
/// EtherType of an 802.1ad (QinQ) outer tag.
pub const ETHERTYPE_QINQ: u16 = 0x88a8;
/// Length of an Ethernet header.
pub const ETHERNET_LEN: usize = 14;

/// At most so many VLAN tags are skipped (QinQ has two).
const MAX_VLAN_TAGS: usize = 2;
/// At most so many IPv6 extension headers are skipped; real traffic has none or one.
const MAX_EXTENSION_HEADERS: usize = 4;

const IPPROTO_TCP: u8 = 6;

/// What the rules need to know of one TCP segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// Addresses and ports, read as if the sender were the initiator.
    pub tuple: FourTuple,
    /// The eight flag bits of the TCP header.
    pub flags: u8,
    /// Where the payload starts, in bytes from the beginning of the frame.
    pub payload_offset: u16,
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement number (meaningful with [`ACK`] only).
    pub ack: u32,
    /// Bytes of payload on the wire (of all merged segments for a GRO-sized skb).
    pub payload_len: u32,
}

/// Where the headers of a TCP segment lie, and as much of it as tells whether the rest matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Located {
    /// Start of the IP header.
    pub ip_offset: usize,
    /// The IP header is of version 6.
    pub is_v6: bool,
    /// Start of the TCP header.
    pub tcp_offset: usize,
    /// Start of the payload.
    pub payload_offset: usize,
    /// Bytes of payload on the wire.
    pub payload_len: u32,
    /// The eight flag bits of the TCP header.
    pub flags: u8,
}

/// Why a packet has no [`Segment`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotSegment {
    /// Neither IPv4 nor IPv6.
    NotIp,
    /// IP, but another protocol than TCP.
    NotTcp,
    /// A fragment other than the first: its TCP header is elsewhere.
    Fragment,
    /// The bytes at hand end before the header does.
    Truncated,
    /// A length field contradicts the packet.
    Malformed,
}

/// Finds the TCP header of an Ethernet frame.
///
/// # Errors
/// [`NotSegment`] says why the frame holds no readable TCP segment.
#[inline(always)]
pub fn locate_ethernet<B: Bytes>(bytes: &B) -> Result<Located, NotSegment> {
    let ethertype = bytes.u16(12).ok_or(NotSegment::Truncated)?;
    locate(bytes, ethertype, ETHERNET_LEN)
}

/// Finds the TCP header from `offset` on, after a link-layer header that announced `ethertype`; VLAN
/// tags still in the packet are skipped. (In the kernel the outer tag usually sits in the skb's
/// metadata, and `skb->protocol` is the first type after it.)
///
/// # Errors
/// [`NotSegment`] says why there is no readable TCP segment.
#[inline(always)]
pub fn locate<B: Bytes>(
    bytes: &B,
    mut ethertype: u16,
    mut offset: usize,
) -> Result<Located, NotSegment> {
    let mut tags = 0;
    while tags < MAX_VLAN_TAGS {
        if ethertype != ETHERTYPE_VLAN && ethertype != ETHERTYPE_QINQ {
            break;
        }
        ethertype = bytes.u16(offset + 2).ok_or(NotSegment::Truncated)?;
        offset += 4;
        tags += 1;
    }
    match ethertype {
        ETHERTYPE_IPV4 => locate_ipv4(bytes, offset),
        ETHERTYPE_IPV6 => locate_ipv6(bytes, offset),
        _ => Err(NotSegment::NotIp),
    }
}

/// Finds the TCP header of a packet that starts with its IP header.
///
/// # Errors
/// [`NotSegment`] says why there is no readable TCP segment.
#[inline(always)]
pub fn locate_ip<B: Bytes>(bytes: &B, offset: usize) -> Result<Located, NotSegment> {
    match bytes.u8(offset).ok_or(NotSegment::Truncated)? >> 4 {
        4 => locate_ipv4(bytes, offset),
        6 => locate_ipv6(bytes, offset),
        _ => Err(NotSegment::NotIp),
    }
}

/// RFC 791 section 3.1.
#[inline(always)]
fn locate_ipv4<B: Bytes>(bytes: &B, offset: usize) -> Result<Located, NotSegment> {
    let version_ihl = bytes.u8(offset).ok_or(NotSegment::Truncated)?;
    let header = ((version_ihl & 0x0f) as usize) * 4;
    if version_ihl >> 4 != 4 || header < 20 {
        return Err(NotSegment::Malformed);
    }
    if bytes.u8(offset + 9).ok_or(NotSegment::Truncated)? != IPPROTO_TCP {
        return Err(NotSegment::NotTcp);
    }
    if bytes.u16(offset + 6).ok_or(NotSegment::Truncated)? & 0x1fff != 0 {
        return Err(NotSegment::Fragment);
    }
    let total = bytes.u16(offset + 2).ok_or(NotSegment::Truncated)? as usize;
    // BIG TCP (IPv4 since 6.3) puts 0 into the length of a packet above 64 KiB.
    let end = if total == 0 {
        bytes.wire_len()
    } else {
        offset + total
    };
    locate_tcp(bytes, offset, false, offset + header, end)
}

/// RFC 8200 sections 3 and 4.
#[inline(always)]
fn locate_ipv6<B: Bytes>(bytes: &B, offset: usize) -> Result<Located, NotSegment> {
    if bytes.u8(offset).ok_or(NotSegment::Truncated)? >> 4 != 6 {
        return Err(NotSegment::Malformed);
    }
    let payload = bytes.u16(offset + 4).ok_or(NotSegment::Truncated)? as usize;
    // A jumbogram (RFC 2675), which is also how BIG TCP looks, announces 0.
    let end = if payload == 0 {
        bytes.wire_len()
    } else {
        offset + 40 + payload
    };
    let mut next = bytes.u8(offset + 6).ok_or(NotSegment::Truncated)?;
    let mut at = offset + 40;
    let mut i = 0;
    while i < MAX_EXTENSION_HEADERS {
        if next == IPPROTO_TCP {
            break;
        }
        if !matches!(next, 0 | 43 | 44 | 51 | 60) {
            return Err(NotSegment::NotTcp);
        }
        let following = bytes.u8(at).ok_or(NotSegment::Truncated)?;
        let units = bytes.u8(at + 1).ok_or(NotSegment::Truncated)? as usize;
        match next {
            // Hop-by-Hop Options, Routing, Destination Options.
            0 | 43 | 60 => at += (units + 1) * 8,
            // Fragment header: fixed length; the offset is in its third and fourth byte.
            44 => {
                if bytes.u16(at + 2).ok_or(NotSegment::Truncated)? & 0xfff8 != 0 {
                    return Err(NotSegment::Fragment);
                }
                at += 8;
            }
            // Authentication Header counts in units of four bytes (RFC 4302 section 2.2).
            _ => at += (units + 2) * 4,
        }
        next = following;
        i += 1;
    }
    if next != IPPROTO_TCP {
        return Err(NotSegment::NotTcp);
    }
    locate_tcp(bytes, offset, true, at, end)
}

/// RFC 9293 section 3.1. `end` is where the IP packet ends.
#[inline(always)]
fn locate_tcp<B: Bytes>(
    bytes: &B,
    ip_offset: usize,
    is_v6: bool,
    tcp_offset: usize,
    end: usize,
) -> Result<Located, NotSegment> {
    let offset_and_flags = bytes.u16(tcp_offset + 12).ok_or(NotSegment::Truncated)?;
    let header = ((offset_and_flags >> 12) as usize) * 4;
    let payload_offset = tcp_offset + header;
    if header < 20 || end < payload_offset {
        return Err(NotSegment::Malformed);
    }
    Ok(Located {
        ip_offset,
        is_v6,
        tcp_offset,
        payload_offset,
        payload_len: (end - payload_offset) as u32,
        flags: offset_and_flags as u8,
    })
}

/// Reads the rest of a located segment.
///
/// # Errors
/// [`NotSegment::Truncated`] if the bytes at hand end too early.
#[inline(always)]
pub fn read<B: Bytes>(bytes: &B, at: &Located) -> Result<Segment, NotSegment> {
    let mut segment = Segment::default();
    read_into(bytes, at, &mut segment)?;
    Ok(segment)
}

/// Reads the rest of a located segment to where it is to stay; on an error that is left half done.
///
/// # Errors
/// [`NotSegment::Truncated`] if the bytes at hand end too early.
#[inline(always)]
pub fn read_into<B: Bytes>(
    bytes: &B,
    at: &Located,
    segment: &mut Segment,
) -> Result<(), NotSegment> {
    let truncated = NotSegment::Truncated;
    read_tuple(bytes, at, &mut segment.tuple)?;
    segment.flags = at.flags;
    segment.seq = bytes.u32(at.tcp_offset + 4).ok_or(truncated)?;
    segment.ack = bytes.u32(at.tcp_offset + 8).ok_or(truncated)?;
    segment.payload_len = at.payload_len;
    segment.payload_offset = at.payload_offset as u16;
    Ok(())
}

/// Reads addresses and ports of a located segment, as if the sender were the initiator.
///
/// # Errors
/// [`NotSegment::Truncated`] if the bytes at hand end too early.
#[inline(always)]
pub fn read_tuple<B: Bytes>(
    bytes: &B,
    at: &Located,
    tuple: &mut FourTuple,
) -> Result<(), NotSegment> {
    let truncated = NotSegment::Truncated;
    if at.is_v6 {
        tuple.initiator = bytes.array16(at.ip_offset + 8).ok_or(truncated)?;
        tuple.responder = bytes.array16(at.ip_offset + 24).ok_or(truncated)?;
    } else {
        tuple.initiator = v4_mapped(bytes.array4(at.ip_offset + 12).ok_or(truncated)?);
        tuple.responder = v4_mapped(bytes.array4(at.ip_offset + 16).ok_or(truncated)?);
    }
    tuple.initiator_port = bytes.u16(at.tcp_offset).ok_or(truncated)?;
    tuple.responder_port = bytes.u16(at.tcp_offset + 2).ok_or(truncated)?;
    Ok(())
}
