//! Capture time drives the clock.

use std::io::{self, Cursor, Read};

use super::{
    super::{
        batch::Batch,
        file::{CaptureFile, HEAD, Next, Selection},
        input::Input,
        observer::Observer,
        tables::Limits,
    },
    Order, Said,
};
use crate::core::observation::Snapshot;

/// Replays bytes as far as the core; gives the times of the looks, and how many segments came late.
fn looks(bytes: Vec<u8>) -> (Vec<u64>, u64) {
    let selection = Selection::default();
    let input = Input::new(Cursor::new(bytes), None).unwrap();
    let mut file = CaptureFile::of(input, 0, HEAD, &selection).unwrap();
    let mut observer = Observer::new(Limits {
        memory_sets: 1 << 10,
        ..Limits::default()
    });
    let mut looks = Vec::new();
    let mut look = |_: &[_], snapshot: &Snapshot| -> Result<(), ()> {
        looks.push(snapshot.now.0);
        Ok(())
    };
    let mut batch = Batch::default();
    while !batch.is_last() {
        file.read(&selection, &mut batch);
        for observed in batch.all() {
            match observed.next {
                Next::Segment => observer
                    .take(observed, observed.interface, &mut look)
                    .unwrap(),
                Next::Plain => observer.touch(observed),
                Next::Time => observer.pass(observed.frame.time_ns, &mut look).unwrap(),
                Next::End => {}
            }
        }
    }
    observer.finish(file.counts.last_ns, &mut look).unwrap();
    (looks, observer.late)
}

/// An Ethernet frame with a SYN.
fn syn(time_ns: u64) -> Said {
    let mut data = vec![0; 12];
    data.extend([8, 0, 0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0]);
    data.extend([10, 0, 0, 1, 10, 0, 0, 2]);
    data.extend([
        4, 0, 0, 80, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0, 0, 0, 0, 0, 0,
    ]);
    Said {
        time_ns,
        wire_len: 54,
        data,
        interface: 0,
    }
}

const S: u64 = 1_000_000_000;

#[test]
fn capture_time_drives_the_clock() {
    let order = Order { big: false };
    let pcap = |times: &[u64]| {
        let packets: Vec<_> = times.iter().map(|t| syn(*t)).collect();
        order.pcap(0xa1b2_3c4d, &packets)
    };
    let (at, late) = looks(pcap(&[100 * S, 103 * S + 1]));
    // At the beginning, each second, and at the end.
    assert_eq!(at, [100 * S, 101 * S, 102 * S, 103 * S, 103 * S + 1]);
    assert_eq!(late, 0);
}

#[test]
fn a_leap_in_time_is_no_endless_loop() {
    let order = Order { big: false };
    let far = u64::from(u32::MAX) * S;
    let (at, late) = looks(order.pcap(0xa1b2_3c4d, &[syn(S), syn(far), syn(2 * S)]));
    assert!(at.len() < 2000, "{}", at.len());
    assert_eq!(*at.last().unwrap(), far);
    assert!(at.is_sorted());
    assert_eq!(late, 0, "one time that is wrong waits until the end");
    let (_, late) = looks(order.pcap(
        0xa1b2_3c4d,
        &[syn(5 * S), syn(6 * S), syn(7 * S), syn(5 * S)],
    ));
    assert_eq!(late, 1, "what comes too late counts as of now");
}

/// Fails instead of waiting.
struct Silent;

impl Read for Silent {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        Err(io::ErrorKind::WouldBlock.into())
    }
}

#[test]
fn what_is_at_hand_does_not_wait_for_what_is_not() {
    let bytes = Order { big: false }.pcap(0xa1b2_3c4d, &[syn(S), syn(2 * S)]);
    let head = bytes.len() as u64;
    let selection = Selection::default();
    let input = Input::new(Cursor::new(bytes).chain(Silent), None).unwrap();
    let mut file = CaptureFile::of(input, 0, head, &selection).unwrap();
    let mut batch = Batch::default();
    file.read(&selection, &mut batch);
    assert_eq!(batch.all().len(), 2);
    assert!(batch.fault.is_none(), "it has asked for more");
    file.read(&selection, &mut batch);
    assert!(batch.all().is_empty() && batch.fault.is_some());
}
