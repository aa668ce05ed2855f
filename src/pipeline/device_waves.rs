//! Owns the kernels that read long prompt chunks and decide what follows: their plans and proofs, and loading them beside a kernel for rows.

use super::chain::Chain;
use super::device_rows::{place_kernel, prove_kernel, rows_of};
use super::execute::upload_pack;
use super::stages::{BuildContext, Generated};
use super::stored::source_bytes;
use crate::check::{Checked, check_ids, check_waves};
use crate::codegen::emit::Trace;
use crate::codegen::waves::{emit, encode};
use crate::cuda::driver::Device;
use crate::cuda::memory::DeviceBuffer;
use crate::cuda::rows::RowLauncher;
use crate::cuda::waves::{Last, WavesSession};
use crate::defaults::rows::Room;
use crate::digest::Digest;
use crate::error::Fault;
use crate::ir::program::Space;
use crate::ir::schedule::Schedule;
use crate::pages::Pool;
use crate::rows::{Guard, Request, Row};
use crate::target::Target;
use crate::trace::{Span, wave_spans};
use crate::validate::Validated;
use crate::waves::{
    CHUNK_ROWS, Form, Plan, Proven, Refused, TAIL_ROWS, Violation, Wave, WithTail, derive, derive_ragged, prove,
    prove_tail,
};
use std::sync::Arc;

/// Plans and proves the kernel of waves over the pack and the pages of a kernel for rows.
///
/// # Errors
/// What kernels of waves cannot do of the model or on the target. A plan that is not proven is a fault of this program.
pub(super) fn plan_waves<'a>(target: &Target, rows: &'a Validated) -> Result<Proven<'a>, Fault> {
    proven(derive_chunks(rows.schedule(), target), rows, target)
}

/// How prompts are read in waves.
pub(super) enum PromptPlan<'a> {
    /// In chunks; and why there is no tail that decides after them.
    Chunks(Proven<'a>, Refused),
    /// In chunks, and what follows the last one is decided after it.
    WithTail(WithTail<'a>),
}

impl<'a> PromptPlan<'a> {
    /// The plan of chunks, then that of the tail.
    pub fn all(&self) -> Vec<&Proven<'a>> {
        match self {
            PromptPlan::Chunks(chunk, _) => vec![chunk],
            PromptPlan::WithTail(both) => vec![both.chunk(), both.tail()],
        }
    }

    /// The source of each, to compile.
    pub fn sources(&self, context: &BuildContext<'_>) -> Vec<Generated> {
        self.all().into_iter().map(|proven| waves_source(context, proven, Trace::Off)).collect()
    }

    /// Loads what [`PromptPlan::sources`] were compiled to. `pack` and `cache` are those of the kernel for rows.
    ///
    /// # Errors
    /// What the device refuses.
    pub fn load(
        &self,
        device: &Device,
        cubins: &[&[u8]],
        pack: Arc<DeviceBuffer>,
        cache: Arc<DeviceBuffer>,
    ) -> Result<WavesSession, Fault> {
        let off = Trace::Off;
        match (self, cubins) {
            (PromptPlan::Chunks(chunk, _), [cubin]) => Ok(WavesSession::load(device, chunk, cubin, off, pack, cache)?),
            (PromptPlan::WithTail(both), &[chunk, tail]) => {
                Ok(WavesSession::load_with_tail(device, both, [chunk, tail], off, pack, cache)?)
            }
            _ => {
                let (found, expected) = (cubins.len(), self.all().len());
                Err(Fault::input(format!(
                    "{found} kernels of waves for prompts: expected {expected}, for chunks and their tail"
                )))
            }
        }
    }
}

/// As [`plan_waves`], with the tail if there is one.
///
/// # Errors
/// As [`plan_waves`].
pub(super) fn plan_prompts<'a>(target: &Target, rows: &'a Validated) -> Result<PromptPlan<'a>, Fault> {
    let chunk = plan_waves(target, rows)?;
    match derive(rows.schedule(), target, Form::Tail, TAIL_ROWS) {
        Ok(tail) => prove_tail(tail, chunk, target).map(PromptPlan::WithTail).map_err(unproven),
        Err(refused) => Ok(PromptPlan::Chunks(chunk, refused)),
    }
}

/// Why a kernel of waves cannot read prompts, or its plan.
pub(super) fn derive_chunks(schedule: &Schedule, target: &Target) -> Result<Plan, Refused> {
    derive(schedule, target, Form::Chunk, CHUNK_ROWS)
}

/// Plans and proves the kernel of waves that runs steps of up to `rows` rows over the pack and the pages of the kernel of `validated`, which
/// may have any number of rows.
///
/// # Errors
/// As [`plan_waves`].
pub(super) fn plan_steps<'a>(target: &Target, validated: &'a Validated, rows: u32) -> Result<Proven<'a>, Fault> {
    proven(derive(validated.schedule(), target, Form::Steps, rows), validated, target)
}

/// As [`plan_steps`], and long histories are cut into KV splits.
///
/// # Errors
/// As [`plan_waves`]; no history is long enough.
pub(super) fn plan_ragged<'a>(target: &Target, validated: &'a Validated, rows: u32) -> Result<Proven<'a>, Fault> {
    proven(derive_ragged(validated.schedule(), target, rows), validated, target)
}

