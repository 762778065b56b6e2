use super::*;
use crate::core::signature::{
    load::{Load, local_ports, opener},
    testing::{Script, opens_to},
};

fn host(ports: u16, tw_reuse: u8) -> Script {
    let mut host = Script::new();
    host.local_ports = Some(local_ports(ports, tw_reuse));
    host
}

#[test]
fn a_failed_connect_is_told_at_once_with_destination_and_process() {
    let mut host = host(200, 2);
    let to = opens_to(10);
    let mut load = Load::new(to).after([1; 60]);
    host.run(5, |h, _| {
        load.second(h, 3);
    });
    assert_eq!(host.verdicts(), []);
    host.run(2, |h, _| {
        load.second(h, 3);
        h.space(to).opens += 4;
        h.space(to).no_local_port += 4;
        let curl = opener(h, to, 4711, "curl");
        curl.opens += 4;
        curl.no_local_port += 4;
        opener(h, to, 88, "nginx").opens += 3;
    });
    assert_eq!(host.verdicts(), [Verdict::LocalEphemeral]);
    let finding = host.finding(Verdict::LocalEphemeral);
    assert_eq!(finding.severity, Severity::Critical);
    assert_eq!(finding.confidence, Confidence::High);
    assert_eq!(finding.evidence.no_local_port, 8);
    assert_eq!(finding.space, to);
    for words in ["10.0.0.1 → 203.0.113.10:8080", "curl[4711] 8 times"] {
        assert!(finding.summary.contains(words), "{}", finding.summary);
    }
    assert_eq!(finding.opened_by.len(), 2);
    let holders = &finding.evidence.holders;
    assert_eq!((holders.len(), holders[0].server_port), (1, 8080));
    assert!(holders[0].time_wait > 60 && holders[0].in_use == 3);
    // Once no connect() fails any more it is over.
    host.run(130, |h, _| {
        load.second(h, 1);
    });
    assert_eq!(host.verdicts(), []);
}

#[test]
fn nearly_no_port_left_is_told_before_a_connect_fails() {
    let to = opens_to(10);
    for (per_second, severity) in [(3, Some(Severity::Critical)), (2, None)] {
        // 60 seconds in TIME_WAIT and one open: 183 or 122 of 200.
        let mut host = host(200, 2);
        let mut load = Load::new(to).after([per_second; 61]);
        host.run(10, |h, _| {
            load.second(h, per_second);
        });
        let found = host
            .verdicts()
            .contains(&Verdict::LocalEphemeral)
            .then(|| host.finding(Verdict::LocalEphemeral));
        assert_eq!(found.as_ref().map(|f| f.severity), severity);
        let Some(finding) = found else { continue };
        assert!(
            finding.summary.contains("183 of 200 are taken"),
            "{}",
            finding.summary
        );
        assert!(
            finding.remedy.contains("3.3 new connections/s"),
            "{}",
            finding.remedy
        );
        // Below the level to fire is not the end yet.
        host.run(50, |h, _| {
            load.second(h, 2);
        });
        assert_eq!(host.verdicts(), [Verdict::LocalEphemeral]);
        host.run(130, |h, _| {
            load.second(h, 1);
        });
        assert_eq!(host.verdicts(), []);
    }
    let mut host = host(200, 2);
    let mut load = Load::new(to).living(20).after([2; 81]);
    host.run(10, |h, _| {
        load.second(h, 2);
    });
    let finding = host.finding(Verdict::LocalEphemeral);
    assert_eq!(finding.severity, Severity::Warning, "160 of 200");
}

#[test]
fn a_start_in_the_middle_of_a_steady_load_is_quiet() {
    for closes_first in [true, false] {
        let mut host = host(244, 2);
        let load = Load::new(opens_to(10)).after([2; 200]);
        let mut load = if closes_first {
            load
        } else {
            load.closed_by_peer().living(60)
        };
        host.run(200, |h, _| {
            let taken = load.second(h, 2);
            assert!((120..=122).contains(&taken), "half of 244: {taken}");
            assert_eq!(h.verdicts(), []);
        });
    }
}

