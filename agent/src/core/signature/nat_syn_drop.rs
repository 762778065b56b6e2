//! Cause `nat_syn_drop`: a device in between has no port left and drops SYNs.

use super::{
    Context, View,
    loss::{self, Loss},
    words::{count, place, seconds},
};
use crate::core::{
    egress::{Device, EgressUse},
    finding::{Confidence, Evidence, Finding, OpenedBy, RuledOut, Severity, Verdict},
    profile::OnExhaustion,
};

/// SYNs to one destination stay without answer while established connections to it live on, other
/// destinations behind the same way answer, and the ports of the device in between are nearly all
/// taken.
///
/// Without the last condition it is `unknown_connect_loss`: nothing at the initiator tells a device
/// without ports from a full accept queue or one dead backend.
pub fn nat_syn_drop(context: &Context<'_>, view: &View<'_>, loss: &Loss) -> Option<Finding> {
    if !view.is_initiator() {
        return None;
    }
    let rules = &context.thresholds.nat_syn_drop;
    let egress = &context.around.egress;
    let taken = egress.use_of(context.tables, context.now, view.key)?;
    let is_full = taken.utilization() >= rules.min_utilization;
    let enough = loss.opens >= rules.min_opens;
    let missing = loss.lost.max(loss.retransmits.min(loss.opens));
    let often = missing as f64 >= rules.min_ratio * loss.opens as f64;
    // A port that comes free lets somebody through, and what has one keeps it.
    let some_work = loss.established > 0 || loss.live.unwrap_or(0) > 0;
    let others = loss.neighbours;
    let others_work = others.failing == 0 || others.answering > others.failing;
    let not_refused = view.window.refused * 2 < missing;
    let only_syns = !loss.is_of_data_too();
    (is_full && enough && often && some_work && others_work && not_refused && only_syns)
        .then(|| describe(context, view))
}

/// The finding, whether or not its condition is met at this moment.
pub fn describe(context: &Context<'_>, view: &View<'_>) -> Finding {
    let loss = Loss::of(context, view);
    let evidence = loss::evidence(context, view, &loss, Vec::new());
    let opened_by = view.opened_by(context);
    let fails = loss.lost >= context.thresholds.nat_syn_drop.critical_lost;
    let taken = evidence.egress.clone().unwrap_or_default();
    let device = context.around.egress.device(view.key);
    let is_shared = device.is_some_and(|d| d.is_shared);
    // Every part of the pattern was seen only if another destination was used meanwhile, and if this
    // host sees all who take ports.
    let complete = loss.neighbours.answering > 0 && !is_shared;
    Finding {
        verdict: Verdict::NatSynDrop,
        space: *view.key,
        since: view.since(context, loss::symptom(view)),
        severity: if fails {
            Severity::Critical
        } else {
            Severity::Warning
        },
        confidence: if complete {
            Confidence::High
        } else {
            Confidence::Medium
        },
        summary: summary(view, &loss, &taken),
        remedy: remedy(&evidence, &taken, device, &opened_by),
        ruled_out: ruled_out(&loss, &evidence),
        evidence,
        opened_by,
    }
}

fn summary(view: &View<'_>, loss: &Loss, taken: &EgressUse) -> String {
    format!(
        "{}: {} of {} got no answer ({} sent again) while {} of {} ports of {} are taken ({} in use, {} \
         held); {}; {}",
        place(view.key),
        loss.lost,
        count(loss.opens, "open"),
        count(loss.retransmits, "SYN"),
        taken.in_use.saturating_add(taken.held),
        taken.budget,
        taken.group,
        taken.in_use,
        taken.held,
        loss.living(),
        loss.others()
    )
}

