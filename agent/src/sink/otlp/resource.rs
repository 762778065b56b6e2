//! Who sends: the resource attributes.

use std::fs;

use opentelemetry::KeyValue;
use opentelemetry_sdk::{
    Resource,
    resource::{EnvResourceDetector, TelemetryResourceDetector},
};
use rustix::system::uname;

/// What is known about this host and agent. `OTEL_RESOURCE_ATTRIBUTES` and `OTEL_SERVICE_NAME` win.
pub(super) fn resource(version: &'static str) -> Resource {
    let mut attributes = vec![
        KeyValue::new("service.name", "tuplewatch"),
        KeyValue::new("service.version", version),
        KeyValue::new("os.type", "linux"),
        KeyValue::new("host.arch", arch()),
    ];
    let name = uname().nodename().to_string_lossy().into_owned();
    let id = machine_id();
    // One agent per host: its identity is the host's, so that a restart goes on with the same series.
    let instance = id.clone().unwrap_or_else(|| name.clone());
    attributes.push(KeyValue::new("service.instance.id", instance));
    attributes.push(KeyValue::new("host.name", name));
    attributes.extend(id.map(|id| KeyValue::new("host.id", id)));

    let mut builder = Resource::builder_empty()
        .with_detector(Box::new(TelemetryResourceDetector))
        .with_attributes(attributes)
        .with_detector(Box::new(EnvResourceDetector::new()));
    if let Some(name) = std::env::var("OTEL_SERVICE_NAME")
        .ok()
        .filter(|name| !name.is_empty())
    {
        builder = builder.with_service_name(name);
    }
    builder.build()
}

/// See machine-id(5).
fn machine_id() -> Option<String> {
    let paths = ["/etc/machine-id", "/var/lib/dbus/machine-id"];
    let texts = paths
        .into_iter()
        .filter_map(|path| fs::read_to_string(path).ok());
    let mut ids = texts.map(|text| text.trim().to_owned());
    ids.find(|id| id.len() == 32 && id.chars().all(|c| c.is_ascii_hexdigit()))
}

/// The names that OpenTelemetry has for them.
fn arch() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "x86" => "x86",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry::Key;

    use super::*;

    #[test]
    fn the_resource_names_service_and_host() {
        let resource = resource("1.2.3");
        let get = |key: &'static str| resource.get(&Key::new(key)).map(|v| v.to_string());
        assert_eq!(get("service.version").as_deref(), Some("1.2.3"));
        assert_eq!(get("telemetry.sdk.language").as_deref(), Some("rust"));
        assert_eq!(get("os.type").as_deref(), Some("linux"));
        for key in [
            "service.name",
            "service.instance.id",
            "host.name",
            "host.arch",
        ] {
            assert!(get(key).is_some_and(|value| !value.is_empty()), "{key}");
        }
        assert_eq!(
            get("service.instance.id"),
            self::resource("1")
                .get(&Key::new("service.instance.id"))
                .map(|v| v.to_string())
        );
    }
}
