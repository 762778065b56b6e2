//! Crafting TCP packets and sending them through a raw socket.

use std::io;
use std::net::{IpAddr, SocketAddr};

use socket2::{Domain, Protocol, Socket, Type};

/// A socket that sends whole IP packets.
#[derive(Debug)]
pub(super) struct RawSender(Socket);

impl RawSender {
    pub(super) fn new(to: IpAddr) -> io::Result<Self> {
        let domain = if to.is_ipv4() {
            Domain::IPV4
        } else {
            Domain::IPV6
        };
        // IPPROTO_RAW: the packet brings its own IP header, in both families.
        let socket = Socket::new(domain, Type::RAW, Some(Protocol::from(libc::IPPROTO_RAW)))?;
        Ok(Self(socket))
    }

    /// Sends an IP packet to the host it is addressed to.
    pub(super) fn send(&self, packet: &[u8], to: IpAddr) -> io::Result<()> {
        self.0
            .send_to(packet, &SocketAddr::new(to, 0).into())
            .map(drop)
    }
}

/// A SYN with an MSS option, with valid checksums.
pub(super) fn syn(from: SocketAddr, to: SocketAddr, isn: u32) -> Vec<u8> {
    let mut tcp = Vec::with_capacity(24);
    tcp.extend_from_slice(&from.port().to_be_bytes());
    tcp.extend_from_slice(&to.port().to_be_bytes());
    tcp.extend_from_slice(&isn.to_be_bytes());
    tcp.extend_from_slice(&0u32.to_be_bytes());
    tcp.extend_from_slice(&[6 << 4, SYN]);
    tcp.extend_from_slice(&64_240u16.to_be_bytes());
    // Checksum and urgent pointer.
    tcp.extend_from_slice(&[0; 4]);
    // Option 2, length 4: MSS 1440.
    tcp.extend_from_slice(&[2, 4]);
    tcp.extend_from_slice(&1440u16.to_be_bytes());

    let tcp_length = u16::try_from(tcp.len()).expect("24 bytes");
    let mut packet = Vec::with_capacity(64);
    match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            packet.extend_from_slice(&[0x45, 0]);
            packet.extend_from_slice(&(20 + tcp_length).to_be_bytes());
            // Identification, don't fragment, 64 hops, TCP; the kernel fills the checksum.
            packet.extend_from_slice(&[0, 0, 0x40, 0, 64, TCP, 0, 0]);
            packet.extend_from_slice(&from.octets());
            packet.extend_from_slice(&to.octets());
        }
        (from, to) => {
            packet.extend_from_slice(&[0x60, 0, 0, 0]);
            packet.extend_from_slice(&tcp_length.to_be_bytes());
            packet.extend_from_slice(&[TCP, 64]);
            for address in [from, to] {
                let IpAddr::V6(address) = address else {
                    unreachable!("families do not mix")
                };
                packet.extend_from_slice(&address.octets());
            }
        }
    }
    packet.extend_from_slice(&tcp);
    set_tcp_checksum(&mut packet);
    packet
}

const TCP: u8 = 6;
const SYN: u8 = 0x02;
const SYN_ACK_FIN_RST: u8 = 0x17;

/// Where the TCP header of an IP packet begins (IPv6 without extension headers).
fn tcp_offset(packet: &[u8]) -> Option<usize> {
    match packet.first()? >> 4 {
        4 if packet.get(9) == Some(&TCP) => Some(usize::from(packet[0] & 0xf) * 4),
        6 if packet.get(6) == Some(&TCP) => Some(40),
        _ => None,
    }
}

/// True if the packet is a SYN (not a SYN-ACK) from this source port.
pub(super) fn is_syn_from(packet: &[u8], port: u16) -> bool {
    tcp_offset(packet)
        .and_then(|start| packet.get(start..start + 20))
        .is_some_and(|tcp| {
            u16::from_be_bytes([tcp[0], tcp[1]]) == port && tcp[13] & SYN_ACK_FIN_RST == SYN
        })
}

/// Computes the TCP checksum of an IP packet anew (a packet seen on its way out has not got it yet
/// where the device is meant to compute it).
pub(super) fn set_tcp_checksum(packet: &mut [u8]) {
    let Some(start) = tcp_offset(packet) else {
        return;
    };
    let addresses = if packet[0] >> 4 == 4 { 12..20 } else { 8..40 };
    packet[start + 16..start + 18].fill(0);
    let tcp = &packet[start..];
    let length = u32::try_from(tcp.len()).expect("a packet");
    let mut sum = u32::from(TCP) + length;
    for bytes in [&packet[addresses], tcp] {
        for pair in bytes.chunks(2) {
            sum += u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
        }
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    let checksum = !u16::try_from(sum).expect("folded");
    packet[start + 16..start + 18].copy_from_slice(&checksum.to_be_bytes());
}
