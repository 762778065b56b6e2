//! Recording an interface with tcpdump.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::Signal;

use crate::host::Host;
use crate::lab::on_path;
use crate::process::Proc;

/// tcpdump loses the newest packets when it is stopped at once: its ring hands over whole blocks.
const LAST_BLOCK: Duration = Duration::from_millis(1500);

/// A running recording.
#[derive(Debug)]
pub struct Tap {
    process: Proc,
    file: PathBuf,
}

/// A finished recording.
#[derive(Debug, Clone)]
pub struct Recording {
    /// The pcap file: Ethernet, nanosecond timestamps, 160 bytes of each packet.
    pub file: PathBuf,
    /// Packets in the file, as tcpdump counts them.
    pub captured: u64,
    /// Packets the kernel had to drop because tcpdump was too slow: 0 in a usable recording.
    pub dropped: u64,
}

impl Tap {
    /// Starts recording; returns when tcpdump listens. `filter` is a pcap filter, empty for all.
    ///
    /// # Errors
    /// If tcpdump is missing or does not listen within 10 s.
    pub fn start(host: &Host, interface: &str, file: &Path, filter: &str) -> Result<Self> {
        ensure!(
            on_path("tcpdump"),
            "`tcpdump` is missing: apt-get install tcpdump"
        );
        let mut command = Command::new("tcpdump");
        // -Z root: giving up root would clear the signal that ends it with the test.
        command.args([
            "-Z",
            "root",
            "-n",
            "-U",
            "--immediate-mode",
            "-s",
            "160",
            "-B",
            "16384",
        ]);
        command
            .args(["--time-stamp-precision=nano", "-i", interface, "-w"])
            .arg(file)
            .arg(filter);
        let process = host.spawn(&format!("tcpdump {interface}"), command)?;
        let listening = process.find_stderr(0, Duration::from_secs(10), |line| {
            line.contains("listening on")
        });
        if listening.is_none() {
            bail!("{}", process.describe());
        }
        Ok(Self {
            process,
            file: file.to_owned(),
        })
    }

    /// Stops recording 1.5 s from now, when the packets seen so far are in the file.
    ///
    /// # Errors
    /// If tcpdump does not end or does not say how many packets it saw.
    pub fn stop(self) -> Result<Recording> {
        std::thread::sleep(LAST_BLOCK);
        self.process.signal(Signal::INT);
        self.process.wait(Duration::from_secs(10))?;
        let words = self.process.stderr();
        let number = |suffix: &str| {
            words
                .iter()
                .filter(|line| line.contains(suffix))
                .find_map(|line| line.split_whitespace().next()?.parse().ok())
                .with_context(|| format!("no line \"{suffix}\": {}", self.process.describe()))
        };
        Ok(Recording {
            captured: number("captured")?,
            dropped: number("dropped by kernel")?,
            file: self.file,
        })
    }
}
