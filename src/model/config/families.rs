//! Owns the families: for each, its keys, its defaults, and how they become a [`Plan`].
//!
//! Defaults for absent keys are those of the configuration classes of transformers 5, which differ from family to
//! family. The effect of each key was read from the model code, not from the documentation.

mod convs;
mod dense;
mod hybrids;
mod mambas;
mod mixtures;

use crate::model::config::plan::{Ahead, LayerPlan, Names, NormPlan, Plan, Prefix, Projections};
use crate::model::config::reader::{Answer, EXTENT_MAX, LAYERS_MAX, POSITIONS_MAX, Reader, VOCAB_MAX};
use crate::model::config::reason::Reason;
use crate::model::config::rope::{self, LAYER_TYPES, Partial, ResolvedRope, RopeRules};
use crate::model::config::schema::{
    Entry, GATED_MLP, GROUPED, HEAD_DIM, LAYER_NORM, Literal, OFF, ON, RECORD, RMS, ROPE, TRAINED, When, modelled,
    neutral,
};
use crate::model::graph::{Act, NormKind, QkNormSpan, RopeId};

/// A class of transformers that the importer models.
pub struct Family {
    /// As in `architectures`.
    pub class: &'static str,
    pub model_type: &'static str,
    /// Keys beside those common to all families; the first entry for a key counts.
    pub keys: &'static [&'static [Entry]],
    pub plan: fn(&mut Reader) -> Option<Plan>,
}

pub static FAMILIES: &[Family] = &[
    Family {
        class: "LlamaForCausalLM",
        model_type: "llama",
        keys: &[LLAMA_KEYS, ATTENTION_BIAS, MLP_BIAS, GROUPED, HEAD_DIM, GATED_MLP, RMS, ROPE, TRAINED],
        plan: llama,
    },
    Family {
        class: "MistralForCausalLM",
        model_type: "mistral",
        keys: &[MISTRAL_KEYS, GROUPED, HEAD_DIM, GATED_MLP, RMS, ROPE, TRAINED],
        plan: mistral,
    },
    Family {
        class: "MinistralForCausalLM",
        model_type: "ministral",
        keys: &[MINISTRAL_KEYS, LAYER_TYPES_KEY, GROUPED, HEAD_DIM, GATED_MLP, RMS, ROPE, TRAINED],
        plan: ministral,
    },
    Family {
        class: "Qwen2ForCausalLM",
        model_type: "qwen2",
        keys: &[QWEN2_KEYS, QWEN_WINDOW, LAYER_TYPES_KEY, GROUPED, HEAD_DIM, GATED_MLP, RMS, ROPE, TRAINED],
        plan: qwen2,
    },
    Family {
        class: "Qwen3ForCausalLM",
        model_type: "qwen3",
        keys: &[QWEN_WINDOW, ATTENTION_BIAS, LAYER_TYPES_KEY, GROUPED, HEAD_DIM, GATED_MLP, RMS, ROPE, TRAINED],
        plan: qwen3,
    },
    Family {
        class: "Phi3ForCausalLM",
        model_type: "phi3",
        keys: &[PHI3_KEYS, GROUPED, HEAD_DIM, GATED_MLP, RMS, ROPE],
        plan: phi3,
    },
    Family {
        class: "GemmaForCausalLM",
        model_type: "gemma",
        keys: &[GEMMA1_KEYS, ATTENTION_BIAS, GROUPED, HEAD_DIM, RMS, ROPE, TRAINED],
        plan: gemma,
    },
    Family {
        class: "Gemma2ForCausalLM",
        model_type: "gemma2",
        keys: &[GEMMA2_KEYS, GEMMA_KEYS, ATTENTION_BIAS, LAYER_TYPES_KEY, GROUPED, HEAD_DIM, RMS, ROPE, TRAINED],
        plan: gemma2,
    },
    Family {
        class: "Gemma3ForCausalLM",
        model_type: "gemma3_text",
        keys: &[GEMMA3_KEYS, GEMMA_KEYS, ATTENTION_BIAS, LAYER_TYPES_KEY, GROUPED, HEAD_DIM, RMS, ROPE, TRAINED],
        plan: gemma3,
    },
    Family {
        class: "Olmo2ForCausalLM",
        model_type: "olmo2",
        keys: &[ATTENTION_BIAS, GROUPED, HEAD_DIM, GATED_MLP, RMS, ROPE, TRAINED],
        plan: olmo2,
    },
    Family {
        class: "GraniteForCausalLM",
        model_type: "granite",
        keys: &[GRANITE_KEYS, ATTENTION_BIAS, MLP_BIAS, GROUPED, HEAD_DIM, GATED_MLP, RMS, ROPE, TRAINED],
        plan: granite,
    },
    Family {
        class: "SmolLM3ForCausalLM",
        model_type: "smollm3",
        keys: &[
            SMOLLM3_KEYS,
            ATTENTION_BIAS,
            MLP_BIAS,
            LAYER_TYPES_KEY,
            GROUPED,
            HEAD_DIM,
            GATED_MLP,
            RMS,
            ROPE,
            TRAINED,
        ],
        plan: smollm3,
    },
    Family {
        class: "StableLmForCausalLM",
        model_type: "stablelm",
        keys: &[STABLELM_KEYS, GROUPED, GATED_MLP, LAYER_NORM, ROPE, TRAINED],
        plan: stablelm,
    },
    Family {
        class: "Starcoder2ForCausalLM",
        model_type: "starcoder2",
        keys: &[STARCODER2_KEYS, GROUPED, HEAD_DIM, GATED_MLP, ROPE, TRAINED],
        plan: starcoder2,
    },
    Family {
        class: "GPTNeoXForCausalLM",
        model_type: "gpt_neox",
        keys: &[GPT_NEOX_KEYS, ATTENTION_BIAS, GATED_MLP, LAYER_NORM],
        plan: gpt_neox,
    },
    Family {
        class: "CohereForCausalLM",
        model_type: "cohere",
        keys: &[COHERE_KEYS, COHERE_SHARED, ATTENTION_BIAS, GROUPED, HEAD_DIM, GATED_MLP, LAYER_NORM, ROPE, TRAINED],
        plan: cohere,
    },
    Family {
        class: "Cohere2ForCausalLM",
        model_type: "cohere2",
        keys: &[
            COHERE2_KEYS,
            COHERE_SHARED,
            ATTENTION_BIAS,
            LAYER_TYPES_KEY,
            GROUPED,
            HEAD_DIM,
            GATED_MLP,
            LAYER_NORM,
            ROPE,
            TRAINED,
        ],
        plan: cohere2,
    },
    mixtures::QWEN3_MOE,
    mixtures::QWEN2_MOE,
    mixtures::MIXTRAL,
    mixtures::OLMOE,
    mixtures::GRANITE_MOE,
    mixtures::GLM4_MOE,
    mixtures::DOTS1,
    mixtures::MINIMAX_M2,
    mixtures::HY_V3,
    mixtures::ERNIE45_MOE,
    mixtures::COHERE2_MOE,
    mixtures::AFMOE,
    mixtures::GPT_OSS,
    Family {
        class: "Olmo3ForCausalLM",
        model_type: "olmo3",
        keys: &[dense::OLMO3_KEYS, ATTENTION_BIAS, LAYER_TYPES_KEY, GROUPED, HEAD_DIM, GATED_MLP, RMS, ROPE, TRAINED],
        plan: dense::olmo3,
    },
    Family {
        class: "Exaone4ForCausalLM",
        model_type: "exaone4",
        keys: &[dense::EXAONE4_KEYS, LAYER_TYPES_KEY, GROUPED, HEAD_DIM, GATED_MLP, RMS, ROPE, TRAINED],
        plan: dense::exaone4,
    },
    Family {
        class: "SeedOssForCausalLM",
        model_type: "seed_oss",
        keys: &[dense::SEED_OSS_KEYS, ATTENTION_BIAS, MLP_BIAS, GROUPED, HEAD_DIM, GATED_MLP, RMS, ROPE, TRAINED],
        plan: dense::seed_oss,
    },
    Family {
        class: "Ernie4_5ForCausalLM",
        model_type: "ernie4_5",
        keys: &[dense::ERNIE_KEYS, GROUPED, HEAD_DIM, GATED_MLP, RMS, ROPE, TRAINED],
        plan: dense::ernie,
    },
    Family {
        class: "Glm4ForCausalLM",
        model_type: "glm4",
        keys: &[ATTENTION_BIAS, GROUPED, HEAD_DIM, GATED_MLP, RMS, ROPE, TRAINED],
        plan: dense::glm4,
    },
    Family {
        class: "Ministral3ForCausalLM",
        model_type: "ministral3",
        keys: &[dense::MINISTRAL3_KEYS, GROUPED, HEAD_DIM, GATED_MLP, RMS, ROPE, TRAINED],
        plan: dense::ministral3,
    },
    Family {
        class: "HunYuanDenseV1ForCausalLM",
        model_type: "hunyuan_v1_dense",
        keys: &[dense::HUNYUAN_KEYS, ATTENTION_BIAS, GROUPED, HEAD_DIM, GATED_MLP, RMS, ROPE, TRAINED],
        plan: dense::hunyuan,
    },
    hybrids::QWEN35,
    hybrids::QWEN35_MOE,
    hybrids::QWEN3_NEXT,
    convs::LFM2,
    convs::LFM2_MOE,
    mambas::GRANITE_HYBRID,
    mambas::NEMOTRON_H,
    mambas::FALCON_H1,
    Family {
        class: "OlmoHybridForCausalLM",
        model_type: "olmo_hybrid",
        keys: &[
            hybrids::OLMO_HYBRID_KEYS,
            hybrids::DELTA_KEYS,
            ATTENTION_BIAS,
            GROUPED,
            HEAD_DIM,
            GATED_MLP,
            RMS,
            ROPE,
            TRAINED,
        ],
        plan: hybrids::olmo_hybrid,
    },
];

