//! A client in a script: what each of its connections is answered, second by second.

use std::collections::BTreeMap;

use tuplewatch_common::{
    address::{FourTuple, Role, v4_mapped},
    conversation::Conversation,
    http::{BALANCERS, Balancer},
};

use super::*;
use crate::core::{observation::Talk, signature::testing::Script};

const ORDERS: u32 = 7;
const READY: u32 = 9;
const S: u64 = 1_000_000_000;
/// The clock of a script begins here.
const BEGIN: u64 = 1_000;

/// The connections of a client to one service.
#[derive(Default)]
struct Client {
    connections: BTreeMap<u16, Talk>,
    next: u16,
}

impl Client {
    /// Opens a connection at that second of the script; gives its port.
    fn open(&mut self, second: u64) -> u16 {
        self.next += 1;
        let conversation = Conversation {
            tuple: FourTuple {
                initiator: v4_mapped([10, 0, 0, 1]),
                responder: v4_mapped([203, 0, 113, 100]),
                responder_port: 80,
                initiator_port: self.next,
                pad: 0,
            },
            opened_ns: (BEGIN + second) * S,
            role: Role::Initiator as u8,
            ..Conversation::default()
        };
        let talk = Talk {
            conversation,
            page: None,
            closed: false,
        };
        self.connections.insert(self.next, talk);
        self.next
    }

    /// A request on a connection and its answer, half a second after the second began.
    fn ask(&mut self, second: u64, port: u16, kind: u32, status: u16) {
        self.ask_at((BEGIN + second) * S + S / 2, port, kind, status);
    }

    fn ask_at(&mut self, now_ns: u64, port: u16, kind: u32, status: u16) {
        let c = &mut self.connections.get_mut(&port).unwrap().conversation;
        let seq = c.requests + 1;
        c.on_request(kind, seq, now_ns);
        c.on_response(status, seq, now_ns + 1_000_000);
    }

    fn fails_as(&mut self, port: u16, page: &'static Balancer) {
        self.connections.get_mut(&port).unwrap().page = Some(page);
    }

    fn close(&mut self, port: u16) {
        self.connections.get_mut(&port).unwrap().closed = true;
    }

    /// A connection for one request.
    fn once(&mut self, second: u64, kind: u32, status: u16) {
        let port = self.open(second);
        self.ask(second, port, kind, status);
    }

    fn tell(&self, host: &mut Script) {
        host.talks = self.connections.values().copied().collect();
    }
}

/// Runs a script: what happens in each second.
fn run(seconds: u64, mut each: impl FnMut(&mut Client, u64)) -> (Script, Client) {
    let (mut host, mut client) = (Script::new(), Client::default());
    host.run(seconds, |h, second| {
        each(&mut client, second);
        client.tell(h);
    });
    (host, client)
}

/// From second 5 on connection 1 fails, whose peer new connections do not reach any more.
fn pinned(client: &mut Client, second: u64) {
    if second == 0 {
        client.open(0);
        client.open(0);
    }
    client.ask(second, 1, ORDERS, if second < 5 { 200 } else { 503 });
    client.ask(second, 2, ORDERS, 200);
    client.once(second, ORDERS, 200);
}

#[test]
fn a_connection_that_fails_while_newer_ones_do_well_is_pinned() {
    let (host, _) = run(8, pinned);
    assert_eq!(host.verdicts(), [], "three failures");
    let (host, _) = run(9, pinned);
    let finding = host.finding(Verdict::Pinned5xx);
    assert_eq!(finding.confidence, Confidence::High);
    let stuck = finding.evidence.stuck.unwrap();
    assert_eq!((stuck.stuck, stuck.failures, stuck.longest), (1, 4, 4));
    assert_eq!((stuck.better, stuck.better_newer, stuck.worse), (5, 3, 0));
    assert!(stuck.same_kind_served && stuck.page.is_none());
    let connection = &stuck.connections[0];
    assert_eq!((connection.ends.client_port, connection.requests), (1, 9));
    assert_eq!((connection.in_a_row, connection.failures), (4, 4));
    let command = "ss -K dst 203.0.113.100 dport = 80 src 10.0.0.1 sport = 1";
    assert_eq!(connection.close.as_deref(), Some(command));
    assert!(finding.remedy.contains(command), "{}", finding.remedy);
    assert!(
        finding
            .summary
            .starts_with("* → 203.0.113.100:80: 1 kept-alive")
    );
}

#[test]
fn it_ends_after_the_last_failure_whether_it_recovers_or_is_closed() {
    for closes in [false, true] {
        let (mut host, mut client) = run(20, pinned);
        host.run(58, |h, second| {
            let second = 20 + second;
            if closes {
                client.close(1);
            } else {
                client.ask(second, 1, ORDERS, 200);
            }
            client.once(second, ORDERS, 200);
            client.tell(h);
        });
        assert_eq!(host.verdicts(), [Verdict::Pinned5xx]);
        let stuck = host.finding(Verdict::Pinned5xx).evidence.stuck.unwrap();
        let became = stuck.connections[0].became;
        assert_eq!(became == Became::Closed, closes);
        assert_eq!((stuck.failures, &stuck.connections[0].close), (15, &None));
        host.run(5, |h, _| client.tell(h));
        assert_eq!(host.verdicts(), []);
    }
}

