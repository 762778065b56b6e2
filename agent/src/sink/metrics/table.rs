//! The table.

use tuplewatch_common::record::Global;

use super::{
    Kind, Metric,
    Points::{Both, Socket, Wire},
    Source::{Egress, Histogram, Host, Level, Real, Total, Totals},
    Which, attribute,
};
use crate::{
    core::{
        alert::State,
        finding::{Severity, Verdict},
        report::SpaceReport,
    },
    sink::HookStatus,
};

/// Every exported metric.
pub const METRICS: &[Metric] = &[
    Metric {
        name: "tuplewatch.opens",
        kind: Kind::Counter,
        unit: "{connection}",
        description: "Attempts to open a connection: distinct SYNs on the wire, connect() at the sockets.",
        source: Total(Both, |t| t.opens),
    },
    Metric {
        name: "tuplewatch.outcomes",
        kind: Kind::Counter,
        unit: "{connection}",
        description: "What became of the opens.",
        source: Totals(
            attribute::OUTCOME,
            &[
                ("established", Both, |t| t.established),
                ("refused", Both, |t| t.refused),
                ("syn_timeout", Both, |t| t.syn_timeouts),
                ("abandoned", Both, |t| t.abandoned),
                ("half_open", Wire, |t| t.half_open),
                ("no_local_port", Socket, |t| t.no_local_port),
                ("failed", Socket, |t| t.failed),
            ],
        ),
    },
    Metric {
        name: "tuplewatch.syn_retransmits",
        kind: Kind::Counter,
        unit: "{segment}",
        description: "SYNs sent again, recognised by their sequence number also when a NAT moves them to another port.",
        source: Total(Both, |t| t.syn_retransmits),
    },
    Metric {
        name: "tuplewatch.bare_acks",
        kind: Kind::Counter,
        unit: "{segment}",
        description: "SYNs answered by an ACK without SYN, by the state of the former connection on the four-tuple.",
        source: Totals(
            attribute::FORMER,
            &[
                ("closed", Both, |t| t.bare_acks_closed),
                ("open", Both, |t| t.bare_acks_open),
                ("half_open", Both, |t| t.bare_acks_half_open),
                ("unknown", Both, |t| t.bare_acks_unknown),
            ],
        ),
    },
    Metric {
        name: "tuplewatch.bare_ack_opens",
        kind: Kind::Counter,
        unit: "{connection}",
        description: "Opens that met a bare ACK: those that got through later, and those that met it twice or were never answered.",
        source: Totals(
            attribute::RECOVERY,
            &[
                ("healed", Wire, |t| t.healed),
                ("unhealed", Wire, |t| t.unhealed),
            ],
        ),
    },
    Metric {
        name: "tuplewatch.bare_ack_resets",
        kind: Kind::Counter,
        unit: "{segment}",
        description: "RSTs by which the initiator answered a bare ACK.",
        source: Total(Both, |t| t.rsts_after_bare_ack),
    },
    Metric {
        name: "tuplewatch.bare_ack_refusals",
        kind: Kind::Counter,
        unit: "{connection}",
        description: "Opens refused by RST after a bare ACK: nothing listens there.",
        source: Total(Wire, |t| t.no_listener),
    },
    Metric {
        name: "tuplewatch.duplicate_syns",
        kind: Kind::Counter,
        unit: "{segment}",
        description: "Late duplicates of SYNs that were accepted before.",
        source: Total(Wire, |t| t.duplicate_syns),
    },
    Metric {
        name: "tuplewatch.accepted_reuses",
        kind: Kind::Counter,
        unit: "{connection}",
        description: "Handshakes completed although the former connection on the four-tuple was closed within the hold.",
        source: Total(Wire, |t| t.reuse_accepted),
    },
    Metric {
        name: "tuplewatch.resets",
        kind: Kind::Counter,
        unit: "{segment}",
        description: "RSTs on established connections of this host.",
        source: Totals(
            attribute::DIRECTION,
            &[
                ("receive", Socket, |t| t.resets_received),
                ("transmit", Socket, |t| t.resets_sent),
            ],
        ),
    },
    Metric {
        name: "tuplewatch.data_retransmits",
        kind: Kind::Counter,
        unit: "{segment}",
        description: "Segments of established connections that this host sent again.",
        source: Total(Socket, |t| t.data_retransmits),
    },
    Metric {
        name: "tuplewatch.sockets.in_use",
        kind: Kind::UpDownCounter,
        unit: "{socket}",
        description: "Sockets of this host that are not closed yet.",
        source: Level(|s| Some(s.in_use.into())),
    },
    Metric {
        name: "tuplewatch.sockets.time_wait",
        kind: Kind::UpDownCounter,
        unit: "{socket}",
        description: "Sockets of this host in TIME_WAIT.",
        source: Level(|s| Some(s.held().into())),
    },
    Metric {
        name: "tuplewatch.ports.seen",
        kind: Kind::Gauge,
        unit: "{port}",
        description: "Distinct source ports of completed handshakes in the ageing window.",
        source: Level(|s| Some(s.ports_seen.into())),
    },
    Metric {
        name: "tuplewatch.ports.budget",
        kind: Kind::Gauge,
        unit: "{port}",
        description: "Source ports there can be at once, where that is known.",
        source: Level(|s| s.budget.map(|b| b.ports.into())),
    },
    Metric {
        name: "tuplewatch.ports.headroom",
        kind: Kind::Gauge,
        unit: "{port}",
        description: "Free source ports: budget less ports in use and held.",
        source: Level(|s| s.headroom().map(Into::into)),
    },
    Metric {
        name: "tuplewatch.ports.held",
        kind: Kind::Gauge,
        unit: "{port}",
        description: "Source ports of closed connections that cannot be given out again yet, where the budget is known.",
        source: Level(|s| s.budget.map(|b| b.held.into())),
    },
    Metric {
        name: "tuplewatch.ports.expected",
        kind: Kind::Gauge,
        unit: "{port}",
        description: "Source ports that will be taken if things go on like now for one hold time, once one was observed.",
        source: Level(|s| s.outlook.map(|o| o.expected.into())),
    },
    Metric {
        name: "tuplewatch.ports.exhaustion_time",
        kind: Kind::Gauge,
        unit: "s",
        description: "Time until no source port is left, only while they are being used up.",
        source: Real(|s| s.outlook.and_then(|o| o.exhausted_in_seconds)),
    },
    Metric {
        name: "tuplewatch.ports.utilization",
        kind: Kind::Gauge,
        unit: "1",
        description: "Share of the budget that is taken.",
        source: Real(SpaceReport::utilization),
    },
    Metric {
        name: "tuplewatch.egress.in_use",
        kind: Kind::UpDownCounter,
        unit: "{port}",
        description: "Source ports of a device in between that this host's open connections to a destination take.",
        source: Egress(true, |e| e.in_use.into()),
    },
    Metric {
        name: "tuplewatch.egress.held",
        kind: Kind::UpDownCounter,
        unit: "{port}",
        description: "Source ports that the device still holds for closed ones.",
        source: Egress(true, |e| e.held.into()),
    },
    Metric {
        name: "tuplewatch.egress.budget",
        kind: Kind::Gauge,
        unit: "{port}",
        description: "Source ports that the device has for a destination, for all hosts of the group together.",
        source: Egress(false, |e| e.budget.into()),
    },
    Metric {
        name: "tuplewatch.reuse_interval",
        kind: Kind::Histogram,
        unit: "s",
        description: "Time from the end of the former connection on a four-tuple to the next SYN on it.",
        source: Histogram(Wire, Which::ReuseInterval),
    },
    Metric {
        name: "tuplewatch.handshake.duration",
        kind: Kind::Histogram,
        unit: "s",
        description: "Time from the first SYN to the completed handshake.",
        source: Histogram(Both, Which::HandshakeDuration),
    },
    Metric {
        name: "tuplewatch.port_search.duration",
        kind: Kind::Histogram,
        unit: "s",
        description: "Time that connect() took to find a source port (a sample of the opens).",
        source: Histogram(Socket, Which::PortSearch),
    },
    Metric {
        name: "tuplewatch.alerts",
        kind: Kind::UpDownCounter,
        unit: "{alert}",
        description: "Alerts that are pending or firing. Every combination is exported, also with 0.",
        source: Host(
            &[
                attribute::SIGNATURE,
                attribute::CAUSE,
                attribute::SEVERITY,
                attribute::ALERT_STATE,
            ],
            |view, emit| {
                for verdict in Verdict::ALL {
                    let Some(signature) = verdict.signature() else {
                        continue;
                    };
                    for severity in [Severity::Info, Severity::Warning, Severity::Critical] {
                        for state in [State::Pending, State::Firing] {
                            let alerts = view.alerts.iter();
                            let count =
                                alerts.filter(|a| **a == (verdict, severity, state)).count();
                            let names = [signature, verdict.name(), severity.name(), state.name()];
                            emit(count as u64, &names);
                        }
                    }
                }
            },
        ),
    },
    Metric {
        name: "tuplewatch.muted_alerts",
        kind: Kind::UpDownCounter,
        unit: "{alert}",
        description: "Alerts that are pending or firing and muted: nobody is told of them.",
        source: Host(&[], |view, emit| emit(view.muted, &[])),
    },
    Metric {
        name: "tuplewatch.look_alikes",
        kind: Kind::UpDownCounter,
        unit: "{look_alike}",
        description: "Look-alikes that last. Every name is exported, also with 0.",
        source: Host(&[attribute::CAUSE], |view, emit| {
            for verdict in Verdict::ALL {
                if verdict.is_look_alike() {
                    let found = view.look_alikes.iter();
                    let count = found.filter(|found| **found == verdict).count();
                    emit(count as u64, &[verdict.name()]);
                }
            }
        }),
    },
    Metric {
        name: "tuplewatch.losses",
        kind: Kind::Counter,
        unit: "{event}",
        description: "Things the agent could not count or keep; other figures may then be too low.",
        source: Host(&[attribute::LOSS], |view, emit| {
            for (i, (name, _)) in Global::NAMES.iter().enumerate() {
                if Global::is_loss(i) {
                    emit(view.globals[i], &[name]);
                }
            }
        }),
    },
    Metric {
        name: "tuplewatch.unassigned",
        kind: Kind::Counter,
        unit: "{packet}",
        description: "Packets of no known port space, such as those of floods and scans.",
        source: Host(&[attribute::KIND], |view, emit| {
            for (i, (name, _)) in Global::NAMES.iter().enumerate() {
                if !Global::is_loss(i) {
                    emit(view.globals[i], &[name]);
                }
            }
        }),
    },
    Metric {
        name: "tuplewatch.port_spaces",
        kind: Kind::UpDownCounter,
        unit: "{port_space}",
        description: "Port spaces known to the agent.",
        source: Host(&[], |view, emit| emit(view.known_spaces, &[])),
    },
    Metric {
        name: "tuplewatch.hooks",
        kind: Kind::UpDownCounter,
        unit: "{hook}",
        description: "1 for the state that a hook is in, 0 for the others.",
        source: Host(&[attribute::HOOK, attribute::HOOK_STATE], |view, emit| {
            for (name, status) in &view.hooks {
                for state in [HookStatus::Ok, HookStatus::Degraded, HookStatus::Off] {
                    emit((state == *status).into(), &[name, state.name()]);
                }
            }
        }),
    },
    Metric {
        name: "tuplewatch.maps.memory",
        kind: Kind::UpDownCounter,
        unit: "By",
        description: "Memory of the kernel side's maps.",
        source: Host(&[], |view, emit| emit(view.memory_bytes, &[])),
    },
    Metric {
        name: "tuplewatch.exports.failed",
        kind: Kind::Counter,
        unit: "{export}",
        description: "Exports that failed after all their retries. Failed log records are kept and sent again.",
        source: Host(&[attribute::SIGNAL], |view, emit| {
            emit(view.delivery.metrics_failed, &["metrics"]);
            emit(view.delivery.logs_failed, &["logs"]);
        }),
    },
    Metric {
        name: "tuplewatch.alert_records.waiting",
        kind: Kind::UpDownCounter,
        unit: "{record}",
        description: "Log records of alerts that wait for the receiver.",
        source: Host(&[], |view, emit| emit(view.delivery.logs_waiting, &[])),
    },
    Metric {
        name: "tuplewatch.alert_records.dropped",
        kind: Kind::Counter,
        unit: "{record}",
        description: "Log records of alerts that were dropped, oldest first, because too many waited.",
        source: Host(&[], |view, emit| emit(view.delivery.logs_dropped, &[])),
    },
    Metric {
        name: "tuplewatch.build_info",
        kind: Kind::Gauge,
        unit: "{build}",
        description: "Always 1, with the version of the agent.",
        source: Host(&[attribute::VERSION], |view, emit| emit(1, &[view.version])),
    },
];
