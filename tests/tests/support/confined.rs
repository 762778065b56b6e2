//! The agent with fewer rights than the test has, or on a kernel that has less.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;
use tempfile::TempDir;
use tuplewatch_tests::prelude::*;

/// Somebody who owns nothing.
pub const NOBODY: u32 = 65534;

/// The agent where everybody may start it.
pub struct Binary {
    pub path: PathBuf,
    _folder: TempDir,
}

impl Binary {
    /// A copy of the program that the lab starts.
    pub fn new() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
        let path = folder.path().join("tuplewatch");
        fs::copy(AgentConfig::default().binary()?, &path)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        Ok(Self {
            path,
            _folder: folder,
        })
    }

    /// The agent as user `uid` with these capabilities and no way to more.
    pub fn confined(&self, uid: u32, capabilities: &[String]) -> Command {
        let mut set = "-all".to_owned();
        for capability in capabilities {
            set.push_str(",+");
            set.push_str(capability);
        }
        let id = uid.to_string();
        let mut command = Command::new("setpriv");
        command
            .args([
                "--reuid",
                &id,
                "--regid",
                &id,
                "--clear-groups",
                "--no-new-privs",
            ])
            .args(["--inh-caps", &set, "--bounding-set", &set])
            // Root gets its rights at the start of a program by itself.
            .args(["--ambient-caps", if uid == 0 { "-all" } else { &set }])
            .arg(&self.path);
        command
    }
}

/// The agent where the kernel describes no types, as without CONFIG_DEBUG_INFO_BTF.
pub fn without_btf() -> Result<Command> {
    let mut command = Command::new("unshare");
    let script = "mount -t tmpfs none /sys/kernel/btf && exec \"$@\"";
    command
        .args(["--mount", "sh", "-c", script, "sh"])
        .arg(AgentConfig::default().binary()?);
    Ok(command)
}

/// The agent on a kernel without tcx, which came with Linux 6.6: the two commands of bpf(2) that the agent
/// has for it alone give the error that they give there.
pub fn without_tcx() -> Result<Command> {
    let mut command = Command::new(AgentConfig::default().binary()?);
    // SAFETY: one system call, which touches nothing that the other threads of the parent may have locked.
    unsafe { command.pre_exec(refuse_tcx) };
    Ok(command)
}

/// From now on `BPF_LINK_CREATE` (raw tracepoints are opened by another command) and `BPF_PROG_QUERY` end
/// with EINVAL.
fn refuse_tcx() -> io::Result<()> {
    const PROG_QUERY: u32 = 16;
    const LINK_CREATE: u32 = 28;
    // Offsets in `struct seccomp_data`: the number of the system call, and its first argument.
    const NUMBER: u32 = 0;
    const ARGUMENT: u32 = 16;
    let code = |code: u32| u16::try_from(code).unwrap_or(u16::MAX);
    let load = |offset| libc::sock_filter {
        code: code(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS),
        jt: 0,
        jf: 0,
        k: offset,
    };
    let equal = |k, jt, jf| libc::sock_filter {
        code: code(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K),
        jt,
        jf,
        k,
    };
    let end = |k| libc::sock_filter {
        code: code(libc::BPF_RET | libc::BPF_K),
        jt: 0,
        jf: 0,
        k,
    };
    let mut program = [
        load(NUMBER),
        equal(u32::try_from(libc::SYS_bpf).unwrap_or(u32::MAX), 0, 3),
        load(ARGUMENT),
        equal(LINK_CREATE, 2, 0),
        equal(PROG_QUERY, 1, 0),
        end(libc::SECCOMP_RET_ALLOW),
        end(libc::SECCOMP_RET_ERRNO | libc::EINVAL.cast_unsigned()),
    ];
    let filter = libc::sock_fprog {
        len: 7,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: the filter is valid and outlives the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            0,
            &raw const filter,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
