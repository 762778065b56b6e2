//! Connections of a capture that make no progress, from the segments that are sent in vain: what the
//! kernel's own counters of time-outs and probes say in the live source.

use std::collections::HashMap;

use foldhash::fast::RandomState;
use tuplewatch_common::{
    address::{FourTuple, Point, PortSpaceKey, Role},
    segment::{ACK, FIN, RST, SYN, Segment},
};

use super::{
    file::Observed,
    rests::Rests,
    sent::{AGAIN_NS, Hint},
    tables::InMemory,
};
use crate::core::{
    idle::Settings,
    stalled::{How, Recovered, Stalled},
    time::Moment,
};

/// Directions that are looked at.
const MOST: usize = 4096;
/// Of what is not sent again for so long nothing is known any more: the longest time-out is 120 s
/// (`TCP_RTO_MAX`).
const QUIET_NS: u64 = 150_000_000_000;
/// Equal gaps so long are time-outs at their limit.
const LONG_NS: u64 = 60_000_000_000;
/// A segment of this size is taken for a full one: what IPv6's smallest MTU leaves, less options.
const FULL: u32 = 1_180;

/// The directions that make no progress.
#[derive(Default)]
pub struct Stalls {
    /// By the hash of the connection, and whether the lower end is the sender.
    all: HashMap<(u64, bool), Track, RandomState>,
    /// Senders that got something through since the last look, and after how many time-outs.
    recovered: Vec<(FourTuple, u32)>,
}

/// One direction of a connection.
#[derive(Clone, Copy)]
struct Track {
    /// The sender first.
    tuple: FourTuple,
    /// The first byte that is not acknowledged.
    una: u32,
    /// Behind the last byte sent.
    end: u32,
    since_ns: u64,
    /// Sent last.
    last_ns: u64,
    gap_ns: u64,
    rtos: u32,
    probes: u32,
    is_answered: bool,
    is_closed: bool,
    size: u32,
}

impl Stalls {
    /// Takes a segment. Gives the sender's four-tuple and the number of time-outs or probes so far, if it
    /// was sent in vain.
    #[inline]
    pub fn take(&mut self, observed: &Observed, now_ns: u64) -> Option<(FourTuple, u32)> {
        if observed.hint == Hint::None && self.all.is_empty() {
            return None;
        }
        self.look(&observed.segment, observed.hint, observed.window, now_ns)
    }

    fn look(
        &mut self,
        segment: &Segment,
        hint: Hint,
        window: u16,
        now_ns: u64,
    ) -> Option<(FourTuple, u32)> {
        let hash = segment.tuple.hash();
        let from_lower = segment.tuple.initiator_is_lower();
        let (own, other) = ((hash, from_lower), (hash, !from_lower));
        // A SYN-ACK that comes again says that the peer has not accepted the connection yet.
        if segment.flags & (SYN | RST) != 0 {
            self.all.remove(&own);
            self.all.remove(&other);
            return None;
        }
        self.answer(other, segment, window, now_ns);
        if segment.flags & FIN != 0 {
            // Not established any more.
            self.all.remove(&own);
            return None;
        }
        match hint {
            Hint::Again { .. } | Hint::Probe => {}
            Hint::Closed => {
                self.closed(other, segment, now_ns);
                return None;
            }
            Hint::None | Hint::Watched => {
                if let Some(track) = self.all.get_mut(&own) {
                    track.sent(segment);
                }
                return None;
            }
        }
        let track = self.track(own, segment.tuple, segment.seq, hint.sent_ns(now_ns))?;
        let before = (track.rtos, track.probes);
        if hint == Hint::Probe {
            track.probe(segment, now_ns);
        } else {
            track.again(segment, now_ns);
        }
        let told = (track.rtos, track.probes) != before;
        told.then_some((track.tuple, track.rtos + track.probes))
    }

    /// The direction, new if there is room.
    fn track(
        &mut self,
        key: (u64, bool),
        tuple: FourTuple,
        una: u32,
        since_ns: u64,
    ) -> Option<&mut Track> {
        if self.all.len() >= MOST && !self.all.contains_key(&key) {
            return None;
        }
        Some(self.all.entry(key).or_insert(Track {
            tuple,
            una,
            end: una,
            since_ns,
            last_ns: since_ns,
            gap_ns: 0,
            rtos: 0,
            probes: 0,
            is_answered: false,
            is_closed: false,
            size: 0,
        }))
    }

