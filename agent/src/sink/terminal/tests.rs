use super::*;
use crate::sink::fixture;
use screen::Size;

fn terminal(rows: usize) -> (Terminal, impl Fn() -> String) {
    let (out, text) = fixture::shared();
    let size = move || Some(Size { columns: 120, rows });
    let screen = Screen::new(out, size, true, false);
    (Terminal::new(screen, WallClock::capture()), text)
}

#[test]
fn a_file_gets_alerts_and_no_summary() {
    let (out, text) = fixture::shared();
    let mut sink = Terminal::new(Screen::plain(out), WallClock::capture());
    sink.ready(fixture::NOW, &fixture::ready()).unwrap();
    sink.changes(fixture::NOW, &[Change::Alert(Box::new(fixture::alert()))])
        .unwrap();
    let mut overview = fixture::overview();
    overview.globals = Default::default();
    sink.overview(&overview).unwrap();
    sink.close().unwrap();
    let text = text();
    assert!(
        text.starts_with("tuplewatch 0.1.0 watches eth0, veth1"),
        "{text}"
    );
    assert!(
        text.contains("Hook retransmit is off: the kernel has no tracepoint"),
        "{text}"
    );
    assert!(
        text.contains("Not seen: wg0 (the device has no Ethernet header)"),
        "{text}"
    );
    assert!(text.contains("CRITICAL  port_exhaustion"), "{text}");
    assert!(
        text.ends_with("tuplewatch ends with 1 alert still firing.\n"),
        "{text}"
    );
    assert!(!text.contains('\x1b') && !text.contains("CLIENT"), "{text}");
}

#[test]
fn the_summary_has_the_busiest_port_spaces() {
    let (mut sink, text) = terminal(40);
    sink.overview(&fixture::overview()).unwrap();
    let text = text();
    assert!(
        text.contains("10:30:05 UTC  3 port spaces, 1 alert firing, 17 records lost"),
        "{text}"
    );
    assert!(text.contains("203.0.113.10:443"), "{text}");
    assert!(text.contains("9 of 200 (4.5 %)"), "{text}");
}

#[test]
fn a_small_screen_keeps_room_for_alerts() {
    let (mut sink, _) = terminal(8);
    let mut overview = fixture::overview();
    overview.spaces = vec![fixture::space(fixture::key()); 30];
    assert_eq!(
        sink.summary(&overview).len(),
        3,
        "head, heading, one port space"
    );
    sink.overview(&overview).unwrap();
    let (sink, _) = terminal(100);
    assert_eq!(sink.summary(&overview).len(), 2 + SPACES);
}

#[test]
fn an_alert_is_told_in_full_once_and_again_when_it_gets_worse() {
    let (mut sink, _) = terminal(40);
    let mut alert = fixture::alert();
    alert.finding.severity = Severity::Warning;
    alert.state = State::Pending;
    assert!(sink.alert(&alert).starts_with("PENDING"));
    alert.state = State::Firing;
    assert!(sink.alert(&alert).contains("  Do "));
    assert!(!sink.alert(&alert).contains("  Do "), "figures only");
    alert.finding.severity = Severity::Critical;
    assert!(sink.alert(&alert).contains("  Do "), "it got worse");
    alert.state = State::Resolved;
    assert!(sink.alert(&alert).starts_with("RESOLVED"));
    alert.state = State::Firing;
    assert!(sink.alert(&alert).contains("  Do "), "a new alert");
}

#[test]
fn losses_are_told_at_each_tenfold_count() {
    let (mut sink, _) = terminal(40);
    let mut overview = fixture::overview();
    let mut told = |count| {
        overview.globals[Global::EventsLost as usize] = count;
        sink.losses(&overview).lines().count()
    };
    assert_eq!(
        [told(0), told(1), told(9), told(10), told(11), told(100)],
        [0, 1, 0, 1, 0, 1]
    );
}
