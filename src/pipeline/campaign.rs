//! Owns a campaign: a search over one target of a manifest, with devices, clocks, a child process and a corpus.

use std::collections::{BTreeMap, VecDeque};
use std::process::Command;
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::abba::Ratio;
use crate::cache::Cache;
use crate::candidate::{Candidate, Values};
use crate::digest::Digest;
use crate::error::{Fault, Tier};
use crate::flywheel::{Corpus, Decision, Proposer, RatioInterval, Trial, Verdict, corpora};
use crate::lower::LayerOp;
use crate::manifest::Manifest;
use crate::report::Report;
use crate::schedule::schedule;
use crate::search::prior::Group;
use crate::search::space::changed;
use crate::search::{
    Arena, Ask, BuildOutcome, History, KNOBS, Limits, PastTrial, Prior, RunOutcome, Search, Setting, Space, Start,
    Stop, TrialRecord, TrialResult, cost, drive, floor_gap, histories, lessons, past_trials,
};
use crate::target::{Target, TargetKind};

use super::compile::{Compile, Compiler, Cubin, compile};
use super::execute::{Devices, hardware_of, host};
use super::keys::{self, Hardware};
use super::prove::{Executor, OnDevice};
use super::rows::{Asked, Tried, Verdicted, check_figures, shape, timing};
use super::stages::{Generated, NotPlaced, Placed, Site, generate_source, graph_alone, place};
use super::trial::{Answer, Job};
use super::worker::{Done, Reply, Worker};
use super::{Workspace, import_stage};

/// A child that has to import, compare and load first.
const DEADLINE_COLD: Duration = Duration::from_secs(900);
/// A trial of a warm child: seconds, unless something hangs. Slow models get a multiple of what trials took so far.
const DEADLINE_WARM: Duration = Duration::from_secs(120);
const DEADLINE_FACTOR: u32 = 10;
/// A program that proposes may think this long.
const DEADLINE_PROPOSER: Duration = Duration::from_secs(600);
/// Candidates that are compiled before they are asked for, at most; more are stale before their turn comes.
const AHEAD_MAX: usize = 12;

/// How hard to search, and how a child is started.
pub struct Tuning<'a> {
    /// The op that is tuned alone; `None`: whole steps.
    pub op: Option<LayerOp>,
    pub trials: u32,
    pub minutes: f64,
    /// A command line that proposes candidates.
    pub proposer: Option<&'a str>,
    /// Time after which a trial is given up; `None`: minutes, more where earlier ones were slow.
    pub trial_timeout: Option<Duration>,
    /// Makes the command that serves trials of this manifest and target.
    pub child: &'a dyn Fn(&Target) -> Command,
    /// Whether the user wants to stop.
    pub stop: &'a dyn Fn() -> bool,
}

/// What a campaign came to.
#[derive(Debug, Clone, PartialEq)]
pub struct Tuned {
    pub target: String,
    /// Knobs of the best.
    pub candidate: String,
    pub is_default: bool,
    pub stop: String,
    pub interrupted: bool,
    /// Measured candidates of this campaign, of this run and earlier ones, the default aside.
    pub trials: u32,
    /// Measured by this run, the default and the last comparison included.
    pub ran: u32,
    /// Latency of the best by the default's, where they were compared at the end.
    pub against_default: Option<Ratio>,
    /// Of each trial, outside of making, checking and timing candidates; `None` where none ran.
    pub search_ms_per_trial: Option<f64>,
    /// Of each trial, loading and packing in the child; `None` where none ran.
    pub load_ms_per_trial: Option<f64>,
}

impl Workspace {
    /// The same places, without a word.
    fn quiet(&self) -> Result<Workspace, Fault> {
        let cache = Cache::open_places(&self.cache.places(), |_| {})?;
        Ok(Workspace { cache, report: Report::quiet(), trials: self.trials.clone() })
    }
}

