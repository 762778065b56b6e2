//! What a rule concludes from a window of observations, with its evidence.

use serde::{Deserialize, Serialize};
use tuplewatch_common::address::PortSpaceKey;

use super::{
    black_hole::StallEvidence,
    budget::{Budget, Holder, Outlook, SearchEvidence},
    counters::CounterEvidence,
    egress::EgressUse,
    idle::IdleEvidence,
    placement::PlacementEvidence,
    stuck::StuckEvidence,
    time::Moment,
    waits::WaitEvidence,
};

/// How bad it is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Worth knowing; nothing fails.
    Info,
    /// Connections are delayed and heal by themselves.
    Warning,
    /// Connections fail.
    Critical,
}

impl Severity {
    /// Its name in every output.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Info => "info",
            Self::Warning => "warning",
            Self::Critical => "critical",
        }
    }
}

/// How sure the rule is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Confidence {
    /// The pattern fits; a part of the evidence could not be seen.
    Medium,
    /// Every part of the pattern was seen.
    High,
}

impl Confidence {
    /// Its name in every output.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Medium => "medium",
            Self::High => "high",
        }
    }
}

/// What a finding says: a signature with its cause, or a look-alike by its own name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub enum Verdict {
    /// `port_exhaustion` / `l4_reuse_in_time_wait`: SYNs on reused four-tuples are answered by bare
    /// ACKs, because the responder still holds the former connection in TIME_WAIT.
    L4ReuseInTimeWait,
    /// `port_exhaustion` / `nat_syn_drop`: a device in between has no port left and drops SYNs.
    NatSynDrop,
    /// `port_exhaustion` / `local_ephemeral`: connect() or bind() finds no free port on this host, or
    /// is about to.
    LocalEphemeral,
    /// `port_exhaustion` / `forecast`: at this rate the budget will not last.
    Forecast,
    /// `port_exhaustion` / `tuple_collision`: SYNs into live connections of the same initiator address
    /// and port: a balancer that keeps client addresses, or a stale NAT mapping.
    TupleCollision,
    /// `stuck_keepalive` / `pinned_5xx`: a kept-alive connection gets failures from an endpoint that is dead,
    /// while other connections to the same service are answered well.
    Pinned5xx,
    /// `stuck_keepalive` / `black_holed`: an established connection gets nothing through any more, while new
    /// ones to the same place are established.
    BlackHoled,
    /// `stuck_keepalive` / `idle_killed`: connections are reset by the first segment after an idle time:
    /// something in between forgets them.
    IdleKilled,
    /// `stuck_keepalive` / `draining`: an endpoint takes no new connections any more, and requests still ride on
    /// the old ones.
    Draining,
    /// `stuck_keepalive` / `pinned_suspect`: the responses on a connection are all alike and come at once, those
    /// on others are not.
    PinnedSuspect,
    /// Look-alike: an initiator that lost its state reconnects from the same port; the former
    /// connection was never closed.
    HalfOpenReconnect,
    /// Look-alike: one or two source ports only, used again and again.
    FixedPortReuse,
    /// Look-alike: a SYN met a handshake that was never completed (a flood or a scan).
    SynRecvCollision,
    /// Look-alike: a TIME_WAIT answered although nothing listens there any more.
    NoListener,
    /// Look-alike: late duplicates of SYNs that were accepted before.
    DuplicateSyn,
    /// Look-alike: the queue of connections waiting for accept() was full.
    AcceptQueueOverflow,
    /// Look-alike: the queue of half-open connections was full.
    SynQueueOverflow,
    /// Look-alike: packets are lost, those of established connections too.
    PacketLoss,
    /// Look-alike: no SYN to that destination was ever answered.
    FirewallDrop,
    /// Look-alike: the responder refuses by RST.
    ServerDown,
    /// Look-alike: many SYNs from many sources, whose handshakes nobody completes.
    SynFlood,
    /// Look-alike: one host tries many ports of another.
    PortScan,
    /// Look-alike: this host's conntrack table was full.
    ConntrackFull,
    /// Look-alike: two connections were given the same port by this host's masquerading at once.
    MasqueradeRace,
    /// Look-alike: the instance's network allowance was exceeded.
    EnaAllowance,
    /// Look-alike: a constant fraction of opens fails whatever the load: a hairpin or an asymmetric
    /// path to some of the targets.
    AsymmetricPath,
    /// Look-alike: a destination that answered before answers nothing any more, and no connection to
    /// it is left; or it answers failures only, on every connection.
    ServiceDown,
    /// Look-alike: some requests fail wherever they go, while others to the same service are served.
    EndpointError,
    /// Look-alike: established connections get nothing through, and no new one was established since.
    PathDown,
    /// Look-alike: only segments of full size get lost, on new connections too.
    MtuBlackHole,
    /// Look-alike: the peer answers, but its window is closed: it reads slowly or not at all.
    ZeroWindow,
    /// Look-alike: the server accepts and answers late; connections pile up.
    SlowServer,
    /// Look-alike: the peer closes an idle connection first, and a request that is sent all the same is
    /// answered by RST.
    KeepaliveRace,
    /// Opens are not answered, and what was seen does not tell why.
    UnknownConnectLoss,
}

