//! Reads the counters into a snapshot, and gives up opens that stay without outcome.

use std::ptr::addr_of;

use aya::{
    TestRun as _,
    maps::{Array, HashMap, PerCpuArray},
    programs::{RawTracePoint, RawTracePointRunOptions},
};
use tracing::warn;
use tuplewatch_common::{
    observe::is_expired,
    record::{Global, Opener, OpenerKey, OpenerRef},
};

use super::{
    batch,
    census::Due,
    clock,
    exchanges::Exchanges,
    load::{Kernel, map_mut},
    skipped,
};
use crate::core::{observation::Snapshot, time::Moment};

/// Hashes that one run of the sweep takes (`SWEEP_BATCH` of the kernel side).
const SWEEP_BATCH: usize = 64;
/// How long a handshake with SYN-ACK may wait for its last ACK: Linux gives up after 63 s
/// (`tcp_synack_retries` = 5), but then nobody is there any more; late ones are rare beyond 30 s.
const PATIENCE_NS: u64 = 30_000_000_000;
/// … when the table is more than half full: a flood must not keep honest opens out, and it gets three
/// quarters at most.
const PATIENCE_FULL_NS: u64 = 3_000_000_000;

impl Kernel {
    /// Everything counted, now, with a census if one is due.
    ///
    /// # Errors
    /// The error of a system call on a map.
    pub fn snapshot(&mut self, due: &Due) -> anyhow::Result<Snapshot> {
        let began = Moment(clock::monotonic_ns());
        self.sweep()?;
        let changed = self.spaces.look(&mut self.ebpf)?;
        self.census.pools.note(&changed.bound_opens);
        let census = self.census(due).unwrap_or_else(|error| {
            warn!("the census failed: {error:#}");
            None
        });
        let talks = match &mut self.talks {
            Some(talks) => talks.look(&self.ebpf)?,
            None => Vec::new(),
        };
        let openers = self.openers()?;
        let (stalled, recovered) = self.stalled(&openers)?;
        let globals = self.globals()?;
        let resets = std::mem::take(&mut self.idle_resets);
        let idle = super::idle::news(&resets, census.as_deref().unwrap_or_default());
        let now = Moment(clock::monotonic_ns());
        let snapshot = Snapshot {
            now,
            took: now.since(began),
            spaces: changed.spaces,
            census,
            ports: changed.ports,
            talks,
            stalled,
            recovered,
            idle,
            answers: self
                .exchanges
                .as_mut()
                .map_or_else(Vec::new, Exchanges::look),
            openers,
            globals,
            translations: Vec::new(),
            surroundings: self.surroundings(due.counters),
        };
        Ok(snapshot)
    }

    /// Gives up opens that stay without outcome.
    fn sweep(&mut self) -> anyhow::Result<()> {
        let now = clock::monotonic_ns();
        let (mut pending, mut due) = (0, Vec::new());
        for index in 0..self.pending.len() {
            let place = self.pending.at(index);
            // SAFETY: a valid place; a place that is free has 0 here.
            if unsafe { addr_of!((*place).handshake.hash).read_volatile() } == 0 {
                continue;
            }
            pending += 1;
            let handshake = self.pending.get(index).handshake;
            if is_expired(&handshake, now, PATIENCE_FULL_NS) {
                due.push(handshake);
            }
        }
        let patience = if pending > self.pending.len() / 2 {
            PATIENCE_FULL_NS
        } else {
            PATIENCE_NS
        };
        due.retain(|handshake| is_expired(handshake, now, patience));
        let expired: Vec<u64> = due.iter().map(|handshake| handshake.hash).collect();
        for batch in expired.chunks(SWEEP_BATCH) {
            let mut map: Array<_, u64> = map_mut(&mut self.ebpf, "SWEEP")?.try_into()?;
            for (i, hash) in (0..).zip(batch) {
                map.set(i, hash, 0)?;
            }
            let program: &RawTracePoint = self
                .ebpf
                .program("sweep")
                .ok_or_else(|| anyhow::anyhow!("there is no program sweep"))?
                .try_into()?;
            let mut options = RawTracePointRunOptions::new();
            options.args[0] = batch.len() as u64;
            options.args[1] = patience;
            program.test_run(options)?;
        }
        Ok(())
    }

    fn globals(&self) -> anyhow::Result<[u64; Global::COUNT as usize]> {
        let map = self
            .ebpf
            .map("GLOBALS")
            .ok_or_else(|| anyhow::anyhow!("no map GLOBALS"))?;
        let map: PerCpuArray<_, u64> = map.try_into()?;
        let mut globals = [0; Global::COUNT as usize];
        for (i, total) in (0..).zip(&mut globals) {
            *total = map.get(&i, 0)?.iter().sum();
        }
        globals[Global::RunsSkipped as usize] = skipped::by_hook(&self.ebpf).map(|(_, n)| n).sum();
        Ok(globals)
    }

    /// Who opens connections. Those that have not opened anything for ten minutes make room when the
    /// table is half full, and those of forgotten port spaces go.
    fn openers(&mut self) -> anyhow::Result<Vec<(OpenerKey, Opener)>> {
        const IDLE_NS: u64 = 600_000_000_000;
        let map = self.hash("OPENERS")?;
        let room = map.info()?.max_entries() as usize;
        let all: Vec<(OpenerRef, Opener)> = batch::read(map)?;
        let now = clock::monotonic_ns();
        let mut gone = Vec::new();
        let mut by_age = Vec::new();
        let mut openers = Vec::with_capacity(all.len());
        for (at, opener) in &all {
            match self.spaces.key(at.space) {
                Some(space) => {
                    by_age.push((opener.last_ns, *at));
                    let pid = at.pid;
                    openers.push((OpenerKey { space, pid, pad: 0 }, *opener));
                }
                None => gone.push(*at),
            }
        }
        if by_age.len() > room / 2 {
            by_age.sort_unstable_by_key(|(last, _)| *last);
            let excess = by_age.len() - room / 2;
            // Nearly full: the oldest go, idle or not.
            let full = by_age.len() > room * 7 / 8;
            gone.extend(
                by_age
                    .into_iter()
                    .take(excess)
                    .filter(|(last, _)| full || now.saturating_sub(*last) > IDLE_NS)
                    .map(|(_, at)| at),
            );
        }
        let mut map: HashMap<_, OpenerRef, Opener> =
            map_mut(&mut self.ebpf, "OPENERS")?.try_into()?;
        for at in gone {
            let _ = map.remove(&at);
        }
        Ok(openers)
    }
}
