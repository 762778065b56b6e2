//! Addresses and the keys made of them: four-tuple and port space.

/// An IPv6 address in network byte order; IPv4 is kept as v4-mapped (`::ffff:a.b.c.d`, RFC 4291
/// section 2.5.5.2), which is also what the sockets of a dual-stack listener carry.
pub type Address = [u8; 16];

/// Makes the v4-mapped [`Address`] of an IPv4 address given in network byte order.
#[inline(always)]
pub const fn v4_mapped(a: [u8; 4]) -> Address {
    // Put together in a register: the ten zeros in memory would be a call of `memset` in eBPF.
    let [prefix, a] = [
        u32::from_ne_bytes([0, 0, 0xff, 0xff]),
        u32::from_ne_bytes(a),
    ];
    let (high, low) = if cfg!(target_endian = "little") {
        (a, prefix)
    } else {
        (prefix, a)
    };
    let half = (high as u64) << 32 | low as u64;
    let all = if cfg!(target_endian = "little") {
        (half as u128) << 64
    } else {
        half as u128
    };
    all.to_ne_bytes()
}

/// Whether `address` is a v4-mapped one.
#[inline(always)]
pub fn is_v4_mapped(address: &Address) -> bool {
    let [a, b, ..] = words(address);
    a == 0 && b as u32 == u32::from_ne_bytes([0, 0, 0xff, 0xff])
}

/// The two 64-bit halves of an address, in memory order.
#[inline(always)]
fn words(address: &Address) -> [u64; 2] {
    let a = address;
    [
        u64::from_ne_bytes([a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]]),
        u64::from_ne_bytes([a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15]]),
    ]
}

/// The four values that identify a TCP connection, named by who opened it.
// Aligned, so that addresses are copied and compared by words instead of by bytes.
#[repr(C, align(8))]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, PartialOrd, Ord, Hash)]
pub struct FourTuple {
    /// Who sent the SYN.
    pub initiator: Address,
    /// Who got it.
    pub responder: Address,
    /// Port of the responder.
    pub responder_port: u16,
    /// Port of the initiator: the scarce resource.
    pub initiator_port: u16,
    /// Always zero; keeps the key free of undefined bytes.
    pub pad: u32,
}

impl FourTuple {
    /// Copies field by field: assigned as a whole it may be a call of `memmove` in eBPF, which copies by bytes.
    #[inline(always)]
    pub const fn copy_from(&mut self, other: &Self) {
        let Self {
            initiator,
            responder,
            responder_port,
            initiator_port,
            pad: _,
        } = *other;
        self.initiator = initiator;
        self.responder = responder;
        self.responder_port = responder_port;
        self.initiator_port = initiator_port;
    }

    /// The same two ends with the roles exchanged.
    #[inline(always)]
    #[must_use]
    pub const fn reversed(&self) -> Self {
        Self {
            initiator: self.responder,
            responder: self.initiator,
            responder_port: self.initiator_port,
            initiator_port: self.responder_port,
            pad: 0,
        }
    }

    /// A 64-bit hash that is the same for both directions of a connection.
    ///
    /// It spreads tuples over tables of bounded size. It is not meant to withstand somebody who
    /// chooses addresses to collide: what a collision can do is documented where the hash is used.
    #[inline(always)]
    #[must_use]
    pub fn hash(&self) -> u64 {
        // Folded so that the sum below is not linear in the ends. The port stands where neither the
        // last bytes of an address nor any of an IPv4 address are: where it overlaps them, a port of
        // one host is another one of its neighbour.
        let end = |address: &Address, port: u16| {
            let [hi, lo] = words(address);
            let hi = hi.wrapping_mul(0xc2b2_ae3d_27d4_eb4f);
            let x = (hi ^ lo.rotate_left(23) ^ (u64::from(port) << 23))
                .wrapping_mul(0x9e37_79b9_7f4a_7c15);
            x ^ (x >> 32)
        };
        mix(end(&self.initiator, self.initiator_port)
            .wrapping_add(end(&self.responder, self.responder_port)))
    }

    /// Whether the initiator's end sorts before the responder's. With the direction-free
    /// [`FourTuple::hash`] it tells the two directions of a connection apart.
    #[inline(always)]
    #[must_use]
    pub fn initiator_is_lower(&self) -> bool {
        if self.initiator_port != self.responder_port {
            return self.initiator_port < self.responder_port;
        }
        let ([a, b], [c, d]) = (words(&self.initiator), words(&self.responder));
        if a == c { b < d } else { a < c }
    }
}

/// The 64-bit finaliser of MurmurHash3.
#[inline(always)]
pub(crate) const fn mix(mut x: u64) -> u64 {
    x ^= x >> 33;
    x = x.wrapping_mul(0xff51_afd7_ed55_8ccd);
    x ^= x >> 33;
    x = x.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

/// Which end of its connections this host is for a port space.
#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Not known: a census row whose local port has no listener and whose open was not seen.
    Unknown = 0,
    /// This host (or something behind it) opens the connections.
    Initiator = 1,
    /// This host (or something behind it) accepts them.
    Responder = 2,
}

