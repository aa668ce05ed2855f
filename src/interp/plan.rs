//! Owns `Plan`: a schedule with every operand resolved to elements and bytes, so that executing a task looks up nothing.

use super::memory::{Access, Cache, CacheColumns, Place, Region};
use super::real::read_value;
use super::synthetic::CacheKind;
use crate::dtype::DType;
use crate::format::Format;
use crate::ir::layout::{Matrix, constant_row_bytes, matrices, pack_bytes, placed_bytes};
use crate::ir::op::{self, Epilogue, NormAttr, Op, PARTIAL_HEADER, Role};
use crate::ir::program::{Buffer, Grid, Operand, Program, Rows, Space, dealt, part_of};
use crate::ir::schedule::{Event, Ring, Schedule, Source, Task};
use crate::ir::variant::MatVecVariant;
use crate::ir::{BufferId, EventId, GridId, LayerId, SmId, TaskId};
use crate::model::graph::QkNormSpan;
use crate::rows::Shape;
use std::collections::BTreeMap;
use std::ops::Range;
use thiserror::Error;

/// Why a schedule and its pack cannot be executed. A validated schedule and the pack made from it give none of these.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PlanError {
    #[error("{task} runs {grid}, which the program does not have")]
    Grid { task: TaskId, grid: GridId },
    #[error("{place} names {found}, which does not exist")]
    Reference { place: String, found: String },
    #[error("{grid} (`{op}`) has no operand `{role}`", role = role.name())]
    Operand { grid: GridId, op: &'static str, role: Role },
    #[error("{task}: operand `{role}` touches nothing, expected a region", role = role.name())]
    Empty { task: TaskId, role: Role },
    #[error("{task}: operand `{role}` ends at column {end}, {buffer} has {cols}", role = role.name())]
    Bounds { task: TaskId, role: Role, buffer: BufferId, end: u64, cols: u32 },
    #[error("{task}: operand `{role}` has {found} columns, expected {expected}", role = role.name())]
    Width { task: TaskId, role: Role, expected: usize, found: usize },
    #[error("{task}: operand `{role}` is in {found} memory, which this role cannot use", role = role.name())]
    Space { task: TaskId, role: Role, found: &'static str },
    #[error("{task} takes {found} launch indices, expected 1")]
    Indices { task: TaskId, found: u32 },
    #[error("{task} streams {found} bytes in adjacent runs, its weights take {expected}")]
    Stream { task: TaskId, expected: u64, found: u64 },
    #[error("the pack has {found} bytes, expected {expected}")]
    Pack { expected: u64, found: u64 },
    #[error("{buffer} takes {bytes} bytes, more than this machine can address")]
    Size { buffer: BufferId, bytes: u64 },
    #[error("the schedule has no `{role}` operand, expected one grid that writes it", role = role.name())]
    Missing { role: Role },
    #[error("{grid} streams weights, and has no variant that says in which chunks")]
    Variant { grid: GridId },
    #[error("{grid} chooses among {parts} parts, which its matrix or its bias does not have")]
    Parts { grid: GridId, parts: u32 },
    #[error("no regime serves position 0")]
    Regimes,
    #[error("{sms} SMs are declared, a regime has {queues} queues and {streams} streams")]
    Queues { sms: u32, queues: usize, streams: usize },
}

pub struct Plan {
    pub sms: usize,
    pub context_max: u32,
    /// What bounds the tables of its launches; `None`: it has no tables.
    pub tables: Option<Shape>,
    pub vocab: usize,
    pub exchange_words: usize,
    pub output_words: usize,
    /// Words of private memory of one SM.
    pub private_words: usize,
    pub caches: Vec<CacheShape>,
    pub routers: Vec<RouterShape>,
    /// fp32 constants, all buffers.
    pub constants: Vec<f32>,
    pub ring: Ring,
    /// Whether something of a text is kept that is no history: then positions follow one another.
    pub has_state: bool,
    pub logits: Region,
    /// Arg-max pairs of all tasks of the head.
    pub best: Region,
    /// By buffer: all of it, if it is an exchange buffer.
    pub exchanges: Vec<Option<Region>>,
    /// What the head reads.
    pub head_input: Option<BufferId>,
    pub regimes: Vec<RegimePlan>,
}

/// A cache buffer, and which half of which layer it is (in the order of the attention grids).
#[derive(Debug, Clone, PartialEq)]
pub struct CacheShape {
    pub buffer: BufferId,
    pub dtype: DType,
    pub rows: usize,
    pub cols: usize,
    pub layer: u32,
    pub kind: CacheKind,
    /// In fp8, the scale of each KV head.
    pub scales: Vec<f32>,
}

impl CacheShape {
    /// In fp8, what the codes of a column are multiplied by.
    pub fn scale_of(&self, column: u32) -> Option<f32> {
        self.scales.get(column as usize * self.scales.len() / self.cols.max(1)).copied()
    }

    /// A cache of this shape, of zeros.
    pub fn empty(&self) -> Cache {
        Cache::new(self.dtype, self.rows, self.cols, self.scales.clone())
    }
}

/// Where a layer chooses experts.
#[derive(Debug, Clone, PartialEq)]
pub struct RouterShape {
    pub layer: LayerId,
    /// Holds what rows choose.
    pub buffer: BufferId,
    pub op: op::Route,
    /// Added to the score of each expert for the choice; empty if nothing is.
    pub correction: Vec<f32>,
    /// Whether a launch that only fills the cache chooses, too: a cache is filled after it.
    pub fills: bool,
}

pub struct RegimePlan {
    pub from_position: u32,
    pub events: Vec<EventPlan>,
    /// One queue per SM.
    pub queues: Vec<Vec<TaskPlan>>,
    /// One stream per SM.
    pub streams: Vec<Vec<StreamRun>>,
    /// Ordinals whose arg-max pairs a step of this regime writes.
    pub parts: Vec<u32>,
    /// By the number of a launch's rows: signals of the tasks of rows that it does not have.
    pub absent: Vec<Vec<(EventId, u32)>>,
}

pub struct EventPlan {
    pub event: Event,
    /// Signals of one step.
    pub signals: u32,
}

pub struct TaskPlan {
    pub id: TaskId,
    pub waits: Box<[(EventId, u32)]>,
    pub signals: Box<[EventId]>,
    /// The row of the step that it takes; `None`: all of them.
    pub row: Option<usize>,
    /// The part of the sequences whose rows it takes, and how many parts there are.
    pub part: (u32, u32),
    pub work: Work,
}

/// One run of an SM's stream.
#[derive(Debug, Clone, PartialEq)]
pub struct StreamRun {
    pub task: TaskId,
    /// The loader waits for this event of the step first.
    pub after: Option<EventId>,
    pub bytes: StreamBytes,
}

#[derive(Debug, Clone, PartialEq)]
pub enum StreamBytes {
    /// So many bytes of the pack, in the chunks of the variant, from `begin` on; of the chosen parts, if there are parts.
    Fixed { begin: usize, bytes: usize, variant: MatVecVariant, chosen: Option<Chosen> },
    History {
        rows: usize,
        keys: CacheColumns,
        values: CacheColumns,
        op: op::Attention,
        j: u32,
        /// Whose history it is.
        row: usize,
    },
}

/// Which of the equal parts of a matrix a task computes with: what its ranges say is of the first.
#[derive(Debug, Clone, PartialEq)]
pub struct Chosen {
    /// The entries that say so, one for each slot of the task, or those of a row of the step.
    pub entry: Region,
    /// Parts are dealt when all rows have chosen.
    pub deal: Option<Deal>,
    pub parts: u32,
    /// Bytes of the pack from part to part: of units, and of the scales of rows.
    pub unit_bytes: usize,
    pub scale_bytes: usize,
    /// Bytes of a unit of a part.
    pub piece_bytes: usize,
    /// Biases of a part.
    pub biases: usize,
}

/// The share of a task of what is dealt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deal {
    pub j: u32,
    /// Tasks with a share.
    pub tasks: u32,
    /// Units of a part that are dealt.
    pub units: usize,
}

