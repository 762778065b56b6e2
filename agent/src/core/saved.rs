//! What of the core outlives the agent: firing alerts, the history of those that are over, inferred
//! pools. Plain data; where it is kept is not the core's business.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use serde::{Deserialize, Serialize};
use tuplewatch_common::address::{Point, PortSpaceKey, Role, v4_mapped};

use super::{
    alert::{Alert, Alerts, History, Kept, State},
    finding::{Confidence, Evidence, Finding, OpenedBy, Pool, RuledOut, Severity, Verdict},
    observation::{ip, point_name, role_name},
    time::Moment,
};

/// Firing alerts kept at most, worst first: some 4 KB each.
const ALERTS: usize = 1000;
/// Pools kept at most, widest first: some 200 bytes each.
const POOLS: usize = 5000;

/// Everything that is kept. Moments are of the clock of the source; [`Saved::convert`] turns them into
/// those of another one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    /// Alerts that fire.
    pub alerts: Vec<SavedAlert>,
    /// Alerts that are over.
    #[serde(default)]
    pub past: Vec<SavedPast>,
    /// Pools of source ports.
    #[serde(default)]
    pub pools: Vec<SavedPool>,
}

/// A port space as people write it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SavedSpace {
    initiator: IpAddr,
    responder: SocketAddr,
    role: String,
    point: String,
    #[serde(default)]
    netns: u32,
}

/// An alert that fires.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SavedAlert {
    id: String,
    cause: String,
    space: SavedSpace,
    pending_since: Moment,
    firing_since: Moment,
    told: bool,
    history: History,
    at: Moment,
    since: Moment,
    severity: Severity,
    confidence: Confidence,
    evidence: Evidence,
    ruled_out: Vec<SavedRuledOut>,
    opened_by: Vec<OpenedBy>,
    summary: String,
    remedy: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct SavedRuledOut {
    name: String,
    why: String,
}

/// A pool that was inferred.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SavedPool {
    space: SavedSpace,
    pool: Pool,
}

/// An alert that is over.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SavedPast {
    cause: String,
    space: SavedSpace,
    history: History,
}

impl Saved {
    /// What is to be kept of these alerts and pools.
    pub(super) fn of(alerts: &Alerts, pools: BTreeMap<PortSpaceKey, Pool>) -> Self {
        let mut pools: Vec<_> = pools.into_iter().collect();
        pools.sort_by_key(|(_, pool)| std::cmp::Reverse(pool.size()));
        pools.truncate(POOLS);
        let firing = alerts.firing().into_iter().take(ALERTS);
        let past = alerts.past().into_iter().take(ALERTS);
        Self {
            alerts: firing.filter_map(SavedAlert::of).collect(),
            past: past
                .map(|(verdict, space, history)| SavedPast {
                    cause: verdict.name().to_owned(),
                    space: SavedSpace::from(&space),
                    history,
                })
                .collect(),
            pools: pools
                .into_iter()
                .map(|(space, pool)| SavedPool {
                    space: SavedSpace::from(&space),
                    pool,
                })
                .collect(),
        }
    }

    /// Puts the alerts into a core and gives the pools. What this version has no word for is left out.
    pub(super) fn restore(
        self,
        now: Moment,
        alerts: &mut Alerts,
    ) -> impl Iterator<Item = (PortSpaceKey, Pool)> {
        let firing = self.alerts.into_iter().filter_map(SavedAlert::restore);
        let past = self.past.into_iter().filter_map(|past| {
            let key = past.space.key()?;
            Some((verdict(&past.cause)?, key, past.history))
        });
        alerts.restore(now, firing.collect(), past.collect());
        let pools = self.pools.into_iter();
        pools.filter_map(|saved| Some((saved.space.key()?, saved.pool)))
    }

    /// The same by another clock.
    pub fn convert(&mut self, to: impl Fn(Moment) -> Moment) {
        for alert in &mut self.alerts {
            let samples = alert.evidence.samples.iter_mut();
            for sample in samples {
                sample.time_ns = to(Moment(sample.time_ns)).0;
            }
            let own = [
                &mut alert.pending_since,
                &mut alert.firing_since,
                &mut alert.at,
                &mut alert.since,
            ];
            for moment in own.into_iter().chain(alert.history.moments()) {
                *moment = to(*moment);
            }
        }
        for past in &mut self.past {
            for moment in past.history.moments() {
                *moment = to(*moment);
            }
        }
    }
}

impl SavedAlert {
    fn of(kept: Kept) -> Option<Self> {
        let Kept { alert, told } = kept;
        let finding = alert.finding;
        Some(Self {
            id: alert.id,
            cause: finding.verdict.name().to_owned(),
            space: SavedSpace::from(&finding.space),
            pending_since: alert.pending_since,
            firing_since: alert.firing_since?,
            told,
            history: alert.history,
            at: alert.at,
            since: finding.since,
            severity: finding.severity,
            confidence: finding.confidence,
            evidence: finding.evidence,
            ruled_out: finding
                .ruled_out
                .into_iter()
                .map(|r| SavedRuledOut {
                    name: r.name.to_owned(),
                    why: r.why,
                })
                .collect(),
            opened_by: finding.opened_by,
            summary: finding.summary,
            remedy: finding.remedy,
        })
    }

