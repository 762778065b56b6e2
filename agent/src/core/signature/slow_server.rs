//! Look-alike: the server is slow. It accepts at once and answers late, so that connections pile up, and
//! with them the source ports that they take.

use tuplewatch_common::{
    address::{Point, PortSpaceKey, Role},
    histogram::{BUCKETS, HANDSHAKE_UNIT_NS, Histogram, bounds},
};

use super::{
    Context, View,
    loss::is_more_than_chance,
    words::{place, short},
};
use crate::core::{
    episode::Symptom,
    finding::{Confidence, Evidence, Finding, RuledOut, Verdict},
    space::Space,
    waits::WaitEvidence,
};

/// Every destination, or client, whose connections are opened at a rate and then wait.
pub fn slow_server(context: &Context<'_>) -> Vec<Finding> {
    let window = context.rules.thresholds.window;
    context
        .tables
        .active(context.now, window)
        .filter(|(key, space)| {
            // The same sockets are counted for both points: the wire's port space speaks for them.
            let is_twin = key.point == Point::Socket as u8 && context.tables.has_wire(key);
            space.waits.is_some() && key.role != Role::Unknown as u8 && !is_twin
        })
        .filter_map(|(key, space)| judge(&context.at(key), key, space))
        .collect()
}

fn judge(context: &Context<'_>, key: &PortSpaceKey, space: &Space) -> Option<Finding> {
    let rules = &context.thresholds.slow;
    let waits = space.waits.as_ref()?.over(context.now, rules.lasts)?;
    let share = waits.waiting / (waits.waiting + waits.lively).max(1.0);
    if waits.waiting < f64::from(rules.min_waiting) || share < rules.min_share {
        return None;
    }
    let view = View::of(context, key, space);
    let w = &view.window;
    // Who polls keeps a connection, or has as many as there are who poll; here each request brings
    // another one.
    if w.opens < rules.min_opens {
        return None;
    }
    // Where SYNs are lost, that is told.
    let missing = w.syn_timeouts + w.abandoned + w.syn_retransmits + w.half_open;
    if is_more_than_chance(context, missing, w.opens) {
        return None;
    }
    Some(finding(context, &view, waits))
}

fn finding(context: &Context<'_>, view: &View<'_>, waits: WaitEvidence) -> Finding {
    let handshake = median(&view.space.counters().handshake_duration);
    let waits = WaitEvidence {
        handshake_seconds: handshake,
        ..waits
    };
    let quick = handshake.map_or_else(String::new, |s| format!(" in {}", short(s)));
    // Half of them are not even accepted: the application does not call accept().
    let is_queued = waits.unaccepted * 2.0 >= waits.waiting;
    let queued = if is_queued {
        format!(
            " ({:.0} of them not accepted by the application)",
            waits.unaccepted
        )
    } else {
        String::new()
    };
    let summary = format!(
        "{}: handshakes are complete{quick}, but {:.0} of {:.0} busy connections wait for an answer \
         for a second or more{queued}, for {:.0} s now",
        place(view.key),
        waits.waiting,
        waits.waiting + waits.lively,
        waits.seconds
    );
    let remedy = match (view.is_responder(), is_queued) {
        (true, true) => {
            "The application accepts too slowly: look at its event loop, thread or worker pool."
        }
        (true, false) => {
            "The application has the requests and does not answer: look at what it waits for."
        }
        (false, _) => {
            "Look at the server, or at what it waits for. Each connection that waits keeps a source port: \
             a time-out and a limit of connections keep a slow server from using them up."
        }
    };
    let mut found = view.look_alike(
        context,
        Verdict::SlowServer,
        Symptom::Unanswered,
        summary,
        remedy,
    );
    // Many who poll on connections of their own look the same.
    found.confidence = if is_queued {
        Confidence::High
    } else {
        Confidence::Medium
    };
    found.evidence = Evidence {
        waits: Some(waits),
        ..found.evidence
    };
    found.ruled_out = vec![RuledOut {
        name: Verdict::NatSynDrop.name(),
        why: format!(
            "SYNs are answered: {} of {} opens of the window were lost",
            view.window.syn_timeouts + view.window.abandoned,
            view.window.opens
        ),
    }];
    found
}

