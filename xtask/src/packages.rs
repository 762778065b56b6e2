//! Debian's packages: which are needed for what, and their installation.
//!
//! What is needed is probed by what it gives (a program that runs, a file that is there), not by the package's name: so a
//! machine that has it from elsewhere installs nothing, and a system without apt can still be used.

use std::{path::Path, process::Command};

use anyhow::{Context, Result, bail};

use crate::{
    is_root,
    paths::{Paths, find_program},
    step::{self, say},
};

/// The eBPF compiler and the source of its library.
pub const COMPILER: &[&str] = &["rustc-web", "rust-web-src"];
/// What building bpf-linker needs.
pub const LLVM: &[&str] = &["llvm-22-dev", "libpolly-22-dev", "libzstd-dev"];

/// Something missing that packages bring.
#[derive(Debug)]
pub struct Missing {
    /// What is missing, for people.
    pub what: String,
    /// Debian's packages that bring it.
    pub packages: &'static [&'static str],
}

/// Installs what is missing, if this is Debian and we are root.
///
/// # Errors
/// If it is not possible here: what to type, or which packages to look for.
pub fn install(paths: &Paths, missing: &[Missing]) -> Result<()> {
    if missing.is_empty() {
        return Ok(());
    }
    let mut packages: Vec<&str> = missing
        .iter()
        .flat_map(|missing| missing.packages)
        .copied()
        .collect();
    packages.sort_unstable();
    packages.dedup();
    let packages = packages.join(" ");
    if find_program("apt-get").is_none() {
        bail!(
            "missing: {}\n  remedy: this system has no apt-get; install what Debian calls {packages} with its own package \
             manager and run the command again",
            list(missing)
        );
    }
    if !is_root() {
        bail!(
            "missing: {}\n  remedy: installing packages needs root; type\n    sudo sh -c 'apt-get update && apt-get install \
             --yes --no-install-recommends {packages}'\n  and run the command again",
            list(missing)
        );
    }
    // Another source's failure must not stop us: what counts is whether the packages install.
    if let Err(error) = step::logged(
        "apt-get update",
        &paths.log("apt-update"),
        apt().arg("update"),
    ) {
        say!("  note: {error}");
    }
    step::logged(
        &format!("apt-get install {packages}"),
        &paths.log("apt-install"),
        apt().args(["install", "--yes", "--no-install-recommends"]).args(packages.split(' ')),
    )
    .with_context(|| {
        format!(
            "cannot install: {}\n  remedy: look at the lines above; rustc-web and llvm-22-dev come from Debian 12's \
             security archive (suite bookworm-security), which must be among apt's sources",
            list(missing)
        )
    })
}

/// apt-get that asks nothing and waits for another one that holds the lock.
pub fn apt() -> Command {
    let mut apt = Command::new("apt-get");
    apt.env("DEBIAN_FRONTEND", "noninteractive").args([
        "-o",
        "Dpkg::Use-Pty=0",
        "-o",
        "DPkg::Lock::Timeout=300",
    ]);
    step::clean(&mut apt);
    apt
}

/// What is missing, in one line.
pub fn list(missing: &[Missing]) -> String {
    missing
        .iter()
        .map(|missing| missing.what.as_str())
        .collect::<Vec<_>>()
        .join(", ")
}

/// `Some` if `program` is not there.
pub fn lacks_program(program: &str, packages: &'static [&'static str]) -> Option<Missing> {
    find_program(program).is_none().then(|| Missing {
        what: format!("the program {program}"),
        packages,
    })
}

/// `Some` if the file or folder is not there.
pub fn lacks_file(path: &Path, what: &str, packages: &'static [&'static str]) -> Option<Missing> {
    (!path.exists()).then(|| Missing {
        what: format!("{what} ({})", path.display()),
        packages,
    })
}
