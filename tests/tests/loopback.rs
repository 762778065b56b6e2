//! Loopback, where every packet passes the interface twice.

use std::time::Duration;

use anyhow::Result;
use tuplewatch_tests::prelude::*;

/// Asked for by its name, it is watched, and every connection counts once.
#[test]
fn counts_once() -> Result<()> {
    let lab = Lab::new()?;
    let host = lab.host("host")?;
    let address = "127.0.0.1:8080".parse()?;
    let _server = host.serve(&ServeConfig::new(address))?;
    let netns = host.netns_inode().to_string();
    let args = [
        "--interface",
        "lo",
        "--netns",
        &netns,
        "--summary-interval",
        "1s",
    ];
    let agent = host.agent(AgentConfig::with_args(args))?;
    agent.wait_ready(Duration::from_secs(60))?;
    let load = host.load(&LoadConfig {
        count: Some(100),
        rate: 50.0,
        ..LoadConfig::new(address)
    })?;
    let report = load.wait()?;
    assert_eq!(report.ok, 100);
    let wire = |line: &serde_json::Value| {
        let spaces = line["spaces"].as_array().cloned().unwrap_or_default();
        spaces
            .into_iter()
            .find(|s| s["point"] == "wire" && s["server.port"] == 8080)
    };
    let line = agent.wait_line(Duration::from_secs(20), |line| {
        wire(line).is_some_and(|space| space["totals"]["established"] == 100)
    })?;
    let totals = &wire(&line).expect("found before")["totals"];
    assert_eq!(totals["opens"], 100);
    assert_eq!(totals["syn_retransmits"], 0);
    Ok(())
}
