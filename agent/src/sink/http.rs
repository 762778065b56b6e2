//! HTTP on loopback: `/metrics` for Prometheus, `/status` for people and programs, `/healthz` for
//! whoever restarts the agent. `docs/status.md` describes them.
//!
//! The other sinks are told when something is due; this one asks when somebody wants to know. The
//! loop hears of it ([`Pages::asked`]) and shows the present state once ([`Pages::show`]), whatever
//! the number of clients: between two looks nothing changes, so all of them get the same. Everything
//! else, also the making of the pages, happens in tasks of the runtime. The loop never waits for a
//! client, and does nothing for a page that nobody wants.

use std::{
    fmt,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::PathBuf,
    str::FromStr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};

use serde::Serialize;
use tokio::{
    sync::{Notify, watch},
    time::{Instant, timeout},
};

use tracing::{info, warn};

use super::{Ready, WallClock, otlp::Deliveries};
use crate::core::report::Overview;

mod exposition;
mod server;
mod status;
#[cfg(test)]
mod tests;

pub use status::SCHEMA;

use exposition::Exposition;
use server::LIMITS;

/// Where the pages are unless something else is asked for: the port that OpenTelemetry's Prometheus
/// exporters have by default.
pub const DEFAULT_ADDRESS: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 9464);

/// The loop looks once per second. One that has not looked for this long is stuck, whatever the load.
const LOOK_LIMIT: Duration = Duration::from_secs(10);
/// How long a request waits for the loop: a look under load takes a good part of a second.
const PATIENCE: Duration = Duration::from_secs(3);

/// Where the pages are wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Listen {
    /// At [`DEFAULT_ADDRESS`], if that is free.
    #[default]
    Default,
    /// Here, and nowhere else.
    At(SocketAddr),
    /// Nowhere.
    Off,
}

impl Listen {
    /// Serves the pages there. Nobody asked for the default: a port that another program has is a
    /// warning then, and the agent runs on without pages.
    ///
    /// # Errors
    /// An address that was asked for cannot be had.
    pub fn start(self, clock: WallClock, about: About) -> Result<Option<Pages>, BindError> {
        match self {
            Self::Off => Ok(None),
            Self::At(address) => Pages::start(address, clock, about).map(Some),
            Self::Default => Ok(Pages::start(DEFAULT_ADDRESS, clock, about)
                .inspect_err(|error| warn!("{error}"))
                .ok()),
        }
    }
}

impl FromStr for Listen {
    type Err = String;

    /// `off`, a port of 127.0.0.1, or an address with a port.
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "off" {
            return Ok(Self::Off);
        }
        if let Ok(port) = text.parse() {
            return Ok(Self::At(SocketAddr::new(DEFAULT_ADDRESS.ip(), port)));
        }
        text.parse().map(Self::At).map_err(|_| {
            format!(
                "`{text}` is not an address with a port, such as {DEFAULT_ADDRESS} or [::1]:9464, \
                 nor a port, nor `off`"
            )
        })
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => DEFAULT_ADDRESS.fmt(f),
            Self::At(address) => address.fmt(f),
            Self::Off => f.write_str("off"),
        }
    }
}

/// The pages cannot be served there.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot serve /metrics, /status and /healthz on {address}: {error}; --http chooses another \
     address, --no-http none"
)]
pub struct BindError {
    /// Where.
    pub address: SocketAddr,
    /// What the kernel said to `bind` or `listen`.
    pub error: std::io::Error,
}

/// What the pages tell beside the state of the core.
#[derive(Debug)]
pub struct About {
    /// Version of the agent.
    pub version: &'static str,
    /// What it was told to do.
    pub configuration: Configuration,
    /// How the OTLP export fares, if there is one.
    pub deliveries: Option<Deliveries>,
}

/// Which configuration is in effect.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Configuration {
    /// The file that was read.
    pub file: Option<PathBuf>,
    /// SHA-256 of the configuration as `tuplewatch config show` prints it, in hexadecimal digits.
    pub digest: String,
}

impl Configuration {
    /// `shown` is what `tuplewatch config show` prints.
    #[must_use]
    pub fn new(file: Option<PathBuf>, shown: &str) -> Self {
        let digest = ring::digest::digest(&ring::digest::SHA256, shown.as_bytes());
        let digits = digest.as_ref().iter().map(|byte| format!("{byte:02x}"));
        Self {
            file,
            digest: digits.collect(),
        }
    }
}

