//! Look-alikes on this host or its way out, where counters speak beside the lost opens.

use super::{
    Context, View,
    loss::{self, Loss, Words, counter, grown, namespaces},
    words::{count, place},
};
use crate::core::{
    counters::CounterEvidence,
    finding::{Confidence, Finding, Verdict},
};

/// The conntrack table is full: packets of new connections are dropped on this host.
pub fn conntrack_full(context: &Context<'_>, view: &View<'_>, loss: &Loss) -> Option<Finding> {
    let near = namespaces(context, view);
    let dropped = grown(context, &near, |c| c.conntrack_drop)?;
    let known = context.around.latest.counters.get(&dropped.0)?;
    let (entries, most) = (known.conntrack_count?, known.conntrack_max?);
    // Packets are dropped for want of memory as well, so the table must really be full.
    (most > 0 && entries * 100 >= most * 95).then(|| {
        // At the responder nobody sees which SYN stays without answer in the end.
        let missing = if view.is_initiator() {
            format!(
                "{} of {} got no answer",
                loss.lost,
                count(loss.opens, "open")
            )
        } else {
            format!("{} came again", count(loss.retransmits, "SYN"))
        };
        let summary = format!(
            "{}: {missing} while the conntrack table was full ({entries} of {most} entries, {} dropped)",
            place(view.key),
            count(dropped.1, "packet"),
        );
        let words = Words {
            verdict: Verdict::ConntrackFull,
            confidence: Confidence::High,
            summary,
            remedy: "Raise net.netfilter.nf_conntrack_max (and its hash size), shorten the conntrack \
                     time-outs, or exempt this traffic by a notrack rule.",
        };
        let counters = vec![
            counter("nf_conntrack drop", dropped),
            counter("nf_conntrack_count", (dropped.0, entries)),
            counter("nf_conntrack_max", (dropped.0, most)),
        ];
        loss::look_alike(context, view, loss, words, counters)
    })
}

/// The instance has used up a network allowance: the hypervisor drops packets.
pub fn ena_allowance(context: &Context<'_>, view: &View<'_>, loss: &Loss) -> Option<Finding> {
    let growth = context
        .around
        .counters
        .host(context.now, context.thresholds.window);
    let counters: Vec<CounterEvidence> = growth
        .known()
        .filter(|(_, n)| *n > 0)
        .map(|(name, n)| counter(name, (0, n)))
        .collect();
    let worst = counters.iter().max_by_key(|c| c.value)?;
    let summary = format!(
        "{}: {} of {} got no answer while the instance's network allowance was exceeded ({} grew by \
         {})",
        place(view.key),
        loss.lost,
        count(loss.opens, "open"),
        worst.name,
        worst.value
    );
    let words = Words {
        verdict: Verdict::EnaAllowance,
        confidence: Confidence::Medium,
        summary,
        remedy: "Spread the load over more or larger instances; connection tracking is exempt for \
                 security groups that allow all traffic both ways.",
    };
    Some(loss::look_alike(context, view, loss, words, counters))
}

/// Two connections were given the same port by this host's masquerading at once: one SYN is dropped
/// when its entry is confirmed, and the next one gets through.
pub fn masquerade_race(context: &Context<'_>, view: &View<'_>, loss: &Loss) -> Option<Finding> {
    let near = namespaces(context, view);
    let clashed = grown(context, &near, |c| c.conntrack_insert_failed)?;
    // A race costs one SYN here and there; where no port is left nothing gets through.
    let mostly_well = loss.established >= 4 * loss.lost;
    mostly_well.then(|| {
        let summary = format!(
            "{}: {} of {} opens had to send their SYN again while {} clashed in conntrack: \
             masquerading gave one port to two connections at once",
            place(view.key),
            loss.retransmits,
            loss.opens,
            count(clashed.1, "entry").replace("entrys", "entries"),
        );
        let words = Words {
            verdict: Verdict::MasqueradeRace,
            confidence: Confidence::Medium,
            summary,
            remedy: "Use `--random-fully` (nftables: `masquerade fully-random`) in the rule that \
                     masquerades.",
        };
        let counters = vec![counter("nf_conntrack insert_failed", clashed)];
        loss::look_alike(context, view, loss, words, counters)
    })
}

