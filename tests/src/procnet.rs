//! The kernel's own counters and socket tables, as text files under `/proc/<pid>/net`.

use anyhow::Context as _;
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Counters by name. A name that the kernel does not print reads as 0.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NetCounters(BTreeMap<String, i64>);

impl NetCounters {
    /// Reads the format of `snmp` and `netstat`: pairs of lines, names then values.
    pub(crate) fn parse(text: &str) -> Self {
        let mut counters = BTreeMap::new();
        let lines: Vec<&str> = text.lines().collect();
        for pair in lines.chunks_exact(2) {
            let mut names = pair[0].split_whitespace();
            let mut values = pair[1].split_whitespace();
            let Some(group) = names.next() else { continue };
            values.next();
            let group = group.trim_end_matches(':');
            for (name, value) in names.zip(values) {
                if let Ok(value) = value.parse() {
                    counters.insert(format!("{group}{name}"), value);
                }
            }
        }
        Self(counters)
    }

    /// Reads the format of `sockstat`: `TCP: inuse 1 orphan 0 tw 3 ...`.
    pub(crate) fn parse_sockstat(text: &str) -> Self {
        let mut counters = BTreeMap::new();
        for line in text.lines() {
            let mut words = line.split_whitespace();
            let Some(group) = words.next() else { continue };
            let group = group.trim_end_matches(':');
            while let (Some(name), Some(value)) = (words.next(), words.next()) {
                if let Ok(value) = value.parse() {
                    counters.insert(format!("{group}.{name}"), value);
                }
            }
        }
        Self(counters)
    }

    /// The value of a counter, 0 if the kernel has no such counter.
    #[must_use]
    pub fn get(&self, name: &str) -> i64 {
        self.0.get(name).copied().unwrap_or(0)
    }

    /// All counters that are not zero.
    pub fn non_zero(&self) -> impl Iterator<Item = (&str, i64)> {
        self.0
            .iter()
            .filter(|(_, value)| **value != 0)
            .map(|(name, value)| (name.as_str(), *value))
    }

    /// Puts the counters of `other` in too.
    pub(crate) fn merge(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// What was added since `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let difference = self
            .0
            .iter()
            .map(|(name, value)| (name.clone(), value - earlier.get(name)));
        Self(difference.collect())
    }
}

/// TCP states as the kernel numbers them (include/net/tcp_states.h).
pub const STATES: [&str; 13] = [
    "",
    "ESTABLISHED",
    "SYN_SENT",
    "SYN_RECV",
    "FIN_WAIT1",
    "FIN_WAIT2",
    "TIME_WAIT",
    "CLOSE",
    "CLOSE_WAIT",
    "LAST_ACK",
    "LISTEN",
    "CLOSING",
    "NEW_SYN_RECV",
];

/// One TCP socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TcpRow {
    /// Own address and port; v4-mapped addresses are given as IPv4.
    pub local: SocketAddr,
    /// The other end.
    pub remote: SocketAddr,
    /// Index into [`STATES`].
    pub state: u8,
}

/// All TCP sockets of a host at one moment.
#[derive(Debug, Clone, Default)]
pub struct TcpTable {
    /// The sockets, IPv4 first.
    pub rows: Vec<TcpRow>,
}

impl TcpTable {
    /// How many sockets are in the state of this name, e.g. `"TIME_WAIT"`.
    #[must_use]
    pub fn count(&self, state: &str) -> usize {
        self.in_state(state).count()
    }

    /// The sockets in the state of this name.
    pub fn in_state(&self, state: &str) -> impl Iterator<Item = &TcpRow> {
        let number = STATES
            .iter()
            .position(|name| *name == state && !name.is_empty());
        self.rows
            .iter()
            .filter(move |row| Some(usize::from(row.state)) == number)
    }

    /// TIME_WAIT sockets by remote address and local port (at a server: by client and service).
    #[must_use]
    pub fn time_wait(&self) -> BTreeMap<(IpAddr, u16), usize> {
        let mut counts = BTreeMap::new();
        for row in self.in_state("TIME_WAIT") {
            *counts
                .entry((row.remote.ip(), row.local.port()))
                .or_insert(0) += 1;
        }
        counts
    }
}

