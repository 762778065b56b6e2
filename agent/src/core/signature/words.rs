//! How findings name places and processes.

use crate::core::{finding::OpenedBy, openers::OpenerRate};

pub use crate::core::observation::place;

/// A process that opens connections, as findings show it, from what it opened within `seconds`.
pub fn opener(rate: &OpenerRate, seconds: f64) -> OpenedBy {
    let total = &rate.total;
    OpenedBy {
        pid: rate.key.pid,
        command: command(&total.command),
        cgroup_id: total.cgroup,
        cgroup: None,
        opens_per_second: rate.opens as f64 / seconds,
        opens: total.opens,
        no_local_port: rate.no_local_port,
        lifetime_seconds: (total.closed > 0)
            .then(|| total.lifetime_ms as f64 / 1000.0 / total.closed as f64),
    }
}

/// A command name as the kernel keeps it: up to the first NUL, odd characters made visible.
pub fn command(bytes: &[u8; 16]) -> String {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end])
        .escape_debug()
        .to_string()
}

/// `1 SYN`, `2 SYNs`.
pub fn count(n: u64, one: &str) -> String {
    if n == 1 {
        format!("1 {one}")
    } else {
        format!("{n} {one}s")
    }
}

/// A number of seconds for people: `80 ms`, `1.2 s`, `3.5 min`.
pub fn seconds(s: f64) -> String {
    if s < 1.0 {
        format!("{:.0} ms", s * 1000.0)
    } else if s < 120.0 {
        format!("{s:.1} s")
    } else {
        format!("{:.1} min", s / 60.0)
    }
}

/// A short time for people: `13 µs`, `2.2 ms`, `1.4 s`.
pub fn short(s: f64) -> String {
    if s < 1e-3 {
        format!("{:.0} µs", s * 1e6)
    } else if s < 1.0 {
        format!("{:.1} ms", s * 1e3)
    } else {
        seconds(s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
        assert_eq!(command(b"curl\0\0\0\0\0\0\0\0\0\0\0\0"), "curl");
        assert_eq!(command(b"abcdefghijklmnop"), "abcdefghijklmnop");
        assert_eq!(command(b"a\x1b[31m\0\0\0\0\0\0\0\0\0\0"), "a\\u{1b}[31m");
        assert_eq!(seconds(0.08), "80 ms");
        assert_eq!(seconds(90.0), "90.0 s");
        assert_eq!(
            (short(13e-6), short(2.187e-3)),
            ("13 µs".into(), "2.2 ms".into())
        );
        assert_eq!(count(1, "SYN"), "1 SYN");
    }
}
