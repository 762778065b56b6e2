//! What devices between an initiator and a responder do with source ports.
//!
//! The table is data: the configuration can add to it and replace lines of it. `docs/profiles.md`
//! says where each figure comes from and how sure it is.

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize};

use super::value;

/// One kind of device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Its name in the configuration.
    pub name: String,
    /// Source ports per source address of the device, destination address and destination port.
    pub ports: u32,
    /// Source addresses that the device uses, unless an egress group says otherwise.
    #[serde(default = "one")]
    pub addresses: u32,
    /// The ports are given to each host separately, so that hosts do not take them from each other.
    #[serde(default)]
    pub per_host: bool,
    /// How long a port is kept after its connection was closed.
    #[serde(deserialize_with = "duration", serialize_with = "show_duration")]
    pub hold: Duration,
    /// How long an idle connection is kept; `None` if it is kept for good or not published.
    #[serde(
        default,
        deserialize_with = "optional_duration",
        serialize_with = "show_optional_duration"
    )]
    pub idle_timeout: Option<Duration>,
    /// What becomes of a SYN when no port is left.
    #[serde(default)]
    pub on_exhaustion: OnExhaustion,
    /// Where the figures come from.
    #[serde(default)]
    pub source: String,
}

/// What a device does with a SYN when no port is left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnExhaustion {
    /// It drops the SYN and says nothing.
    #[default]
    Drop,
    /// It hands out a port that is still held: the responder may hold it in TIME_WAIT.
    Reuse,
}

const fn one() -> u32 {
    1
}

/// A line of the built-in table.
struct Line {
    name: &'static str,
    ports: u32,
    addresses: u32,
    per_host: bool,
    hold: u64,
    idle_timeout: Option<u64>,
    on_exhaustion: OnExhaustion,
    source: &'static str,
}

const TABLE: [Line; 10] = [
    Line {
        name: "aws-nat-gateway",
        ports: 55_000,
        addresses: 1,
        per_host: false,
        hold: 60,
        idle_timeout: Some(350),
        on_exhaustion: OnExhaustion::Drop,
        source: "Amazon VPC User Guide, NAT gateways and their CloudWatch metrics: 55,000 simultaneous \
                 connections per address and unique destination; the hold is not published, 60 s is \
                 assumed",
    },
    Line {
        name: "aws-nlb",
        ports: 55_000,
        addresses: 1,
        per_host: false,
        hold: 60,
        idle_timeout: Some(350),
        on_exhaustion: OnExhaustion::Drop,
        source: "Elastic Load Balancing, Network Load Balancers: 55,000 connections at once or a minute \
                 per target, without client address preservation",
    },
    Line {
        name: "azure-load-balancer",
        ports: 1_024,
        addresses: 1,
        per_host: true,
        hold: 65,
        idle_timeout: Some(240),
        on_exhaustion: OnExhaustion::Drop,
        source: "Azure Load Balancer, outbound connections: 1,024 ports by default for each of up to 50 \
                 machines, fewer for larger pools; 4 min idle; hold as Azure NAT Gateway",
    },
    Line {
        name: "azure-app-service",
        ports: 128,
        addresses: 1,
        per_host: true,
        hold: 65,
        idle_timeout: Some(240),
        on_exhaustion: OnExhaustion::Drop,
        source: "Azure App Service, outbound connections: 128 ports preallocated for each instance",
    },
    Line {
        name: "azure-nat-gateway",
        ports: 64_512,
        addresses: 1,
        per_host: false,
        hold: 65,
        idle_timeout: Some(240),
        on_exhaustion: OnExhaustion::Drop,
        source: "Azure NAT Gateway resource: 64,512 ports per address, 65 s after FIN, 16 s after RST",
    },
    Line {
        name: "gcp-cloud-nat",
        ports: 64,
        addresses: 1,
        per_host: true,
        hold: 120,
        idle_timeout: Some(1200),
        on_exhaustion: OnExhaustion::Drop,
        source: "Google Cloud NAT, ports and timeouts: at least 64 ports for each machine, TIME_WAIT 120 s",
    },
    Line {
        name: "gcp-cloud-nat-2026",
        ports: 64,
        addresses: 1,
        per_host: true,
        hold: 30,
        idle_timeout: Some(1200),
        on_exhaustion: OnExhaustion::Drop,
        source: "Google Cloud NAT release note: gateways made since the middle of 2026 hold for 30 s, less \
                 than the TIME_WAIT of a Linux responder",
    },
    Line {
        name: "linux-snat",
        ports: 64_512,
        addresses: 1,
        per_host: false,
        hold: 120,
        idle_timeout: Some(5 * 24 * 3600),
        on_exhaustion: OnExhaustion::Drop,
        source: "Linux net/netfilter/nf_nat_core.c and nf_conntrack_proto_tcp.c: ports 1024-65535 unless \
                 --to-ports; since 6.6 an entry in TIME_WAIT is given up for a newer SYN",
    },
    Line {
        name: "f5-snat",
        ports: 64_512,
        addresses: 1,
        per_host: false,
        hold: 60,
        idle_timeout: Some(300),
        on_exhaustion: OnExhaustion::Drop,
        source: "common settings of BIG-IP SNAT pools, not taken from a document: check yours",
    },
    Line {
        name: "l4-2048-16383",
        ports: 14_336,
        addresses: 1,
        per_host: false,
        hold: 0,
        idle_timeout: None,
        on_exhaustion: OnExhaustion::Reuse,
        source: "a hardware L4 seen in production: ports 2048-16383 for each source address and virtual \
                 server, where 2000-65000 was expected; under pressure it holds nothing after close",
    },
];

