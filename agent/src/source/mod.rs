//! Where observations come from.

pub mod capture;
pub mod kernel;
