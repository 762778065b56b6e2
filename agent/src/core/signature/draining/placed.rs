//! Requests that ride on a place which a service has left, as somebody outside of this host says: the
//! file of placements.

use tuplewatch_common::address::{Point, PortSpaceKey, Role};

use super::super::{
    Context,
    words::{count, seconds},
};
use crate::core::{
    ends::Ends,
    finding::{Confidence, Evidence, Finding, RuledOut, Severity, Verdict},
    observation::{Talk, place},
    placement::{Placement, PlacementEvidence, RidingConnection},
    service::Service,
    time::Moment,
};

/// Connections shown in a finding.
const SHOWN: usize = 16;

/// Judges each place that a service has left for long enough.
pub fn placed(context: &Context<'_>) -> Vec<Finding> {
    let mut found: Vec<Finding> = Vec::new();
    for (key, placement) in places(context) {
        let context = &context.at(&key);
        let riding = riding(context, &key, placement);
        let is_due = context.now >= placement.since + context.thresholds.draining.placed;
        let is_known = found.iter().any(|finding| finding.space == key);
        if is_due && !is_known && goes_on(&riding) {
            found.push(describe(context, &key, riding));
        }
    }
    found
}

/// The present finding of an alert that fires, and whether something still rides there.
pub fn refresh(context: &Context<'_>, key: &PortSpaceKey) -> Option<(Finding, bool)> {
    let (_, placement) = places(context).find(|(place, _)| place == key)?;
    let riding = riding(context, key, placement);
    let goes_on = goes_on(&riding);
    Some((describe(context, key, riding), goes_on))
}

/// It is known that the responder of this port space serves no more.
pub fn is_placed(context: &Context<'_>, space: &PortSpaceKey) -> bool {
    let is_it = |(key, placement): (PortSpaceKey, &Placement)| {
        let is_due = context.now >= placement.since + context.thresholds.draining.placed;
        is_due && (key.responder, key.responder_port) == (space.responder, space.responder_port)
    };
    places(context).any(is_it)
}

