//! How many source ports there are, how many are taken, and where that leads.
//!
//! A port is *in use* while its connection is not closed and *held* while it cannot be given out again
//! although the connection is closed: on this host as long as its TIME_WAIT really blocks it, behind a
//! device for the device's hold.

use std::{net::IpAddr, time::Duration};

use serde::{Deserialize, Serialize};
use tuplewatch_common::{
    address::{Address, Point, PortSpaceKey, Role, is_v4_mapped},
    record::TIME_WAIT_AGES,
};

use super::{
    finding::Pool,
    space::{Census, Space},
    surroundings::{Around, LocalPorts},
    tables::Tables,
    threshold::Thresholds,
    time::Moment,
    trend::{Counts, Trend},
};

/// How long Linux keeps a socket in TIME_WAIT, in seconds (`TCP_TIMEWAIT_LEN`, compiled in).
pub const TIME_WAIT_SECONDS: f64 = 60.0;
/// Seconds of each age in a census.
const AGE_SECONDS: f64 = 10.0;

/// How many source ports a port space can have at once, how we know, and how many are taken.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Budget {
    /// The number.
    pub ports: u32,
    /// Where it comes from.
    pub source: BudgetSource,
    /// The range, where it was inferred.
    pub pool: Option<Pool>,
    /// Ports of connections that are not closed.
    pub in_use: u32,
    /// Ports of closed connections that cannot be given out yet.
    pub held: u32,
    /// How long a port is held after close, in seconds.
    pub hold_seconds: f64,
}

/// Where a budget comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BudgetSource {
    /// `net.ipv4.ip_local_port_range` less the reserved ports.
    #[default]
    LocalRange,
    /// The same, for sockets that were bound before connect(): all of one source address together.
    Bound,
    /// An egress group, for all connections of this host to the destination.
    Device,
    /// Inferred from the ports of completed handshakes.
    Inferred,
}

impl Budget {
    /// Ports taken: in use or held.
    #[must_use]
    pub const fn taken(&self) -> u32 {
        self.in_use.saturating_add(self.held)
    }

    /// Free ports.
    #[must_use]
    pub const fn headroom(&self) -> u32 {
        self.ports.saturating_sub(self.taken())
    }

    /// Share of the ports that is taken; more than 1 where the budget is too small a figure.
    #[must_use]
    pub fn utilization(&self) -> f64 {
        f64::from(self.taken()) / f64::from(self.ports.max(1))
    }

    /// New connections per second that the budget bears, if none lives long.
    #[must_use]
    pub fn sustainable(&self) -> f64 {
        f64::from(self.ports) / self.hold_seconds.max(1.0)
    }
}

impl LocalPorts {
    /// How long a closed connection of a port space blocks its port for the next one to the same
    /// destination, in seconds.
    ///
    /// `tcp_twsk_unique()`: with `tcp_tw_reuse` and timestamps a TIME_WAIT is taken over once it is as
    /// old as the delay; 2 allows that on loopback only. (Whether the peer has timestamps too is not
    /// known here.)
    #[must_use]
    pub fn hold_seconds(&self, key: &PortSpaceKey) -> f64 {
        let on_loopback = is_loopback(&key.initiator) || is_loopback(&key.responder);
        let reused = match self.tw_reuse {
            0 => false,
            2 => on_loopback,
            _ => true,
        };
        if reused && self.timestamps {
            (f64::from(self.tw_reuse_delay_ms) / 1000.0).min(TIME_WAIT_SECONDS)
        } else {
            TIME_WAIT_SECONDS
        }
    }
}

/// `127.0.0.0/8` or `::1`.
fn is_loopback(address: &Address) -> bool {
    let v6 = std::net::Ipv6Addr::from(*address);
    (is_v4_mapped(address) && address[12] == 127) || v6.is_loopback()
}

/// The sockets in TIME_WAIT that are not older than the hold.
#[must_use]
pub fn held(time_wait: &[u32; TIME_WAIT_AGES], hold_seconds: f64) -> u32 {
    let mut held = 0.0;
    for (age, n) in (0..).zip(time_wait) {
        let share = (hold_seconds - f64::from(age) * AGE_SECONDS) / AGE_SECONDS;
        held += f64::from(*n) * share.clamp(0.0, 1.0);
    }
    held.ceil() as u32
}

/// The local ports of the namespace that a port space of an initiator belongs to.
#[must_use]
pub fn local_ports(around: &Around, key: &PortSpaceKey) -> Option<LocalPorts> {
    let netns = if key.point == Point::Wire as u8 {
        around.latest.own_netns
    } else {
        key.netns
    };
    around.latest.local_ports.get(&netns).copied()
}

/// This host's own ports for one destination.
#[must_use]
pub fn local(around: &Around, key: &PortSpaceKey, census: &Census) -> Option<Budget> {
    let local = local_ports(around, key)?;
    let hold_seconds = local.hold_seconds(key);
    Some(Budget {
        ports: local.budget(),
        source: BudgetSource::LocalRange,
        pool: None,
        in_use: census.in_use(),
        held: held(&census.time_wait, hold_seconds),
        hold_seconds,
    })
}

