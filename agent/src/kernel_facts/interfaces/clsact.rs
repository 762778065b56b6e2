//! The clsact queueing discipline of an interface and the filters on it (`tc(8)`), where programs sit on
//! kernels without tcx, and other people's may sit on any.

use std::{
    io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixDatagram},
    },
    time::{Duration, Instant},
};

use super::netlink::{Attributes, Dump, Socket, number, text, traffic_control};

/// `TC_H_CLSACT`: the parent of the qdisc.
const ROOT: u32 = 0xffff_fff1;
/// The qdisc's handle, `ffff:`.
const HANDLE: u32 = 0xffff_0000;

/// Held while filters are set, or a qdisc is taken away because it is empty: two agents, or an agent and the guard of
/// one that was killed, must not do so at the same time. The kernel gives it back when the holder ends.
#[derive(Debug)]
pub struct Turn {
    /// Bound to a name that one socket of a network namespace can have.
    _socket: Option<UnixDatagram>,
}

impl Turn {
    /// Waits for it. After two seconds it goes on without: anybody may take a name.
    #[must_use]
    pub fn take() -> Self {
        const NAME: &str = "tuplewatch-clsact";
        const PATIENCE: Duration = Duration::from_secs(2);
        let end = Instant::now() + PATIENCE;
        let bind = || UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(NAME)?);
        let mut bound = bind();
        while bound
            .as_ref()
            .is_err_and(|e| e.kind() == io::ErrorKind::AddrInUse)
            && Instant::now() < end
        {
            std::thread::sleep(Duration::from_millis(5));
            bound = bind();
        }
        Self {
            _socket: bound.ok(),
        }
    }
}

/// A direction of the packets of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// Coming in.
    Ingress,
    /// Going out.
    Egress,
}

impl Side {
    /// Both.
    pub const BOTH: [Self; 2] = [Self::Ingress, Self::Egress];

    /// `TC_H_MIN_INGRESS` and `TC_H_MIN_EGRESS` below [`HANDLE`].
    const fn parent(self) -> u32 {
        match self {
            Self::Ingress => HANDLE | 0xfff2,
            Self::Egress => HANDLE | 0xfff3,
        }
    }
}

/// A filter, in the order in which packets meet them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// `bpf`, `flower`, `u32`, …
    pub kind: String,
    /// What its owner calls it, if it is a `bpf` one.
    pub name: Option<String>,
    /// The kernel's number of its eBPF program.
    pub program: Option<u32>,
    /// Lower ones come first.
    pub priority: u16,
    /// Tells it from others of its priority.
    pub handle: u32,
}

/// The filters on one side of an interface. Takes no right. None if there is no such qdisc.
///
/// # Errors
/// The kernel refuses the dump.
pub fn filters(index: u32, side: Side) -> io::Result<Vec<Filter>> {
    let parent = side.parent();
    let mut filters = Vec::new();
    Socket::open()?.dump(Dump::Filters { index, parent }, |message| {
        filters.extend(filter(message));
    })?;
    Ok(filters)
}

/// `struct tcmsg` with `TCA_*` and `TCA_BPF_*`; `None` for what only announces the filters of a priority.
fn filter(message: &[u8]) -> Option<Filter> {
    const TCA_BPF_NAME: u16 = 7;
    const TCA_BPF_ID: u16 = 11;
    let (head, attributes) = message.split_at_checked(20)?;
    let mut filter = Filter {
        handle: number(&head[8..12]),
        priority: (number(&head[16..20]) >> 16) as u16,
        ..Filter::default()
    };
    if filter.handle == 0 {
        return None;
    }
    let mut options: &[u8] = &[];
    for (kind, value) in Attributes::new(attributes) {
        match kind {
            libc::TCA_KIND => filter.kind = text(value),
            libc::TCA_OPTIONS => options = value,
            _ => {}
        }
    }
    // The numbers of the options are the kind's own.
    if filter.kind == "bpf" {
        for (kind, value) in Attributes::new(options) {
            match kind {
                TCA_BPF_NAME => filter.name = Some(text(value)),
                TCA_BPF_ID => filter.program = Some(number(value)),
                _ => {}
            }
        }
    }
    Some(filter)
}

/// Whether an interface has the qdisc.
///
/// # Errors
/// The kernel refuses the dump.
pub fn is_there(index: u32) -> io::Result<bool> {
    let mut found = false;
    Socket::open()?.dump(Dump::Qdiscs, |message| {
        found |= message.split_at_checked(20).is_some_and(|(head, rest)| {
            let kind = Attributes::new(rest).find(|(kind, _)| *kind == libc::TCA_KIND);
            number(&head[4..8]) == index && kind.is_some_and(|(_, name)| text(name) == "clsact")
        });
    })?;
    Ok(found)
}

/// Removes one filter.
///
/// # Errors
/// The kernel refuses it.
pub fn remove_filter(index: u32, side: Side, filter: &Filter) -> io::Result<()> {
    // Of all protocols, as ours are set.
    let every = u32::from((libc::ETH_P_ALL as u16).to_be());
    let info = u32::from(filter.priority) << 16 | every;
    let what = traffic_control(index, filter.handle, side.parent(), info);
    Socket::open()?.change(libc::RTM_DELTFILTER, &what)
}

/// Removes the qdisc of an interface if it has one, unless somebody's filters are on it.
///
/// # Errors
/// The kernel refuses it.
pub fn remove_if_empty(index: u32) -> io::Result<()> {
    if !is_there(index)? {
        return Ok(());
    }
    for side in Side::BOTH {
        if !filters(index, side)?.is_empty() {
            return Ok(());
        }
    }
    let what = traffic_control(index, HANDLE, ROOT, 0);
    Socket::open()?.change(libc::RTM_DELQDISC, &what)
}
