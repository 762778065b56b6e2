//! Who takes our filters away when the agent is killed.
//!
//! Links of tcx end with the process, however it ends. Filters of clsact (below 6.6) do not. Where there are any, the
//! agent starts itself a second time as a guard, which holds one end of a pipe. It is told of each filter before that is
//! set. When the pipe closes, because the agent has ended or was killed, it takes away what is still there of them, and
//! a qdisc that the agent has made if that is empty. Nothing else: a filter counts as ours only if its handle and the
//! kernel's number of its program are those that it was told, so an agent that was started meanwhile keeps its own.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, BufRead, Write as _},
    os::unix::process::CommandExt as _,
    process::{Child, ChildStdin, Command, Stdio},
    time::{Duration, Instant},
};

use tracing::warn;

use crate::kernel_facts::interfaces::clsact::{self, Side};

/// The subcommand that makes a process a guard.
pub const COMMAND: &str = "guard";
/// How long an agent that ends in order waits for its guard.
const FAREWELL: Duration = Duration::from_secs(2);

/// A filter of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Filter {
    pub side: Side,
    pub handle: u32,
    /// The kernel's number of its program.
    pub program: u32,
}

/// What would stay behind, by the number of the interface.
#[derive(Debug, Default, PartialEq, Eq)]
struct Left {
    filters: BTreeMap<u32, Vec<Filter>>,
    /// Interfaces that were given the qdisc.
    made: BTreeSet<u32>,
}

/// The agent's side.
#[derive(Default)]
pub(super) struct Guard {
    left: Left,
    process: Option<(Child, ChildStdin)>,
    /// It could not be started or spoken to; that was said.
    is_missing: bool,
}

impl Guard {
    /// A filter will be set.
    pub(super) fn filter(&mut self, index: u32, filter: Filter) {
        self.left.filters.entry(index).or_default().push(filter);
        self.tell(&line(index, filter));
    }

    /// An interface will be given the qdisc.
    pub(super) fn qdisc(&mut self, index: u32) {
        self.left.made.insert(index);
        self.tell(&format!("qdisc {index}\n"));
    }

    /// The filters of an interface were taken away.
    pub(super) fn forget(&mut self, index: u32) {
        if self.left.filters.remove(&index).is_some() {
            self.tell(&format!("forget {index}\n"));
        }
    }

    /// Interfaces that were given the qdisc.
    pub(super) fn made(&self) -> impl Iterator<Item = u32> {
        self.left.made.iter().copied()
    }

    /// Replaces a guard that somebody has ended.
    pub(super) fn look_after(&mut self) {
        if let Some((child, _)) = &mut self.process
            && !matches!(child.try_wait(), Ok(None))
        {
            self.process = None;
            self.tell("");
        }
    }

    /// Tells the guard; starts it first if there is none.
    fn tell(&mut self, news: &str) {
        let told = match &mut self.process {
            Some((_, pipe)) => pipe.write_all(news.as_bytes()),
            None => self.start(),
        };
        let Err(error) = told else { return };
        self.process = None;
        if !std::mem::replace(&mut self.is_missing, true) {
            warn!(
                "filters of clsact would stay if this process were killed, until the next start: no guard: {error}"
            );
        }
    }

    fn start(&mut self) -> io::Result<()> {
        let mut child = Command::new("/proc/self/exe")
            .arg0("tuplewatch-guard")
            .arg(COMMAND)
            .env_clear()
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()?;
        let Some(mut pipe) = child.stdin.take() else {
            return Err(io::Error::other("no pipe"));
        };
        // A guard that does not read must not hold the agent up.
        rustix::io::ioctl_fionbio(&pipe, true)?;
        let said = pipe.write_all(self.left.lines().as_bytes());
        self.process = Some((child, pipe));
        self.is_missing = false;
        said
    }
}

