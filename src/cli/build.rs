//! Owns `build`, `show` and `explain`: the pipeline, asked to run, to print, and to account for itself.

use serde_json::json;

use super::Outcome;
use super::arguments::{Build, Explain, Show};
use super::session::{Session, Talk, pick_target};
use super::tune::{Budget, Search, search, tuned_json, tuned_text};
use crate::error::Fault;
use crate::manifest::Manifest;
use crate::pipeline;

pub fn build(session: &Session, asked: &Build) -> Result<Outcome, Fault> {
    let manifest = restricted(session.manifest(&asked.manifest)?, asked.target.as_deref())?;
    let workspace = session.workspace(if asked.quiet || asked.json { Talk::Nothing } else { Talk::Stages })?;
    let mut tuned = vec![];
    let (trials, minutes) = (manifest.search.trials, manifest.search.minutes);
    if trials > 0 && !asked.no_search {
        for target in &manifest.targets {
            if pipeline::can_tune(&workspace, target).is_err()
                || pipeline::is_tuned(&workspace, &manifest, target, (trials, minutes))?
            {
                continue;
            }
            let budget = Budget { trials, minutes, trial_timeout: None };
            let found = search(session, &workspace, &asked.manifest, &manifest, target, budget, Search::default())?;
            if found.interrupted {
                return Ok(Outcome::Interrupted);
            }
            tuned_text(&found).lines().for_each(|line| workspace.report.note(line.trim()));
            tuned.push(tuned_json(&found));
        }
    }
    let done = pipeline::build(&workspace, &manifest)?;
    for waiting in &done.waiting {
        workspace.report.note(waiting);
    }
    workspace.report.finish();
    if asked.json {
        session.terminal.print_json(&json!({
            "manifest": manifest.name,
            "targets": manifest.targets.iter().map(|target| target.name.as_str()).collect::<Vec<_>>(),
            "tuned": tuned,
            "ran": done.ran,
            "cached": done.cached,
            "waiting": done.waiting,
        }))?;
    }
    Ok(Outcome::Done)
}

pub fn show(session: &Session, asked: &Show) -> Result<Outcome, Fault> {
    let manifest = session.manifest(&asked.manifest)?;
    let target = pick_target(&manifest, asked.target.as_deref())?;
    let workspace = session.workspace(Talk::Work)?;
    let text = pipeline::show(&workspace, &manifest, &target, &asked.stage)?;
    session.terminal.print(&text)?;
    if !text.ends_with('\n') {
        session.terminal.print("\n")?;
    }
    Ok(Outcome::Done)
}

pub fn explain(session: &Session, asked: &Explain) -> Result<Outcome, Fault> {
    let manifest = restricted(session.manifest(&asked.manifest)?, asked.target.as_deref())?;
    let workspace = session.workspace(Talk::Nothing)?;
    let explained = pipeline::explain(&workspace, &manifest)?;
    if asked.json {
        let stages = explained
            .iter()
            .map(|e| json!({ "target": e.target, "stage": e.stage, "cached": e.cached, "lines": e.lines }));
        session.terminal.print_json(&stages.collect())?;
        return Ok(Outcome::Done);
    }
    let mut target = None;
    for e in &explained {
        if target != Some(&e.target) {
            // The import is of no target.
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
    Ok(Outcome::Done)
}

/// The manifest with one of its targets alone.
fn restricted(mut manifest: Manifest, target: Option<&str>) -> Result<Manifest, Fault> {
    if target.is_some() {
        manifest.targets = vec![pick_target(&manifest, target)?];
    }
    Ok(manifest)
}
