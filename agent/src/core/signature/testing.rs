//! A host in a script: counters that grow second by second, and what the core makes of them.

use std::{collections::BTreeMap, time::Duration};

use tuplewatch_common::{
    address::{FourTuple, Point, PortSpaceKey, Role, v4_mapped},
    memory::Former,
    record::{CensusRow, Event, EventKind, Global, Opener, OpenerKey, PortSpace},
};

use crate::core::{
    alert::State,
    counters::{HostCounters, NetnsCounters},
    egress::{Egress, Group, Host},
    engine::Engine,
    finding::{Finding, Verdict},
    observation::{LookUp, Snapshot, Translation},
    profile,
    surroundings::{LocalPorts, Surroundings},
    threshold::Thresholds,
    time::Moment,
};

/// The namespace that the agent runs in.
pub const OWN: u32 = 4_026_531_840;

/// A port space of 10.0.0.1.
pub fn key(responder: u8, port: u16, role: Role, point: Point) -> PortSpaceKey {
    PortSpaceKey {
        initiator: v4_mapped([10, 0, 0, 1]),
        responder: v4_mapped([203, 0, 113, responder]),
        responder_port: port,
        role: role as u8,
        point: point as u8,
        netns: if point as u8 == Point::Socket as u8 {
            OWN
        } else {
            0
        },
    }
}

/// A destination of this host, seen at its sockets.
pub fn opens_to(responder: u8) -> PortSpaceKey {
    key(responder, 8080, Role::Initiator, Point::Socket)
}

/// A client of this host, seen on the wire.
pub fn client() -> PortSpaceKey {
    key(10, 8080, Role::Responder, Point::Wire)
}

/// The host.
pub struct Script {
    engine: Engine,
    now: Moment,
    spaces: BTreeMap<PortSpaceKey, PortSpace>,
    census: BTreeMap<PortSpaceKey, CensusRow>,
    globals: [u64; Global::COUNT as usize],
    /// Processes that open connections.
    pub openers: BTreeMap<OpenerKey, Opener>,
    /// Source ports of handshakes completed in this second.
    pub ports: Vec<(PortSpaceKey, Vec<u16>)>,
    /// What conntrack says.
    pub translations: Vec<Translation>,
    /// HTTP/1 conversations with news.
    pub talks: Vec<crate::core::observation::Talk>,
    /// Connections that make no progress.
    pub stalled: Vec<crate::core::stalled::Stalled>,
    /// Those that got something through in this second.
    pub recovered: Vec<crate::core::stalled::Recovered>,
    /// Connections that woke after an idle time.
    pub idle: crate::core::idle::IdleNews,
    /// Source ports of the agent's namespace.
    pub local_ports: Option<LocalPorts>,
    /// Counters of the agent's namespace.
    pub netns: NetnsCounters,
    /// Counters of the devices.
    pub host: HostCounters,
    /// Counters are as they were then; otherwise they are read in every second.
    pub read_at: Option<Moment>,
}

impl Script {
    /// Nothing has happened, thresholds are the defaults.
    pub fn new() -> Self {
        Self::with(Thresholds::default(), &[])
    }

    /// With devices in between.
    pub fn with_groups(groups: &[Group]) -> Self {
        Self::with(Thresholds::default(), groups)
    }

    fn with(thresholds: Thresholds, groups: &[Group]) -> Self {
        let egress = Egress::new(groups, &profile::builtin(), &Host::default()).unwrap();
        Self {
            engine: Engine::new(thresholds).with_egress(egress),
            now: Moment(1_000_000_000_000),
            spaces: BTreeMap::new(),
            census: BTreeMap::new(),
            globals: [0; Global::COUNT as usize],
            openers: BTreeMap::new(),
            ports: Vec::new(),
            talks: Vec::new(),
            stalled: Vec::new(),
            recovered: Vec::new(),
            translations: Vec::new(),
            idle: crate::core::idle::IdleNews::default(),
            local_ports: None,
            netns: NetnsCounters::default(),
            host: HostCounters::default(),
            read_at: None,
        }
    }

    /// The counters of a port space.
    pub fn space(&mut self, key: PortSpaceKey) -> &mut PortSpace {
        self.spaces.entry(key).or_default()
    }

    /// Opens that are established at once, live for a moment and are closed.
    pub fn served(&mut self, key: PortSpaceKey, n: u64) {
        let space = self.space(key);
        space.opens += n;
        space.established += n;
        space.closed += n;
    }

    /// Opens that end without answer, their SYN sent again `retransmits` times in all.
    pub fn unanswered(&mut self, key: PortSpaceKey, n: u64, retransmits: u64) {
        let space = self.space(key);
        space.opens += n;
        space.syn_retransmits += retransmits;
        if retransmits > 0 {
            space.syn_timeouts += n;
        } else {
            space.abandoned += n;
        }
    }

