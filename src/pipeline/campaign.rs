//! Owns a campaign: a search over one target of a manifest, with devices, clocks, a child process and a corpus.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::cache::Cache;
use crate::cache::lock::LockFile;
use crate::candidate::{Candidate, Values};
use crate::digest::Digest;
use crate::error::{Fault, Tier};
use crate::flywheel::{Corpus, RatioInterval};
use crate::lower::LayerOp;
use crate::manifest::{Manifest, SearchKernel};
use crate::report::Report;
use crate::search::space::changed;
use crate::search::{
    Driven, History, Limits, PastTrial, Prior, Proposes, Search, Setting, Space, Start, Stop, drive, drive_fleet,
    histories,
};
use crate::target::{Target, TargetKind};

use super::ahead::Ahead;
use super::arena::{CampaignArena, Spent};
use super::chain::{Chain, Host, NotMade};
use super::evaluate::Executor;
use super::fleet::{FleetArena, Workers};
use super::invariant;
use super::keys::Hardware;
use super::made::{Maker, refuse_wave};
use super::proposer::Proposer;
use super::rows::shape;
use super::search_start::{Known, guess, space_of};
use super::stages::BuildContext;
use super::worker::Worker;
use super::{Workspace, import_stage, keys};

/// Candidates that are compiled before they are asked for, at most; more are stale before their turn comes.
const AHEAD_MAX: usize = 12;
/// Pause between two looks whether another search of the same campaign has ended.
const LOCKED: Duration = Duration::from_millis(200);

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

/// Result of a campaign.
#[derive(Debug, Clone, PartialEq)]
pub struct Tuned {
    pub target: String,
    /// Knobs of the best.
    pub candidate: String,
    /// Its knobs that differ from the default.
    pub changed: String,
    pub is_default: bool,
    pub stop: String,
    pub interrupted: bool,
    /// Measured candidates of this campaign, of this run and earlier ones, the default aside.
    pub trials: u32,
    /// Measured by this run, the default and the last comparison included.
    pub ran: u32,
    /// Latency of the best divided by the default's: exactly 1 for the default, `None` if the two were not timed in turns. As
    /// `status` and `report` read it from the rows.
    pub against_default: Option<RatioInterval>,
    /// Time of each trial outside of building, checking and timing candidates; `None` if none ran here.
    pub search_ms_per_trial: Option<f64>,
    /// Time of loading and packing in the child, for each trial; `None` if none ran.
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
    let hardware = Host::new(workspace).hardware(target)?;
    run_campaign(workspace, manifest, target, asked, hardware, None)
}

