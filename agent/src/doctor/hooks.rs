//! What became of the trial of the kernel side.

use std::collections::BTreeMap;

use super::check::{Check, Left, Level};
use crate::{
    kernel_facts::interfaces::Unseen,
    source::kernel::{HookStatus, Other, Ran, Trial, Verdict, Way},
};

/// What is lost when no hook works at all.
const LIVE: &str = "nothing live is seen; `tuplewatch replay` judges captures without any right";
/// Others in a chain that are named; a CNI has a handful.
const NAMED: usize = 16;

/// What of the agent works. `asked_for`: interfaces were named.
#[must_use]
pub fn left(trial: &Trial, asked_for: bool) -> Left {
    let works = |hook: &&HookStatus| hook.name != "packet" && hook.verdict != Verdict::Off;
    let sockets = trial.hooks.iter().filter(|h| is_socket_hook(h)).count();
    let working = trial.hooks.iter().filter(works);
    let working = working.filter(|h| is_socket_hook(h)).count();
    let waits = trial.failed.is_empty() && !asked_for;
    let packets = trial.is_packet_loaded && (!trial.hooked.is_empty() || waits);
    match (packets, working) {
        (false, 0) => Left::Replay,
        (false, _) => Left::Sockets,
        (true, 0) => Left::Packets,
        (true, n) if n == sockets => Left::All,
        (true, _) => Left::Partly,
    }
}

/// Not the wire's, nor the line that stands for all of them where there is no BTF.
fn is_socket_hook(hook: &HookStatus) -> bool {
    !hook.name.starts_with("packet") && hook.name != "socket hooks"
}

/// What is to be said of it. `rights_suffice`: it was not for the rights; `asked_for`: interfaces were
/// named.
#[must_use]
pub fn judge(trial: &Trial, rights_suffice: bool, asked_for: bool) -> Vec<Check> {
    let mut checks = Vec::new();
    checks.extend(trial.refused.as_ref().map(|why| {
        let remedy = match (trial.is_permission, rights_suffice) {
            (true, false) => {
                "It needs CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN: see the checks `capability`"
            }
            (true, true) => {
                "the rights are there: something else refuses bpf(2), such as a seccomp profile, \
                 SELinux (spc_t), AppArmor, or below Linux 5.11 a limit on locked memory \
                 (LimitMEMLOCK=infinity)"
            }
            (false, _) => "please report this kernel, with the line above",
        };
        let found = format!("no program could be loaded: {why}");
        Check::bad(Level::Fail, "hook", found, LIVE, remedy)
    }));
    checks.extend(trial.hooks.iter().map(|h| hook(h, trial, asked_for)));
    checks.extend(trial.ran.iter().flat_map(ran));
    checks.extend(interfaces(trial, asked_for));
    checks.extend(trial.others.iter().map(chain));
    checks
}

fn hook(status: &HookStatus, trial: &Trial, asked_for: bool) -> Check {
    let HookStatus {
        why, lost, remedy, ..
    } = status;
    let level = match status.verdict {
        Verdict::Ok => {
            let found = match why.as_str() {
                "" if status.name == "census" => "its programs are loaded",
                "" => "loaded and attached",
                why => why,
            };
            return Check::ok("hook", found).of(&status.name);
        }
        Verdict::Degraded => Level::Warn,
        Verdict::Off => Level::Fail,
    };
    // No interface is up: the hook is there for the first that comes.
    let waits = status.name == "packet" && trial.is_packet_loaded && trial.failed.is_empty();
    if waits && trial.hooked.is_empty() {
        let level = if asked_for { Level::Fail } else { Level::Warn };
        let lost = "nothing on the wire is seen until there is one";
        let remedy = if asked_for {
            "name interfaces that are there (--interface, `interfaces`)"
        } else {
            "bring an interface up; the agent notices by itself"
        };
        return Check::bad(level, "hook", why, lost, remedy).of(&status.name);
    }
    Check::bad(level, "hook", why, lost, remedy).of(&status.name)
}

