//! OTLP: metrics and log records to a receiver, off unless an endpoint is set.
//!
//! Metrics are observable instruments: at each export the SDK asks for the values, which all come
//! from one view of the latest overview. Alerts become log records and wait in a spool for as
//! long as the receiver is away.

use std::{
    collections::HashSet,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering},
    time::Duration,
};

use opentelemetry::{
    InstrumentationScope,
    logs::{Logger as _, LoggerProvider as _},
    metrics::{AsyncInstrument, Meter, MeterProvider as _},
};
use opentelemetry_sdk::{
    logs::{SdkLogger, SdkLoggerProvider},
    metrics::{PeriodicReader, SdkMeterProvider, Stream, Temporality},
};
use tracing::warn;

use super::{
    Ready, Sink, WallClock,
    metrics::{Delivery, Kind, Ledger, MAX_EXPORTED, METRICS, Metric, Number, View, collect},
    otlp_logs,
};
use crate::core::{
    report::{Change, Overview},
    time::Moment,
};

mod reach;
mod resource;
mod settings;
mod spool;
mod transport;
mod watch;

pub use opentelemetry_sdk::metrics::Temporality as MetricTemporality;
pub use reach::{Reached, reach};
pub use settings::{OtlpConfig, OtlpError, Protocol};

use settings::Settings;
use spool::{Counts, Spool};
use watch::Watched;

/// Log records that wait for the receiver; more are dropped, oldest first, and counted.
const KEPT: usize = 10_000;
/// Directives for the log filter of whoever sets up `tracing`: the crates call data lost that is kept
/// here, at each attempt; what matters is told once per outage by this module.
pub const LOG_FILTER: &str = "opentelemetry-otlp=off,opentelemetry_sdk=off";
/// Time to hand over what is left at the end.
const CLOSE: Duration = Duration::from_secs(3);
/// Most series of one metric: every port space in each of the buckets of a histogram, and some.
const SERIES: usize = MAX_EXPORTED * tuplewatch_common::histogram::BUCKETS + 64;

/// Sends metrics and alerts by OTLP.
pub struct Otlp {
    clock: WallClock,
    deliveries: Deliveries,
    state: Arc<Mutex<Shared>>,
    meters: Option<SdkMeterProvider>,
    loggers: Option<(SdkLoggerProvider, SdkLogger)>,
}

/// What the thread that exports reads.
struct Shared {
    ledger: Ledger,
    latest: View,
    /// What the export under way takes its values from, and the metrics that have taken them.
    current: Arc<View>,
    asked: HashSet<usize>,
    deliveries: Deliveries,
}

/// How the exports fare, for whoever wants to tell it. Clones share their state.
#[derive(Clone, Debug, Default)]
pub struct Deliveries {
    metrics: Arc<watch::Failures>,
    logs: Arc<Counts>,
}

impl Deliveries {
    pub(super) fn now(&self) -> Delivery {
        Delivery {
            metrics_failed: self.metrics.count(),
            logs_failed: self.logs.failed.load(Ordering::Relaxed),
            logs_waiting: self.logs.waiting.load(Ordering::Relaxed),
            logs_dropped: self.logs.dropped.load(Ordering::Relaxed),
        }
    }
}

/// What is known about who sends, as name and value: the resource attributes but for those that
/// describe the OTLP library.
pub(super) fn resource_attributes(version: &'static str) -> Vec<(String, String)> {
    let resource = resource::resource(version);
    let mut attributes: Vec<_> = resource
        .iter()
        .filter(|(name, _)| !name.as_str().starts_with("telemetry."))
        .map(|(name, value)| (name.to_string(), value.to_string()))
        .collect();
    attributes.sort();
    attributes
}

impl Otlp {
    /// Sets up what the options and the environment ask for; nothing if no endpoint is set.
    ///
    /// It must be called within a multi-threaded tokio runtime, which carries gRPC. `version` is
    /// the agent's.
    ///
    /// # Errors
    /// A variable, option or file is wrong. A receiver that is away is no error.
    pub fn start(
        config: &OtlpConfig,
        clock: WallClock,
        version: &'static str,
    ) -> Result<Option<Self>, OtlpError> {
        let settings = Settings::resolve(config, &|name| std::env::var(name).ok())?;
        if settings.metrics.is_none() && settings.logs.is_none() {
            return Ok(None);
        }
        // The TLS library asks for a choice; whoever chose first is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let resource = resource::resource(version);
        let deliveries = Deliveries::default();
        let state = Arc::new(Mutex::new(Shared {
            ledger: Ledger::new(settings.temporality == Temporality::Delta),
            latest: View {
                version,
                ..View::default()
            },
            current: Arc::default(),
            asked: HashSet::new(),
            deliveries: deliveries.clone(),
        }));

        let meters = match &settings.metrics {
            None => None,
            Some(target) => {
                let exporter = transport::metrics(target, settings.temporality, settings.interval)?;
                let failures = Arc::clone(&deliveries.metrics);
                let reader = PeriodicReader::builder(Watched::new(exporter, failures))
                    .with_interval(settings.interval)
                    .build();
                let provider = SdkMeterProvider::builder()
                    .with_reader(reader)
                    .with_resource(resource.clone())
                    .with_view(|_: &_| {
                        Stream::builder()
                            .with_cardinality_limit(SERIES)
                            .build()
                            .ok()
                    })
                    .build();
                let meter = provider.meter_with_scope(scope(version));
                for (index, metric) in METRICS.iter().enumerate() {
                    instrument(&meter, index, metric, &state);
                }
                Some(provider)
            }
        };
        let loggers = match &settings.logs {
            None => None,
            Some(target) => {
                let counts = Arc::clone(&deliveries.logs);
                let exporter = transport::logs(target)?;
                let spool =
                    Spool::new(exporter, KEPT, counts).map_err(|error| OtlpError::Exporter {
                        signal: target.signal.name(),
                        endpoint: target.endpoint.clone(),
                        problem: format!("cannot start a thread: {error}"),
                    })?;
                let provider = SdkLoggerProvider::builder()
                    .with_log_processor(spool)
                    .with_resource(resource)
                    .build();
                let logger = provider.logger_with_scope(scope(version));
                Some((provider, logger))
            }
        };
        Ok(Some(Self {
            clock,
            deliveries,
            state,
            meters,
            loggers,
        }))
    }

