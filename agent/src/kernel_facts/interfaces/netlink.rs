//! Dumps of the kernel's routing tables and queueing disciplines over netlink (`rtnetlink(7)`).
//!
//! Only the few attributes that are wanted are decoded, so that what newer kernels add or change in the others
//! cannot make a message unreadable.

use std::io;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NetlinkBuffer,
    NlasIterator,
};
use rustix::fd::OwnedFd;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType};

/// The kernel fills up to 32 KiB per read of a dump.
pub(super) const BUFFER: usize = 64 * 1024;

const RTM_GETNEXTHOP: u16 = 106;
/// Asks the kernel to leave the counters out of link messages: they are most of the data.
const RTEXT_FILTER_SKIP_STATS: u32 = 1 << 3;

/// What to dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dump {
    /// `RTM_GETLINK`.
    Links,
    /// `RTM_GETROUTE` of an address family, all tables.
    Routes(u8),
    /// `RTM_GETNEXTHOP`.
    NextHops,
    /// `RTM_GETQDISC`, of all interfaces.
    Qdiscs,
    /// `RTM_GETTFILTER` of an interface, below this parent.
    Filters { index: u32, parent: u32 },
}

/// `struct tcmsg` of <linux/rtnetlink.h> as it is sent: family, interface, handle, parent, info.
pub(super) fn traffic_control(index: u32, handle: u32, parent: u32, info: u32) -> Vec<u8> {
    let fields = [0, index, handle, parent, info];
    fields.into_iter().flat_map(u32::to_ne_bytes).collect()
}

/// Opens a netlink socket in the network namespace of the calling thread. It hears the multicast groups whose bits
/// are set (bit 0 is group 1).
pub(super) fn open(groups: u32, flags: SocketFlags) -> io::Result<OwnedFd> {
    // NETLINK_ROUTE is 0, which rustix spells `None`.
    open_for(None, groups, flags)
}

/// The same for another protocol than routes and links.
fn open_for(protocol: Option<Protocol>, groups: u32, flags: SocketFlags) -> io::Result<OwnedFd> {
    let flags = flags | SocketFlags::CLOEXEC;
    let socket =
        rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol)?;
    rustix::net::bind(&socket, &SocketAddrNetlink::new(0, groups))?;
    Ok(socket)
}

/// A netlink socket for requests.
pub(crate) struct Socket {
    socket: OwnedFd,
    sequence: u32,
}

impl Socket {
    pub(super) fn open() -> io::Result<Self> {
        Self::open_for(None, SocketFlags::empty())
    }

    /// One of another protocol than routes and links.
    pub(crate) fn open_for(protocol: Option<Protocol>, flags: SocketFlags) -> io::Result<Self> {
        Ok(Self {
            socket: open_for(protocol, 0, flags)?,
            sequence: 0,
        })
    }

    /// Asks for a dump and gives the payload of each message to `each`. False if the kernel says that the data
    /// changed meanwhile.
    pub(super) fn dump(&mut self, dump: Dump, each: impl FnMut(&[u8])) -> io::Result<bool> {
        let (kind, fixed) = dump_request(dump);
        self.dump_of(kind, &fixed, each)
    }

    /// The same for a request of that kind, with that fixed part and attributes.
    pub(crate) fn dump_of(
        &mut self,
        kind: u16,
        fixed: &[u8],
        mut each: impl FnMut(&[u8]),
    ) -> io::Result<bool> {
        self.sequence += 1;
        let message = request(kind, NLM_F_DUMP, self.sequence, fixed);
        rustix::net::send(&self.socket, &message, SendFlags::empty())?;
        let mut consistent = true;
        let mut buffer = vec![0; BUFFER];
        loop {
            let (length, _) = rustix::net::recv(&self.socket, &mut buffer[..], RecvFlags::empty())?;
            for message in Messages(&buffer[..length]) {
                // Rests of an earlier dump that was given up.
                if message.sequence_number() != self.sequence {
                    continue;
                }
                consistent &= message.flags() & NLM_F_DUMP_INTR == 0;
                match message.message_type() {
                    NLMSG_DONE | NLMSG_ERROR => return outcome(&message).map(|()| consistent),
                    _ => each(message.payload()),
                }
            }
        }
    }

