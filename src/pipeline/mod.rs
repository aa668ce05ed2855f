//! Owns the order of the stages: what a build runs, what it finds in the cache, and what waits for a device.
//!
//! ```text
//! import -> schedule (lower, place, prove) -> source -> compile        -> check -> measure -> a row of trials
//!                                          \-> pack (weights) -------/
//! ```
//!
//! `keys` says what each stage depends on, `stages` makes what needs no execution, `stored` says how they keep it, `prove` checks and measures, `rows`
//! tells the corpus, `runner` decodes for commands, `campaign` searches, `outlook` says how searches went, `bench` times beside baselines (`peer` is one in another process),
//! `tokens` runs a tokenizer where it can do no harm, `trace` says where a step's time goes, `explain` answers why something would run.
//!
//! A warm build imports the headers and looks every stage up. It parses and proves a schedule only when something is to
//! be executed or compiled: the proof belongs to the bytes that are used, so it is made again from what was loaded.

pub mod bench;
mod campaign;
mod compile;
mod execute;
mod explain;
mod keys;
mod links;
pub mod outlook;
mod peer;
mod prove;
mod rows;
mod runner;
mod stages;
mod stored;
mod tokens;
pub mod trace;
mod trial;
mod worker;

pub use campaign::{Tuned, Tuning, can_tune, is_tuned, tune};
pub use explain::{Explained, SHOW_STAGES, explain, show};
pub use runner::Runner;
pub use stored::read_stored;
pub use tokens::{Tokens, serve_tokens};
pub use trial::serve;

use crate::cache::Cache;
use crate::candidate::Candidate;
use crate::digest::Digest;
use crate::error::Fault;
use crate::flywheel::Verdict;
use crate::manifest::Manifest;
use crate::measure::Measurement;
use crate::model::config::Imported;
use crate::report::Report;
use crate::target::{Target, TargetKind};
use crate::validate::Validated;
use std::path::PathBuf;

use compile::{Compile, Compiler, compile};
use execute::Devices;
use prove::{OnDevice, prove};
use rows::Tried;
use stages::{Generated, Model, NotPlaced, Placed, Site, generate_source, load_model, place};

/// What every command works with.
pub struct Workspace {
    pub cache: Cache,
    pub report: Report,
    /// The user's own trials.
    pub trials: PathBuf,
}

/// A manifest's model on one target, up to the proof. The kernel of a CUDA target is compiled by
/// [`Prepared::runner`], because only that needs it.
pub struct Prepared {
    pub manifest: Manifest,
    pub target: Target,
    pub imported: Imported,
    pub candidate: Candidate,
    pub validated: Validated,
    /// Digest of the graph's text, and of the schedule's text: what keys name.
    graph: Digest,
    schedule: Digest,
}

impl Prepared {
    fn site<'a>(&'a self, workspace: &'a Workspace) -> Site<'a> {
        let Prepared { manifest, target, imported, graph, .. } = self;
        Site::of(workspace, manifest, target, imported, *graph)
    }
}

/// Imports, lowers, schedules and proves; every stage through the cache.
///
/// # Errors
/// Faults of the source, a default candidate that does not fit the target, a full disk.
pub fn prepare(workspace: &Workspace, manifest: &Manifest, target: &Target) -> Result<Prepared, Fault> {
    let model = import_stage(workspace, manifest)?;
    let site = Site::new(workspace, manifest, target, &model)?;
    let placed = place_chosen(&site)?;
    let schedule = placed.content;
    let (candidate, validated) = placed.into_validated(target)?;
    let (manifest, target, graph) = (manifest.clone(), target.clone(), model.graph);
    Ok(Prepared { manifest, target, imported: model.imported, candidate, validated, graph, schedule })
}

