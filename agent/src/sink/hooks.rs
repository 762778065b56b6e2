//! What the agent says about itself when it begins to observe.

use serde::Serialize;

/// How the start went.
#[derive(Clone, Debug, Default)]
pub struct Ready {
    /// Every hook and what became of it.
    pub hooks: Vec<HookState>,
    /// Interfaces whose packets are seen.
    pub interfaces: Vec<String>,
    /// What is not seen, and why.
    pub unseen: Vec<(String, String)>,
    /// Memory of the kernel side's maps in bytes.
    pub memory_bytes: u64,
    /// The flight recorder, if it is on.
    pub recorder: Option<crate::recorder::Status>,
    /// Version of the agent.
    pub version: &'static str,
}

/// One hook.
#[derive(Clone, Debug, Serialize)]
pub struct HookState {
    /// Its name.
    pub name: String,
    /// Whether it works.
    #[serde(rename = "state")]
    pub status: HookStatus,
    /// What is missing, what is lost by it and what would bring it back; empty if all is well.
    pub detail: String,
}

/// Whether a hook works.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum HookStatus {
    /// It is attached.
    Ok,
    /// It is attached in a way that sees less.
    Degraded,
    /// It is not attached.
    Off,
}

impl HookStatus {
    /// Its name in every output.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Degraded => "degraded",
            Self::Off => "off",
        }
    }
}
