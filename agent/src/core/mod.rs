//! The pure core: observations → tables → signatures → findings → alerts.
//!
//! No I/O and no clock of its own: time is what the observations and ticks carry, so that a capture
//! replayed at full speed gives what the live kernel gave.

pub mod alert;
pub mod engine;
pub mod finding;
pub mod history;
pub mod observation;
pub mod openers;
pub mod pool;
pub mod ports;
pub mod report;
pub mod signature;
pub mod space;
pub mod surroundings;
pub mod tables;
pub mod threshold;
pub mod time;
mod totals;
