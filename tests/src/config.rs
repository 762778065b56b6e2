//! What the peers are told to do. Each struct is at once the command line of a `lab-peer`
//! subcommand (see [`flags`]) and the argument of the library's wrapper for it.
//!
//! Fields are public; start from `X::new(…)` and change what matters:
//! `LoadConfig { count: Some(10), ..LoadConfig::new(address) }`.

mod values;

use std::net::{IpAddr, SocketAddr};

use clap::Args;
use serde::Serialize;

pub use values::{Isn, PortRange, SourcePort};

/// A server: reads a request, answers with a small HTTP/1.1 response.
#[derive(Debug, Clone, Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct ServeConfig {
    /// Address and port to listen on
    #[arg(long)]
    pub listen: SocketAddr,
    /// Close the connection right after its last response, so that this end holds TIME_WAIT
    /// (otherwise wait for the client to close)
    #[arg(long)]
    pub close_first: bool,
    /// Milliseconds between request and response
    #[arg(long, default_value_t = 0)]
    pub delay_ms: u64,
    /// Answer any number of requests per connection, the last is the one with `Connection: close`
    /// (otherwise the first is the last)
    #[arg(long)]
    pub keep_alive: bool,
    /// With an IPv6 address: accept IPv4 on the same socket, as v4-mapped IPv6
    #[arg(long)]
    pub dual_stack: bool,
    /// Accept TCP Fast Open (needs sysctl net.ipv4.tcp_fastopen & 2)
    #[arg(long)]
    pub fastopen: bool,
    /// Go on listening but stop accepting after this many connections: the accept queue fills
    #[arg(long)]
    pub no_accept_after: Option<u64>,
    /// Length of the accept queue
    #[arg(long, default_value_t = 1024)]
    pub backlog: i32,
    /// HTTP status of the responses
    #[arg(long, default_value_t = 200)]
    pub status: u16,
    /// Length of the response body in bytes
    #[arg(long, default_value_t = 64)]
    pub body: usize,
    /// Threads that accept and serve one connection after the other (for saturating loads) instead
    /// of one thread per connection; 0: one thread per connection
    #[arg(long, default_value_t = 0)]
    pub inline: usize,
    /// Seconds after which the server ends by itself
    #[arg(long, default_value_t = 600.0)]
    pub seconds: f64,
}

impl ServeConfig {
    /// A server that lets the client close first and closes after one response.
    #[must_use]
    pub fn new(listen: SocketAddr) -> Self {
        Self {
            listen,
            close_first: false,
            delay_ms: 0,
            keep_alive: false,
            dual_stack: false,
            fastopen: false,
            no_accept_after: None,
            backlog: 1024,
            status: 200,
            body: 64,
            inline: 0,
            seconds: 600.0,
        }
    }

    /// The server of the incident: closes first, so that it holds TIME_WAIT for each connection of a
    /// [`LoadConfig`]; the connections of a [`PoolConfig`] live on.
    #[must_use]
    pub fn closing_first(listen: SocketAddr) -> Self {
        Self {
            close_first: true,
            keep_alive: true,
            ..Self::new(listen)
        }
    }
}

/// A load that opens a new connection for each request.
#[derive(Debug, Clone, Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct LoadConfig {
    /// Address and port of the server
    #[arg(long)]
    pub to: SocketAddr,
    /// New connections per second; 0: as fast as `concurrency` allows
    #[arg(long, default_value_t = 10.0)]
    pub rate: f64,
    /// End after this many connections
    #[arg(long)]
    pub count: Option<u64>,
    /// End after this many seconds
    #[arg(long, default_value_t = 600.0)]
    pub seconds: f64,
    /// Milliseconds the application waits for a connection before it gives up
    #[arg(long, default_value_t = 5000)]
    pub connect_timeout_ms: u64,
    /// Milliseconds the application waits for the response
    #[arg(long, default_value_t = 5000)]
    pub response_timeout_ms: u64,
    /// Bind each connection to the next port of this range, from the start again after the last
    #[arg(long)]
    pub bind_port_range: Option<PortRange>,
    /// Bind each connection to this port
    #[arg(long)]
    pub source_port: Option<u16>,
    /// Bind each connection to this address
    #[arg(long)]
    pub source_address: Option<IpAddr>,
    /// Connections under way at most
    #[arg(long, default_value_t = 128)]
    pub concurrency: usize,
    /// Initial sequence numbers: kernel, random, backward or a number
    #[arg(long, default_value_t = Isn::Kernel)]
    pub isn: Isn,
    /// Milliseconds to keep a connection open after the response
    #[arg(long, default_value_t = 0)]
    pub hold_ms: u64,
    /// Print one JSON line per connection
    #[arg(long)]
    pub events: bool,
}

