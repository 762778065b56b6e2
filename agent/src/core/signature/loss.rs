//! Opens without answer: the numbers, and the order in which a name is looked for.
//!
//! What a full device in between does looks the same at the initiator as a full accept queue or one
//! dead backend. So each name asks for evidence of its own, and what has none is
//! `unknown_connect_loss`.

use std::time::Duration;

use tuplewatch_common::address::{Point, PortSpaceKey};

use super::{
    Context, View, listener, local, nat_syn_drop,
    neighbours::{Neighbours, Scan},
    silence,
};
use crate::core::{
    counters::{CounterEvidence, NetnsCounters},
    episode::Symptom,
    finding::{Confidence, Evidence, Finding, LossEvidence, RuledOut, Severity, Verdict},
    report::Totals,
};

/// How a name is looked for.
type Namer = fn(&Context<'_>, &View<'_>, &Loss) -> Option<Finding>;

/// The first that fits names the trouble. Causes on this host whose counters speak come first, then
/// the device in between, then what only the pattern tells; the last one fits always.
const NAMES: [(Verdict, Namer); 11] = [
    (
        Verdict::AcceptQueueOverflow,
        listener::accept_queue_overflow,
    ),
    (Verdict::SynQueueOverflow, listener::syn_queue_overflow),
    (Verdict::ConntrackFull, local::conntrack_full),
    (Verdict::EnaAllowance, local::ena_allowance),
    (Verdict::NatSynDrop, nat_syn_drop::nat_syn_drop),
    (Verdict::MasqueradeRace, local::masquerade_race),
    (Verdict::PacketLoss, local::packet_loss),
    (Verdict::FirewallDrop, silence::firewall_drop),
    (Verdict::ServiceDown, silence::service_down),
    (Verdict::AsymmetricPath, silence::asymmetric_path),
    (Verdict::UnknownConnectLoss, silence::unknown_connect_loss),
];

/// The names, in order.
pub const NAMED: &[Verdict] = &{
    let mut names = [Verdict::UnknownConnectLoss; NAMES.len()];
    let mut i = 0;
    while i < NAMES.len() {
        names[i] = NAMES[i].0;
        i += 1;
    }
    names
};

/// A name for lost opens that no counter speaks for: the pattern alone tells it.
#[must_use]
pub fn rests_on_pattern(finding: &Finding) -> bool {
    NAMED.contains(&finding.verdict) && finding.evidence.counters.is_empty()
}

/// The numbers of one port space's lost opens in the window.
#[derive(Clone, Copy, Debug)]
pub struct Loss {
    /// Opens.
    pub opens: u64,
    /// Handshakes completed.
    pub established: u64,
    /// Opens without answer, those included that wait and have sent their SYN again.
    pub lost: u64,
    /// SYNs sent again.
    pub retransmits: u64,
    /// Connections that are established now, where their sockets are counted on this host.
    pub live: Option<u32>,
    /// Segments of established connections sent again, where their sockets are on this host.
    pub data_retransmits: Option<u64>,
    /// The other destinations.
    pub neighbours: Neighbours,
}

impl Loss {
    /// The numbers of a port space.
    #[must_use]
    pub fn of(context: &Context<'_>, view: &View<'_>) -> Self {
        let w = &view.window;
        let sockets = sockets(context, view);
        let is_counted = sockets.is_some() && context.tables.census_at.is_some();
        Self {
            opens: w.opens,
            established: w.established,
            lost: lost(view, &within(context, view, context.thresholds.window)),
            retransmits: w.syn_retransmits,
            live: is_counted.then_some(view.space.census.established),
            data_retransmits: sockets.map(|s| s.data_retransmits),
            neighbours: if view.is_initiator() {
                context.look.neighbours(context, view.key)
            } else {
                Neighbours::default()
            },
        }
    }

    /// Share of the opens that were lost.
    #[must_use]
    pub fn share(&self) -> f64 {
        self.lost as f64 / self.opens.max(self.lost).max(1) as f64
    }

