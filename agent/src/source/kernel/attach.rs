//! Attaches the packet hook to the interfaces, and keeps it there.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use aya::{
    Ebpf,
    maps::{Array, HashMap},
    programs::{
        LinkOrder, SchedClassifier, TcAttachType,
        tc::{self, NlOptions, SchedClassifierLinkId, TcAttachOptions, TcHandle},
    },
};
use tracing::{info, warn};

use super::{
    HookStatus, Verdict,
    chain::{Standing, Way, standing},
    guard::{Filter, Guard},
    hooks::load_classifier,
    load::{CLASSIFIERS, Kernel, chain, find, map_mut},
};
use crate::kernel_facts::interfaces::{
    self, Choice, Interface, LinkHeader, Snapshot,
    clsact::{self, Side},
};

pub use interfaces::Options as InterfaceOptions;

/// clsact, where there is no tcx: before every CNI.
const CLSACT_PRIORITY: u16 = 1;
/// High half of our handles, so that our leftovers are recognised: "tw". The low half is the program's number: no two
/// agents have the same handle.
const CLSACT_HANDLE: u16 = 0x7477;
/// … of a trial.
const TRIAL_HANDLE: u16 = 0x7478;
/// Value of the map of hooked interfaces for one whose other end is a guest of this host.
const GUEST: u8 = 2;
/// Somebody who also insists on the first place gets it for this long, and each time for twice as long: packets that
/// pass while a program moves are not seen.
const REATTACH: Duration = Duration::from_secs(60);
/// How often that time is doubled.
const DOUBLED: u32 = 6;

/// The hooked interfaces.
#[derive(Default)]
pub struct Attachments {
    options: Option<InterfaceOptions>,
    hooked: BTreeMap<u32, Hooked>,
    choice: Choice,
    failed: BTreeMap<String, String>,
    error: Option<String>,
    filters: Filters,
}

/// How filters are set where there is no tcx.
#[derive(Default)]
struct Filters {
    /// For a moment only, beside an agent that may be at work.
    is_trial: bool,
    guard: Guard,
}

struct Hooked {
    interface: Interface,
    links: Vec<(&'static str, SchedClassifierLinkId)>,
    /// When it went back to the first place for the last time, and how often.
    moved: Option<(Instant, u32)>,
    uses_tcx: bool,
}

impl Hooked {
    const fn way(&self) -> Way {
        if self.uses_tcx { Way::Tcx } else { Way::Clsact }
    }

    /// It has just moved, and does not move again.
    fn rests(&self) -> bool {
        self.moved
            .is_some_and(|(at, times)| at.elapsed() < REATTACH * (1 << times.min(DOUBLED)))
    }

    fn moves(&self) -> (Instant, u32) {
        (Instant::now(), self.moved.map_or(0, |(_, times)| times + 1))
    }
}

impl Attachments {
    pub(super) fn new(options: InterfaceOptions) -> Self {
        Self {
            options: Some(options),
            ..Self::default()
        }
    }

    pub(super) fn off() -> Self {
        Self::default()
    }

    /// The packet hook could be loaded.
    pub(super) fn is_on(&self) -> bool {
        self.options.is_some()
    }

    /// From now on nothing is meant to stay.
    pub(super) fn begin_trial(&mut self) {
        self.filters.is_trial = true;
    }

    /// What was decided at the latest look.
    pub(super) fn choice(&self) -> &Choice {
        &self.choice
    }

    /// Interfaces that could not be hooked, with the reason.
    pub(super) fn failed(&self) -> &BTreeMap<String, String> {
        &self.failed
    }

    /// Names of the hooked interfaces, and whether by tcx.
    pub(super) fn ways(&self) -> Vec<(String, Way)> {
        let hooked = self.hooked.values();
        hooked
            .map(|h| (h.interface.name.clone(), h.way()))
            .collect()
    }

    /// Names of the hooked interfaces, and those that are not seen with the reason.
    #[must_use]
    pub fn interfaces(&self) -> (Vec<String>, Vec<(String, String)>) {
        let hooked = self
            .hooked
            .values()
            .map(|h| h.interface.name.clone())
            .collect();
        let unseen = self
            .choice
            .unseen
            .iter()
            .map(|u| (u.name.clone(), u.reason.clone()));
        (hooked, unseen.chain(self.failed.clone()).collect())
    }