/// Reads `/proc/<pid>/net/tcp` and `tcp6`.
pub(crate) fn tcp_table(pid: u32) -> io::Result<TcpTable> {
    let mut rows = Vec::new();
    for file in ["tcp", "tcp6"] {
        let text = std::fs::read_to_string(format!("/proc/{pid}/net/{file}"))?;
        rows.extend(text.lines().skip(1).filter_map(parse_row));
    }
    Ok(TcpTable { rows })
}

fn parse_row(line: &str) -> Option<TcpRow> {
    let mut words = line.split_whitespace().skip(1);
    let local = parse_address(words.next()?)?;
    let remote = parse_address(words.next()?)?;
    let state = u8::from_str_radix(words.next()?, 16).ok()?;
    Some(TcpRow {
        local,
        remote,
        state,
    })
}

/// `0100007F:1F90` or its 32-digit IPv6 form: each 32-bit word is printed in host byte order.
fn parse_address(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |index: usize| {
        let digits = address.get(index * 8..index * 8 + 8)?;
        Some(u32::from_str_radix(digits, 16).ok()?.to_ne_bytes())
    };
    let ip = if address.len() == 8 {
        IpAddr::V4(Ipv4Addr::from(word(0)?))
    } else {
        let mut bytes = [0u8; 16];
        for (index, chunk) in bytes.chunks_exact_mut(4).enumerate() {
            chunk.copy_from_slice(&word(index)?);
        }
        Ipv6Addr::from(bytes).to_canonical()
    };
    Some(SocketAddr::new(ip, port))
}

/// CPU time of a process, user and kernel, in seconds.
///
/// # Errors
/// If the process is gone.
pub fn cpu_seconds(pid: u32) -> anyhow::Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The command in parentheses may hold spaces; utime and stime are fields 14 and 15.
    let (_, rest) = stat
        .rsplit_once(')')
        .context("/proc/PID/stat without a command")?;
    let ticks: u64 = rest
        .split_whitespace()
        .skip(11)
        .take(2)
        .map(str::parse::<u64>)
        .sum::<Result<_, _>>()?;
    Ok(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// Resident memory of a process in bytes, without eBPF maps that it has mapped: they are kernel memory,
/// which is counted as such.
///
/// # Errors
/// If the process is gone.
pub fn rss_bytes(pid: u32) -> anyhow::Result<u64> {
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    let (mut kib, mut is_map) = (0, false);
    for line in smaps.lines() {
        if let Some(rss) = line.strip_prefix("Rss:") {
            let rss: u64 = rss.trim().trim_end_matches("kB").trim().parse()?;
            kib += if is_map { 0 } else { rss };
        } else if line.split(' ').next().is_some_and(|w| w.contains('-')) {
            is_map = line.ends_with("bpf-map");
        }
    }
    anyhow::ensure!(kib > 0, "process {pid} has no memory");
    Ok(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_both_families_are_read() {
        let row = parse_row("  0: 0A0071CB:1F90 010071CB:0800 06 00000000:00000000 03:00 ");
        let row = row.expect("a row");
        assert_eq!(row.local.to_string(), "203.113.0.10:8080");
        assert_eq!(row.remote.to_string(), "203.113.0.1:2048");
        assert_eq!(STATES[usize::from(row.state)], "TIME_WAIT");
        let mapped = parse_address("0000000000000000FFFF00000100007F:0050").expect("an address");
        assert_eq!(mapped.to_string(), "127.0.0.1:80");
        let six = parse_address(
            "B80D01200000090000000000 10000000:0050"
                .replace(' ', "")
                .as_str(),
        );
        assert_eq!(six.expect("an address").to_string(), "[2001:db8:9::10]:80");
    }

    #[test]
    fn counters_are_read_by_name() {
        let counters = NetCounters::parse("Tcp: A B\nTcp: 1 -1\nTcpExt: C\nTcpExt: 7\n");
        assert_eq!(counters.get("TcpA"), 1);
        assert_eq!(counters.get("TcpB"), -1);
        assert_eq!(counters.get("TcpExtC"), 7);
        assert_eq!(counters.get("TcpExtMissing"), 0);
        let stat = NetCounters::parse_sockstat("sockets: used 5\nTCP: inuse 1 orphan 0 tw 3\n");
        assert_eq!(stat.get("TCP.tw"), 3);
    }
}
