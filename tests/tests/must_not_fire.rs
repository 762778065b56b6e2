//! Healthy traffic that has a feature of the incident: no alert in any state, no look-alike, and the
//! counters are those of the ground truth.

mod support;

use anyhow::{Result, ensure};
use support::{
    Place, SECOND, fresh, look_alikes, nearly, no_alert, nothing_lost, nothing_told, number, total,
    watch, wire_spaces,
};
use tuplewatch_tests::prelude::*;

/// One host uses ten ports again and again within TIME_WAIT: its sequence numbers move forward, the
/// server accepts.
#[test]
fn reuse_that_the_server_accepts() -> Result<()> {
    let pair = Pair::new(PairConfig {
        timestamps: false,
        ..PairConfig::default()
    })?;
    let _server = pair.serve()?;
    let agents = [watch(&pair.client, &[])?, watch(&pair.server, &[])?];
    let load = LoadConfig {
        count: Some(60),
        rate: 30.0,
        bind_port_range: Some(PortRange {
            low: 3000,
            high: 3009,
        }),
        ..LoadConfig::new(pair.service())
    };
    assert_eq!(pair.client.load(&load)?.wait()?.ok, 60);
    pair.settle(SECOND, 20 * SECOND)?;
    let truth = pair.truth()?;
    assert_eq!(truth.host("server").counters.bareack_to_syn_out, 0);
    assert_eq!(truth.host("server").counters.synack_out, 60);
    let (client, service) = (pair.client_address(), pair.service());
    let places = [
        Place::initiator(client, service),
        Place::responder(client, service),
    ];
    for (agent, place) in agents.iter().zip(places) {
        let space = place.of(&fresh(agent)?)?;
        assert_eq!(total(&space, "opens"), 60);
        assert_eq!(total(&space, "established"), 60);
        assert_eq!(total(&space, "reuse_accepted"), 50, "{space}");
        assert_eq!(total(&space, "bare_acks"), 0);
        assert_eq!(total(&space, "syn_retransmits"), 0);
        assert_eq!(number(&space, "ports_seen"), 10);
        nothing_told(agent)?;
        nothing_lost(agent)?;
    }
    let held = number(&places[1].of(&fresh(&agents[1])?)?["time_wait"], "total");
    assert_eq!(held, 10, "ten four-tuples at the end that closed first");
    Ok(())
}

/// A pool that is handed out in sequence looks densely used before it has come round once.
#[test]
fn a_sequential_pool_in_its_first_second() -> Result<()> {
    let incident = Incident::new(IncidentConfig {
        clients: 1,
        ..IncidentConfig::default()
    })?;
    let _server = incident.serve()?;
    let agent = watch(&incident.server, &[])?;
    let load = LoadConfig {
        count: Some(150),
        rate: 150.0,
        ..LoadConfig::new(incident.service())
    };
    assert_eq!(incident.clients[0].load(&load)?.wait()?.ok, 150);
    incident.settle(SECOND, 20 * SECOND)?;
    let place = Place::responder(incident.nat_address(), incident.service());
    let space = place.of(&fresh(&agent)?)?;
    assert_eq!(total(&space, "established"), 150);
    assert_eq!(
        number(&space, "ports_seen"),
        incident
            .truth()?
            .host("server")
            .distinct_ports_in(incident.nat_address()) as u64
    );
    for summary in agent.of_type("summary")? {
        for space in wire_spaces(&summary) {
            ensure!(space["budget"].is_null(), "a budget too early: {space}");
        }
    }
    nothing_told(&agent)
}

/// Stray connections from ports far outside do not widen the pool: neither before it is known, nor
/// while it is learned, nor afterwards.
#[test]
fn stray_ports_do_not_widen_the_pool() -> Result<()> {
    let incident = Incident::new(IncidentConfig::default())?;
    // The clients close first, so that ports may come round without harm.
    let _server = incident
        .server
        .serve(&ServeConfig::new(incident.service()))?;
    let agent = watch(&incident.server, &[])?;
    // Connections of the NAT's own, whose port is not translated. (A client may have such a port too.)
    let own = incident.nat_address();
    incident.nat.nft(&format!(
        "insert rule ip nat leaving ip saddr {own} tcp sport 51234-51236 accept"
    ))?;
    let stray = |port| -> Result<()> {
        let load = LoadConfig {
            count: Some(1),
            source_port: Some(port),
            ..LoadConfig::new(incident.service())
        };
        assert_eq!(incident.nat.load(&load)?.wait()?.ok, 1);
        Ok(())
    };
    let place = Place::responder(incident.nat_address(), incident.service());
    stray(51_234)?;
    let loads = incident.load(50.0, 10 * SECOND)?;
    let half = || place.of(&fresh(&agent)?).map(|s| total(&s, "established"));
    assert!(wait_for(10 * SECOND, || half().is_ok_and(|n| n > 300)));
    stray(51_235)?;
    let mut established = 3;
    for load in loads {
        let report = load.wait()?;
        assert_eq!(report.failures(), 0, "{report:?}");
        established += report.ok;
    }
    ensure!(established > 600, "{established} connections only");
    stray(51_236)?;
    incident.settle(SECOND, 20 * SECOND)?;
    let truth = incident.truth()?;
    let ports = &truth.host("server").source_ports_in[&incident.nat_address()];
    assert_eq!(ports.len(), 203);
    assert!([51_234, 51_235, 51_236].iter().all(|p| ports.contains(p)));
    let space = place.of(&fresh(&agent)?)?;
    assert_eq!(total(&space, "established"), established);
    assert_eq!(number(&space, "ports_seen"), 203);
    let pool = &space["budget"]["pool"];
    assert_eq!(
        (
            number(pool, "first"),
            number(pool, "last"),
            number(pool, "seen")
        ),
        (2048, 2247, 200),
        "{space}"
    );
    assert_eq!(number(&space["budget"], "ports"), 200);
    for summary in agent.of_type("summary")? {
        for space in wire_spaces(&summary) {
            let last = space["budget"]["pool"]["last"].as_u64();
            ensure!(last.is_none_or(|last| last <= 2247), "{space}");
        }
    }
    nothing_told(&agent)?;
    nothing_lost(&agent)
}

