//! What must not bring the agent down or leave anything behind: a flood, a full ring buffer, a kill.

mod support;

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use support::kernel::{Held, is_hooked, resident_kib};
use support::{
    Place, SECOND, firing, fresh, is_reuse, look_alikes, no_alert, number, total, watch,
};
use tuplewatch_tests::prelude::*;

/// 100,000 SYNs from random sources while an honest client works: memory stays, the client is counted
/// to the last connection, and nothing of the flood is kept.
#[test]
fn a_flood_of_syns() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let _server = pair.serve()?;
    let agent = watch(&pair.server, &[])?;
    let place = Place::responder(pair.client_address(), pair.service());
    let honest = LoadConfig {
        rate: 40.0,
        count: Some(400),
        connect_timeout_ms: 20_000,
        ..LoadConfig::new(pair.service())
    };
    let load = pair.client.load(&honest)?;
    let works = || fresh(&agent).and_then(|s| place.of(&s)).is_ok();
    assert!(wait_for(10 * SECOND, works));
    let before = resident_kib(agent.pid())?;
    let flood = RawSynConfig {
        count: 100_000,
        rate: 0.0,
        random_sources: true,
        ..RawSynConfig::new(pair.service(), Family::V4.nobody())
    };
    let report = pair.client.rawsyn(&flood)?.wait()?;
    println!("{} SYNs in {:.1} s", report.sent, report.seconds);
    assert_eq!(report.sent, 100_000);
    let during = fresh(&agent)?;
    let report = load.wait()?;
    println!("honest: {report:?}");
    assert_eq!(report.connected, 400);
    let after = fresh(&agent)?;
    println!("{after}");
    let space = place.of(&after)?;
    assert_eq!(total(&space, "opens"), 400, "{space}");
    assert_eq!(total(&space, "established"), 400, "{space}");
    assert_eq!(total(&space, "bare_acks"), 0, "{space}");
    for summary in [during, after] {
        assert_eq!(number(&summary, "known_spaces"), 1, "{summary}");
        assert_eq!(number(&summary["globals"], "port_spaces_full"), 0);
    }
    let grown = resident_kib(agent.pid())?.saturating_sub(before);
    println!("resident: {before} KiB, {grown} KiB more after the flood");
    assert!(grown < 8 * 1024, "{grown} KiB more");
    // What the flood left is given up: half a minute at the latest.
    let held = Held::by(agent.pid())?;
    let pending = || held.taken("HANDSHAKE_TAGS");
    println!("{} handshakes wait", pending()?);
    assert!(
        wait_for(60 * SECOND, || pending().is_ok_and(|n| n == 0)),
        "{:?} handshakes wait for ever",
        pending()
    );
    no_alert(&agent)?;
    let named = look_alikes(&agent)?;
    ensure!(named.iter().all(|name| name == "syn_flood"), "{named:?}");
    Ok(())
}

/// The agent sleeps through the incident with the smallest ring buffer: events are lost and told as
/// such, the counters live in maps and stay exact, the alert is raised.
#[test]
fn a_full_ring_buffer() -> Result<()> {
    let incident = Incident::new(IncidentConfig::default())?;
    let _server = incident.serve()?;
    let agent = watch(
        &incident.server,
        &["--ring-buffer", "4", "--set", "alert.repeat=1s"],
    )?;
    let refused = || -> Result<u64> {
        let truth = incident.truth()?;
        Ok(truth.host("server").counters.bareack_to_syn_out)
    };
    let loads = incident.load(20.0, 20 * SECOND)?;
    assert!(wait_for(20 * SECOND, || refused().is_ok_and(|n| n >= 1)));
    agent.process().signal(Signal::STOP);
    let before = refused()?;
    assert!(wait_for(30 * SECOND, || {
        refused().is_ok_and(|n| n >= before + 80)
    }));
    agent.process().signal(Signal::CONT);
    let loss = agent.wait_line(20 * SECOND, |line| {
        line["type"] == "loss" && line["name"] == "events_lost"
    })?;
    println!("{loss}");
    assert!(number(&loss, "count") > 0);
    let alert = agent.wait_alert(20 * SECOND, firing)?;
    println!("{}", alert["summary"]);
    for load in loads {
        load.wait()?;
    }
    incident.settle(SECOND, 60 * SECOND)?;
    let server = incident.truth()?.host("server").counters;
    let place = Place::responder(incident.nat_address(), incident.service());
    let summary = fresh(&agent)?;
    let space = place.of(&summary)?;
    assert_eq!(total(&space, "bare_acks"), server.bareack_to_syn_out);
    assert_eq!(total(&space, "rsts_after_bare_ack"), server.rst_to_syn_in);
    assert_eq!(total(&space, "syn_retransmits"), server.syn_repeat_in);
    assert_eq!(
        number(&summary["globals"], "events_lost"),
        agent
            .of_type("loss")?
            .iter()
            .filter(|line| line["name"] == "events_lost")
            .map(|line| number(line, "new"))
            .sum::<u64>()
    );
    let last = agent
        .alerts()?
        .into_iter()
        .rfind(is_reuse)
        .context("an alert")?;
    assert_eq!(
        number(&last["evidence"], "refused_syns"),
        server.bareack_to_syn_out,
        "{last}"
    );
    Ok(())
}

