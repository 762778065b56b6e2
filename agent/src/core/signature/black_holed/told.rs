//! What is said of connections that get nothing through while new ones do.

use tuplewatch_common::address::{PortSpaceKey, Role};

use super::{Judged, get, with};
use crate::core::{
    black_hole::{StallConnection, StallEvidence},
    finding::{Confidence, Finding, RuledOut, Severity, Verdict},
    observation::place,
    signature::words::{count, seconds},
    stalled::{How, Known},
};

impl Judged<'_> {
    /// The finding, whether or not its condition is met at this moment.
    pub(super) fn told(&self) -> Finding {
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
        let longest = self.dead.iter().max_by_key(|known| known.in_vain);
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
                why: longest.map_or_else(String::new, |known| loss(known)),
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
}

/// Why it is not the loss that was measured.
fn loss(known: &Known) -> String {
    let path = &known.path;
    let sent = known.in_vain + u32::from(known.stalled.how == How::Unacked);
    let measured = match path.sent {
        0 => "nothing is known of loss on this path".to_owned(),
        n => format!(
            "{} of {} on this path were lost ({:.1} %)",
            path.lost,
            count(n, "other transmission"),
            path.share() * 100.0
        ),
    };
    format!(
        "one of them was sent {sent} times in a row in vain; {measured}, which explains {:.0e} such cases in a minute",
        known.together
    )
}

/// `3 new connections were`.
fn were(n: u64) -> String {
    let verb = if n == 1 { "was" } else { "were" };
    format!("{} {verb}", count(n, "new connection"))
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
