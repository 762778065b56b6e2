//! `tuplewatch replay`: captures through the same rules, reports and alerts as the live source.

mod export;
mod group;
mod progress;
mod report;
mod stream;
mod value;

use std::{collections::BTreeMap, io, net::IpAddr, path::PathBuf};

use anyhow::{Context as _, anyhow};
use clap::{Args, ValueEnum};
use tracing::warn;
use tuplewatch_common::address::Role;

use self::{
    group::{Group, Job},
    progress::Progress,
    report::{Json, Report, Text},
    value::{Time, parse_end, parse_local, parse_setting, parse_time},
};
use super::{Failure, flags};
use crate::{
    config,
    core::{egress::Egress, rules::Rules, time::Moment},
    log,
    sink::{WallClock, terminal::Screen},
    source::capture::{
        fault::Fault,
        file::{CaptureFile, EndFilter, HEAD, Selection},
    },
};

/// What a script wants to know.
const EXIT_CODES: &str = "\
Exit codes:
   0  nothing was found
   3  at least one signature was found
  65  a capture is damaged; what could be read was judged
  66  a capture cannot be opened; the others were judged
  78  the configuration file is wrong
   2  an option is wrong
   1  anything else";

/// Options of `replay`.
#[derive(Args, Debug)]
#[command(after_help = EXIT_CODES)]
pub struct ReplayArgs {
    /// Captures: pcap or pcapng, also packed with gzip or zstd; `-` is standard input. Files of one
    /// host are judged together, those of another place apart.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// What is printed on standard output.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
    /// Where the captures were taken (default: recognised for each).
    #[arg(long, value_enum)]
    vantage: Option<Place>,
    /// An address of the host that captured (repeat for several), instead of recognising it.
    #[arg(long, value_name = "ADDRESS", value_parser = parse_local)]
    local: Vec<IpAddr>,
    /// Leave out packets before this time: 2026-11-30T01:02:03Z, or a time after the first packet such as
    /// 90s.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    since: Option<Time>,
    /// Leave out packets after this time.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    until: Option<Time>,
    /// Only connections with this end: `10.0.0.1`, `10.0.0.1:443`, `[2001:db8::1]:443` or `:443` (repeat for
    /// several).
    #[arg(long, value_name = "HOST[:PORT]", value_parser = parse_end)]
    filter: Vec<EndFilter>,
    /// Take thresholds, mutes, device profiles and egress groups from this configuration file, as `run`
    /// does. No other one is read.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Which endpoints serve a service no more, as docs/placements.md describes.
    #[arg(long, value_name = "FILE")]
    placements: Option<PathBuf>,
    /// Set a threshold, such as l4_reuse.min_refused=3 (repeat for several; a wrong name lists all).
    #[arg(long = "set", value_name = "NAME=VALUE", value_parser = parse_setting)]
    settings: Vec<String>,
    /// How many port spaces the summary lists.
    #[arg(long, value_name = "N", default_value_t = 20)]
    top: usize,
    /// Write the packets that are the evidence into this pcapng file, each with a comment that says what
    /// it shows.
    #[arg(long, value_name = "FILE")]
    export: Option<PathBuf>,
}

/// A format of standard output.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Format {
    /// For people.
    Text,
    /// JSON lines, as docs/json.md and docs/replay.md describe them.
    Json,
}

/// Where a capture was taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Place {
    /// At the host that opens the connections, or before a NAT.
    Initiator,
    /// At the host that accepts them, or behind a NAT.
    Responder,
    /// In between: what is seen there counts as the responder sees it.
    Middle,
}

/// Exit code when a signature was found.
const FOUND: u8 = 3;
/// Exit codes of `sysexits.h`: `EX_DATAERR`, `EX_NOINPUT`.
const DAMAGED: u8 = 65;
const NO_INPUT: u8 = 66;

/// Memory for the heads of all files together.
const HEADS: u64 = 64 << 20;

