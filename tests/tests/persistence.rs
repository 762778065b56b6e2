//! Alerts outlive the agent: after a kill -9 an alert goes on under the same identity, nobody is told of
//! it as new, and it is resolved once the trouble is over.

mod support;

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use support::{SECOND, firing, is_reuse, resolved, watch};
use tempfile::TempDir;
use tuplewatch_tests::prelude::*;

/// Connections per second of each of the two clients.
const RATE: f64 = 20.0;

struct Kept {
    directory: TempDir,
}

impl Kept {
    fn new() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        Ok(Self { directory })
    }

    fn agent(&self, incident: &Incident) -> Result<Agent> {
        let directory = self.directory.path().to_str().context("a path")?;
        watch(
            &incident.server,
            &[
                "--state-dir",
                directory,
                "--set",
                "alert.resolve=8s",
                "--set",
                "alert.repeat=2s",
            ],
        )
    }

    /// The file, once it has an alert: it is written a moment after the alert was told.
    fn wait_alert(&self) -> Result<Value> {
        let path = self.directory.path().join("state.json");
        let end = Instant::now() + 5 * SECOND;
        loop {
            if let Ok(text) = std::fs::read_to_string(&path) {
                let state: Value = serde_json::from_str(&text).context("never a part of a file")?;
                if state["state"]["alerts"][0].is_object() {
                    return Ok(state);
                }
            }
            ensure!(Instant::now() < end, "no alert in {}", path.display());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Every word on alerts must be on this one, and none may be news.
fn goes_on(agent: &Agent, before: &Value) -> Result<()> {
    for alert in agent.alerts()? {
        assert_eq!(alert["id"], before["id"], "{alert}");
        assert_ne!(alert["state"], "pending", "told as new: {alert}");
        assert_eq!(alert["firing_since"], before["firing_since"], "{alert}");
    }
    Ok(())
}

#[test]
fn an_alert_goes_on_after_kill_9_and_is_resolved_under_the_same_id() -> Result<()> {
    let incident = Incident::new(IncidentConfig::default())?;
    let _server = incident.serve()?;
    let kept = Kept::new()?;
    let first = kept.agent(&incident)?;
    let loads = incident.load(RATE, Duration::from_secs(24))?;
    let before = first.wait_alert(40 * SECOND, firing)?;
    let state = kept.wait_alert()?;
    assert_eq!(state["state"]["alerts"][0]["id"], before["id"]);
    first.kill9();

    // The trouble goes on, and the second agent sees it.
    let second = kept.agent(&incident)?;
    let again = second.wait_alert(30 * SECOND, firing)?;
    println!("after kill -9: {}", again["summary"]);
    goes_on(&second, &before)?;
    for load in loads {
        load.wait()?;
    }
    incident.settle(SECOND, 60 * SECOND)?;
    let over = second.wait_alert(60 * SECOND, resolved)?;
    assert_eq!(over["id"], before["id"]);
    assert_eq!(over["firing_since"], before["firing_since"]);
    goes_on(&second, &before)?;
    assert!(second.terminate()?.success());

    // What is over is not told again by a third.
    let third = kept.agent(&incident)?;
    third.expect_no_alert(3 * SECOND, |_| true)?;
    Ok(())
}

#[test]
fn an_alert_whose_trouble_ended_meanwhile_is_resolved_under_the_same_id() -> Result<()> {
    let incident = Incident::new(IncidentConfig::default())?;
    let _server = incident.serve()?;
    let kept = Kept::new()?;
    let first = kept.agent(&incident)?;
    let loads = incident.load(RATE, Duration::from_secs(12))?;
    let before = first.wait_alert(40 * SECOND, firing)?;
    kept.wait_alert()?;
    first.kill9();
    for load in loads {
        load.wait()?;
    }
    incident.settle(SECOND, 60 * SECOND)?;
    let second = kept.agent(&incident)?;
    let started = Instant::now();
    let summary = second.wait_line(20 * SECOND, |line| line["type"] == "summary")?;
    assert_eq!(summary["alerts"][0], before["id"], "it goes on at once");
    let over = second.wait_alert(30 * SECOND, resolved)?;
    println!("resolved {:?} after the restart", started.elapsed());
    assert_eq!(over["id"], before["id"]);
    assert_eq!(over["firing_since"], before["firing_since"]);
    assert_eq!(second.alerts()?.len(), 1, "nothing else was told");
    Ok(())
}

#[test]
fn a_damaged_state_is_kept_aside_and_the_agent_runs() -> Result<()> {
    let incident = Incident::new(IncidentConfig::default())?;
    let kept = Kept::new()?;
    let path = kept.directory.path().join("state.json");
    std::fs::write(
        &path,
        b"{\"format\": \"tuplewatch-state\", \"version\": 1, \"st",
    )?;
    let agent = kept.agent(&incident)?;
    agent.expect_no_alert(SECOND, is_reuse)?;
    assert!(kept.directory.path().join("state.json.bad").exists());
    let warned = agent.stderr();
    assert!(
        warned
            .iter()
            .any(|l| l.contains("it is damaged") && l.contains("state.json.bad")),
        "{warned:?}"
    );
    Ok(())
}

#[test]
fn a_second_agent_does_not_take_the_state() -> Result<()> {
    let incident = Incident::new(IncidentConfig::default())?;
    let kept = Kept::new()?;
    let _first = kept.agent(&incident)?;
    let second = kept.agent(&incident)?;
    let warned = second.stderr();
    assert!(
        warned
            .iter()
            .any(|l| l.contains("another tuplewatch keeps its state")),
        "{warned:?}"
    );
    assert!(second.process().is_running());
    Ok(())
}
