//! The state machine of one connection being opened.

use crate::{
    address::FourTuple,
    memory::Former,
    record::SpaceRef,
    segment::{ACK, FIN, RST, SYN, Segment},
    seq,
};

/// A connection being opened: from its first SYN to the outcome.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Handshake {
    /// [`FourTuple::hash`] of the connection: with [`INITIATOR_IS_LOWER`] it says which one it is.
    pub hash: u64,
    /// Time of the first SYN in nanoseconds.
    pub first_ns: u64,
    /// Time of the latest SYN.
    pub last_ns: u64,
    /// Initial sequence number of the initiator.
    pub isn: u32,
    /// Initial sequence number of the responder, once [`Handshake::is_syn_acked`].
    pub responder_isn: u32,
    /// Acknowledgement number of the latest bare ACK.
    pub bare_ack: u32,
    /// The interface whose packets move this record; the same packets on another one do not.
    pub ifindex: u32,
    /// Age of the former connection on this four-tuple at the SYN, in milliseconds.
    pub former_age_ms: u32,
    /// The port space, once it is known.
    pub space: SpaceRef,
    /// SYNs seen, on all ports that a NAT gave this open.
    pub syns: u16,
    /// Bare ACKs that answered them.
    pub bare_acks: u16,
    /// Payload of the SYN (TCP Fast Open, RFC 7413).
    pub syn_payload: u16,
    /// A [`crate::address::Role`].
    pub role: u8,
    /// A [`Former`]: the former connection on this four-tuple.
    pub former: u8,
    /// [`SYN_ACKED`], [`UNHEALED`], [`MAYBE_DUPLICATE`], [`UNCOUNTED`], [`STRANGER`],
    /// [`INITIATOR_IS_LOWER`], [`RESET`].
    pub flags: u8,
    /// Always zero.
    pub pad: [u8; 7],
}

/// A place in the table of connections being opened; the state fills one cache line.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pending {
    /// The connection's state.
    pub handshake: Handshake,
    /// The connection itself, of an [`UNCOUNTED`] open only, whose port space may have to be looked
    /// for once more; of any other one [`Handshake::space`] says enough.
    pub tuple: FourTuple,
}

/// A SYN-ACK that acknowledges the SYN was seen.
pub const SYN_ACKED: u8 = 1;
/// A second bare ACK with the same number came: the RST did not reach the responder.
pub const UNHEALED: u8 = 2;
/// The SYN may be a late duplicate of the one that opened the connection remembered on this
/// four-tuple; only the answer tells.
pub const MAYBE_DUPLICATE: u8 = 4;

/// The open is not in the counters of a port space yet: there was none, or it may be a duplicate.
pub const UNCOUNTED: u8 = 8;
/// When the record was made nobody knew a port space of the open: floods and scans are made of these,
/// so only a part of the table is theirs.
pub const STRANGER: u8 = 16;
/// [`FourTuple::initiator_is_lower`] of the connection.
pub const INITIATOR_IS_LOWER: u8 = 32;
/// The initiator has answered the latest bare ACK by RST.
pub const RESET: u8 = 64;

/// What a segment meant for a [`Handshake`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing.
    None,
    /// The same SYN again.
    Retransmit,
    /// A SYN with another initial sequence number: the initiator has given up the former one.
    Replaced,
    /// The first SYN-ACK.
    SynAck,
    /// The handshake is complete.
    Established,
    /// A bare ACK answered the SYN.
    BareAck {
        /// It is the first one that repeats its number: the RST that should have cleared the former
        /// connection did not arrive.
        unhealed_now: bool,
    },
    /// The SYN was a late duplicate of one accepted before.
    DuplicateSyn,
    /// RST from the responder.
    Refused,
    /// RST from the initiator that answers a bare ACK; the SYN will come again.
    ResetAfterBareAck,
    /// RST from the initiator that ends the attempt.
    Abandoned,
}

