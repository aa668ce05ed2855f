//! Owns GGUF metadata as a config: for each architecture its class, its names of tensors, and what its keys become.
//!
//! The closed schema of `config.json` holds here too: a key is modelled, neutral at its value, or refused. The keys are those that
//! `convert_hf_to_gguf.py` of llama.cpp writes; what they mean, and what is meant where they are absent, is what `src/llama-model.cpp` and
//! `src/models/*.cpp` of it compute.

use std::collections::BTreeSet;

use serde_json::{Map, Value as Json, json};

use crate::gguf::{Header, Texts, Value};
use crate::model::config::plan::{ExpertNames, GateUp, Names, Plan, Projections, SharedNames, Stacked};
use crate::model::config::reader::EXTENT_MAX;
use crate::model::config::reason::Reason;

/// An architecture of llama.cpp that a family computes.
pub struct Architecture {
    /// As in `general.architecture`.
    pub name: &'static str,
    pub class: &'static str,
    pub names: &'static Names,
    /// Whether the converter puts the rows of each head of q and k in pairs.
    pub paired: bool,
    /// Whether the converter adds 1 to the gains of norms, which the model code does where it uses them.
    pub norms_plus_one: bool,
    keys: fn(&mut Metadata<'_>, &mut Map<String, Json>),
}

pub static ARCHITECTURES: &[Architecture] = &[
    Architecture { paired: true, ..plain("llama", "LlamaForCausalLM", &NAMES, llama) },
    plain("qwen2", "Qwen2ForCausalLM", &NAMES, grouped),
    plain("qwen3", "Qwen3ForCausalLM", &NAMES, biased),
    Architecture { norms_plus_one: true, ..plain("gemma", "GemmaForCausalLM", &NAMES, grouped) },
    Architecture { norms_plus_one: true, ..plain("gemma2", "Gemma2ForCausalLM", &GEMMA_NAMES, gemma2) },
    Architecture { norms_plus_one: true, ..plain("gemma3", "Gemma3ForCausalLM", &GEMMA_NAMES, gemma3) },
    plain("phi3", "Phi3ForCausalLM", &PHI3_NAMES, phi3),
    plain("olmo2", "Olmo2ForCausalLM", &OLMO2_NAMES, biased),
    Architecture { paired: true, ..plain("granite", "GraniteForCausalLM", &NAMES, granite) },
    Architecture { paired: true, ..plain("smollm3", "SmolLM3ForCausalLM", &NAMES, llama) },
    plain("stablelm", "StableLmForCausalLM", &NAMES, stablelm),
    plain("starcoder2", "Starcoder2ForCausalLM", &UNGATED_NAMES, starcoder2),
    plain("gptneox", "GPTNeoXForCausalLM", &GPT_NEOX_NAMES, gpt_neox),
    plain("command-r", "CohereForCausalLM", &SHARED_NORM_NAMES, cohere),
    plain("cohere2", "Cohere2ForCausalLM", &SHARED_NORM_NAMES, cohere2),
    plain("qwen3moe", "Qwen3MoeForCausalLM", &NAMES, qwen3_moe),
    plain("qwen2moe", "Qwen2MoeForCausalLM", &NAMES, qwen2_moe),
    plain("olmoe", "OlmoeForCausalLM", &NAMES, olmoe),
    Architecture { paired: true, ..plain("granitemoe", "GraniteMoeForCausalLM", &NAMES, granite_moe) },
    plain("glm4moe", "Glm4MoeForCausalLM", &GLM4_MOE_NAMES, glm4_moe),
    plain("gpt-oss", "GptOssForCausalLM", &GLM4_MOE_NAMES, gpt_oss),
    plain("lfm2", "Lfm2ForCausalLM", &LFM2_NAMES, lfm2),
    plain("lfm2moe", "Lfm2MoeForCausalLM", &LFM2_NAMES, lfm2_moe),
];

const fn plain(
    name: &'static str,
    class: &'static str,
    names: &'static Names,
    keys: fn(&mut Metadata<'_>, &mut Map<String, Json>),
) -> Architecture {
    Architecture { name, class, names, paired: false, norms_plus_one: false, keys }
}

/// `output.weight` is absent where the head is the embedding.
const HEAD: &str = "output.weight";
/// Factors that divide the rotary frequencies (llama3).
const ROPE_FREQS: &str = "rope_freqs.weight";
/// The factors of longrope.
const SHORT_FACTORS: &str = "rope_factors_short.weight";
const LONG_FACTORS: &str = "rope_factors_long.weight";
/// Tensors of rotary parameters, which are read with the header.
pub const ROPE_TENSORS: [&str; 3] = [ROPE_FREQS, SHORT_FACTORS, LONG_FACTORS];

static NAMES: Names = Names {
    embed: "token_embd.weight",
    layers: "blk",
    final_norm: "output_norm",
    heads: &[HEAD],
    attn_norm: Some("attn_norm"),
    attn_post_norm: None,
    mlp_norm: Some("ffn_norm"),
    mlp_post_norm: None,
    projections: Projections::Separate { q: "attn_q", k: "attn_k", v: "attn_v" },
    o: "attn_output",
    q_norm: "attn_q_norm",
    k_norm: "attn_k_norm",
    gate: Some("ffn_gate"),
    up: "ffn_up",
    down: "ffn_down",
};
static GEMMA_NAMES: Names =
    Names { attn_post_norm: Some("post_attention_norm"), mlp_post_norm: Some("post_ffw_norm"), ..NAMES };
static OLMO2_NAMES: Names = Names { attn_norm: None, mlp_norm: None, ..GEMMA_NAMES };
static PHI3_NAMES: Names = Names { projections: Projections::Rows { qkv: "attn_qkv" }, gate: None, ..NAMES };
static UNGATED_NAMES: Names = Names { gate: None, ..NAMES };
/// The converter stacks the rows of q, k and v, which the checkpoint has head by head.
static GPT_NEOX_NAMES: Names = Names { projections: Projections::Rows { qkv: "attn_qkv" }, ..UNGATED_NAMES };
/// One norm feeds both branches. StableLM has it under `use_parallel_residual` too.
static SHARED_NORM_NAMES: Names = Names { mlp_norm: Some("attn_norm"), ..NAMES };

static GLM4_MOE_NAMES: Names = Names { mlp_norm: Some("post_attention_norm"), ..NAMES };

/// The converter takes the last norm for one of the embedding.
static LFM2_NAMES: Names = Names { final_norm: "token_embd_norm", ..NAMES };

/// Puts the names of an architecture in the place of those of its family.
pub fn rename(plan: &mut Plan, architecture: &Architecture) {
    plan.names = if architecture.name == "stablelm" && plan.parallel { &SHARED_NORM_NAMES } else { architecture.names };
    if let Some(experts) = &mut plan.experts {
        experts.names = &EXPERTS;
    }
    plan.sinks = plan.sinks.map(|_| "attn_sinks.weight");
    if let Some(conv) = &mut plan.conv {
        (conv.in_proj, conv.conv, conv.out_proj) = ("shortconv.in_proj", "shortconv.conv", "shortconv.out_proj");
    }
}

/// Experts of every architecture.
static EXPERTS: ExpertNames = ExpertNames {
    router: &["ffn_gate_inp"],
    correction: &["exp_probs_b.bias"],
    correction_row: false,
    each: None,
    stacked: &[Stacked {
        gate_up: GateUp::Separate { gate: "ffn_gate_exps", up: "ffn_up_exps" },
        down: "ffn_down_exps",
        weight: ".weight",
        bias: ".bias",
        transposed: false,
    }],
    shared: &[SharedNames { gate: Some("ffn_gate_shexp"), up: "ffn_up_shexp", down: "ffn_down_shexp" }],
    shared_gate: "ffn_gate_inp_shexp",
};

/// Keys of an architecture that change nothing at these values.
const NEUTRAL: [(&str, &[Neutral], &str); 14] = [
    ("rope.scaling.finetuned", &[Neutral::Any], "a record of how the model was made"),
    ("tensor_data_layout", &[Neutral::Any], "the architecture decides"),
    ("expert_count", &[Neutral::Number(0.0)], "this architecture has no experts"),
    ("expert_used_count", &[Neutral::Number(0.0)], "this architecture has no experts"),
    ("expert_shared_count", &[Neutral::Number(0.0)], "this architecture has no experts"),
    ("leading_dense_block_count", &[Neutral::Any], "there are no experts"),
    ("interleave_moe_layer_step", &[Neutral::Any], "there are no experts"),
    ("attention.causal", &[Neutral::Truth(true)], "a decoder looks backwards only"),
    ("attention.max_alibi_bias", &[Neutral::Number(0.0)], "ALiBi is not supported"),
    ("attention.clamp_kqv", &[Neutral::Number(0.0)], "clamped projections are not supported"),
    ("pooling_type", &[Neutral::Number(0.0)], "embedding models are not supported"),
    ("rope.scale_linear", &[Neutral::Number(1.0)], "`rope.scaling.factor` counts"),
    ("rope.scaling.yarn_ext_factor", &[Neutral::Number(1.0), Neutral::Number(-1.0)], "as for every model of yarn"),
    ("rope.scaling.yarn_attn_factor", &[Neutral::Number(1.0)], "as for every model of yarn"),
];

enum Neutral {
    Any,
    Number(f64),
    Truth(bool),
}

impl Neutral {
    fn is(&self, value: &Value) -> bool {
        match self {
            Neutral::Any => true,
            Neutral::Number(expected) => number_of(value) == Some(*expected),
            Neutral::Truth(expected) => value.truth() == Some(*expected),
        }
    }

    fn shown(&self) -> String {
        match self {
            Neutral::Any => "any value".to_string(),
            Neutral::Number(n) => n.to_string(),
            Neutral::Truth(truth) => truth.to_string(),
        }
    }
}

fn number_of(value: &Value) -> Option<f64> {
    match value {
        Value::Float(x) => Some(*x),
        other => other.integer().map(|n| n as f64),
    }
}

/// Texts of tokens that end an answer, as llama.cpp looks for them (`src/llama-vocab.cpp`): chat models name one of several.
const ENDS: [&str; 14] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
];

/// Metadata under question: every key that is read is recorded, every bad value becomes a reason.
pub struct Metadata<'a> {
    header: &'a Header,
    /// Tensors of all parts: name and extents.
    shape: &'a dyn Fn(&str) -> Option<Vec<usize>>,
    /// Values of the tensors of rotary factors.
    factors: &'a dyn Fn(&str) -> Option<Vec<f32>>,
    architecture: &'static str,
    asked: BTreeSet<String>,
    /// Those of [`ROPE_TENSORS`] that were asked for.
    rope_tensors: BTreeSet<&'static str>,
    reasons: &'a mut Vec<Reason>,
}

