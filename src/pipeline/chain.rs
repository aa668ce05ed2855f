//! Owns the chain of stages of one candidate on one target, from the schedule to what is measured.
//!
//! A command asks for the artefact that it needs; the chain finds or makes what comes before it, each part once. What cannot
//! be made comes back as [`NotMade`], with the reason. A chain that only looks makes nothing and stops at the first entry
//! that is not stored: `explain` asks such a chain for the key of every stage, so it accounts for what a build would do.

use std::cell::OnceCell;
use std::sync::{Arc, OnceLock};

use crate::cache::{CacheError, Entry};
use crate::candidate::{Candidate, FormatCause, Infeasible};
use crate::cuda::driver::DeviceIdentity;
use crate::dtype::DType;
use crate::error::Fault;
use crate::flywheel::{Origin, Verdict};
use crate::interp::Pack;
use crate::target::{Target, TargetKind};
use crate::validate::Validated;

use super::Workspace;
use super::compile::{Compiler, Cubin, Found, compile, compile_each, find_cubin, stored_cubin};
use super::execute::{Devices, hardware_of_all, host};
use super::keys::{self, CheckKey, Hardware, Keyed, MeasureKey, SubjectKey, WeightsId};
use super::rows::TrialRow;
use super::stages::{
    BuildContext, Generated, StoredSchedule, map_pack, memory_pack, place, source_bytes, store_pack, stored_source,
};

/// A stage of a target. The import comes before all of them and belongs to no target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Schedule,
    Source,
    Compile,
    Pack,
    Check,
    Measure,
}

impl Stage {
    /// The stages of a target, in the order in which a build fills them.
    pub fn of(kind: TargetKind) -> &'static [Stage] {
        match kind {
            TargetKind::Cpu => &[Stage::Schedule, Stage::Pack, Stage::Check, Stage::Measure],
            TargetKind::Cuda => {
                &[Stage::Schedule, Stage::Source, Stage::Compile, Stage::Pack, Stage::Check, Stage::Measure]
            }
        }
    }

    /// The name in keys, reports and folders of the cache.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Schedule => keys::SCHEDULE,
            Stage::Source => keys::SOURCE,
            Stage::Compile => keys::COMPILE,
            Stage::Pack => keys::PACK,
            Stage::Check => keys::CHECK,
            Stage::Measure => keys::MEASURE,
        }
    }
}

/// Why a chain gave no artefact.
#[derive(Debug)]
pub(super) enum NotMade {
    /// The candidate does not fit the target.
    Infeasible(Infeasible),
    /// There is no compiler here, or none that knows the architecture, and no cubin of this source is stored.
    NoCompiler(Fault),
    /// This machine has no device that the target describes.
    NoDevice {
        target: String,
        reason: String,
    },
    /// A chain that only looks found no entry of this stage.
    NotStored(Stage),
    Fault(Fault),
}

impl From<Fault> for NotMade {
    fn from(fault: Fault) -> NotMade {
        NotMade::Fault(fault)
    }
}

impl From<CacheError> for NotMade {
    fn from(error: CacheError) -> NotMade {
        NotMade::Fault(error.into())
    }
}

/// For commands that can do nothing without the artefact.
impl From<NotMade> for Fault {
    fn from(not_made: NotMade) -> Fault {
        match not_made {
            NotMade::Fault(fault) | NotMade::NoCompiler(fault) => fault,
            NotMade::Infeasible(reason) => {
                Fault::internal(format!("a candidate that was placed before does not fit: {reason}"))
            }
            NotMade::NoDevice { target, reason } => {
                Fault::environment(format!("target `{target}` has no device here: {reason}"))
                    .with_remedy("add a `[[target]]` with `record = \"cpu\"` to run on any machine")
            }
            NotMade::NotStored(stage) => Fault::internal(format!("the result of `{}` is not stored", stage.name())),
        }
    }
}

