//! What the core remembers: every port space, who opens connections, and what joins the two points.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque},
    time::Duration,
};

use tuplewatch_common::{
    address::{Point, PortSpaceKey, Role},
    record::CensusRow,
};

use super::{
    finding::Pool,
    idle::Idles,
    observation::{Event, EventKind, Snapshot, Space3, Translation},
    openers::{OpenerRate, Openers},
    packed::Packed,
    path_loss,
    report::Totals,
    service::Services,
    space::{Census, Space},
    stalled::{Counted, Stalls},
    suspect::Suspects,
    threshold::PoolInference,
    time::Moment,
    waits::{Pace, Pending, Waits},
};

/// Events kept to join the two observation points.
const JOINED: usize = 1024;
/// What is behind a port space of the wire is looked up again after this long: other processes may have
/// come.
const LOOK_UP: Duration = Duration::from_secs(60);
/// Source ports remembered over all port spaces: some megabytes.
const PORTS: usize = 300_000;
/// Port spaces that were forgotten and whose counters are still known: some megabytes.
const FORGOTTEN: usize = 20_000;

/// All port spaces, and who opens connections.
#[derive(Clone, Debug, Default)]
pub struct Tables {
    /// By key.
    pub spaces: BTreeMap<PortSpaceKey, Box<Space>>,
    /// Those that a look can change anything of. The others cost nothing but their memory.
    active: Vec<PortSpaceKey>,
    /// Those that the latest census had sockets of.
    counted: Vec<PortSpaceKey>,
    /// Rows of the latest census with sockets whose port was taken by bind(), by source.
    bound: BTreeMap<PortSpaceKey, Vec<(PortSpaceKey, CensusRow)>>,
    /// Totals of all port spaces, those forgotten included.
    pub all: Totals,
    /// What the source had counted of port spaces that were forgotten here: it goes on from there.
    forgotten: HashMap<PortSpaceKey, Packed>,
    openers: Openers,
    /// The services that this host sends HTTP/1 requests to.
    pub services: Services,
    /// Connections that make no progress.
    pub stalls: Stalls,
    /// Their requests that wait, where no census tells.
    pending: Pending,
    /// Connections that woke after an idle time.
    pub idles: Idles,
    /// Responses that cannot be read.
    pub suspects: Suspects,
    /// Wire port spaces joined by ISN to the socket port spaces behind them: many pods may share an
    /// address.
    joined: HashMap<Space3, BTreeSet<PortSpaceKey>>,
    joined_sockets: HashSet<PortSpaceKey>,
    /// What conntrack said is behind port spaces of the wire, and when.
    behind: HashMap<Space3, (Moment, BTreeSet<Space3>)>,
    /// What it said those of sockets become on the wire, and when.
    beyond: HashMap<Space3, (Moment, BTreeSet<Space3>)>,
    recent_socket: VecDeque<(u32, PortSpaceKey)>,
    recent_wire: VecDeque<(u32, Space3)>,
    /// Pools that were known before a restart, until they are inferred again.
    remembered: BTreeMap<PortSpaceKey, Pool>,
    remembered_until: Moment,
    /// The first snapshot, or the first one after a gap.
    pub first: Option<Moment>,
    /// When the latest census was taken.
    pub census_at: Option<Moment>,
    /// Source ports remembered now.
    ports: usize,
    swept: Moment,
}

