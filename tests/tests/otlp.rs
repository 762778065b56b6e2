//! OTLP against a real receiver, rotel: what arrives has the right values, units, temporality and
//! resource; without an endpoint nothing is sent.

#[path = "otlp/check.rs"]
mod check;
#[path = "otlp/quiet.rs"]
mod quiet;
#[path = "otlp/rotel.rs"]
mod rotel;
mod support;

use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Result, ensure};
use quiet::{outward_sockets, sent};
use rotel::{Point, Receiver};
use support::{SECOND, firing, is_reuse, resolved, watch};
use tuplewatch_tests::prelude::*;

/// Connections per second of each of the two clients.
const RATE: f64 = 20.0;
/// Long enough for the pool of 200 ports to be handed out twice.
const TIME: Duration = Duration::from_secs(12);

/// An agent in `host` that exports once per `interval`.
fn exporting(host: &Host, protocol: &str, interval: &str) -> Result<Agent> {
    watch(
        host,
        &[
            "--otlp-endpoint",
            Receiver::endpoint(protocol),
            "--otlp-protocol",
            protocol,
            "--otlp-interval",
            interval,
            "--set",
            "alert.resolve=8s",
            "--set",
            "alert.repeat=2s",
        ],
    )
}

/// Runs the incident to its end with an agent that exports, and checks what arrived.
fn incident_arrives(protocol: &str) -> Result<()> {
    let incident = Incident::new(IncidentConfig::default())?;
    let receiver = Receiver::start(&incident.server)?;
    let _server = incident.serve()?;
    let agent = exporting(&incident.server, protocol, "1s")?;
    for load in incident.load(RATE, TIME)? {
        load.wait()?;
    }
    incident.settle(SECOND, 60 * SECOND)?;
    agent.wait_alert(90 * SECOND, resolved)?;
    let truth = incident.truth()?;
    let status = agent.terminate()?;
    assert!(status.success(), "{}", agent.process().describe());
    let received = receiver.stop()?;
    let counters = &truth.host("server").counters;
    assert!(counters.bareack_to_syn_out > 0, "{counters:?}");
    check::alerts(&incident, counters, &agent, &received)?;
    check::counters(&incident, counters, &received)?;
    check::levels(&incident, &received)?;
    check::series(&received)?;
    check::resource(&agent, &received)
}

#[test]
fn the_incident_arrives_by_grpc() -> Result<()> {
    incident_arrives("grpc")
}

#[test]
fn the_incident_arrives_by_http() -> Result<()> {
    incident_arrives("http/protobuf")
}

/// Nobody listens when the alert fires: it is kept, and arrives when the receiver does.
#[test]
fn the_alert_waits_for_the_receiver() -> Result<()> {
    let incident = Incident::new(IncidentConfig::default())?;
    let _server = incident.serve()?;
    let agent = exporting(&incident.server, "grpc", "1s")?;
    let loads = incident.load(RATE, TIME)?;
    agent.wait_alert(40 * SECOND, firing)?;
    // An attempt has failed by then.
    let told = |line: &str| line.contains("does not take alerts");
    let stderr = agent.process().find_stderr(0, 15 * SECOND, told);
    ensure!(stderr.is_some(), "{}", agent.process().describe());
    let before = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos();
    let receiver = Receiver::start(&incident.server)?;
    let record = receiver.wait_record(30 * SECOND, |record| record.is_reuse("firing"))?;
    assert!(u128::from(record.timestamp) < before, "{record:#?}");
    for load in loads {
        load.wait()?;
    }
    incident.settle(SECOND, 60 * SECOND)?;
    support::fresh(&agent)?;
    let truth = incident.truth()?;
    let status = agent.terminate()?;
    assert!(status.success(), "{}", agent.process().describe());
    let received = receiver.stop()?;
    let lines = agent.alerts()?;
    let records = received.records.iter();
    let records = records.filter(|r| r.event == "tuplewatch.alert").count();
    assert_eq!(records, lines.iter().filter(|a| is_reuse(a)).count());
    // Totals heal by themselves, and the failures are told.
    check::counters(&incident, &truth.host("server").counters, &received)?;
    let failed = received.last("tuplewatch.exports.failed")?;
    for signal in ["metrics", "logs"] {
        let attributes = [("tuplewatch.signal".to_owned(), format!("Str({signal})"))];
        let failed = failed.value(&attributes.into())?;
        assert!(failed > 0, "{signal}");
    }
    Ok(())
}

