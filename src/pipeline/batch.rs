//! Owns `Batched`: a prepared model whose steps have several rows, for the engine of a server.

use std::iter;
use std::sync::Arc;

use crate::candidate::WaveKnobs;
use crate::codegen::emit::Trace;
use crate::cuda::driver::Device;
use crate::cuda::states::StateRows;
use crate::defaults::rows::{PROMPT_ROWS, Room, STEP_ROWS};
use crate::engine::{CpuSteps, Stepper, Stepwise};
use crate::error::{Fault, Tier};
use crate::interp::{Options, Pack};
use crate::ir::layout::{cache_row_bytes, held_bytes_max};
use crate::lower::Batch;
use crate::manifest::{Decode, Manifest, SearchKernel};
use crate::model::graph::Layer;
use crate::pages::Pool;
use crate::rows::Shape;
use crate::target::{Target, TargetKind};
use crate::validate::{Validated, all_share_caches, share_caches};

use super::chain::{Chain, Host, NotMade};
use super::checks::Checking;
use super::device_rows::{one_row_kernel, rows_source};
use super::device_sampler::sampler_source;
use super::device_steps::{By, StepsKernel, StepsKernels, fitting};
use super::device_waves::{chosen_knobs, plan_prompts};
use super::evaluate::ensure_checked;
use super::execute::{self, Devices, upload_pack};
use super::invariant;
use super::kernels::{Does, Planned, PlannedSet, Served, alike_rows};
use super::mtp::Mtp;
use super::stages::{BuildContext, StoredSchedule, place_rows};
use super::{Prepared, Workspace};

/// Positions of a page of the interpreter's cache: a prefix is shared in whole pages, and a text wastes half a page.
pub(super) const PAGE_ROWS: u32 = 16;
/// Requests that run at a time, and prompt tokens in launches that others wait for, if neither the user nor the manifest names a number. A
/// device reads long chunks alone, which delays the others less than many short ones.
const RUNNING_MAX: u32 = 8;
const CHUNK_ROWS: u32 = 8;
const CHUNK_ROWS_DEVICE: u32 = 512;
/// Most rows of a step for the sake of prompts: in waves 64 rows take 1.3 to 1.5 times as long as 16 (docs/perf-log.md, entry 23).
const MIXED_ROWS: u32 = 64;
/// Default number of contexts in the interpreter's cache.
const CPU_CONTEXTS: u32 = 4;
/// Part of the free memory of a device that weights and cache may take, in percent: the rest is for the exchange, the queues and
/// the driver.
const MEMORY_PERCENT: u64 = 90;
/// Tokens of a cache on a device, at most.
const DEVICE_TOKENS_MAX: u64 = 1 << 22;

/// The option or key that gave a size of a server; `None`: the user named none.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct AskedSizes {
    pub running_max: Option<&'static str>,
    pub chunk_rows: Option<&'static str>,
}

/// What a server asks of its steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Serving {
    /// What the user named of the following two sizes. The others are defaults, and become smaller where they do not fit.
    pub asked: AskedSizes,
    /// Requests that run at a time.
    pub running_max: u32,
    /// Rows of prompts beside rows that decode, or in a launch that these wait for.
    pub chunk_rows: u32,
    /// Steps of a launch, at most.
    pub steps_max: u32,
    /// Tokens of a proposal of a draft that steps verify; 0: there is no draft.
    pub proposed: u32,
    /// Tokens that the cache holds, at least; `None`: on a CPU `cache_pages` of the manifest or four contexts, on a device what is free.
    pub cache_tokens: Option<u32>,
}

impl Serving {
    /// The manifest's sizes for a server on a target of this kind.
    pub fn of_manifest(manifest: &Manifest, kind: TargetKind, steps_max: u32) -> Serving {
        let running_max = manifest.decode.sequences_max.unwrap_or(RUNNING_MAX);
        let by_kind = if kind == TargetKind::Cuda { CHUNK_ROWS_DEVICE } else { CHUNK_ROWS };
        let chunk_rows = manifest.decode.chunk_max.unwrap_or(by_kind);
        let asked = AskedSizes {
            running_max: manifest.decode.sequences_max.map(|_| "decode.sequences_max"),
            chunk_rows: manifest.decode.chunk_max.map(|_| "decode.chunk_max"),
        };
        Serving { asked, running_max, chunk_rows, steps_max, proposed: 0, cache_tokens: None }
    }
}

