//! Examples with every field filled in, for the tests of the sinks.

use std::{
    io::{self, Write},
    sync::{Arc, Mutex},
};

use tuplewatch_common::{
    address::{Point, PortSpaceKey, Role, v4_mapped},
    record::Global,
};

use super::{
    HookState, HookStatus, Ready,
    metrics::{Ledger, View},
};
use crate::core::{
    alert::{Alert, History, State},
    black_hole::{RESTS_ON, StallConnection, StallEvidence},
    budget::{Budget, BudgetSource, Holder, Outlook, SearchEvidence},
    counters::CounterEvidence,
    egress::EgressUse,
    ends::Ends,
    finding::{
        CollisionEvidence, Confidence, Evidence, Finding, LossEvidence, OpenedBy, Pool, RuledOut,
        Sample, Severity, Verdict,
    },
    idle::{IdleConnection, IdleEvidence, ResetBy},
    placement::{PlacementEvidence, RidingConnection},
    report::{Change, Overview, SpaceReport, Totals},
    stuck::{Became, StuckConnection, StuckEvidence, UNSEEN},
    time::Moment,
    waits::WaitEvidence,
};

/// 2025-11-29T10:30:05.123Z as a capture has it.
pub(crate) const NOW: Moment = Moment(1_764_412_205_123_456_789);

/// A writer, and what was written to it so far.
pub(crate) fn shared() -> (impl Write + Send, impl Fn() -> String) {
    struct Shared(Arc<Mutex<Vec<u8>>>);
    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let bytes = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&bytes);
    (Shared(bytes), move || {
        String::from_utf8(seen.lock().unwrap().clone()).unwrap()
    })
}

pub(crate) fn ready() -> Ready {
    Ready {
        hooks: vec![
            HookState {
                name: "packet".into(),
                status: HookStatus::Ok,
                detail: String::new(),
            },
            HookState {
                name: "retransmit".into(),
                status: HookStatus::Off,
                detail: "the kernel has no tracepoint tcp_retransmit_skb".into(),
            },
        ],
        interfaces: vec!["eth0".into(), "veth1".into()],
        unseen: vec![("wg0".into(), "the device has no Ethernet header".into())],
        memory_bytes: 12_582_912,
        recorder: Some(crate::recorder::Status {
            directory: "/var/lib/tuplewatch/evidence".into(),
            limit_bytes: 67_108_864,
            files: 3,
            bytes: 812_344,
            written: 1,
            failed: 0,
            ring_packets: 65_536,
            recorded_packets: 70_125,
        }),
        version: "0.1.0",
    }
}

pub(crate) fn key() -> PortSpaceKey {
    PortSpaceKey {
        initiator: v4_mapped([198, 51, 100, 7]),
        responder: v4_mapped([203, 0, 113, 10]),
        responder_port: 443,
        role: Role::Responder as u8,
        point: Point::Wire as u8,
        netns: 0,
    }
}

pub(crate) fn socket_key() -> PortSpaceKey {
    PortSpaceKey {
        role: Role::Initiator as u8,
        point: Point::Socket as u8,
        netns: 4_026_532_281,
        ..key()
    }
}

pub(crate) fn finding() -> Finding {
    Finding {
        verdict: Verdict::L4ReuseInTimeWait,
        space: key(),
        since: Moment(NOW.0 - 12_000_000_000),
        severity: Severity::Critical,
        confidence: Confidence::High,
        evidence: Evidence {
            opens: 5210,
            refused_syns: 42,
            refused_after_close: 40,
            refused_while_open: 1,
            refused_half_open: 1,
            refused_unknown: 0,
            rsts: 30,
            syn_retransmits: 36,
            healed: 33,
            unhealed: 9,
            reuse_accepted: 12,
            unanswered: 2,
            no_listener: 0,
            duplicate_syns: 1,
            refused_ports: 39,
            ports_seen: 200,
            pool: Some(Pool {
                first: 2048,
                last: 2247,
                seen: 200,
            }),
            time_wait: 187,
            time_wait_peak: 200,
            in_use: 4,
            reuse_interval_min_seconds: Some(1.02),
            reuse_interval_max_seconds: Some(58.4),
            window_seconds: 60.0,
            window_refused: 42,
            window_opens: 5210,
            opens_per_second: 86.833_333,
            samples: vec![Sample {
                time_ns: NOW.0 - 400_000_000,
                port: 2051,
                isn: 0x1234_5678,
                ack: 0x9abc_def0,
                reuse_interval_seconds: Some(3.5),
            }],
            established: 5150,
            half_open: 6,
            refused_by_rst: 3,
            loss: Some(LossEvidence {
                lost: 2,
                established: 5150,
                syn_retransmits: 36,
                live: Some(4),
                data_retransmits: Some(15),
                others_answering: 5,
                others_failing: 1,
            }),
            collisions: Some(CollisionEvidence {
                live: 2,
                stale: 1,
                ports: 3,
                idle_min_ms: 1200,
                idle_max_ms: 400_000,
            }),
            stuck: Some(stuck()),
            stall: Some(stall()),
            idle: Some(idle()),
            placement: Some(placement()),
            egress: Some(egress()),
            counters: vec![CounterEvidence {
                name: "TCPSYNChallenge".into(),
                value: 3,
                netns: 4_026_531_840,
            }],
            budget: Some(budget()),
            outlook: Some(outlook()),
            searches: Some(SearchEvidence {
                median_seconds: 0.0022,
                median_before_seconds: Some(0.000_013),
                searches: 120,
            }),
            holders: vec![Holder {
                server_address: std::net::IpAddr::from([203, 0, 113, 10]),
                server_port: 443,
                in_use: 4,
                time_wait: 187,
            }],
            no_local_port: 3,
            waits: Some(WaitEvidence {
                waiting: 58.5,
                unaccepted: 0.0,
                lively: 20.0,
                seconds: 10.0,
                handshake_seconds: Some(0.000_256),
            }),
        },
        ruled_out: vec![RuledOut {
            name: "half_open_reconnect",
            why: "40 of 42 former connections were closed".into(),
        }],
        opened_by: vec![OpenedBy {
            pid: 4711,
            command: "curl".into(),
            cgroup_id: 5123,
            cgroup: Some("/system.slice/batch.service".into()),
            opens_per_second: 80.25,
            opens: 4815,
            lifetime_seconds: Some(0.08),
            no_local_port: 3,
        }],
        summary: "198.51.100.7 reuses source ports to 203.0.113.10:443 while they are in TIME_WAIT"
            .into(),
        remedy: "curl[4711] opens 80 connections/s of 80 ms each: reuse connections".into(),
    }
}

