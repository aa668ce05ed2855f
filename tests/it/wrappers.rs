//! Tests multimodal wrappers: text models in `text_config` are computed as without it, and all that is not text is named.

use std::fs;
use std::path::Path;

use monobloc::model::config::{Imported, graph_text, import, import_config_only, schema_json};
use monobloc::model::graph::Layer;
use monobloc::reference::forward;
use safetensors::tensor::{TensorView, serialize};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Map, Value, json};

use crate::support::{Goldens, fixture, max_difference};

/// How a wrapper lays out its checkpoint: what stands in the place of `model.`, and before the head.
type Layout = (&'static str, &'static str);

const OF_VERSION_4: Layout = ("language_model.model.", "language_model.");
const OF_VERSION_5: Layout = ("model.language_model.", "");

fn object(value: Value) -> Map<String, Value> {
    serde_json::from_value(value).unwrap()
}

fn config_of(name: &str) -> Map<String, Value> {
    serde_json::from_str(&fs::read_to_string(fixture(name).join("config.json")).unwrap()).unwrap()
}

/// The config of a text fixture in a wrapper of the class; what both levels may say stays in the text model.
fn wrapped(name: &str, class: &str, model_type: &str) -> Map<String, Value> {
    let mut text = config_of(name);
    text.remove("architectures");
    object(json!({
        "architectures": [class],
        "model_type": model_type,
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 8},
        "image_token_index": 7,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
    }))
}

/// A checkpoint with the tensors of a text fixture under the names of a layout, and `beside` them others.
fn write(folder: &Path, config: &Map<String, Value>, name: &str, layout: Layout, beside: &[&str]) {
    fs::write(folder.join("config.json"), Value::Object(config.clone()).to_string()).unwrap();
    let bytes = fs::read(fixture(name).join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let renamed = |name: &str| match name.strip_prefix("model.") {
        Some(rest) => format!("{}{rest}", layout.0),
        None => format!("{}{name}", layout.1),
    };
    let mut tensors: Vec<(String, TensorView)> =
        file.tensors().into_iter().map(|(name, tensor)| (renamed(&name), tensor)).collect();
    let patch = [0; 2 * 2 * 3 * 2 * 4];
    let image = |name: &&str| (name.to_string(), TensorView::new(Dtype::BF16, vec![2, 3, 2, 4], &patch).unwrap());
    tensors.extend(beside.iter().map(image));
    fs::write(folder.join("model.safetensors"), serialize(tensors, None).unwrap()).unwrap();
}

fn imported(config: &Map<String, Value>, name: &str, layout: Layout, beside: &[&str]) -> Result<Imported, String> {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), config, name, layout, beside);
    // The files are mapped, and outlive their names.
    import(folder.path()).map_err(|error| error.to_string())
}

#[test]
fn wrapped_text_agrees_with_transformers() {
    let towers = ["vision_tower.patch_embed.weight", "multi_modal_projector.linear.weight"];
    let towers_5 = ["model.vision_tower.patch_embed.weight", "model.multi_modal_projector.linear.weight"];
    let cases = [
        ("families/gemma3", "Gemma3ForConditionalGeneration", "gemma3"),
        ("families/mistral-swa", "Mistral3ForConditionalGeneration", "mistral3"),
        ("families/llama-untied", "LlavaForConditionalGeneration", "llava"),
        ("families/qwen2", "LlavaForConditionalGeneration", "llava"),
    ];
    for (name, class, model_type) in cases {
        let goldens = Goldens::open(name);
        let plain = import(&fixture(name)).unwrap();
        for (layout, beside) in [(OF_VERSION_4, towers), (OF_VERSION_5, towers_5)] {
            let config = wrapped(name, class, model_type);
            let imported = imported(&config, name, layout, &beside).unwrap_or_else(|error| panic!("{name}: {error}"));
            let logits = forward(&imported.graph, &imported.weights, &goldens.ids("input_ids")).concat();
            let difference = max_difference(&logits, &goldens.floats("logits"));
            assert!(difference <= 3e-4, "{name} in {class}: {difference}");
            assert_eq!((imported.graph.bos, &imported.graph.eos), (plain.graph.bos, &plain.graph.eos));
            let (first, second) = (beside[0].split_once("patch").unwrap().0, beside[1].split_once("linear").unwrap().0);
            let note = format!("text alone is computed: 2 tensors of vision (`{second}*`, `{first}*`) are left out");
            assert_eq!(imported.notes.last(), Some(&note));
        }
    }
}

