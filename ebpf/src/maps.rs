//! All maps. Sizes given here are minimal; the user side plans the real ones before loading.

use aya_ebpf::{
    macros::map,
    maps::{Array, HashMap, PerCpuArray, Queue, RingBuf},
};
use tuplewatch_common::{
    address::{FourTuple, PortSpaceKey},
    conversation,
    conversation::Head,
    exchange,
    handshake::Pending,
    idle::Rest,
    memory::Set,
    observe::Work,
    record::{CensusRow, Global, NetnsPorts, OpenSocket, Opener, OpenerRef, PortBitmap, SpaceSlot},
    recorder::{Recorded, WATCHED},
    stalled::{StalledKey, StalledRow},
};

use crate::{copied, ways::Tags};

/// Connections being opened: the tags of [`HANDSHAKES`], a set of [`crate::ways::WAYS`] in each cache line.
///
/// A table of our own, because each connection enters and leaves it: in an array that the verifier
/// inlines a look-up costs a few instructions and two cache lines, in the kernel's hash table several
/// times as much. Two CPUs that enter the same set at the same moment take different places (see
/// [`crate::ways`]).
#[map]
pub static HANDSHAKE_TAGS: Array<Tags> = Array::with_max_entries(64, MMAPABLE);
/// Places of the connections being opened, [`crate::ways::WAYS`] for each set of tags.
#[map]
pub static HANDSHAKES: Array<Pending> = Array::with_max_entries(1024, MMAPABLE);

/// `BPF_F_MMAPABLE` (5.5): the user side looks through the table without a system call. It also puts the
/// first value at the beginning of a page (`array_map_alloc`), elsewhere 56 bytes past that of a cache
/// line in 6.18: every set of tags would lie in two.
const MMAPABLE: u32 = 1 << 10;

/// How many of [`HANDSHAKES`] share a hash slot. Look-ups in arrays are inlined by the verifier, so
/// that this costs a pure ACK a few instructions instead of a hash look-up.
#[map]
pub static OPENING: Array<u64> = Array::with_max_entries(OPENING_SLOTS, 0);
/// Slots of [`OPENING`]; a power of two. Small enough to stay in the cache: of 100 connections being
/// opened at once, every fortieth pure ACK of others costs a look-up in vain.
pub const OPENING_SLOTS: u32 = 1 << 12;

/// Where the counters of a port space are: a [`tuplewatch_common::record::SpaceRef`].
#[map]
pub static SPACE_INDEX: HashMap<PortSpaceKey, u32> = HashMap::with_max_entries(1024, 0);
/// The port spaces looked up last, by a hash of the key: a `SpaceRef`, which leads to the key itself,
/// so that a wrong one is noticed. Spares nearly every look-up in [`SPACE_INDEX`].
#[map]
pub static SPACE_CACHE: Array<u32> = Array::with_max_entries(SPACE_CACHE_LEN, 0);
/// Entries of [`SPACE_CACHE`]; a power of two.
pub const SPACE_CACHE_LEN: u32 = 1 << 14;
/// Counters of port spaces. Index 0 is never given out.
#[map]
pub static SPACES: Array<SpaceSlot> = Array::with_max_entries(1024, MMAPABLE);
/// Indices of [`SPACES`] that are free: the user side fills it.
#[map]
pub static FREE_SPACES: Queue<u32> = Queue::with_max_entries(1024, 0);

/// Former connections by four-tuple.
#[map]
pub static MEMORY: Array<Set> = Array::with_max_entries(1024, MMAPABLE);

/// SYNs that met a bare ACK and may come again from another port.
#[map]
pub static MOVED: Array<u64> = Array::with_max_entries(MOVED_SLOTS, 0);
/// When [`MOVED`] was written last.
#[map]
pub static MOVED_AT: Array<u64> = Array::with_max_entries(1, 0);
/// Slots of [`MOVED`]; a power of two.
pub const MOVED_SLOTS: u32 = 1 << 13;

/// HTTP/1 conversations: the tags of [`TALKS`], as [`HANDSHAKE_TAGS`].
#[map]
pub static TALK_TAGS: Array<Tags> = Array::with_max_entries(1, 0);
/// HTTP/1 conversations, a set of [`crate::ways::WAYS`] in each value.
#[map]
pub static TALKS: Array<conversation::Set> = Array::with_max_entries(1, MMAPABLE);
/// Which pairs of ports have not spoken HTTP/1 for long: see [`crate::http::worth_a_look`].
#[map]
pub static LOOKS: Array<u64> = Array::with_max_entries(1, 0);
/// The begin of failed responses, by the hash of their connection; the user side sees from it whose
/// error page they are.
#[map]
pub static HEADS: Array<Head> = Array::with_max_entries(HEADS_LEN, MMAPABLE);
/// Entries of [`HEADS`]; a power of two.
pub const HEADS_LEN: u32 = 1 << 8;

