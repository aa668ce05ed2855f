//! Owns dense families that combine what others have in other ways: where norms stand, which layers rotate, which rows a rotation pairs.
//!
//! As in `families`, defaults and effects are those of the classes of transformers 5.

use std::sync::LazyLock;

use serde_json::{Map, Value, json};

use super::{
    HeadDim, KvHeads, LLAMA_NAMES, OLMO2_NAMES, SILU, ShapeDefaults, plan, rope_rules, scalars, shape, sliding_layers,
    uniform, window_or_default, window_or_none,
};
use crate::model::config::plan::{LayerPlan, Names, Plan};
use crate::model::config::reader::{LAYERS_MAX, Reader};
use crate::model::config::reason::Reason;
use crate::model::config::rope::{self, Partial, RopeRules};
use crate::model::config::schema::{Entry, Literal, OFF, ON, When, modelled, neutral};
use crate::model::graph::{QkNormSpan, QueryScale, RopeId};

pub const OLMO3_KEYS: &[Entry] = &[modelled("sliding_window", "window of sliding layers; 4096 where absent")];
pub const EXAONE4_KEYS: &[Entry] = &[
    modelled(
        "sliding_window",
        "window of sliding layers; 4096 where absent; null: every layer is full and has a rotary embedding",
    ),
    modelled("sliding_window_pattern", "every n-th layer is full, where `layer_types` is absent; 4 where absent"),
];
pub const SEED_OSS_KEYS: &[Entry] = &[
    modelled("attention_out_bias", "bias of the output projection of attention"),
    neutral("residual_dropout", When::Any, "used in training only"),
    neutral("pretraining_tp", When::Any, "splits products without changing them"),
];
pub const MINISTRAL3_KEYS: &[Entry] = &[modelled("sliding_window", "window of every layer")];
const ONE: When = When::Only(&[Literal::Number(1.0)]);
const NAME_OF_ID: &str = "speaks about a token that this model gives no meaning";
pub const HUNYUAN_KEYS: &[Entry] = &[
    neutral("attention_head_dim", When::SameAs("head_dim"), "`head_dim` counts"),
    neutral("mlp_bias", OFF, "the model code has no biases there"),
    neutral("use_qk_norm", ON, "the model code norms q and k"),
    neutral("use_cla", OFF, "layers do not share keys and values"),
    neutral("cla_share_factor", When::Any, "layers do not share keys and values"),
    neutral("use_mla", OFF, "attention is not latent"),
    neutral("num_experts", ONE, "a dense model"),
    neutral("dense_list", When::Any, "not in the model code"),
    neutral("norm_type", When::Only(&[Literal::Text("rms")]), "the model code has RMS norms"),
    neutral("pretraining_tp", When::Any, "splits products without changing them"),
    neutral("add_classification_head", OFF, "the head is the language model's"),
    neutral("class_num", When::Any, "speaks about heads other than the language model"),
    neutral("pool_type", When::Any, "speaks about heads other than the language model"),
    neutral("org_vocab_size", When::Any, "the vocabulary before it was padded"),
    neutral("eod_token_id", When::Any, NAME_OF_ID),
    neutral("pad_id", When::Any, NAME_OF_ID),
    neutral("im_start_id", When::Any, NAME_OF_ID),
    neutral("im_end_id", When::Any, NAME_OF_ID),
    neutral("im_newline_id", When::Any, NAME_OF_ID),
    neutral("mask_init_id", When::Any, NAME_OF_ID),
    neutral("text_start_id", When::Any, NAME_OF_ID),
    neutral("text_end_id", When::Any, NAME_OF_ID),
];
pub const ERNIE_KEYS: &[Entry] = &[modelled("use_bias", "biases of all projections; false where absent")];

