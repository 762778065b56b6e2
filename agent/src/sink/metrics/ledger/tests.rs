use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::sink::fixture;

fn key(n: u8) -> PortSpaceKey {
    PortSpaceKey {
        responder_port: n.into(),
        ..fixture::key()
    }
}

/// A port space with `opens` opens and as many handshakes in its third bucket.
fn space(n: u8, opens: u64) -> SpaceReport {
    let mut space = fixture::space(key(n));
    space.totals = Totals {
        opens,
        ..Totals::default()
    };
    space.handshake_duration = [0; BUCKETS];
    space.handshake_duration[2] = opens;
    space
}

fn overview(spaces: &[(u8, u64)], other: u64) -> Overview {
    Overview {
        spaces: spaces.iter().map(|&(n, opens)| space(n, opens)).collect(),
        other: Totals {
            opens: other,
            ..Totals::default()
        },
        ..Overview::default()
    }
}

/// Exported opens by port space, and of the rest.
fn export(ledger: &mut Ledger) -> (Vec<(u8, u64)>, u64) {
    let mut view = View::default();
    ledger.export(&mut view);
    let spaces = view.spaces.iter();
    (
        spaces
            .map(|s| (s.key.responder_port as u8, s.totals.opens))
            .collect(),
        view.other.opens,
    )
}

#[test]
fn the_first_overview_is_exported_as_it_is() {
    for delta in [false, true] {
        let mut ledger = Ledger::new(delta);
        ledger.update(&overview(&[(1, 10), (2, 5)], 3));
        assert_eq!(export(&mut ledger), (vec![(1, 10), (2, 5)], 3));
        let mut view = View::default();
        ledger.export(&mut view);
        assert_eq!(
            view.spaces[0].histograms[Which::HandshakeDuration as usize][2],
            10
        );
    }
}

#[test]
fn a_new_port_space_is_complete_from_its_first_packet() {
    let mut ledger = Ledger::new(false);
    ledger.update(&overview(&[(1, 10)], 3));
    ledger.update(&overview(&[(1, 12), (2, 7)], 3));
    assert_eq!(export(&mut ledger), (vec![(1, 12), (2, 7)], 3));
}

#[test]
fn one_that_enters_the_list_leaves_its_past_in_other() {
    let mut ledger = Ledger::new(false);
    ledger.update(&overview(&[(1, 10)], 100));
    // Port space 2 had 90 of the 100, and 5 more since.
    ledger.update(&overview(&[(1, 10), (2, 95)], 10));
    assert_eq!(export(&mut ledger), (vec![(1, 10), (2, 5)], 100));
    let mut view = View::default();
    ledger.export(&mut view);
    assert_eq!(
        view.spaces[1].histograms[Which::HandshakeDuration as usize][2],
        0
    );
    ledger.update(&overview(&[(1, 10), (2, 99)], 10));
    assert_eq!(export(&mut ledger), (vec![(1, 10), (2, 9)], 100));
}

#[test]
fn one_that_leaves_is_exported_once_more_and_goes_on_when_it_returns() {
    let mut ledger = Ledger::new(false);
    ledger.update(&overview(&[(1, 10)], 0));
    export(&mut ledger);
    ledger.update(&overview(&[(1, 12)], 0));
    ledger.update(&overview(&[], 13));
    assert_eq!(
        export(&mut ledger),
        (vec![(1, 12)], 1),
        "what it counted until it left"
    );
    ledger.update(&overview(&[], 15));
    assert_eq!(export(&mut ledger), (vec![], 3), "silent");
    ledger.update(&overview(&[(1, 20)], 0));
    assert_eq!(export(&mut ledger), (vec![(1, 17)], 3));
}

#[test]
fn with_delta_one_that_returns_starts_again() {
    let mut ledger = Ledger::new(true);
    ledger.update(&overview(&[(1, 10)], 0));
    export(&mut ledger);
    ledger.update(&overview(&[], 10));
    export(&mut ledger);
    ledger.update(&overview(&[(1, 14)], 0));
    assert_eq!(
        export(&mut ledger),
        (vec![(1, 4)], 0),
        "10 were sent before"
    );
}

#[test]
fn one_that_the_core_forgot_does_not_go_back() {
    let mut ledger = Ledger::new(false);
    ledger.update(&overview(&[(1, 10)], 0));
    ledger.update(&overview(&[], 10));
    ledger.update(&overview(&[(1, 2)], 10));
    assert_eq!(export(&mut ledger), (vec![(1, 12)], 0));
}

#[test]
fn memory_and_exports_are_bounded() {
    let mut ledger = Ledger::new(false);
    for round in 0..100u16 {
        let mut overview = overview(&[], 0);
        overview.spaces = (0..100)
            .map(|n| {
                let mut space = space(0, 1);
                space.key.responder_port = round * 100 + n;
                space
            })
            .collect();
        ledger.update(&overview);
        if round % 10 == 9 {
            let mut view = View::default();
            ledger.export(&mut view);
            assert!(view.spaces.len() <= MAX_EXPORTED, "{}", view.spaces.len());
        }
    }
    assert!(ledger.spaces.len() <= REMEMBERED + MAX_EXPORTED);
}

proptest! {
    /// Whatever enters and leaves the list: no series goes back, and their sum is what was counted.
    #[test]
    fn series_never_go_back_and_add_up(
        steps in prop::collection::vec(
            (prop::collection::vec(0u64..50, 6), prop::bits::u8::masked(0x3f), any::<bool>()),
            1..40,
        ),
    ) {
        let mut ledger = Ledger::new(false);
        let mut opens = [0u64; 6];
        let mut last: BTreeMap<u8, u64> = BTreeMap::new();
        let mut last_other = 0;
        for (more, listed, exports) in steps {
            for (opens, more) in opens.iter_mut().zip(&more) {
                *opens += more;
            }
            let (mut list, mut other) = (Vec::new(), 0);
            for (n, &opens) in opens.iter().enumerate() {
                if listed >> n & 1 == 1 { list.push((n as u8, opens)) } else { other += opens }
            }
            ledger.update(&overview(&list, other));
            if exports {
                let (spaces, other) = export(&mut ledger);
                for (n, value) in spaces {
                    prop_assert!(value >= last.get(&n).copied().unwrap_or(0));
                    prop_assert!(value <= opens[usize::from(n)]);
                    last.insert(n, value);
                }
                prop_assert!(other >= last_other);
                last_other = other;
                let sum: u64 = last.values().sum::<u64>() + other;
                prop_assert_eq!(sum, opens.iter().sum::<u64>());
            }
        }
    }
}
