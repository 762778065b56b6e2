//! JSON lines: one object per line. `docs/json.md` describes every field; a test keeps it in step.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::Value;
use tuplewatch_common::record::Global;

use super::{HookState, Ready, Sink, WallClock};
use crate::core::{
    alert::{Alert, History},
    budget::{Budget, Outlook},
    egress::EgressUse,
    finding::{Finding, OpenedBy, RuledOut, Severity},
    report::{Change, Overview, SpaceReport, Totals},
    time::Moment,
};

mod line;
#[cfg(test)]
mod tests;

use line::{Address, evidence, rounded};

/// Version of the schema. Fields may be added to a schema; a field that is removed or changes its
/// meaning makes a new one.
pub const SCHEMA: u32 = 1;

/// Writes JSON lines.
pub struct Json<W> {
    out: W,
    clock: WallClock,
    told: [u64; Global::COUNT as usize],
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Line<'a> {
    Ready {
        version: &'a str,
        interfaces: &'a [String],
        hooks: &'a [HookState],
        unseen: Vec<Unseen<'a>>,
        memory_bytes: u64,
    },
    Alert {
        id: &'a str,
        state: &'static str,
        signature: Option<&'static str>,
        cause: &'static str,
        #[serde(flatten)]
        body: Body<'a>,
        pending_since: String,
        firing_since: Option<String>,
        resolved_at: Option<String>,
        history: Box<Past>,
        muted: Option<Muted<'a>>,
        evidence_file: Option<std::borrow::Cow<'a, str>>,
    },
    LookAlike {
        name: &'static str,
        ended: bool,
        #[serde(flatten)]
        body: Body<'a>,
    },
    Summary {
        spaces: Vec<Space<'a>>,
        other: &'a Totals,
        known_spaces: u64,
        globals: serde_json::Map<String, Value>,
        alerts: Vec<&'a str>,
        muted: Vec<&'a str>,
        egress: Vec<Egress<'a>>,
    },
    Loss {
        name: &'static str,
        meaning: &'static str,
        count: u64,
        new: u64,
    },
}

/// What alerts and look-alikes share.
#[derive(Serialize)]
struct Body<'a> {
    severity: &'static str,
    confidence: &'static str,
    #[serde(flatten)]
    address: Address,
    since: String,
    summary: &'a str,
    remedy: &'a str,
    evidence: Value,
    ruled_out: &'a [RuledOut],
    opened_by: &'a [OpenedBy],
}

/// How often an alert fired.
#[derive(Serialize)]
struct Past {
    count: u64,
    first: Option<String>,
    worst: Option<&'static str>,
    firings: Vec<Firing>,
}

#[derive(Serialize)]
struct Firing {
    since: String,
    until: Option<String>,
    severity: &'static str,
}

#[derive(Serialize)]
struct Muted<'a> {
    reason: &'a str,
    until: Option<String>,
}

/// What is taken of the ports of a device in between, for one destination.
#[derive(Serialize)]
struct Egress<'a> {
    #[serde(flatten)]
    address: Address,
    #[serde(flatten)]
    used: &'a EgressUse,
    headroom: u32,
    utilization: f64,
}

#[derive(Serialize)]
struct Unseen<'a> {
    what: &'a str,
    why: &'a str,
}

#[derive(Serialize)]
struct Space<'a> {
    #[serde(flatten)]
    address: Address,
    opens_per_second: f64,
    window_refused: u64,
    in_use: u32,
    time_wait: TimeWait,
    ports_seen: u32,
    budget: Option<Budget>,
    headroom: Option<u32>,
    utilization: Option<f64>,
    outlook: Option<Outlook>,
    totals: &'a Totals,
}

#[derive(Serialize)]
struct TimeWait {
    total: u32,
    ages: [u32; tuplewatch_common::record::TIME_WAIT_AGES],
}

/// Writes one line: `line` with the version of the schema and its time.
///
/// # Errors
/// The output cannot be written to.
pub(crate) fn write_line(
    out: &mut impl Write,
    clock: &WallClock,
    at: Moment,
    line: &impl Serialize,
) -> io::Result<()> {
    #[derive(Serialize)]
    struct Stamped<'a, T> {
        schema: u32,
        time: String,
        #[serde(flatten)]
        line: &'a T,
    }
    let stamped = Stamped {
        schema: SCHEMA,
        time: clock.rfc3339(at),
        line,
    };
    let mut bytes = serde_json::to_vec(&stamped)?;
    bytes.push(b'\n');
    out.write_all(&bytes)?;
    out.flush()
}

impl<W: Write> Json<W> {
    /// Writes to `out`, one `write` per line. `clock` gives the time of day.
    pub const fn new(out: W, clock: WallClock) -> Self {
        Self {
            out,
            clock,
            told: [0; Global::COUNT as usize],
        }
    }

    fn write(&mut self, at: Moment, line: &Line) -> io::Result<()> {
        write_line(&mut self.out, &self.clock, at, line)
    }

