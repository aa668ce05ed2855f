//! Owns families whose layers are not all attention: most have a state in the place of a history of keys and values.
//!
//! As in `families`, defaults and effects are those of the classes of transformers 5.

use serde_json::Value;

use super::mixtures::{
    BY_SUM, EXPERT_WIDTH, EXPERTS_MAX, Mixture, NORM_TOPK, QWEN_EXPERTS, ROUTING, SPARSE_STEP, sparse_steps,
};
use super::{
    ATTENTION_BIAS, Family, HeadDim, KvHeads, LLAMA_NAMES, OLMO2_NAMES, SILU, Shape, ShapeDefaults, plan, rope_rules,
    scalars, shape, shape_with, uniform,
};
use crate::model::config::plan::{
    Ahead, DeltaNames, DeltaPlan, DeltaProjections, ExpertsPlan, Names, NormPlan, Plan, Projections, SharedPlan,
};
use crate::model::config::reader::{Answer, EXTENT_MAX, LAYERS_MAX, Reader};
use crate::model::config::reason::Reason;
use crate::model::config::rope::{self, Partial, RopeRules};
use crate::model::config::schema::{
    Entry, GATED_MLP, GROUPED, HEAD_DIM, Literal, ON, RMS, ROPE, TRAINED, When, modelled, neutral,
};
use crate::model::graph::{Act, QkNormSpan, RopeId};

/// Taps of a convolution: known ones have 3 or 4.
pub const KERNEL_MAX: u32 = 64;

/// Keys of gated delta nets.
pub const DELTA_KEYS: &[Entry] = &[
    modelled(
        "layer_types",
        "which layers have a gated delta net (`linear_attention`), and which attention (`full_attention`)",
    ),
    modelled("linear_num_key_heads", "heads of queries and keys of a gated delta net"),
    modelled("linear_num_value_heads", "value heads of a gated delta net"),
    modelled("linear_key_head_dim", "width of a head of queries and keys of a gated delta net"),
    modelled("linear_value_head_dim", "width of a value head of a gated delta net"),
    modelled("linear_conv_kernel_dim", "taps of the convolution; 4 where absent"),
];
const INIT: &str = "values before training";
pub const OLMO_HYBRID_KEYS: &[Entry] = &[
    modelled("linear_allow_neg_eigval", "whether beta is doubled; true where absent"),
    neutral("linear_a_log_min", When::Any, INIT),
    neutral("linear_a_log_max", When::Any, INIT),
    neutral("linear_dt_min", When::Any, INIT),
    neutral("linear_dt_max", When::Any, INIT),
    neutral("linear_dt_init_floor", When::Any, INIT),
];

const MIXERS: [&str; 2] = ["linear_attention", "full_attention"];

/// Extents of a gated delta net that a config leaves out.
struct DeltaDefaults {
    key_heads: u32,
    value_heads: u32,
    key_dim: u32,
    /// `None`: twice `key_dim`, whatever that is.
    value_dim: Option<u32>,
    norm_eps: f32,
}

/// The gated delta nets of `layers`, by the keys that all families share.
fn delta(
    r: &mut Reader,
    layers: Vec<bool>,
    d: DeltaDefaults,
    act: Act,
    names: &'static DeltaNames,
) -> Option<DeltaPlan> {
    let before = r.reasons.len();
    let mut extent = |key: &'static str, default: u32| match r.count_or_null(key) {
        Answer::Is(n) => n,
        Answer::Absent | Answer::Null => default,
    };
    let (key_heads, value_heads) =
        (extent("linear_num_key_heads", d.key_heads), extent("linear_num_value_heads", d.value_heads));
    let key_dim = extent("linear_key_head_dim", d.key_dim);
    let value_dim = extent("linear_value_head_dim", d.value_dim.unwrap_or(key_dim.saturating_mul(2)));
    let kernel = r.count("linear_conv_kernel_dim", 4, KERNEL_MAX);
    if act != Act::Silu {
        let (key, found) = ("hidden_act".to_string(), r.text("hidden_act", "silu"));
        let expected = "silu, as the convolution of a gated delta net has the same activation".to_string();
        r.reasons.push(Reason::BadValue { key, expected, found });
    }
    let mut bad = |key: &str, expected: String, found: String| {
        r.reasons.push(Reason::BadValue { key: key.to_string(), expected, found });
    };
    if kernel < 2 {
        bad("linear_conv_kernel_dim", "at least 2".to_string(), kernel.to_string());
    }
    if key_heads == 0 || !value_heads.is_multiple_of(key_heads) {
        bad("linear_num_value_heads", format!("a multiple of {key_heads} key heads"), value_heads.to_string());
    }
    for (heads, dim, key) in
        [(key_heads, key_dim, "linear_key_head_dim"), (value_heads, value_dim, "linear_value_head_dim")]
    {
        // Fused tensors stack four of these; their extents have to stay in 32 bits.
        if u64::from(heads) * u64::from(dim) > u64::from(EXTENT_MAX) || dim == 0 {
            bad(key, format!("1 to {EXTENT_MAX} over all heads"), dim.to_string());
        }
    }
    (r.reasons.len() == before).then_some(DeltaPlan {
        layers,
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        kernel,
        norm_eps: d.norm_eps,
        negative_eigenvalues: false,
        names,
    })
}

