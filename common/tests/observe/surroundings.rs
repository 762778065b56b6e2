//! Interfaces, ports, and tables that are full.

use tuplewatch_common::{
    address::{PortSpaceKey, Role},
    record::{FIRST_PORTS, Global},
    segment::{ACK, FIN, RST, SYN},
};

use super::{
    outcomes::earn_a_port_space,
    support::{
        invariants,
        script::{Flow, Host, MS, S},
        tables::Limits,
    },
};

const IN: u32 = 2;
const OUT: u32 = 3;

/// A router sees each packet twice: on the way in at one interface, on the way out at the other.
#[test]
fn a_forwarded_connection_is_counted_once() {
    let mut host = Host::new(Role::Responder);
    let flow = Flow::from_port(40_000);
    let mut pass = |segment, from, to| {
        for (ifindex, seen_before) in [(from, false), (to, true)] {
            host.seen.ifindex = ifindex;
            host.seen.seen_before = seen_before;
            host.see(segment);
        }
    };
    pass(flow.there(SYN, 5, 0), IN, OUT);
    pass(flow.back(ACK, 902, 77), OUT, IN);
    pass(flow.there(RST, 77, 0), IN, OUT);
    pass(flow.there(SYN, 5, 0), IN, OUT);
    pass(flow.back(SYN | ACK, 70, 6), OUT, IN);
    pass(flow.there(ACK, 6, 71), IN, OUT);
    pass(flow.back(FIN | ACK, 71, 6), OUT, IN);
    pass(flow.there(FIN | ACK, 6, 72), IN, OUT);
    pass(flow.there(SYN, 0x9000, 0), IN, OUT);
    pass(flow.back(ACK, 72, 7), OUT, IN);
    pass(flow.back(ACK, 72, 7), OUT, IN);
    let p = host.space(&flow);
    assert_eq!((p.opens, p.established, p.syn_retransmits), (2, 1, 1));
    assert_eq!((p.bare_acks, p.bare_acks_closed), (2, 2));
    assert_eq!((p.healed, p.unhealed), (1, 1));
    assert_eq!(host.global(Global::BareAcksWithoutPortSpace), 1);
    host.end();
}

/// What came in and found no room for its record is not counted on the way out either.
#[test]
fn a_forwarded_syn_without_a_record_is_counted_once() {
    let limits = Limits {
        handshakes: 0,
        ..Limits::ROOMY
    };
    let mut host = Host::with_limits(Role::Initiator, limits);
    let flow = Flow::from_port(40_000);
    for (ifindex, seen_before) in [(IN, false), (OUT, true)] {
        host.seen.ifindex = ifindex;
        host.seen.seen_before = seen_before;
        host.see(flow.there(SYN, 5, 0));
    }
    assert_eq!(host.space(&flow).opens, 1);
    assert_eq!(host.global(Global::HandshakesFull), 1);
}

/// The way out of the first interface is not hooked: its packets do not say that they were seen.
#[test]
fn the_record_belongs_to_the_interface_that_made_it() {
    let mut host = Host::new(Role::Responder);
    let flow = Flow::from_port(40_000);
    for segment in [
        flow.there(SYN, 5, 0),
        flow.there(SYN, 5, 0),
        flow.back(SYN | ACK, 70, 6),
        flow.there(ACK, 6, 71),
    ] {
        for ifindex in [IN, OUT] {
            host.seen.ifindex = ifindex;
            host.see(segment);
        }
    }
    let p = host.space(&flow);
    assert_eq!((p.opens, p.established, p.syn_retransmits), (1, 1, 1));
}

#[test]
fn the_answers_on_another_interface_move_nothing() {
    let mut host = Host::new(Role::Responder);
    let flow = Flow::from_port(40_000);
    host.see(flow.there(SYN, 5, 0))
        .see(flow.back(SYN | ACK, 70, 6));
    host.seen.ifindex = OUT;
    host.see(flow.there(ACK, 6, 71)).see(flow.there(RST, 6, 0));
    host.see(flow.back(RST | ACK, 0, 6));
    assert_eq!(host.tables.handshakes.len(), 1);
    host.seen.ifindex = IN;
    host.see(flow.there(ACK, 6, 71));
    assert_eq!(host.space(&flow).established, 1);
}

