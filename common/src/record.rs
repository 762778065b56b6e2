//! Counters and events: what the kernel side hands to the user side.

use crate::{
    address::{FourTuple, PortSpaceKey},
    histogram::Histogram,
};

/// Counters of one port space at one observation point and role.
///
/// They only count up. What every connection changes stands together: each cache line that several CPUs
/// write costs them more than the counting itself.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortSpace {
    /// Opens: distinct SYNs (wire) or CLOSE→SYN_SENT (socket).
    pub opens: u64,
    /// Handshakes completed.
    pub established: u64,
    /// Connections that left ESTABLISHED, for the mean lifetime (socket only).
    pub closed: u64,
    /// Sum of their lifetimes in milliseconds.
    pub lifetime_ms: u64,
    /// How often the place was given to another port space. It stands among the counters because each
    /// reference is checked against it just before something is counted.
    pub generation: u16,
    /// How many of [`PortSpace::first_ports`] are filled; above [`FIRST_PORTS`] there is a bitmap.
    pub ports_noted: u16,
    /// Index of the bitmap of source ports, 0 for none.
    pub bitmap: u32,
    /// Opens of sockets that were bound to a port before connect() (socket only): they draw on one
    /// pool per source address.
    pub bound_opens: u64,
    /// Opens answered by RST.
    pub refused: u64,
    /// SYNs sent again, recognised by their ISN, also when a NAT moves them to another port.
    pub syn_retransmits: u64,
    /// Opens that got no answer although the SYN was sent again.
    pub syn_timeouts: u64,
    /// Opens given up by the application before any answer or before the first retransmission.
    pub abandoned: u64,
    /// Opens whose SYN-ACK was never acknowledged: a flood, a scan, or a lost initiator.
    pub half_open: u64,
    /// connect() that found no source port (socket only).
    pub no_local_port: u64,
    /// Opens that ended with another error, such as no route to the host (socket only).
    pub failed: u64,
    /// Bare ACKs that answered a SYN: the sum of the four that follow.
    pub bare_acks: u64,
    /// … where the former connection on the four-tuple was closed within the hold.
    pub bare_acks_closed: u64,
    /// … where it was never closed.
    pub bare_acks_open: u64,
    /// … where its handshake was never completed.
    pub bare_acks_half_open: u64,
    /// … where the former connection is not known.
    pub bare_acks_unknown: u64,
    /// Late duplicates of a SYN that was accepted before.
    pub duplicate_syns: u64,
    /// Opens refused by RST after a bare ACK: nothing listens there.
    pub no_listener: u64,
    /// RSTs by which the initiator answered a bare ACK.
    pub rsts_after_bare_ack: u64,
    /// Opens established after a bare ACK.
    pub healed: u64,
    /// Opens that met the same bare ACK twice, or were never answered after one.
    pub unhealed: u64,
    /// Handshakes completed although the former connection was closed within the hold.
    pub reuse_accepted: u64,
    /// Established connections that ended by a received RST (socket only).
    pub resets_received: u64,
    /// RSTs sent on established connections (socket only).
    pub resets_sent: u64,
    /// Segments of established connections sent again (socket only).
    pub data_retransmits: u64,
    /// The first completed handshakes' source ports, until the port space has its own bitmap.
    pub first_ports: [u16; FIRST_PORTS],
    /// Time from the end of the former connection on a four-tuple to the SYN, in units of
    /// [`crate::histogram::REUSE_UNIT_NS`].
    pub reuse_interval: Histogram,
    /// First SYN to completion, in units of [`crate::histogram::HANDSHAKE_UNIT_NS`].
    pub handshake_duration: Histogram,
    /// Search for a local port inside connect(), in units of [`crate::histogram::SEARCH_UNIT_NS`].
    pub port_search: Histogram,
}

/// A place in the table of port spaces: what the kernel side adds to without looking the key up again.
///
/// The low [`SpaceRef::INDEX_BITS`] bits are the index of a [`SpaceSlot`], those above its generation:
/// a reference to a port space that was forgotten meanwhile leads nowhere.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SpaceRef(pub u32);

