//! Cause `nat_syn_drop`: the device in between has no port left for one destination.

use std::io::Write as _;
use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::Value;
use tempfile::NamedTempFile;
use tuplewatch_tests::prelude::*;

use super::support::{Place, SECOND, fresh, look_alikes, number, total, watch};
use super::{causes, is_cause};

/// Ports of the device for each destination; two of five are taken by connections that stay.
const PORTS: u16 = 60;
const KEPT: usize = 24;
const HOLD: Duration = Duration::from_secs(30);

/// A client, a device that is about to run out of ports for one destination, and an agent at the client.
struct Scene {
    lab: Holding,
    agent: Agent,
    _config: NamedTempFile,
    _server: Server,
}

impl Scene {
    fn new(config: &str) -> Result<Self> {
        let lab = Holding::new(&HoldingConfig {
            pool: 2048..=2047 + PORTS,
            hold: HOLD,
        })?;
        let server = lab.serve_both()?;
        let mut file = NamedTempFile::with_suffix(".yaml")?;
        file.write_all(config.as_bytes())?;
        let path = file.path().to_string_lossy().into_owned();
        let agent = watch(&lab.clients[0], &["--config", &path])?;
        Ok(Self {
            lab,
            agent,
            _config: file,
            _server: server,
        })
    }

    fn group() -> String {
        format!(
            "egress_groups:\n- name: lab-nat\n  destinations: [203.0.113.0/24, 198.51.100.0/24]\n  ports: \
             {PORTS}\n  hold: {}s\n",
            HOLD.as_secs()
        )
    }

    fn place(&self) -> Place<'static> {
        Place::initiator(self.lab.client_address(0), self.lab.service())
    }

    /// Uses the ports for one destination up and goes on, beside a little load to the other; `found` looks
    /// whether the agent has said what it should.
    fn run(&self, patience_ms: u64, found: impl Fn(&Agent) -> Result<Value>) -> Result<Value> {
        let client = &self.lab.clients[0];
        let kept = client.pool(&PoolConfig {
            connections: KEPT,
            rate: 12.0,
            ..PoolConfig::new(self.lab.service())
        })?;
        let other = client.load(&LoadConfig {
            rate: 1.5,
            ..LoadConfig::new(self.lab.other())
        })?;
        let load = client.load(&LoadConfig {
            rate: 10.0,
            connect_timeout_ms: patience_ms,
            ..LoadConfig::new(self.lab.service())
        })?;
        let told = found(&self.agent)?;
        let (load, other, kept) = (load.stop()?, other.stop()?, kept.stop()?);
        println!("{load:?}\n{other:?}\n{kept:?}");
        // What really happened: the device had nothing left, for this destination alone, and what it
        // carried before lived on.
        let dropped = self.lab.dropped()?;
        let held = self
            .lab
            .truth()?
            .host("server")
            .distinct_ports_in(self.lab.nat_address());
        ensure!(dropped >= 5, "the device dropped {dropped} SYNs");
        ensure!(held <= usize::from(PORTS), "{held} ports");
        ensure!(load.failures() > 0, "no connection failed: {load:?}");
        ensure!(other.failures() == 0 && other.ok >= 5, "{other:?}");
        ensure!(
            kept.failed == 0 && kept.connections == KEPT as u64,
            "{kept:?}"
        );
        Ok(told)
    }
}

/// The alert, once it fires and says that connections fail.
fn alert(scene: &Scene) -> impl Fn(&Agent) -> Result<Value> {
    let place = scene.place();
    move |agent| {
        agent.wait_alert(40 * SECOND, |line| {
            is_cause(line, "nat_syn_drop")
                && place.is(line)
                && line["state"] == "firing"
                && line["severity"] == "critical"
        })
    }
}

/// It is told of this destination, with the device that the configuration names and what is taken of it.
fn check(scene: &Scene, told: &Value) -> Result<()> {
    println!("{}", told["summary"]);
    let egress = &told["evidence"]["egress"];
    ensure!(egress["group"] == "lab-nat", "{told}");
    ensure!(number(egress, "budget") == u64::from(PORTS), "{told}");
    let taken = number(egress, "in_use") + number(egress, "held");
    ensure!(taken * 10 >= u64::from(PORTS) * 8, "{taken} of {PORTS}");
    ensure!(
        number(&told["evidence"]["loss"], "live") >= KEPT as u64,
        "{told}"
    );
    ensure!(told["opened_by"][0]["command"] == "lab-peer", "{told}");
    // Nothing else is told: neither of the other destination, nor by another name.
    for line in scene.agent.alerts()? {
        ensure!(scene.place().is(&line), "somewhere else: {line}");
        ensure!(is_cause(&line, "nat_syn_drop"), "another cause: {line}");
    }
    ensure!(!look_alikes(&scene.agent)?.contains("firewall_drop"));
    Ok(())
}

/// Clients that wait long enough to send their SYNs again.
#[test]
fn a_device_without_ports() -> Result<()> {
    let scene = Scene::new(&Scene::group())?;
    let told = scene.run(5000, alert(&scene))?;
    check(&scene, &told)?;
    ensure!(number(&told["evidence"], "syn_retransmits") > 0, "{told}");
    let figures = [
        "loss.lost",
        "syn_retransmits",
        "loss.live",
        "loss.others_answering",
        "egress.held",
    ];
    Row::told(
        "a NAT without free ports drops SYNs",
        "client",
        &told,
        &figures,
    )
    .record()
}

/// Clients that give up after 300 ms: no SYN is ever sent again.
#[test]
fn impatient_clients() -> Result<()> {
    let scene = Scene::new(&Scene::group())?;
    let told = scene.run(300, alert(&scene))?;
    check(&scene, &told)?;
    let truth = scene.lab.truth()?;
    ensure!(truth.host("client1").counters.syn_repeat_out == 0);
    let space = scene.place().of(&fresh(&scene.agent)?)?;
    ensure!(total(&space, "syn_retransmits") == 0, "{space}");
    ensure!(total(&space, "abandoned") > 0, "{space}");
    let figures = [
        "loss.lost",
        "syn_retransmits",
        "loss.live",
        "loss.others_answering",
        "egress.held",
    ];
    Row::told(
        "a NAT without free ports drops SYNs, clients give up after 300 ms",
        "client",
        &told,
        &figures,
    )
    .record()
}

/// Nobody has said that there is a device: what is seen does not tell.
#[test]
fn a_device_that_is_not_configured() -> Result<()> {
    let scene = Scene::new("")?;
    let place = scene.place();
    let told = scene.run(5000, |agent| {
        agent.wait_line(40 * SECOND, |line| {
            line["type"] == "look_alike" && line["name"] == "unknown_connect_loss" && place.is(line)
        })
    })?;
    println!("{}", told["summary"]);
    ensure!(
        causes(&scene.agent)?.is_empty(),
        "{:?}",
        scene.agent.alerts()?
    );
    ensure!(look_alikes(&scene.agent)? == ["unknown_connect_loss".to_owned()].into());
    let figures = [
        "loss.lost",
        "syn_retransmits",
        "loss.live",
        "loss.others_answering",
    ];
    Row::told(
        "a NAT without free ports drops SYNs, no egress group is configured",
        "client",
        &told,
        &figures,
    )
    .record()
}
