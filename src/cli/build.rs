//! Owns `build`, `clean`, `show` and `explain`.

use std::path::Path;

use serde_json::{Value, json};

use super::Outcome;
use super::arguments::{Build, Clean, Explain, Require, Show};
use super::session::{Session, Talk, pick_target};
use super::terminal::fault_json;
use super::tune::{Budget, Search, search, tuned_json, tuned_text};
use crate::error::Fault;
use crate::manifest::Manifest;
use crate::measure::Measurement;
use crate::pipeline::{self, BuildReport, BuiltTarget, Explained};
use crate::text::counted;

pub fn build(session: &Session, asked: &Build) -> Result<Outcome, Fault> {
    let mut built = vec![];
    let mut first: Option<Fault> = None;
    for path in &asked.manifest {
        let fault = match one(session, asked, path) {
            Ok(Built::Done(done, fault)) => {
                built.push(done);
                fault
            }
            Ok(Built::Interrupted) => return Ok(Outcome::Interrupted),
            Err(fault) if asked.keep_going => {
                built.push(json!({ "manifest": path, "error": fault_json(&fault) }));
                Some(fault)
            }
            Err(fault) => return Err(fault),
        };
        let Some(fault) = fault else { continue };
        if asked.keep_going {
            session.terminal.print_fault(&fault);
        }
        first.get_or_insert(fault);
        if !asked.keep_going {
            break;
        }
    }
    if asked.json {
        match built.as_slice() {
            [one] if asked.manifest.len() == 1 => session.terminal.print_json(one)?,
            all => session.terminal.print_json(&json!(all))?,
        }
    }
    match first {
        None => Ok(Outcome::Done),
        Some(fault) if asked.keep_going => {
            Err(Fault { message: format!("not every manifest was built: {}", fault.message), ..fault })
        }
        Some(fault) => Err(fault),
    }
}

enum Built {
    /// What was done, as JSON, and the fault of a target.
    Done(Value, Option<Fault>),
    Interrupted,
}

/// Builds one manifest. A fault of one target does not stop the others; faults are reported at the end.
fn one(session: &Session, asked: &Build, path: &Path) -> Result<Built, Fault> {
    let manifest = restricted(session.manifest(path, asked.target.as_deref())?, asked.target.as_deref())?;
    if asked.dry_run {
        let workspace = session.workspace(Talk::Nothing)?;
        let explained = pipeline::explain(&workspace, &manifest)?;
        if !asked.json {
            print_explained(session, &explained)?;
        }
        return Ok(Built::Done(explained_json(&explained), None));
    }
    let workspace = session.workspace(if asked.json { Talk::Nothing } else { Talk::Work })?;
    if asked.force {
        pipeline::forget(&workspace, &manifest)?;
    }
    let mut tuned = vec![];
    let (trials, minutes) = (manifest.search.trials, manifest.search.minutes);
    if trials > 0 && !asked.no_search {
        for target in &manifest.targets {
            if pipeline::can_tune(&workspace, &manifest, target).is_err()
                || pipeline::is_tuned(&workspace, &manifest, target, (trials, minutes))?
            {
                continue;
            }
            let budget = Budget { trials, minutes, trial_timeout: None };
            let Some(found) = search(session, &workspace, path, &manifest, target, budget, Search::default())? else {
                return Ok(Built::Interrupted);
            };
            if found.interrupted {
                return Ok(Built::Interrupted);
            }
            tuned_text(&found).lines().for_each(|line| workspace.report.note(line.trim()));
            tuned.push(tuned_json(&found));
        }
    }
    let done = pipeline::build_each(&workspace, &manifest)?;
    // If nothing was done, the output is one line.
    let idle = done.ran == 0 && !workspace.report.tells_cached();
    let is_told = !idle && !asked.json && !session.is_quiet();
    if !idle {
        done.notes.iter().chain(&joined(&done.waiting)).for_each(|note| workspace.report.note(note));
    }
    if done.failed.is_empty() {
        workspace.report.finish(&if idle { stored_text(&done) } else { String::new() });
    }
    let fault = failed(asked, &done, is_told);
    let targets: Vec<Value> = manifest
        .targets
        .iter()
        .filter_map(|target| done.targets.iter().find(|built| built.target == target.name))
        .map(target_json)
        .collect();
    let built = json!({
        "manifest": manifest.name,
        "targets": targets,
        "tuned": tuned,
        "ran": done.ran,
        "cached": done.cached,
        "notes": done.notes,
        "waiting": done.waiting,
    });
    Ok(Built::Done(built, fault))
}

