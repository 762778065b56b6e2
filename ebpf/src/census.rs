//! The census: walks the kernel's TCP hash tables on demand, over all network namespaces at once.
//!
//! A raw-tracepoint program run by BPF_PROG_TEST_RUN reads the tables with `probe_read`: no lock, no
//! setns. One run takes a bounded number of steps and leaves where to go on in
//! [`crate::maps::PROGRESS`]; a chain is never left in its middle, since its sockets may be gone by the
//! next run. Chains move while they are read: a chain that ends with another bucket's marker is
//! counted as [`Global::CensusRestart`] and not read twice, so that no socket counts double.

use aya_ebpf::{
    bindings::{BPF_ANY, BPF_NOEXIST},
    helpers::{bpf_jiffies64, bpf_ktime_get_ns, generated::bpf_probe_read_kernel},
    macros::raw_tracepoint,
    programs::RawTracePointContext,
};
use tuplewatch_common::{
    address::{FourTuple, PortSpaceKey, Role},
    memory::{self, Former},
    observe::{Tables as _, remember},
    record::{CensusRow, Global, TIME_WAIT_AGES},
};

use crate::{
    copied::{Copied, span},
    exchange, idle,
    layout::{
        ABSENT, BIND_FASTREUSE, DATA_SEGS_IN, DATA_SEGS_OUT, DEATH_ROW_HASHINFO,
        EHASH_BUCKET_CHAIN, EHASH_BUCKET_SIZE, HASHINFO_EHASH, HASHINFO_EHASH_MASK,
        HASHINFO_LHASH2, HASHINFO_LHASH2_MASK, HZ, ICSK_BACKOFF, ICSK_BIND_HASH, ICSK_PROBES_OUT,
        ICSK_RETRANSMITS, LISTEN_BUCKET_FIRST, LISTEN_BUCKET_SIZE, LISTEN_NODE, LRCVTIME, LSNDTIME,
        NET_INUM, NET_TCP_DEATH_ROW, NET_TCP_DEATH_ROW_IS_POINTER, PACKETS_OUT, RCV_TSTAMP,
        SK_SOCKET, SKC_DADDR, SKC_DPORT, SKC_FAMILY, SKC_NET, SKC_NULLS_NODE, SKC_NUM,
        SKC_RCV_SADDR, SKC_STATE, SKC_V6_DADDR, SKC_V6_RCV_SADDR, TW_EXPIRES, TW_SUBSTATE, TW_TB,
    },
    maps::{
        AHEAD, CENSUS, LISTENERS, ListenerKey, ON_DEMAND, OnDemand, PROGRESS, WALK, Walk, count,
    },
    socket::{
        self, ESTABLISHED, Fields as _, Kernel, LISTEN, NEW_SYN_RECV, SYN_RECV, SYN_SENT,
        TIME_WAIT, argument,
    },
    stalled::{counts, stalled_look},
    tables::Maps,
};

/// Steps of one run: a step reads a bucket's head or one socket.
const STEPS: u32 = 512;
/// Longest chain that is followed. The table has a bucket per 512 KiB of memory or more.
const CHAIN: u32 = 64;
/// `TCP_TIMEWAIT_LEN` in seconds: compiled into every kernel.
const TIMEWAIT_S: u64 = 60;

/// Index in PROGRESS: the bucket to go on with.
const NEXT: u32 = 0;
/// Index in PROGRESS: number of buckets.
const BUCKETS: u32 = 1;

/// Arguments: first bucket; number of this pass.
#[raw_tracepoint]
pub fn census_listeners(ctx: RawTracePointContext) -> i32 {
    let (start, pass) = (argument::<0>(&ctx), argument::<1>(&ctx) as u32);
    let hash = hashinfo();
    let table = Table {
        buckets: hash.read(&HASHINFO_LHASH2),
        size: hash.read::<u32>(&HASHINFO_LHASH2_MASK) as u64 + 1,
        stride: LISTEN_BUCKET_SIZE.load() as u64,
        head: LISTEN_BUCKET_FIRST.load() as u64,
        node: LISTEN_NODE.load() as u64,
    };
    walk(&table, start, |sk, _| {
        census_listener(sk.0, pass as u64);
        sk.read_at(table.node)
    });
    0
}

