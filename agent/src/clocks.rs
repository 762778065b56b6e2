//! The host's clocks, as the kernel side reads them.

use std::{fs, sync::OnceLock};

use rustix::time::{ClockId, clock_gettime};

/// What a time namespace adds to the clocks of its processes (`time_namespaces(7)`, 5.6), in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct TimeNamespace {
    monotonic: i64,
    boottime: i64,
}

impl TimeNamespace {
    /// That of this process, which stays what it is.
    fn own() -> Self {
        static OWN: OnceLock<TimeNamespace> = OnceLock::new();
        *OWN.get_or_init(|| {
            let text = fs::read_to_string("/proc/self/timens_offsets");
            Self::read(&text.unwrap_or_default())
        })
    }

    /// Lines of a clock's name, seconds and nanoseconds.
    fn read(text: &str) -> Self {
        let mut own = Self::default();
        for line in text.lines() {
            let mut words = line.split_whitespace();
            let name = words.next();
            let mut number = || words.next().and_then(|word| word.parse::<i64>().ok());
            let (Some(seconds), Some(nanoseconds)) = (number(), number()) else {
                continue;
            };
            let offset = seconds * 1_000_000_000 + nanoseconds;
            match name {
                Some("monotonic") => own.monotonic = offset,
                Some("boottime") => own.boottime = offset,
                _ => {}
            }
        }
        own
    }
}

/// What a clock of the host shows, in nanoseconds, whatever time namespace this process is in: eBPF programs are in
/// none, and the two must agree.
#[must_use]
pub fn clock_ns(id: ClockId) -> i64 {
    let now = clock_gettime(id);
    let offset = match id {
        ClockId::Monotonic => TimeNamespace::own().monotonic,
        ClockId::Boottime => TimeNamespace::own().boottime,
        _ => 0,
    };
    now.tv_sec * 1_000_000_000 + now.tv_nsec - offset
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_are_read_by_name() {
        let text = "monotonic      100000         5\nboottime           -7         0\n";
        let own = TimeNamespace::read(text);
        assert_eq!(own.monotonic, 100_000_000_000_005);
        assert_eq!(own.boottime, -7_000_000_000);
        assert_eq!(
            TimeNamespace::read("monotonic 5\nx 1 2\n"),
            TimeNamespace::default()
        );
    }
}
