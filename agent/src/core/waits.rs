//! Established connections that wait for an answer: how many, and for how long it has been so.
//!
//! Live, the census tells from the sockets when data was sent and received last. A recording has no
//! sockets: there HTTP/1 conversations tell the same of those that speak it.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tuplewatch_common::{
    address::{FourTuple, PortSpaceKey},
    record::CensusRow,
};

use super::{history::Tick, observation::Talk, time::Moment};

/// A question this old without an answer is waiting (the census has the same figure).
const SLOW: Duration = Duration::from_secs(1);
/// Below this many waiting connections nothing is kept.
const HANDFUL: u32 = 4;
/// Samples kept: half a minute at the shortest interval of the census.
const SAMPLES: usize = 32;
/// Conversations remembered that wait: some megabytes.
const PENDING: usize = 1 << 15;

/// Connections of a port space at a moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Pace {
    /// The initiator's latest data arrived a second ago or earlier and was not answered yet.
    pub waiting: u32,
    /// … of them those that the responder's application has not accepted.
    pub unaccepted: u32,
    /// Those that wait for less than a second or were answered within the last one.
    pub lively: u32,
}

impl Pace {
    /// Adds a row of the census.
    pub const fn add(&mut self, row: &CensusRow) {
        self.waiting += row.waiting;
        self.unaccepted += row.unaccepted;
        self.lively += row.lively;
    }
}

/// What the latest looks found, oldest first.
#[derive(Clone, Debug, Default)]
pub struct Waits(Vec<(Tick, Pace)>);

/// Waiting connections over a time: means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WaitEvidence {
    /// Connections on which the client's data was acknowledged a second ago or earlier and not answered
    /// yet.
    pub waiting: f64,
    /// … of them those that the server's application has not accepted.
    pub unaccepted: f64,
    /// Connections that wait for less than a second or were answered within the last one.
    pub lively: f64,
    /// Seconds that these are means of.
    pub seconds: f64,
    /// Median duration of a handshake in seconds, within the bucket of its histogram; `null` if none was
    /// seen.
    pub handshake_seconds: Option<f64>,
}

impl Waits {
    /// Takes what a look found; nothing is kept where hardly anything waits.
    pub fn note(slot: &mut Option<Box<Self>>, now: Moment, pace: Pace) {
        if slot.is_none() && pace.waiting < HANDFUL {
            return;
        }
        let waits = slot.get_or_insert_default();
        waits.0.push((now.into(), pace));
        let too_many = waits.0.len().saturating_sub(SAMPLES);
        waits.0.drain(..too_many);
        if waits.0.iter().all(|(_, pace)| pace.waiting < HANDFUL) {
            *slot = None;
        }
    }

    /// The means over the latest samples that reach back for `time`, if so much was seen.
    #[must_use]
    pub fn over(&self, now: Moment, time: Duration) -> Option<WaitEvidence> {
        let now = Tick::from(now);
        let first = self.0.iter().rposition(|(at, _)| now.since(*at) >= time)?;
        let samples = &self.0[first..];
        let mean = |of: fn(&Pace) -> u32| {
            let sum: f64 = samples.iter().map(|(_, pace)| f64::from(of(pace))).sum();
            sum / samples.len() as f64
        };
        Some(WaitEvidence {
            waiting: mean(|p| p.waiting),
            unaccepted: mean(|p| p.unaccepted),
            lively: mean(|p| p.lively),
            seconds: now.since(samples[0].0).as_secs_f64(),
            handshake_seconds: None,
        })
    }
}

/// HTTP/1 conversations that wait for a response.
#[derive(Clone, Debug, Default)]
pub struct Pending {
    all: HashMap<FourTuple, (Moment, PortSpaceKey)>,
    /// Port spaces that had any at the last look.
    told: BTreeMap<PortSpaceKey, Pace>,
}

impl Pending {
    /// Takes the conversations with news; how the port spaces fare now, those included where nothing
    /// waits any more.
    pub fn take(&mut self, now: Moment, talks: &[Talk]) -> Vec<(PortSpaceKey, Pace)> {
        let mut paces: BTreeMap<PortSpaceKey, Pace> = std::mem::take(&mut self.told)
            .into_keys()
            .map(|key| (key, Pace::default()))
            .collect();
        for talk in talks {
            let c = &talk.conversation;
            let (key, at) = (PortSpaceKey::wire(&c.tuple, c.role), Moment(c.last_ns));
            if c.waiting > 0 && !talk.closed {
                if self.all.len() < PENDING || self.all.contains_key(&c.tuple) {
                    self.all.insert(c.tuple, (at, key));
                }
                continue;
            }
            self.all.remove(&c.tuple);
            if c.responses > 0 && now.since(at) < SLOW {
                paces.entry(key).or_default().lively += 1;
            }
        }
        for (at, key) in self.all.values() {
            let pace = paces.entry(*key).or_default();
            if now.since(*at) < SLOW {
                pace.lively += 1;
            } else {
                pace.waiting += 1;
            }
        }
        let some = |(_, pace): &(&PortSpaceKey, &Pace)| **pace != Pace::default();
        self.told = paces
            .iter()
            .filter(some)
            .map(|(key, pace)| (*key, *pace))
            .collect();
        paces.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use tuplewatch_common::conversation::Conversation;

    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn means_need_samples_that_reach_back_far_enough() {
        let mut slot = None;
        let pace = |waiting| Pace {
            waiting,
            lively: 2,
            ..Pace::default()
        };
        Waits::note(&mut slot, Moment(S), pace(3));
        assert!(slot.is_none());
        for t in [5, 10, 15] {
            Waits::note(&mut slot, Moment(t * S), pace(t as u32));
        }
        let waits = slot.clone().unwrap();
        let ten = Duration::from_secs(10);
        assert_eq!(waits.over(Moment(14 * S), ten), None);
        let over = waits.over(Moment(15 * S), ten).unwrap();
        assert_eq!((over.waiting, over.lively, over.seconds), (10.0, 2.0, 10.0));
        let over = waits.over(Moment(20 * S), ten).unwrap();
        assert_eq!((over.waiting, over.seconds), (12.5, 10.0));
        for t in 20..60 {
            Waits::note(&mut slot, Moment(t * S), pace(0));
        }
        assert!(slot.is_none());
    }

    #[test]
    fn a_conversation_waits_until_it_is_answered_or_closed() {
        let mut pending = Pending::default();
        let talk = |port: u16, second: u64, answered: bool, closed| {
            let mut conversation = Conversation {
                tuple: FourTuple {
                    initiator_port: port,
                    responder_port: 80,
                    ..FourTuple::default()
                },
                ..Conversation::default()
            };
            conversation.on_request(7, 1, second * S);
            if answered {
                conversation.on_response(200, 1, second * S);
            }
            Talk {
                conversation,
                page: None,
                closed,
            }
        };
        let counts = |paces: Vec<(PortSpaceKey, Pace)>| {
            assert_eq!(paces.len(), 1);
            (paces[0].1.waiting, paces[0].1.lively)
        };
        let two = [talk(1, 10, false, false), talk(2, 10, false, false)];
        assert_eq!(counts(pending.take(Moment(10 * S), &two)), (0, 2));
        assert_eq!(counts(pending.take(Moment(11 * S), &[])), (2, 0));
        let one = [talk(1, 12, true, false)];
        assert_eq!(counts(pending.take(Moment(12 * S), &one)), (1, 1));
        let gone = [talk(2, 10, false, true)];
        assert_eq!(counts(pending.take(Moment(13 * S), &gone)), (0, 0));
        assert!(pending.take(Moment(14 * S), &[]).is_empty());
    }
}
