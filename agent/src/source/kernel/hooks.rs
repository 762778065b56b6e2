//! Loads and attaches each hook by itself, and says what is lost without it.

use std::thread;

use aya::{
    Ebpf,
    programs::{Program, ProgramError, RawTracePoint, SchedClassifier},
};
use tracing::debug;

use super::{
    HookStatus, Verdict,
    load::{CLASSIFIERS, chain, find},
};
use crate::kernel_facts::{ABSENT, Hook, Layout, Resolved};

/// What is lost without a hook.
const fn loss(hook: Hook) -> &'static str {
    match hook {
        Hook::Lifecycle => {
            "who opens connections, their outcomes and lifetimes, and exhausted local ports are not known"
        }
        Hook::Retransmit => "what sockets send again is not counted",
        Hook::SendReset => {
            "bare ACKs are not joined to processes, and are unseen where no packet hook is"
        }
        Hook::ReceiveReset => {
            "who resets connections is not counted, nor which of them had been idle"
        }
        Hook::Census => {
            "sockets in use and in TIME_WAIT are not known, nor connections older than the agent, nor those that \
             make no progress"
        }
    }
}

pub(super) fn tracepoint(
    ebpf: &mut Ebpf,
    hook: Hook,
    program: &str,
    resolved: &Resolved,
) -> HookStatus {
    with_layout(hook, resolved, || {
        let p: &mut RawTracePoint = find(ebpf, program)?;
        p.load()?;
        log_cost(program, p.info());
        p.attach(program)?;
        Ok(())
    })
}

pub(super) fn on_demand(
    ebpf: &mut Ebpf,
    hook: Hook,
    programs: &[&str],
    resolved: &Resolved,
) -> HookStatus {
    with_layout(hook, resolved, || {
        for program in programs {
            let p: &mut RawTracePoint = find(ebpf, program)?;
            p.load()?;
            log_cost(program, p.info());
        }
        Ok(())
    })
}

fn with_layout(
    hook: Hook,
    resolved: &Resolved,
    attach: impl FnOnce() -> Result<(), ProgramError>,
) -> HookStatus {
    let lost = loss(hook);
    let name = hook.to_string();
    let missing: Vec<String> = resolved
        .missing_for(hook)
        .map(ToString::to_string)
        .collect();
    let status = |verdict, why: String, lost: &str, remedy: &str| HookStatus {
        name: name.clone(),
        verdict,
        why,
        lost: lost.to_owned(),
        remedy: remedy.to_owned(),
    };
    if let Some(moved) = moved_argument(hook, &resolved.layout) {
        return status(Verdict::Off, moved, lost, "");
    }
    if !resolved.can_run(hook) {
        return status(Verdict::Off, missing.join("; "), lost, "");
    }
    match attach() {
        Ok(()) if missing.is_empty() => status(Verdict::Ok, String::new(), "", ""),
        Ok(()) => status(Verdict::Degraded, missing.join("; "), "", ""),
        Err(error) => {
            debug!("{hook}: {error:?}");
            let rights = "It needs CAP_BPF and CAP_PERFMON";
            status(Verdict::Off, chain(&error), lost, rights)
        }
    }
}

/// The arguments of a tracepoint lie elsewhere than the program reads them.
fn moved_argument(hook: Hook, l: &Layout) -> Option<String> {
    let found = match hook {
        Hook::Lifecycle => [(l.set_state_sk, 0)].to_vec(),
        Hook::Retransmit => [(l.retransmit_sk, 0)].to_vec(),
        Hook::SendReset => [(l.send_reset_sk, 0), (l.send_reset_skb, 1)].to_vec(),
        Hook::ReceiveReset => [(l.receive_reset_sk, 0)].to_vec(),
        Hook::Census => Vec::new(),
    };
    let moved = found
        .iter()
        .find(|(is, expected)| is != expected && *is != ABSENT)?;
    Some(format!(
        "an argument of the tracepoint is number {} here, expected {}",
        moved.0, moved.1
    ))
}