/// Every place that a service has left, the latest change first.
fn places<'a>(
    context: &Context<'a>,
) -> impl Iterator<Item = (PortSpaceKey, &'a Placement)> + use<'a> {
    let mut all: Vec<&Placement> = context.rules.placements.iter().collect();
    all.sort_by_key(|placement| std::cmp::Reverse(placement.since));
    all.into_iter().flat_map(|placement| {
        let places = placement.places();
        places.map(move |place| (Placement::key(place), placement))
    })
}

const fn goes_on(riding: &PlacementEvidence) -> bool {
    riding.answered > 0 || riding.woken > 0 || riding.active > 0
}

/// What was used lately there.
fn riding(context: &Context<'_>, key: &PortSpaceKey, placement: &Placement) -> PlacementEvidence {
    let lately = |at: Moment| context.now.since(at) < context.thresholds.draining.quiet;
    let left = !placement.left.is_empty();
    // What was there when the agent began is as old as that.
    let began_before = context.tables.first.is_some_and(|at| at <= placement.since);
    let is_old = |talk: &Talk| match talk.conversation.opened_ns {
        _ if left => true,
        0 => began_before,
        opened => Moment(opened) < placement.since,
    };
    let service = context.tables.services.get(key);
    let talks = service.into_iter().flat_map(Service::connections);
    let mut talks: Vec<&Talk> = talks
        .filter(|talk| {
            let success = talk.conversation.success_ns;
            success != 0 && lately(Moment(success)) && !talk.closed && is_old(talk)
        })
        .collect();
    talks.sort_by_key(|talk| (talk.conversation.opened_ns, talk.conversation.tuple));
    let (woken, active) = if left { at_all(context, key) } else { (0, 0) };
    PlacementEvidence {
        service: placement.service.to_string(),
        since_seconds: context.now.since(placement.since).as_secs_f64(),
        left,
        answered: u32::try_from(talks.len()).unwrap_or(u32::MAX),
        woken,
        active,
        connections: talks
            .iter()
            .take(SHOWN)
            .map(|talk| connection(talk, context.now))
            .collect(),
    }
}

/// Connections that woke lately and lived, and sockets that received something, of all clients.
fn at_all(context: &Context<'_>, key: &PortSpaceKey) -> (u64, u32) {
    let lately = |at: Moment| context.now.since(at) < context.thresholds.draining.quiet;
    let woken = [Point::Wire, Point::Socket].map(|point| {
        let key = PortSpaceKey {
            point: point as u8,
            ..*key
        };
        let idle = context.tables.idles.get(&key).into_iter();
        let rests = idle.flat_map(|idle| &idle.survived);
        let rests = rests.filter(|(at, _)| lately(*at));
        rests.map(|(_, survived)| u64::from(survived.count)).sum()
    });
    let active = context.tables.spaces.iter().filter(|(space, _)| {
        space.role == key.role
            && (space.responder, space.responder_port) == (key.responder, key.responder_port)
    });
    let active = active.map(|(_, space)| space.census.active).sum();
    (woken.into_iter().max().unwrap_or(0), active)
}

fn connection(talk: &Talk, now: Moment) -> RidingConnection {
    let c = &talk.conversation;
    let ends = Ends::of(&c.tuple);
    let opened = (c.opened_ns != 0).then_some(Moment(c.opened_ns));
    RidingConnection {
        ends,
        age_seconds: opened.map(|at| now.since(at).as_secs_f64()),
        requests: c.requests,
        answered_ago_seconds: now.since(Moment(c.success_ns)).as_secs_f64(),
        close: ends.close_command(Role::Initiator),
    }
}

fn describe(context: &Context<'_>, key: &PortSpaceKey, riding: PlacementEvidence) -> Finding {
    let used = match (riding.answered, riding.active) {
        (0, 0) => "older connections to it are still used".to_owned(),
        (0, n) => format!(
            "{} to it received something lately",
            count(n.into(), "older connection")
        ),
        (n, _) => format!(
            "requests are answered on {}",
            count(n.into(), "older connection")
        ),
    };
    let what = if riding.left {
        format!("serves {} no more", riding.service)
    } else {
        "is served from elsewhere".to_owned()
    };
    let since = riding.since_seconds;
    let commands: Vec<&str> = riding
        .connections
        .iter()
        .map(|c| c.close.as_str())
        .collect();
    let close = match commands.as_slice() {
        [] => String::new(),
        [first] => format!(" To close the one: {first}."),
        [first, ..] => format!(" To close them: {first}; the others likewise."),
    };
    Finding {
        verdict: Verdict::Draining,
        space: *key,
        since: context.now.shifted(-((since * 1e9) as i64)),
        severity: Severity::Info,
        confidence: Confidence::High,
        summary: format!("{}: {what} for {}, and {used}", place(key), seconds(since)),
        ruled_out: vec![RuledOut {
            name: Verdict::ServerDown.name(),
            why: used,
        }],
        opened_by: Vec::new(),
        remedy: format!(
            "Let clients leave it: give connections a maximum age, and look the name up again for new ones; at the \
             end of its drain what still rides on it is cut off.{close}"
        ),
        evidence: Evidence {
            window_seconds: context.thresholds.draining.quiet.as_secs_f64(),
            placement: Some(riding),
            ..Evidence::default()
        },
    }
}

#[cfg(test)]
mod tests {
    use tuplewatch_common::{
        address::{FourTuple, v4_mapped},
        conversation::Conversation,
    };

    use super::*;
    use crate::core::signature::testing::{Script, opens_to};

    const SERVICE: &str = "203.0.113.10:8080";
    const ENDPOINT: &str = "203.0.113.11:8080";

    /// A host that knows of a change at the begin of its script plus so many seconds.
    fn host(after: i64, left: &[&str]) -> Script {
        let mut host = Script::new();
        let placement = Placement {
            service: SERVICE.parse().unwrap(),
            since: host.now().shifted(after * 1_000_000_000),
            left: left.iter().map(|text| text.parse().unwrap()).collect(),
        };
        host.know(placement);
        host
    }

    /// A request was answered on a connection that was opened at that second.
    fn ask(host: &mut Script, responder: u8, port: u16, opened: Option<i64>) {
        let now = host.now().0;
        let begin = 1_000_000_000_000i64;
        let opened = opened.map_or(0, |s| (begin + s * 1_000_000_000).cast_unsigned());
        host.talks.push(Talk {
            conversation: Conversation {
                tuple: FourTuple {
                    initiator: v4_mapped([10, 0, 0, 1]),
                    responder: v4_mapped([203, 0, 113, responder]),
                    responder_port: 8080,
                    initiator_port: port,
                    pad: 0,
                },
                role: Role::Initiator as u8,
                opened_ns: opened,
                last_ns: now,
                success_ns: now,
                requests: 7,
                ..Conversation::default()
            },
            page: None,
            closed: false,
        });
    }

    #[test]
    fn requests_on_connections_older_than_the_change_are_told_after_a_while() {
        let mut host = host(10, &[]);
        host.run(305, |h, _| {
            ask(h, 10, 1, Some(5));
            ask(h, 10, 2, Some(50));
        });
        assert_eq!(host.verdicts(), [], "300 s are not over");
        host.run(8, |h, _| {
            ask(h, 10, 1, Some(5));
            ask(h, 10, 2, Some(50));
        });
        let finding = host.finding(Verdict::Draining);
        assert_eq!(finding.severity, Severity::Info);
        let placement = finding.evidence.placement.unwrap();
        assert_eq!((placement.answered, placement.connections.len()), (1, 1));
        assert_eq!(placement.connections[0].ends.client_port, 1);
        let command = "ss -K dst 203.0.113.10 dport = 8080 src 10.0.0.1 sport = 1";
        assert!(finding.remedy.contains(command), "{}", finding.remedy);
        // It is not used any more.
        host.run(130, |h, _| ask(h, 10, 2, Some(50)));
        assert_eq!(host.verdicts(), []);
    }

    #[test]
    fn a_connection_of_unknown_age_is_as_old_as_the_agent() {
        for (after, told) in [(5, true), (-400, false)] {
            let mut host = host(after, &[]);
            host.run(320, |h, _| ask(h, 10, 1, None));
            assert_eq!(
                host.verdicts().contains(&Verdict::Draining),
                told,
                "{after}"
            );
        }
    }

    #[test]
    fn whatever_rides_on_an_endpoint_that_was_left_is_old() {
        let mut host = host(-400, &[ENDPOINT]);
        host.run(5, |h, _| {
            ask(h, 10, 1, Some(-600));
            ask(h, 11, 2, Some(1));
        });
        let finding = host.finding(Verdict::Draining);
        assert_eq!(finding.space, Placement::key(ENDPOINT.parse().unwrap()));
        assert!(finding.summary.contains(SERVICE), "{}", finding.summary);
        // TLS: only the sockets tell.
        let mut host = self::host(-400, &[ENDPOINT]);
        host.sockets(opens_to(11)).active = 2;
        host.served(opens_to(11), 1);
        host.run(5, |_, _| ());
        let placement = host.finding(Verdict::Draining).evidence.placement.unwrap();
        assert_eq!((placement.active, placement.answered), (2, 0));
    }

    #[test]
    fn one_alert_for_one_endpoint() {
        let mut host = host(-400, &[ENDPOINT]);
        host.sockets(opens_to(11)).active = 1;
        host.run(300, |h, second| {
            if second % 10 == 0 {
                let space = h.space(opens_to(11));
                space.opens += 1;
                space.refused += 1;
            }
        });
        // It refuses, too.
        let finding = host.finding(Verdict::Draining);
        assert!(finding.evidence.placement.is_some());
    }
}