impl Serving {
    /// Sequences with a state of their own: one that verifies has a second one for its state.
    fn sequences(&self) -> u32 {
        self.running_max * if self.proposed > 0 { 2 } else { 1 }
    }

    /// What the user lowers where a size does not fit.
    pub(super) fn keys(&self) -> Vec<&'static str> {
        let draft = (self.proposed > 0).then_some("--draft");
        self.asked.running_max.into_iter().chain(self.asked.chunk_rows).chain(draft).collect()
    }

    /// The same requests on a device, for kernels that are made now and loaded by servers with any number of steps: they read prompts in
    /// long chunks.
    pub(super) fn on_device(&self) -> Serving {
        Serving { chunk_rows: CHUNK_ROWS_DEVICE, ..*self }
    }
}

/// Proven schedules of several rows with their weights. It starts any number of steppers, one after another.
#[derive(Clone)]
pub struct Batched {
    /// On a device, the schedule of the kernel for most rows.
    validated: Arc<Validated>,
    pack: Pack,
    on_device: Option<Arc<OnDevice>>,
    /// The draft, and the most tokens of a proposal.
    draft: Option<(Mtp, usize)>,
}

/// What a device needs in addition to the weights.
struct OnDevice {
    device: Device,
    target: Target,
    served: Served,
    steps_max: u32,
}

/// Whether this machine has what runs a target.
pub fn runs_here(target: &Target) -> bool {
    target.kind == TargetKind::Cpu || Devices::list().find(target).is_ok()
}

impl Prepared {
    /// The most rows that a step can have: one for each request that decodes, and those of prompts.
    ///
    /// # Errors
    /// More requests than a step has rows on a CUDA target.
    pub(super) fn rows_max(&self, serving: &Serving) -> Result<u32, Fault> {
        match self.target.kind {
            TargetKind::Cpu => Ok(serving.running_max + serving.chunk_rows),
            TargetKind::Cuda if invariant::is_asked(&self.manifest, &self.target) => {
                Ok(alike_rows(serving.running_max))
            }
            TargetKind::Cuda => Ok(step_rows_of(serving)?.last().copied().unwrap_or(0)),
        }
    }

    /// Lowers, schedules and proves steps of several rows, compiles and checks their kernels, and packs the weights: the pack is that of one row.
    ///
    /// # Errors
    /// A batch or a cache that does not fit the target; no device of the target's kind, no compiler and no cubin; a full disk; a kernel that
    /// computes something else.
    pub fn batched(&self, workspace: &Workspace, serving: &Serving) -> Result<Batched, Fault> {
        let host = Host::new(workspace);
        let chain = self.chain(workspace, &host);
        let Some(found) = host.device(&self.target)? else {
            let rows = batch_on_cpu(&chain, serving)?;
            // The interpreter does the same for a row of any schedule.
            if self.checking == Checking::Required {
                ensure_checked(&chain)?;
            }
            return Ok(Batched::of_cpu(rows.validated(&self.target)?.clone(), chain.pack()?));
        };
        let device = execute::open(found, &self.target)?;
        let served = served(&chain, serving, Memory::beside(&self.validated, device.memory_free_bytes()?))?;
        served.refuse_proposals(serving.proposed)?;
        if self.checking == Checking::Required {
            served.ensure_checked(&chain, found, &device)?;
        }
        Ok(Batched::of_device(served, chain.pack()?, device, &self.target, serving.steps_max))
    }

    /// Refuses sizes that were asked for and that no kernel of a server can have.
    ///
    /// # Errors
    /// More requests than a step has rows; more cached tokens than the memory beside the weights has room for.
    pub(super) fn refuse_sizes(&self, chain: &Chain<'_>, serving: &Serving, memory: Memory) -> Result<(), Fault> {
        self.rows_max(serving)?;
        serving.cache_tokens.map_or(Ok(()), |_| room(&chain.context, 1, serving, memory).map(drop))
    }
}

/// Whether a build makes batch kernels, too.
pub(super) fn is_several(manifest: &Manifest) -> bool {
    manifest.decode.sequences_max.is_some_and(|sequences| sequences > 1)
}

