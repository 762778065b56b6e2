//! Where a capture was taken: at the initiator, at the responder, or in between.
//!
//! The live agent knows it from the direction of a packet at its own interface. Most captures do not
//! say, but their packets do: a host's own packets have the TTL they were sent with, those of others
//! have lost some on the way; and the end that captured answers at once, while the other end's answers
//! take a round trip.

use std::{
    collections::{BTreeSet, HashMap},
    fmt::Write as _,
    net::IpAddr,
};

use foldhash::fast::RandomState;
use tuplewatch_common::{
    address::{Address, FourTuple, Role},
    segment::{ACK, FIN, RST, SYN, Segment},
};

use super::link::Direction;
use crate::core::observation::{address, ip};

/// Where a capture was taken.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Vantage {
    /// Addresses of the host that captured, and of hosts behind it.
    pub local: BTreeSet<Address>,
    /// The role that somebody has set.
    pub set: Option<Role>,
    /// How it was found out, for people.
    pub why: String,
}

impl Vantage {
    /// The role of the place of observation in a connection whose SYN this is.
    ///
    /// In between it is the responder's: a middlebox accepts connections for those behind it, and what
    /// it sees of former connections is what the responder sees.
    #[must_use]
    pub fn role(&self, syn: &Segment, direction: Option<Direction>) -> Role {
        self.role_in(&syn.tuple, direction)
    }

    /// The same for a connection named by who opened it, and the direction of that end's packets.
    #[must_use]
    pub fn role_in(&self, tuple: &FourTuple, direction: Option<Direction>) -> Role {
        if let Some(role) = self.set {
            return role;
        }
        match direction {
            Some(Direction::Out) => Role::Initiator,
            Some(Direction::In) => Role::Responder,
            None if self.local.contains(&tuple.initiator) => Role::Initiator,
            None => Role::Responder,
        }
    }

    /// Two captures are of the same host if they share an address, or if neither knows one.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.set == other.set
            && (self.local.is_empty() && other.local.is_empty()
                || !self.local.is_disjoint(&other.local))
    }
}

/// What speaks for an address.
#[derive(Clone, Copy, Debug, Default)]
struct End {
    /// Packets with an initial TTL, and with a smaller one.
    whole: u32,
    cut: u32,
    /// A TTL that was seen.
    ttl: u8,
    /// What the link layer says: packets from or to it as our own, and as another's.
    own: u32,
    other: u32,
}

impl End {
    /// Its packets have their initial TTL, but for a few exceptions.
    const fn is_near(self) -> bool {
        self.whole > 0 && self.whole >= self.cut.saturating_mul(9)
    }
}

/// Votes of handshakes between two addresses.
#[derive(Clone, Copy, Debug, Default)]
struct Pair {
    /// The end that sorts lower answers at once.
    lower: u32,
    /// … the higher end.
    higher: u32,
}

/// A handshake that is being timed.
#[derive(Clone, Copy)]
struct Timed {
    syn_ns: u64,
    syn_ack_ns: u64,
}

/// Collects what speaks for a vantage.
#[derive(Default)]
pub struct Votes {
    ends: HashMap<Address, End, RandomState>,
    pairs: HashMap<(Address, Address), Pair, RandomState>,
    handshakes: HashMap<FourTuple, Timed, RandomState>,
}

/// Each table takes no more than so many: a flood must not grow them.
const MOST: usize = 16_384;
/// An answer counts as quick if it takes at most this share of the other end's.
const QUICK: u64 = 2;

/// TTLs that systems send with: Linux, macOS 64; Windows 128; routers, Solaris 255.
const fn is_initial(ttl: u8) -> bool {
    matches!(ttl, 64 | 128 | 255)
}

impl Votes {
    /// Takes a segment with the TTL (hop limit) of its packet.
    pub fn take(&mut self, segment: &Segment, ttl: u8, direction: Option<Direction>, time_ns: u64) {
        let t = &segment.tuple;
        let room = self.ends.len() < MOST && self.pairs.len() < MOST;
        let both_known =
            self.ends.contains_key(&t.initiator) && self.ends.contains_key(&t.responder);
        if !room && !both_known {
            return;
        }
        let sender = self.ends.entry(t.initiator).or_default();
        if is_initial(ttl) {
            sender.whole += 1;
        } else {
            sender.cut += 1;
        }
        sender.ttl = ttl;
        match direction {
            Some(Direction::Out) => sender.own += 1,
            Some(Direction::In) => sender.other += 1,
            None => {}
        }
        let receiver = self.ends.entry(t.responder).or_default();
        match direction {
            Some(Direction::Out) => receiver.other += 1,
            Some(Direction::In) => receiver.own += 1,
            None => {}
        }
        let pair = ordered(t.initiator, t.responder);
        if room || self.pairs.contains_key(&pair) {
            self.pairs.entry(pair).or_default();
        }
        self.time(segment, time_ns);
    }

