//! Cause `local_ephemeral`: this host has no source port left for a destination, or nearly none.

use tuplewatch_common::{
    address::{Point, PortSpaceKey, Role},
    record::CensusRow,
};

use super::{
    Context, View,
    forecast::outlook,
    holders::{self, Processes},
    words::{self, count, place, seconds},
};
use crate::core::{
    budget::{self, Budget, BudgetSource, Outlook, SearchEvidence},
    episode::Symptom,
    finding::{Confidence, Evidence, Finding, RuledOut, Severity, Verdict},
    observation::ip,
    space::Space,
    threshold::LocalEphemeral,
    time::Moment,
};

/// What was seen of one port space, or of one source address of bound sockets.
struct Signs {
    /// connect() in the window that found no port.
    failures: u64,
    budget: Option<Budget>,
    outlook: Option<Outlook>,
    searches: Option<SearchEvidence>,
}

impl Signs {
    /// How bad it is; `None` if all is well.
    fn severity(&self, rules: &LocalEphemeral) -> Option<Severity> {
        let taken = self.budget.map_or(0.0, |b| b.utilization());
        if self.failures > 0 || taken >= rules.critical_utilization {
            Some(Severity::Critical)
        } else if taken >= rules.warn_utilization || self.is_slow(rules) {
            Some(Severity::Warning)
        } else {
            None
        }
    }

    fn is_slow(&self, rules: &LocalEphemeral) -> bool {
        self.searches.is_some_and(|s| {
            let usual = s.median_before_seconds.unwrap_or(0.0) * rules.slow_search_factor;
            s.median_seconds > usual.max(rules.slow_search.as_secs_f64())
        })
    }
}

/// connect() finds no port, or nearly none is left, or the search for one has become slow: of each
/// port space that this host's sockets open, and of each source address that sockets are bound to.
#[must_use]
pub fn local_ephemeral(context: &Context<'_>) -> Vec<Finding> {
    let spaces = context
        .tables
        .active(context.now, context.thresholds.window)
        .filter(|(key, _)| is_of_sockets(key))
        .filter_map(|(key, space)| {
            let context = &context.at(key);
            let signs = signs(context, key, space);
            let severity = signs.severity(&context.thresholds.local)?;
            Some(of_space(context, key, space, signs, severity))
        });
    let sources = context.tables.bound().filter_map(|(source, rows)| {
        let context = &context.at(source);
        let signs = signs_of_bound(context, source, rows)?;
        let severity = signs.severity(&context.thresholds.local)?;
        Some(of_source(context, source, rows, signs, severity))
    });
    spaces.chain(sources).collect()
}

/// The present finding while the trouble has not gone far enough to call it over.
#[must_use]
pub fn refresh(context: &Context<'_>, key: &PortSpaceKey) -> Option<(Finding, bool)> {
    let rules = &context.thresholds.local;
    let clear = |signs: &Signs| {
        let taken = signs.budget.map_or(0.0, |b| b.utilization());
        taken < rules.clear_utilization && !signs.is_slow(rules)
    };
    if let Some((_, rows)) = context.tables.bound().find(|(source, _)| *source == key) {
        let signs = signs_of_bound(context, key, rows)?;
        let alive = !clear(&signs);
        let finding = of_source(context, key, rows, signs, Severity::Warning);
        return alive.then_some((finding, alive));
    }
    let space = context.tables.spaces.get(key)?;
    let signs = signs(context, key, space);
    let goes_on = View::of(context, key, space).goes_on(context, Symptom::NoLocalPort);
    let alive = goes_on || !clear(&signs);
    alive.then(|| {
        let finding = of_space(context, key, space, signs, Severity::Warning);
        (finding, alive)
    })
}

/// The sockets tell everything that this cause is about.
const fn is_of_sockets(key: &PortSpaceKey) -> bool {
    key.role == Role::Initiator as u8 && key.point == Point::Socket as u8
}

