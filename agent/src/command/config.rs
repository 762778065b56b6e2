//! `tuplewatch config`: a file with every default, what is wrong with one, and what is in effect.

use std::{
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use clap::Subcommand;

use super::{
    Failure,
    flags::{ConfigFlags, wrong},
};
use crate::config::{DEFAULT_FILE, check_file, default_file};

/// What to do with the configuration.
#[derive(Subcommand, Debug)]
pub enum ConfigCommand {
    /// Print a configuration file with every setting, its meaning and its default.
    Default,
    /// Say what is wrong with a configuration file: each problem with line and column, exit code 78; or
    /// ok.
    Check {
        /// The file.
        #[arg(default_value = DEFAULT_FILE)]
        file: PathBuf,
    },
    /// Print the configuration in effect, of file, environment and the flags of `run`, and where each
    /// value comes from. Secrets are masked.
    Show(Box<ConfigFlags>),
}

/// Does it.
///
/// # Errors
/// The configuration is wrong (exit code 78), or standard output cannot be written.
pub fn run(command: &ConfigCommand) -> Result<(), Failure> {
    match command {
        ConfigCommand::Default => print(&default_file()),
        ConfigCommand::Check { file } => check(file),
        ConfigCommand::Show(flags) => print(&flags.load()?.show()),
    }
}

fn check(file: &Path) -> Result<(), Failure> {
    check_file(file).map_err(wrong)?;
    print(&format!("{}: ok\n", file.display()))
}

fn print(text: &str) -> Result<(), Failure> {
    match io::stdout().write_all(text.as_bytes()) {
        // Whoever reads has seen enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => Ok(result?),
    }
}
