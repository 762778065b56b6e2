//! Starting other programs, and saying what happens while they run.

use std::{
    collections::VecDeque,
    env,
    ffi::{OsStr, OsString},
    fmt,
    fs::{self, File},
    io::{BufRead, BufReader, Read, Write},
    path::Path,
    process::{Command, ExitStatus, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

/// How often a quiet step tells that it still runs.
const STILL_RUNNING: Duration = Duration::from_secs(20);

/// How many of the last lines of a failed step's output are shown. The log has all.
const TAIL: usize = 30;

/// Says what a command does. Standard error, so that the output of the programs started stays clean.
macro_rules! say {
    ($($argument:tt)*) => { eprintln!($($argument)*) };
}
pub(crate) use say;

/// A time span for people: `0.4 s`, `12.3 s`, `2 min 5 s`.
pub struct Elapsed(pub Duration);

impl fmt::Display for Elapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = if self.0.as_secs() < 60 {
            format!("{:.1} s", self.0.as_secs_f64())
        } else {
            format!("{} min {} s", self.0.as_secs() / 60, self.0.as_secs() % 60)
        };
        f.pad(&text)
    }
}

/// The cargo that started this program, in an environment as if it had not.
pub fn cargo() -> Command {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    clean(&mut cargo);
    cargo
}

/// Takes out of `command`'s environment what `cargo run` put into ours: it describes the package xtask, and its library
/// path leads to the libraries of rustup's compiler.
pub fn clean(command: &mut Command) {
    for (name, _) in env::vars_os() {
        if name.to_str().is_some_and(is_of_cargo_run) {
            command.env_remove(name);
        }
    }
    match env::var_os("LD_LIBRARY_PATH").map(|value| without_toolchains(&value)) {
        Some(rest) if !rest.is_empty() => command.env("LD_LIBRARY_PATH", rest),
        _ => command.env_remove("LD_LIBRARY_PATH"),
    };
    // Asking for a toolchain that is not there must not fetch it.
    command.env("RUSTUP_AUTO_INSTALL", "0");
}

/// Whether `cargo run` sets the variable `name` for the program it starts.
fn is_of_cargo_run(name: &str) -> bool {
    [
        "CARGO",
        "CARGO_MANIFEST_DIR",
        "CARGO_MANIFEST_PATH",
        "CARGO_CRATE_NAME",
        "CARGO_BIN_NAME",
        "OUT_DIR",
    ]
    .contains(&name)
        || name.starts_with("CARGO_PKG_")
}

/// A library path without the folders of rustup's toolchains and of cargo's target directories.
fn without_toolchains(path: &OsStr) -> OsString {
    let keep = env::split_paths(path).filter(|folder| {
        !folder.as_os_str().is_empty()
            && !folder.components().any(|part| {
                ["toolchains", "rustlib", "release", "debug"]
                    .iter()
                    .any(|t| part.as_os_str() == *t)
            })
    });
    env::join_paths(keep).unwrap_or_default()
}

/// Runs a command whose output is long and dull: it goes to `log`, a line tells from time to time that it still runs, and
/// the end of the output is shown if it fails.
///
/// # Errors
/// If the command does not start or fails: its name, the end of its output and the log's path.
pub fn logged(what: &str, log: &Path, command: &mut Command) -> Result<()> {
    let start = Instant::now();
    say!("  {what} …  (output: {})", log.display());
    let (status, tail) = run_into(log, command, |line| {
        say!("    {} so far: {line}", Elapsed(start.elapsed()));
    })?;
    if !status.success() {
        for line in tail {
            say!("    | {line}");
        }
        bail!(
            "{what}: {} ({status}), all its output is in {}",
            command_line(command),
            log.display()
        );
    }
    say!("  {what}: done in {}", Elapsed(start.elapsed()));
    Ok(())
}

/// Runs `command` with both outputs into `log` and returns how it ended with its last lines. Calls `still_running` with the
/// newest line from time to time.
fn run_into(
    log: &Path,
    command: &mut Command,
    mut still_running: impl FnMut(&str),
) -> Result<(ExitStatus, VecDeque<String>)> {
    let mut log_file = create_log(log)?;
    writeln!(log_file, "$ {}", command_line(command))?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", command.get_program().display()))?;
    let (sender, lines) = mpsc::channel();
    let outputs: [Option<Box<dyn Read + Send>>; 2] = [
        child.stdout.take().map(|output| Box::new(output) as _),
        child.stderr.take().map(|output| Box::new(output) as _),
    ];
    for output in outputs.into_iter().flatten() {
        let sender = sender.clone();
        thread::spawn(move || for_each_line(output, |line| sender.send(line.to_owned()).is_ok()));
    }
    drop(sender);

    let mut tail = VecDeque::new();
    let mut told = Instant::now();
    loop {
        match lines.recv_timeout(STILL_RUNNING.saturating_sub(told.elapsed())) {
            Ok(line) => {
                writeln!(log_file, "{line}")?;
                tail.push_back(line);
                if tail.len() > TAIL {
                    tail.pop_front();
                }
            }
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {}
        }
        if told.elapsed() >= STILL_RUNNING {
            still_running(tail.back().map_or("", |line| line.trim()));
            told = Instant::now();
        }
    }
    Ok((child.wait()?, tail))
}

