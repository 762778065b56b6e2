//! `Types` on a small invented kernel: paths, enumerators, functions, and what the errors say.

use super::types;
use crate::kernel_facts::*;

const SMALL: &str = "
1 int int 4
2 struct inner 8
  a 1 0
  b 1 32
3 union - 8
  whole 2 0
  c 1 32
4 typedef inner_t 2
5 const 4
6 volatile 5
7 array 1 3
8 ptr 2
9 struct outer 64
  - 3 64
  deep 6 128
  list 7 256
  link 8 384
  low 1 448 3
  high 1 451 9
10 enum colour 4
  RED 0
  GREEN 7
11 proto 0 first:1 second:8
12 func paint 11
13 typedef loop 14
14 const 13
15 struct odd 8
  again 13 0
16 fwd gone
";

#[test]
fn paths_lead_through_anonymous_and_qualified_types() {
    let types = types(SMALL);
    let place = |path| {
        types
            .member("outer", path)
            .map(|m| (m.offset_bytes, m.size, m.shape))
    };
    assert_eq!(place("whole.b").unwrap(), (12, 4, Shape::Scalar));
    assert_eq!(place("c").unwrap(), (12, 4, Shape::Scalar));
    assert_eq!(place("deep").unwrap(), (16, 8, Shape::Composite));
    assert_eq!(place("deep.b").unwrap(), (20, 4, Shape::Scalar));
    assert_eq!(place("list").unwrap(), (32, 12, Shape::Array));
    assert_eq!(place("link").unwrap(), (48, 8, Shape::Pointer));
    let high = types.member("outer", "high").unwrap();
    let bits = Bitfield {
        bit_offset: 3,
        bits: 9,
    };
    assert_eq!(
        (high.offset_bytes, high.size, high.bitfield),
        (56, 2, Some(bits))
    );
    assert_eq!(types.struct_size("outer").unwrap(), 64);
    assert_eq!(types.enum_value("colour", "GREEN").unwrap(), 7);
    assert_eq!(types.function_params("paint").unwrap(), ["first", "second"]);
    assert_eq!(types.tracepoint_args("paint").unwrap(), None);
}

#[test]
fn errors_name_the_place_and_what_resembles_it() {
    let types = types(SMALL);
    let error = |result: Result<Member, FactError>| result.unwrap_err().to_string();
    assert_eq!(
        error(types.member("outer", "deep.bb")),
        "`outer.deep` has no member `bb` on this kernel (asked for: `outer.deep.bb`); similar: b, a"
    );
    assert_eq!(
        error(types.member("outer", "link.a")),
        "`outer.link` is a ptr on this kernel, it has no member `a`"
    );
    assert_eq!(
        error(types.member("uoter", "a")),
        "this kernel has no struct `uoter`; similar: outer"
    );
    assert_eq!(
        types.enum_value("colour", "GREN").unwrap_err().to_string(),
        "`enum colour` has no enumerator `GREN` on this kernel; similar: GREEN, RED"
    );
    assert!(
        types.member("gone", "a").is_err(),
        "a forward declaration has no members"
    );
    assert!(
        types.member("odd", "again.a").is_err(),
        "a typedef of itself ends"
    );
}

#[test]
fn two_definitions_that_disagree_are_refused() {
    let twice = format!("{SMALL}\n17 struct inner 12\n  a 1 32\n  b 1 32\n");
    let types = types(&twice);
    assert!(matches!(
        types.member("inner", "a"),
        Err(FactError::Ambiguous {
            first: 0,
            second: 4,
            ..
        })
    ));
    assert_eq!(types.member("inner", "b").unwrap().offset_bytes, 4);
}

#[test]
fn unreadable_input_is_an_error() {
    let error = Types::load("/nonexistent/btf").err().unwrap().to_string();
    assert!(
        error.contains("/nonexistent/btf") && error.contains("CONFIG_DEBUG_INFO_BTF"),
        "{error}"
    );
    assert!(matches!(
        Types::from_bytes(b"no BTF"),
        Err(FactError::Parse { .. })
    ));
    assert!(matches!(
        Types::from_bytes(&[]),
        Err(FactError::Parse { .. })
    ));
}
