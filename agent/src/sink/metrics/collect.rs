//! The values of a metric at one moment.

use opentelemetry::KeyValue;
use tuplewatch_common::{
    address::{Point, PortSpaceKey, Role},
    histogram::Histogram as Counts,
    record::Global,
};

use super::{Metric, Source, Which, attribute};
use crate::{
    core::{
        alert::State,
        finding::{Severity, Verdict},
        observation::{ip, point_name, role_name},
        report::{SpaceReport, Totals},
    },
    sink::HookStatus,
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
    pub(crate) hooks: Vec<(String, HookStatus)>,
    pub(crate) memory_bytes: u64,
    pub(crate) version: &'static str,
    pub(crate) delivery: Delivery,
}

/// How the export itself fares.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Delivery {
    pub(crate) metrics_failed: u64,
    pub(crate) logs_failed: u64,
    pub(crate) logs_waiting: u64,
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
        Source::Ratio(get) => {
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
    fn listed(&self) -> impl Iterator<Item = (&SpaceView, &SpaceReport)> {
        self.spaces
            .iter()
            .filter_map(|s| Some((s, s.report.as_ref()?)))
    }
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
