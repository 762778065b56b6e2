//! What the options and the standard `OTEL_*` variables ask for. Options go before variables, the
//! variable of a signal before the general one.

use std::{fmt, path::PathBuf, str::FromStr, time::Duration};

use opentelemetry_sdk::metrics::Temporality;

/// What the command line asks for; everything may be left to the environment.
#[derive(Clone, Debug, Default)]
pub struct OtlpConfig {
    /// Base URL of the receiver, as `OTEL_EXPORTER_OTLP_ENDPOINT` has it: `/v1/metrics` and
    /// `/v1/logs` are appended for HTTP.
    pub endpoint: Option<String>,
    /// How to talk to it.
    pub protocol: Option<Protocol>,
    /// Headers of every request. Secrets belong into `OTEL_EXPORTER_OTLP_HEADERS`, which wins where
    /// both have a name: a command line can be read by everybody.
    pub headers: Vec<(String, String)>,
    /// Time between two exports of metrics.
    pub interval: Option<Duration>,
    /// Whether counters are told as totals or as differences.
    pub temporality: Option<Temporality>,
}

/// How OTLP is spoken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protocol {
    /// gRPC, usually on port 4317.
    Grpc,
    /// Protobuf over HTTP, usually on port 4318.
    HttpProtobuf,
}

impl FromStr for Protocol {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "grpc" => Ok(Self::Grpc),
            "http/protobuf" => Ok(Self::HttpProtobuf),
            _ => Err(format!(
                "`{text}` is not a protocol; there are grpc and http/protobuf"
            )),
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Grpc => "grpc",
            Self::HttpProtobuf => "http/protobuf",
        })
    }
}

/// Why OTLP could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum OtlpError {
    /// A variable or option has a value that is none.
    #[error("{name}: {problem}")]
    Setting {
        /// Name of the variable or option.
        name: String,
        /// What is wrong, and what would be right.
        problem: String,
    },
    /// A certificate or key could not be read.
    #[error("{name}: cannot read {}: {error}", path.display())]
    File {
        /// Name of the variable.
        name: String,
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// The exporter refused its settings.
    #[error("OTLP exporter for {signal} ({endpoint}): {problem}")]
    Exporter {
        /// `metrics` or `logs`.
        signal: &'static str,
        /// The receiver.
        endpoint: String,
        /// What is wrong.
        problem: String,
    },
}

/// One of the two kinds of data that are sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Signal {
    Metrics,
    Logs,
}

impl Signal {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Metrics => "metrics",
            Self::Logs => "logs",
        }
    }

    /// `OTEL_EXPORTER_OTLP_METRICS_<WHAT>`.
    fn variable(self, what: &str) -> String {
        format!("OTEL_EXPORTER_OTLP_{}_{what}", self.name().to_uppercase())
    }
}

/// Everything that is settled about one signal. Headers, timeout and compression from the
/// environment are left to the exporter.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Target {
    pub(super) signal: Signal,
    /// The full URL for HTTP.
    pub(super) endpoint: String,
    pub(super) protocol: Protocol,
    pub(super) headers: Vec<(String, String)>,
    /// The environment sets a timeout.
    pub(super) has_timeout: bool,
    /// Who the receiver is trusted by, and who we are: variable and file.
    pub(super) certificate: Option<(String, PathBuf)>,
    pub(super) client_key: Option<(String, PathBuf)>,
    pub(super) client_certificate: Option<(String, PathBuf)>,
}

/// Everything that is settled.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Settings {
    pub(super) metrics: Option<Target>,
    pub(super) logs: Option<Target>,
    pub(super) interval: Duration,
    pub(super) temporality: Temporality,
}

