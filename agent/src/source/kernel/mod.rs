//! The live source: the eBPF programs and maps of this host.

pub mod attach;
mod batch;
mod bound;
mod census;
mod chain;
mod clock;
mod conntrack;
mod counters;
mod diagnostics;
mod ethtool;
mod events;
mod exchanges;
pub mod guard;
mod hooks;
mod idle;
mod load;
mod namespaces;
mod plan;
mod read;
mod recorder;
mod shared;
mod skipped;
mod spaces;
mod stalled;
mod status;
mod surroundings;
mod talks;
mod trial;

pub use census::Due;
pub use chain::{Other, Way};
pub use clock::{local_ports, monotonic_ns};
pub use load::{Kernel, LoadError, Options, PACKET_LOSS};
pub use plan::{Plan, cgroup_limit};
pub use recorder::Ring;
pub use status::{HookStatus, Verdict};
pub use trial::{Ran, Trial, trial};
