//! Tests GGUF models: the checkpoints of the families, converted here as `convert_hf_to_gguf.py` of llama.cpp converts them, compute what
//! they compute as safetensors; types of blocks go through lowering, proof and interpreter; what cannot be computed is refused by name.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use half::f16;
use monobloc::candidate::Candidate;
use monobloc::dtype::{DType, Precision};
use monobloc::interp::{Interp, Options};
use monobloc::lower::lower;
use monobloc::model::config::{Imported, import};
use monobloc::pack::pack;
use monobloc::reference;
use monobloc::schedule::schedule;
use monobloc::target::Target;
use monobloc::tokenizer::{Message, Tokenizer};
use monobloc::validate::validate;
use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::cli_support::Place;
use crate::gguf_writer::{Meta, Tensor, Writer};
use crate::support::{fixture, max_difference};

const BF16: u32 = 30;
const F32: u32 = 0;

/// A checkpoint as values: name, extents, fp32.
pub struct Checkpoint {
    pub config: Value,
    pub tensors: Vec<(String, Vec<u64>, Vec<f32>)>,
}

impl Checkpoint {
    /// A checkpoint in one file, with changes of its config.
    pub fn read(name: &str, changes: Value) -> Checkpoint {
        let folder = fixture(name);
        let mut config: Value = serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        let bytes = fs::read(folder.join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let wide = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
            let values = match view.dtype() {
                safetensors::Dtype::BF16 => {
                    view.data().as_chunks().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect()
                }
                safetensors::Dtype::F16 => {
                    view.data().as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect()
                }
                _ => view.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            };
            (name, view.shape().iter().map(|&n| n as u64).collect(), values)
        };
        let mut tensors: Vec<_> = file.tensors().into_iter().map(wide).collect();
        tensors.sort_by(|a: &(String, Vec<u64>, Vec<f32>), b| a.0.cmp(&b.0));
        Checkpoint { config, tensors }
    }

    fn count(&self, key: &str) -> Option<u64> {
        self.config.get(key).and_then(Value::as_u64)
    }

    fn number(&self, key: &str) -> Option<f32> {
        self.config.get(key).and_then(Value::as_f64).map(|x| x as f32)
    }

    /// A rotary parameter, wherever the config has it.
    fn rope(&self, key: &str) -> Option<&Value> {
        let inner = ["rope_parameters", "rope_scaling"].into_iter().find_map(|name| self.config.get(name)?.get(key));
        inner.or(self.config.get(key)).filter(|value| !value.is_null())
    }
}

