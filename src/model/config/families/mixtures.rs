//! Owns the families whose layers have a mixture of experts.

use serde_json::Value;

use super::{
    ATTENTION_BIAS, COHERE_SHARED, Family, GRANITE_KEYS, HeadDim, KvHeads, LAYER_TYPES_KEY, LLAMA_NAMES,
    SHARED_NORM_NAMES, SILU, Scalars, Shape, ShapeDefaults, granite_factors, plan, rope_rules, scalars, shape,
    sliding_layers, uniform, window_or_default, window_or_none, windowed,
};
use crate::model::config::plan::{
    Ahead, Each, ExpertNames, ExpertsPlan, GateUp, LayerPlan, Names, NormPlan, Plan, SharedNames, SharedPlan, Stacked,
};
use crate::model::config::reader::{Answer, EXTENT_MAX, LAYERS_MAX, Reader};
use crate::model::config::reason::Reason;
use crate::model::config::rope::{self, Partial, RopeRules};
use crate::model::config::schema::{
    Entry, GATED_MLP, GROUPED, HEAD_DIM, LAYER_NORM, Literal, OFF, ON, RMS, ROPE, TRAINED, When, modelled, neutral,
};
use crate::model::graph::{Act, ClampedSwiglu, ExpertGroups, GroupScore, NormKind, QkNormSpan, RopeId, Score};

pub const QWEN3_MOE: Family = Family {
    class: "Qwen3MoeForCausalLM",
    model_type: "qwen3_moe",
    keys: &[
        QWEN3_MOE_KEYS,
        EXPERTS_BY_TWO_NAMES,
        SPARSE_STEP,
        EXPERT_WIDTH,
        ROUTING,
        NORM_TOPK,
        ATTENTION_BIAS,
        GROUPED,
        HEAD_DIM,
        GATED_MLP,
        RMS,
        ROPE,
        TRAINED,
    ],
    plan: qwen3_moe,
};

pub const QWEN2_MOE: Family = Family {
    class: "Qwen2MoeForCausalLM",
    model_type: "qwen2_moe",
    keys: &[
        QWEN2_MOE_KEYS,
        SPARSE_STEP,
        EXPERT_WIDTH,
        ROUTING,
        NORM_TOPK,
        LAYER_TYPES_KEY,
        GROUPED,
        HEAD_DIM,
        GATED_MLP,
        RMS,
        ROPE,
        TRAINED,
    ],
    plan: qwen2_moe,
};

pub const MIXTRAL: Family = Family {
    class: "MixtralForCausalLM",
    model_type: "mixtral",
    keys: &[MIXTRAL_KEYS, EXPERTS_BY_TWO_NAMES, ROUTING, GROUPED, HEAD_DIM, GATED_MLP, RMS, ROPE, TRAINED],
    plan: mixtral,
};

pub const OLMOE: Family = Family {
    class: "OlmoeForCausalLM",
    model_type: "olmoe",
    keys: &[
        OLMOE_KEYS,
        EXPERTS_BY_TWO_NAMES,
        ROUTING,
        NORM_TOPK,
        ATTENTION_BIAS,
        GROUPED,
        GATED_MLP,
        RMS,
        ROPE,
        TRAINED,
    ],
    plan: olmoe,
};

pub const GRANITE_MOE: Family = Family {
    class: "GraniteMoeForCausalLM",
    model_type: "granitemoe",
    keys: &[GRANITE_MOE_KEYS, GRANITE_KEYS, ROUTING, ATTENTION_BIAS, GROUPED, GATED_MLP, RMS, ROPE, TRAINED],
    plan: granite_moe,
};

pub const GLM4_MOE: Family = Family {
    class: "Glm4MoeForCausalLM",
    model_type: "glm4_moe",
    keys: &[
        GLM4_MOE_KEYS,
        GROUPED_ROUTING,
        EXPERT_WIDTH,
        ROUTING,
        NORM_TOPK,
        NEXTN,
        ATTENTION_BIAS,
        GROUPED,
        HEAD_DIM,
        GATED_MLP,
        RMS,
        ROPE,
        TRAINED,
    ],
    plan: glm4_moe,
};

pub const DOTS1: Family = Family {
    class: "Dots1ForCausalLM",
    model_type: "dots1",
    keys: &[
        DOTS1_KEYS,
        GROUPED_ROUTING,
        EXPERT_WIDTH,
        ROUTING,
        NORM_TOPK,
        LAYER_TYPES_KEY,
        ATTENTION_BIAS,
        GROUPED,
        HEAD_DIM,
        GATED_MLP,
        RMS,
        ROPE,
        TRAINED,
    ],
    plan: dots1,
};

pub const MINIMAX_M2: Family = Family {
    class: "MiniMaxM2ForCausalLM",
    model_type: "minimax_m2",
    keys: &[MINIMAX_M2_KEYS, EXPERTS_BY_TWO_NAMES, ROUTING, GROUPED, HEAD_DIM, GATED_MLP, RMS, ROPE, TRAINED],
    plan: minimax_m2,
};

pub const HY_V3: Family = Family {
    class: "HYV3ForCausalLM",
    model_type: "hy_v3",
    keys: &[
        HY_V3_KEYS,
        EXPERTS_BY_TWO_NAMES,
        EXPERT_WIDTH,
        ROUTING,
        NEXTN,
        ATTENTION_BIAS,
        GROUPED,
        HEAD_DIM,
        GATED_MLP,
        RMS,
        ROPE,
        TRAINED,
    ],
    plan: hy_v3,
};

pub const ERNIE45_MOE: Family = Family {
    class: "Ernie4_5_MoeForCausalLM",
    model_type: "ernie4_5_moe",
    keys: &[ERNIE45_MOE_KEYS, EXPERT_WIDTH, ROUTING, NEXTN, GROUPED, HEAD_DIM, GATED_MLP, RMS, ROPE, TRAINED],
    plan: ernie45_moe,
};

pub const COHERE2_MOE: Family = Family {
    class: "Cohere2MoeForCausalLM",
    model_type: "cohere2_moe",
    keys: &[
        COHERE2_MOE_KEYS,
        COHERE_SHARED,
        ROUTING,
        NORM_TOPK,
        LAYER_TYPES_KEY,
        ATTENTION_BIAS,
        GROUPED,
        HEAD_DIM,
        GATED_MLP,
        LAYER_NORM,
        COHERE2_MOE_ROPE,
        TRAINED,
    ],
    plan: cohere2_moe,
};

