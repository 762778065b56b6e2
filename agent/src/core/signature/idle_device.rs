//! Which devices forget an idle connection after which time.

use std::time::Duration;

use crate::core::egress::Egress;

/// A device that is known to forget idle connections.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// Its name in a finding.
    pub name: String,
    /// After how long.
    pub timeout: Duration,
    /// It says so: it closes the connection by FIN, and no later segment need be answered by RST.
    pub closes: bool,
}

/// Those that are no matter of source ports, and so have no profile: name, seconds, closes by FIN.
///
/// AWS Global Accelerator: 340 s for TCP. Linux IPVS: `ip_vs_proto_tcp.c`, ESTABLISHED 15 min. AWS ALB: idle
/// time-out 60 s by default. Google's application load balancer: HTTP keep-alive 610 s.
const OTHERS: [(&str, u64, bool); 4] = [
    ("aws-global-accelerator", 340, false),
    ("linux-ipvs", 900, false),
    ("aws-alb", 60, true),
    ("gcp-alb", 610, true),
];

/// All of them: those with a profile, own ones of the configuration included, and others.
pub fn all(egress: &Egress) -> Vec<Device> {
    let profiles = egress.idle_timeouts().iter();
    let profiles = profiles.map(|(name, timeout)| Device {
        name: name.clone(),
        timeout: *timeout,
        closes: false,
    });
    let others = OTHERS.iter().map(|(name, timeout, closes)| Device {
        name: (*name).to_owned(),
        timeout: Duration::from_secs(*timeout),
        closes: *closes,
    });
    profiles.chain(others).collect()
}

/// Names of the devices, nearest first, whose time-out is within a share of `estimate` and lies between
/// the longest idle time that was survived and the shortest that was not.
pub fn near(
    devices: &[Device],
    estimate: Duration,
    tolerance: f64,
    survived: Duration,
    killed: Duration,
) -> Vec<String> {
    let off = |device: &Device| device.timeout.abs_diff(estimate).as_secs_f64();
    let mut fit: Vec<&Device> = devices
        .iter()
        .filter(|device| off(device) <= tolerance * device.timeout.as_secs_f64())
        .filter(|device| survived < device.timeout && device.timeout <= killed)
        .collect();
    fit.sort_by(|a, b| off(a).total_cmp(&off(b)));
    fit.iter().map(|device| device.name.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{egress::Host, profile};

    #[test]
    fn the_step_tells_devices_apart_that_are_near_each_other() {
        let egress = Egress::new(&[], &profile::builtin(), &Host::default()).unwrap();
        let s = Duration::from_secs;
        let of = |survived, killed| {
            near(
                &all(&egress),
                s((survived + killed) / 2),
                0.05,
                s(survived),
                s(killed),
            )
        };
        assert_eq!(of(345, 355), ["aws-nat-gateway", "aws-nlb"]);
        assert_eq!(of(336, 344), ["aws-global-accelerator"]);
        assert_eq!(of(890, 910), ["linux-ipvs"]);
        assert!(of(100, 110).is_empty());
    }
}