/// What is dealt to a task of one part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DealtPart {
    pub part: usize,
    /// Among those of the part that are dealt.
    pub units: Range<usize>,
    /// The rows of the step that chose the part, and in which slot.
    pub rows: Vec<(usize, usize)>,
}

impl Chosen {
    /// The parts that the step chose, by slot.
    pub fn parts(&self, memory: &mut impl Access) -> Vec<usize> {
        self.parts_of(0, memory)
    }

    fn parts_of(&self, row: usize, memory: &mut impl Access) -> Vec<usize> {
        let mut words = vec![0; self.entry.len];
        memory.load_words(&self.entry.row(row), &mut words);
        // The proof keeps them below the bound; kernels clamp them, too.
        words.into_iter().map(|word| word.min(self.parts.saturating_sub(1)) as usize).collect()
    }

    /// What is dealt to a task in a step of `rows` rows.
    pub fn dealt(&self, deal: &Deal, rows: usize, memory: &mut impl Access) -> Vec<DealtPart> {
        let mut chosen: BTreeMap<usize, Vec<(usize, usize)>> = BTreeMap::new();
        for row in 0..rows {
            let parts = self.parts_of(row, memory);
            parts.into_iter().enumerate().for_each(|(slot, part)| chosen.entry(part).or_default().push((row, slot)));
        }
        let share = dealt(chosen.len() * deal.units, deal.j, deal.tasks);
        let parts = chosen.into_iter().enumerate().map(|(place, (part, rows))| {
            let first = place * deal.units;
            let of = |at: usize| at.clamp(first, first + deal.units) - first;
            DealtPart { part, units: of(share.start)..of(share.end), rows }
        });
        parts.filter(|part| !part.units.is_empty()).collect()
    }

    /// Where the pack has what is dealt of a part, if the units of the first part begin at `begin`.
    pub fn bytes_of(&self, begin: usize, part: &DealtPart) -> Range<usize> {
        let at = |unit: usize| begin + part.part * self.unit_bytes + unit * self.piece_bytes;
        at(part.units.start)..at(part.units.end)
    }

    /// What a task with one slot streams.
    pub fn part(&self, memory: &mut impl Access) -> usize {
        self.parts(memory).first().copied().unwrap_or(0)
    }

    /// Where bytes `range` of what a task streams lie in the pack, piece by piece, if its units begin at `begin` in the first part. The units of
    /// `parts` follow one another: that of each slot, then the next unit of each.
    pub fn pieces(&self, begin: usize, range: Range<usize>, parts: &[usize]) -> impl Iterator<Item = Range<usize>> {
        let (piece, slots, mut at) = (self.piece_bytes.max(1), parts.len().max(1), range.start);
        std::iter::from_fn(move || {
            let (n, within) = (at / piece, at % piece);
            let len = (piece - within).min(range.end.checked_sub(at).filter(|left| *left > 0)?);
            at += len;
            let from = begin + n / slots * piece + within + parts.get(n % slots)? * self.unit_bytes;
            Some(from..from + len)
        })
    }
}

pub enum Work {
    Select { best: Region, token: Region },
    Report { token: Region, out: Region },
    Embed { token: Region, table: Table, residual: Region, out: Option<Region>, scale: f32 },
    Join { token: Region, table: Table, residual: Region, given: Region, out: Region, scale: f32 },
    Route(Box<Route>),
    Combine(Box<Combine>),
    MatVec(Box<MatVec>),
    Attention(Box<Attention>),
    AttentionMerge { head_dim: usize, splits: usize, heads: Vec<MergeHead> },
    NormAdd(Box<NormAdd>),
    Mix(Box<Mix>),
    Convolve(Box<Convolve>),
    Scan(Box<Scan>),
    GroupNorm(Box<GroupNorm>),
}

impl Work {
    /// The recurrent state that it updates.
    fn kept(&self) -> Option<&Kept> {
        match self {
            Work::Mix(mix) => Some(&mix.kept),
            Work::Convolve(convolve) => Some(&convolve.kept),
            Work::Scan(scan) => Some(&scan.kept),
            _ => None,
        }
    }
}

/// The part of a recurrent state that a task updates.
pub struct Kept {
    /// Of the model.
    pub layer: u32,
    /// Columns of the whole state of a sequence.
    pub cols: u32,
    /// In the memory of the SM that has the task: no other one finds it.
    pub region: Region,
}

impl Kept {
    /// Whether it has the same columns of the state, perhaps of other sequences.
    pub fn is_beside(&self, other: &Kept) -> bool {
        (self.layer, self.region.first) == (other.layer, other.region.first)
    }
}

/// A task that updates a recurrent state: its SM, the part of the sequences that it has and the number of parts, and what it keeps.
pub struct KeptBy<'p> {
    pub sm: usize,
    pub part: (u32, u32),
    pub kept: &'p Kept,
}

impl KeptBy<'_> {
    /// Whether the task has the state of `sequence`.
    pub fn has(&self, sequence: u32) -> bool {
        part_of(sequence, self.part.1) == self.part.0
    }
}

/// Channels of a short convolution. The constants are ranges of [`Plan::constants`], of these channels.
pub struct Convolve {
    pub op: op::Convolve,
    pub x: Region,
    pub b: Region,
    pub c: Region,
    pub conv: Range<usize>,
    pub bias: Option<Range<usize>>,
    pub kept: Kept,
    pub out: Region,
}

/// Mamba-2 of one head. The constants are ranges of [`Plan::constants`], of all channels and heads.
pub struct Scan {
    pub op: op::Scan,
    pub head: usize,
    pub x: Region,
    pub b: Region,
    pub c: Region,
    /// Of all heads.
    pub step: Region,
    pub gate: Option<Region>,
    pub conv: Range<usize>,
    pub bias: Option<Range<usize>>,
    pub a_log: Range<usize>,
    pub d: Range<usize>,
    pub dt_bias: Range<usize>,
    pub kept: Kept,
    pub out: Region,
}

/// The norm of one group of columns, with its gains as a range of [`Plan::constants`].
pub struct GroupNorm {
    pub op: op::GroupNorm,
    pub x: Region,
    pub gate: Option<Region>,
    pub norm: Range<usize>,
    pub out: Region,
}

/// A gated delta net of one value head.
pub struct Mix {
    pub op: op::Mix,
    /// The value head.
    pub head: usize,
    pub q: Region,
    pub k: Region,
    pub v: Region,
    pub gate: Region,
    /// Of all value heads, as the two constants after the taps.
    pub beta: Region,
    pub decay: Region,
    /// Ranges of [`Plan::constants`]; the taps are those of all channels.
    pub norm: Range<usize>,
    pub conv: Range<usize>,
    pub a_log: Range<usize>,
    pub dt_bias: Range<usize>,
    pub kept: Kept,
    pub out: Region,
}

/// The embedding table, row by row in the pack.
#[derive(Debug, Clone)]
pub struct Table {
    pub bytes: Range<usize>,
    pub dtype: DType,
    /// Of a table of codes.
    pub coded: Option<Format>,
    pub rows: u32,
    pub cols: u32,
    pub row_bytes: usize,
}

/// A norm with its constants, as ranges of [`Plan::constants`].
#[derive(Debug, Clone)]
pub struct Norm {
    pub attr: NormAttr,
    pub weight: Option<Range<usize>>,
    pub bias: Option<Range<usize>>,
}