    fn restore(self) -> Option<Kept> {
        let finding = Finding {
            verdict: verdict(&self.cause)?,
            space: self.space.key()?,
            since: self.since,
            severity: self.severity,
            confidence: self.confidence,
            evidence: self.evidence,
            ruled_out: self
                .ruled_out
                .into_iter()
                .filter_map(|r| {
                    let name = verdict(&r.name)?.name();
                    Some(RuledOut { name, why: r.why })
                })
                .collect(),
            opened_by: self.opened_by,
            summary: self.summary,
            remedy: self.remedy,
        };
        Some(Kept {
            alert: Alert {
                id: self.id,
                state: State::Firing,
                pending_since: self.pending_since,
                firing_since: Some(self.firing_since),
                resolved_at: None,
                at: self.at,
                finding,
                history: self.history,
                muted: None,
                evidence_file: None,
            },
            told: self.told,
        })
    }
}

fn verdict(name: &str) -> Option<Verdict> {
    Verdict::ALL.into_iter().find(|v| v.name() == name)
}

impl From<&PortSpaceKey> for SavedSpace {
    fn from(key: &PortSpaceKey) -> Self {
        Self {
            initiator: ip(&key.initiator),
            responder: SocketAddr::new(ip(&key.responder), key.responder_port),
            role: role_name(Role::from_u8(key.role)).to_owned(),
            point: point_name(Point::from_u8(key.point)).to_owned(),
            netns: key.netns,
        }
    }
}

impl SavedSpace {
    /// The key; `None` if a word is unknown.
    #[must_use]
    pub fn key(&self) -> Option<PortSpaceKey> {
        let address = |ip| match ip {
            IpAddr::V4(ip) => v4_mapped(ip.octets()),
            IpAddr::V6(ip) => ip.octets(),
        };
        let role = [Role::Unknown, Role::Initiator, Role::Responder]
            .into_iter()
            .find(|role| role_name(*role) == self.role)?;
        let point = [Point::Socket, Point::Wire]
            .into_iter()
            .find(|point| point_name(*point) == self.point)?;
        Some(PortSpaceKey {
            initiator: address(self.initiator),
            responder: address(self.responder.ip()),
            responder_port: self.responder.port(),
            role: role as u8,
            point: point as u8,
            netns: self.netns,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sink::fixture;

    #[test]
    fn an_alert_survives_the_way_through_json_and_another_clock() {
        const OTHER: i64 = -1_700_000_000_000_000_000;
        let mut alert = fixture::alert();
        // The control group's number is not kept, nor would it mean anything after a boot.
        alert.finding.opened_by[0].cgroup_id = 0;
        // Whoever wrote the file names it.
        alert.evidence_file = None;
        alert.history = History {
            count: 2,
            first: Some(Moment(5)),
            worst: Some(Severity::Critical),
            firings: [].into(),
        };
        let told = true;
        let mut alerts = Alerts::default();
        let now = alert.at;
        alerts.restore(
            now,
            vec![Kept {
                alert: alert.clone(),
                told,
            }],
            Vec::new(),
        );
        let pool = Pool {
            first: 2048,
            last: 2247,
            seen: 200,
        };
        let pools = BTreeMap::from([(fixture::key(), pool)]);
        let mut saved = Saved::of(&alerts, pools.clone());
        let before = saved.clone();
        saved.convert(|m| m.shifted(OTHER));
        assert_ne!(saved, before);
        let text = serde_json::to_string(&saved).unwrap();
        let mut read: Saved = serde_json::from_str(&text).unwrap();
        read.convert(|m| m.shifted(-OTHER));
        assert_eq!(read, before);
        let mut restored = Alerts::default();
        assert_eq!(
            read.restore(now, &mut restored).collect::<BTreeMap<_, _>>(),
            pools
        );
        assert_eq!(restored.firing(), [Kept { alert, told }]);
    }

    #[test]
    fn a_zeroed_address_stays_zeroed() {
        let key = PortSpaceKey {
            initiator: v4_mapped([10, 0, 0, 1]),
            responder: [0; 16],
            responder_port: 0,
            role: Role::Initiator as u8,
            point: Point::Socket as u8,
            netns: 7,
        };
        assert_eq!(SavedSpace::from(&key).key(), Some(key));
    }

    #[test]
    fn what_has_no_word_here_is_left_out() {
        let text = r#"{"alerts": [], "past": [{"cause": "of_the_future", "space": {"initiator":
            "10.0.0.1", "responder": "10.0.0.2:80", "role": "initiator", "point": "wire"},
            "history": {"count": 1}}]}"#;
        let saved: Saved = serde_json::from_str(text).unwrap();
        let mut alerts = Alerts::default();
        assert_eq!(saved.restore(Moment(0), &mut alerts).count(), 0);
        assert!(alerts.past().is_empty());
    }
}
