//! QEMU: which one, and one run of a virtual machine.
//!
//! The machine is emulated (TCG): a stock kernel needs no nesting then. It has serial ports only, which every kernel has
//! built in: an archive goes in, bytes come out.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use super::{folder, suites::Suite};
use crate::{
    paths::{Paths, find_program},
    step::{self, say},
};

const PROGRAM: &str = "qemu-system-x86_64";
/// Debian 12's suite with a newer QEMU than its own.
const BACKPORTS: &str = "bookworm-backports";
/// Packages that make it up; the libraries are those of the machine's own QEMU.
const PACKAGES: [&str; 3] = ["qemu-system-x86", "qemu-system-common", "qemu-system-data"];
/// Before, a processor could run a breakpoint that another had already taken back out of the kernel's code, which is how
/// tracepoints are switched: the guest panics.
const PATCHES_SAFELY: (u32, u32) = (8, 1);

/// A QEMU that runs here.
pub struct Qemu {
    program: PathBuf,
    /// Where its firmware is.
    firmware: Vec<PathBuf>,
    /// Processors that it can give a guest.
    processors: u32,
}

/// The serial ports of a run, as files.
pub struct Ports {
    /// What the kernel says.
    pub console: PathBuf,
    /// What the jobs print.
    pub output: PathBuf,
    /// How each ended.
    pub status: PathBuf,
    /// What they leave.
    pub files: PathBuf,
}

impl Ports {
    /// In this folder.
    pub fn new(folder: &Path) -> Self {
        Self {
            console: folder.join("console"),
            output: folder.join("output"),
            status: folder.join("status"),
            files: folder.join("files"),
        }
    }
}

impl Qemu {
    /// The machine's own if it is new enough, else the newer one of Debian's backports, else the machine's own with one
    /// processor.
    ///
    /// # Errors
    /// If there is none at all.
    pub fn find(paths: &Paths) -> Result<Self> {
        let own = find_program(PROGRAM);
        if let Some(program) = &own
            && version(program, &[]).is_some_and(|version| version >= PATCHES_SAFELY)
        {
            return Ok(Self::new(program.clone(), Vec::new(), 2));
        }
        let root = folder(paths).join("qemu");
        let newer = || {
            let program = root.join("usr/bin").join(PROGRAM);
            let firmware = vec![root.join("usr/share/qemu"), "/usr/share/seabios".into()];
            let version = version(&program, &firmware)?;
            (version >= PATCHES_SAFELY).then(|| Self::new(program, firmware, 2))
        };
        if let Some(found) = newer() {
            return Ok(found);
        }
        let fetched = fetch(paths, &root);
        if let Some(found) = newer() {
            return Ok(found);
        }
        let why = fetched.err().map_or_else(
            || "it does not run here".to_owned(),
            |error| format!("{error:#}"),
        );
        say!("vm: no QEMU of 8.1 or newer from {BACKPORTS}: {why}; guests get one processor");
        let program =
            own.with_context(|| format!("{PROGRAM} is missing\n  remedy: `cargo xtask setup`"))?;
        Ok(Self::new(program, Vec::new(), 1))
    }

    fn new(program: PathBuf, firmware: Vec<PathBuf>, processors: u32) -> Self {
        Self {
            program,
            firmware,
            processors,
        }
    }

