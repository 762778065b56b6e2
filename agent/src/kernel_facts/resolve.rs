//! Fills the [`Layout`] from a kernel's BTF in one pass and says which hook loses what.

use super::btf::Types;
use super::error::FactError;
use super::hook::{Hook, Missing, Needs, Resolved};
use super::layout::{ABSENT, Layout};
use super::member::Member;

impl Layout {
    /// Looks every fact up. Never fails as a whole: what is missing is listed for the hooks that need it.
    #[must_use]
    pub fn resolve(types: &Types) -> Resolved {
        let mut resolver = Resolver {
            types,
            layout: Self::UNKNOWN,
            missing: Vec::new(),
        };
        for fact in Self::FACTS {
            let member = resolver.sized(fact.structure, fact.path, fact.size, fact.needs);
            *(fact.field)(&mut resolver.layout) = offset(member);
        }
        resolver.starts();
        resolver.bits();
        resolver.cgroup();
        resolver.tables();
        resolver.listeners();
        resolver.tracepoints();
        Resolved {
            layout: resolver.layout,
            missing: resolver.missing,
        }
    }
}

fn offset(member: Option<Member>) -> u32 {
    member.map_or(ABSENT, |m| m.offset_bytes)
}

struct Resolver<'a> {
    types: &'a Types,
    layout: Layout,
    missing: Vec<Missing>,
}

const CENSUS: Needs = Needs::essential(&[Hook::Census]);
const CENSUS_DETAIL: Needs = Needs::detail(&[Hook::Census]);