fn remedy(
    evidence: &Evidence,
    taken: &EgressUse,
    device: Option<&Device>,
    opened_by: &[OpenedBy],
) -> String {
    let mut steps = Vec::new();
    match opened_by.first() {
        Some(o) => {
            let lifetime = o
                .lifetime_seconds
                .map_or(String::new(), |s| format!(" of {} each", seconds(s)));
            steps.push(format!(
                "{}[{}] opens {:.1} connections/s{lifetime}: reuse connections (keep-alive, a \
                 connection pool)",
                o.command, o.pid, o.opens_per_second
            ));
        }
        None => steps.push(format!(
            "{:.1} connections/s are opened here: reuse connections (keep-alive, a connection pool)",
            evidence.opens_per_second
        )),
    }
    if taken.in_use > taken.held {
        steps.push(format!(
            "most of the ports of {} are held by {} open connections: close what is idle",
            taken.group, taken.in_use
        ));
    } else if taken.hold_seconds > 0.0 {
        steps.push(format!(
            "with a hold of {:.0} s after close {} ports last for {:.1} new connections/s",
            taken.hold_seconds,
            taken.budget,
            f64::from(taken.budget) / taken.hold_seconds
        ));
    }
    steps.push(format!(
        "give {} more ports or addresses, or spread the load over more destination addresses",
        taken.group
    ));
    if device.is_some_and(|d| d.on_exhaustion == OnExhaustion::Reuse) {
        steps.push(
            "a device of this kind hands out ports that are still held, and may drop the bare ACKs that \
             answer: tuplewatch at the destination sees them as l4_reuse_in_time_wait"
                .to_owned(),
        );
    }
    steps.join("; ")
}

