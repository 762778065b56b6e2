//! Where observations come from.

pub mod kernel;
