//! Signature `stuck_keepalive`, cause `draining`: an endpoint takes no new connections any more, and requests still
//! ride on the old ones. Nothing fails yet; it will when the endpoint ends.

mod placed;

use tuplewatch_common::address::{Point, PortSpaceKey, Role};

pub use placed::{placed, refresh as refresh_placed};

use super::{
    Context, View, loss,
    words::{count, place, seconds},
};
use crate::core::{
    episode::Symptom,
    finding::{Confidence, Finding, RuledOut, Severity, Verdict},
    idle,
    report::Totals,
    service::Service,
    time::Moment,
};

/// What still goes on over the old connections.
#[derive(Clone, Copy, Debug, Default)]
struct Riding {
    /// Connections whose requests were answered well lately, as far as HTTP/1 is looked at.
    answered: u32,
    /// Connections that were used after a pause and lived.
    woken: u64,
    /// Sockets that received something lately, by the latest census.
    active: u32,
}

impl Riding {
    fn of(context: &Context<'_>, key: &PortSpaceKey) -> Self {
        let lately = |at: Moment| context.now.since(at) < context.thresholds.draining.quiet;
        let service = PortSpaceKey {
            initiator: [0; 16],
            point: Point::Wire as u8,
            netns: 0,
            ..*key
        };
        let talks = context.tables.services.get(&service);
        let talks = talks.into_iter().flat_map(Service::connections);
        let answered = talks.filter(|talk| {
            let c = &talk.conversation;
            c.tuple.initiator == key.initiator
                && c.success_ns != 0
                && lately(Moment(c.success_ns))
                && !talk.closed
        });
        let woken = [Point::Wire, Point::Socket].map(|point| {
            let rests = context.tables.idles.get(&PortSpaceKey {
                point: point as u8,
                ..service
            });
            let rests = rests
                .into_iter()
                .flat_map(|idle: &idle::Idle| &idle.survived);
            let rests = rests.filter(|(at, _)| lately(*at));
            rests.map(|(_, survived)| u64::from(survived.count)).sum()
        });
        let space = context.tables.spaces.get(key);
        Self {
            answered: u32::try_from(answered.count()).unwrap_or(u32::MAX),
            woken: woken.into_iter().max().unwrap_or(0),
            active: space.map_or(0, |space| space.census.active),
        }
    }

    const fn goes_on(self) -> bool {
        self.answered > 0 || self.woken > 0 || self.active > 0
    }
}

/// How an endpoint takes no new connection, since when, and what was counted since.
struct Closed {
    how: Symptom,
    since: Moment,
    totals: Totals,
}

impl Closed {
    fn of(view: &View<'_>, context: &Context<'_>, how: Symptom) -> Self {
        Self {
            how,
            since: view.since(context, how),
            totals: view.whole(how),
        }
    }

    /// The way that has lasted for longer.
    fn longest(context: &Context<'_>, view: &View<'_>) -> Self {
        let [refused, silent] =
            [Symptom::Refused, Symptom::Unanswered].map(|how| Self::of(view, context, how));
        if silent.turned_away() > 0 && (refused.turned_away() == 0 || silent.since < refused.since)
        {
            silent
        } else {
            refused
        }
    }

    /// Opens that it did not take.
    const fn turned_away(&self) -> u64 {
        match self.how {
            // Who gives up before the SYN is sent again was not answered either.
            Symptom::Unanswered => self.totals.syn_timeouts + self.totals.abandoned,
            _ => self.totals.refused.saturating_sub(self.totals.no_listener),
        }
    }

    fn lasts(&self, context: &Context<'_>) -> bool {
        let rules = &context.thresholds.draining;
        self.totals.established == 0
            && self.turned_away() >= rules.min_refused
            && context.now.since(self.since) >= rules.grace
    }
}

/// What was measured tells another reason for the silence: a table or a device that is full, or packets that are
/// lost on old connections too.
fn is_explained(context: &Context<'_>, view: &View<'_>) -> bool {
    let name = loss::name(context, view);
    let known = [Verdict::NatSynDrop, Verdict::PacketLoss];
    name.is_some_and(|name| known.contains(&name.verdict) || !loss::rests_on_pattern(&name))
}

