//! A host in a script: connections that stall, and new ones beside them.

mod lossy;

use std::time::Duration;

use tuplewatch_common::address::{FourTuple, Point, v4_mapped};

use super::*;
use crate::core::{
    finding::{Confidence, Severity, Verdict},
    idle::Settings,
    signature::testing::{Script, opens_to},
    stalled::{Process, Stalled},
};

const S: u64 = 1_000_000_000;
/// The clock of a script begins here.
const BEGIN: u64 = 1_000;

fn space(role: Role, client: [u8; 4]) -> PortSpaceKey {
    PortSpaceKey {
        initiator: v4_mapped(client),
        role: role as u8,
        ..opens_to(10)
    }
}

/// A connection whose request went out at that second of the script and was repeated as Linux does.
fn stalled(key: &PortSpaceKey, port: u16, from: u64, now: u64) -> Stalled {
    let after = Duration::from_secs(now - from).as_millis() as u64;
    // 0.2 s, 0.6 s, 1.4 s …
    let rtos = (1..20)
        .take_while(|n| 200 * ((1 << n) - 1) <= after)
        .count();
    Stalled {
        connection: FourTuple {
            initiator: key.initiator,
            responder: key.responder,
            responder_port: key.responder_port,
            initiator_port: port,
            pad: 0,
        },
        role: Role::from_u8(key.role),
        point: Point::Socket,
        netns: key.netns,
        opened: Some(Moment(BEGIN * S)),
        since: Moment((BEGIN + from) * S),
        heard: None,
        how: How::Unacked,
        rtos: rtos as u32,
        probes: 0,
        unacked: 112,
        waiting: 0,
        is_full_size: false,
        is_answered: false,
        is_used: true,
        settings: Settings {
            user_timeout: Some(Duration::ZERO),
            ..Settings::default()
        },
        process: Some(Process {
            pid: 4711,
            command: Some("java".into()),
        }),
    }
}

/// `ports` stall from second 5 on; `each` changes what is seen of them.
fn run(
    key: PortSpaceKey,
    seconds: u64,
    ports: std::ops::Range<u16>,
    newer: bool,
    each: impl Fn(&mut Stalled, u64),
) -> Script {
    let mut host = Script::new();
    host.run(seconds, |h, second| {
        if second < 5 || newer {
            h.served(key, 1);
        }
        // The look comes at the end of the second.
        let now = second + 1;
        h.stalled = if now > 5 {
            ports
                .clone()
                .map(|port| stalled(&key, port, 5, now))
                .collect()
        } else {
            Vec::new()
        };
        for stalled in &mut h.stalled {
            each(stalled, now);
        }
    });
    host
}

fn as_is(_: &mut Stalled, _: u64) {}

#[test]
fn a_connection_that_gets_nothing_through_while_new_ones_do_is_black_holed() {
    let key = space(Role::Initiator, [10, 0, 0, 1]);
    assert_eq!(run(key, 7, 1..2, true, as_is).verdicts(), [], "two seconds");
    let host = run(key, 9, 1..2, true, as_is);
    let finding = host.finding(Verdict::BlackHoled);
    assert_eq!(finding.severity, Severity::Warning);
    assert_eq!(finding.confidence, Confidence::High);
    let stall = finding.evidence.stall.unwrap();
    assert_eq!(
        (stall.stalled, stall.unacked_bytes, stall.newer),
        (1, 112, 3)
    );
    let connection = &stall.connections[0];
    assert_eq!((connection.rtos, connection.pid), (4, Some(4711)));
    assert_eq!(connection.stalled_seconds, 4.0);
    assert_eq!(connection.age_seconds, Some(9.0));
    let command = "ss -K dst 203.0.113.10 dport = 8080 src 10.0.0.1 sport = 1";
    assert_eq!(connection.close.as_deref(), Some(command));
    for part in [
        command,
        "java[4711]",
        "TCP_USER_TIMEOUT",
        "this socket has none",
    ] {
        assert!(finding.remedy.contains(part), "{}", finding.remedy);
    }
}

