//! JSON lines: those of `run`, and two more that only a capture has.

use std::io::{self, Write};

use serde::Serialize;

use super::{
    super::group::{Found, Outcome},
    Report, place,
};
use crate::{
    core::{observation::ip, report::Change, time::Moment},
    sink::{
        Ready, Sink as _, WallClock,
        json::{Json as JsonLines, write_line},
    },
    source::capture::{
        evidence::Exhibit,
        tables::{InMemory, Limits},
        vantage::Vantage,
    },
};

/// Writes JSON lines.
pub(in super::super) struct Json<W> {
    lines: JsonLines<Shared<W>>,
    out: Shared<W>,
    clock: WallClock,
}

/// Both writers of this report have the same output.
struct Shared<W>(std::rc::Rc<std::cell::RefCell<W>>);

impl<W> Clone for Shared<W> {
    fn clone(&self) -> Self {
        Self(std::rc::Rc::clone(&self.0))
    }
}

impl<W: Write> Write for Shared<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.borrow_mut().write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.0.borrow_mut().flush()
    }
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Line<'a> {
    Evidence {
        /// The alert's id, or the look-alike's name.
        of: &'a str,
        file: &'a str,
        frame: u64,
        #[serde(rename = "client.address")]
        client_address: String,
        #[serde(rename = "client.port")]
        client_port: u16,
        #[serde(rename = "server.address")]
        server_address: String,
        #[serde(rename = "server.port")]
        server_port: u16,
        reading: String,
    },
    Replay {
        files: Vec<&'a str>,
        interfaces: &'a [String],
        vantage: &'static str,
        local: Vec<String>,
        why: &'a str,
        begin: Option<String>,
        packets: u64,
        segments: u64,
        unreadable: u64,
        fragments: u64,
        late: u64,
        copies: u64,
        left_out: u64,
        findings: Vec<&'static str>,
        look_alikes: Vec<&'static str>,
        faults: Vec<Damaged<'a>>,
    },
}

#[derive(Serialize)]
struct Damaged<'a> {
    file: &'a str,
    offset: u64,
    reason: String,
}

impl<W: Write> Json<W> {
    /// Writes to `out`.
    pub(in super::super) fn new(out: W) -> Self {
        let out = Shared(std::rc::Rc::new(std::cell::RefCell::new(out)));
        let clock = WallClock::capture();
        Self {
            lines: JsonLines::new(out.clone(), clock.clone()),
            out,
            clock,
        }
    }

    fn write(&mut self, at: Moment, line: &Line<'_>) -> io::Result<()> {
        write_line(&mut self.out, &self.clock, at, line)
    }

    fn exhibit(&mut self, found: &Found, exhibit: &Exhibit, names: &[String]) -> io::Result<()> {
        let (frame, tuple) = (exhibit.frame, exhibit.tuple);
        let line = Line::Evidence {
            of: found
                .alert
                .as_deref()
                .unwrap_or_else(|| found.finding.verdict.name()),
            file: &names[frame.file as usize],
            frame: frame.number,
            client_address: ip(&tuple.initiator).to_string(),
            client_port: tuple.initiator_port,
            server_address: ip(&tuple.responder).to_string(),
            server_port: tuple.responder_port,
            reading: exhibit.reading(),
        };
        self.write(Moment(frame.time_ns), &line)
    }
}

impl<W: Write> Report for Json<W> {
    fn begin(&mut self, now: Moment, files: &[String], _: &Vantage) -> io::Result<()> {
        let ready = Ready {
            interfaces: files.to_vec(),
            memory_bytes: InMemory::fixed_bytes(&Limits::default()),
            version: env!("CARGO_PKG_VERSION"),
            ..Ready::default()
        };
        self.lines.ready(now, &ready)
    }

    fn changes(&mut self, now: Moment, changes: &[Change]) -> io::Result<()> {
        self.lines.changes(now, changes)
    }

    fn end(&mut self, outcome: &Outcome, names: &[String]) -> io::Result<()> {
        self.lines.overview(&outcome.overview)?;
        for found in &outcome.found {
            for exhibit in &found.exhibits {
                self.exhibit(found, exhibit, names)?;
            }
        }
        let name = |index: u32| names[index as usize].as_str();
        let verdicts = |alerts: bool| {
            let of = outcome.found.iter();
            of.filter(|f| f.alert.is_some() == alerts)
                .map(|f| f.finding.verdict.name())
                .collect()
        };
        let line = Line::Replay {
            files: outcome.files.iter().map(|i| name(*i)).collect(),
            interfaces: &outcome.interfaces,
            vantage: place(&outcome.vantage),
            local: outcome
                .vantage
                .local
                .iter()
                .map(|a| ip(a).to_string())
                .collect(),
            why: &outcome.vantage.why,
            begin: outcome
                .counts
                .first_ns
                .map(|ns| self.clock.rfc3339(Moment(ns))),
            packets: outcome.counts.packets,
            segments: outcome.counts.segments,
            unreadable: outcome.counts.unreadable,
            fragments: outcome.counts.fragments,
            late: outcome.late,
            copies: outcome.copies,
            left_out: outcome.left_out.iter().map(|(_, _, n)| n).sum(),
            findings: verdicts(true),
            look_alikes: verdicts(false),
            faults: outcome
                .faults
                .iter()
                .map(|(index, fault)| Damaged {
                    file: name(*index),
                    offset: fault.offset,
                    reason: fault.reason.to_string(),
                })
                .collect(),
        };
        self.write(outcome.end, &line)
    }
}
