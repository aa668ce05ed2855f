//! Owns `KernelSet`: kernels over one pool of pages, each found by what it does, from the compiler or from an export, and loading them.

use std::fmt;
use std::sync::Arc;

use crate::candidate::WaveKnobs;
use crate::codegen::abi::Queues;
use crate::codegen::emit::Trace;
use crate::cuda::driver::{Device, DeviceIdentity};
use crate::cuda::memory::DeviceBuffer;
use crate::cuda::one_row::OneRowSession;
use crate::cuda::rows::RowLauncher;
use crate::cuda::sampler::SamplerSession;
use crate::cuda::states::StateRows;
use crate::cuda::waves::{StepsSession, WavesSession};
use crate::engine::{DeviceStepper, DeviceSteps, Stepper};
use crate::error::Fault;
use crate::target::Target;
use crate::validate::Validated;
use crate::waves;

use super::chain::Chain;
use super::checks::{self, Checks};
use super::compile::Cubin;
use super::device_steps::{By, StepsKernel};
use super::device_waves::{PromptCubins, plan_prompts};
use super::execute::upload_pack;
use super::invariant;
use super::stages::Generated;

/// What a kernel of a set does. No two kernels of a set do the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Does {
    /// Steps of up to so many rows.
    Steps { rows: u32, by: By },
    /// Reads long chunks of a prompt.
    Chunk,
    /// Decides what follows a chunk.
    Tail,
    /// Chooses tokens from logits.
    Sampler,
}

impl fmt::Display for Does {
    /// The name of the kernel, in keys, messages and reports.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Does::Steps { rows, by: By::Splits } => write!(f, "steps-{rows}-splits"),
            Does::Steps { rows, .. } => write!(f, "steps-{rows}"),
            Does::Chunk => f.write_str("chunk"),
            Does::Tail => f.write_str("tail"),
            Does::Sampler => f.write_str("sampler"),
        }
    }
}

/// A cubin, and the version of the compiler that made it.
#[derive(Debug, Clone)]
pub struct Code {
    pub bytes: Vec<u8>,
    pub nvrtc: String,
}

impl Code {
    pub(super) fn of(cubin: Cubin) -> Code {
        Code { bytes: cubin.bytes, nvrtc: cubin.nvrtc }
    }
}

/// A kernel that was proven and compiled.
#[derive(Debug, Clone)]
pub struct Kernel {
    pub does: Does,
    /// The schedule whose pack, caches and pages it has. `None`: a sampler has none.
    pub validated: Option<Arc<Validated>>,
    /// Of a wave kernel whose plan has some.
    pub knobs: WaveKnobs,
    pub code: Code,
}

/// Kernels over one pool of pages.
#[derive(Debug, Clone)]
pub struct KernelSet {
    /// The schedule of the kernel for most rows.
    validated: Arc<Validated>,
    /// All of its steps add up in one order.
    is_alike: bool,
    kernels: Vec<Kernel>,
}

/// A kernel before it is compiled.
pub(super) struct Planned {
    pub does: Does,
    pub validated: Option<Arc<Validated>>,
    /// Of a wave kernel whose plan has some.
    pub knobs: WaveKnobs,
    pub source: Generated,
}

/// Kernels over one pool of pages before they are compiled.
pub(super) struct PlannedSet {
    /// All steps add up in one order.
    pub is_alike: bool,
    pub kernels: Vec<Planned>,
}

impl PlannedSet {
    /// Compiles them.
    ///
    /// # Errors
    /// What the compiler refuses.
    pub fn compile(self, chain: &Chain<'_>) -> Result<KernelSet, Fault> {
        KernelSet::compile(chain, self.is_alike, self.kernels)
    }
}

/// The kernels of a set on a device.
pub struct LoadedSet {
    /// Steps, in the order of [`KernelSet::steps`]. They share a cache.
    pub steps: Vec<(Does, Box<dyn RowLauncher>)>,
    /// What reads long chunks.
    pub waves: Option<WavesSession>,
    pub sampler: Option<SamplerSession>,
}

impl KernelSet {
    /// # Errors
    /// Two kernels that do the same, or none that runs steps.
    pub fn new(is_alike: bool, kernels: Vec<Kernel>) -> Result<KernelSet, Fault> {
        let double = |(at, kernel): (usize, &Kernel)| kernels[..at].iter().any(|other| other.does == kernel.does);
        if let Some((_, kernel)) = kernels.iter().enumerate().find(|all| double(*all)) {
            return Err(Fault::internal(format!("two kernels `{}` in one set", kernel.does)));
        }
        let rows = |kernel: &Kernel| match (kernel.does, &kernel.validated) {
            (Does::Steps { rows, .. }, Some(validated)) => Some((rows, Arc::clone(validated))),
            _ => None,
        };
        let largest = kernels.iter().filter_map(rows).max_by_key(|(rows, _)| *rows);
        let (_, validated) = largest.ok_or_else(|| Fault::internal("a set without a kernel for steps"))?;
        Ok(KernelSet { validated, is_alike, kernels })
    }

