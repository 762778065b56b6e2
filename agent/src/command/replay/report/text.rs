//! For people: the alerts as `run` prints them, then tables.

use std::{
    fmt::Write as _,
    io::{self, Write as _},
    net::SocketAddr,
};

use tuplewatch_common::{
    address::{Address, FourTuple, PortSpaceKey, Role},
    record::{Global, PortSpace},
};

use super::{super::group::Outcome, Report, place};
use crate::{
    core::{
        observation::{ip, role_name},
        report::Change,
        time::Moment,
    },
    sink::{
        Sink as _, WallClock,
        terminal::{Screen, Terminal},
    },
    source::capture::{link, vantage::Vantage},
};

/// Writes text.
pub(in super::super) struct Text {
    screen: Screen,
    alerts: Terminal,
    clock: WallClock,
    top: usize,
}

/// Packets of evidence shown for one finding.
const SHOWN: usize = 24;
/// Addresses named at most.
const NAMED: usize = 4;

impl Text {
    /// Writes to `screen`; the summary has the `top` busiest port spaces.
    pub(in super::super) fn new(screen: Screen, top: usize) -> Self {
        let clock = WallClock::capture();
        Self {
            alerts: Terminal::new(screen.clone(), clock.clone()),
            screen,
            clock,
            top,
        }
    }

    fn print(&self, text: &str) -> io::Result<()> {
        // Messages go the way of permanent lines; there is no other part here.
        self.screen.messages().write_all(text.as_bytes())
    }

    /// `01:02:03.456789`.
    fn time(&self, ns: u64) -> String {
        let whole = self.clock.rfc3339(Moment(ns));
        format!("{}.{:06}", &whole[11..19], ns / 1000 % 1_000_000)
    }
}

impl Report for Text {
    fn begin(&mut self, _: Moment, files: &[String], vantage: &Vantage) -> io::Result<()> {
        self.alerts = Terminal::new(self.screen.clone(), self.clock.clone());
        let mut local: Vec<_> = vantage
            .local
            .iter()
            .take(NAMED)
            .map(|a| ip(a).to_string())
            .collect();
        if vantage.local.len() > NAMED {
            local.push(format!("{} more", vantage.local.len() - NAMED));
        }
        let seen_from = if local.is_empty() {
            place(vantage).to_owned()
        } else {
            local.join(", ")
        };
        self.print(&format!(
            "{}\n  seen from {seen_from}: {}\n\n",
            files.join(", "),
            vantage.why
        ))
    }

    fn changes(&mut self, now: Moment, changes: &[Change]) -> io::Result<()> {
        self.alerts.changes(now, changes)
    }

    fn end(&mut self, outcome: &Outcome, names: &[String]) -> io::Result<()> {
        self.alerts.close()?;
        let mut text = self.counts(outcome);
        text.push_str(&losses(outcome));
        for (index, links, packets) in &outcome.left_out {
            for number in links {
                let name = &names[*index as usize];
                let _ = writeln!(
                    text,
                    "{name}: {packets} packets left out: {}",
                    link::refusal(*number)
                );
            }
        }
        text.push('\n');
        text.push_str(&spaces(&outcome.spaces, self.top));
        if outcome.found.is_empty() {
            text.push_str("\nNothing was found.\n");
        }
        for found in &outcome.found {
            let finding = &found.finding;
            let name = finding.verdict.name();
            let title = finding
                .verdict
                .signature()
                .map_or_else(|| format!("look-alike {name}"), |s| format!("{s} / {name}"));
            let _ = writeln!(
                text,
                "\nEvidence of {title}, {} -> {}",
                any(&finding.space.initiator),
                end(&finding.space.responder, finding.space.responder_port)
            );
            if found.exhibits.is_empty() {
                text.push_str("  no single packet shows it; the counts above do\n");
                continue;
            }
            let mut rows = vec![["FILE", "FRAME", "TIME", "CONNECTION", ""].map(str::to_owned)];
            rows.extend(found.exhibits.iter().take(SHOWN).map(|e| {
                [
                    names[e.frame.file as usize].clone(),
                    e.frame.number.to_string(),
                    self.time(e.frame.time_ns),
                    connection(&e.tuple),
                    e.reading(),
                ]
            }));
            if outcome.files.len() == 1 {
                let rows = rows.into_iter().map(|[_, rest @ ..]| rest);
                text.push_str(&table(rows.collect(), [true, false, false, false]));
            } else {
                text.push_str(&table(rows, [false, true, false, false, false]));
            }
            if found.exhibits.len() > SHOWN {
                let more = found.exhibits.len() - SHOWN;
                let _ = writeln!(
                    text,
                    "  and {more} more (--format json tells them, --export writes them)"
                );
            }
        }
        for (index, fault) in &outcome.faults {
            let _ = writeln!(text, "\n{}: {fault}", names[*index as usize]);
        }
        text.push('\n');
        self.print(&text)
    }
}

