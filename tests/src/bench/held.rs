//! Memory with 10,000 port spaces that hold a million four-tuples.
//!
//! TIME_WAIT would hold them for a minute, and few machines open as many in that time: a device is configured that
//! holds each port for an hour.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::{Options, line, median};
use crate::{agent::AgentConfig, host::Host, procnet};

/// Port spaces: every destination is one at the sockets and one on the wire.
const SPACES: u32 = 10_000;
const DESTINATIONS: u32 = SPACES / 2;
/// Connections, each closed at once.
const HELD: u64 = 1_000_000;
/// Who opens them at the same time.
const THREADS: u16 = 2;
/// The device.
const DEVICE: &str = "egress_groups:
- name: bench
  destinations: [127.0.0.0/8]
  ports: 60000
  hold: 1h
";

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
        "four-tuples that the agent counts as held",
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
    let config = std::env::temp_dir().join(format!("tuplewatch-bench-{}.yaml", std::process::id()));
    std::fs::write(&config, DEVICE)?;
    let result = with(&config);
    std::fs::remove_file(&config)?;
    result
}

fn with(config: &Path) -> Result<(f64, u64)> {
    let host = Host::start("host")?;
    host.sysctl("net.ipv4.tcp_max_tw_buckets", 2 * HELD)?;
    host.sysctl("net.ipv4.ip_local_port_range", "1024 65000")?;
    let netns = host.netns_inode().to_string();
    let mut args = vec!["--interface", "lo", "--netns", &netns];
    args.extend(["--summary-interval", "5s", "--config"]);
    args.push(config.to_str().context("a path that is no text")?);
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
    println!(
        "  {HELD} connections in {:.1} s",
        started.elapsed().as_secs_f64()
    );
    let before = agent.of_type("summary")?.len();
    std::thread::sleep(Duration::from_secs(12));
    let bytes = procnet::rss_bytes(agent.pid())? + maps;
    let summaries = agent.of_type("summary")?;
    agent.terminate()?;
    let latest = summaries.get(before..).context("no summary")?.last();
    Ok((bytes as f64 / 1e6, held(latest.context("no summary")?)))
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

/// What a summary counts as held, over all destinations.
fn held(summary: &Value) -> u64 {
    let uses = summary["egress"].as_array().into_iter().flatten();
    uses.filter_map(|used| used["held"].as_u64()).sum()
}
