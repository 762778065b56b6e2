//! `cargo xtask run`: set up, build, and become the agent.

use std::{ffi::OsString, os::unix::process::CommandExt, process::Command};

use anyhow::{Result, bail};

use crate::{
    build, is_root,
    paths::Paths,
    setup::{self, Needs},
    step::{self, say},
};

/// Options of `cargo xtask run`.
#[derive(clap::Args)]
pub struct Args {
    /// Arguments for `tuplewatch run`, for example `-- --help`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

/// Runs the agent. Returns only if that is not possible.
///
/// # Errors
/// If a tool is missing, a build fails, or this is not root.
pub fn command(paths: &Paths, args: &Args) -> Result<()> {
    setup::ensure(paths, Needs::BUILD)?;
    build::build(paths, &build::Args::default())?;
    let mut agent = Command::new(paths.agent(false));
    agent.arg("run").args(&args.arguments);
    // The agent shall see the environment that the person set, not what cargo added to it.
    step::clean(&mut agent);
    if !is_root() {
        bail!(
            "the agent loads eBPF programs, which needs root\n  remedy: it is built, so type\n    sudo {}",
            step::command_line(&agent)
        );
    }
    say!("run: {}", step::command_line(&agent));
    // The agent takes the place of this process, so that signals reach it and its exit code is ours.
    let error = agent.exec();
    bail!("cannot start {}: {error}", paths.agent(false).display())
}
