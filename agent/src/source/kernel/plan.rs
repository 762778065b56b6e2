//! Plans the memory of the maps: hoped-for memory is what gets an agent killed.

use std::fs;

/// Entries of each map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Connections being opened, a power of two and a multiple of the sixteen places of a set.
    pub handshakes: u32,
    /// Port spaces.
    pub port_spaces: u32,
    /// Sets of former connections (of four each), a power of two.
    pub memory_sets: u32,
    /// Port bitmaps per generation.
    pub bitmaps: u32,
    /// Sockets that this host opened, likewise.
    pub open_sockets: u32,
    /// HTTP/1 conversations, likewise.
    pub conversations: u32,
    /// Connections whose responses are counted, likewise; only where a rule asks for it.
    pub exchanges: u32,
    /// Openers.
    pub openers: u32,
    /// Rows of the census.
    pub census: u32,
    /// Listening ports.
    pub listeners: u32,
    /// Established sockets that make no progress.
    pub stalled: u32,
    /// Bytes of the ring buffer, a power of two and a multiple of the page size.
    pub ring: u32,
}

/// Share of the memory at hand that the maps may take.
const SHARE: u64 = 100;
/// The maps never get less than this: below, the agent would be blind on a small host.
const FLOOR: u64 = 12 << 20;
/// … nor more without being asked: the agent must stay small beside its host's work.
const CEILING: u64 = 24 << 20;

impl Plan {
    /// A plan that takes at most about `bytes`.
    #[must_use]
    pub fn for_bytes(bytes: u64) -> Self {
        // The parts were chosen so that 24 MiB hold 11,520 port spaces (room for 10,000
        // before any is forgotten) and remember 524,288
        // connections, which is 8,700 connections per second for 60 s.
        let scale =
            |at_24_mib: u64| u32::try_from(at_24_mib * bytes / (24 << 20)).unwrap_or(u32::MAX);
        let power = |n: u32| 1 << (31 - n.max(2).leading_zeros());
        Self {
            handshakes: power(scale(16_384)).max(4096),
            port_spaces: scale(11_520).max(1024),
            memory_sets: power(scale(131_072)).max(16_384),
            bitmaps: scale(96).max(16),
            // Twice what is hoped for: a set may be full while others are not.
            open_sockets: power(scale(32_768)).max(8192),
            conversations: power(scale(4096)).max(2048),
            // 656 KiB at 24 MiB, beside the rest: nobody has them without asking.
            exchanges: power(scale(4096)).max(2048),
            openers: scale(4096).max(1024),
            census: scale(8192).max(1024),
            listeners: 2048,
            stalled: scale(1024).max(512),
            ring: 256 << 10,
        }
    }

    /// The plan for this host: one percent of the smaller of the memory and the control group's limit.
    #[must_use]
    pub fn for_host() -> Self {
        let limit = host_memory().min(cgroup_limit().unwrap_or(u64::MAX));
        Self::for_bytes((limit / SHARE).clamp(FLOOR, CEILING))
    }
}

/// Physical memory in bytes.
fn host_memory() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram * u64::from(info.mem_unit)
}

/// The smallest `memory.max` (cgroup v2) on the way from this process to the root, or the v1 limit.
#[must_use]
pub fn cgroup_limit() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
    let mut smallest = None;
    let mut note = |path: String| {
        let value = fs::read_to_string(path)
            .ok()
            .and_then(|t| t.trim().parse::<u64>().ok());
        smallest = smallest.into_iter().chain(value).min();
    };
    for line in text.lines() {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        if controllers.is_empty() {
            let mut path = path.trim_end_matches('/');
            loop {
                note(format!("/sys/fs/cgroup{path}/memory.max"));
                let Some((up, _)) = path.rsplit_once('/') else {
                    break;
                };
                path = up;
            }
        } else if controllers.split(',').any(|c| c == "memory") {
            note(format!("/sys/fs/cgroup/memory{path}/memory.limit_in_bytes"));
        }
    }
    smallest
}

#[cfg(test)]
mod tests {
    use tuplewatch_common::ways::WAYS;

    use super::*;

    #[test]
    fn sizes_are_what_the_kernel_accepts() {
        for mib in [1, 12, 24, 100, 1000] {
            let p = Plan::for_bytes(mib << 20);
            assert!(p.memory_sets.is_power_of_two() && p.ring.is_power_of_two());
            assert!(p.handshakes.is_power_of_two() && p.open_sockets.is_power_of_two());
            assert!(p.handshakes >= WAYS && p.open_sockets >= WAYS);
            assert!(p.conversations.is_power_of_two() && p.conversations >= WAYS);
            assert!(p.exchanges.is_power_of_two() && p.exchanges >= WAYS);
            assert!(p.port_spaces >= 1024);
        }
        assert_eq!(Plan::for_bytes(24 << 20).memory_sets, 131_072);
    }
}
