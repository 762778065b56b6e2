//! What is said of connections that something in between has forgotten.

use tuplewatch_common::address::{PortSpaceKey, Role};

use super::{Step, hangs};
use crate::core::{
    ends::Ends,
    finding::{Confidence, Evidence, Finding, OpenedBy, RuledOut, Severity, Verdict},
    idle::{Idle, IdleConnection, IdleEvidence, Killed, ResetBy},
    signature::{
        Context,
        words::{command, count, place, seconds},
    },
    time::Moment,
};

/// Connections shown in a finding.
const SHOWN: usize = 16;
/// Processes shown.
const PROCESSES: usize = 5;

/// The finding, whether or not its condition is met at this moment.
pub(super) fn finding(
    context: &Context<'_>,
    key: &PortSpaceKey,
    idle: &Idle,
    step: &Step<'_>,
) -> Finding {
    let evidence = evidence(context, step);
    let between = format!(
        "{} and {}",
        seconds(evidence.longest_survived_seconds),
        seconds(evidence.shortest_killed_seconds)
    );
    let whose = match evidence.devices.as_slice() {
        [] => String::new(),
        names => format!(" (as {} does)", names.join(" or ")),
    };
    let after = evidence.timeout_seconds.map_or_else(
        || format!("after a time between {between}"),
        |s| format!("after about {}{whose}", seconds(s)),
    );
    let by = match evidence.reset_by {
        Some(ResetBy::Middlebox) => "; the RST comes from something in between, not from the peer",
        Some(ResetBy::Peer) => "; the RST has the peer's own TTL",
        None => "",
    };
    let lost = lost(evidence.killed, evidence.in_silence);
    let summary = format!(
        "{}: {lost} the first segment after an idle time of {} to {}, while others lived through up to {}: idle \
         connections are forgotten {after}{by}",
        place(key),
        seconds(evidence.shortest_killed_seconds),
        seconds(evidence.longest_killed_seconds),
        seconds(evidence.longest_survived_seconds),
    );
    // A host that vanished behind the client's address is silent too.
    let maybe_gone = key.role == Role::Responder as u8 && evidence.in_silence > 0;
    let sure = evidence.timeout_seconds.is_some()
        && !maybe_gone
        && evidence.killed >= context.thresholds.idle_killed.min_killed;
    Finding {
        verdict: Verdict::IdleKilled,
        space: *key,
        since: step.killed.first().map_or(context.now, |k| k.at),
        // A reset is seen at once; who gets no answer waits.
        severity: if step.killed.iter().any(|k| k.in_silence && !k.by_probe) {
            Severity::Critical
        } else {
            Severity::Warning
        },
        confidence: if sure {
            Confidence::High
        } else {
            Confidence::Medium
        },
        ruled_out: ruled_out(idle, step, maybe_gone),
        opened_by: opened_by(context, step.killed.iter().copied()),
        remedy: remedy(&evidence),
        evidence: Evidence {
            window_seconds: context.thresholds.idle_killed.window.as_secs_f64(),
            idle: Some(evidence),
            ..Evidence::default()
        },
        summary,
    }
}

/// `3 connections were reset by`.
fn lost(killed: u32, in_silence: u32) -> String {
    let of = count(killed.into(), "connection");
    match (killed - in_silence.min(killed), in_silence) {
        (1, 0) => format!("{of} was reset by"),
        (_, 0) => format!("{of} were reset by"),
        (0, _) => format!("{of} got no answer from"),
        (_, n) => format!("{of} were reset by, or ({n} of them) got no answer from"),
    }
}

fn ruled_out(idle: &Idle, step: &Step<'_>, maybe_gone: bool) -> Vec<RuledOut> {
    let mut all = vec![RuledOut {
        name: Verdict::KeepaliveRace.name(),
        why: format!(
            "the peer had closed none of them before; {} of others it had",
            idle.races.len()
        ),
    }];
    if maybe_gone {
        all.push(RuledOut {
            name: "client_gone",
            why: "not ruled out here: hosts behind that address that vanish after a rest look the same"
                .to_owned(),
        });
    }
    if step.killed.len() > 1 {
        all.push(RuledOut {
            name: Verdict::ServerDown.name(),
            why: "no restart explains it: there is no moment that all of them, and no other connection, rested \
                  over"
                .to_owned(),
        });
    }
    all
}

fn evidence(context: &Context<'_>, step: &Step<'_>) -> IdleEvidence {
    let longest = step.killed.iter().map(|k| k.idle).max();
    let mut senders: Vec<ResetBy> = step.killed.iter().filter_map(|k| k.reset_by).collect();
    senders.sort_unstable();
    senders.dedup();
    let lower = step.estimate.unwrap_or(if step.survived.is_zero() {
        step.shortest
    } else {
        step.survived
    });
    IdleEvidence {
        killed: u32::try_from(step.killed.len()).unwrap_or(u32::MAX),
        in_silence: u32::try_from(step.killed.iter().filter(|k| k.in_silence).count())
            .unwrap_or(u32::MAX),
        killed_sooner: step.sooner,
        shortest_killed_seconds: step.shortest.as_secs_f64(),
        longest_killed_seconds: longest.unwrap_or_default().as_secs_f64(),
        survived: step.survivors,
        longest_survived_seconds: step.survived.as_secs_f64(),
        timeout_seconds: step.estimate.map(|t| t.as_secs_f64()),
        devices: step.devices.clone(),
        reset_by: match senders.as_slice() {
            [one] => Some(*one),
            _ => None,
        },
        // Half of it: one probe may be lost.
        keep_alive_seconds: (lower.as_secs_f64() / 2.0).floor().max(1.0),
        connections: connections(context, &step.killed),
        unseen: UNSEEN.to_owned(),
    }
}

