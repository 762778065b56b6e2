//! `fixed`: one source port again and again, optionally vanishing without a packet in between.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::client::{After, exchange};
use super::load::any_address;
use super::random::IsnSource;
use super::socket::{self, Open};
use super::{sleep_until, stopped};
use crate::config::FixedConfig;
use crate::report::FixedReport;

pub(super) fn run(config: &FixedConfig) -> Result<FixedReport> {
    let mut report = FixedReport {
        pid: std::process::id(),
        ..FixedReport::default()
    };
    let isns = IsnSource::new(config.isn);
    let timeout = Duration::from_millis(config.connect_timeout_ms);
    for _ in 0..config.times {
        if stopped() {
            break;
        }
        report.attempted += 1;
        let opened = socket::open(Open {
            to: config.to,
            bind: Some(SocketAddr::new(any_address(config.to), config.source_port)),
            isn: isns.next(),
            timeout,
        });
        report.syn_retransmits += u64::from(opened.syn_retransmits);
        // An abandoned connection must not be the last on its server's mind.
        let after = if config.abandon {
            After::More
        } else {
            After::Close
        };
        let failure = match opened.result {
            Ok(socket) if exchange(&socket, after, timeout).is_ok() => {
                report.ok += 1;
                if config.abandon {
                    socket::abandon(socket).context("TCP_REPAIR")?;
                    report.abandoned += 1;
                }
                None
            }
            Ok(_) => Some("response".to_owned()),
            Err(kind) => Some(kind),
        };
        if let Some(kind) = failure {
            *report.failed.entry(kind).or_insert(0) += 1;
        }
        sleep_until(Instant::now() + Duration::from_millis(config.pause_ms));
    }
    Ok(report)
}
