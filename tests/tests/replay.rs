//! One incident, watched live and recorded at the same interface: the recording must get the verdict
//! that the live agent gave, with the same numbers.

mod support;

use std::{
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use support::{SECOND, fresh, total, watch};
use tuplewatch_tests::{patience, prelude::*};

/// Connections per second of each of the two clients.
const RATE: f64 = 20.0;
/// Long enough for the pool of 200 ports to be handed out twice.
const TIME: Duration = Duration::from_secs(12);

/// Counters of a port space that a capture has too: all but those of sockets.
const COUNTERS: [&str; 18] = [
    "opens",
    "established",
    "refused",
    "syn_timeouts",
    "abandoned",
    "half_open",
    "syn_retransmits",
    "bare_acks",
    "bare_acks_closed",
    "bare_acks_open",
    "bare_acks_half_open",
    "bare_acks_unknown",
    "duplicate_syns",
    "no_listener",
    "rsts_after_bare_ack",
    "healed",
    "unhealed",
    "reuse_accepted",
];

/// What of an alert's evidence depends neither on sockets nor on where in a second the looks fall (an
/// episode begins with the look before its first symptom, and so do the opens in it).
const EVIDENCE: [&str; 11] = [
    "refused_syns",
    "refused_after_close",
    "refused_while_open",
    "refused_half_open",
    "refused_unknown",
    "rsts",
    "syn_retransmits",
    "healed",
    "unhealed",
    "refused_ports",
    "ports_seen",
];

fn parts(value: &Value, names: &[&str]) -> Vec<(String, Value)> {
    names
        .iter()
        .map(|name| ((*name).to_owned(), value[*name].clone()))
        .collect()
}

/// The port spaces seen on the wire: address, role and counters.
fn spaces(summary: &Value) -> Result<Vec<Vec<(String, Value)>>> {
    let spaces = summary["spaces"].as_array().context("spaces")?;
    let mut all: Vec<_> = spaces
        .iter()
        .filter(|space| space["point"] == "wire")
        .map(|space| {
            let mut one = parts(
                space,
                &["client.address", "server.address", "server.port", "role"],
            );
            one.extend(parts(&space["totals"], &COUNTERS));
            one
        })
        .collect();
    all.sort_by_key(|one| format!("{one:?}"));
    Ok(all)
}

/// Opens on the wire that wait for their outcome.
fn waiting(summary: &Value) -> Result<u64> {
    const OUTCOMES: [&str; 5] = [
        "established",
        "refused",
        "syn_timeouts",
        "abandoned",
        "half_open",
    ];
    let spaces = summary["spaces"].as_array().context("spaces")?;
    let of = |space: &Value| {
        let outcomes: u64 = OUTCOMES.iter().map(|name| total(space, name)).sum();
        total(space, "opens").saturating_sub(outcomes)
    };
    let on_wire = spaces.iter().filter(|space| space["point"] == "wire");
    Ok(on_wire.map(of).sum())
}

/// The last word on each alert: what, where, how it ended and why.
fn alerts(lines: &[Value]) -> Vec<Vec<(String, Value)>> {
    let mut last: Vec<&Value> = Vec::new();
    for line in lines.iter().filter(|line| line["type"] == "alert") {
        last.retain(|other| other["id"] != line["id"]);
        last.push(line);
    }
    let mut all: Vec<_> = last
        .into_iter()
        .map(|alert| {
            let names = ["id", "state", "cause", "severity", "confidence"];
            let mut one = parts(alert, &names);
            one.extend(parts(&alert["evidence"], &EVIDENCE));
            one
        })
        .collect();
    all.sort_by_key(|one| format!("{one:?}"));
    all
}

fn replay(binary: &Path, file: &Path, args: &[&str]) -> Result<Vec<Value>> {
    let mut command = Command::new(binary);
    command.args(["replay", "--format", "json", "--top", "500"]);
    let output = command.args(args).arg(file).output()?;
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{error}");
    String::from_utf8(output.stdout)?
        .lines()
        .map(|line| serde_json::from_str(line).context("a line"))
        .collect()
}

/// The binary of a running agent.
fn binary(agent: &Agent) -> Result<std::path::PathBuf> {
    Ok(std::fs::read_link(format!("/proc/{}/exe", agent.pid()))?)
}

fn is_resolved(alert: &Value) -> bool {
    alert["cause"] == "l4_reuse_in_time_wait" && alert["state"] == "resolved"
}

#[test]
fn a_recording_gets_the_live_verdict() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let settings = ["--set", "alert.resolve=8s"];
    let incident = Incident::new(IncidentConfig::default())?;
    let hosts = [&incident.server, &incident.clients[0]];
    let taps = hosts
        .iter()
        .map(|host| {
            let file = dir.path().join(host.name());
            incident.tap(host, "eth0", &file)
        })
        .collect::<Result<Vec<_>>>()?;
    let agents = hosts
        .iter()
        .map(|host| watch(host, &settings))
        .collect::<Result<Vec<_>>>()?;
    let _server = incident.serve()?;
    for load in incident.load(RATE, TIME)? {
        load.wait()?;
    }
    // Both alerts must be over, and every handshake that stays open be given up: the replay goes on a little longer.
    incident.settle(SECOND, 60 * SECOND)?;
    for agent in &agents {
        agent.wait_alert(90 * SECOND, is_resolved)?;
        let end = Instant::now() + 60 * SECOND * patience();
        while waiting(&fresh(agent)?)? > 0 {
            ensure!(Instant::now() < end, "a handshake stays open");
        }
    }
    // Until here the recordings have no packet for some seconds: their clock must go on as far, and a little further,
    // because a replay looks at other moments of a second than the agent did.
    let end = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)? + 3 * SECOND;
    for ((host, agent), tap) in hosts.iter().zip(&agents).zip(taps) {
        let live = fresh(agent)?;
        let recording = tap.stop()?;
        assert_eq!(recording.dropped, 0, "{recording:?}");
        println!("{}: {} packets", host.name(), recording.captured);
        let binary = binary(agent)?;
        agent.terminate()?;
        let tail = dir.path().join("tail");
        append_end(&recording.file, &tail, end)?;
        let replayed = replay(&binary, &tail, &settings)?;
        let summary = replayed
            .iter()
            .rfind(|line| line["type"] == "summary")
            .context("a summary")?;
        assert_eq!(spaces(summary)?, spaces(&live)?, "{}", host.name());
        let live = agent.lines()?;
        assert_eq!(alerts(&replayed), alerts(&live), "{}", host.name());
    }
    Ok(())
}

/// A copy of a recording with an empty packet at its end, so that time passes as far as it did live.
fn append_end(from: &Path, to: &Path, end: Duration) -> Result<()> {
    let mut bytes = std::fs::read(from)?;
    let seconds = u32::try_from(end.as_secs())?;
    for word in [seconds, end.subsec_nanos(), 0, 0] {
        bytes.extend(word.to_le_bytes());
    }
    std::fs::write(to, bytes)?;
    Ok(())
}
