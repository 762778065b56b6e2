//! Arbitrary bytes as a capture, replayed through the tables, the rules and the evidence.
#![no_main]

mod agent;

use agent::{core, source};

use std::io::Cursor;

use core::{engine::Engine, observation::Snapshot, threshold::Thresholds};
use libfuzzer_sys::fuzz_target;
use source::capture::{
    batch::Batch,
    evidence::About,
    file::{CaptureFile, HEAD, Next, Selection},
    input::Input,
    observer::Observer,
    tables::Limits,
};
use tuplewatch_common::record::Event;

/// Small, so that everything gets full.
const LIMITS: Limits = Limits {
    handshakes: 8,
    strangers: 4,
    spaces: 4,
    memory_sets: 2,
    moved_slots: 4,
    opening_slots: 4,
};

fuzz_target!(|bytes: &[u8]| {
    let Some(file) = open(bytes) else {
        return;
    };
    let places = file.places.clone();
    replay(file);
    if places.len() > 1 {
        for place in places {
            let mut file = open(bytes).expect("it could be opened before");
            file.judge_only(place);
            replay(file);
        }
    }
});

fn open(bytes: &[u8]) -> Option<CaptureFile> {
    let input = Input::new(Cursor::new(bytes.to_vec()), None).ok()?;
    CaptureFile::of(input, 0, HEAD, &Selection::default()).ok()
}

fn replay(mut file: CaptureFile) {
    let selection = Selection::default();
    let mut observer = Observer::new(LIMITS);
    observer.rests.vantage.clone_from(&file.vantage);
    observer.exchanges.is_on = true;
    let mut engine = Engine::new(Thresholds::default());
    let mut before = 0;
    let mut look = |events: &[Event], snapshot: &Snapshot| -> Result<(), ()> {
        assert!(snapshot.now.0 >= before);
        before = snapshot.now.0;
        assert!(snapshot.spaces.len() <= LIMITS.spaces);
        engine.events(events);
        engine.snapshot(snapshot);
        Ok(())
    };
    let mut batch = Batch::default();
    while !batch.is_last() {
        file.read(&selection, &mut batch);
        for observed in batch.all() {
            observer.rests.expect(observed.hash);
            let done = match observed.next {
                Next::Segment => {
                    observer.touch(observed);
                    observer.take(observed, observed.interface, &mut look)
                }
                Next::Plain => {
                    observer.touch(observed);
                    observer.pass(observed.frame.time_ns, &mut look)
                }
                Next::Time => observer.pass(observed.frame.time_ns, &mut look),
                Next::End => Ok(()),
            };
            done.expect("the look never fails");
        }
    }
    observer
        .finish(file.end_ns(), &mut look)
        .expect("the look never fails");
    for (key, _) in observer.tables.port_spaces() {
        for about in [
            About::BareAcks,
            About::SynsAgain,
            About::Failures,
            About::InVain,
            About::Rests,
        ] {
            for exhibit in observer.evidence.of(&key, about) {
                assert!(!exhibit.reading().is_empty());
            }
        }
    }
    drop(engine.overview(8));
}
