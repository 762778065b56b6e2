//! Signature `stuck_keepalive`, cause `black_holed`: an established connection gets nothing through any
//! more, while new ones to the same place are established. And what resembles it: a path that is down for
//! all, a path that loses full-size segments only, and a peer that does not read.

#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

use tuplewatch_common::address::{PortSpaceKey, Role};

use super::{
    Context,
    words::{count, opener, seconds},
};
use crate::core::{
    black_hole::{RESTS_ON, StallConnection, StallEvidence},
    finding::{Confidence, Evidence, Finding, OpenedBy, RuledOut, Severity, Verdict},
    observation::{ip, place},
    report::Totals,
    stalled::{Group, How, Known, Over},
    threshold::BlackHoled as Rules,
    time::Moment,
};

/// Connections shown in a finding.
const SHOWN: usize = 16;
/// Processes shown.
const PROCESSES: usize = 5;

/// Judges each port space with connections that make no progress.
pub fn black_holed(context: &Context<'_>) -> Vec<Finding> {
    let stalls = &context.tables.stalls;
    let mut findings = Vec::new();
    let mut down = Down::default();
    for (key, group) in stalls.all() {
        let context = &context.at(key);
        let judged = Judged::of(context, key, group);
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
    let goes_on = !judged.dead.is_empty()
        || group
            .over()
            .any(|over| lately(over.at) && judged.is_dead(&over.known, over.at));
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

    /// Enough was tried until then, and in vain.
    fn is_tried(&self, known: &Known, until: Moment) -> bool {
        let (s, rules) = (&known.stalled, self.rules());
        let enough = match s.how {
            How::Unacked => s.rtos >= rules.min_rtos,
            How::Silent => s.probes >= rules.min_probes,
            How::Closed => false,
        };
        enough && until.since(s.since) >= rules.warn_after
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
        let tried = self.dead.iter().filter(|known| known.tried_since()).count();
        if tried == 0 || (self.is_public_client() && tried < self.rules().min_public as usize) {
            return Meaning::Open;
        }
        Meaning::BlackHoled
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

    fn told(&self) -> Finding {
        let (context, rules) = (self.context, self.rules());
        let evidence = self.evidence(&self.dead);
        let with_data = |known: &&&Known| known.stalled.how == How::Unacked;
        let failing = self.dead.iter().filter(with_data);
        let longest = failing.clone().map(|known| self.lasts(known)).max();
        let is_critical = longest.is_some_and(|longest| longest >= rules.critical_after)
            || failing.count() >= rules.critical_sockets.max(1) as usize;
        let is_sure = self.key.role != Role::Responder as u8
            && self.dead.iter().any(|known| !known.stalled.is_full_size);
        let of_them = if evidence.stalled == 0 {
            let over = count(evidence.over.into(), "established connection");
            format!("{over} got nothing through, which is over")
        } else {
            format!(
                "{} nothing through for {} ({} not acknowledged)",
                get(self.dead.len()),
                seconds(evidence.longest_seconds),
                count(evidence.unacked_bytes, "byte"),
            )
        };
        let summary = format!(
            "{}: {of_them}, while {} established since",
            place(self.key),
            were(evidence.newer),
        );
        let since = self.first().map(|first| first.stalled.since);
        Finding {
            verdict: Verdict::BlackHoled,
            space: *self.key,
            since: since.unwrap_or(context.now),
            severity: if is_critical {
                Severity::Critical
            } else {
                Severity::Warning
            },
            confidence: if is_sure {
                Confidence::High
            } else {
                Confidence::Medium
            },
            ruled_out: self.ruled_out(&evidence),
            opened_by: self.opened_by(),
            remedy: remedy(&evidence, self.key),
            evidence: with(context, evidence),
            summary,
        }
    }

    fn ruled_out(&self, evidence: &StallEvidence) -> Vec<RuledOut> {
        let large = self.dead.iter().filter(|k| k.stalled.is_full_size).count();
        let attempts = self.dead.iter().map(|known| known.stalled.attempts()).max();
        let mut ruled_out = vec![
            RuledOut {
                name: Verdict::PathDown.name(),
                why: format!(
                    "{} established since, {} of which stall",
                    were(evidence.newer),
                    evidence.newer_stalled
                ),
            },
            RuledOut {
                name: Verdict::MtuBlackHole.name(),
                why: if large == self.dead.len() && large > 0 {
                    "what is lost is of full size, but no newer connection stalls on such a segment and \
                     the peer is silent"
                        .to_owned()
                } else {
                    format!(
                        "{} of {} wait for less than a full segment",
                        self.dead.len() - large,
                        self.dead.len()
                    )
                },
            },
            RuledOut {
                name: Verdict::ZeroWindow.name(),
                why: if self.dead.iter().any(|known| known.stalled.is_answered) {
                    "the peer is heard, but it acknowledges nothing".to_owned()
                } else {
                    "the peer does not answer at all".to_owned()
                },
            },
            RuledOut {
                name: Verdict::PacketLoss.name(),
                why: format!(
                    "one of them was sent {} times in a row in vain",
                    attempts.unwrap_or(0) + 1
                ),
            },
        ];
        if self.key.role == Role::Responder as u8 {
            ruled_out.push(RuledOut {
                name: "client_gone",
                why: "not ruled out here: a host behind that address that vanished while others open \
                      connections looks the same"
                    .to_owned(),
            });
        }
        ruled_out
    }

    fn path_down(&self) -> Finding {
        let (opens, established, stalled) = self.newer();
        let others = match (opens, established) {
            (0, 0) => "nobody has opened another one since".to_owned(),
            (_, 0) => format!("none of {} since was established", count(opens, "open")),
            _ => format!("{stalled} of {established} established since get nothing through either"),
        };
        let summary = format!(
            "{}: {} nothing through, and {others}",
            place(self.key),
            get(self.dead.len())
        );
        self.look_alike(
            Verdict::PathDown,
            &self.dead,
            summary,
            "Look at the path and at the host at its other end: no connection gets anything through.",
        )
    }

    fn mtu(&self) -> Finding {
        let those = if self.dead.is_empty() {
            &self.large
        } else {
            &self.dead
        };
        let summary = format!(
            "{}: {} no segment of full size through, while small ones pass: a link on the way carries less \
             than this path is thought to, and its ICMP messages do not arrive",
            place(self.key),
            get(those.len()),
        );
        self.look_alike(
            Verdict::MtuBlackHole,
            those,
            summary,
            "Let ICMP `fragmentation needed` and `packet too big` through, lower the MTU of the interface or \
             clamp the MSS, or set net.ipv4.tcp_mtu_probing=1.",
        )
    }

    fn zero_window(&self) -> Finding {
        let summary = format!(
            "{}: {} nothing through because the peer's window is closed; it answers, so it lives and does \
             not read",
            place(self.key),
            get(self.closed.len()),
        );
        self.look_alike(
            Verdict::ZeroWindow,
            &self.closed,
            summary,
            "Look at the peer's program: it does not read what was sent.",
        )
    }

    fn look_alike(
        &self,
        verdict: Verdict,
        those: &[&Known],
        summary: String,
        remedy: &str,
    ) -> Finding {
        let since = those.iter().map(|known| known.stalled.since).min();
        Finding {
            verdict,
            space: *self.key,
            since: since.unwrap_or(self.context.now),
            severity: Severity::Info,
            confidence: Confidence::High,
            evidence: with(self.context, self.evidence(those)),
            ruled_out: Vec::new(),
            opened_by: self.opened_by(),
            summary,
            remedy: remedy.to_owned(),
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

/// Paths to clients that are down, by the port of this host: on a public server some always are, and one
/// line for all of them is enough.
#[derive(Default)]
struct Down(BTreeMap<PortSpaceKey, (Moment, u32, StallEvidence)>);

impl Down {
    fn add(&mut self, judged: &Judged<'_>) {
        let key = PortSpaceKey {
            initiator: [0; 16],
            ..*judged.key
        };
        let new = judged.evidence(&judged.dead);
        let since = judged
            .first()
            .map_or(judged.context.now, |k| k.stalled.since);
        let (first, clients, all) = self
            .0
            .entry(key)
            .or_insert_with(|| (since, 0, StallEvidence::default()));
        *first = since.min(*first);
        *clients += 1;
        all.stalled += new.stalled;
        all.unacked_bytes += new.unacked_bytes;
        all.longest_seconds = all.longest_seconds.max(new.longest_seconds);
        all.newer_opens += new.newer_opens;
        all.newer += new.newer;
        all.newer_stalled += new.newer_stalled;
        let room = SHOWN.saturating_sub(all.connections.len());
        all.connections
            .extend(new.connections.into_iter().take(room));
        all.rests_on = new.rests_on;
    }

    fn findings(self, context: &Context<'_>) -> Vec<Finding> {
        let finding =
            |(space, (since, clients, evidence)): (PortSpaceKey, (_, u32, StallEvidence))| {
                Finding {
                    verdict: Verdict::PathDown,
                    space,
                    since,
                    severity: Severity::Info,
                    confidence: Confidence::High,
                    summary: format!(
                        "{}: {} of {} nothing through, and nothing new has come from there since",
                        place(&space),
                        get(evidence.stalled as usize),
                        count(clients.into(), "client"),
                    ),
                    evidence: with(context, evidence),
                    ruled_out: Vec::new(),
                    opened_by: Vec::new(),
                    remedy: "Clients have vanished, or the path to them is down.".to_owned(),
                }
            };
        self.0.into_iter().map(finding).collect()
    }
}

/// `3 new connections were`.
fn were(n: u64) -> String {
    let verb = if n == 1 { "was" } else { "were" };
    format!("{} {verb}", count(n, "new connection"))
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

fn remedy(evidence: &StallEvidence, key: &PortSpaceKey) -> String {
    let mut text = String::new();
    let stalled: Vec<&StallConnection> = evidence
        .connections
        .iter()
        .filter(|connection| !connection.over)
        .collect();
    let commands: Vec<&str> = stalled
        .iter()
        .filter_map(|connection| connection.close.as_deref())
        .take(2)
        .collect();
    if !commands.is_empty() {
        let holders: Vec<String> = stalled.iter().filter_map(|c| c.holder()).collect();
        let whose = holders.first().map_or_else(
            || "of its process".to_owned(),
            |holder| format!("of {holder}"),
        );
        text.push_str(&format!(
            "Close these sockets, in the network namespace {whose}, so that the next request opens a new \
             connection: {}{}. ",
            commands.join("; "),
            if (evidence.stalled as usize) > commands.len() {
                "; the others likewise"
            } else {
                ""
            }
        ));
    }
    let timeout = stalled.iter().find_map(|c| c.user_timeout_seconds);
    let has = match timeout {
        Some(0.0) => " (this socket has none)".to_owned(),
        Some(timeout) => format!(" (this socket has {})", seconds(timeout)),
        None => String::new(),
    };
    text.push_str(&format!(
        "By itself Linux gives up after 15 minutes or more (net.ipv4.tcp_retries2=15). So that it cannot \
         last: set TCP_USER_TIMEOUT on the sockets{has}, which also ends what keep-alive probes do not, \
         because they are not sent while data waits; or lower net.ipv4.tcp_retries2 (8 gives up after some \
         100 s); and give connections a maximum age.",
    ));
    if key.role == Role::Responder as u8 {
        text.push_str(" The client's side waits likewise: look there for a balancer or NAT that lost the connection.");
    }
    text
}
