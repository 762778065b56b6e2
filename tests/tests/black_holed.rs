//! Signature `stuck_keepalive`, cause `black_holed`: real clients and servers behind a virtual address that a
//! router maps to one of two backends, and whose packets to one of them it then drops. And what resembles it.

mod support;

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use support::{SECOND, look_alikes, no_alert, number, watch};
use tuplewatch_tests::prelude::*;

const VIRTUAL: &str = "203.0.113.100:8080";
/// Port of the backend that gets new connections in the end.
const LIVE: u16 = 8081;
/// Port of the one whose packets vanish.
const LOST: u16 = 8082;

/// The network and its two backends.
struct Fleet {
    net: Routed,
    _live: Server,
    _lost: Server,
}

impl Fleet {
    fn new() -> Result<Self> {
        Self::with(RoutedConfig::default(), &|config| config)
    }

    fn with(config: RoutedConfig, manners: &dyn Fn(ServeConfig) -> ServeConfig) -> Result<Self> {
        let net = Routed::new(config)?;
        let backend = |port| {
            let config = ServeConfig {
                keep_alive: true,
                ..ServeConfig::new(format!("203.0.113.10:{port}").parse()?)
            };
            net.server.serve(&manners(config))
        };
        let (live, lost) = (backend(LIVE)?, backend(LOST)?);
        net.router.nft(
            "table ip vip {
  chain passing { type filter hook forward priority 0; }
}
",
        )?;
        let fleet = Self {
            net,
            _live: live,
            _lost: lost,
        };
        fleet.net.route_virtual_to(LOST)?;
        Ok(fleet)
    }

    /// Packets that these conditions fit vanish, besides those before.
    fn drop(&self, conditions: &[&str]) -> Result<()> {
        let rules = conditions
            .iter()
            .map(|condition| format!("add rule ip vip passing {condition} drop\n"));
        self.net.router.nft(&rules.collect::<String>())
    }

    /// Nothing vanishes any more.
    fn heal(&self) -> Result<()> {
        self.net.router.nft("flush chain ip vip passing\n")
    }

    /// Connections that are kept, two requests per second on each.
    fn pool(&self, connections: u32, timeout: Duration) -> Result<Pool> {
        self.net.client.pool(&PoolConfig {
            connections: connections as usize,
            rate: 2.0 * f64::from(connections),
            seconds: 90.0,
            timeout_ms: u64::try_from(timeout.as_millis())?,
            ..PoolConfig::new(VIRTUAL.parse()?)
        })
    }

    /// A new connection for each request.
    fn load(&self) -> Result<Load> {
        self.net.client.load(&LoadConfig {
            rate: 5.0,
            seconds: 90.0,
            ..LoadConfig::new(VIRTUAL.parse()?)
        })
    }
}

fn is(line: &Value, state: &str) -> bool {
    line["type"] == "alert" && line["cause"] == "black_holed" && line["state"] == state
}

fn is_named(line: &Value, name: &str) -> bool {
    line["type"] == "look_alike" && line["name"] == name && line["ended"] == false
}

const SOON: [&str; 2] = ["--set", "alert.resolve=3s"];

