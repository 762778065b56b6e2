//! Loads the eBPF object: layouts from BTF, sizes from the plan, and each hook on its own.

use std::{collections::BTreeMap, fmt, io, path::Path};

use aya::{
    Ebpf, EbpfLoader,
    maps::{HashMap, Map, MapData},
    programs::{Program, ProgramError},
};
use tracing::warn;
use tuplewatch_common::{handshake::Pending, idle::IdleReset, ways::WAYS};

use super::{
    HookStatus, Plan, Verdict,
    attach::{Attachments, InterfaceOptions},
    clock, diagnostics,
    exchanges::Exchanges,
    hooks::{load_classifiers, on_demand, tracepoint},
    object::OBJECT,
    recorder::{self, Ring},
    shared::Shared,
    skipped,
    spaces::Spaces,
    talks::Talks,
};
use crate::kernel_facts::{ABSENT, Hook, Layout, Resolved, Types, VMLINUX};

/// What the live source is asked to do.
#[derive(Clone, Debug)]
pub struct Options {
    /// Sizes of the maps.
    pub plan: Plan,
    /// Which interfaces.
    pub interfaces: InterfaceOptions,
    /// Restrict the socket hooks and the census to these network namespaces (inode numbers).
    pub netns: Vec<u32>,
    /// Look for HTTP/1 at the begin of data segments.
    pub http_sniff: bool,
    /// Count sizes and latencies of responses that cannot be read; which ones those are is known with
    /// `http_sniff` only.
    pub exchanges: bool,
    /// Load the programs with their diagnostics on.
    pub kernel_log: bool,
    /// Memory for the flight recorder's ring in bytes; `None`: nothing is recorded.
    pub recorder: Option<u64>,
}

/// Why the live source cannot start.
#[derive(Debug)]
pub enum LoadError {
    /// A right is missing.
    Permission(String),
    /// The object was refused.
    Object(String),
    /// Not one hook works.
    Nothing(Vec<HookStatus>),
}

impl LoadError {
    /// A right is missing: trying again helps nobody.
    #[must_use]
    pub fn is_permission(&self) -> bool {
        match self {
            Self::Permission(_) => true,
            Self::Object(_) => false,
            // Not of all hooks it is the system call that says so: without CAP_PERFMON it is the verifier
            // that refuses the packet hook.
            Self::Nothing(hooks) => hooks.iter().any(|hook| hook.why.contains(EPERM)),
        }
    }
}

/// How an error of a system call that lacks a right reads.
const EPERM: &str = "os error 1)";

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Permission(what) => write!(
                f,
                "{what}: run as root, or with CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN \
                 (`sudo tuplewatch run`; in a container: securityContext.capabilities)"
            ),
            Self::Object(what) => write!(f, "the kernel refuses the eBPF object: {what}"),
            Self::Nothing(hooks) => {
                writeln!(f, "none of the hooks can be attached:")?;
                for hook in hooks {
                    writeln!(f, "  {}: {}", hook.name, hook.detail())?;
                }
                write!(f, "`tuplewatch doctor` says what is missing; ")?;
                write!(f, "`tuplewatch replay` judges captures without any right")
            }
        }
    }
}

impl std::error::Error for LoadError {}

/// The loaded programs and their maps.
pub struct Kernel {
    pub(super) ebpf: Ebpf,
    pub(super) attachments: Attachments,
    hooks: Vec<HookStatus>,
    pub(super) logger: Option<aya_log::EbpfLogger<diagnostics::Forward>>,
    /// The census can run.
    pub(super) has_census: bool,
    pub(super) census: super::census::CensusState,
    pub(super) spaces: Spaces,
    /// Connections being opened.
    pub(super) pending: Shared<Pending>,
    /// HTTP/1 conversations, unless nobody looks for them.
    pub(super) talks: Option<Talks>,
    /// Sizes and latencies of responses, if a rule asks for them.
    pub(super) exchanges: Option<Exchanges>,
    pub(super) counters: super::counters::Reader,
    pub(super) conntrack: super::conntrack::Conntrack,
    recorder: Option<Ring>,
    /// When everything had been loaded and what was there before had been noted.
    pub(super) started_ns: u64,
    /// Idle connections that were reset since the last snapshot.
    pub(super) idle_resets: Vec<IdleReset>,
}

/// The tracepoint hooks and their programs.
pub(super) const TRACEPOINTS: [(Hook, &str); 4] = [
    (Hook::Lifecycle, "inet_sock_set_state"),
    (Hook::Retransmit, "tcp_retransmit_skb"),
    (Hook::SendReset, "tcp_send_reset"),
    (Hook::ReceiveReset, "tcp_receive_reset"),
];

