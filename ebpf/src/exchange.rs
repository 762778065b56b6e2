//! Sizes and latencies of the responses on connections that this host opened and whose content cannot be
//! read: see [`tuplewatch_common::exchange`]. Only where a rule asks for it.

use aya_ebpf::{bindings::__sk_buff, helpers::bpf_ktime_get_ns, programs::TcContext};
use tuplewatch_common::{
    address::{FourTuple, Role},
    exchange::{Exchange, Piece},
    segment::{self, ACK, FIN, Located, RST, SYN},
};

use crate::{
    layout::EXCHANGE_SETS,
    maps::{EXCHANGE_TAGS, EXCHANGES, HOOKED_GUEST, WORK},
    packet::{hooked, unpack},
    skb::{Linear, Packet as _},
    socket::{self, Kernel},
    stalled,
    ways::{self, Tags, WAYS},
};

/// Whether the segment may change anything here. Switched off, this is a constant, and the verifier removes
/// what follows from it.
#[inline(always)]
pub fn concerns(at: &Located) -> bool {
    EXCHANGE_SETS.load() != 0 && (at.payload_len > 0 || at.flags & (SYN | FIN | RST) != 0)
}

/// Takes a segment. With its symbol it is a global function of BTF, which the verifier looks through once by
/// itself instead of anew for each way that leads here.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn exchange_take(
    skb: *mut __sk_buff,
    packed: u64,
    payload_len: u32,
    egress: u32,
) -> i32 {
    let ctx = TcContext::new(skb);
    let at = unpack(packed, payload_len);
    let Some(work) = WORK.get_ptr_mut(0) else {
        return 0;
    };
    // SAFETY: a per-CPU value: see its declaration.
    let segment = unsafe { &mut (*work).segment };
    if segment::read_into(&Linear::new(&ctx), &at, segment).is_err() {
        return 0;
    }
    let hash = segment.tuple.hash();
    // SAFETY: `skb` is the program's own context.
    let (ifindex, ingress_ifindex) = unsafe { ((*skb).ifindex, (*skb).ingress_ifindex) };
    if at.flags & SYN != 0 {
        // On the node's side of a pod's veth, what comes in is what the pod sends.
        let leaves = (egress != 0) != (hooked(ifindex) == HOOKED_GUEST);
        let seen_before = egress != 0 && ingress_ifindex != 0 && hooked(ingress_ifindex) != 0;
        if at.flags & ACK == 0
            && leaves
            && !seen_before
            && let Some(exchange) = place(hash)
        {
            let role = Role::Initiator as u8;
            exchange.begin(hash, &segment.tuple, role, ifindex, now_ns());
        }
        return 0;
    }
    let Some((tags, way, exchange)) = find(hash) else {
        return 0;
    };
    if !exchange.is_seen_at(ifindex) {
        return 0;
    }
    let piece = Piece {
        from_lower: segment.tuple.initiator_is_lower(),
        flags: at.flags,
        seq: segment.seq,
        payload_len,
    };
    exchange.take(&piece, now_ns());
    if exchange.is_closed() && exchange.all.count == 0 {
        free(tags, way, exchange);
    }
    0
}

/// Begins with a connection that is older than the agent, its local end as if it were the initiator: it is, unless
/// somebody listens on its port. Sockets of namespaces that are not watched do not count, though their packets may pass here.
#[inline(always)]
pub fn older(sk: Kernel, tuple: &FourTuple) {
    if EXCHANGE_SETS.load() == 0 {
        return;
    }
    let netns = socket::netns(sk);
    if !socket::is_watched(netns) || stalled::is_listening(netns, tuple.initiator_port) {
        return;
    }
    let hash = tuple.hash();
    if find(hash).is_none()
        && let Some(exchange) = place(hash)
    {
        exchange.begin_older(hash, tuple, Role::Initiator as u8, now_ns());
    }
}

/// What is said on the connection can be read, and is judged by that.
#[inline(always)]
pub fn forget(hash: u64) {
    if EXCHANGE_SETS.load() != 0
        && let Some((tags, way, exchange)) = find(hash)
    {
        free(tags, way, exchange);
    }
}

#[inline(always)]
fn now_ns() -> u64 {
    // The exact time: what comes at once comes in less than a tick.
    // SAFETY: a helper without arguments.
    unsafe { bpf_ktime_get_ns() }
}

#[inline(always)]
fn free(tags: &mut Tags, way: u32, exchange: &mut Exchange) {
    exchange.hash = 0;
    ways::set(tags, way, 0);
}

#[inline(always)]
fn set_of(hash: u64) -> u32 {
    hash as u32 & EXCHANGE_SETS.load().wrapping_sub(1)
}

#[inline(always)]
fn at<'a>(number: u32, way: u32) -> Option<&'a mut Exchange> {
    let set = EXCHANGES.get_ptr_mut(number)?.cast::<Exchange>();
    // SAFETY: array values are valid as long as the program, and a set has so many places. Packets of one
    // connection are processed one after the other except in races that can at worst lose one count.
    Some(unsafe { &mut *set.add(ways::within(way)) })
}

/// What is known of a connection, and where.
#[inline(always)]
fn find<'a>(hash: u64) -> Option<(&'a mut Tags, u32, &'a mut Exchange)> {
    let number = set_of(hash);
    let tags = EXCHANGE_TAGS.get_ptr_mut(number)?;
    // SAFETY: array values are valid as long as the program.
    let tags = unsafe { &mut *tags };
    let way = ways::find(tags, ways::tag(hash))?;
    let exchange = at(number, way)?;
    (exchange.hash == hash).then_some((tags, way, exchange))
}

/// A place for a connection that is being opened: its own, a free one, or that of the one that matters least.
#[inline(always)]
fn place<'a>(hash: u64) -> Option<&'a mut Exchange> {
    let number = set_of(hash);
    let tags = EXCHANGE_TAGS.get_ptr_mut(number)?;
    // SAFETY: array values are valid as long as the program.
    let tags = unsafe { &mut *tags };
    let way = match ways::find(tags, ways::tag(hash)).or_else(|| ways::free(tags, 0)) {
        Some(way) => way,
        // What a global function gives is any number to the verifier.
        None => ways::barrier(exchange_least(number).into()) as u32 & (WAYS - 1),
    };
    ways::set(tags, way, ways::tag(hash));
    at(number, way)
}

/// The exchange of a full set that matters least; a global function like [`exchange_take`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn exchange_least(number: u32) -> u32 {
    let Some(set) = EXCHANGES.get_ptr(number) else {
        return 0;
    };
    // SAFETY: array values are valid as long as the program.
    ways::least(unsafe { &*set }, Exchange::weight)
}
