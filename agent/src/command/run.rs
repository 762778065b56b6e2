//! `tuplewatch run`: the live source, the core and the sinks, once per second.

use std::{
    io::{self, IsTerminal as _},
    os::unix::fs::MetadataExt as _,
    path::Path,
    time::Duration,
};

use anyhow::Context as _;
use clap::Args;
use tracing::warn;

use super::{
    Failure,
    flags::{ConfigFlags, placements},
    watch::Agent,
};
use crate::{
    config::{Config, Format, Loaded},
    core::{engine::Engine, value},
    log,
    recorder::Recorder,
    sink::{
        Sinks, WallClock,
        http::{About, Configuration, Pages},
        json::Json,
        otlp::Otlp,
        terminal::{Screen, Terminal},
    },
    source::kernel::{Kernel, LoadError, Options, Plan, attach::InterfaceOptions, forget_object},
    state::State,
};

/// Options of `run`. Without any it watches every interface that carries traffic and every network
/// namespace, and prints to the terminal.
#[derive(Args, Debug)]
pub struct RunArgs {
    #[command(flatten)]
    flags: ConfigFlags,
    /// Stop after this time.
    #[arg(long, value_name = "TIME", value_parser = value::duration)]
    duration: Option<Duration>,
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
        format!("netns {text}: {path} cannot be read; `ip netns` and `lsns -t net` list namespaces")
    })?;
    Ok(u32::try_from(metadata.ino())?)
}

/// Runs until SIGINT or SIGTERM.
///
/// # Errors
/// A missing right (exit code 77), a kernel that refuses everything, or a standard output that is gone.
pub fn run(args: &RunArgs) -> Result<(), Failure> {
    give_memory_back();
    let loaded = args.flags.load()?;
    let config = &loaded.config;
    let screen = Screen::stdout();
    let shared = config.format == Format::Text && screen.is_live() && io::stderr().is_terminal();
    log::init(shared.then(|| screen.messages()), config.log.as_deref());
    for warning in &loaded.warnings {
        warn!("{warning}");
    }
    let options = options(config)?;
    let clock = WallClock::live();
    let egress = config.egress().map_err(|error| Failure {
        code: 78,
        error: anyhow::Error::msg(error),
    })?;
    // rustls has no provider of its own choice with the features that keep a C build out.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("the async runtime cannot be started")?;
    // Before the kernel side: a typo in an option must not cost a start.
    let (sinks, pages) = runtime.block_on(async { sinks(&loaded, screen, &clock) })?;
    let placements = placements(config.placements.as_deref())?;
    let recorder = recorder(config, &clock)?;
    let state = State::open(&config.state_dir, &clock);
    let kernel = Kernel::start(&options).map_err(|error: LoadError| Failure {
        code: if error.is_permission() { 77 } else { 1 },
        error: error.into(),
    })?;
    give_back_what_the_start_took();
    let engine = Engine::new(config.rules(&clock)).with_egress(egress);
    let agent = Agent::new(kernel, engine, sinks, pages, clock)
        .with_state(state)
        .with_recorder(recorder)
        .with_placements(placements);
    runtime.block_on(agent.watch(config, args.duration))?;
    Ok(())
}

/// Large buffers go back to the kernel when they are freed. By default glibc stops doing so after the
/// first one, and the memory of one busy second would stay with the agent for good.
fn give_memory_back() {
    const LARGE: libc::c_int = 128 << 10;
    // SAFETY: called before there is a second thread; it only sets a number.
    unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE) };
}

/// The kernel's types and our object are parsed once and forgotten: megabytes in small pieces, which would stay in the
/// heap, and the object itself.
fn give_back_what_the_start_took() {
    // SAFETY: it may be called at any time; it changes nothing but where free memory lies.
    unsafe { libc::malloc_trim(0) };
    forget_object();
}

/// How often the summary is written.
pub(super) fn summary_interval(config: &Config) -> Duration {
    let live = config.format == Format::Text && io::stdout().is_terminal();
    let default = Duration::from_secs(if live { 2 } else { 10 });
    config.summary_interval.unwrap_or(default)
}

fn sinks(
    loaded: &Loaded,
    screen: Screen,
    clock: &WallClock,
) -> Result<(Sinks, Option<Pages>), Failure> {
    fn wrong(error: impl Into<anyhow::Error>) -> Failure {
        Failure {
            code: 78,
            error: error.into(),
        }
    }
    let config = &loaded.config;
    let mut sinks = Sinks::new(clock.clone());
    match config.format {
        Format::Json => sinks.push(Json::new(io::stdout(), clock.clone())),
        Format::Text => sinks.push(Terminal::new(screen, clock.clone())),
    }
    let version = env!("CARGO_PKG_VERSION");
    let otlp = Otlp::start(&config.otlp(), clock.clone(), version).map_err(wrong)?;
    let about = About {
        version,
        configuration: Configuration::new(loaded.file.clone(), &loaded.show()),
        deliveries: otlp.as_ref().map(Otlp::deliveries),
    };
    if let Some(otlp) = otlp {
        sinks.push(otlp);
    }
    let pages = config.http.start(clock.clone(), about).map_err(wrong)?;
    Ok((sinks, pages))
}

/// The flight recorder, if it is wanted.
fn recorder(config: &Config, clock: &WallClock) -> Result<Option<Recorder>, Failure> {
    let settings = &config.recorder;
    let Some(dir) = &settings.dir else {
        return Ok(None);
    };
    Recorder::open(dir, settings.size, clock.clone())
        .map(Some)
        .map_err(|error| Failure {
            code: 78,
            error: error.context(
                "the flight recorder cannot write there; `recorder.dir` (--recorder-dir) names another \
                 directory or `off`",
            ),
        })
}

/// What the live source is asked to do.
pub(super) fn options(config: &Config) -> anyhow::Result<Options> {
    let mut plan = config
        .map_memory
        .map_or_else(Plan::for_host, Plan::for_bytes);
    plan.ring = config.ring_buffer;
    let asks = config.rules(&WallClock::live()).ask_for_exchanges();
    if asks && !config.http_sniff {
        warn!(
            "`pinned_suspect` is not looked for: without `http_sniff` it is not known which connections \
             cannot be read"
        );
    }
    Ok(Options {
        plan,
        kernel_log: config.kernel_log,
        recorder: config.recorder.dir.as_ref().map(|_| config.recorder.memory),
        http_sniff: config.http_sniff,
        exchanges: asks && config.http_sniff,
        interfaces: InterfaceOptions {
            include: config.interfaces.clone(),
            exclude: config.exclude_interfaces.clone(),
        },
        netns: config
            .netns
            .iter()
            .map(|text| netns_inode(text))
            .collect::<anyhow::Result<_>>()?,
    })
}
