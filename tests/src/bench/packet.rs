//! Nanoseconds per skb of the packet hook, by the kernel's own statistics, against an empty program
//! that sees the same skbs.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use aya::{
    Ebpf,
    programs::{RawTracePoint, SchedClassifier, TcAttachType, loaded_programs},
};

use super::{Options, line, median, traffic};
use crate::{
    agent::{Agent, AgentConfig},
    host::Host,
    topology::{Pair, PairConfig},
};

/// Runs and nanoseconds of programs by name.
type Cost = BTreeMap<String, (u64, u64)>;

pub(super) fn run(options: &Options) -> Result<()> {
    println!("packet hook, ns per skb above an empty program");
    let _statistics = aya::sys::enable_stats(aya::sys::Stats::RunTime)?;
    let lab = Pair::new(PairConfig::default())?;
    let _empty = attach_empty(&lab.server, "eth0", &[])?;
    let agent = agent(&lab.server, &["--no-http-sniff"])?;
    let address = |port| SocketAddr::new(lab.service().ip(), port);
    let _echo = traffic::serve(&lab.server, address(9001), traffic::Service::Echo)?;
    let _sink = traffic::serve(&lab.server, address(9002), traffic::Service::Sink)?;
    let _close = traffic::serve(&lab.server, address(9003), traffic::Service::Close)?;
    let _http = traffic::serve(&lab.server, address(9004), traffic::Service::Http)?;
    let text = || difference(|| traffic::http(&lab.client, address(9004), options.seconds));
    let echo = || difference(|| traffic::small(&lab.client, address(9001), options.seconds));
    let sink = || difference(|| traffic::bulk(&lab.client, address(9002), options.seconds));
    let (mut small, mut bulk, mut short, mut handshake) = (vec![], vec![], vec![], vec![]);
    let mut spoken = vec![];
    for _ in 0..options.rounds {
        let (s, b) = (echo()?, sink()?);
        spoken.push(text()?.ns);
        let mut connections = 0;
        let c = difference(|| {
            connections = traffic::short(&lab.client, address(9003), options.seconds)?;
            Ok(connections)
        })?;
        // Of a connection's skbs four carry SYN or FIN; the others are pure ACKs, which cost what
        // the small segments and their ACKs do.
        let all = c.runs as f64 / connections.max(1) as f64;
        handshake.push((c.ns * all - s.ns * (all - 4.0)) / 4.0);
        small.push(s.ns);
        bulk.push(b.ns);
        short.push(c.ns);
    }
    let figure = |v: &[f64]| format!("{:+.0} ns", median(v));
    line(
        "small segments and their ACKs",
        &figure(&small),
        "<= +70 ns",
        median(&small) <= 70.0,
    );
    line(
        "bulk (GRO/TSO skbs and their ACKs)",
        &figure(&bulk),
        "<= +150 ns",
        median(&bulk) <= 150.0,
    );
    line(
        "SYN, SYN-ACK, FIN",
        &figure(&handshake),
        "<= +400 ns",
        median(&handshake) <= 400.0,
    );
    println!("  (all skbs of short connections: {})", figure(&short));
    agent.terminate()?;

    let agent = self::agent(&lab.server, &[])?;
    let (mut small_sniffed, mut bulk_sniffed, mut spoken_sniffed) = (vec![], vec![], vec![]);
    for _ in 0..options.rounds {
        small_sniffed.push(echo()?.ns);
        bulk_sniffed.push(sink()?.ns);
        spoken_sniffed.push(text()?.ns);
    }
    // Every other skb carries data.
    let sniff = 2.0 * (median(&small_sniffed) - median(&small));
    line(
        "looking for HTTP/1, for each data segment",
        &format!("{sniff:+.0} ns"),
        "<= +40 ns",
        sniff <= 40.0,
    );
    println!(
        "  (… for each message of HTTP/1: {:+.0} ns; for each bulk skb or ACK: {:+.0} ns)",
        2.0 * (median(&spoken_sniffed) - median(&spoken)),
        median(&bulk_sniffed) - median(&bulk),
    );
    agent.terminate()?;
    let counted = |args: &[&str]| -> Result<f64> {
        let agent = self::agent(&lab.client, args)?;
        let rounds: Result<Vec<f64>> = (0..options.rounds).map(|_| Ok(echo()?.ns)).collect();
        agent.terminate()?;
        Ok(median(&rounds?))
    };
    let without = counted(&[])?;
    let with = counted(&["--set", "pinned_suspect.min_responses=6"])?;
    println!(
        "  (counting responses that cannot be read, for each data segment: {:+.0} ns)",
        2.0 * (with - without)
    );
    Ok(())
}

