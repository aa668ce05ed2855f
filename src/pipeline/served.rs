//! Owns `Served`: the kernels of a server on a device, from the compiler or from an export, and loading them.

use std::sync::Arc;

use crate::codegen::abi::Queues;
use crate::codegen::emit::Trace;
use crate::cuda::driver::Device;
use crate::cuda::memory::DeviceBuffer;
use crate::cuda::one_row::OneRowSession;
use crate::cuda::rows::RowLauncher;
use crate::cuda::sampler::SamplerSession;
use crate::cuda::waves::WavesSession;
use crate::engine::{DeviceStepper, Stepper};
use crate::error::Fault;
use crate::target::Target;
use crate::validate::Validated;
use crate::waves;

use super::compile::Cubin;
use super::device_steps::StepsKernel;
use super::device_waves::plan_prompts;
use super::invariant;

/// The kernels of a server, proven and compiled.
pub(super) struct Served {
    /// The schedule of the kernel for most rows.
    pub validated: Arc<Validated>,
    /// Requests that run at a time, at most.
    pub running_max: u32,
    /// The kernel that chooses tokens.
    pub sampler: Code,
    pub kernels: Kernels,
}

/// A cubin, and the version of the compiler that made it.
pub(super) struct Code {
    pub bytes: Vec<u8>,
    pub nvrtc: String,
}

/// What runs the steps of a device.
pub(super) enum Kernels {
    Fastest(Fastest),
    /// Those of one schedule that add up in one order, by their rows, ascending.
    Alike {
        validated: Arc<Validated>,
        kernels: Vec<(u32, Code)>,
    },
}

/// For each step the fastest kernel.
pub(super) struct Fastest {
    /// For steps of one row, over the cache of the others.
    pub one_row: Option<(Arc<Validated>, Code)>,
    /// Ascending by rows, over one cache. One at least.
    pub several: Vec<(StepsKernel, Code)>,
    /// For steps of which few rows have long histories: as many rows as one of `several` has.
    pub ragged: Option<(StepsKernel, Code)>,
    /// The kernels of waves over the pages of the first of them: of chunks, and of their tail. None: there are no waves.
    pub waves: Vec<Code>,
}

/// Sessions of steps, ascending by rows, and the one that reads long chunks.
type Sessions = (Vec<Box<dyn RowLauncher>>, Option<WavesSession>);

impl Code {
    pub fn of(cubin: Cubin) -> Code {
        Code { bytes: cubin.bytes, nvrtc: cubin.nvrtc }
    }
}

impl Served {
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
        let ((sessions, waves), rows): (Sessions, u32) = match &self.kernels {
            Kernels::Fastest(fastest) => (fastest.load(device, target, steps_max, pack)?, 0),
            Kernels::Alike { validated, kernels } => {
                let cubins = kernels.iter().map(|(_, code)| code.bytes.as_slice());
                let sessions = invariant::load(device, target, validated, cubins, steps_max, pack)?;
                let sessions = sessions.into_iter().map(|session| Box::new(session) as Box<dyn RowLauncher>);
                ((sessions.collect(), None), alike_rows(self.running_max))
            }
        };
        let sampler = match sessions.last() {
            Some(largest) => {
                let (vocab, rows) = (largest.vocab(), largest.shape().rows);
                Some(SamplerSession::load(device, &self.sampler.bytes, vocab, rows, steps_max).map_err(Fault::from)?)
            }
            None => None,
        };
        let stepper = DeviceStepper::new(sessions, waves, sampler)
            .ok_or_else(|| Fault::internal("no kernel for several rows"))?;
        Ok(Box::new(stepper.with_rows(rows)))
    }
}

impl Fastest {
    /// Loads the kernels over one cache.
    fn load(
        &self,
        device: &Device,
        target: &Target,
        steps_max: u32,
        pack: &Arc<DeviceBuffer>,
    ) -> Result<Sessions, Fault> {
        let Fastest { one_row, several, ragged, waves } = self;
        let mut sessions: Vec<Box<dyn RowLauncher>> = vec![];
        // The one that cuts histories follows the one that does not: a step is on the first that has as many rows, unless another one gains.
        let cut = ragged.as_ref();
        let at = cut.map_or(0, |(cut, _)| several.iter().take_while(|(kernel, _)| kernel.rows <= cut.rows).count());
        for (kernel, code) in several[..at].iter().chain(cut).chain(&several[at..]) {
            let cache = sessions.first().map(|session| session.cache());
            sessions.push(kernel.load(device, target, &code.bytes, steps_max, Arc::clone(pack), cache)?);
        }
        let cubins: Vec<&[u8]> = waves.iter().map(|code| code.bytes.as_slice()).collect();
        let waves = match sessions.first() {
            Some(first) if !cubins.is_empty() => {
                let plan = plan_prompts(target, &several[0].0.validated)?;
                Some(plan.load(device, &cubins, Trace::Off, first.pack(), first.cache())?)
            }
            _ => None,
        };
        if let (Some((validated, code)), Some(first)) = (one_row, sessions.first()) {
            let (queues, pack, cache) = (Queues::of(validated), first.pack(), Some(first.cache()));
            let one = OneRowSession::load(device, &queues, &code.bytes, steps_max, pack, cache)?;
            sessions.insert(0, Box::new(one));
        }
        Ok((sessions, waves))
    }
}

/// Rows of a launch of kernels that add up in one order: whole launches of the one for most rows, with a row for each running request.
pub(super) fn alike_rows(running_max: u32) -> u32 {
    running_max.max(1).next_multiple_of(waves::ALIKE_ROWS_MAX)
}
