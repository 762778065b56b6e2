//! Large captures for the benchmark of `replay`: made of connections that live side by side, the same
//! bytes each time.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    fs::File,
    io::{self, BufWriter, Write},
    net::Ipv4Addr,
    path::Path,
};

/// What a capture is made of.
#[derive(Clone, Copy, Debug)]
pub struct Recipe {
    /// Packets; the capture ends in the midst of its connections.
    pub packets: u64,
    /// Connections that live at once. One that ends is followed by the next of the same port space.
    pub concurrent: u32,
    /// Requests of a connection: 1 to so many, each with 1 to [`MAX_SEGMENTS`] segments of response.
    pub requests: u32,
    /// Milliseconds until every one of the first connections has begun.
    pub ramp_ms: u64,
    /// Milliseconds between a response and what the initiator does next, on average.
    pub pause_ms: u64,
}

impl Recipe {
    /// Length of the file.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        24 + self.packets * RECORD as u64
    }
}

/// What a capture holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Content {
    /// Packets.
    pub packets: u64,
    /// Four-tuples: connections whose SYN is in it, none of which uses one a second time.
    pub four_tuples: u64,
    /// Connections whose handshake was completed.
    pub established: u64,
}

/// Segments of a response.
const MAX_SEGMENTS: u32 = 4;
/// Port spaces that the connections are spread over: so many initiators.
const INITIATORS: u32 = 1000;
/// One of so many connections ends by RST, and one of so many SYNs is sent twice.
const RARE: u64 = 100;
/// Time of the first packet: 2026-11-30.
const START_S: u64 = 1_796_000_000;
/// The responder's address and port.
const RESPONDER: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 255, 0, 1), 443);

const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const PSH: u8 = 8;
const ACK: u8 = 16;

/// `splitmix64`: numbers that look random and are the same each time.
struct Numbers(u64);

