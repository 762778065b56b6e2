//! The busiest port spaces as a table that fits the screen.

use std::{collections::HashSet, net::SocketAddr};

use tuplewatch_common::address::{Point, PortSpaceKey, Role};

use super::{
    style::{Paint, Style},
    text::{count, number, percent, seconds, shorten},
};
use crate::core::report::SpaceReport;

/// Headroom below these shares of the budget is shown as a warning, or as critical.
const WARNING: f64 = 0.25;
const CRITICAL: f64 = 0.10;

/// Space between columns.
const GAP: usize = 2;

struct Column {
    title: &'static str,
    left: bool,
    /// Columns with the highest number go first where the screen is narrow.
    expendable: u8,
    cell: fn(&SpaceReport) -> String,
}

const COLUMNS: [Column; 11] = [
    Column {
        title: "CLIENT",
        left: true,
        expendable: 0,
        cell: |s| s.initiator().to_string(),
    },
    Column {
        title: "SERVER",
        left: true,
        expendable: 0,
        cell: |s| SocketAddr::new(s.responder(), s.key.responder_port).to_string(),
    },
    Column {
        title: "ROLE",
        left: true,
        expendable: 1,
        cell: |s| role(&s.key).to_owned(),
    },
    Column {
        title: "POINT",
        left: true,
        expendable: 4,
        cell: |s| s.point().to_owned(),
    },
    Column {
        title: "OPENS/S",
        left: false,
        expendable: 2,
        cell: |s| number(s.opens_per_second),
    },
    Column {
        title: "REFUSED",
        left: false,
        expendable: 2,
        cell: |s| count(s.window_refused),
    },
    Column {
        title: "IN USE",
        left: false,
        expendable: 3,
        cell: |s| count(s.in_use),
    },
    Column {
        title: "TIME_WAIT",
        left: false,
        expendable: 3,
        cell: |s| count(s.held()),
    },
    Column {
        title: "PORTS",
        left: false,
        expendable: 5,
        cell: |s| count(s.ports_seen),
    },
    Column {
        title: "LASTS",
        left: false,
        expendable: 4,
        cell: lasts,
    },
    Column {
        title: "HEADROOM",
        left: false,
        expendable: 0,
        cell: headroom,
    },
];

/// Which way the connections go, as this host sees them.
fn role(key: &PortSpaceKey) -> &'static str {
    match Role::from_u8(key.role) {
        Role::Initiator => "out",
        Role::Responder => "in",
        Role::Unknown => "?",
    }
}

/// How long the free ports last, if they will be used up.
fn lasts(space: &SpaceReport) -> String {
    let end = space.outlook.and_then(|o| o.exhausted_in_seconds);
    end.map_or_else(|| "–".to_owned(), seconds)
}

/// `9 of 200 (4.5 %)`.
fn headroom(space: &SpaceReport) -> String {
    let Some(budget) = space.budget else {
        return "–".to_owned();
    };
    let free = budget.headroom();
    let share = percent(free.into(), budget.ports.into());
    format!("{} of {} ({share})", count(free), count(budget.ports))
}

fn paint(space: &SpaceReport) -> Option<Paint> {
    let share = 1.0 - space.utilization()?;
    match share {
        s if s < CRITICAL => Some(Paint::Critical),
        s if s < WARNING => Some(Paint::Warning),
        _ => None,
    }
}

/// The first `room` port spaces, each of them once: one that was seen both on the wire and at the
/// sockets has the same counts twice, and the wire tells more.
pub(super) fn shown(spaces: &[SpaceReport], room: usize) -> Vec<&SpaceReport> {
    let place = |s: &SpaceReport| {
        let key = s.key;
        (key.initiator, key.responder, key.responder_port, key.role)
    };
    let is_wire = |s: &SpaceReport| s.key.point == Point::Wire as u8;
    let wire: HashSet<_> = spaces.iter().filter(|s| is_wire(s)).map(place).collect();
    spaces
        .iter()
        .filter(|s| is_wire(s) || !wire.contains(&place(s)))
        .take(room)
        .collect()
}

/// Lines of at most `width` columns: a heading, and one for each port space.
pub(super) fn table(spaces: &[&SpaceReport], width: usize, style: Style) -> Vec<String> {
    let mut columns: Vec<&Column> = COLUMNS.iter().collect();
    let mut cells: Vec<Vec<String>> = Vec::new();
    let mut widths: Vec<usize> = Vec::new();
    // Leave out columns until the rest fits.
    for _ in 0..COLUMNS.len() {
        cells = spaces
            .iter()
            .map(|s| columns.iter().map(|c| (c.cell)(s)).collect())
            .collect();
        widths = widths_of(&columns, &cells);
        if total(&widths) <= width {
            break;
        }
        let most = columns.iter().map(|c| c.expendable).max().unwrap_or(0);
        if most == 0 {
            break;
        }
        columns.retain(|c| c.expendable < most);
        widths.truncate(columns.len());
    }
    // What is left are two addresses and a number: shorten the addresses.
    let excess = total(&widths).saturating_sub(width);
    if excess > 0 {
        let addresses = widths[0] + widths[1];
        let room = addresses.saturating_sub(excess).max(8);
        widths[0] = widths[0].min(room / 2).max(room.saturating_sub(widths[1]));
        widths[1] = room - widths[0];
    }
    let titles: Vec<String> = columns.iter().map(|c| c.title.to_owned()).collect();
    let mut lines = vec![style.paint(Paint::Dim, &line(&columns, &titles, &widths, width, None))];
    for (space, cells) in spaces.iter().zip(&cells) {
        let paint = paint(space).map(|paint| (style, paint));
        lines.push(line(&columns, cells, &widths, width, paint));
    }
    lines
}