/// Searches, or goes on where the same search stopped, and remembers the best for later builds.
///
/// # Errors
/// A target without a device here; a default candidate that is wrong or does not fit; faults of the environment.
pub fn tune(workspace: &Workspace, manifest: &Manifest, target: &Target, asked: &Tuning<'_>) -> Result<Tuned, Fault> {
    let tool = workspace.tool()?;
    let model = import_stage(workspace, manifest, tool)?;
    let model = match asked.op {
        None => model,
        Some(op) => model.alone(op, target),
    };
    let quiet = workspace.quiet()?;
    let told_site = Site::new(workspace, manifest, target, &model, tool)?;
    let devices = Devices::list(target.kind == TargetKind::Cuda);
    let hardware = match target.kind {
        TargetKind::Cpu => host(),
        TargetKind::Cuda => hardware_of(devices.find_for_run(target)?),
    };
    let campaign = told_site.campaign(&hardware);
    let site = Site::new(&quiet, manifest, target, &model, tool)?;
    let space = space_of(&site);
    let known = Known::read(&site, campaign)?;
    let default = space.default_candidate().clone();
    // Whoever thinks ahead meets the same points over and over.
    let guesses: Mutex<BTreeMap<Values, f64>> = Mutex::default();
    let guess = |candidate: &Candidate| {
        let mut known = guesses.lock().unwrap_or_else(PoisonError::into_inner);
        *known.entry(candidate.values()).or_insert_with(|| guess(&site, &default, candidate))
    };
    let setting = Setting::new(&shape(&site, &model.imported.graph), &target.name, target.kind.name());
    let prior = Prior::new(&known.groups, setting, &space);
    let intro = intro(&site, &space, &known, &prior);
    let limits = Limits::of_budget(asked.trials, manifest.search.seed);
    let mut search = Search::new(&space, limits, &known.groups, prior, known.seeds.clone(), &guess);

    let ahead = Ahead::default();
    let count = match target.kind {
        TargetKind::Cpu => 0,
        TargetKind::Cuda => thread::available_parallelism().map_or(1, |n| n.get()).min(AHEAD_MAX),
    };
    thread::scope(|scope| {
        for _ in 0..count {
            scope.spawn(|| ahead.work(&site));
        }
        let result = run(&told_site, &site, &hardware, campaign, known, &mut search, intro, &ahead, count, asked);
        ahead.end();
        result
    })
}

#[allow(clippy::too_many_arguments)] // Everything that one run of a campaign works with.
fn run(
    told_site: &Site<'_>,
    site: &Site<'_>,
    hardware: &Hardware,
    campaign: Digest,
    known: Known,
    search: &mut Search<'_>,
    intro: Vec<String>,
    ahead: &Ahead,
    count: usize,
    asked: &Tuning<'_>,
) -> Result<Tuned, Fault> {
    let report = &told_site.workspace.report;
    let (target, default) = (site.target, search.default_candidate().clone());
    let mut arena = Bench {
        site: *site,
        report,
        compiler: Compiler::new(site.workspace),
        hardware,
        campaign,
        default: default.clone(),
        intro,
        worker: Worker::new(|| (asked.child)(target)),
        ahead,
        started: Instant::now(),
        minutes: asked.minutes,
        trial_timeout: asked.trial_timeout,
        stop: asked.stop,
        incumbent_rows: known.incumbent_rows,
        floor_gap: known.floor_gap,
        last_failure: None,
        slowest: Duration::ZERO,
        spent: Spent::default(),
    };
    let mut proposer = asked.proposer.map(|line| External::new(line, asked.stop));
    let mut propose = |search: &Search<'_>| match &mut proposer {
        Some(proposer) => proposer.propose(search, report),
        None => Ok(None),
    };
    let external = asked.proposer.is_some();
    let start = Start {
        past: known.past,
        margin: site.manifest.search.margin,
        external: external.then_some(&mut propose as crate::search::Proposes<'_, Fault>),
    };
    let driven = drive(&mut arena, search, start, count)?;
    for (candidate, other) in &driven.duplicates {
        let (candidate, other) = (changed(candidate, &default), changed(other, &default));
        report.note(&format!("`{candidate}` makes the schedule of `{other}`: not measured again"));
    }
    let Some(best) = driven.best else {
        if driven.stop == Stop::Interrupted {
            return Err(Fault::environment("interrupted before the default candidate was measured")
                .with_remedy("start the same command again"));
        }
        let reason = arena.last_failure.unwrap_or_else(|| "nothing was measured".to_string());
        return Err(Fault::internal(format!("the default candidate of `{}` cannot be tuned: {reason}", target.name))
            .with_remedy("its verdict is a row of the trials; `monobloc build` checks it in full"));
    };
    let checking = Instant::now();
    // An op alone was compared in its trials with all that there is to compare it with.
    let checked = if site.op.is_none() { fully_checked(told_site, &best, &default) } else { Ok(()) };
    arena.spent.checked = checking.elapsed();
    let best = match checked {
        Ok(()) => best,
        Err(fault) if fault.tier == Tier::Internal => {
            report.note(&format!("the best candidate fails the full check, the default is built: {}", fault.message));
            default.clone()
        }
        Err(fault) => return Err(fault),
    };
    remember(told_site, &best, &driven.stop, search.trials(), asked)?;
    let elapsed = arena.started.elapsed();
    let per_trial = |time: Duration| (driven.ran > 0).then(|| time.as_secs_f64() * 1e3 / f64::from(driven.ran));
    Ok(Tuned {
        target: target.name.clone(),
        is_default: best == default,
        candidate: best.to_string(),
        stop: driven.stop.to_string(),
        interrupted: driven.stop == Stop::Interrupted,
        trials: search.trials(),
        ran: driven.ran,
        against_default: driven.against_default,
        search_ms_per_trial: per_trial(
            elapsed.saturating_sub(arena.spent.made + arena.spent.child + arena.spent.checked),
        ),
        load_ms_per_trial: per_trial(arena.spent.child.saturating_sub(arena.spent.measured)),
    })
}

