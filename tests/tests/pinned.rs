//! Signature `stuck_keepalive`: real clients and servers behind a virtual address that a router maps to one
//! of two backends. Its connection tracking pins each connection to the backend that it was opened to, as
//! a load balancer does.

mod support;

#[path = "pinned/opaque.rs"]
mod opaque;
#[path = "pinned/several.rs"]
mod several;

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use support::{SECOND, number, watch};
use tuplewatch_tests::{patience, prelude::*};

const VIRTUAL: &str = "203.0.113.100:8080";

/// The network, its two backends and the agent of the client.
struct Fleet {
    /// Where the flight recorder's files go.
    evidence: tempfile::TempDir,
    net: Routed,
    agent: Agent,
    _live: Server,
    _dead: Server,
}

impl Fleet {
    fn new() -> Result<Self> {
        let net = Routed::new(RoutedConfig::default())?;
        let backend = |port, status| {
            net.server.serve(&ServeConfig {
                keep_alive: true,
                status,
                ..ServeConfig::new(format!("203.0.113.10:{port}").parse()?)
            })
        };
        let (live, dead) = (backend(8081, 200)?, backend(8082, 503)?);
        let evidence = tempfile::tempdir()?;
        let recorded = evidence.path().to_str().context("a path")?;
        let agent = watch(
            &net.client,
            &["--set", "alert.resolve=5s", "--recorder-dir", recorded],
        )?;
        Ok(Self {
            evidence,
            net,
            agent,
            _live: live,
            _dead: dead,
        })
    }

    /// Connections that are kept, two requests per second on each.
    fn pool(&self, connections: u32) -> Result<Pool> {
        self.net.client.pool(&PoolConfig {
            connections: connections as usize,
            rate: 2.0 * f64::from(connections),
            seconds: 60.0,
            ..PoolConfig::new(VIRTUAL.parse()?)
        })
    }

    /// A new connection for each request.
    fn load(&self) -> Result<Load> {
        self.net.client.load(&LoadConfig {
            rate: 5.0,
            seconds: 60.0,
            ..LoadConfig::new(VIRTUAL.parse()?)
        })
    }
}

fn is_pinned(line: &Value, state: &str) -> bool {
    line["type"] == "alert" && line["cause"] == "pinned_5xx" && line["state"] == state
}

#[test]
fn a_pinned_connection_is_told_and_is_over_when_it_is_closed() -> Result<()> {
    let fleet = Fleet::new()?;
    fleet.net.route_virtual_to(8082)?;
    let began = Instant::now();
    let pool = fleet.pool(1)?;
    std::thread::sleep(Duration::from_millis(300));
    fleet.net.route_virtual_to(8081)?;
    let load = fleet.load()?;
    let told = fleet
        .agent
        .wait_alert(20 * SECOND, |line| is_pinned(line, "firing"))?;
    // The fourth request is sent a second and a half after the first; the rest is what a busy machine
    // takes to start a process.
    let took = began.elapsed();
    println!("told after {took:?}: {}", told["summary"]);
    ensure!(took < Duration::from_millis(4200), "{took:?}");
    ensure!(told["server.address"] == "203.0.113.100", "{told}");
    let connection = told["evidence"]["stuck"]["connections"][0].clone();
    ensure!(number(&connection, "in_a_row") >= 4, "{connection}");
    let close = connection["close"].as_str().context("a command")?;
    let port = number(&connection, "client.port");
    ensure!(
        close == format!("ss -K dst 203.0.113.100 dport = 8080 src 10.79.1.2 sport = {port}"),
        "{close}"
    );
    recorded_headers(&fleet, &told, port)?;
    std::thread::sleep(4 * SECOND);
    let report = pool.stop()?;
    let over = fleet
        .agent
        .wait_alert(20 * SECOND, |line| is_pinned(line, "resolved"))?;
    let stuck = &over["evidence"]["stuck"];
    println!("client: {report:?}, agent: {stuck}");
    load.stop()?;
    let alerts = fleet.agent.alerts()?;
    ensure!(
        alerts.iter().all(|a| a["cause"] == "pinned_5xx"),
        "{alerts:#?}"
    );
    let connection = &stuck["connections"][0];
    ensure!(connection["became"] == "closed", "{stuck}");
    ensure!(number(connection, "requests") == report.requests, "{stuck}");
    ensure!(number(connection, "failures") == report.requests, "{stuck}");
    Ok(())
}

/// The alert's file holds the connection's segments, those with the status lines too, and no payload.
fn recorded_headers(fleet: &Fleet, told: &Value, port: u64) -> Result<()> {
    let path = Path::new(told["evidence_file"].as_str().context("a file")?);
    ensure!(path.parent() == Some(fleet.evidence.path()), "{path:?}");
    let file = fs::read(path)?;
    let text = String::from_utf8_lossy(&file);
    let times = |part: &str| text.matches(part).count();
    let (failures, data) = (
        times("a response with status 503, a failure"),
        times("bytes of data"),
    );
    println!("{failures} failures and {data} segments with data from port {port}");
    // The connection is watched from the first look after its first failure on.
    ensure!(failures >= 4 && data > failures, "{failures}, {data}");
    ensure!(times("HTTP/1.") + times("GET ") == 0, "payload in {path:?}");
    Ok(())
}

#[test]
fn a_service_that_fails_as_a_whole_is_no_alert() -> Result<()> {
    let fleet = Fleet::new()?;
    fleet.net.route_virtual_to(8082)?;
    let pool = fleet.pool(3)?;
    let load = fleet.load()?;
    fleet.agent.wait_line(20 * SECOND, |line| {
        line["type"] == "look_alike" && line["name"] == "service_down"
    })?;
    fleet.agent.expect_no_alert(5 * SECOND, |_| true)?;
    pool.stop()?;
    load.stop()?;
    Ok(())
}
