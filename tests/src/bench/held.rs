//! Memory with 10,000 port spaces that hold a million four-tuples.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};

use super::{Options, line, median};
use crate::{agent::AgentConfig, host::Host, procnet};

/// Port spaces: every destination is one at the sockets and one on the wire.
const SPACES: u32 = 10_000;
const DESTINATIONS: u32 = SPACES / 2;
/// Connections, each closed at once: TIME_WAIT holds their four-tuples for a minute.
const HELD: u64 = 1_000_000;
/// Who opens them at the same time.
const THREADS: u16 = 2;

pub(super) fn run(options: &Options) -> Result<()> {
    println!("{HELD} held four-tuples");
    let mut memory = Vec::new();
    let mut most = Vec::new();
    for _ in 0..options.rounds.min(3) {
        let (mib, held) = once()?;
        memory.push(mib);
        most.push(held as f64);
    }
    let (mib, held) = (median(&memory), median(&most));
    line(
        "four-tuples in TIME_WAIT that the agent has counted",
        &format!("{held:.0}"),
        ">= 1,000,000",
        held >= HELD as f64,
    );
    line(
        "RSS and maps with 10,000 port spaces meanwhile",
        &format!("{mib:.1} MB"),
        "<= 150 MB",
        mib <= 150.0,
    );
    Ok(())
}

/// Megabytes, and how many four-tuples the agent counted as held.
fn once() -> Result<(f64, u64)> {
    let host = Host::start("host")?;
    host.sysctl("net.ipv4.tcp_max_tw_buckets", 2 * HELD)?;
    host.sysctl("net.ipv4.ip_local_port_range", "1024 65000")?;
    host.sysctl("net.ipv4.tcp_tw_reuse", 0)?;
    let args = [
        "--interface",
        "lo",
        "--netns",
        &host.netns_inode().to_string(),
        "--summary-interval",
        "1s",
        "--census-interval",
        "5s",
        "--top",
        "10000",
    ];
    let agent = host.agent(AgentConfig::with_args(args))?;
    let ready = agent.wait_ready(Duration::from_secs(60))?;
    let maps = ready["memory_bytes"].as_u64().context("memory_bytes")?;
    let started = Instant::now();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|n| {
                let host = &host;
                scope.spawn(move || host.in_ns(|| open(n)))
            })
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| anyhow::anyhow!("panic"))??)
    })?;
    let in_time_wait = host.sockstat()?.get("TCP.tw");
    println!(
        "  {HELD} connections in {:.1} s; {in_time_wait} in TIME_WAIT",
        started.elapsed().as_secs_f64()
    );
    // The census that counts them.
    std::thread::sleep(Duration::from_secs(7));
    let bytes = procnet::rss_bytes(agent.pid())? + maps;
    let held = agent.of_type("summary")?.iter().map(held).max();
    agent.terminate()?;
    ensure!(in_time_wait > 0, "no connection is in TIME_WAIT");
    Ok((bytes as f64 / 1e6, held.unwrap_or(0)))
}

/// A share of the connections, to its own destinations.
fn open(thread: u16) -> Result<()> {
    let port = 900 + thread;
    let listener = TcpListener::bind(SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), port))?;
    let own = DESTINATIONS / u32::from(THREADS);
    for n in 0..HELD / u64::from(THREADS) {
        let destination = u32::from(thread) * own + u32::try_from(n)? % own;
        let to = Ipv4Addr::from(u32::from(Ipv4Addr::new(127, 1, 0, 0)) + destination);
        let client = TcpStream::connect((to, port))?;
        drop(client);
        drop(listener.accept()?);
    }
    Ok(())
}

/// Sockets in TIME_WAIT of a summary, each counted at the point of the sockets only.
fn held(summary: &serde_json::Value) -> u64 {
    let spaces = summary["spaces"].as_array().into_iter().flatten();
    let sockets = spaces.filter(|space| space["point"] == "socket");
    sockets
        .filter_map(|space| space["time_wait"]["total"].as_u64())
        .sum()
}
