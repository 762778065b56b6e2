//! `cargo xtask vm`: real kernels of Debian in virtual machines, with the real agent in them.

mod archive;
mod guest;
mod jobs;
mod kernels;
mod own;
mod page;
mod qemu;
mod suites;

use std::{
    collections::VecDeque,
    fs,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use self::{
    guest::Built,
    jobs::Job,
    kernels::{Image, Kernel},
    qemu::{Ports, Qemu},
};
use crate::{
    build,
    outcome::Tests,
    paths::Paths,
    setup::{self, Needs},
    step::{Elapsed, say},
};

/// How many machines run beside each other.
const AT_A_TIME: usize = 2;
/// Seconds for booting and switching off, beside the jobs.
const BOOT: u64 = 60;
/// The folder of the files that a guest's jobs left, beside what it printed.
const LEFT: &str = "left";
/// Lines of a failed job that are shown.
const TAIL: usize = 60;

/// Options of `cargo xtask vm`.
#[derive(clap::Args)]
pub struct Args {
    /// Only these kernels (may be given several times, or separated by commas)
    #[arg(long, value_delimiter = ',')]
    kernel: Vec<String>,
    /// Every kernel and every test, not only those of `cargo xtask test`
    #[arg(long)]
    all: bool,
    /// Only these tests
    #[arg(long, value_delimiter = ',')]
    job: Vec<String>,
    /// Say which kernels and tests there are
    #[arg(long)]
    list: bool,
    /// Run this agent instead of building one
    #[arg(long)]
    agent: Option<PathBuf>,
    /// Wait so many times longer, on a machine with other work
    #[arg(long, default_value_t = 1)]
    patience: u32,
}

/// How a kernel's run ended.
pub struct Run {
    kernel: &'static Kernel,
    release: String,
    /// Tests of all jobs.
    pub tests: Tests,
    /// What failed, with what was printed.
    failures: Vec<String>,
    lines: Vec<String>,
    elapsed: Duration,
}

/// What a machine runs.
struct Load<'a> {
    /// The archive with programs and tests, which all of a run have in common.
    shared: &'a [u8],
    jobs: &'a [&'static Job],
    /// How many times longer they may take.
    patience: u32,
}

/// Where kernels, QEMU and the runs are kept.
fn folder(paths: &Paths) -> PathBuf {
    paths.root.join("target/vm")
}

/// Runs `cargo xtask vm` and returns whether all is well.
///
/// # Errors
/// If something is missing.
pub fn command(paths: &Paths, args: &Args) -> Result<bool> {
    if args.list {
        list();
        return Ok(true);
    }
    let (own, kernels): (Vec<String>, Vec<String>) = {
        let asked = args.kernel.iter().cloned();
        asked.partition(|name| name == own::NAME)
    };
    // Nothing but this machine's own was asked for.
    let plan = if kernels.is_empty() && !own.is_empty() {
        Vec::new()
    } else {
        plan(&kernels, &args.job, args.all)?
    };
    setup::ensure(paths, Needs::BUILD | Needs::VM)?;
    build::build(paths, &build::Args::ebpf_only(args.agent.is_some()))?;
    let agent = args.agent.clone().unwrap_or_else(|| paths.agent(false));
    if args.all || !own.is_empty() {
        own::run(paths, &agent)?;
    }
    let runs = run(paths, &plan, &agent, args.patience)?;
    Ok(conclude(&runs))
}

/// The step of `cargo xtask test`: a few tests on a few kernels. Returns how many tests passed and failed, and whether
/// all is well.
///
/// # Errors
/// If something is missing, other than kernels.
pub fn step(paths: &Paths) -> Result<(Tests, bool)> {
    let runs = run(paths, &plan(&[], &[], false)?, &paths.agent(false), 1)?;
    let mut tests = Tests::default();
    for run in &runs {
        tests += run.tests;
    }
    Ok((tests, conclude(&runs)))
}

fn list() {
    println!("kernels (and what runs on them with every `cargo xtask test`):");
    for kernel in kernels::ALL {
        let always = jobs::ALL.iter().filter(|job| job.is_always_for(kernel));
        let always: Vec<_> = always.map(|job| job.name).collect();
        println!("  {:<12} {}", kernel.name, always.join(", "));
    }
    println!("  {:<12} (this machine's)", own::NAME);
    println!("tests:");
    for job in jobs::ALL {
        println!("  {}", job.name);
    }
}

