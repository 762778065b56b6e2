//! What outlives the agent, on disk: firing alerts, their history, inferred pools.
//!
//! One file in one directory, replaced as a whole. Whatever is wrong with either is warned of, and the
//! agent runs without: it is there to watch, not to keep files.

mod examine;
mod file;
#[cfg(test)]
mod tests;
mod writer;

use std::{
    fs::{self, File, OpenOptions},
    io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use rustix::fs::{FlockOperation, flock};
use tracing::{info, warn};

use crate::{config::StateDir, core::saved::Saved, sink::WallClock};
use file::Stamp;
use writer::Writer;

pub use examine::{Examined, examine};

/// What systemd sets for `StateDirectory=`: paths separated by colons.
const SYSTEMD: &str = "STATE_DIRECTORY";
/// How often it is written while no alert changes.
const EVERY: Duration = Duration::from_secs(60);
/// An agent before us may still be on its way out.
const PATIENCE: Duration = Duration::from_secs(2);

/// The open state directory.
#[derive(Debug)]
pub struct State {
    writer: Writer,
    clock: WallClock,
    written: Option<Instant>,
    /// Held as long as the agent lives: two agents would overwrite each other's alerts.
    _lock: File,
}

/// The directory that is meant; `systemd` is the value of `$STATE_DIRECTORY`.
fn directory(wanted: &StateDir, systemd: Option<String>) -> Option<PathBuf> {
    match wanted {
        StateDir::Off => None,
        StateDir::At(path) => Some(path.clone()),
        StateDir::Auto => {
            let first = systemd?.split(':').next()?.to_owned();
            (!first.is_empty()).then(|| first.into())
        }
    }
}

impl State {
    /// Opens the directory and gives what an agent before this one has kept there. `None` if nothing is
    /// to be kept, or it cannot be (that is warned of).
    #[must_use]
    pub fn open(wanted: &StateDir, clock: &WallClock) -> Option<(Self, Saved)> {
        let directory = directory(wanted, std::env::var(SYSTEMD).ok())?;
        match Self::open_in(&directory, clock) {
            Ok(opened) => Some(opened),
            Err(error) => {
                warn!(
                    "alerts will be forgotten at the next restart: {error:#}; `state_dir` (--state-dir) \
                     names another directory or `off`"
                );
                None
            }
        }
    }

    fn open_in(directory: &Path, clock: &WallClock) -> anyhow::Result<(Self, Saved)> {
        fs::create_dir_all(directory)
            .with_context(|| format!("{} cannot be made", directory.display()))?;
        let lock = lock(directory)?;
        let path = directory.join(file::NAME);
        let mut saved = match file::read(&path, &Stamp::now()) {
            Ok(saved) => saved,
            Err(error) => {
                let aside = file::put_aside(&path);
                warn!(
                    "{}: {error}; nothing is known of alerts before, {aside}",
                    path.display()
                );
                Saved::default()
            }
        };
        if !saved.alerts.is_empty() {
            info!("{} alerts go on from before", saved.alerts.len());
        }
        saved.convert(|moment| clock.from_epoch_ns(moment.signed()));
        let writer = Writer::start(path).context("its thread cannot be started")?;
        let state = Self {
            writer,
            clock: clock.clone(),
            written: None,
            _lock: lock,
        };
        Ok((state, saved))
    }

    /// Keeps the present state: at once if an alert `changed`, else now and then.
    pub fn keep(&mut self, changed: bool, saved: impl FnOnce() -> Saved) {
        let due = self.written.is_none_or(|at| at.elapsed() >= EVERY);
        if !(changed || due) {
            return;
        }
        self.written = Some(Instant::now());
        let mut saved = saved();
        let clock = &self.clock;
        saved.convert(|moment| {
            let ns = clock.epoch_ns(moment);
            crate::core::time::Moment(ns.cast_unsigned())
        });
        self.writer.write(saved, Stamp::now());
    }
}

/// Takes the directory for this process; the kernel gives it back when the process ends, however it
/// does.
fn lock(directory: &Path) -> anyhow::Result<File> {
    let path = directory.join("lock");
    let file = OpenOptions::new()
        .create(true)
        .write(true)
        .truncate(false)
        .open(&path)
        .with_context(|| format!("{} cannot be written", path.display()))?;
    let start = Instant::now();
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK) if start.elapsed() < PATIENCE => {
                thread::sleep(PATIENCE / 20);
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {
                anyhow::bail!(
                    "another tuplewatch keeps its state in {}",
                    directory.display()
                );
            }
            Err(error) => {
                return Err(io::Error::from(error))
                    .with_context(|| format!("{} cannot be locked", path.display()));
            }
        }
    }
}
