//! Networks and ports by which settings pick port spaces.

use std::{fmt, net::IpAddr, str::FromStr};

use ipnet::IpNet;
use tuplewatch_common::address::PortSpaceKey;

use super::observation::ip;

/// A set of addresses: `10.0.0.0/8`, `2001:db8::/32`, or one address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Network(IpNet);

impl Network {
    /// Whether it has this address.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.contains(&address)
    }
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(Self(address.into()));
        }
        let network: IpNet = text
            .parse()
            .map_err(|_| format!("`{text}` is not an address or network like 10.0.0.0/8"))?;
        // A mistake more often than an intention: which of the two was meant cannot be known.
        if network.trunc() != network {
            return Err(format!(
                "`{text}` has bits set beyond its prefix; write {} or {}",
                network.trunc(),
                network.addr()
            ));
        }
        Ok(Self(network))
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.prefix_len() == self.0.max_prefix_len() {
            write!(f, "{}", self.0.addr())
        } else {
            write!(f, "{}", self.0)
        }
    }
}

/// Where connections go: a network, a port, or both: `10.0.0.0/8`, `10.0.0.0/8:443`, `*:443`,
/// `[2001:db8::/32]:443`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Destination {
    network: Option<Network>,
    port: Option<u16>,
}

impl Destination {
    /// Whether the responder of a port space lies in it.
    #[must_use]
    pub fn matches(&self, space: &PortSpaceKey) -> bool {
        self.port.is_none_or(|port| port == space.responder_port)
            && self
                .network
                .is_none_or(|network| network.contains(ip(&space.responder)))
    }
}

impl FromStr for Destination {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (network, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (network, rest) = rest
                    .split_once(']')
                    .ok_or_else(|| format!("`{text}` has no `]`"))?;
                match rest.strip_prefix(':') {
                    Some(port) => (network, Some(port)),
                    None if rest.is_empty() => (network, None),
                    None => return Err(format!("`{text}`: after `]` only `:port` may follow")),
                }
            }
            // An IPv6 network without brackets has more than one colon, and no port.
            None => match text.split_once(':') {
                Some((network, port)) if !port.contains(':') => (network, Some(port)),
                _ => (text, None),
            },
        };
        let network = (network != "*").then(|| network.parse()).transpose()?;
        let port = port
            .map(|port| {
                port.parse::<u16>()
                    .ok()
                    .filter(|port| *port != 0)
                    .ok_or_else(|| format!("`{port}` in `{text}` is not a port (1 to 65535)"))
            })
            .transpose()?;
        Ok(Self { network, port })
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.network, self.port) {
            (None, None) => f.write_str("*"),
            (Some(network), None) => write!(f, "{network}"),
            (None, Some(port)) => write!(f, "*:{port}"),
            (Some(network), Some(port)) if network.0.addr().is_ipv6() => {
                write!(f, "[{network}]:{port}")
            }
            (Some(network), Some(port)) => write!(f, "{network}:{port}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use tuplewatch_common::address::v4_mapped;

    use super::*;

    fn space(responder: IpAddr, port: u16) -> PortSpaceKey {
        PortSpaceKey {
            initiator: [0; 16],
            responder: match responder {
                IpAddr::V4(a) => v4_mapped(a.octets()),
                IpAddr::V6(a) => a.octets(),
            },
            responder_port: port,
            role: 0,
            point: 0,
            netns: 0,
        }
    }

    #[test]
    fn matches_by_network_and_port() {
        let matches = |text: &str, address: &str, port| {
            let destination: Destination = text.parse().unwrap();
            assert_eq!(destination.to_string(), text);
            destination.matches(&space(address.parse().unwrap(), port))
        };
        assert!(matches("10.0.0.0/8", "10.1.2.3", 443));
        assert!(!matches("10.0.0.0/8", "11.1.2.3", 443));
        assert!(matches("10.0.0.0/8:443", "10.1.2.3", 443));
        assert!(!matches("10.0.0.0/8:443", "10.1.2.3", 80));
        assert!(matches("192.0.2.1", "192.0.2.1", 80));
        assert!(matches("*:5432", "192.0.2.1", 5432));
        assert!(matches("2001:db8::/32", "2001:db8::1", 80));
        assert!(matches("[2001:db8::/32]:80", "2001:db8::1", 80));
        assert!(!matches("[2001:db8::/32]:80", "2001:db8::1", 81));
        assert!(!matches("[::/0]:80", "192.0.2.1", 80), "IPv4 is not IPv6");
        assert!(matches("*", "192.0.2.1", 80));
    }

    #[test]
    fn wrong_ones_say_what_is_wrong() {
        let error = |text: &str| text.parse::<Destination>().unwrap_err();
        assert!(error("10.1.0.0/8").contains("10.0.0.0/8"));
        assert!(error("10.0.0.0/33").contains("10.0.0.0/33"));
        assert!(error("10.0.0.0/8:0").contains("port"));
        assert!(error("10.0.0.0/8:https").contains("https"));
        assert!(error("[2001:db8::/32").contains(']'));
        assert!(error("example.org").contains("example.org"));
        assert!(error("").contains("network"));
    }
}
