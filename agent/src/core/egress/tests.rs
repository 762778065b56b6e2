//! Groups as they are configured, and what is counted of them.

use tuplewatch_common::address::v4_mapped;

use super::*;
use crate::core::{observation::Snapshot, profile, threshold::Thresholds};

fn group(text: &str) -> Group {
    serde_json::from_str(text).unwrap()
}

fn egress(groups: &[Group], host: &Host) -> Result<Egress, String> {
    Egress::new(groups, &profile::builtin(), host)
}

fn key(initiator: [u8; 4], responder: [u8; 4]) -> PortSpaceKey {
    PortSpaceKey {
        initiator: v4_mapped(initiator),
        responder: v4_mapped(responder),
        responder_port: 443,
        role: Role::Initiator as u8,
        point: Point::Socket as u8,
        netns: 1,
    }
}

#[test]
fn the_first_group_that_carries_a_destination_has_it() {
    let groups = [
        group(
            r#"{"name": "partner", "destinations": ["203.0.113.0/24"], "profile": "l4-2048-16383",
                "addresses": 3}"#,
        ),
        group(
            r#"{"name": "internet", "destinations": ["0.0.0.0/0", "::/0"],
                "except": ["10.0.0.0/8"], "profile": "aws-nat-gateway"}"#,
        ),
    ];
    let egress = egress(&groups, &Host::default()).unwrap();
    let of = |responder| {
        let device = egress.device(&key([10, 0, 0, 1], responder))?;
        Some((device.group.as_str(), device.budget))
    };
    assert_eq!(of([203, 0, 113, 9]), Some(("partner", 43_008)));
    assert_eq!(of([198, 51, 100, 1]), Some(("internet", 55_000)));
    assert_eq!(of([10, 9, 9, 9]), None);
    let accepted = PortSpaceKey {
        role: Role::Responder as u8,
        ..key([10, 0, 0, 1], [203, 0, 113, 9])
    };
    assert_eq!(egress.device(&accepted), None);
}

#[test]
fn hosts_are_members_by_zone_name_or_subnet() {
    let members = r#"{"name": "a", "destinations": ["0.0.0.0/0"], "ports": 100, "hold": "60s",
        "members": {"zones": ["zone-a"], "names": ["web-*", "db"], "subnets": ["10.1.0.0/16"]}}"#;
    let host = |name: &str, zone: Option<&str>| Host {
        name: name.into(),
        zone: zone.map(Into::into),
    };
    let is_member = |host: &Host, initiator| {
        let egress = egress(&[group(members)], host).unwrap();
        egress.device(&key(initiator, [192, 0, 2, 1])).is_some()
    };
    assert!(is_member(&host("x", Some("zone-a")), [10, 2, 0, 1]));
    assert!(is_member(&host("web-7", None), [10, 2, 0, 1]));
    assert!(is_member(&host("db", None), [10, 2, 0, 1]));
    assert!(!is_member(&host("db2", Some("zone-b")), [10, 2, 0, 1]));
    assert!(is_member(&host("db2", Some("zone-b")), [10, 1, 0, 1]));
}

#[test]
fn hosts_share_what_is_not_given_to_each() {
    let shared = r#"{"name": "a", "destinations": ["0.0.0.0/0"], "profile": "aws-nat-gateway",
        "hosts": 300}"#;
    let own = r#"{"name": "b", "destinations": ["0.0.0.0/0"], "profile": "azure-load-balancer",
        "hosts": 300}"#;
    let device = |text| {
        let egress = egress(&[group(text)], &Host::default()).unwrap();
        let key = key([10, 0, 0, 1], [192, 0, 2, 1]);
        let device = egress.device(&key).unwrap().clone();
        (device.budget, device.is_shared)
    };
    assert_eq!(device(shared), (183, true));
    assert_eq!(device(own), (1024, false));
}