/// What the corpora say, about this campaign and others.
struct Known {
    groups: Vec<Group>,
    /// What was found for ops of this model alone.
    seeds: Vec<Candidate>,
    stale: usize,
    past: Vec<PastTrial>,
    broken: Vec<String>,
    /// Row of the incumbent at each position.
    incumbent_rows: BTreeMap<u32, Digest>,
    floor_gap: Option<f64>,
}

impl Known {
    fn read(site: &Site<'_>, campaign: Digest) -> Result<Known, Fault> {
        let corpus = Corpus::read(&corpora(&site.workspace.trials))?;
        let seeds = seeds_of_ops(site, &corpus.trials);
        let of_campaign = |trial: &Trial| trial.facts().point.campaign == Some(campaign);
        let (own, mut others): (Vec<Trial>, Vec<Trial>) = corpus.trials.into_iter().partition(of_campaign);
        keep_kin(site, &mut others);
        let lessons = lessons(&others);
        let mut known = Known {
            groups: lessons.groups,
            seeds,
            stale: lessons.stale,
            past: vec![],
            broken: corpus.broken.iter().map(ToString::to_string).collect(),
            incumbent_rows: BTreeMap::new(),
            floor_gap: None,
        };
        if let Some(history) = histories(&own).first() {
            if let Some(incumbent) = history.incumbent() {
                known.incumbent_rows = incumbent.timed.iter().map(|row| (row.timing.position, row.id)).collect();
                known.floor_gap = incumbent.floor_gap();
            }
            known.past = past_trials(history);
        }
        Ok(known)
    }
}

/// Leaves out what teaches nothing here: of whole steps a single op learns as little as they do of it.
pub(super) fn keep_kin(site: &Site<'_>, trials: &mut Vec<Trial>) {
    let op = site.op.map(LayerOp::name);
    trials.retain(|trial| trial.facts().model.op() == op);
}

/// The default with what searches of single ops of this model kept: each by itself, and all of it.
pub(super) fn seeds_of_ops(site: &Site<'_>, trials: &[Trial]) -> Vec<Candidate> {
    if site.op.is_some() {
        return vec![];
    }
    let default = site.default_candidate();
    let (mut all, mut seeds) = (default.values(), vec![]);
    let histories = histories(trials);
    for op in LayerOp::ALL {
        let graph = graph_alone(site.graph, op, site.target);
        let last = histories.iter().rfind(|history| {
            history.model.model_graph == graph
                && history.machine.target == site.target.name
                && Space::contains(&history.space)
        });
        let Some(kept) = last.and_then(History::incumbent) else { continue };
        let (kept, mut own) = (kept.candidate.values(), default.values());
        let knobs = KNOBS.iter().enumerate().filter(|(_, knob)| knob.reaches(op, site.target.kind));
        for (at, _) in knobs {
            if let (Some(own), Some(all), Some(kept), Some(default)) =
                (own.get_mut(at), all.get_mut(at), kept.get(at), default.values().get(at))
                && kept != default
            {
                (*own, *all) = (*kept, *kept);
            }
        }
        seeds.push(Candidate::of_values(&own));
    }
    seeds.insert(0, Candidate::of_values(&all));
    seeds
}

/// The space of a site; shared memory beside the ring as schedules have it.
pub(super) fn space_of(site: &Site<'_>) -> Space {
    let Manifest { precision, decode, .. } = site.manifest;
    let graph = &site.imported.graph;
    let default = site.default_candidate();
    let fixed = |consumer_warps: u32| {
        // The smallest ring that these warps can have, so that all else is what shared memory holds.
        let slot_bytes = consumer_warps * crate::ir::op::GRANULE_BYTES * 4;
        let smallest = Candidate {
            consumer_warps,
            slot_bytes,
            ring_slots: 2,
            flight_high: 1,
            flight_low: 1,
            flight_free: 0,
            ..default.clone()
        };
        let placed =
            site.lower(&smallest).and_then(|program| schedule(program, &keys::unmeasured(site.target), &smallest));
        placed.map_or(0, |schedule| {
            let smem = &schedule.machine.smem;
            smem.iter().filter(|part| part.name != "ring").map(|part| u64::from(part.bytes)).sum()
        })
    };
    let space = Space::new(graph, site.target, *precision, decode.context_max, default.clone(), fixed);
    match site.op {
        None => space,
        Some(op) => space.of_op(op),
    }
}

