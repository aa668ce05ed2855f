//! Owns `tune` and the child process that serves its trials.

use std::io::BufRead;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::Outcome;
use super::arguments::{Trials, Tune, TuneOp};
use super::session::{Session, Talk, pick_target, program_path};
use super::terminal::{end_at_once, interrupt};
use crate::error::{Fault, Tier};
use crate::flywheel::RatioInterval;
use crate::lower::LayerOp;
use crate::manifest::{Manifest, SearchKernel};
use crate::pipeline::{self, Away, Engine, Tuned, Tuning, Workspace};
use crate::target::Target;
use crate::text::counted;

/// Trials if the manifest asks for none: about as many as it takes to try the knobs one at a time.
pub const TRIALS_DEFAULT: u32 = 40;

pub fn tune(session: &Session, asked: &Tune) -> Result<Outcome, Fault> {
    campaigns(session, asked, None)
}

/// As [`tune`], for the knobs of one op, which runs alone.
pub fn tune_op(session: &Session, asked: &TuneOp) -> Result<Outcome, Fault> {
    let TuneOp { manifest, op, target, max_trials, minutes, seed, json } = asked;
    let tune = Tune {
        manifest: manifest.clone(),
        target: target.clone(),
        max_trials: Some(*max_trials),
        minutes: *minutes,
        seed: *seed,
        trial_timeout: None,
        proposer: None,
        on: None,
        workers: 1,
        listen: None,
        json: *json,
    };
    campaigns(session, &tune, Some(*op))
}

fn campaigns(session: &Session, asked: &Tune, op: Option<LayerOp>) -> Result<Outcome, Fault> {
    let mut manifest = session.manifest(&asked.manifest, asked.target.as_deref())?;
    manifest.search.seed = asked.seed.unwrap_or(manifest.search.seed);
    if op.is_some() {
        manifest.search.kernel = SearchKernel::Decode;
    }
    let targets = match &asked.target {
        Some(name) => vec![pick_target(&manifest, Some(name))?],
        None => manifest.targets.clone(),
    };
    let workspace = session.workspace(if asked.json { Talk::Nothing } else { Talk::Work })?;
    let trials = match (asked.max_trials, manifest.search.trials) {
        (Some(trials), _) => trials,
        (None, 0) => TRIALS_DEFAULT,
        (None, trials) => trials,
    };
    let budget = Budget {
        trials,
        minutes: asked.minutes.unwrap_or(manifest.search.minutes),
        trial_timeout: asked.trial_timeout,
    };
    let mut all = vec![];
    let mut interrupted = false;
    for target in &targets {
        if targets.len() > 1
            && asked.on.is_none()
            && let Err(reason) = pipeline::can_tune(&workspace, &manifest, target)
        {
            workspace.report.note(&format!("{}: the search waits for a device of its kind ({reason})", target.name));
            continue;
        }
        let elsewhere = asked.on.as_ref().map(|engine| (engine, asked.workers, asked.listen));
        let what = Search { op, proposer: asked.proposer.as_deref(), elsewhere };
        let Some(tuned) = search(session, &workspace, &asked.manifest, &manifest, target, budget, what)? else {
            interrupted = true;
            break;
        };
        if !asked.json {
            session.terminal.print(&tuned_text(&tuned))?;
        }
        interrupted |= tuned.interrupted;
        all.push(tuned_json(&tuned));
        if interrupted {
            break;
        }
    }
    if asked.json {
        session.terminal.print_json(&Value::Array(all))?;
    }
    Ok(if interrupted { Outcome::Interrupted } else { Outcome::Done })
}

/// What is searched, and the external program that proposes candidates, if there is one.
#[derive(Debug, Clone, Copy, Default)]
pub struct Search<'a> {
    /// The op that runs alone; `None`: whole steps.
    pub op: Option<LayerOp>,
    pub proposer: Option<&'a str>,
    /// What starts workers on other machines, how many, and where they join.
    pub elsewhere: Option<(&'a Engine, u32, Option<SocketAddr>)>,
}

#[derive(Debug, Clone, Copy)]
pub struct Budget {
    pub trials: u32,
    pub minutes: f64,
    /// Time limit of a trial.
    pub trial_timeout: Option<Duration>,
}

/// Runs a campaign. An interrupt abandons the current trial and ends the campaign; `None`: before it measured the default.
pub fn search(
    session: &Session,
    workspace: &Workspace,
    path: &Path,
    manifest: &Manifest,
    target: &Target,
    budget: Budget,
    what: Search<'_>,
) -> Result<Option<Tuned>, Fault> {
    let Search { op, proposer, elsewhere } = what;
    let _deferred = interrupt::defer();
    let program = program_path()?;
    let child = |target: &Target| child(session, &program, path, target, manifest.search.seed, op);
    let Budget { trials, minutes, trial_timeout } = budget;
    let tuning = Tuning { op, trials, minutes, proposer, trial_timeout, child: &child, stop: &interrupt::asked };
    let tuned = match elsewhere {
        None => pipeline::tune(workspace, manifest, target, &tuning),
        Some((engine, workers, listen)) => {
            // A node may have another current folder.
            let path = if path.exists() { absolute(path)? } else { path.to_path_buf() };
            let command = |address: SocketAddr| {
                let mut command = self::child(session, &program, &path, target, manifest.search.seed, op);
                command.arg("--join").arg(address.to_string());
                let words = [command.get_program()].into_iter().chain(command.get_args());
                words.map(|word| word.to_string_lossy().into_owned()).collect()
            };
            let away = Away { engine: engine.clone(), workers, listen, command: &command };
            pipeline::tune_away(workspace, manifest, target, &tuning, &away)
        }
    };
    match tuned {
        Ok(tuned) => Ok(Some(tuned)),
        Err(fault) if fault.tier == Tier::Environment && interrupt::asked() => {
            session.terminal.say(&format!("{}: {}", target.name, fault.message));
            Ok(None)
        }
        Err(fault) => Err(fault),
    }
}

