//! Signature `stuck_keepalive`, cause `pinned_5xx`: a kept-alive connection gets failures from an endpoint
//! that is dead, while other connections to the same service are answered well. And what resembles it:
//! a service that fails as a whole, and requests that fail wherever they go.

#[cfg(test)]
mod tests;

use std::time::Duration;

use tuplewatch_common::{address::PortSpaceKey, conversation::FAILED_KINDS_DIFFER};

use super::{
    Context,
    fare::{Fare, Others, Run},
    words::{count, opener},
};
use crate::core::{
    ends::Ends,
    finding::{Confidence, Evidence, Finding, OpenedBy, RuledOut, Severity, Verdict},
    observation::{Talk, place},
    service::Service,
    stuck::{Became, StuckConnection, StuckEvidence, UNSEEN},
    time::Moment,
};

/// Connections shown in a finding.
const SHOWN: usize = 16;
/// Processes shown.
const PROCESSES: usize = 5;

/// Judges each service whose requests fail.
pub fn stuck_keepalive(context: &Context<'_>) -> Vec<Finding> {
    let (now, window) = (context.now, context.thresholds.window);
    let failing = context.tables.services.failing(now, window);
    failing
        .filter_map(|(key, service)| Judged::of(&context.at(key), key, service, window).finding())
        .collect()
}

/// The present finding of an alert that fires, and whether connections failed lately.
pub fn refresh(context: &Context<'_>, key: &PortSpaceKey) -> Option<(Finding, bool)> {
    let service = context.tables.services.get(key)?;
    let resolve = context.thresholds.alert.resolve;
    // Those of before too: the end of the alert still tells what it was about.
    let within = context.thresholds.window.max(resolve) + resolve;
    let judged = Judged::of(context, key, service, within);
    let lately = |run: &Run<'_>| context.now.since(run.until) < resolve;
    let goes_on = judged.stuck.iter().any(lately);
    Some((judged.pinned(), goes_on))
}

/// A service, judged.
struct Judged<'a> {
    context: &'a Context<'a>,
    key: &'a PortSpaceKey,
    service: &'a Service,
    /// Runs of failures, the longest first, but for those that any connection would have had.
    stuck: Vec<Run<'a>>,
    /// The run that tells most, what the others did meanwhile, and what that means.
    told: Option<(Run<'a>, Others, Fare)>,
}

impl<'a> Judged<'a> {
    /// Looks at the runs of failures whose latest was less than `within` ago.
    fn of(
        context: &'a Context<'a>,
        key: &'a PortSpaceKey,
        service: &'a Service,
        within: Duration,
    ) -> Self {
        let thresholds = context.thresholds;
        let runs = Run::all(service, context.now, within, thresholds);
        let mut judged = Self {
            context,
            key,
            service,
            stuck: Vec::new(),
            told: None,
        };
        for run in runs {
            let others = Others::beside(&run, service);
            let fare = Fare::of(&run, &others, thresholds);
            if fare != Fare::Endpoint {
                judged.stuck.push(run);
            }
            // Of one that was closed or recovered nothing new can be said.
            let matters = run.goes_on() || judged.told.is_none();
            let rank = |fare| match fare {
                Fare::Pinned => 3,
                Fare::ServiceDown => 2,
                Fare::Endpoint => 1,
                Fare::Open => 0,
            };
            let tells_more = judged
                .told
                .is_none_or(|(_, _, told)| rank(fare) > rank(told));
            if matters && tells_more {
                judged.told = Some((run, others, fare));
            }
        }
        judged
    }

    /// What is to be said of it, if anything.
    fn finding(&self) -> Option<Finding> {
        match self.told {
            Some((run, _, Fare::Pinned)) if run.goes_on() => Some(self.pinned()),
            Some((run, others, Fare::ServiceDown)) if run.goes_on() => {
                Some(self.service_down(&run, &others))
            }
            Some((run, others, Fare::Endpoint)) if run.goes_on() => {
                Some(self.endpoint_error(&run, &others))
            }
            Some((.., Fare::Open)) => None,
            _ => self.scattered(),
        }
    }

