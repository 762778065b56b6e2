use std::{
    collections::BTreeSet,
    net::SocketAddr,
    sync::atomic::{AtomicUsize, Ordering},
};

use serde_json::Value;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinHandle,
    time::sleep,
};
use tuplewatch_common::record::Global;

use super::{server::Limits, *};
use crate::{
    core::mute::Muted,
    sink::{fixture, metrics, metrics::Delivery},
};

const STATUS_DOC: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/status.md"));
const JSON_DOC: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/json.md"));

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

fn start() -> Arc<Pages> {
    let about = About {
        version: "0.1.0",
        configuration: Configuration::new(Some("/etc/tuplewatch/config.yaml".into()), "abc"),
        deliveries: Some(Deliveries::default()),
    };
    Arc::new(Pages::start(ANY, WallClock::capture(), about).unwrap())
}

/// A loop that shows the example whenever somebody asks, and how often it did.
fn looking(pages: &Arc<Pages>) -> (JoinHandle<()>, Arc<AtomicUsize>) {
    let (pages, times) = (Arc::clone(pages), Arc::new(AtomicUsize::new(0)));
    let counted = Arc::clone(&times);
    let task = tokio::spawn(async move {
        loop {
            pages.asked().await;
            counted.fetch_add(1, Ordering::Relaxed);
            pages.show(fixture::ready(), fixture::overview());
        }
    });
    (task, times)
}