const ATTENTION_BIAS: &[Entry] = &[modelled("attention_bias", "biases of the attention projections")];
const MLP_BIAS: &[Entry] = &[modelled("mlp_bias", "biases of the MLP projections")];
const LAYER_TYPES_KEY: &[Entry] = &[modelled("layer_types", "which layers have a sliding window")];

const LLAMA_KEYS: &[Entry] = &[
    neutral("pretraining_tp", When::Any, "splits products without changing them"),
    neutral("is_llama_config", ON, "written by the SmolLM exporter"),
    neutral("rope_interleaved", OFF, "pairs are half a head apart"),
    neutral("max_sequence_length", When::Any, "`max_position_embeddings` counts"),
    neutral("internal_version", When::Any, RECORD),
];
const MISTRAL_KEYS: &[Entry] = &[
    modelled("sliding_window", "window of every layer; 4096 where absent, none where null"),
    neutral("attention_bias", OFF, "the model code has no biases"),
];
const MINISTRAL_KEYS: &[Entry] = &[modelled("sliding_window", "window of sliding layers; 4096 where absent")];
const QWEN2_KEYS: &[Entry] = &[neutral("use_mrope", OFF, "a token has one position")];
const QWEN_WINDOW: &[Entry] = &[
    modelled("use_sliding_window", "whether any layer slides"),
    modelled("sliding_window", "window of sliding layers; 4096 where absent"),
    modelled("max_window_layers", "first sliding layer, where `layer_types` is absent"),
];
const PHI3_KEYS: &[Entry] = &[
    modelled("original_max_position_embeddings", "trained length, for longrope; 4096 where absent"),
    modelled("sliding_window", "window of every layer"),
    neutral("resid_pdrop", When::Any, "used in training only"),
    neutral("embd_pdrop", When::Any, "used in training only"),
    neutral("attention_bias", OFF, "the model code has no biases"),
    neutral("mlp_bias", OFF, "the model code has no biases"),
    neutral("lm_head_bias", OFF, "the model code has no biases"),
    neutral("interpolate_factor", When::Only(&[Literal::Number(1.0)]), "no interpolation"),
    neutral("full_attn_mod", When::Only(&[Literal::Number(1.0)]), "every layer is alike"),
];
const GEMMA1_KEYS: &[Entry] = &[
    modelled("intermediate_size", "width of the MLP"),
    modelled("hidden_act", "activation; `gelu`, as the first releases say, means `gelu_pytorch_tanh`"),
    neutral(
        "hidden_activation",
        When::Only(&[Literal::Text("gelu_pytorch_tanh")]),
        "the model code reads `hidden_act`",
    ),
    neutral("use_bidirectional_attention", OFF, "a decoder looks backwards only"),
];
const GEMMA_KEYS: &[Entry] = &[
    modelled("intermediate_size", "width of the MLP"),
    modelled("hidden_activation", "activation"),
    neutral("hidden_act", When::SameAs("hidden_activation"), "the model code reads `hidden_activation`"),
    modelled("query_pre_attn_scalar", "scores are divided by its square root"),
    modelled("final_logit_softcapping", "softcap of the logits"),
    modelled("sliding_window", "window of sliding layers; 4096 where absent"),
    neutral("use_bidirectional_attention", OFF, "a decoder looks backwards only"),
];
const GEMMA2_KEYS: &[Entry] = &[
    modelled("attn_logit_softcapping", "softcap of the scores; 50 where absent"),
    neutral("sliding_window_size", When::SameAs("sliding_window"), "the model code reads `sliding_window`"),
];
const GEMMA3_KEYS: &[Entry] = &[
    neutral("attn_logit_softcapping", When::Only(&[]), "the model code ignores it"),
    modelled("sliding_window_pattern", "every n-th layer is full, where `layer_types` is absent; 6 where absent"),
    neutral("_sliding_window_pattern", When::Given("layer_types"), "`layer_types` counts"),
    modelled("rope_local_base_freq", "rotary base of sliding layers (v4)"),
];
const GRANITE_KEYS: &[Entry] = &[
    modelled("embedding_multiplier", "scale of the embedding"),
    modelled("attention_multiplier", "scale of the scores"),
    modelled("residual_multiplier", "scale of both branches"),
    modelled("logits_scaling", "divides the logits"),
];
const SMOLLM3_KEYS: &[Entry] = &[
    modelled("no_rope_layers", "1 for layers with a rotary embedding"),
    modelled("no_rope_layer_interval", "every n-th layer has none, where `no_rope_layers` is absent; 4 where absent"),
    modelled("use_sliding_window", "whether any layer slides"),
    modelled("sliding_window", "window of sliding layers"),
    neutral("pretraining_tp", When::Any, "splits products without changing them"),
    neutral("max_window_layers", When::Any, "the model code reads `layer_types`"),
];
const STABLELM_KEYS: &[Entry] = &[
    modelled("use_qkv_bias", "biases of q, k and v"),
    modelled("use_parallel_residual", "both branches read the same norm"),
    modelled("qk_layernorm", "LayerNorm of each head of q and k, with gains of its own"),
];
const STARCODER2_KEYS: &[Entry] = &[
    modelled("norm_epsilon", "epsilon of every LayerNorm"),
    neutral("rms_norm_eps", When::SameAs("norm_epsilon"), "the model code reads `norm_epsilon`"),
    modelled("use_bias", "biases of all projections; true where absent"),
    modelled("sliding_window", "window of every layer"),
    neutral("residual_dropout", When::Any, "used in training only"),
    neutral("embedding_dropout", When::Any, "used in training only"),
    neutral("mlp_type", When::Only(&[Literal::Text("default")]), "the model code has a plain MLP"),
    neutral("norm_type", When::Only(&[Literal::Text("layer_norm")]), "the model code has LayerNorm"),
];
const GPT_NEOX_KEYS: &[Entry] = &[
    modelled("use_parallel_residual", "both branches read the layer's input; true where absent"),
    modelled("rotary_pct", "share of the head that is rotated (v4); 0.25 where absent"),
    modelled("rotary_emb_base", "base of the rotary frequencies (v4)"),
    neutral("partial_rotary_factor", When::SameAs("rotary_pct"), "the model code reads `rotary_pct`"),
    neutral("rope_theta", When::SameAs("rotary_emb_base"), "the model code reads `rotary_emb_base`"),
    modelled("rope_scaling", "kind of rotary scaling (v4)"),
    modelled("rope_parameters", "base, share and kind together (v5)"),
    modelled("original_max_position_embeddings", "trained length, for llama3, yarn and longrope"),
    neutral("num_steps", When::Any, RECORD),
];
const COHERE_SHARED: &[Entry] = &[
    modelled("logit_scale", "scale of the logits; 0.0625 where absent"),
    neutral("rotary_pct", When::Only(&[Literal::Number(1.0)]), "whole heads are rotated"),
    neutral("position_embedding_type", When::Only(&[Literal::Text("rope_gptj")]), "pairs are neighbours"),
    neutral("use_embedding_sharing", ON, "`tie_word_embeddings` counts"),
    neutral("use_gated_activation", ON, "the model code has a gated MLP"),
    neutral("use_parallel_block", ON, "the model code has parallel branches"),
    neutral("use_parallel_embedding", OFF, "not in the model code"),
];
const COHERE_KEYS: &[Entry] = &[
    modelled("use_qk_norm", "LayerNorm of each head of q and k, with gains of its own"),
    neutral("model_max_length", When::Any, "`max_position_embeddings` counts"),
];
const COHERE2_KEYS: &[Entry] = &[
    neutral("use_qk_norm", OFF, "not in the model code"),
    modelled("sliding_window", "window of sliding layers; 4096 where absent"),
    modelled("sliding_window_pattern", "every n-th layer is full, where `layer_types` is absent; 4 where absent"),
    neutral("_sliding_window_pattern", When::Given("layer_types"), "`layer_types` counts"),
    neutral("layer_switch", When::SameAs("sliding_window_pattern"), "`sliding_window_pattern` counts"),
    neutral(
        "order_of_interleaved_layers",
        When::Only(&[Literal::Text("local_attn_first")]),
        "`sliding_window_pattern` counts",
    ),
];

