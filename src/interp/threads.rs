//! Executes a plan with worker threads standing in for SMs: the path for real use.
//!
//! Every thread has SMs of its own and runs whatever head task of theirs has its events; when none has, it takes a task
//! of another thread's SM. So one running thread is enough to end a step, whatever the operating system does with the
//! others. Events are counters that only grow.
//!
//! Unlike on a device, a step begins when the last one has ended everywhere: the host decides about tokens in between, so
//! nothing is lost, and a carried event needs no counter. `adversary` executes what this leaves out.

use super::kernel::{HistoryRows, Isa, ReadRow};
use super::memory::{Access, Cache, CacheColumns, Memory, Place, Region, StepRow, StepRows, round_to};
use super::ops::{self, History, Scratch, Step, Streamed};
use super::plan::{CacheShape, Plan, RegimePlan, TaskPlan, Work};
use super::real::Real;
use super::{Blocked, BlockedWait, Engine, InterpError, Logits, Pack, StepResult};
use crate::dtype::DType;
use crate::ir::SmId;
use std::ops::{ControlFlow, Range};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Polls before a thread looks for work on SMs that are not its own: longer than a hop between two running threads (0.1
/// to 0.3 µs), so that a thread which has only just signalled keeps its next task, and the cache that goes with it.
const SPINS_OWN: u32 = 64;
/// Polls before a thread yields its core between two looks: if no other thread wants it, and if one does.
const SPINS: u32 = 256;
const SPINS_CROWDED: u32 = 2;
/// A thread that has its core to itself gets it back sooner than this. After a slower yield it assumes for this many yields that it has not.
const YIELD_ALONE: Duration = Duration::from_micros(10);
const YIELDS_CROWDED: u32 = 1000;
/// Polls of a thread that has no step to run before it parks: tens of microseconds, what a host needs between steps.
const SPINS_IDLE: u32 = 4096;
/// A step in which no task could run for this long has a deadlock: the longest task streams a fraction of a model, at
/// gigabytes per second.
const STALL: Duration = Duration::from_secs(30);
const QUIT: u64 = u64::MAX;

/// A counter on a cache line of its own.
#[repr(align(64))]
struct Counter(AtomicU64);

struct Shared {
    plan: Arc<Plan>,
    pack: Pack,
    isa: Isa,
    memory: Memory,
    stall: Duration,
    /// By regime and event: signals since the last reset.
    counters: Vec<Vec<Counter>>,
    sms: Vec<Mutex<Sm>>,
    /// Number of the step that runs; changes when one begins, after `order` did.
    step: AtomicU64,
    order: Mutex<StepOrder>,
    /// SMs whose queue is not done in this step.
    unfinished: AtomicUsize,
    /// Workers that may be executing a task.
    active: AtomicUsize,
    abort: AtomicBool,
    panic: Mutex<Option<String>>,
}

/// What a step is to do.
#[derive(Clone)]
struct StepOrder {
    serial: u64,
    rows: Arc<StepRows>,
    /// Steps that the regime of this step has run before.
    epoch: u64,
    previous_regime: usize,
}

struct Sm {
    private: Vec<u32>,
    /// The last step that a task ran for, and the next task of its queue.
    serial: u64,
    cursor: usize,
}

/// What belongs to one thread.
struct Crew<R> {
    own: Range<usize>,
    scratch: Scratch<R>,
    patience: Patience,
}

pub struct Threads<R> {
    shared: Arc<Shared>,
    crew: Crew<R>,
    workers: Vec<Worker>,
    serial: u64,
    /// By regime: steps run.
    epochs: Vec<u64>,
    previous_regime: usize,
    failed: bool,
}

struct Worker {
    handle: Option<JoinHandle<()>>,
    parked: Arc<AtomicBool>,
}

impl<R: Real> Threads<R> {
    pub fn new(plan: Arc<Plan>, pack: Pack, isa: Isa, threads: usize) -> Threads<R> {
        Self::with_stall(plan, pack, isa, threads, STALL)
    }

    fn with_stall(plan: Arc<Plan>, pack: Pack, isa: Isa, threads: usize, stall: Duration) -> Threads<R> {
        let caches = plan.caches.iter().map(CacheShape::empty).collect();
        let counters =
            plan.regimes.iter().map(|r| r.events.iter().map(|_| Counter(AtomicU64::new(0))).collect()).collect();
        let threads = threads.clamp(1, plan.sms.max(1));
        let sm = |_| Mutex::new(Sm { private: vec![0; plan.private_words], serial: 0, cursor: 0 });
        let rows = Arc::new(StepRows { position: 0, rows: vec![], device: None, at_random: None });
        let order = StepOrder { serial: 0, rows, epoch: 0, previous_regime: 0 };
        let shared = Arc::new(Shared {
            memory: Memory::new(plan.exchange_words, plan.output_words, caches),
            counters,
            sms: (0..plan.sms).map(sm).collect(),
            stall,
            step: AtomicU64::new(0),
            order: Mutex::new(order),
            unfinished: AtomicUsize::new(0),
            active: AtomicUsize::new(0),
            abort: AtomicBool::new(false),
            panic: Mutex::default(),
            plan,
            pack,
            isa,
        });
        let crew = |thread: usize| {
            // Neighbours together: placement spreads few tasks evenly over SM numbers, and so over threads.
            let first = |thread: usize| thread * shared.plan.sms / threads;
            Crew { own: first(thread)..first(thread + 1), scratch: Scratch::new(), patience: Patience::default() }
        };
        let workers = (1..threads)
            .map(|thread| {
                let parked = Arc::new(AtomicBool::new(false));
                let (shared, flag, mut crew) = (shared.clone(), parked.clone(), crew(thread));
                Worker { handle: Some(thread::spawn(move || work(&shared, &mut crew, &flag))), parked }
            })
            .collect();
        let epochs = vec![0; shared.plan.regimes.len()];
        Threads { crew: crew(0), shared, workers, serial: 0, epochs, previous_regime: 0, failed: false }
    }

    /// The token of each row.
    fn step(&mut self, rows: StepRows) -> Result<Vec<u32>, InterpError> {
        if self.failed {
            return Err(InterpError::Failed);
        }
        let (shared, position, count) = (&*self.shared, rows.position, rows.rows.len());
        let regime = shared.plan.regime_at(position);
        self.serial += 1;
        let (serial, epoch) = (self.serial, self.epochs[regime]);
        let order = StepOrder { serial, rows: Arc::new(rows), epoch, previous_regime: self.previous_regime };
        // Tasks of rows that the launch does not have wait for nothing and do nothing: their signals are all given now, and
        // queues go past them.
        let absent = shared.plan.regimes[regime].absent.get(count);
        for &(event, signals) in absent.into_iter().flatten() {
            shared.counters[regime][event.index()].0.fetch_add(u64::from(signals), Ordering::Relaxed);
        }
        // Before the order: a worker that is late for the step before may take this order at once, and counts down.
        shared.unfinished.store(shared.sms.len(), Ordering::Relaxed);
        *lock(&shared.order) = order.clone();
        // Sequentially consistent against the worker's "parked, then look again": one of the two sees the other.
        shared.step.store(serial, Ordering::SeqCst);
        self.workers.iter().filter(|w| w.parked.load(Ordering::SeqCst)).for_each(Worker::wake);
        run_caught(shared, &mut self.crew, &order);
        if shared.abort.load(Ordering::Acquire) {
            self.failed = true;
            let mut patience = Patience::default();
            while shared.active.load(Ordering::Acquire) > 0 {
                patience.pause();
            }
            return Err(match lock(&shared.panic).take() {
                Some(message) => InterpError::Panic { message },
                None => InterpError::deadlock(&shared.plan, regime, position, blocked(shared, &order)),
            });
        }
        self.epochs[regime] += 1;
        self.previous_regime = regime;
        let token = shared.plan.regimes[regime].queues[0].iter().find_map(|task| match &task.work {
            Work::Select { token, .. } => Some(token),
            _ => None,
        });
        let sm = lock(&shared.sms[0]);
        Ok((0..count).map(|row| token.map_or(0, |token| sm.private[token.row(row).at(position)])).collect())
    }
}

impl Worker {
    fn wake(&self) {
        if let Some(handle) = &self.handle {
            handle.thread().unpark();
        }
    }
}

/// How a thread waits.
#[derive(Default)]
struct Patience {
    spins: u32,
    /// Yields that are left for which the thread assumes that others want its core.
    crowded: u32,
}

impl Patience {
    /// Waits a moment. Cores that others want are given away at once: what this thread waits for may be what it keeps from running.
    fn pause(&mut self) {
        self.spins = self.spins.saturating_add(1);
        if self.spins < if self.crowded > 0 { SPINS_CROWDED } else { SPINS } {
            std::hint::spin_loop();
            return;
        }
        let begun = Instant::now();
        thread::yield_now();
        self.crowded = if begun.elapsed() > YIELD_ALONE { YIELDS_CROWDED } else { self.crowded.saturating_sub(1) };
    }
}

/// A panic is reported as such; its results are not used before a reset.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The life of a worker thread.
fn work<R: Real>(shared: &Shared, crew: &mut Crew<R>, parked: &AtomicBool) {
    let mut done = 0;
    let mut spins = 0;
    loop {
        let step = shared.step.load(Ordering::Acquire);
        if step == QUIT {
            return;
        }
        if step != done {
            shared.active.fetch_add(1, Ordering::SeqCst);
            // May be a later step by now; the host cannot begin another before this one has ended.
            let order = lock(&shared.order).clone();
            run_caught(shared, crew, &order);
            shared.active.fetch_sub(1, Ordering::Release);
            done = order.serial;
            spins = 0;
            continue;
        }
        spins += 1;
        if spins < SPINS_IDLE {
            std::hint::spin_loop();
            continue;
        }
        parked.store(true, Ordering::SeqCst);
        if shared.step.load(Ordering::SeqCst) == done {
            thread::park();
        }
        parked.store(false, Ordering::Relaxed);
        spins = 0;
    }
}

/// A panic in one thread must not leave the others waiting for its signals.
fn run_caught<R: Real>(shared: &Shared, crew: &mut Crew<R>, order: &StepOrder) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run_step(shared, crew, order))) {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        *lock(&shared.panic) = Some(text.unwrap_or("no message").to_string());
        shared.abort.store(true, Ordering::Release);
    }
}

