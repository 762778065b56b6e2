//! Finding a bpf-linker whose LLVM is the compiler's.
//!
//! bpf-linker does not say which LLVM it was built with: neither `--version` nor `--help` does. Its file does: a
//! dynamically linked one names `libLLVM.so.22.1`, any other carries source paths of the crate `llvm-sys-221.0.1` (whose
//! version is LLVM's with the dot left out).

use std::{
    env, fs,
    path::PathBuf,
    process::{Command, Stdio},
};

use crate::{
    paths::{Paths, find_program},
    step,
    toolchain::LLVM,
};

/// The versions known to work. The recipe in `setup` is for these.
pub const VERSION: &str = "0.13";

/// A bpf-linker that runs here and fits.
#[derive(Debug)]
pub struct Linker {
    /// Its file.
    pub path: PathBuf,
    /// Its version, for example `0.13.0`.
    pub version: String,
}

/// Finds a bpf-linker that runs, is of [`VERSION`] and of [`LLVM`].
///
/// # Errors
/// What is wrong with each one found; empty if none was found.
pub fn find(paths: &Paths) -> Result<Linker, Vec<String>> {
    let mut faults = Vec::new();
    for path in candidates(paths) {
        match inspect(&path) {
            Ok(version) => return Ok(Linker { path, version }),
            Err(fault) => faults.push(format!("{} {fault}", path.display())),
        }
    }
    Err(faults)
}

/// Where setup installs for this work tree, then where `cargo install` does, then `PATH`.
fn candidates(paths: &Paths) -> Vec<PathBuf> {
    let cargo_home = env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cargo")));
    let mut files: Vec<PathBuf> = [Some(paths.tools()), cargo_home]
        .into_iter()
        .flatten()
        .map(|folder| folder.join("bin/bpf-linker"))
        .filter(|file| file.is_file())
        .chain(find_program("bpf-linker"))
        .collect();
    files.dedup();
    files
}

/// The version of the bpf-linker at `path`, or why it cannot be used.
fn inspect(path: &PathBuf) -> Result<String, String> {
    let mut command = Command::new(path);
    step::clean(&mut command);
    let output = command
        .arg("--version")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("does not start: {error}"))?;
    if !output.status.success() {
        let complaint = String::from_utf8_lossy(&output.stderr);
        return Err(format!(
            "does not run: {}",
            complaint.lines().next().unwrap_or("it prints nothing")
        ));
    }
    let version = parse_version(&String::from_utf8_lossy(&output.stdout))
        .ok_or("does not tell its version")?;
    if !is_of(&version, VERSION) {
        return Err(format!("is version {version}, not {VERSION}"));
    }
    let file = fs::read(path).map_err(|error| format!("cannot be read: {error}"))?;
    match llvm_major(&file) {
        Some(LLVM) => Ok(version),
        Some(other) => Err(format!("is built with LLVM {other}, not {LLVM}")),
        None => Err("does not tell its LLVM".to_owned()),
    }
}

/// `0.13.0` from `bpf-linker 0.13.0`.
fn parse_version(output: &str) -> Option<String> {
    let version = output.lines().next()?.strip_prefix("bpf-linker ")?.trim();
    version
        .starts_with(|c: char| c.is_ascii_digit())
        .then(|| version.to_owned())
}

/// Whether `version` is `series` or one of its patch releases.
fn is_of(version: &str, series: &str) -> bool {
    version
        .strip_prefix(series)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '-', '+']))
}

/// The LLVM major that a bpf-linker's file names. `None` if it names none.
fn llvm_major(file: &[u8]) -> Option<u32> {
    number_after(file, b"libLLVM.so.")
        .or_else(|| number_after(file, b"libLLVM-"))
        .or_else(|| number_after(file, b"llvm-sys-").map(|major_and_minor| major_and_minor / 10))
}

/// The decimal number at the first place in `file` where one follows `prefix`.
fn number_after(file: &[u8], prefix: &[u8]) -> Option<u32> {
    file.windows(prefix.len())
        .enumerate()
        .filter(|(_, window)| *window == prefix)
        .find_map(|(at, _)| {
            let rest = &file[at + prefix.len()..];
            let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
            std::str::from_utf8(&rest[..digits]).ok()?.parse().ok()
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_is_read() {
        assert_eq!(
            parse_version("bpf-linker 0.13.0\n").as_deref(),
            Some("0.13.0")
        );
        assert_eq!(parse_version("something else 1"), None);
        assert_eq!(parse_version("bpf-linker unknown"), None);
    }

    #[test]
    fn series_takes_patch_releases_only() {
        assert!(is_of("0.13.0", "0.13") && is_of("0.13.7", "0.13"));
        assert!(!is_of("0.130.0", "0.13") && !is_of("0.14.0", "0.13") && !is_of("0.1.3", "0.13"));
    }

    #[test]
    fn llvm_is_read_from_a_dynamically_linked_file() {
        assert_eq!(
            llvm_major(b"\x7fELF\0libLLVM.so.22.1\0libc.so.6\0"),
            Some(22)
        );
        assert_eq!(llvm_major(b"\0libLLVM-19.so.1\0"), Some(19));
        assert_eq!(
            llvm_major(b"\0libLLVM.so.\0 then libLLVM.so.21.1\0"),
            Some(21)
        );
    }

    #[test]
    fn llvm_is_read_from_a_statically_linked_file() {
        assert_eq!(
            llvm_major(b"/registry/llvm-sys-221.0.1/src/lib.rs"),
            Some(22)
        );
        assert_eq!(
            llvm_major(b"/registry/llvm-sys-211.0.0/src/lib.rs"),
            Some(21)
        );
    }

    #[test]
    fn llvm_of_another_file_is_unknown() {
        assert_eq!(llvm_major(b"\x7fELF\0libc.so.6\0"), None);
        assert_eq!(llvm_major(b""), None);
    }
}
