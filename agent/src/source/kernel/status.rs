//! The verdict of each hook.

use serde::Serialize;

/// Whether a hook works.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// It works.
    Ok,
    /// It works and tells less.
    Degraded,
    /// It could not be attached.
    Off,
}

/// One hook and what became of it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct HookStatus {
    /// The hook.
    pub name: String,
    /// Whether it works.
    pub verdict: Verdict,
    /// If not: why, what is lost, and what would bring it back.
    pub detail: String,
}