fn ran(ran: &Result<Ran, String>) -> Vec<Check> {
    let ran = match ran {
        Ok(ran) => ran,
        Err(why) => {
            let lost = "sockets in use and in TIME_WAIT are not known, nor what the tables count";
            let remedy = "please report this kernel, with the line above";
            return vec![Check::bad(Level::Fail, "census", why, lost, remedy)];
        }
    };
    let found = format!(
        "one pass over the sockets of the host took {:.1} ms: {} port spaces, {} network namespaces",
        ran.took.as_secs_f64() * 1000.0,
        ran.port_spaces,
        ran.namespaces
    );
    let mut checks = vec![Check::ok("census", found), namespace(ran)];
    checks.extend(ran.losses.iter().map(|(name, meaning, count)| {
        let found = format!("{name}: {count} at the first look");
        let remedy = "more memory for the maps (`map_memory`, --map-memory)";
        Check::bad(Level::Warn, "tables", found, *meaning, remedy).of(*name)
    }));
    if ran.losses.is_empty() {
        checks.push(Check::ok(
            "tables",
            "large enough for this host at the first look",
        ));
    }
    checks
}

fn namespace(ran: &Ran) -> Check {
    match ran.is_hosts {
        Some(true) => Check::ok("network_namespace", "the host's own"),
        None => Check::ok(
            "network_namespace",
            "not known whether it is the host's own",
        ),
        Some(false) => Check::bad(
            Level::Warn,
            "network_namespace",
            "the process runs in a network namespace of its own, not in the host's",
            "the host's interfaces and what they carry after NAT are not seen (sockets of all \
             namespaces are)",
            "hostNetwork: true (Kubernetes), --network host (containers)",
        ),
    }
}

fn interfaces(trial: &Trial, asked_for: bool) -> Vec<Check> {
    if let Some(why) = &trial.unreadable {
        let lost = "nothing on the wire is seen";
        let remedy = "AF_NETLINK must be allowed (RestrictAddressFamilies=, seccomp)";
        let found = format!("interfaces cannot be read: {why}");
        return vec![Check::bad(Level::Fail, "interface", found, lost, remedy)];
    }
    let mut checks: Vec<_> = trial
        .hooked
        .iter()
        .map(|(name, way)| {
            let chosen = trial.choice.chosen.iter().find(|i| i.name == *name);
            let why = chosen.map_or("", |i| i.why.as_str());
            let way = match way {
                Way::Tcx => "tcx",
                Way::Clsact => "clsact, as there is no tcx",
            };
            Check::ok("interface", format!("hooked by {way}: {why}")).of(name)
        })
        .collect();
    checks.extend(trial.failed.iter().map(|(name, why)| {
        let lost = "its packets are not seen";
        Check::bad(Level::Fail, "interface", why, lost, remedy_of_failed(why)).of(name)
    }));
    if !trial.is_packet_loaded {
        checks.extend(trial.choice.chosen.iter().map(|interface| {
            let found = "would be watched, but the packet hook cannot be loaded";
            let lost = "its packets are not seen";
            let remedy = "see the check of the hook `packet`";
            Check::bad(Level::Fail, "interface", found, lost, remedy).of(&interface.name)
        }));
    }
    checks.extend(unseen(&trial.choice.unseen, asked_for));
    checks
}

/// By the number of the error that the kernel gave.
fn remedy_of_failed(why: &str) -> &'static str {
    if why.contains("os error 1)") {
        "It needs CAP_NET_ADMIN in the namespace of the interface"
    } else {
        "leave it out (--exclude-interface), or report the line above"
    }
}

/// What is not seen, in two parts: what may be missed, and what is left out or carries nothing.
fn unseen(all: &[Unseen], asked_for: bool) -> Vec<Check> {
    let told = |missed: bool| {
        let mut by_reason: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for one in all.iter().filter(|u| u.missed == missed) {
            by_reason.entry(&one.reason).or_default().push(&one.name);
        }
        let parts = by_reason.into_iter();
        let parts = parts.map(|(reason, names)| format!("{}: {reason}", names.join(", ")));
        parts.collect::<Vec<_>>().join("; ")
    };
    let mut checks = Vec::new();
    let (missed, left_out) = (told(true), told(false));
    if !missed.is_empty() {
        let lost = "packets that pass there and no watched interface are not seen (sockets are)";
        let remedy = if asked_for {
            "see that the names are right (--interface, `interfaces`)"
        } else {
            "name it (--interface) if what it carries matters"
        };
        checks.push(Check::bad(Level::Warn, "unseen", missed, lost, remedy));
    }
    if !left_out.is_empty() {
        checks.push(Check::ok("unseen", left_out));
    }
    if checks.is_empty() {
        checks.push(Check::ok("unseen", "nothing"));
    }
    checks
}

