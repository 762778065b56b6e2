//! What each program really reads, taken from the object that the agent embeds, against what the resolver says that
//! its hook needs.

use std::collections::{BTreeMap, BTreeSet};

use object::{Object as _, ObjectSection as _, ObjectSymbol as _, RelocationTarget, SymbolKind};

use super::{KERNELS, change, resolve};
use crate::kernel_facts::{ABSENT, Hook, Layout};

/// Aligned, as ELF is read in place.
static OBJECT: &[u8] = aya::include_bytes_aligned!(env!("TUPLEWATCH_EBPF_OBJECT"));

/// The programs of each hook.
const PROGRAMS: [(Hook, &[&str]); 5] = [
    (Hook::Lifecycle, &["inet_sock_set_state"]),
    (Hook::Retransmit, &["tcp_retransmit_skb"]),
    (Hook::SendReset, &["tcp_send_reset"]),
    (Hook::ReceiveReset, &["tcp_receive_reset"]),
    (
        Hook::Census,
        &[
            "census_listeners",
            "census_established",
            "census_seed",
            "census_netns",
            "stalled_again",
        ],
    ),
];
/// The programs that read packets and their own maps only, and so run without type information.
const PACKETS: [&str; 5] = [
    "tuplewatch_in",
    "tuplewatch_out",
    "tuplewatch_ip_in",
    "tuplewatch_ip_out",
    "sweep",
];

/// Facts that take more than one look-up: a line of the text without which each is not known.
const DERIVED: [(&str, &str, &str); 11] = [
    ("sk_protocol", "sock", "sk_protocol"),
    ("sk_protocol_bytes", "sock", "sk_protocol"),
    ("sk_cgroup", "sock", "sk_cgrp_data.cgroup"),
    ("net_tcp_death_row", "net", "ipv4.tcp_death_row"),
    ("net_tcp_death_row_is_pointer", "net", "ipv4.tcp_death_row"),
    ("net_local_ports", "net", "ipv4.ip_local_ports.range"),
    ("net_local_ports_bytes", "net", "ipv4.ip_local_ports.range"),
    ("death_row_hashinfo", "inet_timewait_death_row", "hashinfo"),
    ("ehash_bucket_size", "inet_ehash_bucket", ""),
    ("listen_bucket_size", "inet_listen_hashbucket", ""),
    (
        "listen_bucket_first",
        "inet_listen_hashbucket",
        "nulls_head.first",
    ),
];
/// Facts without which nothing is missing, or that follow from others.
const OPTIONAL: [&str; 3] = ["net_tw_reuse_delay", "listen_node", "hashinfo_pernet"];

/// Operation and source of an instruction (of eight bytes) that calls a function of the object.
const CALL: (u8, u8) = (0x85, 1);

/// Functions by section and address, and of each what it calls and which variables it names.
struct Code {
    functions: BTreeMap<String, Function>,
}

#[derive(Default)]
struct Function {
    calls: BTreeSet<String>,
    variables: BTreeSet<String>,
}

impl Code {
    fn read() -> Self {
        let file = object::File::parse(OBJECT).expect("the object is ELF");
        let mut places = BTreeMap::new();
        for symbol in file.symbols().filter(|s| s.kind() == SymbolKind::Text) {
            let section = symbol.section_index().expect("a section").0;
            let name = symbol.name().expect("a name").to_owned();
            places.insert((section, symbol.address()), (symbol.size(), name));
        }
        let mut functions = BTreeMap::new();
        for ((index, start), (size, name)) in &places {
            let section = file.section_by_index(object::SectionIndex(*index));
            let section = section.expect("a section");
            let code = section.data().expect("its bytes");
            let relocations: BTreeMap<u64, _> = section.relocations().collect();
            let mut function = Function::default();
            for at in (*start..start + size).step_by(8) {
                let bytes = &code[usize::try_from(at).expect("small")..][..8];
                let is_call = (bytes[0], bytes[1] >> 4) == CALL;
                let offset = i32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
                let target = |base: u64| base.wrapping_add_signed((i64::from(offset) + 1) * 8);
                let place = match relocations.get(&at).map(object::Relocation::target) {
                    Some(RelocationTarget::Symbol(symbol)) => {
                        let symbol = file.symbol_by_index(symbol).expect("a symbol");
                        if !is_call {
                            let name = symbol.name().unwrap_or_default().to_owned();
                            function.variables.insert(name);
                            continue;
                        }
                        let section = symbol.section_index().expect("a section").0;
                        (section, target(symbol.address()))
                    }
                    None if is_call => (*index, target(at)),
                    _ => continue,
                };
                let (_, called) = places.get(&place).unwrap_or_else(|| {
                    panic!("{name} calls what is no function: {place:?}");
                });
                function.calls.insert(called.clone());
            }
            functions.insert(name.clone(), function);
        }
        Self { functions }
    }

    /// The fields of [`Layout`] that a program names, itself or in what it calls.
    fn facts(&self, program: &str) -> BTreeSet<String> {
        let fields: BTreeSet<&str> = Layout::UNKNOWN.entries().map(|(name, _)| name).collect();
        let mut facts = BTreeSet::new();
        let (mut seen, mut next) = (BTreeSet::new(), vec![program.to_owned()]);
        while let Some(name) = next.pop() {
            let function = self.functions.get(&name);
            let function = function.unwrap_or_else(|| panic!("the object has no {name}"));
            if !seen.insert(name) {
                continue;
            }
            let named = function.variables.iter().map(|v| v.to_lowercase());
            facts.extend(named.filter(|v| fields.contains(v.as_str())));
            next.extend(function.calls.iter().cloned());
        }
        facts
    }
}

