//! Tests layers with experts from the graph to the interpreter: every kind of router, each judged against the reference.

use std::sync::Arc;

use monobloc::candidate::Candidate;
use monobloc::codegen::emit::{Trace, emit};
use monobloc::defaults::rows::{Room, place_rows};
use monobloc::dtype::{DType, Precision};
use monobloc::interp::{Arithmetic, Interp, Options, Order, Pack};
use monobloc::ir::op::Op;
use monobloc::ir::parse::parse;
use monobloc::ir::print::print;
use monobloc::ir::program::Grid;
use monobloc::ir::schedule::Schedule;
use monobloc::lower::{Batch, lower, lower_batch};
use monobloc::model::config::{Imported, import};
use monobloc::model::graph::{
    Act, ClampedSwiglu, ExpertGroups, Experts, FeedForward, GroupScore, Linear, Mlp, ModelGraph, Router, RowView,
    Score, SharedExpert, TensorId,
};
use monobloc::pack::pack;
use monobloc::reference::forward;
use monobloc::schedule::schedule;
use monobloc::target::{Target, TargetKind};
use monobloc::validate::{same, validate};

use crate::nvrtc::{compiles, nvrtc, quick};
use crate::rows::served;
use crate::support::{fixture, max_difference};

/// fp32 against fp64 (tests/fixtures/README.md).
const LOGITS_TOLERANCE: f32 = 3e-4;
const FP32: Precision = Precision { weights: DType::F32, cache: DType::F32, wire: DType::F32 };
const BF16: Precision = Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 };
const IDS: [u32; 9] = [3, 77, 12, 140, 9, 9, 51, 100, 2];

/// Every kind of router and of expert.
fn kinds() -> Vec<(&'static str, Imported)> {
    let with = |change: fn(&mut Experts, TensorId)| {
        let mut imported = import(&fixture("families/qwen3")).unwrap();
        mix(&mut imported.graph, change);
        imported
    };
    vec![
        ("softmax, normalised", with(|_, _| {})),
        ("softmax, not normalised", with(|experts, _| experts.router.normalise = None)),
        (
            "sigmoid, scaled",
            with(|experts, _| {
                experts.router.score = Score::Sigmoid;
                experts.router.normalise = Some(1e-20);
                experts.router.scale = 2.5;
            }),
        ),
        ("one slot", with(|experts, _| experts.router.top_k = 1)),
        (
            "corrected",
            with(|experts, vector| {
                experts.router.score = Score::Sigmoid;
                experts.router.correction = Some(vector);
            }),
        ),
        (
            "groups by their best",
            with(|experts, _| {
                let (count, kept, score) = (2, 1, GroupScore::Max);
                experts.router.groups = Some(ExpertGroups { count, kept, score });
            }),
        ),
        (
            "groups by two",
            with(|experts, _| {
                experts.router.score = Score::Sigmoid;
                let (count, kept, score) = (2, 1, GroupScore::SumOfTwo);
                experts.router.groups = Some(ExpertGroups { count, kept, score });
            }),
        ),
        (
            "a shared expert",
            with(|experts, _| {
                experts.shared = Some(SharedExpert { mlp: experts.experts[1].clone(), gate: None, scale: 0.5 });
            }),
        ),
        (
            "a gated shared expert",
            with(|experts, _| {
                let gate = Linear { rows: 1, ..experts.router.linear.clone() };
                experts.shared = Some(SharedExpert { mlp: experts.experts[3].clone(), gate: Some(gate), scale: 1.0 });
            }),
        ),
        (
            "clamped SwiGLU",
            with(|experts, _| {
                let swiglu = Some(ClampedSwiglu { alpha: 1.702, limit: 0.05 });
                experts.experts.iter_mut().for_each(|mlp| mlp.swiglu = swiglu);
            }),
        ),
        (
            "no gate",
            with(|experts, _| {
                experts.experts.iter_mut().for_each(|mlp| (mlp.gate, mlp.act) = (None, Act::Relu));
            }),
        ),
        (
            "biases",
            with(|experts, vector| {
                experts.router.linear.bias = Some(RowView::range(vector, 0));
                for (e, mlp) in (0..).zip(&mut experts.experts) {
                    let bias =
                        |first: u32| Some(RowView { tensor: vector, first: (first + e) % 8, block: 1, stride: 0 });
                    mlp.down.bias = bias(1);
                    mlp.up.bias = bias(2);
                    mlp.gate.as_mut().unwrap().bias = bias(3);
                }
            }),
        ),
    ]
}