impl Numbers {
    const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    const fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// What a connection does next.
#[derive(Clone, Copy)]
enum Next {
    Syn,
    SynAgain,
    SynAck,
    Established,
    Request,
    /// So many segments of the response are still to come.
    Response(u32),
    AckResponse,
    Fin,
    FinBack,
    LastAck,
    Reset,
}

#[derive(Clone, Copy)]
struct Connection {
    next: Next,
    port: u16,
    requests: u32,
    /// Sequence numbers of initiator and responder.
    seq: [u32; 2],
}

/// Writes a capture: Ethernet and IPv4, cut after the TCP header as `tcpdump -s 66` does.
///
/// # Errors
/// If the file cannot be written.
pub fn write(path: &Path, recipe: &Recipe) -> io::Result<Content> {
    let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
    let header: [u32; 6] = [0xa1b2_c3d4, 2 | 4 << 16, 0, 0, SNAP as u32, 1];
    for word in header {
        out.write_all(&word.to_le_bytes())?;
    }
    let mut numbers = Numbers(4);
    let mut connections: Vec<Connection> = (0..recipe.concurrent)
        .map(|slot| Connection {
            next: Next::Syn,
            port: 1024 + (slot / INITIATORS) as u16,
            requests: 0,
            seq: [0; 2],
        })
        .collect();
    let mut queue: BinaryHeap<Reverse<(u64, u32)>> = (0..recipe.concurrent)
        .map(|slot| Reverse((numbers.below(recipe.ramp_ms * 1000 + 1), slot)))
        .collect();
    let mut content = Content::default();
    while content.packets < recipe.packets
        && let Some(Reverse((now_us, slot))) = queue.pop()
    {
        let connection = &mut connections[slot as usize];
        let (packet, wait_us) = connection.step(recipe, &mut numbers, &mut content);
        out.write_all(&packet.record(now_us, slot % INITIATORS, connection.port))?;
        content.packets += 1;
        if matches!(connection.next, Next::Syn) {
            // The next one of this place takes a port that no other one has.
            let Some(port) = connection.port.checked_add(stride(recipe)) else {
                continue;
            };
            connection.port = port;
        }
        queue.push(Reverse((now_us + wait_us, slot)));
    }
    out.flush()?;
    Ok(content)
}

/// Connections of one initiator at once.
const fn stride(recipe: &Recipe) -> u16 {
    recipe.concurrent.div_ceil(INITIATORS) as u16
}

/// One packet of a connection.
struct Packet {
    from_initiator: bool,
    flags: u8,
    seq: u32,
    ack: u32,
    payload: u16,
}

/// Ethernet, IPv4 and TCP header with the timestamp option.
const SNAP: usize = 14 + 20 + 32;
/// With the header of the packet in the file.
const RECORD: usize = 16 + SNAP;

impl Connection {
    /// Its next packet, and the microseconds until the one after that.
    fn step(
        &mut self,
        recipe: &Recipe,
        numbers: &mut Numbers,
        content: &mut Content,
    ) -> (Packet, u64) {
        // Within half and one and a half of the average.
        let pause = recipe.pause_ms * 500 + numbers.below(recipe.pause_ms * 1000 + 1);
        let quick = 20 + numbers.below(200);
        let (from_initiator, flags, payload, next, wait) = match self.next {
            Next::Syn => {
                content.four_tuples += 1;
                self.seq = [numbers.next() as u32, numbers.next() as u32];
                self.requests = 1 + numbers.below(recipe.requests.into()) as u32;
                if numbers.below(RARE) == 0 {
                    (true, SYN, 0, Next::SynAgain, 1_000_000)
                } else {
                    (true, SYN, 0, Next::SynAck, quick)
                }
            }
            Next::SynAgain => (true, SYN, 0, Next::SynAck, quick),
            Next::SynAck => (false, SYN | ACK, 0, Next::Established, quick),
            Next::Established => {
                content.established += 1;
                (true, ACK, 0, Next::Request, quick)
            }
            Next::Request => {
                self.requests -= 1;
                let segments = 1 + numbers.below(MAX_SEGMENTS.into()) as u32;
                (true, PSH | ACK, 300, Next::Response(segments), quick * 10)
            }
            Next::Response(1) => (false, PSH | ACK, 700, Next::AckResponse, quick),
            Next::Response(n) => (false, ACK, 1448, Next::Response(n - 1), 10),
            Next::AckResponse if self.requests > 0 => (true, ACK, 0, Next::Request, pause),
            Next::AckResponse if numbers.below(RARE) == 0 => (true, ACK, 0, Next::Reset, pause),
            Next::AckResponse => (true, ACK, 0, Next::Fin, pause),
            Next::Fin => (true, FIN | ACK, 0, Next::FinBack, quick),
            Next::FinBack => (false, FIN | ACK, 0, Next::LastAck, quick),
            Next::LastAck => (true, ACK, 0, Next::Syn, pause),
            Next::Reset => (true, RST | ACK, 0, Next::Syn, pause),
        };
        let (own, other) = (usize::from(!from_initiator), usize::from(from_initiator));
        let acked = if flags & ACK == 0 { 0 } else { self.seq[other] };
        let packet = Packet {
            from_initiator,
            flags,
            seq: self.seq[own],
            ack: acked,
            payload,
        };
        // A SYN that is sent again has the same number.
        if !matches!(next, Next::SynAgain) {
            let numbered = u32::from(payload) + u32::from(flags & (SYN | FIN) != 0);
            self.seq[own] = self.seq[own].wrapping_add(numbered);
        }
        self.next = next;
        (packet, wait)
    }
}

impl Packet {
    /// As it stands in the file.
    fn record(&self, now_us: u64, initiator: u32, port: u16) -> [u8; RECORD] {
        let mut bytes = [0; RECORD];
        let mut at = 0;
        let mut put = |part: &[u8]| {
            bytes[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        };
        let wire = SNAP as u32 + u32::from(self.payload);
        let seconds = (START_S + now_us / 1_000_000) as u32;
        for word in [seconds, (now_us % 1_000_000) as u32, SNAP as u32, wire] {
            put(&word.to_le_bytes());
        }
        put(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0]);
        let address = Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 0, 0, 1)) + initiator);
        let ends = [(address, port), RESPONDER];
        let [from, to] = if self.from_initiator {
            ends
        } else {
            [ends[1], ends[0]]
        };
        let length = (wire - 14) as u16;
        put(&[0x45, 0]);
        put(&length.to_be_bytes());
        // No identification, don't fragment; those who open the connections are some routers away.
        put(&[
            0,
            0,
            0x40,
            0,
            if self.from_initiator { 57 } else { 64 },
            6,
            0,
            0,
        ]);
        put(&from.0.octets());
        put(&to.0.octets());
        put(&from.1.to_be_bytes());
        put(&to.1.to_be_bytes());
        put(&self.seq.to_be_bytes());
        put(&self.ack.to_be_bytes());
        put(&[0x80, self.flags, 0xff, 0xff, 0, 0, 0, 0]);
        // Two times no operation, then the timestamps.
        put(&[1, 1, 8, 10]);
        put(&((now_us / 1000) as u32).to_be_bytes());
        put(&[0; 4]);
        bytes
    }
}