/// A config as the families read it, and what it does not say.
pub struct Read {
    pub architecture: &'static Architecture,
    pub config: Map<String, Json>,
    /// What the rotary frequencies are divided by.
    pub rope_divisors: Option<Vec<f32>>,
    /// Those of [`ROPE_TENSORS`] that the architecture reads.
    pub rope_tensors: BTreeSet<&'static str>,
}

/// Reads the metadata of a model; `None`: the reasons say why not.
pub fn read(
    header: &Header,
    shape: &dyn Fn(&str) -> Option<Vec<usize>>,
    factors: &dyn Fn(&str) -> Option<Vec<f32>>,
    reasons: &mut Vec<Reason>,
) -> Option<Read> {
    const KEY: &str = "general.architecture";
    let name = match header.metadata.get(KEY) {
        None => {
            reasons.push(Reason::MissingKey { key: KEY.to_string() });
            return None;
        }
        Some(value) => value.text().map_or(value.to_string(), str::to_string),
    };
    let Some(architecture) = ARCHITECTURES.iter().find(|own| own.name == name) else {
        let why = "is no supported architecture of GGUF; `monobloc schema` lists the families";
        reasons.push(Reason::Architecture { class: name, why });
        return None;
    };
    let before = reasons.len();
    let asked = BTreeSet::new();
    let rope_tensors = BTreeSet::new();
    let mut m = Metadata { header, shape, factors, architecture: architecture.name, asked, rope_tensors, reasons };
    let mut config = Map::new();
    config.insert("architectures".to_string(), json!([architecture.class]));
    m.common(&mut config);
    (architecture.keys)(&mut m, &mut config);
    let rope_divisors = m.factors(ROPE_FREQS);
    m.special_tokens(&mut config);
    m.quantisation();
    let rope_tensors = std::mem::take(&mut m.rope_tensors);
    m.end();
    (reasons.len() == before).then_some(Read { architecture, config, rope_divisors, rope_tensors })
}

