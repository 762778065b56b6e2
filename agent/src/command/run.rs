//! `tuplewatch run`: the live source, the core and the sinks, once per second.

use std::{io, io::IsTerminal as _, os::unix::fs::MetadataExt as _, path::Path, time::Duration};

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use tokio::{
    io::{Interest, unix::AsyncFd},
    signal::unix::{SignalKind, signal},
    time::{Instant, MissedTickBehavior, interval, timeout_at},
};
use tracing::{debug, info, warn};

use super::Failure;
use crate::{
    core::{engine::Engine, threshold::Thresholds, time::Moment},
    enrich::cgroup::Cgroups,
    kernel_facts::interfaces::Changes,
    sink::{HookState, HookStatus, Ready, Sink as _, Sinks, WallClock, json::Json},
    source::kernel::{Kernel, LoadError, Options, Plan, Verdict, attach::InterfaceOptions},
};

/// Options of `run`. Without any it watches every interface that carries traffic and every network
/// namespace, and prints to the terminal.
#[derive(Args, Debug)]
pub struct RunArgs {
    /// Watch these interfaces only (repeat for several; `*` and `?` match; `lo` must be named).
    #[arg(long = "interface", value_name = "NAME")]
    interfaces: Vec<String>,
    /// Leave these interfaces out.
    #[arg(long = "exclude-interface", value_name = "NAME")]
    exclude_interfaces: Vec<String>,
    /// Restrict the socket hooks and the census to these network namespaces: an inode number, a name
    /// of `ip netns`, or a path like /proc/PID/ns/net. (The packet hook sees the interfaces of the
    /// namespace that the agent runs in.)
    #[arg(long = "netns", value_name = "NAMESPACE")]
    netns: Vec<String>,
    /// What is printed on standard output.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
    /// How often the summary is written.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
    summary_interval: Duration,
    /// How many of the busiest port spaces are listed and exported.
    #[arg(long, value_name = "N", default_value_t = 20)]
    top: usize,
    /// How often sockets are counted (default: every 5 s, less often where it would take more than
    /// 0.4 % of a CPU).
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    census_interval: Option<Duration>,
    /// Memory for the eBPF maps in MiB (default: 1 % of the host's or the control group's, 12 to 24).
    #[arg(long, value_name = "MIB")]
    map_memory: Option<u64>,
    /// Size of the ring buffer in KiB, a power of two.
    #[arg(long, value_name = "KIB", default_value_t = 256, value_parser = parse_ring)]
    ring_buffer: u32,
    /// Set a threshold, such as alert.resolve=30s (repeat for several; a wrong name lists all).
    #[arg(long = "set", value_name = "NAME=VALUE", value_parser = parse_setting)]
    settings: Vec<String>,
    /// Stop after this time.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    duration: Option<Duration>,
}

/// A format of standard output.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Format {
    /// For people.
    Text,
    /// JSON lines, as docs/json.md describes them.
    Json,
}

fn parse_duration(text: &str) -> Result<Duration, String> {
    let duration = crate::core::threshold::duration(text)?;
    if duration < Duration::from_millis(100) {
        return Err("it must be at least 100ms".into());
    }
    Ok(duration)
}

fn parse_ring(text: &str) -> Result<u32, String> {
    match text.parse::<u32>() {
        Ok(kib) if kib.is_power_of_two() && (4..=65_536).contains(&kib) => Ok(kib),
        _ => Err("it must be a power of two from 4 to 65536".into()),
    }
}

fn parse_setting(text: &str) -> Result<String, String> {
    Thresholds::default().set(text).map(|()| text.to_owned())
}

/// The inode number of a network namespace.
fn netns_inode(text: &str) -> anyhow::Result<u32> {
    if let Ok(inode) = text.parse() {
        return Ok(inode);
    }
    let path = if text.contains('/') { text.to_owned() } else { format!("/run/netns/{text}") };
    let metadata = std::fs::metadata(Path::new(&path)).with_context(|| {
        format!("--netns {text}: {path} cannot be read; `ip netns` and `lsns -t net` list namespaces")
    })?;
    Ok(u32::try_from(metadata.ino())?)
}

