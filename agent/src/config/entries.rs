//! The lists of the file whose entries have several keys: thresholds by destination, mutes, egress
//! groups, device profiles.

use std::{str::FromStr, time::SystemTime};

use serde::Deserialize;
use serde_json::{Value as Json, json};

use super::{
    Config,
    keys::word,
    problem::{Place, Problem},
    read::{Text, read, unknown},
    tree::{Node, Value},
};
use crate::{
    core::{
        destination::{Destination, Network},
        finding::Verdict,
        mute::Mute,
        rules::DestinationRules,
        threshold::{SETTINGS, Setting, Thresholds},
    },
    sink::WallClock,
};

/// A list of entries.
pub(super) struct List {
    /// Its name in the file.
    pub(super) name: &'static str,
    pub(super) help: &'static str,
    /// Lines of an example, without the name.
    pub(super) example: &'static str,
    pub(super) set: fn(&mut Config, &Node) -> Vec<Problem>,
    pub(super) get: fn(&Config) -> Vec<Json>,
}

/// Every list.
pub(super) const LISTS: &[List] = &[
    List {
        name: "destinations",
        help: "Thresholds of some destinations: the first entry that matches counts, what it does not \
               set is as everywhere. A destination is a network, an address or `*`, with a port or \
               without. Thresholds of the host as a whole cannot be set here.",
        example: "\
- match: [10.20.0.0/16, \"*:5432\", \"[2001:db8::/32]:443\"]
  thresholds:
    l4_reuse: {min_refused: 50}
    alert: {pending: 1m}
",
        set: |config, node| entries(node, &mut config.destinations, DestinationEntry::read),
        get: |config| {
            config
                .destinations
                .iter()
                .map(DestinationEntry::show)
                .collect()
        },
    },
    List {
        name: "mute",
        help: "Alerts that nobody wants to be told of: they are counted and shown as muted. All \
               conditions of an entry must fit, one of each list; at least one is needed, and a \
               reason. A cause is the name of a cause, or `port_exhaustion` for all of them.",
        example: "\
- causes: [l4_reuse_in_time_wait]
  destinations: [192.0.2.10:443]
  initiators: [10.1.0.0/16]
  until: 2026-12-31T18:00:00Z    # without it: for good
  reason: the old balancer is replaced at the end of the year
",
        set: |config, node| entries(node, &mut config.mute, MuteEntry::read),
        get: |config| config.mute.iter().map(MuteEntry::show).collect(),
    },
    List {
        name: "egress_groups",
        help: "Hosts that share the source ports of a device in between, and the device's profile; \
               see docs/profiles.md.",
        example: "\
- name: nat-a
  destinations: [0.0.0.0/0]
  except: [10.0.0.0/8]
  profile: aws-nat-gateway
  addresses: 2
  members: {zones: [eu-central-1a]}
",
        set: |config, node| entries(node, &mut config.egress_groups, read),
        get: |config| config.egress_groups.iter().filter_map(to_json).collect(),
    },
    List {
        name: "profiles",
        help: "Further kinds of devices, or other figures for those that are known by name; see \
               docs/profiles.md.",
        example: "\
- name: our-balancer
  ports: 14336
  hold: 30s
",
        set: |config, node| entries(node, &mut config.profiles, read),
        get: |config| config.profiles.iter().filter_map(to_json).collect(),
    },
];

fn to_json(value: &impl serde::Serialize) -> Option<Json> {
    let mut json = serde_json::to_value(value).ok()?;
    if let Json::Object(fields) = &mut json {
        fields.retain(|_, value| !value.is_null() && *value != json!([]));
    }
    Some(json)
}

fn entries<T>(
    node: &Node,
    to: &mut Vec<T>,
    read: impl Fn(&Node) -> Result<T, Problem>,
) -> Vec<Problem> {
    let list = match &node.value {
        Value::Nothing => &[],
        Value::List(list) => list.as_slice(),
        other => {
            let what = format!("a list of entries is wanted here, not {}", other.kind());
            return vec![Problem::at(node.at, what)];
        }
    };
    let mut problems = Vec::new();
    to.clear();
    for entry in list {
        match read(entry) {
            Ok(entry) => to.push(entry),
            Err(problem) => problems.push(problem),
        }
    }
    problems
}

