//! The flight recorder: headers of the segments that open and end connections, and of all segments of
//! those that the user side asks for, in a ring that is simply overwritten. The user side reads it when
//! an alert fires.

use aya_ebpf::{
    bindings::__sk_buff,
    cty::c_void,
    helpers::{bpf_get_smp_processor_id, bpf_ktime_get_ns},
    programs::TcContext,
};
use tuplewatch_common::{
    recorder::{ETHERNET, LEAVES, SNAP_LEN, places},
    segment::{self, FIN, Located, RST, SYN},
};

use crate::{
    http,
    layout::{RECORDER_SECTIONS, RECORDER_SLOTS},
    maps::{RECORDER, RECORDER_NEXT, RECORDER_WATCHED, WORK},
    packet,
    skb::{Linear, Packet},
};

/// Whether anything is recorded. A constant for the verifier, which drops what depends on it.
#[inline(always)]
pub fn is_on() -> bool {
    RECORDER_SLOTS.load() != 0
}

/// What is kept with a packet: which way it went, whether it begins with an Ethernet header, and the
/// status of a failed response.
#[inline(always)]
pub fn marks<const EGRESS: bool>(at: &Located, status: u16) -> u32 {
    let way = if EGRESS { LEAVES } else { 0 };
    let link = if at.ip_offset == 0 { 0 } else { ETHERNET };
    (way | link) as u32 | (status as u32) << 16
}

/// Keeps a segment that neither opens nor ends its connection, if all of that one's are asked for.
///
/// As long as none is asked for this is a look at one word, and with the recorder off nothing. The rare
/// segment whose headers are not linear is not kept: three functions deep the stack would be too large.
#[inline(always)]
pub fn watch<const EGRESS: bool>(ctx: &TcContext, at: &Located) {
    if is_on()
        && at.flags & (SYN | FIN | RST) == 0
        && RECORDER_WATCHED.get(0).is_some_and(|left| *left != 0)
    {
        keep_watched::<EGRESS>(ctx, http::pack(at));
    }
}

#[inline(never)]
fn keep_watched<const EGRESS: bool>(ctx: &TcContext, packed: u64) -> u32 {
    let at = packet::unpack(packed, 0);
    let Some(work) = WORK.get_ptr_mut(0) else {
        return 0;
    };
    // SAFETY: a per-CPU value: see its declaration. On the stack there is no room for the tuple.
    let tuple = unsafe { &mut (*work).segment.tuple };
    if segment::read_tuple(&Linear::new(ctx), &at, tuple).is_err() {
        return 0;
    }
    let hash = tuple.hash();
    let [first, second] = places(hash);
    let is_at = |place| RECORDER_WATCHED.get(place).is_some_and(|h| *h == hash);
    if !is_at(first) && !is_at(second) {
        return 0;
    }
    if let Some(left) = RECORDER_WATCHED.get_ptr_mut(0) {
        // SAFETY: array values are valid as long as the program. Two CPUs at once may count one less.
        unsafe { *left = (*left).saturating_sub(1) };
    }
    let marks = marks::<EGRESS>(&at, 0);
    // SAFETY: a helper without arguments.
    let now_ns = unsafe { bpf_ktime_get_ns() };
    keep::<Linear>(ctx.skb.skb, (packed >> 48) as u32, marks, now_ns)
}

/// Keeps the first `len` bytes of a packet, which must be headers and not none. A function of its own for the sake of
/// the stack.
#[inline(never)]
pub fn keep<'a, B: Packet<'a>>(skb: *mut __sk_buff, len: u32, marks: u32, now_ns: u64) -> u32 {
    let Some(next) = RECORDER_NEXT.get_ptr_mut(0) else {
        return 0;
    };
    // Each CPU has its own section, so that no two write to one place.
    // SAFETY: a helper without arguments.
    let section = unsafe { bpf_get_smp_processor_id() } & (RECORDER_SECTIONS.load() - 1);
    let slots = RECORDER_SLOTS.load();
    // SAFETY: a per-CPU value; a packet hook is not interrupted by another one on its CPU.
    let n = unsafe { *next };
    let Some(place) = RECORDER.get_ptr_mut(section * slots + (n as u32 & (slots - 1))) else {
        return 0;
    };
    // SAFETY: as above.
    unsafe { *next = n + 1 };
    // One less, so that one comparison of the register that the helper's argument is made of gives both
    // bounds. Of two (not 0, not too long) the compiler proves or moves one, and the verifier is lost.
    let last = opaque((len as u64).wrapping_sub(1).min(SNAP_LEN as u64 - 1));
    if last >= SNAP_LEN as u64 {
        return 0;
    }
    // SAFETY: array values are valid as long as the program. The user side, which reads at the same time,
    // leaves out a place whose time is 0 or changes meanwhile.
    unsafe {
        (&raw mut (*place).time_ns).write_volatile(0);
        let to = (&raw mut (*place).bytes).cast::<c_void>();
        if B::load(skb, 0, to, last as u32 + 1) != 0 {
            return 0;
        }
        (*place).ifindex = (*skb).ifindex;
        (*place).wire_len = (*skb).len;
        (*place).len = last as u16 + 1;
        (*place).flags = marks as u16;
        (*place).status = (marks >> 16) as u16;
        (&raw mut (*place).time_ns).write_volatile(now_ns);
    }
    1
}

/// The same number, of which the compiler knows nothing: it would drop the check that the verifier
/// needs.
#[inline(always)]
fn opaque(mut value: u64) -> u64 {
    // SAFETY: the register keeps its value.
    unsafe {
        core::arch::asm!("{0} = {0}", inout(reg) value, options(nomem, nostack));
    }
    value
}
