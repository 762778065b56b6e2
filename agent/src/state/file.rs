//! The file of the state: JSON with a version, replaced as a whole.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use rustix::time::ClockId;
use serde::{Deserialize, Serialize};

use crate::{clocks::clock_ns, core::saved::Saved};

/// Its name in the directory.
pub(super) const NAME: &str = "state.json";
/// What tells it from other people's files.
const FORMAT: &str = "tuplewatch-state";
/// Fields may be added to a version; one that is removed or changes its meaning makes a new one.
const VERSION: u32 = 1;
/// A file of ours is never longer.
const LONGEST: usize = 16 << 20;
/// A difference of two clocks below this is no step.
const STEP_NS: i64 = 1_000_000_000;

/// A moment by all clocks that outlive a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stamp {
    /// Nanoseconds since the Unix epoch.
    pub(super) time_ns: i64,
    /// Nanoseconds since the boot, sleep included.
    pub(super) boot_ns: i64,
    /// Which boot.
    pub(super) boot_id: String,
}

impl Stamp {
    pub(super) fn now() -> Self {
        let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Self {
            time_ns: clock_ns(ClockId::Realtime),
            boot_ns: clock_ns(ClockId::Boottime),
            boot_id: id.trim().to_owned(),
        }
    }

    /// By how much the time of day was stepped between `self` and `now`, beside what really passed.
    /// Across a boot that is not known, but no time passes backwards.
    fn step(&self, now: &Self) -> i64 {
        let by_day = now.time_ns.saturating_sub(self.time_ns);
        if self.boot_id == now.boot_id && !now.boot_id.is_empty() {
            let passed = now.boot_ns.saturating_sub(self.boot_ns);
            let step = by_day.saturating_sub(passed);
            if step.abs() > STEP_NS { step } else { 0 }
        } else {
            by_day.min(0)
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Content {
    format: String,
    version: u32,
    /// The version of the agent that wrote it.
    writer: String,
    #[serde(flatten)]
    stamp: Stamp,
    /// Moments are nanoseconds since the Unix epoch.
    state: Saved,
}

/// Why a file is none of ours.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadError {
    #[error("it cannot be read: {0}")]
    Io(#[from] io::Error),
    #[error("it is longer than 16 MiB")]
    Long,
    #[error("it is damaged: {0}")]
    Json(#[from] serde_json::Error),
    #[error("it is not a state of tuplewatch")]
    Foreign,
    #[error("it is of version {0}, this agent knows version {VERSION}")]
    Version(u64),
}

/// Reads the state; moments are nanoseconds since the Unix epoch. A missing file is an empty state.
pub(super) fn read(path: &Path, now: &Stamp) -> Result<Saved, ReadError> {
    let mut bytes = Vec::new();
    match File::open(path) {
        Ok(file) => file.take(LONGEST as u64 + 1).read_to_end(&mut bytes)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Saved::default()),
        Err(error) => return Err(error.into()),
    };
    if bytes.len() > LONGEST {
        return Err(ReadError::Long);
    }
    // The version first: another one may look different in every other respect.
    let value: serde_json::Value = serde_json::from_slice(&bytes)?;
    if value["format"] != FORMAT {
        return Err(ReadError::Foreign);
    }
    match value["version"].as_u64() {
        Some(version) if version == u64::from(VERSION) => {}
        Some(version) => return Err(ReadError::Version(version)),
        None => return Err(ReadError::Foreign),
    }
    let Content { stamp, state, .. } = serde_json::from_value(value)?;
    let mut state: Saved = state;
    let step = stamp.step(now);
    state.convert(|moment| moment.shifted(step));
    Ok(state)
}

/// Moves a file that could not be read out of the way; says where it is now.
pub(super) fn put_aside(path: &Path) -> String {
    let mut name = path.as_os_str().to_owned();
    name.push(".bad");
    match fs::rename(path, &name) {
        Ok(()) => format!("the file is kept as {}", name.display()),
        Err(error) => format!("and the file cannot be moved away: {error}"),
    }
}

/// Replaces the file: after a crash there is the old one or the new one, never a part.
pub(super) fn write(path: &Path, saved: Saved, stamp: &Stamp) -> io::Result<()> {
    let bytes = encode(saved, stamp)?;
    let temporary = path.with_extension("json.tmp");
    let mut file = OpenOptions::new()
        .create(true)
        .write(true)
        .truncate(true)
        .mode(0o600)
        .open(&temporary)?;
    file.write_all(&bytes)?;
    file.sync_all()?;
    drop(file);
    fs::rename(&temporary, path)?;
    match path.parent() {
        Some(directory) => File::open(directory)?.sync_all(),
        None => Ok(()),
    }
}

/// The bytes of the file: the mildest alerts are left out where it would become too long.
fn encode(mut saved: Saved, stamp: &Stamp) -> io::Result<Vec<u8>> {
    loop {
        let content = Content {
            format: FORMAT.to_owned(),
            version: VERSION,
            writer: env!("CARGO_PKG_VERSION").to_owned(),
            stamp: stamp.clone(),
            state: saved,
        };
        let bytes = serde_json::to_vec(&content)?;
        saved = content.state;
        if bytes.len() <= LONGEST || saved.alerts.is_empty() {
            return Ok(bytes);
        }
        saved.alerts.truncate(saved.alerts.len() / 2);
    }
}
