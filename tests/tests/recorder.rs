//! The flight recorder: an alert that fires leaves its packets as a file, which a replay gives the same
//! verdict, and the directory stays within its bound.

#[path = "http/page.rs"]
#[allow(dead_code, reason = "only /status is asked for here")]
mod page;
mod support;

use std::{
    fs,
    net::{Ipv4Addr, SocketAddrV4, TcpListener},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use etherparse::{LaxSlicedPacket, PacketBuilder, PacketBuilderStep, TcpHeader, TransportSlice};
use page::{DEFAULT, Page};
use serde_json::Value;
use support::{SECOND, firing, number, watch};
use tuplewatch_tests::prelude::*;

/// Connections per second of each of the two clients.
const RATE: f64 = 20.0;
const TIME: Duration = Duration::from_secs(12);
/// Bytes kept of a packet at most.
const SNAP_LEN: usize = 104;

/// Enhanced packet blocks of a pcapng file of one section, little endian: the link type and the bytes of
/// each packet.
fn packets(file: &[u8]) -> Vec<(u16, Vec<u8>)> {
    let word = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().expect("4 bytes"));
    let (mut at, mut links, mut packets) = (0, Vec::new(), Vec::new());
    while at < file.len() {
        let (kind, length) = (word(at), word(at + 4) as usize);
        assert_eq!(word(at + length - 4) as usize, length, "both lengths");
        match kind {
            1 => links.push(word(at + 8) as u16),
            6 => {
                let link = links[word(at + 8) as usize];
                let captured = word(at + 20) as usize;
                packets.push((link, file[at + 28..at + 28 + captured].to_vec()));
            }
            // When the capture ended.
            5 => {}
            _ => assert_eq!((kind, at), (0x0a0d_0d0a, 0), "one section"),
        }
        at += length;
    }
    packets
}

/// By another parser: TCP headers, and not a byte behind them.
fn headers_only(file: &[u8], link: u16) -> usize {
    let packets = packets(file);
    for (of, bytes) in &packets {
        assert_eq!(*of, link);
        assert!(bytes.len() <= SNAP_LEN, "{} bytes", bytes.len());
        let packet = match link {
            1 => LaxSlicedPacket::from_ethernet(bytes).expect("Ethernet"),
            _ => LaxSlicedPacket::from_ip(bytes).expect("IP"),
        };
        let Some(TransportSlice::Tcp(tcp)) = packet.transport else {
            panic!("not TCP: {bytes:02x?}");
        };
        assert_eq!(tcp.payload(), b"", "payload");
        assert!(
            tcp.syn() || tcp.fin() || tcp.rst() || tcp.ack() && !tcp.psh(),
            "{tcp:?}"
        );
    }
    packets.len()
}