impl LoadConfig {
    /// Ten connections a second with a 5 s connect time limit.
    #[must_use]
    pub fn new(to: SocketAddr) -> Self {
        Self {
            to,
            rate: 10.0,
            count: None,
            seconds: 600.0,
            connect_timeout_ms: 5000,
            response_timeout_ms: 5000,
            bind_port_range: None,
            source_port: None,
            source_address: None,
            concurrency: 128,
            isn: Isn::Kernel,
            hold_ms: 0,
            events: false,
        }
    }
}

/// The same load over a pool of kept connections.
#[derive(Debug, Clone, Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct PoolConfig {
    /// Address and port of the server
    #[arg(long)]
    pub to: SocketAddr,
    /// Connections in the pool
    #[arg(long, default_value_t = 8)]
    pub connections: usize,
    /// Requests per second over the whole pool
    #[arg(long, default_value_t = 10.0)]
    pub rate: f64,
    /// End after this many requests
    #[arg(long)]
    pub count: Option<u64>,
    /// End after this many seconds
    #[arg(long, default_value_t = 600.0)]
    pub seconds: f64,
    /// Milliseconds to wait for a response; then the connection is closed
    #[arg(long, default_value_t = 5000)]
    pub timeout_ms: u64,
    /// Bytes by which each request is made longer
    #[arg(long, default_value_t = 0)]
    pub upload: usize,
}

impl PoolConfig {
    /// Eight connections, ten requests a second.
    #[must_use]
    pub fn new(to: SocketAddr) -> Self {
        Self {
            to,
            connections: 8,
            rate: 10.0,
            count: None,
            seconds: 600.0,
            timeout_ms: 5000,
            upload: 0,
        }
    }
}

/// Established connections that nobody uses, both ends in one process.
#[derive(Debug, Clone, Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct IdleConfig {
    /// Address and port of their one end
    #[arg(long)]
    pub listen: SocketAddr,
    /// How many
    #[arg(long, default_value_t = 1000)]
    pub connections: u64,
    /// Close them after this many seconds
    #[arg(long, default_value_t = 600.0)]
    pub seconds: f64,
}

impl IdleConfig {
    /// A thousand connections.
    #[must_use]
    pub fn new(listen: SocketAddr) -> Self {
        Self {
            listen,
            connections: 1000,
            seconds: 600.0,
        }
    }
}

/// A client that uses one source port again and again.
#[derive(Debug, Clone, Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct FixedConfig {
    /// Address and port of the server
    #[arg(long)]
    pub to: SocketAddr,
    /// The source port
    #[arg(long)]
    pub source_port: u16,
    /// How many connections, one after the other
    #[arg(long, default_value_t = 5)]
    pub times: u64,
    /// Vanish after the response without FIN or RST (as after a power cut): the server keeps its end
    #[arg(long)]
    pub abandon: bool,
    /// Initial sequence numbers: kernel, random, backward or a number
    #[arg(long, default_value_t = Isn::Kernel)]
    pub isn: Isn,
    /// Milliseconds between two connections
    #[arg(long, default_value_t = 200)]
    pub pause_ms: u64,
    /// Milliseconds to wait for each connection
    #[arg(long, default_value_t = 5000)]
    pub connect_timeout_ms: u64,
}

