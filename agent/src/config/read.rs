//! Reads a part of the tree into a type that serde knows. Errors carry the place; an unknown key comes
//! with the nearest name.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{
        self, DeserializeOwned, DeserializeSeed, IntoDeserializer, MapAccess, SeqAccess, Visitor,
    },
    forward_to_deserialize_any,
};

use super::{
    problem::{Place, Problem, hint},
    tree::{Entry, Node, Value},
};

/// Reads a node.
pub(super) fn read<T: DeserializeOwned>(node: &Node) -> Result<T, Problem> {
    T::deserialize(node).map_err(|error| {
        let at = error.at.unwrap_or(node.at);
        Problem::at(at, error.what)
    })
}

/// Why a node could not be read.
#[derive(Debug)]
pub(super) struct Error {
    at: Option<Place>,
    what: String,
}

impl Error {
    fn at(mut self, at: Place) -> Self {
        self.at.get_or_insert(at);
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for Error {}

impl de::Error for Error {
    fn custom<T: fmt::Display>(what: T) -> Self {
        Self {
            at: None,
            what: what.to_string(),
        }
    }

    fn unknown_field(field: &str, expected: &'static [&'static str]) -> Self {
        de::Error::custom(unknown(field, expected.iter().copied()))
    }

    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        let hint = hint(variant, expected.iter().copied());
        let all = expected.join(", ");
        de::Error::custom(format_args!("`{variant}` is none of {all}{hint}"))
    }

    fn missing_field(field: &'static str) -> Self {
        de::Error::custom(format_args!("`{field}` is missing"))
    }
}

/// What to say of an unknown key.
pub(super) fn unknown<'a>(key: &str, known: impl Iterator<Item = &'a str> + Clone) -> String {
    let hint = hint(key, known.clone());
    if hint.is_empty() {
        let all: Vec<_> = known.collect();
        format!("unknown key `{key}`; there are {}", all.join(", "))
    } else {
        format!("unknown key `{key}`{hint}")
    }
}

impl<'de> Deserializer<'de> for &'de Node {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match &self.value {
            Value::Nothing => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Whole(value) => match (u64::try_from(*value), i64::try_from(*value)) {
                (Ok(value), _) => visitor.visit_u64(value),
                (_, Ok(value)) => visitor.visit_i64(value),
                _ => visitor.visit_i128(*value),
            },
            Value::Number(value) => visitor.visit_f64(*value),
            Value::Text(text) => visitor.visit_str(text),
            Value::List(list) => visitor.visit_seq(List(list.iter())),
            Value::Map(map) => visitor.visit_map(Map(map.iter(), None)),
        }
    }

    /// A number is a text too: names may be made of digits.
    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.value.text() {
            Some(text) => visitor.visit_string(text),
            None => self.deserialize_any(visitor),
        }
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.deserialize_str(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.value {
            Value::Nothing => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    /// One value stands for a list of one.
    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match &self.value {
            Value::List(_) => self.deserialize_any(visitor),
            Value::Nothing => visitor.visit_seq(List([].iter())),
            _ => visitor.visit_seq(List(std::slice::from_ref(self).iter())),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self.value.text() {
            Some(text) => visitor.visit_enum(text.into_deserializer()),
            None => self.deserialize_any(visitor),
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char bytes byte_buf unit unit_struct
        tuple tuple_struct map struct identifier ignored_any
    }
}

struct List<'de>(std::slice::Iter<'de, Node>);

impl<'de> SeqAccess<'de> for List<'de> {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Error> {
        let Some(node) = self.0.next() else {
            return Ok(None);
        };
        seed.deserialize(node).map(Some).map_err(|e| e.at(node.at))
    }
}

struct Map<'de>(std::slice::Iter<'de, Entry>, Option<&'de Node>);

impl<'de> MapAccess<'de> for Map<'de> {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Error> {
        let Some(entry) = self.0.next() else {
            return Ok(None);
        };
        self.1 = Some(&entry.node);
        let key: de::value::StrDeserializer<'_, Error> = entry.key.as_str().into_deserializer();
        seed.deserialize(key).map(Some).map_err(|e| e.at(entry.at))
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Error> {
        let Some(node) = self.1.take() else {
            return Err(de::Error::custom("a value was asked for before its key"));
        };
        seed.deserialize(node).map_err(|e| e.at(node.at))
    }
}

/// A value that is written as text and read by its own parser.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Text<T>(pub(super) T);

impl<'de, T: std::str::FromStr<Err = String>> Deserialize<'de> for Text<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map(Self).map_err(de::Error::custom)
    }
}
