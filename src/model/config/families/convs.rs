//! Owns families with gated short convolutions: LFM2, dense and with experts.
//!
//! As in `families`, defaults and effects are those of the classes of transformers 5.

use super::hybrids::KERNEL_MAX;
use super::mixtures::{EXPERT_WIDTH, EXPERTS_MAX, Mixture, NORM_TOPK, ROUTING, STACKED};
use super::{
    Family, HeadDim, KvHeads, LLAMA_NAMES, Scalars, Shape, ShapeDefaults, plan, rope_rules, shape, shape_with,
};
use crate::model::config::plan::{ConvPlan, Each, ExpertNames, ExpertsPlan, GateUp, Names, Plan, Projections, Stacked};
use crate::model::config::reader::{EXTENT_MAX, Reader};
use crate::model::config::reason::Reason;
use crate::model::config::rope::{self, RopeRules};
use crate::model::config::schema::{Entry, GROUPED, HEAD_DIM, ON, ROPE, TRAINED, When, modelled, neutral};
use crate::model::graph::{Act, QkNormSpan, Score};

pub const LFM2: Family = Family {
    class: "Lfm2ForCausalLM",
    model_type: "lfm2",
    keys: &[LFM2_KEYS, CONV_KEYS, GROUPED, HEAD_DIM, ROPE, TRAINED],
    plan: lfm2,
};
pub const LFM2_MOE: Family = Family {
    class: "Lfm2MoeForCausalLM",
    model_type: "lfm2_moe",
    keys: &[LFM2_MOE_KEYS, CONV_KEYS, EXPERT_WIDTH, ROUTING, NORM_TOPK, GROUPED, HEAD_DIM, ROPE, TRAINED],
    plan: lfm2_moe,
};

const INIT: &str = "values before training";
const CONV_KEYS: &[Entry] = &[
    modelled("layer_types", "which layers have a short convolution (`conv`), and which attention (`full_attention`)"),
    modelled("conv_L_cache", "taps of a short convolution; 3 where absent"),
    modelled("conv_bias", "biases of short convolutions and their projections"),
    modelled("norm_eps", "epsilon of every RMS norm"),
    modelled("intermediate_size", "width of the MLP"),
    modelled("tie_embedding", "whether the head is the embedding; before `tie_word_embeddings`"),
    neutral("block_norm_eps", When::SameAs("norm_eps"), "the model code reads `norm_eps`"),
    neutral("theta", When::SameAs("rope_theta"), "the model code reads `rope_theta`"),
    neutral("num_heads", When::SameAs("num_attention_heads"), "the model code reads `num_attention_heads`"),
    neutral("block_dim", When::SameAs("hidden_size"), "the model code reads `hidden_size`"),
    neutral("conv_dim", When::SameAs("hidden_size"), "the model code reads `hidden_size`"),
    neutral("conv_dim_out", When::SameAs("hidden_size"), "the model code reads `hidden_size`"),
    neutral("block_use_swiglu", ON, "the model code has a gated MLP"),
    neutral("use_pos_enc", ON, "the model code has a rotary embedding"),
    neutral("block_mlp_init_scale", When::Any, INIT),
    neutral("block_out_init_scale", When::Any, INIT),
    neutral("block_use_xavier_init", When::Any, INIT),
    neutral("conv_use_xavier_init", When::Any, INIT),
];
const LFM2_KEYS: &[Entry] = &[
    modelled("full_attn_idxs", "layers with attention, where `layer_types` is absent; all where this is absent, too"),
    modelled("block_ff_dim", "width of the MLP; before `intermediate_size`"),
    modelled("block_auto_adjust_ff_dim", "whether two thirds of the width count; true where absent"),
    modelled("block_ffn_dim_multiplier", "multiplies the two thirds; 1 where absent"),
    modelled("block_multiple_of", "what the result is rounded up to a multiple of; 256 where absent"),
];
const LFM2_MOE_KEYS: &[Entry] = &[
    modelled("num_dense_layers", "first layers, which have an MLP; 2 where absent"),
    modelled("num_experts", "number of experts; 32 where absent"),
    modelled("use_expert_bias", "whether the choice of experts is corrected; true where absent"),
    modelled("routed_scaling_factor", "multiplies the weights of the chosen experts; 1 where absent"),
];

static NAMES: Names = Names {
    final_norm: "model.embedding_norm",
    attn_norm: Some("operator_norm"),
    mlp_norm: Some("ffn_norm"),
    projections: Projections::Separate { q: "self_attn.q_proj", k: "self_attn.k_proj", v: "self_attn.v_proj" },
    o: "self_attn.out_proj",
    q_norm: "self_attn.q_layernorm",
    k_norm: "self_attn.k_layernorm",
    gate: Some("feed_forward.w1"),
    up: "feed_forward.w3",
    down: "feed_forward.w2",
    ..LLAMA_NAMES
};

static EXPERTS: ExpertNames = ExpertNames {
    router: &["feed_forward.gate"],
    correction: &["feed_forward.expert_bias"],
    correction_row: false,
    each: Some(Each {
        gate: Some("feed_forward.experts.{expert}.w1"),
        up: "feed_forward.experts.{expert}.w3",
        down: "feed_forward.experts.{expert}.w2",
    }),
    stacked: &[Stacked {
        gate_up: GateUp::Halves("feed_forward.experts.gate_up_proj"),
        down: "feed_forward.experts.down_proj",
        ..STACKED
    }],
    shared: &[],
    shared_gate: "",
};