    /// Compiles what was planned.
    ///
    /// # Errors
    /// What the compiler refuses.
    pub(super) fn compile(chain: &Chain<'_>, is_alike: bool, planned: Vec<Planned>) -> Result<KernelSet, Fault> {
        let named =
            planned.into_iter().map(|Planned { does, validated, knobs, source }| ((does, validated, knobs), source));
        let compiled = chain.compile_named(named.collect())?;
        let kernel = |((does, validated, knobs), cubin)| Kernel { does, validated, knobs, code: Code::of(cubin) };
        KernelSet::new(is_alike, compiled.into_iter().map(kernel).collect())
    }

    /// The schedule of the kernel for most rows.
    pub fn validated(&self) -> &Arc<Validated> {
        &self.validated
    }

    /// Whether all steps add up in one order.
    pub fn is_alike(&self) -> bool {
        self.is_alike
    }

    pub fn all(&self) -> &[Kernel] {
        &self.kernels
    }

    /// What each of its kernels does.
    pub fn does(&self) -> Vec<Does> {
        self.kernels.iter().map(|kernel| kernel.does).collect()
    }

    pub fn get(&self, does: Does) -> Option<&Kernel> {
        self.kernels.iter().find(|kernel| kernel.does == does)
    }

    /// Kernels of steps, ascending by rows. One that cuts histories follows the one that does not: a step is on the first that has as many rows,
    /// unless another one gains.
    pub fn steps(&self) -> Vec<(StepsKernel, &Kernel)> {
        let steps = |kernel: &'_ Kernel| match (kernel.does, &kernel.validated) {
            (Does::Steps { rows, by }, Some(validated)) => {
                Some(StepsKernel { validated: validated.clone(), rows, by, knobs: kernel.knobs })
            }
            _ => None,
        };
        let mut all: Vec<_> = self.kernels.iter().filter_map(|kernel| Some((steps(kernel)?, kernel))).collect();
        all.sort_by_key(|(steps, _)| (steps.rows, steps.by == By::Splits));
        all
    }

    /// The kernels of waves that read prompts; `None`: there are none.
    pub fn prompts(&self) -> Option<PromptCubins<'_>> {
        let &Kernel { ref code, knobs, .. } = self.get(Does::Chunk)?;
        let tail = self.get(Does::Tail).map(|tail| tail.code.bytes.as_slice());
        Some(PromptCubins { chunk: &code.bytes, tail, knobs })
    }

    /// The first kernel for several rows: kernels of waves for prompts are over its pages.
    pub fn first_of_several(&self) -> Option<StepsKernel> {
        self.steps().into_iter().map(|(steps, _)| steps).find(|steps| steps.rows > 1)
    }

    /// Loads all kernels over one cache: a new one, unless `cache` is given. A launch has at most `steps_max` steps.
    ///
    /// # Errors
    /// What the device refuses.
    pub fn load(
        &self,
        device: &Device,
        target: &Target,
        steps_max: u32,
        pack: &Arc<DeviceBuffer>,
        mut cache: Option<Arc<DeviceBuffer>>,
    ) -> Result<LoadedSet, Fault> {
        let mut steps: Vec<(Does, Box<dyn RowLauncher>)> = vec![];
        let alike = if self.is_alike { Some(invariant::plan(target, &self.validated)?) } else { None };
        let (alone, several): (Vec<_>, Vec<_>) = self.steps().into_iter().partition(|(of, _)| of.rows == 1);
        for (of, kernel) in several {
            let (cubin, pack, shared) = (&kernel.code.bytes, Arc::clone(pack), cache.clone());
            let session: Box<dyn RowLauncher> = match &alike {
                Some(alike) => {
                    let proven = invariant::with_rows(alike, of.rows)?;
                    Box::new(StepsSession::load(device, proven, cubin, Trace::Off, steps_max, pack, shared)?)
                }
                None => of.load(device, target, cubin, steps_max, pack, shared)?,
            };
            cache.get_or_insert_with(|| session.cache());
            steps.push((kernel.does, session));
        }
        let waves = match (self.prompts(), self.first_of_several(), &cache) {
            (Some(cubins), Some(first), Some(cache)) => {
                let plan = plan_prompts(target, &first.validated, &cubins.knobs)?;
                Some(plan.load(device, cubins, Trace::Off, Arc::clone(pack), Arc::clone(cache))?)
            }
            _ => None,
        };
        for (of, kernel) in alone {
            let (queues, pack, shared) = (Queues::of(&of.validated), Arc::clone(pack), cache.clone());
            let one = OneRowSession::load(device, &queues, &kernel.code.bytes, steps_max, pack, shared)?;
            steps.insert(0, (kernel.does, Box::new(one)));
        }
        let sampler = match (self.get(Does::Sampler), steps.last()) {
            (Some(sampler), Some((_, largest))) => {
                let (vocab, rows) = (largest.vocab(), largest.shape().rows);
                Some(SamplerSession::load(device, &sampler.code.bytes, vocab, rows, steps_max)?)
            }
            _ => None,
        };
        Ok(LoadedSet { steps, waves, sampler })
    }
}

