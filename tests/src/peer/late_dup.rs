//! `late-dup`: a connection whose own SYN arrives a second time.
//!
//! The SYN is read back from a packet socket and sent again byte for byte (but for the checksum, see
//! [`set_tcp_checksum`]) through a raw socket.

use std::io::{self, Read as _};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use socket2::{Domain, Protocol, Socket, Type};

use super::client::{After, exchange};
use super::packet::{RawSender, is_syn_from, set_tcp_checksum};
use super::socket::{self, Open};
use super::{sleep_until, stopped};
use crate::config::LateDupConfig;
use crate::report::LateDupReport;

const TIMEOUT: Duration = Duration::from_secs(5);
/// The kernel answers at most one such SYN per socket in 500 ms (tcp_invalid_ratelimit).
const PAUSE: Duration = Duration::from_millis(600);

pub(super) fn run(config: &LateDupConfig) -> Result<LateDupReport> {
    let sender = RawSender::new(config.to.ip()).context("opening a raw socket")?;
    let mut report = LateDupReport {
        pid: std::process::id(),
        ..LateDupReport::default()
    };
    for _ in 0..config.times {
        if stopped() {
            break;
        }
        let watcher = watcher().context("opening a packet socket")?;
        let open = Open {
            to: config.to,
            bind: None,
            isn: None,
            timeout: TIMEOUT,
        };
        let opened = socket::open(open);
        let connection = opened
            .result
            .map_err(|kind| anyhow::anyhow!("connecting to {}: {kind}", config.to))?;
        report.connections += 1;
        let mut syn = own_syn(&watcher, opened.local_port)
            .with_context(|| format!("reading the SYN from port {} back", opened.local_port))?;
        set_tcp_checksum(&mut syn);
        exchange(&connection, After::More, TIMEOUT).context("the first request")?;
        let mut connection = Some(connection);
        if config.after_close {
            let socket = connection.take().expect("just opened");
            exchange(&socket, After::Close, TIMEOUT).context("the last request")?;
            drop(socket);
            sleep_until(Instant::now() + PAUSE);
        }
        for _ in 0..config.repeats {
            sender
                .send(&syn, config.to.ip())
                .context("sending the copy of the SYN")?;
            report.duplicates += 1;
            sleep_until(Instant::now() + PAUSE);
        }
        if connection.is_some_and(|socket| exchange(&socket, After::Close, TIMEOUT).is_ok()) {
            report.survived += 1;
        }
    }
    Ok(report)
}

/// A socket that sees the IP packets of all interfaces, sent ones too.
fn watcher() -> io::Result<Socket> {
    let all = i32::from(u16::try_from(libc::ETH_P_ALL).expect("0x0003").to_be());
    let socket = Socket::new(Domain::PACKET, Type::DGRAM, Some(Protocol::from(all)))?;
    socket.set_read_timeout(Some(Duration::from_millis(100)))?;
    Ok(socket)
}

/// The SYN sent from `port`.
fn own_syn(watcher: &Socket, port: u16) -> io::Result<Vec<u8>> {
    let end = Instant::now() + Duration::from_secs(2);
    let mut buffer = [0u8; 2048];
    let mut stream = watcher;
    while Instant::now() < end {
        match stream.read(&mut buffer) {
            Ok(count) if is_syn_from(&buffer[..count], port) => {
                return Ok(buffer[..count].to_vec());
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::new(io::ErrorKind::NotFound, "it was not seen"))
}
