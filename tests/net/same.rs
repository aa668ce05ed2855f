//! Tests the judgement `same`: every program of every model has it, and no program that computes something else.

use std::fs;
use std::path::{Path, PathBuf};

use computed::proof_support::{MIXTURE, Mixture, TOY, Toy};
use monobloc::candidate::Candidate;
use monobloc::dtype::{DType, Precision};
use monobloc::ir::op::{Combine, Epilogue, Op, Role, Route};
use monobloc::ir::program::{Content, Grid, Program, Rows};
use monobloc::ir::{BufferId, LayerId};
use monobloc::lower::{Batch, lower, lower_batch};
use monobloc::model::config::import;
use monobloc::model::graph::{Act, ClampedSwiglu, ExpertGroups, GroupScore, ModelGraph, NormKind, RopeId, Score};
use monobloc::schedule::schedule;
use monobloc::target::Target;
use monobloc::validate::{same, validate};

const BF16: Precision = Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 };
const CONTEXT_MAX: u32 = 256;

fn fixtures(folder: &str) -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(folder);
    let mut paths: Vec<PathBuf> = fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.join("config.json").exists());
    paths.sort();
    paths
}

fn fixture(name: &str) -> ModelGraph {
    import(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)).unwrap().graph
}

fn on_h200(graph: &ModelGraph, precision: Precision) -> Candidate {
    let target = Target::builtin("h200").unwrap();
    Candidate { sms: 4, ..Candidate::default_for(graph, &target, precision) }.for_context(CONTEXT_MAX)
}

/// The programs of a model: of one row, with histories in splits, with sums on every SM, and of several rows.
fn programs(graph: &ModelGraph, precision: Precision) -> Vec<Program> {
    let context_max = graph.positions_max.min(CONTEXT_MAX);
    let base = on_h200(graph, precision);
    let candidates = [
        base.clone(),
        Candidate { splits: 4, split_from: 64, ..base.clone() },
        Candidate { sums_everywhere: 1, ..base.clone() },
        Candidate { sums_everywhere: 0, splits: 1, heads_per_task: 1, unit_rows: 2, ..base.clone() },
    ];
    let of_one = candidates.iter().filter_map(|candidate| lower(graph, "same", precision, context_max, candidate).ok());
    let batch = |rows, words| Batch { rows, sequences: 4, pages: 64, page_rows: 16, words };
    let several = Candidate { sums_everywhere: 0, splits: 1, ..base };
    let of_several = [batch(1, false), batch(4, false), batch(8, true)];
    let of_several =
        of_several.iter().filter_map(|batch| lower_batch(graph, "same", precision, context_max, batch, &several).ok());
    of_one.chain(of_several).collect()
}

#[test]
fn programs_of_every_model_compute_it() {
    let (mut models, mut judged) = (0, 0);
    for path in
        ["families", "variants", "experts", "quantised", "quantised-experts"].iter().flat_map(|folder| fixtures(folder))
    {
        // What is not imported is tested elsewhere.
        let Ok(imported) = import(&path) else { continue };
        for cache in [DType::Bf16, DType::E4m3] {
            for program in programs(&imported.graph, Precision { cache, ..BF16 }) {
                same(&imported.graph, &program).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
                judged += 1;
            }
        }
        models += 1;
    }
    assert!(models > 60 && judged > 8 * models, "{judged} programs of {models} models");
}

fn grid<'a>(program: &'a mut Program, name: &str) -> &'a mut Grid {
    program.grids.iter_mut().find(|grid| grid.name == name).unwrap_or_else(|| panic!("a grid `{name}`"))
}

fn buffer_of(program: &mut Program, name: &str, role: Role) -> BufferId {
    grid(program, name).operand(role).unwrap_or_else(|| panic!("`{name}` with {role:?}")).buffer
}

fn content<'a>(program: &'a mut Program, name: &str, role: Role) -> &'a mut Content {
    let id = buffer_of(program, name, role);
    program.buffers[id.index()].content.as_mut().unwrap()
}

/// Reads in one grid what another one reads under the same role.
fn reads_that_of(program: &mut Program, name: &str, other: &str, role: Role) {
    let buffer = buffer_of(program, other, role);
    let operand = grid(program, name).operands.iter_mut().find(|operand| operand.role == role).unwrap();
    operand.buffer = buffer;
}

/// The same bytes in another buffer, which is what a wrong index of a layer gives.
fn takes_content_of(program: &mut Program, name: &str, other: &str, role: Role) {
    let from = content(program, other, role).clone();
    *content(program, name, role) = from;
}

