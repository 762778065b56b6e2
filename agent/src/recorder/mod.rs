//! The flight recorder: when an alert fires, the headers of the packets behind it are written as a
//! pcapng file, each with a comment that says what it shows. `docs/recorder.md` is for users.
//!
//! The kernel side keeps the latest packets in a ring ([`Ring`]); nobody reads it until an alert fires.
//! Then the loop picks the packets of the alert's port space (`evidence`), and a thread of its own
//! comments and writes them (`writer`, `folder`): a slow disk must not hold up the next look.

mod evidence;
mod folder;
#[cfg(test)]
mod tests;
mod writer;

use std::{
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use serde::Serialize;
use tracing::warn;
use tuplewatch_common::address::FourTuple;

use crate::{
    core::{
        alert::{Alert, State},
        report::Change,
        time::Moment,
    },
    sink::WallClock,
    source::kernel::Ring,
};
use folder::Folder;
use writer::{Answer, Job};

/// While an alert goes on, another file is written after this long at the earliest.
const AGAIN: Duration = Duration::from_secs(300);
/// Alerts that get a file in one look; the others get theirs with their next word.
const AT_ONCE: usize = 8;
/// The loop waits so long for the paths, so that the alerts can name them.
const PATIENCE: Duration = Duration::from_secs(1);

/// What `/status` tells of the recorder.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Status {
    /// Where the files are.
    pub directory: PathBuf,
    /// Bytes that all of them together may take.
    pub limit_bytes: u64,
    /// Evidence files in the directory.
    pub files: u64,
    /// Bytes that they take.
    pub bytes: u64,
    /// Files written since the start.
    pub written: u64,
    /// Files that could not be written.
    pub failed: u64,
    /// Packets that the kernel side keeps at most.
    pub ring_packets: u64,
    /// Packets that it has kept since the start; of those beyond `ring_packets` the oldest are gone.
    pub recorded_packets: u64,
}

/// The recorder at work.
#[derive(Debug)]
pub struct Recorder {
    clock: WallClock,
    status: Arc<Mutex<Status>>,
    /// Packets that a file takes at most.
    most: usize,
    /// Alerts that have a file, and when it was asked for.
    known: HashMap<String, Known>,
    jobs: Option<SyncSender<Job>>,
    answers: Receiver<Answer>,
    /// Answers that are still to come.
    waiting: usize,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Known {
    asked: Moment,
    path: Option<PathBuf>,
}

/// The interfaces by index: their name, and whether the other end is a guest of this host.
pub type Interfaces = BTreeMap<u32, (String, bool)>;

impl Recorder {
    /// Takes a directory, which is made if it is missing, for files of at most `limit` bytes together.
    ///
    /// # Errors
    /// The directory cannot be used.
    pub fn open(directory: &Path, limit: u64, clock: WallClock) -> anyhow::Result<Self> {
        let folder = Folder::open(directory, limit)?;
        let status = Arc::new(Mutex::new(Status {
            directory: directory.to_owned(),
            limit_bytes: limit,
            ..Status::default()
        }));
        let (jobs, to_do) = sync_channel(AT_ONCE);
        let (tell, answers) = sync_channel(2 * AT_ONCE);
        let thread = writer::start(folder, Arc::clone(&status), to_do, tell)
            .context("the thread of the recorder cannot be started")?;
        Ok(Self {
            clock,
            status,
            most: evidence::most(limit),
            known: HashMap::new(),
            jobs: Some(jobs),
            answers,
            waiting: 0,
            thread: Some(thread),
        })
    }

    /// Writes the evidence of the alerts that fire, and names the file of each that has one.
    pub fn take(&mut self, ring: &Ring, interfaces: &Interfaces, changes: &mut [Change]) {
        self.listen(Duration::ZERO);
        let due: Vec<&Alert> = alerts(changes)
            .filter(|alert| self.is_due(alert))
            .take(AT_ONCE - self.waiting.min(AT_ONCE))
            .collect();
        if !due.is_empty() {
            let spaces: Vec<_> = due.iter().map(|alert| alert.finding.space).collect();
            let picked = evidence::pick(&spaces, |see| ring.each(see));
            for (alert, packets) in due.into_iter().zip(picked) {
                if !packets.is_empty() {
                    self.ask(Job {
                        id: alert.id.clone(),
                        summary: alert.finding.summary.clone(),
                        space: alert.finding.space,
                        stuck: stuck(alert),
                        at: alert.at,
                        most: self.most,
                        packets,
                        interfaces: interfaces.clone(),
                        clock: self.clock.clone(),
                    });
                }
            }
            self.listen(PATIENCE);
        }
        for change in changes {
            if let Change::Alert(alert) = change {
                self.name(alert);
                if alert.state == State::Resolved {
                    self.known.remove(&alert.id);
                }
            }
        }
    }

    /// Names the file of an alert, if it has one.
    pub fn name(&self, alert: &mut Alert) {
        let known = self.known.get(&alert.id);
        alert.evidence_file = known.and_then(|known| known.path.clone());
    }

    /// Its state now.
    #[must_use]
    pub fn status(&self, ring: &Ring) -> Status {
        let status = self.status.lock();
        Status {
            ring_packets: ring.capacity().into(),
            recorded_packets: ring.recorded(),
            ..status.unwrap_or_else(PoisonError::into_inner).clone()
        }
    }

    fn is_due(&self, alert: &Alert) -> bool {
        let known = self.known.get(&alert.id);
        alert.state == State::Firing
            && known.is_none_or(|known| alert.at.since(known.asked) >= AGAIN)
    }

    fn ask(&mut self, job: Job) {
        let (id, asked) = (job.id.clone(), job.at);
        let Some(jobs) = &self.jobs else { return };
        match jobs.try_send(job) {
            Ok(()) => {
                self.waiting += 1;
                // The former file is named until the new one is there.
                let known = self.known.entry(id);
                known
                    .and_modify(|known| known.asked = asked)
                    .or_insert(Known { asked, path: None });
            }
            Err(_) => warn!("{id}: no evidence is written, the former files are not done yet"),
        }
    }

    /// Takes the paths of files that are written, and waits for those that are not.
    fn listen(&mut self, patience: Duration) {
        let end = Instant::now() + patience;
        while self.waiting > 0 {
            let left = end.saturating_duration_since(Instant::now());
            let Ok(Answer { id, path }) = self.answers.recv_timeout(left) else {
                return;
            };
            self.waiting -= 1;
            if let (Some(known), Some(path)) = (self.known.get_mut(&id), path) {
                known.path = Some(path);
            }
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The connections that an alert says are stuck.
fn stuck(alert: &Alert) -> Vec<FourTuple> {
    let stuck = alert.finding.evidence.stuck.iter();
    let connections = stuck.flat_map(|stuck| &stuck.connections);
    connections.map(|c| c.ends.tuple()).collect()
}

fn alerts(changes: &[Change]) -> impl Iterator<Item = &Alert> {
    changes.iter().filter_map(|change| match change {
        Change::Alert(alert) => Some(&**alert),
        Change::LookAlike { .. } => None,
    })
}
