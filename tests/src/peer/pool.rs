//! `pool`: the same requests over connections that are kept.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use socket2::Socket;

use super::Pace;
use super::client::{After, exchange};
use super::socket::{self, Open};
use crate::config::PoolConfig;
use crate::report::PoolReport;

const TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
struct Counts {
    next: AtomicU64,
    requests: AtomicU64,
    ok: AtomicU64,
    failed: AtomicU64,
    connections: AtomicU64,
}

pub(super) fn run(config: &PoolConfig) -> Result<PoolReport> {
    let counts = Counts::default();
    let pace = Pace::new(config.rate, config.seconds);
    std::thread::scope(|scope| {
        for _ in 0..config.connections.max(1) {
            scope.spawn(|| work(config, pace, &counts));
        }
    });
    Ok(PoolReport {
        pid: std::process::id(),
        requests: counts.requests.into_inner(),
        ok: counts.ok.into_inner(),
        failed: counts.failed.into_inner(),
        connections: counts.connections.into_inner(),
    })
}

/// One connection of the pool; opened when first needed, and again when it has failed.
fn work(config: &PoolConfig, pace: Pace, counts: &Counts) {
    let mut connection: Option<Socket> = None;
    loop {
        let index = counts.next.fetch_add(1, Ordering::Relaxed);
        if config.count.is_some_and(|count| index >= count) || !pace.reach(index) {
            return;
        }
        counts.requests.fetch_add(1, Ordering::Relaxed);
        if connection.is_none() {
            let open = Open {
                to: config.to,
                bind: None,
                isn: None,
                timeout: TIMEOUT,
            };
            connection = socket::open(open).result.ok();
            counts
                .connections
                .fetch_add(u64::from(connection.is_some()), Ordering::Relaxed);
        }
        let answered = connection
            .as_ref()
            .is_some_and(|socket| exchange(socket, After::More, TIMEOUT).is_ok());
        if answered {
            counts.ok.fetch_add(1, Ordering::Relaxed);
        } else {
            counts.failed.fetch_add(1, Ordering::Relaxed);
            connection = None;
        }
    }
}
