//! What the first bytes of a TCP segment say of HTTP/1: a request and its kind, a response and its status.
//!
//! Status lines and request lines stand at the beginning of a segment: an end that sends a message hands
//! it to its TCP in one piece, and TCP begins a segment with it unless older data still waits. What stands
//! in the middle of one (a pipelined response behind another) is not seen, which costs a count and
//! confuses nothing.
//!
//! HTTP/2, gRPC and everything inside TLS have no line that could be read.

/// Bytes that tell a request or a response from anything else: shorter segments hold neither.
pub const PEEK: usize = 16;
/// Bytes of a request that its kind is made of.
pub const LINE: usize = 64;
/// Bytes of a response that tell whose error page it is: status line, headers and the begin of the body.
pub const HEAD: usize = 256;

/// The first [`PEEK`] bytes of a segment as two little-endian words.
pub type Peek = [u64; PEEK / 8];
/// The first [`LINE`] bytes of a request as little-endian words, zeros behind the end of the segment.
pub type Line = [u64; LINE / 8];

/// What a segment begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum First {
    /// Neither of both: the body of a message, or another protocol.
    Other,
    /// The line of a request.
    Request,
    /// The status line of a response.
    Response {
        /// 100 to 599.
        status: u16,
    },
}

/// A message of HTTP/1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// A request.
    Request {
        /// See [`kind`].
        kind: u32,
    },
    /// A response.
    Response {
        /// 100 to 599.
        status: u16,
    },
}

/// The first `n` bytes of a word.
const fn low(n: u32) -> u64 {
    u64::MAX >> (64 - 8 * n)
}

/// Whether a word begins with `text`; what lies behind it does not matter.
#[inline(always)]
const fn begins<const N: usize>(word: u64, text: &[u8; N]) -> bool {
    let mut all = [0; 8];
    let mut i = 0;
    while i < N {
        all[i] = text[i];
        i += 1;
    }
    word & low(N as u32) == u64::from_le_bytes(all)
}

/// What a segment begins with, from its first bytes.
///
/// Methods are those of RFC 9110 section 9 and PATCH (RFC 5789).
#[inline(always)]
#[must_use]
pub const fn first(peek: &Peek) -> First {
    let word = peek[0];
    // Nearly every segment ends here: eight of the nine methods and HTTP begin with C, D, G, H, O, P or
    // T, and all of them with two capitals.
    if word & 0xe0e0 != 0x4040 {
        return First::Other;
    }
    if begins(word, b"HTTP/1.") {
        let status = status(peek);
        return if status == 0 {
            First::Other
        } else {
            First::Response { status }
        };
    }
    if begins(word, b"GET ")
        || begins(word, b"POST ")
        || begins(word, b"PUT ")
        || begins(word, b"HEAD ")
        || begins(word, b"DELETE ")
        || begins(word, b"PATCH ")
        || begins(word, b"OPTIONS ")
        || begins(word, b"CONNECT ")
        || begins(word, b"TRACE ")
    {
        return First::Request;
    }
    First::Other
}

/// The status of a line that begins with `HTTP/1.`: 100 to 599, or 0 if it is none (RFC 9112 section 4:
/// `HTTP/1.1 SP 3DIGIT SP`; some servers leave the reason and its space out).
#[inline(always)]
const fn status(peek: &Peek) -> u16 {
    let minor = (peek[0] >> 56) as u8;
    let rest = peek[1];
    let (space, a, b, c, end) = (
        rest as u8,
        (rest >> 8) as u8,
        (rest >> 16) as u8,
        (rest >> 24) as u8,
        (rest >> 32) as u8,
    );
    let digits = is_digit(b) && is_digit(c) && a >= b'1' && a <= b'5';
    if (minor != b'0' && minor != b'1') || space != b' ' || !digits || (end != b' ' && end != b'\r')
    {
        return 0;
    }
    (a - b'0') as u16 * 100 + (b - b'0') as u16 * 10 + (c - b'0') as u16
}

#[inline(always)]
const fn is_digit(byte: u8) -> bool {
    byte.wrapping_sub(b'0') < 10
}

/// More of the exchange follows on this response: 1xx lines are not final (RFC 9110 section 15.2), but
/// for 101, after which the connection speaks another protocol.
#[inline(always)]
#[must_use]
pub const fn is_interim(status: u16) -> bool {
    status < 200 && status != 101
}

/// The server, or who stands for it, says that it failed.
#[inline(always)]
#[must_use]
pub const fn is_failure(status: u16) -> bool {
    status >= 500
}

/// The request was served. What the client did wrong (4xx) says nothing of the server.
#[inline(always)]
#[must_use]
pub const fn is_success(status: u16) -> bool {
    status < 400
}

const ONES: u64 = 0x0101_0101_0101_0101;
const LOWS: u64 = 0x7f7f_7f7f_7f7f_7f7f;
const HIGHS: u64 = 0x8080_8080_8080_8080;

