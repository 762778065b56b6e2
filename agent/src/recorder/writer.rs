//! The thread that comments evidence and writes it.

use std::{
    io,
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, SyncSender},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use tracing::{info, warn};
use tuplewatch_common::{
    address::{FourTuple, PortSpaceKey},
    recorder::{ETHERNET, LEAVES},
};

use super::{
    Interfaces, Status,
    evidence::{self, Picked},
    folder::Folder,
};
use crate::{
    core::time::Moment,
    sink::WallClock,
    source::capture::{
        link::Direction,
        write::{Commented, Writer},
    },
};

/// `EN10MB` and `RAW` in the register of link-layer header types.
const LINK_ETHERNET: u32 = 1;
const LINK_RAW: u32 = 101;

/// A file ends so long after its alert: a replay looks once a second too, at other moments of it, and has
/// come as far as the agent had by then.
const LOOK: Duration = Duration::from_secs(1);

/// Evidence that is to be written.
#[derive(Debug)]
pub(super) struct Job {
    /// Identity of the alert.
    pub(super) id: String,
    pub(super) summary: String,
    pub(super) space: PortSpaceKey,
    /// The connections that it says are stuck.
    pub(super) stuck: Vec<FourTuple>,
    /// The moment that names the file.
    pub(super) at: Moment,
    /// Packets at most.
    pub(super) most: usize,
    pub(super) packets: Vec<Picked>,
    pub(super) interfaces: Interfaces,
    pub(super) clock: WallClock,
}

/// What became of a [`Job`].
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) id: String,
    pub(super) path: Option<PathBuf>,
}

/// Starts the thread; it ends when nobody can give it a job any more.
pub(super) fn start(
    mut folder: Folder,
    status: Arc<Mutex<Status>>,
    jobs: Receiver<Job>,
    tell: SyncSender<Answer>,
) -> io::Result<JoinHandle<()>> {
    drop(show(&status, &folder));
    thread::Builder::new()
        .name("recorder".into())
        .spawn(move || {
            for job in jobs {
                let stored = job
                    .bytes()
                    .and_then(|bytes| folder.store(&job.name(), &bytes));
                let path = match stored {
                    Ok(path) => {
                        info!("{}: its packets are in {}", job.id, path.display());
                        show(&status, &folder).written += 1;
                        Some(path)
                    }
                    Err(error) => {
                        let directory = folder.path().display();
                        warn!(
                            "{}: no evidence can be written to {directory}: {error}",
                            job.id
                        );
                        show(&status, &folder).failed += 1;
                        None
                    }
                };
                let _ = tell.send(Answer { id: job.id, path });
            }
        })
}

fn show<'a>(status: &'a Mutex<Status>, folder: &Folder) -> std::sync::MutexGuard<'a, Status> {
    let mut status = status.lock().unwrap_or_else(PoisonError::into_inner);
    (status.files, status.bytes) = folder.usage();
    status
}

impl Job {
    /// Name of the file: names sort by time.
    fn name(&self) -> String {
        folder_name(&self.clock.rfc3339(self.at), &self.id)
    }

    fn epoch_ns(&self, at: Moment) -> u64 {
        self.clock.epoch_ns(at).cast_unsigned()
    }

    /// The file.
    pub(super) fn bytes(&self) -> io::Result<Vec<u8>> {
        let kept = evidence::comment(&self.space, &self.stuck, &self.packets, self.most);
        let about = format!("evidence of the alert {}: {}", self.id, self.summary);
        let mut writer = Writer::begin(Vec::new(), &about)?;
        for (picked, comment) in kept {
            let recorded = &picked.recorded;
            let link = if recorded.flags & ETHERNET != 0 {
                LINK_ETHERNET
            } else {
                LINK_RAW
            };
            let unknown = (format!("interface {}", recorded.ifindex), false);
            let (name, is_guest) = self.interfaces.get(&recorded.ifindex).unwrap_or(&unknown);
            let direction = if recorded.flags & LEAVES != 0 {
                Direction::Out
            } else {
                Direction::In
            };
            let interface = writer.interface(recorded.ifindex, link, name)?;
            writer.packet(
                interface,
                &Commented {
                    time_ns: self.epoch_ns(Moment(recorded.time_ns)),
                    wire_len: recorded.wire_len,
                    data: recorded.headers(),
                    // What comes in at the node's end of a pod's veth is what the pod sends: who reads
                    // the file for the pod's view must not take it for the other way round.
                    direction: (!is_guest).then_some(direction),
                    comment: &comment,
                },
            )?;
        }
        writer.end(self.epoch_ns(self.at + LOOK))
    }
}

/// `20261130T051533.123Z-` and the identity, with what is no letter, digit or point in a file name
/// replaced.
fn folder_name(time: &str, id: &str) -> String {
    let time = time.replace(['-', ':'], "");
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let id: String = id
        .chars()
        .filter(|c| !matches!(c, '[' | ']'))
        .map(|c| if plain(c) { c } else { '-' })
        .take(200)
        .collect();
    format!("{time}-{id}.pcapng")
}