pub const AFMOE: Family = Family {
    class: "AfmoeForCausalLM",
    model_type: "afmoe",
    keys: &[
        AFMOE_KEYS,
        EXPERTS_BY_TWO_NAMES,
        EXPERT_WIDTH,
        ROUTING,
        LAYER_TYPES_KEY,
        ATTENTION_BIAS,
        GROUPED,
        HEAD_DIM,
        GATED_MLP,
        RMS,
        ROPE,
        TRAINED,
    ],
    plan: afmoe,
};

pub const GPT_OSS: Family = Family {
    class: "GptOssForCausalLM",
    model_type: "gpt_oss",
    keys: &[
        GPT_OSS_KEYS,
        EXPERTS_BY_TWO_NAMES,
        ROUTING,
        LAYER_TYPES_KEY,
        ATTENTION_BIAS,
        GROUPED,
        HEAD_DIM,
        RMS,
        ROPE,
        TRAINED,
    ],
    plan: gpt_oss,
};

pub const ONE: When = When::Only(&[Literal::Number(1.0)]);
const SIGMOID: When = When::Only(&[Literal::Text("sigmoid")]);
const TRAINING: &str = "used in training only";

pub const ROUTING: &[Entry] = &[
    modelled("num_experts_per_tok", "experts that a token is computed by"),
    neutral("output_router_logits", When::Any, "selects what Python code returns"),
    neutral("router_aux_loss_coef", When::Any, TRAINING),
    neutral("router_jitter_noise", When::Any, TRAINING),
];
const EXPERTS_BY_TWO_NAMES: &[Entry] = &[
    modelled("num_experts", "number of experts"),
    modelled("num_local_experts", "number of experts; the same as `num_experts`"),
];
pub const EXPERT_WIDTH: &[Entry] = &[modelled("moe_intermediate_size", "width of an expert")];
pub const NORM_TOPK: &[Entry] =
    &[modelled("norm_topk_prob", "whether the weights of the chosen experts are divided by their sum")];
const NEXTN: &[Entry] =
    &[modelled("num_nextn_predict_layers", "layers after the last one that predict further tokens; they are left out")];
pub const SPARSE_STEP: &[Entry] = &[
    modelled("decoder_sparse_step", "every n-th layer has experts, the others an MLP; 1 where absent"),
    modelled("mlp_only_layers", "layers with an MLP in any case"),
];
/// Sigmoid routers with a correction and groups, as DeepSeek-V3 has them.
const GROUPED_ROUTING: &[Entry] = &[
    modelled("n_routed_experts", "number of experts"),
    modelled("num_local_experts", "number of experts; the same as `n_routed_experts`"),
    modelled("n_shared_experts", "width of the shared expert, in experts"),
    modelled("routed_scaling_factor", "multiplies the weights of the chosen experts; 1 where absent"),
    modelled("n_group", "groups of experts; 1 where absent"),
    modelled("topk_group", "groups that experts are chosen from; 1 where absent"),
    modelled("first_k_dense_replace", "first layers, which have an MLP"),
    neutral("scoring_func", SIGMOID, "the model code has a sigmoid"),
    neutral("topk_method", When::Only(&[Literal::Text("noaux_tc")]), "the model code corrects the choice"),
    neutral("moe_layer_freq", ONE, "every layer after the first ones has experts"),
    neutral("pretraining_tp", When::Any, "splits products without changing them"),
];

