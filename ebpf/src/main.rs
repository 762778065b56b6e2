//! The kernel side of tuplewatch: one file per hook, named as the kernel names it.
//!
//! - `packet`: traffic control classifiers, both directions;
//! - `recorder`: keeps headers for the flight recorder, on behalf of `packet`;
//! - `http`: what the packet hook looks at in data segments, unless it is switched off;
//! - `exchange`: sizes and latencies of responses for the packet hook, if they are asked for;
//! - `lifecycle`: `inet_sock_set_state`;
//! - `retransmit`: `tcp_retransmit_skb`;
//! - `reset`: `tcp_send_reset` and `tcp_receive_reset`;
//! - `census`: walks the kernel's hash tables on demand;
//! - `netns`: reads the port range of every network namespace, on demand;
//! - `stalled`: established sockets that make no progress, on behalf of `census` and `retransmit`;
//! - `sweep`: gives up opens that stay without outcome, on demand.
#![no_std]
#![allow(internal_features, reason = "atomic addition: see tables.rs")]
#![expect(
    clippy::cast_lossless,
    reason = "`as` between integers of known width reads better than `From` in arithmetic on offsets"
)]
#![expect(
    clippy::needless_borrows_for_generic_args,
    reason = "what is borrowed is not copied to the stack, which has 512 bytes"
)]
#![feature(asm_experimental_arch, core_intrinsics)]
#![no_main]

mod census;
mod copied;
mod exchange;
mod http;
mod idle;
mod layout;
mod lifecycle;
mod maps;
mod netns;
mod opened;
mod packet;
mod recorder;
mod reset;
mod retransmit;
mod skb;
mod socket;
mod stalled;
mod sweep;
mod tables;
mod ways;

#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // Must stay visible to the verifier: were this declared unreachable, a missing bounds check
    // would vanish with it.
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
