//! What set-associative tables need besides [`tuplewatch_common::ways`]: which CPU this is, how a tag is
//! written, and what goes where a set is full.

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

/// The place of a full set whose weight is the least.
#[inline(always)]
pub fn least<T>(set: &[T; WAYS as usize], weight: impl Fn(&T) -> u64) -> u32 {
    // The place stands in the lowest bits, so that one number is compared; the time left is in steps of
    // a millisecond.
    let mut least = u64::MAX >> 1;
    for (n, value) in (0..).zip(set) {
        let weight = weight(value) >> 20 << 4 | n;
        let ahead = weight.wrapping_sub(least);
        least = least.wrapping_add(ahead & barrier((ahead.cast_signed() >> 63).cast_unsigned()));
    }
    least as u32 & (WAYS - 1)
}

/// A number that the compiler knows nothing of: it must not see that something is a minimum (it would make
/// a branch of it, and the verifier would go both ways), nor drop a mask that the verifier needs.
#[inline(always)]
pub fn barrier(mut value: u64) -> u64 {
    // SAFETY: it changes nothing.
    unsafe {
        core::arch::asm!("{value} = {value}", value = inout(reg) value, options(pure, nomem, nostack));
    }
    value
}
