//! The client's half of the small HTTP/1.1 that the peers speak.

use std::io::{self, Read as _, Write as _};
use std::time::{Duration, Instant};

use socket2::Socket;

/// What follows the request of this connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum After {
    /// More requests may come.
    More,
    /// This was the last: wait for the server's FIN if the server says that it closes.
    Close,
}

/// The text of a request.
pub(super) fn request(after: After) -> String {
    let connection = match after {
        After::More => "keep-alive",
        After::Close => "close",
    };
    format!("GET /api/v1/orders/1 HTTP/1.1\r\nHost: lab\r\nConnection: {connection}\r\n\r\n")
}

/// Sends a request and reads the whole response.
pub(super) fn exchange(socket: &Socket, after: After, timeout: Duration) -> io::Result<()> {
    let mut stream = socket;
    stream.write_all(request(after).as_bytes())?;
    response(socket, after, timeout)
}

/// Reads the response to a request already sent.
pub(super) fn response(socket: &Socket, after: After, timeout: Duration) -> io::Result<()> {
    let end = Instant::now() + timeout;
    let mut stream = socket;
    let mut received = Vec::new();
    let mut buffer = [0u8; 16 * 1024];
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        socket.set_read_timeout(Some(left))?;
        let count = stream.read(&mut buffer)?;
        received.extend_from_slice(&buffer[..count]);
        let complete = complete(&received);
        if count == 0 {
            return if complete.is_some() {
                Ok(())
            } else {
                Err(io::ErrorKind::UnexpectedEof.into())
            };
        }
        match complete {
            Some(server_closes) if after == After::More || !server_closes => return Ok(()),
            _ => {}
        }
    }
}

/// `Some(server_closes)` once the whole response is there.
fn complete(received: &[u8]) -> Option<bool> {
    let head_end = received.windows(4).position(|four| four == b"\r\n\r\n")?;
    let head = String::from_utf8_lossy(&received[..head_end]).to_ascii_lowercase();
    let field = |name: &str| {
        head.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':').map(str::trim))
    };
    let length: usize = field("content-length")
        .and_then(|text| text.parse().ok())
        .unwrap_or(0);
    (received.len() >= head_end + 4 + length).then(|| field("connection") == Some("close"))
}