#[test]
fn time_wait_that_is_reused_holds_nothing() {
    // Four times more opens than ports in each minute; TIME_WAIT is on nearly all ports.
    let to = opens_to(10);
    let run = |tw_reuse| {
        let mut host = host(200, tw_reuse);
        host.run(120, |h, _| {
            let space = h.space(to);
            space.opens += 13;
            space.established += 13;
            space.closed += 13;
            let row = h.sockets(to);
            row.established = 2;
            row.time_wait = [130, 66, 0, 0, 0, 0];
        });
        host.verdicts()
    };
    assert_eq!(run(1), []);
    assert!(
        run(2).contains(&Verdict::LocalEphemeral),
        "2 is for loopback only"
    );
}

#[test]
fn refused_and_abandoned_connects_are_something_else() {
    let mut host = host(200, 2);
    let to = opens_to(10);
    host.run(60, |h, _| {
        let space = h.space(to);
        space.opens += 8;
        space.refused += 4;
        space.abandoned += 4;
    });
    assert!(
        !host.verdicts().contains(&Verdict::LocalEphemeral),
        "{:?}",
        host.verdicts()
    );
}

#[test]
fn a_slow_search_warns_unless_it_was_always_slow() {
    let to = opens_to(10);
    let run = |before: usize, after: usize| {
        let mut host = Script::new();
        host.run(60, |h, second| {
            let bucket = if second < 30 { before } else { after };
            h.space(to).port_search[bucket] += 10;
            h.served(to, 10);
        });
        host
    };
    let cliff = run(4, 12);
    let finding = cliff.finding(Verdict::LocalEphemeral);
    assert_eq!(finding.severity, Severity::Warning);
    assert_eq!(
        finding.confidence,
        Confidence::Medium,
        "no budget is known here"
    );
    let searches = finding.evidence.searches.unwrap();
    assert!(
        (0.002..0.004).contains(&searches.median_seconds),
        "{searches:?}"
    );
    assert!(searches.median_before_seconds.unwrap() < 20e-6);
    assert!(
        finding.summary.contains("µs before)"),
        "{}",
        finding.summary
    );
    assert_eq!(
        run(9, 12).verdicts(),
        [],
        "256 to 512 µs before: eight times is no cliff"
    );
    assert_eq!(run(4, 8).verdicts(), [], "200 µs hurt nobody");
}

#[test]
fn bound_sockets_share_one_pool_per_source_address() {
    let mut host = host(200, 1);
    let run = |host: &mut Script, bound: u32| {
        host.run(5, |h, _| {
            for (to, part) in [(10, 3), (11, 1)] {
                h.space(opens_to(to)).opens += 2;
                h.space(opens_to(to)).bound_opens += 2;
                let row = h.sockets(opens_to(to));
                row.established = bound / 4 * part - 10;
                row.time_wait[3] = 10;
                row.bound = bound / 4 * part;
            }
            opener(h, opens_to(11), 7, "haproxy").opens += 2;
        });
    };
    run(&mut host, 100);
    assert_eq!(host.verdicts(), [], "half");
    run(&mut host, 188);
    assert_eq!(host.verdicts(), [Verdict::LocalEphemeral]);
    let finding = host.finding(Verdict::LocalEphemeral);
    assert_eq!(finding.severity, Severity::Critical);
    assert_eq!(
        (finding.space.responder, finding.space.responder_port),
        ([0; 16], 0)
    );
    assert!(
        finding
            .summary
            .starts_with("10.0.0.1: sockets that are bound"),
        "{}",
        finding.summary
    );
    assert!(finding.remedy.contains("IP_BIND_ADDRESS_NO_PORT"));
    let budget = finding.evidence.budget.unwrap();
    assert_eq!(
        (budget.source, budget.in_use, budget.held),
        (BudgetSource::Bound, 168, 20)
    );
    let ports: Vec<_> = finding.evidence.holders.iter().map(|h| h.in_use).collect();
    assert_eq!(ports, [131, 37]);
    assert_eq!(finding.opened_by[0].command, "haproxy");
    run(&mut host, 100);
    host.run(70, |_, _| {});
    assert_eq!(host.verdicts(), []);
}