#[test]
fn it_is_critical_after_a_while_or_on_several_connections() {
    let key = space(Role::Initiator, [10, 0, 0, 1]);
    let severity = |host: &Script| host.finding(Verdict::BlackHoled).severity;
    assert_eq!(
        severity(&run(key, 9, 1..4, true, as_is)),
        Severity::Critical
    );
    assert_eq!(
        severity(&run(key, 14, 1..2, true, as_is)),
        Severity::Warning
    );
    assert_eq!(
        severity(&run(key, 15, 1..2, true, as_is)),
        Severity::Critical
    );
}

#[test]
fn without_newer_connections_the_path_is_down() {
    let key = space(Role::Initiator, [10, 0, 0, 1]);
    let host = run(key, 30, 1..4, false, as_is);
    assert_eq!(host.verdicts(), [Verdict::PathDown]);
    let summary = host.finding(Verdict::PathDown).summary;
    assert!(
        summary.contains("nobody has opened another one"),
        "{summary}"
    );
}

/// As those who open connections see it: each SYN is sent again, until they give up.
#[test]
fn syns_that_are_lost_on_a_path_that_is_down_are_no_chance() {
    let key = space(Role::Initiator, [10, 0, 0, 1]);
    let mut host = Script::new();
    host.run(13, |h, second| {
        if second < 5 {
            h.served(key, 5);
        } else {
            h.unanswered(key, 3, 5);
        }
        let now = second + 1;
        h.stalled = (5..now.min(6))
            .flat_map(|_| (1..4).map(|port| stalled(&key, port, 5, now)))
            .collect();
    });
    assert!(
        host.verdicts().contains(&Verdict::PathDown),
        "{:?}",
        host.verdicts()
    );
}

/// A switch-over of five seconds: new connections are established before the timers of the old ones
/// run out again.
#[test]
fn a_path_that_comes_back_is_no_black_hole() {
    let key = space(Role::Initiator, [10, 0, 0, 1]);
    let mut host = Script::new();
    host.run(30, |h, second| {
        if !(5..10).contains(&second) {
            h.served(key, 5);
        }
        let now = second + 1;
        // The fifth time-out is 6.2 s after the first transmission.
        h.stalled = if (6..12).contains(&now) {
            (1..20).map(|port| stalled(&key, port, 5, now)).collect()
        } else {
            Vec::new()
        };
        assert!(!h.verdicts().contains(&Verdict::BlackHoled), "{second}");
    });
}

/// The handshake is a proxy's, what is behind it is dead: new connections stall as well.
#[test]
fn new_connections_that_stall_too_do_not_do_better() {
    let key = space(Role::Initiator, [10, 0, 0, 1]);
    let mut host = Script::new();
    host.run(20, |h, second| {
        h.served(key, 1);
        let now = second + 1;
        h.stalled = (5..now)
            .map(|from| {
                let opened = Some(Moment((BEGIN + from) * S + 1));
                let port = from as u16;
                Stalled {
                    opened,
                    ..stalled(&key, port, from, now)
                }
            })
            .collect();
    });
    assert_eq!(host.verdicts(), [Verdict::PathDown]);
}

#[test]
fn only_large_segments_that_get_lost_are_an_mtu_black_hole() {
    let key = space(Role::Initiator, [10, 0, 0, 1]);
    let answered = run(key, 20, 1..3, true, |s, _| {
        s.unacked = 14_480;
        s.is_full_size = true;
        s.is_answered = true;
    });
    assert_eq!(answered.verdicts(), [Verdict::MtuBlackHole]);
    // Nothing comes back, but new connections stall in the same way.
    let silent = run(key, 20, 1..3, true, |s, _| {
        s.unacked = 14_480;
        s.is_full_size = true;
        if s.connection.initiator_port == 2 {
            s.opened = Some(Moment((BEGIN + 6) * S));
        }
    });
    assert_eq!(silent.verdicts(), [Verdict::MtuBlackHole]);
    let alone = run(key, 20, 1..2, true, |s, _| s.is_full_size = true);
    let finding = alone.finding(Verdict::BlackHoled);
    assert_eq!(finding.confidence, Confidence::Medium);
}

