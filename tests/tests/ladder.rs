//! The ladder of degradation: what the agent still finds where rights or parts of the kernel are missing, that it
//! says so, and that it stays calm.

#[allow(dead_code, reason = "of the pages the state is looked at only")]
#[path = "http/page.rs"]
mod page;
mod support;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use page::{DEFAULT, Page};
use serde_json::Value;
use support::confined::{Binary, NOBODY, without_btf, without_tcx};
use support::kernel::Held;
use support::{SECOND, firing, number};
use tuplewatch_tests::prelude::*;

/// Connections per second of each of the two clients.
const RATE: f64 = 20.0;
/// Long enough for the pool of 200 ports to be handed out twice, and to look on for a while.
const TIME: Duration = Duration::from_secs(20);
/// How long an agent is looked on at.
const WHILE: Duration = Duration::from_secs(6);
/// Lines of its log until all is attached: one for each hook and a few.
const LINES: usize = 16;

/// Starts the agent by a command, among the sockets of its host only.
fn watch(host: &Host, command: Command) -> Result<Agent> {
    let netns = host.netns_inode().to_string();
    let arguments = ["--netns", &netns, "--summary-interval", "1s"];
    let agent = host.agent_as(command, AgentConfig::with_args(arguments))?;
    agent.wait_ready(60 * SECOND)?;
    Ok(agent)
}

/// A hook on `/status`: its state and what is said of it.
fn hook(status: &Value, name: &str) -> Option<(String, String)> {
    let mut hooks = status["hooks"].as_array()?.iter();
    let hook = hooks.find(|hook| hook["name"] == name)?;
    let text = |field: &str| hook[field].as_str().map(str::to_owned);
    Some((text("state")?, text("detail")?))
}

fn status(host: &Host) -> Result<Value> {
    Page::get(host, DEFAULT, "/status")?.json()
}

/// CPU time of a process, and how often its threads have gone to sleep.
fn effort(pid: u32) -> Result<(Duration, u64)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields = stat.rsplit_once(')').context("stat")?.1;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    // utime and stime are fields 14 and 15, the name is the second; 100 ticks make a second.
    let ticks = fields[11].parse::<u64>()? + fields[12].parse::<u64>()?;
    let mut sleeps = 0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let status = std::fs::read_to_string(task?.path().join("status"))?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        sleeps += line.context("switches")?.trim().parse::<u64>()?;
    }
    Ok((Duration::from_millis(ticks * 10), sleeps))
}

/// Looks on at an agent that has work to do: it must say nothing more, load nothing again, and neither spin nor
/// wake up all the time.
fn is_calm(agent: &Agent) -> Result<()> {
    let said = agent.stderr();
    ensure!(said.len() <= LINES, "too many lines: {said:#?}");
    let held = Held::by(agent.pid())?;
    let (time, sleeps) = effort(agent.pid())?;
    std::thread::sleep(WHILE);
    let (time, sleeps) = {
        let (later, more) = effort(agent.pid())?;
        (later - time, more - sleeps)
    };
    println!("{time:?} of CPU and {sleeps} waits in {WHILE:?}");
    // A second takes a tenth of one in a debug build, and some hundred waits under this load.
    ensure!(time < WHILE / 2, "{time:?} of CPU time in {WHILE:?}");
    ensure!(sleeps < 1000 * WHILE.as_secs(), "{sleeps} waits");
    ensure!(agent.stderr() == said, "it went on: {:#?}", agent.stderr());
    let now = Held::by(agent.pid())?;
    ensure!(
        now.programs == held.programs && now.links == held.links,
        "programs were loaded again: {held:?}, {now:?}"
    );
    Ok(())
}

/// What an agent says of itself on `/status`, and its alert if one was waited for.
type Told = (Value, Option<Value>);

/// Runs the incident with agents at the server and at the first client, each started by a command; gives what
/// both say of themselves while they watch, server first.
fn run(command: impl Fn() -> Result<Command>, found_at: &[&str]) -> Result<(Incident, Vec<Told>)> {
    let incident = Incident::new(IncidentConfig::default())?;
    let _server = incident.serve()?;
    let hosts = [&incident.server, &incident.clients[0]];
    let agents = [watch(hosts[0], command()?)?, watch(hosts[1], command()?)?];
    let loads = incident.load(RATE, TIME)?;
    let mut outcome = Vec::new();
    for (host, agent) in hosts.into_iter().zip(&agents) {
        let alert = if found_at.contains(&host.name()) {
            Some(agent.wait_alert(40 * SECOND, firing)?)
        } else {
            None
        };
        outcome.push((status(host)?, alert));
    }
    for agent in &agents {
        is_calm(agent)?;
    }
    for load in loads {
        load.wait()?;
    }
    for agent in &agents {
        let held = Held::by(agent.pid())?;
        assert_eq!(agent.terminate()?.code(), Some(0));
        assert!(
            wait_for(10 * SECOND, || held.is_gone()),
            "{:?}",
            held.left()?
        );
    }
    Ok((incident, outcome))
}