impl Metadata<'_> {
    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    /// The value of a key of the architecture.
    fn value(&mut self, key: &str) -> Option<&Value> {
        let full = self.full(key);
        self.any(&full)
    }

    fn any(&mut self, full: &str) -> Option<&Value> {
        self.asked.insert(full.to_string());
        self.header.metadata.get(full)
    }

    fn bad(&mut self, full: String, expected: impl Into<String>, found: String) {
        self.reasons.push(Reason::BadValue { key: full, expected: expected.into(), found });
    }

    /// The value of a key of the architecture as `read` has it; a value that is no such thing is a reason.
    fn typed<T>(&mut self, key: &str, expected: &str, read: impl Fn(&Value) -> Option<T>) -> Option<T> {
        let full = self.full(key);
        let value = self.any(&full)?.clone();
        let typed = read(&value);
        if typed.is_none() {
            self.bad(full, expected, value.to_string());
        }
        typed
    }

    /// A key of the architecture that is not there is a reason.
    fn require(&mut self, key: &str) {
        let full = self.full(key);
        if !self.header.metadata.contains_key(&full) {
            self.reasons.push(Reason::MissingKey { key: full });
        }
    }

    /// A count that may be given for each layer, if it is the same for all.
    fn count(&mut self, key: &str) -> Option<u64> {
        self.typed(key, "a whole number, the same for every layer", |value| {
            let same = match value {
                Value::Integers(list) => list.first().copied().filter(|first| list.iter().all(|n| n == first)),
                other => other.integer(),
            };
            same.and_then(|n| u64::try_from(n).ok())
        })
    }

    fn count_required(&mut self, key: &str) -> u64 {
        self.require(key);
        self.count(key).unwrap_or(1)
    }

    fn number(&mut self, key: &str) -> Option<f64> {
        self.typed(key, "a finite number", |value| number_of(value).filter(|number| number.is_finite()))
    }

    fn number_required(&mut self, key: &str) -> f64 {
        self.require(key);
        self.number(key).unwrap_or(1.0)
    }

    fn truth(&mut self, key: &str) -> Option<bool> {
        self.typed(key, "true or false", Value::truth)
    }

    /// A text of the architecture.
    fn text(&mut self, key: &str) -> Option<String> {
        self.typed(key, "a string", |value| value.text().map(str::to_string))
    }

    fn has(&self, tensor: &str) -> bool {
        (self.shape)(tensor).is_some()
    }

    fn factors(&mut self, tensor: &'static str) -> Option<Vec<f32>> {
        self.rope_tensors.insert(tensor);
        (self.factors)(tensor)
    }

    /// What all architectures share.
    fn common(&mut self, config: &mut Map<String, Json>) {
        let mut set = |key: &str, value: Json| config.insert(key.to_string(), value);
        let (hidden, heads) = (self.count_required("embedding_length"), self.count_required("attention.head_count"));
        set("hidden_size", json!(hidden));
        set("num_attention_heads", json!(heads));
        set("num_hidden_layers", json!(self.count_required("block_count")));
        set("intermediate_size", json!(self.count_required("feed_forward_length")));
        set("max_position_embeddings", json!(self.count_required("context_length")));
        set("tie_word_embeddings", json!(!self.has(HEAD)));
        let rows = (self.shape)(NAMES.embed).and_then(|shape| shape.first().copied());
        if rows.is_none() {
            let shape = vec![1, u32::try_from(hidden).unwrap_or(EXTENT_MAX)];
            self.reasons.push(Reason::MissingTensor { name: NAMES.embed.to_string(), shape });
        }
        let rows = rows.unwrap_or(1) as u64;
        set("vocab_size", json!(rows));
        if let Some(vocab) = self.count("vocab_size").filter(|vocab| *vocab != rows) {
            let (first, second) = (self.full("vocab_size"), NAMES.embed.to_string());
            self.reasons.push(Reason::Conflict { first, second, detail: format!("{vocab} tokens and {rows} rows") });
        }
    }

    /// The width of a head: as given, else what the heads leave of the hidden width.
    fn head_dim(&mut self) -> u64 {
        let (hidden, heads) = (self.count("embedding_length").unwrap_or(1), self.count("attention.head_count"));
        let derived = hidden / heads.unwrap_or(1).max(1);
        let key = self.count("attention.key_length").unwrap_or(derived);
        if let Some(value) = self.count("attention.value_length").filter(|value| *value != key) {
            let (first, second) = (self.full("attention.key_length"), self.full("attention.value_length"));
            self.reasons.push(Reason::Conflict { first, second, detail: format!("{key} and {value}") });
        }
        key
    }

    /// The width of heads of a class that has no key for it.
    fn derived_head_dim(&mut self) -> u64 {
        let (hidden, heads) = (self.count("embedding_length").unwrap_or(1), self.count("attention.head_count"));
        let (derived, found) = (hidden / heads.unwrap_or(1).max(1), self.head_dim());
        if found != derived {
            let full = self.full("attention.key_length");
            self.bad(full, format!("{derived}, the hidden width by the heads"), found.to_string());
        }
        derived
    }

    /// Heads of keys and values where layers without attention have none: their number, and which layers have attention.
    fn heads_by_layer(&mut self) -> (u64, Vec<bool>) {
        const KEY: &str = "attention.head_count_kv";
        self.require(KEY);
        let layers = self.count("block_count").unwrap_or(1);
        let read = |value: &Value| {
            let list = match value {
                Value::Integers(list) if list.len() as u64 == layers => list.clone(),
                // The same for every layer. A count that is no size is refused elsewhere.
                other => vec![other.integer()?; usize::try_from(layers.min(1 << 16)).ok()?],
            };
            let most = list.iter().copied().max()?;
            let same = list.iter().all(|&n| n == 0 || n == most);
            Some((u64::try_from(most).ok().filter(|_| same)?, list.iter().map(|&n| n > 0).collect()))
        };
        self.typed(KEY, "one number for each layer: 0, or the same as in every other layer with attention", read)
            .unwrap_or_default()
    }

    fn key_value_heads(&mut self, config: &mut Map<String, Json>) {
        let heads = self.count("attention.head_count").unwrap_or(1);
        let own = self.count("attention.head_count_kv").unwrap_or(heads);
        config.insert("num_key_value_heads".to_string(), json!(own));
    }

    fn rms(&mut self, config: &mut Map<String, Json>) {
        config.insert("rms_norm_eps".to_string(), json!(self.number_required("attention.layer_norm_rms_epsilon")));
    }

    fn layer_norm(&mut self, key: &str, config: &mut Map<String, Json>) {
        config.insert(key.to_string(), json!(self.number_required("attention.layer_norm_epsilon")));
    }

    /// The base of the rotary frequencies.
    fn theta(&mut self, key: &str, config: &mut Map<String, Json>) {
        config.insert(key.to_string(), json!(self.number("rope.freq_base").unwrap_or(10_000.0)));
    }

    /// The share of a head that is rotated, where it is not all of it or the class has another default.
    fn rotated(&mut self, key: &str, head_dim: u64, always: bool, config: &mut Map<String, Json>) {
        let dim = self.count("rope.dimension_count").unwrap_or(head_dim);
        if dim != head_dim || always {
            // The class computes `int(head_dim * share)`, so the share may not be rounded down.
            let mut share = dim as f64 / head_dim.max(1) as f64;
            if ((head_dim as f64 * share) as u64) < dim {
                share = share.next_up();
            }
            config.insert(key.to_string(), json!(share));
        }
    }

    /// Scaling of rotary frequencies by a formula: linear and yarn.
    fn rope_scaling(&mut self, config: &mut Map<String, Json>) {
        let kind = self.text("rope.scaling.type");
        let factor = self.number("rope.scaling.factor");
        let original = self.count("rope.scaling.original_context_length");
        let attention = self.number("rope.scaling.attn_factor").filter(|factor| *factor != 1.0);
        if let Some(found) = attention {
            let full = self.full("rope.scaling.attn_factor");
            self.bad(full, "1", found.to_string());
        }
        let scaling = match kind.as_deref() {
            None | Some("none") if factor.is_none_or(|factor| factor == 1.0 || factor == 0.0) => return,
            // Before `rope.scaling.type` there was linear scaling only.
            None | Some("linear") => json!({ "rope_type": "linear", "factor": factor.unwrap_or(1.0) }),
            Some("yarn") => {
                let (fast, slow) =
                    (self.number("rope.scaling.yarn_beta_fast"), self.number("rope.scaling.yarn_beta_slow"));
                let mut yarn = json!({ "rope_type": "yarn", "factor": factor.unwrap_or(1.0) });
                let parts = [
                    ("original_max_position_embeddings", original.map(|n| n as f64)),
                    ("beta_fast", fast),
                    ("beta_slow", slow),
                ];
                for (key, value) in parts.into_iter().filter_map(|(key, value)| Some((key, value?))) {
                    yarn[key] = if value.fract() == 0.0 { json!(value as u64) } else { json!(value) };
                }
                yarn
            }
            Some(other) => {
                let (full, found) = (self.full("rope.scaling.type"), format!("\"{other}\""));
                let expected = match other {
                    "none" => "linear or yarn beside `rope.scaling.factor`",
                    _ => "none, linear or yarn",
                };
                return self.bad(full, expected, found);
            }
        };
        config.insert("rope_scaling".to_string(), scaling);
    }

    /// Biases of the projections of attention and MLP, by whether the first layer has them.
    fn biases(&mut self, config: &mut Map<String, Json>, attention: &str, mlp: Option<&str>) {
        let has = self.has("blk.0.attn_q.bias");
        config.insert(attention.to_string(), json!(has));
        if let Some(mlp) = mlp {
            config.insert(mlp.to_string(), json!(self.has("blk.0.ffn_up.bias")));
        }
    }

    /// Refuses a choice of experts by anything else than a sigmoid.
    fn by_sigmoid(&mut self) {
        const SIGMOID: u64 = 2;
        if let Some(found) = self.count("expert_gating_func").filter(|found| *found != SIGMOID) {
            let full = self.full("expert_gating_func");
            self.bad(full, "2, a sigmoid", found.to_string());
        }
    }

    /// Ids that begin and end a text.
    fn special_tokens(&mut self, config: &mut Map<String, Json>) {
        let sentencepiece = self.any("tokenizer.ggml.model").and_then(Value::text) == Some("llama");
        let mut id = |key: &str, default: Option<i64>| {
            let key = format!("tokenizer.ggml.{key}_token_id");
            self.any(&key).and_then(Value::integer).or(default)
        };
        let bos = id("bos", sentencepiece.then_some(1));
        let eos = id("eos", sentencepiece.then_some(2));
        let mut ends: Vec<i64> = [eos, id("eot", None), id("eom", None)].into_iter().flatten().collect();
        if let Some(Value::Texts(tokens)) = self.any("tokenizer.ggml.tokens") {
            ends.extend(ends_of(tokens));
            let of_message = end_of_message(tokens).filter(|id| Some(*id) != eos);
            ends.retain(|id| Some(*id) != of_message);
        }
        // Files of Ollama have all of them in a list.
        if let Some(Value::Integers(more)) = self.any("tokenizer.ggml.eos_token_ids") {
            ends.extend(more);
        }
        ends.sort_unstable();
        ends.dedup();
        if !ends.is_empty() {
            config.insert("eos_token_id".to_string(), json!(ends));
        }
        if let Some(bos) = bos {
            config.insert("bos_token_id".to_string(), json!(bos));
        }
    }

    /// Blocks had other layouts before version 2.
    fn quantisation(&mut self) {
        const KEY: &str = "general.quantization_version";
        let found = self.any(KEY).cloned();
        if let Some(found) = found.filter(|found| found.integer() != Some(2)) {
            self.bad(KEY.to_string(), "2 (quantise the model again with a current llama.cpp)", found.to_string());
        }
    }

    /// Refuses keys that nothing asked for, and neutral ones at other values.
    fn end(mut self) {
        for (key, allowed, why) in NEUTRAL {
            let full = self.full(key);
            if self.asked.contains(&full) {
                continue;
            }
            let Some(value) = self.any(&full).cloned() else { continue };
            if !allowed.iter().any(|neutral| neutral.is(&value)) {
                let allowed = allowed.iter().map(Neutral::shown).collect::<Vec<_>>().join(" or ");
                self.reasons.push(Reason::NotNeutral { key: full, allowed, found: value.to_string(), why });
            }
        }
        // `general` names and describes; the tokenizer has a schema of its own; parts were compared with each other. The others are records of
        // who quantised a model, and how.
        let elsewhere = ["general.", "tokenizer.", "split.", "quantize.imatrix.", "mradermacher."];
        for key in self.header.metadata.keys() {
            if !self.asked.contains(key) && !elsewhere.iter().any(|begin| key.starts_with(begin)) {
                let class = class_of(self.architecture);
                self.reasons.push(Reason::UnknownKey { key: key.clone(), class, nearest: None });
            }
        }
    }
}

