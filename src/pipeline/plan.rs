//! Owns the plan of a build over many machines: which stages are to run, what each needs, and one of them run alone.
//!
//! A stage's key in a plan depends on the manifest, the target and the candidate alone, so it is known before anything has run and
//! is the same on every machine. The key in the cache names the content of earlier stages; it is given where that is known.

use std::sync::Arc;

use crate::check::{TextSizes, takes_from_device};
use crate::defaults::rows::Room;
use crate::digest::Digest;
use crate::error::Fault;
use crate::lower::Batch;
use crate::manifest::Manifest;
use crate::schedule::schedule;
use crate::target::{Target, TargetKind};
use crate::validate::Validated;

use super::Workspace;
use super::batch::{self, Serving, cpu_batches};
use super::chain::{Chain, Host, NotMade, Stage, remedy_of};
use super::checks::{self, Checks};
use super::compile::{Found, find_cubin, stored_cubin};
use super::device_rows::Prefill;
use super::device_steps::{StepsKernel, fitting};
use super::evaluate::{Executor, evaluate};
use super::execute::{self, host, upload_pack};
use super::import_stage;
use super::invariant;
use super::kernels::{self, Code, Does, Kernel, KernelSet, PlannedSet};
use super::keys;
use super::runner::one_text;
use super::stages::{BuildContext, batch_key, fitting_rows, load_model, place_rows, prove};

/// The command whose stages a plan has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Build,
    /// Also the kernels of a server of the manifest's sizes.
    Serve,
    /// Also the kernels that read the prompt of one text.
    Generate,
}

/// Kernels beside the decode kernel, by the command that loads them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Set {
    Serve,
    Generate,
}

impl Set {
    fn name(self) -> &'static str {
        match self {
            Set::Serve => "serve",
            Set::Generate => "generate",
        }
    }

    fn of(manifest: &Manifest, purpose: Purpose) -> &'static [Set] {
        match (purpose, batch::is_several(manifest)) {
            (Purpose::Build, false) => &[],
            (Purpose::Build, true) | (Purpose::Serve, _) => &[Set::Serve],
            (Purpose::Generate, false) => &[Set::Generate],
            (Purpose::Generate, true) => &[Set::Serve, Set::Generate],
        }
    }
}

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
    /// `serve/steps-8`: the kernel of a command beside the decode kernel, or what is compared of it; `None`: the stage is of the decode
    /// kernel, or of all.
    pub kernel: Option<String>,
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
/// Faults of the source or of the cache; kernels beside the decode kernel that do not fit.
pub fn plan(workspace: &Workspace, manifest: &Manifest, purpose: Purpose) -> Result<Vec<Planned>, Fault> {
    plan_sets(workspace, manifest, Set::of(manifest, purpose))
}

fn plan_sets(workspace: &Workspace, manifest: &Manifest, sets: &[Set]) -> Result<Vec<Planned>, Fault> {
    let model = load_model(workspace, manifest)?;
    let host = Host::new(workspace);
    let keyed = &model.keyed;
    let import = Planned {
        target: String::new(),
        stage: keys::IMPORT,
        kernel: None,
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
        let mut has_pack = false;
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
            has_pack |= stage == Stage::Pack;
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
                kernel: None,
                key,
                cache_key,
                inputs,
                needs,
                cached,
            });
        }
        for &set in sets {
            let beside = Beside { chain: &chain, set, import: keyed.key, has_pack };
            match target.kind {
                TargetKind::Cpu => all.push(beside.on_cpu()?),
                TargetKind::Cuda => all.extend(beside.on_device()?),
            }
        }
    }
    Ok(all)
}

/// The stages of one set on one target.
struct Beside<'a> {
    chain: &'a Chain<'a>,
    set: Set,
    /// Key of the import.
    import: Digest,
    /// The weights are a stage.
    has_pack: bool,
}

