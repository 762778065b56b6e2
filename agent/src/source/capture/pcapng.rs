//! pcapng files: sections of either byte order, several interfaces, each with its own clock.
//!
//! Blocks and options as the IETF draft `draft-ietf-opsawg-pcapng` has them.

use std::{io, io::Read};

use super::{
    clock::Clock,
    fault::{Fault, Reason},
    link::{Direction, Link},
    reader::{MAX_PACKET, Packet},
    window::Window,
};

/// The block that begins a section; it reads the same in either byte order.
const SECTION: u32 = 0x0a0d_0d0a;
/// Tells the byte order of a section.
const BYTE_ORDER_MAGIC: u32 = 0x1a2b_3c4d;
const INTERFACE: u32 = 1;
/// The packet block that the enhanced one has replaced.
const OLD_PACKET: u32 = 2;
const SIMPLE_PACKET: u32 = 3;
/// What an interface counted, and when the capture on it ended.
const STATISTICS: u32 = 5;
const ENHANCED_PACKET: u32 = 6;

/// Type, length, and the length again at the end.
const FRAME: u32 = 12;
/// Room for the largest packet with its fields and options.
const MAX_BLOCK: u32 = MAX_PACKET + (1 << 20);
/// Interfaces of one section.
const MAX_INTERFACES: usize = 65_536;
/// Bytes of an interface's name that are kept.
const MAX_NAME: usize = 64;
/// Link types that are remembered to be named.
const MAX_REFUSED: usize = 8;

/// The state of a section.
#[derive(Default)]
pub(super) struct PcapNg {
    big_endian: bool,
    in_section: bool,
    interfaces: Vec<Interface>,
    /// Interfaces of the sections before.
    before: u32,
    refused: Vec<u32>,
    unreadable: u64,
    /// For packets without a time of their own.
    last_ns: u64,
    /// The latest end of the capture on an interface, where the file tells.
    end_ns: Option<u64>,
}

struct Interface {
    link: Option<Link>,
    link_number: u32,
    snap_len: u32,
    clock: Clock,
    name: Option<String>,
}

