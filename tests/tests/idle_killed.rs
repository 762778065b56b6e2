//! Signature `stuck_keepalive`, cause `idle_killed`: real connections through a router that forgets a flow after
//! some seconds without a packet and answers the next one with RST, as a NAT gateway does, or not at all. And
//! what resembles it.

mod support;

#[path = "idle_killed/silence.rs"]
mod silence;

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use socket2::{SockRef, TcpKeepalive};
use support::{SECOND, look_alikes, no_alert, number, watch};
use tuplewatch_tests::prelude::*;

/// After how long the router forgets a flow.
const FORGETS: f64 = 10.0;

/// A router that forgets, and what it does with a packet of a connection that it does not know.
fn forgetful(answer: &str) -> Result<Routed> {
    let net = Routed::new(RoutedConfig::default())?;
    // Makes the router track connections, which the settings need.
    net.router.nft(&format!(
        "table inet forget {{
  chain passing {{
    type filter hook forward priority 0;
    ct state invalid tcp flags & rst != rst {answer}
  }}
}}
"
    ))?;
    for (key, value) in [
        ("nf_conntrack_tcp_timeout_established", FORGETS as u32),
        ("nf_conntrack_tcp_loose", 0),
        ("nf_conntrack_tcp_timeout_unacknowledged", 300),
    ] {
        net.router.sysctl(&format!("net.netfilter.{key}"), value)?;
    }
    Ok(net)
}

/// What became of the requests of some clients.
#[derive(Clone, Default)]
struct Fates {
    /// Idle times that were survived.
    survived: Arc<Mutex<Vec<f64>>>,
    /// Idle times after which the connection was reset, or nothing came for five seconds.
    killed: Arc<Mutex<Vec<f64>>>,
    over: Arc<AtomicBool>,
}

impl Fates {
    fn sleep(&self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end && !self.over.load(Ordering::Relaxed) {
            let left = end.saturating_duration_since(Instant::now());
            std::thread::sleep(left.min(Duration::from_millis(100)));
        }
    }

    fn killed(&self) -> usize {
        self.killed.lock().expect("no panic").len()
    }
}

/// A byte there and back.
fn exchange(stream: &mut TcpStream) -> io::Result<()> {
    stream.write_all(b"?")?;
    let mut byte = [0];
    stream.read_exact(&mut byte)
}

/// A client of the echo server that asks again and again after such pauses, and connects again when its
/// connection is gone.
fn client(
    host: &Host,
    to: SocketAddr,
    fates: &Fates,
    pauses: &'static [f64],
    set: fn(&TcpStream) -> io::Result<()>,
) -> Result<JoinHandle<()>> {
    let connect = {
        let host = host.clone();
        move || -> Option<TcpStream> {
            let stream = host.in_ns(|| TcpStream::connect(to)).ok()?.ok()?;
            stream.set_read_timeout(Some(5 * SECOND)).ok()?;
            set(&stream).ok()?;
            Some(stream)
        }
    };
    let fates = fates.clone();
    let mut stream = connect().context("the first connection")?;
    Ok(std::thread::spawn(move || {
        for pause in pauses.iter().cycle() {
            let alive = exchange(&mut stream).is_ok();
            let began = Instant::now();
            fates.sleep(Duration::from_secs_f64(*pause));
            if fates.over.load(Ordering::Relaxed) {
                return;
            }
            let rested = began.elapsed().as_secs_f64();
            let list = match exchange(&mut stream) {
                Ok(()) if alive => Some(&fates.survived),
                Err(error) => {
                    let kind = error.kind();
                    let is_lost =
                        kind == io::ErrorKind::ConnectionReset || kind == io::ErrorKind::WouldBlock;
                    is_lost.then_some(&fates.killed)
                }
                Ok(()) => None,
            };
            if let Some(list) = list {
                list.lock().expect("no panic").push(rested);
            }
            while exchange(&mut stream).is_err() {
                if fates.over.load(Ordering::Relaxed) {
                    return;
                }
                match connect() {
                    Some(new) => stream = new,
                    None => fates.sleep(Duration::from_millis(200)),
                }
            }
        }
    }))
}