impl SpaceRef {
    /// No port space: index 0 is never given out.
    pub const NONE: Self = Self(0);
    /// Bits of the index.
    pub const INDEX_BITS: u32 = 20;

    /// The reference to slot `index` in its present generation.
    #[inline(always)]
    #[must_use]
    pub const fn new(index: u32, generation: u16) -> Self {
        Self(index & ((1 << Self::INDEX_BITS) - 1) | (generation as u32) << Self::INDEX_BITS)
    }

    /// The slot.
    #[inline(always)]
    #[must_use]
    pub const fn index(self) -> u32 {
        self.0 & ((1 << Self::INDEX_BITS) - 1)
    }

    /// Whether a slot of that generation is meant.
    #[inline(always)]
    #[must_use]
    pub const fn is_of(self, generation: u16) -> bool {
        self.0 >> Self::INDEX_BITS == generation as u32 & (u32::MAX >> Self::INDEX_BITS)
    }

    /// There is a port space.
    #[inline(always)]
    #[must_use]
    pub const fn is_some(self) -> bool {
        self.0 != 0
    }
}

/// One place in the table of port spaces. What only says whose it is has a cache line of its own.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceSlot {
    /// Whose counters these are.
    pub key: PortSpaceKey,
    /// 1 while the place is taken. The kernel side sets it, the user side clears it.
    pub live: u32,
    /// Always zero.
    pub pad: u32,
    /// The counters.
    pub counters: PortSpace,
}

/// Source ports kept inside [`PortSpace`] before a bitmap is made.
pub const FIRST_PORTS: usize = 16;

/// The source ports of completed handshakes, one bit each.
pub type PortBitmap = [u64; 1024];

/// What the sockets of one port space do at the moment of a census.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CensusRow {
    /// The pass that wrote this row; a row of an older pass is outdated.
    pub pass: u32,
    /// Sockets being opened (SYN_SENT, SYN_RECV, request sockets).
    pub opening: u32,
    /// Sockets in ESTABLISHED.
    pub established: u32,
    /// Sockets being closed (FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT, LAST_ACK, CLOSING).
    pub closing: u32,
    /// Sockets in TIME_WAIT by age: each bucket holds ten seconds, the last one the rest.
    pub time_wait: [u32; TIME_WAIT_AGES],
    /// Those of all states whose port was taken by bind(), not by connect().
    pub bound: u32,
    /// Established ones on which the initiator's latest data arrived a second ago or earlier and was not
    /// answered yet.
    pub waiting: u32,
    /// … of them those that the responder's application has not accepted.
    pub unaccepted: u32,
    /// Established ones that wait for less than a second, or were answered within the last one.
    pub lively: u32,
    /// Established sockets that received something in the last ten seconds.
    pub active: u32,
    /// Established sockets that had rested and were used again since the pass before.
    pub rested: u32,
    /// The longest of these rests in milliseconds, as far as it is known.
    pub rested_ms: u32,
}

/// Source ports of a network namespace (socket point).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetnsPorts {
    /// Address of its `struct net`.
    pub net: u64,
    /// Address of the next one in the list of all namespaces, which goes round.
    pub next: u64,
    /// Its number, as in `/proc/<pid>/ns/net`.
    pub netns: u32,
    /// `net.ipv4.ip_local_port_range`: the first port in the low half, the last one in the high half.
    pub range: u32,
    /// `net.ipv4.tcp_tw_reuse_delay` in milliseconds.
    pub tw_reuse_delay_ms: u32,
    /// `net.ipv4.tcp_tw_reuse`.
    pub tw_reuse: u8,
    /// `net.ipv4.tcp_timestamps`.
    pub timestamps: u8,
    /// Always zero.
    pub pad: [u8; 2],
}

/// Age buckets of TIME_WAIT: 0–10, 10–20, …, 50–60 s.
pub const TIME_WAIT_AGES: usize = 6;

/// Who opens connections: one process and port space (socket point).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpenerKey {
    /// The port space it opens connections in.
    pub space: PortSpaceKey,
    /// Process id in the initial pid namespace.
    pub pid: u32,
    /// Always zero.
    pub pad: u32,
}