fn class_of(architecture: &str) -> &'static str {
    ARCHITECTURES.iter().find(|own| own.name == architecture).map_or("", |own| own.class)
}

/// Tokens whose text ends an answer. As in llama.cpp they may be of any type: some converters wrote them as user-defined ones.
fn ends_of(tokens: &Texts) -> impl Iterator<Item = i64> {
    tokens.iter().enumerate().filter(|(_, text)| ENDS.contains(text)).map(|(id, _)| id as i64)
}

/// The token `<|end|>` where an answer has messages in several channels (gpt-oss, known by two other ends): it ends a message, and the answer goes on.
/// As in llama.cpp.
fn end_of_message(tokens: &Texts) -> Option<i64> {
    let id_of = |text| tokens.iter().position(|own| own == text).map(|id| id as i64);
    id_of("<|return|>").and(id_of("<|call|>")).and(id_of("<|end|>"))
}

fn llama(m: &mut Metadata<'_>, config: &mut Map<String, Json>) {
    grouped(m, config);
    if m.count("expert_count").is_some_and(|count| count > 0) {
        // Mixtral has no architecture of its own.
        config.insert("architectures".to_string(), json!(["MixtralForCausalLM"]));
        return experts(m, "num_local_experts", Some(true), config);
    }
    m.biases(config, "attention_bias", Some("mlp_bias"));
}

