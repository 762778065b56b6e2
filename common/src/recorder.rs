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
    /// Always zero.
    pub pad: u32,
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

const _: () = assert!(size_of::<Recorded>() == 128, "two cache lines");