/// Returns when the step has ended on all SMs, or was given up.
fn run_step<R: Real>(shared: &Shared, crew: &mut Crew<R>, order: &StepOrder) {
    let regime = shared.plan.regime_at(order.rows.position);
    let run = StepRun {
        shared,
        regime: &shared.plan.regimes[regime],
        counters: &shared.counters[regime],
        order,
        step: Step {
            plan: &shared.plan,
            pack: (*shared.pack).as_ref(),
            isa: shared.isa,
            rows: &order.rows,
            serial: order.serial,
            previous_parts: &shared.plan.regimes[order.previous_regime].parts,
        },
    };
    crew.patience.spins = 0;
    let mut idle_since: Option<Instant> = None;
    loop {
        let mut progress = false;
        for sm in crew.own.clone() {
            while run.task(sm, &mut crew.scratch) {
                progress = true;
            }
        }
        if !progress && (crew.patience.spins >= SPINS_OWN || crew.patience.crowded > 0) {
            let others = (crew.own.end..shared.sms.len()).chain(0..crew.own.start);
            progress = others.into_iter().any(|sm| run.task(sm, &mut crew.scratch));
        }
        let ended = shared.unfinished.load(Ordering::Acquire) == 0;
        if ended || shared.step.load(Ordering::Relaxed) != order.serial || shared.abort.load(Ordering::Relaxed) {
            return;
        }
        if progress {
            crew.patience.spins = 0;
            idle_since = None;
            continue;
        }
        crew.patience.pause();
        if crew.patience.spins >= SPINS && idle_since.get_or_insert_with(Instant::now).elapsed() > shared.stall {
            shared.abort.store(true, Ordering::Release);
            return;
        }
    }
}

