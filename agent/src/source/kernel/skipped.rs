//! Runs of our programs that the kernel skipped.
//!
//! While a tracepoint program is at work, the same one is not begun again on that processor: by an interrupt that came in
//! its middle, or by another task where tracepoints can be preempted. What it should have seen then is seen by nobody.
//! The kernel counts it (`recursion_misses` of the program, since 5.12).

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};

use aya::{Ebpf, programs::RawTracePoint};

use super::{HookStatus, load::TRACEPOINTS};

/// How often each tracepoint hook was skipped, by its name; without those that are off or of which the kernel does not tell.
pub(super) fn by_hook(ebpf: &Ebpf) -> impl Iterator<Item = (String, u64)> + '_ {
    TRACEPOINTS.iter().filter_map(|(hook, name)| {
        let program: &RawTracePoint = ebpf.program(name)?.try_into().ok()?;
        let count = of(program.fd().ok()?.as_fd())?;
        Some((hook.to_string(), count))
    })
}

/// Says in the status of each hook what it has missed.
pub(super) fn note(skipped: impl Iterator<Item = (String, u64)>, hooks: &mut [HookStatus]) {
    for (name, count) in skipped.filter(|(_, count)| *count > 0) {
        for hook in hooks.iter_mut().filter(|hook| hook.name == name) {
            let events = if count == 1 { "event" } else { "events" };
            hook.lost = format!(
                "{count} {events} so far: the kernel skipped the program, which was at work already on that processor"
            );
        }
    }
}

/// How often a program was skipped.
fn of(program: BorrowedFd<'_>) -> Option<u64> {
    let path = format!("/proc/self/fdinfo/{}", program.as_raw_fd());
    parse(&std::fs::read_to_string(path).ok()?)
}

fn parse(fdinfo: &str) -> Option<u64> {
    let mut lines = fdinfo.lines();
    let count = lines.find_map(|line| line.strip_prefix("recursion_misses:"))?;
    count.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::kernel::Verdict;

    #[test]
    fn the_kernels_count_is_read() {
        let text = "pos:\t0\nflags:\t02000002\nprog_type:\t17\nprog_jited:\t1\nprog_tag:\t0c3e5d1d0a1b2c3d\n\
                    memlock:\t8192\nprog_id:\t311\nrun_time_ns:\t0\nrun_cnt:\t0\nrecursion_misses:\t14\n\
                    verified_insns:\t3813\n";
        assert_eq!(parse(text), Some(14));
        let older = text.replace("recursion_misses:\t14\n", "");
        assert_eq!(parse(&older), None);
        // What is no program has no such line.
        let file = std::fs::File::open("/proc/self/stat").unwrap();
        assert_eq!(of(file.as_fd()), None);
    }

    #[test]
    fn the_hook_says_how_often_it_was_skipped() {
        let status = |name: &str| HookStatus {
            name: name.to_owned(),
            verdict: Verdict::Ok,
            why: String::new(),
            lost: String::new(),
            remedy: String::new(),
        };
        let mut hooks = [status("lifecycle"), status("retransmit")];
        let skipped = [("lifecycle", 14), ("retransmit", 0), ("other", 1)];
        let skipped = skipped.map(|(name, count)| (name.to_owned(), count));
        note(skipped.into_iter(), &mut hooks);
        let [lifecycle, retransmit] = hooks.map(|hook| (hook.verdict, hook.detail()));
        assert_eq!(retransmit, (Verdict::Ok, String::new()));
        assert_eq!(lifecycle.0, Verdict::Ok);
        assert!(
            lifecycle.1.starts_with("14 events so far: "),
            "{}",
            lifecycle.1
        );
    }
}
