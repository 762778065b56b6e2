//! The file of placements: which endpoints serve a service no more, as somebody outside of this host knows. It
//! is read again when it changes.

use std::{
    fs, io,
    net::SocketAddr,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    str::FromStr,
    time::SystemTime,
};

use serde::Deserialize;

use super::{
    problem::{Problem, Problems},
    read::{Text, read},
    tree::{self, Node, Value},
};
use crate::{core::placement::Placement, sink::WallClock};

/// More changes than these are not looked through each second.
const MOST: usize = 1000;

/// A change of placement, as the file has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementEntry {
    service: SocketAddr,
    since: SystemTime,
    left: Vec<SocketAddr>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Keys {
    service: Text<Service>,
    since: Text<Since>,
    #[serde(default)]
    left: Vec<Text<Endpoint>>,
}

#[derive(Clone, Copy)]
struct Service(SocketAddr);

impl FromStr for Service {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<SocketAddr>() {
            Ok(address) if address.port() != 0 => Ok(Self(address)),
            _ => Err(format!(
                "`{text}` is not an address with a port like 203.0.113.10:8080 or [2001:db8::10]:443; names are \
                 not looked up"
            )),
        }
    }
}

#[derive(Clone, Copy)]
struct Since(SystemTime);

impl FromStr for Since {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        humantime::parse_rfc3339(text)
            .map(Self)
            .map_err(|_| format!("`{text}` is not a time in UTC like 2026-11-30T12:00:00Z"))
    }
}

/// An endpoint: its port is that of the service, unless it has one of its own.
#[derive(Clone, Copy)]
struct Endpoint(std::net::IpAddr, Option<u16>);

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(address) = text.parse() {
            return Ok(Self(address, None));
        }
        match text.parse::<SocketAddr>() {
            Ok(address) if address.port() != 0 => Ok(Self(address.ip(), Some(address.port()))),
            _ => Err(format!(
                "`{text}` is not an address like 10.0.3.7 or 10.0.3.7:8080"
            )),
        }
    }
}

impl PlacementEntry {
    fn read(node: &Node) -> Result<Self, Problem> {
        let keys: Keys = read(node)?;
        let service = keys.service.0.0;
        let left = keys.left.iter().map(|Text(Endpoint(address, port))| {
            SocketAddr::new(*address, port.unwrap_or(service.port()))
        });
        Ok(Self {
            service,
            since: keys.since.0.0,
            left: left.collect(),
        })
    }

    /// The same on the core's clock.
    #[must_use]
    pub fn placement(&self, clock: &WallClock) -> Placement {
        let since = match self.since.duration_since(SystemTime::UNIX_EPOCH) {
            Ok(after) => i64::try_from(after.as_nanos()).unwrap_or(i64::MAX),
            Err(_) => 0,
        };
        Placement {
            service: self.service,
            since: clock.from_epoch_ns(since),
            left: self.left.clone(),
        }
    }
}

/// The file, and how it was read last.
#[derive(Clone, Debug)]
pub struct PlacementFile {
    path: PathBuf,
    /// What tells that it has changed: device, inode, size and time of change.
    stamp: Option<[i64; 5]>,
    entries: Vec<PlacementEntry>,
    /// It was told that it is not there.
    is_gone: bool,
}

impl PlacementFile {
    /// Reads the file.
    ///
    /// # Errors
    /// It cannot be read, or something is wrong in it: everything, with its place.
    pub fn open(path: &Path) -> Result<Self, Problems> {
        let stamp = stamp(path).ok();
        Ok(Self {
            path: path.to_owned(),
            stamp,
            entries: read_file(path)?,
            is_gone: false,
        })
    }

    /// Looks whether it has changed; `true` if there are new entries.
    ///
    /// # Errors
    /// As at [`PlacementFile::open`], once for each change; what was known before stays.
    pub fn follow(&mut self) -> Result<bool, Problems> {
        let stamp = match stamp(&self.path) {
            Ok(stamp) => stamp,
            Err(_) if self.is_gone => return Ok(false),
            Err(error) => {
                self.is_gone = true;
                self.stamp = None;
                return Err(unreadable(&self.path, &error));
            }
        };
        if self.stamp == Some(stamp) {
            return Ok(false);
        }
        (self.stamp, self.is_gone) = (Some(stamp), false);
        let entries = read_file(&self.path)?;
        let is_new = entries != self.entries;
        self.entries = entries;
        Ok(is_new)
    }

    /// The entries on the core's clock.
    #[must_use]
    pub fn placements(&self, clock: &WallClock) -> Vec<Placement> {
        let entries = self.entries.iter();
        entries.map(|entry| entry.placement(clock)).collect()
    }
}

fn stamp(path: &Path) -> io::Result<[i64; 5]> {
    let file = fs::metadata(path)?;
    Ok([
        file.dev().cast_signed(),
        file.ino().cast_signed(),
        file.size().cast_signed(),
        file.ctime(),
        file.ctime_nsec(),
    ])
}

fn unreadable(path: &Path, error: &io::Error) -> Problems {
    Problems {
        file: Some(path.to_owned()),
        list: vec![Problem::nowhere(format!(
            "it cannot be read: {error}; `placements` (--placements) names the file of placements, see \
             docs/placements.md"
        ))],
    }
}