/// Experts of all layers, chosen by a softmax. `normalised`: whether the model code divides the weights of the chosen ones by their sum.
fn experts(m: &mut Metadata<'_>, key: &str, normalised: Option<bool>, config: &mut Map<String, Json>) {
    const SOFTMAX: u64 = 1;
    config.insert(key.to_string(), json!(m.count_required("expert_count")));
    config.insert("num_experts_per_tok".to_string(), json!(m.count_required("expert_used_count")));
    if let Some(found) = m.count("expert_gating_func").filter(|found| *found != SOFTMAX) {
        let full = m.full("expert_gating_func");
        m.bad(full, "1, a softmax", found.to_string());
    }
    for key in ["leading_dense_block_count", "expert_group_count", "expert_group_used_count"] {
        if let Some(found) = m.count(key).filter(|found| *found > 1 || *found == 1 && key.starts_with("leading")) {
            let full = m.full(key);
            m.bad(full, "nothing: every layer has experts, in one group", found.to_string());
        }
    }
    if let (Some(norm), Some(found)) = (normalised, m.truth("expert_weights_norm"))
        && norm != found
    {
        let full = m.full("expert_weights_norm");
        m.bad(full, norm.to_string(), found.to_string());
    }
    if let Some(found) = m.number("expert_weights_scale").filter(|found| ![0.0, 1.0].contains(found)) {
        let full = m.full("expert_weights_scale");
        m.bad(full, "1", found.to_string());
    }
}

