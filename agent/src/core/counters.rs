//! Counters of the kernel and of devices around the port spaces, and by how much they grew.
//!
//! They corroborate: no verdict rests on one of them alone.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use super::time::Moment;

/// Declares counters, each with the name by which its source calls it.
macro_rules! counters {
    (
        $(#[$about:meta])*
        pub struct $Name:ident {
            $( $(#[$doc:meta])* $field:ident: $kind:ident $name:literal, )+
        }
    ) => {
        $(#[$about])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct $Name {
            $( $(#[$doc])* pub $field: Option<u64>, )+
        }

        impl $Name {
            /// The place of the counter that the source calls `name`.
            pub fn slot(&mut self, name: &str) -> Option<&mut Option<u64>> {
                match name {
                    $( $name => Some(&mut self.$field), )+
                    _ => None,
                }
            }

            /// Names and values of those that are known.
            pub fn known(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                [$( ($name, self.$field) ),+]
                    .into_iter()
                    .filter_map(|(name, value)| Some((name, value?)))
            }

            /// By how much they grew since `earlier`; levels stand as they are now.
            #[must_use]
            pub fn since(&self, earlier: &Self) -> Self {
                Self { $( $field: counters!(@$kind self.$field, earlier.$field), )+ }
            }
        }
    };
    (@counter $now:expr, $earlier:expr) => {
        $now.zip($earlier).map(|(now, earlier)| now.saturating_sub(earlier))
    };
    (@level $now:expr, $earlier:expr) => { $now };
}

counters! {
    /// Counters of one network namespace since it began (`/proc/PID/net/{netstat,snmp,sockstat}`,
    /// conntrack); `None` where the kernel has no such counter.
    pub struct NetnsCounters {
        /// The accept queue was full.
        listen_overflows: counter "TcpExt ListenOverflows",
        /// SYNs (or last ACKs) dropped at a listener for any reason, the former included.
        listen_drops: counter "TcpExt ListenDrops",
        /// SYN queue full, the SYN was dropped.
        req_q_full_drop: counter "TcpExt TCPReqQFullDrop",
        /// SYN queue full, the SYN was answered by a cookie.
        req_q_full_do_cookies: counter "TcpExt TCPReqQFullDoCookies",
        /// SYN cookies sent.
        syncookies_sent: counter "TcpExt SyncookiesSent",
        /// SYNs into live connections.
        syn_challenge: counter "TcpExt TCPSYNChallenge",
        /// Challenge ACKs sent.
        challenge_ack: counter "TcpExt TCPChallengeACK",
        /// Sockets that found no room in TIME_WAIT.
        time_wait_overflow: counter "TcpExt TCPTimeWaitOverflow",
        /// SYNs and SYN-ACKs sent again.
        syn_retrans: counter "TcpExt TCPSynRetrans",
        /// SYNs dropped by the timestamps of a host (`tcp_tw_recycle`).
        paws_passive: counter "TcpExt PAWSPassive",
        /// Segments sent again.
        retrans_segs: counter "Tcp RetransSegs",
        /// Segments sent.
        out_segs: counter "Tcp OutSegs",
        /// RSTs sent.
        out_rsts: counter "Tcp OutRsts",
        /// Opens that failed.
        attempt_fails: counter "Tcp AttemptFails",
        /// Sockets in TIME_WAIT or a short FIN_WAIT_2 now.
        time_wait: level "sockstat TCP tw",
        /// Entries of the conntrack table now.
        conntrack_count: level "nf_conntrack_count",
        /// Most entries that it may have.
        conntrack_max: level "nf_conntrack_max",
        /// Entries that clashed with another one when they were confirmed, all CPUs.
        conntrack_insert_failed: counter "nf_conntrack insert_failed",
        /// Packets dropped because no entry could be made, all CPUs.
        conntrack_drop: counter "nf_conntrack drop",
    }
}

counters! {
    /// Counters of the host's network devices, summed over them.
    pub struct HostCounters {
        /// ENA: packets dropped because the instance tracks too many connections.
        ena_conntrack_allowance: counter "conntrack_allowance_exceeded",
        /// ENA: packets dropped or queued because of their rate.
        ena_pps_allowance: counter "pps_allowance_exceeded",
        /// ENA: packets dropped or queued because of the inbound bandwidth.
        ena_bw_in_allowance: counter "bw_in_allowance_exceeded",
        /// ENA: packets dropped or queued because of the outbound bandwidth.
        ena_bw_out_allowance: counter "bw_out_allowance_exceeded",
    }
}

/// A counter that speaks for a finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CounterEvidence {
    /// As the kernel calls it.
    pub name: String,
    /// Its growth over the window, or its level.
    pub value: u64,
    /// The network namespace (inode), 0 for the host.
    pub netns: u32,
}

/// Readings of the last window.
#[derive(Clone, Debug)]
pub struct Readings<T>(VecDeque<(Moment, T)>);

impl<T> Default for Readings<T> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<T: Copy + PartialEq> Readings<T> {
    /// Takes a reading; equal ones in a row are kept once.
    pub(super) fn take(&mut self, now: Moment, reading: T, keep: Duration) {
        if self.0.back().is_none_or(|(_, last)| *last != reading) {
            self.0.push_back((now, reading));
        }
        while self.0.len() > 1 && now.since(self.0[1].0) >= keep {
            self.0.pop_front();
        }
    }

    /// The latest reading and the one that held `window` ago, or the oldest.
    pub(super) fn ends(&self, now: Moment, window: Duration) -> Option<(&T, &T)> {
        let (_, latest) = self.0.back()?;
        let earlier = self
            .0
            .iter()
            .rev()
            .find(|(at, _)| now.since(*at) >= window)
            .or(self.0.front())?;
        Some((latest, &earlier.1))
    }
}

/// All counters over the last window.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    netns: BTreeMap<u32, Readings<NetnsCounters>>,
    host: Readings<HostCounters>,
}

impl Counters {
    /// Takes what a source has read; `keep` is the longest window asked for.
    pub fn take(
        &mut self,
        now: Moment,
        netns: &BTreeMap<u32, NetnsCounters>,
        host: &HostCounters,
        keep: Duration,
    ) {
        self.netns.retain(|inode, _| netns.contains_key(inode));
        for (inode, reading) in netns {
            self.netns
                .entry(*inode)
                .or_default()
                .take(now, *reading, keep);
        }
        self.host.take(now, *host, keep);
    }

    /// Growth over the window in one namespace.
    #[must_use]
    pub fn netns(&self, netns: u32, now: Moment, window: Duration) -> Option<NetnsCounters> {
        let (latest, earlier) = self.netns.get(&netns)?.ends(now, window)?;
        Some(latest.since(earlier))
    }

    /// Growth over the window in every namespace.
    pub fn each(
        &self,
        now: Moment,
        window: Duration,
    ) -> impl Iterator<Item = (u32, NetnsCounters)> + '_ {
        self.netns.iter().filter_map(move |(inode, readings)| {
            let (latest, earlier) = readings.ends(now, window)?;
            Some((*inode, latest.since(earlier)))
        })
    }

    /// Growth over the window in the host's devices.
    #[must_use]
    pub fn host(&self, now: Moment, window: Duration) -> HostCounters {
        self.host
            .ends(now, window)
            .map(|(latest, earlier)| latest.since(earlier))
            .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_of_the_window() {
        let mut counters = Counters::default();
        let window = Duration::from_secs(60);
        let at = |s: u64| Moment(s * 1_000_000_000);
        for s in 0..200 {
            let reading = NetnsCounters {
                listen_drops: Some(100 + s / 10),
                conntrack_count: Some(s),
                ..NetnsCounters::default()
            };
            counters.take(
                at(s),
                &BTreeMap::from([(7, reading)]),
                &HostCounters::default(),
                window,
            );
        }
        let growth = counters.netns(7, at(199), window).unwrap();
        assert_eq!(growth.listen_drops, Some(6));
        assert_eq!(growth.conntrack_count, Some(199), "a level");
        assert_eq!(growth.listen_overflows, None);
        assert_eq!(growth.known().count(), 2);
        assert_eq!(counters.netns(8, at(199), window), None);
        assert!(counters.netns[&7].0.len() < 70);
        counters.take(at(200), &BTreeMap::new(), &HostCounters::default(), window);
        assert_eq!(counters.each(at(200), window).count(), 0);
    }

    #[test]
    fn what_was_counted_before_the_start_says_nothing() {
        let mut counters = Counters::default();
        let reading = NetnsCounters {
            listen_overflows: Some(1_000_000),
            ..NetnsCounters::default()
        };
        let (now, window) = (Moment(5_000_000_000), Duration::from_secs(60));
        counters.take(
            now,
            &BTreeMap::from([(1, reading)]),
            &HostCounters::default(),
            window,
        );
        let growth = counters.netns(1, now, window).unwrap();
        assert_eq!(growth.listen_overflows, Some(0));
    }

    #[test]
    fn counters_are_found_by_the_name_of_their_source() {
        let mut counters = NetnsCounters::default();
        *counters.slot("TcpExt ListenDrops").unwrap() = Some(3);
        assert_eq!(counters.listen_drops, Some(3));
        assert!(counters.slot("TcpExt Listen").is_none());
    }
}
