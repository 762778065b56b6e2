use super::*;

const KEEP: Duration = Duration::from_secs(60);
const S: u64 = 1_000_000_000;

fn stalled(port: u16, rtos: u32) -> Stalled {
    Stalled {
        connection: FourTuple {
            initiator_port: port,
            responder_port: 80,
            ..FourTuple::default()
        },
        role: Role::Initiator,
        point: Point::Wire,
        netns: 0,
        opened: None,
        since: Moment(S),
        heard: None,
        how: How::Unacked,
        rtos,
        probes: 0,
        unacked: 100,
        waiting: 0,
        is_full_size: false,
        is_answered: false,
        is_used: true,
        settings: Settings::default(),
        process: None,
    }
}

fn look(stalls: &mut Stalls, second: u64, found: &[Stalled], established: u64) {
    look_told(stalls, second, (found, &[]), established);
}

fn look_told(
    stalls: &mut Stalls,
    second: u64,
    found: (&[Stalled], &[Recovered]),
    established: u64,
) {
    let totals = Totals {
        opens: established,
        established,
        ..Totals::default()
    };
    stalls.take(Moment(second * S), found, KEEP, |_, _| Counted {
        totals,
        lately: totals,
        since: totals,
    });
}

#[test]
fn an_attempt_counts_after_a_newer_connection_only() {
    let mut stalls = Stalls::default();
    let key = stalled(1, 0).space();
    let known =
        |stalls: &Stalls| -> Known { stalls.get(&key).unwrap().live().next().unwrap().clone() };
    look(&mut stalls, 2, &[stalled(1, 2)], 10);
    look(&mut stalls, 3, &[stalled(1, 3)], 10);
    assert_eq!(known(&stalls).newer_since, None);
    look(&mut stalls, 4, &[stalled(1, 4)], 11);
    assert!(!known(&stalls).tried_since(), "it may have been before");
    look(&mut stalls, 5, &[stalled(1, 4)], 12);
    assert!(!known(&stalls).tried_since());
    look(&mut stalls, 6, &[stalled(1, 5)], 12);
    let known = known(&stalls);
    assert!(known.tried_since());
    assert_eq!(known.newer_since, Some(Moment(4 * S)));
    let totals = Totals {
        opens: 12,
        established: 12,
        ..Totals::default()
    };
    assert_eq!(known.since_then(&totals), (2, 2));
}

/// A capture tells of each that got through, also of one that stands still again by the next look.
#[test]
fn who_got_through_counts_once() {
    let again = Stalled {
        since: Moment(2 * S + S / 4),
        ..stalled(1, 3)
    };
    let told = Recovered::of(&stalled(1, 3)).unwrap();
    let mut stalls = Stalls::default();
    look(&mut stalls, 2, &[stalled(1, 3)], 10);
    look_told(&mut stalls, 4, (std::slice::from_ref(&again), &[told]), 10);
    let group = stalls.get(&again.space()).unwrap();
    assert_eq!(group.live().next().unwrap().path.repeated, 1);
}

/// What was lost got through between the two looks, and the next segment is lost again.
#[test]
fn what_was_sent_since_is_another_stall() {
    let mut stalls = Stalls::default();
    let again = Stalled {
        since: Moment(2 * S + S / 4),
        ..stalled(1, 3)
    };
    look(&mut stalls, 2, &[stalled(1, 3)], 10);
    look(&mut stalls, 4, std::slice::from_ref(&again), 10);
    let group = stalls.get(&again.space()).unwrap();
    let known = group.live().next().unwrap();
    assert_eq!(known.stalled.since, again.since);
    assert_eq!(known.in_vain, 2, "the latest is on its way");
    // What it survived is what the path loses.
    assert_eq!((known.path.repeated, known.path.lost), (1, 1));
    // The estimate of the same one may be a little earlier or later.
    let later = Stalled {
        since: again.since + Duration::from_millis(40),
        ..again.clone()
    };
    look(&mut stalls, 5, &[later], 10);
    let group = stalls.get(&again.space()).unwrap();
    let known = group.live().next().unwrap();
    assert_eq!((known.stalled.since, known.in_vain), (again.since, 3));
}

#[test]
fn connections_that_stall_at_one_time_confirm_each_other() {
    let together = |ports: std::ops::Range<u16>| {
        let mut stalls = Stalls::default();
        let probes = |n| {
            let probes = Stalled {
                how: How::Silent,
                probes: n,
                ..stalled(0, 0)
            };
            let each = ports.clone().map(move |port| Stalled {
                connection: stalled(port, 0).connection,
                ..probes.clone()
            });
            each.collect::<Vec<_>>()
        };
        for (second, n) in [(2, 1), (3, 2), (4, 2)] {
            look(&mut stalls, second, &probes(n), 5);
        }
        let group = stalls.get(&stalled(1, 0).space()).unwrap();
        group.live().map(|known| known.together).fold(0.0, f64::max)
    };
    let alone = together(1..2);
    assert!((1e-3..UNLIKELY).contains(&alone), "{alone}");
    assert!(together(1..3) < 1e-4, "{}", together(1..3));
    assert!((together(1..3) - alone * alone).abs() < 1e-12);
}

#[test]
fn what_is_over_is_remembered_for_a_while_and_not_without_end() {
    let mut stalls = Stalls::default();
    let key = stalled(1, 0).space();
    look(&mut stalls, 2, &[stalled(1, 3), stalled(2, 3)], 0);
    look(&mut stalls, 3, &[stalled(2, 4)], 0);
    let group = stalls.get(&key).unwrap();
    assert_eq!((group.live().count(), group.over().count()), (1, 1));
    // It stalls again.
    look(&mut stalls, 4, &[stalled(1, 1), stalled(2, 4)], 0);
    assert_eq!(stalls.get(&key).unwrap().over().count(), 0);
    look(&mut stalls, 5, &[], 0);
    assert_eq!(stalls.all().count(), 0);
    assert_eq!(stalls.get(&key).unwrap().over().count(), 2);
    look(&mut stalls, 70, &[], 0);
    assert!(stalls.get(&key).is_none());
    for second in 100..120 {
        let many: Vec<Stalled> = (0..200)
            .map(|n| stalled(second as u16 * 200 + n, 3))
            .collect();
        look(&mut stalls, second, &many, 0);
        let over: usize = stalls.all.values().map(|g| g.over.len()).sum();
        assert!(over <= OVER, "{over}");
    }
}