/// A campaign on this hardware: here, or by workers elsewhere.
pub(super) fn run_campaign(
    workspace: &Workspace,
    manifest: &Manifest,
    target: &Target,
    asked: &Tuning<'_>,
    hardware: Hardware,
    workers: Option<Workers<'_>>,
) -> Result<Tuned, Fault> {
    let model = import_stage(workspace, manifest)?;
    let model = match asked.op {
        None => model,
        Some(op) => model.alone(op, target),
    };
    let quiet = workspace.quiet()?;
    let told = BuildContext::new(workspace, manifest, target, &model)?;
    let host = Host::new(&quiet);
    let context = BuildContext::new(&quiet, manifest, target, &model)?;
    refuse_kernel(manifest, context.searched(), target)?;
    let maker = Maker::new(context, &host, workers.is_none());
    refuse_wave(&maker, &context.search_default())?;
    let campaign = context.campaign(&hardware)?;
    let _alone = alone(workspace, campaign, asked.stop)?;
    let space = space_of(&context);
    let known = Known::read(&context, campaign)?;
    let default = space.default_candidate().clone();
    // Looking ahead meets the same points repeatedly.
    let guesses: Mutex<BTreeMap<Values, f64>> = Mutex::default();
    let guess = |candidate: &Candidate| {
        let mut known = guesses.lock().unwrap_or_else(PoisonError::into_inner);
        *known.entry(candidate.values()).or_insert_with(|| guess(&context, &default, candidate))
    };
    let setting =
        Setting::new(&shape(&context, &model.imported.graph, context.searched()), &target.name, target.kind.name());
    let prior = Prior::new(&known.groups, setting, &space);
    let intro = intro(&context, &space, &known, &prior);
    let limits = Limits::of_budget(asked.trials, manifest.search.seed);
    let mut search = Search::new(&space, limits, &known.groups, prior, known.seeds.clone(), &guess);

    let ahead = Ahead::default();
    let count = ahead_count(target.kind);
    let done = known.past.iter().map(|past| past.number).max().unwrap_or(0);
    let mut arena = CampaignArena {
        context,
        host: &host,
        maker: &maker,
        report: &workspace.report,
        progress: workspace.report.bar("trials", u64::from(asked.trials)).resume(done.into()),
        hardware: &hardware,
        campaign,
        default: default.clone(),
        intro,
        worker: Worker::new(|| (asked.child)(target)),
        ahead: &ahead,
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
    if let Some(workers) = workers {
        let mut fleet = FleetArena::new(arena, workers);
        let driven = drive_fleet(&mut fleet, &mut search, start(known.past, manifest, None))?;
        // The workers end before the rest, which needs none.
        let FleetArena { inner, .. } = fleet;
        return finish(&told, inner, &search, driven, asked);
    }
    let driven = thread::scope(|scope| {
        for _ in 0..count {
            scope.spawn(|| ahead.work(&maker));
        }
        let driven = search_for(&mut arena, &mut search, known.past, count, asked);
        ahead.end();
        driven
    })?;
    finish(&told, arena, &search, driven, asked)
}

/// Threads that compile candidates before they are asked for.
fn ahead_count(kind: TargetKind) -> usize {
    match kind {
        TargetKind::Cpu => 0,
        TargetKind::Cuda => thread::available_parallelism().map_or(1, |n| n.get()).min(AHEAD_MAX),
    }
}

/// Waits until no other process searches the same campaign in the same file of trials: both would give one number to two trials. Where the
/// file of trials cannot be locked, its first row says so.
fn alone(workspace: &Workspace, campaign: Digest, stop: &dyn Fn() -> bool) -> Result<Option<LockFile>, Fault> {
    let mut name = workspace.trials.clone().into_os_string();
    name.push(format!(".{}.lock", campaign.short()));
    let path = PathBuf::from(name);
    if let Some(folder) = path.parent() {
        let _ = fs::create_dir_all(folder);
    }
    let mut told = false;
    loop {
        match LockFile::take(&path) {
            Ok(Some(lock)) => return Ok(Some(lock)),
            Err(_) => return Ok(None),
            Ok(None) => {}
        }
        if stop() {
            return Err(Fault::environment("interrupted while another process searched the same campaign")
                .with_remedy("start the same command again"));
        }
        if !std::mem::replace(&mut told, true) {
            let trials = workspace.trials.display();
            workspace
                .report
                .note(&format!("another process searches this campaign with `{trials}`: waiting for its end"));
        }
        thread::sleep(LOCKED);
    }
}

fn start<'p>(past: Vec<PastTrial>, manifest: &Manifest, external: Option<Proposes<'p, Fault>>) -> Start<'p, Fault> {
    Start { past, margin: manifest.search.margin, external }
}

