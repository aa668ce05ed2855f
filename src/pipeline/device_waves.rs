//! Owns the kernels that read long prompt chunks and decide what follows: their plans and proofs, and loading them beside a kernel for rows.

use super::chain::Chain;
use super::device_rows::{place_kernel, prove_kernel, room_of_each, rows_of};
use super::execute::upload_pack;
use super::kernels::Does;
use super::stages::{BuildContext, Generated};
use super::stored::source_bytes;
use crate::candidate::WaveKnobs;
use crate::check::{CheckError, Checked, check_chunks, check_ids, check_waves, chooses_experts};
use crate::codegen::emit::Trace;
use crate::codegen::waves::{emit, tables_digest};
use crate::cuda::driver::Device;
use crate::cuda::memory::DeviceBuffer;
use crate::cuda::rows::{RowLauncher, given};
use crate::cuda::waves::{ChunkRead, Last, WavesSession};
use crate::defaults::rows::Room;
use crate::digest::Digest;
use crate::error::Fault;
use crate::interp::Pack;
use crate::ir::layout::matrices;
use crate::ir::op::{Op, Role};
use crate::ir::program::{Program, Space};
use crate::ir::schedule::Schedule;
use crate::manifest::SearchKernel;
use crate::pages::Pool;
use crate::rows::{Guard, Request, Row};
use crate::target::Target;
use crate::trace::{Span, WaveStamps, wave_spans};
use crate::validate::{Validated, Violation};
use crate::waves::{
    Action, Form, Plan, Proven, Refused, TAIL_ROWS, Wave, WithTail, chunk_rows, derive, derive_chosen, derive_ragged,
    prove, prove_tail,
};
use std::sync::Arc;

/// The form and the rows of the plan of a wave kernel of `program` that can be searched; `None`: the decode kernel.
pub(super) fn form_of(kernel: SearchKernel, program: &Program) -> Option<(Form, u32)> {
    match kernel {
        SearchKernel::Decode => None,
        SearchKernel::Wave { rows } => Some((Form::Steps, rows)),
        SearchKernel::Chunk => Some((Form::Chunk, chunk_rows(program))),
    }
}

/// The knobs of a wave kernel over `schedule`: those that a search found, if the plan takes them; else a note says that it does not.
pub(super) fn chosen_knobs(context: &BuildContext<'_>, kernel: SearchKernel, schedule: &Schedule) -> WaveKnobs {
    let knobs = context.tuned_waves(kernel);
    let of_kernel = form_of(kernel, &schedule.program);
    let Some((form, rows)) = of_kernel.filter(|_| !knobs.is_default()) else { return WaveKnobs::default() };
    match derive_chosen(schedule, context.target, form, rows, &knobs) {
        Ok(_) => knobs,
        Err(refused) => {
            let name = &context.target.name;
            context.workspace.report.note(&format!("{name}: `{kernel}` is built without `{knobs}`: {refused}"));
            WaveKnobs::default()
        }
    }
}

/// Plans and proves the kernel of waves over the pack and the pages of a kernel for rows.
///
/// # Errors
/// What kernels of waves cannot do of the model or on the target. A plan that is not proven is a fault of this program.
fn plan_waves<'a>(target: &Target, rows: &'a Validated, knobs: &WaveKnobs) -> Result<Proven<'a>, Fault> {
    let most = chunk_rows(&rows.schedule().program);
    proven(derive_chosen(rows.schedule(), target, Form::Chunk, most, knobs), rows, target)
}

/// How prompts are read in waves.
pub(super) enum PromptPlan<'a> {
    /// In chunks; and why there is no tail that decides after them.
    Chunks(Proven<'a>, Refused),
    /// In chunks, and what follows the last one is decided after it.
    WithTail(WithTail<'a>),
}

/// The cubins of kernels that read prompts in waves.
#[derive(Debug, Clone, Copy)]
pub struct PromptCubins<'a> {
    pub chunk: &'a [u8],
    /// `None`: chunks have no tail.
    pub tail: Option<&'a [u8]>,
    /// Knobs of the plan of chunks.
    pub knobs: WaveKnobs,
}

impl<'a> PromptPlan<'a> {
    /// The plan of each kernel.
    pub fn all(&self) -> Vec<(Does, &Proven<'a>)> {
        match self {
            PromptPlan::Chunks(chunk, _) => vec![(Does::Chunk, chunk)],
            PromptPlan::WithTail(both) => vec![(Does::Chunk, both.chunk()), (Does::Tail, both.tail())],
        }
    }

