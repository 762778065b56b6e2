//! The packet hook: traffic control classifiers on the chosen interfaces, both directions.
//!
//! A program returns `TCX_NEXT` (which is `TC_ACT_UNSPEC` for clsact), always: any other value would
//! end the chain and switch off a CNI's policy behind us.

use aya_ebpf::{
    helpers::{bpf_ktime_get_coarse_ns, bpf_ktime_get_ns},
    macros::classifier,
    programs::TcContext,
};
use tuplewatch_common::{
    address::{FourTuple, Role},
    bytes::Bytes,
    histogram::SEARCH_UNIT_NS,
    observe::{Seen, Tables as _, Work, is_plain_data, observe, record},
    record::Global,
    segment::{
        self, ACK, ETHERNET_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6, FIN, Located, NotSegment, RST, SYN,
    },
};

use crate::{
    exchange, http,
    layout::COARSE_CLOCK,
    maps::{ASK_HOOKED, HOOKED, HOOKED_FAST, HOOKED_FAST_LEN, HOOKED_GUEST, SEARCH, WORK, count},
    recorder,
    skb::{Anywhere, FromNetwork, Linear, Packet, is_network_at_data},
    tables::{Maps, with_space},
};

/// `TCX_NEXT`.
const NEXT: i32 = -1;

/// Ingress of an Ethernet interface.
#[classifier]
pub fn tuplewatch_in(ctx: TcContext) -> i32 {
    packet::<ETHERNET_LEN, false>(&ctx);
    NEXT
}

/// Egress of an Ethernet interface.
#[classifier]
pub fn tuplewatch_out(ctx: TcContext) -> i32 {
    packet::<ETHERNET_LEN, true>(&ctx);
    NEXT
}

/// Ingress of an interface without link-layer header.
#[classifier]
pub fn tuplewatch_ip_in(ctx: TcContext) -> i32 {
    packet::<0, false>(&ctx);
    NEXT
}

/// Egress of an interface without link-layer header.
#[classifier]
pub fn tuplewatch_ip_out(ctx: TcContext) -> i32 {
    packet::<0, true>(&ctx);
    NEXT
}

/// What every packet costs: data and the pure ACKs of connections that are not being opened are out
/// at once, without a helper call.
#[inline(always)]
fn packet<const HEADER: usize, const EGRESS: bool>(ctx: &TcContext) {
    if HEADER == 0 && !is_network_at_data(ctx) {
        return not_linear::<FromNetwork, 0, EGRESS>(ctx);
    }
    let bytes = Linear::new(ctx);
    match locate::<_, HEADER>(ctx, &bytes) {
        Ok(at) => {
            if http::may_begin_message(&at)
                && let Some(ports) = http::worth_a_look(&bytes, &at)
            {
                let (skb, packed) = (ctx.skb.skb, http::pack(&at));
                if EGRESS {
                    http::speak_out(skb, packed, at.payload_len, ports);
                } else {
                    http::speak_in(skb, packed, at.payload_len, ports);
                }
            }
            if exchange::concerns(&at) {
                exchange::exchange_take(ctx.skb.skb, pack(&at), at.payload_len, EGRESS as u32);
            }
            recorder::watch::<EGRESS>(ctx, &at);
            if is_plain_data(at.flags, at.payload_len) {
                return;
            }
            if at.flags & (SYN | FIN | RST) == 0 && !is_being_opened(&bytes, &at) {
                return;
            }
            located::<Linear, EGRESS>(ctx, pack(&at), at.payload_len);
        }
        Err(NotSegment::Truncated) => not_linear::<Anywhere, HEADER, EGRESS>(ctx),
        Err(NotSegment::Fragment) => count(Global::Fragments),
        Err(NotSegment::Malformed) => count(Global::Unreadable),
        Err(NotSegment::NotIp | NotSegment::NotTcp) => {}
    }
}

/// Something that shares the segment's hash is being opened.
#[inline(always)]
fn is_being_opened<B: Bytes>(bytes: &B, at: &Located) -> bool {
    let mut tuple = FourTuple::default();
    segment::read_tuple(bytes, at, &mut tuple).is_ok()
        && Maps.opening(tuple.hash()).is_some_and(|n| *n != 0)
}

/// A function of its own, as is [`not_linear`], so that the stacks of both do not add up.
#[inline(never)]
fn located<'a, B: Packet<'a>, const EGRESS: bool>(
    ctx: &'a TcContext,
    packed: u64,
    payload_len: u32,
) {
    take::<B, EGRESS>(ctx, &B::new(ctx), &unpack(packed, payload_len));
}

/// What was located, in a register: finding it again would cost as much as a look-up.
#[inline(always)]
pub fn pack(at: &Located) -> u64 {
    at.tcp_offset as u64
        | (at.ip_offset as u64) << 16
        | (at.flags as u64) << 32
        | (at.is_v6 as u64) << 40
}

/// The inverse. The masks tell the verifier what the offsets can be.
#[inline(always)]
pub fn unpack(packed: u64, payload_len: u32) -> Located {
    Located {
        tcp_offset: packed as usize & 0x3fff,
        ip_offset: (packed >> 16) as usize & 0x1f,
        flags: (packed >> 32) as u8,
        is_v6: packed >> 40 & 1 != 0,
        payload_len,
        payload_offset: 0,
    }
}