pub fn olmo3(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 1e-5));
    let (bias, window) = (r.flag("attention_bias", false), window_or_default(r, 4096));
    let defaults = ShapeDefaults {
        class: "Olmo3ForCausalLM",
        positions: 2048,
        kv_heads: KvHeads::SameAsHeads,
        head_dim: HeadDim::Derived,
    };
    let s = shape(r, defaults)?;
    let sliding = sliding_layers(r, s.layers, window, |layer| !(layer + 1).is_multiple_of(4));
    let full_rules = RopeRules { theta_default: 500_000.0, always_truncates: true, ..rope_rules(&s) };
    // transformers gives the key to full layers, and leaves the default to sliding ones.
    let sliding_rules =
        RopeRules { theta_default: 500_000.0, theta_key: None, always_truncates: true, ..rope_rules(&s) };
    let (full, local) = rope::per_layer_type(r, &full_rules, &sliding_rules)?;
    let ropes = vec![full.rope.clone(), local.rope];
    let notes = [&full.note, &local.note].into_iter().flatten().cloned().collect();
    let layer = |&slides: &bool| LayerPlan { rope: Some(RopeId(u32::from(slides))), window: window.filter(|_| slides) };
    Some(Plan {
        qkv_bias: bias,
        o_bias: bias,
        qk_norm: Some(QkNormSpan::Projection),
        positions_max: full.positions_max.min(local.positions_max),
        notes,
        ropes,
        layers: sliding.iter().map(layer).collect(),
        ..plan(&s, &OLMO2_NAMES, scalars, full)
    })
}

pub fn exaone4(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 1e-5));
    let window = window_or_default(r, 4096);
    let typed = r.value("layer_types").is_some();
    // With `layer_types` it says nothing, and may be a word (`LLLG`).
    let pattern = match r.value("sliding_window_pattern") {
        _ if typed => 4,
        _ => r.count("sliding_window_pattern", 4, LAYERS_MAX),
    };
    let defaults = ShapeDefaults {
        class: "Exaone4ForCausalLM",
        positions: 2048,
        kv_heads: KvHeads::Default(32),
        head_dim: HeadDim::Derived,
    };
    let s = shape(r, defaults)?;
    if window.is_none() && !typed {
        // transformers divides by zero.
        return r.refuse(Reason::MissingKey { key: "layer_types".to_string() });
    }
    let sliding = sliding_layers(r, s.layers, window, |layer| !(layer + 1).is_multiple_of(pattern));
    let rope = rope::flat(r, &rope_rules(&s))?;
    // Beside sliding layers, full ones have no rotary embedding.
    let layer = |&slides: &bool| LayerPlan {
        rope: (slides || window.is_none()).then_some(RopeId(0)),
        window: window.filter(|_| slides),
    };
    let layers = sliding.iter().map(layer).collect();
    Some(Plan { qk_norm: Some(QkNormSpan::Head), layers, ..plan(&s, &OLMO2_NAMES, scalars, rope) })
}

pub fn seed_oss(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 1e-6));
    let (bias, o_bias) = (r.flag("attention_bias", true), r.flag("attention_out_bias", false));
    let mlp_bias = r.flag("mlp_bias", false);
    let defaults = ShapeDefaults {
        class: "SeedOssForCausalLM",
        positions: 524_288,
        kv_heads: KvHeads::Default(8),
        head_dim: HeadDim::Default(128),
    };
    let s = shape(r, defaults)?;
    let rope = rope::flat(r, &rope_rules(&s))?;
    Some(Plan { qkv_bias: bias, o_bias, mlp_bias, ..plan(&s, &LLAMA_NAMES, scalars, rope) })
}

pub fn ernie(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, true, SILU, ("rms_norm_eps", 1e-5));
    let bias = r.flag("use_bias", false);
    let defaults = ShapeDefaults {
        class: "Ernie4_5ForCausalLM",
        positions: 131_072,
        kv_heads: KvHeads::Default(2),
        head_dim: HeadDim::Default(128),
    };
    let s = shape(r, defaults)?;
    let rope = rope::flat(r, &RopeRules { theta_default: 500_000.0, interleaved: true, ..rope_rules(&s) })?;
    Some(Plan { qkv_bias: bias, o_bias: bias, mlp_bias: bias, ..plan(&s, &LLAMA_NAMES, scalars, rope) })
}

static GLM4_NAMES: Names = Names {
    attn_post_norm: Some("post_self_attn_layernorm"),
    mlp_post_norm: Some("post_mlp_layernorm"),
    gate: None,
    up: "mlp.gate_up_proj",
    ..LLAMA_NAMES
};

