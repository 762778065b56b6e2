//! A finding that lasts: `pending` → `firing` → `resolved`.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use serde::Serialize;
use tuplewatch_common::address::{Point, PortSpaceKey, Role};

use super::{
    finding::{Finding, Severity, Verdict},
    observation::{ip, point_name, role_name},
    report::Change,
    threshold::AlertTiming,
    time::Moment,
};

/// Where an alert is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// The condition holds, not yet for long enough.
    Pending,
    /// It has lasted.
    Firing,
    /// It is over.
    Resolved,
}

impl State {
    /// Its name in every output.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Firing => "firing",
            Self::Resolved => "resolved",
        }
    }
}

/// One alert.
#[derive(Clone, Debug, PartialEq)]
pub struct Alert {
    /// Stable for one port space and cause, on every run.
    pub id: String,
    /// Where it is in its life.
    pub state: State,
    /// When the condition began to hold.
    pub pending_since: Moment,
    /// When it began to fire.
    pub firing_since: Option<Moment>,
    /// When it was resolved.
    pub resolved_at: Option<Moment>,
    /// The moment of this report.
    pub at: Moment,
    /// The latest finding.
    pub finding: Finding,
}

/// All alerts that are pending or firing.
#[derive(Clone, Debug, Default)]
pub struct Alerts {
    live: BTreeMap<(Verdict, PortSpaceKey), Live>,
}

#[derive(Clone, Debug)]
struct Live {
    alert: Alert,
    /// The condition was met last at.
    last_true: Moment,
    /// Last reported at.
    reported: Moment,
}

/// A pending alert whose condition is not met any more is dropped after this long.
const PENDING_LINGERS: Duration = Duration::from_secs(5);

impl Alerts {
    /// Takes the findings of one evaluation, and says what changed.
    ///
    /// `refresh` gives the present finding of a firing alert whose condition to fire is not met any
    /// more, and whether it still has symptoms: hysteresis counts from the last symptom, not from the
    /// condition to fire.
    pub fn update(
        &mut self,
        now: Moment,
        findings: Vec<Finding>,
        timing: &AlertTiming,
        mut refresh: impl FnMut(Verdict, &PortSpaceKey) -> Option<(Finding, bool)>,
    ) -> Vec<Change> {
        let mut changes = Vec::new();
        for finding in findings {
            let key = (finding.verdict, finding.space);
            let live = self.live.entry(key).or_insert_with(|| {
                let alert = Alert {
                    id: id(finding.verdict, &finding.space),
                    state: State::Pending,
                    pending_since: now,
                    firing_since: None,
                    resolved_at: None,
                    at: now,
                    finding: finding.clone(),
                };
                changes.push(Change::Alert(Box::new(alert.clone())));
                Live {
                    alert,
                    last_true: now,
                    reported: now,
                }
            });
            live.last_true = now;
            changes.extend(live.take(now, finding, timing));
        }
        self.live.retain(|(verdict, space), live| {
            if live.last_true == now {
                return true;
            }
            if live.alert.state == State::Pending {
                return now.since(live.last_true) < PENDING_LINGERS.max(timing.pending);
            }
            let alive = match refresh(*verdict, space) {
                Some((finding, alive)) => {
                    let change = live.take(now, finding, timing);
                    if alive {
                        changes.extend(change);
                    }
                    alive
                }
                None => false,
            };
            if !alive {
                live.alert.state = State::Resolved;
                live.alert.resolved_at = Some(now);
                live.alert.at = now;
                changes.push(Change::Alert(Box::new(live.alert.clone())));
            }
            alive
        });
        changes
    }

    /// Those that are pending or firing.
    pub fn live(&self) -> impl Iterator<Item = &Alert> {
        self.live.values().map(|live| &live.alert)
    }
}

impl Live {
    /// Takes the present finding; returns the alert if somebody should see it.
    fn take(&mut self, now: Moment, finding: Finding, timing: &AlertTiming) -> Option<Change> {
        let alert = &mut self.alert;
        let worse = finding.severity > alert.finding.severity;
        // A severity once reached stays until the end: an alert that flaps wakes people twice.
        let severity: Severity = finding.severity.max(alert.finding.severity);
        alert.finding = Finding {
            severity,
            ..finding
        };
        alert.at = now;
        let fires =
            alert.state == State::Pending && now.since(alert.pending_since) >= timing.pending;
        if fires {
            alert.state = State::Firing;
            alert.firing_since = Some(now);
        }
        let due = alert.state == State::Firing && now.since(self.reported) >= timing.repeat;
        (fires || worse || due).then(|| {
            self.reported = now;
            Change::Alert(Box::new(alert.clone()))
        })
    }
}

/// Identity of an alert: the same port space and cause have the same one on every run.
fn id(verdict: Verdict, space: &PortSpaceKey) -> String {
    let point = point_name(Point::from_u8(space.point));
    let role = role_name(Role::from_u8(space.role));
    let (initiator, responder) = (ip(&space.initiator), ip(&space.responder));
    let responder = SocketAddr::new(responder, space.responder_port);
    let netns = if space.netns == 0 {
        String::new()
    } else {
        format!("netns-{}/", space.netns)
    };
    format!(
        "{}/{netns}{point}/{role}/{initiator}/{responder}",
        verdict.name()
    )
}