/// Puts four experts of the model's width into every layer, whose matrices are rows of those that the layer has.
fn mix(graph: &mut ModelGraph, change: fn(&mut Experts, TensorId)) {
    let hidden = graph.hidden;
    // Gains of a norm serve as biases.
    let vector = graph.final_norm.weight.unwrap();
    let rows = |tensor: TensorId, first: u32, rows: u32| Linear {
        weight: RowView::range(tensor, first),
        bias: None,
        rows,
        cols: hidden,
    };
    let embed = graph.embed;
    for layer in &mut graph.layers {
        let FeedForward::Dense(mlp) = &layer.feed else { panic!("a dense layer") };
        let (gate, up) = (mlp.gate.as_ref().unwrap().weight.tensor, mlp.up.weight.tensor);
        let expert = |gate, up, half: u32, down: u32| Mlp {
            act: Act::Silu,
            gate: Some(rows(gate, half * hidden, hidden)),
            up: rows(up, half * hidden, hidden),
            down: rows(embed, down, hidden),
            swiglu: None,
        };
        let all =
            vec![expert(gate, up, 0, 0), expert(gate, up, 1, 30), expert(up, gate, 0, 60), expert(up, gate, 1, 90)];
        let router = Router {
            linear: rows(embed, 7, 4),
            top_k: 2,
            score: Score::Softmax,
            correction: None,
            groups: None,
            normalise: Some(0.0),
            scale: 1.0,
        };
        let mut experts = Experts { router, experts: all, shared: None };
        change(&mut experts, vector);
        layer.feed = FeedForward::Experts(Box::new(experts));
    }
}

fn place(imported: &Imported, precision: Precision, target: &Target, sms: u32) -> Schedule {
    let mut candidate = Candidate::default_for(&imported.graph, target, precision);
    candidate.sms = sms;
    let program = lower(&imported.graph, "experts", precision, 64, &candidate).unwrap();
    same(&imported.graph, &program).unwrap();
    schedule(program, target, &candidate).unwrap()
}

fn packed(imported: &Imported, schedule: &Schedule) -> Pack {
    Arc::new(pack(schedule, &imported.graph, &imported.weights).unwrap())
}

fn cpu() -> Target {
    let mut target = Target::builtin("h200").unwrap();
    target.kind = TargetKind::Cpu;
    target
}

#[test]
fn every_kind_of_experts_agrees_with_the_reference() {
    for (name, imported) in kinds() {
        let want = forward(&imported.graph, &imported.weights, &IDS);
        for sms in [1, 3, 4] {
            let target = Target::builtin("cpu").unwrap();
            let schedule = place(&imported, FP32, &target, sms);
            let validated =
                validate(schedule, &target).unwrap_or_else(|rejected| panic!("{name}, {sms} SMs: {rejected}"));
            let schedule = validated.schedule();
            for order in [Order::Threads(2), Order::Adversarial { seed: u64::from(sms) }] {
                let options = Options { arithmetic: Arithmetic::Fast, order };
                let mut interp = Interp::new(schedule, packed(&imported, schedule), options).unwrap();
                let logits = interp.logits(&IDS).unwrap();
                let difference = max_difference(&logits.concat(), &want.concat());
                assert!(difference < LOGITS_TOLERANCE, "{name}, {sms} SMs, {order:?}: {difference}");
            }
        }
    }
}

#[test]
fn the_text_of_experts_reads_back() {
    for (name, imported) in kinds() {
        let schedule = place(&imported, FP32, &cpu(), 5);
        let text = print(&schedule);
        assert_eq!(parse(&text).unwrap(), schedule, "{name}");
    }
}

#[test]
fn kernels_with_experts_are_proven_and_printed() {
    for (name, imported) in kinds() {
        let target = Target::builtin("h200").unwrap();
        let schedule = place(&imported, FP32, &target, 6);
        let validated = validate(schedule, &target).unwrap_or_else(|rejected| panic!("{name}: {rejected}"));
        let source = emit(&validated, &target, Trace::Off);
        assert!(source.text.contains("Route<Machine"), "{name}: {}", source.text);
    }
}

/// Each kind on another architecture, in fp32 and on tensor cores.
#[test]
fn kernels_with_experts_compile() {
    let Some(nvrtc) = nvrtc("kernels_with_experts_compile") else { return };
    let records = ["h200", "t4", "a100", "l4", "b200", "a10g"];
    for (turn, (name, imported)) in kinds().into_iter().enumerate() {
        let target = Target::builtin(records[turn % records.len()]).unwrap();
        let precision = if turn % 2 == 0 && records[turn % records.len()] != "t4" { BF16 } else { FP32 };
        let schedule = place(&imported, precision, &target, 8);
        let validated = validate(schedule, &target).unwrap_or_else(|rejected| panic!("{name}: {rejected}"));
        let source = emit(&validated, &target, Trace::Off);
        compiles(quick(nvrtc), &source, &format!("{name} on {}", target.name));
    }
}