/// Sends every byte back; where `closes_after` is given, closes a connection that is idle for so long.
struct Echo {
    over: Arc<AtomicBool>,
    streams: Arc<Mutex<Vec<TcpStream>>>,
    acceptor: Option<JoinHandle<()>>,
}

impl Echo {
    fn new(host: &Host, at: SocketAddr, closes_after: Option<Duration>) -> Result<Self> {
        let listener = host.in_ns(|| -> io::Result<TcpListener> {
            let socket = socket2::Socket::new(
                socket2::Domain::for_address(at),
                socket2::Type::STREAM,
                None,
            )?;
            socket.set_reuse_address(true)?;
            socket.bind(&at.into())?;
            socket.listen(64)?;
            Ok(socket.into())
        })??;
        listener.set_nonblocking(true)?;
        let (over, streams) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let acceptor = {
            let (over, streams) = (Arc::clone(&over), Arc::clone(&streams));
            std::thread::spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    let Ok((stream, _)) = listener.accept() else {
                        std::thread::sleep(Duration::from_millis(20));
                        continue;
                    };
                    accepted(&stream, closes_after, &streams);
                }
            })
        };
        Ok(Self {
            over,
            streams,
            acceptor: Some(acceptor),
        })
    }

    /// All sockets are closed at once: by FIN, like those of a process that ends, or by RST.
    fn end(&mut self, by_reset: bool) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
        for stream in self.streams.lock().expect("no panic").drain(..) {
            if by_reset {
                // The thread that reads ends, and whoever closes last sends the RST.
                let _ = SockRef::from(&stream).set_linger(Some(Duration::ZERO));
                let _ = stream.shutdown(std::net::Shutdown::Read);
            } else {
                let _ = stream.shutdown(std::net::Shutdown::Both);
            }
        }
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.end(false);
    }
}

fn accepted(stream: &TcpStream, closes_after: Option<Duration>, all: &Mutex<Vec<TcpStream>>) {
    let (Ok(()), Ok(mut stream), Ok(kept)) = (
        stream.set_nonblocking(false),
        stream.try_clone(),
        stream.try_clone(),
    ) else {
        return;
    };
    if closes_after.is_none() {
        all.lock().expect("no panic").push(kept);
    }
    std::thread::spawn(move || {
        let _ = stream.set_read_timeout(closes_after);
        let mut byte = [0];
        while matches!(stream.read(&mut byte), Ok(1)) && stream.write_all(&byte).is_ok() {}
    });
}

const ARGS: [&str; 6] = [
    "--set",
    "alert.repeat=2s",
    "--set",
    "idle_killed.window=60s",
    "--set",
    "alert.resolve=5s",
];

fn is_told(line: &Value, killed: u64) -> bool {
    line["type"] == "alert"
        && line["cause"] == "idle_killed"
        && line["state"] == "firing"
        && number(&line["evidence"]["idle"], "killed") >= killed
}

fn plain(_: &TcpStream) -> io::Result<()> {
    Ok(())
}

/// Probes after 3 s, and then each 2 s: more often than the router forgets.
fn with_probes(stream: &TcpStream) -> io::Result<()> {
    let probes = TcpKeepalive::new()
        .with_time(3 * SECOND)
        .with_interval(2 * SECOND);
    SockRef::from(stream).set_tcp_keepalive(&probes)
}