/// The command of a process that serves trials.
fn child(session: &Session, program: &Path, path: &Path, target: &Target, seed: u64, op: Option<LayerOp>) -> Command {
    let mut command = Command::new(program);
    command.arg("trials").arg(path).args(["--target", &target.name, "--seed", &seed.to_string()]);
    if let Some(op) = op {
        command.args(["--op", op.name()]);
    }
    command.arg("--cache").arg(&session.places.root).arg("--trials").arg(&session.trials);
    command
}

fn absolute(path: &Path) -> Result<PathBuf, Fault> {
    std::path::absolute(path)
        .map_err(|error| Fault::environment(format!("the path of `{}` is not known: {error}", path.display())))
}

/// Serves trials to the parent process, or to a search on another machine. If the parent ends, the child ends at once, whatever it is doing.
pub fn trials(session: &Session, asked: &Trials) -> Result<Outcome, Fault> {
    let mut manifest = session.manifest(&asked.manifest, [asked.target.as_str()])?;
    manifest.search.seed = asked.seed.unwrap_or(manifest.search.seed);
    let target = pick_target(&manifest, Some(&asked.target))?;
    let workspace = session.workspace(Talk::Nothing)?;
    if let Some(address) = &asked.join {
        let program = program_path()?;
        let path = if asked.manifest.exists() { absolute(&asked.manifest)? } else { asked.manifest.clone() };
        let child = || child(session, &program, &path, &target, manifest.search.seed, asked.op);
        // The search has ended, so there is no reader of answers.
        let gone = || end_at_once(Outcome::Done);
        pipeline::join(&workspace, &target, address, &child, gone)?;
        return Ok(Outcome::Done);
    }
    let (sender, jobs) = channel();
    thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            if sender.send(line).is_err() {
                return;
            }
        }
        // The parent has ended, so there is no reader of answers.
        end_at_once(Outcome::Done);
    });
    pipeline::serve(&workspace, &manifest, &target, asked.op, jobs.into_iter(), std::io::stdout())?;
    Ok(Outcome::Done)
}

/// Note at a best candidate that was not timed in turns with the default yet.
pub const NO_DUEL: &str = "not compared with the default yet: run the same command again";

/// `2.087 times as fast as the default (2.051 to 2.102)`.
pub fn speed_text(speed: RatioInterval) -> String {
    let RatioInterval { p50, low, high } = speed;
    format!("{p50:.3} times as fast as the default ({low:.3} to {high:.3})")
}

/// A ratio as the JSON of every command has it.
pub fn ratio_json(ratio: Option<RatioInterval>) -> Value {
    ratio.map_or(Value::Null, |RatioInterval { p50, low, high }| json!({ "p50": p50, "low": low, "high": high }))
}

pub fn tuned_text(tuned: &Tuned) -> String {
    let Tuned { target, changed, is_default, stop, trials, ran, against_default, .. } = tuned;
    // The default and the closing duel are measured, and are no trials.
    let trials = counted(u64::from(*trials), "trial");
    let mut text = format!("{target}: {stop}; {trials}, {} now\n", counted(u64::from(*ran), "measurement"));
    if *is_default {
        text.push_str("  the default candidate stays\n");
    } else {
        text.push_str(&format!("  best: {changed}\n"));
    }
    match against_default {
        _ if *is_default => {}
        Some(ratio) => text.push_str(&format!("  {}\n", speed_text(ratio.inverse()))),
        None => text.push_str(&format!("  {NO_DUEL}\n")),
    }
    if let (Some(search), Some(load)) = (tuned.search_ms_per_trial, tuned.load_ms_per_trial) {
        text.push_str(&format!("  search overhead: {search:.0} ms a trial, {load:.0} ms to load earlier trials\n"));
    }
    text
}

pub fn tuned_json(tuned: &Tuned) -> Value {
    let Tuned {
        target,
        candidate,
        changed,
        is_default,
        stop,
        interrupted,
        trials,
        ran,
        against_default,
        search_ms_per_trial,
        load_ms_per_trial,
    } = tuned;
    json!({
        "target": target,
        "candidate": candidate,
        "changed": changed,
        "is_default": is_default,
        "stop": stop,
        "interrupted": interrupted,
        "trials": trials,
        "ran": ran,
        "ratio_against_default": ratio_json(*against_default),
        "search_ms_per_trial": search_ms_per_trial,
        "load_ms_per_trial": load_ms_per_trial,
    })
}
