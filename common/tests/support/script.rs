//! A script of segments: what a test lets pass, and where it is seen.

use tuplewatch_common::{
    address::{FourTuple, PortSpaceKey, Role, v4_mapped},
    observe::{Seen, Work, observe},
    record::{Global, PortSpace},
    segment::Segment,
};

use super::{
    invariants,
    tables::{InMemory, Limits},
};

/// Nanoseconds of a millisecond and of a second.
pub const MS: u64 = 1_000_000;
pub const S: u64 = 1_000_000_000;

/// What the sweeper of the agent grants a handshake that got its SYN-ACK.
pub const PATIENCE: u64 = 30 * S;

/// One host with its tables, and a clock that the script moves.
pub struct Host {
    pub tables: InMemory,
    pub work: Work,
    pub seen: Seen,
}

impl Host {
    /// A host that is the `role` end of what the script opens.
    pub fn new(role: Role) -> Self {
        Self::with_limits(role, Limits::ROOMY)
    }

    pub fn with_limits(role: Role, limits: Limits) -> Self {
        Self {
            tables: InMemory::new(limits),
            work: Work::default(),
            seen: Seen {
                now_ns: 1_000 * S,
                ifindex: 2,
                syn_role: role,
                seen_before: false,
            },
        }
    }

    /// Lets time pass.
    pub fn wait(&mut self, nanoseconds: u64) -> &mut Self {
        self.seen.now_ns += nanoseconds;
        self
    }

    /// Lets a segment pass and checks the invariants.
    pub fn see(&mut self, segment: Segment) -> &mut Self {
        self.see_unchecked(segment);
        invariants::check(&self.tables);
        self
    }

    /// Lets a segment pass.
    pub fn see_unchecked(&mut self, segment: Segment) {
        self.work.segment = segment;
        observe(&mut self.tables, &mut self.work, &self.seen);
    }

    /// One round of the sweeper.
    pub fn sweep(&mut self) -> &mut Self {
        self.tables
            .sweep_all(&mut self.work, self.seen.now_ns, PATIENCE);
        invariants::check(&self.tables);
        self
    }

    /// Sweeps everything away and checks what must then hold.
    pub fn end(&mut self) -> &mut Self {
        self.tables.sweep_all(&mut self.work, u64::MAX, 0);
        invariants::check_settled(&self.tables);
        self
    }

    /// The counters of the port space of `flow`; zeros if there is none.
    pub fn space(&self, flow: &Flow) -> PortSpace {
        let key = PortSpaceKey::wire(&flow.tuple, self.seen.syn_role as u8);
        self.tables.spaces.get(&key).copied().unwrap_or_default()
    }

    pub fn global(&self, what: Global) -> u64 {
        self.tables.global(what)
    }
}

/// Both ends of a connection: makes their segments.
#[derive(Clone, Copy, Debug)]
pub struct Flow {
    pub tuple: FourTuple,
}

impl Flow {
    /// 10.0.0.1:`port` → 10.0.0.2:80.
    pub fn from_port(port: u16) -> Self {
        Self {
            tuple: FourTuple {
                initiator: v4_mapped([10, 0, 0, 1]),
                responder: v4_mapped([10, 0, 0, 2]),
                responder_port: 80,
                initiator_port: port,
                pad: 0,
            },
        }
    }

    /// A segment of the initiator.
    pub fn there(&self, flags: u8, seq: u32, ack: u32) -> Segment {
        Segment {
            tuple: self.tuple,
            flags,
            seq,
            ack,
            payload_len: 0,
            payload_offset: 54,
        }
    }

    /// A segment of the responder.
    pub fn back(&self, flags: u8, seq: u32, ack: u32) -> Segment {
        Segment {
            tuple: self.tuple.reversed(),
            ..self.there(flags, seq, ack)
        }
    }
}
