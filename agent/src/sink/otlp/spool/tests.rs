use opentelemetry::logs::{AnyValue, LogRecord as _, Logger as _, LoggerProvider as _};
use opentelemetry_sdk::logs::SdkLoggerProvider;

use super::*;

/// A receiver that is away as often as it is told, and remembers what it took.
#[derive(Debug, Clone, Default)]
struct Receiver {
    away: Arc<AtomicU64>,
    taken: Arc<Mutex<Vec<String>>>,
    resource: Arc<Mutex<Option<Resource>>>,
}

impl LogExporter for Receiver {
    async fn export(&self, batch: LogBatch<'_>) -> OTelSdkResult {
        let less = |n: u64| n.checked_sub(1);
        if self
            .away
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less)
            .is_ok()
        {
            return Err(OTelSdkError::InternalFailure("away".into()));
        }
        for (record, _) in batch.iter() {
            let Some(AnyValue::String(body)) = record.body() else {
                panic!("no body")
            };
            lock(&self.taken).push(body.to_string());
        }
        Ok(())
    }

    fn set_resource(&mut self, resource: &Resource) {
        *lock(&self.resource) = Some(resource.clone());
    }
}

fn provider(receiver: &Receiver, capacity: usize) -> (SdkLoggerProvider, Arc<Counts>) {
    let counts = Arc::default();
    let spool = Spool::new(receiver.clone(), capacity, Arc::clone(&counts)).unwrap();
    (
        SdkLoggerProvider::builder()
            .with_log_processor(spool)
            .build(),
        counts,
    )
}

fn emit(provider: &SdkLoggerProvider, body: &'static str) {
    let logger = provider.logger("test");
    let mut record = logger.create_log_record();
    record.set_body(body.into());
    logger.emit(record);
}

#[test]
fn what_could_not_be_sent_is_sent_again_in_order() {
    let receiver = Receiver::default();
    receiver.away.store(2, Ordering::Relaxed);
    let (provider, counts) = provider(&receiver, 10);
    emit(&provider, "one");
    emit(&provider, "two");
    let end = Instant::now() + Duration::from_secs(10);
    while counts.waiting.load(Ordering::Relaxed) > 0 {
        assert!(Instant::now() < end, "still waiting");
        thread::sleep(Duration::from_millis(10));
    }
    emit(&provider, "three");
    provider.force_flush().unwrap();
    assert_eq!(*lock(&receiver.taken), ["one", "two", "three"]);
    assert_eq!(counts.failed.load(Ordering::Relaxed), 2);
    assert_eq!(counts.dropped.load(Ordering::Relaxed), 0);
    assert!(lock(&receiver.resource).is_some());
    provider.shutdown().unwrap();
}

#[test]
fn the_oldest_are_dropped_and_counted_when_there_are_too_many() {
    let receiver = Receiver::default();
    receiver.away.store(u64::MAX, Ordering::Relaxed);
    let (provider, counts) = provider(&receiver, 3);
    for body in ["1", "2", "3", "4", "5"] {
        emit(&provider, body);
    }
    assert!(provider.force_flush().is_err(), "the receiver is away");
    receiver.away.store(0, Ordering::Relaxed);
    provider.shutdown().unwrap();
    let taken = lock(&receiver.taken);
    assert_eq!(taken.last().map(String::as_str), Some("5"), "{taken:?}");
    assert_eq!(
        taken.len() as u64 + counts.dropped.load(Ordering::Relaxed),
        5,
        "{taken:?}"
    );
    assert!(
        taken.len() <= 4,
        "three, and those that were under way: {taken:?}"
    );
}

#[test]
fn the_end_does_not_wait_for_a_receiver_that_is_away() {
    let receiver = Receiver::default();
    receiver.away.store(u64::MAX, Ordering::Relaxed);
    let (provider, counts) = provider(&receiver, 10);
    emit(&provider, "one");
    let begin = Instant::now();
    let result = provider.shutdown_with_timeout(Duration::from_secs(1));
    assert!(result.is_err(), "one record was not sent");
    assert!(
        begin.elapsed() < Duration::from_secs(3),
        "{:?}",
        begin.elapsed()
    );
    assert_eq!(counts.waiting.load(Ordering::Relaxed), 1);
}

#[test]
fn the_end_sends_what_is_there() {
    let receiver = Receiver::default();
    let (provider, _) = provider(&receiver, 1000);
    for _ in 0..600 {
        emit(&provider, "x");
    }
    provider.shutdown().unwrap();
    assert_eq!(lock(&receiver.taken).len(), 600);
}
