//! Executes a plan in one thread, in a hostile order that a seed decides: the second judge beside the validator.
//!
//! What `threads` leaves out is here. SMs drift apart as far as events let them, over step boundaries, with one SM
//! starved at a time. Each loader runs ahead as far as its ring lets it, and freed slots are overwritten. Every element
//! remembers the step that wrote it, so that reading too early, too late or never is named. Cache rows that an SM wrote
//! stay unseen by loaders of other SMs until the SM signals an event that orders memory, and such a loader asks for them only
//! after its SM has waited for such an event, carried from the step before. The loader of the SM itself sees them after the
//! first task of a later step, where it takes the step over by a barrier and a proxy fence. Nothing in `ir` promises more.
//!
//! Counters count over steps, as on a device; packets are tagged with their step. A task is one indivisible action.

use super::kernel::Isa;
use super::memory::{Access, Cache, CacheColumns, Memory, Place, Region, StepRows, round_to_cache, word};
use super::ops::{self, History, Scratch, Step, Streamed};
use super::plan::{CacheShape, Chosen, DealtPart, Plan, StreamBytes, StreamRun, TaskPlan, Work};
use super::real::Real;
use super::threads::Direct;
use super::{Blocked, BlockedWait, Engine, InterpError, Logits, Pack, StepResult};
use crate::ir::schedule::Mechanism;
use crate::ir::variant::MatVecVariant;
use crate::ir::{BufferId, EventId, SmId, TaskId};
use crate::random::Random;
use std::collections::VecDeque;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use thiserror::Error;

/// What a schedule did that its events do not allow. Positions number the steps.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Violation {
    #[error("{sm} {task} at position {expected} reads column {column} of {buffer}, {}", written(found))]
    Stale { sm: SmId, task: TaskId, buffer: BufferId, column: usize, expected: u32, found: Option<u32> },
    #[error("{sm} {task} at position {position} writes column {column} of {buffer}, already written in this step")]
    WrittenTwice { sm: SmId, task: TaskId, buffer: BufferId, column: usize, position: u32 },
    #[error("{sm} loads row {row} of {buffer} for {task} at position {position}, which no ordered write has reached")]
    Unordered { sm: SmId, task: TaskId, buffer: BufferId, row: usize, position: u32 },
    #[error("{sm} {task} at position {position} reads history before it waited for a carried event that orders memory")]
    NotAcquired { sm: SmId, task: TaskId, position: u32 },
    #[error("{sm} reached {task} at position {position}, its stream brings {found}")]
    StreamOrder { sm: SmId, task: TaskId, position: u32, found: String },
    #[error("{sm} {task} at position {position} needs more than the {slots} ring slots of {slot_bytes} bytes")]
    Ring { sm: SmId, task: TaskId, position: u32, slots: u32, slot_bytes: u32 },
}

fn written(found: &Option<u32>) -> String {
    match found {
        Some(position) => format!("expected this step's, found one written at position {position}"),
        None => "which nothing has written".to_string(),
    }
}

pub struct Adversary<R> {
    plan: Arc<Plan>,
    pack: Pack,
    isa: Isa,
    memory: Memory,
    seed: u64,
    random: Random,
    tags: Tags,
    sms: Vec<Sm>,
    scratch: Scratch<R>,
    /// Regime of the last step that was launched.
    previous_regime: usize,
}

/// The position whose step wrote each element last.
struct Tags {
    exchange: Vec<Option<u32>>,
    output: Vec<Option<u32>>,
    /// By cache: who wrote each element.
    caches: Vec<Vec<Written>>,
}

/// Who wrote an element of a cache, and who can see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Written {
    /// Nobody, or nobody of whom a loader could know.
    Never,
    /// The host: every loader sees it.
    Host,
    /// This SM. Loaders of others see it only if an event has `ordered` it.
    By { sm: SmId, ordered: bool },
}

impl Written {
    /// Whether the loader of `sm` sees it. `acquired`: its SM has waited for what orders memory.
    fn is_seen(self, sm: SmId, acquired: bool) -> bool {
        match self {
            Written::Never => false,
            Written::Host => true,
            Written::By { sm: by, ordered } => by == sm || ordered && acquired,
        }
    }
}

struct Sm {
    id: SmId,
    private: Vec<u32>,
    private_tags: Vec<Option<u32>>,
    /// Of recurrent states, the position of the row that left each value. Sequences are at different positions.
    state_tags: Vec<Option<u32>>,
    /// Step of the launch, and task in its queue.
    step: usize,
    cursor: usize,
    /// Steps of this launch in which the loader may ask for what other SMs appended.
    acquired: usize,
    /// Steps of this launch whose first task is done: the loader may ask for history, too.
    begun: usize,
    loader: Loader,
    slots: Vec<Vec<u32>>,
    free: Vec<usize>,
    ring: VecDeque<Chunk>,
    /// Cache rows written and not yet released: columns, row, values.
    pending: Vec<(CacheColumns, usize, Vec<f32>)>,
    /// Those of earlier steps, which the own loader sees already: columns and row.
    owned: Vec<(CacheColumns, usize)>,
}