/// The built-in profiles.
#[must_use]
pub fn builtin() -> Vec<Profile> {
    TABLE
        .iter()
        .map(|line| Profile {
            name: line.name.to_owned(),
            ports: line.ports,
            addresses: line.addresses,
            per_host: line.per_host,
            hold: Duration::from_secs(line.hold),
            idle_timeout: line.idle_timeout.map(Duration::from_secs),
            on_exhaustion: line.on_exhaustion,
            source: line.source.to_owned(),
        })
        .collect()
}

/// The built-in profiles with those of the configuration, which replace one of the same name.
#[must_use]
pub fn with(own: &[Profile]) -> Vec<Profile> {
    let mut all = builtin();
    for profile in own {
        match all.iter_mut().find(|p| p.name == profile.name) {
            Some(known) => known.clone_from(profile),
            None => all.push(profile.clone()),
        }
    }
    all
}

/// Reads a duration as text (`65s`, `2m`) or as a number of seconds.
pub(super) fn duration<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    optional_duration(from)?.ok_or_else(|| serde::de::Error::custom("a duration is missing"))
}

/// The same where it may be missing.
pub(super) fn optional_duration<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<Duration>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Text {
        Seconds(f64),
        Text(String),
    }
    let text = match Option::<Text>::deserialize(from)? {
        None => return Ok(None),
        Some(Text::Seconds(seconds)) => seconds.to_string(),
        Some(Text::Text(text)) => text,
    };
    value::duration(&text)
        .map(Some)
        .map_err(serde::de::Error::custom)
}

fn show_duration<S: serde::Serializer>(of: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&value::Value::show(of))
}

/// Writes what [`optional_duration`] reads.
pub(super) fn show_optional_duration<S: serde::Serializer>(
    of: &Option<Duration>,
    to: S,
) -> Result<S::Ok, S::Error> {
    match of {
        Some(duration) => show_duration(duration, to),
        None => to.serialize_none(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_adds_and_replaces() {
        let own: Vec<Profile> = serde_json::from_str(
            r#"[{"name": "aws-nat-gateway", "ports": 55000, "addresses": 8, "hold": 90},
                {"name": "branch-office", "ports": 4000, "hold": "2m", "on_exhaustion": "reuse"}]"#,
        )
        .unwrap();
        let all = with(&own);
        assert_eq!(all.len(), builtin().len() + 1);
        let gateway = all.iter().find(|p| p.name == "aws-nat-gateway").unwrap();
        assert_eq!((gateway.addresses, gateway.hold.as_secs()), (8, 90));
        let office = all.last().unwrap();
        assert_eq!((office.addresses, office.hold.as_secs()), (1, 120));
        assert_eq!(office.on_exhaustion, OnExhaustion::Reuse);
        assert_eq!(office.idle_timeout, None);
    }

    #[test]
    fn wrong_profiles_are_refused() {
        for (wrong, why) in [
            (r#"{"name": "x", "ports": 1, "hold": "soon"}"#, "soon"),
            (r#"{"name": "x", "ports": 1}"#, "hold"),
            (
                r#"{"name": "x", "ports": 1, "hold": "1s", "port": 2}"#,
                "port",
            ),
            (r#"{"name": "x", "ports": -1, "hold": "1s"}"#, "-1"),
        ] {
            let error = serde_json::from_str::<Profile>(wrong).unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
        }
    }

    #[test]
    fn a_profile_is_read_as_it_is_shown() {
        for profile in builtin() {
            let text = serde_json::to_string(&profile).unwrap();
            assert_eq!(serde_json::from_str::<Profile>(&text).unwrap(), profile);
        }
    }

    #[test]
    fn every_built_in_profile_is_documented() {
        let page = include_str!("../../../docs/profiles.md");
        for profile in builtin() {
            let line = page
                .lines()
                .find(|line| line.starts_with(&format!("| `{}` ", profile.name)))
                .unwrap_or_else(|| panic!("{} is missing in docs/profiles.md", profile.name));
            for figure in [
                profile.ports.to_string(),
                format!("{} s", profile.hold.as_secs()),
            ] {
                assert!(line.contains(&figure), "{}: {figure}", profile.name);
            }
        }
    }
}
