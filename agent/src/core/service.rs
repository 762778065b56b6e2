//! What the core remembers of HTTP/1: the connections of each service, and how their requests fare.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use tuplewatch_common::{
    address::{FourTuple, Point, PortSpaceKey, Role},
    conversation::Conversation,
};

use super::{observation::Talk, time::Moment};

/// Connections remembered over all services: some megabytes.
const CONNECTIONS: usize = 16_384;
/// Kinds of requests remembered for one service.
const KINDS: usize = 256;
/// How often what is outdated is looked for.
const SWEEP: Duration = Duration::from_secs(10);

/// The services that this host sends requests to.
#[derive(Clone, Debug, Default)]
pub struct Services {
    all: BTreeMap<PortSpaceKey, Service>,
    connections: usize,
    swept: Moment,
}

/// One service: the responder's address and port.
#[derive(Clone, Debug, Default)]
pub struct Service {
    connections: HashMap<FourTuple, Talk>,
    /// When a request of each kind was served last.
    kinds: HashMap<u32, Moment>,
    /// The latest failure.
    failed: Option<Moment>,
}

impl Services {
    /// Takes the conversations with news. `keep` is the longest time that a rule looks back.
    ///
    /// Only those of this host's own requests count: who answers them sees one client of many, and
    /// knows better why it fails.
    pub fn take(&mut self, now: Moment, talks: &[Talk], keep: Duration) {
        for talk in talks {
            let c = &talk.conversation;
            if c.role != Role::Initiator as u8 {
                continue;
            }
            let service = self.all.entry(Service::of(c)).or_default();
            service.note(talk);
            let before = service.connections.insert(c.tuple, *talk);
            self.connections += usize::from(before.is_none());
        }
        if now.since(self.swept) >= SWEEP || self.connections > CONNECTIONS {
            self.swept = now;
            self.sweep(now, keep);
        }
    }

    /// Services with failures in the last `within`.
    pub fn failing(
        &self,
        now: Moment,
        within: Duration,
    ) -> impl Iterator<Item = (&PortSpaceKey, &Service)> {
        let all = self.all.iter();
        all.filter(move |(_, s)| s.failed.is_some_and(|at| now.since(at) < within))
    }

    /// One of them.
    #[must_use]
    pub fn get(&self, key: &PortSpaceKey) -> Option<&Service> {
        self.all.get(key)
    }

    /// Forgets what was quiet for `keep`, and, where there is too much, what was quiet for longest; those
    /// whose requests fail go last.
    fn sweep(&mut self, now: Moment, keep: Duration) {
        let (mut others, mut failing) = (keep, keep * 2);
        loop {
            self.forget(now, others, failing);
            if self.connections <= CONNECTIONS || failing.is_zero() {
                return;
            }
            if others.is_zero() {
                failing /= 2;
            } else {
                others /= 2;
            }
        }
    }

    fn forget(&mut self, now: Moment, others: Duration, failing: Duration) {
        for service in self.all.values_mut() {
            service.connections.retain(|_, talk| {
                let c = &talk.conversation;
                let keep = if c.is_failing() { failing } else { others };
                now.since(Moment(c.last_ns)) < keep
            });
            service.kinds.retain(|_, at| now.since(*at) < failing);
        }
        self.all
            .retain(|_, service| !service.connections.is_empty());
        let left = self.all.values().map(|service| service.connections.len());
        self.connections = left.sum();
    }
}

impl Service {
    /// The key of the service of a conversation: whoever asks it.
    #[must_use]
    pub fn of(conversation: &Conversation) -> PortSpaceKey {
        PortSpaceKey {
            initiator: [0; 16],
            responder: conversation.tuple.responder,
            responder_port: conversation.tuple.responder_port,
            role: conversation.role,
            point: Point::Wire as u8,
            netns: 0,
        }
    }

    /// Its connections, in no order.
    pub fn connections(&self) -> impl Iterator<Item = &Talk> {
        self.connections.values()
    }

    /// When a request of that kind was served last; never for one whose kind is not known.
    #[must_use]
    pub fn served(&self, kind: u32) -> Option<Moment> {
        self.kinds.get(&kind).copied().filter(|_| kind != 0)
    }

    fn note(&mut self, talk: &Talk) {
        let c = &talk.conversation;
        if c.failures > 0 {
            self.failed = self.failed.max(Some(Moment(c.failed_ns)));
        }
        if c.success_ns == 0 || c.success_kind == 0 {
            return;
        }
        let at = Moment(c.success_ns);
        if let Some(known) = self.kinds.get_mut(&c.success_kind) {
            *known = at.max(*known);
        } else if self.kinds.len() < KINDS {
            self.kinds.insert(c.success_kind, at);
        } else if let Some(oldest) = self.kinds.iter().min_by_key(|(kind, at)| (**at, **kind)) {
            // A service with so many kinds has its most common ones among those seen last.
            let oldest = *oldest.0;
            self.kinds.remove(&oldest);
            self.kinds.insert(c.success_kind, at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A conversation on that port at that second.
    fn talk(port: u16, second: u64, failing: bool) -> Talk {
        let mut conversation = Conversation {
            tuple: FourTuple {
                initiator_port: port,
                responder_port: 80,
                ..FourTuple::default()
            },
            role: Role::Initiator as u8,
            ..Conversation::default()
        };
        let ns = second * 1_000_000_000;
        conversation.on_request(7, 1, ns);
        conversation.on_response(if failing { 503 } else { 200 }, 1, ns);
        Talk {
            conversation,
            page: None,
            closed: false,
        }
    }

    const KEEP: Duration = Duration::from_secs(120);

    #[test]
    fn what_fails_outlives_a_crowd_of_others() {
        let mut services = Services::default();
        services.take(Moment(1_000_000_000), &[talk(1, 1, true)], KEEP);
        for second in 2..100 {
            let crowd: Vec<Talk> = (0..600)
                .map(|n| talk((second as u16) * 600 + n + 2, second, false))
                .collect();
            services.take(Moment(second * 1_000_000_000), &crowd, KEEP);
            assert!(services.connections <= CONNECTIONS);
        }
        let now = Moment(100_000_000_000);
        let (key, service) = services.failing(now, KEEP).next().unwrap();
        assert_eq!(key.responder_port, 80);
        assert!(service.connections().any(|t| t.conversation.is_failing()));
        assert_eq!(service.served(7), Some(Moment(99_000_000_000)));
        assert_eq!(service.served(0), None);
    }

    #[test]
    fn what_is_quiet_is_forgotten_and_so_are_the_requests_of_others() {
        let mut services = Services::default();
        let mut answered = talk(1, 1, true);
        answered.conversation.role = Role::Responder as u8;
        services.take(Moment(1), &[answered, talk(2, 1, false)], KEEP);
        assert_eq!(services.connections, 1);
        services.take(Moment(200_000_000_000), &[], KEEP);
        assert_eq!((services.connections, services.all.len()), (0, 0));
    }
}