/// A kernel and what runs on it.
type Planned = (&'static Kernel, Vec<&'static Job>);

/// What runs: on the kernels that were asked for the tests that were asked for. If none was asked for, what runs with every
/// `cargo xtask test`; on a kernel that is asked for by name also what runs so on others.
///
/// # Errors
/// If there is no kernel or test of a name.
fn plan(kernels: &[String], jobs: &[String], all: bool) -> Result<Vec<Planned>> {
    known(kernels, kernels::ALL.iter().map(|kernel| kernel.name))?;
    known(jobs, jobs::ALL.iter().map(|job| job.name))?;
    let is_asked = |asked: &[String], name: &str| asked.iter().any(|a| a == name);
    let of = |kernel: &'static Kernel| {
        let is_named = is_asked(kernels, kernel.name);
        let wanted = jobs::ALL.iter().filter(|job| {
            let is_wanted = if jobs.is_empty() {
                all || job.is_always_for(kernel) || is_named && job.is_usual()
            } else {
                is_asked(jobs, job.name)
            };
            is_wanted && job.is_for(kernel)
        });
        (kernel, wanted.collect::<Vec<_>>())
    };
    let booted = kernels::ALL.iter().filter(|kernel| {
        let by_default = all || jobs::ALL.iter().any(|job| job.is_always_for(kernel));
        is_asked(kernels, kernel.name) || kernels.is_empty() && by_default
    });
    Ok(booted
        .map(of)
        .filter(|(_, jobs)| !jobs.is_empty())
        .collect())
}

/// Whether there is something of each name.
fn known<'a>(asked: &[String], names: impl Iterator<Item = &'a str>) -> Result<()> {
    let names: Vec<&str> = names.collect();
    match asked.iter().find(|asked| !names.contains(&asked.as_str())) {
        Some(unknown) => {
            bail!("no `{unknown}`\n  remedy: `cargo xtask vm --list` names all")
        }
        None => Ok(()),
    }
}