/// Thresholds of some destinations.
#[derive(Clone, Debug, PartialEq)]
pub struct DestinationEntry {
    destinations: Vec<Destination>,
    /// Names and values.
    thresholds: Vec<(&'static str, String)>,
}

impl DestinationEntry {
    fn read(node: &Node) -> Result<Self, Problem> {
        const KEYS: [&str; 2] = ["match", "thresholds"];
        let Value::Map(map) = &node.value else {
            let what = format!("a map is wanted here, not {}", node.value.kind());
            return Err(Problem::at(node.at, what));
        };
        let mut entry = Self {
            destinations: Vec::new(),
            thresholds: Vec::new(),
        };
        for line in map {
            match line.key.as_str() {
                "match" => {
                    let texts: Vec<Text<Destination>> = read(&line.node)?;
                    entry.destinations = texts.into_iter().map(|t| t.0).collect();
                }
                "thresholds" => entry.read_thresholds(&line.node, "")?,
                other => {
                    let what = unknown(other, KEYS.into_iter());
                    return Err(Problem::at(line.at, what));
                }
            }
        }
        if entry.destinations.is_empty() {
            return Err(Problem::at(node.at, "`match` is missing or empty"));
        }
        Ok(entry)
    }

    fn read_thresholds(&mut self, node: &Node, above: &str) -> Result<(), Problem> {
        let map = match &node.value {
            Value::Map(map) => map,
            Value::Nothing => return Ok(()),
            other => {
                let what = format!("a map is wanted here, not {}", other.kind());
                return Err(Problem::at(node.at, what));
            }
        };
        for line in map {
            let name = format!("{above}{}", line.key);
            let section = format!("{name}.");
            if SETTINGS.iter().any(|s| s.name.starts_with(&section)) {
                self.read_thresholds(&line.node, &section)?;
                continue;
            }
            let setting = threshold(&name, above).map_err(|what| Problem::at(line.at, what))?;
            let text = line.node.value.text();
            let text = text.ok_or_else(|| Problem::at(line.node.at, "one value is wanted here"))?;
            (setting.set)(&mut Thresholds::default(), &text)
                .map_err(|what| Problem::at(line.node.at, format!("{name}: {what}")))?;
            self.thresholds.push((setting.name, text));
        }
        Ok(())
    }

    /// What it means where everywhere else `everywhere` holds.
    pub(super) fn rules(&self, everywhere: &Thresholds) -> DestinationRules {
        let mut thresholds = everywhere.clone();
        for (name, text) in &self.thresholds {
            if let Some(setting) = SETTINGS.iter().find(|s| s.name == *name) {
                // It was read once already.
                let _ = (setting.set)(&mut thresholds, text);
            }
        }
        DestinationRules {
            destinations: self.destinations.clone(),
            thresholds,
        }
    }

    fn show(&self) -> Json {
        let mut thresholds = serde_json::Map::new();
        for (name, text) in &self.thresholds {
            let (section, field) = name.split_once('.').unwrap_or((name, ""));
            let of = thresholds.entry(section).or_insert_with(|| json!({}));
            of[field] = Json::from(text.as_str());
        }
        json!({"match": texts(&self.destinations), "thresholds": thresholds})
    }
}

/// A threshold that can be set by destination.
fn threshold(name: &str, above: &str) -> Result<&'static Setting, String> {
    match SETTINGS.iter().find(|s| s.name == name) {
        Some(setting) if setting.per_destination => Ok(setting),
        Some(_) => Err(format!(
            "`{name}` is one for the whole host; set it under `thresholds`"
        )),
        None => {
            let settings = SETTINGS.iter().filter(|s| s.per_destination);
            let names = settings.filter_map(|s| match s.name.strip_prefix(above) {
                Some(rest) => rest.split('.').next(),
                None => None,
            });
            let key = name.strip_prefix(above).unwrap_or(name);
            let mut names: Vec<_> = names.collect();
            names.dedup();
            Err(unknown(key, names.into_iter()))
        }
    }
}

