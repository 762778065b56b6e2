//! Writes packets with comments into a pcapng file: open it in Wireshark and read.
//!
//! Blocks and options as draft-ietf-opsawg-pcapng has them: one section, little endian, times in
//! nanoseconds.

use std::io::{self, Write};

use super::link::Direction;

const SECTION: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const STATISTICS: u32 = 5;
const ENHANCED_PACKET: u32 = 6;
/// Options `opt_comment`, `if_name`, `epb_flags`, `if_tsresol`, `shb_userappl`, `isb_endtime`.
const COMMENT: u16 = 1;
const IF_NAME: u16 = 2;
const FLAGS: u16 = 2;
const IF_TSRESOL: u16 = 9;
const USER_APPLICATION: u16 = 4;
const ISB_ENDTIME: u16 = 3;

/// A packet to be written.
#[derive(Clone, Copy, Debug)]
pub struct Commented<'a> {
    /// Nanoseconds since the Unix epoch.
    pub time_ns: u64,
    /// Length on the wire.
    pub wire_len: u32,
    /// What is at hand of it.
    pub data: &'a [u8],
    /// Which way it went, if that is known.
    pub direction: Option<Direction>,
    /// What it shows.
    pub comment: &'a str,
}

/// A pcapng file in the making.
pub struct Writer<W> {
    out: W,
    /// Key and link type of those written so far.
    interfaces: Vec<(u32, u32)>,
}

impl<W: Write> Writer<W> {
    /// Begins a section. `comment` is about all of it; none if it is empty.
    ///
    /// # Errors
    /// The output cannot be written to.
    pub fn begin(mut out: W, comment: &str) -> io::Result<Self> {
        let mut head = Vec::new();
        head.extend(0x1a2b_3c4du32.to_le_bytes());
        head.extend(1u16.to_le_bytes());
        head.extend(0u16.to_le_bytes());
        head.extend((-1i64).to_le_bytes());
        if !comment.is_empty() {
            option(&mut head, COMMENT, comment.as_bytes());
        }
        let application = concat!("tuplewatch ", env!("CARGO_PKG_VERSION"));
        option(&mut head, USER_APPLICATION, application.as_bytes());
        option(&mut head, 0, &[]);
        block(&mut out, SECTION, &head)?;
        Ok(Self {
            out,
            interfaces: Vec::new(),
        })
    }

    /// The number of an interface, which is written first if it is new. `key` tells those of one link
    /// type apart.
    ///
    /// # Errors
    /// The output cannot be written to.
    pub fn interface(&mut self, key: u32, link: u32, name: &str) -> io::Result<u32> {
        let known = self.interfaces.iter().position(|i| *i == (key, link));
        let at = match known {
            Some(at) => at,
            None => {
                let mut body = Vec::new();
                body.extend((link as u16).to_le_bytes());
                body.extend([0; 6]);
                option(&mut body, IF_NAME, name.as_bytes());
                option(&mut body, IF_TSRESOL, &[9]);
                option(&mut body, 0, &[]);
                block(&mut self.out, INTERFACE, &body)?;
                self.interfaces.push((key, link));
                self.interfaces.len() - 1
            }
        };
        Ok(at as u32)
    }

    /// Writes a packet of an interface.
    ///
    /// # Errors
    /// The output cannot be written to.
    pub fn packet(&mut self, interface: u32, packet: &Commented<'_>) -> io::Result<()> {
        let mut body = Vec::new();
        body.extend(interface.to_le_bytes());
        body.extend(((packet.time_ns >> 32) as u32).to_le_bytes());
        body.extend((packet.time_ns as u32).to_le_bytes());
        body.extend((packet.data.len() as u32).to_le_bytes());
        body.extend(packet.wire_len.to_le_bytes());
        padded(&mut body, packet.data);
        option(&mut body, COMMENT, packet.comment.as_bytes());
        if let Some(direction) = packet.direction {
            let flags: u32 = match direction {
                Direction::In => 1,
                Direction::Out => 2,
            };
            option(&mut body, FLAGS, &flags.to_le_bytes());
        }
        option(&mut body, 0, &[]);
        block(&mut self.out, ENHANCED_PACKET, &body)
    }

    /// Tells when the capture ended, and gives the output back.
    ///
    /// # Errors
    /// The output cannot be written to.
    pub fn end(mut self, end_ns: u64) -> io::Result<W> {
        let words = [(end_ns >> 32) as u32, end_ns as u32];
        let time: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
        for interface in 0..self.interfaces.len() as u32 {
            let mut body = Vec::new();
            body.extend(interface.to_le_bytes());
            body.extend(&time);
            option(&mut body, ISB_ENDTIME, &time);
            option(&mut body, 0, &[]);
            block(&mut self.out, STATISTICS, &body)?;
        }
        Ok(self.out)
    }
}

fn block(out: &mut impl Write, kind: u32, body: &[u8]) -> io::Result<()> {
    let length = (body.len() as u32 + 12).to_le_bytes();
    out.write_all(&kind.to_le_bytes())?;
    out.write_all(&length)?;
    out.write_all(body)?;
    out.write_all(&length)
}

fn option(body: &mut Vec<u8>, code: u16, value: &[u8]) {
    let value = &value[..value.len().min(usize::from(u16::MAX))];
    body.extend(code.to_le_bytes());
    body.extend((value.len() as u16).to_le_bytes());
    padded(body, value);
}

fn padded(body: &mut Vec<u8>, bytes: &[u8]) {
    body.extend(bytes);
    body.resize(body.len().next_multiple_of(4), 0);
}