const QWEN3_MOE_KEYS: &[Entry] = &[
    modelled("use_sliding_window", "whether every layer slides"),
    modelled("sliding_window", "window of every layer; 4096 where absent"),
    neutral("max_window_layers", When::Any, "the model code does not read it"),
];
const QWEN2_MOE_KEYS: &[Entry] = &[
    modelled("num_experts", "number of experts"),
    modelled("shared_expert_intermediate_size", "width of the shared expert; 5632 where absent"),
    modelled("qkv_bias", "biases of q, k and v; true where absent"),
    modelled("use_sliding_window", "whether any layer slides"),
    modelled("sliding_window", "window of sliding layers; 4096 where absent"),
    modelled(
        "max_window_layers",
        "every second layer before this one slides, where `layer_types` is absent; 28 where absent",
    ),
];
const MIXTRAL_KEYS: &[Entry] = &[modelled("sliding_window", "window of every layer")];
const OLMOE_KEYS: &[Entry] = &[neutral("clip_qkv", When::Only(&[]), "clipped projections are not supported")];
const GRANITE_MOE_KEYS: &[Entry] = &[
    modelled("num_local_experts", "number of experts; 8 where absent"),
    neutral("position_embedding_type", When::Only(&[Literal::Text("rope")]), "every layer has a rotary embedding"),
];
const GLM4_MOE_KEYS: &[Entry] = &[modelled("use_qk_norm", "RMS norm of each head of q and k")];
const DOTS1_KEYS: &[Entry] = &[
    modelled("sliding_window", "window of sliding layers; 4096 where absent"),
    modelled("max_window_layers", "first sliding layer, where `layer_types` is absent; 62 where absent"),
    neutral("use_sliding_window", OFF, "`layer_types` counts"),
];
const MINIMAX_M2_KEYS: &[Entry] = &[
    modelled("rotary_dim", "rotated part of a head, where `partial_rotary_factor` is absent"),
    modelled("attn_type_list", "1 for a layer with softmax attention: all of them"),
    modelled("num_mtp_modules", "layers after the last one that predict further tokens; they are left out"),
    neutral("mtp_transformer_layers", When::Any, "speaks about the prediction of further tokens"),
    neutral("use_mtp", When::Any, "speaks about the prediction of further tokens"),
    neutral("scoring_func", SIGMOID, "the model code has a sigmoid"),
    neutral("use_routing_bias", ON, "the model code corrects the choice"),
    neutral("use_qk_norm", ON, "the model code norms q and k"),
    neutral("qk_norm_type", When::Only(&[Literal::Text("per_layer")]), "the model code norms whole projections"),
    neutral("shared_intermediate_size", When::Only(&[Literal::Number(0.0)]), "the model code has no shared expert"),
    neutral("shared_moe_mode", When::Any, "there is no shared expert"),
    neutral("mlp_intermediate_size", When::Any, "no layer has an MLP"),
    neutral("layernorm_full_attention_beta", ONE, "not in the model code"),
    neutral("layernorm_linear_attention_beta", When::Any, "no layer has linear attention"),
    neutral("layernorm_mlp_beta", ONE, "not in the model code"),
    neutral("sliding_window", When::Only(&[]), "the model code has no windows"),
    neutral("attention_bias", OFF, "the model code has no biases"),
];
const HY_V3_KEYS: &[Entry] = &[
    modelled(
        "mlp_layer_types",
        "`dense` for layers with an MLP, `sparse` for those with experts; the first is dense where absent",
    ),
    modelled("num_shared_experts", "width of the shared expert, in experts; 1 where absent"),
    modelled("router_scaling_factor", "multiplies the weights of the chosen experts; 2.826 where absent"),
    neutral("enable_moe_fp32_combine", When::Any, "where Python code rounds"),
    neutral("mlp_bias", OFF, "biases of the MLP are not supported"),
    neutral("first_k_dense_replace", ONE, "`mlp_layer_types` counts"),
    neutral("expert_hidden_dim", When::Any, "`moe_intermediate_size` counts"),
    neutral("qk_norm", ON, "the model code norms q and k"),
    neutral("route_norm", ON, "the model code divides by the sum of the weights"),
    neutral("moe_router_use_sigmoid", ON, "the model code has a sigmoid"),
    neutral("moe_router_enable_expert_bias", ON, "the model code corrects the choice"),
    neutral("enable_attention_fp32_softmax", When::Any, "where Python code rounds"),
    neutral("enable_lm_head_fp32", When::Any, "where Python code rounds"),
];
const ERNIE45_MOE_KEYS: &[Entry] = &[
    modelled("moe_num_experts", "number of experts; 64 where absent"),
    modelled("num_experts", "the same as `moe_num_experts`"),
    modelled("moe_k", "the same as `num_experts_per_tok`; 6 where both are absent"),
    modelled("moe_num_shared_experts", "width of the shared expert, in experts; 2 where absent"),
    modelled("moe_layer_start_index", "first layer with experts; 1 where absent"),
    modelled("moe_layer_end_index", "last layer with experts; -1, as where absent, is the last one"),
    modelled("moe_layer_interval", "every n-th layer has experts; 1 where absent"),
    modelled("moe_norm_min", "least sum that weights are divided by: below any sum that there can be"),
    neutral("use_bias", OFF, "biases of all projections are not supported"),
    neutral("moe_use_aux_free", ON, "the model code corrects the choice"),
    neutral("moe_gate_act", When::Only(&[Literal::Text("softmax")]), "the model code has a softmax"),
    neutral("moe_capacity", When::Any, TRAINING),
];
const COHERE2_MOE_KEYS: &[Entry] = &[
    modelled("num_experts", "number of experts; 8 where absent"),
    modelled("num_shared_experts", "width of the shared expert, in experts; 0 where absent"),
    modelled("shared_expert_combination_strategy", "`sum`, or `average` of experts and shared expert"),
    modelled("expert_selection_fn", "`softmax` or `sigmoid`"),
    modelled("mlp_layer_types", "`dense` for layers with an MLP, `sparse` for those with experts"),
    modelled("first_k_dense_replace", "first layers, which have an MLP, where `mlp_layer_types` is absent"),
    modelled("prefix_dense_intermediate_size", "width of the MLP of dense layers"),
    modelled(
        "prefix_dense_sliding_window_pattern",
        "every n-th dense layer is full, where `layer_types` is absent; 1 where absent",
    ),
    modelled("sliding_window", "window of sliding layers; 4096 where absent"),
    modelled("sliding_window_pattern", "every n-th layer is full, where `layer_types` is absent; 4 where absent"),
    modelled("rms_norm_eps", "epsilon of every norm, which is an RMS norm where it is given"),
];
/// transformers saves `rope_theta` and `rope_scaling` beside `rope_parameters`. The parameters count.
const COHERE2_MOE_ROPE: &[Entry] = &[
    modelled("rope_theta", "base of the rotary frequencies, where `rope_parameters` has none"),
    neutral("rope_scaling", When::SameAs("rope_parameters"), "the model code reads `rope_parameters`"),
    modelled(
        "rope_parameters",
        "base and kind together: default, linear, llama3, yarn; dynamic and longrope up to the trained length",
    ),
    modelled("partial_rotary_factor", "share of the head that is rotated; 1 where the family rotates whole heads"),
];

const AFMOE_KEYS: &[Entry] = &[
    modelled("num_dense_layers", "first layers, which have an MLP; 1 where absent"),
    modelled("num_shared_experts", "width of the shared expert, in experts; 2 where absent"),
    modelled("route_scale", "multiplies the weights of the chosen experts; 1 where absent"),
    modelled("global_attn_every_n_layers", "every n-th layer is full, where `layer_types` is absent; 4 where absent"),
    modelled("sliding_window", "window of sliding layers; 1024 where absent"),
    modelled("mup_enabled", "whether the embedding is multiplied by the square root of `hidden_size`"),
    neutral("route_norm", ON, "the model code divides by the sum of the weights"),
    neutral("score_func", SIGMOID, "the model code has a sigmoid"),
    neutral("n_group", ONE, "the model code has no groups"),
    neutral("topk_group", ONE, "the model code has no groups"),
    neutral("num_expert_groups", ONE, "the model code has no groups"),
    neutral("num_limited_groups", ONE, "the model code has no groups"),
    neutral("load_balance_coeff", When::Any, TRAINING),
    neutral("use_grouped_mm", When::Any, "which Python kernel; same formula"),
];
const GPT_OSS_KEYS: &[Entry] = &[
    modelled("intermediate_size", "width of an expert"),
    modelled("swiglu_limit", "clamp of gate and up; 7 where absent"),
    modelled("swiglu_alpha", "factor in the sigmoid of the gate; 1.702 where absent"),
    modelled("sliding_window", "window of sliding layers; 128 where absent"),
    neutral("hidden_act", When::Only(&[Literal::Text("silu")]), "the model code has a clamped SwiGLU"),
    neutral("experts_per_token", When::SameAs("num_experts_per_tok"), "`num_experts_per_tok` counts"),
    neutral("initial_context_length", When::Any, "the rotary parameters name the trained length"),
];

/// Experts as transformers 5 has them inside, and writes them if it is asked to.
pub const STACKED: Stacked = Stacked {
    gate_up: GateUp::Halves("mlp.experts.gate_up_proj"),
    down: "mlp.experts.down_proj",
    weight: "",
    bias: "_bias",
    transposed: false,
};

pub static QWEN_EXPERTS: ExpertNames = ExpertNames {
    router: &["mlp.gate"],
    correction: &["mlp.gate.e_score_correction_bias"],
    correction_row: false,
    each: Some(Each {
        gate: Some("mlp.experts.{expert}.gate_proj"),
        up: "mlp.experts.{expert}.up_proj",
        down: "mlp.experts.{expert}.down_proj",
    }),
    stacked: &[STACKED],
    shared: &[SharedNames {
        gate: Some("mlp.shared_expert.gate_proj"),
        up: "mlp.shared_expert.up_proj",
        down: "mlp.shared_expert.down_proj",
    }],
    shared_gate: "mlp.shared_expert_gate",
};

const SHARED_EXPERTS: SharedNames = SharedNames {
    gate: Some("mlp.shared_experts.gate_proj"),
    up: "mlp.shared_experts.up_proj",
    down: "mlp.shared_experts.down_proj",
};

