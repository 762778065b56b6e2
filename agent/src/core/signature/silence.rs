//! Look-alikes that only the pattern of the silence tells, and the name for what cannot be told apart.

use super::{
    Context, View,
    loss::{self, Loss, Words, within},
    words::{count, place},
};
use crate::core::finding::{Confidence, Finding, Verdict};

/// Not one SYN to the destination was ever answered.
///
/// A filter that drops, a host that is off and a missing way back look the same. A device without free
/// ports does not: it has let some through.
pub fn firewall_drop(context: &Context<'_>, view: &View<'_>, loss: &Loss) -> Option<Finding> {
    let totals = view.space.totals();
    let never = totals.established + totals.refused + totals.bare_acks + totals.half_open == 0;
    (view.is_initiator() && never && loss.live.unwrap_or(0) == 0).then(|| {
        let others = loss.neighbours.answering > 0;
        let summary = format!(
            "{}: none of {} was ever answered; {}: a filter drops them, the host is off, or there is \
             no way back",
            place(view.key),
            count(totals.opens, "open"),
            loss.others()
        );
        let words = Words {
            verdict: Verdict::FirewallDrop,
            confidence: if others {
                Confidence::High
            } else {
                Confidence::Medium
            },
            summary,
            remedy: "Check security groups, network ACLs and firewalls for the destination and its \
                     port, that the host runs, and that it has a route back.",
        };
        loss::look_alike(context, view, loss, words, Vec::new())
    })
}

/// It answered before; now nothing gets through, and no connection to it is left.
///
/// A device without free ports lets a new connection through whenever an old one leaves, and the old
/// ones live on.
pub fn service_down(context: &Context<'_>, view: &View<'_>, loss: &Loss) -> Option<Finding> {
    let lately = within(context, view, context.thresholds.loss.silence);
    let nothing = lately.established + lately.refused + lately.half_open == 0;
    let tried = (lately.syn_timeouts + lately.abandoned).max(lately.syn_retransmits);
    let answered_before = view.space.totals().established > 0;
    let silent = nothing && answered_before && loss.live == Some(0);
    (view.is_initiator() && silent && tried >= context.thresholds.loss.min_lost).then(|| {
        let summary = format!(
            "{}: nothing gets through any more, and no connection is left: {} without answer in the \
             last {:.0} s; {}",
            place(view.key),
            count(tried, "open"),
            context.thresholds.loss.silence.as_secs_f64(),
            loss.others()
        );
        let words = Words {
            verdict: Verdict::ServiceDown,
            confidence: if loss.neighbours.answering > 0 {
                Confidence::High
            } else {
                Confidence::Medium
            },
            summary,
            remedy: "Look at the destination itself: its host is off or cut off, a filter was set up, \
                     or its listener hangs.",
        };
        loss::look_alike(context, view, loss, words, Vec::new())
    })
}

/// Parts of the window that are compared.
const PARTS: u32 = 3;
/// Fewest outcomes in each part: with fewer the share says little.
const PART_OPENS: u64 = 20;
/// The load must have changed by this factor, or nothing shows that the share does not depend on it.
const LOAD: u64 = 2;
/// The share may differ by this factor. Where ports run out it is far more: with the load twice what
/// the pool can carry half the opens fail, with the load just above it nearly none.
const SHARE: f64 = 1.5;