/// The first fault of a build's targets; a stage that waits and is required is a fault too. `is_told`: the user knows what waits.
fn failed(asked: &Build, done: &BuildReport, is_told: bool) -> Option<Fault> {
    if let Some(fault) = done.fault() {
        return Some(fault);
    }
    let required = if asked.require_complete { Require::All } else { asked.require? };
    let lacks = |built: &&BuiltTarget| match required {
        Require::Compile => missing(built).contains(&"compile"),
        Require::All => !missing(built).is_empty(),
    };
    let lacking: Vec<&str> = done.targets.iter().filter(lacks).map(|built| built.target.as_str()).collect();
    if lacking.is_empty() {
        return None;
    }
    let count = format!("{} of {}", lacking.len(), counted(done.targets.len() as u64, "target"));
    let what = match required {
        Require::Compile => "not compiled",
        Require::All => "not complete",
    };
    let is_lacking = |line: &&String| line.split_once(": ").is_some_and(|(name, _)| lacking.contains(&name));
    let waiting: Vec<String> = done.waiting.iter().filter(is_lacking).cloned().collect();
    let reasons = match is_told {
        true => String::new(),
        false => joined(&waiting).iter().map(|line| format!("\n  {line}")).collect(),
    };
    let remedy = match required {
        Require::Compile => {
            "install NVRTC, the CUDA run-time compiler: `monobloc doctor` says how; or share a cache that has the cubins"
        }
        Require::All => "run it where the devices are, with the same cache, or ask for less: `--require compile`",
    };
    Some(Fault::environment(format!("{what}: {count} ({}){reasons}", lacking.join(", "))).with_remedy(remedy))
}

/// Stages that a target still waits for.
fn missing(built: &BuiltTarget) -> Vec<&'static str> {
    match (built.measurement.is_some(), built.cubin.is_some()) {
        (true, _) => vec![],
        (false, true) => vec!["check", "measure"],
        (false, false) => vec!["compile", "check", "measure"],
    }
}

/// `TARGET: REASON` lines; those of one reason are one line.
fn joined(waiting: &[String]) -> Vec<String> {
    let mut by_reason: Vec<(&str, Vec<&str>)> = vec![];
    for line in waiting {
        let (name, reason) = line.split_once(": ").unwrap_or(("", line));
        match by_reason.iter_mut().find(|(known, _)| *known == reason) {
            Some((_, names)) => names.push(name),
            None => by_reason.push((reason, vec![name])),
        }
    }
    by_reason.into_iter().map(|(reason, names)| format!("{}: {reason}", names.join(", "))).collect()
}

/// The text after `no work to do`: latencies of earlier builds, and stages that wait.
fn stored_text(done: &BuildReport) -> String {
    let mut parts = vec![];
    for built in &done.targets {
        let timed = built.measurement.iter().flat_map(Measurement::timed);
        let times: Vec<String> =
            timed.map(|timed| format!("{:.1} µs at position {}", timed.latency_us_p50, timed.position)).collect();
        if !times.is_empty() {
            parts.push(format!("; {}: {} per token", built.target, times.join(", ")));
        }
    }
    if !done.waiting.is_empty() {
        let names: Vec<&str> = done.waiting.iter().filter_map(|line| line.split(':').next()).collect();
        parts.push(format!("; {} waiting (`-v` says for what)", names.join(", ")));
    }
    parts.concat()
}

