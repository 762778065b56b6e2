//! Puts the core together: observations in, changes and overviews out.

use std::{
    collections::{BTreeMap, HashSet},
    time::Duration,
};

use tuplewatch_common::address::{FourTuple, Point, PortSpaceKey, Role};

use super::{
    alert::Alerts,
    budget,
    egress::Egress,
    finding::{Finding, Verdict},
    mute::Mute,
    observation::{Event, LookUp, Snapshot, Space3},
    placement::Placement,
    report::{Change, Overview, SpaceReport, Totals},
    rules::Rules,
    saved::Saved,
    signature::{self, Context, Look},
    space::Space,
    stuck::Became,
    surroundings::Around,
    tables::Tables,
    time::Moment,
};

/// Port spaces looked up at one look.
const LOOK_UPS: usize = 4;
/// Source ports named with each.
const LOOKED_UP_PORTS: usize = 32;
/// So long a finding of sockets waits for the answer whether the wire tells it.
const PATIENCE: Duration = Duration::from_secs(3);

/// The core.
#[derive(Debug, Default)]
pub struct Engine {
    rules: Rules,
    tables: Tables,
    alerts: Alerts,
    look_alikes: BTreeMap<(Verdict, PortSpaceKey), Finding>,
    /// Port spaces of sockets in trouble of which it is not known whether the wire tells it, and since when.
    waiting: BTreeMap<PortSpaceKey, Moment>,
    globals: [u64; tuplewatch_common::record::Global::COUNT as usize],
    /// Names that rest on the pattern of lost opens alone, and since when they are found.
    patterns: BTreeMap<(Verdict, PortSpaceKey), Moment>,
    around: Around,
    now: Moment,
    /// How long the latest snapshot took.
    took: Duration,
}

impl Engine {
    /// A core that has seen nothing yet.
    #[must_use]
    pub fn new(rules: impl Into<Rules>) -> Self {
        Self {
            rules: rules.into(),
            ..Self::default()
        }
    }

    /// The same with devices in between, whose ports it counts.
    #[must_use]
    pub fn with_egress(mut self, egress: Egress) -> Self {
        self.around.egress = egress;
        self
    }

    /// Takes single events.
    pub fn events(&mut self, events: &[Event]) {
        self.tables.events(events);
    }

    /// Takes a snapshot, judges, and says what changed.
    pub fn snapshot(&mut self, snapshot: &Snapshot) -> Vec<Change> {
        let now = snapshot.now;
        let t = &self.rules.thresholds;
        let resolve = self.rules.all().map(|t| t.alert.resolve).max();
        let resolve = resolve.unwrap_or(t.alert.resolve);
        let keep = t.window.max(resolve) + resolve;
        let pause = now.since(self.now);
        let is_gap = self.now != Moment::default() && pause + self.took > t.window;
        let gap = is_gap.then_some(pause);
        self.tables.snapshot(snapshot, keep, &t.pool, gap);
        let rests = self.rules.all().map(|t| t.idle_killed.window).max();
        let rests = rests.unwrap_or(t.idle_killed.window) + resolve;
        self.tables.idles.take(now, &snapshot.idle, rests);
        self.tables.suspects.take(now, &snapshot.answers, keep);
        if let Some(gap) = gap {
            self.alerts.resume(now, gap);
        }
        self.globals = snapshot.globals;
        self.around.take(snapshot, &self.tables, t);
        self.now = now;
        self.took = snapshot.took;
        self.note_silence();
        let look = Look::default();
        let context = Context {
            tables: &self.tables,
            rules: &self.rules,
            thresholds: &self.rules.thresholds,
            around: &self.around,
            look: &look,
            now,
        };
        let mut judged = signature::evaluate(&context);
        let began = std::mem::take(&mut self.waiting);
        for finding in judged.unjoined {
            let since = began.get(&finding.space).copied().unwrap_or(now);
            self.waiting.insert(finding.space, since);
            if now.since(since) >= PATIENCE {
                judged.findings.push(finding);
            }
        }
        self.patterns = patterns(&judged.findings, &self.patterns, now);
        let counted = &self.around.latest;
        judged.findings.retain(|finding| {
            let since = self.patterns.get(&(finding.verdict, finding.space));
            since.is_none_or(|since| counted.is_read_since(*since))
        });
        let (look_alikes, findings): (Vec<_>, Vec<_>) = judged
            .findings
            .into_iter()
            .partition(|finding| finding.verdict.is_look_alike());
        let mut changes = self
            .alerts
            .update(now, findings, &self.rules, |verdict, key| {
                signature::refresh(&context, verdict, key)
            });
        changes.extend(note_look_alikes(&mut self.look_alikes, look_alikes));
        changes
    }

