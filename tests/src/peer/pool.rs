//! `pool`: the same requests over connections that are kept.

use std::collections::BTreeSet;
use std::io::{self, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::Result;
use socket2::Socket;

use super::Pace;
use super::client::{After, exchange, request, response};
use super::socket::{self, Open};
use crate::config::PoolConfig;
use crate::report::PoolReport;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
struct Counts {
    next: AtomicU64,
    requests: AtomicU64,
    ok: AtomicU64,
    failed: AtomicU64,
    connections: AtomicU64,
    failed_ports: Mutex<BTreeSet<u16>>,
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
        failed_ports: counts
            .failed_ports
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner),
    })
}

/// A request and its response.
fn ask(socket: &Socket, config: &PoolConfig) -> io::Result<()> {
    let timeout = Duration::from_millis(config.timeout_ms);
    if config.upload > 0 {
        // A field of the head, so that the server needs to know nothing of it.
        let long = format!("X-Long: {}\r\n\r\n", "x".repeat(config.upload));
        let request = request(After::More);
        let head = request.strip_suffix("\r\n").unwrap_or(&request);
        socket.set_write_timeout(Some(timeout))?;
        let mut stream = socket;
        stream.write_all(head.as_bytes())?;
        stream.write_all(long.as_bytes())?;
        return response(socket, After::More, timeout);
    }
    exchange(socket, After::More, timeout)
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
                timeout: CONNECT_TIMEOUT,
            };
            connection = socket::open(open).result.ok();
            counts
                .connections
                .fetch_add(u64::from(connection.is_some()), Ordering::Relaxed);
        }
        let answered = connection
            .as_ref()
            .is_some_and(|socket| ask(socket, config).is_ok());
        if answered {
            counts.ok.fetch_add(1, Ordering::Relaxed);
        } else {
            counts.failed.fetch_add(1, Ordering::Relaxed);
            let socket = connection.take();
            let local = socket.and_then(|socket| socket.local_addr().ok()?.as_socket());
            if let Some(local) = local {
                let mut ports = counts
                    .failed_ports
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner);
                ports.insert(local.port());
            }
        }
    }
}
