//! Cause `tuple_collision`: SYNs meet live connections of the same client address and port, as behind a
//! balancer that brings clients over two ways and keeps their addresses.

use anyhow::{Result, ensure};
use tuplewatch_tests::prelude::*;

use super::is_cause;
use super::support::{Place, SECOND, number, watch};

/// Twelve ports, one live connection on each, and a second SYN for it. The lab's client forgets the
/// first connection without a word, which is what the server sees when the second one takes another way.
#[test]
fn syns_meet_live_connections() -> Result<()> {
    const PORTS: u16 = 12;
    let pair = Pair::new(PairConfig::default())?;
    let _server = pair.serve()?;
    let agent = watch(&pair.server, &[])?;
    let peers = (50_001..=50_000 + PORTS)
        .map(|port| {
            pair.client.fixed(&FixedConfig {
                abandon: true,
                times: 2,
                pause_ms: 1000,
                ..FixedConfig::new(pair.service(), port)
            })
        })
        .collect::<Result<Vec<_>>>()?;
    let place = Place::responder(pair.client_address(), pair.service());
    let told = agent.wait_alert(30 * SECOND, |line| {
        is_cause(line, "tuple_collision") && place.is(line) && line["state"] == "firing"
    })?;
    println!("{}", told["summary"]);
    for peer in peers {
        ensure!(peer.wait()?.ok == 2);
    }
    let truth = pair.truth()?;
    ensure!(truth.host("server").counters.bareack_to_syn_out == u64::from(PORTS));
    ensure!(truth.kernel_sum(&["server"], "TcpEstabResets") == i64::from(PORTS));
    let collisions = &told["evidence"]["collisions"];
    ensure!(number(collisions, "live") >= 10, "{told}");
    ensure!(told["severity"] == "critical", "{told}");
    let alerts = agent.alerts()?;
    ensure!(
        alerts.iter().all(|a| is_cause(a, "tuple_collision")),
        "{alerts:#?}"
    );
    let figures = ["refused_while_open", "collisions.live", "collisions.stale"];
    Row::told(
        "SYNs meet live connections on the same ports",
        "server",
        &told,
        &figures,
    )
    .record()
}