fn widths_of(columns: &[&Column], cells: &[Vec<String>]) -> Vec<usize> {
    let width = |i: usize, title: &str| {
        let widest = cells
            .iter()
            .map(|row| row[i].chars().count())
            .max()
            .unwrap_or(0);
        widest.max(title.len())
    };
    columns
        .iter()
        .enumerate()
        .map(|(i, column)| width(i, column.title))
        .collect()
}

fn total(widths: &[usize]) -> usize {
    widths.iter().sum::<usize>() + GAP * widths.len().saturating_sub(1)
}

/// One line; the last cell is painted after its width is known.
fn line(
    columns: &[&Column],
    cells: &[String],
    widths: &[usize],
    width: usize,
    last: Option<(Style, Paint)>,
) -> String {
    let mut plain = String::new();
    let mut out = String::new();
    for (i, ((column, cell), &size)) in columns.iter().zip(cells).zip(widths).enumerate() {
        let cell = shorten(cell, size);
        let cell = if column.left {
            format!("{cell:<size$}")
        } else {
            format!("{cell:>size$}")
        };
        let gap = if i == 0 { "" } else { "  " };
        plain.push_str(gap);
        plain.push_str(&cell);
        out.push_str(gap);
        match last {
            Some((style, paint)) if i + 1 == columns.len() => {
                out.push_str(&style.paint(paint, &cell));
            }
            _ => out.push_str(&cell),
        }
    }
    if plain.chars().count() > width {
        return plain.chars().take(width).collect();
    }
    if last.is_some() {
        out
    } else {
        out.trim_end().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sink::fixture;

    fn ipv6() -> SpaceReport {
        let mut key = fixture::key();
        key.initiator = [0x20; 16];
        key.responder = [0x21; 16];
        SpaceReport {
            budget: None,
            ..fixture::space(key)
        }
    }

    #[test]
    fn wide_screens_show_every_column() {
        let lines = table(&[&fixture::space(fixture::key())], 120, Style::plain());
        assert_eq!(
            lines,
            [
                "CLIENT        SERVER            ROLE  POINT  OPENS/S  REFUSED  IN USE  \
                 TIME_WAIT  PORTS  LASTS          HEADROOM",
                "198.51.100.7  203.0.113.10:443  in    wire      86.8       42       4  \
                 \u{20}     187    200   18 s  9 of 200 (4.5 %)",
            ]
        );
    }

    #[test]
    fn every_line_fits_however_narrow_the_screen_is() {
        let spaces = [fixture::space(fixture::socket_key()), ipv6()];
        let spaces = [&spaces[0], &spaces[1]];
        for width in [20, 40, 60, 80, 100, 200] {
            for line in table(&spaces, width, Style::plain()) {
                assert!(line.chars().count() <= width, "{width}: {line}");
            }
        }
        let narrow = table(&spaces, 80, Style::plain());
        assert!(
            narrow[0].contains("CLIENT") && narrow[0].contains("HEADROOM"),
            "{}",
            narrow[0]
        );
    }

    #[test]
    fn the_role_is_told_longer_than_the_figures() {
        let spaces = [
            fixture::space(fixture::key()),
            fixture::space(fixture::socket_key()),
            fixture::space(PortSpaceKey {
                role: Role::Unknown as u8,
                ..fixture::key()
            }),
        ];
        let spaces: Vec<&SpaceReport> = spaces.iter().collect();
        let lines = table(&spaces, 60, Style::plain());
        let words = |line: &str| line.split_whitespace().nth(2).map(str::to_owned);
        let roles: Vec<_> = lines.iter().filter_map(|line| words(line)).collect();
        assert_eq!(roles, ["ROLE", "in", "out", "?"]);
        assert!(!lines[0].contains("OPENS/S"), "{}", lines[0]);
    }

    #[test]
    fn a_port_space_is_shown_once() {
        let wire = fixture::key();
        let socket = PortSpaceKey {
            point: Point::Socket as u8,
            netns: 4_026_532_281,
            ..wire
        };
        let port = PortSpaceKey {
            responder_port: 444,
            ..socket
        };
        let role = PortSpaceKey {
            role: Role::Initiator as u8,
            ..socket
        };
        let keys = |order: &[PortSpaceKey], room| {
            let spaces: Vec<_> = order.iter().copied().map(fixture::space).collect();
            let shown = shown(&spaces, room);
            shown.iter().map(|s| s.key).collect::<Vec<_>>()
        };
        // The busiest comes first, whatever its point is.
        assert_eq!(keys(&[socket, wire], 9), [wire]);
        assert_eq!(keys(&[wire, socket], 9), [wire]);
        // Nothing but the sockets saw them; two namespaces are two port spaces.
        let other_netns = PortSpaceKey {
            netns: 4_026_532_300,
            ..port
        };
        assert_eq!(
            keys(&[wire, port, other_netns, role], 9),
            [wire, port, other_netns, role]
        );
        // What is left out takes no room.
        assert_eq!(keys(&[socket, wire, port, role], 2), [wire, port]);
    }

    #[test]
    fn little_headroom_is_painted() {
        let space = fixture::space(fixture::key());
        assert_eq!(paint(&space), Some(Paint::Critical));
        assert_eq!(paint(&ipv6()), None);
        let lines = table(&[&space], 120, Style::new(true));
        assert!(
            lines[1].ends_with("\x1b[1;31m9 of 200 (4.5 %)\x1b[0m"),
            "{:?}",
            lines[1]
        );
    }
}
