//! Interfaces and namespaces that come and go while the agent runs.

mod support;

use anyhow::Result;
use support::kernel::is_hooked;
use support::{Place, SECOND, fresh, nothing_told, total, watch};
use tuplewatch_tests::prelude::*;

/// Joins two hosts: `client` 10.88.N.2 and `server` 10.88.N.1, both by `eth0`.
fn join(lab: &Lab, client: &Host, server: &Host, n: u8) -> Result<()> {
    let (own, other) = (format!("10.88.{n}.2/24"), format!("10.88.{n}.1/24"));
    lab.link(
        &LinkEnd::new(client, "eth0", &[&own]),
        &LinkEnd::new(server, "eth0", &[&other]),
    )
}

/// A number of connections to a server, one after the other; all must succeed.
fn connections(client: &Host, to: std::net::SocketAddr, count: u64) -> Result<()> {
    let load = LoadConfig {
        count: Some(count),
        rate: 50.0,
        ..LoadConfig::new(to)
    };
    let report = client.load(&load)?.wait()?;
    assert_eq!(report.ok, count, "{report:?}");
    Ok(())
}

/// The interface is deleted and made again under the same name: the new one is hooked, and the
/// counts go on.
#[test]
fn an_interface_removed_and_added_again() -> Result<()> {
    let lab = Lab::new()?;
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    join(&lab, &client, &server, 1)?;
    let service = "10.88.1.1:8080".parse()?;
    let _server = server.serve(&ServeConfig::closing_first("0.0.0.0:8080".parse()?))?;
    let agent = watch(&server, &[])?;
    let place = Place::responder("10.88.1.2".parse()?, service);
    connections(&client, service, 10)?;
    assert_eq!(total(&place.of(&fresh(&agent)?)?, "established"), 10);
    for round in 2..=3 {
        server.ip_batch("link del eth0\n")?;
        // The agent must have been without an interface in between.
        fresh(&agent)?;
        join(&lab, &client, &server, 1)?;
        assert!(
            wait_for(15 * SECOND, || is_hooked(&server, "eth0")),
            "the new eth0 is not hooked: {}",
            agent.process().describe()
        );
        connections(&client, service, 10)?;
        let space = place.of(&fresh(&agent)?)?;
        assert_eq!(total(&space, "opens"), round * 10, "{space}");
        assert_eq!(total(&space, "established"), round * 10, "{space}");
    }
    nothing_told(&agent)?;
    assert_eq!(agent.terminate()?.code(), Some(0));
    Ok(())
}

/// An agent without any restriction in one host counts the sockets of a host made later.
#[test]
fn a_namespace_made_after_the_agent() -> Result<()> {
    let lab = Lab::new()?;
    let node = lab.host("node")?;
    let agent = watch_all_without_wire(&node)?;
    let (pod, server) = (lab.host("pod")?, lab.host("server")?);
    join(&lab, &pod, &server, 2)?;
    let service = "10.88.2.1:8080".parse()?;
    let _server = server.serve(&ServeConfig::closing_first(service))?;
    connections(&pod, service, 7)?;
    let place = Place::socket("10.88.2.2".parse()?, service);
    // Other tests have the same addresses in other namespaces.
    let of_pod = |summary: &serde_json::Value| {
        summary["spaces"]
            .as_array()
            .into_iter()
            .flatten()
            .find(|space| place.is(space) && space["netns"] == pod.netns_inode())
            .cloned()
    };
    let space = of_pod(&fresh(&agent)?).expect("a port space of the pod's namespace");
    assert_eq!(total(&space, "opens"), 7, "{space}");
    assert_eq!(total(&space, "established"), 7, "{space}");
    // Kept connections are seen by the census too.
    let pool = pod.pool(&PoolConfig {
        connections: 3,
        rate: 30.0,
        ..PoolConfig::new(service)
    })?;
    let in_use = || {
        fresh(&agent)
            .ok()
            .and_then(|s| of_pod(&s))
            .map(|s| s["in_use"].clone())
    };
    assert!(
        wait_for(10 * SECOND, || in_use().is_some_and(|n| n == 3)),
        "in use: {:?}",
        in_use()
    );
    pool.stop()?;
    support::no_alert(&agent)
}

/// `--netns` restricts the agent to the sockets of the namespaces named.
#[test]
fn a_restricted_agent_sees_its_own_only() -> Result<()> {
    let lab = Lab::new()?;
    let (one, two, server) = (lab.host("one")?, lab.host("two")?, lab.host("server")?);
    join(&lab, &one, &server, 3)?;
    lab.link(
        &LinkEnd::new(&two, "eth0", &["10.88.4.2/24"]),
        &LinkEnd::new(&server, "eth1", &["10.88.4.1/24"]),
    )?;
    let _server = server.serve(&ServeConfig::closing_first("0.0.0.0:8080".parse()?))?;
    let restricted = watch(&one, &[])?;
    let path = two.netns_path();
    let both = watch(&one, &["--netns", &path.to_string_lossy()])?;
    let to_one = "10.88.3.1:8080".parse()?;
    let to_two = "10.88.4.1:8080".parse()?;
    connections(&one, to_one, 5)?;
    connections(&two, to_two, 6)?;
    let summary = fresh(&restricted)?;
    let own = Place::socket("10.88.3.2".parse()?, to_one).of(&summary)?;
    assert_eq!(total(&own, "opens"), 5);
    for space in summary["spaces"].as_array().into_iter().flatten() {
        assert!(
            space["netns"].is_null() || space["netns"] == one.netns_inode(),
            "somebody else's: {space}"
        );
    }
    let summary = fresh(&both)?;
    let own = Place::socket("10.88.3.2".parse()?, to_one).of(&summary)?;
    assert_eq!(total(&own, "opens"), 5);
    let other = Place::socket("10.88.4.2".parse()?, to_two).of(&summary)?;
    assert_eq!(total(&other, "opens"), 6);
    assert_eq!(other["netns"], two.netns_inode());
    Ok(())
}

/// In a host without any interface but loopback the packet hook has nowhere to go, and says so.
fn watch_all_without_wire(host: &Host) -> Result<Agent> {
    let agent = host.agent(AgentConfig::with_args([
        "--summary-interval",
        "1s",
        "--census-interval",
        "1s",
        "--top",
        "500",
    ]))?;
    let ready = agent.wait_ready(60 * SECOND)?;
    for hook in ready["hooks"].as_array().into_iter().flatten() {
        let expected = if hook["name"] == "packet" {
            "off"
        } else {
            "ok"
        };
        assert_eq!(hook["state"], expected, "{hook}");
        assert!(hook["state"] == "ok" || hook["detail"] != "", "{hook}");
    }
    Ok(agent)
}

/// An agent that started without an interface hooks the one that comes, and counts on it.
#[test]
fn an_interface_that_comes_later() -> Result<()> {
    let lab = Lab::new()?;
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    let agent = watch_all_without_wire(&server)?;
    join(&lab, &client, &server, 5)?;
    assert!(wait_for(15 * SECOND, || is_hooked(&server, "eth0")));
    let service = "10.88.5.1:8080".parse()?;
    let _server = server.serve(&ServeConfig::closing_first(service))?;
    connections(&client, service, 10)?;
    let place = Place::responder("10.88.5.2".parse()?, service);
    assert_eq!(total(&place.of(&fresh(&agent)?)?, "established"), 10);
    // Unrestricted, it may have been told of others' troubles; not of this one's.
    let client = "10.88.5.2";
    assert!(
        agent
            .alerts()?
            .iter()
            .all(|a| a["client.address"] != client)
    );
    Ok(())
}