/// The cost model's log ratio by the default, the mean of all timed positions; 0 where the target was not calibrated.
pub(super) fn guess(site: &Site<'_>, default: &Candidate, candidate: &Candidate) -> f64 {
    let positions = &site.manifest.decode.time_positions;
    let logs = positions.iter().filter_map(|&position| {
        Some((predicted_us(site, candidate, position)? / predicted_us(site, default, position)?).ln())
    });
    logs.sum::<f64>() / positions.len().max(1) as f64
}

pub(super) fn predicted_us(site: &Site<'_>, candidate: &Candidate, position: u32) -> Option<f64> {
    // The cost model is one of whole steps.
    if site.op.is_some() {
        return None;
    }
    let precision = site.manifest.precision;
    let predicted = cost::predict(&site.imported.graph, site.target, precision, candidate, position)?;
    Some(predicted.total_us()).filter(|us| us.is_finite() && *us > 0.0)
}

fn intro(site: &Site<'_>, space: &Space, known: &Known, prior: &Prior) -> Vec<String> {
    let knobs: Vec<&str> = space.knobs().map(|(knob, _)| knob.name).collect();
    let mut lines = vec![format!("{}: {} points of {}", site.target.name, space.size(), knobs.join(", "))];
    if known.stale > 0 {
        lines.push(format!("{} rows are of another space of knobs and teach nothing here", known.stale));
    }
    if !prior.is_cold() {
        let count = known.groups.len();
        lines.push(format!("{count} earlier campaign{} to learn from", if count == 1 { "" } else { "s" }));
    }
    if let Some(last) = known.past.iter().map(|past| past.number).max() {
        lines.push(format!("goes on behind trial {last}"));
    }
    lines.extend(known.broken.iter().take(3).map(|broken| format!("skipped {broken}")));
    lines
}

/// Checks what a search found as a build would, through the cache. Trials are compared with less: no hostile orders.
fn fully_checked(site: &Site<'_>, best: &Candidate, default: &Candidate) -> Result<(), Fault> {
    if best == default {
        return Ok(());
    }
    let placed = place(site, best.clone()).map_err(|not_placed| match not_placed {
        NotPlaced::Fault(fault) => fault,
        NotPlaced::Infeasible(reason) => Fault::internal(format!("a candidate that was timed does not fit: {reason}")),
    })?;
    let devices = Devices::list(site.target.kind == TargetKind::Cuda);
    let made = match site.target.kind {
        TargetKind::Cpu => None,
        TargetKind::Cuda => {
            let generated = generate_source(site, &placed)?;
            let cubin = compiled(&Compiler::new(site.workspace), site, &generated)?;
            cubin.map(|cubin| (cubin, generated.content))
        }
    };
    let on = match &made {
        None => None,
        Some((cubin, source)) => {
            let device = devices.find_for_run(site.target)?;
            Some(OnDevice { cubin, source: *source, device })
        }
    };
    Executor::new(*site, &placed, on)?.checked(&mut None).map(|_| ())
}

/// Whether a search of this target can run here, or what is missing.
///
/// # Errors
/// One line that says what is missing.
pub fn can_tune(workspace: &Workspace, target: &Target) -> Result<(), String> {
    if target.kind == TargetKind::Cpu {
        return Ok(());
    }
    Devices::list(true).find(target)?;
    let missing = |fault: Fault| fault.message.lines().next().unwrap_or_default().to_string();
    Compiler::new(workspace).version().map(|_| ()).map_err(missing)
}

/// Whether a search of this budget has come to its end here before.
///
/// # Errors
/// Faults of the import.
pub fn is_tuned(
    workspace: &Workspace,
    manifest: &Manifest,
    target: &Target,
    budget: (u32, f64),
) -> Result<bool, Fault> {
    let quiet = workspace.quiet()?;
    let tool = quiet.tool()?;
    let model = import_stage(&quiet, manifest, tool)?;
    let site = Site::new(&quiet, manifest, target, &model, tool)?;
    Ok(quiet.cache.latest_why(keys::TUNED, &site.searched_subject(budget)).is_some())
}