/// Extents that every family names alike.
struct Shape {
    class: &'static str,
    vocab: u32,
    hidden: u32,
    layers: u32,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    intermediate: u32,
    positions_max: u32,
}

/// How a family's class fills in extents that the config leaves out.
struct ShapeDefaults {
    class: &'static str,
    positions: u32,
    kv_heads: KvHeads,
    head_dim: HeadDim,
}

enum KvHeads {
    /// Absent or null: as many as query heads.
    SameAsHeads,
    /// Absent: this many; null: as many as query heads.
    Default(u32),
    /// The family has no such key.
    NoKey,
}

enum HeadDim {
    /// Absent or null: `hidden_size / num_attention_heads`.
    Derived,
    /// Absent: this many; null is refused, as it is by the class.
    Default(u32),
    /// The class computes nothing without it.
    Required,
    /// The family has no such key and derives it.
    NoKey,
}

fn shape(r: &mut Reader, d: ShapeDefaults) -> Option<Shape> {
    shape_with(r, d, |r| r.count_required("intermediate_size", EXTENT_MAX))
}

/// As [`shape`], for a family that has the width of its MLPs from `intermediate`.
fn shape_with(r: &mut Reader, d: ShapeDefaults, intermediate: impl Fn(&mut Reader) -> u32) -> Option<Shape> {
    shape_by(r, d, |r| r.count_required("num_hidden_layers", LAYERS_MAX), intermediate)
}

