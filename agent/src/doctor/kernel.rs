//! The kernel that runs, and what it lets programs read.

use std::{fs, os::unix::fs::MetadataExt as _};

use super::check::{Check, Level};
use crate::{
    enrich::cgroup,
    kernel_facts::{Layout, Types, VMLINUX},
    source::kernel::cgroup_limit,
};

/// Facts that do not depend on rights.
#[derive(Clone, Debug, Default)]
pub struct Kernel {
    /// As `uname -r` prints it.
    pub release: String,
    /// Facts that its type information lacks, or why it cannot be read.
    pub btf: Option<Result<Vec<String>, String>>,
    /// Content of `/sys/kernel/security/lockdown`; `None` if it cannot be read.
    pub lockdown: Option<String>,
    /// Where cgroup v2 is mounted.
    pub cgroups: Option<String>,
    /// What is mounted there is a part of the control groups only.
    pub is_part: bool,
    /// Bytes that the process's control groups may take.
    pub memory_limit: Option<u64>,
}

/// Inode number of the group that holds all others (`kernfs_root`); in a cgroup namespace the root of the
/// mount is another one.
const ROOT_GROUP: u64 = 1;
/// What the process needs beside the maps (docs/performance.md), with room for a busy host.
const BESIDE_MAPS: u64 = 64 << 20;

impl Kernel {
    /// Those of this host. Takes a fifth of a second: types are resolved.
    #[must_use]
    pub fn read() -> Self {
        let types = Types::load(VMLINUX);
        let btf = types
            .map(|types| {
                let missing = Layout::resolve(&types).missing;
                missing.iter().map(ToString::to_string).collect()
            })
            .map_err(|error| error.to_string());
        let mount = cgroup::mount();
        let root = mount.and_then(|mount| fs::metadata(mount).ok());
        Self {
            release: rustix::system::uname()
                .release()
                .to_string_lossy()
                .into_owned(),
            btf: Some(btf),
            lockdown: fs::read_to_string("/sys/kernel/security/lockdown").ok(),
            cgroups: mount.map(str::to_owned),
            is_part: root.is_some_and(|root| root.ino() != ROOT_GROUP),
            // cgroup v1 says a very large number for no limit.
            memory_limit: cgroup_limit().filter(|limit| *limit < 1 << 50),
        }
    }

    /// What is to be said of them. `maps` are the bytes that the maps took, 0 if there were none.
    #[must_use]
    pub fn judge(&self, maps: u64) -> Vec<Check> {
        let mut checks = vec![self.release(), self.lockdown(), self.cgroup()];
        checks.extend(self.btf());
        checks.extend(self.memory(maps));
        checks
    }

    fn release(&self) -> Check {
        let mut numbers = self.release.split(['.', '-']).map_while(|n| n.parse().ok());
        let version: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        if version >= (5, 8) || version == (0, 0) {
            return Check::ok("kernel", format!("Linux {}", self.release));
        }
        Check::bad(
            Level::Warn,
            "kernel",
            format!(
                "Linux {}, older than any the agent was made for",
                self.release
            ),
            "CAP_BPF, CAP_PERFMON and ring buffers came with 5.8; distributions may have added them",
            "the checks of the hooks say what works; a kernel from 5.10 on is meant",
        )
    }

    fn btf(&self) -> Option<Check> {
        Some(match self.btf.as_ref()? {
            Ok(missing) if missing.is_empty() => Check::ok(
                "btf",
                format!("{VMLINUX} has every fact that the hooks read"),
            ),
            Ok(missing) => Check::bad(
                Level::Warn,
                "btf",
                format!("{VMLINUX} lacks {} facts", missing.len()),
                missing.join("; "),
                "another kernel; please report this one",
            ),
            Err(error) => Check::bad(
                Level::Fail,
                "btf",
                error,
                "without BTF nothing is known of sockets and processes",
                "a kernel with CONFIG_DEBUG_INFO_BTF, and /sys where the agent can see it",
            ),
        })
    }

    fn lockdown(&self) -> Check {
        let Some(text) = &self.lockdown else {
            let found = "not known: /sys/kernel/security cannot be read; the hooks tell";
            return Check::ok("lockdown", found);
        };
        // `none [integrity] confidentiality`
        let chosen = text.split('[').nth(1).and_then(|t| t.split(']').next());
        match chosen {
            Some("confidentiality") => Check::bad(
                Level::Fail,
                "lockdown",
                "confidentiality: programs may not read kernel memory",
                "nothing is known of sockets and processes",
                "boot with lockdown=integrity (or without), if that is allowed here",
            ),
            chosen => Check::ok("lockdown", chosen.unwrap_or("none").to_owned()),
        }
    }

