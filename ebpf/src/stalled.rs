//! Established sockets that make no progress: one row for each in [`crate::maps::STALLED`].
//!
//! The census finds them among all sockets, the retransmit hook at the time-out itself, and the user side
//! has those that are known looked at again once per second: what it is told is never older.

use aya_ebpf::{
    bindings::BPF_ANY,
    helpers::{bpf_jiffies64, bpf_ktime_get_ns},
    macros::raw_tracepoint,
    programs::RawTracePointContext,
};
use tuplewatch_common::{
    address::Role,
    record::Global,
    stalled::{StalledKey, StalledRow},
};

use crate::{
    idle,
    layout::{
        ABSENT, BYTES_ACKED, BYTES_RECEIVED, HZ, ICSK_BACKOFF, ICSK_PROBES_OUT, ICSK_RETRANSMITS,
        ICSK_RTO, ICSK_USER_TIMEOUT, KEEPALIVE_INTVL, LRCVTIME, LSNDTIME, MSS_CACHE,
        NET_KEEPALIVE_INTVL, RCV_TSTAMP, SKC_NET, SKC_STATE, SND_NXT, SND_UNA, SND_WND, WRITE_SEQ,
    },
    maps::{LISTENERS, ListenerKey, STALLED, STALLED_AGAIN, STALLED_BATCH, count},
    opened,
    socket::{self, ESTABLISHED, Fields, Kernel, argument},
};

/// Time-outs from which on a socket is looked at: one is nothing special.
pub const TIMEOUTS: u8 = 2;
/// Of a socket that anybody may name only what is known already is taken.
const KNOWN_ONLY: u64 = 1;

/// What a socket counts in bytes.
pub struct Counts {
    retransmits: u8,
    backoff: u8,
    probes: u8,
}

impl Counts {
    /// The timer of a closed window is doubled at each probe, answered or not.
    #[inline(always)]
    pub fn may_be_stalled(&self) -> bool {
        self.retransmits >= TIMEOUTS || self.probes != 0 || self.backoff != 0
    }
}

/// `icsk_retransmits`, `icsk_backoff` and `icsk_probes_out`.
#[inline(always)]
pub fn counts(sk: impl Fields) -> Counts {
    Counts {
        retransmits: sk.read(&ICSK_RETRANSMITS),
        backoff: sk.read(&ICSK_BACKOFF),
        probes: sk.read(&ICSK_PROBES_OUT),
    }
}

#[inline(always)]
fn word(sk: Kernel, offset: &aya_ebpf::Global<u32>) -> u32 {
    if offset.load() == ABSENT {
        0
    } else {
        sk.read(offset)
    }
}

/// Notes a socket, if it makes no progress.
///
/// With its symbol it is a global function of BTF, which the verifier looks through once by itself
/// instead of anew at every turn of the loops that call it.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn stalled_look(sk: u64, known_only: u64) -> i32 {
    let sk = Kernel(sk);
    if sk.read::<u8>(&SKC_STATE) as u32 != ESTABLISHED {
        return 0;
    }
    let counts = counts(sk);
    if !counts.may_be_stalled() {
        return recovered(sk, known_only);
    }
    // A kernel that does not tell the window never says that it is closed.
    let is_shut = SND_WND.load() != ABSENT && sk.read::<u32>(&SND_WND) == 0;
    let una = word(sk, &SND_UNA);
    let (next, written) = (word(sk, &SND_NXT), word(sk, &WRITE_SEQ));
    let is_closed = is_shut && written != una;
    if counts.retransmits < TIMEOUTS && counts.probes == 0 && !is_closed {
        return recovered(sk, known_only);
    }
    note(sk, &counts, [una, next, written], is_closed, known_only)
}