/// Status code, headers and body.
async fn request(address: SocketAddr, line: &str) -> (u16, String, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("{line} HTTP/1.1\r\nHost: x\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    // The server closes after one answer.
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let code = head.split(' ').nth(1).unwrap().parse().unwrap();
    (code, head.to_lowercase(), body.to_owned())
}

async fn get(pages: &Pages, path: &str) -> (u16, String, String) {
    request(pages.address(), &format!("GET {path}")).await
}

#[tokio::test]
async fn before_the_first_look_every_page_says_so() {
    let pages = start();
    for path in ["/healthz", "/metrics", "/status"] {
        let (code, _, body) = get(&pages, path).await;
        assert_eq!(code, 503, "{path}");
        assert!(body.contains("starting"), "{path}: {body}");
    }
}

#[tokio::test]
async fn pages_tell_the_state_of_the_latest_look() {
    let pages = start();
    let (_task, _) = looking(&pages);
    pages.looked();
    let (code, head, body) = get(&pages, "/healthz").await;
    assert_eq!((code, body.as_str()), (200, "ok\n"));
    assert!(head.contains("connection: close") && head.contains("cache-control: no-store"));
    let (code, head, body) = get(&pages, "/metrics").await;
    assert_eq!(code, 200);
    assert!(
        head.contains(&format!("content-type: {}", metrics::CONTENT_TYPE)),
        "{head}"
    );
    assert!(body.starts_with("# HELP target_info "), "{body}");
    assert!(body.contains("tuplewatch_build_info{tuplewatch_version=\"0.1.0\"} 1\n"));
    assert!(body.contains("service_name=\"tuplewatch\""));
    let (code, head, body) = get(&pages, "/status?pretty").await;
    assert_eq!(code, 200);
    assert!(head.contains("content-type: application/json"), "{head}");
    let status: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(status["healthy"], true);
    assert_eq!(status["alerts"][0]["id"], fixture::alert().id);
}

#[tokio::test]
async fn what_is_not_there_is_refused_politely() {
    let pages = start();
    let (code, _, body) = get(&pages, "/").await;
    assert_eq!(code, 200);
    assert!(body.contains("/status"));
    let (code, _, body) = get(&pages, "/etc/passwd").await;
    assert_eq!(code, 404);
    assert!(body.contains("/status"), "the way back");
    let (code, head, _) = request(pages.address(), "POST /status").await;
    assert_eq!(code, 405);
    assert!(head.contains("allow: get, head"), "{head}");
    let (code, _, body) = request(pages.address(), "HEAD /").await;
    assert_eq!((code, body.as_str()), (200, ""));
    let long = "x".repeat(20_000);
    let (code, ..) = get(&pages, &format!("/{long}")).await;
    assert!((400..500).contains(&code), "{code}");
}

#[tokio::test]
async fn the_loop_shows_its_state_once_per_look() {
    let pages = start();
    let (_task, times) = looking(&pages);
    for look in 1..=3 {
        pages.looked();
        let requests: Vec<_> = (0..12)
            .map(|i| {
                let pages = Arc::clone(&pages);
                let path = ["/status", "/metrics"][i % 2];
                tokio::spawn(async move { get(&pages, path).await.0 })
            })
            .collect();
        for request in requests {
            assert_eq!(request.await.unwrap(), 200);
        }
        assert_eq!(times.load(Ordering::Relaxed), look);
    }
}

#[tokio::test]
async fn nothing_is_shown_that_nobody_wants() {
    let pages = start();
    let (_task, times) = looking(&pages);
    for _ in 0..5 {
        pages.looked();
        assert_eq!(get(&pages, "/healthz").await.0, 200);
    }
    assert_eq!(times.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_loop_that_does_not_answer_is_told() {
    let pages = start();
    let (task, _) = looking(&pages);
    pages.looked();
    assert_eq!(get(&pages, "/status").await.0, 200);
    task.abort();
    pages.looked();
    let ((code, _, body), (status, _, _)) =
        tokio::join!(get(&pages, "/metrics"), get(&pages, "/status"));
    assert_eq!(code, 503);
    assert!(body.contains("busy"), "{body}");
    assert_eq!(
        status, 200,
        "an old state with its time is better than none"
    );
}

#[test]
fn health_depends_on_the_last_look_alone() {
    assert!(health(None).unwrap_err().contains("starting"));
    assert!(health(Some(Duration::from_secs(9))).is_ok());
    let reason = health(Some(Duration::from_secs(12))).unwrap_err();
    assert!(reason.contains("12 s ago"), "{reason}");
}

/// Clients that send nothing take all places, but not for long.
#[tokio::test]
async fn slow_clients_are_cut_off() {
    let pages = start();
    let listener = tokio::net::TcpListener::bind(ANY).await.unwrap();
    let address = listener.local_addr().unwrap();
    let limits = Limits {
        connections: 4,
        longest: Duration::from_millis(300),
    };
    tokio::spawn(server::serve(listener, Arc::clone(&pages.shared), limits));
    let mut slow = Vec::new();
    for _ in 0..limits.connections {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream
            .write_all(b"GET /healthz HTTP/1.1\r\nX-Slow: ")
            .await
            .unwrap();
        slow.push(stream);
    }
    sleep(Duration::from_millis(50)).await;
    let begun = Instant::now();
    let (code, ..) = request(address, "GET /").await;
    assert_eq!(code, 200);
    let waited = begun.elapsed();
    assert!(
        waited >= Duration::from_millis(150),
        "no place was free: {waited:?}"
    );
    for mut stream in slow {
        let mut rest = Vec::new();
        let read = stream.read_to_end(&mut rest).await;
        assert!(read.is_err() || rest.is_empty(), "{rest:?}");
    }
}

#[tokio::test]
async fn an_address_that_is_taken_is_named() {
    let pages = start();
    let about = About {
        version: "",
        configuration: Configuration::default(),
        deliveries: None,
    };
    let error = Pages::start(pages.address(), WallClock::capture(), about).unwrap_err();
    let text = error.to_string();
    assert!(text.contains(&pages.address().to_string()), "{text}");
    assert!(text.contains("in use"), "{text}");
}

#[test]
fn addresses_are_read() {
    let at = |text: &str| Ok(Listen::At(text.parse().unwrap()));
    assert_eq!("off".parse(), Ok(Listen::Off));
    assert_eq!("9465".parse(), at("127.0.0.1:9465"));
    assert_eq!("0.0.0.0:80".parse(), at("0.0.0.0:80"));
    assert_eq!("[::1]:9464".parse(), at("[::1]:9464"));
    for wrong in ["", "localhost:9464", "127.0.0.1", ":9464", "70000"] {
        let error = wrong.parse::<Listen>().unwrap_err();
        assert!(error.contains("127.0.0.1:9464"), "{error}");
    }
    for listen in [Listen::Off, Listen::At(ANY)] {
        assert_eq!(listen.to_string().parse(), Ok(listen));
    }
    assert_eq!(Listen::default().to_string(), "127.0.0.1:9464");
}

#[test]
fn the_text_follows_the_looks_and_never_goes_back() {
    let shown = |look, opens| {
        let mut overview = fixture::overview();
        overview.spaces[0].totals.opens = opens;
        Shown {
            look,
            ready: fixture::ready(),
            overview,
        }
    };
    let mut exposition = Exposition::default();
    let mut opens = |shown: &Shown| {
        let text = exposition.of(shown, Delivery::default(), Vec::new);
        let text = String::from_utf8(text.to_vec()).unwrap();
        let line = text
            .lines()
            .find(|line| line.starts_with("tuplewatch_opens_total{") && line.contains("\"wire\""));
        line.unwrap().rsplit(' ').next().unwrap().to_owned()
    };
    let (first, second) = (shown(1, 5210), shown(2, 5300));
    assert_eq!(opens(&first), "5210");
    assert_eq!(opens(&second), "5300");
    assert_eq!(opens(&first), "5300", "the request was overtaken");
}

/// The page after one look that left `overview`.
async fn page(overview: Overview) -> String {
    let pages = start();
    pages.looked();
    let shown = Shown {
        look: 1,
        ready: fixture::ready(),
        overview,
    };
    let page = status::page(&pages.shared, &shown).unwrap();
    String::from_utf8(page.to_vec()).unwrap()
}

async fn status(overview: Overview) -> Value {
    serde_json::from_str(&page(overview).await).unwrap()
}

/// First column of the tables in a section of a document.
fn documented(document: &str, section: &str) -> BTreeSet<String> {
    let mut sections = document.split("\n## ");
    let section = sections.find(|text| text.starts_with(&format!("`{section}`")));
    let rows = section.unwrap_or_default().lines();
    let rows = rows.filter_map(|line| line.strip_prefix("| `"));
    rows.map(|row| row.split('`').next().unwrap().to_owned())
        .collect()
}

#[tokio::test]
async fn documentation_and_page_name_the_same_fields() {
    let mut overview = fixture::overview();
    overview.muted = vec![fixture::alert()];
    overview.muted[0].muted = Some(Muted {
        reason: "load test".into(),
        until: Some(fixture::NOW),
    });
    let mut written = BTreeSet::new();
    fixture::paths(&status(overview).await, "", &mut written);
    // What has the shape of a JSON line, or of a part of one, is described there.
    for (ours, section, theirs) in [
        ("alerts[].", "alert", ""),
        ("muted[].", "alert", ""),
        ("look_alikes[].", "look_alike", ""),
        ("spaces[].", "summary", "spaces[]."),
        ("other.", "summary", "other."),
        ("hooks[].", "ready", "hooks[]."),
        ("unseen[].", "ready", "unseen[]."),
    ] {
        let described = documented(JSON_DOC, section);
        let is_here = |path: &String| path.starts_with(ours) && !path.starts_with("muted[].muted");
        let here: Vec<_> = written.extract_if(.., |path| is_here(path)).collect();
        assert!(!here.is_empty(), "{ours}");
        for path in here {
            let path = path.replacen(ours, theirs, 1);
            assert!(
                path == "time" || described.contains(&path),
                "docs/json.md has no {path} in `{section}`"
            );
        }
    }
    let documented = documented(STATUS_DOC, "/status");
    let missing: Vec<_> = written.difference(&documented).collect();
    let stale: Vec<_> = documented.difference(&written).collect();
    assert!(missing.is_empty(), "docs/status.md lacks {missing:?}");
    assert!(
        stale.is_empty(),
        "docs/status.md has {stale:?}, /status does not"
    );
}

#[tokio::test]
async fn status_doc() {
    let quiet = Overview {
        alerts: Vec::new(),
        look_alikes: Vec::new(),
        egress: Vec::new(),
        spaces: Vec::new(),
        ..fixture::overview()
    };
    let mut example = String::new();
    for line in page(quiet).await.lines() {
        // What differs from run to run.
        let line = match line.trim_start().split(':').next() {
            Some("\"pid\"") => "  \"pid\": 4711,",
            Some("\"started\"") => "  \"started\": \"2025-11-29T09:12:44.002Z\",",
            Some("\"uptime_seconds\"") => "  \"uptime_seconds\": 4641,",
            _ => line,
        };
        example.push_str(line);
        example.push('\n');
    }
    let (before, rest) = STATUS_DOC.split_once("```json\n").unwrap();
    let (shown, after) = rest.split_once("```").unwrap();
    if std::env::var_os("TUPLEWATCH_BLESS").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/status.md");
        std::fs::write(path, format!("{before}```json\n{example}```{after}")).unwrap();
        return;
    }
    assert!(
        shown == example,
        "the example in docs/status.md is not what is served; write it anew with\n    \
         TUPLEWATCH_BLESS=1 cargo test -p tuplewatch status_doc"
    );
}

/// FIPS 180-2, example B.1.
#[test]
fn the_digest_is_the_one_of_sha256sum() {
    let digest = Configuration::new(None, "abc").digest;
    assert!(digest.starts_with("ba7816bf8f01cfea"), "{digest}");
    assert!(digest.ends_with("b410ff61f20015ad"), "{digest}");
}

#[tokio::test]
async fn every_loss_is_there_also_without_any() {
    let page = status(fixture::overview()).await;
    let told: Vec<_> = page["losses"].as_array().unwrap().iter().collect();
    let losses = (0..Global::NAMES.len()).filter(|i| Global::is_loss(*i));
    let names: Vec<_> = losses.map(|i| Global::NAMES[i].0).collect();
    assert_eq!(
        told.iter()
            .map(|l| l["name"].as_str().unwrap())
            .collect::<Vec<_>>(),
        names
    );
    let events = told.iter().find(|l| l["name"] == "events_lost").unwrap();
    assert_eq!(events["count"], 17);
    let others = page["unassigned"].as_array().unwrap();
    let fragments = others.iter().find(|l| l["name"] == "fragments").unwrap();
    assert_eq!(fragments["count"], 5);
    assert_eq!(told.len() + others.len(), Global::NAMES.len());
}
