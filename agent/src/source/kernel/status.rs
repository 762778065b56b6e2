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
    /// If not: why. Of one that works: where it is.
    pub why: String,
    /// What is lost by it, if the reason does not say so. Of one that works: what it has missed.
    pub lost: String,
    /// What would bring it back, a sentence.
    pub remedy: String,
}

impl HookStatus {
    /// Why, what is lost and what would bring it back, in one text.
    #[must_use]
    pub fn detail(&self) -> String {
        let mut text = self.why.clone();
        for (between, part) in [("; ", &self.lost), (". ", &self.remedy)] {
            if !part.is_empty() {
                if !text.is_empty() {
                    text.push_str(between);
                }
                text.push_str(part);
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_make_one_text() {
        let mut status = HookStatus {
            name: "packet".into(),
            verdict: Verdict::Off,
            why: "eth0: refused".into(),
            lost: "nothing is seen".into(),
            remedy: "It needs a right".into(),
        };
        let all = "eth0: refused; nothing is seen. It needs a right";
        assert_eq!(status.detail(), all);
        status.lost.clear();
        assert_eq!(status.detail(), "eth0: refused. It needs a right");
        status.remedy.clear();
        status.lost = "one event".into();
        status.why.clear();
        assert_eq!(status.detail(), "one event");
        status.lost.clear();
        status.why = "eth0: refused".into();
        assert_eq!(status.detail(), "eth0: refused");
    }
}
