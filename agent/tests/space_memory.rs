//! What a port space costs in the core. Ten thousand of them, and a million four-tuples held by them,
//! have to fit beside the maps.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    net::Ipv4Addr,
    sync::atomic::{AtomicUsize, Ordering},
};

use tuplewatch::core::{
    engine::Engine, observation::Snapshot, threshold::Thresholds, time::Moment,
};
use tuplewatch_common::{
    address::{Point, PortSpaceKey, Role, v4_mapped},
    record::{CensusRow, FIRST_PORTS, Opener, OpenerKey, PortSpace},
};

/// Bytes allocated now, as the program asked for them.
static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: everything is handed to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the pointer came from `alloc` with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SPACES: u32 = 10_000;
const S: u64 = 1_000_000_000;

fn key(i: u32) -> PortSpaceKey {
    let (point, netns) = if i.is_multiple_of(2) {
        (Point::Socket, 4_026_532_281)
    } else {
        (Point::Wire, 0)
    };
    PortSpaceKey {
        initiator: v4_mapped([127, 0, 0, 1]),
        responder: v4_mapped(Ipv4Addr::from(0x7f01_0000 + i / 2).octets()),
        responder_port: 8080,
        role: Role::Initiator as u8,
        point: point as u8,
        netns,
    }
}

/// `n` connections of one port space, all closed again.
fn counters(n: u64, first_port: u16) -> PortSpace {
    let mut space = PortSpace {
        opens: n,
        established: n,
        closed: n,
        lifetime_ms: n * 3,
        ports_noted: FIRST_PORTS.min(n as usize) as u16,
        ..PortSpace::default()
    };
    space.first_ports[0] = first_port;
    space.handshake_duration[1] = n - n / 2;
    space.handshake_duration[2] = n / 2;
    space.port_search[4] = n;
    space
}

fn snapshot(t: u64, n: u64, census: Option<CensusRow>) -> Snapshot {
    let port = |i: u32| 32_768 + ((u64::from(i) * 7 + n * 3) % 28_232) as u16;
    Snapshot {
        now: Moment(t * S),
        spaces: (0..SPACES)
            .map(|i| (key(i), counters(n, port(i))))
            .collect(),
        ports: (0..SPACES).map(|i| (key(i), vec![port(i)])).collect(),
        openers: (0..SPACES)
            .step_by(2)
            .map(|i| {
                let opener = OpenerKey {
                    space: key(i),
                    pid: 4711,
                    pad: 0,
                };
                let totals = Opener {
                    opens: n,
                    last_ns: t * S,
                    ..Opener::default()
                };
                (opener, totals)
            })
            .collect(),
        census: census.map(|row| (0..SPACES).step_by(2).map(|i| (key(i), row)).collect()),
        ..Snapshot::default()
    }
}

fn per_space(before: usize) -> usize {
    (ALLOCATED.load(Ordering::Relaxed) - before) / SPACES as usize
}

/// One test: they all count in the same place.
#[test]
fn ten_thousand_port_spaces_take_a_few_megabytes() {
    let before = ALLOCATED.load(Ordering::Relaxed);
    let mut engine = Engine::new(Thresholds::default());
    for (t, n) in [(1, 1), (2, 2)] {
        engine.snapshot(&snapshot(t, n, None));
    }
    let fresh = per_space(before);
    // Nothing happens for five minutes.
    for t in (3..310).step_by(10) {
        let quiet = Snapshot {
            now: Moment(t * S),
            ..Snapshot::default()
        };
        engine.snapshot(&quiet);
    }
    let quiet = per_space(before);
    // A hundred four-tuples are held by each, and each opens some in every look, for four minutes.
    for t in (310..550u64).step_by(5) {
        let held = CensusRow {
            established: 5 + t as u32 % 3,
            time_wait: [16, 16, 16, 16, 16, 16],
            ..CensusRow::default()
        };
        engine.snapshot(&snapshot(t, t, Some(held)));
    }
    let busy = per_space(before);
    println!("bytes per port space: fresh {fresh}, quiet {quiet}, busy with 101 held {busy}");
    assert!(fresh <= 620, "fresh: {fresh}");
    assert!(quiet <= 520, "quiet: {quiet}");
    // Ten thousand of them: 17 MB.
    assert!(busy <= 1700, "busy: {busy}");
    // With the maps (`Plan` takes 24 MiB at most) and the program itself (the bench has 39.5 MiB with the
    // maps and ten thousand fresh port spaces) a million held four-tuples stay far below 150 MB.
    let all = busy * SPACES as usize + (40 << 20);
    assert!(all <= 150_000_000, "{all} bytes");
    assert_eq!(engine.overview(1).known_spaces, u64::from(SPACES));
}