/// Notes a listening port; a global function like [`census_row`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn census_listener(sk: u64, pass: u64) -> i32 {
    let sk = Kernel(sk);
    if sk.read::<u8>(&SKC_STATE) as u32 != LISTEN {
        return 0;
    }
    let key = ListenerKey {
        netns: socket::netns(sk),
        port: sk.read::<u16>(&SKC_NUM) as u32,
    };
    if LISTENERS.insert(key, pass as u32, BPF_ANY.into()).is_err() {
        count(Global::ListenersFull);
    }
    1
}

/// Arguments: first bucket; number of this pass.
#[raw_tracepoint]
pub fn census_established(ctx: RawTracePointContext) -> i32 {
    let (start, pass) = (argument::<0>(&ctx), argument::<1>(&ctx) as u32);
    // SAFETY: a helper without arguments.
    let jiffies = unsafe { bpf_jiffies64() };
    if let Some(storage) = ON_DEMAND.get_ptr_mut(0) {
        // Between two runs its memory may have been given to another one.
        // SAFETY: only one program of those that the user side runs goes on at a time.
        unsafe { (*storage).net = 0 };
    }
    let table = established();
    walk(&table, start, |sk, bucket| {
        let place = bucket << 32 | table.size;
        if census_row(sk.0, jiffies, pass as u64, place) == STALLED {
            stalled_look(sk.0, 0);
        }
        // SAFETY: as above.
        ON_DEMAND
            .get_ptr(0)
            .map_or(0, |storage| unsafe { (*storage).next })
    });
    0
}

/// Beside the inode of a network namespace whose sockets are to be counted.
const COUNTED: u64 = 1 << 32;
/// The socket may make no progress.
const STALLED: i32 = 2;

/// Adds a socket to the row of its port space. `place`: its bucket and, in the lower half, how many there are.
///
/// With its symbol it is a global function of BTF, which the verifier looks through once by itself
/// instead of anew at every turn of the loop that calls it.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn census_row(sk: u64, jiffies: u64, pass: u64, place: u64) -> i32 {
    let sk = Kernel(sk);
    let Some(storage) = ON_DEMAND.get_ptr_mut(0) else {
        return 0;
    };
    // SAFETY: only one program of those that the user side runs goes on at a time.
    let storage = unsafe { &mut *storage };
    let OnDemand {
        tuple,
        key,
        row: new,
        parts: [common, rest],
        net,
        netns,
        next,
        ..
    } = storage;
    let span = span!(
        SKC_DADDR: 4, SKC_RCV_SADDR: 4, SKC_DPORT: 2, SKC_NUM: 2, SKC_FAMILY: 2, SKC_STATE: 1,
        SKC_NET: 8, SKC_V6_DADDR: 16, SKC_V6_RCV_SADDR: 16, SKC_NULLS_NODE: 8,
    );
    let common = Copied::new(sk, span, common);
    *next = common.read(&SKC_NULLS_NODE);
    let at = common.read::<u64>(&SKC_NET);
    if at != *net {
        let inode = Kernel(at).read::<u32>(&NET_INUM);
        *net = at;
        *netns = if socket::is_watched(inode) {
            COUNTED | inode as u64
        } else {
            0
        };
    }
    if *netns == 0 {
        return 0;
    }
    let netns = *netns as u32;
    match socket::tuple(common) {
        Some(found) => *tuple = found,
        None => return 0,
    }
    let kind = common.read::<u8>(&SKC_STATE) as u32;
    let (state, age_s) = state_and_age(sk, kind, jiffies);
    let listener = ListenerKey {
        netns,
        port: tuple.initiator_port as u32,
    };
    // SAFETY: the value is copied at once.
    let is_responder = unsafe { LISTENERS.get(listener) }.is_some_and(|p| *p == pass as u32);
    *key = if is_responder {
        PortSpaceKey::socket(&tuple.reversed(), Role::Responder as u8, netns)
    } else {
        PortSpaceKey::socket(tuple, Role::Unknown as u8, netns)
    };
    let Some(row) = row_of(key, new, pass as u32) else {
        // Without a row it may be stalled all the same.
        return STALLED;
    };
    if state != ESTABLISHED {
        row.bound += (!is_responder && is_bound(sk, sk, kind)) as u32;
        tally(row, state, age_s);
        return 0;
    }
    row.established += 1;
    let span = span!(
        ICSK_BIND_HASH: 8, ICSK_RETRANSMITS: 1, ICSK_BACKOFF: 1, ICSK_PROBES_OUT: 1, LRCVTIME: 4,
        LSNDTIME: 4, DATA_SEGS_OUT: 4, DATA_SEGS_IN: 4, RCV_TSTAMP: 4,
    );
    let rest = Copied::new(sk, span, rest);
    row.bound += (!is_responder && is_bound(sk, rest, kind)) as u32;
    let now = jiffies as u32;
    let pace = pace(sk, rest, now, is_responder);
    row.waiting += pace & WAITING;
    row.unaccepted += (pace & UNACCEPTED) / UNACCEPTED;
    row.lively += (pace & LIVELY) / LIVELY;
    let heard = [rest.read(&RCV_TSTAMP), rest.read(&LRCVTIME)];
    let buckets = [place >> 32, place & u32::MAX as u64];
    idle::census(row, heard, tuple.hash(), buckets, now);
    if counts(rest).may_be_stalled() {
        STALLED
    } else {
        1
    }
}

