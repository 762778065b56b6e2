//! Connections whose content nobody can read: requests and responses of a protocol of our own, over several
//! connections, one of which is answered alike and at once from some time on.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU16, Ordering},
    },
    thread::JoinHandle,
};

use super::*;

const SERVICE: &str = "203.0.113.10:8443";
/// Bytes of each request.
const REQUEST: usize = 90;
/// What stands before the length of a response and its body.
const HEAD: &[u8] = b"HTTP/1.1 200 OK\r\n\r\n";
/// The one response of an endpoint that is not there.
const CANNED: u32 = 137;
const EVERY: u16 = u16::MAX;
/// How requests and responses begin.
#[derive(Clone, Copy)]
enum Speech {
    /// As a record of TLS does.
    Hidden,
    /// As HTTP/1 does.
    Clear,
}

impl Speech {
    fn request(self) -> Vec<u8> {
        let mut request = match self {
            Self::Hidden => vec![0x17],
            Self::Clear => b"GET /orders/17 HTTP/1.1\r\n\r\n".to_vec(),
        };
        request.resize(REQUEST, b'x');
        request
    }

    fn response(self, length: u32) -> Vec<u8> {
        let mut response = match self {
            Self::Hidden => vec![0x17; HEAD.len()],
            Self::Clear => HEAD.to_vec(),
        };
        response.extend_from_slice(&length.to_be_bytes());
        response.resize(HEAD.len() + 4 + length as usize, b'x');
        response
    }
}

/// How long each client waits between two requests, in milliseconds.
const PACES: [u64; 6] = [250, 150, 200, 230, 180, 310];
const ASKED: [&str; 2] = ["--set", "pinned_suspect.min_responses=6"];

/// A server whose responses are of many lengths and take their time, but for those on the connections that it
/// turns away.
struct Opaque {
    /// The port of the client that is turned away, [`EVERY`] for all.
    turned_away: Arc<AtomicU16>,
    over: Arc<AtomicBool>,
    acceptor: Option<JoinHandle<()>>,
}

impl Opaque {
    fn new(host: &Host, speech: Speech, turned_away: u16) -> Result<Self> {
        let at: SocketAddr = SERVICE.parse()?;
        let listener = host.in_ns(|| TcpListener::bind(at))??;
        listener.set_nonblocking(true)?;
        let (turned_away, over) = (Arc::new(AtomicU16::new(turned_away)), Arc::default());
        let acceptor = {
            let (turned_away, over): (_, Arc<AtomicBool>) =
                (Arc::clone(&turned_away), Arc::clone(&over));
            std::thread::spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    let Ok((stream, from)) = listener.accept() else {
                        std::thread::sleep(Duration::from_millis(10));
                        continue;
                    };
                    let turned_away = Arc::clone(&turned_away);
                    std::thread::spawn(move || answer(stream, speech, from.port(), &turned_away));
                }
            })
        };
        Ok(Self {
            turned_away,
            over,
            acceptor: Some(acceptor),
        })
    }
}

impl Drop for Opaque {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
    }
}

fn answer(mut stream: TcpStream, speech: Speech, from: u16, turned_away: &AtomicU16) {
    let _ = stream.set_nonblocking(false);
    let _ = stream.set_nodelay(true);
    let mut request = [0; REQUEST];
    let mut seed = u32::from(from);
    while stream.read_exact(&mut request).is_ok() {
        seed = seed.wrapping_mul(1_103_515_245).wrapping_add(12_345);
        let whom = turned_away.load(Ordering::Relaxed);
        let length = if whom == from || whom == EVERY {
            CANNED
        } else {
            std::thread::sleep(Duration::from_millis(u64::from(40 + seed % 40)));
            200 + (seed >> 8) % 5000
        };
        if stream.write_all(&speech.response(length)).is_err() {
            return;
        }
    }
}

