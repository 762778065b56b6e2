//! An interface without Ethernet header, whose other end is the test itself.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::Ipv4Addr;
use std::os::unix::fs::OpenOptionsExt as _;

use anyhow::{Context as _, Result};

use crate::host::Host;
use crate::ioctl::become_tun;

/// The far end of the interface. Dropping it takes the interface away.
#[derive(Debug)]
pub struct Tun(File);

impl Host {
    /// Makes the interface `name` with this address and the 256 addresses around it.
    ///
    /// # Errors
    /// If the kernel has no TUN device.
    pub fn tun(&self, name: &str, address: Ipv4Addr) -> Result<Tun> {
        let open = || {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(libc::O_NONBLOCK)
                .open("/dev/net/tun")?;
            become_tun(&file, name).map(|()| file)
        };
        let file = self.in_ns(open)?.context("/dev/net/tun")?;
        self.ip_batch(&format!(
            "addr add {address}/24 dev {name}\nlink set {name} up\n"
        ))?;
        Ok(Tun(file))
    }
}

impl Tun {
    /// Sends an IP packet to the host.
    ///
    /// # Errors
    /// If the interface is gone.
    pub fn send(&mut self, packet: &[u8]) -> Result<()> {
        self.0
            .write_all(packet)
            .context("writing to the TUN device")
    }

    /// The next IP packet that the host has sent, if there is one.
    ///
    /// # Errors
    /// If the interface is gone.
    pub fn receive(&mut self) -> Result<Option<Vec<u8>>> {
        let mut packet = vec![0; 65_536];
        match self.0.read(&mut packet) {
            Ok(length) => {
                packet.truncate(length);
                Ok(Some(packet))
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error).context("reading from the TUN device"),
        }
    }
}