fn qwen3_moe(m: &mut Metadata<'_>, config: &mut Map<String, Json>) {
    biased(m, config);
    experts(m, "num_experts", Some(true), config);
    config.insert("moe_intermediate_size".to_string(), json!(m.count_required("expert_feed_forward_length")));
    config.insert("norm_topk_prob".to_string(), json!(true));
}

fn qwen2_moe(m: &mut Metadata<'_>, config: &mut Map<String, Json>) {
    grouped(m, config);
    experts(m, "num_experts", Some(false), config);
    for (key, name) in [
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    ] {
        config.insert(name.to_string(), json!(m.count_required(key)));
    }
    config.insert("qkv_bias".to_string(), json!(m.has("blk.0.attn_q.bias")));
    config.insert("norm_topk_prob".to_string(), json!(false));
}

/// As [`grouped`], for a class that has no key for the width of a head.
fn grouped_without_dim(m: &mut Metadata<'_>, config: &mut Map<String, Json>) {
    let head_dim = m.derived_head_dim();
    m.key_value_heads(config);
    m.rms(config);
    m.theta("rope_theta", config);
    m.rotated("partial_rotary_factor", head_dim, false, config);
    m.rope_scaling(config);
    m.biases(config, "attention_bias", None);
}

fn olmoe(m: &mut Metadata<'_>, config: &mut Map<String, Json>) {
    grouped_without_dim(m, config);
    experts(m, "num_experts", Some(false), config);
    config.insert("norm_topk_prob".to_string(), json!(false));
}

fn granite_moe(m: &mut Metadata<'_>, config: &mut Map<String, Json>) {
    grouped_without_dim(m, config);
    multipliers(m, config);
    experts(m, "num_local_experts", Some(true), config);
    if let Some(found) = m.count("expert_shared_feed_forward_length").filter(|found| *found != 0) {
        let full = m.full("expert_shared_feed_forward_length");
        m.bad(full, "nothing: the class has no shared expert", found.to_string());
    }
}

fn glm4_moe(m: &mut Metadata<'_>, config: &mut Map<String, Json>) {
    biased(m, config);
    let head_dim = m.head_dim();
    m.rotated("partial_rotary_factor", head_dim, true, config);
    m.by_sigmoid();
    // Blocks count those that predict further tokens.
    let (blocks, ahead) = (m.count_required("block_count"), m.count("nextn_predict_layers").unwrap_or(0));
    let counts = [
        ("num_hidden_layers", blocks.saturating_sub(ahead)),
        ("num_nextn_predict_layers", ahead),
        ("n_routed_experts", m.count_required("expert_count")),
        ("num_experts_per_tok", m.count_required("expert_used_count")),
        ("n_shared_experts", m.count_required("expert_shared_count")),
        ("moe_intermediate_size", m.count_required("expert_feed_forward_length")),
        ("first_k_dense_replace", m.count("leading_dense_block_count").unwrap_or(0)),
        ("n_group", m.count("expert_group_count").unwrap_or(1)),
        ("topk_group", m.count("expert_group_used_count").unwrap_or(1)),
    ];
    config.extend(counts.map(|(name, count)| (name.to_string(), json!(count))));
    let scale = m.number("expert_weights_scale").filter(|scale| *scale != 0.0).unwrap_or(1.0);
    config.insert("routed_scaling_factor".to_string(), json!(scale));
    config.insert("norm_topk_prob".to_string(), json!(m.truth("expert_weights_norm").unwrap_or(false)));
    config.insert("use_qk_norm".to_string(), json!(m.has("blk.0.attn_q_norm.weight")));
}

fn gpt_oss(m: &mut Metadata<'_>, config: &mut Map<String, Json>) {
    biased(m, config);
    // A softmax over the chosen experts, in whatever order a file says it.
    const SOFTMAX_OF_CHOSEN: u64 = 3;
    if let Some(found) = m.count("expert_gating_func").filter(|found| *found != SOFTMAX_OF_CHOSEN) {
        let full = m.full("expert_gating_func");
        m.bad(full, "3, a softmax over the chosen experts", found.to_string());
    }
    config.insert("num_local_experts".to_string(), json!(m.count_required("expert_count")));
    config.insert("num_experts_per_tok".to_string(), json!(m.count_required("expert_used_count")));
    config.insert("intermediate_size".to_string(), json!(m.count_required("expert_feed_forward_length")));
    config.insert("sliding_window".to_string(), json!(m.count_required("attention.sliding_window")));
    if m.count("attention.sliding_window_pattern").is_some_and(|every| every != 2) {
        let full = m.full("attention.sliding_window_pattern");
        m.bad(full, "2: every other layer slides", "another pattern".to_string());
    }
    // The published models do not round the range of pairs that YaRN blends. A file cannot say so.
    match config.get_mut("rope_scaling") {
        Some(scaling) if scaling["rope_type"] == "yarn" => scaling["truncate"] = json!(false),
        _ => {
            let full = m.full("rope.scaling.type");
            m.bad(full, "yarn, as in the published models", "another".to_string());
        }
    }
}

