//! The resolver against five real kernels (extracts of their BTF), against the running one, and against kernels
//! that do not exist: members moved, missing, of another size, behind a pointer.

mod extract;
mod look_up;
mod reads;
mod writer;

use proptest::prelude::*;

use super::*;
use writer::write_btf;

const KERNELS: [(&str, &str); 5] = [
    ("5.10.223", include_str!("tests/kernels/5.10.223.txt")),
    ("6.1.192", include_str!("tests/kernels/6.1.192.txt")),
    ("6.12.117", include_str!("tests/kernels/6.12.117.txt")),
    ("6.18.15", include_str!("tests/kernels/6.18.15.txt")),
    ("7.3.4", include_str!("tests/kernels/7.3.4.txt")),
];
const V5_10: &str = KERNELS[0].1;
const V6_1: &str = KERNELS[1].1;
const V6_18: &str = KERNELS[3].1;

fn types(text: &str) -> Types {
    Types::from_bytes(&write_btf(text)).expect("the writer makes BTF")
}

fn resolve(text: &str) -> Resolved {
    Layout::resolve(&types(text))
}

/// Replaces one line (given without its indentation) of a kernel's text.
#[track_caller]
fn change(text: &str, from: &str, to: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let hits = lines.iter().filter(|l| l.trim_start() == from).count();
    assert_eq!(hits, 1, "`{from}` must be one line of the text");
    let changed = lines.iter().map(|line| {
        let indent = &line[..line.len() - line.trim_start().len()];
        if line.trim_start() != from {
            (*line).to_owned()
        } else if to.is_empty() {
            String::new()
        } else {
            format!("{indent}{to}")
        }
    });
    changed.collect::<Vec<_>>().join("\n")
}

/// The member's line, e.g. `icsk_backoff 3 10008`.
#[track_caller]
fn line_of<'a>(text: &'a str, member: &str) -> &'a str {
    let start = format!("  {member} ");
    let line = text.lines().find(|l| l.starts_with(&start));
    line.unwrap_or_else(|| panic!("no member {member}")).trim()
}

fn stopped(resolved: &Resolved) -> Vec<Hook> {
    let hooks = Hook::ALL.into_iter();
    hooks.filter(|hook| !resolved.can_run(*hook)).collect()
}

fn hooks_missing(resolved: &Resolved, member: &str) -> Vec<Hook> {
    let missing = resolved.missing.iter().filter(|m| m.member == member);
    missing.map(|m| m.group).collect()
}

#[test]
fn real_kernels_resolve_as_a_compiler_sees_them() {
    for (version, text) in KERNELS {
        let resolved = resolve(text);
        assert_eq!(resolved.missing, [], "{version}");
        let mut checked = 0;
        for (name, value) in resolved.layout.entries() {
            let start = format!("#= {name} ");
            let expected = text.lines().find_map(|l| l.strip_prefix(&start));
            assert_eq!(
                expected,
                Some(value.to_string().as_str()),
                "{version} {name}"
            );
            checked += 1;
        }
        assert!(checked > 70, "{version}: only {checked} facts checked");
    }
}

#[test]
fn kernels_differ_where_history_says_so() {
    let [old, new] = [resolve(V5_10).layout, resolve(V6_18).layout];
    assert_eq!(
        (old.listen_chain_is_nulls, new.listen_chain_is_nulls),
        (0, 1)
    );
    assert_eq!(new.listen_node, new.skc_nulls_node);
    assert_eq!((old.sk_cgroup_is_tagged, new.sk_cgroup_is_tagged), (1, 0));
    assert_eq!((old.send_reset_args, new.send_reset_args), (2, 3));
    assert_eq!((old.hashinfo_pernet, new.hashinfo_pernet), (ABSENT, 72));
}

