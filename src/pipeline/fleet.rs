//! Owns a campaign whose candidates run on other machines: its workers, and the arena that gives them candidates.
//!
//! One campaign has devices of one name. A worker of another device, or of another version of monobloc, is sent away with a note. A worker
//! that is lost costs time: its candidate runs again elsewhere, and only one that is lost repeatedly is a crash.

use std::collections::{BTreeMap, VecDeque};
use std::mem;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use crate::candidate::Candidate;
use crate::error::Fault;
use crate::flywheel::{Origin, Verdict};
use crate::manifest::{Manifest, SearchKernel};
use crate::report::Report;
use crate::search::fleet::Answered;
use crate::search::{Arena, BuildOutcome, Fleet, RunOutcome, Stop, TrialRecord, TrialResult};
use crate::target::{Target, TargetKind};

use super::Workspace;
use super::arena::{CampaignArena, Evidence, deadline, outcome_of};
use super::campaign::{Tuned, Tuning, run_campaign};
use super::chain::Chain;
use super::fleet_engines::{Engine, Started, Wanted};
use super::fleet_wire::{Event, Hello, Hub};
use super::keys::Hardware;
use super::made::Made;
use super::rows::{check_figures, timing};
use super::search_start::Incumbent;
use super::trial::{Answer, Job};
use super::worker::Done;

/// Longest wait for a word of a worker, so that an interrupt is heard.
const LOOK: Duration = Duration::from_millis(100);
/// Pause between two questions to the engine.
const ENGINE: Duration = Duration::from_secs(10);
/// Time after the limit of a trial in which its worker has to say so.
const GRACE: Duration = Duration::from_secs(120);
/// Workers that a candidate may lose, of which the last makes it a crash.
const LOSSES: u32 = 3;
/// Faults of machines in a row that end a campaign.
const FAULTS: u32 = 5;
/// Times that a step can take: from a thousandth of a microsecond to a day.
const TIMES_US: Range<f64> = 1e-3..86_400e6;

/// Where the candidates of a campaign run.
pub struct Away<'a> {
    pub engine: Engine,
    pub workers: u32,
    /// Where workers connect; `None`: any port of this machine.
    pub listen: Option<SocketAddr>,
    /// Program and arguments of a worker that joins at an address.
    pub command: &'a dyn Fn(SocketAddr) -> Vec<String>,
}

/// As [`super::tune`], with workers on other machines.
///
/// # Errors
/// As of [`super::tune`]; an engine that is not there, workers that cannot run.
pub fn tune_away(
    workspace: &Workspace,
    manifest: &Manifest,
    target: &Target,
    asked: &Tuning<'_>,
    away: &Away<'_>,
) -> Result<Tuned, Fault> {
    if manifest.search.kernel != SearchKernel::Decode {
        let kernel = manifest.search.kernel;
        return Err(Fault::input(format!("`--on` searches the decode kernel, found `[search] kernel = \"{kernel}\"`"))
            .with_remedy("search a wave kernel on the machine that has the device, without `--on`"));
    }
    let positions = manifest.decode.time_positions.clone();
    let mut workers = Workers::start(&workspace.report, target.kind, away, positions)?;
    let hardware = workers.first(asked.stop)?;
    run_campaign(workspace, manifest, target, asked, hardware, Some(workers))
}

/// The workers of a campaign.
pub(super) struct Workers<'a> {
    report: &'a Report,
    engine: Engine,
    count: u32,
    target: TargetKind,
    /// Where candidates are timed.
    positions: Vec<u32>,
    command: Vec<String>,
    started: Started,
    hub: Hub,
    connected: BTreeMap<u64, Connected>,
    /// Workers that joined since the engine was asked for some.
    joined: u32,
    looked: Instant,
    /// What the campaign runs on, once a worker told it.
    hardware: Option<Hardware>,
    /// Why the last worker was sent away.
    refused: Option<Fault>,
    /// Tickets of workers that were gone before they heard of them.
    missed: VecDeque<u64>,
}

struct Connected {
    hello: Hello,
    hardware: Hardware,
    /// Ticket of its candidate, when it got that, and for how long it may be silent.
    busy: Option<(u64, Instant, Duration)>,
    /// Whether it has answered before.
    is_warm: bool,
}

impl Connected {
    fn name(&self) -> String {
        format!("{} ({})", self.hello.host, self.hello.job)
    }
}

/// What became of a candidate.
struct Heard {
    ticket: u64,
    /// `None`: its worker was lost.
    done: Option<(Done, Origin, Hardware)>,
}

