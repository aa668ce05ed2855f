//! Owns the plan of a build over many machines: which stages are to run, what each needs, and one of them run alone.
//!
//! A stage's key in a plan depends on the manifest, the target and the candidate alone, so it is known before anything has run and
//! is the same on every machine. The key in the cache names the content of earlier stages; it is given where that is known.

use crate::digest::Digest;
use crate::error::Fault;
use crate::manifest::Manifest;
use crate::target::{Target, TargetKind};

use super::Workspace;
use super::chain::{Chain, Host, NotMade, Stage};
use super::evaluate::{Executor, evaluate};
use super::import_stage;
use super::keys;
use super::stages::{BuildContext, load_model};

/// What a machine must have to run a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// The program `monobloc` and the checkpoint.
    Host,
    /// The CUDA compiler library, and no GPU.
    Nvrtc,
    /// A GPU that the target's record describes.
    Gpu,
}

/// One stage of a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Planned {
    /// Name of the target; empty for the import, which all targets share.
    pub target: String,
    pub stage: &'static str,
    /// Names the stage in `run --stage`.
    pub key: Digest,
    /// Its key in the cache, if the results of earlier stages are there.
    pub cache_key: Option<Digest>,
    /// Keys of the stages whose results it reads.
    pub inputs: Vec<Digest>,
    pub needs: Needs,
    pub cached: bool,
}

/// All stages of a manifest in the order in which a build runs them. Makes nothing.
///
/// # Errors
/// Faults of the source or of the cache.
pub fn plan(workspace: &Workspace, manifest: &Manifest) -> Result<Vec<Planned>, Fault> {
    let model = load_model(workspace, manifest)?;
    let host = Host::new(workspace);
    let keyed = &model.keyed;
    let import = Planned {
        target: String::new(),
        stage: keys::IMPORT,
        key: keyed.key,
        cache_key: Some(keyed.key),
        inputs: vec![],
        needs: Needs::Host,
        cached: workspace.cache.get(keyed.stage, &keyed.key)?.is_some(),
    };
    let mut all = vec![import];
    for target in &manifest.targets {
        let context = BuildContext::new(workspace, manifest, target, &model)?;
        let chain = Chain::looking(context, &host, context.candidate());
        for &stage in Stage::of(target.kind) {
            let keyed_now = match stage {
                // A build makes it where there is a device; a plan does not wait for one.
                Stage::Pack => chain.pack_key(),
                _ => chain.key(stage),
            };
            let cache_key = match keyed_now {
                Ok(None) => continue,
                Ok(Some(keyed)) => Some(keyed.key),
                Err(NotMade::NotStored(_) | NotMade::NoCompiler(_) | NotMade::NoDevice { .. }) => None,
                Err(other) => return Err(other.into()),
            };
            let cached = match &cache_key {
                Some(key) => workspace.cache.get(stage.name(), key)?.is_some(),
                None => false,
            };
            let inputs = inputs(stage, target).iter().map(|&before| key_of(&chain, before)).collect();
            let inputs = if stage == Stage::Schedule { vec![keyed.key] } else { inputs };
            let (key, needs) = (key_of(&chain, stage), needs(stage, target));
            all.push(Planned {
                target: target.name.clone(),
                stage: stage.name(),
                key,
                cache_key,
                inputs,
                needs,
                cached,
            });
        }
    }
    Ok(all)
}

/// The stages whose results a stage reads.
fn inputs(stage: Stage, target: &Target) -> &'static [Stage] {
    match (stage, target.kind) {
        (Stage::Schedule, _) => &[],
        (Stage::Source | Stage::Pack, _) => &[Stage::Schedule],
        (Stage::Compile, _) => &[Stage::Source],
        (Stage::Check, TargetKind::Cpu) => &[Stage::Schedule, Stage::Pack],
        (Stage::Check, TargetKind::Cuda) => &[Stage::Schedule, Stage::Compile, Stage::Pack],
        (Stage::Measure, _) => &[Stage::Check],
    }
}

fn needs(stage: Stage, target: &Target) -> Needs {
    match (stage, target.kind) {
        (Stage::Compile, _) => Needs::Nvrtc,
        (Stage::Check | Stage::Measure, TargetKind::Cuda) => Needs::Gpu,
        _ => Needs::Host,
    }
}

fn key_of(chain: &Chain<'_>, stage: Stage) -> Digest {
    let context = &chain.context;
    let (schedule, stage) = (context.schedule_key(&chain.candidate).key, stage.name());
    let manifest = Digest::of(context.manifest.key_text().as_bytes());
    Digest::of(format!("plan {stage} {} {schedule} {manifest}", context.target.name).as_bytes())
}

/// Runs the stage with this key, and earlier ones whose results are not in the cache; `false` if the manifest has no such stage.
///
/// # Errors
/// What the machine lacks for it, and the faults of a build.
pub fn run_stage(workspace: &Workspace, manifest: &Manifest, key: &Digest) -> Result<bool, Fault> {
    let planned = plan(workspace, manifest)?;
    let Some(Planned { target, stage, .. }) = planned.into_iter().find(|planned| planned.key == *key) else {
        return Ok(false);
    };
    let model = import_stage(workspace, manifest)?;
    let Some(target) = manifest.targets.iter().find(|one| one.name == target) else { return Ok(true) };
    let host = Host::new(workspace);
    let chain = Chain::chosen(BuildContext::new(workspace, manifest, target, &model)?, &host)?;
    match stage {
        keys::SCHEDULE => drop(chain.schedule()?),
        keys::SOURCE => drop(chain.source()?),
        keys::COMPILE => drop(chain.cubin()?),
        keys::PACK => drop(chain.stored_pack()?),
        keys::CHECK => {
            Executor::new(&chain)?.checked(&mut None)?;
        }
        _ => drop(evaluate(&chain)?),
    }
    Ok(true)
}