/// As [`shape_with`], for a family that has the number of its layers from `layers`.
fn shape_by(
    r: &mut Reader,
    d: ShapeDefaults,
    layers: impl Fn(&mut Reader) -> u32,
    intermediate: impl Fn(&mut Reader) -> u32,
) -> Option<Shape> {
    let reasons_before = r.reasons.len();
    let vocab = r.count_required("vocab_size", VOCAB_MAX);
    let hidden = r.count_required("hidden_size", EXTENT_MAX);
    let layers = layers(r);
    let heads = r.count_required("num_attention_heads", EXTENT_MAX);
    let intermediate = intermediate(r);
    let positions_max = r.count("max_position_embeddings", d.positions, POSITIONS_MAX);
    let kv_heads = match d.kv_heads {
        KvHeads::NoKey => heads,
        KvHeads::SameAsHeads | KvHeads::Default(_) => match (r.count_or_null("num_key_value_heads"), d.kv_heads) {
            (Answer::Is(n), _) | (Answer::Absent, KvHeads::Default(n)) => n,
            (Answer::Absent | Answer::Null, _) => heads,
        },
    };
    let head_dim = match d.head_dim {
        HeadDim::NoKey => None,
        HeadDim::Required => Some(r.count_required("head_dim", EXTENT_MAX)),
        HeadDim::Default(n) => Some(r.count("head_dim", n, EXTENT_MAX)),
        HeadDim::Derived => match r.count_or_null("head_dim") {
            Answer::Is(n) => Some(n),
            Answer::Absent | Answer::Null => None,
        },
    };
    if r.reasons.len() > reasons_before {
        return None;
    }
    let head_dim = match head_dim {
        Some(n) => n,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            let (key, expected) = ("num_attention_heads".to_string(), format!("a divisor of `hidden_size` {hidden}"));
            return r.refuse(Reason::BadValue { key, expected, found: heads.to_string() });
        }
    };
    if !heads.is_multiple_of(kv_heads) {
        let (key, expected) = ("num_key_value_heads".to_string(), format!("a divisor of {heads} query heads"));
        return r.refuse(Reason::BadValue { key, expected, found: kv_heads.to_string() });
    }
    // Fused tensors stack three projections of this width, or two of the MLP; their extents have to stay in 32 bits.
    if u64::from(heads) * u64::from(head_dim) > u64::from(EXTENT_MAX) {
        let (key, expected) = ("head_dim".to_string(), format!("at most {EXTENT_MAX} over all heads"));
        return r.refuse(Reason::BadValue { key, expected, found: head_dim.to_string() });
    }
    Some(Shape { class: d.class, vocab, hidden, layers, heads, kv_heads, head_dim, intermediate, positions_max })
}

/// The activations of `ACT2FN` that the graph expresses. `gelu_new`, `gelu_fast` and `gelu_pytorch_tanh` are one formula,
/// written in three ways.
fn activation(r: &mut Reader, key: &'static str, default: &str) -> Act {
    match r.text(key, default).as_str() {
        "silu" | "swish" => Act::Silu,
        "gelu" | "gelu_python" => Act::GeluErf,
        "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" => Act::GeluTanh,
        "relu" => Act::Relu,
        found => {
            r.reasons.push(Reason::BadValue {
                key: key.to_string(),
                expected: "one of silu, swish, gelu, gelu_python, gelu_new, gelu_fast, gelu_pytorch_tanh, relu"
                    .to_string(),
                found: format!("\"{found}\""),
            });
            Act::Silu
        }
    }
}

fn rope_rules(s: &Shape) -> RopeRules {
    RopeRules {
        class: s.class,
        head_dim: s.head_dim,
        theta_default: 10_000.0,
        theta_key: Some("rope_theta"),
        partial: Partial::Whole,
        interleaved: false,
        positions_max: s.positions_max,
        only_longrope: false,
        trained_default: None,
        always_truncates: false,
        without_effect: &[],
        absent: None,
        without_scaling: false,
    }
}

/// Every layer alike.
fn uniform(layers: u32, rope: Option<RopeId>, window: Option<u32>) -> Vec<LayerPlan> {
    vec![LayerPlan { rope, window }; layers as usize]
}

/// Which layers slide: `layer_types`, or `otherwise` where it is absent.
fn sliding_layers(r: &mut Reader, layers: u32, window: Option<u32>, otherwise: impl Fn(u32) -> bool) -> Vec<bool> {
    let sliding: Vec<bool> = match r.layer_words("layer_types", layers, &LAYER_TYPES) {
        Some(words) => words.iter().map(|&word| LAYER_TYPES[word] == "sliding_attention").collect(),
        None => (0..layers).map(otherwise).collect(),
    };
    if window.is_none() && sliding.contains(&true) {
        r.reasons.push(Reason::Conflict {
            first: "layer_types".to_string(),
            second: "sliding_window".to_string(),
            detail: "layers slide, and no window is given or it is switched off".to_string(),
        });
    }
    sliding
}