/// What both kinds of LFM2 share.
fn lfm2_shared(m: &mut Metadata<'_>, config: &mut Map<String, Json>) {
    let head_dim = m.derived_head_dim();
    let (kv_heads, attends) = m.heads_by_layer();
    config.insert("num_key_value_heads".to_string(), json!(kv_heads));
    let word = |attends: &bool| if *attends { "full_attention" } else { "conv" };
    config.insert("layer_types".to_string(), json!(attends.iter().map(word).collect::<Vec<_>>()));
    config.insert("norm_eps".to_string(), json!(m.number_required("attention.layer_norm_rms_epsilon")));
    config.insert("conv_L_cache".to_string(), json!(m.count_required("shortconv.l_cache")));
    let first = attends.iter().position(|attends| !attends).unwrap_or(0);
    config.insert("conv_bias".to_string(), json!(m.has(&format!("blk.{first}.shortconv.conv.bias"))));
    m.theta("rope_theta", config);
    m.rotated("partial_rotary_factor", head_dim, false, config);
    m.rope_scaling(config);
}

fn lfm2(m: &mut Metadata<'_>, config: &mut Map<String, Json>) {
    lfm2_shared(m, config);
    // The file has the width itself.
    config.insert("block_auto_adjust_ff_dim".to_string(), json!(false));
}

fn lfm2_moe(m: &mut Metadata<'_>, config: &mut Map<String, Json>) {
    lfm2_shared(m, config);
    m.by_sigmoid();
    let dense = m.count("leading_dense_block_count").unwrap_or(0);
    let counts = [
        ("num_dense_layers", dense),
        ("num_experts", m.count_required("expert_count")),
        ("num_experts_per_tok", m.count_required("expert_used_count")),
        ("moe_intermediate_size", m.count_required("expert_feed_forward_length")),
    ];
    config.extend(counts.map(|(name, count)| (name.to_string(), json!(count))));
    let scale = m.number("expert_weights_scale").filter(|scale| *scale != 0.0).unwrap_or(1.0);
    config.insert("routed_scaling_factor".to_string(), json!(scale));
    config.insert("norm_topk_prob".to_string(), json!(m.truth("expert_weights_norm").unwrap_or(true)));
    config.insert("use_expert_bias".to_string(), json!(m.has(&format!("blk.{dense}.exp_probs_b.bias"))));
}

/// The width of heads, keys and values, RMS norms and rotary parameters.
fn grouped(m: &mut Metadata<'_>, config: &mut Map<String, Json>) {
    let head_dim = m.head_dim();
    config.insert("head_dim".to_string(), json!(head_dim));
    m.key_value_heads(config);
    m.rms(config);
    m.theta("rope_theta", config);
    m.rotated("partial_rotary_factor", head_dim, false, config);
    m.rope_scaling(config);
}

fn biased(m: &mut Metadata<'_>, config: &mut Map<String, Json>) {
    grouped(m, config);
    m.biases(config, "attention_bias", None);
}

/// Scores are divided by the root of this: the width of a head, except in the largest model of each of Gemma 2 and 3
/// (`f_attention_scale` of llama.cpp).
fn query_scalar(m: &mut Metadata<'_>, largest: u64, config: &mut Map<String, Json>) {
    let scalar = if m.count("block_count") == Some(largest) {
        m.count("embedding_length").unwrap_or(1) / m.count("attention.head_count").unwrap_or(1).max(1)
    } else {
        m.head_dim()
    };
    config.insert("query_pre_attn_scalar".to_string(), json!(scalar));
}

fn gemma2(m: &mut Metadata<'_>, config: &mut Map<String, Json>) {
    grouped(m, config);
    query_scalar(m, 46, config);
    let (attention, logits) = (m.number("attn_logit_softcapping"), m.number("final_logit_softcapping"));
    config.insert("attn_logit_softcapping".to_string(), json!(attention.unwrap_or(50.0)));
    config.insert("final_logit_softcapping".to_string(), json!(logits.unwrap_or(30.0)));
    config.insert("sliding_window".to_string(), json!(m.count("attention.sliding_window").unwrap_or(4096)));
}

fn gemma3(m: &mut Metadata<'_>, config: &mut Map<String, Json>) {
    grouped(m, config);
    query_scalar(m, 62, config);
    config.insert("final_logit_softcapping".to_string(), json!(m.number("final_logit_softcapping")));
    config.insert("sliding_window".to_string(), json!(m.count_required("attention.sliding_window")));
    config.insert("rope_local_base_freq".to_string(), json!(m.number("rope.freq_base_swa").unwrap_or(10_000.0)));
    match m.value("attention.sliding_window_pattern").cloned() {
        None => {}
        Some(Value::Truths(slides)) => {
            let word = |slides: &bool| if *slides { "sliding_attention" } else { "full_attention" };
            config.insert("layer_types".to_string(), json!(slides.iter().map(word).collect::<Vec<_>>()));
        }
        Some(value) => {
            config.insert("sliding_window_pattern".to_string(), json!(value.integer()));
        }
    }
}

