//! The importer refuses what it must, and misses nothing.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::schema::{Entry, Rule};
use super::*;
use crate::dtype::{DType, Precision};
use crate::model::graph::{Layer, Mixer, QueryScale};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn all_fixtures() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = ["families", "variants", "experts", "dense", "hybrids"]
        .iter()
        .flat_map(|group| std::fs::read_dir(fixture(group)).unwrap())
        .map(|entry| entry.unwrap().path())
        .collect();
    folders.push(fixture("tinystories-llama"));
    folders.sort();
    folders
}

fn config_of(folder: &Path) -> Map<String, Value> {
    parse_object(folder, &read_text(&folder.join("config.json"), CONFIG_BYTES_MAX).unwrap()).unwrap()
}

/// Imports a fixture's weights under a changed config.
fn import_changed(folder: &Path, change: impl FnOnce(&mut Map<String, Value>)) -> Result<Imported, ImportError> {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(folder).unwrap().map(|e| e.unwrap()) {
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    let mut config = config_of(folder);
    change(&mut config);
    std::fs::write(dir.path().join("config.json"), Value::Object(config).to_string()).unwrap();
    import(dir.path())
}

fn reasons(error: ImportError) -> Vec<String> {
    match error {
        ImportError::Refused { reasons, .. } => reasons.iter().map(Reason::to_string).collect(),
        other => panic!("{other}"),
    }
}

/// The graph of a config alone.
fn synthetic(config: &Map<String, Value>) -> Result<ModelGraph, ImportError> {
    import_config_only(&Value::Object(config.clone()).to_string(), 0).map(|imported| imported.graph)
}

/// A fixture, a key of its config, another value, and what the message has to say of it.
type Unsupported = (&'static str, &'static str, Value, &'static str);

#[track_caller]
fn refused(cases: impl IntoIterator<Item = Unsupported>) {
    for (name, key, value, expected) in cases {
        let result = import_changed(&fixture(name), |config| {
            config.insert(key.to_string(), value.clone());
        });
        match result {
            Ok(_) => panic!("{name} with {key} = {value} was imported"),
            Err(error) => {
                let reasons = reasons(error);
                assert!(reasons.iter().any(|r| r.contains(expected)), "{name} {key} = {value}: {reasons:#?}");
            }
        }
    }
}

#[test]
fn unsupported_features_are_refused_by_name() {
    refused([
        (
            "families/llama-untied",
            "attention_bias",
            json!(true),
            "tensor `model.layers.0.self_attn.q_proj.bias` [96] is missing",
        ),
        (
            "families/llama-untied",
            "mlp_bias",
            json!(true),
            "tensor `model.layers.1.mlp.down_proj.bias` [96] is missing",
        ),
        ("families/llama-untied", "tie_word_embeddings", json!(true), "tensor `lm_head.weight` differs from"),
        ("families/llama-gqa", "tie_word_embeddings", json!(false), "tensor `lm_head.weight` [320, 64] is missing"),
        ("families/llama-untied", "hidden_act", json!("relu2"), "key `hidden_act`: expected one of silu"),
        ("families/llama-untied", "hidden_act", json!("quick_gelu"), "found \"quick_gelu\""),
        (
            "families/llama-untied",
            "rope_interleaved",
            json!(true),
            "key `rope_interleaved`: expected false, found true",
        ),
        ("families/llama-untied", "is_llama_config", json!(false), "key `is_llama_config`: expected true"),
        ("families/llama-untied", "partial_rotary_factor", json!(0.5), "key `partial_rotary_factor`: expected 1"),
        (
            "families/llama-untied",
            "quantization_config",
            json!({"quant_method": "exl2"}),
            "method `exl2` is not supported: expected compressed-tensors",
        ),
        ("families/llama-untied", "add_cross_attention", json!(true), "key `add_cross_attention`"),
        ("families/llama-untied", "is_encoder_decoder", json!(true), "key `is_encoder_decoder`"),
        ("families/llama-untied", "chunk_size_feed_forward", json!(64), "key `chunk_size_feed_forward`"),
        ("families/llama-untied", "pruned_heads", json!({"0": [1]}), "key `pruned_heads`: expected an empty value"),
        (
            "families/llama-untied",
            "sliding_window",
            json!(16),
            "key `sliding_window` is unknown for `LlamaForCausalLM`",
        ),
        ("families/llama-untied", "layer_types", json!(["full_attention"]), "key `layer_types` is unknown"),
        ("families/llama-untied", "num_local_experts", json!(8), "key `num_local_experts` is unknown"),
        ("families/llama-untied", "use_qk_norm", json!(true), "key `use_qk_norm` is unknown"),
    ]);
}

#[test]
fn unsupported_ropes_are_refused_by_name() {
    refused([
        ("families/llama-untied", "rope_scaling", json!({"rope_type": "mrope"}), "key `rope_scaling.rope_type`"),
        ("families/llama-untied", "rope_scaling", json!({"type": "linear"}), "key `rope_scaling.factor` is missing"),
        (
            "families/llama-untied",
            "rope_scaling",
            json!({"type": "linear", "factor": 0}),
            "`rope_scaling.factor`: expected a number above 0",
        ),
        (
            "families/llama-untied",
            "rope_scaling",
            json!({"type": "linear", "rope_type": "yarn", "factor": 2}),
            "disagree: `yarn` and `linear`",
        ),
        (
            "families/llama-untied",
            "rope_scaling",
            json!({"type": "dynamic", "factor": 2, "alpha": 1000}),
            "`rope_scaling.alpha`",
        ),
        (
            "families/llama-untied",
            "rope_scaling",
            json!({"type": "linear", "factor": 2, "rope_theta": 7}),
            "`rope_scaling.rope_theta` and `rope_theta` disagree",
        ),
        ("families/llama-untied", "rope_scaling", json!("linear"), "key `rope_scaling`: expected null or an object"),
        (
            "families/llama-untied",
            "rope_parameters",
            json!({"full_attention": {"rope_theta": 1.5}}),
            "parameters per layer type",
        ),
        (
            "families/llama-rope-llama3",
            "rope_parameters",
            json!({"rope_theta": 1.5}),
            "`rope_scaling` and `rope_parameters` disagree",
        ),
        ("families/llama-rope-llama3", "original_max_position_embeddings", json!(64), "disagree: 64 and 32"),
    ]);
}

#[test]
fn impossible_sizes_and_unknown_classes_are_refused_by_name() {
    refused([
        (
            "families/llama-untied",
            "num_key_value_heads",
            json!(4),
            "key `num_key_value_heads`: expected a divisor of 6",
        ),
        ("families/llama-untied", "head_dim", json!(15), "expected an even number of rotated dimensions"),
        (
            "families/llama-untied",
            "num_hidden_layers",
            json!(3),
            "tensor `model.layers.2.input_layernorm.weight` [96] is missing",
        ),
        (
            "families/llama-untied",
            "num_hidden_layers",
            json!(1),
            "tensor `model.layers.1.input_layernorm.weight` [96] is not used",
        ),
        (
            "families/llama-untied",
            "vocab_size",
            json!(385),
            "tensor `lm_head.weight`: expected shape [385, 96], found [384, 96]",
        ),
        (
            "families/llama-untied",
            "rms_norm_eps",
            json!(-1e-5),
            "key `rms_norm_eps`: expected a number above 0, found -0.00001",
        ),
        ("families/llama-untied", "hidden_size", json!("96"), "key `hidden_size`: expected a count from 1 to"),
        ("families/llama-untied", "model_type", json!("mistral"), "keys `architectures` and `model_type` disagree"),
        ("families/llama-untied", "architectures", json!(["LlamaForCausalLM", "X"]), "exactly one class name"),
        (
            "families/llama-untied",
            "architectures",
            json!(["LlamaModel"]),
            "`LlamaModel` is not supported: expected a class that ends in",
        ),
        (
            "families/llama-untied",
            "architectures",
            json!(["DbrxForCausalLM"]),
            "`DbrxForCausalLM` (mixture of experts) is not supported yet",
        ),
        (
            "families/llama-untied",
            "architectures",
            json!(["Idefics3ForConditionalGeneration"]),
            "(multimodal or encoder-decoder)",
        ),
        (
            "families/llama-untied",
            "architectures",
            json!(["XverseForCausalLM"]),
            "`XverseForCausalLM` is not a supported decoder family",
        ),
    ]);
}

#[test]
fn unsupported_values_of_mistral_qwen_and_phi_are_refused_by_name() {
    refused([
        ("families/mistral-swa", "attention_bias", json!(true), "key `attention_bias`: expected false"),
        ("families/mistral-swa", "layer_types", json!(["full_attention"]), "key `layer_types` is unknown"),
        ("families/mistral-swa", "sliding_window", json!(0), "key `sliding_window`: expected null or a count"),
        ("variants/ministral", "sliding_window", json!(null), "keys `layer_types` and `sliding_window` disagree"),
        ("variants/ministral", "layer_types", json!(["full_attention"]), "key `layer_types`: expected 3 entries"),
        (
            "variants/ministral",
            "layer_types",
            json!(["full_attention", "chunked_attention", "full_attention"]),
            "key `layer_types`",
        ),
        (
            "families/qwen2",
            "layer_types",
            json!(["sliding_attention", "full_attention", "full_attention"]),
            "`sliding_window` disagree",
        ),
        ("families/qwen2", "attention_bias", json!(false), "key `attention_bias` is unknown for `Qwen2ForCausalLM`"),
        ("families/qwen2", "use_mrope", json!(true), "key `use_mrope`: expected false, found true"),
        // Qwen2.5-7B-Instruct-1M: transformers ignores it, other engines split long texts by it.
        (
            "families/qwen2",
            "dual_chunk_attention_config",
            json!({"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}),
            "key `dual_chunk_attention_config` is unknown",
        ),
        // DeepSeek-R1-0528-Qwen3-8B: a factor of the rotary tables that transformers ignores and other engines apply.
        (
            "families/qwen3",
            "rope_parameters",
            json!({"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.8782488562869419}),
            "key `rope_parameters.attn_factor`: expected only the parameters of `yarn`",
        ),
        ("families/qwen3", "attention_bias", json!(true), "q_proj.bias` [128] is missing"),
        ("families/qwen3", "head_dim", json!(null), "key `head_dim`: expected a count from 1 to 1048576, found null"),
        ("families/phi3", "lm_head_bias", json!(true), "key `lm_head_bias`: expected false"),
        ("families/phi3", "interpolate_factor", json!(2), "key `interpolate_factor`: expected 1"),
        (
            "families/phi3",
            "rope_scaling",
            json!({"type": "su", "short_factor": [1.0], "long_factor": [1.0]}),
            "`rope_scaling.short_factor`: expected 8 numbers",
        ),
    ]);
}

#[test]
fn unsupported_values_of_gemma_and_olmo_are_refused_by_name() {
    refused([
        (
            "families/gemma2",
            "use_bidirectional_attention",
            json!(true),
            "key `use_bidirectional_attention`: expected false",
        ),
        ("families/gemma2", "hidden_act", json!("silu"), "key `hidden_act`: expected the value of `hidden_activation`"),
        ("families/gemma2", "sliding_window", json!(null), "keys `layer_types` and `sliding_window` disagree"),
        ("families/gemma2", "query_pre_attn_scalar", json!(0), "key `query_pre_attn_scalar`"),
        ("families/gemma3", "attn_logit_softcapping", json!(50.0), "key `attn_logit_softcapping`: expected null"),
        (
            "families/gemma3",
            "rope_scaling",
            json!({"type": "linear", "factor": 2}),
            "`rope_scaling` and `rope_parameters` disagree",
        ),
        ("variants/gemma3-v4", "_sliding_window_pattern", json!(3), "expected a config that also gives `layer_types`"),
        (
            "variants/gemma3-v4",
            "rope_scaling",
            json!({"type": "linear", "factor": 4.0}),
            "key `rope_scaling.type`: expected the kind as `rope_type`",
        ),
        (
            "variants/gemma3-v4",
            "rope_scaling",
            json!({"rope_type": "yarn", "factor": 4.0, "truncate": false}),
            "key `rope_scaling.truncate`: expected true",
        ),
        (
            "variants/gemma3-yarn",
            "rope_parameters",
            json!({"sliding_attention": {"rope_type": "yarn", "factor": 4.0, "truncate": false}}),
            "key `rope_parameters.sliding_attention.truncate`: expected true",
        ),
        ("variants/ministral", "head_dim", json!(null), "key `head_dim`"),
        ("families/olmo2", "clip_qkv", json!(8.0), "key `clip_qkv` is unknown"),
        ("families/granite", "embedding_multiplier", json!(0.0), "key `embedding_multiplier`"),
    ]);
}

#[test]
fn unsupported_values_of_other_families_are_refused_by_name() {
    refused([
        (
            "families/smollm3",
            "no_rope_layers",
            json!([1, 0, 2, 0]),
            "key `no_rope_layers`: expected 4 entries, each 0 or 1",
        ),
        (
            "families/smollm3",
            "layer_types",
            json!(["sliding_attention", "full_attention", "full_attention", "full_attention"]),
            "disagree",
        ),
        ("families/stablelm", "qk_layernorm", json!(true), "self_attn.q_layernorm.norms.0.weight"),
        (
            "families/stablelm",
            "use_parallel_residual",
            json!(true),
            "tensor `model.layers.0.post_attention_layernorm.bias` [64] is not used",
        ),
        (
            "families/stablelm",
            "use_qkv_bias",
            json!(false),
            "tensor `model.layers.0.self_attn.k_proj.bias` [32] is not used",
        ),
        ("families/stablelm", "head_dim", json!(16), "key `head_dim` is unknown"),
        ("families/starcoder2", "mlp_type", json!("gated"), "key `mlp_type`: expected \"default\", found \"gated\""),
        (
            "families/starcoder2",
            "rms_norm_eps",
            json!(1e-4),
            "key `rms_norm_eps`: expected the value of `norm_epsilon`",
        ),
        ("families/starcoder2", "use_bias", json!(false), "is not used by `Starcoder2ForCausalLM`"),
        ("families/gpt-neox", "rope_theta", json!(500), "key `rope_theta`: expected the value of `rotary_emb_base`"),
        ("families/gpt-neox", "partial_rotary_factor", json!(0.5), "expected the value of `rotary_pct`"),
        ("families/gpt-neox", "rotary_pct", json!(0.2), "found 3 of 16"),
        ("variants/cohere", "use_qk_norm", json!(true), "self_attn.q_norm.weight"),
        ("variants/cohere2", "use_qk_norm", json!(true), "key `use_qk_norm`: expected false"),
        ("variants/cohere2", "position_embedding_type", json!("alibi"), "key `position_embedding_type`"),
        (
            "variants/cohere2",
            "layer_switch",
            json!(3),
            "key `layer_switch`: expected the value of `sliding_window_pattern`",
        ),
    ]);
}

#[test]
fn a_refusal_names_every_reason() {
    let error = import_changed(&fixture("families/qwen2"), |config| {
        config.insert("rope_thetta".to_string(), json!(1e6));
        config.insert("my_experts".to_string(), json!(8));
        config.insert("hidden_act".to_string(), json!("mish"));
        config.insert("rms_norm_eps".to_string(), json!("small"));
        config.insert("num_key_value_heads".to_string(), json!(3));
        config.insert("chunk_size_feed_forward".to_string(), json!(1));
    });
    let error = error.unwrap_err();
    let fault = Fault::from(ImportError::Refused { place: "model".to_string(), reasons: vec![] });
    assert_eq!(fault.tier, crate::error::Tier::Input);
    let mut found = reasons(error);
    found.sort();
    assert_eq!(
        found,
        [
            "key `chunk_size_feed_forward`: expected 0, found 1 (chunked feed-forward is not supported)",
            "key `hidden_act`: expected one of silu, swish, gelu, gelu_python, gelu_new, gelu_fast, gelu_pytorch_tanh, \
             relu, found \"mish\"",
            "key `my_experts` is unknown for `Qwen2ForCausalLM`",
            "key `num_key_value_heads`: expected a divisor of 4 query heads, found 3",
            "key `rms_norm_eps`: expected a number above 0, found \"small\"",
            "key `rope_thetta` is unknown for `Qwen2ForCausalLM`; did you mean `rope_theta`?",
        ]
    );
    let missing = import_config_only(r#"{"architectures":["LlamaForCausalLM"]}"#, 0).unwrap_err();
    let names = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"];
    assert_eq!(reasons(missing), names.map(|name| format!("key `{name}` is missing")));
}

#[test]
fn other_mixtures_of_experts_are_refused_by_name() {
    for class in ["PhimoeForCausalLM", "DbrxForCausalLM", "Qwen3NextMoeForCausalLM", "JetMoEForCausalLM"] {
        let found = import_config_only(&json!({ "architectures": [class] }).to_string(), 0).unwrap_err();
        assert_eq!(reasons(found), [format!("`{class}` (mixture of experts) is not supported yet")]);
    }
}

#[test]
fn a_refused_class_is_told_what_it_needs() {
    for (class, needs) in [
        ("DeepseekV3ForCausalLM", "(latent attention)"),
        ("Glm4MoeLiteForCausalLM", "(latent attention)"),
        ("GlmMoeDsaForCausalLM", "(latent attention with a sparse index)"),
        ("KimiLinearForCausalLM", "(Kimi's delta attention and latent attention)"),
        ("Gemma4ForConditionalGeneration", "(heads that differ by layer, and keys that are values or shared)"),
        ("Lfm3ForCausalLM", "(a gate for each head, and two rotary tables beside short convolutions)"),
        ("Zamba2ForCausalLM", "(Mamba-2 layers of another kind)"),
        ("bamba", "(Mamba-2 layers of another kind)"),
    ] {
        let key = if class.contains('_') { "model_type" } else { "architectures" };
        let value = if class.contains('_') { json!(class) } else { json!([class]) };
        let found = import_config_only(&json!({ key: value }).to_string(), 0).unwrap_err();
        assert_eq!(reasons(found), [format!("`{class}` {needs} is not supported yet")]);
    }
}

#[test]
fn numbers_that_make_no_mixture_are_refused() {
    let top_k = "num_experts_per_tok";
    refused([
        ("experts/qwen3-moe", "num_experts", json!(0), "key `num_experts`: expected a count from 1 to 4096, found 0"),
        ("experts/qwen3-moe", top_k, json!(9), "`num_experts_per_tok`: expected at most 8, the number of experts"),
        ("experts/qwen3-moe", "num_local_experts", json!(7), "`num_experts` and `num_local_experts` disagree: 8 and 7"),
        ("experts/qwen3-moe", "mlp_only_layers", json!([0.5]), "`mlp_only_layers`: expected a list of whole numbers"),
        (
            "experts/glm46-moe",
            "n_group",
            json!(6),
            "expected a divisor of 6 experts that leaves two for each group, found 6",
        ),
        ("experts/glm46-moe", "n_group", json!(4), "`n_group`: expected a divisor of 6 experts"),
        ("experts/glm46-moe", "topk_group", json!(3), "`topk_group`: expected at most 2, the number of groups"),
        ("experts/glm46-moe", top_k, json!(4), "expected at most the 3 experts of 1 groups, found 4"),
        ("experts/glm46-moe", "scoring_func", json!("softmax"), "key `scoring_func`: expected \"sigmoid\""),
        ("experts/olmoe", "clip_qkv", json!(8.0), "key `clip_qkv`: expected null"),
        ("experts/minimax-m2", "attn_type_list", json!([1, 0, 1]), "`attn_type_list`: expected 1 for every layer"),
        ("experts/hy-v3", "mlp_bias", json!(true), "key `mlp_bias`: expected false"),
        ("experts/ernie45-moe", "moe_norm_min", json!(0.01), "key `moe_norm_min`: expected at most 1e-9"),
        ("experts/cohere2-moe", "expert_selection_fn", json!("relu"), "`expert_selection_fn`: expected one of"),
        (
            "experts/cohere2-moe-sum",
            "rope_scaling",
            json!({ "rope_type": "linear", "factor": 2.0 }),
            "key `rope_scaling`: expected the value of `rope_parameters`",
        ),
        (
            "experts/qwen3-moe-step2",
            "decoder_sparse_step",
            json!(1),
            "tensor `model.layers.0.mlp.gate.weight` [8, 48] is missing",
        ),
    ]);
    let mut large = config_of(&fixture("experts/qwen3-moe"));
    large.extend([("num_experts".to_string(), json!(4096)), ("num_hidden_layers".to_string(), json!(4096))]);
    let found = reasons(synthetic(&large).unwrap_err());
    assert_eq!(found, ["key `num_experts`: expected at most 262144 in all layers together, found 16777216"]);
}

/// transformers saves `rope_theta` beside `rope_parameters`. If a config had none, that is the default of 10000. It counts only where
/// `rope_parameters` has no base.
#[test]
fn rotary_parameters_of_cohere2_moe_come_before_the_base_beside_them() {
    let graph = |change: fn(&mut Map<String, Value>)| {
        let mut config = config_of(&fixture("experts/cohere2-moe"));
        change(&mut config);
        graph_text(&synthetic(&config).unwrap())
    };
    let published = graph(|_| {});
    let other_base = |config: &mut Map<String, Value>| {
        config.insert("rope_theta".to_string(), json!(10_000.0));
    };
    assert_eq!(graph(other_base), published);
    let alone = |config: &mut Map<String, Value>| {
        config.remove("rope_parameters");
    };
    assert_eq!(graph(alone), published);
    let other_base_alone = |config: &mut Map<String, Value>| {
        config.remove("rope_parameters");
        config.insert("rope_theta".to_string(), json!(10_000.0));
    };
    assert_ne!(graph(other_base_alone), published);
}

/// Queries of Ministral 3 grow by the trained length whatever the kind of rotary scaling is.
#[test]
fn ministral3_has_a_trained_length_under_every_kind() {
    for parameters in [json!({ "rope_type": "default" }), json!({ "rope_type": "linear", "factor": 4.0 })] {
        let mut config = config_of(&fixture("dense/ministral3"));
        let mut parameters = parameters.as_object().unwrap().clone();
        let more = json!({ "rope_theta": 1e6, "original_max_position_embeddings": 12, "llama_4_scaling_beta": 0.3 });
        parameters.extend(more.as_object().unwrap().clone());
        config.remove("rope_scaling");
        config.insert("rope_parameters".to_string(), Value::Object(parameters));
        let graph = synthetic(&config).unwrap();
        let Mixer::Attention(attention) = &graph.layers[0].mixer else { panic!("{:?}", graph.layers[0].mixer) };
        assert_eq!(attention.query_scale, Some(QueryScale { beta: 0.3, original: 12 }));
    }
}

/// What predicts further tokens is no part of the model, and is named; a layer more than the config says is refused.
#[test]
fn layers_that_predict_further_tokens_are_left_out() {
    let extra = |index: u32| {
        let dir = tempfile::tempdir().unwrap();
        let folder = fixture("experts/glm46-moe");
        std::fs::copy(folder.join("config.json"), dir.path().join("config.json")).unwrap();
        let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let zeros = [0; 64];
        let name = format!("model.layers.{index}.eh_proj.weight");
        let more = safetensors::tensor::TensorView::new(safetensors::Dtype::BF16, vec![32], &zeros).unwrap();
        let tensors = file.tensors().into_iter().chain([(name, more)]);
        safetensors::serialize_to_file(tensors, None, &dir.path().join("model.safetensors")).unwrap();
        import(dir.path())
    };
    let imported = extra(4).unwrap();
    let plain = import(&fixture("experts/glm46-moe")).unwrap();
    assert_eq!(graph_text(&imported.graph), graph_text(&plain.graph));
    let note = "1 tensors of layers that predict further tokens (MTP) are left out: no logit depends on them";
    assert!(imported.notes.iter().any(|found| found == note), "{:?}", imported.notes);
    let found = reasons(extra(5).unwrap_err());
    assert_eq!(found, ["tensor `model.layers.5.eh_proj.weight` [32] is not used by `Glm4MoeForCausalLM`"]);
}

#[test]
fn unsupported_values_of_hybrids_are_refused_by_name() {
    let limits = "expected [0.0, Infinity]: limits of steps are not supported";
    let infinity = json!({"__float__": "Infinity"});
    refused([
        ("hybrids/granite4-hybrid", "time_step_limit", json!([0.0, 0.1]), limits),
        ("hybrids/falcon-h1", "time_step_limit", json!([0.001, infinity]), limits),
        ("hybrids/nemotron-h", "time_step_limit", json!(null), limits),
        ("hybrids/granite4-hybrid", "mamba_n_groups", json!(3), "expected a divisor of 8 heads, found 3"),
        ("hybrids/granite4-hybrid", "mamba_d_head", json!(4), "heads that make a width of 64 together, found 8 of 4"),
        ("hybrids/granite4-hybrid", "mamba_d_conv", json!(1), "key `mamba_d_conv`: expected at least 2, found 1"),
        ("hybrids/granite4-hybrid", "hidden_act", json!("gelu"), "silu, as the convolution of Mamba-2"),
        ("hybrids/granite4-hybrid", "position_embedding_type", json!("alibi"), "expected `rope`, `nope` or null"),
        ("hybrids/nemotron-h", "tie_word_embeddings", json!(true), "key `tie_word_embeddings`: expected false"),
        ("hybrids/nemotron-h", "moe_latent_size", json!(8), "experts in a latent space are not supported"),
        ("hybrids/nemotron-h", "mlp_hidden_act", json!("silu"), "MLPs and experts have a squared ReLU"),
        ("hybrids/nemotron-h", "time_step_min", json!("small"), "key `time_step_min`: expected a number"),
        ("hybrids/nemotron-h", "num_hidden_layers", json!(7), "`layers_block_type` disagree: 7 and 6 blocks"),
        ("hybrids/nemotron-h", "hybrid_override_pattern", json!("MEM-ME"), "they list other blocks"),
        ("hybrids/nemotron-h-pattern", "hybrid_override_pattern", json!("-M*M-"), "found none before block 0"),
        ("hybrids/nemotron-h-pattern", "hybrid_override_pattern", json!("M*--M"), "found none before block 3"),
        ("hybrids/nemotron-h-pattern", "hybrid_override_pattern", json!("M*-MX"), "blocks of M, *, - and E"),
        (
            "hybrids/nemotron-h",
            "attention_head_dim",
            json!(8),
            "`attention_head_dim` and `head_dim` disagree: 8 and 16",
        ),
        ("hybrids/lfm2", "conv_L_cache", json!(1), "key `conv_L_cache`: expected at least 2, found 1"),
        ("hybrids/lfm2", "theta", json!(5.0), "key `theta`: expected the value of `rope_theta`, found 5.0"),
        ("hybrids/lfm2", "block_ffn_dim_multiplier", json!(1e9), "expected a width from 1 to 1048576"),
        ("hybrids/lfm2-moe", "layer_types", json!(null), "key `layer_types` is missing"),
        ("hybrids/falcon-h1", "ssm_multipliers", json!([1.0, 1.0]), "expected null or a list of 5 numbers above 0"),
        ("hybrids/falcon-h1", "mlp_multipliers", json!([1.0, 0.0]), "expected null or a list of 2 numbers above 0"),
        ("hybrids/falcon-h1", "attn_layer_indices", json!([1]), "key `attn_layer_indices`: expected null"),
    ]);
    let imported = import(&fixture("hybrids/nemotron-h")).unwrap();
    assert!(imported.notes.iter().any(|note| note.contains("`time_step_min`")), "{:?}", imported.notes);
}

/// Matrices in blocks of FP8, and the same values in bf16: projections that are rows of one matrix are read from codes as from values.
#[test]
fn projections_of_mamba_are_read_from_codes() {
    use crate::format::{e4m3, to_e4m3};
    use safetensors::Dtype;
    let folder = fixture("hybrids/granite4-dense");
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let scale = 1.0f32 / 64.0;
    let mut codes: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = vec![];
    let mut values = vec![];
    for (name, tensor) in file.tensors() {
        let is_matrix = tensor.shape().len() == 2 && name.starts_with("model.layers.");
        let (shape, data) = (tensor.shape().to_vec(), tensor.data().to_vec());
        if !is_matrix {
            codes.push((name.clone(), tensor.dtype(), shape.clone(), data.clone()));
            values.push((name, tensor.dtype(), shape, data));
            continue;
        }
        let wide = data.as_chunks::<2>().0.iter().map(|value| half::bf16::from_le_bytes(*value).to_f32());
        let own: Vec<u8> = wide.map(|value| to_e4m3(value / scale)).collect();
        let rounded = own.iter().flat_map(|code| half::bf16::from_f32(e4m3(*code) * scale).to_le_bytes()).collect();
        let blocks = [shape[0].div_ceil(128), shape[1].div_ceil(128)];
        let scales = scale.to_le_bytes().repeat(blocks[0] * blocks[1]);
        codes.push((format!("{name}_scale_inv"), Dtype::F32, blocks.to_vec(), scales));
        codes.push((name.clone(), Dtype::F8_E4M3, shape.clone(), own));
        values.push((name, Dtype::BF16, shape, rounded));
    }
    let logits = |tensors: &[(String, Dtype, Vec<usize>, Vec<u8>)], quantised: bool| {
        let dir = tempfile::tempdir().unwrap();
        let mut config = config_of(&folder);
        if quantised {
            let scheme =
                json!({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]});
            config.insert("quantization_config".to_string(), scheme);
        }
        std::fs::write(dir.path().join("config.json"), Value::Object(config).to_string()).unwrap();
        let views = tensors.iter().map(|(name, dtype, shape, data)| {
            (name.as_str(), safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap())
        });
        safetensors::serialize_to_file(views, None, &dir.path().join("model.safetensors")).unwrap();
        let imported = import(dir.path()).unwrap();
        let formats = imported.graph.formats.len();
        (crate::reference::forward(&imported.graph, &imported.weights, &[5, 80, 3, 41]), formats)
    };
    let ((found, coded), (expected, plain)) = (logits(&codes, true), logits(&values, false));
    // Two layers of Mamba-2 and one of attention.
    assert_eq!((coded, plain), (2 * 4 + 6, 0));
    assert_eq!(found, expected);
}

/// The tables and the code are written side by side: each key the code reads is in the table as modelled, or it would
/// be refused as unknown, and each modelled key is read, or it would be accepted and ignored.
#[test]
fn tables_and_code_agree() {
    let mut seen = BTreeSet::new();
    for folder in all_fixtures() {
        let config = config_of(&folder);
        let config = unwrap(&config, None).text;
        let family = family_of(&config).unwrap();
        let mut reader = Reader::new(&config);
        assert!((family.plan)(&mut reader).is_some(), "{}", folder.display());
        let is_modelled = |entry: &&Entry| matches!(entry.rule, Rule::Modelled(_));
        let own: BTreeSet<&str> =
            family.keys.iter().copied().flatten().filter(is_modelled).map(|entry| entry.key).collect();
        let common: BTreeSet<&str> = schema::COMMON.iter().filter(is_modelled).map(|entry| entry.key).collect();
        let elsewhere = BTreeSet::from(["architectures", "model_type", "bos_token_id", "eos_token_id"]);
        let expected: BTreeSet<&str> = own.union(&common).copied().collect();
        let asked: BTreeSet<&str> = reader.asked().union(&elsewhere).copied().collect();
        assert_eq!(asked, expected, "{}", family.class);
        seen.insert(family.class);
        let keys: Vec<&str> = family.keys.iter().copied().flatten().map(|entry| entry.key).collect();
        let unique: BTreeSet<&str> = keys.iter().copied().collect();
        assert_eq!(keys.len(), unique.len(), "{} lists a key twice: {keys:?}", family.class);
    }
    assert_eq!(seen.len(), FAMILIES.len(), "a family has no fixture: {seen:?}");
}

/// Every key that the classes of transformers 4 and 5 have, with the value that they fill in: all of them are known, and
/// to leave one out is to give its default. See tests/fixtures/make_config_classes.py.
#[test]
fn absent_keys_have_the_defaults_of_the_class() {
    let classes = std::fs::read_to_string(fixture("config_classes.json")).unwrap();
    let classes: Map<String, Value> = serde_json::from_str(&classes).unwrap();
    // No class needs these to say what it computes, and ids that a config does not name end no text here.
    let text = |graph: &ModelGraph| {
        let lines: Vec<String> = graph_text(graph).lines().map(str::to_string).collect();
        lines.into_iter().filter(|line| !line.starts_with("bos ")).collect::<Vec<_>>()
    };
    let extents = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"];
    let mut single = 0;
    for (version, families) in &classes {
        let families = families.as_object().unwrap();
        // Families that are newer than version 4 are in one list.
        assert!(families.len() == FAMILIES.len() || version.starts_with('4'), "{version}: {}", families.len());
        for (model_type, keys) in families {
            let mut keys = keys.as_object().unwrap().clone();
            let mut given: Vec<&str> = extents.into_iter().chain(["model_type"]).collect();
            if ["ministral", "hunyuan_v1_dense"].contains(&model_type.as_str()) {
                // Null in the class, which computes nothing with it.
                assert_eq!(keys.insert("head_dim".to_string(), json!(16)), Some(json!(null)));
                given.push("head_dim");
            }
            if model_type == "gpt_oss" {
                // The class fills in YaRN where there is none; here it has to be said.
                given.extend(["rope_parameters", "rope_scaling"]);
            }
            if model_type == "dots1" {
                given.extend(["n_routed_experts", "n_shared_experts", "num_experts_per_tok"]);
            }
            // The class fills in four blocks, whatever the number of layers; the other computes nothing without.
            match model_type.as_str() {
                "nemotron_h" => given.push("layers_block_type"),
                "lfm2_moe" => given.push("layer_types"),
                _ => {}
            }
            let given = |key: &str| given.contains(&key);
            let minimal: Map<String, Value> =
                keys.iter().filter(|(key, _)| given(key)).map(|(key, value)| (key.clone(), value.clone())).collect();
            // The one default on which the versions differ: 5 counts.
            let theta_of_version_4 = version.starts_with('4') && model_type == "cohere";
            let expected = text(&synthetic(&minimal).unwrap());
            let mut full = keys.clone();
            if theta_of_version_4 {
                assert_eq!(full.remove("rope_theta"), Some(json!(10000.0)));
            }
            let found = synthetic(&full).unwrap_or_else(|error| panic!("{version} {model_type}: {error}"));
            assert_eq!(text(&found), expected, "{version} {model_type}");
            for (key, value) in full.iter().filter(|(key, _)| !given(key)) {
                let mut one = minimal.clone();
                one.insert(key.clone(), value.clone());
                // Alone, some keys are refused for want of the key that they repeat.
                let Ok(found) = synthetic(&one) else { continue };
                assert_eq!(text(&found), expected, "{version} {model_type} {key} = {value}");
                single += 1;
            }
        }
    }
    assert!(single > 1000, "{single}");
}

#[test]
fn a_config_alone_gives_the_graph_of_its_checkpoint() {
    for folder in all_fixtures() {
        let imported = import(&folder).unwrap();
        let mut alone = import_config_only(&imported.config_text, 0).unwrap().graph;
        for (t, stored) in alone.tensors.iter_mut().zip(&imported.graph.tensors) {
            t.dtype = stored.dtype;
        }
        // generation_config.json may say more about these, and files may name the head otherwise.
        alone.eos.clone_from(&imported.graph.eos);
        // A config alone has the published layout.
        if folder.to_string_lossy().ends_with("-stacked") {
            continue;
        }
        if folder.ends_with("gpt-neox-sequential") {
            let name = |graph: &ModelGraph| graph.tensor(graph.head.weight.tensor).name.clone();
            let names = [name(&alone), name(&imported.graph)];
            assert!(names.iter().all(|n| ["embed_out.weight", "lm_head.weight"].contains(&n.as_str())), "{names:?}");
            continue;
        }
        if folder.ends_with("olmo-hybrid") {
            // transformers 5 writes norms under other names, and taps in thirds.
            alone.tensors.clone_from(&imported.graph.tensors);
        }
        assert_eq!(graph_text(&alone), graph_text(&imported.graph), "{}", folder.display());
    }
}

/// Rewrites the weight file of a fixture with other tensors.
fn with_tensors(change: impl FnOnce(&mut Vec<(String, safetensors::Dtype, Vec<usize>, Vec<u8>)>)) -> Vec<String> {
    let folder = fixture("families/llama-rope-llama3");
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Vec<_> =
        file.tensors().into_iter().map(|(name, t)| (name, t.dtype(), t.shape().to_vec(), t.data().to_vec())).collect();
    change(&mut tensors);
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(folder.join("config.json"), dir.path().join("config.json")).unwrap();
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (name.clone(), safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    safetensors::serialize_to_file(views, None, &dir.path().join("model.safetensors")).unwrap();
    match import(dir.path()) {
        Ok(_) => Vec::new(),
        Err(error) => reasons(error),
    }
}

#[test]
fn every_tensor_is_used_or_neutral_or_refused() {
    use safetensors::Dtype;
    let embed = "model.embed_tokens.weight";
    let none: [String; 0] = [];
    assert_eq!(with_tensors(|_| {}), none);
    // Rotary buffers of old checkpoints, and a stored copy of the tied embedding, change nothing.
    let neutral = with_tensors(|tensors| {
        let buffer = "model.layers.0.self_attn.rotary_emb.inv_freq".to_string();
        tensors.push((buffer, Dtype::F32, vec![16], vec![0; 64]));
        let copy = tensors.iter().find(|t| t.0 == embed).unwrap().clone();
        tensors.push(("lm_head.weight".to_string(), copy.1, copy.2, copy.3));
    });
    assert_eq!(neutral, none);
    let differs = with_tensors(|tensors| {
        let mut copy = tensors.iter().find(|t| t.0 == embed).unwrap().clone();
        copy.3[17] ^= 1;
        tensors.push(("lm_head.weight".to_string(), copy.1, copy.2, copy.3));
    });
    assert!(differs.len() == 1 && differs[0].contains("tensor `lm_head.weight` differs from"), "{differs:?}");
    let extra = with_tensors(|tensors| {
        tensors.push(("model.layers.0.self_attn.q_norm.weight".to_string(), Dtype::BF16, vec![32], vec![0; 64]));
        tensors.push(("rotary_emb.inv_freq.extra".to_string(), Dtype::BF16, vec![1], vec![0; 2]));
        tensors.push(("model.layers.0.attention.bias".to_string(), Dtype::BOOL, vec![1], vec![0; 1]));
    });
    assert_eq!(
        extra,
        [
            "tensor `model.layers.0.attention.bias` [1] is not used by `LlamaForCausalLM`",
            "tensor `model.layers.0.self_attn.q_norm.weight` [32] is not used by `LlamaForCausalLM`",
            "tensor `rotary_emb.inv_freq.extra` [1] is not used by `LlamaForCausalLM`",
        ]
    );
    let missing = with_tensors(|tensors| tensors.retain(|t| t.0 != "model.layers.1.mlp.up_proj.weight"));
    assert_eq!(missing, ["tensor `model.layers.1.mlp.up_proj.weight` [160, 64] is missing"]);
    let reshaped = with_tensors(|tensors| {
        let t = tensors.iter_mut().find(|t| t.0 == "model.layers.2.mlp.down_proj.weight").unwrap();
        t.2 = vec![160, 64];
    });
    assert_eq!(reshaped, ["tensor `model.layers.2.mlp.down_proj.weight`: expected shape [64, 160], found [160, 64]"]);
    for dtype in [Dtype::I8, Dtype::F8_E4M3, Dtype::F8_E5M2, Dtype::U8] {
        let quantised = with_tensors(|tensors| {
            let t = tensors.iter_mut().find(|t| t.0 == "model.norm.weight").unwrap();
            (t.1, t.3) = (dtype, vec![0; 64]);
        });
        let found = format!("tensor `model.norm.weight`: expected fp32, bf16 or fp16, found {dtype:?}");
        assert_eq!(quantised, [found]);
    }
}

#[test]
fn old_gpt_neox_buffers_are_neutral() {
    let config = config_of(&fixture("families/gpt-neox"));
    let (_, plan, reasons) = resolve(&config);
    assert!(reasons.is_empty());
    let plan = plan.unwrap();
    let graph = assemble(&plan, None, None).graph;
    let neutral = |name: &str| matches!(extra_tensor(name, &plan, false, &graph), Extra::Neutral);
    assert!(neutral("gpt_neox.layers.0.attention.bias") && neutral("gpt_neox.layers.0.attention.masked_bias"));
    assert!(neutral("gpt_neox.layers.0.attention.rotary_emb.inv_freq"));
    assert!(!neutral("gpt_neox.layers.0.attention.dense.bias") && !neutral("gpt_neox.attention.bias2"));
}

#[test]
fn special_tokens_come_from_the_generation_config_first() {
    let graph = import(&fixture("tinystories-llama")).unwrap().graph;
    assert_eq!((graph.bos, graph.eos), (Some(0), vec![1, 3]));
    let mut config = config_of(&fixture("tinystories-llama"));
    config.insert("eos_token_id".to_string(), json!([5, 2, 5, 99999, -1]));
    config.insert("bos_token_id".to_string(), json!(null));
    let graph = synthetic(&config).unwrap();
    assert_eq!((graph.bos, graph.eos), (None, vec![2, 5]));
}

/// Transformers 5 warns of negative ids and goes on to the maximum length; ids beyond the vocabulary never come; a float is cut
/// to an integer, and the rest raises.
#[test]
fn end_tokens_are_exact_or_refused_by_name() {
    let with = |eos: Value| {
        let mut config = config_of(&fixture("tinystories-llama"));
        config.insert("eos_token_id".to_string(), eos);
        import_config_only(&Value::Object(config).to_string(), 0)
    };
    for odd in [
        json!("x"),
        json!("2"),
        json!(true),
        json!(1.0),
        json!(1.5),
        json!({"id": 2}),
        json!([2, [3]]),
        json!([2, null]),
    ] {
        let message = with(odd.clone()).unwrap_err().to_string();
        let expected = "key `eos_token_id` of `config.json`: expected a token id, or a list of them, found ";
        assert!(message.contains(expected), "{odd}: {message}");
    }
    // As text: JSON in Rust has no such number.
    let text = Value::Object(config_of(&fixture("tinystories-llama"))).to_string();
    for odd in ["1180591620717411303424", "18446744073709551615", "1e3"] {
        let changed = text.replacen("\"eos_token_id\":1", &format!("\"eos_token_id\":{odd}"), 1);
        assert_ne!(changed, text);
        assert!(import_config_only(&changed, 0).unwrap_err().to_string().contains("expected a token id"), "{odd}");
    }
    let told = |eos: Value| {
        let imported = with(eos).unwrap();
        (imported.graph.eos, imported.notes.concat())
    };
    for outside in [json!(-1), json!(-9_223_372_036_854_775_808i64), json!(99_999), json!([99_999])] {
        let (eos, note) = told(outside.clone());
        assert!(eos.is_empty() && note.contains("outside the vocabulary of 1024"), "{outside}: {note}");
        assert!(note.contains("a text ends at its maximum length alone"), "{note}");
    }
    let (eos, note) = told(json!([5, 2, 5, 99_999, -1]));
    assert_eq!(eos, [2, 5]);
    assert!(note.starts_with("`eos_token_id` 99999 and 1 more of `config.json`") && !note.contains("alone"), "{note}");
    assert_eq!(told(json!([])), (vec![], String::new()));
    assert_eq!(told(json!((0..64).collect::<Vec<_>>())).0.len(), 64);
    let message = with(json!((0..100_000).map(|i| i % 1000).collect::<Vec<_>>())).unwrap_err().to_string();
    assert!(message.contains("key `eos_token_id` of `config.json` has 1000 ids, expected at most 64"), "{message}");
    assert!(message.len() < 1000, "{message}");
}

/// As `Phi3Config` of transformers 5, which asks every kind but the default for `short_factor` and `long_factor`.
#[test]
fn phi_3_knows_no_scaling_but_longrope() {
    let with = |key: &str, scaling: Value| {
        let mut config = config_of(&fixture("families/phi3"));
        config.insert(key.to_string(), scaling);
        import_config_only(&Value::Object(config).to_string(), 0)
    };
    for scaling in [
        json!({"type": "linear", "factor": 2.0}),
        json!({"rope_type": "dynamic", "factor": 2.0}),
        json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    ] {
        let message = with("rope_scaling", scaling.clone()).unwrap_err().to_string();
        assert!(
            message.contains("default or longrope, the only kinds that `Phi3ForCausalLM` has"),
            "{scaling}: {message}"
        );
    }
    with("rope_scaling", json!({"type": "default"})).unwrap();
}

#[test]
fn code_of_a_checkpoint_is_not_run_and_not_passed_over_in_silence() {
    let mut config = config_of(&fixture("families/phi3"));
    config.insert("auto_map".to_string(), json!({"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}));
    let notes = import_config_only(&Value::Object(config.clone()).to_string(), 0).unwrap().notes.concat();
    for words in ["`auto_map`", "`modeling_phi3.Phi3ForCausalLM`", "is not run", "`trust_remote_code`"] {
        assert!(notes.contains(words), "{words}: {notes}");
    }
    config.insert("auto_map".to_string(), json!(null));
    assert_eq!(import_config_only(&Value::Object(config).to_string(), 0).unwrap().notes.concat(), "");
}

#[test]
fn a_reason_is_a_short_line_whatever_it_names() {
    let mut config = config_of(&fixture("families/llama-gqa"));
    config.insert(format!("a\nerror: b\u{1b}[2J{}", "x".repeat(1 << 20)), json!(1));
    let message = import_config_only(&Value::Object(config).to_string(), 0).unwrap_err().to_string();
    assert!(message.len() < 1000 && message.contains("characters in all)"), "{message}");
    assert_eq!(message.lines().count(), 2, "{message}");
    assert!(message.contains("key `a\\u{a}error: b\\u{1b}[2Jxx"), "{message}");
}

#[test]
fn positions_end_where_rotary_tables_would_change() {
    let limit = |name: &str| {
        let imported = import(&fixture(name)).unwrap();
        (imported.graph.positions_max, imported.notes.concat())
    };
    assert_eq!(limit("families/llama-rope-yarn"), (256, String::new()));
    // dynamic: the base grows beyond max_position_embeddings; longrope: the long factors begin beyond the trained
    // length.
    let (positions, note) = limit("variants/llama-dynamic");
    assert!(positions == 128 && note.contains("`dynamic`") && note.contains("128"), "{positions} {note}");
    for name in ["variants/llama-longrope", "variants/phi3-longrope"] {
        let (positions, note) = limit(name);
        assert!(positions == 32 && note.contains("`longrope`") && note.contains("32"), "{positions} {note}");
    }
}

/// Phi-3's class has a trained length of its own beside the rotary parameters, 4096 where absent, and overrules theirs.
#[test]
fn phi3_reads_the_trained_length_of_its_class() {
    let import = |top: Value, inner: Value| {
        let mut config = config_of(&fixture("variants/phi3-longrope"));
        config.insert("original_max_position_embeddings".to_string(), top);
        config["rope_scaling"]["original_max_position_embeddings"] = inner;
        synthetic(&config)
    };
    let refused = |top, inner| reasons(import(top, inner).unwrap_err()).concat();
    // 128 positions are fewer than 4096, so nothing is scaled and no limit is met.
    let absent = import(json!(null), json!(null)).unwrap();
    assert_eq!((absent.ropes[0].scale, absent.positions_max), (1.0, 128));
    assert_eq!(graph_text(&import(json!(null), json!(4096)).unwrap()), graph_text(&absent));
    let message = refused(json!(null), json!(32));
    assert!(message.ends_with("disagree: 4096, the default of the class, and 32"), "{message}");
    let message = refused(json!(64), json!(32));
    assert!(message.ends_with("disagree: 64 and 32"), "{message}");
    // (1 + ln(128 / 32) / ln 32)^(1/2)
    let given = import(json!(32), json!(32)).unwrap();
    assert_eq!((given.ropes[0].scale, given.positions_max), (1.183_216, 32));
}

/// inv_freq of published rotary settings, computed by transformers 5.23.0 (torch, fp32).
#[test]
fn rotary_frequencies_of_published_models() {
    let base = |extra: Value| {
        let mut config = json!({
            "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 2, "vocab_size": 8, "max_position_embeddings": 131072
        });
        let config = config.as_object_mut().unwrap();
        config.extend(extra.as_object().unwrap().clone());
        synthetic(config).unwrap().ropes.remove(0)
    };
    let llama31 = base(json!({"rope_theta": 500000.0, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}}));
    let yarn = base(json!({"rope_theta": 1000000.0, "rope_scaling": {"factor": 4.0,
        "original_max_position_embeddings": 32768, "type": "yarn"}}));
    for (rope, expected, scale) in [(llama31, LLAMA31_INV_FREQ, 1.0), (yarn, QWEN_YARN_INV_FREQ, QWEN_YARN_SCALE)] {
        assert_eq!((rope.inv_freq.len(), rope.scale), (64, scale));
        for (pair, value) in expected {
            let found = rope.inv_freq[pair];
            // torch's vectorised power may differ from the correctly rounded one by one unit in the last place.
            assert!(found.to_bits().abs_diff(value.to_bits()) <= 2, "pair {pair}: expected {value:e}, found {found:e}");
        }
    }
}

const LLAMA31_INV_FREQ: [(usize, f32); 10] = [
    (0, 1.0),
    (1, 8.146_172e-1),
    (10, 1.286_873_8e-1),
    (25, 5.940_730_7e-3),
    (28, 3.211_446e-3),
    (30, 1.371_893_7e-3),
    (32, 5.248_46e-4),
    (34, 1.785_077_9e-4),
    (36, 7.784_655_5e-5),
    (63, 3.068_926e-7),
];
const QWEN_YARN_INV_FREQ: [(usize, f32); 10] = [
    (0, 1.0),
    (1, 8.058_422e-1),
    (20, 1.333_521_5e-2),
    (25, 4.131_738e-3),
    (28, 1.848_276_6e-3),
    (32, 6.029_411_5e-4),
    (36, 1.798_411_5e-4),
    (40, 4.445_698_5e-5),
    (44, 1.874_735_6e-5),
    (63, 3.102_344_4e-7),
];
const QWEN_YARN_SCALE: f32 = 1.138_629_4;

#[test]
fn hostile_configs_never_panic() {
    let big = json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 1 << 20, "intermediate_size": 1 << 20,
        "num_hidden_layers": 4096, "num_attention_heads": 1 << 19, "vocab_size": 1 << 24,
        "max_position_embeddings": 1 << 27
    });
    let graph = import_config_only(&big.to_string(), 0).unwrap().graph;
    assert!(graph.parameter_count() > 1 << 50);
    assert!(!describe(&graph).is_empty());
    for text in ["", "[]", "{", "null", "{\"architectures\": 7}", "{\"architectures\": [7]}", "{\"model_type\": []}"] {
        assert!(import_config_only(text, 0).is_err(), "{text}");
    }
    let missing = Fault::from(import(Path::new("/nonexistent")).unwrap_err());
    assert!(missing.tier == crate::error::Tier::Input && missing.message.contains("config.json"), "{missing}");
}

#[test]
fn the_schema_table_is_markdown_with_every_family_and_key() {
    let table = schema_table();
    for family in FAMILIES {
        assert!(table.contains(&format!("### `{}`\n\n| key | treatment |", family.class)));
        for entry in family.keys.iter().copied().flatten() {
            assert!(table.contains(&format!("\n| `{}` | ", entry.key)));
        }
    }
    assert!(table.lines().filter(|line| line.starts_with('|')).all(|line| line.matches(" | ").count() == 1));
}

#[test]
fn the_graph_text_is_complete() {
    let text = |change: fn(&mut ModelGraph)| {
        let mut graph = import(&fixture("families/gemma2")).unwrap().graph;
        change(&mut graph);
        graph_text(&graph)
    };
    let plain = text(|_| {});
    let changes: [fn(&mut ModelGraph); 14] = [
        |g| g.positions_max += 1,
        |g| g.embed_scale += 1e-6,
        |g| g.ropes[0].inv_freq[3] += 1e-7,
        |g| g.ropes[0].scale = 2.0,
        |g| g.ropes[0].interleaved = true,
        |g| g.layers[2].attention_mut().unwrap().softcap = None,
        |g| g.layers[2].attention_mut().unwrap().window = Some(9),
        |g| g.layers[1].mlp_post_norm = None,
        |g| g.layers[1].residual_scale = 0.5,
        |g| g.layers[0].parallel = true,
        |g| g.final_norm.eps = 1e-5,
        |g| g.logits_softcap = Some(30.0),
        |g| g.layers[0].attention_mut().unwrap().k.weight.first = 1,
        |g| g.tensors[4].dtype = crate::dtype::DType::F16,
    ];
    for (i, change) in changes.into_iter().enumerate() {
        assert_ne!(text(change), plain, "change {i}");
    }
    let head: Vec<&str> = plain.lines().take(8).collect();
    assert_eq!(
        head[..4],
        ["model Gemma2ForCausalLM", "hidden 64 vocab 320 positions_max 256", "bos 0 eos [1]", "embed w0 scale 8.0",]
    );
    assert!(head[4].starts_with("rope r0 pairs halves scale 1.0 inv_freq [1.0 0.46"), "{}", head[4]);
    assert_eq!(
        head[5..8],
        [
            "layer 0",
            "  branches sequential residual_scale 1.0",
            "  attn_norm rms eps 1e-6 weight w1 offset 1.0 bias none",
        ]
    );
}

#[test]
fn descriptions_are_for_people() {
    let gemma3 = describe(&import(&fixture("families/gemma3")).unwrap().graph);
    assert_eq!(
        gemma3,
        "\
Gemma3ForCausalLM: 159.70k parameters, 3 layers, hidden 64, vocab 320, up to 256 positions
weights stored as bf16, 319.39 kB
embedding, tied to the head, scaled by 8
rope r0: 12 half-split pairs, slowest frequency 3.9528462e-7
rope r1: 12 half-split pairs, slowest frequency 2.1544342e-4
layers 0-1:
  RMS norm (1 + w), attention of 4 query and 1 kv heads, 24 wide (q and k normed over each head, rope r1, window 8, \
scale 0.15811388), RMS norm (1 + w)
  RMS norm (1 + w), gated mlp 160 wide (gelu_tanh), RMS norm (1 + w)
layer 2:
  RMS norm (1 + w), attention of 4 query and 1 kv heads, 24 wide (q and k normed over each head, rope r0, full, \
scale 0.15811388), RMS norm (1 + w)
  RMS norm (1 + w), gated mlp 160 wide (gelu_tanh), RMS norm (1 + w)
then RMS norm (1 + w), head
a step in bf16 reads 319.52 kB of weights and, at context 256, 26.11 kB of cache
a step in fp32 reads 639.04 kB of weights and, at context 256, 52.22 kB of cache
"
    );
    let neox = describe(&import(&fixture("families/gpt-neox")).unwrap().graph);
    let layers: Vec<&str> = neox.lines().skip(4).take(4).collect();
    assert_eq!(
        layers,
        [
            "layers 0-1:",
            "  LayerNorm, attention of 4 query and 4 kv heads, 16 wide (bias on q, k, v, o, rope r0, full, scale 0.25)",
            "  LayerNorm, mlp 256 wide (gelu_erf, bias)",
            "  both branches read the layer's input",
        ]
    );
}

#[test]
fn step_bytes_count_one_row_of_an_untied_embedding() {
    let bytes = |name: &str, weights: DType| {
        let graph = import(&fixture(name)).unwrap().graph;
        let precision = Precision { weights, cache: DType::F32, wire: DType::F32 };
        (graph.parameter_count(), step_weight_bytes(&graph, precision), step_cache_bytes(&graph, precision, 20))
    };
    // Tied: the table is read whole as the head, and one row of it as the embedding.
    let (parameters, weights, _) = bytes("families/llama-gqa", DType::Bf16);
    assert_eq!(weights, 2 * (parameters + 64));
    let (parameters, weights, cache) = bytes("families/mistral-swa", DType::F32);
    assert_eq!(weights, 4 * (parameters - 320 * 64 + 64));
    // Three layers, 8 of 20 positions seen, keys and values of 2 heads of 16.
    assert_eq!(cache, 3 * 8 * 2 * 32 * 4);
}

/// Published configs, key for key: parameters in total, layers with a window, layers without rotation. That of GPT-NeoX-20B
/// is of its first release, that of h2oGPT is what its model card prints.
#[test]
fn published_configs_import() {
    let cases = [
        (SMOLLM2_135M, 134_515_008, 0, 0),
        (LLAMA_3_2_1B, 1_235_814_400, 0, 0),
        (MISTRAL_7B, 7_241_732_096, 32, 0),
        (ALLAM_7B, 7_000_559_616, 0, 0),
        (QWEN_2_5_0_5B, 494_032_768, 0, 0),
        (QWEN_2_5_0_5B_BASE, 494_032_768, 0, 0),
        (QWEN_3_0_6B, 596_049_920, 0, 0),
        (PHI_3_MINI, 3_821_079_552, 32, 0),
        (GEMMA_2_2B, 2_614_341_888, 13, 0),
        (GEMMA_3_1B, 999_885_952, 22, 0),
        (SMOLLM3_3B, 3_075_098_624, 0, 9),
        (PYTHIA_160M, 162_322_944, 0, 0),
        (GPT_NEOX_20B, 20_554_567_680, 0, 0),
        (H2OGPT_12B, 11_846_072_320, 0, 0),
        (STARCODER2_3B, 3_030_371_328, 30, 0),
        (STARCODER2_15B, 15_957_889_024, 40, 0),
        (STABLELM_2_1_6B, 1_644_515_328, 0, 0),
    ];
    for (text, parameters, windows, unrotated) in cases {
        let graph = import_config_only(text, 0).unwrap_or_else(|error| panic!("{error}\n{text}")).graph;
        assert_eq!(graph.parameter_count(), parameters, "{text}");
        assert_eq!(
            graph.layers.iter().filter_map(Layer::attention).filter(|a| a.window.is_some()).count(),
            windows,
            "{text}"
        );
        assert_eq!(
            graph.layers.iter().filter_map(Layer::attention).filter(|a| a.rope.is_none()).count(),
            unrotated,
            "{text}"
        );
    }
}

/// Mixtures of this repository: parameters in total, and in a step of one row without the embedding but one row of it, as gpt-oss counts
/// (21B and 3.6B, 117B and 5.1B); Qwen and OLMoE count the embedding too (3.3B and 1.3B).
#[test]
fn mixtures_have_the_published_numbers_of_parameters() {
    let cases = [
        ("qwen3-30b-a3b", 30_532_122_624, 3_041_869_824),
        ("gpt-oss-20b", 20_914_757_184, 3_608_310_144),
        ("gpt-oss-120b", 116_829_156_672, 5_132_852_352),
        ("mixtral-8x7b", 46_702_792_704, 12_748_857_344),
        ("olmoe-1b-7b", 6_919_161_856, 1_178_996_736),
        ("glm-4.5-air", 106_852_251_264, 12_803_376_768),
    ];
    for (name, parameters, active) in cases {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("manifests/configs/{name}.json"));
        let graph = import_config_only(&read_text(&path, CONFIG_BYTES_MAX).unwrap(), 0).unwrap().graph;
        assert_eq!((graph.parameter_count(), graph.active_parameters()), (parameters, active), "{name}");
        let summary = describe(&graph);
        assert!(summary.contains(" parameters, ") && summary.contains(" in a step, "), "{summary}");
    }
}

/// Bytes of several rows count the experts that they choose on average.
#[test]
fn step_bytes_count_chosen_experts() {
    let graph = import(&fixture("experts/qwen3-moe")).unwrap().graph;
    let layer = graph.layers[0].feed.experts().unwrap();
    let distinct = [1, 2, 1000].map(|rows| layer.distinct(rows));
    assert_eq!((distinct[0], distinct[1]), (2.0, 3.5));
    assert!((distinct[2] - 8.0).abs() < 1e-9);
    let expert: u64 = layer.experts[0].linears().map(|linear| graph.tensor(linear.weight.tensor).count()).sum();
    let bytes = |rows| graph.step_bytes(DType::Bf16, rows);
    let all = 2 * (graph.parameter_count() - 320 * 64);
    assert_eq!(bytes(1), all - 2 * 2 * 6 * expert + 2 * 64);
    assert_eq!(bytes(2), all - 2 * 2 * (8 * expert - 7 * expert / 2) + 2 * 2 * 64);
}

/// Keys that published configs have and the model code does not read, each at a value that one of them gives it.
#[test]
fn keys_that_say_nothing_about_the_model_change_nothing() {
    let pipeline = json!({"text-generation": {"impl": "pipeline.TextGeneration", "pt": "AutoModelForCausalLM"}});
    let cases = [
        ("families/llama-untied", "internal_version", json!("7b-alpha-v2.33.0.30")),
        ("families/qwen2", "use_mrope", json!(false)),
        ("families/starcoder2", "rms_norm_eps", json!(1e-5)),
        ("families/gpt-neox", "num_steps", json!("global_step320000")),
        ("families/gpt-neox", "custom_pipelines", pipeline.clone()),
        ("families/gpt-neox", "custom_pipeline", pipeline),
        ("variants/cohere", "model_max_length", json!(131072)),
        ("families/mistral-swa", "attention_probs_dropout_prob", json!(0.1)),
        ("families/mistral-swa", "hidden_dropout_prob", json!(0.1)),
        ("families/mistral-swa", "type_vocab_size", json!(16)),
    ];
    let imported = |name: &str, key: &str, value: &Value| {
        let imported = import_changed(&fixture(name), |config| {
            config.insert(key.to_string(), value.clone());
        });
        graph_text(&imported.unwrap_or_else(|error| panic!("{name} {key} = {value}: {error}")).graph)
    };
    for (name, key, value) in cases {
        assert!(!config_of(&fixture(name)).contains_key(key), "{name} has {key}");
        let plain = graph_text(&import(&fixture(name)).unwrap().graph);
        assert_eq!(imported(name, key, &value), plain, "{name} {key} = {value}");
    }
    // One formula under three names.
    let [new, fast, tanh] = ["gelu_new", "gelu_fast", "gelu_pytorch_tanh"]
        .map(|act| imported("families/gpt-neox", "hidden_act", &json!(act)));
    assert!(new == fast && fast == tanh && fast.contains("gelu_tanh"), "{fast}");
}

const SMOLLM2_135M: &str = r#"{"architectures":["LlamaForCausalLM"],"attention_bias":false,"attention_dropout":0.0,
"bos_token_id":1,"eos_token_id":2,"hidden_act":"silu","hidden_size":576,"initializer_range":0.041666666666666664,
"intermediate_size":1536,"is_llama_config":true,"max_position_embeddings":8192,"mlp_bias":false,"model_type":"llama",
"num_attention_heads":9,"num_hidden_layers":30,"num_key_value_heads":3,"pad_token_id":2,"pretraining_tp":1,
"rms_norm_eps":1e-05,"rope_interleaved":false,"rope_scaling":null,"rope_theta":100000,"tie_word_embeddings":true,
"torch_dtype":"bfloat16","transformers_version":"4.42.3",
"transformers.js_config":{"kv_cache_dtype":{"q4f16":"float16"}},"use_cache":true,"vocab_size":49152}"#;
const LLAMA_3_2_1B: &str = r#"{"architectures":["LlamaForCausalLM"],"attention_bias":false,"attention_dropout":0.0,
"bos_token_id":128000,"eos_token_id":[128001,128008,128009],"head_dim":64,"hidden_act":"silu","hidden_size":2048,
"initializer_range":0.02,"intermediate_size":8192,"max_position_embeddings":131072,"mlp_bias":false,
"model_type":"llama","num_attention_heads":32,"num_hidden_layers":16,"num_key_value_heads":8,"pretraining_tp":1,
"rms_norm_eps":1e-05,"rope_scaling":{"factor":32.0,"high_freq_factor":4.0,"low_freq_factor":1.0,
"original_max_position_embeddings":8192,"rope_type":"llama3"},"rope_theta":500000.0,"tie_word_embeddings":true,
"torch_dtype":"bfloat16","transformers_version":"4.45.0.dev0","use_cache":true,"vocab_size":128256}"#;
const ALLAM_7B: &str = r#"{"architectures":["LlamaForCausalLM"],"attention_bias":false,"attention_dropout":0.0,
"bos_token_id":1,"eos_token_id":2,"head_dim":128,"hidden_act":"silu","hidden_size":4096,"initializer_range":0.006,
"intermediate_size":11008,"internal_version":"7b-alpha-v2.33.0.30","max_position_embeddings":4096,"mlp_bias":false,
"model_type":"llama","num_attention_heads":32,"num_hidden_layers":32,"num_key_value_heads":32,"pretraining_tp":1,
"rms_norm_eps":1e-05,"rope_scaling":null,"rope_theta":1000000.0,"tie_word_embeddings":false,
"torch_dtype":"bfloat16","transformers_version":"4.53.0","use_cache":true,"vocab_size":64000}"#;
const MISTRAL_7B: &str = r#"{"architectures":["MistralForCausalLM"],"bos_token_id":1,"eos_token_id":2,
"hidden_act":"silu","hidden_size":4096,"initializer_range":0.02,"intermediate_size":14336,
"max_position_embeddings":32768,"model_type":"mistral","num_attention_heads":32,"num_hidden_layers":32,
"num_key_value_heads":8,"rms_norm_eps":1e-05,"rope_theta":10000.0,"sliding_window":4096,
"tie_word_embeddings":false,"torch_dtype":"bfloat16","transformers_version":"4.34.0.dev0","use_cache":true,
"vocab_size":32000}"#;
const QWEN_2_5_0_5B: &str = r#"{"architectures":["Qwen2ForCausalLM"],"attention_dropout":0.0,"bos_token_id":151643,
"eos_token_id":151645,"hidden_act":"silu","hidden_size":896,"initializer_range":0.02,"intermediate_size":4864,
"max_position_embeddings":32768,"max_window_layers":21,"model_type":"qwen2","num_attention_heads":14,
"num_hidden_layers":24,"num_key_value_heads":2,"rms_norm_eps":1e-06,"rope_theta":1000000.0,"sliding_window":32768,
"tie_word_embeddings":true,"torch_dtype":"bfloat16","transformers_version":"4.43.1","use_cache":true,
"use_sliding_window":false,"vocab_size":151936}"#;
const QWEN_2_5_0_5B_BASE: &str = r#"{"architectures":["Qwen2ForCausalLM"],"attention_dropout":0.0,
"bos_token_id":151643,"eos_token_id":151643,"hidden_act":"silu","hidden_size":896,"initializer_range":0.02,
"intermediate_size":4864,"max_position_embeddings":32768,"max_window_layers":24,"model_type":"qwen2",
"num_attention_heads":14,"num_hidden_layers":24,"num_key_value_heads":2,"rms_norm_eps":1e-06,"rope_theta":1000000.0,
"sliding_window":32768,"tie_word_embeddings":true,"torch_dtype":"bfloat16","transformers_version":"4.40.1",
"use_cache":true,"use_mrope":false,"use_sliding_window":false,"vocab_size":151936}"#;
const QWEN_3_0_6B: &str = r#"{"architectures":["Qwen3ForCausalLM"],"attention_bias":false,"attention_dropout":0.0,
"bos_token_id":151643,"eos_token_id":151645,"head_dim":128,"hidden_act":"silu","hidden_size":1024,
"initializer_range":0.02,"intermediate_size":3072,"max_position_embeddings":40960,"max_window_layers":28,
"model_type":"qwen3","num_attention_heads":16,"num_hidden_layers":28,"num_key_value_heads":8,"rms_norm_eps":1e-06,
"rope_scaling":null,"rope_theta":1000000,"sliding_window":null,"tie_word_embeddings":true,"torch_dtype":"bfloat16",
"transformers_version":"4.51.0","use_cache":true,"use_sliding_window":false,"vocab_size":151936}"#;
const PHI_3_MINI: &str = r#"{"_name_or_path":"Phi-3-mini-4k-instruct","architectures":["Phi3ForCausalLM"],
"attention_dropout":0.0,"auto_map":{"AutoConfig":"configuration_phi3.Phi3Config",
"AutoModelForCausalLM":"modeling_phi3.Phi3ForCausalLM"},"bos_token_id":1,"embd_pdrop":0.0,"eos_token_id":32000,
"hidden_act":"silu","hidden_size":3072,"initializer_range":0.02,"intermediate_size":8192,
"max_position_embeddings":4096,"model_type":"phi3","num_attention_heads":32,"num_hidden_layers":32,
"num_key_value_heads":32,"original_max_position_embeddings":4096,"pad_token_id":32000,"resid_pdrop":0.0,
"rms_norm_eps":1e-05,"rope_scaling":null,"rope_theta":10000.0,"sliding_window":2047,"tie_word_embeddings":false,
"torch_dtype":"bfloat16","transformers_version":"4.40.2","use_cache":true,"attention_bias":false,
"vocab_size":32064}"#;
const GEMMA_2_2B: &str = r#"{"architectures":["Gemma2ForCausalLM"],"attention_bias":false,"attention_dropout":0.0,
"attn_logit_softcapping":50.0,"bos_token_id":2,"cache_implementation":"hybrid","eos_token_id":1,
"final_logit_softcapping":30.0,"head_dim":256,"hidden_act":"gelu_pytorch_tanh",
"hidden_activation":"gelu_pytorch_tanh","hidden_size":2304,"initializer_range":0.02,"intermediate_size":9216,
"max_position_embeddings":8192,"model_type":"gemma2","num_attention_heads":8,"num_hidden_layers":26,
"num_key_value_heads":4,"pad_token_id":0,"query_pre_attn_scalar":256,"rms_norm_eps":1e-06,"rope_theta":10000.0,
"sliding_window":4096,"torch_dtype":"float32","transformers_version":"4.42.4","use_cache":true,
"vocab_size":256000}"#;
const GEMMA_3_1B: &str = r#"{"architectures":["Gemma3ForCausalLM"],"attention_bias":false,"attention_dropout":0.0,
"attn_logit_softcapping":null,"bos_token_id":2,"cache_implementation":"hybrid","eos_token_id":[1,106],
"final_logit_softcapping":null,"head_dim":256,"hidden_activation":"gelu_pytorch_tanh","hidden_size":1152,
"initializer_range":0.02,"intermediate_size":6912,"max_position_embeddings":32768,"model_type":"gemma3_text",
"num_attention_heads":4,"num_hidden_layers":26,"num_key_value_heads":1,"pad_token_id":0,
"query_pre_attn_scalar":256,"rms_norm_eps":1e-06,"rope_local_base_freq":10000,"rope_scaling":null,
"rope_theta":1000000,"sliding_window":512,"sliding_window_pattern":6,"torch_dtype":"bfloat16",
"transformers_version":"4.50.0.dev0","use_cache":true,"vocab_size":262144}"#;
const SMOLLM3_3B: &str = r#"{"architectures":["SmolLM3ForCausalLM"],"attention_bias":false,"attention_dropout":0.0,
"bos_token_id":null,"eos_token_id":128001,"hidden_act":"silu","hidden_size":2048,"initializer_range":0.02,
"intermediate_size":11008,"max_position_embeddings":65536,"max_window_layers":28,"mlp_bias":false,
"model_type":"smollm3","no_rope_layer_interval":4,"num_attention_heads":16,"num_hidden_layers":36,
"num_key_value_heads":4,"pad_token_id":128004,"pretraining_tp":2,"rms_norm_eps":1e-06,"rope_scaling":null,
"rope_theta":5000000.0,"sliding_window":null,"torch_dtype":"bfloat16","transformers_version":"4.54.0.dev0",
"use_cache":false,"use_sliding_window":false,"vocab_size":128256}"#;
const PYTHIA_160M: &str = r#"{"architectures":["GPTNeoXForCausalLM"],"bos_token_id":0,"eos_token_id":0,
"hidden_act":"gelu","hidden_size":768,"initializer_range":0.02,"intermediate_size":3072,"layer_norm_eps":1e-05,
"max_position_embeddings":2048,"model_type":"gpt_neox","num_attention_heads":12,"num_hidden_layers":12,
"rotary_emb_base":10000,"rotary_pct":0.25,"tie_word_embeddings":false,"torch_dtype":"float16",
"transformers_version":"4.24.0","use_cache":true,"use_parallel_residual":true,"vocab_size":50304}"#;
const GPT_NEOX_20B: &str = r#"{"architectures":["GPTNeoXForCausalLM"],"attention_probs_dropout_prob":0.1,
"bos_token_id":0,"eos_token_id":2,"hidden_act":"gelu_fast","hidden_dropout_prob":0.1,"hidden_size":6144,
"initializer_range":0.02,"intermediate_size":24576,"layer_norm_eps":1e-05,"max_position_embeddings":2048,
"model_type":"gpt_neox","num_attention_heads":64,"num_hidden_layers":44,"rotary_emb_base":10000,"rotary_pct":0.25,
"tie_word_embeddings":false,"torch_dtype":"float32","transformers_version":"4.19.0.dev0","use_cache":true,
"vocab_size":50432}"#;
const H2OGPT_12B: &str = r#"{"_name_or_path":"h2oai/h2ogpt-oasst1-512-12b","architectures":["GPTNeoXForCausalLM"],
"bos_token_id":0,"classifier_dropout":0.1,"custom_pipelines":{"text-generation":{
"impl":"h2oai_pipeline.H2OTextGenerationPipeline","pt":"AutoModelForCausalLM"}},"eos_token_id":0,"hidden_act":"gelu",
"hidden_size":5120,"initializer_range":0.02,"intermediate_size":20480,"layer_norm_eps":1e-05,
"max_position_embeddings":2048,"model_type":"gpt_neox","num_attention_heads":40,"num_hidden_layers":36,
"rotary_emb_base":10000,"rotary_pct":0.25,"tie_word_embeddings":false,"torch_dtype":"float16",
"transformers_version":"4.30.0.dev0","use_cache":true,"use_parallel_residual":true,"vocab_size":50688}"#;
const STARCODER2_3B: &str = r#"{"architectures":["Starcoder2ForCausalLM"],"attention_dropout":0.1,
"residual_dropout":0.1,"embedding_dropout":0.1,"bos_token_id":0,"eos_token_id":0,"hidden_act":"gelu_pytorch_tanh",
"hidden_size":3072,"initializer_range":0.018042,"intermediate_size":12288,"max_position_embeddings":16384,
"mlp_type":"default","model_type":"starcoder2","norm_epsilon":1e-05,"norm_type":"layer_norm",
"num_attention_heads":24,"num_hidden_layers":30,"num_key_value_heads":2,"rope_theta":999999.4420358813,
"sliding_window":4096,"torch_dtype":"bfloat16","transformers_version":"4.37.0.dev0","use_bias":true,
"use_cache":true,"vocab_size":49152}"#;
const STARCODER2_15B: &str = r#"{"_name_or_path":"/aot/checkpoints/15b/config.json",
"architectures":["Starcoder2ForCausalLM"],"attention_dropout":0.0,"bos_token_id":0,"eos_token_id":0,
"hidden_act":"gelu_pytorch_tanh","hidden_size":6144,"initializer_range":0.01275,"intermediate_size":24576,
"max_position_embeddings":16384,"mlp_type":"default","model_type":"starcoder2","norm_epsilon":1e-05,
"norm_type":"layer_norm","num_attention_heads":48,"num_hidden_layers":40,"num_key_value_heads":4,"rms_norm_eps":1e-05,
"rope_theta":100000,"sliding_window":4096,"tie_word_embeddings":false,"torch_dtype":"float32",
"transformers_version":"4.37.0.dev0","use_bias":true,"use_cache":true,"vocab_size":49152}"#;
const STABLELM_2_1_6B: &str = r#"{"architectures":["StableLmForCausalLM"],"bos_token_id":100257,
"eos_token_id":100257,"hidden_act":"silu","hidden_size":2048,"initializer_range":0.02,"intermediate_size":5632,
"layer_norm_eps":1e-05,"max_position_embeddings":4096,"model_type":"stablelm","num_attention_heads":32,
"num_hidden_layers":24,"num_key_value_heads":32,"partial_rotary_factor":0.25,"rope_theta":10000,
"tie_word_embeddings":false,"torch_dtype":"float16","transformers_version":"4.38.0","use_cache":true,
"use_qkv_bias":true,"vocab_size":100352}"#;