    fn time(&mut self, segment: &Segment, time_ns: u64) {
        let t = &segment.tuple;
        match segment.flags & (SYN | ACK | RST | FIN) {
            SYN if self.handshakes.len() < MOST => {
                // A SYN that comes again says nothing of the round trip.
                let timed = Timed {
                    syn_ns: time_ns,
                    syn_ack_ns: 0,
                };
                self.handshakes
                    .entry(*t)
                    .and_modify(|again| again.syn_ns = u64::MAX)
                    .or_insert(timed);
            }
            flags if flags == SYN | ACK => {
                if let Some(timed) = self.handshakes.get_mut(&t.reversed()) {
                    timed.syn_ack_ns = time_ns;
                }
            }
            ACK => {
                let Some(timed) = self.handshakes.get(t).copied() else {
                    return;
                };
                if timed.syn_ack_ns == 0 {
                    return;
                }
                self.handshakes.remove(t);
                let (Some(responder), Some(initiator)) = (
                    timed.syn_ack_ns.checked_sub(timed.syn_ns),
                    time_ns.checked_sub(timed.syn_ack_ns),
                ) else {
                    return;
                };
                let pair = ordered(t.initiator, t.responder);
                let Some(votes) = self.pairs.get_mut(&pair) else {
                    return;
                };
                let initiator_is_lower = pair.0 == t.initiator;
                if responder.saturating_mul(QUICK) < initiator {
                    *if initiator_is_lower {
                        &mut votes.higher
                    } else {
                        &mut votes.lower
                    } += 1;
                } else if initiator.saturating_mul(QUICK) < responder {
                    *if initiator_is_lower {
                        &mut votes.lower
                    } else {
                        &mut votes.higher
                    } += 1;
                }
            }
            _ => {}
        }
    }

    /// The vantage that they speak for.
    #[must_use]
    pub fn vantage(&self) -> Vantage {
        if self.ends.values().any(|end| end.own + end.other > 0) {
            let own = self.ends.iter().filter(|(_, end)| end.own > end.other);
            return Vantage {
                local: own.map(|(address, _)| *address).collect(),
                set: None,
                why: "the capture says which packets came in and which went out".to_owned(),
            };
        }
        let mut local = BTreeSet::new();
        let (mut by_ttl, mut by_time, mut between) = (BTreeSet::new(), BTreeSet::new(), 0);
        let mut open: Vec<(Address, Address)> = Vec::new();
        // The order of the table is another one on each run.
        let mut pairs: Vec<_> = self.pairs.iter().collect();
        pairs.sort_unstable_by_key(|(pair, _)| *pair);
        for (&(low, high), votes) in pairs {
            let near = |address| self.ends.get(address).is_some_and(|end| end.is_near());
            match (near(&low), near(&high)) {
                (true, false) => by_ttl.insert((low, high)),
                (false, true) => by_ttl.insert((high, low)),
                (false, false) => {
                    between += 1;
                    false
                }
                (true, true) if votes.lower > 2 * votes.higher => by_time.insert(low),
                (true, true) if votes.higher > 2 * votes.lower => by_time.insert(high),
                (true, true) => {
                    open.push((low, high));
                    false
                }
            };
        }
        local.extend(by_ttl.iter().map(|(own, _)| *own));
        local.extend(&by_time);
        // Where nothing else tells: the one address that takes part in every conversation.
        if local.is_empty() && open.len() > 1 && between == 0 {
            let (a, b) = open[0];
            let common = |x: &Address| open.iter().all(|(low, high)| low == x || high == x);
            local.extend([a, b].into_iter().filter(common));
        }
        let why = self.reason(&by_ttl, &by_time, between, local.is_empty());
        Vantage {
            local,
            set: None,
            why,
        }
    }