#[test]
fn a_router_that_forgets_is_told_with_its_time_out() -> Result<()> {
    let net = forgetful("reject with tcp reset")?;
    let to = net.service();
    let _echo = Echo::new(&net.server, to, None)?;
    let agent = watch(&net.client, &ARGS)?;
    let fates = Fates::default();
    let mut clients = Vec::new();
    for (pauses, set) in [
        (&[9.0, 9.6, 2.0][..], plain as fn(&TcpStream) -> _),
        (&[9.4, 9.2, 9.6], plain),
        (&[9.5, 3.0, 9.3], plain),
        (&[10.4, 12.0, 10.8], plain),
        (&[11.0, 10.5, 13.0], plain),
        (&[14.0, 10.4, 10.6], plain),
        // Rests for much longer and lives, as a websocket does.
        (&[25.0], with_probes),
    ] {
        clients.push(client(&net.client, to, &fates, pauses, set)?);
        std::thread::sleep(Duration::from_millis(700));
    }
    let began = Instant::now();
    let told = agent.wait_alert(90 * SECOND, |line| is_told(line, 6))?;
    println!("told after {:?}: {}", began.elapsed(), told["summary"]);
    // Until the one with probes has rested once.
    let lived = || {
        fates
            .survived
            .lock()
            .expect("no panic")
            .iter()
            .any(|rest| *rest >= 25.0)
    };
    let end = Instant::now() + 60 * SECOND;
    while !lived() && Instant::now() < end {
        std::thread::sleep(SECOND / 5);
    }
    ensure!(lived(), "the one with probes lives");
    std::thread::sleep(2 * SECOND);
    let told = agent.wait_alert(30 * SECOND, |line| {
        is_told(line, number(&told["evidence"]["idle"], "killed") + 1)
    })?;
    let died = fates.killed();
    fates.over.store(true, Ordering::Relaxed);
    for client in clients {
        let _ = client.join();
    }
    let idle = &told["evidence"]["idle"];
    println!("{idle}");
    // The machine skips a tracepoint in soft interrupts now and then.
    let killed = number(idle, "killed");
    let plausible = died.saturating_sub(4)..=died;
    ensure!(
        plausible.contains(&usize::try_from(killed)?),
        "{died} died, {idle}"
    );
    let timeout = idle["timeout_seconds"].as_f64().context("an estimate")?;
    ensure!((timeout / FORGETS - 1.0).abs() < 0.05, "{timeout}: {idle}");
    let longest = fates.survived.lock().expect("no panic").clone();
    let plain = longest
        .iter()
        .copied()
        .filter(|rest| *rest < 20.0)
        .fold(0.0, f64::max);
    let survived = idle["longest_survived_seconds"]
        .as_f64()
        .context("a time")?;
    ensure!(
        survived <= plain && survived > plain - 1.6,
        "{survived} of {plain}"
    );
    let shortest = idle["shortest_killed_seconds"].as_f64().context("a time")?;
    ensure!((10.4..10.8).contains(&shortest), "{shortest}");
    ensure!(told["opened_by"][0]["pid"] == std::process::id(), "{told}");
    // How the sockets are set, and what would save them.
    let connection = &idle["connections"][0];
    ensure!(connection["keep_alive"] == false, "{connection}");
    ensure!(connection["keep_alive_seconds"] == 7200.0, "{connection}");
    ensure!(connection["user_timeout_seconds"] == 0.0, "{connection}");
    ensure!(connection["age_seconds"].as_f64() >= connection["idle_seconds"].as_f64());
    ensure!(idle["keep_alive_seconds"].as_f64().context("a time")? < FORGETS);
    let remedy = told["remedy"].as_str().context("a text")?;
    ensure!(remedy.contains("tcp_keepalive_time=") && remedy.contains("SO_KEEPALIVE is off"));
    let others = agent.alerts()?;
    ensure!(
        others.iter().all(|a| a["cause"] == "idle_killed"),
        "{others:#?}"
    );
    agent.wait_alert(90 * SECOND, |line| {
        line["cause"] == "idle_killed" && line["state"] == "resolved"
    })?;
    Ok(())
}

