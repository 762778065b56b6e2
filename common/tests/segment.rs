//! The parser against packets built byte by byte, against arbitrary bytes, and against etherparse.

#[path = "segment/reference.rs"]
mod reference;
mod support;

use etherparse::EtherType;
use proptest::{collection::vec, prelude::*, test_runner::FileFailurePersistence};
use reference::by_etherparse;
use support::packet::{Extension, Frame, Ip};
use tuplewatch_common::{
    address::{FourTuple, v4_mapped},
    bytes::Captured,
    segment::{
        ETHERNET_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6, ETHERTYPE_QINQ, ETHERTYPE_VLAN, Located,
        NotSegment, SYN, Segment, locate, locate_ethernet, locate_ip, read,
    },
};

fn parse(bytes: &[u8]) -> Result<Segment, NotSegment> {
    let packet = Captured::whole(bytes);
    locate_ethernet(&packet).and_then(|at| read(&packet, &at))
}

/// What must come out of a frame.
fn expected(frame: &Frame) -> Segment {
    let (initiator, responder) = match &frame.ip {
        Ip::V4 {
            source,
            destination,
            ..
        } => (v4_mapped(*source), v4_mapped(*destination)),
        Ip::V6 {
            source,
            destination,
            ..
        } => (*source, *destination),
    };
    Segment {
        tuple: FourTuple {
            initiator,
            responder,
            responder_port: frame.ports.1,
            initiator_port: frame.ports.0,
            pad: 0,
        },
        flags: frame.flags,
        seq: frame.seq,
        ack: frame.ack,
        payload_len: frame.payload.len() as u32,
        payload_offset: frame.payload_offset() as u16,
    }
}

#[test]
fn the_common_kinds_of_packet() {
    let v4_options = Ip::V4 {
        source: [192, 0, 2, 1],
        destination: [198, 51, 100, 7],
        options: 40,
        fragment_offset: 0,
        more_fragments: false,
    };
    for ip in [
        Ip::V4,
        v4_options,
        Ip::v6(&[]),
        Ip::v6(&[Extension::HopByHop(0)]),
        Ip::v6(&[Extension::Routing(2)]),
        Ip::v6(&[Extension::Destination(1)]),
        Ip::v6(&[Extension::Authentication(4)]),
        Ip::v6(&[Extension::Fragment(0, true)]),
        Ip::v6(&[
            Extension::HopByHop(0),
            Extension::Routing(0),
            Extension::Destination(0),
            Extension::Authentication(1),
        ]),
    ] {
        for tags in [
            vec![],
            vec![ETHERTYPE_VLAN],
            vec![ETHERTYPE_QINQ, ETHERTYPE_VLAN],
        ] {
            for (tcp_options, payload, padding) in [(0, 0, 6), (20, 0, 0), (12, 1400, 0)] {
                let frame = Frame {
                    tags: tags.clone(),
                    tcp_options,
                    payload: vec![7; payload],
                    padding,
                    ..Frame::syn(ip.clone())
                };
                assert_eq!(parse(&frame.bytes()), Ok(expected(&frame)), "{frame:?}");
            }
        }
    }
}

#[test]
fn fragments_other_than_the_first_are_told_apart() {
    let fragment = |offset, more| Ip::V4 {
        source: [10, 0, 0, 1],
        destination: [10, 0, 0, 2],
        options: 0,
        fragment_offset: offset,
        more_fragments: more,
    };
    let first = Frame::syn(fragment(0, true));
    assert_eq!(parse(&first.bytes()), Ok(expected(&first)));
    for ip in [
        fragment(1, true),
        fragment(0x1fff, false),
        Ip::v6(&[Extension::Fragment(1, true)]),
        Ip::v6(&[Extension::HopByHop(0), Extension::Fragment(0x1fff, false)]),
    ] {
        assert_eq!(parse(&Frame::syn(ip).bytes()), Err(NotSegment::Fragment));
    }
}

#[test]
fn a_length_of_zero_means_the_length_on_the_wire() {
    for ip in [
        Ip::V4,
        Ip::v6(&[]),
        // The jumbo payload option of BIG TCP before Linux 7 (RFC 2675).
        Ip::v6(&[Extension::HopByHop(0)]),
    ] {
        let frame = Frame {
            payload: vec![7; 100_000],
            big: true,
            ..Frame::syn(ip)
        };
        assert_eq!(parse(&frame.bytes()), Ok(expected(&frame)));
        let bytes = frame.bytes();
        let cut = Captured {
            data: &bytes[..frame.payload_offset()],
            wire_len: bytes.len(),
        };
        let at = locate_ethernet(&cut).unwrap();
        assert_eq!(at.payload_len, 100_000, "whatever the snap length");
    }
}