impl Tables {
    /// Takes a snapshot. `gap` is the time that nobody has looked, if it is longer than the window.
    pub fn snapshot(
        &mut self,
        snapshot: &Snapshot,
        keep: Duration,
        rules: &PoolInference,
        gap: Option<Duration>,
    ) {
        let now = snapshot.now;
        self.first.get_or_insert(now);
        for (key, raw) in &snapshot.spaces {
            let difference = self.space(*key, now).take(now, raw, gap.is_some());
            self.all = self.all.plus(&difference);
        }
        self.openers.take(now, &snapshot.openers, keep);
        self.services.take(now, &snapshot.talks, keep);
        if let Some(gap) = gap {
            self.resume(now, gap);
        }
        let spaces = &self.spaces;
        let stalls = (&*snapshot.stalled, &*snapshot.recovered);
        self.stalls.take(now, stalls, keep, |key, since| {
            counted(spaces, key, now, since)
        });
        if let Some(rows) = &snapshot.census {
            self.census(now, rows, keep);
        }
        if self.census_at.is_none() {
            for (key, pace) in self.pending.take(now, &snapshot.talks) {
                self.paced(now, key, pace);
            }
        }
        for Translation {
            space,
            point,
            others,
        } in &snapshot.translations
        {
            let known = match point {
                Point::Wire => &mut self.behind,
                Point::Socket => &mut self.beyond,
            };
            known.insert(*space, (now, others.clone()));
        }
        self.ports(snapshot);
        self.sweep(now, keep, rules);
        let spaces = &mut self.spaces;
        if self.active.capacity() > 64 + 4 * self.active.len() {
            self.active.shrink_to_fit();
        }
        self.active.retain(|key| {
            spaces.get_mut(key).is_some_and(|space| {
                space.infer_pool(now, rules);
                space.is_active = space.settle(now, keep);
                space.is_active
            })
        });
    }

    /// Takes single events.
    pub fn events(&mut self, events: &[Event]) {
        for event in events {
            let now = Moment(event.time_ns);
            let is = |kind: EventKind| event.kind == kind as u8;
            if is(EventKind::BareAck) {
                let key = PortSpaceKey::wire(&event.tuple, event.role);
                self.recent_wire.push_back((event.isn, Space3::from(&key)));
                self.space(key, now).sample(event);
            } else if is(EventKind::SocketBareAck) {
                let key = PortSpaceKey::socket(&event.tuple, event.role, event.netns);
                self.recent_socket.push_back((event.isn, key));
                self.space(key, now).sample(event);
            } else if is(EventKind::CollisionReset) {
                let key = PortSpaceKey::wire(&event.tuple, event.role);
                self.space(key, now).collision(event);
            }
        }
        self.join();
    }

    /// Joins the two observation points: the same SYN has the same ISN before and after a NAT here.
    fn join(&mut self) {
        let sockets: HashMap<u32, PortSpaceKey> = self.recent_socket.iter().copied().collect();
        for (isn, wire) in &self.recent_wire {
            if let Some(socket) = sockets.get(isn) {
                self.joined.entry(*wire).or_default().insert(*socket);
                self.joined_sockets.insert(*socket);
            }
        }
        let excess = self.recent_wire.len().saturating_sub(JOINED);
        self.recent_wire.drain(..excess);
        let excess = self.recent_socket.len().saturating_sub(JOINED);
        self.recent_socket.drain(..excess);
        if self.joined_sockets.len() > JOINED {
            self.joined.clear();
            self.joined_sockets.clear();
        }
    }

    /// Port spaces with symptoms.
    pub fn symptomatic(&self) -> impl Iterator<Item = (&PortSpaceKey, &Space)> {
        self.looked_at()
            .filter(|(_, space)| space.episode.is_some())
    }

    /// Port spaces of which something has changed in the last `window`.
    pub fn active(
        &self,
        now: Moment,
        window: Duration,
    ) -> impl Iterator<Item = (&PortSpaceKey, &Space)> {
        self.looked_at()
            .filter(move |(_, space)| now.since(space.last_change) <= window)
    }

    fn looked_at(&self) -> impl Iterator<Item = (&PortSpaceKey, &Space)> {
        let spaces = self.active.iter();
        spaces.filter_map(|key| self.spaces.get(key).map(|space| (key, &**space)))
    }

    /// Whether the same port space is seen on the wire.
    #[must_use]
    pub fn has_wire(&self, socket: &PortSpaceKey) -> bool {
        self.spaces.contains_key(&wire(socket))
    }

