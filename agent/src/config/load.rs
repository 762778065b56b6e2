//! Brings file, environment and flags together.

use std::{
    collections::BTreeMap,
    fmt, fs, io,
    path::{Path, PathBuf},
};

use super::{
    Config,
    entries::LISTS,
    keys::{self, Given, Key, Kind},
    problem::{Place, Problem, Problems, hint},
    read::unknown,
    tree::{self, Node, Value},
};
use crate::core::threshold::{SETTINGS, Thresholds};

/// The file that is read if no other is named; it may be missing.
pub const DEFAULT_FILE: &str = "/etc/tuplewatch/config.yaml";
/// Names another file.
pub const FILE_VARIABLE: &str = "TUPLEWATCH_CONFIG";

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The file, at this place.
    File(Place),
    /// This variable.
    Variable(String),
    /// The command line.
    Flag,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(Place { line, .. }) => write!(f, "line {line} of the file"),
            Self::Variable(name) => f.write_str(name),
            Self::Flag => f.write_str("the command line"),
        }
    }
}

/// The configuration in effect.
#[derive(Clone, Debug, Default)]
pub struct Loaded {
    /// The settings.
    pub config: Config,
    /// The file that was read.
    pub file: Option<PathBuf>,
    /// Its text, for the digest of the configuration.
    pub text: String,
    /// What is not by default, and where it comes from.
    pub origins: BTreeMap<String, Origin>,
    /// What is not wrong but worth a word.
    pub warnings: Vec<String>,
}

/// Whether a value could be set, without setting it.
///
/// # Errors
/// Says what is wrong.
pub fn check(name: &str, given: Given) -> Result<(), String> {
    let key = keys::find(name).ok_or_else(|| format!("there is no setting `{name}`"))?;
    key.set(&mut Config::default(), given)
}

/// Whether a threshold could be set.
///
/// # Errors
/// Says what is wrong; for an unknown name the nearest one, or all.
pub fn check_threshold(name: &str, value: &str) -> Result<(), String> {
    let setting = SETTINGS
        .iter()
        .find(|s| s.name == name)
        .ok_or_else(|| unknown(name, SETTINGS.iter().map(|s| s.name)))?;
    (setting.set)(&mut Thresholds::default(), value)
}

/// Reads a file alone, as if nothing else were set.
///
/// # Errors
/// Everything that is wrong, with its place.
pub fn check_file(path: &Path) -> Result<(), Problems> {
    load(Some(path), &BTreeMap::new(), Vec::new()).map(drop)
}

