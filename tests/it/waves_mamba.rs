//! Tests waves of Mamba-2: which models have a plan, that a wrong one has no proof, and that a proven one and its generated text compute their model.

use std::fs;

use monobloc::model::config::{Imported, import_config_only};
use monobloc::target::Target;
use monobloc::waves::{Action, Form, Plan};

use crate::nvrtc::nvrtc;
use crate::skipped;
use crate::support::fixture;
use crate::waves::{
    breaks, computes, form_compiles, judge_mutants_of, kernel, proven, refusal, run_steps, run_tail, small, tokens,
    with_tail,
};
use crate::waves_nets::{chunks_compute, steps_decide};

/// A norm of all columns after the gate, biases of products, and groups; the same of groups with plain MLPs, two to a layer apart; factors, and a norm of groups
/// before its gate, with attention side by side; the same without a norm.
const MODELS: [&str; 4] =
    ["hybrids/granite4-dense", "hybrids/nemotron-h-pattern", "hybrids/falcon-h1-norm", "hybrids/falcon-h1"];
/// The same with experts.
pub const MIXTURES: [&str; 2] = ["hybrids/granite4-hybrid", "hybrids/nemotron-h-stacked"];

/// Heads of a state, and their width.
#[derive(Clone, Copy)]
struct Heads {
    heads: u32,
    dim: u32,
    state: u32,
}

/// On the small target two blocks share the columns of a head; in the other case a block has all, in tiles of other numbers.
const SHARED: Heads = Heads { heads: 4, dim: 64, state: 16 };
const WHOLE: Heads = Heads { heads: 8, dim: 32, state: 48 };

