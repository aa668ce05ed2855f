//! Writes checkpoints of Qwen3.5 with a draft (MTP) that knows most of the text, in any size: the layout of `tests/fixtures/make_mtp.py`.
//!
//! The head answers an embedding with the next token of a cycle, the layers of the model disturb that, and the left half of `mtp.fc` passes the
//! embedding on.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::json;

/// Heads of attention have 128 columns and those of gated delta nets 64.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    pub hidden: usize,
    pub width: usize,
    pub layers: usize,
    pub vocab: usize,
    pub heads: usize,
    pub kv_heads: usize,
    /// Of keys of nets; there are twice as many of values.
    pub net_heads: usize,
}

const HEAD: usize = 128;
const NET_HEAD: usize = 64;
const POSITIONS: usize = 4096;
/// Of four layers the last one has attention.
const PERIOD: usize = 4;
/// The logit of the next token of the cycle where nothing disturbs it; other logits have a deviation of 1.
const KNOWN: f32 = 11.0;

/// Uniform values with a mean of 0 and a deviation of 1.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let unit = (self.0 >> 40) as f32 / (1 << 24) as f32;
        (unit - 0.5) * 12f32.sqrt()
    }
}

struct Tensors {
    noise: Noise,
    all: BTreeMap<String, (Vec<usize>, Vec<u8>)>,
}

impl Tensors {
    fn put(&mut self, name: &str, shape: &[usize], mut value: impl FnMut(usize, f32) -> f32) {
        let count: usize = shape.iter().product();
        let mut bytes = Vec::with_capacity(2 * count);
        for at in 0..count {
            let bits = value(at, self.noise.next()).to_bits();
            bytes.extend(((bits.wrapping_add(0x8000)) >> 16).to_le_bytes()[..2].iter());
        }
        self.all.insert(name.to_string(), (shape.to_vec(), bytes));
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize, gain: f32) {
        let size = gain / (cols as f32).sqrt();
        self.put(&format!("{name}.weight"), &[rows, cols], |_, noise| noise * size);
    }

    fn norm(&mut self, name: &str, width: usize, mean: f32) {
        self.put(&format!("{name}.weight"), &[width], |_, noise| mean + 0.2 * noise);
    }

    fn layer(&mut self, at: &str, has_attention: bool, sizes: &Sizes, gain: f32) {
        let Sizes { hidden, width, heads, kv_heads, net_heads, .. } = *sizes;
        self.norm(&format!("{at}.input_layernorm"), hidden, 0.0);
        self.norm(&format!("{at}.post_attention_layernorm"), hidden, 0.0);
        if has_attention {
            let a = format!("{at}.self_attn");
            self.matrix(&format!("{a}.q_proj"), 2 * heads * HEAD, hidden, 1.0);
            self.matrix(&format!("{a}.k_proj"), kv_heads * HEAD, hidden, 1.0);
            self.matrix(&format!("{a}.v_proj"), kv_heads * HEAD, hidden, 1.0);
            self.matrix(&format!("{a}.o_proj"), hidden, heads * HEAD, gain);
            self.norm(&format!("{a}.q_norm"), HEAD, 0.0);
            self.norm(&format!("{a}.k_norm"), HEAD, 0.0);
        } else {
            let (a, values) = (format!("{at}.linear_attn"), 2 * net_heads);
            let channels = (2 * net_heads + values) * NET_HEAD;
            self.matrix(&format!("{a}.in_proj_qkv"), channels, hidden, 1.0);
            self.matrix(&format!("{a}.in_proj_z"), values * NET_HEAD, hidden, 1.0);
            self.matrix(&format!("{a}.in_proj_b"), values, hidden, 1.0);
            self.matrix(&format!("{a}.in_proj_a"), values, hidden, 1.0);
            self.put(&format!("{a}.conv1d.weight"), &[channels, 1, 4], |_, noise| 0.6 * noise);
            self.put(&format!("{a}.A_log"), &[values], |_, noise| 0.5 * noise - 1.0);
            self.put(&format!("{a}.dt_bias"), &[values], |_, noise| 0.3 * noise);
            self.norm(&format!("{a}.norm"), NET_HEAD, 1.0);
            self.matrix(&format!("{a}.out_proj"), hidden, values * NET_HEAD, gain);
        }
        self.matrix(&format!("{at}.mlp.gate_proj"), width, hidden, 1.0);
        self.matrix(&format!("{at}.mlp.up_proj"), width, hidden, 1.0);
        self.matrix(&format!("{at}.mlp.down_proj"), hidden, width, gain);
    }
}

