//! Look-alikes at a listener of this host: SYNs arrive and its queues are full. At the initiator the
//! same shows as SYNs without answer, which cannot be told from others there.

use super::{
    Context, View,
    loss::{self, Loss, Words, counter, grown, namespaces},
    words::{count, place},
};
use crate::core::{
    counters::NetnsCounters,
    finding::{Confidence, Finding, Verdict},
};

/// The accept queue was full: the application does not call accept() fast enough, and the kernel drops
/// SYNs (`tcp_conn_request`).
pub fn accept_queue_overflow(
    context: &Context<'_>,
    view: &View<'_>,
    loss: &Loss,
) -> Option<Finding> {
    let (of, confidence) = at_listener(context, view, |c| c.listen_overflows)?;
    let summary = format!(
        "{}: {} of {} got no answer from this host and {} came again while its accept queue was full \
         ({})",
        place(view.key),
        loss.lost,
        count(loss.opens, "open"),
        count(loss.retransmits, "SYN"),
        count(of.1, "overflow")
    );
    let words = Words {
        verdict: Verdict::AcceptQueueOverflow,
        confidence,
        summary,
        remedy: "The application accepts too slowly or its backlog is too short: look at its event loop \
                 or worker pool, then at listen()'s backlog and net.core.somaxconn.",
    };
    let counters = vec![counter("TcpExt ListenOverflows", of)];
    Some(loss::look_alike(context, view, loss, words, counters))
}

/// The queue of half-open connections was full, and no cookies are sent.
pub fn syn_queue_overflow(context: &Context<'_>, view: &View<'_>, loss: &Loss) -> Option<Finding> {
    let full = at_listener(context, view, |c| c.req_q_full_drop)
        .map(|(of, sure)| ("TcpExt TCPReqQFullDrop", of, sure));
    // A listener drops SYNs for one more reason that it counts nowhere else: with cookies off the last
    // quarter of the queue is for hosts that are known.
    let quarter = || {
        let drops_only = |c: &NetnsCounters| {
            Some(
                c.listen_drops?
                    .saturating_sub(c.listen_overflows.unwrap_or(0)),
            )
        };
        at_listener(context, view, drops_only).map(|(of, sure)| ("TcpExt ListenDrops", of, sure))
    };
    let (name, of, confidence) = full.or_else(quarter)?;
    let summary = format!(
        "{}: {} of {} got no answer from this host and {} came again while its queue of half-open \
         connections was full ({} dropped)",
        place(view.key),
        loss.lost,
        count(loss.opens, "open"),
        count(loss.retransmits, "SYN"),
        count(of.1, "SYN")
    );
    let words = Words {
        verdict: Verdict::SynQueueOverflow,
        confidence,
        summary,
        remedy: "Turn on SYN cookies (net.ipv4.tcp_syncookies=1), raise net.ipv4.tcp_max_syn_backlog and \
                 the listener's backlog, and look at where the SYNs come from.",
    };
    let counters = vec![counter(name, of)];
    Some(loss::look_alike(context, view, loss, words, counters))
}

/// Where a listener's counter has grown, and how sure it is that this is the listener: an address on
/// the wire does not tell whose namespace the listener is in.
fn at_listener(
    context: &Context<'_>,
    view: &View<'_>,
    of: fn(&NetnsCounters) -> Option<u64>,
) -> Option<((u32, u64), Confidence)> {
    if !view.is_responder() {
        return None;
    }
    if let Some(found) = grown(context, &namespaces(context, view), of) {
        return Some((found, Confidence::High));
    }
    context
        .around
        .counters
        .each(context.now, context.thresholds.window)
        .filter_map(|(netns, growth)| Some((netns, of(&growth)?)))
        .filter(|(_, n)| *n > 0)
        .max_by_key(|(_, n)| *n)
        .map(|found| (found, Confidence::Medium))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::signature::testing::{Script, client, opens_to};

    fn overflowing(key: tuplewatch_common::address::PortSpaceKey) -> Script {
        let mut host = Script::new();
        (host.netns.listen_overflows, host.netns.listen_drops) = (Some(9), Some(9));
        host.run(30, |h, _| {
            h.served(key, 2);
            h.unanswered(key, 2, 6);
            *h.netns.listen_overflows.as_mut().unwrap() += 8;
            *h.netns.listen_drops.as_mut().unwrap() += 8;
        });
        host
    }

    #[test]
    fn a_full_accept_queue_is_seen_where_it_is() {
        let host = overflowing(client());
        assert_eq!(host.verdicts(), [Verdict::AcceptQueueOverflow]);
        let finding = host.finding(Verdict::AcceptQueueOverflow);
        assert_eq!(finding.evidence.counters[0].name, "TcpExt ListenOverflows");
        assert_eq!(finding.confidence, Confidence::High);
    }

    #[test]
    fn at_the_initiator_this_host_s_own_listeners_have_no_part_in_it() {
        let mut host = overflowing(opens_to(10));
        host.sockets(opens_to(10)).established = 1;
        assert_eq!(host.verdicts(), [Verdict::UnknownConnectLoss]);
    }

    #[test]
    fn a_full_syn_queue_has_counters_of_its_own() {
        for name in ["TcpExt TCPReqQFullDrop", "TcpExt ListenDrops"] {
            let mut host = Script::new();
            *host.netns.slot(name).unwrap() = Some(0);
            host.run(30, |h, _| {
                h.served(client(), 2);
                h.unanswered(client(), 2, 4);
                *h.netns.slot(name).unwrap().as_mut().unwrap() += 4;
            });
            assert_eq!(host.verdicts(), [Verdict::SynQueueOverflow]);
            let finding = host.finding(Verdict::SynQueueOverflow);
            assert_eq!(finding.evidence.counters[0].name, name);
        }
    }
}
