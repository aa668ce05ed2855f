//! Tests the features of attention that few models have, on small models that have them: sinks, a gate of the output, queries scaled by
//! position, and norms after RoPE. The reference, the interpreter, the proof and the kernels must agree on what they mean.

use std::sync::Arc;

use computed::executor::{TOLERANCE, difference, execute, expected};
use monobloc::candidate::Candidate;
use monobloc::codegen::emit::{Trace, emit};
use monobloc::codegen::waves;
use monobloc::defaults::rows::{Room, place_rows};
use monobloc::dtype::{DType, Precision};
use monobloc::interp::{Arithmetic, Interp, Options, Order};
use monobloc::ir::op::{Attention, Op, Role};
use monobloc::ir::parse::parse;
use monobloc::ir::print::print;
use monobloc::ir::program::Program;
use monobloc::ir::schedule::Schedule;
use monobloc::lower::lower;
use monobloc::model::config::{Imported, import_config_only};
use monobloc::model::graph::{Linear, ModelGraph, QueryScale, RowView, Tensor, TensorId};
use monobloc::model::weights::Weights;
use monobloc::pack::pack;
use monobloc::reference;
use monobloc::schedule::schedule;
use monobloc::target::Target;
use monobloc::validate::{same, validate};
use monobloc::waves::Form;

use crate::nvrtc::{compiles, nvrtc, quick};
use crate::rows::{alone, served};
use crate::support::max_difference;
use crate::waves::{judge_mutants_of, kernel, proven, proven_in_splits, run_tail, small, tokens, with_tail};

const FP32: Precision = Precision { weights: DType::F32, cache: DType::F32, wire: DType::F32 };
const BF16: Precision = Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 };
const CONTEXT_MAX: u32 = 64;

/// A model of two layers with q and k norms, whose first layer has the features that `change` gives it. The second one has none.
fn model(head_dim: u32, change: impl Fn(&mut ModelGraph)) -> Imported {
    let config = format!(
        r#"{{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": {head_dim}, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "max_position_embeddings": 512,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16"}}"#
    );
    let mut imported = import_config_only(&config, 11).unwrap();
    change(&mut imported.graph);
    imported.weights = Weights::synthetic(&imported.graph, 11);
    imported
}

fn tensor(graph: &mut ModelGraph, name: &str, shape: &[u32]) -> TensorId {
    let id = TensorId::from(graph.tensors.len());
    graph.tensors.push(Tensor { name: name.to_string(), dtype: DType::Bf16, shape: shape.to_vec() });
    id
}

fn add_sinks(graph: &mut ModelGraph) {
    let heads = graph.layers[0].attention().unwrap().heads;
    graph.layers[0].attention_mut().unwrap().sinks = Some(tensor(graph, "sinks", &[heads]));
}

/// q and the gate in one tensor, head by head, as Qwen3.5 has them.
fn add_gate(graph: &mut ModelGraph) {
    let (hidden, attn) = (graph.hidden, graph.layers[0].attention().unwrap());
    let (rows, dim) = (attn.q.rows, attn.head_dim);
    let weight = tensor(graph, "q_and_gate.weight", &[2 * rows, hidden]);
    let bias = tensor(graph, "q_and_gate.bias", &[2 * rows]);
    let part = |first| {
        let view = |tensor| RowView { tensor, first, block: dim, stride: 2 * dim };
        Linear { weight: view(weight), bias: Some(view(bias)), rows, cols: hidden }
    };
    let attn = graph.layers[0].attention_mut().unwrap();
    (attn.q, attn.gate) = (part(0), Some(part(dim)));
}

fn add_query_scale(graph: &mut ModelGraph) {
    graph.layers[0].attention_mut().unwrap().query_scale = Some(QueryScale { beta: 0.5, original: 6 });
}

fn norm_after_rope(graph: &mut ModelGraph) {
    graph.layers[0].attention_mut().unwrap().norm_after_rope = true;
}

fn everything(graph: &mut ModelGraph) {
    for change in [add_sinks, add_gate, add_query_scale, norm_after_rope] {
        change(graph);
    }
}

