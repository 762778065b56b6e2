//! A page as a client in the agent's host gets it, and what Prometheus' own tool thinks of it.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;
use tuplewatch_tests::prelude::*;

use crate::support::SECOND;

/// Where the pages are by default.
pub const DEFAULT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 9464);

/// An answer.
#[derive(Debug)]
pub struct Page {
    pub code: u16,
    head: String,
    pub body: String,
}

impl Page {
    /// Asks for `path` from inside `host`.
    pub fn get(host: &Host, address: SocketAddr, path: &str) -> Result<Self> {
        let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n");
        let answer = host.in_ns(|| -> Result<String> {
            let mut stream = TcpStream::connect_timeout(&address, 5 * SECOND)?;
            stream.set_read_timeout(Some(30 * SECOND))?;
            stream.write_all(request.as_bytes())?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer)
        })??;
        let (head, body) = answer
            .split_once("\r\n\r\n")
            .with_context(|| format!("{path}: not an answer: {answer:?}"))?;
        let code = head.split(' ').nth(1).context("no status code")?.parse()?;
        let length: usize = {
            let page = Self {
                code,
                head: head.to_owned(),
                body: String::new(),
            };
            page.header("content-length")
                .context("no length")?
                .parse()?
        };
        ensure!(
            body.len() == length,
            "{path}: {} of {length} bytes",
            body.len()
        );
        Ok(Self {
            code,
            head: head.to_owned(),
            body: body.to_owned(),
        })
    }

    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        let lines = self
            .head
            .lines()
            .skip(1)
            .filter_map(|line| line.split_once(": "));
        let mut found = lines.filter(|(n, _)| n.eq_ignore_ascii_case(name));
        found.next().map(|(_, value)| value)
    }

    /// The body of a page that must be JSON.
    pub fn json(&self) -> Result<Value> {
        ensure!(self.code == 200, "{} {}", self.code, self.body);
        ensure!(
            self.header("content-type") == Some("application/json"),
            "{}",
            self.head
        );
        Ok(serde_json::from_str(&self.body)?)
    }
}

/// Connections that never finish their request.
pub fn dawdle(host: &Host, address: SocketAddr, count: usize) -> Result<Vec<TcpStream>> {
    host.in_ns(|| {
        (0..count)
            .map(|_| {
                let mut stream = TcpStream::connect_timeout(&address, 5 * SECOND)?;
                stream.write_all(b"GET /metrics HTTP/1.1\r\nX-Slow: ")?;
                Ok(stream)
            })
            .collect()
    })?
}

/// The values on `/metrics` by series: name and labels as they are written.
#[derive(Debug, Default)]
pub struct Samples(BTreeMap<String, f64>);

impl Samples {
    /// Reads the text format; a series that is there twice is an error.
    pub fn parse(text: &str) -> Result<Self> {
        let mut samples = BTreeMap::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (series, value) = line.rsplit_once(' ').context("a line without a value")?;
            let value = value.parse().with_context(|| line.to_owned())?;
            let twice = samples.insert(series.to_owned(), value);
            ensure!(twice.is_none(), "{series} is there twice");
        }
        Ok(Self(samples))
    }

    /// The value of one series.
    pub fn get(&self, series: &str) -> Result<f64> {
        let value = self.0.get(series).copied();
        value.with_context(|| {
            let name = series.split('{').next().unwrap_or_default();
            let others: Vec<_> = self.0.keys().filter(|s| s.starts_with(name)).collect();
            format!("no series {series}, but {others:#?}")
        })
    }

    /// Fails if a counter went back since `before`.
    pub fn never_behind(&self, before: &Self) -> Result<()> {
        for (series, value) in &self.0 {
            let name = series.split('{').next().unwrap_or_default();
            let is_counter = ["_total", "_bucket", "_count"]
                .iter()
                .any(|end| name.ends_with(end));
            if let Some(was) = before.0.get(series).filter(|_| is_counter) {
                ensure!(value >= was, "{series} went back from {was} to {value}");
            }
        }
        Ok(())
    }
}

/// Fails unless `promtool check metrics` has nothing to say. Without the tool the tests fail: one that
/// is not there must not look like one that found nothing.
pub fn promtool(text: &str) -> Result<()> {
    const REMEDY: &str = "run `cargo xtask setup` and the tests by `cargo xtask test`, or set \
                          TUPLEWATCH_PROMTOOL to the path of promtool";
    let path = std::env::var_os("TUPLEWATCH_PROMTOOL").filter(|path| !path.is_empty());
    let Some(path) = path.map(PathBuf::from) else {
        bail!("TUPLEWATCH_PROMTOOL does not tell where Prometheus' promtool is; remedy: {REMEDY}");
    };
    let mut child = Command::new(&path)
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("{} does not start; remedy: {REMEDY}", path.display()))?;
    let mut input = child.stdin.take().context("standard input was piped")?;
    input.write_all(text.as_bytes())?;
    drop(input);
    let output = child.wait_with_output()?;
    let said = [output.stdout, output.stderr].concat();
    ensure!(
        output.status.success() && said.is_empty(),
        "promtool check metrics: {}: {}",
        output.status,
        String::from_utf8_lossy(&said)
    );
    Ok(())
}