/// A time is written as two words.
#[inline]
fn ticks(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

/// The fields of a packet block.
struct Fields {
    interface: u32,
    ticks: Option<u64>,
    kept: u32,
    wire_len: u32,
    /// Where the data starts in the block.
    data_at: usize,
}

impl PcapNg {
    /// Whether a file that begins so is one of these.
    pub(super) const fn begins(first: [u8; 4]) -> bool {
        u32::from_be_bytes(first) == SECTION
    }

    /// Packets of interfaces that cannot be read, so far.
    pub(super) const fn unreadable(&self) -> u64 {
        self.unreadable
    }

    /// Their link types.
    pub(super) fn refused_links(&self) -> &[u32] {
        &self.refused
    }

    /// The name of an interface, counted through all sections, if it is of this one.
    pub(super) fn interface_name(&self, interface: u32) -> Option<String> {
        let at = interface.checked_sub(self.before)?;
        self.interfaces.get(at as usize)?.name.clone()
    }

    /// When the capture ended, if the file has told by now.
    pub(super) const fn end_ns(&self) -> Option<u64> {
        self.end_ns
    }

    fn u16(&self, block: &[u8], at: usize) -> Option<u16> {
        let bytes = *block.get(at..)?.first_chunk()?;
        Some(if self.big_endian {
            u16::from_be_bytes(bytes)
        } else {
            u16::from_le_bytes(bytes)
        })
    }

    #[inline]
    fn u32(&self, block: &[u8], at: usize) -> Option<u32> {
        let bytes = *block.get(at..)?.first_chunk()?;
        Some(if self.big_endian {
            u32::from_be_bytes(bytes)
        } else {
            u32::from_le_bytes(bytes)
        })
    }

    /// Whether the next block can be had without reading on.
    #[inline]
    pub(super) fn is_at_hand<R: Read>(&self, window: &Window<R>) -> bool {
        let at_hand = window.at_hand();
        at_hand >= FRAME as usize && {
            let length = self.u32(window.peek(FRAME as usize), 4);
            length.is_some_and(|length| at_hand >= length as usize)
        }
    }

    /// The next packet, or `None` at the end.
    #[inline]
    pub(super) fn next<'a, R: Read>(
        &mut self,
        window: &'a mut Window<R>,
    ) -> Result<Option<Packet<'a>>, Fault> {
        loop {
            let offset = window.offset();
            let fault = |reason| Fault { offset, reason };
            let io = |e: io::Error| fault(e.into());
            if !window.has(FRAME as usize).map_err(io)? {
                return if window.is_empty().map_err(io)? {
                    Ok(None)
                } else {
                    Err(fault(Reason::Cut("a block's header")))
                };
            }
            let head = window.peek(FRAME as usize);
            let mut kind = self.u32(head, 0).unwrap_or(0);
            if kind == SECTION {
                self.begin_section(head).map_err(fault)?;
            } else if !self.in_section {
                kind = 0;
            }
            let length = self.u32(window.peek(FRAME as usize), 4).unwrap_or(0);
            if length < FRAME || !length.is_multiple_of(4) {
                return Err(fault(Reason::Length("the block", length)));
            }
            if !matches!(
                kind,
                SECTION | INTERFACE | OLD_PACKET | SIMPLE_PACKET | STATISTICS | ENHANCED_PACKET
            ) {
                if !window.skip(length as usize).map_err(io)? {
                    return Err(fault(Reason::Cut("a block")));
                }
                continue;
            }
            if length > MAX_BLOCK {
                return Err(fault(Reason::Length("the block", length)));
            }
            if !window.has(length as usize).map_err(io)? {
                return Err(fault(Reason::Cut("a block")));
            }
            let range = window.pass(length as usize);
            let block = window.passed(range.clone());
            let again = self.u32(block, block.len() - 4).unwrap_or(0);
            if again != length {
                return Err(fault(Reason::Unequal(length, again)));
            }
            let body_end = block.len() - 4;
            let body = &block[..body_end];
            match kind {
                SECTION => {}
                INTERFACE => self.describe_interface(body).map_err(fault)?,
                STATISTICS => self.end_ns = self.end_ns.max(self.end_of_interface(body)),
                _ => {
                    let fields = self.fields(kind, body).map_err(fault)?;
                    let Some(interface) = self.interfaces.get(fields.interface as usize) else {
                        return Err(fault(Reason::NoInterface(fields.interface)));
                    };
                    let Some(link) = interface.link else {
                        self.unreadable += 1;
                        continue;
                    };
                    let data_end = fields.data_at + fields.kept as usize;
                    let direction = self.direction(kind, body, data_end);
                    if let Some(ticks) = fields.ticks {
                        self.last_ns = interface.clock.ns(ticks);
                    }
                    let data = range.start + fields.data_at..range.start + data_end;
                    return Ok(Some(Packet {
                        time_ns: self.last_ns,
                        wire_len: fields.wire_len,
                        data: window.passed(data),
                        link,
                        link_number: interface.link_number,
                        interface: self.before + fields.interface,
                        direction,
                    }));
                }
            }
        }
    }

    fn begin_section(&mut self, head: &[u8]) -> Result<(), Reason> {
        let magic = *head[8..].first_chunk().unwrap_or(&[0; 4]);
        self.big_endian = if u32::from_be_bytes(magic) == BYTE_ORDER_MAGIC {
            true
        } else if u32::from_le_bytes(magic) == BYTE_ORDER_MAGIC {
            false
        } else {
            return Err(Reason::ByteOrder(u32::from_be_bytes(magic)));
        };
        self.in_section = true;
        self.before = self
            .before
            .saturating_add(u32::try_from(self.interfaces.len()).unwrap_or(u32::MAX));
        self.interfaces.clear();
        Ok(())
    }

    fn describe_interface(&mut self, body: &[u8]) -> Result<(), Reason> {
        if self.interfaces.len() >= MAX_INTERFACES {
            return Err(Reason::Interfaces(MAX_INTERFACES));
        }
        let short = || Reason::Length("the interface description", body.len() as u32 + 4);
        let link_number = u32::from(self.u16(body, 8).ok_or_else(short)?);
        let snap_len = self.u32(body, 12).ok_or_else(short)?;
        let link = Link::of(link_number);
        if link.is_none()
            && self.refused.len() < MAX_REFUSED
            && !self.refused.contains(&link_number)
        {
            self.refused.push(link_number);
        }
        let mut clock = Clock::DEFAULT;
        let mut name = None;
        self.options(body, 16, |code, value| match (code, value) {
            // if_name
            (2, value) => {
                let text = String::from_utf8_lossy(&value[..value.len().min(MAX_NAME)]);
                name = Some(text.trim_end_matches('\0').to_owned());
            }
            // if_tsresol
            (9, [resolution, ..]) => clock.unit = Clock::unit(*resolution),
            // if_tsoffset, in seconds
            (14, value) if value.len() == 8 => {
                let bytes = *value.first_chunk().unwrap_or(&[0; 8]);
                let seconds = if self.big_endian {
                    i64::from_be_bytes(bytes)
                } else {
                    i64::from_le_bytes(bytes)
                };
                clock.offset_ns = seconds.saturating_mul(1_000_000_000);
            }
            _ => {}
        });
        self.interfaces.push(Interface {
            link,
            link_number,
            snap_len,
            clock,
            name,
        });
        Ok(())
    }

    /// The option `isb_endtime` of an interface statistics block.
    fn end_of_interface(&self, body: &[u8]) -> Option<u64> {
        let interface = self.interfaces.get(self.u32(body, 8)? as usize)?;
        let mut end_ns = None;
        self.options(body, 20, |code, value| {
            if code == 3
                && let (Some(high), Some(low)) = (self.u32(value, 0), self.u32(value, 4))
            {
                end_ns = Some(interface.clock.ns(ticks(high, low)));
            }
        });
        end_ns
    }

    /// Calls `f` with code and value of each option from `at` on.
    fn options(&self, body: &[u8], mut at: usize, mut f: impl FnMut(u16, &[u8])) {
        while let (Some(code), Some(length)) = (self.u16(body, at), self.u16(body, at + 2)) {
            let Some(value) = body.get(at + 4..at + 4 + usize::from(length)) else {
                return;
            };
            if code == 0 {
                return;
            }
            f(code, value);
            at += 4 + usize::from(length).next_multiple_of(4);
        }
    }

    #[inline]
    fn fields(&self, kind: u32, body: &[u8]) -> Result<Fields, Reason> {
        let short = || Reason::Length("the packet block", body.len() as u32 + 4);
        let field = |at| self.u32(body, at).ok_or_else(short);
        let fields = match kind {
            SIMPLE_PACKET => {
                let wire_len = field(8)?;
                let snap_len = self.interfaces.first().map_or(0, |i| i.snap_len);
                let limit = if snap_len == 0 { u32::MAX } else { snap_len };
                Fields {
                    interface: 0,
                    ticks: None,
                    kept: wire_len.min(limit),
                    wire_len,
                    data_at: 12,
                }
            }
            _ => Fields {
                interface: if kind == OLD_PACKET {
                    self.u16(body, 8).ok_or_else(short)?.into()
                } else {
                    field(8)?
                },
                ticks: Some(ticks(field(12)?, field(16)?)),
                kept: field(20)?,
                wire_len: field(24)?,
                data_at: 28,
            },
        };
        // What does not fit into its block is damaged.
        if fields.kept as usize > body.len() - fields.data_at.min(body.len()) {
            return Err(Reason::Length("the packet", fields.kept));
        }
        Ok(fields)
    }

    /// The direction in the options of a packet block.
    #[inline]
    fn direction(&self, kind: u32, body: &[u8], data_end: usize) -> Option<Direction> {
        let options = data_end.next_multiple_of(4);
        if kind == SIMPLE_PACKET || options + 8 > body.len() {
            return None;
        }
        let mut direction = None;
        self.options(body, options, |code, value| {
            // epb_flags
            if code == 2 {
                direction = match self.u32(value, 0).unwrap_or(0) & 3 {
                    1 => Some(Direction::In),
                    2 => Some(Direction::Out),
                    _ => None,
                };
            }
        });
        direction
    }
}
