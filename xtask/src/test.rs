//! `cargo xtask test`: every check and test, one after the other, and a table of how each ended.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use anyhow::Result;

use crate::{
    again::Failed,
    as_root, build, is_root,
    outcome::Tests,
    paths::Paths,
    setup::{self, Needs},
    step::{self, Elapsed, say},
    vm,
};

/// The eBPF package.
const EBPF: &str = "tuplewatch-ebpf";
/// The crates of the eBPF package, whose unstable features a stable compiler accepts if this list is `RUSTC_BOOTSTRAP`.
const EBPF_CRATES: &str = "tuplewatch_ebpf,tuplewatch_ebpf_foreign";

/// Options of `cargo xtask test`.
#[derive(clap::Args)]
pub struct Args {
    /// Run only these steps (may be given several times, or separated by commas)
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Step>,
    /// Run only the tests whose name contains this
    filter: Option<String>,
}

/// The steps, in the order in which they run: the quick ones first.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Formatting
    Fmt,
    /// Lints of all packages and targets of the user side
    Clippy,
    /// Lints of the kernel side
    EbpfClippy,
    /// Documentation without warnings
    Doc,
    /// Documentation of the kernel side
    EbpfDoc,
    /// Unit and property tests
    Unit,
    /// The fuzz targets compile
    Fuzz,
    /// The real agent in network namespaces, as root
    E2e,
    /// The real agent on other kernels, in virtual machines
    Vm,
}

impl Step {
    const ALL: [Self; 9] = [
        Self::Fmt,
        Self::Clippy,
        Self::EbpfClippy,
        Self::Doc,
        Self::EbpfDoc,
        Self::Unit,
        Self::Fuzz,
        Self::E2e,
        Self::Vm,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Fmt => "fmt",
            Self::Clippy => "clippy",
            Self::EbpfClippy => "ebpf-clippy",
            Self::Doc => "doc",
            Self::EbpfDoc => "ebpf-doc",
            Self::Unit => "unit",
            Self::Fuzz => "fuzz",
            Self::E2e => "e2e",
            Self::Vm => "vm",
        }
    }

    /// What must be installed. All but formatting compile the agent, thus need the eBPF objects.
    fn needs(self) -> Needs {
        match self {
            Self::Fmt => Needs::LINTS,
            Self::Clippy => Needs::LINTS | Needs::BUILD,
            Self::EbpfClippy => Needs::LINTS,
            Self::EbpfDoc => Needs::NOTHING,
            Self::Doc | Self::Unit => Needs::BUILD,
            Self::Fuzz => Needs::FUZZ,
            Self::E2e => Needs::BUILD | Needs::LAB,
            Self::Vm => Needs::BUILD | Needs::VM,
        }
    }

    /// Whether it needs the agent's binary.
    fn runs_agent(self) -> bool {
        matches!(self, Self::E2e | Self::Vm)
    }

    /// Whether a filter for tests' names says something about this step.
    fn has_tests(self) -> bool {
        matches!(self, Self::Unit | Self::E2e)
    }

    /// The cargo command of this step, but of the one in virtual machines.
    ///
    /// Lints and documentation of the eBPF package are made as if for the host, with the stable compiler: what they
    /// find does not depend on the target. Its unstable features are opened for its crates alone. It goes by itself,
    /// because in one command with the agent it would get the features of shared packages that need `std`.
    fn cargo(self, paths: &Paths, filter: Option<&str>) -> Command {
        let mut cargo = if self == Self::E2e {
            paths.lab_cargo()
        } else {
            paths.cargo()
        };
        match self {
            Self::Fmt => cargo.args(["fmt", "--all", "--check"]),
            Self::Clippy => cargo
                .args(["clippy", "--workspace", "--exclude", EBPF])
                .args(["--all-targets", "--keep-going"])
                .args(["--", "--deny", "warnings"]),
            Self::EbpfClippy => cargo
                .args(["clippy", "--package", EBPF, "--keep-going"])
                .args(["--", "--deny", "warnings"])
                .env("RUSTC_BOOTSTRAP", EBPF_CRATES),
            Self::Doc => cargo
                .args(["doc", "--workspace", "--exclude", EBPF, "--no-deps"])
                .env("RUSTDOCFLAGS", "--deny warnings"),
            Self::EbpfDoc => cargo
                .args(["doc", "--package", EBPF, "--no-deps"])
                .env("RUSTDOCFLAGS", "--deny warnings")
                .env("RUSTC_BOOTSTRAP", EBPF_CRATES),
            Self::Unit => cargo
                .args(["test", "--workspace", "--no-fail-fast"])
                .args(["--exclude", "tuplewatch-tests"])
                .args(["--exclude", EBPF])
                .args(filter),
            Self::Fuzz => cargo
                .args(["check", "--manifest-path"])
                .arg(paths.fuzz().join("Cargo.toml"))
                .arg("--target-dir")
                .arg(paths.root.join("target/fuzz")),
            // Two at a time: each test has several hosts and real time limits.
            Self::E2e | Self::Vm => cargo
                .args(["test", "--package", "tuplewatch-tests", "--no-fail-fast"])
                .args(["--", "--test-threads", "2"])
                .args(filter),
        };
        cargo
    }
}