/// What `tuplewatch replay` says of a file, and its exit code.
fn replay(binary: &Path, file: &Path) -> Result<(Option<i32>, Vec<Value>)> {
    let output = Command::new(binary)
        .args(["replay", "--format", "json"])
        .arg(file)
        .output()?;
    print!("{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout)?;
    let lines = lines
        .lines()
        .map(|l| serde_json::from_str(l).context("a line"));
    Ok((output.status.code(), lines.collect::<Result<_>>()?))
}

fn file_of(alert: &Value) -> Result<PathBuf> {
    let path = alert["evidence_file"].as_str();
    Ok(path.with_context(|| format!("no file: {alert}"))?.into())
}

fn binary(agent: &Agent) -> Result<PathBuf> {
    Ok(fs::read_link(format!("/proc/{}/exe", agent.pid()))?)
}

#[test]
fn an_alert_leaves_the_packets_behind_it() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let own = |name: &str| directory.path().join(name);
    // At the server there are files already: one that is too much, and one of somebody else.
    let at_server = own("server");
    fs::create_dir(&at_server)?;
    let old = at_server.join("20200101T000000.000Z-old.pcapng");
    let foreign = at_server.join("notes.pcapng");
    for path in [&old, &foreign] {
        fs::write(path, vec![0; 1 << 20])?;
    }
    let incident = Incident::new(IncidentConfig::default())?;
    let hosts = [&incident.server, &incident.clients[0]];
    let names = ["server", "client"];
    let agents = (0..2)
        .map(|i| {
            let path = own(names[i]);
            let path = path.to_str().context("a path")?;
            watch(
                hosts[i],
                &["--recorder-dir", path, "--recorder-size", "1MiB"],
            )
        })
        .collect::<Result<Vec<_>>>()?;
    // Without the flag nothing is recorded.
    let off = watch(&incident.clients[1], &[])?;
    assert!(old.exists(), "it is within the bound");
    let _server = incident.serve()?;
    let loads = incident.load(RATE, TIME)?;
    for (i, agent) in agents.iter().enumerate() {
        let alert = agent.wait_alert(40 * SECOND, firing)?;
        let path = file_of(&alert)?;
        println!("{}: {}", names[i], path.display());
        assert_eq!(path.parent(), Some(&*own(names[i])));
        assert_eq!(fs::metadata(&path)?.permissions().mode() & 0o777, 0o600);
        let file = fs::read(&path)?;
        let count = headers_only(&file, 1);
        println!("{count} packets, {} bytes", file.len());
        assert!(file.len() <= 1 << 20);
        let text = String::from_utf8_lossy(&file);
        let mut parts = vec![
            alert["id"].as_str().context("an id")?,
            "bare ACK instead of a SYN-ACK",
        ];
        if names[i] == "server" {
            // The client does not see which ports the NAT gives out.
            parts.extend([
                "the former connection on this port was closed",
                "closes the former connection, on whose ports a SYN comes later",
            ]);
        }
        for part in parts {
            assert!(text.contains(part), "no {part:?}");
        }
        assert!(!text.contains("HTTP/1.1") && !text.contains("GET /"));
        let (code, lines) = replay(&binary(agent)?, &path)?;
        assert_eq!(code, Some(3), "{lines:#?}");
        // The file tells until when it reaches: the alert fires there too.
        let again = lines.iter().rfind(|line| firing(line));
        assert_eq!(again.context("the verdict")?["id"], alert["id"]);
        let shown = |line: &&Value| {
            line["type"] == "evidence"
                && line["reading"]
                    .as_str()
                    .is_some_and(|r| r.starts_with("bare ACK"))
        };
        assert!(lines.iter().any(|line| shown(&line)));
    }
    assert!(!old.exists(), "the oldest makes room");
    assert!(foreign.exists(), "other people's files stay");
    let status = Page::get(hosts[0], DEFAULT, "/status")?.json()?;
    let recorder = &status["recorder"];
    assert_eq!(recorder["directory"], at_server.to_str().context("a path")?);
    assert_eq!(number(recorder, "files"), 1);
    assert_eq!(
        (number(recorder, "written"), number(recorder, "failed")),
        (1, 0)
    );
    assert!(number(recorder, "bytes") > 0 && number(recorder, "recorded_packets") > 100);
    assert_eq!(status["alerts"][0]["evidence_file"], {
        let alert = agents[0].wait_alert(SECOND, firing)?;
        alert["evidence_file"].clone()
    });
    let alert = off.wait_alert(40 * SECOND, firing)?;
    assert_eq!(alert["evidence_file"], Value::Null);
    let status = Page::get(&incident.clients[1], DEFAULT, "/status")?.json()?;
    assert_eq!(status["recorder"], Value::Null);
    for load in loads {
        load.wait()?;
    }
    Ok(())
}

#[test]
fn a_directory_that_cannot_be_used_is_a_wrong_setting() -> Result<()> {
    let pair = Pair::new(PairConfig::default())?;
    let agent = pair.server.agent(AgentConfig::with_args([
        "--recorder-dir",
        "/proc/tuplewatch",
    ]))?;
    let status = agent.process().wait(30 * SECOND)?;
    let said = agent.stderr().join("\n");
    assert_eq!(status.code(), Some(78), "{said}");
    assert!(
        said.contains("/proc/tuplewatch") && said.contains("--recorder-dir"),
        "{said}"
    );
    Ok(())
}

