//! The configuration: a file, the environment, flags, in that order; what comes later wins.
//!
//! `keys` has every single setting, `entries` the lists. Both are read by name from the tree of the
//! file, so that each error knows its line.

mod document;
mod entries;
mod keys;
mod load;
mod placements;
mod problem;
mod read;
#[cfg(test)]
mod tests;
mod tree;

use std::{path::PathBuf, time::Duration};

use opentelemetry_sdk::metrics::Temporality;

use crate::{
    core::{
        egress::{Egress, Group, Host},
        profile::{self, Profile},
        rules::Rules,
        threshold::Thresholds,
    },
    sink::{WallClock, http::Listen, otlp::OtlpConfig},
};

pub use document::{default_file, markdown};
pub use entries::{DestinationEntry, MuteEntry};
pub use keys::Given;
pub use load::{DEFAULT_FILE, Loaded, Origin, check, check_file, check_threshold, load};
pub use placements::PlacementFile;
pub use problem::{Place, Problem, Problems};

/// A format of standard output.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Format {
    /// For people.
    #[default]
    Text,
    /// JSON lines, as docs/json.md describes them.
    Json,
}

/// How counters are exported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExportedAs {
    /// Totals since the start.
    Cumulative,
    /// Differences from one export to the next.
    Delta,
    /// As Grafana (Mimir, Prometheus) wants it: totals.
    Grafana,
    /// As Datadog wants it: differences.
    Datadog,
}

impl From<ExportedAs> for Temporality {
    fn from(exported: ExportedAs) -> Self {
        match exported {
            ExportedAs::Cumulative | ExportedAs::Grafana => Self::Cumulative,
            ExportedAs::Delta | ExportedAs::Datadog => Self::Delta,
        }
    }
}

/// Where state is kept.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum StateDir {
    /// Where systemd says, else nowhere: a run by hand leaves no files, and takes up nobody's alerts.
    #[default]
    Auto,
    /// Nowhere.
    Off,
    /// Here.
    At(PathBuf),
}

/// Settings of the flight recorder.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the table of keys says what each means")]
pub struct RecorderSettings {
    pub dir: Option<PathBuf>,
    /// In bytes.
    pub size: u64,
    /// In bytes.
    pub memory: u64,
}

impl Default for RecorderSettings {
    fn default() -> Self {
        Self {
            dir: None,
            size: 64 << 20,
            memory: 8 << 20,
        }
    }
}

/// Settings of the OTLP export; `None`: by the standard variables.
#[derive(Clone, PartialEq, Debug, Default)]
#[allow(missing_docs, reason = "the table of keys says what each means")]
pub struct OtlpSettings {
    pub endpoint: Option<String>,
    pub protocol: Option<crate::sink::otlp::Protocol>,
    pub headers: Vec<(String, String)>,
    pub interval: Option<Duration>,
    pub temporality: Option<ExportedAs>,
}

/// Everything that can be configured.
#[derive(Clone, PartialEq, Debug)]
#[allow(missing_docs, reason = "the table of keys says what each means")]
pub struct Config {
    pub interfaces: Vec<String>,
    pub exclude_interfaces: Vec<String>,
    pub netns: Vec<String>,
    pub format: Format,
    pub summary_interval: Option<Duration>,
    pub top: u64,
    pub census_interval: Option<Duration>,
    /// In bytes.
    pub map_memory: Option<u64>,
    /// In bytes.
    pub ring_buffer: u32,
    pub http_sniff: bool,
    pub kernel_log: bool,
    pub log: Option<String>,
    pub state_dir: StateDir,
    pub recorder: RecorderSettings,
    pub placements: Option<PathBuf>,
    pub host_name: Option<String>,
    pub host_zone: Option<String>,
    pub http: Listen,
    pub otlp: OtlpSettings,
    pub thresholds: Thresholds,
    pub destinations: Vec<DestinationEntry>,
    pub mute: Vec<MuteEntry>,
    pub egress_groups: Vec<Group>,
    pub profiles: Vec<Profile>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            interfaces: Vec::new(),
            exclude_interfaces: Vec::new(),
            netns: Vec::new(),
            format: Format::Text,
            summary_interval: None,
            top: 20,
            census_interval: None,
            map_memory: None,
            ring_buffer: 256 << 10,
            http_sniff: true,
            kernel_log: false,
            log: None,
            state_dir: StateDir::Auto,
            recorder: RecorderSettings::default(),
            placements: None,
            host_name: None,
            host_zone: None,
            http: Listen::Default,
            otlp: OtlpSettings::default(),
            thresholds: Thresholds::default(),
            destinations: Vec::new(),
            mute: Vec::new(),
            egress_groups: Vec::new(),
            profiles: Vec::new(),
        }
    }
}

impl Config {
    /// What the core is told to do. `clock` tells where on its clock the mutes end.
    #[must_use]
    pub fn rules(&self, clock: &WallClock) -> Rules {
        let destinations = self.destinations.iter();
        Rules {
            thresholds: self.thresholds.clone(),
            destinations: destinations.map(|d| d.rules(&self.thresholds)).collect(),
            mutes: self.mute.iter().map(|m| m.mute(clock)).collect(),
            placements: Vec::new(),
        }
    }

    /// The egress groups that this host belongs to.
    ///
    /// # Errors
    /// A group names a profile that there is not, or something else is wrong with one.
    pub fn egress(&self) -> Result<Egress, String> {
        let name = self.host_name.clone().unwrap_or_else(own_name);
        let host = Host {
            name,
            zone: self.host_zone.clone(),
        };
        let profiles = profile::with(&self.profiles);
        Egress::new(&self.egress_groups, &profiles, &host)
    }

    /// What the OTLP export is told.
    #[must_use]
    pub fn otlp(&self) -> OtlpConfig {
        OtlpConfig {
            endpoint: self.otlp.endpoint.clone(),
            protocol: self.otlp.protocol,
            headers: self.otlp.headers.clone(),
            interval: self.otlp.interval,
            temporality: self.otlp.temporality.map(Temporality::from),
        }
    }
}

fn own_name() -> String {
    let name = rustix::system::uname();
    name.nodename().to_string_lossy().into_owned()
}
