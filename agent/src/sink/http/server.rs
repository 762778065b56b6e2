//! The server: few connections at a time, one request each, and little time for it.

use std::{convert::Infallible, sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use tokio::{
    net::TcpListener,
    sync::Semaphore,
    time::{sleep, timeout},
};
use tracing::{debug, warn};

use super::{Shared, lock, status};
use crate::sink::{metrics, otlp};

/// What clients may take.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    /// Connections at a time; more wait in the kernel's queue.
    pub(super) connections: usize,
    /// From the accepted connection to the end of the answer. A client that reads or writes more
    /// slowly is cut off: it would take the place of others.
    pub(super) longest: Duration,
}

/// A Prometheus, a kubelet and some people are well served by this.
pub(super) const LIMITS: Limits = Limits {
    connections: 16,
    longest: Duration::from_secs(10),
};
/// Largest request: hyper's least.
const REQUEST: usize = 8192;
/// Pause after `accept` failed, mostly for want of file descriptors.
const BREATH: Duration = Duration::from_millis(500);

const TEXT: &str = "text/plain; charset=utf-8";
const INDEX: &str = "tuplewatch\n/metrics  for Prometheus\n/status   state of everything, as JSON\n\
                     /healthz  200 while the agent observes\n";

/// Serves for ever.
pub(super) async fn serve(listener: TcpListener, shared: Arc<Shared>, limits: Limits) {
    let places = Arc::new(Semaphore::new(limits.connections));
    let mut told = false;
    // The semaphore is never closed.
    while let Ok(place) = Arc::clone(&places).acquire_owned().await {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                if !std::mem::replace(&mut told, true) {
                    warn!("a client of /metrics or /status is not let in: {error}");
                }
                sleep(BREATH).await;
                continue;
            }
        };
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            let service = service_fn(|request| answer(&shared, request));
            let connection = http1::Builder::new()
                // With it idle clients would keep their places.
                .keep_alive(false)
                .max_buf_size(REQUEST)
                .serve_connection(TokioIo::new(stream), service);
            match timeout(limits.longest, connection).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => debug!("a client of the pages went away: {error}"),
                Err(_) => debug!("a client of the pages was too slow"),
            }
            drop(place);
        });
    }
}

async fn answer<B>(
    shared: &Shared,
    request: Request<B>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let text = "only GET and HEAD are answered\n";
        let mut response = page(StatusCode::METHOD_NOT_ALLOWED, TEXT, text);
        let allowed = hyper::header::HeaderValue::from_static("GET, HEAD");
        response.headers_mut().insert(ALLOW, allowed);
        return Ok(response);
    }
    Ok(match request.uri().path() {
        "/healthz" => match shared.health() {
            Ok(_) => page(StatusCode::OK, TEXT, "ok\n"),
            Err(reason) => unavailable(&reason),
        },
        "/metrics" => exposition(shared).await,
        "/status" => status(shared).await,
        "/" => page(StatusCode::OK, TEXT, INDEX),
        _ => page(StatusCode::NOT_FOUND, TEXT, INDEX),
    })
}

/// Old figures would look like a quiet host: a scrape that fails does not.
async fn exposition(shared: &Shared) -> Response<Full<Bytes>> {
    let Ok(shown) = shared.latest().await else {
        return unavailable(&silence(shared));
    };
    let about = &shared.about;
    let deliveries = about.deliveries.as_ref();
    let delivery = deliveries.map(otlp::Deliveries::now).unwrap_or_default();
    let text = lock(&shared.exposition).of(&shown, delivery, || {
        otlp::resource_attributes(about.version)
    });
    page(StatusCode::OK, metrics::CONTENT_TYPE, text)
}

/// Old figures are better than none for a person, who is told that they are old.
async fn status(shared: &Shared) -> Response<Full<Bytes>> {
    let (Ok(shown) | Err(Some(shown))) = shared.latest().await else {
        return unavailable(&silence(shared));
    };
    match status::page(shared, &shown) {
        Ok(json) => page(StatusCode::OK, "application/json", json),
        Err(error) => page(
            StatusCode::INTERNAL_SERVER_ERROR,
            TEXT,
            format!("the state cannot be written as JSON: {error}\n"),
        ),
    }
}

/// Why the loop did not answer.
fn silence(shared: &Shared) -> String {
    match shared.health() {
        Err(reason) => reason,
        Ok(since) => format!(
            "the agent is busy: the counters were read last {:.1} s ago",
            since.as_secs_f64()
        ),
    }
}

fn unavailable(reason: &str) -> Response<Full<Bytes>> {
    page(StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("{reason}\n"))
}

fn page(code: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = code;
    let headers = response.headers_mut();
    let value = hyper::header::HeaderValue::from_static;
    headers.insert(CONTENT_TYPE, value(kind));
    headers.insert(CACHE_CONTROL, value("no-store"));
    response
}
