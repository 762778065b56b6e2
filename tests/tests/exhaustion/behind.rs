//! Who opens the connections where this host translates them and only its outer interface is hooked: pods
//! behind masquerade, and a service's address in front of its backends. SYNs that a device beyond drops
//! get no answer, so that nothing but conntrack tells whose they are.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::Value;
use tempfile::NamedTempFile;
use tuplewatch_tests::prelude::*;

use super::is_cause;
use super::support::{Place, SECOND, watch_all};

const PORTS: u16 = 60;
const HOLD: Duration = Duration::from_secs(30);

/// Two pods behind a node that masquerades; beyond it a device with few ports.
struct Node {
    lab: Holding,
    pods: [Host; 2],
    agent: Agent,
    _config: NamedTempFile,
    _server: Server,
}

impl Node {
    /// `rules` are the node's further rules in the chain `arriving` of its table `nat`.
    fn new(rules: &str) -> Result<Self> {
        let lab = Holding::new(&HoldingConfig {
            pool: 2048..=2047 + PORTS,
            hold: HOLD,
        })?;
        let server = lab.serve_both()?;
        let node = &lab.clients[0];
        let mut pods = Vec::new();
        for n in [1, 2] {
            let pod = lab.host(&format!("pod{n}"))?;
            let (inner, outer) = (format!("10.90.{n}.2/24"), format!("10.90.{n}.1/24"));
            lab.link(
                &LinkEnd::new(&pod, "eth0", &[&inner]),
                &LinkEnd::new(node, &format!("p{n}"), &[&outer]),
            )?;
            pod.route_via(None, [10, 90, n, 1].into())?;
            pods.push(pod);
        }
        node.forward()?;
        node.nft(&format!(
            "table ip node {{
  chain arriving {{ type nat hook prerouting priority dstnat;
    {rules}
  }}
  chain leaving {{ type nat hook postrouting priority srcnat; oifname \"eth0\" masquerade; }}
}}"
        ))?;
        let mut file = NamedTempFile::with_suffix(".yaml")?;
        write!(
            file,
            "egress_groups:\n- name: lab-nat\n  destinations: [203.0.113.0/24]\n  ports: {PORTS}\n  hold: {}s\n",
            HOLD.as_secs()
        )?;
        let path = file.path().to_string_lossy().into_owned();
        let inodes = [node, &pods[0], &pods[1]].map(|host| host.netns_inode().to_string());
        let mut args = vec!["--interface", "eth0", "--config", &path];
        args.extend(["--log", "tuplewatch::source::kernel::conntrack=debug,warn"]);
        for inode in &inodes {
            args.extend(["--netns", inode]);
        }
        let agent = watch_all(node, &args)?;
        let [one, two]: [Host; 2] = pods.try_into().expect("two");
        Ok(Self {
            lab,
            pods: [one, two],
            agent,
            _config: file,
            _server: server,
        })
    }

    /// Both pods open connections to `to` until the alert at the wire names both.
    fn run(&self, to: SocketAddr) -> Result<Value> {
        let loads = [0, 1].map(|n| {
            self.pods[n].load(&LoadConfig {
                rate: 5.0,
                connect_timeout_ms: 300,
                ..LoadConfig::new(to)
            })
        });
        let loads = loads.into_iter().collect::<Result<Vec<_>>>()?;
        let pids: BTreeSet<u64> = loads.iter().map(|load| u64::from(load.pid())).collect();
        let place = Place::initiator(self.lab.client_address(0), self.lab.service());
        let fired = self.agent.wait_alert(60 * SECOND, |line| {
            is_cause(line, "nat_syn_drop") && place.is(line) && line["state"] == "firing"
        })?;
        println!("{}\n{}", fired["summary"], fired["opened_by"]);
        let openers = fired["opened_by"].as_array().into_iter().flatten();
        let named: BTreeSet<u64> = openers.filter_map(|o| o["pid"].as_u64()).collect();
        ensure!(named == pids, "{named:?}, not {pids:?}");
        // The pods' sockets are in trouble first, but what helps is about the address on the wire.
        let kinds = ["alert", "look_alike"];
        let mut told = self.agent.lines()?;
        told.retain(|line| kinds.iter().any(|kind| line["type"] == *kind));
        let (wire, others): (Vec<_>, Vec<_>) = told.iter().partition(|line| place.is(line));
        ensure!(
            others.is_empty() && !wire.is_empty(),
            "told twice: {others:#?}"
        );
        for load in loads {
            let report = load.stop()?;
            ensure!(report.failures() > 0 && report.ok > 0, "{report:?}");
        }
        ensure!(self.lab.dropped()? >= 5);
        Ok(fired)
    }
}

/// Each pod's address becomes the node's.
#[test]
fn pods_behind_masquerade() -> Result<()> {
    let node = Node::new("")?;
    node.run(node.lab.service())?;
    Ok(())
}

/// A hundred thousand other connections are tracked: those in trouble are looked up one by one. Only what the
/// sockets' SYNs become, whose ports nobody knows, takes a pass through the table.
#[test]
fn among_a_hundred_thousand() -> Result<()> {
    let node = Node::new("")?;
    node.lab.clients[0].track(100_000)?;
    node.run(node.lab.service())?;
    let log = node.agent.stderr();
    let lines = |what: &str| {
        let lines = log.iter().filter(|line| line.contains(what)).cloned();
        lines.collect::<Vec<_>>()
    };
    let (single, passes) = (
        lines("connections looked up"),
        lines("a pass for its service"),
    );
    println!("{single:#?}\n{passes:#?}");
    ensure!(
        !single.is_empty() && single.iter().all(|line| line.contains("at the wire")),
        "{single:#?}"
    );
    ensure!(
        passes.len() == 1 && passes[0].contains("at the socket"),
        "{passes:#?}"
    );
    Ok(())
}

/// The service's address becomes a backend's, too, as kube-proxy does it.
#[test]
fn a_service_before_its_backend() -> Result<()> {
    let node = Node::new("ip daddr 10.96.0.10 tcp dport 80 dnat to 203.0.113.10:8080")?;
    node.run(SocketAddr::new([10, 96, 0, 10].into(), 80))?;
    Ok(())
}