    /// The peer of a direction has sent something.
    fn answer(&mut self, key: (u64, bool), segment: &Segment, window: u16, now_ns: u64) {
        let Some(track) = self.all.get_mut(&key) else {
            return;
        };
        let has_ack = segment.flags & (SYN | ACK) == ACK;
        let is_progress = has_ack && segment.ack.wrapping_sub(track.una).cast_signed() > 0;
        if is_progress && track.rtos > 0 && self.recovered.len() < MOST {
            self.recovered.push((track.tuple, track.rtos));
        }
        let is_open = window > 0 || !has_ack;
        let is_over = if track.is_closed {
            is_open
        } else {
            is_progress || track.probes > 0
        };
        if is_over && is_open {
            self.all.remove(&key);
            return;
        }
        track.probes = 0;
        track.is_answered |= track.rtos > 0;
        if is_progress {
            track.una = segment.ack;
            track.rtos = 0;
        }
        track.last_ns = track.last_ns.max(now_ns);
    }

    /// The peer of a direction says that its window is closed.
    fn closed(&mut self, key: (u64, bool), segment: &Segment, now_ns: u64) {
        let tuple = segment.tuple.reversed();
        if let Some(track) = self.track(key, tuple, segment.ack, now_ns)
            && !track.is_closed
        {
            track.is_closed = true;
            track.since_ns = now_ns;
        }
    }

    /// Those that got something through since the last look.
    pub fn recovered(&mut self, tables: &InMemory) -> Vec<Recovered> {
        let recovered = self.recovered.drain(..);
        recovered
            .filter_map(|(tuple, rtos)| {
                let space = known(tables, &tuple)?;
                let connection = of(&space, tuple);
                Some(Recovered {
                    space,
                    connection,
                    rtos,
                })
            })
            .collect()
    }

    /// Those that make no progress, in the order of their connections. Of a connection whose port space is
    /// not known it cannot be said who opened it. `rests` knows what rested before.
    pub fn list(&mut self, tables: &InMemory, rests: &Rests, now_ns: u64) -> Vec<Stalled> {
        self.all
            .retain(|_, track| now_ns.saturating_sub(track.last_ns) < QUIET_NS);
        let tracks = self.all.values();
        let mut list: Vec<Stalled> = tracks
            .filter_map(|track| track.stalled(tables, rests, now_ns))
            .collect();
        list.sort_unstable_by_key(|stalled| stalled.connection);
        list
    }
}

impl Track {
    fn sent(&mut self, segment: &Segment) {
        let end = segment.seq.wrapping_add(segment.payload_len);
        if end.wrapping_sub(self.end).cast_signed() > 0 {
            self.end = end;
        }
    }

    /// What was sent before comes again. The first of the two that a tail loss probe and a time-out make
    /// is no time-out: each of these waits twice as long as the one before.
    fn again(&mut self, segment: &Segment, now_ns: u64) {
        self.sent(segment);
        let before = segment.seq.wrapping_sub(self.una).cast_signed();
        let gap_ns = now_ns.saturating_sub(self.last_ns);
        if before > 0 || gap_ns < AGAIN_NS {
            return;
        }
        self.una = segment.seq;
        self.size = segment.payload_len;
        if self.rtos == 0 || gap_ns * 2 >= self.gap_ns * 3 || gap_ns >= LONG_NS {
            self.rtos += 1;
        }
        self.gap_ns = gap_ns;
        self.last_ns = now_ns;
    }

    fn probe(&mut self, segment: &Segment, now_ns: u64) {
        let gap_ns = now_ns.saturating_sub(self.last_ns);
        if self.probes == 0 || gap_ns >= AGAIN_NS {
            if self.probes == 0 && !self.is_closed {
                self.since_ns = now_ns;
            }
            self.una = segment.seq.wrapping_add(1);
            self.probes += 1;
            self.last_ns = now_ns;
        }
    }

    fn stalled(&self, tables: &InMemory, rests: &Rests, now_ns: u64) -> Option<Stalled> {
        let how = if self.probes > 0 {
            How::Silent
        } else if self.is_closed {
            How::Closed
        } else {
            How::Unacked
        };
        let key = known(tables, &self.tuple)?;
        let connection = of(&key, self.tuple);
        Some(Stalled {
            connection,
            role: Role::from_u8(key.role),
            point: Point::Wire,
            netns: 0,
            opened: tables.opened_ns(&connection, now_ns).map(Moment),
            since: Moment(self.since_ns),
            heard: rests.unanswered(&self.tuple).map(|rest| {
                let rest = u64::try_from(rest.as_nanos()).unwrap_or(u64::MAX);
                Moment(self.since_ns.saturating_sub(rest))
            }),
            how,
            rtos: self.rtos,
            probes: self.probes,
            unacked: match how {
                How::Unacked => self.end.wrapping_sub(self.una),
                How::Silent | How::Closed => 0,
            },
            waiting: 0,
            is_full_size: self.size >= FULL,
            is_answered: self.is_answered,
            // A SYN-ACK that comes again has ended the track.
            is_used: true,
            settings: Settings::default(),
            process: None,
        })
    }
}