    /// The hooked interfaces by their index: the name, and whether the other end is a guest of this host.
    #[must_use]
    pub fn names(&self) -> BTreeMap<u32, (String, bool)> {
        let of = |h: &Hooked| {
            let is_guest = is_guest(&self.choice, &h.interface);
            (h.interface.name.clone(), is_guest)
        };
        let hooked = self.hooked.iter();
        hooked.map(|(index, h)| (*index, of(h))).collect()
    }

    /// The verdict of the packet hook, unless it could not even be loaded.
    pub(super) fn status(&self) -> Option<HookStatus> {
        let options = self.options.as_ref()?;
        let names: Vec<_> = self
            .hooked
            .values()
            .map(|h| h.interface.name.as_str())
            .collect();
        let failed: Vec<_> = self
            .failed
            .iter()
            .map(|(n, why)| format!("{n}: {why}"))
            .collect();
        let problems: Vec<_> = self.error.iter().cloned().chain(failed).collect();
        let (verdict, why) = if names.is_empty() {
            let is_asked_for = !options.include.is_empty();
            let why = if problems.is_empty() && is_asked_for {
                "no interface that was asked for is up; they are looked for again on every change"
                    .to_owned()
            } else if problems.is_empty() {
                "no interface with a route is up; it is looked for again on every change".to_owned()
            } else {
                problems.join("; ")
            };
            (Verdict::Off, why)
        } else if problems.is_empty() {
            (Verdict::Ok, names.join(", "))
        } else {
            (
                Verdict::Degraded,
                format!("on {}; {}", names.join(", "), problems.join("; ")),
            )
        };
        Some(HookStatus {
            name: "packet".into(),
            verdict,
            why,
            lost: String::new(),
            remedy: String::new(),
        })
    }
}

impl Kernel {
    /// Looks at the interfaces again: hooks new ones, forgets those that are gone, and goes back to the
    /// first place where somebody else has taken it.
    pub fn refresh_interfaces(&mut self) {
        let Some(options) = self.attachments.options.clone() else {
            return;
        };
        let choice = match Snapshot::read() {
            Ok(snapshot) => interfaces::choose(&snapshot, &options),
            Err(error) => {
                self.attachments.error = Some(format!("interfaces cannot be read: {error}"));
                return;
            }
        };
        self.attachments.error = None;
        self.attachments.failed.clear();
        let gone: Vec<u32> = self
            .attachments
            .hooked
            .keys()
            .copied()
            .filter(|index| choice.chosen.iter().all(|i| i.index != *index))
            .collect();
        for index in gone {
            if let Some(hooked) = self.attachments.hooked.remove(&index) {
                info!("{}: not watched any more", hooked.interface.name);
                self.unhook(index, hooked.links);
            }
        }
        self.attachments.filters.guard.look_after();
        for interface in &choice.chosen {
            match self.attachments.hooked.get(&interface.index) {
                Some(hooked) if !hooked.rests() => self.go_back(interface, hooked.way()),
                Some(_) => {}
                None => self.hook(interface, None),
            }
        }
        if let Err(error) = note_hooked(&mut self.ebpf, &choice, &self.attachments.hooked) {
            warn!("forwarded packets may be counted twice: {error}");
        }
        self.attachments.choice = choice;
    }

    /// The kernel's numbers of those of our classifiers that are loaded.
    pub(super) fn own_numbers(&mut self) -> BTreeSet<u32> {
        let numbers = CLASSIFIERS.iter();
        numbers
            .filter_map(|name| number(&mut self.ebpf, name))
            .collect()
    }

    /// Takes the packet hook off all interfaces, and every qdisc away that was made for it.
    pub(super) fn leave_interfaces(&mut self) {
        for (index, hooked) in std::mem::take(&mut self.attachments.hooked) {
            self.unhook(index, hooked.links);
        }
        let _alone = clsact::Turn::take();
        for index in self.attachments.filters.guard.made() {
            if let Err(error) = clsact::remove_if_empty(index) {
                warn!("the clsact qdisc of interface {index} stays: {error}");
            }
        }
    }

