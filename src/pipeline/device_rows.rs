//! Owns kernels for several rows: which candidate and which pages they have, and their timing.

use std::sync::Arc;
use std::time::Instant;

use crate::candidate::{Candidate, WaveKnobs};
use crate::check::{self, WAVES_POSITIONS, check_rows};
use crate::codegen::abi::Queues;
use crate::codegen::emit::{Trace, emit};
use crate::cuda::driver::Device;
use crate::cuda::memory::DeviceBuffer;
use crate::cuda::one_row::OneRowSession;
use crate::cuda::rows::{FirstToken, RowInput, RowLauncher, RowsSession, given};
use crate::cuda::sampler::SamplerSession;
use crate::cuda::session::Session;
use crate::cuda::waves::{Last, StepsSession, WavesSession};
use crate::defaults::rows::{PROMPT_ROWS, Room, STEP_ROWS, kernel_rows, place_one_row, place_rows, whole_pages};
use crate::error::{Fault, Tier};
use crate::ir::schedule::Schedule;
use crate::manifest::{Manifest, SearchKernel};
use crate::pages::Pool;
use crate::rows::{Edit, Guard, PageId, Request, Row, SequenceId, Shape, Tables};
use crate::sample::Sampler;
use crate::target::Target;
use crate::text::one_of;
use crate::trace::{Span, Stamps, spans};
use crate::validate::{Validated, share_caches};
use crate::waves::{CHUNK_MIN, Proven, chunk_rows, next_chunk};

use super::bench::{self, Programs, Versus, Work};
use super::chain::{Chain, Host, remedy_of};
use super::checks::{self, Checking, Checks};
use super::device_sampler::{sampler_source, time_sampled};
use super::device_steps::{By, StepsKernel, StepsKernels, step_rows_for};
use super::device_waves::{
    PromptCubins, chosen_knobs, derive_chunks, named_spans, plan_prompts, waves_beside, waves_source,
};
use super::execute::{self, upload_pack};
use super::invariant;
use super::kernels::{Does, KernelSet, Planned, PlannedSet};
use super::stages::{BuildContext, Generated, prove};
use super::{Prepared, Workspace, import_stage};

/// Places the kernel for `room`.
///
/// # Errors
/// A kernel that does not fit the target.
pub(super) fn place_kernel(context: &BuildContext<'_>, base: &Candidate, room: Room) -> Result<Schedule, Fault> {
    let BuildContext { manifest, target, imported, .. } = *context;
    let context_max = manifest.decode.context_max;
    place_rows(&imported.graph, &manifest.name, manifest.precision, context_max, target, base, room).map_err(|reason| {
        Fault::input(format!("a kernel for {} rows does not fit target `{}`: {reason}", room.rows, target.name))
            .with_remedy(remedy_of(&reason, context))
    })
}

/// Places and proves the kernel for one row over the pages of kernels for `room`. Its steps are those of the kernel for one row of `base`.
///
/// # Errors
/// A kernel that does not fit the target.
pub(super) fn one_row_kernel(context: &BuildContext<'_>, base: &Candidate, room: Room) -> Result<Validated, Fault> {
    let BuildContext { manifest, target, imported, .. } = *context;
    let context_max = manifest.decode.context_max;
    let placed = place_one_row(&imported.graph, &manifest.name, manifest.precision, context_max, target, base, room)
        .map_err(|reason| {
            Fault::input(format!("a kernel for one row does not fit target `{}`: {reason}", target.name))
                .with_remedy(remedy_of(&reason, context))
        })?;
    prove_kernel(context, placed)
}

/// Proves a kernel that was placed.
///
/// # Errors
/// A schedule that is not proven: a fault of this program.
pub(super) fn prove_kernel(context: &BuildContext<'_>, placed: Schedule) -> Result<Validated, Fault> {
    prove(context, placed)
}

/// Places the kernel that reads prompts: of those with up to [`PROMPT_ROWS`] rows the largest that fits. `room` names the room of a kernel.
///
/// # Errors
/// Why the smallest does not fit.
pub(super) fn place_prompt_kernel(
    context: &BuildContext<'_>,
    base: &Candidate,
    room: impl Fn(u32) -> Room,
) -> Result<Schedule, Fault> {
    let mut refused = Fault::internal("a target without kernels for rows");
    for &rows in rows_of(context).iter().rev().filter(|rows| **rows <= PROMPT_ROWS) {
        match place_kernel(context, base, room(rows)) {
            Ok(placed) => return Ok(placed),
            Err(fault) => refused = fault,
        }
    }
    Err(refused)
}

/// Rows of the kernels that the target of a build may have, ascending.
pub(super) fn rows_of(context: &BuildContext<'_>) -> &'static [u32] {
    kernel_rows(&context.imported.graph, context.manifest.precision, context.target)
}

/// The source of a proven kernel, to compile.
pub(super) fn rows_source(context: &BuildContext<'_>, validated: &Validated, trace: Trace) -> Generated {
    let source = emit(validated, context.target, trace);
    Generated::of(source)
}

/// Compiles a kernel and loads it without time stamps. `pack` and, if it is given, `cache` are shared with other kernels of the model.
///
/// # Errors
/// What compiler or device refuse; a plan of waves that is not proven.
pub(super) fn load_launcher(
    chain: &Chain<'_>,
    device: &Device,
    kernel: &StepsKernel,
    steps_max: u32,
    pack: Arc<DeviceBuffer>,
    cache: Option<Arc<DeviceBuffer>>,
) -> Result<Box<dyn RowLauncher>, Fault> {
    let cubin = chain.compile(&kernel.source(&chain.context, Trace::Off)?)?;
    // Queues that differ from those of the first proof are refused here.
    let queues = chain.context.workspace.queues(&kernel.validated)?;
    if kernel.rows == 1 {
        return Ok(Box::new(OneRowSession::load(device, &queues, &cubin.bytes, steps_max, pack, cache)?));
    }
    kernel.load(device, chain.context.target, &cubin.bytes, steps_max, pack, cache)
}

/// Called with each position and the logits after it.
type OnRow<'a> = &'a mut dyn FnMut(u32, &[f32]);

/// The results of a prompt beyond its rows of the cache.
enum Wanted<'a> {
    Nothing,
    /// The token that follows the last one, decided by the temperature and seed of a row. Logits are on the device.
    Last(RowInput),
    /// The logits after each token, for a function.
    Each(OnRow<'a>),
}

/// A row of a prompt that decides by a temperature and a seed; greedy if the inverse temperature is 0.
fn deciding(inverse_temperature: f32, seed: u64) -> RowInput {
    RowInput { first: FirstToken::Given(0), steps: 1, inverse_temperature, seed }
}

/// What reads prompts: a kernel for rows, and for long chunks a kernel of waves over the same cache, where there is one.
pub(super) struct Reader<'a> {
    pub rows: &'a mut dyn RowLauncher,
    pub waves: Option<&'a mut WavesSession>,
}

