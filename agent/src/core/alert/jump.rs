//! What a tick after a gap of hours does: the machine was suspended, or the agent stopped.

use std::time::Duration;

use tuplewatch_common::{
    address::{FourTuple, PortSpaceKey},
    memory::Former,
    record::{Event, EventKind, PortSpace},
};

use super::{Alert, Change, State};
use crate::{
    core::{engine::Engine, observation::Snapshot, rules::Rules, time::Moment},
    sink::fixture,
};

const HOURS: u64 = 6 * 3600;

/// A server whose client's device hands out ports too early, second by second.
struct Server {
    engine: Engine,
    now: Moment,
    counters: PortSpace,
    port: u16,
}

impl Server {
    fn new() -> Self {
        Self::with(Engine::new(Rules::default()), Moment(5_000_000_000_000))
    }

    fn with(engine: Engine, now: Moment) -> Self {
        Self {
            engine,
            now,
            counters: PortSpace::default(),
            port: 2048,
        }
    }

    fn opens(&mut self, n: u64) {
        self.counters.opens += n;
        self.counters.established += n;
        self.counters.closed += n;
    }

    /// SYNs that meet a TIME_WAIT, on a port each.
    fn refused(&mut self, n: u64) {
        let key = fixture::key();
        for _ in 0..n {
            self.opens(1);
            self.counters.bare_acks += 1;
            self.counters.bare_acks_closed += 1;
            self.counters.healed += 1;
            self.port += 1;
            self.engine.events(&[Event {
                kind: EventKind::BareAck as u8,
                time_ns: self.now.0,
                tuple: FourTuple {
                    initiator: key.initiator,
                    responder: key.responder,
                    responder_port: key.responder_port,
                    initiator_port: self.port,
                    pad: 0,
                },
                role: key.role,
                former: Former::Closed as u8,
                former_age_ms: 20_000,
                ..Event::default()
            }]);
        }
    }

    /// Lets time pass, then looks.
    fn look(&mut self, after: u64) -> Vec<Alert> {
        self.look_slowly(after, 0)
    }

    /// The same where the counters are those of `took` seconds ago.
    fn look_slowly(&mut self, after: u64, took: u64) -> Vec<Alert> {
        self.now = self.now + Duration::from_secs(after);
        let spaces: Vec<(PortSpaceKey, PortSpace)> = vec![(fixture::key(), self.counters)];
        let changes = self.engine.snapshot(&Snapshot {
            now: self.now,
            took: Duration::from_secs(took),
            spaces,
            ..Snapshot::default()
        });
        changes
            .into_iter()
            .filter_map(|change| match change {
                Change::Alert(alert) => Some(*alert),
                Change::LookAlike { .. } => None,
            })
            .collect()
    }

    fn firing(&self) -> Vec<Alert> {
        let mut alerts = self.engine.overview(0).alerts;
        alerts.retain(|alert| alert.state == State::Firing);
        alerts
    }

    fn healthy(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.opens(40);
            assert_eq!(self.look(1), []);
        }
    }

    /// Refused SYNs until the alert fires.
    fn fire(&mut self) -> Alert {
        self.healthy(5);
        for _ in 0..10 {
            self.opens(40);
            self.refused(2);
            self.look(1);
        }
        let mut firing = self.firing();
        assert_eq!(firing.len(), 1);
        firing.remove(0)
    }
}

/// Refused SYNs that are spread over hours are not a burst in the last minute.
#[test]
fn what_happened_in_the_gap_fires_nothing() {
    let mut server = Server::new();
    server.healthy(120);
    server.opens(100_000);
    server.refused(500);
    assert_eq!(server.look(HOURS), []);
    for _ in 0..120 {
        server.opens(40);
        assert_eq!(server.look(1), []);
    }
    assert_eq!(server.firing(), []);
}

