//! The rules: what a window of observations means.
//!
//! Each rule reads like its paragraph in the documentation: conditions in order, thresholds in
//! [`super::threshold`]. A symptom that fits no signature gets the name of the look-alike that it is.
//! Rules are asked about port spaces that are busy or in trouble only: quiet ones cost nothing.

mod bare_ack;
mod black_holed;
mod draining;
mod fare;
mod forecast;
mod holders;
mod idle_device;
mod idle_killed;
mod listener;
mod local;
mod local_ephemeral;
mod loss;
mod nat_syn_drop;
mod neighbours;
mod pinned_suspect;
mod port_exhaustion;
mod refused;
mod silence;
mod slow_server;
mod strangers;
mod stuck_keepalive;
mod tuple_collision;
mod view;
mod words;

#[cfg(test)]
mod load;
#[cfg(test)]
mod testing;

use tuplewatch_common::address::{Point, PortSpaceKey, Role};

use super::{
    episode::Symptom,
    finding::{Finding, Verdict},
    rules::Rules,
    space::Space,
    surroundings::Around,
    tables::Tables,
    threshold::Thresholds,
    time::Moment,
};

pub use black_holed::in_silence;
pub use loss::rests_on_pattern;
pub use neighbours::Look;
pub use view::View;
pub use words::command;

/// What rules look at.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// Everything remembered.
    pub tables: &'a Tables,
    /// What is configured.
    pub rules: &'a Rules,
    /// The thresholds of the port space that is judged; of all that have none of their own before.
    pub thresholds: &'a Thresholds,
    /// The host around the port spaces, and the devices in between.
    pub around: &'a Around,
    /// What several rules want to know at this look.
    pub look: &'a Look,
    /// Now.
    pub now: Moment,
}

impl Context<'_> {
    /// The same with the thresholds of a port space.
    #[must_use]
    pub fn at(&self, space: &PortSpaceKey) -> Self {
        Self {
            thresholds: self.rules.of(space),
            ..*self
        }
    }
}

