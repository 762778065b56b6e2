//! `tuplewatch doctor`: what it says in each state of the rights and of the host, its exit codes, and that
//! it leaves nothing behind.

mod support;

use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use aya::programs::{LinkOrder, TcAttachType};
use serde_json::Value;
use support::SECOND;
use support::confined::{Binary, NOBODY, without_btf, without_tcx};
use support::foreign::{Foreign, SIDES};
use support::kernel::{Held, chain};
use tuplewatch_tests::prelude::*;

/// What it said, as JSON.
struct Said {
    code: Option<i32>,
    report: Value,
    stderr: Vec<String>,
    /// What it held in the kernel while it ran.
    held: Held,
}

impl Said {
    /// The checks of a name.
    fn all(&self, name: &str) -> Vec<&Value> {
        let checks = self.report["checks"].as_array().into_iter().flatten();
        checks.filter(|check| check["name"] == name).collect()
    }

    /// The check of a name, or of one thing under it.
    #[track_caller]
    fn check(&self, name: &str, of: Option<&str>) -> &Value {
        let found = self.all(name).into_iter();
        let mut found = found.filter(|check| check["of"].as_str() == of);
        let check = found.next();
        check.unwrap_or_else(|| panic!("no check {name} {of:?} in {:#}", self.report))
    }

    /// Names of the checks of a level, with what they are of.
    fn of_level(&self, level: &str) -> Vec<String> {
        let checks = self.report["checks"].as_array().into_iter().flatten();
        checks
            .filter(|check| check["level"] == level)
            .map(|check| {
                let (name, of) = (&check["name"], check["of"].as_str().unwrap_or_default());
                format!("{} {of}", name.as_str().unwrap_or_default())
                    .trim()
                    .to_owned()
            })
            .collect()
    }
}

/// Runs it in a host to its end.
fn said(host: &Host, mut command: Command, args: &[&str]) -> Result<Said> {
    command.args(["doctor", "--json"]).args(args);
    let process = host.spawn("doctor", command)?;
    let mut held = Held::default();
    while process.is_running() {
        // It may end meanwhile.
        let now = Held::by(process.pid()).unwrap_or_default();
        held.programs.extend(now.programs);
        held.maps.extend(now.maps);
        held.links.extend(now.links);
        std::thread::sleep(SECOND / 50);
    }
    let status = process.wait(60 * SECOND)?;
    let text = process.stdout().join("\n");
    Ok(Said {
        code: status.code(),
        report: serde_json::from_str(&text).with_context(|| process.describe())?,
        stderr: process.stderr(),
        held,
    })
}

fn as_root(host: &Host, args: &[&str]) -> Result<Said> {
    said(host, Command::new(AgentConfig::default().binary()?), args)
}

fn qdiscs(host: &Host) -> Result<String> {
    Ok(host.exec("tc", ["qdisc", "show", "dev", "eth0"])?.stdout)
}

/// With every right: each program is really attached, and nothing of it stays.
#[test]
fn as_root_all_is_attached_and_nothing_is_left() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let before = qdiscs(&pair.server)?;
    let said = as_root(&pair.server, &[])?;
    assert_eq!(said.code, Some(0), "{:#}", said.report);
    assert_eq!(said.stderr, Vec::<String>::new());
    assert_eq!(said.report["schema"], 1);
    assert_eq!(said.report["left"], "all");
    assert_eq!(said.of_level("fail"), Vec::<String>::new());
    for hook in [
        "lifecycle",
        "retransmit",
        "send_reset",
        "receive_reset",
        "census",
        "packet",
    ] {
        assert_eq!(said.check("hook", Some(hook))["level"], "ok");
    }
    let interface = said.check("interface", Some("eth0"));
    let found = interface["found"].as_str().context("found")?;
    assert!(found.starts_with("hooked by tcx: "), "{found}");
    assert_eq!(
        said.check("chain", Some("eth0"))["found"],
        "no other program"
    );
    assert_eq!(said.check("census", None)["level"], "ok");
    // A host of the lab is a container's network, not the machine's.
    assert_eq!(said.of_level("warn"), ["network_namespace"]);

    // Programs were there while it ran: tracepoints' links, the census, both sides of the packet hook.
    assert!(said.held.programs.len() >= 10, "{:?}", said.held);
    assert!(said.held.links.len() >= 4, "{:?}", said.held);
    assert!(!said.held.maps.is_empty());
    assert!(
        wait_for(10 * SECOND, || said.held.is_gone()),
        "{:?}",
        said.held.left()?
    );
    for side in SIDES {
        assert!(chain(&pair.server, "eth0", side)?.is_empty());
    }
    assert_eq!(qdiscs(&pair.server)?, before);
    Ok(())
}

