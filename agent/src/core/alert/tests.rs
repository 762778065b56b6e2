use super::*;
use crate::{
    core::{
        finding::{Confidence, Evidence},
        mute::Mute,
        rules::DestinationRules,
        threshold::Thresholds,
    },
    sink::fixture,
};

const SECOND: u64 = 1_000_000_000;

fn at(second: u64) -> Moment {
    Moment(second * SECOND)
}

fn finding(severity: Severity, opens: u64) -> Finding {
    Finding {
        verdict: Verdict::L4ReuseInTimeWait,
        space: fixture::key(),
        since: at(0),
        severity,
        confidence: Confidence::High,
        evidence: Evidence {
            window_opens: opens,
            ..Evidence::default()
        },
        ruled_out: Vec::new(),
        opened_by: Vec::new(),
        summary: String::new(),
        remedy: String::new(),
    }
}

/// What the rules say at a look.
#[derive(Clone, Copy)]
enum Look {
    /// The condition to fire is met.
    True,
    /// … is not, but there were symptoms lately.
    Symptoms,
    /// … there were none for long enough.
    Nothing,
    /// Nothing is known of the port space.
    Unknown,
}

struct Run {
    alerts: Alerts,
    rules: Rules,
}

impl Run {
    fn new(rules: impl Into<Rules>) -> Self {
        Self {
            alerts: Alerts::default(),
            rules: rules.into(),
        }
    }

    fn look(&mut self, second: u64, look: Look) -> Vec<&'static str> {
        self.look_as(second, look, Severity::Warning)
    }

    /// The states that were told.
    fn look_as(&mut self, second: u64, look: Look, severity: Severity) -> Vec<&'static str> {
        let found = match look {
            Look::True => vec![finding(severity, 100)],
            _ => Vec::new(),
        };
        let changes = self
            .alerts
            .update(at(second), found, &self.rules, |_, _| match look {
                Look::Symptoms => Some((finding(severity, 100), true)),
                Look::Nothing => Some((finding(severity, 100), false)),
                Look::True | Look::Unknown => None,
            });
        changes
            .iter()
            .map(|change| alert(change).state.name())
            .collect()
    }

    fn only(&self) -> &Alert {
        let mut all = self.alerts.all();
        let alert = all.next().expect("an alert");
        assert!(all.next().is_none());
        alert
    }

    fn fire(&mut self) {
        assert_eq!(self.look(10, Look::True), ["pending"]);
        assert_eq!(self.look(11, Look::True), ["firing"]);
    }
}

fn alert(change: &Change) -> &Alert {
    match change {
        Change::Alert(alert) => alert,
        Change::LookAlike { .. } => panic!("{change:?}"),
    }
}

#[test]
fn it_fires_once_lasts_through_hysteresis_and_is_told_again_with_new_figures() {
    let mut run = Run::new(Thresholds::default());
    run.fire();
    for second in 12..41 {
        let look = if second % 2 == 0 {
            Look::Symptoms
        } else {
            Look::True
        };
        assert!(run.look(second, look).is_empty(), "{second}");
    }
    assert_eq!(
        run.look(41, Look::Symptoms),
        ["firing"],
        "repeated after 30 s"
    );
    assert_eq!(
        run.look_as(42, Look::True, Severity::Critical),
        ["firing"],
        "it got worse"
    );
    assert!(run.look(43, Look::True).is_empty());
    assert_eq!(
        run.only().finding.severity,
        Severity::Critical,
        "and stays so"
    );
    assert_eq!(run.look(50, Look::Nothing), ["resolved"]);
    assert_eq!(run.alerts.all().count(), 0);
}

#[test]
fn a_pending_one_that_does_not_last_is_dropped_without_a_word() {
    let mut run = Run::new(Thresholds::default());
    assert_eq!(run.look(10, Look::True), ["pending"]);
    for second in 11..20 {
        assert!(run.look(second, Look::Unknown).is_empty());
    }
    assert_eq!(run.alerts.all().count(), 0);
}

#[test]
fn the_same_alert_keeps_its_history() {
    let mut run = Run::new(Thresholds::default());
    for n in 0..12 {
        let t = 1000 * n;
        assert_eq!(run.look(t + 10, Look::True), ["pending"]);
        let severity = if n == 0 {
            Severity::Critical
        } else {
            Severity::Warning
        };
        assert_eq!(
            run.look_as(t + 12, Look::True, severity).last(),
            Some(&"firing")
        );
        let history = &run.only().history;
        assert_eq!((history.count, history.first), (n + 1, Some(at(12))));
        assert_eq!(history.worst, Some(Severity::Critical));
        assert_eq!(history.firings.back().unwrap().until, None);
        assert_eq!(run.look(t + 100, Look::Nothing), ["resolved"]);
    }
    let past = run.alerts.past();
    let history = &past[0].2;
    assert_eq!((past.len(), history.firings.len()), (1, 8));
    let last = history.firings.back().unwrap();
    assert_eq!((last.since, last.until), (at(11_012), Some(at(11_100))));
    assert_eq!(last.severity, Severity::Warning);
    // A day later it is forgotten.
    assert!(run.look(11_100 + 24 * 3600, Look::Unknown).is_empty());
    assert!(run.alerts.past().is_empty());
}

