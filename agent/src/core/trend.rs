//! How many source ports of a port space were taken lately, and where that leads.

use std::time::Duration;

use super::{history::Tick, space::Census, time::Moment};

/// Below this many ports nothing is kept: that is no port space to worry about.
const HANDFUL: u32 = 16;
/// Least time between two samples, unless the latest replaces the one before.
const STEP: Duration = Duration::from_secs(5);
/// Most samples kept: two minutes at the usual interval of the census.
const SAMPLES: usize = 25;
/// Fewer samples than this are no trend.
const ENOUGH: usize = 6;

/// What the latest censuses counted, oldest first; a sample holds until the next one.
#[derive(Clone, Debug, Default)]
pub struct Trend(Vec<Sample>);

/// Source ports that are taken at a moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Connections not closed yet.
    pub in_use: u32,
    /// Closed ones that hold their port: sockets in TIME_WAIT, or what a device holds.
    pub held: u32,
    /// … of them those closed in the last ten seconds.
    pub fresh: u32,
}

impl From<&Census> for Counts {
    fn from(census: &Census) -> Self {
        Self {
            in_use: census.in_use(),
            held: census.held(),
            fresh: census.time_wait[0],
        }
    }
}

impl Counts {
    const fn taken(&self) -> u32 {
        self.in_use.saturating_add(self.held)
    }
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Tick,
    counts: Counts,
}

/// A straight line through some values.
#[derive(Clone, Copy, Debug)]
pub struct Line {
    /// Its value now.
    pub now: f64,
    /// What it gains per second.
    pub slope: f64,
    /// Share of the values' variance that it explains.
    pub fit: f64,
    /// Seconds from the first value to now.
    pub span: f64,
}

impl Trend {
    /// Takes what a census counted, and what the one before had.
    pub fn note(
        slot: &mut Option<Box<Self>>,
        now: Moment,
        before: Counts,
        after: Counts,
        keep: Duration,
    ) {
        if slot.is_none() && before.taken().max(after.taken()) < HANDFUL {
            return;
        }
        let trend = slot.get_or_insert_default();
        let sample = |counts| Sample {
            at: now.into(),
            counts,
        };
        // What held until now; of a port space never counted before nothing is known.
        if trend.0.is_empty() && before.taken() > 0 {
            trend.0.push(sample(before));
        }
        let sample = sample(after);
        let second = trend.0.iter().nth_back(1).map(|s| s.at);
        match trend.0.last_mut() {
            Some(last) if second.is_some_and(|at| sample.at.since(at) < STEP) => *last = sample,
            _ => trend.0.push(sample),
        }
        let too_many = trend.0.len().saturating_sub(SAMPLES);
        trend.0.drain(..too_many);
        if after.taken() < HANDFUL && trend.is_quiet(now, keep) {
            *slot = None;
        }
    }

    /// What was counted last.
    #[must_use]
    pub fn latest(&self) -> Counts {
        self.0.last().map_or_else(Counts::default, |s| s.counts)
    }

    /// Nothing has changed for `keep`.
    #[must_use]
    pub fn is_quiet(&self, now: Moment, keep: Duration) -> bool {
        let last = self.0.last();
        last.is_none_or(|s| Tick::from(now).since(s.at) >= keep)
    }

    /// The most that were held at once, of all that is kept.
    #[must_use]
    pub fn most_held(&self) -> u32 {
        self.0.iter().map(|s| s.counts.held).max().unwrap_or(0)
    }

    /// The smallest `of` in the last `window`, if there are samples that reach so far back.
    #[must_use]
    pub fn least(&self, now: Moment, window: Duration, of: impl Fn(&Counts) -> f64) -> Option<f64> {
        let now = Tick::from(now);
        let from = self.0.iter().rposition(|s| now.since(s.at) >= window)?;
        let values = self.0[from..].iter().map(|s| of(&s.counts));
        values.reduce(f64::min)
    }