fn takes_none(context: &Context<'_>, view: &View<'_>) -> bool {
    let closed = Closed::longest(context, view);
    let is_silent = closed.how == Symptom::Unanswered;
    view.is_initiator() && closed.lasts(context) && !(is_silent && is_explained(context, view))
}

/// Every new connection is turned away for long, and the old ones are still used.
pub fn draining(context: &Context<'_>, view: &View<'_>) -> Option<Finding> {
    // What is known from outside tells more.
    if view.key.role != Role::Initiator as u8
        || placed::is_placed(context, view.key)
        || !takes_none(context, view)
    {
        return None;
    }
    Riding::of(context, view.key)
        .goes_on()
        .then(|| describe(context, view))
}

/// Opens are still turned away, and the old connections still used.
pub fn goes_on(context: &Context<'_>, view: &View<'_>) -> bool {
    let closed = Closed::longest(context, view);
    view.goes_on(context, closed.how)
        && closed.totals.established == 0
        && Riding::of(context, view.key).goes_on()
}

/// The finding, whether or not its condition is met at this moment.
pub fn describe(context: &Context<'_>, view: &View<'_>) -> Finding {
    let closed = Closed::longest(context, view);
    let is_silent = closed.how == Symptom::Unanswered;
    let riding = Riding::of(context, view.key);
    let for_seconds = context.now.since(closed.since).as_secs_f64();
    let used = if riding.answered > 0 {
        format!(
            "requests on {} answered well",
            match riding.answered {
                1 => "1 older connection are".to_owned(),
                n => format!("{n} older connections are"),
            }
        )
    } else {
        "older connections are still used".to_owned()
    };
    let (turned_away, means) = if is_silent {
        (
            "without answer",
            "it is being drained, its address is no longer served, or a filter lets only old connections pass",
        )
    } else {
        (
            "refused",
            "it is being drained or its address is no longer served",
        )
    };
    let mut ruled_out = vec![RuledOut {
        name: Verdict::ServerDown.name(),
        why: used.clone(),
    }];
    if is_silent {
        ruled_out.push(RuledOut {
            name: Verdict::PacketLoss.name(),
            why: format!("none of the opens got through, and {used} on the same path"),
        });
        ruled_out.push(RuledOut {
            name: Verdict::AcceptQueueOverflow.name(),
            why: "not ruled out here: a listener that hangs while its old connections are served looks the same; \
                  one that is slow lets some through"
                .to_owned(),
        });
    }
    Finding {
        verdict: Verdict::Draining,
        space: *view.key,
        since: closed.since,
        severity: Severity::Info,
        confidence: Confidence::Medium,
        evidence: view.evidence(context, closed.how),
        ruled_out,
        opened_by: view.opened_by(context),
        summary: format!(
            "{}: takes no new connection for {} ({} {turned_away}), while {used}: {means}",
            place(view.key),
            seconds(for_seconds),
            count(closed.turned_away(), "open"),
        ),
        remedy: "Let clients leave it: close idle connections to it, give connections a maximum age, and look its \
                 name up again for new ones; at the end of its drain what still rides on it is cut off."
            .to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::core::{
        idle::Survived,
        signature::testing::{Script, opens_to},
    };

    fn refuse(h: &mut Script, second: u64) {
        if second.is_multiple_of(10) {
            let space = h.space(opens_to(10));
            space.opens += 1;
            space.refused += 1;
        }
    }

    fn ride(h: &mut Script) {
        let key = PortSpaceKey {
            initiator: [0; 16],
            netns: 0,
            ..opens_to(10)
        };
        let one = Survived {
            count: 1,
            longest: Duration::from_secs(3),
        };
        h.idle.survived.push((key, one));
    }

    #[test]
    fn refused_for_long_while_old_connections_are_used() {
        let mut host = Script::new();
        host.run(30, |h, _| h.served(opens_to(10), 1));
        host.run(170, |h, second| {
            refuse(h, second);
            ride(h);
        });
        assert!(
            !host.verdicts().contains(&Verdict::Draining),
            "it may be short"
        );
        host.run(20, |h, second| {
            refuse(h, second);
            ride(h);
        });
        let finding = host.finding(Verdict::Draining);
        assert_eq!(finding.severity, Severity::Info);
        assert!(
            finding.summary.contains("19 opens refused"),
            "{}",
            finding.summary
        );
        // It takes connections again.
        host.run(70, |h, _| {
            h.served(opens_to(10), 1);
            ride(h);
        });
        assert!(!host.verdicts().contains(&Verdict::Draining));
    }

    #[test]
    fn without_old_connections_it_is_down() {
        let mut host = Script::new();
        host.run(30, |h, _| h.served(opens_to(10), 1));
        host.run(300, refuse);
        assert!(!host.verdicts().contains(&Verdict::Draining));
    }

    #[test]
    fn sockets_that_receive_are_used() {
        let mut host = Script::new();
        host.sockets(opens_to(10)).active = 1;
        host.run(300, refuse);
        host.finding(Verdict::Draining);
    }

    #[test]
    fn one_that_gets_through_ends_it() {
        let mut host = Script::new();
        host.run(300, |h, second| {
            refuse(h, second);
            ride(h);
            if second % 60 == 30 {
                h.served(opens_to(10), 1);
            }
        });
        assert!(!host.verdicts().contains(&Verdict::Draining));
    }

    /// Drops SYNs; the client gives up at once, or when the kernel does.
    fn drop_syns(h: &mut Script, second: u64, retransmits: u64) {
        if second.is_multiple_of(10) {
            h.unanswered(opens_to(10), 1, retransmits);
        }
    }

    #[test]
    fn an_endpoint_that_drops_syns_is_told_like_one_that_refuses_them() {
        for retransmits in [0, 2] {
            let mut host = Script::new();
            host.run(30, |h, _| h.served(opens_to(10), 1));
            host.run(175, |h, second| {
                drop_syns(h, second, retransmits);
                ride(h);
            });
            assert!(
                !host.verdicts().contains(&Verdict::Draining),
                "it may be short"
            );
            host.run(20, |h, second| {
                drop_syns(h, second, retransmits);
                ride(h);
            });
            let finding = host.finding(Verdict::Draining);
            assert!(
                finding.summary.contains("opens without answer"),
                "{}",
                finding.summary
            );
            assert!(finding.ruled_out.iter().any(|r| r.name == "packet_loss"));
            host.run(130, |h, _| {
                h.served(opens_to(10), 1);
                ride(h);
            });
            assert!(!host.verdicts().contains(&Verdict::Draining));
        }
    }

    #[test]
    fn silence_while_nothing_rides_or_something_gets_through_is_none() {
        let mut host = Script::new();
        host.run(300, |h, second| drop_syns(h, second, 2));
        assert!(
            !host.verdicts().contains(&Verdict::Draining),
            "nobody rides"
        );
        let mut host = Script::new();
        host.run(300, |h, second| {
            drop_syns(h, second, 2);
            ride(h);
            if second % 60 == 30 {
                h.served(opens_to(10), 1);
            }
        });
        assert!(!host.verdicts().contains(&Verdict::Draining), "loss");
    }

    #[test]
    fn silence_that_has_another_name_is_none() {
        // Data of old connections is sent again as well.
        let mut host = Script::new();
        host.run(300, |h, _| {
            h.unanswered(opens_to(10), 1, 1);
            h.unanswered(opens_to(11), 1, 1);
            h.served(opens_to(11), 9);
            h.space(opens_to(10)).data_retransmits += 3;
            ride(h);
        });
        assert!(
            !host.verdicts().contains(&Verdict::Draining),
            "packets are lost"
        );
        // The table of this host is full.
        let mut host = Script::new();
        host.netns.conntrack_max = Some(1000);
        host.netns.conntrack_count = Some(999);
        host.netns.conntrack_drop = Some(0);
        host.run(300, |h, _| {
            h.unanswered(opens_to(10), 1, 1);
            *h.netns.conntrack_drop.as_mut().unwrap() += 3;
            ride(h);
        });
        assert!(
            !host.verdicts().contains(&Verdict::Draining),
            "{:?}",
            host.verdicts()
        );
    }
}
