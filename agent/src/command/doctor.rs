//! `tuplewatch doctor`: what of the agent works on this host, what does not, and what would help.

use std::{
    env,
    io::{self, Write as _},
};

use clap::Args;

use super::{Failure, flags::ConfigFlags, run::options};
use crate::{
    config::{Config, Problems},
    doctor::{Configuration, Report, examine},
    log,
    sink::terminal::{Screen, checks},
};

/// Options of `doctor`: those of `run`, so that what `run` would use is looked at.
///
/// Exit codes: 0 nothing failed (there may be warnings), 1 something did.
#[derive(Args, Debug)]
pub struct DoctorArgs {
    #[command(flatten)]
    flags: ConfigFlags,
    /// Print one JSON object, as docs/doctor.md describes, instead of lines for people.
    #[arg(long)]
    json: bool,
}

/// Looks and tells; gives the exit code.
///
/// # Errors
/// Standard output cannot be written.
pub fn run(args: &DoctorArgs) -> Result<u8, Failure> {
    let mut configuration = Configuration::default();
    let mut config = Config::default();
    match args.flags.load() {
        Ok(loaded) => {
            configuration.file = loaded.file;
            configuration.warnings = loaded.warnings;
            config = loaded.config;
        }
        Err(failure) => configuration.problems = problems(&failure),
    }
    // What the kernel side would warn of is told by the checks.
    let quiet = env::var_os("RUST_LOG").is_none().then_some("off");
    log::init(None, config.log.as_deref().or(quiet));
    let options = options(&config).or_else(|error| {
        configuration.problems.push(format!("{error:#}"));
        options(&Config::default())
    })?;
    let report = examine(configuration, &config, &options)?;
    match print(&report, args.json) {
        // Whoever reads has seen enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        result => result?,
    }
    Ok(u8::from(!report.is_fine()))
}

/// One line for each thing that is wrong.
fn problems(failure: &Failure) -> Vec<String> {
    match failure.error.downcast_ref::<Problems>() {
        Some(problems) => problems.to_string().lines().map(str::to_owned).collect(),
        None => vec![format!("{:#}", failure.error)],
    }
}

fn print(report: &Report, json: bool) -> io::Result<()> {
    if !json {
        return checks(&Screen::stdout(), report);
    }
    let text = serde_json::to_string_pretty(report)?;
    writeln!(io::stdout(), "{text}")
}
