//! Signature `stuck_keepalive`, cause `black_holed`: an established connection gets nothing through any
//! more, while new ones to the same place are established. And what resembles it: a path that is down for
//! all, a path that loses full-size segments only, and a peer that does not read.

mod down;
mod told;

#[cfg(test)]
mod tests;

use std::{net::IpAddr, time::Duration};

use tuplewatch_common::address::{PortSpaceKey, Role};

use self::down::Down;
use super::{
    Context, idle_killed,
    words::{count, opener},
};
use crate::core::{
    black_hole::{RESTS_ON, StallConnection, StallEvidence},
    finding::{Evidence, Finding, OpenedBy},
    idle::Killed,
    observation::ip,
    report::Totals,
    stalled::{Group, How, Known, Over, Stalled},
    threshold::BlackHoled as Rules,
    time::Moment,
};

/// Shorter pauses are no rest.
const REST: Duration = Duration::from_secs(1);
/// Connections shown in a finding.
const SHOWN: usize = 16;
/// Processes shown.
const PROCESSES: usize = 5;

/// Connections that get nothing through since the first segment after a rest, while new ones do.
pub fn in_silence(context: &Context<'_>) -> Vec<Killed> {
    let mut all = Vec::new();
    for (key, group) in context.tables.stalls.all() {
        let context = &context.at(key);
        let judged = Judged::of(context, key, group);
        if judged.meaning() == Meaning::BlackHoled {
            let tried = judged.dead.iter().filter(|known| judged.is_sure(known));
            all.extend(tried.filter_map(|known| ended(&known.stalled)));
        }
    }
    all
}

/// The connection as one that ended in silence, if it rested before.
fn ended(stalled: &Stalled) -> Option<Killed> {
    let idle = stalled.rest().filter(|rest| *rest >= REST)?;
    let process = stalled.process.as_ref();
    let mut command = [0; 16];
    let name = process.and_then(|process| process.command.as_deref());
    for (to, from) in command.iter_mut().zip(name.unwrap_or_default().bytes()) {
        *to = from;
    }
    Some(Killed {
        tuple: stalled.connection,
        role: stalled.role,
        point: stalled.point as u8,
        at: stalled.since,
        idle,
        opened: stalled.opened,
        pid: process.map_or(0, |process| process.pid),
        command,
        closed_before: false,
        by_probe: stalled.how == How::Silent,
        in_silence: true,
        reset_by: None,
        settings: stalled.settings,
    })
}

/// Judges each port space with connections that make no progress. Those that a known idle time explains are told
/// by that rule.
pub fn black_holed(context: &Context<'_>) -> Vec<Finding> {
    let stalls = &context.tables.stalls;
    let mut findings = Vec::new();
    let mut down = Down::default();
    for (key, group) in stalls.all() {
        let context = &context.at(key);
        let judged = Judged::of(context, key, group);
        if judged.is_explained() {
            continue;
        }
        if key.role == Role::Responder as u8 && judged.meaning() == Meaning::PathDown {
            down.add(&judged);
        } else {
            findings.extend(judged.finding());
        }
    }
    findings.extend(down.findings(context));
    findings
}

/// The present finding of an alert that fires, and whether connections stall still.
pub fn refresh(context: &Context<'_>, key: &PortSpaceKey) -> Option<(Finding, bool)> {
    let group = context.tables.stalls.get(key)?;
    let judged = Judged::of(context, key, group);
    let resolve = context.thresholds.alert.resolve;
    let lately = |at: Moment| context.now.since(at) < resolve;
    let told = idle_killed::told_in_silence(context, key);
    let is_other = |known: &Known| !told.contains(&known.stalled.connection);
    let mut over = group.over().filter(|over| lately(over.at));
    let goes_on = judged.dead.iter().any(|known| is_other(known))
        || over.any(|over| judged.is_dead(&over.known, over.at) && is_other(&over.known));
    Some((judged.told(), goes_on))
}

/// What the stalled connections of a port space mean.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Meaning {
    /// They are dead, and new ones do better.
    BlackHoled,
    /// Nothing gets through.
    PathDown,
    /// Only large segments get lost.
    Mtu,
    /// The peer does not read.
    ZeroWindow,
    /// It cannot be said yet.
    Open,
}

