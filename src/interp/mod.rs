//! Executes a schedule on the CPU exactly as it is placed: its queues, its streams, its events.
//!
//! One set of formulas (`ops`) over two arithmetics (`real`: fp32 with the vector loops of `kernel`, and f64) and two
//! orders: `threads`, where worker threads stand in for SMs, and `adversary`, one thread that interleaves the SMs as badly
//! as the events allow. The same schedule gives the same fp32 bits in both orders, with any number of threads and any
//! seed, because every sum has one fixed order. Attention without KV splits sums over keys in ascending positions, in blocks
//! that are counted from the first position that a row sees, whether a key is of the step or from the cache. So a row's bits
//! do not depend on where a prompt was cut, or on the other rows of its step.
//!
//! `plan` resolves a schedule once, so that a task costs well under 1 µs beside its arithmetic.
//!
//! What a device rounds is rounded here: exchange buffers to their type, keys and values to the cache's type (for the
//! current position too). With one exception: a tensor core multiplies bf16 by bf16, so a device also rounds the staged
//! input of a matvec; here it stays fp32.

mod adversary;
mod coded;
mod from_device;
mod given;
mod kernel;
mod memory;
mod mix;
mod ops;
mod plan;
mod real;
mod recurrent;
mod synthetic;
mod text;
mod threads;

pub use adversary::Violation;
pub use from_device::{FromDevice, Taken};
pub use kernel::Isa;
pub use ops::Input;
pub use plan::{CacheShape, PlanError, RouterShape, cache_buffers, choice_buffers};
pub use real::read_value;
pub use synthetic::{CacheKind, cache_code, cache_value, state_value};

use crate::error::Fault;
use crate::format::e4m3;
use crate::ir::BufferId;
use crate::ir::schedule::Schedule;
use crate::ir::{EventId, SmId, TaskId};
use crate::pages::PoolError;
use crate::rows::{Refused, SequenceId, Tables, runs};
use given::Given;
use memory::{Pages, RoundAtRandom, StepRow, StepRows};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use text::Text;
use thiserror::Error;

/// Bytes of a weight pack, in memory or mapped from a file.
pub type Pack = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// How a schedule is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    pub arithmetic: Arithmetic,
    pub order: Order,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// fp32 accumulation with vector instructions.
    Fast,
    /// f64 accumulation: what `Fast` and devices are judged by.
    Spec,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// At most this many threads, each with its share of the SMs; the calling thread is one of them.
    Threads(usize),
    /// A hostile order that the seed decides; finds what the events of a schedule do not order.
    Adversarial { seed: u64 },
}

impl Options {
    /// fp32 on all cores: generation, perplexity, the `cpu` target.
    pub fn fast() -> Options {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        Options { arithmetic: Arithmetic::Fast, order: Order::Threads(threads) }
    }

    /// f64 on all cores.
    pub fn spec() -> Options {
        Options { arithmetic: Arithmetic::Spec, ..Options::fast() }
    }

    pub fn adversarial(arithmetic: Arithmetic, seed: u64) -> Options {
        Options { arithmetic, order: Order::Adversarial { seed } }
    }
}

/// Why a step was not executed.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum InterpError {
    #[error("{0}")]
    Plan(#[from] PlanError),
    #[error("position {position} is not below the context of {context_max}")]
    Position { position: u64, context_max: u32 },
    #[error("token {token} is not below the vocabulary of {vocab}")]
    Token { token: u32, vocab: usize },
    #[error("expected {expected}")]
    Tables { expected: &'static str },
    #[error("{0}")]
    Pages(#[from] PoolError),
    #[error("{0}")]
    Refused(#[from] Refused),
    #[error("no token to start from")]
    NoToken,
    #[error(
        "position {position} does not follow the one whose recurrent state is kept, expected position 0 or the next one"
    )]
    State { position: u32 },
    #[error("{0}")]
    Violation(#[from] Violation),
    #[error("no task can run at position {position}:{}", list(blocked))]
    Deadlock { position: u32, blocked: Vec<Blocked> },
    #[error("a worker stopped: {message}")]
    Panic { message: String },
    #[error("an earlier step failed; reset first")]
    Failed,
}

/// An SM whose head task cannot run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blocked {
    pub sm: SmId,
    /// Place of the task in the SM's queue.
    pub cursor: usize,
    pub task: TaskId,
    pub waits: Vec<BlockedWait>,
}

/// A wait that is not over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockedWait {
    pub event: EventId,
    pub needed: u32,
    pub seen: u32,
    /// Tasks that signal the event and have not run, with the SM that queues them.
    pub missing: Vec<(TaskId, SmId)>,
}

