//! The programs that packets pass at an interface: ours and other people's, tcx and clsact.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
};

use aya::programs::{SchedClassifier, TcAttachType};

use crate::kernel_facts::interfaces::{
    Interface,
    clsact::{self, Side},
};

/// How a program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// A tcx link.
    Tcx,
    /// A filter of clsact, which packets meet after all of tcx on their way in.
    Clsact,
}

/// A program or filter of somebody else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Other {
    /// Which packets it sees.
    pub side: Side,
    /// How it is attached.
    pub way: Way,
    /// Its name, or what else is known of it.
    pub name: String,
    /// It belongs to another tuplewatch.
    pub is_tuplewatch: bool,
    /// Packets meet it before they meet ours; false where ours is not attached.
    pub is_before: bool,
}

/// How the names of our programs begin.
const OURS: &str = "tuplewatch_";

/// The programs on one side of an interface that were attached by tcx, by the kernel's numbers, first to
/// last. It takes CAP_NET_ADMIN (and, unlike the names of the programs, nothing else).
///
/// # Errors
/// The kernel has no tcx, or the right is missing.
pub(super) fn tcx(index: u32, side: Side) -> io::Result<Vec<u32>> {
    /// `bpf_attr.query` of <linux/bpf.h>.
    #[repr(C)]
    #[derive(Default)]
    struct Query {
        interface: u32,
        attach_type: u32,
        query_flags: u32,
        attach_flags: u32,
        programs: u64,
        count: u32,
        pad: u32,
        program_attach_flags: u64,
        links: u64,
        link_attach_flags: u64,
        revision: u64,
    }
    const BPF_PROG_QUERY: libc::c_long = 16;
    const BPF_TCX_INGRESS: u32 = 46;
    const BPF_TCX_EGRESS: u32 = 47;
    /// `BPF_MPROG_MAX`: no chain is longer.
    const MOST: usize = 64;
    let mut programs = [0_u32; MOST];
    let mut query = Query {
        interface: index,
        attach_type: match side {
            Side::Ingress => BPF_TCX_INGRESS,
            Side::Egress => BPF_TCX_EGRESS,
        },
        programs: programs.as_mut_ptr() as u64,
        count: MOST as u32,
        ..Query::default()
    };
    // SAFETY: `query` has the layout and the size that are given, and `programs` room for as many
    // numbers as it says.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            BPF_PROG_QUERY,
            &raw mut query,
            size_of::<Query>(),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(programs.into_iter().take(query.count as usize).collect())
}

/// Everybody else's programs on an interface, in the order in which packets meet them. `ours` are the
/// numbers of our programs.
///
/// # Errors
/// What tcx has cannot be asked for; the filters of clsact are given all the same.
pub fn others(interface: &Interface, ours: &BTreeSet<u32>) -> (Vec<Other>, io::Result<()>) {
    let mut found = Vec::new();
    let mut result = Ok(());
    for side in Side::BOTH {
        let mut chain = Vec::new();
        match tcx(interface.index, side) {
            Ok(programs) => {
                let names = names(&interface.name, side);
                chain.extend(programs.into_iter().map(|id| Member {
                    way: Way::Tcx,
                    program: Some(id),
                    name: names.get(&id).cloned(),
                    kind: "program".to_owned(),
                }));
            }
            // Below 6.6 there is no such thing.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            Err(error) => result = Err(error),
        }
        let filters = clsact::filters(interface.index, side).unwrap_or_default();
        chain.extend(filters.into_iter().map(|filter| Member {
            way: Way::Clsact,
            program: filter.program,
            name: filter.name,
            kind: format!("{} filter of priority {}", filter.kind, filter.priority),
        }));
        found.extend(judge(chain, side, ours));
    }
    (found, result)
}

/// Where one of our programs stands on its side of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Packets meet it before they meet anybody else's, other tuplewatches aside: those let every packet pass.
    First,
    /// Somebody else's program comes before it.
    Behind,
    /// It is not there any more.
    Gone,
}

/// Where our program with this number stands among those attached the same way.
///
/// # Errors
/// They cannot be asked for.
pub(super) fn standing(
    interface: &Interface,
    side: Side,
    way: Way,
    ours: u32,
) -> io::Result<Standing> {
    match way {
        Way::Tcx => {
            let programs = tcx(interface.index, side)?;
            // Their names are a further question.
            if programs.first() == Some(&ours) {
                return Ok(Standing::First);
            }
            let names = names(&interface.name, side);
            let programs = programs.into_iter();
            let members = programs.map(|id| (Some(id), names.get(&id).map(String::as_str)));
            Ok(stands(members, ours))
        }
        Way::Clsact => {
            // Of those of one priority the newest comes first.
            let filters = clsact::filters(interface.index, side)?;
            let members = filters.iter().map(|f| (f.program, f.name.as_deref()));
            Ok(stands(members, ours))
        }
    }
}