/// An agent on a host's interface, with every hook in place.
fn agent(host: &Host, args: &[&str]) -> Result<Agent> {
    let netns = host.netns_inode().to_string();
    let own = ["--netns", &netns];
    let args = own.iter().chain(args).copied();
    let agent = host.agent(AgentConfig::with_args(args))?;
    let ready = agent.wait_ready(Duration::from_secs(30))?;
    for hook in ready["hooks"].as_array().context("hooks")? {
        ensure!(hook["state"] == "ok", "nothing to measure: {hook}");
    }
    Ok(agent)
}

/// What the agent's programs cost above the empty one, per run.
struct Difference {
    ns: f64,
    runs: u64,
}

fn difference(load: impl FnOnce() -> Result<u64>) -> Result<Difference> {
    let before = cost()?;
    load()?;
    let after = cost()?;
    let (ours, runs) = per_run(&before, &after, "tuplewatch_");
    let (empty, _) = per_run(&before, &after, "empty");
    Ok(Difference {
        ns: ours - empty,
        runs,
    })
}

fn per_run(before: &Cost, after: &Cost, prefix: &str) -> (f64, u64) {
    let (mut ns, mut runs) = (0, 0);
    for (name, (n, r)) in after.iter().filter(|(name, _)| name.starts_with(prefix)) {
        let (n0, r0) = before.get(name).copied().unwrap_or_default();
        ns += n - n0;
        runs += r - r0;
    }
    (ns as f64 / runs.max(1) as f64, runs)
}

fn cost() -> Result<Cost> {
    let mut cost = Cost::new();
    for program in loaded_programs() {
        let program = program?;
        let name = program.name_as_str().unwrap_or_default().to_owned();
        let entry = cost.entry(name).or_default();
        entry.0 += u64::try_from(program.run_time().as_nanos())?;
        entry.1 += program.run_count();
    }
    Ok(cost)
}

/// Attaches programs that do nothing to both directions of an interface, and to tracepoints.
pub(super) fn attach_empty(host: &Host, interface: &str, tracepoints: &[&str]) -> Result<Ebpf> {
    let object = std::env::var_os("TUPLEWATCH_FOREIGN_OBJECT").map_or_else(
        || {
            concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/../target/bpf/tuplewatch-ebpf-foreign.o"
            )
            .into()
        },
        std::path::PathBuf::from,
    );
    let bytes = std::fs::read(&object)
        .with_context(|| format!("{}: `cargo xtask build` makes it", object.display()))?;
    let (interface, tracepoints) = (interface.to_owned(), tracepoints.to_vec());
    host.in_ns(|| -> Result<Ebpf> {
        let mut ebpf = Ebpf::load(&bytes)?;
        let program: &mut SchedClassifier = ebpf
            .program_mut("empty")
            .context("the object has no program `empty`")?
            .try_into()?;
        program.load()?;
        program.attach(&interface, TcAttachType::Ingress)?;
        program.attach(&interface, TcAttachType::Egress)?;
        for name in tracepoints {
            let program: &mut RawTracePoint = ebpf
                .program_mut(name)
                .with_context(|| format!("the object has no program `{name}`"))?
                .try_into()?;
            program.load()?;
            program.attach("inet_sock_set_state")?;
        }
        Ok(ebpf)
    })?
}
