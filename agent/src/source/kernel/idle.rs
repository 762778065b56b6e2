//! Idle connections: those that the kernel side saw reset, and those that the census saw alive again.

use std::{collections::BTreeMap, time::Duration};

use bytes::Buf;
use tuplewatch_common::{
    address::{FourTuple, Point, PortSpaceKey, Role},
    idle::{BY_PROBE, CLOSED_BEFORE, IdleReset, KEEP_ALIVE, KEEP_ALIVE_KNOWN, UNKNOWN_MS},
    record::CensusRow,
};

use crate::core::{
    idle::{self, IdleNews, Killed, Settings, Survived},
    time::Moment,
};

/// One record of the ring buffer: the fields of [`IdleReset`] in order, as the kernel side has them in
/// memory. `None` for a record of another size.
pub(super) fn decode(mut record: &[u8]) -> Option<IdleReset> {
    if record.len() != size_of::<IdleReset>() {
        return None;
    }
    let bytes = |record: &mut &[u8]| {
        let mut bytes = [0; 16];
        record.copy_to_slice(&mut bytes);
        bytes
    };
    let r = &mut record;
    Some(IdleReset {
        time_ns: r.get_u64_ne(),
        opened_ns: r.get_u64_ne(),
        tuple: FourTuple {
            initiator: bytes(r),
            responder: bytes(r),
            responder_port: r.get_u16_ne(),
            initiator_port: r.get_u16_ne(),
            pad: r.get_u32_ne(),
        },
        idle_ms: r.get_u32_ne(),
        keep_alive_ms: r.get_u32_ne(),
        user_timeout_ms: r.get_u32_ne(),
        pid: r.get_u32_ne(),
        command: bytes(r),
        role: r.get_u8(),
        flags: r.get_u8(),
        pad: [0; 6],
    })
}

/// What the core is told of these resets and these rows of a census.
pub(super) fn news(resets: &[IdleReset], census: &[(PortSpaceKey, CensusRow)]) -> IdleNews {
    let mut survived: BTreeMap<PortSpaceKey, Survived> = BTreeMap::new();
    for (key, row) in census.iter().filter(|(_, row)| row.rested > 0) {
        let tuple = FourTuple {
            initiator: key.initiator,
            responder: key.responder,
            responder_port: key.responder_port,
            ..FourTuple::default()
        };
        let sum = survived
            .entry(idle::service(&tuple, role(key.role), Point::Socket as u8))
            .or_default();
        sum.count = sum.count.saturating_add(row.rested);
        let longest = Duration::from_millis(row.rested_ms.into());
        sum.longest = sum.longest.max(longest);
    }
    IdleNews {
        killed: resets.iter().map(killed).filter(is_judged).collect(),
        survived: survived.into_iter().collect(),
    }
}

/// A row whose local port has no listener, like a socket without one, is that of an initiator.
const fn role(role: u8) -> Role {
    match Role::from_u8(role) {
        Role::Responder => Role::Responder,
        Role::Initiator | Role::Unknown => Role::Initiator,
    }
}

fn killed(reset: &IdleReset) -> Killed {
    let is = |flag: u8| reset.flags & flag != 0;
    Killed {
        tuple: reset.tuple,
        role: role(reset.role),
        point: Point::Socket as u8,
        at: Moment(reset.time_ns),
        idle: Duration::from_millis(reset.idle_ms.into()),
        opened: (reset.opened_ns != 0).then_some(Moment(reset.opened_ns)),
        pid: reset.pid,
        command: reset.command,
        closed_before: is(CLOSED_BEFORE),
        by_probe: is(BY_PROBE),
        // The socket does not say which packet the RST was.
        reset_by: None,
        in_silence: false,
        settings: settings(reset.flags, reset.keep_alive_ms, reset.user_timeout_ms),
    }
}

/// How a socket is set, as the kernel side tells it.
pub(super) fn settings(flags: u8, keep_alive_ms: u32, user_timeout_ms: u32) -> Settings {
    let known = |ms: u32| (ms != UNKNOWN_MS).then(|| Duration::from_millis(ms.into()));
    let is = |flag: u8| flags & flag != 0;
    Settings {
        keep_alive: is(KEEP_ALIVE_KNOWN).then_some(is(KEEP_ALIVE)),
        keep_alive_time: known(keep_alive_ms),
        user_timeout: known(user_timeout_ms),
    }
}

/// A client that closes before it is answered has given up waiting: no race for an idle connection.
fn is_judged(killed: &Killed) -> bool {
    !killed.closed_before || killed.role == Role::Initiator
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reset() -> IdleReset {
        IdleReset {
            time_ns: 0x0102_0304_0506_0708,
            opened_ns: 5,
            tuple: FourTuple {
                initiator: [1; 16],
                responder: [2; 16],
                responder_port: 443,
                initiator_port: 40_000,
                pad: 0,
            },
            idle_ms: 351_000,
            keep_alive_ms: 7_200_000,
            user_timeout_ms: 0,
            pid: 4711,
            command: *b"worker\0\0\0\0\0\0\0\0\0\0",
            role: Role::Initiator as u8,
            flags: KEEP_ALIVE_KNOWN,
            pad: [0; 6],
        }
    }

    #[test]
    fn a_record_is_read_as_it_lies_in_memory() {
        let reset = reset();
        // SAFETY: `IdleReset` is plain data without padding.
        let bytes = unsafe {
            std::slice::from_raw_parts((&raw const reset).cast::<u8>(), size_of::<IdleReset>())
        };
        assert_eq!(decode(bytes), Some(reset));
        assert_eq!(decode(&bytes[1..]), None);
    }

    #[test]
    fn what_the_core_is_told() {
        let row = |role, rested, rested_ms| {
            let key = PortSpaceKey {
                initiator: [1; 16],
                responder: [2; 16],
                responder_port: 443,
                role,
                point: Point::Socket as u8,
                netns: 7,
            };
            let row = CensusRow {
                rested,
                rested_ms,
                ..CensusRow::default()
            };
            (key, row)
        };
        let given_up = IdleReset {
            role: Role::Responder as u8,
            flags: CLOSED_BEFORE,
            ..reset()
        };
        let news = news(
            &[reset(), given_up],
            &[
                row(0, 2, 9000),
                row(0, 1, 12_000),
                row(2, 1, 3000),
                row(2, 0, 0),
            ],
        );
        let [killed] = news.killed[..] else {
            panic!("{:?}", news.killed)
        };
        assert_eq!(killed.settings.keep_alive, Some(false));
        assert_eq!(
            killed.settings.keep_alive_time,
            Some(Duration::from_secs(7200))
        );
        assert_eq!(killed.settings.user_timeout, Some(Duration::ZERO));
        assert_eq!(news.survived.len(), 2);
        let (key, ours) = news.survived[0];
        assert_eq!(key, idle::service(&killed.tuple, killed.role, killed.point));
        assert_eq!((ours.count, ours.longest), (3, Duration::from_secs(12)));
    }
}
