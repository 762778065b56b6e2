//! The loop of `tuplewatch run`: once per second the counters are read, judged and told.

use std::{io, time::Duration};

use tokio::{
    io::{Interest, unix::AsyncFd},
    signal::unix::{SignalKind, signal},
    time::{Instant, MissedTickBehavior, interval, timeout_at},
};
use tracing::{info, warn};

use super::run::summary_interval;
use crate::{
    config::{Config, PlacementFile},
    core::{engine::Engine, report::Change, saved::Saved, time::Moment},
    enrich::cgroup::Cgroups,
    kernel_facts::interfaces::Changes,
    recorder::Recorder,
    sink::{HookState, HookStatus, Ready, Sink as _, Sinks, WallClock, http::Pages},
    source::kernel::{Due, Kernel, Verdict, monotonic_ns},
    state::State,
};

/// The live source, the core and the sinks together.
pub(super) struct Agent {
    kernel: Kernel,
    engine: Engine,
    sinks: Sinks,
    pages: Option<Pages>,
    cgroups: Cgroups,
    clock: WallClock,
    /// The offset of the clock that the mutes were converted with.
    offset_ns: i64,
    state: Option<State>,
    recorder: Option<Recorder>,
    placements: Option<PlacementFile>,
}

/// How often counters are read and rules judged.
const TICK: Duration = Duration::from_secs(1);
/// How often the place of the hook is checked even if no interface has changed.
const CHECK_HOOKS: Duration = Duration::from_secs(5);
/// Interfaces often change several at a time.
const SETTLE: Duration = Duration::from_millis(200);

impl Agent {
    pub(super) fn new(
        kernel: Kernel,
        engine: Engine,
        sinks: Sinks,
        pages: Option<Pages>,
        clock: WallClock,
    ) -> Self {
        Self {
            kernel,
            engine,
            sinks,
            pages,
            cgroups: Cgroups::default(),
            offset_ns: clock.offset_ns(),
            clock,
            state: None,
            recorder: None,
            placements: None,
        }
    }

    /// Goes on where an agent before this one has ended.
    pub(super) fn with_state(mut self, state: Option<(State, Saved)>) -> Self {
        if let Some((state, saved)) = state {
            self.engine.restore(Moment(monotonic_ns()), saved);
            self.state = Some(state);
        }
        self
    }

    /// Writes the packets behind each alert that fires.
    pub(super) fn with_recorder(mut self, recorder: Option<Recorder>) -> Self {
        self.recorder = recorder;
        self
    }

    /// Follows what somebody outside says about placements.
    pub(super) fn with_placements(mut self, placements: Option<PlacementFile>) -> Self {
        self.placements = placements;
        self.place();
        self
    }

