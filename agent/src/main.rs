//! The binary `tuplewatch`.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tuplewatch::command::{
    self, config::ConfigCommand, doctor::DoctorArgs, replay::ReplayArgs, run::RunArgs,
};
use tuplewatch::source::kernel::guard;

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
    /// Give a capture (pcap or pcapng) the verdict that the live agent would have given.
    Replay(Box<ReplayArgs>),
    /// Say what works on this host, what does not, and what would help.
    Doctor(Box<DoctorArgs>),
    /// Print or check the configuration.
    #[command(subcommand)]
    Config(ConfigCommand),
    /// What `run` starts beside itself where programs at interfaces would outlive it.
    #[command(hide = true)]
    Guard,
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(args) => command::run::run(&args).map(|()| 0),
        Command::Replay(args) => command::replay::run(&args),
        Command::Doctor(args) => command::doctor::run(&args),
        Command::Config(what) => command::config::run(&what).map(|()| 0),
        Command::Guard => guard::stand().map(|()| 0).map_err(Into::into),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("tuplewatch: {:#}", error.error);
            ExitCode::from(error.code)
        }
    }
}
