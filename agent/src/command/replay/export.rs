//! Writes the packets that are the evidence into a pcapng file, each with a comment that says what it
//! shows: open it in Wireshark and read.

use std::{
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    fs::File,
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use tuplewatch_common::{
    address::FourTuple,
    segment::{FIN, RST, SYN},
};

use crate::{
    core::time::Moment,
    source::capture::{
        evidence::{Exhibit, either, ordinary},
        file::segment,
        input::Input,
        link::Direction,
        reader::{Packet, Reader},
        write::{Commented, Writer},
    },
};

/// Packets of the connections before on the same ports: an opening and an end, with some sent again.
const FORMER: usize = 8;

/// Writes the exhibits, read again from the files that they come from, in the order of time.
pub(super) fn write(
    path: &Path,
    files: &[PathBuf],
    exhibits: &[Exhibit],
    end: Moment,
) -> anyhow::Result<()> {
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
    let ports = exhibits.iter().map(|e| either(&e.tuple)).collect();
    let mut packets = Vec::new();
    for (index, file) in (0..).zip(files) {
        let of_file = wanted.range((index, 0)..=(index, u64::MAX));
        let comments: BTreeMap<u64, &str> = of_file.map(|((_, n), c)| (*n, c.as_str())).collect();
        if !comments.is_empty() {
            collect(file, index, &comments, &ports, &mut packets)
                .with_context(|| format!("{} cannot be read again", file.display()))?;
        }
    }
    packets.sort_by_key(|p: &Kept| (p.time_ns, p.file, p.frame));
    let mut out = BufWriter::new(File::create(path)?);
    put(&mut out, files, &packets, end)?;
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
    direction: Option<Direction>,
    data: Vec<u8>,
    comment: String,
}

/// Takes the packets with these comments, and those that opened and ended the connections before on the
/// same ports.
fn collect(
    path: &Path,
    file: u32,
    comments: &BTreeMap<u64, &str>,
    ports: &HashSet<FourTuple>,
    packets: &mut Vec<Kept>,
) -> anyhow::Result<()> {
    let mut reader = Reader::open(Input::open(path)?.bytes)?;
    let mut former: HashMap<FourTuple, VecDeque<Kept>> = HashMap::new();
    let mut left = comments.len();
    while left > 0 {
        let Some(packet) = reader.next()? else {
            break;
        };
        let tuple = segment(&packet)
            .filter(|(segment, ..)| segment.flags & (SYN | FIN | RST) != 0)
            .map(|(segment, ..)| (either(&segment.tuple), segment.flags))
            .filter(|(tuple, _)| ports.contains(tuple));
        let Packet {
            time_ns,
            wire_len,
            link_number,
            direction,
            data,
            ..
        } = packet;
        // The number is known once nothing is borrowed from the reader any more.
        let data = data.to_vec();
        let frame = reader.frame();
        let kept = |comment: &str| Kept {
            file,
            frame,
            time_ns,
            wire_len,
            link_number,
            direction,
            data,
            comment: format!("frame {frame} of {}: {comment}", path.display()),
        };
        if let Some(comment) = comments.get(&frame) {
            left -= 1;
            if let Some((tuple, _)) = tuple {
                packets.extend(former.remove(&tuple).unwrap_or_default());
            }
            packets.push(kept(comment));
        } else if let Some((tuple, flags)) = tuple {
            let before = former.entry(tuple).or_default();
            before.push_back(kept(ordinary(flags, true)));
            if before.len() > FORMER {
                before.pop_front();
            }
        }
    }
    Ok(())
}

/// An interface for each file and link type.
fn put(out: &mut impl Write, files: &[PathBuf], packets: &[Kept], end: Moment) -> io::Result<()> {
    let mut writer = Writer::begin(out, "")?;
    for packet in packets {
        let name = files[packet.file as usize].display().to_string();
        let interface = writer.interface(packet.file, packet.link_number, &name)?;
        let commented = Commented {
            time_ns: packet.time_ns,
            wire_len: packet.wire_len,
            data: &packet.data,
            direction: packet.direction,
            comment: &packet.comment,
        };
        writer.packet(interface, &commented)?;
    }
    writer.end(end.0)?;
    Ok(())
}
