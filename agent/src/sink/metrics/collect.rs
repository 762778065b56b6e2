//! The values of a metric at one moment.

use std::{cmp::Reverse, collections::BTreeMap};

use opentelemetry::KeyValue;
use serde::Serialize;
use tuplewatch_common::{
    address::{Point, PortSpaceKey, Role},
    histogram::Histogram as Counts,
    record::Global,
};

use super::{MAX_EXPORTED, Metric, Source, Which, attribute};
use crate::{
    core::{
        alert::State,
        egress::EgressUse,
        finding::{Severity, Verdict},
        observation::{ip, point_name, role_name},
        report::{Overview, SpaceReport, Totals},
    },
    sink::{HookStatus, Ready},
};

/// All that the metrics need, taken at one moment, so that they fit each other.
#[derive(Clone, Debug, Default)]
pub(crate) struct View {
    /// The port spaces that are told one by one.
    pub(crate) spaces: Vec<SpaceView>,
    /// The others together.
    pub(crate) other: Totals,
    pub(crate) globals: [u64; Global::COUNT as usize],
    pub(crate) known_spaces: u64,
    pub(crate) alerts: Vec<(Verdict, Severity, State)>,
    pub(crate) muted: u64,
    pub(crate) look_alikes: Vec<Verdict>,
    /// Group, destination and what is taken; without a destination the sum of all others.
    pub(crate) egress: Vec<(String, Option<PortSpaceKey>, EgressUse)>,
    pub(crate) hooks: Vec<(String, HookStatus)>,
    pub(crate) memory_bytes: u64,
    pub(crate) version: &'static str,
    pub(crate) delivery: Delivery,
}

/// How the export by OTLP fares.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Delivery {
    /// Exports of metrics that failed after all their retries.
    pub(crate) metrics_failed: u64,
    /// Attempts to send log records that failed.
    pub(crate) logs_failed: u64,
    /// Log records that wait for the receiver.
    pub(crate) logs_waiting: u64,
    /// Log records that were dropped because too many waited.
    pub(crate) logs_dropped: u64,
}

/// A port space as it is exported.
#[derive(Clone, Debug)]
pub(crate) struct SpaceView {
    pub(crate) key: PortSpaceKey,
    /// Counters that never go back.
    pub(crate) totals: Totals,
    pub(crate) histograms: [Counts; Which::COUNT],
    /// What it has now, if it is still in the list.
    pub(crate) report: Option<SpaceReport>,
}

/// A value.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Number {
    Int(u64),
    Float(f64),
}

/// Gives every value of `metric` with its attributes. The buckets of a histogram are counted as
/// Prometheus does: each holds all values up to its bound `le`.
pub(crate) fn collect(metric: &Metric, view: &View, emit: &mut dyn FnMut(Number, &[KeyValue])) {
    let int = Number::Int;
    let rest = KeyValue::new(attribute::AGGREGATE, "other");
    match &metric.source {
        Source::Total(points, get) => {
            for space in view.spaces.iter().filter(|s| points.has(s.point())) {
                emit(int(get(&space.totals)), &space.attributes(None));
            }
            emit(int(get(&view.other)), &[rest]);
        }
        Source::Totals(name, parts) => {
            for (value, points, get) in *parts {
                let part = KeyValue::new(*name, *value);
                for space in view.spaces.iter().filter(|s| points.has(s.point())) {
                    let attributes = space.attributes(Some(part.clone()));
                    emit(int(get(&space.totals)), &attributes);
                }
                emit(int(get(&view.other)), &[rest.clone(), part]);
            }
        }
        Source::Level(get) => {
            for (space, report) in view.listed() {
                if let Some(value) = get(report) {
                    emit(int(value), &space.attributes(None));
                }
            }
        }
        Source::Real(get) => {
            for (space, report) in view.listed() {
                if let Some(value) = get(report) {
                    emit(Number::Float(value), &space.attributes(None));
                }
            }
        }
        Source::Histogram(points, which) => {
            let bounds = which.bounds();
            for space in view.spaces.iter().filter(|s| points.has(s.point())) {
                let mut sum = 0;
                for (count, bound) in space.histograms[*which as usize].iter().zip(&bounds) {
                    sum += count;
                    let le = KeyValue::new(attribute::LE, bound.clone());
                    emit(int(sum), &space.attributes(Some(le)));
                }
            }
        }
        Source::Egress(adds_up, get) => {
            for (group, key, taken) in &view.egress {
                let place = key.map_or_else(
                    || vec![rest.clone()],
                    |key| {
                        vec![
                            KeyValue::new(
                                attribute::SERVER_ADDRESS,
                                ip(&key.responder).to_string(),
                            ),
                            KeyValue::new(attribute::SERVER_PORT, i64::from(key.responder_port)),
                        ]
                    },
                );
                if key.is_some() || *adds_up {
                    let name = KeyValue::new(attribute::EGRESS_GROUP, group.clone());
                    let attributes: Vec<_> = place.into_iter().chain([name]).collect();
                    emit(int(get(taken)), &attributes);
                }
            }
        }
        Source::Host(names, get) => get(view, &mut |value, values| {
            let pairs = names.iter().zip(values);
            let attributes: Vec<_> = pairs
                .map(|(name, value)| KeyValue::new(*name, (*value).to_owned()))
                .collect();
            emit(int(value), &attributes);
        }),
    }
}

