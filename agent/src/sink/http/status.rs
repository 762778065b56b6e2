//! `/status`: the state of everything as one JSON object. `docs/status.md` describes every field; a
//! test keeps it in step.
//!
//! What also appears in JSON lines is taken from there, so that there is one shape of it.

use std::net::IpAddr;

use bytes::Bytes;
use serde::Serialize;
use serde_json::{Map, Value};
use tuplewatch_common::record::Global;

use super::{
    super::{Sink as _, json::Json, metrics::Delivery, otlp::Deliveries},
    Configuration, Shared, Shown,
};
use crate::core::{egress::EgressUse, observation::ip, report::Change};

/// Version of the schema, with the same promise as that of the JSON lines.
pub const SCHEMA: u32 = 1;

#[derive(Serialize)]
struct Status<'a> {
    schema: u32,
    time: Value,
    version: &'static str,
    pid: u32,
    started: String,
    uptime_seconds: u64,
    healthy: bool,
    reason: Option<String>,
    configuration: &'a Configuration,
    hooks: Value,
    interfaces: Value,
    unseen: Value,
    memory_bytes: Value,
    losses: Vec<Counted>,
    unassigned: Vec<Counted>,
    exports: Option<Delivery>,
    recorder: Option<&'a crate::recorder::Status>,
    alerts: Vec<Value>,
    muted: Vec<Value>,
    look_alikes: Vec<Value>,
    egress: Vec<Egress<'a>>,
    known_spaces: Value,
    spaces: Value,
    other: Value,
}

/// A destination behind a device in between.
#[derive(Serialize)]
struct Egress<'a> {
    #[serde(rename = "server.address")]
    server_address: IpAddr,
    #[serde(rename = "server.port")]
    server_port: u16,
    #[serde(flatten)]
    taken: &'a EgressUse,
}

/// Something that is counted once per host, also if it is nothing.
#[derive(Serialize)]
struct Counted {
    name: &'static str,
    meaning: &'static str,
    count: u64,
}

/// The page for what is `shown`.
///
/// # Errors
/// Something cannot be written as JSON.
pub(super) fn page(shared: &Shared, shown: &Shown) -> serde_json::Result<Bytes> {
    let (mut ready, mut summary) = (Map::new(), Map::new());
    let (mut alerts, mut look_alikes) = (Vec::new(), Vec::new());
    for mut line in lines(shared, shown)? {
        line.remove("schema");
        match line.remove("type").as_ref().and_then(Value::as_str) {
            Some("ready") => ready = line,
            Some("summary") => summary = line,
            Some("alert") => alerts.push(Value::from(line)),
            Some("look_alike") => {
                // Those that are over are not listed.
                line.remove("ended");
                look_alikes.push(line.into());
            }
            // The losses are told below, also where there are none.
            _ => {}
        }
    }
    let take = |line: &mut Map<String, Value>, name| line.remove(name).unwrap_or_default();
    // The lines of the muted ones follow those of the others.
    let mut muted = alerts.split_off(shown.overview.alerts.len());
    for (line, alert) in muted.iter_mut().zip(&shown.overview.muted) {
        line["muted"] = alert.muted.as_ref().map_or(Value::Null, |muted| {
            let until = muted.until.map(|until| shared.clock.rfc3339(until));
            serde_json::json!({ "reason": muted.reason, "until": until })
        });
    }
    let health = shared.health();
    let globals = Global::NAMES.into_iter().zip(shown.overview.globals);
    let counted = globals.map(|((name, meaning), count)| Counted {
        name,
        meaning,
        count,
    });
    let (losses, others): (Vec<_>, Vec<_>) =
        counted.enumerate().partition(|(i, _)| Global::is_loss(*i));
    let status = Status {
        schema: SCHEMA,
        time: take(&mut summary, "time"),
        version: shared.about.version,
        pid: std::process::id(),
        started: humantime::format_rfc3339_millis(shared.started.0).to_string(),
        uptime_seconds: shared.started.1.elapsed().as_secs(),
        healthy: health.is_ok(),
        reason: health.err(),
        configuration: &shared.about.configuration,
        hooks: take(&mut ready, "hooks"),
        interfaces: take(&mut ready, "interfaces"),
        unseen: take(&mut ready, "unseen"),
        memory_bytes: take(&mut ready, "memory_bytes"),
        losses: losses.into_iter().map(|(_, counted)| counted).collect(),
        unassigned: others.into_iter().map(|(_, counted)| counted).collect(),
        exports: shared.about.deliveries.as_ref().map(Deliveries::now),
        recorder: shown.ready.recorder.as_ref(),
        alerts,
        muted,
        look_alikes,
        egress: shown
            .overview
            .egress
            .iter()
            .map(|(key, taken)| Egress {
                server_address: ip(&key.responder),
                server_port: key.responder_port,
                taken,
            })
            .collect(),
        known_spaces: take(&mut summary, "known_spaces"),
        spaces: take(&mut summary, "spaces"),
        other: take(&mut summary, "other"),
    };
    let mut text = serde_json::to_vec_pretty(&status)?;
    text.push(b'\n');
    Ok(text.into())
}

/// The JSON lines that tell of what is `shown`.
fn lines(shared: &Shared, shown: &Shown) -> serde_json::Result<Vec<Map<String, Value>>> {
    let Shown {
        ready, overview, ..
    } = shown;
    let mut bytes = Vec::new();
    let mut json = Json::new(&mut bytes, shared.clock.clone());
    let alerts = overview.alerts.iter().chain(&overview.muted);
    let alerts = alerts.map(|alert| Change::Alert(Box::new(alert.clone())));
    let look_alikes = overview.look_alikes.iter();
    let look_alikes = look_alikes.map(|finding| Change::LookAlike {
        finding: Box::new(finding.clone()),
        ended: false,
    });
    let changes: Vec<_> = alerts.chain(look_alikes).collect();
    json.ready(overview.now, ready)
        .and_then(|()| json.changes(overview.now, &changes))
        .and_then(|()| json.overview(overview))
        .map_err(serde_json::Error::io)?;
    bytes
        .split_inclusive(|byte| *byte == b'\n')
        .map(serde_json::from_slice)
        .collect()
}
