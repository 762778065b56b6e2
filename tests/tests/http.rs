//! The pages of the agent, from inside its host: during the incident they are valid and tell what the
//! JSON lines tell; a port that is taken and clients that dawdle do no harm.

#[path = "http/page.rs"]
mod page;
mod support;

use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use page::{DEFAULT, Page, Samples, dawdle, promtool};
use serde_json::Value;
use support::{Place, SECOND, firing, fresh, number, resolved, total, watch};
use tuplewatch_tests::prelude::*;

/// Connections per second of each of the two clients.
const RATE: f64 = 20.0;
/// Long enough for the pool of 200 ports to be handed out twice.
const TIME: Duration = Duration::from_secs(12);

/// The alert of the incident on `/status`.
fn alert(status: &Value) -> Option<&Value> {
    let alerts = status["alerts"].as_array()?;
    alerts
        .iter()
        .find(|a| a["cause"] == "l4_reuse_in_time_wait")
}

/// The labels of a port space.
fn labels(place: &Place) -> String {
    format!(
        "client_address=\"{}\",server_address=\"{}\",server_port=\"{}\",tuplewatch_role=\"{}\",\
         tuplewatch_point=\"{}\"",
        place.client,
        place.service.ip(),
        place.service.port(),
        place.role,
        place.point
    )
}

#[test]
fn the_pages_tell_the_incident() -> Result<()> {
    let incident = Incident::new(IncidentConfig::default())?;
    let host = &incident.server;
    let _server = incident.serve()?;
    let agent = watch(
        host,
        &["--set", "alert.resolve=8s", "--set", "alert.repeat=2s"],
    )?;
    let loads = incident.load(RATE, TIME)?;
    let line = agent.wait_alert(40 * SECOND, firing)?;

    // While it lasts.
    let health = Page::get(host, DEFAULT, "/healthz")?;
    assert_eq!((health.code, health.body.as_str()), (200, "ok\n"));
    let status = Page::get(host, DEFAULT, "/status")?.json()?;
    let shown = alert(&status).context("no alert on /status")?;
    for name in [
        "id",
        "signature",
        "client.address",
        "server.port",
        "firing_since",
    ] {
        assert_eq!(shown[name], line[name], "{name}");
    }
    assert_eq!(shown["state"], "firing");
    assert!(number(&shown["evidence"], "refused_syns") >= 5, "{shown}");
    assert!(
        shown["ruled_out"].as_array().is_some_and(|r| !r.is_empty()),
        "{shown}"
    );
    assert!(
        shown["remedy"].as_str().is_some_and(|r| !r.is_empty()),
        "{shown}"
    );
    for hook in status["hooks"].as_array().context("hooks")? {
        assert_eq!(hook["state"], "ok", "{hook}");
    }
    assert_eq!(status["interfaces"], serde_json::json!(["eth0"]));
    assert_eq!(status["healthy"], true);
    assert_eq!(number(&status, "pid"), u64::from(agent.pid()));
    for loss in status["losses"].as_array().context("losses")? {
        assert_eq!(loss["count"], 0, "{loss}");
    }
    let mut before = Samples::default();
    for _ in 0..3 {
        let page = Page::get(host, DEFAULT, "/metrics")?;
        assert_eq!(page.code, 200, "{}", page.body);
        assert_eq!(
            page.header("content-type"),
            Some("text/plain; version=0.0.4; charset=utf-8")
        );
        promtool(&page.body)?;
        let now = Samples::parse(&page.body)?;
        now.never_behind(&before)?;
        before = now;
        std::thread::sleep(SECOND);
    }
    let firing = "tuplewatch_alerts{tuplewatch_signature=\"port_exhaustion\",\
                  tuplewatch_cause=\"l4_reuse_in_time_wait\",tuplewatch_severity=\"warning\",\
                  tuplewatch_alert_state=\"firing\"}";
    assert_eq!(before.get(firing)?, 1.0);

    // When all is over every figure is that of the ground truth, and of the JSON lines.
    for load in loads {
        load.wait()?;
    }
    incident.settle(SECOND, 60 * SECOND)?;
    agent.wait_alert(90 * SECOND, resolved)?;
    let summary = fresh(&agent)?;
    let status = Page::get(host, DEFAULT, "/status")?.json()?;
    let metrics = Page::get(host, DEFAULT, "/metrics")?;
    promtool(&metrics.body)?;
    let metrics = Samples::parse(&metrics.body)?;
    metrics.never_behind(&before)?;
    assert!(
        alert(&status).is_none(),
        "it has resolved: {:#?}\n{status}",
        agent.alerts()?
    );
    assert_eq!(metrics.get(firing)?, 0.0);
    let place = Place::responder(incident.nat_address(), incident.service());
    let (told, shown) = (place.of(&summary)?, place.of(&status)?);
    println!("{told}");
    for name in ["totals", "ports_seen", "budget"] {
        assert_eq!(shown[name], told[name], "{name}");
    }
    let truth = incident.truth()?;
    let counters = &truth.host("server").counters;
    assert!(counters.bareack_to_syn_out > 0, "{counters:?}");
    let labels = labels(&place);
    for (metric, total_name, truth) in [
        (
            "opens_total",
            "opens",
            counters.syn_in - counters.syn_repeat_in,
        ),
        (
            "syn_retransmits_total",
            "syn_retransmits",
            counters.syn_repeat_in,
        ),
        (
            "bare_ack_resets_total",
            "rsts_after_bare_ack",
            counters.rst_to_syn_in,
        ),
    ] {
        let series = format!("tuplewatch_{metric}{{{labels}}}");
        assert_eq!(metrics.get(&series)?, truth as f64, "{series}");
        assert_eq!(total(&told, total_name), truth, "{total_name}");
    }
    let refused = format!("tuplewatch_bare_acks_total{{{labels},tuplewatch_former=\"closed\"}}");
    assert_eq!(metrics.get(&refused)?, counters.bareack_to_syn_out as f64);
    let budget = format!("tuplewatch_ports_budget{{{labels}}}");
    assert_eq!(metrics.get(&budget)?, 200.0, "the NAT's pool");
    // Each handshake is in the histogram once.
    let handshakes = format!("tuplewatch_handshake_duration_seconds_count{{{labels}}}");
    assert_eq!(
        metrics.get(&handshakes)?,
        total(&told, "established") as f64
    );
    assert!(agent.terminate()?.success());
    Ok(())
}

