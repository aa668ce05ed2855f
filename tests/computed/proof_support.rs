//! Owns small model graphs, targets and candidates that the tests of the proof lower for real.

use monobloc::candidate::{Candidate, WaveKnobs};
use monobloc::dtype::{DType, Precision};
use monobloc::format::Format;
use monobloc::ir::layout::{cache_row_bytes, chunk_rows};
use monobloc::ir::op::{Access, Epilogue, MatVec, Op, Role};
use monobloc::ir::program::{Buffer, Cols, Content, Grid, Home, Operand, Part, Rows, Second, Space};
use monobloc::ir::schedule::{Event, Mechanism, Run, Schedule, Scope, SmemKind, Source, Task, Wait};
use monobloc::ir::variant::{MatVecVariant, Variant};
use monobloc::ir::{BufferId, EventId, GridId, TaskId};
use monobloc::lower::{Batch, lower, lower_batch};
use monobloc::model::graph::{
    Act, Attention, ClampedSwiglu, ExpertGroups, Experts, FeedForward, Layer, Linear, Mixer, Mlp, ModelGraph, Norm,
    NormKind, QkNorm, QkNormSpan, Rope, RopeId, Router, RowView, Score, SharedExpert, Tensor, TensorId,
};
use monobloc::schedule::schedule;
use monobloc::target::{CopyMechanism, DotMechanism, Spec, Target, TargetKind};
use monobloc::validate::{Rule, Violation, check};

/// A decoder with a field for every variation that lowering supports.
#[derive(Clone, Copy, Debug)]
pub struct Toy {
    pub layers: u32,
    pub hidden: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub dim: u32,
    pub intermediate: u32,
    pub vocab: u32,
    pub context: u32,
    pub gated: bool,
    pub bias: bool,
    pub parallel: bool,
    pub post_norms: bool,
    pub qk_norm: Option<QkNormSpan>,
    pub window: Option<u32>,
    pub rope: bool,
    pub precision: Precision,
    /// Format of all matrices and the head, without routers; `None`: values.
    pub format: Option<Format>,
    /// Experts of every layer, each of the shape that the MLP has without them.
    pub mixture: Option<Mixture>,
}

/// Experts with a field for every variation that lowering supports.
#[derive(Clone, Copy, Debug)]
pub struct Mixture {
    pub experts: u32,
    pub top_k: u32,
    pub score: Score,
    pub corrected: bool,
    pub groups: Option<ExpertGroups>,
    /// `Some(gated)`
    pub shared: Option<bool>,
    pub swiglu: Option<ClampedSwiglu>,
}

pub const MIXTURE: Mixture =
    Mixture { experts: 4, top_k: 2, score: Score::Softmax, corrected: false, groups: None, shared: None, swiglu: None };

pub const FP32: Precision = Precision { weights: DType::F32, cache: DType::F32, wire: DType::F32 };
pub const BF16: Precision = Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 };

pub const TOY: Toy = Toy {
    layers: 2,
    hidden: 64,
    heads: 4,
    kv_heads: 2,
    dim: 16,
    intermediate: 96,
    vocab: 200,
    context: 64,
    gated: true,
    bias: false,
    parallel: false,
    post_norms: false,
    qk_norm: None,
    window: None,
    rope: true,
    precision: BF16,
    format: None,
    mixture: None,
};

struct Tensors(Vec<Tensor>);

impl Tensors {
    fn add(&mut self, shape: &[u32]) -> TensorId {
        self.0.push(Tensor { name: format!("t{}", self.0.len()), dtype: DType::F32, shape: shape.to_vec() });
        TensorId::from(self.0.len() - 1)
    }

    fn linear(&mut self, rows: u32, cols: u32, bias: bool) -> Linear {
        let weight = RowView::range(self.add(&[rows, cols]), 0);
        Linear { weight, bias: bias.then(|| RowView::range(self.add(&[rows]), 0)), rows, cols }
    }