fn ends(client_port: u16) -> Ends {
    Ends {
        client_address: std::net::IpAddr::from([198, 51, 100, 7]),
        client_port,
        server_address: std::net::IpAddr::from([203, 0, 113, 10]),
        server_port: 443,
    }
}

/// Connections whose requests fail.
fn stuck() -> StuckEvidence {
    StuckEvidence {
        stuck: 2,
        failures: 18,
        longest: 14,
        status: 503,
        page: Some("AWS Application Load Balancer".into()),
        better: 31,
        better_newer: 23,
        better_for_seconds: Some(20.5),
        worse: 1,
        worse_newer: 1,
        same_kind_served: true,
        connections: vec![
            StuckConnection {
                ends: ends(45_328),
                age_seconds: Some(24.6),
                requests: 14,
                failures: 14,
                in_a_row: 14,
                failing_seconds: 24.5,
                status: 503,
                became: Became::Failing,
                close: None,
            }
            .with_command(),
        ],
        unseen: UNSEEN.into(),
    }
}

/// Connections that get nothing through.
fn stall() -> StallEvidence {
    StallEvidence {
        stalled: 1,
        over: 1,
        unacked_bytes: 112,
        longest_seconds: 14.2,
        newer_opens: 13,
        newer: 12,
        newer_stalled: 1,
        newer_for_seconds: Some(13.5),
        connections: vec![StallConnection {
            ends: ends(41_490),
            age_seconds: Some(34.1),
            stalled_seconds: 14.2,
            unacked_bytes: 112,
            waiting_bytes: 40,
            rtos: 6,
            probes: 1,
            window_closed: false,
            user_timeout_seconds: Some(0.0),
            pid: Some(4711),
            command: Some("curl".into()),
            over: false,
            close: Some("ss -K dst 203.0.113.10 dport = 443 src 198.51.100.7 sport = 41490".into()),
        }],
        rests_on: RESTS_ON.into(),
    }
}

/// Connections that are reset after an idle time.
fn idle() -> IdleEvidence {
    IdleEvidence {
        killed: 4,
        in_silence: 1,
        killed_sooner: 1,
        shortest_killed_seconds: 352.4,
        longest_killed_seconds: 871.0,
        survived: 120,
        longest_survived_seconds: 341.5,
        timeout_seconds: Some(346.95),
        devices: vec!["aws-nat-gateway".into(), "aws-nlb".into()],
        reset_by: Some(ResetBy::Middlebox),
        keep_alive_seconds: 173.0,
        connections: vec![IdleConnection {
            ends: ends(45_330),
            age_seconds: Some(4012.7),
            idle_seconds: 352.4,
            ago_seconds: 3.2,
            probe: false,
            in_silence: true,
            reset_by: Some(ResetBy::Middlebox),
            pid: Some(4711),
            command: Some("curl".into()),
            keep_alive: Some(true),
            keep_alive_seconds: Some(7200.0),
            user_timeout_seconds: Some(0.0),
            close: Some(ends(45_330).close_command(Role::Initiator)),
        }],
        unseen: "who gives up within seconds".into(),
    }
}

