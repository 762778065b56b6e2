//! `tuplewatch replay` on recordings of idle connections that a middlebox forgets, and of what resembles
//! them. One is in `tests/captures`; the others are read where the folder that is shared beside the project
//! is at hand, and are skipped aloud elsewhere.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

fn package(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The recording, or nothing where it is not at hand.
fn shared(file: &str) -> Option<PathBuf> {
    let path = package("../../shared/captures").join(file);
    if !path.exists() {
        eprintln!("SKIPPED: there is no {}", path.display());
        return None;
    }
    Some(path)
}

/// The lines of a replay.
fn replay(path: &Path, args: &[&str]) -> Vec<Value> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tuplewatch"));
    command.args(["replay", "--format", "json"]).args(args);
    let output = command.arg(path).output().expect("the binary starts");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    text.lines()
        .map(|line| serde_json::from_str(line).expect(line))
        .collect()
}

/// The latest report of the alert with that cause.
fn alert<'a>(lines: &'a [Value], cause: &str) -> Option<&'a Value> {
    let mut latest_first = lines.iter().rev();
    latest_first.find(|l| l["type"] == "alert" && l["cause"] == cause && l["state"] != "pending")
}

#[test]
fn the_time_out_of_a_middlebox() {
    let path = package("tests/captures/17_idle_killed.client.pcap.gz");
    let lines = replay(&path, &[]);
    let told = alert(&lines, "idle_killed").expect("an alert");
    let idle = &told["evidence"]["idle"];
    // The applications of this host counted 18, after 12.61 to 22.05 s; the middlebox is set to 12 s.
    assert_eq!(idle["killed"], 18, "{idle}");
    assert_eq!(idle["killed_sooner"], 0, "{idle}");
    let figure = |name: &str| {
        idle[name]
            .as_f64()
            .unwrap_or_else(|| panic!("{name}: {idle}"))
    };
    let timeout = figure("timeout_seconds");
    assert!((timeout / 12.0 - 1.0).abs() < 0.05, "{timeout}");
    assert!((figure("shortest_killed_seconds") - 12.61).abs() < 0.02);
    assert!((figure("longest_killed_seconds") - 22.05).abs() < 0.02);
    assert!(figure("keep_alive_seconds") < 12.0);
    assert_eq!(idle["reset_by"], "middlebox");
    let connections = idle["connections"].as_array().expect("a list");
    assert_eq!(connections.len(), 16, "the latest ones");
    // Each is one that the application saw die, after the same time.
    let died: Value =
        serde_json::from_str(include_str!("captures/17_idle_killed.died.json")).unwrap();
    for connection in connections {
        let idle = connection["idle_seconds"].as_f64().unwrap();
        let known = died.as_array().unwrap().iter().any(|died| {
            died["local_port"] == connection["client.port"]
                && (died["idle_s"].as_f64().unwrap() - idle).abs() < 0.05
        });
        assert!(known, "{connection}");
        assert!(
            connection["age_seconds"].as_f64().unwrap() >= idle,
            "{connection}"
        );
    }
    // The packets that show it.
    let shown: Vec<&Value> = lines
        .iter()
        .filter(|l| l["type"] == "evidence")
        .filter(|l| {
            l["reading"]
                .as_str()
                .unwrap()
                .starts_with("RST: it answers")
        })
        .collect();
    assert_eq!(shown.len(), 18);
    assert_eq!(shown[0]["frame"], 141);
    assert!(shown[0]["reading"].as_str().unwrap().contains("TTL 64"));
}

#[test]
fn at_the_server_the_bounds_are_too_far_apart_for_an_estimate() {
    let Some(path) = shared("17_idle_killed.server.pcap") else {
        return;
    };
    let lines = replay(&path, &[]);
    let told = alert(&lines, "idle_killed").expect("an alert");
    let idle = &told["evidence"]["idle"];
    assert_eq!(idle["timeout_seconds"], Value::Null);
    assert_eq!(told["confidence"], "medium");
    // Its keep-alive probes after 45 s met the RST.
    assert_eq!(idle["connections"][0]["probe"], true);
    assert!(idle["shortest_killed_seconds"].as_f64().unwrap() > 45.0);
    assert!(idle["longest_survived_seconds"].as_f64().unwrap() < 12.0);
}

#[test]
fn nothing_is_said_of_what_only_rests() {
    for file in [
        "18_benign_long_poll.client.pcap",
        "18_benign_long_poll.server.pcap",
        "19_slow_server.client.pcap",
        "20_drain.client.pcap",
        "20_drain.server.pcap",
        "20_drain.server2.pcap",
        "08_server_down.client.pcap",
        "13_half_open.client.pcap",
    ] {
        let Some(path) = shared(file) else { continue };
        // However few make a finding.
        let lines = replay(
            &path,
            &[
                "--set",
                "idle_killed.min_killed=1",
                "--set",
                "idle_killed.min_idle=1s",
            ],
        );
        assert!(alert(&lines, "idle_killed").is_none(), "{file}");
        let race = lines.iter().any(|l| l["name"] == "keepalive_race");
        assert!(!race, "{file}");
    }
}

const SUSPECT: [&str; 2] = ["--set", "pinned_suspect.min_responses=6"];

#[test]
fn connections_that_tls_hides_are_suspected_if_somebody_asks() {
    // Connections with six or more 503 in a row, by the applications' own count.
    for (file, pinned) in [
        ("21_tls_pinned.client.pcap", 8),
        ("21_tls_pinned.client2.pcap", 5),
    ] {
        let Some(path) = shared(file) else { continue };
        assert!(alert(&replay(&path, &[]), "pinned_suspect").is_none());
        let lines = replay(&path, &SUSPECT);
        let told = alert(&lines, "pinned_suspect").expect("an alert");
        assert_eq!(told["severity"], "info");
        let summary = told["summary"].as_str().unwrap();
        println!("{file}: {summary}");
        let most = lines
            .iter()
            .filter(|l| l["cause"] == "pinned_suspect")
            .filter_map(|l| {
                let (_, rest) = l["summary"].as_str()?.split_once("on ")?;
                rest.split_once(' ')?.0.parse::<u32>().ok()
            })
            .max();
        assert!(
            most.is_some_and(|n| n > 0 && n <= pinned),
            "{most:?}: {summary}"
        );
    }
}

/// Every other recording is silent, asked or not.
#[test]
fn nothing_else_is_suspected() {
    let dir = package("../../shared/captures");
    let Ok(files) = std::fs::read_dir(&dir) else {
        eprintln!("SKIPPED: there is no {}", dir.display());
        return;
    };
    let mut paths: Vec<PathBuf> = files.map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| {
        path.extension()
            .is_some_and(|e| e == "pcap" || e == "pcapng")
    });
    paths.sort();
    let is_expected = |path: &Path| {
        let name = path.file_name().unwrap().to_str().unwrap();
        name.starts_with("21_tls_pinned.client")
    };
    let told: Vec<&PathBuf> = paths
        .iter()
        .filter(|path| alert(&replay(path, &SUSPECT), "pinned_suspect").is_some())
        .filter(|path| !is_expected(path))
        .collect();
    assert!(told.is_empty(), "{told:?} of {}", paths.len());
}
