//! Many connections, many ports, many TIME_WAIT: and all is well.

use std::io::Write as _;

use anyhow::{Result, ensure};
use tuplewatch_tests::prelude::*;

use super::load;
use super::support::{Place, SECOND, fresh, nothing_told, number, total, watch};

/// Forty thousand TIME_WAIT sockets on a server that closes first, and not one SYN refused.
#[test]
fn forty_thousand_time_wait() -> Result<()> {
    const EACH: u64 = 20_000;
    let pair = Pair::new(PairConfig::default())?;
    let services = [8080, 8081].map(|port| std::net::SocketAddr::new(pair.service().ip(), port));
    let servers = services.map(|service| {
        pair.server.serve(&ServeConfig {
            inline: 4,
            ..ServeConfig::closing_first(service)
        })
    });
    let agents = [watch(&pair.client, &[])?, watch(&pair.server, &[])?];
    let loads = services.map(|service| {
        pair.client.load(&LoadConfig {
            rate: 0.0,
            count: Some(EACH),
            concurrency: 4,
            // No port comes twice: what is held at the server meets nothing.
            bind_port_range: Some(PortRange {
                low: 20_000,
                high: 39_999,
            }),
            ..load(service, 0.0, 120, 20_000)
        })
    });
    for load in loads {
        let report = load?.wait()?;
        println!("{report:?}");
        ensure!(report.ok == EACH, "{report:?}");
    }
    let held = pair.server.sockstat()?.get("TCP.tw");
    ensure!(held >= 40_000, "{held} TIME_WAIT sockets");
    ensure!(pair.truth()?.host("server").counters.bareack_to_syn_out == 0);
    let place = Place::responder(pair.client_address(), pair.service());
    let space = place.of(&fresh(&agents[1])?)?;
    ensure!(total(&space, "opens") == EACH, "{space}");
    ensure!(number(&space["time_wait"], "total") == EACH, "{space}");
    for agent in &agents {
        nothing_told(agent)?;
    }
    for server in servers {
        server?.stop()?;
    }
    let figures = ["established", "bare_acks", "syn_retransmits"];
    Row::quiet(
        "40,000 TIME_WAIT on a busy server",
        "server",
        &space,
        &figures,
    )
    .record()
}

/// `tcp_tw_reuse=1`: four times more opens than ports within ten seconds, and none fails.
#[test]
fn time_wait_that_is_reused() -> Result<()> {
    const PORTS: u64 = 200;
    let pair = Pair::new(PairConfig::default())?;
    let range = format!("40000 {}", 39_999 + PORTS);
    pair.client.sysctl("net.ipv4.ip_local_port_range", range)?;
    pair.client.sysctl("net.ipv4.tcp_tw_reuse", 1)?;
    let _server = pair.server.serve(&ServeConfig::new(pair.service()))?;
    let agents = [watch(&pair.client, &[])?, watch(&pair.server, &[])?];
    let config = LoadConfig {
        count: Some(4 * PORTS),
        ..load(pair.service(), 60.0, 60, 5000)
    };
    let report = pair.client.load(&config)?.wait()?;
    ensure!(report.ok == 4 * PORTS, "{report:?}");
    let taken_over = pair.client.netstat()?.get("TcpExtTWRecycled");
    ensure!(taken_over >= 400, "{taken_over} taken over");
    let place = Place::socket(pair.client_address(), pair.service());
    let space = place.of(&fresh(&agents[0])?)?;
    ensure!(total(&space, "opens") == 4 * PORTS, "{space}");
    std::thread::sleep(2 * SECOND);
    for agent in &agents {
        nothing_told(agent)?;
    }
    let figures = ["established", "no_local_port", "bare_acks"];
    Row::quiet(
        "tcp_tw_reuse=1, four times more opens than ports",
        "client",
        &space,
        &figures,
    )
    .record()
}

/// A load test over loopback, with more opens than ports.
#[test]
fn a_load_test_over_loopback() -> Result<()> {
    let lab = Lab::new()?;
    let host = lab.host("host")?;
    host.sysctl("net.ipv4.ip_local_port_range", "40000 42499")?;
    let service: std::net::SocketAddr = "127.0.0.1:8080".parse()?;
    let _server = host.serve(&ServeConfig {
        inline: 4,
        ..ServeConfig::new(service)
    })?;
    let netns = host.netns_inode().to_string();
    let args = [
        "--netns",
        &netns,
        "--summary-interval",
        "1s",
        "--census-interval",
        "1s",
        "--top",
        "500",
    ];
    let agent = host.agent(AgentConfig::with_args(args))?;
    agent.wait_ready(60 * SECOND)?;
    let config = LoadConfig {
        count: Some(5000),
        ..load(service, 600.0, 60, 5000)
    };
    let report = host.load(&config)?.wait()?;
    println!("{report:?}");
    ensure!(report.ok == 5000, "{report:?}");
    let place = Place::socket(service.ip(), service);
    let space = place.of(&fresh(&agent)?)?;
    ensure!(total(&space, "established") == 5000, "{space}");
    nothing_told(&agent)?;
    let figures = ["established", "no_local_port", "bare_acks"];
    Row::quiet("a load test over loopback", "host", &space, &figures).record()
}

/// The agent starts in the middle of a steady load that takes half of the ports of this host and of a
/// device: what is held rises from nothing in its eyes, and that leads nowhere.
#[test]
fn a_start_in_the_middle_of_a_steady_load() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    pair.client
        .sysctl("net.ipv4.ip_local_port_range", "40000 40199")?;
    pair.client.sysctl("net.ipv4.tcp_tw_reuse", 1)?;
    let _server = pair.server.serve(&ServeConfig {
        keep_alive: true,
        ..ServeConfig::new(pair.service())
    })?;
    // 80 connections stay; 2 a second come and go, which the device holds for 10 s: 20 more.
    let kept = pair.client.pool(&PoolConfig {
        connections: 80,
        rate: 100.0,
        ..PoolConfig::new(pair.service())
    })?;
    let churn = pair.client.load(&load(pair.service(), 2.0, 60, 5000))?;
    std::thread::sleep(3 * SECOND);
    let mut file = tempfile::NamedTempFile::with_suffix(".yaml")?;
    file.write_all(
        b"egress_groups:\n- name: device\n  destinations: [0.0.0.0/0]\n  ports: 200\n  hold: 10s\n",
    )?;
    let path = file.path().to_string_lossy().into_owned();
    let agents = [
        watch(&pair.client, &["--config", &path])?,
        watch(&pair.server, &[])?,
    ];
    // A forecast needs thirty seconds of observation, and a load that lasted for twenty.
    std::thread::sleep(34 * SECOND);
    let place = Place::socket(pair.client_address(), pair.service());
    let space = place.of(&fresh(&agents[0])?)?;
    for agent in &agents {
        nothing_told(agent)?;
    }
    let report = churn.stop()?;
    ensure!(report.failures() == 0, "{report:?}");
    ensure!(number(&space, "in_use") >= 80, "{space}");
    kept.stop()?;
    let figures = ["established", "no_local_port", "bare_acks"];
    Row::quiet(
        "the agent starts in the middle of a steady load at half of the ports",
        "client",
        &space,
        &figures,
    )
    .record()
}