/// One step as one thread sees it.
struct StepRun<'a> {
    shared: &'a Shared,
    regime: &'a RegimePlan,
    counters: &'a [Counter],
    order: &'a StepOrder,
    step: Step<'a>,
}

impl StepRun<'_> {
    /// Runs the head task of an SM, if it has its events and no other thread runs it.
    fn task<R: Real>(&self, sm: usize, scratch: &mut Scratch<R>) -> bool {
        let shared = self.shared;
        let mut state = match shared.sms[sm].try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        if state.serial > self.order.serial {
            return false;
        }
        if state.serial < self.order.serial {
            state.serial = self.order.serial;
            self.proceed(&mut state, sm, 0);
        }
        let Some(task) = self.regime.queues[sm].get(state.cursor) else { return false };
        if !ready(task, self.regime, self.counters, self.order.epoch) {
            return false;
        }
        let rows = &self.order.rows;
        let mut memory = Direct { memory: &shared.memory, private: &mut state.private, rows };
        let paged = paged(shared, task, rows);
        let mut gathered = std::mem::take(&mut scratch.gathered);
        let stream = streamed(shared, task, rows, self.step.pack, paged.as_ref(), &mut gathered);
        ops::run(task, &self.step, stream, &mut memory, scratch);
        scratch.gathered = gathered;
        for event in &task.signals {
            self.counters[event.index()].0.fetch_add(1, Ordering::Release);
        }
        let next = state.cursor + 1;
        self.proceed(&mut state, sm, next);
        true
    }

    /// Moves an SM to place `cursor` of its queue, or the next that has a task of this launch.
    fn proceed(&self, state: &mut Sm, sm: usize, cursor: usize) {
        let rows = self.order.rows.rows.len();
        let queue = &self.regime.queues[sm];
        state.cursor = cursor + queue[cursor..].iter().take_while(|task| task.is_absent(rows)).count();
        if state.cursor == queue.len() {
            self.shared.unfinished.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// Signals that an event has in this step. Every step of a regime adds the same number to a counter.
fn seen(event: usize, regime: &RegimePlan, counters: &[Counter], epoch: u64) -> u64 {
    counters[event].0.load(Ordering::Acquire).saturating_sub(epoch * u64::from(regime.events[event].signals))
}

fn ready(task: &TaskPlan, regime: &RegimePlan, counters: &[Counter], epoch: u64) -> bool {
    task.waits.iter().all(|&(event, count)| {
        let event = event.index();
        // What a carried event waits for ended with the previous step.
        regime.events[event].event.carried || seen(event, regime, counters, epoch) >= u64::from(count)
    })
}

/// The head task of every SM that is not done, with the waits that are not over.
fn blocked(shared: &Shared, order: &StepOrder) -> Vec<Blocked> {
    let index = shared.plan.regime_at(order.rows.position);
    let (regime, counters) = (&shared.plan.regimes[index], &shared.counters[index]);
    let head = |(sm, queue): (usize, &Vec<TaskPlan>)| {
        let state = lock(&shared.sms[sm]);
        let cursor = if state.serial == order.serial { state.cursor } else { 0 };
        let task = queue.get(cursor)?;
        let waits = task.waits.iter().filter(|w| !regime.events[w.0.index()].event.carried);
        let waits = waits.map(|&(event, needed)| {
            let seen = seen(event.index(), regime, counters, order.epoch) as u32;
            BlockedWait { event, needed, seen, missing: vec![] }
        });
        Some(Blocked {
            sm: SmId::from(sm),
            cursor,
            task: task.id,
            waits: waits.filter(|w| w.seen < w.needed).collect(),
        })
    };
    regime.queues.iter().enumerate().filter_map(head).collect()
}

/// The history of a row wherever its pages lie.
struct PagedRows<'a> {
    cache: &'a Cache,
    columns: CacheColumns,
    row: &'a StepRow,
    /// First position.
    start: usize,
}

impl ReadRow for PagedRows<'_> {
    fn read_rows(&self, i: usize, dim: usize, mut out: &mut [f32]) {
        let CacheColumns { first, len, .. } = self.columns;
        let mut position = self.start + i;
        while !out.is_empty() {
            // As far as the page goes.
            let count = self.row.rows_together(position).min(out.len() / dim);
            let (rows, rest) = out.split_at_mut(count * dim);
            let row = self.row.cache_row(position);
            // SAFETY: tasks append to the rows of the step alone; the guard of the tables has established that no other sequence
            // reads the pages that they lie in, and a history ends at the first position that its sequence has in the step.
            unsafe { self.cache.history(row, row + count, first, len) }.read(0, dim, rows);
            (position, out) = (position + count, rest);
        }
    }
}

