//! Alerts that nobody wants to be told of, and why.

use serde::Serialize;
use tuplewatch_common::address::PortSpaceKey;

use super::{
    destination::{Destination, Network},
    finding::Verdict,
    observation::ip,
    time::Moment,
};

/// Which alerts are muted. Everything that is given must fit; a list fits if one of it does, an empty
/// one always.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mute {
    /// Causes; a signature stands for all of its causes.
    pub causes: Vec<Verdict>,
    /// Where the connections go.
    pub destinations: Vec<Destination>,
    /// Who opens them.
    pub initiators: Vec<Network>,
    /// It ends then; `None`: never.
    pub until: Option<Moment>,
    /// Why, for those who find the alert muted.
    pub reason: String,
}

/// Why an alert is muted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Muted {
    /// The reason given.
    pub reason: String,
    /// When it ends.
    #[serde(skip)]
    pub until: Option<Moment>,
}

impl Mute {
    /// Whether it mutes this alert now.
    #[must_use]
    pub fn matches(&self, now: Moment, verdict: Verdict, space: &PortSpaceKey) -> bool {
        fn any<T>(list: &[T], fits: impl Fn(&T) -> bool) -> bool {
            list.is_empty() || list.iter().any(fits)
        }
        self.until.is_none_or(|until| now < until)
            && any(&self.causes, |cause| *cause == verdict)
            && any(&self.destinations, |d| d.matches(space))
            && any(&self.initiators, |n| n.contains(ip(&space.initiator)))
    }
}

/// The first of `mutes` that mutes this alert now.
#[must_use]
pub fn muted(mutes: &[Mute], now: Moment, verdict: Verdict, space: &PortSpaceKey) -> Option<Muted> {
    let mute = mutes.iter().find(|m| m.matches(now, verdict, space))?;
    Some(Muted {
        reason: mute.reason.clone(),
        until: mute.until,
    })
}

#[cfg(test)]
mod tests {
    use tuplewatch_common::address::v4_mapped;

    use super::*;

    #[test]
    fn all_conditions_must_fit_and_time_ends_it() {
        let space = PortSpaceKey {
            initiator: v4_mapped([10, 0, 0, 1]),
            responder: v4_mapped([192, 0, 2, 1]),
            responder_port: 443,
            role: 1,
            point: 2,
            netns: 0,
        };
        let mute = Mute {
            causes: vec![Verdict::Forecast, Verdict::LocalEphemeral],
            destinations: vec!["192.0.2.0/24:443".parse().unwrap()],
            initiators: vec!["10.0.0.0/8".parse().unwrap()],
            until: Some(Moment(100)),
            reason: "known".into(),
        };
        let matches = |mute: &Mute, now| mute.matches(Moment(now), Verdict::Forecast, &space);
        assert!(matches(&mute, 99));
        assert!(!matches(&mute, 100), "over");
        let forever = Mute {
            until: None,
            ..mute.clone()
        };
        assert!(matches(&forever, u64::MAX / 2));
        assert!(!forever.matches(Moment(0), Verdict::NatSynDrop, &space));
        let elsewhere = Mute {
            destinations: vec!["*:80".parse().unwrap()],
            ..forever.clone()
        };
        assert!(!matches(&elsewhere, 0));
        let others = Mute {
            initiators: vec!["10.0.0.2".parse().unwrap()],
            ..forever.clone()
        };
        assert!(!matches(&others, 0));
        assert_eq!(
            muted(&[elsewhere, forever], Moment(0), Verdict::Forecast, &space)
                .unwrap()
                .reason,
            "known"
        );
    }
}