/// The highest bit of each byte that equals `byte`.
#[inline(always)]
const fn equal(word: u64, byte: u8) -> u64 {
    let x = word ^ (ONES * byte as u64);
    !(((x & LOWS) + LOWS) | x | LOWS)
}

/// The highest bit of each byte that is a digit.
#[inline(always)]
const fn digits(word: u64) -> u64 {
    let low = word & LOWS;
    let from_0 = low + ONES * (0x80 - b'0' as u64);
    let above_9 = low + ONES * (0x80 - b'9' as u64 - 1);
    from_0 & !above_9 & !word & HIGHS
}

/// The kind of a request, from the begin of its line: a hash of the method and of the path without its
/// query, up to the first segment that begins with a digit. `/orders/17?x=1` and `/orders/4711/items` are
/// of one kind, `/api/v1/orders` and `/api/v1/users` are not. Never 0.
///
/// Eight bytes at a time and without branches, so that the verifier of eBPF goes on with one unknown
/// number.
#[inline(always)]
#[must_use]
pub const fn kind(line: &Line) -> u32 {
    let mut hash: u64 = 0x9e37_79b9_7f4a_7c15;
    // All ones until the end of the kind was found.
    let mut open = u64::MAX;
    let mut slash_before = 0;
    let mut i = 0;
    while i < line.len() {
        let word = line[i];
        let mut spaces = equal(word, b' ');
        if i == 0 {
            // The one behind the method.
            spaces &= spaces.wrapping_sub(1);
        }
        let slashes = equal(word, b'/');
        let number = (slashes << 8 | slash_before) & digits(word);
        slash_before = slashes >> 56;
        let end = spaces | equal(word, b'?') | equal(word, b'\r') | number;
        // What lies before the first byte that ends it; everything, if there is none.
        let before = ((end & end.wrapping_neg()) >> 7).wrapping_sub(1);
        hash = (hash ^ (word & before & open)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        hash ^= hash >> 32;
        open &= ((end | end.wrapping_neg()) >> 63).wrapping_sub(1);
        i += 1;
    }
    (hash ^ hash >> 29) as u32 | 1
}

/// The words of the first bytes of a segment, zeros behind its end.
#[must_use]
pub fn words<const N: usize>(bytes: &[u8]) -> [u64; N] {
    let mut words = [0; N];
    for (word, chunk) in words.iter_mut().zip(bytes.chunks(8)) {
        let mut all = [0; 8];
        all[..chunk.len()].copy_from_slice(chunk);
        *word = u64::from_le_bytes(all);
    }
    words
}

/// Reads a segment's payload as far as it is at hand.
#[must_use]
pub fn message(payload: &[u8]) -> Option<Message> {
    if payload.len() < PEEK {
        return None;
    }
    match first(&words(&payload[..PEEK])) {
        First::Other => None,
        First::Request => Some(Message::Request {
            kind: kind(&words(&payload[..payload.len().min(LINE)])),
        }),
        First::Response { status } => Some(Message::Response { status }),
    }
}

/// A load balancer whose own error pages are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Balancer {
    /// What it is called.
    pub name: &'static str,
    /// How the value of its `Server` header begins.
    server: &'static str,
    /// How the body of its own error page begins: a response that its owner has configured has another
    /// one.
    body: &'static str,
}

/// Load balancers whose own error pages are known.
///
/// AWS ALB: `Server: awselb/2.0` in responses that it makes itself (those of a target keep the target's
/// header), and `<html>\r\n<head><title>503 Service Temporarily Unavailable</title></head>`.
pub const BALANCERS: &[Balancer] = &[Balancer {
    name: "AWS Application Load Balancer",
    server: "awselb/",
    body: "<html>\r\n<head><title>5",
}];

/// Whose own error page a failed response is, from its first bytes: the `Server` header tells, and the
/// body, where it is at hand, must be the balancer's own.
#[must_use]
pub fn page(head: &[u8]) -> Option<&'static Balancer> {
    const END: &[u8] = b"\r\n\r\n";
    let head = &head[..head.len().min(HEAD)];
    let end = head.windows(END.len()).position(|w| w == END);
    let (headers, body) = match end {
        Some(at) => (&head[..at], &head[at + END.len()..]),
        None => (head, &[][..]),
    };
    let server = headers.split(|b| *b == b'\n').skip(1).find_map(|line| {
        let (name, value) = line.split_at_checked(7)?;
        name.eq_ignore_ascii_case(b"server:")
            .then(|| value.trim_ascii())
    })?;
    BALANCERS.iter().find(|balancer| {
        let n = body.len().min(balancer.body.len());
        server.starts_with(balancer.server.as_bytes()) && body[..n] == balancer.body.as_bytes()[..n]
    })
}