impl Settings {
    /// Settles everything; `env` reads a variable. Nothing is sent if no endpoint is set.
    pub(super) fn resolve(
        config: &OtlpConfig,
        env: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Self, OtlpError> {
        // An empty variable is as good as none (OpenTelemetry specification).
        let env = |name: &str| env(name).filter(|value| !value.trim().is_empty());
        let disabled = env("OTEL_SDK_DISABLED").is_some_and(|v| v.eq_ignore_ascii_case("true"));
        let target = |signal| {
            if disabled {
                Ok(None)
            } else {
                target(signal, config, &env)
            }
        };
        Ok(Self {
            metrics: target(Signal::Metrics)?,
            logs: target(Signal::Logs)?,
            interval: interval(config, &env)?,
            temporality: temporality(config, &env)?,
        })
    }
}

type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

fn wrong<T>(name: impl Into<String>, problem: impl Into<String>) -> Result<T, OtlpError> {
    Err(OtlpError::Setting {
        name: name.into(),
        problem: problem.into(),
    })
}

fn target(signal: Signal, config: &OtlpConfig, env: Env) -> Result<Option<Target>, OtlpError> {
    let exporter = format!("OTEL_{}_EXPORTER", signal.name().to_uppercase());
    match env(&exporter).as_deref().map(str::trim) {
        None | Some("otlp") => {}
        Some("none") => return Ok(None),
        Some(other) => return wrong(exporter, format!("`{other}` is not otlp or none")),
    }
    // The more special variable first.
    let either = |what: &str| {
        let names = [signal.variable(what), format!("OTEL_EXPORTER_OTLP_{what}")];
        names
            .into_iter()
            .find_map(|name| env(&name).map(|value| (name, value)))
    };
    let base = config.endpoint.as_ref().map(|value| (value.clone(), true));
    let own = env(&signal.variable("ENDPOINT")).map(|value| (value, false));
    let general = env("OTEL_EXPORTER_OTLP_ENDPOINT").map(|value| (value, true));
    let Some((endpoint, is_base)) = base.or(own).or(general) else {
        return Ok(None);
    };
    let endpoint = endpoint.trim().to_owned();

    let protocol = match (config.protocol, either("PROTOCOL")) {
        (Some(protocol), _) => protocol,
        (None, Some((name, value))) => value
            .trim()
            .parse()
            .map_err(|problem| OtlpError::Setting { name, problem })?,
        // Port 4317 is registered for gRPC; speaking HTTP there gives errors hard to understand.
        (None, None) if endpoint.trim_end_matches('/').ends_with(":4317") => Protocol::Grpc,
        (None, None) => Protocol::HttpProtobuf,
    };
    let has_scheme = endpoint.contains("://");
    if protocol == Protocol::HttpProtobuf && !has_scheme {
        let problem =
            format!("`{endpoint}` is not a URL; write http://{endpoint} or https://{endpoint}");
        return wrong(format!("OTLP endpoint for {}", signal.name()), problem);
    }
    let endpoint = match protocol {
        Protocol::HttpProtobuf if is_base => {
            format!("{}/v1/{}", endpoint.trim_end_matches('/'), signal.name())
        }
        _ => endpoint,
    };
    let file = |what| either(what).map(|(name, path)| (name, PathBuf::from(path)));
    Ok(Some(Target {
        signal,
        endpoint,
        protocol,
        headers: config.headers.clone(),
        has_timeout: either("TIMEOUT").is_some(),
        certificate: file("CERTIFICATE"),
        client_key: file("CLIENT_KEY"),
        client_certificate: file("CLIENT_CERTIFICATE"),
    }))
}

fn interval(config: &OtlpConfig, env: Env) -> Result<Duration, OtlpError> {
    const NAME: &str = "OTEL_METRIC_EXPORT_INTERVAL";
    let interval = match (config.interval, env(NAME)) {
        (Some(interval), _) => interval,
        (None, None) => Duration::from_secs(60),
        (None, Some(text)) => match text.trim().parse() {
            Ok(ms) => Duration::from_millis(ms),
            Err(_) => return wrong(NAME, format!("`{text}` is not a number of milliseconds")),
        },
    };
    if interval.is_zero() {
        return wrong(NAME, "the time between two exports must not be zero");
    }
    Ok(interval)
}

fn temporality(config: &OtlpConfig, env: Env) -> Result<Temporality, OtlpError> {
    const NAME: &str = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE";
    if let Some(temporality) = config.temporality {
        return Ok(temporality);
    }
    match env(NAME).map(|text| text.trim().to_lowercase()).as_deref() {
        None | Some("cumulative") => Ok(Temporality::Cumulative),
        Some("delta") => Ok(Temporality::Delta),
        Some("lowmemory") => Ok(Temporality::LowMemory),
        Some(other) => wrong(
            NAME,
            format!("`{other}` is none of cumulative, delta and lowmemory"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(config: &OtlpConfig, env: &[(&str, &str)]) -> Result<Settings, OtlpError> {
        Settings::resolve(config, &|name| {
            let found = env.iter().find(|(n, _)| *n == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    fn endpoints(config: &OtlpConfig, env: &[(&str, &str)]) -> (Option<String>, Option<String>) {
        let settings = resolve(config, env).unwrap();
        (
            settings.metrics.map(|t| t.endpoint),
            settings.logs.map(|t| t.endpoint),
        )
    }

    fn some(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    const GENERAL: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:4318/");

    #[test]
    fn nothing_is_sent_unless_an_endpoint_is_set() {
        let none = OtlpConfig::default();
        assert_eq!(endpoints(&none, &[]), (None, None));
        assert_eq!(
            endpoints(&none, &[("OTEL_EXPORTER_OTLP_ENDPOINT", " ")]),
            (None, None)
        );
        assert_eq!(
            endpoints(&none, &[GENERAL, ("OTEL_SDK_DISABLED", "True")]),
            (None, None)
        );
        let no_logs = [GENERAL, ("OTEL_LOGS_EXPORTER", "none")];
        assert_eq!(
            endpoints(&none, &no_logs),
            (some("http://a:4318/v1/metrics"), None)
        );
    }

    #[test]
    fn options_go_before_variables_and_special_before_general_ones() {
        let none = OtlpConfig::default();
        let own = ("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", "http://b/logs");
        let expected = (some("http://a:4318/v1/metrics"), some("http://b/logs"));
        assert_eq!(endpoints(&none, &[GENERAL, own]), expected);
        assert_eq!(endpoints(&none, &[own]), (None, some("http://b/logs")));
        let option = OtlpConfig {
            endpoint: some("http://c"),
            ..none
        };
        let expected = (some("http://c/v1/metrics"), some("http://c/v1/logs"));
        assert_eq!(endpoints(&option, &[GENERAL, own]), expected);
    }

    #[test]
    fn the_protocol_is_http_unless_said_or_port_4317() {
        let protocol = |env: &[(&str, &str)]| {
            let settings = resolve(&OtlpConfig::default(), env).unwrap();
            let target = settings.metrics.unwrap();
            (target.protocol, target.endpoint)
        };
        let http = (
            Protocol::HttpProtobuf,
            "http://a:4318/v1/metrics".to_owned(),
        );
        assert_eq!(protocol(&[GENERAL]), http);
        let grpc = (Protocol::Grpc, "http://a:4318/".to_owned());
        assert_eq!(
            protocol(&[GENERAL, ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")]),
            grpc
        );
        let mixed = [
            GENERAL,
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
            ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/protobuf"),
        ];
        assert_eq!(protocol(&mixed), http);
        let guessed = protocol(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:4317")]);
        assert_eq!(guessed, (Protocol::Grpc, "http://a:4317".to_owned()));
    }

    #[test]
    fn wrong_values_are_errors_that_name_the_place() {
        for (name, value) in [
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
            ("OTEL_METRIC_EXPORT_INTERVAL", "10s"),
            ("OTEL_METRIC_EXPORT_INTERVAL", "0"),
            ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "daily"),
            ("OTEL_METRICS_EXPORTER", "prometheus"),
        ] {
            let error = resolve(&OtlpConfig::default(), &[GENERAL, (name, value)]).unwrap_err();
            assert!(error.to_string().starts_with(name), "{error}");
        }
        let error = resolve(
            &OtlpConfig::default(),
            &[("OTEL_EXPORTER_OTLP_ENDPOINT", "a:4318")],
        )
        .unwrap_err();
        assert!(error.to_string().contains("http://a:4318"), "{error}");
    }

    #[test]
    fn interval_temporality_and_certificates() {
        let env = [
            GENERAL,
            ("OTEL_METRIC_EXPORT_INTERVAL", "5000"),
            ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "Delta"),
            ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/ca.pem"),
            ("OTEL_EXPORTER_OTLP_LOGS_CERTIFICATE", "/logs.pem"),
        ];
        let settings = resolve(&OtlpConfig::default(), &env).unwrap();
        assert_eq!(settings.interval, Duration::from_secs(5));
        assert_eq!(settings.temporality, Temporality::Delta);
        let path = |target: Option<Target>| target.unwrap().certificate.unwrap().1;
        assert_eq!(path(settings.metrics), PathBuf::from("/ca.pem"));
        assert_eq!(path(settings.logs), PathBuf::from("/logs.pem"));
        let config = OtlpConfig {
            interval: Some(Duration::from_secs(1)),
            temporality: Some(Temporality::Cumulative),
            ..OtlpConfig::default()
        };
        let settings = resolve(&config, &env).unwrap();
        assert_eq!(settings.interval, Duration::from_secs(1));
        assert_eq!(settings.temporality, Temporality::Cumulative);
    }
}