impl FixedConfig {
    /// Five connections from `source_port`.
    #[must_use]
    pub fn new(to: SocketAddr, source_port: u16) -> Self {
        Self {
            to,
            source_port,
            times: 5,
            abandon: false,
            isn: Isn::Kernel,
            pause_ms: 200,
            connect_timeout_ms: 5000,
        }
    }
}

/// Crafted SYNs through a raw socket; nobody waits for the answers.
#[derive(Debug, Clone, Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct RawSynConfig {
    /// Address and port of the target
    #[arg(long)]
    pub to: SocketAddr,
    /// Source address. With an address of this host its kernel answers SYN-ACKs with RSTs
    #[arg(long)]
    pub from: IpAddr,
    /// Replace the low 16 bits of the source address by random ones for each SYN
    #[arg(long)]
    pub random_sources: bool,
    /// Source port, or `random`
    #[arg(long, default_value_t = SourcePort::Random)]
    pub source_port: SourcePort,
    /// Walk through these target ports instead of the one of `to` (a scan)
    #[arg(long)]
    pub scan: Option<PortRange>,
    /// How many SYNs
    #[arg(long, default_value_t = 1)]
    pub count: u64,
    /// SYNs per second; 0: as fast as possible
    #[arg(long, default_value_t = 100.0)]
    pub rate: f64,
    /// Sequence numbers: random, backward or a number
    #[arg(long, default_value_t = Isn::Random)]
    pub isn: Isn,
}

impl RawSynConfig {
    /// One SYN with random port and sequence number.
    #[must_use]
    pub fn new(to: SocketAddr, from: IpAddr) -> Self {
        Self {
            to,
            from,
            random_sources: false,
            source_port: SourcePort::Random,
            scan: None,
            count: 1,
            rate: 100.0,
            isn: Isn::Random,
        }
    }
}

/// A real connection whose own SYN is sent a second time later.
#[derive(Debug, Clone, Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct LateDupConfig {
    /// Address and port of the server (use one that keeps connections alive)
    #[arg(long)]
    pub to: SocketAddr,
    /// How many connections, one after the other
    #[arg(long, default_value_t = 1)]
    pub times: u64,
    /// How often each SYN is repeated, 600 ms apart (the kernel answers at most every 500 ms)
    #[arg(long, default_value_t = 1)]
    pub repeats: u64,
    /// Send the copy after both ends have closed instead of within the connection
    #[arg(long)]
    pub after_close: bool,
}

impl LateDupConfig {
    /// One connection, one copy of its SYN.
    #[must_use]
    pub fn new(to: SocketAddr) -> Self {
        Self {
            to,
            times: 1,
            repeats: 1,
            after_close: false,
        }
    }
}

/// Connections by TCP Fast Open, the request within the SYN once a cookie is known.
#[derive(Debug, Clone, Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct FastOpenConfig {
    /// Address and port of the server
    #[arg(long)]
    pub to: SocketAddr,
    /// How many connections, one after the other
    #[arg(long, default_value_t = 5)]
    pub times: u64,
    /// Milliseconds between two connections
    #[arg(long, default_value_t = 100)]
    pub pause_ms: u64,
}

impl FastOpenConfig {
    /// Five connections.
    #[must_use]
    pub fn new(to: SocketAddr) -> Self {
        Self {
            to,
            times: 5,
            pause_ms: 100,
        }
    }
}

/// The command-line flags that set the fields of a configuration: `--field value`, `--field` for
/// true, nothing for false and none.
///
/// # Panics
/// If a field is neither a number, a string, a boolean nor an option of these.
#[must_use]
pub fn flags<C: Serialize>(config: &C) -> Vec<String> {
    use serde_json::Value;
    let Ok(Value::Object(fields)) = serde_json::to_value(config) else {
        panic!("a configuration is a struct of plain values")
    };
    let mut flags = Vec::new();
    for (name, value) in fields {
        let value = match value {
            Value::Null | Value::Bool(false) => continue,
            Value::Bool(true) => None,
            Value::String(text) => Some(text),
            Value::Number(number) => Some(number.to_string()),
            other => panic!("{name} has no command-line form: {other}"),
        };
        flags.push(format!("--{name}"));
        flags.extend(value);
    }
    flags
}