pub struct MatVec {
    pub grid: GridId,
    pub x: Region,
    pub k: usize,
    pub norm: Option<Norm>,
    pub format: Format,
    pub units: usize,
    /// The first of its units among those of the grid.
    pub first_unit: usize,
    /// Rows of a unit.
    pub unit_rows: usize,
    /// Bytes of the pack.
    pub weight: Range<usize>,
    /// The same for the scales of its rows; empty if there are none.
    pub row_scales: Range<usize>,
    pub bias: Option<Range<usize>>,
    pub chosen: Option<Chosen>,
    /// What multiplies the result, where a slot counts so much.
    pub share: Option<Region>,
    pub epilogue: Epilogue,
    /// `Out`, or `Logits`.
    pub out: Option<Region>,
    pub residual: Option<Region>,
    /// The arg-max pair of the logits in `out`.
    pub best: Option<Region>,
}

impl MatVec {
    /// What is dealt to the task, if parts are dealt, in a step of `rows` rows.
    pub fn dealt(&self, rows: usize, memory: &mut impl Access) -> Option<Vec<DealtPart>> {
        let chosen = self.chosen.as_ref()?;
        chosen.deal.as_ref().map(|deal| chosen.dealt(deal, rows, memory))
    }

    /// Bytes that a task streams: what is dealt to it, or units of as many parts as there are slots.
    pub fn streamed_bytes(&self, dealt: Option<&[DealtPart]>) -> usize {
        match (dealt, &self.chosen) {
            (Some(parts), Some(chosen)) => parts.iter().map(|part| part.units.len() * chosen.piece_bytes).sum(),
            (_, chosen) => self.weight.len() * chosen.as_ref().map_or(1, |chosen| chosen.entry.len),
        }
    }
}

pub struct Route {
    /// Index into [`Plan::routers`].
    pub router: usize,
    pub op: op::Route,
    pub scores: Region,
    /// Range of [`Plan::constants`].
    pub correction: Option<Range<usize>>,
    pub shares: Region,
    pub out: Region,
}

pub struct Combine {
    pub op: op::Combine,
    /// One for each slot, then that of the shared expert.
    pub inputs: Vec<Region>,
    pub shares: Region,
    pub gate: Option<Region>,
    pub residual: Option<Region>,
    pub out: Option<Region>,
}

pub struct Attention {
    pub grid: GridId,
    pub op: op::Attention,
    /// Head group.
    pub i: u32,
    pub j: u32,
    pub q: Region,
    /// Present in the share that holds the current position.
    pub current: Option<Current>,
    pub q_norm: Option<Norm>,
    pub k_norm: Option<Norm>,
    /// Range of [`Plan::constants`] that holds the table, `rotary` values a row.
    pub rope: Option<Range<usize>>,
    pub cache_dtype: DType,
    /// Scales of keys and of values in fp8.
    pub cache_scales: [f32; 2],
    /// Range of [`Plan::constants`] with the sinks of the task's heads, in the share that adds them.
    pub sinks: Option<Range<usize>>,
    /// What the output is multiplied by, once through a sigmoid.
    pub gate: Option<Region>,
    pub keys: CacheColumns,
    pub values: CacheColumns,
    pub out: Region,
}

pub struct Current {
    pub k: Region,
    pub v: Region,
    /// Where this task appends keys and values; `None`: another task of the same KV head does.
    pub append: Option<(CacheColumns, CacheColumns)>,
}

pub struct MergeHead {
    /// Records of all shares of the head's group.
    pub partial: Region,
    /// First value of this head's record within a share, and values from one share to the next.
    pub first: usize,
    pub stride: usize,
    /// As of [`Attention`].
    pub gate: Option<Region>,
    pub out: Region,
}

pub struct NormAdd {
    pub y: Region,
    pub norm: Norm,
    pub scale: f32,
    pub residual: Region,
    pub out: Option<Region>,
}

/// Keys and values of each layer, in the order of the attention grids: the layers that `cache_value` numbers.
pub fn cache_buffers(program: &Program) -> Vec<(u32, (BufferId, BufferId))> {
    let mut layers: Vec<(u32, (BufferId, BufferId))> = vec![];
    for grid in &program.grids {
        if let (Some(k), Some(v)) = (grid.operand(Role::HistoryK), grid.operand(Role::HistoryV)) {
            let pair = (k.buffer, v.buffer);
            if !layers.iter().any(|(_, of)| *of == pair) {
                let counted = layers.len() as u32;
                layers.push((grid.site.and_then(|site| site.layer).map_or(counted, |layer| layer.0), pair));
            }
        }
    }
    layers
}

/// The layers with experts, and the buffers that hold what they choose.
pub fn choice_buffers(program: &Program) -> Vec<(LayerId, BufferId)> {
    routes(program).into_iter().map(|(layer, buffer, _)| (layer, buffer)).collect()
}

/// Layers that choose, where the choices lie, and the grids that choose.
fn routes(program: &Program) -> Vec<(LayerId, BufferId, GridId)> {
    let mut routes: Vec<(LayerId, BufferId, GridId)> = vec![];
    for (id, grid) in (0..).map(GridId).zip(&program.grids) {
        let choices = grid.operand(Role::Out).filter(|_| matches!(grid.op, Op::Route(_)));
        if let Some(choices) = choices.filter(|choices| routes.iter().all(|(_, of, _)| *of != choices.buffer)) {
            let layer = grid.site.and_then(|site| site.layer).unwrap_or(LayerId::from(routes.len()));
            routes.push((layer, choices.buffer, id));
        }
    }
    routes
}

impl Plan {
    pub fn new(schedule: &Schedule, pack: &[u8]) -> Result<Plan, PlanError> {
        let program = &schedule.program;
        let expected = pack_bytes(schedule);
        if (pack.len() as u64) < expected {
            return Err(PlanError::Pack { expected, found: pack.len() as u64 });
        }
        if schedule.regimes.first().is_none_or(|r| r.from_position != 0) {
            return Err(PlanError::Regimes);
        }
        let memory = MemoryMap::new(schedule, pack)?;
        let regimes = schedule
            .regimes
            .iter()
            .map(|regime| {
                let sms = schedule.machine.sms as usize;
                if regime.queues.len() != sms || regime.streams.len() != sms {
                    let (queues, streams) = (regime.queues.len(), regime.streams.len());
                    return Err(PlanError::Queues { sms: schedule.machine.sms, queues, streams });
                }
                let mut weights: Vec<Option<Range<usize>>> = vec![None; regime.tasks.len()];
                let mut streams = vec![];
                for stream in &regime.streams {
                    let resolve = |run: &crate::ir::schedule::Run| memory.run(schedule, regime, run, &mut weights);
                    streams.push(stream.iter().map(resolve).collect::<Result<_, _>>()?);
                }
                let mut events: Vec<EventPlan> =
                    regime.events.iter().map(|&event| EventPlan { event, signals: 0 }).collect();
                let mut parts = vec![];
                let mut queues = vec![];
                for (sm, queue) in regime.queues.iter().enumerate() {
                    let mut tasks = vec![];
                    for &id in queue {
                        let place = || SmId::from(sm).to_string();
                        let task = regime.tasks.get(id.index()).ok_or_else(|| reference(place(), id))?;
                        let streamed = weights[id.index()].clone();
                        let work = memory.work(program, id, task, streamed)?;
                        for &event in &task.signals {
                            let plan = events.get_mut(event.index()).ok_or_else(|| reference(id, event))?;
                            plan.signals += 1;
                        }
                        for wait in &task.waits {
                            events.get(wait.event.index()).ok_or_else(|| reference(id, wait.event))?;
                        }
                        if matches!(&work, Work::MatVec(m) if m.best.is_some()) {
                            parts.push(task.j);
                        }
                        let waits = task.waits.iter().map(|w| (w.event, w.count)).collect();
                        let row = program.grids[task.grid.index()].per_row.then_some(task.row as usize);
                        if task.row >= program.rows {
                            return Err(reference(id, format!("row {}", task.row)));
                        }
                        let grid = &program.grids[task.grid.index()];
                        let parts = grid.parts();
                        let part = (if parts > 1 { task.j } else { 0 }, parts);
                        tasks.push(TaskPlan { id, waits, signals: task.signals.as_slice().into(), row, part, work });
                    }
                    queues.push(tasks);
                }
                parts.sort_unstable();
                let absent = (0..program.rows as usize).map(|rows| absent_signals(&queues, rows)).collect();
                Ok(RegimePlan { from_position: regime.from_position, events, queues, streams, parts, absent })
            })
            .collect::<Result<_, _>>()?;
        let whole = |role| {
            let operand = program.grids.iter().find_map(|g| g.operand(role));
            operand.and_then(|o| memory.whole(program, o.buffer)).ok_or(PlanError::Missing { role })
        };
        let (logits, best) = (whole(Role::Logits)?, whole(Role::Best)?);
        let ids = (0..program.buffers.len()).map(BufferId::from);
        let exchanges = ids.map(|id| memory.whole(program, id).filter(|r| r.place == Place::Exchange)).collect();
        Ok(Plan {
            sms: schedule.machine.sms as usize,
            context_max: program.context_max,
            tables: Shape::of(program),
            has_state: program.has_state(),
            vocab: logits.len,
            exchange_words: memory.words[0],
            output_words: memory.words[1],
            private_words: memory.words[2],
            caches: memory.caches,
            routers: memory.routers,
            constants: memory.constants,
            ring: schedule.machine.ring,
            best,
            logits,
            exchanges,
            head_input: schedule.program.head_input(),
            regimes,
        })
    }

