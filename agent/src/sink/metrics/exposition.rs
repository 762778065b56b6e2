//! The same metrics in Prometheus' text format 0.0.4.
//!
//! Names follow "Prometheus and OpenMetrics compatibility" of the OpenTelemetry specification: dots
//! become underscores, the unit becomes a suffix, counters end in `_total`. So what a collector makes
//! of the OTLP metrics has the same names; histograms alone differ, because here they are histograms
//! (see `docs/metrics.md`).

use std::fmt::Write as _;

use opentelemetry::KeyValue;

use super::{Kind, METRICS, Metric, Number, View, attribute, collect};

/// The content type of [`expose`]'s text.
pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Everything in `view`, and who says so (`resource`: name and value of each attribute).
pub(crate) fn expose(view: &View, resource: &[(String, String)]) -> String {
    let mut text = String::new();
    header(
        &mut text,
        "target_info",
        "The resource attributes of this agent.",
        "gauge",
    );
    let resource = resource
        .iter()
        .map(|(n, v)| (n.as_str(), v.as_str().into()));
    sample(&mut text, "target_info", resource, &Number::Int(1));
    for metric in METRICS {
        family(&mut text, metric, view);
    }
    text
}

/// The name of a metric as Prometheus has it.
pub(crate) fn prometheus_name(metric: &Metric) -> String {
    let mut name = sanitized(metric.name);
    // An annotation in braces is no unit. Whole shares are told apart from counts of things.
    let unit = match (metric.unit, metric.kind) {
        ("s", _) => "_seconds",
        ("By", _) => "_bytes",
        ("1", Kind::Gauge) => "_ratio",
        _ => "",
    };
    if !name.ends_with(unit) {
        name.push_str(unit);
    }
    if metric.kind == Kind::Counter {
        name.push_str("_total");
    }
    name
}

/// A name with only what Prometheus allows in the name of a label.
fn sanitized(name: &str) -> String {
    let allowed = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    name.chars().map(allowed).collect()
}

fn family(text: &mut String, metric: &Metric, view: &View) {
    let name = prometheus_name(metric);
    let kind = match metric.kind {
        Kind::Counter => "counter",
        Kind::UpDownCounter | Kind::Gauge => "gauge",
        Kind::Histogram => "histogram",
    };
    let mut samples = String::new();
    if metric.kind == Kind::Histogram {
        let (bucket, count) = (format!("{name}_bucket"), format!("{name}_count"));
        collect(metric, view, &mut |value, attributes| {
            sample(&mut samples, &bucket, labels(attributes), &value);
            // The last bucket holds all values.
            let is_le = |a: &&KeyValue| a.key.as_str() == attribute::LE;
            if attributes
                .iter()
                .any(|a| is_le(&a) && a.value.as_str() == "+Inf")
            {
                let rest = attributes.iter().filter(|a| !is_le(a));
                sample(&mut samples, &count, labels(rest), &value);
            }
        });
    } else {
        collect(metric, view, &mut |value, attributes| {
            sample(&mut samples, &name, labels(attributes), &value);
        });
    }
    if !samples.is_empty() {
        header(text, &name, metric.description, kind);
        text.push_str(&samples);
    }
}

fn header(text: &mut String, name: &str, help: &str, kind: &str) {
    text.push_str("# HELP ");
    text.push_str(name);
    text.push(' ');
    escaped(text, help, false);
    // Writing to a string does not fail.
    let _ = write!(text, "\n# TYPE {name} {kind}\n");
}

fn labels<'a>(
    attributes: impl IntoIterator<Item = &'a KeyValue>,
) -> impl Iterator<Item = (&'a str, std::borrow::Cow<'a, str>)> {
    let attributes = attributes.into_iter();
    attributes.map(|a| (a.key.as_str(), a.value.as_str()))
}

fn sample<'a>(
    text: &mut String,
    name: &str,
    labels: impl Iterator<Item = (&'a str, std::borrow::Cow<'a, str>)>,
    value: &Number,
) {
    text.push_str(name);
    let mut separator = '{';
    for (name, value) in labels {
        text.push(separator);
        text.push_str(&sanitized(name));
        text.push_str("=\"");
        escaped(text, &value, true);
        text.push('"');
        separator = ',';
    }
    if separator == ',' {
        text.push('}');
    }
    let _ = match value {
        Number::Int(value) => writeln!(text, " {value}"),
        Number::Float(value) => writeln!(text, " {value}"),
    };
}

