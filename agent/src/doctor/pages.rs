//! Where the pages of the agent are to be: free, taken, or served by an agent that runs.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    time::Duration,
};

use serde_json::Value;

use super::check::{Check, Level};
use crate::sink::http::{DEFAULT_ADDRESS, Listen};

/// Who is there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Place {
    /// Nobody: the address can be had.
    Free,
    /// An agent that runs.
    Agent(Running),
    /// Some other program.
    Taken,
    /// It cannot be had for another reason.
    Refused(String),
}

/// What an agent that runs says of itself on `/status`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Running {
    /// Its version.
    pub version: String,
    /// Its process id, as it sees it itself.
    pub pid: u64,
    /// When it was started, RFC 3339.
    pub started: String,
    /// Hooks that are not `ok`, with their detail.
    pub broken: Vec<String>,
    /// What could not be counted or kept: name, meaning and count.
    pub losses: Vec<(String, String, u64)>,
}

/// How long an agent may take to answer; its own patience is three seconds.
const LIMIT: Duration = Duration::from_secs(4);

/// Where the pages are wanted.
const fn address(listen: Listen) -> Option<SocketAddr> {
    match listen {
        Listen::Off => None,
        Listen::Default => Some(DEFAULT_ADDRESS),
        Listen::At(address) => Some(address),
    }
}

/// Looks who is where the pages are to be; `None` if there are to be none.
#[must_use]
pub fn look(listen: Listen) -> Option<Place> {
    let address = address(listen)?;
    Some(match TcpListener::bind(address) {
        Ok(_) => Place::Free,
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            ask(address).map_or(Place::Taken, Place::Agent)
        }
        Err(error) => Place::Refused(error.to_string()),
    })
}

