//! Memory with 10,000 port spaces, and the time from the start to the first observation.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};

use super::{Options, line, median};
use crate::{agent::AgentConfig, lab::Lab, procnet};

/// Port spaces.
const SPACES: u32 = 10_000;
/// Destinations on loopback, each opened twice: every one is a port space at the sockets and one on the
/// wire.
const DESTINATIONS: u32 = SPACES / 2;

pub(super) fn run(options: &Options) -> Result<()> {
    println!("footprint");
    let mut starts = Vec::new();
    let mut memory = Vec::new();
    for _ in 0..options.rounds.min(3) {
        let lab = Lab::new()?;
        let host = lab.host("host")?;
        let started = Instant::now();
        let args = [
            "--interface",
            "lo",
            "--netns",
            &host.netns_inode().to_string(),
            "--summary-interval",
            "1s",
        ];
        let agent = host.agent(AgentConfig::with_args(args))?;
        let ready = agent.wait_ready(Duration::from_secs(30))?;
        starts.push(started.elapsed().as_secs_f64());
        let maps = ready["memory_bytes"].as_u64().context("memory_bytes")?;
        host.in_ns(|| -> Result<()> {
            let any = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 8080);
            let listener = TcpListener::bind(any)?;
            for i in 0..DESTINATIONS {
                let to = Ipv4Addr::from(u32::from(Ipv4Addr::new(127, 1, 0, 0)) + i);
                for _ in 0..2 {
                    let client = std::net::TcpStream::connect((to, 8080))?;
                    drop(listener.accept()?);
                    drop(client);
                }
            }
            Ok(())
        })??;
        let known = |line: &serde_json::Value| {
            line["type"] == "summary" && line["known_spaces"].as_u64() >= Some(u64::from(SPACES))
        };
        agent.wait_line(Duration::from_secs(30), known)?;
        std::thread::sleep(Duration::from_secs(3));
        memory.push((procnet::rss_bytes(agent.pid())? + maps) as f64 / f64::from(1 << 20));
        agent.terminate()?;
    }
    let (start, mib) = (median(&starts), median(&memory));
    line(
        "start to first observation",
        &format!("{start:.2} s"),
        "<= 2 s",
        start <= 2.0,
    );
    line(
        "RSS and maps with 10,000 port spaces",
        &format!("{mib:.1} MiB"),
        "<= 40 MiB",
        mib <= 40.0,
    );
    Ok(())
}
