//! `cargo xtask bench`: set up, build, and become the benchmark.

use std::{ffi::OsString, os::unix::process::CommandExt};

use anyhow::{Result, bail};

use crate::{
    as_root, build, is_root,
    paths::Paths,
    setup::{self, Needs},
    step::say,
};

/// Options of `cargo xtask bench`.
#[derive(clap::Args)]
pub struct Args {
    /// Arguments for the benchmark, for example `-- --help`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

/// Runs the benchmark. Returns only if that is not possible.
///
/// # Errors
/// If a tool is missing, a build fails, or this is not root.
pub fn command(paths: &Paths, args: &Args) -> Result<()> {
    if !is_root() {
        bail!(
            "the benchmark loads eBPF programs and makes network namespaces, which needs root\n  remedy: type\n    {}",
            as_root("cargo xtask bench")
        );
    }
    setup::ensure(paths, Needs::BUILD | Needs::LAB | Needs::RIVALS)?;
    build::build(paths, &build::Args::default())?;
    // Both binaries: the benchmark starts the lab's peers.
    let mut peers = paths.lab_cargo();
    peers.args([
        "build",
        "--release",
        "--package",
        "tuplewatch-tests",
        "--bins",
    ]);
    say!("bench: {}", crate::step::command_line(&peers));
    if !peers.status()?.success() {
        bail!("the benchmark does not build; the compiler's messages are above");
    }
    let mut bench = paths.lab_cargo();
    bench
        .args([
            "run",
            "--release",
            "--package",
            "tuplewatch-tests",
            "--bin",
            "bench",
            "--",
        ])
        .args(&args.arguments);
    say!("bench: {}", crate::step::command_line(&bench));
    let error = bench.exec();
    bail!("cannot start cargo: {error}")
}
