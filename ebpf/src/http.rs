//! HTTP/1 in data segments: one copy of their first bytes tells nearly all of them apart from messages.

use core::ffi::c_void;

use aya_ebpf::{
    helpers::{bpf_ktime_get_ns, generated::bpf_skb_load_bytes},
    programs::TcContext,
};
use tuplewatch_common::{
    address::Role,
    http::{First, HEAD, LINE, Line, Message, PEEK, Peek, first, kind},
    observe::{Seen, Spoken, observe_http},
    segment::{self, Located, RST, SYN},
};

use crate::{
    layout::HTTP_SNIFF,
    maps::{HEADS, HEADS_LEN, HOOKED_GUEST, WORK},
    packet::{self, hooked},
    skb::{Linear, Packet as _},
    tables::Maps,
};

/// Whether the segment may begin a message. Switched off, this is a constant, and the verifier removes
/// what follows from it.
#[inline(always)]
pub fn may_begin_message(at: &Located) -> bool {
    HTTP_SNIFF.load() == 1 && at.payload_len >= PEEK as u32 && at.flags & (SYN | RST) == 0
}

/// What was located, in a register, as [`packet::pack`] with the begin of the payload.
#[inline(always)]
pub fn pack(at: &Located) -> u64 {
    packet::pack(at) | (at.payload_offset as u64) << 48
}

/// Looks at the begin of a segment. A function of its own for the sake of the stack.
#[inline(never)]
pub fn speak<const EGRESS: bool>(ctx: &TcContext, packed: u64, payload_len: u32) {
    let offset = (packed >> 48) as u32;
    let mut peek: Peek = [0; PEEK / 8];
    // The payload of nearly every skb lies outside of its linear part.
    if load(ctx, offset, (&raw mut peek).cast(), PEEK as u32) != 0 {
        return;
    }
    let first = first(&peek);
    if matches!(first, First::Other) {
        return;
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
        // SAFETY: a helper without arguments.
        now_ns: unsafe { bpf_ktime_get_ns() },
        ifindex,
        syn_role: if leaves {
            Role::Initiator
        } else {
            Role::Responder
        },
        seen_before: false,
    };
    let spoken = Spoken {
        tuple: &segment.tuple,
        hash: segment.tuple.hash(),
        seq: segment.seq,
        message,
    };
    if observe_http(&mut Maps, &spoken, &seen) {
        keep_head(ctx, spoken.hash, offset, payload_len);
    }
}

/// The kind of the request that begins at `offset`.
#[inline(never)]
fn kind_at(ctx: &TcContext, offset: u32, payload_len: u32) -> u32 {
    let mut line: Line = [0; LINE / 8];
    let len = at_most::<{ LINE as u32 }>(payload_len);
    if load(ctx, offset, (&raw mut line).cast(), len) != 0 {
        return 0;
    }
    kind(&line)
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
    let len = if len > MOST { MOST } else { len };
    // An arithmetic that the compiler cannot drop: the bounds must stand in the register that goes to
    // the helper.
    let mut len = len as u64;
    // SAFETY: it changes nothing.
    unsafe {
        core::arch::asm!("{len} = {len}", len = inout(reg) len, options(nomem, nostack, preserves_flags));
    }
    if len == 0 || len > MOST as u64 {
        return 1;
    }
    len as u32
}

/// Copies bytes of the packet; 0 if there were as many.
#[inline(always)]
fn load(ctx: &TcContext, offset: u32, to: *mut c_void, len: u32) -> i64 {
    // SAFETY: `skb` is the program's own context; the callers have room for so many bytes, as the
    // verifier checks.
    unsafe { bpf_skb_load_bytes(ctx.skb.skb.cast(), offset, to, len) as i64 }
}
