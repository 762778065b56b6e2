//! The choice itself: from a snapshot and the user's wishes, without a look at the system.

use std::collections::{BTreeMap, BTreeSet};

use super::{Choice, Interface, Link, LinkHeader, Options, Snapshot, Unseen, fits};

/// Levels of a stack that are followed before the data count as circular. The kernel allows 8.
const MAX_DEPTH: u32 = 16;

/// Decides where the packet hook attaches.
#[must_use]
pub fn choose(snapshot: &Snapshot, options: &Options) -> Choice {
    let mut chooser = Chooser {
        snapshot,
        exclude: &options.exclude,
        chosen: BTreeMap::new(),
        unseen: BTreeSet::new(),
    };
    if options.include.is_empty() {
        chooser.automatic();
    } else {
        chooser.asked_for(&options.include);
    }
    chooser.finish()
}

struct Chooser<'a> {
    snapshot: &'a Snapshot,
    exclude: &'a [String],
    chosen: BTreeMap<u32, Interface>,
    unseen: BTreeSet<Unseen>,
}

impl<'a> Chooser<'a> {
    /// Every interface that carries routed traffic of its own, taken at its lowest level.
    fn automatic(&mut self) {
        for link in self.snapshot.links.values() {
            let why = match self.snapshot.routed.get(&link.index) {
                _ if link.loopback => {
                    if link.up {
                        self.leave(
                            link,
                            "traffic of the host with itself; ask for it by its name",
                        );
                    }
                    continue;
                }
                Some(0) => "a next hop names it".to_owned(),
                Some(table) => format!("a route in table {table} points to it"),
                None if is_physical(link) => "physical device".to_owned(),
                None => continue,
            };
            self.descend(link, &why, 0);
        }
        let covered = self.covered();
        for link in self.snapshot.links.values() {
            let told = self.unseen.iter().any(|u| u.name == link.name);
            if !link.up || told || covered.contains(&link.index) {
                continue;
            }
            let mut below = self.below(link).into_iter();
            match below.find(|l| !covered.contains(&l.index)) {
                Some(lower) => self.miss(link, &format!("{} below it is not seen", lower.name)),
                None => self.miss(link, "no route points to it"),
            }
        }
    }

    /// What the user names is taken as it is, but not both an interface and all that is below it.
    fn asked_for(&mut self, patterns: &[String]) {
        for pattern in patterns {
            let names = |link: &&&Link| {
                if link.loopback {
                    *pattern == link.name
                } else {
                    fits(pattern, &link.name)
                }
            };
            let found: Vec<&Link> = self.snapshot.links.values().collect();
            let found: Vec<&Link> = found.iter().filter(names).copied().collect();
            if found.is_empty() {
                self.unseen.insert(Unseen {
                    name: pattern.clone(),
                    reason: "there is no such interface".to_owned(),
                    missed: true,
                });
            }
            for link in found {
                self.take(link, &format!("asked for by `{pattern}`"));
            }
        }
        let named: Vec<u32> = self.chosen.keys().copied().collect();
        for index in named {
            let below = self.below(&self.snapshot.links[&index]);
            let seen_below = |link: &&Link| self.is_covered(link, 0);
            if !below.is_empty() && below.iter().all(seen_below) {
                self.chosen.remove(&index);
            }
        }
        let covered = self.covered();
        for interface in choose(self.snapshot, &Options::default()).chosen {
            if !covered.contains(&interface.index) {
                self.leave(&self.snapshot.links[&interface.index], "not asked for");
            }
        }
    }

    /// Takes the lowest interfaces below `link`, or `link` itself if it stands on nothing.
    fn descend(&mut self, link: &Link, why: &str, depth: u32) {
        if depth > MAX_DEPTH || self.refuses(link) {
            return;
        }
        if let Some(upper) = self.hardware_above(link) {
            self.descend(
                upper,
                &format!("all of {} passes it ({why})", link.name),
                depth + 1,
            );
            return;
        }
        let below = self.below(link);
        let why_below = format!("below {} ({why})", link.name);
        if below.is_empty() {
            if is_switch(link) {
                self.leave(link, "it has no member");
            } else {
                self.take(link, why);
            }
        } else if below.iter().all(|lower| !lower.up) {
            self.leave(link, "nothing below it is up");
        } else {
            for lower in below.into_iter().filter(|lower| lower.up) {
                self.descend(lower, &why_below, depth + 1);
            }
        }
    }

