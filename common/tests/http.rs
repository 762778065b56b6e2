//! The reader of HTTP/1 against what the standards write, against a plain reference and against arbitrary
//! bytes.

use proptest::{collection::vec, prelude::*};
use tuplewatch_common::http::{
    HEAD, LINE, Message, PEEK, is_failure, is_interim, is_success, kind, message, page, words,
};

fn kind_of(line: &str) -> u32 {
    match message(line.as_bytes()) {
        Some(Message::Request { kind }) => kind,
        other => panic!("{line}: {other:?}"),
    }
}

fn get(path: &str) -> u32 {
    kind_of(&format!("GET {path} HTTP/1.1\r\nHost: example\r\n"))
}

fn status_of(line: &str) -> Option<u16> {
    match message(line.as_bytes()) {
        Some(Message::Response { status }) => Some(status),
        Some(other) => panic!("{line}: {other:?}"),
        None => None,
    }
}

#[test]
fn status_lines_of_the_standard() {
    for (line, status) in [
        ("HTTP/1.1 200 OK\r\n\r\n", Some(200)),
        ("HTTP/1.0 503 Service Unavailable\r\n", Some(503)),
        ("HTTP/1.1 100 Continue\r\n\r\n", Some(100)),
        ("HTTP/1.1 599\r\nServer: x\r\n", Some(599)),
        ("HTTP/1.1 404 \r\nServer: x\r\n", Some(404)),
        ("HTTP/1.1 099 x\r\nServer: x\r\n", None),
        ("HTTP/1.1 600 x\r\nServer: x\r\n", None),
        ("HTTP/1.1 2000 x\r\nServer: x\r\n", None),
        ("HTTP/1.1 2 0 x\r\nServer: x\r\n", None),
        ("HTTP/1.2 200 OK\r\nServer: x\r\n", None),
        ("HTTP/2.0 200 OK\r\nServer: x\r\n", None),
        ("HTTP/1.1  200 OK\r\nServer: x", None),
        ("HTTP/1.1 503 U", None),
        ("ICY 200 OK\r\nicy-notice1: x", None),
    ] {
        assert_eq!(status_of(line), status, "{line:?}");
    }
}

#[test]
fn classes_of_statuses() {
    assert!(is_interim(100) && is_interim(103) && !is_interim(101) && !is_interim(200));
    assert!(is_success(204) && is_success(304) && is_success(101) && !is_success(404));
    assert!(is_failure(500) && is_failure(599) && !is_failure(499));
}

#[test]
fn every_method_is_a_request_of_its_own_kind() {
    let methods = [
        "GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE",
    ];
    let kinds: std::collections::BTreeSet<u32> = methods
        .iter()
        .map(|method| kind_of(&format!("{method} /orders HTTP/1.1\r\nHost: a\r\n")))
        .collect();
    assert_eq!(kinds.len(), methods.len());
    for other in [
        "get /orders HTTP/1.1\r\n",
        "BREW /coffee HTCPCP/1.0\r\n",
        "GETS /orders HTTP/1.1\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "*3\r\n$3\r\nSET\r\n$1\r\na\r\n",
    ] {
        assert_eq!(message(other.as_bytes()), None, "{other:?}");
    }
}

#[test]
fn a_kind_is_the_path_up_to_the_first_number_without_the_query() {
    let same = [
        ("/api/v1/orders/6051", "/api/v1/orders/500122"),
        ("/api/v1/orders/6051", "/api/v1/orders/1/items?page=2"),
        ("/search?q=a", "/search?q=b"),
        ("/search", "/search?q=b"),
        ("/a/0a1b-22", "/a/9f"),
    ];
    for (a, b) in same {
        assert_eq!(get(a), get(b), "{a} {b}");
    }
    let different = [
        ("/api/v1/orders", "/api/v2/orders"),
        ("/api/v1/orders", "/api/v1/users"),
        ("/", "/ready"),
        ("/search", "/searches"),
        ("/a/b", "/a/b/"),
    ];
    for (a, b) in different {
        assert_ne!(get(a), get(b), "{a} {b}");
    }
}

