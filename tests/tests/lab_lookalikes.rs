//! Tests of the lab's peers: what resembles the incident gets, or does not get, its bare ACKs.

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
fn reuse_by_one_host_is_accepted_in_time_wait() -> Result<()> {
    let pair = Pair::new(PairConfig {
        timestamps: false,
        ..PairConfig::default()
    })?;
    let _server = pair.serve()?;
    let load = pair.client.load(&LoadConfig {
        count: Some(60),
        rate: 30.0,
        bind_port_range: Some(PortRange {
            low: 3000,
            high: 3009,
        }),
        events: true,
        ..LoadConfig::new(pair.service())
    })?;
    let pid = load.pid();
    assert!(wait_for(20 * SECOND, || load.events().len() == 60));
    assert!(
        load.events()
            .iter()
            .all(|event| (3000..=3009).contains(&event.local_port))
    );
    let report = load.wait()?;
    assert_eq!((report.pid, report.attempted, report.ok), (pid, 60, 60));
    let (_, server) = counted(&pair)?;
    assert_eq!((server.syn_in, server.synack_out), (60, 60));
    assert_eq!((server.bareack_to_syn_out, server.syn_repeat_in), (0, 0));
    let truth = pair.truth()?;
    assert_eq!(
        truth
            .host("server")
            .distinct_ports_in(pair.client_address()),
        10
    );
    assert_eq!(
        truth.host("server").time_wait_peak[&pair.client_address()],
        10
    );
    Ok(())
}

#[test]
fn a_fixed_port_with_an_older_isn_is_refused_in_time_wait() -> Result<()> {
    let pair = Pair::new(PairConfig {
        timestamps: false,
        ..PairConfig::default()
    })?;
    let _server = pair.serve()?;
    let config = FixedConfig {
        isn: Isn::Backward,
        ..FixedConfig::new(pair.service(), 800)
    };
    let report = pair.client.fixed(&config)?.wait()?;
    assert_eq!(
        (report.attempted, report.ok, report.syn_retransmits),
        (5, 5, 4),
        "{report:?}"
    );
    let (client, server) = counted(&pair)?;
    assert_eq!(
        (
            server.bareack_to_syn_out,
            client.rst_to_syn_out,
            server.syn_in
        ),
        (4, 4, 9)
    );
    assert_eq!(server.syn_repeat_same_port_in, 4);
    Ok(())
}

#[test]
fn a_half_open_connection_challenges_the_reconnect() -> Result<()> {
    for family in [Family::V4, Family::V6] {
        let pair = Pair::new(PairConfig {
            family,
            ..PairConfig::default()
        })?;
        let _server = pair.serve()?;
        let config = FixedConfig {
            abandon: true,
            ..FixedConfig::new(pair.service(), 50_001)
        };
        let report = pair.client.fixed(&config)?.wait()?;
        assert_eq!((report.ok, report.abandoned), (5, 5), "{report:?}");
        let (client, server) = counted(&pair)?;
        assert_eq!((server.bareack_to_syn_out, client.rst_to_syn_out), (4, 4));
        assert_eq!((server.fin_in, server.fin_out, server.rst_in), (0, 0, 4));
        let truth = pair.truth()?;
        assert_eq!(truth.kernel_sum(&["server"], "TcpExtTCPSYNChallenge"), 4);
    }
    Ok(())
}

