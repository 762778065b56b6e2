//! The exporters of the official crate, with what it leaves to us: TLS roots for gRPC, and the
//! variables for certificates.

use std::{collections::HashMap, fs, io, path::PathBuf, time::Duration};

use opentelemetry_otlp::{
    LogExporter, MetricExporter, RetryPolicy, WithExportConfig, WithHttpConfig, WithTonicConfig,
    tonic_types::{
        metadata::MetadataMap,
        transport::{Certificate, ClientTlsConfig, Identity},
    },
};
use opentelemetry_sdk::metrics::Temporality;
use reqwest::{
    blocking::Client,
    header::{HeaderMap, HeaderName, HeaderValue},
};

use super::settings::{OtlpError, Protocol, Target};

/// Timeout of one request, unless the environment sets one (OpenTelemetry's default).
const TIMEOUT: Duration = Duration::from_secs(10);

/// Makes the exporter of metrics. For gRPC a tokio runtime must be entered.
///
/// With delta, a failed export is lost data: it is tried again until the next one is due.
pub(super) fn metrics(
    target: &Target,
    temporality: Temporality,
    interval: Duration,
) -> Result<MetricExporter, OtlpError> {
    let builder = MetricExporter::builder().with_temporality(temporality);
    let patient = temporality == Temporality::Delta;
    let policy = if patient {
        let long = Duration::from_secs(5);
        RetryPolicy::recommended()
            .with_max_retries(1000)
            .with_max_delay(long)
    } else {
        RetryPolicy::recommended()
    };
    // The exporter takes its timeout as the time for all attempts.
    let timeout = match (target.has_timeout, patient) {
        (true, _) => None,
        (false, true) => Some(interval.max(Duration::from_secs(30))),
        (false, false) => Some(TIMEOUT),
    };
    let built = match target.protocol {
        Protocol::Grpc => {
            let builder = grpc(builder.with_tonic().with_retry_policy(policy), target)?;
            match timeout {
                Some(timeout) => builder.with_timeout(timeout).build(),
                None => builder.build(),
            }
        }
        Protocol::HttpProtobuf => {
            let builder = http(builder.with_http().with_retry_policy(policy), target)?;
            match timeout {
                Some(timeout) => builder.with_timeout(timeout).build(),
                None => builder.build(),
            }
        }
    };
    built.map_err(|error| refused(target, &error))
}

/// Makes the exporter of log records, which tries once: the spool tries again. For gRPC a tokio
/// runtime must be entered.
pub(super) fn logs(target: &Target) -> Result<LogExporter, OtlpError> {
    let once = RetryPolicy::disabled();
    let built = match target.protocol {
        Protocol::Grpc => grpc(
            LogExporter::builder().with_tonic().with_retry_policy(once),
            target,
        )?
        .build(),
        Protocol::HttpProtobuf => http(
            LogExporter::builder().with_http().with_retry_policy(once),
            target,
        )?
        .build(),
    };
    built.map_err(|error| refused(target, &error))
}

fn refused(target: &Target, error: &dyn std::error::Error) -> OtlpError {
    let (signal, endpoint) = (target.signal.name(), target.endpoint.clone());
    OtlpError::Exporter {
        signal,
        endpoint,
        problem: error.to_string(),
    }
}

fn grpc<B: WithExportConfig + WithTonicConfig>(
    builder: B,
    target: &Target,
) -> Result<B, OtlpError> {
    let metadata = MetadataMap::from_headers(headers(target)?);
    let builder = builder
        .with_endpoint(&target.endpoint)
        .with_metadata(metadata);
    if target.endpoint.starts_with("http://") {
        return Ok(builder);
    }
    // Without this the crate trusts nobody.
    let mut tls = ClientTlsConfig::new();
    tls = match read(&target.certificate)? {
        Some(pem) => tls.ca_certificate(Certificate::from_pem(pem)),
        None => tls.with_enabled_roots(),
    };
    if let Some(Pair { certificate, key }) = identity(target)? {
        tls = tls.identity(Identity::from_pem(certificate, key));
    }
    Ok(builder.with_tls_config(tls))
}

