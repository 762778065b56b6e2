//! A SYN on a four-tuple that was in use before.

use tuplewatch_common::{
    address::Role,
    memory::Former,
    record::{EventKind, Global, PortSpace},
    segment::{ACK, FIN, RST, SYN},
};

use super::{
    outcomes::earn_a_port_space,
    support::script::{Flow, Host, MS, PATIENCE, S},
};

/// Number of the bare ACKs: what the former connection expected next.
const OLD: u32 = 0x4000_0000;

fn open(host: &mut Host, flow: &Flow, isn: u32) {
    host.see(flow.there(SYN, isn, 0))
        .see(flow.back(SYN | ACK, 900, isn.wrapping_add(1)))
        .see(flow.there(ACK, isn.wrapping_add(1), 901));
}

fn close(host: &mut Host, flow: &Flow) {
    host.see(flow.back(FIN | ACK, 901, OLD))
        .see(flow.there(FIN | ACK, OLD - 1, 902))
        .see(flow.back(ACK, 902, OLD));
}

/// A responder with one connection on `flow` that was closed some seconds ago.
fn after_a_closed_one(role: Role, seconds: u64) -> (Host, Flow) {
    let mut host = Host::new(role);
    let flow = Flow::from_port(40_000);
    open(&mut host, &flow, 100);
    close(&mut host, &flow);
    host.wait(seconds * S);
    (host, flow)
}

fn kinds(p: &PortSpace) -> [u64; 4] {
    [
        p.bare_acks_closed,
        p.bare_acks_open,
        p.bare_acks_half_open,
        p.bare_acks_unknown,
    ]
}

#[test]
fn refused_by_time_wait_and_healed_on_the_same_port() {
    for role in [Role::Initiator, Role::Responder] {
        let (mut host, flow) = after_a_closed_one(role, 20);
        host.see(flow.there(SYN, 5, 0))
            .see(flow.back(ACK, 902, OLD));
        let p = host.space(&flow);
        assert_eq!((p.bare_acks, kinds(&p)), (1, [1, 0, 0, 0]));
        let event = host.tables.events[0];
        assert_eq!(event.kind, EventKind::BareAck as u8);
        assert_eq!((event.isn, event.ack, event.syns), (5, OLD, 1));
        assert_eq!(event.former, Former::Closed as u8);
        assert!(event.former_age_ms.abs_diff(20_000) < 70, "{event:?}");
        host.see(flow.there(RST, OLD, 0)).wait(11 * MS);
        host.see(flow.there(SYN, 5, 0))
            .see(flow.back(SYN | ACK, 70, 6))
            .see(flow.there(ACK, 6, 71));
        let p = host.space(&flow);
        assert_eq!((p.opens, p.established, p.syn_retransmits), (2, 2, 1));
        assert_eq!((p.healed, p.unhealed, p.rsts_after_bare_ack), (1, 0, 1));
        assert_eq!(p.reuse_accepted, 1);
        assert_eq!(p.abandoned, 0, "that RST gave nothing up");
        host.end();
        assert_eq!(host.space(&flow), p);
    }
}

/// The RST closes the mapping at the NAT, and the SYN comes again from another port of the pool.
#[test]
fn healed_on_another_port() {
    let mut host = Host::new(Role::Responder);
    let ports = [40_000, 40_001, 40_002].map(Flow::from_port);
    for (flow, isn) in ports.iter().zip(100..) {
        open(&mut host, flow, isn);
        close(&mut host, flow);
    }
    host.wait(10 * S);
    for (i, flow) in ports.iter().enumerate() {
        host.see(flow.there(SYN, u32::MAX, 0));
        assert_eq!(host.tables.handshakes.len(), 1, "it moves");
        if i < 2 {
            host.see(flow.back(ACK, 902, OLD + i as u32))
                .see(flow.there(RST, OLD + i as u32, 0))
                .wait(11 * MS);
        }
    }
    host.see(ports[2].back(SYN | ACK, 70, 0))
        .see(ports[2].there(ACK, 0, 71));
    let p = host.space(&ports[0]);
    assert_eq!((p.opens, p.established, p.syn_retransmits), (4, 4, 2));
    assert_eq!((p.bare_acks, kinds(&p)), (2, [2, 0, 0, 0]));
    assert_eq!((p.healed, p.unhealed), (1, 0));
    assert_eq!(
        p.reuse_interval.iter().sum::<u64>(),
        3,
        "each port was reused"
    );
    assert_eq!(
        p.handshake_duration[8], 1,
        "22 ms since the first SYN of all"
    );
    host.end();
}

