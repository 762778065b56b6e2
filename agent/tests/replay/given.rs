//! However a capture is cut, mixed, merged and given: the same findings.

use std::{collections::BTreeSet, fs};

use serde_json::Value;

use super::{RST_LOST, Said, number, package, strings, unpacked};

/// Offsets of the packets of a classic capture of this machine's byte order.
fn offsets(bytes: &[u8]) -> Vec<usize> {
    let (mut at, mut all) = (24, Vec::new());
    while at + 16 <= bytes.len() {
        all.push(at);
        at += 16 + u32::from_le_bytes(bytes[at + 8..at + 12].try_into().unwrap()) as usize;
    }
    all
}

/// What must be the same however a capture is cut and given.
fn figures(said: &Said) -> (BTreeSet<String>, Vec<Value>) {
    let spaces = said.last("summary")["spaces"].as_array().unwrap().clone();
    let figures = spaces
        .into_iter()
        .map(|space| {
            serde_json::json!([
                space["client.address"],
                space["server.address"],
                space["role"],
                space["totals"]
            ])
        })
        .collect();
    (said.fired(), figures)
}

#[test]
fn pieces_of_a_rotated_capture_are_one() {
    let dir = tempfile::tempdir().unwrap();
    let whole = unpacked(RST_LOST, dir.path());
    let bytes = fs::read(&whole).unwrap();
    let all = offsets(&bytes);
    let mut pieces = Vec::new();
    for (i, part) in [0..300, 300..984, 984..all.len()].into_iter().enumerate() {
        let path = dir.path().join(format!("piece{i}"));
        let end = all.get(part.end).copied().unwrap_or(bytes.len());
        fs::write(&path, [&bytes[..24], &bytes[all[part.start]..end]].concat()).unwrap();
        pieces.push(path.to_str().unwrap().to_owned());
    }
    let expected = figures(&Said::by(&[whole.to_str().unwrap()]));
    // In whatever order they are given.
    for order in [[0, 1, 2], [2, 0, 1]] {
        let said = Said::by(&order.map(|i| pieces[i].as_str()));
        assert_eq!(said.of_type("replay").count(), 1, "one place");
        assert_eq!(figures(&said), expected);
    }
}

#[test]
fn the_same_packets_twice_count_once() {
    let dir = tempfile::tempdir().unwrap();
    let whole = unpacked(RST_LOST, dir.path());
    let whole = whole.to_str().unwrap();
    assert_eq!(
        figures(&Said::by(&[whole, whole])),
        figures(&Said::by(&[whole]))
    );
}

#[test]
fn two_places_are_kept_apart() {
    let dir = package("tests/captures");
    let path = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    let said = Said::by(&[
        &path("13_half_open.server.pcap.gz"),
        &path("02_l4_reuse_rst_lost.client.pcap.gz"),
    ]);
    let places: Vec<_> = said
        .of_type("replay")
        .map(|r| strings(&r["local"]))
        .collect();
    assert_eq!(places.len(), 2, "{places:?}");
    assert_eq!(said.code, 3);
}

#[test]
fn a_piece_out_of_order_is_put_into_order() {
    let dir = tempfile::tempdir().unwrap();
    let whole = unpacked(RST_LOST, dir.path());
    let bytes = fs::read(&whole).unwrap();
    let mut records: Vec<&[u8]> = offsets(&bytes)
        .windows(2)
        .map(|w| &bytes[w[0]..w[1]])
        .collect();
    let time = |record: &[u8]| {
        let word = |at: usize| u32::from_le_bytes(record[at..at + 4].try_into().unwrap());
        u64::from(word(0)) * 1_000_000_000 + u64::from(word(4))
    };
    let mut whole_but_last = bytes[..24].to_vec();
    whole_but_last.extend(records.concat());
    // Neighbours of less than 20 ms change places.
    for i in (1..records.len()).step_by(3) {
        if time(records[i]).abs_diff(time(records[i - 1])) < 20_000_000 {
            records.swap(i, i - 1);
        }
    }
    let (ordered, mixed) = (dir.path().join("ordered"), dir.path().join("mixed"));
    fs::write(&ordered, whole_but_last).unwrap();
    fs::write(&mixed, [&bytes[..24], &records.concat()].concat()).unwrap();
    let said = Said::by(&[mixed.to_str().unwrap()]);
    assert_eq!(number(&said.last("replay")["late"]), 0);
    assert_eq!(
        figures(&said),
        figures(&Said::by(&[ordered.to_str().unwrap()]))
    );
}

