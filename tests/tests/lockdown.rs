//! A kernel booted with `lockdown=confidentiality`, where no program may read the kernel's memory: the packet hook is
//! left, which reads packets only; all is said, and the agent stays calm.

mod support;

use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use support::{Place, SECOND, fresh, total};
use tuplewatch_tests::prelude::*;

const COUNT: u64 = 20;

#[test]
#[ignore = "needs a kernel booted with lockdown=confidentiality: `cargo xtask vm --all`"]
fn packets_are_left() -> Result<()> {
    let state = std::fs::read_to_string("/sys/kernel/security/lockdown")?;
    ensure!(state.contains("[confidentiality]"), "{state}");
    let pair = Pair::new(PairConfig::default())?;
    doctor_says_so(&pair.server)?;
    let _server = pair.serve()?;
    let arguments = ["--summary-interval", "1s"];
    let agent = pair.server.agent(AgentConfig::with_args(arguments))?;
    let ready = agent.wait_ready(60 * SECOND)?;
    for hook in ready["hooks"].as_array().context("hooks")? {
        let expected = if hook["name"] == "packet" {
            "ok"
        } else {
            "off"
        };
        ensure!(hook["state"] == expected, "{hook}");
    }
    let said = agent.stderr();
    let load = LoadConfig {
        count: Some(COUNT),
        rate: 20.0,
        ..LoadConfig::new(pair.service())
    };
    let report = pair.client.load(&load)?.wait()?;
    ensure!(report.ok == COUNT, "{report:?}");
    pair.settle(SECOND, 20 * SECOND)?;
    let space = Place::responder(pair.client_address(), pair.service()).of(&fresh(&agent)?)?;
    for count in ["opens", "established"] {
        ensure!(total(&space, count) == COUNT, "{space}");
    }
    ensure!(agent.stderr() == said, "it goes on: {:#?}", agent.stderr());
    ensure!(agent.terminate()?.code() == Some(0));
    Ok(())
}

/// It fails, names the lockdown and what is lost, and that packets are left.
fn doctor_says_so(host: &Host) -> Result<()> {
    let mut command = Command::new(AgentConfig::default().binary()?);
    command.args(["doctor", "--json"]);
    let process = host.spawn("doctor", command)?;
    let status = process.wait(60 * SECOND * tuplewatch_tests::patience())?;
    let text = process.stdout().join("\n");
    let report: Value = serde_json::from_str(&text).with_context(|| process.describe())?;
    println!("{report:#}");
    ensure!(status.code() == Some(1), "{status}");
    let checks = report["checks"].as_array().context("checks")?;
    let check = |name: &str, of: Option<&str>| {
        let mut checks = checks.iter();
        let found = checks.find(|c| c["name"] == name && c["of"].as_str() == of);
        found.with_context(|| format!("no check {name} {of:?}"))
    };
    let lockdown = check("lockdown", None)?;
    ensure!(lockdown["level"] == "fail", "{lockdown}");
    let packet = check("hook", Some("packet"))?;
    ensure!(packet["level"] == "ok", "{packet}");
    let lifecycle = check("hook", Some("lifecycle"))?;
    ensure!(lifecycle["level"] == "fail", "{lifecycle}");
    Ok(())
}