/// The headers are not in the linear part, or not where the data begin.
#[inline(never)]
fn not_linear<'a, B: Packet<'a>, const HEADER: usize, const EGRESS: bool>(ctx: &'a TcContext) {
    let bytes = B::new(ctx);
    match locate::<_, HEADER>(ctx, &bytes) {
        Ok(at) if !is_plain_data(at.flags, at.payload_len) => {
            located::<B, EGRESS>(ctx, pack(&at), at.payload_len);
        }
        Ok(_) | Err(NotSegment::NotIp | NotSegment::NotTcp) => {}
        Err(NotSegment::Fragment) => count(Global::Fragments),
        Err(NotSegment::Malformed | NotSegment::Truncated) => count(Global::Unreadable),
    }
}

#[inline(always)]
fn locate<B: Bytes, const HEADER: usize>(
    ctx: &TcContext,
    bytes: &B,
) -> Result<Located, NotSegment> {
    // SAFETY: `skb` is the program's own context.
    let ethertype = u16::from_be(unsafe { (*ctx.skb.skb).protocol } as u16);
    if HEADER == 0 && ethertype != ETHERTYPE_IPV4 && ethertype != ETHERTYPE_IPV6 {
        return Err(NotSegment::NotIp);
    }
    segment::locate(bytes, ethertype, HEADER)
}

/// Takes a segment that may concern a table.
#[inline(always)]
fn take<'a, B: Packet<'a>, const EGRESS: bool>(ctx: &TcContext, bytes: &B, at: &Located) {
    let Some(work) = WORK.get_ptr_mut(0) else {
        return;
    };
    // SAFETY: a per-CPU value: see its declaration.
    let work = unsafe { &mut *work };
    if segment::read_into(bytes, at, &mut work.segment).is_err() {
        count(Global::Unreadable);
        return;
    }
    let is_syn = at.flags & (SYN | ACK) == SYN;
    // SAFETY: `skb` is the program's own context.
    let (ifindex, ingress_ifindex) =
        unsafe { ((*ctx.skb.skb).ifindex, (*ctx.skb.skb).ingress_ifindex) };
    let seen_before = EGRESS && is_syn && ingress_ifindex != 0 && hooked(ingress_ifindex) != 0;
    // On the node's side of a pod's veth, what comes in is what the pod sends.
    let leaves = EGRESS != (is_syn && hooked(ifindex) == HOOKED_GUEST);
    // What needs the time only for the memory of former connections, whose steps are 67 ms, takes that
    // of the latest tick: reading the clock costs more than most of what follows.
    let is_coarse = at.flags & (FIN | RST) != 0 || at.flags & (SYN | ACK) == SYN | ACK;
    let now_ns = if is_coarse {
        coarse_ns()
    } else {
        // SAFETY: a helper without arguments.
        unsafe { bpf_ktime_get_ns() }
    };
    let seen = Seen {
        now_ns,
        ifindex,
        syn_role: if leaves {
            Role::Initiator
        } else {
            Role::Responder
        },
        seen_before,
    };
    if recorder::is_on()
        && let Some(word) = bytes.u16(at.tcp_offset + 12)
    {
        let end = at.tcp_offset as u32 + (word as u32 >> 12) * 4;
        recorder::keep::<B>(ctx.skb.skb, end, recorder::marks::<EGRESS>(at, 0), now_ns);
    }
    observe(&mut Maps, work, &seen);
    if EGRESS && is_syn {
        note_search(work, now_ns);
    }
}

/// The time of the latest tick; the exact time where the kernel does not tell that, and where the flight
/// recorder puts it beside others.
#[inline(always)]
pub fn coarse_ns() -> u64 {
    if COARSE_CLOCK.load() == 1 && !recorder::is_on() {
        // SAFETY: a helper without arguments.
        unsafe { bpf_ktime_get_coarse_ns() }
    } else {
        // SAFETY: as above.
        unsafe { bpf_ktime_get_ns() }
    }
}

/// What is known of an interface, 0 for nothing.
#[inline(always)]
pub fn hooked(ifindex: u32) -> u8 {
    let Some(entry) = HOOKED_FAST.get(ifindex & (HOOKED_FAST_LEN - 1)) else {
        return 0;
    };
    if *entry == ASK_HOOKED {
        // SAFETY: the value is copied at once.
        return unsafe { HOOKED.get(ifindex) }.map_or(0, |v| *v);
    }
    if entry >> 8 == ifindex as u64 {
        *entry as u8
    } else {
        0
    }
}

/// The first SYN of an open whose connect() began on this CPU: how long the search for a port took.
#[inline(always)]
fn note_search(work: &Work, now_ns: u64) {
    let segment = &work.segment;
    let Some(note) = SEARCH.get_ptr_mut(0) else {
        return;
    };
    // SAFETY: a per-CPU value; connect() and the egress of its SYN run one after the other.
    let note = unsafe { &mut *note };
    let r = &segment.tuple.responder;
    if note.started_ns == 0
        || note.responder_port != segment.tuple.responder_port as u32
        || note.responder != u32::from_ne_bytes([r[12], r[13], r[14], r[15]])
    {
        return;
    }
    let took = now_ns - note.started_ns;
    note.started_ns = 0;
    with_space(work.space_of_syn(), |p| {
        record::<Maps>(&mut p.port_search, took, SEARCH_UNIT_NS);
    });
}
