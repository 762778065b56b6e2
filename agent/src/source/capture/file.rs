//! One capture file: its packets as far as they concern the tables.

use std::{
    collections::HashMap,
    io::{self, Chain, Cursor, Read},
    net::IpAddr,
    path::Path,
    sync::{Arc, atomic::AtomicU64},
};

use tuplewatch_common::{
    address::{Address, FourTuple, Role},
    bytes::{Bytes as _, Captured},
    http::{self, Balancer, Message},
    observe::is_plain_data,
    segment::{ACK, Located, NotSegment, RST, SYN, Segment, read_into},
};

use super::{
    batch::Batch,
    copies::{Sighting, fingerprint},
    fault::Fault,
    input::Input,
    link::{Direction, Found},
    look::{self, Look, Place},
    reader::{Packet, Reader},
    sent::{Hint, Sent},
    tables::Frame,
    vantage::Vantage,
    words::prefetch_to_write,
};

/// Which packets count, and from where they are seen.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Packets before this moment are left out (nanoseconds since the epoch).
    pub since_ns: Option<u64>,
    /// Packets after this one.
    pub until_ns: Option<u64>,
    /// Only these ends; all if empty.
    pub ends: Vec<EndFilter>,
    /// The role, if it is set.
    pub role: Option<Role>,
    /// The addresses of the host that captured, if they are named.
    pub local: Vec<IpAddr>,
}

/// One end of a connection: a host, a port, or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndFilter {
    /// The host.
    pub host: Option<Address>,
    /// The port.
    pub port: Option<u16>,
}

impl EndFilter {
    fn is_of(&self, tuple: &FourTuple) -> bool {
        let matches = |address: &Address, port: u16| {
            self.host.is_none_or(|host| host == *address)
                && self.port.is_none_or(|wanted| wanted == port)
        };
        matches(&tuple.initiator, tuple.initiator_port)
            || matches(&tuple.responder, tuple.responder_port)
    }
}

/// A segment, or what else a file comes to. It fills two cache lines: each of them goes from the core that reads to
/// the one that judges.
#[repr(align(64))]
#[derive(Clone, Copy, Debug, Default)]
pub struct Observed {
    /// What it is.
    pub next: Next,
    /// Where it stands.
    pub frame: Frame,
    /// The segment.
    pub segment: Segment,
    /// [`FourTuple::hash`] of it.
    pub hash: u64,
    /// The role of the place of observation, where it is a SYN or a request.
    pub role: Option<Role>,
    /// The HTTP/1 message that it begins with, if any.
    pub message: Option<Message>,
    /// Whose error page it is, where it is a response that failed and the page is known: a place in
    /// [`http::BALANCERS`].
    pub page: Option<u8>,
    /// The interface.
    pub interface: u32,
    /// What tells copies of it from repetitions.
    pub sighting: Sighting,
    /// Its [`fingerprint`], unless it is plain.
    pub packet: u64,
    /// Whether it says that its connection may make no progress.
    pub hint: Hint,
    /// The window field.
    pub window: u16,
    /// Its direction, where the capture says it.
    pub direction: Option<Direction>,
    /// TTL or hop limit of its packet.
    pub ttl: u8,
}

const _: () = assert!(size_of::<Observed>() == 128);

impl Observed {
    /// Whose error page it is, where it is a response that failed and the page is known.
    #[must_use]
    pub fn balancer(&self) -> Option<&'static Balancer> {
        http::BALANCERS.get(usize::from(self.page?))
    }
}

/// How far [`CaptureFile::read`] has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Next {
    /// To a segment that the tables are to see.
    Segment,
    /// To one that says no more than that its connection is in use.
    #[default]
    Plain,
    /// Some packets on, to a moment; none of them concerns the tables.
    Time,
    /// To the end.
    End,
}