impl Verdict {
    /// Every verdict.
    pub const ALL: [Self; 34] = [
        Self::L4ReuseInTimeWait,
        Self::NatSynDrop,
        Self::LocalEphemeral,
        Self::Forecast,
        Self::TupleCollision,
        Self::Pinned5xx,
        Self::BlackHoled,
        Self::IdleKilled,
        Self::Draining,
        Self::PinnedSuspect,
        Self::HalfOpenReconnect,
        Self::FixedPortReuse,
        Self::SynRecvCollision,
        Self::NoListener,
        Self::DuplicateSyn,
        Self::AcceptQueueOverflow,
        Self::SynQueueOverflow,
        Self::PacketLoss,
        Self::FirewallDrop,
        Self::ServerDown,
        Self::SynFlood,
        Self::PortScan,
        Self::ConntrackFull,
        Self::MasqueradeRace,
        Self::EnaAllowance,
        Self::AsymmetricPath,
        Self::ServiceDown,
        Self::EndpointError,
        Self::PathDown,
        Self::MtuBlackHole,
        Self::ZeroWindow,
        Self::SlowServer,
        Self::KeepaliveRace,
        Self::UnknownConnectLoss,
    ];

    /// The signature, unless it is a look-alike.
    #[must_use]
    pub const fn signature(self) -> Option<&'static str> {
        match self {
            Self::L4ReuseInTimeWait
            | Self::NatSynDrop
            | Self::LocalEphemeral
            | Self::Forecast
            | Self::TupleCollision => Some("port_exhaustion"),
            Self::Pinned5xx
            | Self::BlackHoled
            | Self::IdleKilled
            | Self::Draining
            | Self::PinnedSuspect => Some("stuck_keepalive"),
            _ => None,
        }
    }

    /// The cause, or the look-alike's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::L4ReuseInTimeWait => "l4_reuse_in_time_wait",
            Self::NatSynDrop => "nat_syn_drop",
            Self::LocalEphemeral => "local_ephemeral",
            Self::Forecast => "forecast",
            Self::TupleCollision => "tuple_collision",
            Self::Pinned5xx => "pinned_5xx",
            Self::BlackHoled => "black_holed",
            Self::IdleKilled => "idle_killed",
            Self::Draining => "draining",
            Self::PinnedSuspect => "pinned_suspect",
            Self::HalfOpenReconnect => "half_open_reconnect",
            Self::FixedPortReuse => "fixed_port_reuse",
            Self::SynRecvCollision => "syn_recv_collision",
            Self::NoListener => "no_listener",
            Self::DuplicateSyn => "duplicate_syn",
            Self::AcceptQueueOverflow => "accept_queue_overflow",
            Self::SynQueueOverflow => "syn_queue_overflow",
            Self::PacketLoss => "packet_loss",
            Self::FirewallDrop => "firewall_drop",
            Self::ServerDown => "server_down",
            Self::SynFlood => "syn_flood",
            Self::PortScan => "port_scan",
            Self::ConntrackFull => "conntrack_full",
            Self::MasqueradeRace => "masquerade_race",
            Self::EnaAllowance => "ena_allowance",
            Self::AsymmetricPath => "asymmetric_path",
            Self::ServiceDown => "service_down",
            Self::EndpointError => "endpoint_error",
            Self::PathDown => "path_down",
            Self::MtuBlackHole => "mtu_black_hole",
            Self::ZeroWindow => "zero_window",
            Self::SlowServer => "slow_server",
            Self::KeepaliveRace => "keepalive_race",
            Self::UnknownConnectLoss => "unknown_connect_loss",
        }
    }

    /// It never raises an alert.
    #[must_use]
    pub const fn is_look_alike(self) -> bool {
        self.signature().is_none()
    }
}

