//! What the flight recorder keeps of a packet.

/// Bytes kept of a packet: Ethernet with a tag, IPv6, and a TCP header with 26 bytes of options, which
/// is more than the SYN of any known system has. Of a longer header the end is missing.
pub const SNAP_LEN: usize = 104;

/// The packet left the host by this interface; else it came in.
pub const LEAVES: u16 = 1;
/// The bytes begin with an Ethernet header; else with the IP header.
pub const ETHERNET: u16 = 2;

/// A place in the ring: the headers of one segment, never its payload.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// Time in nanoseconds of the clock of `bpf_ktime_get_ns`; 0 in a place that is empty or being
    /// written.
    pub time_ns: u64,
    /// The interface.
    pub ifindex: u32,
    /// Length of the packet.
    pub wire_len: u32,
    /// How many of [`Recorded::bytes`] are of this packet.
    pub len: u16,
    /// [`LEAVES`], [`ETHERNET`].
    pub flags: u16,
    /// Status of the failed HTTP/1 response that begins in it, else 0.
    pub status: u16,
    /// Always zero.
    pub pad: u16,
    /// The packet down to the end of its TCP header.
    pub bytes: [u8; SNAP_LEN],
}

impl Recorded {
    /// What is kept of the packet.
    #[must_use]
    pub fn headers(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len).min(SNAP_LEN)]
    }
}

/// Connections of which every segment may be asked for.
pub const WATCHED: u32 = 256;

/// Where in the table of watched connections one with this hash can stand. Before them, at 0, stands how
/// many of their segments may still be kept; while that is 0 nobody looks for more.
#[inline(always)]
#[must_use]
pub const fn places(hash: u64) -> [u32; 2] {
    [
        1 + (hash >> 16) as u32 % WATCHED,
        1 + (hash >> 40) as u32 % WATCHED,
    ]
}

const _: () = assert!(size_of::<Recorded>() == 128, "two cache lines");