/// transformers 5 ties a head that the files do not have, and takes one that they have.
#[test]
fn files_decide_about_a_head_that_no_config_ties() {
    let mut config = wrapped("families/llama-untied", "LlavaForConditionalGeneration", "llava");
    config["text_config"].as_object_mut().unwrap().remove("tie_word_embeddings");
    let untied = imported(&config, "families/llama-untied", OF_VERSION_4, &[]).unwrap().graph;
    assert_ne!(untied.head.weight.tensor, untied.embed);
    let mut config = wrapped("families/gemma3", "Gemma3ForConditionalGeneration", "gemma3");
    config["text_config"].as_object_mut().unwrap().remove("tie_word_embeddings");
    let tied = imported(&config, "families/gemma3", OF_VERSION_4, &[]).unwrap().graph;
    assert_eq!(tied.head.weight.tensor, tied.embed);
    // The wrapper's word counts, and a head that is missing then is one.
    config.insert("tie_word_embeddings".to_string(), json!(false));
    let error = imported(&config, "families/gemma3", OF_VERSION_4, &[]).unwrap_err();
    assert!(error.contains("tensor `language_model.lm_head.weight` [320, 64] is missing"), "{error}");
}

#[test]
fn end_tokens_of_a_wrapper_come_before_its_texts() {
    let mut config = wrapped("families/gemma3", "Gemma3ForConditionalGeneration", "gemma3");
    let eos = |config: &Map<String, Value>| {
        import_config_only(&Value::Object(config.clone()).to_string(), 0).unwrap().graph.eos
    };
    assert_eq!(eos(&config), [1]);
    config.insert("eos_token_id".to_string(), json!([1, 106]));
    assert_eq!(eos(&config), [1, 106]);
    // generation_config.json lies beside the wrapper, and comes first.
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &config, "families/gemma3", OF_VERSION_5, &[]);
    fs::write(folder.path().join("generation_config.json"), r#"{"eos_token_id": [2, 3], "bos_token_id": 5}"#).unwrap();
    let graph = import(folder.path()).unwrap().graph;
    assert_eq!((graph.bos, graph.eos), (Some(5), vec![2, 3]));
}

/// Changes to a wrapper of Gemma 3, and the one reason against each.
#[test]
fn what_a_wrapper_does_not_know_is_refused_by_name() {
    let refusal = |change: &dyn Fn(&mut Map<String, Value>)| {
        let mut config = wrapped("families/gemma3", "Gemma3ForConditionalGeneration", "gemma3");
        change(&mut config);
        let error = import_config_only(&Value::Object(config).to_string(), 0).unwrap_err().to_string();
        let lines: Vec<String> =
            error.lines().skip(1).map(|line| line.trim_start_matches("  - ").to_string()).collect();
        assert_eq!(lines.len(), 1, "{error}");
        lines[0].clone()
    };
    let outer =
        |key: &'static str, value: Value| refusal(&|config| drop(config.insert(key.to_string(), value.clone())));
    let inner = |key: &'static str, value: Value| {
        refusal(&|config| drop(config["text_config"].as_object_mut().unwrap().insert(key.to_string(), value.clone())))
    };
    assert_eq!(outer("zzz", json!(1)), "key `zzz` is unknown for `Gemma3ForConditionalGeneration`");
    assert_eq!(inner("zzz", json!(1)), "key `text_config.zzz` is unknown for `Gemma3ForCausalLM`");
    assert_eq!(outer("hidden_size", json!(48)), "keys `hidden_size` and `text_config.hidden_size` disagree: 48 and 64");
    assert_eq!(
        inner("final_logit_softcapping", json!(30.0)),
        "key `text_config.final_logit_softcapping`: expected null, found 30.0 (the class of the wrapper does not apply it, that of \
         the text model does)"
    );
    assert_eq!(
        inner("model_type", json!("gemma2")),
        "key `text_config.model_type`: expected `gemma3_text`, the text models that `Gemma3ForConditionalGeneration` is supported \
         with, found \"gemma2\""
    );
    assert_eq!(
        outer("model_type", json!("mistral3")),
        "key `model_type`: expected `gemma3`, the type of `Gemma3ForConditionalGeneration`, found \"mistral3\""
    );
    assert!(inner("sliding_window", json!(-1)).starts_with("key `text_config.sliding_window`: expected"));
    assert!(
        outer("quantization_config", json!({"quant_method": "gptq"}))
            .starts_with("key `quantization_config`: expected null")
    );
    // The same value said twice is no fault, and a tensor that no rule names is.
    let mut config = wrapped("families/gemma3", "Gemma3ForConditionalGeneration", "gemma3");
    config.insert("hidden_size".to_string(), json!(64));
    assert!(imported(&config, "families/gemma3", OF_VERSION_5, &[]).is_ok());
    let error = imported(&config, "families/gemma3", OF_VERSION_5, &["model.audio_tower.weight"]).unwrap_err();
    assert!(
        error.contains("tensor `model.audio_tower.weight` [2, 3, 2, 4] is not used by `Gemma3ForCausalLM`"),
        "{error}"
    );
}