    /// The source of each kernel, to compile.
    pub fn sources(&self, context: &BuildContext<'_>, trace: Trace) -> Vec<(Does, Generated)> {
        self.all().into_iter().map(|(does, proven)| (does, waves_source(context, proven, trace))).collect()
    }

    /// Compiles and loads the kernels beside `rows`.
    ///
    /// # Errors
    /// What compiler or device refuse.
    fn compile(
        &self,
        chain: &Chain<'_>,
        device: &Device,
        trace: Trace,
        (pack, cache): (Arc<DeviceBuffer>, Arc<DeviceBuffer>),
    ) -> Result<WavesSession, Fault> {
        let compiled = chain.compile_named(self.sources(&chain.context, trace))?;
        let of = |does| compiled.iter().find(|(of, _)| *of == does).map(|(_, cubin)| cubin.bytes.as_slice());
        let chunk = of(Does::Chunk).ok_or_else(|| Fault::internal("chunks without a cubin"))?;
        let cubins = PromptCubins { chunk, tail: of(Does::Tail), knobs: WaveKnobs::default() };
        self.load(device, cubins, trace, pack, cache)
    }

    /// Loads what [`PromptPlan::sources`] were compiled to, with the same `trace`. `pack` and `cache` are those of the kernel for rows.
    ///
    /// # Errors
    /// What the device refuses.
    pub fn load(
        &self,
        device: &Device,
        PromptCubins { chunk, tail, knobs: _ }: PromptCubins<'_>,
        trace: Trace,
        pack: Arc<DeviceBuffer>,
        cache: Arc<DeviceBuffer>,
    ) -> Result<WavesSession, Fault> {
        match (self, tail) {
            (PromptPlan::Chunks(proven, _), None) => Ok(WavesSession::load(device, proven, chunk, trace, pack, cache)?),
            (PromptPlan::WithTail(both), Some(tail)) => {
                Ok(WavesSession::load_with_tail(device, both, [chunk, tail], trace, pack, cache)?)
            }
            (PromptPlan::Chunks(..), Some(_)) => Err(Fault::input("a kernel `tail` for chunks that have none")),
            (PromptPlan::WithTail(_), None) => Err(Fault::input("chunks without their kernel `tail`")),
        }
    }
}

/// As [`plan_waves`], with the tail if there is one.
///
/// # Errors
/// As [`plan_waves`].
pub(super) fn plan_prompts<'a>(
    target: &Target,
    rows: &'a Validated,
    knobs: &WaveKnobs,
) -> Result<PromptPlan<'a>, Fault> {
    let chunk = plan_waves(target, rows, knobs)?;
    match derive(rows.schedule(), target, Form::Tail, TAIL_ROWS) {
        Ok(tail) => prove_tail(tail, chunk, target).map(PromptPlan::WithTail).map_err(unproven),
        Err(refused) => Ok(PromptPlan::Chunks(chunk, refused)),
    }
}

/// Why a kernel of waves cannot read prompts, or its plan.
pub(super) fn derive_chunks(schedule: &Schedule, target: &Target) -> Result<Plan, Refused> {
    derive(schedule, target, Form::Chunk, chunk_rows(&schedule.program))
}

/// Plans and proves the kernel of waves that runs steps of up to `rows` rows over the pack and the pages of the kernel of `validated`, which
/// may have any number of rows.
///
/// # Errors
/// As [`plan_waves`].
pub(super) fn plan_steps<'a>(
    target: &Target,
    validated: &'a Validated,
    rows: u32,
    knobs: &WaveKnobs,
) -> Result<Proven<'a>, Fault> {
    proven(derive_chosen(validated.schedule(), target, Form::Steps, rows, knobs), validated, target)
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

pub(super) fn unproven(violations: Vec<Violation>) -> Fault {
    let all: Vec<String> = violations.iter().map(ToString::to_string).collect();
    Fault::internal(format!("a plan of waves is not proven: {}", all.join("; ")))
}

/// The source of a proven plan, to compile.
pub(super) fn waves_source(context: &BuildContext<'_>, proven: &Proven<'_>, trace: Trace) -> Generated {
    let source = emit(proven, context.target, trace);
    Generated::of(source)
}