#[test]
fn what_is_not_a_segment() {
    let changed = |frame: &Frame, at: usize, value: u8| {
        let mut bytes = frame.bytes();
        bytes[at] = value;
        parse(&bytes)
    };
    let v4 = Frame::syn(Ip::V4);
    let v6 = Frame::syn(Ip::v6(&[]));
    assert_eq!(changed(&v4, 13, 6), Err(NotSegment::NotIp), "ARP");
    assert_eq!(changed(&v4, 23, 17), Err(NotSegment::NotTcp), "UDP");
    assert_eq!(changed(&v6, 20, 58), Err(NotSegment::NotTcp), "ICMPv6");
    assert_eq!(changed(&v6, 20, 50), Err(NotSegment::NotTcp), "ESP");
    assert_eq!(changed(&v4, 14, 0x44), Err(NotSegment::Malformed), "IHL 4");
    assert_eq!(
        changed(&v4, 14, 0x65),
        Err(NotSegment::Malformed),
        "version"
    );
    assert_eq!(
        changed(&v6, 14, 0x40),
        Err(NotSegment::Malformed),
        "version"
    );
    assert_eq!(
        changed(&v4, 46, 0x40),
        Err(NotSegment::Malformed),
        "offset 4"
    );
    assert_eq!(
        changed(&v4, 46, 0x60),
        Err(NotSegment::Malformed),
        "a TCP header beyond the end of the IP packet"
    );
    assert_eq!(changed(&v4, 17, 39), Err(NotSegment::Malformed), "length");
    assert_eq!(changed(&v6, 19, 19), Err(NotSegment::Malformed), "length");

    let three = vec![ETHERTYPE_QINQ, ETHERTYPE_QINQ, ETHERTYPE_VLAN];
    let three_tags = Frame {
        tags: three,
        ..Frame::syn(Ip::V4)
    };
    assert_eq!(parse(&three_tags.bytes()), Err(NotSegment::NotIp));
    let five_headers = Frame::syn(Ip::v6(&[Extension::Destination(0); 5]));
    assert_eq!(parse(&five_headers.bytes()), Err(NotSegment::NotTcp));
}

/// "No next header" (RFC 8200 section 4.7) and a short datagram end before two more bytes.
#[test]
fn a_short_packet_of_another_protocol_is_not_called_unreadable() {
    for protocol in [59, 17] {
        let mut bytes = Frame::syn(Ip::v6(&[])).bytes();
        bytes[20] = protocol;
        bytes.truncate(ETHERNET_LEN + 40);
        assert_eq!(parse(&bytes), Err(NotSegment::NotTcp));
    }
}

/// In the kernel the outer tag sits in the skb's metadata.
#[test]
fn a_packet_without_a_link_layer_header_or_without_its_tag() {
    for ip in [Ip::V4, Ip::v6(&[Extension::Destination(0)])] {
        let frame = Frame::syn(ip);
        let bytes = frame.bytes();
        let bare = Captured::whole(&bytes[ETHERNET_LEN..]);
        let shift = |s: Segment| Segment {
            payload_offset: s.payload_offset - ETHERNET_LEN as u16,
            ..s
        };
        let at = locate_ip(&bare, 0).unwrap();
        assert_eq!(read(&bare, &at), Ok(shift(expected(&frame))));
        let ethertype = match frame.ip {
            Ip::V4 { .. } => ETHERTYPE_IPV4,
            Ip::V6 { .. } => ETHERTYPE_IPV6,
        };
        assert_eq!(locate(&bare, ethertype, 0), Ok(at));

        let tagged = Frame {
            tags: vec![ETHERTYPE_VLAN],
            ..frame
        };
        let bytes = tagged.bytes();
        let packet = Captured::whole(&bytes);
        assert_eq!(
            locate(&packet, ETHERTYPE_VLAN, ETHERNET_LEN),
            locate_ethernet(&packet),
        );
    }
    assert_eq!(
        locate_ip(&Captured::whole(&[0x50; 60]), 0),
        Err(NotSegment::NotIp)
    );
}

/// Cut anywhere, a packet is `Truncated` or what it was before.
fn check_every_cut(bytes: &[u8], wire_len: usize) -> Result<(), TestCaseError> {
    let look = |data| {
        let packet = Captured { data, wire_len };
        let found = locate_ethernet(&packet);
        if let Ok(at) = &found {
            read(&packet, at).expect("what was located can be read");
        }
        (found, locate_ip(&packet, 0))
    };
    let same =
        |cut: &Result<Located, _>, whole| *cut == Err(NotSegment::Truncated) || *cut == whole;
    let (whole, whole_ip) = look(bytes);
    for len in 0..bytes.len() {
        let (cut, cut_ip) = look(&bytes[..len]);
        prop_assert!(same(&cut, whole), "{len} bytes: {cut:?}, whole: {whole:?}");
        prop_assert!(same(&cut_ip, whole_ip), "{len} bytes: {cut_ip:?}");
    }
    Ok(())
}