impl Beside<'_> {
    fn planned(
        &self,
        stage: &'static str,
        name: &str,
        needs: Needs,
        inputs: &[Digest],
        keyed: Option<(Digest, bool)>,
    ) -> Planned {
        let kernel = format!("{}/{name}", self.set.name());
        Planned {
            target: self.chain.context.target.name.clone(),
            stage,
            key: plan_key(self.chain, &format!("{stage} {kernel}")),
            kernel: Some(kernel),
            cache_key: keyed.map(|(key, _)| key),
            inputs: inputs.to_vec(),
            needs,
            cached: keyed.is_some_and(|(_, cached)| cached),
        }
    }

    /// The schedule of steps of several rows.
    fn on_cpu(&self) -> Result<Planned, Fault> {
        let context = &self.chain.context;
        let (batches, lowered) = cpu_rows(context, self.set);
        let (batch, candidate) = fitting_rows(context, &self.chain.candidate, &batches, &lowered)?;
        let keyed = batch_key(context, &candidate, &batch);
        let cached = context.workspace.cache.get(keyed.stage, &keyed.key)?.is_some();
        let (name, keyed) = (format!("rows-{}", batch.rows), Some((keyed.key, cached)));
        Ok(self.planned(keys::SCHEDULE, &name, Needs::Host, &[self.import], keyed))
    }

    /// Each kernel compiled, the logits that they are compared with, and each comparison.
    fn on_device(&self) -> Result<Vec<Planned>, Fault> {
        let Beside { chain, set, import, has_pack } = *self;
        let BuildContext { workspace, imported, graph, .. } = chain.context;
        let one = proven(chain)?;
        let Some(planned) = to_compile(chain, set, &one)? else { return Ok(vec![]) };
        let (mut all, mut cubins) = (vec![], vec![]);
        for kernel in &planned.kernels {
            let found = match find_cubin(&chain.context, &chain.host.compiler, &kernel.source) {
                Ok(found) => Some(found),
                Err(NotMade::NoCompiler(_)) => None,
                Err(other) => return Err(other.into()),
            };
            let keyed = found.as_ref().map(|found| (found.keyed.key, found.entry.is_some()));
            all.push(self.planned(keys::COMPILE, &kernel.does.to_string(), Needs::Nvrtc, &[import], keyed));
            cubins.push(found);
        }
        let compiled: Vec<Digest> = all.iter().map(|planned| planned.key).collect();
        let pack = has_pack.then(|| key_of(chain, Stage::Pack));
        let schedule = key_of(chain, Stage::Schedule);
        let expect = if takes_from_device(&one.schedule().program) {
            None
        } else {
            let sizes = sizes_of(&planned, imported.graph.parameter_count(), &one);
            let keyed = checks::texts_keyed(&one, graph, &chain.context.weights_id()?, sizes);
            let cached = workspace.cache.get(keyed.stage, &keyed.key)?.is_some();
            let inputs: Vec<Digest> = [schedule].into_iter().chain(pack).collect();
            all.push(self.planned(keys::EXPECT, "texts", Needs::Host, &inputs, Some((keyed.key, cached))));
            all.last().map(|expect| expect.key)
        };
        let inputs: Vec<Digest> = [schedule].into_iter().chain(compiled).chain(pack).chain(expect).collect();
        let stored = stored_checks(chain, &planned, cubins)?;
        let does: Vec<Does> = planned.kernels.iter().map(|kernel| kernel.does).collect();
        for name in checks::check_names(&does, planned.is_alike) {
            let keyed = stored.iter().find(|(of, ..)| *of == name).map(|(_, key, cached)| (*key, *cached));
            all.push(self.planned(keys::CHECK, &name, Needs::Gpu, &inputs, keyed));
        }
        Ok(all)
    }
}

/// What the checks of a set are called in the cache; none where this machine has no device, or a kernel is not compiled.
fn stored_checks(
    chain: &Chain<'_>,
    planned: &PlannedSet,
    cubins: Vec<Option<Found>>,
) -> Result<Vec<(String, Digest, bool)>, Fault> {
    let (Ok(Some(device)), Ok(_)) = (chain.host.device(chain.context.target), chain.schedule()) else {
        return Ok(vec![]);
    };
    let mut compiled = vec![];
    for (kernel, found) in planned.kernels.iter().zip(cubins) {
        let Some(Found { keyed, entry: Some(entry), nvrtc }) = found else { return Ok(vec![]) };
        let code = Code::of(stored_cubin(&entry, keyed.key, nvrtc, None)?);
        compiled.push(Kernel { does: kernel.does, validated: kernel.validated.clone(), knobs: kernel.knobs, code });
    }
    let set = KernelSet::new(planned.is_alike, compiled)?;
    let stored = Checks::of(chain, device, &|| Ok(chain.pack()?))?.stored(&set)?;
    Ok(stored.into_iter().map(|(name, keyed, cached)| (name, keyed.key, cached)).collect())
}

/// The schedule of the decode kernel with a proof, which is not stored here.
fn proven(chain: &Chain<'_>) -> Result<Arc<Validated>, Fault> {
    let (context, candidate) = (&chain.context, &chain.candidate);
    match chain.validated() {
        Ok(validated) => Ok(Arc::clone(validated)),
        Err(NotMade::NotStored(_)) => {
            let placed = context.lower(candidate).and_then(|program| schedule(program, context.target, candidate));
            let placed = placed.map_err(|reason| {
                Fault::input(format!("the candidate does not fit `{}`: {reason}", context.target.name))
                    .with_remedy(remedy_of(&reason, context))
            })?;
            Ok(Arc::new(prove(context, placed)?))
        }
        Err(other) => Err(other.into()),
    }
}

/// The kernels of a set on a device; `None`: the command does without.
fn to_compile(chain: &Chain<'_>, set: Set, one: &Validated) -> Result<Option<PlannedSet>, Fault> {
    let BuildContext { manifest, target, .. } = chain.context;
    match set {
        Set::Serve => {
            let serving = Serving::of_manifest(manifest, target.kind, 1);
            batch::to_serve(chain, &serving, batch::memory(chain, one)?).map(Some)
        }
        Set::Generate if invariant::is_asked(manifest, target) => {
            let positions = u64::from(manifest.decode.context_max);
            invariant::to_make(chain, Room { rows: 0, sequences: 1, positions }).map(Some)
        }
        Set::Generate => fitting(Prefill::to_make(chain, one)),
    }
}