/// The next chunk that a loader brings in.
#[derive(Clone, Copy, Default)]
struct Loader {
    step: usize,
    run: usize,
    /// Bytes of a fixed run, or chunks of a history run, already loaded.
    done: usize,
    /// Bytes of the run, if parts are dealt and the loader knows which.
    dealt: Option<usize>,
}

struct Chunk {
    slot: usize,
    task: TaskId,
    step: usize,
    /// Of weights: where they lie in the pack.
    at: usize,
    bytes: usize,
}

/// What happened in a launch so far.
struct Launch {
    steps: Vec<StepRows>,
    /// By step: regime, and steps of the launch that ran it before.
    regimes: Vec<(usize, u64)>,
    /// By step and event: signals.
    signals: Vec<Vec<u32>>,
    /// By regime and event: signals of all steps.
    totals: Vec<Vec<u64>>,
    /// By step.
    tokens: Vec<Vec<u32>>,
    /// By step and row.
    logits: Vec<Vec<Vec<f32>>>,
}

enum Action {
    Run(usize),
    Load(usize),
}

impl<R: Real> Adversary<R> {
    pub fn new(plan: Arc<Plan>, pack: Pack, isa: Isa, seed: u64) -> Adversary<R> {
        let caches: Vec<Cache> = plan.caches.iter().map(CacheShape::empty).collect();
        let tags = Tags {
            exchange: vec![None; plan.exchange_words],
            output: vec![None; plan.output_words],
            caches: caches.iter().map(|c| vec![Written::Never; c.rows() * c.cols()]).collect(),
        };
        let slots = plan.ring.slots as usize;
        let sms = (0..plan.sms)
            .map(|sm| Sm {
                id: SmId::from(sm),
                private: vec![0; plan.private_words],
                private_tags: vec![None; plan.private_words],
                state_tags: vec![None; plan.private_words],
                step: 0,
                cursor: 0,
                acquired: 0,
                begun: 0,
                loader: Loader::default(),
                slots: vec![vec![]; slots],
                free: (0..slots).collect(),
                ring: VecDeque::new(),
                pending: vec![],
                owned: vec![],
            })
            .collect();
        Adversary {
            memory: Memory::new(plan.exchange_words, plan.output_words, caches),
            pack,
            isa,
            seed,
            random: Random::new(seed),
            tags,
            sms,
            scratch: Scratch::new(),
            previous_regime: 0,
            plan,
        }
    }

    fn run(&mut self, launch: &mut Launch) -> Result<(), InterpError> {
        for sm in &mut self.sms {
            (sm.step, sm.cursor, sm.acquired, sm.begun, sm.loader) = (0, 0, 1, 0, Loader::default());
            // A launch that failed may have left chunks in the ring.
            sm.ring.clear();
            sm.free = (0..sm.slots.len()).collect();
            self.plan.skip_empty(launch, &mut sm.loader, sm.id);
        }
        // One SM at a time runs only when nothing else can, so that the others get as far ahead as events let them.
        let mut starved = self.random.below(self.sms.len().max(1));
        let mut last = 0;
        let mut actions = vec![];
        loop {
            actions.clear();
            for sm in 0..self.sms.len() {
                self.advance(launch, sm);
                if self.ready(launch, sm) {
                    actions.push(Action::Run(sm));
                }
                if self.can_load(launch, sm) {
                    actions.push(Action::Load(sm));
                }
            }
            if self.sms.iter().all(|sm| sm.step == launch.steps.len()) {
                break;
            }
            if self.random.below(64) == 0 {
                starved = self.random.below(self.sms.len());
            }
            let of = |action: &Action| match *action {
                Action::Run(sm) | Action::Load(sm) => sm,
            };
            if actions.iter().any(|a| of(a) != starved) {
                actions.retain(|a| of(a) != starved);
            }
            if actions.is_empty() {
                return Err(self.deadlock(launch));
            }
            // Half of the time one SM goes on, so that it gets several tasks ahead.
            let same: Vec<usize> = (0..actions.len()).filter(|&i| of(&actions[i]) == last).collect();
            let choice = match same.len() {
                n if n > 0 && self.random.below(2) == 0 => same[self.random.below(n)],
                _ => self.random.below(actions.len()),
            };
            last = of(&actions[choice]);
            match actions[choice] {
                Action::Run(sm) => self.task(launch, sm)?,
                Action::Load(sm) => self.load(launch, sm)?,
            }
        }
        // The end of a launch orders everything.
        for sm in 0..self.sms.len() {
            self.release(sm);
        }
        Ok(())
    }

    /// Moves an SM whose queue is done to the next step.
    fn advance(&mut self, launch: &Launch, sm: usize) {
        let sm = &mut self.sms[sm];
        while let Some(&(regime, _)) = launch.regimes.get(sm.step)
            && sm.cursor == self.plan.regimes[regime].queues[sm.id.index()].len()
        {
            (sm.step, sm.cursor) = (sm.step + 1, 0);
        }
    }

