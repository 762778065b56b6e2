//! Takes out of a kernel's BTF what the resolver reads, as a text for `write_btf`: how the files in `kernels/` were
//! made. To add one:
//!
//! ```text
//! TUPLEWATCH_BTF=/path/to/btf TUPLEWATCH_EXTRACT=/path/to/new.txt \
//!     cargo test -p tuplewatch --lib kernel_facts::tests::extract -- --ignored
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use btf_rs::{BtfType, Type};

use crate::kernel_facts::hook::Hook;
use crate::kernel_facts::layout::Layout;
use crate::kernel_facts::{Types, VMLINUX};

/// What the resolver reads besides `Layout::FACTS`.
const DERIVED: &[(&str, &str)] = &[
    ("sock", "__sk_common"),
    ("inet_sock", "sk"),
    ("inet_connection_sock", "icsk_inet.sk"),
    ("tcp_sock", "inet_conn.icsk_inet.sk"),
    ("inet_timewait_sock", "__tw_common"),
    ("tcp_timewait_sock", "tw_sk.__tw_common"),
    ("request_sock", "__req_common"),
    ("tcp_request_sock", "req.req.__req_common"),
    ("hlist_nulls_node", "next"),
    ("hlist_node", "next"),
    ("sock", "sk_protocol"),
    ("sock", "sk_cgrp_data.val"),
    ("sock", "sk_cgrp_data.cgroup"),
    ("net", "ipv4.tcp_death_row"),
    ("net", "ipv4.ip_local_ports.range"),
    ("net", "ipv4.sysctl_tcp_tw_reuse_delay"),
    ("inet_timewait_death_row", "hashinfo"),
    ("inet_hashinfo", "pernet"),
    ("inet_connection_sock", "icsk_listen_portaddr_node"),
    ("inet_listen_hashbucket", "head.first"),
    ("inet_listen_hashbucket", "nulls_head.first"),
];

/// Types to be kept, and of structs the members.
struct Extract<'a> {
    types: &'a Types,
    keep: BTreeMap<u32, BTreeSet<usize>>,
}