/// Requests on a place that a service has left.
fn placement() -> PlacementEvidence {
    PlacementEvidence {
        service: "203.0.113.10:443".into(),
        since_seconds: 412.5,
        left: true,
        answered: 2,
        woken: 3,
        active: 4,
        connections: vec![RidingConnection {
            ends: ends(45_331),
            age_seconds: Some(3012.5),
            requests: 212,
            answered_ago_seconds: 1.5,
            close: ends(45_331).close_command(Role::Initiator),
        }],
    }
}

pub(crate) fn alert() -> Alert {
    Alert {
        id: "l4_reuse_in_time_wait/wire/responder/198.51.100.7/203.0.113.10:443".into(),
        state: State::Firing,
        pending_since: Moment(NOW.0 - 12_000_000_000),
        firing_since: Some(Moment(NOW.0 - 11_000_000_000)),
        resolved_at: None,
        at: NOW,
        finding: finding(),
        history: History::default(),
        muted: None,
        evidence_file: Some(
            "/var/lib/tuplewatch/evidence/20251129T103005.123Z-l4_reuse.pcapng".into(),
        ),
    }
}

pub(crate) fn look_alike(ended: bool) -> Change {
    let verdict = Verdict::HalfOpenReconnect;
    Change::LookAlike {
        finding: Box::new(Finding {
            verdict,
            ..finding()
        }),
        ended,
    }
}

pub(crate) fn totals() -> Totals {
    Totals {
        opens: 5210,
        established: 5150,
        refused: 3,
        syn_timeouts: 4,
        abandoned: 5,
        half_open: 6,
        no_local_port: 7,
        failed: 8,
        syn_retransmits: 36,
        bare_acks: 42,
        bare_acks_closed: 40,
        bare_acks_open: 1,
        bare_acks_half_open: 1,
        bare_acks_unknown: 0,
        duplicate_syns: 1,
        no_listener: 2,
        rsts_after_bare_ack: 30,
        healed: 33,
        unhealed: 9,
        reuse_accepted: 12,
        resets_received: 13,
        resets_sent: 14,
        data_retransmits: 15,
        late: 0,
    }
}

fn budget() -> Budget {
    Budget {
        ports: 200,
        source: BudgetSource::Inferred,
        pool: Some(Pool {
            first: 2048,
            last: 2247,
            seen: 200,
        }),
        in_use: 4,
        held: 187,
        hold_seconds: 60.0,
    }
}

fn outlook() -> Outlook {
    Outlook {
        expected: 204,
        rise_per_second: 0.5,
        exhausted_in_seconds: Some(18.0),
    }
}

fn egress() -> EgressUse {
    EgressUse {
        group: "nat-zone-a".into(),
        in_use: 4,
        held: 187,
        budget: 55_000,
        hold_seconds: 60.0,
        port_spaces: 3,
    }
}

pub(crate) fn space(key: PortSpaceKey) -> SpaceReport {
    let mut reuse_interval = [0; 20];
    reuse_interval[3] = 40;
    reuse_interval[19] = 2;
    SpaceReport {
        key,
        totals: totals(),
        opens_per_second: 86.833_333,
        window_refused: 42,
        in_use: 4,
        time_wait: [100, 50, 30, 7, 0, 0],
        ports_seen: 200,
        budget: Some(budget()),
        outlook: Some(outlook()),
        reuse_interval,
        handshake_duration: [7; 20],
        port_search: [0; 20],
    }
}

pub(crate) fn overview() -> Overview {
    let mut globals = [0; Global::COUNT as usize];
    globals[Global::EventsLost as usize] = 17;
    globals[Global::Fragments as usize] = 5;
    Overview {
        now: NOW,
        spaces: vec![space(key()), space(socket_key())],
        other: Totals {
            opens: 9,
            ..Totals::default()
        },
        known_spaces: 3,
        globals,
        alerts: vec![alert()],
        muted: Vec::new(),
        egress: vec![(key(), egress_use())],
        look_alikes: vec![Finding {
            verdict: Verdict::HalfOpenReconnect,
            ..finding()
        }],
    }
}

fn egress_use() -> EgressUse {
    EgressUse {
        group: "nat-a".into(),
        in_use: 40,
        held: 60,
        budget: 55_000,
        hold_seconds: 60.0,
        port_spaces: 2,
    }
}

pub(crate) fn view() -> View {
    let mut ledger = Ledger::new(false);
    ledger.update(&overview());
    let mut view = View::default();
    view.take_ready(&ready());
    view.take_overview(&overview());
    ledger.export(&mut view);
    view
}

/// Every path of `value`: `a`, `a.b`, `a[].b`.
pub(crate) fn paths(
    value: &serde_json::Value,
    path: &str,
    into: &mut std::collections::BTreeSet<String>,
) {
    match value {
        serde_json::Value::Object(map) => {
            for (key, value) in map {
                let path = if path.is_empty() {
                    key.clone()
                } else {
                    format!("{path}.{key}")
                };
                into.insert(path.clone());
                paths(value, &path, into);
            }
        }
        serde_json::Value::Array(list) => {
            for value in list {
                paths(value, &format!("{path}[]"), into);
            }
        }
        _ => {}
    }
}