    fn norm(&mut self, kind: NormKind, width: u32) -> Norm {
        let bias = (kind == NormKind::Layer).then(|| self.add(&[width]));
        Norm { kind, eps: 1e-5, weight: Some(self.add(&[width])), weight_offset: 0.0, bias }
    }
}

impl Toy {
    pub fn graph(&self) -> ModelGraph {
        let mut t = Tensors(vec![]);
        let (hidden, q_rows, kv_rows) = (self.hidden, self.heads * self.dim, self.kv_heads * self.dim);
        // A parallel block is GPT-NeoX's, which has LayerNorm.
        let kind = if self.parallel { NormKind::Layer } else { NormKind::Rms };
        let embed = t.add(&[self.vocab, hidden]);
        let mut layers = vec![];
        for _ in 0..self.layers {
            let qk = |t: &mut Tensors, rows: u32| {
                self.qk_norm.map(|span| QkNorm {
                    kind: if span == QkNormSpan::OwnGains { NormKind::Layer } else { NormKind::Rms },
                    eps: 1e-5,
                    weights: vec![t.add(&[span.gains(rows / self.dim, self.dim)])],
                    weight_offset: 0.0,
                    span,
                })
            };
            let attn = Attention {
                heads: self.heads,
                kv_heads: self.kv_heads,
                head_dim: self.dim,
                q: t.linear(q_rows, hidden, self.bias),
                k: t.linear(kv_rows, hidden, self.bias),
                v: t.linear(kv_rows, hidden, self.bias),
                o: t.linear(hidden, q_rows, self.bias),
                q_norm: qk(&mut t, q_rows),
                k_norm: qk(&mut t, kv_rows),
                rope: self.rope.then_some(RopeId(0)),
                scale: 0.25,
                softcap: None,
                window: self.window,
                cache_scales: None,
                sinks: None,
                gate: None,
                query_scale: None,
                norm_after_rope: false,
            };
            let feed = self.feed(&mut t);
            let attn_norm = Some(t.norm(kind, hidden));
            let mlp_norm = Some(t.norm(kind, hidden));
            let attn_post_norm = self.post_norms.then(|| t.norm(kind, hidden));
            let mlp_post_norm = self.post_norms.then(|| t.norm(kind, hidden));
            let parallel = self.parallel;
            layers.push(Layer {
                attn_norm,
                mixer: Mixer::Attention(attn),
                attn_post_norm,
                mlp_norm,
                feed,
                mlp_post_norm,
                parallel,
                residual_scale: 1.0,
            });
        }
        let final_norm = t.norm(kind, hidden);
        let head = t.linear(self.vocab, hidden, false);
        let inv_freq = vec![1.0; self.dim as usize / 2];
        let routers: Vec<TensorId> =
            layers.iter().flat_map(|layer| layer.feed.choosing()).map(|linear| linear.weight.tensor).collect();
        let linears = layers.iter().flat_map(Layer::linears);
        let matrices: Vec<TensorId> =
            linears.chain([&head]).map(|linear| linear.weight.tensor).filter(|id| !routers.contains(id)).collect();
        let formats = matrices.into_iter().filter_map(|id| Some((id, self.format?))).collect();
        ModelGraph {
            family: "Toy".to_string(),
            hidden,
            vocab: self.vocab,
            positions_max: self.context,
            tensors: t.0,
            formats,
            embed,
            embed_scale: 1.0,
            joined: None,
            ropes: if self.rope { vec![Rope { inv_freq, scale: 1.0, interleaved: false }] } else { vec![] },
            layers,
            final_norm,
            head,
            logits_scale: 1.0,
            logits_softcap: None,
            eos: vec![],
            bos: None,
        }
    }

