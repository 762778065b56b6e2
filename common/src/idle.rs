//! What the kernel side tells of a connection that is reset by the first segment after an idle time.

use crate::address::FourTuple;

/// The peer had closed its side before.
pub const CLOSED_BEFORE: u8 = 1;
/// The segment that was answered by RST is a keep-alive probe.
pub const BY_PROBE: u8 = 2;
/// `SO_KEEPALIVE` is set.
pub const KEEP_ALIVE: u8 = 4;
/// [`KEEP_ALIVE`] means something: the kernel says where the flag is.
pub const KEEP_ALIVE_KNOWN: u8 = 8;

/// A time that the kernel does not tell.
pub const UNKNOWN_MS: u32 = u32::MAX;

/// A connection that was reset, carried by the ring buffer; another size than that of
/// [`crate::record::Event`] tells it apart.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IdleReset {
    /// When, in nanoseconds of the monotonic clock.
    pub time_ns: u64,
    /// When connect() was called, 0 if that was not seen.
    pub opened_ns: u64,
    /// The connection, named by who opened it.
    pub tuple: FourTuple,
    /// Time without a segment before the one that was answered by RST, in milliseconds. Where the peer had
    /// closed before: time without data before that.
    pub idle_ms: u32,
    /// Idle time before the first keep-alive probe in milliseconds, or [`UNKNOWN_MS`].
    pub keep_alive_ms: u32,
    /// `TCP_USER_TIMEOUT` in milliseconds, 0 for none, or [`UNKNOWN_MS`].
    pub user_timeout_ms: u32,
    /// The process that opened it, 0 if unknown.
    pub pid: u32,
    /// Its command name.
    pub command: [u8; 16],
    /// A [`crate::address::Role`].
    pub role: u8,
    /// [`CLOSED_BEFORE`] and its neighbours.
    pub flags: u8,
    /// Always zero.
    pub pad: [u8; 6],
}

/// The latest traffic of an idle connection, as a census found it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rest {
    /// [`FourTuple::hash`] of the connection; 0 for a free place.
    pub hash: u64,
    /// When something was received last, low half of jiffies.
    pub last: u32,
    /// When a census found it idle last, likewise.
    pub seen: u32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Event;
    use core::mem::size_of;

    /// The ring buffer carries all bytes; this is the sum of the fields.
    #[test]
    fn no_padding() {
        assert_eq!(size_of::<IdleReset>(), 2 * 8 + 40 + 4 * 4 + 16 + 2 + 6);
        assert_eq!(size_of::<Rest>(), 16);
        assert_ne!(size_of::<IdleReset>(), size_of::<Event>());
    }
}