/// For each exported kernel of waves that reads prompts: digests of what it was compiled from, and of all that it walks.
///
/// # Errors
/// As [`plan_waves`].
pub(super) fn prompt_digests(
    target: &Target,
    rows: &Validated,
    knobs: &WaveKnobs,
) -> Result<Vec<(Does, [Digest; 2])>, Fault> {
    let plan = plan_prompts(target, rows, knobs)?;
    plan.all().into_iter().map(|(does, proven)| Ok((does, waves_digests(target, proven)?))).collect()
}

/// The same of one kernel of waves.
pub(super) fn waves_digests(target: &Target, proven: &Proven<'_>) -> Result<[Digest; 2], Fault> {
    let source = source_bytes(emit(proven, target, Trace::Off))?;
    Ok([Digest::of(&source), tables_digest(proven)])
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
    let knobs = chosen_knobs(&chain.context, SearchKernel::Chunk, validated.schedule());
    let plan = plan_prompts(chain.context.target, validated, &knobs)?;
    let mut waves = plan.compile(chain, device, Trace::Off, (rows.pack(), rows.cache()))?;
    let parameters = chain.context.imported.graph.parameter_count();
    let checked = check_prompts(validated, &|| Ok(chain.pack()?), parameters, judged, rows, &mut waves)?;
    Ok((waves, checked))
}

/// Compares wave kernels that read prompts with the smallest batch kernel, which was checked (`judged`). Two right kernels of a mixture may choose
/// different experts, so those of a mixture are compared with the interpreter.
///
/// # Errors
/// As [`check_waves`] and [`check_chunks`]; a pack that cannot be read.
pub(super) fn check_prompts(
    validated: &Validated,
    pack: &dyn Fn() -> Result<Pack, Fault>,
    parameters: u64,
    judged: &Checked,
    rows: &mut dyn RowLauncher,
    waves: &mut WavesSession,
) -> Result<Checked, CheckError> {
    if chooses_experts(&validated.schedule().program) {
        return check_chunks(validated, pack().map_err(CheckError::Pack)?, parameters, waves);
    }
    check_waves(validated.schedule(), judged, rows, waves)
}

/// A launch of waves with time stamps.
pub(super) struct TracedWaves {
    pub spans: Vec<Span>,
    pub device_us: f64,
    /// Bytes that it has to read: the matrices of its waves, and in each layer in which it attends the history before the chunk.
    pub bytes: u64,
}

/// A chunk with time stamps, and its tail.
pub(super) struct TracedChunk {
    pub chunk: TracedWaves,
    /// Why there is none.
    pub tail: Result<TracedWaves, Refused>,
}

/// Reads `tokens` tokens of a made-up text from `position` on with time stamps, once after `warm_up` reads like it. If there is a tail, it
/// decides what follows them.
///
/// # Errors
/// As [`plan_waves`]; what compiler or device refuse.
pub(super) fn trace_waves(
    chain: &Chain<'_>,
    device: &Device,
    tokens: u32,
    position: u32,
    warm_up: u32,
) -> Result<TracedChunk, Fault> {
    let rows = rows_of(&chain.context).first().copied().unwrap_or(0);
    let of_each = room_of_each(&chain.context, &chain.candidate, position + tokens);
    let room = Room { rows, sequences: rows, positions: u64::from(rows) * of_each };
    let validated = prove_kernel(&chain.context, place_kernel(&chain.context, &chain.candidate, room)?)?;
    let knobs = chosen_knobs(&chain.context, SearchKernel::Chunk, validated.schedule());
    let plan = plan_prompts(chain.context.target, &validated, &knobs)?;
    let pack = upload_pack(device, &validated, &chain.pack()?)?;
    let cache_bytes = validated.schedule().arena_bytes(Space::Cache);
    let others = device.others().iter().map(|other| other.alloc(cache_bytes)).collect::<Result<_, _>>()?;
    let cache = Arc::new(device.alloc(cache_bytes)?.with_others(others));
    let mut waves = plan.compile(chain, device, Trace::On, (pack, cache))?;
    let ids = check_ids(chain.context.imported.graph.vocab, position + tokens);
    let mut read = read_text(&mut waves, &ids, position)?;
    for _ in 0..warm_up {
        read = read_text(&mut waves, &ids, position)?;
    }
    traced(&plan, &waves, read, position)
}