/// Steps of several rows on the CPU, and the keys of the manifest that lower them.
fn cpu_rows(context: &BuildContext<'_>, set: Set) -> (Vec<Batch>, Vec<&'static str>) {
    let BuildContext { manifest, target, .. } = *context;
    match set {
        Set::Serve => {
            let serving = Serving::of_manifest(manifest, target.kind, 1);
            (cpu_batches(&serving, &manifest.decode), serving.keys())
        }
        Set::Generate => {
            let (batches, lowered) = one_text(&manifest.decode, context.imported.graph.has_state());
            (batches, lowered.to_vec())
        }
    }
}

fn sizes_of(planned: &PlannedSet, parameters: u64, one: &Validated) -> TextSizes {
    let steps = |planned: &kernels::Planned| match (planned.does, &planned.validated) {
        (Does::Steps { rows, by }, Some(validated)) => {
            Some(StepsKernel { validated: Arc::clone(validated), rows, by, knobs: planned.knobs })
        }
        _ => None,
    };
    let steps: Vec<StepsKernel> = planned.kernels.iter().filter_map(steps).collect();
    checks::sizes_of(parameters, one.schedule().program.context_max, &steps)
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
    plan_key(chain, stage.name())
}

fn plan_key(chain: &Chain<'_>, stage: &str) -> Digest {
    let context = &chain.context;
    let schedule = context.schedule_key(&chain.candidate).key;
    let manifest = Digest::of(context.manifest.key_text().as_bytes());
    Digest::of(format!("plan {stage} {} {schedule} {manifest}", context.target.name).as_bytes())
}

/// Runs the stage with this key, and earlier ones whose results are not in the cache; `false` if the manifest has no such stage.
///
/// # Errors
/// What the machine lacks for it, and the faults of a build.
pub fn run_stage(workspace: &Workspace, manifest: &Manifest, key: &Digest) -> Result<bool, Fault> {
    let mut found = None;
    // Kernels are proven for their keys, so they come last. Those that do not fit have none.
    for set in [None, Some(Set::Serve), Some(Set::Generate)] {
        let planned = match &set {
            None => Some(plan_sets(workspace, manifest, &[])?),
            Some(set) => fitting(plan_sets(workspace, manifest, std::slice::from_ref(set)))?,
        };
        let planned = planned.unwrap_or_default().into_iter().find(|planned| planned.key == *key);
        found = planned.map(|planned| (planned, set));
        if found.is_some() {
            break;
        }
    }
    let Some((Planned { target, stage, kernel, .. }, set)) = found else { return Ok(false) };
    let model = import_stage(workspace, manifest)?;
    let Some(target) = manifest.targets.iter().find(|one| one.name == target) else { return Ok(true) };
    let host = Host::new(workspace);
    let chain = Chain::chosen(BuildContext::new(workspace, manifest, target, &model)?, &host)?;
    match (stage, set, kernel.as_deref().and_then(|kernel| kernel.split_once('/'))) {
        (_, Some(set), Some((_, name))) => run_beside(&chain, set, stage, name)?,
        (keys::SCHEDULE, ..) => drop(chain.schedule()?),
        (keys::SOURCE, ..) => drop(chain.source()?),
        (keys::COMPILE, ..) => drop(chain.cubin()?),
        (keys::PACK, ..) => drop(chain.stored_pack()?),
        (keys::CHECK, ..) => {
            Executor::new(&chain)?.checked(&mut None)?;
        }
        _ => drop(evaluate(&chain)?),
    }
    Ok(true)
}

/// Runs a stage of a set.
fn run_beside(chain: &Chain<'_>, set: Set, stage: &str, name: &str) -> Result<(), Fault> {
    let BuildContext { target, imported, .. } = chain.context;
    if target.kind == TargetKind::Cpu {
        let (batches, lowered) = cpu_rows(&chain.context, set);
        return place_rows(&chain.context, &chain.candidate, &batches, &lowered).map(drop);
    }
    let one = chain.validated()?;
    let gone = || Fault::internal(format!("the kernels of `{}` were planned and are gone", set.name()));
    let planned = to_compile(chain, set, one)?.ok_or_else(gone)?;
    let pack = || Ok(chain.pack()?);
    match stage {
        keys::COMPILE => {
            let kernel = planned.kernels.iter().find(|kernel| kernel.does.to_string() == name).ok_or_else(gone)?;
            chain.compile(&kernel.source)?;
        }
        keys::EXPECT => {
            let sizes = sizes_of(&planned, imported.graph.parameter_count(), one);
            Checks::on(chain, host(), &pack)?.texts(sizes)?;
        }
        _ => {
            let found = chain.host.device(target)?.ok_or_else(gone)?;
            let device = execute::open(found, target)?;
            let set = planned.compile(chain)?;
            Checks::of(chain, found, &pack)?.ensure_one(&set, name, &mut || {
                let pack = upload_pack(&device, set.validated(), &chain.pack()?)?;
                set.load(&device, target, checks::STEPS_MAX, &pack, None)
            })?;
        }
    }
    Ok(())
}
