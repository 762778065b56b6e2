//! Idle connections: how long one had been idle that is reset when it is used again, and which ones live.
//!
//! When a socket gets a RST, the time of its latest send is that of the segment which the RST answers; but
//! what it had sent before its rest was acknowledged then, so that the time of the latest ACK or data
//! received is the begin of the rest, for the kernel's own keep-alive too (`keepalive_time_elapsed`).

use aya_ebpf::{
    Global as Offset,
    helpers::{bpf_jiffies64, bpf_ktime_get_ns},
};
use tuplewatch_common::{
    address::Role,
    idle::{BY_PROBE, CLOSED_BEFORE, IdleReset, KEEP_ALIVE, KEEP_ALIVE_KNOWN, Rest, UNKNOWN_MS},
    record::{CensusRow, Global, OpenSocket},
};

use crate::{
    layout::{
        ABSENT, HZ, ICSK_PROBES_OUT, ICSK_RETRANSMITS, ICSK_USER_TIMEOUT, KEEPALIVE_TIME, LRCVTIME,
        LSNDTIME, NET_KEEPALIVE_TIME, RCV_TSTAMP, SKC_FLAGS, SKC_NET, SKC_STATE, SND_NXT, SND_UNA,
        SOCK_KEEPOPEN,
    },
    maps::{EVENTS, IDLE_BUDGET, LISTENERS, ListenerKey, OPENERS, RESTS, RESTS_LEN, count},
    opened,
    socket::{self, ESTABLISHED, Kernel},
};

/// The peer has closed its side: `CLOSE_WAIT` of `include/net/tcp_states.h`.
const CLOSE_WAIT: u32 = 8;
/// Shorter pauses are none.
const REST_MS: u64 = 1000;
/// Resets told by each CPU in a second: a server that is started again resets thousands, and some of
/// them say as much.
const PER_SECOND: u64 = 128;
/// A socket that received something in so many seconds is used.
const ACTIVE_S: u32 = 10;
/// A place whose connection no census has found idle for so many seconds is free.
const STALE_S: u32 = 120;

/// Ticks since a moment, whose low half of jiffies is read from the socket.
#[inline(always)]
fn since(sk: Kernel, jiffies: u32, offset: &Offset<u32>) -> u32 {
    ticks(jiffies, sk.read(offset))
}

/// Ticks since a moment; times ahead are now.
#[inline(always)]
fn ticks(jiffies: u32, at: u32) -> u32 {
    let ticks = jiffies.wrapping_sub(at);
    if ticks as i32 >= 0 { ticks } else { 0 }
}

#[inline(always)]
fn milliseconds(ticks: u32) -> u64 {
    // Division by zero would be a panic, which the verifier does not let through.
    let hz = HZ.load() as u64;
    (ticks as u64 * 1000).checked_div(hz).unwrap_or(0)
}

#[inline(always)]
fn is_there(offset: &Offset<u32>) -> bool {
    offset.load() != ABSENT
}

