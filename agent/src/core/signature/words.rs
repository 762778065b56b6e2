//! How findings name places and processes.

use std::net::SocketAddr;

use tuplewatch_common::address::PortSpaceKey;

use crate::core::observation::ip;

/// `203.0.113.1 → 203.0.113.10:8080`.
pub fn place(key: &PortSpaceKey) -> String {
    let responder = SocketAddr::new(ip(&key.responder), key.responder_port);
    format!("{} → {responder}", ip(&key.initiator))
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
        assert_eq!(count(1, "SYN"), "1 SYN");
    }
}