/// The end sends what no export has sent yet.
#[test]
fn the_end_sends_what_is_left() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let _server = pair
        .server
        .serve(&ServeConfig::closing_first(pair.service()))?;
    for protocol in ["grpc", "http/protobuf"] {
        let receiver = Receiver::start(&pair.server)?;
        let agent = exporting(&pair.server, protocol, "1h")?;
        let load = LoadConfig {
            count: Some(20),
            rate: 50.0,
            ..LoadConfig::new(pair.service())
        };
        assert_eq!(pair.client.load(&load)?.wait()?.ok, 20);
        assert_eq!(receiver.received().metrics.len(), 0, "{protocol}: early");
        let status = agent.terminate()?;
        assert!(status.success(), "{}", agent.process().describe());
        let received = receiver.stop()?;
        let opens = received.last("tuplewatch.opens")?;
        let wire = |point: &&Point| {
            let point = point.attributes.get("tuplewatch.point");
            point.is_some_and(|name| name == "Str(wire)")
        };
        let wire: Vec<_> = opens.points.iter().filter(wire).collect();
        assert_eq!(wire.len(), 1, "{protocol}: {opens:#?}");
        assert_eq!(wire[0].value, "20", "{protocol}");
    }
    Ok(())
}

/// Without an endpoint the agent opens nothing but its pages on loopback, although it could reach
/// somebody.
#[test]
fn nothing_is_opened_without_an_endpoint() -> Result<()> {
    let lab = Lab::new()?;
    let (host, router) = (lab.host("host")?, lab.host("router")?);
    lab.link(
        &LinkEnd::new(&host, "eth0", &["10.88.9.2/24", "fd88:9::2/64"]),
        &LinkEnd::new(&router, "eth0", &["10.88.9.1/24", "fd88:9::1/64"]),
    )?;
    host.route_via(None, "10.88.9.1".parse()?)?;
    host.route_via(None, "fd88:9::1".parse()?)?;
    let before = sent(&host)?;
    let agent = watch(&host, &[])?;
    for _ in 0..25 {
        let outward = outward_sockets(agent.pid())?;
        ensure!(outward.is_empty(), "sockets {outward:?} of the agent");
        std::thread::sleep(SECOND / 5);
    }
    let table = host.tcp_states()?;
    let listeners: Vec<_> = table.in_state("LISTEN").map(|row| row.local).collect();
    assert_eq!(listeners, ["127.0.0.1:9464".parse()?]);
    assert!(agent.terminate()?.success());
    // Without the pages there is no listener at all.
    let agent = watch(&host, &["--no-http"])?;
    assert_eq!(host.tcp_states()?.count("LISTEN"), 0);
    assert!(agent.terminate()?.success());
    assert_eq!(sent(&host)?, before, "TCP opens, IP packets, UDP over IPv6");
    // The look would have noticed it: with an endpoint where nobody listens the agent tries.
    let agent = exporting(&host, "http/protobuf", "1s")?;
    let tried = || sent(&host).is_ok_and(|now| now[0] > before[0] && now[1] > before[1]);
    assert!(
        wait_for(10 * SECOND, tried),
        "{}",
        agent.process().describe()
    );
    let receiver = Receiver::start(&host)?;
    let connected = || outward_sockets(agent.pid()).is_ok_and(|sockets| !sockets.is_empty());
    assert!(
        wait_for(10 * SECOND, connected),
        "{}",
        agent.process().describe()
    );
    drop(receiver);
    Ok(())
}

/// `tuplewatch run` and nothing else: no option, no variable, no file, no network but loopback.
#[test]
fn a_bare_run_needs_nothing() -> Result<()> {
    let lab = Lab::new()?;
    let host = lab.host("alone")?;
    // The same program as everywhere, wherever the lab finds it.
    let binary = {
        let agent = host.agent(AgentConfig::default())?;
        agent.wait_ready(60 * SECOND)?;
        let binary = std::fs::read_link(format!("/proc/{}/exe", agent.pid()))?;
        assert!(agent.terminate()?.success());
        binary
    };
    let empty = tempfile::tempdir()?;
    let before = sent(&host)?;
    let mut command = Command::new(binary);
    command.arg("run").env_clear().current_dir(empty.path());
    let agent = host.spawn("tuplewatch", command)?;
    let starts = |line: &str| line.starts_with("tuplewatch ") && line.contains(" watches ");
    ensure!(
        agent.find_stdout(0, 20 * SECOND, starts).is_some(),
        "{}",
        agent.describe()
    );
    for _ in 0..10 {
        let outward = outward_sockets(agent.pid())?;
        ensure!(outward.is_empty(), "sockets {outward:?} of the agent");
        std::thread::sleep(SECOND / 5);
    }
    ensure!(agent.is_running(), "{}", agent.describe());
    assert!(agent.terminate(10 * SECOND)?.success());
    assert_eq!(sent(&host)?, before, "TCP opens, IP packets, UDP over IPv6");
    assert_eq!(agent.stderr(), Vec::<String>::new());
    Ok(())
}