fn list(blocked: &[Blocked]) -> String {
    blocked.iter().map(|b| format!("\n  {b}")).collect()
}

impl fmt::Display for Blocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.sm, self.task)?;
        for (i, wait) in self.waits.iter().enumerate() {
            let BlockedWait { event, needed, seen, missing } = wait;
            write!(f, "{} {event} ({seen} of {needed} signals", if i == 0 { " waits for" } else { "," })?;
            for (i, (task, sm)) in missing.iter().enumerate() {
                write!(f, "{}{task} of {sm}", if i == 0 { "; missing " } else { ", " })?;
            }
            f.write_str(")")?;
        }
        Ok(())
    }
}

impl InterpError {
    /// Names the tasks that the blocked SMs still had to run.
    fn deadlock(plan: &plan::Plan, regime: usize, position: u32, mut blocked: Vec<Blocked>) -> InterpError {
        blocked.sort_by_key(|b| b.sm);
        let queues = &plan.regimes[regime].queues;
        let rest = blocked.iter().flat_map(|b| queues[b.sm.index()][b.cursor..].iter().map(move |t| (t, b.sm)));
        let rest: Vec<_> = rest.collect();
        for wait in blocked.iter_mut().flat_map(|b| &mut b.waits) {
            let signals = rest.iter().filter(|(task, _)| task.signals.contains(&wait.event));
            wait.missing = signals.map(|(task, sm)| (task.id, *sm)).collect();
        }
        InterpError::Deadlock { position, blocked }
    }
}

impl From<InterpError> for Fault {
    fn from(error: InterpError) -> Fault {
        let fault = match &error {
            InterpError::Position { .. } => {
                return Fault::input(error.to_string()).with_remedy("raise `context_max` or shorten the prompt");
            }
            InterpError::Pages(_) => {
                return Fault::input(error.to_string()).with_remedy("raise `decode.cache_pages`, or leave it out");
            }
            InterpError::Token { .. }
            | InterpError::NoToken
            | InterpError::State { .. }
            | InterpError::Tables { .. } => {
                return Fault::input(error.to_string());
            }
            InterpError::Plan(PlanError::Size { .. }) => {
                return Fault::environment(error.to_string()).with_remedy("lower `context_max`");
            }
            _ => Fault::internal(error.to_string()),
        };
        fault.with_remedy("this is a fault of the schedule or of the interpreter; `monobloc validate` may name it")
    }
}

/// Values that a step left.
pub struct StepResult<'a> {
    /// Of the step.
    pub row: usize,
    pub position: u32,
    /// The token that was decoded at this position: the input, or what the schedule selected.
    pub token: u32,
    /// None for a row that wants none.
    pub logits: Logits<'a>,
}

/// Logits of a step, copied on request.
pub enum Logits<'a> {
    Words(&'a [AtomicU32]),
    Values(&'a [f32]),
}

impl Logits<'_> {
    pub fn copy_to(&self, out: &mut Vec<f32>) {
        out.clear();
        match self {
            Logits::Words(words) => out.extend(words.iter().map(|w| f32::from_bits(w.load(Ordering::Relaxed)))),
            Logits::Values(values) => out.extend_from_slice(values),
        }
    }

    pub fn to_vec(&self) -> Vec<f32> {
        let mut out = vec![];
        self.copy_to(&mut out);
        out
    }

    /// Whether a token can be chosen: a logit is a number above -inf.
    pub fn has_candidate(&self) -> bool {
        match self {
            Logits::Words(words) => words.iter().any(|w| f32::from_bits(w.load(Ordering::Relaxed)) > f32::NEG_INFINITY),
            Logits::Values(values) => values.iter().any(|value| *value > f32::NEG_INFINITY),
        }
    }
}

