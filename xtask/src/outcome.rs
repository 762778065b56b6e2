//! What cargo's test runs print: counting individual tests.

use std::ops::AddAssign;

/// Individual tests by their end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tests {
    /// Ran and passed.
    pub passed: u64,
    /// Ran and failed.
    pub failed: u64,
    /// Marked `#[ignore]`, not run.
    pub ignored: u64,
}

impl Tests {
    /// Reads the closing line of one test binary, `test result: ok. 5 passed; 0 failed; 1 ignored; …`. `None` if `line` is
    /// another line. Colours are allowed.
    pub fn parse(line: &str) -> Option<Self> {
        let line = without_colours(line);
        let (_, counts) = line
            .trim()
            .strip_prefix("test result: ")?
            .split_once(". ")?;
        let count = |name: &str| {
            counts.split(';').find_map(|part| {
                part.trim()
                    .strip_suffix(name)?
                    .trim_end()
                    .parse::<u64>()
                    .ok()
            })
        };
        Some(Self {
            passed: count(" passed")?,
            failed: count(" failed")?,
            ignored: count(" ignored")?,
        })
    }

    /// Tests that ran.
    pub fn ran(self) -> u64 {
        self.passed + self.failed
    }
}

impl AddAssign for Tests {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
    }
}

/// `text` without the terminal's escape sequences that set colours.
fn without_colours(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("\x1b[") {
        plain.push_str(before);
        rest = after.split_once('m').map_or("", |(_, after)| after);
    }
    plain + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_are_read() {
        let ok = "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.02s";
        assert_eq!(
            Tests::parse(ok),
            Some(Tests {
                passed: 12,
                failed: 0,
                ignored: 1
            })
        );
        let failed = "test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.50s";
        assert_eq!(
            Tests::parse(failed),
            Some(Tests {
                passed: 3,
                failed: 2,
                ignored: 0
            })
        );
    }

    #[test]
    fn colours_are_ignored() {
        let line = "test result: \x1b[32mok\x1b(B\x1b[m. 1 passed; 0 failed; 0 ignored; 0 measured";
        assert_eq!(
            Tests::parse(line),
            Some(Tests {
                passed: 1,
                failed: 0,
                ignored: 0
            })
        );
        assert_eq!(without_colours("\x1b[1;31mred\x1b[0m plain"), "red plain");
    }

    #[test]
    fn other_lines_are_not() {
        for line in [
            "",
            "running 3 tests",
            "test result: ok",
            "test a::b ... ok",
            "3 passed; 2 failed",
            "test result: ok. many passed; 0 failed; 0 ignored",
        ] {
            assert_eq!(Tests::parse(line), None, "{line}");
        }
    }

    #[test]
    fn binaries_add_up() {
        let mut sum = Tests::default();
        sum += Tests {
            passed: 3,
            failed: 1,
            ignored: 2,
        };
        sum += Tests {
            passed: 4,
            failed: 0,
            ignored: 0,
        };
        assert_eq!(
            sum,
            Tests {
                passed: 7,
                failed: 1,
                ignored: 2
            }
        );
        assert_eq!(sum.ran(), 8);
    }
}
