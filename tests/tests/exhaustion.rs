//! Exhausted source ports: those of a device in between, those of this host, those that will be gone soon,
//! and those that two connections have at once. Each must be called by its cause, at the right place,
//! with the process that takes the ports.

mod support;

// First in the alphabet, because it takes longest and the others run beside it.
#[path = "exhaustion/ahead.rs"]
mod ahead;
#[path = "exhaustion/behind.rs"]
mod behind;
#[path = "exhaustion/collision.rs"]
mod collision;
#[path = "exhaustion/device.rs"]
mod device;
#[path = "exhaustion/host.rs"]
mod host;

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde_json::Value;
use support::{Place, watch_at};
use tuplewatch_tests::prelude::*;
use tuplewatch_tests::report::ConnectionEvent;

fn is_cause(line: &Value, cause: &str) -> bool {
    line["type"] == "alert" && line["signature"] == "port_exhaustion" && line["cause"] == cause
}

/// The latest line of an agent about a cause at a place.
fn latest(agent: &Agent, cause: &str, place: &Place<'_>) -> Result<Option<Value>> {
    let mut alerts = agent.alerts()?;
    alerts.retain(|alert| is_cause(alert, cause) && place.is(alert));
    Ok(alerts.pop())
}

/// The causes that the agent has told of, in whatever state.
fn causes(agent: &Agent) -> Result<std::collections::BTreeSet<String>> {
    let alerts = agent.alerts()?;
    let names = alerts.iter().filter_map(|alert| alert["cause"].as_str());
    Ok(names.map(str::to_owned).collect())
}

/// A pair whose client has few source ports and closes first.
struct FewPorts {
    pair: Pair,
    agent: Agent,
    _server: Server,
}

impl FewPorts {
    fn new(ports: u16) -> Result<Self> {
        Self::counted(ports, "1s")
    }

    /// Sockets are counted at this interval.
    fn counted(ports: u16, census: &str) -> Result<Self> {
        let pair = Pair::new(PairConfig::default())?;
        let range = format!("40000 {}", 39_999 + ports);
        pair.client.sysctl("net.ipv4.ip_local_port_range", range)?;
        pair.client.sysctl("net.ipv4.tcp_tw_reuse", 0)?;
        let server = pair.server.serve(&ServeConfig::new(pair.service()))?;
        let netns = pair.client.netns_inode().to_string();
        let agent = watch_at(&pair.client, census, &["--netns", &netns])?;
        Ok(Self {
            pair,
            agent,
            _server: server,
        })
    }

    fn place(&self) -> Place<'static> {
        Place::socket(self.pair.client_address(), self.pair.service())
    }

    fn load(&self, load: LoadConfig) -> Result<Load> {
        self.pair.client.load(&LoadConfig {
            events: true,
            ..load
        })
    }
}

fn found_no_port(event: &ConnectionEvent) -> bool {
    matches!(event.outcome.as_str(), "no_port" | "addr_in_use")
}

/// When the first connect() or bind() found no port, and when the agent said what `told` accepts.
fn race(
    load: &Load,
    agent: &Agent,
    limit: Duration,
    told: impl Fn(&Value) -> bool,
) -> Result<(Instant, Instant, Value)> {
    let (mut first, mut said) = (None, None);
    let end = Instant::now() + limit;
    while Instant::now() < end {
        if first.is_none() && load.events().iter().any(found_no_port) {
            first = Some(Instant::now());
        }
        if said.is_none()
            && let Some(line) = agent.alerts()?.into_iter().find(&told)
        {
            said = Some((Instant::now(), line));
        }
        if let (Some(first), Some((at, line))) = (first, &said) {
            return Ok((first, *at, line.clone()));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    bail!(
        "connect() failed: {first:?}, told: {said:?}; {:#?}",
        agent.lines()?
    )
}
