//! etherparse as an independent parser, on the packets of recordings too.

use std::{fs, path::Path};

use etherparse::{NetSlice, SlicedPacket, TransportSlice};
use tuplewatch_common::{
    address::{FourTuple, v4_mapped},
    bytes::Captured,
    segment::{Segment, locate_ethernet, read},
};

use super::support::pcap;

/// What etherparse makes of a frame whose bytes beyond `kept` the snap length has cut: those are taken
/// as zeros, which are valid TCP options.
pub fn by_etherparse(kept: &[u8], cut: &[u8]) -> Option<Segment> {
    let bytes = [kept, cut].concat();
    let packet = SlicedPacket::from_ethernet(&bytes).ok()?;
    let (net, transport) = (packet.net?, packet.transport?);
    let TransportSlice::Tcp(tcp) = transport else {
        return None;
    };
    let (initiator, responder) = match &net {
        NetSlice::Ipv4(ip) => (
            v4_mapped(ip.header().source()),
            v4_mapped(ip.header().destination()),
        ),
        NetSlice::Ipv6(ip) => (ip.header().source(), ip.header().destination()),
        NetSlice::Arp(_) => return None,
    };
    let flags = [
        tcp.fin(),
        tcp.syn(),
        tcp.rst(),
        tcp.psh(),
        tcp.ack(),
        tcp.urg(),
        tcp.ece(),
        tcp.cwr(),
    ];
    let start = bytes.as_ptr() as usize;
    Some(Segment {
        tuple: FourTuple {
            initiator,
            responder,
            responder_port: tcp.destination_port(),
            initiator_port: tcp.source_port(),
            pad: 0,
        },
        flags: flags
            .iter()
            .enumerate()
            .map(|(bit, set)| u8::from(*set) << bit)
            .sum(),
        seq: tcp.sequence_number(),
        ack: tcp.acknowledgment_number(),
        payload_len: tcp.payload().len() as u32,
        payload_offset: (tcp.payload().as_ptr() as usize - start) as u16,
    })
}

/// Returns the number of segments compared.
fn agree_on(path: &Path) -> usize {
    let mut segments = 0;
    for packet in pcap::read(path).unwrap() {
        let cut = vec![0; packet.wire_len - packet.data.len()];
        let captured = Captured {
            data: &packet.data,
            wire_len: packet.wire_len,
        };
        let ours = locate_ethernet(&captured).and_then(|at| read(&captured, &at));
        let theirs = by_etherparse(&packet.data, &cut);
        assert_eq!(
            ours.ok(),
            theirs,
            "{} at {} ns",
            path.display(),
            packet.time_ns
        );
        segments += usize::from(theirs.is_some());
    }
    segments
}

#[test]
fn agrees_with_etherparse_on_recordings() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut segments = 0;
    for (folder, required) in [("tests/data", true), ("../../shared/captures", false)] {
        let folder = here.join(folder);
        let Ok(files) = fs::read_dir(&folder) else {
            assert!(!required, "{} belongs to the project", folder.display());
            eprintln!("SKIPPED: no recordings in {}", folder.display());
            continue;
        };
        for file in files {
            let path = file.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            // The any-device of Linux has another link type; one recording is cut in a record.
            let readable =
                name.ends_with(".pcap") && !name.contains("-any") && !name.contains("_cut");
            if readable {
                segments += agree_on(&path);
            }
        }
    }
    println!("{segments} segments compared");
    assert!(segments > 7_000, "{segments}");
}
