//! What a guest gets: its first process, the programs and libraries of this machine that the tests use, and the jobs.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};

use super::{archive::Archive, jobs::Job, kernels};
use crate::{
    paths::{Paths, find_program},
    step,
};

/// Programs of this machine that the lab calls.
const PROGRAMS: &[&str] = &["ip", "nft", "tc", "tcpdump", "setpriv"];
/// Modules that the lab's networks need. Nothing loads them by itself in a guest.
pub const MODULES: &[&str] = &[
    "veth",
    "dummy",
    "bridge",
    "tun",
    "8021q",
    "ipip",
    "sit",
    "ip_gre",
    "sch_ingress",
    "cls_bpf",
    "tcp_diag",
    "nf_tables",
    "nf_tables_set",
    "nft_counter",
    "nft_objref",
    "nft_ct",
    "nft_nat",
    "nft_masq",
    "nft_redir",
    "nft_chain_nat",
    "nft_numgen",
    "nft_limit",
    "nft_log",
    "nft_reject",
    "nft_reject_inet",
    "nft_reject_ipv4",
    "nft_reject_ipv6",
    "nf_conntrack",
    "nf_conntrack_netlink",
];

/// How many times longer the tests wait than on a real machine.
const EMULATED: u32 = 4;

/// The programs that cargo built.
pub struct Built {
    /// Binaries of the package `tests` by name: its programs and its tests.
    binaries: Vec<(String, PathBuf)>,
}

impl Built {
    /// Builds the lab's programs and the tests of these names.
    ///
    /// # Errors
    /// If they do not build.
    pub fn new(paths: &Paths, tests: &[&str]) -> Result<Self> {
        let mut cargo = paths.lab_cargo();
        cargo.args(["test", "--package", "tuplewatch-tests", "--no-run"]);
        cargo.args(["--message-format", "json-render-diagnostics"]);
        for test in tests {
            cargo.args(["--test", test]);
        }
        let output = cargo
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .context("cannot start cargo")?;
        ensure!(output.status.success(), "the tests do not build");
        let mut binaries = Vec::new();
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            let message: serde_json::Value = serde_json::from_str(line)?;
            if let (Some(name), Some(path)) = (
                message["target"]["name"].as_str(),
                message["executable"].as_str(),
            ) {
                binaries.push((name.to_owned(), path.into()));
            }
        }
        Ok(Self { binaries })
    }

    fn find(&self, name: &str) -> Result<&Path> {
        self.binaries
            .iter()
            .find(|(found, _)| found == name)
            .map(|(_, path)| path.as_path())
            .with_context(|| format!("cargo did not build {name}"))
    }
}

/// The archive that all guests share.
///
/// # Errors
/// If something is missing.
pub fn shared(paths: &Paths, built: &Built, agent: &Path, tests: &[&str]) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for folder in ["dev", "proc", "sys", "tmp", "run", "out", "modules", "etc"] {
        archive.directory(Path::new(folder));
    }
    // tcpdump asks for the name of the user that it is to be.
    archive.bytes("/etc/passwd", 0o644, b"root:x:0:0:root:/:/bin/false\n");
    // The kernel opens it for the first process.
    archive.device("/dev/console", (5, 1));
    stripped(&mut archive, paths, built.find("guest")?, "/init")?;
    stripped(
        &mut archive,
        paths,
        built.find("lab-peer")?,
        "/bin/lab-peer",
    )?;
    stripped(&mut archive, paths, agent, "/bin/tuplewatch")?;
    for test in tests {
        stripped(&mut archive, paths, built.find(test)?, &at(test))?;
    }
    for name in PROGRAMS {
        let program = find_program(name).with_context(|| format!("no program {name}"))?;
        libraries(&mut archive, &program)?;
        archive.copy(&program, &format!("/bin/{name}"))?;
    }
    archive.copy(&paths.foreign_object(), "/foreign.o")?;
    archive.directory(&paths.root.join("tests"));
    let docs = paths.root.join("docs");
    let pages = fs::read_dir(&docs).with_context(|| docs.display().to_string())?;
    for page in pages.flatten().map(|page| page.path()) {
        if page.extension().is_some_and(|e| e == "md") {
            archive.copy(&page, &page.to_string_lossy())?;
        }
    }
    Ok(archive.finish())
}

/// The archive of one kernel: its modules and its jobs.
///
/// # Errors
/// If a module does not unpack.
pub fn own(modules: &[PathBuf], jobs: &[&Job], name: &str, patience: u32) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    let mut order = String::new();
    for path in modules {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        let file = file.split(".ko").next().unwrap_or_default().to_owned() + ".ko";
        archive.bytes(&format!("/modules/{file}"), 0o644, &kernels::module(path)?);
        order += &format!("{file}\n");
    }
    archive.bytes("/modules/order", 0o644, order.as_bytes());
    let lines: Vec<String> = jobs
        .iter()
        .map(|job| job.line(&at(job.test), patience))
        .collect();
    archive.bytes("/jobs", 0o644, (lines.join("\n") + "\n").as_bytes());
    let waits = EMULATED * patience;
    let environment = format!(
        "PATH=/bin\nHOME=/\nTMPDIR=/tmp\nRUST_BACKTRACE=0\nLAB_PATIENCE={waits}\nLAB_PEER=/bin/lab-peer\nTUPLEWATCH_BIN=/bin/tuplewatch\n\
         TUPLEWATCH_FOREIGN_OBJECT=/foreign.o\nTUPLEWATCH_KERNEL={name}\nTUPLEWATCH_OUT=/out\n"
    );
    archive.bytes("/environment", 0o644, environment.as_bytes());
    Ok(archive.finish())
}

fn at(test: &str) -> String {
    format!("/tests/{test}")
}

/// Adds a program of ours without its symbols, which are most of it, and the libraries that it needs.
fn stripped(archive: &mut Archive, paths: &Paths, program: &Path, to: &str) -> Result<()> {
    libraries(archive, program)?;
    let small = super::folder(paths).join(format!("stripped-{}", std::process::id()));
    let mut strip = Command::new("strip");
    strip.arg("--strip-all").arg("-o").arg(&small).arg(program);
    step::shown(&mut strip)?;
    let added = archive.copy(&small, to);
    fs::remove_file(&small).with_context(|| small.display().to_string())?;
    added
}

/// Adds the shared libraries of a program, where it looks for them.
fn libraries(archive: &mut Archive, program: &Path) -> Result<()> {
    let mut ldd = Command::new("ldd");
    step::clean(&mut ldd);
    let output = ldd.arg(program).output().context("cannot start ldd")?;
    let text = String::from_utf8_lossy(&output.stdout);
    if text.contains("not found") {
        bail!("{} lacks libraries:\n{text}", program.display());
    }
    for path in text.split_whitespace().filter(|word| word.starts_with('/')) {
        archive.copy(Path::new(path), path)?;
    }
    Ok(())
}
