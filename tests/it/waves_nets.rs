//! Tests waves of gated delta nets: which nets have a plan, that a wrong one has no proof, and that a proven one computes its model.

use std::fs;

use computed::executor::{Rows, cached_by, expected, split_states};
use monobloc::ir::op::{Op, Role};
use monobloc::model::config::{Imported, import_config_only};
use monobloc::reference::{Session, argmax};
use monobloc::rows::Shape;
use monobloc::target::Target;
use monobloc::validate::Validated;
use monobloc::waves::{Action, Form, Over, Plan, Share, prove};

use crate::nvrtc::nvrtc;
use crate::skipped;
use crate::support::fixture;
use crate::waves::{
    Ran, breaks, cached, computes, every_form_computes, form_compiles, given, judge_mutants_of, kernel, proven,
    refusal, rows_of, run_kernel, run_steps, run_tail, slot_of, small, tokens, with_tail, worst_position,
};

/// Heads of keys and of values of a net, and their widths.
#[derive(Clone, Copy)]
pub struct Heads {
    keys: u32,
    values: u32,
    key_dim: u32,
    value_dim: u32,
}

/// On the small target two blocks share the columns of a head.
pub const SHARED: Heads = Heads { keys: 2, values: 4, key_dim: 16, value_dim: 32 };
/// There a block has all 64 columns, in two groups of tiles; or 48, in two of three.
const WHOLE: Heads = Heads { keys: 4, values: 8, key_dim: 32, value_dim: 64 };
const ODD: Heads = Heads { keys: 8, values: 8, key_dim: 48, value_dim: 48 };

