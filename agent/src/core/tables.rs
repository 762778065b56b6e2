//! What the core remembers: every port space, who opens connections, and what joins the two points.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    time::Duration,
};

use tuplewatch_common::{
    address::{Point, PortSpaceKey, Role},
    record::CensusRow,
};

use super::{
    observation::{Event, EventKind, Snapshot, Space3},
    openers::{OpenerRate, Openers},
    report::Totals,
    space::{Census, Space},
    time::Moment,
};

/// Events kept to join the two observation points.
const JOINED: usize = 1024;
/// Source ports remembered over all port spaces: some megabytes.
const PORTS: usize = 300_000;

/// All port spaces, and who opens connections.
#[derive(Clone, Debug, Default)]
pub struct Tables {
    /// By key.
    pub spaces: BTreeMap<PortSpaceKey, Space>,
    /// Totals of port spaces that were forgotten.
    pub forgotten: Totals,
    openers: Openers,
    /// Wire port spaces joined to socket port spaces by ISN.
    joined: HashMap<Space3, PortSpaceKey>,
    recent_socket: VecDeque<(u32, PortSpaceKey)>,
    recent_wire: VecDeque<(u32, Space3)>,
    /// The first snapshot.
    pub first: Option<Moment>,
    aged: Moment,
}

impl Tables {
    /// Takes a snapshot; `keep` is how much history rules look at, `ageing` how long a port counts.
    pub fn snapshot(&mut self, snapshot: &Snapshot, keep: Duration, ageing: Duration) {
        let now = snapshot.now;
        self.first.get_or_insert(now);
        for (key, raw) in &snapshot.spaces {
            self.spaces
                .entry(*key)
                .or_insert_with(|| Space::new(now))
                .take(now, raw);
        }
        if let Some(rows) = &snapshot.census {
            self.census(now, rows);
        }
        self.ports(snapshot, ageing);
        self.openers.take(now, &snapshot.openers, keep);
        let (idle, forgotten) = (keep * 10, &mut self.forgotten);
        self.spaces.retain(|_, space| {
            space.settle(now, keep);
            let stays = now.since(space.last_change) < idle || space.census.in_use > 0;
            if !stays {
                *forgotten = forgotten.plus(&space.totals);
            }
            stays
        });
    }

    /// Takes single events.
    pub fn events(&mut self, events: &[Event]) {
        for event in events {
            let now = Moment(event.time_ns);
            let key = if event.kind == EventKind::BareAck as u8 {
                let key = PortSpaceKey::wire(&event.tuple, event.role);
                self.recent_wire.push_back((event.isn, Space3::from(&key)));
                key
            } else if event.kind == EventKind::SocketBareAck as u8 {
                let key = PortSpaceKey::socket(&event.tuple, event.role, event.netns);
                self.recent_socket.push_back((event.isn, key));
                key
            } else {
                continue;
            };
            self.spaces
                .entry(key)
                .or_insert_with(|| Space::new(now))
                .sample(event);
        }
        self.join();
    }

    /// Joins the two observation points: the same SYN has the same ISN before and after a NAT here.
    fn join(&mut self) {
        let sockets: HashMap<u32, PortSpaceKey> = self.recent_socket.iter().copied().collect();
        for (isn, wire) in &self.recent_wire {
            if let Some(socket) = sockets.get(isn) {
                self.joined.insert(*wire, *socket);
            }
        }
        let excess = self.recent_wire.len().saturating_sub(JOINED);
        self.recent_wire.drain(..excess);
        let excess = self.recent_socket.len().saturating_sub(JOINED);
        self.recent_socket.drain(..excess);
        if self.joined.len() > JOINED {
            self.joined.clear();
        }
    }

    /// Whether a bare ACK that a socket met was seen on the wire too.
    #[must_use]
    pub fn is_on_wire(&self, socket: &PortSpaceKey) -> bool {
        let wire = PortSpaceKey {
            point: Point::Wire as u8,
            netns: 0,
            ..*socket
        };
        let has_wire = self
            .spaces
            .get(&wire)
            .is_some_and(|s| s.totals.bare_acks > 0);
        has_wire || self.joined.values().any(|s| s == socket)
    }

    /// The processes behind a port space, busiest first: of the same addresses, else joined by ISN.
    #[must_use]
    pub fn openers(&self, key: &PortSpaceKey, now: Moment, window: Duration) -> Vec<OpenerRate> {
        let same = Space3::from(key);
        let joined = self.joined.get(&same).map(Space3::from);
        self.openers.rates(now, window, |opener| {
            let of = Space3::from(&opener.space);
            (of == same || Some(of) == joined)
                && (key.point != Point::Socket as u8 || opener.space.netns == key.netns)
        })
    }

    fn census(&mut self, now: Moment, rows: &[(PortSpaceKey, CensusRow)]) {
        let mut sums: HashMap<(Space3, u8), Census> = HashMap::new();
        for (key, row) in rows {
            // A row whose local port has no listener belongs to the initiator if an open of that port
            // space was seen; else its role stays unknown, and nobody claims it.
            let unknown = key.role == Role::Unknown as u8;
            let role = if unknown {
                Role::Initiator as u8
            } else {
                key.role
            };
            sums.entry((Space3::from(key), role)).or_default().add(row);
        }
        for (key, space) in &mut self.spaces {
            let sum = sums.get(&(Space3::from(key), key.role));
            space.counted(now, sum.copied().unwrap_or_default());
        }
    }

    fn ports(&mut self, snapshot: &Snapshot, ageing: Duration) {
        let now = snapshot.now;
        let mut room = PORTS.saturating_sub(
            self.spaces
                .values()
                .filter_map(|s| s.ports.as_ref())
                .map(|p| p.distinct() as usize)
                .sum(),
        );
        for (key, ports) in &snapshot.ports {
            let Some(space) = self.spaces.get_mut(key) else {
                continue;
            };
            if space.ports.is_none() && room < ports.len() {
                continue;
            }
            room = room.saturating_sub(ports.len());
            let established = space.totals.established;
            space
                .ports
                .get_or_insert_default()
                .note(now, ports, established);
        }
        // Not at every look: it goes through all ports.
        if now.since(self.aged) < ageing / 30 {
            return;
        }
        self.aged = now;
        for space in self.spaces.values_mut() {
            if let Some(ports) = &mut space.ports {
                ports.age(now, ageing);
                if ports.distinct() == 0 {
                    space.ports = None;
                }
            }
        }
    }
}