    fn ready(&self, launch: &Launch, sm: usize) -> bool {
        let sm = &self.sms[sm];
        let Some(&(regime, _)) = launch.regimes.get(sm.step) else { return false };
        let Some(task) = self.plan.regimes[regime].queues[sm.id.index()].get(sm.cursor) else { return false };
        task.waits.iter().all(|&(event, count)| self.seen(launch, sm.step, event) >= count)
    }

    /// Signals of `event` that a wait in `step` sees.
    fn seen(&self, launch: &Launch, step: usize, event: EventId) -> u32 {
        let (regime, epoch) = launch.regimes[step];
        let plan = &self.plan.regimes[regime].events[event.index()];
        let past = |epoch: u64| {
            let before = epoch * u64::from(plan.signals);
            launch.totals[regime][event.index()].saturating_sub(before) as u32
        };
        let counter = plan.event.mechanism == Mechanism::Counter;
        match (plan.event.carried, step.checked_sub(1)) {
            (false, _) if counter => past(epoch),
            (false, _) => launch.signals[step][event.index()],
            // The previous launch has ended.
            (true, None) => u32::MAX,
            (true, Some(before)) if launch.regimes[before].0 == regime => {
                if counter {
                    past(epoch - 1)
                } else {
                    launch.signals[before][event.index()]
                }
            }
            // The first step of a regime sees the same columns, published by the tasks of the regime before.
            (true, Some(before)) => {
                let events = &self.plan.regimes[launch.regimes[before].0].events;
                let done = events.iter().zip(&launch.signals[before]).all(|(e, &seen)| {
                    let same = e.event.carried && e.event.buffer == plan.event.buffer;
                    !same || e.event.hi <= plan.event.lo || plan.event.hi <= e.event.lo || seen >= e.event.count
                });
                if done { u32::MAX } else { 0 }
            }
        }
    }

    fn can_load(&self, launch: &Launch, sm: usize) -> bool {
        let sm = &self.sms[sm];
        let Some(&(regime, _)) = launch.regimes.get(sm.loader.step) else { return false };
        let plan = &self.plan.regimes[regime];
        let run = &plan.streams[sm.id.index()][sm.loader.run];
        if sm.free.is_empty() {
            return false;
        }
        if let Some(event) = run.after
            && self.seen(launch, sm.loader.step, event) < plan.events[event.index()].event.count
        {
            return false;
        }
        let Some((rows, columns)) = history_chunk(&launch.steps[sm.loader.step], &run.bytes, sm.loader.done) else {
            return true;
        };
        sm.loader.step < sm.acquired
            || sm.loader.step < sm.begun && rows.into_iter().all(|row| self.is_seen(sm.id, columns, row, false))
    }

    /// Whether the loader of `sm` sees columns of a cache row.
    fn is_seen(&self, sm: SmId, columns: CacheColumns, row: usize, acquired: bool) -> bool {
        let at = row * self.memory.caches[columns.cache].cols() + columns.first;
        self.tags.caches[columns.cache][at..at + columns.len].iter().all(|written| written.is_seen(sm, acquired))
    }

    /// The parts that a run is of, by slot, or what is dealt to it.
    #[allow(clippy::type_complexity)] // One of the two.
    fn look_up(
        &self,
        sm: SmId,
        run: &StreamRun,
        step: &StepRows,
    ) -> Result<(Vec<usize>, Option<Vec<DealtPart>>), InterpError> {
        let StreamBytes::Fixed { chosen: Some(chosen), .. } = &run.bytes else { return Ok((vec![], None)) };
        let position = step.position;
        for row in 0..if chosen.deal.is_some() { step.rows.len() } else { 1 } {
            let first = chosen.entry.row(row).at(position);
            let tags = &self.tags.exchange[first..first + chosen.entry.len];
            if let Some(slot) = tags.iter().position(|tag| *tag != Some(position)) {
                let (task, buffer, found) = (run.task, chosen.entry.buffer, tags[slot]);
                let column = chosen.entry.first + slot;
                return Err(Violation::Stale { sm, task, buffer, column, expected: position, found }.into());
            }
        }
        let memory = &mut Direct { memory: &self.memory, private: &mut [], rows: step };
        Ok(match &chosen.deal {
            Some(deal) => (vec![], Some(chosen.dealt(deal, step.rows.len(), memory))),
            None => (chosen.parts(memory), None),
        })
    }