/// Packets of established connections are lost too.
pub fn packet_loss(context: &Context<'_>, view: &View<'_>, loss: &Loss) -> Option<Finding> {
    if view.is_responder() {
        return loss_of_answers(context, view, loss);
    }
    let data = loss.data_retransmits.filter(|_| loss.is_of_data_too())?;
    let neighbours = loss.neighbours;
    let elsewhere = neighbours.failing > 0;
    // At one destination only it may as well be that destination's trouble, unless nearly all gets
    // through in the end.
    if !elsewhere && loss.share() > 0.05 {
        return None;
    }
    let summary = format!(
        "{}: packets are lost: {} and {} of established connections were sent again; {}",
        place(view.key),
        count(loss.retransmits, "SYN"),
        count(data, "segment"),
        loss.others()
    );
    let words = Words {
        verdict: Verdict::PacketLoss,
        confidence: if elsewhere {
            Confidence::High
        } else {
            Confidence::Medium
        },
        summary,
        remedy: "Look for loss on the way: interface and switch drops, policers, a saturated link.",
    };
    Some(loss::look_alike(context, view, loss, words, Vec::new()))
}

/// Segments sent again, of all that this host sends, from which on packets are lost in numbers.
const RETRANSMITS_IN_A_THOUSAND: u64 = 5;