fn proven<'a>(plan: Result<Plan, Refused>, rows: &'a Validated, target: &Target) -> Result<Proven<'a>, Fault> {
    let plan = plan.map_err(|refused| Fault::input(format!("no kernel of waves: {refused}")))?;
    prove(plan, rows, target).map_err(unproven)
}

fn unproven(violations: Vec<Violation>) -> Fault {
    let all: Vec<String> = violations.iter().map(ToString::to_string).collect();
    Fault::internal(format!("a plan of waves is not proven: {}", all.join("; ")))
}

/// The source of a proven plan, to compile.
pub(super) fn waves_source(context: &BuildContext<'_>, proven: &Proven<'_>, trace: Trace) -> Generated {
    let source = emit(proven, context.target, trace);
    Generated::of(source)
}

/// For each exported kernel of waves that reads prompts, in the order of [`PromptPlan::all`]: digests of what it was compiled from, and of
/// all that it walks.
///
/// # Errors
/// As [`plan_waves`].
pub(super) fn prompt_digests(target: &Target, rows: &Validated) -> Result<Vec<[Digest; 2]>, Fault> {
    plan_prompts(target, rows)?.all().into_iter().map(|proven| waves_digests(target, proven)).collect()
}

/// The same of one kernel of waves.
pub(super) fn waves_digests(target: &Target, proven: &Proven<'_>) -> Result<[Digest; 2], Fault> {
    let source = source_bytes(emit(proven, target, Trace::Off))?;
    Ok([Digest::of(&source), encode(proven).digest()])
}

/// Makes and loads the kernels of waves beside `rows`, the session of `validated` that was checked (`judged`), and checks them against that.
///
/// # Errors
/// As [`plan_waves`]; what compiler or device refuse; keys or values that differ.
pub(super) fn waves_beside(
    chain: &Chain<'_>,
    device: &Device,
    validated: &Validated,
    judged: &Checked,
    rows: &mut dyn RowLauncher,
) -> Result<(WavesSession, Checked), Fault> {
    let plan = plan_prompts(chain.context.target, validated)?;
    let cubins = chain.compile_all(&plan.sources(&chain.context))?;
    let cubins: Vec<&[u8]> = cubins.iter().map(|cubin| cubin.bytes.as_slice()).collect();
    let mut waves = plan.load(device, &cubins, rows.pack(), rows.cache())?;
    let checked = check_waves(validated.schedule(), judged, rows, &mut waves)?;
    Ok((waves, checked))
}

/// Reads `tokens` tokens of a made-up text from `position` on with time stamps, once after `warm_up` reads like it.
///
/// # Errors
/// As [`plan_waves`]; what compiler or device refuse.
pub(super) fn trace_waves(
    chain: &Chain<'_>,
    device: &Device,
    tokens: u32,
    position: u32,
    warm_up: u32,
) -> Result<(Vec<Span>, f64, u32), Fault> {
    let rows = rows_of(&chain.context).first().copied().unwrap_or(0);
    let room = Room { rows, sequences: rows, positions: u64::from(rows * (position + tokens).next_multiple_of(256)) };
    let validated = prove_kernel(&chain.context, place_kernel(&chain.context, &chain.candidate, room)?)?;
    let proven = plan_waves(chain.context.target, &validated)?;
    let cubin = chain.compile(&waves_source(&chain.context, &proven, Trace::On))?;
    let pack = upload_pack(device, &validated, &chain.pack()?)?;
    let schedule = validated.schedule();
    let cache = Arc::new(device.alloc(schedule.arena_bytes(Space::Cache))?);
    let mut waves = WavesSession::load(device, &proven, &cubin.bytes, Trace::On, pack, cache)?;
    let shape = *waves.shape();
    let ids = check_ids(chain.context.imported.graph.vocab, position + tokens);
    let mut device_us = 0.0;
    for _ in 0..=warm_up {
        let (mut pool, mut guard) = (Pool::new(shape), Guard::new(shape));
        let opened = pool.open().and_then(|sequence| pool.reserve(sequence, position + tokens).map(|()| sequence));
        let sequence = opened.map_err(|error| Fault::internal(error.to_string()))?;
        let mut edits = pool.take_edits();
        let mut at = 0;
        for chunk in ids[..position as usize].chunks(shape.rows as usize).chain([&ids[position as usize..]]) {
            let row = |position| Row { sequence, position, wants_logits: false };
            let rows = (at..at + chunk.len() as u32).map(row).collect();
            let request = Request { rows, steps: 1, edits: std::mem::take(&mut edits) };
            let tables = guard.admit(&request).map_err(|refused| Fault::internal(refused.to_string()))?;
            device_us = waves.read(tables, chunk, Last::Nothing)?.device_us;
            at += chunk.len() as u32;
        }
    }
    Ok((named_spans(&proven, 1, &waves.stamps()?)?, device_us, proven.plan().machine.sms))
}

/// Times of the waves of a plan, from the stamps of `steps` steps.
pub(super) fn named_spans(proven: &Proven<'_>, steps: u32, stamps: &[u64]) -> Result<Vec<Span>, Fault> {
    let program = &proven.validated().schedule().program;
    let name = |wave: &Wave| (wave.action.name(), program.grids[wave.grid.index()].name.as_str());
    let names: Vec<_> = proven.plan().waves.iter().map(name).collect();
    wave_spans(&names, steps, stamps).map_err(|error| Fault::internal(format!("the trace: {error}")))
}
