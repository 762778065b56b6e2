//! Reads classic capture files: both byte orders, microseconds and nanoseconds.

use std::{fs, io, path::Path};

/// One packet of a file.
pub struct Packet {
    /// Nanoseconds since the epoch.
    pub time_ns: u64,
    /// Length on the wire.
    pub wire_len: usize,
    /// What was kept of it.
    pub data: Vec<u8>,
}

/// Link type Ethernet.
pub const ETHERNET: u32 = 1;

/// Reads the packets of an Ethernet capture.
///
/// # Errors
/// What the file system said, or `InvalidData` with the reason.
pub fn read(path: &Path) -> io::Result<Vec<Packet>> {
    let bytes = fs::read(path)?;
    let invalid = |why: String| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("{}: {why}", path.display()),
        )
    };
    let word = |at: usize, big: bool| -> Option<u32> {
        let w: [u8; 4] = bytes.get(at..at + 4)?.try_into().ok()?;
        Some(if big {
            u32::from_be_bytes(w)
        } else {
            u32::from_le_bytes(w)
        })
    };
    let (big, unit) = match word(0, true) {
        Some(0xa1b2_c3d4) => (true, 1_000),
        Some(0xa1b2_3c4d) => (true, 1),
        Some(0xd4c3_b2a1) => (false, 1_000),
        Some(0x4d3c_b2a1) => (false, 1),
        magic => {
            return Err(invalid(format!(
                "no classic capture file: magic {magic:x?}"
            )));
        }
    };
    let link = word(20, big).map(|w| w & 0x0fff_ffff);
    if link != Some(ETHERNET) {
        return Err(invalid(format!("link type {link:?} is not Ethernet")));
    }
    let mut packets = Vec::new();
    let mut at = 24;
    while at < bytes.len() {
        let cut = || invalid(format!("cut short in the packet at byte {at}"));
        let field = |i: usize| word(at + 4 * i, big).ok_or_else(cut);
        let (seconds, fraction, kept, wire_len) = (field(0)?, field(1)?, field(2)?, field(3)?);
        let data = bytes
            .get(at + 16..at + 16 + kept as usize)
            .ok_or_else(cut)?
            .to_vec();
        at += 16 + data.len();
        packets.push(Packet {
            time_ns: u64::from(seconds) * 1_000_000_000 + u64::from(fraction) * unit,
            wire_len: wire_len as usize,
            data,
        });
    }
    Ok(packets)
}
