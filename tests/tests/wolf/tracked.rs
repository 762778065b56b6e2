//! A full table of tracked connections: packets of new ones are dropped on the host itself.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use tuplewatch_tests::prelude::*;

use super::support::{Place, SECOND, number, watch};
use super::{load, named, only};

const FULL: &str = "conntrack_full";

/// Connections are served, then the table of one end is full.
fn fill(pair: &Pair, full: &Host) -> Result<()> {
    full.track_connections()?;
    let honest = load(pair.service(), 10.0, 2, 2000);
    ensure!(pair.client.load(&honest)?.wait()?.failures() == 0);
    let (_, most) = full.tracked()?;
    full.track(most)
}

/// The counters that the finding shows.
fn shown(line: &Value, name: &str) -> Result<u64> {
    let counters = line["evidence"]["counters"]
        .as_array()
        .context("counters")?;
    let found = counters.iter().find(|c| c["name"] == name);
    Ok(number(
        found.with_context(|| format!("no {name}: {line}"))?,
        "value",
    ))
}

fn is_proven(told: &Value, full: &Host) -> Result<()> {
    let (count, most) = full.tracked()?;
    ensure!(shown(told, "nf_conntrack drop")? > 0, "{told}");
    ensure!(
        shown(told, "nf_conntrack_max")? == u64::from(most),
        "{told}"
    );
    let entries = shown(told, "nf_conntrack_count")?;
    ensure!(entries * 100 >= u64::from(most) * 95, "{count} now: {told}");
    Ok(())
}

/// The server's table: its SYNs arrive and get no answer.
#[test]
fn conntrack_is_full_at_the_server() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let _server = pair.serve()?;
    let agents = [watch(&pair.client, &[])?, watch(&pair.server, &[])?];
    fill(&pair, &pair.server)?;
    let load = pair.client.load(&load(pair.service(), 10.0, 12, 2000))?;
    let (client, service) = (pair.client_address(), pair.service());
    let told = named(&agents[1], FULL, &Place::responder(client, service))?;
    is_proven(&told, &pair.server)?;
    ensure!(load.stop()?.failures() > 0);
    only(&agents[1], &[FULL])?;
    only(&agents[0], &["unknown_connect_loss", "service_down"])?;
    Row::told(
        "the table of tracked connections is full",
        "server",
        &told,
        &["syn_retransmits", "refused_syns"],
    )
    .record()
}

/// The client's own: its SYNs never leave it, so that its sockets tell.
#[test]
fn conntrack_is_full_at_the_client() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let _server = pair.serve()?;
    let agent = watch(&pair.client, &[])?;
    fill(&pair, &pair.client)?;
    let load = pair.client.load(&load(pair.service(), 10.0, 12, 2000))?;
    let (client, service) = (pair.client_address(), pair.service());
    let told = named(&agent, FULL, &Place::socket(client, service))?;
    is_proven(&told, &pair.client)?;
    std::thread::sleep(SECOND);
    ensure!(load.stop()?.failures() > 0);
    only(&agent, &[FULL])?;
    Row::told(
        "the table of tracked connections is full",
        "client",
        &told,
        &["loss.lost", "loss.live", "refused_syns"],
    )
    .record()
}