/// Keeps the best where builds look for it, and that the budget was spent if it was.
fn remember(site: &Site<'_>, best: &Candidate, stop: &Stop, trials: u32, asked: &Tuning<'_>) -> Result<(), Fault> {
    let text = best.to_string();
    let why = format!("candidate = {text}\ntrials = {trials}\nstop = {stop}\n");
    let key = Digest::of(why.as_bytes());
    let cache = &site.workspace.cache;
    cache.put(keys::TUNED, &key, &why, text.as_bytes())?;
    cache.set_latest(keys::TUNED, &site.tuned_subject(), &key)?;
    if *stop != Stop::Interrupted {
        cache.set_latest(keys::TUNED, &site.searched_subject((asked.trials, asked.minutes)), &key)?;
    }
    Ok(())
}

/// Time that is not the search's.
#[derive(Default)]
struct Spent {
    /// Lowering, placing, proving and compiling, or waiting for a thread that does.
    made: Duration,
    child: Duration,
    /// Of the child: check and measure.
    measured: Duration,
    /// The full check of the best, at the end.
    checked: Duration,
}

/// The arena of a real campaign.
struct Bench<'a> {
    site: Site<'a>,
    report: &'a Report,
    compiler: Compiler<'a>,
    hardware: &'a Hardware,
    campaign: Digest,
    default: Candidate,
    /// Lines to tell before the first candidate is made: a campaign that has nothing to do says nothing.
    intro: Vec<String>,
    worker: Worker<'a>,
    ahead: &'a Ahead,
    started: Instant,
    minutes: f64,
    trial_timeout: Option<Duration>,
    stop: &'a dyn Fn() -> bool,
    incumbent_rows: BTreeMap<u32, Digest>,
    floor_gap: Option<f64>,
    last_failure: Option<String>,
    slowest: Duration,
    spent: Spent,
}

struct Kernel {
    placed: Placed,
    source: Option<Digest>,
    cubin: Option<Box<Cubin>>,
}

/// What the child told of a trial.
struct Evidence {
    /// Of each timed position, or one of the whole trial.
    verdicts: Vec<Verdict>,
    check_ms: Option<f64>,
    measure_ms: Option<f64>,
}

impl Evidence {
    fn failed(verdict: Verdict) -> Evidence {
        Evidence { verdicts: vec![verdict], check_ms: None, measure_ms: None }
    }
}

impl Bench<'_> {
    fn asked(&self, number: Option<u32>, proposer: Proposer, decision: Option<Decision>) -> Asked {
        Asked { campaign: self.campaign, trial: number, seed: self.site.manifest.search.seed, proposer, decision }
    }

    fn append(
        &self,
        candidate: &Candidate,
        made: Option<&Kernel>,
        asked: Asked,
        evidence: &Evidence,
        against: bool,
    ) -> Result<Vec<Trial>, Fault> {
        let tried = Tried {
            site: &self.site,
            candidate,
            placed: made.map(|made| &made.placed),
            source: made.and_then(|made| made.source),
            cubin: made.and_then(|made| made.cubin.as_deref()),
            hardware: made.map(|_| self.hardware),
            asked: Some(asked),
        };
        let rows = evidence.verdicts.iter().map(|verdict| {
            let position = verdict.timing().map(|timing| timing.position);
            let incumbent = match position {
                Some(position) => self.incumbent_rows.get(&position),
                // A trial without times still says what it was up against.
                None => self.incumbent_rows.values().next(),
            };
            Verdicted {
                verdict: verdict.clone(),
                incumbent: incumbent.copied().filter(|_| against),
                predicted_us: position.and_then(|position| predicted_us(&self.site, candidate, position)),
            }
        });
        tried.append_rows(evidence.check_ms, evidence.measure_ms, rows.collect())
    }
}

