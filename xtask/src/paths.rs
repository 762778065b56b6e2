//! Where things lie in the work tree.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::{step, tools};

/// The folders and files that the commands share.
pub struct Paths {
    /// The workspace: where the top level `Cargo.toml` lies.
    pub root: PathBuf,
    /// Where cargo puts what it builds for the host. Follows `CARGO_TARGET_DIR` and cargo's configuration.
    host_target: PathBuf,
}

impl Paths {
    /// Finds the workspace and asks cargo for its target directory.
    pub fn find() -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .parent()
            .context("the folder xtask has no parent folder")?
            .to_owned();
        let output = step::cargo()
            .args(["metadata", "--no-deps", "--format-version", "1"])
            .current_dir(&root)
            .stderr(Stdio::inherit())
            .output()
            .context("cannot start cargo")?;
        if !output.status.success() {
            bail!(
                "`cargo metadata` failed in {}: {}",
                root.display(),
                output.status
            );
        }
        let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)
            .context("`cargo metadata` did not print JSON")?;
        let host_target = metadata["target_directory"]
            .as_str()
            .context("`cargo metadata` names no target_directory")?
            .into();
        Ok(Self { root, host_target })
    }

    /// The folder of the eBPF objects. It does not follow `CARGO_TARGET_DIR`, because `agent/build.rs` looks here.
    pub fn bpf(&self) -> PathBuf {
        self.root.join("target/bpf")
    }

    /// The eBPF object that the agent embeds.
    pub fn ebpf_object(&self) -> PathBuf {
        self.bpf().join("tuplewatch-ebpf.o")
    }

    /// The eBPF object with somebody else's programs, which the tests attach before and after ours.
    pub fn foreign_object(&self) -> PathBuf {
        self.bpf().join("tuplewatch-ebpf-foreign.o")
    }

    /// The agent's binary.
    pub fn agent(&self, debug: bool) -> PathBuf {
        self.host_target
            .join(if debug { "debug" } else { "release" })
            .join("tuplewatch")
    }

    /// The fuzz targets' own package.
    pub fn fuzz(&self) -> PathBuf {
        self.root.join("common/fuzz")
    }

    /// Tools that setup installs for this work tree only.
    pub fn tools(&self) -> PathBuf {
        self.root.join("target/tools")
    }

    /// Full output of the steps that print only a summary.
    pub fn log(&self, name: &str) -> PathBuf {
        self.root
            .join("target/xtask-logs")
            .join(format!("{name}.log"))
    }

    /// A cargo that works on the workspace.
    pub fn cargo(&self) -> Command {
        let mut cargo = step::cargo();
        cargo.current_dir(&self.root);
        // build.rs falls back to target/bpf. A value in the environment would make the agent embed another object than
        // the one just built, and a value that only xtask sets would rebuild the agent at each plain `cargo check`.
        cargo.env_remove("TUPLEWATCH_EBPF_OBJECT");
        cargo
    }

    /// A cargo for what runs the agent in the lab: the variables tell where the pieces are.
    pub fn lab_cargo(&self) -> Command {
        let mut cargo = self.cargo();
        cargo
            .env("TUPLEWATCH_BIN", self.agent(false))
            .env("TUPLEWATCH_FOREIGN_OBJECT", self.foreign_object())
            .envs(tools::variables(self));
        cargo
    }
}

/// The first file called `program` in `PATH` or in the folders where system administration tools lie.
pub fn find_program(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from))
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
}