    fn pinned(&self) -> Finding {
        let context = self.context;
        let (others, page) = self
            .told
            .map_or((Others::default(), None), |(run, others, _)| {
                (others, run.talk.page.map(|balancer| balancer.name))
            });
        let evidence = self.evidence(&others, page, &self.stuck);
        let newer = if others.better_newer > 0 {
            "newer "
        } else {
            ""
        };
        let better = if others.better_newer > 0 {
            others.better_newer
        } else {
            others.better
        };
        let whose = page.map_or_else(String::new, |name| {
            format!(
                "; the error page is the {name}'s own: no server behind it has seen these requests"
            )
        });
        let of_them = if evidence.stuck == 1 {
            "1 kept-alive connection is".to_owned()
        } else {
            format!("{} kept-alive connections are", evidence.stuck)
        };
        let summary = format!(
            "{}: {of_them} pinned to an endpoint that answers {} ({} in a row on one of them) while {} \
             answered well{whose}",
            self.place(),
            evidence.status,
            evidence.longest,
            were(better, newer),
        );
        let since = self.stuck.iter().map(|run| run.since).min();
        Finding {
            verdict: Verdict::Pinned5xx,
            space: *self.key,
            since: since.unwrap_or(context.now),
            severity: Severity::Critical,
            confidence: if others.better_newer > 0 && others.same_kind {
                Confidence::High
            } else {
                Confidence::Medium
            },
            ruled_out: self.ruled_out(&others, page),
            opened_by: self.opened_by(),
            remedy: remedy(&evidence),
            evidence: with(context, evidence),
            summary,
        }
    }

    fn ruled_out(&self, others: &Others, page: Option<&str>) -> Vec<RuledOut> {
        let mut why = if others.same_kind {
            "requests of the same method and path were served on other connections".to_owned()
        } else if let Some(name) = page {
            format!("the {name} says this whatever is asked")
        } else {
            "other connections were answered well".to_owned()
        };
        if others.streak > 0 {
            why.push_str(&format!(
                "; of the newest connections {} in a row did well",
                others.streak
            ));
        }
        vec![
            RuledOut {
                name: Verdict::ServiceDown.name(),
                why: format!(
                    "{} answered well meanwhile, {} not",
                    were(others.better, ""),
                    others.worse
                ),
            },
            RuledOut {
                name: Verdict::EndpointError.name(),
                why,
            },
        ]
    }

    fn service_down(&self, run: &Run<'_>, others: &Others) -> Finding {
        let c = &run.talk.conversation;
        let summary = format!(
            "{}: answers {} on every connection, {} in a row on one; {} failed too and none was answered \
             well: the service fails as a whole",
            self.place(),
            c.status,
            c.run,
            count(others.worse.into(), "other connection"),
        );
        self.look_alike(
            Verdict::ServiceDown,
            run,
            others,
            summary,
            "No connection is pinned: look at the service itself, or at what stands behind it.",
        )
    }

    fn endpoint_error(&self, run: &Run<'_>, others: &Others) -> Finding {
        let c = &run.talk.conversation;
        let why = if others.same_kind {
            "new connections fail as well: a part of the requests fails on whatever connection"
        } else {
            "no request of that method and path was served on any connection"
        };
        let summary = format!(
            "{}: {} in a row on one connection were answered {}, while {} answered well; {why}",
            self.place(),
            count(c.run.into(), "request"),
            c.status,
            were(others.better, ""),
        );
        self.look_alike(Verdict::EndpointError, run, others, summary, ENDPOINT)
    }

    /// Failures that are not in a row: one kind of request fails while others on the same connection are
    /// served.
    fn scattered(&self) -> Option<Finding> {
        let (now, thresholds) = (self.context.now, self.context.thresholds);
        let is_one_kind = |talk: &&Talk| {
            let c = &talk.conversation;
            let lately = |ns| ns != 0 && now.since(Moment(ns)) < thresholds.window;
            c.failures >= thresholds.pinned.min_failures
                && c.run < thresholds.pinned.min_failures
                && c.flags & FAILED_KINDS_DIFFER == 0
                && c.failed_kind != 0
                && c.success_kind != c.failed_kind
                && lately(c.failed_ns)
                && lately(c.success_ns)
                && !talk.closed
        };
        let served = |kind| {
            let at = self.service.served(kind);
            at.is_some_and(|at| now.since(at) < thresholds.window)
        };
        let talk = self
            .service
            .connections()
            .filter(is_one_kind)
            .filter(|talk| !served(talk.conversation.failed_kind))
            .max_by_key(|talk| (talk.conversation.failures, talk.conversation.tuple))?;
        let c = &talk.conversation;
        let run = Run {
            talk,
            since: Moment(c.run_since_ns),
            until: Moment(c.failed_ns),
        };
        let summary = format!(
            "{}: {} of one method and path failed on one connection, between others that were served on \
             it",
            self.place(),
            count(c.failures.into(), "request"),
        );
        let others = Others::beside(&run, self.service);
        Some(self.look_alike(Verdict::EndpointError, &run, &others, summary, ENDPOINT))
    }

