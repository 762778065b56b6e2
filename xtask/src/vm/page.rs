//! `docs/kernels.md`: what became of each hook on each kernel, and how much the verifier had to look at.

use std::{collections::BTreeMap, env, fmt::Write as _, fs, path::PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::paths::Paths;

/// A program may cost the verifier so many per cent more than the page says.
const GROWTH: u64 = 20;
/// The file that the test `kernel` leaves.
pub const FILE: &str = "kernel.json";

/// A table of the page, between two marks.
struct Table {
    mark: &'static str,
    head: String,
    rows: BTreeMap<String, Vec<String>>,
}

/// Writes what was found on a kernel into the page if `TUPLEWATCH_BLESS=1` is set, else compares.
///
/// # Errors
/// If the page says something else: what, and the remedy.
pub fn record(paths: &Paths, kernel: &str, found: &Value) -> Result<()> {
    let path = page(paths);
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let mut hooks = Table::read(&text, "hooks")?;
    let mut programs = Table::read(&text, "programs")?;
    let verdicts = verdicts(found)?;
    let costs = costs(found)?;
    if env::var_os("TUPLEWATCH_BLESS").is_some() {
        hooks.rows.insert(kernel.to_owned(), verdicts);
        programs.rows.insert(kernel.to_owned(), costs);
        let text = hooks.write(&text)?;
        let text = programs.write(&text)?;
        return fs::write(&path, text).with_context(|| path.display().to_string());
    }
    let remedy = "run with TUPLEWATCH_BLESS=1 if that is right";
    let said = hooks.rows.get(kernel);
    // The release changes with each update.
    ensure!(
        said.is_some_and(|said| said[1..] == verdicts[1..]),
        "{} says {said:?} of {kernel}, found {verdicts:?}: {remedy}",
        path.display()
    );
    let said = programs.rows.get(kernel);
    let said = said.with_context(|| format!("{} has no costs of {kernel}", path.display()))?;
    let names = columns(&programs.head);
    for ((name, cost), before) in names[1..].iter().zip(&costs).zip(said) {
        let (Ok(cost), Ok(before)) = (cost.parse::<u64>(), before.parse::<u64>()) else {
            continue;
        };
        ensure!(
            cost * 100 <= before * (100 + GROWTH),
            "the verifier looks at {cost} instructions of {name} on {kernel}, {before} before: {remedy}"
        );
    }
    Ok(())
}

/// Whether a kernel's row can say something of what was found: it is of the same release, or is to be written.
///
/// # Errors
/// If the page cannot be read.
pub fn is_of(paths: &Paths, kernel: &str, found: &Value) -> Result<bool> {
    let path = page(paths);
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let row = Table::read(&text, "hooks")?.rows.remove(kernel);
    let is_same = row.is_some_and(|row| found["release"] == row[0].as_str());
    Ok(is_same || env::var_os("TUPLEWATCH_BLESS").is_some())
}

/// The kernel's release, how interfaces are hooked, and each hook's state.
fn verdicts(found: &Value) -> Result<Vec<String>> {
    let text = |value: &Value| value.as_str().unwrap_or("–").to_owned();
    let mut cells = vec![text(&found["release"]), text(&found["interfaces"])];
    for hook in HOOKS {
        let state = &found["hooks"][hook]["state"];
        cells.push(state.as_str().context("a hook's state")?.to_owned());
    }
    Ok(cells)
}

/// Instructions by program; names are cut to what the kernel keeps of them.
fn costs(found: &Value) -> Result<Vec<String>> {
    let programs = found["programs"].as_object().context("programs")?;
    Ok(PROGRAMS
        .iter()
        .map(|name| {
            let kept = &name[..name.len().min(15)];
            let cost = programs.get(kept).and_then(Value::as_u64);
            cost.map_or_else(|| "–".to_owned(), |n| n.to_string())
        })
        .collect())
}

const HOOKS: [&str; 6] = [
    "packet",
    "lifecycle",
    "retransmit",
    "send_reset",
    "receive_reset",
    "census",
];

const PROGRAMS: [&str; 13] = [
    "tuplewatch_in",
    "tuplewatch_out",
    "tuplewatch_ip_in",
    "tuplewatch_ip_out",
    "sweep",
    "inet_sock_set_state",
    "tcp_retransmit_skb",
    "tcp_send_reset",
    "tcp_receive_reset",
    "census_listeners",
    "census_established",
    "census_seed",
    "census_netns",
];

fn page(paths: &Paths) -> PathBuf {
    paths.root.join("docs/kernels.md")
}

fn columns(line: &str) -> Vec<String> {
    let line = line.trim().trim_matches('|');
    line.split('|').map(|cell| cell.trim().to_owned()).collect()
}

impl Table {
    fn bounds(text: &str, mark: &str) -> Result<(usize, usize)> {
        let begin = format!("<!-- {mark} -->\n");
        let end = format!("<!-- /{mark} -->");
        let start = text
            .find(&begin)
            .with_context(|| format!("no line {begin}"))?
            + begin.len();
        let stop = text.find(&end).with_context(|| format!("no line {end}"))?;
        ensure!(start <= stop, "{mark}: the marks are the wrong way round");
        Ok((start, stop))
    }

    fn read(text: &str, mark: &'static str) -> Result<Self> {
        let (start, stop) = Self::bounds(text, mark)?;
        let head = match mark {
            "hooks" => format!("| kernel | release | interfaces | {} |", HOOKS.join(" | ")),
            _ => format!("| kernel | {} |", PROGRAMS.join(" | ")),
        };
        let rows = text[start..stop].lines().skip(2).map(|line| {
            let mut cells = columns(line);
            let name = cells.remove(0);
            (name, cells)
        });
        Ok(Self {
            mark,
            rows: rows.collect(),
            head,
        })
    }

    fn write(&self, text: &str) -> Result<String> {
        let (start, stop) = Self::bounds(text, self.mark)?;
        let mut table = format!(
            "{}\n{}\n",
            self.head,
            "|---".repeat(columns(&self.head).len()) + "|"
        );
        for (name, cells) in &self.rows {
            writeln!(table, "| {name} | {} |", cells.join(" | "))?;
        }
        Ok(format!("{}{table}{}", &text[..start], &text[stop..]))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_table_is_written_and_read_again() {
        let text = "a\n<!-- hooks -->\n<!-- /hooks -->\nb\n";
        let mut table = Table::read(text, "hooks").unwrap();
        assert!(table.rows.is_empty());
        let cells: Vec<String> = (0..8).map(|n| n.to_string()).collect();
        table.rows.insert("6.1".to_owned(), cells.clone());
        let text = table.write(text).unwrap();
        assert!(text.starts_with("a\n<!-- hooks -->\n| kernel | release |"));
        assert!(text.ends_with("<!-- /hooks -->\nb\n"));
        assert_eq!(Table::read(&text, "hooks").unwrap().rows["6.1"], cells);
    }

    #[test]
    fn names_are_found_as_the_kernel_cuts_them() {
        let found = json!({"programs": {"census_establis": 7, "sweep": null}});
        let costs = costs(&found).unwrap();
        let at = |name| PROGRAMS.iter().position(|p| *p == name).unwrap();
        assert_eq!(costs[at("census_established")], "7");
        assert_eq!(costs[at("sweep")], "–");
    }
}
