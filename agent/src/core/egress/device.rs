//! What the configuration says of a device in between, and what of it applies to this host.

use std::{net::IpAddr, time::Duration};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::core::profile::{self, OnExhaustion, Profile};

/// An egress group as the configuration gives it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// Its name in findings and metrics.
    pub name: String,
    /// Destinations that are reached through the device.
    pub destinations: Vec<IpNet>,
    /// Destinations among them that are not.
    #[serde(default)]
    pub except: Vec<IpNet>,
    /// The kind of device; see [`crate::core::profile`].
    #[serde(default)]
    pub profile: Option<String>,
    /// Source ports per source address and destination, if not the profile's.
    #[serde(default)]
    pub ports: Option<u32>,
    /// Source addresses, if not the profile's.
    #[serde(default)]
    pub addresses: Option<u32>,
    /// How long a port is kept after close, if not the profile's.
    #[serde(
        default,
        deserialize_with = "profile::optional_duration",
        serialize_with = "profile::show_optional_duration"
    )]
    pub hold: Option<Duration>,
    /// How many hosts share the device: each may count on an equal part. Without it this host's own
    /// connections are compared with the whole.
    #[serde(default)]
    pub hosts: Option<u32>,
    /// The hosts that belong to it; all if empty.
    #[serde(default)]
    pub members: Members,
}

/// Which hosts or initiator addresses belong to a group: one match is enough.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Members {
    /// Zones of hosts.
    #[serde(default)]
    pub zones: Vec<String>,
    /// Initiator addresses.
    #[serde(default)]
    pub subnets: Vec<IpNet>,
    /// Names of hosts; a `*` at the end stands for any rest.
    #[serde(default)]
    pub names: Vec<String>,
}

/// What this host is called, for the membership in groups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// Its zone, if one is configured.
    pub zone: Option<String>,
}

/// A group that this host, or some initiator address on it, belongs to.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// The group's name.
    pub group: String,
    destinations: Vec<IpNet>,
    except: Vec<IpNet>,
    /// Initiator addresses; all if empty.
    subnets: Vec<IpNet>,
    /// Source ports per destination that this host may count on.
    pub budget: u32,
    /// How long a port is kept after close.
    pub hold: Duration,
    /// What becomes of a SYN when no port is left.
    pub on_exhaustion: OnExhaustion,
    /// Other hosts take ports from the same budget and are not seen here.
    pub is_shared: bool,
}

impl Device {
    /// The group as it applies to `host`; `None` if it does not.
    ///
    /// # Errors
    /// Says which group is wrong and what it needs.
    pub(super) fn of(
        group: &Group,
        profiles: &[Profile],
        host: &Host,
    ) -> Result<Option<Self>, String> {
        let name = &group.name;
        let profile = match &group.profile {
            None => None,
            Some(wanted) => Some(profiles.iter().find(|p| p.name == *wanted).ok_or_else(|| {
                let names: Vec<_> = profiles.iter().map(|p| p.name.as_str()).collect();
                format!(
                    "egress group `{name}`: there is no profile `{wanted}`; there are {}",
                    names.join(", ")
                )
            })?),
        };
        if group.destinations.is_empty() {
            return Err(format!(
                "egress group `{name}` has no destinations (0.0.0.0/0 and ::/0 are all)"
            ));
        }
        let needs = |what: &str| {
            format!("egress group `{name}` needs `{what}`, or a `profile` that says it")
        };
        let ports = group
            .ports
            .or(profile.map(|p| p.ports))
            .ok_or_else(|| needs("ports"))?;
        let hold = group
            .hold
            .or(profile.map(|p| p.hold))
            .ok_or_else(|| needs("hold"))?;
        let addresses = group
            .addresses
            .or(profile.map(|p| p.addresses))
            .unwrap_or(1);
        let per_host = profile.is_some_and(|p| p.per_host);
        let hosts = group.hosts.unwrap_or(1);
        if hosts == 0 || addresses == 0 || ports == 0 {
            return Err(format!(
                "egress group `{name}`: `ports`, `addresses` and `hosts` are at least 1"
            ));
        }
        let all = ports.saturating_mul(addresses);
        let members = &group.members;
        let is_named = members
            .names
            .iter()
            .any(|pattern| match pattern.strip_suffix('*') {
                Some(start) => host.name.starts_with(start),
                None => host.name == *pattern,
            });
        let in_zone = host
            .zone
            .as_ref()
            .is_some_and(|zone| members.zones.contains(zone));
        let everybody = *members == Members::default();
        let by_host = everybody || is_named || in_zone;
        if !by_host && members.subnets.is_empty() {
            return Ok(None);
        }
        Ok(Some(Self {
            group: name.clone(),
            destinations: group.destinations.clone(),
            except: group.except.clone(),
            subnets: if by_host {
                Vec::new()
            } else {
                members.subnets.clone()
            },
            budget: if per_host { all } else { (all / hosts).max(1) },
            hold,
            on_exhaustion: profile.map(|p| p.on_exhaustion).unwrap_or_default(),
            is_shared: !per_host && hosts > 1,
        }))
    }

    /// It carries connections between these two.
    pub(super) fn carries(&self, initiator: IpAddr, responder: IpAddr) -> bool {
        let is_in = |nets: &[IpNet], address: &IpAddr| nets.iter().any(|n| n.contains(address));
        is_in(&self.destinations, &responder)
            && !is_in(&self.except, &responder)
            && (self.subnets.is_empty() || is_in(&self.subnets, &initiator))
    }
}
