//! Owns schedules to judge: real lowerings of random shapes and candidates, and programs that no lowering would make.

use super::explore::Rng;
use super::hybrids::{fleet, with_states};
use crate::proof_support::{
    BF16, FP32, MIXTURE, Mixture, TOY, Toy, beyond_kernels, cpu, h200, on_cpu, on_h200, small_mixture, words_of,
};
use monobloc::candidate::Candidate;
use monobloc::dtype::{DType, Precision};
use monobloc::format::{Code, Format, Groups, ScaleCode};
use std::collections::BTreeMap;

use monobloc::ir::layout;
use monobloc::ir::op::{Access, Epilogue, MatVec, NormAttr, Op, Role};
use monobloc::ir::program::{
    Buffer, Cols, Content, Grid, Home, Operand, Part, Program, Rows, Second, Space, VectorPart,
};
use monobloc::ir::schedule::{
    Event, Machine, Mechanism, Regime, Ring, Run, Schedule, Scope, SmemKind, SmemPart, Source, Task, Wait,
};
use monobloc::ir::variant::{MatVecVariant, Variant};
use monobloc::ir::{BufferId, EventId, GridId, TaskId};
use monobloc::lower::{Batch, lower, lower_batch};
use monobloc::model::graph::{
    Act, ClampedSwiglu, ExpertGroups, GroupScore, ModelGraph, NormKind, QkNormSpan, RowView, Score, TensorId,
};
use monobloc::schedule::schedule;
use monobloc::target::{CopyMechanism, Target, TargetKind};

/// A schedule, its target, and its name.
pub struct Base {
    pub name: String,
    pub schedule: Schedule,
    pub target: Target,
}

/// Any of a list.
pub(super) fn of<T: Copy>(random: &mut Rng, list: &[T]) -> T {
    list[random.below(list.len())]
}

const INT8: Format = Format { code: Code::Int8, groups: None, row_scales: true };
const INT4_ZEROS: Format = Format {
    code: Code::Int4,
    groups: Some(Groups { k: 32, scale: ScaleCode::F16, zeros: true, minima: false }),
    row_scales: false,
};
const BLOCKS: Format = Format {
    code: Code::E4m3,
    groups: Some(Groups { k: 128, scale: ScaleCode::F32, zeros: false, minima: false }),
    row_scales: false,
};

/// Keys and values in 8 bits.
const FP8_CACHE: Precision = Precision { cache: DType::E4m3, ..BF16 };

/// The variations of a decoder that lowering knows, by the family that has them.
pub const FAMILIES: [(&str, Toy); 19] = [
    ("Llama", TOY),
    ("Llama fp32", Toy { precision: FP32, ..TOY }),
    ("fp32 cache", Toy { precision: Precision { cache: FP32.cache, ..BF16 }, bias: true, ..TOY }),
    ("fp8 cache", Toy { precision: FP8_CACHE, ..TOY }),
    ("fp32 wire", Toy { precision: Precision { wire: FP32.wire, ..BF16 }, ..TOY }),
    ("StarCoder2, plain MLP and biases", Toy { gated: false, bias: true, ..TOY }),
    ("GPT-NeoX, parallel block", Toy { parallel: true, gated: false, bias: true, ..TOY }),
    ("Gemma, post norms and window", Toy { post_norms: true, window: Some(8), ..TOY }),
    ("Qwen3, head norms", Toy { qk_norm: Some(QkNormSpan::Head), ..TOY }),
    ("OLMo 2, projection norms", Toy { qk_norm: Some(QkNormSpan::Projection), post_norms: true, ..TOY }),
    ("no RoPE, no groups", Toy { rope: false, kv_heads: 4, ..TOY }),
    ("one KV head", Toy { kv_heads: 1, heads: 8, dim: 8, ..TOY }),
    ("odd sizes", Toy { vocab: 201, intermediate: 50, hidden: 72, ..TOY }),
    ("codes with scales of rows", Toy { format: Some(INT8), ..TOY }),
    ("codes with scales and zero points of groups", Toy { format: Some(INT4_ZEROS), bias: true, ..TOY }),
    ("codes, odd sizes", Toy { format: Some(BLOCKS), vocab: 201, intermediate: 50, hidden: 72, ..TOY }),
    ("experts", Toy { mixture: Some(MIXTURE), ..TOY }),
    (
        "experts in groups, corrected, a gated shared one",
        Toy { mixture: Some(GROUPED), qk_norm: Some(QkNormSpan::Head), ..TOY },
    ),
    (
        "experts with biases, codes, post norms",
        Toy { mixture: Some(CLAMPED), bias: true, format: Some(INT8), post_norms: true, ..TOY },
    ),
];

