//! Owns the order of the stages: what a build runs, what it finds in the cache, and what waits for a device.
//!
//! ```text
//! import -> schedule (lower, place, prove) -> source -> compile        -> check -> measure -> a row of trials
//!                                          \-> pack (weights) -------/
//! ```
//!
//! `chain` is the order: a command asks it for the artefact that it needs. `keys` says what each stage depends on, `stages` and `compile` make what
//! needs no execution, `stored` says how they keep it, `evaluate` checks and measures, `rows` tells the corpus. `runner` decodes for commands,
//! `campaign` searches (`search_start` says from where, `arena` makes and times, `ahead` makes before it is asked, `proposer` is a program that proposes),
//! `status` says how searches went, `bench` times beside baselines (`baseline` is one in another process), `tokens` runs a tokenizer where it can do
//! no harm, `trace` says where a step's time goes, `explain` answers why something would run. `worker`, `proposer` and `baseline` speak to their
//! processes through `line_child`.
//!
//! A warm build imports the headers and looks every stage up. It parses and proves a schedule only when something is to
//! be executed or compiled: the proof belongs to the bytes that are used, so it is made again from what was loaded.

mod ahead;
mod arena;
mod attest;
mod baseline;
pub mod bench;
mod campaign;
mod chain;
mod compile;
mod evaluate;
mod execute;
mod explain;
mod keys;
mod line_child;
mod proposer;
mod resident;
mod rows;
mod runner;
mod search_start;
mod stages;
pub mod status;
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
use crate::manifest::Manifest;
use crate::model::config::Imported;
use crate::report::Report;
use crate::target::{Target, TargetKind};
use crate::validate::Validated;
use std::path::PathBuf;
use std::sync::Arc;

use chain::{Chain, Host, NotMade, compile_all};
use evaluate::evaluate;
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
    /// Digest of the graph's text and of the running tool: what keys name.
    graph: Digest,
    tool: Digest,
    schedule: Arc<StoredSchedule>,
}

impl Prepared {
    fn context<'a>(&'a self, workspace: &'a Workspace) -> BuildContext<'a> {
        let Prepared { manifest, target, imported, graph, tool, .. } = self;
        BuildContext::of(workspace, manifest, target, imported, *graph, *tool)
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
    let tool = workspace.tool()?;
    let model = import_stage(workspace, manifest, tool)?;
    let host = Host::new(workspace);
    let chain = Chain::chosen(BuildContext::new(workspace, manifest, target, &model, tool)?, &host)?;
    let (schedule, validated) = (chain.schedule()?.clone(), chain.validated()?.clone());
    let (candidate, graph) = (chain.candidate.clone(), model.graph);
    let (manifest, target) = (manifest.clone(), target.clone());
    Ok(Prepared { manifest, target, imported: model.imported, candidate, validated, graph, tool, schedule })
}

/// What a build did, for the last line and for `--json`.
#[derive(Debug, Clone, PartialEq)]
pub struct BuildReport {
    pub ran: usize,
    pub cached: usize,
    /// One line a target that waits for a device or a tool.
    pub waiting: Vec<String>,
}

/// Runs every stage of every target of the manifest that this machine can run. The summary is the caller's to tell.
///
/// # Errors
/// The first fault. What was built before it stays in the cache.
pub fn build(workspace: &Workspace, manifest: &Manifest) -> Result<BuildReport, Fault> {
    let (ran, cached) = (workspace.report.ran_count(), workspace.report.cached_count());
    let tool = workspace.tool()?;
    let model = import_stage(workspace, manifest, tool)?;
    if let Some(commit) = &model.commit {
        workspace.report.note(&format!("{} at revision `{}` is commit {commit}", manifest.source, manifest.revision));
    }
    for note in &model.imported.notes {
        workspace.report.note(note);
    }
    let host = Host::new(workspace);
    let mut chains = vec![];
    for target in &manifest.targets {
        let chain = Chain::chosen(BuildContext::new(workspace, manifest, target, &model, tool)?, &host)?;
        if target.kind == TargetKind::Cuda {
            chain.source()?;
        }
        chains.push(chain);
    }
    compile_all(&host, &chains)?;
    // One after another, with the machine to itself: what runs beside a measurement is measured with it.
    let mut waiting = vec![];
    for chain in &chains {
        let name = &chain.context.target.name;
        match evaluate(chain) {
            Ok(()) => {}
            Err(NotMade::NoDevice { reason, .. }) => {
                waiting.push(format!("{name}: check and measure wait for a device of its kind ({reason})"));
            }
            Err(NotMade::NoCompiler(missing)) => {
                let reason = missing.message.lines().next().unwrap_or_default();
                let remedy = missing.remedy.map(|remedy| format!("; {remedy}")).unwrap_or_default();
                waiting.push(format!("{name}: compile, check and measure wait for NVRTC ({reason}{remedy})"));
            }
            Err(other) => return Err(other.into()),
        }
    }
    let report = &workspace.report;
    Ok(BuildReport { ran: report.ran_count() - ran, cached: report.cached_count() - cached, waiting })
}

/// Imports the model, and keeps the text of its graph.
fn import_stage(workspace: &Workspace, manifest: &Manifest, tool: Digest) -> Result<Model, Fault> {
    let model = load_model(workspace, manifest, tool)?;
    let subject = stages::subject(manifest, "model");
    workspace.stage(&model.keyed, &subject, keys::IMPORT, &manifest.source, || {
        Ok::<_, Fault>(model.graph_text.clone().into_bytes())
    })?;
    Ok(model)
}
