//! How an open ends.

use tuplewatch_common::{
    address::Role,
    record::{Global, PortSpace},
    segment::{ACK, FIN, RST, SYN, Segment},
};

use super::support::script::{Flow, Host, MS, PATIENCE, S};

fn both_roles(script: impl Fn(Role)) {
    script(Role::Initiator);
    script(Role::Responder);
}

/// A port space must exist before the responder counts what is not completed.
pub fn earn_a_port_space(host: &mut Host, port: u16) {
    let flow = Flow::from_port(port);
    host.see(flow.there(SYN, 1, 0))
        .see(flow.back(SYN | ACK, 1, 2))
        .see(flow.there(ACK, 2, 2));
}

#[test]
fn three_way() {
    both_roles(|role| {
        let mut host = Host::new(role);
        let flow = Flow::from_port(40_000);
        host.see(flow.there(SYN, 100, 0))
            .wait(MS)
            .see(flow.back(SYN | ACK, 900, 101))
            .see(flow.there(ACK, 101, 901));
        let p = host.space(&flow);
        assert_eq!((p.opens, p.established), (1, 1));
        assert_eq!(p.handshake_duration[3], 1, "1 ms lies in 512–1024 µs × 128");
        assert_eq!(p.reuse_interval.iter().sum::<u64>(), 0);
        host.end();
        assert_eq!(host.space(&flow), p, "nothing is left to settle");
    });
}

/// RFC 9293 section 3.4: numbers go round.
#[test]
fn numbers_round_the_end_of_the_space() {
    for (isn, responder_isn) in [
        (u32::MAX, u32::MAX),
        (u32::MAX - 1, 0),
        (0, u32::MAX),
        (0x7fff_ffff, 0x8000_0000),
    ] {
        both_roles(|role| {
            let mut host = Host::new(role);
            let flow = Flow::from_port(40_000);
            let next = isn.wrapping_add(1);
            host.see(flow.there(SYN, isn, 0))
                .see(flow.back(SYN | ACK, responder_isn, next))
                .see(flow.there(ACK, next, responder_isn));
            assert_eq!(host.space(&flow).established, 0, "the old number");
            host.see(flow.there(ACK, next, responder_isn.wrapping_add(1)));
            assert_eq!(host.space(&flow).established, 1, "{isn} {responder_isn}");
        });
    }
}

/// The third ACK may be lost or carry data; the next segment without payload completes.
#[test]
fn a_fin_completes_too() {
    let mut host = Host::new(Role::Responder);
    let flow = Flow::from_port(40_000);
    host.see(flow.there(SYN, 100, 0))
        .see(flow.back(SYN | ACK, 900, 101))
        .see(Segment {
            payload_len: 10,
            ..flow.there(ACK, 101, 901)
        })
        .see(flow.there(FIN | ACK, 111, 901));
    assert_eq!(host.space(&flow).established, 1);
}

#[test]
fn refused() {
    both_roles(|role| {
        let mut host = Host::new(role);
        earn_a_port_space(&mut host, 1);
        let flow = Flow::from_port(40_000);
        host.see(flow.there(SYN, u32::MAX, 0))
            .see(flow.back(RST | ACK, 0, 1));
        assert_eq!(host.space(&flow).refused, 0, "not an answer to this SYN");
        host.see(flow.back(RST | ACK, 0, 0));
        let p = host.space(&flow);
        assert_eq!((p.opens, p.refused, p.no_listener), (2, 1, 0));
    });
}

/// RFC 9293 section 3.10.7.3: in SYN-SENT a RST without ACK is dropped. It answers a stray segment of the
/// former connection.
#[test]
fn a_rst_without_ack_refuses_no_syn() {
    both_roles(|role| {
        let mut host = Host::new(role);
        earn_a_port_space(&mut host, 1);
        let flow = Flow::from_port(40_000);
        host.see(flow.there(SYN, 7, 0)).see(flow.back(RST, 77, 0));
        assert_eq!(host.space(&flow).refused, 0);
        host.see(flow.back(SYN | ACK, 1, 8));
        let p = host.see(flow.back(RST, 2, 0)).space(&flow);
        assert_eq!((p.opens, p.refused), (2, 1), "after the SYN-ACK");
        host.see(flow.there(SYN, 9, 0))
            .see(flow.back(RST, 77, 0))
            .see(flow.back(SYN | ACK, 1, 10))
            .see(flow.there(ACK, 10, 2));
        let p = host.space(&flow);
        assert_eq!((p.opens, p.established), (3, 2));
    });
}

