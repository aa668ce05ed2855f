//! Tests that no key of a config is accepted and ignored: every key of every fixture is turned to many values. That takes long, so it is not
//! among the unit tests, which CI does not optimise.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use monobloc::model::config::{ImportError, graph_text, import_config_only, schema_json};
use monobloc::model::graph::ModelGraph;
use serde_json::{Map, Value, json};

use crate::support::fixture;

fn all_fixtures() -> Vec<PathBuf> {
    let groups = ["families", "variants", "experts", "dense", "hybrids"].into_iter();
    let folders = groups.flat_map(|group| std::fs::read_dir(fixture(group)).unwrap());
    folders.map(|entry| entry.unwrap().path()).chain([fixture("tinystories-llama")]).collect()
}

/// The config of a fixture; of a wrapper, that of its text model.
fn config_of(folder: &Path) -> Map<String, Value> {
    let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
    // Python writes a word that is no JSON.
    let lines = text.lines().map(|line| line.replace("  Infinity", "{\"__float__\": \"Infinity\"}"));
    let config: Map<String, Value> = serde_json::from_str(&lines.collect::<String>()).unwrap();
    config.get("text_config").and_then(Value::as_object).cloned().unwrap_or(config)
}

/// The graph of a config alone.
fn graph_of(config: &Map<String, Value>) -> Result<ModelGraph, ImportError> {
    import_config_only(&Value::Object(config.clone()).to_string(), 0).map(|imported| imported.graph)
}

/// The keys that a family knows, and whether it models each.
fn keys_of(class: &str) -> BTreeMap<String, bool> {
    let schema = schema_json();
    let family = schema["families"].as_array().unwrap().iter().find(|family| family["class"] == class);
    let own = family.unwrap_or_else(|| panic!("no family {class}"))["keys"].as_array().unwrap();
    let mut keys = BTreeMap::new();
    // The first entry of a key counts.
    for entry in own.iter().chain(schema["every_family"].as_array().unwrap()) {
        keys.entry(entry["key"].as_str().unwrap().to_string()).or_insert(entry["treatment"] == "modelled");
    }
    keys
}

