//! Signature `port_exhaustion`: the source ports in front of a destination run out.

use tuplewatch_common::address::Role;

use super::{
    Context, View,
    words::{count, place, seconds},
};
use crate::core::{
    episode::Symptom,
    finding::{Confidence, Evidence, Finding, OpenedBy, RuledOut, Severity, Verdict},
    observation::ip,
};

/// How long Linux keeps a socket in TIME_WAIT (`TCP_TIMEWAIT_LEN`, compiled in).
const TIME_WAIT_SECONDS: f64 = 60.0;

/// SYNs on reused four-tuples are answered by bare ACKs: a NAT or L4 hands a source port out again
/// while the responder still holds the former connection on it in TIME_WAIT.
///
/// Such a SYN is refused when its sequence number (and timestamp) happens to lie before the former
/// connection's, about every second time when several hosts share the address.
pub fn l4_reuse_in_time_wait(context: &Context<'_>, b: &View<'_>) -> Option<Finding> {
    let rules = &context.thresholds.l4_reuse;
    let enough = b.suspects >= rules.min_refused;
    let frequent = b.suspects as f64 >= rules.min_ratio * b.window.opens as f64;
    let many_ports = b.suspect_ports >= rules.min_ports;
    let somebody_listens = b.window.no_listener * 2 < b.suspects;
    let not_half_open =
        b.suspects > b.window.bare_acks_open && b.suspects >= b.window.bare_acks_half_open;
    (enough && frequent && many_ports && somebody_listens && not_half_open)
        .then(|| describe(context, b))
}

/// The finding, whether or not its condition is met at this moment.
pub fn describe(context: &Context<'_>, b: &View<'_>) -> Finding {
    let evidence = b.evidence(context, Symptom::BareAck);
    let whole = b.whole(Symptom::BareAck);
    let opened_by = b.opened_by(context);
    let unhealed = b.window.unhealed >= context.thresholds.l4_reuse.critical_unhealed;
    let is_responder = b.key.role == Role::Responder as u8;
    // At the responder the former connection's end was seen; at the initiator it cannot be where the
    // port is a NAT's.
    let proven = if is_responder {
        whole.bare_acks_closed * 10 >= whole.bare_acks * 8
    } else {
        (whole.bare_acks_closed + whole.bare_acks_unknown) * 10 >= whole.bare_acks * 8
    };
    Finding {
        verdict: Verdict::L4ReuseInTimeWait,
        space: *b.key,
        since: b.since(context, Symptom::BareAck),
        severity: if unhealed {
            Severity::Critical
        } else {
            Severity::Warning
        },
        confidence: if proven {
            Confidence::High
        } else {
            Confidence::Medium
        },
        summary: summary(b, &evidence, is_responder),
        remedy: remedy(b, &evidence, &opened_by, is_responder),
        ruled_out: ruled_out(&evidence, context.thresholds.l4_reuse.min_ports),
        evidence,
        opened_by,
    }
}

fn summary(b: &View<'_>, e: &Evidence, is_responder: bool) -> String {
    let refused = count(e.refused_syns, "SYN");
    let outcome = if e.unhealed > 0 {
        format!("{} did not get through", count(e.unhealed, "open"))
    } else {
        format!(
            "{} got through by a later SYN, none failed so far",
            count(e.healed, "open")
        )
    };
    if is_responder {
        format!(
            "{}: {refused} of {} opens met a connection of this host still in TIME_WAIT on the same \
             source port (bare ACK instead of SYN-ACK); {outcome}",
            place(b.key),
            e.opens
        )
    } else {
        format!(
            "{}: {refused} of {} opens were answered by a bare ACK of an older connection: a device \
             in between hands out source ports again while {} holds them in TIME_WAIT; {outcome}",
            place(b.key),
            e.opens,
            ip(&b.key.responder)
        )
    }
}

fn remedy(b: &View<'_>, e: &Evidence, opened_by: &[OpenedBy], is_responder: bool) -> String {
    let mut steps = Vec::new();
    match opened_by.first() {
        Some(o) => {
            let lifetime = o.lifetime_seconds.map_or(String::new(), |s| format!(" of {} each", seconds(s)));
            steps.push(format!(
                "{}[{}] opens {:.1} connections/s{lifetime}: reuse connections (keep-alive, a \
                 connection pool)",
                o.command, o.pid, o.opens_per_second
            ));
        }
        None => steps.push(format!(
            "{} opens {:.1} connections/s here: its clients should reuse connections (keep-alive, a \
             connection pool)",
            ip(&b.key.initiator),
            e.opens_per_second
        )),
    }
    if let Some(pool) = &e.pool {
        let sustainable = f64::from(pool.size()) / TIME_WAIT_SECONDS;
        steps.push(format!(
            "its pool is {}-{} ({} ports): over the 60 s of TIME_WAIT that is {sustainable:.1} new \
             connections/s per address; give the device more ports or addresses, or a longer hold \
             after close",
            pool.first,
            pool.last,
            pool.size()
        ));
    } else if !is_responder {
        steps.push(
            "the NAT or L4 in front of the destination needs more ports or addresses, or a hold after \
             close of at least 60 s"
                .to_owned(),
        );
    }
    // The RST that answers each bare ACK clears TIME_WAIT, if it arrives.
    let rst_lost = if is_responder {
        e.rsts * 2 < e.refused_syns
    } else {
        e.unhealed > e.healed
    };
    if rst_lost {
        steps.push(
            "the device also drops the RST (or the bare ACK) that would clear TIME_WAIT: let it pass"
                .to_owned(),
        );
    }
    steps
        .push("tcp_fin_timeout does not shorten TIME_WAIT; somaxconn has no part in it".to_owned());
    steps.join("; ")
}

fn ruled_out(e: &Evidence, min_ports: u32) -> Vec<RuledOut> {
    vec![
        RuledOut {
            name: Verdict::HalfOpenReconnect.name(),
            why: format!(
                "{} of {} refused SYNs met a connection that was never closed",
                e.refused_while_open, e.refused_syns
            ),
        },
        RuledOut {
            name: Verdict::FixedPortReuse.name(),
            why: format!(
                "{} different source ports were refused (a fixed port is fewer than {min_ports})",
                e.refused_ports
            ),
        },
        RuledOut {
            name: Verdict::SynRecvCollision.name(),
            why: format!(
                "{} of {} refused SYNs met a handshake that was never completed",
                e.refused_half_open, e.refused_syns
            ),
        },
        RuledOut {
            name: Verdict::NoListener.name(),
            why: format!("{} of them were refused by RST afterwards", e.no_listener),
        },
        RuledOut {
            name: Verdict::DuplicateSyn.name(),
            why: format!("{} were late duplicates of accepted SYNs", e.duplicate_syns),
        },
    ]
}

#[cfg(test)]
mod tests {
    /// The arithmetic of the incident behind this project: 14,336 ports per address over 60 s.
    #[test]
    fn ports_over_time_wait_is_the_rate_that_lasts() {
        let pool = crate::core::finding::Pool {
            first: 2048,
            last: 16383,
            seen: 14_336,
        };
        assert_eq!(pool.size(), 14_336);
        assert_eq!(
            (f64::from(pool.size()) / super::TIME_WAIT_SECONDS).round(),
            239.0
        );
    }
}
