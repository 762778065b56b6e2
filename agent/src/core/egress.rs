//! Egress groups: hosts that share the source ports of a device in between, and how many of those
//! ports this host's connections take.
//!
//! A device gives each of its source addresses so many ports per destination address and port. It
//! keeps a port while the connection lives and for its hold afterwards, whatever this host's own
//! TIME_WAIT does.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tuplewatch_common::{
    address::{Address, Point, PortSpaceKey, Role},
    record::PortSpace,
};

use super::{
    history::History,
    observation::{Space3, ip},
    profile::Profile,
    tables::Tables,
    time::Moment,
    trend::{Counts, Trend},
};

mod device;
#[cfg(test)]
mod tests;

pub use device::{Device, Group, Host, Members};

/// See [`Counts::fresh`].
const FRESH: Duration = Duration::from_secs(10);

/// How much of a device's budget for one destination this host's connections take.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EgressUse {
    /// The egress group.
    pub group: String,
    /// Connections of all its initiators on this host to that destination that are not closed. Where
    /// no socket of them is here (a router, a recording) it is not known, and 0.
    pub in_use: u32,
    /// Ports that the device still holds for closed ones. Where no socket is here, connections that
    /// were established less than the hold ago: closed or not, each of them has its port.
    pub held: u32,
    /// Source ports there are.
    pub budget: u32,
    /// How long the device keeps a port after close, in seconds.
    pub hold_seconds: f64,
    /// Port spaces summed.
    pub port_spaces: u32,
}

impl EgressUse {
    /// Ports that are free.
    #[must_use]
    pub fn headroom(&self) -> u32 {
        self.budget
            .saturating_sub(self.in_use.saturating_add(self.held))
    }

    /// Share of the budget that is taken; more than 1 where the budget is too small a figure.
    #[must_use]
    pub fn utilization(&self) -> f64 {
        f64::from(self.in_use.saturating_add(self.held)) / f64::from(self.budget.max(1))
    }
}

/// All groups of this host, with what they need to remember.
#[derive(Clone, Debug, Default)]
pub struct Egress {
    devices: Vec<Device>,
    /// After which time the devices of all profiles forget an idle connection.
    idle_timeouts: Vec<(String, Duration)>,
    destinations: BTreeMap<Destination, Taken>,
    /// Those whose latest count is not in their history yet: it takes steps only.
    unsettled: BTreeSet<Destination>,
    pruned: Moment,
}

/// One budget: a device and a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Destination {
    device: usize,
    responder: Address,
    port: u16,
}

/// The connections that draw on it.
#[derive(Clone, Debug)]
struct Taken {
    /// What was counted of each port space.
    spaces: BTreeMap<PortSpaceKey, Counted>,
    /// Connections closed so far, as their sockets tell.
    closed: u64,
    history: History,
    /// Handshakes completed so far, as the wire tells.
    completed: u64,
    completions: History,
    /// Ports taken, as the latest census has it.
    counts: Counts,
    trend: Option<Box<Trend>>,
}

impl Taken {
    /// Connections closed in the last `time`. Where no socket is here: those established in it, each
    /// of which still has its port.
    fn lately(&self, now: Moment, time: Duration) -> u64 {
        if self.spaces.keys().any(|k| k.point == Point::Socket as u8) {
            self.closed - self.history.before(now, time, self.closed)
        } else {
            self.completed - self.completions.before(now, time, self.completed)
        }
    }
}

/// What was counted of one port space so far.
#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    closed: u64,
    completed: u64,
}

/// What is new since `before`; a port space that the source forgot counts from zero again.
fn new(now: u64, before: u64) -> u64 {
    now.checked_sub(before).unwrap_or(now)
}

impl Egress {
    /// The groups that apply to `host`, in the order given: the first that carries a destination has
    /// it.
    ///
    /// # Errors
    /// Says which group is wrong and what it needs.
    pub fn new(groups: &[Group], profiles: &[Profile], host: &Host) -> Result<Self, String> {
        let mut devices = Vec::new();
        let mut names = BTreeSet::new();
        for group in groups {
            if !names.insert(&group.name) {
                return Err(format!("there are two egress groups `{}`", group.name));
            }
            devices.extend(Device::of(group, profiles, host)?);
        }
        let timeouts = profiles.iter();
        let timeouts = timeouts.filter_map(|p| Some((p.name.clone(), p.idle_timeout?)));
        Ok(Self {
            devices,
            idle_timeouts: timeouts.collect(),
            ..Self::default()
        })
    }

    /// After which time the devices of the profiles forget an idle connection, by name.
    #[must_use]
    pub fn idle_timeouts(&self) -> &[(String, Duration)] {
        &self.idle_timeouts
    }

    /// The device that carries a port space, if one is configured.
    #[must_use]
    pub fn device(&self, key: &PortSpaceKey) -> Option<&Device> {
        Some(&self.devices[self.destination(key)?.device])
    }

    fn destination(&self, key: &PortSpaceKey) -> Option<Destination> {
        if key.role != Role::Initiator as u8 || self.devices.is_empty() {
            return None;
        }
        let (initiator, responder) = (ip(&key.initiator), ip(&key.responder));
        let device = self
            .devices
            .iter()
            .position(|d| d.carries(initiator, responder))?;
        Some(Destination {
            device,
            responder: key.responder,
            port: key.responder_port,
        })
    }

