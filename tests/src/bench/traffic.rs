//! Traffic for the benchmarks: many small segments, few large ones, and short connections.

use std::{
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::Result;

use crate::host::Host;

/// What a server does with each connection.
#[derive(Clone, Copy)]
pub enum Service {
    /// Sends back what comes.
    Echo,
    /// Answers each request with a response of HTTP/1.
    Http,
    /// Reads and drops.
    Sink,
    /// Closes at once.
    Close,
}

/// A server thread in a host; ends when dropped.
pub struct Server {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Starts a server.
pub fn serve(host: &Host, address: SocketAddr, service: Service) -> Result<Server> {
    let listener = host.in_ns(move || TcpListener::bind(address))??;
    // accept() wakes up now and then to see whether it is over; between two connections it must not
    // sleep by itself, or every one would meet cold caches.
    socket2::SockRef::from(&listener).set_read_timeout(Some(Duration::from_millis(100)))?;
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let thread = std::thread::spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            if let Ok((stream, _)) = listener.accept() {
                handle(stream, service);
            }
        }
    });
    Ok(Server {
        stop,
        thread: Some(thread),
    })
}

fn handle(mut stream: TcpStream, service: Service) {
    let mut buffer = vec![
        0;
        if matches!(service, Service::Sink) {
            1 << 20
        } else {
            4096
        }
    ];
    let _ = stream.set_read_timeout(None);
    let _ = stream.set_nodelay(true);
    match service {
        Service::Close => {}
        Service::Sink => while stream.read(&mut buffer).is_ok_and(|n| n > 0) {},
        Service::Http => {
            while stream.read(&mut buffer).is_ok_and(|n| n > 0) {
                if stream.write_all(RESPONSE).is_err() {
                    break;
                }
            }
        }
        Service::Echo => {
            while let Ok(n) = stream.read(&mut buffer) {
                if n == 0 || stream.write_all(&buffer[..n]).is_err() {
                    break;
                }
            }
        }
    }
}

/// Small requests and responses on one connection, each of them one segment with its ACK.
pub fn small(host: &Host, to: SocketAddr, seconds: f64) -> Result<u64> {
    host.in_ns(move || -> Result<u64> {
        let mut stream = TcpStream::connect(to)?;
        stream.set_nodelay(true)?;
        let (end, mut n, mut buffer) = (
            Instant::now() + Duration::from_secs_f64(seconds),
            0,
            [7; 64],
        );
        while Instant::now() < end {
            stream.write_all(&buffer)?;
            stream.read_exact(&mut buffer)?;
            n += 1;
        }
        Ok(n)
    })?
}

const REQUEST: &[u8] = b"GET /orders/17 HTTP/1.1\r\nHost: shop.example\r\n\r\n";
const RESPONSE: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/// Requests and responses of HTTP/1 on one connection, each of them one segment with its ACK.
pub fn http(host: &Host, to: SocketAddr, seconds: f64) -> Result<u64> {
    host.in_ns(move || -> Result<u64> {
        let mut stream = TcpStream::connect(to)?;
        stream.set_nodelay(true)?;
        let (end, mut n, mut buffer) = (
            Instant::now() + Duration::from_secs_f64(seconds),
            0,
            vec![0; RESPONSE.len()],
        );
        while Instant::now() < end {
            stream.write_all(REQUEST)?;
            stream.read_exact(&mut buffer)?;
            n += 1;
        }
        Ok(n)
    })?
}

/// As much as goes through one connection.
pub fn bulk(host: &Host, to: SocketAddr, seconds: f64) -> Result<u64> {
    host.in_ns(move || -> Result<u64> {
        let mut stream = TcpStream::connect(to)?;
        let (end, buffer, mut n) = (
            Instant::now() + Duration::from_secs_f64(seconds),
            vec![7; 1 << 18],
            0,
        );
        while Instant::now() < end {
            stream.write_all(&buffer)?;
            n += buffer.len() as u64;
        }
        Ok(n)
    })?
}

/// Short connections, one after the other, that carry nothing.
pub fn short(host: &Host, to: SocketAddr, seconds: f64) -> Result<u64> {
    host.in_ns(move || -> Result<u64> {
        let (end, mut n) = (Instant::now() + Duration::from_secs_f64(seconds), 0);
        while Instant::now() < end {
            let mut stream = TcpStream::connect(to)?;
            let _ = stream.read(&mut [0; 1]);
            n += 1;
        }
        Ok(n)
    })?
}

/// Addresses of loopback that are connected to.
const DESTINATIONS: u32 = 64;
/// The first of them: 127.0.1.0.
const DESTINATION: u32 = 0x7f00_0100;

/// Opens and closes connections as fast as one host can, with nothing in between: returns how many.
///
/// One thread for each CPU is both ends: over loopback the handshake is complete when connect()
/// returns, so nobody waits for anybody and the CPUs do nothing else.
pub fn saturate(host: &Host, port: u16, seconds: f64) -> Result<u64> {
    let cpus = std::thread::available_parallelism()?.get();
    host.in_ns(move || {
        let one = |port| -> Result<u64> {
            let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))?;
            let (end, mut n) = (Instant::now() + Duration::from_secs_f64(seconds), 0);
            while Instant::now() < end {
                // Many addresses, so that TIME_WAIT does not slow the search for a port.
                let to = (Ipv4Addr::from(DESTINATION + n % DESTINATIONS), port);
                let client = TcpStream::connect(to)?;
                drop(listener.accept()?);
                drop(client);
                n += 1;
            }
            Ok(u64::from(n))
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (port..)
                .take(cpus)
                .map(|port| scope.spawn(move || one(port)))
                .collect();
            threads.into_iter().try_fold(0, |sum, thread| {
                let n = thread
                    .join()
                    .map_err(|_| anyhow::anyhow!("a thread of the load panicked"))??;
                Ok(sum + n)
            })
        })
    })?
}