    /// Whether a bare ACK that a socket met was seen on the wire too.
    #[must_use]
    pub fn is_on_wire(&self, socket: &PortSpaceKey) -> bool {
        let wire = self.spaces.get(&wire(socket));
        let has_wire = wire.is_some_and(|s| s.totals().bare_acks > 0);
        has_wire || self.joined_sockets.contains(socket)
    }

    /// Whether it was not looked up lately what a port space is at the other point.
    #[must_use]
    pub fn is_look_up_due(&self, space: &Space3, point: Point, now: Moment) -> bool {
        let known = match point {
            Point::Wire => &self.behind,
            Point::Socket => &self.beyond,
        };
        let known = known.get(space);
        known.is_none_or(|(at, _)| now.since(*at) >= LOOK_UP)
    }

    /// Whether it is known what a socket's connections become on the wire.
    #[must_use]
    pub fn is_translation_known(&self, socket: &PortSpaceKey) -> bool {
        self.beyond.contains_key(&Space3::from(socket)) || self.joined_sockets.contains(socket)
    }

    /// Port spaces of the wire that a socket's connections have after translation, as far as that was
    /// looked up.
    pub fn translated(&self, socket: &PortSpaceKey) -> impl Iterator<Item = &Space> {
        let own = Space3::from(socket);
        let behind = self.behind.iter();
        let behind = behind.filter(|(_, (_, originals))| originals.contains(&own));
        let beyond = self.beyond.get(&own).into_iter();
        let wires: BTreeSet<&Space3> = beyond
            .flat_map(|(_, wires)| wires)
            .chain(behind.map(|(wire, _)| wire))
            .collect();
        wires.into_iter().filter_map(|wire| {
            let key = PortSpaceKey {
                initiator: wire.initiator,
                responder: wire.responder,
                responder_port: wire.responder_port,
                role: Role::Initiator as u8,
                point: Point::Wire as u8,
                netns: 0,
            };
            self.spaces.get(&key).map(|space| &**space)
        })
    }

    /// Up to `most` source ports of a port space, as far as they are known: of refused SYNs, then of completed
    /// handshakes, the latest first.
    #[must_use]
    pub fn latest_ports(&self, key: &PortSpaceKey, most: usize) -> Vec<u16> {
        let Some(space) = self.spaces.get(key) else {
            return Vec::new();
        };
        let refused = space.samples().rev().map(|refused| refused.sample.port);
        let completed = space.ports.as_ref().map(|ports| ports.latest(most));
        let mut known = HashSet::new();
        let all = refused.chain(completed.into_iter().flatten());
        all.filter(|port| known.insert(*port)).take(most).collect()
    }

    /// The processes behind a port space, busiest first: of the same addresses, and those behind a
    /// translation on this host, by ISN or by what conntrack says.
    #[must_use]
    pub fn openers(&self, key: &PortSpaceKey, now: Moment, window: Duration) -> Vec<OpenerRate> {
        let same = Space3::from(key);
        let wanted =
            |space: &PortSpaceKey| key.point != Point::Socket as u8 || space.netns == key.netns;
        let of = |space: &Space3| {
            self.openers
                .of_space(space, now, window, |opener| wanted(&opener.space))
        };
        let mut found = of(&same);
        let by_isn = self.joined.get(&same).into_iter().flatten();
        let looked_up = self.behind.get(&same).map(|(_, originals)| originals);
        let is_wire = key.point == Point::Wire as u8;
        let behind: BTreeSet<Space3> = by_isn
            .map(Space3::from)
            .chain(looked_up.into_iter().flatten().copied())
            .filter(|joined| is_wire && *joined != same)
            .collect();
        for joined in &behind {
            found.extend(of(joined));
        }
        if !behind.is_empty() {
            found.sort_by_key(|r| (std::cmp::Reverse(r.opens), r.key));
        }
        found
    }

    /// The processes whose connections come from an address in a namespace, busiest first.
    #[must_use]
    pub fn openers_of_source(
        &self,
        source: &PortSpaceKey,
        now: Moment,
        window: Duration,
    ) -> Vec<OpenerRate> {
        self.openers
            .of_source(source.initiator, now, window, |opener| {
                opener.space.netns == source.netns
            })
    }