/// What the user can do about a kernel that does not fit a target.
pub(super) fn remedy_of(reason: &Infeasible, context: &BuildContext<'_>) -> &'static str {
    let BuildContext { manifest, knobs, .. } = context;
    let precision = manifest.precision;
    match reason {
        Infeasible::Format { cause, .. } => match cause {
            FormatCause::Activations => "set `weights = \"bf16\"`, or `activations = \"bf16\"`, in `[precision]`",
            // Only parts of one matrix that differ are values of another type.
            FormatCause::Plain if precision.wire == DType::Bf16 => {
                "set `weights = \"fp32\"` and `activations = \"bf16\"` in `[precision]`, or take the target `cpu`"
            }
            FormatCause::Plain => "set `weights = \"fp32\"` in `[precision]`, or take the target `cpu`",
            FormatCause::Groups => "take the target `cpu`",
        },
        Infeasible::DeviceMemory { is_cache: true, .. } => {
            "lower `decode.context_max`, set `cache = \"fp8\"` in `[precision]`, or take a target with more memory"
        }
        Infeasible::DeviceMemory { .. } => {
            "round the weights, with `weights = \"int8\"` or `\"int4:128\"` in `[precision]`, or take a target with more memory"
        }
        Infeasible::Alone { .. } => "leave out `--op`, or take an op that all layers have",
        Infeasible::Experts { .. } | Infeasible::State { .. } | Infeasible::Feed { .. } => {
            "take another model: no target computes this one"
        }
        Infeasible::Devices { .. } => {
            "leave out the target's `devices`, or take a dense model whose layers have attention"
        }
        Infeasible::HeadDim { .. } => "take a model whose heads have an even width: no target computes this one",
        Infeasible::NormAfterRope => "take a model that norms single heads: no target computes this one",
        _ if knobs.is_some() => "change the manifest's `candidate`, or leave it out",
        Infeasible::SharedMemory { .. } if precision.weights == DType::F32 => {
            "set `weights = \"bf16\"` in `[precision]`, which halves what a block holds, or take a target with more shared memory"
        }
        Infeasible::SharedMemory { .. } => "take a target with more shared memory",
        Infeasible::HistoryChunk { .. } if precision.cache == DType::F32 => "set `cache = \"bf16\"` in `[precision]`",
        // The default has no other knobs than these, and fits them to the target.
        Infeasible::HistoryChunk { .. }
        | Infeasible::Sms { .. }
        | Infeasible::Knob { .. }
        | Infeasible::Mechanism { .. } => {
            "set a `candidate` for the target: `monobloc show candidate` prints the knobs"
        }
    }
}

/// What this machine compiles with and runs on; each is looked for when it is first needed.
pub(super) struct Host<'a> {
    pub compiler: Compiler<'a>,
    devices: OnceLock<Devices>,
}

impl<'a> Host<'a> {
    pub fn new(workspace: &'a Workspace) -> Host<'a> {
        Host { compiler: Compiler::new(workspace), devices: OnceLock::new() }
    }

    /// The device that runs a target; `None` for the CPU, which needs none.
    pub fn device(&self, target: &Target) -> Result<Option<&DeviceIdentity>, NotMade> {
        if target.kind == TargetKind::Cpu {
            return Ok(None);
        }
        let found = self.devices.get_or_init(Devices::list).find(target);
        found.map(Some).map_err(|reason| NotMade::NoDevice { target: target.name.clone(), reason })
    }

    /// The hardware of a target, as it is named in keys.
    pub fn hardware(&self, target: &Target) -> Result<Hardware, NotMade> {
        if self.device(target)?.is_none() {
            return Ok(host());
        }
        let found = self.devices.get_or_init(Devices::list).find_all(target);
        let found = found.map_err(|reason| NotMade::NoDevice { target: target.name.clone(), reason })?;
        Ok(hardware_of_all(&found).unwrap_or_else(host))
    }
}

/// The stages of one candidate on one target. Each artefact is made when it is first asked for, and kept.
pub(super) struct Chain<'a> {
    pub context: BuildContext<'a>,
    pub host: &'a Host<'a>,
    pub candidate: Candidate,
    /// Nothing is made.
    looks: bool,
    schedule: OnceCell<Arc<StoredSchedule>>,
    source: OnceCell<Generated>,
    /// The fault is that of [`NotMade::NoCompiler`].
    cubin: OnceCell<Result<Box<Cubin>, Fault>>,
    /// `None` for a pack that is never stored.
    pack: OnceCell<Option<Entry>>,
}

