//! The agent's own log, on standard error.

use std::io::{self, IsTerminal as _};

use tracing_subscriber::EnvFilter;

/// Starts it: warnings by default, more with RUST_LOG (`RUST_LOG=tuplewatch=debug`).
pub fn init() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none())
        .with_target(false)
        .try_init();
}