/// Two of six experts, all of one group.
const GROUPED: Mixture = Mixture {
    experts: 6,
    score: Score::Sigmoid,
    corrected: true,
    groups: Some(ExpertGroups { count: 2, kept: 1, score: GroupScore::SumOfTwo }),
    shared: Some(true),
    ..MIXTURE
};
const CLAMPED: Mixture =
    Mixture { top_k: 3, shared: Some(false), swiglu: Some(ClampedSwiglu { alpha: 1.702, limit: 7.0 }), ..MIXTURE };

/// A decoder so small that every interleaving of a few of its steps can be walked.
pub fn small(random: &mut Rng) -> Base {
    let (name, family) = of(random, &FAMILIES);
    let (heads, kv_heads) = of(random, &[(1, 1), (2, 1), (2, 2)]);
    let toy = Toy {
        layers: 1,
        hidden: of(random, &[8, 16, 24]),
        heads,
        kv_heads,
        dim: 8,
        intermediate: of(random, &[8, 16]),
        vocab: of(random, &[24, 32]),
        context: 6,
        window: family.window.map(|_| 2),
        ..family
    };
    let sms = of(random, &[1, 2, 2, 2, 2, 3]);
    placed(random, name, toy, sms)
}

/// A decoder of a few layers on a few SMs.
pub fn medium(random: &mut Rng) -> Base {
    let (name, family) = of(random, &FAMILIES);
    let toy = Toy {
        layers: of(random, &[1, 2, 3]),
        hidden: of(random, &[16, 64, 72]),
        vocab: of(random, &[96, 200]),
        context: of(random, &[7, 40, 64]),
        ..family
    };
    let sms = 2 + random.below(7) as u32;
    placed(random, name, toy, sms)
}

/// Features that decoders of one row do not have: steps of several rows over pages, with packets, counters or words; weights that the
/// step chooses; SMs of two devices. Kernels have more limits than the language, and are judged elsewhere.
pub fn several(random: &mut Rng) -> Base {
    let on_gpu = random.below(3) != 0;
    let (machine, target) = if on_gpu { (h200(), beyond_kernels()) } else { (cpu(), cpu()) };
    let on = |sms| if on_gpu { on_h200(sms) } else { on_cpu(sms) };
    match random.below(8) {
        0 => mixed(random),
        1 => fleet(random),
        2 | 3 => {
            let format = of(random, &[None, None, Some(INT8), Some(BLOCKS)]);
            Base { name: "words".into(), schedule: words_of(format).0, target: beyond_kernels() }
        }
        _ => {
            let rows = of(random, &[2, 2, 3]);
            let batch = Batch { rows, sequences: rows + 1, pages: 3 * rows, page_rows: 4, words: false };
            let (name, family) = of(random, &FAMILIES);
            let (heads, kv_heads) = of(random, &[(1, 1), (2, 1), (2, 2)]);
            let small = Toy {
                layers: 1,
                hidden: 16,
                heads,
                kv_heads,
                dim: 8,
                intermediate: 16,
                vocab: 24,
                context: 8,
                ..family
            };
            let toy = Toy { window: family.window.map(|_| 2), ..small };
            let candidate = Candidate { splits: 1, ..on(2) };
            let program = lower_batch(&toy.graph(), name, toy.precision, toy.context, &batch, &candidate);
            let schedule = schedule(program.expect("a program"), &machine, &candidate).expect("a schedule");
            Base { name: format!("{rows} rows, {name}"), schedule, target }
        }
    }
}

