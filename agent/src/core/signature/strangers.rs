//! Look-alikes that are not one port space: SYN floods and port scans.

use tuplewatch_common::address::{Address, Point, PortSpaceKey, Role};

use super::{
    Context,
    loss::{counter, grown},
    neighbours::Scan,
    words::{count, place},
};
use crate::core::{
    counters::CounterEvidence,
    finding::{Confidence, Evidence, Finding, Severity, Verdict},
    observation::ip,
    strangers::HalfOpen,
};

/// Everything of that kind on this host.
pub fn floods_and_scans(context: &Context<'_>) -> Vec<Finding> {
    let mut found = syn_floods(context);
    let scans = context.look.scans(context);
    found.extend(
        scans
            .iter()
            .map(|(scan, ports)| port_scan(context, scan, *ports)),
    );
    found
}

/// Many SYNs of no known port space, whose handshakes nobody completes: they pile up half open at a
/// listener, or are answered by cookies.
fn syn_floods(context: &Context<'_>) -> Vec<Finding> {
    let rules = &context.thresholds.strangers;
    let (now, window) = (context.now, context.thresholds.window);
    let syns = context.around.strangers.syns(now, window);
    if syns < rules.flood_syns {
        return Vec::new();
    }
    let own = context.around.latest.own_netns;
    let cookies = grown(context, &[own], |c| c.syncookies_sent);
    let mut found: Vec<Finding> = context
        .around
        .strangers
        .half_open()
        .filter(|(_, _, listener)| {
            // A busy listener has many handshakes on their way too, but far more that are complete.
            listener.sockets >= rules.flood_half_open
                && (listener.sockets * 4 >= listener.established || cookies.is_some())
        })
        .map(|(address, port, listener)| {
            let space = flooded(*address, port);
            let text = flood_text(&space, syns, listener);
            let counters = cookies.map(|of| counter("TcpExt SyncookiesSent", of));
            syn_flood(
                context,
                space,
                syns,
                listener.sockets.into(),
                counters,
                text,
            )
        })
        .collect();
    // Where no socket tells whose listener it is (a router, a recording), those given up still count.
    let abandoned = context.around.strangers.abandoned(now, window);
    if found.is_empty() && abandoned >= u64::from(rules.flood_half_open) {
        let space = flooded([0; 16], 0);
        let text = format!(
            "{}: {} of no known port space, and nobody completed {} handshakes among them",
            place(&space),
            count(syns, "SYN"),
            abandoned
        );
        found.push(syn_flood(context, space, syns, abandoned, None, text));
    }
    found
}

/// The place of a flood: many initiators, one listener.
fn flooded(responder: Address, port: u16) -> PortSpaceKey {
    PortSpaceKey {
        initiator: [0; 16],
        responder,
        responder_port: port,
        role: Role::Responder as u8,
        point: Point::Wire as u8,
        netns: 0,
    }
}

fn syn_flood(
    context: &Context<'_>,
    space: PortSpaceKey,
    syns: u64,
    half_open: u64,
    counters: Option<CounterEvidence>,
    text: String,
) -> Finding {
    let window = context.thresholds.window.as_secs_f64();
    let evidence = Evidence {
        half_open,
        window_opens: syns,
        window_seconds: window,
        opens_per_second: syns as f64 / window.max(1.0),
        counters: counters.into_iter().collect(),
        ..Evidence::default()
    };
    host_look_alike(
        context,
        Verdict::SynFlood,
        space,
        evidence,
        text,
        "SYN cookies (net.ipv4.tcp_syncookies=1) keep the listener open; filter the sources if they are \
         few.",
    )
}

fn flood_text(space: &PortSpaceKey, syns: u64, listener: &HalfOpen) -> String {
    format!(
        "{}: {} of no known port space; {} half open from {}, {} established: nobody completes these \
         handshakes",
        place(space),
        count(syns, "SYN"),
        count(listener.sockets.into(), "connection"),
        count(listener.initiators.into(), "address").replace("addresss", "addresses"),
        listener.established
    )
}