/// Runs a command whose output a person wants to see: standard output goes on to ours line by line, into `log` and to
/// `line`; standard error is shared.
///
/// # Errors
/// If the command does not start. How it ended is the result.
pub fn watched(
    log: &Path,
    command: &mut Command,
    mut line: impl FnMut(&str),
) -> Result<ExitStatus> {
    let mut log_file = create_log(log)?;
    writeln!(log_file, "$ {}", command_line(command))?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", command.get_program().display()))?;
    let output = child
        .stdout
        .take()
        .context("the child's standard output was just piped")?;
    let mut written = Ok(());
    for_each_line(output, |text| {
        println!("{text}");
        written = writeln!(log_file, "{text}");
        line(text);
        written.is_ok()
    });
    written.with_context(|| format!("cannot write {}", log.display()))?;
    Ok(child.wait()?)
}

/// Calls `each` with every line of `output`, until that ends or `each` says no. Bytes that are not UTF-8 are replaced.
fn for_each_line(output: impl Read, mut each: impl FnMut(&str) -> bool) {
    let mut reader = BufReader::new(output);
    let mut line = Vec::new();
    while reader
        .read_until(b'\n', &mut line)
        .is_ok_and(|length| length > 0)
    {
        let text = String::from_utf8_lossy(&line);
        if !each(text.trim_end_matches(['\n', '\r'])) {
            return;
        }
        line.clear();
    }
}

/// Creates a log file and its folder.
fn create_log(log: &Path) -> Result<File> {
    if let Some(folder) = log.parent() {
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot create the folder {}", folder.display()))?;
    }
    File::create(log).with_context(|| format!("cannot create {}", log.display()))
}

/// Program and arguments, as one would type them (without quoting).
pub fn command_line(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy().into_owned()];
    words.extend(
        command
            .get_args()
            .map(|argument| argument.to_string_lossy().into_owned()),
    );
    words.join(" ")
}

/// Runs a command that shares our outputs.
///
/// # Errors
/// If it does not start or fails.
pub fn shown(command: &mut Command) -> Result<()> {
    let status = command
        .stdin(Stdio::null())
        .status()
        .with_context(|| format!("cannot start {}", command.get_program().display()))?;
    if !status.success() {
        bail!("{} failed ({status})", command_line(command));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elapsed_is_readable() {
        assert_eq!(Elapsed(Duration::from_millis(449)).to_string(), "0.4 s");
        assert_eq!(Elapsed(Duration::from_secs(125)).to_string(), "2 min 5 s");
        assert_eq!(
            format!("{:>8}|", Elapsed(Duration::from_secs(1))),
            "   1.0 s|"
        );
    }

    #[test]
    fn variables_of_cargo_run_are_known() {
        assert!(is_of_cargo_run("CARGO_PKG_NAME") && is_of_cargo_run("CARGO_MANIFEST_DIR"));
        assert!(
            !is_of_cargo_run("CARGO_HOME")
                && !is_of_cargo_run("CARGO_TARGET_DIR")
                && !is_of_cargo_run("RUSTUP_TOOLCHAIN")
        );
    }

    #[test]
    fn library_path_loses_only_the_compilers_folders() {
        let path = "/w/target/debug/deps:/opt/lib:/root/.rustup/toolchains/stable/lib:/r/lib/rustlib/x/lib:";
        assert_eq!(without_toolchains(OsStr::new(path)), "/opt/lib");
        assert_eq!(without_toolchains(OsStr::new("")), "");
    }

    #[test]
    fn lines_are_cut_at_any_bytes() {
        let mut lines = Vec::new();
        for_each_line(&b"one\r\n\xff two\n\nlast"[..], |line| {
            lines.push(line.to_owned());
            true
        });
        assert_eq!(lines, ["one", "\u{fffd} two", "", "last"]);
    }

    #[test]
    fn output_goes_to_the_log_and_the_tail_is_kept() {
        let log = env::temp_dir().join(format!("xtask-step-{}.log", std::process::id()));
        let mut command = Command::new("sh");
        command.args([
            "-c",
            "for i in $(seq 1 100); do echo line $i; done; echo broken >&2; exit 3",
        ]);
        let (status, tail) = run_into(&log, &mut command, |_| {}).unwrap();
        let written = fs::read_to_string(&log).unwrap();
        fs::remove_file(&log).unwrap();
        assert_eq!(status.code(), Some(3));
        assert_eq!(tail.len(), TAIL);
        assert_eq!(written.lines().count(), 102, "{written}");
        assert!(
            written.starts_with("$ sh -c ")
                && written.contains("line 1\n")
                && written.contains("broken\n")
        );
    }
}
