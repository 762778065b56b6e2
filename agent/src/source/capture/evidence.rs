//! The packets behind a finding: which frames to open, and what each of them shows.

use std::collections::HashMap;

use foldhash::fast::RandomState;
use tuplewatch_common::{
    address::{FourTuple, PortSpaceKey, Role},
    conversation::Conversation,
    handshake::Handshake,
    memory::Former,
    record::{Event, EventKind},
    segment::{ACK, FIN, RST, SYN},
};

use super::{
    file::Observed,
    tables::{Frame, InMemory},
};
use crate::core::{
    idle::{self, Killed, ResetBy},
    service::Service,
};

/// One packet and what it shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exhibit {
    /// Where it stands.
    pub frame: Frame,
    /// The connection, named by who opens it.
    pub tuple: FourTuple,
    /// What it shows.
    pub shows: Shows,
}

/// What a packet shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shows {
    /// A SYN on a four-tuple with this former connection, which ended (or was last seen) so many
    /// milliseconds before.
    Syn {
        /// Its initial sequence number.
        isn: u32,
        /// The former connection.
        former: Former,
        /// Its age.
        former_age_ms: u32,
    },
    /// A bare ACK where the SYN-ACK should be.
    BareAck {
        /// What it acknowledges.
        ack: u32,
        /// What an answer to the SYN would acknowledge.
        expected: u32,
    },
    /// The initiator answers the bare ACK with RST.
    Reset,
    /// The responder refuses the SYN.
    Refused,
    /// The same SYN again, for the n-th time, so many nanoseconds after the first.
    Again {
        /// SYNs so far.
        syns: u16,
        /// Time since the first.
        after_ns: u64,
        /// Bare ACKs so far.
        bare_acks: u16,
    },
    /// The responder accepts in the end.
    SynAck,
    /// A response that failed.
    Failed {
        /// Its status.
        status: u16,
        /// The how manieth in a row on its connection.
        run: u32,
        /// Whose error page it is.
        page: Option<&'static str>,
    },
    /// Data or a probe that was sent before and was not answered.
    InVain {
        /// How many time-outs and probes there were.
        times: u32,
        /// Bytes of data.
        bytes: u32,
    },
    /// A RST that answers the first segment after an idle time.
    Killed {
        /// How long that was, in milliseconds.
        idle_ms: u32,
        /// Its TTL, and who sent it, if the packets before told the peer's TTL.
        ttl: u8,
        /// Who sent it.
        by: Option<ResetBy>,
        /// The peer had closed before.
        closed_before: bool,
    },
}

