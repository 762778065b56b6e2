use std::collections::BTreeSet;

use super::*;
use crate::{core::alert::Firing, sink::fixture};

const DOC: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/json.md"));

fn lines() -> Vec<Value> {
    let lines = written();
    let lines = lines.iter().map(|line| serde_json::from_str(line));
    lines.collect::<Result<_, _>>().unwrap()
}

fn written() -> Vec<String> {
    let (out, text) = fixture::shared();
    let mut json = Json::new(out, WallClock::capture());
    json.ready(fixture::NOW, &fixture::ready()).unwrap();
    let changes = [Change::Alert(Box::new(alert())), fixture::look_alike(true)];
    json.changes(fixture::NOW, &changes).unwrap();
    json.overview(&fixture::overview()).unwrap();
    json.close().unwrap();
    text().lines().map(str::to_owned).collect()
}

/// A line of JSON for people, its fields in the order that they are written in.
fn pretty(line: &str) -> String {
    let (mut out, mut depth) = (String::new(), 0);
    let (mut in_string, mut escaped) = (false, false);
    let mut rest = line.chars().peekable();
    let indent = |out: &mut String, depth: usize| {
        out.push('\n');
        out.push_str(&"  ".repeat(depth));
    };
    while let Some(c) = rest.next() {
        if in_string {
            out.push(c);
            in_string = c != '"' || escaped;
            escaped = c == '\\' && !escaped;
            continue;
        }
        match c {
            '{' | '[' => {
                out.push(c);
                if let Some(end) = rest.next_if(|c| ['}', ']'].contains(c)) {
                    out.push(end);
                } else {
                    depth += 1;
                    indent(&mut out, depth);
                }
            }
            '}' | ']' => {
                depth -= 1;
                indent(&mut out, depth);
                out.push(c);
            }
            ',' => {
                out.push(c);
                indent(&mut out, depth);
            }
            ':' => out.push_str(": "),
            _ => {
                in_string = c == '"';
                out.push(c);
            }
        }
    }
    out + "\n"
}

/// An alert that fires again, and that somebody has muted.
fn alert() -> Alert {
    let mut alert = fixture::alert();
    let before = |s: u64| Moment(fixture::NOW.0 - s * 1_000_000_000);
    let firing = |since, until| Firing {
        since: before(since),
        until,
        severity: Severity::Critical,
    };
    alert.history = History {
        count: 2,
        first: Some(before(7200)),
        worst: Some(Severity::Critical),
        firings: [firing(7200, Some(before(7000))), firing(11, None)].into(),
    };
    alert.muted = Some(crate::core::mute::Muted {
        reason: "load test".to_owned(),
        until: Some(Moment(fixture::NOW.0 + 3_600_000_000_000)),
    });
    alert
}

/// First column of the tables below the heading of a line type.
fn documented(kind: &str) -> BTreeSet<String> {
    let section = DOC
        .split("\n## ")
        .find(|section| section.starts_with(&format!("`{kind}`")));
    let section = section.unwrap_or_else(|| panic!("docs/json.md has no section `{kind}`"));
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `"));
    rows.map(|row| row.split('`').next().unwrap().to_owned())
        .collect()
}

#[test]
fn documentation_and_code_name_the_same_fields() {
    let lines = lines();
    let kinds: Vec<_> = lines
        .iter()
        .map(|line| line["type"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["ready", "alert", "look_alike", "loss", "summary"]);
    for line in &lines {
        let kind = line["type"].as_str().unwrap();
        let mut written = BTreeSet::new();
        fixture::paths(line, "", &mut written);
        for common in ["schema", "type", "time"] {
            assert!(written.remove(common), "{kind} has no {common}");
        }
        let documented = documented(kind);
        let missing: Vec<_> = written.difference(&documented).collect();
        let stale: Vec<_> = documented.difference(&written).collect();
        assert!(
            missing.is_empty(),
            "docs/json.md lacks fields of `{kind}`: {missing:?}"
        );
        assert!(
            stale.is_empty(),
            "docs/json.md has fields `{kind}` does not: {stale:?}"
        );
    }
}

#[test]
fn the_examples_of_the_documentation_are_what_is_written() {
    const FENCE: &str = "```json\n";
    let written = written();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/json.md");
    let mut doc = DOC.to_owned();
    for (kind, line) in lines().iter().map(|l| &l["type"]).zip(&written) {
        let section = format!("\n## `{}`", kind.as_str().unwrap());
        let start = doc.find(&section).unwrap();
        let start = start + doc[start..].find(FENCE).unwrap() + FENCE.len();
        let end = start + doc[start..].find("```").unwrap();
        doc.replace_range(start..end, &pretty(line));
    }
    assert_eq!(
        doc.matches(FENCE).count(),
        written.len(),
        "one for each type"
    );
    if std::env::var_os("TUPLEWATCH_BLESS").is_some() {
        std::fs::write(path, doc).unwrap();
    } else {
        assert!(
            doc == DOC,
            "the examples in docs/json.md are not what is written; write them anew with\n    \
             TUPLEWATCH_BLESS=1 cargo test -p tuplewatch the_examples"
        );
    }
}

#[test]
fn an_alert_has_what_a_person_or_a_program_needs() {
    let alert = &lines()[1];
    assert_eq!(alert["schema"], 1);
    assert_eq!(alert["time"], "2025-11-29T10:30:05.123Z");
    assert_eq!(alert["client.address"], "198.51.100.7");
    assert_eq!(alert["server.port"], 443);
    assert_eq!(alert["netns"], Value::Null);
    assert_eq!(alert["firing_since"], "2025-11-29T10:29:54.123Z");
    assert_eq!(alert["resolved_at"], Value::Null);
    assert_eq!(
        alert["evidence"]["samples"][0]["time"],
        "2025-11-29T10:30:04.723Z"
    );
    assert_eq!(alert["evidence"]["samples"][0].get("time_ns"), None);
}

#[test]
fn a_loss_is_told_when_it_grows_and_only_then() {
    let (out, text) = fixture::shared();
    let mut json = Json::new(out, WallClock::capture());
    let mut overview = fixture::overview();
    json.overview(&overview).unwrap();
    json.overview(&overview).unwrap();
    overview.globals[Global::EventsLost as usize] += 3;
    overview.globals[Global::Fragments as usize] += 3;
    json.overview(&overview).unwrap();
    let text = text();
    let losses: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .filter(|line| line["type"] == "loss")
        .collect();
    let told: Vec<_> = losses
        .iter()
        .map(|l| (&l["name"], &l["count"], &l["new"]))
        .collect();
    let name = Value::from("events_lost");
    assert_eq!(
        told,
        [
            (&name, &17.into(), &17.into()),
            (&name, &20.into(), &3.into())
        ],
        "fragments only describe the traffic"
    );
}