/// A change of a program, the model whose program it changes, and whether the rules of schedules see it, too.
type Mutant = (&'static str, &'static str, bool, fn(&mut Program));

const MUTANTS: [Mutant; 27] = [
    ("a dropped factor of a branch", "families/granite", false, |p| {
        let Op::MatVec(m) = &mut grid(p, "down.1").op else { panic!() };
        m.epilogue = Epilogue::Residual { scale: 1.0 };
    }),
    ("a dropped factor of the embedding", "families/gemma3", false, |p| {
        let Op::Embed { scale, .. } = &mut grid(p, "embed").op else { panic!() };
        *scale = 1.0;
    }),
    ("a dropped factor of the logits", "families/granite", false, |p| {
        let Op::MatVec(m) = &mut grid(p, "head").op else { panic!() };
        m.epilogue = Epilogue::Logits { scale: 1.0, softcap: None };
    }),
    ("a dropped cap of the logits", "families/gemma2", false, |p| {
        let Op::MatVec(m) = &mut grid(p, "head").op else { panic!() };
        let Epilogue::Logits { softcap, .. } = &mut m.epilogue else { panic!() };
        *softcap = None;
    }),
    ("a dropped norm", "families/llama-gqa", false, |p| {
        let grid = grid(p, "qkv.1");
        let Op::MatVec(m) = &mut grid.op else { panic!() };
        m.norm = None;
        grid.operands.retain(|operand| operand.role != Role::NormWeight);
    }),
    ("a dropped norm weight", "families/llama-gqa", true, |p| {
        grid(p, "qkv.1").operands.retain(|operand| operand.role != Role::NormWeight);
    }),
    ("a norm of another kind", "families/llama-gqa", false, |p| {
        let Op::MatVec(m) = &mut grid(p, "gate_up.0").op else { panic!() };
        m.norm.as_mut().unwrap().kind = NormKind::Layer;
    }),
    ("another eps", "families/llama-gqa", false, |p| {
        let Op::MatVec(m) = &mut grid(p, "gate_up.1").op else { panic!() };
        m.norm.as_mut().unwrap().eps *= 10.0;
    }),
    ("the norm weight of another layer", "families/llama-gqa", false, |p| {
        reads_that_of(p, "gate_up.1", "gate_up.0", Role::NormWeight);
    }),
    ("a norm weight without its offset", "families/gemma3", false, |p| {
        let Content::Vectors { offset, .. } = content(p, "qkv.0", Role::NormWeight) else { panic!() };
        *offset = 0.0;
    }),
    ("weights of another layer", "families/llama-gqa", false, |p| {
        takes_content_of(p, "down.1", "down.0", Role::Weight);
    }),
    ("q, k and v in another order", "families/llama-gqa", false, |p| {
        let Content::Rows { parts, .. } = content(p, "qkv.0", Role::Weight) else { panic!() };
        parts.swap(1, 2);
    }),
    ("gate and up swapped", "families/llama-gqa", false, |p| {
        let Content::Rows { parts, .. } = content(p, "gate_up.1", Role::Weight) else { panic!() };
        parts.swap(0, 1);
    }),
    ("rows of a fused tensor from one row on", "families/phi3", false, |p| {
        let Content::Rows { parts, .. } = content(p, "qkv.1", Role::Weight) else { panic!() };
        parts[2].view.first += 1;
    }),
    ("another activation", "families/llama-gqa", false, |p| {
        let Op::MatVec(m) = &mut grid(p, "gate_up.0").op else { panic!() };
        m.epilogue = Epilogue::Gated(Act::GeluTanh);
    }),
    ("a dropped bias", "families/qwen2", false, |p| {
        grid(p, "qkv.1").operands.retain(|operand| operand.role != Role::Bias);
    }),
    ("the bias of another layer", "families/qwen2", false, |p| {
        takes_content_of(p, "qkv.1", "qkv.0", Role::Bias);
    }),
    ("a swapped addend", "families/llama-gqa", false, |p| {
        reads_that_of(p, "o.1", "o.0", Role::X);
    }),
    ("a branch added twice", "families/gemma3", true, |p| {
        let at = p.grids.iter().position(|grid| grid.name == "down.1.add").unwrap();
        let again = p.grids[at].clone();
        p.grids.insert(at, again);
    }),
    ("keys read where values are", "families/llama-gqa", true, |p| {
        let attention = grid(p, "attn.0");
        let values = attention.operand(Role::V).unwrap().cols;
        attention.operands.iter_mut().find(|operand| operand.role == Role::K).unwrap().cols = values;
    }),
    ("another scale of scores", "families/llama-gqa", false, |p| {
        let Op::Attention(a) = &mut grid(p, "attn.1").op else { panic!() };
        a.scale *= 0.5;
    }),
    ("a dropped cap of scores", "families/gemma2", false, |p| {
        let Op::Attention(a) = &mut grid(p, "attn.1").op else { panic!() };
        a.softcap = None;
    }),
    ("a window that is one shorter", "families/mistral-swa", false, |p| {
        let Op::Attention(a) = &mut grid(p, "attn.1").op else { panic!() };
        a.window = a.window.map(|window| window - 1);
    }),
    ("the RoPE of another kind of layer", "families/gemma3", false, |p| {
        let Content::RopeTable(table) = content(p, "attn.0", Role::Rope) else { panic!() };
        *table = RopeId(1 - table.0);
    }),
    ("other pairs of RoPE", "families/llama-gqa", false, |p| {
        let Op::Attention(a) = &mut grid(p, "attn.0").op else { panic!() };
        a.interleaved = true;
    }),
    ("the norm of queries of another layer", "families/qwen3", false, |p| {
        takes_content_of(p, "attn.1", "attn.0", Role::QNormWeight);
    }),
    ("a layer less", "families/llama-gqa", false, |p| {
        p.grids.retain(|grid| grid.site.is_none_or(|site| site.layer != Some(LayerId(1))));
        reads_that_of(p, "head", "qkv.0", Role::X);
        let out = buffer_of(p, "down.0", Role::Out);
        grid(p, "head").operands.iter_mut().find(|operand| operand.role == Role::X).unwrap().buffer = out;
    }),
];

