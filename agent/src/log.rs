//! The agent's own log, on standard error.

use std::io::{self, IsTerminal as _};

use tracing_subscriber::{EnvFilter, fmt::writer::BoxMakeWriter};

use crate::sink::{otlp::LOG_FILTER, terminal::Messages};

/// Starts it with a filter of levels: the one configured, else RUST_LOG (`RUST_LOG=tuplewatch=debug`),
/// else warnings. Where standard error is the terminal that the summary is drawn on, messages go
/// through the screen.
pub fn init(screen: Option<Messages>, filter: Option<&str>) {
    let filter = match filter {
        Some(filter) => EnvFilter::try_new(filter).ok(),
        None => EnvFilter::try_from_default_env().ok(),
    };
    let filter = filter.unwrap_or_else(|| EnvFilter::new(format!("warn,{LOG_FILTER}")));
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
