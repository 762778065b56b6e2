//! Alerts and look-alikes as OTLP log records.

use std::time::SystemTime;

use opentelemetry::{
    Key,
    logs::{AnyValue, LogRecord, Severity as LogSeverity},
};

use super::{
    WallClock,
    metrics::{attribute as a, space_attributes},
};
use crate::core::{
    alert::{Alert, State},
    finding::{Finding, OpenedBy, Severity},
    time::Moment,
};

const ALERT: &str = "tuplewatch.alert";
const LOOK_ALIKE: &str = "tuplewatch.look_alike";
const ENDED: &str = "tuplewatch.ended";
const EVIDENCE: &str = "tuplewatch.evidence";
const SINCE: &str = "tuplewatch.since";
const EVIDENCE_FILE: &str = "tuplewatch.evidence_file";

/// Event names and what they mean.
pub(super) const EVENTS: &[(&str, &str)] = &[
    (
        ALERT,
        "an alert became pending, firing or resolved, got worse, or still fires with new figures",
    ),
    (
        LOOK_ALIKE,
        "a trouble that resembles a signature and is not it began or ended",
    ),
];

/// Names, types and meanings of the attributes.
pub(super) const ATTRIBUTES: &[(&str, &str, &str)] = &[
    (a::ALERT_ID, "text", "identity of the alert (alerts only)"),
    (
        a::ALERT_STATE,
        "text",
        "`pending`, `firing` or `resolved` (alerts only)",
    ),
    (ENDED, "boolean", "whether it is over (look-alikes only)"),
    (a::SIGNATURE, "text", "kind of trouble (alerts only)"),
    (a::CAUSE, "text", "its cause, or the name of the look-alike"),
    (a::SEVERITY, "text", "`info`, `warning` or `critical`"),
    (a::CONFIDENCE, "text", "`medium` or `high`"),
    (a::CLIENT_ADDRESS, "text", "who sends the SYNs"),
    (a::SERVER_ADDRESS, "text", "who gets them"),
    (a::SERVER_PORT, "integer", "port of the server"),
    (
        a::ROLE,
        "text",
        "what this host is: `initiator`, `responder` or `unknown`",
    ),
    (a::POINT, "text", "`socket` or `wire`"),
    (
        a::NETNS,
        "integer",
        "inode of the network namespace (point `socket` only)",
    ),
    (SINCE, "text", "when the episode began, RFC 3339"),
    (
        EVIDENCE_FILE,
        "text",
        "the flight recorder's latest file about it, on the host (alerts only, where there is one)",
    ),
    (a::REMEDY, "text", "what to do"),
    (
        a::RULED_OUT,
        "list of texts",
        "look-alikes considered, and why they are not the answer",
    ),
    (
        a::OPENED_BY,
        "list of texts",
        "processes that open the connections",
    ),
    (
        "tuplewatch.evidence.*",
        "number",
        "the numbers of `evidence` in `docs/json.md`, under the same names; what is not known is left out",
    ),
];

/// Fills in a record for an alert.
pub(super) fn alert(record: &mut impl LogRecord, alert: &Alert, clock: &WallClock) {
    record.set_event_name(ALERT);
    let severity = match alert.state {
        State::Firing => alert.finding.severity,
        State::Pending | State::Resolved => Severity::Info,
    };
    record.add_attribute(a::ALERT_ID, alert.id.clone());
    record.add_attribute(a::ALERT_STATE, alert.state.name());
    if let Some(signature) = alert.finding.verdict.signature() {
        record.add_attribute(a::SIGNATURE, signature);
    }
    if let Some(path) = &alert.evidence_file {
        record.add_attribute(EVIDENCE_FILE, path.display().to_string());
    }
    finding(record, &alert.finding, severity, alert.at, clock);
}

/// Fills in a record for a look-alike.
pub(super) fn look_alike(
    record: &mut impl LogRecord,
    what: &Finding,
    ended: bool,
    at: Moment,
    clock: &WallClock,
) {
    record.set_event_name(LOOK_ALIKE);
    record.add_attribute(ENDED, ended);
    finding(record, what, Severity::Info, at, clock);
}

fn finding(
    record: &mut impl LogRecord,
    finding: &Finding,
    severity: Severity,
    at: Moment,
    clock: &WallClock,
) {
    let (number, text) = match severity {
        Severity::Info => (LogSeverity::Info, "INFO"),
        Severity::Warning => (LogSeverity::Warn, "WARN"),
        Severity::Critical => (LogSeverity::Error, "ERROR"),
    };
    record.set_timestamp(clock.system_time(at));
    record.set_observed_timestamp(SystemTime::now());
    record.set_severity_number(number);
    record.set_severity_text(text);
    record.set_body(finding.summary.clone().into());
    record.add_attribute(a::CAUSE, finding.verdict.name());
    record.add_attribute(a::SEVERITY, finding.severity.name());
    record.add_attribute(a::CONFIDENCE, finding.confidence.name());
    for attribute in space_attributes(&finding.space) {
        let value = match attribute.value {
            opentelemetry::Value::I64(number) => AnyValue::Int(number),
            other => AnyValue::String(other.as_str().into_owned().into()),
        };
        record.add_attribute(attribute.key, value);
    }
    record.add_attribute(SINCE, clock.rfc3339(finding.since));
    record.add_attribute(a::REMEDY, finding.remedy.clone());
    let ruled_out = finding
        .ruled_out
        .iter()
        .map(|other| format!("{}: {}", other.name, other.why));
    record.add_attribute(a::RULED_OUT, texts(ruled_out));
    record.add_attribute(a::OPENED_BY, texts(finding.opened_by.iter().map(opener)));
    // Serialising plain numbers and options cannot fail.
    let evidence = serde_json::to_value(&finding.evidence).unwrap_or_default();
    numbers(record, EVIDENCE, &evidence);
}