/// The name of a tensor in GGUF, and whether it is q or k.
fn renamed(name: &str) -> String {
    let whole = [
        ("model.embed_tokens", "token_embd"),
        ("gpt_neox.embed_in", "token_embd"),
        ("model.norm", "output_norm"),
        ("gpt_neox.final_layer_norm", "output_norm"),
        ("lm_head", "output"),
        ("embed_out", "output"),
        ("model.embedding_norm", "token_embd_norm"),
    ];
    let parts = [
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.qkv_proj", "attn_qkv"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("attention.query_key_value", "attn_qkv"),
        ("attention.dense", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.gate_up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("mlp.c_fc", "ffn_up"),
        ("mlp.c_proj", "ffn_down"),
        ("mlp.dense_h_to_4h", "ffn_up"),
        ("mlp.dense_4h_to_h", "ffn_down"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
    ];
    let (module, end) = name.rsplit_once('.').unwrap();
    if let Some((_, to)) = whole.iter().find(|(from, _)| *from == module) {
        return format!("{to}.{end}");
    }
    let rest = module.strip_prefix("model.layers.").or(module.strip_prefix("gpt_neox.layers.")).unwrap();
    let (layer, part) = rest.split_once('.').unwrap();
    let same = part.starts_with("ffn_")
        || part.starts_with("shortconv")
        || matches!(part, "exp_probs_b" | "post_attention_norm" | "attn_sinks");
    let to = parts.iter().find(|(from, _)| *from == part).map(|(_, to)| *to).or(same.then_some(part));
    format!("blk.{layer}.{}.{end}", to.unwrap_or_else(|| panic!("{name}")))
}

/// Experts as the converter stacks them: `ffn_*_exps` with the matrices of all experts of a layer, halves of a fused one apart.
fn stacked_experts(checkpoint: &Checkpoint, arch: &str) -> Checkpoint {
    let mut experts: std::collections::BTreeMap<String, (Vec<u64>, Vec<f32>)> = std::collections::BTreeMap::new();
    let mut tensors = vec![];
    for (name, shape, values) in &checkpoint.tensors {
        let mut put = |name: String, shape: &[u64], values: &[f32]| {
            let (whole, all) = experts.entry(name).or_insert_with(|| (vec![0, shape[0], shape[1]], vec![]));
            whole[0] += 1;
            all.extend(values);
        };
        let Some((begin, rest)) = name.split_once(".mlp.").or(name.split_once(".block_sparse_moe.")) else {
            // What the other families call the norm of the MLP.
            let name = match arch {
                "glm4moe" => name.replace("post_attention_layernorm", "post_attention_norm"),
                _ => name.clone(),
            };
            tensors.push((name, shape.clone(), values.clone()));
            continue;
        };
        match rest.split('.').collect::<Vec<_>>()[..] {
            ["experts", id, part, "weight"] => {
                let part = match part {
                    "gate_proj" | "w1" => "gate",
                    "up_proj" | "w3" => "up",
                    _ => "down",
                };
                // In the order of their ids: there are fewer than ten.
                assert!(id.len() == 1);
                put(format!("{begin}.ffn_{part}_exps.weight"), shape, values);
            }
            [part @ ("input_linear" | "output_linear"), "weight"] => {
                let (rows, cols) = (shape[1] as usize, shape[2] as usize);
                for expert in values.chunks_exact(rows * cols) {
                    if part == "output_linear" {
                        put(format!("{begin}.ffn_down_exps.weight"), &shape[1..], expert);
                        continue;
                    }
                    let half = [shape[1] / 2, shape[2]];
                    let (gate, up) = expert.split_at(rows / 2 * cols);
                    put(format!("{begin}.ffn_gate_exps.weight"), &half, gate);
                    put(format!("{begin}.ffn_up_exps.weight"), &half, up);
                }
            }
            ["gate", "weight"] | ["router", "layer", "weight"] => {
                tensors.push((format!("{begin}.ffn_gate_inp.weight"), shape.clone(), values.clone()));
            }
            ["gate", "e_score_correction_bias"] => {
                tensors.push((format!("{begin}.exp_probs_b.bias"), shape.clone(), values.clone()));
            }
            // The converter leaves out extents of one.
            ["shared_expert_gate", "weight"] => {
                tensors.push((format!("{begin}.ffn_gate_inp_shexp.weight"), shape[1..].to_vec(), values.clone()));
            }
            ["shared_expert" | "shared_experts", part, "weight"] => {
                let part = part.strip_suffix("_proj").unwrap();
                tensors.push((format!("{begin}.ffn_{part}_shexp.weight"), shape.clone(), values.clone()));
            }
            _ => tensors.push((name.clone(), shape.clone(), values.clone())),
        }
    }
    tensors.extend(experts.into_iter().map(|(name, (shape, values))| (name, shape, values)));
    Checkpoint { config: checkpoint.config.clone(), tensors }
}

/// Rows in another order: row `i` of the result is row `of(i)`.
fn permuted(values: &[f32], rows: usize, of: impl Fn(usize) -> usize) -> Vec<f32> {
    let cols = values.len() / rows;
    (0..rows).flat_map(|row| values[of(row) * cols..(of(row) + 1) * cols].to_vec()).collect()
}

fn bytes_of(values: &[f32], kind: u32) -> Vec<u8> {
    match kind {
        BF16 => values.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

/// A checkpoint as `convert_hf_to_gguf.py` writes it.
pub fn converted(checkpoint: &Checkpoint, arch: &str) -> Writer {
    let mut out = Writer::new();
    out.text("general.architecture", arch);
    out.text("general.name", "a test");
    out.set("general.file_type", Meta::U32(32));
    out.set("general.quantization_version", Meta::U32(2));
    metadata(checkpoint, arch, &mut out);
    let heads = checkpoint.count("num_attention_heads").unwrap() as usize;
    let kv_heads = checkpoint.count("num_key_value_heads").unwrap_or(heads as u64) as usize;
    let paired = matches!(arch, "llama" | "granite" | "smollm3" | "granitemoe");
    let mut stacked: std::collections::BTreeMap<String, Vec<Vec<f32>>> = std::collections::BTreeMap::new();
    for (name, shape, values) in &checkpoint.tensors {
        // One gain a head, stacked (StableLM).
        if let Some((begin, _)) = name.split_once(".norms.") {
            let name = begin.replace("q_layernorm", "q_norm").replace("k_layernorm", "k_norm");
            stacked.entry(renamed(&format!("{name}.weight"))).or_default().push(values.clone());
            continue;
        }
        let mut to = renamed(name);
        let (mut shape, mut values) = (shape.clone(), values.clone());
        if matches!(arch, "gemma2" | "gemma3" | "olmo2") && name.contains("post_attention_layernorm") {
            to = to.replace("ffn_norm", "post_attention_norm");
        }
        if arch.starts_with("gemma") && name.ends_with("norm.weight") {
            values.iter_mut().for_each(|x| *x += 1.0);
        }
        let rows = shape[0] as usize;
        if paired && (to.contains("attn_q.") || to.contains("attn_k.")) {
            let own = if to.contains("attn_q.") { heads } else { kv_heads };
            let (dim, half) = (rows / own, rows / own / 2);
            values = permuted(&values, rows, |row| row / dim * dim + row % dim % 2 * half + row % dim / 2);
        }
        if arch == "gptneox" && to.contains("attn_qkv") {
            // (heads, 3, dim) to (3, heads, dim).
            let (dim, third) = (rows / 3 / heads, rows / 3);
            values = permuted(&values, rows, |row| row % third / dim * 3 * dim + row / third * dim + row % dim);
        }
        let exact = values.iter().all(|x| half::bf16::from_f32(*x).to_f32() == *x);
        let kind = if shape.len() > 1 && exact { BF16 } else { F32 };
        let data = bytes_of(&values, kind);
        if to == "output.weight" && checkpoint.config["tie_word_embeddings"] == json!(true) {
            continue;
        }
        if to.contains("_norm.weight") && shape.len() == 2 {
            shape = shape.clone();
            out.tensor(&to, &shape, F32, bytes_of(&values, F32));
            continue;
        }
        out.tensor(&to, &shape, kind, data);
    }
    for (name, heads) in stacked {
        let shape = [heads.len() as u64, heads[0].len() as u64];
        out.tensor(&name, &shape, F32, bytes_of(&heads.concat(), F32));
    }
    factors(checkpoint, &mut out);
    vocabulary(&mut out, checkpoint.count("vocab_size").unwrap() as usize);
    out
}

fn metadata(checkpoint: &Checkpoint, arch: &str, out: &mut Writer) {
    let mut set = |key: &str, value: Option<Meta>| {
        if let Some(value) = value {
            out.set(&format!("{arch}.{key}"), value);
        }
    };
    let count = |key: &str| checkpoint.count(key).map(|n| Meta::U32(n as u32));
    let number = |key: &str| checkpoint.number(key).map(Meta::F32);
    let ahead = checkpoint.count("num_nextn_predict_layers").filter(|_| arch == "glm4moe").unwrap_or(0);
    let blocks = checkpoint.count("num_hidden_layers").map(|layers| Meta::U32((layers + ahead) as u32));
    set("block_count", blocks);
    set("expert_count", count("num_experts").or(count("num_local_experts")).or(count("n_routed_experts")));
    set("expert_used_count", count("num_experts_per_tok"));
    set("expert_feed_forward_length", count("moe_intermediate_size"));
    set("expert_shared_feed_forward_length", count("shared_expert_intermediate_size"));
    if arch == "glm4moe" {
        set("expert_shared_count", count("n_shared_experts"));
        set("leading_dense_block_count", count("first_k_dense_replace"));
        set("expert_group_count", count("n_group"));
        set("expert_group_used_count", count("topk_group"));
        set("expert_weights_scale", number("routed_scaling_factor"));
        set("expert_weights_norm", checkpoint.config["norm_topk_prob"].as_bool().map(Meta::Truth));
        set("expert_gating_func", Some(Meta::U32(2)));
        set("nextn_predict_layers", count("num_nextn_predict_layers"));
    }
    set("context_length", count("max_position_embeddings"));
    set("embedding_length", count("hidden_size"));
    set("feed_forward_length", count("intermediate_size"));
    set("attention.head_count", count("num_attention_heads"));
    set("attention.head_count_kv", count("num_key_value_heads"));
    set("attention.layer_norm_rms_epsilon", number("rms_norm_eps"));
    set("attention.layer_norm_epsilon", number("layer_norm_eps").or(number("norm_epsilon")));
    set("attention.key_length", count("head_dim"));
    set("attention.value_length", count("head_dim"));
    let theta = checkpoint.rope("rope_theta").or(checkpoint.rope("rotary_emb_base")).and_then(Value::as_f64);
    set("rope.freq_base", theta.map(|x| Meta::F32(x as f32)));
    let (hidden, heads) = (checkpoint.count("hidden_size").unwrap(), checkpoint.count("num_attention_heads").unwrap());
    let dim = checkpoint.count("head_dim").unwrap_or(hidden / heads);
    let share = checkpoint.number("partial_rotary_factor").or(checkpoint.number("rotary_pct")).unwrap_or(1.0);
    set("rope.dimension_count", Some(Meta::U32((dim as f32 * share) as u32)));
    set("attention.sliding_window", count("sliding_window").filter(|_| checkpoint.count("sliding_window") != Some(0)));
    set("attn_logit_softcapping", number("attn_logit_softcapping").filter(|_| arch == "gemma2"));
    set("final_logit_softcapping", number("final_logit_softcapping"));
    set("embedding_scale", number("embedding_multiplier"));
    set("attention.scale", number("attention_multiplier"));
    set("residual_scale", number("residual_multiplier"));
    set("logit_scale", number("logits_scaling").or(number("logit_scale")));
    let parallel = checkpoint.config.get("use_parallel_residual").and_then(Value::as_bool);
    set("use_parallel_residual", parallel.map(Meta::Truth));
    if arch == "gemma3" {
        let full = &checkpoint.config["rope_parameters"]["full_attention"];
        let number = |key: &str| full[key].as_f64().map(|x| Meta::F32(x as f32));
        set("rope.freq_base", number("rope_theta"));
        set("rope.scaling.type", Some(Meta::Text("linear".to_string())));
        set("rope.scaling.factor", number("factor"));
        let types = checkpoint.config["layer_types"].as_array().unwrap();
        let slides = types.iter().map(|kind| kind == "sliding_attention").collect();
        set("attention.sliding_window_pattern", Some(Meta::Truths(slides)));
    }
    let kind = checkpoint.rope("rope_type").or(checkpoint.rope("type")).and_then(Value::as_str);
    if let Some(kind) = kind.filter(|kind| matches!(*kind, "linear" | "yarn" | "longrope")) {
        set("rope.scaling.type", Some(Meta::Text(kind.to_string())));
        let number = |key: &str| checkpoint.rope(key).and_then(Value::as_f64);
        set("rope.scaling.factor", number("factor").map(|x| Meta::F32(x as f32)));
        let trained = number("original_max_position_embeddings");
        set("rope.scaling.original_context_length", trained.map(|n| Meta::U32(n as u32)));
        let attention = number("attention_factor").or_else(|| {
            // As the converter computes it for Phi-3.
            let scale = checkpoint.number("max_position_embeddings")? as f64 / trained?;
            (kind == "longrope").then(|| (1.0 + scale.ln() / trained.unwrap_or(1.0).ln()).sqrt())
        });
        set("rope.scaling.attn_factor", attention.map(|x| Meta::F32(x as f32)));
    }
}

/// Tensors of rotary factors.
fn factors(checkpoint: &Checkpoint, out: &mut Writer) {
    let list = |key: &str| {
        let list = checkpoint.rope(key)?.as_array()?;
        Some(list.iter().map(|x| x.as_f64().unwrap() as f32).collect::<Vec<f32>>())
    };
    for (key, name) in [("short_factor", "rope_factors_short.weight"), ("long_factor", "rope_factors_long.weight")] {
        if let Some(list) = list(key) {
            out.tensor(name, &[list.len() as u64], F32, bytes_of(&list, F32));
        }
    }
    if checkpoint.rope("rope_type").and_then(Value::as_str) == Some("llama3") {
        let number = |key: &str| checkpoint.rope(key).and_then(Value::as_f64).unwrap();
        let (factor, trained) = (number("factor"), number("original_max_position_embeddings"));
        let (low, high) = (number("low_freq_factor"), number("high_freq_factor"));
        let dim = checkpoint.count("head_dim").unwrap();
        let of_pair = |pair: u64| {
            let frequency = number("rope_theta").powf(-(2.0 * pair as f64) / dim as f64);
            let length = 2.0 * std::f64::consts::PI / frequency;
            let smooth = (trained / length - low) / (high - low);
            match () {
                () if length < trained / high => 1.0,
                () if length > trained / low => factor,
                () => 1.0 / ((1.0 - smooth) / factor + smooth),
            }
        };
        let list: Vec<f32> = (0..dim / 2).map(|pair| of_pair(pair) as f32).collect();
        out.tensor("rope_freqs.weight", &[dim / 2], F32, bytes_of(&list, F32));
    }
}

/// A byte-level vocabulary without merges, of `count` tokens: bytes, special ones, and padding.
fn vocabulary(out: &mut Writer, count: usize) {
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let own = (0..=u8::MAX).filter(printable).map(char::from);
    let others = (0..=u8::MAX).filter(|byte| !printable(byte)).zip('\u{100}'..).map(|(_, c)| c);
    let mut tokens: Vec<String> = own.chain(others).map(String::from).collect();
    let mut kinds = vec![1; tokens.len()];
    for (token, kind) in [("<s>", 3), ("</s>", 3), ("<|im_end|>", 3), ("<think>", 4)] {
        tokens.push(token.to_string());
        kinds.push(kind);
    }
    while tokens.len() < count {
        tokens.push(format!("[PAD{}]", tokens.len()));
        kinds.push(5);
    }
    tokens.truncate(count);
    kinds.truncate(count);
    let id = |token: &str| tokens.iter().position(|own| own == token).unwrap_or(0) as u32;
    let (bos, eos) = (id("<s>"), id("</s>"));
    out.text("tokenizer.ggml.model", "gpt2");
    out.text("tokenizer.ggml.pre", "smollm");
    out.set("tokenizer.ggml.tokens", Meta::Texts(tokens));
    out.set("tokenizer.ggml.token_type", Meta::I32s(kinds));
    out.set("tokenizer.ggml.merges", Meta::Texts(vec![]));
    out.set("tokenizer.ggml.bos_token_id", Meta::U32(bos));
    out.set("tokenizer.ggml.eos_token_id", Meta::U32(eos));
    out.text(
        "tokenizer.chat_template",
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
    );
}

/// The model in a folder of its own, by the name of the file.
pub fn imported(writer: &Writer) -> Result<Imported, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    fs::write(&path, writer.bytes()).unwrap();
    import(&path).map_err(|error| error.to_string())
}

/// The same config as safetensors.
pub fn as_safetensors(name: &str, config: &Value) -> Imported {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    fs::copy(fixture(name).join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    import(dir.path()).unwrap()
}

/// Changes of a config: what GGUF does not say, and defaults of a class that a converter writes.
#[test]
fn converted_families_compute_the_same_logits() {
    let head = |dim: u32| json!({ "query_pre_attn_scalar": dim });
    let cases: &[(&str, &str, Value)] = &[
        ("families/llama-gqa", "llama", json!({})),
        ("families/llama-bias", "llama", json!({})),
        ("families/llama-mlp-bias", "llama", json!({})),
        ("families/llama-rope-linear", "llama", json!({})),
        ("families/llama-rope-llama3", "llama", json!({})),
        ("families/llama-rope-yarn", "llama", json!({})),
        ("families/llama-untied", "llama", json!({})),
        ("families/qwen2", "qwen2", json!({})),
        ("families/qwen3", "qwen3", json!({})),
        ("variants/gemma", "gemma", json!({ "rms_norm_eps": 1e-6 })),
        ("families/gemma2", "gemma2", head(24)),
        ("families/gemma3", "gemma3", head(24)),
        ("families/phi3", "phi3", json!({})),
        ("variants/phi3-longrope", "phi3", json!({ "rms_norm_eps": 1e-5 })),
        ("variants/phi3-partial-window", "phi3", json!({ "rms_norm_eps": 1e-5 })),
        ("families/olmo2", "olmo2", json!({})),
        ("families/granite", "granite", json!({})),
        ("families/smollm3", "smollm3", json!({ "no_rope_layers": null })),
        ("families/stablelm", "stablelm", json!({})),
        ("variants/stablelm-qk-norm", "stablelm", json!({ "layer_norm_eps": 1e-5 })),
        ("variants/stablelm-parallel", "stablelm", json!({ "layer_norm_eps": 1e-5 })),
        ("families/starcoder2", "starcoder2", json!({})),
        ("families/gpt-neox", "gptneox", json!({})),
        ("variants/cohere-qk-norm", "command-r", json!({ "rope_theta": 500000.0 })),
        ("variants/cohere2", "cohere2", json!({ "layer_norm_eps": 1e-5 })),
        ("experts/qwen3-moe", "qwen3moe", json!({})),
        ("experts/qwen2-moe-shared", "qwen2moe", json!({ "norm_topk_prob": false })),
        ("experts/mixtral-8", "llama", json!({})),
        ("experts/olmoe", "olmoe", json!({})),
        ("experts/granitemoe", "granitemoe", json!({})),
        ("experts/glm4-moe", "glm4moe", json!({})),
        ("experts/glm46-moe", "glm4moe", json!({})),
    ];
    for (name, arch, changes) in cases {
        let checkpoint = Checkpoint::read(name, changes.clone());
        let model = imported(&converted(&stacked_experts(&checkpoint, arch), arch))
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let original = as_safetensors(name, &checkpoint.config);
        assert_eq!(model.graph.family, original.graph.family);
        assert!(model.graph.eos.contains(&257) || model.graph.vocab < 258, "{name}: {:?}", model.graph.eos);
        let ids: Vec<u32> = (0..24).map(|i| i * 37 % model.graph.vocab).collect();
        let expected = reference::forward(&original.graph, &original.weights, &ids).concat();
        let found = reference::forward(&model.graph, &model.weights, &ids).concat();
        // The same values, but rotary factors and gains of Gemma were rounded to fp32 for the file.
        let rounded = arch.starts_with("gemma") || name.ends_with("llama3") || name.ends_with("longrope");
        let tolerance = if rounded { 1e-4 } else { 1e-6 };
        let difference = max_difference(&expected, &found);
        assert!(difference <= tolerance, "{name}: {difference}");
    }
}

fn llama() -> Writer {
    converted(&Checkpoint::read("families/llama-gqa", json!({})), "llama")
}

#[test]
fn a_model_in_parts_is_one_model() {
    let whole = llama();
    let dir = tempfile::tempdir().unwrap();
    let half = whole.tensors.len() / 2;
    for (number, range) in [(0, 0..half), (1, half..whole.tensors.len())] {
        let mut part = Writer { metadata: vec![], ..whole.clone() };
        if number == 0 {
            part.metadata = whole.metadata.clone();
        }
        part.set("split.no", Meta::U32(number));
        part.set("split.count", Meta::U32(2));
        part.set("split.tensors.count", Meta::U32(whole.tensors.len() as u32));
        part.tensors = whole.tensors[range].to_vec();
        fs::write(dir.path().join(format!("m-{:05}-of-00002.gguf", number + 1)), part.bytes()).unwrap();
    }
    let (one, two) = (imported(&whole).unwrap(), import(dir.path()).unwrap());
    assert_eq!(two.weights.files().len(), 2);
    let logits = |model: &Imported| reference::forward(&model.graph, &model.weights, &[1, 2, 3]);
    assert_eq!(logits(&one), logits(&two));
    let tokenizer = Tokenizer::load(&dir.path().join("m-00002-of-00002.gguf")).unwrap();
    assert_eq!(tokenizer.encode("a", false).unwrap().len(), 1);
}

/// Random blocks of a type for every matrix, with scales of about 1/100.
fn in_blocks(kind: u32, block: usize, bytes: usize, halves: &[usize]) -> Writer {
    let mut model = llama();
    let mut random = monobloc::random::Random::new(u64::from(kind));
    for tensor in model.tensors.iter_mut().filter(|tensor| tensor.shape.len() == 2) {
        let values = tensor.shape.iter().product::<u64>() as usize;
        let mut data: Vec<u8> = (0..values / block * bytes).map(|_| random.word() as u8).collect();
        for block in data.chunks_mut(bytes) {
            for at in halves {
                let scale = f16::from_f32(0.004 + 0.004 * random.unit() as f32).to_le_bytes();
                block[*at..at + 2].copy_from_slice(&scale);
            }
            if kind == 39 {
                block[0] = 118 + block[0] % 4;
            }
        }
        (tensor.kind, tensor.data) = (kind, data);
    }
    model
}

/// Logits of the interpreter for a proven schedule in fp32, and those of the reference.
pub fn computed(model: &Imported) -> (Vec<f32>, Vec<f32>) {
    let precision = Precision { weights: DType::F32, cache: DType::F32, wire: DType::F32 };
    let target = Target::builtin("cpu").unwrap();
    let candidate = Candidate::default_for(&model.graph, &target, precision).for_context(16);
    let program = lower(&model.graph, "test", precision, 16, &candidate).unwrap();
    let placed = schedule(program, &target, &candidate).unwrap();
    if let Err(refused) = validate(placed.clone(), &target) {
        panic!("{refused:?}");
    }
    let bytes = Arc::new(pack(&placed, &model.graph, &model.weights).unwrap());
    let ids = [3, 1, 4, 1, 5];
    let found = Interp::new(&placed, bytes, Options::fast()).unwrap().logits(&ids).unwrap().concat();
    (found, reference::forward(&model.graph, &model.weights, &ids).concat())
}

/// Every type of 32 values a block, through all of it.
#[test]
fn types_of_blocks_run_as_formats() {
    for (kind, bytes, halves, expected) in [
        (8, 34, &[0][..], "int8 by 32 fp16"),
        (2, 18, &[0], "int4:32"),
        (6, 22, &[0], "int8 by 32 fp16"),
        (39, 17, &[], "mxfp4"),
        (3, 20, &[0, 2], "int4 by 32 fp16 minima"),
        (7, 24, &[0, 2], "int8 by 32 fp16 minima"),
    ] {
        let model = imported(&in_blocks(kind, 32, bytes, halves)).unwrap();
        let formats: Vec<String> = model.graph.formats.values().map(|&f| monobloc::format::name_of(f)).collect();
        assert!(formats.len() > 14 && formats.iter().all(|format| format == expected), "{formats:?}");
        assert!(!model.notes.iter().any(|note| note.contains("computed as values")), "{:?}", model.notes);
        let (found, expected) = computed(&model);
        let difference = max_difference(&found, &expected);
        assert!(difference < 1e-3, "type {kind}: {difference}");
    }
}

/// q and k in one type and v in another are streamed as one matrix: as values, which all of them have.
#[test]
fn parts_of_a_matrix_in_different_types_are_values() {
    let mut mixed = in_blocks(8, 32, 34, &[0]);
    let other = in_blocks(2, 32, 18, &[0]);
    for (tensor, of) in mixed.tensors.iter_mut().zip(&other.tensors) {
        if tensor.name.contains("attn_v") {
            *tensor = of.clone();
        }
    }
    let model = imported(&mixed).unwrap();
    let attn = model.graph.layers[0].attention().unwrap();
    let has_format = |linear: &monobloc::model::graph::Linear| model.graph.formats.contains_key(&linear.weight.tensor);
    assert!(!has_format(&attn.q) && !has_format(&attn.v) && has_format(&attn.o));
    assert!(
        model.notes.iter().any(|note| note.contains("(2 of Q4_0, 4 of Q8_0) are computed as values")),
        "{:?}",
        model.notes
    );
    let (found, expected) = computed(&model);
    assert!(max_difference(&found, &expected) < 1e-3);
}

#[test]
fn metadata_that_is_not_modelled_is_refused() {
    let with = |change: &dyn Fn(&mut Writer)| {
        let mut model = llama();
        change(&mut model);
        imported(&model).map(|_| ()).unwrap_err()
    };
    let set = |key: &'static str, value: Meta| with(&move |model| model.set(key, value.clone()));
    let text = |text: &str| Meta::Text(text.to_string());
    for (found, expected) in [
        (set("general.architecture", text("mamba")), "`mamba` is no supported architecture of GGUF"),
        (set("llama.expert_count", Meta::U32(8)), "key `llama.expert_used_count` is missing"),
        (set("llama.new_key", Meta::U32(1)), "key `llama.new_key` is unknown for `LlamaForCausalLM`"),
        (
            set("llama.block_count", text("two")),
            "key `llama.block_count`: expected a whole number, the same for every layer",
        ),
        (
            set("llama.attention.head_count", Meta::I32s(vec![4, 2])),
            "the same for every layer, found a list of 2 integers",
        ),
        (
            set("llama.vocab_size", Meta::U32(7)),
            "`llama.vocab_size` and `token_embd.weight` disagree: 7 tokens and 320 rows",
        ),
        (
            set("llama.attention.value_length", Meta::U32(8)),
            "`llama.attention.key_length` and `llama.attention.value_length` disagree",
        ),
        (
            set("llama.rope.scaling.type", text("ntk")),
            "key `llama.rope.scaling.type`: expected none, linear or yarn, found \"ntk\"",
        ),
        (
            with(&|model| {
                model.set("llama.rope.scaling.type", text("none"));
                model.set("llama.rope.scaling.factor", Meta::F32(4.0));
            }),
            "key `llama.rope.scaling.type`: expected linear or yarn beside `rope.scaling.factor`, found \"none\"",
        ),
        // Factors of longrope, which this architecture does not read.
        (
            with(&|model| model.tensor("rope_factors_long.weight", &[8], F32, vec![0; 32])),
            "tensor `rope_factors_long.weight` [8] is not used",
        ),
        (set("llama.rope.dimension_count", Meta::U32(8)), "the model code of this family rotates whole heads"),
        (
            set("llama.rope.freq_base", Meta::F32(f32::INFINITY)),
            "key `llama.rope.freq_base`: expected a finite number, found inf",
        ),
        (
            set("llama.attention.layer_norm_rms_epsilon", Meta::F32(f32::NAN)),
            "key `llama.attention.layer_norm_rms_epsilon`: expected a finite number, found NaN",
        ),
        (set("llama.attention.causal", Meta::Truth(false)), "key `llama.attention.causal`: expected true, found false"),
        (set("general.quantization_version", Meta::U32(1)), "key `general.quantization_version`: expected 2"),
        (
            with(&|model| model.metadata.retain(|(key, _)| !key.contains("rms"))),
            "key `llama.attention.layer_norm_rms_epsilon` is missing",
        ),
        (with(&|model| model.tensors[3].kind = 10), "of Q2_K"),
        (with(&|model| model.tensors[0].name = "x".to_string()), "is missing"),
        (with(&|model| model.tensor("blk.0.extra", &[2], F32, vec![0; 8])), "tensor `blk.0.extra` [2] is not used"),
        (with(&|model| model.tensor("rope_freqs.weight", &[3], F32, vec![0; 12])), "expected 8 numbers above 0"),
    ] {
        assert!(found.contains(expected), "{found}\nexpected: {expected}");
    }
    // Both lists of longrope are needed.
    let checkpoint = Checkpoint::read("variants/phi3-longrope", json!({ "rms_norm_eps": 1e-5 }));
    for gone in ["rope_factors_short.weight", "rope_factors_long.weight"] {
        let mut model = converted(&stacked_experts(&checkpoint, "phi3"), "phi3");
        model.tensors.retain(|tensor| tensor.name != gone);
        let error = imported(&model).map(|_| ()).unwrap_err();
        assert!(error.contains(&format!("tensor `{gone}` [")) && error.contains("is missing"), "{error}");
    }
    // Records of those who made a file change nothing, and a list of ends counts.
    let mut model = llama();
    model.text("mradermacher.quantize_version", "2");
    model.text("quantize.imatrix.file", "imatrix.gguf");
    model.set("tokenizer.ggml.eos_token_ids", Meta::I32s(vec![257, 40]));
    assert!(imported(&model).unwrap().graph.eos.contains(&40));
    // A type that is not read says what to do.
    let found = with(&|model| {
        let tensor = model.tensors.iter_mut().find(|tensor| tensor.shape.len() == 2).unwrap();
        (tensor.kind, tensor.shape, tensor.data) = (10, vec![1, 256], vec![0; 84]);
    });
    assert!(found.contains("is stored as Q2_K, which is not read: expected F32, F16, BF16, Q8_0"), "{found}");
}

/// Gives the tokens from 260 on, which only fill the table up, these texts and types.
fn name_tokens(model: &mut Writer, named: &[(&str, i32)]) {
    for (_, value) in &mut model.metadata {
        for (id, (text, kind)) in (260..).zip(named) {
            match value {
                Meta::Texts(tokens) if tokens.len() == 320 => tokens[id] = text.to_string(),
                Meta::I32s(kinds) if kinds.len() == 320 => kinds[id] = *kind,
                _ => {}
            }
        }
    }
}

#[test]
fn tokens_that_end_an_answer_are_known_by_their_text() {
    let ends = |named: &[(&str, i32)], change: &dyn Fn(&mut Writer)| {
        let mut model = llama();
        name_tokens(&mut model, named);
        change(&mut model);
        imported(&model).unwrap().graph.eos
    };
    // User-defined and plain tokens, as some converters write them.
    assert_eq!(ends(&[("<|end|>", 4), ("<|eot_id|>", 1)], &|_| ()), [257, 258, 260, 261]);
    // gpt-oss: a message of the channel of thoughts ends, and the answer follows.
    let channels = [("<|end|>", 3), ("<|return|>", 3), ("<|call|>", 3)];
    assert_eq!(ends(&channels[..2], &|_| ()), [257, 258, 260, 261]);
    assert_eq!(ends(&channels, &|_| ()), [257, 258, 261, 262]);
    let eot = |model: &mut Writer| model.set("tokenizer.ggml.eot_token_id", Meta::U32(260));
    assert_eq!(ends(&channels, &eot), [257, 258, 261, 262]);
}

/// The first files of Phi-3-mini-4k have no key for it.
#[test]
fn early_files_of_phi_3_have_the_window_of_their_model() {
    let mut model = converted(&Checkpoint::read("families/phi3", json!({})), "phi3");
    let window = |model: &Writer| imported(model).unwrap().graph.layers[0].attention().unwrap().window;
    model.metadata.retain(|(key, _)| key != "phi3.attention.sliding_window");
    model.set("phi3.context_length", Meta::U32(4096));
    assert_eq!(window(&model), None);
    let layer: Vec<Tensor> = model.tensors.iter().filter(|tensor| tensor.name.starts_with("blk.0.")).cloned().collect();
    model.tensors.retain(|tensor| !tensor.name.starts_with("blk."));
    model.set("phi3.block_count", Meta::U32(32));
    for l in 0..32 {
        let of =
            |tensor: &Tensor| Tensor { name: tensor.name.replacen("blk.0", &format!("blk.{l}"), 1), ..tensor.clone() };
        model.tensors.extend(layer.iter().map(of));
    }
    assert_eq!(window(&model), Some(2047));
}

#[test]
fn a_vocabulary_of_the_metadata_is_a_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let load = |change: &dyn Fn(&mut Writer)| {
        let mut model = llama();
        change(&mut model);
        fs::write(&path, model.bytes()).unwrap();
        Tokenizer::load(&path).map_err(|error| error.to_string())
    };
    let tokenizer = load(&|_| ()).unwrap();
    tokenizer.check_vocab(320).unwrap();
    let ids = tokenizer.encode("é <think></s>1", false).unwrap();
    assert_eq!((ids.len(), ids[3], ids[4]), (6, 259, 257));
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), "é <think>1");
    assert_eq!(tokenizer.apply_chat(&[Message::new("user", "hi")], true).unwrap(), "<s>hi</s>");
    assert_eq!(tokenizer.encode("a", true).unwrap().len(), 1);
    let with_bos = load(&|model| model.set("tokenizer.ggml.add_bos_token", Meta::Truth(true))).unwrap();
    assert_eq!(with_bos.encode("a", true).unwrap()[0], 256);
    for rule in ["lfm2", "smaug-bpe", "glm4"] {
        let tokenizer = load(&|model| {
            model.text("tokenizer.ggml.pre", rule);
            model.set("tokenizer.ggml.scores", Meta::F32s(vec![0.0; 320]));
        });
        assert_eq!(tokenizer.unwrap().encode("a", true).unwrap().len(), 1 + usize::from(rule == "lfm2"), "{rule}");
    }
    // Rows that only fill the table up are no tokens.
    assert_eq!(tokenizer.encode("[PAD300]", false).unwrap().len(), 8);
    assert_eq!(tokenizer.decode(&[300], false).unwrap(), "");
    let text = |text: &str| Meta::Text(text.to_string());
    for (key, value, expected) in [
        ("tokenizer.ggml.pre", text("new"), "key `tokenizer.ggml.pre`: expected a known rule (llama-bpe"),
        ("tokenizer.ggml.model", text("bert"), "its tokenizer is `bert`, which is not supported"),
        ("tokenizer.ggml.token_type", Meta::I32s(vec![1]), "expected 320 integers, one for each token, found 1"),
        ("tokenizer.ggml.token_type", Meta::I32s(vec![99; 320]), "expected 1 to 6, found 99 for token 0"),
        ("tokenizer.ggml.merges", Meta::Texts(vec!["ab".to_string()]), "merge `ab`: expected two tokens"),
        ("tokenizer.ggml.merges", Meta::Texts(vec!["a zz".to_string()]), "out of vocabulary"),
        ("tokenizer.ggml.add_sep_token", Meta::Truth(true), "expected false, found true"),
        ("tokenizer.ggml.new", Meta::U32(1), "key `tokenizer.ggml.new` is not known"),
    ] {
        let found = load(&|model| model.set(key, value.clone())).err().unwrap();
        assert!(found.contains(expected), "{found}\nexpected: {expected}");
    }
}

/// Scores say which pair of tokens is joined first; bytes stand in for characters that are no token.
#[test]
fn scores_of_sentencepiece_become_merges() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    let mut kinds = vec![2, 3, 3];
    tokens.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    kinds.extend([6; 256]);
    let words = ["\u{2581}", "a", "b", "ab", "\u{2581}a", "\u{2581}ab", "bb"];
    tokens.extend(words.map(String::from));
    kinds.extend([1; 7]);
    let scores: Vec<f32> = (0..259).map(|_| 0.0).chain([-5.0, -6.0, -7.0, -1.0, -2.0, -3.0, -4.0]).collect();
    let mut model = Writer::new();
    model.text("tokenizer.ggml.model", "llama");
    model.set("tokenizer.ggml.tokens", Meta::Texts(tokens));
    model.set("tokenizer.ggml.token_type", Meta::I32s(kinds));
    model.set("tokenizer.ggml.scores", Meta::F32s(scores));
    let load = |model: &Writer| {
        fs::write(&path, model.bytes()).unwrap();
        Tokenizer::load(Path::new(&path)).map_err(|error| error.to_string())
    };
    let tokenizer = load(&model).unwrap();
    // `ab` is joined before `▁a`, and then `▁ab`; `é` has no token.
    assert_eq!(tokenizer.encode("ab", true).unwrap(), [1, 264]);
    assert_eq!(tokenizer.encode("abb", false).unwrap(), [264, 261]);
    assert_eq!(tokenizer.encode("é", false).unwrap(), [259, 3 + 0xC3, 3 + 0xA9]);
    assert_eq!(tokenizer.decode(&[264, 263, 3 + 0xC3, 3 + 0xA9], true).unwrap(), "ab aé");
    // Tokens of Phi-3 take the spaces after them, whatever their type.
    let mut phi = model.clone();
    for (_, value) in &mut phi.metadata {
        match value {
            Meta::Texts(tokens) => tokens.push("<|user|>".to_string()),
            Meta::I32s(kinds) => kinds.push(4),
            Meta::F32s(scores) => scores.push(0.0),
            _ => {}
        }
    }
    for (name, has_newline) in [("Phi3", false), ("another", true)] {
        phi.text("general.name", name);
        let ids = load(&phi).unwrap().encode("<|user|>\nab", false).unwrap();
        assert_eq!((ids.contains(&266), ids.contains(&(3 + 0x0A))), (true, has_newline), "{name}: {ids:?}");
    }
    model.set("tokenizer.ggml.add_space_prefix", Meta::Truth(false));
    assert_eq!(load(&model).unwrap().encode("ab", false).unwrap(), [262]);
    model.set("tokenizer.ggml.scores", Meta::F32s(vec![0.0]));
    assert!(load(&model).err().unwrap().contains("expected 266 floats, one for each token, found 1"));
}