/// A SYN-ACK that was lost together with the mapping says nothing of the next port.
#[test]
fn moved_after_a_syn_ack() {
    let (mut host, flow) = after_a_closed_one(Role::Responder, 20);
    host.see(flow.there(SYN, 5, 0))
        .see(flow.back(ACK, 902, OLD))
        .see(flow.there(RST, OLD, 0))
        .see(flow.there(SYN, 5, 0))
        .see(flow.back(SYN | ACK, 0x6000_0000, 6));
    let other = Flow::from_port(40_001);
    host.see(other.there(SYN, 5, 0))
        .see(other.back(SYN | ACK, 70, 6))
        .see(other.there(ACK, 6, 71));
    let p = host.space(&flow);
    assert_eq!((p.opens, p.established, p.healed), (2, 2, 1));
    host.end();
}

/// Without a bare ACK before it, the same number on another port is another open.
#[test]
fn the_same_number_on_another_port_by_chance() {
    let mut host = Host::new(Role::Initiator);
    let (one, two) = (Flow::from_port(40_000), Flow::from_port(40_001));
    host.see(one.there(SYN, 5, 0)).see(two.there(SYN, 5, 0));
    let p = host.space(&one);
    assert_eq!((p.opens, p.syn_retransmits), (2, 0));
    assert_eq!(host.tables.handshakes.len(), 2);
}

/// The port that the SYN would come from has another open by now.
#[test]
fn moved_from_a_port_that_is_taken_again() {
    let (mut host, flow) = after_a_closed_one(Role::Responder, 20);
    host.see(flow.there(SYN, 5, 0))
        .see(flow.back(ACK, 902, OLD))
        .see(flow.there(SYN, 9, 0))
        .see(Flow::from_port(40_001).there(SYN, 5, 0));
    let p = host.space(&flow);
    assert_eq!((p.opens, p.abandoned, p.syn_retransmits), (4, 1, 0));
    assert_eq!(host.tables.handshakes.len(), 2);
}

/// A SYN refused by RST shows that no socket was left there.
#[test]
fn a_refusal_ends_what_was_remembered() {
    let (mut host, flow) = after_a_closed_one(Role::Responder, 5);
    host.see(flow.there(SYN, 5, 0))
        .see(flow.back(RST | ACK, 0, 6))
        .see(flow.there(SYN, 9, 0))
        .see(flow.back(ACK, 902, OLD));
    assert_eq!(kinds(&host.space(&flow)), [0, 0, 0, 1]);
}

/// The RST is lost: the same answer comes again, for as long as TIME_WAIT lasts.
#[test]
fn unhealed_by_the_same_number() {
    let (mut host, flow) = after_a_closed_one(Role::Responder, 20);
    host.see(flow.there(SYN, 5, 0))
        .see(flow.back(ACK, 902, OLD));
    for (n, seconds) in [1, 2, 4].into_iter().enumerate() {
        host.wait(seconds * S)
            .sweep()
            .see(flow.there(SYN, 5, 0))
            .see(flow.back(ACK, 902, OLD));
        let p = host.space(&flow);
        assert_eq!(p.unhealed, 1, "counted once, at the second answer");
        assert_eq!(
            (p.bare_acks, p.syn_retransmits),
            (n as u64 + 2, n as u64 + 1)
        );
    }
    host.end();
    let p = host.space(&flow);
    assert_eq!(
        (p.opens, p.syn_timeouts, p.unhealed, p.healed),
        (2, 1, 1, 0)
    );
}

/// One bare ACK, and no answer to the SYNs that follow (the limit of 500 ms).
#[test]
fn unhealed_by_silence() {
    let (mut host, flow) = after_a_closed_one(Role::Responder, 20);
    host.see(flow.there(SYN, 5, 0))
        .see(flow.back(ACK, 902, OLD))
        .wait(11 * MS)
        .see(flow.there(SYN, 5, 0))
        .wait(60 * S)
        .sweep();
    let p = host.space(&flow);
    assert_eq!((p.opens, p.syn_timeouts, p.unhealed), (2, 1, 1));
}

