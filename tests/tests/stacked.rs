//! Interfaces that stand on another one: VLANs, also one within another, and tunnels. Their kinds are modules that not every
//! kernel has, so they run in virtual machines.

mod support;

use std::net::{IpAddr, SocketAddr};

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use support::{Place, SECOND, fresh, nothing_lost, nothing_told, total, watch};
use tuplewatch_tests::prelude::*;

const COUNT: u64 = 20;

/// An interface at both ends: `ip` commands, in which `OWN` and `PEER` are the addresses of `eth0`, and its addresses.
struct Stacked {
    name: &'static str,
    commands: &'static [&'static str],
    server: &'static str,
    client: &'static str,
    /// It must be told where the other end's address is.
    is_multipoint: bool,
}

impl Stacked {
    fn add(
        &self,
        host: &Host,
        [own, peer]: [IpAddr; 2],
        [address, other]: [&str; 2],
    ) -> Result<()> {
        let name = self.name;
        let mut lines = String::new();
        for command in self.commands {
            let command = command.replace("OWN", &own.to_string());
            lines += &format!("{}\n", command.replace("PEER", &peer.to_string()));
        }
        let (prefix, nodad) = if address.contains(':') {
            (64, "nodad")
        } else {
            (24, "")
        };
        lines += &format!("addr add {address}/{prefix} dev {name} {nodad}\nlink set {name} up\n");
        if self.is_multipoint {
            lines += &format!("neigh add {other} lladdr {peer} dev {name}\n");
        }
        host.ip_batch(&lines)
    }

    fn client(&self) -> Result<IpAddr> {
        Ok(self.client.parse()?)
    }

    fn service(&self) -> Result<SocketAddr> {
        Ok(SocketAddr::new(self.server.parse()?, 8080))
    }
}

/// Makes connections over each; the agent at the server watches these interfaces and sees every packet once.
fn all_are_seen(all: &[Stacked], watched: &Value) -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let (client, server) = (pair.client_address(), pair.service().ip());
    for stacked in all {
        let (at_server, at_client) = (stacked.server, stacked.client);
        stacked.add(&pair.server, [server, client], [at_server, at_client])?;
        stacked.add(&pair.client, [client, server], [at_client, at_server])?;
    }
    let agent = watch(&pair.server, &[])?;
    let ready = agent.wait_ready(SECOND)?;
    ensure!(ready["interfaces"] == *watched, "{ready}");
    for stacked in all {
        let service = stacked.service()?;
        let _server = pair.server.serve(&ServeConfig::closing_first(service))?;
        let load = LoadConfig {
            count: Some(COUNT),
            rate: 20.0,
            ..LoadConfig::new(service)
        };
        let report = pair.client.load(&load)?.wait()?;
        ensure!(report.ok == COUNT, "{}: {report:?}", stacked.name);
    }
    pair.settle(SECOND, 20 * SECOND)?;
    let summary = fresh(&agent)?;
    for stacked in all {
        let space = Place::responder(stacked.client()?, stacked.service()?).of(&summary)?;
        for count in ["opens", "established"] {
            ensure!(total(&space, count) == COUNT, "{}: {space}", stacked.name);
        }
    }
    nothing_lost(&agent)?;
    nothing_told(&agent)?;
    ensure!(agent.terminate()?.code() == Some(0));
    Ok(())
}

/// At the interface below, where the outer tag is beside the data and the inner one in them.
#[test]
#[ignore = "needs a kernel with 802.1Q: `cargo xtask vm`"]
fn vlans_one_within_another() -> Result<()> {
    let all = [
        Stacked {
            name: "v10",
            commands: &["link add link eth0 name v10 type vlan id 10"],
            server: "10.98.10.1",
            client: "10.98.10.2",
            is_multipoint: false,
        },
        Stacked {
            name: "c30",
            commands: &[
                "link add link eth0 name s20 type vlan proto 802.1ad id 20",
                "link set s20 up",
                "link add link s20 name c30 type vlan id 30",
            ],
            server: "fd98:30::1",
            client: "fd98:30::2",
            is_multipoint: false,
        },
    ];
    all_are_seen(&all, &json!(["eth0"]))
}

/// At the tunnels themselves; what carries them is no TCP. A GRE device without a fixed peer leaves the outer
/// header in front of the data.
#[test]
#[ignore = "needs a kernel with ipip, sit and GRE: `cargo xtask vm`"]
fn tunnels() -> Result<()> {
    let all = [
        Stacked {
            name: "gre1",
            commands: &["link add gre1 type gre local OWN remote PEER"],
            server: "10.97.1.1",
            client: "10.97.1.2",
            is_multipoint: false,
        },
        Stacked {
            name: "gre2",
            commands: &["link add gre2 type gre local OWN key 2"],
            server: "10.97.2.1",
            client: "10.97.2.2",
            is_multipoint: true,
        },
        Stacked {
            name: "ipip1",
            commands: &["link add ipip1 type ipip local OWN remote PEER"],
            server: "10.97.3.1",
            client: "10.97.3.2",
            is_multipoint: false,
        },
        Stacked {
            name: "sit1",
            commands: &["link add sit1 type sit local OWN remote PEER"],
            server: "fd97:4::1",
            client: "fd97:4::2",
            is_multipoint: false,
        },
    ];
    all_are_seen(&all, &json!(["eth0", "gre1", "gre2", "ipip1", "sit1"]))
}