/// All layers on the first rotary table; a window where a layer slides.
fn windowed(sliding: &[bool], window: Option<u32>) -> Vec<LayerPlan> {
    let layer = |&slides: &bool| LayerPlan { rope: Some(RopeId(0)), window: window.filter(|_| slides) };
    sliding.iter().map(layer).collect()
}

/// `sliding_window` of a class with a default: absent is the default, null is none.
fn window_or_default(r: &mut Reader, default: u32) -> Option<u32> {
    match r.count_or_null("sliding_window") {
        Answer::Absent => Some(default),
        Answer::Null => None,
        Answer::Is(window) => Some(window),
    }
}

/// `sliding_window` of a class without a default.
fn window_or_none(r: &mut Reader) -> Option<u32> {
    match r.count_or_null("sliding_window") {
        Answer::Absent | Answer::Null => None,
        Answer::Is(window) => Some(window),
    }
}

/// A softcap: absent is the default of the class, null is none.
fn softcap(r: &mut Reader, key: &'static str, default: Option<f64>) -> Option<f32> {
    let cap = match r.positive_or_null(key) {
        Answer::Absent => default,
        Answer::Null => None,
        Answer::Is(cap) => Some(cap),
    };
    cap.map(|cap| cap as f32)
}

/// Values that most families name alike, with their usual defaults where a family does not override them.
struct Scalars {
    tied: bool,
    act: Act,
    eps: f64,
}

fn scalars(r: &mut Reader, tied_default: bool, act: (&'static str, &str), eps: (&'static str, f64)) -> Scalars {
    Scalars {
        tied: r.flag("tie_word_embeddings", tied_default),
        act: activation(r, act.0, act.1),
        eps: r.positive(eps.0, eps.1),
    }
}

const SILU: (&str, &str) = ("hidden_act", "silu");

/// The common ground: a pre-norm decoder with RMS norms, a gated MLP, and no multiplier.
fn plan(s: &Shape, names: &'static Names, scalars: Scalars, rope: ResolvedRope) -> Plan {
    Plan {
        class: s.class,
        names,
        prefix: Prefix::NONE,
        ignored: vec![],
        paired: false,
        vocab: s.vocab,
        hidden: s.hidden,
        intermediate: s.intermediate,
        heads: s.heads,
        kv_heads: s.kv_heads,
        head_dim: s.head_dim,
        positions_max: rope.positions_max,
        notes: rope.note.into_iter().collect(),
        tied: scalars.tied,
        norm: NormPlan { kind: NormKind::Rms, eps: scalars.eps as f32, weight_offset: 0.0, bias: false },
        qk_norm: None,
        qkv_bias: false,
        o_bias: false,
        attn_gate: None,
        sinks: None,
        mlp_bias: false,
        act: scalars.act,
        gated: true,
        parallel: false,
        embed_scale: 1.0,
        residual_scale: 1.0,
        logits_scale: 1.0,
        logits_softcap: None,
        attn_scale: f64::from(s.head_dim).powf(-0.5) as f32,
        attn_softcap: None,
        ropes: vec![rope.rope],
        layers: uniform(s.layers, Some(RopeId(0)), None),
        experts: None,
        ahead: Ahead::default(),
        delta: None,
        conv: None,
        mamba: None,
        blocks: None,
        mlp_scales: None,
        aliases: &[],
        norm_after_rope: false,
        query_scale: None,
    }
}

static LLAMA_NAMES: Names = Names {
    embed: "model.embed_tokens.weight",
    layers: "model.layers",
    final_norm: "model.norm",
    heads: &["lm_head.weight"],
    attn_norm: Some("input_layernorm"),
    attn_post_norm: None,
    mlp_norm: Some("post_attention_layernorm"),
    mlp_post_norm: None,
    projections: Projections::Separate { q: "self_attn.q_proj", k: "self_attn.k_proj", v: "self_attn.v_proj" },
    o: "self_attn.o_proj",
    q_norm: "self_attn.q_norm",
    k_norm: "self_attn.k_norm",
    gate: Some("mlp.gate_proj"),
    up: "mlp.up_proj",
    down: "mlp.down_proj",
};

fn llama(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 1e-6));
    let (bias, mlp_bias) = (r.flag("attention_bias", false), r.flag("mlp_bias", false));
    let defaults = ShapeDefaults {
        class: "LlamaForCausalLM",
        positions: 2048,
        kv_heads: KvHeads::SameAsHeads,
        head_dim: HeadDim::Derived,
    };
    let s = shape(r, defaults)?;
    let rope = rope::flat(r, &rope_rules(&s))?;
    Some(Plan { qkv_bias: bias, o_bias: bias, mlp_bias, ..plan(&s, &LLAMA_NAMES, scalars, rope) })
}

fn mistral(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 1e-6));
    let window = window_or_default(r, 4096);
    let defaults = ShapeDefaults {
        class: "MistralForCausalLM",
        positions: 131_072,
        kv_heads: KvHeads::Default(8),
        head_dim: HeadDim::Derived,
    };
    let s = shape(r, defaults)?;
    let rope = rope::flat(r, &rope_rules(&s))?;
    let layers = uniform(s.layers, Some(RopeId(0)), window);
    Some(Plan { layers, ..plan(&s, &LLAMA_NAMES, scalars, rope) })
}

fn ministral(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 1e-6));
    let window = window_or_default(r, 4096);
    let defaults = ShapeDefaults {
        class: "MinistralForCausalLM",
        positions: 131_072,
        kv_heads: KvHeads::Default(8),
        head_dim: HeadDim::Required,
    };
    let s = shape(r, defaults)?;
    let sliding = sliding_layers(r, s.layers, window, |_| window.is_some());
    let rope = rope::flat(r, &rope_rules(&s))?;
    Some(Plan { layers: windowed(&sliding, window), ..plan(&s, &LLAMA_NAMES, scalars, rope) })
}

/// Qwen 2 and 3: windows exist only under `use_sliding_window`, and from layer `max_window_layers` on.
struct QwenWindow {
    window: Option<u32>,
    first_layer: u64,
}

impl QwenWindow {
    fn read(r: &mut Reader) -> Self {
        let (used, window) = (r.flag("use_sliding_window", false), window_or_default(r, 4096));
        QwenWindow { window: window.filter(|_| used), first_layer: r.index("max_window_layers", 28) }
    }