impl Exhibit {
    /// One line for a person.
    #[must_use]
    pub fn reading(&self) -> String {
        match self.shows {
            Shows::Syn {
                isn,
                former,
                former_age_ms,
            } => {
                let age = f64::from(former_age_ms) / 1000.0;
                let before = match former {
                    Former::FinLower | Former::FinHigher | Former::Closed => {
                        format!(": the former connection on this port was closed {age:.1} s before")
                    }
                    Former::Reset => {
                        format!(": the former connection on this port was reset {age:.1} s before")
                    }
                    Former::Open => {
                        ": the former connection on this port was never closed".to_owned()
                    }
                    Former::Opening | Former::HalfOpen => {
                        ": an attempt on this port is still half open".to_owned()
                    }
                    Former::Refused => {
                        format!(": the attempt before on this port was refused {age:.1} s before")
                    }
                    Former::None => String::new(),
                };
                format!("SYN, initial sequence number {isn}{before}")
            }
            Shows::BareAck { ack, expected } => format!(
                "bare ACK instead of a SYN-ACK: it acknowledges {ack}, not {expected}; that number belongs to an \
                 older connection"
            ),
            Shows::Reset => {
                "RST: the initiator knows no such connection and answers the bare ACK".to_owned()
            }
            Shows::Refused => "RST: the responder refuses the SYN".to_owned(),
            Shows::Again {
                syns,
                after_ns,
                bare_acks,
            } => {
                let answer = if bare_acks > 0 {
                    "so far answered by bare ACKs only"
                } else {
                    "not answered so far"
                };
                format!(
                    "the same SYN again, number {syns}, {:.3} s after the first; {answer}",
                    after_ns as f64 / 1e9
                )
            }
            Shows::SynAck => "SYN-ACK: the responder accepts in the end".to_owned(),
            Shows::Failed { status, run, page } => {
                let page = page.map_or_else(String::new, |name| {
                    format!("; the page is that of the {name} itself")
                });
                format!("status {status}, failure number {run} in a row on this connection{page}")
            }
            Shows::InVain { times, bytes: 0 } => {
                format!("a probe, number {times}: those before were not answered")
            }
            Shows::InVain { times, bytes } => format!(
                "the same {bytes} bytes again, time-out number {times}: nothing has acknowledged them"
            ),
            Shows::Killed {
                idle_ms,
                ttl,
                by,
                closed_before,
            } => {
                let idle = f64::from(idle_ms) / 1000.0;
                let by = match by {
                    Some(ResetBy::Middlebox) => {
                        format!("; its TTL {ttl} is not that of the peer's packets")
                    }
                    Some(ResetBy::Peer) => format!("; it has the TTL {ttl} of the peer's packets"),
                    None => String::new(),
                };
                if closed_before {
                    format!(
                        "RST: the peer closed the connection after {idle:.1} s without traffic, and this answers \
                         what was sent all the same"
                    )
                } else {
                    format!(
                        "RST: it answers the first segment after {idle:.1} s without traffic{by}"
                    )
                }
            }
        }
    }
}

/// Exhibits of one port space.
#[derive(Default)]
struct Exhibits {
    /// SYNs that met a bare ACK, and what followed.
    refused: Vec<Exhibit>,
    /// SYNs that came again.
    again: Vec<Exhibit>,
    /// Responses that failed.
    failed: Vec<Exhibit>,
    /// Data and probes sent in vain.
    in_vain: Vec<Exhibit>,
    /// RSTs after an idle time.
    killed: Vec<Exhibit>,
}

/// What the packets behind a finding show.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum About {
    /// Bare ACKs, and what followed.
    BareAcks,
    /// SYNs that came again.
    SynsAgain,
    /// Responses that failed.
    Failures,
    /// Data and probes sent in vain.
    InVain,
    /// RSTs after an idle time.
    Rests,
    /// The same, and what was sent in vain.
    Silence,
}

/// All exhibits, bounded.
#[derive(Default)]
pub struct Evidence {
    spaces: HashMap<PortSpaceKey, Exhibits, RandomState>,
    /// Connections that met a bare ACK, by the hash of their four-tuple; and how many more packets of
    /// them are taken.
    watched: HashMap<u64, (PortSpaceKey, FourTuple, u8), RandomState>,
    events: usize,
}

/// Packets of each kind kept for a port space.
const KEPT: usize = 64;
/// Port spaces with exhibits.
const SPACES: usize = 1024;
/// Connections watched at once.
const WATCHED: usize = 1024;
/// Packets of one connection that are taken after its bare ACK.
const FOLLOWING: u8 = 6;

impl Evidence {
    /// Looks at what a packet did to the tables.
    #[inline]
    pub fn take(&mut self, observed: &Observed, tables: &InMemory) {
        let events = tables.events();
        if events.len() > self.events {
            self.events = events.len();
            if let Some(event) = events.last() {
                self.bare_ack(observed, event, tables);
            }
            return;
        }
        let flags = observed.segment.flags;
        if flags & (SYN | ACK) == SYN {
            self.syn(observed, tables);
        } else if flags & (SYN | RST) != 0 && !self.watched.is_empty() {
            self.following(observed);
        }
    }

    /// The events of the tables were taken out.
    pub const fn events_taken(&mut self) {
        self.events = 0;
    }

