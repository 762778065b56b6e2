//! Every setting that is not a list of entries: its name, what it means, how it is read and shown. The
//! file, the environment, the flags and the documentation all go by this table.

mod own;
mod read;

use super::Config;
use crate::core::threshold::{SETTINGS, Setting};
use own::{OWN, Own};

pub(super) use read::word;

/// A value on its way into a setting.
#[derive(Clone, Debug, PartialEq)]
pub enum Given {
    /// A single value.
    Text(String),
    /// A list.
    List(Vec<String>),
    /// Names with values.
    Pairs(Vec<(String, String)>),
    /// The default.
    Default,
}

/// What a setting takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Text,
    List,
    Pairs,
}

/// A setting.
#[derive(Clone, Copy)]
pub(super) enum Key {
    Own(&'static Own),
    Threshold(&'static Setting),
}

/// What thresholds are called in the file, before their own name.
pub(super) const THRESHOLDS: &str = "thresholds.";

/// Every setting, in the order of the documentation.
pub(super) fn all() -> impl Iterator<Item = Key> {
    let own = OWN.iter().map(Key::Own);
    own.chain(SETTINGS.iter().map(Key::Threshold))
}

/// The setting of this name.
pub(super) fn find(name: &str) -> Option<Key> {
    match name.strip_prefix(THRESHOLDS) {
        Some(name) => {
            let setting = SETTINGS.iter().find(|s| s.name == name);
            setting.map(Key::Threshold)
        }
        None => OWN.iter().find(|own| own.name == name).map(Key::Own),
    }
}

impl Key {
    /// Its path in the file.
    pub(super) fn name(self) -> String {
        match self {
            Self::Own(own) => own.name.to_owned(),
            Self::Threshold(setting) => format!("{THRESHOLDS}{}", setting.name),
        }
    }

    /// Its environment variable.
    pub(super) fn variable(self) -> String {
        let name = self.name().to_uppercase().replace('.', "_");
        format!("TUPLEWATCH_{name}")
    }

    /// Its flag.
    pub(super) fn flag(self) -> String {
        match self {
            Self::Own(own) => own.flag.to_owned(),
            Self::Threshold(setting) => format!("--set {}=…", setting.name),
        }
    }

    pub(super) fn help(self) -> &'static str {
        match self {
            Self::Own(own) => own.help,
            Self::Threshold(setting) => setting.help(),
        }
    }

    /// What may be given, in words.
    pub(super) fn takes(self) -> &'static str {
        match self {
            Self::Own(own) => own.takes,
            Self::Threshold(_) => "",
        }
    }

    pub(super) fn kind(self) -> Kind {
        match self {
            Self::Own(own) => own.kind,
            Self::Threshold(_) => Kind::Text,
        }
    }

    pub(super) fn get(self, config: &Config) -> Given {
        match self {
            Self::Own(own) => (own.get)(config),
            Self::Threshold(setting) => Given::Text((setting.get)(&config.thresholds)),
        }
    }

    /// Sets it; says what is wrong otherwise.
    pub(super) fn set(self, config: &mut Config, given: Given) -> Result<(), String> {
        let automatic = |text: &str| text == AUTO;
        let given = match given {
            Given::Default => self.get(&Config::default()),
            other => other,
        };
        match (self, given) {
            (Self::Threshold(setting), Given::Text(text)) => {
                (setting.set)(&mut config.thresholds, &text)
            }
            (Self::Own(own), Given::Text(text)) if automatic(&text) && self.is_automatic() => {
                (own.set)(config, Given::Default)
            }
            (Self::Own(own), given) => match (own.kind, given) {
                (Kind::List, Given::Text(text)) => {
                    let list = text.split(',').map(str::trim).filter(|s| !s.is_empty());
                    (own.set)(config, Given::List(list.map(str::to_owned).collect()))
                }
                (Kind::Pairs, Given::Text(text)) => (own.set)(config, Given::Pairs(pairs(&text)?)),
                (Kind::Text, given @ (Given::Text(_) | Given::Default))
                | (Kind::List, given @ Given::List(_))
                | (Kind::Pairs, given @ Given::Pairs(_)) => (own.set)(config, given),
                (kind, _) => Err(kind.wanted().to_owned()),
            },
            (Self::Threshold(_), _) => Err(Kind::Text.wanted().to_owned()),
        }
    }

    /// Its default is to be found out, and is written `auto`.
    fn is_automatic(self) -> bool {
        self.get(&Config::default()) == Given::Text(AUTO.to_owned())
    }
}

impl Kind {
    const fn wanted(self) -> &'static str {
        match self {
            Self::Text => "one value is wanted here",
            Self::List => "a list is wanted here, such as [a, b]",
            Self::Pairs => "names with values are wanted here, such as {name: value}",
        }
    }
}

const AUTO: &str = "auto";

fn pairs(text: &str) -> Result<Vec<(String, String)>, String> {
    text.split(',')
        .filter(|pair| !pair.trim().is_empty())
        .map(|pair| {
            let (name, value) = pair
                .split_once('=')
                .ok_or_else(|| format!("`{pair}` is not of the form name=value"))?;
            Ok((name.trim().to_owned(), value.trim().to_owned()))
        })
        .collect()
}