    fn layers(&self, r: &mut Reader, layers: u32) -> Vec<LayerPlan> {
        let slides = |layer| self.window.is_some() && u64::from(layer) >= self.first_layer;
        windowed(&sliding_layers(r, layers, self.window, slides), self.window)
    }
}

fn qwen2(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 1e-6));
    let window = QwenWindow::read(r);
    let defaults = ShapeDefaults {
        class: "Qwen2ForCausalLM",
        positions: 32_768,
        kv_heads: KvHeads::Default(32),
        head_dim: HeadDim::Derived,
    };
    let s = shape(r, defaults)?;
    let layers = window.layers(r, s.layers);
    let rope = rope::flat(r, &rope_rules(&s))?;
    // The model code gives q, k and v biases and o none, whatever the config says.
    Some(Plan { qkv_bias: true, layers, ..plan(&s, &LLAMA_NAMES, scalars, rope) })
}

fn qwen3(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 1e-6));
    let (bias, window) = (r.flag("attention_bias", false), QwenWindow::read(r));
    let defaults = ShapeDefaults {
        class: "Qwen3ForCausalLM",
        positions: 32_768,
        kv_heads: KvHeads::Default(32),
        head_dim: HeadDim::Default(128),
    };
    let s = shape(r, defaults)?;
    let layers = window.layers(r, s.layers);
    let rope = rope::flat(r, &rope_rules(&s))?;
    let qk_norm = Some(QkNormSpan::Head);
    Some(Plan { qkv_bias: bias, o_bias: bias, qk_norm, layers, ..plan(&s, &LLAMA_NAMES, scalars, rope) })
}

static PHI3_NAMES: Names = Names {
    projections: Projections::Rows { qkv: "self_attn.qkv_proj" },
    gate: None,
    up: "mlp.gate_up_proj",
    ..LLAMA_NAMES
};

fn phi3(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 1e-5));
    let window = window_or_none(r);
    let defaults = ShapeDefaults {
        class: "Phi3ForCausalLM",
        positions: 4096,
        kv_heads: KvHeads::SameAsHeads,
        head_dim: HeadDim::Derived,
    };
    let s = shape(r, defaults)?;
    let partial = Partial::Factor { key: "partial_rotary_factor", default: 1.0 };
    let trained_default = Some(4096);
    let rules = RopeRules { partial, only_longrope: true, trained_default, ..rope_rules(&s) };
    let rope = rope::flat(r, &rules)?;
    let layers = uniform(s.layers, Some(RopeId(0)), window);
    Some(Plan { layers, ..plan(&s, &PHI3_NAMES, scalars, rope) })
}

fn gemma(r: &mut Reader) -> Option<Plan> {
    let act = ("hidden_act", "gelu_pytorch_tanh");
    let mut scalars = scalars(r, true, act, ("rms_norm_eps", 1e-6));
    if r.text(act.0, act.1) == "gelu" {
        scalars.act = Act::GeluTanh;
    }
    let bias = r.flag("attention_bias", false);
    let defaults = ShapeDefaults {
        class: "GemmaForCausalLM",
        positions: 8192,
        kv_heads: KvHeads::Default(16),
        head_dim: HeadDim::Default(256),
    };
    let s = shape(r, defaults)?;
    let rope = rope::flat(r, &rope_rules(&s))?;
    let plan = plan(&s, &LLAMA_NAMES, scalars, rope);
    let norm = NormPlan { weight_offset: 1.0, ..plan.norm };
    // In fp32, as for Gemma 2 and 3.
    Some(Plan { norm, qkv_bias: bias, o_bias: bias, embed_scale: f64::from(s.hidden).sqrt() as f32, ..plan })
}

static GEMMA_NAMES: Names = Names {
    attn_post_norm: Some("post_attention_layernorm"),
    mlp_norm: Some("pre_feedforward_layernorm"),
    mlp_post_norm: Some("post_feedforward_layernorm"),
    ..LLAMA_NAMES
};

/// Features that Gemma 2 and 3 share.
struct GemmaScalars {
    scalars: Scalars,
    window: Option<u32>,
    bias: bool,
    query_pre_attn_scalar: f64,
    logits_softcap: Option<f32>,
}

impl GemmaScalars {
    fn read(r: &mut Reader, logits_softcap: Option<f64>) -> Self {
        GemmaScalars {
            scalars: scalars(r, true, ("hidden_activation", "gelu_pytorch_tanh"), ("rms_norm_eps", 1e-6)),
            window: window_or_default(r, 4096),
            bias: r.flag("attention_bias", false),
            query_pre_attn_scalar: r.positive("query_pre_attn_scalar", 256.0),
            logits_softcap: softcap(r, "final_logit_softcapping", logits_softcap),
        }
    }

    fn plan(self, s: &Shape, rope: ResolvedRope) -> Plan {
        let plan = plan(s, &GEMMA_NAMES, self.scalars, rope);
        Plan {
            norm: NormPlan { weight_offset: 1.0, ..plan.norm },
            qkv_bias: self.bias,
            o_bias: self.bias,
            // In fp32: transformers rounds it to the type it runs in, and the reference runs in fp32.
            embed_scale: f64::from(s.hidden).sqrt() as f32,
            attn_scale: self.query_pre_attn_scalar.powf(-0.5) as f32,
            logits_softcap: self.logits_softcap,
            ..plan
        }
    }
}

fn gemma2(r: &mut Reader) -> Option<Plan> {
    let gemma = GemmaScalars::read(r, Some(30.0));
    let attn_softcap = softcap(r, "attn_logit_softcapping", Some(50.0));
    let window = gemma.window;
    let defaults = ShapeDefaults {
        class: "Gemma2ForCausalLM",
        positions: 8192,
        kv_heads: KvHeads::Default(4),
        head_dim: HeadDim::Default(256),
    };
    let s = shape(r, defaults)?;
    let sliding = sliding_layers(r, s.layers, window, |layer| layer.is_multiple_of(2));
    let rope = rope::flat(r, &rope_rules(&s))?;
    Some(Plan { attn_softcap, layers: windowed(&sliding, window), ..gemma.plan(&s, rope) })
}

