//! Executes a plan with worker threads standing in for SMs: the path for real use.
//!
//! Every thread owns some SMs and runs whatever head task of theirs has its events. Events are counters that only grow.
//! Unlike on a device, a step begins when the last one has ended everywhere: the host decides about tokens in between, so
//! nothing is lost, and a carried event needs no counter. `adversary` executes what this leaves out.

use super::kernel::Isa;
use super::memory::{Access, Cache, CacheColumns, Memory, Place, Region, round_to};
use super::ops::{self, History, Input, Scratch, Step, Streamed};
use super::plan::{Plan, RegimePlan, TaskPlan, Work};
use super::real::Real;
use super::{Blocked, BlockedWait, Engine, InterpError, Logits, Pack, StepResult};
use crate::ir::SmId;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Polls before a thread gives its core away: longer than a hop between two running threads (0.1 to 0.3 µs).
const SPINS: u32 = 256;
/// Polls of a thread that has no step to run before it parks: tens of microseconds, what a host needs between steps.
const SPINS_IDLE: u32 = 4096;
/// A step in which no task of a thread could run for this long has a deadlock: the longest task streams a fraction of a
/// model, at gigabytes per second.
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
    /// Step number, starting at 1; changes when a step begins. The other step fields are valid from then on.
    step: AtomicU64,
    position: AtomicU32,
    /// A token, or `SELECTED`.
    input: AtomicU64,
    /// Steps that the regime of this step has run before.
    epoch: AtomicU64,
    /// Regime of the previous step.
    previous_regime: AtomicUsize,
    finished: AtomicUsize,
    abort: AtomicBool,
    failure: Mutex<Failure>,
}

#[derive(Default)]
struct Failure {
    blocked: Vec<Blocked>,
    panic: Option<String>,
}

const SELECTED: u64 = u64::MAX;

/// The SMs of one thread.
struct Crew<R> {
    sms: Vec<Sm>,
    scratch: Scratch<R>,
}

struct Sm {
    id: SmId,
    private: Vec<u32>,
    cursor: usize,
}

pub struct Threads<R> {
    shared: Arc<Shared>,
    crew: Crew<R>,
    workers: Vec<Worker>,
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
        let caches = plan.caches.iter().map(|c| Cache::new(c.dtype, c.rows, c.cols)).collect();
        let counters =
            plan.regimes.iter().map(|r| r.events.iter().map(|_| Counter(AtomicU64::new(0))).collect()).collect();
        let threads = threads.clamp(1, plan.sms.max(1));
        let shared = Arc::new(Shared {
            memory: Memory::new(plan.exchange_words, plan.output_words, caches),
            counters,
            stall: STALL,
            step: AtomicU64::new(0),
            position: AtomicU32::new(0),
            input: AtomicU64::new(SELECTED),
            epoch: AtomicU64::new(0),
            previous_regime: AtomicUsize::new(0),
            finished: AtomicUsize::new(0),
            abort: AtomicBool::new(false),
            failure: Mutex::default(),
            plan,
            pack,
            isa,
        });
        let crew = |thread: usize| {
            let sms = (thread..shared.plan.sms).step_by(threads);
            let sm = |sm| Sm { id: SmId::from(sm), private: vec![0; shared.plan.private_words], cursor: 0 };
            Crew { sms: sms.map(sm).collect(), scratch: Scratch::new() }
        };
        let workers = (1..threads)
            .map(|thread| {
                let parked = Arc::new(AtomicBool::new(false));
                let (shared, flag, mut crew) = (shared.clone(), parked.clone(), crew(thread));
                Worker { handle: Some(thread::spawn(move || work(&shared, &mut crew, &flag))), parked }
            })
            .collect();
        let epochs = vec![0; shared.plan.regimes.len()];
        Threads { crew: crew(0), shared, workers, epochs, previous_regime: 0, failed: false }
    }

    fn begin(&self, step: u64) {
        // Sequentially consistent against the worker's "parked, then look again": one of the two sees the other.
        self.shared.step.store(step, Ordering::SeqCst);
        for worker in &self.workers {
            if worker.parked.load(Ordering::SeqCst)
                && let Some(handle) = &worker.handle
            {
                handle.thread().unpark();
            }
        }
    }

    fn step(&mut self, position: u32, input: Input) -> Result<u32, InterpError> {
        if self.failed {
            return Err(InterpError::Failed);
        }
        let shared = &*self.shared;
        let regime = shared.plan.regime_at(position);
        let input = match input {
            Input::Token(token) => u64::from(token),
            Input::Selected => SELECTED,
        };
        shared.position.store(position, Ordering::Relaxed);
        shared.input.store(input, Ordering::Relaxed);
        shared.epoch.store(self.epochs[regime], Ordering::Relaxed);
        shared.previous_regime.store(self.previous_regime, Ordering::Relaxed);
        shared.finished.store(0, Ordering::Relaxed);
        self.begin(shared.step.load(Ordering::Relaxed) + 1);
        run_caught(shared, &mut self.crew);
        let mut spins = 0;
        while shared.finished.load(Ordering::Acquire) < self.workers.len() {
            pause(&mut spins);
        }
        if shared.abort.load(Ordering::Acquire) {
            self.failed = true;
            let failure = std::mem::take(&mut *lock(&shared.failure));
            return Err(match failure.panic {
                Some(message) => InterpError::Panic { message },
                None => InterpError::deadlock(&shared.plan, regime, position, failure.blocked),
            });
        }
        self.epochs[regime] += 1;
        self.previous_regime = regime;
        let token = shared.plan.regimes[regime].queues.iter().flatten().find_map(|task| match &task.work {
            Work::Select { token, .. } => Some(token.at(position)),
            _ => None,
        });
        Ok(token.map_or(0, |at| self.crew.sms[0].private[at]))
    }
}

