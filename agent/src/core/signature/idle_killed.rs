//! Signature `stuck_keepalive`, cause `idle_killed`: connections are reset by the first segment after an idle
//! time, or get no answer from then on, and always when that was longer than any other that was survived:
//! something in between forgets them. And what resembles it: a peer that closes idle connections itself, and a request that crosses
//! its FIN (`keepalive_race`).

#[cfg(test)]
mod tests;

use std::time::Duration;

use tuplewatch_common::address::{FourTuple, PortSpaceKey, Role};

use super::{
    Context,
    idle_device::{self, Device},
    words::{command, count, place, seconds},
};
use crate::core::{
    ends::Ends,
    finding::{Confidence, Evidence, Finding, OpenedBy, RuledOut, Severity, Verdict},
    idle::{self, Idle, IdleConnection, IdleEvidence, Killed, ResetBy},
    threshold,
    time::Moment,
};

/// Connections shown in a finding.
const SHOWN: usize = 16;
/// Processes shown.
const PROCESSES: usize = 5;
/// An estimate lies within this many tolerances between its two bounds.
const WIDE: f64 = 5.0;
/// Connections that woke and lived, for a single reset to say something.
const SURVIVORS: u64 = 3;

/// Judges each service in which something was lost after a rest.
pub fn idle_killed(context: &Context<'_>) -> Vec<Finding> {
    let troubled = context.tables.idles.troubled();
    troubled
        .filter_map(|(key, idle)| {
            let context = &context.at(key);
            let step = Step::of(context, idle);
            if step.is_told(context) {
                return Some(finding(context, key, idle, &step));
            }
            race(context, key, idle)
        })
        .collect()
}

/// The present finding of an alert that fires, and whether a connection was reset lately.
pub fn refresh(context: &Context<'_>, key: &PortSpaceKey) -> Option<(Finding, bool)> {
    let idle = context.tables.idles.get(key)?;
    let step = Step::of(context, idle);
    let latest = step.killed.last()?;
    let goes_on = context.now.since(latest.at) < context.thresholds.alert.resolve
        || step.killed.iter().any(|killed| hangs(context, killed));
    Some((finding(context, key, idle, &step), goes_on))
}

/// Connections of a port space that ended in silence, if that is told.
pub fn told_in_silence(context: &Context<'_>, space: &PortSpaceKey) -> Vec<FourTuple> {
    let tuple = FourTuple {
        initiator: space.initiator,
        responder: space.responder,
        responder_port: space.responder_port,
        ..FourTuple::default()
    };
    let key = idle::service(&tuple, Role::from_u8(space.role), space.point);
    let Some(idle) = context.tables.idles.get(&key) else {
        return Vec::new();
    };
    if !idle.killed.iter().any(|killed| killed.in_silence) {
        return Vec::new();
    }
    let context = &context.at(&key);
    let step = Step::of(context, idle);
    if !step.is_told(context) {
        return Vec::new();
    }
    let silent = step.killed.iter().filter(|killed| killed.in_silence);
    silent.map(|killed| killed.tuple).collect()
}

/// It still waits for an answer.
fn hangs(context: &Context<'_>, killed: &Killed) -> bool {
    killed.in_silence
        && context
            .tables
            .stalls
            .live(&killed.tuple, killed.role)
            .is_some()
}

/// Idle times that were survived, and those that were not.
struct Step<'a> {
    /// Connections lost after a longer rest than any other survived, in the order of time.
    killed: Vec<&'a Killed>,
    /// Connections lost after a shorter one.
    sooner: u32,
    /// The longest rest survived.
    survived: Duration,
    /// Connections that survived one.
    survivors: u64,
    /// The shortest rest that was not survived, of `killed`.
    shortest: Duration,
    /// The time-out, where it can be told.
    estimate: Option<Duration>,
    /// Known devices that have it.
    devices: Vec<String>,
    /// All rests that were cut short lie over one moment, and nothing shows that a connection lived
    /// through it: a restart explains them as well.
    one_event: bool,
}

