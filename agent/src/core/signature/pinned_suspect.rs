//! Signature `stuck_keepalive`, cause `pinned_suspect`: on one connection all responses are equally long and come at
//! once, while those on the others to the same service vary and take their time: it may be pinned to an
//! endpoint that answers with an error page, which TLS hides. A suspicion, and off unless it is asked for.

use std::collections::{BTreeSet, HashMap};

use tuplewatch_common::address::{FourTuple, PortSpaceKey};

use super::{
    Context,
    words::{count, place, short},
};
use crate::core::{
    ends::Ends,
    finding::{Confidence, Evidence, Finding, RuledOut, Severity, Verdict},
    suspect::Answers,
    time::Moment,
};

/// Other connections whose responses are compared, at least.
const OTHERS: usize = 4;
/// … and distinct lengths among their latest responses.
const LENGTHS: usize = 3;
/// The others take so many times as long, in the median.
const SLOWER: u64 = 3;
/// Connections named.
const SHOWN: usize = 8;

/// Judges each service, if the rule is on.
pub fn pinned_suspect(context: &Context<'_>) -> Vec<Finding> {
    let services = context.tables.suspects.services();
    services
        .filter_map(|(key, service)| {
            let context = &context.at(key);
            let suspects = suspects(context, service);
            (!suspects.is_empty()).then(|| finding(context, key, service, &suspects))
        })
        .collect()
}

/// The present finding of an alert that fires, and whether such a connection is still used.
pub fn refresh(context: &Context<'_>, key: &PortSpaceKey) -> Option<(Finding, bool)> {
    let service = context.tables.suspects.get(key)?;
    let suspects = suspects(context, service);
    let resolve = context.thresholds.alert.resolve;
    let goes_on = suspects
        .iter()
        .any(|s| context.now.since(s.latest) < resolve);
    Some((finding(context, key, service, &suspects), goes_on))
}

/// Those whose responses are alike and come at once, the longest run first.
fn suspects<'a>(
    context: &Context<'_>,
    service: &'a HashMap<FourTuple, Answers>,
) -> Vec<&'a Answers> {
    let least = context.thresholds.pinned_suspect.min_responses;
    let lately = |at: Moment| context.now.since(at) < context.thresholds.window;
    if least == 0 {
        return Vec::new();
    }
    let is_long = |a: &&Answers| a.run.count >= least && lately(a.latest);
    let mut found: Vec<&Answers> = service.values().filter(is_long).collect();
    found.retain(|one| {
        let others = Others::beside(one, service, lately);
        others.vary() && one.run_slowest() * SLOWER <= others.median_us()
    });
    found.sort_unstable_by_key(|a| (std::cmp::Reverse(a.run.count), a.tuple));
    found
}

impl Answers {
    const fn run_slowest(&self) -> u64 {
        self.run.slowest_us as u64
    }
}

/// The other connections to the service, but for those that look like this one.
struct Others<'a>(Vec<&'a Answers>);

impl<'a> Others<'a> {
    fn beside(
        one: &Answers,
        service: &'a HashMap<FourTuple, Answers>,
        lately: impl Fn(Moment) -> bool,
    ) -> Self {
        // In the second half of the run: of a service that fails as a whole all responses are alike by then.
        let half = one.run_since + one.latest.since(one.run_since) / 2;
        let others = service.values();
        let others =
            others.filter(|a| a.bytes != one.bytes && lately(a.latest) && a.latest >= half);
        Self(others.collect())
    }

    fn vary(&self) -> bool {
        let lengths: BTreeSet<u32> = self.0.iter().map(|a| a.bytes).collect();
        self.0.len() >= OTHERS && lengths.len() >= LENGTHS
    }

    fn median_us(&self) -> u64 {
        let mut all: Vec<u64> = self.0.iter().map(|a| a.all.mean_us()).collect();
        all.sort_unstable();
        all.get(all.len() / 2).copied().unwrap_or(0)
    }
}

fn finding(
    context: &Context<'_>,
    key: &PortSpaceKey,
    service: &HashMap<FourTuple, Answers>,
    suspects: &[&Answers],
) -> Finding {
    let lately = |at: Moment| context.now.since(at) < context.thresholds.window;
    let named = |a: &Answers| {
        let ends = Ends::of(&a.tuple);
        let age = a.opened.map_or_else(
            || "older than the agent".to_owned(),
            |opened| format!("{:.0} s old", a.latest.since(opened).as_secs_f64()),
        );
        if a.closed {
            format!("{ends}, {age}, closed")
        } else {
            let close = ends.close_command(a.role);
            format!("{ends}, {age} (`{close}` closes it)")
        }
    };
    let named: Vec<String> = suspects.iter().take(SHOWN).map(|a| named(a)).collect();
    let (what, others) = suspects.first().map_or_else(
        || ("no connection any more".to_owned(), String::new()),
        |worst| {
            let others = Others::beside(worst, service, lately);
            let what = format!(
                "on {} all responses are equally long ({} in a row of {} bytes on one) and begin within {}",
                count(suspects.len() as u64, "connection"),
                worst.run.count,
                worst.bytes,
                short(f64::from(worst.run.slowest_us) / 1e6),
            );
            let others = format!(
                "{} vary and take {} in the median",
                count(others.0.len() as u64, "other"),
                short(others.median_us() as f64 / 1e6),
            );
            (what, others)
        },
    );
    Finding {
        verdict: Verdict::PinnedSuspect,
        space: *key,
        since: suspects
            .iter()
            .map(|a| a.run_since)
            .min()
            .unwrap_or(context.now),
        severity: Severity::Info,
        confidence: Confidence::Medium,
        evidence: Evidence {
            window_seconds: context.thresholds.window.as_secs_f64(),
            ..Evidence::default()
        },
        ruled_out: vec![RuledOut {
            name: Verdict::ServiceDown.name(),
            why: others.clone(),
        }],
        opened_by: Vec::new(),
        summary: format!(
            "{}: {what}, while {others}: perhaps the same error page each time; what they say cannot be read",
            place(key)
        ),
        remedy: format!(
            "Look at what the client gets on these connections: {}. If it is an error page, close them, and give \
             connections a maximum age.",
            named.join("; ")
        ),
    }
}
