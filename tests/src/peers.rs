//! Typed handles of the peers that run in hosts.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::config::{
    FastOpenConfig, FixedConfig, IdleConfig, LateDupConfig, LoadConfig, PoolConfig, RawSynConfig,
    ServeConfig, flags,
};
use crate::host::Host;
use crate::process::Proc;
use crate::report::{
    ConnectionEvent, FastOpenReport, FixedReport, IdleReport, LISTENING, LateDupReport, LoadReport,
    PoolReport, RawSynReport, ServeReport,
};

/// How long a peer may take to end after it was told to, or after its own limit.
const GRACE: Duration = Duration::from_secs(30);

fn start<C: Serialize>(host: &Host, subcommand: &str, config: &C) -> Result<Proc> {
    let mut command = Host::peer_command(subcommand)?;
    command.args(flags(config));
    host.spawn(&format!("lab-peer {subcommand}"), command)
}

/// The report on the last line of a peer that has ended.
fn report<R: DeserializeOwned>(process: &Proc, limit: Duration) -> Result<R> {
    let status = process.wait(limit)?;
    ensure!(status.success(), "{}", process.describe());
    let line = process.stdout().pop();
    let line = line.with_context(|| format!("no report: {}", process.describe()))?;
    serde_json::from_str(&line).with_context(|| format!("reading the report {line:?}"))
}

macro_rules! peer {
    ($(#[$doc:meta])* $name:ident, $report:ty) => {
        $(#[$doc])*
        ///
        /// The process is killed when the handle is dropped.
        #[derive(Debug)]
        pub struct $name {
            process: Proc,
            limit: Duration,
        }

        impl $name {
            /// The process.
            #[must_use]
            pub fn process(&self) -> &Proc {
                &self.process
            }

            /// Its process id.
            #[must_use]
            pub fn pid(&self) -> u32 {
                self.process.pid()
            }

            /// Waits until it ends by itself and reads its report.
            ///
            /// # Errors
            /// If it fails, or runs longer than its configuration allows by 30 s.
            pub fn wait(self) -> Result<$report> {
                report(&self.process, self.limit)
            }

            /// Tells it to end now and reads its report.
            ///
            /// # Errors
            /// If it fails or does not end within 30 s.
            pub fn stop(self) -> Result<$report> {
                self.process.signal(rustix::process::Signal::TERM);
                report(&self.process, GRACE)
            }
        }
    };
}

peer! {
    /// A server that listens.
    Server, ServeReport
}
peer! {
    /// A load of short connections.
    Load, LoadReport
}
peer! {
    /// A load over kept connections.
    Pool, PoolReport
}
peer! {
    /// Connections from one port.
    Fixed, FixedReport
}
peer! {
    /// Connections that nobody uses.
    Idle, IdleReport
}
peer! {
    /// A sender of crafted SYNs.
    RawSyn, RawSynReport
}
peer! {
    /// Connections whose SYN comes twice.
    LateDup, LateDupReport
}
peer! {
    /// Fast Open connections.
    FastOpen, FastOpenReport
}

impl Load {
    /// The connections so far, if the load runs with `events`.
    #[must_use]
    pub fn events(&self) -> Vec<ConnectionEvent> {
        let lines = self.process.stdout();
        lines
            .iter()
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect()
    }
}

fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds) + GRACE
}

fn per_time(times: u64, milliseconds: u64) -> Duration {
    Duration::from_millis(times * (milliseconds + 10_000)) + GRACE
}

impl Host {
    /// Starts a server; returns when it listens.
    ///
    /// # Errors
    /// If it does not listen within 10 s (address in use or missing).
    pub fn serve(&self, config: &ServeConfig) -> Result<Server> {
        let process = start(self, "serve", config)?;
        let ready = process.find_stdout(0, Duration::from_secs(10), |line| line == LISTENING);
        if ready.is_none() {
            bail!("no server on {}: {}", config.listen, process.describe());
        }
        Ok(Server {
            process,
            limit: seconds(config.seconds),
        })
    }

    /// Starts a load of short connections.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn load(&self, config: &LoadConfig) -> Result<Load> {
        let limit = seconds(config.seconds)
            + Duration::from_millis(
                config.connect_timeout_ms + config.response_timeout_ms + config.hold_ms,
            );
        Ok(Load {
            process: start(self, "load", config)?,
            limit,
        })
    }

    /// Starts a load over kept connections.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn pool(&self, config: &PoolConfig) -> Result<Pool> {
        Ok(Pool {
            process: start(self, "pool", config)?,
            limit: seconds(config.seconds),
        })
    }

    /// Opens connections that nobody uses; returns when all are established.
    ///
    /// # Errors
    /// If they are not within 60 s.
    pub fn idle(&self, config: &IdleConfig) -> Result<Idle> {
        let process = start(self, "idle", config)?;
        let ready = process.find_stdout(0, Duration::from_secs(60), |line| line == LISTENING);
        if ready.is_none() {
            bail!(
                "no idle connections to {}: {}",
                config.listen,
                process.describe()
            );
        }
        Ok(Idle {
            process,
            limit: seconds(config.seconds),
        })
    }

    /// Starts connections from one source port.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn fixed(&self, config: &FixedConfig) -> Result<Fixed> {
        let limit = per_time(config.times, config.pause_ms + config.connect_timeout_ms);
        Ok(Fixed {
            process: start(self, "fixed", config)?,
            limit,
        })
    }

    /// Starts sending crafted SYNs.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn rawsyn(&self, config: &RawSynConfig) -> Result<RawSyn> {
        #[expect(clippy::cast_precision_loss, reason = "a time limit")]
        let limit = if config.rate > 0.0 {
            config.count as f64 / config.rate
        } else {
            120.0
        };
        Ok(RawSyn {
            process: start(self, "rawsyn", config)?,
            limit: seconds(limit),
        })
    }

    /// Starts connections whose SYN is repeated later.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn late_dup(&self, config: &LateDupConfig) -> Result<LateDup> {
        let limit = per_time(config.times, config.repeats * 600);
        Ok(LateDup {
            process: start(self, "late-dup", config)?,
            limit,
        })
    }

    /// Starts Fast Open connections; sets the host's `net.ipv4.tcp_fastopen` to client and server.
    ///
    /// # Errors
    /// If it cannot be started or the sysctl is refused.
    pub fn fastopen(&self, config: &FastOpenConfig) -> Result<FastOpen> {
        self.sysctl("net.ipv4.tcp_fastopen", 3)?;
        let limit = per_time(config.times, config.pause_ms);
        Ok(FastOpen {
            process: start(self, "fastopen", config)?,
            limit,
        })
    }
}
