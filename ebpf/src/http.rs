//! HTTP/1 in data segments: one copy of their first bytes tells nearly all of them apart from messages.

use core::{ffi::c_void, mem::MaybeUninit};

use aya_ebpf::{bindings::__sk_buff, helpers::generated::bpf_skb_load_bytes, programs::TcContext};
use tuplewatch_common::{
    address::Role,
    bytes::Bytes,
    http::{First, HEAD, LINE, Line, Message, PEEK, Peek, first, kind},
    observe::{Seen, Spoken, observe_http},
    segment::{self, Located, RST, SYN},
};

use crate::{
    exchange,
    layout::{HTTP_SNIFF, LOOKS_LEN},
    maps::{HEADS, HEADS_LEN, HOOKED_GUEST, LOOKS, WORK},
    packet::{self, coarse_ns, hooked},
    recorder,
    skb::{Linear, Packet as _},
    tables::Maps,
};

/// Whether the segment may begin a message. Switched off, this is a constant, and the verifier removes
/// what follows from it.
#[inline(always)]
pub fn may_begin_message(at: &Located) -> bool {
    HTTP_SNIFF.load() == 1 && at.payload_len >= PEEK as u32 && at.flags & (SYN | RST) == 0
}

/// Data segments from one port to another that are looked at before they are taken for ones that do not
/// speak HTTP/1; one in so many is then looked at all the same.
const LOOKS_IN_VAIN: u32 = 64;
/// It speaks HTTP/1.
const SPEAKS: u32 = 2 * LOOKS_IN_VAIN;

/// Whether a segment is worth a look: `Some` ports of it. A look costs several times as much as this, and
/// most of what a host says is not HTTP/1 in clear.
///
/// An entry of [`LOOKS`] holds the two ports, in their order, and how many segments did not begin a message.
/// Connections of several hosts that have the same ports are most likely to the same service, and speak
/// alike; two pairs of ports that share an entry are looked at always.
#[inline(always)]
pub fn worth_a_look<B: Bytes>(bytes: &B, at: &Located) -> Option<u32> {
    let ports = bytes.u32(at.tcp_offset)?;
    let Some(entry) = looks(ports) else {
        return Some(ports);
    };
    let (whose, seen) = ((*entry >> 32) as u32, *entry as u32);
    if whose != ports {
        *entry = (ports as u64) << 32;
        return Some(ports);
    }
    if seen >= SPEAKS {
        return Some(ports);
    }
    let seen = seen + 1;
    let is_due = seen <= LOOKS_IN_VAIN || seen == SPEAKS;
    let seen = if seen == SPEAKS { LOOKS_IN_VAIN } else { seen };
    *entry = (ports as u64) << 32 | seen as u64;
    is_due.then_some(ports)
}

/// The entry of two ports. Of two CPUs that write to it at the same time one look is lost.
#[inline(always)]
fn looks<'a>(ports: u32) -> Option<&'a mut u64> {
    let spread = ports.wrapping_mul(0x9e37_79b9) >> 8;
    let entry = LOOKS.get_ptr_mut(spread & (LOOKS_LEN.load() - 1))?;
    // SAFETY: array values are valid as long as the program; it is one aligned word.
    Some(unsafe { &mut *entry })
}

/// What was located, in a register, as [`packet::pack`] with the begin of the payload.
#[inline(always)]
pub fn pack(at: &Located) -> u64 {
    packet::pack(at) | (at.payload_offset as u64) << 48
}

/// Looks at the begin of a segment that comes in. With its symbol it is a global function of BTF, which the
/// verifier looks through once by itself instead of anew for each way that leads here.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn speak_in(skb: *mut __sk_buff, packed: u64, payload_len: u32, ports: u32) -> i32 {
    speak::<false>(&TcContext::new(skb), packed, payload_len, ports);
    0
}

/// The same for one that leaves.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn speak_out(skb: *mut __sk_buff, packed: u64, payload_len: u32, ports: u32) -> i32 {
    speak::<true>(&TcContext::new(skb), packed, payload_len, ports);
    0
}

