//! The first process of a virtual machine that `cargo xtask vm` boots: mounts, loads modules, runs the jobs, reports,
//! and switches the machine off.
//!
//! The machine has neither disk nor network, only serial ports: what the jobs print goes to the second, how each ended
//! to the third, and the files they leave in [`OUT`] to the fourth. The first is the kernel's console.

use std::{
    ffi::CString,
    fs::{self, File},
    io::{self, Write as _},
    os::{fd::AsFd as _, unix::fs::symlink},
    path::Path,
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use rustix::{
    mount::{MountFlags, mount},
    process::{Resource, Rlimit, WaitOptions, setrlimit, wait},
    system::{RebootCommand, finit_module, reboot},
    termios::{OptionalActions, tcgetattr, tcsetattr},
};

const OUTPUT: &str = "/dev/ttyS1";
const STATUS: &str = "/dev/ttyS2";
const FILES: &str = "/dev/ttyS3";
/// Files here are given to the host.
const OUT: &str = "/out";
/// Modules in the order in which they are loaded, one file name a line.
const MODULES: &str = "/modules/order";
/// `name`, seconds it may take, program and arguments, with tabs between; one job a line.
const JOBS: &str = "/jobs";
/// `NAME=value`, one a line.
const ENVIRONMENT: &str = "/environment";

fn main() -> ExitCode {
    let is_first = std::process::id() == 1;
    let result = if is_first { begin() } else { work() };
    if let Err(error) = &result {
        report(&format!("fault {error:#}"));
    }
    if is_first {
        switch_off();
    }
    ExitCode::from(u8::from(result.is_err()))
}

/// The first process: prepares the machine, starts the second and buries whoever is left without a parent.
fn begin() -> Result<()> {
    mounts()?;
    for port in [OUTPUT, STATUS, FILES] {
        raw(port).with_context(|| port.to_owned())?;
    }
    report(&format!("boot {}", uptime()?));
    modules()?;
    loopback_up().context("setting lo up")?;
    let lots = Rlimit {
        current: Some(65_536),
        maximum: Some(65_536),
    };
    setrlimit(Resource::Nofile, lots)?;
    let unlimited = Rlimit {
        current: None,
        maximum: None,
    };
    setrlimit(Resource::Memlock, unlimited)?;
    report(&format!("ready {}", uptime()?));
    let worker = Command::new("/init")
        .spawn()
        .context("starting /init again")?;
    let worker = i32::try_from(worker.id())?;
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, _))) if pid.as_raw_nonzero().get() == worker => return Ok(()),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("waiting"),
        }
    }
}

/// The second process: runs the jobs one after the other and hands over their files.
fn work() -> Result<()> {
    let environment = fs::read_to_string(ENVIRONMENT).context(ENVIRONMENT)?;
    let environment: Vec<_> = environment
        .lines()
        .filter_map(|line| line.split_once('='))
        .collect();
    for line in fs::read_to_string(JOBS).context(JOBS)?.lines() {
        let parts: Vec<_> = line.split('\t').collect();
        let [name, seconds, program, arguments @ ..] = &parts[..] else {
            bail!("{JOBS} has the line {line:?}");
        };
        let limit = Duration::from_secs(seconds.parse()?);
        let port = File::options().write(true).open(OUTPUT)?;
        writeln!(&port, "\n== {name}")?;
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env_clear()
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(port.try_clone()?)
            .stderr(port);
        let start = Instant::now();
        let code = run(&mut command, limit).with_context(|| (*program).to_owned())?;
        report(&format!(
            "job {name} {code} {:.1}",
            start.elapsed().as_secs_f64()
        ));
        // Now, as a later job may bring the machine down.
        hand_over()?;
    }
    report(&format!("end {}", uptime()?));
    Ok(())
}

/// Runs a command and returns its exit code: 128 and the signal if one ended it, 124 if it took too long.
fn run(command: &mut Command, limit: Duration) -> Result<i32> {
    use std::os::unix::process::ExitStatusExt as _;
    let mut child = command.spawn()?;
    let end = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status
                .code()
                .unwrap_or_else(|| 128 + status.signal().unwrap_or(0)));
        }
        if Instant::now() > end {
            child.kill()?;
            child.wait()?;
            return Ok(124);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Writes a line for the host, and lets it pass if there is no way to.
fn report(line: &str) {
    let port = File::options().write(true).open(STATUS);
    let _ = port.and_then(|mut port| writeln!(port, "{line}"));
}

/// Gives the files of a job away: a line with name and length each, then the bytes.
fn hand_over() -> Result<()> {
    let mut port = File::options().write(true).open(FILES)?;
    for entry in fs::read_dir(OUT).context(OUT)? {
        let entry = entry?;
        let bytes = fs::read(entry.path())?;
        writeln!(
            port,
            "{} {}",
            entry.file_name().to_string_lossy(),
            bytes.len()
        )?;
        port.write_all(&bytes)?;
        fs::remove_file(entry.path())?;
    }
    Ok(())
}

fn mounts() -> Result<()> {
    let all = [
        ("proc", "/proc"),
        ("sysfs", "/sys"),
        ("devtmpfs", "/dev"),
        ("devpts", "/dev/pts"),
        ("tmpfs", "/run"),
        ("tmpfs", "/dev/shm"),
        ("securityfs", "/sys/kernel/security"),
        ("debugfs", "/sys/kernel/debug"),
        ("tracefs", "/sys/kernel/tracing"),
        ("bpf", "/sys/fs/bpf"),
        ("cgroup2", "/sys/fs/cgroup"),
    ];
    for (kind, point) in all {
        // Those of sysfs are there if the kernel has what they belong to.
        if !point.starts_with("/sys/") {
            fs::create_dir_all(point).with_context(|| point.to_owned())?;
        }
        if Path::new(point).is_dir() {
            mount(kind, point, kind, MountFlags::empty(), None)
                .with_context(|| format!("mounting {kind} on {point}"))?;
        }
    }
    symlink("/proc/self/fd", "/dev/fd").context("/dev/fd")
}

/// Makes a serial port pass every byte as it is.
fn raw(path: &str) -> Result<()> {
    let port = File::options().read(true).write(true).open(path)?;
    let mut settings = tcgetattr(&port)?;
    settings.make_raw();
    settings.set_speed(115_200)?;
    tcsetattr(&port, OptionalActions::Now, &settings)?;
    Ok(())
}

fn modules() -> Result<()> {
    let order = fs::read_to_string(MODULES).context(MODULES)?;
    for name in order.lines() {
        let file = File::open(Path::new("/modules").join(name)).with_context(|| name.to_owned())?;
        match finit_module(file.as_fd(), &CString::default(), 0) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error).with_context(|| format!("loading module {name}")),
        }
    }
    Ok(())
}

fn loopback_up() -> Result<()> {
    let status = Command::new("ip")
        .args(["link", "set", "lo", "up"])
        .status()?;
    if !status.success() {
        bail!("ip: {status}");
    }
    Ok(())
}

fn uptime() -> Result<String> {
    let text = fs::read_to_string("/proc/uptime")?;
    Ok(text.split(' ').next().unwrap_or_default().to_owned())
}

fn switch_off() {
    for port in [OUTPUT, STATUS, FILES] {
        if let Ok(port) = File::options().write(true).open(port) {
            let _ = rustix::termios::tcdrain(&port);
        }
    }
    let _ = io::stdout().flush();
    rustix::fs::sync();
    let _ = reboot(RebootCommand::PowerOff);
}
