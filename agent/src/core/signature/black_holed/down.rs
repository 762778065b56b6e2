//! What resembles a black hole: a path that is down for all, one that loses full-size segments only, and a
//! peer that does not read.

use std::collections::BTreeMap;

use tuplewatch_common::address::PortSpaceKey;

use super::{Judged, SHOWN, get, with};
use crate::core::{
    black_hole::StallEvidence,
    finding::{Confidence, Finding, Severity, Verdict},
    observation::place,
    signature::{Context, words::count},
    stalled::Known,
    time::Moment,
};

impl Judged<'_> {
    pub(super) fn path_down(&self) -> Finding {
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

    pub(super) fn mtu(&self) -> Finding {
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

    pub(super) fn zero_window(&self) -> Finding {
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
}

/// Paths to clients that are down, by the port of this host: on a public server some always are, and one
/// line for all of them is enough.
#[derive(Default)]
pub(super) struct Down(BTreeMap<PortSpaceKey, (Moment, u32, StallEvidence)>);

impl Down {
    pub(super) fn add(&mut self, judged: &Judged<'_>) {
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

    pub(super) fn findings(self, context: &Context<'_>) -> Vec<Finding> {
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