    fn take(&mut self, link: &Link, why: &str) {
        if self.refuses(link) {
            return;
        }
        match LinkHeader::of(link.device_type) {
            Ok(header) => {
                self.chosen.entry(link.index).or_insert_with(|| Interface {
                    index: link.index,
                    name: link.name.clone(),
                    header,
                    kind: kind(link),
                    why: why.to_owned(),
                });
            }
            Err(reason) => self.miss(link, &reason),
        }
    }

    /// True, and noted, if the interface is down or excluded.
    fn refuses(&mut self, link: &Link) -> bool {
        if let Some(pattern) = self.exclude.iter().find(|p| fits(p, &link.name)) {
            self.leave(link, &format!("excluded by `{pattern}`"));
            return true;
        }
        if !link.up {
            self.leave(link, "it is down");
        }
        !link.up
    }

    /// Notes an interface whose packets should be seen and are not.
    fn miss(&mut self, link: &Link, reason: &str) {
        self.note(link, reason, true);
    }

    /// Notes one that carries nothing, or is left out as it should be.
    fn leave(&mut self, link: &Link, reason: &str) {
        self.note(link, reason, false);
    }

    fn note(&mut self, link: &Link, reason: &str, missed: bool) {
        self.unseen.insert(Unseen {
            name: link.name.clone(),
            reason: reason.to_owned(),
            missed,
        });
    }

    /// The interfaces that carry the traffic of `link`, down or up.
    fn below(&self, link: &Link) -> Vec<&'a Link> {
        let links = &self.snapshot.links;
        let kind = link.kind.as_deref();
        match kind {
            // On a parent. A macvlan's traffic with its siblings does not reach the parent.
            Some("vlan" | "macvlan" | "macvtap" | "ipvlan" | "ipvtap") => {
                let parent = link.link.and_then(|index| links.get(&index));
                parent.into_iter().collect()
            }
            Some("bond" | "team" | "bridge" | "vrf") => {
                let members = links.values().filter(|m| m.master == Some(link.index));
                members.collect()
            }
            // An internal port of Open vSwitch. All of its bridges share one master.
            Some("openvswitch") => {
                let is_port = |m: &&Link| {
                    let master = m.master.and_then(|index| links.get(&index));
                    master.is_some_and(|master| master.kind.as_deref() == kind)
                        && m.kind.as_deref() != kind
                };
                links.values().filter(is_port).collect()
            }
            // The link of a veth is its peer, that of a tunnel the way of its outer packets: other packets.
            _ => Vec::new(),
        }
    }

    /// The hardware device (Hyper-V's synthetic one, virtio failover) whose member `link` is. Such a device carries
    /// part of the traffic itself and all of its member's on the way, so it is taken instead of the member.
    fn hardware_above(&self, link: &Link) -> Option<&'a Link> {
        let master = self.snapshot.links.get(&link.master?)?;
        is_physical(master).then_some(master)
    }

    fn is_covered(&self, link: &Link, depth: u32) -> bool {
        if depth > MAX_DEPTH {
            return false;
        }
        let mut below = self.below(link).into_iter().filter(|l| l.up).peekable();
        let through_below =
            below.peek().is_some() && below.all(|lower| self.is_covered(lower, depth + 1));
        let above = self.hardware_above(link);
        self.chosen.contains_key(&link.index)
            || through_below
            || above.is_some_and(|upper| self.is_covered(upper, depth + 1))
    }

    fn covered(&self) -> BTreeSet<u32> {
        let links = self.snapshot.links.values();
        let covered = links.filter(|link| self.is_covered(link, 0));
        covered.map(|link| link.index).collect()
    }

    fn finish(self) -> Choice {
        let covered = self.covered();
        let mut unseen: Vec<Unseen> = self.unseen.iter().cloned().collect();
        let names: BTreeSet<String> = covered.iter().map(|i| self.snapshot.name(*i)).collect();
        unseen.retain(|u| !names.contains(&u.name));
        unseen.dedup_by(|next, first| next.name == first.name);
        Choice {
            chosen: self.chosen.into_values().collect(),
            unseen,
            covered,
        }
    }
}

/// A driver of hardware, real or the hypervisor's: it has no kind.
fn is_physical(link: &Link) -> bool {
    link.kind.is_none() && !link.loopback
}

/// Has members or carries nothing.
fn is_switch(link: &Link) -> bool {
    matches!(link.kind.as_deref(), Some("bond" | "team" | "bridge"))
}

fn kind(link: &Link) -> String {
    match &link.kind {
        Some(kind) => kind.clone(),
        None if link.loopback => "loopback".to_owned(),
        None => "physical".to_owned(),
    }
}
