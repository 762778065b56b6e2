//! The whole kernel side for a moment: loaded, attached, run once, and gone again.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use tuplewatch_common::record::Global;

use super::{
    HookStatus, LoadError, Options, Verdict,
    census::Due,
    chain::{self, Other, Way},
    hooks::load_classifier,
    load::{CLASSIFIERS, Kernel},
};
use crate::kernel_facts::interfaces::{self, Choice, Snapshot};

/// What came of it.
#[derive(Debug, Default)]
pub struct Trial {
    /// Every hook and what became of it. Empty if the object was refused.
    pub hooks: Vec<HookStatus>,
    /// Why nothing at all could be loaded.
    pub refused: Option<String>,
    /// It is nothing but the rights.
    pub is_permission: bool,
    /// The packet hook could be loaded, whether or not there is an interface for it.
    pub is_packet_loaded: bool,
    /// Interfaces that were hooked.
    pub hooked: Vec<(String, Way)>,
    /// Interfaces that should have been and were not, with the reason.
    pub failed: BTreeMap<String, String>,
    /// Which interfaces are watched, and which not.
    pub choice: Choice,
    /// Why the interfaces cannot be read.
    pub unreadable: Option<String>,
    /// Other people's programs by interface, and why those of tcx cannot be listed.
    pub others: Vec<(String, Vec<Other>, Option<String>)>,
    /// Bytes that the maps took.
    pub map_memory: u64,
    /// What the programs gave that are run on demand; `None` where none could be loaded.
    pub ran: Option<Result<Ran, String>>,
}

/// What one pass over the kernel's tables gave.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ran {
    /// Port spaces with sockets in them.
    pub port_spaces: usize,
    /// How long it took.
    pub took: Duration,
    /// Network namespaces of the host.
    pub namespaces: usize,
    /// The agent runs in the host's own; `None` if that is not known.
    pub is_hosts: Option<bool>,
    /// What did not fit or could not be read: name, meaning and count.
    pub losses: Vec<(&'static str, &'static str, u64)>,
}

/// Loads and attaches everything as [`Kernel::start`] does with these options, reads everything once,
/// and takes it all away. Interfaces are hooked for milliseconds.
#[must_use]
pub fn trial(options: &Options) -> Trial {
    let mut trial = Trial::default();
    match Snapshot::read() {
        Ok(snapshot) => trial.choice = interfaces::choose(&snapshot, &options.interfaces),
        Err(error) => trial.unreadable = Some(error.to_string()),
    }
    match Kernel::load(options) {
        Ok(mut kernel) => kernel.try_all(&mut trial),
        Err(error) => {
            trial.is_permission = error.is_permission();
            match error {
                LoadError::Permission(what) | LoadError::Object(what) => trial.refused = Some(what),
                LoadError::Nothing(hooks) => trial.hooks = hooks,
            }
        }
    }
    if trial.others.is_empty() {
        trial.look_around(&BTreeSet::new());
    }
    trial
}

impl Trial {
    /// Notes who else is on the interfaces. `ours` are the numbers of our programs.
    fn look_around(&mut self, ours: &BTreeSet<u32>) {
        let around = self.choice.chosen.iter().map(|interface| {
            let (others, result) = chain::others(interface, ours);
            let why = result.err().map(|error| error.to_string());
            (interface.name.clone(), others, why)
        });
        self.others = around.collect();
    }
}

impl Kernel {
    fn try_all(&mut self, trial: &mut Trial) {
        let is_packet_loaded = self.attachments.is_on();
        trial.is_packet_loaded = is_packet_loaded;
        // Before the first interface is hooked, so that it is for a short time.
        let spare = is_packet_loaded.then(|| self.load_spare()).flatten();
        if is_packet_loaded {
            self.attachments.begin_trial();
            self.refresh_interfaces();
            trial.choice = self.attachments.choice().clone();
            trial.hooked = self.attachments.ways();
            trial.failed = self.attachments.failed().clone();
            trial.look_around(&self.own_numbers());
        }
        trial.hooks = self.hooks();
        trial.hooks.extend(spare);
        self.leave_interfaces();
        trial.map_memory = self.map_memory();
        trial.ran = self
            .has_census
            .then(|| self.run_once().map_err(|error| format!("{error:#}")));
    }

    /// Loads the classifiers that are loaded with the first interface that needs them. Says so if that
    /// fails, which is nothing to a host without such an interface.
    fn load_spare(&mut self) -> Option<HookStatus> {
        let refused = CLASSIFIERS[2..].iter().find_map(|name| {
            let error = load_classifier(&mut self.ebpf, name).err()?;
            Some(super::load::chain(&error))
        })?;
        Some(HookStatus {
            name: "packet_without_ethernet".into(),
            verdict: Verdict::Degraded,
            why: refused,
            lost: "interfaces without Ethernet header (WireGuard, tun, IP in IP) cannot be watched"
                .into(),
            remedy: String::new(),
        })
    }

    fn run_once(&mut self) -> anyhow::Result<Ran> {
        self.first_census()?;
        let started = Instant::now();
        let port_spaces = self.pass()?.len();
        let took = started.elapsed();
        // That was the census for now.
        let snapshot = self.snapshot(&Due {
            interval: None,
            near: 1.0,
            counters: false,
        })?;
        let hosts_own = self.hosts_own()?;
        let counts = Global::NAMES.into_iter().zip(snapshot.globals);
        let losses = counts
            .enumerate()
            .filter(|(i, (_, count))| Global::is_loss(*i) && *count > 0)
            .map(|(_, ((name, meaning), count))| (name, meaning, count));
        Ok(Ran {
            port_spaces,
            took,
            namespaces: self.census.local_ports.len(),
            is_hosts: hosts_own.map(|netns| netns == snapshot.surroundings.own_netns),
            losses: losses.collect(),
        })
    }
}
