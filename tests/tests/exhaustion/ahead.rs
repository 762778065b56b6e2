//! Cause `forecast`: this host will have no source port left.

use anyhow::{Context as _, Result, ensure};
use tuplewatch_tests::prelude::*;

use super::support::SECOND;
use super::{FewPorts, is_cause, race};

/// Three more connections a second stay open, out of 300 ports: they are gone after 100 s, and that is
/// foretold at least 20 s before.
#[test]
fn a_ramp_is_foretold() -> Result<()> {
    let scene = FewPorts::new(300)?;
    let load = scene.load(LoadConfig {
        rate: 3.0,
        hold_ms: 150_000,
        concurrency: 400,
        ..LoadConfig::new(scene.pair.service())
    })?;
    let place = scene.place();
    let (first, said, told) = race(&load, &scene.agent, 130 * SECOND, |line| {
        is_cause(line, "forecast") && place.is(line) && line["state"] == "firing"
    })?;
    println!("{}", told["summary"]);
    let before = first.saturating_duration_since(said);
    println!("{before:?} before the first failed connect()");
    ensure!(before >= 20 * SECOND, "only {before:?} before");
    let outlook = &told["evidence"]["outlook"];
    let foretold = outlook["exhausted_in_seconds"].as_f64().context("a time")?;
    let error = (foretold - before.as_secs_f64()).abs();
    ensure!(
        error <= 15.0,
        "foretold {foretold} s before, it was {before:?}"
    );
    ensure!(told["severity"] == "warning", "{told}");
    ensure!(told["opened_by"][0]["pid"] == load.pid(), "{told}");
    load.process().kill9();
    let figures = [
        "budget.in_use",
        "outlook.rise_per_second",
        "outlook.exhausted_in_seconds",
        "no_local_port",
    ];
    Row::told(
        "connections that stay open use the local ports up, slowly",
        "client",
        &told,
        &figures,
    )
    .record()
}
