//! How values of settings are read from text, and shown.

use std::{ops::RangeInclusive, time::Duration};

use super::{AUTO, Given};
use crate::{
    config::problem::hint,
    core::value::{self, Value as _},
};

pub(super) fn show<T>(value: Option<&T>, text: impl Fn(&T) -> String) -> Given {
    Given::Text(value.map_or(AUTO.to_owned(), text))
}

/// Reads a single value; `None` for the default that is found out.
pub(super) fn one<T>(
    given: Given,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<Option<T>, String> {
    match given {
        Given::Text(text) => parse(&text).map(Some),
        _ => Ok(None),
    }
}

pub(super) fn interval(text: &str) -> Result<Duration, String> {
    let duration = value::duration(text)?;
    if duration < Duration::from_millis(100) {
        return Err("it must be at least 100ms".into());
    }
    Ok(duration)
}

/// Bytes of `16MiB`, `256KiB`, or of a plain number of `unit`.
fn bytes(text: &str, unit: u64) -> Result<u64, String> {
    let (number, unit) = match text {
        _ if text.ends_with("KiB") => (text.trim_end_matches("KiB"), 1 << 10),
        _ if text.ends_with("MiB") => (text.trim_end_matches("MiB"), 1 << 20),
        _ => (text, unit),
    };
    let number: u64 = number
        .trim()
        .parse()
        .map_err(|_| format!("`{text}` is not a size like 16MiB"))?;
    number
        .checked_mul(unit)
        .ok_or_else(|| format!("`{text}` is too much"))
}

pub(super) fn size(bytes: u64) -> String {
    if bytes.is_multiple_of(1 << 20) {
        format!("{}MiB", bytes >> 20)
    } else {
        format!("{}KiB", bytes >> 10)
    }
}

pub(super) fn ring(text: &str) -> Result<u32, String> {
    const RANGE: RangeInclusive<u32> = 4 << 10..=64 << 20;
    match u32::try_from(bytes(text, 1 << 10)?) {
        Ok(bytes) if bytes.is_power_of_two() && RANGE.contains(&bytes) => Ok(bytes),
        _ => Err("it must be a power of two from 4KiB to 64MiB".into()),
    }
}

pub(super) fn map_memory(text: &str) -> Result<u64, String> {
    match bytes(text, 1 << 20)? {
        0..1_048_576 => Err("it must be at least 1MiB".into()),
        bytes => Ok(bytes),
    }
}

/// A size within bounds that are whole MiB; a plain number is MiB.
pub(super) fn bounded(text: &str, within: RangeInclusive<u64>) -> Result<u64, String> {
    let bytes = bytes(text, 1 << 20)?;
    if within.contains(&bytes) {
        Ok(bytes)
    } else {
        let (least, most) = (size(*within.start()), size(*within.end()));
        Err(format!("it must be from {least} to {most}"))
    }
}

pub(super) fn top(text: &str) -> Result<u64, String> {
    match u64::parse(text)? {
        n @ 0..=10_000 => Ok(n),
        _ => Err("it must not be more than 10000".into()),
    }
}

pub(super) fn filter(text: &str) -> Result<String, String> {
    tracing_subscriber::EnvFilter::try_new(text)
        .map(|_| text.to_owned())
        .map_err(|e| format!("`{text}` is not a filter such as info or tuplewatch=debug: {e}"))
}

/// One of some words.
pub(in crate::config) fn word<T: Copy>(text: &str, words: &[(&str, T)]) -> Result<T, String> {
    let found = words.iter().find(|(word, _)| *word == text);
    found.map(|(_, value)| *value).ok_or_else(|| {
        let all: Vec<_> = words.iter().map(|(word, _)| *word).collect();
        let hint = hint(text, all.iter().copied());
        format!("`{text}` is none of {}{hint}", all.join(", "))
    })
}

pub(super) fn word_of<T: Copy + PartialEq>(value: T, words: &[(&'static str, T)]) -> &'static str {
    let found = words.iter().find(|(_, of)| *of == value);
    found.map_or(AUTO, |(word, _)| word)
}

pub(super) fn any(text: &str) -> Result<String, String> {
    Ok(text.to_owned())
}