    fn cgroup(&self) -> Check {
        let lost = "processes are told without their control group, which names the pod or service";
        match &self.cgroups {
            None => Check::bad(
                Level::Warn,
                "cgroup",
                "cgroup v2 is not mounted at /sys/fs/cgroup or /sys/fs/cgroup/unified",
                lost,
                "mount it; in a container: the host's /sys/fs/cgroup, read-only",
            ),
            Some(mount) if self.is_part => Check::bad(
                Level::Warn,
                "cgroup",
                format!("{mount} shows the control groups of this container only"),
                "processes of others are told without their control group",
                "mount the host's /sys/fs/cgroup, read-only, as deploy/kubernetes/daemonset.yaml does",
            ),
            Some(mount) => Check::ok("cgroup", format!("cgroup v2 at {mount}")),
        }
    }

    fn memory(&self, maps: u64) -> Option<Check> {
        if maps == 0 {
            return None;
        }
        let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
        Some(match self.memory_limit {
            Some(limit) if limit < maps + BESIDE_MAPS => Check::bad(
                Level::Warn,
                "memory",
                format!(
                    "the maps take {}, the control group may take {}",
                    mib(maps),
                    mib(limit)
                ),
                "the kernel may kill the agent under load",
                "raise the limit (deploy/ has 256 MiB), or lower `map_memory`",
            ),
            limit => {
                let limit = limit.map_or("is not limited".to_owned(), |limit| {
                    format!("may take {}", mib(limit))
                });
                let maps = mib(maps);
                Check::ok(
                    "memory",
                    format!("the maps take {maps}, the control group {limit}"),
                )
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel() -> Kernel {
        Kernel {
            release: "6.18.44-fc".to_owned(),
            btf: Some(Ok(Vec::new())),
            lockdown: Some("none [integrity] confidentiality\n".to_owned()),
            cgroups: Some("/sys/fs/cgroup".to_owned()),
            is_part: false,
            memory_limit: Some(256 << 20),
        }
    }

    fn level(kernel: &Kernel, name: &str) -> Level {
        let check = kernel.judge(24 << 20).into_iter().find(|c| c.name == name);
        let check = check.unwrap();
        assert_eq!(
            check.level == Level::Ok,
            check.remedy.is_none(),
            "{check:?}"
        );
        check.level
    }

    #[test]
    fn a_good_kernel_is_fine() {
        let checks = kernel().judge(24 << 20);
        assert!(checks.iter().all(|c| c.level == Level::Ok), "{checks:?}");
        let unknown = Kernel {
            lockdown: None,
            memory_limit: None,
            ..kernel()
        };
        let checks = unknown.judge(24 << 20);
        assert!(checks.iter().all(|c| c.level == Level::Ok), "{checks:?}");
        assert!(kernel().judge(0).iter().all(|c| c.name != "memory"));
    }

    #[test]
    fn old_kernels_are_warned_of() {
        for (release, expected) in [
            ("5.4.0-216-generic", Level::Warn),
            ("4.18.0-553.el8", Level::Warn),
            ("5.8", Level::Ok),
            ("5.10.223", Level::Ok),
            ("6.1-rc3", Level::Ok),
            ("strange", Level::Ok),
        ] {
            let release = release.to_owned();
            let kernel = Kernel {
                release,
                ..kernel()
            };
            assert_eq!(level(&kernel, "kernel"), expected, "{}", kernel.release);
        }
    }

    #[test]
    fn types_that_cannot_be_read_fail_and_missing_ones_warn() {
        let with = |btf| Kernel {
            btf: Some(btf),
            ..kernel()
        };
        assert_eq!(level(&with(Err("no".to_owned())), "btf"), Level::Fail);
        let missing = vec!["lifecycle tells less".to_owned()];
        assert_eq!(level(&with(Ok(missing)), "btf"), Level::Warn);
    }

    #[test]
    fn confidentiality_fails() {
        let with = |text: &str| Kernel {
            lockdown: Some(text.to_owned()),
            ..kernel()
        };
        let strict = with("none integrity [confidentiality]\n");
        assert_eq!(level(&strict, "lockdown"), Level::Fail);
        assert_eq!(level(&with("[none] integrity"), "lockdown"), Level::Ok);
    }

    #[test]
    fn little_memory_and_hidden_groups_are_warned_of() {
        let small = Kernel {
            memory_limit: Some(64 << 20),
            ..kernel()
        };
        assert_eq!(level(&small, "memory"), Level::Warn);
        let hidden = Kernel {
            is_part: true,
            ..kernel()
        };
        assert_eq!(level(&hidden, "cgroup"), Level::Warn);
        let none = Kernel {
            cgroups: None,
            ..kernel()
        };
        assert_eq!(level(&none, "cgroup"), Level::Warn);
    }
}
