//! Everything a person types to work on tuplewatch: `cargo xtask setup | build | run | test | vm | bench`.
//!
//! Each command is one file. They share [`paths`] (where things lie), [`step`] (starting other programs and saying what
//! happens) and [`toolchain`] (which compiler makes the eBPF objects).

mod again;
mod bench;
mod bpf_linker;
mod build;
mod outcome;
mod packages;
mod paths;
mod run;
mod setup;
mod step;
mod test;
mod toolchain;
mod tools;
mod vm;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::{paths::Paths, setup::Needs};

/// Work on tuplewatch: set up, build, run, test, measure.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Install what building and testing need and this machine lacks
    Setup(setup::Args),
    /// Build the eBPF objects and the agent that embeds them
    Build(build::Args),
    /// Set up, build, and run the agent (as root)
    Run(run::Args),
    /// Set up, build, and run every check and test
    Test(test::Args),
    /// Set up, build, and run the agent's tests in virtual machines with other kernels
    Vm(vm::Args),
    /// Set up, build, and measure the agent's cost
    Bench(bench::Args),
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            report(&error);
            ExitCode::FAILURE
        }
    }
}

/// Runs a command and returns whether what it checked is in order. What kept it from checking is an error.
fn run(command: Command) -> Result<bool> {
    let paths = Paths::find()?;
    match command {
        Command::Setup(args) => setup::command(&paths, &args)?,
        Command::Build(args) => {
            setup::ensure(&paths, Needs::BUILD)?;
            build::build(&paths, &args)?;
        }
        Command::Run(args) => run::command(&paths, &args)?,
        Command::Test(args) => return test::command(&paths, &args),
        Command::Vm(args) => return vm::command(&paths, &args),
        Command::Bench(args) => bench::command(&paths, &args)?,
    }
    Ok(true)
}

/// Prints an error and its causes the way a compiler does. Backtraces say nothing here, so `{error:?}` is not used.
fn report(error: &anyhow::Error) {
    eprintln!("error: {error}");
    for cause in error.chain().skip(1) {
        eprintln!("  because: {cause}");
    }
}

/// Whether this process may do what only root may do.
fn is_root() -> bool {
    // SAFETY: geteuid has no arguments, touches no memory of ours and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// The command line that repeats `command` as root with the caller's Rust toolchain.
fn as_root(command: &str) -> String {
    format!("sudo env \"PATH=$PATH\" \"HOME=$HOME\" {command}")
}