static OLMO_HYBRID_NAMES: DeltaNames = DeltaNames {
    attn_norm: Some("input_layernorm"),
    attn_post_norm: None,
    mlp_norm: Some("post_attention_layernorm"),
    mlp_post_norm: None,
    projections: DeltaProjections::Each {
        q: "linear_attn.q_proj",
        k: "linear_attn.k_proj",
        v: "linear_attn.v_proj",
        z: "linear_attn.g_proj",
        b: "linear_attn.b_proj",
        a: "linear_attn.a_proj",
    },
    conv: &[
        &["linear_attn.q_conv1d.weight", "linear_attn.k_conv1d.weight", "linear_attn.v_conv1d.weight"],
        &["linear_attn.conv1d.weight"],
    ],
    a_log: "linear_attn.A_log",
    dt_bias: "linear_attn.dt_bias",
    norm: "linear_attn.o_norm",
    o: "linear_attn.o_proj",
};

/// The epsilon of the norm of the output, which no key says.
const OLMO_HYBRID_GATED_EPS: f32 = 1e-5;

pub fn olmo_hybrid(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 1e-6));
    let bias = r.flag("attention_bias", false);
    let negative_eigenvalues = r.flag("linear_allow_neg_eigval", true);
    let defaults = ShapeDefaults {
        class: "OlmoHybridForCausalLM",
        positions: 65_536,
        kv_heads: KvHeads::SameAsHeads,
        head_dim: HeadDim::Derived,
    };
    let s = shape(r, defaults)?;
    let layers = match r.layer_words("layer_types", s.layers, &MIXERS) {
        Some(words) => words.into_iter().map(|word| word == 0).collect::<Vec<bool>>(),
        // Every fourth has attention; a shorter model has it in its last layer.
        None if s.layers < 4 => (0..s.layers).map(|layer| layer + 1 < s.layers).collect(),
        None => (0..s.layers).map(|layer| layer % 4 != 3).collect(),
    };
    for (mixer, key) in [(true, "linear_attention"), (false, "full_attention")] {
        if !layers.contains(&mixer) {
            let (key, expected) = ("layer_types".to_string(), format!("at least one `{key}`"));
            return r.refuse(Reason::BadValue { key, expected, found: "none".to_string() });
        }
    }
    let heads = s.heads;
    let key_heads = match r.count_or_null("linear_num_key_heads") {
        Answer::Is(n) => n,
        Answer::Absent | Answer::Null => heads,
    };
    let key_dim = (0.75 * f64::from(s.hidden) / f64::from(key_heads)) as u32;
    let norm_eps = OLMO_HYBRID_GATED_EPS;
    let widths = DeltaDefaults { key_heads: heads, value_heads: heads, key_dim, value_dim: None, norm_eps };
    let delta = delta(r, layers, widths, scalars.act, &OLMO_HYBRID_NAMES)?;
    // Also where there is no rotary embedding: the parameters have to be sound.
    let rope = rope::flat(r, &rope_rules(&s))?;
    let rotated = is_rotated(r);
    let layers = uniform(s.layers, rotated.then_some(RopeId(0)), None);
    let plan = plan(&s, &OLMO2_NAMES, scalars, rope);
    let ropes = if rotated { plan.ropes.clone() } else { vec![] };
    Some(Plan {
        qkv_bias: bias,
        o_bias: bias,
        qk_norm: Some(QkNormSpan::Projection),
        ropes,
        layers,
        delta: Some(DeltaPlan { negative_eigenvalues, ..delta }),
        // As transformers writes them: the names of its own checkpoints.
        aliases: &[("input_layernorm", "attention_layer_norm"), ("post_attention_layernorm", "feedforward_layer_norm")],
        ..plan
    })
}