/// A name, and how a graph gets it.
type Feature = (&'static str, fn(&mut ModelGraph));

const FEATURES: [Feature; 5] = [
    ("sinks", add_sinks),
    ("gate", add_gate),
    ("query scale", add_query_scale),
    ("norm after rope", norm_after_rope),
    ("everything", everything),
];

/// One history for each head, or histories in splits from a position on.
fn candidate(graph: &ModelGraph, target: &Target, precision: Precision, splits: u32) -> Candidate {
    Candidate {
        sms: 4,
        splits,
        split_from: 9,
        heads_per_task: splits.min(2),
        ring_slots: 4,
        slot_bytes: 8192,
        flight_high: 2,
        flight_low: 1,
        flight_free: 2,
        sums_everywhere: 0,
        ..Candidate::default_for(graph, target, precision)
    }
}

fn program(graph: &ModelGraph, precision: Precision, splits: u32) -> Program {
    let target = Target::builtin("h200").unwrap();
    lower(graph, "features", precision, CONTEXT_MAX, &candidate(graph, &target, precision, splits)).unwrap()
}

fn placed(program: Program, graph: &ModelGraph, target: &Target, splits: u32) -> Schedule {
    let precision = program.precision;
    schedule(program, target, &candidate(graph, target, precision, splits)).unwrap()
}

fn ids(count: u32) -> Vec<u32> {
    (0..count).map(|i| (i * 37 + 5) % 128).collect()
}

#[test]
fn each_feature_changes_the_reference_alone() {
    let plain = |with: fn(&mut ModelGraph)| {
        let Imported { graph, weights, .. } = model(16, with);
        reference::forward(&graph, &weights, &ids(24)).concat()
    };
    let base = plain(|_| {});
    for (name, change) in FEATURES {
        assert!(max_difference(&plain(change), &base) > 1e-2, "{name}");
    }
    // Positions below `original` are not scaled.
    let scaled = plain(add_query_scale);
    let vocab = 128;
    assert_eq!(max_difference(&scaled[..6 * vocab], &base[..6 * vocab]), 0.0);
}

#[test]
fn the_interpreter_agrees_with_the_reference() {
    let target = Target::builtin("h200").unwrap();
    for (name, change) in FEATURES {
        let Imported { graph, weights, .. } = model(16, change);
        let ids = ids(40);
        let want = reference::forward(&graph, &weights, &ids).concat();
        for splits in [1, 3] {
            let schedule = placed(program(&graph, FP32, splits), &graph, &target, splits);
            let pack = Arc::new(pack(&schedule, &graph, &weights).unwrap());
            let threads = Options { arithmetic: Arithmetic::Fast, order: Order::Threads(2) };
            for options in [threads, Options::spec(), Options::adversarial(Arithmetic::Fast, 3)] {
                let mut interp = Interp::new(&schedule, pack.clone(), options).unwrap();
                let difference = max_difference(&interp.logits(&ids).unwrap().concat(), &want);
                assert!(difference < 1e-4, "{name}, {splits} splits, {options:?}: {difference}");
            }
        }
    }
}

#[test]
fn programs_with_features_are_proven_and_parse() {
    for target in ["cpu", "h200", "a10g"].map(|name| Target::builtin(name).unwrap()) {
        for (name, change) in FEATURES {
            let graph = model(64, change).graph;
            for precision in [FP32, BF16] {
                for splits in [1, 3] {
                    let program = program(&graph, precision, splits);
                    same(&graph, &program).unwrap_or_else(|error| panic!("{name}: {error}"));
                    let placed = placed(program, &graph, &target, splits);
                    let text = print(&placed);
                    assert_eq!(print(&parse(&text).unwrap()), text, "{name}");
                    if let Err(refused) = validate(placed, &target) {
                        panic!("{name} on {}: {refused}", target.name);
                    }
                }
            }
        }
    }
}

#[test]
fn a_norm_of_projections_after_rope_is_infeasible() {
    let mut graph = model(16, norm_after_rope).graph;
    let span = monobloc::model::graph::QkNormSpan::Projection;
    let attn = graph.layers[0].attention_mut().unwrap();
    attn.q_norm.iter_mut().chain(&mut attn.k_norm).for_each(|norm| norm.span = span);
    let target = Target::builtin("h200").unwrap();
    let error = lower(&graph, "features", FP32, CONTEXT_MAX, &candidate(&graph, &target, FP32, 1)).unwrap_err();
    assert!(error.to_string().contains("a norm of whole projections follows the rotation"), "{error}");
}

fn attention(program: &mut Program, name: &str) -> usize {
    program.grids.iter().position(|grid| grid.name == name).unwrap_or_else(|| panic!("a grid `{name}`"))
}

fn attribute(program: &mut Program, name: &str, change: impl Fn(&mut Attention)) {
    let at = attention(program, name);
    let Op::Attention(a) = &mut program.grids[at].op else { panic!("`{name}` attends") };
    change(a);
}

fn without(program: &mut Program, name: &str, role: Role) {
    let at = attention(program, name);
    program.grids[at].operands.retain(|operand| operand.role != role);
}

/// A change of the program of everything, and whether the rules of schedules see it, too.
type Mutant = (&'static str, bool, fn(&mut Program));

const MUTANTS: [Mutant; 11] = [
    ("no sinks", false, |p| {
        for name in ["attn.0", "attn_split.0"] {
            attribute(p, name, |a| a.sinks = false);
            without(p, name, Role::Sinks);
        }
    }),
    ("sinks that are said and not read", true, |p| without(p, "attn.0", Role::Sinks)),
    ("sinks in one regime alone", true, |p| {
        attribute(p, "attn_split.0", |a| a.sinks = false);
        without(p, "attn_split.0", Role::Sinks);
    }),
    ("no gate", false, |p| {
        for name in ["attn.0", "attn_split.0"] {
            attribute(p, name, |a| a.gate = false);
        }
        without(p, "attn.0", Role::Gate);
        without(p, "attn_merge.0", Role::Gate);
        let at = attention(p, "attn_merge.0");
        let Op::AttentionMerge { gate, .. } = &mut p.grids[at].op else { panic!() };
        *gate = false;
    }),
    ("a merge without the gate", true, |p| {
        without(p, "attn_merge.0", Role::Gate);
        let at = attention(p, "attn_merge.0");
        let Op::AttentionMerge { gate, .. } = &mut p.grids[at].op else { panic!() };
        *gate = false;
    }),
    ("a merge that reads queries as its gate", true, |p| {
        let at = attention(p, "attn_merge.0");
        let gate = p.grids[at].operands.iter_mut().find(|operand| operand.role == Role::Gate).unwrap();
        (gate.cols.limit, gate.cols.base) = (gate.cols.limit - gate.cols.base, 0);
    }),
    ("queries of another beta", false, |p| {
        for name in ["attn.0", "attn_split.0"] {
            attribute(p, name, |a| a.query_scale.as_mut().unwrap().beta = 0.25);
        }
    }),
    ("queries scaled from another position on", false, |p| {
        for name in ["attn.0", "attn_split.0"] {
            attribute(p, name, |a| a.query_scale.as_mut().unwrap().original = 7);
        }
    }),
    ("queries that are scaled by nothing", true, |p| {
        for name in ["attn.0", "attn_split.0"] {
            attribute(p, name, |a| a.query_scale.as_mut().unwrap().original = 0);
        }
    }),
    ("norms before the rotation", false, |p| {
        for name in ["attn.0", "attn_split.0"] {
            attribute(p, name, |a| a.norm_after_rope = false);
        }
    }),
    ("norms after the rotation in the other layer", false, |p| {
        for name in ["attn.1", "attn_split.1"] {
            attribute(p, name, |a| a.norm_after_rope = true);
        }
    }),
];

#[test]
fn programs_of_another_attention_are_refused() {
    let target = Target::builtin("h200").unwrap();
    let graph = model(64, everything).graph;
    let sound = program(&graph, BF16, 3);
    for (what, seen, change) in MUTANTS {
        let mut mutant = sound.clone();
        change(&mut mutant);
        assert_ne!(mutant, sound, "{what}");
        same(&graph, &mutant).expect_err(what);
        let placed = placed(mutant, &graph, &target, 3);
        assert_eq!(validate(placed, &target).is_err(), seen, "{what}: whether the rules of schedules see it");
    }
}

const WORDS: [&str; 4] =
    ["bool SINKS = true", "int GATE_AT = ", "u32 QUERY_ORIGINAL = 6", "bool NORM_AFTER_ROPE = true"];

/// The tensor path and the general one, whole histories and splits.
#[test]
fn decode_kernels_with_features_compile() {
    let nvrtc = nvrtc("decode_kernels_with_features_compile");
    for (head_dim, record, precision, splits) in [(16, "t4", FP32, 3), (64, "h200", BF16, 1), (128, "b200", BF16, 3)] {
        let graph = model(head_dim, everything).graph;
        let target = Target::builtin(record).unwrap();
        let placed = placed(program(&graph, precision, splits), &graph, &target, splits);
        let source = emit(&validate(placed, &target).unwrap(), &target, Trace::Off);
        assert!(WORDS.iter().all(|word| source.text.contains(word)), "{}", source.text);
        nvrtc.iter().for_each(|nvrtc| compiles(quick(nvrtc), &source, record));
    }
}

#[test]
fn batch_kernels_with_features_compile() {
    let nvrtc = nvrtc("batch_kernels_with_features_compile");
    for (head_dim, record, precision) in [(16, "t4", FP32), (64, "h200", BF16)] {
        let graph = model(head_dim, everything).graph;
        let target = Target::builtin(record).unwrap();
        let base = Candidate::default_for(&graph, &target, precision);
        let room = Room { rows: 8, sequences: 8, positions: 1024 };
        let placed = place_rows(&graph, "features", precision, CONTEXT_MAX, &target, &base, room).unwrap();
        same(&graph, &placed.program).unwrap();
        let source = emit(&validate(placed, &target).unwrap(), &target, Trace::Off);
        assert!(WORDS.iter().all(|word| source.text.contains(word)), "{}", source.text);
        nvrtc.iter().for_each(|nvrtc| compiles(quick(nvrtc), &source, record));
    }
}

#[test]
fn features_have_the_same_bits_in_rows_and_chunks() {
    let options = Options { arithmetic: Arithmetic::Fast, order: Order::Threads(1) };
    let imported = model(16, everything);
    let all = ids(17);
    let prompts = [&all[..], &all[4..9]];
    for precision in [FP32, BF16] {
        let expected: Vec<_> = prompts.iter().map(|prompt| alone(&imported, precision, options, prompt)).collect();
        for chunk in [1, 7, 16] {
            assert!(served(&imported, precision, options, &prompts, chunk) == expected, "chunks of {chunk}");
        }
    }
}

#[test]
fn wave_plans_with_features_compute_their_model() {
    let target = small();
    for (name, change) in FEATURES {
        let imported = model(64, change);
        let validated = kernel(&imported.graph, &target);
        let program = &validated.schedule().program;
        let text = tokens(&imported, 200);
        let keys_and_values = expected(&imported, &text);
        let chunks = [&text[..64], &text[64..65], &text[65..150], &text[150..]];
        let steps: Vec<&[u32]> = text.chunks(30).collect();
        for (plan, chunks) in [
            (proven(&validated, &target, Form::Chunk, 128).unwrap(), &chunks[..]),
            (proven(&validated, &target, Form::Steps, 32).unwrap(), &steps[..]),
            (proven_in_splits(&validated, &target, 32, 64), &steps[..]),
        ] {
            let found = execute(program, &imported, plan.plan(), chunks, 3);
            let difference = difference(&keys_and_values, &found);
            assert!(difference < TOLERANCE, "{name}, {:?}: {difference:e}", plan.plan().form);
        }
        run_tail(&imported, &with_tail(&validated, &target, 256, 16).unwrap(), &text, &[10, 200], 1);
    }
}

/// Every mutant of a plan either has no proof, or computes the same.
#[test]
fn mutants_of_wave_plans_with_features_are_judged() {
    let (imported, target) = (model(64, everything), small());
    for (form, split) in [(Form::Chunk, None), (Form::Steps, Some(64))] {
        let count = judge_mutants_of("everything", &imported, &target, form, 64, split);
        assert!(count > 500, "{count} mutants of {form:?}");
    }
}

#[test]
fn wave_kernels_with_features_compile() {
    let nvrtc = nvrtc("wave_kernels_with_features_compile");
    let (graph, target) = (model(64, everything).graph, Target::builtin("h200").unwrap());
    let validated = kernel(&graph, &target);
    for plan in [
        proven(&validated, &target, Form::Chunk, 512).unwrap(),
        proven(&validated, &target, Form::Steps, 32).unwrap(),
        proven_in_splits(&validated, &target, 64, 64),
    ] {
        let source = waves::emit(&plan, &target, Trace::Off);
        assert!(WORDS.iter().all(|word| source.text.contains(word)), "{}", source.text);
        nvrtc.iter().for_each(|nvrtc| compiles(quick(nvrtc), &source, "h200"));
    }
}
