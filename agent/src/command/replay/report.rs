//! What a replay tells: alerts as `run` does, and at the end of each place a summary per port space and
//! the packets that are the evidence.

mod json;
mod text;

use std::io;

use super::group::Outcome;
use crate::{
    core::{report::Change, time::Moment},
    source::capture::vantage::Vantage,
};

pub(super) use {json::Json, text::Text};

/// Where a replay reports to.
pub(super) trait Report {
    /// A place begins: its files, and where it is.
    fn begin(&mut self, now: Moment, files: &[String], vantage: &Vantage) -> io::Result<()>;

    /// Alerts and look-alikes that changed.
    fn changes(&mut self, now: Moment, changes: &[Change]) -> io::Result<()>;

    /// A place is done; `names` are those of all files.
    fn end(&mut self, outcome: &Outcome, names: &[String]) -> io::Result<()>;
}

/// The place in words.
fn place(vantage: &Vantage) -> &'static str {
    use tuplewatch_common::address::Role;
    match vantage.set {
        Some(Role::Initiator) => "the initiator's side",
        Some(_) => "the responder's side",
        None if vantage.local.is_empty() => "somewhere in between",
        None => "one of the hosts",
    }
}