    /// Brings the next chunk of an SM's stream into a free slot.
    fn load(&mut self, launch: &Launch, sm: usize) -> Result<(), InterpError> {
        let plan = self.plan.clone();
        let pack: &[u8] = (*self.pack).as_ref();
        let loader = &self.sms[sm];
        let (regime, _) = launch.regimes[loader.loader.step];
        let step = &launch.steps[loader.loader.step];
        let position = step.position;
        let run = &plan.regimes[regime].streams[loader.id.index()][loader.loader.run];
        let history = history_chunk(step, &run.bytes, loader.loader.done);
        if let Some((rows, columns)) = &history
            && let Some(&row) = rows.iter().find(|row| {
                let acquired = loader.loader.step < loader.acquired;
                !self.is_seen(loader.id, *columns, **row, acquired)
            })
        {
            let buffer = plan.caches[columns.cache].buffer;
            return Err(Violation::Unordered { sm: loader.id, task: run.task, buffer, row, position }.into());
        }
        let (parts, dealt) = self.look_up(loader.id, run, step)?;
        let sm = &mut self.sms[sm];
        if let (StreamBytes::Fixed { chosen: Some(chosen), .. }, Some(dealt)) = (&run.bytes, &dealt) {
            let bytes = dealt.iter().map(|part| part.units.len() * chosen.piece_bytes).sum();
            sm.loader.dealt = Some(bytes);
            if bytes == 0 {
                plan.skip_empty(launch, &mut sm.loader, sm.id);
                return Ok(());
            }
        }
        let slot_bytes = plan.ring.slot_bytes as usize;
        let Some(slot) = sm.free.pop() else { return Ok(()) };
        let words = &mut sm.slots[slot];
        words.clear();
        let mut at = 0;
        let bytes = match &run.bytes {
            StreamBytes::Fixed { begin, variant, chosen: Some(chosen), .. } if dealt.is_some() => {
                let parts = dealt.as_deref().unwrap_or_default();
                let (place, chunk) = dealt_chunk(parts, chosen, variant, *begin, sm.loader.done);
                words.extend(pack[chunk.clone()].chunks(4).map(word));
                at = place;
                sm.loader.done += chunk.len();
                chunk.len()
            }
            StreamBytes::Fixed { begin, bytes, variant, chosen } => {
                let chunk = variant.chunk_at(sm.loader.done as u64, *bytes as u64);
                let chunk = chunk.start as usize..chunk.end as usize;
                at = begin + chunk.start;
                sm.loader.done += chunk.len();
                let loaded = chunk.len();
                match chosen {
                    Some(chosen) => chosen
                        .pieces(*begin, chunk, &parts)
                        .for_each(|piece| words.extend(pack[piece].chunks(4).map(word))),
                    None => words.extend(pack[at..at + loaded].chunks(4).map(word)),
                }
                loaded
            }
            StreamBytes::History { .. } => {
                let Some((cache_rows, columns)) = history else { return Ok(()) };
                let cache = &self.memory.caches[columns.cache];
                let mut row_bytes = vec![];
                // SAFETY: one thread, and nothing is appended while the rows are read.
                unsafe { cache.copy_rows(cache_rows.into_iter(), columns.first, columns.len, &mut row_bytes) };
                words.extend(row_bytes.chunks(4).map(word));
                sm.loader.done += 1;
                row_bytes.len()
            }
        };
        if bytes > slot_bytes {
            let ring = plan.ring;
            let (slots, slot_bytes) = (ring.slots, ring.slot_bytes);
            return Err(Violation::Ring { sm: sm.id, task: run.task, position, slots, slot_bytes }.into());
        }
        sm.ring.push_back(Chunk { slot, task: run.task, step: sm.loader.step, at, bytes });
        plan.skip_empty(launch, &mut sm.loader, sm.id);
        Ok(())
    }

    /// The next chunk of an SM's ring, loaded now if the loader was late.
    fn next_chunk(&mut self, launch: &Launch, sm: usize, task: TaskId) -> Result<Chunk, InterpError> {
        let state = &self.sms[sm];
        let (id, step) = (state.id, state.step);
        let position = launch.steps[step].position;
        // A run of which nothing is dealt to the SM brings no chunk.
        while self.sms[sm].ring.is_empty() {
            let state = &self.sms[sm];
            if !self.can_load(launch, sm) {
                let ring = self.plan.ring;
                let (slots, slot_bytes) = (ring.slots, ring.slot_bytes);
                let violation = match state.loader.step {
                    _ if state.free.is_empty() => Violation::Ring { sm: id, task, position, slots, slot_bytes },
                    at if at == step && at >= state.acquired => Violation::NotAcquired { sm: id, task, position },
                    _ => Violation::StreamOrder { sm: id, task, position, found: "nothing more".to_string() },
                };
                return Err(violation.into());
            }
            self.load(launch, sm)?;
        }
        match self.sms[sm].ring.pop_front() {
            Some(chunk) if chunk.task == task && chunk.step == step => Ok(chunk),
            other => {
                let found = other.map_or("nothing more".to_string(), |chunk| chunk.task.to_string());
                Err(Violation::StreamOrder { sm: id, task, position, found }.into())
            }
        }
    }

    /// Gives a slot back; what was in it is destroyed.
    fn free(&mut self, sm: usize, chunk: &Chunk) {
        let sm = &mut self.sms[sm];
        sm.slots[chunk.slot].fill(u32::MAX);
        sm.free.push(chunk.slot);
    }

