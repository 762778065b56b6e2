//! The readers against files made here in every variant, and against another reader.

use std::{fs, io::Cursor, path::Path};

use pcap_parser::{Block, PcapBlockOwned, PcapError, create_reader};
use proptest::prelude::*;

use super::{
    fault::{Fault, Reason},
    input::Input,
    link::Direction,
    reader::Reader,
};

mod clock;

/// What a reader says of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Said {
    time_ns: u64,
    wire_len: u32,
    data: Vec<u8>,
    interface: u32,
}

/// All packets, and the fault after them.
fn read(bytes: &[u8]) -> (Vec<Said>, Option<Fault>) {
    let mut all = Vec::new();
    let mut reader = match Reader::open(bytes) {
        Ok(reader) => reader,
        Err(fault) => return (all, Some(fault)),
    };
    loop {
        match reader.next() {
            Ok(Some(packet)) => all.push(Said {
                time_ns: packet.time_ns,
                wire_len: packet.wire_len,
                data: packet.data.to_vec(),
                interface: packet.interface,
            }),
            Ok(None) => return (all, None),
            Err(fault) => return (all, Some(fault)),
        }
    }
}

/// Writes numbers in one byte order.
#[derive(Clone, Copy)]
struct Order {
    big: bool,
}

impl Order {
    fn u16(self, n: u16) -> [u8; 2] {
        if self.big {
            n.to_be_bytes()
        } else {
            n.to_le_bytes()
        }
    }
    fn u32(self, n: u32) -> [u8; 4] {
        if self.big {
            n.to_be_bytes()
        } else {
            n.to_le_bytes()
        }
    }
    fn u64(self, n: u64) -> [u8; 8] {
        if self.big {
            n.to_be_bytes()
        } else {
            n.to_le_bytes()
        }
    }

    fn pcap(self, magic: u32, packets: &[Said]) -> Vec<u8> {
        let unit = if magic == 0xa1b2_3c4d { 1 } else { 1000 };
        let mut out = Vec::new();
        out.extend(self.u32(magic));
        out.extend(self.u16(2));
        out.extend(self.u16(4));
        for n in [0, 0, 65_535, 1] {
            out.extend(self.u32(n));
        }
        for p in packets {
            out.extend(self.u32((p.time_ns / 1_000_000_000) as u32));
            out.extend(self.u32((p.time_ns % 1_000_000_000 / unit) as u32));
            out.extend(self.u32(p.data.len() as u32));
            out.extend(self.u32(p.wire_len));
            out.extend(&p.data);
        }
        out
    }

    fn block(self, kind: u32, body: &[u8]) -> Vec<u8> {
        let length = self.u32(body.len() as u32 + 12);
        [&self.u32(kind), &length, body, &length].concat()
    }

    fn section(self) -> Vec<u8> {
        let body = [
            &self.u32(0x1a2b_3c4d)[..],
            &self.u16(1),
            &self.u16(0),
            &self.u64(u64::MAX),
        ];
        self.block(0x0a0d_0d0a, &body.concat())
    }

    fn option(self, code: u16, value: &[u8]) -> Vec<u8> {
        let mut out = [&self.u16(code)[..], &self.u16(value.len() as u16), value].concat();
        out.resize(out.len().next_multiple_of(4), 0);
        out
    }

    fn interface(self, link: u16, options: &[u8]) -> Vec<u8> {
        let head = [&self.u16(link)[..], &[0; 2], &self.u32(0)].concat();
        self.block(1, &[&head, options].concat())
    }

    fn packet(self, interface: u32, ticks: u64, p: &Said, options: &[u8]) -> Vec<u8> {
        let mut body = Vec::new();
        body.extend(self.u32(interface));
        body.extend(self.u32((ticks >> 32) as u32));
        body.extend(self.u32(ticks as u32));
        body.extend(self.u32(p.data.len() as u32));
        body.extend(self.u32(p.wire_len));
        body.extend(&p.data);
        body.resize(body.len().next_multiple_of(4), 0);
        body.extend(options);
        self.block(6, &body)
    }