impl View {
    /// Takes what the agent says about itself.
    pub(crate) fn take_ready(&mut self, ready: &Ready) {
        let hooks = ready.hooks.iter();
        self.hooks = hooks.map(|h| (h.name.clone(), h.status)).collect();
        self.memory_bytes = ready.memory_bytes;
        self.version = ready.version;
    }

    /// Takes what the core says, but for the port spaces: those come from the ledger.
    pub(crate) fn take_overview(&mut self, overview: &Overview) {
        self.globals = overview.globals;
        self.known_spaces = overview.known_spaces;
        let alerts = overview.alerts.iter();
        self.alerts = alerts
            .map(|a| (a.finding.verdict, a.finding.severity, a.state))
            .collect();
        self.muted = overview.muted.len() as u64;
        self.look_alikes = overview.look_alikes.iter().map(|f| f.verdict).collect();
        self.egress = egress(&overview.egress);
    }

    fn listed(&self) -> impl Iterator<Item = (&SpaceView, &SpaceReport)> {
        self.spaces
            .iter()
            .filter_map(|s| Some((s, s.report.as_ref()?)))
    }
}

/// The destinations that take most, and of each group the sum of all others.
fn egress(uses: &[(PortSpaceKey, EgressUse)]) -> Vec<(String, Option<PortSpaceKey>, EgressUse)> {
    let mut uses: Vec<_> = uses.iter().collect();
    uses.sort_by_key(|(key, taken)| Reverse((taken.in_use.saturating_add(taken.held), *key)));
    let others = uses.split_off(uses.len().min(MAX_EXPORTED));
    let mut rest: BTreeMap<&str, EgressUse> = BTreeMap::new();
    for (_, taken) in others {
        let sum = rest.entry(&taken.group).or_default();
        sum.in_use = sum.in_use.saturating_add(taken.in_use);
        sum.held = sum.held.saturating_add(taken.held);
    }
    let named = uses.into_iter();
    let named = named.map(|(key, taken)| (taken.group.clone(), Some(*key), taken.clone()));
    let rest = rest.into_iter();
    named
        .chain(rest.map(|(group, sum)| (group.to_owned(), None, sum)))
        .collect()
}

impl SpaceView {
    fn point(&self) -> Point {
        Point::from_u8(self.key.point)
    }

    fn attributes(&self, part: Option<KeyValue>) -> Vec<KeyValue> {
        space_attributes(&self.key)
            .into_iter()
            .chain(part)
            .collect()
    }
}

/// The attributes that name a port space.
pub(crate) fn space_attributes(key: &PortSpaceKey) -> Vec<KeyValue> {
    let mut attributes = vec![
        KeyValue::new(attribute::CLIENT_ADDRESS, ip(&key.initiator).to_string()),
        KeyValue::new(attribute::SERVER_ADDRESS, ip(&key.responder).to_string()),
        KeyValue::new(attribute::SERVER_PORT, i64::from(key.responder_port)),
        KeyValue::new(attribute::ROLE, role_name(Role::from_u8(key.role))),
        KeyValue::new(attribute::POINT, point_name(Point::from_u8(key.point))),
    ];
    if key.netns != 0 {
        attributes.push(KeyValue::new(attribute::NETNS, i64::from(key.netns)));
    }
    attributes
}
