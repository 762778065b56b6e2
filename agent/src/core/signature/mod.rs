//! The rules: what a window of observations means.
//!
//! Each rule reads like its paragraph in the documentation: conditions in order, thresholds in
//! [`super::threshold`]. A symptom that fits no signature gets the name of the look-alike that it is.

mod bare_ack;
mod port_exhaustion;
mod words;

use tuplewatch_common::address::{Point, PortSpaceKey, Role};

use super::{
    finding::{Finding, Verdict},
    space::Space,
    tables::Tables,
    threshold::Thresholds,
    time::Moment,
};

pub use bare_ack::BareAcks;

/// What rules look at.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// Everything remembered.
    pub tables: &'a Tables,
    /// The thresholds.
    pub thresholds: &'a Thresholds,
    /// Now.
    pub now: Moment,
}

/// A rule: what it is called and how it judges a port space.
type Rule = fn(&Context<'_>, &BareAcks<'_>) -> Option<Finding>;

/// Every rule, signatures first. The causes still to come (`nat_syn_drop`, `local_ephemeral`,
/// `forecast`, `tuple_collision`) are further lines of this table.
const RULES: [(Verdict, Rule); 6] = [
    (
        Verdict::L4ReuseInTimeWait,
        port_exhaustion::l4_reuse_in_time_wait,
    ),
    (Verdict::NoListener, bare_ack::no_listener),
    (Verdict::HalfOpenReconnect, bare_ack::half_open_reconnect),
    (Verdict::FixedPortReuse, bare_ack::fixed_port_reuse),
    (Verdict::SynRecvCollision, bare_ack::syn_recv_collision),
    (Verdict::DuplicateSyn, bare_ack::duplicate_syn),
];

/// Judges every port space that has symptoms.
#[must_use]
pub fn evaluate(context: &Context<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (key, space) in &context.tables.spaces {
        if !is_subject(context.tables, key, space) || !is_symptomatic(context, space) {
            continue;
        }
        let Some(view) = BareAcks::of(context, key, space) else {
            continue;
        };
        findings.extend(RULES.iter().filter_map(|(_, rule)| rule(context, &view)));
    }
    findings
}

/// The present finding of an alert that fires already, and whether it still has symptoms.
#[must_use]
pub fn refresh(
    context: &Context<'_>,
    verdict: Verdict,
    key: &PortSpaceKey,
) -> Option<(Finding, bool)> {
    let space = context.tables.spaces.get(key)?;
    let view = BareAcks::of(context, key, space)?;
    let finding = match verdict {
        Verdict::L4ReuseInTimeWait => port_exhaustion::describe(context, &view),
        _ => return None,
    };
    Some((finding, is_symptomatic(context, space)))
}

/// Symptoms count as going on until the time that hysteresis asks for has passed without one.
fn is_symptomatic(context: &Context<'_>, space: &Space) -> bool {
    let resolve = context.thresholds.alert.resolve;
    space
        .episode
        .as_ref()
        .is_some_and(|e| context.now.since(e.last_symptom) < resolve)
}

/// The same connection is seen at two points: the wire tells more, so a socket's port space is judged
/// only where the wire did not see it.
fn is_subject(tables: &Tables, key: &PortSpaceKey, space: &Space) -> bool {
    space.episode.is_some()
        && key.role != Role::Unknown as u8
        && (key.point == Point::Wire as u8 || !tables.is_on_wire(key))
}
