//! The process that *is* a host: it owns the namespaces and waits to be told to end.
//!
//! Runs as `lab-peer hold`. A fresh process un-shares its namespaces, rather than a fork of the
//! test process: a forked child of a program with threads may hardly do anything safely.

use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, mount, mount_change,
    move_mount, open_tree,
};

/// The line a holder prints when its namespaces stand.
pub const READY: &str = "ready";

/// Un-shares a network and a mount namespace, mounts a sysfs that shows the new network namespace,
/// prints [`READY`] and waits until standard input ends (the test process is gone or done).
///
/// # Errors
/// Without CAP_SYS_ADMIN the kernel refuses; the message says so.
pub fn hold() -> Result<()> {
    // SAFETY: this process has one thread; no memory or descriptor table is shared or un-shared.
    if unsafe { libc::unshare(libc::CLONE_NEWNET | libc::CLONE_NEWNS) } != 0 {
        return Err(io::Error::last_os_error())
            .context("unshare(CLONE_NEWNET | CLONE_NEWNS): the lab must run as root");
    }
    mount_change(
        "/",
        MountPropagationFlags::PRIVATE | MountPropagationFlags::REC,
    )
    .context("making the mounts of the new namespace private")?;
    mount_sysfs().context("mounting a sysfs for the new network namespace on /sys")?;
    let mut out = io::stdout();
    writeln!(out, "{READY}")?;
    out.flush()?;
    let mut byte = [0u8; 1];
    while io::stdin().read(&mut byte)? > 0 {}
    Ok(())
}

/// Mounts a new sysfs on /sys and puts the file systems that were mounted below the old one (cgroup,
/// bpf, tracing) back in their places.
fn mount_sysfs() -> Result<()> {
    let mut kept = Vec::new();
    for point in mounts_directly_below_sys()? {
        let tree = open_tree(
            rustix::fs::CWD,
            &point,
            OpenTreeFlags::OPEN_TREE_CLONE
                | OpenTreeFlags::AT_RECURSIVE
                | OpenTreeFlags::OPEN_TREE_CLOEXEC,
        )
        .with_context(|| format!("open_tree({})", point.display()))?;
        kept.push((point, tree));
    }
    mount(
        "sysfs",
        "/sys",
        "sysfs",
        MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC,
        None::<&std::ffi::CStr>,
    )
    .context("mount(sysfs, /sys)")?;
    for (point, tree) in kept {
        // A directory of the old sysfs need not exist in the new one (tracing without debugfs).
        if point.is_dir() {
            move_mount(
                &tree,
                "",
                rustix::fs::CWD,
                &point,
                MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
            )
            .with_context(|| format!("move_mount({})", point.display()))?;
        }
    }
    Ok(())
}

/// The mount points below /sys that do not lie below another one of them.
fn mounts_directly_below_sys() -> Result<Vec<PathBuf>> {
    let table = std::fs::read_to_string("/proc/self/mountinfo")?;
    let mut points: Vec<PathBuf> = table
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .filter(|point| point.starts_with("/sys/"))
        .map(PathBuf::from)
        .collect();
    points.sort();
    points.dedup();
    let below = |point: &Path, other: &Path| point != other && point.starts_with(other);
    let tops = points
        .iter()
        .filter(|point| !points.iter().any(|other| below(point, other)))
        .cloned();
    Ok(tops.collect())
}
