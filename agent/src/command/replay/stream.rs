//! The packets of a file one after the other, which a thread of its own reads ahead: reading and judging take about
//! as long.

use std::{
    io,
    sync::mpsc::{Receiver, SyncSender, sync_channel},
    thread::{Builder, Scope},
};

use crate::source::capture::{
    batch::Batch,
    fault::Fault,
    file::{CaptureFile, Next, Observed, Selection},
    words::prefetch,
};

/// Batches that are read ahead.
const BATCHES: usize = 3;
/// Packets before its turn at which a packet is announced: long enough for a cache miss, short enough that what it
/// brought is still there.
const AHEAD: usize = 24;

/// What comes from a file.
pub(super) struct Stream {
    full: Receiver<Batch>,
    empty: SyncSender<Batch>,
    batch: Batch,
    at: usize,
}

impl Stream {
    /// Begins to read a file. Before the first packet stands one that says nothing.
    ///
    /// # Errors
    /// No thread can be started.
    pub(super) fn start<'s>(
        scope: &'s Scope<'s, '_>,
        file: &'s mut CaptureFile,
        selection: &'s Selection,
    ) -> io::Result<Self> {
        let (to_judge, full) = sync_channel(BATCHES);
        let (empty, to_fill) = sync_channel(BATCHES);
        for _ in 0..BATCHES {
            // There is room for all of them.
            let _ = empty.send(Batch::default());
        }
        let read = move || {
            // Without a reader of the results the replay is over.
            while let Ok(mut batch) = to_fill.recv() {
                file.read(selection, &mut batch);
                let is_last = batch.is_last();
                if to_judge.send(batch).is_err() || is_last {
                    break;
                }
            }
        };
        Builder::new()
            .name("capture".to_owned())
            .spawn_scoped(scope, read)?;
        Ok(Self {
            full,
            empty,
            batch: Batch::default(),
            at: 0,
        })
    }

    /// What it has come to: [`Next::End`] behind the last packet.
    #[inline]
    pub(super) fn current(&self) -> Option<&Observed> {
        self.batch.all().get(self.at)
    }

    /// When the packet was captured that it has come to.
    pub(super) fn time(&self) -> Option<u64> {
        let observed = self.current()?;
        (observed.next != Next::End).then_some(observed.frame.time_ns)
    }

    /// Goes on to the next packet. `expect` is told the hash of the connection of each some time before its turn.
    ///
    /// # Errors
    /// The file is broken, behind all packets that were given.
    #[inline]
    pub(super) fn advance(&mut self, expect: impl Fn(u64)) -> Result<(), Fault> {
        self.at += 1;
        if self.at >= self.batch.all().len() {
            return self.refill(expect);
        }
        let all = self.batch.all();
        prefetch(all.get(self.at + 2 * AHEAD));
        if let Some(later) = all.get(self.at + AHEAD) {
            expect(later.hash);
        }
        Ok(())
    }

    fn refill(&mut self, expect: impl Fn(u64)) -> Result<(), Fault> {
        if let Some(fault) = self.batch.fault.take() {
            return Err(fault);
        }
        // After the last batch nothing comes.
        let Ok(next) = self.full.recv() else {
            return Ok(());
        };
        let used = std::mem::replace(&mut self.batch, next);
        // The reader may be through.
        let _ = self.empty.send(used);
        self.at = 0;
        let soon = self.batch.all().iter().take(AHEAD + 1);
        soon.for_each(|observed| expect(observed.hash));
        if self.batch.all().is_empty() {
            return self.refill(expect);
        }
        Ok(())
    }
}
