//! `load`: a new connection for each request.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Result, anyhow};

use super::client::{After, exchange};
use super::random::IsnSource;
use super::socket::{self, Open};
use super::{Pace, print, sleep_until};
use crate::config::LoadConfig;
use crate::report::{ConnectionEvent, Latency, LoadReport};

#[derive(Debug)]
struct Shared {
    config: LoadConfig,
    pace: Pace,
    isns: IsnSource,
    /// The next slot of the schedule.
    next: AtomicU64,
    report: Mutex<LoadReport>,
    connect_us: Mutex<Vec<u64>>,
}

pub(super) fn run(config: &LoadConfig) -> Result<LoadReport> {
    let shared = Arc::new(Shared {
        config: config.clone(),
        pace: Pace::new(config.rate, config.seconds),
        isns: IsnSource::new(config.isn),
        next: AtomicU64::new(0),
        report: Mutex::default(),
        connect_us: Mutex::default(),
    });
    let workers: Vec<_> = (0..config.concurrency.max(1))
        .map(|_| {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new()
                .stack_size(128 * 1024)
                .spawn(move || work(&shared))
        })
        .collect::<std::io::Result<_>>()?;
    for worker in workers {
        worker
            .join()
            .map_err(|_| anyhow!("a connecting thread panicked"))??;
    }
    let mut report = shared
        .report
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone();
    let mut connect_us = shared
        .connect_us
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    report.pid = std::process::id();
    report.connect = Latency::of(std::mem::take(&mut connect_us));
    report.seconds = shared.pace.start.elapsed().as_secs_f64();
    Ok(report)
}

/// Takes one slot after the other and makes its connection.
fn work(shared: &Shared) -> Result<()> {
    loop {
        let index = shared.next.fetch_add(1, Ordering::Relaxed);
        if shared.config.count.is_some_and(|count| index >= count) || !shared.pace.reach(index) {
            return Ok(());
        }
        connection(shared, index)?;
    }
}

fn connection(shared: &Shared, index: u64) -> Result<()> {
    let config = &shared.config;
    let opened = socket::open(Open {
        to: config.to,
        bind: bind_address(config, index),
        isn: shared.isns.next(),
        timeout: Duration::from_millis(config.connect_timeout_ms),
    });
    let connect_us = u64::try_from(opened.time.as_micros()).unwrap_or(u64::MAX);
    let connected = opened.result.is_ok();
    let outcome = match opened.result {
        Ok(socket) => {
            let timeout = Duration::from_millis(config.response_timeout_ms);
            let answered = exchange(&socket, After::Close, timeout).is_ok();
            if answered && config.hold_ms > 0 {
                sleep_until(std::time::Instant::now() + Duration::from_millis(config.hold_ms));
            }
            if answered {
                "ok".to_owned()
            } else {
                "response".to_owned()
            }
        }
        Err(kind) => kind,
    };
    let event = ConnectionEvent {
        kind: "connection".into(),
        local_port: opened.local_port,
        outcome,
        connect_us,
        syn_retransmits: opened.syn_retransmits,
    };
    if config.events {
        print(&event)?;
    }
    count(shared, event, connected);
    Ok(())
}

fn count(shared: &Shared, event: ConnectionEvent, connected: bool) {
    if connected {
        shared
            .connect_us
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(event.connect_us);
    }
    let mut report = shared.report.lock().unwrap_or_else(PoisonError::into_inner);
    report.attempted += 1;
    report.connected += u64::from(connected);
    report.syn_retransmits += u64::from(event.syn_retransmits);
    report.with_syn_retransmits += u64::from(event.syn_retransmits > 0);
    if event.outcome == "ok" {
        report.ok += 1;
    } else {
        *report.failed.entry(event.outcome).or_insert(0) += 1;
    }
}

fn bind_address(config: &LoadConfig, index: u64) -> Option<SocketAddr> {
    let port = config
        .source_port
        .or_else(|| Some(config.bind_port_range?.at(index)));
    if port.is_none() && config.source_address.is_none() {
        return None;
    }
    let any = any_address(config.to);
    Some(SocketAddr::new(
        config.source_address.unwrap_or(any),
        port.unwrap_or(0),
    ))
}

/// The unspecified address of the family of `to`.
pub(super) fn any_address(to: SocketAddr) -> IpAddr {
    if to.is_ipv4() {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        Ipv6Addr::UNSPECIFIED.into()
    }
}