/// Small decoders with experts in each of their layers, of one row and of several; of several with packets or with words.
pub fn mixed(random: &mut Rng) -> Base {
    let on_gpu = random.below(3) != 0;
    let (machine, target) = if on_gpu { (h200(), beyond_kernels()) } else { (cpu(), cpu()) };
    let mixture = of(random, &[MIXTURE, MIXTURE, GROUPED, CLAMPED]);
    let bias = random.below(2) == 0;
    let format = of(random, &[None, None, Some(INT8)]);
    let (rows, words) = (of(random, &[1, 1, 2, 3]), on_gpu && random.below(2) == 0);
    // Slots of words begin with spans.
    let intermediate = if words && rows > 1 { 32 } else { 16 };
    let toy = Toy { layers: of(random, &[1, 2]), bias, format, intermediate, ..small_mixture(mixture) };
    let sms = of(random, &[2, 2, 3]);
    let candidate = Candidate { splits: 1, ..if on_gpu { on_h200(sms) } else { on_cpu(sms) } };
    let program = if rows == 1 {
        lower(&toy.graph(), "experts", toy.precision, toy.context, &candidate)
    } else {
        let held = layout::chunk_rows(candidate.slot_bytes, layout::cache_row_bytes(toy.dim, toy.precision.cache));
        let page_rows = if words { held } else { 4 };
        let pages = (rows + 1) * toy.context.div_ceil(page_rows);
        let batch = Batch { rows, sequences: rows + 1, pages, page_rows, words };
        lower_batch(&toy.graph(), "experts", toy.precision, toy.context, &batch, &candidate)
    };
    let schedule = schedule(program.expect("a program"), &machine, &candidate).expect("a schedule");
    Base { name: format!("experts, {rows} rows"), schedule, target }
}

fn placed(random: &mut Rng, name: &str, toy: Toy, sms: u32) -> Base {
    let on_gpu = random.below(4) != 0;
    let base = if on_gpu { on_h200(sms) } else { on_cpu(sms) };
    let splits = of(random, &[1, 2, 2, 3]);
    let split_from = of(random, &[0, 1, 3, toy.context / 2, toy.context]);
    let sums_everywhere = if toy.post_norms && toy.mixture.is_none() { of(random, &[0, 1]) } else { 0 };
    let candidate = Candidate { splits, split_from, sums_everywhere, ..base };
    let target = if on_gpu { h200() } else { cpu() };
    Base { name: name.to_string(), schedule: toy.schedule(&target, &candidate), target }
}

