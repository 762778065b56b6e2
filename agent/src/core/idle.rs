//! Idle connections: what woke again and lived, and what was reset by the first segment after its rest.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tuplewatch_common::address::{FourTuple, PortSpaceKey, Role};

use super::{ends::Ends, time::Moment};

/// Services remembered.
const SERVICES: usize = 1024;
/// Resets remembered for each of them, and looks at which something woke.
const KEPT: usize = 1024;

/// A connection whose first segment after an idle time was answered by RST, or by nobody.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Killed {
    /// The connection, named by who opened it.
    pub tuple: FourTuple,
    /// A [`Role`]: whether this host opened it.
    pub role: Role,
    /// A [`tuplewatch_common::address::Point`].
    pub point: u8,
    /// When the RST came; in silence, when that segment was sent.
    pub at: Moment,
    /// How long nothing was sent or received before.
    pub idle: Duration,
    /// When it was opened, if that was seen.
    pub opened: Option<Moment>,
    /// The process that opened it, 0 if unknown.
    pub pid: u32,
    /// Its command name.
    pub command: [u8; 16],
    /// The peer had closed its side before that segment was sent.
    pub closed_before: bool,
    /// The segment was a keep-alive probe.
    pub by_probe: bool,
    /// Nobody has answered that segment, however often it was sent, while new connections were established.
    pub in_silence: bool,
    /// Who sent the RST.
    pub reset_by: Option<ResetBy>,
    /// How its socket is set.
    pub settings: Settings,
}

impl Killed {
    /// When it was used last before that segment.
    #[must_use]
    pub fn rested_since(&self) -> Moment {
        let ns = i64::try_from(self.idle.as_nanos()).unwrap_or(i64::MAX);
        self.at.shifted(-ns)
    }
}

/// The begin of a rest is known to so much: the same rest is meant.
const SAME: Duration = Duration::from_secs(1);

/// Who sent a RST.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ResetBy {
    /// Its TTL is not that of the peer's packets: something in between.
    Middlebox,
    /// Its TTL is that of the peer's packets.
    Peer,
}

/// How a socket is set; `None` where it could not be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// `SO_KEEPALIVE`.
    pub keep_alive: Option<bool>,
    /// `TCP_KEEPIDLE`, or `net.ipv4.tcp_keepalive_time` where the socket sets nothing.
    pub keep_alive_time: Option<Duration>,
    /// `TCP_USER_TIMEOUT`; zero if it is not set.
    pub user_timeout: Option<Duration>,
}

/// Connections of one service that woke and lived, at one look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Survived {
    /// How many.
    pub count: u32,
    /// The longest idle time among them.
    pub longest: Duration,
}

/// What is told at one look.
#[derive(Clone, Debug, Default)]
pub struct IdleNews {
    /// Connections that were reset.
    pub killed: Vec<Killed>,
    /// Connections that lived, by service (see [`service`]).
    pub survived: Vec<(PortSpaceKey, Survived)>,
}

/// The service of a connection: at the initiator whoever asks it, at the responder for one initiator
/// address.
#[must_use]
pub fn service(tuple: &FourTuple, role: Role, point: u8) -> PortSpaceKey {
    PortSpaceKey {
        initiator: if role == Role::Initiator {
            [0; 16]
        } else {
            tuple.initiator
        },
        responder: tuple.responder,
        responder_port: tuple.responder_port,
        role: role as u8,
        point,
        netns: 0,
    }
}

/// All services.
#[derive(Clone, Debug, Default)]
pub struct Idles {
    all: BTreeMap<PortSpaceKey, Idle>,
}

/// One service.
#[derive(Clone, Debug, Default)]
pub struct Idle {
    /// Connections that were reset, in the order of time.
    pub killed: VecDeque<Killed>,
    /// … of those that the peer had closed before.
    pub races: VecDeque<Killed>,
    /// Connections that lived, and when that was seen.
    pub survived: VecDeque<(Moment, Survived)>,
}

impl Idles {
    /// Takes what is new. `keep` is the longest time that a rule looks back.
    pub fn take(&mut self, now: Moment, news: &IdleNews, keep: Duration) {
        for killed in &news.killed {
            let key = service(&killed.tuple, killed.role, killed.point);
            let Some(idle) = self.of(key) else { continue };
            let list = if killed.closed_before {
                &mut idle.races
            } else {
                &mut idle.killed
            };
            add(list, *killed);
        }
        for (key, survived) in &news.survived {
            if let Some(idle) = self.of(*key) {
                push(&mut idle.survived, (now, *survived));
            }
        }
        self.all.retain(|_, idle| {
            let old = |at: Moment| now.since(at) > keep;
            drop_while(&mut idle.killed, |killed| old(killed.at));
            drop_while(&mut idle.races, |killed| old(killed.at));
            drop_while(&mut idle.survived, |(at, _)| old(*at));
            !(idle.killed.is_empty() && idle.races.is_empty() && idle.survived.is_empty())
        });
    }