fn signs(context: &Context<'_>, key: &PortSpaceKey, space: &Space) -> Signs {
    let window = context.thresholds.window;
    let failures = if space.episode.is_some() {
        space.window(context.now, window).no_local_port
    } else {
        0
    };
    let budget = budget::local(context.around, key, &space.census);
    let searches = space.searches.as_ref().and_then(|searches| {
        let (median, n) = searches.recent(context.now)?;
        let in_seconds = |ns: u64| ns as f64 / 1e9;
        Some(SearchEvidence {
            median_seconds: in_seconds(median),
            median_before_seconds: searches.baseline_ns.map(in_seconds),
            searches: n,
        })
    });
    Signs {
        failures,
        budget,
        outlook: budget.and_then(|b| outlook(context, key, space, &b)),
        searches,
    }
}

/// Sockets that were bound to a port before connect() draw on one pool per source address: bind() looks
/// for a port that no other socket of the address has, whatever it is connected to
/// (`inet_csk_get_port`), and TIME_WAIT counts there whatever `tcp_tw_reuse` says.
fn signs_of_bound(
    context: &Context<'_>,
    source: &PortSpaceKey,
    rows: &[(PortSpaceKey, CensusRow)],
) -> Option<Signs> {
    let local = budget::local_ports(context.around, source)?;
    let (mut in_use, mut held) = (0, 0);
    for (_, row) in rows {
        let (open, closed) = holders::bound(row);
        in_use += open;
        held += closed;
    }
    Some(Signs {
        failures: 0,
        budget: Some(Budget {
            ports: local.budget(),
            source: BudgetSource::Bound,
            pool: None,
            in_use,
            held,
            hold_seconds: budget::TIME_WAIT_SECONDS,
        }),
        outlook: None,
        searches: None,
    })
}

fn of_space(
    context: &Context<'_>,
    key: &PortSpaceKey,
    space: &Space,
    signs: Signs,
    severity: Severity,
) -> Finding {
    let view = View::of(context, key, space);
    let processes = Processes::of_space(context, &view);
    let failed = view.whole(Symptom::NoLocalPort).no_local_port;
    let what = match (signs.failures, signs.budget) {
        (1.., _) => format!(
            "{} found no source port{}",
            count(failed, "connect()"),
            processes.failing_words()
        ),
        (0, Some(b)) if b.utilization() >= context.thresholds.local.warn_utilization => {
            "source ports run out".to_owned()
        }
        _ => "the search for a source port is slow".to_owned(),
    };
    let summary = format!(
        "{}: {what}{}{}",
        place(key),
        words_of(signs.budget),
        search_words(signs.searches)
    );
    let evidence = Evidence {
        no_local_port: signs.failures,
        holders: holders::of_source(context, key),
        ..view.evidence(context, Symptom::NoLocalPort)
    };
    let since = if failed > 0 {
        view.since(context, Symptom::NoLocalPort)
    } else {
        context.now
    };
    let remedy = remedy(signs.budget, &processes, "this destination");
    finding(
        key, since, severity, summary, remedy, evidence, signs, processes,
    )
}

fn of_source(
    context: &Context<'_>,
    source: &PortSpaceKey,
    rows: &[(PortSpaceKey, CensusRow)],
    signs: Signs,
    severity: Severity,
) -> Finding {
    let processes = Processes::of_source(context, source);
    let summary = format!(
        "{}: sockets that are bound before connect() run out of source ports{}",
        ip(&source.initiator),
        words_of(signs.budget),
    );
    let evidence = Evidence {
        in_use: signs.budget.map_or(0, |b| b.in_use),
        time_wait: signs.budget.map_or(0, |b| b.held),
        window_seconds: context.thresholds.window.as_secs_f64(),
        holders: holders::of_rows(rows),
        ..Evidence::default()
    };
    let remedy = format!(
        "set IP_BIND_ADDRESS_NO_PORT before bind(), and the kernel chooses the port at connect(), anew \
         for each destination; {}",
        remedy(signs.budget, &processes, "all of them together")
    );
    finding(
        source,
        context.now,
        severity,
        summary,
        remedy,
        evidence,
        signs,
        processes,
    )
}