fn phi3(m: &mut Metadata<'_>, config: &mut Map<String, Json>) {
    let head_dim = m.head_dim();
    config.insert("head_dim".to_string(), json!(head_dim));
    m.key_value_heads(config);
    m.rms(config);
    m.theta("rope_theta", config);
    m.rotated("partial_rotary_factor", head_dim, false, config);
    // Files from before the key existed lack it: Phi-3-mini-4k and -medium-4k have this window (llama.cpp, pull request 8931).
    let is_4k = m.count("context_length") == Some(4096) && matches!(m.count("block_count"), Some(32 | 40));
    let window = m.count("attention.sliding_window").or(is_4k.then_some(2047));
    if let Some(window) = window.filter(|window| *window > 0) {
        config.insert("sliding_window".to_string(), json!(window));
    }
    let trained = m.count("rope.scaling.original_context_length");
    config.insert("original_max_position_embeddings".to_string(), json!(trained));
    let attention = m.number("rope.scaling.attn_factor");
    let kind = m.text("rope.scaling.type");
    m.number("rope.scaling.factor");
    if let Some(other) = kind.as_deref().filter(|kind| !matches!(*kind, "longrope" | "none")) {
        let full = m.full("rope.scaling.type");
        m.bad(full, "longrope or none", other.to_string());
    }
    let (short, long) = (m.factors(SHORT_FACTORS), m.factors(LONG_FACTORS));
    let wanted = kind.as_deref() == Some("longrope") || short.is_some() || long.is_some();
    for (name, found) in [(SHORT_FACTORS, &short), (LONG_FACTORS, &long)] {
        if wanted && found.is_none() {
            let pairs = m.count("rope.dimension_count").unwrap_or(head_dim) / 2;
            let shape = vec![u32::try_from(pairs).unwrap_or(EXTENT_MAX)];
            m.reasons.push(Reason::MissingTensor { name: name.to_string(), shape });
        }
    }
    if let (Some(short), Some(long)) = (short, long) {
        let mut scaling = json!({ "type": "longrope", "short_factor": short, "long_factor": long });
        if let Some(attention) = attention {
            scaling["attention_factor"] = json!(attention);
        }
        config.insert("rope_scaling".to_string(), scaling);
    }
}

fn granite(m: &mut Metadata<'_>, config: &mut Map<String, Json>) {
    llama(m, config);
    multipliers(m, config);
}

fn multipliers(m: &mut Metadata<'_>, config: &mut Map<String, Json>) {
    for (key, name) in [
        ("embedding_scale", "embedding_multiplier"),
        ("attention.scale", "attention_multiplier"),
        ("residual_scale", "residual_multiplier"),
        ("logit_scale", "logits_scaling"),
    ] {
        // A class of its own default would compute something else than what the file says.
        config.insert(name.to_string(), json!(m.number_required(key)));
    }
}

fn stablelm(m: &mut Metadata<'_>, config: &mut Map<String, Json>) {
    let head_dim = m.derived_head_dim();
    m.key_value_heads(config);
    m.layer_norm("layer_norm_eps", config);
    m.theta("rope_theta", config);
    m.rotated("partial_rotary_factor", head_dim, true, config);
    m.rope_scaling(config);
    m.biases(config, "use_qkv_bias", None);
    config.insert("qk_layernorm".to_string(), json!(m.has("blk.0.attn_q_norm.weight")));
    // Models without a norm of the MLP have both branches read one.
    let parallel = m.truth("use_parallel_residual").unwrap_or(false) && !m.has("blk.0.ffn_norm.weight");
    config.insert("use_parallel_residual".to_string(), json!(parallel));
}

fn starcoder2(m: &mut Metadata<'_>, config: &mut Map<String, Json>) {
    let head_dim = m.head_dim();
    config.insert("head_dim".to_string(), json!(head_dim));
    m.key_value_heads(config);
    m.layer_norm("norm_epsilon", config);
    m.theta("rope_theta", config);
    m.rotated("partial_rotary_factor", head_dim, false, config);
    m.rope_scaling(config);
    m.biases(config, "use_bias", None);
    if let Some(window) = m.count("attention.sliding_window").filter(|window| *window > 0) {
        config.insert("sliding_window".to_string(), json!(window));
    }
}

fn gpt_neox(m: &mut Metadata<'_>, config: &mut Map<String, Json>) {
    let head_dim = m.derived_head_dim();
    let heads = m.count("attention.head_count");
    if let Some(found) = m.count("attention.head_count_kv").filter(|own| Some(*own) != heads) {
        let full = m.full("attention.head_count_kv");
        m.bad(full, "as many as `attention.head_count`", found.to_string());
    }
    m.layer_norm("layer_norm_eps", config);
    m.theta("rotary_emb_base", config);
    m.rotated("rotary_pct", head_dim, true, config);
    m.rope_scaling(config);
    config.insert("attention_bias".to_string(), json!(m.has("blk.0.attn_qkv.bias")));
    config.insert("use_parallel_residual".to_string(), json!(m.truth("use_parallel_residual").unwrap_or(true)));
}

fn cohere_shared(m: &mut Metadata<'_>, config: &mut Map<String, Json>) {
    let head_dim = m.head_dim();
    config.insert("head_dim".to_string(), json!(head_dim));
    m.key_value_heads(config);
    m.layer_norm("layer_norm_eps", config);
    m.theta("rope_theta", config);
    m.rotated("partial_rotary_factor", head_dim, false, config);
    m.rope_scaling(config);
    m.biases(config, "attention_bias", None);
    config.insert("logit_scale".to_string(), json!(m.number_required("logit_scale")));
}

fn cohere(m: &mut Metadata<'_>, config: &mut Map<String, Json>) {
    cohere_shared(m, config);
    config.insert("use_qk_norm".to_string(), json!(m.has("blk.0.attn_q_norm.weight")));
}

fn cohere2(m: &mut Metadata<'_>, config: &mut Map<String, Json>) {
    cohere_shared(m, config);
    config.insert("sliding_window".to_string(), json!(m.count_required("attention.sliding_window")));
    if let Some(pattern) = m.count("attention.sliding_window_pattern") {
        config.insert("sliding_window_pattern".to_string(), json!(pattern));
    }
}