impl Reader<'_> {
    /// What bounds the tables of all chunks.
    fn shape(&self) -> Shape {
        *self.waves.as_ref().map_or(self.rows.shape(), |waves| waves.shape())
    }

    /// Reads `ids` from position 0 on into the pages that `edits` give to `sequence`. `guard` is of
    /// [`Reader::shape`], or of more rows.
    ///
    /// # Errors
    /// Pages that are missing; what the device refuses; a launch that gave up.
    fn read(
        &mut self,
        guard: &mut Guard,
        sequence: SequenceId,
        mut edits: Vec<Edit>,
        ids: &[u32],
        mut wanted: Wanted<'_>,
    ) -> Result<Option<u32>, Fault> {
        let mut position = 0;
        let mut follows = None;
        while position < ids.len() {
            // Without a tail the kernel of waves has no logits.
            let is_decided = self.waves.as_ref().is_some_and(|waves| waves.decides());
            let others = usize::from(matches!(wanted, Wanted::Last(_)) && !is_decided);
            let left = ids.len() - position - others;
            let waves =
                self.waves.as_mut().filter(|_| left >= CHUNK_MIN as usize && !matches!(wanted, Wanted::Each(_)));
            let most = waves.as_ref().map_or(self.rows.shape(), |waves| waves.shape()).rows as usize;
            let count = match waves {
                Some(_) => next_chunk(left as u32, most as u32) as usize,
                None => (ids.len() - position).min(most),
            };
            let tokens = &ids[position..position + count];
            let is_last = position + count == ids.len();
            let deciding = match &wanted {
                Wanted::Last(row) if is_last => Some(*row),
                _ => None,
            };
            let wants_logits = matches!(wanted, Wanted::Each(_)) || deciding.is_some();
            let positions = (position as u32..).take(count);
            let row = |position| {
                // In a chunk of waves only the last row.
                let wants_logits = wants_logits && (waves.is_none() || position as usize + 1 == ids.len());
                Row { sequence, position, wants_logits }
            };
            let rows = positions.clone().map(row).collect();
            let request = Request { rows, steps: 1, edits: std::mem::take(&mut edits) };
            let tables = guard.admit(&request).map_err(|refused| Fault::internal(refused.to_string()))?;
            match waves {
                Some(waves) => {
                    let last = deciding.map_or(Last::Nothing, |row| Last::Token { row, with_logits: true });
                    follows = waves.read(tables, tokens, last)?.token;
                }
                None => {
                    let mut inputs = given(tokens);
                    if let (Some(last), Some(row)) = (inputs.last_mut(), deciding) {
                        *last = RowInput { first: last.first, ..row };
                    }
                    let launched = self.rows.run_whole(tables, &inputs, wants_logits)?;
                    follows = launched.tokens.get(1).and_then(|decided| decided.get(count - 1)).copied();
                }
            }
            if let Wanted::Each(on_row) = &mut wanted {
                for (row, position) in (0u32..).zip(positions) {
                    on_row(position, &self.rows.logits(row)?);
                }
            }
            position += count;
        }
        Ok(follows)
    }
}

/// Kernels that read a prompt in chunks into the cache of the kernel for one row: one for rows, and one of waves for long chunks where there
/// is one. Block `b` of the only sequence is page `b` of the pool, so positions lie where the kernel for one row has them.
pub struct Prefill {
    rows: RowsSession,
    waves: Option<WavesSession>,
}

impl Prefill {
    /// Shorter prompts are read by the kernel for one row: a launch costs as much as some of its steps.
    pub const PROMPT_MIN: usize = 32;

    /// Proves and compiles the kernels for the weights and the cache of the chain's own; why there are none otherwise. The user is told why there
    /// are none by waves.
    ///
    /// # Errors
    /// A cache that pages do not fill evenly, or in another order; what the compiler refuses.
    pub(super) fn made(chain: &Chain<'_>) -> Result<KernelSet, Fault> {
        Prefill::to_make(chain, chain.validated()?)?.compile(chain)
    }

    /// The kernels of [`Prefill::made`] before they are compiled. `one` is the chain's own schedule.
    ///
    /// # Errors
    /// A cache that pages do not fill evenly, or in another order.
    pub(super) fn to_make(chain: &Chain<'_>, one: &Validated) -> Result<PlannedSet, Fault> {
        let positions = u64::from(chain.context.manifest.decode.context_max);
        let room = |rows| Room { rows, sequences: 1, positions };
        let placed = place_prompt_kernel(&chain.context, &chain.candidate, room)?;
        let validated = Arc::new(prove_kernel(&chain.context, placed)?);
        beside_one_row(chain, &validated, one)?;
        let of = |(does, source), knobs| Planned { does, validated: Some(Arc::clone(&validated)), knobs, source };
        let does = Does::Steps { rows: validated.schedule().program.rows, by: By::Words };
        let mut planned = vec![of((does, rows_source(&chain.context, &validated, Trace::Off)), WaveKnobs::default())];
        let knobs = chosen_knobs(&chain.context, SearchKernel::Chunk, validated.schedule());
        match plan_prompts(chain.context.target, &validated, &knobs) {
            Ok(plan) => {
                planned.extend(plan.sources(&chain.context, Trace::Off).into_iter().map(|named| of(named, knobs)));
            }
            Err(fault) if fault.tier == Tier::Input => {
                let note = format!("prompts are read in short chunks: {}", fault.message);
                chain.context.workspace.report.note(&note);
            }
            Err(fault) => return Err(fault),
        }
        Ok(PlannedSet { is_alike: false, kernels: planned })
    }

