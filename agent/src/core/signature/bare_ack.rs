//! Look-alikes among what shows as a bare ACK.

use super::{Context, View, tuple_collision, words::place};
use crate::core::{
    episode::Symptom,
    finding::{Finding, Verdict},
};

/// The SYN was refused by RST after the bare ACK: without a listener TIME_WAIT answers any SYN, even
/// one that it would have let through (`tcp_v4_rcv`, `do_time_wait`).
pub fn no_listener(context: &Context<'_>, b: &View<'_>) -> Option<Finding> {
    let n = b.window.no_listener;
    (n > 0).then(|| {
        let text = format!(
            "{}: {n} SYNs met a TIME_WAIT and then a closed port: nothing listens there any more",
            place(b.key)
        );
        b.look_alike(
            context,
            Verdict::NoListener,
            Symptom::BareAck,
            text,
            "Start the service that should listen there.",
        )
    })
}

/// The former connection was never closed: its initiator has lost it (crash, power, a dropped
/// conntrack entry) and comes back on the same port (RFC 9293 section 3.5.1).
pub fn half_open_reconnect(context: &Context<'_>, b: &View<'_>) -> Option<Finding> {
    let n = b.window.bare_acks_open;
    let explained = tuple_collision::Collisions::of(context, b).is_collision();
    (n > 0 && n >= b.suspects && !explained).then(|| {
        let text = format!(
            "{}: {n} SYNs on {} ports met a connection that was never closed: the initiator lost \
             its state and reconnects from the same port",
            place(b.key),
            b.episode.map_or(0, |e| e.refused_ports.len())
        );
        b.look_alike(
            context,
            Verdict::HalfOpenReconnect,
            Symptom::BareAck,
            text,
            "Keep-alive at the responder clears dead connections sooner; an initiator that binds a \
             fixed source port should let the kernel choose.",
        )
    })
}

/// One or two ports again and again: somebody fixed them (NFS, rsh, `curl --local-port`).
pub fn fixed_port_reuse(context: &Context<'_>, b: &View<'_>) -> Option<Finding> {
    let (n, ports) = (b.suspects, b.suspect_ports);
    let again_and_again = b.suspect_opens >= 2 && b.suspect_opens >= 2 * ports;
    let few = ports > 0 && ports < context.thresholds.l4_reuse.min_ports;
    let explained = b.window.no_listener * 2 >= n || b.window.bare_acks_open >= n;
    (again_and_again && few && !explained).then(|| {
        let text = format!(
            "{}: {n} SYNs from {ports} source port(s) only met the TIME_WAIT of the connection \
             before: a fixed source port is used again too early",
            place(b.key)
        );
        b.look_alike(
            context,
            Verdict::FixedPortReuse,
            Symptom::BareAck,
            text,
            "Let the initiator's kernel choose the source port, or keep the connection open.",
        )
    })
}

/// The SYN met a handshake that was never completed: a flood or a scan hit the same port twice.
pub fn syn_recv_collision(context: &Context<'_>, b: &View<'_>) -> Option<Finding> {
    let n = b.window.bare_acks_half_open;
    (n > 0 && n > b.suspects).then(|| {
        let text = format!(
            "{}: {n} SYNs met a handshake that was never completed: half-open connections of a \
             flood or a scan",
            place(b.key)
        );
        b.look_alike(
            context,
            Verdict::SynRecvCollision,
            Symptom::BareAck,
            text,
            "Look at where the SYNs come from; SYN cookies protect the listener.",
        )
    })
}

/// The network delivered a SYN again that had been accepted before.
pub fn duplicate_syn(context: &Context<'_>, b: &View<'_>) -> Option<Finding> {
    let n = b.window.duplicate_syns;
    (n > 0).then(|| {
        let text = format!(
            "{}: {n} late duplicates of SYNs that were accepted before: the network duplicates or \
             delays packets",
            place(b.key)
        );
        b.look_alike(
            context,
            Verdict::DuplicateSyn,
            Symptom::BareAck,
            text,
            "Nothing to do at the two ends.",
        )
    })
}
