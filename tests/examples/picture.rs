//! Prints what the agent shows on a terminal of 100 columns during the incident: the picture in the
//! README. `cargo run -p tuplewatch-tests --example picture` as root, after `cargo xtask build`.

use std::{process::Command, time::Duration};

use anyhow::Result;
use tuplewatch_tests::prelude::*;

fn main() -> Result<()> {
    let binary =
        std::env::var("TUPLEWATCH_BIN").unwrap_or_else(|_| "target/release/tuplewatch".into());
    let binary = std::fs::canonicalize(binary)?;
    let incident = Incident::new(IncidentConfig::default())?;
    let _server = incident.serve()?;
    let host = &incident.clients[0];
    // `script` gives the agent a terminal.
    let run = format!(
        "stty cols 100 rows 40; exec {} run --netns {} --duration 16s --census-interval 1s",
        binary.display(),
        host.netns_inode()
    );
    let mut command = Command::new("script");
    command.args(["--quiet", "--return", "--command", &run, "/dev/null"]);
    let agent = host.spawn("tuplewatch", command)?;
    std::thread::sleep(Duration::from_secs(3));
    for load in incident.load(20.0, Duration::from_secs(11))? {
        load.wait()?;
    }
    std::thread::sleep(Duration::from_secs(4));
    for line in agent.stdout() {
        println!("{line}");
    }
    Ok(())
}
