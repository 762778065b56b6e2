//! Puts the core together: observations in, changes and overviews out.

use std::collections::BTreeMap;

use tuplewatch_common::address::{Point, PortSpaceKey, Role};

use super::{
    alert::Alerts,
    finding::{Finding, Verdict},
    observation::{Event, Snapshot},
    pool,
    report::{Budget, BudgetSource, Change, Overview, SpaceReport, Totals},
    signature::{self, Context},
    space::Space,
    surroundings::Surroundings,
    tables::Tables,
    threshold::Thresholds,
    time::Moment,
};

/// The core.
#[derive(Debug, Default)]
pub struct Engine {
    thresholds: Thresholds,
    tables: Tables,
    alerts: Alerts,
    look_alikes: BTreeMap<(Verdict, PortSpaceKey), Finding>,
    globals: [u64; tuplewatch_common::record::Global::COUNT as usize],
    surroundings: Surroundings,
    now: Moment,
}

impl Engine {
    /// A core that has seen nothing yet.
    #[must_use]
    pub fn new(thresholds: Thresholds) -> Self {
        Self {
            thresholds,
            ..Self::default()
        }
    }

    /// Takes single events.
    pub fn events(&mut self, events: &[Event]) {
        self.tables.events(events);
    }

    /// Takes a snapshot, judges, and says what changed.
    pub fn snapshot(&mut self, snapshot: &Snapshot) -> Vec<Change> {
        let now = snapshot.now;
        let t = &self.thresholds;
        let keep = t.window.max(t.alert.resolve) + t.alert.resolve;
        self.tables.snapshot(snapshot, keep, t.pool.ageing);
        self.globals = snapshot.globals;
        self.surroundings.clone_from(&snapshot.surroundings);
        self.now = now;
        let context = Context {
            tables: &self.tables,
            thresholds: &self.thresholds,
            now,
        };
        let (look_alikes, findings): (Vec<_>, Vec<_>) = signature::evaluate(&context)
            .into_iter()
            .partition(|finding| finding.verdict.is_look_alike());
        let mut changes =
            self.alerts
                .update(now, findings, &self.thresholds.alert, |verdict, key| {
                    signature::refresh(&context, verdict, key)
                });
        changes.extend(note_look_alikes(&mut self.look_alikes, look_alikes));
        changes
    }

    /// The state of everything, with the `top` busiest port spaces.
    #[must_use]
    pub fn overview(&self, top: usize) -> Overview {
        let mut spaces: Vec<(&PortSpaceKey, &Space)> = self.tables.spaces.iter().collect();
        spaces.sort_by_cached_key(|(key, space)| {
            let opens = space.opens(self.now, self.thresholds.window);
            let trouble = space.episode.is_some();
            std::cmp::Reverse((trouble, opens, space.census.in_use, **key))
        });
        let rest = spaces.split_off(top.min(spaces.len()));
        let other = rest
            .iter()
            .fold(self.tables.forgotten, |sum: Totals, (_, space)| {
                sum.plus(&space.totals)
            });
        Overview {
            now: self.now,
            spaces: spaces
                .into_iter()
                .map(|(key, space)| self.report(key, space))
                .collect(),
            other,
            known_spaces: self.tables.spaces.len() as u64,
            globals: self.globals,
            alerts: self.alerts.live().cloned().collect(),
        }
    }

    fn report(&self, key: &PortSpaceKey, space: &Space) -> SpaceReport {
        let window = space.window(self.now, self.thresholds.window);
        let seconds = self
            .tables
            .first
            .map_or(1.0, |first| self.now.since(first).as_secs_f64())
            .clamp(1.0, self.thresholds.window.as_secs_f64());
        SpaceReport {
            key: *key,
            totals: space.totals,
            opens_per_second: window.opens as f64 / seconds,
            window_refused: window.bare_acks,
            in_use: space.census.in_use,
            time_wait: space.census.time_wait,
            ports_seen: space
                .ports
                .as_ref()
                .map_or(0, super::ports::Ports::distinct),
            budget: self.budget(key, space),
            reuse_interval: space.reuse_interval(),
            handshake_duration: space.handshake_duration(),
            port_search: space.port_search(),
        }
    }

    fn budget(&self, key: &PortSpaceKey, space: &Space) -> Option<Budget> {
        if key.role == Role::Responder as u8 {
            let pool = pool::infer(space.ports.as_ref()?, &self.thresholds.pool)?;
            return Some(Budget {
                ports: pool.size(),
                source: BudgetSource::Inferred,
                pool: Some(pool),
            });
        }
        let netns = if key.point == Point::Wire as u8 {
            self.surroundings.own_netns
        } else {
            key.netns
        };
        let local = self.surroundings.local_ports.get(&netns)?;
        Some(Budget {
            ports: local.budget(),
            source: BudgetSource::LocalRange,
            pool: None,
        })
    }
}

/// Look-alikes are told once when they begin and once when they end.
fn note_look_alikes(
    known: &mut BTreeMap<(Verdict, PortSpaceKey), Finding>,
    found: Vec<Finding>,
) -> Vec<Change> {
    let mut changes = Vec::new();
    let now: BTreeMap<_, _> = found
        .into_iter()
        .map(|f| ((f.verdict, f.space), f))
        .collect();
    for (key, finding) in known.iter() {
        if !now.contains_key(key) {
            changes.push(Change::LookAlike {
                finding: Box::new(finding.clone()),
                ended: true,
            });
        }
    }
    for (key, finding) in &now {
        if !known.contains_key(key) {
            changes.push(Change::LookAlike {
                finding: Box::new(finding.clone()),
                ended: false,
            });
        }
    }
    *known = now;
    changes
}