    /// Connections that got no answer since they rested are remembered with those that were reset.
    fn note_silence(&mut self) {
        let silent = signature::in_silence(&Context {
            tables: &self.tables,
            rules: &self.rules,
            thresholds: &self.rules.thresholds,
            around: &self.around,
            look: &Look::default(),
            now: self.now,
        });
        self.tables.idles.note(&silent);
    }

    /// The state of everything, with the `top` busiest port spaces.
    #[must_use]
    pub fn overview(&self, top: usize) -> Overview {
        let window = self.rules.thresholds.window;
        let rank = |(key, space): (_, &Space)| {
            let trouble = space.episode.is_some();
            let opens = space.opens(self.now, window);
            (trouble, opens, space.census.in_use(), key)
        };
        let spaces = self.tables.spaces.iter();
        let mut ranks: Vec<_> = spaces.map(|(key, space)| rank((key, space))).collect();
        if top < ranks.len() {
            ranks.select_nth_unstable_by(top, |a, b| b.cmp(a));
            ranks.truncate(top);
        }
        ranks.sort_unstable_by(|a, b| b.cmp(a));
        let spaces: Vec<SpaceReport> = ranks
            .iter()
            .filter_map(|(_, _, _, key)| Some(self.report(key, self.tables.spaces.get(*key)?)))
            .collect();
        let listed = spaces
            .iter()
            .fold(Totals::default(), |sum, space| sum.plus(&space.totals));
        Overview {
            now: self.now,
            spaces,
            other: self.tables.all.minus(&listed),
            known_spaces: self.tables.spaces.len() as u64,
            globals: self.globals,
            alerts: self.alerts.live().cloned().collect(),
            muted: self.alerts.muted().cloned().collect(),
            egress: self.around.egress.uses(&self.tables, self.now).collect(),
            look_alikes: self.look_alikes.values().cloned().collect(),
        }
    }

    /// Connections that are stuck, or may be: those of the alerts, then those whose latest request failed.
    #[must_use]
    pub fn suspects(&self) -> Vec<FourTuple> {
        let alerts = self.alerts.live().chain(self.alerts.muted());
        let stuck = alerts.filter_map(|alert| alert.finding.evidence.stuck.as_ref());
        let stuck = stuck.flat_map(|stuck| &stuck.connections);
        let stuck = stuck.filter(|c| c.became == Became::Failing);
        let mut suspects: Vec<FourTuple> = stuck.map(|c| c.ends.tuple()).collect();
        let window = self.rules.thresholds.window;
        let failing = self.tables.services.failing(self.now, window);
        let mut failing: Vec<_> = failing
            .flat_map(|(_, service)| service.connections())
            .filter(|talk| talk.conversation.is_failing() && !talk.closed)
            .map(|talk| (talk.conversation.run, talk.conversation.tuple))
            .collect();
        failing.sort_unstable_by(|a, b| b.cmp(a));
        suspects.extend(failing.into_iter().map(|(_, tuple)| tuple));
        let mut known = HashSet::new();
        suspects.retain(|tuple| known.insert(*tuple));
        suspects
    }

    /// Port spaces in trouble that this host may translate, of which it was not looked up lately what they are at
    /// the other point: the next snapshot can tell. First those of sockets that wait to be told.
    #[must_use]
    pub fn wanted(&self) -> Vec<LookUp> {
        let alerts = self.alerts.live().map(|alert| &alert.finding);
        let findings = alerts.chain(self.look_alikes.values());
        let on_wire = findings.map(|finding| &finding.space).filter(|key| {
            key.point == Point::Wire as u8
                && key.role == Role::Initiator as u8
                // What is about a whole host or source has no connections of its own.
                && key.responder_port != 0
                && key.initiator != [0; 16]
        });
        let mut known = HashSet::new();
        let wanted = self.waiting.keys().chain(on_wire).filter_map(|key| {
            let (space, point) = (Space3::from(key), Point::from_u8(key.point));
            let is_due = self.tables.is_look_up_due(&space, point, self.now);
            (is_due && known.insert((point, space))).then(|| LookUp {
                space,
                point,
                ports: self.tables.latest_ports(key, LOOKED_UP_PORTS),
            })
        });
        wanted.take(LOOK_UPS).collect()
    }

