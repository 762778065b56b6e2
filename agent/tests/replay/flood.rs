//! The handshakes that a flood leaves behind, counted once more straight from the packets.

use std::{collections::HashMap, fs};

use super::{Said, given::packets, number, package};

const S: u64 = 1_000_000_000;
/// How long a handshake with SYN-ACK is waited for.
const PATIENCE: u64 = 30 * S;

/// A SYN that was answered by a SYN-ACK.
struct Open {
    at: u64,
    isn: u32,
    responder_isn: Option<u32>,
}

/// Handshakes with SYN-ACK that another SYN has replaced, or that were given up by the end.
fn half_open(packets: &[(u64, Vec<u8>)]) -> u64 {
    let mut open: HashMap<[u8; 12], Open> = HashMap::new();
    let mut replaced = 0;
    for (at, frame) in packets {
        if frame[12..14] != [8, 0] || frame[23] != 6 {
            continue;
        }
        let tcp = 14 + usize::from(frame[14] & 15) * 4;
        let word = |at: usize| u32::from_be_bytes(frame[at..at + 4].try_into().unwrap());
        let key = |first: usize, second: usize, ports: [usize; 2]| -> [u8; 12] {
            let part = |at: usize, n: usize| &frame[at..at + n];
            let all = [
                part(first, 4),
                part(second, 4),
                part(tcp + ports[0], 2),
                part(tcp + ports[1], 2),
            ];
            all.concat().try_into().unwrap()
        };
        let (sent, answered) = (key(26, 30, [0, 2]), key(30, 26, [2, 0]));
        let (seq, ack, flags) = (word(tcp + 4), word(tcp + 8), frame[tcp + 13]);
        match flags & 0x16 {
            0x02 => {
                let new = Open {
                    at: *at,
                    isn: seq,
                    responder_isn: None,
                };
                if let Some(before) = open.insert(sent, new) {
                    assert_ne!(before.isn, seq, "no SYN comes again in this recording");
                    replaced += u64::from(before.responder_isn.is_some());
                }
            }
            0x12 => {
                if let Some(open) = open.get_mut(&answered)
                    && ack == open.isn.wrapping_add(1)
                {
                    open.responder_isn = Some(seq);
                }
            }
            0x10 => {
                let completes = open
                    .get(&sent)
                    .and_then(|open| open.responder_isn)
                    .is_some_and(|isn| ack == isn.wrapping_add(1));
                if completes {
                    open.remove(&sent);
                }
            }
            _ => {
                open.remove(&sent);
                open.remove(&answered);
            }
        }
    }
    let end = packets.last().unwrap().0;
    let given_up = |open: &&Open| open.responder_isn.is_some() && end - open.at > PATIENCE;
    replaced + open.values().filter(given_up).count() as u64
}

#[test]
fn a_flood_leaves_as_many_half_open_as_the_packets_say() {
    let path = package("../../shared/captures/11_syn_flood.server.pcap");
    let Ok(bytes) = fs::read(&path) else {
        eprintln!("SKIPPED: there is no {}", path.display());
        return;
    };
    let said = Said::by(&[path.to_str().unwrap()]);
    let globals = &said.last("summary")["globals"];
    let counted = half_open(&packets(&bytes));
    assert!(counted > 300, "{counted}");
    assert_eq!(
        number(&globals["half_open_without_port_space"]),
        counted,
        "{globals}"
    );
}
