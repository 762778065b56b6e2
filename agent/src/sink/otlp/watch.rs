//! An exporter of metrics whose failures are counted, and told once per outage.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use opentelemetry_sdk::{
    error::OTelSdkResult,
    metrics::{Temporality, data::ResourceMetrics, exporter::PushMetricExporter},
};
use tracing::{info, warn};

/// Failed exports.
#[derive(Debug, Default)]
pub(super) struct Failures {
    count: AtomicU64,
    away: AtomicBool,
}

impl Failures {
    pub(super) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}

/// Passes everything on to the exporter `E`.
pub(super) struct Watched<E> {
    exporter: E,
    failures: Arc<Failures>,
}

impl<E> Watched<E> {
    pub(super) const fn new(exporter: E, failures: Arc<Failures>) -> Self {
        Self { exporter, failures }
    }
}

impl<E: PushMetricExporter> PushMetricExporter for Watched<E> {
    async fn export(&self, metrics: &ResourceMetrics) -> OTelSdkResult {
        let result = self.exporter.export(metrics).await;
        let was_away = self.failures.away.swap(result.is_err(), Ordering::Relaxed);
        match &result {
            Ok(()) if was_away => info!("the OTLP receiver takes metrics again"),
            Ok(()) => {}
            Err(error) => {
                self.failures.count.fetch_add(1, Ordering::Relaxed);
                if !was_away {
                    warn!(%error, "the OTLP receiver does not take metrics");
                }
            }
        }
        result
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn temporality(&self) -> Temporality {
        self.exporter.temporality()
    }
}