/// A port space, judged.
struct Judged<'a> {
    context: &'a Context<'a>,
    key: &'a PortSpaceKey,
    group: &'a Group,
    totals: Totals,
    /// Connections that get nothing through, those that stall for longest first.
    dead: Vec<&'a Known>,
    /// … of which only segments of full size get lost.
    large: Vec<&'a Known>,
    /// Those whose peer keeps its window closed.
    closed: Vec<&'a Known>,
}

impl<'a> Judged<'a> {
    fn of(context: &'a Context<'a>, key: &'a PortSpaceKey, group: &'a Group) -> Self {
        let mut judged = Self {
            context,
            key,
            group,
            totals: context.tables.totals(key),
            dead: Vec::new(),
            large: Vec::new(),
            closed: Vec::new(),
        };
        for known in group.live() {
            if judged.is_dead(known, context.now) {
                judged.dead.push(known);
            } else if judged.is_large(known) {
                judged.large.push(known);
            } else if judged.is_closed(known) {
                judged.closed.push(known);
            }
        }
        judged.dead.sort_by_key(|known| known.stalled.since);
        judged
    }

    const fn rules(&self) -> &'a Rules {
        &self.context.thresholds.black_holed
    }

    fn lasts(&self, known: &Known) -> Duration {
        self.context.now.since(known.stalled.since)
    }

    /// Enough was tried until then, and in vain: more than the loss on this path explains.
    fn is_tried(&self, known: &Known, until: Moment) -> bool {
        let (s, rules) = (&known.stalled, self.rules());
        let enough = match s.how {
            How::Unacked => s.rtos >= rules.min_rtos,
            How::Silent => s.probes >= rules.min_probes,
            How::Closed => false,
        };
        enough
            && known.together.min(known.if_down) <= rules.max_chance
            && until.since(s.since) >= rules.warn_after
    }

    /// It is not loss, nor was the path down for a while and its timer is behind.
    fn is_sure(&self, known: &Known) -> bool {
        known.tried_since() && known.together <= self.rules().max_chance
    }

    /// Nothing got through until then. Where the peer is heard all the same, only its way to this host is
    /// whole, unless it is the size of the segments.
    fn is_dead(&self, known: &Known, until: Moment) -> bool {
        let s = &known.stalled;
        s.is_used && self.is_tried(known, until) && !(s.is_answered && s.is_full_size)
    }

    /// The peer answers, but not to what is of full size.
    fn is_large(&self, known: &Known) -> bool {
        let s = &known.stalled;
        s.is_answered && s.is_full_size && self.is_tried(known, self.context.now)
    }

    fn is_closed(&self, known: &Known) -> bool {
        known.stalled.how == How::Closed && self.lasts(known) >= self.rules().zero_window_after
    }

    /// Dead ones whose stall is over by now.
    fn over(&self) -> impl Iterator<Item = &'a Over> {
        let over = self.group.over();
        over.filter(|over| self.is_dead(&over.known, over.at))
    }

    /// The one that began to stall first; if all is over, of those.
    fn first(&self) -> Option<&'a Known> {
        let over = self.over().map(|over| &over.known);
        let live = self.dead.first().copied();
        live.or_else(|| over.min_by_key(|known| known.stalled.since))
    }

    /// Connections opened after the stall began that stall themselves.
    fn newer_stalled(&self) -> impl Iterator<Item = &'a Known> {
        let since = self.first().map(|first| first.stalled.since);
        self.group.live().filter(move |known| {
            let opened = known.stalled.opened.zip(since);
            opened.is_some_and(|(opened, since)| opened > since)
        })
    }

    /// Since the first of the dead ones was seen: opens, those established, and those that stall too.
    fn newer(&self) -> (u64, u64, u32) {
        let (opens, established) = self
            .first()
            .map_or((0, 0), |first| first.since_then(&self.totals));
        let stalled = u32::try_from(self.newer_stalled().count()).unwrap_or(u32::MAX);
        (opens, established, stalled)
    }

    fn meaning(&self) -> Meaning {
        if self.dead.is_empty() {
            return if !self.large.is_empty() {
                Meaning::Mtu
            } else if !self.closed.is_empty() {
                Meaning::ZeroWindow
            } else {
                Meaning::Open
            };
        }
        let (_, established, stalled) = self.newer();
        // Small segments get through on new connections, the handshake's own, and large ones do not.
        let all_large = self.dead.iter().all(|known| known.stalled.is_full_size);
        if all_large && established > 0 && self.newer_stalled().any(|k| k.stalled.is_full_size) {
            return Meaning::Mtu;
        }
        let better = established.saturating_sub(stalled.into());
        if better < self.rules().min_newer.max(1) {
            return Meaning::PathDown;
        }
        let tried = self.dead.iter().filter(|known| self.is_sure(known)).count();
        if tried == 0 || (self.is_public_client() && tried < self.rules().min_public as usize) {
            return Meaning::Open;
        }
        Meaning::BlackHoled
    }

    /// The dead ones are told as connections that something in between has forgotten.
    fn is_explained(&self) -> bool {
        if self.dead.is_empty() {
            return false;
        }
        let told = idle_killed::told_in_silence(self.context, self.key);
        let is_told = |known: &&Known| told.contains(&known.stalled.connection);
        self.dead.iter().all(is_told)
    }

    /// Others than the stalled ones may be other hosts' behind the same address.
    fn is_public_client(&self) -> bool {
        self.key.role == Role::Responder as u8 && is_public(ip(&self.key.initiator))
    }

    fn finding(&self) -> Option<Finding> {
        match self.meaning() {
            Meaning::BlackHoled => Some(self.told()),
            Meaning::PathDown => Some(self.path_down()),
            Meaning::Mtu => Some(self.mtu()),
            Meaning::ZeroWindow => Some(self.zero_window()),
            Meaning::Open => None,
        }
    }

    /// The numbers of these connections.
    fn evidence(&self, those: &[&Known]) -> StallEvidence {
        let now = self.context.now;
        let (newer_opens, newer, newer_stalled) = self.newer();
        let first = those.iter().map(|known| known.stalled.since).min();
        let newer_since = those.iter().filter_map(|known| known.newer_since).min();
        let mut over: Vec<_> = self.over().collect();
        over.sort_by_key(|over| over.known.stalled.since);
        let live = those
            .iter()
            .map(|known| StallConnection::of(&known.stalled, now, false));
        let ended = over
            .iter()
            .map(|over| StallConnection::of(&over.known.stalled, over.at, true));
        StallEvidence {
            stalled: u32::try_from(those.len()).unwrap_or(u32::MAX),
            over: u32::try_from(over.len()).unwrap_or(u32::MAX),
            unacked_bytes: those.iter().map(|k| u64::from(k.stalled.unacked)).sum(),
            longest_seconds: first.map_or(0.0, |at| now.since(at).as_secs_f64()),
            newer_opens,
            newer,
            newer_stalled,
            newer_for_seconds: newer_since.map(|at| now.since(at).as_secs_f64()),
            connections: live.chain(ended).take(SHOWN).collect(),
            rests_on: RESTS_ON.to_owned(),
        }
    }

    /// The processes that open connections there, busiest first.
    fn opened_by(&self) -> Vec<OpenedBy> {
        let context = self.context;
        let window = context.thresholds.window;
        if self.key.role != Role::Initiator as u8 {
            return Vec::new();
        }
        let rates = context.tables.openers(self.key, context.now, window);
        rates
            .into_iter()
            .take(PROCESSES)
            .map(|rate| opener(&rate, window.as_secs_f64().max(1.0)))
            .collect()
    }
}

/// `3 established connections get`.
fn get(n: usize) -> String {
    let verb = if n == 1 { "gets" } else { "get" };
    format!("{} {verb}", count(n as u64, "established connection"))
}

fn with(context: &Context<'_>, stall: StallEvidence) -> Evidence {
    Evidence {
        window_seconds: context.thresholds.window.as_secs_f64(),
        stall: Some(stall),
        ..Evidence::default()
    }
}

/// An address behind which may be many hosts that have nothing to do with each other.
fn is_public(address: IpAddr) -> bool {
    match address {
        // RFC 1918, RFC 6598 (which clusters use for pods), RFC 3927.
        IpAddr::V4(v4) => {
            let [a, b, ..] = v4.octets();
            let is_shared = a == 100 && b & 0xc0 == 64;
            !(v4.is_private() || v4.is_loopback() || v4.is_link_local() || is_shared)
        }
        IpAddr::V6(v6) => !(v6.is_unique_local() || v6.is_loopback() || v6.is_unicast_link_local()),
    }
}
