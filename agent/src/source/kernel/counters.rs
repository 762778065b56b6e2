//! Counters of each network namespace, of conntrack and of network devices.
//!
//! The files under `/proc/PID/net` belong to the namespace of that process, so that no namespace is
//! entered: one process of each is found by its `/proc/PID/ns/net`. That link can be read of processes
//! of other users with CAP_SYS_PTRACE only; without it the agent's own namespace is read alone.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use tracing::debug;

use super::ethtool;
use crate::core::{
    counters::{HostCounters, NetnsCounters},
    time::Moment,
};

/// Time between two readings.
const READ_EVERY: Duration = Duration::from_secs(5);
/// Time between two searches for namespaces: it looks at every process.
const SEARCH_EVERY: Duration = Duration::from_secs(30);
/// Namespaces read at most: at three small files each some milliseconds in all.
const NAMESPACES: usize = 256;
/// The driver whose devices have allowances.
const ENA: &str = "ena";

/// Reads the counters now and then.
pub struct Reader {
    /// The namespace that the agent runs in.
    own: u32,
    /// Read these only, and the agent's own; all if empty.
    wanted: Vec<u32>,
    /// A process of each of the others.
    processes: BTreeMap<u32, PathBuf>,
    searched: Option<Moment>,
    devices: Vec<String>,
    /// When they were read last.
    pub read_at: Option<Moment>,
    /// What was read then.
    pub netns: BTreeMap<u32, NetnsCounters>,
    /// Those of the devices.
    pub host: HostCounters,
}

impl Reader {
    /// One that reads the namespaces with these inode numbers, or all if there are none, and always
    /// the agent's own.
    pub fn new(wanted: &[u32]) -> Self {
        Self {
            own: inode(Path::new("/proc/thread-self/ns/net")).unwrap_or(0),
            wanted: wanted.to_vec(),
            processes: BTreeMap::new(),
            searched: None,
            read_at: None,
            devices: Vec::new(),
            netns: BTreeMap::new(),
            host: HostCounters::default(),
        }
    }

    /// The namespace that the agent runs in.
    pub const fn own(&self) -> u32 {
        self.own
    }

    /// Reads again if that is due or `at_once`.
    pub fn refresh(&mut self, now: Moment, at_once: bool) {
        if is_due(self.searched, now, SEARCH_EVERY) {
            self.searched = Some(now);
            self.processes = search(Path::new("/proc"), self.own, &self.wanted);
            self.devices = devices(Path::new("/sys/class/net"), ENA);
        }
        if at_once || is_due(self.read_at, now, READ_EVERY) {
            self.read_at = Some(now);
            self.read();
        }
    }

    fn read(&mut self) {
        let max = number("/proc/sys/net/netfilter/nf_conntrack_max");
        let mut all = BTreeMap::new();
        if let Some(mut own) = of_process(Path::new("/proc/thread-self")) {
            own.conntrack_count = own
                .conntrack_count
                .or_else(|| number("/proc/sys/net/netfilter/nf_conntrack_count"));
            all.insert(self.own, own);
        }
        for (netns, process) in &self.processes {
            // The process may be gone, and its number another one's.
            if inode(&process.join("ns/net")) == Some(*netns)
                && let Some(counters) = of_process(process)
            {
                all.insert(*netns, counters);
            }
        }
        // The limit is one for all namespaces (`nf_conntrack_max`).
        for counters in all.values_mut() {
            counters.conntrack_max = max;
        }
        self.netns = all;
        self.host = HostCounters::default();
        for device in &self.devices {
            match ethtool::statistics(device) {
                Ok(statistics) => add_up(&mut self.host, &statistics),
                Err(error) => debug!("statistics of {device}: {error}"),
            }
        }
    }
}

fn is_due(last: Option<Moment>, now: Moment, every: Duration) -> bool {
    last.is_none_or(|last| now.since(last) >= every)
}

fn inode(path: &Path) -> Option<u32> {
    u32::try_from(fs::metadata(path).ok()?.ino()).ok()
}

