//! Packets of a capture a thousand at a time: so many cache misses pass at once, and another thread may take
//! them over.

use super::{
    fault::Fault,
    file::{Next, Observed},
};

/// Packets of a batch: enough that waking who waits for one costs little for each.
pub(super) const LENGTH: usize = 1024;

/// Packets in the order of their capture.
pub struct Batch {
    pub(super) read: Box<[Observed]>,
    /// How many of them are filled.
    pub(super) filled: usize,
    /// What the file is broken by, behind them.
    pub fault: Option<Fault>,
}

impl Default for Batch {
    fn default() -> Self {
        Self {
            read: vec![Observed::default(); LENGTH].into(),
            filled: 0,
            fault: None,
        }
    }
}

impl Batch {
    /// What was read. The last of a file without a fault is [`Next::End`].
    #[inline]
    #[must_use]
    pub fn all(&self) -> &[Observed] {
        &self.read[..self.filled]
    }

    /// Whether nothing follows: the file ends, or is broken.
    #[must_use]
    pub fn is_last(&self) -> bool {
        self.fault.is_some()
            || self
                .all()
                .last()
                .is_some_and(|observed| observed.next == Next::End)
    }
}