    /// A name for lost opens waits for the counters to be read once more: as they were read last, they may not speak
    /// yet for what is told by them.
    #[must_use]
    pub fn wants_counters(&self) -> bool {
        let counted = &self.around.latest;
        self.patterns
            .values()
            .any(|since| !counted.is_read_since(*since))
    }

    /// Replaces the mutes: their ends are moments, which lie elsewhere once the time of day was set.
    pub fn set_mutes(&mut self, mutes: Vec<Mute>) {
        self.rules.mutes = mutes;
    }

    /// Replaces what is known of placements.
    pub fn set_placements(&mut self, placements: Vec<Placement>) {
        self.rules.placements = placements;
    }

    /// What must outlive the agent.
    #[must_use]
    pub fn save(&self) -> Saved {
        Saved::of(&self.alerts, self.tables.pools(self.now))
    }

    /// Takes up what an agent before this one has kept.
    pub fn restore(&mut self, now: Moment, saved: Saved) {
        let pools = saved.restore(now, &mut self.alerts);
        let until = now + self.rules.thresholds.pool.ageing;
        self.tables.remember_pools(until, pools);
    }

    fn report(&self, key: &PortSpaceKey, space: &Space) -> SpaceReport {
        let window = space.window(self.now, self.rules.thresholds.window);
        let seconds = self
            .tables
            .first
            .map_or(1.0, |first| self.now.since(first).as_secs_f64())
            .clamp(1.0, self.rules.thresholds.window.as_secs_f64());
        let counters = space.counters();
        let (tables, around) = (&self.tables, &self.around);
        let budget = budget::of(tables, around, self.now, key, space);
        let thresholds = self.rules.of(key);
        let outlook = budget.and_then(|budget| {
            budget::outlook(tables, around, thresholds, self.now, (key, space), &budget)
        });
        SpaceReport {
            key: *key,
            totals: counters.totals,
            opens_per_second: window.opens as f64 / seconds,
            window_refused: window.bare_acks,
            in_use: space.census.in_use(),
            time_wait: space.census.time_wait,
            ports_seen: space
                .ports
                .as_ref()
                .map_or(0, super::ports::Ports::distinct),
            budget,
            outlook,
            reuse_interval: counters.reuse_interval,
            handshake_duration: counters.handshake_duration,
            port_search: counters.port_search,
        }
    }
}

/// Those that rest on the pattern of lost opens alone, and since when.
fn patterns(
    findings: &[Finding],
    before: &BTreeMap<(Verdict, PortSpaceKey), Moment>,
    now: Moment,
) -> BTreeMap<(Verdict, PortSpaceKey), Moment> {
    findings
        .iter()
        .filter(|finding| signature::rests_on_pattern(finding))
        .map(|finding| {
            let id = (finding.verdict, finding.space);
            (id, before.get(&id).copied().unwrap_or(now))
        })
        .collect()
}

/// Look-alikes are told once when they begin and once when they end.
fn note_look_alikes(
    known: &mut BTreeMap<(Verdict, PortSpaceKey), Finding>,
    found: Vec<Finding>,
) -> Vec<Change> {
    let mut changes = Vec::new();
    let mut now: BTreeMap<_, _> = found
        .into_iter()
        .map(|f| ((f.verdict, f.space), f))
        .collect();
    for (key, finding) in &mut now {
        if let Some(before) = known.get(key) {
            finding.since = before.since;
        }
    }
    for (key, finding) in known.iter() {
        if !now.contains_key(key) {
            changes.push(Change::LookAlike {
                finding: Box::new(finding.clone()),
                ended: true,
            });
        }
    }
    for (key, finding) in &now {
        if !known.contains_key(key) {
            changes.push(Change::LookAlike {
                finding: Box::new(finding.clone()),
                ended: false,
            });
        }
    }
    *known = now;
    changes
}
