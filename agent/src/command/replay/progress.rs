//! A progress bar on standard error, where that is a terminal and the files are long.

use std::io::{self, IsTerminal as _};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::source::capture::file::CaptureFile;

/// Shorter files are done before a bar could be read.
const LONG: u64 = 50 << 20;

/// How far the replay has come.
pub(super) struct Progress(Option<ProgressBar>);

impl Progress {
    pub(super) fn new(files: &[CaptureFile]) -> Self {
        let length: Option<u64> = files.iter().map(|file| file.length).sum();
        let long = length.is_none_or(|length| length >= LONG);
        if !io::stderr().is_terminal() || !long {
            return Self(None);
        }
        let bar = ProgressBar::with_draw_target(length, ProgressDrawTarget::stderr_with_hz(5));
        let template = if length.is_some() {
            "{wide_bar} {percent:>3} %  {bytes} of {total_bytes}, {binary_bytes_per_sec}, {eta} left"
        } else {
            "{spinner} {bytes}, {binary_bytes_per_sec}"
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Self(Some(bar))
    }

    /// So many bytes of all files were read.
    pub(super) fn at(&self, bytes: u64) {
        if let Some(bar) = &self.0 {
            bar.set_position(bytes);
        }
    }

    /// Runs `f`, which may print, with the bar out of the way.
    pub(super) fn aside<T>(&self, f: impl FnOnce() -> T) -> T {
        match &self.0 {
            Some(bar) => bar.suspend(f),
            None => f(),
        }
    }

    pub(super) fn finish(&self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
