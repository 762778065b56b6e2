//! What the core hands to the sinks.

use std::net::IpAddr;

use serde::Serialize;
use tuplewatch_common::{
    address::{Point, PortSpaceKey, Role},
    histogram::BUCKETS,
    record::Global,
};

use super::{
    alert::Alert,
    budget::{Budget, Outlook},
    egress::EgressUse,
    finding::Finding,
    observation::{ip, point_name, role_name},
    time::Moment,
};

/// Something that changed.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// An alert entered a state, got worse, or (while firing) has new figures.
    Alert(Box<Alert>),
    /// A look-alike was recognised; told once when it begins and once when it ends.
    LookAlike {
        /// What was found.
        finding: Box<Finding>,
        /// It is over.
        ended: bool,
    },
}

/// One line of the summary, and the source of the exported metrics: a port space with its totals.
#[derive(Clone, Debug, PartialEq)]
pub struct SpaceReport {
    /// The port space.
    pub key: PortSpaceKey,
    /// Totals since the agent began.
    pub totals: Totals,
    /// Opens per second over the last window.
    pub opens_per_second: f64,
    /// Refused SYNs in the last window.
    pub window_refused: u64,
    /// Sockets in use, as the latest census has it.
    pub in_use: u32,
    /// Sockets in TIME_WAIT by age in buckets of ten seconds.
    pub time_wait: [u32; tuplewatch_common::record::TIME_WAIT_AGES],
    /// Distinct source ports of completed handshakes in the ageing window.
    pub ports_seen: u32,
    /// Source ports there can be at once, if known, and how many are taken.
    pub budget: Option<Budget>,
    /// Where that leads, once it was watched for long enough.
    pub outlook: Option<Outlook>,
    /// Histogram of reuse intervals, in units of [`tuplewatch_common::histogram::REUSE_UNIT_NS`].
    pub reuse_interval: [u64; BUCKETS],
    /// Histogram of handshake durations, in units of
    /// [`tuplewatch_common::histogram::HANDSHAKE_UNIT_NS`].
    pub handshake_duration: [u64; BUCKETS],
    /// Histogram of port searches, in units of [`tuplewatch_common::histogram::SEARCH_UNIT_NS`].
    pub port_search: [u64; BUCKETS],
}

impl SpaceReport {
    /// Sockets of this host in TIME_WAIT. Not all of them need hold a port; see [`Budget::held`].
    #[must_use]
    pub fn held(&self) -> u32 {
        self.time_wait.iter().sum()
    }

    /// Free source ports: budget − in use − held.
    #[must_use]
    pub fn headroom(&self) -> Option<u32> {
        self.budget.map(|b| b.headroom())
    }

    /// Share of the budget that is taken.
    #[must_use]
    pub fn utilization(&self) -> Option<f64> {
        self.budget.map(|b| b.utilization())
    }

    /// The role of this host.
    #[must_use]
    pub fn role(&self) -> &'static str {
        role_name(Role::from_u8(self.key.role))
    }

    /// The observation point.
    #[must_use]
    pub fn point(&self) -> &'static str {
        point_name(Point::from_u8(self.key.point))
    }

    /// Who sends the SYNs.
    #[must_use]
    pub fn initiator(&self) -> IpAddr {
        ip(&self.key.initiator)
    }

    /// Who gets them.
    #[must_use]
    pub fn responder(&self) -> IpAddr {
        ip(&self.key.responder)
    }
}

/// Totals of a port space since the agent began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// See the fields of the same names in [`tuplewatch_common::record::PortSpace`].
    pub opens: u64,
    #[allow(missing_docs, reason = "see the first field")]
    pub established: u64,
    #[allow(missing_docs, reason = "see the first field")]
    pub refused: u64,
    #[allow(missing_docs, reason = "see the first field")]
    pub syn_timeouts: u64,
    #[allow(missing_docs, reason = "see the first field")]
    pub abandoned: u64,
    #[allow(missing_docs, reason = "see the first field")]
    pub half_open: u64,
    #[allow(missing_docs, reason = "see the first field")]
    pub no_local_port: u64,
    #[allow(missing_docs, reason = "see the first field")]
    pub failed: u64,
    #[allow(missing_docs, reason = "see the first field")]
    pub syn_retransmits: u64,
    #[allow(missing_docs, reason = "see the first field")]
    pub bare_acks: u64,
    #[allow(missing_docs, reason = "see the first field")]
    pub bare_acks_closed: u64,
    #[allow(missing_docs, reason = "see the first field")]
    pub bare_acks_open: u64,
    #[allow(missing_docs, reason = "see the first field")]
    pub bare_acks_half_open: u64,
    #[allow(missing_docs, reason = "see the first field")]
    pub bare_acks_unknown: u64,
    #[allow(missing_docs, reason = "see the first field")]
    pub duplicate_syns: u64,
    #[allow(missing_docs, reason = "see the first field")]
    pub no_listener: u64,
    #[allow(missing_docs, reason = "see the first field")]
    pub rsts_after_bare_ack: u64,
    #[allow(missing_docs, reason = "see the first field")]
    pub healed: u64,
    #[allow(missing_docs, reason = "see the first field")]
    pub unhealed: u64,
    #[allow(missing_docs, reason = "see the first field")]
    pub reuse_accepted: u64,
    #[allow(missing_docs, reason = "see the first field")]
    pub resets_received: u64,
    #[allow(missing_docs, reason = "see the first field")]
    pub resets_sent: u64,
    #[allow(missing_docs, reason = "see the first field")]
    pub data_retransmits: u64,
    /// Handshakes that took so long that a SYN or its answer must have been sent again (the first
    /// time-out is 1 s, RFC 6298 section 2.1), or nearly: the histogram of their durations has a bound
    /// at 0.524 s. It is shown as that histogram.
    #[serde(skip)]
    pub late: u64,
}

/// The state of everything, for the summary and the exporters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Overview {
    /// When.
    pub now: Moment,
    /// The busiest port spaces, busiest first, at most as many as were asked for.
    pub spaces: Vec<SpaceReport>,
    /// The totals of all others together (port spaces outside the list, and those forgotten).
    pub other: Totals,
    /// Port spaces known.
    pub known_spaces: u64,
    /// What is counted once per host, by [`Global`].
    pub globals: [u64; Global::COUNT as usize],
    /// Alerts that are pending or firing and not muted.
    pub alerts: Vec<Alert>,
    /// Alerts that are pending or firing and muted: nobody is told of them.
    pub muted: Vec<Alert>,
    /// What this host's connections take of the ports of devices in between, by a port space of each
    /// destination: whole, not only those among the busiest.
    pub egress: Vec<(PortSpaceKey, EgressUse)>,
    /// Look-alikes that are recognised now.
    pub look_alikes: Vec<Finding>,
}