/// What was counted on the way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Packets in the time that was asked for.
    pub packets: u64,
    /// Packets before and after it.
    pub outside: u64,
    /// TCP segments among them that were selected.
    pub segments: u64,
    /// Packets whose headers could not be read, most often because the snap length cut them.
    pub unreadable: u64,
    /// Fragments other than the first.
    pub fragments: u64,
    /// The first packet's time.
    pub first_ns: Option<u64>,
    /// The latest packet's time.
    pub last_ns: u64,
}

type Stream = Chain<Cursor<Vec<u8>>, Rest>;

/// A capture that is being read.
pub struct CaptureFile {
    reader: Reader<Stream>,
    index: u32,
    /// Numbers of interfaces that the link layer told, by those of the file.
    interfaces: HashMap<(u32, u32), u32>,
    last_interface: ((u32, u32), u32),
    told_ns: u64,
    sent: Sent,
    /// What was counted so far.
    pub counts: Counts,
    /// Where it was taken.
    pub vantage: Vantage,
    /// The places of its interfaces, of which there is one where it is judged for one only.
    pub places: Vec<Place>,
    /// Time of the first packet, if there is one.
    pub starts_ns: Option<u64>,
    /// Length of the file in bytes, where it has one.
    pub length: Option<u64>,
    progress: Arc<AtomicU64>,
}

/// What comes after the bytes that the vantage was found in.
struct Rest {
    input: Box<dyn Read + Send>,
    error: Option<io::Error>,
}

impl Read for Rest {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        match self.error.take() {
            Some(error) => Err(error),
            None => self.input.read(to),
        }
    }
}

/// Bytes in which the vantage is looked for: some ten thousand packets.
pub const HEAD: u64 = 4 << 20;
/// Packets before its turn at which the place of one is asked for, which the core that judges may still have.
const AHEAD: usize = 8;
/// How often it is told that time passes without anything of interest.
const TELL_NS: u64 = 1_000_000_000;

impl CaptureFile {
    /// Opens a file; `-` is standard input. `index` numbers the files given; the vantage is looked for
    /// in the first `head` bytes ([`HEAD`] for one file). A file with interfaces of several places is
    /// opened once for each.
    ///
    /// # Errors
    /// [`Fault`] says why it cannot be read.
    pub fn open(
        path: &Path,
        index: u32,
        head: u64,
        selection: &Selection,
    ) -> Result<Vec<Self>, Fault> {
        let again = || {
            let input = Input::open(path).map_err(|error| Fault {
                offset: 0,
                reason: error.into(),
            })?;
            Self::of(input, index, head, selection)
        };
        let first = again()?;
        if first.places.len() == 1 || first.length.is_none() {
            return Ok(vec![first]);
        }
        let places = first.places.clone();
        let apart = places.into_iter().map(|place| {
            let mut file = again()?;
            file.judge_only(place);
            Ok(file)
        });
        apart.collect()
    }

    /// The same of an opened one, all of whose interfaces are judged together.
    ///
    /// # Errors
    /// [`Fault`] says why it cannot be read.
    pub fn of(input: Input, index: u32, head: u64, selection: &Selection) -> Result<Self, Fault> {
        let (length, mut rest) = (head, input.bytes);
        let mut head = Vec::new();
        let error = rest.by_ref().take(length).read_to_end(&mut head).err();
        let Look { places, starts_ns } = Look::at(&head, selection);
        let rest = Rest { input: rest, error };
        Ok(Self {
            reader: Reader::open(Cursor::new(head).chain(rest))?,
            index,
            interfaces: HashMap::new(),
            last_interface: ((0, 0), 1),
            told_ns: 0,
            sent: Sent::default(),
            counts: Counts::default(),
            vantage: look::together(&places),
            places,
            starts_ns,
            length: input.length,
            progress: input.read,
        })
    }

    /// Leaves out what other interfaces than those of one place saw.
    pub fn judge_only(&mut self, place: Place) {
        self.vantage = place.vantage.clone();
        self.places = vec![place];
    }

