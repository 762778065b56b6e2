//! Which of the recorded packets concern an alert, and what each of them shows.

use std::{
    collections::{BTreeSet, HashMap},
    convert::Infallible,
};

use tuplewatch_common::{
    address::{FourTuple, PortSpaceKey, Role},
    bytes::Captured,
    recorder::{ETHERNET, Recorded},
    segment::{ACK, FIN, RST, SYN, Segment, locate_ethernet, locate_ip, read},
};

use crate::{
    core::observation::{Event, Snapshot},
    source::capture::{
        evidence::{About, Exhibit, Shows},
        file::Observed,
        observer::Observer,
        tables::{Frame, Limits},
    },
};

/// A recorded packet of a port space.
#[derive(Clone, Debug)]
pub(super) struct Picked {
    pub(super) recorded: Recorded,
    pub(super) segment: Segment,
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
        let Some(segment) = segment(recorded) else {
            return;
        };
        for (space, packets) in spaces.iter().zip(&mut picked) {
            if concerns(space, &segment.tuple) {
                packets.push(Picked {
                    recorded: *recorded,
                    segment,
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
fn segment(recorded: &Recorded) -> Option<Segment> {
    let bytes = Captured {
        data: recorded.headers(),
        wire_len: recorded.wire_len as usize,
    };
    let located = if recorded.flags & ETHERNET != 0 {
        locate_ethernet(&bytes)
    } else {
        locate_ip(&bytes, 0)
    };
    read(&bytes, &located.ok()?).ok()
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

/// At most so many packets, in the order of time, each with what it shows. Connections with symptoms
/// and those that had their ports before go first, then the latest.
pub(super) fn comment<'a>(
    space: &PortSpaceKey,
    packets: &'a [Picked],
    most: usize,
) -> Vec<(&'a Picked, String)> {
    let exhibits = exhibits(space, packets);
    let mut readings: HashMap<usize, String> = HashMap::new();
    // When a connection with symptoms began on these ports last, if it is known.
    let mut began: HashMap<FourTuple, u64> = HashMap::new();
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
    let shown = chosen.into_iter().map(|i| {
        let packet = &packets[i];
        let is_former = began(packet).is_some_and(|at| packet.recorded.time_ns < *at);
        let reading = readings
            .remove(&i)
            .unwrap_or_else(|| plain(packet.segment.flags, is_former).to_owned());
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
        let observed = Observed {
            frame: Frame {
                file: 0,
                number,
                time_ns: last_ns,
            },
            segment: packet.segment,
            role: is_syn.then_some(Role::from_u8(space.role)),
            // Headers only.
            message: None,
            page: None,
            interface: packet.recorded.ifindex,
            ..Observed::default()
        };
        let Ok(()) = observer.take(&observed, &mut look);
    }
    let Ok(()) = observer.finish(last_ns, &mut look);
    let mut all = observer.evidence.of(space, About::BareAcks);
    all.extend(observer.evidence.of(space, About::SynsAgain));
    all
}

/// A connection, whichever way a segment of it goes.
fn either(tuple: &FourTuple) -> FourTuple {
    (*tuple).min(tuple.reversed())
}

/// What a packet without symptoms shows.
const fn plain(flags: u8, is_former: bool) -> &'static str {
    match (is_former, flags & (SYN | ACK | FIN | RST)) {
        (false, f) if f & RST != 0 => "RST: this end ends the connection at once",
        (true, f) if f & RST != 0 => {
            "RST: this end ends the former connection, on whose ports a SYN comes later"
        }
        (false, f) if f & FIN != 0 => "FIN: this end closes the connection",
        (true, f) if f & FIN != 0 => {
            "FIN: this end closes the former connection, on whose ports a SYN comes later"
        }
        (false, SYN) => "SYN: opens a connection",
        (true, SYN) => "SYN: opens the former connection, on whose ports another SYN comes later",
        (_, f) if f & SYN != 0 => "SYN-ACK: the responder accepts",
        _ => "ACK while a connection is being opened",
    }
}
