//! `docs/verdicts.md`: what the agent says in each scenario of the lab, and by what evidence.
//!
//! Each test writes its rows when `TUPLEWATCH_BLESS=1` is set, and otherwise fails where the page says
//! something else. What is written comes from the agent's own lines: whether a figure is zero, not how
//! large it was on this run.

use std::fmt::Write as _;
use std::io::{Read as _, Seek as _, Write as _};
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

const BEGIN: &str = "<!-- lab -->\n";
const END: &str = "<!-- /lab -->\n";
const HEAD: &str = "| scenario | seen at | verdict | evidence |\n|---|---|---|---|\n";

/// One row of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    scenario: String,
    at: String,
    verdict: String,
    evidence: String,
}

impl Row {
    /// What an alert or look-alike line says, with these figures of its evidence (paths with points, such
    /// as `loss.lost`).
    #[must_use]
    pub fn told(scenario: &str, at: &str, line: &Value, figures: &[&str]) -> Self {
        let name = line["cause"].as_str().or_else(|| line["name"].as_str());
        let name = name.unwrap_or("?");
        let verdict = match line["severity"].as_str() {
            Some(severity) if line["type"] == "alert" => format!("**{name}** ({severity})"),
            _ => name.to_owned(),
        };
        let mut evidence = describe(&line["evidence"], figures);
        let counters = line["evidence"]["counters"].as_array();
        for counter in counters.into_iter().flatten() {
            let name = counter["name"].as_str().unwrap_or("?");
            let _ = write!(evidence, ", {name}");
        }
        Self::new(scenario, at, &verdict, &evidence)
    }

    /// Nothing is said, with these figures of the port space's totals.
    #[must_use]
    pub fn quiet(scenario: &str, at: &str, space: &Value, figures: &[&str]) -> Self {
        Self::new(scenario, at, "–", &describe(&space["totals"], figures))
    }

    fn new(scenario: &str, at: &str, verdict: &str, evidence: &str) -> Self {
        let [scenario, at, verdict, evidence] =
            [scenario, at, verdict, evidence].map(|text| text.replace('|', "/"));
        Self {
            scenario,
            at,
            verdict,
            evidence,
        }
    }

    fn key(&self) -> String {
        format!("| {} | {} |", self.scenario, self.at)
    }

    fn line(&self) -> String {
        format!("{} {} | {} |", self.key(), self.verdict, self.evidence)
    }

    /// Writes the row into the page, or compares it with what is there.
    ///
    /// # Errors
    /// If the page says something else, or cannot be read or written.
    pub fn record(&self) -> Result<()> {
        let path = page();
        let mut file = std::fs::File::options()
            .read(true)
            .write(true)
            .open(&path)
            .with_context(|| path.display().to_string())?;
        // Tests run beside each other.
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        let (before, rest) = text.split_once(BEGIN).context("no line `<!-- lab -->`")?;
        let (table, after) = rest.split_once(END).context("no line `<!-- /lab -->`")?;
        let mut rows: Vec<&str> = table.lines().skip(HEAD.lines().count()).collect();
        let key = self.key();
        let line = self.line();
        if std::env::var_os("TUPLEWATCH_BLESS").is_none() {
            let found = rows.iter().find(|row| row.starts_with(&key));
            ensure!(
                found == Some(&line.as_str()),
                "{} says {found:?}, the agent says {line:?}: run with TUPLEWATCH_BLESS=1 if that is right",
                path.display()
            );
            return Ok(());
        }
        rows.retain(|row| !row.starts_with(&key));
        rows.push(&line);
        rows.sort_unstable();
        let mut new = format!("{before}{BEGIN}{HEAD}");
        for row in rows {
            new += row;
            new.push('\n');
        }
        new += END;
        new += after;
        file.rewind()?;
        file.set_len(0)?;
        file.write_all(new.as_bytes())?;
        Ok(())
    }
}

/// `lost > 0, live = 0`.
fn describe(of: &Value, figures: &[&str]) -> String {
    let said = figures.iter().map(|path| {
        let value = path.split('.').fold(of, |value, part| &value[part]);
        match value.as_f64() {
            Some(n) if n > 0.0 => format!("{path} > 0"),
            Some(_) => format!("{path} = 0"),
            None => format!("{path} unknown"),
        }
    });
    said.collect::<Vec<_>>().join(", ")
}

fn page() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/verdicts.md"))
}
