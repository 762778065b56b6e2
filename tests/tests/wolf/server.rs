//! Trouble of the server: its queues, its absence, its pace.

use anyhow::{Result, ensure};
use tuplewatch_tests::prelude::*;

use super::support::{Place, SECOND, fresh, nothing_told, total, watch};
use super::{load, named, only};

/// The application does not accept any more. The server's agent names it; at the client the same picture
/// can have other reasons.
#[test]
fn accept_queue_overflow() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let _server = pair.server.serve(&ServeConfig {
        no_accept_after: Some(10),
        backlog: 8,
        ..ServeConfig::closing_first(pair.service())
    })?;
    let agents = [watch(&pair.client, &[])?, watch(&pair.server, &[])?];
    let config = load(pair.service(), 10.0, 7, 3000);
    let load = pair.client.load(&config)?;
    let (client, service) = (pair.client_address(), pair.service());
    let place = Place::responder(client, service);
    let told = named(&agents[1], "accept_queue_overflow", &place)?;
    println!("{:?}", load.wait()?);
    let overflows = pair
        .truth()?
        .kernel_sum(&["server"], "TcpExtListenOverflows");
    ensure!(overflows > 0, "the queue never overflowed");
    only(&agents[1], &["accept_queue_overflow"])?;
    only(&agents[0], &["unknown_connect_loss", "service_down"])?;
    let scenario = "the accept queue is full";
    let figures = ["syn_retransmits", "refused_syns"];
    Row::told(scenario, "server", &told, &figures).record()?;
    let place = Place::initiator(client, service);
    let told = named(&agents[0], "unknown_connect_loss", &place)?;
    Row::told(scenario, "client", &told, &figures).record()
}

/// Handshakes that nobody completes fill the queue of half-open connections, and no cookies are sent.
#[test]
fn syn_queue_overflow() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    pair.server.sysctl("net.ipv4.tcp_syncookies", 0)?;
    let _server = pair.server.serve(&ServeConfig {
        backlog: 16,
        ..ServeConfig::closing_first(pair.service())
    })?;
    let agents = [watch(&pair.client, &[])?, watch(&pair.server, &[])?];
    let honest = load(pair.service(), 10.0, 2, 3000);
    ensure!(pair.client.load(&honest)?.wait()?.failures() == 0);
    let strangers = RawSynConfig {
        count: 400,
        rate: 40.0,
        random_sources: true,
        ..RawSynConfig::new(pair.service(), Family::V4.nobody())
    };
    let flood = pair.client.rawsyn(&strangers)?;
    std::thread::sleep(SECOND);
    let load = pair.client.load(&load(pair.service(), 10.0, 6, 3000))?;
    let (client, service) = (pair.client_address(), pair.service());
    let place = Place::responder(client, service);
    let told = named(&agents[1], "syn_queue_overflow", &place)?;
    println!("{:?}", load.wait()?);
    flood.stop()?;
    let truth = pair.truth()?;
    let dropped = truth.kernel_sum(&["server"], "TcpExtTCPReqQFullDrop")
        + truth.kernel_sum(&["server"], "TcpExtListenDrops");
    ensure!(dropped > 0, "no SYN was dropped");
    ensure!(truth.kernel_sum(&["server"], "TcpExtListenOverflows") == 0);
    only(&agents[1], &["syn_queue_overflow"])?;
    only(&agents[0], &["unknown_connect_loss", "service_down"])?;
    Row::told(
        "the SYN queue is full",
        "server",
        &told,
        &["syn_retransmits", "refused_syns"],
    )
    .record()
}

/// Nothing listens any more: every SYN is answered by RST. That is no want of local ports either.
#[test]
fn refused_connects_to_a_server_that_is_down() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let server = pair.server.serve(&ServeConfig::new(pair.service()))?;
    let agents = [watch(&pair.client, &[])?, watch(&pair.server, &[])?];
    let config = load(pair.service(), 10.0, 2, 2000);
    ensure!(pair.client.load(&config)?.wait()?.failures() == 0);
    server.stop()?;
    let load = pair.client.load(&load(pair.service(), 10.0, 12, 2000))?;
    let (client, service) = (pair.client_address(), pair.service());
    let places = [
        Place::initiator(client, service),
        Place::responder(client, service),
    ];
    for ((agent, place), at) in agents.iter().zip(places).zip(["client", "server"]) {
        let told = named(agent, "server_down", &place)?;
        let figures = ["refused_by_rst", "refused_syns", "no_local_port"];
        Row::told("nothing listens any more", at, &told, &figures).record()?;
    }
    let report = load.wait()?;
    ensure!(
        report.failed.get("refused") == Some(&report.attempted),
        "{report:?}"
    );
    for agent in &agents {
        only(agent, &["server_down"])?;
    }
    let space = places[0].of(&fresh(&agents[0])?)?;
    ensure!(total(&space, "refused") == report.attempted, "{space}");
    Ok(())
}

