//! Tests of the lab's hosts: what they show inside, and that nothing is left of them.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::MetadataExt as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tuplewatch_tests::prelude::*;

const SECOND: Duration = Duration::from_secs(1);
/// Set for the test process that is to be killed.
const VICTIM: &str = "LAB_VICTIM";

/// Processes whose network namespace has this inode number.
fn processes_in(inode: u64) -> BTreeSet<u32> {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return BTreeSet::new();
    };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid: &u32| {
            // Follows the link: the inode of the namespace itself.
            std::fs::metadata(format!("/proc/{pid}/ns/net")).is_ok_and(|m| m.ino() == inode)
        })
        .collect()
}

#[test]
fn a_host_shows_its_own_network_and_the_machines_cgroups() -> Result<()> {
    let lab = Lab::new()?;
    let (a, b) = (lab.host("a")?, lab.host("b")?);
    lab.link(
        &LinkEnd::new(&a, "left0", &["192.0.2.1/24"]),
        &LinkEnd::new(&b, "right0", &["192.0.2.2/24", "2001:db8::2/64"]),
    )?;
    let listed = a.exec("ls", ["/sys/class/net"])?.stdout;
    let names: BTreeSet<&str> = listed.split_whitespace().collect();
    assert!(names.contains("left0") && names.contains("lo"), "{names:?}");
    assert!(
        !names.contains("right0") && !names.contains("eth0"),
        "{names:?}"
    );
    // What is mounted below /sys on this machine is still there.
    let ours = std::fs::read_dir("/sys/fs/cgroup")?.count();
    let theirs = a.in_ns(|| std::fs::read_dir("/sys/fs/cgroup").map(Iterator::count))??;
    assert_eq!(ours, theirs);
    assert_ne!(a.netns_inode(), b.netns_inode());
    assert_eq!(std::fs::metadata(a.netns_path())?.ino(), a.netns_inode());
    a.sysctl("net.ipv4.ip_local_port_range", "2000 2063")?;
    assert_eq!(a.read_sysctl("net.ipv4.ip_local_port_range")?, "2000\t2063");
    assert_ne!(b.read_sysctl("net.ipv4.ip_local_port_range")?, "2000\t2063");
    let error = a
        .exec("ip", ["link", "show", "nothing"])
        .expect_err("there is no such link");
    assert!(error.to_string().contains("nothing"), "{error}");
    let mut command = Command::new("pwd");
    command.current_dir("/usr");
    assert_eq!(a.exec_command(command, None)?.stdout, "/usr\n");
    a.exec("ping", ["-c1", "-W5", "192.0.2.2"])
        .map(drop)
        .or_else(|error| {
            // Without ping: a connection to a closed port is refused only by a host that is there.
            let report = a.load(&LoadConfig {
                count: Some(1),
                ..LoadConfig::new("192.0.2.2:9".parse()?)
            })?;
            let failed = report.wait()?.failed;
            ensure!(
                failed.get("refused") == Some(&1),
                "{error}, then {failed:?}"
            );
            Ok(())
        })
}

#[test]
fn a_dropped_lab_leaves_nothing_even_if_handles_live_on() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let inodes = [pair.client.netns_inode(), pair.server.netns_inode()];
    let server = pair.serve()?;
    let load = pair.client.load(&LoadConfig::new(pair.service()))?;
    assert!(wait_for(10 * SECOND, || pair
        .server
        .tcp_states()
        .is_ok_and(|t| t.count("TIME_WAIT") > 3)));
    assert!(inodes.iter().all(|inode| processes_in(*inode).len() == 2));
    drop(pair);
    assert!(!server.process().is_running() && !load.process().is_running());
    assert!(wait_for(5 * SECOND, || inodes
        .iter()
        .all(|inode| processes_in(*inode).is_empty())));
    Ok(())
}

#[test]
fn a_panicking_test_leaves_nothing() -> Result<()> {
    let (sender, receiver) = std::sync::mpsc::channel();
    let result = std::thread::spawn(move || {
        let pair = Pair::new(PairConfig::default()).expect("a lab");
        let _server = pair.serve().expect("a server");
        sender
            .send(pair.server.netns_inode())
            .expect("somebody listens");
        panic!("on purpose");
    })
    .join();
    assert!(result.is_err());
    let inode = receiver.recv()?;
    assert!(wait_for(5 * SECOND, || processes_in(inode).is_empty()));
    Ok(())
}