/// A pool of source ports inferred from completed handshakes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Pool {
    /// Lowest port.
    pub first: u16,
    /// Highest port.
    pub last: u16,
    /// Ports seen in between.
    pub seen: u32,
}

impl Pool {
    /// Ports between the two ends.
    #[must_use]
    pub fn size(&self) -> u32 {
        u32::from(self.last) - u32::from(self.first) + 1
    }
}

/// The numbers that led to a finding. Counts are of the whole episode, which began with the first
/// symptom and ends when the finding does; `window_*` are of the last window only.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Evidence {
    /// Opens in the episode.
    pub opens: u64,
    /// Handshakes completed.
    pub established: u64,
    /// Bare ACKs that answered a SYN.
    pub refused_syns: u64,
    /// … of them where the former connection was closed within the hold.
    pub refused_after_close: u64,
    /// … where it was never closed.
    pub refused_while_open: u64,
    /// … where its handshake was never completed.
    pub refused_half_open: u64,
    /// … where it is not known.
    pub refused_unknown: u64,
    /// RSTs by which the initiator answered.
    pub rsts: u64,
    /// SYNs sent again.
    pub syn_retransmits: u64,
    /// Opens that got through after a bare ACK.
    pub healed: u64,
    /// Opens that met the same bare ACK twice or were never answered after one.
    pub unhealed: u64,
    /// Opens on a reused four-tuple that were accepted at once.
    pub reuse_accepted: u64,
    /// Opens that got no answer in the end.
    pub unanswered: u64,
    /// Handshakes that their initiator did not complete.
    pub half_open: u64,
    /// Opens answered by RST.
    pub refused_by_rst: u64,
    /// Refused by RST after a bare ACK.
    pub no_listener: u64,
    /// Late duplicates.
    pub duplicate_syns: u64,
    /// Distinct source ports of refused SYNs.
    pub refused_ports: u32,
    /// Distinct source ports of completed handshakes in the ageing window.
    pub ports_seen: u32,
    /// The pool, where it could be inferred.
    pub pool: Option<Pool>,
    /// Sockets in TIME_WAIT of this port space now (this host only).
    pub time_wait: u32,
    /// Most of them at once.
    pub time_wait_peak: u32,
    /// Sockets in use now.
    pub in_use: u32,
    /// Shortest time in seconds from the end of a connection to the refused SYN on its four-tuple.
    pub reuse_interval_min_seconds: Option<f64>,
    /// Longest such time.
    pub reuse_interval_max_seconds: Option<f64>,
    /// Length of the window in seconds.
    pub window_seconds: f64,
    /// Refused SYNs in the window.
    pub window_refused: u64,
    /// Opens in the window.
    pub window_opens: u64,
    /// New connections per second over the window.
    pub opens_per_second: f64,
    /// Some refused four-tuples, newest last.
    pub samples: Vec<Sample>,
    /// Opens without answer, and what goes well beside them.
    pub loss: Option<LossEvidence>,
    /// Live connections that SYNs met.
    pub collisions: Option<CollisionEvidence>,
    /// Connections whose requests fail, and others that do better.
    pub stuck: Option<StuckEvidence>,
    /// Connections that get nothing through, and new ones that do better.
    pub stall: Option<StallEvidence>,
    /// Connections that are reset by the first segment after an idle time, and others that live.
    pub idle: Option<IdleEvidence>,
    /// What rides on a place that a service has left.
    pub placement: Option<PlacementEvidence>,
    /// What is taken of the ports of a device in between.
    pub egress: Option<EgressUse>,
    /// Counters that speak for the finding, with their growth over the window.
    pub counters: Vec<CounterEvidence>,
    /// The source ports there are, and how many are taken.
    pub budget: Option<Budget>,
    /// Where that leads.
    pub outlook: Option<Outlook>,
    /// How long connect() searches for a port.
    pub searches: Option<SearchEvidence>,
    /// Which connections take the ports, most first.
    pub holders: Vec<Holder>,
    /// connect() in the window that found no source port.
    pub no_local_port: u64,
    /// Connections that wait for an answer.
    pub waits: Option<WaitEvidence>,
}