/// A device's ports for one destination, as far as this host's connections take them.
#[must_use]
pub fn device(tables: &Tables, around: &Around, now: Moment, key: &PortSpaceKey) -> Option<Budget> {
    let taken = around.egress.use_of(tables, now, key)?;
    Some(Budget {
        ports: taken.budget,
        source: BudgetSource::Device,
        pool: None,
        in_use: taken.in_use,
        held: taken.held,
        hold_seconds: taken.hold_seconds,
    })
}

/// The pool that an initiator's address uses, seen at the responder: what stays in TIME_WAIT here is
/// what a new SYN on the same port meets.
#[must_use]
pub fn inferred(
    tables: &Tables,
    now: Moment,
    key: &PortSpaceKey,
    census: &Census,
) -> Option<Budget> {
    let pool = tables.pool(key, now)?;
    Some(Budget {
        ports: pool.size(),
        source: BudgetSource::Inferred,
        pool: Some(pool),
        in_use: census.in_use(),
        held: census.held(),
        hold_seconds: TIME_WAIT_SECONDS,
    })
}

/// The budget of a port space: at the initiator the tighter one of this host and of the device in
/// between.
#[must_use]
pub fn of(
    tables: &Tables,
    around: &Around,
    now: Moment,
    key: &PortSpaceKey,
    space: &Space,
) -> Option<Budget> {
    if key.role == Role::Responder as u8 {
        return inferred(tables, now, key, &space.census);
    }
    let local = local(around, key, &space.census);
    let device = device(tables, around, now, key);
    local.into_iter().chain(device).max_by(|a, b| {
        let tighter = a.utilization().total_cmp(&b.utilization());
        tighter.then(b.ports.cmp(&a.ports))
    })
}

/// Where a budget's use leads.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Outlook {
    /// Ports taken once things go on like now for one hold time.
    pub expected: u32,
    /// What that gains per second, if it rises steadily.
    pub rise_per_second: f64,
    /// Seconds until no port is left, if they will be used up.
    pub exhausted_in_seconds: Option<f64>,
}

/// Connections of one source address to one destination, and the ports that they take.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Holder {
    /// Who gets the connections.
    #[serde(rename = "server.address")]
    pub server_address: IpAddr,
    /// At which port.
    #[serde(rename = "server.port")]
    pub server_port: u16,
    /// Those not closed yet.
    pub in_use: u32,
    /// Those in TIME_WAIT.
    pub time_wait: u32,
}

/// How long connect() searches for a source port.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct SearchEvidence {
    /// Median of the last ten seconds, in seconds.
    pub median_seconds: f64,
    /// Median before searches became slow.
    pub median_before_seconds: Option<f64>,
    /// Searches in the last ten seconds.
    pub searches: u64,
}

/// What a trend says about a budget: thresholds of the forecast.
#[derive(Clone, Copy, Debug)]
pub struct Forecaster {
    /// Now.
    pub now: Moment,
    /// How far ahead to look, in seconds.
    pub horizon: f64,
    /// Share of the variance that a line must explain to be called a rise.
    pub min_fit: f64,
}

/// A rise over less than this is the noise of counting, or a single step.
const RISE_OVER: Duration = Duration::from_secs(60);
/// The rise must still go on in the latest part.
const STILL: Duration = Duration::from_secs(20);
/// A load must have lasted so long to be called the present one.
const SUSTAINED: Duration = Duration::from_secs(20);
/// Seconds to observe before anything is foretold, however short the hold is.
const LEAST_OBSERVED: f64 = 30.0;
/// A line must gain this share of the budget to mean anything.
const MIN_RISE: f64 = 0.1;

/// Where the use of a budget of a port space leads, once one hold time was observed: after a start
/// what is held rises in a straight line for so long, whatever the load is.
#[must_use]
pub fn outlook(
    tables: &Tables,
    around: &Around,
    thresholds: &Thresholds,
    now: Moment,
    (key, space): (&PortSpaceKey, &Space),
    budget: &Budget,
) -> Option<Outlook> {
    let begin = space.first_seen.max(tables.first?);
    if now.since(begin).as_secs_f64() < budget.hold_seconds.max(LEAST_OBSERVED) {
        return None;
    }
    let trend = match budget.source {
        BudgetSource::Device => around.egress.trend_of(key)?,
        _ => space.trend.as_deref()?,
    };
    let forecaster = Forecaster {
        now,
        horizon: thresholds.forecast.horizon.as_secs_f64(),
        min_fit: thresholds.forecast.min_fit,
    };
    Some(forecaster.outlook(budget, trend))
}

impl Forecaster {
    /// Ports that are taken in the end if connections come and go as they did then: those
    /// in use, and those of one hold time at the rate of the last ten seconds. (By Little's law that is
    /// rate × (lifetime + hold), with the lifetime as it shows in what is in use. Only connections whose
    /// TIME_WAIT is here count into the rate: one that the peer closes first holds nothing.)
    #[must_use]
    pub fn demand(counts: &Counts, hold_seconds: f64) -> f64 {
        f64::from(counts.in_use) + f64::from(counts.fresh) / AGE_SECONDS * hold_seconds
    }

