//! Takes segments into the tables in the order of their times, and looks once per second of the
//! capture: what the kernel's packet hook and the agent's clock do in the live source.

use std::{collections::VecDeque, time::Duration};

use tuplewatch_common::{
    address::Role,
    observe::{Seen, Spoken, Tables as _, Work, is_plain_data, observe, observe_http},
    record::Event,
    segment::{RST, SYN},
};

use super::{
    copies::Copies,
    evidence::Evidence,
    exchanges::Exchanges,
    file::Observed,
    rests::Rests,
    stalls::{Stalls, known},
    tables::{InMemory, Limits},
};
use crate::core::{observation::Snapshot, time::Moment};

/// Captures of several queues or interfaces are out of order by less than this.
const REORDER_NS: u64 = 50_000_000;
/// … and by fewer segments.
const REORDER: usize = 1024;
/// Segments ahead of the one whose turn it is for which the tables are got ready: long enough for a
/// cache miss, short enough that all of it is still there.
const AHEAD: usize = 24;
/// Time between two looks, as in the live source.
const LOOK_NS: u64 = 1_000_000_000;
/// Without packets it is looked so many times; then the clock goes on to the next packet at once. All
/// alerts are resolved and all windows empty by then.
const QUIET_LOOKS: u32 = 900;
/// How long a handshake with SYN-ACK may wait for its last ACK, and when the table is more than three
/// quarters full: as in the live source.
const PATIENCE_NS: u64 = 30_000_000_000;
const PATIENCE_FULL_NS: u64 = 3_000_000_000;

/// The tables and their clock.
pub struct Observer {
    /// What was counted.
    pub tables: InMemory,
    work: Work,
    waiting: VecDeque<Observed>,
    newest_ns: u64,
    clock_ns: u64,
    next_look_ns: Option<u64>,
    /// What the findings rest on.
    pub evidence: Evidence,
    stalls: Stalls,
    /// Segments that came too late to be put into order: they count as of the moment they came.
    pub late: u64,
    /// Segments that were left out because they are copies.
    pub copies: u64,
    seen: Copies,
    /// Idle times of the connections.
    pub rests: Rests,
    /// Sizes and latencies of responses, if a rule asks for them.
    pub exchanges: Exchanges,
}