    fn feed(&self, t: &mut Tensors) -> FeedForward {
        let (hidden, width, bias) = (self.hidden, self.intermediate, self.bias);
        let swiglu = self.mixture.and_then(|mixture| mixture.swiglu).filter(|_| self.gated);
        let mlp = |t: &mut Tensors, swiglu| Mlp {
            act: Act::Silu,
            gate: self.gated.then(|| t.linear(width, hidden, bias)),
            up: t.linear(width, hidden, bias),
            down: t.linear(hidden, width, bias),
            swiglu,
        };
        let Some(mixture) = self.mixture else { return FeedForward::Dense(mlp(t, None)) };
        let Mixture { experts, top_k, score, corrected, groups, shared, .. } = mixture;
        let router = Router {
            linear: t.linear(experts, hidden, bias),
            top_k,
            score,
            correction: corrected.then(|| t.add(&[experts])),
            groups,
            normalise: Some(0.0),
            scale: 1.0,
        };
        let experts = (0..experts).map(|_| mlp(t, swiglu)).collect();
        let shared = shared.map(|gated| {
            let gate = gated.then(|| t.linear(1, hidden, false));
            SharedExpert { mlp: mlp(t, None), gate, scale: 1.0 }
        });
        FeedForward::Experts(Box::new(Experts { router, experts, shared }))
    }

    pub fn schedule(&self, target: &Target, candidate: &Candidate) -> Schedule {
        let program = lower(&self.graph(), "toy", self.precision, self.context, candidate).expect("the toy lowers");
        schedule(program, target, candidate).expect("the toy fits")
    }
}

pub fn cpu() -> Target {
    Target {
        name: "cpu".to_string(),
        kind: TargetKind::Cpu,
        devices: 1,
        spec: Spec {
            source: "test".to_string(),
            arch: String::new(),
            device_names: vec![],
            sm_count: 16,
            smem_bytes_per_block_max: 262_144,
            registers_per_sm: 65_536,
            threads_per_block_max: 1024,
            l2_bytes: 0,
            memory_bytes: 16_000_000_000,
            memory_bytes_per_s: 2e10,
            copy: CopyMechanism::Plain,
            dot: DotMechanism::Fma,
            cluster_max: 1,
            register_reallocation: false,
            warpgroup_mma: false,
            fp8_cvt: false,
        },
    }
}

pub fn h200() -> Target {
    Target {
        name: "h200".to_string(),
        kind: TargetKind::Cuda,
        devices: 1,
        spec: Spec {
            arch: "sm_90a".to_string(),
            sm_count: 132,
            smem_bytes_per_block_max: 232_448,
            l2_bytes: 62_914_560,
            memory_bytes: 141_000_000_000,
            memory_bytes_per_s: 4.8e12,
            copy: CopyMechanism::Bulk,
            dot: DotMechanism::Mma,
            cluster_max: 8,
            register_reallocation: true,
            warpgroup_mma: true,
            fp8_cvt: true,
            ..cpu().spec
        },
    }
}

/// The H200 without the limits of today's kernels: all of the language, with bulk copies.
pub fn beyond_kernels() -> Target {
    Target { kind: TargetKind::Cpu, ..h200() }
}

/// Counters and one warp an SM, as the interpreter runs it.
pub fn on_cpu(sms: u32) -> Candidate {
    Candidate {
        sms,
        consumer_warps: 1,
        ring_slots: 4,
        slot_bytes: 4096,
        flight_high: 4,
        flight_low: 2,
        flight_free: 2,
        heads_per_task: 1,
        splits: 1,
        split_from: 32,
        mechanism: Mechanism::Counter,
        light_eighth: 0,
        light_percent: 5,
        sum_units: 8,
        poll_pairs: 8,
        hold_qkv: 0,
        hold_o: 0,
        hold_up: 0,
        hold_down: 0,
        hold_head: 0,
        attention_team: 1,
        attention_ahead: 1,
        unit_rows: 8,
        sums_everywhere: 0,
        waves: WaveKnobs::default(),
    }
}

/// Packets, sixteen warps in two groups, and split attention from position 32 on.
pub fn on_h200(sms: u32) -> Candidate {
    Candidate { consumer_warps: 16, slot_bytes: 16_384, splits: 2, mechanism: Mechanism::Packets, ..on_cpu(sms) }
}