    /// Goes back to the first place on the sides of an interface where somebody has taken it.
    fn go_back(&mut self, interface: &Interface, way: Way) {
        for (program, side) in sides(interface) {
            let Some(ours) = number(&mut self.ebpf, program) else {
                continue;
            };
            let standing = standing(interface, side, way, ours);
            let index = interface.index;
            // The interface may be gone.
            if matches!(standing, Ok(Standing::First) | Err(_))
                || !self.attachments.hooked.contains_key(&index)
            {
                continue;
            }
            warn!(
                "{}: another program took the first place, or ours away; going back to it",
                interface.name
            );
            if way == Way::Tcx {
                self.move_side(interface, program, side);
            } else if let Some(before) = self.attachments.hooked.remove(&index) {
                let moves = before.moves();
                self.unhook(index, before.links);
                return self.hook(interface, Some(moves));
            }
        }
    }

    /// Attaches one program anew, which puts it first. It is blind in between, for as long as the kernel waits until
    /// nobody runs it (`tcx_entry_sync`), so the other side stays where it is.
    fn move_side(&mut self, interface: &Interface, program: &'static str, side: Side) {
        let Some(mut hooked) = self.attachments.hooked.remove(&interface.index) else {
            return;
        };
        hooked.moved = Some(hooked.moves());
        if let Some(at) = hooked.links.iter().position(|(name, _)| *name == program) {
            let (_, link) = hooked.links.swap_remove(at);
            detach(&mut self.ebpf, program, link);
        }
        self.attach_to(hooked, [(program, side)]);
    }

    fn hook(&mut self, interface: &Interface, moved: Option<(Instant, u32)>) {
        let hooked = Hooked {
            interface: interface.clone(),
            links: Vec::new(),
            moved,
            uses_tcx: true,
        };
        self.attach_to(hooked, sides(interface));
    }

