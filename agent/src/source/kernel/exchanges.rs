//! The table of responses that cannot be read: the connections with news since the last look.

use std::ptr::addr_of;

use aya::Ebpf;
use tuplewatch_common::exchange::{Exchange, Set};

use super::{clock, load::map_mut, shared::Shared};
use crate::core::suspect::Answers;

/// A segment is taken for news for so much longer, in nanoseconds: told twice it does no harm.
const WRITING_NS: u64 = 10_000_000;

/// What the user side keeps of the table.
pub struct Exchanges {
    sets: Shared<Set>,
    /// What was counted before was told.
    told_ns: u64,
}

impl Exchanges {
    /// Opens the table.
    pub fn open(ebpf: &mut Ebpf) -> anyhow::Result<Self> {
        Ok(Self {
            sets: Shared::open(map_mut(ebpf, "EXCHANGES")?)?,
            told_ns: clock::monotonic_ns(),
        })
    }

    /// Connections with news since the last call, in their order.
    pub fn look(&mut self) -> Vec<Answers> {
        let now = clock::monotonic_ns();
        let mut news = Vec::new();
        for number in 0..self.sets.len() {
            let set = self.sets.at(number).cast::<Exchange>();
            for way in 0..size_of::<Set>() / size_of::<Exchange>() {
                // SAFETY: a place of the set; it is valid and aligned.
                let exchange = unsafe { set.add(way) };
                // SAFETY: as above.
                let last = unsafe { addr_of!((*exchange).last_ns).read_volatile() };
                if last < self.told_ns {
                    continue;
                }
                // SAFETY: as above; any bytes are an exchange.
                let exchange = unsafe { exchange.read_volatile() };
                // One that was given to another connection meanwhile is told the next time.
                if exchange.all.count > 0 && exchange.hash == exchange.tuple.hash() {
                    news.push(Answers::from(&exchange));
                }
            }
        }
        // Between the clock and the table the kernel side may be kept waiting.
        self.told_ns = now.saturating_sub(WRITING_NS);
        news.sort_unstable_by_key(|answers| answers.tuple);
        news
    }
}
