//! Which compiler makes the eBPF objects.
//!
//! They need the library `core` compiled for `bpfel-unknown-none`, thus a compiler that accepts `-Z build-std` and has the
//! library's source beside it. rustup's nightly with the component rust-src is one. Debian's rustc is the other: its
//! package rust-web-src carries the source, and `RUSTC_BOOTSTRAP=1` opens the unstable options. Whichever it is, it must be
//! of the LLVM that bpf-linker was built with, because bpf-linker reads the compiler's bitcode.

use std::{
    fmt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Result, bail};

use crate::{packages, step};

/// The LLVM that setup builds bpf-linker with: that of Debian's packages rustc-web and llvm-22-dev.
pub const LLVM: u32 = 22;

/// Debian's compiler. Never looked up in `PATH`, where rustup's stands first.
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";

/// What `rustc --version --verbose` says of a compiler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// For example `1.96.0`.
    pub release: String,
    /// For example `22.1.8`.
    pub llvm: String,
}

impl Version {
    /// Reads the output of `rustc --version --verbose`. `None` if it names no release or no LLVM.
    fn parse(verbose: &str) -> Option<Self> {
        let field = |name: &str| {
            verbose
                .lines()
                .find_map(|line| line.strip_prefix(name))
                .map(|value| value.trim().to_owned())
        };
        Some(Self {
            release: field("release:")?,
            llvm: field("LLVM version:")?,
        })
    }

    /// The first number of the LLVM version. `None` if it does not start with a number.
    pub fn llvm_major(&self) -> Option<u32> {
        self.llvm.split('.').next()?.parse().ok()
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (LLVM {})", self.release, self.llvm)
    }
}

/// A compiler found on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiler {
    /// Its version and its LLVM.
    pub version: Version,
    /// Whether the source of `core` lies where its sysroot expects it.
    pub has_source: bool,
}

/// The compilers that could make eBPF objects, as far as they exist.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// rustup's toolchain `nightly`.
    pub nightly: Option<Compiler>,
    /// Debian's rustc.
    pub debian: Option<Compiler>,
}

/// The compiler chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Toolchain {
    /// rustup's toolchain `nightly` with the component rust-src.
    Nightly(Version),
    /// Debian's rustc with `RUSTC_BOOTSTRAP=1`.
    Debian(Version),
}

impl fmt::Display for Toolchain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nightly(version) => write!(f, "rustup's nightly {version}"),
            Self::Debian(version) => write!(f, "Debian's rustc {version}"),
        }
    }
}

/// The choice and, where the first choice was passed over, why.
#[derive(Debug, PartialEq, Eq)]
pub struct Choice {
    /// The compiler to use.
    pub toolchain: Toolchain,
    /// Why it is not rustup's nightly. `None` if it is, or if there is no nightly.
    pub passed_over: Option<String>,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.toolchain)?;
        match &self.passed_over {
            Some(reason) => write!(f, "; not rustup's nightly: {reason}"),
            None => Ok(()),
        }
    }
}

impl Found {
    /// Looks at the compilers on this machine.
    pub fn on_this_machine() -> Self {
        Self {
            nightly: inspect(|| {
                let mut rustc = Command::new("rustup");
                rustc.args(["run", "nightly", "rustc"]);
                rustc
            }),
            debian: inspect(|| Command::new(DEBIAN_RUSTC)),
        }
    }

    /// Chooses a compiler, or says what each of them lacks.
    pub fn choose(&self) -> Result<Choice, String> {
        let refused = match &self.nightly {
            Some(nightly) => match fault(nightly, "the component rust-src") {
                None => {
                    return Ok(Choice {
                        toolchain: Toolchain::Nightly(nightly.version.clone()),
                        passed_over: None,
                    });
                }
                Some(fault) => Some(fault),
            },
            None => None,
        };
        let debian = match &self.debian {
            Some(debian) => match fault(debian, "its library source") {
                None => {
                    let toolchain = Toolchain::Debian(debian.version.clone());
                    return Ok(Choice {
                        toolchain,
                        passed_over: refused,
                    });
                }
                Some(fault) => fault,
            },
            None => format!("there is no {DEBIAN_RUSTC}"),
        };
        let nightly = refused.unwrap_or_else(|| "rustup has none".to_owned());
        Err(format!("nightly: {nightly}; Debian's rustc: {debian}"))
    }
}

/// Why `compiler` cannot make eBPF objects here. `None` if it can.
fn fault(compiler: &Compiler, source: &str) -> Option<String> {
    if !compiler.has_source {
        Some(format!("{} lacks {source}", compiler.version.release))
    } else if compiler.version.llvm_major() != Some(LLVM) {
        Some(format!(
            "{} is not of LLVM {LLVM}, with which bpf-linker is built",
            compiler.version
        ))
    } else {
        None
    }
}