/// Memory beside the weights for a server: of the device as it is now, else of one that the target describes. `one` has the weights.
///
/// # Errors
/// What the device refuses.
pub(super) fn memory(chain: &Chain<'_>, one: &Validated) -> Result<Memory, NotMade> {
    let target = chain.context.target;
    let memory_bytes = match chain.host.device(target) {
        Ok(Some(found)) => {
            let device = execute::open(found, target).map_err(Fault::from)?;
            device.memory_free_bytes().map_err(Fault::from)?
        }
        Ok(None) | Err(NotMade::NoDevice { .. }) => target.spec.memory_bytes,
        Err(other) => return Err(other),
    };
    Ok(Memory::beside(one, memory_bytes))
}

/// Steps of several rows on the CPU.
///
/// # Errors
/// A batch that does not fit the target.
pub(super) fn batch_on_cpu(chain: &Chain<'_>, serving: &Serving) -> Result<StoredSchedule, Fault> {
    let BuildContext { workspace, manifest, target, .. } = chain.context;
    let batches = cpu_batches(serving, &manifest.decode);
    let (taken, rows) = place_rows(&chain.context, &chain.candidate, &batches, &serving.keys())?;
    if let Some(wanted) = batches.first().filter(|wanted| **wanted != taken) {
        let (name, rows, wanted) = (&target.name, taken.rows, wanted.rows);
        workspace.report.note(&format!("{name}: steps of {rows} rows, because {wanted} do not fit"));
    }
    Ok(rows)
}

/// Proves and compiles the kernels of a server, for a device with this memory.
///
/// # Errors
/// A batch or a cache that does not fit the target; no compiler and no cubin.
pub(super) fn served(chain: &Chain<'_>, serving: &Serving, memory: Memory) -> Result<Served, Fault> {
    let planned = to_serve(chain, serving, memory)?;
    // Queues that differ from those of the first proof are refused here.
    let of_words = planned.kernels.iter().filter(|planned| matches!(planned.does, Does::Steps { .. }));
    for validated in of_words.filter_map(|planned| planned.validated.as_ref()).filter(|_| !planned.is_alike) {
        chain.context.workspace.queues(validated)?;
    }
    Ok(Served { running_max: serving.running_max, set: planned.compile(chain)? })
}

/// Proves the kernels of [`served`], and prints their sources. Stores nothing.
///
/// # Errors
/// A batch or a cache that does not fit the target.
pub(super) fn to_serve(chain: &Chain<'_>, serving: &Serving, memory: Memory) -> Result<PlannedSet, Fault> {
    match invariant::is_asked(chain.context.manifest, chain.context.target) {
        true => to_serve_alike(chain, serving, memory),
        false => to_serve_fastest(chain, serving, memory),
    }
}

/// Memory of a device for caches.
#[derive(Debug, Clone, Copy)]
pub(super) struct Memory {
    /// Beside the weights.
    free_bytes: u64,
    /// Recurrent states of one sequence.
    state_bytes: u64,
}

impl Memory {
    /// What `memory_bytes` have beside the weights of `one`.
    pub(super) fn beside(one: &Validated, memory_bytes: u64) -> Memory {
        let free_bytes = memory_bytes.saturating_sub(held_bytes_max(one.schedule()));
        Memory { free_bytes, state_bytes: StateRows::of(one.schedule()).bytes() }
    }

    /// Positions that caches have room for, each of `position_bytes`, with the states of all sequences of a server.
    fn positions(&self, running_max: u32, position_bytes: u64, context_max: u64) -> u64 {
        // A sequence for each request and for each context that the cache holds; two are for what is left over.
        let states = self.state_bytes.saturating_mul(u64::from(running_max) + 2);
        let bytes =
            (self.free_bytes / 100 * MEMORY_PERCENT).saturating_sub(if self.state_bytes > 0 { states } else { 0 });
        let context_bytes = position_bytes.saturating_mul(context_max).saturating_add(self.state_bytes);
        bytes.saturating_mul(context_max) / context_bytes.max(1)
    }

    /// What a server tells of its states; nothing without any.
    fn told(&self, shape: &Shape) -> String {
        let (sequences, slots) = (shape.sequences, Pool::keepers(shape));
        let Memory { state_bytes: 1.., .. } = self else { return String::new() };
        let bytes = u64::from(sequences) * self.state_bytes;
        let mib = bytes.div_ceil(1 << 20);
        format!(", {mib} MiB of recurrent states for {sequences} sequences, of which {slots} are snapshots")
    }
}

