//! The receiver: rotel, an independent OTLP implementation, and what it prints of what it got.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use tempfile::TempDir;
use tuplewatch_tests::prelude::*;

use crate::support::SECOND;

/// Names and values as rotel prints them, with the type: `Str(responder)`, `Int(8080)`.
pub type Attributes = BTreeMap<String, String>;

/// A log record.
#[derive(Debug, Clone, Default)]
pub struct Record {
    pub resource: Attributes,
    pub event: String,
    pub severity: String,
    /// Nanoseconds since 1970.
    pub timestamp: u64,
    pub body: String,
    pub attributes: Attributes,
}

/// A metric in one export.
#[derive(Debug, Clone, Default)]
pub struct Metric {
    pub resource: Attributes,
    pub scope: String,
    pub name: String,
    pub unit: String,
    /// `Sum`, `Gauge` …
    pub data_type: String,
    pub is_monotonic: bool,
    pub temporality: String,
    pub points: Vec<Point>,
}

/// A value of a metric.
#[derive(Debug, Clone, Default)]
pub struct Point {
    pub attributes: Attributes,
    pub start: String,
    pub value: String,
}

/// Everything that arrived, in order.
#[derive(Debug, Clone, Default)]
pub struct Received {
    pub records: Vec<Record>,
    pub metrics: Vec<Metric>,
}

impl Record {
    /// An attribute as rotel prints it; empty if there is none.
    pub fn get(&self, name: &str) -> &str {
        self.attributes.get(name).map_or("", String::as_str)
    }

    /// Whether it tells of the reuse in TIME_WAIT, in this state.
    pub fn is_reuse(&self, state: &str) -> bool {
        self.event == "tuplewatch.alert"
            && self.get("tuplewatch.cause") == "Str(l4_reuse_in_time_wait)"
            && self.get("tuplewatch.alert.state") == format!("Str({state})")
    }
}

impl Received {
    /// The last export of a metric.
    pub fn last(&self, name: &str) -> Result<&Metric> {
        let found = self.metrics.iter().rfind(|metric| metric.name == name);
        found.with_context(|| format!("no metric {name} arrived"))
    }
}

impl Metric {
    /// The value of the one point that has exactly these attributes.
    pub fn value(&self, attributes: &Attributes) -> Result<u64> {
        let mut found = self.points.iter().filter(|p| p.attributes == *attributes);
        let point = found.next().with_context(|| {
            format!("{}: no point {attributes:?}: {:#?}", self.name, self.points)
        })?;
        ensure!(
            found.next().is_none(),
            "{}: two points {attributes:?}",
            self.name
        );
        let value = point.value.parse();
        value.with_context(|| format!("{}: value {:?}", self.name, point.value))
    }
}

/// A running receiver: gRPC on port 4317, HTTP on port 4318 of its host's loopback address.
pub struct Receiver {
    process: Proc,
    _files: TempDir,
}

impl Receiver {
    /// Where it listens, for the option `--otlp-endpoint`.
    pub fn endpoint(protocol: &str) -> &'static str {
        match protocol {
            "grpc" => "http://127.0.0.1:4317",
            _ => "http://127.0.0.1:4318",
        }
    }

    /// Starts it and waits until it listens on both ports.
    pub fn start(host: &Host) -> Result<Self> {
        let files = tempfile::tempdir()?;
        let mut command = Command::new(program()?);
        command
            .env_clear()
            .arg("start")
            .args(["--otlp-grpc-endpoint", "127.0.0.1:4317"])
            .args(["--otlp-http-endpoint", "127.0.0.1:4318"])
            .args(["--debug-log", "metrics", "--debug-log", "logs"])
            .args(["--debug-log-verbosity", "detailed"])
            .args(["--exporter", "blackhole"])
            .arg("--pid-file")
            .arg(files.path().join("pid"))
            .arg("--log-file")
            .arg(files.path().join("log"));
        let process = host.spawn("rotel", command)?;
        let listens = || {
            host.tcp_states().is_ok_and(|table| {
                let ports = |port| table.in_state("LISTEN").any(|row| row.local.port() == port);
                ports(4317) && ports(4318)
            })
        };
        ensure!(
            wait_for(10 * SECOND, listens),
            "rotel does not listen: {}",
            process.describe()
        );
        Ok(Self {
            process,
            _files: files,
        })
    }

    /// What arrived so far; the last item may be cut.
    pub fn received(&self) -> Received {
        parse(&self.process.stdout())
    }

    /// Waits for a log record that `wanted` accepts.
    pub fn wait_record(
        &self,
        timeout: Duration,
        wanted: impl Fn(&Record) -> bool,
    ) -> Result<Record> {
        let found = wait_some(timeout, || {
            std::thread::sleep(SECOND / 4);
            self.received().records.into_iter().find(|r| wanted(r))
        });
        found.with_context(|| format!("no such record: {}", self.process.describe()))
    }

    /// Ends the receiver and gives everything that arrived.
    pub fn stop(self) -> Result<Received> {
        self.process.terminate(10 * SECOND)?;
        Ok(self.received())
    }
}

