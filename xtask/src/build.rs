//! `cargo xtask build`: the eBPF objects, then the agent that embeds them.

use std::{fs, path::Path, time::Instant};

use anyhow::{Context, Result, bail};

use crate::{
    bpf_linker,
    paths::Paths,
    step::{self, Elapsed, say},
    toolchain,
};

/// The eBPF target. The objects are for hosts of little endian, which all supported hosts are.
const TARGET: &str = "bpfel-unknown-none";

/// Options of `cargo xtask build`.
#[derive(clap::Args, Clone, Default)]
pub struct Args {
    /// Build the agent without optimizations
    #[arg(long)]
    debug: bool,
    /// Build the eBPF objects only
    #[arg(long)]
    ebpf_only: bool,
}

impl Args {
    /// All, optimized; or the eBPF objects only.
    pub fn ebpf_only(ebpf_only: bool) -> Self {
        Self {
            debug: false,
            ebpf_only,
        }
    }
}

/// Builds everything `args` ask for.
///
/// # Errors
/// If a tool is missing or a compiler fails.
pub fn build(paths: &Paths, args: &Args) -> Result<()> {
    ebpf(paths)?;
    if !args.ebpf_only {
        agent(paths, args.debug)?;
    }
    Ok(())
}

/// Builds the eBPF objects into `target/bpf`.
fn ebpf(paths: &Paths) -> Result<()> {
    if cfg!(target_endian = "big") {
        bail!("this host is big endian, the eBPF objects are built for {TARGET}: not supported");
    }
    let start = Instant::now();
    let choice = toolchain::choose()?;
    let linker = bpf_linker::find(paths).map_err(|faults| {
        anyhow::anyhow!(
            "no usable bpf-linker ({})\n  remedy: `cargo xtask setup`",
            faults.join("; ")
        )
    })?;
    say!(
        "build: eBPF objects with {} and bpf-linker {}",
        choice.toolchain,
        linker.version
    );
    step::shown(
        choice
            .toolchain
            .cargo(&linker.path)
            .current_dir(&paths.root)
            .args([
                "build",
                "--package",
                "tuplewatch-ebpf",
                "--bins",
                "--release",
            ])
            .args(["--target", TARGET, "-Z", "build-std=core", "--target-dir"])
            .arg(paths.bpf()),
    )
    .context("the eBPF objects do not build")?;
    let built = paths.bpf().join(TARGET).join("release");
    publish(&built.join("tuplewatch-ebpf"), &paths.ebpf_object())?;
    publish(
        &built.join("tuplewatch-ebpf-foreign"),
        &paths.foreign_object(),
    )?;
    say!(
        "build: eBPF objects done in {}: {}",
        Elapsed(start.elapsed()),
        paths.bpf().join("*.o").display()
    );
    Ok(())
}

/// Copies a built object to where others look for it.
///
/// An equal file is left alone, so that the agent is not built again. The copy appears at once, so that a build that runs
/// at the same time never reads half of it.
fn publish(built: &Path, object: &Path) -> Result<()> {
    let bytes = fs::read(built).with_context(|| format!("cannot read {}", built.display()))?;
    if fs::read(object).is_ok_and(|present| present == bytes) {
        return Ok(());
    }
    let unfinished = object.with_extension(format!("{}.new", std::process::id()));
    fs::write(&unfinished, &bytes)
        .with_context(|| format!("cannot write {}", unfinished.display()))?;
    fs::rename(&unfinished, object).with_context(|| format!("cannot write {}", object.display()))
}

/// Builds the agent around the eBPF object in `target/bpf`.
fn agent(paths: &Paths, debug: bool) -> Result<()> {
    let start = Instant::now();
    let mut cargo = paths.cargo();
    cargo.args(["build", "--package", "tuplewatch", "--bins"]);
    if !debug {
        cargo.arg("--release");
    }
    say!("build: agent");
    step::shown(&mut cargo).context("the agent does not build")?;
    say!(
        "build: agent done in {}: {}",
        Elapsed(start.elapsed()),
        paths.agent(debug).display()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_equal_object_is_left_alone() {
        let folder = std::env::temp_dir().join(format!("xtask-publish-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let (built, object) = (folder.join("built"), folder.join("object.o"));
        let modified = || fs::metadata(&object).unwrap().modified().unwrap();
        fs::write(&built, "one").unwrap();
        publish(&built, &object).unwrap();
        let first = modified();
        publish(&built, &object).unwrap();
        assert_eq!(modified(), first);
        fs::write(&built, "two").unwrap();
        publish(&built, &object).unwrap();
        assert_eq!(fs::read(&object).unwrap(), b"two");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 2);
        fs::remove_dir_all(&folder).unwrap();
    }
}