    /// A response failed.
    pub fn failed(&mut self, observed: &Observed, conversation: &Conversation) {
        let key = Service::of(conversation);
        let exhibit = Exhibit {
            frame: observed.frame,
            tuple: conversation.tuple,
            shows: Shows::Failed {
                status: conversation.status,
                run: conversation.run,
                page: observed.balancer().map(|balancer| balancer.name),
            },
        };
        if let Some(exhibits) = self.exhibits(&key, |e| &mut e.failed) {
            exhibits.push(exhibit);
        }
    }

    /// Data or a probe was sent again, because nothing was answered.
    pub fn in_vain(
        &mut self,
        observed: &Observed,
        key: &PortSpaceKey,
        tuple: &FourTuple,
        times: u32,
    ) {
        let exhibit = Exhibit {
            frame: observed.frame,
            tuple: *tuple,
            shows: Shows::InVain {
                times,
                bytes: observed.segment.payload_len,
            },
        };
        if let Some(exhibits) = self.exhibits(key, |e| &mut e.in_vain) {
            exhibits.push(exhibit);
        }
    }

    /// A connection was reset after an idle time.
    pub fn killed(&mut self, observed: &Observed, killed: &Killed) {
        let key = idle::service(&killed.tuple, killed.role, killed.point);
        let exhibit = Exhibit {
            frame: observed.frame,
            tuple: killed.tuple,
            shows: Shows::Killed {
                idle_ms: u32::try_from(killed.idle.as_millis()).unwrap_or(u32::MAX),
                ttl: observed.ttl,
                by: killed.reset_by,
                closed_before: killed.closed_before,
            },
        };
        if let Some(exhibits) = self.exhibits(&key, |e| &mut e.killed) {
            exhibits.push(exhibit);
        }
    }

    fn bare_ack(&mut self, observed: &Observed, event: &Event, tables: &InMemory) {
        if event.kind != EventKind::BareAck as u8 {
            return;
        }
        let key = PortSpaceKey::wire(&event.tuple, event.role);
        let Some(exhibits) = self.exhibits(&key, |e| &mut e.refused) else {
            return;
        };
        if let Some((frame, handshake)) = tables.syn_frame(&event.tuple)
            && exhibits.last().is_none_or(|last| last.frame != frame)
        {
            exhibits.push(syn_exhibit(frame, &event.tuple, &handshake));
        }
        exhibits.push(Exhibit {
            frame: observed.frame,
            tuple: event.tuple,
            shows: Shows::BareAck {
                ack: event.ack,
                expected: event.isn.wrapping_add(1),
            },
        });
        if self.watched.len() < WATCHED {
            self.watched
                .insert(event.tuple.hash(), (key, event.tuple, FOLLOWING));
        }
    }

    fn syn(&mut self, observed: &Observed, tables: &InMemory) {
        let tuple = observed.segment.tuple;
        let Some((first, handshake)) = tables.syn_frame(&tuple) else {
            return;
        };
        if handshake.syns < 2 {
            return;
        }
        let key = PortSpaceKey::wire(&tuple, handshake.role);
        let again = Exhibit {
            frame: observed.frame,
            tuple,
            shows: Shows::Again {
                syns: handshake.syns,
                after_ns: observed.frame.time_ns.saturating_sub(handshake.first_ns),
                bare_acks: handshake.bare_acks,
            },
        };
        if handshake.bare_acks > 0 {
            if let Some(exhibits) = self.exhibits(&key, |e| &mut e.refused) {
                exhibits.push(again);
            }
            return;
        }
        if let Some(exhibits) = self.exhibits(&key, |e| &mut e.again) {
            if handshake.syns == 2 && first != observed.frame {
                exhibits.push(syn_exhibit(first, &tuple, &handshake));
            }
            exhibits.push(again);
        }
    }