/// A RST was accepted by this socket: tells of it, if it answers the first segment after a rest.
///
/// A function of its own for the sake of the stack.
#[inline(never)]
pub fn on_reset(sk: Kernel) {
    if !is_there(&LRCVTIME) || !is_there(&LSNDTIME) || !is_there(&RCV_TSTAMP) || !is_there(&SND_NXT)
    {
        return;
    }
    let state = sk.read::<u8>(&SKC_STATE) as u32;
    if state != ESTABLISHED && state != CLOSE_WAIT {
        return;
    }
    // What was sent again met silence first.
    if is_there(&ICSK_RETRANSMITS) && sk.read::<u8>(&ICSK_RETRANSMITS) != 0 {
        return;
    }
    // SAFETY: a helper without arguments.
    let jiffies = unsafe { bpf_jiffies64() } as u32;
    let (acked, received) = (
        since(sk, jiffies, &RCV_TSTAMP),
        since(sk, jiffies, &LRCVTIME),
    );
    let waits = sk.read::<u32>(&SND_UNA) != sk.read::<u32>(&SND_NXT);
    let mut flags = 0;
    let ticks = if state == CLOSE_WAIT {
        // The FIN acknowledged something too: it came at the time of the latest ACK.
        if !waits {
            return;
        }
        flags |= CLOSED_BEFORE;
        received.wrapping_sub(acked)
    } else {
        let last = if acked < received { acked } else { received };
        let sent = if waits {
            since(sk, jiffies, &LSNDTIME)
        } else if is_there(&ICSK_PROBES_OUT) && sk.read::<u8>(&ICSK_PROBES_OUT) != 0 {
            flags |= BY_PROBE;
            0
        } else {
            // Nobody had asked: the peer ends it of its own accord.
            return;
        };
        last.wrapping_sub(sent)
    };
    let ticks = if ticks as i32 >= 0 { ticks } else { 0 };
    let idle_ms = milliseconds(ticks);
    if idle_ms >= REST_MS {
        tell(sk, idle_ms, flags);
    }
}

#[inline(never)]
fn tell(sk: Kernel, idle_ms: u64, flags: u8) {
    let netns = socket::netns(sk);
    // SAFETY: a helper without arguments.
    let now_ns = unsafe { bpf_ktime_get_ns() };
    if !socket::is_watched(netns) || !may_tell(now_ns) {
        return;
    }
    let Some(local) = socket::tuple(sk) else {
        return;
    };
    let found = opened::find(sk);
    let is_opened = found.is_some();
    // Always written: the compiler loads it before it asks whether it is there, which 5.10 refuses.
    let opened = found.unwrap_or_default();
    let listener = ListenerKey {
        netns,
        port: local.initiator_port as u32,
    };
    // Whoever has no listener on its port has opened the connection, before the agent was there.
    // SAFETY: the value is not used.
    let is_responder = !is_opened && unsafe { LISTENERS.get(listener) }.is_some();
    let Some(mut entry) = EVENTS.reserve::<IdleReset>(0) else {
        count(Global::EventsLost);
        return;
    };
    let event = entry.as_mut_ptr();
    // SAFETY: the entry has room for the event, which is plain data; zeroes are one.
    unsafe {
        event
            .cast::<[u64; size_of::<IdleReset>() / 8]>()
            .write([0; size_of::<IdleReset>() / 8]);
        (*event).time_ns = now_ns;
        if is_responder {
            (*event).tuple.initiator = local.responder;
            (*event).tuple.responder = local.initiator;
            (*event).tuple.initiator_port = local.responder_port;
            (*event).tuple.responder_port = local.initiator_port;
            (*event).role = Role::Responder as u8;
        } else {
            (*event).tuple = local;
            (*event).role = Role::Initiator as u8;
        }
        (*event).idle_ms = idle_ms as u32;
        (*event).keep_alive_ms = keep_alive_ms(sk);
        (*event).user_timeout_ms = if is_there(&ICSK_USER_TIMEOUT) {
            sk.read(&ICSK_USER_TIMEOUT)
        } else {
            UNKNOWN_MS
        };
        (*event).flags = flags | keep_alive(sk);
        if is_opened {
            by(&mut *event, &opened);
        }
    }
    entry.submit(0);
}

/// Who opened it.
#[inline(always)]
fn by(event: &mut IdleReset, opened: &OpenSocket) {
    event.opened_ns = opened.opened_ns;
    event.pid = opened.opener.pid;
    if let Some(opener) = OPENERS.get_ptr(opened.opener) {
        // SAFETY: a map value stays valid while the program runs.
        event.command = unsafe { (*opener).command };
    }
}