#[test]
fn wrong_groups_are_refused_with_the_remedy() {
    let name = r#""name": "a", "destinations": ["0.0.0.0/0"]"#;
    for (text, why) in [
        (format!("{{{name}}}"), "needs `ports`"),
        (format!(r#"{{{name}, "ports": 5}}"#), "needs `hold`"),
        (
            format!(r#"{{{name}, "profile": "aws-nat"}}"#),
            "aws-nat-gateway",
        ),
        (
            r#"{"name": "a", "destinations": [], "ports": 1, "hold": 1}"#.to_owned(),
            "no destinations",
        ),
        (
            format!(r#"{{{name}, "ports": 5, "hold": 1, "hosts": 0}}"#),
            "at least 1",
        ),
    ] {
        let error = egress(&[group(&text)], &Host::default()).unwrap_err();
        assert!(error.contains(why), "{error}");
    }
    let twice = group(&format!(r#"{{{name}, "ports": 5, "hold": 1}}"#));
    let error = egress(&[twice.clone(), twice], &Host::default()).unwrap_err();
    assert!(error.contains("two egress groups"), "{error}");
    assert!(
        serde_json::from_str::<Group>(&format!(r#"{{{name}, "port": 5}}"#)).is_err(),
        "unknown keys are errors"
    );
}

#[test]
fn where_no_socket_is_here_what_was_opened_lately_has_its_port() {
    let groups = [group(
        r#"{"name": "a", "destinations": ["0.0.0.0/0"], "ports": 100, "hold": "60s"}"#,
    )];
    let wire = PortSpaceKey {
        point: Point::Wire as u8,
        netns: 0,
        ..key([10, 0, 0, 1], [192, 0, 2, 1])
    };
    let socket = key([10, 0, 0, 1], [192, 0, 2, 1]);
    let opened = PortSpace {
        opens: 70,
        established: 70,
        ..PortSpace::default()
    };
    let tables = Tables::default();
    let at = |s: u64| Moment(s * 1_000_000_000);
    let mut egress = egress(&groups, &Host::default()).unwrap();
    egress.take(at(1), &[(wire, PortSpace::default())], &tables);
    egress.take(at(20), &[(wire, opened)], &tables);
    let held = |egress: &Egress, s| egress.use_of(&tables, at(s), &wire).unwrap().held;
    assert_eq!(held(&egress, 30), 70);
    assert_eq!(held(&egress, 80), 0);
    // Sockets know better: of these connections none was closed.
    egress.take(at(31), &[(socket, opened)], &tables);
    assert_eq!(held(&egress, 31), 0);
}

#[test]
fn what_closes_is_held_for_a_while() {
    let groups = [group(
        r#"{"name": "a", "destinations": ["0.0.0.0/0"], "ports": 100, "hold": "60s"}"#,
    )];
    let mut egress = egress(&groups, &Host::default()).unwrap();
    let key = key([10, 0, 0, 1], [192, 0, 2, 1]);
    let at = |s: u64| Moment(s * 1_000_000_000);
    // A port space that is forgotten does not count any more.
    let mut tables = Tables::default();
    let snapshot = Snapshot {
        now: at(1),
        spaces: vec![(key, PortSpace::default())],
        ..Snapshot::default()
    };
    let pool = Thresholds::default().pool;
    tables.snapshot(&snapshot, Duration::from_secs(120), &pool, None);
    let mut raw = PortSpace::default();
    for s in 1..=30 {
        raw.closed += 2;
        egress.take(at(s), &[(key, raw)], &tables);
    }
    let held = |egress: &Egress, s| egress.use_of(&tables, at(s), &key).unwrap().held;
    assert_eq!(held(&egress, 30), 60);
    for s in 31..=75 {
        egress.take(at(s), &[], &tables);
    }
    let later = held(&egress, 75);
    assert!((26..=36).contains(&later), "{later}");
    assert_eq!(held(&egress, 95), 0);
    assert!(egress.unsettled.is_empty());
    // The source forgot the port space and counts from zero again.
    raw.closed = 5;
    egress.take(at(100), &[(key, raw)], &tables);
    assert_eq!(held(&egress, 101), 5);
    egress.take(at(200), &[], &Tables::default());
    assert_eq!(egress.uses(&tables, at(200)).count(), 0);
}