/// A constant share of the opens fails whatever the load: a hairpin or an asymmetric path to some of
/// the targets, or one dead target of several.
pub fn asymmetric_path(context: &Context<'_>, view: &View<'_>, loss: &Loss) -> Option<Finding> {
    let window = context.thresholds.window;
    let part = window / PARTS;
    // What is older than the first symptom is not known in parts.
    if context.now.since(view.episode?.since) < window {
        return None;
    }
    let mut shares = Vec::new();
    let (mut least, mut most) = (u64::MAX, 0);
    for i in 0..PARTS {
        let to = within(context, view, part * i);
        let from = within(context, view, part * (i + 1));
        let w = if i == 0 { from } else { from.minus(&to) };
        let lost = w.syn_timeouts + w.abandoned;
        let outcomes = lost + w.established;
        if outcomes < PART_OPENS || lost == 0 || w.established == 0 {
            return None;
        }
        (least, most) = (least.min(outcomes), most.max(outcomes));
        shares.push(lost as f64 / outcomes as f64);
    }
    let low = shares.iter().copied().fold(f64::INFINITY, f64::min);
    let high = shares.iter().copied().fold(0.0, f64::max);
    let constant = high <= SHARE * low;
    (view.is_initiator() && constant && most >= LOAD * least).then(|| {
        let summary = format!(
            "{}: {:.0} to {:.0} % of the opens are lost whatever the load ({least} to {most} in {} s): \
             one of several targets or paths does not work",
            place(view.key),
            low * 100.0,
            high * 100.0,
            part.as_secs()
        );
        let words = Words {
            verdict: Verdict::AsymmetricPath,
            confidence: Confidence::Medium,
            summary,
            remedy: "Look for a target that is dead, that cannot reach itself through the balancer \
                     (hairpin), or whose answers take another way.",
        };
        loss::look_alike(context, view, loss, words, Vec::new())
    })
}

