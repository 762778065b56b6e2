//! Why a kernel fact could not be read, with the names that resemble the one that was asked for.

use std::io;

/// Why a fact could not be read.
#[derive(Debug, thiserror::Error)]
pub enum FactError {
    /// The file could not be read.
    #[error(
        "cannot read kernel type information {path}: {source}; it needs a kernel with CONFIG_DEBUG_INFO_BTF=y and sysfs mounted"
    )]
    Read {
        /// File asked for.
        path: String,
        /// The system's answer.
        source: io::Error,
    },
    /// The data are no BTF that the reader understands.
    #[error("kernel type information in {origin} cannot be parsed: {source}")]
    Parse {
        /// File or "bytes".
        origin: String,
        /// What the parser says.
        source: btf_rs::Error,
    },
    /// A reference inside the BTF data leads nowhere.
    #[error("kernel type information is damaged near {near}: {source}")]
    Damaged {
        /// The name that was being resolved.
        near: String,
        /// What the parser says.
        source: btf_rs::Error,
    },
    /// There is no such type, function or tracepoint.
    #[error("this kernel has no {kind} `{name}`{}", suggestion(.near))]
    NoType {
        /// `struct`, `enum`, `function`.
        kind: &'static str,
        /// The name asked for.
        name: String,
        /// Names that resemble it.
        near: Vec<String>,
    },
    /// The struct has no such member.
    #[error("`{owner}` has no member `{member}` on this kernel (asked for: `{path}`){}", suggestion(.near))]
    NoMember {
        /// `struct x` in which the member was looked up, with the path to it.
        owner: String,
        /// The member that is missing.
        member: String,
        /// The whole path that was asked for, struct name first.
        path: String,
        /// Members that resemble it.
        near: Vec<String>,
    },
    /// A path goes on behind something that has no members, e.g. a pointer.
    #[error("`{owner}` is a {kind} on this kernel, it has no member `{member}`")]
    NotComposite {
        /// The path that leads to the thing without members.
        owner: String,
        /// What it is: `ptr`, `int`, …
        kind: &'static str,
        /// The member asked for.
        member: String,
    },
    /// Two definitions of one name give different answers.
    #[error(
        "the kernel describes `{path}` in two ways ({first} and {second} bytes from the start): none can be trusted"
    )]
    Ambiguous {
        /// The whole path that was asked for.
        path: String,
        /// Offset by one definition.
        first: u32,
        /// Offset by another.
        second: u32,
    },
    /// The enum has no such enumerator.
    #[error("`enum {name}` has no enumerator `{variant}` on this kernel{}", suggestion(.near))]
    NoEnumerator {
        /// Name of the enum.
        name: String,
        /// Enumerator asked for.
        variant: String,
        /// Enumerators that resemble it.
        near: Vec<String>,
    },
}

fn suggestion(near: &[String]) -> String {
    if near.is_empty() {
        String::new()
    } else {
        format!("; similar: {}", near.join(", "))
    }
}

/// The names nearest to `wanted`: at most three, best first, none that has little to do with it.
pub(super) fn nearest<'a>(wanted: &str, names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let limit = (wanted.len() / 3).max(2);
    let mut scored: Vec<(usize, &str)> = names
        .filter(|name| !name.is_empty())
        .filter_map(|name| {
            let contains = name.len() >= 4 && wanted.len() >= 4;
            let score = if contains && (name.contains(wanted) || wanted.contains(name)) {
                1
            } else {
                edit_distance(wanted, name, limit)?
            };
            Some((score, name))
        })
        .collect();
    scored.sort_unstable();
    scored.dedup();
    scored
        .into_iter()
        .take(3)
        .map(|(_, name)| name.to_owned())
        .collect()
}

/// Levenshtein distance, `None` above `limit`.
fn edit_distance(a: &str, b: &str, limit: usize) -> Option<usize> {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    if a.len().abs_diff(b.len()) > limit {
        return None;
    }
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row.last().copied().filter(|distance| *distance <= limit)
}
