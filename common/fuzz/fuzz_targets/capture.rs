//! Arbitrary bytes as a capture, packed or not: both readers end, and give no packet that is not in the
//! file.
#![no_main]

mod agent;

// The modules find each other by these names.
#[allow(unused_imports, reason = "as said")]
use agent::{core, source};

use libfuzzer_sys::fuzz_target;
use source::capture::{input::Input, reader::Reader};

fuzz_target!(|bytes: &[u8]| {
    let Ok(input) = Input::new(std::io::Cursor::new(bytes.to_vec()), None) else {
        return;
    };
    // What unpacks to more than this is only more of the same.
    let Ok(mut reader) = Reader::open(std::io::Read::take(input.bytes, 1 << 20)) else {
        return;
    };
    let mut end = 0;
    while let Ok(Some(packet)) = reader.next() {
        let kept = packet.data.len() as u64;
        let _ = packet.link.find(&tuplewatch_common::bytes::Captured {
            data: packet.data,
            wire_len: packet.wire_len as usize,
        });
        assert!(reader.offset() >= end + kept);
        end = reader.offset();
    }
});