/// The median of handshakes in seconds: the upper end of its bucket.
fn median(histogram: &Histogram) -> Option<f64> {
    let total: u64 = histogram.iter().sum();
    let mut below = 0;
    let bucket = histogram.iter().position(|n| {
        below += n;
        total > 0 && below >= total.div_ceil(2)
    })?;
    let bounds = bounds(HANDSHAKE_UNIT_NS);
    Some(bounds[bucket.min(BUCKETS - 2)] as f64 / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::signature::testing::{Script, client, key, opens_to};

    /// So many opens a second; what a census finds of them.
    fn slow(key: PortSpaceKey, opens: u64, waiting: u32, lively: u32) -> Script {
        let mut host = Script::new();
        host.run(30, |h, _| {
            h.served(key, opens);
            h.space(key).handshake_duration[1] += opens;
            let row = h.sockets(key);
            row.established = waiting + lively;
            (row.waiting, row.lively) = (waiting, lively);
        });
        host
    }

    #[test]
    fn connections_that_pile_up_waiting_are_a_slow_server() {
        let host = slow(opens_to(10), 2, 12, 6);
        assert_eq!(host.verdicts(), [Verdict::SlowServer]);
        let finding = host.finding(Verdict::SlowServer);
        let waits = finding.evidence.waits.unwrap();
        assert_eq!((waits.waiting, waits.lively), (12.0, 6.0));
        assert!(waits.handshake_seconds.unwrap() < 0.001);
        assert_eq!(finding.confidence, Confidence::Medium);
    }

    #[test]
    fn at_the_server_it_says_whether_they_are_accepted() {
        let mut host = slow(client(), 2, 12, 0);
        host.sockets(client()).unaccepted = 12;
        host.run(20, |h, _| h.served(client(), 2));
        let finding = host.finding(Verdict::SlowServer);
        assert_eq!(finding.confidence, Confidence::High);
        assert!(finding.summary.contains("not accepted"), "{finding:?}");
    }

    #[test]
    fn long_polls_and_ordinary_servers_are_not_slow() {
        // Who polls opens hardly any connection.
        assert_eq!(slow(opens_to(10), 0, 200, 0).verdicts(), []);
        // A few slow ones among many quick ones; a few in all.
        assert_eq!(slow(opens_to(10), 20, 12, 20).verdicts(), []);
        assert_eq!(slow(opens_to(10), 20, 5, 0).verdicts(), []);
    }

    #[test]
    fn a_pause_is_too_short() {
        let mut host = Script::new();
        host.run(60, |h, second| {
            h.served(opens_to(10), 20);
            let row = h.sockets(opens_to(10));
            row.established = 100;
            row.waiting = if (30..36).contains(&second) { 100 } else { 0 };
            row.lively = 100 - row.waiting;
        });
        assert_eq!(host.verdicts(), []);
    }

    #[test]
    fn where_syns_are_lost_that_is_told() {
        let mut host = slow(opens_to(10), 2, 12, 6);
        host.run(10, |h, _| {
            h.unanswered(opens_to(10), 3, 6);
        });
        assert!(!host.verdicts().contains(&Verdict::SlowServer));
    }

    #[test]
    fn both_points_are_told_once() {
        let socket = opens_to(10);
        let wire = key(10, 8080, Role::Initiator, Point::Wire);
        let mut host = slow(socket, 2, 12, 6);
        host.run(10, |h, _| {
            h.served(socket, 2);
            h.served(wire, 2);
        });
        host.run(20, |h, _| {
            h.served(socket, 2);
            h.served(wire, 2);
        });
        assert_eq!(host.finding(Verdict::SlowServer).space, wire);
    }
}