/// What a build did, for the last line and for `--json`.
#[derive(Debug, Clone, PartialEq)]
pub struct BuildReport {
    pub ran: usize,
    pub cached: usize,
    /// Notes of the import.
    pub notes: Vec<String>,
    /// In the order of the manifest; targets that failed are left out.
    pub targets: Vec<BuiltTarget>,
    /// One line a target that waits for a device or a tool.
    pub waiting: Vec<String>,
    /// Targets that could not be built. The others were.
    pub failed: Vec<(String, Fault)>,
}

/// One target of a build, as far as this machine could build it.
#[derive(Debug, Clone, PartialEq)]
pub struct BuiltTarget {
    pub target: String,
    /// Its knobs.
    pub candidate: String,
    pub schedule: Digest,
    pub cubin: Option<Digest>,
    /// `None`: it waits for a device or a tool.
    pub measurement: Option<Measurement>,
}

impl BuildReport {
    /// The faults of targets as one, with the tier of the first; `None` if every target was built or waits.
    pub fn fault(&self) -> Option<Fault> {
        let (_, first) = self.failed.first()?;
        let several = self.failed.len() + self.targets.len() + self.waiting.len() > 1;
        let told = |(target, fault): &(String, Fault)| match several {
            true => format!("target `{target}`: {}", fault.message),
            false => fault.message.clone(),
        };
        let message = self.failed.iter().map(told).collect::<Vec<_>>().join("\n");
        Some(Fault { message, ..first.clone() })
    }
}

/// Runs every stage of every target of the manifest that this machine can run. The summary is the caller's to tell.
///
/// # Errors
/// Those of [`build_each`], and the faults of targets, after the others were built.
pub fn build(workspace: &Workspace, manifest: &Manifest) -> Result<BuildReport, Fault> {
    let report = build_each(workspace, manifest)?;
    match report.fault() {
        None => Ok(report),
        Some(fault) => Err(fault),
    }
}

