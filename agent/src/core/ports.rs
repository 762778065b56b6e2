//! The source ports of completed handshakes in an ageing window.

use std::{collections::BTreeMap, time::Duration};

use super::time::Moment;

/// When each port was seen last.
#[derive(Clone, Debug, Default)]
pub struct Ports {
    /// In whole seconds of the source's clock.
    last: BTreeMap<u16, u32>,
    /// Completed handshakes at each look, and how many ports were new then.
    news: Vec<(u64, u32)>,
}

/// Looks remembered; at one per second this is more than an hour.
const NEWS: usize = 8192;

impl Ports {
    /// Takes the ports seen since the last call; `established` is the number of handshakes completed
    /// so far.
    pub fn note(&mut self, now: Moment, ports: &[u16], established: u64) {
        let stamp = u32::try_from(now.0 / 1_000_000_000).unwrap_or(u32::MAX);
        let mut new = 0;
        for port in ports {
            new += u32::from(self.last.insert(*port, stamp).is_none());
        }
        if self.news.last().is_none_or(|(at, _)| *at != established) {
            self.news.push((established, new));
        } else if let Some(last) = self.news.last_mut() {
            last.1 += new;
        }
        // No look asks for more handshakes than there are ports.
        if self.news.len() > NEWS {
            self.news.drain(..NEWS / 2);
        }
    }

    /// Forgets what is older than `window`.
    pub fn age(&mut self, now: Moment, window: Duration) {
        let oldest = (now.0 / 1_000_000_000).saturating_sub(window.as_secs());
        self.last.retain(|_, seen| u64::from(*seen) >= oldest);
    }

    /// Distinct ports in the window.
    #[must_use]
    pub fn distinct(&self) -> u32 {
        u32::try_from(self.last.len()).unwrap_or(u32::MAX)
    }

    /// The ports in the window, in order.
    #[must_use]
    pub fn sorted(&self) -> Vec<u16> {
        self.last.keys().copied().collect()
    }

    /// Share of new ports among the latest completed handshakes, half as many as there are ports: 1
    /// while a pool is handed out for the first time, 0 when each port comes again. `None` before so
    /// many handshakes were completed.
    #[must_use]
    pub fn news_share(&self) -> Option<f64> {
        let (total, _) = *self.news.last()?;
        let need = u64::from(self.distinct().max(2) / 2);
        let from = total.checked_sub(need)?;
        let first = self.news.partition_point(|(at, _)| *at <= from);
        if first == 0 {
            return None;
        }
        let new: u32 = self.news[first..].iter().map(|(_, n)| n).sum();
        Some(f64::from(new) / need as f64)
    }
}