/// The client vanished and comes back on its port; the responder still holds the connection.
#[test]
fn a_connection_that_was_never_closed() {
    let mut host = Host::new(Role::Responder);
    let flow = Flow::from_port(50_001);
    open(&mut host, &flow, 100);
    host.wait(4 * S)
        .see(flow.there(SYN, 5, 0))
        .see(flow.back(ACK, 902, OLD))
        .see(flow.there(RST, OLD, 0))
        .wait(11 * MS)
        .see(flow.there(SYN, 5, 0))
        .see(flow.back(SYN | ACK, 70, 6))
        .see(flow.there(ACK, 6, 71));
    let p = host.space(&flow);
    assert_eq!((p.bare_acks, kinds(&p), p.healed), (1, [0, 1, 0, 0], 1));
    assert_eq!(p.reuse_accepted, 0);
}

/// SYN_RECV answers a SYN with another number (a flood that meets itself).
#[test]
fn a_handshake_that_was_never_completed() {
    let mut host = Host::new(Role::Responder);
    earn_a_port_space(&mut host, 1);
    let flow = Flow::from_port(40_000);
    host.see(flow.there(SYN, 100, 0))
        .see(flow.back(SYN | ACK, 900, 101))
        .wait(7 * S)
        .see(flow.there(SYN, 0x9000_0000, 0))
        .see(flow.back(ACK, 901, 101));
    let p = host.space(&flow);
    assert_eq!((p.bare_acks, kinds(&p)), (1, [0, 0, 1, 0]));
    assert_eq!((p.opens, p.half_open), (3, 1));
}

#[test]
fn a_former_connection_that_is_not_known() {
    let mut host = Host::new(Role::Initiator);
    let flow = Flow::from_port(40_000);
    host.see(flow.there(SYN, 5, 0))
        .see(flow.back(ACK, 902, OLD));
    assert_eq!(kinds(&host.space(&flow)), [0, 0, 0, 1]);

    let (mut host, flow) = after_a_closed_one(Role::Initiator, 300);
    host.see(flow.there(SYN, 5, 0))
        .see(flow.back(ACK, 902, OLD));
    assert_eq!(
        kinds(&host.space(&flow)),
        [0, 0, 0, 1],
        "longer than any hold"
    );
}

/// The agent was started in the middle of the incident: nothing is lost of what is completed.
#[test]
fn a_bare_ack_before_there_is_a_port_space() {
    let mut host = Host::new(Role::Responder);
    let flow = Flow::from_port(40_000);
    host.see(flow.there(SYN, 5, 0))
        .see(flow.back(ACK, 902, OLD))
        .see(flow.there(RST, OLD, 0));
    assert_eq!(host.global(Global::BareAcksWithoutPortSpace), 1);
    assert!(host.tables.spaces.is_empty() && host.tables.events.is_empty());
    host.see(flow.there(SYN, 5, 0))
        .see(flow.back(SYN | ACK, 70, 6))
        .see(flow.there(ACK, 6, 71));
    let p = host.space(&flow);
    assert_eq!((p.opens, p.established, p.syn_retransmits), (1, 1, 1));
    assert_eq!((p.healed, p.bare_acks), (1, 0));
    host.end();
}

/// A connection older than the agent: its FINs are enough.
#[test]
fn closed_before_its_open_was_seen() {
    let mut host = Host::new(Role::Responder);
    let flow = Flow::from_port(40_000);
    host.see(flow.back(FIN | ACK, 901, OLD)).wait(5 * S);
    host.see(flow.there(SYN, 5, 0))
        .see(flow.back(ACK, 902, OLD));
    let p = host.space(&flow);
    assert_eq!(
        (p.opens, kinds(&p)),
        (1, [1, 0, 0, 0]),
        "proves a port space"
    );
}

#[test]
fn a_stranger_that_earned_its_port_space_by_a_bare_ack_and_moved() {
    let mut host = Host::new(Role::Responder);
    let (flow, other) = (Flow::from_port(40_000), Flow::from_port(40_001));
    host.see(flow.back(FIN | ACK, 901, OLD)).wait(5 * S);
    host.see(flow.there(SYN, 5, 0));
    assert_eq!(host.tables.strangers, 1);
    host.see(flow.back(ACK, 902, OLD))
        .see(flow.there(RST, OLD, 0))
        .see(other.there(SYN, 5, 0));
    assert_eq!(host.tables.strangers, 0);
    host.see(other.back(SYN | ACK, 70, 6))
        .see(other.there(ACK, 6, 71));
    let p = host.space(&flow);
    assert_eq!((p.opens, p.established, p.healed), (1, 1, 1));
    host.end();
}

