//! Scripts of idle connections.

use std::time::Duration;

use tuplewatch_common::address::{FourTuple, Point, Role, v4_mapped};

use super::super::testing::{Script, opens_to};
use crate::core::{
    finding::{Confidence, Severity, Verdict},
    idle::{self, Killed, ResetBy, Settings, Survived},
    stalled::{How, Process, Stalled},
    time::Moment,
};

fn tuple(port: u16) -> FourTuple {
    FourTuple {
        initiator: v4_mapped([10, 0, 0, 1]),
        responder: v4_mapped([203, 0, 113, 10]),
        responder_port: 443,
        initiator_port: port,
        pad: 0,
    }
}

trait Rests {
    fn killed(&mut self, port: u16, idle: f64) -> &mut Killed;
    fn survived(&mut self, idle: f64);
    fn survived_at(&mut self, port: u16, idle: f64);
}

impl Rests for Script {
    fn killed(&mut self, port: u16, idle: f64) -> &mut Killed {
        let at = self.now();
        self.idle.killed.push(Killed {
            tuple: tuple(port),
            role: Role::Initiator,
            point: Point::Socket as u8,
            at,
            idle: Duration::from_secs_f64(idle),
            opened: Some(Moment(1)),
            pid: 4711,
            command: *b"worker\0\0\0\0\0\0\0\0\0\0",
            closed_before: false,
            by_probe: false,
            in_silence: false,
            reset_by: None,
            settings: Settings::default(),
        });
        self.idle.killed.last_mut().unwrap()
    }

    fn survived(&mut self, idle: f64) {
        self.survived_at(443, idle);
    }

    fn survived_at(&mut self, port: u16, idle: f64) {
        let service = FourTuple {
            responder_port: port,
            ..tuple(0)
        };
        let key = idle::service(&service, Role::Initiator, Point::Socket as u8);
        let one = Survived {
            count: 1,
            longest: Duration::from_secs_f64(idle),
        };
        self.idle.survived.push((key, one));
    }
}

#[test]
fn a_step_is_a_time_out_and_is_matched_with_a_device() {
    let mut host = Script::new();
    host.run(400, |host, second| {
        if second % 5 == 0 {
            host.survived(340.0 + (second % 8) as f64);
        }
        if second % 100 == 99 {
            host.killed(second as u16, 353.0 + second as f64 / 10.0);
        }
    });
    let finding = host.finding(Verdict::IdleKilled);
    let idle = finding.evidence.idle.as_ref().unwrap();
    assert_eq!((idle.killed, idle.killed_sooner), (4, 0));
    let timeout = idle.timeout_seconds.unwrap();
    assert!((timeout / 350.0 - 1.0).abs() < 0.05, "{timeout}");
    assert_eq!(idle.devices[..2], ["aws-nat-gateway", "aws-nlb"]);
    assert_eq!(finding.confidence, Confidence::High);
    assert_eq!(finding.opened_by[0].command, "worker");
    assert!(
        finding.remedy.contains("tcp_keepalive_time=17"),
        "{}",
        finding.remedy
    );
    // Without another one it ends when the window is empty.
    host.run(900, |_, _| ());
    assert_eq!(host.verdicts(), []);
}

#[test]
fn without_a_step_there_is_no_time_out() {
    // A server that is restarted again and again: what it cuts off rested for 0 to 60 s, and so did
    // what lived.
    let mut host = Script::new();
    host.run(300, |host, second| {
        host.survived((second * 7 % 60) as f64);
        if second % 20 == 0 {
            host.killed(second as u16, (second * 11 % 60) as f64);
        }
    });
    assert_eq!(host.verdicts(), []);
}

#[test]
fn a_restart_cuts_off_what_rested_over_it() {
    // Twenty seconds in which nobody asks, and then all connections are gone: each had been used less
    // than eight seconds before.
    let mut host = Script::new();
    host.run(60, |host, second| host.survived((second % 8) as f64));
    host.run(20, |_, _| ());
    host.run(5, |host, second| {
        for port in 0..100 {
            host.killed(second as u16 * 100 + port, 20.0 + f64::from(port % 8));
        }
    });
    host.run(5, |host, second| host.survived((second % 8) as f64));
    assert_eq!(host.verdicts(), []);
    // A second one of the kind on connections that were opened since is no accident any more.
    host.run(30, |_, _| ());
    for port in 0..3 {
        host.killed(port, 22.0);
    }
    host.run(3, |_, _| ());
    assert_eq!(host.verdicts(), [Verdict::IdleKilled]);
}