/// Reads the configuration: `file` if named, else that of `TUPLEWATCH_CONFIG`, else [`DEFAULT_FILE`] if it
/// is there; then the variables, then `flags` by name.
///
/// # Errors
/// Everything that is wrong, with its place.
pub fn load(
    file: Option<&Path>,
    variables: &BTreeMap<String, String>,
    flags: Vec<(String, Given)>,
) -> Result<Loaded, Problems> {
    let mut loaded = Loaded::default();
    let named = variables.get(FILE_VARIABLE).filter(|name| !name.is_empty());
    let named = file.map(Path::to_owned).or(named.map(PathBuf::from));
    let path = named.clone().unwrap_or_else(|| DEFAULT_FILE.into());
    let mut problems = Vec::new();
    match fs::read_to_string(&path) {
        Ok(text) => {
            problems = loaded.file(&text);
            loaded.text = text;
            loaded.file = Some(path);
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound && named.is_none() => {}
        Err(error) => {
            return Err(Problems {
                file: Some(path),
                list: vec![Problem::nowhere(format!("it cannot be read: {error}"))],
            });
        }
    }
    if !problems.is_empty() {
        return Err(Problems {
            file: loaded.file,
            list: problems,
        });
    }
    problems.extend(loaded.variables(variables));
    for (name, given) in flags {
        problems.extend(loaded.flag(&name, given));
    }
    if problems.is_empty() {
        problems.extend(loaded.groups());
    }
    if problems.is_empty() {
        Ok(loaded)
    } else {
        Err(Problems {
            file: None,
            list: problems,
        })
    }
}

impl Loaded {
    /// Takes the text of a file.
    pub(super) fn file(&mut self, text: &str) -> Vec<Problem> {
        let node = match tree::parse(text) {
            Ok(node) => node,
            Err(problem) => return vec![problem],
        };
        let mut problems = Vec::new();
        self.level(&node, "", &mut problems);
        if problems.is_empty()
            && let Err(what) = self.config.egress()
        {
            let at = match self.origins.get("egress_groups") {
                Some(Origin::File(at)) => Some(*at),
                _ => None,
            };
            problems.push(Problem { at, what });
        }
        problems
    }

    /// Takes one level of the tree; `above` is the path so far, with a point at its end.
    fn level(&mut self, node: &Node, above: &str, problems: &mut Vec<Problem>) {
        let map = match &node.value {
            Value::Map(map) => map,
            Value::Nothing => return,
            other => {
                let what = format!("a map is wanted here, not {}", other.kind());
                problems.push(Problem::at(node.at, what));
                return;
            }
        };
        for line in map {
            let name = format!("{above}{}", line.key);
            let section = format!("{name}.");
            if let Some(key) = keys::find(&name) {
                let result = given(&line.node, key.kind());
                match result.and_then(|given| self.set(key, given)) {
                    Ok(()) => {
                        self.origins.insert(name, Origin::File(line.at));
                    }
                    Err(what) => {
                        problems.push(Problem::at(line.node.at, format!("{name}: {what}")));
                    }
                }
            } else if keys::all().any(|key| key.name().starts_with(&section)) {
                self.level(&line.node, &section, problems);
            } else if let Some(list) = LISTS.iter().find(|list| list.name == name) {
                problems.extend((list.set)(&mut self.config, &line.node));
                self.origins.insert(name, Origin::File(line.at));
            } else {
                problems.push(Problem::at(line.at, self.unknown(&line.key, above)));
            }
        }
    }

    /// What to say of an unknown key: the nearest here, else where there is one of this name.
    fn unknown(&self, key: &str, above: &str) -> String {
        let names: Vec<String> = keys::all().map(Key::name).collect();
        let lists = LISTS.iter().map(|list| list.name);
        let all = names.iter().map(String::as_str).chain(lists);
        let here = all
            .clone()
            .filter_map(|name| name.strip_prefix(above)?.split('.').next());
        let mut here: Vec<_> = here.collect();
        here.dedup();
        let last = |name: &&str| name.rsplit('.').next() == Some(key);
        let elsewhere = all.clone().find(last);
        if hint(key, here.iter().copied()).is_empty()
            && let Some(elsewhere) = elsewhere
        {
            return format!("unknown key `{key}` here; did you mean `{elsewhere}`?");
        }
        unknown(key, here.into_iter())
    }

    fn variables(&mut self, variables: &BTreeMap<String, String>) -> Vec<Problem> {
        let mut problems = Vec::new();
        for key in keys::all() {
            let name = key.variable();
            let Some(text) = variables.get(&name).filter(|text| !text.is_empty()) else {
                continue;
            };
            match self.set(key, Given::Text(text.clone())) {
                Ok(()) => {
                    self.origins.insert(key.name(), Origin::Variable(name));
                }
                Err(what) => problems.push(Problem::nowhere(format!("{name}: {what}"))),
            }
        }
        let known: Vec<_> = keys::all().map(Key::variable).collect();
        // Kubernetes sets variables of its own for a service of our name: only a slip is worth a word.
        for name in variables.keys().filter(|n| n.starts_with("TUPLEWATCH_")) {
            let near = known
                .iter()
                .find(|known| (1..=2).contains(&strsim::damerau_levenshtein(known, name)));
            if let Some(near) = near
                && !known.contains(name)
            {
                self.warnings
                    .push(format!("{name} is not a setting; did you mean {near}?"));
            }
        }
        problems
    }

    fn flag(&mut self, name: &str, given: Given) -> Option<Problem> {
        let result = match keys::find(name) {
            Some(key) => self.set(key, given),
            None => Err("there is no such setting".to_owned()),
        };
        match result {
            Ok(()) => {
                self.origins.insert(name.to_owned(), Origin::Flag);
                None
            }
            Err(what) => Some(Problem::nowhere(format!("{name}: {what}"))),
        }
    }

    /// Whether the groups still stand after everything else was set.
    fn groups(&self) -> Option<Problem> {
        self.config.egress().err().map(Problem::nowhere)
    }

    fn set(&mut self, key: Key, given: Given) -> Result<(), String> {
        key.set(&mut self.config, given)
    }
}

/// The value of a node, for a setting of this kind.
fn given(node: &Node, kind: Kind) -> Result<Given, String> {
    let text = |node: &Node| {
        node.value
            .text()
            .ok_or_else(|| format!("one value is wanted, not {}", node.value.kind()))
    };
    match (&node.value, kind) {
        (Value::Nothing, _) => Ok(Given::Default),
        (Value::List(list), Kind::List) => Ok(Given::List(
            list.iter().map(text).collect::<Result<_, _>>()?,
        )),
        (_, Kind::List) => text(node).map(|text| Given::List(vec![text])),
        (Value::Map(map), Kind::Pairs) => {
            let pairs = map
                .iter()
                .map(|line| Ok((line.key.clone(), text(&line.node)?)));
            Ok(Given::Pairs(pairs.collect::<Result<_, String>>()?))
        }
        (other, Kind::Pairs) => Err(format!(
            "names with values are wanted here, such as {{name: value}}, not {}",
            other.kind()
        )),
        (_, Kind::Text) => text(node).map(Given::Text),
    }
}
