//! Builds packets byte by byte, without the parser under test.

/// One IPv6 extension header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extension {
    /// Hop-by-Hop Options of `8 * (n + 1)` bytes (RFC 8200 section 4.3).
    HopByHop(u8),
    /// Routing header of `8 * (n + 1)` bytes.
    Routing(u8),
    /// Destination Options of `8 * (n + 1)` bytes.
    Destination(u8),
    /// Fragment header: offset in units of eight bytes, more fragments follow.
    Fragment(u16, bool),
    /// Authentication Header of `4 * (n + 2)` bytes (RFC 4302).
    Authentication(u8),
}

impl Extension {
    const fn number(self) -> u8 {
        match self {
            Self::HopByHop(_) => 0,
            Self::Routing(_) => 43,
            Self::Destination(_) => 60,
            Self::Fragment(..) => 44,
            Self::Authentication(_) => 51,
        }
    }

    fn bytes(self, next: u8) -> Vec<u8> {
        let (len, mut bytes) = match self {
            Self::HopByHop(n) | Self::Routing(n) | Self::Destination(n) => {
                (8 * (usize::from(n) + 1), vec![next, n])
            }
            Self::Fragment(offset, more) => {
                let [high, low] = (offset << 3 | u16::from(more)).to_be_bytes();
                (8, vec![next, 0, high, low])
            }
            Self::Authentication(n) => (4 * (usize::from(n) + 2), vec![next, n]),
        };
        bytes.resize(len, 0);
        if matches!(self, Self::HopByHop(_) | Self::Destination(_)) {
            // One PadN option that fills the header (RFC 8200 section 4.2).
            bytes[2] = 1;
            bytes[3] = u8::try_from(len - 4).expect("short headers only");
        }
        bytes
    }
}

/// The network header.
#[derive(Clone, Debug)]
pub enum Ip {
    V4 {
        source: [u8; 4],
        destination: [u8; 4],
        /// Bytes of options: a multiple of 4 up to 40.
        options: usize,
        /// Offset in units of eight bytes.
        fragment_offset: u16,
        more_fragments: bool,
    },
    V6 {
        source: [u8; 16],
        destination: [u8; 16],
        extensions: Vec<Extension>,
    },
}

impl Ip {
    /// 10.0.0.1 → 10.0.0.2.
    pub const V4: Self = Self::V4 {
        source: [10, 0, 0, 1],
        destination: [10, 0, 0, 2],
        options: 0,
        fragment_offset: 0,
        more_fragments: false,
    };

    /// 2001:db8::1 → 2001:db8::2.
    pub fn v6(extensions: &[Extension]) -> Self {
        let address = |last| [0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last];
        Self::V6 {
            source: address(1),
            destination: address(2),
            extensions: extensions.to_vec(),
        }
    }
}

/// A TCP segment in an Ethernet frame.
#[derive(Clone, Debug)]
pub struct Frame {
    /// EtherType of each VLAN tag, outermost first.
    pub tags: Vec<u16>,
    pub ip: Ip,
    pub ports: (u16, u16),
    pub seq: u32,
    pub ack: u32,
    pub flags: u8,
    /// Bytes of TCP options: a multiple of 4 up to 40.
    pub tcp_options: usize,
    pub payload: Vec<u8>,
    /// The IP header announces a length of 0, as BIG TCP does.
    pub big: bool,
    /// Bytes after the IP packet.
    pub padding: usize,
}

impl Frame {
    /// A SYN over `ip`.
    pub fn syn(ip: Ip) -> Self {
        Self {
            tags: Vec::new(),
            ip,
            ports: (40_000, 80),
            seq: 0x0102_0304,
            ack: 0,
            flags: 0x02,
            tcp_options: 0,
            payload: Vec::new(),
            big: false,
            padding: 0,
        }
    }

    /// Start of the IP header.
    pub fn ip_offset(&self) -> usize {
        14 + 4 * self.tags.len()
    }

    /// Start of the TCP header.
    pub fn tcp_offset(&self) -> usize {
        self.ip_offset()
            + match &self.ip {
                Ip::V4 { options, .. } => 20 + options,
                Ip::V6 { extensions, .. } => {
                    40 + extensions.iter().map(|e| e.bytes(0).len()).sum::<usize>()
                }
            }
    }

    /// Start of the payload.
    pub fn payload_offset(&self) -> usize {
        self.tcp_offset() + 20 + self.tcp_options
    }

    /// It is a fragment other than the first.
    pub fn is_later_fragment(&self) -> bool {
        match &self.ip {
            Ip::V4 {
                fragment_offset, ..
            } => *fragment_offset != 0,
            Ip::V6 { extensions, .. } => extensions
                .iter()
                .any(|e| matches!(e, Extension::Fragment(1.., _))),
        }
    }

    /// It is a fragment, maybe the first.
    pub fn is_fragment(&self) -> bool {
        match &self.ip {
            Ip::V4 { more_fragments, .. } => *more_fragments || self.is_later_fragment(),
            Ip::V6 { extensions, .. } => extensions.iter().any(|e| match e {
                Extension::Fragment(offset, more) => *offset != 0 || *more,
                _ => false,
            }),
        }
    }

    /// The bytes on the wire.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];
        for (i, tag) in self.tags.iter().enumerate() {
            out.extend(tag.to_be_bytes());
            out.extend([0x20, 10 + i as u8]);
        }
        let mut tcp = Vec::new();
        tcp.extend(self.ports.0.to_be_bytes());
        tcp.extend(self.ports.1.to_be_bytes());
        tcp.extend(self.seq.to_be_bytes());
        tcp.extend(self.ack.to_be_bytes());
        let words = u8::try_from((20 + self.tcp_options) / 4).expect("at most 15");
        tcp.extend([words << 4, self.flags, 0xff, 0xff, 0, 0, 0, 0]);
        // NOP options.
        tcp.resize(20 + self.tcp_options, 1);
        tcp.extend(&self.payload);
        let length = |n: usize| {
            if self.big {
                [0, 0]
            } else {
                u16::try_from(n)
                    .expect("a packet of less than 64 KiB")
                    .to_be_bytes()
            }
        };
        match &self.ip {
            Ip::V4 {
                source,
                destination,
                options,
                fragment_offset,
                more_fragments,
            } => {
                out.extend([0x08, 0x00]);
                let start = out.len();
                let header = 20 + options;
                out.extend([0x40 | (header / 4) as u8, 0]);
                out.extend(length(header + tcp.len()));
                out.extend([0, 1]);
                out.extend((fragment_offset | u16::from(*more_fragments) << 13).to_be_bytes());
                out.extend([64, 6, 0, 0]);
                out.extend(source);
                out.extend(destination);
                out.resize(start + header, 1);
            }
            Ip::V6 {
                source,
                destination,
                extensions,
            } => {
                out.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
                let mut chain = Vec::new();
                for (i, extension) in extensions.iter().enumerate() {
                    let next = extensions.get(i + 1).map_or(6, |e| e.number());
                    chain.extend(extension.bytes(next));
                }
                out.extend(length(chain.len() + tcp.len()));
                out.extend([extensions.first().map_or(6, |e| e.number()), 64]);
                out.extend(source);
                out.extend(destination);
                out.extend(chain);
            }
        }
        out.extend(tcp);
        out.resize(out.len() + self.padding, 0);
        out
    }
}
