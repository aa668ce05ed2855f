//! Tests waves of mixtures of experts: which models have a plan, that a wrong one has no proof, and that a proven one computes its model.

use std::fs;

use computed::executor::{Rows, expected};
use monobloc::candidate::Candidate;
use monobloc::codegen::emit::Trace;
use monobloc::codegen::waves::emit;
use monobloc::defaults::rows::{Room, place_rows};
use monobloc::format::FormatPlan;
use monobloc::model::config::{Imported, import_config_only};
use monobloc::model::graph::ModelGraph;
use monobloc::rows::Shape;
use monobloc::target::Target;
use monobloc::validate::{Validated, validate};
use monobloc::waves::{
    Action, Division, DivisionId, Form, Layout, Over, Plan, Products, Proven, Share, Slots, Sum, Tiling, prove,
};

use crate::formats::{all, named, rounded};
use crate::nvrtc::nvrtc;
use crate::proof_support::BF16;
use crate::skipped;
use crate::support::{checkpoints, fixture};
use crate::waves::{
    Ran, breaks, cached, computes, form_compiles, given, judge_mutants_of, proven, rows_of, run_kernel, run_steps,
    small, stored, tokens, worst_position,
};

/// The config of a fixture with heads that tensor cores take, experts whose columns end inside 64 of k, and random weights.
fn mixture(name: &str) -> Imported {
    of_layers(name, None)
}

/// The same with another number of layers.
pub fn of_layers(name: &str, layers: Option<u32>) -> Imported {
    of_config(name, layers, |_| {})
}

/// The same with as many heads that all matrices have units of eight rows: tensor cores then read both operands of a chunk from shared memory.
pub fn wide(name: &str, layers: Option<u32>) -> Imported {
    of_config(name, layers, widen)
}

fn widen(entries: &mut serde_json::Map<String, serde_json::Value>) {
    entries.insert("num_attention_heads".to_string(), 12.into());
    entries.insert("num_key_value_heads".to_string(), 2.into());
    entries.insert("head_dim".to_string(), 64.into());
}

