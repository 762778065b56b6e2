//! The sockets that this host opened, from connect() to the end of ESTABLISHED.

use tuplewatch_common::record::{Global, OpenSocket};

use crate::{
    layout::SOCKET_SETS,
    maps::{OPEN_SOCKETS, SOCKET_TAGS, count},
    socket::Kernel,
    ways::{self, Tags, WAYS},
};

/// Spreads the addresses of sockets, which come from one slab, over sets and tags.
#[inline(always)]
fn hash(sk: Kernel) -> u64 {
    let x = sk.0.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^ x >> 29
}

#[inline(always)]
fn set(hash: u64) -> u32 {
    (hash >> 8) as u32 & (SOCKET_SETS.load() - 1)
}

#[inline(always)]
fn tags<'a>(set: u32) -> Option<&'a mut Tags> {
    // SAFETY: array values are valid as long as the program.
    SOCKET_TAGS
        .get_ptr_mut(set)
        .map(|tags| unsafe { &mut *tags })
}

/// What is known of a socket.
#[inline(always)]
pub fn find(sk: Kernel) -> Option<OpenSocket> {
    let hash = hash(sk);
    let set = set(hash);
    let way = ways::find(tags(set)?, ways::tag(hash))?;
    let socket = OPEN_SOCKETS.get_ptr(set * WAYS + way)?;
    // SAFETY: array values are valid as long as the program; it is copied at once.
    let socket = unsafe { *socket };
    (socket.sk == sk.0).then_some(socket)
}

/// Adds a socket, or counts the loss.
#[inline(always)]
pub fn add(socket: &OpenSocket) {
    let hash = hash(Kernel(socket.sk));
    let set = set(hash);
    if let Some(tags) = tags(set) {
        // A socket that connects again after a failure that nobody reported.
        let known = ways::find(tags, ways::tag(hash));
        if let Some(way) = known.or_else(|| ways::free(tags, 0))
            && let Some(place) = OPEN_SOCKETS.get_ptr_mut(set * WAYS + way)
        {
            // SAFETY: as above; nobody else takes this place (see `ways::free`).
            unsafe { *place = *socket };
            ways::set(tags, way, ways::tag(hash));
            return;
        }
    }
    count(Global::SocketsFull);
}

/// Removes a socket that [`find`] found.
#[inline(always)]
pub fn remove(sk: Kernel) {
    let hash = hash(sk);
    if let Some(tags) = tags(set(hash))
        && let Some(way) = ways::find(tags, ways::tag(hash))
    {
        ways::set(tags, way, 0);
    }
}