#[inline(always)]
fn note(
    sk: Kernel,
    counts: &Counts,
    [una, next, written]: [u32; 3],
    is_closed: bool,
    known_only: u64,
) -> i32 {
    let netns = socket::netns(sk);
    if !socket::is_watched(netns) {
        return 0;
    }
    let Some(tuple) = socket::tuple(sk) else {
        return 0;
    };
    let key = StalledKey {
        tuple,
        netns,
        pad: 0,
    };
    if known_only == KNOWN_ONLY && known(&key, sk).is_none() {
        return 0;
    }
    // SAFETY: helpers without arguments.
    let (seen_ns, jiffies) = unsafe { (bpf_ktime_get_ns(), bpf_jiffies64()) };
    // Times of sockets are the low half of jiffies.
    let since = |offset| milliseconds((jiffies as u32).wrapping_sub(word(sk, offset)));
    let (acked, received) = (since(&RCV_TSTAMP), since(&LRCVTIME));
    let opened = opened::find(sk);
    let role = match opened {
        Some(_) => Role::Initiator,
        None if is_listening(netns, key.tuple.initiator_port) => Role::Responder,
        None => Role::Unknown,
    };
    let row = StalledRow {
        seen_ns,
        sk: sk.0,
        opened_ns: opened.map_or(0, |socket| socket.opened_ns),
        pid: opened.map_or(0, |socket| socket.opener.pid),
        unacked: next.wrapping_sub(una),
        waiting: written.wrapping_sub(next),
        mss: word(sk, &MSS_CACHE),
        rto_ms: milliseconds(word(sk, &ICSK_RTO)),
        sent_ms: since(&LSNDTIME),
        heard_ms: if acked < received { acked } else { received },
        user_timeout_ms: if ICSK_USER_TIMEOUT.load() == ABSENT {
            u32::MAX
        } else {
            sk.read(&ICSK_USER_TIMEOUT)
        },
        probe_ms: milliseconds(probe_interval(sk)),
        keep_alive_ms: idle::keep_alive_ms(sk),
        retransmits: counts.retransmits,
        backoff: counts.backoff,
        probes: counts.probes,
        role: role as u8,
        is_closed: is_closed as u8,
        is_used: is_used(sk) as u8,
        settings: idle::keep_alive(sk),
        is_recovered: 0,
    };
    if STALLED.insert(&key, &row, BPF_ANY.into()).is_err() {
        count(Global::StalledFull);
    }
    1
}

/// The row of a socket, if it has one.
#[inline(always)]
fn known<'a>(key: &StalledKey, sk: Kernel) -> Option<&'a mut StalledRow> {
    // SAFETY: a map value stays valid while the program runs; a race costs at worst one look.
    let row = unsafe { &mut *STALLED.get_ptr_mut(key)? };
    (row.sk == sk.0).then_some(row)
}

/// A socket gets through: its row says so, which else would only grow old as that of a closed one does.
#[inline(always)]
fn recovered(sk: Kernel, known_only: u64) -> i32 {
    if known_only == KNOWN_ONLY
        && let Some(tuple) = socket::tuple(sk)
    {
        let netns = socket::netns(sk);
        let key = StalledKey {
            tuple,
            netns,
            pad: 0,
        };
        if let Some(row) = known(&key, sk) {
            row.is_recovered = 1;
        }
    }
    0
}

/// Data has gone through on the connection, either way. A kernel that does not tell is believed that it
/// has.
#[inline(always)]
fn is_used(sk: Kernel) -> bool {
    // The SYN is acknowledged like a byte.
    BYTES_ACKED.load() == ABSENT
        || BYTES_RECEIVED.load() == ABSENT
        || sk.read::<u64>(&BYTES_ACKED) > 1
        || sk.read::<u64>(&BYTES_RECEIVED) > 0
}

/// Jiffies between two keep-alive probes of a socket; 0 if unknown.
#[inline(always)]
fn probe_interval(sk: Kernel) -> u32 {
    let own = word(sk, &KEEPALIVE_INTVL);
    if own != 0 {
        return own;
    }
    word(Kernel(sk.read::<u64>(&SKC_NET)), &NET_KEEPALIVE_INTVL)
}

#[inline(always)]
fn milliseconds(jiffies: u32) -> u32 {
    let hz = HZ.load() as u64;
    // Division by zero would be a panic, which the verifier does not let through.
    if hz == 0 {
        return 0;
    }
    let ms = jiffies as u64 * 1000 / hz;
    if ms > u32::MAX as u64 {
        u32::MAX
    } else {
        ms as u32
    }
}

/// A census has found a listener on that port.
#[inline(always)]
pub fn is_listening(netns: u32, port: u16) -> bool {
    let key = ListenerKey {
        netns,
        port: port as u32,
    };
    // SAFETY: the value is not used.
    unsafe { LISTENERS.get(key) }.is_some()
}

/// Looks again at the sockets in [`STALLED_AGAIN`], whose memory may have been given to others meanwhile.
///
/// Arguments (of BPF_PROG_TEST_RUN): their number.
#[raw_tracepoint]
pub fn stalled_again(ctx: RawTracePointContext) -> i32 {
    let n = argument::<0>(&ctx);
    let mut i = 0;
    while i < STALLED_BATCH {
        if i as u64 >= n {
            break;
        }
        if let Some(sk) = STALLED_AGAIN.get(i) {
            stalled_look(*sk, KNOWN_ONLY);
        }
        i += 1;
    }
    0
}
