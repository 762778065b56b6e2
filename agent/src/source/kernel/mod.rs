//! The live source: the eBPF programs and maps of this host.

pub mod attach;
mod batch;
mod census;
mod clock;
mod diagnostics;
mod events;
mod hooks;
mod load;
mod plan;
mod read;
mod status;
mod surroundings;

pub use clock::monotonic_ns;
pub use load::{Kernel, LoadError, Options};
pub use plan::Plan;
pub use status::{HookStatus, Verdict};