    /// Two sections; the second has two interfaces, one of them with microseconds and an offset.
    fn pcapng(self, packets: &[Said]) -> Vec<u8> {
        let nanoseconds = self.option(9, &[9]);
        let offset = self.option(14, &self.u64(1));
        let mut out = self.section();
        out.extend(self.interface(1, &nanoseconds));
        let half = packets.len() / 2;
        for p in &packets[..half] {
            out.extend(self.packet(0, p.time_ns, p, &[]));
        }
        // A block that nobody knows, a name resolution block.
        out.extend(self.block(0x0bad, b"whatever"));
        out.extend(self.block(4, &[0; 4]));
        out.extend(self.section());
        out.extend(self.interface(1, &offset));
        out.extend(self.interface(1, &nanoseconds));
        for (i, p) in packets[half..].iter().enumerate() {
            out.extend(if i % 2 == 0 {
                self.packet(0, p.time_ns / 1000 - 1_000_000, p, &[])
            } else {
                let inbound = [self.option(1, b"a comment"), self.option(2, &self.u32(1))].concat();
                self.packet(1, p.time_ns, p, &inbound)
            });
        }
        out
    }
}

/// Packets with times in whole microseconds, from 2001 on.
fn packets() -> impl Strategy<Value = Vec<Said>> {
    let packet = (
        1_000_000_000_000_000u64..4_000_000_000_000_000,
        any::<u16>(),
        prop::collection::vec(any::<u8>(), 0..200),
    );
    let packet = packet.prop_map(|(us, wire_len, data)| Said {
        time_ns: us * 1000,
        wire_len: u32::from(wire_len),
        data,
        interface: 0,
    });
    prop::collection::vec(packet, 0..12)
}

fn with_interfaces(packets: &[Said]) -> Vec<Said> {
    let half = packets.len() / 2;
    let number = |i: usize| {
        if i < half {
            0
        } else {
            1 + (i - half) as u32 % 2
        }
    };
    let packets = packets.iter().cloned().enumerate();
    packets
        .map(|(i, p)| Said {
            interface: number(i),
            ..p
        })
        .collect()
}

/// A record ends at each of these offsets.
fn ends(bytes: &[u8]) -> Vec<u64> {
    let mut all = Vec::new();
    let mut reader = Reader::open(Cursor::new(bytes)).unwrap();
    while reader.next().unwrap().is_some() {
        all.push(reader.offset());
    }
    all
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_variant_reads_the_same(packets in packets()) {
        for big in [false, true] {
            let order = Order { big };
            for magic in [0xa1b2_c3d4, 0xa1b2_3c4d] {
                let (all, fault) = read(&order.pcap(magic, &packets));
                prop_assert!(fault.is_none());
                prop_assert_eq!(&all, &packets);
            }
            let (all, fault) = read(&order.pcapng(&packets));
            prop_assert!(fault.is_none(), "{:?}", fault);
            prop_assert_eq!(all, with_interfaces(&packets));
        }
    }

    /// Cut anywhere, everything before the cut is read; the fault is where the broken record begins.
    #[test]
    fn what_is_cut_is_read_up_to_the_cut(packets in packets(), at: prop::sample::Index) {
        let order = Order { big: false };
        for bytes in [order.pcap(0xa1b2_3c4d, &packets), order.pcapng(&packets)] {
            let ends = ends(&bytes);
            let at = at.index(bytes.len());
            let (whole, _) = read(&bytes);
            let (part, fault) = read(&bytes[..at]);
            let complete = ends.iter().filter(|end| **end <= at as u64).count();
            prop_assert_eq!(&part[..], &whole[..complete]);
            if let Some(fault) = fault {
                // Of nothing it is said that it is empty.
                prop_assert!(at == 0 || matches!(fault.reason, Reason::Cut(_)), "{}", fault);
                prop_assert!(fault.offset <= at as u64);
                prop_assert!(complete == 0 || fault.offset >= ends[complete - 1]);
            }
        }
    }

    /// Whatever the bytes are: no panic, no packet that is not in them.
    #[test]
    fn damaged_files_end(packets in packets(), damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let order = Order { big: false };
        for mut bytes in [order.pcap(0xa1b2_c3d4, &packets), order.pcapng(&packets)] {
            for (at, value) in &damage {
                let at = at.index(bytes.len());
                bytes[at] = *value;
            }
            let (all, fault) = read(&bytes);
            prop_assert!(all.iter().map(|p| p.data.len()).sum::<usize>() <= bytes.len());
            if let Some(fault) = fault {
                prop_assert!(fault.offset <= bytes.len() as u64);
            }
        }
    }
}

