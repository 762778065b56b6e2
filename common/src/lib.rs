//! What the kernel side and the user side of tuplewatch share.
//!
//! Everything that reads TCP stands here once, without `std` and without allocation: the same
//! functions are compiled into the eBPF programs and into the capture reader, and are tested on the
//! host. The path of a packet through this crate is [`segment`] → [`observe`] → [`handshake`] and
//! [`memory`] → the counters of [`record`].
#![no_std]
#[cfg(test)]
extern crate std;

pub mod address;
pub mod bytes;
pub mod conversation;
pub mod exchange;
pub mod handshake;
pub mod histogram;
pub mod http;
pub mod idle;
pub mod memory;
pub mod observe;
pub mod record;
pub mod recorder;
pub mod segment;
pub mod seq;
pub mod stalled;
pub mod ways;
