//! The history of alerts: how often one fired, when, and how bad it was.

use std::{collections::VecDeque, time::Duration};

use super::{BTreeMap, Deserialize, Key, Moment, PortSpaceKey, Serialize, Severity, Verdict};

/// The latest firings that are remembered one by one.
const FIRINGS: usize = 8;
/// Alerts whose history is remembered after their end.
const ALERTS: usize = 1000;

/// What is known of the life of an alert.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct History {
    /// How often it fired, this time included.
    pub count: u64,
    /// When it fired first.
    pub first: Option<Moment>,
    /// The worst it ever was.
    pub worst: Option<Severity>,
    /// The latest firings, oldest first; the last one has no end while it goes on.
    pub firings: VecDeque<Firing>,
}

/// One time that an alert fired.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Firing {
    /// Since when.
    pub since: Moment,
    /// Until when.
    pub until: Option<Moment>,
    /// How bad it was.
    pub severity: Severity,
}

impl History {
    pub(super) fn begin(&mut self, now: Moment, severity: Severity) {
        self.count += 1;
        self.first.get_or_insert(now);
        self.firings.push_back(Firing {
            since: now,
            until: None,
            severity,
        });
        if self.firings.len() > FIRINGS {
            self.firings.pop_front();
        }
    }

    pub(super) fn reach(&mut self, severity: Severity) {
        self.worst = self.worst.max(Some(severity));
        if let Some(last) = self.firings.back_mut() {
            last.severity = last.severity.max(severity);
        }
    }

    pub(super) fn end(&mut self, now: Moment) {
        if let Some(last) = self.firings.back_mut() {
            last.until = Some(now);
        }
    }

    /// When it was over last.
    #[must_use]
    pub fn ended(&self) -> Option<Moment> {
        self.firings.back()?.until
    }

    /// Every moment in it.
    pub(crate) fn moments(&mut self) -> impl Iterator<Item = &mut Moment> {
        let firings = self.firings.iter_mut();
        self.first
            .iter_mut()
            .chain(firings.flat_map(|f| std::iter::once(&mut f.since).chain(&mut f.until)))
    }
}

/// The history of alerts that are over.
#[derive(Clone, Debug, Default)]
pub(super) struct Past {
    all: BTreeMap<Key, History>,
    /// When the next of them is to be forgotten, if that was worked out since the latest came.
    next: Option<Moment>,
}

impl Past {
    /// The history of an alert that begins again.
    pub(super) fn take(&mut self, key: &Key) -> History {
        self.all.remove(key).unwrap_or_default()
    }

    /// An alert is over.
    pub(super) fn put(&mut self, key: Key, history: History) {
        self.next = None;
        self.all.insert(key, history);
        if self.all.len() > ALERTS {
            let oldest = self.all.iter().min_by_key(|(_, h)| h.ended());
            if let Some(key) = oldest.map(|(key, _)| *key) {
                self.all.remove(&key);
            }
        }
    }

    /// An alert that never fired leaves its history as it was.
    pub(super) fn put_back(&mut self, key: Key, history: History) {
        if history.count > 0 {
            self.put(key, history);
        }
    }

    /// Forgets what ended longer ago than `remember` says.
    pub(super) fn forget(&mut self, now: Moment, remember: impl Fn(&PortSpaceKey) -> Duration) {
        if self.next.is_some_and(|next| now < next) {
            return;
        }
        let mut next = Moment(i64::MAX.cast_unsigned());
        self.all.retain(|(_, space), history| {
            let Some(ended) = history.ended() else {
                return false;
            };
            let remember = remember(space);
            next = next.min(ended + remember);
            now.since(ended) < remember
        });
        self.next = Some(next);
    }

    /// All of them, latest first.
    pub(super) fn all(&self) -> Vec<(Verdict, PortSpaceKey, History)> {
        let mut all: Vec<_> = self
            .all
            .iter()
            .map(|((verdict, space), history)| (*verdict, *space, history.clone()))
            .collect();
        all.sort_by_key(|(_, _, history)| std::cmp::Reverse(history.ended()));
        all
    }
}
