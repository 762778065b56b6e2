//! Paths of control groups by their inode number.

use std::{collections::HashMap, fs, os::unix::fs::MetadataExt as _, path::Path};

use crate::core::{finding::Finding, report::Change};

/// Control groups by inode. Read anew when one is asked for that is not known.
#[derive(Debug, Default)]
pub struct Cgroups {
    paths: HashMap<u64, String>,
}

/// Where cgroup v2 is mounted, alone or beside v1.
const MOUNTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
/// A host has hundreds of them; something is wrong beyond this.
const MOST: usize = 20_000;

/// Where cgroup v2 is mounted, if it is.
#[must_use]
pub fn mount() -> Option<&'static str> {
    // The unified hierarchy is the one that has this file everywhere.
    let is_unified = |mount: &&str| Path::new(mount).join("cgroup.controllers").exists();
    MOUNTS.into_iter().find(is_unified)
}

impl Cgroups {
    /// Gives the processes of changed findings the paths of their control groups.
    pub fn name(&mut self, changes: &mut [Change]) {
        for change in changes {
            match change {
                Change::Alert(alert) => self.name_finding(&mut alert.finding),
                Change::LookAlike { finding, .. } => self.name_finding(finding),
            }
        }
    }

    /// Gives the processes of these findings the paths that are known, without looking for others.
    pub fn name_known<'a>(&self, findings: impl IntoIterator<Item = &'a mut Finding>) {
        for finding in findings {
            for opener in &mut finding.opened_by {
                opener.cgroup = self.paths.get(&opener.cgroup_id).cloned();
            }
        }
    }

    fn name_finding(&mut self, finding: &mut Finding) {
        for opener in finding.opened_by.iter_mut().filter(|o| o.cgroup_id != 0) {
            if !self.paths.contains_key(&opener.cgroup_id) {
                self.read();
            }
            opener.cgroup = self.paths.get(&opener.cgroup_id).cloned();
        }
    }

    fn read(&mut self) {
        self.paths.clear();
        if let Some(mount) = mount() {
            self.walk(Path::new(mount), "/");
        }
    }

    fn walk(&mut self, directory: &Path, name: &str) {
        if self.paths.len() >= MOST {
            return;
        }
        let Ok(metadata) = fs::metadata(directory) else {
            return;
        };
        self.paths.insert(metadata.ino(), name.to_owned());
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                let child = format!(
                    "{}/{}",
                    name.trim_end_matches('/'),
                    entry.file_name().display()
                );
                self.walk(&entry.path(), &child);
            }
        }
    }
}
