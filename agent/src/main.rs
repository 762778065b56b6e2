//! The binary `tuplewatch`.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tuplewatch::command::{self, run::RunArgs};

/// Watches the TCP four-tuples of a Linux host: says when the source ports in front of a destination
/// run out, why, and who spends them.
#[derive(Parser)]
#[command(name = "tuplewatch", version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Watch this host until interrupted.
    Run(Box<RunArgs>),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(args) => command::run::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tuplewatch: {:#}", error.error);
            ExitCode::from(error.code)
        }
    }
}