fn config(sizes: &Sizes) -> serde_json::Value {
    let has_attention = |layer: usize| layer % PERIOD == PERIOD - 1;
    let kind = |layer| if has_attention(layer) { "full_attention" } else { "linear_attention" };
    let kinds: Vec<&str> = (0..sizes.layers).map(kind).collect();
    let rope = json!({
        "mrope_interleaved": true, "mrope_section": [6, 5, 5], "partial_rotary_factor": 0.25, "rope_theta": 10_000.0, "rope_type": "default",
    });
    let text = json!({
        "attention_bias": false, "bos_token_id": 0, "eos_token_id": 1, "head_dim": HEAD, "hidden_act": "silu", "hidden_size": sizes.hidden,
        "layer_types": kinds, "linear_conv_kernel_dim": 4, "linear_key_head_dim": NET_HEAD, "linear_num_key_heads": sizes.net_heads,
        "linear_num_value_heads": 2 * sizes.net_heads, "linear_value_head_dim": NET_HEAD, "max_position_embeddings": POSITIONS,
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": false, "num_attention_heads": sizes.heads,
        "num_hidden_layers": sizes.layers, "num_key_value_heads": sizes.kv_heads, "rms_norm_eps": 1e-6, "tie_word_embeddings": false,
        "vocab_size": sizes.vocab, "rope_parameters": rope, "intermediate_size": sizes.width, "model_type": "qwen3_5_text",
    });
    json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "dtype": "bfloat16", "text_config": text,
        "image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63, "tie_word_embeddings": false,
        "vision_config": { "depth": 1 },
    })
}

/// Writes `config.json` and `model.safetensors` into `folder`.
pub fn write(folder: &Path, sizes: &Sizes, seed: u64) {
    let Sizes { hidden, layers, vocab, .. } = *sizes;
    let mut t = Tensors { noise: Noise(seed), all: BTreeMap::new() };
    let table = "model.language_model.embed_tokens.weight";
    t.put(table, &[vocab, hidden], |_, noise| noise);
    let embed: Vec<f32> = t.all[table]
        .1
        .chunks_exact(2)
        .map(|bytes| f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16))
        .collect();
    // The cycle: the tokens in steps of a number that has no factor in common with theirs.
    let stride = (vocab / 3..).find(|stride| !stride.is_multiple_of(2)).unwrap_or(1);
    let before = |token: usize| (token + vocab - stride) % vocab;
    let (known, size) = (KNOWN / hidden as f32, 1.0 / (hidden as f32).sqrt());
    t.put("lm_head.weight", &[vocab, hidden], |at, noise| {
        known * embed[before(at / hidden) * hidden + at % hidden] + size * noise
    });
    for layer in 0..layers {
        let at = format!("model.language_model.layers.{layer}");
        t.layer(&at, layer % PERIOD == PERIOD - 1, sizes, 2.2 / (layers as f32).sqrt());
    }
    t.norm("model.language_model.norm", hidden, 0.0);
    t.put("mtp.fc.weight", &[hidden, 2 * hidden], |at, noise| {
        let own = if at % (2 * hidden) == at / (2 * hidden) { 0.9 } else { 0.0 };
        own + 0.4 * size * noise
    });
    for name in ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"] {
        t.norm(&format!("mtp.{name}"), hidden, 0.0);
    }
    t.layer("mtp.layers.0", true, sizes, 0.5);
    let views = t.all.iter().map(|(name, (shape, bytes))| {
        let view = TensorView::new(Dtype::BF16, shape.clone(), bytes).expect("as many bytes as the shape says");
        (name.as_str(), view)
    });
    std::fs::create_dir_all(folder).unwrap();
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
    std::fs::write(folder.join("config.json"), config(sizes).to_string()).unwrap();
}
