//! Recordings of real TCP stacks against what their kernels and applications counted.
//!
//! Three of them, cut to the headers, are in `tests/data`; the others are read where the folder that
//! is shared beside the project is at hand, and are skipped aloud elsewhere.

mod support;

use std::{
    collections::BTreeSet,
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use serde_json::Value;
use support::{
    invariants, pcap,
    script::{PATIENCE, S},
    tables::{InMemory, Limits},
};
use tuplewatch_common::{
    address::{Address, Role, v4_mapped},
    bytes::Captured,
    observe::{Seen, Work, observe},
    record::{Global, PortSpace},
    segment::{ACK, RST, SYN, Segment, locate_ethernet, read},
};

/// The tables check themselves after so many packets.
const CHECK_EVERY: usize = 50;

/// What went by in one recording, counted packet by packet without our rules.
#[derive(Default)]
struct Plain {
    syns: u64,
    rsts: u64,
    /// Initiator and port of every SYN.
    syn_ports: BTreeSet<(Address, u16)>,
    /// Initiator and port of every SYN that a SYN-ACK answered.
    syn_acked_ports: BTreeSet<(Address, u16)>,
}

impl Plain {
    fn take(&mut self, s: &Segment) {
        let t = &s.tuple;
        match s.flags & (SYN | ACK | RST) {
            SYN => {
                self.syns += 1;
                self.syn_ports.insert((t.initiator, t.initiator_port));
            }
            flags if flags == SYN | ACK => {
                self.syn_acked_ports.insert((t.responder, t.responder_port));
            }
            flags if flags & RST != 0 => self.rsts += 1,
            _ => {}
        }
    }
}

/// The sum over all port spaces of one recording.
#[derive(Debug, Default)]
struct Sum {
    spaces: PortSpace,
    ports: usize,
    syns_without_port_space: u64,
    bare_acks_without_port_space: u64,
}

impl Sum {
    fn of(tables: &InMemory) -> Self {
        let mut sum = Self {
            syns_without_port_space: tables.global(Global::SynsWithoutPortSpace),
            bare_acks_without_port_space: tables.global(Global::BareAcksWithoutPortSpace),
            ..Self::default()
        };
        for (key, p) in &tables.spaces {
            let all = &mut sum.spaces;
            for (to, from) in [
                (&mut all.opens, p.opens),
                (&mut all.established, p.established),
                (&mut all.refused, p.refused),
                (&mut all.syn_timeouts, p.syn_timeouts),
                (&mut all.abandoned, p.abandoned),
                (&mut all.half_open, p.half_open),
                (&mut all.syn_retransmits, p.syn_retransmits),
                (&mut all.bare_acks, p.bare_acks),
                (&mut all.bare_acks_closed, p.bare_acks_closed),
                (&mut all.bare_acks_open, p.bare_acks_open),
                (&mut all.bare_acks_half_open, p.bare_acks_half_open),
                (&mut all.bare_acks_unknown, p.bare_acks_unknown),
                (&mut all.duplicate_syns, p.duplicate_syns),
                (&mut all.no_listener, p.no_listener),
                (&mut all.rsts_after_bare_ack, p.rsts_after_bare_ack),
                (&mut all.healed, p.healed),
                (&mut all.unhealed, p.unhealed),
            ] {
                *to += from;
            }
            sum.ports += tables.ports(key).len();
        }
        sum
    }
}

fn replay(path: &Path, local: &BTreeSet<Address>) -> (Plain, Sum) {
    let packets = pcap::read(path).unwrap();
    assert!(!packets.is_empty(), "{}", path.display());
    let mut tables = InMemory::new(Limits::ROOMY);
    let mut work = Work::default();
    let mut plain = Plain::default();
    let mut next_sweep = packets[0].time_ns + S;
    for (i, packet) in packets.iter().enumerate() {
        while packet.time_ns >= next_sweep {
            tables.sweep_all(&mut work, next_sweep, PATIENCE);
            next_sweep += S;
        }
        let bytes = Captured {
            data: &packet.data,
            wire_len: packet.wire_len,
        };
        let Ok(located) = locate_ethernet(&bytes) else {
            continue;
        };
        work.segment = read(&bytes, &located).expect("what was located can be read");
        plain.take(&work.segment);
        let leaves = local.contains(&work.segment.tuple.initiator);
        let seen = Seen {
            now_ns: packet.time_ns,
            ifindex: 2,
            syn_role: if leaves {
                Role::Initiator
            } else {
                Role::Responder
            },
            seen_before: false,
        };
        observe(&mut tables, &mut work, &seen);
        if i % CHECK_EVERY == 0 {
            invariants::check(&tables);
        }
    }
    tables.sweep_all(&mut work, u64::MAX, 0);
    invariants::check_settled(&tables);
    (plain, Sum::of(&tables))
}

/// What the former connections of a recording's bare ACKs were.
#[derive(Clone, Copy)]
enum Kind {
    /// There is no bare ACK.
    None,
    /// Closed within the hold.
    Closed,
    /// Never closed.
    Open,
    /// Never completed.
    HalfOpen,
    /// Not known here: it was another host's, behind the same NAT. (By chance one of ours was on the
    /// same port before: so many are of [`Kind::Closed`].)
    Unknown(u64),
}

struct Recording {
    name: &'static str,
    kind: Kind,
    /// SYNs of a flood, which never earns a port space at the responder.
    flood: u64,
}

const fn recording(name: &'static str, kind: Kind) -> Recording {
    Recording {
        name,
        kind,
        flood: 0,
    }
}

/// Compares every counter that the manifest has a number for.
fn compare(dir: &Path, manifest: &Value, recording: &Recording) {
    let Recording { name, kind, flood } = *recording;
    let entry = manifest["files"]
        .as_array()
        .unwrap()
        .iter()
        .find(|e| e["file"] == name)
        .unwrap_or_else(|| panic!("{name} is not in the manifest"));
    let number = |v: &Value| v.as_u64().unwrap_or_else(|| panic!("{name}: {v}"));
    let truth = &entry["ground_truth_summary"];
    let here = &truth["at_this_vantage"];
    let both =
        |what: &str| number(&here[format!("{what}_in")]) + number(&here[format!("{what}_out")]);
    let local = entry["local_addrs"].as_array().unwrap().iter();
    let local = local.map(|a| match a.as_str().unwrap().parse().unwrap() {
        IpAddr::V4(a) => v4_mapped(a.octets()),
        IpAddr::V6(a) => a.octets(),
    });
    let (plain, sum) = replay(&dir.join(name), &local.collect());
    let p = &sum.spaces;
    let at_server = entry["vantage"] == "server";
    let message = |what: &str| format!("{name}: {what}: {sum:?}");

    // The parser sees every packet.
    assert_eq!(plain.syns, both("syn"), "{}", message("SYNs"));
    assert_eq!(plain.rsts, both("rst"), "{}", message("RSTs"));
    let ports = here["distinct_source_ports"].as_object().unwrap();
    let ports = ports.values().map(number).sum::<u64>();
    assert_eq!(plain.syn_ports.len() as u64, ports, "{}", message("ports"));

    // An open is an initial sequence number; what is not the first of it is a retransmission.
    let opens = number(&entry["packets_read_by_analyze_py"]["syn_new"]);
    let (opens, syns) = (opens - flood, plain.syns - flood);
    assert_eq!(p.opens, opens, "{}", message("opens"));
    assert_eq!(p.syn_retransmits, syns - opens, "{}", message("SYNs again"));
    assert_eq!(p.duplicate_syns, 0, "{}", message("duplicates"));
    if !at_server {
        let kernel = number(&here["syn_retransmits"]);
        assert_eq!(p.syn_retransmits, kernel, "{}", message("SYNs again"));
    }

    // Outcomes.
    let flooded_here = flood > 0 || matches!(kind, Kind::HalfOpen);
    if at_server {
        let accepted = number(&truth["accepted_by_servers"]);
        assert_eq!(p.established, accepted, "{}", message("established"));
        let failed = number(&truth["connects_failed"]);
        assert_eq!(p.refused + p.syn_timeouts, failed, "{}", message("failed"));
    } else if !flooded_here {
        let v = &entry["packets_read_by_analyze_py"]["syn_never_answered_by_synack"];
        assert_eq!(
            p.established,
            opens - number(v),
            "{}",
            message("established")
        );
    }
    if !flooded_here {
        assert_eq!(
            sum.ports,
            plain.syn_acked_ports.len(),
            "{}",
            message("ports")
        );
        assert_eq!(p.half_open + p.abandoned, 0, "{}", message("given up"));
    }

    // Bare ACKs and the RSTs that answer them; the others refuse a SYN.
    let bare_acks = both("bare_ack_answers");
    assert_eq!(
        p.bare_acks + sum.bare_acks_without_port_space,
        bare_acks,
        "{}",
        message("bare ACKs")
    );
    assert_eq!(
        p.rsts_after_bare_ack + p.refused,
        both("rst"),
        "{}",
        message("RSTs")
    );
    let kinds = [
        p.bare_acks_closed,
        p.bare_acks_open,
        p.bare_acks_half_open,
        p.bare_acks_unknown,
    ];
    let expected = match kind {
        Kind::None => [0; 4],
        Kind::Closed => [bare_acks, 0, 0, 0],
        Kind::Open => [0, bare_acks, 0, 0],
        Kind::HalfOpen if flood > 0 => [0; 4],
        Kind::HalfOpen => [0, 0, bare_acks, 0],
        Kind::Unknown(closed) => [closed, 0, 0, bare_acks - closed],
    };
    assert_eq!(kinds, expected, "{}", message("kinds of bare ACKs"));
    assert!(sum.syns_without_port_space >= flood, "{}", message("flood"));

    // At the server every connect that needed more than one SYN met a bare ACK.
    if at_server && matches!(kind, Kind::Closed | Kind::Open) {
        let again = number(&truth["connects_with_syn_retransmits"]);
        let met = p.healed + p.unhealed + p.no_listener;
        assert_eq!(met, again, "{}", message("healed, unhealed, no listener"));
        assert_eq!(p.unhealed, p.syn_timeouts, "{}", message("unhealed"));
    }
    println!(
        "{name}: {} opens, {} bare ACKs as recorded",
        p.opens, p.bare_acks
    );
}

fn manifest(dir: &Path) -> Option<Value> {
    let text = fs::read(dir.join("manifest.json")).ok()?;
    Some(serde_json::from_slice(&text).unwrap())
}

#[test]
fn those_at_hand() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let manifest = manifest(&dir).expect("tests/data belongs to the project");
    for r in [
        recording("01_l4_reuse.server.pcap", Kind::Closed),
        recording("08_server_down.client.pcap", Kind::Closed),
        recording("13_half_open.client.pcap", Kind::Open),
    ] {
        compare(&dir, &manifest, &r);
    }
}