/// Runs until SIGINT or SIGTERM.
///
/// # Errors
/// A missing right (exit code 77), a kernel that refuses everything, or a standard output that is gone.
pub fn run(args: &RunArgs) -> Result<(), Failure> {
    crate::log::init();
    let options = options(args)?;
    let mut thresholds = Thresholds::default();
    for setting in &args.settings {
        thresholds.set(setting).map_err(anyhow::Error::msg)?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("the async runtime cannot be started")?;
    let kernel = Kernel::start(&options).map_err(|error| {
        let code = if matches!(error, LoadError::Permission(_)) { 77 } else { 1 };
        Failure { code, error: error.into() }
    })?;
    runtime.block_on(Agent::new(kernel, thresholds, args)?.watch(args))?;
    Ok(())
}

fn options(args: &RunArgs) -> anyhow::Result<Options> {
    let mut plan = args.map_memory.map_or_else(Plan::for_host, |mib| Plan::for_bytes(mib << 20));
    plan.ring = args.ring_buffer << 10;
    Ok(Options {
        plan,
        interfaces: InterfaceOptions {
            include: args.interfaces.clone(),
            exclude: args.exclude_interfaces.clone(),
        },
        netns: args.netns.iter().map(|text| netns_inode(text)).collect::<anyhow::Result<_>>()?,
    })
}

struct Agent {
    kernel: Kernel,
    engine: Engine,
    sinks: Sinks,
    cgroups: Cgroups,
}

/// How often counters are read and rules judged.
const TICK: Duration = Duration::from_secs(1);
/// How often the place of the hook is checked even if no interface has changed.
const CHECK_HOOKS: Duration = Duration::from_secs(5);
/// Interfaces often change several at a time.
const SETTLE: Duration = Duration::from_millis(200);

impl Agent {
    fn new(kernel: Kernel, thresholds: Thresholds, args: &RunArgs) -> anyhow::Result<Self> {
        let clock = WallClock::live();
        let mut sinks = Sinks::new(clock.clone());
        match args.format {
            Format::Json => sinks.push(Json::new(io::stdout(), clock)),
            Format::Text => sinks.push(Json::new(io::stdout(), clock)),
        }
        debug!("standard output is a terminal: {}", io::stdout().is_terminal());
        Ok(Self { kernel, engine: Engine::new(thresholds), sinks, cgroups: Cgroups::default() })
    }

    async fn watch(mut self, args: &RunArgs) -> anyhow::Result<()> {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut links = Changes::open().inspect_err(|e| warn!("changes of interfaces: {e}")).ok();
        // SAFETY: the descriptor is owned and neither replaced nor closed while it is registered.
        let events = unsafe {
            AsyncFd::register_with_interest(self.kernel.events_fd()?, Interest::READABLE)
        }
        .map_err(io::Error::from)?;
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut check = interval(CHECK_HOOKS);
        let end = args.duration.map(|d| Instant::now() + d);
        let mut summary_due = Instant::now() + args.summary_interval;
        self.announce()?;
        loop {
            let ended = async {
                match end {
                    Some(end) => tokio::time::sleep_until(end).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                _ = interrupt.recv() => break,
                _ = terminate.recv() => break,
                () = ended => break,
                ready = events.readable() => {
                    ready?.clear_ready();
                    self.engine.events(&self.kernel.events()?);
                }
                changed = next(&mut links) => {
                    changed?;
                    // Let a burst of changes pass.
                    while timeout_at(Instant::now() + SETTLE, next(&mut links)).await.is_ok() {}
                    self.kernel.refresh_interfaces();
                }
                _ = check.tick() => self.kernel.refresh_interfaces(),
                _ = tick.tick() => {
                    self.look(args)?;
                    if Instant::now() >= summary_due {
                        summary_due += args.summary_interval;
                        self.sinks.overview(&self.engine.overview(args.top))?;
                    }
                }
            }
        }
        info!("ending");
        self.look(args)?;
        self.sinks.overview(&self.engine.overview(args.top))?;
        tokio::task::block_in_place(|| self.sinks.close())?;
        Ok(())
    }

    /// Reads the counters, judges, and tells what changed.
    fn look(&mut self, args: &RunArgs) -> anyhow::Result<()> {
        let census = match self.kernel.census(args.census_interval) {
            Ok(census) => census,
            Err(error) => {
                warn!("the census failed: {error:#}");
                None
            }
        };
        self.engine.events(&self.kernel.events()?);
        let snapshot = self.kernel.snapshot(census)?;
        let mut changes = self.engine.snapshot(&snapshot);
        self.cgroups.name(&mut changes);
        self.sinks.changes(snapshot.now, &changes)?;
        Ok(())
    }

    fn announce(&mut self) -> anyhow::Result<()> {
        let (interfaces, unseen) = self.kernel.interfaces();
        let hooks = self.kernel.hooks().into_iter().map(|h| HookState {
            name: h.name,
            status: match h.verdict {
                Verdict::Ok => HookStatus::Ok,
                Verdict::Degraded => HookStatus::Degraded,
                Verdict::Off => HookStatus::Off,
            },
            detail: h.detail,
        });
        let ready = Ready {
            hooks: hooks.collect(),
            interfaces,
            unseen,
            memory_bytes: self.kernel.map_memory(),
            version: env!("CARGO_PKG_VERSION"),
        };
        self.sinks.ready(Moment(crate::source::kernel::monotonic_ns()), &ready)?;
        Ok(())
    }
}

async fn next(links: &mut Option<Changes>) -> io::Result<()> {
    match links {
        Some(links) => links.next().await.map(drop),
        None => std::future::pending().await,
    }
}
