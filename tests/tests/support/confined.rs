//! The agent with fewer rights than the test has.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;
use tempfile::TempDir;
use tuplewatch_tests::prelude::*;

/// Somebody who owns nothing.
pub const NOBODY: u32 = 65534;

/// The agent where everybody may start it.
pub struct Binary {
    pub path: PathBuf,
    _folder: TempDir,
}

impl Binary {
    /// A copy of the program that the lab starts.
    pub fn new() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
        let path = folder.path().join("tuplewatch");
        fs::copy(AgentConfig::default().binary()?, &path)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        Ok(Self {
            path,
            _folder: folder,
        })
    }

    /// The agent as user `uid` with these capabilities and no way to more.
    pub fn confined(&self, uid: u32, capabilities: &[String]) -> Command {
        let mut set = "-all".to_owned();
        for capability in capabilities {
            set.push_str(",+");
            set.push_str(capability);
        }
        let id = uid.to_string();
        let mut command = Command::new("setpriv");
        command
            .args([
                "--reuid",
                &id,
                "--regid",
                &id,
                "--clear-groups",
                "--no-new-privs",
            ])
            .args(["--inh-caps", &set, "--bounding-set", &set])
            // Root gets its rights at the start of a program by itself.
            .args(["--ambient-caps", if uid == 0 { "-all" } else { &set }])
            .arg(&self.path);
        command
    }
}
