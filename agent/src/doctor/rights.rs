//! The rights of this process.

use std::fs;

use super::check::{Check, Level};
use crate::source::kernel::PACKET_LOSS;

/// What the process may do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rights {
    /// Effective capabilities, a bit for each (`capabilities(7)`).
    pub capabilities: u64,
    /// Effective user id.
    pub uid: u32,
    /// It is in a user namespace, where capabilities count for what belongs to that only.
    pub in_user_namespace: bool,
}

/// A capability, and what it is for.
struct Capability {
    name: &'static str,
    /// Number in <linux/capability.h>.
    bit: u32,
    /// What it is for.
    purpose: &'static str,
    /// What is lost without it.
    lost: &'static str,
}

const SYS_ADMIN: u32 = 21;
const SYS_PTRACE: u32 = 19;

/// What `deploy/README.md` measured.
const NEEDED: [Capability; 3] = [
    Capability {
        name: "CAP_BPF",
        bit: 39,
        purpose: "making maps and loading programs",
        lost: "no hook can be loaded, the agent ends with exit code 77",
    },
    Capability {
        name: "CAP_PERFMON",
        bit: 38,
        purpose: "programs that read kernel memory",
        lost: "no hook can be loaded: those at sockets read kernel memory, and the one at interfaces moves \
               pointers into packets by what it finds there",
    },
    Capability {
        name: "CAP_NET_ADMIN",
        bit: 12,
        purpose: "programs at interfaces",
        lost: PACKET_LOSS,
    },
];

impl Rights {
    /// Those of this process.
    #[must_use]
    pub fn read() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let effective = status
            .lines()
            .find_map(|line| line.strip_prefix("CapEff:"))
            .and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok());
        let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        Self {
            capabilities: effective.unwrap_or(0),
            uid: rustix::process::geteuid().as_raw(),
            in_user_namespace: !is_initial(&map),
        }
    }

    const fn has(&self, bit: u32) -> bool {
        self.capabilities >> bit & 1 == 1
    }

    /// Whether every right is there that the hooks need.
    #[must_use]
    pub fn suffice(&self) -> bool {
        let has = |c: &Capability| self.has(c.bit) || self.has_instead(c);
        !self.in_user_namespace && NEEDED.iter().all(has)
    }

    /// CAP_SYS_ADMIN stands for what was split off from it in 5.8.
    fn has_instead(&self, capability: &Capability) -> bool {
        capability.name != "CAP_NET_ADMIN" && self.has(SYS_ADMIN)
    }

    /// What is to be said of them.
    #[must_use]
    pub fn judge(&self) -> Vec<Check> {
        let mut checks = vec![self.namespace()];
        checks.extend(NEEDED.iter().map(|c| self.capability(c).of(c.name)));
        let ptrace = if self.has(SYS_PTRACE) {
            "there: counters of other network namespaces can be read"
        } else {
            "not there, and not needed: counters of other network namespaces (listen overflows, \
             conntrack), which only corroborate, are not read"
        };
        checks.push(Check::ok("capability", ptrace).of("CAP_SYS_PTRACE"));
        checks
    }

    fn namespace(&self) -> Check {
        if !self.in_user_namespace {
            return Check::ok("user_namespace", "the host's own");
        }
        Check::bad(
            Level::Fail,
            "user_namespace",
            "the process runs in a user namespace, as in a rootless container",
            "its capabilities do not count for bpf(2): no hook can be loaded",
            "run it outside, or in a container that is not rootless and has no user namespace",
        )
    }

    fn capability(&self, capability: &Capability) -> Check {
        let Capability { name, purpose, .. } = capability;
        if self.has(capability.bit) {
            return Check::ok("capability", format!("there, for {purpose}"));
        }
        if self.has_instead(capability) {
            let found = format!("CAP_SYS_ADMIN is there instead, for {purpose}");
            return Check::ok("capability", found);
        }
        let remedy = if self.uid == 0 {
            format!(
                "give it to the service (deploy/tuplewatch.service: AmbientCapabilities=) or to the \
                 container (securityContext.capabilities.add: {})",
                name.trim_start_matches("CAP_")
            )
        } else {
            format!(
                "run as root (`sudo tuplewatch doctor`), or give {name} to the service \
                 (deploy/tuplewatch.service: AmbientCapabilities=)"
            )
        };
        let found = format!("missing, for {purpose}");
        Check::bad(Level::Fail, "capability", found, capability.lost, remedy)
    }
}

/// The map of user ids of the host's own namespace: all of them, each to itself.
fn is_initial(map: &str) -> bool {
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: u64 = 1 << 39 | 1 << 38 | 1 << 12;

    fn levels(rights: &Rights) -> Vec<(String, Level)> {
        let checks = rights.judge().into_iter();
        checks
            .map(|c| (c.of.unwrap_or_else(|| c.name.to_owned()), c.level))
            .collect()
    }

    fn failed(rights: &Rights) -> Vec<String> {
        let levels = levels(rights).into_iter();
        levels
            .filter(|(_, level)| *level == Level::Fail)
            .map(|(of, _)| of)
            .collect()
    }

    #[test]
    fn the_three_rights_suffice() {
        let mut rights = Rights {
            capabilities: ALL,
            uid: 65_534,
            in_user_namespace: false,
        };
        assert!(rights.suffice());
        assert!(levels(&rights).iter().all(|(_, level)| *level == Level::Ok));
        rights.in_user_namespace = true;
        assert!(!rights.suffice());
        assert_eq!(failed(&rights), ["user_namespace"]);
    }

    #[test]
    fn each_missing_right_is_named_with_its_remedy() {
        for (bit, name) in [(39, "CAP_BPF"), (38, "CAP_PERFMON"), (12, "CAP_NET_ADMIN")] {
            for uid in [0, 1000] {
                let rights = Rights {
                    capabilities: ALL & !(1 << bit),
                    uid,
                    in_user_namespace: false,
                };
                assert_eq!(failed(&rights), [name]);
                let check = rights.judge().into_iter().find(|c| c.level == Level::Fail);
                let check = check.unwrap();
                let remedy = check.remedy.unwrap();
                assert!(remedy.contains("deploy/tuplewatch.service"), "{remedy}");
                assert_eq!(remedy.contains("sudo"), uid != 0);
                assert!(check.lost.is_some());
            }
        }
    }

    #[test]
    fn sys_admin_stands_for_bpf_and_perfmon_only() {
        let rights = Rights {
            capabilities: 1 << 21,
            ..Rights::default()
        };
        assert_eq!(failed(&rights), ["CAP_NET_ADMIN"]);
    }

    #[test]
    fn the_hosts_user_namespace_maps_everybody_to_himself() {
        assert!(is_initial("         0          0 4294967295\n"));
        assert!(!is_initial("         0       1000          1\n"));
        assert!(!is_initial(""));
    }
}
