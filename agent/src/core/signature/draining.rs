//! Signature `stuck_keepalive`, cause `draining`: an endpoint takes no new connections any more, and requests still
//! ride on the old ones. Nothing fails yet; it will when the endpoint ends.

mod placed;

use tuplewatch_common::address::{Point, PortSpaceKey, Role};

pub use placed::{placed, refresh as refresh_placed};

use super::{
    Context, View,
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

/// Since when no open got through, and what was counted since.
fn refused(context: &Context<'_>, view: &View<'_>) -> (Moment, Totals) {
    (
        view.since(context, Symptom::Refused),
        view.whole(Symptom::Refused),
    )
}

fn takes_none(context: &Context<'_>, view: &View<'_>) -> bool {
    let rules = &context.thresholds.draining;
    let (since, totals) = refused(context, view);
    view.is_initiator()
        && totals.established == 0
        && totals.refused.saturating_sub(totals.no_listener) >= rules.min_refused
        && context.now.since(since) >= rules.grace
}

/// Every new connection is refused for long, and the old ones are still used.
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

/// Opens are still refused, and the old connections still used.
pub fn goes_on(context: &Context<'_>, view: &View<'_>) -> bool {
    let (_, totals) = refused(context, view);
    view.goes_on(context, Symptom::Refused)
        && totals.established == 0
        && Riding::of(context, view.key).goes_on()
}

/// The finding, whether or not its condition is met at this moment.
pub fn describe(context: &Context<'_>, view: &View<'_>) -> Finding {
    let (since, totals) = refused(context, view);
    let riding = Riding::of(context, view.key);
    let for_seconds = context.now.since(since).as_secs_f64();
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
    Finding {
        verdict: Verdict::Draining,
        space: *view.key,
        since,
        severity: Severity::Info,
        confidence: Confidence::Medium,
        evidence: view.evidence(context, Symptom::Refused),
        ruled_out: vec![RuledOut {
            name: Verdict::ServerDown.name(),
            why: used.clone(),
        }],
        opened_by: view.opened_by(context),
        summary: format!(
            "{}: takes no new connection for {} ({} refused), while {used}: it is being drained or its address is \
             no longer served",
            place(view.key),
            seconds(for_seconds),
            count(totals.refused, "open"),
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
}
