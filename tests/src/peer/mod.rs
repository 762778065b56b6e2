//! The programs behind `lab-peer`: servers and loads with given behaviour.
//!
//! Each ends by itself (count or time limit), on SIGTERM, or with the test, and prints one JSON
//! object as its last line: see [`crate::report`].

mod client;
mod fastopen;
mod fixed;
mod idle;
mod late_dup;
mod load;
mod packet;
mod pool;
mod random;
mod rawsyn;
mod serve;
mod socket;

use std::io::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};
use serde::Serialize;

use crate::config::{
    FastOpenConfig, FixedConfig, IdleConfig, LateDupConfig, LoadConfig, PoolConfig, RawSynConfig,
    ServeConfig,
};

#[derive(Debug, Parser)]
#[command(
    name = "lab-peer",
    about = "Servers and loads for the lab of tuplewatch"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Hold new network and mount namespaces until standard input ends
    Hold,
    /// Answer requests with small HTTP/1.1 responses
    Serve(ServeConfig),
    /// Open a new connection for each request
    Load(LoadConfig),
    /// Send requests over a pool of kept connections
    Pool(PoolConfig),
    /// Connect from one source port again and again
    Fixed(FixedConfig),
    /// Keep connections open that nobody uses
    Idle(IdleConfig),
    /// Send crafted SYNs
    Rawsyn(RawSynConfig),
    /// Open connections and send their SYN a second time
    LateDup(LateDupConfig),
    /// Connect by TCP Fast Open
    Fastopen(FastOpenConfig),
}

/// Reads the command line and does what it says.
///
/// # Errors
/// What went wrong, with the place.
pub fn run() -> Result<()> {
    let cli = Cli::parse();
    if matches!(cli.command, Command::Hold) {
        return crate::holder::hold();
    }
    stop_on_signals()?;
    match cli.command {
        Command::Hold => unreachable!("handled above"),
        Command::Serve(config) => print(&serve::run(&config)?),
        Command::Load(config) => print(&load::run(&config)?),
        Command::Pool(config) => print(&pool::run(&config)?),
        Command::Fixed(config) => print(&fixed::run(&config)?),
        Command::Idle(config) => print(&idle::run(&config)?),
        Command::Rawsyn(config) => print(&rawsyn::run(&config)?),
        Command::LateDup(config) => print(&late_dup::run(&config)?),
        Command::Fastopen(config) => print(&fastopen::run(&config)?),
    }
}

/// Prints one JSON line at once.
fn print(value: &impl Serialize) -> Result<()> {
    let mut line = serde_json::to_string(value)?;
    line.push('\n');
    let mut out = std::io::stdout().lock();
    out.write_all(line.as_bytes())
        .and_then(|()| out.flush())
        .context("writing to standard output")
}

static STOP: AtomicBool = AtomicBool::new(false);

extern "C" fn on_signal(_: libc::c_int) {
    STOP.store(true, Ordering::Relaxed);
}

fn stop_on_signals() -> Result<()> {
    let handler = on_signal as extern "C" fn(libc::c_int);
    for signal in [libc::SIGTERM, libc::SIGINT] {
        // SAFETY: the handler only stores to an atomic, which is allowed in a signal handler.
        if unsafe { libc::signal(signal, handler as libc::sighandler_t) } == libc::SIG_ERR {
            return Err(std::io::Error::last_os_error()).context("setting a signal handler");
        }
    }
    Ok(())
}

/// True once the process was told to end.
fn stopped() -> bool {
    STOP.load(Ordering::Relaxed)
}

/// A schedule of evenly spaced slots with an end.
#[derive(Debug, Clone, Copy)]
struct Pace {
    start: Instant,
    end: Instant,
    /// Slots per second; 0: no waiting.
    rate: f64,
}

impl Pace {
    fn new(rate: f64, seconds: f64) -> Self {
        let start = Instant::now();
        Self {
            start,
            end: start + Duration::from_secs_f64(seconds),
            rate,
        }
    }

    /// Sleeps until slot `index` begins; false if the schedule has ended or the process is told to
    /// end before.
    fn reach(&self, index: u64) -> bool {
        #[expect(clippy::cast_precision_loss, reason = "indices stay far below 2^52")]
        let slot = if self.rate > 0.0 {
            self.start + Duration::from_secs_f64(index as f64 / self.rate)
        } else {
            self.start
        };
        if slot >= self.end {
            sleep_until(self.end);
            return false;
        }
        sleep_until(slot);
        !stopped() && Instant::now() < self.end
    }
}

/// Sleeps until `end`, or until the process is told to end.
fn sleep_until(end: Instant) {
    while !stopped() {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        std::thread::sleep(left.min(Duration::from_millis(50)));
    }
}
