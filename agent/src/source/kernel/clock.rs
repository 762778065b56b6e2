//! Ticks of the kernel.

use std::fs;

/// Ticks per second (`CONFIG_HZ`), which TIME_WAIT's timers count in. No interface tells it outright:
/// the resolution of CLOCK_MONOTONIC_COARSE is one tick (`ktime_get_coarse`, `TICK_NSEC`).
#[must_use]
pub fn ticks_per_second() -> u32 {
    let tick = rustix::time::clock_getres(rustix::time::ClockId::MonotonicCoarse);
    let nanoseconds = u32::try_from(tick.tv_nsec).unwrap_or(0).max(1);
    (1_000_000_000 + nanoseconds / 2) / nanoseconds
}

/// Nanoseconds of CLOCK_MONOTONIC, the clock of `bpf_ktime_get_ns`.
#[must_use]
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// Source ports of this network namespace: `ip_local_port_range` less `ip_local_reserved_ports`.
#[must_use]
pub fn local_budget() -> Option<u32> {
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok()?;
    let mut ends = range
        .split_whitespace()
        .filter_map(|n| n.parse::<u32>().ok());
    let (first, last) = (ends.next()?, ends.next()?);
    let reserved =
        fs::read_to_string("/proc/sys/net/ipv4/ip_local_reserved_ports").unwrap_or_default();
    let taken: u32 = reserved
        .trim()
        .split(',')
        .filter_map(|part| {
            let (a, b) = part.split_once('-').unwrap_or((part, part));
            let (a, b) = (a.trim().parse::<u32>().ok()?, b.trim().parse::<u32>().ok()?);
            let (a, b) = (a.max(first), b.min(last));
            (a <= b).then(|| b - a + 1)
        })
        .sum();
    (last >= first).then(|| (last - first + 1).saturating_sub(taken))
}

#[cfg(test)]
mod tests {
    #[test]
    fn hz_is_one_of_those_that_kernels_are_built_with() {
        assert!([100, 250, 300, 1000].contains(&super::ticks_per_second()));
    }
}