    /// Established connections repeat data so often that packets of any kind must be lost.
    #[must_use]
    pub fn is_of_data_too(&self) -> bool {
        self.data_retransmits
            .is_some_and(|n| n >= 3 && n * 5 > self.lost + self.retransmits)
    }

    /// The part of it that goes into a finding.
    #[must_use]
    pub fn evidence(&self) -> LossEvidence {
        LossEvidence {
            lost: self.lost,
            established: self.established,
            syn_retransmits: self.retransmits,
            live: self.live,
            data_retransmits: self.data_retransmits,
            others_answering: self.neighbours.answering,
            others_failing: self.neighbours.failing,
        }
    }

    /// `3 connections live on` or what else is known of them.
    #[must_use]
    pub fn living(&self) -> String {
        match self.live {
            Some(1) => "1 connection lives on".to_owned(),
            Some(n) => format!("{n} connections live on"),
            None => "how many connections live on is not seen here".to_owned(),
        }
    }

    /// `other destinations answer` or what else is known of them.
    #[must_use]
    pub fn others(&self) -> String {
        match self.neighbours {
            Neighbours {
                answering: 0,
                failing: 0,
            } => "no other destination was used meanwhile".to_owned(),
            Neighbours {
                answering: 0,
                failing,
            } => format!("{failing} other destinations fail too"),
            Neighbours {
                answering,
                failing: 0,
            } => format!("{answering} other destinations answer"),
            Neighbours { answering, failing } => {
                format!("{answering} other destinations answer, {failing} fail too")
            }
        }
    }
}

/// Opens without answer. One that waits still has no outcome: at the initiator, which may wait for
/// minutes, it counts when SYNs were sent again meanwhile, and not for those opens that were late but
/// got through: where one packet in twenty is lost, somebody waits at any time, and not in vain.
///
/// `w` must count opens and outcomes since the same moment, as [`within`] does and a whole window does
/// not: its opens go back further than the first symptom, and its outcomes do not.
fn lost(view: &View<'_>, w: &Totals) -> u64 {
    let settled = w.syn_timeouts + w.abandoned;
    if !view.is_initiator() {
        return settled;
    }
    let waiting = w.opens.saturating_sub(
        w.established + w.refused + w.failed + w.half_open + w.no_local_port + settled,
    );
    settled + waiting.min(w.syn_retransmits.saturating_sub(w.late))
}

/// Opens without answer and SYNs sent again within the last `time`.
#[must_use]
pub fn within(context: &Context<'_>, view: &View<'_>, time: Duration) -> Totals {
    view.episode.map_or_else(Totals::default, |e| {
        view.space.totals().minus(&e.before(context.now, time))
    })
}

/// What the sockets of a port space show in the window, where they are on this host.
fn sockets(context: &Context<'_>, view: &View<'_>) -> Option<Totals> {
    if view.key.point == Point::Socket as u8 {
        return Some(view.window);
    }
    let bound = |netns| PortSpaceKey {
        point: Point::Socket as u8,
        netns,
        ..*view.key
    };
    context
        .tables
        .spaces
        .range(bound(0)..=bound(u32::MAX))
        .map(|(_, space)| space.window(context.now, context.thresholds.window))
        .reduce(|a, b| a.plus(&b))
}

/// Names the trouble of a port space whose opens stay without answer.
pub fn name(context: &Context<'_>, view: &View<'_>) -> Option<Finding> {
    let w = within(context, view, context.thresholds.window);
    let missing = lost(view, &w).max(w.syn_retransmits);
    // A bare ACK is an answer, and what becomes of the open then is told with it.
    let is_answered = w.bare_acks * 2 >= missing;
    let is_scanned = || {
        let scans = context.look.scans(context);
        scans.contains_key(&Scan::from(view.key))
    };
    let opens = view.window.opens;
    if !is_more_than_chance(context, missing, opens) || is_answered || is_scanned() {
        return None;
    }
    let loss = Loss::of(context, view);
    NAMES
        .iter()
        .find_map(|(_, namer)| namer(context, view, &loss))
}