/// What such a process did.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Opener {
    /// Control group of the socket (inode of its directory), 0 if unknown.
    pub cgroup: u64,
    /// Time of the latest open in nanoseconds.
    pub last_ns: u64,
    /// Opens.
    pub opens: u64,
    /// connect() that found no source port.
    pub no_local_port: u64,
    /// Connections closed whose lifetime was added: all of the first ones of a port space, then a part.
    pub closed: u64,
    /// Sum of these lifetimes in milliseconds.
    pub lifetime_ms: u64,
    /// Command name (`task_struct.comm`).
    pub command: [u8; 16],
}

/// The key of an [`Opener`] in the kernel side's table.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct OpenerRef {
    /// The port space.
    pub space: SpaceRef,
    /// Process id in the initial pid namespace.
    pub pid: u32,
}

/// A socket that this host opened, from connect() to the end of ESTABLISHED.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenSocket {
    /// Address of its `struct sock`.
    pub sk: u64,
    /// Time of connect().
    pub opened_ns: u64,
    /// The process and the port space.
    pub opener: OpenerRef,
}

/// What kind of [`Event`] it is.
#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EventKind {
    /// A bare ACK answered a SYN on the wire.
    BareAck = 1,
    /// A socket in SYN_SENT answered a bare ACK with RST (socket point).
    SocketBareAck = 2,
    /// connect() found no source port.
    NoLocalPort = 3,
    /// A live connection that a SYN had met was reset by the RST that answered the bare ACK (seen at
    /// the responder): [`Event::former_age_ms`] is how long it had been without traffic.
    CollisionReset = 4,
}

/// One rare thing, carried by the ring buffer.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// When, in nanoseconds of the source's clock.
    pub time_ns: u64,
    /// The connection.
    pub tuple: FourTuple,
    /// Initial sequence number of the initiator: joins wire and socket.
    pub isn: u32,
    /// Acknowledgement number of the bare ACK.
    pub ack: u32,
    /// Age of the former connection in milliseconds.
    pub former_age_ms: u32,
    /// Process id, 0 if unknown.
    pub pid: u32,
    /// Network namespace for the socket point, else 0.
    pub netns: u32,
    /// SYNs of this open so far.
    pub syns: u16,
    /// Bare ACKs of this open so far.
    pub bare_acks: u16,
    /// An [`EventKind`].
    pub kind: u8,
    /// A [`crate::address::Role`].
    pub role: u8,
    /// A [`crate::memory::Former`].
    pub former: u8,
    /// Always zero.
    pub pad: [u8; 5],
}

/// Things counted once per host: mostly losses, each of which somebody must be able to see.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Global {
    /// The table of handshakes was full.
    HandshakesFull = 0,
    /// The table of port spaces was full.
    PortSpacesFull = 1,
    /// A remembered connection was pushed out while still of use.
    MemoryEvicted = 2,
    /// A port space that earned a bitmap of its ports got none.
    BitmapsFull = 3,
    /// The ring buffer was full.
    EventsLost = 4,
    /// The table of openers was full.
    OpenersFull = 5,
    /// The table of open sockets was full.
    SocketsFull = 6,
    /// The table of the census was full.
    CensusFull = 7,
    /// A chain of the established hash was longer than the census follows.
    CensusChainCut = 8,
    /// A chain changed under the census and was left.
    CensusRestart = 9,
    /// SYNs of no known port space (floods and scans stay here).
    SynsWithoutPortSpace = 10,
    /// Bare ACKs of no known port space.
    BareAcksWithoutPortSpace = 11,
    /// Packets whose headers could not be read.
    Unreadable = 12,
    /// IP fragments other than the first.
    Fragments = 13,
    /// The table of listeners was full.
    ListenersFull = 14,
    /// Handshakes of no known port space that got a SYN-ACK and were never completed.
    StrangersHalfOpen = 15,
    /// A connection whose requests fail was pushed out of the table of HTTP conversations.
    FailingEvicted = 16,
    /// The table of connections that make no progress was full.
    StalledFull = 17,
    /// A tracepoint program that the kernel skipped; the user side asks the kernel for it.
    RunsSkipped = 18,
}

