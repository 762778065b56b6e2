//! Connections per second of a saturating load over a hooked loopback: without an agent, with it, and
//! with tools that send one event per state change to user space.

use std::{process::Command, time::Duration};

use anyhow::{Result, ensure};

use super::{Options, line, median, packet::attach_empty, traffic};
use crate::{agent::AgentConfig, host::Host, procnet};

/// What runs beside the load.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Beside {
    Nothing,
    /// Programs that do nothing, on the hooks that each connection passes: what no agent can be below.
    Empty,
    Agent,
    Tool(&'static str),
}

/// Rounds that the tools take part in.
const TOOL_ROUNDS: usize = 3;

pub(super) fn run(options: &Options) -> Result<()> {
    println!("connections per second on one host, loopback hooked");
    // Not a lab: that one reads all sockets five times a second, here hundreds of thousands.
    let host = Host::start("host")?;
    let _ = host.exec("mount", ["-t", "tracefs", "nodev", "/sys/kernel/tracing"]);
    host.sysctl("net.ipv4.tcp_tw_reuse", "1")?;
    host.sysctl("net.ipv4.ip_local_port_range", "1024 65000")?;
    let address = 8080;
    let tools: Vec<_> = ["/usr/sbin/tcplife", "/usr/sbin/tcpstates"]
        .into_iter()
        .filter(|path| std::path::Path::new(path).exists())
        .collect();
    let mut ratios = vec![Vec::new(); 1 + tools.len()];
    let mut empty = Vec::new();
    let mut rates = Vec::new();
    let mut cpu = Vec::new();
    for round in 0..options.rounds {
        // The baseline before and after, so that a machine that slows down weighs on both.
        let first = rate(&host, address, options.seconds, Beside::Nothing)?.0;
        let (with, us) = rate(&host, address, options.seconds, Beside::Agent)?;
        let second = rate(&host, address, options.seconds, Beside::Nothing)?.0;
        let baseline = f64::midpoint(first, second);
        rates.push(baseline);
        ratios[0].push(with / baseline);
        cpu.push(us);
        let with = rate(&host, address, options.seconds, Beside::Empty)?.0;
        empty.push(with / baseline);
        // They stand here for scale, and take long to start.
        let tools = tools.iter().filter(|_| round < TOOL_ROUNDS);
        for (i, tool) in tools.enumerate() {
            let with = rate(&host, address, options.seconds, Beside::Tool(tool))?.0;
            ratios[i + 1].push(with / baseline);
        }
    }
    println!("  (without anything: {:.0} connections/s)", median(&rates));
    let ratio = median(&ratios[0]);
    line(
        "with the agent, of without",
        &format!("{ratio:.3}"),
        ">= 0.97",
        ratio >= 0.97,
    );
    println!(
        "  {:<52} {:>19.2} us",
        "agent's own CPU per connection",
        median(&cpu)
    );
    println!(
        "  {:<52} {:>22.3}",
        "with empty programs on the same hooks, of without",
        median(&empty)
    );
    for (i, tool) in tools.iter().enumerate() {
        println!(
            "  {:<52} {:>22.3}",
            format!("with {tool}, of without"),
            median(&ratios[i + 1])
        );
    }
    if tools.is_empty() {
        println!("  (no peer tools: apt-get install libbpf-tools)");
    }
    Ok(())
}

/// Connections per second, and the microseconds of CPU that the agent itself took for each.
fn rate(host: &Host, to: u16, seconds: f64, beside: Beside) -> Result<(f64, f64)> {
    let netns = host.netns_inode().to_string();
    let agent = (beside == Beside::Agent)
        .then(|| {
            let args = ["--interface", "lo", "--netns", &netns];
            let agent = host.agent(AgentConfig::with_args(args))?;
            agent.wait_ready(Duration::from_secs(30))?;
            anyhow::Ok(agent)
        })
        .transpose()?;
    let tool = match beside {
        Beside::Tool(path) => {
            let process = host.spawn("tool", Command::new(path))?;
            std::thread::sleep(Duration::from_secs(2));
            ensure!(
                process.is_running(),
                "{path} does not run: {:?}",
                process.stderr()
            );
            Some(process)
        }
        _ => None,
    };
    let empty = (beside == Beside::Empty)
        .then(|| attach_empty(host, "lo", &["empty_state"]))
        .transpose()?;
    let before = agent
        .as_ref()
        .map(|a| procnet::cpu_seconds(a.pid()))
        .transpose()?;
    let connected = traffic::saturate(host, to, seconds)?;
    let after = agent
        .as_ref()
        .map(|a| procnet::cpu_seconds(a.pid()))
        .transpose()?;
    let us = match (before, after) {
        (Some(b), Some(a)) => (a - b) * 1e6 / connected.max(1) as f64,
        _ => 0.0,
    };
    if let Some(agent) = agent {
        agent.terminate()?;
    }
    drop(tool);
    drop(empty);
    Ok((connected as f64 / seconds, us))
}