fn ruled_out(loss: &Loss, evidence: &Evidence) -> Vec<RuledOut> {
    let out = |verdict: Verdict, why: String| RuledOut {
        name: verdict.name(),
        why,
    };
    vec![
        out(
            Verdict::FirewallDrop,
            format!("{} of the last opens got through", loss.established),
        ),
        out(
            Verdict::ServerDown,
            format!("{} opens were refused by RST", evidence.refused_by_rst),
        ),
        out(
            Verdict::PacketLoss,
            match loss.data_retransmits {
                Some(n) => format!(
                    "{n} segments of established connections were sent again, against {} SYNs",
                    loss.retransmits
                ),
                None => {
                    "the sockets are not on this host: other destinations show no loss".to_owned()
                }
            },
        ),
        out(
            Verdict::UnknownConnectLoss,
            "the ports of the device in between are known to be taken".to_owned(),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use tuplewatch_common::{
        address::{Point, PortSpaceKey, Role, v4_mapped},
        record::OpenerKey,
    };

    use super::*;
    use crate::core::{
        egress::{Group, Members},
        observation::{Space3, Translation},
        signature::testing::{Script, key, opens_to},
    };

    /// The device of recording 03: 200 ports for each destination, held for 62 s.
    fn device() -> Group {
        Group {
            name: "nat".into(),
            destinations: vec!["203.0.113.0/24".parse().unwrap()],
            ports: Some(200),
            hold: Some(std::time::Duration::from_secs(62)),
            ..Group::default()
        }
    }

    /// Everything but the forecast, which rightly sees the budget used up.
    fn named(host: &Script) -> Vec<Verdict> {
        let mut verdicts = host.verdicts();
        verdicts.retain(|v| *v != Verdict::Forecast);
        verdicts
    }

    /// 60 connections live on, 2.25 a second get through, the rest is lost.
    fn full(h: &mut Script, to: PortSpaceKey, second: u64, retransmits: u64) {
        h.sockets(to).established = 60;
        let through = if second.is_multiple_of(4) { 3 } else { 2 };
        h.served(to, through);
        if second > 20 {
            h.unanswered(to, 2, 2 * retransmits);
        }
    }

    #[test]
    fn ports_taken_and_syns_lost_to_one_destination() {
        let mut host = Script::with_groups(&[device()]);
        host.run(70, |h, second| {
            h.served(opens_to(20), 2);
            full(h, opens_to(10), second, 3);
        });
        assert_eq!(named(&host), [Verdict::NatSynDrop]);
        let finding = host.finding(Verdict::NatSynDrop);
        assert_eq!(finding.severity, Severity::Critical);
        assert_eq!(finding.confidence, Confidence::High);
        let taken = finding.evidence.egress.unwrap();
        assert_eq!((taken.in_use, taken.budget), (60, 200));
        assert!((130..=145).contains(&taken.held), "{}", taken.held);
        assert_eq!(finding.evidence.loss.unwrap().others_answering, 1);
    }

    #[test]
    fn clients_that_give_up_before_the_first_retransmit_count() {
        let mut host = Script::with_groups(&[device()]);
        host.run(70, |h, second| {
            h.served(opens_to(20), 2);
            full(h, opens_to(10), second, 0);
        });
        assert_eq!(named(&host), [Verdict::NatSynDrop]);
        assert_eq!(
            host.finding(Verdict::NatSynDrop).evidence.syn_retransmits,
            0
        );
    }

    /// What pods open is seen on the wire with this host's address; conntrack tells whose it is.
    #[test]
    fn those_behind_a_translation_are_named_and_their_sockets_are_not_told_again() {
        let wire = key(10, 8080, Role::Initiator, Point::Wire);
        let pod = PortSpaceKey {
            initiator: v4_mapped([10, 90, 0, 2]),
            responder: v4_mapped([10, 96, 0, 10]),
            responder_port: 80,
            netns: 7,
            ..opens_to(10)
        };
        let mut host = Script::with_groups(&[device()]);
        let opener = OpenerKey {
            space: pod,
            pid: 4711,
            pad: 0,
        };
        let mut asked = Vec::new();
        host.run(80, |h, second| {
            for wanted in h.wanted() {
                asked.push(wanted.point);
                let (same, other) = match wanted.point {
                    Point::Wire => (wire, pod),
                    Point::Socket => (pod, wire),
                };
                assert_eq!(wanted.space, Space3::from(&same));
                h.translations.push(Translation {
                    space: wanted.space,
                    point: wanted.point,
                    others: [Space3::from(&other)].into(),
                });
            }
            assert!(
                h.findings().iter().all(|f| f.space == wire),
                "not told under the pod's address first"
            );
            h.served(opens_to(20), 2);
            full(h, wire, second, 0);
            full(h, pod, second, 0);
            let known = h.openers.entry(opener).or_default();
            known.opens += 4;
        });
        let times = |point| asked.iter().filter(|asked| **asked == point).count();
        assert!((1..=2).contains(&times(Point::Wire)), "{asked:?}");
        assert_eq!(times(Point::Socket), 1);
        let finding = host.finding(Verdict::NatSynDrop);
        assert_eq!(finding.space, wire);
        let pids: Vec<u32> = finding.opened_by.iter().map(|o| o.pid).collect();
        assert_eq!(pids, [4711]);
        assert_eq!(named(&host), [Verdict::NatSynDrop]);
    }

    #[test]
    fn without_a_group_nobody_can_tell() {
        let mut host = Script::new();
        host.run(70, |h, second| {
            h.served(opens_to(20), 2);
            full(h, opens_to(10), second, 3);
        });
        assert_eq!(named(&host), [Verdict::UnknownConnectLoss]);
        let finding = host.finding(Verdict::UnknownConnectLoss);
        assert!(finding.ruled_out[0].why.contains("no egress group"));
    }

    #[test]
    fn without_occupancy_nobody_can_tell() {
        let mut host = Script::with_groups(&[Group {
            ports: Some(2000),
            ..device()
        }]);
        host.run(70, |h, second| {
            h.served(opens_to(20), 2);
            full(h, opens_to(10), second, 3);
        });
        assert_eq!(named(&host), [Verdict::UnknownConnectLoss]);
        let finding = host.finding(Verdict::UnknownConnectLoss);
        assert!(finding.ruled_out[0].why.contains("of 2000 ports"));
    }

    #[test]
    fn a_full_device_that_loses_nothing_is_no_finding() {
        let mut host = Script::with_groups(&[device()]);
        host.run(120, |h, _| {
            h.sockets(opens_to(10)).established = 190;
            h.served(opens_to(10), 2);
        });
        assert_eq!(named(&host), []);
    }

    #[test]
    fn trouble_everywhere_is_not_the_device_of_one_destination() {
        let mut host = Script::with_groups(&[device()]);
        host.run(70, |h, second| {
            full(h, opens_to(10), second, 3);
            for to in 20..24 {
                h.served(opens_to(to), 2);
                h.unanswered(opens_to(to), 1, 3);
            }
        });
        assert!(!named(&host).contains(&Verdict::NatSynDrop));
    }

    #[test]
    fn repeated_data_is_loss_and_not_the_device() {
        let mut host = Script::with_groups(&[device()]);
        host.run(70, |h, second| {
            full(h, opens_to(10), second, 1);
            h.space(opens_to(10)).data_retransmits += 3;
            h.served(opens_to(20), 2);
            h.space(opens_to(20)).syn_retransmits += 1;
        });
        assert!(!named(&host).contains(&Verdict::NatSynDrop));
    }

    #[test]
    fn a_device_that_hands_out_held_ports_is_described_as_such() {
        let mut host = Script::with_groups(&[Group {
            profile: Some("l4-2048-16383".into()),
            ..device()
        }]);
        host.run(70, |h, second| full(h, opens_to(10), second, 3));
        let finding = host.finding(Verdict::NatSynDrop);
        assert!(
            finding.remedy.contains("l4_reuse_in_time_wait"),
            "{}",
            finding.remedy
        );
        assert_eq!(
            finding.confidence,
            Confidence::Medium,
            "no other destination was used"
        );
    }

    #[test]
    fn initiators_on_this_host_share_the_device() {
        let mut host = Script::with_groups(&[device()]);
        let other = PortSpaceKey {
            initiator: v4_mapped([10, 0, 0, 2]),
            netns: 7,
            ..opens_to(10)
        };
        host.run(70, |h, second| {
            h.served(opens_to(20), 2);
            // Neither of them alone takes 80 % of the ports.
            for to in [opens_to(10), other] {
                h.sockets(to).established = 30;
                h.served(to, if second % 8 == 0 { 2 } else { 1 });
                if second > 20 {
                    h.unanswered(to, 1, 3);
                }
            }
        });
        assert_eq!(named(&host), [Verdict::NatSynDrop]);
    }

    #[test]
    fn ordinary_loss_does_not_keep_it_firing() {
        let mut host = Script::with_groups(&[device()]);
        host.run(60, |h, second| {
            h.served(opens_to(20), 2);
            full(h, opens_to(10), second, 3);
        });
        assert_eq!(named(&host), [Verdict::NatSynDrop]);
        let ordinary = |h: &mut Script, second| {
            h.served(opens_to(10), 10);
            h.space(opens_to(10)).syn_retransmits += u64::from(second % 20 == 0);
        };
        host.run(30, ordinary);
        assert_eq!(named(&host), [Verdict::NatSynDrop], "hysteresis");
        host.run(45, ordinary);
        assert_eq!(named(&host), []);
    }

    #[test]
    fn only_members_belong_to_a_group() {
        let elsewhere = Group {
            members: Members {
                zones: vec!["zone-a".into()],
                subnets: vec!["192.0.2.0/24".parse().unwrap()],
                ..Members::default()
            },
            ..device()
        };
        let mut host = Script::with_groups(&[elsewhere]);
        host.run(70, |h, second| {
            h.served(opens_to(20), 2);
            full(h, opens_to(10), second, 3);
        });
        assert_eq!(named(&host), [Verdict::UnknownConnectLoss]);
    }
}