    /// Loads kernels that were made beside `one`, the session of the kernel for one row. `queues` are those of the schedule,
    /// `waves` the kernels of waves, or none.
    ///
    /// # Errors
    /// What the device refuses; other kernels of waves than the plan has.
    pub fn of(
        device: &Device,
        target: &Target,
        queues: &Queues<'_>,
        cubin: &[u8],
        waves: Option<PromptCubins<'_>>,
        one: &Session,
    ) -> Result<Prefill, Fault> {
        let rows = RowsSession::load(device, queues, cubin, Trace::Off, 1, one.pack(), Some(one.cache()))?;
        let Some(waves) = waves else { return Ok(Prefill { waves: None, rows }) };
        let plan = plan_prompts(target, queues.validated(), &waves.knobs)?;
        Ok(Prefill { waves: Some(plan.load(device, waves, Trace::Off, one.pack(), one.cache())?), rows })
    }

    /// As [`Prefill::of`], of a set that [`Prefill::made`] made.
    ///
    /// # Errors
    /// As [`Prefill::of`]; other queues than those of the first proof.
    pub(super) fn of_set(
        workspace: &Workspace,
        device: &Device,
        target: &Target,
        set: &KernelSet,
        one: &Session,
    ) -> Result<Prefill, Fault> {
        let (steps, kernel) =
            set.steps().into_iter().next().ok_or_else(|| Fault::internal("prompts without a kernel for rows"))?;
        let queues = workspace.queues(&steps.validated)?;
        Prefill::of(device, target, &queues, &kernel.code.bytes, set.prompts(), one)
    }

    /// Makes, checks and loads the kernels beside `one`, the session of `prepared`; why there are none otherwise. What the cache of `one` holds is
    /// lost.
    ///
    /// # Errors
    /// As [`Prefill::made`] and [`Prefill::of`]; a kernel that computes something else.
    pub fn load(workspace: &Workspace, prepared: &Prepared, device: &Device, one: &Session) -> Result<Prefill, Fault> {
        let host = Host::new(workspace);
        let chain = prepared.chain(workspace, &host);
        let set = Prefill::made(&chain)?;
        ensure_beside(prepared, &chain, device, &set, one)?;
        Prefill::of_set(workspace, device, &prepared.target, &set, one)
    }

    fn reader(&mut self) -> Reader<'_> {
        Reader { rows: &mut self.rows, waves: self.waves.as_mut() }
    }

    /// What bounds the tables of its launches.
    pub fn shape(&mut self) -> Shape {
        self.reader().shape()
    }

    /// Writes the cache of positions `0..ids.len()`, and tells the logits after each.
    ///
    /// # Errors
    /// What the device refuses; a launch that gave up.
    pub fn read(&mut self, ids: &[u32], on_row: OnRow<'_>) -> Result<(), Fault> {
        let mut text = OneText::new(self.shape());
        self.read_into(&mut text, ids, Wanted::Each(on_row)).map(|_| ())
    }

    /// Writes the cache of positions `0..ids.len()`: the token that `sampler` chooses after the last one. `None`: it may leave ids out, by top-k
    /// or top-p. These kernels do not have that, and the host takes longer for it than a step of the kernel for one row, so the last token is not
    /// read.
    ///
    /// # Errors
    /// What the device refuses; a launch that gave up.
    pub fn decide(&mut self, ids: &[u32], sampler: &Sampler) -> Result<Option<u32>, Fault> {
        let mut text = OneText::new(self.shape());
        self.decide_text(&mut text, ids, sampler)
    }

    /// As [`Prefill::decide`], for the first positions of `text`, whose guard has as many rows as [`Prefill::shape`] or more.
    ///
    /// # Errors
    /// As [`Prefill::decide`].
    pub(super) fn decide_text(
        &mut self,
        text: &mut OneText,
        ids: &[u32],
        sampler: &Sampler,
    ) -> Result<Option<u32>, Fault> {
        if sampler.is_filtered() {
            let others = &ids[..ids.len().saturating_sub(1)];
            return self.read_into(text, others, Wanted::Nothing).map(|_| None);
        }
        let (inverse_temperature, seed) = sampler.temperature_of_rows();
        let decided = self.read_into(text, ids, Wanted::Last(deciding(inverse_temperature, seed)))?;
        decided.map(Some).ok_or_else(|| Fault::internal("a prompt decided no token"))
    }

    /// As [`Prefill::decide_text`], and nothing is decided.
    ///
    /// # Errors
    /// As [`Prefill::decide`].
    pub(super) fn read_text(&mut self, text: &mut OneText, ids: &[u32]) -> Result<(), Fault> {
        self.read_into(text, ids, Wanted::Nothing).map(|_| ())
    }

    /// The batch kernel, which says what it left of each row.
    pub(super) fn rows(&mut self) -> &mut dyn RowLauncher {
        &mut self.rows
    }

    fn read_into(&mut self, text: &mut OneText, ids: &[u32], wanted: Wanted<'_>) -> Result<Option<u32>, Fault> {
        let edits = std::mem::take(&mut text.edits);
        self.reader().read(&mut text.guard, OneText::SEQUENCE, edits, ids, wanted)
    }
}

