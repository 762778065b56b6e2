//! Flags that set what the configuration has too. They are read by the same table as the file and the
//! environment, and win over both.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use clap::Args;

use super::Failure;
use crate::config::{self, Given, Loaded, PlacementFile, Problems};

/// Flags of settings, and the file that they go before.
#[derive(Args, Debug, Default)]
pub struct ConfigFlags {
    /// Read the configuration from this file (default: /etc/tuplewatch/config.yaml, if it is there;
    /// `tuplewatch config default` prints one with every setting).
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Watch these interfaces only (repeat for several; `*` and `?` match; `lo` must be named).
    #[arg(long = "interface", value_name = "NAME")]
    interfaces: Vec<String>,
    /// Leave these interfaces out.
    #[arg(long = "exclude-interface", value_name = "NAME")]
    exclude_interfaces: Vec<String>,
    /// Restrict the socket hooks and the census to these network namespaces: an inode number, a name
    /// of `ip netns`, or a path like /proc/PID/ns/net. (The packet hook sees the interfaces of the
    /// namespace that the agent runs in.)
    #[arg(long = "netns", value_name = "NAMESPACE")]
    netns: Vec<String>,
    /// What is printed on standard output: text (default) or json, lines as docs/json.md describes.
    #[arg(long, value_parser = |t: &str| of("format", t))]
    format: Option<String>,
    /// How often the summary is written (default: 2 s on a terminal, else 10 s).
    #[arg(long, value_name = "TIME", value_parser = |t: &str| of("summary_interval", t))]
    summary_interval: Option<String>,
    /// How many of the busiest port spaces are listed and exported (default: 20).
    #[arg(long, value_name = "N", value_parser = |t: &str| of("top", t))]
    top: Option<String>,
    /// How often sockets are counted (default: every 5 s, less often where it would take more than
    /// 0.4 % of a CPU).
    #[arg(long, value_name = "TIME", value_parser = |t: &str| of("census_interval", t))]
    census_interval: Option<String>,
    /// Memory for the eBPF maps, in MiB or such as 16MiB (default: 1 % of the host's or the control
    /// group's, 12 to 24).
    #[arg(long, value_name = "SIZE", value_parser = |t: &str| of("map_memory", t))]
    map_memory: Option<String>,
    /// Size of the ring buffer, in KiB or such as 256KiB, a power of two (default: 256KiB).
    #[arg(long, value_name = "SIZE", value_parser = |t: &str| of("ring_buffer", t))]
    ring_buffer: Option<String>,
    /// Set a threshold, such as alert.resolve=30s (repeat for several; docs/configuration.md has all).
    #[arg(long = "set", value_name = "NAME=VALUE", value_parser = setting)]
    settings: Vec<String>,
    /// Do not look for HTTP/1 at the begin of data segments: connections pinned to a dead endpoint
    /// (pinned_5xx) are not recognised then.
    #[arg(long)]
    no_http_sniff: bool,
    /// Load the kernel side with its diagnostics on; they go to the log (--log tuplewatch=debug).
    #[arg(long)]
    kernel_log: bool,
    /// What is logged on standard error: a level or a filter of levels (default: RUST_LOG, else
    /// warn).
    #[arg(long, value_name = "FILTER", value_parser = |t: &str| of("log", t))]
    log: Option<String>,
    /// Keep firing alerts and inferred pools in this directory over a restart (default: the one that
    /// systemd gives in STATE_DIRECTORY, else none), or off.
    #[arg(long, value_name = "DIRECTORY", value_parser = |t: &str| of("state_dir", t))]
    state_dir: Option<String>,
    /// Write the packets behind an alert into this directory when it fires, as pcapng, headers only
    /// (default: off).
    #[arg(long, value_name = "DIRECTORY", value_parser = |t: &str| of("recorder.dir", t))]
    recorder_dir: Option<String>,
    /// What all files there may take, in MiB or such as 64MiB; the oldest are deleted for a new one
    /// (default: 64MiB).
    #[arg(long, value_name = "SIZE", value_parser = |t: &str| of("recorder.size", t))]
    recorder_size: Option<String>,
    /// Memory for the packets that are at hand for it, in MiB or such as 8MiB: 8192 packets for each
    /// MiB (default: 8MiB).
    #[arg(long, value_name = "SIZE", value_parser = |t: &str| of("recorder.memory", t))]
    recorder_memory: Option<String>,
    /// Which endpoints serve a service no more, as docs/placements.md describes: an absolute path. The file is
    /// read again when it changes (default: off).
    #[arg(long, value_name = "FILE", value_parser = |t: &str| of("placements", t))]
    placements: Option<String>,
    /// What this host is called where egress groups name their members (default: its name).
    #[arg(long, value_name = "NAME")]
    host_name: Option<String>,
    /// The zone this host is in where egress groups name their members.
    #[arg(long, value_name = "ZONE")]
    host_zone: Option<String>,
    /// Send metrics and alerts by OTLP to this receiver, such as http://127.0.0.1:4318 (else
    /// OTEL_EXPORTER_OTLP_ENDPOINT; the other OTEL_* variables count too). Off without either.
    #[arg(long, value_name = "URL")]
    otlp_endpoint: Option<String>,
    /// grpc or http/protobuf (default: by the port, else http/protobuf).
    #[arg(long, value_name = "PROTOCOL", value_parser = |t: &str| of("otlp.protocol", t))]
    otlp_protocol: Option<String>,
    /// Send this header with every request (repeat for several). A command line can be read by
    /// everybody: keep secrets in OTEL_EXPORTER_OTLP_HEADERS or in the file.
    #[arg(long = "otlp-header", value_name = "NAME=VALUE", value_parser = |t: &str| of("otlp.headers", t))]
    otlp_headers: Vec<String>,
    /// Time between two exports of metrics (default: OTEL_METRIC_EXPORT_INTERVAL, else 60 s).
    #[arg(long, value_name = "TIME", value_parser = |t: &str| of("otlp.interval", t))]
    otlp_interval: Option<String>,
    /// Whether counters are exported as totals (cumulative; preset grafana) or differences (delta;
    /// preset datadog).
    #[arg(long, value_name = "HOW", value_parser = |t: &str| of("otlp.temporality", t))]
    otlp_temporality: Option<String>,
    /// Serve /metrics, /status and /healthz on this address and port (default: 127.0.0.1:9464, if
    /// that is free).
    #[arg(long, value_name = "ADDRESS", conflicts_with = "no_http", value_parser = |t: &str| of("http.listen", t))]
    http: Option<String>,
    /// Serve no /metrics, /status and /healthz.
    #[arg(long)]
    no_http: bool,
}