#[test]
fn ports_are_noted_and_then_marked() {
    let mut host = Host::new(Role::Responder);
    let all: Vec<u16> = (2048..2048 + 40).collect();
    let key = PortSpaceKey::wire(&Flow::from_port(0).tuple, Role::Responder as u8);
    for (i, port) in all.iter().enumerate() {
        let flow = Flow::from_port(*port);
        host.see(flow.there(SYN, 5, 0))
            .see(flow.back(SYN | ACK, 70, 6))
            .see(flow.there(ACK, 6, 71));
        assert_eq!(host.tables.bitmaps.is_empty(), i < FIRST_PORTS);
    }
    let seen: Vec<u16> = host.tables.ports(&key).into_iter().collect();
    assert_eq!(seen, all);
    let scanned = Flow::from_port(9);
    host.see(scanned.there(SYN, 5, 0)).end();
    assert_eq!(host.tables.ports(&key).len(), 40, "completed ones only");
}

/// 100,000 SYNs from anywhere: memory stays bounded, each loss is counted.
#[test]
fn full_tables_lose_aloud() {
    let limits = Limits {
        handshakes: 50,
        strangers: 50,
        spaces: 4,
        bitmaps: 1,
        memory_sets: 8,
        moved_slots: 8,
        opening_slots: 8,
    };
    let mut host = Host::with_limits(Role::Initiator, limits);
    for i in 0..1000u16 {
        let mut flow = Flow::from_port(1024 + i);
        flow.tuple.responder_port = i % 8;
        host.see_unchecked(flow.there(SYN, u32::from(i), 0));
    }
    invariants::check(&host.tables);
    assert_eq!(host.tables.handshakes.len(), 50);
    assert_eq!(host.tables.spaces.len(), 4);
    assert_eq!(host.global(Global::HandshakesFull), 950);
    assert_eq!(host.global(Global::PortSpacesFull), 500);
    assert_eq!(host.global(Global::SynsWithoutPortSpace), 500);
    assert!(host.global(Global::MemoryEvicted) > 900);
    host.end();
}

/// A flood takes only the part of the table that strangers may have.
#[test]
fn a_flood_leaves_room_for_known_port_spaces() {
    let limits = Limits {
        handshakes: 50,
        strangers: 40,
        ..Limits::ROOMY
    };
    let mut host = Host::with_limits(Role::Responder, limits);
    earn_a_port_space(&mut host, 1);
    for i in 0..100 {
        let mut flow = Flow::from_port(i);
        flow.tuple.initiator[15] = 200;
        host.see(flow.there(SYN, 5, 0));
    }
    assert_eq!(host.tables.handshakes.len(), 40);
    assert_eq!(host.global(Global::HandshakesFull), 60);
    let flow = Flow::from_port(40_000);
    host.see(flow.there(SYN, 5, 0))
        .see(flow.back(SYN | ACK, 70, 6))
        .see(flow.there(ACK, 6, 71));
    assert_eq!(host.space(&flow).established, 2);
    host.end();
}

/// Two CPUs, or a merged capture: the ACK's time lies before the SYN's.
#[test]
fn time_that_goes_back_a_little() {
    let mut host = Host::new(Role::Responder);
    let flow = Flow::from_port(40_000);
    host.see(flow.there(SYN, 5, 0));
    host.seen.now_ns -= MS;
    host.see(flow.there(SYN, 5, 0)).sweep();
    host.see(flow.back(SYN | ACK, 70, 6))
        .see(flow.there(ACK, 6, 71));
    let p = host.space(&flow);
    assert_eq!((p.established, p.handshake_duration[0]), (1, 1));
    host.wait(S).end();
}