    /// What was counted in a port space.
    #[must_use]
    pub fn totals(&self, key: &PortSpaceKey) -> Totals {
        totals(&self.spaces, key)
    }

    /// The pool of source ports that the initiator's address of a port space uses.
    #[must_use]
    pub fn pool(&self, key: &PortSpaceKey, now: Moment) -> Option<Pool> {
        let inferred = self.spaces.get(key).and_then(|space| space.pool());
        inferred.or_else(|| {
            let remembered = self.remembered.get(key).copied();
            remembered.filter(|_| now < self.remembered_until)
        })
    }

    /// All pools inferred now, and those remembered still: to be kept over a restart.
    #[must_use]
    pub fn pools(&self, now: Moment) -> BTreeMap<PortSpaceKey, Pool> {
        let spaces = self.spaces.iter();
        let inferred = spaces.filter_map(|(key, space)| Some((*key, space.pool()?)));
        let mut pools = BTreeMap::new();
        if now < self.remembered_until {
            pools.clone_from(&self.remembered);
        }
        pools.extend(inferred);
        pools
    }

    /// Takes the pools that were known before a restart; they count until `until`, where none is
    /// inferred anew.
    pub fn remember_pools(
        &mut self,
        until: Moment,
        pools: impl IntoIterator<Item = (PortSpaceKey, Pool)>,
    ) {
        self.remembered_until = until;
        self.remembered.extend(pools);
    }

    /// Rows of the latest census with sockets whose port was taken by bind(), by source address and
    /// namespace (the responder zeroed): those of one address draw on one pool, whatever they are
    /// connected to.
    pub fn bound(&self) -> impl Iterator<Item = (&PortSpaceKey, &[(PortSpaceKey, CensusRow)])> {
        self.bound.iter().map(|(source, rows)| (source, &**rows))
    }

    /// Begins all windows anew: nobody has looked for `gap`.
    fn resume(&mut self, now: Moment, gap: Duration) {
        self.first = Some(now);
        self.openers.resume(now);
        self.stalls.resume();
        for key in &self.active {
            if let Some(space) = self.spaces.get_mut(key) {
                space.resume(now, gap);
            }
        }
    }

    fn census(&mut self, now: Moment, rows: &[(PortSpaceKey, CensusRow)], keep: Duration) {
        self.census_at = Some(now);
        self.bound.clear();
        let mut sums: HashMap<PortSpaceKey, (Census, Pace)> = HashMap::new();
        for (key, row) in rows {
            // A row whose local port has no listener belongs to the initiator if an open of that port
            // space was seen; else its role stays unknown, and nobody claims it.
            let role = if key.role == Role::Unknown as u8 {
                Role::Initiator as u8
            } else {
                key.role
            };
            let socket = PortSpaceKey {
                role,
                point: Point::Socket as u8,
                ..*key
            };
            if row.bound > 0 && role == Role::Initiator as u8 {
                let rows = self.bound.entry(source(&socket)).or_default();
                rows.push((socket, *row));
            }
            // A packet on the wire does not tell its namespace.
            for key in [socket, wire(&socket)] {
                let (census, pace) = sums.entry(key).or_default();
                census.add(row);
                pace.add(row);
            }
        }
        let gone: Vec<PortSpaceKey> = std::mem::take(&mut self.counted)
            .into_iter()
            .filter(|key| !sums.contains_key(key))
            .collect();
        let gone = gone.into_iter().map(|key| (key, Default::default()));
        for (key, (census, pace)) in gone.chain(sums) {
            self.paced(now, key, pace);
            let Some(space) = self.spaces.get_mut(&key) else {
                continue;
            };
            // Traffic alone is no change that a look could make anything of.
            space.census.active = census.active;
            if space.census != census {
                space.counted(now, census, keep);
                activate(space, &mut self.active, key);
            }
            if census != Census::default() {
                self.counted.push(key);
            }
        }
        self.counted.shrink_to_fit();
    }