/// Keys and values of a task's history, where they lie in pages.
fn paged<'a>(shared: &'a Shared, task: &TaskPlan, rows: &'a StepRows) -> Option<[PagedRows<'a>; 2]> {
    let Work::Attention(a) = &task.work else { return None };
    let row = rows.rows.get(task.row.unwrap_or(0)).filter(|row| row.pages.is_some())?;
    let start = a.op.history_share(row.position, row.past(), a.j).0 as usize;
    let of = |columns: CacheColumns| PagedRows { cache: &shared.memory.caches[columns.cache], columns, row, start };
    Some([of(a.keys), of(a.values)])
}

fn streamed<'a>(
    shared: &'a Shared,
    task: &TaskPlan,
    rows: &StepRows,
    pack: &'a [u8],
    paged: Option<&'a [PagedRows<'a>; 2]>,
    gathered: &'a mut Vec<u8>,
) -> Streamed<'a> {
    match &task.work {
        Work::MatVec(m) => {
            let Some(chosen) = &m.chosen else { return Streamed::Weights(&pack[m.weight.clone()]) };
            let memory = &mut Direct { memory: &shared.memory, private: &mut [], rows };
            if let Some(dealt) = m.dealt(rows.rows.len(), memory) {
                let bytes = |part| &pack[chosen.bytes_of(m.weight.start, part)];
                if let [part] = dealt.as_slice() {
                    return Streamed::Weights(bytes(part));
                }
                gathered.clear();
                dealt.iter().for_each(|part| gathered.extend_from_slice(bytes(part)));
                return Streamed::Weights(gathered);
            }
            let parts = chosen.parts(memory);
            if let [part] = parts.as_slice() {
                let part = part * chosen.unit_bytes;
                return Streamed::Weights(&pack[m.weight.start + part..m.weight.end + part]);
            }
            gathered.clear();
            let pieces = chosen.pieces(m.weight.start, 0..m.streamed_bytes(None), &parts);
            pieces.for_each(|piece| gathered.extend_from_slice(&pack[piece]));
            Streamed::Weights(gathered)
        }
        Work::Attention(a) => {
            let Some(row) = rows.rows.get(task.row.unwrap_or(0)) else { return Streamed::Nothing };
            let (start, end) = a.op.history_share(row.position, row.past(), a.j);
            let (start, end) = (start as usize, end as usize);
            let rows = end.saturating_sub(start);
            if let Some([keys, values]) = paged {
                let (keys, values) = (HistoryRows::Paged(keys), HistoryRows::Paged(values));
                return Streamed::History(History { keys, values, rows });
            }
            let of = |columns: CacheColumns| {
                // SAFETY: tasks append to row `position` alone (`Direct::append`), `end` is at most that (`past`), and the
                // appends of earlier steps happened before this one began.
                unsafe { shared.memory.caches[columns.cache].history(start, end, columns.first, columns.len) }
            };
            Streamed::History(History { keys: of(a.keys), values: of(a.values), rows })
        }
        _ => Streamed::Nothing,
    }
}