/// Without a listener even an acceptable SYN gets the bare ACK, then RST.
#[test]
fn no_listener() {
    let (mut host, flow) = after_a_closed_one(Role::Responder, 18);
    host.see(flow.there(SYN, 5, 0))
        .see(flow.back(ACK, 902, OLD))
        .see(flow.there(RST, OLD, 0))
        .wait(13 * MS)
        .see(flow.there(SYN, 5, 0))
        .see(flow.back(RST | ACK, 0, 6));
    let p = host.space(&flow);
    assert_eq!((p.opens, p.refused, p.no_listener), (2, 1, 1));
    assert_eq!((p.healed, p.unhealed), (0, 0));
    host.end();
}

/// The network delivered a copy of the SYN after the connection was established: the responder's
/// answer acknowledges what lies after that SYN.
#[test]
fn a_late_duplicate_of_the_syn() {
    for isn in [100, u32::MAX] {
        for role in [Role::Initiator, Role::Responder] {
            let mut host = Host::new(role);
            let flow = Flow::from_port(40_000);
            open(&mut host, &flow, isn);
            host.see(flow.there(SYN, isn, 0))
                .see(flow.back(ACK, 901, isn.wrapping_add(50)));
            let p = host.space(&flow);
            assert_eq!((p.opens, p.bare_acks, p.duplicate_syns), (1, 0, 1));
            assert!(host.tables.handshakes.is_empty());

            host.see(flow.there(SYN, isn, 0)).wait(60 * S).sweep();
            let p = host.space(&flow);
            assert_eq!((p.opens, p.duplicate_syns), (1, 2), "never answered");
            assert_eq!((p.abandoned, p.syn_timeouts), (0, 0));
        }
    }
}

/// Only the answer tells: an old number that happens to be used again is an open.
#[test]
fn what_looked_like_a_duplicate_and_was_accepted_or_refused() {
    let (mut host, flow) = after_a_closed_one(Role::Responder, 20);
    open(&mut host, &flow, 100);
    let p = host.space(&flow);
    assert_eq!((p.opens, p.established, p.duplicate_syns), (2, 2, 0));
    close(&mut host, &flow);
    host.wait(S)
        .see(flow.there(SYN, 100, 0))
        .see(flow.back(ACK, 902, 99));
    let p = host.space(&flow);
    assert_eq!((p.opens, p.bare_acks, p.duplicate_syns), (3, 1, 0));
    host.end();
}

/// The same host uses its port again and the numbers move forward: the responder accepts.
#[test]
fn reuse_that_is_accepted() {
    let (mut host, flow) = after_a_closed_one(Role::Responder, 20);
    open(&mut host, &flow, OLD + 1000);
    let p = host.space(&flow);
    assert_eq!((p.opens, p.established, p.reuse_accepted), (2, 2, 1));
    assert_eq!((p.bare_acks, p.healed, p.syn_retransmits), (0, 0, 0));
    let bucket = p.reuse_interval.iter().position(|n| *n == 1);
    assert_eq!(bucket, Some(15), "20 s lies in 16.4–32.8 s");
}

/// Without a FIN or RST the interval counts from the former SYN (design: "else its SYN").
#[test]
fn the_interval_between_attempts_counts_from_the_latest_one() {
    let mut host = Host::new(Role::Initiator);
    let flow = Flow::from_port(40_000);
    for (i, seconds) in [0, 40, 10].into_iter().enumerate() {
        host.wait(seconds * S).sweep();
        host.see(flow.there(SYN, i as u32, 0));
    }
    let p = host.space(&flow);
    assert_eq!(p.reuse_interval[16], 1, "40 s lies in 32.8–65.5 s");
    assert_eq!(p.reuse_interval[14], 1, "10 s lies in 8.2–16.4 s");
}

/// RST answers the bare ACK; the time of the FINs must survive it.
#[test]
fn the_rst_that_answers_a_bare_ack_does_not_make_the_former_connection_younger() {
    let (mut host, flow) = after_a_closed_one(Role::Responder, 20);
    host.see(flow.there(SYN, 5, 0))
        .see(flow.back(ACK, 902, OLD))
        .see(flow.there(RST, OLD, 0))
        .wait(PATIENCE)
        .sweep()
        .see(flow.there(SYN, 6, 0))
        .see(flow.back(ACK, 902, OLD));
    let ages: Vec<u32> = host.tables.events.iter().map(|e| e.former_age_ms).collect();
    assert!(ages[0].abs_diff(20_000) < 70, "{ages:?}");
    assert!(ages[1].abs_diff(50_000) < 70, "{ages:?}");
}
