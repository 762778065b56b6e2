//! What also shows as a bare ACK and is not port exhaustion: each has its own name, and raises no
//! alert in any state, at neither end.

mod support;

use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::Value;
use support::{Place, SECOND, fresh, look_alikes, no_alert, number, total, watch};
use tuplewatch_tests::prelude::*;

/// A pair with an agent at each end.
struct Scene {
    pair: Pair,
    client: Agent,
    server: Agent,
}

impl Scene {
    fn new(config: PairConfig) -> Result<Self> {
        let pair = Pair::new(config)?;
        // Look-alikes end soon, and then tell their last figures.
        let args = ["--set", "alert.resolve=3s"];
        Ok(Self {
            client: watch(&pair.client, &args)?,
            server: watch(&pair.server, &args)?,
            pair,
        })
    }

    fn without_timestamps() -> Result<Self> {
        Self::new(PairConfig {
            timestamps: false,
            ..PairConfig::default()
        })
    }

    /// Waits for silence and gives what really happened at client and server.
    fn truth(&self) -> Result<(Counters, Counters)> {
        self.pair.settle(SECOND, 40 * SECOND)?;
        let truth = self.pair.truth()?;
        Ok((truth.host("client").counters, truth.host("server").counters))
    }

    fn ends(&self) -> [(&Agent, Place<'static>); 2] {
        let (client, service) = (self.pair.client_address(), self.pair.service());
        [
            (&self.client, Place::initiator(client, service)),
            (&self.server, Place::responder(client, service)),
        ]
    }

    /// Both agents name it, and nothing else: they told when it began and when it was over, and at
    /// the end its evidence had the count of the ground truth, as has the summary.
    fn is_named(&self, name: &str, evidence: &str, counter: &str, truth: u64) -> Result<()> {
        for (agent, place) in self.ends() {
            let is_it = |line: &Value| {
                line["type"] == "look_alike" && line["name"] == name && place.is(line)
            };
            let begun = agent
                .wait_line(20 * SECOND, |line| is_it(line) && line["ended"] == false)
                .with_context(|| format!("{} is not named by the {}", name, place.role))?;
            println!("{}: {}", place.role, begun["summary"]);
            agent
                .wait_line(20 * SECOND, |line| {
                    is_it(line)
                        && line["ended"] == true
                        && number(&line["evidence"], evidence) == truth
                })
                .with_context(|| {
                    format!(
                        "{name} with {evidence} = {truth} does not end at the {}",
                        place.role
                    )
                })?;
            let summary = fresh(agent)?;
            assert_eq!(total(&place.of(&summary)?, counter), truth, "{summary}");
            no_alert(agent)?;
            assert_eq!(look_alikes(agent)?, [name.to_owned()].into());
        }
        Ok(())
    }
}

/// Six ports, three connections on each, none of them ever closed: twelve SYNs are challenged.
#[test]
fn half_open_reconnect() -> Result<()> {
    let scene = Scene::new(PairConfig::default())?;
    let _server = scene.pair.serve()?;
    let peers = (50_001..=50_006)
        .map(|port| {
            scene.pair.client.fixed(&FixedConfig {
                abandon: true,
                times: 3,
                ..FixedConfig::new(scene.pair.service(), port)
            })
        })
        .collect::<Result<Vec<_>>>()?;
    for peer in peers {
        assert_eq!(peer.wait()?.abandoned, 3);
    }
    let (client, server) = scene.truth()?;
    assert_eq!(
        (client.bareack_to_syn_in, server.bareack_to_syn_out),
        (12, 12)
    );
    scene.is_named(
        "half_open_reconnect",
        "refused_while_open",
        "bare_acks_open",
        12,
    )
}

/// One source port, whose sequence numbers go backward, so that TIME_WAIT refuses each reuse.
#[test]
fn one_fixed_port() -> Result<()> {
    fixed_ports(&[800], 7)
}

/// Two of them: twelve refused SYNs would be an alert if they came from more ports.
#[test]
fn two_fixed_ports() -> Result<()> {
    fixed_ports(&[800, 801], 7)
}

fn fixed_ports(ports: &[u16], times: u64) -> Result<()> {
    let scene = Scene::without_timestamps()?;
    let _server = scene.pair.serve()?;
    let peers = ports
        .iter()
        .map(|port| {
            scene.pair.client.fixed(&FixedConfig {
                isn: Isn::Backward,
                times,
                ..FixedConfig::new(scene.pair.service(), *port)
            })
        })
        .collect::<Result<Vec<_>>>()?;
    for peer in peers {
        assert_eq!(peer.wait()?.ok, times);
    }
    let refused = ports.len() as u64 * (times - 1);
    let (client, server) = scene.truth()?;
    assert_eq!(
        (client.bareack_to_syn_in, server.bareack_to_syn_out),
        (refused, refused)
    );
    scene.is_named(
        "fixed_port_reuse",
        "refused_after_close",
        "bare_acks_closed",
        refused,
    )
}

/// SYNs of a flood that hit the same ports again, from an address that has honest connections too.
#[test]
fn syn_recv_collision() -> Result<()> {
    let scene = Scene::new(PairConfig::default())?;
    let (client, service) = (scene.pair.client_address(), scene.pair.service());
    let _server = scene.pair.serve()?;
    let honest = LoadConfig {
        count: Some(5),
        rate: 50.0,
        ..LoadConfig::new(service)
    };
    assert_eq!(scene.pair.client.load(&honest)?.wait()?.ok, 5);
    // Else the client's kernel would clear the server's half-open handshakes.
    scene.pair.client.silence_resets_to(service.port())?;
    // The server answers such a SYN at most every 500 ms.
    let peers = (40_001..=40_003)
        .map(|port| {
            scene.pair.client.rawsyn(&RawSynConfig {
                source_port: SourcePort::Fixed(port),
                count: 5,
                rate: 1.5,
                ..RawSynConfig::new(service, client)
            })
        })
        .collect::<Result<Vec<_>>>()?;
    for peer in peers {
        assert_eq!(peer.wait()?.sent, 5);
    }
    // The server repeats its SYN-ACKs for a minute: no silence to wait for.
    let arrived = || {
        scene
            .pair
            .truth()
            .is_ok_and(|truth| truth.host("client").counters.bareack_to_syn_in == 12)
    };
    assert!(wait_for(10 * SECOND, arrived), "{:?}", scene.pair.truth()?);
    scene.is_named(
        "syn_recv_collision",
        "refused_half_open",
        "bare_acks_half_open",
        12,
    )
}

/// The same from an address that never completes a handshake: no port space of the server, no alert.
#[test]
fn syn_recv_collision_of_a_stranger() -> Result<()> {
    let scene = Scene::new(PairConfig::default())?;
    let _server = scene.pair.serve()?;
    let peers = (40_001..=40_006)
        .map(|port| {
            scene.pair.client.rawsyn(&RawSynConfig {
                source_port: SourcePort::Fixed(port),
                count: 3,
                rate: 1.5,
                ..RawSynConfig::new(scene.pair.service(), Family::V4.nobody())
            })
        })
        .collect::<Result<Vec<_>>>()?;
    for peer in peers {
        assert_eq!(peer.wait()?.sent, 3);
    }
    let answered = || {
        scene
            .pair
            .truth()
            .is_ok_and(|truth| truth.host("server").counters.bareack_to_syn_out == 12)
    };
    assert!(wait_for(10 * SECOND, answered), "{:?}", scene.pair.truth()?);
    let summary = fresh(&scene.server)?;
    assert_eq!(summary["spaces"].as_array().map(Vec::len), Some(0));
    let globals = &summary["globals"];
    assert_eq!(number(globals, "bare_acks_without_port_space"), 12);
    assert_eq!(number(globals, "syns_without_port_space"), 18);
    for agent in [&scene.client, &scene.server] {
        no_alert(agent)?;
    }
    support::nothing_told(&scene.server)
}

/// The server is gone, TIME_WAIT is left: it answers the first SYN, the closed port the second.
#[test]
fn no_listener() -> Result<()> {
    no_listener_on(1)
}

/// On ten ports at once it looks even more like an exhausted pool.
#[test]
fn no_listener_on_many_ports() -> Result<()> {
    no_listener_on(10)
}

fn no_listener_on(ports: u16) -> Result<()> {
    let scene = Scene::without_timestamps()?;
    let server = scene.pair.serve()?;
    let load = LoadConfig {
        bind_port_range: Some(PortRange {
            low: 3000,
            high: 2999 + ports,
        }),
        count: Some(ports.into()),
        rate: 20.0,
        ..LoadConfig::new(scene.pair.service())
    };
    assert_eq!(scene.pair.client.load(&load)?.wait()?.ok, u64::from(ports));
    server.stop()?;
    let report = scene.pair.client.load(&load)?.wait()?;
    let refused = u64::from(ports);
    assert_eq!(report.failed.get("refused"), Some(&refused), "{report:?}");
    let (client, server) = scene.truth()?;
    assert_eq!(
        (client.bareack_to_syn_in, server.bareack_to_syn_out),
        (refused, refused)
    );
    assert_eq!(client.rst_to_syn_in, refused);
    scene.is_named("no_listener", "no_listener", "no_listener", refused)
}

/// SYNs of living connections that the network delivers again.
#[test]
fn duplicate_syn() -> Result<()> {
    late_duplicates(&LateDupConfig {
        times: 3,
        repeats: 2,
        ..LateDupConfig::new("10.79.1.10:8080".parse()?)
    })
}

/// SYNs that come again after their connection was closed, and meet its TIME_WAIT.
#[test]
fn duplicate_syn_after_close() -> Result<()> {
    late_duplicates(&LateDupConfig {
        times: 6,
        after_close: true,
        ..LateDupConfig::new("10.79.1.10:8080".parse()?)
    })
}

fn late_duplicates(config: &LateDupConfig) -> Result<()> {
    let scene = Scene::without_timestamps()?;
    assert_eq!(config.to, scene.pair.service());
    let _server = scene.pair.serve()?;
    let report = scene.pair.client.late_dup(config)?.wait()?;
    assert_eq!(report.duplicates, config.times * config.repeats);
    let (_, server) = scene.truth()?;
    assert_eq!(server.bareack_to_syn_out, report.duplicates);
    scene.is_named(
        "duplicate_syn",
        "duplicate_syns",
        "duplicate_syns",
        report.duplicates,
    )?;
    for (agent, place) in scene.ends() {
        let space = place.of(&fresh(agent)?)?;
        assert_eq!(total(&space, "bare_acks"), 0);
        assert_eq!(total(&space, "opens"), config.times);
        assert_eq!(total(&space, "established"), config.times);
    }
    Ok(())
}

/// A look-alike that goes on is told once, not every second.
#[test]
fn told_once() -> Result<()> {
    let scene = Scene::without_timestamps()?;
    let _server = scene.pair.serve()?;
    let config = FixedConfig {
        isn: Isn::Backward,
        times: 6,
        pause_ms: 100,
        ..FixedConfig::new(scene.pair.service(), 800)
    };
    assert_eq!(scene.pair.client.fixed(&config)?.wait()?.ok, 6);
    std::thread::sleep(Duration::from_secs(1));
    let told = scene.server.of_type("look_alike")?;
    assert_eq!(told.len(), 1, "{told:#?}");
    Ok(())
}