fn extensions() -> impl Strategy<Value = Vec<Extension>> {
    let middle = prop_oneof![
        (0u8..4).prop_map(Extension::Routing),
        (0u8..4).prop_map(Extension::Destination),
        (1u8..6).prop_map(Extension::Authentication),
    ];
    let fragment = prop_oneof![
        4 => Just(None),
        1 => (0u16..3, any::<bool>()).prop_map(|(o, m)| Some(Extension::Fragment(o, m))),
    ];
    let hop_by_hop = proptest::option::of((0u8..4).prop_map(Extension::HopByHop));
    (hop_by_hop, vec(middle, 0..3), fragment)
        .prop_map(|(first, middle, last)| first.into_iter().chain(middle).chain(last).collect())
}

fn ip() -> impl Strategy<Value = Ip> {
    let offset = prop_oneof![4 => Just(0u16), 1 => 0u16..0x2000];
    prop_oneof![
        (
            any::<[u8; 4]>(),
            any::<[u8; 4]>(),
            0usize..11,
            offset,
            any::<bool>()
        )
            .prop_map(
                |(source, destination, words, fragment_offset, more_fragments)| Ip::V4 {
                    source,
                    destination,
                    options: words * 4,
                    fragment_offset,
                    more_fragments,
                }
            ),
        (any::<[u8; 16]>(), any::<[u8; 16]>(), extensions()).prop_map(
            |(source, destination, extensions)| Ip::V6 {
                source,
                destination,
                extensions,
            }
        ),
    ]
}

fn frame() -> impl Strategy<Value = Frame> {
    let tag = prop_oneof![Just(ETHERTYPE_VLAN), Just(ETHERTYPE_QINQ)];
    (
        (
            vec(tag, 0..3),
            ip(),
            any::<(u16, u16)>(),
            any::<(u32, u32)>(),
        ),
        (any::<u8>(), 0usize..11, vec(any::<u8>(), 0..80), 0usize..20),
    )
        .prop_map(
            |((tags, ip, ports, (seq, ack)), (flags, words, payload, padding))| Frame {
                tags,
                ip,
                ports,
                seq,
                ack,
                flags,
                tcp_options: words * 4,
                payload,
                big: false,
                padding,
            },
        )
}

fn config() -> ProptestConfig {
    ProptestConfig {
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("regressions"))),
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn generated_frames(frame in frame()) {
        let bytes = frame.bytes();
        let result = parse(&bytes);
        if frame.is_later_fragment() {
            prop_assert_eq!(result, Err(NotSegment::Fragment));
        } else {
            prop_assert_eq!(result, Ok(expected(&frame)));
            let located = Located {
                ip_offset: frame.ip_offset(),
                is_v6: matches!(frame.ip, Ip::V6 { .. }),
                tcp_offset: frame.tcp_offset(),
                payload_offset: frame.payload_offset(),
                payload_len: frame.payload.len() as u32,
                flags: frame.flags,
            };
            prop_assert_eq!(locate_ethernet(&Captured::whole(&bytes)), Ok(located));
            // It takes the TCP header up to its flags, no more.
            let cut = |len| locate_ethernet(&Captured { data: &bytes[..len], wire_len: bytes.len() });
            prop_assert_eq!(cut(frame.tcp_offset() + 14), Ok(located));
            prop_assert_eq!(cut(frame.tcp_offset() + 13), Err(NotSegment::Truncated));
        }
        check_every_cut(&bytes, bytes.len())?;
        if frame.is_fragment() {
            prop_assert_eq!(by_etherparse(&bytes, &[]), None, "it leaves all fragments alone");
        } else {
            prop_assert_eq!(by_etherparse(&bytes, &[]), Some(expected(&frame)));
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in vec(any::<u8>(), 0..200), wire_len: usize) {
        check_every_cut(&bytes, wire_len)?;
    }

    /// Nearly right packets: a few bytes of good ones changed.
    #[test]
    fn changed_bytes_never_panic(
        frame in frame(),
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        wire_len: usize,
    ) {
        let mut bytes = frame.bytes();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        check_every_cut(&bytes, wire_len)?;
        check_every_cut(&bytes, bytes.len())?;
        // Where both find a segment, it is the same one.
        if let (Ok(ours), Some(theirs)) = (parse(&bytes), by_etherparse(&bytes, &[])) {
            prop_assert_eq!(ours, theirs);
        }
    }
}

#[test]
fn the_names_of_ethertypes() {
    for (ours, theirs) in [
        (ETHERTYPE_IPV4, EtherType::IPV4),
        (ETHERTYPE_IPV6, EtherType::IPV6),
        (ETHERTYPE_VLAN, EtherType::VLAN_TAGGED_FRAME),
        (ETHERTYPE_QINQ, EtherType::PROVIDER_BRIDGING),
    ] {
        assert_eq!(ours, theirs.0);
    }
    assert_eq!(SYN, 2);
}
