//! The loop of `tuplewatch run`: once per second the counters are read, judged and told.

use std::{io, time::Duration};

use tokio::{
    io::{Interest, unix::AsyncFd},
    signal::unix::{SignalKind, signal},
    time::{Instant, MissedTickBehavior, interval, timeout_at},
};
use tracing::{info, warn};

use super::run::RunArgs;
use crate::{
    core::{engine::Engine, threshold::Thresholds, time::Moment},
    enrich::cgroup::Cgroups,
    kernel_facts::interfaces::Changes,
    sink::{HookState, HookStatus, Ready, Sink as _, Sinks},
    source::kernel::{Kernel, Verdict},
};

/// The live source, the core and the sinks together.
pub(super) struct Agent {
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
    pub(super) fn new(kernel: Kernel, thresholds: Thresholds, sinks: Sinks) -> Self {
        Self {
            kernel,
            engine: Engine::new(thresholds),
            sinks,
            cgroups: Cgroups::default(),
        }
    }

    /// Watches until SIGINT, SIGTERM or the end of the time asked for.
    pub(super) async fn watch(mut self, args: &RunArgs) -> anyhow::Result<()> {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut links = Changes::open()
            .inspect_err(|e| warn!("changes of interfaces: {e}"))
            .ok();
        // SAFETY: the descriptor is owned and neither replaced nor closed while it is registered.
        let events = unsafe {
            AsyncFd::register_with_interest(self.kernel.events_fd()?, Interest::READABLE)
        }
        .map_err(io::Error::from)?;
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut check = interval(CHECK_HOOKS);
        let end = args.duration.map(|d| Instant::now() + d);
        let mut summary_due = Instant::now() + args.summary_interval();
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
                        summary_due += args.summary_interval();
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
        self.kernel.flush_diagnostics();
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
        self.sinks
            .ready(Moment(crate::source::kernel::monotonic_ns()), &ready)?;
        Ok(())
    }
}

async fn next(links: &mut Option<Changes>) -> io::Result<()> {
    match links {
        Some(links) => links.next().await.map(drop),
        None => std::future::pending().await,
    }
}
