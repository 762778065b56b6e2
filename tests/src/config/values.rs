//! Values that a configuration writes in one word.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

/// A range of ports, both ends included, written `2048-2247`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortRange {
    /// First port.
    pub low: u16,
    /// Last port.
    pub high: u16,
}

impl PortRange {
    /// The port at `index`, starting over after the last one.
    #[must_use]
    pub fn at(self, index: u64) -> u16 {
        let size = u64::from(self.high) - u64::from(self.low) + 1;
        self.low + u16::try_from(index % size).expect("below 65,536")
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.low, self.high)
    }
}

impl FromStr for PortRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once('-').unwrap_or((text, text));
        let number = |part: &str| {
            part.parse::<u16>()
                .map_err(|e| format!("port {part:?}: {e}"))
        };
        let (low, high) = (number(parts.0)?, number(parts.1)?);
        if low > high {
            return Err(format!("{low} is above {high}"));
        }
        Ok(Self { low, high })
    }
}

/// The source port of a crafted SYN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourcePort {
    /// Always this one.
    Fixed(u16),
    /// 1024-65535, another one for each SYN.
    Random,
}

impl fmt::Display for SourcePort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(port) => write!(f, "{port}"),
            Self::Random => f.write_str("random"),
        }
    }
}

impl FromStr for SourcePort {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "random" => Ok(Self::Random),
            port => port
                .parse()
                .map(Self::Fixed)
                .map_err(|e| format!("port {port:?}: {e}")),
        }
    }
}

/// Where the initial sequence number of a connection comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isn {
    /// The kernel's own: moves forward on each four-tuple, so a TIME_WAIT at the server accepts it.
    Kernel,
    /// Random: what a NAT that mixes several hosts looks like to the server.
    Random,
    /// 1,000,000 below the one before: a TIME_WAIT at the server always refuses it (as after a
    /// reboot of the client, or behind a NAT with bad luck each time).
    Backward,
    /// This very number each time.
    Fixed(u32),
}

impl fmt::Display for Isn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kernel => f.write_str("kernel"),
            Self::Random => f.write_str("random"),
            Self::Backward => f.write_str("backward"),
            Self::Fixed(number) => write!(f, "{number}"),
        }
    }
}

impl FromStr for Isn {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "kernel" => Ok(Self::Kernel),
            "random" => Ok(Self::Random),
            "backward" => Ok(Self::Backward),
            number => number
                .parse()
                .map(Self::Fixed)
                .map_err(|e| format!("ISN {number:?}: {e}")),
        }
    }
}

macro_rules! serialize_by_display {
    ($($type:ty),*) => {$(
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }
    )*};
}
serialize_by_display!(PortRange, SourcePort, Isn);
