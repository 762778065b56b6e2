//! Any order of the segments of several connections.

use proptest::{collection::vec, prelude::*, sample::Index, test_runner::FileFailurePersistence};
use tuplewatch_common::{
    address::Role,
    record::PortSpace,
    segment::{ACK, FIN, RST, SYN, Segment},
};

use super::{
    outcomes::earn_a_port_space,
    support::{
        chaos,
        script::{Flow, Host, MS},
    },
};

fn config() -> ProptestConfig {
    ProptestConfig {
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("regressions"))),
        ..ProptestConfig::default()
    }
}

/// The life of one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    ThreeWay,
    SynAgain,
    Refused,
    Healed,
    HealedOnAnotherPort,
    Unhealed,
    NoListener,
    HalfOpen,
    Silent,
    SilentAgain,
}

const LIVES: [Life; 10] = [
    Life::ThreeWay,
    Life::SynAgain,
    Life::Refused,
    Life::Healed,
    Life::HealedOnAnotherPort,
    Life::Unhealed,
    Life::NoListener,
    Life::HalfOpen,
    Life::Silent,
    Life::SilentAgain,
];

impl Life {
    /// Its segments in their order, and whether the initiator sends them. Each life has two ports of
    /// its own.
    fn segments(self, number: u16, isn: u32, responder_isn: u32) -> Vec<(bool, Segment)> {
        let flow = Flow::from_port(2048 + 2 * number);
        let other = Flow::from_port(2049 + 2 * number);
        let old = isn.wrapping_sub(1000);
        let next = isn.wrapping_add(1);
        let responder_next = responder_isn.wrapping_add(1);
        let syn = (true, flow.there(SYN, isn, 0));
        let syn_ack = |f: &Flow| (false, f.back(SYN | ACK, responder_isn, next));
        let ack = |f: &Flow| (true, f.there(ACK, next, responder_next));
        let bare = (false, flow.back(ACK, 7, old));
        let rst = (true, flow.there(RST, old, 0));
        let refusal = (false, flow.back(RST | ACK, 0, next));
        match self {
            Self::ThreeWay => vec![
                syn,
                syn_ack(&flow),
                ack(&flow),
                (false, flow.back(FIN | ACK, responder_next, next)),
                (
                    true,
                    flow.there(FIN | ACK, next, responder_next.wrapping_add(1)),
                ),
            ],
            Self::SynAgain => vec![syn, syn, syn_ack(&flow), ack(&flow)],
            Self::Refused => vec![syn, refusal],
            Self::Healed => vec![syn, bare, rst, syn, syn_ack(&flow), ack(&flow)],
            Self::HealedOnAnotherPort => vec![
                syn,
                bare,
                rst,
                (true, other.there(SYN, isn, 0)),
                syn_ack(&other),
                ack(&other),
            ],
            Self::Unhealed => vec![syn, bare, rst, syn, bare, rst],
            Self::NoListener => vec![syn, bare, rst, syn, refusal],
            Self::HalfOpen => vec![syn, syn_ack(&flow), syn_ack(&flow)],
            Self::Silent => vec![syn],
            Self::SilentAgain => vec![syn, syn],
        }
    }

    /// What it adds to the port space.
    fn add_to(self, p: &mut PortSpace) {
        p.opens += 1;
        match self {
            Self::ThreeWay => p.established += 1,
            Self::SynAgain => {
                p.established += 1;
                p.syn_retransmits += 1;
            }
            Self::Refused => p.refused += 1,
            Self::HalfOpen => p.half_open += 1,
            Self::Silent => p.abandoned += 1,
            Self::SilentAgain => {
                p.syn_timeouts += 1;
                p.syn_retransmits += 1;
            }
            Self::Healed | Self::HealedOnAnotherPort => {
                p.established += 1;
                p.healed += 1;
            }
            Self::Unhealed => {
                p.syn_timeouts += 1;
                p.unhealed += 1;
                p.bare_acks += 1;
                p.rsts_after_bare_ack += 1;
            }
            Self::NoListener => {
                p.refused += 1;
                p.no_listener += 1;
            }
        }
        if matches!(
            self,
            Self::Healed | Self::HealedOnAnotherPort | Self::Unhealed | Self::NoListener
        ) {
            p.bare_acks += 1;
            p.rsts_after_bare_ack += 1;
            p.syn_retransmits += 1;
        }
    }
}