    /// Executes the head task of an SM.
    fn task(&mut self, launch: &mut Launch, sm: usize) -> Result<(), InterpError> {
        let plan = self.plan.clone();
        let (step, cursor) = (self.sms[sm].step, self.sms[sm].cursor);
        let regime_index = launch.regimes[step].0;
        let regime = &plan.regimes[regime_index];
        let task = &regime.queues[sm][cursor];
        let rows_of_step = &launch.steps[step];
        let orders = |event: &EventId| regime.events[event.index()].event.mechanism.orders_memory();
        if task.waits.iter().any(|(event, _)| regime.events[event.index()].event.carried && orders(event)) {
            self.sms[sm].acquired = self.sms[sm].acquired.max(step + 1);
        }

        let mut words = [vec![], vec![]];
        let (mut rows, mut length) = (0, 0);
        match &task.work {
            Work::MatVec(m) => {
                let memory = &mut Direct { memory: &self.memory, private: &mut [], rows: rows_of_step };
                length = m.streamed_bytes(m.dealt(rows_of_step.rows.len(), memory).as_deref());
                let mut bytes = 0;
                while bytes < length {
                    let chunk = self.next_chunk(launch, sm, task.id)?;
                    // As they lie in the pack, whatever order they are streamed in.
                    let at = (chunk.at - m.weight.start) / 4;
                    let end = at + self.sms[sm].slots[chunk.slot].len();
                    words[0].resize(words[0].len().max(end), 0);
                    words[0][at..end].copy_from_slice(&self.sms[sm].slots[chunk.slot]);
                    bytes += chunk.bytes;
                    self.free(sm, &chunk);
                    self.load_some(launch, sm)?;
                }
            }
            Work::Attention(a) => {
                // Nothing is loaded for a row that the launch does not have.
                rows = rows_of_step.rows.get(task.row.unwrap_or(0)).map_or(0, |row| {
                    let (start, end) = a.op.history_share(row.position, row.past(), a.j);
                    end.saturating_sub(start) as usize
                });
                let row_bytes = a.keys.len * a.cache_dtype.bytes();
                let mut loaded = 0;
                while loaded < rows {
                    // Both chunks are held at once: weights of a row's value need its score.
                    let pair = [self.next_chunk(launch, sm, task.id)?, self.next_chunk(launch, sm, task.id)?];
                    for (words, chunk) in words.iter_mut().zip(&pair) {
                        words.extend_from_slice(&self.sms[sm].slots[chunk.slot]);
                    }
                    loaded += pair[0].bytes / row_bytes.max(1);
                    pair.iter().for_each(|chunk| self.free(sm, chunk));
                    self.load_some(launch, sm)?;
                }
            }
            _ => {}
        }
        let streamed = match &task.work {
            Work::MatVec(_) => Streamed::Weights(&bytemuck::cast_slice(&words[0])[..length]),
            Work::Attention(a) => Streamed::History(History {
                keys: ops::history_rows(a.cache_dtype, &words[0], a.keys.len, a.cache_scales[0]),
                values: ops::history_rows(a.cache_dtype, &words[1], a.values.len, a.cache_scales[1]),
                rows,
            }),
            _ => Streamed::Nothing,
        };
        let previous = step.checked_sub(1).map_or(self.previous_regime, |before| launch.regimes[before].0);
        let context = Step {
            plan: &plan,
            pack: (*self.pack).as_ref(),
            isa: self.isa,
            rows: rows_of_step,
            serial: 0,
            previous_parts: &plan.regimes[previous].parts,
        };
        let state = &mut self.sms[sm];
        let mut memory = Checked {
            direct: Direct { memory: &self.memory, private: &mut state.private, rows: rows_of_step },
            private_tags: &mut state.private_tags,
            state_tags: &mut state.state_tags,
            tags: &mut self.tags,
            pending: &mut state.pending,
            sm: state.id,
            task: task.id,
            violation: None,
        };
        ops::run(task, &context, streamed, &mut memory, &mut self.scratch);
        if let Some(violation) = memory.violation {
            return Err(violation.into());
        }
        self.record(launch, sm, task, step);
        if task.signals.iter().any(orders) {
            self.release(sm);
        }
        for event in &task.signals {
            launch.signals[step][event.index()] += 1;
            launch.totals[regime_index][event.index()] += 1;
        }
        if cursor == 0 {
            self.own(sm);
            self.sms[sm].begun = step + 1;
        }
        self.sms[sm].cursor += 1;
        Ok(())
    }

    /// Lets the loader of an SM run ahead by a random number of chunks.
    fn load_some(&mut self, launch: &Launch, sm: usize) -> Result<(), InterpError> {
        while self.can_load(launch, sm) && self.random.below(2) == 0 {
            self.load(launch, sm)?;
        }
        Ok(())
    }

