//! Counts TIME_WAIT sockets five times a second in every host of a lab.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::host::Host;
use crate::process::lock;
use crate::truth::{TimeWaitKey, TimeWaitSample};

const INTERVAL: Duration = Duration::from_millis(200);
/// Half an hour of samples; a lab lives much shorter.
const KEPT: usize = 9_000;

/// What was sampled in one host.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sampled {
    pub(crate) peak: BTreeMap<IpAddr, usize>,
    pub(crate) peak_by_service: BTreeMap<TimeWaitKey, usize>,
    pub(crate) samples: Vec<TimeWaitSample>,
}

/// The sampling thread; ends when dropped.
#[derive(Debug)]
pub(crate) struct Sampler {
    results: Arc<Mutex<BTreeMap<String, Sampled>>>,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Sampler {
    /// Samples the hosts in `hosts` (it may grow) until the sampler is dropped.
    pub(crate) fn start(hosts: Arc<Mutex<Vec<Host>>>, born: Instant) -> Self {
        let results = Arc::new(Mutex::new(BTreeMap::new()));
        let (stop, stopped) = channel::<()>();
        let shared = Arc::clone(&results);
        let thread = std::thread::spawn(move || {
            while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                let now: Vec<Host> = lock(&hosts).clone();
                for host in now {
                    sample(&host, born, &mut lock(&shared));
                }
            }
        });
        Self {
            results,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    pub(crate) fn of(&self, host: &str) -> Sampled {
        lock(&self.results).get(host).cloned().unwrap_or_default()
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn sample(host: &Host, born: Instant, results: &mut BTreeMap<String, Sampled>) {
    // Reading the table walks the machine's whole connection hash: only where there is something.
    let Ok(stat) = host.sockstat() else { return };
    let at = born.elapsed();
    let counts = match stat.get("TCP.tw") {
        0 => BTreeMap::new(),
        _ => match host.tcp_states() {
            Ok(table) => table.time_wait(),
            Err(_) => return,
        },
    };
    let sampled = results.entry(host.name().to_owned()).or_default();
    let mut by_remote: BTreeMap<IpAddr, usize> = BTreeMap::new();
    for ((remote, local_port), count) in &counts {
        *by_remote.entry(*remote).or_insert(0) += count;
        let key = TimeWaitKey {
            remote: *remote,
            local_port: *local_port,
        };
        let peak = sampled.peak_by_service.entry(key).or_insert(0);
        *peak = (*peak).max(*count);
    }
    for (remote, count) in &by_remote {
        let peak = sampled.peak.entry(*remote).or_insert(0);
        *peak = (*peak).max(*count);
    }
    if sampled.samples.len() < KEPT {
        sampled.samples.push(TimeWaitSample { at, by_remote });
    }
}
