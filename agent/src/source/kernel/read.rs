//! Reads the counters into a snapshot, and gives up opens that stay without outcome.

use std::collections::HashMap as StdHashMap;

use aya::{
    TestRun as _,
    maps::{Array, HashMap, PerCpuArray},
    programs::{RawTracePoint, RawTracePointRunOptions},
};
use tracing::warn;
use tuplewatch_common::{
    address::{FourTuple, PortSpaceKey},
    handshake::Handshake,
    observe::is_expired,
    record::{CensusRow, FIRST_PORTS, Global, PortBitmap, PortSpace},
};

use super::{
    batch, clock,
    load::{Kernel, map_mut},
};
use crate::core::{observation::Snapshot, time::Moment};

/// Completed handshakes that earn a port space its bitmap.
pub const BITMAP_FROM: u32 = FIRST_PORTS as u32;
/// Four-tuples that one run of the sweep takes (`SWEEP_BATCH` of the kernel side).
const SWEEP_BATCH: usize = 64;
/// How long a handshake with SYN-ACK may wait for its last ACK: Linux gives up after 63 s
/// (`tcp_synack_retries` = 5), but then nobody is there any more; late ones are rare beyond 30 s.
const PATIENCE_NS: u64 = 30_000_000_000;
/// … when the table is more than three quarters full: a flood must not keep honest opens out.
const PATIENCE_FULL_NS: u64 = 3_000_000_000;

/// A port space without any change for so many looks may be forgotten when room is needed.
const QUIET_LOOKS: u32 = 60;

/// What is kept between two looks.
#[derive(Default)]
pub struct ReaderState {
    generation: u32,
    bitmap_from: u32,
    look: u64,
    seen: StdHashMap<PortSpaceKey, Seen>,
}

/// What was seen of a port space at the last look.
#[derive(Default)]
struct Seen {
    /// When it was last looked at.
    look: u64,
    activity: u64,
    /// Looks without any change.
    quiet: u32,
    ports_told: usize,
}

impl Kernel {
    /// Everything counted, now.
    ///
    /// # Errors
    /// The error of a system call on a map.
    pub fn snapshot(
        &mut self,
        census: Option<Vec<(PortSpaceKey, CensusRow)>>,
    ) -> anyhow::Result<Snapshot> {
        self.sweep()?;
        let spaces = self.changed()?;
        let ports = self.ports(&spaces)?;
        let openers = batch::read(self.hash("OPENERS")?)?;
        let globals = self.globals()?;
        let snapshot = Snapshot {
            now: Moment(clock::monotonic_ns()),
            spaces,
            census,
            ports,
            openers,
            globals,
            surroundings: self.surroundings(),
        };
        self.forget_openers(&snapshot)?;
        Ok(snapshot)
    }

    /// The port spaces whose counters have changed since the last look.
    ///
    /// On the way it makes room when the table is nearly full: the port spaces that matter least are
    /// forgotten, those that were quiet for longest and never in trouble. One that comes back begins
    /// again at zero.
    fn changed(&mut self) -> anyhow::Result<Vec<(PortSpaceKey, PortSpace)>> {
        let room = self.hash("PORT_SPACES")?.info()?.max_entries() as usize;
        let (mut changed, mut quiet, mut known) = (Vec::new(), Vec::new(), 0);
        let mut seen = std::mem::take(&mut self.reader.seen);
        self.reader.look += 1;
        let look = self.reader.look;
        batch::each(
            self.hash("PORT_SPACES")?,
            |key: PortSpaceKey, space: PortSpace| {
                known += 1;
                let seen = seen.entry(key).or_default();
                let activity = activity(&space);
                seen.look = look;
                if seen.activity == activity {
                    seen.quiet += 1;
                    if seen.quiet > QUIET_LOOKS && space.bare_acks == 0 && space.no_local_port == 0
                    {
                        quiet.push((seen.quiet, key));
                    }
                } else {
                    seen.activity = activity;
                    seen.quiet = 0;
                    changed.push((key, space));
                }
            },
        )?;
        if known > room / 8 * 7 {
            quiet.sort_unstable_by(|a, b| b.cmp(a));
            let excess = known - room / 4 * 3;
            let mut map: HashMap<_, PortSpaceKey, PortSpace> =
                map_mut(&mut self.ebpf, "PORT_SPACES")?.try_into()?;
            for (_, key) in quiet.iter().take(excess) {
                let _ = map.remove(key);
                seen.remove(key);
            }
            if quiet.is_empty() {
                warn!("{known} of {room} port spaces are in use and none is quiet");
            }
        }
        if seen.len() > known + 64 {
            seen.retain(|_, s| s.look == look);
        }
        self.reader.seen = seen;
        Ok(changed)
    }

