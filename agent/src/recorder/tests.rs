use std::{fs, os::unix::fs::PermissionsExt as _};

use tuplewatch_common::{
    address::{Point, PortSpaceKey, Role, v4_mapped},
    recorder::{ETHERNET, LEAVES, Recorded, SNAP_LEN},
    segment::{ACK, FIN, RST, SYN},
};

use super::{
    evidence::{self, Picked},
    folder::Folder,
    writer::Job,
    *,
};
use crate::{
    sink::fixture,
    source::capture::{
        file::segment,
        link::{Direction, Link},
        reader::Reader,
    },
};

const INITIATOR: [u8; 4] = [198, 51, 100, 7];
const RESPONDER: [u8; 4] = [203, 0, 113, 10];
const SECOND: u64 = 1_000_000_000;

/// A port and a sequence and acknowledgement number.
type Numbers = (u16, u32, u32);

/// A packet of the port space with `after` bytes behind its TCP header, of which none is at hand.
fn recorded(
    at: u64,
    from_initiator: bool,
    flags: u8,
    (port, seq, ack): Numbers,
    after: u16,
) -> Recorded {
    let mut packet = vec![0; 12];
    packet.extend([8, 0]);
    packet.extend([0x45, 0]);
    packet.extend((40 + after).to_be_bytes());
    packet.extend([0, 0, 0, 0, 64, 6, 0, 0]);
    let ends = [(INITIATOR, port), (RESPONDER, 443)];
    let [from, to] = if from_initiator {
        ends
    } else {
        [ends[1], ends[0]]
    };
    packet.extend(from.0);
    packet.extend(to.0);
    packet.extend(from.1.to_be_bytes());
    packet.extend(to.1.to_be_bytes());
    packet.extend(seq.to_be_bytes());
    packet.extend(ack.to_be_bytes());
    packet.extend([0x50, flags, 0, 0, 0, 0, 0, 0]);
    let mut bytes = [0xee; SNAP_LEN];
    bytes[..packet.len()].copy_from_slice(&packet);
    Recorded {
        time_ns: at,
        ifindex: 3,
        wire_len: 54 + u32::from(after),
        len: packet.len() as u16,
        flags: ETHERNET | if from_initiator { 0 } else { LEAVES },
        status: 0,
        pad: 0,
        bytes,
    }
}

fn space() -> PortSpaceKey {
    PortSpaceKey {
        initiator: v4_mapped(INITIATOR),
        responder: v4_mapped(RESPONDER),
        responder_port: 443,
        role: Role::Responder as u8,
        point: Point::Wire as u8,
        netns: 0,
    }
}

/// A connection that the responder closes (its FIN carries data), and a SYN on the same port a second
/// later that meets a bare ACK.
fn incident(port: u16, at: u64) -> Vec<Recorded> {
    let later = at + SECOND;
    vec![
        recorded(at, true, SYN, (port, 100, 0), 0),
        recorded(at + 1, false, SYN | ACK, (port, 500, 101), 0),
        recorded(at + 2, true, ACK, (port, 101, 501), 0),
        recorded(at + 3, false, FIN | ACK, (port, 501, 101), 30),
        recorded(at + 4, true, FIN | ACK, (port, 101, 532), 0),
        recorded(later, true, SYN, (port, 90, 0), 0),
        recorded(later + 1, false, ACK, (port, 532, 102), 0),
        recorded(later + 2, true, RST, (port, 102, 0), 0),
    ]
}

fn pick(all: &[Recorded]) -> Vec<Picked> {
    let mut picked = evidence::pick(&[space()], |see| all.iter().for_each(see));
    picked.remove(0)
}

fn job(packets: Vec<Picked>, most: usize) -> Job {
    Job {
        id: fixture::alert().id,
        summary: "why".to_owned(),
        space: space(),
        stuck: Vec::new(),
        at: fixture::NOW,
        most,
        packets,
        interfaces: BTreeMap::from([(3, ("eth0".to_owned(), false))]),
        clock: WallClock::capture(),
    }
}

