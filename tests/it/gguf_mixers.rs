//! Tests GGUF models whose layers are none of the usual ones, as `convert_hf_to_gguf.py` of llama.cpp writes them: gpt-oss, with experts as
//! values and in MXFP4, and the short convolutions of LFM2.

use std::fs;

use monobloc::model::config::Imported;
use monobloc::reference;
use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::gguf::{Checkpoint, as_safetensors, computed, converted, imported};
use crate::gguf_writer::{Meta, Writer};
use crate::support::{fixture, max_difference};

const MXFP4: u32 = 39;

/// The same logits as those of the safetensors.
fn assert_same(name: &str, config: &Value, found: &Imported) {
    let original = as_safetensors(name, config);
    assert_eq!(found.graph.family, original.graph.family);
    let ids: Vec<u32> = (0..24).map(|i| i * 37 % found.graph.vocab).collect();
    let logits = |model: &Imported| reference::forward(&model.graph, &model.weights, &ids).concat();
    let difference = max_difference(&logits(&original), &logits(found));
    assert!(difference <= 1e-6, "{name}: {difference}");
}

/// Rows of an extent of several matrices: those at `first`, and every second one after it.
fn every_second<T: Copy>(values: &[T], width: usize, first: usize) -> Vec<T> {
    values.chunks_exact(width).skip(first).step_by(2).flatten().copied().collect()
}

fn transposed(values: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    let one = |matrix: &[f32]| (0..rows * cols).map(|i| matrix[i % rows * cols + i / rows]).collect::<Vec<f32>>();
    values.chunks_exact(rows * cols).flat_map(one).collect()
}

/// Experts of gpt-oss apart: rows of gate and up take turns in the checkpoint, and its matrices are transposed.
fn gpt_oss(mut checkpoint: Checkpoint) -> Writer {
    let mut tensors = vec![];
    for (name, shape, values) in checkpoint.tensors {
        if name.ends_with("_blocks") || name.ends_with("_scales") {
            continue;
        }
        let name = name
            .replace("self_attn.sinks", "attn_sinks.weight")
            .replace("post_attention_layernorm", "post_attention_norm")
            .replace("mlp.router", "ffn_gate_inp");
        let Some((begin, part)) = name.split_once("mlp.experts.") else {
            tensors.push((name, shape, values));
            continue;
        };
        let (part, end) = match part.strip_suffix("_bias") {
            Some(part) => (part, "bias"),
            None => (part, "weight"),
        };
        let (shape, values) = match shape[..] {
            [count, rows, cols] => (vec![count, cols, rows], transposed(&values, rows as usize, cols as usize)),
            _ => (shape, values),
        };
        if part == "down_proj" {
            tensors.push((format!("{begin}ffn_down_exps.{end}"), shape, values));
            continue;
        }
        let width = if shape.len() == 3 { shape[2] as usize } else { 1 };
        for (first, half) in ["gate", "up"].into_iter().enumerate() {
            let mut shape = shape.clone();
            shape[1] /= 2;
            tensors.push((format!("{begin}ffn_{half}_exps.{end}"), shape, every_second(&values, width, first)));
        }
    }
    checkpoint.tensors = tensors;
    let mut out = converted(&checkpoint, "gpt-oss");
    let width = checkpoint.config["intermediate_size"].as_u64().unwrap() as u32;
    out.set("gpt-oss.expert_feed_forward_length", Meta::U32(width));
    out
}

/// 16 bytes of neighbours as ggml has them: value `i` and value `i + 16` share a byte.
fn ggml_block(scale: u8, pairs: &[u8]) -> Vec<u8> {
    let code = |i: usize| pairs[i / 2] >> (i % 2 * 4) & 15;
    std::iter::once(scale).chain((0..16).map(|i| code(i) | code(i + 16) << 4)).collect()
}

/// What a file cannot say has the values of the published models.
fn published(layers: usize) -> Value {
    let types: Vec<&str> = ["sliding_attention", "full_attention"].into_iter().cycle().take(layers).collect();
    json!({ "swiglu_limit": 7.0, "layer_types": types, "rms_norm_eps": 1e-5, "rope_theta": 150000.0 })
}

#[test]
fn gpt_oss_in_values_computes_the_same_logits() {
    let name = "experts/gpt-oss-values";
    let checkpoint = Checkpoint::read(name, published(3));
    let config = checkpoint.config.clone();
    assert_same(name, &config, &imported(&gpt_oss(checkpoint)).unwrap());
}