    /// Watches until SIGINT, SIGTERM or the end of the time asked for.
    pub(super) async fn watch(
        mut self,
        config: &Config,
        duration: Option<Duration>,
    ) -> anyhow::Result<()> {
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
        let end = duration.map(|d| Instant::now() + d);
        let summary_interval = summary_interval(config);
        let mut summary_due = Instant::now() + summary_interval;
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
                () = asked(self.pages.as_ref()) => self.show(config),
                _ = tick.tick() => {
                    self.look(config)?;
                    if Instant::now() >= summary_due {
                        summary_due += summary_interval;
                        self.sinks.overview(&self.engine.overview(top(config)))?;
                    }
                }
            }
        }
        info!("ending");
        self.look(config)?;
        self.sinks.overview(&self.engine.overview(top(config)))?;
        tokio::task::block_in_place(|| self.sinks.close())?;
        if let Some(state) = &mut self.state {
            state.keep(true, || self.engine.save());
        }
        Ok(())
    }

    /// Reads the counters, judges, and tells what changed.
    fn look(&mut self, config: &Config) -> anyhow::Result<()> {
        self.follow_clock(config);
        self.follow_placements();
        self.engine.events(&self.kernel.events()?);
        let mut snapshot = self.kernel.snapshot(&Due {
            interval: config.census_interval,
            near: config.thresholds.local.critical_utilization,
            counters: self.engine.wants_counters(),
        })?;
        snapshot.translations = self.kernel.translations(self.engine.wanted());
        let mut changes = self.engine.snapshot(&snapshot);
        self.cgroups.name(&mut changes);
        if let (Some(recorder), Some(ring)) = (&mut self.recorder, self.kernel.recorder()) {
            recorder.take(ring, &self.kernel.interface_names(), &mut changes);
            ring.watch(&self.engine.suspects());
        }
        self.kernel.flush_diagnostics();
        self.sinks.changes(snapshot.now, &changes)?;
        self.keep(&changes);
        if let Some(pages) = &self.pages {
            pages.looked();
        }
        Ok(())
    }

    /// Keeps what must outlive the agent. After the sinks: an alert that is kept and was not told would
    /// never be told.
    fn keep(&mut self, changes: &[Change]) {
        let Some(state) = &mut self.state else {
            return;
        };
        let changed = changes.iter().any(|c| matches!(c, Change::Alert(_)));
        state.keep(changed, || self.engine.save());
    }

    /// Follows a step of the time of day: the ends of mutes are given by it.
    fn follow_clock(&mut self, config: &Config) {
        self.clock.follow();
        let offset_ns = self.clock.offset_ns();
        if self.offset_ns != offset_ns {
            self.offset_ns = offset_ns;
            self.engine.set_mutes(config.rules(&self.clock).mutes);
            self.place();
        }
    }

    /// Takes the file of placements again if it has changed.
    fn follow_placements(&mut self) {
        let Some(placements) = &mut self.placements else {
            return;
        };
        match placements.follow() {
            Ok(true) => self.place(),
            Ok(false) => {}
            Err(problems) => warn!("what was known of placements before stays: {problems}"),
        }
    }

    fn place(&mut self) {
        if let Some(placements) = &self.placements {
            self.engine
                .set_placements(placements.placements(&self.clock));
        }
    }

    /// Shows the state to whoever asked for a page.
    fn show(&self, config: &Config) {
        let Some(pages) = &self.pages else { return };
        let mut overview = self.engine.overview(top(config));
        if let Some(recorder) = &self.recorder {
            for alert in &mut overview.alerts {
                recorder.name(alert);
            }
        }
        let alerts = overview.alerts.iter_mut().chain(&mut overview.muted);
        let findings = alerts.map(|alert| &mut alert.finding);
        self.cgroups
            .name_known(findings.chain(&mut overview.look_alikes));
        pages.show(self.ready(), overview);
    }

    fn announce(&mut self) -> anyhow::Result<()> {
        let ready = self.ready();
        self.sinks.ready(Moment(monotonic_ns()), &ready)?;
        Ok(())
    }

    /// What the kernel side says about itself now.
    fn ready(&self) -> Ready {
        let (interfaces, unseen) = self.kernel.interfaces();
        let hooks = self.kernel.hooks().into_iter().map(|h| HookState {
            detail: h.detail(),
            name: h.name,
            status: match h.verdict {
                Verdict::Ok => HookStatus::Ok,
                Verdict::Degraded => HookStatus::Degraded,
                Verdict::Off => HookStatus::Off,
            },
        });
        Ready {
            hooks: hooks.collect(),
            interfaces,
            unseen,
            memory_bytes: self.kernel.map_memory(),
            recorder: self
                .recorder
                .as_ref()
                .zip(self.kernel.recorder())
                .map(|(r, ring)| r.status(ring)),
            version: env!("CARGO_PKG_VERSION"),
        }
    }
}

fn top(config: &Config) -> usize {
    usize::try_from(config.top).unwrap_or(usize::MAX)
}

/// A client of the pages wants to know the present state.
async fn asked(pages: Option<&Pages>) {
    match pages {
        Some(pages) => pages.asked().await,
        None => std::future::pending().await,
    }
}

async fn next(links: &mut Option<Changes>) -> io::Result<()> {
    match links {
        Some(links) => links.next().await.map(drop),
        None => std::future::pending().await,
    }
}