/// The folder of an export has the tokenizer as files, which a program without a reader of GGUF can use, too.
#[test]
fn commands_take_a_gguf_file() {
    let place = Place::new();
    place.write("model.gguf", llama().bytes());
    let text = "generate WHAT --prompt ab --max-tokens 6";
    let named = place.run(&format!("{} --target cpu", text.replace("WHAT", "model.gguf"))).code(0);
    place.run("init model.gguf --target cpu").code(0);
    assert_eq!(place.run(&text.replace("WHAT", "monobloc.toml")).code(0).stdout, named.stdout);
    place.run("export monobloc.toml --out moved").code(0);
    fs::remove_file(place.path("model.gguf")).unwrap();
    assert_eq!(place.run(&text.replace("WHAT", "moved")).code(0).stdout, named.stdout);
    assert!(place.path("moved/model/tokenizer.json").is_file());
    place.run("generate model.gguf --prompt ab").refused(&["no such file: `model.gguf`"]);
    fs::create_dir(place.path("folder")).unwrap();
    place.write("folder/m.gguf", llama().bytes());
    let told = place.run("import folder").code(0);
    assert!(told.stdout.contains("read ") && told.stdout.contains("bytes of weight headers"), "{told:#?}");
    assert_eq!(place.run("import path:folder/m.gguf").code(0).stdout, told.stdout);
    assert_eq!(
        place.run(&format!("{} --target cpu", text.replace("WHAT", "path:folder/m.gguf"))).code(0).stdout,
        named.stdout
    );
    // A download that ended early.
    let whole = llama().bytes();
    place.write("folder/m.gguf", &whole[..whole.len() / 2]);
    for command in ["import folder", "generate folder --prompt ab"] {
        place.run(command).refused(&["fetch it again"]);
    }
}
