//! What the tests of this crate and its fuzz targets share: tables in memory, a script of segments,
//! invariants that hold at every moment, and a reader of capture files.
#![allow(dead_code, reason = "each test and fuzz target uses a part of it")]

pub mod chaos;
pub mod invariants;
pub mod packet;
pub mod pcap;
pub mod script;
pub mod tables;