    /// Takes connections that ended in silence; one that goes on may be told again.
    pub fn note(&mut self, in_silence: &[Killed]) {
        for killed in in_silence {
            let key = service(&killed.tuple, killed.role, killed.point);
            if let Some(idle) = self.of(key) {
                add(&mut idle.killed, *killed);
            }
        }
    }

    /// Services in which something was reset.
    pub fn troubled(&self) -> impl Iterator<Item = (&PortSpaceKey, &Idle)> {
        let all = self.all.iter();
        all.filter(|(_, idle)| !(idle.killed.is_empty() && idle.races.is_empty()))
    }

    /// One of them.
    #[must_use]
    pub fn get(&self, key: &PortSpaceKey) -> Option<&Idle> {
        self.all.get(key)
    }

    /// The service `key`. Where there are too many, one in which nothing was reset makes room.
    fn of(&mut self, key: PortSpaceKey) -> Option<&mut Idle> {
        if self.all.len() >= SERVICES && !self.all.contains_key(&key) {
            let quiet = |(_, idle): &(&PortSpaceKey, &Idle)| {
                idle.killed.is_empty() && idle.races.is_empty()
            };
            let least = self.all.iter().filter(quiet).min_by_key(|(_, idle)| {
                let latest = idle.survived.back();
                latest.map(|(at, _)| *at)
            });
            let least = *least?.0;
            self.all.remove(&least);
        }
        Some(self.all.entry(key).or_default())
    }
}

/// Takes a connection in the order of time, unless the end of the same rest is known.
fn add(list: &mut VecDeque<Killed>, new: Killed) {
    let is_same = |known: &Killed| {
        let apart = known
            .rested_since()
            .since(new.rested_since())
            .max(new.rested_since().since(known.rested_since()));
        known.tuple == new.tuple && known.role == new.role && apart < SAME
    };
    if list.iter().any(is_same) {
        return;
    }
    if list.len() >= KEPT {
        list.pop_front();
    }
    let at = list.partition_point(|known| known.at <= new.at);
    list.insert(at, new);
}

fn push<T>(list: &mut VecDeque<T>, new: T) {
    if list.len() >= KEPT {
        list.pop_front();
    }
    list.push_back(new);
}

fn drop_while<T>(list: &mut VecDeque<T>, old: impl Fn(&T) -> bool) {
    while list.front().is_some_and(&old) {
        list.pop_front();
    }
}

/// Connections to one service that are lost at the first segment after an idle time, and others that
/// live.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct IdleEvidence {
    /// Connections lost after a longer idle time than any other survived: reset, or without any answer from
    /// then on.
    pub killed: u32,
    /// Of them those without any answer.
    pub in_silence: u32,
    /// Connections lost after a shorter one: for other reasons.
    pub killed_sooner: u32,
    /// The shortest idle time after which a connection was lost, of those above.
    pub shortest_killed_seconds: f64,
    /// The longest one.
    pub longest_killed_seconds: f64,
    /// Connections that woke and lived.
    pub survived: u64,
    /// The longest idle time among these.
    pub longest_survived_seconds: f64,
    /// The time-out, where the two are near enough or a known device fits.
    pub timeout_seconds: Option<f64>,
    /// Known devices with such a time-out.
    pub devices: Vec<String>,
    /// Who sends the RST, where all that could be told say the same.
    pub reset_by: Option<ResetBy>,
    /// An idle time before keep-alive probes that would save the connections.
    pub keep_alive_seconds: f64,
    /// The connections, the latest first.
    pub connections: Vec<IdleConnection>,
    /// What could not be looked at.
    pub unseen: String,
}

/// A connection that was lost after an idle time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IdleConnection {
    /// Its ends.
    #[serde(flatten)]
    pub ends: Ends,
    /// Seconds from its opening to the RST or the segment that nobody answered; `null` if it is older than the agent.
    pub age_seconds: Option<f64>,
    /// Seconds without a segment before that one.
    pub idle_seconds: f64,
    /// Seconds since then.
    pub ago_seconds: f64,
    /// That segment was a keep-alive probe.
    pub probe: bool,
    /// Nobody has answered it.
    pub in_silence: bool,
    /// Who sent the RST.
    pub reset_by: Option<ResetBy>,
    /// The process that opened it.
    pub pid: Option<u32>,
    /// Its command name.
    pub command: Option<String>,
    /// `SO_KEEPALIVE` of its socket.
    pub keep_alive: Option<bool>,
    /// Idle time before its first keep-alive probe.
    pub keep_alive_seconds: Option<f64>,
    /// `TCP_USER_TIMEOUT`; 0 if it is not set.
    pub user_timeout_seconds: Option<f64>,
    /// The command that closes its socket, to be run in its network namespace, while it waits in silence.
    pub close: Option<String>,
}

