use tuplewatch_common::address::PortSpaceKey;

use super::*;
use crate::core::{
    egress::Group,
    signature::{
        load::{Load, local_ports, opener},
        testing::{Script, client, opens_to},
    },
};

const PORTS: u16 = 200;

fn host() -> Script {
    let mut host = Script::new();
    host.local_ports = Some(local_ports(PORTS, 2));
    host
}

/// The second of the first forecast, and the one in which the last port is taken.
fn run(
    host: &mut Script,
    load: &mut Load,
    seconds: u64,
    rate: impl Fn(u64) -> u32,
) -> (Option<u64>, Option<u64>) {
    let (mut warned, mut used_up) = (None, None);
    host.run(seconds, |h, second| {
        if h.verdicts().contains(&Verdict::Forecast) {
            warned.get_or_insert(second);
        }
        let taken = load.second(h, rate(second));
        if taken >= PORTS.into() {
            used_up.get_or_insert(second);
        }
    });
    (warned, used_up)
}

/// A rate in tenths of a connection per second, as whole connections.
fn tenths(rate: u64, second: u64) -> u32 {
    (rate * (second + 1) / 10 - rate * second / 10) as u32
}

#[test]
fn a_ramp_is_foretold_twenty_seconds_before_the_end() {
    let mut host = host();
    let mut load = Load::new(opens_to(10));
    let (warned, used_up) = run(&mut host, &mut load, 150, |second| {
        tenths(second / 3, second)
    });
    let (warned, used_up) = (warned.unwrap(), used_up.unwrap());
    assert!(warned >= 60, "one hold time was observed: {warned}");
    assert!(warned + 20 <= used_up, "{warned} {used_up}");
}

#[test]
fn connections_that_stay_open_are_foretold() {
    let mut host = host();
    let to = opens_to(10);
    let mut load = Load::new(to).living(10_000);
    let (warned, used_up) = run(&mut host, &mut load, 95, |second| tenths(18, second));
    assert!(
        warned.unwrap() >= 60 && used_up.is_none(),
        "{warned:?} {used_up:?}"
    );
    opener(&mut host, to, 4711, "curl").opens = 170;
    host.run(1, |h, _| {
        load.second(h, 2);
    });
    let finding = host.finding(Verdict::Forecast);
    assert_eq!(finding.severity, Severity::Warning);
    let outlook = finding.evidence.outlook.unwrap();
    let taken = finding.evidence.budget.unwrap().taken();
    assert!(outlook.expected >= taken, "{outlook:?} of {taken}");
    let seconds = outlook.exhausted_in_seconds.unwrap();
    assert!((10.0..25.0).contains(&seconds), "{outlook:?}");
    assert!(
        finding.summary.contains("none is left in"),
        "{}",
        finding.summary
    );
    assert!(
        finding.remedy.contains("curl[4711] opens"),
        "{}",
        finding.remedy
    );
    assert_eq!(finding.opened_by[0].pid, 4711);
    assert_eq!(
        finding.evidence.budget.unwrap().source,
        BudgetSource::LocalRange
    );
    let names: Vec<_> = finding.ruled_out.iter().map(|r| r.name).collect();
    assert_eq!(names, ["start_of_load", "burst"]);
}

#[test]
fn a_new_rate_that_the_ports_do_not_bear_is_foretold() {
    let mut host = host();
    let mut load = Load::new(opens_to(10)).after([1; 61]);
    let (warned, used_up) = run(
        &mut host,
        &mut load,
        160,
        |second| if second < 100 { 1 } else { 5 },
    );
    let (warned, used_up) = (warned.unwrap(), used_up.unwrap());
    assert!(
        (120..140).contains(&warned) && warned < used_up,
        "{warned} {used_up}"
    );
}

#[test]
fn the_start_of_a_load_that_the_ports_bear_is_no_trend() {
    // The agent starts in the middle of it, the load starts before the agent's eyes, or it grows.
    for (before, from) in [
        (vec![2; 100], 0),
        (vec![], 0),
        (vec![], 90),
        (vec![1; 61], 90),
    ] {
        let quiet = u32::from(before.len() == 61);
        let mut host = host();
        let mut load = Load::new(opens_to(10)).after(before);
        let (warned, used_up) = run(&mut host, &mut load, 300, |second| {
            if second < from { quiet } else { 2 }
        });
        assert_eq!((warned, used_up), (None, None), "from {from}");
    }
}

