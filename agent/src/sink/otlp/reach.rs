//! Whether the receiver can be reached: a request without any data, by the exporters of a run.

use std::{
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use opentelemetry_sdk::{
    error::OTelSdkResult,
    logs::{LogBatch, LogExporter as _},
    metrics::{data::ResourceMetrics, exporter::PushMetricExporter as _},
};
use tokio::runtime::Handle;

use super::{
    OtlpConfig, OtlpError,
    settings::{Settings, Signal, Target},
    transport,
};

/// What one of the receivers said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reached {
    /// `metrics` or `logs`.
    pub signal: &'static str,
    /// The receiver.
    pub endpoint: String,
    /// `grpc` or `http/protobuf`.
    pub protocol: String,
    /// How long it took, or what went wrong.
    pub answer: Result<Duration, String>,
}

/// Asks each receiver that is configured, all at the same time, for `limit` at most. Empty if none is
/// configured. It must not be called from within the multi-threaded runtime that it is given.
///
/// # Errors
/// A variable, option or file is wrong.
pub fn reach(
    config: &OtlpConfig,
    limit: Duration,
    runtime: &Handle,
) -> Result<Vec<Reached>, OtlpError> {
    let settings = Settings::resolve(config, &|name| std::env::var(name).ok())?;
    // Whoever chose first is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut waiting = Vec::new();
    for target in [&settings.metrics, &settings.logs].into_iter().flatten() {
        let (done, answer) = mpsc::channel();
        let request = request(target, &settings)?;
        let runtime = runtime.clone();
        let started = Instant::now();
        // It may outlast the limit: nobody waits for it then.
        thread::spawn(move || {
            let _inside = runtime.enter();
            let result = request();
            let _ = done.send((result, started.elapsed()));
        });
        waiting.push((target, started, answer));
    }
    let reached = waiting.into_iter().map(|(target, started, answer)| {
        let left = limit.saturating_sub(started.elapsed());
        let answer = match answer.recv_timeout(left) {
            Ok((Ok(()), took)) => Ok(took),
            Ok((Err(error), _)) => Err(error.to_string()),
            Err(_) => Err(format!("no answer within {} s", limit.as_secs())),
        };
        Reached {
            signal: target.signal.name(),
            endpoint: target.endpoint.clone(),
            protocol: target.protocol.to_string(),
            answer,
        }
    });
    Ok(reached.collect())
}

type Request = Box<dyn FnOnce() -> OTelSdkResult + Send>;

fn request(target: &Target, settings: &Settings) -> Result<Request, OtlpError> {
    Ok(match target.signal {
        Signal::Metrics => {
            // Nothing is lost that would have to be tried again.
            let temporality = opentelemetry_sdk::metrics::Temporality::Cumulative;
            let exporter = transport::metrics(target, temporality, settings.interval)?;
            Box::new(move || {
                futures_executor::block_on(exporter.export(&ResourceMetrics::default()))
            })
        }
        Signal::Logs => {
            let exporter = transport::logs(target)?;
            Box::new(move || futures_executor::block_on(exporter.export(LogBatch::new(&[]))))
        }
    })
}
