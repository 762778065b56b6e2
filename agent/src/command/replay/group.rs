//! Captures of one place, replayed together in the order of time.

use std::{
    collections::BTreeMap,
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use tuplewatch_common::{
    address::PortSpaceKey,
    record::{Event, Global, PortSpace},
};

use super::{progress::Progress, report::Report, stream::Stream};
use crate::{
    core::{
        alert::State,
        egress::Egress,
        engine::Engine,
        finding::{Finding, Verdict},
        observation::Snapshot,
        report::{Change, Overview},
        rules::Rules,
        time::Moment,
    },
    source::capture::{
        evidence::{About, Exhibit},
        fault::Fault,
        file::{CaptureFile, Counts, Next, Selection},
        look::Place,
        observer::Observer,
        tables::Limits,
        vantage::Vantage,
    },
};

/// Captures of one place.
pub(super) struct Group {
    members: Vec<Member>,
    /// Bytes of the groups before, for the progress.
    before: u64,
}

/// What a replay is to do.
pub(super) struct Job {
    pub(super) selection: Selection,
    pub(super) rules: Rules,
    pub(super) egress: Egress,
    /// Names of all files.
    pub(super) names: Vec<String>,
    /// Port spaces of the summary.
    pub(super) top: usize,
}

/// A file.
struct Member {
    file: CaptureFile,
    index: u32,
    fault: Option<Fault>,
}

/// What comes from a file.
struct Source {
    stream: Stream,
    /// Files whose times overlap have different ones.
    slot: u32,
    read: Arc<AtomicU64>,
}

/// What was found at one place.
pub(super) struct Outcome {
    /// By number in the list of files.
    pub(super) files: Vec<u32>,
    pub(super) vantage: Vantage,
    /// Sum over the files.
    pub(super) counts: Counts,
    /// Files that are damaged.
    pub(super) faults: super::Faults,
    /// Link types that were left out, with the number of packets.
    pub(super) left_out: Vec<(u32, Vec<u32>, u64)>,
    /// Segments that came too late to be put into order.
    pub(super) late: u64,
    /// Segments that were seen at several places, and count once.
    pub(super) copies: u64,
    /// The interfaces, where others of a file stood elsewhere and are judged apart.
    pub(super) interfaces: Vec<String>,
    /// Everything that was found, in the order of first appearance.
    pub(super) found: Vec<Found>,
    pub(super) spaces: Vec<(PortSpaceKey, PortSpace)>,
    pub(super) overview: Overview,
    pub(super) end: Moment,
}

/// One finding, with the packets that it rests on.
pub(super) struct Found {
    pub(super) finding: Finding,
    /// The alert's identity, if it is one.
    pub(super) alert: Option<String>,
    pub(super) exhibits: Vec<Exhibit>,
}

impl Outcome {
    /// A signature was found, not only look-alikes.
    pub(super) fn has_signature(&self) -> bool {
        self.found.iter().any(|f| f.alert.is_some())
    }

    /// The exhibits of all findings.
    pub(super) fn exhibits(&self) -> impl Iterator<Item = Exhibit> {
        self.found.iter().flat_map(|f| f.exhibits.iter().copied())
    }
}

/// Files with numbers of interfaces below this keep them apart from other files'.
const INTERFACES: u32 = 1 << 16;
/// The progress is told each so many segments.
const TELL: u32 = 1 << 14;

impl Group {
    /// Sorts files by the place where they were taken.
    pub(super) fn by_vantage(files: Vec<CaptureFile>) -> Vec<Self> {
        let mut groups: Vec<Self> = Vec::new();
        for file in files {
            let member = Member {
                index: file.index(),
                file,
                fault: None,
            };
            let same = |group: &&mut Self| {
                let of = |m: &Member| m.file.vantage.is_same(&member.file.vantage);
                group.members.iter().any(of)
            };
            match groups.iter_mut().find(same) {
                Some(group) => group.members.push(member),
                None => groups.push(Self {
                    members: vec![member],
                    before: 0,
                }),
            }
        }
        let mut before = 0;
        for group in &mut groups {
            group.before = before;
            let lengths = group.members.iter().filter_map(|m| m.file.length);
            before += lengths.sum::<u64>();
        }
        groups
    }

    /// Reads everything and judges it.
    ///
    /// # Errors
    /// The output cannot be written to. Damaged files are in the outcome.
    pub(super) fn replay(
        &mut self,
        job: &Job,
        progress: &Progress,
        report: &mut dyn Report,
    ) -> io::Result<Outcome> {
        let start = self.members.iter().filter_map(|m| m.file.starts_ns).min();
        let vantage = self.vantage();
        let own: Vec<String> = self.members.iter().map(|m| m.name(&job.names)).collect();
        progress.aside(|| report.begin(Moment(start.unwrap_or(0)), &own, &vantage))?;
        let mut observer = Observer::new(Limits::default());
        observer.rests.vantage.clone_from(&vantage);
        observer.exchanges.is_on = job.rules.ask_for_exchanges();
        let mut engine = Engine::new(job.rules.clone()).with_egress(job.egress.clone());
        let mut found = FoundSoFar::default();
        let mut look = |events: &[Event], snapshot: &Snapshot| -> io::Result<()> {
            engine.events(events);
            let changes = engine.snapshot(snapshot);
            if changes.is_empty() {
                return Ok(());
            }
            found.take(&changes);
            progress.aside(|| report.changes(snapshot.now, &changes))
        };
        self.read(&job.selection, progress, &mut observer, &mut look)?;
        let counts = self.counts();
        observer
            .tables
            .add_global(Global::Unreadable, counts.unreadable);
        observer
            .tables
            .add_global(Global::Fragments, counts.fragments);
        let until = job.selection.until_ns.unwrap_or(u64::MAX);
        let end = self.members.iter().map(|m| m.file.end_ns()).max();
        observer.finish(end.unwrap_or(0).min(until), &mut look)?;
        let overview = engine.overview(job.top);
        let outcome = Outcome {
            files: self.members.iter().map(|m| m.index).collect(),
            vantage,
            counts,
            faults: self.faults(),
            left_out: self.left_out(),
            late: observer.late,
            copies: observer.copies,
            interfaces: self.interfaces(),
            found: found.with_exhibits(&overview, &observer),
            spaces: observer.tables.port_spaces(),
            end: overview.now,
            overview,
        };
        progress.aside(|| report.end(&outcome, &job.names))?;
        Ok(outcome)
    }

    /// All files, the earliest packet first.
    fn read(
        &mut self,
        selection: &Selection,
        progress: &Progress,
        observer: &mut Observer,
        look: &mut impl FnMut(&[Event], &Snapshot) -> io::Result<()>,
    ) -> io::Result<()> {
        let before = self.before;
        thread::scope(|scope| {
            let (mut sources, mut faults) = (Vec::new(), Vec::new());
            for member in &mut self.members {
                let read = member.file.progress();
                let mut source = Source {
                    stream: Stream::start(scope, &mut member.file, selection)?,
                    slot: 0,
                    read,
                };
                source.advance(observer, &mut member.fault);
                sources.push(source);
                faults.push(&mut member.fault);
            }
            let mut since_told = 0;
            while let Some(i) = earliest(&sources) {
                choose_slot(&mut sources, i);
                let others = sources.len() > 1;
                let source = &mut sources[i];
                while let Some(observed) = source.stream.current() {
                    match observed.next {
                        Next::Segment => {
                            observer.touch(observed);
                            let interface = observed.interface + (source.slot - 1) * INTERFACES;
                            observer.take(observed, interface, look)?;
                        }
                        Next::Plain => {
                            observer.touch(observed);
                            observer.pass(observed.frame.time_ns, look)?;
                        }
                        Next::Time => observer.pass(observed.frame.time_ns, look)?,
                        Next::End => break,
                    }
                    source.advance(observer, faults[i]);
                    since_told += 1;
                    if others || since_told >= TELL {
                        break;
                    }
                }
                if since_told >= TELL {
                    since_told = 0;
                    let read = sources.iter().map(|s| s.read.load(Ordering::Relaxed));
                    progress.at(before + read.sum::<u64>());
                }
            }
            Ok(())
        })
    }

    /// The places of all members together.
    fn vantage(&self) -> Vantage {
        let mut all = self.members[0].file.vantage.clone();
        for member in &self.members[1..] {
            all.local.extend(&member.file.vantage.local);
        }
        all
    }

    fn interfaces(&self) -> Vec<String> {
        let places = self.members.iter().filter_map(|m| m.place());
        places.flat_map(|place| place.names.clone()).collect()
    }

    fn counts(&self) -> Counts {
        let mut sum = Counts::default();
        for counts in self.members.iter().map(|m| m.file.counts) {
            sum.packets += counts.packets;
            sum.outside += counts.outside;
            sum.segments += counts.segments;
            sum.unreadable += counts.unreadable;
            sum.fragments += counts.fragments;
            sum.first_ns = sum.first_ns.into_iter().chain(counts.first_ns).min();
            sum.last_ns = sum.last_ns.max(counts.last_ns);
        }
        sum
    }

    fn faults(&mut self) -> super::Faults {
        let members = self.members.iter_mut();
        members
            .filter_map(|m| Some((m.index, m.fault.take()?)))
            .collect()
    }

    fn left_out(&self) -> Vec<(u32, Vec<u32>, u64)> {
        let members = self.members.iter();
        members
            .map(|m| (m.index, m.file.left_out()))
            .filter(|(_, (links, _))| !links.is_empty())
            .map(|(index, (links, packets))| (index, links.to_vec(), packets))
            .collect()
    }
}

impl Member {
    /// The place that it is judged for, where its interfaces stood at several.
    fn place(&self) -> Option<&Place> {
        match &*self.file.places {
            [place] if !place.names.is_empty() => Some(place),
            _ => None,
        }
    }

    /// The file, and which of its interfaces.
    fn name(&self, names: &[String]) -> String {
        let file = &names[self.index as usize];
        self.place().map_or_else(
            || file.clone(),
            |place| format!("{file} ({})", place.names.join(", ")),
        )
    }
}

impl Source {
    #[inline]
    fn advance(&mut self, observer: &Observer, fault: &mut Option<Fault>) {
        if let Err(found) = self.stream.advance(|hash| observer.rests.expect(hash)) {
            *fault = Some(found);
        }
    }
}

fn earliest(sources: &[Source]) -> Option<usize> {
    let times = sources.iter().enumerate();
    let times = times.filter_map(|(i, source)| Some((source.stream.time()?, i)));
    times.min().map(|(_, i)| i)
}

/// A file that begins when another has ended goes on where that was; one that runs beside another
/// may hold copies of the same packets, as a second interface does.
fn choose_slot(sources: &mut [Source], i: usize) {
    if sources[i].slot != 0 {
        return;
    }
    let taken = |slot| {
        let of = |source: &Source| source.slot == slot && source.stream.time().is_some();
        sources.iter().any(of)
    };
    let free = (1..).find(|slot| !taken(*slot));
    sources[i].slot = free.unwrap_or(1);
}

/// Findings as they come, each told once.
#[derive(Default)]
struct FoundSoFar {
    found: BTreeMap<(Verdict, PortSpaceKey), (usize, Finding, Option<String>)>,
}

impl FoundSoFar {
    fn take(&mut self, changes: &[Change]) {
        for change in changes {
            match change {
                // One that stays pending until the end counts too: see `with_exhibits`.
                Change::Alert(alert) if alert.state != State::Pending => {
                    self.note(&alert.finding, Some(&alert.id));
                }
                Change::Alert(_) => {}
                Change::LookAlike { finding, .. } => self.note(finding, None),
            }
        }
    }

    fn note(&mut self, finding: &Finding, alert: Option<&String>) {
        let number = self.found.len();
        let entry = self
            .found
            .entry((finding.verdict, finding.space))
            .or_insert_with(|| (number, finding.clone(), alert.cloned()));
        entry.1 = finding.clone();
    }

    /// In the order of first appearance, with the packets that each rests on.
    fn with_exhibits(mut self, overview: &Overview, observer: &Observer) -> Vec<Found> {
        for alert in &overview.alerts {
            self.note(&alert.finding, Some(&alert.id));
        }
        let mut all: Vec<_> = self.found.into_values().collect();
        all.sort_by_key(|(number, ..)| *number);
        all.into_iter()
            .map(|(_, finding, alert)| Found {
                exhibits: observer.evidence.of(&finding.space, about(&finding)),
                finding,
                alert,
            })
            .collect()
    }
}

/// What the packets that show it are.
fn about(finding: &Finding) -> About {
    let idle = finding.evidence.idle.as_ref();
    match finding.verdict {
        _ if finding.evidence.stuck.is_some() => About::Failures,
        _ if finding.evidence.stall.is_some() => About::InVain,
        _ if idle.is_some_and(|idle| idle.in_silence > 0) => About::Silence,
        _ if idle.is_some() => About::Rests,
        Verdict::L4ReuseInTimeWait
        | Verdict::TupleCollision
        | Verdict::HalfOpenReconnect
        | Verdict::FixedPortReuse
        | Verdict::SynRecvCollision
        | Verdict::NoListener
        | Verdict::DuplicateSyn => About::BareAcks,
        _ => About::SynsAgain,
    }
}
