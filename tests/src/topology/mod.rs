//! Ready-made networks.

mod holding;
mod incident;
mod pair;
mod routed;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub use holding::{Holding, HoldingConfig};
pub use incident::{Allocation, Incident, IncidentConfig, MiddleboxCounters};
pub use pair::{Pair, PairConfig};
pub use routed::{Routed, RoutedConfig};

/// The port of the service that all topologies count.
pub const SERVICE: u16 = 8080;

/// IPv4 addresses that belong to nobody; the topologies route them to the client, so that answers to
/// crafted SYNs are sent and vanish there (198.18.0.0/15, RFC 2544).
pub const NOBODY_V4: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 0);
/// The same for IPv6 (a /48 of the documentation prefix).
pub const NOBODY_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0xf, 0, 0, 0, 0, 0);

/// IPv4 or IPv6.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Family {
    /// IPv4.
    #[default]
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// One of two addresses.
    #[must_use]
    pub fn pick(self, v4: Ipv4Addr, v6: Ipv6Addr) -> IpAddr {
        match self {
            Self::V4 => v4.into(),
            Self::V6 => v6.into(),
        }
    }

    /// Addresses that belong to nobody, routed to the client: see [`NOBODY_V4`].
    #[must_use]
    pub fn nobody(self) -> IpAddr {
        self.pick(NOBODY_V4, NOBODY_V6)
    }

    /// The prefix length of [`Family::nobody`].
    #[must_use]
    pub fn nobody_prefix(self) -> String {
        match self {
            Self::V4 => format!("{NOBODY_V4}/15"),
            Self::V6 => format!("{NOBODY_V6}/48"),
        }
    }
}

/// nftables rules that drop this share of all packets that arrive at a host in the middle.
fn loss_rules(percent: u32) -> String {
    format!(
        "table inet loss {{
  counter lost {{}}
  chain arriving {{ type filter hook prerouting priority -400;
    meta l4proto tcp numgen random mod 100 < {percent} counter name lost drop
  }}
}}
"
    )
}
