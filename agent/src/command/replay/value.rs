//! Values of the options.

use std::{
    net::{IpAddr, SocketAddr},
    time::{Duration, UNIX_EPOCH},
};

use crate::{
    core::{observation::address, threshold::Thresholds, value::duration},
    source::capture::file::EndFilter,
};

/// A moment of a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Time {
    /// Nanoseconds since the Unix epoch.
    At(u64),
    /// After the first packet.
    After(Duration),
}

impl Time {
    /// The moment in nanoseconds since the Unix epoch, for a capture that begins at `start_ns`.
    pub(super) fn after(self, start_ns: u64) -> u64 {
        match self {
            Self::At(ns) => ns,
            Self::After(time) => {
                start_ns.saturating_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
            }
        }
    }
}

pub(super) fn parse_time(text: &str) -> Result<Time, String> {
    if let Ok(time) = duration(text) {
        return Ok(Time::After(time));
    }
    let time = humantime::parse_rfc3339_weak(text).map_err(|_| {
        "it must be like 2026-11-30T01:02:03Z (UTC), or a time such as 90s".to_owned()
    })?;
    let since = time.duration_since(UNIX_EPOCH);
    let since = since.map_err(|_| "it lies before 1970".to_owned())?;
    Ok(Time::At(
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX),
    ))
}

pub(super) fn parse_end(text: &str) -> Result<EndFilter, String> {
    let end = |host: Option<IpAddr>, port| {
        Ok(EndFilter {
            host: host.map(address),
            port,
        })
    };
    if let Ok(host) = text.parse() {
        return end(Some(host), None);
    }
    if let Ok(both) = text.parse::<SocketAddr>() {
        return end(Some(both.ip()), Some(both.port()));
    }
    if let Some(Ok(port)) = text.strip_prefix(':').map(str::parse) {
        return end(None, Some(port));
    }
    if let Some(inner) = text.strip_prefix('[').and_then(|t| t.strip_suffix(']'))
        && let Ok(host) = inner.parse()
    {
        return end(Some(host), None);
    }
    Err("it must be like 10.0.0.1, 10.0.0.1:443, [2001:db8::1]:443 or :443".to_owned())
}

pub(super) fn parse_local(text: &str) -> Result<IpAddr, String> {
    text.parse()
        .map_err(|_| "it must be an address like 10.0.0.1 or 2001:db8::1".to_owned())
}

pub(super) fn parse_setting(text: &str) -> Result<String, String> {
    Thresholds::default().set(text).map(|()| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        let start = 1_000_000_000;
        assert_eq!(parse_time("90s").unwrap().after(start), 91_000_000_000);
        let at = parse_time("1970-01-01T00:00:02.5Z").unwrap();
        assert_eq!(at.after(start), 2_500_000_000);
        parse_time("yesterday").unwrap_err();
    }

    #[test]
    fn ends() {
        let host = |text: &str| Some(address(text.parse().unwrap()));
        let end = |text| parse_end(text).map(|e| (e.host, e.port));
        assert_eq!(end("10.0.0.1"), Ok((host("10.0.0.1"), None)));
        assert_eq!(end("10.0.0.1:443"), Ok((host("10.0.0.1"), Some(443))));
        assert_eq!(end("2001:db8::1"), Ok((host("2001:db8::1"), None)));
        assert_eq!(end("[2001:db8::1]"), Ok((host("2001:db8::1"), None)));
        assert_eq!(end("[2001:db8::1]:80"), Ok((host("2001:db8::1"), Some(80))));
        assert_eq!(end(":443"), Ok((None, Some(443))));
        for wrong in ["", "443", "host", ":", ":70000", "10.0.0.1:x"] {
            parse_end(wrong).unwrap_err();
        }
    }
}
