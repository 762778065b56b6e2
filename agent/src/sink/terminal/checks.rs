//! What `tuplewatch doctor` found, for people.

use std::io;

use super::{
    NARROWEST, Screen, WIDEST,
    style::{Paint, Style},
    text::{clean, counted, wrap},
};
use crate::doctor::{Check, Level, Report};

/// Writes one paragraph for each check, and what is left in the end.
///
/// # Errors
/// The output cannot be written to.
pub fn checks(screen: &Screen, report: &Report) -> io::Result<()> {
    let width = screen.size().columns.clamp(NARROWEST, WIDEST);
    let style = Style::new(screen.has_colour());
    let mut text = String::new();
    for check in &report.checks {
        paragraph(&mut text, check, width, style);
    }
    text.push('\n');
    let count = |level| report.count(level) as u64;
    let summary = format!(
        "{} ok, {}, {} failed. {}",
        count(Level::Ok),
        counted(count(Level::Warn), "warning", "warnings"),
        count(Level::Fail),
        report.left.sentence()
    );
    for line in wrap(&summary, width) {
        text.push_str(&style.paint(Paint::Strong, &line));
        text.push('\n');
    }
    screen.print(&text)
}

fn paragraph(text: &mut String, check: &Check, width: usize, style: Style) {
    let (word, paint) = match check.level {
        Level::Ok => ("ok  ", Paint::Good),
        Level::Warn => ("warn", Paint::Warning),
        Level::Fail => ("FAIL", Paint::Critical),
    };
    let name = match &check.of {
        Some(of) => format!("{} {of}", check.name),
        None => check.name.to_owned(),
    };
    // Names of interfaces and programs are other people's.
    let first = format!("{}: {}", clean(&name), clean(&check.found));
    part(text, &style.paint(paint, word), &first, width);
    if let Some(lost) = &check.lost {
        part(text, "    ", &format!("lost: {}", clean(lost)), width);
    }
    if let Some(remedy) = &check.remedy {
        part(text, "    ", &format!("do: {}", clean(remedy)), width);
    }
}

/// Lines behind a mark of four columns.
fn part(text: &mut String, mark: &str, content: &str, width: usize) {
    for (i, line) in wrap(content, width - 6).into_iter().enumerate() {
        let mark = if i == 0 { mark } else { "    " };
        text.push_str(mark);
        text.push_str("  ");
        text.push_str(&line);
        text.push('\n');
    }
}
