//! The numbers behind a finding: only those that it has.

use std::net::SocketAddr;

use super::{
    super::text::{count, counted, number, percent, seconds},
    Block, list,
};
use crate::core::{
    black_hole::StallConnection,
    finding::Evidence,
    idle::{IdleConnection, ResetBy},
    stuck::{Became, StuckConnection},
};

/// Connections shown; JSON has more.
const CONNECTIONS: usize = 5;

/// Connections whose requests fail, and the others.
pub(super) fn stuck(block: &mut Block, e: &Evidence) {
    let Some(stuck) = &e.stuck else {
        return;
    };
    let mut text = format!(
        "{} on {}, at most {} in a row; of the others {} do well ({} of them newer), {} fail ({} newer)",
        counted(stuck.failures, "failure", "failures"),
        counted(stuck.stuck.into(), "connection", "connections"),
        stuck.longest,
        count(stuck.better),
        count(stuck.better_newer),
        count(stuck.worse),
        count(stuck.worse_newer),
    );
    if let Some(since) = stuck.better_for_seconds {
        text.push_str(&format!("; the newest do well for {} now", seconds(since)));
    }
    block.field("Responses", &text);
    for connection in stuck.connections.iter().take(CONNECTIONS) {
        block.field("Connection", &connection_text(connection));
    }
    let more = (stuck.stuck as usize).saturating_sub(CONNECTIONS.min(stuck.connections.len()));
    if more > 0 {
        block.field("", &format!("and {more} more"));
    }
    block.field("Unseen", &stuck.unseen);
}

fn connection_text(c: &StuckConnection) -> String {
    let age = c.age_seconds.map_or_else(
        || "older than the agent".to_owned(),
        |age| format!("open for {}", seconds(age)),
    );
    let mut text = format!(
        "{}, {age}: {} of {} failed, {} in a row for {} with {}",
        c.ends,
        count(c.failures),
        counted(c.requests.into(), "request", "requests"),
        c.in_a_row,
        seconds(c.failing_seconds),
        c.status,
    );
    match (c.became, &c.close) {
        (_, Some(command)) => text.push_str(&format!("; to close it: {command}")),
        (Became::Recovered, _) => text.push_str("; it does well again"),
        _ => text.push_str("; it is closed"),
    }
    text
}

/// Connections that get nothing through, and new ones.
pub(super) fn stall(block: &mut Block, e: &Evidence) {
    let Some(stall) = &e.stall else {
        return;
    };
    let mut text = format!(
        "{} for {}, {} not acknowledged",
        counted(stall.stalled.into(), "connection", "connections"),
        seconds(stall.longest_seconds),
        counted(stall.unacked_bytes, "byte", "bytes"),
    );
    if stall.over > 0 {
        text.push_str(&format!("; {} over", count(stall.over)));
    }
    text.push_str(&format!(
        "; since then {}, {} established, {} of them stalled",
        counted(stall.newer_opens, "open", "opens"),
        count(stall.newer),
        count(stall.newer_stalled),
    ));
    if let Some(since) = stall.newer_for_seconds {
        text.push_str(&format!("; new ones do better for {} now", seconds(since)));
    }
    block.field("Stalled", &text);
    for connection in stall.connections.iter().take(CONNECTIONS) {
        block.field("Connection", &stall_text(connection));
    }
    let all = (stall.stalled + stall.over) as usize;
    let more = all.saturating_sub(CONNECTIONS.min(stall.connections.len()));
    if more > 0 {
        block.field("", &format!("and {more} more"));
    }
    block.field("Rests on", &stall.rests_on);
}

fn stall_text(c: &StallConnection) -> String {
    let age = c.age_seconds.map_or_else(
        || "older than the agent".to_owned(),
        |age| format!("open for {}", seconds(age)),
    );
    let mut text = format!(
        "{}, {age}: nothing through for {}, {} not acknowledged, {} more wait; {}, {} without an answer",
        c.ends,
        seconds(c.stalled_seconds),
        counted(c.unacked_bytes.into(), "byte", "bytes"),
        count(c.waiting_bytes),
        counted(c.rtos.into(), "time-out", "time-outs"),
        counted(c.probes.into(), "probe", "probes"),
    );
    if c.window_closed {
        text.push_str("; the peer's window is closed");
    }
    if let Some(holder) = c.holder() {
        text.push_str(&format!("; opened by {holder}"));
    }
    match &c.close {
        Some(command) => text.push_str(&format!("; to close it: {command}")),
        None => text.push_str("; it is over"),
    }
    text
}