#[test]
fn running_kernel_resolves() {
    if !std::path::Path::new(VMLINUX).exists() {
        eprintln!("skipped: this kernel has no {VMLINUX}");
        return;
    }
    let types = Types::load(VMLINUX).expect("BTF of the running kernel");
    let resolved = Layout::resolve(&types);
    assert_eq!(stopped(&resolved), [], "{:#?}", resolved.missing);
    // The kernel compares these pairs by one 8-byte and one 4-byte load, so their order is part of the kernel's code.
    let layout = resolved.layout;
    assert_eq!(layout.skc_rcv_saddr, layout.skc_daddr + 4);
    assert_eq!(layout.skc_num, layout.skc_dport + 2);
    // From the public interface <linux/if_ether.h>, <linux/bpf.h>: numbers that cannot move.
    assert_eq!(
        types
            .enum_value("bpf_prog_type", "BPF_PROG_TYPE_SCHED_CLS")
            .unwrap(),
        3
    );
    assert_eq!(types.struct_size("ethhdr").unwrap(), 14);
    assert_eq!(types.struct_size("iphdr").unwrap(), 20);
    assert_eq!(types.member("tcphdr", "seq").unwrap().offset_bytes, 4);
    let syn = types.member("tcphdr", "syn").unwrap();
    let bit = Bitfield {
        bit_offset: 1,
        bits: 1,
    };
    assert_eq!((syn.offset_bytes, syn.bitfield), (13, Some(bit)));
    assert!(types.function_exists("tcp_v4_connect").unwrap());
    assert!(!types.function_exists("tcp_v4_connectt").unwrap());
    assert_eq!(types.function_params("tcp_v4_connect").unwrap()[0], "sk");
}

#[test]
fn moved_member_is_followed() {
    let line = line_of(V6_18, "snd_una");
    let ty = line.split(' ').nth(1).unwrap();
    let moved = resolve(&change(V6_18, line, &format!("snd_una {ty} {}", 2000 * 8)));
    let mut expected = resolve(V6_18).layout;
    expected.snd_una = 2000;
    assert_eq!(moved.layout, expected);
    assert_eq!(moved.missing, []);
}

#[test]
fn missing_detail_stops_no_hook() {
    let resolved = resolve(&change(V6_18, line_of(V6_18, "icsk_backoff"), ""));
    assert_eq!(stopped(&resolved), []);
    assert_eq!(resolved.layout.icsk_backoff, ABSENT);
    let member = "inet_connection_sock.icsk_backoff";
    assert_eq!(
        hooks_missing(&resolved, member),
        [Hook::Retransmit, Hook::Census]
    );
    assert_eq!(resolved.missing.len(), 2);
    let text = resolved.missing[0].to_string();
    assert!(
        text.starts_with("retransmit tells less without inet_connection_sock.icsk_backoff: "),
        "{text}"
    );
}

#[test]
fn missing_table_stops_the_census_alone() {
    let resolved = resolve(&change(V6_18, line_of(V6_18, "ehash"), "ehashes 69 0"));
    assert_eq!(stopped(&resolved), [Hook::Census]);
    let why = &resolved.missing[0].why;
    assert!(
        why.contains("`inet_hashinfo` has no member `ehash`"),
        "{why}"
    );
    assert!(why.contains("similar: ehash_mask, ehashes"), "{why}");
}

#[test]
fn missing_header_offset_stops_send_reset_alone() {
    let resolved = resolve(&change(V6_18, line_of(V6_18, "transport_header"), ""));
    assert_eq!(stopped(&resolved), [Hook::SendReset]);
}

#[test]
fn missing_address_stops_every_hook_that_reads_it() {
    let resolved = resolve(&change(V6_18, line_of(V6_18, "skc_dport"), ""));
    let others = Hook::ALL.into_iter().filter(|h| *h != Hook::SendReset);
    assert_eq!(stopped(&resolved), others.collect::<Vec<_>>());
}

#[test]
fn kernel_without_ipv6_loses_no_hook() {
    let text = change(V6_18, line_of(V6_18, "skc_v6_daddr"), "");
    let text = change(&text, line_of(&text, "skc_v6_rcv_saddr"), "");
    assert_eq!(stopped(&resolve(&text)), []);
}

#[test]
fn socket_that_does_not_start_with_its_base_is_refused() {
    let line = line_of(V6_18, "__sk_common");
    let moved = change(V6_18, line, &line.replace(" 0", " 64"));
    assert_eq!(stopped(&resolve(&moved)), Hook::ALL);
}

