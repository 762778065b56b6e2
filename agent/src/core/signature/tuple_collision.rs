//! Cause `tuple_collision`: SYNs into live connections of the same initiator address and port.
//!
//! A balancer that keeps client addresses (NLB, Global Accelerator, IPVS) can bring the same client
//! port to one target over two ways; a NAT that has forgotten an idle connection gives its port to
//! another one. The responder answers the SYN by a bare ACK, the initiator's RST then kills the
//! connection that was there (RFC 5961 section 4.2).

use std::collections::BTreeSet;

use super::{
    Context, View,
    words::{count, place, seconds},
};
use crate::core::{
    episode::Symptom,
    finding::{CollisionEvidence, Confidence, Evidence, Finding, RuledOut, Severity, Verdict},
};

/// Live connections of a port space that were reset after a SYN had met them, in the window.
pub struct Collisions {
    evidence: CollisionEvidence,
    is_collision: bool,
}

impl Collisions {
    /// Looks for them.
    pub fn of(context: &Context<'_>, view: &View<'_>) -> Self {
        let rules = &context.thresholds.collision;
        let window = u64::try_from(context.thresholds.window.as_nanos()).unwrap_or(u64::MAX);
        let since = context.now.0.saturating_sub(window);
        let mut evidence = CollisionEvidence {
            idle_min_ms: u32::MAX,
            ..CollisionEvidence::default()
        };
        let mut ports = BTreeSet::new();
        for collision in view.space.collisions().filter(|c| c.time_ns >= since) {
            let is_stale = u128::from(collision.idle_ms) >= rules.stale.as_millis();
            if is_stale {
                evidence.stale += 1;
            } else {
                evidence.live += 1;
            }
            ports.insert(collision.port);
            evidence.idle_min_ms = evidence.idle_min_ms.min(collision.idle_ms);
            evidence.idle_max_ms = evidence.idle_max_ms.max(collision.idle_ms);
        }
        if ports.is_empty() {
            evidence.idle_min_ms = 0;
        }
        evidence.ports = u32::try_from(ports.len()).unwrap_or(u32::MAX);
        let n = evidence.live + evidence.stale;
        // An initiator that lost its state comes back on the same few ports, each again and again.
        let mostly_once = 3 * evidence.ports > 2 * n;
        let many_ports = evidence.ports >= rules.min_ports && mostly_once;
        let is_collision = view.is_responder() && n >= rules.min_resets && many_ports;
        Self {
            evidence,
            is_collision,
        }
    }

    /// They are collisions and not somebody who lost its state.
    pub const fn is_collision(&self) -> bool {
        self.is_collision
    }

    /// Most of them had been idle for as long as a NAT keeps a mapping.
    const fn are_stale(&self) -> bool {
        self.evidence.stale > self.evidence.live
    }
}

/// SYNs into live connections, on many different ports.
pub fn tuple_collision(context: &Context<'_>, view: &View<'_>) -> Option<Finding> {
    if view.window.bare_acks_open == 0 {
        return None;
    }
    Collisions::of(context, view)
        .is_collision
        .then(|| describe(context, view))
}

/// The time that hysteresis asks for has not passed without one.
pub fn goes_on(context: &Context<'_>, view: &View<'_>) -> bool {
    let resolve = u64::try_from(context.thresholds.alert.resolve.as_nanos()).unwrap_or(u64::MAX);
    let latest = view.space.collisions().next_back();
    latest.is_some_and(|c| context.now.0.saturating_sub(c.time_ns) < resolve)
}