    /// Each task with a recurrent state, and the SM that has it in every regime.
    pub fn states(&self) -> impl Iterator<Item = KeptBy<'_>> {
        let queues = self.regimes.first().into_iter().flat_map(|regime| regime.queues.iter().enumerate());
        queues.flat_map(|(sm, queue)| {
            queue.iter().filter_map(move |task| Some(KeptBy { sm, part: task.part, kept: task.work.kept()? }))
        })
    }

    /// Index of the regime that serves `position`.
    pub fn regime_at(&self, position: u32) -> usize {
        self.regimes.partition_point(|r| r.from_position <= position).saturating_sub(1)
    }
}

impl TaskPlan {
    /// Whether it is a task of a row that a launch of `rows` rows does not have: it signals and does nothing else.
    pub fn is_absent(&self, rows: usize) -> bool {
        self.row.is_some_and(|row| row >= rows)
    }

    /// Whether a sequence is in its part.
    pub fn has(&self, sequence: usize) -> bool {
        let (part, parts) = self.part;
        parts == 1 || part_of(sequence as u32, parts) == part
    }
}

/// How often each event is signalled by tasks of rows that a launch of `rows` rows does not have.
fn absent_signals(queues: &[Vec<TaskPlan>], rows: usize) -> Vec<(EventId, u32)> {
    let mut signals: BTreeMap<EventId, u32> = BTreeMap::new();
    for task in queues.iter().flatten().filter(|task| task.is_absent(rows)) {
        task.signals.iter().for_each(|&event| *signals.entry(event).or_default() += 1);
    }
    signals.into_iter().collect()
}

fn reference(place: impl ToString, found: impl ToString) -> PlanError {
    PlanError::Reference { place: place.to_string(), found: found.to_string() }
}

/// Where each buffer lies.
struct MemoryMap {
    /// By buffer: arena, and first element.
    arenas: Vec<Option<(Place, usize)>>,
    /// By buffer: range of `constants`.
    values: Vec<Option<Range<usize>>>,
    /// By buffer: bytes of the pack.
    packed: Vec<Option<Range<usize>>>,
    constants: Vec<f32>,
    caches: Vec<CacheShape>,
    routers: Vec<RouterShape>,
    /// Words of the exchange, output and private arenas.
    words: [usize; 3],
    devices: u32,
    pack_bytes: u64,
    /// By buffer: place in the pack, and what lies there.
    matrices: Vec<Option<(u64, Matrix)>>,
}

impl MemoryMap {
    fn new(schedule: &Schedule, pack: &[u8]) -> Result<MemoryMap, PlanError> {
        let Schedule { program, placement, .. } = schedule;
        let place = |b: usize| placement.get(b).copied().flatten();
        let layers = cache_buffers(program);
        let mut map = MemoryMap {
            arenas: vec![None; program.buffers.len()],
            values: vec![None; program.buffers.len()],
            packed: vec![None; program.buffers.len()],
            constants: vec![],
            caches: vec![],
            routers: vec![],
            words: [0; 3],
            devices: schedule.machine.devices,
            pack_bytes: pack.len() as u64,
            matrices: matrices(program).into_iter().enumerate().map(|(b, m)| Some((place(b)?, m?))).collect(),
        };
        let tables: Vec<BufferId> =
            program.grids.iter().filter_map(|g| g.operand(Role::Table)).map(|o| o.buffer).collect();
        for (b, buffer) in program.buffers.iter().enumerate() {
            let id = BufferId::from(b);
            let size = |elements: u64| PlanError::Size { buffer: id, bytes: elements.saturating_mul(4) };
            let elements = u64::from(buffer.rows) * u64::from(buffer.cols);
            let elements = usize::try_from(elements).ok().filter(|n| *n < usize::MAX / 16).ok_or(size(elements))?;
            let arena = match buffer.space {
                Space::Exchange => Some((Place::Exchange, 0)),
                Space::Output => Some((Place::Output, 1)),
                // A state has one owner. Where another SM updates it, it is not found.
                Space::Private | Space::State => Some((Place::Private, 2)),
                _ => None,
            };
            if let Some((place, arena)) = arena {
                map.arenas[b] = Some((place, map.words[arena]));
                let words = elements.checked_mul(buffer.phases as usize).ok_or(size(elements as u64))?;
                map.words[arena] = map.words[arena].checked_add(words).ok_or(size(words as u64))?;
            }
            match buffer.space {
                Space::Constant => {
                    let offset = place(b).unwrap_or(0);
                    let end = offset.saturating_add(placed_bytes(buffer));
                    if end > pack.len() as u64 {
                        return Err(PlanError::Pack { expected: end, found: pack.len() as u64 });
                    }
                    let range = offset as usize..end as usize;
                    if !tables.contains(&id) {
                        let first = map.constants.len();
                        let values = pack[range.clone()].chunks_exact(buffer.dtype.bytes());
                        map.constants.extend(values.map(|v| read_value(buffer.dtype, v)));
                        map.values[b] = Some(first..map.constants.len());
                    }
                    map.packed[b] = Some(range);
                }
                Space::Cache => {
                    // A cache that no attention reads has no layer; it is never executed either.
                    let place = layers.iter().find(|&&(_, (k, v))| k == id || v == id);
                    if let Some(&(layer, (keys, _))) = place {
                        let kind = if keys == id { CacheKind::Key } else { CacheKind::Value };
                        let (rows, cols) = (buffer.rows as usize, buffer.cols as usize);
                        let (dtype, scales) = (buffer.dtype, vec![]);
                        map.caches.push(CacheShape { buffer: id, dtype, rows, cols, layer, kind, scales });
                    }
                }
                _ => {}
            }
        }
        map.scale_caches(program);
        map.routers = map.routers_of(program);
        Ok(map)
    }