/// A real lowering, of a checkpoint's graph or of a random shape, on any record, with any candidate. `None` if it does not fit.
pub fn real(random: &mut Rng, graphs: &[(String, ModelGraph)]) -> Option<Base> {
    let names: Vec<&str> = Target::builtin_names().collect();
    let target = Target::builtin(names[random.below(names.len())])?;
    let (name, graph, context_max) = if random.below(3) == 0 {
        let (name, graph) = &graphs[random.below(graphs.len())];
        (name.clone(), graph.clone(), of(random, &[24, 100, 512]))
    } else {
        let (name, family) = of(random, &FAMILIES);
        let (heads, kv_heads) = of(random, &[(1, 1), (2, 1), (4, 2), (4, 4), (6, 2), (8, 1), (9, 3)]);
        let toy = Toy {
            layers: 1 + random.below(4) as u32,
            hidden: 8 * (1 + random.below(24)) as u32,
            heads,
            kv_heads,
            dim: of(random, &[8, 16, 40, 80]),
            intermediate: 2 * (1 + random.below(80)) as u32,
            vocab: 8 + random.below(400) as u32,
            context: 1 + random.below(100) as u32,
            window: family.window.map(|w| of(random, &[1, 3, w, 50])),
            ..family
        };
        let mut graph = toy.graph();
        if random.below(4) == 0 && !toy.parallel {
            with_states(random, &mut graph);
        }
        (name.to_string(), graph, toy.context)
    };
    let precision = of(random, &[BF16, FP32, Precision { wire: DType::F32, ..BF16 }, FP8_CACHE]);
    let cpu = target.kind == TargetKind::Cpu;
    let default = Candidate::default_for(&graph, &target, precision);
    let slots = of(random, &[2, 3, 4, 8]);
    let candidate = match random.below(4) {
        0 => default,
        _ => Candidate {
            sms: of(random, &[1, 2, 3, 5, 8, 16, default.sms]).min(default.sms),
            consumer_warps: if cpu { 1 } else { of(random, &[4, 8, 16]) },
            ring_slots: slots,
            slot_bytes: of(random, &[8192, 16_384, 32_768]),
            flight_high: slots.min(of(random, &[1, 2, 4])),
            flight_low: 1,
            flight_free: random.below(slots as usize + 1) as u32,
            heads_per_task: of(random, &[1, 2, default.heads_per_task]),
            splits: of(random, &[1, 1, 2, 3, 7, default.splits]),
            split_from: of(random, &[0, 1, 16, context_max / 2, context_max, 384]),
            // Today's kernels have one; the interpreter has all.
            mechanism: if cpu {
                of(random, &[Mechanism::Packets, Mechanism::Fenced, Mechanism::Counter])
            } else {
                Mechanism::Packets
            },
            light_eighth: of(random, &[0, 0, 4, 8]),
            light_percent: of(random, &[5, 40]),
            sums_everywhere: of(random, &[0, default.sums_everywhere]),
            ..default
        },
    };
    let program = lower(&graph, &name, precision, context_max, &candidate).ok()?;
    let placed = schedule(program, &target, &candidate).ok()?;
    Some(Base { name, schedule: placed, target })
}