/// Five connections whose packets vanish both ways, as in a failover that forgets them, with clients that
/// give up after twelve seconds.
#[test]
fn connections_that_get_nothing_through_are_told_and_are_over_when_they_are_closed() -> Result<()> {
    let fleet = Fleet::new()?;
    let agent = watch(&fleet.net.client, &SOON)?;
    let pool = fleet.pool(5, 12 * SECOND)?;
    std::thread::sleep(2 * SECOND);
    fleet.net.route_virtual_to(LIVE)?;
    let load = fleet.load()?;
    std::thread::sleep(SECOND);
    no_alert(&agent)?;
    fleet.drop(&["tcp dport 8082", "tcp sport 8082"])?;
    let stalled = Instant::now();
    let told = agent.wait_alert(20 * SECOND, |line| is(line, "firing"))?;
    let took = stalled.elapsed();
    println!("told after {took:?}: {}", told["summary"]);
    ensure!(took < 10 * SECOND, "{took:?}");
    ensure!(told["server.address"] == "203.0.113.100", "{told}");
    ensure!(
        told["point"] == "socket" && told["role"] == "initiator",
        "{told}"
    );
    // All five are in it as soon as each has had its time-outs.
    std::thread::sleep(3 * SECOND);
    let critical = agent.wait_alert(20 * SECOND, |line| {
        is(line, "firing") && line["severity"] == "critical"
    })?;
    println!("{}", critical["summary"]);
    println!("{}", critical["remedy"]);
    let connection = &critical["evidence"]["stall"]["connections"][0];
    ensure!(number(connection, "rtos") >= 3, "{connection}");
    ensure!(
        number(connection, "pid") == u64::from(pool.pid()),
        "{connection}"
    );
    ensure!(connection["command"] == "lab-peer", "{connection}");
    ensure!(connection["user_timeout_seconds"] == 0.0, "{connection}");
    ensure!(number(connection, "unacked_bytes") > 0, "{connection}");
    let age = connection["age_seconds"].as_f64().context("an age")?;
    ensure!((2.0..30.0).contains(&age), "{connection}");
    let port = number(connection, "client.port");
    let close = format!("ss -K dst 203.0.113.100 dport = 8080 src 10.79.1.2 sport = {port}");
    ensure!(connection["close"] == close.as_str(), "{connection}");
    let over = agent.wait_alert(40 * SECOND, |line| is(line, "resolved"))?;
    let report = pool.stop()?;
    load.stop()?;
    let stall = &over["evidence"]["stall"];
    println!("client: {report:?}, agent: {stall}");
    ensure!(
        number(stall, "over") == report.failed && report.failed == 5,
        "{report:?} {stall}"
    );
    let ports = stall["connections"].as_array().context("connections")?;
    let ports: std::collections::BTreeSet<u64> =
        ports.iter().map(|c| number(c, "client.port")).collect();
    let failed = report.failed_ports.iter().map(|port| u64::from(*port));
    ensure!(ports == failed.collect(), "{report:?} {stall}");
    let alerts = agent.alerts()?;
    ensure!(
        alerts.iter().all(|a| a["cause"] == "black_holed"),
        "{alerts:#?}"
    );
    Ok(())
}

/// One that was there before the agent, and that gets through again in the end. Its client waits.
#[test]
fn one_that_is_older_than_the_agent_recovers() -> Result<()> {
    let fleet = Fleet::new()?;
    let pool = fleet.pool(1, 60 * SECOND)?;
    std::thread::sleep(2 * SECOND);
    let agent = watch(&fleet.net.client, &SOON)?;
    fleet.net.route_virtual_to(LIVE)?;
    let load = fleet.load()?;
    fleet.drop(&["tcp dport 8082", "tcp sport 8082"])?;
    let stalled = Instant::now();
    let told = agent.wait_alert(20 * SECOND, |line| is(line, "firing"))?;
    println!("told after {:?}: {}", stalled.elapsed(), told["summary"]);
    ensure!(stalled.elapsed() < 10 * SECOND, "{:?}", stalled.elapsed());
    let connection = &told["evidence"]["stall"]["connections"][0];
    ensure!(connection["age_seconds"].is_null(), "{connection}");
    ensure!(connection["pid"].is_null(), "{connection}");
    fleet.heal()?;
    agent.wait_alert(40 * SECOND, |line| is(line, "resolved"))?;
    let report = pool.stop()?;
    load.stop()?;
    ensure!(report.failed == 0, "{report:?}");
    Ok(())
}

/// The server's side: its responses vanish, requests arrive.
#[test]
fn the_responder_sees_its_responses_vanish() -> Result<()> {
    let fleet = Fleet::new()?;
    let agent = watch(&fleet.net.server, &SOON)?;
    let pool = fleet.pool(2, 60 * SECOND)?;
    std::thread::sleep(2 * SECOND);
    // Those from now on come to the same port, and get through.
    fleet.drop(&["ct mark 0x66 ct direction reply"])?;
    fleet.net.router.nft(
        "add chain ip vip marking { type filter hook prerouting priority mangle; }
add rule ip vip marking tcp sport 8082 ct state established ct mark set 0x66
",
    )?;
    std::thread::sleep(Duration::from_millis(700));
    fleet.net.router.nft("flush chain ip vip marking\n")?;
    let load = fleet.load()?;
    let stalled = Instant::now();
    let told = agent.wait_alert(20 * SECOND, |line| is(line, "firing"))?;
    println!("told after {:?}: {}", stalled.elapsed(), told["summary"]);
    println!("{}", told["remedy"]);
    ensure!(stalled.elapsed() < 10 * SECOND, "{:?}", stalled.elapsed());
    ensure!(told["role"] == "responder", "{told}");
    ensure!(told["client.address"] == "10.79.1.2", "{told}");
    ensure!(told["confidence"] == "medium", "{told}");
    let connection = &told["evidence"]["stall"]["connections"][0];
    let port = number(connection, "client.port");
    let close = format!("ss -K dst 10.79.1.2 dport = {port} src 203.0.113.10 sport = 8082");
    ensure!(connection["close"] == close.as_str(), "{connection}");
    // Its requests wait: it is killed.
    drop((pool, load));
    Ok(())
}