/// Connections that were lost after an idle time, and others that live.
pub(super) fn idle(block: &mut Block, e: &Evidence) {
    let Some(idle) = &e.idle else {
        return;
    };
    let mut text = format!(
        "{} lost after {} to {} without traffic; {} lived through up to {}",
        counted(idle.killed.into(), "connection", "connections"),
        seconds(idle.shortest_killed_seconds),
        seconds(idle.longest_killed_seconds),
        counted(idle.survived, "other", "others"),
        seconds(idle.longest_survived_seconds),
    );
    if idle.killed_sooner > 0 {
        text.push_str(&format!(
            "; {} lost sooner",
            count(u64::from(idle.killed_sooner))
        ));
    }
    if idle.in_silence > 0 {
        text.push_str(&format!("; {} got no answer", count(idle.in_silence)));
    }
    block.field("Idle", &text);
    for connection in idle.connections.iter().take(CONNECTIONS) {
        block.field("Connection", &idle_text(connection));
    }
    let more = (idle.killed as usize).saturating_sub(CONNECTIONS.min(idle.connections.len()));
    if more > 0 {
        block.field("", &format!("and {more} more"));
    }
    block.field("Unseen", &idle.unseen);
}

fn idle_text(c: &IdleConnection) -> String {
    let age = c.age_seconds.map_or_else(
        || "older than the agent".to_owned(),
        |age| format!("open for {}", seconds(age)),
    );
    let what = if c.probe { "keep-alive probe" } else { "data" };
    let by = match c.reset_by {
        Some(ResetBy::Middlebox) => " by something in between",
        Some(ResetBy::Peer) => " by the peer",
        None => "",
    };
    let met = if c.in_silence {
        "got no answer".to_owned()
    } else {
        format!("reset{by}")
    };
    let mut text = format!(
        "{}, {age}: {what} after {} without traffic {met}, {} ago",
        c.ends,
        seconds(c.idle_seconds),
        seconds(c.ago_seconds),
    );
    if let (Some(pid), Some(command)) = (c.pid, &c.command) {
        text.push_str(&format!("; {command}[{pid}]"));
    }
    if let Some(said) = c.keep_alive_text() {
        text.push_str(&format!("; {said}"));
    }
    if let Some(command) = &c.close {
        text.push_str(&format!("; to close it: {command}"));
    }
    text
}

/// What rides on a place that a service has left.
pub(super) fn placement(block: &mut Block, e: &Evidence) {
    let Some(placement) = &e.placement else {
        return;
    };
    let what = if placement.left {
        "served here no more"
    } else {
        "served from elsewhere"
    };
    let mut text = format!(
        "{}: {what} for {}; requests answered lately on {}",
        placement.service,
        seconds(placement.since_seconds),
        counted(
            placement.answered.into(),
            "older connection",
            "older connections"
        ),
    );
    if placement.left {
        text.push_str(&format!(
            ", {} woke after a pause, {} received something",
            count(placement.woken),
            count(placement.active)
        ));
    }
    block.field("Placement", &text);
    for c in placement.connections.iter().take(CONNECTIONS) {
        let age = c.age_seconds.map_or_else(
            || "older than the agent".to_owned(),
            |age| format!("open for {}", seconds(age)),
        );
        let text = format!(
            "{}, {age}: {}, the latest answered {} ago; to close it: {}",
            c.ends,
            counted(c.requests.into(), "request", "requests"),
            seconds(c.answered_ago_seconds),
            c.close,
        );
        block.field("Connection", &text);
    }
    let more =
        (placement.answered as usize).saturating_sub(CONNECTIONS.min(placement.connections.len()));
    if more > 0 {
        block.field("", &format!("and {more} more"));
    }
}

/// SYNs that met an older connection, and connect() without a port.
pub(super) fn refused(block: &mut Block, e: &Evidence) {
    let former = list(&[
        (
            e.refused_after_close,
            "after the former connection was closed",
        ),
        (e.refused_while_open, "while it was open"),
        (e.refused_half_open, "while it was half open"),
        (e.refused_unknown, "with an unknown former connection"),
    ]);
    let former = if former.is_empty() {
        former
    } else {
        format!(": {former}")
    };
    if e.refused_syns > 0 {
        block.field("Refused", &format!("{}{former}", super::refused(e)));
    }
    if let Some(c) = &e.collisions {
        let text = format!(
            "{} live and {} idle connections were reset by SYNs from {}, {} to {} after their last \
             traffic",
            c.live,
            c.stale,
            counted(c.ports.into(), "port", "ports"),
            seconds(f64::from(c.idle_min_ms) / 1000.0),
            seconds(f64::from(c.idle_max_ms) / 1000.0)
        );
        block.field("Collisions", &text);
    }
    if e.no_local_port > 0 {
        let window = seconds(e.window_seconds);
        let text = format!(
            "{} connect() found no source port in the last {window}",
            count(e.no_local_port)
        );
        block.field("Failed", &text);
    }
}

