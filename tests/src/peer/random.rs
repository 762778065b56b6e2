//! Random numbers for ports, addresses and sequence numbers.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::config::Isn;

/// xorshift64*: fast and even enough for test traffic.
#[derive(Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new() -> Self {
        Self(RandomState::new().build_hasher().finish() | 1)
    }

    pub(super) fn next(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    }

    /// 1024-65535.
    pub(super) fn port(&mut self) -> u16 {
        let port = 1024 + self.next() % (65_536 - 1024);
        u16::try_from(port).expect("below 65,536")
    }
}

/// Hands out initial sequence numbers to any number of threads.
#[derive(Debug)]
pub(super) struct IsnSource {
    isn: Isn,
    last: AtomicU32,
}

impl IsnSource {
    pub(super) fn new(isn: Isn) -> Self {
        Self {
            isn,
            last: AtomicU32::new(Random::new().next()),
        }
    }

    /// The next one; `None`: the kernel chooses. Never 0, which the kernel reads as unset.
    pub(super) fn next(&self) -> Option<u32> {
        let isn = match self.isn {
            Isn::Kernel => return None,
            Isn::Fixed(isn) => isn,
            Isn::Random => Random::new().next(),
            Isn::Backward => self.last.fetch_sub(1_000_000, Ordering::Relaxed),
        };
        Some(isn.max(1))
    }
}
