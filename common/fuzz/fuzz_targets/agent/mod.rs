//! The agent's core and capture source, compiled from where they stand: the whole agent would bring its
//! exporters and the eBPF object along.

#![allow(dead_code, unused_imports, reason = "a target uses its own part")]

#[path = "../../../../agent/src/core/mod.rs"]
pub mod core;
pub mod source;