/// Drives the search to its end, with the program that proposes where there is one.
fn search_for(
    arena: &mut CampaignArena<'_>,
    search: &mut Search<'_>,
    past: Vec<PastTrial>,
    count: usize,
    asked: &Tuning<'_>,
) -> Result<Driven, Fault> {
    let report = arena.report;
    let mut proposer = asked.proposer.map(|line| Proposer::new(line, asked.stop));
    let mut propose = |search: &Search<'_>| match &mut proposer {
        Some(proposer) => proposer.propose(search, report),
        None => Ok(None),
    };
    let external = asked.proposer.is_some().then_some(&mut propose as Proposes<'_, Fault>);
    let start = start(past, arena.context.manifest, external);
    let driven = drive(arena, search, start, count)?;
    for (candidate, other) in &driven.duplicates {
        let (candidate, other) = (changed(candidate, &arena.default), changed(other, &arena.default));
        report.note(&format!("`{candidate}` makes the schedule of `{other}`: not measured again"));
    }
    Ok(driven)
}

/// Checks what was found in full, and remembers it. `told` is the context whose stages the user sees.
fn finish(
    told: &BuildContext<'_>,
    arena: CampaignArena<'_>,
    search: &Search<'_>,
    driven: Driven,
    asked: &Tuning<'_>,
) -> Result<Tuned, Fault> {
    let CampaignArena { default, mut spent, started, last_failure, campaign, maker, .. } = arena;
    let is_here = maker.compiles;
    let target = told.target;
    let Some(best) = driven.best else {
        if driven.stop == Stop::Interrupted {
            return Err(Fault::environment("interrupted before the default candidate was measured")
                .with_remedy("start the same command again"));
        }
        let reason = last_failure.unwrap_or_else(|| "nothing was measured".to_string());
        return Err(Fault::internal(format!("the default candidate of `{}` cannot be tuned: {reason}", target.name))
            .with_remedy("its verdict is a row of the trials; `monobloc build` checks it in full"));
    };
    let checking = Instant::now();
    // There is no further comparison for an op alone: its trials made all of them.
    // Nor for a wave kernel: a trial compares it as a server does, and the set that a server makes of it is compared again.
    let whole = told.op.is_none() && told.searched() == SearchKernel::Decode;
    let checked = if whole { fully_checked(told, &best, &default) } else { Ok(()) };
    spent.checked = checking.elapsed();
    let best = match checked {
        Ok(()) => best,
        // The machine of a search elsewhere may have no device. Every build checks what it takes.
        Err(fault) if fault.tier == Tier::Environment && !is_here => best,
        Err(fault) if fault.tier == Tier::Internal => {
            let report = &told.workspace.report;
            report.note(&format!("the best candidate fails the full check, the default is built: {}", fault.message));
            default.clone()
        }
        Err(fault) => return Err(fault),
    };
    remember(told, &best, &driven.stop, search.trials(), asked)?;
    let against_default = match best == default {
        true => Some(RatioInterval::ONE),
        false => own_history(told, campaign)?.and_then(|history| history.headline()?.ratio),
    };
    let elapsed = started.elapsed();
    let per_trial =
        |time: Duration| (driven.ran > 0 && is_here).then(|| time.as_secs_f64() * 1e3 / f64::from(driven.ran));
    Ok(Tuned {
        target: target.name.clone(),
        is_default: best == default,
        changed: changed(&best, &default),
        candidate: best.to_string(),
        stop: driven.stop.to_string(),
        interrupted: driven.stop == Stop::Interrupted,
        trials: search.trials(),
        ran: driven.ran,
        against_default,
        search_ms_per_trial: per_trial(elapsed.saturating_sub(spent.made + spent.child + spent.checked)),
        load_ms_per_trial: per_trial(spent.child.saturating_sub(spent.measured)),
    })
}

/// A campaign as its rows tell it now.
fn own_history(context: &BuildContext<'_>, campaign: Digest) -> Result<Option<History>, Fault> {
    let mut rows = Corpus::known(&context.workspace.trials)?.trials;
    rows.retain(|trial| trial.facts().point.campaign == Some(campaign));
    Ok(histories(&rows).pop())
}

