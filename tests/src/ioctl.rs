//! The device requests that neither `ip` nor sysctl offer.

use std::io;
use std::os::fd::AsRawFd;

/// `ethtool_value` of linux/ethtool.h.
#[repr(C)]
struct EthtoolValue {
    cmd: u32,
    data: u32,
}

const ETHTOOL_STXCSUM: u32 = 0x0000_0017;
const ETHTOOL_SSG: u32 = 0x0000_0019;
const ETHTOOL_STSO: u32 = 0x0000_001f;
const ETHTOOL_SGSO: u32 = 0x0000_0024;
const ETHTOOL_SGRO: u32 = 0x0000_002c;

fn request(interface: &str) -> io::Result<libc::ifreq> {
    // SAFETY: ifreq is a plain C struct for which all zeroes is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if interface.len() >= request.ifr_name.len() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "interface name too long",
        ));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
        *to = from.cast_signed();
    }
    Ok(request)
}

/// Turns checksum offload, scatter-gather, TSO, GSO and GRO of an interface of the calling thread's
/// network namespace off, so that a recording shows what a real wire would carry.
pub(crate) fn offloads_off(interface: &str) -> io::Result<()> {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::DGRAM, None)?;
    for cmd in [
        ETHTOOL_SGRO,
        ETHTOOL_SGSO,
        ETHTOOL_STSO,
        ETHTOOL_STXCSUM,
        ETHTOOL_SSG,
    ] {
        let mut value = EthtoolValue { cmd, data: 0 };
        let mut request = request(interface)?;
        request.ifr_ifru.ifru_data = (&raw mut value).cast();
        // SAFETY: `request` names an interface and points to an ethtool_value that lives until the
        // call returns, as SIOCETHTOOL asks for these commands.
        if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Makes the opened `/dev/net/tun` an interface of the calling thread's network namespace, whose packets
/// begin with their IP header.
pub(crate) fn become_tun(file: &std::fs::File, interface: &str) -> io::Result<()> {
    let mut request = request(interface)?;
    request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: `request` is a valid ifreq, which TUNSETIFF reads and fills.
    if unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// True if the interface is up and has carrier (IFF_RUNNING).
pub(crate) fn is_running(interface: &str) -> io::Result<bool> {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::DGRAM, None)?;
    let mut request = request(interface)?;
    // SAFETY: `request` is a valid ifreq that the kernel fills.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: SIOCGIFFLAGS filled this member of the union.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    Ok(i32::from(flags) & libc::IFF_RUNNING != 0)
}