/// Loads what nearly every host needs, all at once: verifying takes up to half a second each. The classifiers for
/// interfaces without Ethernet header are loaded with the first such interface.
pub(super) fn load_classifiers(ebpf: &mut Ebpf) -> Result<(), String> {
    const SWEEP: &str = "sweep";
    thread::scope(|scope| {
        let mut loading = Vec::new();
        for (name, program) in ebpf.programs_mut() {
            let load = match program {
                Program::SchedClassifier(classifier) if CLASSIFIERS[..2].contains(&name) => {
                    scope.spawn(move || classifier.load())
                }
                Program::RawTracePoint(sweep) if name == SWEEP => scope.spawn(move || sweep.load()),
                _ => continue,
            };
            loading.push((name, load));
        }
        for (name, load) in loading {
            let loaded = load
                .join()
                .map_err(|_| format!("loading {name} panicked"))?;
            loaded.map_err(|error| format!("{name}: {}", chain(&error)))?;
        }
        Ok::<(), String>(())
    })?;
    for name in CLASSIFIERS[..2].iter().chain([&SWEEP]) {
        let program = ebpf
            .program(name)
            .ok_or_else(|| format!("the eBPF object has no program {name}"))?;
        log_cost(name, program.info());
    }
    Ok(())
}

/// A classifier, loaded.
pub(super) fn load_classifier<'a>(
    ebpf: &'a mut Ebpf,
    name: &str,
) -> Result<&'a mut SchedClassifier, ProgramError> {
    let classifier: &mut SchedClassifier = find(ebpf, name)?;
    match classifier.load() {
        Ok(()) => log_cost(name, classifier.info()),
        Err(ProgramError::AlreadyLoaded) => {}
        Err(error) => return Err(error),
    }
    Ok(classifier)
}

/// What the verifier had to look at, for the budget of each program.
fn log_cost(name: &str, info: Result<aya::programs::ProgramInfo, ProgramError>) {
    if let Ok(info) = info {
        debug!(
            "{name}: {:?} instructions verified",
            info.verified_instruction_count()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel_facts::Missing;

    fn resolved(missing: &[(Hook, bool)]) -> Resolved {
        let missing = missing.iter().map(|(group, essential)| Missing {
            group: *group,
            member: "sock.sk".to_owned(),
            why: "it is gone".to_owned(),
            essential: *essential,
        });
        Resolved {
            layout: Layout::UNKNOWN,
            missing: missing.collect(),
        }
    }

    /// Whether a hook is attached, and what is said of it.
    fn tried(hook: Hook, resolved: &Resolved) -> (bool, HookStatus) {
        let mut attached = false;
        let status = with_layout(hook, resolved, || {
            attached = true;
            Ok(())
        });
        (attached, status)
    }

    #[test]
    fn a_hook_that_lacks_what_it_needs_is_not_attached() {
        let resolved = resolved(&[(Hook::Census, true), (Hook::Lifecycle, false)]);
        let (attached, census) = tried(Hook::Census, &resolved);
        assert!(!attached);
        assert_eq!(census.verdict, Verdict::Off);
        assert!(census.why.contains("sock.sk: it is gone"), "{}", census.why);
        assert!(census.lost.contains("TIME_WAIT"), "{}", census.lost);
        let (attached, lifecycle) = tried(Hook::Lifecycle, &resolved);
        assert!(attached);
        assert_eq!(lifecycle.verdict, Verdict::Degraded);
        assert!(lifecycle.why.contains("tells less"), "{}", lifecycle.why);
        let (attached, retransmit) = tried(Hook::Retransmit, &resolved);
        assert!(attached);
        assert_eq!(retransmit.verdict, Verdict::Ok);
    }

    #[test]
    fn a_hook_whose_arguments_have_moved_is_not_attached() {
        let mut resolved = resolved(&[]);
        resolved.layout.send_reset_skb = 2;
        let (attached, status) = tried(Hook::SendReset, &resolved);
        assert!(!attached);
        assert_eq!(status.verdict, Verdict::Off);
        assert!(
            status.why.contains("number 2 here, expected 1"),
            "{}",
            status.why
        );
    }
}
