//! Writes the packets that are the evidence into a pcapng file, each with a comment that says what it
//! shows: open it in Wireshark and read.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use anyhow::Context as _;

use crate::source::capture::{
    evidence::Exhibit,
    input::Input,
    reader::{Packet, Reader},
};

const SECTION: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const ENHANCED_PACKET: u32 = 6;
/// Options `opt_comment`, `if_name`, `if_tsresol`, `shb_userappl`.
const COMMENT: u16 = 1;
const IF_NAME: u16 = 2;
const IF_TSRESOL: u16 = 9;
const USER_APPLICATION: u16 = 4;

/// Writes the exhibits, read again from the files that they come from, in the order of time.
pub(super) fn write(path: &Path, files: &[PathBuf], exhibits: &[Exhibit]) -> anyhow::Result<()> {
    let mut wanted: BTreeMap<(u32, u64), String> = BTreeMap::new();
    for exhibit in exhibits {
        let comment = wanted
            .entry((exhibit.frame.file, exhibit.frame.number))
            .or_default();
        let reading = exhibit.reading();
        if comment.is_empty() {
            *comment = reading;
        } else if *comment != reading {
            *comment = format!("{comment}; {reading}");
        }
    }
    let mut packets = Vec::new();
    for (index, file) in (0..).zip(files) {
        let of_file = wanted.range((index, 0)..=(index, u64::MAX));
        let comments: BTreeMap<u64, &str> = of_file.map(|((_, n), c)| (*n, c.as_str())).collect();
        if !comments.is_empty() {
            collect(file, index, &comments, &mut packets)
                .with_context(|| format!("{} cannot be read again", file.display()))?;
        }
    }
    packets.sort_by_key(|p: &Kept| (p.time_ns, p.file, p.frame));
    let mut out = BufWriter::new(File::create(path)?);
    put(&mut out, files, &packets)?;
    out.into_inner().map_err(io::IntoInnerError::into_error)?;
    Ok(())
}

/// A packet to be written.
struct Kept {
    file: u32,
    frame: u64,
    time_ns: u64,
    wire_len: u32,
    link_number: u32,
    data: Vec<u8>,
    comment: String,
}

fn collect(
    path: &Path,
    file: u32,
    comments: &BTreeMap<u64, &str>,
    packets: &mut Vec<Kept>,
) -> anyhow::Result<()> {
    let mut reader = Reader::open(Input::open(path)?.bytes)?;
    let mut left = comments.len();
    while left > 0 {
        let Some(packet) = reader.next()? else {
            break;
        };
        let Packet {
            time_ns,
            wire_len,
            link_number,
            data,
            ..
        } = packet;
        let data = data.to_vec();
        let frame = reader.frame();
        if let Some(comment) = comments.get(&frame) {
            left -= 1;
            packets.push(Kept {
                file,
                frame,
                time_ns,
                wire_len,
                link_number,
                data,
                comment: format!("frame {frame} of {}: {comment}", path.display()),
            });
        }
    }
    Ok(())
}

/// One section; an interface for each file and link type.
fn put(out: &mut impl Write, files: &[PathBuf], packets: &[Kept]) -> io::Result<()> {
    let mut head = Vec::new();
    head.extend(0x1a2b_3c4du32.to_le_bytes());
    head.extend(1u16.to_le_bytes());
    head.extend(0u16.to_le_bytes());
    head.extend((-1i64).to_le_bytes());
    let application = concat!("tuplewatch ", env!("CARGO_PKG_VERSION"));
    option(&mut head, USER_APPLICATION, application.as_bytes());
    option(&mut head, 0, &[]);
    block(out, SECTION, &head)?;
    let mut interfaces: Vec<(u32, u32)> = Vec::new();
    for packet in packets {
        let key = (packet.file, packet.link_number);
        let interface = match interfaces.iter().position(|i| *i == key) {
            Some(at) => at,
            None => {
                let mut body = Vec::new();
                body.extend((packet.link_number as u16).to_le_bytes());
                body.extend([0; 6]);
                let name = files[packet.file as usize].display().to_string();
                option(&mut body, IF_NAME, name.as_bytes());
                option(&mut body, IF_TSRESOL, &[9]);
                option(&mut body, 0, &[]);
                block(out, INTERFACE, &body)?;
                interfaces.push(key);
                interfaces.len() - 1
            }
        };
        let mut body = Vec::new();
        body.extend((interface as u32).to_le_bytes());
        body.extend(((packet.time_ns >> 32) as u32).to_le_bytes());
        body.extend((packet.time_ns as u32).to_le_bytes());
        body.extend((packet.data.len() as u32).to_le_bytes());
        body.extend(packet.wire_len.to_le_bytes());
        padded(&mut body, &packet.data);
        option(&mut body, COMMENT, packet.comment.as_bytes());
        option(&mut body, 0, &[]);
        block(out, ENHANCED_PACKET, &body)?;
    }
    Ok(())
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