    /// Takes how many connections of a port space wait for an answer.
    fn paced(&mut self, now: Moment, key: PortSpaceKey, pace: Pace) {
        if let Some(space) = self.spaces.get_mut(&key) {
            Waits::note(&mut space.waits, now, pace);
            if space.waits.is_some() {
                activate(space, &mut self.active, key);
            }
        }
    }

    fn ports(&mut self, snapshot: &Snapshot) {
        let now = snapshot.now;
        for (key, ports) in &snapshot.ports {
            let Some(space) = self.spaces.get_mut(key) else {
                continue;
            };
            // Behind a responder's ports there is a pool to infer; an initiator's are only counted.
            let room = if key.role == Role::Responder as u8 {
                PORTS
            } else {
                PORTS / 2
            };
            self.ports += space.note_ports(now, ports, room.saturating_sub(self.ports));
            activate(space, &mut self.active, *key);
        }
    }

    /// Forgets old source ports and port spaces that are not used any more. It goes through all of
    /// them, so not at every look.
    fn sweep(&mut self, now: Moment, keep: Duration, rules: &PoolInference) {
        if now.since(self.swept) < (rules.ageing / 30).min(keep) {
            return;
        }
        self.swept = now;
        if now >= self.remembered_until {
            self.remembered.clear();
        }
        for known in [&mut self.behind, &mut self.beyond] {
            known.retain(|_, (at, _)| now.since(*at) < LOOK_UP * 10);
        }
        if self.forgotten.len() > FORGOTTEN {
            self.forgotten.clear();
        }
        let (idle, forgotten) = (keep * 10, &mut self.forgotten);
        let mut ports = 0;
        self.spaces.retain(|key, space| {
            ports += space.age_ports(now, rules.ageing) as usize;
            let stays = now.since(space.last_change) < idle || space.census.in_use() > 0;
            if !stays {
                forgotten.insert(*key, space.forget());
            }
            stays
        });
        self.ports = ports;
    }

    /// The port space `key`, new if it was not known, and looked at from now on.
    fn space(&mut self, key: PortSpaceKey, now: Moment) -> &mut Space {
        let space = self.spaces.entry(key).or_insert_with(|| {
            let before = self.forgotten.remove(&key).unwrap_or_default();
            Box::new(Space::new(now, before))
        });
        activate(space, &mut self.active, key);
        space
    }
}

fn activate(space: &mut Space, active: &mut Vec<PortSpaceKey>, key: PortSpaceKey) {
    if !space.is_active {
        space.is_active = true;
        active.push(key);
    }
}

/// What was counted in a port space of the sockets, or on the wire where sockets are not counted: those
/// accepted here.
fn totals(spaces: &BTreeMap<PortSpaceKey, Box<Space>>, key: &PortSpaceKey) -> Totals {
    let space = spaces.get(key).or_else(|| spaces.get(&wire(key)));
    space.map(|space| space.totals()).unwrap_or_default()
}

/// The same, and what of it was counted lately.
fn counted(
    spaces: &BTreeMap<PortSpaceKey, Box<Space>>,
    key: &PortSpaceKey,
    now: Moment,
    since: Moment,
) -> Counted {
    let space = spaces.get(key).or_else(|| spaces.get(&wire(key)));
    space.map_or_else(Counted::default, |space| Counted {
        totals: space.totals(),
        lately: space.window(now, path_loss::LATELY),
        since: space.window(now, now.since(since)),
    })
}

/// The same port space on the wire.
fn wire(socket: &PortSpaceKey) -> PortSpaceKey {
    PortSpaceKey {
        point: Point::Wire as u8,
        netns: 0,
        ..*socket
    }
}

/// The pool of all sockets that one source address of a namespace binds.
fn source(key: &PortSpaceKey) -> PortSpaceKey {
    PortSpaceKey {
        responder: [0; 16],
        responder_port: 0,
        ..*key
    }
}
