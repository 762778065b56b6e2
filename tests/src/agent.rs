//! The agent under test, running in a host of the lab.

use std::path::PathBuf;
use std::process::{Command, ExitStatus};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use crate::host::Host;
use crate::process::{Proc, lock};

/// How to start the agent.
#[derive(Debug, Clone, Default)]
pub struct AgentConfig {
    /// Arguments after `run --format json`.
    pub args: Vec<String>,
    /// Environment variables.
    pub env: Vec<(String, String)>,
    /// The binary; default `$TUPLEWATCH_BIN`, else `target/release/tuplewatch`.
    pub binary: Option<PathBuf>,
}

impl AgentConfig {
    /// With these arguments after `run --format json`.
    pub fn with_args<S: Into<String>>(args: impl IntoIterator<Item = S>) -> Self {
        Self {
            args: args.into_iter().map(Into::into).collect(),
            ..Self::default()
        }
    }

    /// Where the binary is.
    ///
    /// # Errors
    /// If it is missing.
    pub fn binary(&self) -> Result<PathBuf> {
        let path = self
            .binary
            .clone()
            .or_else(|| std::env::var_os("TUPLEWATCH_BIN").map(PathBuf::from))
            .unwrap_or_else(|| {
                let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(
                    || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target")),
                    PathBuf::from,
                );
                target.join("release/tuplewatch")
            });
        path.canonicalize().with_context(|| {
            format!(
                "the agent {} is missing: `cargo build --release -p tuplewatch`, or set \
                 TUPLEWATCH_BIN",
                path.display()
            )
        })
    }
}

/// A running agent. Its JSON lines are parsed as they come; lines that are not JSON are an error of
/// the agent and fail the next wait.
#[derive(Debug)]
pub struct Agent {
    process: Proc,
    lines: Mutex<Vec<Value>>,
}

impl Host {
    /// Starts the agent in this host.
    ///
    /// # Errors
    /// If the binary is missing or cannot be started.
    pub fn agent(&self, config: AgentConfig) -> Result<Agent> {
        let command = Command::new(config.binary()?);
        self.agent_as(command, config)
    }

    /// Starts the agent by a command that begins with other programs, such as one that takes rights away.
    /// They must become the agent, so that its process is theirs.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn agent_as(&self, mut command: Command, config: AgentConfig) -> Result<Agent> {
        command
            .args(["run", "--format", "json"])
            .args(&config.args)
            .envs(config.env);
        let process = self.spawn("tuplewatch", command)?;
        Ok(Agent {
            process,
            lines: Mutex::default(),
        })
    }
}

impl Agent {
    /// The process: pid, standard error lines, signals.
    #[must_use]
    pub fn process(&self) -> &Proc {
        &self.process
    }

    /// The process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// The lines on standard error so far.
    #[must_use]
    pub fn stderr(&self) -> Vec<String> {
        self.process.stderr()
    }

    /// Every JSON line so far.
    ///
    /// # Errors
    /// If a line is not JSON.
    pub fn lines(&self) -> Result<Vec<Value>> {
        let mut lines = lock(&self.lines);
        for text in self.process.stdout().into_iter().skip(lines.len()) {
            let value = serde_json::from_str(&text)
                .with_context(|| format!("the agent printed a line that is not JSON: {text:?}"))?;
            lines.push(value);
        }
        Ok(lines.clone())
    }

    /// The JSON lines of one `type` so far, e.g. `"summary"`.
    ///
    /// # Errors
    /// If a line is not JSON.
    pub fn of_type(&self, kind: &str) -> Result<Vec<Value>> {
        let mut lines = self.lines()?;
        lines.retain(|line| line["type"] == kind);
        Ok(lines)
    }

    /// The alert lines so far, one per change of state.
    ///
    /// # Errors
    /// If a line is not JSON.
    pub fn alerts(&self) -> Result<Vec<Value>> {
        self.of_type("alert")
    }

    /// Waits for a JSON line that `wanted` accepts; those already printed count.
    ///
    /// # Errors
    /// If none came within `timeout` or the agent ended: with the last lines of its output.
    pub fn wait_line(
        &self,
        timeout: Duration,
        mut wanted: impl FnMut(&Value) -> bool,
    ) -> Result<Value> {
        let timeout = timeout * crate::patience();
        let end = Instant::now() + timeout;
        let mut next = 0;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let Some((index, text)) = self.process.find_stdout(next, left, |_| true) else {
                bail!(
                    "no such line within {timeout:?}: {}",
                    self.process.describe()
                );
            };
            next = index + 1;
            let value: Value = serde_json::from_str(&text)
                .with_context(|| format!("the agent printed a line that is not JSON: {text:?}"))?;
            if wanted(&value) {
                return Ok(value);
            }
        }
    }

    /// Waits for an alert line that `wanted` accepts; those already printed count.
    ///
    /// # Errors
    /// As [`Agent::wait_line`].
    pub fn wait_alert(
        &self,
        timeout: Duration,
        mut wanted: impl FnMut(&Value) -> bool,
    ) -> Result<Value> {
        self.wait_line(timeout, |line| line["type"] == "alert" && wanted(line))
            .context("waiting for an alert")
    }

    /// Waits until the agent says that all its hooks are attached.
    ///
    /// # Errors
    /// As [`Agent::wait_line`].
    pub fn wait_ready(&self, timeout: Duration) -> Result<Value> {
        self.wait_line(timeout, |line| line["type"] == "ready")
            .context("waiting for \"ready\"")
    }

    /// Watches for `time` and fails if an alert that `unwanted` accepts appears; those already
    /// printed count.
    ///
    /// # Errors
    /// If such an alert appears or the agent ends.
    pub fn expect_no_alert(&self, time: Duration, unwanted: impl Fn(&Value) -> bool) -> Result<()> {
        std::thread::sleep(time);
        for alert in self.alerts()? {
            ensure!(!unwanted(&alert), "an alert that should not be: {alert}");
        }
        ensure!(self.process.is_running(), "{}", self.process.describe());
        Ok(())
    }

    /// Sends SIGTERM and waits up to 10 s for the end.
    ///
    /// # Errors
    /// If it does not end; it is killed then.
    pub fn terminate(&self) -> Result<ExitStatus> {
        self.process.terminate(Duration::from_secs(10))
    }

    /// Sends SIGKILL and waits for the end.
    pub fn kill9(&self) {
        self.process.kill9();
    }
}