    fn routers_of(&self, program: &Program) -> Vec<RouterShape> {
        let last_append = program.grids.iter().rposition(|grid| grid.operand(Role::AppendK).is_some());
        let router = |(layer, buffer, id): (LayerId, BufferId, GridId)| {
            let grid = &program.grids[id.index()];
            let Op::Route(op) = grid.op else { return None };
            let correction = grid.operand(Role::Bias).and_then(|bias| self.values[bias.buffer.index()].clone());
            let correction = correction.map_or(vec![], |range| self.constants[range].to_vec());
            Some(RouterShape { layer, buffer, op, correction, fills: Some(id.index()) < last_append })
        };
        routes(program).into_iter().filter_map(router).collect()
    }

    /// Hands each cache the scales that the attention over it reads.
    fn scale_caches(&mut self, program: &Program) {
        for grid in &program.grids {
            let Some(scales) = grid.operand(Role::CacheScales) else { continue };
            let Some(range) = self.values[scales.buffer.index()].clone() else { continue };
            let of_heads = &self.constants[range];
            for (role, kind) in [(Role::HistoryK, 0), (Role::HistoryV, 1)] {
                let buffer = grid.operand(role).map(|operand| operand.buffer);
                for cache in self.caches.iter_mut().filter(|cache| Some(cache.buffer) == buffer) {
                    cache.scales = of_heads.iter().copied().skip(kind).step_by(2).collect();
                }
            }
        }
    }

    fn whole(&self, program: &Program, id: BufferId) -> Option<Region> {
        let buffer = program.buffers.get(id.index())?;
        let (place, offset) = self.arenas[id.index()]?;
        Some(self.region_of(id, buffer, place, offset, 0, buffer.cols as usize))
    }

    fn region_of(&self, id: BufferId, b: &Buffer, place: Place, offset: usize, first: usize, len: usize) -> Region {
        Region {
            buffer: id,
            place,
            dtype: b.dtype,
            first,
            len,
            offset: offset + first,
            phases: b.phases.max(1),
            phase_stride: b.rows as usize * b.cols as usize,
            row_stride: b.cols as usize,
        }
    }

    /// Columns `start..end` that launch indices of `at` touch; `None` when they touch nothing.
    fn columns(&self, at: At<'_>, operand: &Operand) -> Result<Option<(usize, usize)>, PlanError> {
        let (start, end) = operand.cols.range(at.lo, at.hi, at.j);
        let role = operand.role;
        let cols = at.program.buffers.get(operand.buffer.index()).ok_or_else(|| reference(at.id, operand.buffer))?.cols;
        if end > u64::from(cols) {
            return Err(PlanError::Bounds { task: at.id, role, buffer: operand.buffer, end, cols });
        }
        Ok((start < end).then_some((start as usize, end as usize)))
    }

    fn optional(&self, at: At<'_>, role: Role) -> Result<Option<Region>, PlanError> {
        let Some(operand) = at.grid.operand(role) else { return Ok(None) };
        self.touched(at, operand)
    }

    /// What an operand touches, which is something.
    fn region_at(&self, at: At<'_>, operand: &Operand) -> Result<Region, PlanError> {
        self.touched(at, operand)?.ok_or(PlanError::Empty { task: at.id, role: operand.role })
    }

    fn touched(&self, at: At<'_>, operand: &Operand) -> Result<Option<Region>, PlanError> {
        let Some((start, end)) = self.columns(at, operand)? else { return Ok(None) };
        let role = operand.role;
        let buffer = &at.program.buffers[operand.buffer.index()];
        let (place, offset) = self.arenas[operand.buffer.index()].ok_or(PlanError::Space {
            task: at.id,
            role,
            found: buffer.space.name(),
        })?;
        Ok(Some(self.region_of(operand.buffer, buffer, place, offset, start, end - start)))
    }

    /// Where a sum of `len` values is published, if it is.
    fn published(&self, at: At<'_>, len: usize) -> Result<Option<Region>, PlanError> {
        let out = self.optional(at, Role::Out)?;
        out.iter().try_for_each(|out| width(at.id, Role::Out, len, out.len))?;
        Ok(out)
    }

    fn region(&self, at: At<'_>, role: Role) -> Result<Region, PlanError> {
        at.operand(role)?;
        self.optional(at, role)?.ok_or(PlanError::Empty { task: at.id, role })
    }

    /// A region of exactly `expected` columns.
    fn sized(&self, at: At<'_>, role: Role, expected: usize) -> Result<Region, PlanError> {
        let region = self.region(at, role)?;
        width(at.id, role, expected, region.len)?;
        Ok(region)
    }

    fn constant(&self, at: At<'_>, role: Role) -> Result<Option<Range<usize>>, PlanError> {
        let Some(operand) = at.grid.operand(role) else { return Ok(None) };
        let Some((start, end)) = self.columns(at, operand)? else { return Ok(None) };
        let found = at.program.buffers[operand.buffer.index()].space.name();
        let values =
            self.values[operand.buffer.index()].as_ref().ok_or(PlanError::Space { task: at.id, role, found })?;
        Ok(Some(match operand.rows {
            Rows::Current => values.clone(),
            _ => values.start + start..values.start + end,
        }))
    }

    fn norm(
        &self,
        at: At<'_>,
        attr: Option<NormAttr>,
        weight: Role,
        bias: Option<Role>,
        len: usize,
    ) -> Result<Option<Norm>, PlanError> {
        let Some(attr) = attr else { return Ok(None) };
        let constant = |role| -> Result<Option<Range<usize>>, PlanError> {
            let range = self.constant(at, role)?;
            range.iter().try_for_each(|r| width(at.id, role, len, r.len()))?;
            Ok(range)
        };
        Ok(Some(Norm { attr, weight: constant(weight)?, bias: bias.map(constant).transpose()?.flatten() }))
    }

    fn cache(&self, at: At<'_>, role: Role) -> Result<Option<CacheColumns>, PlanError> {
        let operand = at.operand(role)?;
        let Some((start, end)) = self.columns(at, operand)? else { return Ok(None) };
        let found = at.program.buffers[operand.buffer.index()].space.name();
        let cache = self.caches.iter().position(|c| c.buffer == operand.buffer).ok_or(PlanError::Space {
            task: at.id,
            role,
            found,
        })?;
        Ok(Some(CacheColumns { cache, first: start, len: end - start }))
    }

    fn run(
        &self,
        schedule: &Schedule,
        regime: &crate::ir::schedule::Regime,
        run: &crate::ir::schedule::Run,
        weights: &mut [Option<Range<usize>>],
    ) -> Result<StreamRun, PlanError> {
        let task = regime.tasks.get(run.task.index()).ok_or_else(|| reference("a stream", run.task))?;
        let bytes = match run.source {
            Source::Units { buffer, lo, hi } => {
                let found = self.matrices.get(buffer.index()).copied().flatten();
                let (place, matrix) = found.ok_or_else(|| reference(run.task, buffer))?;
                let unit = |index: u32| place.saturating_add(u64::from(index).saturating_mul(matrix.unit_bytes));
                let (start, end) = (unit(lo), unit(hi));
                if end > self.pack_bytes || end < start {
                    return Err(PlanError::Pack { expected: end, found: self.pack_bytes });
                }
                let range = start as usize..end as usize;
                let known = &mut weights[run.task.index()];
                match known {
                    None => *known = Some(range.clone()),
                    Some(known) if known.end == range.start => known.end = range.end,
                    Some(known) => {
                        let (expected, found) = ((known.len() + range.len()) as u64, known.len() as u64);
                        return Err(PlanError::Stream { task: run.task, expected, found });
                    }
                }
                let variant = schedule.matvec_variant(task.grid).copied();
                let variant = variant.ok_or(PlanError::Variant { grid: task.grid })?;
                let chosen = self.chosen(At::new(&schedule.program, run.task, task)?, &matrix)?;
                let bytes = range.len() * chosen.as_ref().map_or(1, |chosen| chosen.entry.len);
                StreamBytes::Fixed { begin: range.start, bytes, variant, chosen }
            }
            Source::History { rows } => {
                let at = At::new(&schedule.program, run.task, task)?;
                let Op::Attention(op) = &at.grid.op else {
                    return Err(PlanError::Operand { grid: task.grid, op: at.grid.op.name(), role: Role::HistoryK });
                };
                let empty = |role| PlanError::Empty { task: run.task, role };
                let keys = self.cache(at, Role::HistoryK)?.ok_or(empty(Role::HistoryK))?;
                let values = self.cache(at, Role::HistoryV)?.ok_or(empty(Role::HistoryV))?;
                StreamBytes::History {
                    rows: rows.max(1) as usize,
                    keys,
                    values,
                    op: op.clone(),
                    j: task.j,
                    row: task.row as usize,
                }
            }
        };
        if let Some(event) = run.after
            && event.index() >= regime.events.len()
        {
            return Err(reference(run.task, event));
        }
        Ok(StreamRun { task: run.task, after: run.after, bytes })
    }