impl Arena for Bench<'_> {
    type Built = Kernel;
    type Evidence = Evidence;
    type Fault = Fault;

    fn make(&mut self, candidate: &Candidate, ahead: &[Candidate]) -> Result<BuildOutcome<Kernel>, Fault> {
        self.intro.drain(..).for_each(|line| self.report.note(&line));
        let started = Instant::now();
        if let Some(made) = self.ahead.take(candidate, ahead) {
            self.spent.made += started.elapsed();
            return Ok(BuildOutcome::Ready { artefact: made.placed.content, made });
        }
        let placed = match place(&self.site, candidate.clone()) {
            Ok(placed) => placed,
            Err(NotPlaced::Infeasible(reason)) => return Ok(BuildOutcome::Infeasible(reason.to_string())),
            Err(NotPlaced::Fault(fault)) if fault.tier == Tier::Internal => {
                // A schedule of our own that cannot be proven is our bug: it stops the search, and is a row, so that the
                // same command goes on without it.
                let detail = fault.message.clone();
                let asked = self.asked(None, Proposer::Local, None);
                self.append(candidate, None, asked, &Evidence::failed(Verdict::Rejected { detail }), false)?;
                return Err(fault);
            }
            Err(NotPlaced::Fault(fault)) => return Err(fault),
        };
        let made = kernel(&self.site, &self.compiler, placed)?;
        self.spent.made += started.elapsed();
        Ok(BuildOutcome::Ready { artefact: made.placed.content, made })
    }

    fn run(
        &mut self,
        candidate: &Candidate,
        _made: &Kernel,
        incumbent: Option<&Candidate>,
    ) -> Result<RunOutcome<Evidence>, Fault> {
        let job = Job {
            campaign: self.campaign.to_string(),
            candidate: candidate.to_string(),
            incumbent: incumbent.map(ToString::to_string),
        };
        let deadline = match (self.trial_timeout, self.worker.is_warm()) {
            (Some(deadline), _) => deadline,
            (None, true) => DEADLINE_WARM.max(self.slowest * DEADLINE_FACTOR),
            (None, false) => DEADLINE_COLD,
        };
        let started = Instant::now();
        let done = self.worker.run(&job, deadline, self.stop)?;
        let took = started.elapsed();
        self.spent.child += took;
        Ok(match done {
            Done::Interrupted => RunOutcome::Interrupted,
            Done::Late(after) => {
                let detail = format!("no answer within {after:?}; the child process was killed");
                RunOutcome::Failed(Evidence::failed(Verdict::Timeout { detail, check: None }))
            }
            Done::Died(detail) => RunOutcome::Failed(Evidence::failed(Verdict::Crash { detail, check: None })),
            Done::Answer(Answer::Fault { tier, message, remedy }) => {
                return Err(Answer::told_fault(&tier, &message, remedy.as_deref()));
            }
            Done::Answer(Answer::Failed { verdict, detail, figures, check_ms }) => {
                let check = figures.map(check_figures);
                let verdict = match verdict.as_str() {
                    "timeout" => Verdict::Timeout { detail, check },
                    "crash" => Verdict::Crash { detail, check },
                    _ => Verdict::Fail { detail, check },
                };
                RunOutcome::Failed(Evidence { check_ms, ..Evidence::failed(verdict) })
            }
            Done::Answer(Answer::Timed { figures, timed, rounds, check_ms, measure_ms }) => {
                self.slowest = self.slowest.max(took);
                self.spent.measured += Duration::from_secs_f64((check_ms + measure_ms).max(0.0) / 1e3);
                let check = check_figures(figures);
                let verdicts = timed.iter().map(|timed| Verdict::Ok { check, timing: timing(timed, None) }).collect();
                let (check_ms, measure_ms) = (Some(check_ms), Some(measure_ms));
                RunOutcome::Timed {
                    rounds: Answer::rounds(&rounds),
                    evidence: Evidence { verdicts, check_ms, measure_ms },
                }
            }
        })
    }

    fn record(&mut self, settled: &TrialRecord<'_, Kernel, Evidence>) -> Result<(), Fault> {
        let TrialRecord { number, candidate, proposer, result } = settled;
        let what = changed(candidate, &self.default);
        let line = |of: String| match number {
            Some(number) => format!("trial {number} {proposer}: {what}: {of}"),
            None => format!("{proposer}: {what}: {of}"),
        };
        match result {
            TrialResult::Infeasible(reason) => {
                let asked = self.asked(None, *proposer, None);
                let evidence = Evidence::failed(Verdict::Infeasible { detail: reason.to_string() });
                self.append(candidate, None, asked, &evidence, false)?;
                self.report.note(&line(format!("infeasible: {reason}")));
            }
            TrialResult::Failed { made, evidence } => {
                let asked = self.asked(*number, *proposer, None);
                self.append(candidate, Some(made), asked, evidence, true)?;
                let verdict = evidence.verdicts.first();
                let said =
                    verdict.map(|verdict| format!("{}: {}", verdict.name(), verdict.detail())).unwrap_or_default();
                self.report.note(&line(said.clone()));
                self.last_failure = Some(said);
            }
            TrialResult::First { made, evidence } => {
                let asked = self.asked(*number, *proposer, Some(Decision::First));
                let rows = self.append(candidate, Some(made), asked, evidence, false)?;
                self.keep(&rows);
                let times: Vec<String> = rows
                    .iter()
                    .filter_map(|row| row.verdict().timing())
                    .map(|timing| format!("{:.1} µs at position {}", timing.latency_us_p50, timing.position))
                    .collect();
                self.report.note(&line(times.join(", ")));
            }
            TrialResult::Judged { made, evidence, judged } => {
                let asked = self.asked(*number, *proposer, Some(judged.decision));
                let ratios: BTreeMap<u32, RatioInterval> = judged
                    .positions
                    .iter()
                    .filter_map(|(position, ratio)| {
                        let Ratio { ratio, low, high, .. } = (*ratio)?;
                        Some((*position, RatioInterval { p50: ratio, low: low.min(ratio), high: high.max(ratio) }))
                    })
                    .collect();
                let with_ratio = |verdict: &Verdict| match verdict {
                    Verdict::Ok { check, timing } => {
                        let ratio = ratios.get(&timing.position).copied();
                        Verdict::Ok { check: *check, timing: crate::flywheel::Timing { ratio, ..timing.clone() } }
                    }
                    other => other.clone(),
                };
                let verdicts = evidence.verdicts.iter().map(with_ratio).collect();
                let evidence = Evidence { verdicts, check_ms: evidence.check_ms, measure_ms: evidence.measure_ms };
                let rows = self.append(candidate, Some(made), asked, &evidence, true)?;
                if judged.decision.is_kept() {
                    self.keep(&rows);
                }
                let said = match &judged.overall {
                    Some(Ratio { ratio, low, high, .. }) => {
                        format!("{ratio:.3} of the incumbent's time, {low:.3} to {high:.3}: {}", judged.decision)
                    }
                    None => "no sound times".to_string(),
                };
                self.report.note(&line(said));
            }
        }
        Ok(())
    }

    fn stop(&mut self) -> Option<Stop> {
        if (self.stop)() {
            return Some(Stop::Interrupted);
        }
        (self.started.elapsed().as_secs_f64() >= self.minutes * 60.0).then_some(Stop::Minutes(self.minutes))
    }

    fn floor_gap(&mut self) -> Option<f64> {
        self.floor_gap
    }
}