/// The config of a fixture with heads of attention that tensor cores take, and random weights: Mamba-2, then attention, then Mamba-2 again.
fn scanning(name: &str, of: Heads) -> Imported {
    let config = config(name, of);
    import_config_only(&config.to_string(), 7).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn config(name: &str, of: Heads) -> serde_json::Value {
    let text = fs::read_to_string(fixture(name).join("config.json")).unwrap();
    // Python's infinity is no JSON.
    let text = text.replace(" Infinity\n", " {\"__float__\": \"Infinity\"}\n");
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    set(name, &mut config, of);
    config
}

/// Sets what the families have of these keys.
fn set(name: &str, config: &mut serde_json::Value, of: Heads) {
    let families: [(&str, serde_json::Value); 3] = [
        ("layer_types", vec!["mamba", "attention", "mamba"].into()),
        ("hybrid_override_pattern", if name.ends_with("stacked") { "ME*EM" } else { "M*-M-" }.into()),
        ("mamba_d_head", of.dim.into()),
    ];
    for (key, value) in families {
        if config.get(key).is_some() {
            config[key] = value;
        }
    }
    for (key, value) in [
        ("hidden_size", 128),
        ("num_hidden_layers", if name.contains("nemotron") { 5 } else { 3 }),
        ("num_attention_heads", 2),
        ("num_key_value_heads", 1),
        ("head_dim", 64),
        ("attention_head_dim", 64),
        ("max_position_embeddings", 512),
        ("mamba_n_heads", of.heads),
        ("mamba_num_heads", of.heads),
        ("mamba_head_dim", of.dim),
        ("mamba_d_ssm", of.heads * of.dim),
        ("mamba_d_state", of.state),
        ("ssm_state_size", of.state),
        ("intermediate_size", 96),
        ("shared_intermediate_size", 96),
        // Units of experts have eight rows if an expert without a gate has this many.
        ("moe_intermediate_size", 1056),
        ("moe_shared_expert_intermediate_size", 96),
    ] {
        if config.get(key).is_some() {
            config[key] = value.into();
        }
    }
    // Gains times these are numbers of fp32.
    for (key, value) in [("ssm_in_multiplier", 1.25), ("attention_in_multiplier", 0.75)] {
        if config.get(key).is_some() {
            config[key] = value.into();
        }
    }
    for (key, value) in [("mamba_n_groups", 2), ("n_groups", 2)] {
        if config.get(key).is_some_and(|of| of.as_u64() > Some(1)) {
            config[key] = value.into();
        }
    }
}

#[test]
fn a_proven_plan_of_mamba_computes_its_model() {
    for (seed, name) in (0u64..).zip(MODELS) {
        let imported = scanning(name, if seed % 2 == 0 { SHARED } else { WHOLE });
        for target in [small(), Target::builtin("h200").unwrap()] {
            let validated = kernel(&imported.graph, &target);
            let proven = proven(&validated, &target, Form::Chunk, 512).unwrap_or_else(|refused| panic!("{refused}"));
            // A first chunk with fewer rows than a convolution has past inputs, and one of two blocks.
            computes(name, &imported, &proven, &[2, 142, 150], seed);
        }
        let target = small();
        let validated = kernel(&imported.graph, &target);
        let of_steps = proven(&validated, &target, Form::Steps, 32).unwrap();
        run_steps(&imported, &validated, of_steps.plan(), seed);
    }
}

#[test]
fn a_proven_plan_of_mamba_beside_experts_computes_its_model() {
    for (seed, name) in (0u64..).zip(MIXTURES) {
        let (imported, target) = (scanning(name, SHARED), small());
        let validated = kernel(&imported.graph, &target);
        let of_chunk =
            proven(&validated, &target, Form::Chunk, 512).unwrap_or_else(|refused| panic!("{name}: {refused}"));
        computes(name, &imported, &of_chunk, if seed == 0 { &[2, 133, 150] } else { &[2, 37, 40] }, seed);
        let of_steps = proven(&validated, &target, Form::Steps, 32).unwrap();
        run_steps(&imported, &validated, of_steps.plan(), seed);
    }
}

/// Where attention is the last layer, a tail has no state.
#[test]
fn a_tail_after_mamba_decides_what_its_model_does() {
    let (imported, target) = (ending_in_attention(MODELS[0]), small());
    let validated = kernel(&imported.graph, &target);
    let both = with_tail(&validated, &target, 256, 16).unwrap();
    run_tail(&imported, &both, &tokens(&imported, 150), &[1, 134, 150], 3);
}

/// As [`scanning`], with attention in the last layer that keeps something.
pub fn ending_in_attention(name: &str) -> Imported {
    let mut config = config(name, SHARED);
    if config.get("layer_types").is_some() {
        config["layer_types"] = vec!["mamba", "attention", "mamba", "attention"].into();
        config["num_hidden_layers"] = 4.into();
    } else {
        config["hybrid_override_pattern"] = "MEM*E".into();
    }
    import_config_only(&config.to_string(), 7).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn mamba_that_waves_do_not_have_is_refused_by_name() {
    let target = small();
    assert_eq!(
        refusal(&scanning(MODELS[0], SHARED), &target, Form::Tail, 16),
        "the state of `scan.2`: expected one that the chunk has not brought on; a tail would do so a second time"
    );
    let narrow = scanning(MODELS[0], Heads { state: 10, ..SHARED });
    assert_eq!(
        refusal(&narrow, &target, Form::Chunk, 256),
        "heads of `scan.0`: expected states of whole tiles of 16, and heads of whole tiles of 8"
    );
    let validated = kernel(&narrow.graph, &target);
    proven(&validated, &target, Form::Steps, 32).unwrap();
}

/// Every wrong plan of Mamba-2 has no proof, or computes the same.
#[test]
fn a_wrong_plan_of_mamba_has_no_proof() {
    let cases = [(0, Form::Chunk, 256), (0, Form::Steps, 32), (1, Form::Chunk, 256), (2, Form::Steps, 32)];
    for (model, form, rows) in cases {
        let imported = scanning(MODELS[model], SHARED);
        let mutants = judge_mutants_of("mamba", &imported, &small(), form, rows, None);
        assert!(mutants > 500, "{mutants} mutants");
    }
}

/// States out of their order, and a norm whose gate or states are others.
#[test]
fn a_norm_of_mamba_has_its_own_states_and_gate() {
    let (imported, target) = (scanning(MODELS[1], SHARED), small());
    let validated = kernel(&imported.graph, &target);
    let of = proven(&validated, &target, Form::Chunk, 256).unwrap();
    let waves = &of.plan().waves;
    let at = |which: fn(&Action) -> bool| waves.iter().position(|wave| which(&wave.action)).expect("a wave");
    let (states, norm) =
        (at(|action| matches!(action, Action::Mix { .. })), at(|action| matches!(action, Action::Gated { .. })));
    let wrong = |name: &str, rule: &str, change: &dyn Fn(&mut Plan)| breaks(&of, &target, name, rule, change);
    wrong("states brought on twice", "order", &|plan| {
        let again = plan.waves[states].clone();
        plan.waves.insert(states, again);
    });
    wrong("a norm before the states", "order", &|plan| plan.waves.swap(states, norm));
    wrong("no norm", "order", &|plan| plan.waves.retain(|wave| *wave != waves[norm]));
    wrong("states that do not meet what makes their inputs", "meeting", &|plan| plan.waves[states].meets = false);
    wrong("a norm that does not meet the states", "meeting", &|plan| plan.waves[norm].meets = false);
}

/// Chunks end within, at and after 32 positions.
#[test]
fn a_generated_kernel_of_mamba_computes_its_model() {
    let cuts = [vec![2, 64, 84], vec![32, 38], vec![1, 40], vec![3, 37]];
    for (at, (name, cuts)) in MODELS.into_iter().zip(cuts).enumerate() {
        let heads = if at % 2 == 0 { SHARED } else { WHOLE };
        if !chunks_compute(name, &scanning(name, heads), &cuts) {
            return skipped("a_generated_kernel_of_mamba_computes_its_model", "C++ compiler", "`c++`");
        }
    }
}

#[test]
fn a_generated_kernel_of_steps_of_mamba_decides_what_its_model_does() {
    let narrow = Heads { dim: 32, state: 10, heads: 8 };
    for (name, heads, rows) in [(MODELS[0], narrow, 32), (MODELS[1], SHARED, 64), (MODELS[3], WHOLE, 32)] {
        if !steps_decide(name, &scanning(name, heads), rows) {
            let name = "a_generated_kernel_of_steps_of_mamba_decides_what_its_model_does";
            return skipped(name, "C++ compiler", "`c++`");
        }
    }
}

/// Chunks and steps of heads as Granite-4.0-H and Nemotron-H have them, with few layers.
#[test]
fn wave_kernels_of_mamba_compile() {
    let nvrtc = nvrtc("wave_kernels_of_mamba_compile");
    let target = Target::builtin("h200").unwrap();
    let granite = Heads { heads: 4, dim: 64, state: 128 };
    for (name, form, rows, template) in [
        (MODELS[0], Form::Chunk, 512, "WaveScan<"),
        (MODELS[0], Form::Steps, 32, "WaveScanRow<"),
        (MODELS[1], Form::Chunk, 512, "WaveGateNorm<"),
        (MODELS[3], Form::Chunk, 512, "WaveScanInputs<"),
        (MODELS[3], Form::Steps, 64, "WaveScanRow<"),
    ] {
        let validated = kernel(&scanning(name, granite).graph, &target);
        form_compiles(nvrtc, &validated, &target, (form, rows), &[template]);
    }
}