#[expect(clippy::too_many_arguments, reason = "the fields of a finding")]
fn finding(
    key: &PortSpaceKey,
    since: Moment,
    severity: Severity,
    summary: String,
    remedy: String,
    evidence: Evidence,
    signs: Signs,
    processes: Processes,
) -> Finding {
    // A failed connect() is a fact, and so is a count; the time of a search may have other reasons.
    let proven = signs.failures > 0 || signs.searches.is_none() || signs.budget.is_some();
    Finding {
        verdict: Verdict::LocalEphemeral,
        space: *key,
        since,
        severity,
        confidence: if proven {
            Confidence::High
        } else {
            Confidence::Medium
        },
        ruled_out: ruled_out(&signs, &evidence),
        evidence: Evidence {
            budget: signs.budget,
            outlook: signs.outlook,
            searches: signs.searches,
            ..evidence
        },
        opened_by: processes.opened_by,
        summary,
        remedy,
    }
}

/// `; 28,000 of 28,232 are taken (200 in use, 27,800 in TIME_WAIT)`.
fn words_of(budget: Option<Budget>) -> String {
    budget.map_or_else(String::new, |b| {
        format!(
            "; {} of {} are taken ({} in use, {} in TIME_WAIT)",
            b.taken(),
            b.ports,
            b.in_use,
            b.held
        )
    })
}

fn search_words(searches: Option<SearchEvidence>) -> String {
    searches.map_or_else(String::new, |s| {
        let before = s.median_before_seconds.map_or_else(String::new, |before| {
            format!(" ({} before)", words::short(before))
        });
        format!(
            "; connect() searches {} for one{before}: at half of the ports it begins to walk through \
             all of one parity",
            words::short(s.median_seconds)
        )
    })
}

fn remedy(budget: Option<Budget>, processes: &Processes, whose: &str) -> String {
    let mut steps = vec![processes.reuse_words()];
    if let Some(b) = budget {
        let lasting = b.sustainable();
        steps.push(if b.held > b.in_use {
            format!(
                "{} ports held for {} after close bear {lasting:.1} new connections/s to {whose}; let the \
                 other side close first, or set net.ipv4.tcp_tw_reuse=1 (with timestamps)",
                b.ports,
                seconds(b.hold_seconds)
            )
        } else {
            format!(
                "close connections that are not needed: {} are open at once",
                b.in_use
            )
        });
    }
    steps.push(
        "a wider net.ipv4.ip_local_port_range, fewer reserved ports, or more source or destination \
         addresses give more; tcp_fin_timeout does not shorten TIME_WAIT"
            .to_owned(),
    );
    steps.join("; ")
}

fn ruled_out(signs: &Signs, evidence: &Evidence) -> Vec<RuledOut> {
    let mut considered = vec![
        RuledOut {
            name: Verdict::ServerDown.name(),
            why: if signs.failures > 0 {
                format!(
                    "{} connect() ended before a SYN was sent; {} opens were refused by RST",
                    signs.failures, evidence.refused_by_rst
                )
            } else {
                "it is about ports taken on this host, not about answers".to_owned()
            },
        },
        RuledOut {
            name: Verdict::UnknownConnectLoss.name(),
            why: format!("{} opens got no answer", evidence.unanswered),
        },
    ];
    if let Some(b) = signs.budget {
        considered.push(RuledOut {
            name: "reusable_time_wait",
            why: format!(
                "TIME_WAIT counts only as long as it blocks its port: {} here",
                seconds(b.hold_seconds)
            ),
        });
    }
    considered
}

#[cfg(test)]
mod tests;
