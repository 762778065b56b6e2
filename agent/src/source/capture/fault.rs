//! What is wrong with a capture, and where.

use std::{fmt, io};

/// A capture that cannot be read on.
#[derive(Debug, thiserror::Error)]
pub struct Fault {
    /// Offset in the file; in a compressed one, in what it unpacks to.
    pub offset: u64,
    /// What is wrong there.
    pub reason: Reason,
}

impl Fault {
    /// The file cannot be opened, or not be read at all: that says nothing of what is in it.
    #[must_use]
    pub fn is_unopened(&self) -> bool {
        let Reason::Io(error) = &self.reason else {
            return false;
        };
        self.offset == 0 && error.raw_os_error().is_some()
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_unopened() || matches!(self.reason, Reason::Empty) {
            return self.reason.fmt(f);
        }
        write!(f, "at byte {}: {}", self.offset, self.reason)
    }
}

/// What is wrong.
#[derive(Debug, thiserror::Error)]
pub enum Reason {
    /// It is another kind of file.
    #[error(
        "this is no capture file: it begins with {0:02x?}, neither pcap nor pcapng (nor one of them packed with gzip or zstd)"
    )]
    NoCapture([u8; 4]),
    /// There is nothing in it.
    #[error("the file is empty")]
    Empty,
    /// It ends too early.
    #[error("the file ends within {0}; everything before it was read")]
    Cut(&'static str),
    /// A version that nobody writes.
    #[error("version {0}.{1} of the file format is not known")]
    Version(u16, u16),
    /// A length that cannot be.
    #[error("{0} has an impossible length of {1} bytes: the file is damaged from here on")]
    Length(&'static str, u32),
    /// The length at a block's end is not the one at its beginning.
    #[error(
        "the block has a length of {0} bytes at its beginning and {1} at its end: the file is damaged from here on"
    )]
    Unequal(u32, u32),
    /// A section without the mark that tells its byte order.
    #[error("the section has no byte-order mark, but {0:08x}: the file is damaged from here on")]
    ByteOrder(u32),
    /// A packet of an interface that was not described before.
    #[error("a packet belongs to interface {0}, of which there is no description")]
    NoInterface(u32),
    /// More interfaces than memory is meant for.
    #[error("there are more than {0} interfaces")]
    Interfaces(usize),
    /// A link type that we do not read.
    #[error("{}", super::link::refusal(*.0))]
    Link(u32),
    /// The operating system or the unpacker failed.
    #[error("{0}")]
    Io(#[from] io::Error),
}
