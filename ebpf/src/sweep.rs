//! Gives up opens that stay without outcome: run on demand by the user side, which has looked
//! through [`crate::maps::HANDSHAKES`] and put the hashes of the outdated ones into [`crate::maps::SWEEP`].

use aya_ebpf::{
    EbpfContext as _, helpers::bpf_ktime_get_ns, macros::raw_tracepoint,
    programs::RawTracePointContext,
};
use aya_log_ebpf::debug;
use tuplewatch_common::observe;

use crate::{
    maps::{ON_DEMAND, SWEEP, SWEEP_BATCH},
    tables::Maps,
};

/// Arguments (of BPF_PROG_TEST_RUN): number of hashes; patience with handshakes that got a
/// SYN-ACK in nanoseconds.
#[raw_tracepoint]
pub fn sweep(ctx: RawTracePointContext) -> i32 {
    let args = ctx.as_ptr().cast::<u64>();
    // SAFETY: a raw tracepoint program may read twelve arguments.
    let (n, patience_ns) = unsafe { (*args, *args.add(1)) };
    debug!(&ctx, "sweep: {} opens without outcome", n);
    // SAFETY: a helper without arguments.
    let now_ns = unsafe { bpf_ktime_get_ns() };
    let Some(storage) = ON_DEMAND.get_ptr_mut(0) else {
        return 0;
    };
    // SAFETY: only one program of those that the user side runs goes on at a time.
    let work = unsafe { &mut (*storage).work };
    let mut i = 0;
    while i < SWEEP_BATCH {
        if i as u64 >= n {
            break;
        }
        if let Some(hash) = SWEEP.get(i) {
            observe::sweep(&mut Maps, work, *hash, now_ns, patience_ns);
        }
        i += 1;
    }
    0
}