/// One way of executing a plan.
trait Engine: Send {
    /// Runs steps one after another; calls `on_step` for each row of each step, and stops early if that says so.
    fn launch(
        &mut self,
        steps: Vec<StepRows>,
        on_step: &mut dyn FnMut(StepResult<'_>) -> ControlFlow<()>,
    ) -> Result<(), InterpError>;

    /// Whether a launch that is stopped may have executed steps after the last one it told of.
    fn runs_ahead(&self) -> bool;

    /// The token that `Input::Selected` would decode at `position`, right after the step before it, of which row `row` was at
    /// the position before.
    fn selected(&mut self, position: u32, row: usize) -> Option<u32>;

    /// Values that the last step left in the exchange arena.
    fn exchanged(&self, at: usize, len: usize) -> Vec<f32>;

    /// A whole row of a cache, by index into the plan's caches.
    fn write_cache(&mut self, cache: usize, row: usize, values: &[f32]);
    /// Puts a state where the SM finds it that has its task, as the one before `position`.
    fn write_state(&mut self, sm: usize, region: &memory::Region, position: u32, values: &[f32]);
    /// What [`Engine::write_state`] writes.
    fn read_state(&self, sm: usize, region: &memory::Region) -> Vec<f32>;
    /// Copies a state to where another sequence has its own, each in the memory of an SM.
    fn copy_state(&mut self, from: (usize, &memory::Region), to: (usize, &memory::Region));

    /// The bytes of a whole row of a cache.
    fn read_cache(&self, cache: usize, row: usize) -> Vec<u8>;

    fn reset(&mut self);
}

/// A schedule ready to be stepped, with its cache.
pub struct Interp {
    plan: Arc<plan::Plan>,
    engine: Box<dyn Engine>,
    position: u32,
    /// Whether the step before `position` left arg-max pairs.
    selectable: bool,
    /// The row of that step that was at the position before.
    last_row: usize,
    /// Of a program with tables that decodes one text: its pages.
    text: Option<Text>,
    /// What the next launch takes in place of its own.
    device: Option<Arc<FromDevice>>,
    /// Of a draft: what the next step reads beside its token.
    given: Option<Given>,
    at_random: Option<RoundAtRandom>,
    /// The position before which the recurrent states are, if that is known. A launch that stops early may have gone on.
    state_at: Option<u32>,
}

impl fmt::Debug for Interp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Interp").field("sms", &self.plan.sms).field("position", &self.position).finish_non_exhaustive()
    }
}

impl Interp {
    /// Prepares a validated schedule with the pack that [`crate::pack`] made from it. Starts the worker threads.
    pub fn new(schedule: &Schedule, pack: Pack, options: Options) -> Result<Interp, InterpError> {
        let plan = Arc::new(plan::Plan::new(schedule, (*pack).as_ref())?);
        let isa = Isa::detect();
        let engine: Box<dyn Engine> = match (options.arithmetic, options.order) {
            (Arithmetic::Fast, Order::Threads(n)) => Box::new(threads::Threads::<f32>::new(plan.clone(), pack, isa, n)),
            (Arithmetic::Spec, Order::Threads(n)) => Box::new(threads::Threads::<f64>::new(plan.clone(), pack, isa, n)),
            (Arithmetic::Fast, Order::Adversarial { seed }) => {
                Box::new(adversary::Adversary::<f32>::new(plan.clone(), pack, isa, seed))
            }
            (Arithmetic::Spec, Order::Adversarial { seed }) => {
                Box::new(adversary::Adversary::<f64>::new(plan.clone(), pack, isa, seed))
            }
        };
        Ok(Interp {
            plan,
            engine,
            position: 0,
            selectable: false,
            last_row: 0,
            text: None,
            device: None,
            given: None,
            at_random: None,
            state_at: Some(0),
        })
    }

    /// The caches, keys and values of each layer in turn.
    pub fn caches(&self) -> &[CacheShape] {
        &self.plan.caches
    }

