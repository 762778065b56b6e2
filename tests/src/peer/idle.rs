//! `idle`: established connections that nobody uses, both ends in one process.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use socket2::{Domain, Protocol, Socket, Type};

use super::sleep_until;
use crate::config::IdleConfig;
use crate::report::{IdleReport, LISTENING};

pub(super) fn run(config: &IdleConfig) -> Result<IdleReport> {
    let end = Instant::now() + Duration::from_secs_f64(config.seconds);
    // As many as may be without a right.
    let maximum = getrlimit(Resource::Nofile).maximum;
    let limit = Rlimit {
        current: maximum,
        maximum,
    };
    setrlimit(Resource::Nofile, limit).context("room for open files")?;
    let socket = || {
        Socket::new(
            Domain::for_address(config.listen),
            Type::STREAM,
            Some(Protocol::TCP),
        )
    };
    let listener = socket()?;
    listener.set_reuse_address(true)?;
    listener.bind(&config.listen.into())?;
    listener.listen(16)?;
    let mut ends = Vec::new();
    for n in 0..config.connections {
        let client = socket().with_context(|| format!("socket of connection {n}"))?;
        client
            .connect(&config.listen.into())
            .with_context(|| format!("connection {n} to {}", config.listen))?;
        let server = listener.accept().context("accept")?.0;
        ends.push((client, server));
    }
    println!("{LISTENING}");
    sleep_until(end);
    Ok(IdleReport {
        pid: std::process::id(),
        connections: ends.len() as u64,
    })
}
