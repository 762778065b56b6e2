//! Places of struct members: walks a dotted path through embedded and anonymous structs and unions.

use btf_rs::{BtfType as _, Type};

use super::btf::{Kind, MAX_DEPTH, Types};
use super::error::{FactError, nearest};

/// Size of a pointer in the kernels that are supported (64-bit only).
const POINTER_SIZE: u32 = 8;

/// What a member is, once typedefs and qualifiers are taken off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Integer, enum, boolean.
    Scalar,
    /// Pointer to anything.
    Pointer,
    /// Embedded struct or union.
    Composite,
    /// Array of anything.
    Array,
}

/// Place of a bitfield. Little-endian counting: bit 0 is the lowest bit of the byte at [`Member::offset_bytes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bitfield {
    /// First bit, 0 to 7.
    pub bit_offset: u32,
    /// Number of bits.
    pub bits: u32,
}

/// Place of a struct member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Bytes from the start of the outermost struct of the path.
    pub offset_bytes: u32,
    /// Size in bytes; of a bitfield the bytes that it touches.
    pub size: u32,
    /// Set if the member is a bitfield.
    pub bitfield: Option<Bitfield>,
    /// Scalar, pointer, embedded struct or array.
    pub shape: Shape,
}

impl Member {
    /// True for a pointer, false for an embedded struct (or anything else).
    #[must_use]
    pub fn is_pointer(&self) -> bool {
        self.shape == Shape::Pointer
    }
}

impl Types {
    /// Place of a member. The path may lead through embedded and anonymous structs and unions (`"skc_net.net"`,
    /// `"tw_timer.expires"`), not through pointers.
    ///
    /// # Errors
    /// No such struct or member (with near names), or two definitions that disagree.
    pub fn member(&self, structure: &str, path: &str) -> Result<Member, FactError> {
        let mut found: Option<Member> = None;
        for (_, ty) in self.composites(structure)? {
            let member = self.member_of(ty, structure, path)?;
            match found {
                Some(first) if first != member => {
                    return Err(FactError::Ambiguous {
                        path: format!("{structure}.{path}"),
                        first: first.offset_bytes,
                        second: member.offset_bytes,
                    });
                }
                _ => found = Some(member),
            }
        }
        // `composites` never gives an empty list.
        found.ok_or_else(|| self.no_type(Kind::Struct, structure))
    }

    /// All definitions (not forward declarations) of a struct or union; at least one.
    pub(super) fn composites(&self, name: &str) -> Result<Vec<(u32, Type)>, FactError> {
        let mut found = Vec::new();
        for id in self.ids(name)? {
            let ty = self.at(id, name)?;
            if matches!(&ty, Type::Struct(_) | Type::Union(_)) {
                found.push((id, ty));
            }
        }
        if found.is_empty() {
            return Err(self.no_type(Kind::Struct, name));
        }
        Ok(found)
    }

    fn member_of(&self, outer: Type, structure: &str, path: &str) -> Result<Member, FactError> {
        let whole = format!("{structure}.{path}");
        let mut walked = structure.to_owned();
        let mut ty = outer;
        let mut bits = 0_u32;
        let mut bitfield_size = None;
        for segment in path.split('.') {
            let members = match &ty {
                Type::Struct(s) | Type::Union(s) if bitfield_size.is_none() => &s.members,
                other => {
                    return Err(FactError::NotComposite {
                        owner: walked,
                        kind: other.name(),
                        member: segment.to_owned(),
                    });
                }
            };
            let Some((offset, size, id)) = self.find(members, segment, &whole, 0)? else {
                let mut names = Vec::new();
                self.member_names(members, &whole, 0, &mut names)?;
                return Err(FactError::NoMember {
                    owner: walked,
                    member: segment.to_owned(),
                    path: whole,
                    near: nearest(segment, names.iter().map(String::as_str)),
                });
            };
            bits = bits.wrapping_add(offset);
            bitfield_size = size;
            ty = self.strip(self.at(id, &whole)?, &whole)?;
            walked = format!("{walked}.{segment}");
        }
        let (shift, offset_bytes) = (bits % 8, bits / 8);
        let shape = match &ty {
            Type::Ptr(_) => Shape::Pointer,
            Type::Struct(_) | Type::Union(_) => Shape::Composite,
            Type::Array(_) => Shape::Array,
            _ => Shape::Scalar,
        };
        Ok(match bitfield_size {
            Some(bits) => Member {
                offset_bytes,
                size: shift.saturating_add(bits).div_ceil(8),
                bitfield: Some(Bitfield {
                    bit_offset: shift,
                    bits,
                }),
                shape,
            },
            None => Member {
                offset_bytes,
                size: self.size_of(&ty, &whole)?,
                bitfield: None,
                shape,
            },
        })
    }