/// What [`kind`] takes of a line, byte by byte.
fn taken(line: &[u8]) -> Vec<u8> {
    let mut taken = Vec::new();
    let mut spaces = 0;
    for (i, byte) in line.iter().take(LINE).enumerate() {
        // The first space of the first eight bytes is the one behind the method.
        if *byte == b' ' {
            spaces += 1;
        }
        let method_ends = *byte == b' ' && spaces == 1 && i < 8;
        let number = byte.is_ascii_digit() && i > 0 && line[i - 1] == b'/';
        if (*byte == b' ' && !method_ends) || matches!(byte, b'?' | b'\r') || number {
            break;
        }
        taken.push(*byte);
    }
    // Words that are zero behind the end do not differ from those that end there.
    while taken.last() == Some(&0) {
        taken.pop();
    }
    taken
}

const CONTINUE: &str = "HTTP/1.1 503 Service Temporarily Unavailable\r\n";

fn alb(body: &str) -> String {
    format!(
        "{CONTINUE}Server: awselb/2.0\r\nDate: Mon, 30 Nov 2026 05:20:12 GMT\r\nContent-Type: \
         text/html\r\nContent-Length: 162\r\nConnection: keep-alive\r\n\r\n{body}"
    )
}

#[test]
fn the_page_of_a_balancer() {
    let own = "<html>\r\n<head><title>503 Service Temporarily Unavailable</title></head>\r\n";
    let name = |text: &str| page(text.as_bytes()).map(|b| b.name);
    let is_alb = Some("AWS Application Load Balancer");
    assert_eq!(name(&alb(own)), is_alb);
    // As far as a capture keeps it.
    for cut in CONTINUE.len() + "Server: awselb/2.0".len()..alb(own).len() {
        assert_eq!(name(&alb(own)[..cut]), is_alb, "{cut}");
    }
    assert_eq!(name(&alb("{\"maintenance\":true}")), None, "configured");
    let other = alb(own).replace("awselb/2.0", "nginx");
    assert_eq!(name(&other), None, "nginx has the same page");
    let said = format!("{CONTINUE}X-Server: awselb/2.0\r\n\r\n");
    assert_eq!(name(&said), None);
    let in_body = format!("{CONTINUE}Server: x\r\n\r\nServer: awselb/2.0\r\n");
    assert_eq!(name(&in_body), None);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_never_panic(bytes in vec(any::<u8>(), 0..HEAD + 64)) {
        let _ = message(&bytes);
        let _ = page(&bytes);
        if let Some(Message::Response { status }) = message(&bytes) {
            prop_assert!((100..600).contains(&status));
        }
    }

    /// Nothing but a whole status line is a response.
    #[test]
    fn statuses_as_a_plain_reader_sees_them(
        minor in 0u8..4,
        code in "[0-9x ]{3}",
        end in prop_oneof![Just(' '), Just('\r'), Just('x')],
    ) {
        let line = format!("HTTP/1.{minor} {code}{end}reason\r\n");
        let plain = code.parse::<u16>().ok().filter(|c| (100..600).contains(c));
        let plain = plain.filter(|_| minor < 2 && end != 'x' && !code.contains(' '));
        prop_assert_eq!(status_of(&line), plain);
    }

    /// Eight bytes at a time give what one at a time does.
    #[test]
    fn kinds_as_a_plain_reader_sees_them(
        method in prop_oneof![Just("GET"), Just("POST"), Just("OPTIONS")],
        a in "/[a-c0-2/? !\r]{0,70}",
        b in "/[a-c0-2/? !\r]{0,70}",
    ) {
        let line = |path: &str| format!("{method} {path} HTTP/1.1\r\n");
        let (a, b) = (line(&a), line(&b));
        let kind = |l: &str| kind(&words(&l.as_bytes()[..l.len().min(LINE)]));
        let same = taken(a.as_bytes()) == taken(b.as_bytes());
        prop_assert_eq!(kind(&a) == kind(&b), same, "{:?} {:?}", a, b);
    }

    /// The rest of the segment plays no part.
    #[test]
    fn what_follows_the_path_changes_nothing(path in "/[a-z/]{0,20}", rest in "[ -~]{16,100}") {
        prop_assert_eq!(get(&path), kind_of(&format!("GET {path} {rest}")));
    }

    #[test]
    fn short_segments_are_nothing(bytes in vec(any::<u8>(), 0..PEEK)) {
        prop_assert_eq!(message(&bytes), None);
    }
}
