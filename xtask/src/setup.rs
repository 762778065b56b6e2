//! `cargo xtask setup`: installs what is missing, and only that. Typing it again does nothing.

use std::{
    env,
    ops::BitOr,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context, Result, bail};

use crate::{
    bpf_linker,
    packages::{self, Missing, lacks_file, lacks_program},
    paths::Paths,
    step::{self, Elapsed, say},
    toolchain::{self, Found, LLVM},
    tools,
};

/// What a command needs, as a set.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Needs(u8);

impl Needs {
    /// Nothing.
    pub const NOTHING: Self = Self(0);
    /// Building the eBPF objects and the agent.
    pub const BUILD: Self = Self(1);
    /// rustfmt and clippy.
    pub const LINTS: Self = Self(2);
    /// The lab of network namespaces and its receivers.
    pub const LAB: Self = Self(4);
    /// Compiling the fuzz targets.
    pub const FUZZ: Self = Self(8);
    /// Virtual machines with other kernels.
    pub const VM: Self = Self(16);
    /// All of these: what `setup` sees to.
    pub const ALL: Self = Self(31);
    /// The programs that the benchmark is held against.
    pub const RIVALS: Self = Self(32);

    /// Whether all of `other` is needed.
    pub fn contain(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl BitOr for Needs {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Options of `cargo xtask setup`.
#[derive(clap::Args)]
pub struct Args {
    /// Only what `cargo xtask build` and `run` need, not what the tests need
    #[arg(long)]
    build_only: bool,
}

/// Runs `cargo xtask setup`.
///
/// # Errors
/// If something is missing and cannot be installed.
pub fn command(paths: &Paths, args: &Args) -> Result<()> {
    ensure(
        paths,
        if args.build_only {
            Needs::BUILD
        } else {
            Needs::ALL
        },
    )
}

/// Sees to it that what `needs` names is there.
///
/// # Errors
/// If something is missing and cannot be installed: what, and the remedy.
pub fn ensure(paths: &Paths, needs: Needs) -> Result<()> {
    if needs == Needs::NOTHING {
        return Ok(());
    }
    let start = Instant::now();
    let missing = missing_packages(paths, needs);
    if !missing.is_empty() {
        say!("setup: missing: {}", packages::list(&missing));
        packages::install(paths, &missing)?;
        let missing = missing_packages(paths, needs);
        if !missing.is_empty() {
            bail!(
                "still missing after installing the packages: {}",
                packages::list(&missing)
            );
        }
    }
    if needs.contain(Needs::BUILD) {
        say!("setup: eBPF compiler: {}", toolchain::choose()?);
        ensure_linker(paths)?;
    }
    if needs.contain(Needs::LINTS) {
        ensure_component(paths, "rustfmt", "fmt")?;
        ensure_component(paths, "clippy", "clippy")?;
    }
    if needs.contain(Needs::LAB) {
        tools::ensure(paths)?;
    }
    say!("setup: complete in {}", Elapsed(start.elapsed()));
    Ok(())
}

/// What packages must bring for `needs`.
fn missing_packages(paths: &Paths, needs: Needs) -> Vec<Missing> {
    let mut missing = Vec::new();
    if needs.contain(Needs::BUILD) {
        missing.extend(lacks_program("cc", &["gcc", "libc6-dev"]));
        if let Err(lacking) = Found::on_this_machine().choose() {
            missing.push(Missing {
                what: format!("a compiler for eBPF ({lacking})"),
                packages: packages::COMPILER,
            });
        }
        if bpf_linker::find(paths).is_err() {
            let llvm = llvm_prefix();
            missing.extend(
                [
                    lacks_file(
                        &llvm.join("bin/llvm-config"),
                        "LLVM's development files",
                        packages::LLVM,
                    ),
                    lacks_file(&llvm.join("lib/libPolly.a"), "LLVM's Polly", packages::LLVM),
                    lacks_file(
                        Path::new("/usr/include/zstd.h"),
                        "zstd's development files",
                        packages::LLVM,
                    ),
                ]
                .into_iter()
                .flatten(),
            );
        }
    }
    if needs.contain(Needs::LAB) || needs.contain(Needs::VM) {
        missing.extend(lacks_program("ip", &["iproute2"]));
        missing.extend(lacks_program("nft", &["nftables"]));
        missing.extend(lacks_program("tcpdump", &["tcpdump"]));
        missing.extend(lacks_program("setpriv", &["util-linux"]));
    }
    if needs.contain(Needs::LAB) {
        missing.extend(lacks_program("systemd-analyze", &["systemd"]));
        missing.extend(tools::missing_packages(paths));
    }
    if needs.contain(Needs::RIVALS) {
        missing.extend(lacks_program("tshark", &["tshark"]));
        missing.extend(lacks_program("tcplife", &["libbpf-tools"]));
        missing.extend(lacks_program("tcpstates", &["libbpf-tools"]));
    }
    if needs.contain(Needs::VM) {
        missing.extend(lacks_program("qemu-system-x86_64", &["qemu-system-x86"]));
        missing.extend(lacks_program("depmod", &["kmod"]));
        missing.extend(lacks_program("tc", &["iproute2"]));
        missing.extend(lacks_program("strip", &["binutils"]));
        missing.extend(lacks_program("xz", &["xz-utils"]));
        missing.extend(lacks_program("lz4", &["lz4"]));
        missing.extend(lacks_program("zstd", &["zstd"]));
    }
    if needs.contain(Needs::FUZZ) && paths.fuzz().exists() {
        missing.extend(lacks_program("c++", &["g++"]));
    }
    missing
}

/// Where LLVM lies. The variable is the one that bpf-linker's build reads too.
fn llvm_prefix() -> PathBuf {
    env::var_os("LLVM_PREFIX").map_or_else(|| format!("/usr/lib/llvm-{LLVM}").into(), PathBuf::from)
}

/// Installs bpf-linker unless one that fits is there.
///
/// A first one goes where `cargo install` puts programs. One that does not fit may be somebody's for another project: it
/// stays, and ours goes into the work tree.
fn ensure_linker(paths: &Paths) -> Result<()> {
    let faults = match bpf_linker::find(paths) {
        Ok(linker) => {
            say!(
                "setup: bpf-linker: {} at {}",
                linker.version,
                linker.path.display()
            );
            return Ok(());
        }
        Err(faults) => faults,
    };
    let mut cargo = step::cargo();
    cargo
        .args([
            "install",
            "bpf-linker",
            "--version",
            &format!("~{}", bpf_linker::VERSION),
            "--locked",
            "--force",
        ])
        .args([
            "--no-default-features",
            "--features",
            &format!("llvm-{LLVM}"),
        ])
        .env("LLVM_PREFIX", llvm_prefix())
        .env(format!("LLVM_SYS_{LLVM}1_PREFIX"), llvm_prefix());
    // Flags and folders of the caller are for the workspace.
    for inherited in [
        "RUSTFLAGS",
        "CARGO_ENCODED_RUSTFLAGS",
        "CARGO_TARGET_DIR",
        "CARGO_BUILD_TARGET",
    ] {
        cargo.env_remove(inherited);
    }
    if faults.is_empty() {
        say!("setup: bpf-linker: missing, takes one to three minutes");
    } else {
        say!(
            "setup: bpf-linker: {}; building one that fits takes one to three minutes",
            faults.join("; ")
        );
        cargo.arg("--root").arg(paths.tools());
    }
    step::logged(
        "cargo install bpf-linker",
        &paths.log("bpf-linker"),
        &mut cargo,
    )
    .with_context(|| {
        format!(
            "bpf-linker does not build\n  remedy: see the lines above; it needs {}",
            packages::LLVM.join(", ")
        )
    })?;
    match bpf_linker::find(paths) {
        Ok(linker) => say!(
            "setup: bpf-linker: {} at {}",
            linker.version,
            linker.path.display()
        ),
        Err(faults) => bail!(
            "bpf-linker was built and does not fit: {}",
            faults.join("; ")
        ),
    }
    Ok(())
}

/// Adds a component to the Rust toolchain unless its cargo command runs.
fn ensure_component(paths: &Paths, component: &str, subcommand: &str) -> Result<()> {
    if runs(paths, subcommand) {
        return Ok(());
    }
    say!("setup: {component}: missing");
    let mut rustup = Command::new("rustup");
    step::clean(&mut rustup);
    let remedy = format!(
        "`cargo {subcommand}` does not run\n  remedy: install {component} for the Rust toolchain that cargo belongs to"
    );
    step::logged(
        &format!("rustup component add {component}"),
        &paths.log(component),
        rustup.args(["component", "add", component]),
    )
    .with_context(|| remedy.clone())?;
    // rustup may find a damaged component complete.
    if !runs(paths, subcommand) {
        bail!(remedy);
    }
    Ok(())
}

/// Whether `cargo subcommand` is there.
fn runs(paths: &Paths, subcommand: &str) -> bool {
    paths
        .cargo()
        .args([subcommand, "--version"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}