/// Takes a member of a struct away: renames it wherever it is, as its struct may be anonymous. Without a member
/// the struct itself.
fn without(text: &str, structure: &str, path: &str) -> String {
    let last = path.rsplit('.').next().unwrap_or_default();
    let gone = |line: &str| {
        if path.is_empty() {
            return line.replace(&format!(" struct {structure} "), " struct gone ");
        }
        match line.strip_prefix(&format!("  {last} ")) {
            Some(rest) => format!("  gone {rest}"),
            None => line.to_owned(),
        }
    };
    text.lines().map(gone).collect::<Vec<_>>().join("\n")
}

/// How a missing member is called.
fn label(structure: &str, path: &str) -> String {
    let parts = [structure, path].into_iter();
    let parts = parts.filter(|part| !part.is_empty());
    parts.collect::<Vec<_>>().join(".")
}

#[test]
fn what_a_program_reads_is_declared_for_its_hook() {
    let code = Code::read();
    let text = super::V6_18;
    let (mut undeclared, mut unread) = (Vec::new(), Vec::new());
    for (hook, programs) in PROGRAMS {
        let facts: BTreeSet<_> = programs.iter().flat_map(|p| code.facts(p)).collect();
        assert!(!facts.is_empty(), "{hook} reads structs");
        // A kernel without it would be called worse for nothing.
        let declared = Layout::FACTS
            .iter()
            .filter(|f| f.needs.hooks.contains(&hook));
        let not_read = declared.filter(|f| !facts.contains(f.name));
        unread.extend(not_read.map(|f| format!("{hook} does not read {}", f.name)));
        for (name, structure, path) in DERIVED {
            let resolved = resolve(&without(text, structure, path));
            let is_missed = resolved
                .missing_for(hook)
                .any(|m| m.member == label(structure, path));
            if is_missed && !facts.contains(name) {
                unread.push(format!("{hook} does not read {name}"));
            }
        }
        for name in facts.iter().filter(|n| !OPTIONAL.contains(&n.as_str())) {
            let fact = Layout::FACTS.iter().find(|f| f.name == name);
            let (structure, path) = match fact {
                Some(fact) => (fact.structure, fact.path),
                None => {
                    let derived = DERIVED.iter().find(|(derived, ..)| derived == name);
                    let (_, structure, path) = derived.unwrap_or_else(|| panic!("what is {name}?"));
                    (*structure, *path)
                }
            };
            let resolved = resolve(&without(text, structure, path));
            let (_, value) = resolved
                .layout
                .entries()
                .find(|(n, _)| n == name)
                .expect("a field");
            assert_eq!(value, ABSENT, "{name} is not gone");
            let label = label(structure, path);
            if !resolved.missing_for(hook).any(|m| m.member == label) {
                undeclared.push(format!("{hook} reads {name}"));
            }
        }
    }
    assert_eq!((undeclared, unread), (Vec::new(), Vec::<String>::new()));
}

#[test]
fn the_packet_hook_reads_no_struct() {
    let code = Code::read();
    for program in PACKETS {
        assert_eq!(code.facts(program), BTreeSet::new(), "{program}");
    }
    // The walk over the object finds what is there.
    assert!(code.facts("census_established").contains("hashinfo_ehash"));
}

/// On every kernel, for every member: exactly the hooks that need it lose it, and those that cannot do without
/// cannot run.
#[test]
fn a_missing_member_concerns_just_the_hooks_that_need_it() {
    for (version, text) in KERNELS {
        for fact in Layout::FACTS {
            let resolved = resolve(&without(text, fact.structure, fact.path));
            let label = format!("{}.{}", fact.structure, fact.path);
            let lost: Vec<_> = resolved
                .missing
                .iter()
                .filter(|m| m.member == label)
                .collect();
            let hooks: Vec<_> = lost.iter().map(|m| m.group).collect();
            assert_eq!(hooks, fact.needs.hooks, "{version} {label}");
            for missing in lost {
                assert_eq!(missing.essential, fact.needs.essential, "{version} {label}");
                assert!(missing.why.contains("has no member"), "{version} {missing}");
                if missing.essential {
                    assert!(!resolved.can_run(missing.group), "{version} {missing}");
                }
            }
        }
    }
}

/// On every kernel, for every member: where it has moved to, it is found.
#[test]
fn a_moved_member_is_found_on_every_kernel() {
    for (version, text) in KERNELS {
        let before = resolve(text).layout;
        for fact in Layout::FACTS.iter().filter(|f| !f.path.contains('.')) {
            let start = format!("  {} ", fact.path);
            let lines: Vec<&str> = text.lines().filter(|l| l.starts_with(&start)).collect();
            // Names that several structs have are left to the others.
            let [line] = lines[..] else { continue };
            let (head, bits) = line.trim().rsplit_once(' ').expect("an offset");
            let Ok(bits) = bits.parse::<u32>() else {
                continue;
            };
            let moved = change(text, line.trim(), &format!("{head} {}", bits + 64));
            let after = resolve(&moved).layout;
            let value =
                |layout: &Layout| layout.entries().find(|(n, _)| *n == fact.name).map(|f| f.1);
            let expected = value(&before).map(|offset| offset + 8);
            assert_eq!(value(&after), expected, "{version} {}", fact.name);
        }
    }
}
