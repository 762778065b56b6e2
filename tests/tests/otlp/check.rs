//! What must have arrived.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use tuplewatch_tests::prelude::*;

use crate::rotel::{Attributes, Received};

/// The incident's port space as the server's wire has it, with more attributes.
fn place(incident: &Incident, more: &[(&str, &str)]) -> Attributes {
    let service = incident.service();
    let all = [
        ("client.address", format!("Str({})", incident.nat_address())),
        ("server.address", format!("Str({})", service.ip())),
        ("server.port", format!("Int({})", service.port())),
        ("tuplewatch.role", "Str(responder)".to_owned()),
        ("tuplewatch.point", "Str(wire)".to_owned()),
    ];
    let more = more.iter().map(|(n, v)| (*n, format!("Str({v})")));
    let all = all.into_iter().chain(more);
    all.map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Each change of the alert is one record, with the figures of the ground truth in the last one.
pub fn alerts(
    incident: &Incident,
    truth: &Counters,
    agent: &Agent,
    received: &Received,
) -> Result<()> {
    let records: Vec<_> = received
        .records
        .iter()
        .filter(|record| record.event == "tuplewatch.alert")
        .collect();
    let lines = agent.alerts()?;
    // The JSON lines tell the same, by another way.
    let told: Vec<_> = lines
        .iter()
        .map(|a| {
            (
                format!("Str({})", a["state"].as_str().unwrap_or("")),
                format!("Str({})", a["id"].as_str().unwrap_or("")),
            )
        })
        .collect();
    let arrived: Vec<_> = records
        .iter()
        .map(|r| {
            (
                r.get("tuplewatch.alert.state").to_owned(),
                r.get("tuplewatch.alert.id").to_owned(),
            )
        })
        .collect();
    assert_eq!(arrived, told);
    let position = |state| records.iter().position(|r| r.is_reuse(state));
    let fired = position("firing").context("no record of a firing alert")?;
    let ended = position("resolved").context("no record of a resolved alert")?;
    assert!(fired < ended, "firing {fired}, resolved {ended}");
    for record in &records {
        for (name, value) in place(incident, &[("tuplewatch.signature", "port_exhaustion")]) {
            assert_eq!(record.get(&name), value, "{name}: {record:#?}");
        }
        assert_eq!(
            record.get("tuplewatch.cause"),
            "Str(l4_reuse_in_time_wait)",
            "{record:#?}"
        );
        assert!(record.timestamp > 0, "{record:#?}");
    }
    let first = records[fired];
    assert_eq!(first.get("tuplewatch.severity"), "Str(warning)");
    assert_eq!(first.severity, "WARN");
    assert_eq!(records[ended].severity, "INFO");
    let last = records.last().context("no record")?;
    let line = lines.last().context("no alert")?;
    let summary = line["summary"].as_str().context("summary")?;
    assert_eq!(last.body, format!("Str({summary})"));
    for (name, count) in [
        ("refused_syns", truth.bareack_to_syn_out),
        ("rsts", truth.rst_to_syn_in),
        ("syn_retransmits", truth.syn_repeat_in),
    ] {
        assert_eq!(
            last.get(&format!("tuplewatch.evidence.{name}")),
            format!("Int({count})"),
            "{name}"
        );
    }
    Ok(())
}

/// The counters at the end are those of the ground truth.
pub fn counters(incident: &Incident, truth: &Counters, received: &Received) -> Result<()> {
    let refused = truth.bareack_to_syn_out;
    let former = "tuplewatch.former";
    // Every former connection was closed in order: the server held it in TIME_WAIT.
    for (name, unit, more, expected) in [
        (
            "opens",
            "{connection}",
            None,
            truth.syn_in - truth.syn_repeat_in,
        ),
        ("syn_retransmits", "{segment}", None, truth.syn_repeat_in),
        ("bare_acks", "{segment}", Some((former, "closed")), refused),
        ("bare_acks", "{segment}", Some((former, "open")), 0),
        ("bare_acks", "{segment}", Some((former, "half_open")), 0),
        ("bare_acks", "{segment}", Some((former, "unknown")), 0),
        ("bare_ack_resets", "{segment}", None, truth.rst_to_syn_in),
    ] {
        let metric = received.last(&format!("tuplewatch.{name}"))?;
        let value = metric.value(&place(incident, more.as_slice()))?;
        assert_eq!(value, expected, "{name} {more:?}");
        assert_eq!(metric.unit, unit, "{name}");
        assert_eq!(metric.data_type, "Sum", "{name}");
        assert!(metric.is_monotonic, "{name}");
        assert_eq!(
            metric.temporality, "AGGREGATION_TEMPORALITY_CUMULATIVE",
            "{name}"
        );
    }
    Ok(())
}

/// What goes up and down: gauges, and sums that are not monotonic.
pub fn levels(incident: &Incident, received: &Received) -> Result<()> {
    let budget = received.last("tuplewatch.ports.budget")?;
    assert_eq!(budget.value(&place(incident, &[]))?, 200, "the NAT's pool");
    assert_eq!(
        (budget.unit.as_str(), budget.data_type.as_str()),
        ("{port}", "Gauge")
    );
    let alerts: Attributes = [
        ("tuplewatch.signature", "Str(port_exhaustion)"),
        ("tuplewatch.cause", "Str(l4_reuse_in_time_wait)"),
        ("tuplewatch.severity", "Str(warning)"),
        ("tuplewatch.alert.state", "Str(firing)"),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .collect();
    let last = received.last("tuplewatch.alerts")?;
    assert_eq!(last.value(&alerts)?, 0, "it has resolved");
    assert_eq!(
        (last.unit.as_str(), last.data_type.as_str()),
        ("{alert}", "Sum")
    );
    assert!(!last.is_monotonic);
    let metrics = received.metrics.iter();
    let mut exports = metrics.filter(|metric| metric.name == last.name);
    assert!(
        exports.any(|metric| metric.value(&alerts).is_ok_and(|n| n == 1)),
        "no export while it fired"
    );
    Ok(())
}

/// Cumulative: one start for each series, and no value goes back.
pub fn series(received: &Received) -> Result<()> {
    let mut series: BTreeMap<(&str, &Attributes), (&str, u64, u32)> = BTreeMap::new();
    for metric in received.metrics.iter().filter(|m| m.is_monotonic) {
        for point in &metric.points {
            let value: u64 = point.value.parse()?;
            let (start, before, times) = series
                .entry((&metric.name, &point.attributes))
                .or_insert((&point.start, 0, 0));
            ensure!(*start == point.start, "{}: another start", metric.name);
            ensure!(
                value >= *before,
                "{} {:?} went back from {before} to {value}",
                metric.name,
                point.attributes
            );
            (*before, *times) = (value, *times + 1);
        }
    }
    let most = series.values().map(|(_, _, times)| *times).max();
    assert!(most.is_some_and(|times| times >= 10), "exports: {most:?}");
    Ok(())
}

/// Who sends is told with everything.
pub fn resource(agent: &Agent, received: &Received) -> Result<()> {
    let ready = agent.of_type("ready")?;
    let version = ready[0]["version"].as_str().context("version")?;
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname")?;
    let records = received.records.iter().map(|r| &r.resource);
    for resource in received.metrics.iter().map(|m| &m.resource).chain(records) {
        for (name, value) in [
            ("service.name", "tuplewatch"),
            ("service.version", version),
            ("host.name", host.trim()),
        ] {
            assert_eq!(
                resource.get(name),
                Some(&format!("Str({value})")),
                "{resource:?}"
            );
        }
    }
    let scope = format!("tuplewatch {version}");
    assert!(received.metrics.iter().all(|m| m.scope == scope));
    Ok(())
}
