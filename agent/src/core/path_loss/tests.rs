use tuplewatch_common::address::{FourTuple, v4_mapped};

use super::*;

/// Where the black hole begins that the default of `black_holed.max_chance` asks for.
const MAX: f64 = 1e-4;

/// So many opens, each of which sends its SYN until it is answered, where this share of the transmissions is
/// lost.
fn opens(n: u64, share: f64) -> PathLoss {
    let retransmits = (n as f64 * share / (1.0 - share)).round();
    PathLoss::of_opens(&Totals {
        opens: n,
        established: n,
        syn_retransmits: retransmits as u64,
        ..Totals::default()
    })
}

fn responder(last: u8, role: Role) -> PortSpaceKey {
    PortSpaceKey {
        responder: v4_mapped([203, 0, 113, last]),
        responder_port: 80,
        role: role as u8,
        ..PortSpaceKey::default()
    }
}

fn recovered(space: PortSpaceKey, rtos: u32) -> Recovered {
    let connection = FourTuple::default();
    Recovered {
        space,
        connection,
        rtos,
    }
}

#[test]
fn where_nothing_is_lost_five_in_vain_are_enough_however_little_is_known() {
    for n in (0..200).chain([1000, 100_000, 10_000_000]) {
        let path = opens(n, 0.0);
        assert!(path.chance(4) <= MAX, "{n}: {}", path.chance(4));
        assert!(path.chance_of_probes(5) <= MAX, "{n}");
    }
    assert!(opens(3, 0.0).chance(3) > MAX, "of a path that nobody knows");
    assert!(opens(300, 0.0).chance(3) <= MAX, "of one that is known");
    assert!(opens(3, 0.0).chance_of_probes(3) > MAX);
}

/// Whatever share is lost, and however often was tried: what that share explains is never called more than
/// chance.
#[test]
fn what_the_measured_share_explains_is_chance() {
    for percent in 1..=60 {
        let share = f64::from(percent) / 100.0;
        for n in [300, 3000, 30_000] {
            let path = opens(n, share);
            for repetitions in 0..30 {
                let expected = n as f64 * share.powf(f64::from(repetitions + 1));
                let chance = path.chance(repetitions);
                assert!(
                    expected < MAX || chance > MAX,
                    "{percent} %, {n}, {repetitions}: {chance} for {expected}"
                );
            }
        }
    }
}

/// … and it is not put off for longer than that share asks for: three more, where little of it is measured.
#[test]
fn what_it_does_not_explain_is_not() {
    for percent in 1..=40 {
        let share = f64::from(percent) / 100.0;
        for (n, more) in [(300, 3), (30_000, 1)] {
            let needed = (MAX / n as f64).ln() / share.ln();
            let path = opens(n, share);
            let chance = path.chance(needed.ceil() as u32 - 1 + more);
            assert!(chance <= MAX, "{percent} %, {n}: {needed}, {chance}");
        }
    }
}

#[test]
fn repetitions_of_other_connections_to_the_peer_count_for_a_minute() {
    let (space, other) = (responder(1, Role::Initiator), responder(2, Role::Initiator));
    let other_port = PortSpaceKey {
        responder_port: 81,
        ..space
    };
    let mut paths = Paths::default();
    let at = |second: u64| Moment(second * 1_000_000_000);
    // One time-out is nothing special, the kernel does not tell of it.
    let seen = [1, 2, 4].map(|rtos| recovered(other_port, rtos));
    paths.take(at(10), &seen);
    let none = Totals::default();
    let path = paths.loss(&space, &none);
    assert_eq!((path.repeated, path.sent, path.lost), (2, 4, 2));
    assert_eq!(path.share(), 0.5);
    assert_eq!(paths.loss(&other, &none), PathLoss::default());
    // The client's side of another client.
    let client = responder(1, Role::Responder);
    assert_eq!(paths.loss(&client, &none), PathLoss::default());
    paths.take(at(70), &[recovered(space, 2)]);
    assert_eq!(paths.loss(&space, &none).repeated, 3);
    paths.take(at(71), &[]);
    assert_eq!(paths.loss(&space, &none).repeated, 1);
    paths.take(at(131), &[]);
    assert!(paths.0.is_empty());
}

/// Two segments of others came as far as the one that is judged: nothing is special about it yet.
#[test]
fn what_others_survived_is_no_evidence() {
    let space = responder(1, Role::Initiator);
    let mut paths = Paths::default();
    paths.take(Moment(1), &[5, 6].map(|rtos| recovered(space, rtos)));
    let path = paths.loss(&space, &Totals::default());
    assert!(path.chance(5) > 0.05, "{}", path.chance(5));
    assert!(PathLoss::default().chance(5) < MAX);
}
