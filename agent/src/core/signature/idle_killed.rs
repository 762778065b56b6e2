//! Signature `stuck_keepalive`, cause `idle_killed`: connections are reset by the first segment after an idle
//! time, or get no answer from then on, and always when that was longer than any other that was survived:
//! something in between forgets them. And what resembles it: a peer that closes idle connections itself, and a request that crosses
//! its FIN (`keepalive_race`).

mod race;
mod told;

#[cfg(test)]
mod tests;

use std::time::Duration;

use tuplewatch_common::address::{FourTuple, PortSpaceKey, Role};

use self::{race::race, told::finding};
use super::{
    Context,
    idle_device::{self, Device},
};
use crate::core::{
    finding::Finding,
    idle::{self, Idle, Killed, ResetBy},
    threshold,
    time::Moment,
};

/// An estimate lies within this many tolerances between its two bounds.
const WIDE: f64 = 5.0;
/// Connections that woke and lived, for a single reset to say something.
const SURVIVORS: u64 = 3;

/// Judges each service in which something was lost after a rest.
pub fn idle_killed(context: &Context<'_>) -> Vec<Finding> {
    let troubled = context.tables.idles.troubled();
    troubled
        .filter_map(|(key, idle)| {
            let context = &context.at(key);
            let step = Step::of(context, idle);
            if step.is_told(context) {
                return Some(finding(context, key, idle, &step));
            }
            race(context, key, idle)
        })
        .collect()
}

/// The present finding of an alert that fires, and whether a connection was reset lately.
pub fn refresh(context: &Context<'_>, key: &PortSpaceKey) -> Option<(Finding, bool)> {
    let idle = context.tables.idles.get(key)?;
    let step = Step::of(context, idle);
    let latest = step.killed.last()?;
    let goes_on = context.now.since(latest.at) < context.thresholds.alert.resolve
        || step.killed.iter().any(|killed| hangs(context, killed));
    Some((finding(context, key, idle, &step), goes_on))
}

/// Connections of a port space that ended in silence, if that is told.
pub fn told_in_silence(context: &Context<'_>, space: &PortSpaceKey) -> Vec<FourTuple> {
    let tuple = FourTuple {
        initiator: space.initiator,
        responder: space.responder,
        responder_port: space.responder_port,
        ..FourTuple::default()
    };
    let key = idle::service(&tuple, Role::from_u8(space.role), space.point);
    let Some(idle) = context.tables.idles.get(&key) else {
        return Vec::new();
    };
    if !idle.killed.iter().any(|killed| killed.in_silence) {
        return Vec::new();
    }
    let context = &context.at(&key);
    let step = Step::of(context, idle);
    if !step.is_told(context) {
        return Vec::new();
    }
    let silent = step.killed.iter().filter(|killed| killed.in_silence);
    silent.map(|killed| killed.tuple).collect()
}

/// It still waits for an answer.
fn hangs(context: &Context<'_>, killed: &Killed) -> bool {
    killed.in_silence
        && context
            .tables
            .stalls
            .live(&killed.tuple, killed.role)
            .is_some()
}

/// Idle times that were survived, and those that were not.
struct Step<'a> {
    /// Connections lost after a longer rest than any other survived, in the order of time.
    killed: Vec<&'a Killed>,
    /// Connections lost after a shorter one.
    sooner: u32,
    /// The longest rest survived.
    survived: Duration,
    /// Connections that survived one.
    survivors: u64,
    /// The shortest rest that was not survived, of `killed`.
    shortest: Duration,
    /// The time-out, where it can be told.
    estimate: Option<Duration>,
    /// Known devices that have it.
    devices: Vec<String>,
    /// All rests that were cut short lie over one moment, and nothing shows that a connection lived
    /// through it: a restart explains them as well.
    one_event: bool,
}