fn chain((interface, others, why): &(String, Vec<Other>, Option<String>)) -> Check {
    let mut named: Vec<String> = others.iter().take(NAMED).map(describe).collect();
    if others.len() > NAMED {
        named.push(format!("and {} more", others.len() - NAMED));
    }
    let mut found = named.join(", ");
    if let Some(why) = why {
        let separator = if found.is_empty() { "" } else { "; " };
        found = format!("{found}{separator}programs of tcx cannot be listed: {why}");
        let lost = "who else sees or ends the packets is not known";
        return Check::bad(Level::Warn, "chain", found, lost, "It needs CAP_NET_ADMIN")
            .of(interface);
    }
    if found.is_empty() {
        "no other program".clone_into(&mut found);
    }
    let before = others.iter().any(|o| o.is_before && !o.is_tuplewatch);
    if before {
        let lost = "packets that it ends or redirects never reach the agent";
        let remedy = "let it attach behind, or by clsact at a priority above 1";
        return Check::bad(Level::Warn, "chain", found, lost, remedy).of(interface);
    }
    Check::ok("chain", found).of(interface)
}

fn describe(other: &Other) -> String {
    let Other {
        side,
        way,
        name,
        is_tuplewatch,
        is_before,
    } = other;
    let side = format!("{side:?}").to_lowercase();
    let way = format!("{way:?}").to_lowercase();
    let whose = if *is_tuplewatch {
        ", another tuplewatch"
    } else {
        ""
    };
    let place = if *is_before { ", before the agent" } else { "" };
    format!("{name} ({side}, {way}{whose}{place})")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::kernel_facts::interfaces::{Choice, Interface, LinkHeader, clsact::Side};

    fn status(name: &str, verdict: Verdict) -> HookStatus {
        HookStatus {
            name: name.to_owned(),
            verdict,
            why: "because".to_owned(),
            lost: "much".to_owned(),
            remedy: "It needs help".to_owned(),
        }
    }

    fn interface(name: &str) -> Interface {
        Interface {
            index: 2,
            name: name.to_owned(),
            header: LinkHeader::Ethernet,
            kind: "physical".to_owned(),
            why: "a route".to_owned(),
        }
    }

    fn good() -> Trial {
        let names = [
            "lifecycle",
            "retransmit",
            "send_reset",
            "receive_reset",
            "census",
        ];
        let mut hooks: Vec<_> = names.iter().map(|n| status(n, Verdict::Ok)).collect();
        hooks.push(status("packet", Verdict::Ok));
        Trial {
            hooks,
            is_packet_loaded: true,
            hooked: vec![("eth0".to_owned(), Way::Tcx)],
            choice: Choice {
                chosen: vec![interface("eth0")],
                ..Choice::default()
            },
            others: vec![("eth0".to_owned(), Vec::new(), None)],
            ran: Some(Ok(Ran {
                port_spaces: 3,
                took: Duration::from_millis(2),
                namespaces: 2,
                is_hosts: Some(true),
                losses: Vec::new(),
            })),
            ..Trial::default()
        }
    }

    fn of(trial: &Trial, level: Level) -> Vec<(&'static str, Option<String>)> {
        let checks = judge(trial, true, false).into_iter();
        checks
            .filter(|c| c.level == level)
            .map(|c| (c.name, c.of))
            .collect()
    }

    fn named(name: &'static str, of: &str) -> (&'static str, Option<String>) {
        (name, Some(of.to_owned()))
    }

    #[test]
    fn all_is_well() {
        let trial = good();
        assert_eq!(left(&trial, false), Left::All);
        assert!(of(&trial, Level::Warn).is_empty() && of(&trial, Level::Fail).is_empty());
    }

    #[test]
    fn a_hook_that_is_off_fails_and_a_degraded_one_warns() {
        let mut trial = good();
        trial.hooks[0].verdict = Verdict::Off;
        trial.hooks[1].verdict = Verdict::Degraded;
        assert_eq!(of(&trial, Level::Fail), [named("hook", "lifecycle")]);
        assert_eq!(of(&trial, Level::Warn), [named("hook", "retransmit")]);
        assert_eq!(left(&trial, false), Left::Partly);
        let checks = judge(&trial, true, false);
        let check = checks.iter().find(|c| c.level == Level::Fail).unwrap();
        assert_eq!(check.lost.as_deref(), Some("much"));
        assert_eq!(check.remedy.as_deref(), Some("It needs help"));
    }

    #[test]
    fn without_the_packet_hook_sockets_are_left() {
        let mut trial = good();
        trial.is_packet_loaded = false;
        trial.hooked.clear();
        trial.hooks[5].verdict = Verdict::Off;
        assert_eq!(left(&trial, false), Left::Sockets);
        let expected = [named("hook", "packet"), named("interface", "eth0")];
        assert_eq!(of(&trial, Level::Fail), expected);
    }

    #[test]
    fn without_btf_packets_are_left() {
        let mut trial = good();
        trial.hooks = vec![
            status("socket hooks", Verdict::Off),
            status("packet", Verdict::Ok),
        ];
        trial.ran = None;
        assert_eq!(left(&trial, false), Left::Packets);
        assert_eq!(of(&trial, Level::Fail), [named("hook", "socket hooks")]);
    }

    #[test]
    fn what_is_refused_leaves_replay() {
        let trial = Trial {
            refused: Some("EPERM".to_owned()),
            is_permission: true,
            ..Trial::default()
        };
        assert_eq!(left(&trial, false), Left::Replay);
        for (suffice, word) in [(false, "CAP_BPF"), (true, "seccomp")] {
            let check = judge(&trial, suffice, false).remove(0);
            assert_eq!((check.name, check.level), ("hook", Level::Fail));
            assert!(check.lost.unwrap().contains("replay"));
            assert!(check.remedy.unwrap().contains(word));
        }
    }

    #[test]
    fn no_interface_is_a_warning_unless_one_was_asked_for() {
        let mut trial = good();
        trial.hooks[5].verdict = Verdict::Off;
        trial.hooked.clear();
        trial.choice.chosen.clear();
        assert_eq!(left(&trial, false), Left::All, "the hook itself works");
        assert_eq!(of(&trial, Level::Warn), [named("hook", "packet")]);
        assert_eq!(left(&trial, true), Left::Sockets);
        let checks = judge(&trial, true, true);
        let failed = checks.iter().find(|c| c.level == Level::Fail).unwrap();
        assert!(failed.remedy.as_ref().unwrap().contains("--interface"));
        // An interface that refuses is no such thing.
        trial.failed.insert("eth0".to_owned(), "refused".to_owned());
        let expected = [named("hook", "packet"), named("interface", "eth0")];
        assert_eq!(of(&trial, Level::Fail), expected);
        assert_eq!(left(&trial, false), Left::Sockets);
    }

    #[test]
    fn others_in_the_chain_are_told_and_warned_of_before_us() {
        let other = |name: &str, is_tuplewatch, is_before| Other {
            side: Side::Ingress,
            way: Way::Tcx,
            name: name.to_owned(),
            is_tuplewatch,
            is_before,
        };
        let mut trial = good();
        trial.others[0].1 = vec![
            other("tuplewatch_in", true, true),
            other("cni", false, false),
        ];
        assert!(of(&trial, Level::Warn).is_empty());
        let checks = judge(&trial, true, false);
        let chain = checks.iter().find(|c| c.name == "chain").unwrap();
        assert_eq!(
            chain.found,
            "tuplewatch_in (ingress, tcx, another tuplewatch, before the agent), cni (ingress, tcx)"
        );
        trial.others[0].1.push(other("first", false, true));
        assert_eq!(of(&trial, Level::Warn), [named("chain", "eth0")]);
        trial.others = vec![("eth0".to_owned(), Vec::new(), Some("EPERM".to_owned()))];
        assert_eq!(of(&trial, Level::Warn), [named("chain", "eth0")]);
    }

    #[test]
    fn what_may_be_missed_warns_and_what_is_left_out_does_not() {
        let one = |name: &str, reason: &str, missed| Unseen {
            name: name.to_owned(),
            reason: reason.to_owned(),
            missed,
        };
        let mut trial = good();
        trial.choice.unseen = vec![
            one("lo", "the host with itself", false),
            one("lxc1", "no route points to it", true),
            one("lxc2", "no route points to it", true),
        ];
        assert_eq!(of(&trial, Level::Warn), [("unseen", None)]);
        let checks = judge(&trial, true, false);
        let found: Vec<_> = checks.iter().filter(|c| c.name == "unseen").collect();
        assert_eq!(found[0].found, "lxc1, lxc2: no route points to it");
        assert_eq!(found[1].found, "lo: the host with itself");
    }

    #[test]
    fn another_namespace_and_small_tables_warn_and_a_failed_pass_fails() {
        let mut trial = good();
        if let Some(Ok(ran)) = &mut trial.ran {
            ran.is_hosts = Some(false);
            ran.losses = vec![("census_full", "the table of the census was full", 3)];
        }
        let expected = [("network_namespace", None), named("tables", "census_full")];
        assert_eq!(of(&trial, Level::Warn), expected);
        trial.ran = Some(Err("bucket 5".to_owned()));
        assert_eq!(of(&trial, Level::Fail), [("census", None)]);
    }
}