fn to_serve_fastest(chain: &Chain<'_>, serving: &Serving, memory: Memory) -> Result<PlannedSet, Fault> {
    let workspace = chain.context.workspace;
    let mut all = StepsKernels::new(&chain.context, &chain.candidate);
    let context = &chain.context;
    let kernels = kernels(context, &mut all, serving, memory)?;
    let Some(largest) = kernels.last().map(|kernel| kernel.validated.clone()) else {
        return Err(Fault::internal("no kernel for several rows"));
    };
    let ragged = ragged(context, &mut all, &kernels, serving, memory)?;
    let shape = served_shape(context.target, &largest)?;
    all_share_caches(kernels.iter().map(|kernel| &*kernel.validated), &largest)
        .map_err(|differs| Fault::internal(format!("kernels for different numbers of rows: {differs}")))?;
    let one_row = one_row_beside(chain, room(context, 1, serving, memory)?, &largest)?;
    let of_one = one_row.iter().map(|_| "1".to_string());
    let rows: Vec<String> = of_one.chain(kernels.iter().map(|kernel| kernel.rows.to_string())).collect();
    workspace.report.note(&format!(
        "{}: steps of {} rows{}, cache of {} tokens in pages of {}{}",
        chain.context.target.name,
        rows.join(", "),
        ragged.as_ref().map_or(String::new(), |kernel| format!(" ({} also in KV splits)", kernel.rows)),
        u64::from(shape.pages) * u64::from(shape.page_rows),
        shape.page_rows,
        memory.told(&shape)
    ));
    let source = sampler_source(chain.context.target);
    let none = WaveKnobs::default();
    let mut planned = vec![Planned { does: Does::Sampler, validated: None, knobs: none, source }];
    planned.extend(one_row.into_iter().map(|one| Planned {
        does: Does::Steps { rows: 1, by: By::Words },
        knobs: none,
        source: rows_source(&chain.context, &one, Trace::Off),
        validated: Some(one),
    }));
    for kernel in kernels.iter().chain(&ragged) {
        let source = kernel.source(&chain.context, Trace::Off)?;
        let &StepsKernel { ref validated, rows, by, knobs } = kernel;
        planned.push(Planned { does: Does::Steps { rows, by }, validated: Some(validated.clone()), knobs, source });
    }
    let validated = &kernels[0].validated;
    let knobs = chosen_knobs(context, SearchKernel::Chunk, validated.schedule());
    match plan_prompts(chain.context.target, validated, &knobs) {
        Ok(plan) => {
            let of = |(does, source)| Planned { does, validated: Some(validated.clone()), knobs, source };
            planned.extend(plan.sources(&chain.context, Trace::Off).into_iter().map(of));
        }
        Err(fault) if fault.tier == Tier::Input => {
            workspace.report.note(&format!("prompts are read beside other rows: {}", fault.message));
        }
        Err(fault) => return Err(fault),
    }
    Ok(PlannedSet { is_alike: false, kernels: planned })
}

/// The same with kernels that add up in one order.
fn to_serve_alike(chain: &Chain<'_>, serving: &Serving, memory: Memory) -> Result<PlannedSet, Fault> {
    let (context, target) = (&chain.context, chain.context.target);
    let room = room(context, 0, serving, memory)?;
    let validated = Arc::new(invariant::schedule(&chain.context, &chain.candidate, room)?);
    let shape = served_shape(target, &validated)?;
    let alike = invariant::plan(target, &validated)?;
    let rows: Vec<u32> = alike.plans().iter().map(|proven| proven.plan().rows).collect();
    let names: Vec<String> = rows.iter().map(u32::to_string).collect();
    chain.context.workspace.report.note(&format!(
        "{}: kernels for {} rows that add up in one order, cache of {} tokens in pages of {}",
        chain.context.target.name,
        names.join(", "),
        u64::from(shape.pages) * u64::from(shape.page_rows),
        shape.page_rows
    ));
    let source = sampler_source(chain.context.target);
    let mut planned = vec![Planned { does: Does::Sampler, validated: None, knobs: WaveKnobs::default(), source }];
    planned.extend(invariant::planned(chain, &validated)?);
    Ok(PlannedSet { is_alike: true, kernels: planned })
}