    /// A row of a cache, by index into [`Interp::caches`], as steps left it: the bytes of its columns in the type of the cache.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn read_cache(&self, cache: usize, row: usize) -> Vec<u8> {
        self.engine.read_cache(cache, row)
    }

    /// The routers, in the order of their layers.
    pub fn routers(&self) -> &[RouterShape] {
        &self.plan.routers
    }

    /// Writes a row of a cache, by index into [`Interp::caches`], in place of the steps that would have: its values by column. Where the position of
    /// a sequence lies is for the caller to know.
    ///
    /// # Panics
    /// If there is no such row, or it has other columns.
    pub fn write_cache(&mut self, cache: usize, row: usize, values: &[f32]) {
        self.engine.write_cache(cache, row, values);
    }

    /// Lets the next launch, which is to be of one step of `rows` rows, take what a device stored for them in place of its own. The result
    /// keeps what the step would have rounded, and the scores that it would have chosen by.
    ///
    /// # Panics
    /// If `taken` is not of `rows` rows of [`Interp::caches`] and [`Interp::routers`].
    pub fn take(&mut self, rows: usize, taken: Taken) -> Arc<FromDevice> {
        let device = Arc::new(FromDevice::new(&self.plan.caches, &self.plan.routers, rows, taken));
        self.device = Some(device.clone());
        device
    }

    /// Lets all later launches round to bf16 up or down at random wherever a kernel rounds an activation; `staged`: the inputs of products, too.
    /// The distance from the results of rounding to the nearest says what rounding costs. In hostile orders it does nothing.
    pub fn round_at_random(&mut self, seed: u64, staged: bool) {
        self.at_random = Some(RoundAtRandom { seed, staged });
    }

    /// The position that the next step decodes.
    pub fn position(&self) -> u32 {
        self.position
    }

    pub fn context_max(&self) -> u32 {
        self.plan.context_max
    }

    pub fn vocab(&self) -> usize {
        self.plan.vocab
    }

    /// Forgets the sequence (and a failure): the next step decodes position 0.
    pub fn reset(&mut self) {
        self.engine.reset();
        self.position = 0;
        self.selectable = false;
        self.text.iter_mut().for_each(Text::reset);
    }

    /// Makes `position` the next one. Rows of the cache before it are whatever was written there: by steps, or by
    /// [`fill_cache`](Self::fill_cache).
    pub fn seek(&mut self, position: u32) -> Result<(), InterpError> {
        if self.plan.tables.is_some() && self.text.is_none() {
            return Err(InterpError::Tables { expected: "tables for its rows, as its program has them" });
        }
        self.check_position(u64::from(position))?;
        self.position = position;
        self.selectable = false;
        Ok(())
    }

    /// Tells that the recurrent states are those before `position`. A timer may say so of any states.
    pub fn state_is_before(&mut self, position: u32) {
        self.state_at = Some(position);
    }

    /// Whether a step at `position` finds the recurrent states that it needs: those before it. Position 0 needs none.
    pub fn goes_on_at(&self, position: u32) -> bool {
        !self.plan.has_state
            || position == 0
            || match &self.text {
                Some(text) => text.goes_on_at(position),
                None => self.state_at == Some(position),
            }
    }

    /// Fills rows `0..rows` of every cache with [`cache_value`], or its [`cache_code`], and makes `rows` the next position, so that a deep position
    /// can be executed without a prompt of that length.
    pub fn fill_cache(&mut self, seed: u64, rows: u32) -> Result<(), InterpError> {
        let value_of = |cache: &CacheShape, row: u32, column: u32| {
            let value = cache_value(seed, cache.layer, cache.kind, row, column);
            cache.scale_of(column).map_or(value, |scale| e4m3(cache_code(value)) * scale)
        };
        let row_of =
            |cache: &CacheShape, row| (0..cache.cols as u32).map(|column| value_of(cache, row, column)).collect();
        self.fill_cache_with(rows, row_of)?;
        self.fill_states(rows, |layer, count| (0..count).map(|column| state_value(seed, layer, column)).collect());
        Ok(())
    }

    /// Makes `state_of` a layer and its number of values (by launch index, as the op of the layer has them) the recurrent states before
    /// `position`. Without such layers it does nothing.
    ///
    /// # Panics
    /// If these are not as many values.
    pub fn fill_states(&mut self, position: u32, state_of: impl Fn(u32, u32) -> Vec<f32>) {
        let mut of_layer: Option<(u32, Vec<f32>)> = None;
        let mut tasks: Vec<plan::KeptBy<'_>> = self.plan.states().collect();
        tasks.sort_by_key(|of| of.kept.layer);
        for plan::KeptBy { sm, kept: plan::Kept { layer, cols, region }, .. } in tasks {
            if of_layer.as_ref().is_none_or(|(of, _)| of != layer) {
                of_layer = Some((*layer, state_of(*layer, *cols)));
            }
            let values = of_layer.iter().flat_map(|(_, values)| &values[region.first..][..region.len]);
            self.engine.write_state(sm, region, position, &values.copied().collect::<Vec<f32>>());
        }
        self.state_at = Some(position);
    }

    /// The recurrent states of a sequence as steps left them: of each layer that has one its values, as [`Interp::fill_states`] takes them.
    pub fn states_of(&self, sequence: SequenceId) -> BTreeMap<u32, Vec<f32>> {
        let mut states: BTreeMap<u32, Vec<f32>> = BTreeMap::new();
        for plan::KeptBy { sm, kept, .. } in self.plan.states().filter(|of| of.has(sequence.0)) {
            let values = states.entry(kept.layer).or_insert_with(|| vec![0.0; kept.cols as usize]);
            let found = self.engine.read_state(sm, &kept.region.row(sequence.index()));
            values[kept.region.first..][..kept.region.len].copy_from_slice(&found);
        }
        states
    }

    /// Makes `states` those of a sequence before `position`. The guard of its tables is for the caller to tell.
    ///
    /// # Panics
    /// If a layer is missing, or has other columns.
    pub fn set_states_of(&mut self, sequence: SequenceId, position: u32, states: &BTreeMap<u32, Vec<f32>>) {
        for plan::KeptBy { sm, kept, .. } in self.plan.states().filter(|of| of.has(sequence.0)) {
            let values = &states[&kept.layer][kept.region.first..][..kept.region.len];
            self.engine.write_state(sm, &kept.region.row(sequence.index()), position, values);
        }
    }

    /// Fills rows `0..rows` of every cache with `row_of` the cache and the row, by column, and makes `rows` the next position.
    ///
    /// # Errors
    /// A cache of pages; a position beyond the context.
    ///
    /// # Panics
    /// If a row has not the columns of its cache.
    pub fn fill_cache_with(
        &mut self,
        rows: u32,
        row_of: impl Fn(&CacheShape, u32) -> Vec<f32>,
    ) -> Result<(), InterpError> {
        if self.plan.tables.is_some() {
            return Err(InterpError::Tables { expected: "a cache without pages" });
        }
        self.seek(rows)?;
        for (index, cache) in self.plan.caches.iter().enumerate() {
            for row in 0..rows {
                self.engine.write_cache(index, row as usize, &row_of(cache, row));
            }
        }
        Ok(())
    }

    /// Decodes one position. `Input::Selected` takes the arg-max that the schedule computed in the step before.
    pub fn step(&mut self, input: Input) -> Result<Vec<f32>, InterpError> {
        let mut logits = vec![];
        self.launch(&[input], |step| {
            step.logits.copy_to(&mut logits);
            ControlFlow::Continue(())
        })?;
        Ok(logits)
    }

    /// Decodes one position per input; calls `on_step` for each in turn, which may stop. An adversarial order executes
    /// all of them before the first call, as one launch on a device would.
    pub fn launch(
        &mut self,
        inputs: &[Input],
        on_step: impl FnMut(&StepResult<'_>) -> ControlFlow<()>,
    ) -> Result<(), InterpError> {
        self.decode(inputs, true, on_step)
    }

    /// [`Interp::launch`] for a caller that looks at the logits of the last input alone. A schedule with tables then computes
    /// the head for that one and for those that the schedule chooses after.
    ///
    /// # Errors
    /// Those of [`Interp::launch`].
    pub fn launch_for_choice(
        &mut self,
        inputs: &[Input],
        on_step: impl FnMut(&StepResult<'_>) -> ControlFlow<()>,
    ) -> Result<(), InterpError> {
        self.decode(inputs, false, on_step)
    }

    fn decode(
        &mut self,
        inputs: &[Input],
        every: bool,
        mut on_step: impl FnMut(&StepResult<'_>) -> ControlFlow<()>,
    ) -> Result<(), InterpError> {
        if self.plan.tables.is_some() && self.text.is_none() {
            return Err(InterpError::Tables { expected: "tables for its rows, as its program has them" });
        }
        let Some(first) = inputs.first() else { return Ok(()) };
        if *first == Input::Selected && !self.selectable {
            return Err(InterpError::NoToken);
        }
        self.check_position(u64::from(self.position) + inputs.len() as u64 - 1)?;
        // At position 0 a state counts as zeros, whatever is kept.
        if self.text.is_none() && !self.goes_on_at(self.position) {
            return Err(InterpError::State { position: self.position });
        }
        for input in inputs {
            if let Input::Token(token) = *input
                && token as usize >= self.plan.vocab
            {
                return Err(InterpError::Token { token, vocab: self.plan.vocab });
            }
        }
        if let Some(mut text) = self.text.take() {
            let decoded = self.decode_text(&mut text, inputs, every, &mut on_step);
            self.text = Some(text);
            return decoded;
        }
        let (given, wants_logits) = Given::taken(&mut self.given);
        let position = &mut self.position;
        self.selectable = wants_logits;
        let row = |position, input| StepRow {
            position,
            input,
            before: 0,
            wants_logits,
            sequence: 0,
            pages: None,
            given: given.clone(),
        };
        let rows = |(position, &input)| vec![row(position, input)];
        let (device, at_random) = (self.device.take(), self.at_random);
        let steps = (*position..)
            .zip(inputs)
            .map(|at| StepRows { position: at.0, rows: rows(at), device: device.clone(), at_random })
            .collect();
        self.state_at = None;
        let mut stopped = false;
        self.engine.launch(steps, &mut |step| {
            *position = step.position + 1;
            let flow = on_step(&step);
            stopped |= flow.is_break();
            flow
        })?;
        let whole = !stopped || !self.engine.runs_ahead();
        self.state_at = Some(*position).filter(|_| whole);
        Ok(())
    }

    /// Decodes a launch of rows: `tokens` are those of its first step, later steps take what the step before chose. Calls
    /// `on_step` for each row of each step in turn. If the launch runs to its end, its positions count as written.
    ///
    /// # Errors
    /// The tables are not those of this program, a token is none, or the schedule does what its events do not allow.
    pub fn launch_rows(
        &mut self,
        tables: Tables<'_>,
        tokens: &[u32],
        mut on_step: impl FnMut(&StepResult<'_>),
    ) -> Result<(), InterpError> {
        if self.text.is_some() {
            return Err(InterpError::Tables { expected: "the tables of its own text" });
        }
        self.run_rows(tables, tokens, &mut on_step)
    }

    fn run_rows(
        &mut self,
        tables: Tables<'_>,
        tokens: &[u32],
        on_step: &mut dyn FnMut(&StepResult<'_>),
    ) -> Result<(), InterpError> {
        if self.plan.tables.as_ref() != Some(tables.shape()) {
            return Err(InterpError::Tables { expected: "tables of the shape that its program declares" });
        }
        if tokens.len() != tables.rows().len() {
            return Err(InterpError::Tables { expected: "a token for each row" });
        }
        if let Some(&token) = tokens.iter().find(|token| **token as usize >= self.plan.vocab) {
            return Err(InterpError::Token { token, vocab: self.plan.vocab });
        }
        for copy in tables.copies() {
            for from in self.plan.states().filter(|of| of.has(copy.from.0)) {
                let mut of_other = self.plan.states().filter(|to| to.kept.is_beside(from.kept) && to.has(copy.to.0));
                let to = of_other.next().expect("validate: each part of the sequences has a task");
                let source = from.kept.region.row(copy.from.index());
                self.engine.copy_state((from.sm, &source), (to.sm, &to.kept.region.row(copy.to.index())));
            }
        }
        let page_rows = tables.shape().page_rows as usize;
        let first = runs(tables.rows()).flat_map(|run| {
            let pages = Pages { pages: tables.pages(run.first).collect(), rows: page_rows };
            let rows = tables.rows()[run.first..].iter().take(run.rows as usize).enumerate();
            rows.map(move |(before, row)| StepRow {
                position: row.position,
                input: Input::Selected,
                before,
                wants_logits: row.wants_logits,
                sequence: row.sequence.index(),
                pages: Some(pages.clone()),
                given: None,
            })
        });
        let mut rows: Vec<StepRow> = first.collect();
        let (device, at_random) = (self.device.take(), self.at_random);
        let step = |step: u32| {
            for (row, &token) in rows.iter_mut().zip(tokens) {
                row.input = if step == 0 { Input::Token(token) } else { Input::Selected };
                row.position += u32::from(step > 0);
            }
            let position = rows.iter().map(|row| row.position).max().unwrap_or(0);
            StepRows { position, rows: rows.clone(), device: device.clone(), at_random }
        };
        let steps = (0..tables.steps()).map(step).collect();
        self.selectable = false;
        self.engine.launch(steps, &mut |step| {
            on_step(&step);
            ControlFlow::Continue(())
        })?;
        let steps = tables.steps();
        tables.finish(steps);
        Ok(())
    }

    /// The token that follows, unless the caller chooses another: the arg-max over the arg-max pairs of the last step, the
    /// lowest id of equal logits.
    pub fn selected(&mut self) -> Option<u32> {
        if self.selectable { self.engine.selected(self.position, self.last_row) } else { None }
    }

    /// What row `row` of the last step left in an exchange buffer of one phase; nothing of any other buffer.
    pub fn exchanged(&self, buffer: BufferId, row: usize) -> Vec<f32> {
        let region = self.plan.exchanges.get(buffer.index()).and_then(Option::as_ref);
        region.map_or(vec![], |region| self.engine.exchanged(region.row(row).offset, region.len))
    }

    /// Logits after each of `ids`, from position 0, whatever the model would have chosen.
    pub fn logits(&mut self, ids: &[u32]) -> Result<Vec<Vec<f32>>, InterpError> {
        self.reset();
        let inputs: Vec<Input> = ids.iter().copied().map(Input::Token).collect();
        let mut logits = Vec::with_capacity(ids.len());
        self.launch(&inputs, |step| {
            logits.push(step.logits.to_vec());
            ControlFlow::Continue(())
        })?;
        Ok(logits)
    }

    /// The `count` most likely tokens one after another that follow `prompt`, as the schedule selects them.
    ///
    /// `on_token` sees each as soon as it is known and may stop.
    pub fn greedy(
        &mut self,
        prompt: &[u32],
        count: usize,
        mut on_token: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Vec<u32>, InterpError> {
        self.reset();
        if prompt.is_empty() {
            return Err(InterpError::NoToken);
        }
        let mut tokens = vec![];
        if count == 0 {
            return Ok(tokens);
        }
        // A token is known when the next step has selected it; the last one is selected here.
        let mut inputs: Vec<Input> = prompt.iter().copied().map(Input::Token).collect();
        inputs.resize(prompt.len() + count - 1, Input::Selected);
        let mut stopped = false;
        self.launch_for_choice(&inputs, |step| {
            if step.position as usize >= prompt.len() {
                tokens.push(step.token);
                stopped = on_token(step.token).is_break();
            }
            if stopped { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        if !stopped && let Some(token) = self.selected() {
            tokens.push(token);
            let _ = on_token(token);
        }
        Ok(tokens)
    }

    /// Continues `prompt` with at most `count` tokens, each chosen by `choose` from the logits of the step before.
    /// `choose` returns `None` to stop.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        count: usize,
        mut choose: impl FnMut(&[f32]) -> Option<u32>,
    ) -> Result<Vec<u32>, InterpError> {
        self.reset();
        if prompt.is_empty() {
            return Err(InterpError::NoToken);
        }
        let inputs: Vec<Input> = prompt.iter().copied().map(Input::Token).collect();
        let mut logits = vec![];
        self.launch_for_choice(&inputs, |step| {
            if step.position as usize + 1 == prompt.len() {
                step.logits.copy_to(&mut logits);
            }
            ControlFlow::Continue(())
        })?;
        let mut tokens = vec![];
        while tokens.len() < count
            && let Some(token) = choose(&logits)
        {
            tokens.push(token);
            if tokens.len() < count {
                logits = self.step(Input::Token(token))?;
            }
        }
        Ok(tokens)
    }

    fn check_position(&self, position: u64) -> Result<(), InterpError> {
        let context_max = self.plan.context_max;
        if position < u64::from(context_max) { Ok(()) } else { Err(InterpError::Position { position, context_max }) }
    }
}