/// Whether attention of OLMo-Hybrid has a rotary embedding: released checkpoints say null for its base, and an absent one is a default.
fn is_rotated(r: &mut Reader) -> bool {
    let theta = r.given("rope_theta");
    let parameters = ["rope_parameters", "rope_scaling"].into_iter().find_map(|key| r.value(key)?.as_object());
    let inner = parameters.and_then(|map| map.get("rope_theta"));
    inner.or(theta).is_none_or(|theta| !matches!(theta, Value::Null))
}

/// Dense Qwen3.5 and 3.6, text only or inside of their wrapper.
pub const QWEN35: Family = Family {
    class: "Qwen3_5ForCausalLM",
    model_type: "qwen3_5_text",
    keys: &[QWEN_KEYS, QWEN35_KEYS, DELTA_KEYS, ATTENTION_BIAS, GROUPED, HEAD_DIM, GATED_MLP, RMS, ROPE, TRAINED],
    plan: qwen35,
};
pub const QWEN35_MOE: Family = Family {
    class: "Qwen3_5MoeForCausalLM",
    model_type: "qwen3_5_moe_text",
    keys: &[
        QWEN35_MOE_KEYS,
        QWEN_MOE_KEYS,
        QWEN_KEYS,
        QWEN35_KEYS,
        DELTA_KEYS,
        EXPERT_WIDTH,
        ROUTING,
        ATTENTION_BIAS,
        GROUPED,
        HEAD_DIM,
        RMS,
        ROPE,
        TRAINED,
    ],
    plan: qwen35_moe,
};
pub const QWEN3_NEXT: Family = Family {
    class: "Qwen3NextForCausalLM",
    model_type: "qwen3_next",
    keys: &[
        QWEN_MOE_KEYS,
        QWEN_KEYS,
        DELTA_KEYS,
        SPARSE_STEP,
        EXPERT_WIDTH,
        NORM_TOPK,
        ROUTING,
        ATTENTION_BIAS,
        GROUPED,
        HEAD_DIM,
        GATED_MLP,
        RMS,
        ROPE,
        TRAINED,
    ],
    plan: qwen3_next,
};

const QWEN_KEYS: &[Entry] = &[modelled(
    "full_attention_interval",
    "every n-th layer has attention, where `layer_types` is absent; 4 where absent",
)];
const QWEN35_KEYS: &[Entry] = &[
    neutral("attn_output_gate", ON, "the model code has the gate"),
    neutral(
        "output_gate_type",
        When::Only(&[Literal::Text("swish"), Literal::Text("silu")]),
        "the gate of a gated delta net has this activation",
    ),
    neutral("mamba_ssm_dtype", When::Only(&[Literal::Text("float32")]), "states are kept in fp32"),
    neutral(
        "mtp_num_hidden_layers",
        When::Any,
        "no logit depends on layers that predict further tokens; a draft is what the files have",
    ),
    neutral(
        "mtp_use_dedicated_embeddings",
        When::Any,
        "no logit depends on layers that predict further tokens; a draft is what the files have",
    ),
];
const QWEN_MOE_KEYS: &[Entry] = &[
    modelled("num_experts", "number of experts"),
    modelled("shared_expert_intermediate_size", "width of the shared expert; 512 where absent"),
];
const QWEN35_MOE_KEYS: &[Entry] = &[
    modelled("hidden_act", "activation: silu"),
    neutral("intermediate_size", When::Any, "every layer has experts"),
    neutral("norm_topk_prob", ON, "the weights of the chosen experts are divided by their sum"),
    neutral("mlp_only_layers", When::Only(&[Literal::Empty]), "every layer has experts"),
    neutral("decoder_sparse_step", When::Only(&[Literal::Number(1.0)]), "every layer has experts"),
];

/// Attention of Qwen3-Next and Qwen3.5: the tensor of q has the output gate, too.
static QWEN_NAMES: Names = Names {
    projections: Projections::GatedQuery { q: "self_attn.q_proj", k: "self_attn.k_proj", v: "self_attn.v_proj" },
    ..LLAMA_NAMES
};