/// The tests of the shared recordings, one for each scenario.
fn shared(recordings: &[Recording]) {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared/captures");
    let Some(manifest) = manifest(&dir) else {
        eprintln!("SKIPPED: no recordings in {}", dir.display());
        return;
    };
    for r in recordings {
        compare(&dir, &manifest, r);
    }
}

#[test]
fn l4_reuse() {
    shared(&[
        recording("01_l4_reuse.client.pcap", Kind::Unknown(2)),
        recording("01_l4_reuse.client2.pcap", Kind::Unknown(0)),
        recording("01_l4_reuse.server.pcap", Kind::Closed),
    ]);
}

#[test]
fn l4_reuse_with_timestamps() {
    shared(&[
        recording("01c_l4_reuse_timestamps.client.pcap", Kind::Unknown(0)),
        recording("01c_l4_reuse_timestamps.client2.pcap", Kind::Unknown(0)),
        recording("01c_l4_reuse_timestamps.server.pcap", Kind::Closed),
    ]);
}

#[test]
fn l4_reuse_whose_rst_is_lost() {
    shared(&[
        recording("02_l4_reuse_rst_lost.client.pcap", Kind::Unknown(0)),
        recording("02_l4_reuse_rst_lost.client2.pcap", Kind::Unknown(0)),
        recording("02_l4_reuse_rst_lost.server.pcap", Kind::Closed),
    ]);
}