/// A random program: matrix products in any wiring over random SMs, with private sums of owners or of every SM. Queues mostly follow
/// the program, and events are derived here, not by the scheduler.
pub fn random_program(random: &mut Rng) -> Base {
    let sms = 1 + random.below(3);
    let hidden = 8 * (1 + random.below(3)) as u32;
    let vocab = 24;
    let mut p = Program {
        name: "random".to_string(),
        precision: BF16,
        context_max: 2 + random.below(4) as u32,
        rows: 1,
        tables: vec![],
        buffers: vec![],
        grids: vec![],
    };
    let mut build = Build { p: &mut p, hidden };
    let best = build.buffer("candidates", Space::Exchange, DType::I32, 2 * sms as u32);
    build.p.buffers[best.index()].phases = 1 + random.below(2) as u32;
    let token = build.buffer("token", Space::Private, DType::I32, 1);
    let residual = build.buffer("residual", Space::Private, DType::F32, hidden);
    let said = build.buffer("said", Space::Output, DType::I32, 1);
    let logits = build.buffer("logits", Space::Output, DType::F32, vocab);
    let table = build.constant("table", DType::Bf16, vocab, hidden);
    let x = build.buffer("x", Space::Exchange, DType::Bf16, hidden);
    let read = |role, buffer, cols| Operand { role, access: Access::Read, buffer, rows: Rows::One, cols };
    let write = |role, buffer, cols| Operand { role, access: Access::Write, buffer, rows: Rows::One, cols };
    let one = Cols::all(1);
    build.grid(
        "select",
        Op::Select,
        sms as u32,
        vec![read(Role::Best, best, Cols::all(2 * sms as u32)), write(Role::Token, token, one)],
    );
    build.grid("report", Op::Report, 1, vec![read(Role::Token, token, one), write(Role::Out, said, one)]);
    // The residual is made by owners of its columns or by every SM; sometimes one grid is wrong about it.
    let everywhere = random.below(3) == 0;
    let made = |random: &mut Rng| if random.below(24) == 0 { !everywhere } else { everywhere };
    let sum_shape = |everywhere: bool| {
        if everywhere { (sms as u32, Cols::all(hidden)) } else { (hidden / 8, Cols::blocks(8, hidden)) }
    };
    let (n, cols) = sum_shape(everywhere);
    let mut embed = vec![
        read(Role::Token, token, one),
        Operand { rows: Rows::Token, ..read(Role::Table, table, cols) },
        write(Role::Residual, residual, cols),
    ];
    embed.extend((!everywhere).then(|| write(Role::Out, x, cols)));
    build.grid("embed", Op::Embed { scale: 1.0, everywhere }, n, embed);
    // Vectors that exist so far. Owners publish theirs; an SM that owns all columns may read them itself.
    let mut vectors = vec![(if everywhere { residual } else { x }, hidden)];
    if !everywhere && random.below(8) == 0 {
        vectors.push((residual, hidden));
    }
    let norm = NormAttr { kind: NormKind::Rms, eps: 1e-5 };
    for nth in 0..1 + random.below(5) {
        let (from, k) = vectors[random.below(vectors.len())];
        let (sum, normed) = (random.below(3) == 0, random.below(2) == 0);
        let rows = if sum { hidden } else { 8 * (1 + random.below(4)) as u32 };
        let out = build.buffer(&format!("v{nth}"), Space::Exchange, DType::Bf16, rows);
        // A matvec that adds its output, or one with a sum after it.
        let adds = sum && !made(random);
        let epilogue = if adds { Epilogue::Residual { scale: 1.0 } } else { Epilogue::Act(Act::Silu) };
        let update = |cols| Operand { access: Access::Update, ..write(Role::Residual, residual, cols) };
        build.matvec(&format!("m{nth}"), from, k, rows, normed, norm, epilogue, |cols| {
            let mut to = vec![];
            to.extend(adds.then(|| update(cols)));
            to.push(write(Role::Out, out, cols));
            to
        });
        if sum && !adds {
            let gain = build.constant(&format!("s{nth}.norm"), DType::F32, 1, hidden);
            let everywhere = made(random);
            let (n, cols) = sum_shape(everywhere);
            let all = Cols::all(hidden);
            let mut operands = vec![read(Role::X, out, all), read(Role::NormWeight, gain, all), update(cols)];
            if !everywhere {
                let published = build.buffer(&format!("s{nth}"), Space::Exchange, DType::Bf16, hidden);
                operands.push(write(Role::Out, published, cols));
                vectors.push((published, hidden));
            }
            let op = Op::NormAdd { norm, width: hidden, scale: 1.0, everywhere };
            build.grid(&format!("s{nth}"), op, n, operands);
        }
        vectors.push((out, rows));
    }
    // Mostly the last one; if every SM has the sum, mostly that one.
    let at = if everywhere && random.below(3) > 0 { 0 } else { vectors.len() - 1 };
    let (from, k) = vectors[at];
    let epilogue = Epilogue::Logits { scale: 1.0, softcap: None };
    build.matvec("head", from, k, vocab, true, norm, epilogue, |cols| {
        let slots = Cols { stride_j: 2, limit: 2 * sms as u32, ..Cols::all(2) };
        vec![write(Role::Logits, logits, cols), write(Role::Best, best, slots)]
    });
    let last = p.grids.len() - 1;
    p.grids[last].second = Second::Ordinal(sms as u32);
    if random.below(4) == 0 {
        let exchanges: Vec<usize> = (0..p.buffers.len()).filter(|&b| p.buffers[b].space == Space::Exchange).collect();
        p.buffers[of(random, &exchanges)].phases = of(random, &[1, 2, 3, 4, 8]);
    }
    let mut base = place_randomly(random, p, sms);
    if random.below(4) == 0 {
        more_regimes(random, &mut base.schedule);
    }
    base
}