impl<'a> Workers<'a> {
    fn start(
        report: &'a Report,
        target: TargetKind,
        away: &Away<'_>,
        positions: Vec<u32>,
    ) -> Result<Workers<'a>, Fault> {
        let hub = Hub::open(away.listen)?;
        let command = (away.command)(hub.address);
        let wanted = Wanted { workers: away.workers, target, command: &command, token: &hub.token };
        let started = Started::new(&away.engine, &wanted)?;
        report.note(&match &away.engine {
            Engine::Hands => format!("start workers by: {}={} {}", super::TOKEN, hub.token, command.join(" ")),
            engine => format!("{} starts {} workers, which join at {}", engine.name(), away.workers, hub.address),
        });
        Ok(Workers {
            report,
            engine: away.engine.clone(),
            count: away.workers,
            target,
            positions,
            command,
            started,
            hub,
            connected: BTreeMap::new(),
            joined: 0,
            looked: Instant::now(),
            hardware: None,
            refused: None,
            missed: VecDeque::new(),
        })
    }

    /// Waits for the first worker, and says what it runs on.
    fn first(&mut self, stop: &dyn Fn() -> bool) -> Result<Hardware, Fault> {
        loop {
            if stop() {
                return Err(Fault::environment("interrupted before a worker joined")
                    .with_remedy("start the same command again"));
            }
            self.hear()?;
            if let Some(hardware) = &self.hardware {
                return Ok(hardware.clone());
            }
        }
    }

    fn free(&self) -> usize {
        self.connected.values().filter(|worker| worker.busy.is_none()).count()
    }

    /// Gives a candidate to a free worker, one that has answered before if there is one.
    fn send(&mut self, ticket: u64, job: &Job, timeout: Option<Duration>, slowest: Duration) {
        let free = self.connected.iter_mut().filter(|(_, worker)| worker.busy.is_none());
        let Some((number, worker)) = free.max_by_key(|(_, worker)| worker.is_warm) else {
            self.missed.push_back(ticket);
            return;
        };
        worker.busy = Some((ticket, Instant::now(), deadline(timeout, worker.is_warm, slowest) + GRACE));
        if !self.hub.send(*number, ticket, job, timeout) {
            worker.busy = None;
            let number = *number;
            self.hub.close(number);
            self.connected.remove(&number);
            self.missed.push_back(ticket);
        }
    }

    /// The next word about a candidate, after a short wait at most.
    fn hear(&mut self) -> Result<Option<Heard>, Fault> {
        if let Some(ticket) = self.missed.pop_front() {
            return Ok(Some(Heard { ticket, done: None }));
        }
        let late = self
            .connected
            .iter()
            .filter(|(_, worker)| worker.busy.is_some_and(|(_, since, limit)| since.elapsed() > limit));
        // Their ends are heard as those of any other worker.
        late.for_each(|(number, _)| self.hub.close(*number));
        if self.looked.elapsed() >= ENGINE {
            self.looked = Instant::now();
            self.look()?;
        }
        match self.hub.events.recv_timeout(LOOK) {
            Ok(event) => Ok(self.heard(event)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(Fault::internal("the search does not listen any more")),
        }
    }

    fn heard(&mut self, event: Event) -> Option<Heard> {
        match event {
            Event::Joined(number, hello) => {
                self.join(number, hello);
                None
            }
            Event::Reply { from, ticket, done } => {
                let worker = self.connected.get_mut(&from)?;
                if let Some(reason) = nonsense(&done, &self.positions) {
                    self.report.note(&format!("worker {} is given up: {reason}", worker.name()));
                    self.hub.close(from);
                    return None;
                }
                match worker.busy.take() {
                    Some((asked, ..)) if asked == ticket => {
                        worker.is_warm = true;
                        let Hello { host, job, .. } = worker.hello.clone();
                        let origin = Origin { host, engine: self.engine.name().to_string(), job };
                        Some(Heard { ticket, done: Some((done, origin, worker.hardware.clone())) })
                    }
                    // It speaks about another candidate than its own.
                    busy => {
                        worker.busy = busy;
                        self.hub.close(from);
                        None
                    }
                }
            }
            Event::Gone(number, reason) => {
                let worker = self.connected.remove(&number)?;
                let (ticket, ..) = worker.busy?;
                let name = worker.name();
                self.report.note(&format!("worker {name} was lost ({reason}): its candidate runs again"));
                Some(Heard { ticket, done: None })
            }
        }
    }

    /// Takes a worker in, unless its trials would be of another campaign.
    fn join(&mut self, number: u64, hello: Hello) {
        let (host, job) = (&hello.host, &hello.job);
        let refused = match (&hello.hardware, &self.hardware) {
            (Err(fault), _) => Some(fault.clone()),
            (Ok(own), Some(of_all)) if (&own.name, own.threads) != (&of_all.name, of_all.threads) => {
                Some(Fault::input(format!("it has {}, and the campaign is of {}", own.name, of_all.name)))
            }
            _ => None,
        };
        let (None, Ok(hardware)) = (&refused, hello.hardware.clone()) else {
            if let Some(fault) = refused {
                self.report.note(&format!("worker {host} ({job}) is not used: {}", fault.message));
                self.refused = Some(fault);
            }
            self.hub.close(number);
            return;
        };
        self.report.note(&format!("worker {host} ({job}) joined: {}", hardware.name));
        self.joined += 1;
        self.hardware.get_or_insert(hardware.clone());
        self.connected.insert(number, Connected { hello, hardware, busy: None, is_warm: false });
    }

    /// Asks the engine for workers again if all have ended.
    fn look(&mut self) -> Result<(), Fault> {
        if !self.connected.is_empty() || self.started.is_alive()? {
            return Ok(());
        }
        if self.joined == 0 {
            let unheard = || {
                let address = self.hub.address;
                Fault::environment(format!("{}: its workers ended and none of them joined", self.engine.name()))
                    .with_remedy(format!(
                        "program and manifest have to be at the same paths on each node, and {address} has to be \
                         reached from there (`--listen`)"
                    ))
            };
            return Err(self.refused.clone().unwrap_or_else(unheard));
        }
        self.joined = 0;
        let Workers { count, target, command, hub, engine, .. } = self;
        let wanted = Wanted { workers: *count, target: *target, command, token: &hub.token };
        self.started = Started::new(engine, &wanted)?;
        self.report.note(&format!("{}: all workers have ended, {} are started again", self.engine.name(), self.count));
        Ok(())
    }
}