    /// The straight line through `of` over the last `window`, or as many samples as a trend takes if
    /// those reach further back. `None` before they reach so far.
    #[must_use]
    pub fn line(&self, now: Moment, window: Duration, of: impl Fn(&Counts) -> f64) -> Option<Line> {
        let now = Tick::from(now);
        let reach = self.0.iter().rposition(|s| now.since(s.at) >= window)?;
        let from = reach.min(self.0.len().checked_sub(ENOUGH)?);
        let points: Vec<(f64, f64)> = self.0[from..]
            .iter()
            .map(|s| (-now.since(s.at).as_secs_f64(), of(&s.counts)))
            .collect();
        let n = points.len() as f64;
        let mean_t = points.iter().map(|(t, _)| t).sum::<f64>() / n;
        let mean_v = points.iter().map(|(_, v)| v).sum::<f64>() / n;
        let (mut tt, mut tv, mut vv) = (0.0, 0.0, 0.0);
        for (t, v) in &points {
            let (t, v) = (t - mean_t, v - mean_v);
            tt += t * t;
            tv += t * v;
            vv += v * v;
        }
        let slope = if tt > 0.0 { tv / tt } else { 0.0 };
        Some(Line {
            now: mean_v - slope * mean_t,
            slope,
            fit: if vv > 0.0 { slope * tv / vv } else { 0.0 },
            span: -points[0].0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEEP: Duration = Duration::from_secs(120);
    const MINUTE: Duration = Duration::from_secs(60);

    fn at(t: u64) -> Moment {
        Moment(t * 1_000_000_000)
    }

    /// A trend of the sockets in use that `value` gives, counted every five seconds.
    fn trend(until: u64, value: impl Fn(u64) -> u32) -> Option<Box<Trend>> {
        let (mut slot, mut before) = (None, Counts::default());
        for t in (5..=until).step_by(5) {
            let after = Counts {
                in_use: value(t),
                ..Counts::default()
            };
            if after != before {
                Trend::note(&mut slot, at(t), before, after, KEEP);
            }
            before = after;
        }
        slot
    }

    fn in_use(c: &Counts) -> f64 {
        c.in_use.into()
    }

    #[test]
    fn a_ramp_is_a_line_and_a_step_is_not() {
        let ramp = trend(90, |t| t as u32 * 2).unwrap();
        let line = ramp.line(at(90), MINUTE, in_use).unwrap();
        assert!(
            (line.slope - 2.0).abs() < 0.01 && line.fit > 0.99,
            "{line:?}"
        );
        assert!(
            (line.now - 180.0).abs() < 1.0 && line.span >= 60.0,
            "{line:?}"
        );
        let step = trend(90, |t| {
            if t < 60 {
                20 + t as u32 % 2
            } else {
                180 + t as u32 % 2
            }
        });
        let line = step.unwrap().line(at(90), MINUTE, in_use).unwrap();
        assert!(line.fit < 0.85, "{line:?}");
    }

    #[test]
    fn the_first_census_is_no_rise_from_nothing() {
        let steady = trend(30, |t| 100 + t as u32 % 2).unwrap();
        assert!(steady.line(at(30), MINUTE, in_use).is_none());
        let line = steady.line(at(30), Duration::from_secs(20), in_use);
        assert!(line.is_none_or(|l| l.slope.abs() < 0.2), "{line:?}");
        assert_eq!(
            steady.least(at(30), Duration::from_secs(10), in_use),
            Some(100.0)
        );
    }

    #[test]
    fn little_is_kept_of_little_and_never_much() {
        assert!(trend(100, |t| t as u32 % 15).is_none());
        assert!(trend(1000, |t| t as u32).unwrap().0.len() <= SAMPLES);
        assert!(
            trend(30, |t| 15 + t as u32)
                .unwrap()
                .is_quiet(at(151), KEEP)
        );
    }
}