/// Memory as one SM sees it, without any check: events have ordered the accesses.
pub struct Direct<'a> {
    pub memory: &'a Memory,
    pub private: &'a mut [u32],
    pub rows: &'a StepRows,
}

impl Direct<'_> {
    fn words(&self, region: &Region, position: u32, mut each: impl FnMut(usize, u32)) {
        let at = region.at(position);
        match region.place {
            Place::Private => self.private[at..at + region.len].iter().enumerate().for_each(|(i, w)| each(i, *w)),
            Place::Exchange | Place::Output => {
                let arena = if region.place == Place::Exchange { &self.memory.exchange } else { &self.memory.output };
                let words = arena[at..at + region.len].iter().enumerate();
                words.for_each(|(i, w)| each(i, w.load(Ordering::Relaxed)));
            }
        }
    }

    fn put(&mut self, region: &Region, words: impl Iterator<Item = u32>) {
        let at = region.at(self.rows.position);
        match region.place {
            Place::Private => self.private[at..at + region.len].iter_mut().zip(words).for_each(|(o, w)| *o = w),
            Place::Exchange | Place::Output => {
                let arena = if region.place == Place::Exchange { &self.memory.exchange } else { &self.memory.output };
                arena[at..at + region.len].iter().zip(words).for_each(|(o, w)| o.store(w, Ordering::Relaxed));
            }
        }
    }
}