impl Bench<'_> {
    fn keep(&mut self, rows: &[Trial]) {
        self.incumbent_rows =
            rows.iter().filter_map(|row| Some((row.verdict().timing()?.position, row.trial_id()))).collect();
        self.floor_gap = floor_gap(rows.iter().filter_map(|row| row.verdict().timing()));
    }
}

/// Proves, prints and compiles what was placed; on the CPU there is nothing to print.
fn kernel(site: &Site<'_>, compiler: &Compiler<'_>, placed: Placed) -> Result<Kernel, Fault> {
    placed.validated(site.target)?;
    if site.target.kind == TargetKind::Cpu {
        return Ok(Kernel { placed, source: None, cubin: None });
    }
    let generated = generate_source(site, &placed)?;
    let cubin = compiled(compiler, site, &generated)?;
    Ok(Kernel { placed, source: Some(generated.content), cubin })
}

fn compiled(compiler: &Compiler<'_>, site: &Site<'_>, generated: &Generated) -> Result<Option<Box<Cubin>>, Fault> {
    match compile(compiler, &[(*site, generated)])?.pop() {
        Some(Compile::Done(cubin)) => Ok(Some(cubin)),
        Some(Compile::Waits(missing)) => Err(missing),
        None => Err(Fault::internal("a compile gave no result")),
    }
}

/// Candidates that are made before anybody asks for them.
#[derive(Default)]
struct Ahead {
    queue: Mutex<Queue>,
    more: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Candidate>,
    /// By knobs: nothing is made twice.
    states: BTreeMap<String, State>,
    ended: bool,
}

enum State {
    Making,
    Made(Box<Kernel>),
    /// Handed out, dropped, or not to be made: whoever asks makes it, mostly from the cache, and is told the faults.
    Gone,
}

/// A thread that makes a candidate; however it ends, nobody waits for it behind that.
struct Making<'a> {
    ahead: &'a Ahead,
    knobs: String,
    made: Option<Kernel>,
}

impl Drop for Making<'_> {
    fn drop(&mut self) {
        let state = self.made.take().map_or(State::Gone, |made| State::Made(Box::new(made)));
        self.ahead.lock().states.insert(self.knobs.clone(), state);
        self.ahead.more.notify_all();
    }
}