impl Resolver<'_> {
    fn lacks(&mut self, needs: Needs, member: &str, why: &str) {
        self.missing.extend(needs.hooks.iter().map(|hook| Missing {
            group: *hook,
            member: member.to_owned(),
            why: why.to_owned(),
            essential: needs.essential,
        }));
    }

    fn member(&mut self, structure: &str, path: &str, needs: Needs) -> Option<Member> {
        let found = self.types.member(structure, path);
        self.or_lacks(found, &format!("{structure}.{path}"), needs)
    }

    fn or_lacks<T>(&mut self, found: Result<T, FactError>, what: &str, needs: Needs) -> Option<T> {
        found
            .map_err(|error| self.lacks(needs, what, &error.to_string()))
            .ok()
    }

    /// A member that must not be a bitfield and must have the size that the programs read.
    fn sized(&mut self, structure: &str, path: &str, size: u32, needs: Needs) -> Option<Member> {
        let member = self.member(structure, path, needs)?;
        if member.size == size && member.bitfield.is_none() {
            return Some(member);
        }
        let is = match member.bitfield {
            Some(field) => format!("a bitfield of {} bits", field.bits),
            None => format!("of {} bytes", member.size),
        };
        let why = format!("it is {is} on this kernel, the programs read {size}");
        self.lacks(needs, &format!("{structure}.{path}"), &why);
        None
    }

    /// The programs take a `struct sock *` for all of its kinds: each must start with the next.
    fn starts(&mut self) {
        const EVERY: Needs = Needs::essential(&Hook::ALL);
        let nested = [
            ("sock", "__sk_common", EVERY),
            ("inet_sock", "sk", EVERY),
            ("inet_connection_sock", "icsk_inet.sk", EVERY),
            ("tcp_sock", "inet_conn.icsk_inet.sk", EVERY),
            ("inet_timewait_sock", "__tw_common", CENSUS),
            ("tcp_timewait_sock", "tw_sk.__tw_common", CENSUS),
            ("request_sock", "__req_common", CENSUS),
            ("tcp_request_sock", "req.req.__req_common", CENSUS),
            // Chains are followed by the first word of a node.
            ("hlist_nulls_node", "next", CENSUS),
            ("hlist_node", "next", CENSUS),
        ];
        for (structure, path, needs) in nested {
            let at = self
                .member(structure, path, needs)
                .map_or(0, |m| m.offset_bytes);
            if at != 0 {
                let why = format!("it is {at} bytes from the start, it was expected at the start");
                self.lacks(needs, &format!("{structure}.{path}"), &why);
            }
        }
    }

    fn bits(&mut self) {
        const PROTOCOL: Needs = Needs::essential(&[Hook::Lifecycle]);
        if let Some(member) = self.member("sock", "sk_protocol", PROTOCOL) {
            let whole_bytes = member
                .bitfield
                .is_none_or(|f| f.bit_offset == 0 && f.bits % 8 == 0);
            if whole_bytes && matches!(member.size, 1 | 2) {
                self.layout.sk_protocol = member.offset_bytes;
                self.layout.sk_protocol_bytes = member.size;
            } else {
                let why = "it is neither one nor two whole bytes on this kernel";
                self.lacks(PROTOCOL, "sock.sk_protocol", why);
            }
        }
    }

    fn cgroup(&mut self) {
        const NEEDS: Needs = Needs::detail(&[Hook::Lifecycle]);
        let old = self.types.member("sock", "sk_cgrp_data.val");
        let (member, tagged) = match old {
            Ok(word) if word.size == 8 => (Some(word), 1),
            _ => (self.sized("sock", "sk_cgrp_data.cgroup", 8, NEEDS), 0),
        };
        if let Some(member) = member {
            self.layout.sk_cgroup = member.offset_bytes;
            self.layout.sk_cgroup_is_tagged = tagged;
        }
    }

    fn tables(&mut self) {
        if let Some(row) = self.member("net", "ipv4.tcp_death_row", CENSUS) {
            self.layout.net_tcp_death_row = row.offset_bytes;
            self.layout.net_tcp_death_row_is_pointer = u32::from(row.is_pointer());
        }
        if let Some(range) = self.member("net", "ipv4.ip_local_ports.range", CENSUS_DETAIL) {
            if matches!(range.size, 4 | 8) {
                self.layout.net_local_ports = range.offset_bytes;
                self.layout.net_local_ports_bytes = range.size;
            } else {
                let why = "it is neither one number nor two on this kernel";
                self.lacks(CENSUS_DETAIL, "net.ipv4.ip_local_ports.range", why);
            }
        }
        // Before 6.14 the delay is one second: nothing is missing.
        let delay = self.types.member("net", "ipv4.sysctl_tcp_tw_reuse_delay");
        self.layout.net_tw_reuse_delay = delay.map_or(ABSENT, |m| m.offset_bytes);
        if let Some(hashinfo) = self.sized("inet_timewait_death_row", "hashinfo", 8, CENSUS) {
            if hashinfo.is_pointer() {
                self.layout.death_row_hashinfo = hashinfo.offset_bytes;
            } else {
                let why = "it is no pointer on this kernel";
                self.lacks(CENSUS, "inet_timewait_death_row.hashinfo", why);
            }
        }
        // Before 6.1 there are no tables of single namespaces: nothing is missing.
        if self.types.member("inet_hashinfo", "pernet").is_ok() {
            let pernet = self.sized("inet_hashinfo", "pernet", 1, CENSUS_DETAIL);
            self.layout.hashinfo_pernet = offset(pernet);
        }
        let size = self.types.struct_size("inet_ehash_bucket");
        let size = self.or_lacks(size, "inet_ehash_bucket", CENSUS);
        self.layout.ehash_bucket_size = size.unwrap_or(ABSENT);
    }

    fn listeners(&mut self) {
        let size = self.types.struct_size("inet_listen_hashbucket");
        let size = self.or_lacks(size, "inet_listen_hashbucket", CENSUS_DETAIL);
        self.layout.listen_bucket_size = size.unwrap_or(ABSENT);
        // 5.19 moved the listeners from their own node to the one that all rows use.
        let own_node = self
            .types
            .member("inet_connection_sock", "icsk_listen_portaddr_node");
        let (first, node, nulls) = match own_node {
            Ok(node) => ("head.first", node.offset_bytes, 0),
            Err(_) => ("nulls_head.first", self.layout.skc_nulls_node, 1),
        };
        let first = self.sized("inet_listen_hashbucket", first, 8, CENSUS_DETAIL);
        if let Some(first) = first {
            self.layout.listen_bucket_first = first.offset_bytes;
            self.layout.listen_node = node;
            self.layout.listen_chain_is_nulls = nulls;
        }
    }

    fn tracepoints(&mut self) {
        const SOCK: &str = "struct sock *";
        const SKB: &str = "struct sk_buff *";
        if let Some(args) = self.arguments(Hook::Lifecycle, &[SOCK, "int", "int"]) {
            self.layout.set_state_args = args.count;
            self.layout.set_state_sk = args.index[0];
        }
        if let Some(args) = self.arguments(Hook::Retransmit, &[SOCK, SKB]) {
            self.layout.retransmit_args = args.count;
            self.layout.retransmit_sk = args.index[0];
            self.layout.retransmit_skb = args.index[1];
        }
        if let Some(args) = self.arguments(Hook::SendReset, &[SOCK, SKB]) {
            self.layout.send_reset_args = args.count;
            self.layout.send_reset_sk = args.index[0];
            self.layout.send_reset_skb = args.index[1];
        }
        if let Some(args) = self.arguments(Hook::ReceiveReset, &[SOCK]) {
            self.layout.receive_reset_args = args.count;
            self.layout.receive_reset_sk = args.index[0];
        }
    }

    /// Finds the arguments of the hook's tracepoint by their types, as arguments are added and moved over the
    /// kernel's life. Several of one type must stand side by side.
    fn arguments(&mut self, hook: Hook, wanted: &[&str]) -> Option<Arguments> {
        const fn essential(hook: Hook) -> Needs {
            match hook {
                Hook::Lifecycle => Needs::essential(&[Hook::Lifecycle]),
                Hook::Retransmit => Needs::essential(&[Hook::Retransmit]),
                Hook::SendReset => Needs::essential(&[Hook::SendReset]),
                Hook::ReceiveReset => Needs::essential(&[Hook::ReceiveReset]),
                Hook::Census => CENSUS,
            }
        }
        let name = hook.tracepoint()?;
        let what = format!("tracepoint {name}");
        let found = self.types.tracepoint_args(name);
        let Some(args) = self.or_lacks(found, &what, essential(hook))? else {
            self.lacks(essential(hook), &what, "this kernel has no such tracepoint");
            return None;
        };
        let plain: Vec<String> = args.iter().map(|a| a.replace("const ", "")).collect();
        let mut index = Vec::new();
        for ty in wanted {
            let from = index.last().map_or(0, |last: &usize| *last + 1);
            let next = plain.iter().skip(from).position(|arg| arg == ty);
            let Some(next) = next else {
                let why = format!(
                    "its arguments are ({}), a `{ty}` was expected",
                    args.join(", ")
                );
                self.lacks(essential(hook), &what, &why);
                return None;
            };
            index.push(from + next);
        }
        let number = |n: usize| u32::try_from(n).unwrap_or(ABSENT);
        Some(Arguments {
            count: number(args.len()),
            index: index.into_iter().map(number).collect(),
        })
    }
}

/// Arguments of a tracepoint.
struct Arguments {
    count: u32,
    /// Positions of the wanted ones.
    index: Vec<u32>,
}