    /// Looks a member up, also inside anonymous structs and unions. Gives bit offset, bitfield width and type id.
    fn find(
        &self,
        members: &[btf_rs::Member],
        wanted: &str,
        near: &str,
        depth: u32,
    ) -> Result<Option<(u32, Option<u32>, u32)>, FactError> {
        if depth > MAX_DEPTH {
            return Ok(None);
        }
        for member in members {
            let name = self.name(member, near)?;
            let id = member.get_type_id().unwrap_or_default();
            if name == wanted {
                let width = member.bitfield_size().filter(|bits| *bits > 0);
                return Ok(Some((member.bit_offset(), width, id)));
            }
            if !name.is_empty() {
                continue;
            }
            if let Type::Struct(s) | Type::Union(s) = self.strip(self.at(id, near)?, near)?
                && let Some((offset, width, id)) = self.find(&s.members, wanted, near, depth + 1)?
            {
                return Ok(Some((member.bit_offset().wrapping_add(offset), width, id)));
            }
        }
        Ok(None)
    }

    fn member_names(
        &self,
        members: &[btf_rs::Member],
        near: &str,
        depth: u32,
        names: &mut Vec<String>,
    ) -> Result<(), FactError> {
        for member in members {
            let name = self.name(member, near)?;
            if !name.is_empty() {
                names.push(name);
            } else if depth < MAX_DEPTH {
                let id = member.get_type_id().unwrap_or_default();
                if let Type::Struct(s) | Type::Union(s) = self.strip(self.at(id, near)?, near)? {
                    self.member_names(&s.members, near, depth + 1, names)?;
                }
            }
        }
        Ok(())
    }

    /// Takes typedefs, qualifiers and tags off.
    fn strip(&self, mut ty: Type, near: &str) -> Result<Type, FactError> {
        for _ in 0..MAX_DEPTH {
            ty = match &ty {
                Type::Typedef(t) => self.follow(t, near)?,
                Type::Const(t) | Type::Volatile(t) | Type::Restrict(t) => self.follow(t, near)?,
                Type::TypeTag(t) => self.follow(t, near)?,
                _ => return Ok(ty),
            };
        }
        Ok(ty)
    }

    pub(super) fn size_of(&self, ty: &Type, near: &str) -> Result<u32, FactError> {
        self.size_at_depth(ty, near, 0)
    }

    fn size_at_depth(&self, ty: &Type, near: &str, depth: u32) -> Result<u32, FactError> {
        let size = match self.strip(ty.clone(), near)? {
            Type::Ptr(_) => POINTER_SIZE as usize,
            Type::Int(t) => t.size(),
            Type::Float(t) => t.size(),
            Type::Enum(t) => t.size(),
            Type::Enum64(t) => t.size(),
            Type::Struct(t) | Type::Union(t) => t.size(),
            Type::Array(t) if depth < MAX_DEPTH => {
                let element = self.follow(&t, near)?;
                (self.size_at_depth(&element, near, depth + 1)? as usize).saturating_mul(t.len())
            }
            _ => 0,
        };
        Ok(u32::try_from(size).unwrap_or(u32::MAX))
    }
}