impl Access for Direct<'_> {
    fn trusted(&self) -> bool {
        true
    }

    fn load(&mut self, region: &Region, out: &mut [f32]) {
        self.words(region, self.rows.position, |i, word| out[i] = f32::from_bits(word));
    }

    fn store(&mut self, region: &Region, values: &[f32]) {
        let dtype = region.dtype;
        match self.rows.at_random.filter(|_| dtype == DType::Bf16) {
            None => self.put(region, values.iter().map(|&v| round_to(dtype, v).to_bits())),
            Some(at_random) => {
                let place = (region.buffer.index() as u64) << 32 | region.offset as u64;
                let rounded = at_random.round(self.rows.position, place, values.iter().copied());
                self.put(region, rounded.map(f32::to_bits));
            }
        }
    }

    fn load_words(&mut self, region: &Region, out: &mut [u32]) {
        self.words(region, self.rows.position, |i, word| out[i] = word);
    }

    fn store_words(&mut self, region: &Region, words: &[u32]) {
        self.put(region, words.iter().copied());
    }

    fn load_previous_words(&mut self, region: &Region, out: &mut [u32]) {
        self.words(region, self.rows.position.wrapping_sub(1), |i, word| out[i] = word);
    }

    fn load_state(&mut self, region: &Region, _: u32, out: &mut [f32]) {
        self.words(region, 0, |i, word| out[i] = f32::from_bits(word));
    }

    fn store_state(&mut self, region: &Region, _: u32, values: &[f32]) {
        self.put(region, values.iter().map(|value| value.to_bits()));
    }

    fn append(&mut self, row: usize, columns: CacheColumns, values: &[f32]) {
        let row = &self.rows.rows[row];
        self.memory.caches[columns.cache].append(row.cache_row(row.position as usize), columns.first, values);
    }
}