    /// Where the use of a budget leads.
    #[must_use]
    pub fn outlook(&self, budget: &Budget, trend: &Trend) -> Outlook {
        let demand = |s: &Counts| Self::demand(s, budget.hold_seconds);
        let least = trend.least(self.now, SUSTAINED, demand);
        let latest = trend.latest();
        let slope = self.slope(budget, trend).unwrap_or(0.0);
        // A level counts once it has lasted; a rise is past its level of twenty seconds ago.
        let expected = least
            .filter(|_| slope == 0.0)
            .unwrap_or_else(|| demand(&latest));
        let sustained = least.is_some_and(|least| least >= f64::from(budget.ports));
        let exhausted_in_seconds = (sustained || slope > 0.0)
            .then(|| self.exhaustion(budget, &latest, slope))
            .flatten();
        Outlook {
            expected: expected.round() as u32,
            rise_per_second: (slope * 1000.0).round() / 1000.0,
            exhausted_in_seconds,
        }
    }

    /// What the demand gains per second, if it rises steadily.
    fn slope(&self, budget: &Budget, trend: &Trend) -> Option<f64> {
        let demand = |s: &Counts| Self::demand(s, budget.hold_seconds);
        let line = trend.line(self.now, RISE_OVER, demand)?;
        let late = trend.line(self.now, STILL, demand)?;
        let rises = line.slope > 0.0
            && line.fit >= self.min_fit
            && line.slope * line.span >= MIN_RISE * f64::from(budget.ports)
            && late.slope >= line.slope / 2.0;
        rises.then_some(line.slope)
    }

    /// Seconds until all ports are taken, second by second: what is held leaves in the order of its
    /// age, and what comes leaves one hold later.
    fn exhaustion(&self, budget: &Budget, latest: &Counts, slope: f64) -> Option<f64> {
        let (ports, hold) = (f64::from(budget.ports), budget.hold_seconds.max(1.0));
        let mut rate = f64::from(latest.fresh) / AGE_SECONDS;
        let mut in_use = f64::from(budget.in_use);
        // A rise of what is held is one of the rate, else connections stay open.
        let held_part = rate * hold;
        let (rate_gain, use_gain) = if held_part > in_use {
            (slope / hold, 0.0)
        } else {
            (0.0, slope)
        };
        // What is held now leaves evenly over one hold: by the age in the census, where there is one.
        let held = f64::from(budget.held);
        let mut came = Vec::new();
        let mut new = 0.0;
        for second in 1..=(self.horizon as usize) {
            rate += rate_gain;
            in_use += use_gain;
            came.push(rate);
            new += rate;
            if let Some(left) = second.checked_sub(1 + hold as usize) {
                new -= came[left];
            }
            let old = held * (1.0 - second as f64 / hold).max(0.0);
            if in_use + old + new >= ports {
                return Some(second as f64);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use tuplewatch_common::address::v4_mapped;

    use super::*;

    fn key(initiator: [u8; 4]) -> PortSpaceKey {
        PortSpaceKey {
            initiator: v4_mapped(initiator),
            responder: v4_mapped([203, 0, 113, 10]),
            ..PortSpaceKey::default()
        }
    }

    fn ports(tw_reuse: u8, timestamps: bool) -> LocalPorts {
        LocalPorts {
            first: 32_768,
            last: 60_999,
            reserved: 0,
            tw_reuse,
            tw_reuse_delay_ms: 1000,
            timestamps,
        }
    }

    /// The arithmetic of the incident behind this project: 14,336 ports per address over 60 s.
    #[test]
    fn ports_over_time_wait_is_the_rate_that_lasts() {
        let address = Budget {
            ports: 14_336,
            hold_seconds: TIME_WAIT_SECONDS,
            ..Budget::default()
        };
        assert_eq!(address.sustainable().round(), 239.0);
        let three = Budget {
            ports: 3 * 14_336,
            held: 42_000,
            ..address
        };
        assert_eq!(three.sustainable().round(), 717.0);
        assert_eq!((three.utilization() * 1000.0).round(), 977.0);
        assert_eq!(three.headroom(), 1008);
    }

    #[test]
    fn time_wait_holds_what_the_kernel_would_not_give_out() {
        let (near, far) = (key([127, 0, 0, 1]), key([192, 0, 2, 1]));
        assert_eq!(ports(0, true).hold_seconds(&near), 60.0);
        assert_eq!(ports(1, true).hold_seconds(&far), 1.0);
        assert_eq!(ports(1, false).hold_seconds(&far), 60.0, "no timestamps");
        assert_eq!(ports(2, true).hold_seconds(&far), 60.0, "not on loopback");
        assert_eq!(ports(2, true).hold_seconds(&near), 1.0);
        let hundred = [100, 0, 0, 0, 0, 0];
        assert_eq!(held(&hundred, 60.0), 100);
        assert_eq!(held(&hundred, 1.0), 10);
        let old = [0, 100, 100, 100, 100, 100];
        assert_eq!(held(&old, 60.0), 500);
        assert_eq!(held(&old, 1.0), 0, "all are older than the delay");
        assert_eq!(held(&old, 15.0), 50);
    }
}
