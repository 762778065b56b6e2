//! Every threshold of every rule, in one place, with the reason for its default.

use std::time::Duration;

/// Thresholds of all rules.
#[derive(Clone, Debug, PartialEq)]
pub struct Thresholds {
    /// Length of the window that rules look at. Domain practice and the recordings: a burst of
    /// refused SYNs lasts tens of seconds, TIME_WAIT 60 s.
    pub window: Duration,
    /// Cause `l4_reuse_in_time_wait`.
    pub l4_reuse: L4Reuse,
    /// Inference of a pool at the responder.
    pub pool: PoolInference,
    /// Life cycle of alerts.
    pub alert: AlertTiming,
}

/// Thresholds of `l4_reuse_in_time_wait`.
#[derive(Clone, Debug, PartialEq)]
pub struct L4Reuse {
    /// Refused SYNs in the window: fewer may be chance.
    pub min_refused: u64,
    /// Refused SYNs per open. A healthy site in the literature had 0.003 %, a sick one 0.144 %.
    pub min_ratio: f64,
    /// Distinct source ports: one or two are somebody's fixed ports.
    pub min_ports: u32,
    /// Unhealed opens in the window that make it critical: connections fail, not only wait.
    pub critical_unhealed: u64,
}

/// Thresholds of the pool inference.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolInference {
    /// A port not seen for this long is forgotten.
    pub ageing: Duration,
    /// Fewest distinct ports to speak of a pool.
    pub min_ports: u32,
    /// The count has levelled off when at most this share of the latest completed handshakes (half as
    /// many as there are ports) came from a port not seen before.
    pub plateau: f64,
    /// A gap between neighbouring ports of more than this many times the mean distance ends the
    /// pool: one scan from port 51234 must not widen it.
    pub max_gap: f64,
}

/// Life cycle of alerts.
#[derive(Clone, Debug, PartialEq)]
pub struct AlertTiming {
    /// A finding must last this long to fire.
    pub pending: Duration,
    /// A firing alert is resolved after this long without a symptom.
    pub resolve: Duration,
    /// A firing alert is reported again with its latest figures after this long.
    pub repeat: Duration,
}

impl Default for Thresholds {
    fn default() -> Self {
        Self {
            window: Duration::from_secs(60),
            l4_reuse: L4Reuse {
                min_refused: 5,
                min_ratio: 0.0005,
                min_ports: 3,
                critical_unhealed: 3,
            },
            pool: PoolInference {
                ageing: Duration::from_secs(300),
                min_ports: 16,
                plateau: 0.02,
                max_gap: 32.0,
            },
            alert: AlertTiming {
                pending: Duration::from_secs(1),
                resolve: Duration::from_secs(60),
                repeat: Duration::from_secs(30),
            },
        }
    }
}

/// One threshold that can be set by name.
pub struct Setting {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it means.
    pub help: &'static str,
    /// Reads it as text.
    pub get: fn(&Thresholds) -> String,
    /// Writes it from text.
    pub set: fn(&mut Thresholds, &str) -> Result<(), String>,
}

/// Reads a duration such as `10s`, `500ms`, `2m`.
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
        _ => return Err(format!("`{unit}` is not a unit of time (ms, s, m, h)")),
    };
    Duration::try_from_secs_f64(seconds).map_err(|e| format!("`{text}`: {e}"))
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse()
        .map_err(|_| format!("`{text}` is not a number that fits"))
}

macro_rules! settings {
    ($($name:literal $help:literal $kind:ident $($field:ident).+;)*) => {
        /// All thresholds that can be set by name.
        pub const SETTINGS: &[Setting] = &[$(Setting {
            name: $name,
            help: $help,
            get: |t| settings!(@show $kind t.$($field).+),
            set: |t, text| { t.$($field).+ = $kind(text)?; Ok(()) },
        }),*];
    };
    (@show duration $value:expr) => { format!("{}s", $value.as_secs_f64()) };
    (@show number $value:expr) => { $value.to_string() };
}

settings! {
    "window" "length of the window that rules look at" duration window;
    "l4_reuse.min_refused" "refused SYNs in the window that make a finding" number l4_reuse.min_refused;
    "l4_reuse.min_ratio" "refused SYNs per open that make a finding" number l4_reuse.min_ratio;
    "l4_reuse.min_ports" "distinct source ports that make a finding" number l4_reuse.min_ports;
    "l4_reuse.critical_unhealed" "unhealed opens in the window that make it critical" number l4_reuse.critical_unhealed;
    "pool.ageing" "a port not seen for this long is forgotten" duration pool.ageing;
    "pool.min_ports" "fewest distinct ports of a pool" number pool.min_ports;
    "pool.plateau" "share of new ports below which the count has levelled off" number pool.plateau;
    "pool.max_gap" "gap, in mean distances, that ends a pool" number pool.max_gap;
    "alert.pending" "a finding must last this long to fire" duration alert.pending;
    "alert.resolve" "time without a symptom after which an alert is resolved" duration alert.resolve;
    "alert.repeat" "a firing alert is reported again after this long" duration alert.repeat;
}

impl Thresholds {
    /// Sets one threshold from `name=value`.
    ///
    /// # Errors
    /// Says which part is wrong, and for an unknown name which ones there are.
    pub fn set(&mut self, assignment: &str) -> Result<(), String> {
        let (name, value) = assignment
            .split_once('=')
            .ok_or_else(|| format!("`{assignment}` is not of the form name=value"))?;
        let setting = SETTINGS.iter().find(|s| s.name == name).ok_or_else(|| {
            let names: Vec<_> = SETTINGS.iter().map(|s| s.name).collect();
            format!(
                "there is no threshold `{name}`; there are {}",
                names.join(", ")
            )
        })?;
        (setting.set)(self, value).map_err(|e| format!("{name}: {e}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_set_and_refused_by_name() {
        let mut t = Thresholds::default();
        t.set("alert.resolve=1500ms").unwrap();
        assert_eq!(t.alert.resolve, Duration::from_millis(1500));
        t.set("l4_reuse.min_refused=7").unwrap();
        assert_eq!(t.l4_reuse.min_refused, 7);
        assert!(
            t.set("alert.resolv=1s")
                .unwrap_err()
                .contains("alert.resolve")
        );
        assert!(t.set("alert.resolve=1 fortnight").is_err());
        assert!(t.set("window").is_err());
        assert!(t.set("window=-1s").is_err());
        for s in SETTINGS {
            let shown = (s.get)(&t);
            (s.set)(&mut t, &shown).unwrap();
        }
        assert_eq!(t.l4_reuse.min_refused, 7);
    }
}
