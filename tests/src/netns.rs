//! Entering the namespaces of a host.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;

use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// The network and mount namespaces of one host, held open.
#[derive(Debug)]
pub(crate) struct Namespaces {
    net: OwnedFd,
    mount: OwnedFd,
    inode: u64,
}

impl Namespaces {
    /// Opens the namespaces of the process `pid`.
    pub(crate) fn of(pid: u32) -> io::Result<Self> {
        let net = File::open(format!("/proc/{pid}/ns/net"))?;
        let inode = net.metadata()?.ino();
        let mount = File::open(format!("/proc/{pid}/ns/mnt"))?;
        Ok(Self {
            net: net.into(),
            mount: mount.into(),
            inode,
        })
    }

    /// The inode number of the network namespace.
    pub(crate) fn inode(&self) -> u64 {
        self.inode
    }

    /// Moves the calling thread into the namespaces. The thread must not share its file system
    /// context (root, working directory) with another one, or the kernel refuses the mount
    /// namespace.
    fn enter(&self) -> io::Result<()> {
        move_into_link_name_space(self.net.as_fd(), Some(LinkNameSpaceType::Network))?;
        move_into_link_name_space(self.mount.as_fd(), Some(LinkNameSpaceType::Mount))?;
        Ok(())
    }

    /// Runs `work` on a new thread inside the namespaces and gives its result back.
    pub(crate) fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> io::Result<T> {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new()
                .name("in-ns".into())
                .spawn_scoped(scope, move || -> io::Result<T> {
                    // SAFETY: only un-shares root, working directory and umask of this new thread;
                    // no memory or file descriptor table is touched.
                    if unsafe { libc::unshare(libc::CLONE_FS) } != 0 {
                        return Err(io::Error::last_os_error());
                    }
                    self.enter()?;
                    Ok(work())
                })?;
            match thread.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// Makes `command` start inside the namespaces and die with this process.
    ///
    /// The working directory stays the caller's (entering a mount namespace would reset it).
    pub(crate) fn apply(self: &Arc<Self>, command: &mut Command) {
        let namespaces = Arc::clone(self);
        let directory = command
            .get_current_dir()
            .map(std::path::Path::to_path_buf)
            .or_else(|| std::env::current_dir().ok())
            .and_then(|path| CString::new(path.as_os_str().as_bytes()).ok());
        let enter = move || {
            namespaces.enter()?;
            if let Some(directory) = &directory {
                // SAFETY: `directory` is a NUL-terminated string owned by this closure.
                unsafe { libc::chdir(directory.as_ptr()) };
            }
            Ok(())
        };
        // SAFETY: between fork and exec the closure only makes system calls; it does not allocate
        // and takes no lock.
        unsafe { command.pre_exec(enter) };
        die_with_parent(command);
    }
}

/// Makes `command` get SIGKILL when the process that starts it dies. Start it by
/// [`crate::spawner::spawn`] only.
pub(crate) fn die_with_parent(command: &mut Command) {
    let parent = rustix::process::getpid();
    let hook = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died before the line above took effect.
        if getppid() != Some(parent) {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure only makes system calls; it does not allocate and
    // takes no lock.
    unsafe { command.pre_exec(hook) };
}
