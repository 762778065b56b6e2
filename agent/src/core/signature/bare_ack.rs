//! What is common to everything that shows as a bare ACK, and the look-alikes among it.

use std::collections::BTreeSet;

use tuplewatch_common::{
    address::{PortSpaceKey, Role},
    memory::Former,
};

use super::{
    Context,
    words::{self, place},
};
use crate::core::{
    finding::{Confidence, Evidence, Finding, OpenedBy, Severity, Verdict},
    pool,
    ports::Ports,
    report::Totals,
    space::{Episode, Space},
};

/// Samples shown in a finding.
const SHOWN: usize = 8;

/// A port space with symptoms, seen by the rules.
pub struct BareAcks<'a> {
    /// The port space.
    pub key: &'a PortSpaceKey,
    /// What is known of it.
    pub space: &'a Space,
    /// The trouble going on.
    pub episode: &'a Episode,
    /// Counts of the window.
    pub window: Totals,
    /// Counts of the episode.
    pub whole: Totals,
    /// Refused SYNs of the window that reuse of a closed connection explains.
    pub suspects: u64,
    /// Their distinct source ports.
    pub suspect_ports: u32,
}

impl<'a> BareAcks<'a> {
    /// Looks at a port space; `None` if it has no symptoms.
    #[must_use]
    pub fn of(context: &Context<'_>, key: &'a PortSpaceKey, space: &'a Space) -> Option<Self> {
        let episode = space.episode.as_ref()?;
        let window = space.window(context.now, context.thresholds.window);
        let is_responder = key.role == Role::Responder as u8;
        // The responder's side has seen the former connection close. The initiator's side has not,
        // where a NAT behind it hands the port on: there a bare ACK on a port never used before is
        // the sign. A port whose end the responder did not see says something only beside others
        // whose end it saw.
        let unknown = window.bare_acks_unknown;
        let suspects = if !is_responder || window.bare_acks_closed >= unknown {
            window.bare_acks_closed + unknown
        } else {
            window.bare_acks_closed
        };
        let since = context.now.0.saturating_sub(
            u64::try_from(context.thresholds.window.as_nanos()).unwrap_or(u64::MAX),
        );
        let ports: BTreeSet<u16> = space
            .samples
            .iter()
            .filter(|r| r.sample.time_ns >= since)
            .filter(|r| r.former.is_closed() || matches!(r.former, Former::None | Former::Refused))
            .map(|r| r.sample.port)
            .collect();
        Some(Self {
            key,
            space,
            episode,
            window,
            whole: space.totals.minus(&episode.baseline),
            suspects,
            suspect_ports: u32::try_from(ports.len()).unwrap_or(u32::MAX),
        })
    }

    /// The numbers.
    #[must_use]
    pub fn evidence(&self, context: &Context<'_>) -> Evidence {
        let (w, t, e) = (&self.window, &self.whole, self.episode);
        let seconds = |ms: u32| f64::from(ms) / 1000.0;
        let window_seconds = context.thresholds.window.as_secs_f64();
        // The first window after a start is not full yet.
        let observed = context
            .tables
            .first
            .map_or(window_seconds, |first| {
                context.now.since(first).as_secs_f64()
            })
            .clamp(1.0, window_seconds);
        let ports = self.space.ports.as_ref();
        Evidence {
            opens: t.opens,
            refused_syns: t.bare_acks,
            refused_after_close: t.bare_acks_closed,
            refused_while_open: t.bare_acks_open,
            refused_half_open: t.bare_acks_half_open,
            refused_unknown: t.bare_acks_unknown,
            rsts: t.rsts_after_bare_ack,
            syn_retransmits: t.syn_retransmits,
            healed: t.healed,
            unhealed: t.unhealed,
            reuse_accepted: t.reuse_accepted,
            unanswered: t.syn_timeouts + t.abandoned,
            no_listener: t.no_listener,
            duplicate_syns: t.duplicate_syns,
            refused_ports: u32::try_from(e.refused_ports.len()).unwrap_or(u32::MAX),
            ports_seen: ports.map_or(0, Ports::distinct),
            // Behind a NAT the responder sees the pool; the initiator sees its own host's ports.
            pool: ports
                .filter(|_| self.key.role == Role::Responder as u8)
                .and_then(|p| pool::infer(p, &context.thresholds.pool)),
            time_wait: self.space.census.held(),
            time_wait_peak: e.time_wait_peak.max(self.space.census.held()),
            in_use: self.space.census.in_use,
            reuse_interval_min_seconds: e.reuse_interval_ms.map(|(low, _)| seconds(low)),
            reuse_interval_max_seconds: e.reuse_interval_ms.map(|(_, high)| seconds(high)),
            window_seconds,
            window_refused: w.bare_acks,
            window_opens: w.opens,
            opens_per_second: w.opens as f64 / observed,
            samples: self
                .space
                .samples
                .iter()
                .skip(self.space.samples.len().saturating_sub(SHOWN))
                .map(|r| r.sample.clone())
                .collect(),
        }
    }