fn gemma3(r: &mut Reader) -> Option<Plan> {
    let gemma = GemmaScalars::read(r, None);
    let (window, pattern) = (gemma.window, r.count("sliding_window_pattern", 6, LAYERS_MAX));
    let defaults = ShapeDefaults {
        class: "Gemma3ForCausalLM",
        positions: 131_072,
        kv_heads: KvHeads::Default(4),
        head_dim: HeadDim::Default(256),
    };
    let s = shape(r, defaults)?;
    let sliding = sliding_layers(r, s.layers, window, |layer| !(layer + 1).is_multiple_of(pattern));
    let full_rules = RopeRules { theta_default: 1_000_000.0, always_truncates: true, ..rope_rules(&s) };
    let sliding_rules = RopeRules { theta_key: Some("rope_local_base_freq"), always_truncates: true, ..rope_rules(&s) };
    let (full, local) = rope::per_layer_type(r, &full_rules, &sliding_rules)?;
    let ropes = vec![full.rope.clone(), local.rope];
    let notes = [&full.note, &local.note].into_iter().flatten().cloned().collect();
    let layer = |&slides: &bool| LayerPlan { rope: Some(RopeId(u32::from(slides))), window: window.filter(|_| slides) };
    Some(Plan {
        qk_norm: Some(QkNormSpan::Head),
        positions_max: full.positions_max.min(local.positions_max),
        notes,
        ropes,
        layers: sliding.iter().map(layer).collect(),
        ..gemma.plan(&s, full)
    })
}

static OLMO2_NAMES: Names = Names {
    attn_norm: None,
    attn_post_norm: Some("post_attention_layernorm"),
    mlp_norm: None,
    mlp_post_norm: Some("post_feedforward_layernorm"),
    ..LLAMA_NAMES
};

fn olmo2(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 1e-5));
    let bias = r.flag("attention_bias", false);
    let defaults = ShapeDefaults {
        class: "Olmo2ForCausalLM",
        positions: 2048,
        kv_heads: KvHeads::SameAsHeads,
        head_dim: HeadDim::Derived,
    };
    let s = shape(r, defaults)?;
    let rope = rope::flat(r, &rope_rules(&s))?;
    let qk_norm = Some(QkNormSpan::Projection);
    Some(Plan { qkv_bias: bias, o_bias: bias, qk_norm, ..plan(&s, &OLMO2_NAMES, scalars, rope) })
}

/// What models of Granite multiply by.
struct GraniteFactors {
    embed: f64,
    attention: f64,
    residual: f64,
    /// Divides logits.
    logits: f64,
}

fn granite_factors(r: &mut Reader) -> GraniteFactors {
    GraniteFactors {
        embed: r.positive("embedding_multiplier", 1.0),
        attention: r.positive("attention_multiplier", 1.0),
        residual: r.positive("residual_multiplier", 1.0),
        logits: r.positive("logits_scaling", 1.0),
    }
}

impl GraniteFactors {
    fn on(self, plan: Plan) -> Plan {
        Plan {
            embed_scale: self.embed as f32,
            attn_scale: self.attention as f32,
            residual_scale: self.residual as f32,
            logits_scale: (1.0 / self.logits) as f32,
            ..plan
        }
    }
}

fn granite(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 1e-6));
    let (bias, mlp_bias) = (r.flag("attention_bias", false), r.flag("mlp_bias", false));
    let factors = granite_factors(r);
    let defaults = ShapeDefaults {
        class: "GraniteForCausalLM",
        positions: 2048,
        kv_heads: KvHeads::SameAsHeads,
        head_dim: HeadDim::Derived,
    };
    let s = shape(r, defaults)?;
    let rope = rope::flat(r, &rope_rules(&s))?;
    Some(factors.on(Plan { qkv_bias: bias, o_bias: bias, mlp_bias, ..plan(&s, &LLAMA_NAMES, scalars, rope) }))
}

fn smollm3(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, true, SILU, ("rms_norm_eps", 1e-6));
    let (bias, mlp_bias) = (r.flag("attention_bias", false), r.flag("mlp_bias", false));
    let (used, window) = (r.flag("use_sliding_window", false), window_or_none(r));
    let interval = r.count("no_rope_layer_interval", 4, LAYERS_MAX);
    let defaults = ShapeDefaults {
        class: "SmolLM3ForCausalLM",
        positions: 32_768,
        kv_heads: KvHeads::Default(4),
        head_dim: HeadDim::Derived,
    };
    let s = shape(r, defaults)?;
    let rotated = r.layer_bits("no_rope_layers", s.layers);
    let rotated = rotated.unwrap_or((0..s.layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect());
    let window = window.filter(|_| used);
    let sliding = sliding_layers(r, s.layers, window, |layer| window.is_some() && !rotated[layer as usize]);
    let rope = rope::flat(r, &RopeRules { theta_default: 2_000_000.0, ..rope_rules(&s) })?;
    let layer = |(&rotated, &slides): (&bool, &bool)| LayerPlan {
        rope: rotated.then_some(RopeId(0)),
        window: window.filter(|_| slides),
    };
    let layers = rotated.iter().zip(&sliding).map(layer).collect();
    Some(Plan { qkv_bias: bias, o_bias: bias, mlp_bias, layers, ..plan(&s, &LLAMA_NAMES, scalars, rope) })
}

/// One norm feeds both branches.
static SHARED_NORM_NAMES: Names = Names { mlp_norm: Some("input_layernorm"), ..LLAMA_NAMES };

fn stablelm(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("layer_norm_eps", 1e-5));
    let (bias, parallel) = (r.flag("use_qkv_bias", false), r.flag("use_parallel_residual", false));
    let qk_norm = r.flag("qk_layernorm", false);
    let defaults = ShapeDefaults {
        class: "StableLmForCausalLM",
        positions: 4096,
        kv_heads: KvHeads::Default(32),
        head_dim: HeadDim::NoKey,
    };
    let s = shape(r, defaults)?;
    let partial = Partial::Factor { key: "partial_rotary_factor", default: 0.25 };
    let rope = rope::flat(r, &RopeRules { partial, ..rope_rules(&s) })?;
    let names = if parallel { &STABLELM_PARALLEL_NAMES } else { &STABLELM_NAMES };
    let plan = plan(&s, names, scalars, rope);
    let norm = NormPlan { kind: NormKind::Layer, bias: true, ..plan.norm };
    Some(Plan { norm, qkv_bias: bias, qk_norm: qk_norm.then_some(QkNormSpan::OwnGains), parallel, ..plan })
}