/// What bounds the tables of a server's steps.
///
/// # Errors
/// A context that is one page: none could be kept.
fn served_shape(target: &Target, validated: &Validated) -> Result<Shape, Fault> {
    let shape = Shape::of(&validated.schedule().program).ok_or_else(|| Fault::internal("rows without tables"))?;
    if shape.sequences > Pool::keepers(&shape) {
        return Ok(shape);
    }
    let (context_max, page_rows) = (shape.context_max, shape.page_rows);
    Err(Fault::input(format!("`context_max` {context_max} is one page of {page_rows} positions"))
        .with_remedy(format!("raise `decode.context_max` above {page_rows} to serve on `{}`", target.name)))
}

/// What runs steps of several rows, ascending, on a device that has this memory left.
///
/// # Errors
/// As [`Prepared::batched`].
fn kernels(
    context: &BuildContext<'_>,
    all: &mut StepsKernels<'_>,
    serving: &Serving,
    memory: Memory,
) -> Result<Vec<StepsKernel>, Fault> {
    let mut kernels = vec![];
    for &rows in step_rows_of(serving)? {
        let kernel = all.of(room(context, rows, serving, memory)?)?;
        if context.target.devices > 1 && kernel.launch_rows() < kernel.rows {
            continue;
        }
        add(&mut kernels, kernel, serving.running_max);
    }
    let most = kernels.iter().map(|kernel| kernel.rows).max().unwrap_or(0);
    if serving.running_max > most {
        let asked = serving.asked.running_max.unwrap_or("--max-batch");
        let (target, running) = (&context.target.name, serving.running_max);
        let message = format!("steps of this model have at most {most} rows on `{target}`, `{asked}` is {running}");
        return Err(Fault::input(message).with_remedy(format!("lower `{asked}` to {most}")));
    }
    Ok(kernels)
}

/// What runs steps of which few rows have long histories, beside `others`. `None`: no history is long enough, or none of `others` is by
/// waves and has as many rows.
///
/// # Errors
/// A plan that is not proven: a fault of this program.
fn ragged(
    context: &BuildContext<'_>,
    all: &mut StepsKernels<'_>,
    others: &[StepsKernel],
    serving: &Serving,
    memory: Memory,
) -> Result<Option<StepsKernel>, Fault> {
    let Some(rows) = ragged_rows(serving.running_max, others) else { return Ok(None) };
    fitting(all.ragged(room(context, rows, serving, memory)?))
}

/// Sequences and positions of a kernel on a device that has this memory left.
fn room(context: &BuildContext<'_>, rows: u32, serving: &Serving, memory: Memory) -> Result<Room, Fault> {
    let BuildContext { manifest, imported, .. } = *context;
    let row_bytes = |dim| u64::from(cache_row_bytes(dim, manifest.precision.cache));
    let of_layer = imported
        .graph
        .layers
        .iter()
        .filter_map(Layer::history)
        .map(|attention| 2 * u64::from(attention.kv_heads) * row_bytes(attention.head_dim));
    let position_bytes: u64 = of_layer.sum();
    let context_max = u64::from(manifest.decode.context_max);
    let fits = memory.positions(serving.sequences(), position_bytes, context_max);
    let asked = serving.cache_tokens.map(u64::from);
    let positions = asked.unwrap_or(rounded(fits.min(DEVICE_TOKENS_MAX))).max(context_max);
    if positions > fits {
        let message = format!("a cache of {positions} tokens does not fit: the device has room for {fits}");
        let states = if memory.state_bytes > 0 { ", or `--max-batch`: each request has a recurrent state" } else { "" };
        return Err(
            Fault::input(message).with_remedy(format!("lower `--cache-tokens`, or `decode.context_max`{states}"))
        );
    }
    Ok(Room { rows, sequences: sequences(serving.sequences(), positions, context_max), positions })
}

/// The kernel for one row over the pages of `others`. The user is told why there is none.
///
/// # Errors
/// A schedule that is not proven: a fault of this program.
fn one_row_beside(chain: &Chain<'_>, room: Room, others: &Validated) -> Result<Option<Arc<Validated>>, Fault> {
    let why = match one_row_kernel(&chain.context, &chain.candidate, room) {
        Ok(one) => match share_caches(&one, others) {
            Ok(()) => return Ok(Some(Arc::new(one))),
            Err(differs) => differs.to_string(),
        },
        Err(fault) if fault.tier == Tier::Input => fault.message,
        Err(fault) => return Err(fault),
    };
    chain.context.workspace.report.note(&format!("one request alone has steps of several rows: {why}"));
    Ok(None)
}