/// Packets of a classic capture of this machine's byte order, with their times in nanoseconds.
pub fn packets(bytes: &[u8]) -> Vec<(u64, Vec<u8>)> {
    let unit = if bytes[..4] == 0xa1b2_3c4d_u32.to_le_bytes() {
        1
    } else {
        1000
    };
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    offsets(bytes)
        .into_iter()
        .map(|at| {
            let time = u64::from(word(at)) * 1_000_000_000 + u64::from(word(at + 4)) * unit;
            let end = at + 16 + word(at + 8) as usize;
            (time, bytes[at + 16..end].to_vec())
        })
        .collect()
}

/// A classic capture with nanoseconds, of Ethernet.
fn pcap(packets: &[(u64, Vec<u8>)]) -> Vec<u8> {
    let mut out = Vec::new();
    for word in [0xa1b2_3c4d, 0x0004_0002, 0, 0, 65_535, 1] {
        out.extend(u32::to_le_bytes(word));
    }
    for (time, data) in packets {
        let length = data.len() as u32;
        for word in [
            (time / 1_000_000_000) as u32,
            (time % 1_000_000_000) as u32,
            length,
            length,
        ] {
            out.extend(word.to_le_bytes());
        }
        out.extend(data);
    }
    out
}

/// The packet as it leaves a router: by another sender, with less TTL.
fn routed(packet: &[u8]) -> Vec<u8> {
    let mut packet = packet.to_vec();
    packet[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 7]);
    packet[22] -= 1;
    packet
}

/// The packets of a capture, and a copy of each so many nanoseconds later.
fn doubled(
    packets: &[(u64, Vec<u8>)],
    after_ns: u64,
    copy: impl Fn(&[u8]) -> Vec<u8>,
) -> Vec<(u64, Vec<u8>)> {
    let copies = packets
        .iter()
        .map(|(time, data)| (time + after_ns, copy(data)));
    let mut all: Vec<_> = packets.iter().cloned().chain(copies).collect();
    all.sort_by_key(|(time, _)| *time);
    all
}