/// Asks a compiler for its version and its sysroot. `None` if it does not run.
fn inspect(rustc: impl Fn() -> Command) -> Option<Compiler> {
    let ask = |arguments: &[&str]| {
        let mut command = rustc();
        step::clean(&mut command);
        let output = command.args(arguments).stdin(Stdio::null()).output().ok()?;
        output
            .status
            .success()
            .then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let version = Version::parse(&ask(&["--version", "--verbose"])?)?;
    let sysroot = PathBuf::from(ask(&["--print", "sysroot"])?.trim());
    let has_source = sysroot.join("lib/rustlib/src/rust/library/core").is_dir();
    Some(Compiler {
        version,
        has_source,
    })
}

/// The compiler to use on this machine.
///
/// # Errors
/// If there is none, with what each lacks and how to get one.
pub fn choose() -> Result<Choice> {
    match Found::on_this_machine().choose() {
        Ok(choice) => Ok(choice),
        Err(lacking) => bail!(
            "no compiler here can make eBPF objects ({lacking})\n  remedy: `cargo xtask setup` on Debian ({}), or \
             `rustup toolchain install nightly --component rust-src` if that nightly is of LLVM {LLVM}",
            packages::COMPILER.join(", ")
        ),
    }
}

impl Toolchain {
    /// A cargo that builds for the kernel with this compiler and `linker`.
    ///
    /// Flags of the caller's environment are for the host's compiler and would break this one, so they are dropped.
    pub fn cargo(&self, linker: &Path) -> Command {
        let mut cargo = match self {
            Self::Nightly(_) => {
                let mut rustup = Command::new("rustup");
                rustup.args(["run", "nightly", "cargo"]);
                step::clean(&mut rustup);
                rustup
            }
            Self::Debian(_) => {
                let mut cargo = step::cargo();
                cargo.env("RUSTC", DEBIAN_RUSTC).env("RUSTC_BOOTSTRAP", "1");
                cargo
            }
        };
        for inherited in [
            "RUSTFLAGS",
            "RUSTC_WRAPPER",
            "RUSTC_WORKSPACE_WRAPPER",
            "CARGO_BUILD_TARGET",
        ] {
            cargo.env_remove(inherited);
        }
        if matches!(self, Self::Nightly(_)) {
            cargo.env_remove("RUSTC");
        }
        // The encoded form wins over every other source of flags and allows blanks in the linker's path.
        let flags = [
            "-Cdebuginfo=2",
            &format!("-Clinker={}", linker.display()),
            "-Clink-arg=--btf",
        ]
        .join("\x1f");
        cargo.env("CARGO_ENCODED_RUSTFLAGS", flags);
        cargo
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STABLE: &str = "rustc 1.95.0 (59807616e 2026-04-14)\nbinary: rustc\ncommit-hash: 59807616e1fa\n\
                          commit-date: 2026-04-14\nhost: x86_64-unknown-linux-gnu\nrelease: 1.95.0\nLLVM version: 22.1.2\n";

    fn compiler(llvm: &str, has_source: bool) -> Option<Compiler> {
        Some(Compiler {
            version: Version {
                release: "1.97.0-nightly".into(),
                llvm: llvm.into(),
            },
            has_source,
        })
    }

    #[test]
    fn version_is_read_from_verbose_output() {
        let version = Version::parse(STABLE).unwrap();
        assert_eq!(
            version,
            Version {
                release: "1.95.0".into(),
                llvm: "22.1.2".into()
            }
        );
        assert_eq!(version.llvm_major(), Some(22));
    }

    #[test]
    fn version_without_llvm_is_none() {
        assert_eq!(Version::parse("rustc 1.95.0\nrelease: 1.95.0\n"), None);
        assert_eq!(Version::parse(""), None);
    }

    #[test]
    fn nightly_with_source_is_taken_first() {
        let found = Found {
            nightly: compiler("22.1.4", true),
            debian: compiler("22.1.8", true),
        };
        let choice = found.choose().unwrap();
        assert!(matches!(choice.toolchain, Toolchain::Nightly(_)));
        assert_eq!(choice.passed_over, None);
    }

    #[test]
    fn nightly_without_source_is_passed_over_and_named() {
        let found = Found {
            nightly: compiler("22.1.4", false),
            debian: compiler("22.1.8", true),
        };
        let choice = found.choose().unwrap();
        assert!(matches!(choice.toolchain, Toolchain::Debian(_)));
        assert!(choice.passed_over.unwrap().contains("rust-src"));
    }

    #[test]
    fn nightly_of_another_llvm_is_passed_over_and_named() {
        let found = Found {
            nightly: compiler("23.0.0", true),
            debian: compiler("22.1.8", true),
        };
        let choice = found.choose().unwrap();
        assert!(matches!(choice.toolchain, Toolchain::Debian(_)));
        assert!(choice.passed_over.unwrap().contains("LLVM 23.0.0"));
    }

    #[test]
    fn without_a_usable_compiler_each_lack_is_named() {
        let lacking = Found {
            nightly: None,
            debian: compiler("19.1.7", true),
        }
        .choose()
        .unwrap_err();
        assert!(
            lacking.contains("rustup has none") && lacking.contains("LLVM 19.1.7"),
            "{lacking}"
        );
        let lacking = Found {
            nightly: compiler("22.1.4", false),
            debian: None,
        }
        .choose()
        .unwrap_err();
        assert!(
            lacking.contains("rust-src") && lacking.contains("/usr/bin/rustc"),
            "{lacking}"
        );
    }

    #[test]
    fn inherited_flags_do_not_reach_the_kernel_build() {
        let version = Version {
            release: "1.96.0".into(),
            llvm: "22.1.8".into(),
        };
        let cargo = Toolchain::Debian(version).cargo(Path::new("/a folder/bpf-linker"));
        let value = |name: &str| {
            cargo
                .get_envs()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| value)
        };
        assert_eq!(value("RUSTFLAGS"), Some(None));
        assert_eq!(
            value("CARGO_ENCODED_RUSTFLAGS").flatten().unwrap(),
            "-Cdebuginfo=2\x1f-Clinker=/a folder/bpf-linker\x1f-Clink-arg=--btf"
        );
    }
}