/// How one step ended.
struct Report {
    name: &'static str,
    tests: Tests,
    /// Tests that failed and passed when they were run again.
    again: Vec<String>,
    elapsed: Duration,
    /// Why it failed. `None` if it passed.
    failure: Option<String>,
}

/// Runs the steps and returns whether all passed. It goes on after one that fails, so that one run tells all.
///
/// # Errors
/// If setting up or building fails.
pub fn command(paths: &Paths, args: &Args) -> Result<bool> {
    let steps = chosen(&args.only, args.filter.is_some(), paths.fuzz().exists());
    let needs = steps
        .iter()
        .fold(Needs::NOTHING, |needs, step| needs | step.needs());
    setup::ensure(paths, needs)?;
    if steps.iter().any(|step| step.needs().contain(Needs::BUILD)) {
        // Only two steps run the agent; the others need the eBPF objects, which its package embeds.
        build::build(
            paths,
            &build::Args::ebpf_only(!steps.iter().any(|step| step.runs_agent())),
        )?;
    }
    let mut reports: Vec<Report> = steps
        .iter()
        .map(|step| run(paths, *step, args.filter.as_deref()))
        .collect();
    let ran: u64 = reports.iter().map(|report| report.tests.ran()).sum();
    if let (Some(filter), Some(last)) = (&args.filter, reports.last_mut())
        && ran == 0
        && last.failure.is_none()
    {
        last.failure = Some(format!("no test's name contains `{filter}`"));
    }
    Ok(conclude(&reports))
}

/// The steps to run: those asked for, else all that have something to check.
fn chosen(only: &[Step], filtered: bool, has_fuzz: bool) -> Vec<Step> {
    Step::ALL
        .into_iter()
        .filter(|step| {
            if only.is_empty() {
                !filtered || step.has_tests()
            } else {
                only.contains(step)
            }
        })
        .filter(|step| has_fuzz || *step != Step::Fuzz || only.contains(step))
        .collect()
}

/// Runs one step and says how it ended.
fn run(paths: &Paths, step: Step, filter: Option<&str>) -> Report {
    if step == Step::Vm {
        return run_vm(paths);
    }
    let start = Instant::now();
    let name = step.name();
    let mut cargo = step.cargo(paths, filter.filter(|_| step.has_tests()));
    let mut tests = Tests::default();
    let mut failed = Failed::default();
    say!("\n{name}: {}", typed(&cargo));
    let failure = if step == Step::E2e && !is_root() {
        Some(format!(
            "needs root, for eBPF programs and network namespaces; remedy: type {}",
            as_root("cargo xtask test --only e2e")
        ))
    } else {
        let ended = step::watched(&paths.log(name), &mut cargo, |line| {
            if let Some(more) = Tests::parse(line) {
                tests += more;
            }
            failed.read(line);
        });
        match ended {
            Err(error) => Some(format!("{error:#}")),
            Ok(status) if !status.success() => Some(format!("{status}")),
            // A filter may match tests of one step only.
            Ok(_) if step.has_tests() && tests.ran() == 0 && filter.is_none() => {
                Some("no test ran".to_owned())
            }
            Ok(_) => None,
        }
    };
    let mut report = Report {
        name,
        tests,
        again: Vec::new(),
        elapsed: start.elapsed(),
        failure,
    };
    if step == Step::E2e && report.failure.is_some() {
        run_again(paths, &failed, &mut report);
        report.elapsed = start.elapsed();
    }
    say!(
        "{name}: {} in {}",
        report.failure.as_deref().unwrap_or("passed"),
        Elapsed(report.elapsed)
    );
    report
}

/// Boots other kernels. Those that are not served are said aloud and are no failure.
fn run_vm(paths: &Paths) -> Report {
    let start = Instant::now();
    say!("\nvm: other kernels");
    let (tests, failure) = match vm::step(paths) {
        Ok((tests, true)) => (tests, None),
        Ok((tests, false)) => (tests, Some("see above".to_owned())),
        Err(error) => (Tests::default(), Some(format!("{error:#}"))),
    };
    Report {
        name: Step::Vm.name(),
        tests,
        again: Vec::new(),
        elapsed: start.elapsed(),
        failure,
    }
}