static GLM_EXPERTS: ExpertNames = ExpertNames { shared: &[SHARED_EXPERTS], ..QWEN_EXPERTS };

static MIXTRAL_EXPERTS: ExpertNames = ExpertNames {
    router: &["block_sparse_moe.gate", "mlp.gate"],
    correction: &["block_sparse_moe.e_score_correction_bias", "mlp.e_score_correction_bias"],
    each: Some(Each {
        gate: Some("block_sparse_moe.experts.{expert}.w1"),
        up: "block_sparse_moe.experts.{expert}.w3",
        down: "block_sparse_moe.experts.{expert}.w2",
    }),
    ..QWEN_EXPERTS
};

pub static GRANITE_EXPERTS: ExpertNames = ExpertNames {
    router: &["block_sparse_moe.router.layer", "block_sparse_moe.router"],
    each: None,
    stacked: &[
        Stacked {
            gate_up: GateUp::Halves("block_sparse_moe.input_linear"),
            down: "block_sparse_moe.output_linear",
            weight: ".weight",
            ..STACKED
        },
        Stacked {
            gate_up: GateUp::Halves("block_sparse_moe.experts.gate_up_proj"),
            down: "block_sparse_moe.experts.down_proj",
            ..STACKED
        },
    ],
    ..QWEN_EXPERTS
};

static HY_EXPERTS: ExpertNames = ExpertNames {
    router: &["mlp.router.gate", "mlp.gate"],
    correction: &["mlp.expert_bias", "mlp.e_score_correction_bias"],
    shared: &[
        SharedNames {
            gate: Some("mlp.shared_mlp.gate_proj"),
            up: "mlp.shared_mlp.up_proj",
            down: "mlp.shared_mlp.down_proj",
        },
        SHARED_EXPERTS,
    ],
    ..QWEN_EXPERTS
};

static AFMOE_EXPERTS: ExpertNames =
    ExpertNames { router: &["mlp.router.gate"], correction: &["mlp.expert_bias"], ..GLM_EXPERTS };

static GPT_OSS_EXPERTS: ExpertNames = ExpertNames {
    router: &["mlp.router"],
    each: None,
    stacked: &[Stacked { gate_up: GateUp::Alternating("mlp.experts.gate_up_proj"), transposed: true, ..STACKED }],
    ..QWEN_EXPERTS
};

static ERNIE_EXPERTS: ExpertNames = ExpertNames {
    correction: &["mlp.moe_statics.e_score_correction_bias", "mlp.gate.moe_statics.e_score_correction_bias"],
    correction_row: true,
    ..GLM_EXPERTS
};

/// Experts of a model. Published ones have at most 512.
pub const EXPERTS_MAX: u32 = 4096;
/// Experts of all layers: bounds what a hostile config can make the importer allocate. Published models have at most 40,000.
const EXPERTS_OF_LAYERS_MAX: u64 = 1 << 18;

/// The extents of a mixture, and which layers have one.
pub struct Mixture {
    pub layers: Vec<bool>,
    pub count: u32,
    pub top_k: u32,
    pub width: u32,
    /// Width of the shared expert, in experts; 0: there is none.
    pub shared: u32,
}

impl Mixture {
    /// Experts chosen by a softmax over all of them, without anything else. `None`: their numbers make no mixture.
    pub fn plan(self, r: &mut Reader, names: &'static ExpertNames) -> Option<ExpertsPlan> {
        let Mixture { layers, count, top_k, width, shared } = self;
        if top_k > count {
            let (key, expected) =
                ("num_experts_per_tok".to_string(), format!("at most {count}, the number of experts"));
            return r.refuse(Reason::BadValue { key, expected, found: top_k.to_string() });
        }
        let extent = |what: u64, most: u64, expected: &str| {
            let (key, found) = ("num_experts".to_string(), what.to_string());
            (what > most).then(|| Reason::BadValue { key, expected: format!("at most {most} {expected}"), found })
        };
        let with = layers.iter().filter(|has| **has).count() as u64;
        // Rows of the experts of a layer lie one after another, and have to stay in 32 bits.
        let too_many = extent(with * u64::from(count), EXPERTS_OF_LAYERS_MAX, "in all layers together")
            .or_else(|| {
                extent(2 * u64::from(count) * u64::from(width), u64::from(i32::MAX as u32), "rows of a layer's experts")
            })
            .or_else(|| extent(u64::from(shared) * u64::from(width), u64::from(EXTENT_MAX), "rows of a shared expert"));
        if let Some(reason) = too_many {
            return r.refuse(reason);
        }
        let shared = (shared > 0).then_some(SharedPlan { width: shared * width, gated: false, scale: 1.0 });
        Some(ExpertsPlan {
            names,
            layers,
            count,
            width,
            top_k,
            score: Score::Softmax,
            corrected: false,
            groups: None,
            normalise: None,
            scale: 1.0,
            router_bias: false,
            bias: false,
            gated: true,
            swiglu: None,
            shared,
        })
    }
}

/// Divides by the sum of the weights and nothing more.
pub const BY_SUM: Option<f32> = Some(0.0);
/// What DeepSeek-V3 and its like add to the sum of the weights.
const TINY: f32 = 1e-20;

/// Qwen 2 and 3: every `decoder_sparse_step`-th layer has experts, but those that `mlp_only_layers` names.
pub fn sparse_steps(r: &mut Reader, layers: u32) -> Vec<bool> {
    let step = r.count("decoder_sparse_step", 1, LAYERS_MAX);
    let dense = r.layer_indices("mlp_only_layers");
    (0..layers).map(|layer| (layer + 1).is_multiple_of(step) && !dense.contains(&u64::from(layer))).collect()
}

fn qwen3_moe(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 1e-6));
    let (bias, used, window) =
        (r.flag("attention_bias", false), r.flag("use_sliding_window", false), window_or_default(r, 4096));
    let defaults = ShapeDefaults {
        class: "Qwen3MoeForCausalLM",
        positions: 32_768,
        kv_heads: KvHeads::Default(4),
        head_dim: HeadDim::Derived,
    };
    let (count, top_k) = counts(r, ["num_experts", "num_local_experts"], Some(128), 8);
    let (width, normalised) = (r.count("moe_intermediate_size", 768, EXTENT_MAX), r.flag("norm_topk_prob", false));
    let s = shape(r, defaults)?;
    let layers = sparse_steps(r, s.layers);
    let experts = Mixture { layers, count, top_k, width, shared: 0 }.plan(r, &QWEN_EXPERTS)?;
    let rope = rope::flat(r, &rope_rules(&s))?;
    Some(Plan {
        qkv_bias: bias,
        o_bias: bias,
        qk_norm: Some(QkNormSpan::Head),
        layers: uniform(s.layers, Some(RopeId(0)), window.filter(|_| used)),
        experts: Some(ExpertsPlan { normalise: BY_SUM.filter(|_| normalised), ..experts }),
        ..plan(&s, &LLAMA_NAMES, scalars, rope)
    })
}

