//! The source ports of completed handshakes in an ageing window.

use std::time::Duration;

use super::time::Moment;

/// When each port was seen last, in seconds of the source's clock plus one; 0 for never. Two bytes
/// would go round after 18 hours, so a port is forgotten when it is older than the window.
#[derive(Clone, Debug, Default)]
pub struct Ports {
    last: Vec<u32>,
    distinct: u32,
    /// Completed handshakes when a port was last seen for the first time.
    news: Vec<(u64, u32)>,
}

/// Looks remembered; at one per second this is more than an hour.
const NEWS: usize = 8192;

impl Ports {
    /// Takes the ports seen since the last call; `established` is the number of handshakes completed
    /// so far.
    pub fn note(&mut self, now: Moment, ports: &[u16], established: u64) {
        if self.last.is_empty() {
            self.last = vec![0; 1 << 16];
        }
        let stamp = u32::try_from(now.0 / 1_000_000_000)
            .unwrap_or(u32::MAX)
            .saturating_add(1);
        let mut new = 0;
        for port in ports {
            let slot = &mut self.last[usize::from(*port)];
            new += u32::from(*slot == 0);
            *slot = stamp;
        }
        self.distinct += new;
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
        let oldest = u32::try_from(oldest).unwrap_or(u32::MAX);
        for slot in &mut self.last {
            if *slot != 0 && *slot < oldest {
                *slot = 0;
                self.distinct -= 1;
            }
        }
    }

    /// Distinct ports in the window.
    #[must_use]
    pub fn distinct(&self) -> u32 {
        self.distinct
    }

    /// The ports in the window, in order.
    #[must_use]
    pub fn sorted(&self) -> Vec<u16> {
        (0..=u16::MAX)
            .zip(&self.last)
            .filter(|(_, t)| **t != 0)
            .map(|(p, _)| p)
            .collect()
    }

    /// Share of new ports among the latest completed handshakes, half as many as there are ports: 1
    /// while a pool is handed out for the first time, 0 when each port comes again. `None` before so
    /// many handshakes were completed.
    #[must_use]
    pub fn news_share(&self) -> Option<f64> {
        let (total, _) = *self.news.last()?;
        let need = u64::from(self.distinct.max(2) / 2);
        let from = total.checked_sub(need)?;
        let first = self.news.partition_point(|(at, _)| *at <= from);
        if first == 0 {
            return None;
        }
        let new: u32 = self.news[first..].iter().map(|(_, n)| n).sum();
        Some(f64::from(new) / need as f64)
    }
}
