//! Where the results go: each sink gets the same calls, in the same order, from one task.

mod clock;
#[cfg(test)]
pub(crate) mod fixture;
mod hooks;
pub mod http;
pub mod json;
pub mod metrics;
pub mod otlp;
mod otlp_logs;
pub mod terminal;

use std::io;

use crate::core::{
    report::{Change, Overview},
    time::Moment,
};

pub use clock::WallClock;
pub use hooks::{HookState, HookStatus, Ready};

/// Something that tells people or programs what was found.
///
/// An error means that this output is gone (a closed pipe, a full disk). Sinks that send over the
/// network never give one: they keep what they cannot send, or count it as lost.
pub trait Sink {
    /// The agent observes from now on.
    ///
    /// # Errors
    /// The output cannot be written to.
    fn ready(&mut self, now: Moment, ready: &Ready) -> io::Result<()>;

    /// Alerts and look-alikes that changed.
    ///
    /// # Errors
    /// The output cannot be written to.
    fn changes(&mut self, now: Moment, changes: &[Change]) -> io::Result<()>;

    /// The state of everything, once per summary interval.
    ///
    /// # Errors
    /// The output cannot be written to.
    fn overview(&mut self, overview: &Overview) -> io::Result<()>;

    /// The agent ends: hand over what is still held back. May block for some seconds.
    ///
    /// # Errors
    /// The output cannot be written to.
    fn close(&mut self) -> io::Result<()>;
}

/// All sinks of a run.
pub struct Sinks {
    clock: WallClock,
    list: Vec<Box<dyn Sink + Send>>,
}

impl Sinks {
    /// No sink yet. `clock` is the one that the sinks share.
    #[must_use]
    pub const fn new(clock: WallClock) -> Self {
        Self {
            clock,
            list: Vec::new(),
        }
    }

    /// Adds one.
    pub fn push(&mut self, sink: impl Sink + Send + 'static) {
        self.list.push(Box::new(sink));
    }

    /// Calls every sink even if one fails, and gives the first error.
    fn each(
        &mut self,
        mut call: impl FnMut(&mut (dyn Sink + Send)) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut result = Ok(());
        for sink in &mut self.list {
            let one = call(sink.as_mut());
            if result.is_ok() {
                result = one;
            }
        }
        result
    }
}

impl Sink for Sinks {
    fn ready(&mut self, now: Moment, ready: &Ready) -> io::Result<()> {
        self.each(|sink| sink.ready(now, ready))
    }

    fn changes(&mut self, now: Moment, changes: &[Change]) -> io::Result<()> {
        if changes.is_empty() {
            return Ok(());
        }
        self.each(|sink| sink.changes(now, changes))
    }

    fn overview(&mut self, overview: &Overview) -> io::Result<()> {
        self.clock.follow();
        self.each(|sink| sink.overview(overview))
    }

    fn close(&mut self) -> io::Result<()> {
        self.each(|sink| sink.close())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Broken;

    impl Sink for Broken {
        fn ready(&mut self, _: Moment, _: &Ready) -> io::Result<()> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
        fn changes(&mut self, _: Moment, _: &[Change]) -> io::Result<()> {
            Ok(())
        }
        fn overview(&mut self, _: &Overview) -> io::Result<()> {
            Ok(())
        }
        fn close(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_broken_sink_does_not_silence_the_others() {
        let (out, text) = fixture::shared();
        let mut sinks = Sinks::new(WallClock::capture());
        sinks.push(Broken);
        sinks.push(json::Json::new(out, WallClock::capture()));
        let result = sinks.ready(Moment(0), &fixture::ready());
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        assert!(text().contains("\"type\":\"ready\""));
    }
}