/// The number of experts, by either of two names, and of those that a token is computed by.
fn counts(r: &mut Reader, names: [&'static str; 2], experts: Option<u32>, top_k: u32) -> (u32, u32) {
    (r.count_of_two(names, experts, EXPERTS_MAX), r.count("num_experts_per_tok", top_k, EXPERTS_MAX))
}

fn qwen2_moe(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 1e-6));
    let (bias, used) = (r.flag("qkv_bias", true), r.flag("use_sliding_window", false));
    let before = r.index("max_window_layers", 28);
    let window = match r.value("sliding_window").and_then(Value::as_u64) {
        // The class writes it where windows are switched off.
        Some(0) if !used => None,
        _ => window_or_default(r, 4096).filter(|_| used),
    };
    let defaults = ShapeDefaults {
        class: "Qwen2MoeForCausalLM",
        positions: 32_768,
        kv_heads: KvHeads::Default(16),
        head_dim: HeadDim::Derived,
    };
    let (count, top_k) = (r.count("num_experts", 60, EXPERTS_MAX), r.count("num_experts_per_tok", 4, EXPERTS_MAX));
    let (width, normalised) = (r.count("moe_intermediate_size", 1408, EXTENT_MAX), r.flag("norm_topk_prob", false));
    let shared = r.count("shared_expert_intermediate_size", 5632, EXTENT_MAX);
    let s = shape(r, defaults)?;
    let layers = sparse_steps(r, s.layers);
    let experts = Mixture { layers, count, top_k, width, shared: 0 }.plan(r, &QWEN_EXPERTS)?;
    let slides = |layer: u32| used && layer.is_multiple_of(2) && u64::from(layer) < before;
    let sliding = sliding_layers(r, s.layers, window, slides);
    let rope = rope::flat(r, &rope_rules(&s))?;
    Some(Plan {
        qkv_bias: bias,
        layers: windowed(&sliding, window),
        experts: Some(ExpertsPlan {
            normalise: BY_SUM.filter(|_| normalised),
            shared: Some(SharedPlan { width: shared, gated: true, scale: 1.0 }),
            ..experts
        }),
        ..plan(&s, &LLAMA_NAMES, scalars, rope)
    })
}

fn mixtral(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 1e-5));
    let window = window_or_none(r);
    let defaults = ShapeDefaults {
        class: "MixtralForCausalLM",
        positions: 131_072,
        kv_heads: KvHeads::Default(8),
        head_dim: HeadDim::Derived,
    };
    let (count, top_k) = counts(r, ["num_local_experts", "num_experts"], Some(8), 2);
    let s = shape(r, defaults)?;
    let experts = everywhere(&s, count, top_k).plan(r, &MIXTRAL_EXPERTS)?;
    let rope = rope::flat(r, &RopeRules { theta_default: 1_000_000.0, ..rope_rules(&s) })?;
    Some(Plan {
        layers: uniform(s.layers, Some(RopeId(0)), window),
        experts: Some(ExpertsPlan { normalise: BY_SUM, ..experts }),
        ..plan(&s, &LLAMA_NAMES, scalars, rope)
    })
}

/// Experts of the width of an MLP in every layer.
fn everywhere(s: &Shape, count: u32, top_k: u32) -> Mixture {
    Mixture { layers: vec![true; s.layers as usize], count, top_k, width: s.intermediate, shared: 0 }
}

fn olmoe(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 1e-5));
    let (bias, normalised) = (r.flag("attention_bias", false), r.flag("norm_topk_prob", false));
    let defaults = ShapeDefaults {
        class: "OlmoeForCausalLM",
        positions: 4096,
        kv_heads: KvHeads::SameAsHeads,
        head_dim: HeadDim::NoKey,
    };
    let (count, top_k) = counts(r, ["num_experts", "num_local_experts"], Some(64), 8);
    let s = shape(r, defaults)?;
    let experts = everywhere(&s, count, top_k).plan(r, &QWEN_EXPERTS)?;
    let rope = rope::flat(r, &rope_rules(&s))?;
    Some(Plan {
        qkv_bias: bias,
        o_bias: bias,
        qk_norm: Some(QkNormSpan::Projection),
        experts: Some(ExpertsPlan { normalise: BY_SUM.filter(|_| normalised), ..experts }),
        ..plan(&s, &LLAMA_NAMES, scalars, rope)
    })
}

fn granite_moe(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 1e-6));
    let bias = r.flag("attention_bias", false);
    let factors = granite_factors(r);
    let defaults = ShapeDefaults {
        class: "GraniteMoeForCausalLM",
        positions: 2048,
        kv_heads: KvHeads::SameAsHeads,
        head_dim: HeadDim::NoKey,
    };
    let (count, top_k) = (r.count("num_local_experts", 8, EXPERTS_MAX), r.count("num_experts_per_tok", 2, EXPERTS_MAX));
    let s = shape(r, defaults)?;
    let experts = everywhere(&s, count, top_k).plan(r, &GRANITE_EXPERTS)?;
    let rope = rope::flat(r, &rope_rules(&s))?;
    Some(factors.on(Plan {
        qkv_bias: bias,
        o_bias: bias,
        // A softmax over the chosen experts.
        experts: Some(ExpertsPlan { normalise: BY_SUM, ..experts }),
        ..plan(&s, &LLAMA_NAMES, scalars, rope)
    }))
}

/// Sigmoid routers with a correction and groups: GLM-4.5 and dots.llm1, as DeepSeek-V3.
pub struct GroupedRouter {
    count: u32,
    top_k: u32,
    width: u32,
    shared: u32,
    dense: u64,
    normalised: bool,
    scale: f64,
    groups: [u32; 2],
}

impl GroupedRouter {
    /// `defaults`: experts, experts of a token, width of an expert, experts that make the shared one, dense layers, and whether weights
    /// are divided by their sum. `None`: the class computes nothing without it.
    fn read(r: &mut Reader, defaults: (Option<[u32; 3]>, u32, u64, bool)) -> Self {
        let (extents, width, dense, normalised) = defaults;
        let names = ["n_routed_experts", "num_local_experts"];
        let (count, top_k, shared) = match extents {
            Some([count, top_k, shared]) => (
                r.count_of_two(names, Some(count), EXPERTS_MAX),
                r.count("num_experts_per_tok", top_k, EXPERTS_MAX),
                r.count("n_shared_experts", shared, EXPERTS_MAX),
            ),
            None => (
                r.count_of_two(names, None, EXPERTS_MAX),
                r.count_required("num_experts_per_tok", EXPERTS_MAX),
                r.count_required("n_shared_experts", EXPERTS_MAX),
            ),
        };
        let dense = r.index("first_k_dense_replace", dense);
        GroupedRouter { shared, dense, ..Self::chosen(r, count, top_k, (width, normalised)) }
    }

