//! The source ports of completed handshakes in an ageing window.

use std::{collections::VecDeque, time::Duration};

use super::time::Moment;

/// When each port was seen last.
#[derive(Clone, Debug, Default)]
pub struct Ports {
    /// In order of the ports; times in whole seconds of the source's clock.
    last: Vec<(u16, u32)>,
    news: Option<Box<News>>,
    /// When there was no room for some, in seconds as above.
    cut: Option<u32>,
}

/// How many ports were new among the latest completed handshakes: totals of handshakes, and the new
/// ports since the entry before.
type News = VecDeque<(u64, u32)>;

/// Fewer ports than this are no pool, and their news are not kept.
const FEWEST: usize = 8;
/// Entries of the news for as many handshakes as there are ports.
const STEPS: u64 = 64;

impl Ports {
    /// Takes the ports seen since the last call; `established` is the number of handshakes completed
    /// so far. At most `room` new ones are remembered; returns how many were.
    pub fn note(&mut self, now: Moment, ports: &[u16], established: u64, room: usize) -> usize {
        let stamp = seconds(now);
        let mut new: Vec<(u16, u32)> = Vec::new();
        for port in ports {
            match self.last.binary_search_by_key(port, |(p, _)| *p) {
                Ok(i) => self.last[i].1 = stamp,
                Err(_) => new.push((*port, stamp)),
            }
        }
        new.sort_unstable();
        new.dedup();
        if new.len() > room {
            self.cut = Some(stamp);
            new.truncate(room);
        }
        if !new.is_empty() {
            // Room for what comes: a port space of two ports takes no more than it needs.
            if self.last.len() < FEWEST {
                self.last.reserve_exact(new.len());
            }
            self.last.extend_from_slice(&new);
            // Both parts are in order; the sort only merges them.
            self.last.sort();
        }
        if self.last.len() >= FEWEST {
            let news = u32::try_from(new.len()).unwrap_or(u32::MAX);
            self.note_news(established, news);
        }
        new.len()
    }

    fn note_news(&mut self, established: u64, new: u32) {
        let ports = self.last.len() as u64;
        let news = self.news.get_or_insert_default();
        let before = news.len().checked_sub(2).map_or(0, |i| news[i].0);
        match news.back_mut() {
            Some(last) if last.0 == established || established - before <= ports / STEPS => {
                last.0 = established;
                last.1 += new;
            }
            _ => news.push_back((established, new)),
        }
        let from = established.saturating_sub(ports.max(2) / 2);
        while news.get(1).is_some_and(|(at, _)| *at <= from) {
            news.pop_front();
        }
    }

    /// Forgets what is older than `window`.
    pub fn age(&mut self, now: Moment, window: Duration) {
        let oldest = u64::from(seconds(now)).saturating_sub(window.as_secs());
        self.last.retain(|(_, seen)| u64::from(*seen) >= oldest);
        self.cut = self.cut.filter(|at| u64::from(*at) >= oldest);
        if self.last.capacity() > self.last.len() * 4 {
            self.last.shrink_to_fit();
        }
        if self.last.len() < FEWEST {
            self.news = None;
        }
    }

    /// Distinct ports in the window.
    #[must_use]
    pub fn distinct(&self) -> u32 {
        u32::try_from(self.last.len()).unwrap_or(u32::MAX)
    }

    /// The ports in the window, in order.
    #[must_use]
    pub fn sorted(&self) -> Vec<u16> {
        self.last.iter().map(|(port, _)| *port).collect()
    }

    /// Up to `most` of the ports seen last, the latest first.
    #[must_use]
    pub fn latest(&self, most: usize) -> Vec<u16> {
        let mut ports = self.last.clone();
        ports.sort_unstable_by_key(|(port, seen)| (std::cmp::Reverse(*seen), *port));
        ports.into_iter().take(most).map(|(p, _)| p).collect()
    }

    /// Share of new ports among the latest completed handshakes, half as many as there are ports: 1
    /// while a pool is handed out for the first time, 0 when each port comes again. `None` before so
    /// many handshakes were completed, and where there was no room for all ports.
    #[must_use]
    pub fn news_share(&self) -> Option<f64> {
        let news = self.news.as_ref().filter(|_| self.cut.is_none())?;
        let (total, _) = *news.back()?;
        let need = u64::from(self.distinct().max(2) / 2);
        let from = total.checked_sub(need)?;
        let first = news.partition_point(|(at, _)| *at <= from);
        if first == 0 {
            return None;
        }
        let new: u32 = news.range(first..).map(|(_, n)| n).sum();
        Some(f64::from(new) / need as f64)
    }
}

fn seconds(at: Moment) -> u32 {
    u32::try_from(at.0 / 1_000_000_000).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_news_take_little_room_however_slowly_a_pool_goes_round() {
        let mut ports = Ports::default();
        for n in 1..=60_000u64 {
            let port = 2048 + (n % 14_336) as u16;
            ports.note(Moment(n * 1_000_000_000), &[port], n, 1);
        }
        assert_eq!(ports.distinct(), 14_336);
        assert_eq!(ports.news_share(), Some(0.0));
        let kept = ports.news.as_ref().unwrap().len();
        assert!(kept <= STEPS as usize, "{kept}");
    }

    #[test]
    fn a_pool_that_there_was_no_room_for_is_not_inferred() {
        let mut ports = Ports::default();
        for n in 1..=400u64 {
            let port = 2048 + (n % 100) as u16;
            ports.note(Moment(n * 1_000_000_000), &[port], n, usize::from(n < 50));
        }
        assert_eq!((ports.distinct(), ports.news_share()), (49, None));
    }

    #[test]
    fn two_ports_take_a_few_bytes() {
        let mut ports = Ports::default();
        ports.note(Moment(1), &[40_001], 1, 9);
        ports.note(Moment(2), &[40_000, 40_001, 40_000], 3, 9);
        assert_eq!(ports.sorted(), [40_000, 40_001]);
        ports.note(Moment(5_000_000_000), &[40_001], 4, 9);
        assert_eq!(ports.latest(9), [40_001, 40_000]);
        assert_eq!(ports.latest(1), [40_001]);
        assert!(ports.news.is_none() && ports.last.capacity() == 2);
        assert_eq!(ports.news_share(), None);
    }
}
