//! Which of the recorded packets concern an alert, and what each of them shows.

use std::{
    collections::{BTreeSet, HashMap},
    convert::Infallible,
};

use tuplewatch_common::{
    address::{FourTuple, PortSpaceKey, Role},
    bytes::Captured,
    recorder::{ETHERNET, LEAVES, Recorded},
    segment::{ACK, FIN, RST, SYN, Segment, read},
    seq,
};

use crate::{
    core::observation::{Event, Snapshot},
    source::capture::{
        copies::{Sighting, fingerprint},
        evidence::{About, Exhibit, Shows, either, ordinary},
        file::Observed,
        link::{Direction, Link},
        observer::Observer,
        sent::Hint,
        tables::{Frame, Limits},
    },
};

/// A recorded packet of a port space.
#[derive(Clone, Debug)]
pub(super) struct Picked {
    pub(super) recorded: Recorded,
    pub(super) segment: Segment,
    /// What tells copies of it from repetitions.
    pub(super) sighting: Sighting,
}

/// A packet with its comment takes about so many bytes in a file.
const BYTES: u64 = 256;
/// A file is at most so long, whatever the bound: it is there to be read by a person.
const LONGEST: u64 = 4 << 20;
/// … and at most this part of the bound.
const PART: u64 = 4;

/// Packets that a file takes at most, where all files may have `limit` bytes.
pub(super) const fn most(limit: u64) -> usize {
    let part = limit / PART;
    let longest = if part < LONGEST { part } else { LONGEST };
    (longest / BYTES) as usize
}

/// The tables that tell what a packet shows: there are as many connections as the ring has packets, at
/// most.
const LIMITS: Limits = Limits {
    handshakes: 1 << 16,
    strangers: 1 << 16,
    spaces: 1 << 10,
    memory_sets: 1 << 14,
    moved_slots: 1 << 13,
    opening_slots: 1 << 14,
};

/// The packets of each of some port spaces in the order of time. `each` shows all there are.
pub(super) fn pick(
    spaces: &[PortSpaceKey],
    each: impl FnOnce(&mut dyn FnMut(&Recorded)),
) -> Vec<Vec<Picked>> {
    let mut picked = vec![Vec::new(); spaces.len()];
    each(&mut |recorded| {
        let Some((segment, sighting)) = segment(recorded) else {
            return;
        };
        for (space, packets) in spaces.iter().zip(&mut picked) {
            if concerns(space, &segment.tuple) {
                packets.push(Picked {
                    recorded: *recorded,
                    segment,
                    sighting,
                });
            }
        }
    });
    for packets in &mut picked {
        packets.sort_unstable_by_key(|p| p.recorded.time_ns);
    }
    picked
}

/// The segment of a recorded packet.
fn segment(recorded: &Recorded) -> Option<(Segment, Sighting)> {
    let bytes = Captured {
        data: recorded.headers(),
        wire_len: recorded.wire_len as usize,
    };
    let link = if recorded.flags & ETHERNET != 0 {
        Link::Ethernet
    } else {
        Link::Raw
    };
    let at = link.find(&bytes).ok()?.located;
    let direction = if recorded.flags & LEAVES != 0 {
        Direction::Out
    } else {
        Direction::In
    };
    let sighting = Sighting::of(&bytes, link, &at, Some(direction));
    Some((read(&bytes, &at).ok()?, sighting))
}

/// Whether a segment, of either way, belongs to a port space. A part of the key that is zero stands for
/// all.
fn concerns(space: &PortSpaceKey, tuple: &FourTuple) -> bool {
    const ANY: [u8; 16] = [0; 16];
    let one = |tuple: &FourTuple| {
        (space.initiator == ANY || space.initiator == tuple.initiator)
            && (space.responder == ANY || space.responder == tuple.responder)
            && (space.responder_port == 0 || space.responder_port == tuple.responder_port)
    };
    one(tuple) || one(&tuple.reversed())
}