    fn body<'a>(&self, finding: &'a Finding) -> Body<'a> {
        Body {
            severity: finding.severity.name(),
            confidence: finding.confidence.name(),
            address: Address::from(&finding.space),
            since: self.clock.rfc3339(finding.since),
            summary: &finding.summary,
            remedy: &finding.remedy,
            evidence: evidence(&finding.evidence, &self.clock),
            ruled_out: &finding.ruled_out,
            opened_by: &finding.opened_by,
        }
    }

    fn alert(&mut self, alert: &Alert) -> io::Result<()> {
        let verdict = alert.finding.verdict;
        let line = Line::Alert {
            id: &alert.id,
            state: alert.state.name(),
            signature: verdict.signature(),
            cause: verdict.name(),
            body: self.body(&alert.finding),
            pending_since: self.clock.rfc3339(alert.pending_since),
            firing_since: alert.firing_since.map(|at| self.clock.rfc3339(at)),
            resolved_at: alert.resolved_at.map(|at| self.clock.rfc3339(at)),
            history: Box::new(self.past(&alert.history)),
            muted: alert.muted.as_ref().map(|muted| Muted {
                reason: &muted.reason,
                until: muted.until.map(|at| self.clock.rfc3339(at)),
            }),
            evidence_file: alert.evidence_file.as_ref().map(|p| p.to_string_lossy()),
        };
        self.write(alert.at, &line)
    }

    fn past(&self, history: &History) -> Past {
        let firings = history.firings.iter().map(|firing| Firing {
            since: self.clock.rfc3339(firing.since),
            until: firing.until.map(|at| self.clock.rfc3339(at)),
            severity: firing.severity.name(),
        });
        Past {
            count: history.count,
            first: history.first.map(|at| self.clock.rfc3339(at)),
            worst: history.worst.map(Severity::name),
            firings: firings.collect(),
        }
    }

    fn losses(&mut self, overview: &Overview) -> io::Result<()> {
        for (index, (name, meaning)) in Global::NAMES.into_iter().enumerate() {
            let count = overview.globals[index];
            let new = count.saturating_sub(self.told[index]);
            if Global::is_loss(index) && new > 0 {
                self.told[index] = count;
                self.write(
                    overview.now,
                    &Line::Loss {
                        name,
                        meaning,
                        count,
                        new,
                    },
                )?;
            }
        }
        Ok(())
    }
}

impl<W: Write> Sink for Json<W> {
    fn ready(&mut self, now: Moment, ready: &Ready) -> io::Result<()> {
        let unseen = ready
            .unseen
            .iter()
            .map(|(what, why)| Unseen { what, why })
            .collect();
        let line = Line::Ready {
            version: ready.version,
            interfaces: &ready.interfaces,
            hooks: &ready.hooks,
            unseen,
            memory_bytes: ready.memory_bytes,
        };
        self.write(now, &line)
    }

    fn changes(&mut self, now: Moment, changes: &[Change]) -> io::Result<()> {
        for change in changes {
            match change {
                Change::Alert(alert) => self.alert(alert)?,
                Change::LookAlike { finding, ended } => {
                    let name = finding.verdict.name();
                    let line = Line::LookAlike {
                        name,
                        ended: *ended,
                        body: self.body(finding),
                    };
                    self.write(now, &line)?;
                }
            }
        }
        Ok(())
    }

    fn overview(&mut self, overview: &Overview) -> io::Result<()> {
        self.losses(overview)?;
        let globals = Global::NAMES
            .iter()
            .zip(overview.globals)
            .map(|((name, _), count)| ((*name).to_owned(), Value::from(count)))
            .collect();
        let line = Line::Summary {
            spaces: overview.spaces.iter().map(Space::from).collect(),
            other: &overview.other,
            known_spaces: overview.known_spaces,
            globals,
            alerts: ids(&overview.alerts),
            muted: ids(&overview.muted),
            egress: overview
                .egress
                .iter()
                .map(|(key, used)| Egress {
                    address: Address::from(key),
                    used,
                    headroom: used.headroom(),
                    utilization: rounded(used.utilization()),
                })
                .collect(),
        };
        self.write(overview.now, &line)
    }

    fn close(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

fn ids(alerts: &[Alert]) -> Vec<&str> {
    alerts.iter().map(|alert| alert.id.as_str()).collect()
}

impl<'a> From<&'a SpaceReport> for Space<'a> {
    fn from(space: &'a SpaceReport) -> Self {
        Self {
            address: Address::from(&space.key),
            opens_per_second: rounded(space.opens_per_second),
            window_refused: space.window_refused,
            in_use: space.in_use,
            time_wait: TimeWait {
                total: space.held(),
                ages: space.time_wait,
            },
            ports_seen: space.ports_seen,
            budget: space.budget,
            headroom: space.headroom(),
            utilization: space.utilization().map(rounded),
            outlook: space.outlook,
            totals: &space.totals,
        }
    }
}
