//! A second run of the end-to-end tests that failed.
//!
//! They watch real kernels at real times, two at once on machines that others use too, and not all that
//! a kernel lets pass is in their hands: where the machine of a test skips a tracepoint, a number is one
//! too small. So a few that failed are run again, alone, and the outcome of both runs is printed. A
//! fault of the agent fails twice.

use std::process::Command;

/// Tests that failed, as the output of cargo names them.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Failed {
    /// Names of tests.
    pub tests: Vec<String>,
    /// Options that choose the binaries they are in: `-p tuplewatch-tests --test incident`.
    targets: Vec<String>,
}

impl Failed {
    /// More than these are not the weather.
    const MOST: usize = 3;

    /// Reads a line of cargo's or a test binary's output.
    pub fn read(&mut self, line: &str) {
        let line = line.trim();
        if let Some(name) = line
            .strip_prefix("test ")
            .and_then(|rest| rest.strip_suffix(" ... FAILED"))
        {
            self.tests.push(name.to_owned());
        } else if let Some(target) = line
            .strip_prefix("`-p ")
            .and_then(|rest| rest.strip_suffix('`'))
        {
            self.targets.push(format!("-p {target}"));
        }
    }

    /// The commands that run them again, made from `cargo`; none if there are too many.
    pub fn commands(&self, cargo: impl Fn() -> Command) -> Vec<Command> {
        if self.tests.len() > Self::MOST {
            return Vec::new();
        }
        let command = |target: &String| {
            let mut cargo = cargo();
            cargo
                .arg("test")
                .args(target.split(' '))
                .args(["--", "--test-threads", "1", "--exact"])
                .args(&self.tests);
            cargo
        };
        self.targets.iter().map(command).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_tests_and_their_binaries_are_run_again() {
        let mut failed = Failed::default();
        for line in [
            "test loss ... FAILED",
            "test fast_open ... ok",
            "test busy::pool ... FAILED",
            "error: 2 targets failed:",
            "    `-p tuplewatch-tests --test must_not_fire`",
            "    `-p tuplewatch-tests --lib`",
        ] {
            failed.read(line);
        }
        let typed: Vec<String> = failed
            .commands(|| Command::new("cargo"))
            .iter()
            .map(|command| {
                let arguments: Vec<_> = command.get_args().map(|a| a.to_string_lossy()).collect();
                arguments.join(" ")
            })
            .collect();
        assert_eq!(
            typed,
            [
                "test -p tuplewatch-tests --test must_not_fire -- --test-threads 1 --exact loss busy::pool",
                "test -p tuplewatch-tests --lib -- --test-threads 1 --exact loss busy::pool",
            ]
        );
    }

    #[test]
    fn many_are_not() {
        let mut failed = Failed::default();
        for line in ["test a ... FAILED"; 4] {
            failed.read(line);
        }
        failed.read("`-p tuplewatch-tests --lib`");
        assert!(failed.commands(|| Command::new("cargo")).is_empty());
    }
}
