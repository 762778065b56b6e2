//! The clsact queueing discipline of an interface and the filters on it (`tc(8)`), where programs sit on
//! kernels without tcx, and other people's may sit on any.

use std::io;

use super::netlink::{Attributes, Dump, Socket, number, text, traffic_control};

/// `TC_H_CLSACT`: the parent of the qdisc.
const ROOT: u32 = 0xffff_fff1;
/// The qdisc's handle, `ffff:`.
const HANDLE: u32 = 0xffff_0000;

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

/// Removes the qdisc of an interface, unless somebody's filters are on it.
///
/// # Errors
/// The kernel refuses it.
pub fn remove_if_empty(index: u32) -> io::Result<()> {
    for side in Side::BOTH {
        if !filters(index, side)?.is_empty() {
            return Ok(());
        }
    }
    let what = traffic_control(index, HANDLE, ROOT);
    Socket::open()?.change(libc::RTM_DELQDISC, &what)
}