/// At most so many packets, in the order of time, each with what it shows. `stuck` connections, others
/// with symptoms and those that had their ports before go first, then the latest.
pub(super) fn comment<'a>(
    space: &PortSpaceKey,
    stuck: &[FourTuple],
    packets: &'a [Picked],
    most: usize,
) -> Vec<(&'a Picked, String)> {
    let exhibits = exhibits(space, packets);
    let mut readings: HashMap<usize, String> = HashMap::new();
    // When a connection with symptoms began on these ports last, if it is known.
    let mut began: HashMap<FourTuple, u64> = stuck.iter().map(|t| (either(t), 0)).collect();
    for exhibit in &exhibits {
        let at = exhibit.frame.number as usize;
        let reading = exhibit.reading();
        match readings.get_mut(&at) {
            Some(known) if *known != reading => *known = format!("{known}; {reading}"),
            Some(_) => {}
            None => {
                readings.insert(at, reading);
            }
        }
        let of = began.entry(either(&exhibit.tuple)).or_insert(0);
        if matches!(exhibit.shows, Shows::Syn { .. }) {
            *of = (*of).max(exhibit.frame.time_ns);
        }
    }
    let began = |packet: &Picked| began.get(&either(&packet.segment.tuple));
    let with_symptoms = (0..packets.len()).filter(|i| began(&packets[*i]).is_some());
    let others = (0..packets.len()).filter(|i| began(&packets[*i]).is_none());
    let chosen: BTreeSet<usize> = with_symptoms.rev().chain(others.rev()).take(most).collect();
    let mut streams = Streams::default();
    let shown = chosen.into_iter().map(|i| {
        let packet = &packets[i];
        let is_former = began(packet).is_some_and(|at| packet.recorded.time_ns < *at);
        let data = streams.take(packet);
        let reading = readings
            .remove(&i)
            .or(data)
            .unwrap_or_else(|| ordinary(packet.segment.flags, is_former).to_owned());
        (packet, reading)
    });
    shown.collect()
}

/// The packets with symptoms, as a replay of them tells. [`Frame::number`] is the place in `packets`.
fn exhibits(space: &PortSpaceKey, packets: &[Picked]) -> Vec<Exhibit> {
    let mut observer = Observer::new(LIMITS);
    let mut look = |_: &[Event], _: &Snapshot| Ok::<_, Infallible>(());
    let mut last_ns = 0;
    for (number, packet) in (0..).zip(packets) {
        last_ns = packet.recorded.time_ns;
        let is_syn = packet.segment.flags & (SYN | ACK) == SYN;
        let hash = packet.segment.tuple.hash();
        let observed = Observed {
            frame: Frame {
                file: 0,
                number,
                time_ns: last_ns,
            },
            segment: packet.segment,
            hash,
            packet: fingerprint(&packet.segment, hash, packet.sighting),
            role: is_syn.then_some(Role::from_u8(space.role)),
            // Headers only.
            message: None,
            page: None,
            interface: packet.recorded.ifindex,
            sighting: packet.sighting,
            // Most data is not recorded: nobody knows what was sent before.
            hint: Hint::None,
            window: u16::MAX,
            ..Observed::default()
        };
        let Ok(()) = observer.take(&observed, observed.interface, &mut look);
    }
    let Ok(()) = observer.finish(last_ns, &mut look);
    let mut all = observer.evidence.of(space, About::BareAcks);
    all.extend(observer.evidence.of(space, About::SynsAgain));
    all
}

/// How far each direction of the connections has come, as each interface saw it.
#[derive(Default)]
struct Streams(HashMap<(FourTuple, u32, u16), u32>);

impl Streams {
    /// What a segment with data shows, or a probe. Segments without data, SYN, FIN or RST say nothing
    /// here.
    fn take(&mut self, packet: &Picked) -> Option<String> {
        let Picked {
            recorded, segment, ..
        } = packet;
        if segment.flags & (SYN | FIN | RST) != 0 {
            return None;
        }
        let way = (segment.tuple, recorded.ifindex, recorded.flags & LEAVES);
        let end = segment.seq.wrapping_add(segment.payload_len);
        let before = self.0.get(&way).copied();
        let is_behind = |of: u32| before.is_some_and(|before| seq::after(before, of));
        if before.is_none() || !is_behind(end) {
            self.0.insert(way, end);
        }
        let bytes = segment.payload_len;
        match (bytes, recorded.status) {
            (_, status) if status != 0 => Some(format!(
                "{bytes} bytes of data: a response with status {status}, a failure"
            )),
            (0 | 1, _) if before == Some(segment.seq.wrapping_add(1)) => Some(
                "keep-alive probe: nothing new, it asks whether the other end is there".to_owned(),
            ),
            (0, _) => None,
            _ if is_behind(segment.seq) => Some(format!(
                "{bytes} bytes of data sent again: they were not acknowledged in time"
            )),
            _ => Some(format!("{bytes} bytes of data")),
        }
    }
}
