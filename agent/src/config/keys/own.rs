//! The settings of the agent itself.

use std::{path::PathBuf, time::Duration};

use super::{
    AUTO, Given, Kind,
    read::{any, bounded, filter, interval, map_memory, one, ring, show, size, top, word, word_of},
};
use crate::{
    config::{Config, ExportedAs, Format, StateDir},
    core::value::Value as _,
    sink::http::Listen,
};

/// A setting of the agent itself.
pub(in crate::config) struct Own {
    pub(super) name: &'static str,
    pub(super) help: &'static str,
    pub(super) flag: &'static str,
    pub(super) takes: &'static str,
    pub(super) kind: Kind,
    pub(super) get: fn(&Config) -> Given,
    pub(super) set: fn(&mut Config, Given) -> Result<(), String>,
}

const FORMATS: [(&str, Format); 2] = [("text", Format::Text), ("json", Format::Json)];
const TEMPORALITIES: [(&str, ExportedAs); 4] = [
    ("cumulative", ExportedAs::Cumulative),
    ("delta", ExportedAs::Delta),
    ("grafana", ExportedAs::Grafana),
    ("datadog", ExportedAs::Datadog),
];

macro_rules! list {
    ($field:ident) => {
        (
            |c: &Config| Given::List(c.$field.clone()),
            |c: &mut Config, given: Given| {
                if let Given::List(list) = given {
                    c.$field = list;
                }
                Ok(())
            },
        )
    };
}

macro_rules! optional {
    ($($field:ident).+, $parse:expr, $show:expr) => {
        (
            |c: &Config| show(c.$($field).+.as_ref(), $show),
            |c: &mut Config, given: Given| {
                c.$($field).+ = one(given, $parse)?;
                Ok(())
            },
        )
    };
}

macro_rules! plain {
    ($($field:ident).+, $parse:expr, $show:expr) => {
        (
            |c: &Config| Given::Text($show(&c.$($field).+)),
            |c: &mut Config, given: Given| {
                if let Some(value) = one(given, $parse)? {
                    c.$($field).+ = value;
                }
                Ok(())
            },
        )
    };
}

type Access = (
    fn(&Config) -> Given,
    fn(&mut Config, Given) -> Result<(), String>,
);

const fn own(
    name: &'static str,
    flag: &'static str,
    kind: Kind,
    takes: &'static str,
    help: &'static str,
    (get, set): Access,
) -> Own {
    Own {
        name,
        help,
        flag,
        takes,
        kind,
        get,
        set,
    }
}

fn path_or_off(path: Option<&PathBuf>) -> String {
    path.map_or_else(|| "off".to_owned(), |path| path.display().to_string())
}

fn given_path(given: Given) -> Result<Option<PathBuf>, String> {
    match given {
        Given::Text(text) if text.starts_with('/') => Ok(Some(PathBuf::from(text))),
        Given::Text(text) if text != "off" => {
            Err(format!("`{text}` is not an absolute path, nor `off`"))
        }
        _ => Ok(None),
    }
}