/// Backslash and line feed, and in the value of a label the quotation mark, are written as two
/// characters.
fn escaped(text: &mut String, raw: &str, quoted: bool) {
    for c in raw.chars() {
        match c {
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '"' if quoted => text.push_str("\\\""),
            c => text.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::sink::fixture;

    fn text() -> String {
        let resource = [("service.name".to_owned(), "a \"b\"\\\nc".to_owned())];
        expose(&fixture::view(), &resource)
    }

    /// Family → its samples as (name, labels, value).
    fn families() -> BTreeMap<String, Vec<(String, String, f64)>> {
        let mut families: BTreeMap<String, Vec<_>> = BTreeMap::new();
        let mut family = String::new();
        for line in text().lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                family = rest.split(' ').next().unwrap().to_owned();
                assert!(families.insert(family.clone(), Vec::new()).is_none());
            } else if !line.starts_with('#') {
                let (series, value) = line.rsplit_once(' ').unwrap();
                let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
                assert!(name.starts_with(&family), "{line} in {family}");
                let labels = labels.strip_suffix('}').unwrap().to_owned();
                let sample = (name.to_owned(), labels, value.parse().unwrap());
                families.get_mut(&family).unwrap().push(sample);
            }
        }
        families
    }

    #[test]
    fn names_are_those_of_the_specification() {
        let names: BTreeMap<_, _> = METRICS
            .iter()
            .map(|metric| (metric.name, prometheus_name(metric)))
            .collect();
        for (metric, name) in [
            ("tuplewatch.opens", "tuplewatch_opens_total"),
            ("tuplewatch.sockets.in_use", "tuplewatch_sockets_in_use"),
            (
                "tuplewatch.ports.utilization",
                "tuplewatch_ports_utilization_ratio",
            ),
            (
                "tuplewatch.handshake.duration",
                "tuplewatch_handshake_duration_seconds",
            ),
            (
                "tuplewatch.reuse_interval",
                "tuplewatch_reuse_interval_seconds",
            ),
            ("tuplewatch.maps.memory", "tuplewatch_maps_memory_bytes"),
            ("tuplewatch.build_info", "tuplewatch_build_info"),
        ] {
            assert_eq!(names[metric], name);
        }
        let distinct: BTreeSet<_> = names.values().collect();
        assert_eq!(distinct.len(), METRICS.len());
    }

    #[test]
    fn every_unit_is_known() {
        for metric in METRICS {
            let unit = metric.unit;
            let is_annotation = unit.starts_with('{') && unit.ends_with('}');
            assert!(
                is_annotation || ["s", "By", "1"].contains(&unit),
                "{}: the suffix of `{unit}` is missing in prometheus_name",
                metric.name
            );
        }
    }

    #[test]
    fn counters_have_their_labels_and_values() {
        let families = families();
        let opens = &families["tuplewatch_opens_total"];
        let wire = "client_address=\"198.51.100.7\",server_address=\"203.0.113.10\",\
                    server_port=\"443\",tuplewatch_role=\"responder\",tuplewatch_point=\"wire\"";
        let name = "tuplewatch_opens_total".to_owned();
        assert!(
            opens.contains(&(name.clone(), wire.to_owned(), 5210.0)),
            "{opens:#?}"
        );
        let other = "tuplewatch_aggregate=\"other\"".to_owned();
        assert!(opens.contains(&(name, other, 9.0)), "{opens:#?}");
        assert_eq!(opens.len(), 3);
    }

    #[test]
    fn histograms_are_histograms() {
        let families = families();
        let samples = &families["tuplewatch_handshake_duration_seconds"];
        let wire: Vec<_> = samples
            .iter()
            .filter(|s| s.1.contains("\"wire\""))
            .collect();
        let buckets: Vec<_> = wire.iter().filter(|s| s.0.ends_with("_bucket")).collect();
        assert_eq!(buckets.len(), 20);
        assert!(buckets.iter().map(|s| s.2).is_sorted(), "{buckets:#?}");
        assert!(buckets.last().unwrap().1.ends_with(",le=\"+Inf\""));
        let counts: Vec<_> = wire.iter().filter(|s| s.0.ends_with("_count")).collect();
        assert_eq!(counts.len(), 1);
        assert!(!counts[0].1.contains(",le="));
        assert_eq!((counts[0].2, buckets[19].2), (140.0, 140.0));
    }

    #[test]
    fn text_is_escaped() {
        assert!(
            text().contains("target_info{service_name=\"a \\\"b\\\"\\\\\\nc\"} 1\n"),
            "{}",
            text().lines().take(4).collect::<Vec<_>>().join("\n")
        );
    }

    #[test]
    fn every_metric_of_the_table_that_has_values_is_there() {
        let families = families();
        for metric in METRICS {
            let mut values = 0;
            collect(metric, &fixture::view(), &mut |_, _| values += 1);
            let samples = families.get(&prometheus_name(metric)).map_or(0, Vec::len);
            let counts = if metric.kind == Kind::Histogram {
                values / 20
            } else {
                0
            };
            assert_eq!(samples, values + counts, "{}", metric.name);
        }
    }
}
