//! `rawsyn`: SYNs that no socket stands behind.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result, ensure};

use super::Pace;
use super::packet::{RawSender, syn};
use super::random::{IsnSource, Random};
use crate::config::{Isn, RawSynConfig, SourcePort};
use crate::report::RawSynReport;

/// A limit for a process that sends as fast as it can.
const LONGEST: f64 = 600.0;

pub(super) fn run(config: &RawSynConfig) -> Result<RawSynReport> {
    ensure!(
        config.from.is_ipv4() == config.to.is_ipv4(),
        "--from {} and --to {} are of different families",
        config.from,
        config.to
    );
    ensure!(
        config.isn != Isn::Kernel,
        "a raw socket has no ISN of the kernel's"
    );
    let sender = RawSender::new(config.to.ip()).context("opening a raw socket")?;
    let isns = IsnSource::new(config.isn);
    let mut random = Random::new();
    let mut report = RawSynReport {
        pid: std::process::id(),
        ..RawSynReport::default()
    };
    let mut ports = HashSet::new();
    let pace = Pace::new(config.rate, LONGEST);
    for index in 0..config.count {
        if !pace.reach(index) {
            break;
        }
        let port = match config.source_port {
            SourcePort::Fixed(port) => port,
            SourcePort::Random => random.port(),
        };
        let source = if config.random_sources {
            scatter(config.from, random.next())
        } else {
            config.from
        };
        let to_port = config
            .scan
            .map_or(config.to.port(), |range| range.at(index));
        let to = SocketAddr::new(config.to.ip(), to_port);
        let isn = isns.next().unwrap_or_else(|| random.next());
        match sender.send(&syn(SocketAddr::new(source, port), to, isn), to.ip()) {
            Ok(()) => report.sent += 1,
            Err(_) => report.failed += 1,
        }
        ports.insert(port);
    }
    report.source_ports = ports.len() as u64;
    report.seconds = pace.start.elapsed().as_secs_f64();
    Ok(report)
}

/// The address with its low 16 bits replaced.
fn scatter(address: IpAddr, random: u32) -> IpAddr {
    match address {
        IpAddr::V4(address) => IpAddr::V4((u32::from(address) & !0xffff | random & 0xffff).into()),
        IpAddr::V6(address) => {
            IpAddr::V6((u128::from(address) & !0xffff | u128::from(random & 0xffff)).into())
        }
    }
}