/// SYNs come again although they were answered, and get through in the end: SYN-ACKs are lost, as
/// this host's other segments are.
fn loss_of_answers(context: &Context<'_>, view: &View<'_>, loss: &Loss) -> Option<Finding> {
    if loss.retransmits < 5 * loss.lost || loss.established == 0 {
        return None;
    }
    let near = namespaces(context, view);
    let (netns, again) = grown(context, &near, |c| c.retrans_segs)?;
    let (_, sent) = grown(context, &[netns], |c| c.out_segs)?;
    (again * 1000 >= sent * RETRANSMITS_IN_A_THOUSAND).then(|| {
        let summary = format!(
            "{}: packets are lost: {} came again and got through in the end; this host sent {again} of \
             {sent} segments again",
            place(view.key),
            count(loss.retransmits, "SYN"),
        );
        let words = Words {
            verdict: Verdict::PacketLoss,
            confidence: Confidence::Medium,
            summary,
            remedy: "Look for loss on the way: interface and switch drops, policers, a saturated link.",
        };
        let counters = vec![
            counter("Tcp RetransSegs", (netns, again)),
            counter("Tcp OutSegs", (netns, sent)),
        ];
        loss::look_alike(context, view, loss, words, counters)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::signature::testing::{Script, client, opens_to};

    /// Opens that fail at a rate that no name explains.
    fn trouble(h: &mut Script) {
        h.served(opens_to(10), 5);
        h.unanswered(opens_to(10), 2, 4);
    }

    #[test]
    fn a_full_conntrack_table_needs_its_counters() {
        let mut host = Script::new();
        host.netns.conntrack_max = Some(1000);
        host.netns.conntrack_count = Some(999);
        host.netns.conntrack_drop = Some(50_000);
        host.run(30, |h, _| trouble(h));
        assert_eq!(
            host.verdicts(),
            [Verdict::UnknownConnectLoss],
            "what was dropped before says nothing"
        );
        host.run(10, |h, _| {
            trouble(h);
            *h.netns.conntrack_drop.as_mut().unwrap() += 3;
        });
        assert_eq!(host.verdicts(), [Verdict::ConntrackFull]);
        let evidence = host.finding(Verdict::ConntrackFull).evidence;
        assert_eq!(evidence.counters[0].value, 30, "growth in the window");
        host.run(70, |h, _| trouble(h));
        assert_eq!(host.verdicts(), [Verdict::UnknownConnectLoss], "it is over");
    }

    #[test]
    fn no_name_before_the_counters_are_read_again() {
        let mut host = Script::new();
        host.netns.conntrack_max = Some(1000);
        host.netns.conntrack_count = Some(999);
        host.netns.conntrack_drop = Some(0);
        host.run(1, |_, _| ());
        host.read_at = Some(host.now());
        host.run(20, |h, _| trouble(h));
        assert_eq!(host.verdicts(), [], "they are older than the trouble");
        assert!(host.wants_counters());
        host.read_at = None;
        host.netns.conntrack_drop = Some(10);
        host.run(1, |h, _| trouble(h));
        assert_eq!(host.verdicts(), [Verdict::ConntrackFull]);
        assert!(!host.wants_counters());
        host.read_at = Some(host.now());
        host.run(70, |h, _| trouble(h));
        assert_eq!(host.verdicts(), [], "another trouble, another reading");
        host.read_at = None;
        host.run(1, |h, _| trouble(h));
        host.read_at = Some(host.now());
        host.run(10, |h, _| trouble(h));
        assert_eq!(
            host.verdicts(),
            [Verdict::UnknownConnectLoss],
            "one reading is enough"
        );
        assert!(!host.wants_counters());
    }

    #[test]
    fn drops_of_a_table_with_room_are_something_else() {
        let mut host = Script::new();
        host.netns.conntrack_max = Some(1000);
        host.netns.conntrack_count = Some(10);
        host.netns.conntrack_drop = Some(0);
        host.run(30, |h, _| {
            trouble(h);
            *h.netns.conntrack_drop.as_mut().unwrap() += 3;
        });
        assert_eq!(host.verdicts(), [Verdict::UnknownConnectLoss]);
    }

    #[test]
    fn counters_alone_say_nothing() {
        let mut host = Script::new();
        for counter in [
            &mut host.netns.conntrack_drop,
            &mut host.netns.conntrack_insert_failed,
            &mut host.netns.listen_overflows,
            &mut host.netns.listen_drops,
            &mut host.netns.req_q_full_drop,
            &mut host.netns.syncookies_sent,
            &mut host.netns.retrans_segs,
            &mut host.netns.out_segs,
            &mut host.host.ena_conntrack_allowance,
        ] {
            *counter = Some(0);
        }
        host.netns.conntrack_max = Some(1000);
        host.netns.conntrack_count = Some(1000);
        host.run(90, |h, _| {
            h.served(opens_to(10), 5);
            h.served(client(), 5);
            for counter in [
                &mut h.netns.conntrack_drop,
                &mut h.netns.conntrack_insert_failed,
                &mut h.netns.listen_overflows,
                &mut h.netns.listen_drops,
                &mut h.netns.req_q_full_drop,
                &mut h.netns.syncookies_sent,
                &mut h.netns.retrans_segs,
                &mut h.host.ena_conntrack_allowance,
            ] {
                *counter.as_mut().unwrap() += 100;
            }
        });
        assert_eq!(host.verdicts(), []);
    }

    #[test]
    fn an_exceeded_allowance_is_named_with_its_counter() {
        let mut host = Script::new();
        host.host.ena_conntrack_allowance = Some(7);
        host.run(30, |h, _| {
            trouble(h);
            *h.host.ena_conntrack_allowance.as_mut().unwrap() += 1;
        });
        assert_eq!(host.verdicts(), [Verdict::EnaAllowance]);
        let finding = host.finding(Verdict::EnaAllowance);
        assert!(finding.summary.contains("conntrack_allowance_exceeded"));
    }

    #[test]
    fn a_race_costs_one_syn_here_and_there() {
        let mut host = Script::new();
        host.netns.conntrack_insert_failed = Some(0);
        host.run(60, |h, second| {
            h.served(opens_to(10), 10);
            if second % 3 == 0 {
                h.space(opens_to(10)).syn_retransmits += 1;
                *h.netns.conntrack_insert_failed.as_mut().unwrap() += 1;
            }
        });
        assert_eq!(host.verdicts(), [Verdict::MasqueradeRace]);
        assert!(
            host.finding(Verdict::MasqueradeRace)
                .summary
                .contains("entries")
        );
    }

    #[test]
    fn loss_hits_data_and_other_destinations_too() {
        let mut host = Script::new();
        host.run(60, |h, second| {
            for to in [10, 20] {
                h.served(opens_to(to), 4);
                if second % 4 == 0 {
                    h.space(opens_to(to)).syn_retransmits += 1;
                }
                if second % 3 == 0 {
                    h.space(opens_to(to)).data_retransmits += 1;
                }
            }
        });
        assert_eq!(host.verdicts(), [Verdict::PacketLoss]);
    }

    #[test]
    fn repeated_data_beside_a_destination_that_drops_is_not_loss() {
        let mut host = Script::new();
        host.run(60, |h, _| {
            h.served(opens_to(20), 4);
            h.served(opens_to(10), 4);
            h.unanswered(opens_to(10), 2, 2);
            h.space(opens_to(10)).data_retransmits += 3;
        });
        assert_eq!(host.verdicts(), [Verdict::UnknownConnectLoss]);
    }

    #[test]
    fn at_the_responder_its_own_segments_tell() {
        let mut host = Script::new();
        (host.netns.retrans_segs, host.netns.out_segs) = (Some(0), Some(0));
        host.run(60, |h, second| {
            h.served(client(), 5);
            *h.netns.out_segs.as_mut().unwrap() += 50;
            if second % 4 == 0 {
                h.space(client()).syn_retransmits += 1;
                *h.netns.retrans_segs.as_mut().unwrap() += 6;
            }
        });
        assert_eq!(host.verdicts(), [Verdict::PacketLoss]);
    }
}
