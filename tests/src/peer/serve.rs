//! `serve`: a small HTTP/1.1 server with given manners.

use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use socket2::{Domain, Protocol, Socket, Type};

use super::{sleep_until, socket, stopped};
use crate::config::ServeConfig;
use crate::report::{LISTENING, ServeReport};

/// How often a blocked thread looks whether the process shall end.
const LOOK: Duration = Duration::from_millis(200);

#[derive(Debug)]
struct Shared {
    config: ServeConfig,
    end: Instant,
    accepted: AtomicU64,
    responses: AtomicU64,
    broken: AtomicU64,
    clients: Mutex<std::collections::BTreeMap<IpAddr, u64>>,
}

pub(super) fn run(config: &ServeConfig) -> Result<ServeReport> {
    let listener =
        Arc::new(listen(config).with_context(|| format!("listening on {}", config.listen))?);
    println!("{LISTENING}");
    let shared = Arc::new(Shared {
        config: config.clone(),
        end: Instant::now() + Duration::from_secs_f64(config.seconds),
        accepted: AtomicU64::new(0),
        responses: AtomicU64::new(0),
        broken: AtomicU64::new(0),
        clients: Mutex::default(),
    });
    let acceptors: Vec<_> = (0..config.inline.max(1))
        .map(|_| {
            let (listener, shared) = (Arc::clone(&listener), Arc::clone(&shared));
            std::thread::spawn(move || accept(&listener, &shared))
        })
        .collect();
    for acceptor in acceptors {
        acceptor
            .join()
            .map_err(|_| anyhow::anyhow!("an accepting thread panicked"))?;
    }
    let clients = shared
        .clients
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone();
    Ok(ServeReport {
        pid: std::process::id(),
        accepted: shared.accepted.load(Ordering::Relaxed),
        responses: shared.responses.load(Ordering::Relaxed),
        broken: shared.broken.load(Ordering::Relaxed),
        clients,
    })
}

fn listen(config: &ServeConfig) -> io::Result<Socket> {
    let listener = Socket::new(
        Domain::for_address(config.listen),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    listener.set_reuse_address(true)?;
    if config.listen.is_ipv6() {
        listener.set_only_v6(!config.dual_stack)?;
    }
    if config.fastopen {
        socket::fast_open_listen(&listener)?;
    }
    // Also bounds accept().
    listener.set_read_timeout(Some(LOOK))?;
    listener.bind(&config.listen.into())?;
    listener.listen(config.backlog)?;
    Ok(listener)
}

fn accept(listener: &Socket, shared: &Arc<Shared>) {
    let over = || stopped() || Instant::now() >= shared.end;
    while !over() {
        let accepted = shared.accepted.load(Ordering::Relaxed);
        if shared
            .config
            .no_accept_after
            .is_some_and(|limit| accepted >= limit)
        {
            sleep_until(shared.end);
            return;
        }
        let Ok((connection, peer)) = listener.accept() else {
            continue;
        };
        shared.accepted.fetch_add(1, Ordering::Relaxed);
        if let Some(address) = peer
            .as_socket()
            .map(|peer: SocketAddr| peer.ip().to_canonical())
        {
            let mut clients = shared
                .clients
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            *clients.entry(address).or_insert(0) += 1;
        }
        if shared.config.inline > 0 {
            serve(&connection, shared);
        } else {
            let shared = Arc::clone(shared);
            let thread = std::thread::Builder::new().stack_size(64 * 1024);
            if thread.spawn(move || serve(&connection, &shared)).is_err() {
                eprintln!("lab-peer serve: no thread for a connection");
            }
        }
    }
}

fn serve(connection: &Socket, shared: &Shared) {
    if answer_all(connection, shared).is_err() {
        shared.broken.fetch_add(1, Ordering::Relaxed);
    }
}

/// Answers requests until the last one, then closes (by returning) at once or after the client.
fn answer_all(connection: &Socket, shared: &Shared) -> io::Result<()> {
    let config = &shared.config;
    connection.set_tcp_nodelay(true)?;
    connection.set_read_timeout(Some(LOOK))?;
    let mut received = Vec::new();
    loop {
        let Some(request) = next_request(connection, shared, &mut received)? else {
            return Ok(());
        };
        if config.delay_ms > 0 {
            sleep_until(Instant::now() + Duration::from_millis(config.delay_ms));
        }
        let last = !config.keep_alive || request.contains("connection: close");
        let closes = last && config.close_first;
        let mut stream = connection;
        stream.write_all(&response(config, closes))?;
        shared.responses.fetch_add(1, Ordering::Relaxed);
        if closes {
            return Ok(());
        }
        if last {
            // Nothing but the client's FIN should come now.
            while next_request(connection, shared, &mut received)?.is_some() {}
            return Ok(());
        }
    }
}

/// The head of the next request in lower case; `None` when the client has closed between requests or
/// this process shall end.
fn next_request(
    connection: &Socket,
    shared: &Shared,
    received: &mut Vec<u8>,
) -> io::Result<Option<String>> {
    let mut stream = connection;
    let mut buffer = [0u8; 2048];
    loop {
        if let Some(end) = received.windows(4).position(|four| four == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&received[..end]).to_ascii_lowercase();
            received.drain(..end + 4);
            return Ok(Some(head));
        }
        match stream.read(&mut buffer) {
            Ok(0) if received.is_empty() => return Ok(None),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => received.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if stopped() || Instant::now() >= shared.end {
                    return Ok(None);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn response(config: &ServeConfig, closes: bool) -> Vec<u8> {
    let reason = match config.status {
        200 => "OK",
        503 => "Service Temporarily Unavailable",
        _ => "Status",
    };
    let connection = if closes { "close" } else { "keep-alive" };
    let mut response = format!(
        "HTTP/1.1 {} {reason}\r\nContent-Length: {}\r\nConnection: {connection}\r\n\r\n",
        config.status, config.body
    )
    .into_bytes();
    response.resize(response.len() + config.body, b'x');
    response
}