/// Boots the kernels that are served, and runs the jobs in each.
///
/// # Errors
/// If there is no QEMU, or the tests do not build.
fn run(paths: &Paths, plan: &[Planned], agent: &Path, patience: u32) -> Result<Vec<Run>> {
    if plan.is_empty() {
        return Ok(Vec::new());
    }
    fs::create_dir_all(folder(paths)).context("making target/vm")?;
    let jobs = plan.iter().flat_map(|(_, jobs)| jobs);
    let mut tests: Vec<&str> = jobs.map(|job| job.test).collect();
    tests.sort_unstable();
    tests.dedup();
    let built = Built::new(paths, &tests)?;
    let shared = guest::shared(paths, &built, agent, &tests)?;
    let mut images = VecDeque::new();
    for (kernel, jobs) in plan {
        match kernel.image(paths) {
            Ok(image) => images.push_back((*kernel, jobs, image)),
            Err(error) => println!("vm: {}: SKIPPED: not served: {error:#}", kernel.name),
        }
    }
    if images.is_empty() {
        println!("vm: SKIPPED: no kernel is served");
        return Ok(Vec::new());
    }
    let qemu = Qemu::find(paths)?;
    let images = Mutex::new(images);
    let runs = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                loop {
                    let next = images
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .pop_front();
                    let Some((kernel, jobs, image)) = next else {
                        break;
                    };
                    let run = boot(
                        paths,
                        &qemu,
                        kernel,
                        &image,
                        &Load {
                            shared: &shared,
                            jobs,
                            patience,
                        },
                    );
                    runs.lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .push(run);
                }
            });
        }
    });
    Ok(runs.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// One machine.
fn boot(
    paths: &Paths,
    qemu: &Qemu,
    kernel: &'static Kernel,
    image: &Image,
    load: &Load<'_>,
) -> Run {
    let start = Instant::now();
    let mut run = Run {
        kernel,
        release: image.release.clone(),
        tests: Tests::default(),
        failures: Vec::new(),
        lines: Vec::new(),
        elapsed: Duration::ZERO,
    };
    say!("vm: {} ({}): starts", kernel.name, image.release);
    let at = folder(paths).join("runs").join(kernel.name);
    let ended = boot_in(&at, qemu, kernel, image, load, &mut run);
    let recorded = found(&Ports::new(&at).files, &at.join(LEFT)).and_then(|found| match found {
        Some(found) => page::record(paths, kernel.name, &found),
        None => Ok(()),
    });
    for result in [ended, recorded] {
        run.failures
            .extend(result.err().map(|error| format!("{error:#}")));
    }
    run.elapsed = start.elapsed();
    let ended = if run.failures.is_empty() {
        "passed"
    } else {
        "FAILED"
    };
    say!(
        "vm: {} ({}): {ended} in {}",
        kernel.name,
        image.release,
        Elapsed(run.elapsed)
    );
    run
}

fn boot_in(
    at: &Path,
    qemu: &Qemu,
    kernel: &Kernel,
    image: &Image,
    load: &Load<'_>,
    run: &mut Run,
) -> Result<()> {
    let Load {
        shared,
        jobs,
        patience,
    } = *load;
    fs::create_dir_all(at).with_context(|| at.display().to_string())?;
    let archive = at.join("initrd");
    let own = guest::own(&image.modules(guest::MODULES)?, jobs, kernel.name, patience)?;
    fs::write(&archive, [shared, &own].concat()).with_context(|| archive.display().to_string())?;
    let ports = Ports::new(at);
    let limit = BOOT + jobs.iter().map(|job| job.limit()).sum::<u64>();
    let limit = Duration::from_secs(limit) * patience;
    let machine = (image.vmlinux.as_path(), kernel.parameters);
    let ended = qemu.run(machine, &archive, &ports, limit);
    fs::remove_file(&archive).with_context(|| archive.display().to_string())?;
    let status = read(&ports.status);
    let output = read(&ports.output);
    for line in status.lines() {
        run.lines.push(line.to_owned());
    }
    for job in jobs {
        let said = section(&output, job.name);
        let tests = said.lines().find_map(Tests::parse).unwrap_or_default();
        run.tests += tests;
        let code = status.lines().find_map(|line| {
            let rest = line.strip_prefix("job ")?.strip_prefix(job.name)?;
            rest.strip_prefix(' ')?.split(' ').next()
        });
        let why = match code {
            Some("0") if tests.passed == job.count() => continue,
            Some("0") => format!("{} of {} tests ran", tests.passed, job.count()),
            Some("124") => "it took too long".to_owned(),
            Some(code) => format!("exit code {code}"),
            None => "it did not end".to_owned(),
        };
        run.failures
            .push(format!("{}: {why}\n{}", job.name, tail(said)));
    }
    if ended.is_err() || !status.lines().any(|line| line.starts_with("end ")) {
        let fault = status.lines().find_map(|line| line.strip_prefix("fault "));
        let why = fault.unwrap_or("the guest did not report its end");
        let said = tail(&read(&ports.console));
        run.failures.push(format!("{why}; the console:\n{said}"));
    }
    ended
}

/// Puts the files that the jobs left into `folder`, and returns what the test of the hooks said, if it ran.
fn found(files: &Path, folder: &Path) -> Result<Option<serde_json::Value>> {
    let bytes = fs::read(files).with_context(|| files.display().to_string())?;
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let mut hooks = None;
    let mut rest = &bytes[..];
    while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
        let line = String::from_utf8_lossy(&rest[..end]).into_owned();
        let (name, length) = line.split_once(' ').context("a name and a length")?;
        let length: usize = length.trim().parse().with_context(|| line.clone())?;
        let content = rest[end + 1..].get(..length);
        let content = content.with_context(|| format!("{name} did not come whole"))?;
        fs::write(folder.join(name), content).with_context(|| line.clone())?;
        if name == page::FILE {
            hooks = Some(serde_json::from_slice(content)?);
        }
        rest = &rest[end + 1 + length..];
    }
    Ok(hooks)
}

