//! The configuration as a person meets it: the real binary, its output and its exit codes.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context as _, Result};
use tempfile::TempDir;

fn binary() -> PathBuf {
    std::env::var_os("TUPLEWATCH_BIN").map_or_else(
        || {
            let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(
                || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target")),
                PathBuf::from,
            );
            target.join("release/tuplewatch")
        },
        PathBuf::from,
    )
}

/// Runs the agent without the variables of this test run.
fn run(args: &[&str], variables: &[(&str, &str)]) -> Result<Output> {
    let binary = binary();
    let mut command = Command::new(&binary);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("TUPLEWATCH_")) {
        command.env_remove(name);
    }
    command
        .args(args)
        .envs(variables.iter().copied())
        .output()
        .with_context(|| format!("{} cannot be run", binary.display()))
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A directory with a configuration file.
fn file(text: &str) -> Result<(TempDir, String)> {
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("config.yaml");
    std::fs::write(&path, text)?;
    let path = path.to_str().context("a path")?.to_owned();
    Ok((directory, path))
}

#[test]
fn the_default_file_is_right_and_changes_nothing() -> Result<()> {
    let default = run(&["config", "default"], &[])?;
    assert!(default.status.success(), "{}", stderr(&default));
    let text = stdout(&default);
    for line in [
        "top: 20",
        "  listen: auto",
        "    min_refused: 5",
        "mute: []",
    ] {
        assert!(text.lines().any(|l| l == line), "{line:?} in\n{text}");
    }
    let (_directory, path) = file(&text)?;
    let check = run(&["config", "check", &path], &[])?;
    assert_eq!(
        (check.status.code(), stdout(&check)),
        (Some(0), format!("{path}: ok\n"))
    );
    // In effect it is the same as no file at all, but for where the values come from.
    let values = |output: &Output| -> Vec<String> {
        let text = stdout(output);
        let lines = text.lines().skip(1);
        lines
            .map(|line| line.split("    # ").next().unwrap_or_default().to_owned())
            .collect()
    };
    let with = run(&["config", "show", "--config", &path], &[])?;
    let without = run(&["config", "show", "--config", "/dev/null"], &[])?;
    assert_eq!(values(&with), values(&without));
    assert!(values(&with).len() > 40);
    Ok(())
}

#[test]
fn check_names_every_mistake_with_its_line_and_what_was_meant() -> Result<()> {
    let (_directory, path) = file(
        "top: 20\n\
         otlp:\n  endpont: http://127.0.0.1:4318\n  interval: soon\n\
         thresholds:\n  l4_reuse:\n    min_refused: -1\n\
         mute:\n  - causes: [nat_syn_drp]\n    reason: known\n",
    )?;
    let check = run(&["config", "check", &path], &[])?;
    assert_eq!(check.status.code(), Some(78));
    let wanted = [
        format!("tuplewatch: {path}:3:3: unknown key `endpont`; did you mean `endpoint`?"),
        format!("{path}:4:13: otlp.interval: `soon` is not a duration like 10s"),
        format!("{path}:7:18: thresholds.l4_reuse.min_refused: `-1` is not a whole number"),
        format!("{path}:9:14: `nat_syn_drp` is none of l4_reuse_in_time_wait, nat_syn_drop"),
    ];
    let said = stderr(&check);
    let lines: Vec<_> = said.lines().collect();
    assert_eq!(lines.len(), wanted.len(), "{said}");
    for (line, wanted) in lines.iter().zip(&wanted) {
        assert!(line.starts_with(wanted.as_str()), "{line}\nwanted {wanted}");
    }
    assert!(
        lines[3].ends_with("did you mean `nat_syn_drop`?"),
        "{}",
        lines[3]
    );
    assert_eq!(stdout(&check), "");
    Ok(())
}

#[test]
fn the_agent_does_not_start_with_a_wrong_configuration() -> Result<()> {
    let (_directory, path) = file("topp: 20\n")?;
    for (args, variables, wanted) in [
        (
            vec!["run", "--config", &path],
            vec![],
            format!("tuplewatch: {path}:1:1: unknown key `topp`; did you mean `top`?\n"),
        ),
        (
            vec!["run"],
            vec![("TUPLEWATCH_CONFIG", path.as_str())],
            format!("tuplewatch: {path}:1:1: unknown key `topp`; did you mean `top`?\n"),
        ),
        (
            vec!["run", "--config", "/dev/null"],
            vec![("TUPLEWATCH_TOP", "many")],
            "tuplewatch: TUPLEWATCH_TOP: `many` is not a whole number".to_owned(),
        ),
        (
            vec!["run", "--config", "/nonexistent/tuplewatch.yaml"],
            vec![],
            "tuplewatch: /nonexistent/tuplewatch.yaml: it cannot be read: ".to_owned(),
        ),
    ] {
        let output = run(&args, &variables)?;
        assert_eq!(
            output.status.code(),
            Some(78),
            "{args:?}: {}",
            stderr(&output)
        );
        assert!(
            stderr(&output).starts_with(&wanted),
            "{}\nwanted {wanted}",
            stderr(&output)
        );
        assert_eq!(stdout(&output), "");
    }
    // A wrong flag is a wrong use of the command.
    let output = run(&["run", "--summary-interval", "1ms"], &[])?;
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).contains("at least 100ms"),
        "{}",
        stderr(&output)
    );
    Ok(())
}

#[test]
fn show_says_where_each_value_comes_from_and_keeps_secrets() -> Result<()> {
    let (_directory, path) = file(
        "top: 7\nsummary_interval: 5s\n\
         otlp:\n  endpoint: https://user:hunter2@otlp.example:4318\n  headers: {Authorization: Basic hunter2}\n\
         destinations:\n  - match: [10.0.0.0/8]\n    thresholds: {alert: {pending: 1m}}\n",
    )?;
    let show = run(
        &[
            "config",
            "show",
            "--config",
            &path,
            "--top",
            "9",
            "--set",
            "window=30s",
        ],
        &[
            ("TUPLEWATCH_SUMMARY_INTERVAL", "3s"),
            ("TUPLEWATCH_TOP", "8"),
        ],
    )?;
    assert!(show.status.success(), "{}", stderr(&show));
    let text = stdout(&show);
    for line in [
        "top: 9    # the command line",
        "summary_interval: 3s    # TUPLEWATCH_SUMMARY_INTERVAL",
        "  endpoint: \"https://***@otlp.example:4318\"    # line 4 of the file",
        "  headers: {Authorization: \"***\"}    # line 5 of the file",
        "  window: 30s    # the command line",
        "format: text",
    ] {
        assert!(text.lines().any(|l| l == line), "{line:?} in\n{text}");
    }
    assert!(!text.contains("hunter2"), "{text}");
    // What is shown is a configuration.
    let (_directory, shown) = file(&text)?;
    let check = run(&["config", "check", &shown], &[])?;
    assert_eq!(check.status.code(), Some(0), "{}", stderr(&check));
    Ok(())
}

#[test]
fn check_without_a_name_looks_at_the_default_file() -> Result<()> {
    const DEFAULT: &str = "/etc/tuplewatch/config.yaml";
    let check = run(&["config", "check"], &[])?;
    if Path::new(DEFAULT).exists() {
        assert!(stdout(&check).contains(DEFAULT) || stderr(&check).contains(DEFAULT));
    } else {
        assert_eq!(check.status.code(), Some(78));
        assert!(stderr(&check).starts_with(&format!("tuplewatch: {DEFAULT}: it cannot be read")));
    }
    Ok(())
}