/// Turns every key of every fixture, and every modelled key that is absent, to many values. What is accepted without
/// any effect on the graph has to be a neutral key, or one of the few listed here with the reason.
#[test]
fn no_key_is_accepted_and_ignored() {
    let values = [
        json!(null),
        json!(true),
        json!(false),
        json!(0),
        json!(1),
        json!(2),
        json!(3),
        json!(48),
        json!(-1),
        json!(0.37),
        json!(1e9),
        json!(u64::MAX),
        json!("silu"),
        json!("gelu"),
        json!("zzz"),
        json!([]),
        json!([1, 0, 1]),
        json!({}),
        json!({"rope_type": "linear", "factor": 3.0}),
        json!({"rope_type": "yarn", "factor": 3.0}),
        json!({"zzz": 1}),
    ];
    let mut accepted = 0;
    let mut wrong = BTreeSet::new();
    for folder in all_fixtures() {
        let config = config_of(&folder);
        let graph = graph_of(&config).unwrap();
        let (class, before) = (graph.family.as_str(), graph_text(&graph));
        let known = keys_of(class);
        let keys: BTreeSet<&str> = config.keys().chain(known.keys()).map(String::as_str).collect();
        for key in keys {
            for value in &values {
                let mut changed = config.clone();
                changed.insert(key.to_string(), value.clone());
                let Ok(graph) = graph_of(&changed) else { continue };
                accepted += 1;
                if value.is_null() {
                    let mut without = config.clone();
                    without.remove(key);
                    let absent = graph_of(&without).map(|graph| graph_text(&graph)).ok();
                    let same = absent.is_some_and(|absent| absent == graph_text(&graph));
                    // A window or a softcap that is null is none, null kv heads are as many as query heads, a null width
                    // follows from others, and a null factor rounds nothing up: whatever the class has where they are absent.
                    let none = [
                        "sliding_window",
                        "attn_logit_softcapping",
                        "final_logit_softcapping",
                        "num_key_value_heads",
                        "mamba_d_ssm",
                        "block_ffn_dim_multiplier",
                    ]
                    .contains(&key);
                    assert!(same || none || !config.contains_key(key), "{}: {key} = null", folder.display());
                    continue;
                }
                let ignored = known.get(key) == Some(&true) && graph_text(&graph) == before;
                let equal = config.get(key).is_some_and(|old| old == value || old.as_f64() == value.as_f64());
                if ignored && !equal && !ineffective(class, key, value, &config) {
                    wrong.insert(format!("{}: {key} = {value} is accepted and changes nothing", folder.display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(accepted > 10_000, "{accepted}");
}

/// Whether a modelled key is meant to have no effect at this value beside the other keys.
fn ineffective(class: &str, key: &str, value: &Value, config: &Map<String, Value>) -> bool {
    let given = |key: &str| config.get(key).is_some_and(|v| !v.is_null());
    let off = |key: &str| config.get(key).is_none_or(|v| v == &json!(false));
    let kind = |key: &str| config.get(key).and_then(|v| v.get("rope_type").or(v.get("type"))).and_then(Value::as_str);
    let trained = ["llama3", "yarn", "longrope"];
    match key {
        key if class == "GraniteMoeHybridForCausalLM" && unread_of_granite(key, config) => true,
        key if class == "NemotronHForCausalLM" && unread_of_nemotron(key, config) => true,
        "intermediate_size" if class == "Lfm2ForCausalLM" => given("block_ff_dim"),
        // Ids outside the vocabulary, and what is no id, count as none.
        "bos_token_id" | "eos_token_id" => true,
        // Absent keys set to the default of the class.
        "attention_bias"
        | "mlp_bias"
        | "use_parallel_residual"
        | "use_qkv_bias"
        | "qk_layernorm"
        | "use_qk_norm"
        | "use_bias"
        | "use_sliding_window"
        | "tie_word_embeddings"
        | "hidden_act"
        | "hidden_activation"
        | "embedding_multiplier"
        | "attention_multiplier"
        | "residual_multiplier"
        | "logits_scaling"
        | "no_rope_layer_interval"
            if !given(key) =>
        {
            true
        }
        // Experts: absent keys set to the default of the class.
        "norm_topk_prob" | "mlp_only_layers" | "decoder_sparse_step" if !given(key) => true,
        // Cohere2-MoE: a softmax over the chosen experts is divided by their sum in any case.
        "norm_topk_prob" => {
            class == "Cohere2MoeForCausalLM" && config.get("expert_selection_fn") != Some(&json!("sigmoid"))
        }
        // The tensors of what predicts further tokens are left out.
        "num_nextn_predict_layers" | "num_mtp_modules" => true,
        // No layer has an MLP.
        "intermediate_size" => ["Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM"].contains(&class),
        "full_attention_interval" => given("layer_types"),
        // Two names of one number.
        "num_experts_per_tok" => config.get("moe_k") == Some(value),
        // Layers that there are not, and steps that meet the same ones.
        "moe_layer_start_index" | "moe_layer_end_index" | "moe_layer_interval" => true,
        "first_k_dense_replace" => given("mlp_layer_types"),
        "prefix_dense_sliding_window_pattern" => given("layer_types"),
        "layer_norm_eps" => class == "Cohere2MoeForCausalLM" && given("rms_norm_eps"),
        // transformers saves a default beside `rope_parameters`, which have the base.
        "rope_theta" if class == "Cohere2MoeForCausalLM" => given("rope_parameters"),
        "rotary_dim" => config["rope_parameters"].get("partial_rotary_factor").is_some(),
        "sliding_window" if class == "Dots1ForCausalLM" => !given("layer_types"),
        // Absent keys set to the default, and what is switched off.
        "route_scale" | "global_attn_every_n_layers" | "mup_enabled" => !given(key) || given("layer_types"),
        // The trained length ends before it, and the factor is given.
        "max_position_embeddings" => kind("rope_scaling") == Some("longrope"),
        "partial_rotary_factor" => value == &json!(1) && !given(key),
        // An empty object is no object.
        "rope_scaling" | "rope_parameters" => value == &json!({}) && !given(key),
        // LFM2: what the list of layers, the other width and the switch leave of no effect.
        "full_attn_idxs" => given("layer_types"),
        // Another multiple may meet the same width.
        "block_multiple_of" => true,
        "tie_embedding" => value == &json!(true) && !given(key),
        "tie_word_embeddings" => given("tie_embedding"),
        // Hybrids: absent keys set to the default of the class.
        "block_auto_adjust_ff_dim" | "mamba_conv_bias" | "use_bias" | "use_conv_bias" | "n_group" | "topk_group"
            if !given(key) =>
        {
            true
        }
        // Of no effect but a note.
        "time_step_min" => true,
        "mamba_expand" => given("mamba_d_ssm") || !given(key),
        "mamba_norm_before_gate" => config.get("mamba_rms_norm") == Some(&json!(false)) || !given(key),
        // Only every second layer before it slides in Qwen2-MoE.
        "max_window_layers" => {
            off("use_sliding_window") || given("layer_types") || class == "Qwen2MoeForCausalLM" && value == &json!(1)
        }
        "sliding_window"
            if [
                "Qwen2ForCausalLM",
                "Qwen3ForCausalLM",
                "SmolLM3ForCausalLM",
                "Qwen2MoeForCausalLM",
                "Qwen3MoeForCausalLM",
            ]
            .contains(&class) =>
        {
            off("use_sliding_window")
        }
        "sliding_window_pattern" => given("layer_types"),
        "no_rope_layer_interval" => given("no_rope_layers"),
        "use_sliding_window" => class == "SmolLM3ForCausalLM" && !given("sliding_window"),
        // Read by three kinds only.
        "original_max_position_embeddings" => {
            !kind("rope_scaling").or(kind("rope_parameters")).is_some_and(|kind| trained.contains(&kind))
        }
        _ => false,
    }
}

/// Keys of Granite 4 that a config turns off.
fn unread_of_granite(key: &str, config: &Map<String, Value>) -> bool {
    let is = |key: &str, value: Value| config.get(key) == Some(&value);
    let has_mamba = config["layer_types"].as_array().unwrap().iter().any(|word| word != "attention");
    match key {
        "intermediate_size" | "num_experts_per_tok" => is("num_local_experts", json!(0)),
        "rope_theta"
        | "rope_scaling"
        | "rope_parameters"
        | "partial_rotary_factor"
        | "original_max_position_embeddings" => !is("position_embedding_type", json!("rope")),
        _ => key.starts_with("mamba_") && !has_mamba,
    }
}

/// Keys of MLPs and of experts that no block of a Nemotron-H reads.
fn unread_of_nemotron(key: &str, config: &Map<String, Value>) -> bool {
    let pattern = config.get("hybrid_override_pattern").and_then(Value::as_str);
    let has = |letter: char| pattern.is_none_or(|pattern| pattern.contains(letter));
    let of_experts = [
        "n_routed_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "n_group",
        "topk_group",
        "norm_topk_prob",
        "routed_scaling_factor",
    ];
    key == "intermediate_size" && !has('-') || of_experts.contains(&key) && !has('E')
}