#[test]
fn few_opens_begin_no_alert_but_do_not_end_one() {
    let mut run = Run::new(Thresholds::default());
    let quiet = |run: &mut Run, second| {
        let found = vec![finding(Severity::Critical, 19)];
        run.alerts
            .update(at(second), found, &run.rules, |_, _| None)
    };
    assert!(quiet(&mut run, 1).is_empty());
    run.fire();
    for second in 12..30 {
        quiet(&mut run, second);
    }
    assert_eq!(run.only().state, State::Firing);
    // A failed connect() needs no second witness.
    let local = Finding {
        verdict: Verdict::LocalEphemeral,
        ..finding(Severity::Critical, 1)
    };
    let changes = run
        .alerts
        .update(at(31), vec![local], &run.rules, |_, _| None);
    assert_eq!(changes.len(), 1);
}

#[test]
fn timing_is_that_of_the_destination() {
    let mut slow = Thresholds::default();
    slow.alert.pending = Duration::from_secs(60);
    let rules = Rules {
        destinations: vec![DestinationRules {
            destinations: vec!["203.0.113.0/24".parse().unwrap()],
            thresholds: slow,
        }],
        ..Rules::default()
    };
    let mut run = Run::new(rules);
    assert_eq!(run.look(10, Look::True), ["pending"]);
    for second in 11..70 {
        assert!(run.look(second, Look::True).is_empty());
    }
    assert_eq!(run.look(70, Look::True), ["firing"]);
}

fn mute(until: Option<u64>) -> Rules {
    Rules {
        mutes: vec![Mute {
            causes: vec![Verdict::L4ReuseInTimeWait],
            until: until.map(at),
            reason: "known".into(),
            ..Mute::default()
        }],
        ..Rules::default()
    }
}

#[test]
fn nobody_is_told_of_a_muted_alert_but_it_is_there() {
    let mut run = Run::new(mute(None));
    for second in 10..60 {
        assert!(run.look(second, Look::True).is_empty());
    }
    assert_eq!(run.only().state, State::Firing);
    assert_eq!(run.only().muted.as_ref().unwrap().reason, "known");
    assert_eq!(
        (run.alerts.live().count(), run.alerts.muted().count()),
        (0, 1)
    );
    assert!(run.look(61, Look::Nothing).is_empty(), "nor of its end");
    assert_eq!(run.alerts.past()[0].2.count, 1, "its history is kept");
}

#[test]
fn an_alert_that_outlasts_its_mute_is_told_then() {
    let mut run = Run::new(mute(Some(30)));
    for second in 10..30 {
        assert!(run.look(second, Look::Symptoms).is_empty());
        assert!(run.look(second, Look::True).is_empty());
    }
    assert_eq!(run.look(30, Look::True), ["firing"]);
    assert_eq!(run.only().firing_since, Some(at(11)));
    assert!(run.look(31, Look::True).is_empty(), "once");
    assert_eq!(
        (run.alerts.live().count(), run.alerts.muted().count()),
        (1, 0)
    );
}

#[test]
fn who_was_told_of_the_beginning_is_told_of_the_end() {
    let mut run = Run::new(Thresholds::default());
    run.fire();
    run.rules = mute(None);
    for second in 12..200 {
        assert!(run.look(second, Look::True).is_empty(), "{second}");
    }
    assert_eq!(run.look(200, Look::Nothing), ["resolved"]);
}

#[test]
fn after_a_restart_it_goes_on_under_the_same_id() {
    let mut before = Run::new(Thresholds::default());
    before.fire();
    let mut run = Run::new(Thresholds::default());
    let kept = before.alerts.firing();
    run.alerts.restore(at(100), kept, before.alerts.past());
    for second in 101..130 {
        assert!(run.look(second, Look::Unknown).is_empty(), "{second}");
    }
    assert_eq!(
        run.look(130, Look::True),
        ["firing"],
        "new figures, not a new alert"
    );
    let alert = run.only();
    assert_eq!(alert.firing_since, Some(at(11)));
    assert_eq!((&alert.id, alert.history.count), (&before.only().id, 1));
}

#[test]
fn after_a_restart_what_is_over_is_resolved_under_the_same_id() {
    let mut before = Run::new(Thresholds::default());
    before.fire();
    let mut run = Run::new(Thresholds::default());
    run.alerts
        .restore(at(100), before.alerts.firing(), Vec::new());
    for second in 101..160 {
        // What a rule says of a time that nobody watched counts for nothing.
        let look = if second % 2 == 0 {
            Look::Nothing
        } else {
            Look::Unknown
        };
        assert!(run.look(second, look).is_empty(), "{second}");
    }
    let rules = run.rules.clone();
    let changes = run.alerts.update(at(160), Vec::new(), &rules, |_, _| None);
    let resolved = alert(&changes[0]);
    assert_eq!(resolved.state, State::Resolved);
    assert_eq!(resolved.id, before.only().id);
    assert_eq!(resolved.firing_since, Some(at(11)));
    assert_eq!(resolved.history.count, 1);
}

#[test]
fn time_that_nobody_watched_resolves_nothing_and_fires_nothing() {
    let mut run = Run::new(Thresholds::default());
    run.fire();
    let mut other = finding(Severity::Warning, 100);
    other.space = fixture::socket_key();
    let rules = run.rules.clone();
    run.alerts
        .update(at(12), vec![other.clone()], &rules, |_, _| None);
    let now = at(12 + 7200);
    run.alerts.resume(now, Duration::from_secs(7200));
    let changes = run.alerts.update(now, vec![other], &rules, |_, _| None);
    assert!(changes.is_empty(), "{changes:?}");
    let states: Vec<_> = run.alerts.all().map(|a| a.state).collect();
    assert_eq!(states.len(), 2);
    assert!(states.contains(&State::Firing) && states.contains(&State::Pending));
}
