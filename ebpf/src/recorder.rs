//! The flight recorder: headers of the segments that open and end connections, in a ring that is
//! simply overwritten. The user side reads it when an alert fires.

use aya_ebpf::{
    bindings::__sk_buff,
    cty::c_void,
    helpers::{bpf_get_smp_processor_id, generated::bpf_skb_load_bytes},
};
use tuplewatch_common::recorder::SNAP_LEN;

use crate::{
    layout::{RECORDER_SECTIONS, RECORDER_SLOTS},
    maps::{RECORDER, RECORDER_NEXT},
};

/// Whether anything is recorded. A constant for the verifier, which drops what depends on it.
#[inline(always)]
pub fn is_on() -> bool {
    RECORDER_SLOTS.load() != 0
}

/// Keeps the first `len` bytes of a packet, which must be headers. A function of its own for the sake of
/// the stack.
#[inline(never)]
pub fn keep(skb: *mut __sk_buff, len: u32, flags: u32, now_ns: u64) -> u32 {
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
    let len = opaque(len.min(SNAP_LEN as u32));
    // One check at a time, and each on the very register that the helper gets: otherwise the compiler
    // makes one comparison of a difference of both, from which the verifier learns nothing of `len`.
    if len > SNAP_LEN as u32 {
        return 0;
    }
    let len = opaque(len);
    if len == 0 {
        return 0;
    }
    // SAFETY: array values are valid as long as the program. The user side, which reads at the same time,
    // leaves out a place whose time is 0 or changes meanwhile.
    unsafe {
        (&raw mut (*place).time_ns).write_volatile(0);
        let to = (&raw mut (*place).bytes).cast::<c_void>();
        if bpf_skb_load_bytes(skb as *const c_void, 0, to, len) != 0 {
            return 0;
        }
        (*place).ifindex = (*skb).ifindex;
        (*place).wire_len = (*skb).len;
        (*place).len = len as u16;
        (*place).flags = flags as u16;
        (&raw mut (*place).time_ns).write_volatile(now_ns);
    }
    1
}

/// The same number, of which the compiler knows nothing: it would drop the check that the verifier
/// needs.
#[inline(always)]
fn opaque(mut value: u32) -> u32 {
    // SAFETY: the register keeps its value.
    unsafe {
        core::arch::asm!("{0} = {0}", inout(reg) value, options(nomem, nostack));
    }
    value
}
