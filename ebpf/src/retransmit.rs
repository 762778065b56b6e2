//! `tcp_retransmit_skb`: SYNs and data sent again by local sockets.

use aya_ebpf::{macros::raw_tracepoint, programs::RawTracePointContext};
use tuplewatch_common::observe::Tables as _;

use crate::{
    layout::{ABSENT, ICSK_RETRANSMITS, SKC_STATE},
    opened,
    socket::{Kernel, SYN_SENT, argument},
    stalled::{TIMEOUTS, stalled_look},
    tables::{Maps, with_space},
};

/// Arguments: `struct sock *sk, struct sk_buff *skb` (since 6.17 also `int err`).
#[raw_tracepoint(tracepoint = "tcp_retransmit_skb")]
pub fn tcp_retransmit_skb(ctx: RawTracePointContext) -> i32 {
    let sk = Kernel(argument::<0>(&ctx));
    if ICSK_RETRANSMITS.load() != ABSENT && sk.read::<u8>(&ICSK_RETRANSMITS) >= TIMEOUTS {
        stalled_look(sk.0, 0);
    }
    // Sockets accepted here are not in this map: what they repeat is counted on the wire.
    let Some(socket) = opened::find(sk) else {
        return 0;
    };
    let opening = sk.read::<u8>(&SKC_STATE) as u32 == SYN_SENT;
    with_space(socket.opener.space, |p| {
        Maps::add(
            if opening {
                &mut p.syn_retransmits
            } else {
                &mut p.data_retransmits
            },
            1,
        );
    });
    0
}