    /// Takes the port spaces whose counters have changed; `tables` has taken them already.
    pub fn take(&mut self, now: Moment, spaces: &[(PortSpaceKey, PortSpace)], tables: &Tables) {
        if self.devices.is_empty() {
            return;
        }
        for (key, raw) in spaces {
            let Some(destination) = self.destination(key) else {
                continue;
            };
            let taken = self
                .destinations
                .entry(destination)
                .or_insert_with(|| Taken {
                    spaces: BTreeMap::new(),
                    closed: 0,
                    history: History::from_zero(now),
                    completed: 0,
                    completions: History::from_zero(now),
                    counts: Counts::default(),
                    trend: None,
                });
            let counted = Counted {
                closed: raw.closed,
                completed: raw.established,
            };
            let before = taken.spaces.insert(*key, counted).unwrap_or_default();
            let closed = new(counted.closed, before.closed);
            let completed = if key.point == Point::Wire as u8 {
                new(counted.completed, before.completed)
            } else {
                0
            };
            if closed + completed > 0 {
                taken.closed += closed;
                taken.completed += completed;
                self.unsettled.insert(destination);
            }
        }
        let (devices, destinations) = (&self.devices, &mut self.destinations);
        self.unsettled.retain(|destination| {
            destinations.get_mut(destination).is_some_and(|taken| {
                let hold = devices[destination.device].hold;
                taken.history.note(now, taken.closed, hold);
                taken.completions.note(now, taken.completed, hold);
                let latest = |h: &History, value| h.before(now, Duration::ZERO, value);
                latest(&taken.history, taken.closed) != taken.closed
                    || latest(&taken.completions, taken.completed) != taken.completed
            })
        });
        if tables.census_at == Some(now) {
            self.note_trends(now, tables);
        }
        if now.since(self.pruned) >= Duration::from_secs(60) {
            self.pruned = now;
            self.destinations.retain(|_, taken| {
                taken
                    .spaces
                    .retain(|key, _| tables.spaces.contains_key(key));
                !taken.spaces.is_empty()
            });
        }
    }

    /// Notes how many ports are taken after a census.
    fn note_trends(&mut self, now: Moment, tables: &Tables) {
        let all: Vec<(Destination, EgressUse)> = self
            .destinations
            .iter()
            .filter_map(|(destination, taken)| {
                let key = taken.spaces.keys().next()?;
                Some((*destination, self.use_of(tables, now, key)?))
            })
            .collect();
        for (destination, used) in all {
            let hold = self.devices[destination.device].hold;
            let Some(taken) = self.destinations.get_mut(&destination) else {
                continue;
            };
            let lately = taken.lately(now, FRESH);
            let counts = Counts {
                in_use: used.in_use,
                held: used.held,
                fresh: u32::try_from(lately).unwrap_or(u32::MAX),
            };
            if counts != taken.counts {
                Trend::note(&mut taken.trend, now, taken.counts, counts, hold);
                taken.counts = counts;
            }
        }
    }

    /// How many ports of the device were taken lately to the destination of `key`.
    #[must_use]
    pub fn trend_of(&self, key: &PortSpaceKey) -> Option<&Trend> {
        let taken = self.destinations.get(&self.destination(key)?)?;
        taken.trend.as_deref()
    }

    /// How much of the device's budget for the destination of `key` is taken.
    #[must_use]
    pub fn use_of(&self, tables: &Tables, now: Moment, key: &PortSpaceKey) -> Option<EgressUse> {
        let destination = self.destination(key)?;
        let device = &self.devices[destination.device];
        let taken = self.destinations.get(&destination);
        let spaces = taken.map(|t| &t.spaces);
        // Both observation points count the same sockets.
        let once: BTreeMap<Space3, &PortSpaceKey> = spaces
            .into_iter()
            .flat_map(|s| s.keys())
            .map(|key| (Space3::from(key), key))
            .collect();
        let (mut in_use, mut closing) = (0u32, 0u32);
        for space in once.values().filter_map(|key| tables.spaces.get(key)) {
            in_use += space.census.established + space.census.closing;
            closing += space.census.closing;
        }
        let lately = taken.map_or(0, |t| t.lately(now, device.hold));
        // What is being closed has left ESTABLISHED and is not closed yet.
        let held = u32::try_from(lately)
            .unwrap_or(u32::MAX)
            .saturating_sub(closing);
        Some(EgressUse {
            group: device.group.clone(),
            in_use,
            held,
            budget: device.budget,
            hold_seconds: device.hold.as_secs_f64(),
            port_spaces: u32::try_from(once.len()).unwrap_or(u32::MAX),
        })
    }

    /// Every destination that a device carries, with what is taken of its budget: the port spaces that
    /// a fleet adds up.
    pub fn uses<'a>(
        &'a self,
        tables: &'a Tables,
        now: Moment,
    ) -> impl Iterator<Item = (PortSpaceKey, EgressUse)> + 'a {
        self.destinations.values().filter_map(move |taken| {
            let key = *taken.spaces.keys().next()?;
            Some((key, self.use_of(tables, now, &key)?))
        })
    }
}