static STABLELM_NAMES: Names =
    Names { q_norm: "self_attn.q_layernorm.norms.{head}", k_norm: "self_attn.k_layernorm.norms.{head}", ..LLAMA_NAMES };

/// One norm feeds both branches under `use_parallel_residual`.
static STABLELM_PARALLEL_NAMES: Names = Names { mlp_norm: SHARED_NORM_NAMES.mlp_norm, ..STABLELM_NAMES };

static STARCODER2_NAMES: Names = Names { gate: None, up: "mlp.c_fc", down: "mlp.c_proj", ..LLAMA_NAMES };

fn starcoder2(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, true, ("hidden_act", "gelu_pytorch_tanh"), ("norm_epsilon", 1e-5));
    let (bias, window) = (r.flag("use_bias", true), window_or_none(r));
    let defaults = ShapeDefaults {
        class: "Starcoder2ForCausalLM",
        positions: 4096,
        kv_heads: KvHeads::Default(2),
        head_dim: HeadDim::Derived,
    };
    let s = shape(r, defaults)?;
    let rope = rope::flat(r, &rope_rules(&s))?;
    let plan = plan(&s, &STARCODER2_NAMES, scalars, rope);
    Some(Plan {
        norm: NormPlan { kind: NormKind::Layer, bias: true, ..plan.norm },
        qkv_bias: bias,
        o_bias: bias,
        mlp_bias: bias,
        gated: false,
        layers: uniform(s.layers, Some(RopeId(0)), window),
        ..plan
    })
}

static GPT_NEOX_NAMES: Names = Names {
    embed: "gpt_neox.embed_in.weight",
    layers: "gpt_neox.layers",
    final_norm: "gpt_neox.final_layer_norm",
    // transformers 5 names it `lm_head`, published checkpoints `embed_out`.
    heads: &["embed_out.weight", "lm_head.weight"],
    projections: Projections::PerHead { qkv: "attention.query_key_value" },
    o: "attention.dense",
    gate: None,
    up: "mlp.dense_h_to_4h",
    down: "mlp.dense_4h_to_h",
    ..LLAMA_NAMES
};

fn gpt_neox(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, ("hidden_act", "gelu"), ("layer_norm_eps", 1e-5));
    let (bias, parallel) = (r.flag("attention_bias", true), r.flag("use_parallel_residual", true));
    let defaults = ShapeDefaults {
        class: "GPTNeoXForCausalLM",
        positions: 2048,
        kv_heads: KvHeads::NoKey,
        head_dim: HeadDim::NoKey,
    };
    let s = shape(r, defaults)?;
    let partial = Partial::Factor { key: "rotary_pct", default: 0.25 };
    let rope = rope::flat(r, &RopeRules { theta_key: Some("rotary_emb_base"), partial, ..rope_rules(&s) })?;
    let plan = plan(&s, &GPT_NEOX_NAMES, scalars, rope);
    Some(Plan {
        norm: NormPlan { kind: NormKind::Layer, bias: true, ..plan.norm },
        qkv_bias: bias,
        o_bias: bias,
        // Not under `attention_bias`: the MLP always has biases.
        mlp_bias: true,
        gated: false,
        parallel,
        ..plan
    })
}

/// Features that Cohere 1 and 2 share.
struct CohereScalars {
    scalars: Scalars,
    bias: bool,
    logit_scale: f64,
}

impl CohereScalars {
    fn read(r: &mut Reader) -> Self {
        CohereScalars {
            scalars: scalars(r, true, SILU, ("layer_norm_eps", 1e-5)),
            bias: r.flag("attention_bias", false),
            logit_scale: r.positive("logit_scale", 0.0625),
        }
    }

    fn plan(self, s: &Shape, rope: ResolvedRope) -> Plan {
        let plan = plan(s, &SHARED_NORM_NAMES, self.scalars, rope);
        Plan {
            norm: NormPlan { kind: NormKind::Layer, bias: false, ..plan.norm },
            qkv_bias: self.bias,
            o_bias: self.bias,
            parallel: true,
            logits_scale: self.logit_scale as f32,
            ..plan
        }
    }
}

fn cohere(r: &mut Reader) -> Option<Plan> {
    let (cohere, qk_norm) = (CohereScalars::read(r), r.flag("use_qk_norm", false));
    let defaults = ShapeDefaults {
        class: "CohereForCausalLM",
        positions: 8192,
        kv_heads: KvHeads::SameAsHeads,
        head_dim: HeadDim::Derived,
    };
    let s = shape(r, defaults)?;
    let rope = rope::flat(r, &RopeRules { theta_default: 500_000.0, interleaved: true, ..rope_rules(&s) })?;
    Some(Plan { qk_norm: qk_norm.then_some(QkNormSpan::OwnGains), ..cohere.plan(&s, rope) })
}

fn cohere2(r: &mut Reader) -> Option<Plan> {
    let cohere = CohereScalars::read(r);
    let (window, pattern) = (window_or_default(r, 4096), r.count("sliding_window_pattern", 4, LAYERS_MAX));
    let defaults = ShapeDefaults {
        class: "Cohere2ForCausalLM",
        positions: 8192,
        kv_heads: KvHeads::SameAsHeads,
        head_dim: HeadDim::Derived,
    };
    let s = shape(r, defaults)?;
    let sliding = sliding_layers(r, s.layers, window, |layer| !(layer + 1).is_multiple_of(pattern));
    let rope = rope::flat(r, &RopeRules { interleaved: true, ..rope_rules(&s) })?;
    // Full layers have no rotary embedding.
    let layer = |&slides: &bool| LayerPlan { rope: slides.then_some(RopeId(0)), window: window.filter(|_| slides) };
    Some(Plan { layers: sliding.iter().map(layer).collect(), ..cohere.plan(&s, rope) })
}
