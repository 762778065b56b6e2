//! What the agent costs, as differences and ratios taken in one run: `cargo xtask bench`.

use anyhow::Result;
use clap::Parser;
use tuplewatch_tests::bench::{self, Options};

/// Measures the packet hook against an empty program, and a host with the agent against one without.
#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    options: Options,
}

fn main() -> Result<()> {
    bench::run(&Cli::parse().options)
}