/// The packets as `pcap-parser` reads them: times in ticks there, so only lengths and data.
fn others(bytes: &[u8]) -> Vec<(u32, Vec<u8>)> {
    let mut reader = create_reader(1 << 20, bytes).unwrap();
    let mut all = Vec::new();
    loop {
        match reader.next() {
            Ok((length, block)) => {
                match block {
                    PcapBlockOwned::Legacy(p) => all.push((p.origlen, p.data.to_vec())),
                    PcapBlockOwned::NG(Block::EnhancedPacket(p)) => {
                        all.push((p.origlen, p.data[..p.caplen as usize].to_vec()));
                    }
                    _ => {}
                }
                reader.consume(length);
            }
            Err(PcapError::Eof) => return all,
            Err(PcapError::Incomplete(_)) => reader.refill().unwrap(),
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn another_reader_reads_the_same() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = 0;
    for dir in [
        "tests/captures",
        "../common/tests/data",
        "../../shared/captures",
    ] {
        for entry in fs::read_dir(package.join(dir))
            .into_iter()
            .flatten()
            .flatten()
        {
            let path = entry.path();
            let name = path.to_string_lossy().into_owned();
            if !name.contains(".pcap") || name.contains("_cut.") {
                continue;
            }
            let mut bytes = Vec::new();
            let mut input = Input::open(&path).unwrap().bytes;
            std::io::Read::read_to_end(&mut input, &mut bytes).unwrap();
            let (ours, fault) = read(&bytes);
            assert!(fault.is_none(), "{name}: {fault:?}");
            let ours: Vec<_> = ours.into_iter().map(|p| (p.wire_len, p.data)).collect();
            assert!(ours == others(&bytes), "{name}");
            files += 1;
        }
    }
    assert!(files >= 10, "{files}");
}

#[test]
fn what_a_block_says_of_the_direction() {
    let order = Order { big: true };
    let packet = Said {
        time_ns: 1,
        wire_len: 3,
        data: vec![1, 2, 3],
        interface: 0,
    };
    let mut bytes = [order.section(), order.interface(1, &[])].concat();
    for flags in [0, 1, 2] {
        let option = order.option(2, &order.u32(flags));
        bytes.extend(order.packet(0, 1, &packet, &option));
    }
    let mut reader = Reader::open(bytes.as_slice()).unwrap();
    for expected in [None, Some(Direction::In), Some(Direction::Out)] {
        assert_eq!(reader.next().unwrap().unwrap().direction, expected);
    }
}

#[test]
fn interfaces_of_other_link_types_are_left_out_by_name() {
    let order = Order { big: false };
    let packet = Said {
        time_ns: 1,
        wire_len: 1,
        data: vec![0],
        interface: 0,
    };
    let bytes = [
        order.section(),
        order.interface(127, &[]),
        order.interface(1, &[]),
        order.packet(0, 1, &packet, &[]),
        order.packet(1, 1, &packet, &[]),
    ];
    let bytes = bytes.concat();
    let mut reader = Reader::open(bytes.as_slice()).unwrap();
    assert_eq!(reader.next().unwrap().unwrap().interface, 1);
    assert_eq!(reader.frame(), 2, "Wireshark counts both");
    assert!(reader.next().unwrap().is_none());
    assert_eq!(reader.left_out(), (&[127][..], 1));
}

#[test]
fn faults_name_the_place() {
    let order = Order { big: false };
    let fault = |bytes: &[u8]| read(bytes).1.unwrap().to_string();
    let mut long = order.pcap(0xa1b2_c3d4, &[]);
    long.extend([0; 8]);
    long.extend(order.u32(u32::MAX));
    long.extend([0; 4]);
    assert!(
        fault(&long).starts_with("at byte 24: the packet has an impossible length of 4294967295")
    );
    let mut unequal = [order.section(), order.interface(1, &[])].concat();
    let last = unequal.len() - 4;
    unequal[last] += 4;
    assert!(
        fault(&unequal)
            .starts_with("at byte 28: the block has a length of 20 bytes at its beginning and 24")
    );
    let nobody = Said {
        time_ns: 0,
        wire_len: 0,
        data: Vec::new(),
        interface: 0,
    };
    let bytes = [order.section(), order.packet(3, 0, &nobody, &[])].concat();
    assert!(fault(&bytes).contains("interface 3, of which there is no description"));
    assert!(fault(&[1, 2, 3, 4, 5]).contains("[01, 02, 03, 04]"));
}
