//! The pure core: observations → tables → signatures → findings → alerts.
//!
//! No I/O and no clock of its own: time is what the observations and ticks carry, so that a capture
//! replayed at full speed gives what the live kernel gave.

pub mod alert;
pub mod black_hole;
pub mod budget;
pub mod counters;
pub mod destination;
pub mod egress;
pub mod ends;
pub mod engine;
pub mod episode;
pub mod finding;
pub mod history;
pub mod idle;
pub mod mute;
pub mod observation;
pub mod openers;
pub mod packed;
pub mod path_loss;
pub mod placement;
pub mod pool;
pub mod ports;
pub mod profile;
pub mod report;
pub mod rules;
pub mod saved;
pub mod search;
pub mod service;
pub mod signature;
pub mod space;
pub mod stalled;
pub mod strangers;
pub mod stuck;
pub mod surroundings;
pub mod suspect;
pub mod tables;
pub mod threshold;
pub mod time;
mod totals;
pub mod trend;
pub mod value;
pub mod waits;