/// The SYN-ACK acknowledges the SYN's data, or the SYN alone: neither is a bare ACK.
#[test]
fn fast_open() -> Result<()> {
    for family in [Family::V4, Family::V6] {
        let pair = Pair::new(PairConfig {
            family,
            ..PairConfig::default()
        })?;
        pair.server.sysctl("net.ipv4.tcp_fastopen", 3)?;
        let _server = pair.server.serve(&ServeConfig {
            fastopen: true,
            ..ServeConfig::closing_first(pair.service())
        })?;
        let agents = [watch(&pair.client, &[])?, watch(&pair.server, &[])?];
        let report = pair
            .client
            .fastopen(&FastOpenConfig {
                times: 20,
                pause_ms: 50,
                ..FastOpenConfig::new(pair.service())
            })?
            .wait()?;
        assert_eq!((report.ok, report.data_in_syn), (20, 19));
        pair.settle(SECOND, 20 * SECOND)?;
        let (client, service) = (pair.client_address(), pair.service());
        for (agent, place) in agents.iter().zip([
            Place::initiator(client, service),
            Place::responder(client, service),
        ]) {
            let space = place.of(&fresh(agent)?)?;
            assert_eq!(total(&space, "opens"), 20, "{space}");
            assert_eq!(total(&space, "established"), 20, "{space}");
            assert_eq!(total(&space, "bare_acks"), 0);
            nothing_told(agent)?;
        }
    }
    Ok(())
}

/// A router sees each packet come in and go out: one connection is one open.
#[test]
fn a_router_counts_once() -> Result<()> {
    for family in [Family::V4, Family::V6] {
        let routed = Routed::new(RoutedConfig {
            family,
            ..RoutedConfig::default()
        })?;
        let _server = routed.serve()?;
        let agent = watch(&routed.router, &[])?;
        let load = LoadConfig {
            count: Some(50),
            rate: 100.0,
            ..LoadConfig::new(routed.service())
        };
        assert_eq!(routed.client.load(&load)?.wait()?.ok, 50);
        routed.settle(SECOND, 20 * SECOND)?;
        let router = routed.truth()?.host("router").counters;
        assert_eq!((router.syn_in, router.syn_out), (50, 50));
        let summary = fresh(&agent)?;
        let spaces = wire_spaces(&summary);
        assert_eq!(spaces.len(), 1, "{summary}");
        assert_eq!(
            spaces[0]["client.address"],
            routed.client_address().to_string()
        );
        for counter in ["opens", "established"] {
            assert_eq!(total(&spaces[0], counter), 50, "{counter}: {summary}");
        }
        for counter in [
            "syn_retransmits",
            "bare_acks",
            "abandoned",
            "reuse_accepted",
        ] {
            assert_eq!(total(&spaces[0], counter), 0, "{counter}: {summary}");
        }
        nothing_told(&agent)?;
    }
    Ok(())
}