    /// Keeps what the host would see of a step: another step may overwrite it before the launch ends.
    fn record(&self, launch: &mut Launch, sm: usize, task: &TaskPlan, step: usize) {
        let rows = &launch.steps[step];
        match &task.work {
            Work::Select { token, .. } if sm == 0 => {
                let private = &self.sms[sm].private;
                let tokens = (0..rows.rows.len()).map(|row| private[token.row(row).at(rows.position)]);
                launch.tokens[step] = tokens.collect();
            }
            Work::MatVec(m) if m.best.is_some() => {
                if let Some(out) = &m.out {
                    let mut direct = Direct { memory: &self.memory, private: &mut [], rows };
                    let of_rows = launch.logits[step].iter_mut().enumerate();
                    for (row, logits) in of_rows.filter(|(row, _)| rows.rows[*row].wants_logits) {
                        logits.resize(self.plan.vocab, f32::NAN);
                        direct.load(&out.row(row), &mut logits[out.first..out.first + out.len]);
                    }
                }
            }
            _ => {}
        }
    }

    /// Makes the cache rows that an SM wrote in earlier steps visible to its own loader.
    fn own(&mut self, sm: usize) {
        let Sm { id, pending, owned, .. } = &mut self.sms[sm];
        for (columns, row, values) in pending.drain(..) {
            let cache = &self.memory.caches[columns.cache];
            cache.append(row, columns.first, &values);
            let at = row * cache.cols() + columns.first;
            self.tags.caches[columns.cache][at..at + columns.len].fill(Written::By { sm: *id, ordered: false });
            owned.push((columns, row));
        }
    }

    /// Makes the cache rows an SM wrote visible to loaders of other SMs.
    fn release(&mut self, sm: usize) {
        self.own(sm);
        let Sm { id, owned, .. } = &mut self.sms[sm];
        for (columns, row) in owned.drain(..) {
            let at = row * self.memory.caches[columns.cache].cols() + columns.first;
            self.tags.caches[columns.cache][at..at + columns.len].fill(Written::By { sm: *id, ordered: true });
        }
    }

    fn deadlock(&self, launch: &Launch) -> InterpError {
        let stuck: Vec<&Sm> = self.sms.iter().filter(|sm| sm.step < launch.steps.len()).collect();
        let step = stuck.iter().map(|sm| sm.step).min().unwrap_or(0);
        let regime_index = launch.regimes[step].0;
        let regime = &self.plan.regimes[regime_index];
        let blocked = stuck.into_iter().filter(|sm| sm.step == step).filter_map(|sm| {
            let task = regime.queues[sm.id.index()].get(sm.cursor)?;
            let waits = task.waits.iter().map(|&(event, needed)| {
                let seen = self.seen(launch, step, event).min(needed);
                BlockedWait { event, needed, seen, missing: vec![] }
            });
            let waits = waits.filter(|w| w.seen < w.needed).collect();
            Some(Blocked { sm: sm.id, cursor: sm.cursor, task: task.id, waits })
        });
        InterpError::deadlock(&self.plan, regime_index, launch.steps[step].position, blocked.collect())
    }
}

/// Cache rows and columns of the next chunk of a history run of which `done` chunks are loaded; `None`: weights.
fn history_chunk(step: &StepRows, bytes: &StreamBytes, done: usize) -> Option<(Vec<usize>, CacheColumns)> {
    let StreamBytes::History { rows, keys, values, op, j, row } = bytes else { return None };
    let of = &step.rows[*row];
    let (start, end) = op.history_share(of.position, of.past(), *j);
    let first = start as usize + done / 2 * rows;
    let last = (first + rows).min(end as usize);
    let columns = if done.is_multiple_of(2) { *keys } else { *values };
    Some(((first..last).map(|position| of.cache_row(position)).collect(), columns))
}

/// The next chunk of what is dealt, after `done` bytes: its place from `begin` on, and its bytes in the pack. Chunks end with their part.
fn dealt_chunk(
    parts: &[DealtPart],
    chosen: &Chosen,
    variant: &MatVecVariant,
    begin: usize,
    done: usize,
) -> (usize, Range<usize>) {
    let mut before = 0;
    for part in parts {
        let bytes = chosen.bytes_of(begin, part);
        if done < before + bytes.len() {
            let chunk = variant.chunk_at((done - before) as u64, bytes.len() as u64);
            let (from, to) = (chunk.start as usize, chunk.end as usize);
            return (begin + before + from, bytes.start + from..bytes.start + to);
        }
        before += bytes.len();
    }
    (begin + before, 0..0)
}

