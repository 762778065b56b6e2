//! Facts about the running kernel, read at start: where its structs keep what the programs need.

pub mod btf;
mod error;
mod hook;
pub mod interfaces;
pub mod layout;
mod member;
mod resolve;
#[cfg(test)]
mod tests;

pub use btf::{Types, VMLINUX};
pub use error::FactError;
pub use hook::{Hook, Missing, Resolved};
pub use layout::{ABSENT, Layout};
pub use member::{Bitfield, Member, Shape};