/// What is lost without the packet hook.
pub const PACKET_LOSS: &str =
    "nothing on the wire is seen: bare ACKs at the responder, reuse intervals, pools";

/// Classifiers, by the name that also marks them on the interfaces.
pub(super) const CLASSIFIERS: [&str; 4] = [
    "tuplewatch_in",
    "tuplewatch_out",
    "tuplewatch_ip_in",
    "tuplewatch_ip_out",
];

impl Kernel {
    /// Loads and attaches everything that this kernel and these rights allow.
    ///
    /// # Errors
    /// [`LoadError`] if nothing at all can work.
    pub fn start(options: &Options) -> Result<Self, LoadError> {
        let mut kernel = Self::load(options)?;
        if kernel.has_census
            && let Err(error) = kernel.first_census()
        {
            warn!(
                "the first census failed: {error}; connections older than the agent are not known"
            );
        }
        kernel.started_ns = clock::monotonic_ns();
        kernel.refresh_interfaces();
        Ok(kernel)
    }

    /// Loads everything, and attaches all but the packet hook.
    pub(super) fn load(options: &Options) -> Result<Self, LoadError> {
        let mut hooks = Vec::new();
        let (resolved, others) = resolve(Path::new(VMLINUX), &mut hooks).unzip();
        let others = others.unwrap_or_default();
        let mut ebpf = load(options, resolved.as_ref().map(|r| &r.layout), &others)?;
        let recorder = recorder::open(&mut ebpf, options.recorder.is_some())
            .map_err(|e| LoadError::Object(format!("{e:#}")))?;
        let (spaces, pending) =
            prepare(&mut ebpf, options).map_err(|e| LoadError::Object(format!("{e:#}")))?;
        let talks = options.http_sniff.then(|| Talks::open(&mut ebpf));
        let talks = talks.transpose();
        let talks = talks.map_err(|e| LoadError::Object(format!("{e:#}")))?;
        let exchanges = options.exchanges.then(|| Exchanges::open(&mut ebpf));
        let exchanges = exchanges.transpose();
        let exchanges = exchanges.map_err(|e| LoadError::Object(format!("{e:#}")))?;
        let mut any = false;
        for (hook, program) in TRACEPOINTS {
            let state = match &resolved {
                Some(r) => tracepoint(&mut ebpf, hook, program, r),
                None => continue,
            };
            any |= state.verdict != Verdict::Off;
            hooks.push(state);
        }
        let mut has_census = false;
        if let Some(resolved) = &resolved {
            let state = on_demand(
                &mut ebpf,
                Hook::Census,
                &[
                    "census_listeners",
                    "census_established",
                    "census_seed",
                    "census_netns",
                    "stalled_again",
                ],
                resolved,
            );
            has_census = state.verdict != Verdict::Off;
            any |= has_census;
            hooks.push(state);
        }
        let attachments = match load_classifiers(&mut ebpf) {
            Ok(()) => {
                any = true;
                Attachments::new(options.interfaces.clone())
            }
            Err(error) => {
                hooks.push(HookStatus {
                    name: "packet".into(),
                    verdict: Verdict::Off,
                    why: error,
                    lost: PACKET_LOSS.into(),
                    remedy: "It needs CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN".into(),
                });
                Attachments::off()
            }
        };
        if !any {
            return Err(LoadError::Nothing(hooks));
        }
        let logger = options
            .kernel_log
            .then(|| diagnostics::start(&mut ebpf))
            .flatten();
        Ok(Self {
            ebpf,
            logger,
            attachments,
            hooks,
            has_census,
            census: super::census::CensusState::default(),
            spaces,
            pending,
            talks,
            exchanges,
            counters: super::counters::Reader::new(&options.netns),
            conntrack: super::conntrack::Conntrack::default(),
            recorder,
            started_ns: 0,
            idle_resets: Vec::new(),
        })
    }

    /// The verdict of each hook, and what it has missed so far.
    #[must_use]
    pub fn hooks(&self) -> Vec<HookStatus> {
        let mut hooks = self.hooks.clone();
        skipped::note(skipped::by_hook(&self.ebpf), &mut hooks);
        hooks.extend(self.attachments.status());
        hooks
    }

    /// Names of the hooked interfaces, and those that are not seen with the reason.
    #[must_use]
    pub fn interfaces(&self) -> (Vec<String>, Vec<(String, String)>) {
        self.attachments.interfaces()
    }

