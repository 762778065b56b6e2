//! Which interfaces the packet hook attaches to.
//!
//! Candidates are the interfaces that a unicast route of any routing table points to (the AWS VPC CNI keeps its
//! routes in tables 2 and up) and the physical devices. Of a stack only the lowest level is taken, so that a segment
//! is read once: the slaves of a bond, the ports of a bridge, the parent of a VLAN. A veth is the end of a stack, not
//! a level of one: its peer is another host as far as packets go, even if it sits in the same namespace.
//!
//! **Pods.** The node's side of a pod's veth is taken beside the uplink. A routed segment then passes two hooks; the
//! hook on the way out recognises it (`ingress_ifindex` is not 0 and belongs to [`Choice::covered`]) and leaves the
//! counting to the interface where it came in. What that buys: the pod's own address is seen before any masquerade,
//! and so is traffic between pods of one node that goes by the veths. CNIs whose programs redirect between veths
//! that no route points to (Cilium) are seen at the uplink only: those veths are listed as unseen.
//!
//! Everything comes by netlink from the network namespace of the calling thread. sysfs would show the namespace that
//! it was mounted in, which in a container is another one.

mod changes;
mod choose;
pub mod clsact;
pub(crate) mod netlink;
mod snapshot;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

pub use changes::{Change, Changes};
pub use choose::choose;
pub use snapshot::{Link, Snapshot};

/// What stands in front of the IP header where the packet hook reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkHeader {
    /// 14 bytes of Ethernet (a VLAN tag usually sits beside the data, in the skb).
    Ethernet,
    /// Nothing that the device speaks of (WireGuard, tun, IP in IP). On the way in some tunnels leave their outer
    /// header in front of the data: read from the network header (`BPF_HDR_START_NET`), not from offset 0.
    None,
}

impl LinkHeader {
    /// By the device type (`ARPHRD_*`, <linux/if_arp.h>); `Err` names the types that are not read.
    pub(super) fn of(device_type: u16) -> Result<Self, String> {
        // Not in the C library's headers.
        const ARPHRD_RAWIP: u16 = 519;
        const ARPHRD_IP6GRE: u16 = 823;
        match device_type {
            libc::ARPHRD_ETHER | libc::ARPHRD_LOOPBACK => Ok(Self::Ethernet),
            libc::ARPHRD_NONE
            | ARPHRD_RAWIP
            | libc::ARPHRD_PPP
            | libc::ARPHRD_TUNNEL
            | libc::ARPHRD_TUNNEL6
            | libc::ARPHRD_SIT
            | libc::ARPHRD_IPGRE
            | ARPHRD_IP6GRE => Ok(Self::None),
            libc::ARPHRD_INFINIBAND => {
                Err("its link layer is InfiniBand, which is not read".to_owned())
            }
            other => Err(format!("its link layer (device type {other}) is not read")),
        }
    }
}

/// An interface that the packet hook attaches to.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Interface {
    /// Number within its network namespace.
    pub index: u32,
    /// Name at the time of the snapshot.
    pub name: String,
    /// What stands in front of the IP header.
    pub header: LinkHeader,
    /// The kernel's kind (`veth`, `wireguard`, …), `physical` or `loopback`.
    pub kind: String,
    /// Why it was chosen, for people.
    pub why: String,
}

/// An interface whose traffic is not seen.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub struct Unseen {
    /// Name of the interface, or a pattern that fits none.
    pub name: String,
    /// Why not, for people.
    pub reason: String,
    /// Packets may pass there that nobody wished to leave out.
    pub missed: bool,
}

/// What was decided.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Choice {
    /// Where to attach, by number.
    pub chosen: Vec<Interface>,
    /// What is not seen, by name.
    pub unseen: Vec<Unseen>,
    /// Numbers of all interfaces whose traffic passes a chosen one: the chosen ones, and the levels of a stack
    /// above them. A forwarded segment carries one of these as `ingress_ifindex` if it was seen on its way in (for
    /// a segment that came in by a bond's slave the kernel gives the number of the bond).
    pub covered: BTreeSet<u32>,
}

/// What the user asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Names or patterns (`*`, `?`). If there is any, just these are taken. `lo` only by its full name.
    pub include: Vec<String>,
    /// Names or patterns that are left out, also below a stack.
    pub exclude: Vec<String>,
}

/// True if `name` fits `pattern`: `*` stands for any number of characters, `?` for one.
fn fits(pattern: &str, name: &str) -> bool {
    let mut chars = pattern.chars();
    match chars.next() {
        None => name.is_empty(),
        Some('*') => {
            let rest = chars.as_str();
            let mut tails = name.char_indices().map(|(at, _)| &name[at..]);
            tails.any(|tail| fits(rest, tail)) || fits(rest, "")
        }
        Some(wanted) => {
            let mut name = name.chars();
            let got = name.next();
            got.is_some_and(|c| wanted == '?' || wanted == c) && fits(chars.as_str(), name.as_str())
        }
    }
}