fn number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// One process of each namespace other than `own`.
fn search(proc: &Path, own: u32, wanted: &[u32]) -> BTreeMap<u32, PathBuf> {
    let mut found = BTreeMap::new();
    let Ok(entries) = fs::read_dir(proc) else {
        return found;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let is_process = name.as_encoded_bytes().iter().all(u8::is_ascii_digit);
        if !is_process {
            continue;
        }
        let path = entry.path();
        let Some(netns) = inode(&path.join("ns/net")) else {
            continue;
        };
        let is_wanted = wanted.is_empty() || wanted.contains(&netns);
        if netns != own && is_wanted && !found.contains_key(&netns) {
            if found.len() >= NAMESPACES {
                debug!("more than {NAMESPACES} network namespaces: no counters of the others");
                break;
            }
            found.insert(netns, path);
        }
    }
    found
}

/// The counters of a process's network namespace; `None` if it is gone.
fn of_process(process: &Path) -> Option<NetnsCounters> {
    let file = |name: &str| fs::read_to_string(process.join("net").join(name));
    let mut counters = NetnsCounters::default();
    pairs(&file("netstat").ok()?, &mut counters);
    pairs(&file("snmp").ok()?, &mut counters);
    if let Ok(text) = file("sockstat") {
        sockstat(&text, &mut counters);
    }
    if let Ok(text) = file("stat/nf_conntrack") {
        conntrack(&text, &mut counters);
    }
    Some(counters)
}

/// Lines in pairs, names above values: `TcpExt: A B` and `TcpExt: 1 2`. Names come and go and change
/// their places between kernels.
fn pairs(text: &str, counters: &mut NetnsCounters) {
    let mut lines = text.lines();
    while let (Some(names), Some(values)) = (lines.next(), lines.next()) {
        let (Some((group, names)), Some((other, values))) =
            (names.split_once(':'), values.split_once(':'))
        else {
            return;
        };
        if group != other {
            return;
        }
        for (name, value) in names.split_whitespace().zip(values.split_whitespace()) {
            if let Some(slot) = counters.slot(&format!("{group} {name}")) {
                *slot = value.parse().ok();
            }
        }
    }
}

/// Lines of names and values by turns: `TCP: inuse 5 orphan 0 tw 2`.
fn sockstat(text: &str, counters: &mut NetnsCounters) {
    for (group, rest) in text.lines().filter_map(|line| line.split_once(':')) {
        let words: Vec<&str> = rest.split_whitespace().collect();
        for pair in words.chunks_exact(2) {
            if let Some(slot) = counters.slot(&format!("sockstat {group} {}", pair[0])) {
                *slot = pair[1].parse().ok();
            }
        }
    }
}

/// A line of names, then one line for each CPU in hexadecimal. `entries` is the whole table's in each
/// of them (`ct_cpu_seq_show`).
fn conntrack(text: &str, counters: &mut NetnsCounters) {
    let mut lines = text.lines();
    let Some(names) = lines.next() else { return };
    let names: Vec<&str> = names.split_whitespace().collect();
    for line in lines {
        for (name, value) in names.iter().zip(line.split_whitespace()) {
            let Ok(value) = u64::from_str_radix(value, 16) else {
                continue;
            };
            if *name == "entries" {
                counters.conntrack_count = Some(value);
            } else if let Some(slot) = counters.slot(&format!("nf_conntrack {name}")) {
                *slot = Some(slot.unwrap_or(0) + value);
            }
        }
    }
}

/// Network devices of a driver.
fn devices(class: &Path, driver: &str) -> Vec<String> {
    let Ok(entries) = fs::read_dir(class) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter(|entry| {
            fs::read_link(entry.path().join("device/driver"))
                .is_ok_and(|link| link.file_name().is_some_and(|name| name == driver))
        })
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect()
}