fn pause(spins: &mut u32) {
    *spins += 1;
    if *spins < SPINS {
        std::hint::spin_loop();
    } else {
        thread::yield_now();
    }
}

fn lock(failure: &Mutex<Failure>) -> std::sync::MutexGuard<'_, Failure> {
    failure.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The life of a worker thread.
fn work<R: Real>(shared: &Shared, crew: &mut Crew<R>, parked: &AtomicBool) {
    let mut done = 0;
    loop {
        let mut spins = 0;
        let step = loop {
            let step = shared.step.load(Ordering::Acquire);
            if step != done {
                break step;
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
        };
        if step == QUIT {
            return;
        }
        run_caught(shared, crew);
        done = step;
        shared.finished.fetch_add(1, Ordering::Release);
    }
}

/// A panic in one thread must not leave the others waiting for its signals.
fn run_caught<R: Real>(shared: &Shared, crew: &mut Crew<R>) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run_step(shared, crew))) {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        lock(&shared.failure).panic = Some(text.unwrap_or("no message").to_string());
        shared.abort.store(true, Ordering::Release);
    }
}

fn run_step<R: Real>(shared: &Shared, crew: &mut Crew<R>) {
    let position = shared.position.load(Ordering::Relaxed);
    let regime_index = shared.plan.regime_at(position);
    let regime = &shared.plan.regimes[regime_index];
    let counters = &shared.counters[regime_index];
    let epoch = shared.epoch.load(Ordering::Relaxed);
    let input = match shared.input.load(Ordering::Relaxed) {
        SELECTED => Input::Selected,
        token => Input::Token(token as u32),
    };
    let step = Step {
        plan: &shared.plan,
        pack: (*shared.pack).as_ref(),
        isa: shared.isa,
        position,
        input,
        previous_parts: &shared.plan.regimes[shared.previous_regime.load(Ordering::Relaxed)].parts,
    };
    let Crew { sms, scratch } = crew;
    let mut left: usize = sms.iter().map(|sm| regime.queues[sm.id.index()].len()).sum();
    sms.iter_mut().for_each(|sm| sm.cursor = 0);
    let mut spins = 0;
    let mut idle_since: Option<Instant> = None;
    while left > 0 {
        let mut progress = false;
        for sm in sms.iter_mut() {
            let queue = &regime.queues[sm.id.index()];
            while let Some(task) = queue.get(sm.cursor)
                && ready(task, regime, counters, epoch)
            {
                let mut memory = Direct { memory: &shared.memory, private: &mut sm.private, position };
                ops::run(&task.work, &step, streamed(shared, task, position, step.pack), &mut memory, scratch);
                for event in &task.signals {
                    counters[event.index()].0.fetch_add(1, Ordering::Release);
                }
                sm.cursor += 1;
                left -= 1;
                progress = true;
            }
        }
        if progress {
            spins = 0;
            idle_since = None;
            continue;
        }
        pause(&mut spins);
        if spins % SPINS == 0 {
            let since = *idle_since.get_or_insert_with(Instant::now);
            if shared.abort.load(Ordering::Acquire) || since.elapsed() > shared.stall {
                let blocked = sms.iter().filter_map(|sm| blocked(sm, regime, counters, epoch));
                lock(&shared.failure).blocked.extend(blocked);
                shared.abort.store(true, Ordering::Release);
                return;
            }
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

fn blocked(sm: &Sm, regime: &RegimePlan, counters: &[Counter], epoch: u64) -> Option<Blocked> {
    let task = regime.queues[sm.id.index()].get(sm.cursor)?;
    let waits = task.waits.iter().filter(|w| !regime.events[w.0.index()].event.carried);
    let waits = waits.map(|&(event, needed)| {
        let seen = seen(event.index(), regime, counters, epoch) as u32;
        BlockedWait { event, needed, seen, missing: vec![] }
    });
    let waits = waits.filter(|w| w.seen < w.needed).collect();
    Some(Blocked { sm: sm.id, cursor: sm.cursor, task: task.id, waits })
}

fn streamed<'a>(shared: &'a Shared, task: &TaskPlan, position: u32, pack: &'a [u8]) -> Streamed<'a> {
    match &task.work {
        Work::MatVec(m) => Streamed::Weights(&pack[m.weight.clone()]),
        Work::Attention(a) => {
            let (start, end) = a.op.history_share(position, a.j);
            let (start, end) = (start as usize, end.min(position) as usize);
            let rows = |columns: CacheColumns| {
                // SAFETY: tasks append to row `position` alone (`Direct::append`), `end` is at most that, and the
                // appends of earlier steps happened before this one began.
                unsafe { shared.memory.caches[columns.cache].history(start, end, columns.first, columns.len) }
            };
            let rows_count = end.saturating_sub(start);
            Streamed::History(History { keys: rows(a.keys), values: rows(a.values), rows: rows_count })
        }
        _ => Streamed::Nothing,
    }
}

/// Memory as one SM sees it, without any check: events have ordered the accesses.
pub struct Direct<'a> {
    pub memory: &'a Memory,
    pub private: &'a mut [u32],
    pub position: u32,
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
        let at = region.at(self.position);
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
    fn load(&mut self, region: &Region, out: &mut [f32]) {
        self.words(region, self.position, |i, word| out[i] = f32::from_bits(word));
    }

    fn store(&mut self, region: &Region, values: &[f32]) {
        let dtype = region.dtype;
        self.put(region, values.iter().map(|&v| round_to(dtype, v).to_bits()));
    }

    fn load_words(&mut self, region: &Region, out: &mut [u32]) {
        self.words(region, self.position, |i, word| out[i] = word);
    }

    fn store_words(&mut self, region: &Region, words: &[u32]) {
        self.put(region, words.iter().copied());
    }

    fn load_previous_words(&mut self, region: &Region, out: &mut [u32]) {
        self.words(region, self.position.wrapping_sub(1), |i, word| out[i] = word);
    }

    fn append(&mut self, columns: CacheColumns, values: &[f32]) {
        self.memory.caches[columns.cache].append(self.position as usize, columns.first, values);
    }
}

impl<R: Real> Engine for Threads<R> {
    fn launch(
        &mut self,
        position: u32,
        inputs: &[Input],
        on_step: &mut dyn FnMut(StepResult<'_>) -> ControlFlow<()>,
    ) -> Result<(), InterpError> {
        for (position, &input) in (position..).zip(inputs) {
            let token = self.step(position, input)?;
            let logits = &self.shared.plan.logits;
            let at = logits.at(position);
            let logits = Logits::Words(&self.shared.memory.output[at..at + logits.len]);
            if on_step(StepResult { position, token, logits }).is_break() {
                break;
            }
        }
        Ok(())
    }

    fn selected(&mut self, position: u32) -> Option<u32> {
        let parts = &self.shared.plan.regimes[self.previous_regime].parts;
        let mut memory = Direct { memory: &self.shared.memory, private: &mut [], position };
        ops::best_candidate(&self.shared.plan.candidates, parts, &mut memory)
    }

    fn write_cache(&mut self, cache: usize, row: usize, values: &[f32]) {
        self.shared.memory.caches[cache].append(row, 0, values);
    }

    fn reset(&mut self) {
        self.failed = false;
        self.epochs.fill(0);
        self.shared.abort.store(false, Ordering::Relaxed);
        self.shared.counters.iter().flatten().for_each(|c| c.0.store(0, Ordering::Relaxed));
    }
}

impl<R> Drop for Threads<R> {
    fn drop(&mut self) {
        self.shared.step.store(QUIT, Ordering::SeqCst);
        for worker in &mut self.workers {
            if let Some(handle) = worker.handle.take() {
                handle.thread().unpark();
                // A worker catches its panics; there is nothing to learn from the result.
                drop(handle.join());
            }
        }
    }
}
