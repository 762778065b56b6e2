use super::*;
use crate::{core::time::Moment, sink::fixture};

fn format(clock: &WallClock, width: usize) -> Format<'_> {
    Format {
        clock,
        style: Style::plain(),
        width,
    }
}

#[test]
fn a_new_alert_says_what_where_since_when_why_who_and_what_to_do() {
    let clock = WallClock::capture();
    let text = alert(&format(&clock, 100), &fixture::alert(), Told::No);
    let expected = "\
CRITICAL  port_exhaustion / l4_reuse_in_time_wait  firing, 2025-11-29 10:30:05 UTC
  198.51.100.7 → 203.0.113.10:443, seen on the wire, as the one who accepts the connections
  198.51.100.7 reuses source ports to 203.0.113.10:443 while they are in TIME_WAIT
  Since       2025-11-29 10:29:53 UTC (12 s ago), firing since 10:29:54 UTC
  Refused     42 SYNs of 5,210 opens met a bare ACK (0.8 %): 40 after the former connection was
              closed, 1 while it was open, 1 while it was half open
  Collisions  2 live and 1 idle connections were reset by SYNs from 3 ports, 1.2 s to 6 min 40 s
              after their last traffic
  Failed      3 connect() found no source port in the last 1 min
  Responses   18 failures on 2 connections, at most 14 in a row; of the others 31 do well (23 of
              them newer), 1 fail (1 newer); the newest do well for 20 s now
  Connection  198.51.100.7:45328 → 203.0.113.10:443, open for 24 s: 14 of 14 requests failed, 14 in
              a row for 24 s with 503; to close it: ss -K dst 203.0.113.10 dport = 443 src
              198.51.100.7 sport = 45328
              and 1 more
  Unseen      TLS, HTTP/2 and gRPC have no status line that could be read: connections that speak
              them are not judged
  Stalled     1 connection for 14 s, 112 bytes not acknowledged; 1 over; since then 13 opens, 12
              established, 1 of them stalled; new ones do better for 13 s now
  Connection  198.51.100.7:41490 → 203.0.113.10:443, open for 34 s: nothing through for 14 s, 112
              bytes not acknowledged, 40 more wait; 6 time-outs, 1 probe without an answer; opened
              by curl[4711]; to close it: ss -K dst 203.0.113.10 dport = 443 src 198.51.100.7 sport
              = 41490
              and 1 more
  Rests on    acknowledgements only, which TCP shows whatever it carries: TLS, HTTP/2 and gRPC are
              judged like plain text
  Idle        4 connections lost after 5 min 52 s to 14 min 31 s without traffic; 120 others lived
              through up to 5 min 41 s; 1 lost sooner; 1 got no answer
  Connection  198.51.100.7:45330 → 203.0.113.10:443, open for 1 h 6 min: data after 5 min 52 s
              without traffic got no answer, 3.2 s ago; curl[4711]; SO_KEEPALIVE is on, first probe
              after 7200 s, TCP_USER_TIMEOUT is not set; to close it: ss -K dst 203.0.113.10 dport =
              443 src 198.51.100.7 sport = 45330
              and 3 more
  Unseen      who gives up within seconds
  Placement   203.0.113.10:443: served here no more for 6 min 52 s; requests answered lately on 2
              older connections, 3 woke after a pause, 4 received something
  Connection  198.51.100.7:45331 → 203.0.113.10:443, open for 50 min 12 s: 212 requests, the latest
              answered 1.5 s ago; to close it: ss -K dst 203.0.113.10 dport = 443 src 198.51.100.7
              sport = 45331
              and 1 more
  Lost        2 opens without answer, 5,150 got through, 36 SYNs sent again; 4 connections live, 15
              segments of data sent again; of other destinations 5 answer and 1 fail
  Counters    TCPSYNChallenge 3
  Outcome     33 got through later, 9 did not get through, 2 unanswered in the end, 6 not completed
              by the client, 3 answered by RST, 12 reused four-tuples accepted at once, 30 RSTs in
              answer, 36 SYNs sent again, 1 late duplicate SYNs
  Ports       39 ports refused, 200 seen of the pool 2048-2247 (200)
  Sockets     187 in TIME_WAIT (peak 200), 4 in use
  Reuse       1 s to 58 s after the end of the former connection
  Budget      191 of 200 ports taken (96 %): 4 in use, 187 held; a port is held for 1 min after
              close
  Outlook     204 ports taken in the end, 0.50 more with every second; none is left in 18 s
  Device      nat-zone-a: 191 of 55,000 ports taken by this host (4 in use, 187 held)
  Search      a port is found in 2 ms, 13 µs before
  Held for    203.0.113.10:443: 4 in use, 187 in TIME_WAIT
  Now         86.8 opens/s; 42 of 5,210 opens refused in the last 1 min
  Confidence  high
  Not         half_open_reconnect: 40 of 42 former connections were closed
  Opened by   curl[4711] 80.2/s, 4,815 in all, 3 without a port, each for 80 ms, in
              /system.slice/batch.service
  Do          curl[4711] opens 80 connections/s of 80 ms each: reuse connections
  Packets     /var/lib/tuplewatch/evidence/20251129T103005.123Z-l4_reuse.pcapng
  Alert       l4_reuse_in_time_wait/wire/responder/198.51.100.7/203.0.113.10:443

";
    assert_eq!(text, expected);
}

#[test]
fn a_repeated_alert_has_the_figures_only() {
    let clock = WallClock::capture();
    let text = alert(&format(&clock, 100), &fixture::alert(), Told::Before);
    assert!(text.contains("still firing"));
    assert!(text.contains("Refused"));
    assert!(
        !text.contains("Confidence") && !text.contains("  Do "),
        "{text}"
    );
}

#[test]
fn a_resolved_alert_says_how_long_it_lasted() {
    let clock = WallClock::capture();
    let mut resolved = fixture::alert();
    resolved.state = State::Resolved;
    resolved.at = Moment(fixture::NOW.0 + 125_000_000_000);
    resolved.resolved_at = Some(resolved.at);
    let text = alert(&format(&clock, 100), &resolved, Told::Before);
    let head = "RESOLVED  port_exhaustion / l4_reuse_in_time_wait  2025-11-29 10:32:10 UTC\n";
    assert!(text.starts_with(head), "{text}");
    assert!(
        text.contains("Lasted      2 min 16 s, from 2025-11-29 10:29:54 UTC"),
        "{text}"
    );
}

#[test]
fn lines_fit_the_width_and_carry_no_control_characters() {
    let clock = WallClock::capture();
    let mut evil = fixture::alert();
    evil.finding.opened_by[0].command = "\x1b[2J\x07".into();
    evil.finding.remedy = "a\x1b]0;title\x07b".into();
    for width in [40, 60, 80, 100] {
        let text = alert(&format(&clock, width), &evil, Told::No);
        assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text}");
        // The heading and single words, such as an identity, are never broken.
        for line in text.lines().skip(1) {
            let long_word = line.split(' ').any(|word| word.len() > width / 2);
            assert!(
                long_word || line.chars().count() <= width,
                "{width}: {line}"
            );
        }
    }
}

#[test]
fn a_look_alike_says_that_it_is_no_alert() {
    let clock = WallClock::capture();
    let text = look_alike(
        &format(&clock, 100),
        &fixture::finding(),
        false,
        "now".into(),
    );
    assert!(
        text.starts_with("LOOK-ALIKE  l4_reuse_in_time_wait  no alert, now\n"),
        "{text}"
    );
}