/// Connections whose responses are counted: the tags of [`EXCHANGES`], as [`HANDSHAKE_TAGS`].
#[map]
pub static EXCHANGE_TAGS: Array<Tags> = Array::with_max_entries(1, MMAPABLE);
/// Sizes and latencies of responses, a set of [`crate::ways::WAYS`] in each value.
#[map]
pub static EXCHANGES: Array<exchange::Set> = Array::with_max_entries(1, MMAPABLE);

/// How many of [`HANDSHAKES`] belong to no known port space.
#[map]
pub static STRANGERS: Array<u64> = Array::with_max_entries(1, 0);

/// Source ports of completed handshakes. A bitmap has two generations, 2n and 2n+1: the user side
/// reads and empties one while this side fills the other. The bitmaps 0 and 1 are never given out.
#[map]
pub static BITMAPS: Array<PortBitmap> = Array::with_max_entries(16, MMAPABLE);
/// Bitmaps that are free (n): the user side fills it.
#[map]
pub static FREE_BITMAPS: Queue<u32> = Queue::with_max_entries(8, 0);

/// Settings that change while running: see [`CONFIG_GENERATION`] and [`CONFIG_BITMAP_FROM`].
#[map]
pub static CONFIG: Array<u32> = Array::with_max_entries(2, 0);
/// Index of the generation of bitmaps being filled.
pub const CONFIG_GENERATION: u32 = 0;
/// Index of the number of completed handshakes that earns a port space its bitmap.
pub const CONFIG_BITMAP_FROM: u32 = 1;

/// Interfaces whose ingress is hooked, and those stacked on them: 1, or [`HOOKED_GUEST`]. The key is
/// the index.
#[map]
pub static HOOKED: HashMap<u32, u8> = HashMap::with_max_entries(1024, 0);

/// The values of [`HOOKED`] by the low bits of the index, as `index << 8 | value`, which every SYN asks
/// for. [`ASK_HOOKED`] where two interfaces share a place.
#[map]
pub static HOOKED_FAST: Array<u64> = Array::with_max_entries(HOOKED_FAST_LEN, 0);
/// Entries of [`HOOKED_FAST`]; a power of two.
pub const HOOKED_FAST_LEN: u32 = 1 << 10;
/// The answer stands in [`HOOKED`].
pub const ASK_HOOKED: u64 = u64::MAX;

/// Value of [`HOOKED`] for the node's side of a pod's veth.
pub const HOOKED_GUEST: u8 = 2;

/// Sockets that this host opened: the tags of [`OPEN_SOCKETS`], as [`HANDSHAKE_TAGS`].
#[map]
pub static SOCKET_TAGS: Array<Tags> = Array::with_max_entries(64, MMAPABLE);
/// Places of the sockets that this host opened, [`crate::ways::WAYS`] for each set of tags.
#[map]
pub static OPEN_SOCKETS: Array<OpenSocket> = Array::with_max_entries(1024, 0);

/// Who opens connections.
#[map]
pub static OPENERS: HashMap<OpenerRef, Opener> = HashMap::with_max_entries(1024, 0);

/// Network namespaces that the socket hooks are restricted to.
#[map]
pub static NETNS: HashMap<u32, u8> = HashMap::with_max_entries(64, 0);

/// What [`crate::netns`] found.
#[map]
pub static NETNS_PORTS: Array<NetnsPorts> = Array::with_max_entries(1, 0);
/// Bitmap of the reserved ports of that namespace.
#[map]
pub static RESERVED_PORTS: Array<PortBitmap> = Array::with_max_entries(1, 0);

/// The latest open on this CPU, until its SYN leaves: see [`SearchNote`].
#[map]
pub static SEARCH: PerCpuArray<SearchNote> = PerCpuArray::with_max_entries(1, 0);

/// connect() began to look for a port: the SYN leaves in the same task, most often on the same CPU.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SearchNote {
    /// Time of CLOSE→SYN_SENT, 0 if there is none.
    pub started_ns: u64,
    /// Last four bytes of the responder's address and its port: enough to tell whose SYN it is.
    pub responder: u32,
    /// Port of the responder.
    pub responder_port: u32,
}

/// Rows of the census.
#[map]
pub static CENSUS: HashMap<PortSpaceKey, CensusRow> = HashMap::with_max_entries(1024, 0);

/// Listening ports seen by the pass of the census given as value.
#[map]
pub static LISTENERS: HashMap<ListenerKey, u32> = HashMap::with_max_entries(1024, 0);