    fn work(
        &self,
        program: &Program,
        id: TaskId,
        task: &Task,
        streamed: Option<Range<usize>>,
    ) -> Result<Work, PlanError> {
        let at = At::new(program, id, task)?;
        Ok(match &at.grid.op {
            Op::Select => Work::Select { best: self.region(at, Role::Best)?, token: self.sized(at, Role::Token, 1)? },
            Op::Report => Work::Report { token: self.sized(at, Role::Token, 1)?, out: self.sized(at, Role::Out, 1)? },
            Op::Route(route) => {
                let slots = route.top_k as usize;
                let correction = self.constant(at, Role::Bias)?;
                correction.iter().try_for_each(|c| width(id, Role::Bias, route.experts as usize, c.len()))?;
                let out = self.sized(at, Role::Out, slots)?;
                let router = self.routers.iter().position(|router| router.buffer == out.buffer);
                Work::Route(Box::new(Route {
                    router: router.ok_or_else(|| reference(id, out.buffer))?,
                    op: *route,
                    scores: self.sized(at, Role::X, route.experts as usize)?,
                    correction,
                    shares: self.sized(at, Role::Shares, slots)?,
                    out,
                }))
            }
            Op::Combine(combine) => Work::Combine(Box::new(self.combine(at, combine)?)),
            Op::Mix(mix) => Work::Mix(Box::new(self.mix(at, mix)?)),
            Op::Convolve(convolve) => Work::Convolve(Box::new(self.convolve(at, convolve)?)),
            Op::Scan(scan) => Work::Scan(Box::new(self.scan(at, scan)?)),
            Op::GroupNorm(norm) => {
                let group = norm.width as usize / norm.groups.max(1) as usize;
                let gate = norm.gate.map(|_| self.sized(at, Role::Gate, group)).transpose()?;
                let gains = self.held(at, Role::NormWeight, group)?;
                let (x, out) = (self.sized(at, Role::X, group)?, self.sized(at, Role::Out, group)?);
                Work::GroupNorm(Box::new(GroupNorm { op: *norm, x, gate, norm: gains, out }))
            }
            Op::Embed { scale, everywhere: _ } => {
                let table = self.table(at)?;
                let residual = self.region(at, Role::Residual)?;
                let out = self.published(at, residual.len)?;
                Work::Embed { token: self.sized(at, Role::Token, 1)?, table, residual, out, scale: *scale }
            }
            Op::Join { scale } => {
                let (table, residual) = (self.table(at)?, self.region(at, Role::Residual)?);
                let [given, out] = [Role::Given, Role::Out].map(|role| self.sized(at, role, residual.len));
                let token = self.sized(at, Role::Token, 1)?;
                Work::Join { token, table, residual, given: given?, out: out?, scale: *scale }
            }
            Op::MatVec(m) => Work::MatVec(Box::new(self.mat_vec(at, m, streamed)?)),
            Op::Attention(a) => Work::Attention(Box::new(self.attention(at, a)?)),
            &Op::AttentionMerge { head_dim, splits, heads_per_task, gate } => {
                let dim = head_dim as usize;
                let record = (head_dim + PARTIAL_HEADER) as usize;
                let stride = heads_per_task as usize * record;
                let heads = (task.lo..task.hi)
                    .map(|head| {
                        let one = At { lo: head, hi: head + 1, ..at };
                        Ok(MergeHead {
                            partial: self.sized(one, Role::Partial, splits as usize * stride)?,
                            first: (head % heads_per_task.max(1)) as usize * record,
                            stride,
                            gate: if gate { Some(self.sized(one, Role::Gate, dim)?) } else { None },
                            out: self.sized(one, Role::Out, dim)?,
                        })
                    })
                    .collect::<Result<_, PlanError>>()?;
                Work::AttentionMerge { head_dim: dim, splits: splits as usize, heads }
            }
            &Op::NormAdd { norm, width: values, scale, everywhere: _ } => {
                let values = values as usize;
                let norm = self.norm(at, Some(norm), Role::NormWeight, Some(Role::NormBias), values)?;
                let residual = self.region(at, Role::Residual)?;
                let out = self.published(at, residual.len)?;
                Work::NormAdd(Box::new(NormAdd {
                    y: self.sized(at, Role::X, values)?,
                    norm: norm.ok_or(PlanError::Empty { task: id, role: Role::NormWeight })?,
                    scale,
                    out,
                    residual,
                }))
            }
        })
    }

    /// The table that a token has a row of.
    fn table(&self, at: At<'_>) -> Result<Table, PlanError> {
        let operand = at.operand(Role::Table)?;
        let buffer = &at.program.buffers[operand.buffer.index()];
        let found = buffer.space.name();
        let none = PlanError::Space { task: at.id, role: Role::Table, found };
        let bytes = self.packed[operand.buffer.index()].clone().ok_or(none)?;
        self.columns(at, operand)?;
        let Buffer { dtype, coded, rows, cols, .. } = *buffer;
        Ok(Table { bytes, dtype, coded, rows, cols, row_bytes: constant_row_bytes(buffer) as usize })
    }

