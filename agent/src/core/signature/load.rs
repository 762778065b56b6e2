//! A load in a script: connections that are opened, live for a while and stay in TIME_WAIT.

use tuplewatch_common::{
    address::PortSpaceKey,
    record::{CensusRow, Opener, OpenerKey, TIME_WAIT_AGES},
};

use super::testing::{OWN, Script};
use crate::core::surroundings::LocalPorts;

/// Seconds in TIME_WAIT.
const TIME_WAIT: usize = 60;

/// Connections of one port space.
pub struct Load {
    key: PortSpaceKey,
    /// How long each connection lives, in seconds.
    lifetime: usize,
    /// Whether this host closes first, so that TIME_WAIT is here.
    closes_first: bool,
    /// Opens of each second so far.
    opens: Vec<u32>,
}

impl Load {
    /// Connections that are closed by this host within their second.
    pub fn new(key: PortSpaceKey) -> Self {
        Self {
            key,
            lifetime: 1,
            closes_first: true,
            opens: Vec::new(),
        }
    }

    /// … that live for so many seconds.
    pub fn living(self, lifetime: usize) -> Self {
        Self { lifetime, ..self }
    }

    /// … that the other side closes.
    pub fn closed_by_peer(self) -> Self {
        Self {
            closes_first: false,
            ..self
        }
    }

    /// What went on before anybody looked.
    pub fn after(self, opens: impl IntoIterator<Item = u32>) -> Self {
        Self {
            opens: opens.into_iter().collect(),
            ..self
        }
    }

    /// One more second with `n` opens. Returns how many ports are taken.
    pub fn second(&mut self, host: &mut Script, n: u32) -> u32 {
        self.opens.push(n);
        let ago = |from: usize, to: usize| -> u32 {
            let newest = self.opens.iter().rev();
            newest.skip(from).take(to - from).sum()
        };
        let mut row = CensusRow {
            established: ago(0, self.lifetime),
            ..CensusRow::default()
        };
        if self.closes_first {
            for age in 0..TIME_WAIT_AGES {
                let step = TIME_WAIT / TIME_WAIT_AGES;
                let from = self.lifetime + age * step;
                row.time_wait[age] = ago(from, from + step);
            }
        }
        let closed = u64::from(ago(self.lifetime, self.lifetime + 1));
        let space = host.space(self.key);
        space.opens += u64::from(n);
        space.established += u64::from(n);
        space.closed += closed;
        space.lifetime_ms += closed * self.lifetime as u64 * 1000;
        *host.sockets(self.key) = row;
        row.established + row.time_wait.iter().sum::<u32>()
    }
}

/// A range of `n` ports; `tcp_tw_reuse` as given.
pub fn local_ports(n: u16, tw_reuse: u8) -> LocalPorts {
    LocalPorts {
        first: 40_000,
        last: 40_000 + n - 1,
        reserved: 0,
        tw_reuse,
        tw_reuse_delay_ms: 1000,
        timestamps: true,
    }
}

/// A process that opens connections in a port space.
pub fn opener<'a>(
    host: &'a mut Script,
    space: PortSpaceKey,
    pid: u32,
    name: &str,
) -> &'a mut Opener {
    let key = OpenerKey { space, pid, pad: 0 };
    assert_eq!(space.netns, OWN);
    let opener = host.openers.entry(key).or_default();
    opener.command[..name.len()].copy_from_slice(name.as_bytes());
    // Of late, whenever that is: the script's time only goes forward.
    opener.last_ns = u64::MAX;
    opener
}
