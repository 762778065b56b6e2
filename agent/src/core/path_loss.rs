//! What a path loses, as far as it was measured, and how far chance alone gets a connection with that.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use tuplewatch_common::address::{Address, PortSpaceKey, Role};

use super::{report::Totals, stalled::Recovered, time::Moment};

/// How far back a path is looked at: loss comes and goes within minutes.
pub const LATELY: Duration = Duration::from_secs(60);
/// What is taken for granted of a path of which nothing was measured: so much of a transmission was lost …
const ASSUMED_LOST: f64 = 0.25;
/// … of so many. 3 % both ways together: the Internet loses up to 1 % each way, and little is known. Nine
/// transmissions are soon outweighed by what is measured.
const ASSUMED_SENT: f64 = 9.0;
/// A repetition after this many time-outs is the first one that [`Recovered`] tells of.
const TOLD_FROM: u32 = 2;

/// What was measured of a path lately, of connections that got through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathLoss {
    /// First transmissions: SYNs of distinct opens.
    pub starts: u64,
    /// Transmissions, the first ones included.
    pub sent: u64,
    /// … of them those that nobody answered.
    pub lost: u64,
    /// Segments that were repeated twice or more after time-outs, and acknowledged in the end.
    pub repeated: u64,
}

impl PathLoss {
    /// What the opens of a port space show: a SYN is sent again because it or its answer was lost.
    fn of_opens(opens: &Totals) -> Self {
        let sent = opens.opens + opens.syn_retransmits;
        let lost = opens.syn_retransmits + opens.syn_timeouts + opens.abandoned;
        Self {
            starts: opens.opens,
            sent,
            lost: lost.min(sent),
            repeated: 0,
        }
    }

    /// The same without these opens.
    #[must_use]
    pub fn without(&self, opens: &Totals) -> Self {
        let opens = Self::of_opens(opens);
        Self {
            starts: self.starts.saturating_sub(opens.starts),
            sent: self.sent.saturating_sub(opens.sent),
            lost: self.lost.saturating_sub(opens.lost),
            repeated: self.repeated,
        }
    }

    /// Share of the transmissions that was lost.
    #[must_use]
    pub fn share(&self) -> f64 {
        self.lost as f64 / self.sent.max(1) as f64
    }

    /// How many segments would have come so far within [`LATELY`] by chance: sent in vain, and then so many
    /// times again.
    ///
    /// Each of the first transmissions that were seen may have begun such a row. Those of data are not counted;
    /// but of the rows that they began, those are known that came to the second repetition, and may
    /// have gone on with what is left.
    #[must_use]
    pub fn chance(&self, repetitions: u32) -> f64 {
        let left = (repetitions + 1).saturating_sub(TOLD_FROM);
        // One connection is judged, so that one has begun whatever was measured.
        self.starts.max(1) as f64 * self.in_a_row(repetitions + 1)
            + self.repeated as f64 * self.in_a_row(left)
    }

    /// The same of probes, where nothing is sent before the first one.
    #[must_use]
    pub fn chance_of_probes(&self, probes: u32) -> f64 {
        self.starts.max(1) as f64 * self.in_a_row(probes)
    }

    /// The chance that so many transmissions in a row are lost. The share of those lost is known as well as
    /// it was measured only: the less that is, the likelier are long rows (Beta-binomial).
    fn in_a_row(&self, n: u32) -> f64 {
        let lost = ASSUMED_LOST + self.lost as f64;
        let sent = ASSUMED_SENT + self.sent as f64;
        (0..n)
            .map(f64::from)
            .map(|n| (lost + n) / (sent + n))
            .product()
    }
}

/// Repetitions that were acknowledged in the end, by the peer's address.
#[derive(Clone, Debug, Default)]
pub struct Paths(BTreeMap<(u8, u8, Address), VecDeque<(Moment, Runs)>>);

/// Those of one look.
#[derive(Clone, Copy, Debug, Default)]
struct Runs {
    repeated: u64,
    sent: u64,
    lost: u64,
}

impl Paths {
    /// Takes those that were acknowledged since the last look.
    pub fn take(&mut self, now: Moment, recovered: &[Recovered]) {
        for one in recovered.iter().filter(|one| one.rtos >= TOLD_FROM) {
            let looks = self.0.entry(peer(&one.space)).or_default();
            if looks.back().is_none_or(|(at, _)| *at != now) {
                looks.push_back((now, Runs::default()));
            }
            if let Some((_, runs)) = looks.back_mut() {
                // That it came to the second time-out is why it is told; what counts is how it went on.
                let repetitions = u64::from(one.rtos - TOLD_FROM + 1);
                runs.repeated += 1;
                runs.sent += repetitions;
                runs.lost += repetitions - 1;
            }
        }
        self.0.retain(|_, looks| {
            while looks.front().is_some_and(|(at, _)| now.since(*at) > LATELY) {
                looks.pop_front();
            }
            !looks.is_empty()
        });
    }

    /// Nobody has looked for a while.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// What was measured of the path of a port space whose opens lately were these.
    #[must_use]
    pub fn loss(&self, key: &PortSpaceKey, opens: &Totals) -> PathLoss {
        let looks = self.0.get(&peer(key)).into_iter().flatten();
        looks.fold(PathLoss::of_opens(opens), |sum, (_, runs)| PathLoss {
            starts: sum.starts,
            sent: sum.sent + runs.sent,
            lost: sum.lost + runs.lost,
            repeated: sum.repeated + runs.repeated,
        })
    }
}

/// Whose path it is, seen from this host.
const fn peer(key: &PortSpaceKey) -> (u8, u8, Address) {
    let address = if key.role == Role::Responder as u8 {
        key.initiator
    } else {
        key.responder
    };
    (key.role, key.point, address)
}

#[cfg(test)]
mod tests;
