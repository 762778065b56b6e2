//! What the core is told to do: thresholds, everywhere and by destination, and mutes.

use tuplewatch_common::address::PortSpaceKey;

use super::{destination::Destination, mute::Mute, placement::Placement, threshold::Thresholds};

/// Everything that is configured about judging.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rules {
    /// Thresholds of port spaces for which nothing else is set.
    pub thresholds: Thresholds,
    /// Others, by destination: the first that fits counts.
    pub destinations: Vec<DestinationRules>,
    /// Alerts that nobody wants to be told of.
    pub mutes: Vec<Mute>,
    /// Changes of placement that are known.
    pub placements: Vec<Placement>,
}

/// Thresholds of some destinations.
#[derive(Clone, Debug, PartialEq)]
pub struct DestinationRules {
    /// Which.
    pub destinations: Vec<Destination>,
    /// All thresholds there: those set for them, the rest as everywhere.
    pub thresholds: Thresholds,
}

impl Rules {
    /// The thresholds of a port space.
    ///
    /// Without an entry this costs nothing, and rules ask only for port spaces that do something.
    #[must_use]
    pub fn of(&self, space: &PortSpaceKey) -> &Thresholds {
        self.destinations
            .iter()
            .find(|d| d.destinations.iter().any(|d| d.matches(space)))
            .map_or(&self.thresholds, |d| &d.thresholds)
    }

    /// Every set of thresholds that is in use.
    pub fn all(&self) -> impl Iterator<Item = &Thresholds> {
        let others = self.destinations.iter().map(|d| &d.thresholds);
        std::iter::once(&self.thresholds).chain(others)
    }

    /// Whether any of them needs the sizes and latencies of responses that cannot be read.
    #[must_use]
    pub fn ask_for_exchanges(&self) -> bool {
        self.all().any(|t| t.pinned_suspect.min_responses > 0)
    }
}

impl From<Thresholds> for Rules {
    fn from(thresholds: Thresholds) -> Self {
        Self {
            thresholds,
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use tuplewatch_common::address::v4_mapped;

    use super::*;

    #[test]
    fn the_first_entry_that_fits_counts() {
        let with = |destination: &str, min_refused| {
            let mut thresholds = Thresholds::default();
            thresholds.l4_reuse.min_refused = min_refused;
            DestinationRules {
                destinations: vec![destination.parse().unwrap()],
                thresholds,
            }
        };
        let rules = Rules {
            destinations: vec![with("192.0.2.1", 100), with("192.0.2.0/24", 50)],
            ..Rules::default()
        };
        let of = |last| {
            let space = PortSpaceKey {
                initiator: [0; 16],
                responder: v4_mapped([192, 0, last, 1]),
                responder_port: 80,
                role: 1,
                point: 2,
                netns: 0,
            };
            rules.of(&space).l4_reuse.min_refused
        };
        assert_eq!((of(2), of(3)), (100, 5));
        assert_eq!(rules.all().count(), 3);
    }
}
