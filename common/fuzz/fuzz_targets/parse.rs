//! Arbitrary bytes as an Ethernet frame and as an IP packet, with any length on the wire.
//!
//! Input: the length on the wire (8 bytes, little endian), then the packet.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tuplewatch_common::{
    bytes::Captured,
    segment::{Located, NotSegment, locate_ethernet, locate_ip, read},
};

type Found = Result<Located, NotSegment>;

fn look(data: &[u8], wire_len: usize) -> [Found; 2] {
    let packet = Captured { data, wire_len };
    let found = [locate_ethernet(&packet), locate_ip(&packet, 0)];
    for at in found.iter().flatten() {
        let segment = read(&packet, at).expect("what was located can be read");
        assert_eq!(segment.flags, at.flags);
        assert_eq!(segment.payload_len, at.payload_len);
        assert!(at.ip_offset < at.tcp_offset && at.tcp_offset + 20 <= at.payload_offset);
        assert!(at.tcp_offset + 14 <= data.len());
    }
    found
}

fuzz_target!(|input: &[u8]| {
    let Some((wire_len, data)) = input.split_first_chunk() else {
        return;
    };
    let wire_len = u64::from_le_bytes(*wire_len) as usize;
    let whole = look(data, wire_len);
    // Cut shorter, it is the same or truncated, and the last byte that matters is one of the first.
    for len in 0..data.len().min(200) {
        for (cut, whole) in look(&data[..len], wire_len).iter().zip(&whole) {
            assert!(cut == whole || *cut == Err(NotSegment::Truncated));
        }
    }
});
