//! A child process of the lab with its output.

use std::io::{BufRead as _, BufReader, Read};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::{spawner, wait_some};

/// Locks even if a thread panicked while it held the lock: the data is only ever replaced whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The lines one stream has printed so far.
#[derive(Debug, Default)]
struct Lines {
    state: Mutex<(Vec<String>, bool)>,
    changed: Condvar,
}

impl Lines {
    fn read(self: &Arc<Self>, stream: impl Read + Send + 'static) {
        let lines = Arc::clone(self);
        std::thread::spawn(move || {
            let mut reader = BufReader::new(stream);
            let mut line = Vec::new();
            while matches!(reader.read_until(b'\n', &mut line), Ok(1..)) {
                let text = String::from_utf8_lossy(&line)
                    .trim_end_matches('\n')
                    .to_owned();
                lock(&lines.state).0.push(text);
                lines.changed.notify_all();
                line.clear();
            }
            lock(&lines.state).1 = true;
            lines.changed.notify_all();
        });
    }

    /// The first line from `start` on that `wanted` accepts, with its index; waits up to `timeout`.
    fn find(
        &self,
        start: usize,
        timeout: Duration,
        mut wanted: impl FnMut(&str) -> bool,
    ) -> Option<(usize, String)> {
        let end = Instant::now() + timeout;
        let mut next = start;
        let mut state = lock(&self.state);
        loop {
            while let Some(line) = state.0.get(next) {
                if wanted(line) {
                    return Some((next, line.clone()));
                }
                next += 1;
            }
            let left = end.saturating_duration_since(Instant::now());
            if state.1 || left.is_zero() {
                return None;
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn closed(&self) -> bool {
        lock(&self.state).1
    }
}

#[derive(Debug)]
struct Inner {
    name: String,
    pid: u32,
    child: Mutex<Child>,
    stdout: Arc<Lines>,
    stderr: Arc<Lines>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        let child = self.child.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Fails only if it has already ended.
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// A running child; killed when the last clone is dropped, when its lab is dropped, or with the test.
#[derive(Debug, Clone)]
pub struct Proc {
    inner: Arc<Inner>,
}

/// Lets the lab end what is still running without keeping it alive.
#[derive(Debug)]
pub(crate) struct WeakProc(std::sync::Weak<Inner>);

impl WeakProc {
    pub(crate) fn kill(&self) {
        if let Some(inner) = self.0.upgrade() {
            Proc { inner }.kill9();
        }
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.0.strong_count() == 0
    }
}

impl Proc {
    /// Starts `command` (already told where to run) and collects its output.
    pub(crate) fn start(name: &str, command: Command) -> Result<Self> {
        Ok(Self::start_with_stdin(name, command)?.0)
    }

    /// As [`Proc::start`], and hands over the write end of standard input if the command pipes it.
    pub(crate) fn start_with_stdin(
        name: &str,
        mut command: Command,
    ) -> Result<(Self, Option<ChildStdin>)> {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let program = command.get_program().to_string_lossy().into_owned();
        let mut child = spawner::spawn(command)
            .with_context(|| format!("{name}: starting {program}: is it installed?"))?;
        let stdout = Arc::new(Lines::default());
        let stderr = Arc::new(Lines::default());
        if let Some(stream) = child.stdout.take() {
            stdout.read(stream);
        }
        if let Some(stream) = child.stderr.take() {
            stderr.read(stream);
        }
        let stdin = child.stdin.take();
        let pid = child.id();
        let child = Mutex::new(child);
        let inner = Inner {
            name: name.to_owned(),
            pid,
            child,
            stdout,
            stderr,
        };
        Ok((
            Self {
                inner: Arc::new(inner),
            },
            stdin,
        ))
    }

    pub(crate) fn downgrade(&self) -> WeakProc {
        WeakProc(Arc::downgrade(&self.inner))
    }

    /// The name given at start, for messages.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.inner.pid
    }

    /// The exit status if the process has ended.
    pub fn exit_status(&self) -> Option<ExitStatus> {
        lock(&self.inner.child).try_wait().ok().flatten()
    }

    /// True while the process has not ended.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.exit_status().is_none()
    }

    /// Waits for the process to end, and for its output to be complete.
    ///
    /// # Errors
    /// If it has not ended within `timeout` (it goes on running).
    pub fn wait(&self, timeout: Duration) -> Result<ExitStatus> {
        let Some(status) = wait_some(timeout, || self.exit_status()) else {
            bail!(
                "{} (pid {}) still runs after {timeout:?}",
                self.name(),
                self.pid()
            );
        };
        // A grandchild could keep the pipes open for ever.
        let closed = || self.inner.stdout.closed() && self.inner.stderr.closed();
        crate::wait_for(Duration::from_secs(2), closed);
        Ok(status)
    }

    /// Sends a signal; does nothing if the process has ended.
    pub fn signal(&self, signal: Signal) {
        let mut child = lock(&self.inner.child);
        // Not reaped yet while the lock is held, so the number cannot belong to somebody else.
        if let (Ok(None), Some(pid)) = (
            child.try_wait(),
            Pid::from_raw(self.inner.pid.cast_signed()),
        ) {
            let _ = kill_process(pid, signal);
        }
    }

    /// Sends SIGTERM and waits for the end.
    ///
    /// # Errors
    /// If it has not ended within `timeout`; it is killed then.
    pub fn terminate(&self, timeout: Duration) -> Result<ExitStatus> {
        self.signal(Signal::TERM);
        let result = self.wait(timeout);
        if result.is_err() {
            self.kill9();
        }
        result.with_context(|| format!("{} ignored SIGTERM", self.name()))
    }

    /// Sends SIGKILL and waits for the end.
    pub fn kill9(&self) {
        let mut child = lock(&self.inner.child);
        let _ = child.kill();
        let _ = child.wait();
    }

    /// The lines printed on standard output so far.
    #[must_use]
    pub fn stdout(&self) -> Vec<String> {
        lock(&self.inner.stdout.state).0.clone()
    }

    /// The lines printed on standard error so far.
    #[must_use]
    pub fn stderr(&self) -> Vec<String> {
        lock(&self.inner.stderr.state).0.clone()
    }

    /// The first line of standard output, from line `start` on, that `wanted` accepts.
    pub fn find_stdout(
        &self,
        start: usize,
        timeout: Duration,
        wanted: impl FnMut(&str) -> bool,
    ) -> Option<(usize, String)> {
        self.inner.stdout.find(start, timeout, wanted)
    }

    /// The first line of standard error, from line `start` on, that `wanted` accepts.
    pub fn find_stderr(
        &self,
        start: usize,
        timeout: Duration,
        wanted: impl FnMut(&str) -> bool,
    ) -> Option<(usize, String)> {
        self.inner.stderr.find(start, timeout, wanted)
    }

    /// What a failure message should tell about the process: its state and its last words.
    #[must_use]
    pub fn describe(&self) -> String {
        let state = match self.exit_status() {
            None => "is running".to_owned(),
            Some(status) => match (status.code(), status.signal()) {
                (Some(code), _) => format!("ended with exit code {code}"),
                (None, signal) => format!("was ended by signal {}", signal.unwrap_or_default()),
            },
        };
        let tail = |lines: Vec<String>| {
            let skip = lines.len().saturating_sub(15);
            lines
                .into_iter()
                .skip(skip)
                .map(|line| format!("\n    {line}"))
                .collect::<String>()
        };
        format!(
            "{} (pid {}) {state}; last lines of stderr:{}\n  of stdout:{}",
            self.name(),
            self.pid(),
            tail(self.stderr()),
            tail(self.stdout())
        )
    }
}