/// As [`build`], with the faults of targets in the report: none of them stops another target.
///
/// # Errors
/// Faults that concern all targets: of the source, of the cache. What was built before stays in the cache.
pub fn build_each(workspace: &Workspace, manifest: &Manifest) -> Result<BuildReport, Fault> {
    let (ran, cached) = (workspace.report.ran_count(), workspace.report.cached_count());
    let model = import_stage(workspace, manifest)?;
    let commit =
        model.commit.iter().map(|c| format!("{} at revision `{}` is commit {c}", manifest.source, manifest.revision));
    let notes = commit.chain(model.imported.notes.iter().cloned()).collect();
    let (mut waiting, mut failed, mut built) = (vec![], vec![], vec![]);

    let mut sites: Vec<(Site<'_>, Placed, Option<Generated>)> = vec![];
    for target in &manifest.targets {
        let made = || -> Result<_, Fault> {
            let site = Site::new(workspace, manifest, target, &model)?;
            let placed = place_chosen(&site)?;
            let generated = match target.kind {
                TargetKind::Cpu => None,
                TargetKind::Cuda => Some(generate_source(&site, &placed)?),
            };
            Ok((site, placed, generated))
        };
        match made() {
            Ok(made) => sites.push(made),
            Err(fault) => failed.push((target.name.clone(), fault)),
        }
    }

    let compiler = Compiler::new(workspace);
    let sources: Vec<(Site<'_>, &Generated)> =
        sites.iter().filter_map(|(site, _, generated)| Some((*site, generated.as_ref()?))).collect();
    let mut compiled = compile(&compiler, &sources)?.into_iter();

    // One after another, with the machine to itself: what runs beside a measurement is measured with it.
    let devices = Devices::list(!sources.is_empty());
    for (site, placed, generated) in &sites {
        let name = &site.target.name;
        let mut done = BuiltTarget {
            target: name.clone(),
            candidate: placed.candidate.to_string(),
            schedule: placed.content,
            cubin: None,
            measurement: None,
        };
        let mut settle = |proven: Result<Measurement, Fault>| match proven {
            Ok(measurement) => done.measurement = Some(measurement),
            Err(fault) => failed.push((name.clone(), fault)),
        };
        let Some(generated) = generated else {
            settle(prove(site, placed, None));
            if done.measurement.is_some() {
                built.push(done);
            }
            continue;
        };
        match compiled.next() {
            Some(Compile::Done(cubin)) => {
                match devices.find(site.target) {
                    Ok(device) => {
                        settle(prove(
                            site,
                            placed,
                            Some(OnDevice { cubin: &cubin, source: generated.content, device }),
                        ));
                    }
                    Err(reason) => {
                        waiting.push(format!("{name}: check and measure wait for a device of its kind ({reason})"))
                    }
                }
                done.cubin = Some(cubin.digest);
            }
            Some(Compile::Waits(missing)) => {
                if let Some(fault) = compiler.misnamed() {
                    failed.push((name.clone(), fault));
                    continue;
                }
                let reason = missing.message.lines().next().unwrap_or_default();
                let remedy = missing.remedy.map(|remedy| format!("; {remedy}")).unwrap_or_default();
                waiting.push(format!("{name}: compile, check and measure wait for NVRTC ({reason}{remedy})"));
            }
            None => return Err(Fault::internal(format!("the compile of `{name}` gave no result"))),
        }
        if failed.last().is_none_or(|(failed, _)| failed != name) {
            built.push(done);
        }
    }
    let report = &workspace.report;
    let (ran, cached) = (report.ran_count() - ran, report.cached_count() - cached);
    Ok(BuildReport { ran, cached, notes, targets: built, waiting, failed })
}

/// Removes what the cache holds of the last build of this manifest's targets, stage by stage; returns how many entries. Packs
/// and checks are made again with the rest.
///
/// # Errors
/// An entry that cannot be removed.
pub fn forget(workspace: &Workspace, manifest: &Manifest) -> Result<usize, Fault> {
    let cache = &workspace.cache;
    let model = [(keys::IMPORT, stages::subject(manifest, "model"))];
    let of_target = |target: &Target| {
        let stages = [keys::SCHEDULE, keys::SOURCE, keys::COMPILE, keys::PACK, keys::CHECK, keys::MEASURE];
        stages.map(|stage| (stage, stages::subject(manifest, &target.name)))
    };
    let mut removed = 0;
    for (stage, subject) in model.into_iter().chain(manifest.targets.iter().flat_map(of_target)) {
        if let Some((key, _)) = cache.latest_why(stage, &subject)
            && cache.get(stage, &key)?.is_some()
        {
            cache.remove(stage, &key)?;
            removed += 1;
        }
    }
    Ok(removed)
}

/// Imports the model, and keeps the text of its graph.
fn import_stage(workspace: &Workspace, manifest: &Manifest) -> Result<Model, Fault> {
    let model = load_model(workspace, manifest)?;
    let subject = stages::subject(manifest, "model");
    workspace
        .stage(&model.keyed, &subject, keys::IMPORT, &manifest.source, || Ok(model.graph_text.clone().into_bytes()))?;
    Ok(model)
}

/// Places the candidate that is built: the best of a search, else what the manifest names, else the default.
fn place_chosen(site: &Site<'_>) -> Result<Placed, Fault> {
    let candidate = site.candidate();
    place(site, candidate.clone()).map_err(|not_placed| match not_placed {
        NotPlaced::Fault(fault) => fault,
        NotPlaced::Infeasible(reason) => {
            let tried = Tried {
                site,
                candidate: &candidate,
                placed: None,
                source: None,
                cubin: None,
                hardware: None,
                asked: None,
            };
            let row = tried.append(None, None, vec![Verdict::Infeasible { detail: reason.to_string() }]);
            let message = format!("the candidate does not fit `{}`: {reason}", site.target.name);
            row.err().unwrap_or_else(|| {
                let remedy = if site.knobs.is_some() {
                    "change the manifest's `candidate`, or leave it out"
                } else {
                    "lower `decode.context_max`, or take a larger target"
                };
                Fault::input(message).with_remedy(remedy)
            })
        }
    })
}