/// The far end of a TUN device: opens connections to the host and forgets them.
struct FarEnd {
    tun: Tun,
    own: Ipv4Addr,
    host: SocketAddrV4,
}

impl FarEnd {
    fn send(&mut self, port: u16, seq: u32, flags: impl Fn(Builder) -> Builder) -> Result<()> {
        let (from, to) = (self.own.octets(), self.host.ip().octets());
        let ip = PacketBuilder::ipv4(from, to, 64);
        let builder = flags(ip.tcp(port, self.host.port(), seq, 65_535));
        let mut packet = Vec::new();
        builder.write(&mut packet, &[])?;
        self.tun.send(&packet)
    }

    /// Answers a SYN-ACK by an ACK and a bare ACK by a RST, until so many of them came.
    fn answer(&mut self, count: usize) -> Result<()> {
        let (mut syn_acks, mut bare_acks) = (0, 0);
        let end = Instant::now() + 10 * SECOND;
        while syn_acks + bare_acks < count {
            ensure!(
                Instant::now() < end,
                "{syn_acks} and {bare_acks} of {count}"
            );
            let Some(packet) = self.tun.receive()? else {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            };
            let Ok(LaxSlicedPacket {
                transport: Some(TransportSlice::Tcp(tcp)),
                ..
            }) = LaxSlicedPacket::from_ip(&packet)
            else {
                continue;
            };
            let (port, ack) = (tcp.destination_port(), tcp.acknowledgment_number());
            let next = tcp.sequence_number().wrapping_add(1);
            if tcp.syn() {
                syn_acks += 1;
                self.send(port, ack, |tcp| tcp.ack(next))?;
            } else if tcp.ack() && tcp.payload().is_empty() {
                bare_acks += 1;
                self.send(port, ack, Builder::rst)?;
            }
        }
        Ok(())
    }
}

type Builder = PacketBuilderStep<TcpHeader>;

/// On an interface without Ethernet header the files are of raw IP.
#[test]
fn packets_without_ethernet_header() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let path = directory.path().to_str().context("a path")?;
    let pair = Pair::new(PairConfig::default())?;
    let service = SocketAddrV4::new(Ipv4Addr::new(10, 99, 0, 1), 8080);
    let host = &pair.server;
    let tun = host.tun("tun0", *service.ip())?;
    let _listener = host.in_ns(|| TcpListener::bind(service))??;
    let agent = watch(host, &["--recorder-dir", path])?;
    let mut far = FarEnd {
        tun,
        own: Ipv4Addr::new(10, 99, 0, 2),
        host: service,
    };
    let ports = 40_000..40_012u16;
    for isn in [1000, 5_000_000] {
        for port in ports.clone() {
            // A number of its own: the same on another port is a SYN that has moved.
            far.send(port, isn + u32::from(port) * 1000, Builder::syn)?;
        }
        far.answer(ports.len())?;
        std::thread::sleep(SECOND);
    }
    let is_collision = |alert: &Value| alert["cause"] == "tuple_collision";
    let alert = agent.wait_alert(30 * SECOND, |a| is_collision(a) && a["state"] == "firing")?;
    let path = file_of(&alert)?;
    let count = headers_only(&fs::read(&path)?, 101);
    println!("{count} packets: {}", alert["summary"]);
    assert_eq!(
        count,
        6 * ports.len(),
        "SYN, SYN-ACK, ACK; SYN, bare ACK; RST"
    );
    // How long the connections had been idle tells a collision from a reconnect, and only their sockets
    // know that: a replay sees the bare ACKs and names the look-alike.
    let (code, lines) = replay(&binary(&agent)?, &path)?;
    assert_eq!(code, Some(0), "{lines:#?}");
    let named = |line: &&Value| line["type"] == "look_alike";
    let look_alike = lines.iter().find(named).context("a look-alike")?;
    assert_eq!(look_alike["name"], "half_open_reconnect");
    assert_eq!(
        number(&look_alike["evidence"], "refused_while_open"),
        ports.len() as u64
    );
    Ok(())
}
