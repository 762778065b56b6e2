//! What a process holds in the kernel: eBPF programs, maps and links.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result};
use aya::maps::{Array, Map, MapData, MapInfo};
use aya::programs::{SchedClassifier, TcAttachType, loaded_links, loaded_programs};
use tuplewatch_tests::prelude::*;

/// The numbers that the kernel gave to the eBPF objects of one process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Held {
    pub programs: BTreeSet<u32>,
    pub maps: BTreeSet<u32>,
    pub links: BTreeSet<u32>,
}

impl Held {
    /// What the process holds open now, as its file descriptors say.
    pub fn by(pid: u32) -> Result<Self> {
        let mut held = Self::default();
        let directory = format!("/proc/{pid}/fdinfo");
        for entry in std::fs::read_dir(&directory).with_context(|| directory.clone())? {
            // A descriptor may be closed meanwhile.
            let Ok(text) = std::fs::read_to_string(entry?.path()) else {
                continue;
            };
            let id = |name: &str| {
                text.lines()
                    .find_map(|line| line.strip_prefix(name)?.trim().parse::<u32>().ok())
            };
            // A link's descriptor also names the program.
            if let Some(id) = id("link_id:") {
                held.links.insert(id);
            } else if let Some(id) = id("prog_id:") {
                held.programs.insert(id);
            } else if let Some(id) = id("map_id:") {
                held.maps.insert(id);
            }
        }
        Ok(held)
    }

    /// What of it the kernel still has.
    pub fn left(&self) -> Result<Self> {
        let programs = loaded_programs()
            .filter_map(|info| info.ok().map(|info| info.id()))
            .collect::<BTreeSet<_>>();
        let links = loaded_links()
            .filter_map(|info| info.ok().map(|info| info.id()))
            .collect::<BTreeSet<_>>();
        Ok(Self {
            programs: &self.programs & &programs,
            maps: self
                .maps
                .iter()
                .copied()
                .filter(|id| MapInfo::from_id(*id).is_ok())
                .collect(),
            links: &self.links & &links,
        })
    }

    /// The kernel frees them some time after the last descriptor is closed.
    pub fn is_gone(&self) -> bool {
        self.left().is_ok_and(|left| left == Self::default())
    }

    /// How many places of a set-associative table of the process are taken, by its array of tags.
    pub fn taken(&self, tags: &str) -> Result<usize> {
        let id = self
            .maps
            .iter()
            .find(|id| MapInfo::from_id(**id).is_ok_and(|info| info.name_as_str() == Some(tags)))
            .with_context(|| format!("no map {tags}"))?;
        let map = Map::Array(MapData::from_id(*id)?);
        let sets: Array<_, [u32; 16]> = Array::try_from(map)?;
        let mut taken = 0;
        for set in sets.iter() {
            taken += set?.iter().filter(|tag| **tag != 0).count();
        }
        Ok(taken)
    }
}

/// How often the kernel has passed over a program of a process because the same one was at work on that processor already: a
/// task that was interrupted in it, or (since Linux 7.0 runs tracepoints preemptibly) had to give way to another.
pub fn passed_over(pid: u32, program: &str) -> Result<u64> {
    let number = |text: &str, name: &str| -> Option<u64> {
        let mut lines = text.lines();
        lines.find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
    };
    let mut ids = BTreeSet::new();
    for info in loaded_programs() {
        let info = info?;
        if info.name_as_str() == Some(program) {
            ids.insert(u64::from(info.id()));
        }
    }
    let mut misses = std::collections::BTreeMap::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fdinfo"))? {
        let text = std::fs::read_to_string(entry?.path()).unwrap_or_default();
        if let (Some(id), Some(count)) = (
            number(&text, "prog_id:").filter(|id| ids.contains(id)),
            number(&text, "recursion_misses:"),
        ) {
            misses.insert(id, count);
        }
    }
    Ok(misses.values().sum())
}

/// Whether this kernel has tcx (6.6 and later); without, programs are filters of a clsact qdisc.
pub fn has_tcx() -> bool {
    SchedClassifier::query_tcx("lo", TcAttachType::Ingress).is_ok()
}

/// Names of the programs on one side of an interface, first to last.
pub fn chain(host: &Host, interface: &str, side: TcAttachType) -> Result<Vec<String>> {
    if !has_tcx() {
        return filters(host, interface, side);
    }
    let (_, programs) = host.in_ns(|| SchedClassifier::query_tcx(interface, side))??;
    Ok(programs
        .iter()
        .map(|program| program.name_as_str().unwrap_or_default().to_owned())
        .collect())
}

/// Names of the clsact filters on one side of an interface, first to last.
pub fn filters(host: &Host, interface: &str, side: TcAttachType) -> Result<Vec<String>> {
    let side = match side {
        TcAttachType::Ingress => "ingress",
        _ => "egress",
    };
    // Without the qdisc there are none, which is an error to tc.
    let mut tc = std::process::Command::new("tc");
    tc.args(["filter", "show", "dev", interface, side]);
    let listed = host.exec_command(tc, None)?.stdout;
    // filter protocol all pref 1 bpf chain 0 handle 0x7477 tuplewatch_in direct-action …
    let name = |line: &str| Some(line.split_once(" handle ")?.1.split(' ').nth(1)?.to_owned());
    Ok(listed.lines().filter_map(name).collect())
}

/// Whether the agent's programs stand first on both sides of an interface.
pub fn is_hooked(host: &Host, interface: &str) -> bool {
    let sides = [
        (TcAttachType::Ingress, "tuplewatch_in"),
        (TcAttachType::Egress, "tuplewatch_out"),
    ];
    sides.into_iter().all(|(side, name)| {
        chain(host, interface, side)
            .is_ok_and(|programs| programs.first().is_some_and(|first| first == name))
    })
}

/// Resident memory of a process in KiB.
pub fn resident_kib(pid: u32) -> Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    text.lines()
        .find_map(|line| {
            line.strip_prefix("VmRSS:")?
                .trim()
                .strip_suffix(" kB")?
                .parse()
                .ok()
        })
        .context("VmRSS")
}