    /// Its number among the files given.
    #[must_use]
    pub const fn index(&self) -> u32 {
        self.index
    }

    /// Bytes of the file that were read, also while it is being read.
    #[must_use]
    pub fn progress(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.progress)
    }

    /// The moment that the clock goes on to when everything is read: where the file tells when the capture
    /// ended, that may be after its last packet.
    #[must_use]
    pub fn end_ns(&self) -> u64 {
        let told = self.reader.end_ns().unwrap_or(0);
        self.counts.last_ns.max(told)
    }

    /// Link types of interfaces that cannot be read, and how many packets they had.
    #[must_use]
    pub fn left_out(&self) -> (&[u32], u64) {
        self.reader.left_out()
    }

    /// Reads on, as far as a batch has room and the input need not be waited for, but at least to the next
    /// segment.
    pub fn read(&mut self, selection: &Selection, batch: &mut Batch) {
        batch.filled = 0;
        while batch.filled < batch.read.len() {
            if batch.filled > 0 && !self.reader.is_at_hand() {
                break;
            }
            prefetch_to_write(batch.read.get(batch.filled + AHEAD));
            let observed = &mut batch.read[batch.filled];
            observed.next = match self.read_next(selection, observed) {
                Ok(next) => next,
                Err(fault) => {
                    batch.fault = Some(fault);
                    break;
                }
            };
            batch.filled += 1;
            if observed.next == Next::End {
                break;
            }
            self.sent.expect(observed.hash);
        }
        for observed in &mut batch.read[..batch.filled] {
            if !matches!(observed.next, Next::Segment | Next::Plain) {
                continue;
            }
            let Observed {
                hash,
                window,
                frame,
                sighting,
                ..
            } = *observed;
            let segment = &observed.segment;
            observed.hint = self.sent.look(segment, hash, window, frame.time_ns);
            if observed.hint != Hint::None {
                observed.next = Next::Segment;
            }
            if observed.next == Next::Segment {
                observed.packet = fingerprint(segment, hash, sighting);
            }
        }
    }

    /// Reads on to the next segment.
    #[inline]
    fn read_next(&mut self, selection: &Selection, observed: &mut Observed) -> Result<Next, Fault> {
        loop {
            let Some(packet) = self.reader.next()? else {
                return Ok(Next::End);
            };
            if let [place] = &*self.places
                && !place.interfaces.has(packet.interface)
            {
                continue;
            }
            let time_ns = packet.time_ns;
            if selection.since_ns.is_some_and(|since| time_ns < since)
                || selection.until_ns.is_some_and(|until| time_ns > until)
            {
                self.counts.outside += 1;
                continue;
            }
            self.counts.packets += 1;
            self.counts.first_ns.get_or_insert(time_ns);
            self.counts.last_ns = self.counts.last_ns.max(time_ns);
            let bytes = Captured {
                data: packet.data,
                wire_len: packet.wire_len as usize,
            };
            match packet.link.find(&bytes) {
                Ok(found) => {
                    let at = &found.located;
                    let segment = &mut observed.segment;
                    let is_read = read_into(&bytes, at, segment).is_ok();
                    if !selection.ends.is_empty() && (!is_read || !selection.takes(&segment.tuple))
                    {
                        continue;
                    }
                    self.counts.segments += 1;
                    if is_read {
                        let direction = packet.direction.or(found.direction);
                        let message = message(packet.data, at);
                        let opens = segment.flags & (SYN | ACK) == SYN;
                        let asks = matches!(message, Some(Message::Request { .. }));
                        observed.role =
                            (opens || asks).then(|| self.vantage.role(segment, direction));
                        observed.hash = segment.tuple.hash();
                        observed.message = message;
                        observed.page = page(packet.data, at, message);
                        let window = bytes.u16(at.tcp_offset + 14);
                        // One that is cut off says nothing.
                        observed.window = window.unwrap_or(u16::MAX);
                        observed.direction = direction;
                        observed.ttl = ttl(&bytes, at).unwrap_or(0);
                        observed.sighting = Sighting::of(&bytes, packet.link, at, direction);
                        let key = (packet.interface, found.interface);
                        observed.frame = Frame {
                            file: self.index,
                            number: self.reader.frame(),
                            time_ns,
                        };
                        observed.interface = self.interface(key);
                        if message.is_none() && is_plain_data(at.flags, at.payload_len) {
                            return Ok(Next::Plain);
                        }
                        self.told_ns = time_ns;
                        return Ok(Next::Segment);
                    }
                }
                Err(NotSegment::Fragment) => self.counts.fragments += 1,
                Err(NotSegment::Malformed | NotSegment::Truncated) => self.counts.unreadable += 1,
                Err(NotSegment::NotIp | NotSegment::NotTcp) => {}
            }
            if time_ns.saturating_sub(self.told_ns) >= TELL_NS {
                self.told_ns = time_ns;
                observed.frame.time_ns = time_ns;
                return Ok(Next::Time);
            }
        }
    }

    /// A small number for an interface, from 1 on.
    #[inline]
    fn interface(&mut self, key: (u32, u32)) -> u32 {
        if self.last_interface.0 != key || self.interfaces.is_empty() {
            let next = u32::try_from(self.interfaces.len() + 1).unwrap_or(u32::MAX);
            // A file may name as many as it likes; the later ones then count as one.
            let number = if self.interfaces.len() < INTERFACES {
                *self.interfaces.entry(key).or_insert(next)
            } else {
                self.interfaces.get(&key).copied().unwrap_or(next)
            };
            self.last_interface = (key, number);
        }
        self.last_interface.1
    }
}