    /// Asks for one object and gives the payload of the answer to `each`; false if there is none (`ENOENT`).
    pub(crate) fn get(
        &mut self,
        kind: u16,
        fixed: &[u8],
        each: impl FnOnce(&[u8]),
    ) -> io::Result<bool> {
        self.sequence += 1;
        let message = request(kind, 0, self.sequence, fixed);
        rustix::net::send(&self.socket, &message, SendFlags::empty())?;
        let mut buffer = [0; 4096];
        loop {
            let (length, _) = rustix::net::recv(&self.socket, &mut buffer[..], RecvFlags::empty())?;
            let answer = Messages(&buffer[..length])
                .find(|message| message.sequence_number() == self.sequence);
            let Some(answer) = answer else { continue };
            if answer.message_type() != NLMSG_ERROR {
                each(answer.payload());
                return Ok(true);
            }
            return match outcome(&answer) {
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
                other => other.map(|()| false),
            };
        }
    }

    /// Asks for a change, and waits for the kernel's word on it.
    pub(super) fn change(&mut self, kind: u16, fixed: &[u8]) -> io::Result<()> {
        self.sequence += 1;
        let message = request(kind, NLM_F_ACK, self.sequence, fixed);
        rustix::net::send(&self.socket, &message, SendFlags::empty())?;
        let mut buffer = vec![0; BUFFER];
        loop {
            let (length, _) = rustix::net::recv(&self.socket, &mut buffer[..], RecvFlags::empty())?;
            for message in Messages(&buffer[..length]) {
                let is_answer = message.sequence_number() == self.sequence;
                if is_answer && message.message_type() == NLMSG_ERROR {
                    return outcome(&message);
                }
            }
        }
    }
}

/// What `NLMSG_DONE` and `NLMSG_ERROR` carry: 0 or a negative errno.
fn outcome(message: &NetlinkBuffer<&[u8]>) -> io::Result<()> {
    let code = message.payload().get(..4).map_or(0, number).cast_signed();
    if code < 0 {
        return Err(io::Error::from_raw_os_error(-code));
    }
    Ok(())
}

/// Kind, the family's fixed part, and for links one attribute.
fn dump_request(dump: Dump) -> (u16, Vec<u8>) {
    match dump {
        Dump::Links => (libc::RTM_GETLINK, {
            let mut fixed = vec![0; 16];
            fixed.extend(8_u16.to_ne_bytes());
            fixed.extend(libc::IFLA_EXT_MASK.to_ne_bytes());
            fixed.extend(RTEXT_FILTER_SKIP_STATS.to_ne_bytes());
            fixed
        }),
        Dump::Routes(family) => (libc::RTM_GETROUTE, {
            let mut fixed = vec![0; 12];
            fixed[0] = family;
            fixed
        }),
        Dump::NextHops => (RTM_GETNEXTHOP, vec![0; 8]),
        Dump::Qdiscs => (libc::RTM_GETQDISC, traffic_control(0, 0, 0, 0)),
        Dump::Filters { index, parent } => {
            (libc::RTM_GETTFILTER, traffic_control(index, 0, parent, 0))
        }
    }
}

fn request(kind: u16, flags: u16, sequence: u32, fixed: &[u8]) -> Vec<u8> {
    let mut data = vec![0; 16];
    data.extend(fixed);
    let length = u32::try_from(data.len()).unwrap_or_default();
    let mut message = NetlinkBuffer::new(&mut data[..]);
    message.set_length(length);
    message.set_message_type(kind);
    message.set_flags(NLM_F_REQUEST | flags);
    message.set_sequence_number(sequence);
    data
}

/// The messages in what one read gave. Ends at the first that does not fit.
pub(super) struct Messages<'a>(pub(super) &'a [u8]);

impl<'a> Iterator for Messages<'a> {
    type Item = NetlinkBuffer<&'a [u8]>;

    fn next(&mut self) -> Option<Self::Item> {
        let message = NetlinkBuffer::new_checked(self.0).ok()?;
        let length = message.length() as usize;
        let whole = self.0.get(..length)?;
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        NetlinkBuffer::new_checked(whole).ok()
    }
}

/// The attributes of a message as type and value. Ends at the first that does not fit.
pub(crate) struct Attributes<'a> {
    data: &'a [u8],
}

impl<'a> Attributes<'a> {
    pub(crate) const fn new(data: &'a [u8]) -> Self {
        Self { data }
    }
}

impl<'a> Iterator for Attributes<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let attribute = NlasIterator::new(self.data).next()?.ok()?;
        let (kind, length) = (attribute.kind(), usize::from(attribute.length()));
        let value = self.data.get(4..length)?;
        self.data = self
            .data
            .get(length.next_multiple_of(4)..)
            .unwrap_or_default();
        Some((kind, value))
    }
}

/// A 32-bit number in the machine's order; 0 if the attribute is too short for one.
pub(super) fn number(value: &[u8]) -> u32 {
    value
        .first_chunk()
        .map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}

/// A string that ends at its first NUL.
pub(super) fn text(value: &[u8]) -> String {
    let end = value
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(value.len());
    String::from_utf8_lossy(&value[..end]).into_owned()
}