/// Three per cent of the packets are lost, each way.
#[test]
fn loss() -> Result<()> {
    let routed = Routed::new(RoutedConfig {
        loss_percent: 3,
        ..RoutedConfig::default()
    })?;
    let _server = routed.serve()?;
    let agents = [
        watch(&routed.client, &[])?,
        watch(&routed.router, &[])?,
        watch(&routed.server, &[])?,
    ];
    let load = LoadConfig {
        count: Some(400),
        rate: 80.0,
        connect_timeout_ms: 20_000,
        response_timeout_ms: 20_000,
        ..LoadConfig::new(routed.service())
    };
    let report = routed.client.load(&load)?.wait()?;
    println!("{report:?}");
    assert_eq!(report.connected, 400);
    assert!(report.with_syn_retransmits > 0, "nothing was lost");
    routed.settle(2 * SECOND, 40 * SECOND)?;
    let truth = routed.truth()?;
    let (client, service) = (routed.client_address(), routed.service());
    let at = |host: &str| truth.host(host).counters;
    // Loss strikes before the router's own hook: what it sees is what passed its interface.
    let seen = [
        (
            Place::initiator(client, service),
            at("client").syn_repeat_out,
        ),
        (
            Place::responder(client, service),
            at("client").syn_repeat_out,
        ),
        (
            Place::responder(client, service),
            at("server").syn_repeat_in,
        ),
    ];
    for (agent, (place, repeats)) in agents.iter().zip(seen) {
        let space = place.of(&fresh(agent)?)?;
        println!("{space}");
        assert_eq!(total(&space, "established"), 400, "{space}");
        assert_eq!(total(&space, "opens"), 400, "{space}");
        assert_eq!(total(&space, "syn_retransmits"), repeats, "{space}");
        assert_eq!(total(&space, "bare_acks"), 0, "{space}");
        no_alert(agent)?;
        let named = look_alikes(agent)?;
        ensure!(named.iter().all(|name| name == "packet_loss"), "{named:?}");
    }
    let socket = Place::socket(client, service).of(&fresh(&agents[0])?)?;
    nearly(&socket, "established", 400)?;
    nearly(&socket, "syn_retransmits", report.syn_retransmits)?;
    Ok(())
}

/// A dual-stack listener's sockets carry IPv4 addresses within IPv6 ones: they belong to the IPv4
/// port space, and so do its TIME_WAIT sockets and those in use.
#[test]
fn a_dual_stack_listener() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let _server = pair.server.serve(&ServeConfig {
        dual_stack: true,
        ..ServeConfig::closing_first("[::]:8080".parse()?)
    })?;
    let agent = watch(&pair.server, &[])?;
    let pool = pair.client.pool(&PoolConfig {
        connections: 4,
        rate: 20.0,
        ..PoolConfig::new(pair.service())
    })?;
    let load = LoadConfig {
        count: Some(25),
        rate: 50.0,
        ..LoadConfig::new(pair.service())
    };
    assert_eq!(pair.client.load(&load)?.wait()?.ok, 25);
    let table = pair.server.tcp_states()?;
    assert_eq!(table.count("TIME_WAIT"), 25);
    assert_eq!(table.count("ESTABLISHED"), 4);
    let place = Place::responder(pair.client_address(), pair.service());
    let census = || -> Result<(u64, u64)> {
        let space = place.of(&fresh(&agent)?)?;
        Ok((
            number(&space["time_wait"], "total"),
            number(&space, "in_use"),
        ))
    };
    assert!(
        wait_for(10 * SECOND, || census().is_ok_and(|c| c == (25, 4))),
        "TIME_WAIT, in use: {:?}",
        census()
    );
    let space = place.of(&fresh(&agent)?)?;
    assert_eq!(total(&space, "established"), 29, "{space}");
    for space in fresh(&agent)?["spaces"].as_array().into_iter().flatten() {
        let address = space["client.address"].as_str().unwrap_or_default();
        assert!(!address.contains(':'), "not normalised: {space}");
    }
    pool.stop()?;
    nothing_told(&agent)
}

/// The incident's load through a pool of kept connections, from the start.
#[test]
fn a_connection_pool() -> Result<()> {
    let incident = Incident::new(IncidentConfig::default())?;
    let _server = incident.serve()?;
    let agents = [
        watch(&incident.server, &[])?,
        watch(&incident.clients[0], &[])?,
    ];
    let pools = incident
        .clients
        .iter()
        .map(|client| {
            client.pool(&PoolConfig {
                connections: 4,
                rate: 20.0,
                seconds: 12.0,
                ..PoolConfig::new(incident.service())
            })
        })
        .collect::<Result<Vec<_>>>()?;
    let in_use = || -> Result<u64> {
        let place = Place::responder(incident.nat_address(), incident.service());
        Ok(number(&place.of(&fresh(&agents[0])?)?, "in_use"))
    };
    assert!(
        wait_for(10 * SECOND, || in_use().is_ok_and(|n| n == 8)),
        "8 kept connections: {:?}",
        in_use()
    );
    for pool in pools {
        let report = pool.wait()?;
        assert_eq!((report.connections, report.failed), (4, 0), "{report:?}");
    }
    incident.settle(SECOND, 20 * SECOND)?;
    let opened = Place::responder(incident.nat_address(), incident.service());
    assert_eq!(total(&opened.of(&fresh(&agents[0])?)?, "opens"), 8);
    let own = Place::initiator(incident.client_address(0), incident.service());
    assert_eq!(total(&own.of(&fresh(&agents[1])?)?, "opens"), 4);
    for agent in &agents {
        nothing_told(agent)?;
        nothing_lost(agent)?;
        no_alert(agent)?;
    }
    Ok(())
}