    /// A router of a family that says elsewhere which layers have experts, and what is beside them. `defaults`: experts, experts of a
    /// token, width of an expert, and whether weights are divided by their sum.
    pub fn read_alone(r: &mut Reader, defaults: (u32, u32, u32, bool)) -> Self {
        let (count, top_k, width, normalised) = defaults;
        let (count, top_k) = counts(r, ["n_routed_experts", "num_local_experts"], Some(count), top_k);
        Self::chosen(r, count, top_k, (width, normalised))
    }

    /// Everything but shared experts and dense layers, of which there are none.
    fn chosen(r: &mut Reader, count: u32, top_k: u32, (width, normalised): (u32, bool)) -> Self {
        // Null, which checkpoints of dots.llm1 have, is one group of all experts.
        let mut group = |key: &'static str| match r.count_or_null(key) {
            Answer::Is(n) => n,
            Answer::Absent | Answer::Null => 1,
        };
        let groups = [group("n_group"), group("topk_group")];
        GroupedRouter {
            count,
            top_k,
            width: r.count("moe_intermediate_size", width, EXTENT_MAX),
            shared: 0,
            dense: 0,
            normalised: r.flag("norm_topk_prob", normalised),
            scale: r.positive("routed_scaling_factor", 1.0),
            groups,
        }
    }

    fn plan(self, r: &mut Reader, s: &Shape) -> Option<ExpertsPlan> {
        let layers = (0..s.layers).map(|layer| u64::from(layer) >= self.dense).collect();
        self.plan_in(r, layers, &GLM_EXPERTS)
    }

    /// The experts of `layers`, whatever the number of dense ones.
    pub fn plan_in(self, r: &mut Reader, layers: Vec<bool>, names: &'static ExpertNames) -> Option<ExpertsPlan> {
        let GroupedRouter { count, top_k, width, shared, normalised, scale, groups: [groups, kept], .. } = self;
        let experts = Mixture { layers, count, top_k, width, shared }.plan(r, names)?;
        let of_group = count / groups.max(1);
        let bad = |key: &str, expected: String, found: u32| {
            Some(Reason::BadValue { key: key.to_string(), expected, found: found.to_string() })
        };
        let reason = if !count.is_multiple_of(groups) || of_group < 2 {
            bad("n_group", format!("a divisor of {count} experts that leaves two for each group"), groups)
        } else if kept > groups {
            bad("topk_group", format!("at most {groups}, the number of groups"), kept)
        } else if top_k > kept * of_group {
            bad("num_experts_per_tok", format!("at most the {} experts of {kept} groups", kept * of_group), top_k)
        } else {
            None
        };
        if let Some(reason) = reason {
            return r.refuse(reason);
        }
        let groups = ExpertGroups { count: groups, kept, score: GroupScore::SumOfTwo };
        Some(ExpertsPlan {
            score: Score::Sigmoid,
            corrected: true,
            // All groups are no choice.
            groups: Some(groups).filter(|groups| groups.kept < groups.count),
            normalise: Some(TINY).filter(|_| normalised),
            scale: scale as f32,
            ..experts
        })
    }
}

/// Layers after the last one that predict further tokens.
fn ahead(r: &mut Reader, key: &'static str, default: u64) -> Ahead {
    let layers = r.index(key, default);
    if layers > u64::from(LAYERS_MAX) {
        let expected = format!("at most {LAYERS_MAX}");
        r.reasons.push(Reason::BadValue { key: key.to_string(), expected, found: layers.to_string() });
    }
    Ahead { layers: layers.min(u64::from(LAYERS_MAX)) as u32, prefix: None, is_joined: false }
}

fn glm4_moe(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 1e-5));
    let (bias, qk_norm) = (r.flag("attention_bias", false), r.flag("use_qk_norm", false));
    let router = GroupedRouter::read(r, (Some([128, 8, 1]), 1408, 1, true));
    let ahead = ahead(r, "num_nextn_predict_layers", 1);
    let defaults = ShapeDefaults {
        class: "Glm4MoeForCausalLM",
        positions: 131_072,
        kv_heads: KvHeads::Default(8),
        head_dim: HeadDim::Derived,
    };
    let s = shape(r, defaults)?;
    let experts = Some(router.plan(r, &s)?);
    let partial = Partial::Factor { key: "partial_rotary_factor", default: 0.5 };
    let rope = rope::flat(r, &RopeRules { partial, ..rope_rules(&s) })?;
    // `o` has no bias, whatever the config says.
    let qk_norm = qk_norm.then_some(QkNormSpan::Head);
    Some(Plan { qkv_bias: bias, qk_norm, experts, ahead, ..plan(&s, &LLAMA_NAMES, scalars, rope) })
}

fn dots1(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 1e-6));
    let (bias, window) = (r.flag("attention_bias", false), window_or_default(r, 4096));
    let first_sliding = r.index("max_window_layers", 62);
    let router = GroupedRouter::read(r, (None, 1408, 0, false));
    let defaults = ShapeDefaults {
        class: "Dots1ForCausalLM",
        positions: 2048,
        kv_heads: KvHeads::Default(32),
        head_dim: HeadDim::Derived,
    };
    let s = shape(r, defaults)?;
    let experts = Some(router.plan(r, &s)?);
    let slides = |layer: u32| window.is_some() && u64::from(layer) >= first_sliding;
    let layers = windowed(&sliding_layers(r, s.layers, window, slides), window);
    let rope = rope::flat(r, &rope_rules(&s))?;
    let qk_norm = Some(QkNormSpan::Head);
    Some(Plan { qkv_bias: bias, o_bias: bias, qk_norm, layers, experts, ..plan(&s, &LLAMA_NAMES, scalars, rope) })
}