/// The toy on 4 SMs of an H200: two regimes, packets.
pub fn toy() -> (Schedule, Target) {
    (TOY.schedule(&h200(), &on_h200(4)), h200())
}

/// The rules that a schedule breaks, in order of first appearance.
pub fn rules(schedule: &Schedule, target: &Target) -> Vec<Rule> {
    let mut rules = vec![];
    for violation in check(schedule, target) {
        if !rules.contains(&violation.rule) {
            rules.push(violation.rule);
        }
    }
    rules
}

pub fn listed(violations: &[Violation]) -> String {
    violations.iter().map(|v| format!("{v}\n")).collect()
}

pub fn buffer(schedule: &Schedule, name: &str) -> BufferId {
    BufferId::from(schedule.program.buffers.iter().position(|b| b.name == name).expect("the name"))
}

pub fn grid(schedule: &Schedule, name: &str) -> GridId {
    GridId::from(schedule.program.grids.iter().position(|g| g.name == name).expect("the name"))
}

pub fn operand<'a>(schedule: &'a mut Schedule, grid_name: &str, role: Role) -> &'a mut Operand {
    let id = grid(schedule, grid_name);
    let operands = &mut schedule.program.grids[id.index()].operands;
    operands.iter_mut().find(|o| o.role == role).expect("the operand")
}

/// The `nth` task of a grid in a regime.
pub fn task(schedule: &Schedule, regime: usize, grid_name: &str, nth: usize) -> TaskId {
    let id = grid(schedule, grid_name);
    let tasks = schedule.regimes[regime].tasks.iter().enumerate().filter(|(_, t)| t.grid == id);
    TaskId::from(tasks.map(|(t, _)| t).nth(nth).expect("the task"))
}

/// The event of a regime about exactly these columns.
pub fn event(schedule: &Schedule, regime: usize, buffer_name: &str, lo: u32, hi: u32) -> EventId {
    let id = buffer(schedule, buffer_name);
    let mut events = schedule.regimes[regime].events.iter();
    EventId::from(events.position(|e| (e.buffer, e.lo, e.hi) == (id, lo, hi)).expect("the event"))
}

/// Swaps two tasks of a regime wherever queues hold them.
pub fn swap_queued(schedule: &mut Schedule, regime: usize, a: TaskId, b: TaskId) {
    for id in schedule.regimes[regime].queues.iter_mut().flatten() {
        *id = match *id {
            id if id == a => b,
            id if id == b => a,
            id => id,
        };
    }
}

/// Lists the runs of every queue anew, in its order.
pub fn restream(schedule: &mut Schedule) {
    for regime in &mut schedule.regimes {
        let runs: Vec<Run> = regime.streams.iter().flatten().copied().collect();
        for (stream, queue) in regime.streams.iter_mut().zip(&regime.queues) {
            *stream = queue.iter().filter_map(|id| runs.iter().find(|run| run.task == *id).copied()).collect();
        }
    }
}

