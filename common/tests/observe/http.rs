//! Which conversation an HTTP message belongs to.

use tuplewatch_common::{
    address::{FourTuple, Role, v4_mapped},
    conversation::Conversation,
    http::Message,
    observe::{Spoken, observe_http},
    segment::{ACK, FIN, SYN, Segment},
};

use crate::support::script::{Host, MS, S};

const CLIENT: FourTuple = FourTuple {
    initiator: v4_mapped([10, 0, 0, 1]),
    responder: v4_mapped([203, 0, 113, 10]),
    responder_port: 80,
    initiator_port: 40_000,
    pad: 0,
};
const ISN: u32 = 1000;
const KIND: u32 = 77;

fn segment(tuple: FourTuple, flags: u8, seq: u32, ack: u32) -> Segment {
    Segment {
        tuple,
        flags,
        seq,
        ack,
        ..Segment::default()
    }
}

/// A handshake whose initial sequence number is `isn`.
fn open(host: &mut Host, isn: u32) {
    host.see(segment(CLIENT, SYN, isn, 0));
    host.see(segment(CLIENT.reversed(), SYN | ACK, 9000, isn + 1));
    host.see(segment(CLIENT, ACK, isn + 1, 9001));
}

fn close(host: &mut Host) {
    host.see(segment(CLIENT, FIN | ACK, 1, 1));
    host.see(segment(CLIENT.reversed(), FIN | ACK, 1, 1));
}

fn say(host: &mut Host, tuple: FourTuple, seq: u32, message: Message) -> bool {
    let spoken = Spoken {
        tuple: &tuple,
        hash: tuple.hash(),
        seq,
        message,
    };
    observe_http(&mut host.tables, &spoken, &host.seen)
}

fn request(host: &mut Host, seq: u32) {
    let message = Message::Request { kind: KIND };
    assert!(!say(host, CLIENT, seq, message));
}

fn response(host: &mut Host, seq: u32, status: u16) -> bool {
    say(host, CLIENT.reversed(), seq, Message::Response { status })
}

fn conversation(host: &Host) -> Conversation {
    assert!(host.tables.conversations.len() <= 1);
    host.tables.conversations[&CLIENT.hash()]
}

#[test]
fn requests_begin_conversations_and_failures_count_once() {
    let mut host = Host::new(Role::Initiator);
    assert!(!response(&mut host, 1, 503), "nobody has asked");
    assert!(host.tables.conversations.is_empty());
    open(&mut host, ISN);
    let opened = host.seen.now_ns;
    for n in 0..5 {
        host.wait(S);
        let seq = ISN + 1 + n * 100;
        request(&mut host, seq);
        request(&mut host, seq);
        assert!(response(&mut host, 9001 + n * 300, 503));
        assert!(!response(&mut host, 9001 + n * 300, 503), "sent again");
    }
    let c = conversation(&host);
    assert_eq!((c.requests, c.responses, c.run), (5, 5, 5));
    assert_eq!(c.role, Role::Initiator as u8);
    assert_eq!(c.tuple, CLIENT);
    assert_eq!(c.run_kind, KIND);
    assert!(opened - c.opened_ns < 68 * MS, "{} {opened}", c.opened_ns);
    assert_eq!(c.failed_ns - c.run_since_ns, 4 * S);
}

#[test]
fn an_interface_that_forwards_counts_nothing_twice() {
    let mut host = Host::new(Role::Responder);
    for n in 0..4 {
        host.wait(S);
        for ifindex in [2, 3] {
            host.seen.ifindex = ifindex;
            request(&mut host, 100 + n * 100);
        }
        for ifindex in [3, 2] {
            host.seen.ifindex = ifindex;
            let counted = response(&mut host, 500 + n * 100, 503);
            assert_eq!(counted, ifindex == 2);
        }
    }
    let c = conversation(&host);
    assert_eq!((c.requests, c.responses, c.ifindex), (4, 4, 2));
    // The first interface is gone.
    host.seen.ifindex = 3;
    host.wait(6 * S);
    request(&mut host, 1000);
    assert!(response(&mut host, 1000, 503));
    assert_eq!(conversation(&host).ifindex, 3);
}

#[test]
fn a_new_connection_on_the_same_ports_begins_anew() {
    let mut host = Host::new(Role::Initiator);
    open(&mut host, ISN);
    request(&mut host, ISN + 1);
    assert!(response(&mut host, 9001, 503));
    // A large upload in between changes nothing.
    host.wait(S);
    request(&mut host, ISN + (1 << 26));
    assert!(response(&mut host, 9301, 503));
    assert_eq!(conversation(&host).run, 2);
    close(&mut host);
    host.wait(S);
    open(&mut host, 3_000_000_000);
    request(&mut host, 3_000_000_001);
    assert!(!response(&mut host, 9001, 200));
    let c = conversation(&host);
    assert_eq!((c.requests, c.responses, c.failures), (1, 1, 0));
    assert!(!c.is_failing());
}

#[test]
fn one_older_than_the_agent_has_no_time_of_opening() {
    let mut host = Host::new(Role::Initiator);
    request(&mut host, 5);
    assert!(response(&mut host, 5, 500));
    assert_eq!(conversation(&host).opened_ns, 0);
}