/// Clients that keep their connections; their ports, the first one's first.
struct Clients {
    ports: Vec<u16>,
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Clients {
    fn new(host: &Host, speech: Speech) -> Result<Self> {
        let over = Arc::<AtomicBool>::default();
        let (mut ports, mut threads) = (Vec::new(), Vec::new());
        for pace in PACES {
            let to: SocketAddr = SERVICE.parse()?;
            let stream = host.in_ns(|| TcpStream::connect(to))??;
            stream.set_read_timeout(Some(5 * SECOND))?;
            stream.set_nodelay(true)?;
            ports.push(stream.local_addr()?.port());
            let (pace, over) = (Duration::from_millis(pace), Arc::clone(&over));
            threads.push(std::thread::spawn(move || ask(stream, speech, pace, &over)));
        }
        Ok(Self {
            ports,
            over,
            threads,
        })
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn ask(mut stream: TcpStream, speech: Speech, pace: Duration, over: &AtomicBool) {
    while !over.load(Ordering::Relaxed) {
        let mut head = [0; HEAD.len() + 4];
        let asked = stream.write_all(&speech.request());
        if asked.and_then(|()| stream.read_exact(&mut head)).is_err() {
            return;
        }
        let [.., a, b, c, d] = head;
        let mut body = vec![0; u32::from_be_bytes([a, b, c, d]) as usize];
        if stream.read_exact(&mut body).is_err() {
            return;
        }
        std::thread::sleep(pace);
    }
}

fn is_suspect(line: &Value) -> bool {
    line["type"] == "alert" && line["cause"] == "pinned_suspect"
}

#[test]
fn what_cannot_be_read_is_suspected_by_lengths_and_times() -> Result<()> {
    let net = Routed::new(RoutedConfig::default())?;
    let server = Opaque::new(&net.server, Speech::Hidden, 0)?;
    let agent = watch(&net.client, &ASKED)?;
    // The agent for which nobody has asked sees the same.
    let other = watch(&net.client, &[])?;
    let clients = Clients::new(&net.client, Speech::Hidden)?;
    agent.expect_no_alert(4 * SECOND, |_| true)?;
    let (port, began) = (clients.ports[0], Instant::now());
    server.turned_away.store(port, Ordering::Relaxed);
    let told = agent.wait_alert(20 * SECOND, |line| {
        is_suspect(line) && line["state"] == "firing"
    })?;
    println!(
        "{:?}: {} {}",
        began.elapsed(),
        told["summary"],
        told["remedy"]
    );
    ensure!(told["severity"] == "info", "{told}");
    ensure!(told["server.port"] == 8443, "{told}");
    let summary = told["summary"].as_str().context("a summary")?;
    let bytes = format!("of {} bytes", HEAD.len() as u32 + 4 + CANNED);
    ensure!(
        summary.contains("on 1 connection all") && summary.contains(&bytes),
        "{summary}"
    );
    let remedy = told["remedy"].as_str().context("a remedy")?;
    for (n, port) in clients.ports.iter().enumerate() {
        let named = remedy.contains(&format!("10.79.1.2:{port} → {SERVICE}"));
        ensure!(named == (n == 0), "{port}: {remedy}");
    }
    other.expect_no_alert(2 * SECOND, |_| true)?;
    drop(clients);
    ensure!(agent.alerts()?.iter().all(is_suspect));
    Ok(())
}

/// The connections were there before the agent, and so was the trouble.
#[test]
fn connections_older_than_the_agent_are_suspected_too() -> Result<()> {
    let net = Routed::new(RoutedConfig::default())?;
    let server = Opaque::new(&net.server, Speech::Hidden, 0)?;
    let clients = Clients::new(&net.client, Speech::Hidden)?;
    server
        .turned_away
        .store(clients.ports[0], Ordering::Relaxed);
    std::thread::sleep(2 * SECOND);
    let agents = [&net.client, &net.server].map(|host| watch(host, &ASKED));
    let [agent, at_server] = agents;
    let (agent, at_server) = (agent?, at_server?);
    let told = agent.wait_alert(20 * SECOND, |line| {
        is_suspect(line) && line["state"] == "firing"
    })?;
    println!("{} {}", told["summary"], told["remedy"]);
    let remedy = told["remedy"].as_str().context("a remedy")?;
    for (n, port) in clients.ports.iter().enumerate() {
        let named = format!("10.79.1.2:{port} → {SERVICE}, older than the agent");
        ensure!(remedy.contains(&named) == (n == 0), "{port}: {remedy}");
    }
    // Who listens has not asked, and who has, in another namespace, is not this agent's.
    at_server.expect_no_alert(6 * SECOND, |_| true)?;
    drop(clients);
    Ok(())
}

/// Health checks, say: every connection is answered alike and at once.
#[test]
fn a_service_that_answers_everybody_alike_is_not_suspected() -> Result<()> {
    let net = Routed::new(RoutedConfig::default())?;
    let _server = Opaque::new(&net.server, Speech::Hidden, EVERY)?;
    let agent = watch(&net.client, &ASKED)?;
    let _clients = Clients::new(&net.client, Speech::Hidden)?;
    agent.expect_no_alert(10 * SECOND, |_| true)?;
    Ok(())
}

/// Clear text beside what cannot be read: the status lines say that nothing is wrong.
#[test]
fn what_can_be_read_is_not_suspected() -> Result<()> {
    let net = Routed::new(RoutedConfig::default())?;
    let server = Opaque::new(&net.server, Speech::Clear, 0)?;
    let agent = watch(&net.client, &ASKED)?;
    let clients = Clients::new(&net.client, Speech::Clear)?;
    std::thread::sleep(4 * SECOND);
    server
        .turned_away
        .store(clients.ports[0], Ordering::Relaxed);
    agent.expect_no_alert(8 * SECOND, |_| true)?;
    Ok(())
}