/// Interfaces of a file that are told apart.
const INTERFACES: usize = 4096;

impl Selection {
    #[inline]
    pub(super) fn takes(&self, tuple: &FourTuple) -> bool {
        self.ends.is_empty() || self.ends.iter().any(|end| end.is_of(tuple))
    }
}

/// The HTTP/1 message that a segment begins with.
#[inline]
fn message(packet: &[u8], at: &Located) -> Option<Message> {
    let payload = payload(packet, at);
    if payload.len() < http::PEEK || at.flags & (SYN | RST) != 0 {
        return None;
    }
    http::message(payload)
}

/// The payload as far as the snap length has left it.
fn payload<'a>(packet: &'a [u8], at: &Located) -> &'a [u8] {
    let payload = packet.get(at.payload_offset..).unwrap_or_default();
    // What lies behind the IP packet fills a short frame up.
    &payload[..payload.len().min(at.payload_len as usize)]
}

/// Whose error page a response is.
fn page(packet: &[u8], at: &Located, message: Option<Message>) -> Option<u8> {
    let Message::Response { status } = message? else {
        return None;
    };
    if !http::is_failure(status) {
        return None;
    }
    let balancer = http::page(payload(packet, at))?;
    let place = http::BALANCERS.iter().position(|b| b == balancer)?;
    u8::try_from(place).ok()
}

/// The segment of a packet, where its headers are, and the TTL.
#[must_use]
pub fn segment(packet: &Packet<'_>) -> Option<(Segment, Found, u8)> {
    let bytes = Captured {
        data: packet.data,
        wire_len: packet.wire_len as usize,
    };
    let found = packet.link.find(&bytes).ok()?;
    let mut segment = Segment::default();
    read_into(&bytes, &found.located, &mut segment).ok()?;
    let ttl = ttl(&bytes, &found.located)?;
    Some((segment, found, ttl))
}

/// TTL (RFC 791 section 3.1) or hop limit (RFC 8200 section 3).
#[inline]
fn ttl(bytes: &Captured<'_>, at: &Located) -> Option<u8> {
    bytes.u8(at.ip_offset + if at.is_v6 { 7 } else { 8 })
}