/// People and programs are told the same.
#[test]
fn both_formats_have_the_same_checks() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let json = as_root(
        &pair.server,
        &["--interface", "eth*", "--interface", "nothing"],
    )?;
    let binary = AgentConfig::default().binary()?;
    let mut command = Command::new(binary);
    command.args(["doctor", "--interface", "eth*", "--interface", "nothing"]);
    let text = pair.server.exec_command(command, None)?;
    assert_eq!(text.status.code(), Some(0), "{}", text.stdout);
    let first_lines = text.stdout.lines().filter_map(|line| {
        let (level, rest) = line.split_at_checked(6)?;
        let level = level.trim();
        ["ok", "warn", "FAIL"]
            .contains(&level)
            .then(|| (level.to_lowercase(), rest.to_owned()))
    });
    let told: Vec<_> = first_lines.collect();
    let checks = json.report["checks"].as_array().context("checks")?;
    assert_eq!(told.len(), checks.len(), "{}", text.stdout);
    for ((level, line), check) in told.iter().zip(checks) {
        assert_eq!(check["level"], **level, "{line}: {check}");
        let name = check["name"].as_str().context("name")?;
        let of = check["of"].as_str().map(|of| format!(" {of}"));
        let head = format!("{name}{}: ", of.unwrap_or_default());
        assert!(line.starts_with(&head), "{line}: {check}");
        for field in ["found", "lost", "remedy"] {
            assert!(check.get(field).is_some(), "{field}: {check}");
        }
        let is_told = |field: &str| check[field].as_str().is_some_and(|text| !text.is_empty());
        assert!(is_told("found"), "{check}");
        assert_eq!(
            check["level"] != "ok",
            is_told("lost") && is_told("remedy"),
            "{check}"
        );
    }
    let last = text.stdout.lines().last().context("no line")?;
    assert!(text.stdout.contains("0 failed"), "{last}");
    Ok(())
}

/// Without each right: what is lost, what is left, what would help; and exit code 1.
#[test]
fn each_missing_right_is_told_with_what_is_left() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let binary = Binary::new()?;
    let all = ["bpf", "perfmon", "net_admin"];
    let with = |rights: &[&str]| {
        let rights: Vec<_> = rights.iter().map(|r| (*r).to_owned()).collect();
        said(&pair.server, binary.confined(NOBODY, &rights), &[])
    };
    let enough = with(&all)?;
    assert_eq!(enough.code, Some(0), "{:#}", enough.report);
    assert_eq!(enough.report["left"], "all");

    for (missing, left) in [
        ("net_admin", "sockets"),
        ("perfmon", "replay"),
        ("bpf", "replay"),
    ] {
        let rest: Vec<_> = all.into_iter().filter(|r| *r != missing).collect();
        let said = with(&rest)?;
        assert_eq!(said.code, Some(1), "without {missing}: {:#}", said.report);
        assert_eq!(said.stderr, Vec::<String>::new(), "without {missing}");
        let name = format!("CAP_{}", missing.to_uppercase());
        let check = said.check("capability", Some(&name));
        assert_eq!(check["level"], "fail");
        let remedy = check["remedy"].as_str().context("remedy")?;
        assert!(
            remedy.contains("sudo") && remedy.contains(&name),
            "{remedy}"
        );
        assert_eq!(
            said.report["left"], left,
            "without {missing}: {:#}",
            said.report
        );
        assert!(wait_for(10 * SECOND, || said.held.is_gone()));
    }

    let said = with(&["bpf", "perfmon"])?;
    let packet = said.check("hook", Some("packet"));
    let lost = packet["lost"].as_str().context("lost")?;
    assert!(lost.contains("nothing on the wire is seen"), "{lost}");
    let remedy = packet["remedy"].as_str().context("remedy")?;
    assert!(remedy.contains("CAP_NET_ADMIN"), "{remedy}");
    assert_eq!(said.check("hook", Some("lifecycle"))["level"], "ok");
    assert_eq!(said.check("census", None)["level"], "ok");
    assert_eq!(said.check("interface", Some("eth0"))["level"], "fail");
    Ok(())
}

