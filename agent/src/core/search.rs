//! Slow searches for a source port inside connect().
//!
//! The kernel tries the ports of one parity first. When half of a range is taken to one destination,
//! each connect() walks through all of that half: microseconds become milliseconds
//! (`__inet_hash_connect`), long before the other half is full too.

use std::{collections::VecDeque, time::Duration};

use tuplewatch_common::histogram::{BUCKETS, Histogram, SEARCH_UNIT_NS, bounds};

use super::time::Moment;

/// First bucket of slow searches: 512 µs and more.
const SLOW: usize = 10;
/// How much is looked back on.
const WINDOW: Duration = Duration::from_secs(10);
/// The latest look replaces the one before it within this time of the one before that.
const STEP: Duration = Duration::from_secs(3);
/// Without a slow search for so long all is well again.
const CALM: Duration = Duration::from_secs(120);
/// Fewer searches than this have no median worth the name.
pub const ENOUGH: u64 = 20;

/// The searches of a port space since slow ones came up.
#[derive(Clone, Debug)]
pub struct Searches {
    /// The median before, in nanoseconds.
    pub baseline_ns: Option<u64>,
    /// Totals at some looks, the latest last.
    looks: VecDeque<(Moment, Histogram)>,
    last_slow: Moment,
}

impl Searches {
    /// Takes the totals of now; `before` are those of the look before.
    pub fn take(slot: &mut Option<Box<Self>>, now: Moment, totals: &Histogram, before: &Histogram) {
        let is_slow = totals[SLOW..]
            .iter()
            .zip(&before[SLOW..])
            .any(|(now, then)| now > then);
        if slot.is_none() && is_slow {
            *slot = Some(Box::new(Self {
                baseline_ns: median(before),
                looks: VecDeque::from([(now, *before)]),
                last_slow: now,
            }));
        }
        let Some(searches) = slot else {
            return;
        };
        if is_slow {
            searches.last_slow = now;
        }
        let second = searches.looks.iter().nth_back(1).map(|(at, _)| *at);
        match searches.looks.back_mut() {
            Some(last) if second.is_some_and(|at| now.since(at) < STEP) => *last = (now, *totals),
            _ => searches.looks.push_back((now, *totals)),
        }
        while searches.looks.len() > 2 && now.since(searches.looks[1].0) >= WINDOW {
            searches.looks.pop_front();
        }
    }

    /// Forgets them when none was slow for long.
    pub fn settle(slot: &mut Option<Box<Self>>, now: Moment) {
        if slot.as_ref().is_some_and(|s| now.since(s.last_slow) > CALM) {
            *slot = None;
        }
    }

    /// The median of the last ten seconds in nanoseconds, if there were enough searches, and how many
    /// there were.
    #[must_use]
    pub fn recent(&self, now: Moment) -> Option<(u64, u64)> {
        let (at, latest) = self.looks.back()?;
        if now.since(*at) > WINDOW {
            return None;
        }
        let old = self
            .looks
            .iter()
            .rev()
            .find(|(at, _)| now.since(*at) >= WINDOW);
        let (_, old) = old.or(self.looks.front())?;
        let mut recent = *latest;
        for (n, old) in recent.iter_mut().zip(old) {
            *n = n.saturating_sub(*old);
        }
        Some((median(&recent)?, recent.iter().sum()))
    }
}

/// The median in nanoseconds, evenly spread within its bucket.
#[must_use]
pub fn median(histogram: &Histogram) -> Option<u64> {
    let total: u64 = histogram.iter().sum();
    if total < ENOUGH {
        return None;
    }
    let bounds = bounds(SEARCH_UNIT_NS);
    let (mut below, half) = (0, total.div_ceil(2));
    for (i, n) in histogram.iter().enumerate() {
        if below + n >= half {
            let low = if i == 0 { 0 } else { bounds[i - 1] };
            let high = if i < BUCKETS - 1 { bounds[i] } else { 2 * low };
            return Some(low + (high - low) * (half - below) / n);
        }
        below += n;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    fn with(counts: &[(usize, u64)]) -> Histogram {
        let mut h = Histogram::default();
        for (bucket, n) in counts {
            h[*bucket] = *n;
        }
        h
    }

    #[test]
    fn the_median_lies_in_its_bucket() {
        assert_eq!(median(&with(&[(4, 19)])), None);
        let m = median(&with(&[(4, 100)])).unwrap();
        assert!((8_000..=16_000).contains(&m), "{m}");
        let m = median(&with(&[(4, 10), (12, 90)])).unwrap();
        assert!((2_048_000..=4_096_000).contains(&m), "{m}");
    }

    #[test]
    fn slow_searches_are_told_from_what_was_before() {
        let mut slot = None;
        let quick = with(&[(4, 1000)]);
        Searches::take(&mut slot, Moment(S), &quick, &Histogram::default());
        assert!(slot.is_none(), "quick searches take no memory");
        let mut before = quick;
        for t in 2..30 {
            let now = with(&[(4, 1000), (12, (t - 1) * 10)]);
            Searches::take(&mut slot, Moment(t * S), &now, &before);
            before = now;
        }
        let searches = slot.as_ref().unwrap();
        let baseline = searches.baseline_ns.unwrap();
        assert!((8_000..=16_000).contains(&baseline), "{baseline}");
        let (median, n) = searches.recent(Moment(29 * S)).unwrap();
        assert!(
            median > 2_000_000 && (100..=140).contains(&n),
            "{median} {n}"
        );
        assert!(searches.looks.len() <= 8, "{}", searches.looks.len());
        assert_eq!(searches.recent(Moment(60 * S)), None, "nobody searches now");
        Searches::settle(&mut slot, Moment(200 * S));
        assert!(slot.is_none());
    }
}
