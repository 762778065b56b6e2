//! `fastopen`: the request travels within the SYN.

use std::io::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::client::{After, request, response};
use super::{sleep_until, socket, stopped};
use crate::config::FastOpenConfig;
use crate::report::FastOpenReport;

const TIMEOUT: Duration = Duration::from_secs(5);

pub(super) fn run(config: &FastOpenConfig) -> Result<FastOpenReport> {
    let mut report = FastOpenReport {
        pid: std::process::id(),
        ..FastOpenReport::default()
    };
    for _ in 0..config.times {
        if stopped() {
            break;
        }
        report.attempted += 1;
        let connection = socket::new(config.to)?;
        socket::fast_open_connect(&connection).context("TCP_FASTOPEN_CONNECT")?;
        let mut stream = &connection;
        let answered = connection
            .connect(&config.to.into())
            .and_then(|()| stream.write_all(request(After::Close).as_bytes()))
            .and_then(|()| response(&connection, After::Close, TIMEOUT));
        report.ok += u64::from(answered.is_ok());
        report.data_in_syn += u64::from(socket::syn_data_accepted(&connection));
        drop(connection);
        sleep_until(Instant::now() + Duration::from_millis(config.pause_ms));
    }
    Ok(report)
}
