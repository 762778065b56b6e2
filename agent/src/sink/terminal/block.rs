//! An alert or a look-alike as a block of text.

use std::net::SocketAddr;

use tuplewatch_common::address::{Point, PortSpaceKey, Role};

use super::{
    style::{Paint, Style},
    text::{clean, count, counted, duration, number, percent, seconds, wrap},
};
use crate::{
    core::{
        alert::{Alert, State},
        finding::{Evidence, Finding, OpenedBy, Severity},
        observation::ip,
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
    block.head(head, &what, &format!("{state}{}", format.day_time(alert.at)));
    block.text(&place(&finding.space));
    match (alert.state, told) {
        (State::Pending, _) => {
            block.field("Symptom", &refused(&finding.evidence));
            block.field("Next", "it becomes an alert if it lasts");
        }
        (State::Resolved, _) => {
            let began = alert.firing_since.unwrap_or(alert.pending_since);
            let lasted = duration(alert.at.since(began));
            block.field("Lasted", &format!("{lasted}, from {}", format.day_time(began)));
            figures(&mut block, &finding.evidence);
        }
        (State::Firing, Told::Before) => {
            block.field("Since", &since(format, finding, alert));
            figures(&mut block, &finding.evidence);
            opened_by(&mut block, &finding.opened_by);
        }
        (State::Firing, Told::No) => {
            block.text(&finding.summary);
            block.field("Since", &since(format, finding, alert));
            figures(&mut block, &finding.evidence);
            reasons(&mut block, finding);
            opened_by(&mut block, &finding.opened_by);
            block.strong("Do", &finding.remedy);
            block.field("Alert", &alert.id);
        }
    }
    block.end()
}

/// A look-alike that begins or ends.
pub(super) fn look_alike(format: &Format, finding: &Finding, ended: bool, at: String) -> String {
    let mut block = Block::new(format);
    let state = if ended { "ended" } else { "no alert" };
    block.head(("LOOK-ALIKE", Paint::Dim), finding.verdict.name(), &format!("{state}, {at}"));
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
    let server = SocketAddr::new(ip(&key.responder), key.responder_port);
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
    format!("{} → {server}, seen {point}, {role}", ip(&key.initiator))
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

fn refused(e: &Evidence) -> String {
    let share = percent(e.refused_syns, e.opens);
    format!(
        "{} of {} met a bare ACK ({share})",
        counted(e.refused_syns, "SYN", "SYNs"),
        counted(e.opens, "open", "opens"),
    )
}

fn list(parts: &[(u64, &str)]) -> String {
    let told = parts.iter().filter(|(n, _)| *n > 0);
    told.map(|(n, what)| format!("{} {what}", count(*n))).collect::<Vec<_>>().join(", ")
}

fn figures(block: &mut Block, e: &Evidence) {
    let former = list(&[
        (e.refused_after_close, "after the former connection was closed"),
        (e.refused_while_open, "while it was open"),
        (e.refused_half_open, "while it was half open"),
        (e.refused_unknown, "with an unknown former connection"),
    ]);
    let former = if former.is_empty() { former } else { format!(": {former}") };
    block.field("Refused", &format!("{}{former}", refused(e)));
    let outcome = list(&[
        (e.healed, "got through later"),
        (e.unhealed, "did not get through"),
        (e.unanswered, "unanswered in the end"),
        (e.no_listener, "refused by RST"),
        (e.reuse_accepted, "reused four-tuples accepted at once"),
        (e.rsts, "RSTs in answer"),
        (e.syn_retransmits, "SYNs sent again"),
        (e.duplicate_syns, "late duplicate SYNs"),
    ]);
    if !outcome.is_empty() {
        block.field("Outcome", &outcome);
    }
    let mut ports = format!("{} refused", counted(e.refused_ports.into(), "port", "ports"));
    ports.push_str(&format!(", {} seen", count(e.ports_seen)));
    if let Some(pool) = e.pool {
        let size = count(pool.size());
        ports.push_str(&format!(" of the pool {}-{} ({size})", pool.first, pool.last));
    }
    block.field("Ports", &ports);
    let (held, peak) = (count(e.time_wait), count(e.time_wait_peak));
    block.field("Sockets", &format!("{held} in TIME_WAIT (peak {peak}), {} in use", e.in_use));
    if let (Some(min), Some(max)) = (e.reuse_interval_min_seconds, e.reuse_interval_max_seconds) {
        let (min, max) = (seconds(min), seconds(max));
        block.field("Reuse", &format!("{min} to {max} after the end of the former connection"));
    }
    let (rate, window) = (number(e.opens_per_second), seconds(e.window_seconds));
    let (refused, opens) = (count(e.window_refused), count(e.window_opens));
    block.field(
        "Now",
        &format!("{rate} opens/s; {refused} of {opens} opens refused in the last {window}"),
    );
}

fn reasons(block: &mut Block, finding: &Finding) {
    block.field("Confidence", finding.confidence.name());
    for other in &finding.ruled_out {
        block.field("Not", &format!("{}: {}", other.name, other.why));
    }
}

fn opened_by(block: &mut Block, openers: &[OpenedBy]) {
    for o in openers {
        let rate = number(o.opens_per_second);
        let mut text = format!("{}[{}] {rate}/s, {} in all", o.command, o.pid, count(o.opens));
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
        Self { format, out: String::new() }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        core::time::Moment,
        sink::fixture,
    };

    fn format(clock: &WallClock, width: usize) -> Format<'_> {
        Format { clock, style: Style::plain(), width }
    }

    #[test]
    fn a_new_alert_says_what_where_since_when_why_who_and_what_to_do() {
        let clock = WallClock::capture();
        let text = alert(&format(&clock, 100), &fixture::alert(), Told::No);
        let expected = "\
CRITICAL  port_exhaustion / l4_reuse_in_time_wait  firing, 2025-11-29 10:30:05 UTC
  198.51.100.7 → 203.0.113.10:443, seen on the wire, as the one who accepts the connections
  198.51.100.7 reuses source ports to 203.0.113.10:443 while they are in TIME_WAIT
  Since       2025-11-29 10:29:53 UTC (12 s ago), firing since 10:29:54 UTC
  Refused     42 SYNs of 5,210 opens met a bare ACK (0.8 %): 40 after the former connection was
              closed, 1 while it was open, 1 while it was half open
  Outcome     33 got through later, 9 did not get through, 2 unanswered in the end, 12 reused
              four-tuples accepted at once, 30 RSTs in answer, 36 SYNs sent again, 1 late duplicate
              SYNs
  Ports       39 ports refused, 200 seen of the pool 2048-2247 (200)
  Sockets     187 in TIME_WAIT (peak 200), 4 in use
  Reuse       1 s to 58 s after the end of the former connection
  Now         86.8 opens/s; 42 of 5,210 opens refused in the last 1 min
  Confidence  high
  Not         half_open_reconnect: 40 of 42 former connections were closed
  Opened by   curl[4711] 80.2/s, 4,815 in all, each for 80 ms, in /system.slice/batch.service
  Do          curl[4711] opens 80 connections/s of 80 ms each: reuse connections
  Alert       l4_reuse_in_time_wait/wire/responder/198.51.100.7/203.0.113.10:443

";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_repeated_alert_has_the_figures_only() {
        let clock = WallClock::capture();
        let text = alert(&format(&clock, 100), &fixture::alert(), Told::Before);
        assert!(text.contains("still firing"));
        assert!(text.contains("Refused"));
        assert!(!text.contains("Confidence") && !text.contains("  Do "), "{text}");
    }

    #[test]
    fn a_resolved_alert_says_how_long_it_lasted() {
        let clock = WallClock::capture();
        let mut resolved = fixture::alert();
        resolved.state = State::Resolved;
        resolved.at = Moment(fixture::NOW.0 + 125_000_000_000);
        resolved.resolved_at = Some(resolved.at);
        let text = alert(&format(&clock, 100), &resolved, Told::Before);
        let head = "RESOLVED  port_exhaustion / l4_reuse_in_time_wait  2025-11-29 10:32:10 UTC\n";
        assert!(text.starts_with(head), "{text}");
        assert!(text.contains("Lasted      2 min 16 s, from 2025-11-29 10:29:54 UTC"), "{text}");
    }

    #[test]
    fn lines_fit_the_width_and_carry_no_control_characters() {
        let clock = WallClock::capture();
        let mut evil = fixture::alert();
        evil.finding.opened_by[0].command = "\x1b[2J\x07".into();
        evil.finding.remedy = "a\x1b]0;title\x07b".into();
        for width in [40, 60, 80, 100] {
            let text = alert(&format(&clock, width), &evil, Told::No);
            assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text}");
            // The heading and single words, such as an identity, are never broken.
            for line in text.lines().skip(1) {
                let long_word = line.split(' ').any(|word| word.len() > width / 2);
                assert!(long_word || line.chars().count() <= width, "{width}: {line}");
            }
        }
    }

    #[test]
    fn a_look_alike_says_that_it_is_no_alert() {
        let clock = WallClock::capture();
        let text = look_alike(&format(&clock, 100), &fixture::finding(), false, "now".into());
        assert!(text.starts_with("LOOK-ALIKE  l4_reuse_in_time_wait  no alert, now\n"), "{text}");
    }
}