impl Global {
    /// Number of values.
    pub const COUNT: u32 = 19;

    /// Name and meaning of every value, in order.
    pub const NAMES: [(&'static str, &'static str); Self::COUNT as usize] = [
        ("handshakes_full", "the table of handshakes was full"),
        ("port_spaces_full", "the table of port spaces was full"),
        (
            "memory_evicted",
            "a remembered connection was pushed out while still of use",
        ),
        (
            "bitmaps_full",
            "a port space that earned a bitmap of its ports got none",
        ),
        ("events_lost", "the ring buffer was full"),
        ("openers_full", "the table of openers was full"),
        ("sockets_full", "the table of open sockets was full"),
        ("census_full", "the table of the census was full"),
        (
            "census_chain_cut",
            "a hash chain was longer than the census follows",
        ),
        (
            "census_restart",
            "a hash chain changed under the census and was left",
        ),
        ("syns_without_port_space", "SYNs of no known port space"),
        (
            "bare_acks_without_port_space",
            "bare ACKs of no known port space",
        ),
        ("unreadable", "packets whose headers could not be read"),
        ("fragments", "IP fragments other than the first"),
        ("listeners_full", "the table of listeners was full"),
        (
            "half_open_without_port_space",
            "handshakes of no known port space that were never completed",
        ),
        (
            "failing_evicted",
            "a connection whose HTTP requests fail was pushed out of its table",
        ),
        (
            "stalled_full",
            "the table of connections that make no progress was full",
        ),
        (
            "runs_skipped",
            "the kernel skipped a tracepoint program, which was at work already on that processor",
        ),
    ];

    /// Whether the value counts a loss (else it only describes the traffic).
    #[must_use]
    pub const fn is_loss(index: usize) -> bool {
        !matches!(index, 10 | 11 | 13 | 15)
    }
}

#[cfg(feature = "user")]
mod pod {
    use super::{CensusRow, Event, NetnsPorts, Opener, OpenerRef};
    use crate::address::{FourTuple, PortSpaceKey};

    // SAFETY: all of them are `repr(C)`, made of integers only and without padding (see the test).
    unsafe impl aya::Pod for FourTuple {}
    // SAFETY: as above.
    unsafe impl aya::Pod for PortSpaceKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for CensusRow {}
    // SAFETY: as above.
    unsafe impl aya::Pod for NetnsPorts {}
    // SAFETY: as above.
    unsafe impl aya::Pod for OpenerRef {}
    // SAFETY: as above.
    unsafe impl aya::Pod for Opener {}
    // SAFETY: as above.
    unsafe impl aya::Pod for Event {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handshake::{Handshake, Pending};
    use core::mem::size_of;

    /// The kernel refuses keys and values with undefined bytes; this is the sum of the fields.
    #[test]
    fn no_padding() {
        assert_eq!(size_of::<FourTuple>(), 16 + 16 + 2 + 2 + 4);
        assert_eq!(size_of::<PortSpaceKey>(), 16 + 16 + 2 + 1 + 1 + 4);
        assert_eq!(size_of::<Handshake>(), 64);
        assert_eq!(size_of::<Pending>(), 2 * 64);
        assert_eq!(
            size_of::<PortSpace>(),
            (27 * 8 + 32 + 3 * 160_usize).next_multiple_of(64)
        );
        assert_eq!(size_of::<CensusRow>(), 11 * 4 + 24);
        assert_eq!(size_of::<NetnsPorts>(), 2 * 8 + 3 * 4 + 2 + 2);
        assert_eq!(size_of::<OpenerRef>(), 8);
        assert_eq!(size_of::<SpaceSlot>(), 64 + size_of::<PortSpace>());
        assert_eq!(size_of::<Opener>(), 16 + 32 + 16);
        assert_eq!(size_of::<OpenSocket>(), 24);
        assert_eq!(size_of::<Event>(), 8 + 40 + 20 + 4 + 3 + 5);
    }
}