impl Plan {
    /// Moves `loader` past runs that are done or bring nothing, to the next chunk or the end of the launch.
    fn skip_empty(&self, launch: &Launch, loader: &mut Loader, sm: SmId) {
        while let Some(&(regime, _)) = launch.regimes.get(loader.step) {
            let Some(run) = self.regimes[regime].streams[sm.index()].get(loader.run) else {
                *loader = Loader { step: loader.step + 1, run: 0, done: 0, dealt: None };
                continue;
            };
            let size = match &run.bytes {
                // What is dealt is not known before the loader has looked at the choices.
                StreamBytes::Fixed { chosen: Some(chosen), .. } if chosen.deal.is_some() => {
                    loader.dealt.unwrap_or(usize::MAX)
                }
                StreamBytes::Fixed { bytes, .. } => *bytes,
                StreamBytes::History { rows, op, j, row, .. } => {
                    launch.steps[loader.step].rows.get(*row).map_or(0, |row| {
                        let (start, end) = op.history_share(row.position, row.past(), *j);
                        2 * (end.saturating_sub(start) as usize).div_ceil(*rows)
                    })
                }
            };
            if loader.done < size {
                return;
            }
            (loader.run, loader.done, loader.dealt) = (loader.run + 1, 0, None);
        }
    }
}

/// Memory that knows which step wrote what.
struct Checked<'a> {
    direct: Direct<'a>,
    private_tags: &'a mut [Option<u32>],
    state_tags: &'a mut [Option<u32>],
    tags: &'a mut Tags,
    pending: &'a mut Vec<(CacheColumns, usize, Vec<f32>)>,
    sm: SmId,
    task: TaskId,
    /// The first one.
    violation: Option<Violation>,
}

impl Checked<'_> {
    fn check_read(&mut self, region: &Region, position: u32) {
        let at = region.at(position);
        let tags = match region.place {
            Place::Exchange => &self.tags.exchange,
            Place::Output => &self.tags.output,
            Place::Private => &*self.private_tags,
        };
        let tags = &tags[at..at + region.len];
        if let Some(i) = tags.iter().position(|&tag| tag != Some(position)) {
            let (sm, task, buffer) = (self.sm, self.task, region.buffer);
            let stale =
                Violation::Stale { sm, task, buffer, column: region.first + i, expected: position, found: tags[i] };
            self.violation.get_or_insert(stale);
        }
    }

    fn mark_written(&mut self, region: &Region) {
        let position = self.direct.rows.position;
        let at = region.at(position);
        let tags = match region.place {
            Place::Exchange => &mut self.tags.exchange,
            Place::Output => &mut self.tags.output,
            Place::Private => &mut *self.private_tags,
        };
        let tags = &mut tags[at..at + region.len];
        // Private memory is updated in place.
        if region.place != Place::Private
            && let Some(i) = tags.iter().position(|&tag| tag == Some(position))
        {
            let (sm, task, buffer) = (self.sm, self.task, region.buffer);
            let twice = Violation::WrittenTwice { sm, task, buffer, column: region.first + i, position };
            self.violation.get_or_insert(twice);
        }
        tags.fill(Some(position));
    }
}

impl Access for Checked<'_> {
    fn trusted(&self) -> bool {
        false
    }

    fn load(&mut self, region: &Region, out: &mut [f32]) {
        self.check_read(region, self.direct.rows.position);
        self.direct.load(region, out);
    }

    fn store(&mut self, region: &Region, values: &[f32]) {
        self.mark_written(region);
        self.direct.store(region, values);
    }

    fn load_words(&mut self, region: &Region, out: &mut [u32]) {
        self.check_read(region, self.direct.rows.position);
        self.direct.load_words(region, out);
    }

    fn store_words(&mut self, region: &Region, words: &[u32]) {
        self.mark_written(region);
        self.direct.store_words(region, words);
    }

    fn load_previous_words(&mut self, region: &Region, out: &mut [u32]) {
        self.check_read(region, self.direct.rows.position.wrapping_sub(1));
        self.direct.load_previous_words(region, out);
    }

    fn load_state(&mut self, region: &Region, position: u32, out: &mut [f32]) {
        let (at, expected) = (region.at(0), position.wrapping_sub(1));
        let tags = &self.state_tags[at..at + region.len];
        if let Some(i) = tags.iter().position(|&tag| tag != Some(expected)) {
            let (sm, task, buffer) = (self.sm, self.task, region.buffer);
            let stale = Violation::Stale { sm, task, buffer, column: region.first + i, expected, found: tags[i] };
            self.violation.get_or_insert(stale);
        }
        self.direct.load_state(region, position, out);
    }

    fn store_state(&mut self, region: &Region, position: u32, values: &[f32]) {
        let at = region.at(0);
        self.state_tags[at..at + region.len].fill(Some(position));
        self.direct.store_state(region, position, values);
    }

    fn append(&mut self, row: usize, columns: CacheColumns, values: &[f32]) {
        let row = &self.direct.rows.rows[row];
        let row = row.cache_row(row.position as usize);
        let cache = &self.direct.memory.caches[columns.cache];
        let (dtype, scale) = (cache.dtype(), cache.scale(columns.first));
        let values = values.iter().map(|&v| round_to_cache(dtype, scale, v)).collect();
        self.pending.push((columns, row, values));
    }
}

