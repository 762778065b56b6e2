//! Source ports of a network namespace: run on demand by the user side, which could read those of
//! another namespace only after entering it.

use aya_ebpf::{
    helpers::generated::bpf_probe_read_kernel, macros::raw_tracepoint,
    programs::RawTracePointContext,
};
use tuplewatch_common::record::{NetnsPorts, PortBitmap};

use crate::{
    layout::{
        ABSENT, NET_INUM, NET_LIST, NET_LOCAL_PORTS, NET_LOCAL_PORTS_BYTES, NET_RESERVED_PORTS,
        NET_TIMESTAMPS, NET_TW_REUSE, NET_TW_REUSE_DELAY,
    },
    maps::{NETNS_PORTS, RESERVED_PORTS},
    socket::{self, Kernel, argument},
};

/// Arguments: address of the `struct net`, 0 for that of the current task.
///
/// The list of all namespaces (`net_namespace_list`) goes round through its head, which is none: what
/// is read there is for the user side to refuse, as is a namespace that was freed since the last run.
#[raw_tracepoint]
pub fn census_netns(ctx: RawTracePointContext) -> i32 {
    let mut net = Kernel(argument::<0>(&ctx));
    if net.0 == 0 {
        net = socket::current_netns();
    }
    let (Some(ports), Some(reserved)) = (NETNS_PORTS.get_ptr_mut(0), RESERVED_PORTS.get_ptr_mut(0))
    else {
        return 0;
    };
    let range = if NET_LOCAL_PORTS_BYTES.load() == 4 {
        net.read::<u32>(&NET_LOCAL_PORTS)
    } else {
        let both = net.read::<u64>(&NET_LOCAL_PORTS);
        (both & 0xffff | both >> 32 << 16) as u32
    };
    let bitmap = net.read::<u64>(&NET_RESERVED_PORTS);
    // SAFETY: array values; only one run goes on at a time. The helper writes to all of its
    // destination, zeroes where the source cannot be read.
    unsafe {
        *ports = NetnsPorts {
            net: net.0,
            next: net
                .read::<u64>(&NET_LIST)
                .wrapping_sub(NET_LIST.load() as u64),
            netns: net.read(&NET_INUM),
            range,
            tw_reuse_delay_ms: if NET_TW_REUSE_DELAY.load() == ABSENT {
                1000
            } else {
                net.read(&NET_TW_REUSE_DELAY)
            },
            tw_reuse: net.read(&NET_TW_REUSE),
            timestamps: net.read(&NET_TIMESTAMPS),
            pad: [0; 2],
        };
        bpf_probe_read_kernel(
            reserved.cast(),
            size_of::<PortBitmap>() as u32,
            bitmap as *const _,
        );
    }
    0
}