/// The row of a port space in this pass, made if need be.
#[inline(always)]
fn row_of<'a>(key: &PortSpaceKey, new: &mut CensusRow, pass: u32) -> Option<&'a mut CensusRow> {
    let known = CENSUS.get_ptr_mut(key).or_else(|| {
        *new = CensusRow {
            pass,
            ..CensusRow::default()
        };
        if CENSUS.insert(key, &*new, BPF_NOEXIST.into()).is_err() {
            count(Global::CensusFull);
        }
        CENSUS.get_ptr_mut(key)
    })?;
    // SAFETY: a map value stays valid while the program runs; only one run goes on at a time.
    let row = unsafe { &mut *known };
    if row.pass != pass {
        *row = CensusRow {
            pass,
            ..CensusRow::default()
        };
    }
    Some(row)
}

/// Remembers the connections found, which are older than the agent: run once, at its start.
///
/// Arguments: first bucket.
#[raw_tracepoint]
pub fn census_seed(ctx: RawTracePointContext) -> i32 {
    let start = argument::<0>(&ctx);
    // SAFETY: a helper without arguments.
    let jiffies = unsafe { bpf_jiffies64() };
    let table = established();
    walk(&table, start, |sk, _| {
        census_remember(sk.0, jiffies);
        sk.read_at(table.node)
    });
    0
}

/// Remembers a connection; a global function like [`census_row`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn census_remember(sk: u64, jiffies: u64) -> i32 {
    let sk = Kernel(sk);
    let Some(storage) = ON_DEMAND.get_ptr_mut(0) else {
        return 0;
    };
    // SAFETY: only one program of those that the user side runs goes on at a time.
    let storage = unsafe { &mut *storage };
    let Some(tuple) = socket::tuple(sk) else {
        return 0;
    };
    storage.tuple = tuple;
    let kind = sk.read::<u8>(&SKC_STATE) as u32;
    let (state, age_s) = state_and_age(sk, kind, jiffies);
    // SAFETY: a helper without arguments.
    let now_ns = unsafe { bpf_ktime_get_ns() };
    let age_ns = age_s * 1_000_000_000;
    remember_older(
        &storage.tuple,
        state,
        now_ns - if age_ns < now_ns { age_ns } else { 0 },
    );
    if kind == ESTABLISHED {
        exchange::older(sk, &storage.tuple);
    }
    1
}

/// The established hash.
#[inline(always)]
fn established() -> Table {
    let hash = hashinfo();
    Table {
        buckets: hash.read(&HASHINFO_EHASH),
        size: hash.read::<u32>(&HASHINFO_EHASH_MASK) as u64 + 1,
        stride: EHASH_BUCKET_SIZE.load() as u64,
        head: EHASH_BUCKET_CHAIN.load() as u64,
        node: SKC_NULLS_NODE.load() as u64,
    }
}

struct Table {
    buckets: u64,
    size: u64,
    stride: u64,
    head: u64,
    node: u64,
}