#[test]
fn a_second_syn_on_a_half_open_handshake_gets_a_bare_ack() -> Result<()> {
    for family in [Family::V4, Family::V6] {
        let pair = Pair::new(PairConfig {
            family,
            ..PairConfig::default()
        })?;
        let _server = pair.serve()?;
        let syns = RawSynConfig {
            source_port: SourcePort::Fixed(40_000),
            count: 2,
            rate: 5.0,
            ..RawSynConfig::new(pair.service(), family.nobody())
        };
        let report = pair.client.rawsyn(&syns)?.wait()?;
        assert_eq!((report.sent, report.failed, report.source_ports), (2, 0, 1));
        let arrived = || {
            pair.truth()
                .is_ok_and(|t| t.host("server").counters.syn_in == 2)
        };
        assert!(wait_for(5 * SECOND, arrived));
        let server = pair.truth()?.host("server").counters;
        assert_eq!(
            (
                server.syn_in,
                server.syn_repeat_in,
                server.bareack_to_syn_out
            ),
            (2, 0, 1)
        );
        assert!(server.synack_out >= 1);
        assert_eq!(server.rst_in, 0);
        // The same sequence number again is a retransmit: answered by a SYN-ACK at most.
        let again = RawSynConfig {
            isn: Isn::Fixed(77),
            source_port: SourcePort::Fixed(40_001),
            ..syns
        };
        pair.client.rawsyn(&again)?.wait()?;
        let arrived = || {
            pair.truth()
                .is_ok_and(|t| t.host("server").counters.syn_in == 4)
        };
        assert!(wait_for(5 * SECOND, arrived));
        let server = pair.truth()?.host("server").counters;
        assert_eq!(
            (server.syn_repeat_same_port_in, server.bareack_to_syn_out),
            (1, 1)
        );
    }
    Ok(())
}

#[test]
fn time_wait_without_a_listener_answers_once_then_resets() -> Result<()> {
    let pair = Pair::new(PairConfig {
        timestamps: false,
        ..PairConfig::default()
    })?;
    let server = pair.serve()?;
    let once = FixedConfig {
        times: 1,
        ..FixedConfig::new(pair.service(), 801)
    };
    assert_eq!(pair.client.fixed(&once)?.wait()?.ok, 1);
    server.stop()?;
    let report = pair.client.fixed(&once)?.wait()?;
    assert_eq!(report.failed.get("refused"), Some(&1), "{report:?}");
    let (client, server) = counted(&pair)?;
    assert_eq!((server.bareack_to_syn_out, server.rst_to_syn_in), (1, 1));
    assert_eq!((server.rst_to_syn_out, client.rst_to_syn_in), (1, 1));
    Ok(())
}

#[test]
fn a_late_duplicate_syn_is_challenged_and_harmless() -> Result<()> {
    for family in [Family::V4, Family::V6] {
        let pair = Pair::new(PairConfig {
            family,
            ..PairConfig::default()
        })?;
        let _server = pair.serve()?;
        let config = LateDupConfig {
            times: 2,
            repeats: 2,
            ..LateDupConfig::new(pair.service())
        };
        let report = pair.client.late_dup(&config)?.wait()?;
        assert_eq!(
            (report.connections, report.duplicates, report.survived),
            (2, 4, 2)
        );
        let (client, server) = counted(&pair)?;
        assert_eq!((server.syn_in, server.syn_repeat_same_port_in), (6, 4));
        assert_eq!(
            (server.bareack_to_syn_out, client.bareack_to_syn_in),
            (4, 4)
        );
        assert_eq!(
            (client.rst_out, server.rst_out, server.synack_out),
            (0, 0, 2)
        );
        assert_eq!(
            pair.truth()?
                .kernel_sum(&["server"], "TcpExtTCPSYNChallenge"),
            4
        );
    }
    Ok(())
}

#[test]
fn a_late_duplicate_syn_after_the_close_meets_time_wait() -> Result<()> {
    let pair = Pair::new(PairConfig {
        timestamps: false,
        ..PairConfig::default()
    })?;
    let _server = pair.serve()?;
    let config = LateDupConfig {
        after_close: true,
        ..LateDupConfig::new(pair.service())
    };
    let report = pair.client.late_dup(&config)?.wait()?;
    assert_eq!((report.duplicates, report.survived), (1, 0));
    let (client, server) = counted(&pair)?;
    assert_eq!(
        (server.bareack_to_syn_out, server.syn_repeat_same_port_in),
        (1, 1)
    );
    assert_eq!(client.rst_out, 1, "nobody owns the port any more");
    Ok(())
}