fn http<B: WithExportConfig + WithHttpConfig>(builder: B, target: &Target) -> Result<B, OtlpError> {
    // The crate leaves out what it cannot send without a word.
    headers(target)?;
    let headers: HashMap<_, _> = target.headers.iter().cloned().collect();
    let builder = builder
        .with_endpoint(&target.endpoint)
        .with_headers(headers);
    let (root, identity) = (read(&target.certificate)?, identity(target)?);
    if root.is_none() && identity.is_none() {
        return Ok(builder);
    }
    let wrong = |error: reqwest::Error| refused(target, &error);
    let mut client = Client::builder().timeout(TIMEOUT);
    if let Some(pem) = root {
        let roots = reqwest::Certificate::from_pem_bundle(&pem).map_err(wrong)?;
        client = client.tls_certs_only(roots);
    }
    if let Some(Pair { certificate, key }) = identity {
        let pem = [key, certificate].concat();
        client = client.identity(reqwest::Identity::from_pem(&pem).map_err(wrong)?);
    }
    // A blocking client must not be made on a thread of the runtime.
    let client = std::thread::scope(|scope| scope.spawn(|| client.build()).join());
    let client = client
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        .map_err(wrong)?;
    Ok(builder.with_http_client(client))
}

fn headers(target: &Target) -> Result<HeaderMap, OtlpError> {
    let mut map = HeaderMap::new();
    for (name, value) in &target.headers {
        let pair = (
            HeaderName::from_bytes(name.as_bytes()),
            HeaderValue::from_str(value),
        );
        let (Ok(name), Ok(value)) = pair else {
            let problem = format!("`{name}` is not a header with a value of visible characters");
            let name = format!("OTLP header for {}", target.signal.name());
            return Err(OtlpError::Setting { name, problem });
        };
        map.insert(name, value);
    }
    Ok(map)
}

/// Reads a file in PEM. One without any would be taken for an empty list of authorities.
fn read(file: &Option<(String, PathBuf)>) -> Result<Option<Vec<u8>>, OtlpError> {
    let Some((name, path)) = file else {
        return Ok(None);
    };
    let wrong = |error| OtlpError::File {
        name: name.clone(),
        path: path.clone(),
        error,
    };
    let bytes = fs::read(path).map_err(wrong)?;
    if !String::from_utf8_lossy(&bytes).contains("-----BEGIN ") {
        let problem = "it holds no certificate or key in PEM";
        return Err(wrong(io::Error::new(io::ErrorKind::InvalidData, problem)));
    }
    Ok(Some(bytes))
}

/// Who we are, in PEM.
struct Pair {
    certificate: Vec<u8>,
    key: Vec<u8>,
}

/// Certificate and key of this agent; one without the other is an error.
fn identity(target: &Target) -> Result<Option<Pair>, OtlpError> {
    let pair = (read(&target.client_certificate)?, read(&target.client_key)?);
    match pair {
        (Some(certificate), Some(key)) => Ok(Some(Pair { certificate, key })),
        (None, None) => Ok(None),
        _ => Err(OtlpError::Setting {
            name: "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE".to_owned(),
            problem: "it needs OTEL_EXPORTER_OTLP_CLIENT_KEY, and the other way round".to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::settings::Signal, *};

    fn target(protocol: Protocol) -> Target {
        Target {
            signal: Signal::Metrics,
            endpoint: "https://127.0.0.1:1".to_owned(),
            protocol,
            headers: Vec::new(),
            has_timeout: false,
            certificate: None,
            client_key: None,
            client_certificate: None,
        }
    }

    fn error(target: &Target) -> String {
        let runtime = tokio::runtime::Builder::new_multi_thread().build().unwrap();
        let _guard = runtime.enter();
        logs(target).unwrap_err().to_string()
    }

    #[test]
    fn wrong_files_and_headers_are_told_for_both_protocols() {
        for protocol in [Protocol::Grpc, Protocol::HttpProtobuf] {
            let file = |path: &str| Some(("VARIABLE".to_owned(), PathBuf::from(path)));
            let missing = Target {
                certificate: file("/no/such/file"),
                ..target(protocol)
            };
            assert!(error(&missing).starts_with("VARIABLE: cannot read /no/such/file: "));
            let no_pem = Target {
                certificate: file("/proc/self/stat"),
                ..target(protocol)
            };
            assert!(error(&no_pem).contains("no certificate or key in PEM"));
            let headers = vec![("x-key".to_owned(), "a\nb".to_owned())];
            let header = Target {
                headers,
                ..target(protocol)
            };
            assert!(
                error(&header).contains("`x-key` is not a header"),
                "{}",
                error(&header)
            );
            let pem = tempfile::NamedTempFile::new().unwrap();
            fs::write(pem.path(), "-----BEGIN CERTIFICATE-----").unwrap();
            let path = pem.path().to_str().unwrap();
            let half = Target {
                client_certificate: file(path),
                ..target(protocol)
            };
            assert!(
                error(&half).contains("OTEL_EXPORTER_OTLP_CLIENT_KEY"),
                "{}",
                error(&half)
            );
        }
    }
}
