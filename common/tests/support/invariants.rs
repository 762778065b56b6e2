//! What must hold in the tables whatever went by.

use std::collections::HashMap;

use tuplewatch_common::{
    address::PortSpaceKey,
    handshake::{STRANGER, UNCOUNTED},
    record::{FIRST_PORTS, Global, PortSpace},
};

use super::tables::InMemory;

/// Opens that have come to an end, by outcome.
pub fn outcomes(p: &PortSpace) -> u64 {
    p.established + p.refused + p.syn_timeouts + p.abandoned + p.half_open
}

/// Holds between any two segments. Every open that a port space counts is pending, has exactly one
/// outcome, or is a counted loss; what is not counted at its SYN (no port space, or perhaps a late
/// duplicate) is counted together with its outcome or its first counted bare ACK.
///
/// # Panics
/// If it does not hold.
pub fn check(tables: &InMemory) {
    let mut per_slot = vec![0; tables.opening.len()];
    let mut pending: HashMap<PortSpaceKey, u64> = HashMap::new();
    for (hash, p) in &tables.handshakes {
        let h = &p.handshake;
        per_slot[tables.slot(*hash)] += 1;
        assert_eq!(*hash, h.hash);
        if h.flags & UNCOUNTED == 0 {
            let key = tables.key_of(h.space).expect("a counted open's port space");
            *pending.entry(key).or_default() += 1;
        } else {
            assert_eq!(p.tuple.hash(), *hash, "its port space may be asked for");
        }
        assert!(h.syns >= 1, "a record without a SYN: {h:?}");
    }
    assert_eq!(
        tables.opening, per_slot,
        "records per slot and the slots that count them"
    );
    let strangers = tables.handshakes.values();
    let strangers = strangers
        .filter(|p| p.handshake.flags & STRANGER != 0)
        .count() as u64;
    assert_eq!(tables.strangers, strangers, "records of strangers");
    for key in pending.keys() {
        assert!(
            tables.spaces.contains_key(key),
            "a counted open without a port space: {key:?}"
        );
    }
    for (key, p) in &tables.spaces {
        let pending = pending.get(key).copied().unwrap_or_default();
        let lost = tables.lost_opens.get(key).copied().unwrap_or_default();
        assert_eq!(
            p.opens,
            outcomes(p) + pending + lost,
            "opens = outcomes + pending {pending} + lost {lost}: {p:?}"
        );
        assert_eq!(
            p.bare_acks,
            p.bare_acks_closed + p.bare_acks_open + p.bare_acks_half_open + p.bare_acks_unknown,
            "every bare ACK is of one kind: {p:?}"
        );
        assert!(p.healed <= p.established, "{p:?}");
        assert!(p.reuse_accepted <= p.established, "{p:?}");
        assert!(p.no_listener <= p.refused, "{p:?}");
        let bare_acks = p.bare_acks + tables.global(Global::BareAcksWithoutPortSpace);
        assert!(p.healed <= bare_acks, "healed of what? {p:?}");
        assert!(p.unhealed <= bare_acks, "unhealed of what? {p:?}");
        assert_eq!(
            p.handshake_duration.iter().sum::<u64>(),
            p.established,
            "one duration for each: {p:?}"
        );
        assert!(
            p.reuse_interval.iter().sum::<u64>() <= p.opens + p.syn_retransmits,
            "at most one interval for each SYN: {p:?}"
        );
        assert_eq!(
            u64::from(p.ports_noted),
            p.established.min(FIRST_PORTS as u64),
            "{p:?}"
        );
        assert!(tables.ports(key).len() as u64 <= p.established, "{p:?}");
    }
}

/// Holds after [`InMemory::sweep_all`] at the end of time.
///
/// # Panics
/// If it does not hold.
pub fn check_settled(tables: &InMemory) {
    check(tables);
    assert!(tables.handshakes.is_empty(), "{:?}", tables.handshakes);
    assert!(tables.opening.iter().all(|n| *n == 0));
    assert_eq!(tables.strangers, 0);
    for (key, p) in &tables.spaces {
        let lost = tables.lost_opens.get(key).copied().unwrap_or_default();
        assert_eq!(p.opens, outcomes(p) + lost, "{p:?}");
    }
}