impl Extract<'_> {
    fn ty(&self, id: u32) -> Type {
        self.types.at(id, "extract").expect("type")
    }

    fn name(&self, ty: &dyn BtfType) -> String {
        let name = self.types.name(ty, "extract").unwrap_or_default();
        if name.is_empty() {
            "-".to_owned()
        } else {
            name
        }
    }

    /// Keeps a type and what it is made of. Pointers are followed only where the target's name matters.
    fn keep(&mut self, id: u32, through_pointers: bool) {
        let ty = self.ty(id);
        if id == 0 || self.keep.contains_key(&id) {
            return;
        }
        self.keep.insert(id, BTreeSet::new());
        match &ty {
            Type::Ptr(_) if !through_pointers => {}
            Type::FuncProto(proto) => {
                for parameter in &proto.parameters {
                    self.keep(parameter.get_type_id().unwrap_or_default(), true);
                }
            }
            Type::Struct(_) | Type::Union(_) => {}
            other => {
                if let Some(inner) = other.as_btf_type().and_then(BtfType::get_type_id) {
                    self.keep(inner, through_pointers);
                }
            }
        }
    }

    /// Keeps one member of the struct behind `id`, and gives its type.
    fn member(&mut self, id: u32, wanted: &str) -> Option<u32> {
        let ty = self.ty(id);
        let members = match &ty {
            Type::Struct(s) | Type::Union(s) => &s.members,
            other => {
                let inner = other.as_btf_type()?.get_type_id()?;
                return self.member(inner, wanted);
            }
        };
        for (index, member) in members.iter().enumerate() {
            let inner = member.get_type_id()?;
            let found = match self.name(member).as_str() {
                name if name == wanted => Some(inner),
                "-" => self.member(inner, wanted),
                _ => None,
            };
            if let Some(found) = found {
                self.keep(inner, false);
                self.keep.entry(id).or_default().insert(index);
                return Some(found);
            }
        }
        None
    }

    fn path(&mut self, structure: &str, path: &str) {
        for (root, _) in self.types.composites(structure).unwrap_or_default() {
            self.keep.entry(root).or_default();
            let mut at = root;
            for segment in path.split('.') {
                match self.member(at, segment) {
                    Some(inner) => at = inner,
                    None => break,
                }
            }
        }
    }

    fn print(&self) -> String {
        let order: BTreeMap<u32, usize> = self.keep.keys().copied().zip(1..).collect();
        // What is not kept is void: the target of a pointer.
        let new = |id: Option<u32>| order.get(&id.unwrap_or_default()).copied().unwrap_or(0);
        let mut text = String::new();
        for (id, members) in &self.keep {
            let ty = self.ty(*id);
            let line = match &ty {
                Type::Int(t) => format!("int {} {}", self.name(t).replace(' ', "_"), t.size()),
                Type::Ptr(t) => format!("ptr {}", new(t.get_type_id())),
                Type::Array(t) => format!("array {} {}", new(t.get_type_id()), t.len()),
                Type::Struct(t) => format!("struct {} {}", self.name(t), t.size()),
                Type::Union(t) => format!("union {} {}", self.name(t), t.size()),
                Type::Enum(t) => format!("enum {} {}", self.name(t), t.size()),
                Type::Fwd(t) => format!("fwd {}", self.name(t)),
                Type::Typedef(t) => format!("typedef {} {}", self.name(t), new(t.get_type_id())),
                Type::Const(t) => format!("const {}", new(t.get_type_id())),
                // A tag qualifies nothing that the tests look at.
                Type::Volatile(t) => format!("volatile {}", new(t.get_type_id())),
                Type::TypeTag(t) => format!("volatile {}", new(t.get_type_id())),
                Type::FuncProto(t) => {
                    let parameters = t
                        .parameters
                        .iter()
                        .map(|p| new(p.get_type_id()).to_string());
                    format!("proto 0 {}", parameters.collect::<Vec<_>>().join(" "))
                }
                other => panic!("{} is not expected here", other.name()),
            };
            writeln!(text, "{} {line}", order[id]).expect("string");
            if let Type::Struct(t) | Type::Union(t) = &ty {
                for member in members.iter().map(|index| &t.members[*index]) {
                    let name = self.name(member);
                    let (ty, offset) = (new(member.get_type_id()), member.bit_offset());
                    let width = member.bitfield_size().filter(|w| *w > 0);
                    let width = width.map_or(String::new(), |w| format!(" {w}"));
                    writeln!(text, "  {name} {ty} {offset}{width}").expect("string");
                }
            }
        }
        text
    }
}

#[test]
#[ignore = "writes a file; for adding a kernel"]
fn extract() {
    let source = std::env::var("TUPLEWATCH_BTF").unwrap_or_else(|_| VMLINUX.to_owned());
    let target =
        std::env::var("TUPLEWATCH_EXTRACT").expect("TUPLEWATCH_EXTRACT names the new file");
    let types = Types::load(&source).expect("BTF");
    let mut extract = Extract {
        types: &types,
        keep: BTreeMap::new(),
    };
    let facts = Layout::FACTS.iter().map(|f| (f.structure, f.path));
    for (structure, path) in facts.chain(DERIVED.iter().copied()) {
        extract.path(structure, path);
    }
    for tracepoint in Hook::ALL.into_iter().filter_map(Hook::tracepoint) {
        for id in types.ids(&format!("btf_trace_{tracepoint}")).expect("ids") {
            extract.keep(id, true);
        }
    }
    let text = extract.print();
    let blob = super::writer::write_btf(&text);
    let small = Types::from_bytes(&blob).expect("extract is BTF");
    assert_eq!(Layout::resolve(&small), Layout::resolve(&types));
    std::fs::write(target, text).expect("write");
}
