//! Opens without answer, for reasons on the way.

use anyhow::{Result, ensure};
use tuplewatch_tests::prelude::*;

use super::support::{Place, SECOND, fresh, number, total, watch};
use super::{load, named, only};

/// Packets are lost, those of established connections too: named at the client.
fn lossy(percent: u32, connections: u64) -> Result<()> {
    let routed = Routed::new(RoutedConfig {
        loss_percent: percent,
        ..RoutedConfig::default()
    })?;
    let _server = routed.serve()?;
    let agents = [watch(&routed.client, &[])?, watch(&routed.server, &[])?];
    let config = LoadConfig {
        count: Some(connections),
        concurrency: 400,
        ..load(routed.service(), 50.0, 60, 30_000)
    };
    // Connections that live on lose packets as well.
    let kept = routed.client.pool(&PoolConfig {
        connections: 16,
        rate: 60.0,
        ..PoolConfig::new(routed.service())
    })?;
    let report = routed.client.load(&config)?.wait()?;
    println!("{report:?} {:?}", kept.stop()?);
    ensure!(report.with_syn_retransmits >= 5, "{report:?}");
    ensure!(routed.truth()?.kernel_sum(&["client"], "TcpRetransSegs") > 10);
    let place = Place::initiator(routed.client_address(), routed.service());
    let told = named(&agents[0], "packet_loss", &place)?;
    // While many SYNs wait for their next turn at once, nothing tells more than that they are lost.
    only(&agents[0], &["packet_loss", "unknown_connect_loss"])?;
    only(&agents[1], &["packet_loss"])?;
    let figures = ["syn_retransmits", "loss.data_retransmits", "refused_syns"];
    let scenario = format!("{percent} % of the packets are lost each way");
    Row::told(&scenario, "client", &told, &figures).record()
}

#[test]
fn three_percent_loss() -> Result<()> {
    lossy(3, 400)
}

#[test]
fn twenty_percent_loss() -> Result<()> {
    lossy(20, 120)
}

/// A filter drops every SYN to one port from the first on; another port of the same host answers.
#[test]
fn firewall_drop() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let open = std::net::SocketAddr::new(pair.service().ip(), 8081);
    let _server = pair.server.serve(&ServeConfig::closing_first(open))?;
    drop_syns(&pair.server, "counter")?;
    let agent = watch(&pair.client, &[])?;
    let config = load(pair.service(), 4.0, 7, 3000);
    let loads = [
        pair.client.load(&config)?,
        pair.client.load(&load(open, 4.0, 7, 3000))?,
    ];
    let place = Place::initiator(pair.client_address(), pair.service());
    let told = named(&agent, "firewall_drop", &place)?;
    let [filtered, open] = loads.map(Load::wait);
    ensure!(filtered?.connected == 0 && open?.failures() == 0);
    only(&agent, &["firewall_drop"])?;
    let figures = [
        "loss.lost",
        "loss.established",
        "loss.live",
        "loss.others_answering",
    ];
    Row::told("a filter drops every SYN", "client", &told, &figures).record()
}

/// Drops SYNs to the service at a host; what `how` selects.
fn drop_syns(host: &Host, how: &str) -> Result<()> {
    host.nft(&format!(
        "table inet filtered {{ chain arriving {{ type filter hook input priority 0;
           tcp dport 8080 tcp flags & (fin|syn|rst|ack) == syn {how} drop; }}; }}"
    ))
}