    /// The processes that open the connections, where this host is the initiator.
    #[must_use]
    pub fn opened_by(&self, context: &Context<'_>) -> Vec<OpenedBy> {
        if self.key.role != Role::Initiator as u8 {
            return Vec::new();
        }
        let window = context.thresholds.window;
        let observed = context
            .tables
            .first
            .map_or(window, |first| context.now.since(first).min(window))
            .as_secs_f64()
            .max(1.0);
        let rates = context.tables.openers(self.key, context.now, window);
        rates
            .into_iter()
            .take(5)
            .map(|rate| OpenedBy {
                pid: rate.key.pid,
                command: words::command(&rate.total.command),
                cgroup_id: rate.total.cgroup,
                cgroup: None,
                opens_per_second: rate.opens as f64 / observed,
                opens: rate.total.opens,
                lifetime_seconds: (rate.total.closed > 0)
                    .then(|| rate.total.lifetime_ms as f64 / 1000.0 / rate.total.closed as f64),
            })
            .collect()
    }

    fn look_alike(
        &self,
        context: &Context<'_>,
        verdict: Verdict,
        text: String,
        remedy: &str,
    ) -> Finding {
        Finding {
            verdict,
            space: *self.key,
            since: self.episode.since,
            severity: Severity::Info,
            confidence: Confidence::High,
            evidence: self.evidence(context),
            ruled_out: Vec::new(),
            opened_by: self.opened_by(context),
            summary: text,
            remedy: remedy.to_owned(),
        }
    }
}

/// The SYN was refused by RST after the bare ACK: without a listener TIME_WAIT answers any SYN, even
/// one that it would have let through (`tcp_v4_rcv`, `do_time_wait`).
pub fn no_listener(context: &Context<'_>, b: &BareAcks<'_>) -> Option<Finding> {
    let n = b.window.no_listener;
    (n > 0).then(|| {
        let text = format!(
            "{}: {n} SYNs met a TIME_WAIT and then a closed port: nothing listens there any more",
            place(b.key)
        );
        b.look_alike(
            context,
            Verdict::NoListener,
            text,
            "Start the service that should listen there.",
        )
    })
}

/// The former connection was never closed: its initiator has lost it (crash, power, a dropped
/// conntrack entry) and comes back on the same port (RFC 9293 section 3.5.1).
pub fn half_open_reconnect(context: &Context<'_>, b: &BareAcks<'_>) -> Option<Finding> {
    let n = b.window.bare_acks_open;
    (n > 0 && n >= b.suspects).then(|| {
        let text = format!(
            "{}: {n} SYNs on {} ports met a connection that was never closed: the initiator lost \
             its state and reconnects from the same port",
            place(b.key),
            b.episode.refused_ports.len()
        );
        b.look_alike(
            context,
            Verdict::HalfOpenReconnect,
            text,
            "Keep-alive at the responder clears dead connections sooner; an initiator that binds a \
             fixed source port should let the kernel choose.",
        )
    })
}

/// One or two ports again and again: somebody fixed them (NFS, rsh, `curl --local-port`).
pub fn fixed_port_reuse(context: &Context<'_>, b: &BareAcks<'_>) -> Option<Finding> {
    let (n, ports) = (b.suspects, b.suspect_ports);
    let again_and_again = n >= 2 && n >= 2 * u64::from(ports);
    let few = ports > 0 && ports < context.thresholds.l4_reuse.min_ports;
    let explained = b.window.no_listener * 2 >= n || b.window.bare_acks_open >= n;
    (again_and_again && few && !explained).then(|| {
        let text = format!(
            "{}: {n} SYNs from {ports} source port(s) only met the TIME_WAIT of the connection \
             before: a fixed source port is used again too early",
            place(b.key)
        );
        b.look_alike(
            context,
            Verdict::FixedPortReuse,
            text,
            "Let the initiator's kernel choose the source port, or keep the connection open.",
        )
    })
}

/// The SYN met a handshake that was never completed: a flood or a scan hit the same port twice.
pub fn syn_recv_collision(context: &Context<'_>, b: &BareAcks<'_>) -> Option<Finding> {
    let n = b.window.bare_acks_half_open;
    (n > 0 && n > b.suspects).then(|| {
        let text = format!(
            "{}: {n} SYNs met a handshake that was never completed: half-open connections of a \
             flood or a scan",
            place(b.key)
        );
        b.look_alike(
            context,
            Verdict::SynRecvCollision,
            text,
            "Look at where the SYNs come from; SYN cookies protect the listener.",
        )
    })
}

/// The network delivered a SYN again that had been accepted before.
pub fn duplicate_syn(context: &Context<'_>, b: &BareAcks<'_>) -> Option<Finding> {
    let n = b.window.duplicate_syns;
    (n > 0).then(|| {
        let text = format!(
            "{}: {n} late duplicates of SYNs that were accepted before: the network duplicates or \
             delays packets",
            place(b.key)
        );
        b.look_alike(
            context,
            Verdict::DuplicateSyn,
            text,
            "Nothing to do at the two ends.",
        )
    })
}