fn texts<T: ToString>(list: &[T]) -> Vec<String> {
    list.iter().map(ToString::to_string).collect()
}

/// Alerts that nobody wants to be told of.
#[derive(Clone, Debug, PartialEq)]
pub struct MuteEntry {
    causes: Vec<Verdict>,
    destinations: Vec<Destination>,
    initiators: Vec<Network>,
    until: Option<SystemTime>,
    reason: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MuteKeys {
    #[serde(default)]
    causes: Vec<Text<Causes>>,
    #[serde(default)]
    destinations: Vec<Text<Destination>>,
    #[serde(default)]
    initiators: Vec<Text<Network>>,
    #[serde(default)]
    until: Option<Text<Until>>,
    #[serde(default)]
    reason: String,
}

#[derive(Clone)]
struct Causes(Vec<Verdict>);

impl FromStr for Causes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let causes = Verdict::ALL.into_iter().filter(|v| !v.is_look_alike());
        let of_signature: Vec<_> = causes
            .clone()
            .filter(|v| v.signature() == Some(text))
            .collect();
        if !of_signature.is_empty() {
            return Ok(Self(of_signature));
        }
        let mut words: Vec<_> = causes.clone().map(|v| (v.name(), v)).collect();
        words.extend(causes.filter_map(|v| Some((v.signature()?, v))));
        words.dedup_by_key(|(word, _)| *word);
        word(text, &words).map(|cause| Self(vec![cause]))
    }
}

#[derive(Clone, Copy)]
struct Until(SystemTime);

impl FromStr for Until {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let day = text.len() == "2026-12-31".len();
        let whole = if day {
            format!("{text}T00:00:00Z")
        } else {
            text.to_owned()
        };
        humantime::parse_rfc3339(&whole).map(Self).map_err(|_| {
            format!("`{text}` is not a time in UTC like 2026-12-31T18:00:00Z, nor a day")
        })
    }
}

impl MuteEntry {
    fn read(node: &Node) -> Result<Self, Problem> {
        let keys: MuteKeys = read(node)?;
        let wrong = |at: Place, what: &str| Err(Problem::at(at, what));
        if keys.causes.is_empty() && keys.destinations.is_empty() && keys.initiators.is_empty() {
            return wrong(
                node.at,
                "it would mute every alert: name causes, destinations or initiators (all causes are \
                 `port_exhaustion`)",
            );
        }
        if keys.reason.trim().is_empty() {
            return wrong(
                node.at,
                "`reason` is missing: say why, for who finds the alert muted",
            );
        }
        Ok(Self {
            causes: keys.causes.into_iter().flat_map(|c| c.0.0).collect(),
            destinations: keys.destinations.into_iter().map(|d| d.0).collect(),
            initiators: keys.initiators.into_iter().map(|i| i.0).collect(),
            until: keys.until.map(|until| until.0.0),
            reason: keys.reason,
        })
    }

    /// The same on the core's clock.
    pub(super) fn mute(&self, clock: &WallClock) -> Mute {
        Mute {
            causes: self.causes.clone(),
            destinations: self.destinations.clone(),
            initiators: self.initiators.clone(),
            until: self.until.map(|until| clock.moment(until)),
            reason: self.reason.clone(),
        }
    }

    fn show(&self) -> Json {
        let causes: Vec<_> = self.causes.iter().map(|c| c.name()).collect();
        let until = self.until.map(|u| humantime::format_rfc3339(u).to_string());
        let mut json = json!({
            "causes": causes,
            "destinations": texts(&self.destinations),
            "initiators": texts(&self.initiators),
            "until": until,
            "reason": self.reason,
        });
        if let Json::Object(fields) = &mut json {
            fields.retain(|_, value| !value.is_null() && *value != json!([]));
        }
        json
    }
}