/// Stopped in the middle of a look: what happened meanwhile is found by the next one.
#[test]
fn what_happened_within_a_look_fires_nothing() {
    let mut server = Server::new();
    server.healthy(120);
    assert_eq!(server.look_slowly(HOURS, HOURS), []);
    server.opens(100_000);
    server.refused(500);
    assert_eq!(server.look(1), []);
    for _ in 0..120 {
        server.opens(40);
        assert_eq!(server.look(1), []);
    }
    assert_eq!(server.firing(), []);
    server.fire();
}

/// The machine slept: nothing was counted, only time has passed.
#[test]
fn a_gap_without_anything_fires_nothing() {
    let mut server = Server::new();
    server.healthy(120);
    assert_eq!(server.look(HOURS), []);
    server.healthy(120);
    assert_eq!(server.firing(), []);
}

#[test]
fn an_alert_lasts_through_the_gap_and_ends_after_it() {
    let mut server = Server::new();
    let before = server.fire();
    assert_eq!(server.look(HOURS), [], "neither over nor told again");
    let firing = server.firing();
    assert_eq!((firing.len(), &firing[0].id), (1, &before.id));
    assert_eq!(firing[0].firing_since, before.firing_since);
    // No symptom comes any more: it is over a minute later, not at once and not never.
    let mut seconds = 0;
    let resolved = loop {
        seconds += 1;
        server.opens(40);
        let told = server.look(1);
        if let Some(alert) = told.into_iter().find(|a| a.state == State::Resolved) {
            break alert;
        }
        assert!(seconds < 90, "still firing");
    };
    assert!(seconds > 50, "over after {seconds} s");
    assert_eq!(resolved.id, before.id);
}

#[test]
fn trouble_that_goes_on_after_the_gap_is_the_same_alert() {
    let mut server = Server::new();
    let before = server.fire();
    server.refused(100);
    assert_eq!(server.look(HOURS), []);
    for _ in 0..90 {
        server.opens(40);
        server.refused(2);
        for alert in server.look(1) {
            assert_eq!((alert.state, &alert.id), (State::Firing, &before.id));
            assert_eq!(alert.firing_since, before.firing_since);
        }
    }
    let firing = server.firing();
    assert_eq!((firing.len(), firing[0].history.count), (1, 1));
}

/// Trouble that begins after the gap is found as quickly as ever.
#[test]
fn new_trouble_after_the_gap_fires() {
    let mut server = Server::new();
    server.healthy(30);
    server.look(HOURS);
    server.fire();
}

/// A short stall (less than the window) is no gap: what was counted belongs to the window.
#[test]
fn a_stall_hides_nothing() {
    let mut server = Server::new();
    server.healthy(30);
    server.opens(1000);
    server.refused(50);
    server.look(30);
    server.opens(40);
    server.look(1);
    assert_eq!(server.firing().len(), 1);
}

/// A clock of the source that goes back neither fires nor loses anything.
#[test]
fn a_clock_that_goes_back_changes_nothing() {
    let mut server = Server::new();
    let before = server.fire();
    server.now = server.now.shifted(-3_600_000_000_000);
    for _ in 0..30 {
        server.opens(40);
        for alert in server.look(1) {
            assert_eq!(alert.id, before.id);
            assert_ne!(alert.state, State::Pending);
        }
    }
}

/// Restarted, with everything unknown again: what was saved goes on.
#[test]
fn a_restart_is_a_gap_too() {
    let mut server = Server::new();
    let before = server.fire();
    let saved = server.engine.save();
    let mut engine = Engine::new(Rules::default());
    let now = server.now + Duration::from_secs(HOURS);
    engine.restore(now, saved);
    let mut after = Server::with(engine, now);
    for second in 0..59 {
        after.opens(40);
        assert_eq!(after.look(1), [], "second {second}");
    }
    assert_eq!(after.firing()[0].firing_since, before.firing_since);
    after.opens(40);
    let told = after.look(1);
    assert_eq!((told.len(), told[0].state), (1, State::Resolved));
    assert_eq!(told[0].id, before.id);
}