impl Observer {
    /// Empty tables.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            tables: InMemory::new(limits),
            work: Work::default(),
            waiting: VecDeque::with_capacity(REORDER + 1),
            newest_ns: 0,
            clock_ns: 0,
            next_look_ns: None,
            evidence: Evidence::default(),
            stalls: Stalls::default(),
            late: 0,
            copies: 0,
            seen: Copies::default(),
            rests: Rests::default(),
            exchanges: Exchanges::default(),
        }
    }

    /// Takes any segment for what it says about the idle time of its connection: that is a second or more,
    /// so that the order of those close to each other does not matter.
    #[inline]
    pub fn touch(&mut self, observed: &Observed) {
        if self.exchanges.is_on {
            self.exchanges.take(observed, &self.rests.vantage);
        }
        if let Some(killed) = self.rests.take(observed) {
            self.evidence.killed(observed, &killed);
        }
    }

    /// Takes a segment that was seen at an interface. `look` gets events and a snapshot for each second that has passed.
    ///
    /// # Errors
    /// The first error of `look`.
    #[inline]
    pub fn take<E>(
        &mut self,
        observed: &Observed,
        interface: u32,
        look: &mut impl FnMut(&[Event], &Snapshot) -> Result<(), E>,
    ) -> Result<(), E> {
        let time_ns = observed.frame.time_ns;
        let at = if time_ns >= self.newest_ns {
            self.newest_ns = time_ns;
            self.waiting.push_back(*observed);
            self.waiting.len() - 1
        } else {
            let at = self
                .waiting
                .iter()
                .rposition(|before| before.frame.time_ns <= time_ns)
                .map_or(0, |i| i + 1);
            self.waiting.insert(at, *observed);
            at
        };
        self.waiting[at].interface = interface;
        self.release(REORDER, look)
    }

    /// Time has passed without a segment for the tables.
    ///
    /// # Errors
    /// The first error of `look`.
    pub fn pass<E>(
        &mut self,
        time_ns: u64,
        look: &mut impl FnMut(&[Event], &Snapshot) -> Result<(), E>,
    ) -> Result<(), E> {
        self.newest_ns = self.newest_ns.max(time_ns);
        self.release(REORDER, look)?;
        if self.waiting.is_empty() {
            self.tick(time_ns.saturating_sub(REORDER_NS), look)?;
        }
        Ok(())
    }

    /// The capture is over: takes what still waits and looks for the last time.
    ///
    /// # Errors
    /// The first error of `look`.
    pub fn finish<E>(
        &mut self,
        last_ns: u64,
        look: &mut impl FnMut(&[Event], &Snapshot) -> Result<(), E>,
    ) -> Result<(), E> {
        self.release(0, look)?;
        self.tick(last_ns, look)?;
        self.look(self.clock_ns, look)
    }

    /// Observes the segments that nothing earlier can come before.
    #[inline]
    fn release<E>(
        &mut self,
        most: usize,
        look: &mut impl FnMut(&[Event], &Snapshot) -> Result<(), E>,
    ) -> Result<(), E> {
        // Set aside, so that each is observed where it lies.
        let mut waiting = std::mem::take(&mut self.waiting);
        let mut done = Ok(());
        while let Some(first) = waiting.front() {
            let waited = self.newest_ns - first.frame.time_ns >= REORDER_NS;
            if !waited && waiting.len() <= most {
                break;
            }
            if let Some(later) = waiting.get(AHEAD) {
                self.tables.expect(&later.segment, later.hash);
                self.seen.expect(later.packet);
            }
            done = self.observe(first, look);
            waiting.pop_front();
            if done.is_err() {
                break;
            }
        }
        self.waiting = waiting;
        done
    }

    #[inline]
    fn observe<E>(
        &mut self,
        observed: &Observed,
        look: &mut impl FnMut(&[Event], &Snapshot) -> Result<(), E>,
    ) -> Result<(), E> {
        let time_ns = observed.frame.time_ns;
        self.late += u64::from(time_ns < self.clock_ns);
        self.tick(time_ns, look)?;
        if self.is_copy(observed) {
            self.copies += 1;
            return Ok(());
        }
        self.tables.current = observed.frame;
        self.work.segment = observed.segment;
        let seen = Seen {
            now_ns: self.clock_ns,
            // Copies are gone, so that all interfaces of a place are one.
            ifindex: 1,
            syn_role: observed.role.unwrap_or(Role::Unknown),
            seen_before: false,
        };
        if let Some((tuple, times)) = self.stalls.take(observed, self.clock_ns)
            && let Some(key) = known(&self.tables, &tuple)
        {
            self.evidence.in_vain(observed, &key, &tuple, times);
        }
        if observed.message.is_some() {
            self.speak(observed, &seen);
        }
        if is_plain_data(observed.segment.flags, observed.segment.payload_len) {
            return Ok(());
        }
        observe(&mut self.tables, &mut self.work, &seen);
        self.evidence.take(observed, &self.tables);
        Ok(())
    }

    /// Whether it was seen before at another interface or another place. Only what may change a table is
    /// asked for.
    #[inline]
    fn is_copy(&mut self, observed: &Observed) -> bool {
        let segment = &observed.segment;
        let matters = segment.flags & (SYN | RST) != 0
            || segment.payload_len > 0
            || self.tables.opening(observed.hash).is_some_and(|n| *n != 0);
        matters && {
            let Observed {
                sighting,
                packet,
                interface,
                frame,
                ..
            } = *observed;
            let seen = self.seen.take(packet, sighting, interface, frame.time_ns);
            seen.is_some()
        }
    }

    /// A segment that begins an HTTP/1 message.
    fn speak(&mut self, observed: &Observed, seen: &Seen) {
        let Some(message) = observed.message else {
            return;
        };
        let tuple = &observed.segment.tuple;
        let spoken = Spoken {
            tuple,
            hash: observed.hash,
            seq: observed.segment.seq,
            message,
        };
        if observe_http(&mut self.tables, &spoken, seen) {
            self.tables.talks.failed(spoken.hash, observed.balancer());
            if let Some(conversation) = self.tables.conversation(spoken.hash) {
                self.evidence.failed(observed, conversation);
            }
        }
    }

    /// The clock goes on; it never goes back.
    #[inline]
    fn tick<E>(
        &mut self,
        time_ns: u64,
        look: &mut impl FnMut(&[Event], &Snapshot) -> Result<(), E>,
    ) -> Result<(), E> {
        self.clock_ns = self.clock_ns.max(time_ns);
        match self.next_look_ns {
            Some(next) if self.clock_ns < next => Ok(()),
            Some(next) => self.catch_up(next, look),
            None => {
                // The live source looks once when it begins.
                self.next_look_ns = Some(self.clock_ns.saturating_add(LOOK_NS));
                self.look(self.clock_ns, look)
            }
        }
    }

    #[cold]
    fn catch_up<E>(
        &mut self,
        mut next: u64,
        look: &mut impl FnMut(&[Event], &Snapshot) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut looks = 0;
        while next <= self.clock_ns {
            if looks == QUIET_LOOKS {
                next = self.clock_ns;
            }
            self.look(next, look)?;
            next = next.saturating_add(LOOK_NS);
            looks += 1;
            if next == u64::MAX {
                break;
            }
        }
        self.next_look_ns = Some(next);
        Ok(())
    }

    fn look<E>(
        &mut self,
        now_ns: u64,
        look: &mut impl FnMut(&[Event], &Snapshot) -> Result<(), E>,
    ) -> Result<(), E> {
        let patience = if self.tables.fill() > 0.75 {
            PATIENCE_FULL_NS
        } else {
            PATIENCE_NS
        };
        self.tables.sweep_all(&mut self.work, now_ns, patience);
        let events = self.tables.take_events();
        self.evidence.events_taken();
        let (spaces, ports) = self.tables.look();
        let talks = self.tables.look_at_talks();
        let stalled = self.stalls.list(&self.tables, &self.rests, now_ns);
        let recovered = self.stalls.recovered(&self.tables);
        let idle = self.rests.news();
        let answers = self.exchanges.news();
        let snapshot = Snapshot {
            now: Moment(now_ns),
            took: Duration::ZERO,
            stalled,
            recovered,
            spaces,
            ports,
            talks,
            idle,
            answers,
            globals: self.tables.globals(),
            ..Snapshot::default()
        };
        look(&events, &snapshot)
    }
}