/// Runs a few tests that failed again, alone. Those that pass then count as passed, and are named.
fn run_again(paths: &Paths, failed: &Failed, report: &mut Report) {
    let Some(mut cargo) = failed.again(paths.lab_cargo()) else {
        return;
    };
    say!("\n{}, again: {}", report.name, typed(&cargo));
    let mut passed = 0;
    let ended = step::watched(&paths.log("e2e-again"), &mut cargo, |line| {
        passed += Tests::parse(line).map_or(0, |tests| tests.passed);
    });
    let count = failed.tests.len() as u64;
    // A name may stand in several binaries.
    if ended.is_ok_and(|status| status.success()) && passed >= count && count == report.tests.failed
    {
        report.tests.passed += count;
        report.tests.failed = 0;
        report.again.clone_from(&failed.tests);
        report.failure = None;
    }
}

/// A command as one types it.
fn typed(cargo: &Command) -> String {
    let arguments: Vec<_> = cargo.get_args().map(|a| a.to_string_lossy()).collect();
    format!("cargo {}", arguments.join(" "))
}

/// Prints the table and the closing line, which has the form that CI systems read, and returns whether all passed.
fn conclude(reports: &[Report]) -> bool {
    println!("\n{}", table(reports));
    let mut sum = Tests::default();
    for report in reports {
        sum += report.tests;
    }
    let failed: Vec<&str> = reports
        .iter()
        .filter(|report| report.failure.is_some())
        .map(|report| report.name)
        .collect();
    if !failed.is_empty() {
        println!("failed: {}", failed.join(", "));
    }
    for report in reports.iter().filter(|report| !report.again.is_empty()) {
        println!(
            "{}: failed, and passed when run again alone: {}",
            report.name,
            report.again.join(", ")
        );
    }
    println!("{}", closing_line(sum));
    failed.is_empty()
}

/// One line for each step.
fn table(reports: &[Report]) -> String {
    let lines = reports.iter().map(|report| {
        let tests = if report.tests == Tests::default() {
            String::new()
        } else {
            let Tests {
                passed,
                failed,
                ignored,
            } = report.tests;
            format!("{passed} passed, {failed} failed, {ignored} ignored")
        };
        let result = report
            .failure
            .as_ref()
            .map_or_else(|| "ok".to_owned(), |failure| format!("FAILED: {failure}"));
        let line = format!(
            "{:<8}{:>12}  {tests:<38}{result}",
            report.name,
            Elapsed(report.elapsed)
        );
        line.trim_end().to_owned()
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// `N passed, N failed`, and how many were skipped if any were.
fn closing_line(sum: Tests) -> String {
    let skipped = if sum.ignored > 0 {
        format!(", {} skipped", sum.ignored)
    } else {
        String::new()
    };
    format!("{} passed, {} failed{skipped}", sum.passed, sum.failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_steps_run_unless_some_are_asked_for() {
        assert_eq!(chosen(&[], false, true), Step::ALL);
        let without_fuzz: Vec<Step> = Step::ALL
            .into_iter()
            .filter(|step| *step != Step::Fuzz)
            .collect();
        assert_eq!(chosen(&[], false, false), without_fuzz);
        // Asked for without being there is a failure, not nothing to do.
        assert_eq!(chosen(&[Step::Fuzz], false, false), [Step::Fuzz]);
        assert_eq!(
            chosen(&[Step::E2e, Step::Fmt], false, true),
            [Step::Fmt, Step::E2e]
        );
    }

    #[test]
    fn a_filter_leaves_the_steps_with_tests() {
        assert_eq!(chosen(&[], true, true), [Step::Unit, Step::E2e]);
        assert_eq!(chosen(&[Step::E2e], true, true), [Step::E2e]);
    }

    #[test]
    fn table_names_each_step_its_time_and_its_failure() {
        let reports = [
            Report {
                name: "fmt",
                tests: Tests::default(),
                again: Vec::new(),
                elapsed: Duration::from_secs(1),
                failure: None,
            },
            Report {
                name: "unit",
                tests: Tests {
                    passed: 5,
                    failed: 1,
                    ignored: 0,
                },
                again: Vec::new(),
                elapsed: Duration::from_secs(61),
                failure: Some("exit status: 101".into()),
            },
        ];
        assert_eq!(
            table(&reports),
            "fmt            1.0 s                                        ok\n\
             unit       1 min 1 s  5 passed, 1 failed, 0 ignored         FAILED: exit status: 101"
        );
    }

    #[test]
    fn closing_line_counts_tests() {
        assert_eq!(
            closing_line(Tests {
                passed: 5,
                failed: 1,
                ignored: 0
            }),
            "5 passed, 1 failed"
        );
        assert_eq!(
            closing_line(Tests {
                passed: 5,
                failed: 0,
                ignored: 2
            }),
            "5 passed, 0 failed, 2 skipped"
        );
    }
}
