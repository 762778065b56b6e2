//! Segments in any order, near the numbers that matter: driven by property tests and by the fuzzer.

use tuplewatch_common::{
    address::Role,
    segment::{ACK, FIN, RST, SYN, Segment},
};

use super::{
    invariants,
    script::{Flow, Host, MS, PATIENCE, S},
    tables::Limits,
};

/// One step takes so many bytes.
pub const STEP: usize = 4;

/// Source ports in use: few, so that four-tuples are used again and a SYN moves onto a taken port.
const PORTS: u16 = 5;

/// Initial sequence numbers in use, on both sides of the end of the number space.
const ISNS: [u32; 4] = [u32::MAX, u32::MAX - 1, 0, 0x8000_0000];

/// The responder's numbers.
const RESPONDER_ISN: u32 = u32::MAX - 2;

/// Plays a program and checks the invariants after each step, then sweeps everything away.
///
/// The first byte chooses the role and the size of the tables; each following group of [`STEP`] bytes
/// is a step.
///
/// # Panics
/// If an invariant does not hold.
pub fn play(program: &[u8]) -> Host {
    let (setup, steps) = program.split_first().unwrap_or((&0, &[]));
    let role = if setup & 1 == 0 {
        Role::Initiator
    } else {
        Role::Responder
    };
    let limits = if setup & 2 == 0 {
        Limits::ROOMY_BUT_SMALL
    } else {
        Limits::TIGHT
    };
    let mut host = Host::with_limits(role, limits);
    for step in steps.chunks_exact(STEP) {
        let &[what, who, number, time] = step else {
            unreachable!("chunks of {STEP}")
        };
        one(&mut host, what, who, number, time);
        invariants::check(&host.tables);
    }
    host.end();
    host
}

fn one(host: &mut Host, what: u8, who: u8, number: u8, time: u8) {
    host.wait(match time >> 5 {
        0..=3 => u64::from(time & 31) * MS / 8,
        4 => u64::from(time & 31) * 70 * MS,
        5 => u64::from(time & 31) * S,
        6 => u64::from(time & 31) * 60 * S,
        // Packets from two CPUs, or of a merged capture, are not quite in order.
        _ => 0,
    });
    if time >> 5 == 7 {
        host.seen.now_ns -= u64::from(time & 31) * MS;
    }
    let mut flow = Flow::from_port(40_000 + u16::from(who) % PORTS);
    if who & 0x10 != 0 {
        flow.tuple.responder_port = 81;
    }
    if who & 0x20 != 0 {
        flow.tuple = flow.tuple.reversed();
    }
    // A second interface, and packets that were forwarded.
    host.seen.ifindex = if who & 0xc0 == 0xc0 { 3 } else { 2 };
    host.seen.seen_before = number & 0x80 != 0 && host.seen.ifindex == 3;
    let isn = ISNS[usize::from(number & 3)];
    // −2 … 5 beside the number that is due.
    let near = |n: u32| n.wrapping_add(u32::from(number >> 2 & 7)).wrapping_sub(2);
    let segment = match what % 16 {
        0..=2 => flow.there(SYN, isn, 0),
        3 => Segment {
            payload_len: u32::from(number >> 2),
            ..flow.there(SYN, isn, 0)
        },
        4 | 5 => flow.back(SYN | ACK, near(RESPONDER_ISN), isn.wrapping_add(1)),
        6 => flow.back(SYN | ACK, RESPONDER_ISN, near(isn)),
        7 | 8 => flow.there(ACK, isn.wrapping_add(1), near(RESPONDER_ISN)),
        9 => flow.back(ACK, RESPONDER_ISN, near(isn)),
        10 => flow.back(ACK, RESPONDER_ISN, near(0x4000_0000)),
        11 => flow.there(RST, near(0x4000_0000), 0),
        12 => flow.back(RST | ACK, 0, near(isn)),
        13 => flow.there(FIN | ACK, isn, near(RESPONDER_ISN)),
        14 => flow.back(FIN | ACK, RESPONDER_ISN, near(isn)),
        _ if number & 0x40 != 0 => {
            host.tables
                .sweep_all(&mut host.work, host.seen.now_ns, PATIENCE);
            return;
        }
        // Flags as they come.
        _ => Segment {
            payload_len: u32::from(time & 1),
            ..flow.there(what >> 4 | number & 0xf0, near(isn), near(RESPONDER_ISN))
        },
    };
    host.see_unchecked(segment);
}
