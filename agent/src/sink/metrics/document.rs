//! `docs/metrics.md`.

use super::{Kind, METRICS, Points, Source, attribute, prometheus_name};
use crate::sink::otlp_logs::{ATTRIBUTES, EVENTS};

/// The documentation of all metrics and log records, as Markdown.
#[must_use]
pub fn markdown() -> String {
    let mut text = INTRODUCTION.to_owned();
    text.push_str("| name | kind | unit | attributes | meaning | in `/metrics` |\n");
    text.push_str("|---|---|---|---|---|---|\n");
    for metric in METRICS {
        let kind = match metric.kind {
            Kind::Counter => "counter",
            Kind::UpDownCounter => "up-down counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        let (name, unit, meaning) = (metric.name, metric.unit, metric.description);
        let attributes = attributes(&metric.source);
        text.push_str(&format!(
            "| `{name}` | {kind} | `{unit}` | {attributes} | {meaning} | `{}` |\n",
            prometheus_name(metric)
        ));
    }
    text.push_str(ATTRIBUTES_HEAD);
    for (name, values, meaning) in METRIC_ATTRIBUTES {
        text.push_str(&format!("| `{name}` | {values} | {meaning} |\n"));
    }
    text.push_str(BEHAVIOUR);
    text.push_str(LOGS_HEAD);
    for (name, meaning) in EVENTS {
        text.push_str(&format!("- `{name}`: {meaning}\n"));
    }
    text.push_str(LOGS_TABLE);
    for (name, kind, meaning) in ATTRIBUTES {
        text.push_str(&format!("| `{name}` | {kind} | {meaning} |\n"));
    }
    text
}

fn attributes(source: &Source) -> String {
    let points = |points: Points| match points {
        Points::Both => "",
        Points::Socket => " (point `socket` only)",
        Points::Wire => " (point `wire` only)",
    };
    match source {
        Source::Total(at, _) => format!("port space{}", points(*at)),
        Source::Totals(name, parts) => {
            let parts = parts.iter();
            let values: Vec<_> = parts
                .map(|(value, at, _)| format!("`{value}`{}", points(*at)))
                .collect();
            format!("port space, `{name}`: {}", values.join(", "))
        }
        Source::Level(_) | Source::Real(_) => "port space".to_owned(),
        Source::Egress(..) => format!(
            "`{}`, `{}`, `{}`",
            attribute::EGRESS_GROUP,
            attribute::SERVER_ADDRESS,
            attribute::SERVER_PORT
        ),
        Source::Histogram(at, _) => format!("port space{}, `{}`", points(*at), attribute::LE),
        Source::Host([], _) => "none".to_owned(),
        Source::Host(names, _) => names
            .iter()
            .map(|name| format!("`{name}`"))
            .collect::<Vec<_>>()
            .join(", "),
    }
}

const INTRODUCTION: &str = "\
# Metrics and log records

<!-- Generated from agent/src/sink/metrics/. Do not edit; run
     TUPLEWATCH_BLESS=1 cargo test -p tuplewatch metrics_doc -->

tuplewatch serves the metrics on `http://127.0.0.1:9464/metrics` ([status.md](status.md)) and exports them by OTLP, together
with log records of alerts. Nothing is sent unless an endpoint is set. Names and units follow the OpenTelemetry semantic
conventions; a source port is never an attribute.

## Metrics

";

const ATTRIBUTES_HEAD: &str = "
## Attributes of metrics

A *port space* has the first six. All port spaces outside the list of the busiest are one, which has
`tuplewatch.aggregate` instead.

| name | values | meaning |
|---|---|---|
";

pub(super) const METRIC_ATTRIBUTES: &[(&str, &str, &str)] = &[
    (
        attribute::CLIENT_ADDRESS,
        "IP address",
        "who sends the SYNs",
    ),
    (attribute::SERVER_ADDRESS, "IP address", "who gets them"),
    (attribute::SERVER_PORT, "integer", "port of the server"),
    (
        attribute::ROLE,
        "`initiator`, `responder`, `unknown`",
        "what this host is",
    ),
    (
        attribute::POINT,
        "`socket`, `wire`",
        "where it was seen: before or after NAT. The same connection is seen at both; do not add them up",
    ),
    (
        attribute::NETNS,
        "integer",
        "inode of the network namespace; only with point `socket`",
    ),
    (
        attribute::AGGREGATE,
        "`other`",
        "all port spaces, or destinations of an egress group, outside the list",
    ),
    (
        attribute::EGRESS_GROUP,
        "text",
        "name of an egress group of the configuration: the hosts that share a device's ports",
    ),
    (
        attribute::OUTCOME,
        "see `tuplewatch.outcomes`",
        "what became of an open",
    ),
    (
        attribute::FORMER,
        "see `tuplewatch.bare_acks`",
        "state of the former connection on the four-tuple",
    ),
    (
        attribute::RECOVERY,
        "`healed`, `unhealed`",
        "whether an open got through after a bare ACK",
    ),
    (
        attribute::DIRECTION,
        "`receive`, `transmit`",
        "direction of a segment",
    ),
    (
        attribute::LE,
        "text: a number, `+Inf`",
        "upper bound of a bucket in seconds",
    ),
    (attribute::SIGNATURE, "`port_exhaustion`", "kind of trouble"),
    (
        attribute::CAUSE,
        "such as `l4_reuse_in_time_wait`; see `docs/rules.md`",
        "its cause, or the name of the look-alike",
    ),
    (
        attribute::SEVERITY,
        "`info`, `warning`, `critical`",
        "how bad it is",
    ),
    (
        attribute::ALERT_STATE,
        "`pending`, `firing`",
        "where an alert is in its life",
    ),
    (
        attribute::LOSS,
        "such as `events_lost`",
        "what was lost; `docs/json.md` lists them under `globals`",
    ),
    (
        attribute::KIND,
        "such as `fragments`",
        "what kind of packet",
    ),
    (
        attribute::HOOK,
        "such as `packet`",
        "a hook of the kernel side",
    ),
    (
        attribute::HOOK_STATE,
        "`ok`, `degraded`, `off`",
        "whether it works",
    ),
    (attribute::SIGNAL, "`metrics`, `logs`", "an OTLP signal"),
    (attribute::VERSION, "text", "version of the agent"),
];

const BEHAVIOUR: &str = "
## What to know

- **`/metrics`** has the same metrics, made anew when they are scraped. Names and labels are those that the OpenTelemetry
  specification prescribes: dots become underscores, the unit becomes a suffix, counters end in `_total`. Up-down counters are
  gauges. The attributes of the resource are labels of `target_info`. Counters there are always totals since the start.
- **Temporality** of OTLP is cumulative, or delta with `OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE=delta` (Datadog wants
  it). Up-down counters and gauges are the same in both.
- **Histograms** are counted in the kernel, without their sum. In `/metrics` they are histograms (`_bucket`, `_count`, no `_sum`).
  The OpenTelemetry SDK takes single values only, at 100,000 connections per second too many to repeat, so by OTLP each
  histogram is exported as a counter `<name>.bucket` (unit `{observation}`) with one series per
  bucket and its bound in seconds in `le`. As in Prometheus a bucket holds all values up to its bound, so that
  `histogram_quantile(0.9, sum by (le) (rate(tuplewatch_handshake_duration_bucket_total[5m])))` works.
- **The list** holds the busiest port spaces; everything else is counted under `tuplewatch.aggregate=other`. A port space that
  enters the list leaves its past in `other`; one that leaves it is exported once more by OTLP and is then silent. When it returns
  its counters go on (cumulative) or start again (delta, where the receiver adds up). No counter goes back, and the sum over all
  series is what was counted. Two exceptions: a series returning after 1,024 others starts at 0, and histograms have no `other`.
- **Egress groups** have every destination that their device carries, whether its port spaces are in the list or not, up to 256
  of them, those with the most ports taken first; the others are one, as above. Summed over the hosts of a group by destination,
  `in_use` and `held` are what the fleet takes of one `budget`.
- **Zeros** are exported, so that the first event is seen as an increase.
- **A receiver that is away**: cumulative metrics heal by themselves; with delta an export is tried again for one interval
  (at least 30 s), then it is lost and counted. Log records are kept in memory (10,000 of them) and sent when the receiver is
  back.
";

const LOGS_HEAD: &str = "
## Log records

Each change of an alert or a look-alike is one log record. Its event name is one of

";

const LOGS_TABLE: &str = "
The body is one line for a person. The severity is ERROR (17) for a critical alert that fires, WARN (13) for a warning, and
INFO (9) for everything else, also for alerts that are pending or resolved.

| attribute | type | meaning |
|---|---|---|
";

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, path::Path};

    use super::*;
    use crate::sink::metrics::{View, collect};

    #[test]
    fn metrics_doc() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/metrics.md");
        if std::env::var_os("TUPLEWATCH_BLESS").is_some() {
            std::fs::write(&path, markdown()).unwrap();
        }
        let committed = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            committed == markdown(),
            "docs/metrics.md is not what the code exports; write it anew with\n    \
             TUPLEWATCH_BLESS=1 cargo test -p tuplewatch metrics_doc"
        );
    }

    #[test]
    fn every_attribute_that_is_exported_is_documented_and_the_other_way_round() {
        let view = crate::sink::fixture::view();
        let mut exported = BTreeSet::new();
        for metric in METRICS {
            collect(metric, &view, &mut |_, attributes| {
                exported.extend(attributes.iter().map(|a| a.key.to_string()));
            });
        }
        let documented: BTreeSet<_> = METRIC_ATTRIBUTES
            .iter()
            .map(|(name, ..)| (*name).to_owned())
            .collect();
        assert_eq!(exported, documented);
        assert!(!exported.iter().any(|name| name.contains("client.port")));
    }

    #[test]
    fn names_follow_the_conventions() {
        let mut names = BTreeSet::new();
        for metric in METRICS {
            let name = metric.name;
            assert!(names.insert(name), "{name} is there twice");
            assert!(name.starts_with("tuplewatch."), "{name}");
            assert!(
                !name.ends_with("_total") && !name.contains("second"),
                "{name}"
            );
            assert!(
                name.chars()
                    .all(|c| c.is_ascii_lowercase() || "._".contains(c)),
                "{name}"
            );
            let parent = format!("{name}.");
            assert!(
                !METRICS.iter().any(|m| m.name.starts_with(&parent)),
                "{name} is a namespace too"
            );
            assert!(
                metric.description.ends_with('.') || metric.description.ends_with(')'),
                "{name}"
            );
        }
    }

    #[test]
    fn port_spaces_have_only_what_their_point_can_see() {
        let view: View = crate::sink::fixture::view();
        let mut points = BTreeSet::new();
        let metric = METRICS
            .iter()
            .find(|m| m.name == "tuplewatch.reuse_interval")
            .unwrap();
        collect(metric, &view, &mut |_, attributes| {
            let point = attributes
                .iter()
                .filter(|a| a.key.as_str() == attribute::POINT);
            points.extend(point.map(|a| a.value.to_string()));
        });
        assert_eq!(points, BTreeSet::from(["wire".to_owned()]));
    }
}