fn intro(context: &BuildContext<'_>, space: &Space, known: &Known, prior: &Prior) -> Vec<String> {
    let knobs: Vec<&str> = space.knobs().map(|(knob, _)| knob.name).collect();
    let of = match context.searched() {
        SearchKernel::Decode => String::new(),
        kernel => format!("{kernel}: "),
    };
    let mut lines = vec![format!("{}: {of}{} points of {}", context.target.name, space.size(), knobs.join(", "))];
    if known.stale > 0 {
        lines.push(format!("{} rows are of another space of knobs and teach nothing here", known.stale));
    }
    if !prior.is_cold() {
        let count = known.groups.len();
        lines.push(format!("{count} earlier campaign{} to learn from", if count == 1 { "" } else { "s" }));
    }
    if let Some(last) = known.past.iter().map(|past| past.number).max() {
        lines.push(format!("resumes after trial {last}"));
    }
    lines.extend(known.broken.iter().take(3).map(|broken| format!("skipped {broken}")));
    lines
}

/// Refuses a search of a wave kernel on a target that has none of its own.
fn refuse_kernel(manifest: &Manifest, kernel: SearchKernel, target: &Target) -> Result<(), Fault> {
    if kernel == SearchKernel::Decode {
        return Ok(());
    }
    let remedy = "set `kernel = \"decode\"` in `[search]`, or name another target";
    if target.kind == TargetKind::Cpu {
        let message = format!("target `{}` has no kernel `{kernel}`: the interpreter runs its schedules", target.name);
        return Err(Fault::input(message).with_remedy(remedy));
    }
    invariant::refuse(manifest, target, &format!("search of `{kernel}`"), "leave `batch_invariant` out")
}

/// Checks what a search found as a build would, through the cache. Trials are compared with less: no hostile orders.
fn fully_checked(context: &BuildContext<'_>, best: &Candidate, default: &Candidate) -> Result<(), Fault> {
    if best == default {
        return Ok(());
    }
    let host = Host::new(context.workspace);
    let chain = Chain::new(*context, &host, best.clone());
    Executor::new(&chain)?.checked(&mut None).map(|_| ())
}

/// Whether a search of this target can run here, or what is missing.
///
/// # Errors
/// One line that says what is missing.
pub fn can_tune(workspace: &Workspace, manifest: &Manifest, target: &Target) -> Result<(), String> {
    refuse_kernel(manifest, manifest.search.kernel, target).map_err(first_line)?;
    if target.kind == TargetKind::Cpu {
        return Ok(());
    }
    let host = Host::new(workspace);
    match host.device(target) {
        Err(NotMade::NoDevice { reason, .. }) => return Err(reason),
        other => other.map_err(first_line)?,
    };
    host.compiler.version().map(|_| ()).map_err(first_line)
}

fn first_line(fault: impl Into<Fault>) -> String {
    fault.into().message.lines().next().unwrap_or_default().to_string()
}

/// Whether a search of this budget has already ended here.
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
    let model = import_stage(&quiet, manifest)?;
    let context = BuildContext::new(&quiet, manifest, target, &model)?;
    Ok(quiet.cache.latest_why(keys::TUNED, &context.searched_subject(budget)).is_some())
}

/// Keeps the best where builds look for it, and that the budget was spent if it was.
fn remember(
    context: &BuildContext<'_>,
    best: &Candidate,
    stop: &Stop,
    trials: u32,
    asked: &Tuning<'_>,
) -> Result<(), Fault> {
    let kernel = context.searched();
    let text = if kernel == SearchKernel::Decode { best.to_string() } else { best.waves.to_string() };
    let why = format!("candidate = {text}\ntrials = {trials}\nstop = {stop}\n");
    let key = Digest::of(why.as_bytes());
    let cache = &context.workspace.cache;
    cache.put(keys::TUNED, &key, &why, text.as_bytes())?;
    cache.set_latest(keys::TUNED, &context.tuned_subject(kernel), &key)?;
    if *stop != Stop::Interrupted {
        cache.set_latest(keys::TUNED, &context.searched_subject((asked.trials, asked.minutes)), &key)?;
    }
    Ok(())
}
