//! Log records that wait until the receiver takes them.
//!
//! The SDK's own batch processor drops a batch that could not be sent. Here it stays in a bounded
//! queue and is sent again, at growing intervals, until the receiver has it.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use opentelemetry::InstrumentationScope;
use opentelemetry_sdk::{
    Resource,
    error::{OTelSdkError, OTelSdkResult},
    logs::{LogBatch, LogExporter, LogProcessor, SdkLogRecord},
};
use tracing::{error, info, warn};

/// Records in one request.
const BATCH: usize = 256;
/// First and longest time between two attempts.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(10));

type Record = (SdkLogRecord, InstrumentationScope);

/// What is known about the queue from outside.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) waiting: AtomicU64,
    pub(super) dropped: AtomicU64,
    pub(super) failed: AtomicU64,
}

/// A log processor that keeps what it could not send.
#[derive(Debug)]
pub(super) struct Spool<E> {
    shared: Arc<Shared<E>>,
    sender: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared<E> {
    exporter: Mutex<E>,
    queue: Mutex<Queue>,
    changed: Condvar,
    capacity: usize,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Queue {
    records: VecDeque<Record>,
    /// Taken out to be sent; they count as waiting.
    in_flight: usize,
    closing: Option<Instant>,
    /// The latest attempt failed.
    away: bool,
}

impl<E: LogExporter + 'static> Spool<E> {
    /// Sends with `exporter` and keeps at most `capacity` records.
    pub(super) fn new(exporter: E, capacity: usize, counts: Arc<Counts>) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            exporter: Mutex::new(exporter),
            queue: Mutex::default(),
            changed: Condvar::new(),
            capacity,
            counts,
        });
        let sender = Arc::clone(&shared);
        let thread = thread::Builder::new().name("otlp-alerts".to_owned());
        let sender = thread.spawn(move || sender.run())?;
        Ok(Self {
            shared,
            sender: Mutex::new(Some(sender)),
        })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change below is complete at each point where it could panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<E: LogExporter> Shared<E> {
    fn run(&self) {
        let mut backoff = BACKOFF.0;
        while let Some(batch) = self.next() {
            let refs: Vec<_> = batch
                .iter()
                .map(|(record, scope)| (record, scope))
                .collect();
            let result = {
                let exporter = lock(&self.exporter);
                futures_executor::block_on(exporter.export(LogBatch::new(&refs)))
            };
            let mut queue = lock(&self.queue);
            queue.in_flight = 0;
            match result {
                Ok(()) => {
                    backoff = BACKOFF.0;
                    if std::mem::take(&mut queue.away) {
                        info!(
                            waiting = queue.records.len(),
                            "the OTLP receiver takes alerts again"
                        );
                    }
                    self.note(&queue);
                }
                Err(error) => {
                    self.counts.failed.fetch_add(1, Ordering::Relaxed);
                    for record in batch.into_iter().rev() {
                        queue.records.push_front(record);
                    }
                    self.bound(&mut queue);
                    if !std::mem::replace(&mut queue.away, true) {
                        let waiting = queue.records.len();
                        warn!(%error, waiting, "the OTLP receiver does not take alerts; they are kept");
                    }
                    if queue
                        .closing
                        .is_some_and(|end| Instant::now() + backoff >= end)
                    {
                        break;
                    }
                    self.changed.notify_all();
                    self.pause(queue, backoff);
                    backoff = (backoff * 2).min(BACKOFF.1);
                }
            }
            self.changed.notify_all();
        }
        let lost = lock(&self.queue).records.len();
        if lost > 0 {
            error!(
                lost,
                "the agent ends, and the OTLP receiver did not take these log records"
            );
        }
        let _ = lock(&self.exporter).shutdown();
    }

    /// Waits for records; none if the queue is closed and empty.
    fn next(&self) -> Option<Vec<Record>> {
        let mut queue = lock(&self.queue);
        while queue.records.is_empty() {
            if queue.closing.is_some() {
                return None;
            }
            queue = self
                .changed
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
        }
        let size = queue.records.len().min(BATCH);
        queue.in_flight = size;
        Some(queue.records.drain(..size).collect())
    }

    /// Waits for `time`, or until the queue is closed.
    fn pause(&self, mut queue: MutexGuard<'_, Queue>, time: Duration) {
        let end = Instant::now() + time;
        let was_closing = queue.closing.is_some();
        while queue.closing.is_some() == was_closing {
            let Some(left) = end.checked_duration_since(Instant::now()) else {
                return;
            };
            let waited = self.changed.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Drops the oldest where there are too many.
    fn bound(&self, queue: &mut Queue) {
        let excess = (queue.records.len() + queue.in_flight).saturating_sub(self.capacity);
        let excess = excess.min(queue.records.len());
        if excess > 0 {
            queue.records.drain(..excess);
            self.counts
                .dropped
                .fetch_add(excess as u64, Ordering::Relaxed);
        }
        self.note(queue);
    }

    fn note(&self, queue: &Queue) {
        let waiting = queue.records.len() + queue.in_flight;
        self.counts.waiting.store(waiting as u64, Ordering::Relaxed);
    }
}

impl<E: LogExporter + 'static> LogProcessor for Spool<E> {
    fn emit(&self, record: &mut SdkLogRecord, scope: &InstrumentationScope) {
        let mut queue = lock(&self.shared.queue);
        if queue.closing.is_some() {
            return;
        }
        queue.records.push_back((record.clone(), scope.clone()));
        self.shared.bound(&mut queue);
        self.shared.changed.notify_all();
    }

    /// Waits until everything was sent, or an attempt failed.
    fn force_flush(&self) -> OTelSdkResult {
        let mut queue = lock(&self.shared.queue);
        let end = Instant::now() + Duration::from_secs(5);
        while !queue.records.is_empty() || queue.in_flight > 0 {
            if queue.away {
                return Err(OTelSdkError::InternalFailure(
                    "the receiver is away".to_owned(),
                ));
            }
            let Some(left) = end.checked_duration_since(Instant::now()) else {
                return Err(OTelSdkError::Timeout(Duration::from_secs(5)));
            };
            let waited = self.shared.changed.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// Tries to send everything until `timeout`.
    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        lock(&self.shared.queue)
            .closing
            .get_or_insert(Instant::now() + timeout);
        self.shared.changed.notify_all();
        let Some(sender) = lock(&self.sender).take() else {
            return Ok(());
        };
        // One request may take longer; the process need not wait for it.
        let end = Instant::now() + timeout + Duration::from_secs(1);
        while !sender.is_finished() {
            if Instant::now() >= end {
                return Err(OTelSdkError::Timeout(timeout));
            }
            thread::sleep(Duration::from_millis(5));
        }
        let _ = sender.join();
        match lock(&self.shared.queue).records.len() {
            0 => Ok(()),
            n => Err(OTelSdkError::InternalFailure(format!(
                "{n} log records were not sent"
            ))),
        }
    }

    fn set_resource(&mut self, resource: &Resource) {
        lock(&self.shared.exporter).set_resource(resource);
    }
}

#[cfg(test)]
mod tests;
