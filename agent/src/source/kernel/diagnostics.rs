//! Diagnostics of the kernel side (aya-log): off unless asked for, and never in a program that packets
//! pass.

use std::borrow::Cow;

use aya::Ebpf;
use aya_log::EbpfLogger;
use tracing::{debug, warn};

use super::load::Kernel;

/// The level that the kernel side's programs are loaded with.
#[must_use]
pub(super) const fn level(wanted: bool) -> u8 {
    // `aya_log_common::Level`: 0 is off, 4 is debug.
    if wanted { 4 } else { 0 }
}

/// Bytes of the ring buffer for messages: as few as the kernel allows when there are none.
#[must_use]
pub(super) const fn buffer(wanted: bool) -> u32 {
    if wanted { 64 << 10 } else { 4 << 10 }
}

/// Hands the kernel side's messages to the agent's own log.
pub(super) struct Forward;

impl log::Log for Forward {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let text = record
            .args()
            .as_str()
            .map_or_else(|| record.args().to_string().into(), Cow::from);
        debug!(target: "tuplewatch::ebpf", "{text}");
    }

    fn flush(&self) {}
}

/// Starts reading messages.
pub(super) fn start(ebpf: &mut Ebpf) -> Option<EbpfLogger<Forward>> {
    EbpfLogger::init_with_logger(ebpf, Forward)
        .inspect_err(|error| warn!("the kernel side's messages cannot be read: {error}"))
        .ok()
}

impl Kernel {
    /// Writes what the kernel side has said since the last call.
    pub fn flush_diagnostics(&mut self) {
        if let Some(logger) = &mut self.logger {
            logger.flush();
        }
    }
}