/// Time, link, direction and length of each packet of a file.
fn read(file: &[u8]) -> Vec<(u64, Link, Option<Direction>, u32)> {
    let mut reader = Reader::open(file).unwrap();
    let mut packets = Vec::new();
    while let Some(packet) = reader.next().unwrap() {
        let (segment, ..) = segment(&packet).expect("a segment");
        let headers = usize::from(segment.payload_offset);
        assert_eq!(packet.data.len(), headers, "headers only");
        packets.push((
            packet.time_ns,
            packet.link,
            packet.direction,
            packet.wire_len,
        ));
    }
    packets
}

#[test]
fn packets_of_the_port_space_are_picked_and_put_into_order() {
    let mut all = incident(2048, 10 * SECOND);
    all.reverse();
    let mut other = recorded(1, true, SYN, (2048, 1, 0), 0);
    other.bytes[14 + 19] ^= 1;
    all.push(other);
    let mut cut = recorded(2, true, SYN, (2048, 1, 0), 0);
    cut.len = 40;
    all.push(cut);
    let mut no_ip = recorded(3, true, SYN, (2048, 1, 0), 0);
    no_ip.bytes[12] = 9;
    all.push(no_ip);
    let times: Vec<u64> = pick(&all).iter().map(|p| p.recorded.time_ns).collect();
    assert_eq!(times.len(), 8);
    assert!(times.is_sorted());

    let everywhere = PortSpaceKey::default();
    let picked = evidence::pick(&[everywhere], |see| all.iter().for_each(see));
    assert_eq!(picked[0].len(), 9, "a key of zeros stands for all");
}

#[test]
fn every_packet_says_what_it_shows() {
    let packets = pick(&incident(2048, 10 * SECOND));
    let comments: Vec<String> = evidence::comment(&space(), &[], &packets, 100)
        .into_iter()
        .map(|(_, comment)| comment)
        .collect();
    let wanted = [
        "SYN: opens the former connection, on whose ports another SYN comes later",
        "SYN-ACK: the responder accepts",
        "ACK",
        "FIN: this end closes the former connection, on whose ports a SYN comes later",
        "FIN: this end closes the former connection, on whose ports a SYN comes later",
        "SYN, initial sequence number 90: the former connection on this port was closed 0.9 s before",
        "bare ACK instead of a SYN-ACK: it acknowledges 102, not 91; that number belongs to an older \
         connection",
        "RST: the initiator knows no such connection and answers the bare ACK",
    ];
    assert_eq!(comments, wanted);
}

#[test]
fn what_has_symptoms_goes_first_where_there_is_no_room_for_all() {
    let mut all = incident(2048, 10 * SECOND);
    for port in 3000..3100u16 {
        let at = 20 * SECOND + u64::from(port) * 1000;
        all.push(recorded(at, true, SYN, (port, 1, 0), 0));
        all.push(recorded(at + 1, false, SYN | ACK, (port, 9, 2), 0));
        all.push(recorded(at + 2, true, ACK, (port, 2, 10), 0));
    }
    let packets = pick(&all);
    assert_eq!(packets.len(), 308);
    let kept = evidence::comment(&space(), &[], &packets, 14);
    assert_eq!(kept.len(), 14);
    let ports = |port: u16| {
        let of = |p: &&Picked| {
            let tuple = p.segment.tuple;
            tuple.initiator_port == port || tuple.responder_port == port
        };
        kept.iter().map(|(p, _)| *p).filter(of).count()
    };
    assert_eq!(ports(2048), 8);
    assert_eq!(
        (ports(3099), ports(3098)),
        (3, 3),
        "the latest of the others"
    );
    assert!(kept.is_sorted_by_key(|(p, _)| p.recorded.time_ns));
}

