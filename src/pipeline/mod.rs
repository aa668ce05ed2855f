//! Owns the order of the stages: what a build runs, what it finds in the cache, and what waits for a device.
//!
//! ```text
//! import -> schedule (lower, place, prove) -> source -> compile        -> check -> measure -> a row of trials
//!                                          \-> pack (weights) -------/
//! ```
//!
//! `chain` is the order: a command asks it for the artefact that it needs. `keys` says what each stage depends on, `stages` and
//! `compile` make what needs no execution, `stored` says how they keep it, `evaluate` checks and measures the decode kernel, `rows`
//! appends to the corpus. `kernels` is a set of kernels over one pool of pages, `checks` makes sure that each was compared on a device of this kind. `runner` decodes for commands (`speculative` with proposed tokens, `mtp` with those of the checkpoint's own draft), `batch` makes steps of several rows for a server,
//! `invariant` has the kernels whose rows have the bits that they have alone, and `text_steps` decodes one text by them.
//! `index` is what a build asks a remote cache for first.
//! `campaign` searches (`search_start` says from where, `made` makes a candidate, `arena` has it timed, `ahead` makes candidates early, `trial` and
//! `wave_trial` are the child process that checks and times, `proposer` is a program that proposes), `fleet` searches with workers on other machines (`fleet_engines` starts them, `fleet_wire` speaks to them), `status` says how searches went, `bench` times beside baselines (`baseline` is one in another process).
//! `tokens` runs a tokenizer where it can do no harm, `trace` says where a step's time goes, `explain` answers why something would
//! run, `plan` lists the stages as jobs for other machines and runs one. `export` writes a folder that a model runs from, `exported` reads and checks one, `ready` is a model from a manifest or
//! from an export. `worker`, `proposer` and `baseline` speak to their processes through `line_child`.
//!
//! A warm build imports the headers and looks every stage up. It parses and proves a schedule only when something is to
//! be executed or compiled: the proof belongs to the bytes that are used, so it is made again from what was loaded.

mod ahead;
mod arena;
mod attest;
mod baseline;
mod batch;
pub mod bench;
mod campaign;
mod chain;
pub mod checks;
mod compile;
pub mod device_ragged;
pub mod device_rows;
mod device_sampler;
pub mod device_steps;
pub mod device_waves;
mod evaluate;
mod execute;
mod explain;
mod export;
mod exported;
mod fleet;
mod fleet_engines;
mod fleet_wire;
mod index;
mod invariant;
pub mod kernels;
mod keys;
mod line_child;
mod made;
mod mtp;
mod plan;
mod proposer;
mod ready;
mod resident;
mod rows;
mod runner;
mod search_start;
pub mod speculative;
mod stages;
pub mod status;
mod stored;
pub mod text_steps;
mod tokens;
pub mod trace;
pub mod trial;
pub mod wave_trial;
mod worker;

pub use batch::{AskedSizes, Batched, Serving, runs_here};
pub use campaign::{Tuned, Tuning, can_tune, is_tuned, tune};
pub use checks::{Checking, Checks};
pub use explain::{Explained, SHOW_STAGES, explain, show};
pub use export::{Written, export, temporary_prefix};
pub use exported::Exported;
pub use fleet::{Away, tune_away};
pub use fleet_engines::Engine;
pub use fleet_wire::{TOKEN, join};
pub use keys::{Hardware, WeightsId};
pub(crate) use line_child::end_children;
pub use mtp::{Mtp, MtpDraft};
pub use plan::{Needs, Planned, Purpose, plan, run_stage};
pub use ready::{Given, Ready};
pub use runner::{Answer, Runner};
pub use stored::read_stored;
pub use tokens::{TextPart, Tokens, serve_tokens};
pub use trial::serve;