#[test]
fn somebody_rested_over_the_moment_and_lived() {
    let mut host = Script::new();
    host.run(100, |host, second| {
        if second % 6 == 0 {
            host.survived(7.5);
        }
    });
    for port in 0..3 {
        host.killed(port, 10.0);
    }
    host.run(2, |_, _| ());
    assert_eq!(
        host.verdicts(),
        [],
        "a restart just before would look the same"
    );
    host.run(3, |host, _| host.survived(7.5));
    let finding = host.finding(Verdict::IdleKilled);
    let idle = finding.evidence.idle.unwrap();
    assert_eq!(idle.timeout_seconds, None, "7.5 and 10 s are far apart");
    assert_eq!(finding.confidence, Confidence::Medium);
    assert!(finding.summary.contains("between 7.5 s and 10.0 s"));
}

#[test]
fn one_is_enough_just_above_a_known_time_out() {
    let alone = |idle: f64, by: Option<ResetBy>, survived: f64| {
        let mut host = Script::new();
        host.run(20, |host, second| {
            host.survived(survived * second as f64 / 20.0);
        });
        host.killed(1, idle).reset_by = by;
        host.run(5, |_, _| ());
        host.verdicts()
    };
    let told = [Verdict::IdleKilled];
    assert_eq!(alone(352.0, None, 300.0), told);
    assert_eq!(alone(352.0, Some(ResetBy::Middlebox), 300.0), told);
    assert_eq!(alone(352.0, Some(ResetBy::Peer), 300.0), []);
    // Not near any, not yet passed, and survived before.
    assert_eq!(alone(390.0, None, 300.0), []);
    assert_eq!(alone(338.0, None, 300.0), []);
    assert_eq!(alone(352.0, None, 400.0), []);
    // A balancer that closes after 60 s does not forget.
    assert_eq!(alone(61.0, None, 30.0), []);
}

#[test]
fn a_peer_that_closes_first_is_a_race() {
    let mut host = Script::new();
    host.run(60, |host, second| {
        host.survived((second % 5) as f64);
        if second % 15 == 14 {
            host.killed(second as u16, 5.0).closed_before = true;
        }
    });
    assert_eq!(host.verdicts(), [Verdict::KeepaliveRace]);
    let finding = host.finding(Verdict::KeepaliveRace);
    assert!(finding.summary.contains("5.0 s"), "{}", finding.summary);
    // One that ends closes all of them, however long they rested.
    let mut host = Script::new();
    host.run(5, |host, second| {
        for port in 0..20 {
            host.killed(second as u16 * 20 + port, f64::from(port))
                .closed_before = true;
        }
    });
    assert_eq!(host.verdicts(), []);
}

#[test]
fn some_resets_of_another_kind_do_not_hide_the_step() {
    let mut host = Script::new();
    host.run(300, |host, second| {
        host.survived(11.0 - (second % 9) as f64);
        if second % 30 == 29 {
            host.killed(second as u16, 12.1 + (second % 7) as f64);
        }
        if second == 100 {
            host.killed(9, 6.0);
        }
    });
    let idle = host.finding(Verdict::IdleKilled).evidence.idle.unwrap();
    assert_eq!((idle.killed, idle.killed_sooner), (10, 1));
}

const S: u64 = 1_000_000_000;
/// The clock of a script begins here.
const BEGIN: u64 = 1_000;

/// A connection that rested for so many seconds until that second of the script, and has got no answer since.
fn silent(port: u16, rest: u64, from: u64, now: u64) -> Stalled {
    let key = opens_to(10);
    let after = (now - from) * 1000;
    // 0.2 s, 0.6 s, 1.4 s ...
    let rtos = (1..20).take_while(|n| 200 * ((1 << n) - 1) <= after);
    Stalled {
        connection: FourTuple {
            initiator: key.initiator,
            responder: key.responder,
            responder_port: key.responder_port,
            initiator_port: port,
            pad: 0,
        },
        role: Role::Initiator,
        point: Point::Socket,
        netns: key.netns,
        opened: Some(Moment(1)),
        since: Moment((BEGIN + from) * S),
        heard: Some(Moment((BEGIN + from - rest) * S)),
        how: How::Unacked,
        rtos: rtos.count() as u32,
        probes: 0,
        unacked: 112,
        waiting: 0,
        is_full_size: false,
        is_answered: false,
        is_used: true,
        settings: Settings {
            keep_alive: Some(false),
            keep_alive_time: Some(Duration::from_secs(7200)),
            user_timeout: Some(Duration::ZERO),
        },
        process: Some(Process {
            pid: 4711,
            command: Some("worker".into()),
        }),
    }
}

