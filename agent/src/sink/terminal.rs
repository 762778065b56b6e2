//! The default sink: alerts for a person to read, and a summary kept up to date where standard
//! output is a terminal.

use std::{collections::HashMap, io};

use tuplewatch_common::record::Global;

use super::{HookStatus, Ready, Sink, WallClock};
use crate::core::{
    alert::{Alert, State},
    finding::Severity,
    report::{Change, Overview},
    time::Moment,
};

mod block;
mod checks;
mod screen;
mod style;
mod table;
#[cfg(test)]
mod tests;
mod text;

pub use checks::checks;
pub use screen::{Messages, Screen};

use block::{Format, Told};
use style::{Paint, Style};
use text::{bytes, clean, counted, wrap};

/// Lines of text longer than this are hard to read.
const WIDEST: usize = 100;
/// Narrower terminals get wrapped lines.
const NARROWEST: usize = 40;
/// Port spaces in the summary.
const SPACES: usize = 12;

/// Writes for people.
pub struct Terminal {
    screen: Screen,
    clock: WallClock,
    /// Severity of the firing alerts that were told.
    told: HashMap<String, Severity>,
    /// Losses are told at their first and then at each tenfold count.
    next_loss: [u64; Global::COUNT as usize],
}

impl Terminal {
    /// Writes to `screen`. `clock` gives the time of day.
    #[must_use]
    pub fn new(screen: Screen, clock: WallClock) -> Self {
        Self {
            screen,
            clock,
            told: HashMap::new(),
            next_loss: [1; Global::COUNT as usize],
        }
    }

    fn style(&self) -> Style {
        Style::new(self.screen.has_colour())
    }

    fn width(&self) -> usize {
        self.screen.size().columns.clamp(NARROWEST, WIDEST)
    }

    fn format(&self) -> Format<'_> {
        Format {
            clock: &self.clock,
            style: self.style(),
            width: self.width(),
        }
    }

    fn alert(&mut self, alert: &Alert) -> String {
        let severity = alert.finding.severity;
        let told = match self.told.get(&alert.id) {
            Some(before) if *before >= severity => Told::Before,
            _ => Told::No,
        };
        match alert.state {
            State::Pending => {}
            State::Firing => {
                self.told.insert(alert.id.clone(), severity);
            }
            State::Resolved => {
                self.told.remove(&alert.id);
            }
        }
        block::alert(&self.format(), alert, told)
    }

    fn losses(&mut self, overview: &Overview) -> String {
        let mut text = String::new();
        for (index, (name, meaning)) in Global::NAMES.into_iter().enumerate() {
            let lost = overview.globals[index];
            if !Global::is_loss(index) || lost < self.next_loss[index] {
                continue;
            }
            self.next_loss[index] = lost.saturating_mul(10);
            let word = self.style().paint(Paint::Warning, "LOSS");
            let times = counted(lost, "time", "times");
            text.push_str(&format!(
                "{word}  {name}: {meaning} ({times}); figures may be too low\n"
            ));
        }
        text
    }

    fn summary(&self, overview: &Overview) -> Vec<String> {
        let size = self.screen.size();
        let style = self.style();
        // Never in the last column: some terminals wrap there.
        let width = size.columns.saturating_sub(1);
        let firing = overview
            .alerts
            .iter()
            .filter(|a| a.state == State::Firing)
            .count() as u64;
        let lost: u64 = (0..overview.globals.len())
            .filter(|&i| Global::is_loss(i))
            .map(|i| overview.globals[i])
            .sum();
        let mut head = format!(
            "{}  {}, {} firing",
            self.format().time(overview.now),
            counted(overview.known_spaces, "port space", "port spaces"),
            counted(firing, "alert", "alerts"),
        );
        if lost > 0 {
            head.push_str(&format!(", {} lost", counted(lost, "record", "records")));
        }
        let head: String = head.chars().take(width).collect();
        let paint = if firing > 0 {
            Paint::Critical
        } else {
            Paint::Good
        };
        let mut lines = vec![style.paint(paint, &head)];
        // Room for the heads and for the cursor; permanent lines keep half of a small screen.
        let room = (size.rows / 2).saturating_sub(3).clamp(1, SPACES);
        let shown = table::shown(&overview.spaces, room);
        if shown.is_empty() {
            lines.push(style.paint(Paint::Dim, "no connection was opened yet"));
        } else {
            lines.extend(table::table(&shown, width, style));
        }
        lines
    }
}

impl Sink for Terminal {
    fn ready(&mut self, _: Moment, ready: &Ready) -> io::Result<()> {
        let style = self.style();
        let interfaces = match ready.interfaces.as_slice() {
            [] => "no interface".to_owned(),
            names => names.join(", "),
        };
        let memory = bytes(ready.memory_bytes);
        let head = format!(
            "tuplewatch {} watches {interfaces} and the sockets of this host ({memory} of kernel maps). \
             Stop it with Ctrl-C.",
            ready.version
        );
        let mut text = String::new();
        let mut add = |line: &str, paint: Option<Paint>| {
            for line in wrap(&clean(line), self.width()) {
                let line = paint.map_or_else(|| line.clone(), |paint| style.paint(paint, &line));
                text.push_str(&line);
                text.push('\n');
            }
        };
        add(&head, None);
        for hook in ready
            .hooks
            .iter()
            .filter(|hook| hook.status != HookStatus::Ok)
        {
            let line = format!(
                "Hook {} is {}: {}",
                hook.name,
                hook.status.name(),
                hook.detail
            );
            add(&line, Some(Paint::Warning));
        }
        for (what, why) in &ready.unseen {
            add(&format!("Not seen: {what} ({why})"), Some(Paint::Dim));
        }
        text.push('\n');
        self.screen.print(&text)
    }

    fn changes(&mut self, now: Moment, changes: &[Change]) -> io::Result<()> {
        let mut text = String::new();
        for change in changes {
            match change {
                Change::Alert(alert) => text.push_str(&self.alert(alert)),
                Change::LookAlike { finding, ended } => {
                    let format = self.format();
                    let at = format.day_time(now);
                    text.push_str(&block::look_alike(&format, finding, *ended, at));
                }
            }
        }
        self.screen.print(&text)
    }

    fn overview(&mut self, overview: &Overview) -> io::Result<()> {
        let losses = self.losses(overview);
        if !losses.is_empty() {
            self.screen.print(&losses)?;
        }
        if self.screen.is_live() {
            self.screen.lower(self.summary(overview))?;
        }
        Ok(())
    }

    fn close(&mut self) -> io::Result<()> {
        let firing = self.told.len();
        if firing > 0 {
            let word = counted(firing as u64, "alert", "alerts");
            self.screen
                .print(&format!("tuplewatch ends with {word} still firing.\n"))?;
        }
        Ok(())
    }
}

impl Format<'_> {
    /// `2025-11-29 10:30:05 UTC`.
    fn day_time(&self, moment: Moment) -> String {
        let text = self.clock.rfc3339(moment);
        format!("{} {} UTC", &text[..10], &text[11..19])
    }

    /// `10:30:05 UTC`.
    fn time(&self, moment: Moment) -> String {
        format!("{} UTC", &self.clock.rfc3339(moment)[11..19])
    }
}
