//! Tests of the lab's peers: floods, scans, full queues, routers, Fast Open, dual-stack listeners.

use std::time::Duration;

use anyhow::Result;
use tuplewatch_tests::prelude::*;

const SECOND: Duration = Duration::from_secs(1);

/// Waits for silence and gives the counters of client and server.
fn counted(lab: &Lab) -> Result<(Counters, Counters)> {
    lab.settle(SECOND, 20 * SECOND)?;
    let truth = lab.truth()?;
    Ok((truth.host("client").counters, truth.host("server").counters))
}

#[test]
fn fast_open_carries_the_request_in_the_syn() -> Result<()> {
    for family in [Family::V4, Family::V6] {
        let pair = Pair::new(PairConfig {
            family,
            ..PairConfig::default()
        })?;
        pair.server.sysctl("net.ipv4.tcp_fastopen", 3)?;
        let server = ServeConfig {
            fastopen: true,
            ..ServeConfig::closing_first(pair.service())
        };
        let _server = pair.server.serve(&server)?;
        let report = pair
            .client
            .fastopen(&FastOpenConfig::new(pair.service()))?
            .wait()?;
        // The first connection fetches the cookie.
        assert_eq!((report.attempted, report.ok, report.data_in_syn), (5, 5, 4));
        let (_, server) = counted(&pair)?;
        assert_eq!(
            (server.syn_in, server.synack_out, server.bareack_to_syn_out),
            (5, 5, 0)
        );
        assert_eq!(
            pair.truth()?
                .kernel_sum(&["server"], "TcpExtTCPFastOpenPassive"),
            4
        );
    }
    Ok(())
}

#[test]
fn a_dual_stack_listener_serves_ipv4() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let listen = "[::]:8080".parse()?;
    let config = ServeConfig {
        dual_stack: true,
        ..ServeConfig::closing_first(listen)
    };
    let server = pair.server.serve(&config)?;
    let load = LoadConfig {
        count: Some(5),
        rate: 50.0,
        ..LoadConfig::new(pair.service())
    };
    assert_eq!(pair.client.load(&load)?.wait()?.ok, 5);
    let table = pair.server.tcp_states()?;
    assert_eq!(table.time_wait()[&(pair.client_address(), 8080)], 5);
    assert!(
        pair.server
            .exec("cat", ["/proc/net/tcp"])?
            .stdout
            .lines()
            .count()
            == 1
    );
    assert_eq!(server.stop()?.clients[&pair.client_address()], 5);
    Ok(())
}

#[test]
fn a_scan_and_a_flood_are_counted_to_the_last_packet() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let _server = pair.serve()?;
    let scan = RawSynConfig {
        count: 500,
        rate: 2000.0,
        scan: Some(PortRange { low: 1, high: 500 }),
        ..RawSynConfig::new(pair.service(), pair.client_address())
    };
    assert_eq!(pair.client.rawsyn(&scan)?.wait()?.sent, 500);
    assert_eq!(pair.server.snmp()?.get("TcpOutRsts"), 500);
    let flood = RawSynConfig {
        count: 100_000,
        rate: 0.0,
        random_sources: true,
        ..RawSynConfig::new(pair.service(), Family::V4.nobody())
    };
    let report = pair.client.rawsyn(&flood)?.wait()?;
    println!("{} SYNs in {:.1} s", report.sent, report.seconds);
    assert_eq!((report.sent, report.failed), (100_000, 0));
    let truth = pair.truth()?;
    assert_eq!(truth.host("client").counters.syn_out, 100_000);
    assert_eq!(truth.host("server").counters.syn_in, 100_000);
    let sources = truth.host("server").source_ports_in.len();
    assert!(sources > 40_000, "{sources} different addresses");
    Ok(())
}

#[test]
fn a_full_accept_queue_ignores_syns() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let config = ServeConfig {
        no_accept_after: Some(3),
        backlog: 2,
        ..ServeConfig::closing_first(pair.service())
    };
    let server = pair.server.serve(&config)?;
    let load = LoadConfig {
        count: Some(20),
        rate: 40.0,
        connect_timeout_ms: 1500,
        response_timeout_ms: 1500,
        ..LoadConfig::new(pair.service())
    };
    let report = pair.client.load(&load)?.wait()?;
    assert_eq!(report.ok, 3);
    assert!(
        report.failed.get("app_timeout").is_some_and(|n| *n >= 10),
        "{report:?}"
    );
    assert!(pair.server.netstat()?.get("TcpExtListenOverflows") > 0);
    assert_eq!(pair.truth()?.host("server").counters.bareack_to_syn_out, 0);
    server.stop()?;
    Ok(())
}

#[test]
fn a_router_sees_each_packet_twice_and_loses_what_it_is_told() -> Result<()> {
    let routed = Routed::new(RoutedConfig::default())?;
    let _server = routed.serve()?;
    let load = LoadConfig {
        count: Some(50),
        rate: 100.0,
        ..LoadConfig::new(routed.service())
    };
    assert_eq!(routed.client.load(&load)?.wait()?.ok, 50);
    routed.settle(SECOND, 10 * SECOND)?;
    let truth = routed.truth()?;
    let router = truth.host("router").counters;
    assert_eq!((router.syn_in, router.syn_out), (50, 50));
    assert_eq!(router.tcp_in, router.tcp_out);
    assert_eq!(
        router.tcp_in,
        truth.host("server").counters.tcp_in + truth.host("client").counters.tcp_in
    );
    drop(routed);

    let routed = Routed::new(RoutedConfig {
        loss_percent: 20,
        family: Family::V6,
        ..RoutedConfig::default()
    })?;
    let _server = routed.serve()?;
    let load = LoadConfig {
        count: Some(60),
        rate: 60.0,
        ..LoadConfig::new(routed.service())
    };
    let report = routed.client.load(&load)?.wait()?;
    assert!(report.with_syn_retransmits > 5, "{report:?}");
    let truth = routed.truth()?;
    assert!(truth.host("router").counters.syn_in < truth.host("client").counters.syn_out);
    Ok(())
}

#[test]
fn abandoned_refused_and_portless_opens_are_told_apart() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let refused = LoadConfig {
        count: Some(3),
        ..LoadConfig::new(pair.service())
    };
    assert_eq!(pair.client.load(&refused)?.wait()?.failed["refused"], 3);
    let (client, server) = counted(&pair)?;
    assert_eq!((client.rst_to_syn_in, server.rst_to_syn_out), (3, 3));
    pair.server.nft(
        "table inet wall { chain in { type filter hook input priority 0; tcp dport 8080 drop; }; }",
    )?;
    let abandoned = LoadConfig {
        connect_timeout_ms: 300,
        ..refused.clone()
    };
    let report = pair.client.load(&abandoned)?.wait()?;
    assert_eq!(
        (report.failed["app_timeout"], report.syn_retransmits),
        (3, 0)
    );
    pair.server.nft("delete table inet wall")?;
    // Four ports, each connection held for a second: the fifth and sixth find none.
    pair.client
        .sysctl("net.ipv4.ip_local_port_range", "2000 2003")?;
    let _server = pair.server.serve(&ServeConfig::new(pair.service()))?;
    let held = LoadConfig {
        count: Some(6),
        rate: 100.0,
        hold_ms: 1000,
        ..refused
    };
    let report = pair.client.load(&held)?.wait()?;
    assert_eq!((report.ok, report.failed["no_port"]), (4, 2), "{report:?}");
    Ok(())
}
