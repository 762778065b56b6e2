//! Whether the receiver can be reached: a request without any data, by the exporters of a run.

use std::{
    io,
    net::{TcpStream, ToSocketAddrs as _},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use opentelemetry_sdk::{
    error::OTelSdkResult,
    logs::{LogBatch, LogExporter as _},
    metrics::{data::ResourceMetrics, exporter::PushMetricExporter as _},
};
use tokio::runtime::Handle;

use super::{
    OtlpConfig, OtlpError,
    settings::{Settings, Signal, Target},
    transport,
};

/// What one of the receivers said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reached {
    /// `metrics` or `logs`.
    pub signal: &'static str,
    /// The receiver.
    pub endpoint: String,
    /// `grpc` or `http/protobuf`.
    pub protocol: String,
    /// How long it took, or what went wrong.
    pub answer: Result<Duration, String>,
}

/// Asks each receiver that is configured, all at the same time, for `limit` at most. Empty if none is
/// configured. It must not be called from within the multi-threaded runtime that it is given.
///
/// # Errors
/// A variable, option or file is wrong.
pub fn reach(
    config: &OtlpConfig,
    limit: Duration,
    runtime: &Handle,
) -> Result<Vec<Reached>, OtlpError> {
    let settings = Settings::resolve(config, &|name| std::env::var(name).ok())?;
    // Whoever chose first is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    // gRPC's channel is made of its tasks.
    let _inside = runtime.enter();
    let mut waiting = Vec::new();
    for target in [&settings.metrics, &settings.logs].into_iter().flatten() {
        let (done, answer) = mpsc::channel();
        let request = request(target, &settings)?;
        let (runtime, endpoint) = (runtime.clone(), target.endpoint.clone());
        let started = Instant::now();
        // It may outlast the limit: nobody waits for it then.
        thread::spawn(move || {
            let _inside = runtime.enter();
            // The exporters do not say why.
            let result = request().map_err(|error| match connect(&endpoint, limit) {
                Ok(()) => error.to_string(),
                Err(why) => format!("{why} ({error})"),
            });
            let _ = done.send((result, started.elapsed()));
        });
        waiting.push((target, started, answer));
    }
    let reached = waiting.into_iter().map(|(target, started, answer)| {
        let left = limit.saturating_sub(started.elapsed());
        let answer = match answer.recv_timeout(left) {
            Ok((Ok(()), took)) => Ok(took),
            Ok((Err(why), _)) => Err(why),
            Err(_) => Err(format!("no answer within {} s", limit.as_secs())),
        };
        Reached {
            signal: target.signal.name(),
            endpoint: target.endpoint.clone(),
            protocol: target.protocol.to_string(),
            answer,
        }
    });
    Ok(reached.collect())
}

/// Whether the receiver's host takes connections there at all.
fn connect(endpoint: &str, limit: Duration) -> io::Result<()> {
    let url = if endpoint.contains("://") {
        endpoint.to_owned()
    } else {
        format!("http://{endpoint}")
    };
    let url = reqwest::Url::parse(&url).map_err(io::Error::other)?;
    let (Some(host), Some(port)) = (url.host_str(), url.port_or_known_default()) else {
        return Err(io::Error::other("it names no host and port"));
    };
    let host = host.trim_matches(['[', ']']);
    let mut last = io::Error::other("the name has no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, limit) {
            Ok(_) => return Ok(()),
            Err(error) => last = io::Error::other(format!("{address}: {error}")),
        }
    }
    Err(last)
}

type Request = Box<dyn FnOnce() -> OTelSdkResult + Send>;

fn request(target: &Target, settings: &Settings) -> Result<Request, OtlpError> {
    Ok(match target.signal {
        Signal::Metrics => {
            // Nothing is lost that would have to be tried again.
            let temporality = opentelemetry_sdk::metrics::Temporality::Cumulative;
            let exporter = transport::metrics(target, temporality, settings.interval)?;
            Box::new(move || {
                futures_executor::block_on(exporter.export(&ResourceMetrics::default()))
            })
        }
        Signal::Logs => {
            let exporter = transport::logs(target)?;
            Box::new(move || futures_executor::block_on(exporter.export(LogBatch::new(&[]))))
        }
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::sink::otlp::Protocol;

    fn ask(endpoint: &str, protocol: Protocol) -> Vec<Reached> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let config = OtlpConfig {
            endpoint: Some(endpoint.to_owned()),
            protocol: Some(protocol),
            ..OtlpConfig::default()
        };
        let reached = reach(&config, Duration::from_secs(2), runtime.handle()).unwrap();
        runtime.shutdown_background();
        reached
    }

    #[test]
    fn who_refuses_and_who_is_silent_is_told() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        for protocol in [Protocol::Grpc, Protocol::HttpProtobuf] {
            let reached = ask(&format!("http://{address}"), protocol);
            let signals: Vec<_> = reached.iter().map(|r| r.signal).collect();
            assert_eq!(signals, ["metrics", "logs"]);
            for one in reached {
                assert_eq!(one.answer, Err("no answer within 2 s".to_owned()));
            }
        }
        drop(listener);
        for protocol in [Protocol::Grpc, Protocol::HttpProtobuf] {
            for one in ask(&format!("http://{address}"), protocol) {
                let why = one.answer.unwrap_err();
                assert!(
                    why.contains(&format!("{address}: Connection refused")),
                    "{why}"
                );
            }
        }
    }

    #[test]
    fn names_and_endpoints_without_scheme_are_understood() {
        let listener = TcpListener::bind("[::1]:0").unwrap();
        let limit = Duration::from_secs(1);
        let address = listener.local_addr().unwrap();
        assert!(connect(&format!("http://{address}/v1/logs"), limit).is_ok());
        assert!(connect(&address.to_string(), limit).is_ok());
        assert!(connect("http://", limit).is_err());
    }
}