/// Adds to the toy a grid `extra`, one task in each regime, that multiplies the last 16 columns of `x.0` by weights of
/// its own into a buffer `y` without a reader. It is put after `after` (else last) in the queue of the SM given for
/// each regime.
pub fn add_extra(schedule: &mut Schedule, after: &str, sms: [usize; 2]) {
    let x = buffer(schedule, "x.0");
    let program = &mut schedule.program;
    let hi = program.buffers[x.index()].cols;
    let lo = hi - 16;
    let weight = BufferId::from(program.buffers.len());
    let view = RowView::range(TensorId(0), 0);
    program.buffers.push(Buffer {
        name: "extra.weight".to_string(),
        space: Space::Weight,
        dtype: DType::Bf16,
        coded: None,
        rows: 8,
        cols: 16,
        phases: 1,
        words: false,
        paging: None,
        home: Home::Device(0),
        content: Some(Content::Rows { parts: vec![Part { view, rows: 8 }], interleave: 1 }),
    });
    let y = BufferId::from(program.buffers.len());
    program.buffers.push(Buffer {
        name: "y".to_string(),
        space: Space::Exchange,
        dtype: DType::Bf16,
        coded: None,
        rows: 1,
        cols: 8,
        phases: 1,
        words: false,
        paging: None,
        home: Home::Device(0),
        content: None,
    });
    schedule.placement.extend([Some(1 << 20), Some(1 << 20)]);
    let op = |role, access, buffer, rows, cols| Operand { role, access, buffer, rows, cols };
    let extra = GridId::from(program.grids.len());
    // One unit of 16 of k: a granule, by itself or in a slot of many.
    let chunk = schedule.machine.ring.slot_bytes / 512;
    let alone = MatVecVariant {
        units: 1,
        chunk,
        block: 1,
        units_per_warp: 1,
        poll_batch: 1,
        granule: 512,
        pass: 0,
        shared: false,
    };
    schedule.variants.insert(extra, Variant::MatVec(alone));
    program.grids.push(Grid {
        name: "extra".to_string(),
        site: None,
        op: Op::MatVec(MatVec {
            rows: 8,
            k: 16,
            slots: 1,
            norm: None,
            own_input: false,
            epilogue: Epilogue::Store,
            unit_rows: 8,
        }),
        n: 1,
        second: Second::Axis(1),
        per_row: false,
        operands: vec![
            op(Role::X, Access::Read, x, Rows::One, Cols { base: lo, limit: hi, ..Cols::all(16) }),
            op(Role::Weight, Access::Stream, weight, Rows::Units, Cols::blocks(1, 1)),
            op(Role::Out, Access::Write, y, Rows::One, Cols::blocks(8, 8)),
        ],
    });
    for (r, sm) in sms.into_iter().enumerate().take(schedule.regimes.len()) {
        let event = EventId::from(schedule.regimes[r].events.len());
        let embed = grid(schedule, "embed");
        let after = grid(schedule, after);
        let regime = &mut schedule.regimes[r];
        let mut count = 0;
        // Units of 8 columns.
        for task in regime.tasks.iter_mut().filter(|t| t.grid == embed && t.lo * 8 < hi && t.hi * 8 > lo) {
            task.signals.push(event);
            count += 1;
        }
        let mechanism = Mechanism::Packets;
        regime.events.push(Event {
            buffer: x,
            row: None,
            lo,
            hi,
            count,
            mechanism,
            scope: Scope::Device,
            carried: false,
            proxy: false,
        });
        let id = TaskId::from(regime.tasks.len());
        let waits = vec![Wait { event, count }];
        regime.tasks.push(Task { grid: extra, lo: 0, hi: 1, j: 0, row: 0, waits, signals: vec![] });
        let queue = &mut regime.queues[sm];
        let place = queue.iter().rposition(|id| regime.tasks[id.index()].grid == after);
        queue.insert(place.map_or(queue.len(), |place| place + 1), id);
        let source = Source::Units { buffer: weight, lo: 0, hi: 1 };
        regime.streams[sm].push(Run { task: id, source, after: None });
    }
    restream(schedule);
}

/// Gives a grid of attention caches of its own, in history and append alike.
pub fn fresh_caches(schedule: &mut Schedule, grid_name: &str) {
    for (history, append) in [(Role::HistoryK, Role::AppendK), (Role::HistoryV, Role::AppendV)] {
        let was = operand(schedule, grid_name, append).buffer;
        let fresh = BufferId::from(schedule.program.buffers.len());
        let buffer = schedule.program.buffers[was.index()].clone();
        schedule.program.buffers.push(Buffer { name: format!("{} again", buffer.name), ..buffer });
        schedule.placement.push(Some((1 << 24) + (u64::from(fresh.0) << 20)));
        for role in [history, append] {
            operand(schedule, grid_name, role).buffer = fresh;
        }
    }
}

/// xorshift64*: the mutants are the same on every machine.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % n
    }
}

