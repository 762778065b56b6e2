//! The census: walks the kernel's TCP hash tables on demand, over all network namespaces at once.
//!
//! A raw-tracepoint program run by BPF_PROG_TEST_RUN reads the tables with `probe_read`: no lock, no
//! setns. One run takes a bounded number of steps and leaves where to go on in
//! [`crate::maps::PROGRESS`]; a chain is never left in its middle, since its sockets may be gone by the
//! next run. Chains move while they are read: a chain that ends with another bucket's marker is
//! counted as [`Global::CensusRestart`] and not read twice, so that no socket counts double.

use aya_ebpf::{
    bindings::{BPF_ANY, BPF_NOEXIST},
    helpers::{bpf_jiffies64, bpf_ktime_get_ns},
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
    idle,
    layout::{
        ABSENT, BIND_FASTREUSE, DATA_SEGS_IN, DATA_SEGS_OUT, DEATH_ROW_HASHINFO,
        EHASH_BUCKET_CHAIN, EHASH_BUCKET_SIZE, HASHINFO_EHASH, HASHINFO_EHASH_MASK,
        HASHINFO_LHASH2, HASHINFO_LHASH2_MASK, HZ, ICSK_BIND_HASH, LISTEN_BUCKET_FIRST,
        LISTEN_BUCKET_SIZE, LISTEN_NODE, LRCVTIME, LSNDTIME, NET_TCP_DEATH_ROW,
        NET_TCP_DEATH_ROW_IS_POINTER, PACKETS_OUT, SK_SOCKET, SKC_NULLS_NODE, SKC_NUM, SKC_STATE,
        TW_EXPIRES, TW_SUBSTATE, TW_TB,
    },
    maps::{CENSUS, LISTENERS, ListenerKey, ON_DEMAND, OnDemand, PROGRESS, WALK, Walk, count},
    socket::{
        self, ESTABLISHED, Kernel, LISTEN, NEW_SYN_RECV, SYN_RECV, SYN_SENT, TIME_WAIT, argument,
    },
    stalled::stalled_look,
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
    walk(&table, start, |sk| {
        census_listener(sk.0, pass as u64);
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
    walk(&established(), start, |sk| {
        census_row(sk.0, jiffies, pass as u64);
        stalled_look(sk.0, 0);
    });
    0
}

/// Adds a socket to the row of its port space.
///
/// With its symbol it is a global function of BTF, which the verifier looks through once by itself
/// instead of anew at every turn of the loop that calls it.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn census_row(sk: u64, jiffies: u64, pass: u64) -> i32 {
    let sk = Kernel(sk);
    let netns = socket::netns(sk);
    if !socket::is_watched(netns) {
        return 0;
    }
    let Some(storage) = ON_DEMAND.get_ptr_mut(0) else {
        return 0;
    };
    // SAFETY: only one program of those that the user side runs goes on at a time.
    let storage = unsafe { &mut *storage };
    let Some(tuple) = socket::tuple(sk) else {
        return 0;
    };
    storage.tuple = tuple;
    let (state, age_s) = state_and_age(sk, jiffies);
    let seen = Seen {
        sk,
        state,
        age_s,
        jiffies,
    };
    row(storage, &seen, netns, pass as u32);
    if state == ESTABLISHED
        && let Some(row) = CENSUS.get_ptr_mut(&storage.key)
    {
        // SAFETY: a map value stays valid while the program runs; only one run goes on at a time.
        let row = unsafe { &mut *row };
        idle::census(row, sk, storage.tuple.hash(), jiffies as u32);
    }
    1
}

/// Remembers the connections found, which are older than the agent: run once, at its start.
///
/// Arguments: first bucket.
#[raw_tracepoint]
pub fn census_seed(ctx: RawTracePointContext) -> i32 {
    let start = argument::<0>(&ctx);
    // SAFETY: a helper without arguments.
    let jiffies = unsafe { bpf_jiffies64() };
    walk(&established(), start, |sk| {
        census_remember(sk.0, jiffies);
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
    let (state, age_s) = state_and_age(sk, jiffies);
    // SAFETY: a helper without arguments.
    let now_ns = unsafe { bpf_ktime_get_ns() };
    let age_ns = age_s * 1_000_000_000;
    remember_older(
        &storage.tuple,
        state,
        now_ns - if age_ns < now_ns { age_ns } else { 0 },
    );
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

/// Follows the chains from bucket `start` on, as far as the steps of one run reach.
///
/// Where the walk stands is kept in a map, not in registers: what the verifier reads from memory is an
/// unknown number, so that one turn of the loop looks like the next. With registers it would tell
/// apart every length of chain at every step, and give up.
#[inline(always)]
fn walk(table: &Table, start: u64, mut visit: impl FnMut(Kernel)) {
    let Some(at) = WALK.get_ptr_mut(0) else {
        return;
    };
    // SAFETY: an array value; only one run goes on at a time.
    let at = unsafe { &mut *at };
    *at = Walk {
        bucket: start,
        node: 0,
        chain: 0,
    };
    let mut step = 0u32;
    while step < STEPS {
        step += 1;
        if at.node == 0 {
            if at.bucket >= table.size || step > STEPS - CHAIN {
                break;
            }
            at.node = Kernel(table.buckets).read_at(at.bucket * table.stride + table.head);
            at.chain = 0;
            if at.node == 0 || at.node & 1 != 0 {
                at.next_bucket();
            }
            continue;
        }
        visit(Kernel(at.node - table.node));
        let next = Kernel(at.node).read_at::<u64>(0);
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

/// State of a socket and, in TIME_WAIT, the seconds since it entered it.
#[inline(always)]
fn state_and_age(sk: Kernel, jiffies: u64) -> (u32, u64) {
    let state = sk.read::<u8>(&SKC_STATE) as u32;
    if state != TIME_WAIT {
        return (state, 0);
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

/// A socket of the established hash.
struct Seen {
    sk: Kernel,
    state: u32,
    /// Seconds since it entered TIME_WAIT.
    age_s: u64,
    /// Now.
    jiffies: u64,
}

#[inline(always)]
fn row(storage: &mut OnDemand, seen: &Seen, netns: u32, pass: u32) {
    let OnDemand {
        tuple,
        key,
        row: new,
        ..
    } = storage;
    let listener = ListenerKey {
        netns,
        port: tuple.initiator_port as u32,
    };
    // SAFETY: the value is copied at once.
    let is_responder = unsafe { LISTENERS.get(listener) }.is_some_and(|p| *p == pass);
    *key = if is_responder {
        PortSpaceKey::socket(&tuple.reversed(), Role::Responder as u8, netns)
    } else {
        PortSpaceKey::socket(tuple, Role::Unknown as u8, netns)
    };
    let bound = !is_responder && is_bound(seen.sk, seen.state);
    let pace = if seen.state == ESTABLISHED {
        pace(seen, is_responder)
    } else {
        0
    };
    let Some(row) = CENSUS.get_ptr_mut(&*key) else {
        *new = CensusRow {
            pass,
            ..CensusRow::default()
        };
        tally(new, seen, bound, pace);
        if CENSUS.insert(&*key, &*new, BPF_NOEXIST.into()).is_err() {
            count(Global::CensusFull);
        }
        return;
    };
    // SAFETY: a map value stays valid while the program runs; only one run goes on at a time.
    let row = unsafe { &mut *row };
    if row.pass != pass {
        *row = CensusRow {
            pass,
            ..CensusRow::default()
        };
    }
    tally(row, seen, bound, pace);
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
fn pace(seen: &Seen, is_responder: bool) -> u32 {
    let hz = HZ.load();
    if hz == 0 || DATA_SEGS_IN.load() == ABSENT || DATA_SEGS_OUT.load() == ABSENT {
        return 0;
    }
    if LSNDTIME.load() == ABSENT || LRCVTIME.load() == ABSENT {
        return 0;
    }
    let (sk, now) = (seen.sk, seen.jiffies as u32);
    let (sent, received) = (sk.read::<u32>(&LSNDTIME), sk.read::<u32>(&LRCVTIME));
    let (out, arrived) = (
        sk.read::<u32>(&DATA_SEGS_OUT),
        sk.read::<u32>(&DATA_SEGS_IN),
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
fn is_bound(sk: Kernel, state: u32) -> bool {
    if TW_TB.load() == ABSENT || ICSK_BIND_HASH.load() == ABSENT || BIND_FASTREUSE.load() == ABSENT
    {
        return false;
    }
    // A row of its own kind keeps `TIME_WAIT` as its state even while it waits for the peer's FIN.
    let bucket = if sk.read::<u8>(&SKC_STATE) as u32 == TIME_WAIT {
        sk.read::<u64>(&TW_TB)
    } else if state == NEW_SYN_RECV {
        0
    } else {
        sk.read::<u64>(&ICSK_BIND_HASH)
    };
    bucket != 0 && Kernel(bucket).read::<i8>(&BIND_FASTREUSE) >= 0
}

#[inline(always)]
fn tally(row: &mut CensusRow, seen: &Seen, bound: bool, pace: u32) {
    row.bound += bound as u32;
    row.waiting += pace & WAITING;
    row.unaccepted += (pace & UNACCEPTED) / UNACCEPTED;
    row.lively += (pace & LIVELY) / LIVELY;
    match seen.state {
        ESTABLISHED => row.established += 1,
        SYN_SENT | SYN_RECV | NEW_SYN_RECV => row.opening += 1,
        TIME_WAIT => {
            let bucket = (seen.age_s / 10) as usize;
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