/// Websockets, say: they rest for twice as long as the router remembers, and their probes are answered.
#[test]
fn answered_probes_keep_idle_connections_silent() -> Result<()> {
    let net = forgetful("drop")?;
    let to = net.service();
    let _echo = Echo::new(&net.server, to, None)?;
    let agents = [watch(&net.client, &ARGS)?, watch(&net.server, &ARGS)?];
    let fates = Fates::default();
    let mut clients = Vec::new();
    for pauses in [&[20.0][..], &[22.0], &[18.0], &[25.0]] {
        clients.push(client(&net.client, to, &fates, pauses, with_probes)?);
    }
    std::thread::sleep(48 * SECOND);
    fates.over.store(true, Ordering::Relaxed);
    for client in clients {
        let _ = client.join();
    }
    let survived = fates.survived.lock().expect("no panic").len();
    ensure!(survived >= 4 && fates.killed() == 0, "{survived}");
    for agent in &agents {
        no_alert(agent)?;
        let named = look_alikes(agent)?;
        ensure!(named.is_empty(), "{named:?}");
    }
    Ok(())
}

const TRAFFIC: [&[f64]; 5] = [
    &[1.5, 6.0, 3.0],
    &[4.0, 2.5, 5.5],
    &[6.5, 1.2],
    &[2.2, 3.3, 4.4],
    &[5.0],
];

/// A server that is started again: by FIN, as a deploy ends it, and without a word, as a crash of its host.
#[test]
fn a_server_that_is_started_again_is_silent() -> Result<()> {
    let net = Routed::new(RoutedConfig::default())?;
    let to = net.service();
    let mut echo = Echo::new(&net.server, to, None)?;
    let mut args = ARGS.to_vec();
    args.extend(["--set", "idle_killed.min_idle=1s"]);
    let agent = watch(&net.client, &args)?;
    let fates = Fates::default();
    let mut clients = Vec::new();
    for pauses in TRAFFIC.iter().chain(&TRAFFIC) {
        clients.push(client(&net.client, to, &fates, pauses, plain)?);
        std::thread::sleep(Duration::from_millis(300));
    }
    std::thread::sleep(10 * SECOND);
    echo.end(false);
    let mut echo = Echo::new(&net.server, to, None)?;
    std::thread::sleep(10 * SECOND);
    // Nothing of the end gets out: the clients find out when they ask again.
    net.server.nft(
        "table inet mute { chain out { type filter hook output priority 0; tcp sport 8080 drop; }; }\n",
    )?;
    echo.end(true);
    std::thread::sleep(Duration::from_millis(300));
    net.server.nft("delete table inet mute\n")?;
    let _echo = Echo::new(&net.server, to, None)?;
    std::thread::sleep(15 * SECOND);
    fates.over.store(true, Ordering::Relaxed);
    for client in clients {
        let _ = client.join();
    }
    println!("{} were reset", fates.killed());
    ensure!(fates.killed() >= 3, "the second end resets");
    ensure!(fates.survived.lock().expect("no panic").len() > 20);
    agent.expect_no_alert(SECOND, |_| true)?;
    ensure!(!look_alikes(&agent)?.contains("keepalive_race"));
    Ok(())
}

/// A server that closes idle connections after 3 s, and clients that do not look before they ask again.
#[test]
fn a_request_that_crosses_the_end_is_a_race() -> Result<()> {
    let net = Routed::new(RoutedConfig::default())?;
    let to = net.service();
    let _echo = Echo::new(&net.server, to, Some(3 * SECOND))?;
    let agent = watch(&net.client, &ARGS)?;
    let fates = Fates::default();
    let mut clients = Vec::new();
    for pauses in [&[3.3, 1.0][..], &[3.5, 2.0], &[3.2, 2.5], &[2.8, 3.4]] {
        clients.push(client(&net.client, to, &fates, pauses, plain)?);
    }
    let told = agent.wait_line(60 * SECOND, |line| {
        line["type"] == "look_alike" && line["name"] == "keepalive_race"
    })?;
    println!("{}", told["summary"]);
    fates.over.store(true, Ordering::Relaxed);
    for client in clients {
        let _ = client.join();
    }
    let after = told["evidence"]["idle"]["timeout_seconds"]
        .as_f64()
        .context("a time")?;
    ensure!((2.9..3.6).contains(&after), "{after}");
    agent.expect_no_alert(SECOND, |_| true)?;
    Ok(())
}