use crate::cache::Cache;
use crate::candidate::Candidate;
use crate::digest::Digest;
use crate::error::{Fault, Tier};
use crate::manifest::Manifest;
use crate::measure::Measurement;
use crate::model::config::Imported;
use crate::report::Report;
use crate::target::{Target, TargetKind};
use crate::validate::Validated;
use std::path::PathBuf;
use std::sync::Arc;

use chain::{Chain, Host, NotMade, compile_all};
use evaluate::evaluate;
use kernels::Served;
use stages::{BuildContext, Model, StoredSchedule, load_model};

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
    pub validated: Arc<Validated>,
    /// Whether kernels are compared before they give a token.
    checking: Checking,
    /// Digest of the graph's text: what keys name.
    graph: Digest,
    schedule: Arc<StoredSchedule>,
}

impl Prepared {
    /// Whether kernels are compared before they give a token; they are, unless this says otherwise.
    pub fn checking(self, checking: Checking) -> Prepared {
        Prepared { checking, ..self }
    }

    fn context<'a>(&'a self, workspace: &'a Workspace) -> BuildContext<'a> {
        let Prepared { manifest, target, imported, graph, .. } = self;
        BuildContext::of(workspace, manifest, target, imported, *graph)
    }

    fn chain<'a>(&'a self, workspace: &'a Workspace, host: &'a Host<'a>) -> Chain<'a> {
        Chain::of_schedule(self.context(workspace), host, self.schedule.clone())
    }
}

/// Imports, lowers, schedules and proves; every stage through the cache.
///
/// # Errors
/// Faults of the source, a default candidate that does not fit the target, a full disk.
pub fn prepare(workspace: &Workspace, manifest: &Manifest, target: &Target) -> Result<Prepared, Fault> {
    let model = import_stage(workspace, manifest)?;
    let host = Host::new(workspace);
    let chain = Chain::chosen(BuildContext::new(workspace, manifest, target, &model)?, &host)?;
    let (schedule, validated) = (chain.schedule()?.clone(), chain.validated()?.clone());
    let (candidate, graph) = (chain.candidate.clone(), model.graph);
    let (manifest, target) = (manifest.clone(), target.clone());
    let (imported, checking) = (model.imported, Checking::Required);
    Ok(Prepared { manifest, target, imported, candidate, validated, checking, graph, schedule })
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

/// Runs every stage of every target of the manifest that this machine can run. The caller prints the summary.
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
    let (model, host) = (load_model(workspace, manifest)?, Host::new(workspace));
    index::bring(workspace, manifest, &model, &host);
    keep_import(workspace, manifest, &model)?;
    let commit =
        model.commit.iter().map(|c| format!("{} at revision `{}` is commit {c}", manifest.source, manifest.revision));
    let notes = commit.chain(model.imported.notes.iter().cloned()).collect();
    let (mut waiting, mut failed, mut built) = (vec![], vec![], vec![]);

    let mut chains = vec![];
    for target in &manifest.targets {
        let made = || -> Result<Chain<'_>, Fault> {
            let chain = Chain::chosen(BuildContext::new(workspace, manifest, target, &model)?, &host)?;
            if target.kind == TargetKind::Cuda {
                chain.source()?;
            }
            Ok(chain)
        };
        match made() {
            Ok(chain) => chains.push(chain),
            Err(fault) => failed.push((target.name.clone(), fault)),
        }
    }
    let compiled = compile_all(&host, &chains);
    // One after another, with the machine to itself: what runs beside a measurement is measured with it.
    for (chain, compiled) in chains.iter().zip(compiled) {
        let name = &chain.context.target.name;
        // Kernels for several rows are made before a stage that may wait for a device.
        let made = compiled.and_then(|()| make_several(chain));
        let evaluated = made.and_then(|several| {
            let measurement = evaluate(chain)?;
            check_several(chain, several)?;
            Ok(measurement)
        });
        let measurement = match evaluated {
            Ok(measurement) => Some(measurement),
            Err(NotMade::NoDevice { reason, .. }) => {
                waiting.push(format!("{name}: check and measure wait for a device of its kind ({reason})"));
                None
            }
            Err(NotMade::NoCompiler(missing)) => {
                if let Some(fault) = host.compiler.misnamed() {
                    failed.push((name.clone(), fault));
                    continue;
                }
                let reason = missing.message.lines().next().unwrap_or_default();
                let remedy = missing.remedy.map(|remedy| format!("; {remedy}")).unwrap_or_default();
                let none = "and no cache has a cubin of this source";
                waiting.push(format!("{name}: compile, check and measure wait for NVRTC ({reason}, {none}{remedy})"));
                None
            }
            Err(other) => {
                failed.push((name.clone(), other.into()));
                continue;
            }
        };
        built.push(BuiltTarget {
            target: name.clone(),
            candidate: chain.candidate.to_string(),
            schedule: chain.schedule()?.content,
            cubin: chain.made().2.map(|cubin| cubin.digest),
            measurement,
        });
    }
    if failed.is_empty() {
        index::leave(workspace, manifest, &chains);
    }
    let report = &workspace.report;
    let (ran, cached) = (report.ran_count() - ran, report.cached_count() - cached);
    Ok(BuildReport { ran, cached, notes, targets: built, waiting, failed })
}

