//! Writes the state from a thread of its own: a slow disk must not hold up the look at the counters.

use std::{
    io,
    path::PathBuf,
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread::{self, JoinHandle},
};

use tracing::{info, warn};

use super::file::{self, Stamp};
use crate::core::saved::Saved;

/// The thread. Dropping it writes what is waiting, and ends it.
#[derive(Debug)]
pub(super) struct Writer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    waiting: Mutex<Waiting>,
    news: Condvar,
}

/// The latest state that is not written yet; one that is not written when the next comes never will be.
#[derive(Debug, Default)]
struct Waiting {
    state: Option<(Saved, Stamp)>,
    ends: bool,
}

impl Writer {
    pub(super) fn start(path: PathBuf) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let own = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("state".into())
            .spawn(move || own.run(&path))?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    pub(super) fn write(&self, saved: Saved, stamp: Stamp) {
        let waiting = self.shared.waiting.lock();
        waiting.unwrap_or_else(PoisonError::into_inner).state = Some((saved, stamp));
        self.shared.news.notify_one();
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let waiting = self.shared.waiting.lock();
        waiting.unwrap_or_else(PoisonError::into_inner).ends = true;
        self.shared.news.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self, path: &std::path::Path) {
        let mut failing = false;
        while let Some((saved, stamp)) = self.next() {
            match file::write(path, saved, &stamp) {
                Ok(()) if failing => {
                    failing = false;
                    info!("{} is written again", path.display());
                }
                Ok(()) => {}
                // Once: a full disk is full for a while.
                Err(_) if failing => {}
                Err(error) => {
                    failing = true;
                    let path = path.display();
                    warn!("{path} cannot be written: {error}; changes of alerts are not kept");
                }
            }
        }
    }

    /// Waits for a state; `None` at the end.
    fn next(&self) -> Option<(Saved, Stamp)> {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let mut waiting = self
            .news
            .wait_while(waiting, |w| w.state.is_none() && !w.ends)
            .unwrap_or_else(PoisonError::into_inner);
        waiting.state.take()
    }
}