/// Batch kernels of each kind, on tensor cores and lanes.
#[test]
fn batch_kernels_with_experts_compile() {
    let Some(nvrtc) = nvrtc("batch_kernels_with_experts_compile") else { return };
    let records = ["h200", "t4", "a100", "l4", "b200", "a10g"];
    for (turn, (name, imported)) in kinds().into_iter().enumerate() {
        let target = Target::builtin(records[turn % records.len()]).unwrap();
        let precision = if records[turn % records.len()] == "t4" { FP32 } else { BF16 };
        let base = Candidate { sms: 8, ..Candidate::default_for(&imported.graph, &target, precision) };
        let rows = if turn % 2 == 0 { 8 } else { 16 };
        let rows = if precision == FP32 { 8 } else { rows };
        let room = Room { rows, sequences: rows, positions: 4096 };
        let placed = place_rows(&imported.graph, name, precision, 64, &target, &base, room).unwrap();
        let validated = validate(placed, &target).unwrap_or_else(|rejected| panic!("{name}: {rejected}"));
        let source = emit(&validated, &target, Trace::Off);
        assert!(source.text.contains("RowsRoute<Machine"), "{name}: {}", source.text);
        compiles(quick(nvrtc), &source, &format!("{name} on {}", target.name));
    }
}

/// Where one product adds up all slots, as in decode kernels of GPUs: the interpreter executes their schedule.
#[test]
fn a_sum_over_slots_agrees_with_the_reference() {
    let target = Target::builtin("h200").unwrap();
    let mut sums = 0;
    for (name, imported) in kinds() {
        let want = forward(&imported.graph, &imported.weights, &IDS);
        let default = Candidate::default_for(&imported.graph, &target, FP32);
        // These models are so small that their units would have fewer rows.
        let candidate = Candidate { sms: 4, unit_rows: 8, ..default };
        let program = lower(&imported.graph, "experts", FP32, 64, &candidate).unwrap();
        same(&imported.graph, &program).unwrap();
        let schedule = schedule(program, &target, &candidate).unwrap();
        let of_slots = |grid: &Grid| matches!(&grid.op, Op::MatVec(m) if m.slots > 1);
        sums += schedule.program.grids.iter().filter(|grid| of_slots(grid)).count();
        let validated = validate(schedule, &target).unwrap_or_else(|rejected| panic!("{name}: {rejected}"));
        for order in [Order::Threads(2), Order::Adversarial { seed: 5 }] {
            let options = Options { arithmetic: Arithmetic::Fast, order };
            let schedule = validated.schedule();
            let logits = Interp::new(schedule, packed(&imported, schedule), options).unwrap().logits(&IDS).unwrap();
            let difference = max_difference(&logits.concat(), &want.concat());
            assert!(difference < LOGITS_TOLERANCE, "{name}, {order:?}: {difference}");
        }
    }
    assert!(sums > 0, "no model has such a sum");
}

/// Rows of different sequences, a prompt chunk among them, and fewer rows than the program has.
#[test]
fn rows_of_a_step_choose_their_own_experts() {
    let target = Target::builtin("cpu").unwrap();
    let batch = Batch { rows: 4, sequences: 4, pages: 16, page_rows: 16, words: false };
    for (name, imported) in kinds() {
        let candidate = Candidate { sms: 3, ..Candidate::default_for(&imported.graph, &target, FP32) };
        let program = lower_batch(&imported.graph, "rows", FP32, 64, &batch, &candidate).unwrap();
        same(&imported.graph, &program).unwrap();
        let placed = schedule(program, &target, &candidate).unwrap();
        let validated = validate(placed, &target).unwrap_or_else(|rejected| panic!("{name}: {rejected}"));
        assert_eq!(parse(&print(validated.schedule())).unwrap(), *validated.schedule(), "{name}");
    }
}

/// Prompts in chunks beside other rows, in launches of fewer rows than the program has: a row has the bits that it has alone in such a
/// step, whatever the experts of its neighbours are.
#[test]
fn a_row_has_the_bits_of_its_own_experts() {
    let prompts: [&[u32]; 3] = [&IDS, &IDS[3..7], &[140, 9, 77]];
    for (name, imported) in kinds() {
        let want = forward(&imported.graph, &imported.weights, &IDS).concat();
        for (precision, order) in [(FP32, Order::Threads(2)), (BF16, Order::Adversarial { seed: 3 })] {
            let options = Options { arithmetic: Arithmetic::Fast, order };
            let alone = prompts.map(|prompt| served(&imported, precision, options, &[prompt], 1));
            let expected: Vec<_> = alone.into_iter().flatten().collect();
            for chunk in [1, 2, 7, 16] {
                let found = served(&imported, precision, options, &prompts, chunk);
                assert!(found == expected, "{name}, {order:?}, chunks of {chunk}");
                let logits: Vec<f32> =
                    found[0][..IDS.len()].iter().flat_map(|at| &at.1).copied().map(f32::from_bits).collect();
                let difference = max_difference(&logits, &want);
                assert!(precision == BF16 || difference < LOGITS_TOLERANCE, "{name}: {difference}");
            }
        }
    }
}