/// Killed in the middle of the incident: the kernel frees all of it, the next agent raises the alert
/// again, and leaves nothing either.
#[test]
fn killed_and_started_again() -> Result<()> {
    let incident = Incident::new(IncidentConfig::default())?;
    let _server = incident.serve()?;
    let first = watch(&incident.server, &[])?;
    let loads = incident.load(20.0, 25 * SECOND)?;
    let alert = first.wait_alert(30 * SECOND, firing)?;
    let held = Held::by(first.pid())?;
    println!("{held:?}");
    assert!(!held.programs.is_empty() && !held.maps.is_empty() && !held.links.is_empty());
    assert!(is_hooked(&incident.server, "eth0"));
    first.kill9();
    assert!(
        wait_for(20 * SECOND, || held.is_gone()),
        "left after SIGKILL: {:?}",
        held.left()?
    );
    assert_eq!(chains(&incident.server)?, 0, "on eth0 after SIGKILL");

    let second = watch(&incident.server, &[])?;
    let again = second.wait_alert(30 * SECOND, firing)?;
    println!("{}", again["summary"]);
    assert_eq!(again["id"], alert["id"]);
    assert_eq!(chains(&incident.server)?, 2, "one program on each side");
    for load in loads {
        load.wait()?;
    }
    let held = Held::by(second.pid())?;
    let started = Instant::now();
    let status = second.terminate()?;
    println!("ended after {:?}", started.elapsed());
    assert_eq!(status.code(), Some(0), "{}", second.process().describe());
    assert!(started.elapsed() < 5 * SECOND);
    assert!(
        wait_for(20 * SECOND, || held.is_gone()),
        "left after SIGTERM: {:?}",
        held.left()?
    );
    assert_eq!(chains(&incident.server)?, 0, "on eth0 after SIGTERM");
    Ok(())
}

/// How many programs stand on both sides of the server's interface.
fn chains(host: &Host) -> Result<usize> {
    use aya::programs::TcAttachType::{Egress, Ingress};
    Ok(support::kernel::chain(host, "eth0", Ingress)?.len()
        + support::kernel::chain(host, "eth0", Egress)?.len())
}

/// SIGTERM while nothing goes on, right after the start, and twice: always exit code 0.
#[test]
fn ends_when_told() -> Result<()> {
    let lab = Lab::new()?;
    let host = lab.host("host")?;
    for wait in [0, 1500] {
        let agent = host.agent(AgentConfig::default())?;
        agent.wait_ready(60 * SECOND)?;
        std::thread::sleep(Duration::from_millis(wait));
        let held = Held::by(agent.pid())?;
        let started = Instant::now();
        agent.process().signal(Signal::TERM);
        let status = agent.terminate()?;
        assert_eq!(status.code(), Some(0), "{}", agent.process().describe());
        assert!(started.elapsed() < 5 * SECOND, "{:?}", started.elapsed());
        assert!(
            wait_for(20 * SECOND, || held.is_gone()),
            "{:?}",
            held.left()?
        );
        let last = agent.lines()?.pop().context("a last line")?;
        assert_eq!(last["type"], "summary", "the last word is a summary");
    }
    Ok(())
}