/// The only sequence of a cache that several kernels share: block `b` lies in page `b`, where the kernel for one row has it. Launches that
/// its guard has judged are all that write it.
pub(super) struct OneText {
    guard: Guard,
    /// Changes of the page table that the next launch gives to the guard.
    edits: Vec<Edit>,
}

impl OneText {
    const SEQUENCE: SequenceId = SequenceId(0);

    /// A text of which nothing is written. `shape` has the rows of the kernel with most of them.
    pub fn new(shape: Shape) -> OneText {
        let edit = |block| Edit { sequence: OneText::SEQUENCE, block, page: Some(PageId(block)) };
        OneText { guard: Guard::new(shape), edits: (0..shape.blocks()).map(edit).collect() }
    }

    /// Whether a step at `position` finds the recurrent states that it needs.
    pub fn goes_on_at(&self, position: u32) -> bool {
        self.guard.goes_on_at(OneText::SEQUENCE, position)
    }

    /// Tells that the recurrent state is that before `position`: a snapshot was put back.
    pub fn state_is_before(&mut self, position: u32) {
        self.guard.state_is_before(OneText::SEQUENCE, position);
    }

    /// The tables of a launch of `steps` steps that decides a token after each of `rows` rows from `position` on.
    ///
    /// # Errors
    /// A position that is not written yet, and is not the next one.
    pub fn admit(&mut self, position: u32, rows: u32, steps: u32) -> Result<Tables<'_>, Fault> {
        self.admit_rows(position, rows, steps, true)
    }

    /// As [`OneText::admit`]; without `wants_logits` no row decides anything.
    ///
    /// # Errors
    /// As [`OneText::admit`].
    pub fn admit_rows(
        &mut self,
        position: u32,
        rows: u32,
        steps: u32,
        wants_logits: bool,
    ) -> Result<Tables<'_>, Fault> {
        let row = |position| Row { sequence: OneText::SEQUENCE, position, wants_logits };
        let rows = (position..position + rows).map(row).collect();
        let request = Request { rows, steps, edits: std::mem::take(&mut self.edits) };
        self.guard.admit(&request).map_err(|refused| Fault::internal(refused.to_string()))
    }
}

/// Makes sure that kernels over the weights and the cache of `one` were compared on a device of this kind.
///
/// # Errors
/// A kernel that computes something else.
fn ensure_beside(
    prepared: &Prepared,
    chain: &Chain<'_>,
    device: &Device,
    set: &KernelSet,
    one: &Session,
) -> Result<(), Fault> {
    if prepared.checking == Checking::Skipped {
        return Ok(());
    }
    let none = || Fault::internal("a device that runs a kernel is gone");
    let found = chain.host.device(&prepared.target)?.ok_or_else(none)?;
    let pack = || Ok(chain.pack()?);
    Checks::of(chain, found, &pack)?
        .ensure(set, &mut || set.load(device, &prepared.target, checks::STEPS_MAX, &one.pack(), Some(one.cache())))
}

/// Makes, checks and loads what runs steps of at least `rows` rows over the weights and the cache of `one`, the session of `prepared`.
///
/// # Errors
/// More rows than a step has; a kernel that does not fit the target; a cache that pages do not fill evenly; what compiler or device
/// refuse.
pub(super) fn load_verifier(
    workspace: &Workspace,
    prepared: &Prepared,
    device: &Device,
    one: &Session,
    rows: u32,
) -> Result<Box<dyn RowLauncher>, Fault> {
    let host = Host::new(workspace);
    let chain = prepared.chain(workspace, &host);
    let positions = u64::from(chain.context.manifest.decode.context_max);
    let room = Room { rows: step_rows_for(rows)?, sequences: 1, positions };
    let kernel = StepsKernels::new(&chain.context, &chain.candidate).of(room)?;
    refuse_turns(&prepared.target, rows, &kernel)?;
    beside_one_row(&chain, &kernel.validated, chain.validated()?)?;
    if prepared.checking == Checking::Required {
        let does = Does::Steps { rows: kernel.rows, by: kernel.by };
        let (validated, source) = (Some(Arc::clone(&kernel.validated)), kernel.source(&chain.context, Trace::Off)?);
        let set = KernelSet::compile(&chain, false, vec![Planned { does, validated, knobs: kernel.knobs, source }])?;
        ensure_beside(prepared, &chain, device, &set, one)?;
    }
    load_launcher(&chain, device, &kernel, 1, one.pack(), Some(one.cache()))
}

/// Refuses steps of `rows` rows that several devices would need more than one launch of their kernel for.
///
/// # Errors
/// There are several devices, and the kernel has fewer rows.
pub(super) fn refuse_turns(target: &Target, rows: u32, kernel: &StepsKernel) -> Result<(), Fault> {
    let (devices, most) = (target.devices, kernel.launch_rows());
    if devices == 1 || rows <= most {
        return Ok(());
    }
    let message = format!("no kernel of {devices} devices runs {rows} rows of this model, at most {most}");
    Err(Fault::input(message).with_remedy("ask for fewer rows, or name a target of one device with `--target`"))
}

/// Takes a kernel whose cache is that of `one`, the chain's own, which has one row.
///
/// # Errors
/// A cache that pages do not fill evenly, or in another order.
fn beside_one_row(chain: &Chain<'_>, validated: &Validated, one: &Validated) -> Result<(), Fault> {
    let Err(differs) = share_caches(validated, one) else { return Ok(()) };
    let context_max = chain.context.manifest.decode.context_max;
    Err(Fault::input(format!("`context_max` {context_max} is not a multiple of the rows of a page: {differs}"))
        .with_remedy("choose a multiple of 256, so that kernels for rows share the cache"))
}

/// What a benchmark of rows found at one number of rows.
pub struct RowsTimed {
    /// Rows of a step; for a prompt, those of a chunk.
    pub rows: u32,
    /// Rows of the kernel.
    pub kernel: u32,
    pub position: u32,
    pub checked: check::Figures,
    pub took: Took,
}