/// How a rule judges.
enum Judge {
    /// Each port space with symptoms, at the observation point that tells more.
    Symptoms(fn(&Context<'_>, &View<'_>) -> Option<Finding>),
    /// What is not one port space.
    Host(fn(&Context<'_>) -> Vec<Finding>),
}

/// A rule, under the name of what it finds.
struct Rule {
    /// What it finds: one of these, or nothing.
    finds: &'static [Verdict],
    judge: Judge,
}

impl Rule {
    /// What the rule finds in these port spaces, or in the host if it is a rule of that kind.
    fn judge(&self, context: &Context<'_>, view: Option<&View<'_>>) -> Vec<Finding> {
        let found = match (&self.judge, view) {
            (Judge::Symptoms(judge), Some(view)) => judge(context, view).into_iter().collect(),
            (Judge::Host(judge), None) => judge(context),
            _ => Vec::new(),
        };
        debug_assert!(found.iter().all(|f| self.finds.contains(&f.verdict)));
        found
    }
}

/// Every rule, signatures first.
const RULES: [Rule; 19] = [
    Rule {
        finds: &[Verdict::L4ReuseInTimeWait],
        judge: Judge::Symptoms(port_exhaustion::l4_reuse_in_time_wait),
    },
    Rule {
        finds: &[Verdict::TupleCollision],
        judge: Judge::Symptoms(tuple_collision::tuple_collision),
    },
    Rule {
        finds: &[Verdict::LocalEphemeral],
        judge: Judge::Host(local_ephemeral::local_ephemeral),
    },
    Rule {
        finds: &[Verdict::Forecast],
        judge: Judge::Host(forecast::forecast),
    },
    Rule {
        finds: &[
            Verdict::Pinned5xx,
            Verdict::ServiceDown,
            Verdict::EndpointError,
        ],
        judge: Judge::Host(stuck_keepalive::stuck_keepalive),
    },
    Rule {
        finds: &[
            Verdict::BlackHoled,
            Verdict::PathDown,
            Verdict::MtuBlackHole,
            Verdict::ZeroWindow,
        ],
        judge: Judge::Host(black_holed::black_holed),
    },
    Rule {
        finds: &[Verdict::IdleKilled, Verdict::KeepaliveRace],
        judge: Judge::Host(idle_killed::idle_killed),
    },
    Rule {
        finds: &[Verdict::Draining],
        judge: Judge::Symptoms(draining::draining),
    },
    Rule {
        finds: &[Verdict::Draining],
        judge: Judge::Host(draining::placed),
    },
    Rule {
        finds: &[Verdict::PinnedSuspect],
        judge: Judge::Host(pinned_suspect::pinned_suspect),
    },
    Rule {
        finds: loss::NAMED,
        judge: Judge::Symptoms(loss::name),
    },
    Rule {
        finds: &[Verdict::ServerDown],
        judge: Judge::Symptoms(refused::server_down),
    },
    Rule {
        finds: &[Verdict::NoListener],
        judge: Judge::Symptoms(bare_ack::no_listener),
    },
    Rule {
        finds: &[Verdict::HalfOpenReconnect],
        judge: Judge::Symptoms(bare_ack::half_open_reconnect),
    },
    Rule {
        finds: &[Verdict::FixedPortReuse],
        judge: Judge::Symptoms(bare_ack::fixed_port_reuse),
    },
    Rule {
        finds: &[Verdict::SynRecvCollision],
        judge: Judge::Symptoms(bare_ack::syn_recv_collision),
    },
    Rule {
        finds: &[Verdict::DuplicateSyn],
        judge: Judge::Symptoms(bare_ack::duplicate_syn),
    },
    Rule {
        finds: &[Verdict::SlowServer],
        judge: Judge::Host(slow_server::slow_server),
    },
    Rule {
        finds: &[Verdict::SynFlood, Verdict::PortScan],
        judge: Judge::Host(strangers::floods_and_scans),
    },
];

/// The present finding of an alert that fires already, and whether it still has symptoms.
type Refresh = fn(&Context<'_>, &PortSpaceKey) -> Option<(Finding, bool)>;

/// One for each signature: look-alikes raise no alert.
const REFRESH: [(Verdict, Refresh); 10] = [
    (Verdict::Pinned5xx, stuck_keepalive::refresh),
    (Verdict::BlackHoled, black_holed::refresh),
    (Verdict::IdleKilled, idle_killed::refresh),
    (Verdict::Draining, |context, key| {
        if key.initiator == [0; 16] {
            return draining::refresh_placed(context, key);
        }
        again(context, key, draining::describe, draining::goes_on)
    }),
    (Verdict::PinnedSuspect, pinned_suspect::refresh),
    (Verdict::LocalEphemeral, local_ephemeral::refresh),
    (Verdict::Forecast, forecast::refresh),
    (Verdict::L4ReuseInTimeWait, |context, key| {
        again(context, key, port_exhaustion::describe, |context, view| {
            view.goes_on(context, Symptom::BareAck)
        })
    }),
    (Verdict::NatSynDrop, |context, key| {
        again(context, key, nat_syn_drop::describe, loss::goes_on)
    }),
    (Verdict::TupleCollision, |context, key| {
        again(
            context,
            key,
            tuple_collision::describe,
            tuple_collision::goes_on,
        )
    }),
];

/// What the rules find.
#[derive(Debug, Default)]
pub struct Judged {
    /// To be told.
    pub findings: Vec<Finding>,
    /// Of sockets of which nobody has looked up whether this host translates their connections: if it does, the
    /// wire tells the same under other addresses.
    pub unjoined: Vec<Finding>,
}

/// Judges everything that is busy or in trouble.
#[must_use]
pub fn evaluate(context: &Context<'_>) -> Judged {
    let mut judged = Judged::default();
    for (key, space) in context.tables.symptomatic() {
        let context = &context.at(key);
        if key.role == Role::Unknown as u8 || !has_recent_symptoms(context, space) {
            continue;
        }
        let view = View::of(context, key, space);
        if is_told_by_the_wire(context, &view) {
            continue;
        }
        let is_joined = key.point == Point::Wire as u8
            || key.role != Role::Initiator as u8
            || context.tables.is_translation_known(key);
        let found = if is_joined {
            &mut judged.findings
        } else {
            &mut judged.unjoined
        };
        found.extend(RULES.iter().flat_map(|r| r.judge(context, Some(&view))));
    }
    let host = RULES.iter().flat_map(|r| r.judge(context, None));
    judged.findings.extend(host);
    judged
}

/// The present finding of an alert that fires already, and whether it still has symptoms.
#[must_use]
pub fn refresh(
    context: &Context<'_>,
    verdict: Verdict,
    key: &PortSpaceKey,
) -> Option<(Finding, bool)> {
    let (_, refresh) = REFRESH.iter().find(|(v, _)| *v == verdict)?;
    refresh(&context.at(key), key)
}

/// Describes a port space again, whether or not the condition to fire is met at this moment.
fn again(
    context: &Context<'_>,
    key: &PortSpaceKey,
    describe: fn(&Context<'_>, &View<'_>) -> Finding,
    goes_on: fn(&Context<'_>, &View<'_>) -> bool,
) -> Option<(Finding, bool)> {
    let (key, space) = context.tables.spaces.get_key_value(key)?;
    let view = View::of(context, key, space);
    Some((describe(context, &view), goes_on(context, &view)))
}

/// Symptoms count as going on until the time that hysteresis asks for has passed without one.
fn has_recent_symptoms(context: &Context<'_>, space: &Space) -> bool {
    let resolve = context.thresholds.alert.resolve;
    space
        .episode
        .as_ref()
        .is_some_and(|e| context.now.since(e.last_symptom) < resolve)
}

/// The same connection is seen at two points: the wire tells more, so a socket's port space is judged
/// only where the wire did not see what it shows.
fn is_told_by_the_wire(context: &Context<'_>, view: &View<'_>) -> bool {
    if view.key.point == Point::Wire as u8 {
        return false;
    }
    let wire = PortSpaceKey {
        point: Point::Wire as u8,
        netns: 0,
        ..*view.key
    };
    let same_addresses = context.tables.spaces.get(&wire);
    let translated = context.tables.translated(view.key);
    let seen = same_addresses
        .map(|space| &**space)
        .into_iter()
        .chain(translated)
        .map(|space| space.window(context.now, context.thresholds.window))
        .reduce(|a, b| a.plus(&b));
    // What is dropped before it leaves this host passes no interface.
    let is_seen = seen.is_some_and(|seen| {
        seen.opens * 2 >= view.window.opens && (view.window.bare_acks == 0 || seen.bare_acks > 0)
    });
    is_seen || context.tables.is_on_wire(view.key)
}
