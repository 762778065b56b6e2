//! A first look at the beginning of a capture: where it was taken, and whether its interfaces stood at
//! several places.

use std::collections::{BTreeMap, BTreeSet};

use tuplewatch_common::{bytes::Captured, segment::Segment};

use super::{
    copies::{Copies, Sighting, fingerprint},
    file::{Selection, segment},
    reader::{Packet, Reader},
    vantage::{self, Vantage, Votes},
};

/// What the beginning of a capture shows.
#[derive(Debug)]
pub struct Look {
    /// Where its interfaces stood: at least one place.
    pub places: Vec<Place>,
    /// Time of the first packet, if there is one.
    pub starts_ns: Option<u64>,
}

/// One place, and the interfaces there.
#[derive(Clone, Debug, Default)]
pub struct Place {
    /// The interfaces.
    pub interfaces: Interfaces,
    /// Where it is.
    pub vantage: Vantage,
    /// Names of the interfaces, where there are other places beside.
    pub names: Vec<String>,
}

/// Some interfaces of a capture.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Interfaces {
    /// Every one.
    #[default]
    All,
    /// These.
    Only(BTreeSet<u32>),
    /// All but these.
    Without(BTreeSet<u32>),
}

impl Interfaces {
    /// Whether an interface is one of them.
    #[inline]
    #[must_use]
    pub fn has(&self, interface: u32) -> bool {
        match self {
            Self::All => true,
            Self::Only(these) => these.contains(&interface),
            Self::Without(these) => !these.contains(&interface),
        }
    }
}

/// One interface of a capture.
#[derive(Default)]
struct Seen {
    votes: Votes,
    name: Option<String>,
    segments: u64,
    /// How many of its segments another interface has seen too, by that one.
    shared: BTreeMap<u32, u64>,
}

/// Interfaces that are looked at; later ones belong to the first place.
const MOST: usize = 256;

impl Look {
    /// Looks at the first bytes of a capture.
    #[must_use]
    pub fn at(head: &[u8], selection: &Selection) -> Self {
        let mut starts_ns = None;
        let mut all: BTreeMap<u32, Seen> = BTreeMap::new();
        let mut copies = None;
        if let Ok(mut reader) = Reader::open(head) {
            // The end of the head is no fault of the file.
            while let Ok(Some(packet)) = reader.next() {
                starts_ns.get_or_insert(packet.time_ns);
                let interface = packet.interface;
                if all.len() >= MOST && !all.contains_key(&interface) {
                    continue;
                }
                let seen = all.entry(interface).or_default();
                let Some(sighted) = seen.take(&packet, selection) else {
                    continue;
                };
                if all.len() < 2 {
                    continue;
                }
                let copies = copies.get_or_insert_with(Copies::default);
                let (segment, sighting) = sighted;
                let number = fingerprint(&segment, segment.tuple.hash(), sighting);
                let first = copies.take(number, sighting, interface, packet.time_ns);
                if let Some(first) = first.filter(|first| *first != interface) {
                    for (one, other) in [(first, interface), (interface, first)] {
                        let seen = all.entry(one).or_default();
                        *seen.shared.entry(other).or_default() += 1;
                    }
                }
            }
            for (interface, seen) in &mut all {
                seen.name = reader.interface_name(*interface);
            }
        }
        let mut places = places(all);
        for place in &mut places {
            if !selection.local.is_empty() {
                place.vantage = vantage::named(&selection.local);
            }
            if let Some(role) = selection.role {
                place.vantage.set = Some(role);
                "as --vantage says".clone_into(&mut place.vantage.why);
            }
        }
        if !selection.local.is_empty() {
            places = vec![Place {
                vantage: places.swap_remove(0).vantage,
                ..Place::default()
            }];
        }
        Self { places, starts_ns }
    }
}

impl Seen {
    /// Takes a packet; gives its segment, if it has one that counts.
    fn take(&mut self, packet: &Packet<'_>, selection: &Selection) -> Option<(Segment, Sighting)> {
        let (segment, found, ttl) = segment(packet)?;
        if !selection.takes(&segment.tuple) {
            return None;
        }
        let direction = packet.direction.or(found.direction);
        self.votes.take(&segment, ttl, direction, packet.time_ns);
        self.segments += 1;
        let bytes = Captured {
            data: packet.data,
            wire_len: packet.wire_len as usize,
        };
        let sighting = Sighting::of(&bytes, packet.link, &found.located, direction);
        Some((segment, sighting))
    }
}

/// Interfaces at one place: they share an address of the host, or they saw the same packets.
struct Group {
    members: BTreeMap<u32, Seen>,
    vantage: Vantage,
}

impl Group {
    fn is_of(&self, vantage: &Vantage, seen: &Seen) -> bool {
        let shares = |(number, member): (&u32, &Seen)| {
            let shared = seen.shared.get(number).copied().unwrap_or(0);
            2 * shared > seen.segments.min(member.segments)
        };
        self.vantage.is_same(vantage) || self.members.iter().any(shares)
    }

    /// Takes other members in. Where they do not share an address they saw the same packets on their way
    /// through.
    fn join(&mut self, other: Self) {
        if self.vantage.is_same(&other.vantage) {
            self.vantage.local.extend(other.vantage.local);
        } else {
            self.vantage = Vantage {
                why: "the same packets pass several of its interfaces".to_owned(),
                ..Vantage::default()
            };
        }
        self.members.extend(other.members);
    }
}

fn places(all: BTreeMap<u32, Seen>) -> Vec<Place> {
    let mut groups: Vec<Group> = Vec::new();
    for (number, seen) in all {
        if seen.segments == 0 {
            continue;
        }
        let vantage = seen.votes.vantage();
        let (same, mut apart): (Vec<_>, Vec<_>) = groups
            .into_iter()
            .partition(|group| group.is_of(&vantage, &seen));
        let mut joined = Group {
            members: BTreeMap::from([(number, seen)]),
            vantage,
        };
        for mut group in same {
            group.join(joined);
            joined = group;
        }
        apart.push(joined);
        groups = apart;
    }
    groups.sort_by_key(|group| group.members.keys().next().copied());
    if groups.len() < 2 {
        let group = groups.pop();
        let vantage = group.map_or_else(|| Votes::default().vantage(), |g| g.vantage);
        return vec![Place {
            vantage,
            ..Place::default()
        }];
    }
    let numbers = |group: &Group| group.members.keys().copied().collect::<BTreeSet<u32>>();
    let others: BTreeSet<u32> = groups[1..].iter().flat_map(numbers).collect();
    let places = groups.iter().enumerate().map(|(i, group)| Place {
        // What shows up later only belongs to the first.
        interfaces: if i == 0 {
            Interfaces::Without(others.clone())
        } else {
            Interfaces::Only(numbers(group))
        },
        vantage: group.vantage.clone(),
        names: group
            .members
            .iter()
            .map(|(number, seen)| {
                let name = seen.name.clone();
                name.unwrap_or_else(|| format!("interface {number}"))
            })
            .collect(),
    });
    places.collect()
}

/// The vantage of all places together, for a capture that is judged as one.
#[must_use]
pub fn together(places: &[Place]) -> Vantage {
    let mut all = places[0].vantage.clone();
    if places.len() > 1 {
        let locals = places.iter().flat_map(|place| &place.vantage.local);
        all.local = locals.copied().collect();
        "its interfaces stood at several places; they are judged together, because it cannot be read twice"
            .clone_into(&mut all.why);
    }
    all
}
