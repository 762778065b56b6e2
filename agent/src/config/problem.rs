//! What is wrong with a configuration, and where.

use std::{fmt, path::PathBuf};

/// A place in a file, counted from 1.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Place {
    /// Line.
    pub line: u64,
    /// Column.
    pub column: u64,
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Where in the file.
    pub at: Option<Place>,
    /// What, and what would be right.
    pub what: String,
}

impl Problem {
    pub(super) fn at(at: Place, what: impl Into<String>) -> Self {
        Self {
            at: Some(at),
            what: what.into(),
        }
    }

    pub(super) fn nowhere(what: impl Into<String>) -> Self {
        Self {
            at: None,
            what: what.into(),
        }
    }
}

/// Everything that is wrong with a configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Problems {
    /// The file.
    pub file: Option<PathBuf>,
    /// All problems, in the order of the file.
    pub list: Vec<Problem>,
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, problem) in self.list.iter().enumerate() {
            if n > 0 {
                f.write_str("\n")?;
            }
            if let Some(file) = &self.file {
                write!(f, "{}:", file.display())?;
                if let Some(Place { line, column }) = problem.at {
                    write!(f, "{line}:{column}:")?;
                }
                f.write_str(" ")?;
            }
            f.write_str(&problem.what)?;
        }
        Ok(())
    }
}

/// Names alike enough to be a slip of the finger.
const ALIKE: f64 = 0.82;

/// `; did you mean …?`, or nothing.
pub(super) fn hint<'a>(wrong: &str, right: impl IntoIterator<Item = &'a str>) -> String {
    let alike = |name: &str| strsim::jaro_winkler(&wrong.to_lowercase(), name);
    let nearest = right
        .into_iter()
        .map(|name| (alike(name), name))
        .filter(|(alike, _)| *alike >= ALIKE)
        .max_by(|(a, _), (b, _)| a.total_cmp(b));
    nearest.map_or(String::new(), |(_, name)| {
        format!("; did you mean `{name}`?")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_are_given_for_slips_only() {
        let names = ["endpoint", "interval", "protocol", "temporality"];
        assert_eq!(hint("endpont", names), "; did you mean `endpoint`?");
        assert_eq!(hint("Protocol", names), "; did you mean `protocol`?");
        assert_eq!(hint("temporalty", names), "; did you mean `temporality`?");
        assert_eq!(hint("colour", names), "");
    }

    #[test]
    fn every_problem_has_its_line() {
        let problems = Problems {
            file: Some("/etc/x.yaml".into()),
            list: vec![
                Problem::at(Place { line: 3, column: 5 }, "one"),
                Problem::nowhere("two"),
            ],
        };
        assert_eq!(
            problems.to_string(),
            "/etc/x.yaml:3:5: one\n/etc/x.yaml: two"
        );
    }
}