    /// How the exports fare.
    #[must_use]
    pub fn deliveries(&self) -> Deliveries {
        self.deliveries.clone()
    }
}

fn scope(version: &'static str) -> InstrumentationScope {
    InstrumentationScope::builder("tuplewatch")
        .with_version(version)
        .build()
}

fn lock(state: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    // A panic in between leaves old figures, which the next overview replaces.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// What the metric `index` is to take its values from: the same for all metrics of an export.
    fn view(&mut self, index: usize) -> Arc<View> {
        // The SDK does not tell when an export begins; a metric that is asked again does.
        if self.asked.is_empty() || !self.asked.insert(index) {
            self.asked.clear();
            self.asked.insert(index);
            let mut view = self.latest.clone();
            self.ledger.export(&mut view);
            view.delivery = self.deliveries.now();
            self.current = Arc::new(view);
        }
        Arc::clone(&self.current)
    }
}

/// Makes the instrument of one metric.
fn instrument(meter: &Meter, index: usize, metric: &'static Metric, state: &Arc<Mutex<Shared>>) {
    /// Observes the values of the metric, as the type that the instrument has.
    fn observe<T: 'static>(
        state: &Arc<Mutex<Shared>>,
        index: usize,
        convert: fn(Number) -> T,
    ) -> impl Fn(&dyn AsyncInstrument<T>) + Send + Sync + 'static {
        let state = Arc::clone(state);
        move |instrument| {
            let view = lock(&state).view(index);
            collect(&METRICS[index], &view, &mut |value, attributes| {
                instrument.observe(convert(value), attributes);
            });
        }
    }
    let int = |number| match number {
        Number::Int(value) => value,
        Number::Float(value) => value as u64,
    };
    let signed = |number| match number {
        Number::Int(value) => i64::try_from(value).unwrap_or(i64::MAX),
        Number::Float(value) => value as i64,
    };
    let float = |number| match number {
        Number::Int(value) => value as f64,
        Number::Float(value) => value,
    };
    let (name, unit, text) = (metric.name, metric.unit, metric.description);
    match metric.kind {
        Kind::Counter => {
            let builder = meter
                .u64_observable_counter(name)
                .with_unit(unit)
                .with_description(text);
            builder.with_callback(observe(state, index, int)).build();
        }
        Kind::UpDownCounter => {
            let builder = meter.i64_observable_up_down_counter(name);
            let builder = builder.with_unit(unit).with_description(text);
            builder.with_callback(observe(state, index, signed)).build();
        }
        Kind::Gauge if metric.is_real() => {
            let builder = meter
                .f64_observable_gauge(name)
                .with_unit(unit)
                .with_description(text);
            builder.with_callback(observe(state, index, float)).build();
        }
        Kind::Gauge => {
            let builder = meter
                .u64_observable_gauge(name)
                .with_unit(unit)
                .with_description(text);
            builder.with_callback(observe(state, index, int)).build();
        }
        // The SDK has no observable histogram: see docs/metrics.md.
        Kind::Histogram => {
            let builder = meter.u64_observable_counter(format!("{name}.bucket"));
            let builder = builder.with_unit("{observation}").with_description(text);
            builder.with_callback(observe(state, index, int)).build();
        }
    }
}

impl Sink for Otlp {
    fn ready(&mut self, _: Moment, ready: &Ready) -> io::Result<()> {
        lock(&self.state).latest.take_ready(ready);
        Ok(())
    }

    fn changes(&mut self, now: Moment, changes: &[Change]) -> io::Result<()> {
        let Some((_, logger)) = &self.loggers else {
            return Ok(());
        };
        for change in changes {
            let mut record = logger.create_log_record();
            match change {
                Change::Alert(alert) => otlp_logs::alert(&mut record, alert, &self.clock),
                Change::LookAlike { finding, ended } => {
                    otlp_logs::look_alike(&mut record, finding, *ended, now, &self.clock);
                }
            }
            logger.emit(record);
        }
        Ok(())
    }

    fn overview(&mut self, overview: &Overview) -> io::Result<()> {
        let mut state = lock(&self.state);
        state.ledger.update(overview);
        state.latest.take_overview(overview);
        Ok(())
    }

    /// Sends what is left, for some seconds at most. It blocks: with gRPC the runtime must have
    /// another thread to go on (`tokio::task::spawn_blocking` or `block_in_place`).
    fn close(&mut self) -> io::Result<()> {
        if let Some((loggers, _)) = self.loggers.take()
            && let Err(error) = loggers.shutdown_with_timeout(CLOSE)
        {
            warn!(%error, "the last alerts could not be sent by OTLP");
        }
        if let Some(meters) = self.meters.take()
            && let Err(error) = meters.shutdown_with_timeout(CLOSE)
        {
            warn!(%error, "the last metrics could not be sent by OTLP");
        }
        Ok(())
    }
}