fn read(path: &Path) -> String {
    let bytes = fs::read(path).unwrap_or_default();
    String::from_utf8_lossy(&bytes).replace('\r', "")
}

/// What a job printed.
fn section<'a>(output: &'a str, job: &str) -> &'a str {
    let head = format!("\n== {job}\n");
    let Some((_, rest)) = output.split_once(&head) else {
        return "";
    };
    rest.split_once("\n== ").map_or(rest, |(own, _)| own)
}

fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL)..].join("\n")
}

/// Prints what failed and a table, and returns whether nothing failed.
fn conclude(runs: &[Run]) -> bool {
    for run in runs {
        for failure in &run.failures {
            println!("\nvm: {} ({}): {failure}", run.kernel.name, run.release);
        }
    }
    println!();
    for run in runs {
        println!(
            "{:<12} {:<28} {:>12}  {} passed, {} failed  {}",
            run.kernel.name,
            run.release,
            Elapsed(run.elapsed),
            run.tests.passed,
            run.tests.failed,
            run.lines.join("; ")
        );
    }
    runs.iter().all(|run| run.failures.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_job_has_its_part_of_the_output() {
        let output = "\n== one\na\nb\n\n== two\nc\n";
        assert_eq!(section(output, "one"), "a\nb\n");
        assert_eq!(section(output, "two"), "c\n");
        assert_eq!(section(output, "three"), "");
    }

    #[test]
    fn files_of_the_jobs_come_out_as_they_were() {
        let at = std::env::temp_dir().join(format!("xtask-left-{}", std::process::id()));
        fs::create_dir(&at).unwrap();
        let (files, folder) = (at.join("files"), at.join("left"));
        let sent = format!("one 3\na\nb{} 2\n{{}}", page::FILE);
        fs::write(&files, sent).unwrap();
        let hooks = found(&files, &folder).unwrap();
        assert_eq!(hooks, Some(serde_json::json!({})));
        assert_eq!(fs::read(folder.join("one")).unwrap(), b"a\nb");
        // Those of a former run do not stay.
        fs::write(&files, "two 9\ncut").unwrap();
        assert!(found(&files, &folder).is_err());
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
        fs::remove_dir_all(&at).unwrap();
    }

    #[test]
    fn what_was_asked_for_is_planned() {
        let names = |kernels: &[&str], jobs: &[&str], all| {
            let owned = |names: &[&str]| names.iter().map(|&n| n.to_owned()).collect::<Vec<_>>();
            let planned = plan(&owned(kernels), &owned(jobs), all).unwrap();
            let jobs = |jobs: &[&Job]| jobs.iter().map(|j| j.name).collect::<Vec<_>>();
            let names = planned.iter().map(|(k, j)| (k.name, jobs(j)));
            names.collect::<Vec<_>>()
        };
        let usual = names(&[], &[], false);
        let kernels: Vec<_> = usual.iter().map(|(kernel, _)| *kernel).collect();
        assert_eq!(kernels, ["6.1", "6.12", "newest"]);
        assert_eq!(usual[0].1, ["kernel", "content", "incident"]);
        assert_eq!(usual[1].1, ["kernel", "incident-ipv6"]);
        assert_eq!(usual[2].1, ["kernel"]);
        let one = names(&["6.18"], &[], false);
        let each = vec!["kernel", "content", "incident", "incident-ipv6"];
        assert_eq!(one, [("6.18", each)]);
        let both = names(&["6.1", "newest"], &["guard"], false);
        assert_eq!(both, [("6.1", vec!["guard"]), ("newest", vec!["guard"])]);
        let all = names(&[], &[], true);
        assert_eq!(all.len(), kernels::ALL.len());
        let locked = all.iter().find(|(kernel, _)| *kernel == "6.12-locked");
        assert_eq!(locked.unwrap().1, ["lockdown"]);
    }

    #[test]
    fn names_are_unique_and_mistakes_are_told() {
        for (i, job) in jobs::ALL.iter().enumerate() {
            assert!(jobs::ALL[..i].iter().all(|other| other.name != job.name));
        }
        assert!(plan(&["9".to_owned()], &[], false).is_err());
        assert!(plan(&[], &["nothing".to_owned()], false).is_err());
    }
}