/// The finding, whether or not its condition is met at this moment.
pub fn describe(context: &Context<'_>, view: &View<'_>) -> Finding {
    let collisions = Collisions::of(context, view);
    let found = &collisions.evidence;
    let evidence = view.evidence(context, Symptom::BareAck);
    let stale = context.thresholds.collision.stale.as_secs_f64();
    let summary = if collisions.are_stale() {
        format!(
            "{}: {} on {} source ports met connections without traffic for {} and more, and reset them: \
             a NAT forgot the idle connections and gave their ports away",
            place(view.key),
            count(evidence.refused_while_open, "SYN"),
            found.ports,
            seconds(f64::from(found.idle_min_ms) / 1000.0)
        )
    } else {
        format!(
            "{}: {} on {} source ports met live connections of the same address and port; {} with \
             traffic in the last {} reset",
            place(view.key),
            count(evidence.refused_while_open, "SYN"),
            found.ports,
            count(found.live.into(), "connection"),
            seconds(stale)
        )
    };
    let remedy = if collisions.are_stale() {
        "Keep-alive at either end more often than the NAT's idle time-out (TCP_KEEPIDLE below it), or \
         close connections that stay idle; more ports at the NAT make the reuse rarer."
    } else {
        "Turn off client address preservation or cross-zone balancing for this target, or give each way \
         to it an address or a port of its own, so that one client port cannot arrive twice."
    };
    Finding {
        verdict: Verdict::TupleCollision,
        space: *view.key,
        since: view.since(context, Symptom::BareAck),
        severity: if collisions.are_stale() {
            Severity::Warning
        } else {
            Severity::Critical
        },
        confidence: if collisions.is_collision {
            Confidence::High
        } else {
            Confidence::Medium
        },
        ruled_out: ruled_out(&evidence, found),
        evidence: Evidence {
            collisions: Some(found.clone()),
            ..evidence
        },
        opened_by: Vec::new(),
        summary,
        remedy: remedy.to_owned(),
    }
}

fn ruled_out(e: &Evidence, found: &CollisionEvidence) -> Vec<RuledOut> {
    vec![
        RuledOut {
            name: Verdict::HalfOpenReconnect.name(),
            why: format!(
                "{} resets on {} different ports: an initiator that lost its state comes back on the \
                 same few",
                found.live + found.stale,
                found.ports
            ),
        },
        RuledOut {
            name: Verdict::L4ReuseInTimeWait.name(),
            why: format!(
                "{} of {} refused SYNs met a connection that was closed",
                e.refused_after_close, e.refused_syns
            ),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::signature::testing::{Script, client};

    #[test]
    fn live_connections_killed_on_many_ports_are_collisions() {
        let mut host = Script::new();
        host.run(20, |h, second| {
            h.served(client(), 20);
            h.collision(client(), 40_000 + second as u16 * 7, 2_000);
        });
        assert_eq!(host.verdicts(), [Verdict::TupleCollision]);
        let finding = host.finding(Verdict::TupleCollision);
        assert_eq!(finding.severity, Severity::Critical);
        let found = finding.evidence.collisions.unwrap();
        assert_eq!((found.live, found.stale, found.ports), (20, 0, 20));
        assert!(finding.remedy.contains("client address preservation"));
    }

    #[test]
    fn idle_connections_are_the_mappings_that_a_nat_forgot() {
        let mut host = Script::new();
        host.run(20, |h, second| {
            h.served(client(), 20);
            h.collision(client(), 40_000 + second as u16 * 7, 400_000);
        });
        let finding = host.finding(Verdict::TupleCollision);
        assert_eq!(finding.severity, Severity::Warning);
        assert!(finding.summary.contains("6.7 min"), "{}", finding.summary);
        assert!(finding.summary.contains("a NAT forgot"));
    }

    #[test]
    fn the_same_few_ports_are_somebody_who_lost_its_state() {
        let mut host = Script::new();
        host.run(30, |h, second| {
            h.served(client(), 20);
            h.collision(client(), 50_001 + second as u16 % 3, 4_000);
        });
        assert_eq!(host.verdicts(), [Verdict::HalfOpenReconnect]);
    }

    #[test]
    fn a_few_more_ports_again_and_again_are_the_same() {
        let mut host = Script::new();
        host.run(30, |h, second| {
            h.served(client(), 20);
            h.collision(client(), 50_001 + second as u16 % 9, 4_000);
        });
        assert_eq!(host.verdicts(), [Verdict::HalfOpenReconnect]);
    }

    #[test]
    fn a_handful_is_no_pattern() {
        let mut host = Script::new();
        host.run(30, |h, second| {
            h.served(client(), 20);
            if second < 8 {
                h.collision(client(), 40_000 + second as u16, 2_000);
            }
        });
        assert_eq!(host.verdicts(), [Verdict::HalfOpenReconnect]);
    }

    #[test]
    fn it_goes_on_until_no_symptom_was_seen_for_long_and_is_over_then() {
        let mut host = Script::new();
        host.run(15, |h, second| {
            h.served(client(), 20);
            h.collision(client(), 40_000 + second as u16, 2_000);
        });
        host.run(50, |h, _| h.served(client(), 20));
        assert_eq!(host.verdicts(), [Verdict::TupleCollision]);
        host.run(20, |h, _| h.served(client(), 20));
        assert_eq!(host.verdicts(), []);
    }
}