#[test]
fn a_syn_sent_again_is_counted_once_for_each_packet() {
    let mut host = Host::new(Role::Initiator);
    let flow = Flow::from_port(40_000);
    host.see(flow.there(SYN, 7, 0));
    for second in 1..=3 {
        host.wait(second * S).sweep().see(flow.there(SYN, 7, 0));
        assert_eq!(host.space(&flow).syn_retransmits, second);
    }
    host.see(flow.back(SYN | ACK, 1, 8))
        .see(flow.there(ACK, 8, 2));
    let p = host.space(&flow);
    assert_eq!((p.opens, p.established, p.syn_retransmits), (1, 1, 3));
}

/// At the responder the SYNs are counted when the handshake is complete.
#[test]
fn what_was_not_counted_at_the_syn_is_counted_with_the_outcome() {
    let mut host = Host::new(Role::Responder);
    let flow = Flow::from_port(40_000);
    for _ in 0..3 {
        host.see(flow.there(SYN, 7, 0)).wait(S);
    }
    assert!(host.tables.spaces.is_empty(), "a SYN earns no port space");
    assert_eq!(host.global(Global::SynsWithoutPortSpace), 1);
    host.see(flow.back(SYN | ACK, 1, 8))
        .see(flow.there(ACK, 8, 2));
    let p = host.space(&flow);
    assert_eq!((p.opens, p.established, p.syn_retransmits), (1, 1, 2));
}

/// Each known schedule of retransmissions: none is taken for a new open.
#[test]
fn a_schedule_of_retransmissions_is_one_open_that_times_out() {
    let doubling = [0, 1, 3, 7, 15, 31, 63].as_slice();
    let linear_first = &[0, 1, 2, 3, 4, 5, 7, 11, 19, 35, 67];
    for schedule in [doubling, linear_first] {
        let mut host = Host::new(Role::Initiator);
        let flow = Flow::from_port(40_000);
        let start = host.seen.now_ns;
        for second in 0..=210 {
            host.seen.now_ns = start + second * S;
            host.sweep();
            if schedule.contains(&second) {
                host.see(flow.there(SYN, 7, 0));
            }
        }
        let p = host.space(&flow);
        assert!(host.tables.handshakes.is_empty(), "given up by 210 s");
        assert_eq!((p.opens, p.syn_timeouts), (1, 1), "{schedule:?}");
        assert_eq!(p.syn_retransmits, schedule.len() as u64 - 1);
    }
}

#[test]
fn abandoned() {
    let mut host = Host::new(Role::Initiator);
    let silent = Flow::from_port(40_000);
    host.see(silent.there(SYN, 7, 0)).wait(2 * S).sweep();
    assert_eq!(host.space(&silent).abandoned, 0, "the SYN may come again");
    host.wait(2 * S).sweep();
    assert_eq!(host.space(&silent).abandoned, 1, "given up before it did");
    let reset = Flow::from_port(40_001);
    host.see(reset.there(SYN, 7, 0)).see(reset.there(RST, 8, 0));
    let p = host.space(&reset);
    assert_eq!((p.opens, p.abandoned, p.syn_timeouts), (2, 2, 0));
    let scan = Flow::from_port(40_002);
    host.see(scan.there(SYN, 7, 0))
        .see(scan.back(SYN | ACK, 1, 8))
        .see(scan.there(RST, 8, 0));
    assert_eq!(
        host.space(&scan).abandoned,
        3,
        "RST instead of the third ACK"
    );
}