impl Handshake {
    /// Copies field by field: assigned as a whole it would be a call of `memmove` in eBPF, which copies
    /// by bytes.
    #[inline(always)]
    pub const fn copy_from(&mut self, other: &Self) {
        let Self {
            hash,
            first_ns,
            last_ns,
            isn,
            responder_isn,
            bare_ack,
            ifindex,
            former_age_ms,
            space,
            syns,
            bare_acks,
            syn_payload,
            role,
            former,
            flags,
            pad: _,
        } = *other;
        self.hash = hash;
        self.first_ns = first_ns;
        self.last_ns = last_ns;
        self.isn = isn;
        self.responder_isn = responder_isn;
        self.bare_ack = bare_ack;
        self.ifindex = ifindex;
        self.former_age_ms = former_age_ms;
        self.space = space;
        self.syns = syns;
        self.bare_acks = bare_acks;
        self.syn_payload = syn_payload;
        self.role = role;
        self.former = former;
        self.flags = flags;
    }

    /// A SYN-ACK was seen.
    #[inline(always)]
    #[must_use]
    pub const fn is_syn_acked(&self) -> bool {
        self.flags & SYN_ACKED != 0
    }

    /// The former connection on this four-tuple.
    #[inline(always)]
    #[must_use]
    pub const fn former(&self) -> Former {
        Former::from_u8(self.former)
    }

    /// Whether a segment comes from the initiator.
    #[inline(always)]
    #[must_use]
    pub fn is_from_initiator(&self, segment: &Segment) -> bool {
        segment.tuple.initiator_is_lower() == (self.flags & INITIATOR_IS_LOWER != 0)
    }

    /// A SYN on a four-tuple that already has this record.
    #[inline(always)]
    pub fn on_syn(&mut self, segment: &Segment, now_ns: u64) -> Step {
        if segment.seq != self.isn {
            return Step::Replaced;
        }
        self.syns = self.syns.saturating_add(1);
        self.last_ns = now_ns;
        Step::Retransmit
    }

    /// A segment from the responder.
    #[inline(always)]
    pub fn on_responder(&mut self, segment: &Segment) -> Step {
        let (flags, ack) = (segment.flags, segment.ack);
        // With Fast Open the responder may acknowledge the SYN alone or its data too.
        let acceptable = seq::within(
            ack,
            self.isn.wrapping_add(1),
            self.isn
                .wrapping_add(1)
                .wrapping_add(u32::from(self.syn_payload)),
        );
        if flags & RST != 0 {
            // Before the SYN-ACK the initiator drops a RST without ACK (RFC 9293 section 3.10.7.3).
            let obeyed = if flags & ACK == 0 {
                self.is_syn_acked()
            } else {
                acceptable
            };
            return if obeyed { Step::Refused } else { Step::None };
        }
        if flags & (SYN | ACK) == SYN | ACK {
            if !acceptable || self.is_syn_acked() {
                return Step::None;
            }
            self.flags |= SYN_ACKED;
            self.responder_isn = segment.seq;
            return Step::SynAck;
        }
        // A bare ACK has neither payload nor FIN: those are the former connection's own leftovers.
        if flags & (SYN | ACK | FIN) != ACK
            || segment.payload_len != 0
            || self.is_syn_acked()
            || acceptable
        {
            return Step::None;
        }
        if self.flags & MAYBE_DUPLICATE != 0 && seq::after(ack, self.isn) {
            return Step::DuplicateSyn;
        }
        let repeats = self.bare_acks > 0 && self.bare_ack == ack;
        let unhealed_now = repeats && self.flags & UNHEALED == 0;
        if unhealed_now {
            self.flags |= UNHEALED;
        }
        self.bare_acks = self.bare_acks.saturating_add(1);
        self.bare_ack = ack;
        self.flags &= !RESET;
        Step::BareAck { unhealed_now }
    }

