//! Counts the packets of a pcap file as the lab's firewall rules should have counted them, by another
//! parser and with plain maps.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use etherparse::{LaxNetSlice, LaxSlicedPacket, TransportSlice};
use tuplewatch_tests::prelude::Counters;

/// Nanosecond pcap, written on a little-endian machine.
const MAGIC: [u8; 4] = [0x4d, 0x3c, 0xb2, 0xa1];

/// The packets of a file recorded by [`tuplewatch_tests::tap::Tap`], with their times.
fn packets(file: &[u8]) -> Result<Vec<(Duration, &[u8])>> {
    ensure!(file.get(..4) == Some(&MAGIC), "not a nanosecond pcap file");
    let mut packets = Vec::new();
    let mut rest = &file[24..];
    while let Some(header) = rest.get(..16) {
        let field = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("4 bytes"));
        let time = Duration::new(field(0).into(), field(4));
        let length = field(8) as usize;
        let packet = rest.get(16..16 + length);
        packets.push((time, packet.context("the last packet is cut")?));
        rest = &rest[16 + length..];
    }
    Ok(packets)
}

/// What the host of `service` should have counted, given a recording made at that host, and the time
/// from the first SYN to the first bare ACK.
pub fn count(path: &Path, service: SocketAddr) -> Result<(Counters, Duration)> {
    let file = std::fs::read(path)?;
    let mut counters = Counters::default();
    // Per client: whether its latest SYN has no answer yet (true) or got a bare ACK (false).
    let mut unanswered: HashMap<SocketAddr, bool> = HashMap::new();
    let mut isns: HashSet<(IpAddr, u32)> = HashSet::new();
    let mut syns: HashSet<(SocketAddr, u32)> = HashSet::new();
    let (mut first_syn, mut first_bare_ack) = (None, None);
    for (time, packet) in packets(&file)? {
        // Lax: of a packet longer than 160 bytes only the beginning is in the file.
        let Ok(packet) = LaxSlicedPacket::from_ethernet(packet) else {
            continue;
        };
        let Some(TransportSlice::Tcp(tcp)) = &packet.transport else {
            continue;
        };
        let (from, to) = match &packet.net {
            Some(LaxNetSlice::Ipv4(ip)) => (
                IpAddr::V4(ip.header().source_addr()),
                IpAddr::V4(ip.header().destination_addr()),
            ),
            Some(LaxNetSlice::Ipv6(ip)) => (
                IpAddr::V6(ip.header().source_addr()),
                IpAddr::V6(ip.header().destination_addr()),
            ),
            _ => continue,
        };
        let from = SocketAddr::new(from, tcp.source_port());
        let to = SocketAddr::new(to, tcp.destination_port());
        if to == service {
            counters.tcp_in += 1;
            counters.fin_in += u64::from(tcp.fin());
            counters.rst_in += u64::from(tcp.rst());
            if tcp.rst() {
                counters.rst_to_syn_in += u64::from(unanswered.remove(&from).is_some());
            } else if tcp.syn() && !tcp.ack() && !tcp.fin() {
                counters.syn_in += 1;
                first_syn.get_or_insert(time);
                counters.syn_repeat_in +=
                    u64::from(!isns.insert((from.ip(), tcp.sequence_number())));
                counters.syn_repeat_same_port_in +=
                    u64::from(!syns.insert((from, tcp.sequence_number())));
                unanswered.insert(from, true);
            }
        } else if from == service {
            counters.tcp_out += 1;
            counters.fin_out += u64::from(tcp.fin());
            counters.rst_out += u64::from(tcp.rst());
            if tcp.rst() {
                counters.rst_to_syn_out += u64::from(unanswered.remove(&to) == Some(true));
            } else if tcp.syn() && tcp.ack() {
                counters.synack_out += 1;
                unanswered.remove(&to);
            } else if tcp.ack()
                && !tcp.psh()
                && !tcp.fin()
                && unanswered.get(&to).copied() == Some(true)
            {
                counters.bareack_to_syn_out += 1;
                first_bare_ack.get_or_insert(time);
                unanswered.insert(to, false);
            }
        }
    }
    let first_syn = first_syn.context("no SYN in the recording")?;
    let first_bare_ack = first_bare_ack.context("no bare ACK in the recording")?;
    Ok((counters, first_bare_ack.saturating_sub(first_syn)))
}
