//! Numbers, times and paragraphs for people.

use std::{fmt::Write, time::Duration};

/// A count with its thousands set apart: `14,336`.
pub(super) fn count(value: impl Into<u64>) -> String {
    let digits = value.into().to_string();
    let mut out = String::with_capacity(digits.len() * 4 / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i) % 3 == 0 {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// `1 port`, `2 ports`; `many` is the plural.
pub(super) fn counted(value: u64, one: &str, many: &str) -> String {
    format!("{} {}", count(value), if value == 1 { one } else { many })
}

/// A number with about three digits: `0.05`, `86.8`, `1,240`.
pub(super) fn number(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 => count(value.round().max(0.0) as u64),
        v if v >= 10.0 => format!("{value:.1}"),
        0.0 => "0".to_owned(),
        _ => format!("{value:.2}"),
    }
}

/// A share in percent: `4.5 %`.
pub(super) fn percent(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "–".to_owned();
    }
    let share = part as f64 * 100.0 / whole as f64;
    match share {
        s if s >= 10.0 || s == 0.0 => format!("{s:.0} %"),
        s if s >= 0.1 => format!("{s:.1} %"),
        s => format!("{s:.3} %"),
    }
}

/// A duration in one or two units: `80 ms`, `3.5 s`, `2 min 5 s`, `3 h 20 min`.
pub(super) fn duration(value: Duration) -> String {
    let seconds = value.as_secs();
    match seconds {
        0 if value.as_micros() < 1000 => format!("{} µs", value.as_micros()),
        0 => format!("{} ms", value.as_millis()),
        1..10 => {
            let tenths = format!("{:.1}", value.as_secs_f64());
            format!("{} s", tenths.trim_end_matches(".0"))
        }
        10..60 => format!("{seconds} s"),
        60..3600 => two(seconds / 60, "min", seconds % 60, "s"),
        3600..86_400 => two(seconds / 3600, "h", seconds % 3600 / 60, "min"),
        _ => two(seconds / 86_400, "d", seconds % 86_400 / 3600, "h"),
    }
}

fn two(big: u64, big_unit: &str, small: u64, small_unit: &str) -> String {
    if small == 0 {
        return format!("{big} {big_unit}");
    }
    format!("{big} {big_unit} {small} {small_unit}")
}

/// Seconds as [`duration`] has them.
pub(super) fn seconds(value: f64) -> String {
    Duration::try_from_secs_f64(value).map_or_else(|_| "–".to_owned(), duration)
}

/// Bytes: `12 MiB`.
pub(super) fn bytes(value: u64) -> String {
    match value {
        0..10_240 => format!("{} bytes", count(value)),
        10_240..10_485_760 => format!("{} KiB", count(value >> 10)),
        _ => format!("{} MiB", count(value >> 20)),
    }
}

/// The text with control characters made visible: a process may call itself anything, also a
/// sequence that moves the cursor.
pub(super) fn clean(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() {
            // Writing to a string cannot fail.
            let _ = write!(out, "{}", c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}

/// Breaks `text` at spaces into lines of at most `width` characters; longer words stay whole.
pub(super) fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    let mut length = 0;
    for word in text.split_whitespace() {
        let word_length = word.chars().count();
        if length > 0 && length + 1 + word_length > width {
            lines.push(std::mem::take(&mut line));
            length = 0;
        }
        if length > 0 {
            line.push(' ');
            length += 1;
        }
        line.push_str(word);
        length += word_length;
    }
    if length > 0 || lines.is_empty() {
        lines.push(line);
    }
    lines
}

/// Shortens to `width` characters: the middle of an address is what a person misses least.
pub(super) fn shorten(text: &str, width: usize) -> String {
    let length = text.chars().count();
    if length <= width {
        return text.to_owned();
    }
    let keep = width.saturating_sub(1);
    let head = keep.div_ceil(2);
    let tail = keep - head;
    let start: String = text.chars().take(head).collect();
    let end: String = text.chars().skip(length - tail).collect();
    format!("{start}…{end}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_have_their_thousands_set_apart() {
        assert_eq!(count(0u64), "0");
        assert_eq!(count(999u32), "999");
        assert_eq!(count(14_336u64), "14,336");
        assert_eq!(count(1_000_000u64), "1,000,000");
        assert_eq!(counted(1, "port", "ports"), "1 port");
        assert_eq!(counted(0, "port", "ports"), "0 ports");
    }

    #[test]
    fn numbers_keep_about_three_digits() {
        assert_eq!(number(0.0), "0");
        assert_eq!(number(0.052), "0.05");
        assert_eq!(number(86.83), "86.8");
        assert_eq!(number(1240.4), "1,240");
        assert_eq!(percent(42, 5210), "0.8 %");
        assert_eq!(percent(1, 100_000), "0.001 %");
        assert_eq!(percent(1, 2), "50 %");
        assert_eq!(percent(0, 2), "0 %");
        assert_eq!(percent(0, 0), "–");
    }

    #[test]
    fn durations_read_like_speech() {
        let ms = |ms| duration(Duration::from_millis(ms));
        assert_eq!(duration(Duration::from_micros(250)), "250 µs");
        assert_eq!(ms(80), "80 ms");
        assert_eq!(ms(3_500), "3.5 s");
        assert_eq!(ms(3_000), "3 s");
        assert_eq!(ms(58_400), "58 s");
        assert_eq!(ms(125_000), "2 min 5 s");
        assert_eq!(ms(120_000), "2 min");
        assert_eq!(ms(12_000_000), "3 h 20 min");
        assert_eq!(ms(180_000_000), "2 d 2 h");
        assert_eq!(seconds(1.02), "1 s");
        assert_eq!(seconds(f64::NAN), "–");
        assert_eq!(bytes(12_582_912), "12 MiB");
        assert_eq!(bytes(512), "512 bytes");
    }

    #[test]
    fn a_process_cannot_write_to_the_terminal() {
        assert_eq!(clean("a\x1b[2Jb\n\u{9b}c"), "a\\u{1b}[2Jb\\n\\u{9b}c");
        assert_eq!(clean("Prozeß"), "Prozeß");
    }

    #[test]
    fn paragraphs_are_broken_at_spaces() {
        assert_eq!(wrap("one two three", 7), ["one two", "three"]);
        assert_eq!(wrap("unbreakable", 4), ["unbreakable"]);
        assert_eq!(wrap("", 4), [""]);
        assert_eq!(shorten("2001:db8::1", 7), "200…::1");
        assert_eq!(shorten("short", 7), "short");
    }
}