#[test]
fn segments_of_a_stuck_connection_go_first_and_say_what_they_are() {
    let mut all = vec![
        recorded(SECOND, true, ACK, (2048, 100, 500), 40),
        recorded(2 * SECOND, false, ACK, (2048, 500, 140), 30),
        recorded(3 * SECOND, true, ACK, (2048, 140, 530), 0),
        recorded(4 * SECOND, true, ACK, (2048, 140, 530), 50),
        recorded(5 * SECOND, true, ACK, (2048, 140, 530), 50),
        recorded(6 * SECOND, false, ACK, (2048, 529, 140), 0),
    ];
    all[1].status = 503;
    for port in 3000..3010u16 {
        let at = 20 * SECOND + u64::from(port);
        all.push(recorded(at, true, SYN, (port, 1, 0), 0));
    }
    let packets = pick(&all);
    let stuck = [packets[1].segment.tuple];
    let kept = evidence::comment(&space(), &stuck, &packets, 6);
    let comments: Vec<String> = kept.into_iter().map(|(_, comment)| comment).collect();
    let wanted = [
        "40 bytes of data",
        "30 bytes of data: a response with status 503, a failure",
        "ACK",
        "50 bytes of data",
        "50 bytes of data sent again: they were not acknowledged in time",
        "keep-alive probe: nothing new, it asks whether the other end is there",
    ];
    assert_eq!(comments, wanted);
}

#[test]
fn a_file_is_read_back_packet_by_packet() {
    let all = incident(2048, fixture::NOW.0);
    let bytes = job(pick(&all), 100).bytes().unwrap();
    let read = read(&bytes);
    let wanted: Vec<_> = all
        .iter()
        .map(|r| {
            let direction = if r.flags & LEAVES != 0 {
                Direction::Out
            } else {
                Direction::In
            };
            (r.time_ns, Link::Ethernet, Some(direction), r.wire_len)
        })
        .collect();
    assert_eq!(read, wanted);
    let text = String::from_utf8_lossy(&bytes);
    for part in ["eth0", "evidence of the alert l4_reuse_in_time_wait/wire/"] {
        assert!(text.contains(part), "{part}");
    }
    let rest_of_a_place = [0xee; 8];
    assert!(!bytes.windows(8).any(|b| b == rest_of_a_place));
}

#[test]
fn interfaces_without_ethernet_header_are_raw_ip() {
    let mut all = incident(2048, fixture::NOW.0);
    for recorded in &mut all {
        recorded.flags &= !ETHERNET;
        recorded.ifindex = 9;
        recorded.len -= 14;
        recorded.bytes.rotate_left(14);
    }
    // One packet of another link type beside them.
    all.push(recorded(
        fixture::NOW.0 + 2 * SECOND,
        true,
        SYN,
        (2050, 1, 0),
        0,
    ));
    let mut job = job(pick(&all), 100);
    job.interfaces.insert(3, ("veth1".to_owned(), true));
    let read = read(&job.bytes().unwrap());
    let links: Vec<_> = read.iter().map(|(_, link, ..)| *link).collect();
    assert_eq!(links[..8], [Link::Raw; 8]);
    assert_eq!(links[8..], [Link::Ethernet]);
    assert_eq!(read[8].2, None, "the node's end of a veth");
}

#[test]
fn the_oldest_files_make_room_and_other_peoples_stay() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a/b");
    let mut folder = Folder::open(&path, 1000).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&path), 0o700);
    fs::write(path.join("mine.pcapng"), [0; 5000]).unwrap();
    let name = |n: u32| format!("20261130T05153{n}.123Z-x.pcapng");
    for n in 0..4 {
        let stored = folder.store(&name(n), &[n as u8; 300]).unwrap();
        assert_eq!(mode(&stored), 0o600);
    }
    let there = || {
        let names = fs::read_dir(&path).unwrap();
        let mut names: Vec<_> = names
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    let kept = [name(1), name(2), name(3), "mine.pcapng".to_owned()];
    assert_eq!(there(), kept);
    assert_eq!(folder.usage(), (3, 900));
    assert_eq!(fs::read(path.join(name(3))).unwrap(), [3; 300]);
    assert!(folder.store(&name(5), &[0; 1001]).is_err());
    assert_eq!(there(), kept, "nothing is deleted for what never fits");

    // What is deleted by hand counts no more, and what was left unfinished goes.
    fs::remove_file(path.join(name(2))).unwrap();
    fs::write(path.join(format!("{}.tmp", name(7))), [0; 99]).unwrap();
    folder.store(&name(8), &[8; 300]).unwrap();
    assert_eq!(there(), [&name(1), &name(3), &name(8), "mine.pcapng"]);

    // A smaller bound at the next start.
    let folder = Folder::open(&path, 650).unwrap();
    assert_eq!(there(), [&name(3), &name(8), "mine.pcapng"]);
    assert_eq!(folder.usage(), (2, 600));
}