/// A server that accepts at once and answers after three seconds is slow and nothing else, at both ends.
#[test]
fn a_slow_server() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let _server = pair.server.serve(&ServeConfig {
        delay_ms: 3000,
        ..ServeConfig::closing_first(pair.service())
    })?;
    let agents = [watch(&pair.client, &[])?, watch(&pair.server, &[])?];
    let report = pair
        .client
        .load(&load(pair.service(), 20.0, 18, 10_000))?
        .wait()?;
    ensure!(report.failures() == 0 && report.ok >= 340, "{report:?}");
    let (client, service) = (pair.client_address(), pair.service());
    let place = Place::initiator(client, service);
    let space = place.of(&fresh(&agents[0])?)?;
    ensure!(total(&space, "established") == report.ok, "{space}");
    let places = [place, Place::responder(client, service)];
    for ((agent, place), at) in agents.iter().zip(places).zip(["client", "server"]) {
        let told = named(agent, "slow_server", &place)?;
        only(agent, &["slow_server"])?;
        // 20 a second, each of which waits for 2 s longer than the first one.
        let waits = &told["evidence"]["waits"];
        let waiting = waits["waiting"].as_f64().unwrap_or(0.0);
        ensure!((20.0..=50.0).contains(&waiting), "{told}");
        ensure!(waits["unaccepted"] == 0.0, "{told}");
        let figures = ["waits.waiting", "waits.unaccepted", "syn_retransmits"];
        Row::told("a server that answers after 3 s", at, &told, &figures).record()?;
    }
    let over = |line: &serde_json::Value| line["name"] == "slow_server" && line["ended"] == true;
    agents[0].wait_line(20 * SECOND, over)?;
    Ok(())
}

/// The application does not accept for a while, and its queue is long enough: handshakes are complete and
/// nobody answers.
#[test]
fn a_server_that_accepts_late() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let _server = pair.server.serve(&ServeConfig {
        no_accept_after: Some(10),
        backlog: 4096,
        ..ServeConfig::closing_first(pair.service())
    })?;
    let agents = [watch(&pair.client, &[])?, watch(&pair.server, &[])?];
    let load = pair.client.load(&load(pair.service(), 10.0, 16, 20_000))?;
    let (client, service) = (pair.client_address(), pair.service());
    let told = named(
        &agents[1],
        "slow_server",
        &Place::responder(client, service),
    )?;
    let waits = &told["evidence"]["waits"];
    ensure!(waits["waiting"] == waits["unaccepted"], "{told}");
    ensure!(told["confidence"] == "high", "{told}");
    named(
        &agents[0],
        "slow_server",
        &Place::initiator(client, service),
    )?;
    for agent in &agents {
        only(agent, &["slow_server"])?;
    }
    println!("{:?}", load.stop()?);
    let figures = ["waits.waiting", "waits.unaccepted", "syn_retransmits"];
    Row::told(
        "the application accepts late, its queue is long enough",
        "server",
        &told,
        &figures,
    )
    .record()
}

/// Polls that are answered after three seconds, on connections that are kept: nothing is slow.
#[test]
fn long_polls() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let _server = pair.server.serve(&ServeConfig {
        keep_alive: true,
        delay_ms: 3000,
        ..ServeConfig::new(pair.service())
    })?;
    let agents = [watch(&pair.client, &[])?, watch(&pair.server, &[])?];
    let polls = pair.client.pool(&PoolConfig {
        connections: 16,
        rate: 100.0,
        ..PoolConfig::new(pair.service())
    })?;
    std::thread::sleep(25 * SECOND);
    let place = Place::initiator(pair.client_address(), pair.service());
    let space = place.of(&fresh(&agents[0])?)?;
    for agent in &agents {
        nothing_told(agent)?;
    }
    println!("{:?}", polls.stop()?);
    let figures = ["established", "syn_retransmits", "bare_acks"];
    Row::quiet("long polls on 16 connections", "client", &space, &figures).record()
}

/// A deploy under load: a server with two thousand connections and unread requests is killed, its kernel
/// resets them, a new one starts, and all clients come back at once.
#[test]
fn a_deploy_resets_thousands() -> Result<()> {
    const CONNECTIONS: usize = 1000;
    let pair = Pair::new(PairConfig::default())?;
    let config = ServeConfig {
        backlog: 4096,
        ..ServeConfig::closing_first(pair.service())
    };
    let server = pair.server.serve(&config)?;
    let agents = [watch(&pair.client, &[])?, watch(&pair.server, &[])?];
    let pools = [0, 1].map(|_| {
        pair.client.pool(&PoolConfig {
            connections: CONNECTIONS,
            rate: 500.0,
            ..PoolConfig::new(pair.service())
        })
    });
    let live = |host: &Host| host.tcp_states().map_or(0, |t| t.count("ESTABLISHED"));
    ensure!(
        wait_for(30 * SECOND, || live(&pair.client) >= 2 * CONNECTIONS),
        "{} connections only",
        live(&pair.client)
    );
    // Requests arrive that nobody reads: their connections end by RST.
    server.process().signal(rustix::process::Signal::STOP);
    std::thread::sleep(3 * SECOND);
    server.process().kill9();
    let _server = pair.server.serve(&config)?;
    let resets = || -> Result<u64> { Ok(pair.truth()?.host("server").counters.rst_out) };
    ensure!(resets()? >= 1000, "{} resets only", resets()?);
    ensure!(
        wait_for(30 * SECOND, || live(&pair.client) >= 2 * CONNECTIONS),
        "{} connections again",
        live(&pair.client)
    );
    std::thread::sleep(5 * SECOND);
    for agent in &agents {
        // A SYN may come while nothing listens, and meet what is left of a connection before.
        only(agent, &["no_listener"])?;
    }
    let place = Place::responder(pair.client_address(), pair.service());
    let space = place.of(&fresh(&agents[1])?)?;
    ensure!(total(&space, "established") >= 3000, "{space}");
    for pool in pools {
        println!("{:?}", pool?.stop()?);
    }
    let figures = ["established", "syn_timeouts"];
    Row::quiet(
        "a deploy resets thousands of connections",
        "server",
        &space,
        &figures,
    )
    .record()
}
