//! Look-alike `keepalive_race`: a peer that closes idle connections itself, and a request that crosses its FIN.

use std::time::Duration;

use tuplewatch_common::address::PortSpaceKey;

use super::told::{UNSEEN, connections, opened_by};
use crate::core::{
    finding::{Confidence, Evidence, Finding, Severity, Verdict},
    idle::{Idle, IdleEvidence, Killed},
    signature::{
        Context, idle_device,
        words::{count, place, seconds},
    },
};

/// The peer closes idle connections itself, and requests cross its FIN.
pub(super) fn race(context: &Context<'_>, key: &PortSpaceKey, idle: &Idle) -> Option<Finding> {
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