impl IdleConnection {
    /// What its socket says about keep-alive, if that could be read.
    #[must_use]
    pub fn keep_alive_text(&self) -> Option<String> {
        let mut text = match (self.keep_alive?, self.keep_alive_seconds) {
            (false, _) => "SO_KEEPALIVE is off".to_owned(),
            (true, Some(s)) => format!("SO_KEEPALIVE is on, first probe after {s:.0} s"),
            (true, None) => "SO_KEEPALIVE is on".to_owned(),
        };
        match self.user_timeout_seconds {
            Some(s) if s > 0.0 => text.push_str(&format!(", TCP_USER_TIMEOUT {s:.1} s")),
            Some(_) => text.push_str(", TCP_USER_TIMEOUT is not set"),
            None => {}
        }
        Some(text)
    }
}

#[cfg(test)]
mod tests {
    use tuplewatch_common::address::Point;

    use super::*;

    fn survived(key: u16) -> (PortSpaceKey, Survived) {
        let key = PortSpaceKey {
            responder_port: key,
            ..PortSpaceKey::default()
        };
        let one = Survived {
            count: 1,
            longest: Duration::from_secs(9),
        };
        (key, one)
    }

    fn killed(port: u16) -> Killed {
        Killed {
            tuple: FourTuple {
                responder_port: port,
                ..FourTuple::default()
            },
            role: Role::Initiator,
            point: Point::Wire as u8,
            at: Moment(1),
            idle: Duration::from_secs(400),
            opened: None,
            pid: 0,
            command: [0; 16],
            closed_before: false,
            by_probe: false,
            in_silence: false,
            reset_by: None,
            settings: Settings::default(),
        }
    }

    #[test]
    fn quiet_services_make_room_and_all_is_forgotten_in_time() {
        let mut idles = Idles::default();
        let keep = Duration::from_secs(600);
        let mut news = IdleNews {
            killed: vec![killed(1)],
            survived: (2..3000).map(survived).collect(),
        };
        idles.take(Moment(1), &news, keep);
        assert_eq!(idles.all.len(), SERVICES);
        assert_eq!(idles.troubled().count(), 1);
        news.killed = (0..2 * KEPT as u16)
            .map(|port| {
                let mut killed = killed(7);
                killed.tuple.initiator_port = port;
                killed
            })
            .collect();
        news.survived.clear();
        idles.take(Moment(2), &news, keep);
        assert_eq!(idles.troubled().count(), 2);
        let longest = idles.troubled().map(|(_, i)| i.killed.len()).max();
        assert_eq!(longest, Some(KEPT));
        idles.take(Moment(700_000_000_000), &IdleNews::default(), keep);
        assert!(idles.all.is_empty());
    }

    #[test]
    fn the_end_of_a_rest_counts_once() {
        let mut idles = Idles::default();
        let mut silent = killed(1);
        (silent.in_silence, silent.at) = (true, Moment(500_000_000_000));
        let later = |ms: i64| Killed {
            at: silent.at.shifted(ms * 1_000_000),
            ..silent
        };
        for told in [silent, later(4), later(-200)] {
            idles.note(&[told]);
        }
        // A RST in the end, of something that was asked again and again.
        let news = IdleNews {
            killed: vec![later(900)],
            ..IdleNews::default()
        };
        let keep = Duration::from_secs(600);
        idles.take(silent.at, &news, keep);
        let known = |idles: &Idles| {
            let (_, idle) = idles.troubled().next().unwrap();
            idle.killed.iter().map(|k| k.at).collect::<Vec<_>>()
        };
        assert_eq!(known(&idles), [silent.at]);
        // Others are told late, in the order of their times.
        let mut another = later(-60_000);
        another.tuple.initiator_port = 9;
        idles.note(&[another, later(20_000)]);
        assert_eq!(known(&idles), [another.at, silent.at, later(20_000).at]);
    }

    #[test]
    fn a_rest_began_before_the_agent_did() {
        assert!(killed(1).rested_since().signed() < 0);
    }
}