    /// Sockets that a census finds.
    pub fn sockets(&mut self, key: PortSpaceKey) -> &mut CensusRow {
        self.census.entry(key).or_default()
    }

    /// SYNs of no known port space.
    pub fn strangers(&mut self, n: u64) {
        self.globals[Global::SynsWithoutPortSpace as usize] += n;
    }

    /// Handshakes of no known port space that nobody completed.
    pub fn strangers_half_open(&mut self, n: u64) {
        self.globals[Global::StrangersHalfOpen as usize] += n;
    }

    /// A SYN from `port` meets a live connection, which is reset after `idle_ms` without traffic.
    pub fn collision(&mut self, key: PortSpaceKey, port: u16, idle_ms: u32) {
        let space = self.space(key);
        space.opens += 1;
        space.established += 1;
        space.bare_acks += 1;
        space.bare_acks_open += 1;
        space.rsts_after_bare_ack += 1;
        space.syn_retransmits += 1;
        space.healed += 1;
        let event = Event {
            time_ns: self.now.0,
            tuple: FourTuple {
                initiator: key.initiator,
                responder: key.responder,
                responder_port: key.responder_port,
                initiator_port: port,
                pad: 0,
            },
            role: key.role,
            former: Former::Open as u8,
            former_age_ms: idle_ms,
            ..Event::default()
        };
        for kind in [EventKind::BareAck, EventKind::CollisionReset] {
            self.engine.events(&[Event {
                kind: kind as u8,
                ..event
            }]);
        }
    }

    /// A change of placement is known.
    pub fn know(&mut self, placement: crate::core::placement::Placement) {
        self.engine.set_placements(vec![placement]);
    }

    /// This moment.
    pub const fn now(&self) -> Moment {
        self.now
    }

    /// Lets `seconds` pass; `each` says what happens in every one of them.
    pub fn run(&mut self, seconds: u64, mut each: impl FnMut(&mut Self, u64)) {
        for second in 0..seconds {
            each(self, second);
            self.now.0 += 1_000_000_000;
            let snapshot = Snapshot {
                now: self.now,
                took: Duration::ZERO,
                spaces: self.spaces.iter().map(|(k, s)| (*k, *s)).collect(),
                census: Some(self.census.iter().map(|(k, row)| (*k, *row)).collect()),
                ports: std::mem::take(&mut self.ports),
                talks: std::mem::take(&mut self.talks),
                stalled: self.stalled.clone(),
                recovered: std::mem::take(&mut self.recovered),
                idle: std::mem::take(&mut self.idle),
                answers: Vec::new(),
                openers: self.openers.iter().map(|(k, o)| (*k, *o)).collect(),
                globals: self.globals,
                translations: std::mem::take(&mut self.translations),
                surroundings: Surroundings {
                    own_netns: OWN,
                    local_ports: self.local_ports.map(|p| (OWN, p)).into_iter().collect(),
                    counters: BTreeMap::from([(OWN, self.netns)]),
                    read_at: self.read_at.or(Some(self.now)),
                    host: self.host,
                },
            };
            let _ = self.engine.snapshot(&snapshot);
        }
    }

    /// Lets `seconds` pass in which nobody looks.
    pub fn pause(&mut self, seconds: u64) {
        self.now.0 += seconds * 1_000_000_000;
    }

    /// What the core says now: look-alikes, and signatures that fire.
    pub fn verdicts(&self) -> Vec<Verdict> {
        let mut verdicts: Vec<_> = self.findings().iter().map(|f| f.verdict).collect();
        verdicts.sort_unstable();
        verdicts.dedup();
        verdicts
    }

    /// Port spaces of which the core wants to know what they are at the other point.
    pub fn wanted(&self) -> Vec<LookUp> {
        self.engine.wanted()
    }

    /// The core waits for counters.
    pub fn wants_counters(&self) -> bool {
        self.engine.wants_counters()
    }

    /// The only finding of that kind.
    pub fn finding(&self, verdict: Verdict) -> Finding {
        let mut found = self.findings();
        found.retain(|f| f.verdict == verdict);
        assert_eq!(found.len(), 1, "{verdict:?} among {:?}", self.verdicts());
        found.remove(0)
    }

    /// Look-alikes, and what the alerts that fire found.
    pub fn findings(&self) -> Vec<Finding> {
        let overview = self.engine.overview(0);
        let firing = overview
            .alerts
            .into_iter()
            .filter(|a| a.state == State::Firing)
            .map(|a| a.finding);
        firing.chain(overview.look_alikes).collect()
    }
}