/// Steps of two rows over a paged cache: three sequences, six pages of four positions.
pub const TWO_ROWS: Batch = Batch { rows: 2, sequences: 3, pages: 6, page_rows: 4, words: false };

/// One small layer, two rows a step, on two SMs of an H200 that bulk copies fill.
pub fn two_rows() -> (Schedule, Target) {
    (two_rows_on(&h200(), &on_h200(2)), beyond_kernels())
}

pub fn two_rows_on(target: &Target, candidate: &Candidate) -> Schedule {
    let toy =
        Toy { layers: 1, hidden: 16, heads: 2, kv_heads: 1, dim: 8, intermediate: 16, vocab: 24, context: 8, ..TOY };
    let candidate = Candidate { splits: 1, ..candidate.clone() };
    let program = lower_batch(&toy.graph(), "two-rows", toy.precision, toy.context, &TWO_ROWS, &candidate).unwrap();
    schedule(program, target, &candidate).unwrap()
}

/// The same as a batch kernel runs it: activations travel as words, pages are whole chunks of a slot. Five SMs, of which the
/// last one appends nothing.
pub fn words() -> (Schedule, Target) {
    words_of(None)
}

/// The same with all matrices in a format.
pub fn words_of(format: Option<Format>) -> (Schedule, Target) {
    let (hidden, intermediate) = (40, 16);
    let toy =
        Toy { layers: 1, hidden, heads: 2, kv_heads: 1, dim: 8, intermediate, vocab: 40, context: 8, format, ..TOY };
    let candidate = Candidate { splits: 1, ..on_h200(5) };
    let page_rows = chunk_rows(candidate.slot_bytes, cache_row_bytes(toy.dim, toy.precision.cache));
    let batch = Batch { pages: 3, page_rows, words: true, ..TWO_ROWS };
    let program = lower_batch(&toy.graph(), "words", toy.precision, toy.context, &batch, &candidate).unwrap();
    (schedule(program, &h200(), &candidate).unwrap(), h200())
}

/// Makes words of an exchange buffer of packets, with room for what a kernel of words keeps. The machine has no limits of kernels.
pub fn as_words(s: &mut Schedule, id: BufferId) {
    let buffer = &mut s.program.buffers[id.index()];
    (buffer.words, buffer.phases) = (true, 2);
    s.placement[id.index()] = Some((1 << 24) + (u64::from(id.0) << 20));
    let events = s.regimes.iter_mut().flat_map(|regime| &mut regime.events);
    events.filter(|event| event.buffer == id).for_each(|event| event.mechanism = Mechanism::Words);
    let mut end = 0;
    for part in &mut s.machine.smem {
        // Enough for 16 warps.
        let least = match part.kind {
            SmemKind::Reduce => 128 << 10,
            SmemKind::Stage | SmemKind::Heads | SmemKind::State => 6 << 10,
            _ => 0,
        };
        (part.offset, part.bytes) = (end, part.bytes.max(least));
        end += part.bytes.next_multiple_of(128);
    }
}

/// Attention in two shares from position 3 on, whose records travel as packets.
pub fn records_of_one_regime(target: &Target) -> Schedule {
    let toy =
        Toy { layers: 1, hidden: 16, heads: 2, kv_heads: 1, dim: 8, intermediate: 16, vocab: 24, context: 8, ..TOY };
    toy.schedule(target, &Candidate { split_from: 3, ..on_h200(2) })
}