/// Opens without answer in the last window, and what goes well beside them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LossEvidence {
    /// Opens without answer, those included that wait and have sent their SYN again.
    pub lost: u64,
    /// Handshakes completed.
    pub established: u64,
    /// SYNs sent again.
    pub syn_retransmits: u64,
    /// Connections to this destination that are established now; `null` where their sockets are not
    /// counted here.
    pub live: Option<u32>,
    /// Segments of established connections sent again; `null` where no socket of them is here.
    pub data_retransmits: Option<u64>,
    /// Other destinations of the same initiator that answer.
    pub others_answering: u32,
    /// Other destinations of the same initiator with lost or repeated SYNs.
    pub others_failing: u32,
}

/// Live connections that were reset because a SYN on their four-tuple met them, in the last window.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CollisionEvidence {
    /// Connections reset that had traffic lately.
    pub live: u32,
    /// Connections reset that had been idle for as long as a NAT keeps a mapping.
    pub stale: u32,
    /// Distinct source ports.
    pub ports: u32,
    /// Shortest time without traffic before the reset, in milliseconds.
    pub idle_min_ms: u32,
    /// Longest such time.
    pub idle_max_ms: u32,
}

/// One refused SYN.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// When (nanoseconds of the source's clock).
    pub time_ns: u64,
    /// Source port.
    pub port: u16,
    /// Initial sequence number of the SYN.
    pub isn: u32,
    /// Acknowledgement number of the bare ACK.
    pub ack: u32,
    /// Seconds since the end of the former connection, if known.
    pub reuse_interval_seconds: Option<f64>,
}

/// A process that opens the connections.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpenedBy {
    /// Process id in the initial pid namespace.
    pub pid: u32,
    /// Command name.
    pub command: String,
    /// Its control group (inode of the directory), 0 if unknown.
    #[serde(skip)]
    pub cgroup_id: u64,
    /// Path of its control group, if it could be read.
    pub cgroup: Option<String>,
    /// Connections opened per second over the window.
    pub opens_per_second: f64,
    /// Connections opened in all.
    pub opens: u64,
    /// Mean lifetime in seconds, if any was closed.
    pub lifetime_seconds: Option<f64>,
    /// connect() in the window that found no source port.
    #[serde(default)]
    pub no_local_port: u64,
}

/// A look-alike considered, and why it is not the answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RuledOut {
    /// Its name.
    pub name: &'static str,
    /// The numbers that speak against it.
    pub why: String,
}

/// One conclusion.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// What.
    pub verdict: Verdict,
    /// Where.
    pub space: PortSpaceKey,
    /// When the episode began.
    pub since: Moment,
    /// How bad.
    pub severity: Severity,
    /// How sure.
    pub confidence: Confidence,
    /// Why.
    pub evidence: Evidence,
    /// What else it might have been.
    pub ruled_out: Vec<RuledOut>,
    /// Who opens the connections (at the initiator).
    pub opened_by: Vec<OpenedBy>,
    /// One line for a person.
    pub summary: String,
    /// What to do.
    pub remedy: String,
}
