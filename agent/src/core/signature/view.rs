//! A port space as the rules see it: built once per look, and only for port spaces that are busy or
//! in trouble.

use tuplewatch_common::{
    address::{PortSpaceKey, Role},
    memory::Former,
};

use super::{Context, words};
use crate::core::{
    episode::{Episode, Symptom},
    finding::{Confidence, Evidence, Finding, OpenedBy, Severity, Verdict},
    ports::Ports,
    report::Totals,
    space::Space,
    time::Moment,
};

/// Samples shown in a finding.
const SHOWN: usize = 8;

/// A port space, seen by the rules.
pub struct View<'a> {
    /// The port space.
    pub key: &'a PortSpaceKey,
    /// What is known of it.
    pub space: &'a Space,
    /// The trouble going on, if any.
    pub episode: Option<&'a Episode>,
    /// Counts of the window.
    pub window: Totals,
    /// Refused SYNs of the window that reuse of a closed connection explains.
    pub suspects: u64,
    /// Their distinct source ports.
    pub suspect_ports: u32,
    /// Distinct opens among them: a SYN that is sent again is refused again.
    pub suspect_opens: u32,
}

impl<'a> View<'a> {
    /// Looks at a port space.
    #[must_use]
    pub fn of(context: &Context<'_>, key: &'a PortSpaceKey, space: &'a Space) -> Self {
        let episode = space.episode.as_deref();
        let window = space.window(context.now, context.thresholds.window);
        let (suspects, suspect_ports, suspect_opens) = if window.bare_acks == 0 {
            (0, 0, 0)
        } else {
            suspects(context, key, space, &window)
        };
        Self {
            key,
            space,
            episode,
            window,
            suspects,
            suspect_ports,
            suspect_opens,
        }
    }

    /// This host opens the connections.
    #[must_use]
    pub fn is_initiator(&self) -> bool {
        self.key.role == Role::Initiator as u8
    }

    /// This host accepts the connections.
    #[must_use]
    pub fn is_responder(&self) -> bool {
        self.key.role == Role::Responder as u8
    }

    /// When symptoms of that kind began; now, if there are none.
    #[must_use]
    pub fn since(&self, context: &Context<'_>, symptom: Symptom) -> Moment {
        self.episode.map_or(context.now, |e| e.onset(symptom).since)
    }

    /// Counts since symptoms of that kind began; of the window, if there are none.
    #[must_use]
    pub fn whole(&self, symptom: Symptom) -> Totals {
        self.episode.map_or(self.window, |e| {
            self.space.totals().minus(&e.onset(symptom).baseline)
        })
    }

    /// Symptoms of that kind go on: the time that hysteresis asks for has not passed without one.
    #[must_use]
    pub fn goes_on(&self, context: &Context<'_>, symptom: Symptom) -> bool {
        let last = self.episode.and_then(|e| e.last[symptom as usize]);
        last.is_some_and(|last| context.now.since(last) < context.thresholds.alert.resolve)
    }