/// The config of a fixture with attention that tensor cores take, these heads and random weights. `layers`: which have nets.
pub fn hybrid(name: &str, heads: Heads, layers: &[bool]) -> Imported {
    let text = fs::read_to_string(fixture(name).join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    let of = if config["text_config"].is_object() { &mut config["text_config"] } else { &mut config };
    let kinds = layers.iter().map(|net| if *net { "linear_attention" } else { "full_attention" });
    of["layer_types"] = kinds.collect::<Vec<_>>().into();
    for (key, value) in [
        ("num_hidden_layers", layers.len() as u32),
        ("hidden_size", 128),
        ("head_dim", 64),
        ("num_attention_heads", 4),
        ("num_key_value_heads", 2),
        ("max_position_embeddings", 512),
        ("linear_num_key_heads", heads.keys),
        ("linear_num_value_heads", heads.values),
        ("linear_key_head_dim", heads.key_dim),
        ("linear_value_head_dim", heads.value_dim),
    ] {
        of[key] = value.into();
    }
    if of["rope_parameters"].is_object() {
        of["rope_parameters"]["mrope_section"] = vec![6, 5, 5].into();
    }
    // Of experts, columns that end inside 64 of k.
    for key in ["moe_intermediate_size", "shared_expert_intermediate_size"] {
        of.get_mut(key).iter_mut().for_each(|size| **size = 96.into());
    }
    import_config_only(&config.to_string(), 7).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Two nets, then attention over what they give.
fn qwen(heads: Heads) -> Imported {
    hybrid("hybrids/qwen35", heads, &[true, true, false])
}

#[test]
fn a_proven_plan_of_nets_computes_its_model() {
    let ends = hybrid("hybrids/qwen35", SHARED, &[false, true]);
    let whole = hybrid("hybrids/qwen35", WHOLE, &[true, false]);
    for (seed, imported) in [(1, qwen(SHARED)), (2, ends), (3, whole)] {
        for target in [small(), Target::builtin("h200").unwrap()] {
            let validated = kernel(&imported.graph, &target);
            let proven = proven(&validated, &target, Form::Chunk, 512).unwrap_or_else(|refused| panic!("{refused}"));
            // A first chunk with fewer rows than a convolution has past inputs, and one of two blocks.
            computes(&format!("model {seed}"), &imported, &proven, &[2, 142, 150], seed);
        }
    }
}

/// Sequences with one row and with several, then all of them for some steps.
#[test]
fn a_proven_plan_of_steps_of_nets_decides_what_its_model_does() {
    for (seed, rows) in [(1, 32), (2, 64)] {
        let (imported, target) = (qwen(SHARED), small());
        let validated = kernel(&imported.graph, &target);
        let proven = proven(&validated, &target, Form::Steps, rows).unwrap();
        run_steps(&imported, &validated, proven.plan(), seed);
    }
}

#[test]
fn a_tail_after_nets_decides_what_its_model_does() {
    let (imported, target) = (qwen(SHARED), small());
    let validated = kernel(&imported.graph, &target);
    let both = with_tail(&validated, &target, 256, 16).unwrap();
    run_tail(&imported, &both, &tokens(&imported, 150), &[1, 134, 150], 3);
}

/// Mixtures of experts with nets.
pub const MIXTURES: [&str; 2] = ["hybrids/qwen35-moe", "hybrids/qwen3-next"];

#[test]
fn a_proven_plan_of_nets_beside_experts_computes_its_model() {
    for (seed, name) in (0u64..).zip(MIXTURES) {
        let imported = hybrid(name, SHARED, &[true, false]);
        // Of one model two blocks of rows.
        every_form_computes(name, &imported, if seed == 0 { &[2, 133, 150] } else { &[2, 37, 40] }, seed);
    }
}

/// Every form of a launch of the flagship on its target: shared memory has room for experts and nets.
#[test]
fn qwen36_35b_has_every_wave_kernel() {
    let text = fs::read_to_string("manifests/configs/qwen3.6-35b-a3b.json").unwrap();
    let (graph, target) = (import_config_only(&text, 7).unwrap().graph, Target::builtin("h200").unwrap());
    let validated = kernel(&graph, &target);
    for (form, rows) in [(Form::Chunk, 2048), (Form::Steps, 32), (Form::Steps, 64), (Form::Steps, 128)] {
        let proven = proven(&validated, &target, form, rows).unwrap_or_else(|refused| panic!("{form:?}: {refused}"));
        assert!(proven.plan().machine.weights.slots >= 3, "{form:?}: {:?}", proven.plan().machine);
    }
    with_tail(&validated, &target, 2048, 16).unwrap();
}

#[test]
fn nets_that_waves_do_not_have_are_refused_by_name() {
    let target = small();
    // A state that the tail would bring on again.
    let ends = hybrid("hybrids/qwen35", SHARED, &[false, true]);
    assert_eq!(
        refusal(&ends, &target, Form::Tail, 16),
        "the state of `mix.1`: expected one that the chunk has not brought on; a tail would do so a second time"
    );
    let narrow = qwen(Heads { key_dim: 12, ..SHARED });
    assert_eq!(
        refusal(&narrow, &target, Form::Chunk, 256),
        "heads of `mix.0`: expected keys of whole tiles of 16, and values of whole tiles of 8"
    );
    let validated = kernel(&narrow.graph, &target);
    proven(&validated, &target, Form::Steps, 32).unwrap();
}

/// Every wrong plan of nets has no proof, or computes the same.
#[test]
fn a_wrong_plan_of_nets_has_no_proof() {
    let imported = hybrid("hybrids/qwen35", SHARED, &[true, false]);
    for (form, rows, least) in [(Form::Chunk, 256, 500), (Form::Steps, 32, 500)] {
        let mutants = judge_mutants_of("nets", &imported, &small(), form, rows, None);
        assert!(mutants > least, "{mutants} mutants");
    }
    let mixture = hybrid("hybrids/qwen35-moe", SHARED, &[true, false]);
    let mutants = judge_mutants_of("nets and experts", &mixture, &small(), Form::Chunk, 256, None);
    assert!(mutants > 1000, "{mutants} mutants");
}

/// The one division of states of a plan.
fn of_states(plan: &mut Plan) -> &mut monobloc::waves::Division {
    plan.divisions.iter_mut().find(|division| matches!(division.over, Over::States { .. })).expect("states")
}

#[test]
fn a_state_has_one_owner_and_one_order() {
    let (imported, target) = (qwen(SHARED), small());
    let validated = kernel(&imported.graph, &target);
    let of = proven(&validated, &target, Form::Chunk, 256).unwrap();
    let wrong = |name: &str, rule: &str, change: &dyn Fn(&mut Plan)| breaks(&of, &target, name, rule, change);
    let each_mix = |plan: &mut Plan, change: &dyn Fn(&mut Vec<monobloc::waves::Wave>, usize)| {
        let at = plan.waves.iter().position(|wave| matches!(wave.action, Action::Mix { .. })).expect("states");
        change(&mut plan.waves, at);
    };
    wrong("two blocks with the columns of a state", "partition", &|plan| {
        let shares = &mut of_states(plan).shares[1];
        let share = shares[0][0];
        shares[1].push(share);
    });
    wrong("a state that no block brings on", "partition", &|plan| of_states(plan).shares[1][0].clear());
    // The second half of the rows on another SM, and on the same one before the first half.
    let halves = |share: Share| [0, 128].map(|row| Share { row, rows: 128, ..share });
    wrong("rows of a state on two blocks", "partition", &|plan| {
        let shares = &mut of_states(plan).shares[1];
        let [first, second] = halves(shares[0].pop().expect("a share"));
        shares[0].push(first);
        shares[1].push(second);
    });
    wrong("later rows before earlier ones", "partition", &|plan| {
        let shares = &mut of_states(plan).shares[1];
        let [first, second] = halves(shares[0].pop().expect("a share"));
        shares[0].extend([second, first]);
    });
    wrong("states brought on twice", "order", &|plan| {
        each_mix(plan, &|waves, at| waves.insert(at, waves[at].clone()));
    });
    wrong("states before the convolution that reads their inputs", "order", &|plan| {
        each_mix(plan, &|waves, at| waves.swap(at - 1, at));
    });
    wrong("states that do not meet what makes their inputs", "meeting", &|plan| {
        each_mix(plan, &|waves, at| waves[at].meets = false);
    });
    wrong("columns that are no tiles", "order", &|plan| {
        let n = SHARED.values * 8;
        let division = of_states(plan);
        division.over = Over::States { n };
        for (blocks, shares) in (1..).zip(&mut division.shares) {
            shares.iter_mut().for_each(Vec::clear);
            for i in 0..n {
                shares[i as usize % 12].push(Share { row: 0, rows: 128 * blocks, lo: i, hi: i + 1 });
            }
        }
    });
    // Operands of whole heads, which two slots do not hold.
    let validated = kernel(&qwen(WHOLE).graph, &target);
    let mut plan = proven(&validated, &target, Form::Chunk, 256).unwrap().plan().clone();
    plan.machine.inputs.slots = 2;
    let violations = prove(plan, &validated, &target).unwrap_err();
    assert!(violations[0].message.ends_with("states that no memory of a block holds"), "{violations:?}");
}

/// States of the nets, or of Mamba-2, of a sequence, from the bytes of the cache.
pub fn states(validated: &Validated, bytes: &[u8], sequence: u32) -> Vec<[Rows; 2]> {
    let schedule = validated.schedule();
    let of = schedule.program.grids.iter().filter_map(|grid| match &grid.op {
        Op::Mix(mix) => Some((mix.state_cols(), mix.value_heads, mix.key_dim * mix.value_dim, grid)),
        Op::Scan(scan) => Some((scan.state_cols(), scan.heads, scan.state * scan.head_dim, grid)),
        _ => None,
    });
    let state = |(cols, heads, matrix, grid): (u32, u32, u32, &monobloc::ir::program::Grid)| {
        let buffer = grid.operand(Role::State).expect("a state").buffer;
        let [cols, heads, matrix] = [cols, heads, matrix].map(|of| of as usize);
        let first =
            schedule.placement[buffer.index()].unwrap() as usize + slot_of(sequence) as usize * heads * cols * 4;
        let value =
            |i: usize| f64::from(f32::from_le_bytes(bytes[first + i * 4..][..4].try_into().expect("four bytes")));
        let head = |head: usize| (0..cols).map(|i| value(head * cols + i)).collect();
        split_states((0..heads).map(head).collect(), matrix)
    };
    of.map(state).collect()
}

/// The largest difference of the states of a layer by their norm.
pub fn state_error(known: &[[Rows; 2]], found: &[[Rows; 2]]) -> f64 {
    let known = &known[known.len() - found.len()..];
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let error = |(known, found): (&Rows, &Rows)| {
        let (known, found) = (known.iter().flatten(), found.iter().flatten());
        let error = norm(&mut known.clone().zip(found).map(|(k, f)| k - f)) / norm(&mut known.copied());
        if error.is_nan() { f64::INFINITY } else { error }
    };
    known.iter().flatten().zip(found.iter().flatten()).map(error).fold(0.0, f64::max)
}

/// Compares the generated text of a chunk kernel, its tables and the pack, run block by block, with the model: chunks of `cuts` rows one after another. Memory of states is not a
/// number before the first launch. False: there is no compiler.
pub fn chunks_compute(name: &str, imported: &Imported, cuts: &[u32]) -> bool {
    let target = small();
    let validated = kernel(&imported.graph, &target);
    let proven = proven(&validated, &target, Form::Chunk, 256).unwrap_or_else(|refused| panic!("{refused}"));
    let shape = Shape::of(&validated.schedule().program).unwrap();
    let page_of: Vec<u32> = (0..shape.blocks()).map(|block| (block * 7 + 5) % shape.pages).collect();
    let text = tokens(imported, cuts.iter().sum());
    let mut at = 0;
    let mut launches = vec![];
    for &cut in cuts {
        launches.push((rows_of(1, at, &given(&text[at as usize..(at + cut) as usize])), 1));
        at += cut;
    }
    let Some(Ran { cache, .. }) = run_kernel(imported, &proven, &launches, &page_of) else {
        return false;
    };
    let known = expected(imported, &text);
    let error = worst_position(&known, &cached(validated.schedule(), &cache, &page_of, text.len()));
    assert!(error < 0.03, "{name}: {error:e}");
    let error = state_error(&known, &states(&validated, &cache, 1));
    assert!(error < 0.02, "{name}: states: {error:e}");
    true
}

/// The same for steps of a kernel for `rows` rows: runs of rows of two texts, one of which takes the place of another one, then both for some steps.
pub fn steps_decide(name: &str, imported: &Imported, rows: u32) -> bool {
    let target = small();
    let validated = kernel(&imported.graph, &target);
    let proven = proven(&validated, &target, Form::Steps, rows).unwrap();
    let shape = Shape::of(&validated.schedule().program).unwrap();
    let blocks = shape.blocks();
    let pages: Vec<u32> = (0..2 * blocks).map(|block| (block * 7 + 5) % shape.pages).collect();
    let texts = [tokens(imported, 9), tokens(imported, 13)[9..].to_vec()];
    let steps = 3;
    let launches = [
        // What another text leaves in the second one's states does not count.
        (rows_of(1, 0, &given(&texts[0][..5])), 1),
        ([rows_of(0, 0, &given(&texts[0][..6])), rows_of(1, 0, &given(&texts[1][..1]))].concat(), 1),
        ([rows_of(1, 1, &given(&texts[1][1..])), rows_of(0, 6, &given(&texts[0][6..]))].concat(), 1),
        ([rows_of(0, 9, &[Err(5)]), rows_of(1, 4, &[Err(2)])].concat(), steps),
    ];
    let Some(Ran { cache, tokens: told, .. }) = run_kernel(imported, &proven, &launches, &pages) else {
        return false;
    };
    let then = &told[told.len() - 8..];
    for (sequence, text) in texts.iter().enumerate() {
        let decided = then.iter().skip(sequence).step_by(2).map(|token| *token as u32);
        let all: Vec<u32> = text.iter().copied().chain(decided).collect();
        let mut session = Session::new(&imported.graph, &imported.weights);
        for (at, &token) in all.iter().enumerate().take(all.len() - 1) {
            let logits = session.step(token);
            if at + 1 >= text.len() {
                let most = logits[argmax(&logits) as usize];
                let least = logits.iter().copied().fold(f32::MAX, f32::min);
                let of = logits[all[at + 1] as usize];
                assert!(most - of < 0.03 * (most - least), "{name}: {of} of {least} to {most}");
            }
        }
        let of_sequence = &pages[sequence * blocks as usize..][..blocks as usize];
        let known = cached_by(&session, &imported.graph);
        let found = cached(validated.schedule(), &cache, of_sequence, text.len() + steps as usize);
        let error = worst_position(&known, &found);
        assert!(error < 0.03, "{name}: {error:e}");
        let error = state_error(&known, &states(&validated, &cache, sequence as u32));
        assert!(error < 0.02, "{name}: states: {error:e}");
    }
    true
}

/// Chunks end within, at and after 32 positions.
#[test]
fn a_generated_kernel_of_nets_computes_its_model() {
    for (heads, cuts) in [(SHARED, vec![2, 64, 84]), (WHOLE, vec![32, 38]), (ODD, vec![1, 40])] {
        if !chunks_compute("hybrids/qwen35", &qwen(heads), &cuts) {
            return skipped("a_generated_kernel_of_nets_computes_its_model", "C++ compiler", "`c++`");
        }
    }
}

#[test]
fn a_generated_kernel_of_steps_of_nets_decides_what_its_model_does() {
    let narrow = Heads { key_dim: 12, value_dim: 24, ..SHARED };
    for (heads, rows) in [(SHARED, 32), (narrow, 64)] {
        if !steps_decide("hybrids/qwen35", &qwen(heads), rows) {
            let name = "a_generated_kernel_of_steps_of_nets_decides_what_its_model_does";
            return skipped(name, "C++ compiler", "`c++`");
        }
    }
}

/// Chunks and steps of heads as Qwen3.5 and OLMo Hybrid have them.
#[test]
fn wave_kernels_of_nets_compile() {
    let nvrtc = nvrtc("wave_kernels_of_nets_compile");
    let qwen35 = Heads { keys: 2, values: 4, key_dim: 128, value_dim: 128 };
    let olmo = Heads { keys: 4, values: 4, key_dim: 96, value_dim: 192 };
    let target = Target::builtin("h200").unwrap();
    for (heads, form, rows) in
        [(qwen35, Form::Chunk, 512), (qwen35, Form::Steps, 32), (olmo, Form::Chunk, 512), (olmo, Form::Steps, 64)]
    {
        let part = if form == Form::Chunk { "WaveMix<" } else { "WaveMixRow<" };
        form_compiles(nvrtc, &kernel(&qwen(heads).graph, &target), &target, (form, rows), &[part]);
    }
    // Beside experts.
    let validated = kernel(&hybrid("hybrids/qwen35-moe", qwen35, &[true, false]).graph, &target);
    for of in [(Form::Chunk, 512), (Form::Steps, 64)] {
        form_compiles(nvrtc, &validated, &target, of, &["WaveMix", "WaveExperts"]);
    }
}