/// Adds every number of `value`, and of the objects in it, below `name`.
fn numbers(record: &mut impl LogRecord, name: &str, value: &serde_json::Value) {
    match value {
        serde_json::Value::Object(fields) => {
            for (field, value) in fields {
                numbers(record, &format!("{name}.{field}"), value);
            }
        }
        serde_json::Value::Number(number) => {
            let value = match number.as_i64() {
                Some(integer) => AnyValue::Int(integer),
                None => AnyValue::Double(number.as_f64().unwrap_or(f64::MAX)),
            };
            record.add_attribute(Key::new(name.to_owned()), value);
        }
        _ => {}
    }
}

fn texts(texts: impl Iterator<Item = String>) -> AnyValue {
    AnyValue::ListAny(Box::new(texts.map(AnyValue::from).collect()))
}

fn opener(o: &OpenedBy) -> String {
    let mut text = format!("{}[{}] {:.1}/s", o.command, o.pid, o.opens_per_second);
    if let Some(lifetime) = o.lifetime_seconds {
        text.push_str(&format!(", each for {lifetime:.3} s"));
    }
    if let Some(cgroup) = &o.cgroup {
        text.push_str(&format!(", in {cgroup}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use opentelemetry::logs::{Logger as _, LoggerProvider as _};
    use opentelemetry_sdk::logs::{SdkLogRecord, SdkLoggerProvider};

    use super::*;
    use crate::{core::report::Change, sink::fixture};

    fn record() -> SdkLogRecord {
        SdkLoggerProvider::builder()
            .build()
            .logger("test")
            .create_log_record()
    }

    fn attributes(record: &SdkLogRecord) -> Vec<(String, AnyValue)> {
        record
            .attributes_iter()
            .map(|(key, value)| (key.to_string(), value.clone()))
            .collect()
    }

    #[test]
    fn an_alert_has_severity_time_body_and_evidence() {
        let clock = WallClock::capture();
        let mut record = record();
        alert(&mut record, &fixture::alert(), &clock);
        assert_eq!(record.event_name(), Some("tuplewatch.alert"));
        assert_eq!(record.severity_number(), Some(LogSeverity::Error));
        assert_eq!(record.timestamp(), Some(clock.system_time(fixture::NOW)));
        let attributes = attributes(&record);
        let get = |name: &str| {
            let found = attributes.iter().find(|(key, _)| key == name);
            found.map(|(_, value)| value.clone())
        };
        assert_eq!(get("tuplewatch.alert.state"), Some("firing".into()));
        assert_eq!(
            get("tuplewatch.cause"),
            Some("l4_reuse_in_time_wait".into())
        );
        assert_eq!(get("server.port"), Some(AnyValue::Int(443)));
        assert_eq!(
            get("tuplewatch.evidence.refused_syns"),
            Some(AnyValue::Int(42))
        );
        assert_eq!(
            get("tuplewatch.evidence.pool.first"),
            Some(AnyValue::Int(2048))
        );
        assert_eq!(
            get("tuplewatch.evidence.reuse_interval_min_seconds"),
            Some(AnyValue::Double(1.02))
        );
    }

    #[test]
    fn only_what_fires_is_loud() {
        let clock = WallClock::capture();
        for (state, severity, expected) in [
            (State::Pending, Severity::Critical, LogSeverity::Info),
            (State::Firing, Severity::Warning, LogSeverity::Warn),
            (State::Firing, Severity::Info, LogSeverity::Info),
            (State::Resolved, Severity::Critical, LogSeverity::Info),
        ] {
            let mut example = fixture::alert();
            example.state = state;
            example.finding.severity = severity;
            let mut record = record();
            alert(&mut record, &example, &clock);
            assert_eq!(record.severity_number(), Some(expected), "{state:?}");
        }
    }

    #[test]
    fn every_attribute_is_documented_and_the_other_way_round() {
        let clock = WallClock::capture();
        let mut example = fixture::alert();
        example.finding.space = fixture::socket_key();
        let mut first = record();
        alert(&mut first, &example, &clock);
        let mut second = record();
        let Change::LookAlike { finding, ended } = fixture::look_alike(true) else {
            panic!()
        };
        look_alike(&mut second, &finding, ended, fixture::NOW, &clock);
        let written: BTreeSet<_> = [attributes(&first), attributes(&second)]
            .concat()
            .into_iter()
            .map(
                |(name, _)| match name.strip_prefix("tuplewatch.evidence.") {
                    Some(_) => "tuplewatch.evidence.*".to_owned(),
                    None => name,
                },
            )
            .collect();
        let documented: BTreeSet<_> = ATTRIBUTES
            .iter()
            .map(|(name, ..)| (*name).to_owned())
            .collect();
        assert_eq!(written, documented);
    }
}