/// Kernels of an H200 for one row, in two regimes, and for two rows, over the pages of one pool. Each position may be run by either.
pub fn over_one_cache() -> [Schedule; 2] {
    let (hidden, intermediate, context) = (64, 32, 96);
    let toy = Toy { layers: 2, hidden, heads: 2, kv_heads: 2, dim: 64, intermediate, vocab: 40, context, ..TOY };
    let candidate = Candidate { slot_bytes: 8192, ring_slots: 8, ..on_h200(2) };
    let page_rows = chunk_rows(candidate.slot_bytes, cache_row_bytes(toy.dim, toy.precision.cache));
    let place = |name: &str, batch: &Batch, candidate: &Candidate| {
        let program = lower_batch(&toy.graph(), name, toy.precision, toy.context, batch, candidate).unwrap();
        schedule(program, &h200(), candidate).unwrap()
    };
    let batch = Batch { rows: 1, sequences: 3, pages: 12, page_rows, words: false };
    let one = Candidate { splits: 2, split_from: 16, ..candidate.clone() };
    let several = Candidate { splits: 1, ..candidate };
    [place("one-row", &batch, &one), place("two-rows", &Batch { rows: 2, words: true, ..batch }, &several)]
}

/// Changes [`words`] so that the candidates of its last SM order nothing, and its clears are not released. It appends nothing, so
/// histories are safe.
pub fn release_nothing_last(s: &mut Schedule) {
    let regime = &mut s.regimes[0];
    let last = EventId(regime.events.len() as u32);
    let event = &mut regime.events[0];
    let begin = event.hi / 5 * 4;
    let own = Event { lo: begin, count: 1, mechanism: Mechanism::Packets, proxy: false, ..*event };
    (event.hi, event.count) = (begin, 4);
    regime.events.push(own);
    let (head, queues) = (*regime.queues[4].last().expect("a head"), regime.queues.clone());
    regime.tasks[head.index()].signals = vec![last];
    for queue in queues {
        let waits = &mut regime.tasks[queue[0].index()].waits;
        waits[0].count = 4;
        waits.push(Wait { event: last, count: 1 });
    }
}

/// A small layer with experts on two SMs, whose loaders wait for the choice of each slot.
pub fn looked_up() -> (Schedule, Target) {
    (looked_up_on(&h200(), &on_h200(2)), h200())
}

pub fn looked_up_on(target: &Target, candidate: &Candidate) -> Schedule {
    let mut s = small_mixture(MIXTURE).schedule(target, &Candidate { splits: 1, ..candidate.clone() });
    s.program.name = "looked-up".to_string();
    s
}

/// One small layer with experts.
pub fn small_mixture(mixture: Mixture) -> Toy {
    Toy {
        layers: 1,
        hidden: 16,
        heads: 2,
        kv_heads: 1,
        dim: 8,
        intermediate: 16,
        vocab: 24,
        context: 8,
        mixture: Some(mixture),
        ..TOY
    }
}

/// Two rows of [`looked_up`], which choose different experts.
pub fn looked_up_rows_on(target: &Target, candidate: &Candidate) -> Schedule {
    let toy = small_mixture(MIXTURE);
    let candidate = Candidate { splits: 1, ..candidate.clone() };
    let batch = Batch { rows: 2, sequences: 3, pages: 6, page_rows: 4, words: false };
    let program = lower_batch(&toy.graph(), "looked-up-rows", toy.precision, toy.context, &batch, &candidate);
    schedule(program.expect("the toy lowers"), target, &candidate).expect("the toy fits")
}

/// A small layer on four SMs of two devices: each device has one KV head, and what one publishes the other reads.
pub fn two_devices() -> (Schedule, Target) {
    (two_devices_on(&h200(), &on_h200(4)), beyond_kernels())
}

pub fn two_devices_on(target: &Target, candidate: &Candidate) -> Schedule {
    let toy =
        Toy { layers: 1, hidden: 32, heads: 2, kv_heads: 2, dim: 8, intermediate: 32, vocab: 32, context: 8, ..TOY };
    let mut s = toy.schedule(target, &Candidate { splits: 1, heads_per_task: 1, ..candidate.clone() });
    s.program.name = "two-devices".to_string();
    s.machine.devices = 2;
    for buffer in s.program.buffers.iter_mut().filter(|b| b.space != Space::Private) {
        buffer.home = Home::Everywhere;
    }
    s.regimes.iter_mut().flat_map(|r| &mut r.events).for_each(|e| e.scope = Scope::System);
    s
}
