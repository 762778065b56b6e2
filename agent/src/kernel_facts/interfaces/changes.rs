//! Tells that interfaces or routes changed.

use std::io;

use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SocketFlags};
use tokio::io::unix::AsyncFd;

use super::netlink::{BUFFER, Messages, open};

/// `RTNLGRP_*` of <linux/rtnetlink.h>: link 1, IPv4 route 7, IPv6 route 11, next hop 32 (since 5.3).
const GROUPS: u32 = 1 << 0 | 1 << 6 | 1 << 10 | 1 << 31;

/// What changed since the last look. At least one field is true.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// An interface came, went or changed.
    pub links: bool,
    /// A route or next hop came, went or changed.
    pub routes: bool,
    /// The kernel dropped messages (many changes at once): anything may have changed.
    pub lost: bool,
}

/// Changes of the network namespace of the thread that opened it.
pub struct Changes {
    socket: AsyncFd<OwnedFd>,
}

impl Changes {
    /// Begins to listen. Open it before the first snapshot is read, or a change in between is missed. Must be called
    /// within a tokio runtime.
    ///
    /// # Errors
    /// The netlink socket cannot be opened.
    pub fn open() -> io::Result<Self> {
        let socket = open(GROUPS, SocketFlags::NONBLOCK)?;
        // SAFETY: the `AsyncFd` owns the descriptor; nothing here closes or replaces it while it is registered.
        let socket = unsafe { AsyncFd::register(socket) }?;
        Ok(Self { socket })
    }

    /// Waits for changes and gives all that have come up to now as one. Changes come in bursts (a pod's start makes
    /// a dozen): wait a moment before acting on one. Nothing is lost if the future is dropped.
    ///
    /// # Errors
    /// The socket fails; it will not recover.
    pub async fn next(&mut self) -> io::Result<Change> {
        loop {
            let mut ready = self.socket.readable().await?;
            let Ok(change) = ready.try_io(|socket| drain(socket.get_ref())) else {
                continue;
            };
            let change = change?;
            if change != Change::default() {
                return Ok(change);
            }
        }
    }
}

/// Reads until the socket is empty. `WouldBlock` if it was empty from the start.
fn drain(socket: &OwnedFd) -> io::Result<Change> {
    /// Lets the runtime run in between while the kernel sends without end.
    const READS: usize = 1000;
    let mut change = Change::default();
    let mut buffer = vec![0; BUFFER];
    for read in 0..READS {
        match rustix::net::recv(socket, &mut buffer[..], RecvFlags::empty()) {
            Ok((length, _)) => {
                for message in Messages(&buffer[..length]) {
                    match message.message_type() {
                        libc::RTM_NEWLINK | libc::RTM_DELLINK => change.links = true,
                        _ => change.routes = true,
                    }
                }
            }
            Err(Errno::NOBUFS) => change.lost = true,
            Err(Errno::AGAIN) if read > 0 => break,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(change)
}