/// What was timed.
pub enum Took {
    /// A step of each launch, microseconds; ascending.
    Steps(Vec<f64>),
    /// The same with a sampler between two steps, which chooses by top-p and penalties for every row.
    Sampled(Vec<f64>),
    /// Steps whose first row is at the position and the others are at `others`, microseconds, ascending.
    Ragged { others: u32, splits: bool, is_served: bool, step_us: Vec<f64> },
    /// How long the device is idle between two launches, microseconds, ascending: if each is waited for before the next one is queued, and if
    /// the next one is queued while it runs.
    Gaps { waited_us: Vec<f64>, queued_us: Vec<f64> },
    /// A prompt of this many tokens, milliseconds each time; ascending.
    Prompt { tokens: u32, ms: Vec<f64> },
    /// Nothing: rows of batches and chunks have the bits that they have alone.
    Alike(check::Alike),
}

/// What a benchmark of rows finds, in the order in which it is found.
pub enum FoundOfRows<'a> {
    Own(&'a RowsTimed),
    /// Beside the last of our own figures.
    Versus(&'a Versus),
}

/// Launches of a measurement, and steps of each.
pub(super) const LAUNCHES: usize = 20;
/// Launches before the first that is timed.
const WARM_UP: usize = 3;
pub(super) const STEPS: u32 = 16;
/// Prompts of a measurement.
const PROMPTS: usize = 5;
/// Rounds of launches between which gaps are measured, and steps of each launch.
const GAP_ROUNDS: usize = 3;
const GAP_STEPS: u32 = 2;

/// What is timed.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    /// Sequences that decode together.
    pub rows: &'a [u32],
    /// Lengths of prompts, and rows of the kernels that read each. None: the one that reads prompts.
    pub prompts: &'a [u32],
    pub chunks: &'a [u32],
}