impl<'a> Chain<'a> {
    pub fn new(context: BuildContext<'a>, host: &'a Host<'a>, candidate: Candidate) -> Chain<'a> {
        let (schedule, source, cubin, pack) = (OnceCell::new(), OnceCell::new(), OnceCell::new(), OnceCell::new());
        Chain { context, host, candidate, looks: false, schedule, source, cubin, pack }
    }

    /// A chain that makes nothing.
    pub fn looking(context: BuildContext<'a>, host: &'a Host<'a>, candidate: Candidate) -> Chain<'a> {
        Chain { looks: true, ..Chain::new(context, host, candidate) }
    }

    /// The chain of a schedule that was placed before.
    pub fn of_schedule(context: BuildContext<'a>, host: &'a Host<'a>, schedule: Arc<StoredSchedule>) -> Chain<'a> {
        let chain = Chain::new(context, host, schedule.candidate.clone());
        Chain { schedule: OnceCell::from(schedule), ..chain }
    }

    /// The candidate that is built, placed: the best of a search, else what the manifest names, else the default.
    ///
    /// # Errors
    /// A candidate that does not fit, which is a row of the trials, too.
    pub fn chosen(context: BuildContext<'a>, host: &'a Host<'a>) -> Result<Chain<'a>, Fault> {
        let chain = Chain::new(context, host, context.candidate());
        let reason = match chain.schedule() {
            Ok(_) => return Ok(chain),
            Err(NotMade::Infeasible(reason)) => reason,
            Err(other) => return Err(other.into()),
        };
        let row = TrialRow { chain: &chain, wave: None, hardware: None, origin: Origin::default(), asked: None };
        row.append(None, None, vec![Verdict::Infeasible { detail: reason.to_string() }])?;
        let message = format!("the candidate does not fit `{}`: {reason}", context.target.name);
        Err(Fault::input(message).with_remedy(remedy_of(&reason, &context)))
    }

    /// The key of a stage, once what it depends on is there; `None` where this model has no such stage.
    ///
    /// # Errors
    /// An earlier stage has no result yet. Stages that execute wait for the device first.
    pub fn key(&self, stage: Stage) -> Result<Option<Keyed>, NotMade> {
        let context = &self.context;
        match stage {
            Stage::Schedule => Ok(Some(context.schedule_key(&self.candidate))),
            Stage::Source => Ok(Some(context.source_key(self.schedule()?.content))),
            Stage::Compile => Ok(Some(find_cubin(context, &self.host.compiler, self.source()?)?.keyed)),
            Stage::Pack => {
                self.ready()?;
                self.pack_key()
            }
            Stage::Check | Stage::Measure => {
                let (check, measure) = self.execution_keys(&self.ready()?)?;
                Ok(Some(if stage == Stage::Check { check } else { measure }))
            }
        }
    }

    /// The hardware that executes it, once there is something to execute.
    fn ready(&self) -> Result<Hardware, NotMade> {
        self.schedule()?;
        if self.context.target.kind == TargetKind::Cuda {
            self.source()?;
        }
        let hardware = self.host.hardware(self.context.target)?;
        self.cubin()?;
        Ok(hardware)
    }

    /// The entry of a stage, made where it is missing. A chain that looks makes nothing.
    fn entry(&self, stage: Stage, build: impl FnOnce() -> Result<Vec<u8>, Fault>) -> Result<Entry, NotMade> {
        let context = &self.context;
        let keyed = self.key(stage)?.ok_or(NotMade::NotStored(stage))?;
        if self.looks {
            return self.stored(stage, &keyed);
        }
        let title = context.title(stage.name());
        let (entry, _) = context.workspace.stage(&keyed, &context.subject(), &title, "", build)?;
        Ok(entry)
    }

    fn stored(&self, stage: Stage, keyed: &Keyed) -> Result<Entry, NotMade> {
        self.context.workspace.with_link(keyed)?.ok_or(NotMade::NotStored(stage))
    }

    /// The proven schedule.
    pub fn schedule(&self) -> Result<&Arc<StoredSchedule>, NotMade> {
        if let Some(schedule) = self.schedule.get() {
            return Ok(schedule);
        }
        let schedule = if self.looks {
            let entry = self.stored(Stage::Schedule, &self.context.schedule_key(&self.candidate))?;
            StoredSchedule::of_entry(self.candidate.clone(), entry)
        } else {
            place(&self.context, &self.candidate)?
        };
        Ok(self.schedule.get_or_init(|| Arc::new(schedule)))
    }

    /// The schedule with a proof of this process.
    pub fn validated(&self) -> Result<&Arc<Validated>, NotMade> {
        Ok(self.schedule()?.validated(self.context.target)?)
    }

    /// The kernel's text.
    pub fn source(&self) -> Result<&Generated, NotMade> {
        if let Some(source) = self.source.get() {
            return Ok(source);
        }
        let (schedule, target) = (self.schedule()?, self.context.target);
        let entry = self.entry(Stage::Source, || source_bytes(schedule.validated(target)?, target))?;
        let source = Generated { source: stored_source(&entry)?, content: entry.content() };
        Ok(self.source.get_or_init(|| source))
    }

    /// The compiled kernel; `None` for the CPU, whose interpreter executes the schedule.
    pub fn cubin(&self) -> Result<Option<&Cubin>, NotMade> {
        if self.context.target.kind == TargetKind::Cpu {
            return Ok(None);
        }
        if self.cubin.get().is_none() {
            let cubin = if self.looks { self.stored_cubin() } else { self.compile(self.source()?) };
            self.keep_cubin(cubin)?;
        }
        match self.cubin.get() {
            Some(Ok(cubin)) => Ok(Some(cubin)),
            Some(Err(missing)) => Err(NotMade::NoCompiler(missing.clone())),
            None => Err(Fault::internal("a cubin was kept and is gone").into()),
        }
    }

    fn keep_cubin(&self, cubin: Result<Box<Cubin>, NotMade>) -> Result<(), NotMade> {
        let kept = match cubin {
            Ok(cubin) => Ok(cubin),
            Err(NotMade::NoCompiler(missing)) => Err(missing),
            Err(other) => return Err(other),
        };
        let _ = self.cubin.set(kept);
        Ok(())
    }

    fn stored_cubin(&self) -> Result<Box<Cubin>, NotMade> {
        let Found { keyed, nvrtc, .. } = find_cubin(&self.context, &self.host.compiler, self.source()?)?;
        Ok(Box::new(stored_cubin(&self.stored(Stage::Compile, &keyed)?, keyed.key, nvrtc, None)?))
    }

    /// Compiles a source for this target: the chain's own, or one that is no part of it.
    pub fn compile(&self, source: &Generated) -> Result<Box<Cubin>, NotMade> {
        compile(&self.host.compiler, &self.context, source)
    }

    /// Compiles several sources for this target at once, on all cores. Each cubin has the name of its source.
    pub fn compile_named<N>(&self, named: Vec<(N, Generated)>) -> Result<Vec<(N, Cubin)>, NotMade> {
        let sources: Vec<_> = named.iter().map(|(_, source)| (self.context, source)).collect();
        let cubins = compile_each(&self.host.compiler, &sources);
        named.into_iter().zip(cubins).map(|((name, _), cubin)| Ok((name, *cubin?))).collect()
    }

    /// Makes what can be made without weights and without a device.
    pub fn make_kernel(&self) -> Result<(), NotMade> {
        self.validated()?;
        self.cubin()?;
        Ok(())
    }

    /// The key of the pack; `None` for synthetic weights, whose packs are never stored: they can be made again from
    /// nothing, at the speed of memory.
    pub fn pack_key(&self) -> Result<Option<Keyed>, NotMade> {
        Ok(match self.context.weights_id()? {
            WeightsId::Synthetic { .. } => None,
            weights => Some(self.context.pack_key(&self.candidate, &weights)),
        })
    }

    /// Makes sure that a pack that is stored at all is stored.
    pub fn stored_pack(&self) -> Result<Option<&Entry>, NotMade> {
        if let Some(entry) = self.pack.get() {
            return Ok(entry.as_ref());
        }
        let entry = match self.pack_key()? {
            Some(keyed) => Some(store_pack(&self.context, self.schedule()?, &keyed)?),
            None => None,
        };
        Ok(self.pack.get_or_init(|| entry).as_ref())
    }

    /// The weights in the order in which the schedule reads them: mapped from the cache, or made in memory.
    pub fn pack(&self) -> Result<Pack, NotMade> {
        Ok(match self.stored_pack()? {
            Some(entry) => map_pack(entry)?,
            None => memory_pack(&self.context, self.validated()?)?,
        })
    }

    /// Keys of check and measure.
    pub fn execution_keys(&self, hardware: &Hardware) -> Result<(Keyed, Keyed), NotMade> {
        let BuildContext { graph, target, manifest, .. } = self.context;
        let (schedule, cubin) = (self.schedule()?.content, self.cubin()?.map(|cubin| cubin.digest));
        let (weights, candidate) = (&self.context.weights_id()?, &self.candidate);
        let subject = SubjectKey { schedule, graph, weights, candidate, target, cubin };
        let decode = &manifest.decode;
        let check = CheckKey {
            subject: &subject,
            hardware,
            positions: &decode.check_positions,
            steps_per_launch: cubin.map(|_| decode.steps_per_launch),
        };
        let measure = MeasureKey {
            subject: &subject,
            hardware,
            positions: &decode.time_positions,
            steps_per_launch: decode.steps_per_launch,
            read_bytes_per_s: manifest.measured(target).read_bytes_per_s,
        };
        Ok((check.keyed(), measure.keyed()))
    }

    /// What was made so far: the schedule, the source and the cubin.
    pub fn made(&self) -> (Option<&StoredSchedule>, Option<&Generated>, Option<&Cubin>) {
        let cubin = self.cubin.get().and_then(|cubin| cubin.as_ref().ok());
        (self.schedule.get().map(Arc::as_ref), self.source.get(), cubin.map(Box::as_ref))
    }
}

/// Compiles the kernels of all chains at once, on all cores; answers in the order of the chains. A chain without a compiler
/// says so when it is asked.
pub(super) fn compile_all<'a>(host: &Host<'_>, chains: &'a [Chain<'_>]) -> Vec<Result<(), NotMade>> {
    let source = |chain: &'a Chain<'_>| match chain.context.target.kind {
        TargetKind::Cpu => Ok(None),
        TargetKind::Cuda => chain.source().map(Some),
    };
    let sources: Vec<Result<Option<&Generated>, NotMade>> = chains.iter().map(source).collect();
    let asked = chains.iter().zip(&sources);
    let asked: Vec<_> = asked.filter_map(|(chain, source)| Some((chain.context, (*source.as_ref().ok()?)?))).collect();
    let mut cubins = compile_each(&host.compiler, &asked).into_iter();
    let keep = |(chain, source): (&Chain<'_>, Result<Option<&Generated>, NotMade>)| match source? {
        Some(_) => cubins.next().map_or(Ok(()), |cubin| chain.keep_cubin(cubin)),
        None => Ok(()),
    };
    chains.iter().zip(sources).map(keep).collect()
}