/// The same again from a later position on, once or twice, with the report on any SM.
fn more_regimes(random: &mut Rng, s: &mut Schedule) {
    for _ in 0..1 + random.below(2) {
        let from = s.regimes.last().map_or(0, |r| r.from_position) + 1 + random.below(2) as u32;
        if from >= s.program.context_max {
            return;
        }
        let mut regime = Regime { from_position: from, ..s.regimes[0].clone() };
        let of_report = |id: &TaskId| matches!(s.program.grids[regime.tasks[id.index()].grid.index()].op, Op::Report);
        let Some(report) = (0..regime.tasks.len()).map(TaskId::from).find(of_report) else { return };
        regime.queues.iter_mut().for_each(|q| q.retain(|id| *id != report));
        let queue = &mut regime.queues[random.below(s.machine.sms as usize)];
        queue.insert(queue.len().min(1 + random.below(2)), report);
        s.regimes.push(regime);
    }
}

struct Build<'a> {
    p: &'a mut Program,
    hidden: u32,
}

impl Build<'_> {
    fn buffer(&mut self, name: &str, space: Space, dtype: DType, cols: u32) -> BufferId {
        let name = name.to_string();
        self.p.buffers.push(Buffer {
            name,
            space,
            dtype,
            coded: None,
            rows: 1,
            cols,
            phases: 1,
            words: false,
            paging: None,
            home: Home::of(space),
            content: None,
        });
        BufferId::from(self.p.buffers.len() - 1)
    }

    fn constant(&mut self, name: &str, dtype: DType, rows: u32, cols: u32) -> BufferId {
        let id = self.buffer(name, Space::Constant, dtype, cols);
        let buffer = &mut self.p.buffers[id.index()];
        let gains = VectorPart { view: Some(RowView::range(TensorId(0), 0)), len: cols };
        buffer.rows = rows;
        buffer.content = Some(match rows {
            1 => Content::Vectors { parts: vec![gains], offset: 0.0, scale: 1.0, interleave: 1 },
            _ => Content::Tensor(TensorId(0)),
        });
        id
    }

    fn grid(&mut self, name: &str, op: Op, n: u32, operands: Vec<Operand>) {
        self.p.grids.push(Grid {
            name: name.to_string(),
            site: None,
            op,
            n,
            second: Second::Axis(1),
            per_row: false,
            operands,
        });
    }

    #[allow(clippy::too_many_arguments)] // A matrix product has as many parts.
    fn matvec(
        &mut self,
        name: &str,
        x: BufferId,
        k: u32,
        rows: u32,
        normed: bool,
        norm: NormAttr,
        epilogue: Epilogue,
        out: impl FnOnce(Cols) -> Vec<Operand>,
    ) {
        let weight = self.buffer(&format!("{name}.weight"), Space::Weight, DType::Bf16, k);
        let view = RowView::range(TensorId(0), 0);
        let buffer = &mut self.p.buffers[weight.index()];
        buffer.rows = rows;
        buffer.content = Some(Content::Rows { parts: vec![Part { view, rows }], interleave: 1 });
        let operand = |role, access, buffer, rows, cols| Operand { role, access, buffer, rows, cols };
        let mut operands = vec![operand(Role::X, Access::Read, x, Rows::One, Cols::all(k))];
        if normed {
            let gain = self.constant(&format!("{name}.norm"), DType::F32, 1, k);
            operands.push(operand(Role::NormWeight, Access::Read, gain, Rows::One, Cols::all(k)));
        }
        let units = Cols::blocks(1, rows.div_ceil(8));
        operands.push(operand(Role::Weight, Access::Stream, weight, Rows::Units, units));
        operands.extend(out(Cols::blocks(8, rows)));
        debug_assert!(self.hidden > 0);
        let op = Op::MatVec(MatVec {
            rows,
            k,
            slots: 1,
            norm: normed.then_some(norm),
            own_input: self.p.buffers[x.index()].space == Space::Private,
            epilogue,
            unit_rows: 8,
        });
        self.grid(name, op, rows.div_ceil(8), operands);
    }
}