fn read_file(path: &Path) -> Result<Vec<PlacementEntry>, Problems> {
    let text = fs::read_to_string(path).map_err(|error| unreadable(path, &error))?;
    entries(&text).map_err(|list| Problems {
        file: Some(path.to_owned()),
        list,
    })
}

/// The entries of a file's text.
fn entries(text: &str) -> Result<Vec<PlacementEntry>, Vec<Problem>> {
    let node = tree::parse(text).map_err(|problem| vec![problem])?;
    let list = match &node.value {
        Value::Nothing => return Ok(Vec::new()),
        Value::List(list) if list.len() <= MOST => list,
        Value::List(list) => {
            let what = format!("{} changes are too many: {MOST} at most", list.len());
            return Err(vec![Problem::at(node.at, what)]);
        }
        other => {
            let what = format!(
                "a list is wanted here, not {}: `- service: 203.0.113.10:8080`, below it `since: \
                 2026-11-30T12:00:00Z` and, if clients connect to endpoints, `left: [10.0.3.7]`",
                other.kind()
            );
            return Err(vec![Problem::at(node.at, what)]);
        }
    };
    let (mut found, mut problems) = (Vec::new(), Vec::new());
    for entry in list {
        match PlacementEntry::read(entry) {
            Ok(entry) => found.push(entry),
            Err(problem) => problems.push(problem),
        }
    }
    if problems.is_empty() {
        Ok(found)
    } else {
        Err(problems)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "\
# Moved to zone b.
- service: 203.0.113.10:8080
  since: 2026-11-30T12:00:00Z
  left: [10.0.3.7, \"10.0.3.8:8081\", \"2001:db8::7\"]
- service: \"[2001:db8::10]:443\"
  since: 2026-11-30T12:00:05Z
";

    #[test]
    fn a_file_is_read() {
        let entries = entries(GOOD).unwrap();
        let placement = entries[0].placement(&WallClock::capture());
        let left: Vec<String> = placement.left.iter().map(ToString::to_string).collect();
        assert_eq!(
            left,
            ["10.0.3.7:8080", "10.0.3.8:8081", "[2001:db8::7]:8080"]
        );
        assert_eq!(placement.since.0, 1_796_040_000_000_000_000);
        assert_eq!(entries[1].service.port(), 443);
        assert!(entries[1].left.is_empty());
        assert!(super::entries("").unwrap().is_empty());
    }

    #[test]
    fn what_is_wrong_has_its_line_and_a_hint() {
        let wrong = |text: &str| -> Vec<String> {
            let problems = Problems {
                file: Some("p.yaml".into()),
                list: entries(text).unwrap_err(),
            };
            problems.to_string().lines().map(str::to_owned).collect()
        };
        let text = "\
- service: backend:8080
  since: 2026-11-30T12:00:00Z
- service: 203.0.113.10:8080
  sicne: yesterday
- service: 203.0.113.10:8080
  since: yesterday
- service: 203.0.113.10:8080
  since: 2026-11-30T12:00:00Z
  left: [old-1]
- since: 2026-11-30T12:00:00Z
";
        let lines = wrong(text);
        assert_eq!(lines.len(), 5, "{lines:#?}");
        for (line, parts) in lines.iter().zip([
            ["p.yaml:1:", "names are not looked up"],
            ["p.yaml:4:", "did you mean `since`?"],
            ["p.yaml:6:", "2026-11-30T12:00:00Z"],
            ["p.yaml:9:", "10.0.3.7:8080"],
            ["p.yaml:10:", "`service` is missing"],
        ]) {
            assert!(parts.iter().all(|part| line.contains(part)), "{line}");
        }
        assert!(wrong("service: 1")[0].contains("a list is wanted here"));
        assert!(wrong("- [")[0].starts_with("p.yaml:"));
    }

    #[test]
    fn it_is_read_again_when_it_changes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("placements.yaml");
        let missing = PlacementFile::open(&path).unwrap_err().to_string();
        assert!(missing.contains("--placements"), "{missing}");
        fs::write(&path, GOOD).unwrap();
        let mut file = PlacementFile::open(&path).unwrap();
        let known = |file: &PlacementFile| file.placements(&WallClock::capture()).len();
        assert!(!file.follow().unwrap());
        // As editors and config maps do: another file in its place.
        let replace = |text: &str| {
            let new = dir.path().join("new");
            fs::write(&new, text).unwrap();
            fs::rename(&new, &path).unwrap();
        };
        replace("- service: 203.0.113.10:8080\n  since: 2026-11-30T12:00:00Z\n");
        assert!(file.follow().unwrap());
        assert_eq!(known(&file), 1);
        // A slip is told once, and what was known stays.
        replace("- service: nonsense\n");
        assert!(file.follow().is_err());
        assert!(!file.follow().unwrap());
        assert_eq!(known(&file), 1);
        fs::remove_file(&path).unwrap();
        assert!(file.follow().is_err());
        assert!(!file.follow().unwrap());
        replace(GOOD);
        assert!(file.follow().unwrap());
        assert_eq!(known(&file), 2);
    }
}