pub fn glm4(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 0.000_000_156_25));
    let bias = r.flag("attention_bias", true);
    let defaults = ShapeDefaults {
        class: "Glm4ForCausalLM",
        positions: 131_072,
        kv_heads: KvHeads::Default(2),
        head_dim: HeadDim::Default(128),
    };
    let s = shape(r, defaults)?;
    let partial = Partial::Factor { key: "partial_rotary_factor", default: 0.5 };
    let rope = rope::flat(r, &RopeRules { partial, interleaved: true, ..rope_rules(&s) })?;
    // The output projection never has a bias.
    Some(Plan {
        qkv_bias: bias,
        layers: uniform(s.layers, Some(RopeId(0)), None),
        ..plan(&s, &GLM4_NAMES, scalars, rope)
    })
}

/// The rotary parameters of Ministral 3 where a config has none.
static MINISTRAL3_ROPE: LazyLock<Map<String, Value>> = LazyLock::new(|| {
    let parameters = json!({
        "type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    });
    parameters.as_object().cloned().unwrap_or_default()
});

pub fn ministral3(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 1e-5));
    let window = window_or_none(r);
    let defaults = ShapeDefaults {
        class: "Ministral3ForCausalLM",
        positions: 262_144,
        kv_heads: KvHeads::Default(8),
        head_dim: HeadDim::Default(128),
    };
    let s = shape(r, defaults)?;
    // Of any kind: queries grow by the trained length.
    let without_effect = &["llama_4_scaling_beta", "max_position_embeddings", "original_max_position_embeddings"];
    let rope = rope::flat(r, &RopeRules { without_effect, absent: Some(&MINISTRAL3_ROPE), ..rope_rules(&s) })?;
    let query_scale = Some(query_scale(r, s.positions_max)?);
    let layers = uniform(s.layers, Some(RopeId(0)), window);
    Some(Plan { query_scale, layers, ..plan(&s, &LLAMA_NAMES, scalars, rope) })
}

/// How queries grow with position. Its parameters stand among the rotary ones, which are sound.
fn query_scale(r: &mut Reader, positions_max: u32) -> Option<QueryScale> {
    const BETA: &str = "llama_4_scaling_beta";
    const ORIGINAL: &str = "original_max_position_embeddings";
    let given = ["rope_scaling", "rope_parameters"].into_iter().find_map(|key| Some((key, r.value(key)?.as_object()?)));
    let (name, map) = given.filter(|(_, map)| !map.is_empty()).unwrap_or(("rope_parameters", &MINISTRAL3_ROPE));
    let beta = map.get(BETA).and_then(Value::as_f64).filter(|beta| (0.0..1e6).contains(beta));
    let Some(beta) = beta else {
        let found = map.get(BETA).map_or("nothing".to_string(), Value::to_string);
        return r.refuse(Reason::BadValue {
            key: format!("{name}.{BETA}"),
            expected: "a number from 0 on, by which queries grow with position".to_string(),
            found,
        });
    };
    let original = map.get(ORIGINAL).or(r.value(ORIGINAL)).map_or(Some(u64::from(positions_max)), Value::as_u64);
    match original.and_then(|original| u32::try_from(original).ok()).filter(|original| *original > 0) {
        Some(original) => Some(QueryScale { beta: beta as f32, original }),
        None => {
            let found = map.get(ORIGINAL).map_or("nothing".to_string(), Value::to_string);
            let (key, expected) = (format!("{name}.{ORIGINAL}"), "a count".to_string());
            r.refuse(Reason::BadValue { key, expected, found })
        }
    }
}

static HUNYUAN_NAMES: Names =
    Names { q_norm: "self_attn.query_layernorm", k_norm: "self_attn.key_layernorm", ..LLAMA_NAMES };

pub fn hunyuan(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 1e-5));
    let bias = r.flag("attention_bias", false);
    let defaults = ShapeDefaults {
        class: "HunYuanDenseV1ForCausalLM",
        positions: 2048,
        kv_heads: KvHeads::SameAsHeads,
        head_dim: HeadDim::Required,
    };
    let s = shape(r, defaults)?;
    // Under `dynamic` only the base and `alpha` count, and checkpoints have these beside them.
    let without_effect = &["alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"];
    let rope = rope::flat(r, &RopeRules { without_effect, ..rope_rules(&s) })?;
    Some(Plan {
        qkv_bias: bias,
        o_bias: bias,
        qk_norm: Some(QkNormSpan::Head),
        norm_after_rope: true,
        ..plan(&s, &HUNYUAN_NAMES, scalars, rope)
    })
}
