//! Values that are set by name: how they are read from text and shown.

use std::time::Duration;

/// A kind of value that can be read from text.
pub trait Value: Sized {
    /// Reads it.
    ///
    /// # Errors
    /// Says what is wrong and what would be right.
    fn parse(text: &str) -> Result<Self, String>;

    /// The text that [`Value::parse`] reads back.
    fn show(&self) -> String;
}

impl Value for Duration {
    fn parse(text: &str) -> Result<Self, String> {
        duration(text)
    }

    fn show(&self) -> String {
        if self.as_secs() > 0 && self.subsec_nanos() == 0 {
            let s = self.as_secs();
            return match () {
                () if s.is_multiple_of(3600) => format!("{}h", s / 3600),
                () if s.is_multiple_of(60) && s > 300 => format!("{}m", s / 60),
                () => format!("{s}s"),
            };
        }
        format!("{}ms", self.as_secs_f64() * 1000.0)
    }
}

/// Reads a duration such as `10s`, `500ms`, `2m`, `1.5h`, `7d`.
///
/// # Errors
/// Says what is wrong with it.
pub fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = text.split_at(text.trim_end_matches(char::is_alphabetic).len());
    let number: f64 = number
        .parse()
        .map_err(|_| format!("`{text}` is not a duration like 10s"))?;
    let seconds = match unit {
        "ms" => number / 1000.0,
        "" | "s" => number,
        "m" => number * 60.0,
        "h" => number * 3600.0,
        "d" => number * 86_400.0,
        _ => return Err(format!("`{unit}` is not a unit of time (ms, s, m, h, d)")),
    };
    Duration::try_from_secs_f64(seconds).map_err(|e| format!("`{text}`: {e}"))
}

/// Shares and factors: finite and not negative.
impl Value for f64 {
    fn parse(text: &str) -> Result<Self, String> {
        match text.parse::<Self>() {
            Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
            _ => Err(format!("`{text}` is not a number of at least 0")),
        }
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

impl Value for bool {
    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "true" => Ok(true),
            "false" => Ok(false),
            _ => Err(format!("`{text}` is neither true nor false")),
        }
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

macro_rules! whole {
    ($($kind:ty),*) => {$(
        impl Value for $kind {
            fn parse(text: &str) -> Result<Self, String> {
                text.parse()
                    .map_err(|_| format!("`{text}` is not a whole number from 0 to {}", Self::MAX))
            }

            fn show(&self) -> String {
                self.to_string()
            }
        }
    )*};
}

whole!(u8, u16, u32, u64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_shown_as_they_are_read() {
        for (text, shown) in [
            ("1500ms", "1500ms"),
            ("0.5s", "500ms"),
            ("60", "60s"),
            ("5m", "300s"),
            ("10m", "10m"),
            ("24h", "24h"),
            ("7d", "168h"),
            ("0s", "0ms"),
        ] {
            let value = duration(text).unwrap();
            assert_eq!(value.show(), shown);
            assert_eq!(duration(shown).unwrap(), value);
        }
        for wrong in ["", "s", "1 fortnight", "-1s", "1e400s", "ten"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn numbers_have_bounds() {
        assert_eq!(u16::parse("65535"), Ok(65_535));
        assert!(u16::parse("65536").unwrap_err().contains("65535"));
        assert!(u64::parse("-1").is_err());
        assert!(f64::parse("inf").is_err());
        assert_eq!(f64::parse("0.5"), Ok(0.5));
        assert!(bool::parse("yes").is_err());
    }
}