    /// Gives up opens that stay without outcome.
    fn sweep(&mut self) -> anyhow::Result<()> {
        let pending: Vec<(FourTuple, Handshake)> = batch::read(self.hash("HANDSHAKES")?)?;
        if pending.is_empty() {
            return Ok(());
        }
        let room = self.hash("HANDSHAKES")?.info()?.max_entries() as usize;
        let patience = if pending.len() > room / 4 * 3 {
            PATIENCE_FULL_NS
        } else {
            PATIENCE_NS
        };
        let now = clock::monotonic_ns();
        let expired: Vec<FourTuple> = pending
            .into_iter()
            .filter(|(_, h)| is_expired(h, now, patience))
            .map(|(tuple, _)| tuple)
            .collect();
        for batch in expired.chunks(SWEEP_BATCH) {
            let mut map: Array<_, FourTuple> = map_mut(&mut self.ebpf, "SWEEP")?.try_into()?;
            for (i, tuple) in (0..).zip(batch) {
                map.set(i, tuple, 0)?;
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

    /// The source ports of completed handshakes: what the port spaces note themselves, and the bitmaps
    /// of the generation before, which the kernel side does not fill any more.
    fn ports(
        &mut self,
        spaces: &[(PortSpaceKey, PortSpace)],
    ) -> anyhow::Result<Vec<(PortSpaceKey, Vec<u16>)>> {
        let mut ports = Vec::new();
        for (key, space) in spaces {
            let noted = (space.ports_noted as usize).min(FIRST_PORTS);
            let told = &mut self.reader.seen.entry(*key).or_default().ports_told;
            if noted > *told {
                ports.push((*key, space.first_ports[*told..noted].to_vec()));
            }
            *told = noted;
        }
        let name = if self.reader.generation & 1 == 0 {
            "PORTS_EVEN"
        } else {
            "PORTS_ODD"
        };
        let bitmaps_room = self.hash(name)?.info()?.max_entries() as usize;
        self.reader.generation = self.reader.generation.wrapping_add(1);
        let mut config: Array<_, u32> = map_mut(&mut self.ebpf, "CONFIG")?.try_into()?;
        config.set(0, self.reader.generation, 0)?;
        let full: Vec<(PortSpaceKey, PortBitmap)> = batch::take(self.hash(name)?)?;
        // When too many port spaces want a bitmap, only the busier ones get one.
        let from = self.reader.bitmap_from.max(BITMAP_FROM);
        let wanted = if full.len() >= bitmaps_room {
            from.saturating_mul(2)
        } else if full.len() < bitmaps_room / 4 {
            (from / 2).max(BITMAP_FROM)
        } else {
            from
        };
        if wanted != self.reader.bitmap_from {
            let mut config: Array<_, u32> = map_mut(&mut self.ebpf, "CONFIG")?.try_into()?;
            config.set(1, wanted, 0)?;
            self.reader.bitmap_from = wanted;
        }
        ports.extend(
            full.into_iter()
                .map(|(key, bitmap)| (key, set_bits(&bitmap))),
        );
        Ok(ports)
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
        Ok(globals)
    }

    /// Openers that have not opened anything for ten minutes make room when the table is half full.
    fn forget_openers(&mut self, snapshot: &Snapshot) -> anyhow::Result<()> {
        const IDLE_NS: u64 = 600_000_000_000;
        let room = self.hash("OPENERS")?.info()?.max_entries() as usize;
        if snapshot.openers.len() <= room / 2 {
            return Ok(());
        }
        let mut map: HashMap<
            _,
            tuplewatch_common::record::OpenerKey,
            tuplewatch_common::record::Opener,
        > = map_mut(&mut self.ebpf, "OPENERS")?.try_into()?;
        let mut by_age: Vec<_> = snapshot
            .openers
            .iter()
            .map(|(k, o)| (o.last_ns, *k))
            .collect();
        by_age.sort_unstable();
        let now = snapshot.now.0;
        let excess = snapshot.openers.len() - room / 2;
        for (last, key) in by_age.into_iter().take(excess) {
            // Nearly full: the oldest go, idle or not.
            if now.saturating_sub(last) > IDLE_NS || snapshot.openers.len() > room / 8 * 7 {
                let _ = map.remove(&key);
            }
        }
        Ok(())
    }
}

/// A number that grows with every change of the counters.
fn activity(p: &PortSpace) -> u64 {
    let outcomes =
        p.established + p.refused + p.syn_timeouts + p.abandoned + p.half_open + p.failed;
    let trouble = p.no_local_port
        + p.syn_retransmits
        + p.bare_acks
        + p.duplicate_syns
        + p.rsts_after_bare_ack
        + p.unhealed
        + p.resets_received
        + p.resets_sent
        + p.data_retransmits;
    let searches: u64 = p.port_search.iter().sum();
    p.opens + outcomes + trouble + p.closed + searches
}

fn set_bits(bitmap: &PortBitmap) -> Vec<u16> {
    let mut ports = Vec::new();
    for (base, mut word) in (0..=u16::MAX).step_by(64).zip(bitmap.iter().copied()) {
        while word != 0 {
            ports.push(base + word.trailing_zeros() as u16);
            word &= word - 1;
        }
    }
    ports
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_become_ports() {
        let mut bitmap = [0; 1024];
        for port in [0u16, 63, 64, 2048, 65535] {
            bitmap[usize::from(port >> 6)] |= 1 << (port & 63);
        }
        assert_eq!(set_bits(&bitmap), [0, 63, 64, 2048, 65535]);
    }
}
