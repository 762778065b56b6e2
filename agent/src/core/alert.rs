//! A finding that lasts: `pending` → `firing` → `resolved`.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};
use tuplewatch_common::address::{Point, PortSpaceKey, Role};

use super::{
    finding::{Finding, Severity, Verdict},
    mute::{self, Muted},
    observation::{ip, point_name, role_name},
    report::Change,
    rules::Rules,
    threshold::AlertTiming,
    time::Moment,
};

#[cfg(test)]
mod jump;
mod past;
#[cfg(test)]
mod tests;

use past::Past;
pub use past::{Firing, History};

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

/// One alert: of one port space and one cause.
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
    /// How often it fired before, and when.
    pub history: History,
    /// Nobody is told of it, and why.
    pub muted: Option<Muted>,
    /// The latest file of the flight recorder about it. The core knows none: whoever writes it names it.
    pub evidence_file: Option<PathBuf>,
}

type Key = (Verdict, PortSpaceKey);

/// All alerts that are pending or firing, and the history of those that did.
#[derive(Clone, Debug, Default)]
pub struct Alerts {
    live: BTreeMap<Key, Live>,
    past: Past,
}

#[derive(Clone, Debug)]
struct Live {
    alert: Alert,
    /// The condition was met last at.
    last_true: Moment,
    /// It had symptoms last at.
    last_alive: Moment,
    /// Last reported at.
    reported: Moment,
    /// Somebody was told that it fires.
    told: bool,
    /// Nobody has looked before: not for long, or the agent was started again.
    blind_until: Option<Moment>,
}

/// A firing alert as it outlives the agent.
#[derive(Clone, Debug, PartialEq)]
pub struct Kept {
    /// The alert.
    pub alert: Alert,
    /// Somebody was told that it fires.
    pub told: bool,
}

/// A pending alert whose condition is not met any more is dropped after this long.
const PENDING_LINGERS: Duration = Duration::from_secs(5);

impl Alerts {
    /// Takes the findings of one evaluation, and says what changed.
    ///
    /// `refresh` gives the present finding of a firing alert whose condition to fire is not met any
    /// more, and whether it still has symptoms: hysteresis counts from the last symptom, not from the
    /// condition to fire. Of what `refresh` does not know it counts from the last time that it was known
    /// to go on, and after a restart or a gap it counts from there: what was not watched for so long
    /// cannot be said to have had no symptom.
    pub fn update(
        &mut self,
        now: Moment,
        findings: Vec<Finding>,
        rules: &Rules,
        mut refresh: impl FnMut(Verdict, &PortSpaceKey) -> Option<(Finding, bool)>,
    ) -> Vec<Change> {
        let mut changes = Vec::new();
        for finding in findings {
            let key = (finding.verdict, finding.space);
            let timing = &rules.of(&finding.space).alert;
            if !self.live.contains_key(&key) {
                if is_too_quiet(&finding, timing) {
                    continue;
                }
                let muted = mute::muted(&rules.mutes, now, key.0, &key.1);
                let live = Live::begin(now, finding.clone(), self.past.take(&key), muted);
                changes.extend(live.change());
                self.live.insert(key, live);
            }
            let Some(live) = self.live.get_mut(&key) else {
                continue;
            };
            live.last_true = now;
            live.last_alive = now;
            live.alert.muted = mute::muted(&rules.mutes, now, key.0, &key.1);
            changes.extend(live.take(now, finding, timing));
        }
        let past = &mut self.past;
        self.live.retain(|key, live| {
            if live.last_true == now {
                return true;
            }
            let (verdict, space) = key;
            let timing = &rules.of(space).alert;
            if live.alert.state == State::Pending {
                let stays = now.since(live.last_true) < PENDING_LINGERS.max(timing.pending);
                if !stays {
                    past.put_back(*key, std::mem::take(&mut live.alert.history));
                }
                return stays;
            }
            live.alert.muted = mute::muted(&rules.mutes, now, *verdict, space);
            let alive = match refresh(*verdict, space) {
                Some((finding, true)) => {
                    live.last_alive = now;
                    changes.extend(live.take(now, finding, timing));
                    true
                }
                Some((finding, false)) if !live.is_blind(now, timing) => {
                    live.refresh(now, finding);
                    false
                }
                _ => now.since(live.last_alive) < timing.resolve,
            };
            if !alive {
                changes.extend(live.resolve(now));
                past.put(*key, live.alert.history.clone());
            }
            alive
        });
        self.past
            .forget(now, |space| rules.of(space).alert.remember);
        changes
    }

    /// The source did not look for this long: what was not seen neither resolves an alert nor makes a
    /// pending one fire.
    pub fn resume(&mut self, now: Moment, gap: Duration) {
        for live in self.live.values_mut() {
            live.blind_until = Some(now);
            for moment in [
                &mut live.last_true,
                &mut live.last_alive,
                &mut live.reported,
            ] {
                *moment = *moment + gap;
            }
            if live.alert.state == State::Pending {
                live.alert.pending_since = live.alert.pending_since + gap;
            }
        }
    }

    /// Those that are pending or firing and not muted.
    pub fn live(&self) -> impl Iterator<Item = &Alert> {
        self.all().filter(|alert| alert.muted.is_none())
    }