    /// A segment without SYN from the initiator.
    #[inline(always)]
    pub fn on_initiator(&mut self, segment: &Segment) -> Step {
        if segment.flags & RST != 0 {
            return self.on_initiator_reset(segment.seq);
        }
        if self.is_syn_acked()
            && segment.flags & ACK != 0
            && seq::after(segment.ack, self.responder_isn)
        {
            return Step::Established;
        }
        Step::None
    }

    /// Before the SYN-ACK an initiator only sends RST in answer to a segment, with the number that this acknowledges
    /// (RFC 9293 section 3.10.7.3): a bare ACK, or one that the former connection still sends, such as its FIN.
    #[inline(always)]
    fn on_initiator_reset(&mut self, seq: u32) -> Step {
        if self.is_syn_acked() {
            return Step::Abandoned;
        }
        if self.bare_acks > 0 && seq == self.bare_ack {
            if self.flags & RESET != 0 {
                return Step::None;
            }
            self.flags |= RESET;
            return Step::ResetAfterBareAck;
        }
        let end = self.isn.wrapping_add(1);
        let end = end.wrapping_add(u32::from(self.syn_payload));
        if seq::within(seq, self.isn, end) {
            Step::Abandoned
        } else {
            Step::None
        }
    }

    /// How long after its latest SYN an unanswered open is given up by us: longer than the next
    /// retransmission of every known schedule would take. Linux doubles the gap (so the next one is
    /// at most as long as all before plus a second) or, since 6.5, first repeats it.
    #[inline(always)]
    #[must_use]
    pub const fn patience_ns(&self) -> u64 {
        2 * self.last_ns.saturating_sub(self.first_ns) + 3_000_000_000
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;
    use crate::address::v4_mapped;
    use proptest::prelude::*;

    fn tuple() -> FourTuple {
        FourTuple {
            initiator: v4_mapped([10, 0, 0, 1]),
            responder: v4_mapped([10, 0, 0, 2]),
            responder_port: 80,
            initiator_port: 1234,
            pad: 0,
        }
    }

    fn segment(flags: u8, seq: u32, ack: u32) -> Segment {
        Segment {
            tuple: tuple(),
            flags,
            seq,
            ack,
            payload_len: 0,
            payload_offset: 54,
        }
    }

    fn opened(isn: u32) -> Handshake {
        Handshake {
            isn,
            syns: 1,
            ..Handshake::default()
        }
    }

    #[test]
    fn three_way() {
        let mut h = opened(u32::MAX);
        assert_eq!(h.on_responder(&segment(SYN | ACK, 500, 0)), Step::SynAck);
        assert_eq!(
            h.on_responder(&segment(SYN | ACK, 500, 0)),
            Step::None,
            "SYN-ACK again"
        );
        assert_eq!(h.on_initiator(&segment(ACK, 0, 501)), Step::Established);
    }

    #[test]
    fn bare_ack_heals_or_not() {
        let mut h = opened(1000);
        let bare = segment(ACK, 77, 4242);
        assert_eq!(
            h.on_responder(&bare),
            Step::BareAck {
                unhealed_now: false
            }
        );
        assert_eq!(
            h.on_initiator(&segment(RST, 4242, 0)),
            Step::ResetAfterBareAck
        );
        assert_eq!(h.on_syn(&segment(SYN, 1000, 0), 9), Step::Retransmit);
        assert_eq!(h.on_responder(&bare), Step::BareAck { unhealed_now: true });
        assert_eq!(
            h.on_responder(&bare),
            Step::BareAck {
                unhealed_now: false
            },
            "counted once"
        );
        assert_eq!(h.bare_acks, 3);
    }

    #[test]
    fn only_the_answer_to_a_bare_ack_is_one_and_once() {
        let mut h = opened(1000);
        let rst = |seq| segment(RST, seq, 0);
        // The FIN that the former connection sends again is answered by RST too.
        assert_eq!(h.on_initiator(&rst(4242)), Step::None);
        let bare = segment(ACK, 77, 4242);
        h.on_responder(&bare);
        assert_eq!(h.on_initiator(&rst(4241)), Step::None);
        assert_eq!(h.on_initiator(&rst(4242)), Step::ResetAfterBareAck);
        assert_eq!(h.on_initiator(&rst(4242)), Step::None);
        h.on_responder(&bare);
        assert_eq!(h.on_initiator(&rst(4242)), Step::ResetAfterBareAck);
        assert_eq!(h.on_initiator(&rst(1001)), Step::Abandoned);
    }

    #[test]
    fn what_is_not_a_bare_ack() {
        let mut h = opened(1000);
        h.syn_payload = 20;
        assert_eq!(
            h.on_responder(&segment(ACK, 1, 1001)),
            Step::None,
            "the SYN"
        );
        assert_eq!(
            h.on_responder(&segment(ACK, 1, 1021)),
            Step::None,
            "Fast Open data"
        );
        assert_eq!(
            h.on_responder(&segment(ACK | FIN, 1, 7)),
            Step::None,
            "a FIN sent again"
        );
        let data = Segment {
            payload_len: 1,
            ..segment(ACK, 1, 7)
        };
        assert_eq!(
            h.on_responder(&data),
            Step::None,
            "data of the former connection"
        );
        h.flags = MAYBE_DUPLICATE;
        assert_eq!(h.on_responder(&segment(ACK, 1, 1500)), Step::DuplicateSyn);
        assert_eq!(
            h.on_responder(&segment(ACK, 1, 900)),
            Step::BareAck {
                unhealed_now: false
            },
            "its number lies before the SYN: no duplicate"
        );
    }

    #[test]
    fn refused_and_abandoned() {
        assert_eq!(
            opened(5).on_responder(&segment(RST | ACK, 0, 6)),
            Step::Refused
        );
        assert_eq!(
            opened(5).on_responder(&segment(RST | ACK, 0, 99)),
            Step::None,
            "not ours"
        );
        assert_eq!(opened(5).on_initiator(&segment(RST, 6, 0)), Step::Abandoned);
    }

    proptest! {
        /// Whatever comes in whatever order, each outcome is reported from the right state only.
        #[test]
        fn any_interleaving(
            isn: u32,
            steps in prop::collection::vec((any::<bool>(), 0u8..0x40, any::<u32>(), -3i64..4, 0u32..3), 0..40),
        ) {
            let mut h = opened(isn);
            let (mut syn_acks, mut bare, mut unhealed) = (0, 0u16, 0);
            for (from_initiator, flags, seq, delta, payload_len) in steps {
                // Numbers near the interesting ones, round the wrap as it comes.
                let base = if from_initiator { h.responder_isn } else { isn };
                let ack = base.wrapping_add_signed(delta as i32);
                let s = Segment { payload_len, ..segment(flags, seq, ack) };
                let acked = h.is_syn_acked();
                let step = match (from_initiator, flags & (SYN | ACK)) {
                    (true, SYN) => h.on_syn(&s, 1),
                    (true, _) => h.on_initiator(&s),
                    (false, _) => h.on_responder(&s),
                };
                match step {
                    Step::SynAck => { syn_acks += 1; prop_assert!(!acked); }
                    Step::Established => prop_assert!(acked && seq::after(ack, h.responder_isn)),
                    Step::BareAck { unhealed_now } => {
                        bare += 1;
                        unhealed += u32::from(unhealed_now);
                        prop_assert!(!acked && ack != isn.wrapping_add(1) && payload_len == 0);
                    }
                    Step::DuplicateSyn => prop_assert!(false, "not flagged"),
                    _ => {}
                }
            }
            prop_assert!(syn_acks <= 1 && unhealed <= 1);
            prop_assert_eq!(h.bare_acks, bare);
        }
    }
}
