//! Every exported metric, in one table: the instruments and `docs/metrics.md` both come from it.

use tuplewatch_common::{
    address::Point,
    histogram::{BUCKETS, HANDSHAKE_UNIT_NS, REUSE_UNIT_NS, SEARCH_UNIT_NS, bounds},
};

use crate::core::{
    egress::EgressUse,
    report::{SpaceReport, Totals},
};

mod collect;
mod document;
mod exposition;
mod ledger;
mod table;

pub(crate) use collect::{Delivery, Number, View, collect, space_attributes};
pub use document::markdown;
pub(crate) use exposition::{CONTENT_TYPE, expose, prometheus_name};
pub(crate) use ledger::{Ledger, MAX_EXPORTED};
pub use table::METRICS;

/// What kind of metric it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Only goes up.
    Counter,
    /// Goes up and down, and may be summed over port spaces and hosts.
    UpDownCounter,
    /// Goes up and down, and must not be summed.
    Gauge,
    /// Counts by size.
    Histogram,
}

/// One metric.
pub struct Metric {
    /// Its name.
    pub name: &'static str,
    /// Its kind.
    pub kind: Kind,
    /// Its unit, in UCUM.
    pub unit: &'static str,
    /// What it says.
    pub description: &'static str,
    /// Where its values come from.
    pub(crate) source: Source,
}

impl Metric {
    /// Its values are not whole numbers.
    pub(crate) const fn is_real(&self) -> bool {
        matches!(self.source, Source::Real(_))
    }
}

/// Where the values of a metric come from.
pub(crate) enum Source {
    /// A counter of each port space, and of all others together.
    Total(Points, Get),
    /// Several such counters, told apart by an attribute.
    Totals(&'static str, &'static [(&'static str, Points, Get)]),
    /// What each port space has now.
    Level(fn(&SpaceReport) -> Option<u64>),
    /// The same, where it is not a whole number.
    Real(fn(&SpaceReport) -> Option<f64>),
    /// A histogram of each port space.
    Histogram(Points, Which),
    /// What this host takes of the ports of a device in between, by destination; `true` where it may
    /// be summed over destinations.
    Egress(bool, fn(&EgressUse) -> u64),
    /// Something of the whole host, with the names of its attributes.
    Host(&'static [&'static str], Host),
}

/// Gives one counter of a port space.
pub(crate) type Get = fn(&Totals) -> u64;

/// Gives each value of a metric of the whole host with the values of its attributes.
pub(crate) type Host = fn(&View, &mut dyn FnMut(u64, &[&str]));

/// At which observation point something can be seen at all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Points {
    Both,
    Socket,
    Wire,
}

impl Points {
    pub(crate) const fn has(self, point: Point) -> bool {
        match self {
            Self::Both => true,
            Self::Socket => matches!(point, Point::Socket),
            Self::Wire => matches!(point, Point::Wire),
        }
    }
}

/// The histograms of a port space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Which {
    ReuseInterval,
    HandshakeDuration,
    PortSearch,
}

impl Which {
    pub(crate) const COUNT: usize = 3;

    const fn unit_ns(self) -> u64 {
        match self {
            Self::ReuseInterval => REUSE_UNIT_NS,
            Self::HandshakeDuration => HANDSHAKE_UNIT_NS,
            Self::PortSearch => SEARCH_UNIT_NS,
        }
    }

    /// Upper bounds of all buckets in seconds, as text; the last one is `+Inf`.
    pub(crate) fn bounds(self) -> [String; BUCKETS] {
        let ns = bounds(self.unit_ns());
        std::array::from_fn(|i| match ns.get(i) {
            Some(&ns) => (ns as f64 / 1e9).to_string(),
            None => "+Inf".to_owned(),
        })
    }
}

/// The names of the attributes.
pub(crate) mod attribute {
    pub(crate) const CLIENT_ADDRESS: &str = "client.address";
    pub(crate) const SERVER_ADDRESS: &str = "server.address";
    pub(crate) const SERVER_PORT: &str = "server.port";
    pub(crate) const ROLE: &str = "tuplewatch.role";
    pub(crate) const POINT: &str = "tuplewatch.point";
    pub(crate) const NETNS: &str = "tuplewatch.netns";
    pub(crate) const AGGREGATE: &str = "tuplewatch.aggregate";
    pub(crate) const EGRESS_GROUP: &str = "tuplewatch.egress.group";
    pub(crate) const OUTCOME: &str = "tuplewatch.outcome";
    pub(crate) const FORMER: &str = "tuplewatch.former";
    pub(crate) const RECOVERY: &str = "tuplewatch.recovery";
    pub(crate) const DIRECTION: &str = "network.io.direction";
    pub(crate) const LOSS: &str = "tuplewatch.loss";
    pub(crate) const KIND: &str = "tuplewatch.kind";
    pub(crate) const SIGNATURE: &str = "tuplewatch.signature";
    pub(crate) const CAUSE: &str = "tuplewatch.cause";
    pub(crate) const SEVERITY: &str = "tuplewatch.severity";
    pub(crate) const CONFIDENCE: &str = "tuplewatch.confidence";
    pub(crate) const ALERT_ID: &str = "tuplewatch.alert.id";
    pub(crate) const ALERT_STATE: &str = "tuplewatch.alert.state";
    pub(crate) const REMEDY: &str = "tuplewatch.remedy";
    pub(crate) const RULED_OUT: &str = "tuplewatch.ruled_out";
    pub(crate) const OPENED_BY: &str = "tuplewatch.opened_by";
    pub(crate) const HOOK: &str = "tuplewatch.hook";
    pub(crate) const HOOK_STATE: &str = "tuplewatch.hook.state";
    pub(crate) const SIGNAL: &str = "tuplewatch.signal";
    pub(crate) const VERSION: &str = "tuplewatch.version";
    /// Upper bound of a bucket, named as Prometheus names it: `histogram_quantile` finds it.
    pub(crate) const LE: &str = "le";
}