#[test]
fn gpt_oss_in_mxfp4_keeps_its_codes() {
    let name = "quantised-experts/gpt-oss";
    let checkpoint = Checkpoint::read(name, published(2));
    let config = checkpoint.config.clone();
    let mut out = gpt_oss(checkpoint);
    let bytes = fs::read(fixture(name).join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for layer in 0..2 {
        let of = |part: &str| file.tensor(&format!("model.layers.{layer}.mlp.experts.{part}")).unwrap();
        for part in ["gate", "up", "down"] {
            let stored = if part == "down" { "down_proj" } else { "gate_up_proj" };
            let (blocks, scales) = (of(&format!("{stored}_blocks")), of(&format!("{stored}_scales")));
            let [count, rows, groups, _] = blocks.shape()[..] else { panic!("{part}") };
            let row = |row: usize| {
                let own = scales.data()[row * groups..][..groups].iter();
                own.zip(blocks.data()[row * groups * 16..].chunks(16)).flat_map(|(s, b)| ggml_block(*s, b))
            };
            let rows: Vec<usize> = (0..count * rows)
                .filter(|row| match part {
                    "gate" => row % 2 == 0,
                    "up" => row % 2 == 1,
                    _ => true,
                })
                .collect();
            let shape = [count as u64, (rows.len() / count) as u64, 32 * groups as u64];
            let data = rows.iter().flat_map(|&at| row(at)).collect();
            out.tensor(&format!("blk.{layer}.ffn_{part}_exps.weight"), &shape, MXFP4, data);
        }
    }
    let found = imported(&out).unwrap();
    assert_eq!(found.graph.formats.len(), 6, "{:?}", found.graph.formats);
    assert!(found.graph.formats.values().all(|&format| monobloc::format::name_of(format) == "mxfp4"));
    assert_same(name, &config, &found);
}

/// What the published models have, and other implementations leave to the name of the architecture.
#[test]
fn gpt_oss_that_is_not_the_published_one_is_refused() {
    let with = |key: &str, value: Meta| {
        let mut model = gpt_oss(Checkpoint::read("experts/gpt-oss-values", published(3)));
        model.set(&format!("gpt-oss.{key}"), value);
        imported(&model).map(|_| ()).unwrap_err()
    };
    for (key, value, expected) in [
        ("rope.scaling.type", Meta::Text("linear".to_string()), "expected yarn, as in the published models"),
        ("expert_gating_func", Meta::U32(1), "expected 3, a softmax over the chosen experts, found 1"),
        ("attention.sliding_window_pattern", Meta::U32(3), "expected 2: every other layer slides"),
    ] {
        let found = with(key, value);
        assert!(found.contains(expected), "{found}\nexpected: {expected}");
    }
}

/// A checkpoint of LFM2 under the names that the converter gives.
fn lfm2(mut checkpoint: Checkpoint, arch: &str) -> Writer {
    let mut experts: std::collections::BTreeMap<String, (u64, Vec<u64>, Vec<f32>)> = Default::default();
    let mut tensors = vec![];
    for (name, shape, values) in checkpoint.tensors {
        let mut name = name
            .replace("operator_norm", "input_layernorm")
            .replace(".ffn_norm", ".pre_feedforward_layernorm")
            .replace("q_layernorm", "q_norm")
            .replace("k_layernorm", "k_norm")
            .replace("self_attn.out_proj", "self_attn.o_proj")
            .replace("feed_forward.gate.", "ffn_gate_inp.")
            .replace("feed_forward.expert_bias", "exp_probs_b.bias")
            .replace(".conv.", ".shortconv.");
        name = name.replace(".shortconv.weight", ".shortconv.conv.weight").replace("conv.conv.conv", "conv.conv");
        for (from, to) in [("w1", "gate"), ("w2", "down"), ("w3", "up")] {
            name = name.replace(&format!("feed_forward.{from}."), &format!("mlp.{to}_proj."));
            if let Some((begin, rest)) = name.clone().split_once("feed_forward.experts.")
                && rest.ends_with(&format!("{from}.weight"))
            {
                let of = experts.entry(format!("{begin}ffn_{to}_exps.weight"));
                let (count, _, all) = of.or_insert_with(|| (0, shape.clone(), vec![]));
                *count += 1;
                all.extend(&values);
                name.clear();
            }
        }
        let shape = if let [rows, 1, taps] = shape[..] { vec![rows, taps] } else { shape };
        if !name.is_empty() {
            tensors.push((name, shape, values));
        }
    }
    tensors.extend(experts.into_iter().map(|(name, (count, shape, all))| (name, [vec![count], shape].concat(), all)));
    checkpoint.tensors = tensors;
    let mut out = converted(&checkpoint, arch);
    let count = |key: &str| checkpoint.config[key].as_u64().unwrap() as u32;
    let mut set = |key: &str, value: Meta| out.set(&format!("{arch}.{key}"), value);
    let types = checkpoint.config["layer_types"].as_array().unwrap();
    let heads = types.iter().map(|kind| if kind == "conv" { 0 } else { count("num_key_value_heads") as i32 });
    set("attention.head_count_kv", Meta::I32s(heads.collect()));
    let eps = checkpoint.config["norm_eps"].as_f64().unwrap() as f32;
    set("attention.layer_norm_rms_epsilon", Meta::F32(eps));
    set("shortconv.l_cache", Meta::U32(count("conv_L_cache")));
    set("vocab_size", Meta::U32(count("vocab_size")));
    // The width that the class makes of its keys.
    let gate = checkpoint.tensors.iter().find(|(name, ..)| name == "model.layers.0.mlp.gate_proj.weight").unwrap();
    set("feed_forward_length", Meta::U32(gate.1[0] as u32));
    if arch == "lfm2moe" {
        set("leading_dense_block_count", Meta::U32(count("num_dense_layers")));
        set("expert_gating_func", Meta::U32(2));
        set("expert_weights_scale", Meta::F32(1.5));
    }
    out
}

#[test]
fn short_convolutions_compute_the_same_logits() {
    // The converter needs the types of layers.
    let second = json!({ "layer_types": ["conv", "full_attention", "conv", "conv"] });
    for (name, arch, changes) in [
        ("hybrids/lfm2", "lfm2", json!({})),
        ("hybrids/lfm2-moe", "lfm2moe", json!({})),
        ("hybrids/lfm2-biases", "lfm2", second),
    ] {
        let checkpoint = Checkpoint::read(name, changes);
        let config = checkpoint.config.clone();
        let found = imported(&lfm2(checkpoint, arch)).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_same(name, &config, &found);
    }
    let mut odd = lfm2(Checkpoint::read("hybrids/lfm2", json!({})), "lfm2");
    odd.set("lfm2.attention.head_count_kv", Meta::I32s(vec![0, 1, 2, 0]));
    let found = imported(&odd).map(|_| ()).unwrap_err();
    assert!(found.contains("expected one number for each layer: 0, or the same as in every other layer"), "{found}");
}

/// Matrices of Q4_K and Q5_K, through lowering, proof, pack and interpreter.
#[test]
fn super_blocks_keep_scales_of_six_bits() {
    let (hidden, vocab) = (256u64, 320u64);
    for (kind, bytes, expected) in [(12, 144, "int4 by 32 fp16x6 minima"), (13, 176, "int8 by 32 fp16x6 minima")] {
        let mut random = monobloc::random::Random::new(u64::from(kind));
        let mut model = Writer::new();
        model.text("general.architecture", "llama");
        for (key, value) in [
            ("block_count", 1),
            ("context_length", 64),
            ("embedding_length", hidden as u32),
            ("feed_forward_length", 256),
            ("attention.head_count", 4),
            ("attention.head_count_kv", 2),
        ] {
            model.set(&format!("llama.{key}"), Meta::U32(value));
        }
        model.set("llama.attention.layer_norm_rms_epsilon", Meta::F32(1e-5));
        let mut matrix = |name: &str, rows: u64| {
            let mut data: Vec<u8> =
                (0..rows as usize * hidden as usize / 256 * bytes).map(|_| random.word() as u8).collect();
            for block in data.chunks_mut(bytes) {
                for at in [0, 2] {
                    let scale = half::f16::from_f32(0.0002 + 0.0002 * random.unit() as f32).to_le_bytes();
                    block[at..at + 2].copy_from_slice(&scale);
                }
            }
            model.tensor(name, &[rows, hidden], kind, data);
        };
        for (name, rows) in [
            ("token_embd", vocab),
            ("output", vocab),
            ("blk.0.attn_q", 256),
            ("blk.0.attn_k", 128),
            ("blk.0.attn_v", 128),
            ("blk.0.attn_output", 256),
            ("blk.0.ffn_gate", 256),
            ("blk.0.ffn_up", 256),
            ("blk.0.ffn_down", 256),
        ] {
            matrix(&format!("{name}.weight"), rows);
        }
        for name in ["output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"] {
            let ones: Vec<u8> = (0..hidden).flat_map(|_| 1f32.to_le_bytes()).collect();
            model.tensor(&format!("{name}.weight"), &[hidden], 0, ones);
        }
        let model = imported(&model).unwrap();
        assert!(model.graph.formats.values().all(|format| format.to_string() == expected), "{:?}", model.graph.formats);
        assert_eq!(model.graph.formats.len(), 9);
        let (found, expected) = computed(&model);
        let difference = max_difference(&found, &expected);
        assert!(difference < 1e-3, "type {kind}: {difference}");
    }
}
