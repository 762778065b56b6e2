//! What the kernel side tells of an established socket that makes no progress.

use crate::address::FourTuple;

/// Which socket.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StalledKey {
    /// Its connection, the local end as if it were the initiator.
    pub tuple: FourTuple,
    /// Inode of its network namespace.
    pub netns: u32,
    /// Always zero.
    pub pad: u32,
}

/// How it stands. Times are milliseconds; those of the past are ages at [`StalledRow::seen_ns`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StalledRow {
    /// When it was looked at, in nanoseconds.
    pub seen_ns: u64,
    /// Address of its `struct sock`.
    pub sk: u64,
    /// Time of its connect(), 0 if that was not seen.
    pub opened_ns: u64,
    /// Process that called it, 0 if unknown.
    pub pid: u32,
    /// Bytes sent and not acknowledged.
    pub unacked: u32,
    /// Bytes that wait behind them.
    pub waiting: u32,
    /// Largest segment that this path is thought to carry, 0 if unknown.
    pub mss: u32,
    /// The retransmission time-out as it is now.
    pub rto_ms: u32,
    /// Since data was sent last, again or not.
    pub sent_ms: u32,
    /// Since the peer's latest acknowledgement or data.
    pub heard_ms: u32,
    /// `TCP_USER_TIMEOUT`, 0 for none, `u32::MAX` if unknown.
    pub user_timeout_ms: u32,
    /// Time between two keep-alive probes, 0 if unknown.
    pub probe_ms: u32,
    /// Idle time before the first of them, or [`crate::idle::UNKNOWN_MS`].
    pub keep_alive_ms: u32,
    /// Time-outs in a row.
    pub retransmits: u8,
    /// How often [`StalledRow::rto_ms`] was doubled.
    pub backoff: u8,
    /// Probes in a row without an answer.
    pub probes: u8,
    /// A [`crate::address::Role`].
    pub role: u8,
    /// 1 if the peer's window is closed.
    pub is_closed: u8,
    /// 1 if data has gone through before.
    pub is_used: u8,
    /// [`crate::idle::KEEP_ALIVE`] and [`crate::idle::KEEP_ALIVE_KNOWN`].
    pub settings: u8,
    /// 1 if it was found to get through again, when it was looked at again.
    pub is_recovered: u8,
}

#[cfg(feature = "user")]
mod pod {
    // SAFETY: `repr(C)`, of integers only and without padding (see the test).
    unsafe impl aya::Pod for super::StalledKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::StalledRow {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::mem::size_of;

    #[test]
    fn no_padding() {
        assert_eq!(size_of::<StalledKey>(), 40 + 8);
        assert_eq!(size_of::<StalledRow>(), 3 * 8 + 10 * 4 + 6 + 2);
    }
}