#[test]
fn a_killed_test_leaves_nothing() -> Result<()> {
    let mut victim = Command::new(std::env::current_exe()?)
        .args(["--exact", "victim", "--ignored", "--nocapture"])
        .env(VICTIM, "1")
        .stdout(Stdio::piped())
        .spawn()?;
    let output = victim.stdout.take().context("a pipe")?;
    let line = BufReader::new(output)
        .lines()
        .map_while(Result::ok)
        .find_map(|line| line.split_once("inodes ").map(|(_, rest)| rest.to_owned()))
        .context("the victim prints its inodes")?;
    let inodes: Vec<u64> = line.split(' ').map(str::parse).collect::<Result<_, _>>()?;
    let before: usize = inodes.iter().map(|inode| processes_in(*inode).len()).sum();
    victim.kill()?;
    victim.wait()?;
    assert_eq!(before, 5, "two holders, a server, a load and a tap");
    assert!(wait_for(5 * SECOND, || inodes
        .iter()
        .all(|inode| processes_in(*inode).is_empty())));
    Ok(())
}

/// Not a test of its own: the process that `a_killed_test_leaves_nothing` kills.
#[test]
#[ignore = "started by a_killed_test_leaves_nothing"]
fn victim() -> Result<()> {
    if std::env::var_os(VICTIM).is_none() {
        return Ok(());
    }
    // Made on a thread that ends: the children must not depend on it.
    let thread = std::thread::spawn(|| -> Result<_> {
        let pair = Pair::new(PairConfig::default())?;
        let server = pair.serve()?;
        let load = pair.client.load(&LoadConfig::new(pair.service()))?;
        let tap = pair.tap(&pair.server, "eth0", std::path::Path::new("/dev/null"))?;
        Ok((pair, server, load, tap))
    });
    let (pair, server, load, _tap) = thread.join().expect("no panic")?;
    std::thread::sleep(SECOND / 2);
    ensure!(server.process().is_running() && load.process().is_running());
    println!(
        "inodes {} {}",
        pair.client.netns_inode(),
        pair.server.netns_inode()
    );
    std::thread::sleep(60 * SECOND);
    Ok(())
}

/// A stand-in for the agent: prints the lines that an agent prints and ends on SIGTERM.
const FAKE_AGENT: &str = r#"#!/bin/sh
trap 'exit 7' TERM
echo "args $*" >&2
echo '{"type":"ready","hooks":5}'
echo '{"type":"alert","state":"pending","signature":"port_exhaustion"}'
echo '{"type":"summary"}'
echo '{"type":"alert","state":"firing","signature":"port_exhaustion"}'
while true; do sleep 0.1; done
"#;

#[test]
fn the_agent_handle_reads_lines_and_ends_it() -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    let directory = tempfile::tempdir()?;
    let binary = directory.path().join("agent");
    std::fs::write(&binary, FAKE_AGENT)?;
    std::fs::set_permissions(&binary, std::fs::Permissions::from_mode(0o755))?;
    let lab = Lab::new()?;
    let host = lab.host("host")?;
    let config = AgentConfig {
        binary: Some(binary),
        ..AgentConfig::with_args(["--netns", "self"])
    };
    let agent = host.agent(config.clone())?;
    assert_eq!(agent.wait_ready(30 * SECOND)?["hooks"], 5);
    let alert = agent.wait_alert(5 * SECOND, |alert| alert["state"] == "firing")?;
    assert_eq!(alert["signature"], "port_exhaustion");
    assert_eq!(agent.alerts()?.len(), 2);
    assert_eq!(agent.lines()?.len(), 4);
    // Standard error is read by another thread than standard output.
    let told = || agent.stderr() == ["args run --format json --netns self"];
    assert!(wait_for(5 * SECOND, told), "{:?}", agent.stderr());
    agent.expect_no_alert(SECOND / 10, |alert| alert["state"] == "resolved")?;
    assert!(
        agent
            .expect_no_alert(SECOND / 10, |alert| alert["state"] == "firing")
            .is_err()
    );
    let error = agent.wait_alert(SECOND / 5, |alert| alert["state"] == "resolved");
    let error = format!("{:#}", error.expect_err("never printed"));
    assert!(
        error.contains("is running") && error.contains("firing"),
        "{error}"
    );
    assert_eq!(agent.terminate()?.code(), Some(7));
    let agent = host.agent(config)?;
    agent.wait_ready(30 * SECOND)?;
    agent.kill9();
    assert!(!agent.process().is_running());
    let missing = AgentConfig {
        binary: Some("/nowhere/tuplewatch".into()),
        ..AgentConfig::default()
    };
    let error = format!("{:#}", host.agent(missing).expect_err("no such file"));
    assert!(error.contains("cargo build"), "{error}");
    Ok(())
}

#[test]
fn an_incident_is_built_within_seconds() -> Result<()> {
    let start = std::time::Instant::now();
    let incident = Incident::new(IncidentConfig::default())?;
    println!(
        "four hosts, three links, NAT and counters in {:?}",
        start.elapsed()
    );
    let samples = || {
        incident
            .truth()
            .is_ok_and(|truth| truth.host("server").time_wait_samples.len() >= 8)
    };
    let start = std::time::Instant::now();
    assert!(wait_for(10 * SECOND, samples), "too few TIME_WAIT samples");
    println!("8 TIME_WAIT samples within {:?}", start.elapsed());
    Ok(())
}