#[test]
fn programs_of_another_function_are_refused() {
    let target = Target::builtin("h200").unwrap();
    let mut seen_by_others = vec![];
    for (what, name, seen, change) in MUTANTS {
        let graph = fixture(name);
        let candidate = Candidate { sums_everywhere: 0, splits: 1, ..on_h200(&graph, BF16) };
        let program = lower(&graph, "same", BF16, graph.positions_max.min(CONTEXT_MAX), &candidate).unwrap();
        same(&graph, &program).unwrap();
        let mut mutant = program.clone();
        change(&mut mutant);
        assert_ne!(mutant, program, "{what}");
        same(&graph, &mutant).expect_err(what);
        // Most of them are sound schedules of another function: no other rule can see them.
        let sound = schedule(mutant, &target, &candidate).is_ok_and(|placed| validate(placed, &target).is_ok());
        if sound == seen {
            seen_by_others.push((what, !sound));
        }
    }
    assert_eq!(seen_by_others, [], "whether other rules see it");
}

/// Two of six experts in groups, with corrections, biases, a clamped SwiGLU, and a shared expert with a gate.
fn mixture() -> ModelGraph {
    let mixture = Mixture {
        experts: 6,
        score: Score::Sigmoid,
        corrected: true,
        groups: Some(ExpertGroups { count: 2, kept: 1, score: GroupScore::SumOfTwo }),
        shared: Some(true),
        swiglu: Some(ClampedSwiglu { alpha: 1.702, limit: 7.0 }),
        ..MIXTURE
    };
    Toy { mixture: Some(mixture), bias: true, ..TOY }.graph()
}

fn route(program: &mut Program) -> &mut Route {
    let Op::Route(route) = &mut grid(program, "route.1").op else { panic!("a route") };
    route
}

fn combine(program: &mut Program) -> &mut Combine {
    let Op::Combine(combine) = &mut grid(program, "combine.1").op else { panic!("a sum") };
    combine
}

fn epilogue_of<'a>(program: &'a mut Program, name: &str) -> &'a mut Epilogue {
    let Op::MatVec(m) = &mut grid(program, name).op else { panic!("a product") };
    &mut m.epilogue
}

