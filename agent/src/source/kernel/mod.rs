//! The live source: the eBPF programs and maps of this host.

pub mod attach;
mod batch;
mod census;
mod clock;
mod counters;
mod diagnostics;
mod ethtool;
mod events;
mod hooks;
mod load;
mod namespaces;
mod plan;
mod read;
mod shared;
mod spaces;
mod status;
mod surroundings;
mod talks;

pub use clock::monotonic_ns;
pub use load::{Kernel, LoadError, Options};
pub use plan::Plan;
pub use status::{HookStatus, Verdict};