impl<'a> Step<'a> {
    fn of(context: &Context<'_>, idle: &'a Idle) -> Self {
        let rules = &context.thresholds.idle_killed;
        let lately = |at: Moment| context.now.since(at) <= rules.window;
        let survived = || idle.survived.iter().filter(|(at, _)| lately(*at));
        let longest = survived().map(|(_, s)| s.longest).max();
        let longest = longest.unwrap_or_default();
        let all = idle.killed.iter();
        let all = all.filter(|k| lately(k.at) && k.idle >= rules.min_idle);
        let (killed, sooner): (Vec<&Killed>, Vec<_>) =
            all.partition(|killed| killed.idle > longest);
        let shortest = killed.iter().map(|k| k.idle).min().unwrap_or_default();
        let devices = idle_device::all(&context.around.egress);
        let (estimate, devices) = estimate(longest, shortest, rules, &devices);
        let spans = survived().map(|(at, s)| (*at, s.longest));
        Self {
            one_event: one_event(&killed, spans),
            sooner: u32::try_from(sooner.len()).unwrap_or(u32::MAX),
            survivors: survived().map(|(_, s)| u64::from(s.count)).sum(),
            survived: longest,
            killed,
            shortest,
            estimate,
            devices,
        }
    }

    /// There is a step, and nothing else explains it.
    fn is_told(&self, context: &Context<'_>) -> bool {
        let rules = &context.thresholds.idle_killed;
        let n = u32::try_from(self.killed.len()).unwrap_or(u32::MAX);
        // A peer that resets now and then whatever the idle time does so after a short one, mostly.
        if self.sooner > n / 4 {
            return false;
        }
        if n >= rules.min_killed.max(1) {
            return !self.one_event;
        }
        let by_peer = self
            .killed
            .iter()
            .any(|k| k.reset_by == Some(ResetBy::Peer));
        let just_passed = |estimate: Duration| {
            self.shortest.as_secs_f64() <= estimate.as_secs_f64() * (1.0 + rules.tolerance)
        };
        n > 0
            && self.sooner == 0
            && !by_peer
            && self.survivors >= SURVIVORS
            && !self.devices.is_empty()
            && self.estimate.is_some_and(just_passed)
    }
}

/// The time-out between the longest rest that was survived and the shortest that was not, if the two are
/// near and no device says otherwise; else that of a device which was just passed. With the devices that
/// were.
fn estimate(
    survived: Duration,
    killed: Duration,
    rules: &threshold::IdleKilled,
    devices: &[Device],
) -> (Option<Duration>, Vec<String>) {
    if killed.is_zero() {
        return (None, Vec::new());
    }
    // What closes an idle connection itself is no device that forgets it.
    let devices: Vec<Device> = devices.iter().filter(|d| !d.closes).cloned().collect();
    let near = idle_device::near(&devices, killed, rules.tolerance, survived, killed);
    let passed = near.first().and_then(|name| {
        let device = devices.iter().find(|d| d.name == *name);
        device.map(|d| d.timeout)
    });
    let middle = (survived + killed) / 2;
    let narrow = killed.as_secs_f64() <= survived.as_secs_f64() * (1.0 + WIDE * rules.tolerance);
    let fits = |device: Duration| {
        device.abs_diff(middle).as_secs_f64() <= rules.tolerance * device.as_secs_f64()
    };
    let estimate = if narrow && passed.is_none_or(fits) {
        Some(middle)
    } else {
        passed
    };
    (estimate, near)
}

/// Whether one moment explains all of them: each was used before it and reset after it, and no connection is
/// known to have rested through it and lived.
fn one_event(killed: &[&Killed], survived: impl Iterator<Item = (Moment, Duration)>) -> bool {
    let since = killed.iter().map(|k| k.rested_since()).max();
    let until = killed.iter().map(|k| k.at).min();
    let (Some(since), Some(until)) = (since, until) else {
        return false;
    };
    let mut spans: Vec<(Moment, Moment)> = survived
        .map(|(at, rest)| {
            let ns = i64::try_from(rest.as_nanos()).unwrap_or(i64::MAX);
            (at.shifted(-ns), at)
        })
        .collect();
    spans.sort_unstable();
    // Moments up to this one are excluded: somebody rested through them and lived.
    let mut excluded = since;
    for (begin, end) in spans {
        if begin <= excluded {
            excluded = excluded.max(end);
        }
    }
    excluded < until
}
