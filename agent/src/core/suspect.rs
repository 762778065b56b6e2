//! What is remembered of responses that cannot be read: how long they are, and how long they took.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use tuplewatch_common::{
    address::{FourTuple, Point, PortSpaceKey, Role},
    exchange::{Exchange, Responses},
};

use super::{idle, time::Moment};

/// Connections remembered over all services.
const CONNECTIONS: usize = 16_384;

/// The responses on one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answers {
    /// The connection, named by who opened it.
    pub tuple: FourTuple,
    /// Whether this host opened it.
    pub role: Role,
    /// When it was opened; `None` if that was before anybody looked.
    pub opened: Option<Moment>,
    /// The latest response.
    pub latest: Moment,
    /// All but those of the handshake.
    pub all: Responses,
    /// The latest ones that are equally long.
    pub run: Responses,
    /// The first of these.
    pub run_since: Moment,
    /// How long they are.
    pub bytes: u32,
    /// The connection is over.
    pub closed: bool,
}

impl From<&Exchange> for Answers {
    fn from(exchange: &Exchange) -> Self {
        Self {
            tuple: exchange.tuple,
            role: Role::from_u8(exchange.role),
            opened: (exchange.opened_ns != 0).then_some(Moment(exchange.opened_ns)),
            latest: Moment(exchange.latest_ns),
            all: exchange.all,
            run: exchange.run,
            run_since: Moment(exchange.run_since_ns),
            bytes: exchange.bytes,
            closed: exchange.is_closed(),
        }
    }
}

/// All services.
#[derive(Clone, Debug, Default)]
pub struct Suspects {
    all: BTreeMap<PortSpaceKey, HashMap<FourTuple, Answers>>,
    connections: usize,
}

impl Suspects {
    /// Takes what is new, and forgets what was quiet for `keep`.
    pub fn take(&mut self, now: Moment, news: &[Answers], keep: Duration) {
        for answers in news {
            let key = idle::service(&answers.tuple, answers.role, Point::Wire as u8);
            if self.connections >= CONNECTIONS {
                break;
            }
            let service = self.all.entry(key).or_default();
            let before = service.insert(answers.tuple, *answers);
            self.connections += usize::from(before.is_none());
        }
        if !self.all.is_empty() {
            for service in self.all.values_mut() {
                service.retain(|_, answers| now.since(answers.latest) <= keep);
            }
            self.all.retain(|_, service| !service.is_empty());
            self.connections = self.all.values().map(HashMap::len).sum();
        }
    }

    /// The services.
    pub fn services(&self) -> impl Iterator<Item = (&PortSpaceKey, &HashMap<FourTuple, Answers>)> {
        self.all.iter()
    }

    /// One of them.
    #[must_use]
    pub fn get(&self, key: &PortSpaceKey) -> Option<&HashMap<FourTuple, Answers>> {
        self.all.get(key)
    }
}