fn target_json(built: &BuiltTarget) -> Value {
    let BuiltTarget { target, candidate, schedule, cubin, measurement } = built;
    let timed = measurement.iter().flat_map(Measurement::timed).map(|timed| {
        json!({ "position": timed.position, "latency_us_p50": timed.latency_us_p50, "floor_us": timed.floor_us })
    });
    let withheld = measurement.iter().flat_map(Measurement::withheld).map(|withheld| withheld.reason.clone());
    json!({
        "target": target,
        "candidate": candidate,
        "schedule": schedule.to_string(),
        "cubin": cubin.map(|cubin| cubin.to_string()),
        "complete": measurement.is_some(),
        "missing": missing(built),
        "positions": timed.collect::<Vec<_>>(),
        "withheld": withheld.collect::<Vec<_>>(),
    })
}

/// Removes what the cache holds of the last build of a manifest.
pub fn clean(session: &Session, asked: &Clean) -> Result<Outcome, Fault> {
    let manifest = restricted(session.manifest(&asked.manifest, asked.target.as_deref())?, asked.target.as_deref())?;
    let workspace = session.workspace(Talk::Nothing)?;
    let removed = pipeline::forget(&workspace, &manifest)?;
    if asked.json {
        session.terminal.print_json(&json!({ "manifest": manifest.name, "removed": removed }))?;
        return Ok(Outcome::Done);
    }
    session.terminal.say(&format!("removed {} of `{}`", counted(removed as u64, "entry"), manifest.name));
    Ok(Outcome::Done)
}

pub fn show(session: &Session, asked: &Show) -> Result<Outcome, Fault> {
    let manifest = session.manifest(&asked.manifest, asked.target.as_deref())?;
    let target = pick_target(&manifest, asked.target.as_deref())?;
    let workspace = session.workspace(Talk::Work)?;
    let text = pipeline::show(&workspace, &manifest, &target, &asked.stage, asked.rows)?;
    if asked.json {
        session.terminal.print_json(&json!({ "stage": asked.stage, "target": target.name, "text": text }))?;
        return Ok(Outcome::Done);
    }
    session.terminal.print(&text)?;
    if !text.ends_with('\n') {
        session.terminal.print("\n")?;
    }
    Ok(Outcome::Done)
}

pub fn explain(session: &Session, asked: &Explain) -> Result<Outcome, Fault> {
    let manifest = restricted(session.manifest(&asked.manifest, asked.target.as_deref())?, asked.target.as_deref())?;
    let workspace = session.workspace(Talk::Nothing)?;
    let explained = pipeline::explain(&workspace, &manifest)?;
    match asked.json {
        true => session.terminal.print_json(&explained_json(&explained))?,
        false => print_explained(session, &explained)?,
    }
    Ok(Outcome::Done)
}

fn explained_json(explained: &[Explained]) -> Value {
    let stages =
        explained.iter().map(|e| json!({ "target": e.target, "stage": e.stage, "cached": e.cached, "lines": e.lines }));
    stages.collect()
}

fn print_explained(session: &Session, explained: &[Explained]) -> Result<(), Fault> {
    let mut target = None;
    for e in explained {
        if target != Some(&e.target) {
            // The import belongs to no target.
            let heading = if e.target.is_empty() { "every target" } else { &e.target };
            session.terminal.print(&format!("{heading}\n"))?;
            target = Some(&e.target);
        }
        let state = if e.cached { "cached" } else { "not cached" };
        session.terminal.print(&format!("  {:<9} {state}\n", e.stage))?;
        for line in &e.lines {
            session.terminal.print(&format!("      {line}\n"))?;
        }
    }
    if explained.iter().all(|e| e.cached) {
        session.terminal.print("no work to do\n")?;
    }
    Ok(())
}

/// The manifest with only one of its targets.
fn restricted(mut manifest: Manifest, target: Option<&str>) -> Result<Manifest, Fault> {
    if target.is_some() {
        manifest.targets = vec![pick_target(&manifest, target)?];
    }
    Ok(manifest)
}
