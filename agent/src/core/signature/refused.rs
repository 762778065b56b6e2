//! Look-alike: the responder refuses.

use super::{
    Context, View,
    loss::within,
    neighbours::Scan,
    words::{count, place},
};
use crate::core::{
    episode::Symptom,
    finding::{Finding, Verdict},
};

/// Every SYN is answered by RST: the host is there and nothing listens.
///
/// Opens refused now and then beside others that get through are one dead backend of several, or an
/// application that probes; they are counted and not told.
pub fn server_down(context: &Context<'_>, view: &View<'_>) -> Option<Finding> {
    let rules = &context.thresholds.loss;
    let lately = within(context, view, rules.silence);
    // A RST after a bare ACK is told as `no_listener`, which says the same and more.
    let refused = lately.refused.saturating_sub(lately.no_listener);
    let is_down = refused >= rules.min_lost && lately.established == 0;
    let is_scanned = || {
        let scans = context.look.scans(context);
        scans.contains_key(&Scan::from(view.key))
    };
    (is_down && !is_scanned()).then(|| {
        let summary = format!(
            "{}: {} refused by RST in the last {:.0} s and none got through: nothing listens there",
            place(view.key),
            count(lately.refused, "open"),
            rules.silence.as_secs_f64()
        );
        view.look_alike(
            context,
            Verdict::ServerDown,
            Symptom::Refused,
            summary,
            "Start the service that should listen there.",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::signature::testing::{Script, opens_to};

    fn refused(h: &mut Script, responder: u8, n: u64) {
        let space = h.space(opens_to(responder));
        space.opens += n;
        space.refused += n;
    }

    #[test]
    fn a_closed_port_is_named_and_nothing_else() {
        let mut host = Script::new();
        host.run(30, |h, _| h.served(opens_to(10), 6));
        host.run(12, |h, _| refused(h, 10, 6));
        assert_eq!(host.verdicts(), [Verdict::ServerDown]);
        host.run(5, |h, _| h.served(opens_to(10), 6));
        assert_eq!(host.verdicts(), [], "it listens again");
    }

    #[test]
    fn time_wait_before_a_closed_port_has_its_own_name() {
        let mut host = Script::new();
        host.run(10, |h, _| {
            let space = h.space(opens_to(10));
            space.opens += 2;
            space.bare_acks += 2;
            space.bare_acks_closed += 2;
            space.rsts_after_bare_ack += 2;
            space.syn_retransmits += 2;
            space.refused += 2;
            space.no_listener += 2;
        });
        assert_eq!(host.verdicts(), [Verdict::NoListener]);
    }

    #[test]
    fn one_dead_backend_of_several_is_not_down() {
        let mut host = Script::new();
        host.run(60, |h, _| {
            h.served(opens_to(10), 4);
            refused(h, 10, 2);
        });
        assert_eq!(host.verdicts(), []);
    }
}