    /// Names of the hooked interfaces by their index, each with whether its other end is a guest of this
    /// host.
    #[must_use]
    pub fn interface_names(&self) -> BTreeMap<u32, (String, bool)> {
        self.attachments.names()
    }

    /// What the flight recorder keeps, if it is on.
    #[must_use]
    pub const fn recorder(&self) -> Option<&Ring> {
        self.recorder.as_ref()
    }

    /// Bytes that the maps take in the kernel, as the kernel itself reckons them (`memlock` of fdinfo).
    #[must_use]
    pub fn map_memory(&self) -> u64 {
        self.ebpf
            .maps()
            .filter_map(|(_, map)| data(map))
            .map(|map| memlock(map).unwrap_or(0))
            .sum()
    }

    /// The data of a hash map by name.
    pub(super) fn hash(&self, name: &str) -> io::Result<&MapData> {
        match self.ebpf.map(name) {
            Some(Map::HashMap(data)) => Ok(data),
            _ => Err(io::Error::other(format!(
                "the eBPF object has no hash map {name}"
            ))),
        }
    }
}

fn data(map: &Map) -> Option<&MapData> {
    match map {
        Map::Array(d) | Map::HashMap(d) | Map::PerCpuArray(d) | Map::RingBuf(d) | Map::Queue(d) => {
            Some(d)
        }
        _ => None,
    }
}

fn memlock(map: &MapData) -> Option<u64> {
    use std::os::fd::{AsFd as _, AsRawFd as _};
    let path = format!("/proc/self/fdinfo/{}", map.fd().as_fd().as_raw_fd());
    let text = std::fs::read_to_string(path).ok()?;
    text.lines()
        .find_map(|l| l.strip_prefix("memlock:"))
        .and_then(|n| n.trim().parse().ok())
}

/// What BTF tells besides layouts.
struct Others {
    /// The kernel has the helper `bpf_ktime_get_coarse_ns`.
    coarse_clock: bool,
    /// Number of the flag `SOCK_KEEPOPEN`, or [`ABSENT`].
    sock_keepopen: u32,
}

impl Default for Others {
    fn default() -> Self {
        Self {
            coarse_clock: false,
            sock_keepopen: ABSENT,
        }
    }
}

/// Layouts of the running kernel (without them only the packet hook works, which reads none), and the
/// rest.
fn resolve(path: &Path, hooks: &mut Vec<HookStatus>) -> Option<(Resolved, Others)> {
    match Types::load(path) {
        Ok(types) => {
            let coarse = types.enum_value("bpf_func_id", "BPF_FUNC_ktime_get_coarse_ns");
            let keep_open = types.enum_value("sock_flags", "SOCK_KEEPOPEN").ok();
            let others = Others {
                coarse_clock: coarse.is_ok(),
                sock_keepopen: keep_open
                    .and_then(|n| u32::try_from(n).ok())
                    .unwrap_or(ABSENT),
            };
            Some((Layout::resolve(&types), others))
        }
        Err(error) => {
            hooks.push(HookStatus {
                name: "socket hooks".into(),
                verdict: Verdict::Off,
                why: error.to_string(),
                lost: "without BTF nothing is known of sockets and processes".into(),
                remedy: "It needs a kernel with CONFIG_DEBUG_INFO_BTF".into(),
            });
            None
        }
    }
}