/// The kernels of several rows that the manifest's `sequences_max` asks for, proven and compiled; `None`: it asks for none.
fn make_several(chain: &Chain<'_>) -> Result<Option<Served>, NotMade> {
    let BuildContext { manifest, target, .. } = chain.context;
    if !batch::is_several(manifest) {
        return Ok(None);
    }
    let serving = Serving::of_manifest(manifest, target.kind, 1);
    if target.kind == TargetKind::Cpu {
        batch::batch_on_cpu(chain, &serving)?;
        return Ok(None);
    }
    let memory = batch::memory(chain, chain.validated()?)?;
    match batch::served(chain, &serving, memory) {
        Ok(served) => Ok(Some(served)),
        Err(fault) if fault.tier == Tier::Environment && chain.host.compiler.version().is_err() => {
            Err(NotMade::NoCompiler(fault))
        }
        Err(fault) => Err(fault.into()),
    }
}

/// Checks the kernels of [`make_several`].
fn check_several(chain: &Chain<'_>, several: Option<Served>) -> Result<(), NotMade> {
    let (Some(served), Some(found)) = (several, chain.host.device(chain.context.target)?) else { return Ok(()) };
    let device = execute::open(found, chain.context.target).map_err(Fault::from)?;
    Ok(served.ensure_checked(chain, found, &device)?)
}

/// Removes what the cache holds of the last build of this manifest's targets, stage by stage; returns how many entries. Packs
/// and checks are made again with the rest.
///
/// # Errors
/// An entry that cannot be removed.
pub fn forget(workspace: &Workspace, manifest: &Manifest) -> Result<usize, Fault> {
    let cache = &workspace.cache;
    let model = [keys::IMPORT, keys::INDEX].map(|stage| (stage, stages::subject(manifest, "model")));
    let of_target = |target: &Target| {
        let stages = [keys::SCHEDULE, keys::SOURCE, keys::COMPILE, keys::PACK, keys::CHECK, keys::MEASURE];
        let subject = stages::subject(manifest, &target.name);
        let several = checks::kept(&subject);
        stages.map(|stage| (stage, subject.clone())).into_iter().chain(several).collect::<Vec<_>>()
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
    keep_import(workspace, manifest, &model)?;
    Ok(model)
}

fn keep_import(workspace: &Workspace, manifest: &Manifest, model: &Model) -> Result<(), Fault> {
    let subject = stages::subject(manifest, "model");
    workspace.stage(&model.keyed, &subject, keys::IMPORT, &manifest.source, || {
        Ok::<_, Fault>(model.graph_text.clone().into_bytes())
    })?;
    Ok(())
}
