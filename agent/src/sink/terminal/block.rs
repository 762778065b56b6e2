//! An alert or a look-alike as a block of text.

use tuplewatch_common::address::{Point, PortSpaceKey, Role};

use super::{
    style::{Paint, Style},
    text::{clean, count, counted, duration, number, percent, seconds, wrap},
};
use crate::{
    core::{
        alert::{Alert, State},
        finding::{Evidence, Finding, OpenedBy, Severity},
        observation::place as ends,
    },
    sink::WallClock,
};

/// Width of the labels.
const LABEL: usize = 12;

/// How blocks are written.
pub(super) struct Format<'a> {
    pub(super) clock: &'a WallClock,
    pub(super) style: Style,
    /// Columns.
    pub(super) width: usize,
}

/// How much of an alert has been told before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Told {
    /// Nothing, or something less bad.
    No,
    /// The same, with older figures.
    Before,
}

/// An alert in any state.
pub(super) fn alert(format: &Format, alert: &Alert, told: Told) -> String {
    let finding = &alert.finding;
    let mut block = Block::new(format);
    let what = format!(
        "{} / {}",
        finding.verdict.signature().unwrap_or("look-alike"),
        finding.verdict.name()
    );
    let state = match (alert.state, told) {
        (State::Firing, Told::Before) => "still firing, ",
        (State::Firing, Told::No) => "firing, ",
        (State::Pending | State::Resolved, _) => "",
    };
    let head = match alert.state {
        State::Resolved => ("RESOLVED", Paint::Good),
        State::Pending => ("PENDING", Paint::Dim),
        State::Firing => severity(finding.severity),
    };
    block.head(
        head,
        &what,
        &format!("{state}{}", format.day_time(alert.at)),
    );
    block.text(&place(&finding.space));
    match (alert.state, told) {
        (State::Pending, _) => {
            block.field("Symptom", &symptom(finding));
            block.field("Next", "it becomes an alert if it lasts");
        }
        (State::Resolved, _) => {
            let began = alert.firing_since.unwrap_or(alert.pending_since);
            let lasted = duration(alert.at.since(began));
            block.field(
                "Lasted",
                &format!("{lasted}, from {}", format.day_time(began)),
            );
            figures(&mut block, &finding.evidence);
        }
        (State::Firing, Told::Before) => {
            block.field("Since", &since(format, finding, alert));
            figures(&mut block, &finding.evidence);
            opened_by(&mut block, &finding.opened_by);
            packets(&mut block, alert);
        }
        (State::Firing, Told::No) => {
            block.text(&finding.summary);
            block.field("Since", &since(format, finding, alert));
            figures(&mut block, &finding.evidence);
            reasons(&mut block, finding);
            opened_by(&mut block, &finding.opened_by);
            block.strong("Do", &finding.remedy);
            packets(&mut block, alert);
            block.field("Alert", &alert.id);
        }
    }
    block.end()
}

/// A look-alike that begins or ends.
pub(super) fn look_alike(format: &Format, finding: &Finding, ended: bool, at: String) -> String {
    let mut block = Block::new(format);
    let state = if ended { "ended" } else { "no alert" };
    block.head(
        ("LOOK-ALIKE", Paint::Dim),
        finding.verdict.name(),
        &format!("{state}, {at}"),
    );
    block.text(&place(&finding.space));
    if !ended {
        block.text(&finding.summary);
    }
    figures(&mut block, &finding.evidence);
    if !ended {
        reasons(&mut block, finding);
        opened_by(&mut block, &finding.opened_by);
        if !finding.remedy.is_empty() {
            block.field("Do", &finding.remedy);
        }
    }
    block.end()
}

/// A port space with who sees it.
fn place(key: &PortSpaceKey) -> String {
    let role = match Role::from_u8(key.role) {
        Role::Initiator => "as the one who opens the connections",
        Role::Responder => "as the one who accepts the connections",
        Role::Unknown => "in an unknown role",
    };
    let point = match Point::from_u8(key.point) {
        Point::Wire => "on the wire".to_owned(),
        Point::Socket if key.netns == 0 => "at the sockets".to_owned(),
        Point::Socket => format!("at the sockets of network namespace {}", key.netns),
    };
    format!("{}, seen {point}, {role}", ends(key))
}

fn severity(severity: Severity) -> (&'static str, Paint) {
    match severity {
        Severity::Info => ("INFO", Paint::Good),
        Severity::Warning => ("WARNING", Paint::Warning),
        Severity::Critical => ("CRITICAL", Paint::Critical),
    }
}

