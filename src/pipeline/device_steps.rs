//! Owns `StepsKernel`: what runs steps of a number of rows on a device.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::candidate::{Candidate, WaveKnobs};
use crate::codegen::abi::Queues;
use crate::codegen::emit::Trace;
use crate::cuda::driver::Device;
use crate::cuda::memory::DeviceBuffer;
use crate::cuda::rows::{RowLauncher, RowsSession};
use crate::cuda::turns::TurnsSession;
use crate::cuda::waves::StepsSession;
use crate::defaults::rows::{Room, STEP_ROWS, kernel_rows};
use crate::digest::Digest;
use crate::error::{Fault, Tier};
use crate::ir::schedule::Schedule;
use crate::manifest::SearchKernel;
use crate::target::Target;
use crate::validate::Validated;
use crate::waves::{Proven, STEP_ROWS_MIN};

use super::device_rows::{place_kernel, prove_kernel, rows_source};
use super::device_waves::{chosen_knobs, plan_ragged, plan_steps, waves_digests, waves_source};
use super::stages::{BuildContext, Generated, kernel_digests};

/// What runs steps of up to `rows` rows.
#[derive(Debug, Clone)]
pub struct StepsKernel {
    /// The proven schedule whose pack, caches and pages it has.
    pub validated: Arc<Validated>,
    pub rows: u32,
    pub by: By,
    /// Of the plan of waves, if there is one that does not cut histories.
    pub knobs: WaveKnobs,
}

/// What runs steps, of a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum By {
    /// The kernel of the schedule. If it has fewer rows, it runs in several launches one after another.
    Words,
    /// A plan of waves that is derived from the schedule for that many rows.
    Waves,
    /// A plan of waves that cuts long histories into KV splits.
    Splits,
}

impl StepsKernel {
    /// Rows of one launch.
    pub fn launch_rows(&self) -> u32 {
        if self.by == By::Words { self.rows.min(self.validated.schedule().program.rows) } else { self.rows }
    }

    /// The plan of waves; `None`: the kernel of the schedule runs the steps.
    ///
    /// # Errors
    /// As [`plan_steps`].
    pub fn plan(&self, target: &Target) -> Result<Option<Proven<'_>>, Fault> {
        match self.by {
            By::Words => Ok(None),
            By::Waves => plan_steps(target, &self.validated, self.rows, &self.knobs).map(Some),
            By::Splits => plan_ragged(target, &self.validated, self.rows).map(Some),
        }
    }

    /// The source, to compile.
    ///
    /// # Errors
    /// A plan of waves that is not proven: a fault of this program.
    pub(super) fn source(&self, context: &BuildContext<'_>, trace: Trace) -> Result<Generated, Fault> {
        Ok(match self.plan(context.target)? {
            Some(proven) => waves_source(context, &proven, trace),
            None => rows_source(context, &self.validated, trace),
        })
    }

    /// Digests of what an exported kernel was compiled from, and of all that it walks.
    ///
    /// # Errors
    /// As [`StepsKernel::source`].
    pub fn digests(&self, target: &Target) -> Result<[Digest; 2], Fault> {
        match self.plan(target)? {
            Some(proven) => waves_digests(target, &proven),
            None => kernel_digests(&self.validated, target),
        }
    }

    /// Loads what [`StepsKernel::source`] was compiled to, without time stamps. `pack` and, if it is given, `cache` are shared with other
    /// kernels of the model. A launch has at most `steps_max` steps.
    ///
    /// # Errors
    /// What the device refuses; a plan of waves that is not proven.
    pub fn load(
        &self,
        device: &Device,
        target: &Target,
        cubin: &[u8],
        steps_max: u32,
        pack: Arc<DeviceBuffer>,
        cache: Option<Arc<DeviceBuffer>>,
    ) -> Result<Box<dyn RowLauncher>, Fault> {
        let off = Trace::Off;
        if let Some(proven) = self.plan(target)? {
            return Ok(Box::new(StepsSession::load(device, &proven, cubin, off, steps_max, pack, cache)?));
        }
        let (queues, most) = (Queues::of(&self.validated), (self.rows, steps_max));
        if self.rows > self.launch_rows() {
            return Ok(Box::new(TurnsSession::load(device, &queues, cubin, most, pack, cache)?));
        }
        Ok(Box::new(RowsSession::load(device, &queues, cubin, off, steps_max, pack, cache)?))
    }
}