fn minimax_m2(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 1e-6));
    let defaults = ShapeDefaults {
        class: "MiniMaxM2ForCausalLM",
        positions: 196_608,
        kv_heads: KvHeads::Default(8),
        head_dim: HeadDim::Default(128),
    };
    let (count, top_k) = counts(r, ["num_local_experts", "num_experts"], Some(256), 8);
    let ahead = ahead(r, "num_mtp_modules", 0);
    let rotated = r.count_or_null("rotary_dim");
    let s = shape(r, defaults)?;
    if let Some(softmax) = r.layer_bits("attn_type_list", s.layers)
        && softmax.contains(&false)
    {
        let (key, expected) =
            ("attn_type_list".to_string(), "1 for every layer: no other attention is supported".to_string());
        return r.refuse(Reason::BadValue { key, expected, found: "0".to_string() });
    }
    let experts = everywhere(&s, count, top_k).plan(r, &MIXTRAL_EXPERTS)?;
    let default = match rotated {
        Answer::Is(rotated) => f64::from(rotated) / f64::from(s.head_dim),
        Answer::Absent | Answer::Null => 1.0,
    };
    let partial = Partial::Factor { key: "partial_rotary_factor", default };
    let rope = rope::flat(r, &RopeRules { theta_default: 5_000_000.0, partial, ..rope_rules(&s) })?;
    Some(Plan {
        qk_norm: Some(QkNormSpan::Projection),
        experts: Some(ExpertsPlan { score: Score::Sigmoid, corrected: true, normalise: BY_SUM, ..experts }),
        ahead,
        ..plan(&s, &LLAMA_NAMES, scalars, rope)
    })
}

/// Words of `mlp_layer_types`.
const MLP_TYPES: [&str; 2] = ["dense", "sparse"];

/// Which layers have experts: `mlp_layer_types`, or all but the first `dense` ones.
fn sparse_layers(r: &mut Reader, layers: u32, dense: u64) -> Vec<bool> {
    match r.layer_words("mlp_layer_types", layers, &MLP_TYPES) {
        Some(words) => words.into_iter().map(|word| MLP_TYPES[word] == "sparse").collect(),
        None => (0..layers).map(|layer| u64::from(layer) >= dense).collect(),
    }
}

fn hy_v3(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 1e-5));
    let (bias, scale) = (r.flag("attention_bias", false), r.positive("router_scaling_factor", 2.826));
    let defaults = ShapeDefaults {
        class: "HYV3ForCausalLM",
        positions: 131_072,
        kv_heads: KvHeads::Default(8),
        head_dim: HeadDim::Default(128),
    };
    let (count, top_k) = counts(r, ["num_experts", "num_local_experts"], Some(192), 8);
    let (width, shared) =
        (r.count("moe_intermediate_size", 1536, EXTENT_MAX), r.count("num_shared_experts", 1, EXPERTS_MAX));
    let ahead = ahead(r, "num_nextn_predict_layers", 0);
    let s = shape(r, defaults)?;
    let layers = sparse_layers(r, s.layers, 1);
    let experts = Mixture { layers, count, top_k, width, shared }.plan(r, &HY_EXPERTS)?;
    let rope = rope::flat(r, &RopeRules { theta_default: 11_158_840.0, ..rope_rules(&s) })?;
    let experts =
        ExpertsPlan { score: Score::Sigmoid, corrected: true, normalise: Some(TINY), scale: scale as f32, ..experts };
    Some(Plan {
        qkv_bias: bias,
        o_bias: bias,
        qk_norm: Some(QkNormSpan::Head),
        experts: Some(experts),
        ahead,
        ..plan(&s, &LLAMA_NAMES, scalars, rope)
    })
}

fn ernie45_moe(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, true, SILU, ("rms_norm_eps", 1e-5));
    let defaults = ShapeDefaults {
        class: "Ernie4_5_MoeForCausalLM",
        positions: 131_072,
        kv_heads: KvHeads::Default(4),
        head_dim: HeadDim::Derived,
    };
    let count = r.count_of_two(["moe_num_experts", "num_experts"], Some(64), EXPERTS_MAX);
    let top_k = r.count_of_two(["moe_k", "num_experts_per_tok"], Some(6), EXPERTS_MAX);
    let (width, shared) = (r.count("moe_intermediate_size", 1536, EXTENT_MAX), r.index("moe_num_shared_experts", 2));
    let (first, interval) = (r.index("moe_layer_start_index", 1), r.count("moe_layer_interval", 1, LAYERS_MAX));
    let last = match r.value("moe_layer_end_index") {
        None => None,
        Some(value) if value.as_i64() == Some(-1) => None,
        Some(_) => Some(r.index("moe_layer_end_index", 0)),
    };
    let least = r.positive("moe_norm_min", 1e-12);
    let ahead = Ahead { prefix: Some("model.mtp_"), ..ahead(r, "num_nextn_predict_layers", 0) };
    let s = shape(r, defaults)?;
    // The sum of the chosen of `count` probabilities that add up to 1, corrected or not, is far above; see [`Router::normalise`].
    if least > 1e-9 {
        let (key, expected) = ("moe_norm_min".to_string(), "at most 1e-9".to_string());
        return r.refuse(Reason::BadValue { key, expected, found: least.to_string() });
    }
    let with = |layer: u32| {
        let at = u64::from(layer);
        (layer + 1).is_multiple_of(interval) && at >= first && last.is_none_or(|last| at <= last)
    };
    let layers = (0..s.layers).map(with).collect();
    let shared = u32::try_from(shared).unwrap_or(u32::MAX);
    let experts = Mixture { layers, count, top_k, width, shared }.plan(r, &ERNIE_EXPERTS)?;
    let rope = rope::flat(r, &RopeRules { theta_default: 500_000.0, interleaved: true, ..rope_rules(&s) })?;
    let experts = Some(ExpertsPlan { corrected: true, normalise: BY_SUM, ..experts });
    Some(Plan { experts, ahead, ..plan(&s, &LLAMA_NAMES, scalars, rope) })
}