/// What is added to the sum of the weights of the chosen experts.
const NORMALISE: f32 = 1e-6;

const MIXERS: [&str; 3] = ["conv", "full_attention", "attention"];

fn defaults(class: &'static str) -> ShapeDefaults {
    ShapeDefaults { class, positions: 128_000, kv_heads: KvHeads::Default(8), head_dim: HeadDim::Derived }
}

/// All of LFM2 but what follows the mixers; `conv`: by layer, whether it has a short convolution.
fn lfm(r: &mut Reader, s: &Shape, conv: Vec<bool>) -> Option<Plan> {
    let (tied, bias) = (r.flag("tie_word_embeddings", true), r.flag("conv_bias", false));
    let tied = r.flag("tie_embedding", tied);
    let (eps, kernel) = (r.positive("norm_eps", 1e-5), r.count("conv_L_cache", 3, KERNEL_MAX));
    if kernel < 2 {
        let (key, expected) = ("conv_L_cache".to_string(), "at least 2".to_string());
        return r.refuse(Reason::BadValue { key, expected, found: kernel.to_string() });
    }
    let rope = rope::flat(r, &RopeRules { theta_default: 1_000_000.0, ..rope_rules(s) })?;
    let (in_proj, out_proj) = ("conv.in_proj", "conv.out_proj");
    Some(Plan {
        qk_norm: Some(QkNormSpan::Head),
        conv: Some(ConvPlan { layers: conv, kernel, bias, in_proj, conv: "conv.conv", out_proj }),
        ..plan(s, &NAMES, Scalars { tied, act: Act::Silu, eps }, rope)
    })
}

/// Which layers have a short convolution, by `layer_types`.
fn convolutions(r: &mut Reader, layers: u32) -> Option<Vec<bool>> {
    let words = r.layer_words("layer_types", layers, &MIXERS)?;
    Some(words.into_iter().map(|word| MIXERS[word] == "conv").collect())
}

fn lfm2(r: &mut Reader) -> Option<Plan> {
    let s = shape_with(r, defaults("Lfm2ForCausalLM"), width)?;
    let attention = r.value("full_attn_idxs").is_some().then(|| r.layer_indices("full_attn_idxs"));
    let listed = |layer: u32| attention.as_ref().is_none_or(|listed| listed.contains(&u64::from(layer)));
    let conv = convolutions(r, s.layers).unwrap_or_else(|| (0..s.layers).map(|layer| !listed(layer)).collect());
    lfm(r, &s, conv)
}

/// The width of the MLP, as `Lfm2MLP` makes it of its keys.
fn width(r: &mut Reader) -> u32 {
    let stated = match r.value("block_ff_dim").is_some() {
        true => {
            // Not read: the class takes the other key.
            r.value("intermediate_size");
            r.count("block_ff_dim", 1, EXTENT_MAX)
        }
        false => r.count_required("intermediate_size", EXTENT_MAX),
    };
    let adjusts = r.flag("block_auto_adjust_ff_dim", true);
    let factor = match r.given("block_ffn_dim_multiplier") {
        Some(value) if value.is_null() => None,
        _ => Some(r.positive("block_ffn_dim_multiplier", 1.0)),
    };
    let multiple = r.count("block_multiple_of", 256, EXTENT_MAX);
    if !adjusts {
        return stated;
    }
    let thirds = (2.0 * f64::from(stated) / 3.0) as u32;
    let Some(factor) = factor else { return thirds.max(1) };
    let wide = (factor * f64::from(thirds)) as u64;
    let rounded = wide.div_ceil(u64::from(multiple)).saturating_mul(u64::from(multiple));
    u32::try_from(rounded).ok().filter(|wide| (1..=EXTENT_MAX).contains(wide)).unwrap_or_else(|| {
        let (key, expected) = ("block_ffn_dim_multiplier".to_string(), format!("a width from 1 to {EXTENT_MAX}"));
        r.reasons.push(Reason::BadValue { key, expected, found: rounded.to_string() });
        1
    })
}

fn lfm2_moe(r: &mut Reader) -> Option<Plan> {
    let s = shape(r, defaults("Lfm2MoeForCausalLM"))?;
    let (count, top_k) = (r.count("num_experts", 32, EXPERTS_MAX), r.count("num_experts_per_tok", 4, EXPERTS_MAX));
    let (width, dense) = (r.count("moe_intermediate_size", 1792, EXTENT_MAX), r.index("num_dense_layers", 2));
    let (corrected, normalised) = (r.flag("use_expert_bias", true), r.flag("norm_topk_prob", true));
    let scale = r.positive("routed_scaling_factor", 1.0) as f32;
    let layers = (0..s.layers).map(|layer| u64::from(layer) >= dense).collect();
    let experts = Mixture { layers, count, top_k, width, shared: 0 }.plan(r, &EXPERTS)?;
    let Some(conv) = convolutions(r, s.layers) else {
        return r.refuse(Reason::MissingKey { key: "layer_types".to_string() });
    };
    let normalise = Some(NORMALISE).filter(|_| normalised);
    let experts = ExpertsPlan { score: Score::Sigmoid, corrected, normalise, scale, ..experts };
    Some(Plan { experts: Some(experts), ..lfm(r, &s, conv)? })
}
