//! Permanent lines, and below them a part that is written anew in place.

use std::{
    io::{self, IsTerminal, Write},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rustix::termios::tcgetwinsize;

/// Columns and rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Size {
    pub(super) columns: usize,
    pub(super) rows: usize,
}

/// Where no terminal tells its size.
const PLAIN: Size = Size {
    columns: 80,
    rows: usize::MAX,
};

/// What the terminal sink writes to. Clones share the same screen.
///
/// Messages of the agent must go through it too ([`Screen::messages`]) where they reach the same
/// terminal: a line from elsewhere would be taken for a part of the summary and be overwritten.
#[derive(Clone)]
pub struct Screen(Arc<Mutex<Inner>>);

struct Inner {
    out: Box<dyn Write + Send>,
    size: Box<dyn FnMut() -> Option<Size> + Send>,
    live: bool,
    colour: bool,
    /// Lines of the part that is written anew.
    lower: Vec<String>,
    /// The size and the number of lines with which that part stands on the screen.
    drawn: Option<(Size, usize)>,
}

impl Screen {
    /// Standard output. It is live when it is a terminal that can move its cursor, and coloured
    /// unless `NO_COLOR` is set.
    #[must_use]
    pub fn stdout() -> Self {
        let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        let live = io::stdout().is_terminal() && !dumb;
        let size = || {
            let size = tcgetwinsize(io::stdout()).ok()?;
            let (columns, rows) = (size.ws_col.into(), size.ws_row.into());
            (columns > 0 && rows > 0).then_some(Size { columns, rows })
        };
        Self::new(io::stdout(), size, live, live && !set("NO_COLOR"))
    }

    /// Any writer, as if it were a file.
    #[must_use]
    pub fn plain(out: impl Write + Send + 'static) -> Self {
        Self::new(out, || None, false, false)
    }

    pub(super) fn new(
        out: impl Write + Send + 'static,
        size: impl FnMut() -> Option<Size> + Send + 'static,
        live: bool,
        colour: bool,
    ) -> Self {
        Self(Arc::new(Mutex::new(Inner {
            out: Box::new(out),
            size: Box::new(size),
            live,
            colour,
            lower: Vec::new(),
            drawn: None,
        })))
    }

    /// A writer for messages of the agent that keeps clear of the summary. It writes to standard
    /// output: use it only where standard error is the same terminal.
    #[must_use]
    pub fn messages(&self) -> Messages {
        Messages(self.clone())
    }

    /// Whether the lower part is shown at all.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.lock().live
    }

    pub(super) fn has_colour(&self) -> bool {
        self.lock().colour
    }

    pub(super) fn size(&self) -> Size {
        (self.lock().size)().unwrap_or(PLAIN)
    }

    /// Writes permanent text, which ends with a newline.
    pub(super) fn print(&self, text: &str) -> io::Result<()> {
        self.lock().write(text)
    }

    /// Replaces the lower part. Lines must not be wider than the screen.
    pub(super) fn lower(&self, lines: Vec<String>) -> io::Result<()> {
        let mut inner = self.lock();
        inner.lower = lines;
        inner.write("")
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic while drawing leaves at worst a line too many on the screen.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn write(&mut self, permanent: &str) -> io::Result<()> {
        let size = (self.size)().unwrap_or(PLAIN);
        let mut text = String::new();
        // After a resize the old lines may have been wrapped or not, which no terminal tells: they
        // stay, and nothing above them is put at risk.
        if let Some((before, lines)) = self.drawn.take()
            && before == size
        {
            text.push_str(&format!("\x1b[{lines}A\r\x1b[J"));
        }
        text.push_str(permanent);
        // The cursor cannot go up further than the screen is high.
        let lines = self.lower.len().min(size.rows.saturating_sub(1));
        if self.live && lines > 0 {
            for line in &self.lower[..lines] {
                text.push_str(line);
                text.push('\n');
            }
            self.drawn = Some((size, lines));
        }
        self.out.write_all(text.as_bytes())?;
        self.out.flush()
    }
}

/// Writes messages of the agent above the summary.
#[derive(Clone)]
pub struct Messages(Screen);

impl Write for Messages {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut text = String::from_utf8_lossy(bytes).into_owned();
        if !text.ends_with('\n') {
            text.push('\n');
        }
        self.0.print(&text)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::sink::fixture;

    fn screen(live: bool) -> (Screen, impl Fn() -> String, Arc<AtomicUsize>) {
        let (out, text) = fixture::shared();
        let columns = Arc::new(AtomicUsize::new(80));
        let seen = Arc::clone(&columns);
        let size = move || {
            Some(Size {
                columns: seen.load(Ordering::Relaxed),
                rows: 4,
            })
        };
        (Screen::new(out, size, live, false), text, columns)
    }

    #[test]
    fn permanent_lines_stay_above_the_lower_part() {
        let (screen, text, _) = screen(true);
        screen.lower(vec!["summary 1".into()]).unwrap();
        screen.print("alert\n").unwrap();
        screen.messages().write_all(b"message").unwrap();
        screen
            .lower(vec!["summary 2".into(), "more".into()])
            .unwrap();
        screen.lower(vec!["summary 3".into()]).unwrap();
        let up = |n: usize| format!("\x1b[{n}A\r\x1b[J");
        let expected = [
            "summary 1\n",
            &up(1),
            "alert\nsummary 1\n",
            &up(1),
            "message\nsummary 1\n",
            &up(1),
            "summary 2\nmore\n",
            &up(2),
            "summary 3\n",
        ];
        assert_eq!(text(), expected.concat());
    }

    #[test]
    fn after_a_resize_nothing_is_erased() {
        let (screen, text, columns) = screen(true);
        screen.lower(vec!["summary 1".into()]).unwrap();
        columns.store(60, Ordering::Relaxed);
        screen.lower(vec!["summary 2".into()]).unwrap();
        assert_eq!(text(), "summary 1\nsummary 2\n");
        screen.lower(vec!["summary 3".into()]).unwrap();
        assert!(text().ends_with("\x1b[1A\r\x1b[Jsummary 3\n"));
    }

    #[test]
    fn the_lower_part_is_never_higher_than_the_screen() {
        let (screen, text, _) = screen(true);
        screen
            .lower((0..9).map(|i| i.to_string()).collect())
            .unwrap();
        assert_eq!(text(), "0\n1\n2\n");
    }

    #[test]
    fn a_file_gets_permanent_lines_only() {
        let (screen, text, _) = screen(false);
        screen.lower(vec!["summary".into()]).unwrap();
        screen.print("alert\n").unwrap();
        assert_eq!(text(), "alert\n");
    }
}