/// A change of the experts of a layer, and whether the rules of schedules see it, too.
type OfExperts = (&'static str, bool, fn(&mut Program));

const OF_EXPERTS: [OfExperts; 32] = [
    ("a dropped correction", false, |p| {
        grid(p, "route.1").operands.retain(|operand| operand.role != Role::Bias);
    }),
    ("the correction of another layer", false, |p| takes_content_of(p, "route.1", "route.0", Role::Bias)),
    ("scores of another kind", false, |p| route(p).score = Score::Softmax),
    ("weights that are not divided", false, |p| route(p).normalise = None),
    ("another divisor", false, |p| route(p).normalise = Some(1.0)),
    ("another factor of weights", false, |p| route(p).scale = 2.0),
    ("no groups", false, |p| route(p).groups = None),
    ("a group more", false, |p| route(p).groups.as_mut().unwrap().kept = 2),
    ("a group by its best", false, |p| route(p).groups.as_mut().unwrap().score = GroupScore::Max),
    ("a slot less", true, |p| route(p).top_k = 1),
    ("experts in another order", false, |p| {
        let Content::Rows { parts, .. } = content(p, "gate_up.1", Role::Weight) else { panic!() };
        parts.swap(0, 2);
        parts.swap(1, 3);
    }),
    ("experts of down in another order", false, |p| {
        let Content::Rows { parts, .. } = content(p, "down.1", Role::Weight) else { panic!() };
        parts.swap(4, 5);
    }),
    ("gate and up of one expert swapped", false, |p| {
        let Content::Rows { parts, .. } = content(p, "gate_up.1", Role::Weight) else { panic!() };
        parts.swap(6, 7);
    }),
    ("experts of another layer", false, |p| takes_content_of(p, "down.1", "down.0", Role::Weight)),
    ("the bias of another expert", false, |p| {
        let Content::Vectors { parts, .. } = content(p, "down.1", Role::Bias) else { panic!() };
        parts.swap(2, 3);
    }),
    ("no bias of experts", false, |p| {
        grid(p, "gate_up.1").operands.retain(|operand| operand.role != Role::Bias);
    }),
    ("a dropped gate of the shared expert", false, |p| {
        grid(p, "combine.1").operands.retain(|operand| operand.role != Role::Gate);
    }),
    ("the gate of another layer", false, |p| reads_that_of(p, "combine.1", "combine.0", Role::Gate)),
    ("a score in place of the gate", false, |p| {
        let gate = grid(p, "combine.1").operands.iter_mut().find(|operand| operand.role == Role::Gate).unwrap();
        (gate.cols.base, gate.cols.limit) = (0, 1);
    }),
    ("no shared expert", true, |p| {
        combine(p).shared = None;
        let sum = grid(p, "combine.1");
        let last = sum.operands.iter().rposition(|operand| operand.role == Role::X).unwrap();
        sum.operands.remove(last);
        sum.operands.retain(|operand| operand.role != Role::Gate);
    }),
    ("another factor of the sum", false, |p| combine(p).scale = 0.5),
    ("another factor of the shared expert", false, |p| combine(p).shared = Some(0.5)),
    ("another limit", false, |p| {
        *epilogue_of(p, "gate_up.1") = Epilogue::Clamped(ClampedSwiglu { alpha: 1.702, limit: 6.0 });
    }),
    ("another alpha", false, |p| {
        *epilogue_of(p, "gate_up.1") = Epilogue::Clamped(ClampedSwiglu { alpha: 1.0, limit: 7.0 });
    }),
    ("no limit", false, |p| *epilogue_of(p, "gate_up.1") = Epilogue::Gated(Act::Silu)),
    ("a limit of the shared expert", false, |p| {
        *epilogue_of(p, "shared_up.1") = Epilogue::Clamped(ClampedSwiglu { alpha: 1.702, limit: 7.0 });
    }),
    ("the norm of another layer in the router alone", false, |p| {
        reads_that_of(p, "router.1", "router.0", Role::NormWeight);
    }),
    ("no norm in the router", false, |p| {
        let grid = grid(p, "router.1");
        let Op::MatVec(m) = &mut grid.op else { panic!() };
        m.norm = None;
        grid.operands.retain(|operand| operand.role != Role::NormWeight);
    }),
    ("scores of the layer before", false, |p| reads_that_of(p, "route.1", "route.0", Role::X)),
    ("the choice of the layer before", false, |p| {
        reads_that_of(p, "down.1", "down.0", Role::Choices);
        let before = grid(p, "down.0").operand(Role::Weight).unwrap().rows;
        let operands = grid(p, "down.1").operands.iter_mut();
        let chosen = operands.filter(|operand| matches!(operand.rows, Rows::Lookup(_)));
        chosen.for_each(|operand| operand.rows = before);
    }),
    ("shares of the layer before", false, |p| reads_that_of(p, "combine.1", "combine.0", Role::Shares)),
    ("outputs of the layer before", false, |p| {
        let other = buffer_of(p, "combine.0", Role::X);
        let inputs = grid(p, "combine.1").operands.iter_mut().filter(|operand| operand.role == Role::X);
        inputs.for_each(|operand| operand.buffer = other);
    }),
];

#[test]
fn programs_of_other_experts_are_refused() {
    let (target, graph) = (Target::builtin("h200").unwrap(), mixture());
    let candidate = Candidate { sums_everywhere: 0, splits: 1, ..on_h200(&graph, BF16) };
    let batch = Batch { rows: 4, sequences: 4, pages: 64, page_rows: 16, words: false };
    let one = lower(&graph, "same", BF16, graph.positions_max, &candidate).unwrap();
    let four = lower_batch(&graph, "same", BF16, graph.positions_max, &batch, &candidate).unwrap();
    let mut seen_by_others = vec![];
    for (what, seen, change) in OF_EXPERTS {
        for program in [&one, &four] {
            same(&graph, program).unwrap();
            let mut mutant = program.clone();
            change(&mut mutant);
            assert_ne!(mutant, *program, "{what}");
            same(&graph, &mutant).expect_err(what);
        }
        let mut mutant = one.clone();
        change(&mut mutant);
        let sound = schedule(mutant, &target, &candidate).is_ok_and(|placed| validate(placed, &target).is_ok());
        if sound == seen {
            seen_by_others.push((what, !sound));
        }
    }
    assert_eq!(seen_by_others, [], "whether other rules see it");
}

/// A change of a program that adds up slots in one product.
type OfSum = (&'static str, fn(&mut Program));

/// All are sound schedules of another function.
const OF_SUMS: [OfSum; 9] = [
    ("inputs that no share multiplies", |p| {
        grid(p, "gate_up.1").operands.retain(|operand| operand.role != Role::Shares);
    }),
    ("shares of the layer before", |p| reads_that_of(p, "gate_up.1", "gate_up.0", Role::Shares)),
    ("inputs of the layer before", |p| reads_that_of(p, "down.1", "down.0", Role::X)),
    ("experts in another order", |p| {
        let Content::Rows { parts, .. } = content(p, "down.1", Role::Weight) else { panic!() };
        parts.swap(0, 1);
    }),
    ("experts of another layer", |p| takes_content_of(p, "down.1", "down.0", Role::Weight)),
    ("the choice of the layer before", |p| {
        reads_that_of(p, "down.1", "down.0", Role::Choices);
        let before = grid(p, "down.0").operand(Role::Weight).unwrap().rows;
        let operands = grid(p, "down.1").operands.iter_mut();
        let chosen = operands.filter(|operand| matches!(operand.rows, Rows::Lookup(_)));
        chosen.for_each(|operand| operand.rows = before);
    }),
    ("another factor of the sum", |p| *epilogue_of(p, "down.1") = Epilogue::Residual { scale: 0.5 }),
    ("weights that are not divided", |p| route(p).normalise = Some(1.0)),
    ("another activation", |p| *epilogue_of(p, "gate_up.1") = Epilogue::Gated(Act::GeluTanh)),
];

#[test]
fn programs_of_other_sums_over_slots_are_refused() {
    let (target, graph) = (Target::builtin("h200").unwrap(), Toy { mixture: Some(MIXTURE), ..TOY }.graph());
    let candidate = Candidate { sums_everywhere: 0, splits: 1, ..on_h200(&graph, BF16) };
    let one = lower(&graph, "same", BF16, graph.positions_max, &candidate).unwrap();
    same(&graph, &one).unwrap();
    for (what, change) in OF_SUMS {
        let mut mutant = one.clone();
        change(&mut mutant);
        assert_ne!(mutant, one, "{what}");
        same(&graph, &mutant).expect_err(what);
        let placed = schedule(mutant, &target, &candidate).unwrap_or_else(|refused| panic!("{what}: {refused}"));
        validate(placed, &target).unwrap_or_else(|refused| panic!("{what}: {refused}"));
    }
}

#[test]
fn a_difference_is_named_by_grid_and_tensor() {
    let graph = fixture("families/llama-gqa");
    let candidate = on_h200(&graph, BF16);
    let mut program = lower(&graph, "model", BF16, CONTEXT_MAX, &candidate).unwrap();
    reads_that_of(&mut program, "gate_up.1", "gate_up.0", Role::NormWeight);
    let text = same(&graph, &program).unwrap_err().to_string();
    for part in ["`gate_up.1`", "model.layers.0.post_attention_layernorm.weight", "the model does not have"] {
        assert!(text.contains(part), "expected `{part}` in: {text}");
    }
}
