//! What set-associative tables need besides [`tuplewatch_common::ways`]: which CPU this is, and how a tag
//! is written.

use aya_ebpf::helpers::bpf_get_smp_processor_id;
use tuplewatch_common::ways;

pub use tuplewatch_common::ways::{Tags, WAYS, find, tag};

/// A free place, if there are more than `spare`; see [`ways::free`].
#[inline(always)]
pub fn free(tags: &Tags, spare: u32) -> Option<u32> {
    // SAFETY: a helper without arguments.
    ways::free(tags, unsafe { bpf_get_smp_processor_id() }, spare)
}

/// Writes a tag, and nothing but it: its neighbour in the same number may be written by another CPU.
#[inline(always)]
pub fn set(tags: &mut Tags, way: u32, tag: u32) {
    let tags = (&raw mut *tags).cast::<u32>();
    // SAFETY: a set has this many tags; the target is little-endian, so they lie in order.
    unsafe { *tags.add(within(way)) = tag }
}

/// A place as an index that every verifier accepts.
///
/// The compiler knows that a place is below [`WAYS`] and would drop a mask in plain Rust; verifiers up to Linux 6.1 have
/// forgotten it, because the number was on the stack in between.
#[inline(always)]
pub fn within(way: u32) -> usize {
    let mut way = u64::from(way);
    // SAFETY: it changes nothing but the number.
    unsafe {
        core::arch::asm!("{way} &= {mask}", way = inout(reg) way, mask = const WAYS - 1, options(pure, nomem, nostack));
    }
    way as usize
}
