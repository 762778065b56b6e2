//! `tcp_send_reset` and `tcp_receive_reset`: who resets whom, and the bare ACK as the socket sees it.

use aya_ebpf::{helpers::bpf_ktime_get_ns, macros::raw_tracepoint, programs::RawTracePointContext};
use tuplewatch_common::{
    address::{FourTuple, Role},
    observe::Tables as _,
    record::{Event, EventKind},
    segment::{ACK, FIN, RST, SYN},
};

use crate::{
    layout::{INET_SPORT, SKB_HEAD, SKB_TRANSPORT_HEADER, SKC_STATE, SND_UNA},
    maps::OPEN_SOCKETS,
    socket::{ESTABLISHED, FIN_WAIT1, Kernel, SYN_SENT, argument},
    tables::{Maps, emit, with_space},
};

/// Arguments: `const struct sock *sk, const struct sk_buff *skb` (since 6.10 also the reason; `sk`
/// and, for a RST of our own accord, `skb` may be null).
///
/// A socket in SYN_SENT that answers a pure ACK with RST (RFC 9293 section 3.10.7.3) has met a bare
/// ACK, even where no packet hook may be attached.
#[raw_tracepoint(tracepoint = "tcp_send_reset")]
pub fn tcp_send_reset(ctx: RawTracePointContext) -> i32 {
    let sk = Kernel(argument::<0>(&ctx));
    let skb = Kernel(argument::<1>(&ctx));
    if sk.0 == 0 {
        return 0;
    }
    let Some(socket) = OPEN_SOCKETS.get_ptr(sk.0) else {
        return 0;
    };
    // SAFETY: a map value stays valid while the program runs; it is copied at once.
    let socket = unsafe { *socket };
    let space = &socket.opener.space;
    let state = sk.read::<u8>(&SKC_STATE) as u32;
    if state != SYN_SENT {
        if state == ESTABLISHED || state == FIN_WAIT1 {
            with_space(space, false, |p| Maps::add(&mut p.resets_sent, 1));
        }
        return 0;
    }
    if skb.0 == 0 {
        return 0;
    }
    let header = skb.read::<u64>(&SKB_HEAD) + skb.read::<u16>(&SKB_TRANSPORT_HEADER) as u64;
    let flags = Kernel(header).read_at::<u8>(13);
    if flags & (SYN | RST | FIN | ACK) != ACK {
        return 0;
    }
    with_space(space, false, |p| {
        Maps::add(&mut p.bare_acks, 1);
        Maps::add(&mut p.bare_acks_unknown, 1);
        Maps::add(&mut p.rsts_after_bare_ack, 1);
    });
    // Until the SYN is acknowledged `snd_una` is its number (`tcp_connect_init`).
    emit(&Event {
        // SAFETY: a helper without arguments.
        time_ns: unsafe { bpf_ktime_get_ns() },
        tuple: FourTuple {
            initiator: space.initiator,
            responder: space.responder,
            responder_port: space.responder_port,
            initiator_port: u16::from_be(sk.read(&INET_SPORT)),
            pad: 0,
        },
        isn: sk.read(&SND_UNA),
        ack: u32::from_be(Kernel(header).read_at(8)),
        pid: socket.opener.pid,
        netns: space.netns,
        kind: EventKind::SocketBareAck as u8,
        role: Role::Initiator as u8,
        ..Event::default()
    });
    0
}

/// Arguments: `struct sock *sk`. Fires only for a RST that the socket accepts.
#[raw_tracepoint(tracepoint = "tcp_receive_reset")]
pub fn tcp_receive_reset(ctx: RawTracePointContext) -> i32 {
    let sk = Kernel(argument::<0>(&ctx));
    if sk.read::<u8>(&SKC_STATE) as u32 == SYN_SENT {
        // The answer to a SYN: `inet_sock_set_state` counts it as refused.
        return 0;
    }
    let Some(socket) = OPEN_SOCKETS.get_ptr(sk.0) else {
        return 0;
    };
    // SAFETY: a map value stays valid while the program runs.
    let space = unsafe { &(*socket).opener.space };
    with_space(space, false, |p| Maps::add(&mut p.resets_received, 1));
    0
}
