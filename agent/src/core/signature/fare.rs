//! How the requests of one failing connection fare beside those of the others to the same service.

use std::time::Duration;

use crate::core::{observation::Talk, service::Service, threshold::Thresholds, time::Moment};

/// A run of failures on one connection.
#[derive(Clone, Copy)]
pub struct Run<'a> {
    /// The connection.
    pub talk: &'a Talk,
    /// The first failure.
    pub since: Moment,
    /// The latest.
    pub until: Moment,
}

impl<'a> Run<'a> {
    /// The run of a connection, if it is long enough and was lately.
    fn of(talk: &'a Talk, now: Moment, within: Duration, thresholds: &Thresholds) -> Option<Self> {
        let least = thresholds.pinned.min_failures.max(2);
        let c = &talk.conversation;
        let run = Self {
            talk,
            since: Moment(c.run_since_ns),
            until: Moment(c.failed_ns),
        };
        // So many of them at that pace, not all of a long run, must lie within the window.
        let pace = run.until.since(run.since) / c.run.saturating_sub(1).max(1);
        let fits = pace * (least - 1) <= thresholds.window;
        (c.run >= least && fits && now.since(run.until) < within).then_some(run)
    }

    /// The runs of a service whose latest failure was less than `within` ago, the longest first.
    pub fn all(
        service: &'a Service,
        now: Moment,
        within: Duration,
        thresholds: &Thresholds,
    ) -> Vec<Self> {
        let runs = service.connections();
        let mut runs: Vec<Self> = runs
            .filter_map(|talk| Self::of(talk, now, within, thresholds))
            .collect();
        runs.sort_by_key(|run| {
            let c = &run.talk.conversation;
            (std::cmp::Reverse(c.run), c.tuple)
        });
        runs
    }

    /// Its latest request failed, and nothing has been said on it since.
    pub const fn goes_on(&self) -> bool {
        self.talk.conversation.is_failing() && !self.talk.closed
    }
}

/// What the other connections did while one failed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Others {
    /// Those that were answered well.
    pub better: u32,
    /// … opened after the failures began.
    pub better_newer: u32,
    /// Those that failed.
    pub worse: u32,
    /// … opened after the failures began.
    pub worse_newer: u32,
    /// How many of the newest were answered well, with none failing among them.
    pub streak: u32,
    /// When the first of these was.
    pub better_since: Option<Moment>,
    /// A request of a kind that failed was served on another connection meanwhile.
    pub same_kind: bool,
    /// A request of the kind that failed has failed on another connection too.
    pub same_kind_failed: bool,
}

impl Others {
    /// Looks at all of them.
    pub fn beside(run: &Run<'_>, service: &Service) -> Self {
        let own = &run.talk.conversation;
        let mut others = Self::default();
        let mut newer: Vec<(Moment, Option<Moment>)> = Vec::new();
        for talk in service.connections() {
            let c = &talk.conversation;
            if c.tuple == own.tuple {
                continue;
            }
            let is_newer = c.opened_ns != 0 && Moment(c.opened_ns) > run.since;
            if c.is_failing() {
                if Moment(c.failed_ns) < run.since {
                    continue;
                }
                others.worse += 1;
                others.same_kind_failed |= c.failed_kind == own.failed_kind;
                if is_newer {
                    others.worse_newer += 1;
                    newer.push((Moment(c.opened_ns), None));
                }
                continue;
            }
            // Answered well before this one failed for the last time: a service that recovers does so on
            // one connection after the other, and the last of them is not pinned.
            let good_since = Moment(c.good_since_ns);
            let meanwhile =
                c.success_ns != 0 && Moment(c.success_ns) >= run.since && good_since <= run.until;
            if meanwhile {
                others.better += 1;
                if is_newer {
                    others.better_newer += 1;
                    newer.push((Moment(c.opened_ns), Some(good_since)));
                }
            }
        }
        newer.sort_unstable_by_key(|(opened, _)| std::cmp::Reverse(*opened));
        for good_since in newer.iter().map_while(|(_, good_since)| *good_since) {
            others.streak += 1;
            let earliest = others
                .better_since
                .map_or(good_since, |s| s.min(good_since));
            others.better_since = Some(earliest);
        }
        let served = |kind| service.served(kind).is_some_and(|at| at >= run.since);
        others.same_kind = served(own.run_kind) || served(own.failed_kind);
        others
    }

    /// The newest connections do better, and not by chance: if a share of all new connections failed, as
    /// it does with a broken backend that still gets its part or with one client among many, so many in a
    /// row would seldom do well.
    pub fn newer_do_better(&self, thresholds: &Thresholds) -> bool {
        let rules = &thresholds.pinned;
        // The share of those before the streak, with one more of each: few say little (Laplace).
        let well = f64::from(self.better_newer - self.streak) + 1.0;
        let share = well / (well + f64::from(self.worse_newer) + 1.0);
        let streak = i32::try_from(self.streak).unwrap_or(i32::MAX);
        let by_chance = share.powi(streak);
        self.streak >= rules.min_better && (self.worse_newer == 0 || by_chance <= rules.max_chance)
    }

    /// Nobody has opened a connection since; of those there were, most do well.
    pub const fn older_do_better(&self, thresholds: &Thresholds) -> bool {
        self.better_newer + self.worse_newer == 0
            && self.better >= thresholds.pinned.min_better
            && self.better >= 3 * self.worse
    }
}

/// What the failures of one connection mean.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fare {
    /// The connection is pinned to an endpoint that is dead.
    Pinned,
    /// The whole service fails.
    ServiceDown,
    /// Some requests fail, on whatever connection.
    Endpoint,
    /// It cannot be said yet.
    Open,
}

impl Fare {
    /// Judges one run.
    pub fn of(run: &Run<'_>, others: &Others, thresholds: &Thresholds) -> Self {
        let lasts = run.until.since(run.since) >= thresholds.window / 2;
        if others.better == 0 {
            let is_down = others.worse > 0 || lasts;
            return if is_down {
                Self::ServiceDown
            } else {
                Self::Open
            };
        }
        // A balancer that has nobody to ask says so whatever is asked; but where it has nobody for one
        // kind of request only, that kind fails everywhere and is served nowhere.
        let is_known_page = run.talk.page.is_some()
            && (others.better >= thresholds.pinned.min_better || others.better_newer > 0)
            && (others.same_kind || !others.same_kind_failed);
        let do_better = others.newer_do_better(thresholds) || others.older_do_better(thresholds);
        if is_known_page || (others.same_kind && do_better) {
            return Self::Pinned;
        }
        if lasts || (!others.same_kind && others.better >= thresholds.pinned.min_better) {
            return Self::Endpoint;
        }
        Self::Open
    }
}
