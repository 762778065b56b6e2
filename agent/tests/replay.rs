//! `tuplewatch replay` on recordings of real TCP stacks, against what is known of each: the verdict, the
//! counts, the first symptom, the place. Some are in `tests/captures`; the others are read where the
//! folder that is shared beside the project is at hand, and are skipped aloud elsewhere.
//!
//! `docs/verdicts.md` is the table of what came out; `TUPLEWATCH_BLESS=1` writes it anew.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::Value;

#[path = "replay/flood.rs"]
mod flood;
#[path = "replay/given.rs"]
mod given;
#[path = "replay/options.rs"]
mod options;

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

/// A recording of the incident.
const RST_LOST: &str = "02_l4_reuse_rst_lost.client.pcap";
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