/// The same with another config.
fn of_config(
    name: &str,
    layers: Option<u32>,
    change: impl FnOnce(&mut serde_json::Map<String, serde_json::Value>),
) -> Imported {
    let text = fs::read_to_string(fixture(name).join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    let own = config["head_dim"].is_u64();
    let (heads, kv) = if own { (6, 2) } else { (2, 1) };
    let entries = config.as_object_mut().unwrap();
    layers.iter().for_each(|_| drop(entries.remove("layer_types")));
    for (key, value) in entries.iter_mut().filter(|(_, value)| value.as_u64().is_some_and(|value| value > 0)) {
        match key.as_str() {
            "hidden_size" => *value = 128.into(),
            "num_hidden_layers" => *value = layers.map_or_else(|| value.clone(), Into::into),
            "num_attention_heads" => *value = heads.into(),
            "num_key_value_heads" => *value = kv.into(),
            "head_dim" => *value = 64.into(),
            "max_position_embeddings" => *value = 512.into(),
            key if key.contains("intermediate_size") => *value = 96.into(),
            _ => {}
        }
    }
    change(entries);
    import_config_only(&config.to_string(), 7).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The batch kernel for 8 rows, if there is one.
fn batch(graph: &ModelGraph, target: &Target) -> Result<Validated, String> {
    batch_of(graph, target, 512)
}

/// The same for texts of this many positions.
fn batch_of(graph: &ModelGraph, target: &Target, context_max: u32) -> Result<Validated, String> {
    let base = Candidate::default_for(graph, target, BF16);
    let room = Room { rows: 8, sequences: 8, positions: 4096 };
    let placed = place_rows(graph, "waves", BF16, graph.positions_max.min(context_max), target, &base, room);
    let placed = placed.map_err(|reason| reason.to_string())?;
    Ok(validate(placed, target).unwrap_or_else(|rejected| panic!("{rejected}")))
}

/// Every fixture has a plan of each form, or none for a reason that has nothing to do with experts.
#[test]
fn a_proven_plan_of_experts_computes_its_model() {
    let mut refused = vec![];
    for (seed, name) in (0u64..).zip(checkpoints("experts")) {
        let (imported, target) = (mixture(&name), small());
        let validated = batch(&imported.graph, &target).unwrap_or_else(|reason| panic!("{name}: {reason}"));
        let proven = match proven(&validated, &target, Form::Chunk, 512) {
            Ok(proven) => proven,
            Err(reason) => {
                refused.push(format!("{name}: {reason}"));
                continue;
            }
        };
        // Weights of all experts in one tensor have another shape in a file.
        let kept = (!name.contains("gpt-oss")).then(|| stored(&imported));
        let imported = kept.as_ref().map_or(&imported, |(_, stored)| stored);
        // Of some models two blocks of rows, and experts with several tiles.
        let long = ["experts/qwen2-moe-shared", "experts/hy-v3"].contains(&name.as_str());
        computes(&name, imported, &proven, if long { &[1, 149, 170] } else { &[1, 36, 40] }, seed);
    }
    let of_other_ops = |reason: &String| reason.contains("attention of") || reason.contains("parallel layers");
    assert!(refused.len() == 3 && refused.iter().all(of_other_ops), "{refused:#?}");
}

#[test]
fn a_proven_plan_of_steps_of_experts_decides_what_its_model_does() {
    for (seed, name) in (0u64..).zip(["experts/qwen2-moe-shared", "experts/hy-v3"]) {
        let ((_folder, imported), target) = (stored(&mixture(name)), small());
        let validated = batch(&imported.graph, &target).unwrap();
        let proven = proven(&validated, &target, Form::Steps, 32).unwrap();
        run_steps(&imported, &validated, proven.plan(), seed);
    }
}

/// A loader copies weights before the blocks meet only where another product of the same groups came before.
#[test]
fn first_products_of_groups_wait_for_them() {
    let target = small();
    let validated = batch(&mixture("experts/qwen3-moe").graph, &target).unwrap();
    let source = emit(&proven(&validated, &target, Form::Steps, 32).unwrap(), &target, Trace::Off).text;
    let said: Vec<&str> =
        source.lines().filter_map(|line| line.trim().strip_prefix("static constexpr bool MET = ")).collect();
    assert_eq!(said, ["false;", "true;"]);
}

/// A tail begins with the sum over slots that its chunk leaves.
#[test]
fn chunks_of_experts_have_tails() {
    for name in ["experts/qwen3-moe", "experts/qwen2-moe-shared", "experts/afmoe"] {
        let (imported, target) = (mixture(name), small());
        let validated = batch(&imported.graph, &target).unwrap();
        proven(&validated, &target, Form::Tail, 16).unwrap_or_else(|refused| panic!("{name}: {refused}"));
    }
}

/// Every wrong plan of experts has no proof, or computes the same.
#[test]
fn a_wrong_plan_of_experts_has_no_proof() {
    let name = "experts/qwen2-moe-shared";
    for imported in [mixture(name), wide(name, None)] {
        let (_folder, imported) = stored(&imported);
        let mutants = judge_mutants_of(name, &imported, &small(), Form::Chunk, 256, None);
        assert!(mutants > 1000, "{mutants} mutants");
    }
}

#[test]
fn buffers_and_rings_of_experts_have_room_for_every_choice() {
    let name = "experts/qwen2-moe-shared";
    have_room(&mixture(name));
    have_room(&wide(name, None));
}

fn have_room(imported: &Imported) {
    let target = small();
    let validated = batch(&imported.graph, &target).unwrap();
    let proven = proven(&validated, &target, Form::Chunk, 256).unwrap();
    let of = proven.plan();
    let wrong = |name: &str, rule: &str, change: &dyn Fn(&mut Plan)| breaks(&proven, &target, name, rule, change);
    // In every buffer and division alike, so that the bound alone is wrong.
    let tilings = |plan: &mut Plan, change: &dyn Fn(&mut Tiling)| {
        for work in &mut plan.work {
            if let Layout::Groups(tiling) | Layout::Sources(tiling) | Layout::Grouped(tiling) | Layout::Placed(tiling) =
                &mut work.layout
            {
                change(tiling);
            }
        }
        for division in &mut plan.divisions {
            if let Over::Items { tiling, .. } = &mut division.over {
                change(tiling);
            }
        }
    };
    wrong("a tile less", "order", &|plan| tilings(plan, &|tiling| tiling.most -= 1));
    for rows in [0, 16, 48] {
        wrong("tiles for which there is no instruction", "order", &|plan| tilings(plan, &|tiling| tiling.rows = rows));
    }
    let tiles = |id: usize, plan: &mut Plan| match &mut plan.work[id].layout {
        Layout::Groups(tiling) | Layout::Sources(tiling) | Layout::Grouped(tiling) | Layout::Placed(tiling) => {
            tiling.most -= 1
        }
        _ => panic!("tiles"),
    };
    for (id, work) in of.work.iter().enumerate() {
        if matches!(work.layout, Layout::Groups(_) | Layout::Sources(_) | Layout::Grouped(_) | Layout::Placed(_)) {
            wrong("a tile less in one buffer", "order", &|plan| tiles(id, plan));
        }
    }
    let mut seen = 0;
    for w in 0..of.waves.len() {
        let set = |change: fn(&mut u32, &mut u32)| {
            move |plan: &mut Plan| {
                let Action::Experts { pass, chunk, .. } = &mut plan.waves[w].action else { panic!("experts") };
                change(pass, chunk);
            }
        };
        match of.waves[w].action {
            Action::Experts { .. } => {
                seen += 1;
                wrong("no units of a pass", "order", &set(|pass, _| *pass = 0));
                wrong(
                    "a unit more of a pass, of parts that are as many",
                    "ring",
                    &set(|pass, _| *pass = u32::MAX - 15),
                );
                wrong("no chunk", "ring", &set(|_, chunk| *chunk = 0));
                wrong("chunks of 32 of k", "ring", &set(|_, chunk| *chunk = 1));
                wrong("longer chunks", "ring", &set(|_, chunk| *chunk = 4));
            }
            Action::Rows { residual, sum: Some(Sum::Slots(slots)), .. } => {
                seen += 1;
                assert!(slots.shared.is_some());
                let slots_of = |change: fn(&mut Slots)| {
                    move |plan: &mut Plan| {
                        let Action::Rows { sum: Some(Sum::Slots(slots)), .. } = &mut plan.waves[w].action else {
                            panic!("a sum")
                        };
                        change(slots);
                    }
                };
                wrong("no shared expert", "order", &slots_of(|slots| slots.shared = None));
                wrong("no gate", "order", &slots_of(|slots| slots.gate = None));
                wrong("places as what experts made", "order", &slots_of(|slots| slots.x = slots.places));
                let overwrites = |plan: &mut Plan| plan.waves[w].action = Action::Combine { slots, out: residual };
                wrong("a sum that overwrites", "order", &overwrites);
            }
            _ => {}
        }
        wrong("no meeting", "meeting", &|plan| plan.waves[w].meets = false);
    }
    assert_eq!(seen, 3);
    wrong("rows that a wave of a step gathers", "order", &|plan| gather_as_steps(plan));
    wrong("too little scratch", "order", &|plan| plan.machine.scratch_bytes = 8 << 10);
}

/// In place of the two waves of a chunk that copy rows to places, the one of a step.
fn gather_as_steps(plan: &mut Plan) {
    let at = plan.waves.iter().position(|wave| matches!(wave.action, Action::Places { .. })).expect("places");
    let (Action::Places { choices, groups, places, .. }, Action::Fill { out, .. }) =
        (plan.waves[at].action.clone(), plan.waves[at + 1].action.clone())
    else {
        panic!("places that are filled")
    };
    let left = plan.waves[..at].iter_mut().rev().find_map(|wave| match &mut wave.action {
        Action::Rows { out: Some(out), .. } => Some(out),
        _ => None,
    });
    let left = left.expect("rows before the router");
    left.rows = None;
    let x = left.to;
    plan.waves[at].action = Action::Gather { x, choices, groups, places, out };
    plan.waves[at].division = DivisionId(plan.divisions.len() as u32);
    let dealt = |blocks: u32| {
        let mut shares = vec![vec![]; plan.machine.sms as usize];
        for row in 0..blocks * plan.block_rows {
            shares[(row % plan.machine.sms) as usize].push(Share { row, rows: 1, lo: 0, hi: 1 });
        }
        shares
    };
    let shares = (1..=plan.rows / plan.block_rows).map(dealt).collect();
    plan.divisions.push(Division { over: Over::Heads { n: 1, rows: 1, kept: 1 }, shares });
    plan.waves.remove(at + 1);
}

/// Positions of a text that may be off: where two experts have scores that are as good as equal, rounding to bf16 chooses another one.
const FLIPPED_ONE_IN: usize = 16;

/// The largest difference of keys or values of each position by their norm.
fn errors_of(expected: &[[Rows; 2]], found: &[[Rows; 2]]) -> Vec<f64> {
    let of = |all: &[[Rows; 2]], at: usize| -> Vec<[Rows; 2]> {
        all.iter().map(|layer| layer.each_ref().map(|rows| vec![rows[at].clone()])).collect()
    };
    (0..expected[0][0].len()).map(|at| worst_position(&of(expected, at), &of(found, at))).collect()
}

#[track_caller]
fn few_are_off(name: &str, errors: &[f64]) {
    let off = errors.iter().filter(|error| **error > 0.03).count();
    assert!(off <= errors.len() / FLIPPED_ONE_IN, "{name}: {off} positions are off: {errors:?}");
}

/// The generated text, its tables and the pack, run block by block: choices by softmax and by sigmoid with a correction, shared experts with a gate, biases,
/// clamped activations, and experts in codes.
#[test]
fn a_generated_kernel_of_experts_computes_its_model() {
    let plain = FormatPlan::default;
    let [narrow, wide]: [fn(&str) -> Imported; 2] = [mixture, |name| wide(name, None)];
    for (name, of, plan, count) in [
        ("experts/qwen2-moe-shared", narrow, plain(), 150),
        ("experts/hy-v3", narrow, plain(), 70),
        ("experts/gpt-oss-values", narrow, plain(), 70),
        ("experts/qwen3-moe", narrow, all(named("int4:32")), 70),
        ("experts/qwen3-moe", narrow, all(named("fp8")), 70),
        ("experts/mixtral-8", narrow, all(named("mxfp4")), 70),
        ("experts/qwen2-moe-shared", wide, plain(), 150),
        ("experts/hy-v3", wide, plain(), 150),
        ("experts/gpt-oss-values", wide, plain(), 150),
    ] {
        let (imported, target) = (rounded(of(name), &plan), small());
        let validated = batch(&imported.graph, &target).unwrap_or_else(|reason| panic!("{name}: {reason}"));
        let proven =
            proven(&validated, &target, Form::Chunk, 256).unwrap_or_else(|refused| panic!("{name}: {refused}"));
        // Of one of them blocks take items by number.
        let mut plan = proven.plan().clone();
        for wave in &mut plan.waves {
            if let Action::Experts { tickets, .. } = &mut wave.action {
                *tickets = name != "experts/hy-v3";
            }
        }
        let proven = prove(plan, &validated, &target).unwrap();
        let shape = Shape::of(&validated.schedule().program).unwrap();
        let page_of: Vec<u32> = (0..shape.blocks()).map(|block| (block * 7 + 5) % shape.pages).collect();
        let text = tokens(&imported, count);
        let (some, rest) = text.split_at(11);
        let launches = [(rows_of(0, 0, &given(some)), 1), (rows_of(0, 11, &given(rest)), 1)];
        let Some(Ran { cache, .. }) = run_kernel(&imported, &proven, &launches, &page_of) else {
            return skipped("a_generated_kernel_of_experts_computes_its_model", "C++ compiler", "`c++`");
        };
        let found = cached(validated.schedule(), &cache, &page_of, text.len());
        few_are_off(name, &errors_of(&expected(&imported, &text), &found));
    }
}

/// Two experts have all rows, so a launch has tiles of as many places: each number for which there are instructions, in pairs of blocks that share them, in pairs that do not, and in
/// blocks that are none.
#[test]
fn tiles_of_every_length_compute_their_model() {
    let config = |entries: &mut serde_json::Map<String, serde_json::Value>| {
        for key in ["num_local_experts", "num_experts_per_tok"] {
            entries.insert(key.to_string(), 2.into());
        }
        entries.insert("max_position_embeddings".to_string(), 1408.into());
        widen(entries);
    };
    let imported = of_config("experts/mixtral-8", Some(2), config);
    let [in_pairs, mut alone] = [small(), small()];
    alone.spec.cluster_max = 1;
    for (target, counts) in
        [(in_pairs, [30, 60, 120, 140, 190, 250, 140, 300, 129].as_slice()), (alone, &[30, 140, 300])]
    {
        let validated = batch_of(&imported.graph, &target, 1408).unwrap();
        let proven = proven(&validated, &target, Form::Chunk, 384).unwrap();
        let machine = &proven.plan().machine;
        assert_eq!((machine.products, machine.pairs), (Products::Shared, target.spec.cluster_max > 1));
        let shape = Shape::of(&validated.schedule().program).unwrap();
        let page_of: Vec<u32> = (0..shape.blocks()).map(|block| (block * 7 + 5) % shape.pages).collect();
        let text = tokens(&imported, counts.iter().sum());
        let mut first = 0;
        let launches: Vec<_> = counts
            .iter()
            .map(|rows| {
                let own = rows_of(0, first, &given(&text[first as usize..][..*rows as usize]));
                first += rows;
                (own, 1)
            })
            .collect();
        let Some(Ran { cache, .. }) = run_kernel(&imported, &proven, &launches, &page_of) else {
            return skipped("tiles_of_every_length_compute_their_model", "C++ compiler", "`c++`");
        };
        let found = cached(validated.schedule(), &cache, &page_of, text.len());
        few_are_off("two experts", &errors_of(&expected(&imported, &text), &found));
    }
}

/// Steps of rows of two texts, in bf16 and in codes whose bits are operands. A text has the bits that it has alone, whatever the experts of the other one are.
#[test]
fn a_row_of_experts_has_the_bits_that_it_has_alone() {
    let plain = FormatPlan::default;
    for (name, plan, rows, of_first) in [
        ("experts/qwen2-moe-shared", plain(), 32, 20),
        ("experts/qwen2-moe-shared", plain(), 16, 9),
        ("experts/gpt-oss-values", all(named("mxfp4")), 32, 20),
        ("experts/qwen3-moe", all(named("fp8")), 32, 20),
    ] {
        let (imported, target) = (rounded(mixture(name), &plan), small());
        let validated = batch(&imported.graph, &target).unwrap();
        let proven = proven(&validated, &target, Form::Steps, rows).unwrap();
        if !alone_as_together(name, &imported, &proven, of_first) {
            return skipped("a_row_of_experts_has_the_bits_that_it_has_alone", "C++ compiler", "`c++`");
        }
    }
}

/// Compares a text of `of_first` rows, and another of the other rows of a step, with the first alone. False: there is no compiler.
fn alone_as_together(name: &str, imported: &Imported, proven: &Proven<'_>, of_first: u32) -> bool {
    let (validated, rows) = (proven.validated(), proven.plan().rows);
    let schedule = validated.schedule();
    let shape = Shape::of(&schedule.program).unwrap();
    let blocks = shape.blocks();
    let pages: Vec<u32> = (0..2 * blocks).map(|block| (block * 7 + 5) % shape.pages).collect();
    let texts = [tokens(imported, of_first), tokens(imported, rows + 1)[of_first as usize + 1..].to_vec()];
    let [first, second] = [0, 1].map(|at| rows_of(at as u32, 0, &given(&texts[at])));
    let together = [(second.iter().chain(&first).copied().collect(), 1)];
    let Some(both) = run_kernel(imported, proven, &together, &pages) else { return false };
    let alone: Vec<_> = first.chunks(7).map(|rows| (rows.to_vec(), 1)).collect();
    let alone = run_kernel(imported, proven, &alone, &pages).expect("a compiler, as before");
    let of = |ran: &Ran, sequence: usize| {
        cached(schedule, &ran.cache, &pages[sequence * blocks as usize..][..blocks as usize], texts[sequence].len())
    };
    assert!(of(&both, 0) == of(&alone, 0), "other bits beside the rows of another text");
    for (sequence, text) in texts.iter().enumerate() {
        few_are_off(name, &errors_of(&expected(imported, text), &of(&both, sequence)));
    }
    true
}

/// Chunks and steps of experts, in bf16 and in codes.
#[test]
fn wave_kernels_of_experts_compile() {
    let nvrtc = nvrtc("wave_kernels_of_experts_compile");
    for (name, plan, form, rows) in [
        ("experts/qwen2-moe-shared", FormatPlan::default(), Form::Chunk, 512),
        ("experts/hy-v3", all(named("int4:32")), Form::Chunk, 512),
        ("experts/gpt-oss-values", FormatPlan::default(), Form::Steps, 16),
    ] {
        let (imported, target) = (rounded(mixture(name), &plan), small());
        let validated = batch(&imported.graph, &target).unwrap();
        form_compiles(nvrtc, &validated, &target, (form, rows), &["WaveExperts"]);
    }
    let (imported, target) = (wide("experts/gpt-oss-values", None), small());
    let validated = batch(&imported.graph, &target).unwrap();
    form_compiles(nvrtc, &validated, &target, (Form::Chunk, 512), &["WaveExpertsShared"]);
}