/// Numbers and names of programs as packets meet them. What is no program has no number, and names may not be told.
fn stands<'a>(
    members: impl Iterator<Item = (Option<u32>, Option<&'a str>)>,
    ours: u32,
) -> Standing {
    let mut standing = Standing::First;
    for (id, name) in members {
        if id == Some(ours) {
            return standing;
        }
        if !name.is_some_and(|name| name.starts_with(OURS)) {
            standing = Standing::Behind;
        }
    }
    Standing::Gone
}

/// One of a chain.
struct Member {
    way: Way,
    program: Option<u32>,
    name: Option<String>,
    kind: String,
}

/// The others of a chain.
fn judge(chain: Vec<Member>, side: Side, ours: &BTreeSet<u32>) -> Vec<Other> {
    let is_ours = |member: &Member| member.program.is_some_and(|id| ours.contains(&id));
    let our_place = chain.iter().position(is_ours);
    let others = chain
        .into_iter()
        .enumerate()
        .filter(|(_, member)| !is_ours(member));
    others
        .map(|(place, member)| Other {
            side,
            way: member.way,
            is_tuplewatch: member.name.as_ref().is_some_and(|n| n.starts_with(OURS)),
            is_before: our_place.is_some_and(|ours| place < ours),
            name: match (member.name, member.program) {
                (Some(name), _) => name,
                (None, Some(id)) => format!("{} {id}", member.kind),
                (None, None) => member.kind,
            },
        })
        .collect()
}

/// Names of the tcx programs, by number: the kernel tells them to CAP_SYS_ADMIN only.
fn names(interface: &str, side: Side) -> BTreeMap<u32, String> {
    let side = match side {
        Side::Ingress => TcAttachType::Ingress,
        Side::Egress => TcAttachType::Egress,
    };
    let programs = SchedClassifier::query_tcx(interface, side).map(|(_, programs)| programs);
    programs
        .unwrap_or_default()
        .iter()
        .filter_map(|program| Some((program.id(), program.name_as_str()?.to_owned())))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_are_told_from_ours_and_by_their_place() {
        let member = |way, program, name: Option<&str>| Member {
            way,
            program,
            name: name.map(str::to_owned),
            kind: "program".to_owned(),
        };
        let chain = vec![
            member(Way::Tcx, Some(3), None),
            member(Way::Tcx, Some(7), Some("tuplewatch_in")),
            member(Way::Tcx, Some(8), Some("tuplewatch_in")),
            member(Way::Clsact, None, None),
        ];
        let others = judge(chain, Side::Ingress, &BTreeSet::from([7]));
        let told: Vec<_> = others
            .iter()
            .map(|o| (o.name.as_str(), o.is_tuplewatch, o.is_before))
            .collect();
        let expected = [
            ("program 3", false, true),
            ("tuplewatch_in", true, false),
            ("program", false, false),
        ];
        assert_eq!(told, expected);
    }

    #[test]
    fn another_tuplewatch_may_come_first() {
        let (ours, other) = ((Some(7), Some("tuplewatch_in")), Some("tuplewatch_in"));
        let cases = [
            (vec![ours], Standing::First),
            (vec![ours, (Some(3), Some("cil"))], Standing::First),
            (vec![(Some(8), other), ours], Standing::First),
            (vec![(Some(3), Some("cil")), ours], Standing::Behind),
            (
                vec![(Some(8), other), (Some(3), None), ours],
                Standing::Behind,
            ),
            (vec![(None, None), ours], Standing::Behind),
            (vec![(Some(8), other)], Standing::Gone),
            (vec![], Standing::Gone),
        ];
        for (members, expected) in cases {
            assert_eq!(stands(members.iter().copied(), 7), expected, "{members:?}");
        }
    }

    #[test]
    fn without_ours_nobody_is_before() {
        let chain = vec![Member {
            way: Way::Tcx,
            program: Some(3),
            name: Some("cil_from_netdev".to_owned()),
            kind: "program".to_owned(),
        }];
        let others = judge(chain, Side::Egress, &BTreeSet::new());
        assert!(!others[0].is_before && !others[0].is_tuplewatch);
    }
}
