//! Cause `forecast`: at this rate the source ports will not last.

use tuplewatch_common::address::{Point, PortSpaceKey, Role};

use super::{
    Context, View,
    holders::{self, Processes},
    words::{place, seconds},
};
use crate::core::{
    budget::{self, Budget, BudgetSource, Outlook},
    episode::Symptom,
    finding::{Confidence, Evidence, Finding, RuledOut, Severity, Verdict},
    observation::ip,
    space::Space,
};

/// Reused four-tuples that were accepted, none refused: the initiator's numbers go up, as those of one
/// Linux host do, and TIME_WAIT holds nothing.
const ACCEPTED: u64 = 5;

/// A budget that the present use will exceed within the horizon, the one that ends first.
///
/// Either what is used levels off above the budget (rate × (lifetime + hold), sustained for twenty
/// seconds), or it rises in a straight line that crosses it. Nothing is said before one hold time was
/// observed.
#[must_use]
pub fn forecast(context: &Context<'_>) -> Vec<Finding> {
    context
        .tables
        .active(context.now, context.thresholds.window)
        .filter(|(key, _)| is_subject(context, key))
        .filter_map(|(key, space)| {
            let context = &context.at(key);
            let (budget, outlook) = prospects(context, key, space)
                .into_iter()
                // What is used up already is not foretold: connections fail, or the budget is wrong.
                .filter(|(budget, _)| budget.headroom() > 0)
                .filter(|(_, outlook)| outlook.exhausted_in_seconds.is_some())
                .min_by(|(_, a), (_, b)| {
                    let end = |o: &Outlook| o.exhausted_in_seconds.unwrap_or(f64::MAX);
                    end(a).total_cmp(&end(b))
                })?;
            Some(describe(context, key, space, budget, outlook))
        })
        .collect()
}

/// The present finding while the use stays near the budget.
#[must_use]
pub fn refresh(context: &Context<'_>, key: &PortSpaceKey) -> Option<(Finding, bool)> {
    let space = context.tables.spaces.get(key)?;
    let near = context.thresholds.local.critical_utilization;
    let (budget, outlook) = prospects(context, key, space)
        .into_iter()
        .max_by(|(a, _), (b, _)| a.utilization().total_cmp(&b.utilization()))?;
    let alive = f64::from(outlook.expected) >= near * f64::from(budget.ports);
    alive.then(|| (describe(context, key, space, budget, outlook), alive))
}

/// The sockets tell what this host's connections take; a client of this host is seen on the wire.
fn is_subject(context: &Context<'_>, key: &PortSpaceKey) -> bool {
    let at_sockets = key.point == Point::Socket as u8;
    match Role::from_u8(key.role) {
        Role::Initiator => at_sockets,
        Role::Responder => !at_sockets || !context.tables.has_wire(key),
        Role::Unknown => false,
    }
}

/// Every budget of a port space that was watched for long enough, and where its use leads.
fn prospects(context: &Context<'_>, key: &PortSpaceKey, space: &Space) -> Vec<(Budget, Outlook)> {
    let (tables, around, now) = (context.tables, context.around, context.now);
    let budgets = if key.role == Role::Responder as u8 {
        let inferred = budget::inferred(tables, now, key, &space.census);
        [inferred.filter(|_| !is_reused_in_peace(space)), None]
    } else {
        [
            budget::local(around, key, &space.census),
            budget::device(tables, around, now, key),
        ]
    };
    budgets
        .into_iter()
        .flatten()
        .filter_map(|budget| Some((budget, outlook(context, key, space, &budget)?)))
        .collect()
}

/// Where the use of a budget leads; `None` before one hold time was observed.
pub fn outlook(
    context: &Context<'_>,
    key: &PortSpaceKey,
    space: &Space,
    budget: &Budget,
) -> Option<Outlook> {
    let (tables, around) = (context.tables, context.around);
    let thresholds = context.thresholds;
    budget::outlook(
        tables,
        around,
        thresholds,
        context.now,
        (key, space),
        budget,
    )
}

fn is_reused_in_peace(space: &Space) -> bool {
    let totals = space.totals();
    totals.reuse_accepted >= ACCEPTED && totals.bare_acks == 0
}

