//! The benchmarks: differences and ratios in one run, medians of several rounds.
//!
//! Absolute times on a shared machine mean little. Each figure is taken against a baseline in the
//! same round: an empty program on the same packets, the same load without an agent, a peer tool.

mod capture;
mod census;
mod connections;
mod footprint;
mod held;
mod packet;
mod replay;
mod traffic;

use anyhow::Result;
use clap::{Args, ValueEnum};

/// What to measure, and how often.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Measure only this
    #[arg(long, value_enum)]
    pub only: Option<Part>,
    /// Rounds; the median counts
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Seconds of load in each round
    #[arg(long, default_value_t = 3.0)]
    pub seconds: f64,
}

/// A part of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Nanoseconds per skb of the packet hook, against an empty program.
    Packet,
    /// Connections per second with the agent, without, and with peer tools.
    Connections,
    /// Memory, and time from the start to the first observation.
    Footprint,
    /// Memory with a million held four-tuples.
    Held,
    /// Time and memory of the census with 100,000 idle connections.
    Census,
    /// Packets per second and memory of `replay`, against tcpdump and tshark.
    Replay,
}

/// Runs what is asked for and prints a table.
///
/// # Errors
/// If the lab, the agent or a peer cannot be started.
pub fn run(options: &Options) -> Result<()> {
    let wanted = |part| options.only.is_none_or(|only| only == part);
    println!(
        "kernel {}, {} CPUs, {} rounds of {} s",
        kernel()?,
        cpus()?,
        options.rounds,
        options.seconds
    );
    if wanted(Part::Packet) {
        packet::run(options)?;
    }
    if wanted(Part::Connections) {
        connections::run(options)?;
    }
    if wanted(Part::Footprint) {
        footprint::run(options)?;
    }
    if wanted(Part::Held) {
        held::run(options)?;
    }
    if wanted(Part::Census) {
        census::run(options)?;
    }
    if wanted(Part::Replay) {
        replay::run(options)?;
    }
    Ok(())
}

fn kernel() -> Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/osrelease")?
        .trim()
        .to_owned())
}

fn cpus() -> Result<usize> {
    Ok(std::thread::available_parallelism()?.get())
}

/// The median; NaN of nothing.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

/// A line of the table: name, figure, what is asked for, and whether it is met.
fn line(name: &str, figure: &str, target: &str, met: bool) {
    println!(
        "  {name:<52} {figure:>22}   {target:<14} {}",
        if met { "met" } else { "MISSED" }
    );
}