/// The kernels of a server, proven and compiled.
pub(super) struct Served {
    /// Requests that run at a time, at most.
    pub running_max: u32,
    pub set: KernelSet,
}

impl Served {
    /// Makes sure that all kernels were compared on a device of this kind.
    ///
    /// # Errors
    /// A kernel that computes something else; what the device refuses.
    pub fn ensure_checked(&self, chain: &Chain<'_>, found: &DeviceIdentity, device: &Device) -> Result<(), Fault> {
        let (set, pack) = (&self.set, || Ok(chain.pack()?));
        Checks::of(chain, found, &pack)?.ensure(set, &mut || {
            let pack = upload_pack(device, set.validated(), &chain.pack()?)?;
            set.load(device, chain.context.target, checks::STEPS_MAX, &pack, None)
        })
    }

    /// What runs steps, with a cache of its own. A launch has at most `steps_max` steps.
    ///
    /// # Errors
    /// What the device refuses.
    pub fn stepper(
        &self,
        device: &Device,
        target: &Target,
        steps_max: u32,
        pack: &Arc<DeviceBuffer>,
    ) -> Result<Box<dyn Stepper>, Fault> {
        let LoadedSet { steps, waves, sampler } = self.set.load(device, target, steps_max, pack, None)?;
        let sessions = steps.into_iter().map(|(_, session)| session).collect();
        let stepper = DeviceStepper::new(sessions, waves, sampler)
            .ok_or_else(|| Fault::internal("no kernel for several rows"))?;
        let rows = if self.set.is_alike { alike_rows(self.running_max) } else { 0 };
        Ok(Box::new(stepper.with_rows(rows).with_states(self.states())))
    }

    fn states(&self) -> StateRows {
        StateRows::of(self.set.validated().schedule())
    }

    /// Rows of the kernel that verifies proposals of `most` tokens: a row and those of a proposal for each running request, or as many as there are.
    fn verifying_rows(&self, most: usize) -> u32 {
        let wanted = self.running_max as usize * (1 + most);
        let is_batch = |of: &StepsKernel| of.by == By::Words && of.rows > 1 && of.launch_rows() == of.rows;
        let rows = self.set.steps().into_iter().filter(|(of, _)| is_batch(of)).map(|(of, _)| of.rows);
        let rows: Vec<u32> = rows.collect();
        rows.iter().find(|rows| **rows as usize >= wanted).or(rows.last()).copied().unwrap_or(0)
    }

    /// Refuses proposals of more tokens than a batch kernel has rows beside one.
    ///
    /// # Errors
    /// Proposals of `most` tokens, if no batch kernel has a row more.
    pub fn refuse_proposals(&self, most: u32) -> Result<(), Fault> {
        let rows = self.verifying_rows(most as usize);
        if most == 0 || most < rows {
            return Ok(());
        }
        let message = format!(
            "`--draft mtp:{most}` needs a batch kernel for steps of {} rows, found steps of at most {rows}",
            most + 1
        );
        Err(Fault::input(message).with_remedy("lower `--draft mtp:N`, or leave it out"))
    }

    /// What runs steps that verify proposals of `most` tokens, with a cache of its own.
    ///
    /// # Errors
    /// What the device refuses; no batch kernel with as many rows.
    pub fn verifying(
        &self,
        device: &Device,
        target: &Target,
        pack: &Arc<DeviceBuffer>,
        most: usize,
    ) -> Result<DeviceSteps, Fault> {
        let rows = self.verifying_rows(most);
        let LoadedSet { steps, waves, .. } = self.set.load(device, target, 1, pack, None)?;
        let mut sessions = steps.into_iter().map(|(_, session)| session);
        let verifies = sessions.find(|session| session.shape().rows == rows && session.keeps_left());
        verifies
            .and_then(|session| DeviceSteps::new(session, waves, self.states()))
            .ok_or_else(|| Fault::internal(format!("no batch kernel of {rows} rows keeps what a draft reads")))
    }
}

/// Rows of a launch of kernels that add up in one order: whole launches of the one for most rows, with a row for each running request.
pub(super) fn alike_rows(running_max: u32) -> u32 {
    running_max.max(1).next_multiple_of(waves::ALIKE_ROWS_MAX)
}