/// The hash tables of the current task's network namespace, which all namespaces share unless one
/// was made with `net.ipv4.tcp_child_ehash_entries`.
#[inline(always)]
fn hashinfo() -> Kernel {
    let net = socket::current_netns().0;
    let row = if NET_TCP_DEATH_ROW_IS_POINTER.load() != 0 {
        Kernel(net).read::<u64>(&NET_TCP_DEATH_ROW)
    } else {
        net + NET_TCP_DEATH_ROW.load() as u64
    };
    Kernel(Kernel(row).read::<u64>(&DEATH_ROW_HASHINFO))
}

/// Follows the chains from bucket `start` on, as far as the steps of one run reach. `visit` gets a socket and its
/// bucket, and tells the node that comes next.
///
/// Where the walk stands is kept in a map, not in registers: what the verifier reads from memory is an
/// unknown number, so that one turn of the loop looks like the next. With registers it would tell
/// apart every length of chain at every step, and give up.
#[inline(always)]
fn walk(table: &Table, start: u64, mut visit: impl FnMut(Kernel, u64) -> u64) {
    let Some(at) = WALK.get_ptr_mut(0) else {
        return;
    };
    // SAFETY: an array value; only one run goes on at a time.
    let at = unsafe { &mut *at };
    at.bucket = start;
    at.node = 0;
    at.chain = 0;
    at.ahead = u64::MAX;
    let mut step = 0u32;
    while step < STEPS {
        step += 1;
        if at.node == 0 {
            if at.bucket >= table.size || step > STEPS - CHAIN {
                break;
            }
            at.node = at.head_of_bucket(table);
            at.chain = 0;
            if at.node == 0 || at.node & 1 != 0 {
                at.next_bucket();
            }
            continue;
        }
        let next = visit(Kernel(at.node - table.node), at.bucket);
        at.chain += 1;
        if next == 0 || next & 1 != 0 {
            // A nulls list ends with its bucket's number (a plain list with 0): another number means
            // that the last socket moved to another chain meanwhile.
            if next != 0 && next >> 1 & (table.size - 1) != at.bucket {
                count(Global::CensusRestart);
            }
            at.next_bucket();
        } else if at.chain >= CHAIN as u64 - 1 {
            count(Global::CensusChainCut);
            at.next_bucket();
        } else {
            at.node = next;
        }
    }
    set(NEXT, at.bucket);
    set(BUCKETS, table.size);
}

impl Walk {
    /// The first node of the bucket. A call for each of so many buckets that are empty would cost more than the
    /// rest of the walk.
    #[inline(always)]
    fn head_of_bucket(&mut self, table: &Table) -> u64 {
        const MASK: u64 = AHEAD as u64 - 1;
        let buckets = Kernel(table.buckets);
        if table.stride != size_of::<u64>() as u64 {
            return buckets.read_at(self.bucket * table.stride + table.head);
        }
        let first = self.bucket & !MASK;
        if self.ahead != first {
            self.ahead = first;
            // Beyond the end of a small table there is something else, which nobody asks for.
            // SAFETY: there is room for so many bytes; the source may be any address.
            unsafe {
                bpf_probe_read_kernel(
                    self.heads.as_mut_ptr().cast(),
                    size_of_val(&self.heads) as u32,
                    (buckets.0 + first * table.stride) as *const _,
                );
            }
        }
        let at = (self.bucket & MASK) as usize;
        // SAFETY: the mask keeps it within.
        unsafe { *self.heads.as_ptr().add(at) }
    }

    #[inline(always)]
    fn next_bucket(&mut self) {
        self.node = 0;
        self.bucket += 1;
    }
}

#[inline(always)]
fn set(index: u32, value: u64) {
    if let Some(n) = PROGRESS.get_ptr_mut(index) {
        // SAFETY: an array value; only one run goes on at a time.
        unsafe { *n = value }
    }
}

/// State of a socket and, in TIME_WAIT, the seconds since it entered it. A socket of its own kind has
/// `TIME_WAIT` as its `skc_state` even while it waits for the peer's FIN.
#[inline(always)]
fn state_and_age(sk: Kernel, kind: u32, jiffies: u64) -> (u32, u64) {
    if kind != TIME_WAIT {
        return (kind, 0);
    }
    let substate = sk.read::<u8>(&TW_SUBSTATE) as u32;
    if substate != TIME_WAIT {
        return (substate, 0);
    }
    let left = sk.read::<u64>(&TW_EXPIRES).wrapping_sub(jiffies);
    // Division by zero would be a panic, which the verifier does not let through.
    let hz = HZ.load() as u64;
    let left_s = if (left as i64) < 0 || hz == 0 {
        0
    } else {
        left / hz
    };
    (TIME_WAIT, TIMEWAIT_S.saturating_sub(left_s))
}