    /// Runs a machine, whose kernel gets these parameters too, until it switches itself off.
    ///
    /// # Errors
    /// If it takes longer than `limit`, or QEMU fails.
    pub fn run(
        &self,
        (kernel, parameters): (&Path, &str),
        archive: &Path,
        ports: &Ports,
        limit: Duration,
    ) -> Result<()> {
        let said = ports.console.with_extension("qemu");
        let mut command = Command::new(&self.program);
        step::clean(&mut command);
        for folder in &self.firmware {
            command.arg("-L").arg(folder);
        }
        command
            .args(["-accel", "tcg,thread=multi", "-cpu", "max,-la57"])
            .args(["-smp", &self.processors.to_string(), "-m", "1024"])
            .args(["-nodefaults", "-no-user-config", "-nographic"])
            .args(["-no-reboot", "-monitor", "none"])
            .arg("-kernel")
            .arg(kernel)
            .arg("-initrd")
            .arg(archive)
            .args(["-append", &format!("{} {parameters}", usual_parameters())])
            .stdin(Stdio::null())
            .stdout(File::create(&said).with_context(|| said.display().to_string())?)
            .stderr(File::options().append(true).open(&said)?);
        for port in [&ports.console, &ports.output, &ports.status, &ports.files] {
            fs::write(port, "").with_context(|| port.display().to_string())?;
            command
                .arg("-serial")
                .arg(format!("file:{}", port.display()));
        }
        let mut child = command
            .spawn()
            .with_context(|| format!("cannot start {}", self.program.display()))?;
        let end = Instant::now() + limit;
        loop {
            if let Some(status) = child.try_wait()? {
                if status.success() {
                    return Ok(());
                }
                let said = fs::read_to_string(&said).unwrap_or_default();
                bail!("QEMU: {status}: {}", said.trim());
            }
            if Instant::now() > end {
                child.kill()?;
                child.wait()?;
                bail!("it still ran after {} s", limit.as_secs());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// The kernel's command line.
fn usual_parameters() -> String {
    let always = "console=ttyS0 panic=-1 oops=panic tsc=reliable no_timer_check mitigations=off \
                  cryptomgr.notests rcupdate.rcu_expedited=1 nokaslr";
    match ticks_per_millisecond() {
        // On a busy machine the guest measures it wrong by up to ten times, and its clock runs as fast.
        Some(khz) => format!("{always} tsc_early_khz={khz}"),
        None => always.to_owned(),
    }
}

/// How fast this machine's time stamp counter runs, which is the one that an emulated guest reads.
#[cfg(target_arch = "x86_64")]
fn ticks_per_millisecond() -> Option<u64> {
    const WAIT: Duration = Duration::from_millis(100);
    let now = || {
        // SAFETY: RDTSC reads a register, which every x86-64 processor has.
        let ticks = unsafe { std::arch::x86_64::_rdtsc() };
        (Instant::now(), ticks)
    };
    let measure = |_| {
        let (begin, first) = now();
        std::thread::sleep(WAIT);
        let (end, last) = now();
        u64::try_from(u128::from(last - first) * 1_000_000 / (end - begin).as_nanos()).ok()
    };
    // The process may have been interrupted between the two readings of one.
    let mut all: Vec<u64> = (0..5).filter_map(measure).collect();
    all.sort_unstable();
    all.get(all.len() / 2).copied()
}

#[cfg(not(target_arch = "x86_64"))]
fn ticks_per_millisecond() -> Option<u64> {
    None
}

fn fetch(paths: &Paths, root: &Path) -> Result<()> {
    fs::create_dir_all(root).with_context(|| root.display().to_string())?;
    let suite = Suite::open(paths, Some(BACKPORTS))?;
    for package in PACKAGES {
        let archive = suite.download(paths, package, root)?;
        step::shown(
            Command::new("dpkg-deb")
                .arg("--extract")
                .arg(&archive)
                .arg(root),
        )?;
        fs::remove_file(&archive).with_context(|| archive.display().to_string())?;
    }
    Ok(())
}

/// Its version, if it starts.
fn version(program: &Path, firmware: &[PathBuf]) -> Option<(u32, u32)> {
    let mut command = Command::new(program);
    step::clean(&mut command);
    for folder in firmware {
        command.arg("-L").arg(folder);
    }
    let output = command.arg("--version").output().ok()?;
    parse(&String::from_utf8_lossy(&output.stdout))
}

fn parse(text: &str) -> Option<(u32, u32)> {
    let version = text.split("version ").nth(1)?;
    let mut numbers = version.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn the_version_is_found() {
        let text = "QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)\nCopyright";
        assert_eq!(parse(text), Some((10, 0)));
        assert_eq!(parse("no"), None);
    }
}