fn cohere2_moe(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, true, SILU, ("layer_norm_eps", 1e-5));
    let (bias, logit_scale) = (r.flag("attention_bias", false), r.positive("logit_scale", 0.0625));
    let window = window_or_default(r, 4096);
    let pattern = r.count("sliding_window_pattern", 4, LAYERS_MAX);
    let dense_pattern = r.count("prefix_dense_sliding_window_pattern", 1, LAYERS_MAX);
    let (dense, dense_width) = (r.index("first_k_dense_replace", 0), r.count_or_null("prefix_dense_intermediate_size"));
    let rms_eps = r.positive_or_null("rms_norm_eps");
    let (count, top_k) = (r.count("num_experts", 8, EXPERTS_MAX), r.count("num_experts_per_tok", 2, EXPERTS_MAX));
    let (shared, normalised) = (r.index("num_shared_experts", 0), r.flag("norm_topk_prob", true));
    let (averaged, score) = (
        r.one_of("shared_expert_combination_strategy", ["average", "sum"]) == 0,
        [Score::Softmax, Score::Sigmoid][r.one_of("expert_selection_fn", ["softmax", "sigmoid"])],
    );
    let defaults = ShapeDefaults {
        class: "Cohere2MoeForCausalLM",
        positions: 8192,
        kv_heads: KvHeads::SameAsHeads,
        head_dim: HeadDim::Default(128),
    };
    let s = shape(r, defaults)?;
    let sparse = sparse_layers(r, s.layers, dense);
    let slides = |layer: u32| match u64::from(layer).checked_sub(dense) {
        None => !(layer + 1).is_multiple_of(dense_pattern),
        Some(after) => !(after + 1).is_multiple_of(u64::from(pattern)),
    };
    let sliding = sliding_layers(r, s.layers, window, slides);
    // Full layers have no rotary embedding, but for dense ones that are all full.
    let layers = sliding.iter().zip(&sparse).map(|(&slides, &sparse)| LayerPlan {
        rope: (slides || !sparse && dense_pattern == 1).then_some(RopeId(0)),
        window: window.filter(|_| slides),
    });
    let layers = layers.collect();
    let shared = u32::try_from(shared).unwrap_or(u32::MAX);
    let mixture = Mixture { layers: sparse, count, top_k, width: s.intermediate, shared };
    let experts = mixture.plan(r, &GLM_EXPERTS)?;
    let scale = if averaged && experts.shared.is_some() { 0.5 } else { 1.0 };
    let experts = ExpertsPlan {
        score,
        // A softmax is one over the chosen experts.
        normalise: BY_SUM.filter(|_| normalised || score == Score::Softmax),
        scale,
        shared: experts.shared.map(|shared| SharedPlan { scale, ..shared }),
        ..experts
    };
    let rope = rope::flat(r, &RopeRules { interleaved: true, without_scaling: true, ..rope_rules(&s) })?;
    let plan = plan(&s, &SHARED_NORM_NAMES, scalars, rope);
    let norm = match rms_eps {
        Answer::Is(eps) => NormPlan { eps: eps as f32, ..plan.norm },
        Answer::Absent | Answer::Null => NormPlan { kind: NormKind::Layer, ..plan.norm },
    };
    let intermediate = match dense_width {
        Answer::Is(width) => width,
        Answer::Absent | Answer::Null => s.intermediate,
    };
    Some(Plan {
        norm,
        intermediate,
        qkv_bias: bias,
        o_bias: bias,
        parallel: true,
        logits_scale: logit_scale as f32,
        layers,
        experts: Some(experts),
        ..plan
    })
}

/// Norms before and after attention and experts.
static AFMOE_NAMES: Names = Names {
    attn_post_norm: Some("post_attention_layernorm"),
    mlp_norm: Some("pre_mlp_layernorm"),
    mlp_post_norm: Some("post_mlp_layernorm"),
    ..LLAMA_NAMES
};

fn afmoe(r: &mut Reader) -> Option<Plan> {
    let scalars = scalars(r, false, SILU, ("rms_norm_eps", 1e-5));
    let (bias, scaled) = (r.flag("attention_bias", false), r.flag("mup_enabled", false));
    let window = window_or_default(r, 1024);
    let pattern = r.count("global_attn_every_n_layers", 4, LAYERS_MAX);
    let defaults = ShapeDefaults {
        class: "AfmoeForCausalLM",
        positions: 16_384,
        kv_heads: KvHeads::SameAsHeads,
        head_dim: HeadDim::Default(128),
    };
    let (count, top_k) = counts(r, ["num_experts", "num_local_experts"], Some(64), 6);
    let (width, shared) =
        (r.count("moe_intermediate_size", 1408, EXTENT_MAX), r.count("num_shared_experts", 2, EXPERTS_MAX));
    let (dense, scale) = (r.index("num_dense_layers", 1), r.positive("route_scale", 1.0));
    let s = shape(r, defaults)?;
    let layers = (0..s.layers).map(|layer| u64::from(layer) >= dense).collect();
    let experts = Mixture { layers, count, top_k, width, shared }.plan(r, &AFMOE_EXPERTS)?;
    let sliding = sliding_layers(r, s.layers, window, |layer| !(layer + 1).is_multiple_of(pattern));
    let rope = rope::flat(r, &rope_rules(&s))?;
    // Full layers have no rotary embedding.
    let layer = |&slides: &bool| LayerPlan { rope: slides.then_some(RopeId(0)), window: window.filter(|_| slides) };
    let experts =
        ExpertsPlan { score: Score::Sigmoid, corrected: true, normalise: Some(TINY), scale: scale as f32, ..experts };
    Some(Plan {
        qkv_bias: bias,
        o_bias: bias,
        attn_gate: Some("self_attn.gate_proj"),
        qk_norm: Some(QkNormSpan::Head),
        embed_scale: if scaled { f64::from(s.hidden).sqrt() as f32 } else { 1.0 },
        layers: sliding.iter().map(layer).collect(),
        experts: Some(experts),
        ..plan(&s, &AFMOE_NAMES, scalars, rope)
    })
}

fn gpt_oss(r: &mut Reader) -> Option<Plan> {
    let scalars =
        Scalars { tied: r.flag("tie_word_embeddings", false), act: Act::Silu, eps: r.positive("rms_norm_eps", 1e-5) };
    let (bias, window) = (r.flag("attention_bias", true), window_or_default(r, 128));
    let swiglu = ClampedSwiglu {
        alpha: r.positive("swiglu_alpha", 1.702) as f32,
        limit: r.positive("swiglu_limit", 7.0) as f32,
    };
    let defaults = ShapeDefaults {
        class: "GptOssForCausalLM",
        positions: 131_072,
        kv_heads: KvHeads::Default(8),
        head_dim: HeadDim::Default(64),
    };
    let (count, top_k) = counts(r, ["num_local_experts", "num_experts"], Some(128), 4);
    let s = shape(r, defaults)?;
    let experts = everywhere(&s, count, top_k).plan(r, &GPT_OSS_EXPERTS)?;
    let sliding = sliding_layers(r, s.layers, window, |layer| layer.is_multiple_of(2));
    if r.value("rope_scaling").is_none() && r.value("rope_parameters").is_none() {
        // The class would fill in YaRN.
        return r.refuse(Reason::MissingKey { key: "rope_scaling".to_string() });
    }
    let rope = rope::flat(r, &RopeRules { theta_default: 150_000.0, ..rope_rules(&s) })?;
    Some(Plan {
        qkv_bias: bias,
        o_bias: bias,
        sinks: Some("self_attn.sinks"),
        layers: windowed(&sliding, window),
        // A softmax over the chosen experts.
        experts: Some(ExpertsPlan {
            normalise: BY_SUM,
            router_bias: true,
            bias: true,
            swiglu: Some(swiglu),
            ..experts
        }),
        ..plan(&s, &LLAMA_NAMES, scalars, rope)
    })
}