/// What such a finding cannot see.
pub(super) const UNSEEN: &str = "who gives up before the kernel has tried again some times (3 s) leaves no sign of a connection \
                      that ended in silence; what is said on the connections is not looked at, so that TLS, HTTP/2 \
                      and gRPC are seen like any other";

pub(super) fn connections(context: &Context<'_>, killed: &[&Killed]) -> Vec<IdleConnection> {
    let latest = killed.iter().rev().take(SHOWN);
    latest
        .map(|killed| {
            let since = |at: Moment| killed.at.since(at).as_secs_f64();
            let settings = &killed.settings;
            let ends = Ends::of(&killed.tuple);
            IdleConnection {
                ends,
                age_seconds: killed.opened.map(since),
                idle_seconds: killed.idle.as_secs_f64(),
                ago_seconds: context.now.since(killed.at).as_secs_f64(),
                probe: killed.by_probe,
                in_silence: killed.in_silence,
                reset_by: killed.reset_by,
                pid: (killed.pid != 0).then_some(killed.pid),
                command: (killed.pid != 0).then(|| command(&killed.command)),
                keep_alive: settings.keep_alive,
                keep_alive_seconds: settings.keep_alive_time.map(|t| t.as_secs_f64()),
                user_timeout_seconds: settings.user_timeout.map(|t| t.as_secs_f64()),
                close: hangs(context, killed).then(|| ends.close_command(killed.role)),
            }
        })
        .collect()
}

/// The processes that opened the connections, those with most of them first.
pub(super) fn opened_by<'a>(
    context: &Context<'_>,
    killed: impl Iterator<Item = &'a Killed>,
) -> Vec<OpenedBy> {
    let mut found: Vec<(OpenedBy, u32)> = Vec::new();
    for killed in killed.filter(|k| k.pid != 0 && k.role == Role::Initiator) {
        if let Some((_, n)) = found.iter_mut().find(|(by, _)| by.pid == killed.pid) {
            *n += 1;
            continue;
        }
        let of = PortSpaceKey::wire(&killed.tuple, killed.role as u8);
        let window = context.thresholds.window;
        let rates = context.tables.openers(&of, context.now, window);
        let rate = rates.iter().find(|rate| rate.key.pid == killed.pid);
        let opened = OpenedBy {
            pid: killed.pid,
            command: command(&killed.command),
            cgroup_id: rate.map_or(0, |rate| rate.total.cgroup),
            cgroup: None,
            opens_per_second: rate.map_or(0.0, |rate| {
                rate.opens as f64 / window.as_secs_f64().max(1.0)
            }),
            opens: rate.map_or(0, |rate| rate.total.opens),
            no_local_port: 0,
            lifetime_seconds: rate
                .filter(|rate| rate.total.closed > 0)
                .map(|rate| rate.total.lifetime_ms as f64 / 1000.0 / rate.total.closed as f64),
        };
        found.push((opened, 1));
    }
    found.sort_by_key(|(by, n)| (std::cmp::Reverse(*n), by.pid));
    found
        .into_iter()
        .take(PROCESSES)
        .map(|(by, _)| by)
        .collect()
}

fn remedy(evidence: &IdleEvidence) -> String {
    let every = evidence.keep_alive_seconds;
    let mut text = close(evidence);
    text.push_str(&format!(
        "Send keep-alive probes before the connection is forgotten: SO_KEEPALIVE with TCP_KEEPIDLE {every:.0} on \
         the sockets; where they have SO_KEEPALIVE and set no time of their own, `sysctl -w \
         net.ipv4.tcp_keepalive_time={every:.0}` in their network namespace. Or close idle connections in the \
         pool before that, and send a request again when its connection is reset.",
    ));
    let set = evidence
        .connections
        .iter()
        .find_map(|c| c.keep_alive.map(|_| c));
    if let Some(connection) = set
        && let Some(said) = connection.keep_alive_text()
    {
        text.push_str(&format!(" Now: {said}."));
    }
    if evidence.in_silence > 0 {
        text.push_str(
            " Set TCP_USER_TIMEOUT too: those that get no answer wait for 15 minutes or more otherwise \
             (net.ipv4.tcp_retries2=15).",
        );
    } else if set.is_some_and(|c| c.user_timeout_seconds == Some(0.0)) {
        text.push_str(
            " TCP_USER_TIMEOUT would also end those that a device forgets without a word.",
        );
    }
    text
}

/// How to end those that still wait for an answer.
fn close(evidence: &IdleEvidence) -> String {
    let commands: Vec<&str> = evidence
        .connections
        .iter()
        .filter_map(|connection| connection.close.as_deref())
        .collect();
    match commands.as_slice() {
        [] => String::new(),
        [first, rest @ ..] => format!(
            "Close the sockets that wait in vain, in the network namespace of their process: {first}{}. ",
            if rest.is_empty() {
                ""
            } else {
                "; the others likewise"
            }
        ),
    }
}