/// One host tries many ports of another, each a few times, and none lets it in.
fn port_scan(context: &Context<'_>, scan: &Scan, ports: u32) -> Finding {
    let space = PortSpaceKey {
        initiator: scan.initiator,
        responder: scan.responder,
        responder_port: 0,
        role: Role::Initiator as u8,
        point: scan.point,
        netns: scan.netns,
    };
    let text = format!(
        "{} tried {ports} ports of {} and none let it in: a port scan",
        ip(&scan.initiator),
        ip(&scan.responder)
    );
    let evidence = Evidence {
        opens: u64::from(ports),
        window_seconds: context.thresholds.window.as_secs_f64(),
        ..Evidence::default()
    };
    host_look_alike(
        context,
        Verdict::PortScan,
        space,
        evidence,
        text,
        "Nothing is short of ports: each port is tried a few times only.",
    )
}

fn host_look_alike(
    context: &Context<'_>,
    verdict: Verdict,
    space: PortSpaceKey,
    evidence: Evidence,
    summary: String,
    remedy: &str,
) -> Finding {
    Finding {
        verdict,
        space,
        since: context.now,
        severity: Severity::Info,
        confidence: Confidence::High,
        evidence,
        ruled_out: Vec::new(),
        opened_by: Vec::new(),
        summary,
        remedy: remedy.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use tuplewatch_common::address::v4_mapped;

    use super::*;
    use crate::core::signature::testing::{Script, client, key};

    fn half_open(h: &mut Script, last: u8, n: u32) {
        let from = PortSpaceKey {
            initiator: v4_mapped([198, 51, 100, last]),
            ..key(10, 8080, Role::Responder, Point::Socket)
        };
        h.sockets(from).opening = n;
    }

    #[test]
    fn a_flood_piles_up_half_open() {
        let mut host = Script::new();
        host.run(20, |h, _| {
            h.served(client(), 5);
            h.strangers(140);
            for last in 0..64 {
                half_open(h, last, 2);
            }
        });
        assert_eq!(host.verdicts(), [Verdict::SynFlood]);
        let finding = host.finding(Verdict::SynFlood);
        assert_eq!(finding.evidence.half_open, 128);
        assert!(
            finding.summary.contains("64 addresses"),
            "{}",
            finding.summary
        );
        assert!(finding.summary.starts_with("* → 203.0.113.10:8080"));
    }

    #[test]
    fn where_no_socket_is_here_the_given_up_handshakes_tell() {
        let mut host = Script::new();
        host.run(40, |h, second| {
            h.strangers(140);
            if second > 30 {
                h.strangers_half_open(140);
            }
        });
        let finding = host.finding(Verdict::SynFlood);
        assert_eq!(finding.evidence.half_open, 9 * 140);
        assert!(finding.summary.starts_with("* → "), "{}", finding.summary);
    }

    #[test]
    fn a_crowd_of_new_clients_is_no_flood() {
        let mut host = Script::new();
        host.sockets(key(10, 8080, Role::Responder, Point::Socket))
            .established = 2000;
        host.run(30, |h, _| {
            h.strangers(400);
            half_open(h, 1, 80);
        });
        assert_eq!(host.verdicts(), []);
    }

    #[test]
    fn a_scan_is_one_finding_and_not_one_for_each_port() {
        let mut host = Script::new();
        host.run(30, |h, second| {
            for port in 0..10 {
                let port = 1000 + 10 * second as u16 + port;
                let space = h.space(key(10, port, Role::Initiator, Point::Socket));
                space.opens += 1;
                if port.is_multiple_of(10) {
                    space.syn_retransmits += 1;
                    space.syn_timeouts += 1;
                } else {
                    space.refused += 1;
                }
            }
        });
        assert_eq!(host.verdicts(), [Verdict::PortScan]);
        let finding = host.finding(Verdict::PortScan);
        assert_eq!(finding.evidence.opens, 300);
        assert_eq!(finding.space.responder_port, 0);
    }

    #[test]
    fn many_services_of_one_host_are_no_scan() {
        let mut host = Script::new();
        host.run(30, |h, _| {
            for port in 0..200 {
                h.served(key(10, 1000 + port, Role::Initiator, Point::Socket), 1);
            }
        });
        assert_eq!(host.verdicts(), []);
    }
}
