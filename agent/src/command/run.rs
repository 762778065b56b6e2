//! `tuplewatch run`: the live source, the core and the sinks, once per second.

use std::{
    io::{self, IsTerminal as _},
    os::unix::fs::MetadataExt as _,
    path::Path,
    time::Duration,
};

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use opentelemetry_sdk::metrics::Temporality;

use super::{Failure, watch::Agent};
use crate::{
    core::threshold::Thresholds,
    log,
    sink::{
        Sinks, WallClock,
        json::Json,
        otlp::{Otlp, OtlpConfig, Protocol},
        terminal::{Screen, Terminal},
    },
    source::kernel::{Kernel, LoadError, Options, Plan, attach::InterfaceOptions},
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
    /// How often the summary is written (default: 2 s on a terminal, else 10 s).
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    summary_interval: Option<Duration>,
    /// How many of the busiest port spaces are listed and exported.
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub(super) top: usize,
    /// How often sockets are counted (default: every 5 s, less often where it would take more than
    /// 0.4 % of a CPU).
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(super) census_interval: Option<Duration>,
    /// Memory for the eBPF maps in MiB (default: 1 % of the host's or the control group's, 12 to 24).
    #[arg(long, value_name = "MIB")]
    map_memory: Option<u64>,
    /// Size of the ring buffer in KiB, a power of two.
    #[arg(long, value_name = "KIB", default_value_t = 256, value_parser = parse_ring)]
    ring_buffer: u32,
    /// Set a threshold, such as alert.resolve=30s (repeat for several; a wrong name lists all).
    #[arg(long = "set", value_name = "NAME=VALUE", value_parser = parse_setting)]
    settings: Vec<String>,
    /// Load the kernel side with its diagnostics on; they go to the log
    /// (RUST_LOG=tuplewatch=debug).
    #[arg(long)]
    kernel_log: bool,
    /// Stop after this time.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(super) duration: Option<Duration>,
    /// Send metrics and alerts by OTLP to this receiver, such as http://127.0.0.1:4318 (else
    /// OTEL_EXPORTER_OTLP_ENDPOINT; the other OTEL_* variables count too). Off without either.
    #[arg(long, value_name = "URL")]
    otlp_endpoint: Option<String>,
    /// grpc or http/protobuf (default: by the port, else http/protobuf).
    #[arg(long, value_name = "PROTOCOL")]
    otlp_protocol: Option<Protocol>,
    /// Time between two exports of metrics (default: OTEL_METRIC_EXPORT_INTERVAL, else 60 s).
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    otlp_interval: Option<Duration>,
    /// Whether counters are exported as totals (Prometheus, Grafana) or differences (Datadog).
    #[arg(long, value_enum)]
    otlp_temporality: Option<ExportedAs>,
}

/// How counters are exported.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum ExportedAs {
    /// Totals since the start.
    Cumulative,
    /// Differences from one export to the next.
    Delta,
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
    let path = if text.contains('/') {
        text.to_owned()
    } else {
        format!("/run/netns/{text}")
    };
    let metadata = std::fs::metadata(Path::new(&path)).with_context(|| {
        format!(
            "--netns {text}: {path} cannot be read; `ip netns` and `lsns -t net` list namespaces"
        )
    })?;
    Ok(u32::try_from(metadata.ino())?)
}

/// Runs until SIGINT or SIGTERM.
///
/// # Errors
/// A missing right (exit code 77), a kernel that refuses everything, or a standard output that is gone.
pub fn run(args: &RunArgs) -> Result<(), Failure> {
    give_memory_back();
    let screen = Screen::stdout();
    let shared = args.format == Format::Text && screen.is_live() && io::stderr().is_terminal();
    log::init(shared.then(|| screen.messages()));
    let options = options(args)?;
    let mut thresholds = Thresholds::default();
    for setting in &args.settings {
        thresholds.set(setting).map_err(anyhow::Error::msg)?;
    }
    // rustls has no provider of its own choice with the features that keep a C build out.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("the async runtime cannot be started")?;
    // Before the kernel side: a typo in an option must not cost a start.
    let sinks = runtime.block_on(async { args.sinks(screen) })?;
    let kernel = Kernel::start(&options).map_err(|error| {
        let code = if matches!(error, LoadError::Permission(_)) {
            77
        } else {
            1
        };
        Failure {
            code,
            error: error.into(),
        }
    })?;
    runtime.block_on(Agent::new(kernel, thresholds, sinks).watch(args))?;
    Ok(())
}

/// Large buffers go back to the kernel when they are freed. By default glibc stops doing so after the
/// first one, and the memory of one busy second would stay with the agent for good.
fn give_memory_back() {
    const LARGE: libc::c_int = 128 << 10;
    // SAFETY: called before there is a second thread; it only sets a number.
    unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE) };
}

impl RunArgs {
    /// How often the summary is written.
    pub(super) fn summary_interval(&self) -> Duration {
        let live = self.format == Format::Text && io::stdout().is_terminal();
        self.summary_interval
            .unwrap_or(Duration::from_secs(if live { 2 } else { 10 }))
    }

    fn sinks(&self, screen: Screen) -> Result<Sinks, Failure> {
        let clock = WallClock::live();
        let mut sinks = Sinks::new(clock.clone());
        match self.format {
            Format::Json => sinks.push(Json::new(io::stdout(), clock.clone())),
            Format::Text => sinks.push(Terminal::new(screen, clock.clone())),
        }
        let config = OtlpConfig {
            endpoint: self.otlp_endpoint.clone(),
            protocol: self.otlp_protocol,
            headers: Vec::new(),
            interval: self.otlp_interval,
            temporality: self.otlp_temporality.map(|t| match t {
                ExportedAs::Cumulative => Temporality::Cumulative,
                ExportedAs::Delta => Temporality::Delta,
            }),
        };
        let otlp =
            Otlp::start(&config, clock, env!("CARGO_PKG_VERSION")).map_err(|error| Failure {
                code: 78,
                error: error.into(),
            })?;
        if let Some(otlp) = otlp {
            sinks.push(otlp);
        }
        Ok(sinks)
    }
}

fn options(args: &RunArgs) -> anyhow::Result<Options> {
    let mut plan = args
        .map_memory
        .map_or_else(Plan::for_host, |mib| Plan::for_bytes(mib << 20));
    plan.ring = args.ring_buffer << 10;
    Ok(Options {
        plan,
        kernel_log: args.kernel_log,
        interfaces: InterfaceOptions {
            include: args.interfaces.clone(),
            exclude: args.exclude_interfaces.clone(),
        },
        netns: args
            .netns
            .iter()
            .map(|text| netns_inode(text))
            .collect::<anyhow::Result<_>>()?,
    })
}