impl<R: Real> Engine for Adversary<R> {
    fn launch(
        &mut self,
        steps: Vec<StepRows>,
        on_step: &mut dyn FnMut(StepResult<'_>) -> ControlFlow<()>,
    ) -> Result<(), InterpError> {
        let mut epochs = vec![0; self.plan.regimes.len()];
        let Some(first) = steps.first() else { return Ok(()) };
        let position = first.position;
        let regimes: Vec<(usize, u64)> = steps
            .iter()
            .map(|step| {
                let regime = self.plan.regime_at(step.position);
                epochs[regime] += 1;
                (regime, epochs[regime] - 1)
            })
            .collect();
        // What positions from here on hold belongs to an earlier sequence.
        let stale = |tag: &mut Option<u32>| *tag = tag.filter(|&written| written < position);
        self.tags.exchange.iter_mut().chain(&mut self.tags.output).for_each(stale);
        self.sms.iter_mut().flat_map(|sm| &mut sm.private_tags).for_each(stale);
        for (cache, tags) in self.memory.caches.iter().zip(&mut self.tags.caches) {
            if first.rows.iter().all(|row| row.pages.is_none()) {
                let begin = (position as usize * cache.cols()).min(tags.len());
                tags[begin..].fill(Written::Never);
                continue;
            }
            // Pages hold other sequences, too.
            for row in steps.iter().flat_map(|step| &step.rows) {
                let at = row.cache_row(row.position as usize) * cache.cols();
                tags[at..at + cache.cols()].fill(Written::Never);
            }
        }
        let mut launch = Launch {
            signals: regimes.iter().map(|r| vec![0; self.plan.regimes[r.0].events.len()]).collect(),
            totals: self.plan.regimes.iter().map(|r| vec![0; r.events.len()]).collect(),
            regimes,
            tokens: vec![vec![]; steps.len()],
            logits: steps.iter().map(|step| vec![vec![]; step.rows.len()]).collect(),
            steps,
        };
        self.run(&mut launch)?;
        if let Some(last) = launch.regimes.last() {
            self.previous_regime = last.0;
        }
        for ((step, tokens), logits) in launch.steps.iter().zip(&launch.tokens).zip(&launch.logits) {
            for (row, ((of, &token), logits)) in step.rows.iter().zip(tokens).zip(logits).enumerate() {
                let logits = Logits::Values(logits);
                if on_step(StepResult { row, position: of.position, token, logits }).is_break() {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn runs_ahead(&self) -> bool {
        true
    }

    fn selected(&mut self, position: u32, row: usize) -> Option<u32> {
        let parts = &self.plan.regimes[self.previous_regime].parts;
        let rows = &StepRows { position, rows: vec![], device: None, at_random: None };
        let mut memory = Direct { memory: &self.memory, private: &mut [], rows };
        ops::decided(&self.plan.best.row(row), parts, &mut memory)
    }

    fn exchanged(&self, at: usize, len: usize) -> Vec<f32> {
        self.memory.exchanged(at, len)
    }

    fn write_cache(&mut self, cache: usize, row: usize, values: &[f32]) {
        let cols = self.memory.caches[cache].cols();
        self.memory.caches[cache].append(row, 0, values);
        self.tags.caches[cache][row * cols..(row + 1) * cols].fill(Written::Host);
    }

    fn write_state(&mut self, sm: usize, region: &Region, position: u32, values: &[f32]) {
        let at = region.at(0);
        let sm = &mut self.sms[sm];
        sm.private[at..at + region.len].iter_mut().zip(values).for_each(|(word, value)| *word = value.to_bits());
        sm.state_tags[at..at + region.len].fill(Some(position.wrapping_sub(1)));
    }

    fn read_state(&self, sm: usize, region: &Region) -> Vec<f32> {
        self.sms[sm].private[region.at(0)..][..region.len].iter().map(|word| f32::from_bits(*word)).collect()
    }

    fn copy_state(&mut self, (sm, from): (usize, &Region), (to_sm, to): (usize, &Region)) {
        let of = |values: &[_]| values[from.at(0)..][..from.len].to_vec();
        let (values, tags) = (of(&self.sms[sm].private), self.sms[sm].state_tags[from.at(0)..][..from.len].to_vec());
        let target = &mut self.sms[to_sm];
        target.private[to.at(0)..][..to.len].copy_from_slice(&values);
        target.state_tags[to.at(0)..][..to.len].copy_from_slice(&tags);
    }

    fn read_cache(&self, cache: usize, row: usize) -> Vec<u8> {
        let (cache, mut bytes) = (&self.memory.caches[cache], vec![]);
        // SAFETY: one thread, and nothing is appended while the row is read.
        unsafe { cache.copy_rows(row..row + 1, 0, cache.cols(), &mut bytes) };
        bytes
    }

    fn reset(&mut self) {
        self.random = Random::new(self.seed);
        self.tags.exchange.fill(None);
        self.tags.output.fill(None);
        self.tags.caches.iter_mut().for_each(|tags| tags.fill(Written::Never));
        for sm in &mut self.sms {
            sm.private_tags.fill(None);
            sm.pending.clear();
            sm.owned.clear();
        }
    }
}
