//! Reads the packets of a capture, whatever its format.

use std::io::Read;

use super::{
    fault::{Fault, Reason},
    link::{Direction, Link},
    pcap::Pcap,
    pcapng::PcapNg,
    window::Window,
};

/// No packet is longer: BIG TCP makes skbs of up to 512 KiB, `tcpdump -s 0` keeps 256 KiB.
pub const MAX_PACKET: u32 = 16 << 20;

/// One packet of a capture.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// Nanoseconds since the Unix epoch.
    pub time_ns: u64,
    /// Length on the wire.
    pub wire_len: u32,
    /// What was kept of it.
    pub data: &'a [u8],
    /// How it begins.
    pub link: Link,
    /// The number of that link type as the file has it.
    pub link_number: u32,
    /// The interface, counted through all sections of a pcapng file.
    pub interface: u32,
    /// Which way it went, where the file says so.
    pub direction: Option<Direction>,
}

/// Reads a capture packet by packet.
pub struct Reader<R> {
    window: Window<R>,
    format: Format,
    frame: u64,
}

enum Format {
    Pcap(Pcap),
    PcapNg(PcapNg),
}

impl<R: Read> Reader<R> {
    /// Reads the head of the file.
    ///
    /// # Errors
    /// [`Fault`] says what is wrong with it.
    pub fn open(input: R) -> Result<Self, Fault> {
        let mut window = Window::new(input);
        let fault = |reason| Fault { offset: 0, reason };
        if window.is_empty().map_err(|e| fault(e.into()))? {
            return Err(fault(Reason::Empty));
        }
        if !window.has(4).map_err(|e| fault(e.into()))? {
            return Err(fault(Reason::Cut("the file header")));
        }
        let first = *window.peek(4).first_chunk().unwrap_or(&[0; 4]);
        let format = if Pcap::begins(first) {
            Format::Pcap(Pcap::open(&mut window)?)
        } else if PcapNg::begins(first) {
            Format::PcapNg(PcapNg::default())
        } else {
            return Err(fault(Reason::NoCapture(first)));
        };
        Ok(Self {
            window,
            format,
            frame: 0,
        })
    }

    /// The next packet, or `None` at the end.
    ///
    /// # Errors
    /// [`Fault`] says where the file is broken. What came before it is good; nothing can be read after
    /// it.
    #[inline]
    #[expect(
        clippy::should_implement_trait,
        reason = "a packet borrows from the reader, which no iterator can"
    )]
    pub fn next(&mut self) -> Result<Option<Packet<'_>>, Fault> {
        let packet = match &mut self.format {
            Format::Pcap(pcap) => pcap.next(&mut self.window)?,
            Format::PcapNg(pcapng) => pcapng.next(&mut self.window)?,
        };
        self.frame += u64::from(packet.is_some());
        Ok(packet)
    }

    /// Whether the next packet can be had without waiting for the input.
    #[inline]
    pub fn is_at_hand(&self) -> bool {
        match &self.format {
            Format::Pcap(pcap) => pcap.is_at_hand(&self.window),
            Format::PcapNg(pcapng) => pcapng.is_at_hand(&self.window),
        }
    }

    /// The number of the packet that [`Reader::next`] gave last, as Wireshark counts frames: those of
    /// interfaces that cannot be read count too.
    #[must_use]
    pub fn frame(&self) -> u64 {
        match &self.format {
            Format::Pcap(_) => self.frame,
            Format::PcapNg(pcapng) => self.frame + pcapng.unreadable(),
        }
    }

    /// Offset of the next record in the file.
    #[must_use]
    pub const fn offset(&self) -> u64 {
        self.window.offset()
    }

    /// The name of an interface of the latest section, where the file tells it.
    #[must_use]
    pub fn interface_name(&self, interface: u32) -> Option<String> {
        match &self.format {
            Format::Pcap(_) => None,
            Format::PcapNg(pcapng) => pcapng.interface_name(interface),
        }
    }

    /// When the capture ended, where the file has told by now: the option `isb_endtime` of pcapng.
    #[must_use]
    pub const fn end_ns(&self) -> Option<u64> {
        match &self.format {
            Format::Pcap(_) => None,
            Format::PcapNg(pcapng) => pcapng.end_ns(),
        }
    }

    /// Link types of interfaces whose packets were left out, and how many of these there were.
    #[must_use]
    pub fn left_out(&self) -> (&[u32], u64) {
        match &self.format {
            Format::Pcap(_) => (&[], 0),
            Format::PcapNg(pcapng) => (pcapng.refused_links(), pcapng.unreadable()),
        }
    }
}
