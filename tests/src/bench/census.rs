//! What the census costs on a host with many idle connections.

use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};

use super::{Options, line, median};
use crate::{
    agent::{Agent, AgentConfig},
    config::IdleConfig,
    host::Host,
    peers::Idle,
    procnet,
};

/// Sockets of established connections.
const SOCKETS: u32 = 100_000;
/// Both ends of a connection are on the host.
const CONNECTIONS: u32 = SOCKETS / 2;
/// Connections of one process, each to an address of its own: without a right it may open 20,000 files on
/// the machines at hand.
const PER_PROCESS: u32 = 9_000;
/// Passes in one round.
const PASSES: u64 = 5;

pub(super) fn run(options: &Options) -> Result<()> {
    println!("census of {SOCKETS} idle established sockets");
    let host = Host::start("host")?;
    host.sysctl("net.ipv4.ip_local_port_range", "1024 65000")?;
    let _statistics = aya::sys::enable_stats(aya::sys::Stats::RunTime)?;
    let idle = connections(&host)?;
    let (mut passes, mut memory) = (Vec::new(), Vec::new());
    for _ in 0..options.rounds {
        let netns = host.netns_inode().to_string();
        let args = [
            "--netns",
            &netns,
            "--census-interval",
            "1s",
            "--summary-interval",
            "1s",
        ];
        let agent = host.agent(AgentConfig::with_args(args))?;
        agent.wait_ready(Duration::from_secs(60))?;
        passes.push(pass_ms(&agent)?);
        let maps = agent.of_type("ready")?;
        let maps = maps
            .first()
            .and_then(|ready| ready["memory_bytes"].as_u64());
        let rss = procnet::rss_bytes(agent.pid())?;
        memory.push((rss + maps.context("memory_bytes")?) as f64 / f64::from(1 << 20));
        agent.terminate()?;
    }
    drop(idle);
    let (pass, mib) = (median(&passes), median(&memory));
    line(
        "a pass of the census in the kernel",
        &format!("{pass:.1} ms"),
        "<= 100 ms",
        pass <= 100.0,
    );
    line(
        "RSS and maps meanwhile",
        &format!("{mib:.1} MiB"),
        "<= 60 MiB",
        mib <= 60.0,
    );
    Ok(())
}

/// Established connections over loopback that nobody uses.
fn connections(host: &Host) -> Result<Vec<Idle>> {
    let addresses = 0..CONNECTIONS.div_ceil(PER_PROCESS);
    let idle = addresses.map(|n| {
        let address = Ipv4Addr::from(u32::from(Ipv4Addr::new(127, 1, 0, 1)) + n);
        host.idle(&IdleConfig {
            connections: PER_PROCESS.min(CONNECTIONS - n * PER_PROCESS).into(),
            seconds: 3600.0,
            ..IdleConfig::new(SocketAddr::new(IpAddr::V4(address), 900))
        })
    });
    idle.collect()
}

/// Milliseconds of a pass, as the kernel counts them: all programs of the walk together.
fn pass_ms(agent: &Agent) -> Result<f64> {
    let passes = |agent: &Agent| -> Result<u64> { Ok(agent.of_type("summary")?.len() as u64) };
    let (before, began) = (walk_ns(agent)?, passes(agent)?);
    let end = Instant::now() + Duration::from_secs(60);
    while passes(agent)? < began + PASSES {
        if Instant::now() > end {
            bail!("no summaries: {}", agent.process().describe());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    // One summary and one pass in each second.
    let seconds = passes(agent)? - began;
    Ok((walk_ns(agent)? - before) as f64 / seconds as f64 / 1e6)
}

/// Nanoseconds that the programs of the census have run for: those of this agent, by the file descriptors
/// that it has of them.
fn walk_ns(agent: &Agent) -> Result<u64> {
    let mut own = BTreeSet::new();
    for entry in fs::read_dir(format!("/proc/{}/fdinfo", agent.pid()))? {
        // Others are closed meanwhile.
        let text = fs::read_to_string(entry?.path()).unwrap_or_default();
        let id = text.lines().find_map(|line| line.strip_prefix("prog_id:"));
        own.extend(id.and_then(|id| id.trim().parse::<u32>().ok()));
    }
    let mut ns = 0;
    for program in aya::programs::loaded_programs().flatten() {
        let name = program.name_as_str().unwrap_or_default();
        if own.contains(&program.id()) && name.starts_with("census_") {
            ns += u64::try_from(program.run_time().as_nanos())?;
        }
    }
    ensure!(ns > 0, "no census has run, of the programs {own:?}");
    Ok(ns)
}