/// A user without any right: nothing crashes, and the one thing that works is named.
#[test]
fn a_plain_user_is_told_of_replay() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let binary = Binary::new()?;
    let said = said(&pair.server, binary.confined(NOBODY, &[]), &[])?;
    assert_eq!(said.code, Some(1), "{:#}", said.report);
    assert_eq!(said.stderr, Vec::<String>::new());
    assert_eq!(said.report["left"], "replay");
    let hook = said.check("hook", None);
    let lost = hook["lost"].as_str().context("lost")?;
    assert!(lost.contains("tuplewatch replay"), "{lost}");
    assert_eq!(said.held, Held::default());

    let mut command = binary.confined(NOBODY, &[]);
    command.arg("doctor");
    let text = pair.server.exec_command(command, None)?;
    assert_eq!(text.status.code(), Some(1));
    assert!(
        text.stdout.contains("`tuplewatch replay CAPTURE`"),
        "{}",
        text.stdout
    );
    Ok(())
}

/// In a user namespace every capability is there and none counts.
#[test]
fn capabilities_of_a_user_namespace_do_not_count() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let mut command = Command::new("unshare");
    command
        .arg("--map-root-user")
        .arg(AgentConfig::default().binary()?);
    let said = said(&pair.server, command, &[])?;
    assert_eq!(said.code, Some(1), "{:#}", said.report);
    assert_eq!(said.check("user_namespace", None)["level"], "fail");
    assert_eq!(said.report["left"], "replay");
    Ok(())
}

/// Without type information packets are left.
#[test]
fn without_btf_the_wire_is_left() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let said = said(&pair.server, without_btf()?, &[])?;
    assert_eq!(said.code, Some(1), "{:#}", said.report);
    assert_eq!(said.report["left"], "packets", "{:#}", said.report);
    assert_eq!(said.check("btf", None)["level"], "fail");
    assert_eq!(said.check("hook", Some("packet"))["level"], "ok");
    let hook = said.check("hook", Some("socket hooks"));
    let remedy = hook["remedy"].as_str().context("remedy")?;
    assert!(remedy.contains("CONFIG_DEBUG_INFO_BTF"), "{remedy}");
    Ok(())
}

/// Without tcx all is left, by clsact.
#[test]
fn without_tcx_clsact_is_found() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let before = qdiscs(&pair.server)?;
    let said = said(&pair.server, without_tcx()?, &[])?;
    assert_eq!(said.code, Some(0), "{:#}", said.report);
    assert_eq!(said.report["left"], "all");
    let interface = said.check("interface", Some("eth0"));
    let found = interface["found"].as_str().context("found")?;
    assert!(found.starts_with("hooked by clsact"), "{found}");
    assert_eq!(qdiscs(&pair.server)?, before);
    Ok(())
}

/// A wrong configuration is named with its line, and the rest is looked at all the same.
#[test]
fn a_wrong_configuration_is_named_with_its_line() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("config.yaml");
    std::fs::write(&file, "top: 5\nstate_dri: /x\nhttp:\n  listen: nowhere\n")?;
    let file = file.to_str().context("a path")?;
    let said = as_root(&pair.server, &["--config", file])?;
    assert_eq!(said.code, Some(1), "{:#}", said.report);
    let problems: Vec<_> = said.all("config");
    let found = |at: &str| {
        let head = format!("{file}:{at}");
        problems.iter().any(|p| {
            p["level"] == "fail"
                && p["found"]
                    .as_str()
                    .is_some_and(|text| text.starts_with(&head))
        })
    };
    assert!(found("2:1:") && found("4:"), "{problems:#?}");
    assert_eq!(said.check("hook", Some("packet"))["level"], "ok");
    Ok(())
}

