//! Who holds the source ports: by process, destination and state.

use tuplewatch_common::{
    address::{PortSpaceKey, Role},
    record::CensusRow,
};

use super::{Context, View, words};
use crate::core::{budget::Holder, finding::OpenedBy, observation::ip, openers::OpenerRate};

/// Destinations shown in a finding.
const SHOWN: usize = 5;

/// The processes behind a finding.
pub struct Processes {
    /// Busiest first.
    pub opened_by: Vec<OpenedBy>,
}

impl Processes {
    /// Those that open connections in a port space.
    pub fn of_space(context: &Context<'_>, view: &View<'_>) -> Self {
        Self {
            opened_by: view.opened_by(context),
        }
    }

    /// Those whose connections come from one source address.
    pub fn of_source(context: &Context<'_>, source: &PortSpaceKey) -> Self {
        let window = context.thresholds.window;
        let rates = context
            .tables
            .openers_of_source(source, context.now, window);
        let begin = context.tables.first.unwrap_or(context.now);
        let observed = context.now.since(begin).min(window).as_secs_f64().max(1.0);
        Self {
            opened_by: merge(rates, observed),
        }
    }

    /// ` (curl[4711] 12 times, wget[4712] once)`.
    pub fn failing_words(&self) -> String {
        let mut failing: Vec<&OpenedBy> = self
            .opened_by
            .iter()
            .filter(|o| o.no_local_port > 0)
            .collect();
        failing.sort_by_key(|o| std::cmp::Reverse(o.no_local_port));
        let words: Vec<String> = failing
            .iter()
            .take(3)
            .map(|o| format!("{}[{}] {} times", o.command, o.pid, o.no_local_port))
            .collect();
        if words.is_empty() {
            String::new()
        } else {
            format!(" ({})", words.join(", "))
        }
    }

    /// `curl[4711] opens 312 connections/s of 80 ms each: reuse connections`.
    pub fn reuse_words(&self) -> String {
        let Some(o) = self.opened_by.first() else {
            return "reuse connections (keep-alive, a connection pool)".to_owned();
        };
        let lifetime = o
            .lifetime_seconds
            .map_or_else(String::new, |s| format!(" of {} each", words::seconds(s)));
        format!(
            "{}[{}] opens {:.1} connections/s{lifetime}: reuse connections (keep-alive, a connection \
             pool)",
            o.command, o.pid, o.opens_per_second
        )
    }
}

/// One entry for each process, whatever it is connected to.
fn merge(rates: Vec<OpenerRate>, observed: f64) -> Vec<OpenedBy> {
    let mut merged: Vec<(OpenedBy, u64, u64)> = Vec::new();
    for rate in rates {
        let per_second = rate.opens as f64 / observed;
        if let Some((by, closed, lifetime)) =
            merged.iter_mut().find(|(by, ..)| by.pid == rate.key.pid)
        {
            by.opens_per_second += per_second;
            by.opens += rate.total.opens;
            by.no_local_port += rate.no_local_port;
            *closed += rate.total.closed;
            *lifetime += rate.total.lifetime_ms;
        } else {
            let by = OpenedBy {
                pid: rate.key.pid,
                command: words::command(&rate.total.command),
                cgroup_id: rate.total.cgroup,
                cgroup: None,
                opens_per_second: per_second,
                opens: rate.total.opens,
                lifetime_seconds: None,
                no_local_port: rate.no_local_port,
            };
            merged.push((by, rate.total.closed, rate.total.lifetime_ms));
        }
    }
    let mut merged: Vec<OpenedBy> = merged
        .into_iter()
        .map(|(by, closed, lifetime)| OpenedBy {
            lifetime_seconds: (closed > 0).then(|| lifetime as f64 / 1000.0 / closed as f64),
            ..by
        })
        .collect();
    merged.sort_by(|a, b| b.opens_per_second.total_cmp(&a.opens_per_second));
    merged.truncate(SHOWN);
    merged
}

/// Of the sockets of a row whose port was taken by bind(): those in use and those in TIME_WAIT. A row
/// has their sum; where it has other sockets too, they are taken to be spread alike.
pub fn bound(row: &CensusRow) -> (u32, u32) {
    let in_use = row.opening + row.established + row.closing;
    let held: u32 = row.time_wait.iter().sum();
    let all = u64::from(in_use) + u64::from(held);
    let open = (u64::from(row.bound) * u64::from(in_use)).div_ceil(all.max(1));
    let open = u32::try_from(open).unwrap_or(u32::MAX).min(row.bound);
    (open, row.bound - open)
}

/// The destinations that take most ports of bound sockets.
pub fn of_rows(rows: &[(PortSpaceKey, CensusRow)]) -> Vec<Holder> {
    let holders = rows.iter().map(|(key, row)| {
        let (in_use, time_wait) = bound(row);
        holder(key, in_use, time_wait)
    });
    most(holders.collect())
}

/// The destinations to which a source address has most ports taken.
pub fn of_source(context: &Context<'_>, key: &PortSpaceKey) -> Vec<Holder> {
    let first = PortSpaceKey {
        responder: [0; 16],
        responder_port: 0,
        role: 0,
        point: 0,
        netns: 0,
        ..*key
    };
    let spaces = context.tables.spaces.range(first..);
    let holders = spaces
        .take_while(|(other, _)| other.initiator == key.initiator)
        .filter(|(other, space)| {
            let same = other.point == key.point && other.netns == key.netns;
            same && other.role == Role::Initiator as u8
                && space.census.in_use() + space.census.held() > 0
        })
        .map(|(other, space)| holder(other, space.census.in_use(), space.census.held()));
    most(holders.collect())
}

fn holder(key: &PortSpaceKey, in_use: u32, time_wait: u32) -> Holder {
    Holder {
        server_address: ip(&key.responder),
        server_port: key.responder_port,
        in_use,
        time_wait,
    }
}

fn most(mut holders: Vec<Holder>) -> Vec<Holder> {
    holders.sort_by_key(|h| {
        let taken = h.in_use.saturating_add(h.time_wait);
        (std::cmp::Reverse(taken), h.server_address, h.server_port)
    });
    holders.truncate(SHOWN);
    holders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bound_sockets_are_split_by_state() {
        let mut row = CensusRow {
            established: 30,
            bound: 50,
            ..CensusRow::default()
        };
        row.time_wait[2] = 20;
        assert_eq!(bound(&row), (30, 20));
        row.time_wait[2] = 70;
        assert_eq!(bound(&row), (15, 35));
        assert_eq!(bound(&CensusRow::default()), (0, 0));
    }
}