fn since(format: &Format, finding: &Finding, alert: &Alert) -> String {
    let first = format.day_time(finding.since);
    let ago = duration(alert.at.since(finding.since));
    match alert.firing_since {
        Some(firing) if firing != alert.at => {
            format!("{first} ({ago} ago), firing since {}", format.time(firing))
        }
        _ => format!("{first} ({ago} ago)"),
    }
}

fn symptom(finding: &Finding) -> String {
    if finding.evidence.refused_syns > 0 {
        refused(&finding.evidence)
    } else {
        finding.summary.clone()
    }
}

fn refused(e: &Evidence) -> String {
    let share = percent(e.refused_syns, e.opens);
    format!(
        "{} of {} met a bare ACK ({share})",
        counted(e.refused_syns, "SYN", "SYNs"),
        counted(e.opens, "open", "opens"),
    )
}

/// Those that are not zero.
fn list(parts: &[(u64, &str)]) -> String {
    let told = parts.iter().filter(|(n, _)| *n > 0);
    told.map(|(n, what)| format!("{} {what}", count(*n)))
        .collect::<Vec<_>>()
        .join(", ")
}

fn figures(block: &mut Block, e: &Evidence) {
    figures::refused(block, e);
    figures::stuck(block, e);
    figures::stall(block, e);
    figures::idle(block, e);
    figures::placement(block, e);
    figures::lost(block, e);
    figures::outcome(block, e);
    figures::ports(block, e);
    figures::budget(block, e);
    figures::rates(block, e);
}

fn reasons(block: &mut Block, finding: &Finding) {
    block.field("Confidence", finding.confidence.name());
    for other in &finding.ruled_out {
        block.field("Not", &format!("{}: {}", other.name, other.why));
    }
}

/// Where to look at the packets behind it.
fn packets(block: &mut Block, alert: &Alert) {
    if let Some(path) = &alert.evidence_file {
        block.field("Packets", &path.display().to_string());
    }
}

fn opened_by(block: &mut Block, openers: &[OpenedBy]) {
    for o in openers {
        let rate = number(o.opens_per_second);
        let mut text = format!(
            "{}[{}] {rate}/s, {} in all",
            o.command,
            o.pid,
            count(o.opens)
        );
        if o.no_local_port > 0 {
            text.push_str(&format!(", {} without a port", count(o.no_local_port)));
        }
        if let Some(lifetime) = o.lifetime_seconds {
            text.push_str(&format!(", each for {}", seconds(lifetime)));
        }
        if let Some(cgroup) = &o.cgroup {
            text.push_str(&format!(", in {cgroup}"));
        }
        block.field("Opened by", &text);
    }
}

struct Block<'a> {
    format: &'a Format<'a>,
    out: String,
}

impl<'a> Block<'a> {
    const fn new(format: &'a Format<'a>) -> Self {
        Self {
            format,
            out: String::new(),
        }
    }

    fn head(&mut self, (word, paint): (&str, Paint), what: &str, rest: &str) {
        let style = self.format.style;
        let word = style.paint(paint, word);
        let what = style.paint(Paint::Strong, what);
        let rest = style.paint(Paint::Dim, rest);
        self.out.push_str(&format!("{word}  {what}  {rest}\n"));
    }

    fn text(&mut self, text: &str) {
        for line in wrap(&clean(text), self.format.width.saturating_sub(2)) {
            self.out.push_str(&format!("  {line}\n"));
        }
    }

    fn field(&mut self, label: &str, text: &str) {
        self.labelled(Paint::Dim, label, text);
    }

    fn strong(&mut self, label: &str, text: &str) {
        self.labelled(Paint::Strong, label, text);
    }

    fn labelled(&mut self, paint: Paint, label: &str, text: &str) {
        let width = self.format.width.saturating_sub(2 + LABEL).max(20);
        let mut label = self.format.style.paint(paint, &format!("{label:<LABEL$}"));
        for line in wrap(&clean(text), width) {
            let line = match paint {
                Paint::Strong => self.format.style.paint(paint, &line),
                _ => line,
            };
            self.out.push_str(&format!("  {label}{line}\n"));
            label = " ".repeat(LABEL);
        }
    }

    fn end(mut self) -> String {
        self.out.push('\n');
        self.out
    }
}

mod figures;
#[cfg(test)]
mod tests;