/// Times steps of each number of rows at each position, without and with a sampler, and prompts, after the logits of each kernel and
/// the choices of the sampler were compared. The programs of `request` take turns with steps without a sampler, and with prompts.
///
/// # Errors
/// As `bench`; a kernel that does not fit the target.
pub fn bench_rows(
    workspace: &Workspace,
    manifest: &Manifest,
    target: &Target,
    Asked { rows, prompts, chunks }: Asked<'_>,
    request: &bench::Request,
    on_found: &mut dyn FnMut(FoundOfRows<'_>) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let model = import_stage(workspace, manifest)?;
    let host = Host::new(workspace);
    let chain = Chain::chosen(BuildContext::new(workspace, manifest, target, &model)?, &host)?;
    let no_kernels =
        || Fault::input(format!("target `{}` has no kernels for rows, they need a CUDA target", target.name));
    if invariant::is_asked(manifest, target) {
        let found = host.device(target)?.ok_or_else(no_kernels)?;
        let device = execute::open(found, target)?;
        let mut programs = Programs::open(&chain, &found.uuid, request)?;
        return invariant::bench(&chain, &device, Asked { rows, prompts, chunks }, &mut programs, on_found);
    }
    let [smallest, .., most] = STEP_ROWS;
    // The kernels of a server: one row has a kernel of its own.
    let of = |&rows: &u32| if rows == 1 { Ok((1, 1)) } else { Ok((step_rows_for(rows)?, rows)) };
    let rows: Vec<(u32, u32)> = rows.iter().map(of).collect::<Result<_, Fault>>()?;
    let device = execute::open(host.device(target)?.ok_or_else(no_kernels)?, target)?;
    // A baseline that cannot start is known before anything is timed.
    let mut programs = Programs::open(&chain, &device.identity().uuid, request)?;
    let pack = chain.pack()?;
    let mut shared = None;
    let position_last = manifest.decode.time_positions.iter().max().copied().unwrap_or(0) + STEPS + 1;
    let room = |kernel: u32| {
        let longest = prompts.iter().max().copied().unwrap_or(0);
        // The check of waves has two sequences.
        let prompted =
            if kernel == smallest { longest.max(2 * WAVES_POSITIONS.next_multiple_of(256)) } else { longest };
        let last = position_last.max(prompted.div_ceil(kernel));
        // The check of one row has two sequences.
        let sequences = kernel.max(2);
        let of_each = room_of_each(&chain.context, &chain.candidate, last);
        Room { rows: kernel, sequences, positions: u64::from(sequences) * of_each }
    };
    let base = place_kernel(&chain.context, &chain.candidate, room(smallest))?;
    let chunk_most = chunk_rows(&base.program);
    if let Some(wrong) = chunks.iter().find(|rows| !STEP_ROWS.contains(rows) && **rows != chunk_most) {
        let all: Vec<String> = STEP_ROWS.iter().chain([&chunk_most]).map(|rows| rows.to_string()).collect();
        let all = one_of(all.iter().map(String::as_str));
        return Err(Fault::input(format!("chunks of {wrong}: expected {all}, as many as a kernel has rows")));
    }
    let (chunks, by_waves) = match (prompts, chunks) {
        ([], _) => (vec![], false),
        (_, []) => match derive_chunks(&base, target) {
            Ok(_) => (vec![], true),
            Err(_) => (vec![place_prompt_kernel(&chain.context, &chain.candidate, room)?.program.rows], false),
        },
        (_, chunks) => (chunks.to_vec(), chunks.contains(&chunk_most)),
    };
    let sampler = chain.compile(&sampler_source(target))?;
    let vocab = model.imported.graph.vocab;
    let mut sampler = SamplerSession::load(&device, &sampler.bytes, vocab, most, STEPS)?;
    for &kernel in [1].iter().chain(&STEP_ROWS) {
        let of_kernel: Vec<u32> = rows.iter().filter(|(of, _)| *of == kernel).map(|&(_, rows)| rows).collect();
        let by_waves = by_waves && kernel == smallest;
        if of_kernel.is_empty() && !chunks.contains(&kernel) && !by_waves {
            continue;
        }
        let begun = Instant::now();
        let of_steps = match kernel {
            1 => {
                let one = one_row_kernel(&chain.context, &chain.candidate, room(kernel))?;
                StepsKernel { validated: Arc::new(one), rows: 1, by: By::Words, knobs: WaveKnobs::default() }
            }
            _ => StepsKernels::new(&chain.context, &chain.candidate).of(room(kernel))?,
        };
        refuse_turns(target, kernel, &of_steps)?;
        let validated = of_steps.validated.as_ref();
        workspace.report.note(&format!("{kernel} rows: proven in {:.0} ms", begun.elapsed().as_secs_f64() * 1e3));
        let device_pack = match &shared {
            Some(pack) => Arc::clone(pack),
            None => shared.insert(upload_pack(&device, validated, &pack)?).clone(),
        };
        let parameters = model.imported.graph.parameter_count();
        let mut session = load_launcher(&chain, &device, &of_steps, STEPS, device_pack, None)?;
        let session = session.as_mut();
        let checked = check_rows(validated, pack.clone(), parameters, session)?;
        for &position in &manifest.decode.time_positions {
            for &rows in &of_kernel {
                let of = (rows, kernel, position, checked.figures());
                bench_steps(session, &mut sampler, of, &mut programs, on_found)?;
            }
        }
        if chunks.contains(&kernel) {
            let mut reader = Reader { rows: &mut *session, waves: None };
            bench_prompts(&mut reader, prompts, vocab, (kernel, kernel, checked.figures()), &mut programs, on_found)?;
        }
        if by_waves {
            let (mut waves, checked) = waves_beside(&chain, &device, validated, &checked, session)?;
            let mut reader = Reader { rows: &mut *session, waves: Some(&mut waves) };
            bench_prompts(
                &mut reader,
                prompts,
                vocab,
                (chunk_most, kernel, checked.figures()),
                &mut programs,
                on_found,
            )?;
        }
    }
    Ok(())
}

/// Times steps alone, against baselines, between launches, and with the sampler. `of` has the rows of a step and of the kernel, the position,
/// and what was checked.
pub(super) fn bench_steps(
    session: &mut dyn RowLauncher,
    sampler: &mut SamplerSession,
    (rows, kernel, position, checked): (u32, u32, u32, check::Figures),
    programs: &mut Programs<'_>,
    on_found: &mut dyn FnMut(FoundOfRows<'_>) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let timed = |took| RowsTimed { rows, kernel, position, checked, took };
    let mut decoding = Decoding::at(session, rows, position, STEPS)?;
    let took = Took::Steps(time_rows(session, &mut decoding, position)?);
    on_found(FoundOfRows::Own(&timed(took)))?;
    let mut own = || time_launch(session, &mut decoding, position);
    let versus = &mut |versus: &Versus| on_found(FoundOfRows::Versus(versus));
    programs.against(Work::Step { rows, position }, STEPS, &mut own, versus)?;
    if let Some(took) = time_gaps(session, rows, position)? {
        on_found(FoundOfRows::Own(&timed(took)))?;
    }
    let took = Took::Sampled(time_sampled(session, sampler, rows, position)?);
    on_found(FoundOfRows::Own(&timed(took)))
}

/// Times prompts of each length, alone and against baselines. `of` has the rows of a chunk and of the kernel, and what was checked.
pub(super) fn bench_prompts(
    reader: &mut Reader<'_>,
    prompts: &[u32],
    vocab: u32,
    (rows, kernel, checked): (u32, u32, check::Figures),
    programs: &mut Programs<'_>,
    on_found: &mut dyn FnMut(FoundOfRows<'_>) -> Result<(), Fault>,
) -> Result<(), Fault> {
    for &tokens in prompts {
        let ids = check::check_ids(vocab, tokens);
        let mut own = || Ok(time_prompt(reader, &ids)? * 1e3);
        let mut ms = (0..PROMPTS).map(|_| Ok(own()? * 1e-3)).collect::<Result<Vec<f64>, Fault>>()?;
        ms.sort_by(f64::total_cmp);
        let took = Took::Prompt { tokens, ms };
        on_found(FoundOfRows::Own(&RowsTimed { rows, kernel, position: 0, checked, took }))?;
        let versus = &mut |versus: &Versus| on_found(FoundOfRows::Versus(versus));
        programs.against(Work::Prompt { tokens }, 1, &mut own, versus)?;
    }
    Ok(())
}

/// Reads a prompt in chunks: milliseconds until the logits after the last token are there, launches included.
pub(super) fn time_prompt(reader: &mut Reader<'_>, ids: &[u32]) -> Result<f64, Fault> {
    let shape: Shape = reader.shape();
    let (mut pool, mut guard) = (Pool::new(shape), Guard::new(shape));
    let reserved = pool.open().and_then(|sequence| pool.reserve(sequence, ids.len() as u32).map(|()| sequence));
    let sequence = reserved.map_err(|error| Fault::internal(error.to_string()))?;
    let edits = pool.take_edits();
    let begun = Instant::now();
    reader.read(&mut guard, sequence, edits, ids, Wanted::Last(deciding(0.0, 0)))?;
    Ok(begun.elapsed().as_secs_f64() * 1e3)
}

/// Sequences of their own, one a row, which decode.
pub(super) struct Decoding {
    guard: Guard,
    sequences: Vec<SequenceId>,
    edits: Vec<Edit>,
    inputs: Vec<RowInput>,
    /// How many positions the first sequence is ahead of all others.
    ahead: u32,
}

impl Decoding {
    /// `rows` sequences that have decoded up to `position`, with room for `steps` more.
    ///
    /// # Errors
    /// What the device refuses; a launch that gave up.
    pub(super) fn at(session: &mut dyn RowLauncher, rows: u32, position: u32, steps: u32) -> Result<Decoding, Fault> {
        Decoding::with_others(session, rows, (position, position), steps)
    }

    /// As [`Decoding::at`], with all sequences but the first at `others`. The first one reads what it is ahead as a prompt.
    ///
    /// # Errors
    /// As [`Decoding::at`].
    pub(super) fn with_others(
        session: &mut dyn RowLauncher,
        rows: u32,
        (position, others): (u32, u32),
        steps: u32,
    ) -> Result<Decoding, Fault> {
        let shape: Shape = *session.shape();
        let mut pool = Pool::new(shape);
        let mut opened = |row: u32| {
            let sequence = pool.open()?;
            pool.reserve(sequence, if row == 0 { position } else { others } + steps + 1)?;
            Ok(sequence)
        };
        let sequences: Vec<_> = (0..rows)
            .map(&mut opened)
            .collect::<Result<_, crate::pages::PoolError>>()
            .map_err(|error| Fault::internal(format!("the pool has no room for {rows} sequences: {error}")))?;
        let inputs = given(&(1..=rows).collect::<Vec<_>>());
        let (guard, ahead) = (Guard::new(shape), position - others);
        let mut decoding = Decoding { guard, sequences, edits: pool.take_edits(), inputs, ahead };
        for at in (0..ahead).step_by(shape.rows as usize) {
            let count = shape.rows.min(ahead - at);
            let row = |position| Row { sequence: decoding.sequences[0], position, wants_logits: false };
            let rows = (at..at + count).map(row).collect();
            let request = Request { rows, steps: 1, edits: std::mem::take(&mut decoding.edits) };
            let tables = decoding.guard.admit(&request).map_err(|refused| Fault::internal(refused.to_string()))?;
            session.run_whole(tables, &given(&check::check_ids(session.vocab(), count)), false)?;
        }
        let mut at = ahead;
        while at < position {
            let steps = session.steps_max().min(position - at);
            let (tables, inputs) = decoding.launch(at, steps)?;
            session.run_whole(tables, inputs, false)?;
            at += steps;
            decoding.go_on();
        }
        Ok(decoding)
    }

    /// Lets the launches that follow begin with what each row decides in the launch before.
    fn go_on(&mut self) {
        (0..).zip(&mut self.inputs).for_each(|(row, input)| input.first = FirstToken::Decided(row));
    }

    pub(super) fn rows(&self) -> u32 {
        self.sequences.len() as u32
    }

    /// The token of each row in the first step of the launches that follow; before, it is what the row decided last.
    pub(super) fn give_tokens(&mut self, token: impl Fn(u32) -> u32) {
        (0..).zip(&mut self.inputs).for_each(|(row, input)| input.first = FirstToken::Given(token(row)));
    }

    /// The tables of a launch of `steps` steps. The first sequence is at `from`. Launches may begin at one position again and again: recurrent states are
    /// then those that the launch before left.
    pub(super) fn launch(&mut self, from: u32, steps: u32) -> Result<(Tables<'_>, &[RowInput]), Fault> {
        self.inputs.iter_mut().for_each(|input| input.steps = steps);
        let ahead = self.ahead;
        let row = |(row, &sequence)| {
            let position = if row == 0 { from } else { from - ahead };
            Row { sequence, position, wants_logits: true }
        };
        let rows: Vec<Row> = self.sequences.iter().enumerate().map(row).collect();
        rows.iter().for_each(|row| self.guard.state_is_before(row.sequence, row.position));
        let request = Request { rows, steps, edits: std::mem::take(&mut self.edits) };
        let tables = self.guard.admit(&request).map_err(|refused| Fault::internal(refused.to_string()))?;
        Ok((tables, &self.inputs))
    }
}

/// The same steps of `decoding` from `position` on, again and again: microseconds of a step of each launch, ascending.
pub(super) fn time_rows(
    session: &mut dyn RowLauncher,
    decoding: &mut Decoding,
    position: u32,
) -> Result<Vec<f64>, Fault> {
    for _ in 0..WARM_UP {
        time_launch(session, decoding, position)?;
    }
    let timed = (0..LAUNCHES).map(|_| time_launch(session, decoding, position));
    let mut step_us = timed.collect::<Result<Vec<f64>, Fault>>()?;
    step_us.sort_by(f64::total_cmp);
    Ok(step_us)
}

/// Microseconds of a step of one launch from `position` on.
pub(super) fn time_launch(session: &mut dyn RowLauncher, decoding: &mut Decoding, position: u32) -> Result<f64, Fault> {
    let (tables, inputs) = decoding.launch(position, STEPS)?;
    Ok(session.run_whole(tables, inputs, false)?.device_us / f64::from(STEPS))
}

/// Sequences of their own decode up to `position`, and then the same tokens in short launches: the gaps between these. `None`: no launch
/// is queued while another one runs, for steps of more rows than the kernel has.
///
/// # Errors
/// What the device refuses; launches that were queued ahead and decided other tokens.
fn time_gaps(session: &mut dyn RowLauncher, rows: u32, position: u32) -> Result<Option<Took>, Fault> {
    let mut decoding = Decoding::at(session, rows, position, STEPS)?;
    let (mut waited_us, mut queued_us) = (vec![], vec![]);
    let positions = || (position..position + STEPS).step_by(GAP_STEPS as usize);
    for _ in 0..GAP_ROUNDS {
        let (mut waited, mut queued) = (vec![], vec![]);
        decoding.give_tokens(|row| row + 1);
        for at in positions() {
            let (tables, inputs) = decoding.launch(at, GAP_STEPS)?;
            waited.push(session.run_whole(tables, inputs, false)?.tokens);
            decoding.go_on();
            if at > position {
                waited_us.push(session.gap_us()?);
            }
        }
        decoding.give_tokens(|row| row + 1);
        for at in positions() {
            if at > position && session.last_step()?.is_none() {
                session.finish()?;
                return Ok(None);
            }
            let (tables, inputs) = decoding.launch(at, GAP_STEPS)?;
            session.queue(tables, inputs, false)?;
            decoding.go_on();
            if at > position {
                queued.push(session.finish()?.tokens);
            }
            if at > position + GAP_STEPS {
                queued_us.push(session.gap_us()?);
            }
        }
        queued.push(session.finish()?.tokens);
        queued_us.push(session.gap_us()?);
        // A second reading finds the recurrent states that the first one left, so it decides otherwise.
        if !session.shape().has_state && queued != waited {
            return Err(Fault::internal("launches that were queued ahead decided other tokens"));
        }
    }
    waited_us.sort_by(f64::total_cmp);
    queued_us.sort_by(f64::total_cmp);
    Ok(Some(Took::Gaps { waited_us, queued_us }))
}

/// Traces steps of `rows` rows: as many sequences decode up to `position`, and then `steps` steps with time stamps, after `warm_up`
/// launches like it. If the kernel has fewer rows, one of its launches is traced, and the user is told. The kernel is not checked:
/// `bench --rows` does that.
///
/// # Errors
/// Positions of one sequence of which `last` are read, in whole pages.
pub(super) fn room_of_each(context: &BuildContext<'_>, candidate: &Candidate, last: u32) -> u64 {
    let BuildContext { manifest, target, imported, .. } = *context;
    whole_pages(&imported.graph, manifest.precision, target, candidate, last.next_multiple_of(256))
}

/// Refuses a kernel whose blocks of other devices leave no stamps.
pub(super) fn one_device(target: &Target, what: &str) -> Result<(), Fault> {
    if target.devices == 1 {
        return Ok(());
    }
    let message = format!("{what} is traced on one device, target `{}` has {}", target.name, target.devices);
    Err(Fault::input(message)
        .with_remedy("name a target of one device with `--target`, or trace a prompt or 32 rows and more"))
}

/// As [`bench_rows`]; more rows than a step has.
pub(super) fn trace_rows(
    chain: &Chain<'_>,
    device: &Device,
    rows: u32,
    position: u32,
    steps: u32,
    warm_up: u32,
) -> Result<Traced, Fault> {
    let BuildContext { manifest, target, .. } = chain.context;
    let is_alike = invariant::is_asked(manifest, target);
    let of = if is_alike { invariant::kernel_rows(rows)? } else { step_rows_for(rows)? };
    let positions = u64::from(of) * room_of_each(&chain.context, &chain.candidate, position + steps + 1);
    let room = Room { rows: of, sequences: of, positions };
    if is_alike {
        let validated = Arc::new(invariant::schedule(&chain.context, &chain.candidate, room)?);
        let proven = invariant::with_rows(&invariant::plan(target, &validated)?, of)?.clone();
        let pack = upload_pack(device, &validated, &chain.pack()?)?;
        let cubin = chain.compile(&waves_source(&chain.context, &proven, Trace::On))?;
        let (spans, device_us) = trace_waves(device, &proven, &cubin.bytes, pack, (rows, position, steps), warm_up)?;
        return Ok(Traced { validated: Arc::clone(&validated), rows, spans, device_us });
    }
    let kernel = StepsKernels::new(&chain.context, &chain.candidate).of(room)?;
    let (rows, asked) = (rows.min(kernel.launch_rows()), rows);
    if rows < asked {
        let launches = asked.div_ceil(rows);
        let told = format!("a step of {asked} rows is {launches} launches of up to {rows} rows: one of them is traced");
        chain.context.workspace.report.note(&told);
    }
    let validated = kernel.validated.as_ref();
    let pack = upload_pack(device, validated, &chain.pack()?)?;
    let cubin = chain.compile(&kernel.source(&chain.context, Trace::On)?)?;
    if let Some(proven) = kernel.plan(chain.context.target)? {
        let (spans, device_us) = trace_waves(device, &proven, &cubin.bytes, pack, (rows, position, steps), warm_up)?;
        return Ok(Traced { validated: kernel.validated, rows, spans, device_us });
    }
    one_device(target, &format!("the batch kernel for {rows} rows"))?;
    let queues = chain.context.workspace.queues(validated)?;
    let mut session = RowsSession::load(device, &queues, &cubin.bytes, Trace::On, steps, pack, None)?;
    let mut decoding = Decoding::at(&mut session, rows, position, steps)?;
    for _ in 0..warm_up {
        let (tables, inputs) = decoding.launch(position, steps)?;
        session.run_whole(tables, inputs, false)?;
    }
    let (tables, inputs) = decoding.launch(position, steps)?;
    let stamped = session.run_traced(tables, inputs)?;
    let stamps = Stamps { words: &stamped.words, tasks_max: stamped.tasks_max, position, steps };
    let spans = spans(validated.schedule(), stamps).map_err(|error| Fault::internal(format!("the trace: {error}")))?;
    Ok(Traced { validated: kernel.validated, rows, spans, device_us: stamped.device_us })
}

/// As [`trace_rows`], of a plan of waves: `rows` sequences, from a position on, so many steps.
fn trace_waves(
    device: &Device,
    proven: &Proven<'_>,
    cubin: &[u8],
    pack: Arc<DeviceBuffer>,
    (rows, position, steps): (u32, u32, u32),
    warm_up: u32,
) -> Result<(Vec<Span>, f64), Fault> {
    let mut session = StepsSession::load(device, proven, cubin, Trace::On, steps, pack, None)?;
    let mut decoding = Decoding::at(&mut session, rows, position, steps)?;
    let mut device_us = 0.0;
    for _ in 0..=warm_up {
        let (tables, inputs) = decoding.launch(position, steps)?;
        device_us = session.run_whole(tables, inputs, false)?.device_us;
    }
    let [spans] = named_spans([(proven, steps, &session.stamps(steps)?)])?;
    Ok((spans, device_us))
}

/// A launch with time stamps.
pub(super) struct Traced {
    pub validated: Arc<Validated>,
    /// Its rows.
    pub rows: u32,
    pub spans: Vec<Span>,
    pub device_us: f64,
}
