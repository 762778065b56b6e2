//! Interfaces without Ethernet header whose packets carry what they were unpacked from in front of their data.

mod support;

use std::net::Ipv4Addr;

use anyhow::Result;
use serde_json::Value;
use support::{SECOND, fresh, number, watch};
use tuplewatch_tests::prelude::*;

/// A SYN's worth of packets that no known port space has.
const COUNT: u64 = 20;

/// A count of things that belong to no port space, or of losses, by its name.
fn global(agent: &Agent, host: &Host, name: &str) -> Result<u64> {
    let _ = fresh(agent)?;
    let status = page::Page::get(host, page::DEFAULT, "/status")?.json()?;
    let lists = ["losses", "unassigned"].map(|list| status[list].as_array().cloned());
    let mut counts = lists.into_iter().flatten().flatten();
    let found: Option<Value> = counts.find(|count| count["name"] == name);
    Ok(number(&found.unwrap_or_default(), "count"))
}

#[allow(dead_code, reason = "of the pages the state is looked at only")]
#[path = "http/page.rs"]
mod page;

/// Some tunnels leave the headers that they have taken off in front of a packet, and its link layer begins there:
/// sit, ipip and GRE before Linux 5.14, GRE without a fixed peer still. Here a device of raw IP gets packets
/// that a redirect has taken from an Ethernet device, which look the same: their data begin with the
/// Ethernet header, at a device that has none.
#[test]
fn what_was_unpacked_is_read_behind_its_wrapping() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let (own, peer) = (Ipv4Addr::new(10, 99, 0, 1), Ipv4Addr::new(10, 99, 0, 2));
    let server = &pair.server;
    let _tun = server.tun("tun0", own)?;
    pair.client
        .route_via(Some("10.99.0.0/24"), pair.service().ip())?;
    server.exec("tc", ["qdisc", "add", "dev", "eth0", "clsact"])?;
    let redirect = "filter add dev eth0 ingress protocol ip prio 10 u32 match ip dst 10.99.0.1/32 \
                    action mirred ingress redirect dev tun0";
    server.exec("tc", redirect.split_whitespace())?;
    let agent = watch(server, &["--interface", "tun0"])?;
    let syns = RawSynConfig {
        count: COUNT,
        ..RawSynConfig::new((own, 8080).into(), peer.into())
    };
    let sent = pair.client.rawsyn(&syns)?.wait()?.sent;
    let taken = || global(&agent, server, "syns_without_port_space");
    let mut seen = 0;
    wait_for(10 * SECOND, || {
        seen = taken().unwrap_or(0);
        seen == sent
    });
    assert_eq!((sent, seen), (COUNT, COUNT));
    assert_eq!(global(&agent, server, "unreadable")?, 0);
    Ok(())
}