impl Text {
    fn counts(&self, outcome: &Outcome) -> String {
        let counts = &outcome.counts;
        let Some(first) = counts.first_ns else {
            return match counts.outside {
                0 => "There is no packet in it.\n".to_owned(),
                n => format!("None of its {n} packets lies between --since and --until.\n"),
            };
        };
        let took = counts.last_ns.saturating_sub(first) as f64 / 1e9;
        let mut text = format!(
            "{} packets in {took:.1} s from {}, {} of them TCP",
            counts.packets,
            self.clock.rfc3339(Moment(first)),
            counts.segments
        );
        for (n, what) in [
            (
                counts.unreadable,
                "cut before the end of the TCP header or malformed",
            ),
            (counts.fragments, "fragments"),
        ] {
            if n > 0 {
                let _ = write!(text, ", {n} {what}");
            }
        }
        text.push_str(".\n");
        if counts.unreadable > counts.segments {
            text.push_str(
                "Most packets are cut before the end of the TCP header, so that next to nothing can be said: \
                 `tcpdump -s 96` keeps enough.\n",
            );
        }
        if outcome.copies > 0 {
            let _ = writeln!(
                text,
                "{} segments were recorded at several places on their way; they count once.",
                outcome.copies
            );
        }
        if outcome.late > 0 {
            let _ = writeln!(
                text,
                "{} segments are older than those before them by more than 50 ms; they count as of the moment they \
                 came. `reordercap IN OUT` (Wireshark) puts a capture into order.",
                outcome.late
            );
        }
        text
    }
}

/// What the tables had no room for.
fn losses(outcome: &Outcome) -> String {
    let mut text = String::new();
    for (index, (name, meaning)) in Global::NAMES.into_iter().enumerate() {
        let lost = outcome.overview.globals[index];
        if Global::is_loss(index) && index != Global::Unreadable as usize && lost > 0 {
            let _ = writeln!(
                text,
                "LOSS  {name}: {meaning} ({lost} times); figures may be too low"
            );
        }
    }
    text
}

/// The port spaces, those in trouble first, then the busiest.
fn spaces(all: &[(PortSpaceKey, PortSpace)], top: usize) -> String {
    if all.is_empty() {
        return "No connection was opened.\n".to_owned();
    }
    let mut ranked: Vec<_> = all.iter().collect();
    ranked.sort_by_key(|(key, p)| {
        let trouble = p.bare_acks + p.syn_timeouts + p.refused + p.unhealed;
        (std::cmp::Reverse((trouble, p.opens)), *key)
    });
    let title = [
        "CLIENT",
        "SERVER",
        "ROLE",
        "OPENS",
        "OK",
        "BARE ACK",
        "RST",
        "SYN AGAIN",
        "UNANSWERED",
        "GIVEN UP",
        "HALF OPEN",
    ];
    let mut rows = vec![title.map(str::to_owned)];
    rows.extend(ranked.iter().take(top).map(|(key, p)| {
        [
            ip(&key.initiator).to_string(),
            end(&key.responder, key.responder_port),
            role_name(Role::from_u8(key.role)).to_owned(),
            p.opens.to_string(),
            p.established.to_string(),
            p.bare_acks.to_string(),
            p.refused.to_string(),
            p.syn_retransmits.to_string(),
            p.syn_timeouts.to_string(),
            p.abandoned.to_string(),
            p.half_open.to_string(),
        ]
    }));
    let right = std::array::from_fn(|i| i > 2);
    let mut text = table(rows, right);
    if ranked.len() > top {
        let _ = writeln!(text, "  and {} more (--top)", ranked.len() - top);
    }
    text
}

/// Columns as wide as they must be; the numbers to the right.
fn table<const N: usize>(rows: Vec<[String; N]>, right: [bool; N]) -> String {
    let mut widths = [0; N];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for ((cell, width), right) in row.iter().zip(widths).zip(right) {
            let _ = if right {
                write!(line, "  {cell:>width$}")
            } else {
                write!(line, "  {cell:<width$}")
            };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

fn connection(tuple: &FourTuple) -> String {
    format!(
        "{} > {}",
        end(&tuple.initiator, tuple.initiator_port),
        end(&tuple.responder, tuple.responder_port)
    )
}

/// An address; a part that does not apply is zero.
fn any(address: &Address) -> String {
    if *address == [0; 16] {
        "*".to_owned()
    } else {
        ip(address).to_string()
    }
}

fn end(address: &Address, port: u16) -> String {
    match (*address == [0; 16], port) {
        (true, 0) => "*".to_owned(),
        (true, port) => format!("*:{port}"),
        (false, port) => SocketAddr::new(ip(address), port).to_string(),
    }
}