impl Role {
    /// Reads the value stored in a key.
    #[must_use]
    pub const fn from_u8(value: u8) -> Self {
        match value {
            1 => Self::Initiator,
            2 => Self::Responder,
            _ => Self::Unknown,
        }
    }
}

/// Where something was seen.
#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord, Hash)]
pub enum Point {
    /// What the kernel's sockets say: before masquerade and kube-proxy.
    Socket = 1,
    /// What passes an interface: after them.
    Wire = 2,
}

impl Point {
    /// Reads the value stored in a key.
    #[must_use]
    pub const fn from_u8(value: u8) -> Self {
        if value == 1 { Self::Socket } else { Self::Wire }
    }
}

/// A port space seen from one role and one observation point: the 3-tuple whose source ports are the
/// scarce resource.
#[repr(C, align(8))]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, PartialOrd, Ord, Hash)]
pub struct PortSpaceKey {
    /// Who sends the SYNs (the address on the wire at the place of observation).
    pub initiator: Address,
    /// Who gets them.
    pub responder: Address,
    /// Port of the responder.
    pub responder_port: u16,
    /// A [`Role`].
    pub role: u8,
    /// A [`Point`].
    pub point: u8,
    /// Inode of the network namespace for [`Point::Socket`] (`net.ns.inum`), 0 for [`Point::Wire`].
    pub netns: u32,
}

impl PortSpaceKey {
    /// Equality by words: derived, it would be a call of `memcmp` in eBPF.
    #[inline(always)]
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        let ([a, b], [c, d]) = (words(&self.initiator), words(&self.responder));
        let ([e, f], [g, h]) = (words(&other.initiator), words(&other.responder));
        (a ^ e) | (b ^ f) | (c ^ g) | (d ^ h) == 0
            && self.responder_port == other.responder_port
            && self.role == other.role
            && self.point == other.point
            && self.netns == other.netns
    }

    /// A 64-bit hash, for tables that compare the key itself.
    #[inline(always)]
    #[must_use]
    pub fn hash(&self) -> u64 {
        let ([a, b], [c, d]) = (words(&self.initiator), words(&self.responder));
        let rest = u64::from(self.responder_port)
            | u64::from(self.role) << 16
            | u64::from(self.point) << 24
            | u64::from(self.netns) << 32;
        let x = (a ^ b.rotate_left(23)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mix(x ^ c.rotate_left(17) ^ d ^ rest.rotate_left(41))
    }

    /// The port space of a tuple seen on the wire.
    #[inline(always)]
    #[must_use]
    pub const fn wire(tuple: &FourTuple, role: u8) -> Self {
        Self {
            initiator: tuple.initiator,
            responder: tuple.responder,
            responder_port: tuple.responder_port,
            role,
            point: Point::Wire as u8,
            netns: 0,
        }
    }

    /// The port space of a tuple seen in a socket of the namespace `netns`.
    #[inline(always)]
    #[must_use]
    pub const fn socket(tuple: &FourTuple, role: u8, netns: u32) -> Self {
        Self {
            initiator: tuple.initiator,
            responder: tuple.responder,
            responder_port: tuple.responder_port,
            role,
            point: Point::Socket as u8,
            netns,
        }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;

    #[test]
    fn hash_is_the_same_for_both_directions() {
        let t = FourTuple {
            initiator: v4_mapped([10, 0, 0, 1]),
            responder: v4_mapped([10, 0, 0, 2]),
            responder_port: 80,
            initiator_port: 40000,
            pad: 0,
        };
        assert_eq!(t.hash(), t.reversed().hash());
        assert_ne!(t.initiator_is_lower(), t.reversed().initiator_is_lower());
        let other = FourTuple {
            initiator_port: 40001,
            ..t
        };
        assert_ne!(t.hash(), other.hash());
    }

    #[test]
    fn neighbours_with_any_ports_have_hashes_of_their_own() {
        let prefixes = [
            v4_mapped([10, 0, 0, 0]),
            *b"\x20\x01\x0d\xb8\0\0\0\0\0\0\0\0\0\0\0\0",
        ];
        for prefix in prefixes {
            let mut hashes = std::vec::Vec::new();
            let mut responder = prefix;
            responder[14] = 1;
            for host in 0..16 {
                let mut initiator = prefix;
                initiator[15] = host;
                hashes.extend((0..=u16::MAX).map(|initiator_port| {
                    let tuple = FourTuple {
                        initiator,
                        responder,
                        responder_port: 443,
                        initiator_port,
                        pad: 0,
                    };
                    tuple.hash()
                }));
            }
            let all = hashes.len();
            hashes.sort_unstable();
            hashes.dedup();
            assert_eq!(hashes.len(), all);
        }
    }

    #[test]
    fn v4_mapped_is_recognised() {
        assert!(is_v4_mapped(&v4_mapped([1, 2, 3, 4])));
        assert!(!is_v4_mapped(&[0; 16]));
        let mut a = v4_mapped([1, 2, 3, 4]);
        a[9] = 1;
        assert!(!is_v4_mapped(&a));
    }
}
