//! One host of a lab: a network stack of its own.

use std::io::Write as _;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

use crate::netns::{Namespaces, die_with_parent};
use crate::process::{Proc, WeakProc, lock};
use crate::procnet::{self, NetCounters, TcpTable};
use crate::{holder, ioctl};

/// How long a command such as `ip` or `nft` may take.
const COMMAND_LIMIT: Duration = Duration::from_secs(30);

/// What a command printed.
#[derive(Debug, Clone)]
pub struct Output {
    /// How it ended.
    pub status: ExitStatus,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

#[derive(Debug)]
struct Inner {
    name: String,
    holder: Proc,
    /// Closing it tells the holder to end.
    _stdin: Mutex<Option<std::process::ChildStdin>>,
    namespaces: Arc<Namespaces>,
    running: Mutex<Vec<WeakProc>>,
}

/// A host: a network namespace (and a mount namespace with the matching /sys) held by a process.
///
/// Cheap to clone; the namespaces live until the lab and the last clone are gone.
#[derive(Debug, Clone)]
pub struct Host {
    inner: Arc<Inner>,
}

impl Host {
    /// Starts the holder process of a new, empty host with loopback up. Use [`crate::Lab::host`].
    pub(crate) fn start(name: &str) -> Result<Self> {
        let mut command = Command::new(peer_binary()?);
        command.arg("hold").stdin(Stdio::piped());
        die_with_parent(&mut command);
        let (holder, stdin) = Proc::start_with_stdin(&format!("host {name}"), command)?;
        if holder
            .find_stdout(0, COMMAND_LIMIT, |line| line == holder::READY)
            .is_none()
        {
            bail!("host {name} could not be made: {}", holder.describe());
        }
        let namespaces = Arc::new(
            Namespaces::of(holder.pid())
                .with_context(|| format!("host {name}: opening its namespaces"))?,
        );
        let host = Self {
            inner: Arc::new(Inner {
                name: name.to_owned(),
                holder,
                _stdin: Mutex::new(stdin),
                namespaces,
                running: Mutex::default(),
            }),
        };
        host.prepare()
            .with_context(|| format!("host {name}: first settings"))?;
        Ok(host)
    }

    /// Settings that make a lab quiet and fast: addresses usable at once, no router discovery, no
    /// reverse-path filter, and port choice by the kernel's defaults whatever this machine uses.
    fn prepare(&self) -> Result<()> {
        for (key, value) in [
            ("net.ipv6.conf.all.accept_dad", "0"),
            ("net.ipv6.conf.default.accept_dad", "0"),
            ("net.ipv6.conf.default.accept_ra", "0"),
            ("net.ipv6.conf.default.router_solicitations", "0"),
            ("net.ipv4.conf.all.rp_filter", "0"),
            ("net.ipv4.conf.default.rp_filter", "0"),
        ] {
            self.sysctl(key, value)?;
        }
        self.ip_batch("link set lo up\n")
    }

    /// The name given to [`crate::Lab::host`].
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The process id of the holder: `/proc/<pid>/ns/net` is the host's network namespace.
    #[must_use]
    pub fn holder_pid(&self) -> u32 {
        self.inner.holder.pid()
    }

    /// The path of the network namespace, for `ip netns`-like options.
    #[must_use]
    pub fn netns_path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/ns/net", self.holder_pid()))
    }

    /// The inode number of the network namespace (what `ls -Li` and BTF's `ns.inum` show).
    #[must_use]
    pub fn netns_inode(&self) -> u64 {
        self.inner.namespaces.inode()
    }

