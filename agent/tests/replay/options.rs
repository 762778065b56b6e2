//! What the options do, and what people read.

use std::{collections::BTreeSet, fmt::Write as _, fs};

use super::{RST_LOST, Said, number, package, replay, unpacked};

#[test]
fn time_and_ends_choose_packets() {
    let path = package("tests/captures/02_l4_reuse_rst_lost.client.pcap.gz");
    let path = path.to_str().unwrap();
    let opens = |args: &[&str]| {
        let said = Said::by(&[args, &[path]].concat());
        let spaces = said.last("summary")["spaces"].as_array().unwrap().clone();
        spaces
            .iter()
            .map(|s| number(&s["totals"]["opens"]))
            .sum::<u64>()
    };
    let all = opens(&[]);
    let (early, late) = (opens(&["--until", "30s"]), opens(&["--since", "30s"]));
    assert!(
        early > 0 && late > 0 && early < all && late < all,
        "{early} {late} {all}"
    );
    assert_eq!(opens(&["--filter", "203.0.113.10:8080"]), all);
    assert_eq!(opens(&["--filter", "10.9.9.9", "--filter", ":1"]), 0);
    // Before the pool has been handed out once nothing is found.
    assert_eq!(Said::by(&["--until", "20s", path]).code, 0);
}

#[test]
fn a_place_can_be_set() {
    let path = package("tests/captures/02_l4_reuse_rst_lost.client.pcap.gz");
    let path = path.to_str().unwrap();
    for (args, role) in [
        (["--vantage", "initiator"], "initiator"),
        (["--vantage", "responder"], "responder"),
        (["--local", "10.79.1.2"], "initiator"),
        (["--local", "203.0.113.10"], "responder"),
    ] {
        let said = Said::by(&[args[0], args[1], path]);
        let spaces = said.last("summary")["spaces"].as_array().unwrap().clone();
        assert!(!spaces.is_empty());
        assert!(spaces.iter().all(|s| s["role"] == role), "{args:?}");
    }
}

#[test]
fn the_evidence_can_be_exported() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("evidence.pcapng");
    let path = package("tests/captures/24_l4_reuse_pcapng.client.pcapng.gz");
    let said = Said::by(&["--export", out.to_str().unwrap(), path.to_str().unwrap()]);
    assert_eq!(said.code, 3);
    let shown: BTreeSet<u64> = said
        .of_type("evidence")
        .map(|e| number(&e["frame"]))
        .collect();
    assert!(shown.len() > 10);
    // Another reader finds these packets with their comments.
    let bytes = fs::read(&out).unwrap();
    let mut rest = bytes.as_slice();
    let mut comments = Vec::new();
    while !rest.is_empty() {
        let (left, block) = pcap_parser::parse_block_le(rest).unwrap();
        rest = left;
        if let pcap_parser::Block::EnhancedPacket(packet) = block {
            assert_eq!(packet.options[0].code, pcap_parser::OptionCode::Comment);
            let length = usize::from(packet.options[0].len);
            comments.push(String::from_utf8(packet.options[0].value[..length].to_vec()).unwrap());
        }
    }
    // A client behind a NAT has not seen the connections before on the same ports.
    assert_eq!(comments.len(), shown.len());
    for frame in &shown {
        let begin = format!("frame {frame} of ");
        assert!(comments.iter().any(|c| c.starts_with(&begin)), "{frame}");
    }
    // And so does our own.
    let again = Said::by(&[out.to_str().unwrap()]);
    assert_eq!(number(&again.last("replay")["packets"]), shown.len() as u64);
}

