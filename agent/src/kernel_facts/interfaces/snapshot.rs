//! The interfaces and routes of a network namespace at one moment.

use std::collections::BTreeMap;
use std::io;

use super::netlink::{Attributes, Dump, Socket, number, text};

/// An interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// Number within its network namespace.
    pub index: u32,
    /// Name.
    pub name: String,
    /// `ARPHRD_*`.
    pub device_type: u16,
    /// Switched on (`IFF_UP`), with or without carrier.
    pub up: bool,
    /// The loopback device of the namespace.
    pub loopback: bool,
    /// What the kernel calls it: `veth`, `bridge`, `bond`, `vlan`, …; nothing for a driver of hardware.
    pub kind: Option<String>,
    /// The bond, bridge, team or VRF that it belongs to.
    pub master: Option<u32>,
    /// The interface that it names as its link, if that is in the same namespace: parent of a VLAN, peer of a veth,
    /// way out of a tunnel.
    pub link: Option<u32>,
}

/// The interfaces and routes of a network namespace at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Interfaces by number.
    pub links: BTreeMap<u32, Link>,
    /// Interfaces that a unicast route points to, with the lowest table number of such a route (0: a next-hop
    /// object names it).
    pub routed: BTreeMap<u32, u32>,
}

/// A dump that the kernel changes underneath is asked for again this many times.
const ATTEMPTS: u32 = 5;

impl Snapshot {
    /// Reads the namespace of the calling thread. Takes no right beyond what every process has; blocks for about
    /// 1 ms, and for the length of the routing tables.
    ///
    /// # Errors
    /// The netlink socket cannot be opened, or the kernel refuses a dump.
    pub fn read() -> io::Result<Self> {
        let mut socket = Socket::open()?;
        let mut snapshot = Self::default();
        for attempt in 1.. {
            snapshot = Self::default();
            let links = socket.dump(Dump::Links, |message| snapshot.add_link(message))?;
            let mut whole = links;
            for family in [libc::AF_INET, libc::AF_INET6] {
                let dump = Dump::Routes(u8::try_from(family).unwrap_or_default());
                whole &= socket.dump(dump, |message| snapshot.add_route(message))?;
            }
            // Since 5.3; older kernels have no such objects.
            if let Ok(consistent) =
                socket.dump(Dump::NextHops, |message| snapshot.add_next_hop(message))
            {
                whole &= consistent;
            }
            // A busy router never holds still. What a torn dump misses comes with the next change.
            if whole || attempt == ATTEMPTS {
                break;
            }
        }
        Ok(snapshot)
    }

    /// Name of an interface, or its number.
    pub(super) fn name(&self, index: u32) -> String {
        let link = self.links.get(&index);
        link.map_or_else(|| format!("interface {index}"), |l| l.name.clone())
    }

    /// `struct ifinfomsg` and `IFLA_*` of <linux/if_link.h>.
    pub(super) fn add_link(&mut self, message: &[u8]) {
        const IFLA_LINK_NETNSID: u16 = 37;
        let Some((head, attributes)) = message.split_at_checked(16) else {
            return;
        };
        let flags = number(&head[8..12]);
        let flag = |bit: libc::c_int| flags & bit.cast_unsigned() != 0;
        let mut link = Link {
            device_type: u16::from_ne_bytes([head[2], head[3]]),
            index: number(&head[4..8]),
            up: flag(libc::IFF_UP),
            loopback: flag(libc::IFF_LOOPBACK),
            ..Link::default()
        };
        let mut elsewhere = false;
        for (kind, value) in Attributes::new(attributes) {
            match kind {
                libc::IFLA_IFNAME => link.name = text(value),
                libc::IFLA_LINK => link.link = Some(number(value)).filter(|index| *index != 0),
                libc::IFLA_MASTER => link.master = Some(number(value)).filter(|index| *index != 0),
                libc::IFLA_LINKINFO => {
                    let info =
                        Attributes::new(value).find(|(kind, _)| *kind == libc::IFLA_INFO_KIND);
                    link.kind = info.map(|(_, name)| text(name));
                }
                IFLA_LINK_NETNSID => elsewhere = true,
                _ => {}
            }
        }
        // The number is one of another namespace, where it may mean anything.
        if elsewhere {
            link.link = None;
        }
        self.links.insert(link.index, link);
    }

    /// `struct rtmsg` and `RTA_*` of <linux/rtnetlink.h>.
    pub(super) fn add_route(&mut self, message: &[u8]) {
        let Some((head, attributes)) = message.split_at_checked(12) else {
            return;
        };
        let (family, kind) = (head[0], head[7]);
        let flags = number(&head[8..12]);
        let mut table = u32::from(head[4]);
        let mut ways = Vec::new();
        let mut towards: &[u8] = &[];
        for (kind, value) in Attributes::new(attributes) {
            match kind {
                libc::RTA_TABLE => table = number(value),
                libc::RTA_OIF => ways.push(number(value)),
                libc::RTA_MULTIPATH => next_hops(value, &mut ways),
                libc::RTA_DST => towards = value,
                _ => {}
            }
        }
        let cached = flags & libc::RTM_F_CLONED != 0;
        // Every interface that is up has routes to fe80::/64 and ff00::/8: they tell nothing.
        let every_link = i32::from(family) == libc::AF_INET6
            && (towards.starts_with(&[0xff])
                || matches!(towards, [0xfe, second, ..] if second & 0xc0 == 0x80));
        let local = table == u32::from(libc::RT_TABLE_LOCAL);
        if kind == libc::RTN_UNICAST && !cached && !every_link && !local {
            for index in ways {
                let lowest = self.routed.entry(index).or_insert(table);
                *lowest = table.min(*lowest);
            }
        }
    }

    /// `struct nhmsg` and `NHA_*` of <linux/nexthop.h>: with `net.ipv4.nexthop_compat_mode` = 0 a route names only
    /// the object.
    pub(super) fn add_next_hop(&mut self, message: &[u8]) {
        const NHA_OIF: u16 = 5;
        let Some((_, attributes)) = message.split_at_checked(8) else {
            return;
        };
        for (kind, value) in Attributes::new(attributes) {
            if kind == NHA_OIF {
                self.routed.entry(number(value)).or_insert(0);
            }
        }
    }
}

/// The interfaces of an `RTA_MULTIPATH`: a list of `struct rtnexthop` (length, flags, hops, interface), each
/// followed by attributes.
fn next_hops(mut list: &[u8], ways: &mut Vec<u32>) {
    while let [a, b, _, _, index @ ..] = list {
        let length = usize::from(u16::from_ne_bytes([*a, *b]));
        if length < 8 || index.len() < 4 {
            return;
        }
        ways.push(number(&index[..4]));
        list = list.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
}
