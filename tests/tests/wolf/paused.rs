//! Clocks. Nobody looks for a while: the machine was suspended, or the agent did not get to run. What the kernel has counted
//! meanwhile arrives at once, and is no burst; an alert that fired is neither over nor new.

use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use rustix::process::Signal;
use tuplewatch_tests::prelude::*;

use super::support::{self, Place, SECOND, fresh, nothing_lost, nothing_told, watch};

/// Longer than one of the windows below, shorter than the other.
const PAUSE: Duration = Duration::from_secs(25);
/// Rules look at this; the pause is longer, so that the agent begins anew.
const SHORT: [&str; 2] = ["--set", "window=10s"];

/// The pause is longer than this too: an alert would be over if it counted.
const QUICK: [&str; 2] = ["--set", "alert.resolve=15s"];

/// Stops the agents for a while.
fn pause(agents: &[Agent]) {
    for agent in agents {
        agent.process().signal(Signal::STOP);
    }
    std::thread::sleep(PAUSE);
    for agent in agents {
        agent.process().signal(Signal::CONT);
    }
}

/// Both windows, in the same host.
fn both(host: &Host) -> Result<[Agent; 2]> {
    Ok([watch(host, &[])?, watch(host, &SHORT)?])
}

#[test]
fn a_pause_under_a_steady_load() -> Result<()> {
    const RATE: f64 = 40.0;
    let pair = Pair::new(PairConfig::default())?;
    let _server = pair.serve()?;
    let agents = [both(&pair.client)?, both(&pair.server)?];
    let load = pair.client.load(&LoadConfig {
        rate: RATE,
        ..LoadConfig::new(pair.service())
    })?;
    std::thread::sleep(12 * SECOND);
    let agents = agents.into_iter().flatten().collect::<Vec<_>>();
    let seen = agents.iter().map(|agent| Ok(agent.lines()?.len()));
    let seen = seen.collect::<Result<Vec<_>>>()?;
    pause(&agents);
    std::thread::sleep(12 * SECOND);
    let (client, service) = (pair.client_address(), pair.service());
    let places = [
        Place::initiator(client, service),
        Place::responder(client, service),
    ];
    for ((agent, seen), n) in agents.iter().zip(seen).zip(0..) {
        let place = &places[n / 2];
        let later = agent.lines()?.split_off(seen);
        let summaries = later.iter().filter(|line| line["type"] == "summary");
        let rates = summaries.map(|line| {
            let space = place.of(line)?;
            Ok(space["opens_per_second"].as_f64().unwrap_or(f64::NAN))
        });
        let rates = rates.collect::<Result<Vec<f64>>>()?;
        println!("{place:?}: {rates:?}");
        ensure!(rates.len() >= 8, "{later:#?}");
        // The long window also has the seconds before the load; the short one begins anew, and once more if the agent
        // was stopped in the middle of a look.
        let (low, high) = (RATE * 0.5, RATE * 1.3);
        ensure!(
            rates.iter().skip(3).all(|rate| (low..high).contains(rate)),
            "opens per second: {rates:?}"
        );
        ensure!(rates.iter().all(|rate| *rate < high), "{rates:?}");
        nothing_told(agent)?;
        nothing_lost(agent)?;
    }
    let report = load.stop()?;
    ensure!(report.failures() == 0, "{report:?}");
    let total = places[0].of(&fresh(&agents[0])?)?;
    ensure!(
        support::total(&total, "opens") == report.attempted,
        "{report:?}: {total}"
    );
    Ok(())
}

#[test]
fn a_pause_beside_an_alert() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    pair.client
        .sysctl("net.ipv4.ip_local_port_range", "40000 40063")?;
    pair.client.sysctl("net.ipv4.tcp_tw_reuse", 0)?;
    let _server = pair.server.serve(&ServeConfig::new(pair.service()))?;
    let agents = [
        watch(&pair.client, &QUICK)?,
        watch(&pair.client, &[SHORT, QUICK].concat())?,
    ];
    let load = pair.client.load(&LoadConfig {
        rate: 20.0,
        ..LoadConfig::new(pair.service())
    })?;
    let firing = |agent: &Agent| {
        agent.wait_alert(30 * SECOND, |line| {
            line["cause"] == "local_ephemeral" && line["state"] == "firing"
        })
    };
    let ids = agents
        .iter()
        .map(|agent| Ok(firing(agent)?["id"].clone()))
        .collect::<Result<Vec<_>>>()?;
    std::thread::sleep(2 * SECOND);
    let seen = agents.iter().map(|agent| Ok(agent.alerts()?.len()));
    let seen = seen.collect::<Result<Vec<_>>>()?;
    pause(&agents);
    // Long enough to be told again with new figures.
    std::thread::sleep(35 * SECOND);
    for ((agent, id), seen) in agents.iter().zip(ids).zip(seen) {
        let later = agent.alerts()?.split_off(seen);
        ensure!(!later.is_empty(), "it was not told again");
        for line in &later {
            ensure!(
                line["id"] == id && line["state"] == "firing",
                "after the pause: {line}"
            );
        }
        let summary = fresh(agent)?;
        let live = summary["alerts"].as_array().into_iter().flatten();
        ensure!(live.collect::<Vec<_>>() == [&id], "{summary}");
    }
    load.stop()?;
    Ok(())
}

/// An agent in a time namespace, whose monotonic clock is a day ahead of the kernel's own: what the programs tell
/// of this second is not a day old.
#[test]
fn a_clock_of_its_own() -> Result<()> {
    let incident = Incident::new(IncidentConfig::default())?;
    let _server = incident.serve()?;
    let config = AgentConfig::with_args(["--summary-interval", "1s"]);
    let mut command = Command::new("unshare");
    command.args(["--time", "--monotonic", "100000"]);
    command.arg(config.binary()?);
    let agent = incident.server.agent_as(command, config)?;
    agent.wait_ready(60 * SECOND)?;
    let own = std::fs::read_link("/proc/self/ns/time")?;
    ensure!(std::fs::read_link(format!("/proc/{}/ns/time", agent.pid()))? != own);
    let loads = incident.load(20.0, 25 * SECOND)?;
    let fired = agent.wait_alert(40 * SECOND, support::firing)?;
    println!("{}", fired["summary"]);
    for load in loads {
        load.stop()?;
    }
    Ok(())
}