/// Three leading binary digits: about the same free memory gives the same kernel, which is compiled once.
fn rounded(positions: u64) -> u64 {
    let digits = u64::BITS - positions.leading_zeros();
    positions >> digits.saturating_sub(3) << digits.saturating_sub(3)
}

/// Sequences that run, and those whose rows of the page table name kept pages: one for each context that the cache holds, and one more for
/// pages beyond them.
fn sequences(running_max: u32, positions: u64, context_max: u64) -> u32 {
    running_max + positions.div_ceil(context_max.max(1)) as u32 + 1
}

/// Adds what runs steps of more rows than those before it, in a server of `running_max` requests.
fn add(kernels: &mut Vec<StepsKernel>, kernel: StepsKernel, running_max: u32) {
    let smaller = kernels.last().map_or(0, |smaller| smaller.rows);
    // Without waves a step of more rows costs as much as several of fewer.
    if smaller >= running_max.max(PROMPT_ROWS) && kernel.by == By::Words {
        return;
    }
    // The same kernel in more launches serves fewer rows, too.
    kernels.pop_if(|last| kernel.by == By::Words && Arc::ptr_eq(&last.validated, &kernel.validated));
    kernels.push(kernel);
}

/// Rows of the kernel that cuts long histories: those of the smallest of `kernels` by waves that has a row for each running request. Launches of
/// more rows read a prompt beside others, and pass. One kernel is enough: fewer rows lose more with whole histories than with a kernel that has
/// too many rows. It takes seconds to compile, and device memory for what splits leave. `None`: there is none, or a request is always alone.
fn ragged_rows(running_max: u32, kernels: &[StepsKernel]) -> Option<u32> {
    let has_rows = |kernel: &&StepsKernel| kernel.by == By::Waves && kernel.rows >= running_max;
    kernels.iter().find(has_rows).filter(|_| running_max > 1).map(|kernel| kernel.rows)
}

/// The numbers of rows for which a server has something that runs them: those up to the first with a row for each running request and rows
/// for prompts. A step runs on the smallest that has room for it. Prompts are no reason for more than [`MIXED_ROWS`].
fn step_rows_of(serving: &Serving) -> Result<&'static [u32], Fault> {
    let [.., most] = STEP_ROWS;
    if serving.running_max > most {
        let asked = serving.asked.running_max.unwrap_or("--max-batch");
        let message = format!("steps have at most {most} rows, `{asked}` is {}", serving.running_max);
        return Err(Fault::input(message).with_remedy(format!("lower `{asked}` to {most}")));
    }
    let wanted = serving.running_max.max(serving.running_max.saturating_add(serving.chunk_rows).min(MIXED_ROWS));
    let smaller = STEP_ROWS.iter().take_while(|rows| **rows < wanted).count();
    Ok(&STEP_ROWS[..(smaller + 1).min(STEP_ROWS.len())])
}

/// Steps of the interpreter: the first that fits is taken. The sizes that the user did not name are halved from one to the next.
pub(super) fn cpu_batches(serving: &Serving, decode: &Decode) -> Vec<Batch> {
    let AskedSizes { running_max, chunk_rows } = serving.asked;
    let half = |rows: u32, asked: Option<&str>| if asked.is_some() { rows } else { (rows / 2).max(1) };
    let smaller = |of: &Serving| {
        let (running_max, chunk_rows) = (half(of.running_max, running_max), half(of.chunk_rows, chunk_rows));
        Some(Serving { running_max, chunk_rows, ..*of }).filter(|smaller| smaller != of)
    };
    iter::successors(Some(*serving), smaller).map(|serving| cpu_batch(&serving, decode)).collect()
}

/// Rows of the interpreter's steps, and the pages of their sequences.
fn cpu_batch(serving: &Serving, decode: &Decode) -> Batch {
    let context_max = decode.context_max;
    let asked = serving.cache_tokens.map(|tokens| tokens.div_ceil(PAGE_ROWS)).or(decode.cache_pages);
    let pages = asked.unwrap_or(context_max.div_ceil(PAGE_ROWS).saturating_mul(CPU_CONTEXTS)).max(1);
    let rows = serving.running_max * (1 + serving.proposed) + serving.chunk_rows;
    let shape = Shape { rows, sequences: 0, context_max, page_rows: PAGE_ROWS, pages, window: None, has_state: false };
    let sequences = serving.sequences() + Pool::keepers(&shape);
    Batch { rows, sequences, pages: shape.pages, page_rows: PAGE_ROWS, words: false }
}

