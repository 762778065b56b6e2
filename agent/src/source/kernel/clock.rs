//! Ticks of the kernel.

use std::fs;

use crate::{clocks::clock_ns, core::surroundings::LocalPorts};

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
    clock_ns(rustix::time::ClockId::Monotonic).cast_unsigned()
}

/// Source ports of the network namespace that the agent runs in.
#[must_use]
pub fn local_ports() -> Option<LocalPorts> {
    let text = |name: &str| fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).ok();
    let number = |name: &str| text(name)?.trim().parse::<u32>().ok();
    let range = text("ip_local_port_range")?;
    let mut ends = range
        .split_whitespace()
        .filter_map(|n| n.parse::<u16>().ok());
    let (first, last) = (ends.next()?, ends.next()?);
    let reserved = text("ip_local_reserved_ports").unwrap_or_default();
    Some(LocalPorts {
        first,
        last,
        reserved: overlap(&reserved, first, last),
        tw_reuse: number("tcp_tw_reuse").map_or(0, |n| n as u8),
        tw_reuse_delay_ms: number("tcp_tw_reuse_delay").unwrap_or(1000),
        timestamps: number("tcp_timestamps").is_none_or(|n| n != 0),
    })
}

/// How many ports of a list like `2000-2010,3000` lie in the range.
fn overlap(list: &str, first: u16, last: u16) -> u32 {
    list.trim()
        .split(',')
        .filter_map(|part| {
            let (a, b) = part.split_once('-').unwrap_or((part, part));
            let (a, b) = (a.trim().parse::<u16>().ok()?, b.trim().parse::<u16>().ok()?);
            let (a, b) = (a.max(first), b.min(last));
            (a <= b).then(|| u32::from(b - a) + 1)
        })
        .sum()
}

#[cfg(test)]
mod tests {
    #[test]
    fn reserved_ports_count_within_the_range() {
        assert_eq!(super::overlap("", 2000, 2063), 0);
        assert_eq!(super::overlap("1990-2003,2010,3000-4000\n", 2000, 2063), 5);
    }

    #[test]
    fn hz_is_one_of_those_that_kernels_are_built_with() {
        assert!([100, 250, 300, 1000].contains(&super::ticks_per_second()));
    }
}