/// Opens are lost, and what was seen does not tell why.
///
/// Never called port exhaustion: a full accept queue at the destination and one dead backend behind an
/// equal-cost path look exactly the same from here.
pub fn unknown_connect_loss(
    context: &Context<'_>,
    view: &View<'_>,
    loss: &Loss,
) -> Option<Finding> {
    let rules = &context.thresholds.loss;
    // A SYN that was sent again and got through is a delay, and where nothing tells its cause it is
    // not worth a name.
    if loss.lost < rules.min_lost || loss.share() < rules.min_ratio {
        return None;
    }
    let summary = format!(
        "{}: {} of {} got no answer, {} sent again; {}; {}",
        place(view.key),
        loss.lost,
        count(loss.opens, "open"),
        count(loss.retransmits, "SYN"),
        loss.living(),
        loss.others()
    );
    let remedy = if view.is_initiator() {
        "Run tuplewatch at the destination: it sees whether the SYNs arrive and whether its queues are \
         full. If a NAT or a balancer lies in between, configure an egress group: then its ports are \
         counted."
    } else {
        "The SYNs arrive and nobody answers: look for a filter on this host, and at the listener."
    };
    let words = Words {
        verdict: Verdict::UnknownConnectLoss,
        confidence: Confidence::Medium,
        summary,
        remedy,
    };
    Some(loss::look_alike(context, view, loss, words, Vec::new()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::signature::testing::{Script, opens_to};

    #[test]
    fn not_one_success_is_a_filter() {
        let mut host = Script::new();
        host.run(40, |h, second| {
            h.served(opens_to(20), 2);
            if second % 2 == 0 {
                h.unanswered(opens_to(10), 1, 2);
            }
        });
        assert_eq!(host.verdicts(), [Verdict::FirewallDrop]);
        let finding = host.finding(Verdict::FirewallDrop);
        assert_eq!(finding.confidence, Confidence::High);
        let loss = finding.evidence.loss.unwrap();
        assert_eq!((loss.lost, loss.others_answering), (20, 1));
    }

    #[test]
    fn a_single_success_is_no_filter() {
        let mut host = Script::new();
        host.served(opens_to(10), 1);
        host.run(40, |h, _| h.unanswered(opens_to(10), 1, 2));
        assert_ne!(host.verdicts(), [Verdict::FirewallDrop]);
    }

    #[test]
    fn nothing_gets_through_any_more_and_nothing_is_left() {
        let mut host = Script::new();
        host.run(30, |h, _| h.served(opens_to(10), 5));
        host.run(15, |h, _| {
            h.served(opens_to(20), 1);
            h.unanswered(opens_to(10), 3, 3);
        });
        assert_eq!(host.verdicts(), [Verdict::ServiceDown]);
        // It is over when opens get through again.
        host.run(15, |h, _| h.served(opens_to(10), 5));
        assert!(!host.verdicts().contains(&Verdict::ServiceDown));
    }

    #[test]
    fn while_connections_are_left_nobody_can_tell() {
        let mut host = Script::new();
        host.run(30, |h, _| h.served(opens_to(10), 5));
        host.sockets(opens_to(10)).established = 3;
        host.run(15, |h, _| h.unanswered(opens_to(10), 3, 3));
        assert_eq!(host.verdicts(), [Verdict::UnknownConnectLoss]);
    }

    #[test]
    fn a_constant_share_under_changing_load_is_a_path() {
        let mut host = Script::new();
        host.run(65, |h, second| {
            let load = if second < 25 { 4 } else { 12 };
            h.served(opens_to(10), load * 3);
            h.unanswered(opens_to(10), load, load);
        });
        assert_eq!(host.verdicts(), [Verdict::AsymmetricPath]);
    }

    #[test]
    fn a_share_that_follows_the_load_is_none() {
        let mut host = Script::new();
        host.run(65, |h, second| {
            // A pool that carries 10 opens a second, as ports do that come free at their own pace.
            let load = if second < 25 { 11 } else { 30 };
            h.served(opens_to(10), 10);
            h.unanswered(opens_to(10), load - 10, load - 10);
        });
        assert_eq!(host.verdicts(), [Verdict::UnknownConnectLoss]);
    }

    #[test]
    fn a_constant_share_under_constant_load_shows_nothing() {
        let mut host = Script::new();
        host.run(65, |h, _| {
            h.served(opens_to(10), 9);
            h.unanswered(opens_to(10), 3, 3);
        });
        assert_eq!(host.verdicts(), [Verdict::UnknownConnectLoss]);
    }

    #[test]
    fn who_waits_for_the_second_try_is_not_lost() {
        let mut host = Script::new();
        // 80 opens per second; some of them wait for the second that passes before a SYN goes again, at
        // first one, then eight. Later they are too few of all opens in the window.
        let mut waiting = 0;
        host.run(3, |h, second| {
            let late = std::mem::replace(&mut waiting, if second == 0 { 1 } else { 8 });
            let space = h.space(opens_to(10));
            space.opens += 80;
            space.syn_retransmits += late;
            space.established += 80 - waiting + late;
            space.handshake_duration[13] += late;
        });
        assert_eq!(host.verdicts(), []);
        // Those whose second try fails too are.
        host.run(4, |h, _| {
            h.served(opens_to(10), 74);
            let space = h.space(opens_to(10));
            space.opens += 40;
            space.syn_retransmits += 40;
        });
        assert_eq!(host.verdicts(), [Verdict::UnknownConnectLoss]);
    }

    #[test]
    fn a_lost_packet_now_and_then_is_not_told() {
        let mut host = Script::new();
        host.run(120, |h, second| {
            h.served(opens_to(10), 20);
            if second % 10 == 0 {
                h.space(opens_to(10)).syn_retransmits += 1;
                h.unanswered(opens_to(10), 1, 0);
            }
        });
        assert_eq!(host.verdicts(), []);
    }

    #[test]
    fn what_gets_through_in_the_end_is_no_loss() {
        let mut host = Script::new();
        host.run(60, |h, second| {
            h.served(opens_to(10), 5);
            h.space(opens_to(10)).syn_retransmits += second % 2;
        });
        assert_eq!(host.verdicts(), []);
    }

    #[test]
    fn opens_before_the_first_symptom_do_not_wait() {
        let mut host = Script::new();
        host.run(20, |h, _| h.served(opens_to(10), 10));
        host.run(20, |h, _| {
            h.served(opens_to(10), 3);
            h.space(opens_to(10)).syn_retransmits += 1;
        });
        assert_eq!(host.verdicts(), []);
    }

    #[test]
    fn it_is_told_at_the_responder_too() {
        use crate::core::signature::testing::client;
        let mut host = Script::new();
        host.run(30, |h, _| {
            h.served(client(), 5);
            h.unanswered(client(), 2, 4);
        });
        assert_eq!(host.verdicts(), [Verdict::UnknownConnectLoss]);
    }
}
