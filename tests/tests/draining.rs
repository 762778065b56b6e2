//! Signature `stuck_keepalive`, cause `draining`: requests that ride on connections to an endpoint that refuses new
//! ones, drops their SYNs, or that somebody outside says a service has left.

mod support;

use std::{fs, path::Path, process::Command, time::Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use support::{SECOND, look_alikes, no_alert, number, watch};
use tuplewatch_tests::prelude::*;

const VIRTUAL: &str = "203.0.113.100:8080";

/// Times that a test can wait for.
const SOON: [&str; 8] = [
    "--set",
    "draining.grace=8s",
    "--set",
    "draining.placed=6s",
    "--set",
    "draining.quiet=4s",
    "--set",
    "alert.resolve=3s",
];

fn is(line: &Value, state: &str) -> bool {
    line["type"] == "alert" && line["cause"] == "draining" && line["state"] == state
}

fn keeping(at: &str) -> Result<ServeConfig> {
    Ok(ServeConfig {
        keep_alive: true,
        ..ServeConfig::new(at.parse()?)
    })
}

/// Connections that are kept, two requests per second on each.
fn pool(net: &Routed, to: &str, connections: u32) -> Result<Pool> {
    net.client.pool(&PoolConfig {
        connections: connections as usize,
        rate: 2.0 * f64::from(connections),
        seconds: 90.0,
        ..PoolConfig::new(to.parse()?)
    })
}

fn load(net: &Routed, to: &str) -> Result<Load> {
    net.client.load(&LoadConfig {
        rate: 1.0,
        seconds: 90.0,
        ..LoadConfig::new(to.parse()?)
    })
}

/// An endpoint in its drain: it answers on the connections it has, and refuses new ones.
fn refuse(net: &Routed) -> Result<()> {
    turn_away(net, "tcp flags & (syn | ack) == syn reject with tcp reset")
}

/// What arrives for the service and fits these conditions meets this fate.
fn turn_away(net: &Routed, fate: &str) -> Result<()> {
    net.server.nft(&format!(
        "table inet drain {{
  chain arriving {{
    type filter hook input priority 0;
    tcp dport 8080 {fate}
  }}
}}
"
    ))
}

/// An endpoint that turns new connections away since a moment, and how it does so.
fn is_told_until_its_drain_is_over(
    agent: &Agent,
    since: Instant,
    how: &str,
    pool: Pool,
    load: Load,
) -> Result<()> {
    let told = agent.wait_alert(40 * SECOND, |line| is(line, "firing"))?;
    let took = since.elapsed();
    println!("after {took:?}: {told}");
    ensure!(took > 7 * SECOND, "{took:?}");
    ensure!(told["severity"] == "info", "{told}");
    ensure!(told["server.address"] == "203.0.113.10", "{told}");
    let summary = told["summary"].as_str().context("a text")?;
    for part in [how, "3 older connections"] {
        ensure!(summary.contains(part), "{summary}");
    }
    let report = pool.stop()?;
    ensure!(report.failed == 0, "{report:?}");
    agent.wait_alert(30 * SECOND, |line| is(line, "resolved"))?;
    println!("{:?}", load.stop()?);
    let alerts = agent.alerts()?;
    let ours = |alert: &Value| alert["cause"] == "draining";
    ensure!(alerts.iter().all(ours), "{alerts:#?}");
    Ok(())
}

#[test]
fn requests_that_ride_on_an_endpoint_that_refuses_are_told() -> Result<()> {
    let net = Routed::new(RoutedConfig::default())?;
    let to = net.service().to_string();
    let _server = net.server.serve(&keeping(&to)?)?;
    let agent = watch(&net.client, &SOON)?;
    let pool = pool(&net, &to, 3)?;
    let load = load(&net, &to)?;
    std::thread::sleep(3 * SECOND);
    refuse(&net)?;
    let refused = Instant::now();
    is_told_until_its_drain_is_over(&agent, refused, "refused", pool, load)
}

/// An endpoint that says nothing to new clients, which give up after so many milliseconds.
fn silent(patience_ms: u64) -> Result<()> {
    let net = Routed::new(RoutedConfig::default())?;
    let to = net.service().to_string();
    let _server = net.server.serve(&keeping(&to)?)?;
    let agent = watch(&net.client, &SOON)?;
    let pool = pool(&net, &to, 3)?;
    let load = net.client.load(&LoadConfig {
        rate: 1.0,
        seconds: 90.0,
        connect_timeout_ms: patience_ms,
        concurrency: 100,
        ..LoadConfig::new(to.parse()?)
    })?;
    std::thread::sleep(3 * SECOND);
    turn_away(&net, "tcp flags & (syn | ack) == syn drop")?;
    let dropped = Instant::now();
    is_told_until_its_drain_is_over(&agent, dropped, "without answer", pool, load)
}

#[test]
fn an_endpoint_that_drops_syns_is_told() -> Result<()> {
    silent(3500)
}

/// Before any SYN is sent again.
#[test]
fn clients_that_give_up_at_once_are_enough() -> Result<()> {
    silent(300)
}

