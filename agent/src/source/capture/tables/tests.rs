use super::*;

fn with(
    tables: &mut InMemory,
    key: &PortSpaceKey,
    create: bool,
    f: impl FnOnce(&mut PortSpace),
) -> bool {
    let space = tables.space(key, create);
    tables.with_space(space, f)
}

fn key(n: u16) -> PortSpaceKey {
    PortSpaceKey {
        responder_port: n,
        ..PortSpaceKey::default()
    }
}

#[test]
fn room_is_made_in_a_table_of_any_size() {
    for spaces in 1..=9u16 {
        let mut tables = InMemory::new(Limits {
            spaces: spaces.into(),
            ..Limits::default()
        });
        for n in 0..2 * spaces {
            with(&mut tables, &key(n), true, |p| p.opens += 1);
            for _ in 0..=QUIET_LOOKS + 1 {
                tables.look();
            }
        }
        let known = tables.port_spaces().len();
        assert!(known <= usize::from(spaces), "{known} of {spaces}");
        // Those that came last are there, unless there was no place that could be given up.
        assert!(known >= usize::from(spaces) / 2, "{known} of {spaces}");
    }
}

#[test]
fn a_look_tells_what_changed() {
    let mut tables = InMemory::new(Limits::default());
    assert!(!with(&mut tables, &key(1), false, |_| ()));
    for n in [2, 1] {
        assert!(with(&mut tables, &key(n), true, |p| {
            p.opens += 1;
            p.first_ports[0] = 7;
            p.ports_noted = 1;
        }));
    }
    let space = tables.space(&key(1), false);
    tables.mark_port(space, 9, 1);
    tables.mark_port(space, 9, 2);
    let (spaces, ports) = tables.look();
    assert_eq!(spaces.len(), 2);
    assert_eq!((spaces[0].0, spaces[1].0), (key(1), key(2)));
    assert_eq!(ports, [(key(1), vec![7, 9]), (key(2), vec![7])]);
    assert_eq!(tables.look(), (Vec::new(), Vec::new()));
}

#[test]
fn quiet_port_spaces_make_room_and_troubled_ones_stay() {
    let limits = Limits {
        spaces: 64,
        ..Limits::default()
    };
    let mut tables = InMemory::new(limits);
    with(&mut tables, &key(0), true, |p| p.bare_acks = 1);
    for n in 1..60 {
        with(&mut tables, &key(n), true, |p| p.opens = 1);
    }
    let forgotten = tables.space(&key(1), false);
    for _ in 0..=QUIET_LOOKS {
        tables.look();
    }
    with(&mut tables, &key(59), true, |p| p.opens = 2);
    tables.look();
    tables.look();
    assert_eq!(tables.spaces.len(), 48);
    assert!(tables.spaces.contains_key(&key(0)));
    assert!(tables.spaces.contains_key(&key(59)));
    assert!(!tables.with_space(forgotten, |_| ()), "leads nowhere");
    for n in 60..100 {
        with(&mut tables, &key(n), true, |p| p.opens = 1);
    }
    assert_eq!(tables.spaces.len(), 64);
    assert_eq!(tables.globals()[Global::PortSpacesFull as usize], 24);
}
