//! `tuplewatch replay` of large captures, against tcpdump and tshark on the same files.

use std::{
    fs::File,
    io::Read as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::{
    Options,
    capture::{self, Content, Recipe},
    line, median,
};
use crate::agent::AgentConfig;

/// Many connections at once, most packets carry data: what a busy server's capture looks like.
const BUSY: Recipe = Recipe {
    packets: 5_000_000,
    concurrent: 100_000,
    requests: 8,
    ramp_ms: 2_000,
    pause_ms: 1_000,
};
/// A million connections, all of them open before the first one ends.
const MILLION: Recipe = Recipe {
    packets: 9_000_000,
    concurrent: 1_000_000,
    requests: 1,
    ramp_ms: 15_000,
    pause_ms: 30_000,
};

pub(super) fn run(options: &Options) -> Result<()> {
    println!(
        "replay of captures in the page cache: packets by CPU time of both threads, peers by the clock"
    );
    let folder = Folder::new()?;
    let tuplewatch = AgentConfig::default().binary()?;
    let busy = folder.capture("busy", &BUSY)?;
    let (mut ours, mut tcpdump) = (Vec::new(), Vec::new());
    for _ in 0..options.rounds {
        ours.push(busy.replay(&tuplewatch)?);
        tcpdump.extend(busy.peer("tcpdump", &["-nr"], &["-w", "/dev/null"])?);
    }
    let rate = busy.content.packets as f64 / cpu_s(&ours) / 1e6;
    println!(
        "  ({} packets, {} four-tuples)",
        busy.content.packets, busy.content.four_tuples
    );
    line(
        "packets per second",
        &format!("{rate:.2} M/s"),
        ">= 3 M/s",
        rate >= 3.0,
    );
    busy.against("tcpdump -w /dev/null", &tcpdump, &ours, 1.0);
    let rss_mb = rss_mb(&ours);
    drop(busy);
    shorter(options, &folder, &tuplewatch, rss_mb)?;
    million(options, &folder, &tuplewatch)
}

/// The same at a quarter of the length: what memory depends on it, and tshark, which takes a hundred
/// times as long.
fn shorter(options: &Options, folder: &Folder, tuplewatch: &Path, long_mb: f64) -> Result<()> {
    let recipe = Recipe {
        packets: BUSY.packets / 4,
        ..BUSY
    };
    let short = folder.capture("short", &recipe)?;
    let (mut ours, mut tshark) = (Vec::new(), Vec::new());
    for _ in 0..options.rounds.min(MOST_ROUNDS) {
        ours.push(short.replay(tuplewatch)?);
        tshark.extend(short.peer("tshark", &["-nr"], &["-q", "-z", "conv,tcp"])?);
    }
    short.against("tshark -q -z conv,tcp", &tshark, &ours, 20.0);
    let growth = long_mb - rss_mb(&ours);
    line(
        "memory, four times the length above this",
        &format!("{growth:+.1} MB"),
        "<= +8 MB",
        growth <= 8.0,
    );
    Ok(())
}

/// A capture of a million connections.
fn million(options: &Options, folder: &Folder, tuplewatch: &Path) -> Result<()> {
    let million = folder.capture("million", &MILLION)?;
    let ours = (0..options.rounds.min(MOST_ROUNDS))
        .map(|_| million.replay(tuplewatch))
        .collect::<Result<Vec<_>>>()?;
    println!(
        "  ({} packets, {} four-tuples: {:.2} M/s)",
        million.content.packets,
        million.content.four_tuples,
        million.content.packets as f64 / cpu_s(&ours) / 1e6
    );
    let mb = rss_mb(&ours);
    line(
        "memory at a million four-tuples",
        &format!("{mb:.1} MB"),
        "<= 200 MB",
        mb <= 200.0,
    );
    Ok(())
}

/// Of what takes long, or hardly differs between two runs.
const MOST_ROUNDS: usize = 3;

fn cpu_s(costs: &[Cost]) -> f64 {
    median(&costs.iter().map(|cost| cost.cpu_s).collect::<Vec<_>>())
}

fn wall_s(costs: &[Cost]) -> f64 {
    median(&costs.iter().map(|cost| cost.wall_s).collect::<Vec<_>>())
}

fn rss_mb(costs: &[Cost]) -> f64 {
    median(&costs.iter().map(|cost| cost.rss_mb).collect::<Vec<_>>())
}

/// A folder for the captures that goes away with everything in it.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Self> {
        let name = format!("tuplewatch-bench-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).with_context(|| path.display().to_string())?;
        Ok(Self(path))
    }

    fn capture(&self, name: &str, recipe: &Recipe) -> Result<Capture> {
        let path = self.0.join(name).with_extension("pcap");
        let content = capture::write(&path, recipe)
            .with_context(|| format!("{}: needs {} bytes", path.display(), recipe.bytes()))?;
        let capture = Capture { path, content };
        capture.read_once()?;
        Ok(capture)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A capture on disk; its file goes away with it.
struct Capture {
    path: PathBuf,
    content: Content,
}

impl Drop for Capture {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Capture {
    /// Reads the file once.
    fn read_once(&self) -> Result<()> {
        let (mut file, mut piece) = (File::open(&self.path)?, vec![0; 1 << 20]);
        while file.read(&mut piece)? > 0 {}
        Ok(())
    }

    /// Replays it, and holds what was counted against what is in it.
    fn replay(&self, tuplewatch: &Path) -> Result<Cost> {
        let mut command = Command::new(tuplewatch);
        command.args(["replay", "--format", "json", "--top", "4096"]);
        let (cost, output) = measure(command.arg(&self.path))?;
        let lines: Vec<Value> = output
            .lines()
            .map(serde_json::from_str)
            .collect::<Result<_, _>>()?;
        let last = |kind| lines.iter().rfind(|line| line["type"] == kind);
        let replay = last("replay").context("no line of type replay")?;
        let summary = last("summary").context("no line of type summary")?;
        let spaces = summary["spaces"].as_array().context("spaces")?;
        let established = spaces
            .iter()
            .filter_map(|space| space["totals"]["established"].as_u64())
            .sum();
        let found = Content {
            packets: replay["packets"].as_u64().context("packets")?,
            established,
            ..self.content
        };
        ensure!(
            found == self.content,
            "{found:?} instead of {:?}",
            self.content
        );
        Ok(cost)
    }

    /// How many times as long a peer takes.
    fn against(&self, peer: &str, theirs: &[Cost], ours: &[Cost], target: f64) {
        if theirs.is_empty() {
            println!("  (not measured: {peer} is not installed)");
            return;
        }
        let ratio = wall_s(theirs) / wall_s(ours);
        let cpu = cpu_s(theirs) / cpu_s(ours);
        let rate = self.content.packets as f64 / wall_s(theirs) / 1e6;
        line(
            &format!("times as fast as {peer}"),
            &format!("{ratio:.2} ({rate:.2} M/s; {cpu:.2} by CPU time)"),
            &format!("> {target}"),
            ratio > target,
        );
    }

    /// Runs another program on it; `None` if it is not installed.
    fn peer(&self, program: &str, before: &[&str], after: &[&str]) -> Result<Option<Cost>> {
        let path = ["/usr/bin", "/usr/sbin", "/usr/local/bin"]
            .map(|folder| Path::new(folder).join(program))
            .into_iter()
            .find(|path| path.exists());
        let Some(path) = path else {
            return Ok(None);
        };
        let mut command = Command::new(path);
        command.args(before).arg(&self.path).args(after);
        Ok(Some(measure(&mut command)?.0))
    }
}

/// What a run of a program took.
struct Cost {
    /// User and system time.
    cpu_s: f64,
    /// From the start to the end.
    wall_s: f64,
    /// Largest resident set in 10⁶ bytes.
    rss_mb: f64,
}

/// Runs a program to its end.
fn measure(command: &mut Command) -> Result<(Cost, String)> {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let started = Instant::now();
    let mut child = command.spawn().with_context(|| format!("{command:?}"))?;
    let mut output = String::new();
    if let Some(mut stdout) = child.stdout.take() {
        stdout.read_to_string(&mut output)?;
    }
    let pid = i32::try_from(child.id())?;
    let mut status = 0;
    // SAFETY: all bytes zero are a valid rusage, which is plain numbers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to live variables of the right types; the child was not waited for.
    let waited = unsafe { libc::wait4(pid, &raw mut status, 0, &raw mut usage) };
    let wall_s = started.elapsed().as_secs_f64();
    ensure!(waited == pid, "wait4: {}", std::io::Error::last_os_error());
    ensure!(
        status == 0,
        "{command:?} ended with wait status {status:#x}"
    );
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    let cost = Cost {
        cpu_s: seconds(usage.ru_utime) + seconds(usage.ru_stime),
        wall_s,
        rss_mb: usage.ru_maxrss as f64 * 1024.0 / 1e6,
    };
    Ok((cost, output))
}