/// Why an answer is none that a worker measures: a machine that fails may say anything, and a campaign does not end of it.
fn nonsense(done: &Done, positions: &[u32]) -> Option<String> {
    let verdicts = match done {
        Done::Interrupted => return Some("it did not try its candidate".to_string()),
        Done::Late(_) | Done::Answer(Answer::Fault(_)) => return None,
        Done::Died(detail) => vec![Verdict::Crash { detail: detail.clone(), check: None }],
        Done::Answer(Answer::Failed { failure, detail, figures, .. }) => {
            vec![failure.verdict(detail.clone(), *figures)]
        }
        Done::Answer(Answer::Timed { figures, timed, rounds, .. }) => {
            let check = check_figures(*figures);
            let mut found: Vec<u32> = timed.iter().map(|timed| timed.position).collect();
            found.sort_unstable();
            found.dedup();
            if found.is_empty() || found.len() != timed.len() || !found.iter().all(|at| positions.contains(at)) {
                return Some(format!("it timed the positions {found:?}, and was asked for {positions:?}"));
            }
            let mut times = rounds.iter().flat_map(|(_, rounds)| rounds.iter().flatten());
            if !times.all(|us| TIMES_US.contains(us)) || !timed.iter().all(|at| TIMES_US.contains(&at.latency_us_p50)) {
                return Some("it has a time that no step takes".to_string());
            }
            timed.iter().map(|timed| Verdict::Ok { check, timing: timing(timed, None) }).collect()
        }
    };
    let spent = match done {
        Done::Answer(Answer::Timed { check_ms, measure_ms, .. }) => [Some(*check_ms), Some(*measure_ms)],
        Done::Answer(Answer::Failed { check_ms, .. }) => [*check_ms, None],
        _ => [None; 2],
    };
    if spent.into_iter().flatten().any(|ms| !ms.is_finite() || ms < 0.0) {
        return Some("it has a time below zero".to_string());
    }
    verdicts.iter().find_map(|verdict| verdict.is_sound().err()).map(|fault| fault.to_string())
}

/// The arena of a campaign with workers.
pub(super) struct FleetArena<'a> {
    /// Makes candidates, and records trials.
    pub inner: CampaignArena<'a>,
    pub workers: Workers<'a>,
    /// Candidates that run, by ticket.
    asked: BTreeMap<u64, (String, Instant)>,
    /// Workers that a candidate has lost.
    losses: BTreeMap<String, u32>,
    /// Faults of machines since the last answer.
    faults: u32,
}