fn load(options: &Options, layout: Option<&Layout>, others: &Others) -> Result<Ebpf, LoadError> {
    let coarse_clock = u32::from(others.coarse_clock);
    let plan = &options.plan;
    let globals: Vec<(String, u32)> = layout
        .map(|l| {
            l.entries()
                .map(|(name, value)| (name.to_uppercase(), value))
                .collect()
        })
        .unwrap_or_default();
    let (hz, restrict) = (
        clock::ticks_per_second(),
        u32::from(!options.netns.is_empty()),
    );
    let log_level = diagnostics::level(options.kernel_log);
    // The rest of the table is for those whose port space is known.
    let strangers = plan.handshakes / 4 * 3;
    let (handshake_sets, socket_sets) = (plan.handshakes / WAYS, plan.open_sockets / WAYS);
    let ring = recorder::Size::of(options.recorder);
    let http_sniff = u32::from(options.http_sniff);
    let (talk_sets, looks) = if options.http_sniff {
        (plan.conversations / WAYS, plan.conversations * 4)
    } else {
        (1, 1)
    };
    let exchange_sets = if options.exchanges {
        plan.exchanges / WAYS
    } else {
        0
    };
    let mut loader = EbpfLoader::new();
    loader
        .override_global("COARSE_CLOCK", &coarse_clock, true)
        .override_global("HZ", &hz, true)
        .override_global("SOCK_KEEPOPEN", &others.sock_keepopen, true)
        .override_global("RESTRICT_NETNS", &restrict, true)
        .override_global("AYA_LOG_LEVEL", &log_level, true)
        .map_max_entries("AYA_LOGS", diagnostics::buffer(options.kernel_log))
        .override_global("STRANGERS_MAX", &strangers, true)
        .override_global("MEMORY_SETS", &plan.memory_sets, true)
        .override_global("HANDSHAKE_SETS", &handshake_sets, true)
        .override_global("SOCKET_SETS", &socket_sets, true)
        .override_global("RECORDER_SECTIONS", &ring.sections, true)
        .override_global("RECORDER_SLOTS", &ring.slots, true)
        .map_max_entries("RECORDER", ring.entries())
        .override_global("TALK_SETS", &talk_sets, true)
        .override_global("HTTP_SNIFF", &http_sniff, true)
        .override_global("LOOKS_LEN", &looks, true)
        .map_max_entries("LOOKS", looks)
        .map_max_entries("TALK_TAGS", talk_sets)
        .map_max_entries("TALKS", talk_sets)
        .override_global("EXCHANGE_SETS", &exchange_sets, true)
        .map_max_entries("EXCHANGE_TAGS", exchange_sets.max(1))
        .map_max_entries("EXCHANGES", exchange_sets.max(1))
        .map_max_entries("HANDSHAKES", plan.handshakes)
        .map_max_entries("HANDSHAKE_TAGS", handshake_sets)
        // Index 0 of both is never given out.
        .map_max_entries("SPACES", plan.port_spaces + 1)
        .map_max_entries("FREE_SPACES", plan.port_spaces + 1)
        .map_max_entries("SPACE_INDEX", plan.port_spaces + 1)
        .map_max_entries("BITMAPS", 2 * (plan.bitmaps + 1))
        .map_max_entries("FREE_BITMAPS", plan.bitmaps + 1)
        .map_max_entries("MEMORY", plan.memory_sets)
        .map_max_entries("OPEN_SOCKETS", plan.open_sockets)
        .map_max_entries("SOCKET_TAGS", socket_sets)
        .map_max_entries("OPENERS", plan.openers)
        .map_max_entries("CENSUS", plan.census)
        .map_max_entries("LISTENERS", plan.listeners)
        .map_max_entries("STALLED", plan.stalled)
        .map_max_entries("EVENTS", plan.ring);
    for (name, value) in &globals {
        loader.override_global(name, value, false);
    }
    loader.load(OBJECT).map_err(|error| {
        let text = chain(&error);
        if text.contains(EPERM) {
            LoadError::Permission(text)
        } else {
            LoadError::Object(text)
        }
    })
}

/// Fills the maps that hold settings, and opens those that are read without system calls.
fn prepare(ebpf: &mut Ebpf, options: &Options) -> anyhow::Result<(Spaces, Shared<Pending>)> {
    let mut netns: HashMap<_, u32, u8> = map_mut(ebpf, "NETNS")?.try_into()?;
    for inode in &options.netns {
        netns.insert(inode, 1, 0)?;
    }
    let pending = Shared::open(map_mut(ebpf, "HANDSHAKES")?)?;
    Ok((Spaces::open(ebpf)?, pending))
}

pub(super) fn map_mut<'a>(ebpf: &'a mut Ebpf, name: &str) -> anyhow::Result<&'a mut Map> {
    ebpf.map_mut(name)
        .ok_or_else(|| anyhow::anyhow!("the eBPF object has no map {name}"))
}

pub(super) fn find<'a, P>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut P, ProgramError>
where
    &'a mut P: TryFrom<&'a mut Program, Error = ProgramError>,
{
    ebpf.program_mut(name)
        .ok_or(ProgramError::NotLoaded)?
        .try_into()
}

/// An error with its causes, in one line; of a verifier's log only the end, which says why.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let more = cause.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        source = cause.source();
    }
    // What aya says before an empty log.
    if let Some(before) = text.trim_end().strip_suffix(". Verifier output:") {
        text.truncate(before.len());
    }
    const KEPT: usize = 600;
    let flat: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|l| !l.is_empty())
        .collect();
    let flat = flat.join(" | ");
    if flat.chars().count() > 2 * KEPT {
        let head: String = flat.chars().take(KEPT / 3).collect();
        let tail: Vec<char> = flat.chars().rev().take(KEPT).collect();
        format!("{head} … {}", tail.into_iter().rev().collect::<String>())
    } else {
        flat
    }
}