/// Opens without answer, and what goes well beside them.
pub(super) fn lost(block: &mut Block, e: &Evidence) {
    let Some(loss) = &e.loss else {
        return;
    };
    let mut text = format!(
        "{} without answer, {} got through, {} SYNs sent again",
        counted(loss.lost, "open", "opens"),
        count(loss.established),
        count(loss.syn_retransmits),
    );
    if let Some(live) = loss.live {
        let live = counted(live.into(), "connection lives", "connections live");
        text.push_str(&format!("; {live}"));
    }
    if let Some(data) = loss.data_retransmits {
        let data = counted(data, "segment of data", "segments of data");
        text.push_str(&format!(", {data} sent again"));
    }
    let others = format!(
        "; of other destinations {} answer and {} fail",
        loss.others_answering, loss.others_failing
    );
    block.field("Lost", &(text + &others));
    if !e.counters.is_empty() {
        let counters: Vec<String> = e
            .counters
            .iter()
            .map(|c| format!("{} {}", c.name, count(c.value)))
            .collect();
        block.field("Counters", &counters.join(", "));
    }
}

/// What became of the opens.
pub(super) fn outcome(block: &mut Block, e: &Evidence) {
    let outcome = list(&[
        (e.healed, "got through later"),
        (e.unhealed, "did not get through"),
        (e.unanswered, "unanswered in the end"),
        (e.half_open, "not completed by the client"),
        (e.refused_by_rst, "answered by RST"),
        (e.no_listener, "refused by RST after a bare ACK"),
        (e.reuse_accepted, "reused four-tuples accepted at once"),
        (e.rsts, "RSTs in answer"),
        (e.syn_retransmits, "SYNs sent again"),
        (e.duplicate_syns, "late duplicate SYNs"),
    ]);
    if !outcome.is_empty() {
        block.field("Outcome", &outcome);
    }
}

/// Source ports seen, and sockets of this host.
pub(super) fn ports(block: &mut Block, e: &Evidence) {
    let mut ports = Vec::new();
    if e.refused_ports > 0 {
        let refused = counted(e.refused_ports.into(), "port", "ports");
        ports.push(format!("{refused} refused"));
    }
    if e.ports_seen > 0 {
        let pool = e.pool.map_or_else(String::new, |pool| {
            let size = count(pool.size());
            format!(" of the pool {}-{} ({size})", pool.first, pool.last)
        });
        ports.push(format!("{} seen{pool}", count(e.ports_seen)));
    }
    if !ports.is_empty() {
        block.field("Ports", &ports.join(", "));
    }
    let (held, peak) = (count(e.time_wait), count(e.time_wait_peak));
    block.field(
        "Sockets",
        &format!("{held} in TIME_WAIT (peak {peak}), {} in use", e.in_use),
    );
    if let (Some(min), Some(max)) = (e.reuse_interval_min_seconds, e.reuse_interval_max_seconds) {
        let (min, max) = (seconds(min), seconds(max));
        block.field(
            "Reuse",
            &format!("{min} to {max} after the end of the former connection"),
        );
    }
}

/// Source ports that there are, those taken, and where that leads.
pub(super) fn budget(block: &mut Block, e: &Evidence) {
    if let Some(b) = &e.budget {
        let text = format!(
            "{} of {} ports taken ({}): {} in use, {} held; a port is held for {} after close",
            count(b.taken()),
            count(b.ports),
            percent(b.taken().into(), b.ports.into()),
            count(b.in_use),
            count(b.held),
            seconds(b.hold_seconds)
        );
        block.field("Budget", &text);
    }
    if let Some(o) = &e.outlook {
        let mut text = format!("{} ports taken in the end", count(o.expected));
        if o.rise_per_second > 0.0 {
            let rise = number(o.rise_per_second);
            text.push_str(&format!(", {rise} more with every second"));
        }
        if let Some(end) = o.exhausted_in_seconds {
            text.push_str(&format!("; none is left in {}", seconds(end)));
        }
        block.field("Outlook", &text);
    }
    if let Some(egress) = &e.egress {
        let text = format!(
            "{}: {} of {} ports taken by this host ({} in use, {} held)",
            egress.group,
            count(egress.in_use.saturating_add(egress.held)),
            count(egress.budget),
            count(egress.in_use),
            count(egress.held)
        );
        block.field("Device", &text);
    }
    if let Some(s) = &e.searches {
        let before = s.median_before_seconds.map_or_else(String::new, |before| {
            format!(", {} before", seconds(before))
        });
        let text = format!("a port is found in {}{before}", seconds(s.median_seconds));
        block.field("Search", &text);
    }
    for holder in &e.holders {
        let text = format!(
            "{}: {} in use, {} in TIME_WAIT",
            SocketAddr::new(holder.server_address, holder.server_port),
            count(holder.in_use),
            count(holder.time_wait)
        );
        block.field("Held for", &text);
    }
}

/// What goes on now.
pub(super) fn rates(block: &mut Block, e: &Evidence) {
    let (rate, window) = (number(e.opens_per_second), seconds(e.window_seconds));
    let (refused, opens) = (count(e.window_refused), count(e.window_opens));
    let text = if e.refused_syns > 0 {
        format!("{rate} opens/s; {refused} of {opens} opens refused in the last {window}")
    } else {
        format!("{rate} opens/s; {opens} opens in the last {window}")
    };
    block.field("Now", &text);
}