/// The server has seen the connections before on the same ports: how they ended is evidence too.
#[test]
fn the_end_of_the_former_connections_is_exported() {
    let path = package("../../shared/captures/02_l4_reuse_rst_lost.server.pcap");
    if !path.exists() {
        eprintln!("SKIPPED: there is no {}", path.display());
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("evidence.pcapng");
    let out = out.to_str().unwrap();
    let said = Said::by(&["--export", out, path.to_str().unwrap()]);
    let again = Said::by(&[out]);
    let shown = said.of_type("evidence").count() as u64;
    assert!(number(&again.last("replay")["packets"]) > shown);
    assert_eq!(
        again.fired(),
        said.fired(),
        "it is enough for the same verdict"
    );
    let totals = |said: &Said| said.last("summary")["spaces"][0]["totals"].clone();
    let closed = number(&totals(&again)["bare_acks_closed"]);
    assert!(closed > 0, "{}", totals(&again));
    assert_eq!(number(&totals(&again)["bare_acks"]), closed);
}

#[test]
fn what_cannot_be_opened_does_not_keep_the_others_from_being_judged() {
    let path = package("tests/captures/02_l4_reuse_rst_lost.client.pcap.gz");
    let said = Said::by(&["/nonexistent", path.to_str().unwrap()]);
    assert_eq!(said.code, 66);
    assert!(!said.fired().is_empty());
    assert!(
        said.error.contains("/nonexistent: No such file"),
        "{}",
        said.error
    );
}

#[test]
fn a_time_without_packets_is_said_aloud() {
    let path = package("tests/captures/02_l4_reuse_rst_lost.client.pcap.gz");
    let path = path.to_str().unwrap();
    let output = replay(&["--since", "1h", path]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.contains("None of its 1734 packets lies between"),
        "{text}"
    );
    let said = Said::by(&["--since", "30s", "--filter", ":8080", path]);
    let line = said.last("replay");
    assert!(number(&line["packets"]) < 1734, "{line}");
    assert!(
        number(&line["segments"]) <= number(&line["packets"]),
        "{line}"
    );
}

#[test]
fn errors_say_what_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let mut wlan = fs::read(unpacked(RST_LOST, dir.path())).unwrap();
    wlan[20] = 105;
    for (args, code, says) in [
        (vec!["/nonexistent"], 66, "No such file"),
        (
            vec![file("text", b"hello, world").as_str()],
            65,
            "neither pcap nor pcapng",
        ),
        (vec![file("empty", b"").as_str()], 65, "empty"),
        (vec![file("wlan", &wlan).as_str()], 65, "105 (IEEE802_11)"),
        (vec!["--export", "x", "-"], 1, "save it to a file first"),
        (vec!["--since", "yesterday", "x"], 2, "2026-11-30"),
        (vec!["--set", "window=x", "x"], 2, "window"),
        (vec![], 2, "FILE"),
    ] {
        let output = replay(&args);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {error}");
        assert!(error.contains(says), "{args:?}: {error}");
    }
}

#[test]
fn people_get_the_same_in_words() {
    let path = package("tests/captures/02_l4_reuse_rst_lost.client.pcap.gz");
    let output = replay(&[path.to_str().unwrap()]);
    let text = String::from_utf8(output.stdout).unwrap();
    let mut missing = String::new();
    for part in [
        "seen from 10.79.1.2",
        "CRITICAL  port_exhaustion / l4_reuse_in_time_wait",
        "1734 packets in",
        "Evidence of port_exhaustion / l4_reuse_in_time_wait",
        "bare ACK instead of a SYN-ACK",
        "the same SYN again, number 2",
    ] {
        if !text.contains(part) {
            let _ = writeln!(missing, "{part}");
        }
    }
    assert!(missing.is_empty(), "{text}\nlacks:\n{missing}");
}

#[test]
fn every_field_of_a_replay_is_documented() {
    let path = package("tests/captures/02_l4_reuse_rst_lost.client.pcap.gz");
    let said = Said::by(&[path.to_str().unwrap()]);
    let page = fs::read_to_string(package("../docs/replay.md")).unwrap();
    for kind in ["evidence", "replay"] {
        for field in said.last(kind).as_object().unwrap().keys() {
            // Every line has these: docs/json.md.
            if !["type", "schema", "time"].contains(&field.as_str()) {
                assert!(page.contains(&format!("`{field}`")), "{kind}: {field}");
            }
        }
    }
    let help = String::from_utf8(replay(&["--help"]).stdout).unwrap();
    for code in [0, 3, 65, 66, 78, 2, 1] {
        assert!(page.contains(&format!("\n| {code} | ")), "{code}");
        assert!(help.contains(&format!("\n{code:>4}  ")), "{code}: {help}");
    }
}