    fn reason(
        &self,
        by_ttl: &BTreeSet<(Address, Address)>,
        by_time: &BTreeSet<Address>,
        between: usize,
        is_middle: bool,
    ) -> String {
        let mut why = String::new();
        if let Some((own, other)) = by_ttl.first() {
            let ttl = |address| self.ends.get(address).map_or(0, |end: &End| end.ttl);
            let _ = write!(
                why,
                "packets of {} have the TTL they were sent with ({}), those of {} come with {}",
                ip(own),
                ttl(own),
                ip(other),
                ttl(other)
            );
        } else if let Some(own) = by_time.first() {
            let _ = write!(
                why,
                "{} answers at once, the other end a round trip later",
                ip(own)
            );
        } else if between > 0 {
            why.push_str("packets of both ends have come over routers");
        } else if is_middle {
            why.push_str("neither TTLs nor the time of answers tell the ends apart");
        } else {
            why.push_str("its address takes part in every conversation");
        }
        why
    }
}

fn ordered(a: Address, b: Address) -> (Address, Address) {
    if a <= b { (a, b) } else { (b, a) }
}

/// The vantage of a capture whose local addresses somebody has named.
#[must_use]
pub fn named(addresses: &[IpAddr]) -> Vantage {
    Vantage {
        local: addresses.iter().map(|a| address(*a)).collect(),
        set: None,
        why: "as --local says".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use tuplewatch_common::address::v4_mapped;

    use super::*;

    const CLIENT: Address = v4_mapped([10, 0, 0, 1]);
    const SERVER: Address = v4_mapped([10, 0, 0, 2]);

    fn segment(from: Address, to: Address, ports: (u16, u16), flags: u8) -> Segment {
        Segment {
            tuple: FourTuple {
                initiator: from,
                responder: to,
                initiator_port: ports.0,
                responder_port: ports.1,
                pad: 0,
            },
            flags,
            ..Segment::default()
        }
    }

    /// Handshakes with these TTLs, and these times of the two answers.
    fn vantage(ttls: (u8, u8), answers_ns: (u64, u64)) -> Vantage {
        let mut votes = Votes::default();
        for n in 0..10u64 {
            let (port, t) = (1000 + n as u16, n * 1_000_000);
            let syn = segment(CLIENT, SERVER, (port, 80), SYN);
            let ack = segment(CLIENT, SERVER, (port, 80), ACK);
            let syn_ack = segment(SERVER, CLIENT, (80, port), SYN | ACK);
            votes.take(&syn, ttls.0, None, t);
            votes.take(&syn_ack, ttls.1, None, t + answers_ns.0);
            votes.take(&ack, ttls.0, None, t + answers_ns.0 + answers_ns.1);
        }
        votes.vantage()
    }

    fn role(vantage: &Vantage) -> Role {
        vantage.role(&segment(CLIENT, SERVER, (1, 80), SYN), None)
    }

    #[test]
    fn ttls_tell() {
        let client = vantage((64, 63), (50_000, 40_000));
        assert_eq!(client.local, BTreeSet::from([CLIENT]));
        assert_eq!(role(&client), Role::Initiator);
        assert!(client.why.contains("10.0.0.1"), "{}", client.why);
        let server = vantage((125, 64), (50_000, 40_000));
        assert_eq!(server.local, BTreeSet::from([SERVER]));
        assert_eq!(role(&server), Role::Responder);
        let middle = vantage((63, 60), (1_000, 900_000));
        assert_eq!(middle.local, BTreeSet::new());
        assert_eq!(role(&middle), Role::Responder);
        assert!(client.is_same(&client) && !client.is_same(&server));
    }

    #[test]
    fn times_tell_where_no_router_is_between() {
        assert_eq!(vantage((64, 64), (500_000, 9_000)).local, [CLIENT].into());
        assert_eq!(vantage((64, 128), (9_000, 500_000)).local, [SERVER].into());
        let open = vantage((64, 64), (10_000, 11_000));
        assert_eq!(open.local, BTreeSet::new());
    }

    #[test]
    fn the_link_layer_tells_most() {
        let mut votes = Votes::default();
        let syn = segment(CLIENT, SERVER, (1, 80), SYN);
        votes.take(&syn, 63, Some(Direction::Out), 0);
        let vantage = votes.vantage();
        assert_eq!(vantage.local, BTreeSet::from([CLIENT]));
        assert_eq!(vantage.role(&syn, Some(Direction::In)), Role::Responder);
    }
}