    /// Those that are pending or firing and muted.
    pub fn muted(&self) -> impl Iterator<Item = &Alert> {
        self.all().filter(|alert| alert.muted.is_some())
    }

    fn all(&self) -> impl Iterator<Item = &Alert> {
        self.live.values().map(|live| &live.alert)
    }

    /// What must outlive the agent: alerts that fire, worst first.
    #[must_use]
    pub fn firing(&self) -> Vec<Kept> {
        let firing = self
            .live
            .values()
            .filter(|l| l.alert.state == State::Firing);
        let mut kept: Vec<Kept> = firing
            .map(|live| Kept {
                alert: live.alert.clone(),
                told: live.told,
            })
            .collect();
        kept.sort_by_key(|kept| std::cmp::Reverse(kept.alert.finding.severity));
        kept
    }

    /// … and the history of those that are over, latest first.
    #[must_use]
    pub fn past(&self) -> Vec<(Verdict, PortSpaceKey, History)> {
        let pending = self
            .live
            .iter()
            .filter(|(_, live)| live.alert.state == State::Pending && live.alert.history.count > 0);
        let mut all = self.past.all();
        all.extend(pending.map(|((verdict, space), live)| {
            let history = live.alert.history.clone();
            (*verdict, *space, history)
        }));
        all
    }

    /// Takes up what an agent before this one has kept. Nobody is told: whoever was told of an alert
    /// hears of it again when it has new figures or is over.
    pub fn restore(
        &mut self,
        now: Moment,
        firing: Vec<Kept>,
        past: Vec<(Verdict, PortSpaceKey, History)>,
    ) {
        for (verdict, space, history) in past {
            self.past.put_back((verdict, space), history);
        }
        for Kept { alert, told } in firing {
            let key = (alert.finding.verdict, alert.finding.space);
            let live = Live {
                alert,
                last_true: now,
                last_alive: now,
                reported: now,
                told,
                blind_until: Some(now),
            };
            self.live.insert(key, live);
        }
    }
}

/// Too few connections are opened for the pool of a device to be used up: whatever was seen, it is not
/// worth waking somebody.
fn is_too_quiet(finding: &Finding, timing: &AlertTiming) -> bool {
    let guarded = matches!(
        finding.verdict,
        Verdict::L4ReuseInTimeWait | Verdict::NatSynDrop | Verdict::Forecast
    );
    guarded && finding.evidence.window_opens < timing.min_opens
}

impl Live {
    fn begin(now: Moment, finding: Finding, history: History, muted: Option<Muted>) -> Self {
        Self {
            alert: Alert {
                id: id(finding.verdict, &finding.space),
                state: State::Pending,
                pending_since: now,
                firing_since: None,
                resolved_at: None,
                at: now,
                finding,
                history,
                muted,
                evidence_file: None,
            },
            last_true: now,
            last_alive: now,
            reported: now,
            told: false,
            blind_until: None,
        }
    }

    /// It was not watched long enough since a restart or a gap to say that it is over.
    fn is_blind(&self, now: Moment, timing: &AlertTiming) -> bool {
        self.blind_until
            .is_some_and(|until| now.since(until) < timing.resolve)
    }

    /// The alert, unless it is muted.
    fn change(&self) -> Option<Change> {
        let muted = self.alert.muted.is_some();
        (!muted).then(|| Change::Alert(Box::new(self.alert.clone())))
    }

    /// Takes the present finding; returns the alert if somebody should see it.
    fn take(&mut self, now: Moment, finding: Finding, timing: &AlertTiming) -> Option<Change> {
        let worse = finding.severity > self.alert.finding.severity;
        self.refresh(now, finding);
        let alert = &mut self.alert;
        // What rests on a row of failures has lasted since the first of them.
        let since = match alert.finding.verdict {
            Verdict::Pinned5xx | Verdict::BlackHoled => {
                alert.finding.since.min(alert.pending_since)
            }
            _ => alert.pending_since,
        };
        let fires = alert.state == State::Pending && now.since(since) >= timing.pending;
        if fires {
            alert.state = State::Firing;
            alert.firing_since = Some(now);
            alert.history.begin(now, alert.finding.severity);
        }
        let firing = alert.state == State::Firing;
        if firing {
            alert.history.reach(alert.finding.severity);
        }
        // Not told yet although it fires: a mute has ended.
        let due = firing && (!self.told || now.since(self.reported) >= timing.repeat);
        if !(worse || due) {
            return None;
        }
        let change = self.change()?;
        self.reported = now;
        self.told |= firing;
        Some(change)
    }

    /// Takes the figures only.
    fn refresh(&mut self, now: Moment, finding: Finding) {
        let alert = &mut self.alert;
        alert.finding = Finding {
            // A severity once reached stays until the end: an alert that flaps wakes people twice.
            severity: finding.severity.max(alert.finding.severity),
            // An agent that was started again sees the episode from there on only.
            since: finding.since.min(alert.finding.since),
            ..finding
        };
        alert.at = now;
    }

    /// Ends it. Whoever was told that it fires is told that it is over, muted since or not.
    fn resolve(&mut self, now: Moment) -> Option<Change> {
        let alert = &mut self.alert;
        alert.state = State::Resolved;
        alert.resolved_at = Some(now);
        alert.at = now;
        alert.history.end(now);
        self.told
            .then(|| Change::Alert(Box::new(self.alert.clone())))
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