fn describe(
    context: &Context<'_>,
    key: &PortSpaceKey,
    space: &Space,
    budget: Budget,
    outlook: Outlook,
) -> Finding {
    let view = View::of(context, key, space);
    let processes = Processes::of_space(context, &view);
    let evidence = Evidence {
        budget: Some(budget),
        outlook: Some(outlook),
        egress: context
            .around
            .egress
            .use_of(context.tables, context.now, key),
        holders: if view.is_initiator() {
            holders::of_source(context, key)
        } else {
            Vec::new()
        },
        ..view.evidence(context, Symptom::NoLocalPort)
    };
    let whose = match budget.source {
        BudgetSource::LocalRange | BudgetSource::Bound => "of this host",
        BudgetSource::Device => "of the device in between",
        BudgetSource::Inferred => "of its address",
    };
    let end = match outlook.exhausted_in_seconds {
        Some(s) => format!("at this rate none is left in {}", seconds(s)),
        None => "they last for now".to_owned(),
    };
    let summary = format!(
        "{}: {} of {} source ports {whose} are taken, {} are expected; {end}",
        place(key),
        budget.taken(),
        budget.ports,
        expected_words(&outlook),
    );
    Finding {
        verdict: Verdict::Forecast,
        space: *key,
        since: context.now,
        severity: Severity::Warning,
        // What is counted leads there by itself; a line is only a line, and an inferred pool is not
        // the device's own word.
        confidence: if budget.source != BudgetSource::Inferred
            && f64::from(outlook.expected) >= f64::from(budget.ports)
        {
            Confidence::High
        } else {
            Confidence::Medium
        },
        ruled_out: ruled_out(context, space, &budget, &outlook),
        remedy: remedy(&view, &budget, &evidence, &processes),
        evidence,
        opened_by: processes.opened_by,
        summary,
    }
}

fn expected_words(outlook: &Outlook) -> String {
    if outlook.rise_per_second > 0.0 {
        format!(
            "{} and {:.1} more with every second",
            outlook.expected, outlook.rise_per_second
        )
    } else {
        outlook.expected.to_string()
    }
}

fn remedy(view: &View<'_>, budget: &Budget, e: &Evidence, processes: &Processes) -> String {
    let who = if view.is_initiator() {
        processes.reuse_words()
    } else {
        format!(
            "{} opens {:.1} connections/s here: its clients should reuse connections (keep-alive, a \
             connection pool)",
            ip(&view.key.initiator),
            e.opens_per_second
        )
    };
    let more = match budget.source {
        BudgetSource::LocalRange | BudgetSource::Bound => {
            "a wider net.ipv4.ip_local_port_range, or more source or destination addresses give more"
        }
        BudgetSource::Device | BudgetSource::Inferred => "give the device more ports or addresses",
    };
    format!(
        "{who}; {} ports held for {} after close bear {:.1} new connections/s; {more}",
        budget.ports,
        seconds(budget.hold_seconds),
        budget.sustainable()
    )
}

fn ruled_out(
    context: &Context<'_>,
    space: &Space,
    budget: &Budget,
    outlook: &Outlook,
) -> Vec<RuledOut> {
    let begin = space
        .first_seen
        .max(context.tables.first.unwrap_or(context.now));
    let observed = context.now.since(begin).as_secs_f64();
    let mut considered = vec![RuledOut {
        name: "start_of_load",
        why: format!(
            "observed for {}, longer than ports are held ({})",
            seconds(observed),
            seconds(budget.hold_seconds)
        ),
    }];
    considered.push(RuledOut {
        name: "burst",
        why: if outlook.rise_per_second > 0.0 {
            "the rise follows a straight line over a minute and still goes on".to_owned()
        } else {
            "the rate lasted for twenty seconds at least".to_owned()
        },
    });
    if budget.source == BudgetSource::Inferred {
        let totals = space.totals();
        considered.push(RuledOut {
            name: "reuse_in_peace",
            why: format!(
                "{} reused four-tuples were accepted, {} refused",
                totals.reuse_accepted, totals.bare_acks
            ),
        });
    }
    considered
}

#[cfg(test)]
mod tests;
