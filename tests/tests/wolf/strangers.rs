//! Floods and scans: SYNs of hosts that never meant to talk.

use anyhow::{Context as _, Result, ensure};
use tuplewatch_tests::prelude::*;

use super::support::{SECOND, nothing_told, watch};
use super::{LONG, load, only};

/// Crafted SYNs from everywhere pile up half open beside an honest load.
#[test]
fn syn_flood() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let _server = pair.serve()?;
    let agents = [watch(&pair.client, &[])?, watch(&pair.server, &[])?];
    let honest = pair.client.load(&load(pair.service(), 5.0, 7, 5000))?;
    let flood = pair.client.rawsyn(&RawSynConfig {
        count: 1200,
        rate: 200.0,
        random_sources: true,
        ..RawSynConfig::new(pair.service(), Family::V4.nobody())
    })?;
    let told = agents[1]
        .wait_line(LONG, |line| {
            line["type"] == "look_alike" && line["name"] == "syn_flood"
        })
        .context("the flood is not named")?;
    println!("{}", told["summary"]);
    ensure!(told["server.port"] == pair.service().port(), "{told}");
    let report = honest.wait()?;
    ensure!(report.failures() == 0, "{report:?}");
    ensure!(flood.wait()?.sent == 1200);
    ensure!(pair.truth()?.host("server").counters.syn_in >= 1200);
    only(&agents[1], &["syn_flood"])?;
    only(&agents[0], &[])?;
    Row::told(
        "a SYN flood",
        "server",
        &told,
        &["half_open", "window_opens"],
    )
    .record()
}

/// One host tries two hundred ports of another; one of them is open.
#[test]
fn port_scan() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let agents = [watch(&pair.client, &[])?, watch(&pair.server, &[])?];
    let scan = pair.client.rawsyn(&RawSynConfig {
        count: 200,
        rate: 50.0,
        scan: Some(PortRange {
            low: 9000,
            high: 9199,
        }),
        ..RawSynConfig::new(pair.service(), pair.client_address())
    })?;
    let client = pair.client_address().to_string();
    let told = agents[0]
        .wait_line(LONG, |line| {
            line["type"] == "look_alike"
                && line["name"] == "port_scan"
                && line["client.address"] == client.as_str()
        })
        .context("the scan is not named")?;
    println!("{}", told["summary"]);
    ensure!(scan.wait()?.sent == 200);
    std::thread::sleep(2 * SECOND);
    ensure!(pair.server.snmp()?.get("TcpOutRsts") >= 200);
    only(&agents[0], &["port_scan"])?;
    nothing_told(&agents[1])?;
    Row::told("a port scan", "scanning host", &told, &["opens"]).record()
}