/// Runs an agent to its end, which must come by itself; gives exit code and standard error.
fn refused(host: &Host, binary: &std::path::Path, args: &[&str]) -> Result<(Option<i32>, String)> {
    let mut command = Command::new(binary);
    command.args(["run", "--format", "json"]).args(args);
    let output = host.exec_command(command, None)?;
    Ok((output.status.code(), output.stderr))
}

/// Two agents in one host: the second one works, says what it lacks, and can be told to go elsewhere.
#[test]
fn a_port_that_is_taken_is_no_harm_unless_asked_for() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let host = &pair.server;
    let first = watch(host, &[])?;
    assert_eq!(first.stderr(), Vec::<String>::new());
    let second = watch(host, &[])?;
    let warned = |line: &str| line.contains("127.0.0.1:9464") && line.contains("--http");
    ensure!(
        second.process().find_stderr(0, SECOND, warned).is_some(),
        "{}",
        second.process().describe()
    );
    fresh(&second)?;
    let status = Page::get(host, DEFAULT, "/status")?.json()?;
    assert_eq!(number(&status, "pid"), u64::from(first.pid()));
    assert!(second.terminate()?.success());

    let third = watch(host, &["--http", "9465"])?;
    fresh(&third)?;
    let status = Page::get(host, "127.0.0.1:9465".parse()?, "/status")?.json()?;
    assert_eq!(number(&status, "pid"), u64::from(third.pid()));
    assert_eq!(third.stderr(), Vec::<String>::new());

    let binary = std::fs::read_link(format!("/proc/{}/exe", first.pid()))?;
    let (code, told) = refused(host, &binary, &["--http", "127.0.0.1:9464"])?;
    assert_eq!(code, Some(78), "{told}");
    assert!(
        told.contains("127.0.0.1:9464") && told.contains("in use"),
        "{told}"
    );
    // An address of another host.
    let (code, told) = refused(host, &binary, &["--http", "192.0.2.1:9464"])?;
    assert_eq!(code, Some(78), "{told}");
    assert!(told.contains("192.0.2.1:9464"), "{told}");
    let (code, told) = refused(host, &binary, &["--http", "localhost:9464"])?;
    assert_eq!(code, Some(2), "{told}");
    assert!(told.contains("127.0.0.1:9464"), "an example: {told}");
    let (code, told) = refused(host, &binary, &["--http", "9466", "--no-http"])?;
    assert_eq!(code, Some(2), "{told}");

    assert!(first.terminate()?.success());
    assert!(third.terminate()?.success());
    let silent = watch(host, &["--no-http"])?;
    fresh(&silent)?;
    assert_eq!(host.tcp_states()?.count("LISTEN"), 0);
    assert!(silent.terminate()?.success());
    Ok(())
}

/// More clients than there are places send half a request: the agent goes on looking meanwhile, and
/// whoever is honest is served when they have been cut off.
#[test]
fn clients_that_dawdle_do_not_hold_the_agent() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let host = &pair.server;
    let agent = watch(host, &[])?;
    fresh(&agent)?;
    let slow = dawdle(host, DEFAULT, 40)?;
    let before = agent.of_type("summary")?.len();
    std::thread::sleep(5 * SECOND);
    let looks = agent.of_type("summary")?.len() - before;
    assert!((4..=6).contains(&looks), "{looks} looks in five seconds");
    // Ten seconds for each of the forty in turn of sixteen, at most.
    let served = wait_some(40 * SECOND, || Page::get(host, DEFAULT, "/healthz").ok());
    assert_eq!(served.context("nobody is served any more")?.code, 200);
    drop(slow);
    assert!(agent.terminate()?.success());
    Ok(())
}