/// All of them, in the order of the documentation.
pub(super) const OWN: &[Own] = &[
    own(
        "interfaces",
        "--interface",
        Kind::List,
        "names; `*` and `?` match",
        "Watch these interfaces only. Empty: all that carry traffic (`lo` must be named).",
        list!(interfaces),
    ),
    own(
        "exclude_interfaces",
        "--exclude-interface",
        Kind::List,
        "names; `*` and `?` match",
        "Leave these interfaces out.",
        list!(exclude_interfaces),
    ),
    own(
        "netns",
        "--netns",
        Kind::List,
        "inode numbers, names of `ip netns`, paths like /proc/PID/ns/net",
        "Restrict the socket hooks and the census to these network namespaces. Empty: all.",
        list!(netns),
    ),
    own(
        "format",
        "--format",
        Kind::Text,
        "`text` or `json`",
        "What is printed on standard output.",
        plain!(format, |t| word(t, &FORMATS), |f: &Format| word_of(
            *f, &FORMATS
        )
        .to_owned()),
    ),
    own(
        "summary_interval",
        "--summary-interval",
        Kind::Text,
        "a duration, or `auto`: 2s on a terminal, else 10s",
        "How often the summary is written.",
        optional!(summary_interval, interval, Duration::show),
    ),
    own(
        "top",
        "--top",
        Kind::Text,
        "a number",
        "How many of the busiest port spaces are listed and exported.",
        plain!(top, top, u64::to_string),
    ),
    own(
        "census_interval",
        "--census-interval",
        Kind::Text,
        "a duration, or `auto`: 5s, less often where it would take more than 0.4 % of a CPU; at once where sockets bound before \
         connect() may have used up their ports",
        "How often sockets are counted.",
        optional!(census_interval, interval, Duration::show),
    ),
    own(
        "map_memory",
        "--map-memory",
        Kind::Text,
        "a size (a plain number is MiB), or `auto`: 1 % of the host's or the control group's memory, 12MiB to 24MiB",
        "Memory for the eBPF maps.",
        optional!(map_memory, map_memory, |b| size(*b)),
    ),
    own(
        "ring_buffer",
        "--ring-buffer",
        Kind::Text,
        "a size that is a power of two (a plain number is KiB)",
        "Size of the ring buffer through which events come from the kernel.",
        plain!(ring_buffer, ring, |b: &u32| size(u64::from(*b))),
    ),
    own(
        "http_sniff",
        "--no-http-sniff",
        Kind::Text,
        "`true` or `false`",
        "Look for HTTP/1 at the begin of data segments: `stuck_keepalive` needs it. Switched off, it costs nothing; see docs/performance.md for what it costs.",
        plain!(http_sniff, bool::parse, bool::to_string),
    ),
    own(
        "kernel_log",
        "--kernel-log",
        Kind::Text,
        "`true` or `false`",
        "Load the kernel side with its diagnostics on; they go to the log (`log: tuplewatch=debug`).",
        plain!(kernel_log, bool::parse, bool::to_string),
    ),
    own(
        "log",
        "--log",
        Kind::Text,
        "a level or a filter of levels, or `auto`: RUST_LOG, else warn",
        "What the agent logs on standard error.",
        optional!(log, filter, String::clone),
    ),
    own(
        "state_dir",
        "--state-dir",
        Kind::Text,
        "a directory, `off`, or `auto`: the first of $STATE_DIRECTORY (systemd sets it), else off",
        "Where firing alerts, their history and inferred pools are kept over a restart.",
        (
            |c| {
                Given::Text(match &c.state_dir {
                    StateDir::Auto => AUTO.to_owned(),
                    StateDir::Off => "off".to_owned(),
                    StateDir::At(path) => path.display().to_string(),
                })
            },
            |c, given| {
                c.state_dir = match given {
                    Given::Text(text) if text == "off" => StateDir::Off,
                    Given::Text(text) if text.starts_with('/') => StateDir::At(PathBuf::from(text)),
                    Given::Text(text) => {
                        return Err(format!("`{text}` is not an absolute path, nor `off`"));
                    }
                    _ => StateDir::Auto,
                };
                Ok(())
            },
        ),
    ),
    own(
        "recorder.dir",
        "--recorder-dir",
        Kind::Text,
        "a directory, or `off`",
        "Where the packets behind an alert are written when it fires: headers only, as pcapng. See docs/recorder.md.",
        (
            |c| Given::Text(path_or_off(c.recorder.dir.as_ref())),
            |c, given| {
                c.recorder.dir = given_path(given)?;
                Ok(())
            },
        ),
    ),
    own(
        "recorder.size",
        "--recorder-size",
        Kind::Text,
        "a size of 1MiB or more (a plain number is MiB)",
        "What all files of the flight recorder may take; the oldest are deleted for a new one.",
        plain!(
            recorder.size,
            |t| bounded(t, 1 << 20..=1 << 40),
            |b: &u64| size(*b)
        ),
    ),
    own(
        "recorder.memory",
        "--recorder-memory",
        Kind::Text,
        "a size from 1MiB to 1024MiB (a plain number is MiB)",
        "Memory for the packets that the flight recorder has at hand, 8192 for each MiB, beside that of the other maps.",
        plain!(
            recorder.memory,
            |t| bounded(t, 1 << 20..=1 << 30),
            |b: &u64| size(*b)
        ),
    ),
    own(
        "placements",
        "--placements",
        Kind::Text,
        "an absolute path, or `off`",
        "The file that tells which endpoints serve a service no more; read again when it changes. See docs/placements.md.",
        (
            |c| Given::Text(path_or_off(c.placements.as_ref())),
            |c, given| {
                c.placements = given_path(given)?;
                Ok(())
            },
        ),
    ),
    own(
        "host.name",
        "--host-name",
        Kind::Text,
        "a name, or `auto`: that of the host",
        "What this host is called where egress groups name their members.",
        optional!(host_name, any, String::clone),
    ),
    own(
        "host.zone",
        "--host-zone",
        Kind::Text,
        "a zone, or `auto`: none",
        "The zone this host is in where egress groups name their members.",
        optional!(host_zone, any, String::clone),
    ),
    own(
        "http.listen",
        "--http",
        Kind::Text,
        "an address with a port, a port of 127.0.0.1, `off`, or `auto`: 127.0.0.1:9464 if that is free",
        "Where /metrics, /status and /healthz are served.",
        (
            |c| {
                Given::Text(match c.http {
                    Listen::Default => AUTO.to_owned(),
                    other => other.to_string(),
                })
            },
            |c, given| {
                c.http = one(given, str::parse::<Listen>)?.unwrap_or_default();
                Ok(())
            },
        ),
    ),
    own(
        "otlp.endpoint",
        "--otlp-endpoint",
        Kind::Text,
        "a URL such as http://127.0.0.1:4318, or `auto`: OTEL_EXPORTER_OTLP_ENDPOINT, else nothing is sent",
        "Send metrics and alerts by OTLP to this receiver. The other OTEL_* variables count too.",
        optional!(otlp.endpoint, any, String::clone),
    ),
    own(
        "otlp.protocol",
        "--otlp-protocol",
        Kind::Text,
        "`grpc` or `http/protobuf`, or `auto`: by the port, else http/protobuf",
        "How to talk to it.",
        optional!(otlp.protocol, str::parse, ToString::to_string),
    ),
    own(
        "otlp.headers",
        "--otlp-header",
        Kind::Pairs,
        "names with values",
        "Headers of every request. Keep secrets in OTEL_EXPORTER_OTLP_HEADERS, which wins where both have a name, \
         or make this file readable for the agent only.",
        (
            |c| Given::Pairs(c.otlp.headers.clone()),
            |c, given| {
                if let Given::Pairs(pairs) = given {
                    c.otlp.headers = pairs;
                }
                Ok(())
            },
        ),
    ),
    own(
        "otlp.interval",
        "--otlp-interval",
        Kind::Text,
        "a duration, or `auto`: OTEL_METRIC_EXPORT_INTERVAL, else 60s",
        "Time between two exports of metrics.",
        optional!(otlp.interval, interval, Duration::show),
    ),
    own(
        "otlp.temporality",
        "--otlp-temporality",
        Kind::Text,
        "`cumulative` or its preset `grafana`, `delta` or its preset `datadog`, or `auto`: as \
         OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE says, else cumulative",
        "Whether counters are exported as totals (Prometheus, Grafana) or differences (Datadog).",
        optional!(otlp.temporality, |t| word(t, &TEMPORALITIES), |t| word_of(
            *t,
            &TEMPORALITIES
        )
        .to_owned()),
    ),
];