#[test]
fn a_connection_pool() {
    shared(&[
        recording("06_pooled_fix.client.pcap", Kind::None),
        recording("06_pooled_fix.server.pcap", Kind::None),
    ]);
}

#[test]
fn a_server_that_is_down() {
    shared(&[
        recording("08_server_down.client.pcap", Kind::Closed),
        recording("08_server_down.server.pcap", Kind::Closed),
    ]);
}

#[test]
fn a_syn_flood() {
    shared(&[
        recording("11_syn_flood.client.pcap", Kind::HalfOpen),
        recording("11_syn_flood.client2.pcap", Kind::None),
        Recording {
            flood: 2800,
            ..recording("11_syn_flood.server.pcap", Kind::HalfOpen)
        },
    ]);
}

#[test]
fn half_open() {
    shared(&[
        recording("13_half_open.client.pcap", Kind::Open),
        recording("13_half_open.server.pcap", Kind::Open),
    ]);
}

#[test]
fn l4_reuse_over_ipv6() {
    shared(&[
        recording("22_l4_reuse_ipv6.client.pcap", Kind::Unknown(5)),
        recording("22_l4_reuse_ipv6.client2.pcap", Kind::Unknown(0)),
        recording("22_l4_reuse_ipv6.server.pcap", Kind::Closed),
    ]);
}

#[test]
fn l4_reuse_in_a_vlan() {
    shared(&[
        recording("23_l4_reuse_vlan.client.pcap", Kind::Unknown(2)),
        recording("23_l4_reuse_vlan.server.pcap", Kind::Closed),
    ]);
}