impl<'a> Step<'a> {
    fn of(context: &Context<'_>, idle: &'a Idle) -> Self {
        let rules = &context.thresholds.idle_killed;
        let lately = |at: Moment| context.now.since(at) <= rules.window;
        let survived = || idle.survived.iter().filter(|(at, _)| lately(*at));
        let longest = survived().map(|(_, s)| s.longest).max();
        let longest = longest.unwrap_or_default();
        let all = idle.killed.iter();
        let all = all.filter(|k| lately(k.at) && k.idle >= rules.min_idle);
        let (killed, sooner): (Vec<&Killed>, Vec<_>) =
            all.partition(|killed| killed.idle > longest);
        let shortest = killed.iter().map(|k| k.idle).min().unwrap_or_default();
        let devices = idle_device::all(&context.around.egress);
        let (estimate, devices) = estimate(longest, shortest, rules, &devices);
        let spans = survived().map(|(at, s)| (*at, s.longest));
        Self {
            one_event: one_event(&killed, spans),
            sooner: u32::try_from(sooner.len()).unwrap_or(u32::MAX),
            survivors: survived().map(|(_, s)| u64::from(s.count)).sum(),
            survived: longest,
            killed,
            shortest,
            estimate,
            devices,
        }
    }

    /// There is a step, and nothing else explains it.
    fn is_told(&self, context: &Context<'_>) -> bool {
        let rules = &context.thresholds.idle_killed;
        let n = u32::try_from(self.killed.len()).unwrap_or(u32::MAX);
        // A peer that resets now and then whatever the idle time does so after a short one, mostly.
        if self.sooner > n / 4 {
            return false;
        }
        if n >= rules.min_killed.max(1) {
            return !self.one_event;
        }
        let by_peer = self
            .killed
            .iter()
            .any(|k| k.reset_by == Some(ResetBy::Peer));
        let just_passed = |estimate: Duration| {
            self.shortest.as_secs_f64() <= estimate.as_secs_f64() * (1.0 + rules.tolerance)
        };
        n > 0
            && self.sooner == 0
            && !by_peer
            && self.survivors >= SURVIVORS
            && !self.devices.is_empty()
            && self.estimate.is_some_and(just_passed)
    }
}

/// The time-out between the longest rest that was survived and the shortest that was not, if the two are
/// near and no device says otherwise; else that of a device which was just passed. With the devices that
/// were.
fn estimate(
    survived: Duration,
    killed: Duration,
    rules: &threshold::IdleKilled,
    devices: &[Device],
) -> (Option<Duration>, Vec<String>) {
    if killed.is_zero() {
        return (None, Vec::new());
    }
    // What closes an idle connection itself is no device that forgets it.
    let devices: Vec<Device> = devices.iter().filter(|d| !d.closes).cloned().collect();
    let near = idle_device::near(&devices, killed, rules.tolerance, survived, killed);
    let passed = near.first().and_then(|name| {
        let device = devices.iter().find(|d| d.name == *name);
        device.map(|d| d.timeout)
    });
    let middle = (survived + killed) / 2;
    let narrow = killed.as_secs_f64() <= survived.as_secs_f64() * (1.0 + WIDE * rules.tolerance);
    let fits = |device: Duration| {
        device.abs_diff(middle).as_secs_f64() <= rules.tolerance * device.as_secs_f64()
    };
    let estimate = if narrow && passed.is_none_or(fits) {
        Some(middle)
    } else {
        passed
    };
    (estimate, near)
}

/// Whether one moment explains all of them: each was used before it and reset after it, and no connection is
/// known to have rested through it and lived.
fn one_event(killed: &[&Killed], survived: impl Iterator<Item = (Moment, Duration)>) -> bool {
    let since = killed.iter().map(|k| k.rested_since()).max();
    let until = killed.iter().map(|k| k.at).min();
    let (Some(since), Some(until)) = (since, until) else {
        return false;
    };
    let mut spans: Vec<(Moment, Moment)> = survived
        .map(|(at, rest)| {
            let ns = i64::try_from(rest.as_nanos()).unwrap_or(i64::MAX);
            (at.shifted(-ns), at)
        })
        .collect();
    spans.sort_unstable();
    // Moments up to this one are excluded: somebody rested through them and lived.
    let mut excluded = since;
    for (begin, end) in spans {
        if begin <= excluded {
            excluded = excluded.max(end);
        }
    }
    excluded < until
}

