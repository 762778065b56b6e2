//! Segments of a few connections in any order and at any time, into tables of both sizes; the
//! invariants are checked after each. The input is a program for `tests/support/chaos.rs`.
#![no_main]

#[path = "../../tests/support/mod.rs"]
mod support;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|program: &[u8]| {
    support::chaos::play(program);
});
