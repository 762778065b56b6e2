//! What must hold on every kernel: every hook works, what is read from the kernel's structures is what
//! `/proc/net/tcp` and the sockets' owners say, and the verifier's work stays within bounds.
//!
//! In a virtual machine (`cargo xtask vm`) the verdicts are left in `$TUPLEWATCH_OUT` for docs/kernels.md.

mod support;

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use aya::programs::loaded_programs;
use serde_json::{Value, json};
use support::kernel::{Held, has_tcx, passed_over};
use support::{Place, SECOND, fresh, number, total, watch};
use tuplewatch_tests::prelude::*;

/// Every hook is attached, and how much the verifier had to look at in each program.
#[test]
fn verdicts() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    // The programs for interfaces without Ethernet header come with the first of them.
    let _tun = pair.server.tun("tun0", "10.90.0.1".parse()?)?;
    pair.server.ip_batch("route add 10.91.0.0/24 dev tun0\n")?;
    let agent = pair.server.agent(AgentConfig::default())?;
    let ready = agent.wait_ready(180 * SECOND)?;
    let held = Held::by(agent.pid())?;
    let mut programs = BTreeMap::new();
    for info in loaded_programs() {
        let info = info?;
        if held.programs.contains(&info.id()) {
            let name = info.name_as_str().context("a name")?.to_owned();
            programs.insert(name, info.verified_instruction_count());
        }
    }
    let mut hooks = BTreeMap::new();
    for hook in ready["hooks"].as_array().context("hooks")? {
        let name = hook["name"].as_str().context("a name")?;
        hooks.insert(
            name,
            json!({"state": hook["state"], "detail": hook["detail"]}),
        );
    }
    let found = json!({
        "release": std::fs::read_to_string("/proc/sys/kernel/osrelease")?.trim(),
        "hooks": hooks,
        "interfaces": if has_tcx() { "tcx" } else { "clsact" },
        "programs": programs,
    });
    println!("{found:#}");
    if let Some(folder) = std::env::var_os("TUPLEWATCH_OUT") {
        let path = std::path::Path::new(&folder).join("kernel.json");
        std::fs::write(&path, found.to_string()).with_context(|| path.display().to_string())?;
    }
    for (name, hook) in hooks {
        ensure!(hook["state"] == "ok", "{name}: {hook}");
    }
    ensure!(ready["interfaces"] == json!(["eth0", "tun0"]), "{ready}");
    ensure!(agent.terminate()?.code() == Some(0));
    Ok(())
}

/// How often the kernel has skipped the agent's tracepoint programs. It cuts their names to 15 characters.
fn skipped(pid: u32) -> Result<u64> {
    let programs = [
        "inet_sock_set_s",
        "tcp_retransmit_",
        "tcp_send_reset",
        "tcp_receive_res",
    ];
    programs.iter().map(|name| passed_over(pid, name)).sum()
}

/// Kept connections, TIME_WAIT and processes of one address family at both ends.
fn content(family: Family) -> Result<()> {
    const KEPT: usize = 5;
    const CLOSED: u64 = 12;
    let pair = Pair::new(PairConfig {
        family,
        ..PairConfig::default()
    })?;
    // The client closes first: TIME_WAIT is on its side.
    let _server = pair.server.serve(&ServeConfig {
        keep_alive: true,
        ..ServeConfig::new(pair.service())
    })?;
    let agent = watch(&pair.client, &[])?;
    let load = pair.client.load(&LoadConfig {
        count: Some(CLOSED),
        rate: 20.0,
        ..LoadConfig::new(pair.service())
    })?;
    let report = load.wait()?;
    ensure!(report.ok == CLOSED, "{report:?}");
    let pool = pair.client.pool(&PoolConfig {
        connections: KEPT,
        rate: 10.0,
        seconds: 120.0,
        ..PoolConfig::new(pair.service())
    })?;
    let place = Place::socket(pair.client_address(), pair.service());
    let opens = CLOSED + KEPT as u64;
    // Sockets and counts are not read at the same moment. What the kernel has not told cannot be counted; it cuts
    // the program's name to 15 characters.
    let missed = || passed_over(agent.pid(), "inet_sock_set_s");
    let settled = |space: &Value, missed: u64| {
        let told = opens.saturating_sub(missed)..=opens;
        space["in_use"] == KEPT
            && space["time_wait"]["total"] == CLOSED
            && told.contains(&total(space, "opens"))
            && told.contains(&total(space, "established"))
    };
    let mut space = place.of(&fresh(&agent)?)?;
    for _ in 0..20 {
        if settled(&space, missed()?) {
            break;
        }
        space = place.of(&fresh(&agent)?)?;
    }
    let missed = missed()?;
    ensure!(
        settled(&space, missed),
        "not {KEPT} in use, {CLOSED} in TIME_WAIT, {opens} opens (the program was passed over {missed} times): {space}"
    );
    let before = skipped(agent.pid())?;
    let told = number(&fresh(&agent)?["globals"], "runs_skipped");
    let after = skipped(agent.pid())?;
    println!("runs skipped by the kernel: {told}");
    ensure!(
        (before..=after).contains(&told),
        "{told} runs skipped, {before} to {after} by the kernel"
    );
    let lines = agent.of_type("loss")?;
    let line = lines.iter().find(|line| line["name"] == "runs_skipped");
    ensure!(line.is_some() == (told > 0), "{lines:?}");
    let table = pair.client.tcp_states()?;
    ensure!(table.count("TIME_WAIT") as u64 == number(&space["time_wait"], "total"));
    ensure!(table.count("ESTABLISHED") as u64 == number(&space, "in_use"));
    let rows = || {
        table
            .in_state("ESTABLISHED")
            .chain(table.in_state("TIME_WAIT"))
    };
    for row in rows() {
        ensure!(
            row.remote == pair.service() && row.local.ip() == pair.client_address(),
            "{row:?}"
        );
    }
    ensure!(
        pair.client.snmp()?.get("TcpActiveOpens") == i64::try_from(opens)?,
        "the kernel counts otherwise"
    );
    ensure!(space["netns"] == pair.client.netns_inode(), "{space}");
    println!("{space:#}");
    pool.stop()?;
    agent.terminate()?;
    Ok(())
}

#[test]
fn content_ipv4() -> Result<()> {
    content(Family::V4)
}

#[test]
fn content_ipv6() -> Result<()> {
    content(Family::V6)
}