#[test]
fn a_directory_that_cannot_be_written_is_refused_with_the_reason() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "").unwrap();
    for path in [&file, &file.join("below")] {
        let error = Recorder::open(path, 1 << 20, WallClock::capture()).unwrap_err();
        let said = format!("{error:#}");
        assert!(said.contains(&path.display().to_string()), "{said}");
    }
}

/// Gives a job to the recorder as [`Recorder::take`] does, without a kernel.
fn ask(recorder: &mut Recorder, at: Moment) {
    let mut job = job(pick(&incident(2048, fixture::NOW.0)), 100);
    job.at = at;
    recorder.ask(job);
    recorder.listen(Duration::from_secs(10));
}

#[test]
fn an_alert_gets_its_file_named_and_another_one_only_after_a_while() {
    let directory = tempfile::tempdir().unwrap();
    let mut recorder = Recorder::open(directory.path(), 1 << 20, WallClock::capture()).unwrap();
    let mut alert = fixture::alert();
    alert.evidence_file = None;
    assert!(recorder.is_due(&alert));
    ask(&mut recorder, alert.at);
    recorder.name(&mut alert);
    let path = alert.evidence_file.clone().expect("a file");
    let name = path.file_name().unwrap().to_str().unwrap();
    assert_eq!(
        name,
        "20251129T103005.123Z-l4_reuse_in_time_wait-wire-responder-198.51.100.7-203.0.113.10-443.pcapng"
    );
    assert_eq!(read(&fs::read(&path).unwrap()).len(), 8);
    {
        let status = recorder.status.lock().unwrap();
        assert_eq!((status.files, status.written, status.failed), (1, 1, 0));
        assert_eq!(status.bytes, fs::metadata(&path).unwrap().len());
    }
    alert.at = fixture::NOW + (AGAIN - Duration::from_secs(1));
    assert!(!recorder.is_due(&alert));
    alert.at = fixture::NOW + AGAIN;
    assert!(recorder.is_due(&alert));
    alert.state = State::Pending;
    assert!(!recorder.is_due(&alert));

    // A disk that is gone is no harm.
    fs::remove_dir_all(directory.path()).unwrap();
    ask(&mut recorder, fixture::NOW + AGAIN);
    recorder.name(&mut alert);
    assert_eq!(alert.evidence_file, Some(path), "the former one");
    assert_eq!(recorder.status.lock().unwrap().failed, 1);
}

#[test]
fn identities_with_ipv6_make_plain_names() {
    let directory = tempfile::tempdir().unwrap();
    let mut recorder = Recorder::open(directory.path(), 1 << 20, WallClock::capture()).unwrap();
    let mut job = job(pick(&incident(2048, fixture::NOW.0)), 100);
    job.id = "nat_syn_drop/netns-7/socket/initiator/2001:db8::1/[2001:db8::2]:443".to_owned();
    recorder.ask(job);
    recorder.listen(Duration::from_secs(10));
    let entry = fs::read_dir(directory.path()).unwrap().next().unwrap();
    assert_eq!(
        entry.unwrap().file_name().to_str(),
        Some(
            "20251129T103005.123Z-nat_syn_drop-netns-7-socket-initiator-2001-db8--1-2001-db8--2-443.pcapng"
        )
    );
}

#[test]
fn a_file_takes_no_more_than_its_part_of_the_bound() {
    assert_eq!(evidence::most(1 << 20), 1024);
    assert_eq!(evidence::most(64 << 20), 16_384);
    assert_eq!(evidence::most(1 << 40), 16_384);
    let mut all = Vec::new();
    for port in 0..1000 {
        all.extend(incident(2048 + port, u64::from(port) * SECOND));
    }
    let bytes = job(pick(&all), evidence::most(1 << 20)).bytes().unwrap();
    assert!(bytes.len() <= 1 << 18, "{}", bytes.len());
}
