//! `tuplewatch replay` on recordings of real TCP stacks, against what is known of each: the verdict, the
//! counts, the first symptom, the place. Some are in `tests/captures`; the others are read where the
//! folder that is shared beside the project is at hand, and are skipped aloud elsewhere.
//!
//! `docs/verdicts.md` is the table of what came out; `TUPLEWATCH_BLESS=1` writes it anew.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::Value;

fn package(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn replay(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tuplewatch"));
    command.arg("replay").args(args);
    command.output().expect("the binary starts")
}

/// What a replay said.
struct Said {
    code: i32,
    lines: Vec<Value>,
    error: String,
}

impl Said {
    fn by(args: &[&str]) -> Self {
        let mut all = vec!["--format", "json"];
        all.extend(args);
        let output = replay(&all);
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        Self {
            code: output.status.code().expect("no signal"),
            lines: text
                .lines()
                .map(|line| serde_json::from_str(line).expect(line))
                .collect(),
            error: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    fn of_type<'a, 'k>(&'a self, kind: &'k str) -> impl Iterator<Item = &'a Value> + use<'a, 'k> {
        self.lines.iter().filter(move |line| line["type"] == kind)
    }

    fn last(&self, kind: &str) -> &Value {
        self.of_type(kind)
            .last()
            .unwrap_or_else(|| panic!("no line {kind}: {} {:?}", self.error, self.lines))
    }

    /// Causes of the alerts that fired.
    fn fired(&self) -> BTreeSet<String> {
        self.of_type("alert")
            .filter(|alert| alert["state"] == "firing")
            .map(|alert| text(&alert["cause"]))
            .collect()
    }

    fn look_alikes(&self) -> BTreeSet<String> {
        self.of_type("look_alike")
            .map(|line| text(&line["name"]))
            .collect()
    }

    fn bare_acks(&self) -> u64 {
        let summary = self.last("summary");
        let spaces = summary["spaces"].as_array().expect("spaces").iter();
        spaces
            .map(|space| number(&space["totals"]["bare_acks"]))
            .chain([
                number(&summary["other"]["bare_acks"]),
                number(&summary["globals"]["bare_acks_without_port_space"]),
            ])
            .sum()
    }

    fn first_bare_ack(&self) -> Option<u64> {
        let mut shown = self.of_type("evidence");
        let first = shown.find(|e| text(&e["reading"]).starts_with("bare ACK"))?;
        Some(number(&first["frame"]))
    }
}

fn text(value: &Value) -> String {
    value
        .as_str()
        .unwrap_or_else(|| panic!("{value}"))
        .to_owned()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value}"))
}

fn strings(value: &Value) -> BTreeSet<String> {
    value.as_array().into_iter().flatten().map(text).collect()
}

const REUSE: &str = "l4_reuse_in_time_wait";
const PINNED: &str = "pinned_5xx";

/// Replays one recording, compares it with what is known, and gives its line of the table.
fn check(entry: &Value, path: &Path) -> String {
    let file = text(&entry["file"]);
    let said = Said::by(&[path.to_str().expect("UTF-8")]);
    let context = || {
        format!(
            "{file}: {}\n{:#?}",
            said.error,
            said.of_type("replay").last()
        )
    };
    let (fired, expected) = (said.fired(), &entry["expected"]);
    let counted = &entry["packets_read_by_analyze_py"];
    let replay = said.last("replay");

    // The verdict: never another one than that of the ground truth. A forecast may come before an
    // exhaustion. What rests on a budget is not claimed without one.
    let mut allowed: BTreeSet<String> = expected["also_acceptable"]
        .as_array()
        .into_iter()
        .flatten()
        .chain([expected])
        .filter_map(|verdict| verdict["cause"].as_str().map(str::to_owned))
        .collect();
    if expected["cause"] == REUSE {
        assert!(fired.contains(REUSE), "{}", context());
        allowed.insert("forecast".to_owned());
    }
    if expected["cause"] == "black_holed" {
        assert!(fired.contains("black_holed"), "{}", context());
    }
    // In clear text it must be found; where it is not, it may be.
    if expected["cause"] == PINNED && !expected["also_acceptable"].is_array() {
        assert!(fired.contains(PINNED), "{}", context());
    }
    assert!(fired.is_subset(&allowed), "{fired:?}, {}", context());

    // The counts, the first symptom and the place.
    let bare_acks = counted["bare_ack_to_syn"].as_u64().unwrap_or(0);
    assert_eq!(said.bare_acks(), bare_acks, "{}", context());
    let symptom = &entry["first_symptom"];
    if symptom["what"] == "bare_ack_to_syn" {
        let frame = Some(number(&symptom["frame"]));
        assert_eq!(said.first_bare_ack(), frame, "{}", context());
    }
    let segments = number(&replay["segments"]);
    if segments > 0 {
        let (local, known) = (strings(&replay["local"]), strings(&entry["local_addrs"]));
        assert_eq!(local, known, "{}", context());
    }
    assert_eq!(number(&replay["late"]), 0, "{}", context());

    // The exit code, and the fault of the one that is cut in its last packet.
    let packets = number(&counted["packets"]);
    if file.contains("_cut.") {
        assert_eq!(said.code, 65, "{}", context());
        assert_eq!(number(&replay["packets"]), packets - 1, "{}", context());
        let fault = &replay["faults"][0];
        assert!(number(&fault["offset"]) > 0, "{fault}");
        assert!(said.error.contains("at byte"), "{}", said.error);
    } else {
        let code = if fired.is_empty() { 0 } else { 3 };
        assert_eq!(said.code, code, "{}", context());
        assert_eq!(number(&replay["packets"]), packets, "{}", context());
    }

    let or_none = |set: BTreeSet<String>| {
        let list: Vec<_> = set.into_iter().collect();
        if list.is_empty() {
            "none".to_owned()
        } else {
            list.join(", ")
        }
    };
    format!(
        "| `{file}` | {} | {} | {} | {bare_acks} |\n",
        expected["real_cause"].as_str().unwrap_or("none"),
        or_none(fired),
        or_none(said.look_alikes()),
    )
}

fn manifest(dir: &Path) -> Option<Vec<Value>> {
    let bytes = fs::read(dir.join("manifest.json")).ok()?;
    let manifest: Value = serde_json::from_slice(&bytes).expect("JSON");
    let mut files = manifest["files"].as_array().expect("files").clone();
    files.sort_by_key(|entry| text(&entry["file"]));
    Some(files)
}

const BEGIN: &str = "<!-- recordings -->\n";
const END: &str = "<!-- /recordings -->\n";
const HEAD: &str =
    "| recording | what happened | alerts | look-alikes | bare ACKs |\n|---|---|---|---|---:|\n";
/// The section, where the page has none yet.
const SECTION: &str = "\n## Recordings\n\n\
What `tuplewatch replay` says of each recording, without any budget or profile (`agent/tests/replay.rs`, which also\n\
compares the number of bare ACKs, the first symptom and the place of the capture with what the hosts and another program\n\
counted). `TUPLEWATCH_BLESS=1 cargo test -p tuplewatch --test replay` writes it.\n\n";

/// The page, and where in it the table stands.
fn page() -> (String, Option<std::ops::Range<usize>>) {
    let page = fs::read_to_string(package("../docs/verdicts.md")).unwrap_or_default();
    let from = page.find(BEGIN).map(|at| at + BEGIN.len());
    let to = page.find(END);
    let range = from.zip(to).map(|(from, to)| from..to);
    (page, range)
}

fn is_blessing() -> bool {
    std::env::var_os("TUPLEWATCH_BLESS").is_some()
}

#[test]
fn the_recordings_at_hand() {
    let dir = package("tests/captures");
    let (page, _) = page();
    for entry in manifest(&dir).expect("tests/captures belongs to the project") {
        let file = text(&entry["file"]);
        let packed = ["gz", "zst"].map(|by| dir.join(format!("{file}.{by}")));
        let path = packed.iter().find(|p| p.exists()).expect("the file");
        let row = check(&entry, path);
        assert!(
            is_blessing() || page.contains(&row),
            "docs/verdicts.md has no line {row}"
        );
    }
}

#[test]
fn all_recordings() {
    let dir = package("../../shared/captures");
    let Some(files) = manifest(&dir) else {
        eprintln!("SKIPPED: no recordings in {}", dir.display());
        return;
    };
    let mut table = HEAD.to_owned();
    for entry in &files {
        table.push_str(&check(entry, &dir.join(text(&entry["file"]))));
    }
    let (mut page, range) = page();
    if is_blessing() {
        match range {
            Some(range) => page.replace_range(range, &table),
            None => page.push_str(&format!("{SECTION}{BEGIN}{table}{END}")),
        }
        fs::write(package("../docs/verdicts.md"), page).expect("docs can be written to");
        return;
    }
    assert_eq!(
        range.map(|range| &page[range]),
        Some(table.as_str()),
        "docs/verdicts.md is out of date: run this test with TUPLEWATCH_BLESS=1"
    );
}

/// What a recording cannot show, the configuration says: with the device's budget the unanswered SYNs get
/// their cause, without it nothing is claimed (see the table).
#[test]
fn a_budget_tells_the_cause_of_unanswered_syns() {
    let file = package("../../shared/captures/03_nat_syn_drop.client.pcap");
    if !file.exists() {
        eprintln!("SKIPPED: there is no {}", file.display());
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.yaml");
    let group = "egress_groups:\n  - name: lab-nat\n    destinations: [203.0.113.10/32]\n";
    fs::write(
        &config,
        format!("{group}    ports: 200\n    hold: 62s\n    hosts: 2\n"),
    )
    .unwrap();
    let config = config.to_str().unwrap();
    let file = file.to_str().unwrap();
    // Half of the pool is what this one of two clients takes on the average, not at each moment.
    let share = "nat_syn_drop.min_utilization=0.6";
    let said = Said::by(&["--config", config, "--set", share, file]);
    assert_eq!(said.code, 3, "{}", said.error);
    assert_eq!(said.fired(), BTreeSet::from(["nat_syn_drop".to_owned()]));
    assert_eq!(Said::by(&[file]).code, 0);
    fs::write(config, format!("{group}    port: 200\n")).unwrap();
    let wrong = Said::by(&["--config", config, file]);
    assert_eq!(wrong.code, 78);
    assert!(
        wrong.error.contains("4:") && wrong.error.contains("ports"),
        "{}",
        wrong.error
    );
}

/// One of the captures at hand, unpacked.
fn unpacked(name: &str, to: &Path) -> PathBuf {
    let packed = fs::File::open(package("tests/captures").join(format!("{name}.gz"))).unwrap();
    let path = to.join(name);
    let mut out = fs::File::create(&path).unwrap();
    std::io::copy(&mut flate2::read::GzDecoder::new(packed), &mut out).unwrap();
    path
}

/// Offsets of the packets of a classic capture of this machine's byte order.
fn offsets(bytes: &[u8]) -> Vec<usize> {
    let (mut at, mut all) = (24, Vec::new());
    while at + 16 <= bytes.len() {
        all.push(at);
        at += 16 + u32::from_le_bytes(bytes[at + 8..at + 12].try_into().unwrap()) as usize;
    }
    all
}

const RST_LOST: &str = "02_l4_reuse_rst_lost.client.pcap";

/// What must be the same however a capture is cut and given.
fn figures(said: &Said) -> (BTreeSet<String>, Vec<Value>) {
    let spaces = said.last("summary")["spaces"].as_array().unwrap().clone();
    let figures = spaces
        .into_iter()
        .map(|space| {
            serde_json::json!([
                space["client.address"],
                space["server.address"],
                space["role"],
                space["totals"]
            ])
        })
        .collect();
    (said.fired(), figures)
}

#[test]
fn pieces_of_a_rotated_capture_are_one() {
    let dir = tempfile::tempdir().unwrap();
    let whole = unpacked(RST_LOST, dir.path());
    let bytes = fs::read(&whole).unwrap();
    let all = offsets(&bytes);
    let mut pieces = Vec::new();
    for (i, part) in [0..300, 300..984, 984..all.len()].into_iter().enumerate() {
        let path = dir.path().join(format!("piece{i}"));
        let end = all.get(part.end).copied().unwrap_or(bytes.len());
        fs::write(&path, [&bytes[..24], &bytes[all[part.start]..end]].concat()).unwrap();
        pieces.push(path.to_str().unwrap().to_owned());
    }
    let expected = figures(&Said::by(&[whole.to_str().unwrap()]));
    // In whatever order they are given.
    for order in [[0, 1, 2], [2, 0, 1]] {
        let said = Said::by(&order.map(|i| pieces[i].as_str()));
        assert_eq!(said.of_type("replay").count(), 1, "one place");
        assert_eq!(figures(&said), expected);
    }
}

#[test]
fn the_same_packets_twice_count_once() {
    let dir = tempfile::tempdir().unwrap();
    let whole = unpacked(RST_LOST, dir.path());
    let whole = whole.to_str().unwrap();
    assert_eq!(
        figures(&Said::by(&[whole, whole])),
        figures(&Said::by(&[whole]))
    );
}

#[test]
fn two_places_are_kept_apart() {
    let dir = package("tests/captures");
    let path = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    let said = Said::by(&[
        &path("13_half_open.server.pcap.gz"),
        &path("02_l4_reuse_rst_lost.client.pcap.gz"),
    ]);
    let places: Vec<_> = said
        .of_type("replay")
        .map(|r| strings(&r["local"]))
        .collect();
    assert_eq!(places.len(), 2, "{places:?}");
    assert_eq!(said.code, 3);
}

#[test]
fn a_piece_out_of_order_is_put_into_order() {
    let dir = tempfile::tempdir().unwrap();
    let whole = unpacked(RST_LOST, dir.path());
    let bytes = fs::read(&whole).unwrap();
    let mut records: Vec<&[u8]> = offsets(&bytes)
        .windows(2)
        .map(|w| &bytes[w[0]..w[1]])
        .collect();
    let time = |record: &[u8]| {
        let word = |at: usize| u32::from_le_bytes(record[at..at + 4].try_into().unwrap());
        u64::from(word(0)) * 1_000_000_000 + u64::from(word(4))
    };
    let mut whole_but_last = bytes[..24].to_vec();
    whole_but_last.extend(records.concat());
    // Neighbours of less than 20 ms change places.
    for i in (1..records.len()).step_by(3) {
        if time(records[i]).abs_diff(time(records[i - 1])) < 20_000_000 {
            records.swap(i, i - 1);
        }
    }
    let (ordered, mixed) = (dir.path().join("ordered"), dir.path().join("mixed"));
    fs::write(&ordered, whole_but_last).unwrap();
    fs::write(&mixed, [&bytes[..24], &records.concat()].concat()).unwrap();
    let said = Said::by(&[mixed.to_str().unwrap()]);
    assert_eq!(number(&said.last("replay")["late"]), 0);
    assert_eq!(
        figures(&said),
        figures(&Said::by(&[ordered.to_str().unwrap()]))
    );
}

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
    assert_eq!(comments.len(), shown.len());
    for frame in &shown {
        let begin = format!("frame {frame} of ");
        assert!(comments.iter().any(|c| c.starts_with(&begin)), "{frame}");
    }
    // And so does our own.
    let again = Said::by(&[out.to_str().unwrap()]);
    assert_eq!(number(&again.last("replay")["packets"]), shown.len() as u64);
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