    /// The numbers, counted since symptoms of that kind began.
    #[must_use]
    pub fn evidence(&self, context: &Context<'_>, symptom: Symptom) -> Evidence {
        let (w, t, e) = (&self.window, &self.whole(symptom), self.episode);
        let seconds = |ms: u32| f64::from(ms) / 1000.0;
        let interval = e.and_then(|e| e.reuse_interval_ms);
        let time_wait = self.space.census.held();
        let ports = self.space.ports.as_ref();
        Evidence {
            opens: t.opens,
            established: t.established,
            refused_syns: t.bare_acks,
            refused_after_close: t.bare_acks_closed,
            refused_while_open: t.bare_acks_open,
            refused_half_open: t.bare_acks_half_open,
            refused_unknown: t.bare_acks_unknown,
            rsts: t.rsts_after_bare_ack,
            syn_retransmits: t.syn_retransmits,
            healed: t.healed,
            unhealed: t.unhealed,
            reuse_accepted: t.reuse_accepted,
            unanswered: t.syn_timeouts + t.abandoned,
            half_open: t.half_open,
            refused_by_rst: t.refused,
            no_listener: t.no_listener,
            duplicate_syns: t.duplicate_syns,
            refused_ports: e.map_or(0, |e| {
                u32::try_from(e.refused_ports.len()).unwrap_or(u32::MAX)
            }),
            ports_seen: ports.map_or(0, Ports::distinct),
            // Behind a NAT the responder sees the pool; the initiator sees its own host's ports.
            pool: self.space.pool().filter(|_| self.is_responder()),
            time_wait,
            time_wait_peak: e.map_or(0, |e| e.time_wait_peak).max(time_wait),
            in_use: self.space.census.in_use(),
            reuse_interval_min_seconds: interval.map(|(low, _)| seconds(low)),
            reuse_interval_max_seconds: interval.map(|(_, high)| seconds(high)),
            window_seconds: context.thresholds.window.as_secs_f64(),
            window_refused: w.bare_acks,
            window_opens: w.opens,
            opens_per_second: w.opens as f64 / self.observed(context),
            samples: {
                let mut newest: Vec<_> = self.space.samples().rev().take(SHOWN).collect();
                newest.reverse();
                newest.into_iter().map(|r| r.sample.clone()).collect()
            },
            ..Evidence::default()
        }
    }

    /// Seconds of the window that were observed: the first window after a start is not full yet.
    #[must_use]
    pub fn observed(&self, context: &Context<'_>) -> f64 {
        let window = context.thresholds.window.as_secs_f64();
        context
            .tables
            .first
            .map_or(window, |first| context.now.since(first).as_secs_f64())
            .clamp(1.0, window.max(1.0))
    }

    /// The processes that open the connections, where this host is the initiator.
    #[must_use]
    pub fn opened_by(&self, context: &Context<'_>) -> Vec<OpenedBy> {
        if !self.is_initiator() {
            return Vec::new();
        }
        let observed = self.observed(context);
        let rates = context
            .tables
            .openers(self.key, context.now, context.thresholds.window);
        rates
            .into_iter()
            .take(5)
            .map(|rate| words::opener(&rate, observed))
            .collect()
    }

    /// A finding about this port space that says only that: no severity, nothing ruled out.
    #[must_use]
    pub fn look_alike(
        &self,
        context: &Context<'_>,
        verdict: Verdict,
        symptom: Symptom,
        summary: String,
        remedy: &str,
    ) -> Finding {
        Finding {
            verdict,
            space: *self.key,
            since: self.since(context, symptom),
            severity: Severity::Info,
            confidence: Confidence::High,
            evidence: self.evidence(context, symptom),
            ruled_out: Vec::new(),
            opened_by: self.opened_by(context),
            summary,
            remedy: remedy.to_owned(),
        }
    }
}

/// Refused SYNs that reuse explains, their distinct source ports, and the distinct opens among them.
///
/// The responder's side has seen the former connection close. The initiator's side has not, where a
/// NAT behind it hands the port on: there a bare ACK on a port never used before is the sign. A port
/// whose end the responder did not see says something only beside others whose end it saw.
fn suspects(
    context: &Context<'_>,
    key: &PortSpaceKey,
    space: &Space,
    window: &Totals,
) -> (u64, u32, u32) {
    let is_responder = key.role == Role::Responder as u8;
    let unknown = window.bare_acks_unknown;
    let n = if !is_responder || window.bare_acks_closed >= unknown {
        window.bare_acks_closed + unknown
    } else {
        window.bare_acks_closed
    };
    let since = context
        .now
        .0
        .saturating_sub(u64::try_from(context.thresholds.window.as_nanos()).unwrap_or(u64::MAX));
    let refused = space
        .samples()
        .filter(|r| r.sample.time_ns >= since)
        .filter(|r| r.former.is_closed() || matches!(r.former, Former::None | Former::Refused));
    let mut opens: Vec<(u16, u32)> = refused.map(|r| (r.sample.port, r.sample.isn)).collect();
    opens.sort_unstable();
    opens.dedup();
    let ports = opens.chunk_by(|a, b| a.0 == b.0).count();
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    (n, count(ports), count(opens.len()))
}