    fn mat_vec(&self, at: At<'_>, m: &op::MatVec, streamed: Option<Range<usize>>) -> Result<MatVec, PlanError> {
        let id = at.id;
        let found = self.matrices.get(at.operand(Role::Weight)?.buffer.index()).copied().flatten();
        let (place, matrix) = found.ok_or_else(|| reference(id, Role::Weight.name()))?;
        let format = matrix.format;
        let units = (at.hi - at.lo.min(at.hi)) as usize;
        let k = m.inputs() as usize;
        let expected = units as u64 * m.unit_bytes(format);
        let chosen = self.chosen(at, &matrix)?;
        // Each slot has whole granules, so the units of all slots are one unit of all columns. Where parts are dealt, slots lie side by side.
        let slots = chosen.as_ref().map_or(1, |chosen| chosen.entry.len);
        let dealt = at.grid.is_dealt().then_some(slots.max(1));
        width(id, Role::Choices, dealt.unwrap_or(m.slots as usize), slots)?;
        let weight = streamed.unwrap_or(0..0);
        if weight.len() as u64 != expected {
            return Err(PlanError::Stream { task: id, expected, found: weight.len() as u64 });
        }
        let unit_rows = m.unit_rows as usize;
        let row_scales = self.row_scales(place, &matrix, at)?;
        let bias = self.constant(at, Role::Bias)?;
        let values = units * unit_rows;
        bias.iter().try_for_each(|b| width(id, Role::Bias, values, b.len()))?;
        let partial = |role, most| self.results(at, m, (role, most), dealt);
        let (out, residual, best) = match m.epilogue {
            Epilogue::Store | Epilogue::Scores | Epilogue::Act(_) => (Some(partial(Role::Out, values)?), None, None),
            Epilogue::Gated(_) | Epilogue::GatedBy { .. } | Epilogue::Clamped(_) => {
                (Some(partial(Role::Out, values / 2)?), None, None)
            }
            Epilogue::Residual { .. } => {
                let residual = partial(Role::Residual, values)?;
                let out = self.published(at, residual.len)?;
                (out, Some(residual), None)
            }
            Epilogue::Logits { .. } => {
                (Some(partial(Role::Logits, values)?), None, Some(self.sized(at, Role::Best, 2)?))
            }
        };
        let norm = self.norm(at, m.norm, Role::NormWeight, Some(Role::NormBias), k)?;
        let x = self.region(at, Role::X)?;
        let inputs = dealt.filter(|_| x.len != k).unwrap_or(1);
        width(id, Role::X, k.max(x.len / inputs) * inputs, x.len)?;
        let share = self.optional(at, Role::Shares)?;
        if let Some(share) = &share {
            width(id, Role::Shares, 1, share.len)?;
        }
        let epilogue = m.epilogue;
        let grid = at.grid_id;
        Ok(MatVec {
            grid,
            x,
            k,
            norm,
            format,
            units,
            first_unit: at.lo as usize,
            unit_rows,
            weight,
            row_scales,
            bias,
            chosen,
            share,
            epilogue,
            out,
            residual,
            best,
        })
    }

    /// A region of `most` results of a product, or fewer, because the last unit of a grid may have fewer rows; where parts are dealt to tasks, of
    /// so many slots side by side.
    fn results(
        &self,
        at: At<'_>,
        m: &op::MatVec,
        (role, most): (Role, usize),
        dealt: Option<usize>,
    ) -> Result<Region, PlanError> {
        let (region, unit) = (self.region(at, role)?, m.unit_rows as usize);
        match dealt {
            Some(slots) => {
                // The units of all devices.
                let most = at.grid.n as usize * if m.epilogue.is_gated() { unit / 2 } else { unit };
                width(at.id, role, (region.len / slots).clamp(1, most) * slots, region.len)?;
            }
            None => {
                width(at.id, role, region.len.clamp(most.saturating_sub(unit.saturating_sub(1)), most), region.len)?
            }
        }
        Ok(region)
    }

    /// The part of its matrix that a task takes, if the matrix has parts.
    fn chosen(&self, at: At<'_>, matrix: &Matrix) -> Result<Option<Chosen>, PlanError> {
        let Rows::Lookup(table) = at.operand(Role::Weight)?.rows else { return Ok(None) };
        let table = at.program.tables.get(table.index()).ok_or_else(|| reference(at.id, table))?;
        let units = u64::from(at.grid.n);
        let bytes = |each: u64| usize::try_from(units.saturating_mul(each)).unwrap_or(usize::MAX);
        let biases = at.grid.operand(Role::Bias).map_or(0, |bias| bias.cols.limit as usize);
        // Parts fill the matrix, and what is stored beside it.
        let whole = u64::from(table.bound).saturating_mul(units) == u64::from(matrix.units);
        let end = self.constant_len(at).map_or(0, |len| biases.saturating_mul(table.bound as usize).max(len));
        if !whole || self.constant_len(at).is_some_and(|len| end > len) {
            return Err(PlanError::Parts { grid: at.grid_id, parts: table.bound });
        }
        let share = at.grid.share_on_device(at.j, self.devices);
        let deal = share.map(|(j, tasks)| Deal { j, tasks, units: at.hi.saturating_sub(at.lo) as usize });
        Ok(Some(Chosen {
            entry: self.region(at, Role::Choices)?,
            deal,
            parts: table.bound,
            piece_bytes: usize::try_from(matrix.unit_bytes).unwrap_or(usize::MAX),
            unit_bytes: bytes(matrix.unit_bytes),
            scale_bytes: bytes(4 * u64::from(matrix.unit_rows)),
            biases,
        }))
    }

    /// Values of the bias of a grid, of all parts.
    fn constant_len(&self, at: At<'_>) -> Option<usize> {
        let bias = at.grid.operand(Role::Bias)?;
        Some(self.values.get(bias.buffer.index())?.as_ref()?.len())
    }

    fn combine(&self, at: At<'_>, op: &op::Combine) -> Result<Combine, PlanError> {
        let operands = at.grid.operands.iter().filter(|operand| operand.role == Role::X);
        let inputs: Vec<Region> = operands.map(|x| self.region_at(at, x)).collect::<Result<_, _>>()?;
        width(at.id, Role::X, op.inputs() as usize, inputs.len())?;
        let residual = self.optional(at, Role::Residual)?;
        let out = self.optional(at, Role::Out)?;
        let len = inputs.first().map_or(0, |x| x.len);
        for region in inputs.iter().chain(&residual).chain(&out) {
            width(at.id, Role::X, len, region.len)?;
        }
        Ok(Combine {
            op: *op,
            inputs,
            shares: self.sized(at, Role::Shares, op.slots as usize)?,
            gate: self.optional(at, Role::Gate)?,
            residual,
            out,
        })
    }

    /// Bytes of the pack with the scales of the rows of a task's units.
    fn row_scales(&self, place: u64, matrix: &Matrix, at: At<'_>) -> Result<Range<usize>, PlanError> {
        if !matrix.format.row_scales {
            return Ok(0..0);
        }
        let unit = 4 * u64::from(matrix.unit_rows);
        let first = place.saturating_add(matrix.row_scales_at());
        let [start, end] = [at.lo, at.hi].map(|unit_index| first.saturating_add(u64::from(unit_index) * unit));
        if end > self.pack_bytes || at.hi > matrix.units || end < start {
            return Err(PlanError::Pack { expected: end, found: self.pack_bytes });
        }
        Ok(start as usize..end as usize)
    }

    fn mix(&self, at: At<'_>, mix: &op::Mix) -> Result<Mix, PlanError> {
        let id = at.id;
        if at.hi != at.lo + 1 {
            return Err(PlanError::Indices { task: id, found: at.hi.saturating_sub(at.lo) });
        }
        if mix.key_heads == 0 || mix.kernel == 0 {
            return Err(PlanError::Empty { task: id, role: Role::Conv });
        }
        let [keys, values, heads] = [mix.key_dim, mix.value_dim, mix.value_heads].map(|n| n as usize);
        let constant = |role, len| self.held(at, role, len);
        Ok(Mix {
            op: *mix,
            head: at.lo as usize,
            q: self.sized(at, Role::Q, keys)?,
            k: self.sized(at, Role::K, keys)?,
            v: self.sized(at, Role::V, values)?,
            gate: self.sized(at, Role::Gate, values)?,
            beta: self.sized(at, Role::Beta, heads)?,
            decay: self.sized(at, Role::Decay, heads)?,
            norm: constant(Role::NormWeight, values)?,
            conv: constant(Role::Conv, mix.qkv_cols() as usize * mix.kernel as usize)?,
            a_log: constant(Role::ALog, heads)?,
            dt_bias: constant(Role::DtBias, heads)?,
            kept: self.kept(at, mix.state_cols() as usize)?,
            out: self.sized(at, Role::Out, values)?,
        })
    }

    /// A constant of exactly `len` values.
    fn held(&self, at: At<'_>, role: Role, len: usize) -> Result<Range<usize>, PlanError> {
        let range = self.constant(at, role)?.ok_or(PlanError::Empty { task: at.id, role })?;
        width(at.id, role, len, range.len())?;
        Ok(range)
    }

