//! The agent's own log, on standard error.

use std::io::{self, IsTerminal as _};

use tracing_subscriber::{EnvFilter, fmt::writer::BoxMakeWriter};

use crate::sink::{otlp::LOG_FILTER, terminal::Messages};

/// Starts it: warnings by default, more with RUST_LOG (`RUST_LOG=tuplewatch=debug`). Where standard
/// error is the terminal that the summary is drawn on, messages go through the screen.
pub fn init(screen: Option<Messages>) {
    let filter = EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| EnvFilter::new(format!("warn,{LOG_FILTER}")));
    let writer = match screen {
        Some(messages) => BoxMakeWriter::new(move || messages.clone()),
        None => BoxMakeWriter::new(io::stderr),
    };
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(writer)
        .with_ansi(io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none())
        .with_target(false)
        .try_init();
}