impl Ahead {
    /// The candidate, if a thread made it or is making it. `candidates` is what is asked next, probably; what was waiting
    /// is stale now, and so is what was made and is not among them.
    fn take(&self, candidate: &Candidate, candidates: &[Candidate]) -> Option<Kernel> {
        let knobs = candidate.to_string();
        let mut queue = self.lock();
        let next: Vec<String> = candidates.iter().map(ToString::to_string).collect();
        for (at, state) in &mut queue.states {
            if matches!(state, State::Made(_)) && *at != knobs && !next.contains(at) {
                *state = State::Gone;
            }
        }
        let fresh = candidates.iter().zip(&next).filter(|(_, at)| **at != knobs && !queue.states.contains_key(*at));
        queue.waiting = fresh.map(|(candidate, _)| candidate.clone()).collect();
        self.more.notify_all();
        while let Some(State::Making) = queue.states.get(&knobs) {
            queue = self.more.wait(queue).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        match queue.states.insert(knobs, State::Gone) {
            Some(State::Made(kernel)) => Some(*kernel),
            _ => None,
        }
    }

    fn end(&self) {
        self.lock().ended = true;
        self.more.notify_all();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Makes what is waiting until the campaign ends.
    fn work(&self, site: &Site<'_>) {
        let compiler = Compiler::new(site.workspace);
        loop {
            let mut queue = self.lock();
            let candidate = loop {
                if queue.ended {
                    return;
                }
                match queue.waiting.pop_front() {
                    Some(candidate) => break candidate,
                    None => queue = self.more.wait(queue).unwrap_or_else(|poisoned| poisoned.into_inner()),
                }
            };
            let knobs = candidate.to_string();
            queue.states.insert(knobs.clone(), State::Making);
            drop(queue);
            let mut making = Making { ahead: self, knobs, made: None };
            making.made = place(site, candidate).ok().and_then(|placed| kernel(site, &compiler, placed).ok());
        }
    }
}

/// A program that proposes candidates: one JSON object a line in each direction.
struct External<'a> {
    worker: Worker<'a>,
    line: String,
    stop: &'a dyn Fn() -> bool,
    refused: Option<String>,
}

impl<'a> External<'a> {
    fn new(line: &str, stop: &'a dyn Fn() -> bool) -> External<'a> {
        External { worker: Worker::shell(line), line: line.to_string(), stop, refused: None }
    }

    fn propose(&mut self, search: &Search<'_>, report: &Report) -> Result<Option<Candidate>, Fault> {
        let Some((incumbent, log)) = search.incumbent() else { return Ok(None) };
        let knobs: Vec<Value> = search
            .space()
            .knobs()
            .map(|(knob, values)| json!({ "name": knob.name, "meaning": knob.meaning, "values": values }))
            .collect();
        let own = match search.ask() {
            Ask::Try { candidate, .. } => Some(candidate.to_string()),
            Ask::Stop(_) => None,
        };
        let question = json!({
            "do": "propose",
            "trial": search.trials() + 1,
            "knobs": knobs,
            "default": search.default_candidate().to_string(),
            "incumbent": incumbent.to_string(),
            "incumbent_ratio": log.exp(),
            "tried": search.tried().map(|(log, candidate)| json!({ "candidate": candidate.to_string(), "ratio": log.exp() })).collect::<Vec<_>>(),
            "search_would_try": own,
            "refused": self.refused.take(),
        });
        let failed = |what: String| {
            Fault::environment(format!("proposer `{}` {what}", self.line))
                .with_remedy("it reads one JSON object a line, and answers `{\"candidate\": \"knob=value;...\"}` or `{\"candidate\": null}`")
        };
        let line = match self.worker.exchange(&question.to_string(), DEADLINE_PROPOSER, self.stop)? {
            Reply::Line(line) => line,
            Reply::Interrupted => return Ok(None),
            Reply::Died(how) => return Err(failed(format!("gave no answer: {how}"))),
            Reply::Late(after) => return Err(failed(format!("gave no answer within {} s", after.as_secs()))),
        };
        let answer: Value = serde_json::from_str(&line)
            .map_err(|error| failed(format!("answered `{line}`, expected JSON: {error}")))?;
        let Some(text) = answer["candidate"].as_str() else { return Ok(None) };
        let proposed = Candidate::parse(text, incumbent)
            .and_then(|c| search.space().admits(&c).map(|()| c).map_err(|reason| reason.to_string()));
        match proposed {
            Ok(candidate) => Ok(Some(candidate)),
            Err(reason) => {
                report.note(&format!("proposer: `{text}`: {reason}"));
                self.refused = Some(reason);
                Ok(None)
            }
        }
    }
}