fn add_up(host: &mut HostCounters, statistics: &[(String, u64)]) {
    for (name, value) in statistics {
        if let Some(slot) = host.slot(name) {
            *slot = Some(slot.unwrap_or(0) + value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NETSTAT: &str = "\
TcpExt: SyncookiesSent TW ListenOverflows ListenDrops TCPReqQFullDrop
TcpExt: 3 99 5 7 11
IpExt: InNoRoutes InOctets
IpExt: 0 1234
";
    const SNMP: &str = "\
Ip: Forwarding DefaultTTL
Ip: 1 64
Tcp: RtoAlgorithm RtoMin MaxConn AttemptFails RetransSegs OutRsts OutSegs
Tcp: 1 200 -1 21 34 55 89
";

    #[test]
    fn counters_are_found_by_name() {
        let mut counters = NetnsCounters::default();
        pairs(NETSTAT, &mut counters);
        pairs(SNMP, &mut counters);
        sockstat(
            "sockets: used 26\nTCP: inuse 1 orphan 0 tw 150 alloc 1 mem 0\nUDP: inuse 9\n",
            &mut counters,
        );
        conntrack(
            "entries  clashres found insert_failed drop\n0000001f 0 0 00000002 0000000a\n\
             0000001f 0 0 00000001 00000001\n",
            &mut counters,
        );
        let expected = NetnsCounters {
            syncookies_sent: Some(3),
            listen_overflows: Some(5),
            listen_drops: Some(7),
            req_q_full_drop: Some(11),
            attempt_fails: Some(21),
            retrans_segs: Some(34),
            out_rsts: Some(55),
            out_segs: Some(89),
            time_wait: Some(150),
            conntrack_count: Some(31),
            conntrack_insert_failed: Some(3),
            conntrack_drop: Some(11),
            ..NetnsCounters::default()
        };
        assert_eq!(counters, expected);
    }

    #[test]
    fn odd_text_is_not_misread() {
        let mut counters = NetnsCounters::default();
        pairs("TcpExt: ListenDrops\nIpExt: 4\n", &mut counters);
        pairs("TcpExt: ListenDrops", &mut counters);
        pairs("no colon\nnone here\n", &mut counters);
        pairs("TcpExt: ListenDrops\nTcpExt: many\n", &mut counters);
        sockstat("TCP: tw", &mut counters);
        conntrack("", &mut counters);
        conntrack("drop\nxyz\n", &mut counters);
        assert_eq!(counters, NetnsCounters::default());
    }

    #[test]
    fn this_kernel_has_them() {
        let counters = of_process(Path::new("/proc/thread-self")).unwrap();
        assert!(counters.listen_drops.is_some());
        assert!(counters.out_segs.is_some());
        assert!(counters.time_wait.is_some());
        assert!(of_process(Path::new("/proc/0")).is_none());
    }

    #[test]
    fn one_process_of_each_other_namespace_is_found() {
        let own = inode(Path::new("/proc/thread-self/ns/net")).unwrap();
        let others = search(Path::new("/proc"), own, &[]);
        assert!(!others.contains_key(&own));
        // Seen from another namespace, this process's own is found.
        let from_elsewhere = search(Path::new("/proc"), 0, &[own]);
        assert_eq!(from_elsewhere.keys().collect::<Vec<_>>(), [&own]);
    }

    #[test]
    fn it_reads_now_and_then() {
        let mut reader = Reader::new(&[]);
        let now = Moment(1_000_000_000_000);
        let later = |seconds| now + Duration::from_secs(seconds);
        reader.refresh(now, false);
        assert!(reader.netns.contains_key(&reader.own()));
        reader.netns.clear();
        reader.refresh(later(4), false);
        assert!(reader.netns.is_empty());
        assert_eq!(reader.read_at, Some(now));
        reader.refresh(later(5), false);
        assert!(!reader.netns.is_empty());
        reader.netns.clear();
        reader.refresh(later(6), true);
        assert!(!reader.netns.is_empty());
        assert_eq!(reader.read_at, Some(later(6)));
    }

    #[test]
    fn allowances_of_several_devices_add_up() {
        let mut host = HostCounters::default();
        let device = [
            ("conntrack_allowance_exceeded".to_owned(), 5),
            ("queue_0_tx_cnt".to_owned(), 1000),
        ];
        add_up(&mut host, &device);
        add_up(&mut host, &device);
        assert_eq!(host.ena_conntrack_allowance, Some(10));
        assert_eq!(host.ena_pps_allowance, None);
    }

    #[test]
    fn devices_are_found_by_driver() {
        let root = tempfile::tempdir().unwrap();
        for (device, driver) in [("eth0", "ena"), ("eth1", "virtio_net")] {
            let path = root.path().join(device).join("device");
            fs::create_dir_all(&path).unwrap();
            std::os::unix::fs::symlink(format!("/bus/drivers/{driver}"), path.join("driver"))
                .unwrap();
        }
        fs::create_dir(root.path().join("lo")).unwrap();
        assert_eq!(devices(root.path(), ENA), ["eth0"]);
    }
}