    /// Attaches these programs, or takes all off the interface.
    fn attach_to(
        &mut self,
        mut hooked: Hooked,
        programs: impl IntoIterator<Item = (&'static str, Side)>,
    ) {
        let interface = &hooked.interface;
        for (program, side) in programs {
            let filters = &mut self.attachments.filters;
            match attach(&mut self.ebpf, interface, program, side, filters) {
                Ok((link, uses_tcx)) => {
                    hooked.links.push((program, link));
                    hooked.uses_tcx = uses_tcx;
                }
                Err(error) => {
                    warn!("{}: cannot be watched: {error}", interface.name);
                    self.attachments
                        .failed
                        .insert(interface.name.clone(), error);
                    self.unhook(interface.index, hooked.links);
                    return;
                }
            }
        }
        info!("{}: watched ({})", interface.name, interface.why);
        self.attachments.hooked.insert(interface.index, hooked);
    }

    fn unhook(&mut self, index: u32, links: Vec<(&'static str, SchedClassifierLinkId)>) {
        for (program, link) in links {
            detach(&mut self.ebpf, program, link);
        }
        self.attachments.filters.guard.forget(index);
    }
}

/// The program of each side of an interface. On loopback every packet leaves and comes in on the same
/// interface: one side is enough, and two would count each SYN twice.
fn sides(interface: &Interface) -> Vec<(&'static str, Side)> {
    let [ingress, egress] = match interface.header {
        LinkHeader::Ethernet => [CLASSIFIERS[0], CLASSIFIERS[1]],
        LinkHeader::None => [CLASSIFIERS[2], CLASSIFIERS[3]],
    };
    if interface.kind == "loopback" {
        return vec![(egress, Side::Egress)];
    }
    vec![(ingress, Side::Ingress), (egress, Side::Egress)]
}

/// The kernel's number of one of our programs.
fn number(ebpf: &mut Ebpf, program: &str) -> Option<u32> {
    let classifier: &mut SchedClassifier = find(ebpf, program).ok()?;
    classifier.info().ok().map(|info| info.id())
}

fn attach(
    ebpf: &mut Ebpf,
    interface: &Interface,
    program: &'static str,
    side: Side,
    filters: &mut Filters,
) -> Result<(SchedClassifierLinkId, bool), String> {
    let classifier = load_classifier(ebpf, program).map_err(|e| chain(&e))?;
    // By trying, not by version: distributions backport.
    let tcx = classifier.attach_with_options(
        &interface.name,
        attach_type(side),
        TcAttachOptions::TcxOrder(LinkOrder::first()),
    );
    let error = match tcx {
        Ok(link) => return Ok((link, true)),
        Err(error) => chain(&error),
    };
    filters
        .attach(classifier, interface, program, side)
        .map(|link| (link, false))
        .map_err(|why| format!("tcx: {error}; clsact: {why}"))
}

fn attach_type(side: Side) -> TcAttachType {
    match side {
        Side::Ingress => TcAttachType::Ingress,
        Side::Egress => TcAttachType::Egress,
    }
}

impl Filters {
    /// Sets one, and before it the qdisc if the interface has none.
    fn attach(
        &mut self,
        classifier: &mut SchedClassifier,
        interface: &Interface,
        program: &str,
        side: Side,
    ) -> Result<SchedClassifierLinkId, String> {
        let number = classifier.info().map_err(|error| chain(&error))?.id();
        let high = if self.is_trial {
            TRIAL_HANDLE
        } else {
            CLSACT_HANDLE
        };
        let handle = TcHandle::new(high, number as u16);
        let _alone = clsact::Turn::take();
        if !self.is_trial {
            // They survive the process: sweep what a killed one without guard has left.
            let _ = tc::qdisc_detach_program(&interface.name, attach_type(side), program);
        }
        // That it is there already is an error like any other to aya.
        if !clsact::is_there(interface.index).unwrap_or(false) {
            self.guard.qdisc(interface.index);
            tc::qdisc_add_clsact(&interface.name).map_err(|error| chain(&error))?;
        }
        let filter = Filter {
            side,
            handle: handle.into(),
            program: number,
        };
        self.guard.filter(interface.index, filter);
        let options = NlOptions {
            priority: CLSACT_PRIORITY,
            handle,
            ..NlOptions::default()
        };
        classifier
            .attach_with_options(
                &interface.name,
                attach_type(side),
                TcAttachOptions::Netlink(options),
            )
            .map_err(|error| chain(&error))
    }
}

fn detach(ebpf: &mut Ebpf, program: &str, link: SchedClassifierLinkId) {
    let classifier: Result<&mut SchedClassifier, _> = find(ebpf, program);
    // The interface may be gone, and our programs with it.
    let _ = classifier.and_then(|p| p.detach(link));
}

/// Tells the programs which interfaces count what comes in.
fn note_hooked(
    ebpf: &mut Ebpf,
    choice: &Choice,
    hooked: &BTreeMap<u32, Hooked>,
) -> anyhow::Result<()> {
    let mut map: HashMap<_, u32, u8> = map_mut(ebpf, "HOOKED")?.try_into()?;
    let known: Vec<u32> = map.keys().collect::<Result<_, _>>()?;
    for index in known.iter().filter(|i| !choice.covered.contains(i)) {
        map.remove(index)?;
    }
    let mut values = Vec::new();
    for index in &choice.covered {
        let is_guest = hooked
            .get(index)
            .is_some_and(|h| is_guest(choice, &h.interface));
        let value = if is_guest { GUEST } else { 1 };
        map.insert(index, value, 0)?;
        values.push((*index, value));
    }
    let mut fast: Array<_, u64> = map_mut(ebpf, "HOOKED_FAST")?.try_into()?;
    for (place, entry) in (0..).zip(by_low_bits(&values, fast.len())) {
        if fast.get(&place, 0)? != entry {
            fast.set(place, entry, 0)?;
        }
    }
    Ok(())
}

/// Beside a physical uplink the other end of a veth is a guest of this host.
fn is_guest(choice: &Choice, interface: &Interface) -> bool {
    interface.kind == "veth" && choice.chosen.iter().any(|i| i.kind == "physical")
}

/// The entries of `HOOKED_FAST`: `index << 8 | value` by the low bits of the index, or all bits set
/// where two share a place and the hash map must be asked.
fn by_low_bits(values: &[(u32, u8)], places: u32) -> Vec<u64> {
    let mut entries = vec![0; places as usize];
    for (index, value) in values {
        let entry = &mut entries[(index & (places - 1)) as usize];
        *entry = if *entry == 0 {
            u64::from(*index) << 8 | u64::from(*value)
        } else {
            u64::MAX
        };
    }
    entries
}

#[cfg(test)]
mod tests {
    use super::by_low_bits;

    #[test]
    fn interfaces_that_share_a_place_are_asked_for_elsewhere() {
        let entries = by_low_bits(&[(3, 1), (1027, 2), (5, 2)], 1024);
        assert_eq!(entries[3], u64::MAX);
        assert_eq!(entries[5], 5 << 8 | 2);
        assert_eq!(entries.iter().filter(|e| **e != 0).count(), 2);
    }
}