#[inline(always)]
fn speak<const EGRESS: bool>(ctx: &TcContext, packed: u64, payload_len: u32, ports: u32) {
    let offset = (packed >> 48) as u32;
    // Not cleared beforehand, which would be a call of `memset`.
    let mut peek = MaybeUninit::<Peek>::uninit();
    // The payload of nearly every skb lies outside of its linear part.
    if load(ctx, offset, peek.as_mut_ptr().cast(), PEEK as u32) != 0 {
        return;
    }
    // SAFETY: the helper has filled it.
    let first = first(unsafe { peek.assume_init_ref() });
    if matches!(first, First::Other) {
        return;
    }
    if let Some(entry) = looks(ports) {
        *entry = (ports as u64) << 32 | SPEAKS as u64;
    }
    let message = match first {
        First::Request => Message::Request {
            kind: kind_at(ctx, offset, payload_len),
        },
        First::Response { status } => Message::Response { status },
        First::Other => return,
    };
    let Some(work) = WORK.get_ptr_mut(0) else {
        return;
    };
    // SAFETY: a per-CPU value: see its declaration.
    let segment = unsafe { &mut (*work).segment };
    let at = packet::unpack(packed, payload_len);
    if segment::read_into(&Linear::new(ctx), &at, segment).is_err() {
        return;
    }
    // SAFETY: `skb` is the program's own context.
    let ifindex = unsafe { (*ctx.skb.skb).ifindex };
    // Who sends a request is the initiator; on the node's side of a pod's veth, what comes in is what the
    // pod sends.
    let leaves = EGRESS != (hooked(ifindex) == HOOKED_GUEST);
    let seen = Seen {
        // These are seconds, not milliseconds.
        now_ns: coarse_ns(),
        ifindex,
        syn_role: if leaves {
            Role::Initiator
        } else {
            Role::Responder
        },
        seen_before: false,
    };
    let hash = segment.tuple.hash();
    exchange::forget(hash);
    let spoken = Spoken {
        tuple: &segment.tuple,
        hash,
        seq: segment.seq,
        message,
    };
    if observe_http(&mut Maps, &spoken, &seen) {
        keep_head(ctx, spoken.hash, offset, payload_len);
        if recorder::is_on()
            && let Message::Response { status } = message
        {
            let marks = recorder::marks::<EGRESS>(&at, status);
            recorder::keep::<Linear>(ctx.skb.skb, offset, marks, seen.now_ns);
        }
    }
}

/// The kind of the request that begins at `offset`.
#[inline(never)]
fn kind_at(ctx: &TcContext, offset: u32, payload_len: u32) -> u32 {
    let mut line = MaybeUninit::<Line>::uninit();
    let words = line.as_mut_ptr().cast::<u64>();
    // Written one by one, or it would be a call of `memset`, which goes by bytes.
    for i in 0..LINE / 8 {
        // SAFETY: a line has so many words.
        unsafe { words.add(i).write_volatile(0) };
    }
    let len = at_most::<{ LINE as u32 }>(payload_len);
    if load(ctx, offset, words.cast(), len) != 0 {
        return 0;
    }
    // SAFETY: every word was written.
    kind(unsafe { line.assume_init_ref() })
}

/// Keeps the begin of a failed response for the user side.
#[inline(always)]
fn keep_head(ctx: &TcContext, hash: u64, offset: u32, payload_len: u32) {
    let Some(head) = HEADS.get_ptr_mut(hash as u32 & (HEADS_LEN - 1)) else {
        return;
    };
    // SAFETY: array values are valid as long as the program.
    let head = unsafe { &mut *head };
    let len = at_most::<{ HEAD as u32 }>(payload_len);
    head.hash = 0;
    if load(ctx, offset, head.bytes.as_mut_ptr().cast(), len) == 0 {
        head.len = len as u64;
        head.hash = hash;
    }
}

/// A length of at least 1 and at most `MOST`, as the verifier can see.
#[inline(always)]
fn at_most<const MOST: u32>(len: u32) -> u32 {
    // One less, so that one comparison gives both bounds: before 6.8 the verifier learns nothing from a
    // number not being 0.
    let most = MOST as u64 - 1;
    let mut last = (len as u64).wrapping_sub(1).min(most);
    // The bounds must stand in the register that goes to the helper, and the compiler, which knows them,
    // would drop the comparison.
    // SAFETY: it changes nothing.
    unsafe {
        core::arch::asm!("{last} = {last}", last = inout(reg) last, options(nomem, nostack, preserves_flags));
    }
    if last > most {
        return 1;
    }
    last as u32 + 1
}

/// Copies bytes of the packet; 0 if there were as many.
#[inline(always)]
fn load(ctx: &TcContext, offset: u32, to: *mut c_void, len: u32) -> i64 {
    // SAFETY: `skb` is the program's own context; the callers have room for so many bytes, as the
    // verifier checks.
    unsafe { bpf_skb_load_bytes(ctx.skb.skb.cast(), offset, to, len) as i64 }
}
