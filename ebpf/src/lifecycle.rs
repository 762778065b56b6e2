//! `inet_sock_set_state`: opens, outcomes and lifetimes of the sockets of every network namespace.

use aya_ebpf::{
    bindings::BPF_NOEXIST,
    helpers::{bpf_get_current_comm, bpf_get_current_pid_tgid, bpf_ktime_get_ns},
    macros::raw_tracepoint,
    programs::RawTracePointContext,
};
use tuplewatch_common::{
    address::{PortSpaceKey, Role},
    histogram::HANDSHAKE_UNIT_NS,
    observe::{Tables as _, record},
    record::{Event, EventKind, Global, OpenSocket, Opener, OpenerRef},
};

use crate::{
    layout::{ABSENT, INET_SPORT, SK_ERR, WRITE_SEQ},
    maps::{OPENERS, SEARCH, count},
    opened,
    socket::{self, CLOSE, ESTABLISHED, Kernel, SYN_SENT, argument},
    tables::{Maps, emit, key_of, space, with_space},
};

const ETIMEDOUT: u32 = 110;
const ECONNREFUSED: u32 = 111;

/// Arguments: `struct sock *sk, int oldstate, int newstate`.
#[raw_tracepoint(tracepoint = "inet_sock_set_state")]
pub fn inet_sock_set_state(ctx: RawTracePointContext) -> i32 {
    let sk = Kernel(argument::<0>(&ctx));
    let (old, new) = (argument::<1>(&ctx) as u32, argument::<2>(&ctx) as u32);
    match (old, new) {
        (CLOSE, SYN_SENT) => on_open(sk),
        (SYN_SENT, ESTABLISHED) => on_outcome(sk, true),
        (SYN_SENT, CLOSE) => on_outcome(sk, false),
        (ESTABLISHED, _) => on_leave(sk),
        _ => {}
    }
    0
}

/// connect() has begun. This runs in the connecting task; later transitions need not.
#[inline(always)]
fn on_open(sk: Kernel) {
    if !socket::is_tcp(sk) {
        return;
    }
    let netns = socket::netns(sk);
    if !socket::is_watched(netns) {
        return;
    }
    let Some(tuple) = socket::tuple(sk) else {
        return;
    };
    let key = PortSpaceKey::socket(&tuple, Role::Initiator as u8, netns);
    let space = space(&key, true);
    // An auto-bound socket has no port yet.
    let bound = tuple.initiator_port != 0;
    with_space(space, |p| {
        Maps::add(&mut p.opens, 1);
        if bound {
            Maps::add(&mut p.bound_opens, 1);
        }
    });
    // SAFETY: a helper without arguments.
    let opened_ns = unsafe { bpf_ktime_get_ns() };
    let opener = OpenerRef {
        space,
        pid: (bpf_get_current_pid_tgid() >> 32) as u32,
    };
    if let Some(known) = OPENERS.get_ptr_mut(opener) {
        // SAFETY: a map value stays valid while the program runs.
        let known = unsafe { &mut *known };
        Maps::add(&mut known.opens, 1);
        known.last_ns = opened_ns;
    } else {
        let new = Opener {
            cgroup: socket::cgroup(sk),
            last_ns: opened_ns,
            opens: 1,
            command: bpf_get_current_comm().unwrap_or_default(),
            ..Opener::default()
        };
        if OPENERS.insert(opener, new, BPF_NOEXIST.into()).is_err() {
            count(Global::OpenersFull);
        }
    }
    opened::add(&OpenSocket {
        sk: sk.0,
        opened_ns,
        opener,
    });
    if let Some(note) = SEARCH.get_ptr_mut(0) {
        let r = tuple.responder;
        // SAFETY: a per-CPU value; see `packet::note_search`.
        let note = unsafe { &mut *note };
        note.responder = u32::from_ne_bytes([r[12], r[13], r[14], r[15]]);
        note.responder_port = tuple.responder_port as u32;
        note.started_ns = opened_ns;
    }
}

/// connect() has ended.
#[inline(always)]
fn on_outcome(sk: Kernel, established: bool) {
    let Some(socket) = opened::find(sk) else {
        return;
    };
    // SAFETY: a helper without arguments.
    let now_ns = unsafe { bpf_ktime_get_ns() };
    if established {
        with_space(socket.opener.space, |p| {
            Maps::add(&mut p.established, 1);
            record::<Maps>(
                &mut p.handshake_duration,
                now_ns - socket.opened_ns,
                HANDSHAKE_UNIT_NS,
            );
        });
        return;
    }
    opened::remove(sk);
    // An auto-bound socket gives its port back before this transition, but `inet_sport` keeps it;
    // it is 0 only where none was found (`__inet_hash_connect`).
    // A socket bound beforehand keeps its port even where a connection in TIME_WAIT has the same
    // four-tuple; then its sequence numbers were not chosen yet (`tcp_v4_connect`).
    let error = sk.read::<u32>(&SK_ERR);
    let no_port = sk.read::<u16>(&INET_SPORT) == 0
        || error == 0 && WRITE_SEQ.load() != ABSENT && sk.read::<u32>(&WRITE_SEQ) == 0;
    with_space(socket.opener.space, |p| {
        let counter = if no_port {
            &mut p.no_local_port
        } else if error == ECONNREFUSED {
            &mut p.refused
        } else if error == ETIMEDOUT {
            &mut p.syn_timeouts
        } else if error == 0 {
            &mut p.abandoned
        } else {
            &mut p.failed
        };
        Maps::add(counter, 1);
    });
    if no_port {
        if let Some(opener) = OPENERS.get_ptr_mut(socket.opener) {
            // SAFETY: a map value stays valid while the program runs.
            Maps::add(unsafe { &mut (*opener).no_local_port }, 1);
        }
        let (netns, tuple) = key_of(socket.opener.space);
        emit(&Event {
            time_ns: now_ns,
            tuple,
            pid: socket.opener.pid,
            netns,
            kind: EventKind::NoLocalPort as u8,
            role: Role::Initiator as u8,
            ..Event::default()
        });
    }
}

/// A connection that this host opened leaves ESTABLISHED: its lifetime is known.
#[inline(always)]
fn on_leave(sk: Kernel) {
    let Some(socket) = opened::find(sk) else {
        return;
    };
    opened::remove(sk);
    // SAFETY: a helper without arguments.
    let lifetime_ms = (unsafe { bpf_ktime_get_ns() } - socket.opened_ns) / 1_000_000;
    let mut closed = 0;
    with_space(socket.opener.space, |p| {
        closed = p.closed;
        Maps::add(&mut p.closed, 1);
        Maps::add(&mut p.lifetime_ms, lifetime_ms);
    });
    // What is kept of the opener is a mean: of many connections a part will do.
    if closed < LIFETIMES_ALL || closed & LIFETIMES_SKIPPED == 0 {
        note_lifetime(&socket.opener, lifetime_ms);
    }
}

/// Up to so many connections of a port space each lifetime is added to its opener's …
const LIFETIMES_ALL: u64 = 256;
/// … then one of so many more.
const LIFETIMES_SKIPPED: u64 = 7;

#[inline(always)]
fn note_lifetime(opener: &OpenerRef, lifetime_ms: u64) {
    if let Some(opener) = OPENERS.get_ptr_mut(opener) {
        // SAFETY: a map value stays valid while the program runs.
        let opener = unsafe { &mut *opener };
        Maps::add(&mut opener.closed, 1);
        Maps::add(&mut opener.lifetime_ms, lifetime_ms);
    }
}