impl<R: Real> Engine for Threads<R> {
    fn launch(
        &mut self,
        steps: Vec<StepRows>,
        on_step: &mut dyn FnMut(StepResult<'_>) -> ControlFlow<()>,
    ) -> Result<(), InterpError> {
        for step in steps {
            let of_step = step.position;
            let rows: Vec<(u32, bool)> = step.rows.iter().map(|row| (row.position, row.wants_logits)).collect();
            let tokens = self.step(step)?;
            for (row, (&(position, wants_logits), token)) in rows.iter().zip(tokens).enumerate() {
                let logits = self.shared.plan.logits.row(row);
                let at = logits.at(of_step);
                let len = if wants_logits { logits.len } else { 0 };
                let logits = Logits::Words(&self.shared.memory.output[at..at + len]);
                if on_step(StepResult { row, position, token, logits }).is_break() {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn runs_ahead(&self) -> bool {
        false
    }

    fn selected(&mut self, position: u32, row: usize) -> Option<u32> {
        let parts = &self.shared.plan.regimes[self.previous_regime].parts;
        let rows = &StepRows { position, rows: vec![], device: None, at_random: None };
        let mut memory = Direct { memory: &self.shared.memory, private: &mut [], rows };
        ops::decided(&self.shared.plan.best.row(row), parts, &mut memory)
    }

    fn exchanged(&self, at: usize, len: usize) -> Vec<f32> {
        self.shared.memory.exchanged(at, len)
    }

    fn write_cache(&mut self, cache: usize, row: usize, values: &[f32]) {
        self.shared.memory.caches[cache].append(row, 0, values);
    }

    fn write_state(&mut self, sm: usize, region: &Region, _: u32, values: &[f32]) {
        let mut sm = lock(&self.shared.sms[sm]);
        let words = &mut sm.private[region.at(0)..][..region.len];
        words.iter_mut().zip(values).for_each(|(word, value)| *word = value.to_bits());
    }

    fn read_state(&self, sm: usize, region: &Region) -> Vec<f32> {
        lock(&self.shared.sms[sm]).private[region.at(0)..][..region.len]
            .iter()
            .map(|word| f32::from_bits(*word))
            .collect()
    }

    fn copy_state(&mut self, (sm, from): (usize, &Region), (to_sm, to): (usize, &Region)) {
        let values = lock(&self.shared.sms[sm]).private[from.at(0)..][..from.len].to_vec();
        lock(&self.shared.sms[to_sm]).private[to.at(0)..][..to.len].copy_from_slice(&values);
    }

    fn read_cache(&self, cache: usize, row: usize) -> Vec<u8> {
        let (cache, mut bytes) = (&self.shared.memory.caches[cache], vec![]);
        // SAFETY: no step runs while the engine is borrowed, and what steps appended happened before they ended.
        unsafe { cache.copy_rows(row..row + 1, 0, cache.cols(), &mut bytes) };
        bytes
    }

    fn reset(&mut self) {
        if self.failed {
            // A step that was given up left SMs in the middle of their queues, and perhaps a worker about to go on there.
            let (plan, pack) = (self.shared.plan.clone(), self.shared.pack.clone());
            *self = Threads::with_stall(plan, pack, self.shared.isa, self.workers.len() + 1, self.shared.stall);
            return;
        }
        self.epochs.fill(0);
        self.shared.counters.iter().flatten().for_each(|c| c.0.store(0, Ordering::Relaxed));
    }
}

impl<R> Drop for Threads<R> {
    fn drop(&mut self) {
        self.shared.step.store(QUIT, Ordering::SeqCst);
        for worker in &mut self.workers {
            worker.wake();
            if let Some(handle) = worker.handle.take() {
                // A worker catches its panics; there is nothing to learn from the result.
                drop(handle.join());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::candidate::Candidate;
    use crate::dtype::{DType, Precision};
    use crate::interp::ops::Input;
    use crate::ir::schedule::Schedule;
    use crate::lower::lower;
    use crate::model::config::import;
    use crate::schedule::schedule;
    use crate::target::Target;
    use std::path::Path;

    const STALL: Duration = Duration::from_millis(50);

    fn place() -> (Schedule, Pack) {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families/llama-gqa");
        let imported = import(&model).unwrap();
        let target = Target::builtin("h200").unwrap();
        let precision = Precision { weights: DType::F32, cache: DType::F32, wire: DType::F32 };
        let candidate = Candidate { sms: 4, splits: 1, ..Candidate::default_for(&imported.graph, &target, precision) };
        let schedule = schedule(lower(&imported.graph, "t", precision, 32, &candidate).unwrap(), &target, &candidate);
        let schedule = schedule.unwrap();
        let pack = crate::pack::pack(&schedule, &imported.graph, &imported.weights).unwrap();
        (schedule, Arc::new(pack))
    }

    fn threads(schedule: &Schedule, pack: &Pack, count: usize, change: impl Fn(&mut Plan)) -> Threads<f32> {
        let mut plan = Plan::new(schedule, (**pack).as_ref()).unwrap();
        change(&mut plan);
        Threads::with_stall(Arc::new(plan), pack.clone(), Isa::detect(), count, STALL)
    }

    fn one(position: u32, token: u32) -> StepRows {
        let input = Input::Token(token);
        StepRows {
            position,
            rows: vec![StepRow {
                position,
                input,
                before: 0,
                wants_logits: true,
                sequence: 0,
                pages: None,
                given: None,
            }],
            device: None,
            at_random: None,
        }
    }

    fn is_matvec(task: &TaskPlan) -> bool {
        matches!(task.work, Work::MatVec(_))
    }

    #[test]
    fn a_deadlock_ends_after_the_stall_and_a_reset_starts_over() {
        let (schedule, pack) = place();
        // Every SM's first two matvecs change places: o waits for attention, attention for qkv.
        let swap = |plan: &mut Plan| {
            for queue in &mut plan.regimes[0].queues {
                let first = queue.iter().position(is_matvec).unwrap();
                let second = first + 1 + queue[first + 1..].iter().position(is_matvec).unwrap();
                queue.swap(first, second);
            }
        };
        for count in [1, 3] {
            let mut engine = threads(&schedule, &pack, count, swap);
            for _ in 0..2 {
                let InterpError::Deadlock { position, blocked } = engine.step(one(0, 1)).unwrap_err() else {
                    panic!("expected a deadlock");
                };
                assert_eq!((position, blocked.len()), (0, 4));
                let waits: Vec<_> = blocked.iter().flat_map(|b| &b.waits).collect();
                assert!(
                    !waits.is_empty() && waits.iter().all(|w| w.seen < w.needed && !w.missing.is_empty()),
                    "{waits:?}"
                );
                assert_eq!(engine.step(one(0, 1)), Err(InterpError::Failed));
                engine.reset();
            }
        }
    }

    #[test]
    fn a_panic_in_a_worker_is_an_error_of_the_step() {
        let (schedule, pack) = place();
        let mut engine = threads(&schedule, &pack, 2, |plan| {
            for task in plan.regimes[0].queues[3].iter_mut() {
                if let Work::MatVec(m) = &mut task.work
                    && let Some(out) = &mut m.out
                {
                    out.offset = usize::MAX / 2;
                }
            }
        });
        let error = engine.step(one(0, 1)).unwrap_err();
        assert!(matches!(&error, InterpError::Panic { message } if message.contains("out of range")), "{error}");
    }

    #[test]
    fn workers_that_slept_take_part_again() {
        let (schedule, pack) = place();
        let mut engine = threads(&schedule, &pack, 3, |_| ());
        for position in 0..3 {
            engine.step(one(position, position)).unwrap();
            let begin = Instant::now();
            while !engine.workers.iter().all(|w| w.parked.load(Ordering::SeqCst)) {
                assert!(begin.elapsed() < Duration::from_secs(60), "an idle worker does not park");
                thread::yield_now();
            }
        }
    }
}
