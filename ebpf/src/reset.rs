//! `tcp_send_reset` and `tcp_receive_reset`: who resets whom, and the bare ACK as the socket sees it.

use aya_ebpf::{
    helpers::{bpf_jiffies64, bpf_ktime_get_ns},
    macros::raw_tracepoint,
    programs::RawTracePointContext,
};
use tuplewatch_common::{
    address::{FourTuple, Role},
    handshake::INITIATOR_IS_LOWER,
    observe::Tables as _,
    record::{Event, EventKind, Global},
    segment::{ACK, FIN, RST, SYN},
};

use crate::{
    idle,
    layout::{
        ABSENT, HZ, INET_SPORT, LRCVTIME, LSNDTIME, SKB_HEAD, SKB_TRANSPORT_HEADER, SKC_STATE,
        SND_UNA,
    },
    maps::{EVENTS, count},
    opened,
    socket::{self, ESTABLISHED, FIN_WAIT1, Kernel, SYN_SENT, argument},
    tables::{Maps, emit, key_of, with_space},
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
    let Some(socket) = opened::find(sk) else {
        return 0;
    };
    let space = socket.opener.space;
    let state = sk.read::<u8>(&SKC_STATE) as u32;
    if state != SYN_SENT {
        if state == ESTABLISHED || state == FIN_WAIT1 {
            with_space(space, |p| Maps::add(&mut p.resets_sent, 1));
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
    with_space(space, |p| {
        Maps::add(&mut p.bare_acks, 1);
        Maps::add(&mut p.bare_acks_unknown, 1);
        Maps::add(&mut p.rsts_after_bare_ack, 1);
    });
    let (netns, tuple) = key_of(space);
    // Until the SYN is acknowledged `snd_una` is its number (`tcp_connect_init`).
    emit(&Event {
        // SAFETY: a helper without arguments.
        time_ns: unsafe { bpf_ktime_get_ns() },
        tuple: FourTuple {
            initiator_port: u16::from_be(sk.read(&INET_SPORT)),
            ..tuple
        },
        isn: sk.read(&SND_UNA),
        ack: u32::from_be(Kernel(header).read_at(8)),
        pid: socket.opener.pid,
        netns,
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
    if let Some(socket) = opened::find(sk) {
        with_space(socket.opener.space, |p| {
            Maps::add(&mut p.resets_received, 1);
        });
    }
    on_collision(sk);
    idle::on_reset(sk);
    0
}

/// If a SYN has met this connection and the RST is the answer to its bare ACK, says how long the
/// connection had been idle: one that was in use was hit by another one's SYN.
///
/// A function of its own for the sake of the stack.
#[inline(never)]
fn on_collision(sk: Kernel) {
    let hz = HZ.load();
    if LRCVTIME.load() == ABSENT || LSNDTIME.load() == ABSENT || hz == 0 {
        return;
    }
    let Some(local) = socket::tuple(sk) else {
        return;
    };
    let mut tables = Maps;
    let Some(pending) = tables.pending(local.hash()) else {
        return;
    };
    let handshake = &pending.handshake;
    if handshake.bare_acks == 0 {
        return;
    }
    // Times of sockets are the low half of jiffies.
    // SAFETY: a helper without arguments.
    let jiffies = unsafe { bpf_jiffies64() } as u32;
    let received = jiffies.wrapping_sub(sk.read(&LRCVTIME));
    let sent = jiffies.wrapping_sub(sk.read(&LSNDTIME));
    let idle = if received < sent { received } else { sent };
    let is_lower = handshake.flags & INITIATOR_IS_LOWER != 0;
    // Written where it goes: the stack has no room for it beside the connection.
    let Some(mut entry) = EVENTS.reserve::<Event>(0) else {
        count(Global::EventsLost);
        return;
    };
    let event = entry.as_mut_ptr();
    // SAFETY: the entry has room for an event, which is plain data; zeroes are one.
    unsafe {
        event
            .cast::<[u64; size_of::<Event>() / 8]>()
            .write([0; size_of::<Event>() / 8]);
        (*event).time_ns = bpf_ktime_get_ns();
        if local.initiator_is_lower() == is_lower {
            (*event).tuple = local;
        } else {
            (*event).tuple.initiator = local.responder;
            (*event).tuple.responder = local.initiator;
            (*event).tuple.initiator_port = local.responder_port;
            (*event).tuple.responder_port = local.initiator_port;
        }
        (*event).isn = handshake.isn;
        (*event).ack = handshake.bare_ack;
        (*event).former_age_ms = (idle as u64 * 1000 / hz as u64) as u32;
        (*event).syns = handshake.syns;
        (*event).bare_acks = handshake.bare_acks;
        (*event).kind = EventKind::CollisionReset as u8;
        (*event).role = handshake.role;
        (*event).former = handshake.former;
    }
    entry.submit(0);
}
