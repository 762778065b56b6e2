//! Programs of clsact (below Linux 6.6) outlive their process: what the agent's guard takes away when the agent is
//! killed, and what it leaves alone. Where there is tcx the agent is kept from it.

mod support;

use std::fs;

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use support::confined::without_tcx;
use support::foreign::{Foreign, SIDES};
use support::kernel::{Held, filters};
use support::{Place, SECOND, fresh, total};
use tuplewatch_tests::{patience, prelude::*};

/// An agent that has to do with clsact.
fn watch(host: &Host) -> Result<Agent> {
    let netns = host.netns_inode().to_string();
    let arguments = ["--netns", &netns, "--summary-interval", "1s"];
    let agent = host.agent_as(without_tcx()?, AgentConfig::with_args(arguments))?;
    let ready = agent.wait_ready(60 * SECOND)?;
    ensure!(
        ready["interfaces"] == serde_json::json!(["eth0"]),
        "{ready}"
    );
    Ok(agent)
}

/// Waits, longer on an emulated machine.
fn soon(condition: impl FnMut() -> bool) -> bool {
    wait_for(20 * SECOND * patience(), condition)
}

/// Names of the filters on the way in and out, first to last.
fn all(host: &Host) -> Result<[Vec<String>; 2]> {
    let [ingress, egress] = SIDES;
    Ok([
        filters(host, "eth0", ingress)?,
        filters(host, "eth0", egress)?,
    ])
}

/// Whether ours stand first, and how many others behind them.
fn first(host: &Host, others: usize) -> bool {
    let is_first = |found: &[String], ours: &str| {
        found.split_first().is_some_and(|(first, rest)| {
            first == ours && rest.len() == others && rest.iter().all(|name| name == "foreign_ok")
        })
    };
    all(host).is_ok_and(|[ingress, egress]| {
        is_first(&ingress, "tuplewatch_in") && is_first(&egress, "tuplewatch_out")
    })
}

fn has_clsact(host: &Host) -> Result<bool> {
    let shown = host.exec("tc", ["qdisc", "show", "dev", "eth0"])?;
    Ok(shown.stdout.contains("clsact"))
}

/// The agent's guard: its child of that name.
fn guard(agent: &Agent) -> Result<Pid> {
    let mut found = None;
    let has_started = wait_for(10 * SECOND * patience(), || {
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
        found = processes
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .find(|pid: &i32| {
                // pid (name) state parent …
                let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
                stat.contains(" (tw-guard) ")
                    && stat
                        .rsplit(") ")
                        .next()
                        .and_then(|rest| rest.split(' ').nth(1))
                        == Some(&agent.pid().to_string())
            })
            .and_then(Pid::from_raw);
        found.is_some()
    });
    ensure!(has_started, "no guard: {}", agent.process().describe());
    found.context("a guard")
}

fn is_there(process: Pid) -> bool {
    fs::exists(format!("/proc/{}", process.as_raw_nonzero())).unwrap_or(false)
}

/// Makes 20 connections: the agent counts them all, and each foreign program still sees packets.
fn all_see(pair: &Pair, agent: &Agent, foreign: &[Foreign]) -> Result<()> {
    let runs = || -> Result<Vec<u64>> { foreign.iter().map(Foreign::runs).collect() };
    let before = runs()?;
    let load = LoadConfig {
        count: Some(20),
        rate: 50.0,
        ..LoadConfig::new(pair.service())
    };
    assert_eq!(pair.client.load(&load)?.wait()?.ok, 20);
    pair.settle(SECOND, 20 * SECOND)?;
    let space = Place::responder(pair.client_address(), pair.service()).of(&fresh(agent)?)?;
    assert_eq!(total(&space, "opens"), 20, "{space}");
    assert_eq!(total(&space, "established"), 20, "{space}");
    // Of those, the one that is first ends the chain.
    let ran = runs()?
        .iter()
        .zip(&before)
        .map(|(after, before)| after - before)
        .max();
    assert!(
        ran.is_none_or(|ran| ran >= 20 * 5),
        "the foreign programs ran {ran:?} times"
    );
    Ok(())
}