    fn look_alike(
        &self,
        verdict: Verdict,
        run: &Run<'_>,
        others: &Others,
        summary: String,
        remedy: &str,
    ) -> Finding {
        let page = run.talk.page.map(|balancer| balancer.name);
        let evidence = self.evidence(others, page, std::slice::from_ref(run));
        Finding {
            verdict,
            space: *self.key,
            since: run.since,
            severity: Severity::Info,
            confidence: Confidence::High,
            evidence: with(self.context, evidence),
            ruled_out: Vec::new(),
            opened_by: self.opened_by(),
            summary,
            remedy: remedy.to_owned(),
        }
    }

    fn evidence(&self, others: &Others, page: Option<&str>, runs: &[Run<'_>]) -> StuckEvidence {
        let now = self.context.now;
        let latest = runs.iter().max_by_key(|run| run.until);
        let better_for = others.better_since.map(|at| now.since(at).as_secs_f64());
        StuckEvidence {
            stuck: u32::try_from(runs.len()).unwrap_or(u32::MAX),
            failures: runs
                .iter()
                .map(|run| u64::from(run.talk.conversation.run))
                .sum(),
            longest: runs
                .iter()
                .map(|r| r.talk.conversation.run)
                .max()
                .unwrap_or(0),
            status: latest.map_or(0, |run| run.talk.conversation.status),
            page: page.map(str::to_owned),
            better: others.better,
            better_newer: others.better_newer,
            better_for_seconds: better_for,
            worse: others.worse,
            worse_newer: others.worse_newer,
            same_kind_served: others.same_kind,
            connections: runs
                .iter()
                .take(SHOWN)
                .map(|run| connection(run, now))
                .collect(),
            unseen: UNSEEN.to_owned(),
        }
    }

    /// The processes that open connections to this service, busiest first.
    fn opened_by(&self) -> Vec<OpenedBy> {
        let context = self.context;
        let window = context.thresholds.window;
        let mut sources: Vec<_> = self
            .service
            .connections()
            .map(|talk| talk.conversation.tuple.initiator)
            .collect();
        sources.sort_unstable();
        sources.dedup();
        let mut rates: Vec<_> = sources
            .into_iter()
            .take(SHOWN)
            .flat_map(|initiator| {
                let of = PortSpaceKey {
                    initiator,
                    ..*self.key
                };
                context.tables.openers(&of, context.now, window)
            })
            .collect();
        rates.sort_by_key(|rate| (std::cmp::Reverse(rate.opens), rate.key));
        rates
            .into_iter()
            .take(PROCESSES)
            .map(|rate| opener(&rate, window.as_secs_f64().max(1.0)))
            .collect()
    }

    fn place(&self) -> String {
        place(self.key)
    }
}

const ENDPOINT: &str = "No connection is pinned: look at what answers these requests (a broken route, a health \
                        check, one tenant).";

/// `3 newer connections were`, `1 other connection was`.
fn were(n: u32, newer: &str) -> String {
    let kind = if newer.is_empty() { "other " } else { newer };
    let verb = if n == 1 { "was" } else { "were" };
    format!("{} {verb}", count(n.into(), &format!("{kind}connection")))
}

fn with(context: &Context<'_>, stuck: StuckEvidence) -> Evidence {
    Evidence {
        window_seconds: context.thresholds.window.as_secs_f64(),
        stuck: Some(stuck),
        ..Evidence::default()
    }
}

fn connection(run: &Run<'_>, now: Moment) -> StuckConnection {
    let c = &run.talk.conversation;
    let opened = (c.opened_ns != 0).then_some(Moment(c.opened_ns));
    StuckConnection {
        ends: Ends::of(&c.tuple),
        age_seconds: opened.map(|at| now.since(at).as_secs_f64()),
        requests: c.requests,
        failures: c.failures,
        in_a_row: c.run,
        failing_seconds: run.until.since(run.since).as_secs_f64(),
        status: c.status,
        became: if run.talk.closed {
            Became::Closed
        } else if c.is_failing() {
            Became::Failing
        } else {
            Became::Recovered
        },
        close: None,
    }
    .with_command()
}

fn remedy(evidence: &StuckEvidence) -> String {
    let mut text = String::new();
    let commands: Vec<&str> = evidence
        .connections
        .iter()
        .filter_map(|connection| connection.close.as_deref())
        .take(2)
        .collect();
    if !commands.is_empty() {
        text.push_str(&format!(
            "Close these sockets, in the network namespace of their process, so that the next request opens \
             a new connection: {}{}. ",
            commands.join("; "),
            if (evidence.stuck as usize) > commands.len() {
                "; the others likewise"
            } else {
                ""
            }
        ));
    }
    text.push_str(
        "So that it cannot last: give the client a maximum connection age and let it leave a connection \
         after several 5xx; take the dead endpoint out of the load balancer or accelerator, where a weight \
         of 0 does not.",
    );
    text
}