fn finding(context: &Context<'_>, key: &PortSpaceKey, idle: &Idle, step: &Step<'_>) -> Finding {
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
const UNSEEN: &str = "who gives up before the kernel has tried again some times (3 s) leaves no sign of a connection \
                      that ended in silence; what is said on the connections is not looked at, so that TLS, HTTP/2 \
                      and gRPC are seen like any other";

fn connections(context: &Context<'_>, killed: &[&Killed]) -> Vec<IdleConnection> {
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
fn opened_by<'a>(context: &Context<'_>, killed: impl Iterator<Item = &'a Killed>) -> Vec<OpenedBy> {
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

/// The peer closes idle connections itself, and requests cross its FIN.
fn race(context: &Context<'_>, key: &PortSpaceKey, idle: &Idle) -> Option<Finding> {
    let rules = &context.thresholds.idle_killed;
    let lately = |killed: &&Killed| context.now.since(killed.at) <= rules.window;
    let races: Vec<&Killed> = idle.races.iter().filter(lately).collect();
    let n = u32::try_from(races.len()).unwrap_or(u32::MAX);
    if n < rules.min_killed.max(1) {
        return None;
    }
    let mut rests: Vec<Duration> = races.iter().map(|k| k.idle).collect();
    rests.sort_unstable();
    let typical = rests[rests.len() / 2];
    // A server that closes idle connections does it after the same time; one that ends closes them all,
    // however long they rested.
    let spread = typical.mul_f64(2.0 * rules.tolerance);
    let near = rests.iter().filter(|rest| rest.abs_diff(typical) <= spread);
    let lasts = races[races.len() - 1].at.since(races[0].at);
    if near.count() * 2 <= rests.len() || lasts < typical * 3 {
        return None;
    }
    let devices: Vec<String> = idle_device::all(&context.around.egress)
        .into_iter()
        .filter(|d| {
            let off = d.timeout.abs_diff(typical).as_secs_f64();
            d.closes && off <= rules.tolerance * d.timeout.as_secs_f64()
        })
        .map(|d| d.name)
        .collect();
    let mut rest = IdleEvidence {
        killed: n,
        shortest_killed_seconds: rests[0].as_secs_f64(),
        longest_killed_seconds: rests[rests.len() - 1].as_secs_f64(),
        timeout_seconds: Some(typical.as_secs_f64()),
        keep_alive_seconds: (typical.as_secs_f64() * 0.8).max(0.1),
        connections: connections(context, &races),
        unseen: UNSEEN.to_owned(),
        ..IdleEvidence::default()
    };
    let like = match devices.as_slice() {
        [] => String::new(),
        names => format!(", as {} does", names.join(" or ")),
    };
    rest.devices = devices;
    let summary = format!(
        "{}: {} answered by RST because the peer had just closed the connection by FIN, after it was idle for \
         about {}{like}",
        place(key),
        match n {
            1 => "1 request was".to_owned(),
            _ => format!("{} were", count(n.into(), "request")),
        },
        seconds(typical.as_secs_f64()),
    );
    Some(Finding {
        verdict: Verdict::KeepaliveRace,
        space: *key,
        since: races[0].at,
        severity: Severity::Info,
        confidence: Confidence::High,
        ruled_out: Vec::new(),
        opened_by: opened_by(context, races.iter().copied()),
        remedy: format!(
            "Nothing in between is at fault: let the side that sends the requests give up idle connections \
             earlier than its peer does (below {}), and send a request again when its connection is closed.",
            seconds(typical.as_secs_f64()),
        ),
        evidence: Evidence {
            window_seconds: rules.window.as_secs_f64(),
            idle: Some(rest),
            ..Evidence::default()
        },
        summary,
    })
}