#[test]
fn a_service_that_fails_as_a_whole_is_down() {
    let whole = |client: &mut Client, second: u64| {
        if second == 0 {
            client.open(0);
            client.open(0);
        }
        let status = if (5..30).contains(&second) { 503 } else { 200 };
        client.ask(second, 1, ORDERS, status);
        if second.is_multiple_of(2) {
            client.ask(second, 2, ORDERS, status);
        }
        client.once(second, ORDERS, status);
    };
    for seconds in 1..45 {
        let (host, _) = run(seconds, whole);
        let expected: &[Verdict] = if (9..=30).contains(&seconds) {
            &[Verdict::ServiceDown]
        } else {
            &[]
        };
        // In the second of the recovery some connections have failed for the last time.
        if seconds != 31 {
            assert_eq!(host.verdicts(), expected, "{seconds}");
        }
        assert!(!host.verdicts().contains(&Verdict::Pinned5xx), "{seconds}");
    }
}

#[test]
fn a_client_that_loops_on_one_broken_url_is_not_pinned() {
    let (host, _) = run(20, |client, second| {
        if second == 0 {
            client.open(0);
        }
        client.ask(second, 1, READY, 503);
        client.once(second, ORDERS, 200);
    });
    assert_eq!(host.verdicts(), [Verdict::EndpointError]);
    let finding = host.finding(Verdict::EndpointError);
    assert!(
        finding.summary.contains("method and path"),
        "{}",
        finding.summary
    );
}

#[test]
fn a_health_check_that_fails_beside_healthy_traffic_on_the_same_connection() {
    let (host, _) = run(20, |client, second| {
        if second == 0 {
            client.open(0);
        }
        let now = (BEGIN + second) * S;
        client.ask_at(now, 1, READY, 503);
        client.ask_at(now + S / 4, 1, ORDERS, 200);
    });
    assert_eq!(host.verdicts(), [Verdict::EndpointError]);
}

#[test]
fn a_share_of_all_new_connections_that_fails_is_one_backend_or_one_tenant() {
    let mut ports = Vec::new();
    for seconds in [10, 20, 35, 60] {
        let (host, _) = run(seconds, |client, second| {
            if second == 0 {
                ports.clear();
            }
            for n in 0..2u64 {
                let port = client.open(second);
                // Each fourth connection fails always.
                let status = if (second * 2 + n).is_multiple_of(4) {
                    503
                } else {
                    200
                };
                ports.push((port, status));
            }
            for (port, status) in &ports {
                client.ask(second, *port, ORDERS, *status);
            }
        });
        assert!(
            !host.verdicts().contains(&Verdict::Pinned5xx),
            "{seconds}: {:?}",
            host.verdicts()
        );
    }
}

#[test]
fn a_fail_over_that_goes_on_is_not_told_before_new_connections_do_well() {
    let fail_over = |client: &mut Client, second: u64| {
        if second == 0 {
            client.open(0);
        }
        client.ask(second, 1, ORDERS, 503);
        // Half of the new connections reach the dead endpoint until second 10.
        client.once(second, ORDERS, if second < 10 { 503 } else { 200 });
        client.once(second, ORDERS, 200);
    };
    let (host, _) = run(10, fail_over);
    assert_eq!(host.verdicts(), []);
    let (host, _) = run(30, fail_over);
    assert_eq!(host.verdicts(), [Verdict::Pinned5xx]);
    let stuck = host.finding(Verdict::Pinned5xx).evidence.stuck.unwrap();
    assert_eq!((stuck.worse_newer, stuck.stuck), (9, 1));
}

#[test]
fn the_page_of_a_balancer_needs_no_second_request_of_the_kind() {
    let (host, _) = run(10, |client, second| {
        if second == 0 {
            let port = client.open(0);
            client.fails_as(port, &BALANCERS[0]);
        }
        client.ask(second, 1, ORDERS, 503);
        client.once(second, READY, 200);
    });
    let finding = host.finding(Verdict::Pinned5xx);
    assert_eq!(finding.confidence, Confidence::Medium);
    assert!(
        finding
            .summary
            .contains("AWS Application Load Balancer's own")
    );
}

#[test]
fn a_balancer_without_targets_for_one_path_is_no_dead_endpoint() {
    let (host, _) = run(20, |client, second| {
        if second == 0 {
            client.open(0);
        }
        client.ask(second, 1, READY, 503);
        client.fails_as(1, &BALANCERS[0]);
        client.once(second, READY, 503);
        client.once(second, ORDERS, 200);
    });
    assert_eq!(host.verdicts(), [Verdict::EndpointError]);
}

#[test]
fn a_pool_that_opens_no_connection_tells_with_less_confidence() {
    let (host, _) = run(10, |client, second| {
        if second == 0 {
            for _ in 0..5 {
                client.open(0);
            }
        }
        for port in 1..=5 {
            client.ask(second, port, ORDERS, if port == 1 { 503 } else { 200 });
        }
    });
    let finding = host.finding(Verdict::Pinned5xx);
    assert_eq!(finding.confidence, Confidence::Medium);
}

#[test]
fn failures_that_are_rare_are_no_row() {
    let (host, _) = run(120, |client, second| {
        if second == 0 {
            client.open(0);
        }
        if second.is_multiple_of(25) {
            client.ask(second, 1, ORDERS, 503);
        }
        client.once(second, ORDERS, 200);
    });
    assert_eq!(host.verdicts(), []);
}