/// Where rotel is. Without it the tests fail: a receiver that is not there must not look like one
/// that got the right values.
fn program() -> Result<PathBuf> {
    const REMEDY: &str = "run `cargo xtask setup` and the tests by `cargo xtask test`, or set \
                          TUPLEWATCH_ROTEL to the path of rotel-agent";
    let path = std::env::var_os("TUPLEWATCH_ROTEL").filter(|path| !path.is_empty());
    let Some(path) = path.map(PathBuf::from) else {
        bail!("TUPLEWATCH_ROTEL does not tell where the OTLP receiver is; remedy: {REMEDY}");
    };
    ensure!(
        path.is_file(),
        "the OTLP receiver {} is missing; remedy: {REMEDY}",
        path.display()
    );
    Ok(path)
}

/// What the attributes that follow belong to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Section {
    None,
    Resource,
    Descriptor,
    Point,
    Record,
}

/// Reads rotel's detailed debug log.
fn parse(lines: &[String]) -> Received {
    let mut received = Received::default();
    let mut resource = Attributes::new();
    let mut scope = String::new();
    let mut section = Section::None;
    let mut is_log = false;
    for line in lines {
        if let Some(item) = line.strip_prefix("     -> ") {
            let (name, value) = item.split_once(": ").unwrap_or((item, ""));
            attribute(&mut received, &mut resource, section, name, value);
            continue;
        }
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        let metric = received.metrics.last_mut();
        let point = metric.and_then(|metric| metric.points.last_mut());
        let record = received.records.last_mut().filter(|_| is_log);
        match (word, point.filter(|_| !is_log), record) {
            ("ResourceMetrics" | "ResourceLog", ..) => {
                resource.clear();
                is_log = word == "ResourceLog";
                section = Section::None;
            }
            ("Resource", ..) if rest == "attributes:" => section = Section::Resource,
            ("InstrumentationScope", ..) => rest.clone_into(&mut scope),
            ("Metric", ..) => received.metrics.push(Metric {
                resource: resource.clone(),
                scope: scope.clone(),
                ..Metric::default()
            }),
            ("Descriptor:", ..) => section = Section::Descriptor,
            ("NumberDataPoints", ..) => {
                if let Some(metric) = received.metrics.last_mut() {
                    metric.points.push(Point::default());
                }
            }
            ("Data", ..) => section = Section::Point,
            ("StartTimestamp:", Some(point), _) => rest.clone_into(&mut point.start),
            ("Value:", Some(point), _) => rest.clone_into(&mut point.value),
            ("LogRecord", ..) => received.records.push(Record {
                resource: resource.clone(),
                ..Record::default()
            }),
            ("Attributes:", ..) => section = Section::Record,
            ("Timestamp:", _, Some(record)) => record.timestamp = rest.parse().unwrap_or(0),
            ("SeverityText:", _, Some(record)) => rest.clone_into(&mut record.severity),
            ("EventName:", _, Some(record)) => rest.clone_into(&mut record.event),
            ("Body:", _, Some(record)) => rest.clone_into(&mut record.body),
            _ => {}
        }
    }
    received
}

fn attribute(
    received: &mut Received,
    resource: &mut Attributes,
    section: Section,
    name: &str,
    value: &str,
) {
    let metric = received.metrics.last_mut();
    let attributes = match section {
        Section::None => return,
        Section::Resource => Some(resource),
        Section::Record => received.records.last_mut().map(|r| &mut r.attributes),
        Section::Point => metric
            .and_then(|m| m.points.last_mut())
            .map(|p| &mut p.attributes),
        Section::Descriptor => {
            let Some(metric) = metric else { return };
            match name {
                "Name" => value.clone_into(&mut metric.name),
                "Unit" => value.clone_into(&mut metric.unit),
                "DataType" => value.clone_into(&mut metric.data_type),
                "IsMonotonic" => metric.is_monotonic = value == "true",
                "AggregationTemporality" => value.clone_into(&mut metric.temporality),
                _ => {}
            }
            return;
        }
    };
    if let Some(attributes) = attributes {
        attributes.insert(name.to_owned(), value.to_owned());
    }
}
