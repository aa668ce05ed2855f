//! Owns families whose layers are not all attention: most have a state in the place of a history of keys and values.
//!
//! As in `families`, defaults and effects are those of the classes of transformers 5.

use serde_json::Value;

use super::{HeadDim, KvHeads, OLMO2_NAMES, SILU, ShapeDefaults, plan, rope_rules, scalars, shape, uniform};
use crate::model::config::plan::{DeltaNames, DeltaPlan, DeltaProjections, Plan};
use crate::model::config::reader::{Answer, EXTENT_MAX, Reader};
use crate::model::config::reason::Reason;
use crate::model::config::rope;
use crate::model::config::schema::{Entry, When, modelled, neutral};
use crate::model::graph::{Act, QkNormSpan, RopeId};

/// Taps of a convolution: known ones have 4.
const KERNEL_MAX: u32 = 64;

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