/// It answered, then nothing gets through and no connection is left: the whole service is down, with
/// clients that give up before they send a SYN again. Nothing of that is this host's want of ports.
#[test]
fn abandoned_connects_to_a_service_that_is_gone() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let _server = pair.serve()?;
    let agent = watch(&pair.client, &[])?;
    let before = load(pair.service(), 10.0, 2, 300);
    ensure!(pair.client.load(&before)?.wait()?.failures() == 0);
    drop_syns(&pair.server, "counter")?;
    let report = pair.client.load(&load(pair.service(), 8.0, 13, 300))?;
    let place = Place::initiator(pair.client_address(), pair.service());
    let told = named(&agent, "service_down", &place)?;
    let report = report.wait()?;
    println!("{report:?}");
    ensure!(
        report.connected == 0 && report.syn_retransmits == 0,
        "{report:?}"
    );
    ensure!(
        report.failed.get("app_timeout") == Some(&report.attempted),
        "{report:?}"
    );
    // Until it has lasted, nothing tells it from any other loss.
    only(&agent, &["service_down", "unknown_connect_loss"])?;
    let space = place.of(&fresh(&agent)?)?;
    ensure!(total(&space, "no_local_port") == 0, "{space}");
    let figures = ["loss.lost", "loss.live", "syn_retransmits", "no_local_port"];
    Row::told(
        "a whole service is gone, clients give up after 300 ms",
        "client",
        &told,
        &figures,
    )
    .record()
}

/// Every third SYN is lost whatever the load: one of three targets or paths does not work. With a
/// shorter window, so that the load can change within it.
#[test]
fn a_constant_share_fails() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let _server = pair.serve()?;
    drop_syns(&pair.server, "numgen inc mod 3 == 0 counter")?;
    let agent = watch(&pair.client, &["--set", "window=15s"])?;
    let slow = pair.client.load(&load(pair.service(), 8.0, 30, 500))?;
    std::thread::sleep(9 * SECOND);
    let more = pair.client.load(&load(pair.service(), 20.0, 20, 500))?;
    let place = Place::initiator(pair.client_address(), pair.service());
    let told = named(&agent, "asymmetric_path", &place)?;
    let reports = [slow.stop()?, more.stop()?];
    println!("{reports:?}");
    let (failed, tried) = reports.iter().fold((0, 0), |(failed, tried), report| {
        (failed + report.failures(), tried + report.attempted)
    });
    ensure!(
        failed * 4 > tried && failed * 5 < tried * 2,
        "{failed} of {tried}"
    );
    only(&agent, &["asymmetric_path", "unknown_connect_loss"])?;
    let figures = ["loss.lost", "loss.established"];
    Row::told(
        "every third SYN is lost whatever the load",
        "client",
        &told,
        &figures,
    )
    .record()
}

/// Masquerading gives one port to two connections at once: one SYN is dropped when its entry is
/// confirmed. Seen where it happens, at the host that translates.
#[test]
fn ports_clash_in_conntrack() -> Result<()> {
    let incident = Incident::new(IncidentConfig {
        clients: 1,
        ..IncidentConfig::default()
    })?;
    // The client closes first, so that the server holds nothing that a reused port could meet.
    let _server = incident.server.serve(&ServeConfig {
        keep_alive: true,
        ..ServeConfig::new(incident.service())
    })?;
    let agent = watch(&incident.nat, &[])?;
    let client = &incident.clients[0];
    let kept = client.pool(&PoolConfig {
        connections: 20,
        rate: 10.0,
        ..PoolConfig::new(incident.service())
    })?;
    let loads = client.load(&load(incident.service(), 40.0, 10, 5000))?;
    let place = Place::responder(incident.client_address(0), incident.service());
    let told = named(&agent, "masquerade_race", &place)?;
    let report = loads.wait()?;
    println!("{report:?}");
    kept.stop()?;
    ensure!(incident.middlebox()?.clash > 0 && report.with_syn_retransmits > 0);
    ensure!(report.failures() == 0, "{report:?}");
    only(&agent, &["masquerade_race"])?;
    ensure!(number(&told["evidence"], "refused_syns") == 0, "{told}");
    let figures = ["syn_retransmits", "loss.lost", "loss.established"];
    Row::told(
        "two connections get one port in conntrack",
        "NAT",
        &told,
        &figures,
    )
    .record()
}
