//! What a check says, and all of them together.

use serde::Serialize;

/// Version of the JSON object, with the same promise as that of the JSON lines.
pub const SCHEMA: u32 = 1;

/// How it is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be, or a fact worth knowing.
    Ok,
    /// The agent runs and tells less.
    Warn,
    /// Something does not work that the agent is there for, or that was asked for.
    Fail,
}

/// One thing that was looked at.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Check {
    /// What was looked at, one of [`NAMES`].
    pub name: &'static str,
    /// Which one, where there are several.
    pub of: Option<String>,
    /// How it is.
    pub level: Level,
    /// What was found.
    pub found: String,
    /// What is lost by it.
    pub lost: Option<String>,
    /// What would help.
    pub remedy: Option<String>,
}

/// Every check, in the order in which they are told.
pub const NAMES: [&str; 20] = [
    "config",
    "user_namespace",
    "capability",
    "kernel",
    "btf",
    "lockdown",
    "hook",
    "census",
    "tables",
    "memory",
    "network_namespace",
    "interface",
    "unseen",
    "chain",
    "cgroup",
    "local_ports",
    "otlp",
    "http",
    "agent",
    "state_dir",
];

impl Check {
    /// All is well.
    pub(super) fn ok(name: &'static str, found: impl Into<String>) -> Self {
        debug_assert!(NAMES.contains(&name), "{name}");
        Self {
            name,
            of: None,
            level: Level::Ok,
            found: found.into(),
            lost: None,
            remedy: None,
        }
    }

    /// Something is lost.
    pub(super) fn bad(
        level: Level,
        name: &'static str,
        found: impl Into<String>,
        lost: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let part = |text: String| (!text.is_empty()).then_some(text);
        Self {
            level,
            lost: part(lost.into()),
            remedy: part(remedy.into()),
            ..Self::ok(name, found)
        }
    }

    /// Which one it is.
    pub(super) fn of(self, what: impl Into<String>) -> Self {
        Self {
            of: Some(what.into()),
            ..self
        }
    }
}

/// What of the agent works.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Left {
    /// Every hook.
    All,
    /// The wire, and some of the socket hooks.
    Partly,
    /// The wire only.
    Packets,
    /// Sockets and processes only.
    Sockets,
    /// Nothing that is live.
    Replay,
}

impl Left {
    /// A sentence for people.
    #[must_use]
    pub const fn sentence(self) -> &'static str {
        match self {
            Self::All => "Every hook of `tuplewatch run` works here.",
            Self::Partly => {
                "What is left: the wire, and what the hooks that work tell of sockets and processes."
            }
            Self::Packets => {
                "What is left: what packets tell. Sockets, processes and TIME_WAIT are not known."
            }
            Self::Sockets => {
                "What is left: what sockets and processes tell. Nothing on the wire is seen."
            }
            Self::Replay => {
                "What is left: `tuplewatch replay CAPTURE`, which needs no rights. Nothing live is seen."
            }
        }
    }
}

/// Everything that was looked at.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Version of this object.
    pub schema: u32,
    /// When it was made, RFC 3339.
    pub time: String,
    /// Version of the agent.
    pub version: &'static str,
    /// The worst of the checks.
    pub result: Level,
    /// What of the agent works.
    pub left: Left,
    /// All checks.
    pub checks: Vec<Check>,
}

impl Report {
    /// `checks` in their order.
    pub(super) fn new(time: String, left: Left, mut checks: Vec<Check>) -> Self {
        let place = |check: &Check| NAMES.iter().position(|name| *name == check.name);
        checks.sort_by_key(place);
        Self {
            schema: SCHEMA,
            time,
            version: env!("CARGO_PKG_VERSION"),
            result: checks.iter().map(|c| c.level).max().unwrap_or(Level::Ok),
            left,
            checks,
        }
    }

    /// Whether nothing failed.
    #[must_use]
    pub fn is_fine(&self) -> bool {
        self.result < Level::Fail
    }

    /// How many checks are of this level.
    #[must_use]
    pub fn count(&self, level: Level) -> usize {
        self.checks.iter().filter(|c| c.level == level).count()
    }
}