/// The initiator's latest data was not answered for a second.
const WAITING: u32 = 1;
/// … and the responder's application has not accepted the connection.
const UNACCEPTED: u32 = 2;
/// It waits for less than that, or was answered within the last second.
const LIVELY: u32 = 4;

/// Whether an established connection waits for an answer, from when its socket sent and received data
/// last. Which end has to answer is known from the role.
#[inline(always)]
fn pace(sk: Kernel, rest: Copied<'_>, now: u32, is_responder: bool) -> u32 {
    let hz = HZ.load();
    if hz == 0 || DATA_SEGS_IN.load() == ABSENT || DATA_SEGS_OUT.load() == ABSENT {
        return 0;
    }
    if LSNDTIME.load() == ABSENT || LRCVTIME.load() == ABSENT {
        return 0;
    }
    let (sent, received) = (rest.read::<u32>(&LSNDTIME), rest.read::<u32>(&LRCVTIME));
    let (out, arrived) = (
        rest.read::<u32>(&DATA_SEGS_OUT),
        rest.read::<u32>(&DATA_SEGS_IN),
    );
    let (asked_at, answered_at, asked, answered) = if is_responder {
        (received, sent, arrived, out)
    } else {
        (sent, received, out, arrived)
    };
    // Both times begin with the handshake, so that only the counts tell about its own tick.
    let behind = asked_at.wrapping_sub(answered_at) as i32;
    if asked == 0 || behind < 0 || behind == 0 && answered != 0 {
        let lately = answered != 0 && now.wrapping_sub(answered_at) < hz;
        return if lately { LIVELY } else { 0 };
    }
    // What was not acknowledged has not arrived: that is another trouble.
    if !is_responder && PACKETS_OUT.load() != ABSENT && sk.read::<u32>(&PACKETS_OUT) != 0 {
        return 0;
    }
    if now.wrapping_sub(asked_at) < hz {
        return LIVELY;
    }
    // A connection in the accept queue has no `struct socket` yet.
    let is_queued = is_responder && SK_SOCKET.load() != ABSENT && sk.read::<u64>(&SK_SOCKET) == 0;
    if is_queued {
        WAITING | UNACCEPTED
    } else {
        WAITING
    }
}

/// The port was taken by bind(): such sockets share one pool for all destinations.
#[inline(always)]
fn is_bound(sk: Kernel, connection: impl socket::Fields, kind: u32) -> bool {
    if TW_TB.load() == ABSENT || ICSK_BIND_HASH.load() == ABSENT || BIND_FASTREUSE.load() == ABSENT
    {
        return false;
    }
    let bucket = if kind == TIME_WAIT {
        sk.read::<u64>(&TW_TB)
    } else if kind == NEW_SYN_RECV {
        0
    } else {
        connection.read::<u64>(&ICSK_BIND_HASH)
    };
    bucket != 0 && Kernel(bucket).read::<i8>(&BIND_FASTREUSE) >= 0
}

/// Counts a socket that is not established.
#[inline(always)]
fn tally(row: &mut CensusRow, state: u32, age_s: u64) {
    match state {
        SYN_SENT | SYN_RECV | NEW_SYN_RECV => row.opening += 1,
        TIME_WAIT => {
            let bucket = (age_s / 10) as usize;
            let last = TIME_WAIT_AGES - 1;
            row.time_wait[if bucket < last { bucket } else { last }] += 1;
        }
        _ => row.closing += 1,
    }
}

/// Remembers a connection that is older than the agent, unless a packet has told of it already.
#[inline(always)]
fn remember_older(tuple: &FourTuple, state: u32, since_ns: u64) {
    let former = match state {
        ESTABLISHED => Former::Open,
        SYN_RECV | NEW_SYN_RECV => Former::HalfOpen,
        SYN_SENT => return,
        _ => Former::Closed,
    };
    let hash = tuple.hash();
    let known = Maps
        .memory(hash)
        .is_some_and(|set| memory::find(set, hash).is_some());
    if !known {
        remember(&mut Maps, hash, 0, former, since_ns);
    }
}