#[test]
fn a_path_that_is_down_is_no_alert() -> Result<()> {
    let fleet = Fleet::new()?;
    let agent = watch(&fleet.net.client, &SOON)?;
    let pool = fleet.pool(3, 60 * SECOND)?;
    let load = fleet.load()?;
    std::thread::sleep(2 * SECOND);
    fleet.drop(&["meta l4proto tcp"])?;
    let named = agent.wait_line(20 * SECOND, |line| is_named(line, "path_down"))?;
    println!("{}", named["summary"]);
    std::thread::sleep(5 * SECOND);
    // It comes back: the new ones get through at once, the old ones when their timers run out.
    fleet.heal()?;
    std::thread::sleep(10 * SECOND);
    pool.stop()?;
    load.stop()?;
    ensure!(
        !agent.alerts()?.iter().any(|a| a["cause"] == "black_holed"),
        "{:#?}",
        agent.alerts()?
    );
    Ok(())
}

/// Nobody reads what the client sends.
#[test]
fn a_peer_that_does_not_read_is_named() -> Result<()> {
    let fleet = Fleet::with(RoutedConfig::default(), &|config| ServeConfig {
        no_accept_after: Some(0),
        ..config
    })?;
    let agent = watch(&fleet.net.client, &SOON)?;
    let pool = fleet.net.client.pool(&PoolConfig {
        connections: 2,
        rate: 2.0,
        upload: 20_000_000,
        timeout_ms: 60_000,
        ..PoolConfig::new(VIRTUAL.parse()?)
    })?;
    let load = fleet.load()?;
    let named = agent.wait_line(40 * SECOND, |line| is_named(line, "zero_window"))?;
    println!("{}", named["summary"]);
    // It is told once, when it begins: the other connection may stall a second later.
    let stalled = number(&named["evidence"]["stall"], "stalled");
    ensure!((1..=2).contains(&stalled), "{named}");
    no_alert(&agent)?;
    // Its requests wait: it is killed.
    drop((pool, load));
    Ok(())
}

/// Large segments vanish, whatever the connection.
#[test]
fn a_path_that_loses_large_segments_is_named() -> Result<()> {
    let fleet = Fleet::new()?;
    let agent = watch(&fleet.net.client, &SOON)?;
    fleet.drop(&["tcp dport 8082 meta length > 1300"])?;
    let pool = fleet.pool(2, 60 * SECOND)?;
    let uploads = fleet.net.client.pool(&PoolConfig {
        connections: 4,
        rate: 1.0,
        upload: 100_000,
        timeout_ms: 60_000,
        ..PoolConfig::new(VIRTUAL.parse()?)
    })?;
    let named = agent.wait_line(30 * SECOND, |line| is_named(line, "mtu_black_hole"))?;
    println!("{}", named["summary"]);
    std::thread::sleep(10 * SECOND);
    no_alert(&agent)?;
    // Its requests wait: it is killed.
    drop((pool, uploads));
    Ok(())
}

#[test]
fn loss_and_long_polls_are_nothing() -> Result<()> {
    let lossy = Fleet::with(
        RoutedConfig {
            loss_percent: 3,
            ..RoutedConfig::default()
        },
        &|config| config,
    )?;
    let polls = Fleet::with(RoutedConfig::default(), &|config| ServeConfig {
        delay_ms: 6000,
        ..config
    })?;
    let mut running = Vec::new();
    for fleet in [&lossy, &polls] {
        let agents = (
            watch(&fleet.net.client, &SOON)?,
            watch(&fleet.net.server, &SOON)?,
        );
        running.push((agents, fleet.pool(20, 30 * SECOND)?, fleet.load()?));
    }
    std::thread::sleep(25 * SECOND);
    for ((client, server), pool, load) in running {
        for agent in [&client, &server] {
            no_alert(agent)?;
            let named = look_alikes(agent)?;
            let ours = ["path_down", "mtu_black_hole", "zero_window"];
            ensure!(ours.iter().all(|name| !named.contains(*name)), "{named:?}");
        }
        pool.stop()?;
        load.stop()?;
    }
    Ok(())
}
