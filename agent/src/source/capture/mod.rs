//! The capture source: packets of pcap and pcapng files go through the same functions as those of the
//! kernel's packet hook, and what they count reaches the core in the same snapshots.
//!
//! The path of a packet: [`mod@input`] → [`mod@reader`] → [`mod@link`] → [`mod@file`] → [`mod@observer`] → the core.

pub mod batch;
mod clock;
pub mod copies;
pub mod evidence;
pub mod exchanges;
pub mod fault;
pub mod file;
pub mod input;
pub mod link;
pub mod look;
pub mod observer;
mod pcap;
mod pcapng;
pub mod reader;
pub mod rests;
pub mod sent;
pub mod stalls;
pub mod tables;
pub mod talks;
#[cfg(test)]
mod tests;
pub mod vantage;
mod window;
pub mod words;
pub mod write;
