//! A second run of the end-to-end tests that failed.
//!
//! They watch real kernels at real times, two at once on machines that others use too, and not all that
//! a kernel lets pass is in their hands: where the machine of a test skips a tracepoint, a number is one
//! too small. So a few that failed are run again, alone, and the outcome of both runs is printed. A
//! fault of the agent fails twice.

use std::process::Command;

/// Tests that failed, as the test binaries name them.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Failed {
    /// Names of tests.
    pub tests: Vec<String>,
    /// Binaries that began and have not told their result: after the end, those that died.
    running: usize,
}

impl Failed {
    /// More than these are not the weather.
    const MOST: usize = 3;

    /// Reads a line of a test binary's output.
    pub fn read(&mut self, line: &str) {
        let line = line.trim();
        if let Some(name) = line
            .strip_prefix("test ")
            .and_then(|rest| rest.strip_suffix(" ... FAILED"))
        {
            self.tests.push(name.to_owned());
        } else if line.starts_with("running ") && line.ends_with(['s', 't']) {
            self.running += 1;
        } else if line.starts_with("test result: ") {
            self.running = self.running.saturating_sub(1);
        }
    }

    /// Makes `cargo` run them again; `None` if there are none or too many, or if a binary died.
    pub fn again(&self, mut cargo: Command) -> Option<Command> {
        if self.tests.is_empty() || self.tests.len() > Self::MOST || self.running > 0 {
            return None;
        }
        cargo
            .args(["test", "--package", "tuplewatch-tests"])
            .args(["--", "--test-threads", "1", "--exact"])
            .args(&self.tests);
        Some(cargo)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn again(lines: &[&str]) -> Option<String> {
        let mut failed = Failed::default();
        lines.iter().for_each(|line| failed.read(line));
        let command = failed.again(Command::new("cargo"))?;
        let arguments: Vec<_> = command.get_args().map(|a| a.to_string_lossy()).collect();
        Some(arguments.join(" "))
    }

    #[test]
    fn failed_tests_are_run_again() {
        let lines = [
            "running 3 tests",
            "test loss ... FAILED",
            "test fast_open ... ok",
            "test busy::pool ... FAILED",
            "test result: FAILED. 1 passed; 2 failed",
            "running 1 test",
            "test result: ok. 1 passed; 0 failed",
        ];
        let typed = "test --package tuplewatch-tests -- --test-threads 1 --exact loss busy::pool";
        assert_eq!(again(&lines).as_deref(), Some(typed));
        // The second binary did not come to its end.
        assert_eq!(again(&lines[..6]), None);
    }

    #[test]
    fn many_are_not() {
        assert_eq!(again(&["test a ... FAILED"; 4]), None);
        assert_eq!(again(&["running 0 tests"]), None);
    }
}
