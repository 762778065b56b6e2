//! tuplewatch watches the TCP four-tuples of a Linux host.
//!
//! A reader follows a packet: [`source`] hands observations to [`core`], whose rules
//! ([`core::signature`]) make findings and alerts of them, which the [`sink`]s show.

pub mod clocks;
pub mod command;
pub mod config;
pub mod core;
pub mod doctor;
pub mod enrich;
pub mod kernel_facts;
pub mod log;
pub mod recorder;
pub mod sink;
pub mod source;
pub mod state;