#[test]
fn a_peer_that_has_not_accepted_or_does_not_read_is_no_black_hole() {
    let key = space(Role::Initiator, [10, 0, 0, 1]);
    let not_accepted = run(key, 20, 1..4, true, |s, _| s.is_used = false);
    assert_eq!(not_accepted.verdicts(), []);
    let one_way = run(key, 20, 1..4, true, |s, _| s.is_answered = true);
    assert_eq!(one_way.verdicts(), [Verdict::BlackHoled]);
    let closed = |s: &mut Stalled, _| {
        s.how = How::Closed;
        s.rtos = 0;
        s.waiting = 100_000;
    };
    assert_eq!(run(key, 10, 1..2, true, closed).verdicts(), []);
    let host = run(key, 20, 1..2, true, closed);
    assert_eq!(host.verdicts(), [Verdict::ZeroWindow]);
}

/// A probe every three seconds on an idle connection.
fn probes(s: &mut Stalled, now: u64) {
    s.how = How::Silent;
    (s.rtos, s.unacked) = (0, 0);
    s.probes = (now as u32 - 5) / 3 + 1;
}

#[test]
fn unanswered_probes_count_at_either_end() {
    let host = run(
        space(Role::Initiator, [10, 0, 0, 1]),
        20,
        1..5,
        true,
        probes,
    );
    let finding = host.finding(Verdict::BlackHoled);
    assert_eq!(finding.severity, Severity::Warning, "nobody waits yet");
    let key = space(Role::Responder, [10, 0, 0, 1]);
    let host = run(key, 20, 1..2, true, probes);
    let finding = host.finding(Verdict::BlackHoled);
    assert_eq!(finding.confidence, Confidence::Medium);
    let stall = finding.evidence.stall.unwrap();
    let command = "ss -K dst 10.0.0.1 dport = 1 src 203.0.113.10 sport = 8080";
    assert_eq!(stall.connections[0].close.as_deref(), Some(command));
    assert!(finding.ruled_out.iter().any(|r| r.name == "client_gone"));
}

#[test]
fn hosts_behind_a_public_address_may_vanish() {
    let key = space(Role::Responder, [198, 51, 100, 7]);
    assert_eq!(run(key, 30, 1..4, true, as_is).verdicts(), []);
    let host = run(key, 30, 1..11, true, as_is);
    assert_eq!(host.verdicts(), [Verdict::BlackHoled]);
    // One line for all clients whose path is down.
    let mut host = Script::new();
    host.run(20, |h, second| {
        h.stalled = (1..5)
            .map(|n| stalled(&space(Role::Responder, [198, 51, 100, n]), 1, 0, second + 1))
            .collect();
    });
    let finding = host.finding(Verdict::PathDown);
    assert!(
        finding.summary.contains("of 4 clients"),
        "{}",
        finding.summary
    );
    assert!(!is_public("fd00::1".parse().unwrap()) && is_public("2a00::1".parse().unwrap()));
    assert!(!is_public("100.64.1.1".parse().unwrap()) && is_public("100.128.1.1".parse().unwrap()));
}

#[test]
fn it_ends_when_the_connections_get_through_or_are_closed() {
    let key = space(Role::Initiator, [10, 0, 0, 1]);
    let mut host = run(key, 12, 1..3, true, as_is);
    assert_eq!(host.verdicts(), [Verdict::BlackHoled]);
    host.stalled.clear();
    host.run(58, |h, _| h.served(key, 1));
    let finding = host.finding(Verdict::BlackHoled);
    let stall = finding.evidence.stall.unwrap();
    assert_eq!((stall.stalled, stall.over), (0, 2));
    assert!(
        stall
            .connections
            .iter()
            .all(|c| c.over && c.close.is_none())
    );
    assert!(
        finding.summary.contains("which is over"),
        "{}",
        finding.summary
    );
    host.run(5, |h, _| h.served(key, 1));
    assert_eq!(host.verdicts(), []);
}