    /// Runs `work` on a new thread inside the host's namespaces.
    ///
    /// # Errors
    /// If the namespaces cannot be entered.
    pub fn in_ns<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        self.inner
            .namespaces
            .run(work)
            .with_context(|| format!("entering the namespaces of host {}", self.name()))
    }

    /// Runs a command in the host to its end and gives its output; a non-zero exit is an error.
    ///
    /// # Errors
    /// If it cannot be started, fails or takes more than 30 s.
    pub fn exec<I, S>(&self, program: &str, args: I) -> Result<Output>
    where
        I: IntoIterator<Item = S>,
        S: AsRef<std::ffi::OsStr>,
    {
        let mut command = Command::new(program);
        command.args(args);
        let output = self.exec_command(command, None)?;
        ensure!(
            output.status.success(),
            "{}: {program} failed ({}): {}{}",
            self.name(),
            output.status,
            output.stderr,
            output.stdout
        );
        Ok(output)
    }

    /// Runs a command in the host to its end, optionally with text on standard input.
    ///
    /// # Errors
    /// If it cannot be started or takes more than 30 s. A non-zero exit is *not* an error here.
    pub fn exec_command(&self, mut command: Command, input: Option<&str>) -> Result<Output> {
        let program = command.get_program().to_string_lossy().into_owned();
        command.stdin(if input.is_some() {
            Stdio::piped()
        } else {
            Stdio::null()
        });
        self.inner.namespaces.apply(&mut command);
        let (process, stdin) =
            Proc::start_with_stdin(&format!("{}: {program}", self.name()), command)?;
        if let (Some(text), Some(mut stdin)) = (input, stdin) {
            stdin
                .write_all(text.as_bytes())
                .with_context(|| format!("{}: writing to {program}", self.name()))?;
        }
        // The end of its output is noticed at once, the end of a process only by polling.
        process.find_stdout(0, COMMAND_LIMIT, |_| false);
        let status = process.wait(COMMAND_LIMIT)?;
        let join = |lines: Vec<String>| {
            lines
                .into_iter()
                .fold(String::new(), |text, line| text + &line + "\n")
        };
        Ok(Output {
            status,
            stdout: join(process.stdout()),
            stderr: join(process.stderr()),
        })
    }

    /// Starts a command inside the host; its output is collected line by line. It is killed with the
    /// handle, with the lab, or with the test.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn spawn(&self, name: &str, mut command: Command) -> Result<Proc> {
        command.stdin(Stdio::null());
        self.inner.namespaces.apply(&mut command);
        let process = Proc::start(&format!("{}: {name}", self.name()), command)?;
        let mut running = lock(&self.inner.running);
        running.retain(|process| !process.is_gone());
        running.push(process.downgrade());
        Ok(process)
    }

    /// Kills everything that [`Host::spawn`] started and the holder.
    pub(crate) fn end(&self) {
        for process in lock(&self.inner.running).drain(..) {
            process.kill();
        }
        self.inner.holder.kill9();
    }

    /// Runs `ip -batch` with these lines.
    ///
    /// # Errors
    /// If a line fails; the message shows which.
    pub fn ip_batch(&self, lines: &str) -> Result<()> {
        let mut command = Command::new("ip");
        command.args(["-batch", "-"]);
        self.feed(command, lines)
    }

    /// Runs `nft -f` with this rule set.
    ///
    /// # Errors
    /// If nftables refuses it; the message shows why.
    pub fn nft(&self, rules: &str) -> Result<()> {
        let mut command = Command::new("nft");
        command.args(["-f", "-"]);
        self.feed(command, rules)
    }

    fn feed(&self, command: Command, text: &str) -> Result<()> {
        let program = command.get_program().to_string_lossy().into_owned();
        let output = self.exec_command(command, Some(text))?;
        ensure!(
            output.status.success(),
            "{}: {program} failed: {}\ninput was:\n{text}",
            self.name(),
            output.stderr
        );
        Ok(())
    }

    /// Sets a sysctl of the host's namespace, e.g. `sysctl("net.ipv4.tcp_timestamps", 0)`.
    ///
    /// # Errors
    /// If the key does not exist in a network namespace or the value is refused.
    pub fn sysctl(&self, key: &str, value: impl std::fmt::Display) -> Result<()> {
        let path = format!("/proc/sys/{}", key.replace('.', "/"));
        let value = value.to_string();
        self.in_ns(|| std::fs::write(&path, &value))?
            .with_context(|| format!("{}: sysctl {key}={value}", self.name()))
    }

    /// Reads a sysctl of the host's namespace.
    ///
    /// # Errors
    /// If the key does not exist.
    pub fn read_sysctl(&self, key: &str) -> Result<String> {
        let path = format!("/proc/sys/{}", key.replace('.', "/"));
        let text = self
            .in_ns(|| std::fs::read_to_string(&path))?
            .with_context(|| format!("{}: reading sysctl {key}", self.name()))?;
        Ok(text.trim().to_owned())
    }

    /// Turns checksum, segmentation and receive offloads of an interface off.
    ///
    /// # Errors
    /// If the device does not know one of the requests.
    pub fn offloads_off(&self, interface: &str) -> Result<()> {
        self.in_ns(|| ioctl::offloads_off(interface))?
            .with_context(|| format!("{}: turning the offloads of {interface} off", self.name()))
    }

    pub(crate) fn is_link_running(&self, interface: &str) -> Result<bool> {
        self.in_ns(|| ioctl::is_running(interface))?
            .with_context(|| format!("{}: state of {interface}", self.name()))
    }

    /// Drops the RSTs that this host's kernel would send to TCP port `port` (a raw-socket peer that
    /// never answers). They are dropped before they count as sent.
    ///
    /// # Errors
    /// If nftables refuses the rule.
    pub fn silence_resets_to(&self, port: u16) -> Result<()> {
        self.nft(&format!(
            "table inet silent {{ chain out {{ type filter hook output priority 0; \
             tcp dport {port} tcp flags & rst == rst drop; }}; }}"
        ))
    }

    /// `/proc/net/snmp` of the host: counters by `Protocol` + `Name`, e.g. `TcpActiveOpens`.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn snmp(&self) -> Result<NetCounters> {
        self.counters("snmp")
    }

    /// `/proc/net/netstat` of the host, e.g. `TcpExtTCPSynRetrans`.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn netstat(&self) -> Result<NetCounters> {
        self.counters("netstat")
    }

    fn counters(&self, file: &str) -> Result<NetCounters> {
        Ok(NetCounters::parse(&self.proc_net(file)?))
    }

    /// `/proc/net/sockstat` (and `sockstat6`) of the host as `line.key` → value, e.g. `TCP.tw`.
    ///
    /// # Errors
    /// If the files cannot be read.
    pub fn sockstat(&self) -> Result<NetCounters> {
        Ok(NetCounters::parse_sockstat(
            &(self.proc_net("sockstat")? + &self.proc_net("sockstat6")?),
        ))
    }

    /// All TCP sockets of the host by state, TIME_WAIT also by remote address and local port.
    ///
    /// # Errors
    /// If `/proc/net/tcp` or `tcp6` cannot be read.
    pub fn tcp_states(&self) -> Result<TcpTable> {
        procnet::tcp_table(self.holder_pid())
            .with_context(|| format!("{}: reading the TCP tables", self.name()))
    }

    fn proc_net(&self, file: &str) -> Result<String> {
        let path = format!("/proc/{}/net/{file}", self.holder_pid());
        std::fs::read_to_string(&path).with_context(|| format!("{}: reading {path}", self.name()))
    }

    /// Adds a route: `route_via(Some(prefix), gateway)`, `None` for the default route.
    ///
    /// # Errors
    /// If the kernel refuses it.
    pub fn route_via(&self, prefix: Option<&str>, gateway: IpAddr) -> Result<()> {
        let family = if gateway.is_ipv4() { "-4" } else { "-6" };
        self.exec(
            "ip",
            [
                family,
                "route",
                "replace",
                prefix.unwrap_or("default"),
                "via",
            ]
            .into_iter()
            .map(str::to_owned)
            .chain([gateway.to_string()]),
        )
        .map(drop)
    }

    /// Makes the host forward IPv4 and IPv6.
    ///
    /// # Errors
    /// If the sysctls cannot be written.
    pub fn forward(&self) -> Result<()> {
        self.sysctl("net.ipv4.ip_forward", 1)?;
        self.sysctl("net.ipv6.conf.all.forwarding", 1)
    }

    /// A command that runs `lab-peer` with a subcommand.
    pub(crate) fn peer_command(subcommand: &str) -> Result<Command> {
        let mut command = Command::new(peer_binary()?);
        command.arg(subcommand);
        Ok(command)
    }
}

/// The path of `lab-peer`: `$LAB_PEER`, else beside or one above the running test binary.
fn peer_binary() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("LAB_PEER") {
        return Ok(path.into());
    }
    let own = std::env::current_exe().context("finding the running program")?;
    let found = own
        .ancestors()
        .skip(1)
        .take(2)
        .map(|directory| directory.join("lab-peer"))
        .find(|path| path.is_file());
    found.with_context(|| {
        format!(
            "lab-peer is neither beside {} nor one directory above: run `cargo build -p \
             tuplewatch-tests --bin lab-peer` with the same profile, or set LAB_PEER",
            own.display()
        )
    })
}