    /// The state of a task, of exactly `len` values.
    fn kept(&self, at: At<'_>, len: usize) -> Result<Kept, PlanError> {
        let cols = at.program.buffers[at.operand(Role::State)?.buffer.index()].cols;
        let layer = at.grid.site.and_then(|site| site.layer).map_or(0, |layer| layer.0);
        Ok(Kept { layer, cols, region: self.sized(at, Role::State, len)? })
    }

    fn convolve(&self, at: At<'_>, op: &op::Convolve) -> Result<Convolve, PlanError> {
        if op.kernel < 2 {
            return Err(PlanError::Empty { task: at.id, role: Role::State });
        }
        let x = self.region(at, Role::X)?;
        let (channels, kernel) = (x.len, op.kernel as usize);
        let bias = at.grid.operand(Role::Bias).map(|_| self.held(at, Role::Bias, channels)).transpose()?;
        Ok(Convolve {
            op: *op,
            x,
            b: self.sized(at, Role::B, channels)?,
            c: self.sized(at, Role::C, channels)?,
            conv: self.held(at, Role::Conv, channels * kernel)?,
            bias,
            kept: self.kept(at, channels * (kernel - 1))?,
            out: self.sized(at, Role::Out, channels)?,
        })
    }

    fn scan(&self, at: At<'_>, op: &op::Scan) -> Result<Scan, PlanError> {
        let id = at.id;
        if at.hi != at.lo + 1 {
            return Err(PlanError::Indices { task: id, found: at.hi.saturating_sub(at.lo) });
        }
        if op.groups == 0 || !op.heads.is_multiple_of(op.groups) || op.kernel == 0 {
            return Err(PlanError::Empty { task: id, role: Role::Conv });
        }
        let [dim, state, heads] = [op.head_dim, op.state, op.heads].map(|n| n as usize);
        let channels = op.channels() as usize;
        let bias = at.grid.operand(Role::Bias).map(|_| self.held(at, Role::Bias, channels)).transpose()?;
        Ok(Scan {
            op: *op,
            head: at.lo as usize,
            x: self.sized(at, Role::X, dim)?,
            b: self.sized(at, Role::B, state)?,
            c: self.sized(at, Role::C, state)?,
            step: self.sized(at, Role::Step, heads)?,
            gate: op.gate.map(|_| self.sized(at, Role::Gate, dim)).transpose()?,
            conv: self.held(at, Role::Conv, channels * op.kernel as usize)?,
            bias,
            a_log: self.held(at, Role::ALog, heads)?,
            d: self.held(at, Role::D, heads)?,
            dt_bias: self.held(at, Role::DtBias, heads)?,
            kept: self.kept(at, op.state_cols() as usize)?,
            out: self.sized(at, Role::Out, dim)?,
        })
    }

    fn attention(&self, at: At<'_>, a: &op::Attention) -> Result<Attention, PlanError> {
        let id = at.id;
        if at.hi != at.lo + 1 {
            return Err(PlanError::Indices { task: id, found: at.hi.saturating_sub(at.lo) });
        }
        let dim = a.head_dim as usize;
        let heads = a.heads_per_task as usize;
        let norm_len = |attr: Option<op::QkNormAttr>, heads: u32| match attr {
            Some(attr) if attr.span != QkNormSpan::Head => heads as usize * dim,
            _ => dim,
        };
        let projected = |attr: Option<op::QkNormAttr>| attr.is_some_and(|a| a.span == QkNormSpan::Projection);
        let q_len = if projected(a.q_norm) { a.heads as usize * dim } else { heads * dim };
        let k_len = if projected(a.k_norm) { a.kv_heads() as usize * dim } else { dim };
        let current = if at.j == a.splits.saturating_sub(1) {
            let append = match (self.cache(at, Role::AppendK)?, self.cache(at, Role::AppendV)?) {
                (Some(k), Some(v)) => Some((k, v)),
                _ => None,
            };
            if let Some((k, v)) = append {
                width(id, Role::AppendK, dim, k.len)?;
                width(id, Role::AppendV, dim, v.len)?;
            }
            Some(Current { k: self.sized(at, Role::K, k_len)?, v: self.sized(at, Role::V, dim)?, append })
        } else {
            None
        };
        let q_norm_attr = a.q_norm.map(|n| n.norm);
        let k_norm_attr = a.k_norm.map(|n| n.norm);
        let keys = self.cache(at, Role::HistoryK)?.ok_or(PlanError::Empty { task: id, role: Role::HistoryK })?;
        let values = self.cache(at, Role::HistoryV)?.ok_or(PlanError::Empty { task: id, role: Role::HistoryV })?;
        width(id, Role::HistoryK, dim, keys.len)?;
        width(id, Role::HistoryV, dim, values.len)?;
        let rope = if a.rotary > 0 {
            let table = self.constant(at, Role::Rope)?.ok_or(PlanError::Empty { task: id, role: Role::Rope })?;
            let expected = at.program.context_max as usize * a.rotary as usize;
            width(id, Role::Rope, expected, table.len())?;
            width(id, Role::Q, dim, dim.max(a.rotary as usize))?;
            Some(table)
        } else {
            None
        };
        let cache_scales = match self.constant(at, Role::CacheScales)? {
            None => [1.0; 2],
            Some(range) => {
                width(id, Role::CacheScales, 2, range.len())?;
                [self.constants[range.start], self.constants[range.start + 1]]
            }
        };
        let sinks = if a.sinks { self.constant(at, Role::Sinks)? } else { None };
        sinks.iter().try_for_each(|sinks| width(id, Role::Sinks, heads, sinks.len()))?;
        let gates = a.gate && a.splits == 1;
        let record = dim + if a.splits > 1 { PARTIAL_HEADER as usize } else { 0 };
        Ok(Attention {
            grid: at.grid_id,
            op: a.clone(),
            i: at.lo,
            j: at.j,
            q: self.sized(at, Role::Q, q_len)?,
            current,
            q_norm: self.norm(at, q_norm_attr, Role::QNormWeight, None, norm_len(a.q_norm, a.heads))?,
            k_norm: self.norm(at, k_norm_attr, Role::KNormWeight, None, norm_len(a.k_norm, a.kv_heads()))?,
            rope,
            cache_dtype: self.caches[keys.cache].dtype,
            cache_scales,
            sinks,
            gate: if gates { Some(self.sized(at, Role::Gate, heads * dim)?) } else { None },
            keys,
            values,
            out: self.sized(at, Role::Out, heads * record)?,
        })
    }
}

fn width(task: TaskId, role: Role, expected: usize, found: usize) -> Result<(), PlanError> {
    if expected == found { Ok(()) } else { Err(PlanError::Width { task, role, expected, found }) }
}

/// A task, or one launch index of it, with the grid it belongs to.
#[derive(Clone, Copy)]
struct At<'a> {
    program: &'a Program,
    grid: &'a Grid,
    grid_id: GridId,
    id: TaskId,
    lo: u32,
    hi: u32,
    j: u32,
}

impl<'a> At<'a> {
    fn new(program: &'a Program, id: TaskId, task: &Task) -> Result<At<'a>, PlanError> {
        let grid = program.grids.get(task.grid.index()).ok_or(PlanError::Grid { task: id, grid: task.grid })?;
        Ok(At { program, grid, grid_id: task.grid, id, lo: task.lo, hi: task.hi, j: task.j })
    }

    fn operand(&self, role: Role) -> Result<&'a Operand, PlanError> {
        let missing = PlanError::Operand { grid: self.grid_id, op: self.grid.op.name(), role };
        let operand = self.grid.operand(role).ok_or(missing)?;
        Ok(operand)
    }
}