/// Somebody else's programs are listed, by tcx and by clsact, and stay.
#[test]
fn foreign_programs_are_listed_and_stay() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let _tcx = Foreign::tcx(&pair.server, LinkOrder::first)?;
    let _clsact = Foreign::clsact(&pair.server)?;
    let before = qdiscs(&pair.server)?;
    let said = as_root(&pair.server, &[])?;
    assert_eq!(said.code, Some(0), "{:#}", said.report);
    let check = said.check("chain", Some("eth0"));
    assert_eq!(check["level"], "ok", "the agent would be first: {check}");
    let found = check["found"].as_str().context("found")?;
    let expected = "foreign_ok (ingress, tcx), foreign_ok (ingress, clsact), \
                    foreign_ok (egress, tcx), foreign_ok (egress, clsact)";
    assert_eq!(found, expected);
    for side in SIDES {
        assert_eq!(chain(&pair.server, "eth0", side)?, ["foreign_ok"]);
    }
    assert_eq!(qdiscs(&pair.server)?, before);
    // Without CAP_SYS_ADMIN the kernel does not tell names.
    let binary = Binary::new()?;
    let rights = ["bpf", "perfmon", "net_admin"].map(str::to_owned);
    let said = self::said(&pair.server, binary.confined(NOBODY, &rights), &[])?;
    let check = said.check("chain", Some("eth0"));
    let found = check["found"].as_str().context("found")?;
    assert!(found.starts_with("program "), "{found}");
    assert!(
        found.contains("(ingress, tcx), foreign_ok (ingress, clsact)"),
        "{found}"
    );
    Ok(())
}

fn filters(host: &Host, side: TcAttachType) -> Result<String> {
    let side = if side == TcAttachType::Ingress {
        "ingress"
    } else {
        "egress"
    };
    Ok(host
        .exec("tc", ["filter", "show", "dev", "eth0", side])?
        .stdout)
}

/// Where tcx takes no more (as where there is none) it is tried with clsact, beside an agent that is at
/// work, and a qdisc that was made for it goes again.
#[test]
fn where_tcx_is_full_clsact_is_tried_and_taken_away() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let _full = Foreign::fill(&pair.server)?;
    let before = qdiscs(&pair.server)?;
    assert!(!before.contains("clsact"));
    let said = as_root(&pair.server, &[])?;
    let interface = said.check("interface", Some("eth0"));
    let found = interface["found"].as_str().context("found")?;
    assert!(found.starts_with("hooked by clsact"), "{found}");
    assert_eq!(said.code, Some(0), "{:#}", said.report);
    assert_eq!(
        said.check("chain", Some("eth0"))["level"],
        "warn",
        "others come first"
    );
    assert_eq!(qdiscs(&pair.server)?, before);

    let agent = support::watch(&pair.server, &[])?;
    let ours = SIDES.map(|side| filters(&pair.server, side));
    let said = as_root(&pair.server, &[])?;
    let check = said.check("chain", Some("eth0"));
    assert!(check["found"].to_string().contains("more"), "{check}");
    for (side, before) in SIDES.into_iter().zip(ours) {
        let (before, after) = (before?, filters(&pair.server, side)?);
        assert!(before.contains("tuplewatch_"), "{before}");
        assert_eq!(
            after, before,
            "the agent's filters are still there, and no other"
        );
    }
    assert_eq!(agent.terminate()?.code(), Some(0));
    Ok(())
}