/// Reads a text from its beginning: all that comes before `position`, then the rest as one chunk, which is returned.
fn read_text(waves: &mut WavesSession, ids: &[u32], position: u32) -> Result<ChunkRead, Fault> {
    let shape = *waves.shape();
    let (mut pool, mut guard) = (Pool::new(shape), Guard::new(shape));
    let opened = pool.open().and_then(|sequence| pool.reserve(sequence, ids.len() as u32).map(|()| sequence));
    let sequence = opened.map_err(|error| Fault::internal(error.to_string()))?;
    let (mut edits, decides) = (pool.take_edits(), waves.decides());
    let mut read = |first: usize, end: usize, ends: bool| {
        let row = |at| Row { sequence, position: at as u32, wants_logits: ends && at + 1 == end };
        let request = Request { rows: (first..end).map(row).collect(), steps: 1, edits: std::mem::take(&mut edits) };
        let tables = guard.admit(&request).map_err(|refused| Fault::internal(refused.to_string()))?;
        let row = given(&ids[end - 1..end]).pop().filter(|_| ends);
        let last = row.map_or(Last::Nothing, |row| Last::Token { row, with_logits: false });
        Ok::<ChunkRead, Fault>(waves.read(tables, &ids[first..end], last)?)
    };
    let position = position as usize;
    for first in (0..position).step_by(shape.rows as usize) {
        read(first, position.min(first + shape.rows as usize), false)?;
    }
    read(position, ids.len(), decides)
}

/// What the stamps of the last chunk and of its tail say.
fn traced(plan: &PromptPlan<'_>, waves: &WavesSession, read: ChunkRead, position: u32) -> Result<TracedChunk, Fault> {
    let of = |proven: &Proven<'_>, spans: Vec<Span>, device_us: f64| {
        let bytes = bytes_to_read(proven, position);
        TracedWaves { spans, device_us, bytes }
    };
    let chunk_stamps = waves.stamps()?;
    match (plan, waves.tail_stamps()?) {
        (PromptPlan::WithTail(both), Some(tail_stamps)) => {
            let launches = [(both.chunk(), 1, &*chunk_stamps), (both.tail(), 1, &*tail_stamps)];
            let [chunk, tail] = named_spans(launches)?;
            let tail = Ok(of(both.tail(), tail, read.tail_us));
            Ok(TracedChunk { chunk: of(both.chunk(), chunk, read.chunk_us), tail })
        }
        (PromptPlan::Chunks(proven, refused), None) => {
            let [chunk] = named_spans([(proven, 1, &*chunk_stamps)])?;
            Ok(TracedChunk { chunk: of(proven, chunk, read.chunk_us), tail: Err(refused.clone()) })
        }
        _ => Err(Fault::internal("the kernels of a prompt are not those of its plan")),
    }
}

/// As [`TracedWaves::bytes`], with `history` positions before the chunk.
fn bytes_to_read(proven: &Proven<'_>, history: u32) -> u64 {
    let program = &proven.validated().schedule().program;
    let matrices = matrices(program);
    let cached = program.precision.cache.bytes() as u64;
    let of_wave = |wave: &Wave| {
        let grid = &program.grids[wave.grid.index()];
        match (&wave.action, &grid.op) {
            // Of experts all: a chunk may choose each.
            (Action::MatMul { .. } | Action::Scores { .. } | Action::Experts { .. }, _) => {
                let weight = grid.operand(Role::Weight).and_then(|weight| matrices[weight.buffer.index()]);
                weight.map_or(0, |matrix| matrix.units_bytes())
            }
            (Action::Attend { .. } | Action::AttendRow { .. }, Op::Attention(a)) => {
                let seen = a.window.map_or(history, |window| history.min(window));
                2 * u64::from(a.kv_heads()) * u64::from(a.head_dim) * u64::from(seen) * cached
            }
            _ => 0,
        }
    };
    proven.plan().waves.iter().map(of_wave).sum()
}

/// Times of the waves of launches that followed one another, from the stamps of their steps.
pub(super) fn named_spans<const N: usize>(launches: [(&Proven<'_>, u32, &[u64]); N]) -> Result<[Vec<Span>; N], Fault> {
    let names = launches.map(|(proven, ..)| {
        let program = &proven.validated().schedule().program;
        let name = |wave: &Wave| (wave.action.name(), program.grids[wave.grid.index()].name.as_str());
        proven.plan().waves.iter().map(name).collect::<Vec<_>>()
    });
    let stamps = std::array::from_fn(|at| {
        let (_, steps, words) = launches[at];
        WaveStamps { names: &names[at], steps, words }
    });
    wave_spans::<N>(stamps).map_err(|error| Fault::internal(format!("the trace: {error}")))
}
