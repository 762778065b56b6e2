//! The flight recorder: headers of the segments that open and end connections, in a ring that is
//! simply overwritten. The user side reads it when an alert fires.

use aya_ebpf::{bindings::__sk_buff, cty::c_void, helpers::bpf_get_smp_processor_id};
use tuplewatch_common::recorder::SNAP_LEN;

use crate::{
    layout::{RECORDER_SECTIONS, RECORDER_SLOTS},
    maps::{RECORDER, RECORDER_NEXT},
    skb::Packet,
};

/// Whether anything is recorded. A constant for the verifier, which drops what depends on it.
#[inline(always)]
pub fn is_on() -> bool {
    RECORDER_SLOTS.load() != 0
}

/// Keeps the first `len` bytes of a packet, which must be headers and not none. A function of its own for the sake of
/// the stack.
#[inline(never)]
pub fn keep<'a, B: Packet<'a>>(skb: *mut __sk_buff, len: u32, flags: u32, now_ns: u64) -> u32 {
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
        (*place).flags = flags as u16;
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
