use std::os::unix::fs::PermissionsExt as _;

use super::*;
use crate::{
    core::{engine::Engine, rules::Rules, time::Moment},
    sink::fixture,
};

const SECOND: i64 = 1_000_000_000;

fn stamp(time: i64, boot: i64, id: &str) -> Stamp {
    Stamp {
        time_ns: time * SECOND,
        boot_ns: boot * SECOND,
        boot_id: id.to_owned(),
    }
}

/// A state with one firing alert, since `since` seconds after the epoch.
fn saved(since: i64) -> Saved {
    let text = serde_json::json!({"alerts": [{
        "id": fixture::alert().id, "cause": "l4_reuse_in_time_wait", "told": true,
        "space": {"initiator": "198.51.100.7", "responder": "203.0.113.10:443", "role": "responder",
            "point": "wire", "netns": 0},
        "pending_since": since * SECOND, "firing_since": since * SECOND, "at": since * SECOND,
        "since": since * SECOND, "history": {"count": 1}, "severity": "warning",
        "confidence": "high", "evidence": {}, "ruled_out": [], "opened_by": [], "summary": "s",
        "remedy": "r"}]});
    serde_json::from_value(text).unwrap()
}

/// When the alert of `saved` fires since, after it was put into a core.
fn firing_since(saved: Saved, now: Moment) -> i64 {
    let mut engine = Engine::new(Rules::default());
    engine.restore(now, saved);
    let overview = engine.overview(0);
    overview.alerts[0].firing_since.unwrap().signed() / SECOND
}

fn round(written: &Stamp, read: &Stamp) -> i64 {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(file::NAME);
    file::write(&path, saved(900), written).unwrap();
    let read = file::read(&path, read).unwrap();
    firing_since(read, Moment(0))
}

#[test]
fn times_are_kept_by_the_time_of_day() {
    let written = stamp(1000, 500, "a");
    assert_eq!(round(&written, &stamp(1010, 510, "a")), 900, "restarted");
    assert_eq!(round(&written, &stamp(9000, 20, "b")), 900, "booted");
    assert_eq!(
        round(&written, &stamp(8000, 7500, "a")),
        900,
        "slept: CLOCK_BOOTTIME counts that"
    );
    assert_eq!(
        round(&written, &stamp(1000 + 3600 + 10, 510, "a")),
        900 + 3600,
        "the clock was an hour slow and was set: so was the time kept"
    );
    assert_eq!(
        round(&written, &stamp(10, 20, "b")),
        -90,
        "booted without a clock: no time has passed"
    );
}

#[test]
fn an_alert_older_than_the_boot_keeps_its_time() {
    let clock = WallClock::live();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(file::NAME);
    let now = Stamp::now();
    let long_ago = now.time_ns / SECOND - 400 * 24 * 3600;
    let before = Stamp {
        boot_id: "another".into(),
        ..now
    };
    file::write(&path, saved(long_ago), &before).unwrap();
    let (_state, saved) = State::open_in(dir.path(), &clock).unwrap();
    let mut engine = Engine::new(Rules::default());
    engine.restore(Moment(0), saved);
    let since = engine.overview(0).alerts[0].firing_since.unwrap();
    assert!(since < Moment(0));
    assert_eq!(clock.epoch_ns(since) / SECOND, long_ago);
}

#[test]
fn what_is_kept_is_there_after_the_next_start() {
    let clock = WallClock::live();
    let dir = tempfile::tempdir().unwrap();
    let (mut state, before) = State::open_in(dir.path(), &clock).unwrap();
    assert_eq!(before, Saved::default());
    let mut kept = saved(1_700_000_000);
    kept.convert(|m| clock.from_epoch_ns(m.signed()));
    state.keep(true, || kept.clone());
    drop(state);
    let (mut state, read) = State::open_in(dir.path(), &clock).unwrap();
    assert_eq!(read, kept);
    // Written at once when an alert changes, else once a minute.
    state.keep(false, Saved::default);
    let mut asked = false;
    state.keep(false, || {
        asked = true;
        Saved::default()
    });
    assert!(!asked);
    state.keep(true, || {
        asked = true;
        Saved::default()
    });
    assert!(asked);
    drop(state);
    let mode = fs::metadata(dir.path().join(file::NAME))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn a_file_that_is_none_of_ours_is_kept_aside() {
    let clock = WallClock::live();
    for (bytes, why) in [
        (&b"{\"format\": \"tuplewatch-state\", \"vers"[..], "damaged"),
        (b"", "damaged"),
        (b"\0\0\0\0", "damaged"),
        (b"{}", "not a state"),
        (b"[1, 2]", "not a state"),
        (
            b"{\"format\": \"tuplewatch-state\", \"version\": 2}",
            "version 2",
        ),
        (
            b"{\"format\": \"tuplewatch-state\", \"version\": 1}",
            "damaged",
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(file::NAME);
        fs::write(&path, bytes).unwrap();
        let error = file::read(&path, &Stamp::now()).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
        let (state, saved) = State::open_in(dir.path(), &clock).unwrap();
        assert_eq!(saved, Saved::default());
        assert_eq!(fs::read(dir.path().join("state.json.bad")).unwrap(), bytes);
        drop(state);
    }
}

#[test]
fn two_agents_do_not_share_a_directory() {
    let clock = WallClock::live();
    let dir = tempfile::tempdir().unwrap();
    let (state, _) = State::open_in(dir.path(), &clock).unwrap();
    let error = State::open_in(dir.path(), &clock).unwrap_err();
    assert!(
        format!("{error:#}").contains("another tuplewatch"),
        "{error:#}"
    );
    drop(state);
    assert!(State::open_in(dir.path(), &clock).is_ok());
}

#[test]
fn a_directory_that_cannot_be_used_is_no_reason_to_stop() {
    let clock = WallClock::live();
    let file = tempfile::NamedTempFile::new().unwrap();
    let inside = StateDir::At(file.path().join("state"));
    assert!(State::open(&inside, &clock).is_none());
    assert!(State::open(&StateDir::Off, &clock).is_none());
}

#[test]
fn the_directory_is_systemds_unless_named() {
    let of = |wanted: &StateDir, systemd: Option<&str>| {
        directory(wanted, systemd.map(str::to_owned)).map(|p| p.display().to_string())
    };
    let two = Some("/var/lib/a:/var/lib/b");
    assert_eq!(of(&StateDir::Auto, two).as_deref(), Some("/var/lib/a"));
    assert_eq!(of(&StateDir::Auto, None), None);
    assert_eq!(of(&StateDir::Auto, Some("")), None);
    assert_eq!(of(&StateDir::Off, two), None);
    assert_eq!(of(&StateDir::At("/x".into()), two).as_deref(), Some("/x"));
}