/// Without tcx nothing is lost.
#[test]
fn without_tcx_clsact_takes_its_place() -> Result<()> {
    let (incident, outcome) = run(without_tcx, &["server", "client1"])?;
    for (status, alert) in &outcome {
        for hook in status["hooks"].as_array().context("hooks")? {
            assert_eq!(hook["state"], "ok", "{hook}");
        }
        assert_eq!(status["interfaces"], serde_json::json!(["eth0"]));
        assert_eq!(alert.as_ref().context("an alert")?["point"], "wire");
    }
    // Filters would survive a process, but not one that ends in order.
    for host in [&incident.server, &incident.clients[0]] {
        for side in ["ingress", "egress"] {
            let filters = host.exec("tc", ["filter", "show", "dev", "eth0", side])?;
            assert_eq!(filters.stdout, "");
        }
    }
    Ok(())
}

/// Without type information the packet hook alone finds the incident at both ends.
#[test]
fn without_btf_packets_find_it() -> Result<()> {
    let (incident, outcome) = run(without_btf, &["server", "client1"])?;
    for (status, alert) in &outcome {
        let (state, detail) = hook(status, "socket hooks").context("socket hooks")?;
        assert_eq!(state, "off");
        assert!(
            detail.contains("nothing is known of sockets")
                && detail.contains("CONFIG_DEBUG_INFO_BTF"),
            "{detail}"
        );
        let packet = hook(status, "packet").context("packet")?;
        assert_eq!(packet, ("ok".to_owned(), "eth0".to_owned()));
        let alert = alert.as_ref().context("an alert")?;
        assert_eq!(alert["point"], "wire");
        assert!(number(&alert["evidence"], "refused_syns") >= 5, "{alert}");
    }
    let server = outcome[0].1.as_ref().context("an alert")?;
    assert_eq!(server["client.address"], incident.nat_address().to_string());
    assert_eq!(server["role"], "responder");
    Ok(())
}

/// Without CAP_NET_ADMIN the sockets that get bare ACKs tell of them. The server's do not: there a SYN to
/// TIME_WAIT is answered without any tracepoint.
#[test]
fn without_net_admin_sockets_find_it() -> Result<()> {
    let binary = Binary::new()?;
    let rights = ["bpf", "perfmon"].map(str::to_owned);
    let (_, outcome) = run(|| Ok(binary.confined(NOBODY, &rights)), &["client1"])?;
    for (status, _) in &outcome {
        let (state, detail) = hook(status, "packet").context("packet")?;
        assert_eq!(state, "off");
        assert!(
            detail.contains("nothing on the wire is seen") && detail.contains("CAP_NET_ADMIN"),
            "{detail}"
        );
        for name in ["lifecycle", "send_reset", "census"] {
            assert_eq!(hook(status, name).context("a hook")?.0, "ok", "{name}");
        }
        assert_eq!(status["interfaces"], serde_json::json!([]));
    }
    let alert = outcome[1].1.as_ref().context("an alert")?;
    assert_eq!(
        (&alert["point"], &alert["role"]),
        (&"socket".into(), &"initiator".into())
    );
    assert!(number(&alert["evidence"], "refused_syns") >= 5, "{alert}");
    assert_eq!(alert["opened_by"][0]["command"], "lab-peer");
    Ok(())
}

/// Where nothing live is left the agent says what is missing and ends, once, with the code for a missing right.
#[test]
fn without_more_it_ends_and_says_what_is_missing() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let binary = Binary::new()?;
    for (rights, missing) in [
        (&["bpf", "net_admin"][..], "CAP_PERFMON"),
        (&["perfmon", "net_admin"], "CAP_BPF"),
        (&[], "CAP_BPF"),
    ] {
        let rights: Vec<_> = rights.iter().map(|r| (*r).to_owned()).collect();
        let agent = pair
            .server
            .agent_as(binary.confined(NOBODY, &rights), AgentConfig::default())?;
        let status = agent.process().wait(30 * SECOND)?;
        let said = agent.stderr();
        assert_eq!(status.code(), Some(77), "with {rights:?}: {said:#?}");
        assert!(said.len() <= LINES, "with {rights:?}: {said:#?}");
        let text = said.join("\n");
        assert!(text.contains(missing), "with {rights:?}: {text}");
        assert_eq!(agent.lines()?, Vec::<Value>::new());
    }
    Ok(())
}

/// The rest of the ladder: a plain user judges a capture.
#[test]
fn a_plain_user_can_replay() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let binary = Binary::new()?;
    let captures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../agent/tests/captures");
    let folder = binary.path.parent().context("a folder")?;
    let capture = folder.join("capture.pcap.gz");
    std::fs::copy(
        captures.join("02_l4_reuse_rst_lost.client.pcap.gz"),
        &capture,
    )?;
    let mut command = binary.confined(NOBODY, &[]);
    command.args(["replay", "--format", "json"]).arg(&capture);
    let output = pair.server.exec_command(command, None)?;
    let found = output.stdout.lines().any(|line| {
        serde_json::from_str::<Value>(line)
            .is_ok_and(|line| line["cause"] == "l4_reuse_in_time_wait")
    });
    assert!(found, "{output:#?}");
    Ok(())
}