    fn following(&mut self, observed: &Observed) {
        let segment = &observed.segment;
        let hash = segment.tuple.hash();
        let Some((key, tuple, left)) = self.watched.get_mut(&hash) else {
            return;
        };
        let from_initiator = segment.tuple == *tuple;
        if !from_initiator && segment.tuple.reversed() != *tuple {
            return;
        }
        let shows = match (segment.flags & RST != 0, from_initiator) {
            (true, true) => Shows::Reset,
            (true, false) => Shows::Refused,
            (false, false) => Shows::SynAck,
            (false, true) => return,
        };
        let (key, tuple) = (*key, *tuple);
        *left -= 1;
        if *left == 0 || matches!(shows, Shows::SynAck | Shows::Refused) {
            self.watched.remove(&hash);
        }
        if let Some(exhibits) = self.exhibits(&key, |e| &mut e.refused) {
            exhibits.push(Exhibit {
                frame: observed.frame,
                tuple,
                shows,
            });
        }
    }

    /// The list of a port space, if there is room.
    fn exhibits(
        &mut self,
        key: &PortSpaceKey,
        which: impl Fn(&mut Exhibits) -> &mut Vec<Exhibit>,
    ) -> Option<&mut Vec<Exhibit>> {
        if !self.spaces.contains_key(key) && self.spaces.len() >= SPACES {
            return None;
        }
        let list = which(self.spaces.entry(*key).or_default());
        (list.len() < KEPT).then_some(list)
    }

    /// The exhibits of a finding about a port space, in the order of the capture. A part of the key that
    /// is zero stands for all.
    #[must_use]
    pub fn of(&self, key: &PortSpaceKey, about: About) -> Vec<Exhibit> {
        let any = [0; 16];
        let mut found: Vec<Exhibit> = self
            .spaces
            .iter()
            .filter(|(k, _)| {
                (key.initiator == any || k.initiator == key.initiator)
                    && (key.responder == any || k.responder == key.responder)
                    && (key.responder_port == 0 || k.responder_port == key.responder_port)
                    && (key.role == Role::Unknown as u8 || k.role == key.role)
            })
            .flat_map(|(_, e)| {
                let (list, more) = match about {
                    About::BareAcks => (&e.refused, None),
                    About::SynsAgain => (&e.again, None),
                    About::Failures => (&e.failed, None),
                    About::InVain => (&e.in_vain, None),
                    About::Rests => (&e.killed, None),
                    About::Silence => (&e.killed, Some(&e.in_vain)),
                };
                list.iter().chain(more.into_iter().flatten())
            })
            .copied()
            .collect();
        found.sort_unstable_by_key(|e| (e.frame.time_ns, e.frame.file, e.frame.number));
        found.truncate(KEPT);
        found
    }
}

/// A connection, whichever way a segment of it goes.
#[must_use]
pub fn either(tuple: &FourTuple) -> FourTuple {
    (*tuple).min(tuple.reversed())
}

/// What a packet without symptoms shows. `is_former`: it is of the former connection on the ports of one
/// that has symptoms.
#[must_use]
pub const fn ordinary(flags: u8, is_former: bool) -> &'static str {
    match (is_former, flags & (SYN | ACK | FIN | RST)) {
        (false, f) if f & RST != 0 => "RST: this end ends the connection at once",
        (true, f) if f & RST != 0 => {
            "RST: this end ends the former connection, on whose ports a SYN comes later"
        }
        (false, f) if f & FIN != 0 => "FIN: this end closes the connection",
        (true, f) if f & FIN != 0 => {
            "FIN: this end closes the former connection, on whose ports a SYN comes later"
        }
        (false, SYN) => "SYN: opens a connection",
        (true, SYN) => "SYN: opens the former connection, on whose ports another SYN comes later",
        (_, f) if f & SYN != 0 => "SYN-ACK: the responder accepts",
        _ => "ACK",
    }
}

fn syn_exhibit(frame: Frame, tuple: &FourTuple, handshake: &Handshake) -> Exhibit {
    Exhibit {
        frame,
        tuple: *tuple,
        shows: Shows::Syn {
            isn: handshake.isn,
            former: handshake.former(),
            former_age_ms: handshake.former_age_ms,
        },
    }
}