/// Replays; gives the exit code.
///
/// # Errors
/// A capture that cannot be opened or is damaged, or an output that cannot be written to.
pub fn run(args: &ReplayArgs) -> Result<u8, Failure> {
    let screen = Screen::stdout();
    log::init(None, None);
    let (rules, egress) = args.rules()?;
    let mut selection = args.selection();
    let (files, mut faults) = args.open(&selection)?;
    let first = files.iter().filter_map(|file| file.starts_ns).min();
    let start = first.unwrap_or(0);
    selection.since_ns = args.since.map(|time| time.after(start));
    selection.until_ns = args.until.map(|time| time.after(start));
    let progress = Progress::new(&files);
    let mut report: Box<dyn Report> = match args.format {
        Format::Text => Box::new(Text::new(screen, args.top)),
        Format::Json => Box::new(Json::new(io::stdout())),
    };
    let names = args.names();
    let job = Job {
        selection,
        rules,
        egress,
        names,
        top: args.top,
    };
    let (mut found, mut exhibits) = (false, Vec::new());
    let mut end = Moment::default();
    for mut group in Group::by_vantage(files) {
        let outcome = group.replay(&job, &progress, &mut *report)?;
        found |= outcome.has_signature();
        exhibits.extend(outcome.exhibits());
        end = end.max(outcome.end);
        faults.extend(outcome.faults);
    }
    progress.finish();
    if let Some(path) = &args.export {
        export::write(path, &args.files, &exhibits, end)
            .with_context(|| format!("--export {}", path.display()))?;
    }
    if !faults.is_empty() {
        return Err(failure(&job.names, faults));
    }
    Ok(if found { FOUND } else { 0 })
}

/// What is wrong with which files, by their numbers.
type Faults = Vec<(u32, Fault)>;

/// What is to be said of captures that cannot be read to their end.
fn failure(names: &[String], mut faults: Faults) -> Failure {
    faults.sort_by_key(|(file, _)| *file);
    // One that was opened once for each of its places fails at each of them.
    faults.dedup_by_key(|(file, _)| *file);
    let is_unopened = faults.iter().any(|(_, fault)| fault.is_unopened());
    let lines = faults
        .iter()
        .map(|(file, fault)| format!("{}: {fault}", names[*file as usize]));
    let lines: Vec<String> = lines.collect();
    Failure {
        code: if is_unopened { NO_INPUT } else { DAMAGED },
        error: anyhow!(lines.join("\n  ")),
    }
}

impl ReplayArgs {
    /// What the rules are told: the file, then the flags.
    fn rules(&self) -> Result<(Rules, Egress), Failure> {
        let wrong = |error| Failure { code: 78, error };
        let mut rules = Rules::default();
        let mut egress = Egress::default();
        let mut placements = self.placements.clone();
        if let Some(path) = &self.config {
            let loaded = config::load(Some(path), &BTreeMap::new(), Vec::new())
                .map_err(|problems| wrong(problems.into()))?;
            for warning in &loaded.warnings {
                warn!("{warning}");
            }
            rules = loaded.config.rules(&WallClock::capture());
            placements = placements.or_else(|| loaded.config.placements.clone());
            egress = loaded
                .config
                .egress()
                .map_err(|error| wrong(anyhow::Error::msg(error)))?;
        }
        if let Some(file) = flags::placements(placements.as_deref())? {
            rules.placements = file.placements(&WallClock::capture());
        }
        for setting in &self.settings {
            rules.thresholds.set(setting).map_err(anyhow::Error::msg)?;
        }
        Ok((rules, egress))
    }

    fn selection(&self) -> Selection {
        Selection {
            ends: self.filter.clone(),
            role: self.vantage.map(|place| match place {
                Place::Initiator => Role::Initiator,
                Place::Responder | Place::Middle => Role::Responder,
            }),
            local: self.local.clone(),
            ..Selection::default()
        }
    }

    fn names(&self) -> Vec<String> {
        let name = |path: &PathBuf| match path.to_str() {
            Some("-") => "standard input".to_owned(),
            _ => path.display().to_string(),
        };
        self.files.iter().map(name).collect()
    }

    /// Opens what can be opened; with what is wrong with the others.
    fn open(&self, selection: &Selection) -> Result<(Vec<CaptureFile>, Faults), Failure> {
        let stdin = self.files.iter().filter(|f| f.as_os_str() == "-").count();
        if stdin > 1 || (stdin == 1 && self.export.is_some()) {
            let why = if stdin > 1 {
                "standard input can be given once only"
            } else {
                "--export reads the capture twice, which standard input does not allow: save it to a file first"
            };
            return Err(anyhow!(why).into());
        }
        let head = (HEADS / self.files.len() as u64).clamp(64 << 10, HEAD);
        let (mut files, mut faults) = (Vec::new(), Vec::new());
        for (index, path) in (0..).zip(&self.files) {
            match CaptureFile::open(path, index, head, selection) {
                Ok(of_file) => files.extend(of_file),
                Err(fault) => faults.push((index, fault)),
            }
        }
        if files.is_empty() {
            return Err(failure(&self.names(), faults));
        }
        Ok((files, faults))
    }
}
