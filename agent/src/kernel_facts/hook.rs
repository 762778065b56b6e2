//! The programs that read kernel structs, and what a kernel withholds from each of them.

use std::fmt;

use super::layout::Layout;

/// The kernel programs that read kernel structs. (The packet hook reads none.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Hook {
    /// Raw tracepoint `inet_sock_set_state`.
    Lifecycle,
    /// Raw tracepoint `tcp_retransmit_skb`.
    Retransmit,
    /// Raw tracepoint `tcp_send_reset`.
    SendReset,
    /// Raw tracepoint `tcp_receive_reset`.
    ReceiveReset,
    /// Walk over the kernel's socket tables.
    Census,
}

impl Hook {
    /// All hooks.
    pub const ALL: [Self; 5] = [
        Self::Lifecycle,
        Self::Retransmit,
        Self::SendReset,
        Self::ReceiveReset,
        Self::Census,
    ];

    /// The tracepoint that the hook attaches to, if it attaches to one.
    #[must_use]
    pub fn tracepoint(self) -> Option<&'static str> {
        match self {
            Self::Lifecycle => Some("inet_sock_set_state"),
            Self::Retransmit => Some("tcp_retransmit_skb"),
            Self::SendReset => Some("tcp_send_reset"),
            Self::ReceiveReset => Some("tcp_receive_reset"),
            Self::Census => None,
        }
    }
}

impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lifecycle => "lifecycle",
            Self::Retransmit => "retransmit",
            Self::SendReset => "send_reset",
            Self::ReceiveReset => "receive_reset",
            Self::Census => "census",
        })
    }
}

/// Which hooks read a fact.
#[derive(Clone, Copy)]
pub(super) struct Needs {
    pub(super) hooks: &'static [Hook],
    pub(super) essential: bool,
}

impl Needs {
    /// Without it the hooks cannot run.
    pub(super) const fn essential(hooks: &'static [Hook]) -> Self {
        Self {
            hooks,
            essential: true,
        }
    }

    /// Without it the hooks run and tell less.
    pub(super) const fn detail(hooks: &'static [Hook]) -> Self {
        Self {
            hooks,
            essential: false,
        }
    }
}

/// A fact that this kernel does not give, seen from one hook.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Missing {
    /// The hook that would read it.
    pub group: Hook,
    /// `struct.member`, or the tracepoint.
    pub member: String,
    /// What is wrong with it, with near names.
    pub why: String,
    /// True if the hook cannot run without it, false if it only tells less.
    pub essential: bool,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let effect = if self.essential {
            "cannot run"
        } else {
            "tells less"
        };
        let Self {
            group, member, why, ..
        } = self;
        write!(f, "{group} {effect} without {member}: {why}")
    }
}

/// The layout of a kernel and what is missing in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// The facts; [`ABSENT`](super::layout::ABSENT) where one is missing.
    pub layout: Layout,
    /// Facts that some hook would need. Empty on a kernel that has everything.
    pub missing: Vec<Missing>,
}

impl Resolved {
    /// What is missing for one hook.
    pub fn missing_for(&self, hook: Hook) -> impl Iterator<Item = &Missing> {
        self.missing.iter().filter(move |m| m.group == hook)
    }

    /// True if the hook has all it cannot do without.
    #[must_use]
    pub fn can_run(&self, hook: Hook) -> bool {
        self.missing_for(hook).all(|m| !m.essential)
    }
}