#[test]
fn half_open() {
    let mut host = Host::new(Role::Responder);
    earn_a_port_space(&mut host, 1);
    let flow = Flow::from_port(40_000);
    host.see(flow.there(SYN, 7, 0))
        .see(flow.back(SYN | ACK, 1, 8))
        .wait(S)
        .see(flow.back(SYN | ACK, 1, 8))
        .wait(PATIENCE - S)
        .sweep();
    assert_eq!(host.space(&flow).half_open, 0);
    host.wait(1).sweep();
    let p = host.space(&flow);
    assert_eq!((p.opens, p.half_open), (2, 1));
}

/// An application that gave up and asked again got the same port: another initial sequence number.
#[test]
fn replaced_by_another_open() {
    let mut host = Host::new(Role::Initiator);
    let flow = Flow::from_port(40_000);
    host.see(flow.there(SYN, 7, 0))
        .wait(S)
        .see(flow.there(SYN, 7, 0))
        .wait(100 * MS)
        .see(flow.there(SYN, 8, 0));
    let p = host.space(&flow);
    assert_eq!((p.opens, p.syn_timeouts, p.syn_retransmits), (2, 1, 1));
    host.see(flow.there(SYN, 9, 0));
    let p = host.space(&flow);
    assert_eq!((p.opens, p.syn_timeouts, p.abandoned), (3, 1, 1));
    host.see(flow.back(SYN | ACK, 1, 10))
        .see(flow.there(SYN, 11, 0));
    let p = host.space(&flow);
    assert_eq!((p.opens, p.half_open), (4, 1));
    host.see(flow.back(SYN | ACK, 1, 10));
    host.see(flow.there(ACK, 12, 2));
    assert_eq!(
        host.space(&flow).established,
        0,
        "that SYN-ACK came too late"
    );
    host.see(flow.back(SYN | ACK, 1, 12))
        .see(flow.there(ACK, 12, 2));
    assert_eq!(host.space(&flow).established, 1);
}

/// RFC 7413: the responder acknowledges the SYN with its data, or the SYN alone.
#[test]
fn fast_open() {
    for acked in [0, 20, 7] {
        both_roles(|role| {
            let mut host = Host::new(role);
            let flow = Flow::from_port(40_000);
            let isn = u32::MAX - 5;
            let next = isn.wrapping_add(1);
            host.see(Segment {
                payload_len: 20,
                ..flow.there(SYN, isn, 0)
            })
            .see(flow.back(SYN | ACK, 900, next.wrapping_add(acked)))
            .see(flow.back(ACK, 901, next.wrapping_add(20)))
            .see(flow.there(ACK, next.wrapping_add(20), 901));
            let p = host.space(&flow);
            assert_eq!((p.opens, p.established, p.bare_acks), (1, 1, 0));
        });
    }
}

/// A flood and a scan must not push out the port spaces that matter.
#[test]
fn a_flood_earns_no_port_space() {
    let mut host = Host::new(Role::Responder);
    for i in 0..200 {
        let mut flow = Flow::from_port(1024 + i);
        flow.tuple.initiator[15] = (i % 100) as u8;
        host.see(flow.there(SYN, u32::from(i), 0))
            .see(flow.back(SYN | ACK, 5, u32::from(i) + 1));
        if i % 3 == 0 {
            host.see(flow.there(RST, u32::from(i) + 1, 0));
        }
    }
    host.end();
    assert!(host.tables.spaces.is_empty());
    assert_eq!(host.global(Global::SynsWithoutPortSpace), 200);
}

#[test]
fn plain_data_and_stray_segments_change_nothing() {
    let mut host = Host::new(Role::Responder);
    let flow = Flow::from_port(40_000);
    let before = host.tables.memory.clone();
    for flags in [
        ACK,
        0,
        SYN | ACK,
        SYN | RST,
        SYN | FIN | ACK,
        RST,
        RST | ACK,
    ] {
        host.see(flow.there(flags, 1, 1))
            .see(flow.back(flags, 1, 1));
    }
    host.see(flow.there(SYN, 1, 0)).see(Segment {
        payload_len: 1,
        ..flow.back(ACK, 77, 88)
    });
    host.end();
    assert_eq!(host.space(&flow), PortSpace::default());
    assert_ne!(host.tables.memory, before, "only the SYN is remembered");
    assert!(host.tables.events.is_empty());
}