/// Others rest for up to 58 s and live; at three moments a connection gets no answer after a rest of `rests`,
/// which is given up twelve seconds later. New connections are established in each second, if `newer`.
fn in_silence(
    rests: [u64; 3],
    newer: bool,
    each: impl Fn(&mut Stalled),
    mut look: impl FnMut(&Script, u64),
) -> Script {
    let mut host = Script::new();
    host.run(130, |host, second| {
        look(host, second);
        host.survived_at(opens_to(10).responder_port, (second * 7 % 59) as f64);
        if newer {
            host.served(opens_to(10), 1);
        }
        let now = second + 1;
        let begun = [70, 90, 110].into_iter().zip(rests).zip(1..);
        host.stalled = begun
            .filter(|((from, _), _)| (*from..from + 12).contains(&now))
            .map(|((from, rest), port)| {
                let mut stalled = silent(port, rest, from, now);
                each(&mut stalled);
                stalled
            })
            .collect();
    });
    host
}

#[test]
fn silence_after_a_rest_is_a_time_out_too() {
    let mut before = Vec::new();
    let host = in_silence(
        [61, 62, 65],
        true,
        |_| (),
        |host, second| {
            if second == 105 {
                before = host.verdicts();
            }
        },
    );
    assert_eq!(before, [Verdict::BlackHoled], "two may be chance");
    let finding = host.finding(Verdict::IdleKilled);
    assert_eq!(finding.severity, Severity::Critical);
    let idle = finding.evidence.idle.as_ref().unwrap();
    assert_eq!((idle.killed, idle.in_silence, idle.survived), (3, 3, 130));
    let timeout = idle.timeout_seconds.unwrap();
    assert!((timeout / 60.0 - 1.0).abs() < 0.05, "{timeout}");
    let latest = &idle.connections[0];
    assert_eq!((latest.ends.client_port, latest.idle_seconds), (3, 65.0));
    assert!(latest.in_silence && latest.close.is_none(), "it is over");
    assert_eq!(finding.opened_by[0].command, "worker");
    for part in ["TCP_USER_TIMEOUT too", "SO_KEEPALIVE is off"] {
        assert!(finding.remedy.contains(part), "{}", finding.remedy);
    }
    assert!(finding.summary.contains("3 connections got no answer from"));
}

#[test]
fn one_told_so_is_no_black_hole_beside() {
    let mut told = Vec::new();
    in_silence(
        [61, 62, 65],
        true,
        |_| (),
        |host, second| {
            if second == 118 {
                let finding = host.finding(Verdict::IdleKilled);
                told.push((finding, host.verdicts()));
            }
        },
    );
    let (finding, verdicts) = &told[0];
    assert_eq!(verdicts, &[Verdict::IdleKilled]);
    let close = finding.evidence.idle.as_ref().unwrap().connections[0]
        .close
        .clone();
    let command = "ss -K dst 203.0.113.10 dport = 8080 src 10.0.0.1 sport = 3";
    assert_eq!(close.as_deref(), Some(command));
    assert!(
        finding.remedy.starts_with("Close the sockets"),
        "{}",
        finding.remedy
    );
}

#[test]
fn silence_that_no_rest_explains() {
    let verdicts =
        |rests, newer, each: fn(&mut Stalled)| in_silence(rests, newer, each, |_, _| ()).verdicts();
    let black = [Verdict::BlackHoled];
    // Rests that others survived; no rest; one whose begin nobody knows.
    assert_eq!(verdicts([30, 40, 50], true, |_| ()), black);
    assert_eq!(verdicts([0, 0, 0], true, |_| ()), black);
    assert_eq!(verdicts([61, 62, 65], true, |s| s.heard = None), black);
    // The peer is heard; no new connection gets through.
    assert_eq!(
        verdicts([61, 62, 65], true, |s| s.is_answered = true),
        black
    );
    assert!(!verdicts([61, 62, 65], false, |_| ()).contains(&Verdict::IdleKilled));
}

#[test]
fn keep_alive_probes_without_an_answer_make_no_request_wait() {
    let host = in_silence(
        [61, 62, 65],
        true,
        |stalled| {
            stalled.how = How::Silent;
            stalled.probes = std::mem::take(&mut stalled.rtos);
        },
        |_, _| (),
    );
    let finding = host.finding(Verdict::IdleKilled);
    assert_eq!(finding.severity, Severity::Warning);
    assert!(finding.evidence.idle.unwrap().connections[0].probe);
}
