//! Somebody else's programs on the same interface, which end the chain with OK as a CNI's do: we
//! still see every packet, and they still run.

mod support;

use anyhow::{Context as _, Result};
use aya::programs::{LinkOrder, TcAttachType};
use support::confined::{Binary, NOBODY};
use support::foreign::{Foreign, SIDES};
use support::kernel::{chain, is_hooked};
use support::{Place, SECOND, fresh, nothing_told, total, watch};
use tuplewatch_tests::{patience, prelude::*};

/// Makes 20 connections: the agent must count them all, and the foreign program must see the packets
/// of every one.
fn both_see(pair: &Pair, agent: &Agent, foreign: &Foreign, before: u64) -> Result<()> {
    let load = LoadConfig {
        count: Some(20),
        rate: 50.0,
        ..LoadConfig::new(pair.service())
    };
    let runs = foreign.runs()?;
    let packets = |truth: Truth| {
        let counters = truth.host("server").counters;
        counters.tcp_in + counters.tcp_out
    };
    let sent = packets(pair.truth()?);
    assert_eq!(pair.client.load(&load)?.wait()?.ok, 20);
    pair.settle(SECOND, 20 * SECOND)?;
    let space = Place::responder(pair.client_address(), pair.service()).of(&fresh(agent)?)?;
    assert_eq!(total(&space, "opens"), before + 20, "{space}");
    assert_eq!(total(&space, "established"), before + 20, "{space}");
    let (ran, sent) = (foreign.runs()? - runs, packets(pair.truth()?) - sent);
    // It sees neighbour discovery too.
    assert!(ran >= sent, "it ran {ran} times for {sent} packets");
    nothing_told(agent)
}

fn first_of(pair: &Pair, side: TcAttachType) -> Result<String> {
    let programs = chain(&pair.server, "eth0", side)?;
    programs.into_iter().next().context("an empty chain")
}

/// It was there before us: we go in front of it.
#[test]
fn a_tcx_program_before_us() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let _server = pair.serve()?;
    let foreign = Foreign::tcx(&pair.server, LinkOrder::first)?;
    let agent = watch(&pair.server, &[])?;
    assert_eq!(
        chain(&pair.server, "eth0", TcAttachType::Ingress)?,
        ["tuplewatch_in", "foreign_ok"]
    );
    both_see(&pair, &agent, &foreign, 0)
}

/// It comes later and takes the first place: until we are first again we are blind, then no more.
#[test]
fn a_tcx_program_after_us() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let _server = pair.serve()?;
    let agent = watch(&pair.server, &[])?;
    let foreign = Foreign::tcx(&pair.server, LinkOrder::first)?;
    assert!(
        wait_for(20 * SECOND, || is_hooked(&pair.server, "eth0")),
        "{:?}",
        chain(&pair.server, "eth0", TcAttachType::Ingress)?
    );
    for side in SIDES {
        assert_ne!(first_of(&pair, side)?, "foreign_ok");
        assert_eq!(chain(&pair.server, "eth0", side)?.len(), 2);
    }
    both_see(&pair, &agent, &foreign, 0)?;
    // The foreign program stays alone when we go.
    assert_eq!(agent.terminate()?.code(), Some(0));
    for side in SIDES {
        assert!(wait_for(10 * SECOND, || {
            chain(&pair.server, "eth0", side).is_ok_and(|c| c == ["foreign_ok"])
        }));
    }
    Ok(())
}

/// With the rights of the unit alone, which do not let it know the names of other people's programs.
#[test]
fn the_first_place_is_kept_without_cap_sys_admin() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let binary = Binary::new()?;
    let rights = ["bpf", "perfmon", "net_admin"].map(str::to_owned);
    let mut command = binary.confined(NOBODY, &rights);
    command.args(["run", "--format", "json"]);
    let agent = pair.server.spawn("tuplewatch", command)?;
    let hooked = || is_hooked(&pair.server, "eth0");
    assert!(wait_for(60 * SECOND, hooked), "{}", agent.describe());
    let _foreign = Foreign::tcx(&pair.server, LinkOrder::first)?;
    assert!(!is_hooked(&pair.server, "eth0"));
    assert!(wait_for(20 * SECOND, hooked), "{}", agent.describe());
    assert!(agent.terminate(10 * SECOND)?.success());
    Ok(())
}

/// It goes behind us, as a well-mannered one does.
#[test]
fn a_tcx_program_behind_us() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let _server = pair.serve()?;
    let agent = watch(&pair.server, &[])?;
    let foreign = Foreign::tcx(&pair.server, LinkOrder::last)?;
    both_see(&pair, &agent, &foreign, 0)?;
    both_see(&pair, &agent, &foreign, 20)
}

/// A clsact filter that was there before us.
#[test]
fn a_clsact_filter_before_us() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let _server = pair.serve()?;
    let foreign = Foreign::clsact(&pair.server)?;
    let agent = watch(&pair.server, &[])?;
    both_see(&pair, &agent, &foreign, 0)?;
    // The filter and its qdisc are left alone when we go.
    assert_eq!(agent.terminate()?.code(), Some(0));
    let filters = pair
        .server
        .exec("tc", ["filter", "show", "dev", "eth0", "ingress"])?;
    assert!(filters.stdout.contains("foreign_ok"), "{}", filters.stdout);
    assert!(!filters.stdout.contains("tuplewatch"), "{}", filters.stdout);
    Ok(())
}

/// A clsact filter that comes after us. Where there is no tcx the newest comes first, until we have taken the place back.
#[test]
fn a_clsact_filter_after_us() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let _server = pair.serve()?;
    let agent = watch(&pair.server, &[])?;
    let foreign = Foreign::clsact(&pair.server)?;
    assert!(
        wait_for(20 * SECOND * patience(), || is_hooked(&pair.server, "eth0")),
        "{:?}",
        chain(&pair.server, "eth0", TcAttachType::Ingress)?
    );
    both_see(&pair, &agent, &foreign, 0)
}
