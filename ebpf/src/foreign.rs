//! Somebody else's programs, for the tests and benchmarks: a classifier that ends the chain with OK as
//! a CNI's would, and an empty one as the baseline of what any program costs.
#![no_std]
#![no_main]

use aya_ebpf::{
    macros::{classifier, map, raw_tracepoint},
    maps::PerCpuArray,
    programs::{RawTracePointContext, TcContext},
};

/// How often the foreign program ran.
#[map]
static RUNS: PerCpuArray<u64> = PerCpuArray::with_max_entries(1, 0);

/// `TC_ACT_OK`: ends the chain.
#[classifier]
fn foreign_ok(_: TcContext) -> i32 {
    if let Some(runs) = RUNS.get_ptr_mut(0) {
        // SAFETY: a per-CPU value, valid while the program runs.
        unsafe { *runs += 1 }
    }
    0
}

/// Does nothing.
#[classifier]
fn empty(_: TcContext) -> i32 {
    -1
}

/// Does nothing at every change of a socket's state.
#[raw_tracepoint(tracepoint = "inet_sock_set_state")]
fn empty_state(_: RawTracePointContext) -> i32 {
    0
}

#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