#[test]
fn copies_of_packets_count_once() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = fs::read(unpacked(RST_LOST, dir.path())).unwrap();
    let once = packets(&bytes);
    let file = |name: &str, packets: &[(u64, Vec<u8>)]| {
        let path = dir.path().join(name);
        fs::write(&path, pcap(packets)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let by = |path: &str| Said::by(&["--vantage", "initiator", path]);
    let expected = by(&file("once", &once));
    assert_eq!(number(&expected.last("replay")["copies"]), 0);
    for (name, after_ns, twice) in [
        // `-i any` on a host with a bridge: the same packet at once.
        ("bridge", 10_000, doubled(&once, 10_000, <[u8]>::to_vec)),
        // … on a router.
        ("router", 50_000, doubled(&once, 50_000, routed)),
        // Both ends of a long way, merged.
        ("merged", 80_000_000, doubled(&once, 80_000_000, routed)),
    ] {
        let said = by(&file(name, &twice));
        assert!(
            number(&said.last("replay")["copies"]) > 500,
            "{name} {after_ns}"
        );
        assert_eq!(figures(&said), figures(&expected), "{name}");
    }
}

/// A pcapng file with an interface for each list of packets, and the end of the capture.
fn pcapng(interfaces: &[Vec<(u64, Vec<u8>)>], end_ns: u64) -> Vec<u8> {
    let block = |kind: u32, body: &[u8]| {
        let length = (body.len() as u32 + 12).to_le_bytes();
        [&kind.to_le_bytes(), &length, body, &length].concat()
    };
    let words = |words: &[u32]| -> Vec<u8> { words.iter().flat_map(|w| w.to_le_bytes()).collect() };
    let time = |ns: u64| [(ns >> 32) as u32, ns as u32];
    let mut out = block(0x0a0d_0d0a, &words(&[0x1a2b_3c4d, 1, u32::MAX, u32::MAX]));
    let mut all = Vec::new();
    for (number, packets) in (0..).zip(interfaces) {
        // if_name `eth0`, if_tsresol nanoseconds.
        let name = u32::from_le_bytes([b'e', b't', b'h', b'0' + number as u8]);
        out.extend(block(1, &words(&[1, 0, 0x0004_0002, name, 0x0001_0009, 9])));
        all.extend(packets.iter().map(|(at, data)| (*at, number, data)));
    }
    all.sort_by_key(|(at, ..)| *at);
    for (at, number, data) in all {
        let [high, low] = time(at);
        let length = data.len() as u32;
        let mut body = words(&[number, high, low, length, length]);
        body.extend(data);
        body.resize(body.len().next_multiple_of(4), 0);
        out.extend(block(6, &body));
    }
    let [high, low] = time(end_ns);
    // isb_endtime
    out.extend(block(5, &words(&[0, high, low, 0x0008_0003, high, low])));
    out
}

#[test]
fn interfaces_are_places_of_their_own_unless_they_saw_the_same_packets() {
    let dir = tempfile::tempdir().unwrap();
    let [client, server] = [RST_LOST, "13_half_open.server.pcap"].map(|name| {
        let path = unpacked(name, dir.path());
        (
            packets(&fs::read(&path).unwrap()),
            Said::by(&[path.to_str().unwrap()]),
        )
    });
    let path = dir.path().join("interfaces.pcapng");
    let replay = |interfaces: &[Vec<(u64, Vec<u8>)>]| {
        fs::write(&path, pcapng(interfaces, 0)).unwrap();
        Said::by(&[path.to_str().unwrap()])
    };
    let summaries = |said: &Said| -> Vec<Value> {
        let all = said.of_type("summary");
        all.flat_map(|s| s["spaces"].as_array().unwrap())
            .map(|space| {
                serde_json::json!([space["server.address"], space["role"], space["totals"]])
            })
            .collect()
    };

    let apart = replay(&[client.0.clone(), server.0.clone()]);
    let places: Vec<_> = apart.of_type("replay").collect();
    assert_eq!(places.len(), 2, "{places:?}");
    assert_eq!(
        strings(&places[0]["interfaces"]),
        ["eth0".to_owned()].into()
    );
    assert_eq!(
        strings(&places[1]["interfaces"]),
        ["eth1".to_owned()].into()
    );
    let expected = [summaries(&client.1), summaries(&server.1)].concat();
    assert_eq!(summaries(&apart), expected);

    // A router sees all of it twice.
    let other_side = client
        .0
        .iter()
        .map(|(at, data)| (at + 20_000, routed(data)));
    let joined = replay(&[client.0.clone(), other_side.collect()]);
    assert_eq!(joined.of_type("replay").count(), 1);
    assert_eq!(strings(&joined.last("replay")["local"]), BTreeSet::new());
    let opens = |said: &Said| -> u64 {
        let spaces = said.last("summary")["spaces"].as_array().unwrap().clone();
        spaces.iter().map(|s| number(&s["totals"]["opens"])).sum()
    };
    assert_eq!(opens(&joined), opens(&client.1));
}

#[test]
fn the_clock_goes_on_to_the_end_that_the_file_tells() {
    let dir = tempfile::tempdir().unwrap();
    let all = packets(&fs::read(unpacked(RST_LOST, dir.path())).unwrap());
    let whole = Said::by(&[unpacked(RST_LOST, dir.path()).to_str().unwrap()]);
    // Cut where the alert is still pending.
    let pending = whole.of_type("alert").find(|a| a["state"] == "pending");
    let firing = whole.of_type("alert").find(|a| a["state"] == "firing");
    // They are told in whole milliseconds.
    let time = |alert: Option<&Value>| {
        let time = alert.unwrap()["time"].as_str().unwrap();
        let time = humantime::parse_rfc3339(time).unwrap();
        time.duration_since(std::time::UNIX_EPOCH)
            .unwrap()
            .as_nanos() as u64
            + 1_000_000
    };
    let (pending, firing) = (time(pending), time(firing));
    assert!(pending + 500_000_000 < firing, "{pending} {firing}");
    let begun: Vec<_> = all.into_iter().filter(|(at, _)| *at <= pending).collect();
    let path = dir.path().join("begun.pcapng");
    for (end_ns, fires) in [(0, false), (firing, true)] {
        fs::write(&path, pcapng(std::slice::from_ref(&begun), end_ns)).unwrap();
        let said = Said::by(&[path.to_str().unwrap()]);
        assert_eq!(said.code, 3, "pending counts too: {}", said.error);
        assert_eq!(!said.fired().is_empty(), fires);
    }
}