/// Places and proves kernels of a model, each once.
pub(super) struct StepsKernels<'a> {
    context: &'a BuildContext<'a>,
    base: &'a Candidate,
    proven: Vec<(Room, Result<Arc<Validated>, Fault>)>,
}

impl<'a> StepsKernels<'a> {
    /// `base` is the candidate of one row.
    pub fn new(context: &'a BuildContext<'a>, base: &'a Candidate) -> StepsKernels<'a> {
        StepsKernels { context, base, proven: vec![] }
    }

    /// What runs steps of `room.rows` rows.
    ///
    /// # Errors
    /// A model of which no kernel for rows fits the target.
    pub fn of(&mut self, room: Room) -> Result<StepsKernel, Fault> {
        let BuildContext { manifest, target, imported, .. } = *self.context;
        let kernels = kernel_rows(&imported.graph, manifest.precision, target);
        let context = self.context;
        let knobs = |schedule: &Schedule, rows| chosen_knobs(context, SearchKernel::Wave { rows }, schedule);
        steps_kernel(target, kernels, room, &mut |room| self.proven(room), &knobs)
    }

    /// What runs steps of `room.rows` rows of which few have long histories.
    ///
    /// # Errors
    /// Why there is none: no kernel of waves, or no history is long enough.
    pub fn ragged(&mut self, room: Room) -> Result<StepsKernel, Fault> {
        let BuildContext { manifest, target, imported, .. } = *self.context;
        let none = || Fault::internal("a target without kernels for rows");
        let smallest = kernel_rows(&imported.graph, manifest.precision, target).first().ok_or_else(none)?;
        let (validated, knobs) = (self.proven(Room { rows: *smallest, ..room })?, WaveKnobs::default());
        let kernel = StepsKernel { validated, rows: room.rows, by: By::Splits, knobs };
        kernel.plan(target)?;
        Ok(kernel)
    }

    fn proven(&mut self, room: Room) -> Result<Arc<Validated>, Fault> {
        if let Some((_, found)) = self.proven.iter().find(|(of, _)| *of == room) {
            return found.clone();
        }
        let placed = place_kernel(self.context, self.base, room);
        let proven = placed.and_then(|placed| prove_kernel(self.context, placed)).map(Arc::new);
        self.proven.push((room, proven.clone()));
        proven
    }
}

/// The kernel that runs steps of `room.rows` rows, among those with `kernels` rows (ascending) that `place` places and proves. From [`STEP_ROWS_MIN`] rows on it is a
/// plan of waves, if there is one. `knobs`: those of such a plan over a schedule.
///
/// # Errors
/// Why the smallest kernel does not fit; a plan of waves that is not proven.
fn steps_kernel(
    target: &Target,
    kernels: &[u32],
    room: Room,
    place: &mut dyn FnMut(Room) -> Result<Arc<Validated>, Fault>,
    knobs: &dyn Fn(&Schedule, u32) -> WaveKnobs,
) -> Result<StepsKernel, Fault> {
    let rows = room.rows;
    if let Some(&smallest) = kernels.first().filter(|_| rows >= STEP_ROWS_MIN)
        && let Some(validated) = fitting(place(Room { rows: smallest, ..room }))?
        && let knobs = knobs(validated.schedule(), rows)
        && fitting(plan_steps(target, &validated, rows, &knobs).map(drop))?.is_some()
    {
        return Ok(StepsKernel { validated, rows, by: By::Waves, knobs });
    }
    let mut refused = Fault::internal("a target without kernels for rows");
    for &of in kernels.iter().rev().filter(|of| **of <= rows) {
        match place(Room { rows: of, ..room }) {
            Ok(validated) => {
                return Ok(StepsKernel { validated, rows, by: By::Words, knobs: WaveKnobs::default() });
            }
            Err(fault) if fault.tier == Tier::Input => refused = fault,
            Err(fault) => return Err(fault),
        }
    }
    Err(refused)
}

/// `None`: it does not fit the target.
pub(super) fn fitting<T>(made: Result<T, Fault>) -> Result<Option<T>, Fault> {
    match made {
        Ok(made) => Ok(Some(made)),
        Err(fault) if fault.tier == Tier::Input => Ok(None),
        Err(fault) => Err(fault),
    }
}

/// The smallest number of rows of a step that has room for `rows`.
///
/// # Errors
/// No rows, or more than a step has.
pub(super) fn step_rows_for(rows: u32) -> Result<u32, Fault> {
    let most = STEP_ROWS[STEP_ROWS.len() - 1];
    STEP_ROWS
        .into_iter()
        .find(|&of| rows > 0 && of >= rows)
        .ok_or_else(|| Fault::input(format!("{rows} rows: expected 1 to {most}, as many as a step has at most")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::defaults::rows::place_rows;
    use crate::dtype::{DType, Precision};
    use crate::format::{Format, FormatPlan, NAMED};
    use crate::model::config::import_config_only;
    use crate::model::graph::ModelGraph;
    use crate::model::rounding::round_matrices;
    use crate::target::TargetKind;
    use crate::validate::validate;

    const BF16: Precision = Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 };
    const FP32: Precision = Precision { weights: DType::F32, cache: DType::F32, wire: DType::F32 };

    /// A layer of a small model, in a format.
    fn graph_of(format: Format) -> ModelGraph {
        let config = include_str!("../../manifests/configs/smollm2-135m.json");
        let mut imported = import_config_only(config, 0).unwrap();
        let plan = FormatPlan { weights: Some(format), ..FormatPlan::default() };
        round_matrices(&mut imported.graph, &mut imported.weights, &plan).unwrap();
        imported.graph.layers.truncate(1);
        imported.graph
    }

    fn kernel_of(graph: &ModelGraph, precision: Precision, target: &Target, rows: u32) -> Result<StepsKernel, Fault> {
        let base = Candidate::default_for(graph, target, precision);
        let mut place = |room| match place_rows(graph, "steps", precision, 512, target, &base, room) {
            Ok(placed) => Ok(Arc::new(validate(placed, target)?)),
            Err(reason) => Err(Fault::input(reason.to_string())),
        };
        let room = Room { rows, sequences: rows, positions: u64::from(rows) * 512 };
        let knobs = |_: &Schedule, _| WaveKnobs::default();
        steps_kernel(target, kernel_rows(graph, precision, target), room, &mut place, &knobs)
    }

    /// No format is refused for a number of rows on a target that has room for a kernel of several rows.
    #[test]
    fn every_format_has_steps_of_every_number_of_rows() {
        let mut found = vec![];
        for name in ["int8", "fp8", "int4:128", "mxfp4", "bf16"] {
            let format = NAMED.iter().find(|(of, _)| *of == name).unwrap().1;
            let graph = graph_of(format);
            for target in Target::builtin_names().filter_map(Target::builtin).filter(|t| t.kind == TargetKind::Cuda) {
                for precision in [BF16, FP32] {
                    let kernels = STEP_ROWS.map(|rows| kernel_of(&graph, precision, &target, rows));
                    let first = kernels[0].is_ok();
                    for (rows, kernel) in STEP_ROWS.into_iter().zip(kernels) {
                        let at = format!("{name}, {rows} rows, {}, {precision:?}", target.name);
                        let Ok(kernel) = kernel else {
                            assert!(!first, "{at}");
                            continue;
                        };
                        assert_eq!(kernel.rows, rows, "{at}");
                        assert!(kernel.launch_rows() >= 8, "{at}");
                        let by = if kernel.by == By::Waves { "waves" } else { "words" };
                        found.push((name, target.name.clone(), precision == BF16, rows, by, kernel.launch_rows()));
                    }
                }
            }
        }
        let has = |name, target: &str, bf16, rows, by, launch| {
            let expected = (name, target.to_string(), bf16, rows, by, launch);
            assert!(found.contains(&expected), "{expected:?}: {found:?}");
        };
        for name in ["int8", "fp8", "int4:128", "mxfp4", "bf16"] {
            has(name, "h200", true, 16, "words", 16);
            has(name, "h200", true, 32, "waves", 32);
            has(name, "b200", true, 64, "waves", 64);
            // No waves: more launches, or the kernel of values that has as many rows.
            has(name, "a100", true, 32, "words", if name == "bf16" { 32 } else { 16 });
        }
        has("int8", "h200", false, 64, "words", 16);
    }
}