/// Programs of somebody else sit before and after ours when they come; killed three times, the agent leaves theirs and
/// nothing of its own.
#[test]
fn killed_three_times_it_leaves_only_others() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let _server = pair.serve()?;
    let mut foreign = vec![Foreign::clsact(&pair.server)?];
    for round in 1..=3_u16 {
        let agent = watch(&pair.server)?;
        ensure!(
            first(&pair.server, foreign.len()),
            "{:?}",
            all(&pair.server)?
        );
        // The newest comes first, until we have taken the place back.
        foreign.push(Foreign::filter(&pair.server, 1 + round)?);
        let others = foreign.len();
        ensure!(
            soon(|| first(&pair.server, others)),
            "{:?}",
            all(&pair.server)?
        );
        all_see(&pair, &agent, &foreign)?;
        let held = Held::by(agent.pid())?;
        let guard = guard(&agent)?;
        agent.kill9();
        let is_clean = soon(|| {
            let others = vec!["foreign_ok".to_owned(); others];
            !is_there(guard)
                && all(&pair.server).is_ok_and(|found| found == [others.clone(), others])
        });
        ensure!(is_clean, "after kill {round}: {:?}", all(&pair.server)?);
        ensure!(
            soon(|| held.is_gone()),
            "after kill {round}: {:?}",
            held.left()?
        );
    }
    ensure!(has_clsact(&pair.server)?, "the qdisc was not ours");
    Ok(())
}

/// A qdisc that the agent has made goes with it, however it ends.
#[test]
fn a_qdisc_of_its_own_goes_with_it() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    for is_killed in [true, false] {
        let agent = watch(&pair.server)?;
        ensure!(
            has_clsact(&pair.server)? && first(&pair.server, 0),
            "{:?}",
            all(&pair.server)?
        );
        let guard = guard(&agent)?;
        let size = support::kernel::resident_kib(guard.as_raw_nonzero().get().cast_unsigned())?;
        println!("the guard has {size} KiB resident");
        if is_killed {
            agent.kill9();
        } else {
            assert_eq!(agent.terminate()?.code(), Some(0));
            ensure!(!is_there(guard), "the agent has waited for it");
        }
        ensure!(soon(|| !is_there(guard)), "the guard goes on");
        ensure!(!has_clsact(&pair.server)?, "killed: {is_killed}");
    }
    Ok(())
}

/// What ends a whole service, its control group or a terminal's processes does not end the guard before its time.
#[test]
fn signals_to_all_do_not_end_the_guard() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let agent = watch(&pair.server)?;
    let guard = guard(&agent)?;
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        kill_process(guard, signal)?;
    }
    std::thread::sleep(SECOND);
    ensure!(is_there(guard), "a signal has ended it");
    agent.kill9();
    ensure!(soon(|| !is_there(guard)), "the guard goes on");
    ensure!(!has_clsact(&pair.server)?);
    Ok(())
}

/// A guard that somebody has killed is replaced by one that knows as much.
#[test]
fn a_killed_guard_is_replaced() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let agent = watch(&pair.server)?;
    let before = guard(&agent)?;
    kill_process(before, Signal::KILL)?;
    ensure!(
        soon(|| guard(&agent).is_ok_and(|now| now != before)),
        "{:?}",
        agent.stderr()
    );
    ensure!(first(&pair.server, 0), "{:?}", all(&pair.server)?);
    let after = guard(&agent)?;
    agent.kill9();
    ensure!(soon(|| !is_there(after)), "the guard goes on");
    ensure!(!has_clsact(&pair.server)?);
    Ok(())
}

/// An agent that is started before the guard of the one before has done its work keeps what it has set.
#[test]
fn the_next_agent_is_left_alone() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let _server = pair.serve()?;
    let killed = watch(&pair.server)?;
    let guard = guard(&killed)?;
    // Its pipe does not close before this does.
    let pipe = format!("/proc/{}/fd/0", guard.as_raw_nonzero());
    let pipe = fs::File::options().write(true).open(pipe)?;
    killed.kill9();
    ensure!(first(&pair.server, 0), "they outlive the process");
    let agent = watch(&pair.server)?;
    ensure!(first(&pair.server, 0), "{:?}", all(&pair.server)?);
    drop(pipe);
    ensure!(soon(|| !is_there(guard)), "the guard goes on");
    ensure!(first(&pair.server, 0), "{:?}", all(&pair.server)?);
    all_see(&pair, &agent, &[])
}
