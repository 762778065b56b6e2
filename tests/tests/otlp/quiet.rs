//! Whether a host, or a process, has kept to itself.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result};
use tuplewatch_tests::prelude::*;

/// What a host has sent: connections tried, IPv4 packets, UDP datagrams over IPv6.
pub fn sent(host: &Host) -> Result<[i64; 3]> {
    let snmp = host.snmp()?;
    let path = format!("/proc/{}/net/snmp6", host.holder_pid());
    let text = std::fs::read_to_string(path)?;
    let line = text
        .lines()
        .find_map(|l| l.strip_prefix("Udp6OutDatagrams"));
    let udp6 = line.context("Udp6OutDatagrams")?.trim().parse()?;
    Ok([snmp.get("TcpActiveOpens"), snmp.get("IpOutRequests"), udp6])
}

/// The inode numbers of a process' sockets.
fn sockets(pid: u32) -> Result<BTreeSet<u64>> {
    let mut inodes = BTreeSet::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        // It may have been closed meanwhile.
        let Ok(target) = std::fs::read_link(entry?.path()) else {
            continue;
        };
        let target = target.to_string_lossy().into_owned();
        let inode = target
            .strip_prefix("socket:[")
            .and_then(|t| t.strip_suffix(']'));
        inodes.extend(inode.and_then(|inode| inode.parse::<u64>().ok()));
    }
    Ok(inodes)
}

/// The inode of what listens on 127.0.0.1:9464, where the agent's pages are: nobody on another host
/// can reach it.
fn pages(pid: u32) -> Result<BTreeSet<u64>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/net/tcp"))?;
    let listeners = text.lines().skip(1).filter_map(|line| {
        let words: Vec<_> = line.split_whitespace().collect();
        let is_it = words.get(1..4) == Some(&["0100007F:24F8", "00000000:0000", "0A"][..]);
        words.get(9).filter(|_| is_it)?.parse().ok()
    });
    Ok(listeners.collect())
}

/// The sockets of a process that are neither netlink, nor a pair within the process, nor the listener
/// of its pages on loopback: those that could reach anybody.
pub fn outward_sockets(pid: u32) -> Result<Vec<u64>> {
    let before = sockets(pid)?;
    let mut inward = pages(pid)?;
    for (table, column) in [("netlink", 9), ("unix", 6)] {
        let text = std::fs::read_to_string(format!("/proc/{pid}/net/{table}"))?;
        let inodes = text.lines().skip(1).filter_map(|line| {
            line.split_whitespace()
                .nth(column)
                .and_then(|inode| inode.parse::<u64>().ok())
        });
        inward.extend(inodes);
    }
    // One that was there before and after the tables were read was there in between.
    let after = sockets(pid)?;
    Ok(before
        .intersection(&after)
        .filter(|inode| !inward.contains(inode))
        .copied()
        .collect())
}