static QWEN35_DELTA: DeltaNames = DeltaNames {
    projections: DeltaProjections::Rows {
        qkv: "linear_attn.in_proj_qkv",
        z: "linear_attn.in_proj_z",
        b: "linear_attn.in_proj_b",
        a: "linear_attn.in_proj_a",
    },
    conv: &[&["linear_attn.conv1d.weight"]],
    norm: "linear_attn.norm",
    o: "linear_attn.out_proj",
    ..OLMO_HYBRID_NAMES
};

static QWEN3_NEXT_DELTA: DeltaNames = DeltaNames {
    projections: DeltaProjections::PerKeyHead { qkvz: "linear_attn.in_proj_qkvz", ba: "linear_attn.in_proj_ba" },
    ..QWEN35_DELTA
};

/// What predicts further tokens in checkpoints of Qwen.
const MTP: Ahead = Ahead { layers: 0, prefix: Some("mtp."), is_joined: true };

/// All of Qwen3-Next and Qwen3.5 but what follows the mixers.
fn qwen(r: &mut Reader, s: &Shape, names: &'static DeltaNames) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 1e-6));
    let bias = r.flag("attention_bias", false);
    let interval = r.count("full_attention_interval", 4, LAYERS_MAX);
    let layers = match r.layer_words("layer_types", s.layers, &MIXERS) {
        Some(words) => words.into_iter().map(|word| word == 0).collect(),
        None => (0..s.layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect(),
    };
    let norm_eps = scalars.eps as f32;
    let widths = DeltaDefaults { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: Some(128), norm_eps };
    let delta = delta(r, layers, widths, scalars.act, names)?;
    let partial = Partial::Factor { key: "partial_rotary_factor", default: 0.25 };
    // Positions of images; a text has one for all.
    let without_effect = &["mrope_section", "mrope_interleaved"];
    let rope = rope::flat(r, &RopeRules { partial, without_effect, ..rope_rules(s) })?;
    let plan = plan(s, &QWEN_NAMES, scalars, rope);
    let norm = NormPlan { weight_offset: 1.0, ..plan.norm };
    Some(Plan {
        norm,
        qkv_bias: bias,
        o_bias: bias,
        qk_norm: Some(QkNormSpan::Head),
        delta: Some(delta),
        ahead: MTP,
        ..plan
    })
}

/// The experts of Qwen3-Next and Qwen3.5 in `layers`.
fn qwen_experts(r: &mut Reader, layers: Vec<bool>, experts: u32, top_k: u32, normalised: bool) -> Option<ExpertsPlan> {
    let (count, top_k) =
        (r.count("num_experts", experts, EXPERTS_MAX), r.count("num_experts_per_tok", top_k, EXPERTS_MAX));
    let width = r.count("moe_intermediate_size", 512, EXTENT_MAX);
    let shared = r.count("shared_expert_intermediate_size", 512, EXTENT_MAX);
    let experts = Mixture { layers, count, top_k, width, shared: 0 }.plan(r, &QWEN_EXPERTS)?;
    Some(ExpertsPlan {
        normalise: BY_SUM.filter(|_| normalised),
        shared: Some(SharedPlan { width: shared, gated: true, scale: 1.0 }),
        ..experts
    })
}

fn qwen_shape(class: &'static str, kv_heads: u32) -> ShapeDefaults {
    ShapeDefaults { class, positions: 32_768, kv_heads: KvHeads::Default(kv_heads), head_dim: HeadDim::Default(256) }
}

fn qwen35(r: &mut Reader) -> Option<Plan> {
    let s = shape(r, qwen_shape("Qwen3_5ForCausalLM", 4))?;
    qwen(r, &s, &QWEN35_DELTA)
}

fn qwen35_moe(r: &mut Reader) -> Option<Plan> {
    // No layer has an MLP of this width.
    let s = shape_with(r, qwen_shape("Qwen3_5MoeForCausalLM", 2), |_| 1)?;
    let experts = Some(qwen_experts(r, vec![true; s.layers as usize], 256, 8, true)?);
    Some(Plan { experts, ..qwen(r, &s, &QWEN35_DELTA)? })
}

fn qwen3_next(r: &mut Reader) -> Option<Plan> {
    let s = shape(r, qwen_shape("Qwen3NextForCausalLM", 2))?;
    let normalised = r.flag("norm_topk_prob", true);
    let layers = sparse_steps(r, s.layers);
    let experts = Some(qwen_experts(r, layers, 512, 10, normalised)?);
    Some(Plan { experts, ..qwen(r, &s, &QWEN3_NEXT_DELTA)? })
}