/// A qdisc that somebody else has made stays, also if nothing is on it.
#[test]
fn a_clsact_qdisc_of_somebody_else_stays() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let _full = Foreign::fill(&pair.server)?;
    pair.server
        .exec("tc", ["qdisc", "add", "dev", "eth0", "clsact"])?;
    let before = qdiscs(&pair.server)?;
    let said = as_root(&pair.server, &[])?;
    assert_eq!(said.check("hook", Some("packet"))["level"], "ok");
    assert_eq!(qdiscs(&pair.server)?, before);
    for side in SIDES {
        assert_eq!(filters(&pair.server, side)?, "");
    }
    Ok(())
}

/// The agent that runs is asked how it fares, and goes on.
#[test]
fn an_agent_that_runs_is_asked_and_not_disturbed() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let none = as_root(&pair.server, &[])?;
    assert_eq!(none.check("http", None)["found"], "127.0.0.1:9464 is free");
    let agent = support::watch(&pair.server, &[])?;
    support::fresh(&agent)?;
    let said = as_root(&pair.server, &[])?;
    assert_eq!(said.code, Some(0), "{:#}", said.report);
    let http = said.check("http", None)["found"]
        .as_str()
        .context("found")?;
    assert!(
        http.contains(&format!("(process {}, since ", agent.pid())),
        "{http}"
    );
    assert_eq!(said.check("agent", None)["level"], "ok");
    let chain = said.check("chain", Some("eth0"));
    assert_eq!(chain["level"], "ok");
    let found = chain["found"].as_str().context("found")?;
    assert!(found.contains("another tuplewatch"), "{found}");
    assert!(support::kernel::is_hooked(&pair.server, "eth0"));
    support::nothing_told(&agent)?;
    assert_eq!(agent.terminate()?.code(), Some(0));
    Ok(())
}

/// An address that another program has: a warning where nobody asked for it, else a failure.
#[test]
fn a_taken_address_is_told() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let taken = "127.0.0.1:9464";
    let _other = pair
        .server
        .serve(&ServeConfig::closing_first(taken.parse()?))?;
    let by_default = as_root(&pair.server, &[])?;
    assert_eq!(by_default.code, Some(0), "{:#}", by_default.report);
    assert_eq!(by_default.check("http", None)["level"], "warn");
    let asked_for = as_root(&pair.server, &["--http", taken])?;
    assert_eq!(asked_for.code, Some(1));
    let check = asked_for.check("http", None);
    assert_eq!(check["level"], "fail");
    assert!(
        check["lost"].to_string().contains("does not start"),
        "{check}"
    );
    Ok(())
}

/// Receivers that refuse and that stay silent: told within seconds; without an endpoint nobody is asked.
#[test]
fn receivers_that_cannot_be_reached_are_told() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let none = as_root(&pair.server, &[])?;
    assert_eq!(none.check("otlp", None)["level"], "ok");
    for (endpoint, word) in [
        ("http://127.0.0.1:4318", "Connection refused"),
        ("http://127.0.0.1:4317", "Connection refused"),
        // A neighbour that does not exist.
        ("http://10.79.1.99:4318", "10.79.1.99:4318"),
    ] {
        let said = as_root(&pair.server, &["--otlp-endpoint", endpoint])?;
        assert_eq!(said.code, Some(1), "{endpoint}: {:#}", said.report);
        for signal in ["metrics", "logs"] {
            let check = said.check("otlp", Some(signal));
            assert_eq!(check["level"], "fail");
            assert!(check["found"].to_string().contains(word), "{check}");
        }
    }
    Ok(())
}

/// A directory that cannot be written to is a warning: the agent runs without.
#[test]
fn a_state_directory_is_tried() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let folder = tempfile::tempdir()?;
    let directory = folder.path().join("state");
    let path = directory.to_str().context("a path")?;
    let good = as_root(&pair.server, &["--state-dir", path])?;
    assert_eq!(good.check("state_dir", None)["level"], "ok");
    ensure!(!directory.exists(), "it was not there before");
    let bad = as_root(&pair.server, &["--state-dir", "/proc/tuplewatch"])?;
    assert_eq!(bad.code, Some(0), "{:#}", bad.report);
    assert_eq!(bad.check("state_dir", None)["level"], "warn");
    Ok(())
}