/// Checks the value of a flag.
fn of(name: &str, text: &str) -> Result<String, String> {
    config::check(name, Given::Text(text.to_owned())).map(|()| text.to_owned())
}

fn setting(text: &str) -> Result<String, String> {
    let (name, value) = text
        .split_once('=')
        .ok_or_else(|| format!("`{text}` is not of the form name=value"))?;
    config::check_threshold(name, value).map(|()| text.to_owned())
}

impl ConfigFlags {
    /// The settings that flags were given for.
    fn given(&self) -> Vec<(String, Given)> {
        let texts = [
            ("format", &self.format),
            ("summary_interval", &self.summary_interval),
            ("top", &self.top),
            ("census_interval", &self.census_interval),
            ("map_memory", &self.map_memory),
            ("ring_buffer", &self.ring_buffer),
            ("log", &self.log),
            ("state_dir", &self.state_dir),
            ("recorder.dir", &self.recorder_dir),
            ("recorder.size", &self.recorder_size),
            ("recorder.memory", &self.recorder_memory),
            ("placements", &self.placements),
            ("host.name", &self.host_name),
            ("host.zone", &self.host_zone),
            ("otlp.endpoint", &self.otlp_endpoint),
            ("otlp.protocol", &self.otlp_protocol),
            ("otlp.interval", &self.otlp_interval),
            ("otlp.temporality", &self.otlp_temporality),
            ("http.listen", &self.http),
        ];
        let mut given: Vec<_> = texts
            .into_iter()
            .filter_map(|(name, text)| Some((name.to_owned(), Given::Text(text.clone()?))))
            .collect();
        for (name, list) in [
            ("interfaces", &self.interfaces),
            ("exclude_interfaces", &self.exclude_interfaces),
            ("netns", &self.netns),
        ] {
            if !list.is_empty() {
                given.push((name.to_owned(), Given::List(list.clone())));
            }
        }
        if !self.otlp_headers.is_empty() {
            let all = self.otlp_headers.join(",");
            given.push(("otlp.headers".to_owned(), Given::Text(all)));
        }
        for (on, name, text) in [
            (self.kernel_log, "kernel_log", "true"),
            (self.no_http_sniff, "http_sniff", "false"),
            (self.no_http, "http.listen", "off"),
        ] {
            if on {
                given.push((name.to_owned(), Given::Text(text.to_owned())));
            }
        }
        for setting in &self.settings {
            if let Some((name, value)) = setting.split_once('=') {
                given.push((format!("thresholds.{name}"), Given::Text(value.to_owned())));
            }
        }
        given
    }

    /// The configuration of file, environment and these flags.
    ///
    /// # Errors
    /// Something is wrong with it (exit code 78).
    pub fn load(&self) -> Result<Loaded, Failure> {
        let variables: BTreeMap<String, String> = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .filter(|(name, _)| name.starts_with("TUPLEWATCH_"))
            .collect();
        config::load(self.config.as_deref(), &variables, self.given()).map_err(wrong)
    }
}

/// The file of placements, if there is one.
///
/// # Errors
/// It cannot be read, or something is wrong with it (exit code 78).
pub(super) fn placements(path: Option<&Path>) -> Result<Option<PlacementFile>, Failure> {
    path.map(PlacementFile::open).transpose().map_err(wrong)
}

/// A configuration that cannot be used.
pub(super) fn wrong(problems: Problems) -> Failure {
    Failure {
        code: 78,
        error: problems.into(),
    }
}