/// Whether this CPU has not told too many in this second.
#[inline(always)]
fn may_tell(now_ns: u64) -> bool {
    let Some(budget) = IDLE_BUDGET.get_ptr_mut(0) else {
        return false;
    };
    // SAFETY: a per-CPU value: a tracepoint that interrupts another one counts wrongly by one.
    let budget = unsafe { &mut *budget };
    let second = now_ns >> 30;
    if budget[0] != second {
        *budget = [second, 0];
    }
    budget[1] += 1;
    budget[1] <= PER_SECOND
}

/// Whether it sends keep-alive probes: [`KEEP_ALIVE`], if that is known.
#[inline(always)]
pub fn keep_alive(sk: Kernel) -> u8 {
    if !is_there(&SKC_FLAGS) || !is_there(&SOCK_KEEPOPEN) {
        return 0;
    }
    let is_on = sk.read::<u64>(&SKC_FLAGS) >> (SOCK_KEEPOPEN.load() & 63) & 1;
    KEEP_ALIVE_KNOWN | if is_on != 0 { KEEP_ALIVE } else { 0 }
}

/// The socket's own time, or that of its namespace where it sets none (`keepalive_time_when`).
#[inline(always)]
pub fn keep_alive_ms(sk: Kernel) -> u32 {
    if !is_there(&KEEPALIVE_TIME) || !is_there(&NET_KEEPALIVE_TIME) {
        return UNKNOWN_MS;
    }
    let own = sk.read::<u32>(&KEEPALIVE_TIME);
    let ticks = if own != 0 {
        own
    } else {
        Kernel(sk.read::<u64>(&SKC_NET)).read::<u32>(&NET_KEEPALIVE_TIME)
    };
    milliseconds(ticks) as u32
}

/// The place of a connection in [`RESTS`]: in the order in which the walk comes by, so that neighbours share a line
/// of the cache. Where the kernel's table has fewer buckets than there are places, the hash says which of a bucket's.
#[inline(always)]
fn place(hash: u64, [bucket, size]: [u64; 2]) -> u32 {
    let at = bucket << 16 | hash & 0xffff;
    let place = (at * RESTS_LEN as u64).checked_div(size).unwrap_or(0) >> 16;
    place as u32 & (RESTS_LEN - 1)
}

/// An established socket of the census: remembers that it rests, or notes in its row that it has woken and
/// lives. The row has the longest rest that it is known to have had: what it rested between the last census
/// that found it idle and its wake is not counted. `heard`: `rcv_tstamp` and `lrcvtime`;
/// `buckets`: in which one of the kernel's table it is, and how many there are.
#[inline(always)]
pub fn census(row: &mut CensusRow, heard: [u32; 2], hash: u64, buckets: [u64; 2], jiffies: u32) {
    if !is_there(&LRCVTIME) || !is_there(&RCV_TSTAMP) {
        return;
    }
    let [acked, received] = heard.map(|at| ticks(jiffies, at));
    let idle = if acked < received { acked } else { received };
    let last = jiffies.wrapping_sub(idle);
    let hz = HZ.load();
    if idle < ACTIVE_S * hz {
        row.active += 1;
    }
    let Some(rest) = RESTS.get_ptr_mut(place(hash, buckets)) else {
        return;
    };
    // SAFETY: an array value; only one run goes on at a time.
    let rest = unsafe { &mut *rest };
    let known = rest.hash == hash;
    // A tick more or less is rounding of the two reads.
    if known && last.wrapping_sub(rest.last) > 1 && last.wrapping_sub(rest.last) < u32::MAX / 2 {
        let rested = milliseconds(rest.seen.wrapping_sub(rest.last)) as u32;
        row.rested += 1;
        if rested > row.rested_ms {
            row.rested_ms = rested;
        }
        rest.hash = 0;
    }
    let taken = rest.hash != 0 && rest.hash != hash;
    if idle < 2 * hz || (taken && jiffies.wrapping_sub(rest.seen) < STALE_S * hz) {
        return;
    }
    *rest = Rest {
        hash,
        last,
        seen: jiffies,
    };
}
