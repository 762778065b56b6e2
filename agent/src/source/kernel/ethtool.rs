//! Statistics of a network device as its driver names them (`ethtool -S`): the ioctl SIOCETHTOOL
//! (`include/uapi/linux/ethtool.h`). Netlink has no counterpart for a driver's own statistics.

use std::{
    io,
    os::fd::{AsRawFd as _, OwnedFd},
};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// `ETHTOOL_GSSET_INFO`: how many strings a set has.
const GSSET_INFO: u32 = 0x37;
/// `ETHTOOL_GSTRINGS`: the strings of a set.
const GSTRINGS: u32 = 0x1b;
/// `ETHTOOL_GSTATS`: the values.
const GSTATS: u32 = 0x1d;
/// `ETH_SS_STATS`: the set of names of statistics.
const SS_STATS: u32 = 1;
/// `ETH_GSTRING_LEN`: bytes of one string.
const STRING: usize = 32;
/// Statistics that there is room for. The kernel writes as many as the driver has at that moment,
/// whatever room the caller says it has (`ethtool_get_strings`, `ethtool_get_stats`; before 6.19 without
/// any check), and their number changes with the number of queues. So the room is for far more than
/// any driver has: ENA has some thirty for each of at most 128 queues.
const ROOM: usize = 16_384;

/// Names and values.
///
/// # Errors
/// The error of a system call: no such device, or one without statistics (`EOPNOTSUPP`).
pub fn statistics(device: &str) -> io::Result<Vec<(String, u64)>> {
    let socket = socket_with(
        AddressFamily::INET,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    // struct ethtool_sset_info { u32 cmd, reserved; u64 sset_mask; u32 data[]; }
    let mut info = [0u64; 3];
    words(&mut info)[0] = GSSET_INFO;
    info[1] = 1 << SS_STATS;
    ask(&socket, device, &mut info)?;
    if info[1] == 0 {
        return Ok(Vec::new());
    }
    let count = words(&mut info)[4];
    let n = count as usize;
    if n > ROOM / 2 {
        return Err(io::Error::other(format!("{n} statistics are too many")));
    }
    // struct ethtool_gstrings { u32 cmd, string_set, len; u8 data[]; }
    let mut names = vec![0u64; (12 + ROOM * STRING).div_ceil(8)];
    words(&mut names)[..3].copy_from_slice(&[GSTRINGS, SS_STATS, count]);
    ask(&socket, device, &mut names)?;
    // struct ethtool_stats { u32 cmd, n_stats; u64 data[]; }
    let mut values = vec![0u64; 1 + ROOM];
    words(&mut values)[..2].copy_from_slice(&[GSTATS, count]);
    ask(&socket, device, &mut values)?;
    // A driver whose queues changed in between has other names by now.
    if words(&mut names)[2] != count || words(&mut values)[1] != count {
        return Err(io::Error::other(
            "the statistics changed while they were read",
        ));
    }
    let used = names.iter().take((12 + n * STRING).div_ceil(8));
    let bytes: Vec<u8> = used.flat_map(|word| word.to_ne_bytes()).collect();
    let texts = bytes[12..].chunks_exact(STRING).take(n);
    Ok(texts
        .zip(&values[1..])
        .map(|(text, value)| (name(text), *value))
        .collect())
}

/// A buffer of 64-bit words, which all these structures are aligned to, as 32-bit words.
fn words(buffer: &mut [u64]) -> &mut [u32] {
    // SAFETY: a `u64` is two `u32` without padding, and its alignment is enough for them.
    unsafe { std::slice::from_raw_parts_mut(buffer.as_mut_ptr().cast(), buffer.len() * 2) }
}

fn name(text: &[u8]) -> String {
    let end = text.iter().position(|b| *b == 0).unwrap_or(text.len());
    String::from_utf8_lossy(&text[..end]).trim().to_owned()
}

/// Hands a command to the device and gets the answer in the same place.
fn ask(socket: &OwnedFd, device: &str, buffer: &mut [u64]) -> io::Result<()> {
    let mut request = libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru {
            ifru_data: buffer.as_mut_ptr().cast(),
        },
    };
    // The last byte stays zero.
    if device.len() >= libc::IFNAMSIZ {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(device.bytes()) {
        *to = from.cast_signed() as libc::c_char;
    }
    // SAFETY: the request holds a name that ends in a zero and a pointer to a buffer that outlives the
    // call and has room for whatever the kernel writes (see `ROOM`).
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_without_statistics_has_none() {
        let error = statistics("lo").map(|s| s.len());
        assert!(
            matches!(error, Ok(0))
                || error.is_err_and(|e| e.raw_os_error() == Some(libc::EOPNOTSUPP))
        );
        assert!(statistics("no-such-device").is_err());
        assert!(statistics("a-name-that-is-far-too-long").is_err());
    }

    /// Where the machine has a device with statistics they have names, each its own.
    #[test]
    fn statistics_have_names() {
        let devices = std::fs::read_dir("/sys/class/net").unwrap().flatten();
        for device in devices.filter_map(|d| d.file_name().into_string().ok()) {
            let Ok(found) = statistics(&device) else {
                continue;
            };
            let names: std::collections::BTreeSet<_> = found.iter().map(|(n, _)| n).collect();
            assert_eq!(names.len(), found.len(), "{device}: {found:?}");
            assert!(!found.iter().any(|(name, _)| name.is_empty()));
        }
    }
}
