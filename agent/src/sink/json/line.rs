//! Parts of a line that are not written as the core has them.

use std::net::IpAddr;

use serde::Serialize;
use serde_json::Value;
use tuplewatch_common::address::{Point, PortSpaceKey, Role};

use super::super::WallClock;
use crate::core::{
    finding::Evidence,
    observation::{ip, point_name, role_name},
    time::Moment,
};

/// A port space, with the names that OpenTelemetry has for the two ends.
#[derive(Serialize)]
pub(super) struct Address {
    #[serde(rename = "client.address")]
    client_address: IpAddr,
    #[serde(rename = "server.address")]
    server_address: IpAddr,
    #[serde(rename = "server.port")]
    server_port: u16,
    role: &'static str,
    point: &'static str,
    netns: Option<u32>,
}

impl From<&PortSpaceKey> for Address {
    fn from(key: &PortSpaceKey) -> Self {
        Self {
            client_address: ip(&key.initiator),
            server_address: ip(&key.responder),
            server_port: key.responder_port,
            role: role_name(Role::from_u8(key.role)),
            point: point_name(Point::from_u8(key.point)),
            netns: (key.netns != 0).then_some(key.netns),
        }
    }
}

/// The evidence, with the samples' times as times of day.
pub(super) fn evidence(evidence: &Evidence, clock: &WallClock) -> Value {
    // Serialising plain numbers and options cannot fail; `null` would show in every test.
    let mut value = serde_json::to_value(evidence).unwrap_or_default();
    let samples = value.get_mut("samples").and_then(Value::as_array_mut);
    for sample in samples
        .into_iter()
        .flatten()
        .filter_map(Value::as_object_mut)
    {
        if let Some(ns) = sample.remove("time_ns").and_then(|ns| ns.as_u64()) {
            sample.insert("time".into(), clock.rfc3339(Moment(ns)).into());
        }
    }
    value
}

/// Three digits after the point: more would only be noise.
pub(super) fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}