/// The pages, as the loop has them.
#[derive(Debug)]
pub struct Pages {
    shared: Arc<Shared>,
    address: SocketAddr,
}

/// What the loop and the requests share.
#[derive(Debug)]
struct Shared {
    clock: WallClock,
    about: About,
    started: (SystemTime, Instant),
    looks: Mutex<Looks>,
    wanted: Notify,
    shown: watch::Sender<Option<Arc<Shown>>>,
    exposition: Mutex<Exposition>,
}

/// How often the loop has looked, and when last.
#[derive(Clone, Copy, Debug, Default)]
struct Looks {
    count: u64,
    last: Option<Instant>,
}

/// The state of everything after a look.
#[derive(Debug)]
struct Shown {
    /// Number of the look.
    look: u64,
    ready: Ready,
    overview: Overview,
}

impl Pages {
    /// Listens on `address` and serves from now on, until the tokio runtime that it is called in
    /// ends.
    ///
    /// # Errors
    /// The address is taken, or not one of this host.
    pub fn start(address: SocketAddr, clock: WallClock, about: About) -> Result<Self, BindError> {
        let listen = || {
            let listener = TcpListener::bind(address)?;
            listener.set_nonblocking(true)?;
            tokio::net::TcpListener::from_std(listener)
        };
        let failed = |error| BindError { address, error };
        let listener = listen().map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let shared = Arc::new(Shared {
            clock,
            about,
            started: (SystemTime::now(), Instant::now()),
            looks: Mutex::default(),
            wanted: Notify::new(),
            shown: watch::Sender::new(None),
            exposition: Mutex::default(),
        });
        tokio::spawn(server::serve(listener, Arc::clone(&shared), LIMITS));
        info!("/metrics, /status and /healthz are on http://{address}");
        Ok(Self { shared, address })
    }

    /// Where the pages are: with port 0 in what was asked for, the port that the kernel chose.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// The loop has looked.
    pub fn looked(&self) {
        let mut looks = lock(&self.shared.looks);
        looks.count += 1;
        looks.last = Some(Instant::now());
    }

    /// Somebody wants the state that the latest look has left. Cancel safe.
    pub async fn asked(&self) {
        loop {
            self.shared.wanted.notified().await;
            // Others may have asked while that state was made.
            let look = lock(&self.shared.looks).count;
            if !is_of(look)(&self.shared.shown.borrow()) {
                return;
            }
        }
    }

    /// Shows it.
    pub fn show(&self, ready: Ready, overview: Overview) {
        self.shared.clock.follow();
        let look = lock(&self.shared.looks).count;
        self.shared.shown.send_replace(Some(Arc::new(Shown {
            look,
            ready,
            overview,
        })));
    }
}

impl Shared {
    /// Whether the loop looks, else why one must think that it does not.
    fn health(&self) -> Result<Duration, String> {
        health(lock(&self.looks).last.map(|last| last.elapsed()))
    }

    /// The state after the latest look; what was shown before, or nothing, if the loop does not
    /// answer in time.
    async fn latest(&self) -> Result<Arc<Shown>, Option<Arc<Shown>>> {
        let mut shown = self.shown.subscribe();
        let look = lock(&self.looks).count;
        if look == 0 {
            return Err(None);
        }
        let mut is_latest = is_of(look);
        if !is_latest(&shown.borrow()) {
            self.wanted.notify_one();
        }
        // The result borrows from the channel and must not live on.
        let in_time = timeout(PATIENCE, shown.wait_for(is_latest)).await.is_ok();
        let latest = shown.borrow().clone();
        match latest {
            Some(shown) if in_time => Ok(shown),
            old => Err(old),
        }
    }
}

/// Whether what is shown is the state after the look with this number, or a later one.
fn is_of(look: u64) -> impl FnMut(&Option<Arc<Shown>>) -> bool {
    move |shown| shown.as_ref().is_some_and(|shown| shown.look >= look)
}

/// What the time since the last look means; `None` if there was none yet.
fn health(since: Option<Duration>) -> Result<Duration, String> {
    match since {
        None => Err("the agent is starting: the kernel side is being loaded".to_owned()),
        Some(since) if since >= LOOK_LIMIT => Err(format!(
            "the counters were read last {:.0} s ago (once per second is normal): the agent's loop is \
             stuck or starved",
            since.as_secs_f64()
        )),
        Some(since) => Ok(since),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Whatever was half done when a task panicked is done anew at the next request.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