#[test]
fn a_burst_and_a_slow_rise_are_no_trend() {
    let mut host = host();
    let mut load = Load::new(opens_to(10)).after([1; 61]);
    let burst = |second| if (80..85).contains(&second) { 12 } else { 1 };
    assert_eq!(run(&mut host, &mut load, 200, burst), (None, None));
    // From 60 to 120 ports within twenty minutes.
    let mut host = self::host();
    let mut load = Load::new(opens_to(10)).after([1; 61]);
    let slow = |second| tenths(10 + second / 120, second);
    assert_eq!(run(&mut host, &mut load, 1200, slow), (None, None));
}

#[test]
fn connections_that_the_peer_closes_hold_nothing_here() {
    let mut host = host();
    let mut load = Load::new(opens_to(10)).closed_by_peer().after([9; 61]);
    assert_eq!(run(&mut host, &mut load, 150, |_| 9), (None, None));
}

#[test]
fn a_device_holds_ports_whoever_closes_first() {
    let group = Group {
        name: "nat".to_owned(),
        destinations: vec!["203.0.113.0/24".parse().unwrap()],
        ports: Some(PORTS.into()),
        hold: Some(std::time::Duration::from_secs(60)),
        ..Group::default()
    };
    let mut host = Script::with_groups(&[group]);
    let mut load = Load::new(opens_to(10)).closed_by_peer();
    let (warned, _) = run(&mut host, &mut load, 115, |second| {
        tenths(second / 3, second)
    });
    assert!(warned.is_some_and(|at| at >= 60), "{warned:?}");
    let finding = host.finding(Verdict::Forecast);
    let budget = finding.evidence.budget.unwrap();
    assert_eq!((budget.source, budget.ports), (BudgetSource::Device, 200));
    assert_eq!(finding.evidence.egress.unwrap().group, "nat");
    assert!(
        finding.summary.contains("of the device in between"),
        "{}",
        finding.summary
    );
}

/// A device in front of this host that hands out 200 ports in turn.
fn pool(host: &mut Script, key: PortSpaceKey, given: &mut u32, n: u32) {
    let ports = (0..n).map(|i| 2048 + ((*given + i) % u32::from(PORTS)) as u16);
    host.ports.push((key, ports.collect()));
    *given += n;
}

#[test]
fn the_pool_of_a_client_is_foretold_at_the_responder() {
    let mut host = Script::new();
    let (mut load, mut given) = (Load::new(client()), 0);
    // 2.5 a second go round 200 ports in 80 s; then the rate begins to rise.
    let mut warned = None;
    host.run(200, |h, second| {
        if h.verdicts().contains(&Verdict::Forecast) {
            warned.get_or_insert(second);
        }
        let n = tenths(25 + second.saturating_sub(150) / 4, second);
        load.second(h, n);
        pool(h, client(), &mut given, n);
    });
    let warned = warned.unwrap();
    assert!((155..200).contains(&warned), "{warned}");
    let finding = host.finding(Verdict::Forecast);
    assert_eq!(
        finding.confidence,
        Confidence::Medium,
        "the pool is inferred"
    );
    let budget = finding.evidence.budget.unwrap();
    assert_eq!((budget.source, budget.ports), (BudgetSource::Inferred, 200));
    assert!(
        finding.remedy.contains("3.3 new connections/s"),
        "{}",
        finding.remedy
    );
}

#[test]
fn a_pool_whose_ports_are_reused_in_peace_is_not_foretold() {
    let mut host = Script::new();
    let (mut load, mut given) = (Load::new(client()), 0);
    host.run(200, |h, second| {
        let n = 3 + u32::from(second % 2 == 0);
        load.second(h, n);
        // 210 in a minute of 200 ports: some come again too soon, and are let in.
        h.space(client()).reuse_accepted += u64::from(second > 60);
        pool(h, client(), &mut given, n);
        assert_eq!(h.verdicts(), []);
    });
}

#[test]
fn a_pause_of_the_agent_is_no_trend() {
    let mut host = host();
    let mut load = Load::new(opens_to(10)).after([1; 61]);
    assert_eq!(run(&mut host, &mut load, 90, |_| 1), (None, None));
    // Five minutes in which nobody looked; the load has doubled meanwhile.
    host.pause(300);
    let mut load = Load::new(opens_to(10)).after([2; 61]);
    assert_eq!(run(&mut host, &mut load, 120, |_| 2), (None, None));
}