/// A listening port of a network namespace.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ListenerKey {
    /// Inode of the namespace.
    pub netns: u32,
    /// The port.
    pub port: u32,
}

/// Established sockets that make no progress: see [`crate::stalled`].
#[map]
pub static STALLED: HashMap<StalledKey, StalledRow> = HashMap::with_max_entries(256, 0);
/// Addresses of sockets for [`crate::stalled::stalled_again`].
#[map]
pub static STALLED_AGAIN: Array<u64> = Array::with_max_entries(STALLED_BATCH, 0);
/// Entries of [`STALLED_AGAIN`].
pub const STALLED_BATCH: u32 = 64;
/// Connections that a census found idle, each in one place ([`crate::idle`]): those that find theirs taken are not
/// remembered, since of those that wake only the longest rest matters.
#[map]
pub static RESTS: Array<Rest> = Array::with_max_entries(RESTS_LEN, 0);
/// Entries of [`RESTS`]; a power of two.
pub const RESTS_LEN: u32 = 1 << 15;

/// How many resets of idle connections this CPU has told in which second.
#[map]
pub static IDLE_BUDGET: PerCpuArray<[u64; 2]> = PerCpuArray::with_max_entries(1, 0);

/// What a run of the census tells the user side.
#[map]
pub static PROGRESS: Array<u64> = Array::with_max_entries(PROGRESS_LEN, 0);
/// Entries of [`PROGRESS`]: the bucket to go on with, the number of buckets.
pub const PROGRESS_LEN: u32 = 2;

/// Where a run of the census stands.
#[map]
pub static WALK: Array<Walk> = Array::with_max_entries(1, 0);

/// See [`WALK`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Walk {
    /// The bucket.
    pub bucket: u64,
    /// The node in its chain, 0 before its head is read.
    pub node: u64,
    /// Nodes of this chain so far.
    pub chain: u64,
    /// The bucket of the first of [`Walk::heads`].
    pub ahead: u64,
    /// First nodes of buckets that were read ahead.
    pub heads: [u64; AHEAD],
}

/// Buckets whose first nodes are read at once.
pub const AHEAD: usize = 32;

/// Hashes of [`HANDSHAKES`] for [`crate::sweep`].
#[map]
pub static SWEEP: Array<u64> = Array::with_max_entries(SWEEP_BATCH, 0);
/// Entries of [`SWEEP`].
pub const SWEEP_BATCH: u32 = 64;

/// Rare events.
#[map]
pub static EVENTS: RingBuf = RingBuf::with_byte_size(4096, 0);

/// The ring of [`crate::recorder`]: a section for each CPU.
#[map]
pub static RECORDER: Array<Recorded> = Array::with_max_entries(1, MMAPABLE);
/// How many packets this CPU has put into its section.
#[map]
pub static RECORDER_NEXT: PerCpuArray<u64> = PerCpuArray::with_max_entries(1, 0);
/// Hashes of the connections of which every segment is kept: [`tuplewatch_common::recorder::places`].
#[map]
pub static RECORDER_WATCHED: Array<u64> = Array::with_max_entries(1 + WATCHED, MMAPABLE);

/// What is counted once per host.
#[map]
pub static GLOBALS: PerCpuArray<u64> = PerCpuArray::with_max_entries(Global::COUNT, 0);

/// Working storage of [`tuplewatch_common::observe`]. A packet hook is not interrupted by another one
/// on its CPU: both run with soft interrupts off.
#[map]
pub static WORK: PerCpuArray<Work> = PerCpuArray::with_max_entries(1, 0);

/// Working storage of the programs that the user side runs on demand, one at a time.
#[map]
pub static ON_DEMAND: Array<OnDemand> = Array::with_max_entries(1, 0);

/// See [`ON_DEMAND`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct OnDemand {
    /// For the sweep.
    pub work: Work,
    /// Connection of a row of the census, the local end first.
    pub tuple: FourTuple,
    /// Port space of the row.
    pub key: PortSpaceKey,
    /// A new row.
    pub row: CensusRow,
    /// Parts of the socket of the row: see [`crate::copied`].
    pub parts: [[u64; copied::WORDS]; 2],
    /// The node behind that of the socket.
    pub next: u64,
    /// The `struct net` of the socket before, 0 for none.
    pub net: u64,
    /// Its inode with a bit above, 0 if its sockets are not to be counted.
    pub netns: u64,
}

/// Adds to a [`Global`].
#[inline(always)]
pub fn count(what: Global) {
    if let Some(n) = GLOBALS.get_ptr_mut(what as u32) {
        // SAFETY: the map value is valid while the program runs, and only this CPU writes to it.
        unsafe { *n += 1 }
    }
}