/// Turns every key that wrappers have: one that is accepted and changes nothing is neutral.
#[test]
fn no_key_of_a_wrapper_is_accepted_and_ignored() {
    let config = wrapped("families/gemma3", "Gemma3ForConditionalGeneration", "gemma3");
    let text = |config: &Map<String, Value>| {
        import_config_only(&Value::Object(config.clone()).to_string(), 0)
            .map(|imported| graph_text(&imported.graph))
            .ok()
    };
    let before = text(&config);
    assert!(before.is_some());
    let schema = schema_json();
    let keys = schema["every_wrapper"].as_array().unwrap();
    for key in keys.iter().filter(|key| key["treatment"] == "modelled").map(|key| key["key"].as_str().unwrap()) {
        for value in [json!(3), json!(false), json!("zzz"), json!([]), json!({}), json!({"zzz": 1})] {
            let mut changed = config.clone();
            changed.insert(key.to_string(), value.clone());
            assert!(text(&changed) != before, "{key} = {value} is accepted and changes nothing");
        }
    }
}

/// Text models of published wrappers, key for key: Gemma 3 leaves out what its class fills in.
#[test]
fn published_wrappers_import() {
    let gemma = |text: Value| {
        json!({
            "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
            "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
            "model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
            "vision_config": {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
                "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14,
                "vision_use_head": false},
        })
    };
    let linear = json!({"factor": 8.0, "rope_type": "linear"});
    let mistral = json!({
        "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
        "multimodal_projector_bias": false, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
        "text_config": {"attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
            "initializer_range": 0.02, "intermediate_size": 32768, "max_position_embeddings": 131072,
            "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0, "sliding_window": null, "use_cache": true,
            "vocab_size": 131072},
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "vision_feature_layer": -1,
        "vision_config": {"attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024,
            "image_size": 1540, "initializer_range": 0.02, "intermediate_size": 4096, "model_type": "pixtral",
            "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 24, "patch_size": 14,
            "rope_theta": 10000.0},
    });
    // Qwen3.6, as its configs say it: most keys are neutral.
    let qwen = |class: &str, model_type: &str, own: Value| {
        let mut text = json!({
            "attention_bias": false, "attention_dropout": 0.0, "attn_output_gate": true, "bos_token_id": 248044,
            "dtype": "bfloat16", "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256,
            "hidden_act": "silu", "initializer_range": 0.02, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
            "linear_num_key_heads": 16, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144, "model_type": format!("{model_type}_text"), "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": false, "output_gate_type": "swish", "pad_token_id": null,
            "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6,
            "rope_parameters": {"mrope_interleaved": true, "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
            "tie_word_embeddings": false, "use_cache": true, "vocab_size": 248320,
        });
        text.as_object_mut().unwrap().extend(object(own));
        json!({"architectures": [class], "image_token_id": 248056, "model_type": model_type, "text_config": text,
            "tie_word_embeddings": false, "transformers_version": "5.6.2", "video_token_id": 248057,
            "vision_config": {"depth": 27, "model_type": model_type}, "vision_end_token_id": 248054,
            "vision_start_token_id": 248053})
    };
    let dense = json!({"hidden_size": 5120, "intermediate_size": 17408, "linear_num_value_heads": 48,
        "num_attention_heads": 24, "num_hidden_layers": 64, "num_key_value_heads": 4});
    let experts = json!({"hidden_size": 2048, "linear_num_value_heads": 32, "moe_intermediate_size": 512,
        "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40,
        "num_key_value_heads": 2, "output_router_logits": false, "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512});
    let cases = [
        (qwen("Qwen3_5ForConditionalGeneration", "qwen3_5", dense), 26_895_998_464, 0),
        (qwen("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", experts), 34_660_610_688, 0),
        (
            gemma(json!({"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                "num_hidden_layers": 34, "rope_scaling": linear, "sliding_window": 1024})),
            3_880_263_168,
            29,
        ),
        (
            gemma(
                json!({"head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text",
                "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16,
                "query_pre_attn_scalar": 168, "rope_scaling": linear, "sliding_window": 1024}),
            ),
            27_009_346_304_u64,
            52,
        ),
        (mistral, 23_572_403_200, 0),
    ];
    for (config, parameters, windows) in cases {
        let graph = import_config_only(&config.to_string(), 0).unwrap_or_else(|error| panic!("{error}")).graph;
        assert_eq!(graph.parameter_count(), parameters, "{config}");
        assert_eq!(
            graph.layers.iter().filter_map(Layer::attention).filter(|attention| attention.window.is_some()).count(),
            windows,
            "{config}"
        );
    }
}