/// A connection of a port space, named by who opened it.
fn of(key: &PortSpaceKey, sent: FourTuple) -> FourTuple {
    if key.initiator == sent.initiator && key.responder_port == sent.responder_port {
        sent
    } else {
        sent.reversed()
    }
}

/// The port space of a connection, whichever end sends.
pub fn known(tables: &InMemory, tuple: &FourTuple) -> Option<PortSpaceKey> {
    let ends = [*tuple, tuple.reversed()];
    let roles = [Role::Initiator, Role::Responder];
    let keys = ends
        .iter()
        .flat_map(|tuple| roles.map(|role| PortSpaceKey::wire(tuple, role as u8)));
    keys.into_iter().find(|key| tables.has_space(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn segment(seq: u32, payload_len: u32) -> Segment {
        let mut segment = Segment {
            flags: ACK,
            seq,
            payload_len,
            ..Segment::default()
        };
        segment.tuple.initiator_port = 40_000;
        segment.tuple.responder_port = 80;
        segment
    }

    fn answer(ack: u32) -> Segment {
        let mut segment = segment(0, 0);
        segment.tuple = segment.tuple.reversed();
        segment.ack = ack;
        segment
    }

    /// The request of the recording `16_black_holed`, and how often it came again.
    fn repeated() -> (Stalls, Vec<u32>) {
        let mut stalls = Stalls::default();
        let counts = [218, 442, 882, 1778, 3538, 7022].map(|ms| {
            let steps = ((ms * MS) >> 25) as u16;
            stalls.look(&segment(1, 112), Hint::Again { steps }, 500, ms * MS);
            stalls.all.values().next().unwrap().rtos
        });
        (stalls, counts.to_vec())
    }

    #[test]
    fn a_tail_loss_probe_is_no_time_out() {
        let (mut stalls, counts) = repeated();
        assert_eq!(counts, [1, 1, 2, 3, 4, 5]);
        let track = *stalls.all.values().next().unwrap();
        assert_eq!(track.end.wrapping_sub(track.una), 112);
        assert!(track.since_ns < 34 * MS, "{}", track.since_ns);
        // The peer answers, but not that.
        stalls.look(&answer(1), Hint::Watched, 500, 8000 * MS);
        assert!(stalls.all.values().next().unwrap().is_answered);
        stalls.look(&answer(113), Hint::Watched, 500, 8000 * MS);
        assert!(stalls.all.is_empty());
    }

    #[test]
    fn a_reset_or_a_new_connection_ends_it() {
        for flags in [RST, SYN, FIN | ACK] {
            let (mut stalls, _) = repeated();
            let end = Segment {
                flags,
                ..segment(1, 0)
            };
            stalls.look(&end, Hint::None, 500, 8000 * MS);
            assert!(stalls.all.is_empty(), "{flags}");
        }
    }

    #[test]
    fn probes_that_are_answered_are_none() {
        let mut stalls = Stalls::default();
        for second in 0..3 {
            let told = stalls.look(&segment(9, 0), Hint::Probe, 500, second * 1000 * MS);
            assert_eq!(told.map(|(_, n)| n), Some(second as u32 + 1));
        }
        stalls.look(&answer(10), Hint::Watched, 500, 2000 * MS);
        assert!(stalls.all.is_empty());
    }

    #[test]
    fn a_window_is_closed_until_it_opens() {
        let mut stalls = Stalls::default();
        stalls.look(&answer(10), Hint::Closed, 0, MS);
        for second in 1..5 {
            stalls.look(&segment(9, 0), Hint::Probe, 500, second * 1000 * MS);
            stalls.look(&answer(10), Hint::Closed, 0, second * 1000 * MS + MS);
        }
        let track = *stalls.all.values().next().unwrap();
        assert!(track.is_closed && track.probes == 0 && track.since_ns == MS);
        stalls.look(&answer(10), Hint::Watched, 500, 6000 * MS);
        assert!(stalls.all.is_empty());
    }
}