impl Batched {
    /// Steps of the interpreter.
    pub(super) fn of_cpu(validated: Arc<Validated>, pack: Pack) -> Batched {
        Batched { validated, pack, on_device: None, draft: None }
    }

    /// With steps that verify what a draft proposes. They were made for proposals of this many tokens.
    pub fn with_draft(self, draft: Mtp, most: u32) -> Batched {
        Batched { draft: Some((draft, most as usize)), ..self }
    }

    /// Steps of a device.
    pub(super) fn of_device(served: Served, pack: Pack, device: Device, target: &Target, steps_max: u32) -> Batched {
        let validated = Arc::clone(served.set.validated());
        let on_device = OnDevice { device, target: target.clone(), served, steps_max };
        Batched { validated, pack, on_device: Some(Arc::new(on_device)), draft: None }
    }

    /// The proven schedule.
    pub(super) fn validated(&self) -> &Arc<Validated> {
        &self.validated
    }

    /// What runs it, with a cache of its own.
    ///
    /// # Errors
    /// A cache that is larger than this machine's memory; what the device refuses.
    pub fn stepper(&self) -> Result<Box<dyn Stepper>, Fault> {
        let Some(on_device) = &self.on_device else {
            let (schedule, pack) = (self.validated.schedule(), self.pack.clone());
            let steps = Box::new(CpuSteps::new(schedule, pack, Options::fast())?);
            return Ok(Box::new(match &self.draft {
                Some((draft, most)) => Stepwise::drafted(steps, Box::new(draft.clone()), *most)?,
                None => Stepwise::new(steps),
            }));
        };
        let OnDevice { device, target, served, steps_max } = on_device.as_ref();
        let pack = upload_pack(device, &self.validated, &self.pack)?;
        let Some((draft, most)) = &self.draft else { return served.stepper(device, target, *steps_max, &pack) };
        let steps = served.verifying(device, target, &pack, *most)?;
        Ok(Box::new(Stepwise::drafted(Box::new(steps), Box::new(draft.clone()), *most)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    use crate::ir::parse::parse;
    use crate::validate::validate;

    fn serving(running_max: u32, chunk_rows: u32) -> Serving {
        Serving { asked: AskedSizes::default(), running_max, chunk_rows, steps_max: 8, proposed: 0, cache_tokens: None }
    }

    #[test]
    fn a_server_has_the_kernels_up_to_the_first_with_room() {
        for (running, chunk, chosen) in [
            (1, 1, &[8][..]),
            (1, 7, &[8]),
            (4, 5, &[8, 16]),
            (8, 24, &[8, 16, 32]),
            (16, 1, &[8, 16, 32]),
            (16, 40, &[8, 16, 32, 64]),
            (20, u32::MAX, &[8, 16, 32, 64]),
            (64, 64, &[8, 16, 32, 64]),
            (65, 1, &[8, 16, 32, 64, 128]),
        ] {
            assert_eq!(step_rows_of(&serving(running, chunk)), Ok(chosen), "{running} and {chunk}");
        }
        let refused = step_rows_of(&serving(129, 1)).unwrap_err();
        assert_eq!(refused.message, "steps have at most 128 rows, `--max-batch` is 129");
    }

    /// A kernel that runs more rows in several launches takes the place of the same kernel with fewer, and a server has none for more
    /// rows than it needs; with waves it has.
    #[test]
    fn a_server_has_each_kernel_once() {
        let text = include_str!("../../tests/filetests/validate/proven-layer-h200.mkir");
        let target = Target::builtin("h200").expect("a record");
        let proven = validate(parse(text).expect("a schedule"), &target).expect("a proof");
        let [small, large] = [(); 2].map(|()| Arc::new(proven.clone()));
        let chosen = |running_max: u32, of: &[(u32, &Arc<Validated>, By)]| {
            let mut kernels = vec![];
            for &(rows, validated, by) in of {
                add(
                    &mut kernels,
                    StepsKernel { validated: validated.clone(), rows, by, knobs: WaveKnobs::default() },
                    running_max,
                );
            }
            kernels.iter().map(|kernel| kernel.rows).collect::<Vec<_>>()
        };
        let words = [8, 16, 32, 64].map(|rows| (rows, if rows == 8 { &small } else { &large }, By::Words));
        assert_eq!(chosen(16, &words), [8, 32]);
        assert_eq!(chosen(33, &words), [8, 64]);
        let [of_8, of_16, ..] = words;
        let waves = [of_8, of_16, (32, &small, By::Waves), (64, &small, By::Waves)];
        assert_eq!(chosen(16, &waves), [8, 16, 32, 64]);
        // Of those that cut long histories it has one, with a row for each request.
        let kernels = |of: &[(u32, &Arc<Validated>, By)]| -> Vec<StepsKernel> {
            of.iter()
                .map(|&(rows, validated, by)| StepsKernel {
                    validated: validated.clone(),
                    rows,
                    by,
                    knobs: WaveKnobs::default(),
                })
                .collect()
        };
        let ragged = |running_max| ragged_rows(running_max, &kernels(&waves));
        assert_eq!([1, 2, 32, 33, 64].map(ragged), [None, Some(32), Some(32), Some(64), Some(64)]);
        assert_eq!([ragged_rows(8, &kernels(&words)), ragged_rows(33, &kernels(&waves[..3]))], [None, None]);
    }

    /// What the user names stays; the rest becomes smaller.
    #[test]
    fn only_default_sizes_of_a_server_shrink() {
        let text = "[model]\nsource = \"builtin:tinystories\"\n[precision]\nweights = \"fp32\"\n\
                    [decode]\ncontext_max = 64\n[[target]]\nrecord = \"cpu\"\n";
        let manifest = Manifest::parse(text, Path::new("sizes.toml")).expect("a manifest");
        let rows = |running_max, chunk_rows| {
            let serving = Serving { asked: AskedSizes { running_max, chunk_rows }, ..serving(8, 8) };
            cpu_batches(&serving, &manifest.decode).iter().map(|batch| batch.rows).collect::<Vec<_>>()
        };
        let (running, chunk) = (Some("--max-batch"), Some("--max-chunk"));
        assert_eq!(rows(None, None), [16, 8, 4, 2]);
        assert_eq!(rows(running, None), [16, 12, 10, 9]);
        assert_eq!(rows(None, chunk), [16, 12, 10, 9]);
        assert_eq!(rows(running, chunk), [16]);
    }

    #[test]
    fn about_the_same_memory_gives_the_same_cache() {
        assert_eq!([0, 7, 8, 9, 1_000_000, 1_048_575].map(rounded), [0, 7, 8, 8, 917_504, 917_504]);
    }

    #[test]
    fn states_of_all_sequences_take_room_of_the_cache() {
        let memory = |state_bytes| Memory { free_bytes: 100_000, state_bytes };
        // 90 % of the memory: without states all of it is positions.
        assert_eq!(memory(0).positions(8, 7, 64), 90_000 / 7);
        let positions = memory(1000).positions(8, 7, 64);
        let bytes = |positions: u64| positions * 7 + u64::from(sequences(8, positions, 64)) * 1000;
        assert!(bytes(positions) <= 90_000 && bytes(positions + 64) > 90_000 - 1000, "{}", bytes(positions));
        assert_eq!(memory(10_000).positions(8, 7, 64), 0);
    }

    /// The pool keeps every page, and as many sequences can be open as requests may run.
    #[test]
    fn every_running_request_has_a_sequence() {
        for (context_max, page_rows) in [(512, 64), (4096, 64), (1000, 128), (2048, 256)] {
            for contexts in [12, 13, 100] {
                let positions = u64::from(context_max * contexts) + 37;
                let sequences = sequences(8, positions, u64::from(context_max));
                let pages = positions.div_ceil(u64::from(page_rows)) as u32;
                let shape = Shape {
                    rows: 16,
                    sequences,
                    context_max,
                    page_rows,
                    pages: pages.max(sequences),
                    window: None,
                    has_state: false,
                };
                let open = Pool::keeping(shape).map(|pool| pool.open_max()).unwrap_or(0);
                assert!(open >= 8, "context {context_max}, pages of {page_rows}, {contexts} contexts: {open}");
            }
        }
    }
}