impl Drop for Guard {
    /// It takes away a qdisc that is not needed any more.
    fn drop(&mut self) {
        let Some((mut child, pipe)) = self.process.take() else {
            return;
        };
        drop(pipe);
        let end = Instant::now() + FAREWELL;
        while matches!(child.try_wait(), Ok(None)) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn line(index: u32, filter: Filter) -> String {
    let side = match filter.side {
        Side::Ingress => "in",
        Side::Egress => "out",
    };
    format!(
        "filter {index} {side} {} {}\n",
        filter.handle, filter.program
    )
}

impl Left {
    /// All of it, as the guard is told.
    fn lines(&self) -> String {
        let made = self.made.iter().map(|index| format!("qdisc {index}\n"));
        let filters = self.filters.iter();
        let filters = filters.flat_map(|(index, all)| all.iter().map(|f| line(*index, *f)));
        made.chain(filters).collect()
    }

    /// Takes in a line; `None` if it is none of ours.
    fn hear(&mut self, line: &str) -> Option<()> {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["qdisc", index] => {
                self.made.insert(index.parse().ok()?);
            }
            ["forget", index] => {
                self.filters.remove(&index.parse().ok()?);
            }
            ["filter", index, side, handle, program] => {
                let filter = Filter {
                    side: match side {
                        "in" => Side::Ingress,
                        "out" => Side::Egress,
                        _ => return None,
                    },
                    handle: handle.parse().ok()?,
                    program: program.parse().ok()?,
                };
                let filters = self.filters.entry(index.parse().ok()?).or_default();
                filters.push(filter);
            }
            _ => return None,
        }
        Some(())
    }

    /// Hears until the other end of the pipe is closed. A line that the agent's death has cut short tells of a filter
    /// that was not set yet.
    fn read(mut from: impl BufRead) -> Self {
        let mut left = Self::default();
        let mut line = String::new();
        while from.read_line(&mut line).is_ok_and(|length| length > 0) {
            if let Some(whole) = line.strip_suffix('\n') {
                left.hear(whole);
            }
            line.clear();
        }
        left
    }

    /// Takes it away, and gives the number of filters that were there and what failed.
    fn remove(&self) -> (usize, Vec<String>) {
        let _alone = clsact::Turn::take();
        let mut removed = 0;
        let mut errors = Vec::new();
        for (index, filters) in &self.filters {
            for filter in filters {
                match filter.remove(*index) {
                    Ok(was_there) => removed += usize::from(was_there),
                    Err(error) => errors.push(format!("a filter of interface {index}: {error}")),
                }
            }
        }
        for index in &self.made {
            if let Err(error) = clsact::remove_if_empty(*index) {
                errors.push(format!("the qdisc of interface {index}: {error}"));
            }
        }
        (removed, errors)
    }
}

impl Filter {
    /// Whether it was still there.
    fn remove(self, index: u32) -> io::Result<bool> {
        // Of an interface that is gone there are none.
        let found = clsact::filters(index, self.side)?;
        let Some(found) = found
            .into_iter()
            .find(|f| f.handle == self.handle && f.program == Some(self.program))
        else {
            return Ok(false);
        };
        clsact::remove_filter(index, self.side, &found).map(|()| true)
    }
}

/// What the process is that the agent starts beside itself: waits for the agent's end, then takes away what is left.
///
/// # Errors
/// Something could not be taken away.
pub fn stand() -> anyhow::Result<()> {
    let _ = rustix::thread::set_name(c"tw-guard");
    // Whatever ends the agent must not end the one who tidies up after it.
    for signal in [
        libc::SIGHUP,
        libc::SIGINT,
        libc::SIGQUIT,
        libc::SIGTERM,
        libc::SIGPIPE,
    ] {
        // SAFETY: to ignore a signal needs no handler, and there is one thread.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    let (removed, errors) = Left::read(io::stdin().lock()).remove();
    if removed > 0 {
        let _ = writeln!(
            io::stderr(),
            "tuplewatch: the agent was killed; its {removed} clsact filters are taken away"
        );
    }
    anyhow::ensure!(errors.is_empty(), "stays behind: {}", errors.join("; "));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guard_knows_what_it_was_told() {
        let filter = |side, program| Filter {
            side,
            handle: 0x7477_0000 | program,
            program,
        };
        let mut agent = Left::default();
        agent.made.insert(7);
        for index in [3, 7] {
            let all = [filter(Side::Ingress, 40), filter(Side::Egress, 41)];
            agent.filters.insert(index, all.to_vec());
        }
        let mut told = agent.lines();
        assert_eq!(Left::read(told.as_bytes()), agent);
        told += "forget 3\nfilter 9 in 1";
        agent.filters.remove(&3);
        assert_eq!(Left::read(told.as_bytes()), agent, "cut short");
        assert!(Left::default().hear("filter 1 up 2 3").is_none());
    }
}
