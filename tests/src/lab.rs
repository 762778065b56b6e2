//! A network of hosts.

use std::net::IpAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::host::Host;
use crate::process::lock;
use crate::sampler::Sampler;
use crate::tap::Tap;
use crate::truth::{self, HostTruth, Truth};
use crate::{wait_for, wait_some};

/// One end of a link: the interface's name and its addresses with prefix length.
#[derive(Debug, Clone)]
pub struct LinkEnd<'a> {
    /// The host on this end.
    pub host: &'a Host,
    /// Interface name, at most 15 bytes.
    pub interface: &'a str,
    /// Addresses such as `10.79.1.2/24` or `fd79:1::2/64`; IPv6 ones are usable at once (`nodad`).
    pub addresses: &'a [&'a str],
}

impl<'a> LinkEnd<'a> {
    /// An end without an address.
    #[must_use]
    pub fn new(host: &'a Host, interface: &'a str, addresses: &'a [&'a str]) -> Self {
        Self {
            host,
            interface,
            addresses,
        }
    }
}

/// A set of hosts and links that disappears when dropped (or when the test process dies).
#[derive(Debug)]
pub struct Lab {
    hosts: Arc<Mutex<Vec<Host>>>,
    counted: Mutex<Vec<Host>>,
    sampler: Sampler,
    born: Instant,
}

impl Lab {
    /// An empty lab.
    ///
    /// # Errors
    /// If not root, or `ip` or `nft` is missing: the message names the remedy.
    pub fn new() -> Result<Self> {
        ensure!(
            rustix::process::geteuid().is_root(),
            "the lab makes network namespaces and must run as root (cargo xtask test does)"
        );
        for (tool, package) in [("ip", "iproute2"), ("nft", "nftables")] {
            ensure!(
                on_path(tool),
                "`{tool}` is missing: apt-get install {package}"
            );
        }
        let hosts = Arc::new(Mutex::new(Vec::new()));
        let born = Instant::now();
        let sampler = Sampler::start(Arc::clone(&hosts), born);
        Ok(Self {
            hosts,
            counted: Mutex::default(),
            sampler,
            born,
        })
    }

    /// How long the lab has existed; the clock of [`truth::TimeWaitSample::at`].
    #[must_use]
    pub fn age(&self) -> Duration {
        self.born.elapsed()
    }

    /// Adds a host with nothing but loopback.
    ///
    /// # Errors
    /// If the namespaces cannot be made.
    pub fn host(&self, name: &str) -> Result<Host> {
        let host = Host::start(name)?;
        lock(&self.hosts).push(host.clone());
        Ok(host)
    }

    /// The hosts made so far.
    #[must_use]
    pub fn hosts(&self) -> Vec<Host> {
        lock(&self.hosts).clone()
    }

    /// Connects two hosts by a veth pair, sets addresses, and waits until both ends have carrier.
    ///
    /// # Errors
    /// If the kernel refuses a name or an address.
    pub fn link(&self, a: &LinkEnd<'_>, b: &LinkEnd<'_>) -> Result<()> {
        a.host.ip_batch(&format!(
            "link add {} type veth peer name {} netns {}\n",
            a.interface,
            b.interface,
            b.host.holder_pid()
        ))?;
        for end in [a, b] {
            let mut lines = format!("link set {} up\n", end.interface);
            for address in end.addresses {
                let nodad = if address.contains(':') { " nodad" } else { "" };
                lines += &format!("address add {address} dev {}{nodad}\n", end.interface);
            }
            end.host.ip_batch(&lines)?;
        }
        for end in [a, b] {
            let running = || end.host.is_link_running(end.interface).unwrap_or(false);
            ensure!(
                wait_for(Duration::from_secs(10), running),
                "{}: {} has no carrier 10 s after it was set up",
                end.host.name(),
                end.interface
            );
        }
        Ok(())
    }

    /// Starts counting the TCP traffic from and to these service ports at a host: see
    /// [`truth::Counters`]. Call it before there is traffic.
    ///
    /// # Errors
    /// If nftables refuses the rules.
    pub fn count(&self, host: &Host, services: &[u16]) -> Result<()> {
        truth::install(host, services)?;
        lock(&self.counted).push(host.clone());
        Ok(())
    }

    /// What really happened so far, host by host. Packet counters are exact once traffic has
    /// stopped: see [`Lab::settle`].
    ///
    /// # Errors
    /// If a counter cannot be read.
    pub fn truth(&self) -> Result<Truth> {
        let mut hosts = std::collections::BTreeMap::new();
        for host in lock(&self.counted).iter() {
            let sampled = self.sampler.of(host.name());
            hosts.insert(host.name().to_owned(), HostTruth::read(host, sampled)?);
        }
        Ok(Truth { hosts })
    }

    /// Waits until no counted host has seen a TCP packet of its services for `quiet`.
    ///
    /// # Errors
    /// If it is still not quiet after `timeout`.
    pub fn settle(&self, quiet: Duration, timeout: Duration) -> Result<()> {
        let mut last = (self.packets()?, Instant::now());
        let settled = wait_some(timeout, || {
            let now = match self.packets() {
                Ok(now) => now,
                Err(error) => return Some(Err(error)),
            };
            if now != last.0 {
                last = (now, Instant::now());
            }
            (last.1.elapsed() >= quiet).then_some(Ok(()))
        });
        settled.with_context(|| format!("packets still flow after {timeout:?}"))?
    }

    fn packets(&self) -> Result<Vec<(u64, u64)>> {
        let counted = lock(&self.counted).clone();
        counted
            .iter()
            .map(|host| truth::read_counters(host).map(|c| (c.tcp_in, c.tcp_out)))
            .collect()
    }

    /// Records the packets of an interface into a pcap file until [`Tap::stop`].
    ///
    /// # Errors
    /// If tcpdump is missing or does not start.
    pub fn tap(&self, host: &Host, interface: &str, file: &Path) -> Result<Tap> {
        Tap::start(host, interface, file, "")
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for host in lock(&self.hosts).drain(..) {
            host.end();
        }
    }
}

/// A prefix of the address with the given length, for routes: `net("10.79.1.2", 24)`.
#[must_use]
pub fn network(address: IpAddr, length: u32) -> String {
    match address {
        IpAddr::V4(address) => {
            let mask = u32::MAX.checked_shl(32 - length).unwrap_or(0);
            format!(
                "{}/{length}",
                std::net::Ipv4Addr::from(u32::from(address) & mask)
            )
        }
        IpAddr::V6(address) => {
            let mask = u128::MAX.checked_shl(128 - length).unwrap_or(0);
            format!(
                "{}/{length}",
                std::net::Ipv6Addr::from(u128::from(address) & mask)
            )
        }
    }
}

pub(crate) fn on_path(tool: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(tool).is_file())
}
