//! The lab of tuplewatch: small networks of real kernel TCP stacks, built from network namespaces.
//!
//! A test builds a [`Lab`] (or one of the ready [`topology`] types), starts servers and loads in its
//! hosts, runs the agent in one of them and compares what the agent says with [`truth::Truth`],
//! which is counted by nftables, by the kernel's own counters and by the applications, never by the
//! agent.
//!
//! ```no_run
//! use std::time::Duration;
//! use tuplewatch_tests::prelude::*;
//!
//! # fn main() -> anyhow::Result<()> {
//! let incident = Incident::new(IncidentConfig::default())?;
//! let _server = incident.serve()?;
//! let agent = incident.server.agent(AgentConfig::default())?;
//! agent.wait_ready(Duration::from_secs(10))?;
//! let loads = incident.load(20.0, Duration::from_secs(15))?;
//! let alert = agent.wait_alert(Duration::from_secs(30), |alert| alert["state"] == "firing")?;
//! for load in loads {
//!     println!("{:?}", load.wait()?);
//! }
//! let truth = incident.truth()?;
//! assert!(truth.host("server").counters.bareack_to_syn_out > 0);
//! println!("{alert}");
//! # Ok(())
//! # }
//! ```
//!
//! # What cleans up
//! Each host is a child process that holds its namespaces; no namespace has a name, no interface is
//! made in the caller's namespace. Every child dies with the test process (parent-death signal set
//! from a thread that never ends, and the holders also watch a pipe), and the kernel removes
//! interfaces, firewall rules and sockets with the last process of a namespace. Nothing is left
//! after a panic or SIGKILL.
//!
//! # What it needs
//! Root, `ip`, `nft` and (for [`tap::Tap`]) `tcpdump`. Children are started from the binary
//! `lab-peer` of this package, which cargo builds for the tests.

pub mod agent;
pub mod bench;
pub mod config;
mod conntrack;
pub mod holder;
pub mod host;
mod ioctl;
pub mod lab;
mod netns;
pub mod peer;
pub mod peers;
pub mod process;
pub mod procnet;
pub mod report;
mod sampler;
mod spawner;
pub mod tap;
pub mod topology;
pub mod truth;
pub mod tun;
pub mod verdicts;
mod wait;

pub use lab::Lab;
pub use wait::{patience, wait_for, wait_some};

/// Everything a test usually needs.
pub mod prelude {
    pub use crate::agent::{Agent, AgentConfig};
    pub use crate::config::{
        FastOpenConfig, FixedConfig, Isn, LateDupConfig, LoadConfig, PoolConfig, PortRange,
        RawSynConfig, ServeConfig, SourcePort,
    };
    pub use crate::host::{Host, Output};
    pub use crate::lab::{Lab, LinkEnd};
    pub use crate::peers::{FastOpen, Fixed, LateDup, Load, Pool, RawSyn, Server};
    pub use crate::process::Proc;
    pub use crate::report::{
        FastOpenReport, FixedReport, LateDupReport, LoadReport, PoolReport, RawSynReport,
        ServeReport,
    };
    pub use crate::tap::Tap;
    pub use crate::topology::{
        Allocation, Family, Holding, HoldingConfig, Incident, IncidentConfig, Pair, PairConfig,
        Routed, RoutedConfig,
    };
    pub use crate::truth::{Counters, HostTruth, Truth};
    pub use crate::tun::Tun;
    pub use crate::verdicts::Row;
    pub use crate::wait::{wait_for, wait_some};
}