/// The way there is cut off, old connections and all.
#[test]
fn a_path_that_is_cut_is_not_draining() -> Result<()> {
    let net = Routed::new(RoutedConfig::default())?;
    let to = net.service().to_string();
    let _server = net.server.serve(&keeping(&to)?)?;
    let agent = watch(&net.client, &SOON)?;
    let pool = pool(&net, &to, 3)?;
    let load = net.client.load(&LoadConfig {
        rate: 1.0,
        seconds: 90.0,
        connect_timeout_ms: 300,
        ..LoadConfig::new(to.parse()?)
    })?;
    std::thread::sleep(3 * SECOND);
    turn_away(&net, "drop")?;
    std::thread::sleep(30 * SECOND);
    no_alert(&agent)?;
    drop((pool, load));
    Ok(())
}

/// Nothing rides on it: it is down.
#[test]
fn an_endpoint_that_refuses_and_serves_nobody_is_down() -> Result<()> {
    let net = Routed::new(RoutedConfig::default())?;
    let to = net.service().to_string();
    let _server = net.server.serve(&keeping(&to)?)?;
    let agent = watch(&net.client, &SOON)?;
    let load = load(&net, &to)?;
    std::thread::sleep(3 * SECOND);
    refuse(&net)?;
    std::thread::sleep(25 * SECOND);
    no_alert(&agent)?;
    ensure!(look_alikes(&agent)?.contains("server_down"));
    load.stop()?;
    Ok(())
}

/// The time of day in UTC, as the file of placements has it.
fn now() -> Result<String> {
    let output = Command::new("date")
        .args(["-u", "+%Y-%m-%dT%H:%M:%SZ"])
        .output()?;
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

/// Puts a file in place of another, as editors and config maps do.
fn replace(path: &Path, text: &str) -> Result<()> {
    let new = path.with_extension("new");
    fs::write(&new, text)?;
    fs::rename(&new, path)?;
    Ok(())
}

/// A virtual address that moves to another backend; what was opened before stays.
#[test]
fn a_change_of_placement_is_told_for_connections_that_are_older() -> Result<()> {
    let net = Routed::new(RoutedConfig::default())?;
    let _before = net.server.serve(&keeping("203.0.113.10:8082")?)?;
    let _after = net.server.serve(&keeping("203.0.113.10:8081")?)?;
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("placements.yaml");
    fs::write(&file, "# none yet\n")?;
    let mut args = SOON.to_vec();
    args.extend(["--placements", file.to_str().context("a path")?]);
    let tap = net.tap(&net.client, "eth0", &dir.path().join("client"))?;
    let agent = watch(&net.client, &args)?;
    net.route_virtual_to(8082)?;
    let old = pool(&net, VIRTUAL, 3)?;
    std::thread::sleep(3 * SECOND);
    let since = now()?;
    net.route_virtual_to(8081)?;
    std::thread::sleep(2 * SECOND);
    let new = pool(&net, VIRTUAL, 2)?;
    // A slip is told, and does not end the agent.
    replace(&file, &format!("- servce: {VIRTUAL}\n  since: {since}\n"))?;
    std::thread::sleep(8 * SECOND);
    no_alert(&agent)?;
    replace(&file, &format!("- service: {VIRTUAL}\n  since: {since}\n"))?;
    let told = agent.wait_alert(20 * SECOND, |line| is(line, "firing"))?;
    println!("{}\n{}", told["summary"], told["remedy"]);
    ensure!(told["severity"] == "info", "{told}");
    ensure!(told["server.address"] == "203.0.113.100", "{told}");
    let placement = &told["evidence"]["placement"];
    ensure!(number(placement, "answered") == 3, "{placement}");
    let riding = placement["connections"].as_array().context("a list")?;
    let past = placement["since_seconds"].as_f64().context("a time")?;
    ensure!(past >= 6.0, "{placement}");
    for connection in riding {
        let age = connection["age_seconds"].as_f64().context("an age")?;
        ensure!(age > past, "{connection}");
        ensure!(number(connection, "requests") > 10, "{connection}");
    }
    ensure!(riding.len() == 3, "{placement}");
    let report = old.stop()?;
    ensure!(report.failed == 0, "{report:?}");
    agent.wait_alert(30 * SECOND, |line| is(line, "resolved"))?;
    new.stop()?;
    let alerts = agent.alerts()?;
    let ours = |alert: &Value| alert["cause"] == "draining";
    ensure!(alerts.iter().all(ours), "{alerts:#?}");
    // The packets tell the same.
    let recording = tap.stop()?;
    let binary = fs::read_link(format!("/proc/{}/exe", agent.pid()))?;
    let mut command = Command::new(binary);
    command.args(["replay", "--format", "json"]).args(&args);
    let output = command.arg(&recording.file).output()?;
    let lines = String::from_utf8(output.stdout)?;
    let lines: Vec<Value> = lines
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()?;
    let again = lines.iter().find(|line| is(line, "firing"));
    let again = again.with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
    println!("{}", again["summary"]);
    ensure!(
        number(&again["evidence"]["placement"], "answered") == 3,
        "{again}"
    );
    let resolved = lines.iter().any(|line| is(line, "resolved"));
    ensure!(resolved, "it is over in the replay too");
    Ok(())
}