/// So many opens are lost, or SYNs sent again, that it is not the ordinary loss of a network.
pub fn is_more_than_chance(context: &Context<'_>, missing: u64, opens: u64) -> bool {
    let rules = &context.thresholds.loss;
    missing >= rules.min_lost && missing as f64 >= rules.min_ratio * opens as f64
}

/// It goes on: the time that hysteresis asks for has not passed with less than that.
pub fn goes_on(context: &Context<'_>, view: &View<'_>) -> bool {
    let lately = within(context, view, context.thresholds.alert.resolve);
    let missing = lost(view, &lately).max(lately.syn_retransmits);
    is_more_than_chance(context, missing, lately.opens)
}

/// What kind of symptom a loss began with.
pub fn symptom(view: &View<'_>) -> Symptom {
    let seen = |s: Symptom| view.episode.is_some_and(|e| e.last[s as usize].is_some());
    if seen(Symptom::Retransmit) {
        Symptom::Retransmit
    } else {
        Symptom::Unanswered
    }
}

/// The numbers of a finding about lost opens.
pub fn evidence(
    context: &Context<'_>,
    view: &View<'_>,
    loss: &Loss,
    counters: Vec<CounterEvidence>,
) -> Evidence {
    Evidence {
        loss: Some(loss.evidence()),
        egress: context
            .around
            .egress
            .use_of(context.tables, context.now, view.key),
        counters,
        ..view.evidence(context, symptom(view))
    }
}

/// What a look-alike says.
pub struct Words<'a> {
    /// Which.
    pub verdict: Verdict,
    /// How sure.
    pub confidence: Confidence,
    /// One line.
    pub summary: String,
    /// What to do.
    pub remedy: &'a str,
}

/// A look-alike among lost opens.
pub fn look_alike(
    context: &Context<'_>,
    view: &View<'_>,
    loss: &Loss,
    words: Words<'_>,
    counters: Vec<CounterEvidence>,
) -> Finding {
    Finding {
        verdict: words.verdict,
        space: *view.key,
        since: view.since(context, symptom(view)),
        severity: Severity::Info,
        confidence: words.confidence,
        evidence: evidence(context, view, loss, counters),
        ruled_out: vec![not_nat_syn_drop(context, view, loss)],
        opened_by: view.opened_by(context),
        summary: words.summary,
        remedy: words.remedy.to_owned(),
    }
}

/// Why it is not called port exhaustion.
fn not_nat_syn_drop(context: &Context<'_>, view: &View<'_>, loss: &Loss) -> RuledOut {
    let name = Verdict::NatSynDrop.name();
    let egress = &context.around.egress;
    let why = match egress.use_of(context.tables, context.now, view.key) {
        _ if !view.is_initiator() => "the SYNs arrive here".to_owned(),
        None => "no egress group carries this destination: nothing is known of ports in between"
            .to_owned(),
        Some(taken) => format!(
            "{} of {} ports of {} are taken; {} of {} opens were lost; {}",
            taken.in_use.saturating_add(taken.held),
            taken.budget,
            taken.group,
            loss.lost,
            loss.opens,
            loss.others()
        ),
    };
    RuledOut { name, why }
}

/// Network namespaces whose counters can speak for a port space, the nearest first.
pub fn namespaces(context: &Context<'_>, view: &View<'_>) -> Vec<u32> {
    let own = context.around.latest.own_netns;
    if view.key.point == Point::Wire as u8 || view.key.netns == own {
        vec![own]
    } else {
        vec![view.key.netns, own]
    }
}

/// The first of these namespaces where a counter has grown, and by how much.
pub fn grown(
    context: &Context<'_>,
    namespaces: &[u32],
    counter: fn(&NetnsCounters) -> Option<u64>,
) -> Option<(u32, u64)> {
    let (now, window) = (context.now, context.thresholds.window);
    namespaces.iter().find_map(|netns| {
        let growth = context.around.counters.netns(*netns, now, window)?;
        let n = counter(&growth)?;
        (n > 0).then_some((*netns, n))
    })
}

/// A counter as evidence.
pub fn counter(name: &str, (netns, value): (u32, u64)) -> CounterEvidence {
    CounterEvidence {
        name: name.to_owned(),
        value,
        netns,
    }
}