/// Asks for `/status`; `None` if that is not what is served there.
fn ask(mut address: SocketAddr) -> Option<Running> {
    if address.ip().is_unspecified() {
        address.set_ip(match address.ip() {
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    // The TLS library asks for a choice, also where none is spoken; whoever chose first is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = reqwest::blocking::Client::builder()
        .timeout(LIMIT)
        .no_proxy()
        .build()
        .ok()?;
    let answer = client.get(format!("http://{address}/status")).send().ok()?;
    // Its first words; a program that sends for ever is none of ours.
    let mut text = String::new();
    io::Read::read_to_string(&mut io::Read::take(answer, 16 << 20), &mut text).ok()?;
    understand(&serde_json::from_str(&text).ok()?)
}

/// Reads what docs/status.md describes.
fn understand(status: &Value) -> Option<Running> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    status["schema"].as_u64()?;
    let hooks = status["hooks"].as_array()?.iter();
    let broken = hooks.filter(|h| h["state"] != "ok").filter_map(|h| {
        let (name, state, detail) = (text(&h["name"])?, text(&h["state"])?, text(&h["detail"])?);
        Some(format!("{name} is {state}: {detail}"))
    });
    let losses = status["losses"].as_array()?.iter();
    let losses = losses.filter_map(|l| {
        let count = l["count"].as_u64().filter(|count| *count > 0)?;
        Some((text(&l["name"])?, text(&l["meaning"])?, count))
    });
    Some(Running {
        version: text(&status["version"])?,
        pid: status["pid"].as_u64()?,
        started: text(&status["started"])?,
        broken: broken.collect(),
        losses: losses.collect(),
    })
}

/// What is to be said of it.
#[must_use]
pub fn judge(listen: Listen, place: Option<&Place>) -> Vec<Check> {
    let (Some(address), Some(place)) = (address(listen), place) else {
        let agent = Check::ok("agent", "whether one runs is not known: the pages are off");
        return vec![
            Check::ok("http", "no pages are served (`http.listen` is off)"),
            agent,
        ];
    };
    let running = match place {
        Place::Agent(running) => running,
        Place::Free => {
            let agent = Check::ok("agent", format!("none answers on {address}"));
            return vec![Check::ok("http", format!("{address} is free")), agent];
        }
        Place::Taken => {
            return unavailable(listen, format!("another program listens on {address}"));
        }
        Place::Refused(why) => return unavailable(listen, format!("{address}: {why}")),
    };
    let Running {
        version,
        pid,
        started,
        ..
    } = running;
    let found = format!("tuplewatch {version} (process {pid}, since {started}) serves {address}");
    let mut checks = vec![Check::ok("http", found)];
    checks.extend(running.broken.iter().map(|hook| {
        let lost = "the agent that runs does without it";
        let remedy = "see the check of this hook here; restart the agent if it works now";
        Check::bad(Level::Warn, "agent", hook, lost, remedy)
    }));
    checks.extend(running.losses.iter().map(|(name, meaning, count)| {
        let remedy = if name == "events_lost" {
            "a larger ring buffer (`ring_buffer`, --ring-buffer)"
        } else if name.ends_with("_full") || name.ends_with("_evicted") {
            "more memory for the maps (`map_memory`, --map-memory)"
        } else {
            "docs/metrics.md says what the counter means"
        };
        let found = format!("{name}: {count} since its start");
        Check::bad(Level::Warn, "agent", found, meaning, remedy).of(name)
    }));
    if checks.len() == 1 {
        let found = "it runs, every hook works, and it has lost nothing since its start";
        checks.push(Check::ok("agent", found));
    }
    checks
}

/// Nobody asked for the default address: the agent runs on without pages then.
fn unavailable(listen: Listen, found: String) -> Vec<Check> {
    let remedy = "--http (`http.listen`) chooses another address, --no-http none";
    let http = if listen == Listen::Default {
        let lost = "/metrics, /status and /healthz are not served";
        Check::bad(Level::Warn, "http", found, lost, remedy)
    } else {
        let lost = "the agent does not start (exit code 78)";
        Check::bad(Level::Fail, "http", found, lost, remedy)
    };
    let agent = "whether one runs is not known: none has its pages here";
    vec![http, Check::ok("agent", agent)]
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use super::*;

    fn running() -> Running {
        Running {
            version: "0.1.0".to_owned(),
            pid: 4711,
            started: "2025-11-29T09:12:44.002Z".to_owned(),
            broken: Vec::new(),
            losses: Vec::new(),
        }
    }

    fn levels(listen: Listen, place: &Place) -> Vec<(&'static str, Level)> {
        let checks = judge(listen, Some(place)).into_iter();
        checks.map(|c| (c.name, c.level)).collect()
    }

    #[test]
    fn a_free_address_and_an_agent_are_fine() {
        let fine = [("http", Level::Ok), ("agent", Level::Ok)];
        assert_eq!(levels(Listen::Default, &Place::Free), fine);
        assert_eq!(levels(Listen::Default, &Place::Agent(running())), fine);
        let off: Vec<_> = judge(Listen::Off, None).iter().map(|c| c.level).collect();
        assert_eq!(off, [Level::Ok, Level::Ok]);
    }

    #[test]
    fn another_program_warns_or_fails_where_the_address_was_asked_for() {
        let at = Listen::At(DEFAULT_ADDRESS);
        for place in [Place::Taken, Place::Refused("no".to_owned())] {
            assert_eq!(levels(Listen::Default, &place)[0], ("http", Level::Warn));
            assert_eq!(levels(at, &place)[0], ("http", Level::Fail));
        }
    }

    /// The example in the documentation is what an agent serves; another test keeps it in step.
    #[test]
    fn the_documented_status_is_understood() {
        let doc = include_str!("../../../docs/status.md");
        let example = doc.split("```json\n").nth(1).unwrap();
        let example = example.split("```").next().unwrap();
        let found = understand(&serde_json::from_str(example).unwrap()).unwrap();
        let lost: Vec<_> = found
            .losses
            .iter()
            .map(|(n, _, c)| (n.as_str(), *c))
            .collect();
        assert_eq!(lost, [("events_lost", 17)]);
        assert_eq!(found.broken.len(), 1);
        assert!(found.broken[0].starts_with("retransmit is off: "));
        let checks = judge(Listen::Default, Some(&Place::Agent(found)));
        let warned: Vec<_> = checks.iter().filter(|c| c.level == Level::Warn).collect();
        assert_eq!(warned.len(), 2);
        let remedy = warned[1].remedy.as_deref().unwrap();
        assert!(remedy.contains("ring_buffer"), "{remedy}");
    }

    #[test]
    fn an_address_that_somebody_else_has_is_found_taken() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 512]);
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}");
        });
        assert_eq!(look(Listen::At(address)), Some(Place::Taken));
        server.join().unwrap();
        assert_eq!(look(Listen::At(address)), Some(Place::Free));
        let elsewhere = Listen::At("192.0.2.1:9464".parse().unwrap());
        assert!(matches!(look(elsewhere), Some(Place::Refused(_))));
        assert_eq!(look(Listen::Off), None);
    }
}