#[test]
fn tracepoint_missing_or_without_socket() {
    let line = V6_18
        .lines()
        .find(|l| l.contains("typedef btf_trace_tcp_send_reset"));
    let line = line.unwrap();
    let resolved = resolve(&change(
        V6_18,
        line,
        &line.replace("send_reset", "send_rst"),
    ));
    assert_eq!(stopped(&resolved), [Hook::SendReset]);
    assert_eq!(resolved.layout.send_reset_args, ABSENT);

    let proto = proto_after(V6_18, line);
    let words: Vec<&str> = proto.split(' ').collect();
    // id, "proto", return type, __data, sock, skb, reason.
    let swapped = [
        words[0], words[1], words[2], words[3], words[6], words[5], words[4],
    ]
    .join(" ");
    let resolved = resolve(&change(V6_18, proto, &swapped));
    assert_eq!(
        stopped(&resolved),
        [Hook::SendReset],
        "skb before sock is not what is known"
    );
    let moved = [
        words[0], words[1], words[2], words[3], words[6], words[4], words[5],
    ]
    .join(" ");
    let layout = resolve(&change(V6_18, proto, &moved)).layout;
    assert_eq!((layout.send_reset_sk, layout.send_reset_skb), (1, 2));
    let void = [words[0], words[1], words[2], words[3], words[3]].join(" ");
    let resolved = resolve(&change(V6_18, proto, &void));
    assert_eq!(stopped(&resolved), [Hook::SendReset]);
    assert!(
        resolved.missing[0].why.contains("(void *)"),
        "{}",
        resolved.missing[0].why
    );
}

/// The prototype behind a tracepoint's typedef: typedef → pointer → prototype.
fn proto_after<'a>(text: &'a str, typedef: &str) -> &'a str {
    let id = |line: &str| line.rsplit(' ').next().unwrap().to_owned();
    let by_id = |id: &str| {
        let start = format!("{id} ");
        text.lines().find(|l| l.starts_with(&start)).unwrap()
    };
    by_id(&id(by_id(&id(typedef))))
}

#[test]
fn death_row_behind_a_pointer() {
    // As in 5.18 to 6.0. Type 20 or another `ptr 0` stands for `struct inet_timewait_death_row *`.
    let pointer = V6_1.lines().find(|l| l.ends_with(" ptr 0")).unwrap();
    let pointer = pointer.split(' ').next().unwrap();
    let line = line_of(V6_1, "tcp_death_row");
    let offset = line.rsplit(' ').next().unwrap();
    let resolved = resolve(&change(
        V6_1,
        line,
        &format!("tcp_death_row {pointer} {offset}"),
    ));
    let embedded = resolve(V6_1).layout;
    assert_eq!(resolved.missing, []);
    assert_eq!(embedded.net_tcp_death_row_is_pointer, 0);
    assert_eq!(resolved.layout.net_tcp_death_row_is_pointer, 1);
    assert_eq!(
        resolved.layout.net_tcp_death_row,
        embedded.net_tcp_death_row
    );
    assert_eq!(
        resolved.layout.death_row_hashinfo,
        embedded.death_row_hashinfo
    );
}

#[test]
fn protocol_as_a_bitfield() {
    let line = line_of(V5_10, "sk_protocol");
    let [_, ty, offset] = line.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{line}")
    };
    let offset: u32 = offset.parse().unwrap();
    // As before 5.6: `unsigned int … sk_userlocks : 4, sk_protocol : 8, sk_type : 16`.
    let bits = change(V5_10, line, &format!("sk_protocol {ty} {} 8", offset + 8));
    let resolved = resolve(&bits);
    assert_eq!(resolved.missing, []);
    assert_eq!(resolved.layout.sk_protocol, offset / 8 + 1);
    assert_eq!(resolved.layout.sk_protocol_bytes, 1);

    let crooked = resolve(&change(
        V5_10,
        line,
        &format!("sk_protocol {ty} {} 8", offset + 3),
    ));
    assert_eq!(stopped(&crooked), [Hook::Lifecycle]);
    assert_eq!(crooked.layout.sk_protocol, ABSENT);
}

#[test]
fn member_of_another_size_is_missing() {
    let line = line_of(V6_18, "icsk_retransmits");
    let wide = line_of(V6_18, "snd_una").split(' ').nth(1).unwrap();
    let offset = line.rsplit(' ').next().unwrap();
    let resolved = resolve(&change(
        V6_18,
        line,
        &format!("icsk_retransmits {wide} {offset}"),
    ));
    assert_eq!(resolved.layout.icsk_retransmits, ABSENT);
    let why = &resolved.missing[0].why;
    assert_eq!(why, "it is of 4 bytes on this kernel, the programs read 1");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Damaged data give errors or missing facts, no panic and no endless loop.
    #[test]
    fn damaged_data_never_panic(hits in prop::collection::vec((24_usize..3000, any::<u8>()), 1..20), cut in 0_usize..200) {
        let mut blob = write_btf(V6_18);
        for (at, value) in hits {
            let at = at % blob.len();
            blob[at.max(24)] = value;
        }
        blob.truncate(blob.len() - cut);
        if let Ok(types) = Types::from_bytes(&blob) {
            let _ = Layout::resolve(&types);
        }
    }
}
