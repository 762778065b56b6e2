//! The source ports of the network namespace, and how long a closed connection keeps one.

use super::check::{Check, Level};
use crate::core::surroundings::LocalPorts;

/// TIME_WAIT (`TCP_TIMEWAIT_LEN`).
const HELD_SECONDS: f64 = 60.0;
/// The default range has 28,232; a host with fewer than this was narrowed by somebody.
const FEW: u32 = 10_000;

/// What is to be said of them; `None` where they cannot be read.
#[must_use]
pub fn judge(ports: Option<&LocalPorts>) -> Check {
    const NAME: &str = "local_ports";
    let Some(ports) = ports else {
        let lost = "the budget of connections that this host opens is not known";
        let remedy = "/proc/sys/net must be readable";
        let found = "net.ipv4.ip_local_port_range cannot be read";
        return Check::bad(Level::Warn, NAME, found, lost, remedy);
    };
    let budget = ports.budget();
    let reserved = match ports.reserved {
        0 => String::new(),
        n => format!(" less {n} reserved"),
    };
    let reused = ports.tw_reuse == 1 && ports.timestamps;
    let held = if reused {
        f64::from(ports.tw_reuse_delay_ms) / 1000.0
    } else {
        HELD_SECONDS
    };
    let reuse = match ports.tw_reuse {
        0 => "off",
        1 => "on",
        _ => "on for loopback only",
    };
    // A delay of 0 is no rate.
    let rate = f64::from(budget) / held.max(0.001);
    let found = format!(
        "{}-{}{reserved}: {budget} ports to one destination; a port whose connection this host closed \
         first is held for {held} s (tcp_tw_reuse is {reuse}), so more than {rate:.0} such connections \
         per second run out of them",
        ports.first, ports.last
    );
    if budget < FEW {
        let lost = format!("{budget} connections to one destination at a time, no more");
        let remedy =
            "widen net.ipv4.ip_local_port_range (1024 65535 is the widest), or reserve less";
        return Check::bad(Level::Warn, NAME, found, lost, remedy);
    }
    if ports.tw_reuse != 0 && !ports.timestamps {
        let lost = "tcp_tw_reuse has no effect: without timestamps no TIME_WAIT is reused";
        let remedy = "net.ipv4.tcp_timestamps = 1";
        return Check::bad(Level::Warn, NAME, found, lost, remedy);
    }
    Check::ok(NAME, found)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFAULT: LocalPorts = LocalPorts {
        first: 32_768,
        last: 60_999,
        reserved: 0,
        tw_reuse: 2,
        tw_reuse_delay_ms: 1000,
        timestamps: true,
    };

    #[test]
    fn the_rate_follows_from_range_and_hold_time() {
        let check = judge(Some(&DEFAULT));
        assert_eq!(check.level, Level::Ok);
        for part in [
            "32768-60999: 28232 ports",
            "for 60 s",
            "than 471 such",
            "loopback only",
        ] {
            assert!(check.found.contains(part), "{part}: {}", check.found);
        }
        let reused = LocalPorts {
            tw_reuse: 1,
            reserved: 232,
            ..DEFAULT
        };
        let check = judge(Some(&reused));
        assert_eq!(check.level, Level::Ok);
        for part in [
            "less 232 reserved: 28000 ports",
            "for 1 s",
            "than 28000 such",
        ] {
            assert!(check.found.contains(part), "{part}: {}", check.found);
        }
    }

    #[test]
    fn few_ports_and_reuse_without_timestamps_are_warned_of() {
        let few = LocalPorts {
            last: 32_967,
            ..DEFAULT
        };
        assert_eq!(judge(Some(&few)).level, Level::Warn);
        let useless = LocalPorts {
            timestamps: false,
            ..DEFAULT
        };
        let check = judge(Some(&useless));
        assert_eq!(check.level, Level::Warn);
        assert!(check.found.contains("for 60 s"));
        let off = LocalPorts {
            tw_reuse: 0,
            timestamps: false,
            ..DEFAULT
        };
        assert_eq!(judge(Some(&off)).level, Level::Ok);
        assert_eq!(judge(None).level, Level::Warn);
    }
}