/// Tasks to random SMs, queues mostly in program order, and events from the regions that tasks read.
fn place_randomly(random: &mut Rng, p: Program, sms: usize) -> Base {
    let mut regime = Regime {
        from_position: 0,
        tasks: vec![],
        events: vec![],
        queues: vec![vec![]; sms],
        streams: vec![vec![]; sms],
    };
    // The owners of the parts of the residual, the same everywhere; sometimes one grid is wrong about them.
    let owned = |n: u32, sm: usize| (sm as u32 * n / sms as u32, (sm as u32 + 1) * n / sms as u32);
    for (g, grid) in p.grids.iter().enumerate() {
        let mut cuts: Vec<(usize, u32, u32)> = match grid.op {
            ref op if op.everywhere() => (0..sms).map(|sm| (sm, sm as u32, sm as u32 + 1)).collect(),
            Op::Report => vec![(0, 0, 1)],
            _ if grid.operand(Role::Residual).is_some() || grid.operand(Role::Logits).is_some() => {
                (0..sms).map(|sm| (sm, owned(grid.n, sm).0, owned(grid.n, sm).1)).collect()
            }
            _ => {
                let parts = 1 + random.below(sms) as u32;
                let first = random.below(sms);
                let cut = |i: u32| i * grid.n / parts;
                (0..parts).map(|i| ((first + i as usize) % sms, cut(i), cut(i + 1))).collect()
            }
        };
        cuts.retain(|c| c.1 < c.2);
        if grid.operand(Role::Residual).is_some() && cuts.len() > 1 && random.below(12) == 0 {
            (cuts[0].0, cuts[1].0) = (cuts[1].0, cuts[0].0);
        }
        for (ordinal, (sm, lo, hi)) in cuts.into_iter().enumerate() {
            let j = if matches!(grid.second, Second::Ordinal(_)) { ordinal as u32 } else { 0 };
            regime.queues[sm].push(TaskId::from(regime.tasks.len()));
            regime.tasks.push(Task { grid: GridId::from(g), lo, hi, j, row: 0, waits: vec![], signals: vec![] });
        }
    }
    for queue in &mut regime.queues {
        for _ in 0..random.below(3) {
            let length = queue.len();
            // After the select, mostly.
            let at = if random.below(8) == 0 { 0 } else { 1 };
            if length > at + 1 {
                let i = at + random.below(length - at - 1);
                queue.swap(i, i + 1);
            }
        }
    }
    let mechanism = [Mechanism::Packets, Mechanism::Fenced, Mechanism::Counter][random.below(3)];
    let span = |o: &Operand, t: &Task| o.cols.range(t.lo, t.hi, t.j);
    let mut known: Vec<(BufferId, u32, u32)> = vec![];
    for t in 0..regime.tasks.len() {
        let grid = &p.grids[regime.tasks[t].grid.index()];
        for operand in grid.operands.iter().filter(|o| o.access == Access::Read) {
            let (lo, hi) = span(operand, &regime.tasks[t]);
            if p.buffers[operand.buffer.index()].space != Space::Exchange || lo >= hi {
                continue;
            }
            let key = (operand.buffer, lo as u32, hi as u32);
            let e = known.iter().position(|k| *k == key).unwrap_or_else(|| {
                let id = EventId::from(known.len());
                known.push(key);
                let mut count = 0;
                for task in &mut regime.tasks {
                    let grid = &p.grids[task.grid.index()];
                    let writes = grid.operands.iter().filter(|o| o.access == Access::Write && o.buffer == key.0);
                    let mut spans = writes.map(|o| o.cols.range(task.lo, task.hi, task.j));
                    if spans.any(|s| s.0 < hi && lo < s.1) {
                        task.signals.push(id);
                        count += 1;
                    }
                }
                let carried = operand.role == Role::Best;
                let mechanism = match mechanism {
                    Mechanism::Packets if carried && random.below(4) > 0 => Mechanism::Fenced,
                    other => other,
                };
                let (buffer, lo, hi) = key;
                regime.events.push(Event {
                    buffer,
                    row: None,
                    lo,
                    hi,
                    count,
                    mechanism,
                    scope: Scope::Device,
                    carried,
                    proxy: false,
                });
                known.len() - 1
            });
            let count = regime.events[e].count;
            regime.tasks[t].waits.push(Wait { event: EventId::from(e), count });
        }
    }
    for sm in 0..sms {
        for id in &regime.queues[sm] {
            let task = &regime.tasks[id.index()];
            if let Some(weight) = p.grids[task.grid.index()].operand(Role::Weight) {
                let source = Source::Units { buffer: weight.buffer, lo: task.lo, hi: task.hi };
                regime.streams[sm].push(Run { task: *id, source, after: None });
            }
        }
    }
    let mut next = 0u64;
    let placement = p.buffers.iter().map(|b| match b.space {
        Space::Exchange => {
            let at = next;
            next += (u64::from(b.cols) * 8 * u64::from(b.phases) + 16).next_multiple_of(256);
            Some(at)
        }
        Space::Output => Some(if b.name == "said" { 1 << 16 } else { 0 }),
        _ => None,
    });
    let mut placement: Vec<Option<u64>> = placement.collect();
    // The pack, with the layout of the compiler.
    for (place, packed) in placement.iter_mut().zip(layout::placement(&p)) {
        *place = place.or(packed);
    }
    let mut offset = 0;
    let smem = SmemKind::ALL.into_iter().zip([16_384, 1024, 4096, 256, 1024, 4096, 4096]);
    let smem = smem.map(|(kind, bytes)| {
        offset += bytes;
        SmemPart { kind, offset: offset - bytes, bytes }
    });
    let machine = Machine {
        target: "h200".to_string(),
        sms: sms as u32,
        devices: 1,
        consumer_warps: 1,
        loader_warps: 1,
        registers_per_thread: 128,
        loader_registers: 0,
        reduce_batch: 8,
        residual_cols: 0,
        ring: Ring {
            slots: 4,
            slot_bytes: 4096,
            arrivals: 1,
            flight_high: 4,
            flight_low: 2,
            flight_free: 2,
            copiers: 1,
        },
        smem: smem.collect(),
    };
    // In slots of 8 granules, for one warp.
    let mut variants = BTreeMap::new();
    for (g, grid) in p.grids.iter().enumerate() {
        if let Op::MatVec(m) = &grid.op {
            let (id, unit) = (GridId::from(g), m.streamed_granules(Format::plain(DType::Bf16)).max(1));
            let tasks = regime.tasks.iter().filter(|task| task.grid == id);
            let units = tasks.map(|task| task.hi - task.lo).max().unwrap_or(1);
            let variant = if unit <= 8 {
                MatVecVariant {
                    units,
                    chunk: 8 / unit * unit,
                    block: unit * units,
                    units_per_warp: 1,
                    poll_batch: 1,
                    granule: 512,
                    pass: 0,
                    shared: false,
                }
            } else {
                let chunk = unit.div_ceil(unit.div_ceil(8));
                MatVecVariant {
                    units,
                    chunk,
                    block: unit,
                    units_per_warp: 1,
                    poll_batch: 1,
                    granule: 512,
                    pass: 0,
                    shared: false,
                }
            };
            variants.insert(id, Variant::MatVec(variant));
        }
    }
    let schedule = Schedule { program: p, machine, variants, placement, regimes: vec![regime] };
    // The whole language, without the limits of today's kernels.
    let mut target = Target { kind: TargetKind::Cpu, ..h200() };
    target.spec.copy = CopyMechanism::Plain;
    Base { name: "random program".to_string(), schedule, target }
}