fn lives() -> impl Strategy<Value = Vec<(Life, u32, u32)>> {
    let number = || prop_oneof![any::<u32>(), u32::MAX - 3..=u32::MAX, 0u32..3];
    vec(
        (prop::sample::select(LIVES.as_slice()), number(), number()),
        1..12,
    )
}

/// Merges queues: each pick takes the next one of some queue that is not empty.
fn merge<T>(mut queues: Vec<Vec<T>>, picks: &[Index]) -> Vec<T> {
    for queue in &mut queues {
        queue.reverse();
    }
    let mut merged = Vec::new();
    let mut picks = picks.iter().cycle();
    loop {
        queues.retain(|q| !q.is_empty());
        let Some(pick) = picks.next().filter(|_| !queues.is_empty()) else {
            return merged;
        };
        let i = pick.index(queues.len());
        merged.extend(queues[i].pop());
    }
}

proptest! {
    #![proptest_config(config())]

    /// Connections side by side do not disturb each other: the counters are the sum of their lives.
    #[test]
    fn connections_interleaved(lives in lives(), picks in vec(any::<Index>(), 30..60)) {
        let queues = lives.iter().enumerate().map(|(i, (life, isn, responder_isn))| {
            // Numbers of their own, or a moved SYN would be taken for another's.
            let isn = isn.wrapping_add(i as u32 * 0x0010_0001);
            life.segments(i as u16, isn, *responder_isn)
        });
        let mut host = Host::new(Role::Initiator);
        for (_, segment) in merge(queues.collect(), &picks) {
            host.wait(MS).see(segment);
        }
        host.end();
        let mut expected = PortSpace::default();
        for (life, ..) in &lives {
            life.add_to(&mut expected);
        }
        let p = host.space(&Flow::from_port(0));
        expected.bare_acks_unknown = expected.bare_acks;
        // What depends on time and ports is tested elsewhere.
        let p = PortSpace {
            handshake_duration: [0; 20],
            ports_noted: 0,
            first_ports: [0; 16],
            ..p
        };
        prop_assert_eq!(p, expected);
    }

    /// Each direction in its order, the two against each other in any: what is counted hangs together,
    /// and every SYN is an open, a retransmission or a duplicate.
    #[test]
    fn directions_interleaved(
        lives in lives(),
        picks in vec(any::<Index>(), 30..60),
        at_responder: bool,
    ) {
        let queues = lives.iter().enumerate().flat_map(|(i, (life, isn, responder_isn))| {
            // Two lives share a four-tuple.
            let segments = life.segments(i as u16 / 2, *isn, *responder_isn);
            let (there, back): (Vec<_>, Vec<_>) = segments.into_iter().partition(|s| s.0);
            [there, back]
        });
        let role = if at_responder { Role::Responder } else { Role::Initiator };
        let mut host = Host::new(role);
        earn_a_port_space(&mut host, 1);
        let mut syns = 1;
        for (_, segment) in merge(queues.collect(), &picks) {
            syns += u64::from(segment.flags == SYN);
            host.wait(MS).see(segment);
        }
        host.end();
        let p = host.space(&Flow::from_port(0));
        if p.duplicate_syns == 0 {
            prop_assert_eq!(p.opens + p.syn_retransmits, syns);
        } else {
            prop_assert!(p.opens + p.syn_retransmits + p.duplicate_syns <= syns);
        }
    }

    /// Everything: lost, doubled and late segments, two interfaces, full tables, time that goes back.
    #[test]
    fn chaos_keeps_the_invariants(program in vec(any::<u8>(), 0..400)) {
        chaos::play(&program);
    }
}
