//! Runs the census.

use std::{
    collections::{BTreeMap, HashMap as StdHashMap},
    io,
    time::{Duration, Instant},
};

use aya::{
    TestRun as _,
    maps::{Array, HashMap, MapData},
    programs::{RawTracePoint, RawTracePointRunOptions},
};
use tracing::debug;
use tuplewatch_common::{address::PortSpaceKey, record::CensusRow};

use super::{
    batch,
    bound::Pools,
    load::{Kernel, chain},
};
use crate::core::surroundings::LocalPorts;

/// What is kept between two passes.
#[derive(Default)]
pub struct CensusState {
    pass: u32,
    /// How long the latest pass took.
    took: Duration,
    /// When it was.
    at: Option<Instant>,
    /// Source ports of the network namespaces that the latest pass found.
    pub(super) local_ports: BTreeMap<u32, LocalPorts>,
    /// What bound sockets may have taken since.
    pub(super) pools: Pools,
}

/// When a census is due.
#[derive(Clone, Copy, Debug)]
pub struct Due {
    /// Every so often; without it every five seconds, and less often on a host whose tables are so large
    /// that it would take more than 0.4 % of a CPU.
    pub interval: Option<Duration>,
    /// At once when bound sockets may have come to take this share of the ports of their address, as long as
    /// that takes less than 4 % of a CPU.
    pub near: f64,
    /// Read the counters around the port spaces now, not in some seconds.
    pub counters: bool,
}

/// A row for each port space that has sockets.
pub type Rows = Vec<(PortSpaceKey, CensusRow)>;

/// How often there is a census unless somebody asks for another interval.
const INTERVAL: Duration = Duration::from_secs(5);
/// Then it may take this share of one CPU …
const SHARE: u32 = 250;
/// … and this one where ports may be running out.
const SHARE_NEAR: u32 = 25;

impl CensusState {
    fn is_due(&self, due: &Due) -> bool {
        let Some(since) = self.at.map(|at| at.elapsed()) else {
            return true;
        };
        let interval = due
            .interval
            .unwrap_or_else(|| INTERVAL.max(self.took * SHARE));
        // Asked once per second: half of that is no reason to wait for the next time.
        if since + Duration::from_millis(500) >= interval {
            return true;
        }
        since >= self.took * SHARE_NEAR && self.pools.may_be_used_up(&self.local_ports, due.near)
    }
}

impl Kernel {
    /// The first pass, which also remembers the connections that are older than the agent.
    pub(super) fn first_census(&mut self) -> anyhow::Result<()> {
        if self.exchanges.is_some() {
            // Who opened a connection is known from who listens.
            self.walk("census_listeners", 0)?;
        }
        self.walk("census_seed", 0)
    }

    /// A pass, if one is due.
    ///
    /// # Errors
    /// The error of a system call.
    pub(super) fn census(&mut self, due: &Due) -> anyhow::Result<Option<Rows>> {
        if !self.has_census || !self.census.is_due(due) {
            return Ok(None);
        }
        self.pass().map(Some)
    }

    /// A pass over all sockets.
    ///
    /// # Errors
    /// The error of a system call.
    pub(super) fn pass(&mut self) -> anyhow::Result<Rows> {
        let started = Instant::now();
        self.census.pass = self.census.pass.wrapping_add(1).max(1);
        let pass = self.census.pass;
        self.walk("census_listeners", pass)?;
        self.walk("census_established", pass)?;
        self.census.local_ports = self.namespaces()?;
        let mut rows: Rows = batch::read(self.hash("CENSUS")?)?;
        self.forget(&rows, pass)?;
        let all = rows.len();
        rows.retain(|(_, row)| row.pass == pass);
        self.census.pools.counted(&rows);
        self.census.took = started.elapsed();
        self.census.at = Some(started);
        debug!("census {pass}: {all} port spaces in {:?}", self.census.took);
        Ok(rows)
    }

    fn walk(&mut self, program: &str, pass: u32) -> anyhow::Result<()> {
        let mut bucket = 0;
        loop {
            let mut options = RawTracePointRunOptions::new();
            options.args[0] = bucket;
            options.args[1] = u64::from(pass);
            let p: &RawTracePoint = self
                .ebpf
                .program(program)
                .ok_or_else(|| io::Error::other(format!("there is no program {program}")))?
                .try_into()?;
            p.test_run(options)
                .map_err(|e| io::Error::other(chain(&e)))?;
            let progress: Array<&MapData, u64> = Array::try_from(
                self.ebpf
                    .map("PROGRESS")
                    .ok_or_else(|| io::Error::other("no map PROGRESS"))?,
            )?;
            let (next, buckets) = (progress.get(&0, 0)?, progress.get(&1, 0)?);
            if next >= buckets {
                return Ok(());
            }
            if next <= bucket {
                anyhow::bail!("{program} does not get past bucket {bucket} of {buckets}");
            }
            bucket = next;
        }
    }

    /// Removes rows that two passes have not found again, and the listeners likewise.
    fn forget(&mut self, rows: &[(PortSpaceKey, CensusRow)], pass: u32) -> anyhow::Result<()> {
        let old = |p: u32| pass.wrapping_sub(p) > 1;
        let mut map: HashMap<_, PortSpaceKey, CensusRow> =
            super::load::map_mut(&mut self.ebpf, "CENSUS")?.try_into()?;
        for (key, _) in rows.iter().filter(|(_, row)| old(row.pass)) {
            let _ = map.remove(key);
        }
        let mut listeners: HashMap<_, u64, u32> =
            super::load::map_mut(&mut self.ebpf, "LISTENERS")?.try_into()?;
        let all: StdHashMap<u64, u32> = listeners.iter().collect::<Result<_, _>>()?;
        for (key, _) in all.iter().filter(|(_, p)| old(**p)) {
            let _ = listeners.remove(key);
        }
        Ok(())
    }
}
