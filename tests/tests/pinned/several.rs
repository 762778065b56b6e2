//! Several clients behind one virtual address, and a backend that fails and recovers while their connections stay
//! open.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU16, Ordering},
    },
    thread::JoinHandle,
};

use super::*;

/// A backend whose status can be set.
struct Backend {
    status: Arc<AtomicU16>,
    over: Arc<AtomicBool>,
    acceptor: Option<JoinHandle<()>>,
}

impl Backend {
    fn new(host: &Host, port: u16) -> Result<Self> {
        let at = SocketAddr::from(([203, 0, 113, 10], port));
        let listener = host.in_ns(|| TcpListener::bind(at))??;
        listener.set_nonblocking(true)?;
        let (status, over) = (Arc::new(AtomicU16::new(200)), Arc::default());
        let acceptor = {
            let (status, over): (_, Arc<AtomicBool>) = (Arc::clone(&status), Arc::clone(&over));
            std::thread::spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    let Ok((stream, _)) = listener.accept() else {
                        std::thread::sleep(Duration::from_millis(10));
                        continue;
                    };
                    let status = Arc::clone(&status);
                    std::thread::spawn(move || answer(stream, &status));
                }
            })
        };
        Ok(Self {
            status,
            over,
            acceptor: Some(acceptor),
        })
    }

    fn says(&self, status: u16) {
        self.status.store(status, Ordering::Relaxed);
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
    }
}

fn answer(mut stream: TcpStream, status: &AtomicU16) {
    let _ = stream.set_nonblocking(false);
    let mut request = [0; 1024];
    while matches!(stream.read(&mut request), Ok(n) if n > 0) {
        let status = status.load(Ordering::Relaxed);
        let text = format!("HTTP/1.1 {status} As\r\nContent-Length: 4\r\n\r\nbody");
        if stream.write_all(text.as_bytes()).is_err() {
            return;
        }
    }
}

/// One response, as its client saw it.
#[derive(Clone, Copy)]
struct Line {
    at: Instant,
    port: u16,
    status: u16,
}

/// What all clients saw.
#[derive(Clone, Default)]
struct Log {
    lines: Arc<Mutex<Vec<Line>>>,
    quiet: Arc<AtomicBool>,
    over: Arc<AtomicBool>,
}

impl Log {
    fn of(&self, port: u16) -> Vec<Line> {
        let lines = self.lines.lock().expect("no panic");
        lines.iter().filter(|l| l.port == port).copied().collect()
    }

    /// The moment of the first fourth failure in a row.
    fn fourth_failure(&self, ports: &[u16]) -> Option<Instant> {
        let fourth = |port: &u16| {
            let lines = self.of(*port);
            let mut failures = lines.iter().filter(|line| line.status >= 500);
            failures.nth(3).map(|line| line.at)
        };
        ports.iter().filter_map(fourth).min()
    }
}

/// Asks once; gives the status.
fn ask(stream: &mut TcpStream) -> io::Result<u16> {
    stream.write_all(b"GET /orders/17 HTTP/1.1\r\nHost: shop\r\n\r\n")?;
    let mut text = Vec::new();
    let mut some = [0; 256];
    while !text.ends_with(b"body") {
        match stream.read(&mut some)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => text.extend_from_slice(&some[..n]),
        }
    }
    let status = text.get(9..12).and_then(|s| str::from_utf8(s).ok());
    status
        .and_then(|status| status.parse().ok())
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// A client that keeps its connection and asks at this pace; its port.
fn kept(host: &Host, pace: Duration, log: &Log) -> Result<(u16, JoinHandle<()>)> {
    let to: SocketAddr = VIRTUAL.parse()?;
    let mut stream = host.in_ns(|| TcpStream::connect(to))??;
    stream.set_read_timeout(Some(5 * SECOND))?;
    let port = stream.local_addr()?.port();
    let log = log.clone();
    let thread = std::thread::spawn(move || {
        while !log.over.load(Ordering::Relaxed) {
            if !log.quiet.load(Ordering::Relaxed) {
                let Ok(status) = ask(&mut stream) else { return };
                let at = Instant::now();
                let line = Line { at, port, status };
                log.lines.lock().expect("no panic").push(line);
            }
            std::thread::sleep(pace);
        }
    });
    Ok((port, thread))
}

#[test]
fn several_clients_are_pinned_and_recover_on_their_connections() -> Result<()> {
    let net = Routed::new(RoutedConfig::default())?;
    let (_live, failing) = (
        Backend::new(&net.server, 8081)?,
        Backend::new(&net.server, 8082)?,
    );
    let agent = watch(&net.client, &["--set", "alert.resolve=5s"])?;
    let log = Log::default();
    let mut threads = Vec::new();
    let mut open = |paces: &[u64]| -> Result<Vec<u16>> {
        let mut ports = Vec::new();
        for pace in paces {
            let (port, thread) = kept(&net.client, Duration::from_millis(*pace), &log)?;
            ports.push(port);
            threads.push(thread);
        }
        Ok(ports)
    };
    net.route_virtual_to(8082)?;
    let pinned = open(&[400, 700, 900, 1100, 600])?;
    std::thread::sleep(2 * SECOND);
    net.route_virtual_to(8081)?;
    let well = open(&[500, 800, 1000])?;
    let load = net.client.load(&LoadConfig {
        rate: 5.0,
        seconds: 60.0,
        ..LoadConfig::new(VIRTUAL.parse()?)
    })?;
    std::thread::sleep(2 * SECOND);
    failing.says(503);
    let told = agent.wait_alert(20 * SECOND, |line| is_pinned(line, "firing"))?;
    let now = Instant::now();
    let fourth = log.fourth_failure(&pinned).context("four failures")?;
    let took = now.duration_since(fourth);
    println!("{took:?} after the fourth failure: {}", told["summary"]);
    ensure!(took < 2 * SECOND * patience(), "{took:?}");
    std::thread::sleep(14 * SECOND);
    failing.says(200);
    std::thread::sleep(3 * SECOND);
    log.quiet.store(true, Ordering::Relaxed);
    let over = agent.wait_alert(30 * SECOND, |line| is_pinned(line, "resolved"))?;
    let stuck = &over["evidence"]["stuck"];
    println!("{stuck}");
    let connections = stuck["connections"].as_array().context("connections")?;
    ensure!(connections.len() == pinned.len(), "{stuck}");
    let mut all = 0;
    for port in &pinned {
        let seen = connections
            .iter()
            .find(|c| number(c, "client.port") == u64::from(*port));
        let seen = seen.with_context(|| format!("port {port} is not in {stuck}"))?;
        let lines = log.of(*port);
        let failures = lines.iter().filter(|line| line.status == 503).count();
        all += failures as u64;
        ensure!(number(seen, "requests") == lines.len() as u64, "{seen}");
        ensure!(number(seen, "failures") == failures as u64, "{seen}");
        ensure!(number(seen, "in_a_row") == failures as u64, "{seen}");
        ensure!(
            seen["became"] == "recovered" && seen["close"].is_null(),
            "{seen}"
        );
    }
    ensure!(
        number(stuck, "failures") == all && number(stuck, "stuck") == 5,
        "{all}: {stuck}"
    );
    for port in well {
        ensure!(log.of(port).iter().all(|line| line.status == 200));
    }
    let alerts = agent.alerts()?;
    let ours = |alert: &Value| alert["cause"] == "pinned_5xx";
    ensure!(alerts.iter().all(ours), "{alerts:#?}");
    log.over.store(true, Ordering::Relaxed);
    load.stop()?;
    for thread in threads {
        let _ = thread.join();
    }
    Ok(())
}