impl<'a> FleetArena<'a> {
    pub fn new(inner: CampaignArena<'a>, workers: Workers<'a>) -> FleetArena<'a> {
        FleetArena { inner, workers, asked: BTreeMap::new(), losses: BTreeMap::new(), faults: 0 }
    }

    /// A candidate whose worker was lost.
    fn lost(&mut self, knobs: String, reason: &str) -> RunOutcome<Evidence> {
        let losses = self.losses.entry(knobs).or_default();
        *losses += 1;
        if *losses < LOSSES {
            return RunOutcome::Interrupted;
        }
        let detail = format!("{losses} workers that ran it were lost; the last one: {reason}");
        RunOutcome::Failed(Evidence::failed(Verdict::Crash { detail, check: None }))
    }
}

impl<'a> Fleet for FleetArena<'a> {
    type Built = Made<'a>;
    type Evidence = Evidence;
    type Against = BTreeMap<u32, Incumbent>;
    type Fault = Fault;

    fn make(&mut self, candidate: &Candidate) -> Result<BuildOutcome<Made<'a>>, Fault> {
        self.inner.make(candidate, &[])
    }

    fn free(&mut self) -> Result<usize, Fault> {
        Ok(self.workers.free())
    }

    fn send(&mut self, ticket: u64, candidate: &Candidate, incumbent: Option<&Candidate>) -> Result<(), Fault> {
        let job = Job {
            campaign: self.inner.campaign.to_string(),
            candidate: candidate.to_string(),
            incumbent: incumbent.map(ToString::to_string),
        };
        self.asked.insert(ticket, (job.candidate.clone(), Instant::now()));
        self.workers.send(ticket, &job, self.inner.trial_timeout, self.inner.slowest);
        Ok(())
    }

    fn next(&mut self) -> Result<Option<Answered<Evidence>>, Fault> {
        let Some(Heard { ticket, done }) = self.workers.hear()? else { return Ok(None) };
        let Some((knobs, begun)) = self.asked.remove(&ticket) else { return Ok(None) };
        let outcome = match done {
            None => self.lost(knobs, "the connection ended"),
            Some((Done::Answer(Answer::Fault(fault)), origin, _)) => {
                self.faults += 1;
                if self.faults >= FAULTS {
                    return Err(fault);
                }
                let Origin { host, job, .. } = &origin;
                self.workers.report.note(&format!("worker {host} ({job}) has a fault: {}", fault.message));
                self.lost(knobs, &fault.message)
            }
            Some((done, origin, hardware)) => {
                self.faults = 0;
                if let Done::Answer(Answer::Timed { .. }) = &done {
                    self.inner.slowest = self.inner.slowest.max(begun.elapsed());
                }
                let mut outcome = outcome_of(done)?;
                if let RunOutcome::Timed { evidence, .. } | RunOutcome::Failed(evidence) = &mut outcome {
                    evidence.elsewhere = Some((origin, hardware));
                }
                outcome
            }
        };
        Ok(Some((ticket, outcome)))
    }

    fn against(&self) -> BTreeMap<u32, Incumbent> {
        self.inner.incumbent_rows.clone()
    }

    fn record(
        &mut self,
        record: &TrialRecord<'_, Made<'a>, Evidence>,
        against: &BTreeMap<u32, Incumbent>,
    ) -> Result<(), Fault> {
        let TrialRecord { number, candidate, proposer, result } = record;
        // A worker compiled it; what it made may be in a cache that this machine reads, too.
        let looked = Chain::looking(self.inner.context, self.inner.host, (*candidate).clone());
        let looked = matches!(looked.cubin(), Ok(Some(_))).then(|| Made::Decode(Box::new(looked)));
        let looked = looked.as_ref();
        let result = match *result {
            TrialResult::Infeasible(reason) => TrialResult::Infeasible(reason),
            TrialResult::Failed { made, evidence } => TrialResult::Failed { made: looked.unwrap_or(made), evidence },
            TrialResult::First { made, evidence } => TrialResult::First { made: looked.unwrap_or(made), evidence },
            TrialResult::Judged { made, evidence, judged } => {
                TrialResult::Judged { made: looked.unwrap_or(made), evidence, judged }
            }
        };
        let kept = match &result {
            TrialResult::First { .. } => true,
            TrialResult::Judged { judged, .. } => judged.decision.is_kept(),
            _ => false,
        };
        let now = mem::replace(&mut self.inner.incumbent_rows, against.clone());
        self.inner.record(&TrialRecord { number: *number, candidate, proposer: *proposer, result })?;
        if !kept {
            self.inner.incumbent_rows = now;
        }
        Ok(())
    }

    fn stop(&mut self) -> Option<Stop> {
        self.inner.stop()
    }

    fn floor_gap(&mut self) -> Option<f64> {
        self.inner.floor_gap
    }
}
