//! `inet_sock_set_state`: opens, outcomes and lifetimes of the sockets of every network namespace.

use aya_ebpf::{
    bindings::{BPF_ANY, BPF_NOEXIST},
    helpers::{bpf_get_current_comm, bpf_get_current_pid_tgid, bpf_ktime_get_ns},
    macros::raw_tracepoint,
    programs::RawTracePointContext,
};
use tuplewatch_common::{
    address::{FourTuple, PortSpaceKey, Role},
    histogram::HANDSHAKE_UNIT_NS,
    observe::{Tables as _, record},
    record::{Event, EventKind, Global, OpenSocket, Opener, OpenerKey},
};

use crate::{
    layout::{INET_SPORT, SK_ERR},
    maps::{OPEN_SOCKETS, OPENERS, SEARCH, count},
    socket::{self, CLOSE, ESTABLISHED, Kernel, SYN_SENT, argument},
    tables::{Maps, emit, with_space},
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
    let space = PortSpaceKey::socket(&tuple, Role::Initiator as u8, netns);
    with_space(&space, true, |p| Maps::add(&mut p.opens, 1));
    // SAFETY: a helper without arguments.
    let opened_ns = unsafe { bpf_ktime_get_ns() };
    let opener = OpenerKey {
        space,
        pid: (bpf_get_current_pid_tgid() >> 32) as u32,
        pad: 0,
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
    if OPEN_SOCKETS
        .insert(sk.0, OpenSocket { opener, opened_ns }, BPF_ANY.into())
        .is_err()
    {
        count(Global::SocketsFull);
    }
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
    let Some((socket, tuple)) = known(sk) else {
        return;
    };
    // SAFETY: a helper without arguments.
    let now_ns = unsafe { bpf_ktime_get_ns() };
    if established {
        with_space(&socket.opener.space, false, |p| {
            Maps::add(&mut p.established, 1);
            record::<Maps>(
                &mut p.handshake_duration,
                now_ns - socket.opened_ns,
                HANDSHAKE_UNIT_NS,
            );
        });
        return;
    }
    let _ = OPEN_SOCKETS.remove(sk.0);
    // An auto-bound socket gives its port back before this transition, but `inet_sport` keeps it;
    // it is 0 only where none was found (`__inet_hash_connect`).
    let no_port = sk.read::<u16>(&INET_SPORT) == 0;
    let error = sk.read::<u32>(&SK_ERR);
    with_space(&socket.opener.space, false, |p| {
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
        emit(&Event {
            time_ns: now_ns,
            tuple,
            pid: socket.opener.pid,
            netns: socket.opener.space.netns,
            kind: EventKind::NoLocalPort as u8,
            role: Role::Initiator as u8,
            ..Event::default()
        });
    }
}

/// A connection that this host opened leaves ESTABLISHED: its lifetime is known.
#[inline(always)]
fn on_leave(sk: Kernel) {
    let Some(socket) = OPEN_SOCKETS.get_ptr(sk.0) else {
        return;
    };
    // SAFETY: a map value stays valid while the program runs; it is copied before it is removed.
    let socket = unsafe { *socket };
    let _ = OPEN_SOCKETS.remove(sk.0);
    // SAFETY: a helper without arguments.
    let lifetime_ms = (unsafe { bpf_ktime_get_ns() } - socket.opened_ns) / 1_000_000;
    with_space(&socket.opener.space, false, |p| {
        Maps::add(&mut p.closed, 1);
        Maps::add(&mut p.lifetime_ms, lifetime_ms);
    });
    if let Some(opener) = OPENERS.get_ptr_mut(socket.opener) {
        // SAFETY: a map value stays valid while the program runs.
        let opener = unsafe { &mut *opener };
        Maps::add(&mut opener.closed, 1);
        Maps::add(&mut opener.lifetime_ms, lifetime_ms);
    }
}

/// The open of a socket seen before, and its tuple now that it has a port.
#[inline(always)]
fn known(sk: Kernel) -> Option<(OpenSocket, FourTuple)> {
    let socket = OPEN_SOCKETS.get_ptr(sk.0)?;
    // SAFETY: a map value stays valid while the program runs; it is copied at once.
    let socket = unsafe { *socket };
    let space = &socket.opener.space;
    let tuple = FourTuple {
        initiator: space.initiator,
        responder: space.responder,
        responder_port: space.responder_port,
        initiator_port: u16::from_be(sk.read(&INET_SPORT)),
        pad: 0,
    };
    Some((socket, tuple))
}
