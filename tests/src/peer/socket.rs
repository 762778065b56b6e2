//! Sockets with the few options that the lab needs and the libraries do not offer.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};

const TCP_REPAIR: libc::c_int = 19;
const TCP_REPAIR_QUEUE: libc::c_int = 20;
const TCP_QUEUE_SEQ: libc::c_int = 21;
const TCP_FASTOPEN: libc::c_int = 23;
const TCP_FASTOPEN_CONNECT: libc::c_int = 30;
const TCP_SEND_QUEUE: libc::c_int = 2;
const REPAIR_ON: libc::c_int = 1;
/// Off without sending a window probe.
const REPAIR_OFF_NO_WP: libc::c_int = -1;

/// Offsets into struct tcp_info (include/uapi/linux/tcp.h), which only ever grows at its end.
const TCPI_OPTIONS: usize = 5;
const TCPI_TOTAL_RETRANS: usize = 100;
const TCP_INFO_LENGTH: usize = 104;
const TCPI_OPT_SYN_DATA: u8 = 32;

fn set(socket: &Socket, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let length = libc::socklen_t::try_from(size_of_val(&value)).expect("4 bytes");
    // SAFETY: `value` is an int that lives until the call returns, and `length` is its size.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            option,
            (&raw const value).cast(),
            length,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn tcp_info(socket: &Socket) -> Option<[u8; TCP_INFO_LENGTH]> {
    let mut info = [0u8; TCP_INFO_LENGTH];
    let mut length = libc::socklen_t::try_from(info.len()).expect("104 bytes");
    // SAFETY: the kernel writes at most `length` bytes, the size of `info`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    (result == 0).then_some(info)
}

/// Segments sent again on this socket so far; before the handshake ends: SYNs.
pub(super) fn retransmits(socket: &Socket) -> u32 {
    tcp_info(socket).map_or(0, |info| {
        let bytes = &info[TCPI_TOTAL_RETRANS..TCPI_TOTAL_RETRANS + 4];
        u32::from_ne_bytes(bytes.try_into().expect("4 bytes"))
    })
}

/// True if the SYN carried data and the SYN-ACK acknowledged it.
pub(super) fn syn_data_accepted(socket: &Socket) -> bool {
    tcp_info(socket).is_some_and(|info| info[TCPI_OPTIONS] & TCPI_OPT_SYN_DATA != 0)
}

/// Makes the kernel use this initial sequence number: repair mode lets one set the send sequence of
/// a closed socket, and connect() keeps one that is set.
fn set_isn(socket: &Socket, isn: u32) -> io::Result<()> {
    set(socket, TCP_REPAIR, REPAIR_ON)?;
    set(socket, TCP_REPAIR_QUEUE, TCP_SEND_QUEUE)?;
    set(socket, TCP_QUEUE_SEQ, isn.cast_signed())?;
    set(socket, TCP_REPAIR, REPAIR_OFF_NO_WP)
}

/// Closes a connection without a packet: the other end does not notice.
pub(super) fn abandon(socket: Socket) -> io::Result<()> {
    set(&socket, TCP_REPAIR, REPAIR_ON)?;
    drop(socket);
    Ok(())
}

/// Makes the next connect() wait for the first write and send it within the SYN.
pub(super) fn fast_open_connect(socket: &Socket) -> io::Result<()> {
    set(socket, TCP_FASTOPEN_CONNECT, 1)
}

/// Makes a listener accept data within SYNs.
pub(super) fn fast_open_listen(socket: &Socket) -> io::Result<()> {
    set(socket, TCP_FASTOPEN, 128)
}

/// A TCP socket for connections to `to`.
pub(super) fn new(to: SocketAddr) -> io::Result<Socket> {
    Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))
}

/// How to connect.
#[derive(Debug, Clone, Copy)]
pub(super) struct Open {
    pub(super) to: SocketAddr,
    pub(super) bind: Option<SocketAddr>,
    pub(super) isn: Option<u32>,
    pub(super) timeout: Duration,
}

/// How it went.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) result: Result<Socket, String>,
    pub(super) local_port: u16,
    pub(super) time: Duration,
    pub(super) syn_retransmits: u32,
}

/// Connects. The outcome of a failure is its kind as in [`crate::report::LoadReport::failed`].
pub(super) fn open(open: Open) -> Opened {
    let start = Instant::now();
    let mut local_port = 0;
    let mut syn_retransmits = 0;
    let mut attempt = || -> io::Result<Socket> {
        let socket = new(open.to)?;
        if let Some(isn) = open.isn {
            set_isn(&socket, isn)?;
        }
        // After set_isn: leaving repair mode clears this option.
        socket.set_reuse_address(true)?;
        if let Some(address) = open.bind {
            socket.bind(&address.into())?;
        }
        let result = socket.connect_timeout(&open.to.into(), open.timeout);
        local_port = socket
            .local_addr()
            .ok()
            .and_then(|a| a.as_socket())
            .map_or(0, |a| a.port());
        syn_retransmits = retransmits(&socket);
        result.map(|()| socket)
    };
    let result = attempt().map_err(|error| kind(&error));
    Opened {
        result,
        local_port,
        time: start.elapsed(),
        syn_retransmits,
    }
}

/// The kind of a failed connect() or bind().
fn kind(error: &io::Error) -> String {
    match error.raw_os_error() {
        // socket2's own time limit: the application gave up.
        None if error.kind() == io::ErrorKind::TimedOut => "app_timeout".into(),
        Some(libc::ETIMEDOUT) => "kernel_timeout".into(),
        Some(libc::ECONNREFUSED) => "refused".into(),
        Some(libc::ECONNRESET) => "reset".into(),
        Some(libc::EADDRNOTAVAIL) => "no_port".into(),
        Some(libc::EADDRINUSE) => "addr_in_use".into(),
        Some(number) => format!("other_{number}"),
        None => format!("other_{error}"),
    }
}
